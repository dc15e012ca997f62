"""How many tokens a block has, from rows that give both a prompt's length and its block ids."""

from collections.abc import Sequence
from typing import NamedTuple

CANDIDATES_TOKENS = tuple(2**power for power in range(2, 15))
_SURE = 0.99


class InferredBlockSize(NamedTuple):
    tokens: int
    share: float
    """Of the rows, those whose number of ids it explains."""
    partial: bool
    """Whether a last block that is not full has an id."""

    def note(self) -> str:
        rounded = "up" if self.partial else "down"
        return (
            f"block size {self.tokens} tokens, inferred: {self.share:.1%} of the rows have "
            f"input length / {self.tokens} ids, rounded {rounded}"
        )


def infer_block_size(lengths: Sequence[tuple[int, int]], usual: int) -> InferredBlockSize:
    """From (input tokens, number of ids). Of sizes that explain the rows alike, the `usual` of the format is taken."""
    best = InferredBlockSize(usual, 0.0, True)
    for tokens in dict.fromkeys((usual, *CANDIDATES_TOKENS)):
        for partial in (True, False):
            share = explained(lengths, tokens, partial)
            if share > best.share:
                best = InferredBlockSize(tokens, share, partial)
    return best


def explained(lengths: Sequence[tuple[int, int]], block_size_tokens: int, partial: bool) -> float:
    """The share of rows with as many ids as the block size says."""
    if not lengths:
        return 0.0
    extra = block_size_tokens - 1 if partial else 0
    return sum((length + extra) // block_size_tokens == count for length, count in lengths) / len(lengths)


def settle_block_size(lengths: Sequence[tuple[int, int]], usual: int, stated: int | None) -> tuple[int, list[str]]:
    """The block size to use and what to say of it."""
    inferred = infer_block_size(lengths, usual)
    if stated is None:
        note = inferred.note()
        if inferred.share < _SURE:
            note += "; the other rows hold another number of ids than their length asks for"
        return inferred.tokens, [note]
    share = max(explained(lengths, stated, partial) for partial in (True, False))
    note = f"block size {stated} tokens, as stated: it explains {share:.1%} of the rows"
    if share < inferred.share:
        note += f"; {inferred.tokens} would explain {inferred.share:.1%}"
    return stated, [note]

"""What the simulated engine says: words drawn by the prompt, so the same prompt always gets the same answer."""

import hashlib
from collections.abc import Callable, Iterator
from random import Random

from cachecore.blocks import pack_tokens
from cachecore.prompts.contract import Renderer
from workers.engine import Generation, TokenLogprob

# fmt: off
_WORDS = (
    "cable", "cabin", "slope", "ridge", "winch", "tower", "pulley", "summit", "valley", "snow", "pine", "cloud",
    "lantern", "engine", "signal", "harbour", "river", "stone", "bridge", "garden", "window", "morning",
    "evening", "north", "south", "east", "west", "copper", "silver", "amber", "quiet", "rapid", "steady",
    "narrow", "open", "early", "carries", "follows", "crosses", "passes", "reaches", "gathers", "answers",
    "returns", "under", "over", "beyond", "between", "towards", "and", "then", "while",
)
# fmt: on
_LOGPROB = -0.125
"""Of every token said: a number that survives JSON exactly."""

Voice = Callable[[Generation], Iterator[int]]


def voice_of(renderer: Renderer) -> Voice:
    """Endless token streams in the renderer's vocabulary."""
    openings = [list(renderer.encode(word.capitalize())) for word in _WORDS]
    words = [list(renderer.encode(f" {word}")) for word in _WORDS]

    def speak(generation: Generation) -> Iterator[int]:
        random = Random(_draw(generation))
        yield from random.choice(openings)
        while True:
            yield from random.choice(words)

    return speak


def logprob_of(token_id: int, alternatives: int) -> TokenLogprob:
    """Made-up scores: the token itself first, then the ids that follow it."""
    top = [(max(token_id - rank, 0), _LOGPROB - rank) for rank in range(alternatives)]
    return TokenLogprob(token_id, _LOGPROB, top)


def _draw(generation: Generation) -> int:
    seed = generation.sampling.seed or 0
    digest = hashlib.blake2b(
        pack_tokens(generation.token_ids), digest_size=8, salt=(seed % 2**64).to_bytes(8, "little")
    )
    return int.from_bytes(digest.digest(), "little")

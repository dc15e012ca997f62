"""A fast way to tokenize with byte-level BPE: words are looked up, not merged again.

A byte-level BPE tokenizer first cuts text into words with a regular expression and then tokenizes each word by itself.
So the tokens of a text are the tokens of its words, joined, and the words of real text repeat: finding them with `re`
and looking each up costs about a tenth of what the tokenizer needs.

This holds where Python cuts exactly as the tokenizer does. Python knows no Unicode categories such as `\\p{L}`; on
ASCII they are plain ranges. The patterns of the model families that matter are known here by their full text, each
beside its ASCII equivalent; any other tokenizer, and any text that is not ASCII, goes the usual way. Long texts are
taken in chunks that end between an ASCII letter and a space before another letter, where each of these patterns ends a
word, so an accent slows down its own chunk alone.
"""

import itertools
import json
import re
import sys
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer

from cachecore.prompts.native import words as native
from cachecore.prompts.segments import added_tokens, common_prefix

CHUNK_CHARACTERS = 1024
CHUNKS_PER_YIELD = 16
YIELD_SECONDS = 50e-6
"""How long a thread that encodes a long text lets go of the GIL now and then. Without it the event loop waits 5 ms each
time it wakes; with no time at all this thread has the GIL back before the loop's thread is awake."""
LOOKED_UP_CHARACTERS_MAX = 2**14
"""A longer chunk holds no two words in a row: no prose, and better tokenized where the GIL is not held."""
HEADS_CACHED_MAX = 1024
HEAD_CHARACTERS_CACHED_MAX = 256
WORDS_CACHED_MAX = 65_536
WORD_CHARACTERS_CACHED_MAX = 64

# Plain words stand first, as they are what most matches are; nothing else begins like one.
_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_CONTRACTION = "'(?:[stmd]|re|ve|ll)"
_CONTRACTION_ANY_CASE = "'(?i:[stmd]|re|ve|ll)"
_SPACE = r"[\t-\r ]"
_NOT_SPACE = r"[^\t-\r ]"
_SPACES = rf"{_SPACE}+(?!{_NOT_SPACE})|{_SPACE}+"
_GPT2 = rf" ?[A-Za-z]+|{_CONTRACTION}| ?[0-9]+| ?[^\t-\r A-Za-z0-9]+|{_SPACES}"
# Digits are taken out first, one by one, so a run of spaces before a digit ends a piece as it does before the end.
_GPT2_DIGITS = rf" ?[A-Za-z]+|{_CONTRACTION}|[0-9]| ?[^\t-\r A-Za-z0-9]+|{_SPACE}+(?![^\t-\r 0-9])|{_SPACE}+"
_LINES = rf"{_SPACE}*[\r\n]+|{_SPACES}"
_LETTERS_DIGITS = (
    rf" ?[A-Za-z]+|{_CONTRACTION_ANY_CASE}|[^\r\nA-Za-z0-9][A-Za-z]+|[0-9]{{}}| ?[^\t-\r A-Za-z0-9]+[\r\n]*|{_LINES}"
)
_ENDING = rf"(?:{_CONTRACTION_ANY_CASE})?"
_CASED = (
    rf"[^\r\nA-Za-z0-9]?[A-Z]*[a-z]+{_ENDING}|[^\r\nA-Za-z0-9]?[A-Z]+[a-z]*{_ENDING}"
    rf"|[0-9]{{1,3}}| ?[^\t-\r A-Za-z0-9]+[\r\n/]*|{_LINES}"
)

_SPLIT_HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SPLIT_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPLIT_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:{_CONTRACTIONS})?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:{_CONTRACTIONS})?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KNOWN_SPLITS = {
    _SPLIT_HEAD + r"\p{N}{1,3}" + _SPLIT_TAIL: _LETTERS_DIGITS.replace("{}", "{1,3}"),  # Llama 3 and its kin
    _SPLIT_HEAD + r"\p{N}" + _SPLIT_TAIL: _LETTERS_DIGITS.replace("{}", ""),  # Qwen 2 and its kin
    _SPLIT_CASED: _CASED,  # o200k
}

NATIVE_PATTERNS = (_GPT2, _GPT2_DIGITS, _LETTERS_DIGITS.replace("{}", "{1,3}"), _LETTERS_DIGITS.replace("{}", ""))
"""Those that `cachecore.prompts.native` cuts by, in its order."""

_CHUNK_END = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")
_BYTE_LEVEL = str.maketrans({chr(code): chr(256 + place) for place, code in enumerate((*range(33), 127))})
"""How byte-level tokenizers write the ASCII characters that are not printable."""
_PROBE_CHARACTERS = ("a", "B", "s", "1", "2", "'", " ", "\n", "\r", "\t", "!", "/", "<", "\x1c", "\x7f")


class WordEncoder:
    """Encodes text between added tokens. Safe to share between threads: its cache only ever gains right answers."""

    def __init__(self, tokenizer: Tokenizer, pattern: str) -> None:
        self._tokenizer = tokenizer
        self._findall = re.compile(pattern, re.ASCII).findall
        self._words = _Words(tokenizer.model)
        self._kind = NATIVE_PATTERNS.index(pattern) if native is not None and pattern in NATIVE_PATTERNS else None
        ids = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        contents = sorted(ids, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, contents))})").split if contents else None
        self._added = {content: token_id.to_bytes(4, sys.byteorder) for content, token_id in ids.items()}
        self._bounds = _bounds(contents)
        self._heads: dict[str, bytes] = {"": b""}

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "WordEncoder | None":
        """An encoder for a tokenizer of a known kind that passes the probes, or None."""
        pattern = _ascii_pattern(json.loads(tokenizer.to_str()))
        if pattern is None or not all(token.plain for token in added_tokens(tokenizer)):
            return None
        encoder = cls(tokenizer, pattern)
        return encoder if encoder._passes_probes() else None

    def encode(self, text: str) -> "array[int]":
        """The ids that the tokenizer gives, special tokens not added."""
        if self._bounds is None:
            return array("I", b"".join(self._encode_parts(text)))
        # Most times only a header of the template holds added tokens, and there are few headers.
        opening, closing = self._bounds
        if native is not None and self._kind is not None:
            known: bytes | None = native.encode_headed(
                self._kind, text, opening, closing, self._heads, self._words, CHUNK_CHARACTERS
            )
            if known is not None:
                return array("I", known)
        return self._encode_headed(text, opening, closing)

    def _encode_headed(self, text: str, opening: str, closing: str) -> "array[int]":
        last = text.rfind(opening)
        end = text.find(closing, last) + len(closing) if last >= 0 else 0
        packed = self._heads.get(text[:end])
        if packed is None or end <= last:
            if text[last:end] not in self._added:
                return array("I", b"".join(self._encode_parts(text)))
            packed = self._encode_head(text[:end])
        piece = text[end:]
        if len(piece) <= CHUNK_CHARACTERS and piece.isascii():
            return array("I", packed + self._encode_ascii(piece))
        return array("I", packed + b"".join(self._encode_piece(piece)))

    def _encode_head(self, head: str) -> bytes:
        """A text that ends with an added token."""
        packed = b"".join(self._encode_parts(head))
        if len(head) <= HEAD_CHARACTERS_CACHED_MAX:
            if len(self._heads) >= HEADS_CACHED_MAX:
                self._heads = {"": b""}
            self._heads[head] = packed
        return packed

    def _encode_parts(self, text: str) -> Iterator[bytes]:
        for piece in self._split(text) if self._split else [text]:
            added = self._added.get(piece)
            if added is not None:
                yield added
            else:
                yield from self._encode_piece(piece)

    def _encode_piece(self, piece: str) -> Iterable[bytes]:
        """A text without added tokens."""
        return self._encode_chunk(piece) if len(piece) <= CHUNK_CHARACTERS else self._encode_long(piece)

    def _encode_chunk(self, chunk: str) -> Iterable[bytes]:
        if len(chunk) <= LOOKED_UP_CHARACTERS_MAX and chunk.isascii():
            return (self._encode_ascii(chunk),)
        return [array("I", encode_detached(self._tokenizer, chunk)).tobytes()]

    def _encode_ascii(self, chunk: str) -> bytes:
        if native is not None and self._kind is not None:
            return native.encode(self._kind, chunk, self._words)  # type: ignore[no-any-return]
        return b"".join(map(self._words.__getitem__, self._findall(chunk)))

    def _encode_long(self, text: str) -> Iterator[bytes]:
        for count, chunk in enumerate(_chunks(text), start=1):
            yield b"".join(self._encode_chunk(chunk))
            if count % CHUNKS_PER_YIELD == 0:
                time.sleep(YIELD_SECONDS)

    def _passes_probes(self) -> bool:
        probes = ("x" + "".join(middle) + "y" for middle in itertools.product(_PROBE_CHARACTERS, repeat=3))
        edges = ("".join(ends) for ends in itertools.product(_PROBE_CHARACTERS, repeat=2))
        return all(
            self.encode(probe).tolist() == self._tokenizer.encode(probe, add_special_tokens=False).ids
            for probe in (*probes, *edges)
        )


class _Words(dict[str, bytes]):
    """Packed token ids by word. Emptied when full: the words that matter are back at once."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    def __missing__(self, word: str) -> bytes:
        tokens = self._model.tokenize(word.translate(_BYTE_LEVEL))
        packed = array("I", [token.id for token in tokens]).tobytes()
        if len(word) <= WORD_CHARACTERS_CACHED_MAX:
            if len(self) >= WORDS_CACHED_MAX:
                self.clear()
            self[word] = packed
        return packed


def encode_detached(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode without holding the GIL: `Tokenizer.encode` keeps it, the batch calls do not (nor compute offsets)."""
    token_ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return token_ids


def _bounds(contents: Sequence[str]) -> tuple[str, str] | None:
    """How all added tokens begin and end, if nothing in them looks like that elsewhere.

    Then a text's last added token begins at the last such beginning, if at all, and ends at the next such end.
    """
    opening = common_prefix(contents)
    closing = common_prefix([content[::-1] for content in contents])[::-1]
    if not opening or not closing:
        return None
    alone = (
        content.rfind(opening) == 0 and content.find(closing, 1) == len(content) - len(closing) for content in contents
    )
    return (opening, closing) if all(alone) else None


def _chunks(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > CHUNK_CHARACTERS and (end := _CHUNK_END.search(text, start + CHUNK_CHARACTERS)):
        yield text[start : end.start()]
        start = end.start()
    yield text[start:]


def _ascii_pattern(document: dict[str, Any]) -> str | None:
    """The words of ASCII text, for a `tokenizer.json`; None when its kind is not known."""
    if not _keeps_ascii(document["normalizer"]) or document["model"].get("dropout"):
        return None
    steps = document["pre_tokenizer"] or {}
    *splits, last = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    if last.get("type") != "ByteLevel" or last["add_prefix_space"] or len(splits) > 1:
        return None
    if last["use_regex"]:
        return _GPT2 if not splits else _GPT2_DIGITS if _takes_digits(splits[0]) else None
    return _KNOWN_SPLITS.get(_isolating_pattern(splits[0])) if splits else None


def _keeps_ascii(normalizer: dict[str, Any] | None) -> bool:
    return normalizer is None or normalizer["type"] in ("NFC", "NFD", "NFKC", "NFKD")


def _takes_digits(step: dict[str, Any]) -> bool:
    return step["type"] == "Digits" and bool(step["individual_digits"])


def _isolating_pattern(step: dict[str, Any]) -> str:
    isolates = step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]
    return str(step["pattern"].get("Regex", "")) if isolates else ""

"""Words cut in C beside the regular expressions that say what they are."""

import itertools
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachecore.prompts.huggingface import HuggingFaceRenderer
from cachecore.prompts.native import words as native
from cachecore.prompts.words import NATIVE_PATTERNS

pytestmark = pytest.mark.skipif(native is None, reason="cachecore.prompts.native is not built")
EDGES = ["a", "S", "t", "lL", "re", "1", "23", "'", " ", "\n", "\r", "\t", "\x0b", "!", "/", "\x00", "\x1c", "\x7f"]
KINDS = range(len(NATIVE_PATTERNS))


class Spelled(dict[str, bytes]):
    """Looks words up as themselves, each with its end marked, and remembers none."""

    def __missing__(self, word: str) -> bytes:
        return word.encode() + b"\xff"


def cut(kind: int, text: str) -> list[str]:
    return [word.decode() for word in native.encode(kind, text, Spelled()).split(b"\xff")[:-1]]


@pytest.mark.parametrize("kind", KINDS)
def test_words_are_those_of_the_pattern(kind: int) -> None:
    findall = re.compile(NATIVE_PATTERNS[kind], re.ASCII).findall
    for pieces in itertools.chain.from_iterable(itertools.product(EDGES, repeat=size) for size in (1, 2, 3)):
        text = "".join(pieces)
        assert cut(kind, text) == findall(text)


@given(kind=st.sampled_from(KINDS), text=st.text(st.characters(max_codepoint=127), max_size=200))
def test_words_of_any_ascii(kind: int, text: str) -> None:
    assert cut(kind, text) == re.findall(NATIVE_PATTERNS[kind], text, re.ASCII)


def test_known_words_are_looked_up_and_unknown_ones_made() -> None:
    class Counting(Spelled):
        def __missing__(self, word: str) -> bytes:
            made.append(word)
            self[word] = super().__missing__(word)
            return self[word]

    made: list[str] = []
    words = Counting({" a": b"known"})
    assert native.encode(0, "b" + " a b" * 500, words) == b"b\xff" + b"known b\xff" * 500
    assert made == ["b", " b"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((9, "a", {}), ValueError),
        ((-1, "a", {}), ValueError),
        ((0, "é", {}), ValueError),
        ((0, b"a", {}), TypeError),
        ((0, "a", []), TypeError),
        ((0, "a", {"a": "text"}), TypeError),
        ((0, "a", {}), KeyError),
        ((0, "a"), TypeError),
    ],
)
def test_what_it_refuses(arguments: tuple[object, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        native.encode(*arguments)


def headed(text: object, heads: dict[str, bytes] | None = None, most: int = 100) -> bytes | None:
    found: bytes | None = native.encode_headed(0, text, "<|", "|>", heads or {}, Spelled(), most)
    return found


def test_a_known_head_is_looked_up_and_the_rest_is_words() -> None:
    known = {"<|a|>": b"HEAD", "x<|a|>y<|b|>": b"LONG", "": b"never"}
    assert headed("<|a|>b c", known) == b"HEADb\xff c\xff"
    assert headed("x<|a|>y<|b|>", known) == b"LONG"
    assert headed("b c") == b"b\xff c\xff"
    assert headed("") == b""
    assert headed("<|a|>" + "b" * 100, known) == b"HEAD" + b"b" * 100 + b"\xff"


@pytest.mark.parametrize(
    "text", ["<|b|>c", "<|a|", "<|a|><|", "<|a|>\u00e9", "\u00e9", "<|a|>" + "b" * 101, "b" * 101, b"b", None]
)
def test_what_is_left_to_the_twin(text: object) -> None:
    assert headed(text, {"<|a|>": b"HEAD"}) is None


def test_heads_are_no_words() -> None:
    for arguments, error in (
        ((9, "a", "<", ">", {}, {}, 9), ValueError),
        ((0, "a", "<", ">", [], {}, 9), TypeError),
        ((0, "a", "<", b">", {}, {}, 9), TypeError),
        ((0, "a", "<", ">", {}, {}, "9"), TypeError),
        ((0, "<a>", "<", ">", {"<a>": "text"}, {}, 9), TypeError),
        ((0, "a"), TypeError),
    ):
        with pytest.raises(error):
            native.encode_headed(*arguments)


@settings(deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from(["<|im_start|>", "<|im_end|>", "user\n", " a", "12", "\u00e9", "<|", "|>"]), max_size=8
    )
)
def test_texts_with_added_tokens_are_encoded_as_by_the_twin(chatml_directory: Path, pieces: list[str]) -> None:
    words: Any = _renderer(chatml_directory)._words
    text = "".join(pieces)
    for _ in range(2):  # the second time their heads are known
        assert words.encode(text) == words._encode_headed(text, *words._bounds)


@lru_cache
def _renderer(directory: Path) -> HuggingFaceRenderer:
    return HuggingFaceRenderer.load(directory)

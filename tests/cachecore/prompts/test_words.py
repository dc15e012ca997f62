"""Words cut in C beside the regular expressions that say what they are."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

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

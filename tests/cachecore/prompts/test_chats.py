"""The messages of chats, read, cut and found in C beside the twins in Python."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cachecore.prompts.segments as segments_module
from cachecore.prompts.naming import python_walk
from cachecore.prompts.native import chats as native
from cachecore.prompts.outlines import Outline, Slot, python_read_messages
from cachecore.prompts.segments import INTERNED_CHARACTERS_MIN, Cutter, Segmenter

pytestmark = pytest.mark.skipif(native is None, reason="cachecore.prompts.native is not built")

MARKERS = ("<|im_start|>", "<|im_end|>")
LONG = "word " * (INTERNED_CHARACTERS_MIN // 4)
TEXTS = st.one_of(
    st.text("a \n\u00e9\u4f60\U0001f642", max_size=60),
    st.sampled_from(["x", "<|", "<", "|im_start|>", "a<|b", MARKERS[0], LONG, LONG + "<|", "b" * 4096]),
)


class Text(str):
    """No text that JSON holds."""


class Message(dict[str, str]):
    """Nor a message."""


UNREAD = "x-line"
PLAIN = {"role": "user", "content": "x"}
ODD: list[Any] = [
    {**PLAIN, "name": "n"},
    {"role": "system", "content": "x-line: 5\nand more"},
    {"role": "user"},
    {"content": "x"},
    {"role": "user", "text": "x"},
    {"role": 1, "content": "x"},
    {"role": "user", "content": ""},
    {"role": "user", "content": None},
    {"role": "user", "content": [{"type": "text", "text": "x"}]},
    {"role": "user", "content": Text("x")},
    Message(PLAIN),
    [],
    "role",
    None,
    5,
]


def test_messages_are_read_alike() -> None:
    turns = [PLAIN, {"content": "\u4f60", "role": "assistant"}, {"role": "", "content": "\n"}]
    for messages in (turns, turns[:1], [PLAIN] * 600, [], None, (PLAIN,), "xy", {"role": "content"}):
        for variables in (None, (True, bool)):
            assert native.read_messages(variables, messages, UNREAD) == python_read_messages(
                variables, messages, UNREAD
            )
    assert native.read_messages(None, turns, UNREAD) == ((None, "user", "assistant", ""), ["x", "\u4f60", "\n"])


@pytest.mark.parametrize("message", ODD, ids=repr)
def test_what_is_more_or_less_than_role_and_text_has_no_shape(message: Any) -> None:
    for messages in ([message], [PLAIN, message], [message, PLAIN]):
        assert native.read_messages(None, messages, UNREAD) is None
        assert python_read_messages(None, messages, UNREAD) is None


def cutters(turns: int) -> list[Cutter]:
    """Of equal memory, which joining changes."""
    literals = ["<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"]
    literals += ["<|im_end|>\n<|im_start|>user\n"] * (turns - 1) + ["<|im_end|>\n<|im_start|>assistant\n"]
    outline = Outline(tuple(literals), tuple(Slot(turn, False) for turn in range(turns)))
    made = [Segmenter(MARKERS).cutter(outline) for _ in range(2)]
    return [cutter for cutter in made if cutter is not None]


@given(texts=st.lists(TEXTS, min_size=1, max_size=5), unread=st.integers(0, 1))
def test_texts_are_cut_alike(texts: list[str], unread: int) -> None:
    natively, regularly = cutters(len(texts))
    assert natively._regular
    for _ in range(2):  # the second time long ones are known
        cut = natively._split_natively([*texts, *["unread"] * unread])
        assert cut == regularly._split_regular([*texts, *["unread"] * unread])
        if cut is not None:
            assert cut == regularly._split_each(texts)


def test_texts_too_long_or_too_many_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments_module, "_LONG_TEXTS_MAX", 2)
    for texts, expected in (([LONG] * 2, True), ([LONG] * 3, False)):
        natively, regularly = cutters(len(texts))
        for cutter, split in ((natively, natively._split_natively), (regularly, regularly._split_regular)):
            assert (split(texts) is not None) is expected
            cutter._size_max = len(LONG) - 1
            assert split(texts) is None


class Node:
    def __init__(self, chain: bytes, **children: "Node") -> None:
        self.chain, self.children = chain, children


def test_paths_are_walked_alike() -> None:
    root: Any = Node(b"", a=Node(b"1", b=Node(b"", c=Node(b"3"))), b=Node(b"4"))
    for path, found in (("abc", [b"1", b"", b"3"]), ("abd", [b"1", b""]), ("b", [b"4"]), ("x", []), ("", [])):
        for segments in (list(path), tuple(path)):
            walks = []
            for walk in (native.walk, python_walk):
                chains = [b"before"]
                walks.append(walk(root, segments, chains))
                assert chains == [b"before", *found]
            assert walks[0] is walks[1]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: native.read_messages(None, []), TypeError),
        (lambda: native.read_messages(None, [], b"x"), TypeError),
        (lambda: native.walk(Node(b""), "a", ()), TypeError),
        (lambda: native.walk(Node(b""), 5, []), TypeError),
        (lambda: native.walk(object(), "a", []), AttributeError),
        (lambda: native.walk(Node(b""), [[]], []), TypeError),
        (lambda: native.cut([], [], [], "<", len, 9, 9, 9, []), ValueError),
        (lambda: native.cut([], ["a", "b"], [1], "<", len, 9, 9, 9, []), ValueError),
        (lambda: native.cut([], ["a", "b"], [1], "<", len, 9, 9, 9, [b"c"]), TypeError),
        (lambda: native.cut([], ["a", "b"], ["1"], "<", len, 9, 9, 9, ["c"]), TypeError),
        (lambda: native.cut([], ["a", "b"], [1], "<", len, "9", 9, 9, ["c"]), TypeError),
        (lambda: native.cut([], ["a", "b"], [1], "<", len, 0, 9, 9, ["c"]), TypeError),
        (lambda: native.cut([], ["a"]), TypeError),
    ],
)
def test_what_is_not_understood_is_refused(call: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        call()

"""Detokenizing and stop strings, piece by piece."""

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from cachecore.prompts.plain import PlainRenderer
from workers.openai.text import StopScanner, TextStream

UNFINISHED = "\ufffd"


def pieces_of(data: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


def stop_naively(text: str, stops: Sequence[str]) -> str:
    """The stop string that is complete first ends the text, as if it came character by character."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text[: min(found)[1]] if found else text


@given(st.text(max_size=80).filter(lambda text: UNFINISHED not in text), st.lists(st.integers(0, 400), max_size=20))
def test_no_half_character_is_ever_emitted(text: str, cuts: list[int]) -> None:
    stream = TextStream(PlainRenderer().decode)
    data = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace").encode()
    parts = [stream.feed(piece) for piece in pieces_of(data, cuts)]
    assert UNFINISHED not in "".join(parts)
    assert "".join(parts) + stream.flush() == data.decode()


@given(st.binary(max_size=200), st.lists(st.integers(0, 400), max_size=20))
def test_any_bytes_come_out_as_they_decode_whole(data: bytes, cuts: list[int]) -> None:
    stream = TextStream(PlainRenderer().decode)
    parts = [stream.feed(piece) for piece in pieces_of(data, cuts)]
    assert "".join(parts) + stream.flush() == data.decode("utf-8", "replace")


def test_an_emoji_waits_for_its_last_byte() -> None:
    stream = TextStream(PlainRenderer().decode)
    assert [stream.feed([byte]) for byte in "a🙂b".encode()] == ["a", "", "", "", "🙂", "b"]


def test_a_long_stream_is_decoded_in_a_window() -> None:
    lengths: list[int] = []

    def decode(token_ids: Sequence[int]) -> str:
        lengths.append(len(token_ids))
        return bytes(token_ids).decode("utf-8", "replace")

    stream = TextStream(decode)
    text = "größer " * 200
    assert "".join(stream.feed([byte]) for byte in text.encode()) == text
    assert max(lengths) < 50


def byte_fallback_decode() -> Callable[[Sequence[int]], str]:
    """A decoder as Llama's SentencePiece vocabulary has it: ids 0..255 are bytes, 256 is a word with its space."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581word": 256}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return lambda token_ids: str(tokenizer.decode(list(token_ids)))


@given(st.lists(st.sampled_from(["word", "é", "€", "🙂"]), max_size=60))
def test_byte_fallback_spoils_nothing(words: list[str]) -> None:
    decode = byte_fallback_decode()
    token_ids = [token for word in words for token in ([256] if word == "word" else word.encode())]
    stream = TextStream(decode)
    parts = [stream.feed([token]) for token in token_ids]
    assert "".join(parts) == decode(token_ids)
    assert UNFINISHED not in "".join(parts)


@given(
    st.text("ab\n", max_size=40),
    st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 100), max_size=10),
)
def test_stops_are_found_however_the_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    scanner = StopScanner(stops)
    emitted = ""
    for piece in pieces_of(text, cuts):
        scanned = scanner.feed("".join(map(str, piece)))
        emitted += scanned.text
        if scanned.stop is not None:
            break
    else:
        emitted += scanner.flush()
    assert emitted == stop_naively(text, stops)


@pytest.mark.parametrize(("piece", "let_through"), [("abc", "abc"), ("abcEN", "abc"), ("abE", "ab"), ("ENx", "ENx")])
def test_only_a_possible_beginning_of_a_stop_is_held(piece: str, let_through: str) -> None:
    assert StopScanner(["END"]).feed(piece).text == let_through

import orjson
import pytest

from cachecore.blocks import EMPTY_CHAIN, Chain
from loadtest.client.bodies import TOKEN_ID_MIN, Wanted, posted, token_ids
from loadtest.traces.contract import TraceRequest, block_name

WANTED = Wanted("m", 16)


def request(*numbers: int, tokens: int, at: float = 0.0) -> TraceRequest:
    return TraceRequest(at, Chain(b"".join(map(block_name, numbers))), tokens, 7)


def test_equal_names_are_equal_tokens_and_others_are_not() -> None:
    one = token_ids(request(1, 2, 3, tokens=40), 0, WANTED)
    other = token_ids(request(1, 2, 4, tokens=48), 1, WANTED)
    assert (len(one), len(other)) == (40, 48)
    assert one[:32] == other[:32]
    assert one[32:40] != other[32:40]
    assert all(TOKEN_ID_MIN <= token < WANTED.vocabulary for token in one)


def test_what_has_no_name_is_the_request_s_own() -> None:
    nameless = TraceRequest(0.0, EMPTY_CHAIN, 20, 1)
    assert token_ids(nameless, 0, WANTED) == token_ids(nameless, 0, WANTED)
    assert token_ids(nameless, 0, WANTED)[:16] != token_ids(nameless, 1, WANTED)[:16]


def test_a_salt_changes_every_block() -> None:
    plain, salted = (token_ids(request(1, 2, tokens=32), 0, WANTED._replace(salt=salt)) for salt in ("", "x"))
    assert plain[:16] != salted[:16]
    assert plain[16:] != salted[16:]


def test_lengths_become_a_completion_of_token_ids() -> None:
    path, body = posted(request(5, tokens=10), 0, WANTED)
    fields = orjson.loads(body)
    assert path == "/v1/completions"
    assert fields.pop("prompt") == [*token_ids(request(5, tokens=10), 0, WANTED)]
    assert fields == {
        "model": "m",
        "max_tokens": 7,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_body_is_sent_as_it_is_but_for_what_is_measured() -> None:
    body = {"messages": [], "model": "theirs", "max_completion_tokens": 3, "stream_options": {"x": 1}, "seed": 1}
    path, sent = posted(request(tokens=10)._replace(body=body), 0, WANTED._replace(streaming=False))
    assert path == "/v1/chat/completions"
    assert orjson.loads(sent) == {"messages": [], "model": "m", "max_tokens": 7, "seed": 1, "stream": False}


@pytest.mark.parametrize("vocabulary", [TOKEN_ID_MIN, 65_537])
def test_a_vocabulary_must_leave_something_to_choose(vocabulary: int) -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        Wanted("m", 16, vocabulary).checked()

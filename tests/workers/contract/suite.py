"""What a gateway relies on in any worker, over HTTP and ZeroMQ alone. A worker's test file is a subclass with a `lab`.

Prompts are token ids wherever the template is not what is tested, and begin like no other prompt: the worker may have a
long life behind it. A slow engine runs this too, so that prompts are a few blocks long.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import pytest

from tests.workers.contract.lab import Lab, cached_tokens, data_of, eventually, replayed

CONVERSATION: list[Mapping[str, Any]] = [
    {"role": "system", "content": "You answer briefly, and only what you are asked.\n"},
    {"role": "user", "content": "  Größe = 12,50 € \t 数 🙂  and what may follow it?"},
    {"role": "assistant", "content": "A space."},
    {"role": "user", "content": "def f(x):\n    return x ** 2\n"},
]

# What no worker may answer with anything but 4xx: of clients' mistakes, and of their malice.
BAD: Sequence[tuple[str, Any]] = (
    ("/v1/chat/completions", {}),
    ("/v1/chat/completions", {"messages": "hi"}),
    ("/v1/chat/completions", {"messages": [{"role": "user"}], "temperature": -1}),
    ("/v1/chat/completions", {"messages": CONVERSATION, "n": 0}),
    ("/v1/chat/completions", {"messages": CONVERSATION, "cache_salt": ""}),
    ("/v1/chat/completions", {"messages": CONVERSATION, "kv_transfer_params": "x"}),
    ("/v1/chat/completions", {"messages": CONVERSATION, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": []}),
    ("/v1/completions", {"prompt": [40, -1]}),
    ("/v1/completions", {"prompt": {"a": 1}}),
    ("/v1/completions", {"prompt": [40] * 200_000}),
    ("/v1/completions", {"prompt": [40, 41], "max_tokens": "many"}),
    ("/v1/completions", {"prompt": [40, 41], "model": "none such"}),
    ("/tokenize", {}),
)


class WorkerBehaviour:
    @pytest.fixture
    def lab(self) -> Lab:
        raise NotImplementedError

    # What it says of itself

    async def test_it_is_well_and_lists_its_model(self, lab: Lab) -> None:
        assert (await lab.http.get("/health")).status_code == 200
        models = (await lab.http.get("/v1/models")).json()["data"]
        (entry,) = [model for model in models if model["id"] == lab.model]
        assert entry["max_model_len"] > 0
        assert entry["parent"] is None

    # Which tokens it computes

    async def test_it_tokenizes_a_chat_as_the_renderer_does(self, lab: Lab) -> None:
        rendered = lab.renderer.chat({"messages": CONVERSATION})
        ours = [token for segment in rendered.segments for token in lab.renderer.encode(segment)]
        assert await lab.tokenize(messages=CONVERSATION) == ours

    async def test_it_tokenizes_a_text_as_the_renderer_does(self, lab: Lab) -> None:
        text = "Größe = 12,50 €\n\tdef f(x): 数 🙂"
        assert await lab.tokenize(prompt=text) == list(lab.renderer.encode(text))

    async def test_it_computes_the_tokens_that_it_names(self, lab: Lab) -> None:
        """Equal ids and not only as many: whoever sends them instead of the text finds the text's blocks."""
        conversation = [{"role": "system", "content": f"No. {lab.prompt(8)}"}, *CONVERSATION[1:]]
        ids = await lab.tokenize(messages=conversation)
        usage = (await lab.chat(conversation))["usage"]
        assert usage["prompt_tokens"] == len(ids)
        assert await lab.cached(ids) == lab.full_hit(len(ids)) > 0

    # What it has cached

    @pytest.mark.parametrize("surplus", [-1, 0, 1])
    async def test_a_repeated_prompt_is_cached_but_for_its_last_token(self, lab: Lab, surplus: int) -> None:
        prompt = lab.prompt(3 * lab.block_tokens + surplus)
        assert await lab.cached(prompt) == 0
        assert await lab.cached(prompt) == lab.full_hit(len(prompt))

    async def test_less_than_a_block_is_never_cached(self, lab: Lab) -> None:
        prompt = lab.prompt(lab.block_tokens - 1)
        assert [await lab.cached(prompt), await lab.cached(prompt)] == [0, 0]

    async def test_a_shared_beginning_is_cached_in_whole_blocks(self, lab: Lab) -> None:
        prompt = lab.prompt(4 * lab.block_tokens)
        shared = 2 * lab.block_tokens + 3
        assert await lab.cached(prompt) == 0
        assert await lab.cached(prompt[:shared] + lab.prompt(lab.block_tokens)) == 2 * lab.block_tokens

    async def test_salts_part_what_is_equal(self, lab: Lab) -> None:
        prompt = lab.prompt(2 * lab.block_tokens + 1)
        hit = 2 * lab.block_tokens
        for salt, cached in [("one", 0), ("two", 0), ("one", hit), (None, 0), (None, hit), ("two", hit)]:
            fields = {"cache_salt": salt} if salt else {}
            assert await lab.cached(prompt, **fields) == cached, salt

    # What it announces

    async def test_whole_blocks_are_announced_with_their_salt(self, lab: Lab) -> None:
        for salt in ("", "tenant-a"):
            prompt = lab.prompt(3 * lab.block_tokens + 5)
            assert lab.held(await lab.follow(), prompt, salt) == 0
            await lab.complete(prompt, **({"cache_salt": salt} if salt else {}))
            follower = await lab.follow_until(
                lambda seen, prompt=prompt, salt=salt: lab.held(seen, prompt, salt) == 3 * lab.block_tokens,  # type: ignore[misc]
                "the prompt's blocks are announced",
            )
            assert lab.held(follower, prompt, "another") == 0

    async def test_what_is_generated_is_announced_as_well(self, lab: Lab) -> None:
        """All but the token said last, which nobody has computed."""
        prompt = lab.prompt(lab.block_tokens + 1)
        await lab.complete(prompt, max_tokens=2 * lab.block_tokens, ignore_eos=True)
        follower = await lab.follow_until(
            lambda seen: _longest(seen.held(), prompt) == 3 * lab.block_tokens, "three blocks are announced"
        )
        assert lab.held(follower, prompt) == lab.block_tokens

    async def test_what_is_cached_is_not_announced_again(self, lab: Lab) -> None:
        prompt = lab.prompt(2 * lab.block_tokens + 1)
        await lab.complete(prompt)
        await lab.follow_until(lambda seen: lab.held(seen, prompt) > 0, "the prompt is announced")
        await lab.complete(prompt)
        # A batch that comes after whatever the second request may have said.
        other = lab.prompt(lab.block_tokens + 1)
        await lab.complete(other)
        follower = await lab.follow_until(lambda seen: lab.held(seen, other) > 0, "another prompt is announced")
        copies = [follower.copies[handle] for handle, prefix in follower.prefixes.items() if _begins(prefix[2], prompt)]
        assert copies == [1, 1]

    async def test_the_live_stream_says_what_the_replay_says(self, lab: Lab) -> None:
        async with lab.listening() as live:

            async def compute_something() -> bool:
                await lab.complete(lab.prompt(lab.block_tokens + 1))
                return bool(await live.poll(200))

            # What is published before a subscriber has joined is lost to it.
            await eventually(compute_something, bool, "something is heard")
            frames = [await live.recv_multipart()]
            while await live.poll(200):
                frames.append(await live.recv_multipart())
        heard = [(int.from_bytes(sequence, "big"), payload) for topic, sequence, payload in frames]
        assert {topic for topic, _, _ in frames} == {lab.topic.encode()}
        assert [sequence for sequence, _ in heard] == list(range(heard[0][0], heard[0][0] + len(heard)))
        assert set(heard) <= set(await replayed(lab.replay_endpoint))

    async def test_what_events_say_is_held_is_what_is_hit(self, lab: Lab) -> None:
        """Through eviction: some of a prompt goes, what is announced to be left is found, and no more."""
        prompt = lab.prompt(6 * lab.block_tokens + 1)
        await lab.complete(prompt)
        follower = await lab.follow_until(lambda seen: lab.held(seen, prompt) > 0, "the prompt is announced")
        removed, computed = follower.removed, 0
        while lab.held(follower, prompt) == 6 * lab.block_tokens:
            assert computed <= lab.eviction_tokens, "nothing of the prompt was evicted"
            other = lab.prompt(3 * lab.block_tokens + 1)
            await lab.complete(other)
            computed += len(other)
            follower = await lab.follow_until(
                lambda seen, other=other: lab.held(seen, other) > 0,  # type: ignore[misc]
                "another prompt is announced",
            )
        assert follower.removed > removed
        assert await lab.cached(prompt) == lab.held(follower, prompt)

    # How it answers

    async def test_a_stream_ends_with_its_usage(self, lab: Lab) -> None:
        prompt = lab.prompt(2 * lab.block_tokens + 1)
        body = {"model": lab.model, "prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        whole = (await lab.http.post("/v1/completions", json=body)).json()
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        answer = await lab.http.post("/v1/completions", json=body)
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, done = data_of(answer.text.splitlines())
        assert done == "[DONE]"
        *chunks, last = map(json.loads, events)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
        assert last["choices"] == []
        usage = last["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), 3)
        assert cached_tokens(usage) == 2 * lab.block_tokens

    async def test_a_client_that_leaves_frees_what_it_took(self, lab: Lab) -> None:
        prompt = lab.prompt(2 * lab.block_tokens + 1)
        body = {"model": lab.model, "prompt": prompt, "max_tokens": 800, "ignore_eos": True, "stream": True}
        async with lab.http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    break
            assert await lab.sample("vllm:num_requests_running") == 1
        generated = await lab.sample("vllm:generation_tokens_total")
        await eventually(lambda: lab.sample("vllm:num_requests_running"), lambda running: running == 0, "it stops")
        # A few steps may have ended meanwhile; the 800 were not.
        assert await lab.sample("vllm:generation_tokens_total") < generated + 400
        assert await lab.cached(prompt) == 2 * lab.block_tokens

    async def test_bad_requests_are_their_senders_fault(self, lab: Lab) -> None:
        for path, body in BAD:
            _assert_refused(await lab.http.post(path, json={"model": lab.model, "max_tokens": 1, **body}))
        assert (await lab.http.get("/health")).status_code == 200

    async def test_what_is_no_json_object_is_refused(self, lab: Lab) -> None:
        headers = {"content-type": "application/json"}
        for content in (b"", b"{", b'{"prompt": "x"', b"[1]", b"\xff\xfe", b"null"):
            _assert_refused(await lab.http.post("/v1/completions", content=content, headers=headers))


def _assert_refused(answer: httpx.Response) -> None:
    assert 400 <= answer.status_code < 500, (answer.request.content[:200], answer.status_code, answer.text[:300])
    assert answer.json()["error"]["message"]


def _begins(tokens: Sequence[int], prompt: Sequence[int]) -> bool:
    return len(tokens) <= len(prompt) and tuple(prompt[: len(tokens)]) == tuple(tokens)


def _longest(held: set[tuple[str, str, tuple[int, ...]]], prompt: Sequence[int]) -> int:
    """The most tokens of anything held that goes on from a prompt."""
    return max((len(tokens) for _, _, tokens in held if tokens[: len(prompt)] == tuple(prompt)), default=0)

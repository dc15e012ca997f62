import asyncio
import contextlib
import random
import threading
from collections.abc import Sequence

import pytest

from cachecore.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from cachecore.scope import IdentityScope, KeyId, Naming, Salt, TenantId
from tests.workers.reference.support import KEYRING, BytesRenderer, greedy, run, run_together, run_tokens, tiny_engine
from workers.engine import EngineError, Generation, Sampling
from workers.reference.config import ModelError

rng = random.Random(5)
PROMPTS = [[rng.randrange(97) for _ in range(length)] for length in (3, 9, 16, 17, 31, 60)]


async def test_alone_together_and_from_the_cache_the_tokens_are_the_same() -> None:
    engine = tiny_engine(batched_tokens_max=13)
    await engine.start()
    alone = []
    for prompt in PROMPTS:
        await engine.reset_prefix_cache()
        alone.append(await run_tokens(engine, prompt, greedy(20)))
    assert len({token for tokens, _ in alone for token in tokens}) > 20  # a model that repeats itself proves nothing
    assert [cached for _, cached in alone] == [0] * len(PROMPTS)
    await engine.reset_prefix_cache()
    together = await run_together(engine, PROMPTS, greedy(20))
    again = await run_together(engine, PROMPTS, greedy(20))
    await engine.stop()
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]
    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in alone]
    assert [cached for _, cached in again] == [(len(prompt) - 1) // 4 * 4 for prompt in PROMPTS]


async def test_preempted_generations_come_out_the_same() -> None:
    roomy, tight = tiny_engine(blocks=200), tiny_engine(blocks=40, max_model_len=120)
    for engine in (roomy, tight):
        await engine.start()
    expected = await run_together(roomy, PROMPTS, greedy(50))
    got = await run_together(tight, PROMPTS, greedy(50))
    for engine in (roomy, tight):
        await engine.stop()
    assert tight.metrics.preemptions > 0
    assert roomy.metrics.preemptions == 0
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]


async def test_a_next_turn_finds_the_blocks_of_the_last_answer() -> None:
    engine = tiny_engine()
    await engine.start()
    answer, _ = await run_tokens(engine, PROMPTS[3], greedy(12))
    _, cached = await run_tokens(engine, [*PROMPTS[3], *answer, 5, 6, 7], greedy(1))
    await engine.stop()
    # 17 + 12 tokens, of which the last was drawn and never computed.
    assert cached == 28
    assert engine.metrics.prefix_cache_hits == 28
    assert engine.metrics.prompt_tokens == 17 + 32
    assert engine.metrics.generation_tokens == 13
    assert engine.metrics.requests_finished == {"length": 2}


async def test_events_carry_our_names_and_precede_the_first_output() -> None:
    events: list[KvEvent] = []
    threads: set[str] = set()

    def note(batch: Sequence[KvEvent]) -> None:
        threads.add(threading.current_thread().name)
        events.extend(batch)

    engine = tiny_engine(note)
    await engine.start()
    salt = KEYRING.mint_salt(Salt(KeyId(TenantId("acme"), 0)))
    generations = engine.generate(Generation("one", PROMPTS[1], greedy(8), cache_salt=salt))
    await anext(generations)
    scope = IdentityScope("tiny", KeyId(TenantId("acme"), 0), 4, tokenizer=BytesRenderer.fingerprint)
    naming = Naming.of(scope, KEYRING)
    chain = naming.hasher.chain(naming.root, b"".join(token.to_bytes(4, "little") for token in PROMPTS[1]))
    handles = tuple(int.from_bytes(chain[at + 8 : at + 16], "big") for at in (0, 16))
    assert events[0] == BlockStored(handles, None, PROMPTS[1][:8], 4, cache_salt=salt)
    tokens = [token async for output in generations for token in output.token_ids]
    await engine.reset_prefix_cache()
    await engine.stop()
    assert len(tokens) == 7
    assert isinstance(events[1], BlockStored)
    assert events[1].parent_block_hash == handles[1]
    assert events[1].cache_salt is None
    assert events[-1] == AllBlocksCleared()
    assert threads == {"reference-engine"}


async def test_evictions_are_announced() -> None:
    events: list[KvEvent] = []
    engine = tiny_engine(events.extend, blocks=16)
    await engine.start()
    for prompt in (PROMPTS[4], PROMPTS[5]):
        await run_tokens(engine, prompt, greedy(1))
    cached = await engine.cached_blocks()
    await engine.stop()
    stored = [handle for event in events if isinstance(event, BlockStored) for handle in event.block_hashes]
    removed = [handle for event in events if isinstance(event, BlockRemoved) for handle in event.block_hashes]
    assert len(stored) == 7 + 15
    # 31 tokens left 7 named blocks, 60 need 15 of 16: one stays. The deepest goes first.
    assert removed == stored[6:0:-1]
    assert cached == dict.fromkeys({*stored} - {*removed}, 1)


async def test_tenants_and_client_salts_do_not_share() -> None:
    engine = tiny_engine()
    await engine.start()
    acme = KeyId(TenantId("acme"), 0)
    salts = [
        "",
        "a client's own",
        KEYRING.mint_salt(Salt(acme)),
        KEYRING.mint_salt(Salt(acme, client_salt=KEYRING.client_salt_digest(acme, "mine"))),
        KEYRING.mint_salt(Salt(KeyId(TenantId("other"), 0))),
    ]
    for expected in (0, 16):
        for salt in salts:
            _, cached = await run_tokens(engine, PROMPTS[3], greedy(1), cache_salt=salt)
            assert cached == expected, salt
    await engine.stop()


async def test_refusals_name_the_reason_and_the_status() -> None:
    engine = tiny_engine(max_model_len=64)
    with pytest.raises(EngineError, match="not running"):
        await run(engine, Generation("x", [1], greedy(1)))
    await engine.start()
    forged = KEYRING.mint_salt(Salt(KeyId(TenantId("acme"), 0))).replace("acme", "evil")
    cases = [
        (Generation("a", [], greedy(1)), "empty", 400),
        (Generation("b", [1] * 60, greedy(5)), "maximum context length is 64", 400),
        (Generation("c", [1, 97], greedy(1)), "outside 0..96", 400),
        (Generation("d", [1], greedy(1), adapter="lora"), "does not exist", 404),
        (Generation("e", [1], greedy(1), cache_salt=forged), "MAC", 400),
    ]
    for generation, reason, status in cases:
        with pytest.raises(EngineError, match=reason) as refusal:
            await run(engine, generation)
        assert refusal.value.status == status
    live = engine.generate(Generation("f", [1], greedy(30)))
    await anext(live)
    with pytest.raises(EngineError, match="in use"):
        await run(engine, Generation("f", [1], greedy(1)))
    await live.aclose()
    await engine.stop()


async def test_closing_the_iterator_aborts() -> None:
    engine = tiny_engine()
    await engine.start()
    async with contextlib.aclosing(engine.generate(Generation("one", PROMPTS[2], greedy(200)))) as outputs:
        await anext(outputs)
    # Commands are taken between steps, in order: when this one is done, so is the abort.
    await engine.reset_prefix_cache()
    assert engine.metrics.requests_finished == {"abort": 1}
    assert engine.metrics.requests_running == 0
    assert engine.metrics.kv_cache_usage == 0.0
    tokens, _ = await run_tokens(engine, PROMPTS[2], greedy(3), request_id="one")
    assert len(tokens) == 3
    await engine.stop()


async def test_stopping_ends_live_generations() -> None:
    engine = tiny_engine()
    await engine.start()
    task = asyncio.create_task(run(engine, Generation("one", [1, 2, 3], greedy(250))))
    while not engine.metrics.generation_tokens:
        await asyncio.sleep(0.001)
    await engine.stop()
    assert (await task)[-1].finish_reason == "abort"
    await engine.stop()


@pytest.mark.parametrize(("part", "name"), [("model", "forward"), ("pool", "allocate"), ("scheduler", "_enter")])
async def test_a_failed_step_is_an_error_of_that_generation_only(
    part: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine()
    await engine.start()
    good = await run_tokens(engine, PROMPTS[2], greedy(4))
    with monkeypatch.context() as broken:
        broken.setattr(getattr(engine._core, part), name, None)
        with pytest.raises(EngineError, match="engine failed") as failure:
            await run(engine, Generation("bad", PROMPTS[1], greedy(4)))
    assert failure.value.status == 500
    assert await run_tokens(engine, PROMPTS[2], greedy(4)) == (good[0], 0)
    await engine.stop()


async def test_end_and_stop_tokens() -> None:
    engine = tiny_engine()
    await engine.start()
    tokens, _ = await run_tokens(engine, PROMPTS[4], greedy(40))
    wanted = tokens[5]
    first = tokens.index(wanted) + 1
    outputs = await run(engine, Generation("stop", PROMPTS[4], greedy(40, stop_token_ids=(wanted,))))
    assert [output.finish_reason for output in outputs] == [None] * (first - 1) + ["stop"]
    assert engine.stop_token_ids() == (1,)
    engine._core._end_token_ids = frozenset({wanted})
    assert (await run_tokens(engine, PROMPTS[4], greedy(40, ignore_eos=False)))[0] == tokens[:first]
    assert (await run_tokens(engine, PROMPTS[4], greedy(40)))[0] == tokens
    await engine.stop()


async def test_seeds_repeat_alone_and_in_company() -> None:
    engine = tiny_engine()
    await engine.start()
    seeded = Sampling(max_tokens=15, temperature=1.0, seed=11, ignore_eos=True)
    alone, _ = await run_tokens(engine, PROMPTS[1], seeded)
    together = await run_together(engine, [PROMPTS[1], PROMPTS[1], PROMPTS[5]], seeded)
    other, _ = await run_tokens(engine, PROMPTS[1], Sampling(max_tokens=15, seed=12, ignore_eos=True))
    await engine.stop()
    assert [tokens for tokens, _ in together[:2]] == [alone, alone]
    assert other != alone


async def test_logprobs_of_prompt_and_output_agree() -> None:
    engine = tiny_engine(batched_tokens_max=7)
    await engine.start()
    outputs = await run(engine, Generation("one", PROMPTS[4], greedy(6, logprobs=2)))
    tokens = [token for output in outputs for token in output.token_ids]
    told = [entry for output in outputs for entry in output.logprobs]
    assert [entry.token_id for entry in told] == tokens
    assert all(entry.top[0] == (entry.token_id, entry.logprob) and len(entry.top) == 2 for entry in told)
    echoed = Generation("two", [*PROMPTS[4], *tokens], greedy(0, prompt_logprobs=1))
    (output,) = await run(engine, echoed)
    await engine.stop()
    assert (output.finish_reason, list(output.token_ids), output.cached_tokens) == ("length", [], 0)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == 37
    for entry, expected in zip(output.prompt_logprobs[31:], told, strict=True):
        assert entry is not None
        assert entry.token_id == expected.token_id
        assert entry.logprob == pytest.approx(expected.logprob, abs=1e-4)


def test_a_pool_too_small_for_one_sequence_is_refused() -> None:
    with pytest.raises(ModelError, match="do not hold max_model_len=100"):
        tiny_engine(blocks=20, max_model_len=100)
    assert tiny_engine(blocks=20).info.max_model_len == 80
    assert tiny_engine(blocks=0, kv_memory_mib=1).info.blocks_total == 2**20 // (2 * 2 * 2 * 8 * 4 * 4)

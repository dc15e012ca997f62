"""Records the golden captures under tests/cachecore/captures from a real vLLM, with what it said of each request.

    .venv-vllm/bin/python -m tests.vllm.record_captures [NAME ...]

The streams are recorded by `ropeway events capture`, and are not written over. Beside them `vllm-0.32.truth.jsonl` says
of each request how many messages had been announced before it, its prompt, its salt, and how much of it was cached: the
same for all recordings, or the second one fails.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tests.gateway.end_to_end.processes import REPOSITORY, eventually
from tests.vllm.servers import BLOCK_TOKENS, MODEL, VllmServer
from tests.workers.contract.lab import replayed
from workers.reference.fetch import default_cache_dir, fetch_smollm2

CAPTURES = REPOSITORY / "tests/cachecore/captures"
TRUTH = CAPTURES / "vllm-0.32.truth.jsonl"
BLOCKS = 72
"""Little more than one sequence of the longest context: what is cached has to make room."""


class Prompt(NamedTuple):
    tokens: Sequence[int]
    salt: str | None = None
    output_tokens: int = 1


def reuse_and_eviction(random: Random) -> Iterator[Prompt]:
    """Branches of two stems, repetitions, generated blocks, and prompts enough to push all of it out in parts."""
    stems = [random.choices(range(1000, 49_000), k=200), random.choices(range(32, 97), k=330)]
    for round_number in range(3):
        for stem in stems:
            cut = random.randrange(40, len(stem))
            yield Prompt(stem[:cut] + random.choices(range(32, 97), k=random.randrange(1, 90)))
            yield Prompt(stem)
            yield Prompt(stem[:128], output_tokens=40 if round_number == 0 else 1)
        yield Prompt(random.choices(range(32, 97), k=320))
        yield Prompt(random.choices(range(32, 97), k=260))


def salts(random: Random) -> Iterator[Prompt]:
    """One prompt under several salts and under none, longer and shorter, with what follows each."""
    stem = random.choices(range(32, 97), k=100)
    for salt in ("tenant-a", "tenant-b", None, "tenant-a", "", "tenant-b"):
        yield Prompt(stem, salt or None)
        yield Prompt(stem[:70] + random.choices(range(32, 97), k=64), salt or None)
        yield Prompt(stem + [40] * 40, salt or None)


class Recording(NamedTuple):
    environment: Mapping[str, str]
    note: str


RECORDINGS: Mapping[str, Recording] = {
    "vllm-0.32-integers": Recording({}, "vLLM 0.32.0 as it is: reuse, eviction, cache_salt"),
    "vllm-0.32-digests": Recording(
        {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"},
        "vLLM 0.32.0 with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0: reuse, eviction, cache_salt",
    ),
}


def record(name: str, recording: Recording, model: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        server = VllmServer(
            Path(directory), model, name, events="connect", blocks=BLOCKS, environment=recording.environment
        )
        try:
            server.wait_ready()
            random = Random(1)
            said = [_ask(server, prompt) for prompt in (*reuse_and_eviction(random), *salts(random))]
            truth = "".join(json.dumps(line) + "\n" for line in said)
            if TRUTH.exists() and TRUTH.read_text() != truth:
                raise SystemExit(f"{name} says other things than {TRUTH}")
            TRUTH.write_text(truth)
            _capture(server, CAPTURES / f"{name}.jsonl", recording.note)
        finally:
            server.close()


def _ask(server: VllmServer, prompt: Prompt) -> dict[str, Any]:
    announced = _announced(server)
    body = {"model": MODEL, "prompt": list(prompt.tokens), "max_tokens": prompt.output_tokens}
    body |= {"temperature": 0, "ignore_eos": True}
    answer = server.post({**body, **({"cache_salt": prompt.salt} if prompt.salt else {})}, "/v1/completions")
    usage = answer.raise_for_status().json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    if len(prompt.tokens) + prompt.output_tokens - 1 - cached >= BLOCK_TOKENS:
        # Whole blocks were computed, and are announced a moment after the answer.
        eventually(lambda: _announced(server) > announced, "the request's blocks are announced")
        time.sleep(0.3)
    return {"announced": announced, "tokens": list(prompt.tokens), "salt": prompt.salt or "", "cached_tokens": cached}


def _announced(server: VllmServer) -> int:
    """How many messages there have been."""
    return len(asyncio.run(replayed(server.replay_endpoint)))


def _capture(server: VllmServer, path: Path, note: str) -> None:
    sockets = ("--endpoint", server.events_endpoint, "--bind", "--replay-endpoint", server.replay_endpoint)
    bounds = ("--messages-max", str(_announced(server)), "--seconds", "20")
    command = [sys.executable, "-m", "ropeway", "events", "capture", str(path), *sockets, *bounds, "--note", note]
    subprocess.run(command, cwd=REPOSITORY, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RECORDINGS)} (default: all)")
    model = fetch_smollm2(default_cache_dir()).directory
    for name in parser.parse_args().names or RECORDINGS:
        record(name, RECORDINGS[name], model)


if __name__ == "__main__":
    main()

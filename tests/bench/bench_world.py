"""Does the audit agree with the world? Engines on HTTP behind the gateway, beside the audit's prediction.

    .venv/bin/python tests/bench/bench_world.py --trace conversation_trace.jsonl [--engines simulated|reference]
                                                [--start S] [--duration S] [--load X] [--policy NAME] [--json FILE]

A slice of the trace, spread off its grid by one seed, is sent by `ropeway loadtest` to a gateway before engines, and
replayed by the audit over such engines. Told are hit rate and TTFT of both, and the share of this machine's CPU that
the run took.

* `simulated`: eight workers that keep the time of Llama-3-70B TP8. Beyond 60 % CPU the world is this machine, and not
  the engines. Eviction needs longer traces than a few minutes: `--blocks` makes caches small.
* `reference`: two workers that run SmolLM2 in torch, on a core each. All lengths of the trace are divided by 32,
  blocks too, so that prompts share what they shared and a CPU can keep up. The audit is given what one of
  the workers takes for prompts and tokens alone, measured just before (`EngineTimes`).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

import httpx
import numpy as np

from cachecore.blocks import split_chain
from loadtest.audit.prepared import prepare
from loadtest.audit.runs import Scenario, replay
from loadtest.traces import arrivals
from loadtest.traces.contract import Trace
from loadtest.traces.reading import read_trace
from tests.gateway.end_to_end.models import FLAGS, SECONDS_MAX, gateway_before, tokenizer
from tests.gateway.end_to_end.models import MODEL as REFERENCE_MODEL
from tests.gateway.end_to_end.processes import HOST, Fleet, Gateway, Process, eventually, free_ports, new_keyring
from workers.timing import LLAMA_3_70B_TP8, TimingProfile

NODES = {"simulated": 8, "reference": 2}
SHRINKS = {"simulated": 1, "reference": 32}
"""What all lengths of the trace are divided by."""
LOADS = {"simulated": 1.0, "reference": 0.125}
FIGURES = ("hit_rate", "ttft_ms_mean", "ttft_ms_p50", "ttft_ms_p90")
STEP_TOKENS = 512
"""Of the reference worker's steps (`--max-batched-tokens`)."""
SEQUENCES_MAX = 64
PROMPT_TOKENS = (16, 64, 128, 256, 512, 1024, 1536, 2048)
DECODE_LOADS = ((1, 16), (4, 16), (1, 1024))
"""Sequences, and the context of each."""
DECODE_STEPS = 32
ROUNDS = 3


class Served(NamedTuple):
    """Engines behind a gateway, and what the audit is to take them for."""

    url: str
    profile: TimingProfile


def slice_of(options: argparse.Namespace) -> Trace:
    trace = arrivals.dequantised(read_trace(options.trace), 0)
    return arrivals.sped_up(arrivals.sliced(trace, options.start, options.duration * options.load), options.load)


def write_shrunken(trace: Trace, shrink: int, path: Path) -> None:
    """In Mooncake's form, lengths and blocks divided by `shrink`: a block that was shared is shared."""
    ids: dict[bytes, int] = {}
    with path.open("w") as file:
        for request in trace.requests:
            row = {
                "timestamp": round(request.arrival_seconds * 1000),
                "input_length": -(-request.input_tokens // shrink),
                "output_length": -(-request.output_tokens // shrink),
                "hash_ids": [ids.setdefault(name, len(ids)) for name in split_chain(request.chain)],
            }
            file.write(json.dumps(row) + "\n")


@contextmanager
def simulated(options: argparse.Namespace, directory: Path) -> Iterator[Served]:
    profile = LLAMA_3_70B_TP8
    flags = ["--profile", profile.name, "--block-size", str(options.block), "--blocks", str(options.blocks)]
    keyring = str(new_keyring(directory))
    with (
        Fleet(directory, *flags, count=NODES["simulated"]) as fleet,
        Gateway(directory, fleet.urls, {"keyring": keyring, "policy": options.policy}) as gateway,
    ):
        yield Served(gateway.url, profile)


class PinnedWorker(Process):
    """A reference worker on one core."""

    def __init__(self, core: int, port: int, keyring: str, options: argparse.Namespace, directory: Path) -> None:
        self._core = core
        sizes = {"--block-size": options.block, "--blocks": options.blocks, "--max-batched-tokens": STEP_TOKENS}
        flags = [str(word) for flag in sizes.items() for word in flag]
        names = [
            "--port",
            str(port),
            "--name",
            f"on-{core}",
            "--keyring",
            keyring,
            "--max-sequences",
            str(SEQUENCES_MAX),
        ]
        super().__init__(f"on-{core}", ["worker", "reference", *FLAGS, *names, *flags], directory)
        self.url = f"http://{HOST}:{port}"
        eventually(lambda: "ready http" in self.said(), f"{self.name} is ready", SECONDS_MAX)

    def _command(self, arguments: Sequence[str]) -> list[str]:
        return ["taskset", "-c", str(self._core), *super()._command(arguments)]


@contextmanager
def reference(options: argparse.Namespace, directory: Path) -> Iterator[Served]:
    keyring = str(new_keyring(directory))
    tokenizer()
    with ExitStack() as stack:
        workers = [
            stack.enter_context(PinnedWorker(core, port, keyring, options, directory))
            for core, port in enumerate(free_ports(NODES["reference"]))
        ]
        profile = EngineTimes(workers[0].url).profile(options.blocks * options.block)
        config = {"policy": options.policy}
        urls = [worker.url for worker in workers]
        gateway = stack.enter_context(gateway_before(directory, urls, keyring, config))
        yield Served(gateway.url, profile)


class EngineTimes:
    """What prompts and tokens take on a worker that has nothing else to do, by its HTTP surface."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1/completions"
        self._draw = Random(0)

    def profile(self, kv_tokens: int) -> TimingProfile:
        """Least squares of relative errors: over prompts of several lengths; over decoding alone, four at once, and
        alone with a long context."""
        prefills = [self._prefill_seconds(size) for size in PROMPT_TOKENS]
        chunks = [[-(-size // STEP_TOKENS), size, size * size / 2] for size in PROMPT_TOKENS]
        constant, linear, pair = fitted(chunks, prefills)
        decodes = [median(self._step_seconds(*load) for _ in range(ROUNDS)) for load in DECODE_LOADS]
        each, sequence, context = fitted([[1, count, count * size] for count, size in DECODE_LOADS], decodes)
        return TimingProfile(
            "measured",
            "one reference worker, just before",
            constant,
            linear,
            prefill_pair_seconds=pair,
            decode_constant_seconds=each,
            decode_sequence_seconds=sequence,
            decode_context_seconds=context,
            batch_tokens_max=STEP_TOKENS,
            sequences_max=SEQUENCES_MAX,
            kv_tokens=kv_tokens,
        )

    def _prompts(self, count: int, size: int) -> list[list[int]]:
        return [[self._draw.randrange(256, 32_000) for _ in range(size)] for _ in range(count)]

    def _seconds(self, prompts: list[list[int]], output_tokens: int) -> float:
        body = {"model": REFERENCE_MODEL, "prompt": prompts, "max_tokens": output_tokens, "ignore_eos": True}
        began = time.perf_counter()
        httpx.post(self._url, json=body, timeout=SECONDS_MAX, trust_env=False).raise_for_status()
        return time.perf_counter() - began

    def _prefill_seconds(self, size: int) -> float:
        seconds = median(self._seconds(self._prompts(1, size), 1) for _ in range(ROUNDS))
        print(f"a prompt of {size} tokens takes the worker {seconds:.2f} s", file=sys.stderr, flush=True)
        return seconds

    def _step_seconds(self, sequences: int, context_tokens: int) -> float:
        """Of one decoding step: the prompts are cached, and what else a request takes is subtracted."""
        prompts = self._prompts(sequences, context_tokens)
        self._seconds(prompts, 1)
        short = self._seconds(prompts, 1)
        return (self._seconds(prompts, 1 + DECODE_STEPS) - short) / DECODE_STEPS


def fitted(terms: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Coefficients, none below zero, of the terms of each measured time, by least squares of relative errors."""
    matrix = np.array(terms) / np.array(seconds)[:, None]
    used = list(range(matrix.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(matrix[:, used], np.ones(len(seconds)), rcond=None)
        if found.min() >= 0:
            return [float(found[used.index(place)]) if place in used else 0.0 for place in range(matrix.shape[1])]
        used.pop(int(found.argmin()))


ENGINES = {"simulated": simulated, "reference": reference}


def world(options: argparse.Namespace, url: str, path: Path) -> dict[str, Any]:
    source = ["--trace", str(path), "--block-size", str(options.block), "--raw-arrivals"]
    command = [sys.executable, "-m", "ropeway", "loadtest", *source, "--url", url, "--json"]
    began, idle = time.monotonic(), idle_seconds()
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.stdout:
        raise SystemExit(done.stderr)
    row: dict[str, Any] = json.loads(done.stdout)["rows"][0]
    cores = idle_seconds(cores=True)
    row["cpu_share"] = round(1 - (idle_seconds() - idle) / ((time.monotonic() - began) * cores), 3)
    return row


def idle_seconds(cores: bool = False) -> float:
    """Of all cores together since the machine started; or how many cores there are."""
    lines = Path("/proc/stat").read_text().splitlines()
    if cores:
        return sum(line[:3] == "cpu" and line[3].isdigit() for line in lines)
    fields = lines[0].split()
    return (int(fields[4]) + int(fields[5])) / 100


def predicted(options: argparse.Namespace, profile: TimingProfile, path: Path) -> dict[str, Any]:
    trace = read_trace(path, block_size_tokens=options.block)
    scenario = Scenario(options.policy, NODES[options.engines], profile=profile, capacity_blocks=options.blocks)
    return replay(prepare(trace), scenario).row()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--engines", choices=list(ENGINES), default="simulated")
    parser.add_argument("--start", type=float, default=600.0)
    parser.add_argument("--duration", type=float, default=180.0, help="seconds that it takes")
    parser.add_argument("--load", type=float, help="arrivals so many times as dense (1; 0.125 for reference workers)")
    parser.add_argument("--policy", default="kv-aware")
    parser.add_argument("--blocks", type=int, default=2_500, help="of KV in each engine")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shrink = SHRINKS[options.engines]
    options.load = options.load or LOADS[options.engines]
    trace = slice_of(options)
    options.block = trace.block_size_tokens // shrink
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "slice.jsonl"
        write_shrunken(trace, shrink, path)
        with ENGINES[options.engines](options, Path(name)) as served:
            print(f"{len(trace.requests)} requests in {options.duration:g} s", file=sys.stderr, flush=True)
            told = predicted(options, served.profile, path)
            real = world(options, served.url, path)
    rows = [
        {
            "figure": figure,
            "audit": round(told[figure], 4),
            "world": round(real[figure], 4),
            "ratio": round(real[figure] / told[figure], 4) if told[figure] else None,
        }
        for figure in FIGURES
    ]
    result = {
        "engines": options.engines,
        "requests": real["requests"],
        "failed": real["failed"],
        "cpu_share": real["cpu_share"],
        "sent_late_ms_p99": round(real["late_ms_p99"], 1),
        "profile": asdict(served.profile),
        "rows": rows,
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

"""Rates of moving KV: re-rotation and every codec, beside a plain copy of the same bytes in the same run.

    PYTHONPATH=. .venv/bin/python tests/bench/bench_kv.py [--model DIR] [--json FILE] [--rounds N] [--threads N]

The KV is of SmolLM2's shape (30 layers, 3 heads of 64) or, with --shape llama8b, of Llama-3-8B's (8 heads of 128), in
bf16, more of it than the caches hold. A rate is bf16 bytes of keys and values a second; every figure is the best of its
rounds, calls alternating. Decoding goes to another position, so keys are turned. `share` is of the plain copy's rate;
of both directions together for codecs. `size` is bf16 bytes over payload bytes.

With --model, also the time to a first token's logits when every passage of a prompt is cached at another position, in
memory: turning keys, choosing and recomputing 15 %, propagation, the question; beside full prefill in steps of 512.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cachecore.kv.codecs.contract import Origin
from cachecore.kv.codecs.registry import CODECS
from cachecore.kv.fuser.context import Passage, stitch
from cachecore.kv.fuser.fuse import fuse
from cachecore.kv.fuser.passes import extend
from cachecore.kv.layout import LayerKv
from cachecore.kv.rope import rope_table
from cachecore.kv.variants import RopeConfig
from workers.reference.config import ModelConfig
from workers.reference.model import KvTensors, LlamaModel, Segment
from workers.reference.weights import load_weights

SHAPES = {"smollm2": (30, 3, 64, 4096), "llama8b": (16, 8, 128, 1024)}
"""Layers, key-value heads, head_dim, tokens."""
SOURCE, TARGET = 1024, 8192
BARS = {"i8": 0.15, "rotation": 0.25}


def best(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Least seconds of each call; all of them take turns."""
    seconds = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


def measure(shape: str, rounds: int) -> list[dict[str, Any]]:
    layers, heads, dim, tokens = SHAPES[shape]
    generator = torch.Generator().manual_seed(1)
    stored = [LayerKv(*torch.randn(2, tokens, heads, dim, generator=generator).bfloat16()) for _ in range(layers)]
    room = [LayerKv(torch.empty_like(kv.keys), torch.empty_like(kv.values)) for kv in stored]
    table = rope_table(RopeConfig("default", 100_000.0, dim), TARGET + tokens)
    shift = table.shift(SOURCE, TARGET, tokens, heads)
    encoded = {
        name: [codec.encode(kv, Origin(layer, layers, SOURCE), table) for layer, kv in enumerate(stored)]
        for name, codec in CODECS.items()
    }

    def copy() -> None:
        for source, target in zip(stored, room, strict=True):
            target.keys.copy_(source.keys)
            target.values.copy_(source.values)

    def rotate() -> None:
        for source, target in zip(stored, room, strict=True):
            shift.turn(source.keys, target.keys)
            target.values.copy_(source.values)

    def encode(name: str) -> Callable[[], object]:
        return lambda: [
            CODECS[name].encode(kv, Origin(layer, layers, SOURCE), table) for layer, kv in enumerate(stored)
        ]

    def decode(name: str) -> Callable[[], object]:
        return lambda: [CODECS[name].decode(payload, facts, TARGET, table) for payload, facts in encoded[name]]

    calls: dict[str, Callable[[], object]] = {"copy": copy, "rotation": rotate}
    for name in CODECS:
        calls |= {f"{name} encode": encode(name), f"{name} decode": decode(name)}
    seconds = best(calls, rounds)
    size = 2 * layers * tokens * heads * dim * 2
    rows = [row(name, seconds[name], seconds["copy"], size, 1.0) for name in ("copy", "rotation")]
    for name in CODECS:
        ways = (seconds[f"{name} encode"], seconds[f"{name} decode"])
        payload = sum(one.payload.nbytes for one in encoded[name])
        both = row(name, sum(ways), seconds["copy"], size, size / payload)
        rows.append(both | {"encode_gb_s": size / ways[0] / 1e9, "decode_gb_s": size / ways[1] / 1e9})
    return rows


def measure_fusing(directory: Path, rounds: int) -> list[dict[str, Any]]:
    config = ModelConfig.load(directory)
    weights = load_weights(directory, config, torch.float32, torch.device("cpu"))
    model = LlamaModel(config, weights, config.max_positions)
    return [fusing_row(model, tokens, rounds) for tokens in (800, 2000)]


def fusing_row(model: LlamaModel, tokens: int, rounds: int) -> dict[str, Any]:
    """Four passages behind a system prompt of 24 tokens, and a question of 38."""
    draw = random.Random(tokens)

    def words(count: int) -> list[int]:
        return [draw.randrange(1000, 40_000) for _ in range(count)]

    system, question = words(24), words(38)
    passages = [words((tokens - 24) // 4) for _ in range(4)]
    context = [*system, *(token for passage in passages for token in passage)]
    blocks = list(range(-(-(len(context) + 38) // 16)))
    kv = KvTensors(model.config, len(blocks), 16, model.dtype, model.device)
    cached = []
    for token_ids in ([], *passages):
        whole = [*system, *token_ids]
        model.forward([Segment(whole, 0, blocks)], kv)
        start = len(system) if token_ids else 0
        parts = (pool.flatten(1, 2)[:, start : len(whole)].clone() for pool in (kv.keys, kv.values))
        cached.append(Passage(whole[start:], *parts, position=start, exact=not token_ids))

    def cold() -> None:
        prompt = [*context, *question]
        for start in range(0, len(prompt), 512):
            model.forward([Segment(prompt[start : start + 512], start, blocks)], kv)

    def fused() -> None:
        asked = torch.tensor(question)
        extend(model, fuse(model, stitch(cached, model.rope), asked), asked)

    seconds = best({"cold": cold, "fused": fused}, rounds)
    return {"tokens": len(context), **{f"{name}_s": value for name, value in seconds.items()}}


def row(name: str, seconds: float, copy_seconds: float, size: int, ratio: float) -> dict[str, Any]:
    return {"name": name, "gb_s": size / seconds / 1e9, "share_of_copy": copy_seconds / seconds, "size_ratio": ratio}


def show(one: dict[str, Any]) -> str:
    ways = f"  encode {one['encode_gb_s']:.2f}, decode {one['decode_gb_s']:.2f} GB/s" if "encode_gb_s" in one else ""
    bar = f"  (bar {BARS[one['name']]:.0%})" if one["name"] in BARS else ""
    name, share = one["name"], one["share_of_copy"]
    return f"{name:9} {one['gb_s']:7.2f} GB/s  {share:6.1%} of a copy  size {one['size_ratio']:.2f}x{ways}{bar}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, metavar="DIR")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = measure(arguments.shape, arguments.rounds)
    for one in rows:
        print(show(one))
    fusing = measure_fusing(arguments.model, arguments.rounds) if arguments.model else []
    for one in fusing:
        ratio = one["cold_s"] / one["fused_s"]
        print(f"{one['tokens']} tokens: prefill {one['cold_s']:.2f} s, fused {one['fused_s']:.2f} s: {ratio:.1f}x")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"shape": arguments.shape, "rows": rows, "fusing": fusing}, indent=1))


if __name__ == "__main__":
    main()

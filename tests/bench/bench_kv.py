"""Rates of moving KV: re-rotation and every codec, beside a plain copy of the same bytes in the same run.

    PYTHONPATH=. .venv/bin/python tests/bench/bench_kv.py [--model DIR] [--json FILE] [--rounds N] [--threads N]

The KV is of SmolLM2's shape (30 layers, 3 heads of 64) or, with --shape llama8b, of Llama-3-8B's (8 heads of 128), in
bf16, more of it than the caches hold. A rate is bf16 bytes of keys and values a second, taken as `ropeway benchmark`
takes it. Decoding goes to another position, so keys are turned. `share` is of the plain copy's rate, `size` is bf16
bytes over payload bytes.

With --model, also the time to a first token's logits when every passage of a prompt is cached at another position, in
memory: turning keys, choosing and recomputing 15 %, propagation, the question; beside full prefill in steps of 512.
"""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cachecore.kv.codecs.registry import CODECS
from cachecore.kv.fuser.context import Passage, stitch
from cachecore.kv.fuser.fuse import fuse
from cachecore.kv.fuser.passes import extend
from workers.reference.benchmark import Shape, codec_figures, kv_seconds, least_seconds, rotation_rate
from workers.reference.config import ModelConfig
from workers.reference.model import KvTensors, LlamaModel, Segment
from workers.reference.weights import load_weights

SHAPES = {"smollm2": Shape(tokens=4096), "llama8b": Shape(layers=16, kv_heads=8, head_dim=128, tokens=1024)}


def best(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Least seconds of each call; all of them take turns."""
    return least_seconds({name: [call] for name, call in calls.items()}, rounds)


def measure(name: str, rounds: int) -> list[dict[str, Any]]:
    shape = SHAPES[name]
    seconds = kv_seconds(shape, rounds)
    figures = codec_figures(shape, seconds, {}, dict.fromkeys(CODECS, 0.0))
    rotation = rotation_rate(shape, seconds)
    rows = [{"name": "rotation", "gb_s": rotation.gb_per_second, "share": rotation.share, "bar": rotation.bar}]
    for codec in figures:
        for way in ("encode", "decode"):
            rate, share = getattr(codec, f"{way}_gb_per_second"), getattr(codec, f"{way}_share")
            one = {"name": f"{codec.codec} {way}", "gb_s": rate, "share": share, "bar": codec.share_bar}
            rows.append(one | {"size_ratio": codec.size_ratio})
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


def show(one: dict[str, Any]) -> str:
    bar = f"  (bar {one['bar']:.0%})" if one["bar"] else ""
    size = f"  size {one['size_ratio']:.2f}x" if "size_ratio" in one else ""
    return f"{one['name']:12} {one['gb_s']:7.2f} GB/s  {one['share']:6.1%} of a copy{size}{bar}"


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

"""`ropeway worker reference` and `ropeway quality`: arguments, and where the parts of each are put together."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cachecore.events import KvEvent
    from workers.publisher import EventPublisher

_OPTIONAL_MODULES = frozenset({"torch", "numpy", "safetensors", "gguf"})

_DESCRIPTION = "Serve a Llama-architecture model over OpenAI's API, announcing its KV blocks."
_EXAMPLE = "example:\n  ropeway worker reference --model smollm2 --port 8101"

_QUALITY_DESCRIPTION = """\
Measure how close answers from moved, repaired or quantized KV come to full prefill: KL divergence and top-1 agreement
over the 24-token greedy answer, for every method, codec and recomputed share. Takes about a minute a prompt on CPU."""
_QUALITY_EXAMPLE = """\
examples:
  ropeway quality --prompts 3
  ropeway quality --documents handbook.txt --json > quality.json"""


def add_reference_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Define `reference` below `ropeway worker`. Its function is left in `args.run`; torch is imported only there."""
    parser = subparsers.add_parser(
        "reference",
        help="a real model in torch",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="smollm2", help="Hugging Face directory, GGUF file, or smollm2 (default)")
    parser.add_argument("--served-model-name", metavar="NAME", help="default: the directory's name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8101, help="0 picks a free one (default: 8101)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: float32 on CPU")
    parser.add_argument("--device", help="default: cuda when there is one, else cpu")
    parser.add_argument("--block-size", type=int, default=16, metavar="TOKENS", help="default: 16")
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument("--blocks", type=int, default=0, metavar="N", help="KV blocks")
    memory.add_argument("--kv-memory-mib", type=int, default=512, metavar="MIB", help="KV memory (default: 512)")
    parser.add_argument("--max-model-len", type=int, default=0, metavar="TOKENS", help="default: the model's own")
    parser.add_argument("--max-batched-tokens", type=int, default=512, metavar="TOKENS", help="per step (default: 512)")
    parser.add_argument("--max-sequences", type=int, default=64, metavar="N", help="at once (default: 64)")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="torch threads (default: torch's choice)")
    parser.add_argument("--keyring", type=Path, metavar="FILE", help="keys that name blocks; default: new ones")
    parser.add_argument("--kv-events-port", type=int, default=0, metavar="PORT", help="0 picks a free one (default)")
    parser.set_defaults(run=run)


def add_quality_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Define `ropeway quality`. Its function is left in `args.run`; torch is imported only there."""
    parser = subparsers.add_parser(
        "quality",
        help="what moved, repaired and quantized KV costs in quality",
        description=_QUALITY_DESCRIPTION,
        epilog=_QUALITY_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="smollm2", help="Hugging Face directory, GGUF file, or smollm2 (default)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--corpus", choices=["prose", "dialogue"], default="prose", help="default: prose")
    source.add_argument("--documents", type=Path, metavar="FILE", help="other texts, separated by lines of ---")
    parser.add_argument("--prompts", type=_positive, default=12, metavar="N", help="default: 12")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the prompts drawn (default: 0)")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="torch threads (default: torch's choice)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--plot", nargs="?", const="", metavar="FILE", help="draw curves as SVG; bars without FILE")
    parser.set_defaults(run=run_quality)


def run_quality(args: argparse.Namespace) -> int:
    """Measure and print. Exit code 1 when the model or the documents cannot be read."""
    return _guarded(_measure_quality, args)


def run(args: argparse.Namespace) -> int:
    """Load the model and serve it until told to stop."""
    return _guarded(_serve, args)


def _guarded(command: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run a command; what its user can mend is one line."""
    try:
        return command(args)
    except ModuleNotFoundError as error:
        if error.name not in _OPTIONAL_MODULES:
            raise
        print(f"ropeway: error: {error.name} is not installed: pip install 'ropeway[worker]'", file=sys.stderr)
    except ValueError as error:  # ModelError, a bad keyring
        print(f"ropeway: error: {error}", file=sys.stderr)
    return 1


def _serve(args: argparse.Namespace) -> int:
    import torch

    from cachecore.prompts.huggingface import HuggingFaceRenderer
    from cachecore.scope import Keyring
    from workers.openai.server import serve
    from workers.reference.engine import EngineOptions, ReferenceEngine

    if args.threads:
        torch.set_num_threads(args.threads)
    directory, name = _model_directory(args.model)
    options = EngineOptions(
        served_model_name=args.served_model_name or name,
        device=args.device or "",
        dtype=args.dtype or "",
        block_size_tokens=args.block_size,
        blocks=args.blocks,
        kv_memory_mib=args.kv_memory_mib,
        max_model_len=args.max_model_len,
        batched_tokens_max=args.max_batched_tokens,
        sequences_max=args.max_sequences,
    )
    keyring = Keyring.load(args.keyring) if args.keyring else Keyring.generate()
    renderer = HuggingFaceRenderer.load(directory)
    publisher = _publisher(args.kv_events_port)
    try:
        engine = ReferenceEngine.load(directory, renderer, options, keyring, _announcer(publisher))
        return serve(engine, args.host, args.port, publisher=publisher)
    finally:
        publisher.close()


def _measure_quality(args: argparse.Namespace) -> int:
    import torch
    from rich.console import Console

    from cachecore.prompts.huggingface import HuggingFaceRenderer
    from workers.reference.model_cli import progress_bar
    from workers.reference.quality import SAMPLES, read_documents, report_quality
    from workers.reference.quality_report import print_table, svg_plot, text_plot

    if args.threads:
        torch.set_num_threads(args.threads)
    path = args.documents or SAMPLES / f"{args.corpus}.txt"
    try:
        documents = read_documents(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    directory, name = _model_directory(args.model)
    renderer = HuggingFaceRenderer.load(directory)
    with progress_bar() as progress:
        report = report_quality(
            directory, name, renderer, (path.stem, documents), (args.prompts, args.seed),
            lambda done: progress("prompts", done, args.prompts),
        )  # fmt: skip
    if args.json:
        print(json.dumps(report.as_json()))
    else:
        print_table(report, Console())
    if args.plot:
        Path(args.plot).write_text(svg_plot(report), encoding="utf-8")
    elif args.plot is not None:
        print(text_plot(report), file=sys.stderr if args.json else sys.stdout)
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def _model_directory(model: str) -> tuple[Path, str]:
    """Where the model lies and what it is called, fetching or converting it first where needed."""
    from workers.reference.fetch import SMOLLM2, default_cache_dir, import_gguf
    from workers.reference.model_cli import fetch_with_progress, progress_bar

    path = Path(model)
    if path.is_dir():
        return path, path.resolve().name
    if model == SMOLLM2:
        return fetch_with_progress().directory, SMOLLM2
    if path.suffix == ".gguf":
        with progress_bar() as progress:
            return import_gguf(path, default_cache_dir(), progress).directory, path.stem
    raise ValueError(f"{model} is neither a directory, nor a .gguf file, nor {SMOLLM2}")


def _publisher(port: int) -> "EventPublisher":
    import zmq

    from workers.publisher import EventPublisher, PublisherConfig

    endpoint = f"tcp://127.0.0.1:{port}"
    try:
        return EventPublisher(PublisherConfig(endpoint=endpoint))
    except zmq.ZMQError as error:
        raise ValueError(f"cannot publish KV events on {endpoint}: {error}") from error


def _announcer(publisher: "EventPublisher") -> "Callable[[Sequence[KvEvent]], object]":
    from cachecore.events import EventBatch

    return lambda events: publisher.publish(EventBatch(time.time(), tuple(events)))

"""`ropeway worker reference`: arguments, and the one place where the worker's parts are put together."""

import argparse
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


def run(args: argparse.Namespace) -> int:
    """Load the model and serve it until told to stop."""
    try:
        return _serve(args)
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

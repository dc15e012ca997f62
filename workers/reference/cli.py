"""`ropeway worker reference` and `ropeway quality`: arguments, and where the parts of each are put together."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cachecore.transfer.tcp.tls import Tls, TlsError
from workers.openai.leaving import add_leaving_arguments, patience_of
from workers.pools import OpenPools, add_pool_arguments, pools_of
from workers.tls import add_tls_arguments, tls_of

if TYPE_CHECKING:
    from cachecore.events import KvEvent
    from workers.publisher import EventPublisher
    from workers.reference.tiers.pools import PoolTier
    from workers.transfer.service import TransferOptions

_OPTIONAL_MODULES = frozenset({"torch", "numpy", "safetensors", "gguf"})

_DESCRIPTION = "Serve a Llama-architecture model over OpenAI's API, announcing its KV blocks."
_EXAMPLE = """\
examples:
  ropeway worker reference --model smollm2 --port 8101
  ropeway worker reference --keyring keyring.json --port 8101 --transfer-port 7101   # moves KV from and to its peers"""

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
    parser.add_argument(
        "--host-kv-mib", type=int, default=0, metavar="MIB", help="host memory for what the KV memory gives up"
    )
    _add_transfer_arguments(
        parser.add_argument_group("moving KV", "With --keyring only: peers must have the same keys.")
    )
    add_pool_arguments(parser)
    add_leaving_arguments(parser.add_argument_group("when it is told to stop"))
    parser.set_defaults(run=run)


def _add_transfer_arguments(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--transfer-host", default="127.0.0.1", metavar="HOST", help="default: 127.0.0.1")
    group.add_argument("--transfer-port", type=int, default=0, metavar="PORT", help="0 picks a free one (default)")
    group.add_argument(
        "--transport",
        action="append",
        choices=("nixl", "mooncake"),
        default=[],
        help="move KV by this engine as well, between workers that both have it (its extra must be installed; "
        "mooncake listens on all interfaces; neither encrypts what it moves)",
    )
    add_tls_arguments(group)
    group.add_argument("--no-transfer", action="store_true", help="neither serve KV to peers nor pull it from them")
    group.add_argument("--name", default="", help="of this worker in plans; default: where it serves KV")
    group.add_argument(
        "--codecs",
        type=lambda text: tuple(text.split(",")),
        metavar="LIST",
        help="what KV may travel in (default: what is measured to be good enough for the model, once, when the worker "
        "has nothing else to do; until then raw, and i8 for smollm2)",
    )
    group.add_argument(
        "--check-share",
        type=_share,
        default=0.005,
        metavar="SHARE",
        help="of answers from quantized or repaired KV, to be computed again and compared (default: 0.005)",
    )


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
    return guarded(_measure_quality, args)


def run(args: argparse.Namespace) -> int:
    """Load the model and serve it until told to stop."""
    return guarded(_serve, args)


def guarded(command: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run a command; what its user can mend is one line."""
    try:
        return command(args)
    except ModuleNotFoundError as error:
        if error.name not in _OPTIONAL_MODULES:
            raise
        print(f"ropeway: error: {error.name} is not installed: pip install 'ropeway[worker]'", file=sys.stderr)
    except TlsError as error:
        print(f"ropeway: error: {error}", file=sys.stderr)
        return 2
    except ValueError as error:  # ModelError, a bad keyring
        print(f"ropeway: error: {error}", file=sys.stderr)
    return 1


def _serve(args: argparse.Namespace) -> int:
    tls = _tls(args)  # before what takes time

    import torch

    from cachecore.prompts.huggingface import HuggingFaceRenderer
    from cachecore.scope import Keyring
    from workers.openai.server import serve
    from workers.reference.engine import EngineOptions, ReferenceEngine
    from workers.reference.guard import GuardOptions

    if args.threads:
        torch.set_num_threads(args.threads)
    pools = pools_of(args)
    directory, name = model_directory(args.model)
    transfer = _transfer_options(args, name, tls)
    tier = None if pools is None else _pool_tier(pools, transfer)
    if transfer is not None and tier is not None:
        transfer = replace(transfer, attachments=(*transfer.attachments, tier.attach))
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
        transfer=transfer,
        guard=GuardOptions(args.check_share) if transfer is not None and args.check_share else None,
        on_named=tier.offer if tier is not None else lambda run: None,
        host_kv_mib=args.host_kv_mib,
    )
    keyring = Keyring.load(args.keyring) if args.keyring else Keyring.generate()
    renderer = HuggingFaceRenderer.load(directory)
    publisher = _publisher(args.kv_events_port)
    try:
        engine = ReferenceEngine.load(directory, renderer, options, keyring, _announcer(publisher))
        if not args.codecs:
            engine.calibrate(directory)
        engine.listen()
        return serve(
            engine,
            args.host,
            args.port,
            publisher=publisher,
            patience=patience_of(args),
            pools=tier,
            quality=engine.quality,
        )
    finally:
        publisher.close()


def _tls(args: argparse.Namespace) -> Tls | None:
    """Raises TlsError."""
    tls = tls_of(args, args.transfer_host)
    if tls is not None and (args.no_transfer or not args.keyring):
        raise TlsError("--kv-tls-cert is for moving KV: it needs --keyring, and no --no-transfer")
    return tls


def _transfer_options(args: argparse.Namespace, model: str, tls: Tls | None) -> "TransferOptions | None":
    """None where no peer could authenticate what this worker sends."""
    from cachecore.kv.codecs.registry import codec_named
    from workers.reference.fetch import SMOLLM2
    from workers.transfer.service import TransferOptions

    if args.no_transfer or not args.keyring:
        return None
    codecs = args.codecs or (("raw", "i8") if model == SMOLLM2 else ("raw",))
    for codec in codecs:
        codec_named(codec)
    return TransferOptions(args.transfer_host, args.transfer_port, args.name, codecs, tls=tls, wires=args.transport)


def _pool_tier(pools: OpenPools, transfer: "TransferOptions | None") -> "PoolTier":
    """Raises ValueError."""
    from workers.reference.tiers.pools import PoolTier

    if transfer is None:
        raise ValueError("--pool needs --keyring, by which pooled KV is authenticated, and no --no-transfer")
    return PoolTier(pools, transfer.codecs)


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
    directory, name = model_directory(args.model)
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


def _share(text: str) -> float:
    share = float(text)
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return share


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def model_directory(model: str) -> tuple[Path, str]:
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

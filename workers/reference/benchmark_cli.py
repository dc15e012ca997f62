"""`ropeway benchmark`: arguments, and where its parts are put together."""

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from workers.reference.cli import guarded, model_directory

if TYPE_CHECKING:
    from workers.reference.benchmark import BenchmarkReport, Progress, Shape

_DESCRIPTION = """\
Measure what moving KV costs on this machine: the error and rate of re-rotation, each codec's size, KL, cosine and rate,
a .hckv file written and read, a fetch over loopback with rotation; each beside a plain copy, file or socket in the same
run."""
_EXAMPLE = """\
examples:
  ropeway benchmark
  ropeway benchmark --model none --rounds 3 --json > benchmark.json"""
_NO_MODEL = "none"


def add_benchmark_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Define `ropeway benchmark`. Its function is left in `args.run`; torch is imported only there."""
    parser = subparsers.add_parser(
        "benchmark",
        help="what moving KV costs on this machine",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", default="smollm2", help="for KL and cosine: a directory, a GGUF file, smollm2 (default), or none"
    )
    parser.add_argument("--prompts", type=_positive, default=4, metavar="N", help="that KL is taken over (default: 4)")
    parser.add_argument(
        "--rounds", type=_positive, default=5, metavar="N", help="of which the best counts (default: 5)"
    )
    parser.add_argument("--tokens", type=_positive, default=2048, metavar="N", help="of KV to move (default: 2048)")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="torch threads (default: torch's choice)")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="where .hckv files go (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run_benchmark)


def run_benchmark(args: argparse.Namespace) -> int:
    """Measure and print. Exit code 1 when the model cannot be read or KV does not arrive."""
    return guarded(_print_benchmark, args)


def _print_benchmark(args: argparse.Namespace) -> int:
    report = _measure(args)
    if args.json:
        print(json.dumps(report.as_json()))
        return 0
    from rich.console import Console

    from workers.reference.benchmark_report import print_tables

    print_tables(report, Console())
    return 0


def _measure(args: argparse.Namespace) -> "BenchmarkReport":
    import torch

    from workers.reference.benchmark import Shape
    from workers.reference.model_cli import progress_bar

    if args.threads:
        torch.set_num_threads(args.threads)
    shape = Shape(tokens=-(-args.tokens // 16) * 16)
    located = None if args.model == _NO_MODEL else model_directory(args.model)
    with progress_bar() as progress, tempfile.TemporaryDirectory(dir=args.directory) as directory:
        return _report(args, shape, Path(directory), located, progress)


def _report(
    args: argparse.Namespace,
    shape: "Shape",
    directory: Path,
    located: tuple[Path, str] | None,
    progress: "Progress",
) -> "BenchmarkReport":
    import torch

    from workers.reference import benchmark
    from workers.reference.benchmark_moves import fetch_rates, file_rates

    kl, cosine = _model_figures(located, args.prompts, progress)
    errors = benchmark.rotation_errors(progress)
    seconds = benchmark.kv_seconds(shape, args.rounds, progress)
    size = 2 * shape.layers * shape.bytes_each
    copy_rate = size / seconds.copy / 1e9
    return benchmark.BenchmarkReport(
        model=located[1] if located else None,
        threads=torch.get_num_threads(),
        megabytes=size / 1e6,
        copy_gb_per_second=copy_rate,
        rotation_errors=errors,
        rates=[
            benchmark.rotation_rate(shape, seconds),
            *file_rates(shape, args.rounds, directory, copy_rate, progress),
            *fetch_rates(shape, args.rounds, progress),
        ],
        codecs=benchmark.codec_figures(shape, seconds, kl, cosine),
    )


def _model_figures(
    located: tuple[Path, str] | None, prompts: int, progress: "Progress"
) -> tuple[dict[str, float], dict[str, float]]:
    """Each codec's KL and cosine, on the model where there is one."""
    from workers.reference import benchmark

    if located is None:
        return {}, benchmark.cosines(benchmark.drawn_kv(benchmark.Shape()), None)
    from cachecore.prompts.huggingface import HuggingFaceRenderer
    from workers.reference.quality import SAMPLES, draw_prompts, load_model, read_documents

    directory, _ = located
    model = load_model(directory)
    documents = read_documents((SAMPLES / "prose.txt").read_text(encoding="utf-8"))
    drawn = list(draw_prompts(documents, HuggingFaceRenderer.load(directory), prompts, seed=0))
    kl = benchmark.codec_kl(model, drawn, progress)
    return kl, benchmark.cosines(benchmark.model_kv(model, drawn[0]), model.rope)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number

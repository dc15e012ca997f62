"""Where a command's traffic comes from: arguments that audit and load test have in common, and what they stand for."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from loadtest.commands import Progress, UsageError, factor, positive, readable, workload

if TYPE_CHECKING:
    from cachecore.prompts.contract import Renderer
    from loadtest.traces.contract import Trace


def add_source(parser: argparse.ArgumentParser) -> "argparse._ArgumentGroup":
    """Returns the group for more arguments about the traffic."""
    group = parser.add_argument_group("traffic, one of")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=readable, metavar="FILE", help="a trace in any known form; told by its content")
    source.add_argument("--log-file", type=readable, metavar="FILE", help="requests with bodies, in any known form")
    source.add_argument(
        "--workload", type=workload, metavar="NAME", help="generated: chat, rag, tenants ...; a wrong name lists all"
    )
    group = parser.add_argument_group("about the traffic")
    group.add_argument("--format", metavar="NAME", help="of the file, where its content leaves doubt")
    group.add_argument(
        "--block-size", type=positive, metavar="N", help="tokens of a block, where the file does not tell"
    )
    group.add_argument("--tokenizer", type=Path, metavar="DIR", help="for bodies (default: four bytes are a token)")
    group.add_argument("--requests", type=positive, metavar="N", help="the first so many, or so many generated")
    group.add_argument("--rate", type=factor, metavar="X", help="per second, where there are no times")
    group.add_argument("--raw-arrivals", action="store_true", help="leave arrivals on their clock's grid")
    return group


def generated(
    arguments: argparse.Namespace,
    progress: Progress,
    seed: int,
    block_size_tokens: int | None = None,
    bodies: bool = False,
) -> "Trace":
    """The workload that was named; blocks are of `--block-size`, or of this many tokens, or the generator's own."""
    from loadtest.workloads.generating import BLOCK_SIZE_TOKENS, generate

    return generate(
        arguments.workload,
        seed,
        requests=arguments.requests,
        rate=arguments.rate,
        block_size_tokens=arguments.block_size or block_size_tokens or BLOCK_SIZE_TOKENS,
        bodies=bodies,
        progress=lambda done, total: progress(f"generating, seed {seed}", done, total),
    )


def read(arguments: argparse.Namespace, progress: Progress) -> "Trace":
    """The file that was named, its first `--requests`, its arrivals as they are. Raises UsageError."""
    from loadtest.traces.arrivals import first
    from loadtest.traces.contract import TraceError
    from loadtest.traces.reading import read_trace

    try:
        trace = read_trace(
            arguments.trace or arguments.log_file,
            arguments.format,
            arguments.block_size,
            renderer=_renderer(arguments.tokenizer),
            rate=arguments.rate or 1.0,
            progress=lambda done, total: progress("reading", done, total),
        )
    except TraceError as error:
        raise UsageError(str(error)) from None
    return first(trace, arguments.requests) if arguments.requests else trace


def _renderer(path: Path | None) -> "Renderer | None":
    if path is None:
        return None
    from loadtest.traces.texts import load_renderer

    try:
        return load_renderer(path)
    except ValueError as error:
        raise UsageError(f"--tokenizer {error}") from None

"""`ropeway worker`, `model`, `quality` and `benchmark`: their arguments live beside the code they start."""

import argparse

from workers.reference.benchmark_cli import add_benchmark_parser
from workers.reference.cli import add_quality_parser, add_reference_parser
from workers.reference.model_cli import add_model_parser
from workers.simulated.cli import add_simulated_parser

_EPILOG = """\
examples:
  ropeway worker simulated --count 4 --port 8101
  ropeway worker reference --model smollm2 --port 8101"""


def add_parsers(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Define this package's commands. The chosen one's function is left in `args.run`: namespace -> exit code."""
    worker = subparsers.add_parser(
        "worker",
        help="serve an engine",
        description="Serve an engine behind the gateway.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = worker.add_subparsers(required=True, metavar="KIND")
    add_reference_parser(kinds)
    add_simulated_parser(kinds)
    add_model_parser(subparsers)
    add_quality_parser(subparsers)
    add_benchmark_parser(subparsers)

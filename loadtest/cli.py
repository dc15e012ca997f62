"""This package's commands, and its part of `ropeway benchmark`."""

import argparse
from typing import TYPE_CHECKING

from loadtest.audit.cli import add_audit_parser
from loadtest.breakeven_cli import add_break_even
from loadtest.client.cli import add_load_test

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parsers(subparsers: "Subparsers") -> None:
    """Define this package's commands. The chosen one's function is left in `args.run`: namespace -> exit code.

    `benchmark` is there already, and gets a second part.
    """
    add_load_test(subparsers)
    add_audit_parser(subparsers)
    add_break_even(subparsers.choices["benchmark"])

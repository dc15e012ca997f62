"""What the gateway's commands have in common: how they are described, and the kinds of values they take."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def command(subparsers: "Subparsers", name: str, summary: str, epilog: str) -> argparse.ArgumentParser:
    """`epilog`: examples of the command, as they are typed."""
    return subparsers.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def port(text: str) -> int:
    number = int(text)
    if not 0 < number < 65_536:
        raise argparse.ArgumentTypeError(f"a port lies in 1..65535, not {number}")
    return number


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"at least 1 is needed, not {number}")
    return number


def seed(text: str) -> int:
    number = int(text)
    if not 0 <= number < 2**63:
        raise argparse.ArgumentTypeError(f"a seed lies in 0..2**63-1, not {number}")
    return number


def seconds(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"more than 0 is needed, not {text}")
    return number


def named_url(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not (name and equals and url):
        raise argparse.ArgumentTypeError(f"NAME=URL is expected, not {text!r}")
    return name, url.rstrip("/")


def tokenizer(text: str) -> tuple[str, str]:
    model, equals, directory = text.partition("=")
    if not (model and equals and directory):
        raise argparse.ArgumentTypeError(f"MODEL=DIR is expected, not {text!r}")
    return model, directory

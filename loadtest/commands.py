"""What this package's commands have in common: errors in one line, progress on stderr, checked arguments."""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

EXIT_USAGE = 2

_Value = TypeVar("_Value")
_Number = TypeVar("_Number", int, float)


class UsageError(ValueError):
    """What was asked for cannot be done, for a reason that its user can mend. The message is one line."""


class Progress(Protocol):
    """Told how far each kind of work has come."""

    def __call__(self, what: str, done: float, total: float) -> None: ...


def guarded(command: Callable[[argparse.Namespace], int], *errors: type[Exception]) -> Callable[..., int]:
    """The command, with `UsageError` and `errors` told in one line and answered by exit code 2."""
    told: tuple[type[Exception], ...] = (UsageError, *errors)

    def run(arguments: argparse.Namespace) -> int:
        try:
            return command(arguments)
        except told as error:
            print(f"ropeway: error: {error}", file=sys.stderr)
            return EXIT_USAGE

    return run


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """A bar on stderr for each kind of work, gone when all is done; nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    tasks = {}
    with Bars(console=console, transient=True, disable=not console.is_terminal) as bars:

        def show(what: str, done: float, total: float) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield show


def silent(what: str, done: float, total: float) -> None:
    """Progress that nobody watches."""


def positive(text: str) -> int:
    number = _number(text, int, "a whole number")
    if number < 1:
        raise argparse.ArgumentTypeError(f"at least 1 is needed, not {text}")
    return number


def factor(text: str) -> float:
    number = _number(text, float, "a number")
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"more than 0 is needed, not {text}")
    return number


def readable(text: str) -> Path:
    """A file that is there."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text}: no such file")
    return path


def one_of(kind: str, text: str, names: Iterable[str]) -> str:
    if text not in names:
        raise argparse.ArgumentTypeError(f"no {kind} {text!r}; there are {', '.join(names)}")
    return text


def workload(text: str) -> str:
    """The name of one."""
    from loadtest.workloads.generating import WORKLOADS

    return one_of("workload", text, WORKLOADS)


def listed(item: Callable[[str], _Value]) -> Callable[[str], list[_Value]]:
    """A comma-separated list of items."""

    def items(text: str) -> list[_Value]:
        found = [item(part.strip()) for part in text.split(",") if part.strip()]
        if not found:
            raise argparse.ArgumentTypeError("the list is empty")
        return found

    return items


def known(look_up: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """An argument that `look_up` finds, or says in a ValueError why not."""

    def item(text: str) -> _Value:
        try:
            return look_up(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return item


def _number(text: str, kind: type[_Number], name: str) -> _Number:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{name} is expected, not {text!r}") from None

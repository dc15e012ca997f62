"""`ropeway model fetch`: get a model before a worker needs it."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.reference.fetch import FetchedModel, Progress

_EXAMPLE = "example:\n  ropeway model fetch smollm2"


def add_model_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Define `ropeway model`. The chosen command's function is left in `args.run`."""
    model = subparsers.add_parser(
        "model",
        help="fetch models",
        description="Models for the reference worker.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = model.add_subparsers(required=True, metavar="COMMAND")
    fetch = commands.add_parser(
        "fetch",
        help="fetch a model into the cache",
        description="Fetch a model into $ROPEWAY_CACHE (default ~/.cache/ropeway) and print where it lies.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    fetch.add_argument("name", choices=["smollm2"], help="SmolLM2-135M-Instruct")
    fetch.add_argument("--cache", type=Path, default=None, metavar="DIR", help="another cache directory")
    fetch.add_argument("--json", action="store_true", help="print the result as JSON")
    fetch.set_defaults(run=run_fetch)


def run_fetch(args: argparse.Namespace) -> int:
    from workers.reference.config import ModelError

    try:
        fetched = fetch_with_progress(args.cache)
    except ModelError as error:
        print(f"ropeway: error: {error}", file=sys.stderr)
        return 1
    if args.json:
        result = {"model": args.name, "directory": str(fetched.directory), "sha256": fetched.sha256}
        print(json.dumps({**result, "fetched": fetched.fresh}))
    else:
        print(fetched.directory)
    return 0


def fetch_with_progress(cache_dir: Path | None = None) -> "FetchedModel":
    """SmolLM2 from the cache or the network, with a progress bar on stderr. Raises ModelError."""
    try:
        from workers.reference.fetch import default_cache_dir, fetch_smollm2
    except ModuleNotFoundError as error:
        from workers.reference.config import ModelError

        raise ModelError(f"{error.name} is not installed: pip install 'ropeway[worker]'") from error
    with progress_bar() as progress:
        return fetch_smollm2(cache_dir or default_cache_dir(), progress)


@contextmanager
def progress_bar() -> "Iterator[Progress]":
    """A bar on stderr that appears with the first call and shows one line for each kind of work."""
    from rich.console import Console
    from rich.progress import Progress as Bars

    tasks = {}
    with Bars(console=Console(stderr=True)) as bars:

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield show

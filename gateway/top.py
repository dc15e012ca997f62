"""`ropeway top`: a gateway's status in a terminal, from the feed that the dashboard lives on."""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.arguments import command, seconds

if TYPE_CHECKING:
    import httpx
    from rich.console import Console

    from gateway.views.terminal import Picture

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DEFAULT_URL = "http://127.0.0.1:8000"
SILENT_SECONDS_MAX = 15.0
PAUSE_SECONDS = 1.0
PLAIN_SECONDS = 2.0
"""Between two pictures where they are written below each other."""
PLAIN_COLUMNS = 160


def add_top(subparsers: "Subparsers") -> None:
    parser = command(
        subparsers,
        "top",
        "watch a gateway: workers, latencies, and why requests went where they went",
        """examples:
  ropeway top
  ropeway top http://gateway:8000 --admin-key-file admin.key
  ropeway top --once                  one picture, plain
  ropeway top --duration 60 > log     plain pictures below each other, for a minute

Ctrl-C ends it.""",
    )
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, help="of the gateway (default: %(default)s)")
    parser.add_argument("--admin-key-file", type=Path, metavar="FILE", help="the key that opens /status")
    parser.add_argument("--once", action="store_true", help="show it once, and end")
    parser.add_argument("--duration", type=seconds, metavar="SECONDS", help="end after so long")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    import httpx
    from rich.console import Console

    from gateway.errors import ConfigError

    headers = {}
    if arguments.admin_key_file is not None:
        try:
            headers["authorization"] = f"Bearer {arguments.admin_key_file.read_text().strip()}"
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{arguments.admin_key_file}: {getattr(error, 'strerror', None) or error}") from error
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_COLUMNS
    with httpx.Client(base_url=arguments.url, headers=headers, timeout=SILENT_SECONDS_MAX, trust_env=False) as http:
        if arguments.once:
            _show_once(http, console)
        else:
            ends_at = float("inf") if arguments.duration is None else time.monotonic() + arguments.duration
            (_watch if console.is_terminal else _write)(http, console, ends_at)
    return 0


def _show_once(http: "httpx.Client", console: "Console") -> None:
    import httpx

    from gateway.errors import StartupError
    from gateway.views.terminal import Picture, render

    try:
        answer = http.get("/status")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise StartupError(f"{http.base_url}: {_reason(error)}") from error
    _require(answer)
    console.print(render(Picture.of(answer.json()), None, time.time()))


def _watch(http: "httpx.Client", console: "Console", ends_at: float) -> None:
    """Redraw the screen, with a word on it while the gateway is away."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from gateway.views.terminal import render

    with Live(console=console, screen=True, auto_refresh=False) as live:
        for picture, trouble in _pictures(http, ends_at):
            shown = [render(picture, console.height, time.time())] if picture.status else []
            said = [Text(f"connection lost: {trouble}", "bold red")] if trouble else []
            live.update(Group(*said, *shown), refresh=True)


def _write(http: "httpx.Client", console: "Console", ends_at: float) -> None:
    """Pictures below each other, for files and pipes."""
    from gateway.views.terminal import render

    due = 0.0
    for picture, trouble in _pictures(http, ends_at):
        if trouble:
            console.print(f"connection lost: {trouble}", markup=False)
        elif time.monotonic() >= due:
            due = time.monotonic() + PLAIN_SECONDS
            console.print(time.strftime("%Y-%m-%d %H:%M:%S"), render(picture, None, time.time()), "", sep="\n")


def _pictures(http: "httpx.Client", ends_at: float) -> Iterator[tuple["Picture", str]]:
    """The state after each event, and what is wrong. Raises StartupError where the gateway was never reached."""
    import httpx

    from gateway.errors import StartupError
    from gateway.views.terminal import Picture

    picture = Picture()
    while time.monotonic() < ends_at:
        try:
            for event in _events(http):
                picture.take(event)
                yield picture, ""
                if time.monotonic() >= ends_at:
                    return
            trouble = "the gateway has ended it"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            trouble = _reason(error)
            if not picture.status:
                raise StartupError(f"{http.base_url}: {trouble}") from error
        yield picture, trouble
        time.sleep(PAUSE_SECONDS)


def _events(http: "httpx.Client") -> Iterator[dict[str, Any]]:
    with http.stream("GET", "/status/feed") as answer:
        if answer.status_code != 200:
            answer.read()
            _require(answer)
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


def _require(answer: "httpx.Response") -> None:
    """Raises StartupError unless it is the answer asked for."""
    from gateway.errors import StartupError

    if answer.status_code == 401:
        raise StartupError(f"{answer.url}: the admin key is needed, or another: --admin-key-file")
    if answer.status_code != 200:
        raise StartupError(f"{answer.url}: status {answer.status_code}; is it a gateway's operators' address?")


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__

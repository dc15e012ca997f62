"""The gateway's subcommands: `serve`, `up`, `keys`, `index`, `events`.

Whatever a command needs is imported when it runs, so that `ropeway --help` stays quick.
"""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.arguments import command, named_url, port, positive, seconds, seed
from gateway.keys_cli import add_keys
from gateway.settings.commands import add_config, add_serve_flags, request_of
from gateway.settings.loading import load_again
from gateway.top import add_top
from policies import POLICIES

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parsers(subparsers: "Subparsers") -> None:
    """Add this trunk's commands; each sets `run`, a function from parsed arguments to an exit code."""
    _add_up(subparsers)
    _add_serve(subparsers)
    add_config(subparsers)
    add_keys(subparsers)
    _add_index(subparsers)
    _add_events(subparsers)
    add_top(subparsers)


def _add_up(subparsers: "Subparsers") -> None:
    parser = command(
        subparsers,
        "up",
        "start workers and a gateway on this machine, and stop them together",
        """examples:
  ropeway up                              two reference workers with a small real model, fetched on first use
  ropeway up --simulated --workers 8      no model, no torch: eight workers that only keep time
  ropeway up --simulated --prefill 1 --decode 2
  ropeway up --port 9000 --policy session
  ropeway up --simulated --workers 4 --chaos 7 --chaos-interval 2-8""",
    )
    parser.add_argument("--simulated", action="store_true", help="workers that imitate an engine's timing")
    parser.add_argument("--workers", type=positive, default=2, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--prefill", type=positive, metavar="N", help="workers that compute prompts for others ...")
    parser.add_argument("--decode", type=positive, metavar="N", help="... and workers that answer, in place of these")
    parser.add_argument("--model", default="smollm2", metavar="DIR|smollm2", help="what they serve (default: smollm2)")
    parser.add_argument("--port", type=port, default=8000, metavar="P", help="of the gateway (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", metavar="H", help="of the gateway (default: %(default)s)")
    parser.add_argument("--policy", choices=list(POLICIES), help="how requests are placed (default: kv-aware)")
    parser.add_argument(
        "--redis",
        default="embedded",
        metavar="URL|embedded|none",
        help="where the index lives: a server, a Valkey of our own, or the gateway's memory (default: %(default)s)",
    )
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="for logs, keyring and the embedded Valkey")
    parser.add_argument("--json", action="store_true", help="print URLs, processes and logs as JSON once all serve")
    chaos = parser.add_argument_group("faults on purpose (docs/chaos.md)")
    chaos.add_argument("--chaos", type=seed, metavar="SEED", help="kill and freeze workers and the embedded Valkey")
    chaos.add_argument("--chaos-interval", metavar="MIN-MAX", help="seconds between a part's faults (default: 5-20)")
    chaos.add_argument("--chaos-outage", metavar="MIN-MAX", help="seconds that a fault lasts (default: 0.5-3)")
    parser.set_defaults(run=_run_up)


def _run_up(arguments: argparse.Namespace) -> int:
    from gateway.chaos import bounds_of
    from gateway.errors import StartupError
    from gateway.up import UpOptions, up

    if (arguments.prefill is None) != (arguments.decode is None):
        raise StartupError("--prefill and --decode go together: the one computes prompts, the other answers")
    return up(
        UpOptions(
            host=arguments.host,
            port=arguments.port,
            workers=arguments.workers,
            prefill=arguments.prefill or 0,
            decode=arguments.decode or 0,
            simulated=arguments.simulated,
            policy=arguments.policy,
            model=arguments.model,
            redis=arguments.redis,
            state_directory=arguments.state_dir,
            as_json=arguments.json,
            chaos_seed=arguments.chaos,
            chaos_bounds=bounds_of(arguments.chaos, arguments.chaos_interval, arguments.chaos_outage),
        )
    )


def _add_serve(subparsers: "Subparsers") -> None:
    parser = command(
        subparsers,
        "serve",
        "run the gateway in front of workers that run already",
        """examples:
  ropeway serve --worker http://127.0.0.1:8001 --worker http://127.0.0.1:8002 --tokenizer smollm2=DIR
  ropeway serve -c gateway.yaml --policy prefix-aware
  ROPEWAY_LIMITS_BODY_BYTES_MAX=1048576 ropeway serve -c gateway.yaml

Flags win over variables, variables over the file. The keys of the file: docs/reference/settings.md""",
    )
    add_serve_flags(parser)
    # Said by the process that runs several gateways to each of them.
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.set_defaults(run=_run_serve)


def _run_serve(arguments: argparse.Namespace) -> int:
    request = request_of(arguments)
    config = load_again(request)
    if config.processes > 1:
        from gateway import processes

        if arguments.process is None:
            return processes.run(config, [sys.executable, "-m", "ropeway", *sys.argv[1:]])
        request = processes.member(request, config, arguments.process)
        config = load_again(request)

    from gateway import server

    return server.run(config, request)


def _add_index(subparsers: "Subparsers") -> None:
    parser = command(
        subparsers,
        "index",
        "look at the index that gateways share",
        """examples:
  ropeway index stats --redis redis://127.0.0.1
  ropeway index dump --redis unix:///var/lib/ropeway/valkey.sock --holder worker-1
  ropeway index check --redis redis://127.0.0.1 --gateway http://127.0.0.1:8000""",
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    shown = command(
        actions,
        "stats",
        "what each holder has, who follows its events, and what that takes of the server's memory",
        "example:\n  ropeway index stats --redis redis://127.0.0.1 --json",
    )
    dumped = command(
        actions,
        "dump",
        "every run of blocks in the index, a JSON document each",
        "example:\n  ropeway index dump --redis redis://127.0.0.1 --holder worker-1",
    )
    checked = command(
        actions,
        "check",
        "hold the index against what the workers say they have; exit code 1 where they differ",
        "example:\n  ropeway index check --redis redis://127.0.0.1 --worker worker-1=http://127.0.0.1:8001",
    )
    for action in (shown, dumped, checked):
        action.add_argument("--redis", required=True, metavar="URL", help="the server; unix:///... for an embedded one")
        action.add_argument("--prefix", default="ropeway", help="sharing.prefix of the fleet (default: %(default)s)")
    for action in (shown, checked):
        action.add_argument("--json", action="store_true", help="print JSON")
    dumped.add_argument("--holder", metavar="NAME", help="of this worker or pool alone")
    checked.add_argument(
        "--gateway",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="whose /status names the workers (default: %(default)s)",
    )
    checked.add_argument(
        "--worker", action="append", default=[], type=named_url, metavar="NAME=URL", help="instead; may be repeated"
    )
    shown.set_defaults(run=_run_index_stats)
    dumped.set_defaults(run=_run_index_dump)
    checked.set_defaults(run=_run_index_check)


def _run_index_stats(arguments: argparse.Namespace) -> int:
    from gateway import index_tools

    return asyncio.run(index_tools.stats(index_tools.Place(arguments.redis, arguments.prefix), arguments.json))


def _run_index_dump(arguments: argparse.Namespace) -> int:
    from gateway import index_tools

    return asyncio.run(index_tools.dump(index_tools.Place(arguments.redis, arguments.prefix), arguments.holder))


def _run_index_check(arguments: argparse.Namespace) -> int:
    from gateway import index_tools

    place = index_tools.Place(arguments.redis, arguments.prefix)
    return asyncio.run(index_tools.check(place, dict(arguments.worker), arguments.gateway, arguments.json))


def _add_events(subparsers: "Subparsers") -> None:
    parser = command(
        subparsers,
        "events",
        "record an engine's KV events, and play them back",
        """examples:
  ropeway events capture events.jsonl --endpoint tcp://127.0.0.1:5557 --replay-endpoint tcp://127.0.0.1:5558
  ropeway events replay events.jsonl --endpoint tcp://127.0.0.1:5557 --speed 10""",
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    _add_events_capture(actions)
    _add_events_replay(actions)


def _add_events_capture(actions: "Subparsers") -> None:
    parser = command(
        actions,
        "capture",
        "write a live event stream to a file, a JSON line a message, until a bound is met or Ctrl-C",
        """examples:
  ropeway events capture events.jsonl --endpoint tcp://127.0.0.1:5557 --replay-endpoint tcp://127.0.0.1:5558
  ropeway events capture events.jsonl --endpoint tcp://127.0.0.1:5557 --bind --seconds 60 --note 'vLLM 0.32'

vLLM binds endpoints with '*' (and ipc://) and connects to all others: for those, --bind listens where it connects to.
Lines hold the payload as it came, in base64. With a replay endpoint, what was announced before comes first.""",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="must not exist yet")
    parser.add_argument("--endpoint", required=True, metavar="URL", help="of the live stream, tcp:// or ipc://")
    parser.add_argument("--replay-endpoint", metavar="URL", help="asked for what was announced before")
    parser.add_argument("--bind", action="store_true", help="for engines that connect to their subscribers")
    parser.add_argument("--topic", default="", metavar="T", help="topics that begin so (default: all)")
    parser.add_argument("--note", default="", metavar="TEXT", help="kept in the file's first line")
    parser.add_argument("--seconds", type=seconds, metavar="S", help="(default: no bound)")
    parser.add_argument("--messages-max", type=positive, default=100_000, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--bytes-max", type=positive, default=2**30, metavar="N", help="of the file (default: 1 GiB)")
    parser.add_argument("--json", action="store_true", help="print what was recorded as JSON")
    parser.set_defaults(run=_run_events_capture)


def _add_events_replay(actions: "Subparsers") -> None:
    parser = command(
        actions,
        "replay",
        "send a recorded event stream as an engine would, once somebody has subscribed",
        """examples:
  ropeway events replay events.jsonl --endpoint tcp://127.0.0.1:5557 --replay-endpoint tcp://127.0.0.1:5558
  ropeway events replay events.jsonl --endpoint tcp://127.0.0.1:5557 --connect --speed inf""",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="written by 'ropeway events capture'")
    parser.add_argument("--endpoint", required=True, metavar="URL", help="to publish at")
    parser.add_argument("--replay-endpoint", metavar="URL", help="where what was sent can be asked for again")
    parser.add_argument("--connect", action="store_true", help="for a subscriber that has bound the endpoint")
    parser.add_argument("--speed", type=seconds, default=1.0, metavar="X", help="times faster; inf waits for nothing")
    parser.add_argument("--wait", type=seconds, default=60.0, metavar="S", help="for a subscriber (default: 60)")
    parser.add_argument("--linger", type=seconds, default=0.0, metavar="S", help="answer replays this long at the end")
    parser.add_argument("--json", action="store_true", help="print what was sent as JSON")
    parser.set_defaults(run=_run_events_replay)


def _run_events_capture(arguments: argparse.Namespace) -> int:
    from gateway import event_tools

    recording = event_tools.Recording(
        arguments.endpoint,
        arguments.file,
        arguments.replay_endpoint,
        arguments.bind,
        arguments.topic,
        arguments.note,
        arguments.seconds,
        arguments.messages_max,
        arguments.bytes_max,
    )
    return asyncio.run(event_tools.capture(recording, arguments.json))


def _run_events_replay(arguments: argparse.Namespace) -> int:
    from gateway import event_tools

    playing = event_tools.Playing(
        arguments.file,
        arguments.endpoint,
        arguments.replay_endpoint,
        arguments.connect,
        arguments.speed,
        arguments.wait,
        arguments.linger,
    )
    return asyncio.run(event_tools.replay(playing, arguments.json))

"""`ropeway audit`: arguments, and where its parts are put together."""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from loadtest.commands import (
    Progress,
    UsageError,
    factor,
    guarded,
    known,
    listed,
    one_of,
    positive,
    progress_bars,
)
from loadtest.hardware import CODECS, GPUS, LINKS, Link, hardware_of, link_of, named
from loadtest.models import DEFAULT_MODEL, MODELS, model_named
from loadtest.profiles import profile_for, ranks_for
from loadtest.sources import add_source, generated, read
from workers.timing import PROFILES, TimingProfile, profile_named

if TYPE_CHECKING:
    from loadtest.audit.auditing import TraceOfSeed
    from loadtest.audit.plan import Plan
    from loadtest.audit.report import Report

_DESCRIPTION = """\
Replay a trace, a log or a workload over a fleet in virtual time, with the gateway's own policies, state and index and
with other routers' policies beside them. Reports hit rates, latencies, goodput, the bounds that no policy can pass, and
what to do about it. Needs no GPU, no model and no network."""
_EXAMPLES = """\
examples:
  ropeway audit --log-file requests.jsonl
  ropeway audit --trace conversation_trace.jsonl --hit-rate-only
  ropeway audit --trace conversation_trace.jsonl --gpu h100 --nodes 8 --speedup 2,3,4,5 --seeds 5 --html audit.html
  ropeway audit --workload tenants --policies kv-aware,dynamo,llm-d --link none,roce-400 --json > audit.json
  ropeway audit --trace conversation_trace.jsonl --engine dynamo-poly --capacity 16384 --speedup 8 --raw-arrivals"""
_POLICIES_DEFAULT = ("kv-aware", "round-robin", "least-loaded", "sglang", "dynamo", "llm-d")
_ENGINES = {"dynamo-poly": "dynamo-polynomial"}
"""Short names of profiles in `workers.timing`."""
_NO_LINK = "none"
_AUTO = "auto"
_GIGABYTE = 1e9


class _Engine(NamedTuple):
    profile: TimingProfile
    gpus: int


class _Fleet(NamedTuple):
    nodes: int = 8
    capacity: str = "engine"


def add_audit_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Define `ropeway audit`. Its function is left in `args.run`."""
    parser = subparsers.add_parser(
        "audit",
        help="what routing would make of your traffic, and what others' would",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_source(parser)
    _add_fleet(parser)
    _add_runs(parser)
    parser.add_argument("--hit-rate-only", action="store_true", help="bounds alone, without replays")
    parser.add_argument("--html", type=_page, metavar="FILE", help="write the report as a page with plots")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=guarded(_audit))


def _add_fleet(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("fleet; lists are all replayed")
    group.add_argument(
        "--nodes", type=listed(positive), metavar="N,M", help="engines (default: 8, or a workload's own)"
    )
    group.add_argument(
        "--gpu", type=_gpu, default="h100", metavar="NAME", help=f"{', '.join(GPUS)}, or a machine as g6e.12xlarge"
    )
    group.add_argument("--model", type=_model, default=DEFAULT_MODEL, metavar="NAME", help=", ".join(MODELS))
    group.add_argument("--tensor-parallel", type=positive, metavar="N", help="GPUs of one engine (default: usual)")
    group.add_argument("--engine", type=_engine, metavar="NAME", help=f"instead: {', '.join([*PROFILES, *_ENGINES])}")
    group.add_argument(
        "--capacity",
        type=listed(_cache),
        metavar="A,B",
        help="KV of each engine: engine (its own), ample, a number of blocks, or 20%% of all distinct blocks (default: "
        "engine, or a workload's own)",
    )
    group.add_argument(
        "--link", type=listed(_link), default=[None], metavar="A,B", help=f"{_NO_LINK}, {', '.join(LINKS)}, or Gb/s"
    )
    group.add_argument(
        "--codec",
        type=known(partial(named, "codec", CODECS)),
        default=CODECS["raw"],
        metavar="NAME",
        help=f"of KV that is pulled: {', '.join(CODECS)}",
    )
    group.add_argument(
        "--host-memory",
        type=factor,
        metavar="GB",
        help="for KV behind each engine, in one bound (default: twice its own)",
    )


def _add_runs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("runs")
    group.add_argument(
        "--policies",
        type=listed(_policy),
        default=list(_POLICIES_DEFAULT),
        metavar="A,B",
        help=f"ours and other routers' (default: {','.join(_POLICIES_DEFAULT)}); a wrong name lists all",
    )
    group.add_argument(
        "--speedup",
        type=_loads,
        default=[1.0],
        metavar="X,Y|auto",
        help="arrivals so much denser (default: 1); auto: up to what each policy bears",
    )
    group.add_argument("--seeds", type=positive, default=1, metavar="N", help="(default: 1); from 2 on with intervals")
    group.add_argument("--engine-priorities", action="store_true", help="engines order queues by the router's key")
    group.add_argument("--gpu-hour-price", type=factor, metavar="X", help="dollars, to say what is saved in them")
    group.add_argument("--prior-factor", type=factor, default=1.0, metavar="X", help="by which first estimates are off")


def _audit(arguments: argparse.Namespace) -> int:
    with progress_bars() as progress:
        report = _report(arguments, progress)
    if arguments.html is not None:
        from loadtest.audit.report_html import page

        arguments.html.write_text(page(report), encoding="utf-8")
    if arguments.json:
        print(json.dumps(report.as_json(), allow_nan=False))
        return 0
    from loadtest.audit.report_table import print_report

    print_report(report)
    return 0


def _report(arguments: argparse.Namespace, progress: Progress) -> "Report":
    from loadtest.audit.auditing import audit, hit_rates

    trace_of = _traces(arguments, progress)
    if arguments.hit_rate_only:
        return hit_rates(trace_of(0), progress)
    return audit(trace_of, _plan(arguments), progress)


def _plan(arguments: argparse.Namespace) -> "Plan":
    from loadtest.audit.plan import Cache, Plan

    engine, usual = _engine_of(arguments), _usual(arguments)
    return Plan(
        profile=engine.profile,
        policies=arguments.policies,
        gpus=engine.gpus,
        nodes=arguments.nodes or [usual.nodes],
        loads=arguments.speedup,
        caches=[Cache(text) for text in arguments.capacity or [usual.capacity]],
        links=arguments.link,
        codec=arguments.codec,
        seeds=arguments.seeds,
        host_bytes=None if arguments.host_memory is None else arguments.host_memory * _GIGABYTE,
        engine_priorities=arguments.engine_priorities,
        spreads_arrivals=not arguments.raw_arrivals,
        prior_factor=arguments.prior_factor,
        dollars_per_gpu_hour=arguments.gpu_hour_price,
    )


def _usual(arguments: argparse.Namespace) -> _Fleet:
    """The fleet that a workload's rate and size are meant for."""
    if arguments.workload is None:
        return _Fleet()
    from loadtest.workloads.generating import BLOCK_SIZE_TOKENS, WORKLOADS

    workload = WORKLOADS[arguments.workload]
    block = arguments.block_size or BLOCK_SIZE_TOKENS
    capacity = "engine" if workload.cache_tokens is None else str(workload.cache_tokens // block)
    return _Fleet(workload.workers, capacity)


def _engine_of(arguments: argparse.Namespace) -> _Engine:
    if arguments.engine is not None:
        return _Engine(profile_named(arguments.engine), arguments.tensor_parallel or 1)
    try:
        profile = profile_for(arguments.model, arguments.gpu, arguments.tensor_parallel)
    except ValueError as error:
        raise UsageError(str(error)) from None
    ranks = arguments.tensor_parallel or ranks_for(model_named(arguments.model), hardware_of(arguments.gpu))
    return _Engine(profile, ranks)


# Traffic


def _traces(arguments: argparse.Namespace, progress: Progress) -> "TraceOfSeed":
    if arguments.workload is not None:
        return partial(generated, arguments, progress)
    trace = read(arguments, progress)
    return lambda seed: trace


# What arguments may be


def _policy(text: str) -> str:
    from policies import POLICIES
    from policies.peers import PEERS

    return one_of("policy", text, [*POLICIES, *PEERS])


def _gpu(text: str) -> str:
    known(hardware_of)(text)
    return text


def _model(text: str) -> str:
    return known(model_named)(text).name


def _engine(text: str) -> str:
    return known(profile_named)(_ENGINES.get(text, text)).name


def _link(text: str) -> Link | None:
    return None if text == _NO_LINK else known(link_of)(text)


def _loads(text: str) -> list[float]:
    """None of `auto`: they are searched for."""
    return [] if text == _AUTO else listed(factor)(text)


def _page(text: str) -> Path:
    """Checked before the replays and not after them."""
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: no file can be written there")
    return path


def _cache(text: str) -> str:
    number = text.removesuffix("%")
    if text in ("engine", "ample") or (number.isascii() and number.isdigit() and int(number) > 0):
        return text
    raise argparse.ArgumentTypeError(f"engine, ample, a number of blocks or a percentage is expected, not {text!r}")

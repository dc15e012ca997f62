"""`ropeway loadtest`: arguments, and where its parts are put together."""

import argparse
import asyncio
import json
from dataclasses import replace
from itertools import count
from random import Random
from typing import TYPE_CHECKING

from loadtest.commands import Progress, UsageError, factor, guarded, positive, progress_bars, readable
from loadtest.sources import add_source, generated, read

if TYPE_CHECKING:
    from loadtest.client.answers import Answer
    from loadtest.client.measures import LoadResult
    from loadtest.traces.contract import Trace

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

EXIT_FAILURES = 1
BLOCK_SIZE_TOKENS = 16
"""Of generated prompts: an engine's usual one."""


def add_load_test(subparsers: "Subparsers") -> None:
    parser = subparsers.add_parser(
        "loadtest",
        help="send a trace or a workload to an OpenAI server and measure it",
        description="Sends requests at their times, whatever becomes of those before (open loop), and reports times to "
        "first token, hits and failures in the audit's terms. The exit code is 1 when a request failed.",
        epilog="""examples:
  ropeway loadtest --workload agents --requests 200 --rate 2
  ropeway loadtest --trace conversation_trace.jsonl --speedup 2 --start 600 --duration 180 --json
  ropeway loadtest --log-file requests.jsonl --poisson 4 --url http://127.0.0.1:8000 --model llama""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_times(add_source(parser))
    server = parser.add_argument_group("the server")
    server.add_argument("--url", default="http://127.0.0.1:8000", help="(default: %(default)s)")
    server.add_argument("--model", help="the name to ask for (default: the first that the server lists)")
    server.add_argument("--key-file", type=readable, metavar="FILE", help="with the API key, sent as a bearer token")
    server.add_argument("--timeout", type=factor, default=600.0, metavar="S", help="seconds without a byte (600)")
    asked = parser.add_argument_group("how it is asked")
    asked.add_argument("--bodies", action="store_true", help="a workload's chats as text, not as token ids")
    asked.add_argument("--no-stream", action="store_true", help="answers in one piece: their first token is their last")
    asked.add_argument(
        "--vocabulary", type=positive, default=32_000, metavar="N", help="made-up token ids are below it (32000)"
    )
    asked.add_argument("--salt", default="", metavar="TEXT", help="another one makes other prompts of the same shape")
    asked.add_argument("--inflight-max", type=positive, default=4_096, metavar="N", help="more are failures (4096)")
    parser.add_argument("--slo", type=factor, default=2.0, metavar="S", help="seconds to first token that count (2)")
    parser.add_argument("--json", action="store_true", help="the figures as JSON, with the audit's keys")
    parser.set_defaults(run=guarded(_run))


def _add_times(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--poisson", type=factor, metavar="R", help="arrivals drawn anew, R a second")
    group.add_argument("--speedup", type=factor, default=1.0, metavar="X", help="arrivals X times as dense")
    group.add_argument("--start", type=_seconds, default=0.0, metavar="S", help="from here on in the trace's time")
    group.add_argument("--duration", type=factor, metavar="S", help="so much of the trace's time")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of everything drawn (default: 0)")


def _seconds(text: str) -> float:
    return 0.0 if text == "0" else factor(text)


def _run(arguments: argparse.Namespace) -> int:
    with progress_bars() as progress:
        trace = _trace(arguments, progress)
        result, answers = asyncio.run(_loaded(arguments, trace, progress))
    if arguments.json:
        print(json.dumps({"trace": trace.name, "notes": list(trace.notes), "rows": [result.row()]}, indent=2))
    else:
        from loadtest.client.report import show

        show(trace, result, answers)
    return EXIT_FAILURES if result.failed else 0


def _trace(arguments: argparse.Namespace, progress: Progress) -> "Trace":
    from loadtest.traces import arrivals

    if arguments.workload is not None:
        trace = generated(arguments, progress, arguments.seed, BLOCK_SIZE_TOKENS, arguments.bodies)
    else:
        trace = read(arguments, progress)
        if not arguments.raw_arrivals:
            trace = arrivals.dequantised(trace, arguments.seed)
    trace = arrivals.sliced(trace, arguments.start, arguments.duration)
    if arguments.poisson is not None:
        times = arrivals.poisson(Random(arguments.seed), arguments.poisson)
        timed = [request._replace(arrival_seconds=next(times)) for request in trace.requests]
        trace = replace(trace, requests=timed)
    if not trace.requests:
        raise UsageError("nothing to send: no request of the trace is in that time")
    return arrivals.sped_up(trace, arguments.speedup)


async def _loaded(
    arguments: argparse.Namespace, trace: "Trace", progress: Progress
) -> "tuple[LoadResult, list[Answer]]":
    from loadtest.client.bodies import Wanted
    from loadtest.client.measures import measured
    from loadtest.client.running import Target, model_of, send

    headers = {}
    if arguments.key_file is not None:
        headers["authorization"] = f"Bearer {arguments.key_file.read_text().strip()}"
    url = arguments.url.rstrip("/").removesuffix("/v1")
    model = arguments.model or await model_of(url, headers)
    wanted = Wanted(model, trace.block_size_tokens, arguments.vocabulary, not arguments.no_stream, arguments.salt)
    target = Target(url, wanted.checked(), headers, arguments.timeout)
    ended = count(1)
    answers = await send(
        trace.requests,
        [request.arrival_seconds for request in trace.requests],
        target,
        lambda _: progress("requests", next(ended), len(trace.requests)),
        arguments.inflight_max,
    )
    return measured(trace.name, answers, load=arguments.speedup, slo_ttft_seconds=arguments.slo), answers

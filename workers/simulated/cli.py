"""`ropeway worker simulated`: arguments, and the workers they describe."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import zmq

from cachecore.events import Dialect
from cachecore.scope import Keyring
from cachecore.transfer.tcp.tls import TlsError
from workers.openai.leaving import add_leaving_arguments, patience_of
from workers.openai.server import CannotListen, run_servers
from workers.simulated.engine import SimulatedConfig
from workers.simulated.fleet import OUTPUT_TOKENS_DEFAULT, SimulatedWorker, WorkerOptions, load_renderer
from workers.simulated.link import LinkConfig
from workers.timing import DEFAULT_PROFILE, PROFILES, profile_named
from workers.tls import add_tls_arguments, tls_of

_DESCRIPTION = """\
Serve OpenAI's API and KV events as an engine does, without a model: prefix cache, batching and time are simulated,
the answer is made of words. Misbehaves on request (POST /simulate, or a header x-simulate on one request)."""
_EPILOG = """\
examples:
  ropeway worker simulated --port 8101
  ropeway worker simulated --count 8 --port 8101 --speed 10 --profile llama-3-70b-tp8
  ropeway worker simulated --port 8101 --tokenizer ./smollm2 --dialect sglang --blocks 2048
  ropeway worker simulated --count 4 --port 8101 --keyring keyring.json --kv-link 25
  curl -X POST http://127.0.0.1:8101/simulate -d '{"die_after_chunks": 3, "requests": 1}'"""
_PORT_MAX = 65_535


def add_simulated_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Define `simulated` below `ropeway worker`. Its function is left in `args.run`."""
    parser = subparsers.add_parser(
        "simulated",
        help="timing and caching without a model",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_addresses(parser)
    _add_engine(parser)
    add_leaving_arguments(parser.add_argument_group("when it is told to stop"))
    _add_link(parser)
    parser.set_defaults(run=run)


def _add_addresses(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument("--port", type=int, default=8101, help="0 picks a free one (default: %(default)s)")
    group.add_argument(
        "--count", type=int, default=1, metavar="N", help="workers in this process, on PORT, PORT+1, ..."
    )
    group.add_argument("--uds", metavar="PATH", help="listen on a unix socket instead (one worker)")
    group.add_argument(
        "--kv-events-port",
        type=int,
        default=0,
        metavar="PORT",
        help="the i-th worker publishes on PORT+2i and replays on PORT+2i+1; 0 picks free ones (default)",
    )
    group.add_argument("--no-events", action="store_true", help="publish no KV events")
    group.add_argument("--topic", default="kv-events", help="of the event stream (default: %(default)s)")
    group.add_argument(
        "--access-log", type=Path, metavar="FILE", help="append a JSON line for each request received and ended"
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what")
    group.add_argument("--model", default="simulated", metavar="NAME", help="served name (default: %(default)s)")
    group.add_argument("--adapter", action="append", default=[], metavar="NAME", help="a LoRA adapter; may be repeated")
    group.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="Hugging Face directory; default: one token a byte"
    )
    group.add_argument(
        "--profile", choices=sorted(PROFILES), default=DEFAULT_PROFILE, help="engine to imitate (default: %(default)s)"
    )
    group.add_argument(
        "--speed", type=float, default=1.0, metavar="X", help="times faster; inf waits never (default: 1)"
    )
    group.add_argument(
        "--dialect",
        choices=[dialect.value for dialect in Dialect],
        default=Dialect.VLLM_MAP.value,
        help="of KV events, and when blocks become hittable (default: %(default)s)",
    )
    group.add_argument("--block-size", type=int, default=16, metavar="TOKENS", help="default: %(default)s")
    group.add_argument("--blocks", type=int, default=0, metavar="N", help="KV blocks (default: the profile's memory)")
    group.add_argument("--max-model-len", type=int, default=131_072, metavar="TOKENS", help="default: %(default)s")
    group.add_argument(
        "--max-batched-tokens", type=int, default=0, metavar="TOKENS", help="per step (default: profile)"
    )
    group.add_argument("--max-sequences", type=int, default=0, metavar="N", help="at once (default: profile)")
    group.add_argument(
        "--keyring",
        type=Path,
        metavar="FILE",
        help="refuse cache salts that were not minted from it (default: take all)",
    )
    group.add_argument(
        "--output-tokens",
        type=int,
        default=OUTPUT_TOKENS_DEFAULT,
        metavar="N",
        help="length of an answer whose request names none (default: %(default)s)",
    )


def _add_link(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("moving KV (needs --keyring)")
    group.add_argument(
        "--kv-link", type=float, metavar="GBIT", help="pull KV from others and let them pull, at so many Gbit/s"
    )
    group.add_argument(
        "--kv-link-latency", type=float, default=1.0, metavar="MS", help="of each pull (default: %(default)s)"
    )
    group.add_argument(
        "--kv-pulls-max", type=int, default=64, metavar="N", help="served at once; others are told that it is busy"
    )
    group.add_argument("--kv-class", default="", metavar="NAME", help="workers of another class exchange nothing")
    group.add_argument(
        "--kv-port", type=int, default=0, metavar="PORT", help="the i-th worker serves on PORT+i; 0 picks free ones"
    )
    add_tls_arguments(group)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    workers: list[SimulatedWorker] = []
    try:
        workers += _workers(args, context)
        return run_servers([worker.server for worker in workers])
    except TlsError as error:
        print(f"ropeway worker: {error}", file=sys.stderr)
        return 2
    except (CannotListen, OSError, ValueError, zmq.ZMQError) as error:
        print(f"ropeway worker: {error}", file=sys.stderr)
        return 1
    finally:
        for worker in workers:
            worker.close()
        context.term()


def _workers(args: argparse.Namespace, context: "zmq.Context[zmq.Socket[bytes]]") -> Iterator[SimulatedWorker]:
    if args.count < 1:
        raise ValueError(f"--count must be at least 1, not {args.count}")
    if args.uds and args.count > 1:
        raise ValueError("--uds takes one worker")
    if args.port and args.port + args.count - 1 > _PORT_MAX:
        raise ValueError(f"{args.count} workers do not fit between port {args.port} and {_PORT_MAX}")
    renderer = load_renderer(args.tokenizer)
    keyring = Keyring.load(args.keyring) if args.keyring else None
    config = _config(args)
    for number in range(args.count):
        yield SimulatedWorker(config, _options(args, number), renderer, keyring, context)


def _config(args: argparse.Namespace) -> SimulatedConfig:
    return SimulatedConfig(
        model=args.model,
        profile=profile_named(args.profile),
        speed=args.speed,
        dialect=Dialect(args.dialect),
        block_size_tokens=args.block_size,
        blocks_total=args.blocks,
        max_model_len=args.max_model_len,
        batch_tokens_max=args.max_batched_tokens,
        sequences_max=args.max_sequences,
        link=_link(args),
    )


def _link(args: argparse.Namespace) -> LinkConfig | None:
    tls = tls_of(args, args.host)
    if args.kv_link is None:
        if tls is not None:
            raise TlsError("--kv-tls-cert is for moving KV: it needs --kv-link")
        return None
    return LinkConfig(args.kv_link, args.kv_link_latency / 1000, args.kv_pulls_max, args.kv_class, tls)


def _options(args: argparse.Namespace, number: int) -> WorkerOptions:
    events_port = args.kv_events_port and args.kv_events_port + 2 * number
    return WorkerOptions(
        host=args.host,
        port=args.port and args.port + number,
        uds=args.uds,
        events=not args.no_events,
        events_port=events_port,
        replay_port=events_port and events_port + 1,
        topic=args.topic,
        kv_port=args.kv_port and args.kv_port + number,
        adapters=args.adapter,
        output_tokens_default=args.output_tokens,
        patience=patience_of(args),
        access_log=args.access_log,
    )

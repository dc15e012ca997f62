"""`ropeway benchmark --gpu`: arguments, and where its parts are put together."""

import argparse
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from loadtest.breakeven import LENGTHS, SUFFIX_TOKENS, break_even, ways_over
from loadtest.commands import guarded, known, listed, positive
from loadtest.hardware import CODECS, LINKS, TIERS, Hardware, Link, hardware_of, link_of, named
from loadtest.models import DEFAULT_MODEL, MODELS, model_named
from loadtest.profiles import profile_for, ranks_for

_DESCRIPTION = """\

Part two, with --gpu: is a prefix there sooner if it is computed again or if it is fetched? For each number of tokens,
link, codec and tier, from published constants (needs no model and no torch)."""
_EXAMPLES = """
  ropeway benchmark --gpu h100                                          # Llama-3-70B on eight of them
  ropeway benchmark --gpu h200 --model gpt-oss-120b --link 25gbe,roce-400,100 --lengths 2048,32768
  ropeway benchmark --gpu g6e.12xlarge --model qwen3-32b --json"""
_LINKS_DEFAULT = ("10gbe", "25gbe", "100gbe", "roce-400")
_CODECS_DEFAULT = ("raw", "i8")
_TIERS_DEFAULT = ("memory", "host", "nvme")

_Value = TypeVar("_Value")


def add_break_even(benchmark: argparse.ArgumentParser) -> None:
    """Give `ropeway benchmark`, which measures this machine, its second part: what pays on others."""
    measured: Callable[[argparse.Namespace], int] = benchmark.get_default("run")
    default_model = benchmark.get_default("model")
    benchmark.description = f"{benchmark.description or ''}\n{_DESCRIPTION}"
    benchmark.epilog = f"{benchmark.epilog or 'examples:'}{_EXAMPLES}"
    group = benchmark.add_argument_group(f"break-even, with --gpu; --model is then one of {', '.join(MODELS)}")
    group.add_argument("--gpu", type=_gpu, metavar="NAME", help="a GPU or a machine: h100, mi300x, g6e.12xlarge ...")
    group.add_argument("--tensor-parallel", type=positive, metavar="N", help="GPUs of one engine (default: usual)")
    group.add_argument(
        "--link", type=listed(known(link_of)), metavar="A,B", help=f"of {', '.join(LINKS)}, or a number of Gb/s"
    )
    group.add_argument("--codec", type=listed(_named("codec", CODECS)), metavar="A,B", help=", ".join(CODECS))
    group.add_argument("--tier", type=listed(_named("tier", TIERS)), metavar="A,B", help=", ".join(TIERS))
    group.add_argument("--lengths", type=listed(positive), default=list(LENGTHS), metavar="N,M", help="of the prefix")
    group.add_argument(
        "--question", type=positive, default=SUFFIX_TOKENS, metavar="N", help="tokens behind it (default: %(default)s)"
    )
    predicted = guarded(partial(_print_break_even, default_model), ValueError)
    benchmark.set_defaults(run=lambda arguments: (measured if arguments.gpu is None else predicted)(arguments))


def _usual_links(hardware: Hardware) -> list[Link]:
    """And the machine's own."""
    own = [] if hardware.network_gbps is None else [link_of(f"{hardware.network_gbps:g}")]
    return [LINKS[name] for name in _LINKS_DEFAULT] + own


def _named(kind: str, table: Mapping[str, _Value]) -> Callable[[str], _Value]:
    return known(partial(named, kind, table))


def _gpu(text: str) -> str:
    known(hardware_of)(text)
    return text


def _print_break_even(default_model: str, arguments: argparse.Namespace) -> int:
    model = DEFAULT_MODEL if arguments.model == default_model else arguments.model
    profile = profile_for(model, arguments.gpu, arguments.tensor_parallel)
    hardware = hardware_of(arguments.gpu)
    ranks = arguments.tensor_parallel or ranks_for(model_named(model), hardware)
    ways = ways_over(
        arguments.tier or [TIERS[name] for name in _TIERS_DEFAULT],
        arguments.link or _usual_links(hardware),
        arguments.codec or [CODECS[name] for name in _CODECS_DEFAULT],
        ranks,
    )
    result = break_even(profile, ways, arguments.lengths, arguments.question)
    if arguments.json:
        print(json.dumps(result.as_json() | {"gpus": ranks}))
        return 0
    from rich.console import Console

    from loadtest.breakeven_table import print_break_even

    print_break_even(result, Console())
    return 0

"""`ropeway config check` and `ropeway config show`, and the flags that they and `ropeway serve` have in common."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.arguments import command, port, positive, tokenizer
from gateway.config import LOG_LEVELS, GatewayConfig
from gateway.settings.loading import Inspection, Request, inspect, load_again
from gateway.settings.showing import as_document, as_yaml
from gateway.settings.suspicions import suspicions
from policies import POLICIES

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

EXIT_WRONG = 2
EXIT_SUSPICIOUS = 1

FLAGS = {
    "workers": "--worker",
    "policy": "--policy",
    "redis": "--redis",
    "tokenizers": "--tokenizer",
    "port": "--port",
    "host": "--host",
    "processes": "--processes",
    "keyring": "--keyring",
    "tenants.api_keys_file": "--api-keys",
    "admin.key_file": "--admin-key-file",
    "log_level": "--log-level",
}
"""By the key that each sets; its attribute is its name."""


def add_config(subparsers: "Subparsers") -> None:
    parser = command(
        subparsers,
        "config",
        "look at the configuration that a gateway would have",
        """examples:
  ropeway config check -c gateway.yaml
  ropeway config show -c gateway.yaml --stated""",
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    checked = command(
        actions,
        "check",
        "say everything that is wrong with a configuration, and what is suspicious",
        """examples:
  ropeway config check -c gateway.yaml
  ropeway config check -c gateway.yaml --strict && systemctl reload ropeway

Exit codes: 0 it is right; 1 with --strict, something is suspicious; 2 something is wrong.""",
    )
    add_serve_flags(checked)
    checked.add_argument("--strict", action="store_true", help="exit code 1 where something is suspicious")
    checked.add_argument("--json", action="store_true", help="print problems and warnings as JSON")
    checked.set_defaults(run=_run_check)
    shown = command(
        actions,
        "show",
        "print the configuration in force as YAML, and where each value comes from; passwords are left out",
        """examples:
  ropeway config show -c gateway.yaml
  ROPEWAY_PORT=9000 ropeway config show --stated --policy session""",
    )
    add_serve_flags(shown)
    shown.add_argument("--stated", action="store_true", help="without what is as always")
    shown.add_argument("--json", action="store_true", help="print JSON")
    shown.set_defaults(run=_run_show)


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """What a gateway is told on its command line."""
    parser.add_argument("-c", "--config", type=Path, metavar="FILE", help="YAML configuration")
    parser.add_argument("--worker", action="append", metavar="URL", help="an engine to route to; may be repeated")
    parser.add_argument("--policy", choices=list(POLICIES), help="how requests are placed (default: kv-aware)")
    parser.add_argument("--redis", metavar="URL|embedded|none", help="where the shared index lives (default: none)")
    parser.add_argument(
        "--tokenizer",
        action="append",
        type=tokenizer,
        metavar="MODEL=DIR",
        help="directory with the model's tokenizer.json and chat template; may be repeated",
    )
    parser.add_argument("--port", type=port, metavar="P", help="(default: 8000)")
    parser.add_argument("--host", metavar="H", help="(default: 127.0.0.1)")
    parser.add_argument("--processes", type=positive, metavar="N", help="gateways on that port (default: 1)")
    parser.add_argument("--keyring", type=Path, metavar="FILE", help="master secrets shared with the workers")
    parser.add_argument("--api-keys", type=Path, metavar="FILE", help="see 'ropeway keys'; without it, open to all")
    parser.add_argument("--admin-key-file", type=Path, metavar="FILE", help="the key that opens /admin")
    parser.add_argument("--log-level", choices=LOG_LEVELS, help="(default: info)")


def request_of(arguments: argparse.Namespace) -> Request:
    """From where such a command line has its configuration read."""
    said = {key: getattr(arguments, flag[2:].replace("-", "_")) for key, flag in FLAGS.items()}
    overrides: dict[str, Any] = {key: value for key, value in said.items() if value is not None}
    if "tokenizers" in overrides:
        overrides["tokenizers"] = dict(overrides["tokenizers"])
    return Request(arguments.config, overrides, FLAGS)


def serve_config(arguments: argparse.Namespace) -> GatewayConfig:
    """The configuration that `serve` runs with: file, variables, flags. Raises ConfigError."""
    return load_again(request_of(arguments))


def _run_check(arguments: argparse.Namespace) -> int:
    config, sources, problems = found = inspect(request_of(arguments))
    warnings = suspicions(config, sources) if config is not None else sources.warnings
    if arguments.json:
        document = {
            "problems": [problem._asdict() for problem in problems],
            "warnings": [warning._asdict() for warning in warnings],
        }
        print(json.dumps(document))
    else:
        for problem in problems:
            print(f"ropeway: error: {problem}", file=sys.stderr)
        for warning in warnings:
            print(f"ropeway: warning: {warning}", file=sys.stderr)
        if config is not None:
            print(_verdict(found, len(warnings)))
    if config is None:
        return EXIT_WRONG
    return EXIT_SUSPICIOUS if warnings and arguments.strict else 0


def _verdict(found: Inspection, warnings: int) -> str:
    said = found.sources.values_said
    suspicious = f"; {warnings} suspicious" if warnings else ""
    return f"{found.sources.name} is right: {said} value{'s' if said != 1 else ''} said{suspicious}"


def _run_show(arguments: argparse.Namespace) -> int:
    request = request_of(arguments)
    config, sources = load_again(request), inspect(request).sources
    if arguments.json:
        print(json.dumps(as_document(config, sources)))
    else:
        print(as_yaml(config, sources, arguments.stated), end="")
    return 0

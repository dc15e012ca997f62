"""The `ropeway` command: joins the subcommands that each trunk defines in its own cli.py."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

import gateway.cli
import loadtest.cli
import workers.cli
from gateway.arguments import command
from gateway.completion import SHELLS, script
from gateway.errors import StartupError

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

EXIT_CODES = {
    0: "It is done, or ended as it was told to.",
    EXIT_FAILURE: "It failed: a port in use, a server or a file that is not there, a check that found a difference.",
    EXIT_USAGE: "The command line or the configuration is wrong: stderr says how, and nothing was done.",
    EXIT_INTERRUPTED: "It was interrupted (Ctrl-C).",
}
"""What every command ends with. Whatever means more with one command, its help says."""

EPILOG = """examples:
  ropeway up                                        a model, two workers and the gateway: then ask it something
  ropeway up --simulated --workers 8                the same without a model
  ropeway serve --worker http://127.0.0.1:8001      the gateway alone, in front of your engines
  ropeway COMMAND --help                            more examples, and every flag"""


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"ropeway: error: {message} (see '{self.prog} --help')\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code: 2 for a wrong command line or configuration, 1 for a failure."""
    arguments = parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; the interpreter must not trip over it again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except StartupError as error:
        return _fail(error, error.exit_code)
    except OSError as error:
        return _fail(error, EXIT_FAILURE)
    return code


def parser() -> argparse.ArgumentParser:
    top: argparse.ArgumentParser = Parser(
        prog="ropeway",
        description="A prefix-aware gateway for LLM inference.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"ropeway {_version()}")
    subparsers = top.add_subparsers(required=True, metavar="COMMAND")
    gateway.cli.add_parsers(subparsers)
    workers.cli.add_parsers(subparsers)
    loadtest.cli.add_parsers(subparsers)
    _add_completion(subparsers)
    return top


def _add_completion(subparsers: "gateway.cli.Subparsers") -> None:
    completion = command(
        subparsers,
        "completion",
        "print a script that completes commands and flags in a shell",
        """examples:
  ropeway completion bash > ~/.local/share/bash-completion/completions/ropeway
  ropeway completion zsh > ~/.zfunc/_ropeway
  ropeway completion fish > ~/.config/fish/completions/ropeway.fish""",
    )
    completion.add_argument("shell", choices=list(SHELLS), help="which one")
    completion.set_defaults(run=_run_completion)


def _run_completion(arguments: argparse.Namespace) -> int:
    print(script(parser(), arguments.shell), end="")
    return 0


def _version() -> str:
    try:
        return version("ropeway")
    except PackageNotFoundError:
        return "(not installed)"


def _fail(error: Exception, code: int) -> int:
    print(f"ropeway: error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())

"""The pages of the command line: every command with its flags, and what commands end with."""

import argparse
import importlib
from collections.abc import Iterator

import ropeway
from gateway.errors import StartupError
from tests.reference.tables import HEADER, first_paragraph, table

OPENING = f"""# Commands

{HEADER}

Every command has `--help` with examples. What it ends with: [exit codes](exit-codes.md).
"""

EXIT_CODES = f"""# Exit codes

{HEADER}
"""


def commands(parser: argparse.ArgumentParser, name: str = "ropeway") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Each command with the words that lead to it; of those with actions the actions follow."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, child in action.choices.items():
                yield f"{name} {word}", child
                yield from commands(child, f"{name} {word}")


def commands_page() -> str:
    parts = [OPENING.strip()]
    for name, parser in commands(ropeway.parser()):
        level = "#" * (name.count(" ") + 1)
        parts += [f"{level} `{name}`", parser.description or ""]
        rows = [[f"`{_flag(action)}`", _help(action)] for action in parser._actions if _listed(action)]
        if rows:
            parts.append(table(("argument", "meaning"), rows))
        if parser.epilog:
            parts.append(f"```text\n{parser.epilog}\n```")
    return "\n\n".join(part for part in parts if part) + "\n"


def _listed(action: argparse.Action) -> bool:
    return not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)


def _flag(action: argparse.Action) -> str:
    shown = ", ".join(action.option_strings)
    if action.nargs == 0:
        return shown
    values = "|".join(map(str, action.choices)) if action.choices else ""
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    name = metavar or values or action.dest.upper()
    return f"{shown} {name}".strip()


def _help(action: argparse.Action) -> str:
    text = (action.help or "") % {"default": action.default, "prog": "ropeway"}
    return f"{text}{' (required)' if action.required and action.option_strings else ''}"


def exit_codes_page() -> str:
    rows = [[f"`{code}`", meaning] for code, meaning in ropeway.EXIT_CODES.items()]
    errors = [[f"`{kind.__name__}`", f"`{kind.exit_code}`", first_paragraph(kind.__doc__ or "")] for kind in _errors()]
    parts = [EXIT_CODES.strip(), table(("code", "meaning"), rows)]
    parts += ["Errors that end a command, one line on stderr each:", table(("error", "code", "meaning"), errors)]
    notes = [[f"`{name}`", note] for name, parser in commands(ropeway.parser()) if (note := _note(parser))]
    parts += ["Commands whose codes say more:", table(("command", "codes"), notes)]
    return "\n\n".join(parts) + "\n"


def _note(parser: argparse.ArgumentParser) -> str:
    """What a command's help says of its codes."""
    text = " ".join(f"{parser.description or ''} {parser.epilog or ''}".split())
    start = text.lower().find("exit code")
    return text[start:].split(" example")[0] if start >= 0 else ""


def _errors() -> list[type[StartupError]]:
    """The general one first. A class is known once its module is loaded."""
    for module in ("gateway.fleet.agreement", "gateway.supervisor"):
        importlib.import_module(module)
    found: list[type[StartupError]] = [StartupError]
    for kind in found:
        found += kind.__subclasses__()
    return [StartupError, *sorted(found[1:], key=lambda kind: kind.__name__)]

"""Shell completion: scripts that know the whole command line, made from its parser.

They are complete in themselves, so that pressing a key starts no interpreter. Commands, flags and the values of flags
that have few are offered; everything else is completed as files are.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

PROGRAM = "ropeway"


class Level(NamedTuple):
    """What may follow the words of a command."""

    path: str
    """`ropeway keys new`"""
    words: Mapping[str, str]
    """Commands, or values, with what each does."""
    flags: Mapping[str, str]
    values: Mapping[str, list[str]]
    """By flag, where it has few."""


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """`shell` is one of `SHELLS`."""
    return SHELLS[shell](list(_levels(parser, PROGRAM)))


def _levels(parser: argparse.ArgumentParser, path: str) -> Iterator[Level]:
    commands: dict[str, argparse.ArgumentParser] = {}
    summaries: dict[str, str] = {}
    flags: dict[str, str] = {}
    values: dict[str, list[str]] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            commands = dict(action.choices)
            summaries = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for flag in action.option_strings:
            flags[flag] = (action.help or "") % {"default": action.default, "prog": PROGRAM}
            if action.choices and not isinstance(action, argparse._SubParsersAction):
                values[flag] = [str(choice) for choice in action.choices]
    words = {name: summaries.get(name, "") for name in commands}
    for action in parser._actions:
        if action.choices and not action.option_strings and not isinstance(action, argparse._SubParsersAction):
            words |= {str(choice): action.help or "" for choice in action.choices}
    yield Level(path, words, flags, values)
    for name, child in commands.items():
        yield from _levels(child, f"{path} {name}")


def _bash(levels: list[Level]) -> str:
    known = "|".join(f'"{level.path}"' for level in levels[1:])
    cases = "\n".join(_bash_case(level) for level in levels)
    return f"""\
# ropeway completion bash > ~/.local/share/bash-completion/completions/{PROGRAM}
_{PROGRAM}() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} path={PROGRAM} words= word
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "$path $word" in {known}) path="$path $word" ;; esac
  done
  case "$path" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o bashdefault -o default -F _{PROGRAM} {PROGRAM}
"""


def _bash_case(level: Level) -> str:
    offered = " ".join([*level.words, *level.flags])
    return f'    "{level.path}") case "$previous" in {_value_cases(level)}*) words="{offered}" ;; esac ;;'


def _value_cases(level: Level) -> str:
    return "".join(f'{flag}) words="{" ".join(values)}" ;; ' for flag, values in level.values.items())


def _zsh(levels: list[Level]) -> str:
    known = "|".join(f'"{level.path}"' for level in levels[1:])
    cases = "\n".join(_zsh_case(level) for level in levels)
    return f"""\
#compdef {PROGRAM}
# ropeway completion zsh > "${{fpath[1]}}/_{PROGRAM}"
_{PROGRAM}() {{
  local current=$words[CURRENT] previous=$words[CURRENT-1] path_={PROGRAM} word
  local -a offered chosen
  for word in $words[2,CURRENT-1]; do
    case "$path_ $word" in ({known}) path_="$path_ $word" ;; esac
  done
  case "$path_" in
{cases}
  esac
  if (( $#chosen )); then
    compadd -- $chosen
  else
    _describe {PROGRAM} offered || _files
  fi
}}
if [ "$funcstack[1]" = "_{PROGRAM}" ]; then _{PROGRAM} "$@"; else compdef _{PROGRAM} {PROGRAM}; fi
"""


def _zsh_case(level: Level) -> str:
    offered = {**level.words, **level.flags}
    described = " ".join(_single(f"{name}:{text}") for name, text in offered.items())
    chosen = "".join(f"({flag}) chosen=({' '.join(values)}) ;; " for flag, values in level.values.items())
    return f'    ("{level.path}") offered=({described}); case "$previous" in {chosen}esac ;;'


def _fish(levels: list[Level]) -> str:
    lines = [
        f"# ropeway completion fish > ~/.config/fish/completions/{PROGRAM}.fish",
        f"function __{PROGRAM}_at",
        "  set -l path (commandline -opc)",
        "  set -l words $path[2..-1]",
        "  set -l at",
        "  for word in $words",
        "    string match -q -- '-*' $word; and break",
        "    set -a at $word",
        "  end",
        '  test "$at" = "$argv"',
        "end",
    ]
    for level in levels:
        at = f"-n {_single(f'__{PROGRAM}_at {level.path.removeprefix(PROGRAM).strip()}'.strip())}"
        for name, text in level.words.items():
            lines.append(f"complete -c {PROGRAM} {at} -f -a {name} -d {_single(text)}")
        for flag, text in level.flags.items():
            dashes = f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
            values = f" -x -a {_single(' '.join(level.values[flag]))}" if flag in level.values else ""
            lines.append(f"complete -c {PROGRAM} {at} {dashes}{values} -d {_single(text)}")
    return "\n".join(lines) + "\n"


def _single(text: str) -> str:
    """In single quotes; quotes within are left out, which reads well enough."""
    return "'" + " ".join(text.replace("'", "").replace("\\", "").split()) + "'"


SHELLS: Mapping[str, Callable[[list[Level]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}

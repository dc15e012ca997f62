"""The configuration that is in force, as YAML, and where each of its values comes from.

What is printed can be read as a configuration again, passwords apart: in URLs they are replaced by `REDACTED`.
"""

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import yaml

from gateway.config import GatewayConfig
from gateway.settings.sources import DEFAULT, Key, Origin, Sources

REDACTED = "REDACTED"
_userinfo = re.compile(r"(?<=://)(?:[^/@\s]*:)?[^/@\s]*@")
_COMMENT_COLUMN = 48


def redacted(value: Any) -> Any:
    """A value without the names and passwords of its URLs; lists for tuples."""
    if isinstance(value, str):
        return _userinfo.sub(f"{REDACTED}@", value)
    if isinstance(value, dict):
        return {key: redacted(item) for key, item in value.items()}
    return [redacted(item) for item in value] if isinstance(value, list | tuple) else value


def tree(config: GatewayConfig) -> dict[str, Any]:
    """As plain values, secrets redacted."""
    plain: dict[str, Any] = redacted(msgspec.to_builtins(config, enc_hook=str))
    return plain


def as_yaml(config: GatewayConfig, sources: Sources, stated_only: bool = False) -> str:
    """`stated_only`: without what is as always."""
    return "".join(f"{line}\n" for line in _mapping(tree(config), (), sources, "", stated_only))


def as_document(config: GatewayConfig, sources: Sources) -> dict[str, Any]:
    """The tree, and the origin of what was said."""
    origins = {
        _dotted(key): {"kind": origin.kind.value, "place": origin.place} for key, origin in sources.origins.items()
    }
    return {"config": tree(config), "origins": origins}


def _dotted(key: Key) -> str:
    return ".".join(map(str, key))


def _mapping(values: dict[str, Any], at: Key, sources: Sources, indent: str, stated_only: bool) -> Iterator[str]:
    for name, value in values.items():
        key = (*at, name)
        if stated_only and sources.said(key) == DEFAULT:
            continue
        head = f"{indent}{_scalar(name)}:"
        if isinstance(value, dict) and value:
            yield head
            yield from _mapping(value, key, sources, f"{indent}  ", stated_only)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield head
            yield from _sections(value, key, sources, f"{indent}  ", stated_only)
        else:
            yield _commented(f"{head} {_scalar(value)}", sources.said(key))


def _sections(values: list[dict[str, Any]], at: Key, sources: Sources, indent: str, stated_only: bool) -> Iterator[str]:
    for position, value in enumerate(values):
        lines = list(_mapping(value, (*at, position), sources, f"{indent}  ", stated_only))
        yield f"{indent}- {lines[0].lstrip()}"
        yield from lines[1:]


def _commented(line: str, origin: Origin) -> str:
    return f"{line.ljust(_COMMENT_COLUMN)}  # {origin}"


def _scalar(value: Any) -> str:
    """On one line; as YAML's own writer quotes it."""
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("...\n").strip()

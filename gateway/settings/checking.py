"""From what was said to a `GatewayConfig`, or to everything that is wrong with it, each with its place."""

import re
from collections.abc import Iterable
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from gateway.config import GatewayConfig, Section, nearest
from gateway.settings.sources import Key, Problem, Sources, decode_path, is_section, one_line, text_of

_MISSING = object()
_leading_key = re.compile(r"([a-z_]+(?:\.[a-z_]+)*)(?::| )").match


def check(sources: Sources) -> tuple[GatewayConfig | None, list[Problem]]:
    """None where there is a problem. Problems are in the order of the tree, those of reading first."""
    checker = _Checker(sources)
    config = checker.section(sources.document, GatewayConfig, ())
    problems = [*sources.problems, *checker.problems]
    return (config if isinstance(config, GatewayConfig) and not problems else None), problems


class _Checker:
    """Converts value by value, so that one that is wrong hides no other."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self.problems: list[Problem] = []

    def section(self, value: Any, kind: type[Section], key: Key) -> Any:
        """The section, or `_MISSING` where something in it is wrong."""
        if not isinstance(value, dict):
            return self._wrong(key, f"Expected `object`, got `{_name(value)}`")
        fields = {field.name: field for field in msgspec.structs.fields(kind)}
        found: dict[str, Any] = {}
        sound = True
        for name, item in value.items():
            field = fields.get(name)
            if field is None:
                text = text_of((*key, name))
                place = self._sources.place((*key, name))
                self.problems.append(Problem(place, "", f"unknown key {text!r}{nearest(str(name), fields)}"))
                sound = False
                continue
            converted = self._value(item, field.type, (*key, name))
            sound = sound and converted is not _MISSING
            found[name] = converted
        missing = [name for name, field in fields.items() if field.required and name not in found]
        if missing:
            return self._wrong(key, f"Object missing required field `{missing[0]}`")
        return self._made(kind, found, key) if sound else _MISSING

    def _made(self, kind: type[Section], found: dict[str, Any], key: Key) -> Any:
        try:
            return kind(**found)
        except ValueError as error:
            return self._refused(one_line(error), key)

    def _refused(self, message: str, key: Key) -> Any:
        """A section's own complaint, which may begin with the key that it is about."""
        leading = _leading_key(message)
        if leading is None:
            return self._wrong(key, message)
        about: Key = tuple(leading[1].split("."))
        if not _exists(about):
            return self._wrong(key, message)
        if message[leading.end(1)] == ":":
            return self._wrong(about, message[leading.end() :].strip())
        self.problems.append(Problem(self._sources.place(about), "", message))
        return _MISSING

    def _value(self, value: Any, kind: Any, key: Key) -> Any:
        arguments = get_args(kind)
        if get_origin(kind) in (Union, UnionType):
            if value is None:
                return None if type(None) in arguments else self._wrong(key, "Expected a value, got `null`")
            sections = [argument for argument in arguments if is_section(argument)]
            return self.section(value, sections[0], key) if sections else self._plain(value, kind, key)
        if is_section(kind):
            return self.section({} if value is None else value, kind, key)
        if get_origin(kind) is tuple and is_section(arguments[0]):
            return self._sections(value, arguments[0], key)
        if get_origin(kind) is dict and is_section(arguments[1]) and isinstance(value, dict):
            return self._each({name: self.section(item, arguments[1], (*key, name)) for name, item in value.items()})
        if get_origin(kind) is Literal and isinstance(value, str) and value not in arguments:
            return self._wrong(key, f"{value!r} is unknown{nearest(value, arguments)}")
        return self._plain(value, kind, key)

    def _sections(self, value: Any, kind: type[Section], key: Key) -> Any:
        """A list of sections. One alone stands for a list of it, and a bare string for `{url: ...}`."""
        items = [] if value is None else value if isinstance(value, list) else [value]
        expanded = [{"url": item} if isinstance(item, str) else item for item in items]
        made = self._each({n: self.section(item, kind, (*key, n)) for n, item in enumerate(expanded)})
        return made if made is _MISSING else tuple(made.values())

    def _each(self, made: dict[Any, Any]) -> Any:
        return _MISSING if _MISSING in made.values() else made

    def _plain(self, value: Any, kind: Any, key: Key) -> Any:
        try:
            return msgspec.convert(value, kind, dec_hook=decode_path)
        except (msgspec.ValidationError, ValueError) as error:
            message, _, inner = one_line(error).partition(" - at `$")
            self.problems.append(Problem(self._sources.place(key), f"{text_of(key)}{inner.rstrip('`')}", message))
            return _MISSING

    def _wrong(self, key: Key, message: str) -> Any:
        self.problems.append(Problem(self._sources.place(key), text_of(key), message))
        return _MISSING


def _exists(key: Iterable[str | int]) -> bool:
    kind: Any = GatewayConfig
    for name in key:
        fields = {field.name: field.type for field in msgspec.structs.fields(kind)} if is_section(kind) else {}
        if name not in fields:
            return False
        kind = fields[name]
    return True


def _name(value: Any) -> str:
    names = {list: "array", type(None): "null"}
    return names.get(type(value), type(value).__name__)

"""Where settings come from: a file, environment variables and flags, each over the one before, and each value's origin.

A document is plain data as YAML has it. Beside it stands where each of its values was said, by key path. A list takes
the place of the one beneath it; mappings are merged, and with them their origins.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_origin

import msgspec
import yaml

from gateway.config import ENVIRONMENT_PREFIX, GatewayConfig, Section

Key = tuple[str | int, ...]
"""Where in the tree: `("workers", 1, "url")` is `workers[1].url`."""

DEPTH_MAX = 32
"""Of a file: an alias may contain itself."""
_MERGE = "tag:yaml.org,2002:merge"
_READ_ELSEWHERE = frozenset({"ROPEWAY_MODEL_CACHE"})


class Kind(StrEnum):
    FILE = "file"
    VARIABLE = "variable"
    FLAG = "flag"
    DEFAULT = "default"


class Origin(NamedTuple):
    kind: Kind
    place: str
    """`gateway.yaml:3:5` (line and column), `ROPEWAY_PORT`, `--port`; empty for a default."""

    def __str__(self) -> str:
        return self.place or self.kind.value


DEFAULT = Origin(Kind.DEFAULT, "")


class Problem(NamedTuple):
    """Something wrong, or suspicious, in what was said."""

    place: str
    key: str
    """Empty where it is about no key."""
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.place, self.key, self.message) if part)


def text_of(key: Key) -> str:
    """`workers[1].url`"""
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


class Sources:
    """All that was said, and by whom. `problems` holds what could not even be read."""

    def __init__(self) -> None:
        self.document: dict[str, Any] = {}
        self.origins: dict[Key, Origin] = {}
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []
        self.name = "configuration"

    @property
    def values_said(self) -> int:
        """How many, sections and lists apart."""
        sections = {key[:length] for key in self.origins for length in range(1, len(key))}
        return len(self.origins.keys() - sections)

    def origin(self, key: Key) -> Origin:
        """Of a value, or of what it lies in."""
        for length in range(len(key), 0, -1):
            origin = self.origins.get(key[:length])
            if origin is not None:
                return origin
        return DEFAULT

    def said(self, key: Key) -> Origin:
        """Of a value itself: a default where nothing was said of it, though of its neighbours."""
        value: Any = self.document
        for part in key:
            if isinstance(value, str):  # a bare URL stands for a section
                return self.origin(key) if key[-1] == "url" else DEFAULT
            if isinstance(part, int) and not isinstance(value, list):
                continue  # one alone stands for a list of it
            if not isinstance(value, list | dict) or (isinstance(value, dict) and part not in value):
                return DEFAULT
            value = value[part]  # type: ignore[index]
        return self.origin(key)

    def place(self, key: Key) -> str:
        return self.origin(key).place or self.name

    def add_file(self, path: Path) -> None:
        self.name = str(path)
        reader = _Reader(str(path))
        value = reader.read(path)
        if value is not None and not isinstance(value, dict):
            self.problems.append(
                Problem(self.name, "", f"a mapping is expected at the top, not {type(value).__name__}")
            )
            value = None
        self.problems += reader.problems
        self.document, self.origins = value or {}, reader.origins

    def add_variables(self, environment: Mapping[str, str]) -> None:
        known = {variable: (key, kind) for variable, key, kind in variables()}
        for variable, (key, kind) in known.items():
            raw = environment.get(variable)
            if not raw or _written_by_kubernetes(variable, raw):
                continue
            reader = _Reader(variable)
            try:
                value = reader.parse(raw) if get_origin(kind) in (tuple, dict) else _scalar(raw, kind)
            except msgspec.ValidationError as error:
                self.problems.append(Problem(variable, key, one_line(error)))
                continue
            self.problems += reader.problems
            self.put(key, value, Origin(Kind.VARIABLE, variable))
        for variable in environment:
            if variable.startswith(ENVIRONMENT_PREFIX) and variable not in known and variable not in _READ_ELSEWHERE:
                close = get_close_matches(variable, known, n=1, cutoff=0.9)
                if close:
                    self.warnings.append(Problem(variable, "", f"is not a setting; did you mean {close[0]}?"))

    def put(self, key: str, value: Any, origin: Origin) -> None:
        """Set a value over what is there."""
        *path, last = key.split(".")
        section = self.document
        for name in path:
            inner = section.get(name)
            if not isinstance(inner, dict):
                inner = section[name] = {}
            section = inner
        at: Key = (*path, last)
        if isinstance(value, dict) and isinstance(section.get(last), dict):
            section[last] = {**section[last], **value}
            for name in value:
                self._note((*at, name), origin)
        else:
            section[last] = value
            self._note(at, origin)

    def _note(self, key: Key, origin: Origin) -> None:
        for known in [known for known in self.origins if known[: len(key)] == key]:
            del self.origins[known]
        self.origins[key] = origin


class _Loader(yaml.SafeLoader):
    """Composes nodes, and makes plain values of scalars."""


class _Reader:
    """YAML as plain values, with the place of each. What is wrong is noted, and the rest is read."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loader: _Loader
        self.origins: dict[Key, Origin] = {}
        self.problems: list[Problem] = []

    def read(self, path: Path) -> Any:
        """None where there is nothing."""
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            self.problems.append(Problem(self._name, "", one_line(error)))
            return None
        return self.parse(text)

    def parse(self, text: str) -> Any:
        try:
            self._loader = _Loader(text)
            root = self._loader.get_single_node()
            return None if root is None else self._value(root, ())
        except yaml.MarkedYAMLError as error:
            self._syntax(error)
        except (yaml.YAMLError, RecursionError) as error:
            self.problems.append(Problem(self._name, "", one_line(error)))
        return None

    def _syntax(self, error: yaml.MarkedYAMLError) -> None:
        mark = error.problem_mark or error.context_mark
        place = self._at(mark) if mark is not None else self._name
        said = ", ".join(part for part in (error.problem, error.context) if part)
        self.problems.append(Problem(place, "", " ".join(said.split())))

    def _at(self, mark: yaml.Mark) -> str:
        return f"{self._name}:{mark.line + 1}:{mark.column + 1}"

    def _value(self, node: yaml.Node, key: Key) -> Any:
        if len(key) > DEPTH_MAX:
            raise yaml.MarkedYAMLError(problem="this is nested too deeply", problem_mark=node.start_mark)
        if isinstance(node, yaml.SequenceNode):
            return [self._item(item, (*key, position)) for position, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, key)
        return self._loader.construct_object(node, deep=True)

    def _item(self, node: yaml.Node, key: Key) -> Any:
        self.origins[key] = Origin(Kind.FILE, self._at(node.start_mark))
        return self._value(node, key)

    def _mapping(self, node: yaml.MappingNode, at: Key) -> dict[Any, Any]:
        # YAML lets the last of two equal keys win in silence.
        written: set[Any] = set()
        for name_node, _ in node.value:
            if not isinstance(name_node, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be plain", problem_mark=name_node.start_mark)
            name = self._name_of(name_node)
            if name in written:
                self.problems.append(Problem(self._at(name_node.start_mark), "", f"the key {name!r} is given twice"))
            written.add(name)
        self._loader.flatten_mapping(node)
        mapping: dict[Any, Any] = {}
        for name_node, value_node in node.value:
            name = self._name_of(name_node)
            key = (*at, name)
            self.origins[key] = Origin(Kind.FILE, self._at(name_node.start_mark))
            mapping[name] = self._value(value_node, key)
        return mapping

    def _name_of(self, node: yaml.Node) -> Any:
        if node.tag == _MERGE:
            return "<<"
        return self._loader.construct_object(node, deep=True)


def variables(kind: type[Section] = GatewayConfig, at: str = "") -> Iterator[tuple[str, str, Any]]:
    """(variable, key path, type) of each key that can be set from the environment."""
    for field in msgspec.structs.fields(kind):
        key = at + field.name
        if is_section(field.type):
            yield from variables(field.type, f"{key}.")
        else:
            yield ENVIRONMENT_PREFIX + key.replace(".", "_").upper(), key, field.type


def is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def decode_path(kind: type, value: Any) -> Any:
    """msgspec's hook for what it does not know."""
    if kind is Path and isinstance(value, str | Path):
        return Path(value).expanduser()
    raise TypeError(f"Expected `{kind.__name__.lower()}`, got `{type(value).__name__}`")


def _written_by_kubernetes(variable: str, raw: str) -> bool:
    """A Service called `ropeway` puts ROPEWAY_PORT=tcp://10.0.0.1:8000 into every pod of its namespace."""
    return variable == f"{ENVIRONMENT_PREFIX}PORT" and raw.startswith("tcp://")


def _scalar(raw: str, kind: Any) -> Any:
    """As it is written plainly. Raises msgspec.ValidationError."""
    return raw if get_origin(kind) is Literal else msgspec.convert(raw, kind, strict=False, dec_hook=decode_path)


def one_line(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else " ".join(str(error).split())

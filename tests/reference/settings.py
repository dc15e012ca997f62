"""The page of settings: from the schema, its docstrings and the tables of flags and live keys."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import yaml

import gateway.config
from gateway.config import GatewayConfig, Section
from gateway.reload import Change
from gateway.settings.commands import FLAGS
from gateway.settings.sources import ENVIRONMENT_PREFIX, is_section
from tests.reference.tables import HEADER, plain, table

OPENING = f"""# Settings

{HEADER}

One YAML file (`ropeway serve -c FILE`), over it environment variables, over them flags. `ropeway config check` says
what is wrong with a file, and where; `ropeway config show` what is in force, and by whom.

The variable of a key is its path in capitals behind `ROPEWAY_`: `limits.body_bytes_max` is
`ROPEWAY_LIMITS_BODY_BYTES_MAX`. Scalars are written plainly, lists and mappings as YAML. A list takes the place of the
one beneath it; mappings are merged.

Keys marked *live* change while the gateway serves: it reads its file again when it has changed, and on SIGHUP. A wrong
file is refused and the running configuration kept. All other keys wait for a restart; the log and `/status` name them.
"""


class Documentation:
    """Docstrings of the schema's sections and keys, which are gone at run time."""

    def __init__(self) -> None:
        tree = ast.parse(inspect.getsource(gateway.config))
        self._classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}

    def section(self, kind: type[Section]) -> str:
        return plain(ast.get_docstring(self._classes[kind.__name__]) or "")

    def key(self, kind: type[Section], name: str) -> str:
        for base in kind.__mro__:
            node = self._classes.get(base.__name__)
            found = _docstring_after(node, name) if node is not None else None
            if found is not None:
                return plain(found)
        return ""


def _docstring_after(node: ast.ClassDef, name: str) -> str | None:
    """None where the class does not have the key; empty where nothing is said of it."""
    for position, statement in enumerate(node.body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and statement.target.id == name
        ):
            following = node.body[position + 1] if position + 1 < len(node.body) else None
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                return str(following.value.value)
            return ""
    return None


def page() -> str:
    documentation = Documentation()
    parts = [OPENING]
    for path, kind in sections():
        title = f"## `{path}`" if path else "## At the top"
        rows = [
            _row(path, kind, field, documentation) for field in msgspec.structs.fields(kind) if not _inner(field.type)
        ]
        said = documentation.section(kind) if path else ""
        parts += [title, said, table(("key", "values", "default", "meaning"), rows)]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def sections(kind: type[Section] = GatewayConfig, at: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Each section with its path: those of lists and mappings too, as `workers[]` and `rate_limits.tenants.NAME`."""
    yield at, kind
    for field in msgspec.structs.fields(kind):
        path = f"{at}.{field.name}" if at else field.name
        for inner, suffix in _sections_in(field.type):
            yield from sections(inner, path + suffix)


def _sections_in(kind: Any) -> Iterator[tuple[type[Section], str]]:
    if is_section(kind):
        yield kind, ""
        return
    suffix = {tuple: "[]", dict: ".NAME"}.get(get_origin(kind), "")  # type: ignore[arg-type]
    for argument in get_args(kind):
        if is_section(argument):
            yield argument, suffix


def _inner(kind: Any) -> bool:
    return is_section(kind)


def _row(path: str, kind: type[Section], field: msgspec.structs.FieldInfo, documentation: Documentation) -> list[str]:
    key = f"{path}.{field.name}" if path else field.name
    meaning = documentation.key(kind, field.name)
    flag = FLAGS.get(key)
    notes = [f"Flag `{flag}`." if flag else "", "*live*" if Change(key.replace("[]", ""), 0, 0).live else ""]
    return [f"`{key}`", values(field.type), _default(field), " ".join(part for part in (meaning, *notes) if part)]


def variable(key: str) -> str:
    return ENVIRONMENT_PREFIX + key.replace(".", "_").upper()


def values(kind: Any) -> str:
    """In words: `integer from 1 to 9`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return f"{values(arguments[0])}{_bounds(arguments[1])}"
    if origin in (Union, UnionType):
        named = [values(argument) for argument in arguments if argument is not type(None)]
        return " or ".join([*named, "null"] if type(None) in arguments else named)
    if origin is Literal:
        return ", ".join(f"`{argument or '(empty)'}`" for argument in arguments)
    if origin is tuple:
        return f"list of {values(arguments[0])}s"
    if origin is dict:
        return f"mapping of names to {values(arguments[1])}s"
    if is_section(kind):
        return "section"
    names = {int: "integer", float: "number", str: "text", bool: "`true` or `false`", Path: "path", dict: "mapping"}
    return names.get(kind, "anything")


def _bounds(meta: msgspec.Meta) -> str:
    if meta.pattern is not None:
        return f" `{meta.pattern}`".replace("|", "\\|")
    least = f" from {meta.ge:,}" if meta.ge is not None else f" above {meta.gt:,}" if meta.gt is not None else ""
    return least + (f" to {meta.le:,}" if meta.le is not None else "")


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()  # type: ignore[operator]
    text = yaml.safe_dump(msgspec.to_builtins(value, enc_hook=str), default_flow_style=True, width=10_000)
    shown = text.removesuffix("...\n").strip()
    return "empty" if shown in ("''", "[]", "{}") else f"`{shown}`"

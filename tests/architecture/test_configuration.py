"""A key that nothing reads would be a promise that nothing keeps."""

import ast
from collections.abc import Iterator

import msgspec

from gateway.config import GatewayConfig, Section


def keys(kind: type[Section], at: str = "") -> Iterator[tuple[str, str]]:
    """(path, name) of each key below `kind`."""
    for field in msgspec.structs.fields(kind):
        yield f"{at}{field.name}", field.name
        if isinstance(field.type, type) and issubclass(field.type, Section):
            yield from keys(field.type, f"{at}{field.name}.")


def test_every_key_is_read(house) -> None:
    modules = [module for module in house if module.room == "gateway" and module.name != "gateway.config"]
    read = {node.attr for module in modules for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)}
    unread = [path for path, name in keys(GatewayConfig) if name not in read]
    assert unread == []

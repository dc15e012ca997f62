"""What a chat template does with the texts of a conversation: only copies them, or looks at them too.

Where a template only copies, its rendering is a fixed list of literals with the messages' texts in between, and a
conversation of the same shape needs no template any more. GuardedTemplate finds out by rendering once with placeholders
for texts, in a template whose syntax tree was rewritten: every operand that an operation could look at goes through a
guard that refuses what holds a placeholder. So the proof does not rest on what Python's strings let one observe.

The rules of the rewriting:

* it is closed: a kind of node, filter, test or function that is not listed is refused, or its operands are guarded;
* copying is free: output, `~`, `+`, assignment, macros, `default`, and taking items out of lists and mappings;
* `trim` and `.strip()` of one whole text stay exact as an operation on the slot;
* texts are not empty (the shape says so), so whether one is true needs no look, unless it was stripped;
* time and chance are refused: `strftime_now`, `random`, `lipsum`;
* what guards do not know (generators, methods, markup) counts as holding a text.
"""

import re
import secrets
import types
from collections.abc import Mapping
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.environment import Environment
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from cachecore.prompts.outlines import Outline, Slot


class Inspected(Exception):
    """A template looks at a text, or might."""


_INSPECTED, _OPENED, _JUDGED, _WRITTEN, _UNPACKED = "inspected", "opened", "judged", "written", "unpacked"

_PASSED_ON = (
    *(nodes.Template, nodes.TemplateData, nodes.Const, nodes.Name, nodes.NSRef, nodes.Macro, nodes.CallBlock),
    *(nodes.Assign, nodes.AssignBlock, nodes.With, nodes.ExprStmt, nodes.Continue, nodes.Break),
    *(nodes.Tuple, nodes.List, nodes.Dict, nodes.Keyword, nodes.Add),
)
_ARITHMETIC = (nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow)
_FIELDS: dict[type[nodes.Node], dict[str, str]] = {
    **{kind: {} for kind in _PASSED_ON},
    **{kind: {"left": _INSPECTED, "right": _INSPECTED} for kind in _ARITHMETIC},
    **{kind: {"left": _JUDGED, "right": _JUDGED} for kind in (nodes.And, nodes.Or)},
    **{kind: {"test": _JUDGED} for kind in (nodes.If, nodes.CondExpr)},
    **{kind: {"nodes": _WRITTEN} for kind in (nodes.Output, nodes.Concat)},
    **{kind: {"node": _INSPECTED} for kind in (nodes.Neg, nodes.Pos)},
    nodes.For: {"iter": _OPENED, "test": _JUDGED},
    nodes.Not: {"node": _JUDGED},
    nodes.Pair: {"key": _INSPECTED},
    nodes.Compare: {"expr": _INSPECTED},
    nodes.Operand: {"expr": _INSPECTED},
    nodes.Getattr: {"node": _OPENED},
    nodes.Getitem: {"node": _OPENED, "arg": _INSPECTED},
    nodes.Slice: {"start": _INSPECTED, "stop": _INSPECTED, "step": _INSPECTED},
    nodes.Filter: {"node": _INSPECTED, "args": _INSPECTED, "kwargs": _INSPECTED},
    nodes.Test: {"node": _INSPECTED, "args": _INSPECTED, "kwargs": _INSPECTED},
    nodes.Call: {"node": "called", "args": _INSPECTED, "kwargs": _INSPECTED},
}
"""Which guard the fields of a node go through; those that are not named only pass values on."""

_BLIND_TESTS = frozenset(("defined", "undefined", "none", "string", "mapping", "number", "boolean", "true", "false"))
"""Tests that ask for the kind of a value alone: a text answers as every text."""
_CONTAINER_FILTERS = frozenset(("length", "count", "first", "last", "list"))
_COPYING_FUNCTIONS = frozenset(("namespace", "caller"))
_READING_METHODS = frozenset(("get", "keys", "values", "items"))
"""Methods of mappings that look at keys alone."""

_NOTHING: dict[str, str] = {}
_DICT_ITEMS = type(_NOTHING.items())
_ATOMS = frozenset((int, float, bool, type(None), range))
_CONTAINERS = frozenset(
    (list, tuple, dict, Namespace, LoopContext, type(_NOTHING.keys()), type(_NOTHING.values()), _DICT_ITEMS)
)


class Tracer:
    """Placeholders for texts, and the guards that a rewritten template calls."""

    def __init__(self, functions: Mapping[str, Any]) -> None:
        """`functions`: the globals of the environment, of which few are known to be harmless."""
        self._nonce = secrets.token_hex(8)
        self._pattern = re.compile(f"\ue000{self._nonce}([0-9]+)([cs])\ue001")
        self._stripped = re.compile(f"\ue000{self._nonce}[0-9]+s\ue001")
        self._functions = [functions[name] for name in ("range", "dict", "raise_exception")]

    def placeholder(self, index: int) -> str:
        return f"\ue000{self._nonce}{index}c\ue001"

    def outline(self, text: str) -> Outline:
        """The outline that a text with placeholders shows."""
        pieces = self._pattern.split(text)
        slots = zip(pieces[1::3], pieces[2::3], strict=True)
        return Outline(tuple(pieces[::3]), tuple(Slot(int(index), kind == "s") for index, kind in slots))

    # Guards: each returns its value, or raises Inspected.

    def inspected(self, value: Any) -> Any:
        """Anything may be done with the value."""
        if self._holds_text(value):
            raise Inspected
        return value

    def opened(self, value: Any) -> Any:
        """Items are taken out of the value, or counted."""
        return value if type(value) in _CONTAINERS else self.inspected(value)

    def unpacked(self, value: Any) -> Any:
        """The value's items are taken apart."""
        return value if type(value) is _DICT_ITEMS else self.inspected(value)

    def keyed(self, value: Any) -> Any:
        """The value is asked whether it contains something: of a mapping that concerns its keys."""
        return value if type(value) is dict else self.inspected(value)

    def judged(self, value: Any) -> Any:
        """The value is taken as true or false."""
        if type(value) is str:
            if self._nonce in value and not self._stripped.sub("", value):
                raise Inspected
            return value
        return self.opened(value)

    def written(self, value: Any) -> Any:
        """The value is written as text: a mapping would show its texts with quotes and escapes."""
        return value if type(value) is str else self.inspected(value)

    def called(self, value: Any) -> Any:
        """The value is called with arguments that hold no text."""
        if isinstance(value, types.BuiltinMethodType) and value.__self__ is not None:
            owner = value.__self__
            if type(owner) is not dict or value.__name__ not in _READING_METHODS:
                self.inspected(owner)
        elif not any(value is function for function in self._functions):
            raise Inspected
        return value

    def copied(self, value: Any) -> Any:
        """The value is called, and does nothing with its arguments but pass them on to guarded code."""
        if value is not Namespace and type(value) is not Macro:
            raise Inspected
        return value

    def trimmed(self, value: Any) -> str:
        """What `value | trim` is."""
        if type(value) is str and self._nonce in value:
            return self.stripped(value)
        return str(self.inspected(value)).strip()

    def stripped(self, value: Any) -> str:
        """What `value.strip()` is."""
        if type(value) is not str:
            raise Inspected
        if self._nonce not in value:
            return value.strip()
        found = self._pattern.fullmatch(value)
        if found is None:
            raise Inspected
        return f"\ue000{self._nonce}{found[1]}s\ue001"

    def _holds_text(self, value: Any) -> bool:
        kind = type(value)
        if kind is str:
            return self._nonce in value
        if kind is list or kind is tuple:
            return any(map(self._holds_text, value))
        if kind is dict:
            return any(map(self._holds_text, (*value.keys(), *value.values())))
        return kind not in _ATOMS and not isinstance(value, Undefined)


class GuardedTemplate:
    """A template that refuses to look at texts."""

    def __init__(self, environment: Environment, source: str, variables: Mapping[str, Any]) -> None:
        """`environment` is this template's alone. Raises Inspected for a template that is not understood."""
        self._tracer = environment.tracer = Tracer(environment.globals)  # type: ignore[attr-defined]
        environment.filters["random"] = _refuse
        tree = environment.parse(source)
        tree = _Rewriting({macro.name for macro in tree.find_all(nodes.Macro)}).visit(tree)
        tree.set_environment(environment)
        self._template = environment.from_string(tree)
        self._variables = variables
        self.placeholder = self._tracer.placeholder

    def outline(self, variables: Mapping[str, Any]) -> Outline | None:
        """What a rendering of placeholders shows; None when the template looks at them, or fails."""
        try:
            return self._tracer.outline(self._template.render({**self._variables, **variables}))
        except Exception:  # a template may fail in any way that Python code can
            return None


class _Rewriting(NodeTransformer):
    """Puts guards around what a template's operations look at."""

    def __init__(self, macros: set[str]) -> None:
        self._copying = macros | _COPYING_FUNCTIONS

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        fields = _FIELDS.get(type(node))
        if fields is None:
            raise Inspected
        fields = {**fields, **self._exceptions(node)}
        if type(node) is nodes.CallBlock and isinstance(node.call.node, nodes.ExtensionAttribute):
            node.body = [self.visit(child) for child in node.body]  # the generation tag
            return node
        replacement = self._strip_call(node)
        if replacement is not None:
            return replacement
        self.generic_visit(node)
        for name, guard in fields.items():
            value = getattr(node, name)
            if isinstance(value, list):
                setattr(node, name, [_guard(item, guard) for item in value])
            elif value is not None:
                setattr(node, name, _guard(value, guard))
        return node

    def _strip_call(self, node: nodes.Node) -> nodes.Node | None:
        """A guard in place of `x | trim` or `x.strip()`."""
        if isinstance(node, nodes.Filter | nodes.Call) and (node.args or node.kwargs):
            return None
        if isinstance(node, nodes.Filter) and node.name == "trim" and node.node is not None:
            return _call("trimmed", self.visit(node.node))
        if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "strip":
            return _call("stripped", self.visit(node.node.node))
        return None

    def _exceptions(self, node: nodes.Node) -> dict[str, str]:
        """What differs from _FIELDS for this very node."""
        if isinstance(node, nodes.Filter | nodes.Test | nodes.Call) and (node.dyn_args or node.dyn_kwargs):
            raise Inspected
        match node:
            case nodes.Filter(node=None) | nodes.AssignBlock(filter=nodes.Filter()) | nodes.For(recursive=True):
                raise Inspected
            case nodes.With() if any(isinstance(target, nodes.Tuple) for target in node.targets):
                raise Inspected
            case nodes.Assign(target=nodes.Tuple()):
                return {"node": _INSPECTED}
            case nodes.For(target=nodes.Tuple(items=items)):
                if not all(isinstance(item, nodes.Name) for item in items):
                    raise Inspected
                return {"iter": _UNPACKED}
            case nodes.Operand(op="in" | "notin"):
                return {"expr": "keyed"}
            case nodes.Call(node=nodes.Name(name=name)) if name in self._copying:
                return {"node": "copied", "args": "", "kwargs": ""}
            case nodes.Test(name=name) if name in _BLIND_TESTS and not node.args and not node.kwargs:
                return {"node": ""}
            case nodes.Filter(name="default" | "d") if len(node.args) < 2 and not node.kwargs:
                return {"node": "", "args": ""}
            case nodes.Filter(name="string"):
                return {"node": _WRITTEN}
            case nodes.Filter(name=name) if name in _CONTAINER_FILTERS:
                return {"node": _OPENED}
        return {}


def _guard(node: Any, guard: str) -> Any:
    if not guard or isinstance(node, nodes.Const | nodes.TemplateData | nodes.Slice):
        return node
    if isinstance(node, nodes.Keyword):
        node.value = _guard(node.value, guard)
        return node
    return _call(guard, node)


def _call(guard: str, node: nodes.Expr) -> nodes.Node:
    return nodes.Call(nodes.EnvironmentAttribute(f"tracer.{guard}"), [node], [], None, None).set_lineno(node.lineno)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise Inspected

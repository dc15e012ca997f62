"""Chat templates, rendered to the character as transformers' `apply_chat_template` renders them.

A template is a program in jinja2, run in jinja2's immutable sandbox with the settings and the few additions that
templates rely on. Its text decides the tokens and with them the names of KV blocks, so nothing here may differ from
transformers: whitespace control, `tojson` without HTML escapes, `strftime_now`, the `generation` tag, loop controls.

What a conversation with images renders to is known up to the first image only, and even that must be proven, since a
template may look ahead. `ChatTemplate.render_beginning` renders variants that differ in nothing but what stands at the
first image; what they have in common is text that the engine will render too.

A template sent with a request is a stranger's program. It runs only where the operator allows it, with a budget of loop
iterations and a bound on its text; memory it allocates on the way is not bounded.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, TypeGuard

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from cachecore.prompts.contract import PromptError
from cachecore.prompts.messages import (
    DEVELOPER,
    Conversation,
    Message,
    read_conversation,
    read_flags,
    read_tools,
)
from cachecore.prompts.outlines import Outline
from cachecore.prompts.segments import common_prefix
from cachecore.prompts.tracing import GuardedTemplate

RENDERED_CHARACTERS_MAX = 64 * 2**20
REQUEST_TEMPLATE_CHARACTERS_MAX = 64 * 2**10
REQUEST_TEMPLATE_ITERATIONS_MAX = 20_000
REQUEST_TEMPLATES_CACHED_MAX = 64

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""transformers' own mark for the end of a message to be continued; templates see it, so it has to be the same."""
_PROBES = ("\ue000", "\ue001")
"""Private-use characters that stand in for an image."""
_RESERVED_VARIABLES = frozenset({"messages", "conversation", "tools", "chat_template", "tokenize"})


_DICT_ATTRIBUTES = frozenset(dir(dict))


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks what a model is trained on; in a prompt it is its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Environment(ImmutableSandboxedEnvironment):
    """The environment of one template."""

    def __init__(self, clock: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: clock().strftime(form)

    def getattr(self, obj: Any, attribute: str) -> Any:
        # Shortcuts to what the sandbox would return, since most of a render's time went into its checks: an item of a
        # dictionary that no attribute shadows, and public attributes of jinja2's own loop and namespace objects.
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if (kind is LoopContext or kind is Namespace) and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return super().getattr(obj, attribute)
        return super().getattr(obj, attribute)


class _BoundedEnvironment(_Environment):
    """Counts loop iterations, so that a request's own template ends."""

    def __init__(self, clock: Callable[[], datetime]) -> None:
        super().__init__(clock)
        self.iterations = 0
        self.globals[_TICK] = self._tick

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            call = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(call).set_lineno(loop.lineno))
        return tree

    def _tick(self) -> None:
        self.iterations += 1
        if self.iterations > REQUEST_TEMPLATE_ITERATIONS_MAX:
            raise jinja2.TemplateRuntimeError(f"more than {REQUEST_TEMPLATE_ITERATIONS_MAX} loop iterations")


_TICK = "ropeway_tick"


class ChatTemplate:
    """One compiled template. Raises PromptError when it does not compile."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        clock: Callable[[], datetime] = datetime.now,
        bounded: bool = False,
    ) -> None:
        self.source = source
        self._environment = _BoundedEnvironment(clock) if bounded else _Environment(clock)
        try:
            template = self._environment.from_string(source)
            self.wrap_text = iterates_over_content(self._environment.parse(source))
            self.knows_developers = '"developer"' in source or "'developer'" in source
        except (jinja2.TemplateError, RecursionError) as error:
            raise PromptError(f"the chat template does not compile: {error}") from error
        self._root = template.root_render_func
        self._blocks = template.blocks
        self._variables = {**template.globals, **special_tokens}
        # A stranger's program is not worth the effort.
        self.guarded = None if bounded else _guarded(source, special_tokens, clock)

    def render(self, variables: Mapping[str, Any]) -> str:
        """The prompt's text. Raises PromptError with the template's own words when it refuses."""
        if isinstance(self._environment, _BoundedEnvironment):
            self._environment.iterations = 0
        # What Template.render does, less the two dictionaries it copies on the way.
        context = Context(self._environment, {**self._variables, **variables}, None, self._blocks)
        try:
            text = "".join(self._root(context))
        except Exception as error:  # a template may fail in any way that Python code can
            raise PromptError(f"chat template: {error}") from error
        if len(text) > RENDERED_CHARACTERS_MAX:
            raise PromptError(f"the chat template rendered more than {RENDERED_CHARACTERS_MAX} characters")
        return text

    def render_continued(self, variables: dict[str, Any]) -> str:
        """The prompt's text, ending with the last message's own text, for the model to go on with."""
        *before, last = variables["messages"]
        tagged, final = _tag_final(last)
        text = self.render({**variables, "messages": [*before, tagged]})
        mark = text.rfind(_CONTINUE_TAG.strip())
        if mark < 0 or final.strip() not in text:
            raise PromptError("`continue_final_message` is set, but the chat template drops the final message's text")
        kept = text[:mark]
        return kept if text.startswith(_CONTINUE_TAG, mark) else kept.rstrip()

    def render_beginning(self, variables: dict[str, Any], conversation: Conversation) -> tuple[str, int]:
        """A text of the conversation, and how much of its beginning an engine that sees the images will render too."""
        first, second = (
            self.render({**variables, "messages": _with_probe(conversation, probe, self.wrap_text)})
            for probe in _PROBES
        )
        return first, len(common_prefix((first, second)))


class ChatTemplates:
    """The templates of a model: the default one and those for special uses."""

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        allow_request_templates: bool = False,
        defaults: Mapping[str, Any] | None = None,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`defaults` are variables that a request's `chat_template_kwargs` may say otherwise, as engines have them by
        `--default-chat-template-kwargs`. Raises PromptError where one of them is not for a template to be told."""
        self._defaults = dict(_extra_variables(defaults or {}))
        self._special_tokens = special_tokens
        self._clock = clock
        self._allow_request_templates = allow_request_templates
        self._named = {name: ChatTemplate(source, special_tokens, clock=clock) for name, source in sources.items()}
        self._requested: OrderedDict[str, ChatTemplate] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._named) or self._allow_request_templates

    @property
    def sources(self) -> dict[str, str]:
        return {name: template.source for name, template in self._named.items()}

    def render(self, request: Mapping[str, Any]) -> tuple[str, int | None]:
        """Render the body of a chat completion request. Raises PromptError.

        Returns the text and None, or, for a conversation with images, how many of its leading characters are certain.
        """
        template, variables, conversation = self._prepare(request)
        if conversation.media:
            return template.render_beginning(variables, conversation)
        if request.get("continue_final_message"):
            return template.render_continued(variables), None
        return template.render(variables), None

    def outline(self, request: Mapping[str, Any], texts: Sequence[str]) -> Outline | None:
        """How all requests of this one's shape are rendered; None when the template looks at texts, or refuses.

        `texts` are those of the messages, which hold nothing else but a role (`read_shape`).
        """
        try:
            template = self._prepare(request)[0]
            guarded = template.guarded
            if guarded is None or (not template.knows_developers and _names_developers(request)):
                return None
            messages = [
                {**message, "content": guarded.placeholder(index)} for index, message in enumerate(request["messages"])
            ]
            outline = guarded.outline(self._prepare({**request, "messages": messages})[1])
            if outline is None or outline.filled(texts) != self.render(request)[0]:
                return None
        except PromptError:
            return None
        return outline

    def _prepare(self, request: Mapping[str, Any]) -> tuple[ChatTemplate, dict[str, Any], Conversation]:
        """The template to render, and what with. Raises PromptError."""
        tools = read_tools(request)
        template = self._select(request, tools is not None)
        conversation = read_conversation(
            request, wrap_text=template.wrap_text, knows_developers=template.knows_developers
        )
        add_generation_prompt, _ = read_flags(request)
        variables: dict[str, Any] = {"documents": None, **self._defaults}
        if request.get("chat_template_kwargs"):
            variables.update(_extra_variables(request["chat_template_kwargs"]))
        if request.get("documents") is not None:
            variables["documents"] = _documents(request["documents"])
        if request.get("reasoning_effort") is not None:
            variables["reasoning_effort"] = request["reasoning_effort"]
        variables["messages"] = conversation.messages
        variables["tools"] = tools
        variables["add_generation_prompt"] = add_generation_prompt
        return template, variables, conversation

    def _select(self, request: Mapping[str, Any], with_tools: bool) -> ChatTemplate:
        wanted = request.get("chat_template")
        if wanted is not None:
            return self._requested_template(wanted)
        template = self._named.get("tool_use") if with_tools else None
        template = template or self._named.get("default")
        if template is None:
            raise PromptError("the model has no chat template")
        return template

    def _requested_template(self, source: Any) -> ChatTemplate:
        if not self._allow_request_templates:
            raise PromptError("`chat_template` in a request is not allowed here")
        if not isinstance(source, str) or len(source) > REQUEST_TEMPLATE_CHARACTERS_MAX:
            raise PromptError(
                f"`chat_template` must be a string of at most {REQUEST_TEMPLATE_CHARACTERS_MAX} characters"
            )
        if source in self._named:
            return self._named[source]
        template = self._requested.get(source)
        if template is None:
            template = ChatTemplate(source, self._special_tokens, clock=self._clock, bounded=True)
            self._requested[source] = template
            if len(self._requested) > REQUEST_TEMPLATES_CACHED_MAX:
                self._requested.popitem(last=False)
        else:
            self._requested.move_to_end(source)
        return template


def _names_developers(request: Mapping[str, Any]) -> bool:
    return any(message["role"] == DEVELOPER for message in request["messages"])


def _guarded(source: str, special_tokens: Mapping[str, str], clock: Callable[[], datetime]) -> GuardedTemplate | None:
    environment = _Environment(clock)
    try:
        return GuardedTemplate(environment, source, special_tokens)
    except Exception:  # whatever is not understood about a template, it can still be rendered
        return None


def iterates_over_content(tree: nodes.Template) -> bool:
    """Whether a template loops over the parts of a message's content: then an engine leaves content as parts.

    vLLM decides by the same reading of the syntax tree: a loop over `messages`, or a name assigned from it, makes its
    target a message; a loop over `message.content` of such a name settles it.
    """
    assigned = [(node.target.name, node.node) for node in tree.find_all(nodes.Assign) if _is_name(node.target)]
    lists = {"messages"}
    while found := {name for name, value in assigned if name not in lists and _reads(value, lists)}:
        lists |= found
    loops = list(tree.find_all(nodes.For))
    messages = {loop.target.name for loop in loops if _is_name(loop.target) and _reads(loop.iter, lists)}
    return any(_reads(loop.iter, messages, key="content") for loop in loops)


def _reads(node: nodes.Node | None, names: set[str], key: str | None = None) -> bool:
    """Whether an expression is one of the names (or its `key`), perhaps filtered, tested or sliced."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is not None:
        by_name = isinstance(node, nodes.Getattr) and node.attr == key
        by_item = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == key
        if not isinstance(node, nodes.Getattr | nodes.Getitem) or not (by_name or by_item):
            return False
        node = node.node
    return node is not None and _is_name(node) and node.name in names


def _is_name(node: nodes.Node) -> TypeGuard[nodes.Name]:
    return isinstance(node, nodes.Name)


def _tag_final(message: Message) -> tuple[Message, str]:
    """The message with a mark at the end of its text, and that text."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + _CONTINUE_TAG}, content
    if not content:
        raise PromptError("`continue_final_message` is set, but the final message has no text")
    *before, last = content
    return {**message, "content": [*before, {**last, "text": last["text"] + _CONTINUE_TAG}]}, last["text"]


def _with_probe(conversation: Conversation, probe: str, wrap_text: bool) -> list[Message]:
    """The messages with a probe at the first image; text that an engine rewrites around other images is a probe too."""
    messages = list(conversation.messages)
    for index in conversation.media:
        message = messages[index]
        if not wrap_text:
            # Where content is text, engines choose where in it to write an image's placeholder.
            messages[index] = {**message, "content": probe}
        elif index == conversation.media[0]:
            messages[index] = {**message, "content": _probed_parts(message["content"], probe)}
    return messages


def _probed_parts(parts: Sequence[Mapping[str, str]], probe: str) -> list[Mapping[str, str]]:
    at = next(index for index, part in enumerate(parts) if part["type"] != "text")
    return [*parts[:at], {"type": "text", "text": probe}, *parts[at:]]


def _documents(documents: Any) -> Sequence[Mapping[str, Any]]:
    if not isinstance(documents, list) or not all(isinstance(document, dict) for document in documents):
        raise PromptError("`documents` must be a list of objects")
    return documents


def _extra_variables(extra: Any) -> Mapping[str, Any]:
    if not isinstance(extra, dict):
        raise PromptError("`chat_template_kwargs` must be an object")
    if clash := _RESERVED_VARIABLES & extra.keys():
        raise PromptError(f"`chat_template_kwargs` must not contain {', '.join(sorted(clash))}")
    return extra


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)

"""Templates that only copy texts are told from those that look at them, however sneakily."""

from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachecore.prompts.contract import PromptError
from cachecore.prompts.outlines import Outline, Slot, is_small, read_shape
from cachecore.prompts.template import ChatTemplates

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
EACH = "{% for m in messages %}"
END = "{% endfor %}"

COPYING = {
    "attributes": EACH + "<{{ m.role }}>{{ m.content }}" + END,
    "items": EACH + "{{ '<' + m['role'] + '>' + m['content'] + eos_token }}" + END,
    "tilde": EACH + "{{ m.role ~ ': ' ~ m.content ~ '\\n' }}" + END,
    "get": EACH + "{{ m.get('role') }}:{{ m.get('content', 'none') }}" + END,
    "trim": EACH + "[{{ m.content | trim }}]" + END,
    "trim_then_add": EACH + "{{ m['content'] | trim + '\\n\\n' }}" + END,
    "strip_method": EACH + "[{{ m.content.strip() }}]" + END,
    "trim_of_the_trimmed": EACH + "[{{ (m.content | trim).strip() }}]" + END,
    "assigned": EACH + "{% set x = m.content %}{% set y = '(' ~ x %}{{ y + ')' }}" + END,
    "block_assigned": EACH + "{% set x %}<{{ m.content }}>{% endset %}{{ x ~ x }}" + END,
    "namespace": "{% set ns = namespace(t='') %}" + EACH + "{% set ns.t = ns.t ~ m.content %}" + END + "{{ ns.t }}",
    "macro": "{% macro f(r, t) %}<{{ r | upper }}>{{ t }}{% endmacro %}" + EACH + "{{ f(m.role, t=m.content) }}" + END,
    "call_block": "{% macro f() %}({{ caller() }}){% endmacro %}"
    + EACH
    + "{% call f() %}{{ m.content }}{% endcall %}"
    + END,
    "generation": EACH + "{% generation %}{{ m.content }}{% endgeneration %}" + END,
    "kinds": EACH
    + "{% if m.content is string and m.content is not none and m.content is defined %}{{ m.content }}{% endif %}"
    + END,
    "truth": EACH + "{% if m.content and not not m.content %}{{ m.content or 'nothing' }}{% endif %}" + END,
    "default": EACH + "{{ m.content | default('none') }}" + END,
    "keys": EACH + "{% if 'content' in m and 'name' not in m %}{{ m.content }}{% endif %}" + END,
    "mapping_items": EACH + "{% for k, v in m.items() %}{{ k }}={{ v }};{% endfor %}" + END,
    "neighbours": EACH + "{{ loop.previtem.content if loop.previtem }}>{{ m.content }}" + END,
    "slices": "{% for m in messages[1:] %}{{ m.content }}{% endfor %}{{ messages[0].content }}{{ messages[-1].role }}",
    "ends": "{{ (messages | first).content }}{{ (messages | last).content }}{{ messages | length }}",
    "roles_only": EACH + "{% if m.role == 'system' %}{{ m.content }}{% else %}{{ loop.index }}{% endif %}" + END,
    "parts": EACH + "{% for p in m.content %}{{ p.type }}:{{ p.text }}{% endfor %}" + END,
    "filtered_loop": "{% for m in messages if m.role != 'system' %}{{ m.content }}{% else %}none{% endfor %}",
    "with": EACH + "{% with t = m.content %}{{ t }}{% endwith %}" + END,
    "break": EACH + "{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}" + END,
}

LOOKING = {
    "in": EACH + "{% if 'a' in m.content %}A{% endif %}{{ m.content }}" + END,
    "in_reversed": EACH + "{% if m.content in 'abc' %}A{% endif %}{{ m.content }}" + END,
    "in_list": EACH + "{% if m.content in ['a', 'b'] %}A{% endif %}{{ m.content }}" + END,
    "in_keys": EACH + "{% if m.content in {'a': 1} %}A{% endif %}{{ m.content }}" + END,
    "in_texts": EACH + "{% if 'a' in [m.content] %}A{% endif %}{{ m.content }}" + END,
    "equal": EACH + "{{ 'A' if m.content == 'a' else m.content }}" + END,
    "equal_to_another": EACH + "{{ 'same' if m.content == messages[0].content else m.content }}" + END,
    "equal_messages": EACH + "{{ 'same' if m == messages[0] else m.content }}" + END,
    "message_in_messages": "{% if {'role': 'user', 'content': 'a'} in messages %}A{% endif %}{{ messages[0].content }}",
    "counted": "{{ messages.count({'role': 'user', 'content': 'a'}) }}{{ messages[0].content }}",
    "previtem": EACH + "{% if loop.previtem and loop.previtem.content == m.content %}A{% endif %}{{ m.content }}" + END,
    "changed": EACH + "{% if loop.changed(m.content) %}{{ m.content }}{% endif %}" + END,
    "less": EACH + "{{ 'A' if m.content < 'b' else 'B' }}" + END,
    "length": EACH + "{{ m.content | length }}" + END,
    "index": EACH + "{{ m.content[0] }}" + END,
    "slice": EACH + "{{ m.content[:2] }}" + END,
    "iteration": EACH + "{% set t = m.content %}{% for c in t %}{{ c }}.{% endfor %}" + END,
    "unpacking": EACH + "{% set a, b = m.content %}{{ a }}{{ b }}" + END,
    "unpacking_loop": "{% for a, b in [messages[0].content] %}{{ a }}{{ b }}{% endfor %}",
    "unpacking_deep": "{% for k, (a, b) in messages[0].items() %}{{ a }}{% endfor %}",
    "times": EACH + "{{ m.content * 2 }}" + END,
    "tojson": EACH + "{{ m.content | tojson }}" + END,
    "tojson_message": EACH + "{{ m | tojson }}" + END,
    "printed_message": EACH + "{{ m }}" + END,
    "printed_list": EACH + "{{ [m.content] ~ '' }}" + END,
    "replace": EACH + "{{ m.content | replace('a', 'b') }}" + END,
    "replace_method": EACH + "{{ m.content.replace('a', 'b') }}" + END,
    "replaced_in": EACH + "{{ 'abc'.replace(m.content, 'x') }}" + END,
    "startswith": EACH + "{{ m.content.startswith('a') }}{{ m.content }}" + END,
    "starts_with_content": EACH + "{{ 'abc'.startswith(m.content) }}{{ m.content }}" + END,
    "split": EACH + "{{ m.content.split('a')[-1] }}" + END,
    "percent_width": EACH + "{{ '%-10s' | format(m.content) }}" + END,
    "percent": EACH + "{{ '%-10s' % m.content }}" + END,
    "format_method": EACH + "{{ '{:>5}'.format(m.content) }}" + END,
    "format_of_content": EACH + "{{ m.content.format(1) }}" + END,
    "trim_characters": EACH + "{{ m.content | trim('a') }}" + END,
    "trim_composite": EACH + "{{ ('a' ~ m.content) | trim }}" + END,
    "truth_of_the_trimmed": EACH + "{{ 'A' if m.content | trim else 'B' }}" + END,
    "or_of_the_trimmed": EACH + "{{ (m.content | trim) or 'B' }}" + END,
    "lstrip": EACH + "{{ m.content.lstrip() }}" + END,
    "upper": EACH + "{{ m.content | upper }}" + END,
    "upper_test": EACH + "{{ 'A' if m.content is upper else 'B' }}" + END,
    "equalto_test": EACH + "{{ 'A' if m.content is equalto('a') else 'B' }}" + END,
    "in_test": EACH + "{{ 'A' if m.content is in('abc') else 'B' }}" + END,
    "escape": EACH + "{{ m.content | e }}" + END,
    "safe": EACH + "{{ (m.content | safe) + '<' }}" + END,
    "default_if_false": EACH + "{{ (m.content | trim) | default('B', true) }}" + END,
    "looked_up": EACH + "{{ {'a': 'A'}[m.content] }}{{ m.content }}" + END,
    "looked_up_by_get": EACH + "{{ {'a': 'A'}.get(m.content, '-') }}{{ m.content }}" + END,
    "key": EACH + "{{ {m.content: 1} | length }}{{ m.content }}" + END,
    "attribute": EACH + "{{ m[m.content] }}{{ m.content }}" + END,
    "groupby": "{% for k, g in messages | groupby('content') %}{{ k }}{% endfor %}",
    "sort": "{% for m in messages | sort(attribute='content') %}{{ m.content }}{% endfor %}",
    "unique": "{% for m in messages | unique(attribute='content') %}{{ m.content }}{% endfor %}",
    "selectattr": "{% for m in messages | selectattr('content', 'equalto', 'a') %}{{ m.content }}{% endfor %}",
    "map": "{{ messages | map(attribute='content') | join('-') | length }}",
    "join": "{{ [messages[0].content] | join('-') }}",
    "list_of_characters": EACH + "{{ m.content | list | length }}" + END,
    "macro_inspects": "{% macro f(t) %}{{ 'A' if t == 'a' else t }}{% endmacro %}" + EACH + "{{ f(m.content) }}" + END,
    "macro_alias": "{% macro f(t) %}{{ t }}{% endmacro %}{% set g = f %}" + EACH + "{{ g(m.content) | length }}" + END,
    "macro_varargs": "{% macro f() %}{{ varargs[0] == 'a' }}{% endmacro %}" + EACH + "{{ f(m.content) }}" + END,
    "disguised": "{% set namespace = 'abc'.startswith %}" + EACH + "{{ namespace(m.content) }}{{ m.content }}" + END,
    "captured": EACH + "{% set x %}{{ m.content }}{% endset %}{{ x | length }}" + END,
    "filter_block": EACH + "{% filter upper %}{{ m.content }}{% endfilter %}" + END,
    "filtered_assignment": EACH + "{% set x | upper %}{{ m.content }}{% endset %}{{ x }}" + END,
    "namespace_inspected": EACH + "{% set ns = namespace(t=m.content) %}{{ ns.t == 'a' }}" + END,
    "derived": EACH + "{% set x = '<' ~ m.content ~ '>' %}{{ '<a>' == x }}" + END,
    "wordcount": EACH + "{{ m.content | wordcount }}" + END,
    "int": EACH + "{{ m.content | int }}" + END,
    "power": EACH + "{{ m.content is divisibleby 2 }}" + END,
    "raises": EACH + "{{ raise_exception(m.content) }}" + END,
    "parts_inspected": EACH + "{% for p in m.content %}{{ 'A' if p.text == 'a' else p.text }}{% endfor %}" + END,
    "block": "{% block b %}{% for m in messages %}{{ m.content == 'a' }}{% endfor %}{% endblock %}",
    "recursive": "{% for m in messages recursive %}{{ m.content }}{% endfor %}",
    "conditional": EACH + "{{ m.content if m.content > 'b' }}" + END,
    "time": "{{ strftime_now('%H') }}" + EACH + "{{ m.content }}" + END,
    "time_by_alias": "{% set now = strftime_now %}{{ now('%H') }}" + EACH + "{{ m.content }}" + END,
    "chance": "{{ [1, 2] | random }}" + EACH + "{{ m.content }}" + END,
    "chance_by_name": "{{ [[1, 2]] | map('random') | first }}" + EACH + "{{ m.content }}" + END,
    "lipsum": "{{ lipsum(1) }}" + EACH + "{{ m.content }}" + END,
    "cycler": "{% set c = cycler('a', 'b') %}" + EACH + "{{ c.next() }}{{ m.content }}" + END,
    "address": EACH + "{{ m.items }}{{ m.content }}" + END,
}

TEXTS = st.one_of(
    st.sampled_from(
        ["a", "b", " a", "a ", "  ", "\n", "<a>", "a\n\n", "abc", "ab", "{{ x }}", "%s", "{}", "é", "\x1c a"]
    ),
    st.text(min_size=1, max_size=12),
)
CONVERSATIONS = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXTS), min_size=1, max_size=5)


def request_of(conversation: list[tuple[str, str]], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in conversation], **more}


def outline_of(templates: ChatTemplates, request: dict[str, Any]) -> Outline | None:
    shaped = read_shape(request)
    assert shaped is not None
    return templates.outline(request, shaped[1])


@pytest.mark.parametrize("name", COPYING)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_an_outline_renders_what_the_template_renders(name: str, data: st.DataObject) -> None:
    templates = ChatTemplates({"default": COPYING[name]}, SPECIAL)
    learned = data.draw(CONVERSATIONS)
    outline = outline_of(templates, request_of(learned))
    assert outline is not None
    for _ in range(3):
        texts = [data.draw(TEXTS) for _ in learned]
        request = request_of([(role, text) for (role, _), text in zip(learned, texts, strict=True)])
        assert outline.filled(texts) == templates.render(request)[0]


@pytest.mark.parametrize("name", LOOKING)
@settings(max_examples=5, deadline=None)
@given(conversation=CONVERSATIONS)
def test_templates_that_look_have_no_outline(name: str, conversation: list[tuple[str, str]]) -> None:
    templates = ChatTemplates({"default": LOOKING[name]}, SPECIAL, clock=lambda: datetime(2031, 5, 17))
    # Two messages at least: some of these look at the second only.
    assert outline_of(templates, request_of([("user", "a"), ("user", "b"), *conversation])) is None


@pytest.mark.parametrize("name", LOOKING)
def test_what_a_template_would_see_makes_no_difference(name: str) -> None:
    """Texts that no template here reacts to: it has to be its looking that gives it away."""
    templates = ChatTemplates({"default": LOOKING[name]}, SPECIAL, clock=lambda: datetime(2031, 5, 17))
    assert outline_of(templates, request_of([("user", "zq"), ("user", "yq"), ("assistant", "xq")])) is None


def test_a_golden_outline() -> None:
    source = "{{ bos_token }}" + COPYING["trim_then_add"]
    templates = ChatTemplates({"default": source}, SPECIAL)
    outline = outline_of(templates, request_of([("user", " a "), ("assistant", "b")]))
    assert outline == Outline(("<s>", "\n\n", "\n\n"), (Slot(0, True), Slot(1, True)))
    assert outline.filled([" x\n", "y"]) == "<s>x\n\ny\n\n"


def test_a_template_may_look_in_one_shape_and_copy_in_another() -> None:
    source = EACH + "{{ m.content if m.role == 'user' else m.content | upper }}" + END
    templates = ChatTemplates({"default": source}, SPECIAL)
    assert outline_of(templates, request_of([("user", "a")])) == Outline(("", ""), (Slot(0, False),))
    assert outline_of(templates, request_of([("user", "a"), ("system", "b")])) is None


def test_templates_of_requests_are_not_traced() -> None:
    templates = ChatTemplates({}, SPECIAL, allow_request_templates=True)
    request = request_of([("user", "a")], chat_template="{{ messages[0].content }}")
    assert templates.render(request) == ("a", None)
    assert templates.outline(request, ["a"]) is None


def test_a_refusing_template_has_no_outline() -> None:
    templates = ChatTemplates({"default": "{{ raise_exception('no') }}"}, SPECIAL)
    assert outline_of(templates, request_of([("user", "a")])) is None
    with pytest.raises(PromptError, match="no"):
        templates.render(request_of([("user", "a")]))


class TestShapes:
    SIMPLE = request_of([("system", "s"), ("user", "u")])

    def test_texts_are_no_part_of_it(self) -> None:
        shape, texts = read_shape(self.SIMPLE) or ((), ())
        assert texts == ["s", "u"]
        assert read_shape(request_of([("system", "x"), ("user", "y")])) == (shape, ["x", "y"])

    @pytest.mark.parametrize(
        "more",
        [
            {"add_generation_prompt": False},
            {"add_generation_prompt": 0},
            {"reasoning_effort": "low"},
            {"continue_final_message": False},
            {"chat_template_kwargs": {"thinking": True}},
            {"chat_template_kwargs": {"thinking": 1}},
            {"chat_template_kwargs": {"thinking": "True"}},
            {"chat_template_kwargs": {"thinking": None}},
            {"chat_template_kwargs": {"other": True}},
            {"messages": request_of([("user", "s"), ("user", "u")])["messages"]},
            {"messages": request_of([("system", "s")])["messages"]},
        ],
    )
    def test_all_else_is(self, more: dict[str, Any]) -> None:
        seen = [read_shape(request) for request in (self.SIMPLE, {**self.SIMPLE, **more})]
        assert None not in seen
        assert len({shape for shape, _ in filter(None, seen)}) == 2

    def test_true_is_not_one(self) -> None:
        shapes = {
            (read_shape({**self.SIMPLE, "chat_template_kwargs": {"thinking": value}}) or ((),))[0]
            for value in (True, 1, False, 0, None, "")
        }
        assert len(shapes) == 6

    @pytest.mark.parametrize(
        "more",
        [
            {"tools": [{"type": "function"}]},
            {"documents": []},
            {"chat_template": ""},
            {"continue_final_message": True},
            {"chat_template_kwargs": {"deep": []}},
            {"chat_template_kwargs": {"zero": -0.0}},
            {"chat_template_kwargs": "x"},
            {"messages": None},
            {"messages": ["x"]},
            {"messages": [{"role": "user", "content": ""}]},
            {"messages": [{"role": "user", "content": None}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
            {"messages": [{"role": "user", "content": "x", "name": "n"}]},
            {"messages": [{"role": 3, "content": "x"}]},
            {"messages": [{"role": ["user"], "content": "x"}]},
            {"messages": [{"content": "x", "name": "n"}]},
        ],
    )
    def test_more_than_texts_has_none(self, more: dict[str, Any]) -> None:
        assert read_shape({**self.SIMPLE, **more}) is None

    def test_size(self) -> None:
        assert is_small(("user",) * 100)
        assert not is_small(("user",) * 1000)
        assert not is_small(("u" * 20_000,))

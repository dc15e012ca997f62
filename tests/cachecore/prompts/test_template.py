"""Templates of our own that use what public ones use, rendered here and by transformers."""

import re
from datetime import datetime
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from cachecore.prompts.contract import PromptError
from cachecore.prompts.messages import read_conversation, read_tools
from cachecore.prompts.template import ChatTemplate, ChatTemplates, iterates_over_content
from tests.cachecore.prompts.templates import (
    CHATML,
    DATES,
    PARTS,
    REQUESTS,
    SPECIAL,
    SYSTEM_MERGE,
    TEMPLATES,
    TOOL,
    TOOLS,
)


def by_transformers(template: str, request: dict[str, Any]) -> str:
    ours = ChatTemplate(template, SPECIAL)
    conversation = read_conversation(request, wrap_text=ours.wrap_text, knows_developers=ours.knows_developers)
    rendered, _ = render_jinja_template(
        conversations=[conversation.messages],
        tools=read_tools(request),
        documents=request.get("documents"),
        chat_template=template,
        add_generation_prompt=request.get("add_generation_prompt", True),
        continue_final_message=request.get("continue_final_message", False),
        **SPECIAL,
        **request.get("chat_template_kwargs", {}),
    )
    return rendered[0]


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("template_name", TEMPLATES)
def test_renders_as_transformers_does(template_name: str, request_name: str) -> None:
    template, request = TEMPLATES[template_name], REQUESTS[request_name]
    templates = ChatTemplates({"default": template}, SPECIAL)
    try:
        expected = by_transformers(template, request)
    except Exception as error:
        # Words of transformers' own differ from ours; a template's do not.
        words = str(error) if isinstance(error, jinja2.TemplateError) else "chat template"
        with pytest.raises(PromptError, match=re.escape(words)):
            templates.render(request)
        return
    assert templates.render(request) == (expected, None)


def test_refusals_are_the_exception() -> None:
    """The suite above compares texts in most of its cells."""
    refused = 0
    for template in TEMPLATES.values():
        for request in REQUESTS.values():
            try:
                ChatTemplates({"default": template}, SPECIAL).render(request)
            except PromptError:
                refused += 1
    assert refused <= 12


def test_a_golden_rendering() -> None:
    text, certain = ChatTemplates({"default": TOOLS}, SPECIAL).render(REQUESTS["tools"])
    assert certain is None
    assert '{"name": "weather", "arguments": {"city": "Zürich", "days": 2}}' in text
    assert '"description": "Wetter für <b>Orte</b> & mehr: 天気"' in text
    assert text.count("<|im_start|>user") == 2
    assert "<tool_response>\n12 °C\n</tool_response><tool_response>\nsunny\n</tool_response><|im_end|>" in text


def test_dates_come_from_the_clock_that_was_handed_in() -> None:
    templates = ChatTemplates({"default": DATES}, SPECIAL, clock=lambda: datetime(2031, 5, 17))
    assert "Today Date: 17 May 2031\n" in templates.render(REQUESTS["plain"])[0]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CHATML, False),
        (PARTS, True),
        ("{% for m in messages[1:] %}{% for c in m.content | list %}{{ c }}{% endfor %}{% endfor %}", True),
        (
            "{% set all = messages %}{% for m in all %}{% for c in m['content'] %}{{ c }}{% endfor %}{% endfor %}",
            True,
        ),
        ("{% for m in messages %}{% for c in m.tool_calls %}{{ c }}{% endfor %}{{ m.content }}{% endfor %}", False),
        ("{% for c in messages[0].content %}{{ c }}{% endfor %}", False),
    ],
)
def test_content_format(source: str, expected: bool) -> None:
    template = ChatTemplate(source, {})
    assert template.wrap_text is expected
    assert iterates_over_content(template._environment.parse(source)) is expected


def test_named_templates() -> None:
    templates = ChatTemplates({"default": "plain", "tool_use": "tools:{{ tools[0].function.name }}"}, SPECIAL)
    assert templates.render({"messages": [{"role": "user", "content": "x"}]})[0] == "plain"
    assert templates.render({"messages": [{"role": "user", "content": "x"}], "tools": [TOOL]})[0] == "tools:weather"


def test_defaults_hold_until_a_request_says_otherwise() -> None:
    templates = ChatTemplates({"default": "{{ thinking }}, {{ effort }}"}, SPECIAL, defaults={"thinking": False})
    body = {"messages": [{"role": "user", "content": "x"}]}
    assert templates.render(body)[0] == "False, "
    assert templates.render({**body, "chat_template_kwargs": {"effort": "low"}})[0] == "False, low"
    assert templates.render({**body, "chat_template_kwargs": {"thinking": True}})[0] == "True, "
    with pytest.raises(PromptError, match="must not contain messages"):
        ChatTemplates({"default": ""}, SPECIAL, defaults={"messages": []})


def test_tools_are_filled_in_and_ordered_as_the_engine_s_schema_does() -> None:
    tools = read_tools({"tools": [{"function": {"strict": True, "parameters": {}, "name": "f"}}]})
    assert tools == [
        {"type": "function", "function": {"name": "f", "description": None, "parameters": {}, "strict": True}}
    ]
    assert list(tools[0]["function"]) == ["name", "description", "parameters", "strict"]
    assert list(tools[0]) == ["type", "function"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "`messages`"),
        ({"messages": []}, "`messages`"),
        ({"messages": "hi"}, "`messages`"),
        ({"messages": [{"content": "hi"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": ["x"]}]}, "tool_calls"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [3]}, "tools[0]"),
        ({"messages": [{"role": "user", "content": "x"}], "documents": "x"}, "`documents`"),
        ({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": 3}, "`chat_template_kwargs`"),
        ({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"tools": []}}, "tools"),
        ({"messages": [{"role": "user", "content": "x"}], "continue_final_message": True}, "continue_final_message"),
        ({"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": "yes"}, "add_generation_prompt"),
        ({"messages": [{"role": "user", "content": "x"}], "chat_template": "x"}, "`chat_template`"),
    ],
)
def test_malformed_requests_are_refused_by_name(body: dict[str, Any], words: str) -> None:
    with pytest.raises(PromptError) as refusal:
        ChatTemplates({"default": CHATML}, SPECIAL).render(body)
    assert words in str(refusal.value)


def test_a_template_s_own_words_reach_the_client() -> None:
    body = {"messages": [{"role": "assistant", "content": "first"}]}
    with pytest.raises(PromptError, match="Conversation roles must alternate"):
        ChatTemplates({"default": SYSTEM_MERGE}, SPECIAL).render(body)


def test_broken_arguments_do_not_end_a_conversation() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{not json"}}
    body = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]}
    message = read_conversation(body, wrap_text=False).messages[1]
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"]["arguments"] == {}
    assert body["messages"][1]["tool_calls"][0]["function"]["arguments"] == "{not json"


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def with_image(text: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "system", "content": "Look."},
            {"role": "user", "content": [{"type": "text", "text": "Before"}, IMAGE, {"type": "text", "text": text}]},
            {"role": "assistant", "content": "A cat."},
            {"role": "user", "content": "Sure?"},
        ]
    }


def test_what_comes_before_an_image_is_certain() -> None:
    text, certain = ChatTemplates({"default": PARTS}, SPECIAL).render(with_image("after"))
    assert text[:certain] == "<|system|>Look.<|end|>\n<|user|>Before"
    text, certain = ChatTemplates({"default": CHATML}, SPECIAL).render(with_image("after"))
    assert text[:certain] == "<|im_start|>system\nLook.<|im_end|>\n<|im_start|>user\n"


def test_a_template_that_looks_ahead_to_an_image_leaves_nothing_certain() -> None:
    source = "{{ messages[1].content }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert ChatTemplates({"default": source}, SPECIAL).render(with_image("after"))[1] == 0


class TestRequestTemplates:
    def templates(self) -> ChatTemplates:
        return ChatTemplates({"default": CHATML}, SPECIAL, allow_request_templates=True)

    def render(self, source: Any) -> str:
        return self.templates().render({"messages": [{"role": "user", "content": "x"}], "chat_template": source})[0]

    def test_runs_where_allowed(self) -> None:
        assert (
            self.render("{% for m in messages %}{{ m.role }}={{ m.content }}{{ eos_token }}{% endfor %}")
            == "user=x</s>"
        )

    @pytest.mark.parametrize(
        "source",
        [
            "{% for a in range(1000) %}{% for b in range(1000) %}{% endfor %}{% endfor %}",
            "{% macro f() %}{% for a in range(99999) %}{% endfor %}{% endmacro %}{{ f() }}{{ f() }}{{ f() }}",
            "{% for a in range(10 ** 9) %}{% endfor %}",
        ],
    )
    def test_endless_loops_end(self, source: str) -> None:
        with pytest.raises(PromptError, match=r"iterations|Range too big"):
            self.render(source)

    @pytest.mark.parametrize(
        "source", ["{{ messages.__class__.__mro__ }}", "{{ ''.__class__ }}", "{{ messages.append(1) }}"]
    )
    def test_the_sandbox_holds(self, source: str) -> None:
        with pytest.raises(PromptError):
            self.render(source + "{{ ''.__class__.__mro__[1] }}")

    def test_what_does_not_compile_is_refused(self) -> None:
        with pytest.raises(PromptError, match="does not compile"):
            self.render("{% for %}")
        with pytest.raises(PromptError, match="must be a string"):
            self.render(3)
        with pytest.raises(PromptError, match="must be a string"):
            self.render("x" * 70_000)

    def test_compiled_ones_are_bounded(self) -> None:
        templates = self.templates()
        for number in range(200):
            templates.render({"messages": [{"role": "user", "content": "x"}], "chat_template": f"{number}"})
        assert len(templates._requested) == 64
        assert "199" in templates._requested
        assert "0" not in templates._requested

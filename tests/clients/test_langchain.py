"""LangChain over the gateway: chat models of both APIs, streamed, with tools bound to them."""

from typing import Any

import pytest

from tests.clients.conftest import Stand
from tests.clients.talking import MODEL, SAID

pytestmark = pytest.mark.filterwarnings("ignore")
langchain_openai = pytest.importorskip("langchain_openai")
langchain_anthropic = pytest.importorskip("langchain_anthropic")
tools = pytest.importorskip("langchain_core.tools")


@tools.tool  # type: ignore[untyped-decorator]
def weather(place: str) -> str:
    """Tells the weather."""
    return f"fine in {place}"


def models(stand: Stand) -> list[Any]:
    url = stand.gateway.url
    settings: dict[str, Any] = {"model": MODEL, "api_key": "none", "max_retries": 0, "timeout": 30}
    return [
        langchain_openai.ChatOpenAI(base_url=f"{url}/v1", **settings),
        langchain_openai.ChatOpenAI(base_url=f"{url}/v1", use_responses_api=True, **settings),
        langchain_anthropic.ChatAnthropic(base_url=url, max_tokens=64, **settings),
    ]


KINDS = ["chat", "responses", "messages"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer(stand: Stand, kind: str) -> None:
    answer = models(stand)[KINDS.index(kind)].invoke([("system", "Be brief."), ("human", "How is the weather?")])
    assert answer.text == SAID
    assert (answer.usage_metadata["input_tokens"], answer.usage_metadata["output_tokens"]) == (20, 5)
    assert answer.usage_metadata["input_token_details"]["cache_read"] == 16
    (body,) = stand.bodies()
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How is the weather?"},
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream(stand: Stand, kind: str) -> None:
    chunks = list(models(stand)[KINDS.index(kind)].stream("How is the weather?"))
    assert "".join(chunk.text for chunk in chunks) == SAID
    assert len([chunk for chunk in chunks if chunk.text]) == len(SAID.split())


@pytest.mark.parametrize("kind", KINDS)
def test_a_tool_is_called_and_its_result_answered(stand: Stand, kind: str) -> None:
    model = models(stand)[KINDS.index(kind)].bind_tools([weather])
    first = model.invoke("How is the weather?")
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"place": "Zürich"})
    result = weather.invoke(call)
    second = model.invoke([("human", "How is the weather?"), first, result])
    assert second.text == SAID
    assert stand.bodies()[1]["messages"][-1]["content"] == "fine in Zürich"  # type: ignore[index]

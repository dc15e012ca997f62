"""LiteLLM as a client of the gateway, by both APIs."""

import json
import os
import warnings
from typing import Any

import pytest

from tests.clients.conftest import Stand
from tests.clients.talking import ARGUMENTS, MODEL, SAID

pytestmark = pytest.mark.filterwarnings("ignore")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    litellm = pytest.importorskip("litellm")

QUESTION = [{"role": "user", "content": "How is the weather?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells it.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }
]
PROVIDERS = ["openai", "hosted_vllm", "anthropic"]


def asked(stand: Stand, provider: str, **fields: Any) -> Any:
    url = stand.gateway.url
    base = url if provider == "anthropic" else f"{url}/v1"
    settings = {"api_base": base, "api_key": "none", "num_retries": 0, "timeout": 30, "max_tokens": 64}
    return litellm.completion(model=f"{provider}/{MODEL}", messages=QUESTION, **settings, **fields)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_answer(stand: Stand, provider: str) -> None:
    answer = asked(stand, provider)
    assert answer.choices[0].message.content == SAID
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (20, 5)
    assert stand.bodies()[0]["messages"] == QUESTION


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_stream(stand: Stand, provider: str) -> None:
    chunks = list(asked(stand, provider, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SAID


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_tool_is_called(stand: Stand, provider: str) -> None:
    answer = asked(stand, provider, tools=TOOLS)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == json.loads(ARGUMENTS)
    assert answer.choices[0].finish_reason == "tool_calls"


def test_a_response(stand: Stand) -> None:
    url = f"{stand.gateway.url}/v1"
    answer = litellm.responses(model=f"openai/{MODEL}", input="How is it?", api_base=url, api_key="none", timeout=30)
    assert answer.output[-1].content[0].text == SAID

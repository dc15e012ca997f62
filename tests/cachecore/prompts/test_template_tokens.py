"""Token ids of every template: with a tokenizer that adds nothing, and with one that adds a BOS of its own."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from cachecore.prompts.contract import PromptError
from cachecore.prompts.huggingface import HuggingFaceRenderer
from cachecore.prompts.messages import read_conversation, read_tools
from tests.cachecore.prompts.conftest import byte_level_tokenizer, metaspace_tokenizer, write_model
from tests.cachecore.prompts.templates import REQUESTS, TEMPLATES

# Written out, since the clock may pass midnight between two renderings.
DATED = {**REQUESTS, "plain": {**REQUESTS["plain"], "chat_template_kwargs": {"date_string": "1 Jan 2000"}}}


@pytest.fixture(scope="module", params=["byte level", "metaspace with a BOS"])
def directory_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    byte_level = request.param == "byte level"
    tokenizer = byte_level_tokenizer("llama3") if byte_level else metaspace_tokenizer()
    specials = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    if not byte_level:
        specials = {"bos_token": "<s>", "eos_token": "</s>"}

    def write(template: str) -> Path:
        return write_model(tmp_path_factory.mktemp("template"), tokenizer, TEMPLATES[template], **specials)

    return write


@pytest.mark.parametrize("name", TEMPLATES)
def test_token_ids_are_those_of_transformers(name: str, directory_of: Any) -> None:
    directory = directory_of(name)
    renderer, theirs = HuggingFaceRenderer.load(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    compared = 0
    for request in DATED.values():
        try:
            rendered = renderer.chat(request)
        except PromptError:
            continue
        own = renderer._templates._named["default"]
        messages = read_conversation(request, wrap_text=own.wrap_text, knows_developers=own.knows_developers).messages
        ids = theirs.apply_chat_template(
            messages,
            tools=read_tools(request),
            documents=request.get("documents"),
            add_generation_prompt=request.get("add_generation_prompt", True),
            continue_final_message=request.get("continue_final_message", False),
            **request.get("chat_template_kwargs", {}),
        )["input_ids"]
        assert [token for segment in rendered.segments for token in renderer.encode(segment)] == ids
        compared += 1
    assert compared >= 3


def test_a_bos_that_the_tokenizer_adds_is_on_plain_prompts_alone(directory_of: Any) -> None:
    directory = directory_of("twice")
    renderer, theirs = HuggingFaceRenderer.load(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    (bos,) = renderer.encode(renderer.special_tokens["bos_token"])
    plain = [token for segment in renderer.text("Hello").segments for token in renderer.encode(segment)]
    assert plain == theirs("Hello")["input_ids"]
    chat = renderer.chat({"messages": [{"role": "user", "content": "Hello"}]})
    tokens = [token for segment in chat.segments for token in renderer.encode(segment)]
    # Two that the template writes in the beginning, and one at the end.
    assert (tokens[:2], tokens[-1], tokens.count(bos)) == ([bos, bos], bos, 3)

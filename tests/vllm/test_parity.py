"""Our token ids of a chat are vLLM's: SmolLM2's template and all of our own, with a BOS of the tokenizer and without.

vLLM's render server has the engine's rendering and tokenizing and no model, so it starts in seconds.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cachecore.prompts.contract import PromptError
from cachecore.prompts.huggingface import HuggingFaceRenderer
from gateway.config import WorkerConfig
from gateway.fleet import parity
from gateway.fleet.engines.discovery import discover
from gateway.fleet.engines.questions import Questions
from gateway.fleet.worker import ModelPool, Parity
from tests.cachecore.prompts.templates import REQUESTS, TEMPLATES
from tests.gateway.end_to_end.processes import HOST, Process, free_ports
from tests.vllm.servers import MODEL

pytestmark = pytest.mark.vllm

BOS = "<|endoftext|>"
# The date is told by two clocks.
FIXED = {"chat_template_kwargs": {"date_string": "1 Jan 2000", "enable_thinking": False}}


class RenderServer(Process):
    module = "tests.vllm.render_server"
    start_seconds_max = 120.0

    def __init__(self, directory: Path, model: Path, *more: str) -> None:
        (port,) = free_ports(1)
        self.url = f"http://{HOST}:{port}"
        flags = ["--model", str(model), "--served-model-name", MODEL, "--host", HOST, "--port", str(port)]
        offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        flags += more or ("--trust-request-chat-template", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
        super().__init__("vllm-render", flags, directory, offline)
        self.http = httpx.Client(base_url=self.url, timeout=60, trust_env=False)
        self.wait_for(lambda: self.http.get("/health").status_code == 200, "ready")

    def stop(self) -> None:
        self.http.close()
        super().stop()


@pytest.fixture(scope="module", params=["as it is", "with a BOS"])
def engine(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RenderServer, HuggingFaceRenderer]]:
    if request.param != "as it is":
        model = with_bos(model, tmp_path_factory.mktemp("bos"))
    renderer = HuggingFaceRenderer.load(model, allow_request_templates=True)
    with RenderServer(tmp_path_factory.mktemp("render"), model) as server:
        yield server, renderer


def with_bos(model: Path, directory: Path) -> Path:
    """SmolLM2's directory, with a tokenizer that puts a token before plain prompts."""
    for path in model.iterdir():
        if path.suffix in (".json", ".jinja", ".txt"):
            shutil.copy(path, directory)
    document = json.loads((model / "tokenizer.json").read_text())
    bos_id = next(token["id"] for token in document["added_tokens"] if token["content"] == BOS)
    single = [{"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {BOS: {"id": BOS, "ids": [bos_id], "tokens": [BOS]}},
    }
    (directory / "tokenizer.json").write_text(json.dumps(document))
    return directory


def rendered(server: RenderServer, request: dict[str, Any]) -> list[int] | None:
    answer = server.http.post("/v1/chat/completions/render", json=request)
    return answer.json()["token_ids"] if answer.status_code == 200 else None


@pytest.mark.parametrize("name", ["", *TEMPLATES])
def test_token_ids_of_chats(engine: tuple[RenderServer, HuggingFaceRenderer], name: str) -> None:
    server, renderer = engine
    own = {"chat_template": TEMPLATES[name]} if name else {}
    compared = 0
    for request in REQUESTS.values():
        body = {"model": MODEL, **request, **FIXED, **own}
        try:
            ours = parity.rendered_tokens(renderer, body)
        except PromptError:
            assert rendered(server, body) is None
            continue
        assert rendered(server, body) == ours
        compared += 1
    assert compared >= 3


async def test_the_proof_at_registration(engine: tuple[RenderServer, HuggingFaceRenderer]) -> None:
    server, renderer = engine
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        ask = Questions(http, server.url)
        adapter, discovery = await discover(ask, WorkerConfig(url=server.url))
        assert (adapter.name, discovery.version) == ("vllm", "0.32.0")
        assert (await parity.prove(adapter, ask, ModelPool(MODEL, renderer))).parity is Parity.PROVEN


CHAT = {
    "model": MODEL,
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Größe 数?"}],
}


async def told_by_vllm(server: RenderServer) -> list[int]:
    """Token ids of a chat, of an engine whose renderer is none of ours: its proof is to say the same again."""
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        ask, pool = Questions(http, server.url), ModelPool(MODEL)
        adapter, _ = await discover(ask, WorkerConfig(url=server.url))
        for _ in range(2):
            verdict = await parity.prove(adapter, ask, pool)
            assert (verdict.parity, verdict.tokenizes) == (Parity.PROVEN, True)
        return list(await adapter.tokenize(ask, CHAT) or ())


async def test_tekken_is_rendered_by_its_engine(model: Path, tmp_path: Path) -> None:
    mistral = pytest.importorskip("mistral_common.tokens.tokenizers.mistral")
    requests = pytest.importorskip("mistral_common.protocol.instruct.request")
    data = Path(pytest.importorskip("mistral_common").__file__).parent / "data"
    shutil.copy(model / "config.json", tmp_path)
    shutil.copy(data / "tekken_240911.json", tmp_path / "tekken.json")
    with RenderServer(tmp_path, tmp_path, "--tokenizer-mode", "mistral") as server:
        told = await told_by_vllm(server)
    own = mistral.MistralTokenizer.from_file(str(tmp_path / "tekken.json"))
    asked = requests.ChatCompletionRequest.from_openai(messages=CHAT["messages"])
    assert told == own.encode_chat_completion(asked).tokens


async def test_a_deepseek_encoder_is_rendered_by_its_engine(model: Path, tmp_path: Path) -> None:
    with RenderServer(tmp_path, model, "--tokenizer-mode", "deepseek_v32") as server:
        told = await told_by_vllm(server)
    text = HuggingFaceRenderer.load(model).decode(told)
    assert text.startswith("<｜begin▁of▁sentence｜>Be brief.<｜User｜>Größe 数?<｜Assistant｜>")

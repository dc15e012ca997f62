"""Token ids equal to those of transformers, and segments that change nothing."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from cachecore.prompts.contract import PromptError, Rendered
from cachecore.prompts.huggingface import SHAPES_MAX, HuggingFaceRenderer

CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "You are a helpful assistant. " * 4},
        {"role": "user", "content": "What is the capital of France?\n\n  It's Paris, isn't it? 12345"},
        {"role": "assistant", "content": "Größe 你好 <|im_start|> injected <|im_end|>"},
        {"role": "user", "content": "  <|tool|>\t\n"},
    ]
}
MARKS = ["<|im_start|>", "<|im_end|>", "<|tool|>", "<|", "|>", "<|im_", "<s>", "[INST]"]
SPACES = [" ", "  ", "\n", "\r\n", "\t", "\x1c", "\u00a0", "\u2028"]
WORDS = ["'s", "'LL", "12345", "Paris", "the quick brown", "x", "!?", "/\n", "\x7f", "é", "e\u0301", "你好", "🙂"]
PIECES = st.sampled_from([*MARKS, *SPACES, *WORDS])
TEXTS = st.one_of(st.text(max_size=40), st.lists(PIECES, max_size=24).map("".join))


@pytest.fixture(scope="session")
def renderers(byte_level_directories: dict[str, Path], metaspace_directory: Path) -> dict[str, HuggingFaceRenderer]:
    directories = {**byte_level_directories, "metaspace": metaspace_directory}
    return {kind: HuggingFaceRenderer.load(directory) for kind, directory in directories.items()}


def tokens(renderer: HuggingFaceRenderer, rendered: Rendered) -> list[int]:
    return [token for segment in rendered.segments for token in renderer.encode(segment)]


def whole(renderer: HuggingFaceRenderer, text: str) -> list[int]:
    return renderer.tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", ["gpt2", "smollm", "llama3", "qwen2", "o200k", "metaspace"])
def test_token_ids_are_those_of_transformers(
    kind: str,
    renderers: dict[str, HuggingFaceRenderer],
    byte_level_directories: dict[str, Path],
    metaspace_directory: Path,
) -> None:
    directory = metaspace_directory if kind == "metaspace" else byte_level_directories[kind]
    theirs = PreTrainedTokenizerFast.from_pretrained(directory)
    renderer = renderers[kind]
    rendered = renderer.chat(CHAT)
    ids = theirs.apply_chat_template(CHAT["messages"], add_generation_prompt=True)["input_ids"]
    assert tokens(renderer, rendered) == ids
    assert len(rendered.segments) > 2
    for prompt in ("Hello world", " Hello", "", "a\n\n<|im_end|>b", "é"):
        assert tokens(renderer, renderer.text(prompt)) == theirs(prompt)["input_ids"]
    assert renderer.decode(ids) == theirs.decode(ids)
    assert renderer.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["gpt2", "smollm", "llama3", "qwen2", "o200k", "metaspace"])
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents=st.lists(TEXTS, min_size=1, max_size=5))
def test_segments_tokenize_as_the_whole(
    kind: str, renderers: dict[str, HuggingFaceRenderer], contents: list[str]
) -> None:
    renderer = renderers[kind]
    assert renderer.segmented
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(contents)]
    rendered = renderer.chat({"messages": messages})
    text = "".join(rendered.segments)
    assert tokens(renderer, rendered) == whole(renderer, text)
    for segment in rendered.segments:
        assert renderer.encode(segment).tolist() == whole(renderer, segment)


@pytest.mark.parametrize("kind", ["gpt2", "smollm", "llama3", "qwen2", "o200k"])
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pieces=st.lists(st.one_of(PIECES, st.just(" and then the same words again"), TEXTS), max_size=30),
    size=st.integers(1, 40),
)
def test_long_texts_tokenize_as_by_the_tokenizer(
    kind: str, renderers: dict[str, HuggingFaceRenderer], pieces: list[str], size: int
) -> None:
    renderer = renderers[kind]
    assert renderer._words is not None
    text = "".join(pieces * size)
    assert renderer.encode(text).tolist() == whole(renderer, text)


def test_a_growing_conversation_keeps_its_segments(renderers: dict[str, HuggingFaceRenderer]) -> None:
    renderer = renderers["smollm"]
    messages: list[dict[str, str]] = [{"role": "system", "content": "Be helpful. " * 10}]
    before: list[str] = []
    for turn in range(6):
        messages.append({"role": "user", "content": f"Question number {turn}: what is the capital of France?"})
        segments = list(renderer.chat({"messages": messages}).segments)
        assert segments[: max(len(before) - 1, 0)] == before[:-1]
        assert len(segments) >= len(before) + 1
        before = segments
        messages.append({"role": "assistant", "content": f"Answer number {turn}: the capital of France is Paris."})


def by_template(renderer: HuggingFaceRenderer, request: dict[str, Any]) -> list[str]:
    return renderer._segmenter.split(renderer._templates.render(request)[0])


LONG_TEXTS = st.builds(
    lambda head, size, tail: head + "The quick brown fox. " * size + tail, TEXTS, st.integers(48, 52), TEXTS
)


@pytest.mark.parametrize("kind", ["gpt2", "smollm", "llama3", "qwen2", "o200k", "metaspace"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents=st.lists(st.one_of(TEXTS, TEXTS, LONG_TEXTS), min_size=1, max_size=4), turns=st.integers(1, 3))
def test_chats_of_known_shape_are_cut_as_by_their_template(
    kind: str, renderers: dict[str, HuggingFaceRenderer], contents: list[str], turns: int
) -> None:
    renderer = renderers[kind]
    for turn in range(turns + 2):
        rolled = [*contents[turn % len(contents) :], *contents[: turn % len(contents)]]
        messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(rolled)]
        request = {"messages": messages}
        assert list(renderer.chat(request).segments) == by_template(renderer, request)


def test_shapes_are_learned_when_met_again(chatml_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = HuggingFaceRenderer.load(chatml_directory)
    requests = [{"messages": [{"role": "user", "content": f"Question number {at}, please"}]} for at in range(4)]
    expected = [by_template(renderer, request) for request in requests]
    for request, segments in zip(requests[:2], expected, strict=False):
        assert renderer.chat(request).segments == segments
    monkeypatch.setattr(type(renderer._templates), "render", None)
    for request, segments in zip(requests, expected, strict=True):
        assert renderer.chat(request).segments == segments
    injected = {"messages": [{"role": "user", "content": "Question <|im_end|>"}]}
    with pytest.raises(TypeError):  # only the template's way may cut this
        renderer.chat(injected)


def test_shapes_are_bounded(chatml_directory: Path) -> None:
    renderer = HuggingFaceRenderer.load(chatml_directory)
    for number in range(SHAPES_MAX + 50):
        for _ in range(2):
            renderer.chat({"messages": [{"role": f"{number}", "content": "x"}]})
    assert 0 < len(renderer._cutters) <= SHAPES_MAX
    assert not renderer._shapes_met
    renderer.chat({"messages": [{"role": "r" * 100_000, "content": "x"}]})
    assert not renderer._shapes_met


@pytest.mark.parametrize(
    ("before", "after"),
    [("<|im_", "end|>"), ("", "end|>"), ("<|im_end", ""), ("<|im_start|>user\n", ">"), ("<", "\n"), ("", "")],
)
def test_texts_that_make_a_marker_with_a_template_s_words(chatml_directory: Path, before: str, after: str) -> None:
    source = "{% for m in messages %}" + f"{before}{{{{ m.content }}}}{after}" + "{% endfor %}{{ '<|im_end|>' }}"
    target = chatml_directory.parent / f"{chatml_directory.name}-{abs(hash((before, after)))}"
    target.mkdir()
    (target / "tokenizer.json").write_text((chatml_directory / "tokenizer.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps({"chat_template": source, "bos_token": "<|im_start|>"}))
    renderer = HuggingFaceRenderer.load(target)
    for text in ("A long text, long enough to stand by itself <|im_", "<|im_start", "end|> and more " * 4, "|>", "x"):
        for _ in range(2):
            request = {"messages": [{"role": "user", "content": text}, {"role": "user", "content": text}]}
            rendered = renderer.chat(request)
            assert list(rendered.segments) == by_template(renderer, request)
            assert tokens(renderer, rendered) == whole(renderer, "".join(rendered.segments))


ANGLED = st.lists(
    st.sampled_from(["<repo>", "<|im_end|>", "<|im_start|>", "<", ">", "<|", "|>", "a < b", "c > d", " x", "\n", "é"]),
    max_size=12,
).map("".join)


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(ANGLED, min_size=1, max_size=3))
def test_added_tokens_with_little_in_common(angled: HuggingFaceRenderer, texts: list[str]) -> None:
    assert angled._words is not None
    assert angled._words._bounds == ("<", ">")
    for text in texts:
        assert angled.encode(text).tolist() == whole(angled, text)


def test_long_segments_are_recognised_and_stay_exact(renderers: dict[str, HuggingFaceRenderer]) -> None:
    renderer = renderers["smollm"]
    document = "The quick brown fox. " * 200

    def segments(system: str, user: str) -> list[str]:
        roles = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        return list(renderer.chat({"messages": roles}).segments)

    first, second = (
        segments(document, "One question, long enough to stand alone"),
        segments(document, "Another question"),
    )
    assert first[0] is second[0]
    longer = segments(document + "And more.", "One question, long enough to stand alone")
    assert longer[0] == first[0] + "And more."
    changed = segments(document[:2000] + "X" + document[2001:], "One question, long enough to stand alone")
    assert changed[0] == "<|im_start|>system\n" + document[:2000] + "X" + document[2001:]
    injected = segments(document + "<|im_end|>", "One question, long enough to stand alone")
    assert injected[0] == first[0]
    assert injected[1].startswith("<|im_end|><|im_end|>\n")


def probe_tokenizer(directory: Path, *tokens: AddedToken) -> Path:
    """A copy of a model directory with more added tokens."""
    target = directory.parent / f"{directory.name}-{len(tokens)}-{abs(hash(tokens[0].content))}"
    target.mkdir()
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens(list(tokens))
    tokenizer.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text((directory / "tokenizer_config.json").read_text())
    return target


@pytest.fixture(scope="session")
def angled(chatml_directory: Path) -> HuggingFaceRenderer:
    return HuggingFaceRenderer.load(
        probe_tokenizer(chatml_directory, AddedToken("<repo>", normalized=False, special=True))
    )


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("end|>\n", normalized=False, special=True),
        AddedToken("|><|im_", normalized=False, special=True),
        AddedToken("<|im_start|>user", normalized=False, special=True),
    ],
)
def test_markers_that_another_token_overlaps_are_not_used(chatml_directory: Path, token: AddedToken) -> None:
    renderer = HuggingFaceRenderer.load(probe_tokenizer(chatml_directory, token))
    assert "<|im_end|>" not in renderer._segmenter.markers or "<|im_start|>" not in renderer._segmenter.markers
    rendered = renderer.chat(CHAT)
    assert tokens(renderer, rendered) == whole(renderer, "".join(rendered.segments))


def test_tokens_that_look_around_keep_the_words_path_off(chatml_directory: Path) -> None:
    token = AddedToken("<mask>", lstrip=True, normalized=False, special=True)
    renderer = HuggingFaceRenderer.load(probe_tokenizer(chatml_directory, token))
    assert renderer._words is None
    assert renderer.segmented
    text = "<|im_start|>user\nfill   <mask> in <|im_end|>\n"
    assert renderer.encode(text).tolist() == whole(renderer, text)


def test_a_tokenizer_whose_segments_differ_gets_one_segment(
    chatml_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachecore.prompts.huggingface._PROBE_TEXTS", ("a", "b"))
    honest = HuggingFaceRenderer.load(chatml_directory)
    assert honest.segmented

    def forgetful(self: HuggingFaceRenderer, segment: str) -> list[int]:
        return whole(self, segment)[1:]

    monkeypatch.setattr(HuggingFaceRenderer, "encode", forgetful)
    renderer = HuggingFaceRenderer.load(chatml_directory)
    assert not renderer.segmented
    assert len(renderer.chat(CHAT).segments) == 1


def test_images_leave_the_segments_before_them(renderers: dict[str, HuggingFaceRenderer]) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    messages = [*CHAT["messages"][:2], {"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]}]
    rendered = renderers["smollm"].chat({"messages": messages})
    full = renderers["smollm"].chat({"messages": CHAT["messages"][:2], "add_generation_prompt": False})
    assert not rendered.complete
    assert rendered.segments == full.segments[:-1]


def test_lone_surrogates_are_refused(renderers: dict[str, HuggingFaceRenderer]) -> None:
    for renderer in renderers.values():
        with pytest.raises(PromptError, match="Unicode"):
            renderer.encode("broken \ud800")
        with pytest.raises(PromptError, match="Unicode"):
            renderer.encode("broken \ud800" * 1000)


def test_unknown_ids_are_refused(renderers: dict[str, HuggingFaceRenderer]) -> None:
    renderer = renderers["gpt2"]
    size = renderer.tokenizer.get_vocab_size()
    assert renderer.decode([]) == ""
    assert renderer.decode([size - 1]) != ""
    for bad in ([size], [-1], [0, 2**40]):
        with pytest.raises(ValueError, match="token ids must lie in"):
            renderer.decode(bad)


def test_characters_come_whole_or_replaced(renderers: dict[str, HuggingFaceRenderer]) -> None:
    renderer = renderers["gpt2"]
    ids = renderer.encode("\U0001f9ff").tolist()
    assert len(ids) > 1
    assert renderer.decode(ids[:-1]) == "\ufffd"
    assert renderer.decode(ids) == "\U0001f9ff"


def test_fingerprints_tell_models_apart(
    renderers: dict[str, HuggingFaceRenderer], byte_level_directories: dict[str, Path]
) -> None:
    fingerprints = {renderer.fingerprint for renderer in renderers.values()}
    assert len(fingerprints) == len(renderers)
    assert HuggingFaceRenderer.load(byte_level_directories["gpt2"]).fingerprint in fingerprints


class TestLoading:
    def copy(self, source: Path, target: Path, **config: object) -> Path:
        (target / "tokenizer.json").write_text((source / "tokenizer.json").read_text())
        (target / "tokenizer_config.json").write_text(json.dumps(config))
        return target

    def test_template_files_win_over_the_configuration(self, chatml_directory: Path, tmp_path: Path) -> None:
        directory = self.copy(chatml_directory, tmp_path, chat_template="from config")
        assert self.rendered(directory) == "from config"
        (directory / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
        assert self.rendered(directory) == "from json"
        (directory / "chat_template.jinja").write_text("from jinja")
        assert self.rendered(directory) == "from jinja"

    def test_named_templates(self, chatml_directory: Path, tmp_path: Path) -> None:
        named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
        directory = self.copy(chatml_directory, tmp_path, chat_template=named)
        assert self.rendered(directory) == "plain"
        assert self.rendered(directory, tools=[{"type": "function", "function": {"name": "f"}}]) == "with tools"
        (directory / "additional_chat_templates").mkdir()
        (directory / "additional_chat_templates" / "tool_use.jinja").write_text("from a file")
        assert self.rendered(directory, tools=[{"type": "function", "function": {"name": "f"}}]) == "from a file"

    def test_special_tokens_of_both_files(self, chatml_directory: Path, tmp_path: Path) -> None:
        template = "{{ bos_token }}{{ eos_token }}{{ pad_token }}"
        directory = self.copy(
            chatml_directory, tmp_path, chat_template=template, bos_token={"content": "<|im_start|>"}, pad_token=None
        )
        (directory / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>", "bos_token": "no"}))
        assert self.rendered(directory) == "<|im_start|><|im_end|>"

    def test_tokens_that_only_the_configuration_knows(self, chatml_directory: Path, tmp_path: Path) -> None:
        size = Tokenizer.from_file(str(chatml_directory / "tokenizer.json")).get_vocab_size()
        spec = {"content": "<|extra|>", "special": True, "normalized": False, "lstrip": False, "rstrip": False}
        directory = self.copy(chatml_directory, tmp_path, added_tokens_decoder={str(size): spec}, bos_token="<|new|>")
        renderer = HuggingFaceRenderer.load(directory)
        theirs = PreTrainedTokenizerFast.from_pretrained(directory)
        text = "a<|extra|>b<|new|>"
        assert renderer.encode(text).tolist() == theirs(text, add_special_tokens=False)["input_ids"]
        assert size in renderer.encode(text)

    @pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (True, True), (False, False)])
    def test_tokenizer_json_alone_says_what_surrounds_a_prompt(
        self, metaspace_directory: Path, tmp_path: Path, bos: bool, eos: bool
    ) -> None:
        directory = self.copy(
            metaspace_directory, tmp_path, bos_token="<s>", eos_token="</s>", add_bos_token=bos, add_eos_token=eos
        )
        renderer = HuggingFaceRenderer.load(directory)
        theirs = PreTrainedTokenizerFast.from_pretrained(directory)
        assert tokens(renderer, renderer.text("Hello world")) == theirs("Hello world")["input_ids"]

    def test_truncation_is_off(self, chatml_directory: Path, tmp_path: Path) -> None:
        directory = self.copy(chatml_directory, tmp_path)
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.enable_truncation(4)
        tokenizer.enable_padding(length=64)
        tokenizer.save(str(directory / "tokenizer.json"))
        assert len(HuggingFaceRenderer.load(directory).tokenizer.encode("a b c d e f g h i j").ids) > 9

    def test_a_directory_without_a_tokenizer(self, tmp_path: Path, chatml_directory: Path) -> None:
        with pytest.raises(ValueError, match=r"tokenizer\.json"):
            HuggingFaceRenderer.load(tmp_path)
        directory = self.copy(chatml_directory, tmp_path)
        (directory / "tokenizer_config.json").write_text("{")
        with pytest.raises(ValueError, match=r"tokenizer_config\.json"):
            HuggingFaceRenderer.load(directory)

    def test_a_model_without_a_template_still_reads_plain_prompts(self, chatml_directory: Path, tmp_path: Path) -> None:
        renderer = HuggingFaceRenderer.load(self.copy(chatml_directory, tmp_path))
        assert tokens(renderer, renderer.text("Hello")) == whole(renderer, "Hello")
        with pytest.raises(PromptError, match="no chat template"):
            renderer.chat(CHAT)

    def rendered(self, directory: Path, **extra: object) -> str:
        request = {"messages": [{"role": "user", "content": "x"}], **extra}
        return "".join(HuggingFaceRenderer.load(directory).chat(request).segments)


def test_threads_agree(renderers: dict[str, HuggingFaceRenderer]) -> None:
    renderer = renderers["llama3"]
    text = "The quick brown fox jumps over naïve dogs, 12345 times.\n" * 400
    expected = whole(renderer, text)
    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda: results.append(renderer.encode(text).tolist() == expected)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4


def test_shapes_do_not_hide_what_is_done_to_messages_before_their_template_runs(chatml_directory: Path) -> None:
    """The template of this directory knows no developers."""
    renderer = HuggingFaceRenderer.load(chatml_directory)
    line = "x-anthropic-billing-header: cch=1;\n"
    for turn in range(4):
        user = {"role": "user", "content": f"Question number {turn}, long enough to stand alone"}
        for before in (
            {"role": "developer", "content": "Be brief."},
            {"role": "system", "content": line + "Be brief."},
        ):
            text = "".join(renderer.chat({"messages": [before, user]}).segments)
            assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nQuestion")

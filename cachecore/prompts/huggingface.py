"""The renderer of a Hugging Face model directory: its chat template and its `tokenizer.json`.

Chats are tokenized without special tokens added (templates write their own), plain prompts with them, as vLLM does by
default. The tokenizer is set up as transformers sets it up: tokens that only `tokenizer_config.json` knows are added,
and what surrounds a plain prompt is `tokenizer.json`'s business, whatever `add_bos_token` says. Truncation is off.

Whether a prompt may be cut into segments is tried out when the directory is loaded: probes that put text, whitespace
and added tokens in many orders must tokenize in segments as they do whole. Where one does not, a prompt is one segment.
"""

import hashlib
import itertools
import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Tokenizer

from cachecore.prompts.contract import PromptError, Rendered
from cachecore.prompts.outlines import Shape, is_small, read_shape
from cachecore.prompts.segments import Cutter, Segmenter, added_tokens, markers_among
from cachecore.prompts.template import ChatTemplates
from cachecore.prompts.words import WordEncoder, encode_detached

# A named tuple's own constructor is a function in Python.
_new = tuple.__new__
SHAPES_MAX = 1024
"""Shapes of chats that are remembered; all are forgotten when there are more, as those in use are soon back."""
_DETACHED_CHARACTERS_MIN = 1024
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_PROBE_CONVERSATION = (
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "u"},
)
_PROBE_TEXTS = (
    "",
    " ",
    "  \n",
    "\n\n",
    "Hello world",
    " leading",
    "trailing ",
    "a\tb 12 345",
    "Größe 你好 🙂",
    "a\u200db",
    "'s it's",
)


class HuggingFaceRenderer:
    """Renders and tokenizes as the model's engine does.

    `encode` and `decode` may run in any thread; `chat` and `text`, which keep caches, belong to one.
    """

    name = "template"

    def __init__(
        self, tokenizer: Tokenizer, templates: ChatTemplates, special_tokens: Mapping[str, str], fingerprint: str
    ) -> None:
        self.tokenizer = tokenizer
        self._templates = templates
        self.special_tokens = special_tokens
        self.fingerprint = fingerprint
        self._token_id_max = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self._words = WordEncoder.of(tokenizer)
        self._prefix, self._suffix = _surrounding_tokens(tokenizer)
        self._shapes_met: set[Shape] = set()
        self._cutters: dict[Shape, Cutter | None] = {}
        """How chats of a shape are cut; None where their template has to run."""
        self._segmenter = Segmenter(self._useful_markers())
        self.segmented = bool(self._segmenter.markers) and self._segments_are_exact()
        """Whether prompts are cut; when not, each is one segment."""
        if not self.segmented:
            self._segmenter = Segmenter(())

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        allow_request_templates: bool = False,
        template_defaults: Mapping[str, Any] | None = None,
        clock: Callable[[], datetime] = datetime.now,
    ) -> "HuggingFaceRenderer":
        """Read a model directory. Raises ValueError with the reason when it holds no usable tokenizer, and PromptError
        for `template_defaults` that a template must not be told (`ChatTemplates`)."""
        try:
            tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # tokenizers raises plain Exception
            raise ValueError(f"{directory}: cannot read tokenizer.json: {error}") from error
        config = _read_json(directory / "tokenizer_config.json")
        special_tokens = _named_special_tokens({**_read_json(directory / "special_tokens_map.json"), **config})
        _configure(tokenizer, config, special_tokens)
        sources = _template_sources(directory, config)
        templates = ChatTemplates(
            sources,
            special_tokens,
            allow_request_templates=allow_request_templates,
            defaults=template_defaults,
            clock=clock,
        )
        return cls(tokenizer, templates, special_tokens, _fingerprint(tokenizer, sources, special_tokens))

    def chat(self, request: Mapping[str, Any]) -> Rendered:
        shaped = read_shape(request)
        if shaped is not None:
            shape, texts = shaped
            cutter = self._cutters.get(shape)
            if cutter is None:
                self._learn_shape(request, shape, texts)
            elif (segments := cutter.split(texts)) is not None:
                return _new(Rendered, (segments, True))
        text, certain = self._templates.render(request)
        segments = self._segmenter.split(text)
        if certain is None:
            return Rendered(segments)
        return Rendered(_leading(segments, certain), complete=False)

    def _learn_shape(self, request: Mapping[str, Any], shape: Shape, texts: Sequence[str]) -> None:
        """Find out about a shape the second time it is met: many never are."""
        if shape in self._cutters or not is_small(shape):
            return
        if shape not in self._shapes_met:
            if len(self._shapes_met) >= SHAPES_MAX:
                self._shapes_met.clear()
            self._shapes_met.add(shape)
            return
        if len(self._cutters) >= SHAPES_MAX:
            self._cutters.clear()
        outline = self._templates.outline(request, texts)
        self._cutters[shape] = self._segmenter.cutter(outline) if outline is not None else None
        self._shapes_met.remove(shape)

    def text(self, prompt: str) -> Rendered:
        return Rendered((*self._prefix, *self._segmenter.split(prompt), *self._suffix))

    def encode(self, segment: str) -> "array[int]":
        try:
            if self._words is not None:
                return self._words.encode(segment)
            if len(segment) < _DETACHED_CHARACTERS_MIN:
                return array("I", self.tokenizer.encode(segment, add_special_tokens=False).ids)
            return array("I", encode_detached(self.tokenizer, segment))
        except (TypeError, UnicodeEncodeError) as error:
            raise PromptError(f"a prompt must be valid Unicode: {error}") from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= self._token_id_max:
            raise ValueError(f"token ids must lie in 0..{self._token_id_max}")
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def _useful_markers(self) -> list[str]:
        """Markers that prompts of this model hold: each one searched for costs time on every prompt."""
        known = "\n".join([*self._templates.sources.values(), *self._probe_prompts()])
        ends = {self.special_tokens.get("bos_token"), self.special_tokens.get("eos_token")}
        tokens = added_tokens(self.tokenizer)
        return markers_among([token for token in tokens if token.content in known or token.content in ends], tokens)

    def _probe_prompts(self) -> Iterator[str]:
        for turns in range(1, len(_PROBE_CONVERSATION) + 1):
            for start in (0, 1):
                messages = list(_PROBE_CONVERSATION[start:turns])
                try:
                    yield self._templates.render({"messages": messages})[0]
                except PromptError:
                    continue

    def _segments_are_exact(self) -> bool:
        markers = self._segmenter.markers
        others = [token.content for token in added_tokens(self.tokenizer)][:64]
        pieces = [*_PROBE_TEXTS, *others]
        for left, marker, right in itertools.product(pieces, markers, pieces):
            whole = self.tokenizer.encode(left + marker + right, add_special_tokens=False).ids
            if whole != [*self.encode(left), *self.encode(marker + right)]:
                return False
        return True


def _leading(segments: Sequence[str], certain: int) -> list[str]:
    """The segments that end within the first `certain` characters."""
    ends = itertools.accumulate(map(len, segments))
    return [segment for segment, end in zip(segments, ends, strict=True) if end <= certain]


def _surrounding_tokens(tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """What the tokenizer adds before and after a plain prompt, as segments."""
    probe = tokenizer.encode("a", add_special_tokens=True)
    mask = [*probe.special_tokens_mask, 0]
    before = mask.index(0)
    after = mask[-2::-1].index(0) if before < len(probe.ids) else 0
    end = len(probe.ids) - after
    if probe.ids[before:end] != tokenizer.encode("a", add_special_tokens=False).ids:
        raise ValueError("the tokenizer's post-processor does more than surround a prompt with special tokens")
    contents = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    surrounding = [contents.get(token_id, "") for token_id in (*probe.ids[:before], *probe.ids[end:])]
    for content in surrounding:
        if len(tokenizer.encode(content, add_special_tokens=False).ids) != 1:
            raise ValueError(f"the tokenizer surrounds prompts with {content!r}, which it does not read as one token")
    return surrounding[:before], surrounding[before:]


def _configure(tokenizer: Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    declared = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    missing = [_read_added_token(spec) for _, spec in declared if spec["content"] not in known]
    if missing:
        tokenizer.add_tokens(missing)
        known.update(token.content for token in missing)
    if unknown := [content for content in dict.fromkeys(special_tokens.values()) if content not in known]:
        tokenizer.add_special_tokens(unknown)


def _read_added_token(spec: Mapping[str, Any]) -> "tokenizers.AddedToken":
    flags = {
        name: bool(spec[name]) for name in ("single_word", "lstrip", "rstrip", "normalized", "special") if name in spec
    }
    return tokenizers.AddedToken(spec["content"], **flags)


def _named_special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its like, as templates see them."""
    named: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            named[name] = content
    return named


def _template_sources(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. Files win over the configuration, and `chat_template.jinja` over the older JSON."""
    declared = _read_json(directory / "chat_template.json").get("chat_template") or config.get("chat_template")
    sources: dict[str, str] = {}
    if isinstance(declared, str):
        sources["default"] = declared
    elif isinstance(declared, list):
        sources = {entry["name"]: entry["template"] for entry in declared}
    elif isinstance(declared, dict):
        sources = dict(declared)
    if (single := directory / "chat_template.jinja").is_file():
        sources["default"] = single.read_text(encoding="utf-8")
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = path.read_text(encoding="utf-8")
    return sources


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path}: not a JSON object")
    return document


def _fingerprint(tokenizer: Tokenizer, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> str:
    digest = hashlib.blake2b(tokenizer.to_str().encode(), digest_size=16)
    digest.update(json.dumps([sorted(sources.items()), sorted(special_tokens.items())]).encode())
    return digest.hexdigest()

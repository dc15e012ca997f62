"""How good answers are that start from moved KV: the real model against its own full prefill.

A prompt is a system prompt, four passages in an order of its own, and a question about one of them. Every passage's KV
was computed elsewhere: behind the same system prompt, or alone. For each way of putting it back together, the answer of
full prefill (greedy, at most 24 tokens) is forced upon the model, and what it would have said is compared at every
token: KL divergence from full prefill, and whether the likeliest token is the same.
"""

import random
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cachecore.kv.codecs.contract import Origin
from cachecore.kv.codecs.registry import CODECS
from cachecore.kv.fuser.context import Context, Passage, stitch
from cachecore.kv.fuser.fuse import DEFAULT_FRACTION, DEFAULT_METHOD, METHODS, fuse
from cachecore.kv.fuser.passes import extend, recompute
from cachecore.kv.layout import LayerKv
from cachecore.kv.means import MeanKv
from cachecore.prompts.contract import Renderer
from workers.reference.config import ModelConfig
from workers.reference.engine import EngineOptions
from workers.reference.model import KvTensors, LlamaModel, Segment
from workers.reference.weights import load_weights

SAMPLES = Path(__file__).parent / "samples"
CORPORA = ("prose", "dialogue")
FRACTIONS = (0.05, 0.15, 0.30)
PASSAGES_PER_PROMPT = 4
CONTEXTS = 3
"""That means are over."""
ANSWER_TOKENS_MAX = 24
_PASSAGE_TOKENS_MAX = 320
_BLOCK_SIZE = 16
_STEP_TOKENS = 128
_SYSTEM = "You answer questions about the passages that you are given. Use only what they say."
_ASKED = "Question: {question}\nAnswer in two sentences."
_HERE = "\u241e"
"""Where a prompt's passages go: no template writes it."""


class Document(NamedTuple):
    title: str
    question: str
    text: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, in parts whose KV may come from different places."""

    system: Sequence[int]
    passages: Sequence[Sequence[int]]
    question: Sequence[int]
    others: Sequence[Sequence[int]] = ()
    """Passages of other prompts, behind which this one's may have been computed."""

    @property
    def context(self) -> list[int]:
        return [*self.system, *(token for passage in self.passages for token in passage)]


class Case(NamedTuple):
    """One way of answering from cached KV."""

    method: str
    """`none` (keys stay as they are), `rotation` (keys turned, nothing recomputed) or one of the fuser's."""
    recompute_fraction: float
    codec: str
    cached: str
    """`after_system`, `alone`, `in_context` (behind a passage of another prompt, as traffic leaves it), `mean` (over
    CONTEXTS of those), or `in_place`: the whole context's own KV, moved nowhere."""


@dataclass(slots=True)
class Row:
    """What a case brought, one number per prompt."""

    case: Case
    kl: list[float] = field(default_factory=list)
    top1: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        means = {"kl_mean": _mean(self.kl), "top1_agreement": _mean(self.top1)}
        return {**self.case._asdict(), **means, "kl_by_prompt": self.kl}


@dataclass(frozen=True, slots=True)
class QualityReport:
    model: str
    corpus: str
    prompts: int
    rows: Sequence[dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def cases() -> list[Case]:
    """Every row of the report."""
    rows = [Case("none", 0.0, codec, "in_place") for codec in CODECS]
    for cached in ("after_system", "alone"):
        rows += [Case("none", 0.0, "raw", cached), Case("rotation", 0.0, "raw", cached)]
        rows += [Case(method, fraction, "raw", cached) for method in METHODS for fraction in FRACTIONS]
        rows.append(Case(DEFAULT_METHOD, 1.0, "raw", cached))
    for cached in ("in_context", "mean"):
        rows += [Case("rotation", 0.0, "raw", cached), Case(DEFAULT_METHOD, DEFAULT_FRACTION, "raw", cached)]
    rows += [Case(DEFAULT_METHOD, DEFAULT_FRACTION, codec, "after_system") for codec in CODECS if codec != "raw"]
    return rows


def read_documents(text: str) -> list[Document]:
    """Documents separated by lines of `---`: a title after `# `, optionally a question after `? `, then the text.

    Raises ValueError when there are too few to draw passages from.
    """
    documents = []
    for part in text.replace("\r\n", "\n").split("\n---\n"):
        lines = part.strip().removesuffix("---").splitlines()
        title = lines.pop(0).removeprefix("#").strip() if lines and lines[0].startswith("#") else ""
        question = lines.pop(0).removeprefix("?").strip() if lines and lines[0].startswith("?") else ""
        if body := "\n".join(lines).strip():
            title = title or " ".join(body.split()[:6])
            documents.append(Document(title, question or f'What do the passages say about "{title}"?', body))
    if len(documents) < PASSAGES_PER_PROMPT:
        raise ValueError(f"{len(documents)} documents: at least {PASSAGES_PER_PROMPT} are needed, between lines of ---")
    return documents


def draw_prompts(
    documents: Sequence[Document], renderer: Renderer, count: int, seed: int, passages_each: int = PASSAGES_PER_PROMPT
) -> Iterator[Prompt]:
    """Prompts of some passages each, drawn and ordered by the seed."""
    draw = random.Random(seed)
    for _ in range(count):
        chosen = draw.sample(documents, passages_each)
        asked = draw.choice(chosen)
        user = f"{_HERE}{_ASKED.format(question=asked.question)}"
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": user}]
        before, after = "".join(renderer.chat({"messages": messages}).segments).split(_HERE)
        passages = [_tokens_of(one, renderer) for one in chosen]
        others = [one for one in documents if one not in chosen]
        others = random.Random(f"{seed} {asked.title}").sample(others, min(CONTEXTS, len(others)))
        elsewhere = [_tokens_of(one, renderer) for one in others]
        yield Prompt(list(renderer.encode(before)), passages, list(renderer.encode(after)), elsewhere)


def _tokens_of(document: Document, renderer: Renderer) -> list[int]:
    return list(renderer.encode(f"{document.title}\n{document.text}\n\n"))[:_PASSAGE_TOKENS_MAX]


def measure(
    model: LlamaModel,
    prompts: Sequence[Prompt],
    wanted: Sequence[Case],
    progress: Callable[[int], None] = lambda _: None,
) -> list[Row]:
    """Run every case on every prompt; `progress` is told how many prompts are done."""
    rows = [Row(case) for case in wanted]
    places = {case.cached for case in wanted}
    for done, prompt in enumerate(prompts, start=1):
        bench = Bench.of(model, prompt, places)
        for row in rows:
            kl, top1 = bench.compare(row.case)
            row.kl.append(kl)
            row.top1.append(top1)
        progress(done)
    return rows


def load_model(directory: Path) -> LlamaModel:
    """fp32 on CPU, bf16 on CUDA. Raises ModelError."""
    options, config = EngineOptions(directory.name), ModelConfig.load(directory)
    weights = load_weights(directory, config, options.torch_dtype(), options.torch_device())
    return LlamaModel(config, weights, config.max_positions)


def report_quality(
    directory: Path,
    model_name: str,
    renderer: Renderer,
    corpus: tuple[str, Sequence[Document]],
    draw: tuple[int, int],
    progress: Callable[[int], None] = lambda _: None,
) -> QualityReport:
    """Every case on prompts from `corpus` (name, documents), `draw` being how many and their seed.

    Raises ModelError, and ValueError for a prompt that the model's context does not hold.
    """
    config = ModelConfig.load(directory)
    count, seed = draw
    prompts = list(draw_prompts(corpus[1], renderer, count, seed))
    longest = max(len(prompt.context) + len(prompt.question) for prompt in prompts) + ANSWER_TOKENS_MAX
    if longest > config.max_positions:
        raise ValueError(f"a prompt of {longest} tokens does not fit into the model's {config.max_positions}")
    rows = measure(load_model(directory), prompts, cases(), progress)
    return QualityReport(model_name, corpus[0], count, [row.summary() for row in rows])


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """One prompt: full prefill's answer, and the cached KV of its passages."""

    model: LlamaModel
    question: Tensor
    forced: Tensor
    """Question and answer, without its last token: what follows the context."""
    full_logits: Tensor
    """[answer tokens, vocabulary]"""
    whole: Context
    """The context as full prefill computes it."""
    cached: Mapping[str, Sequence[Passage]]

    @classmethod
    def of(cls, model: LlamaModel, prompt: Prompt, places: Collection[str]) -> "Bench":
        """`places` are those of the cases to come: only their passages are computed."""
        pieces = cls.assembling(model, prompt, places)
        while True:
            try:
                next(pieces)
            except StopIteration as ended:
                bench: Bench = ended.value
                return bench

    @classmethod
    def assembling(
        cls, model: LlamaModel, prompt: Prompt, places: Collection[str] = ()
    ) -> Generator[None, None, "Bench"]:
        """`of`, giving way to others now and then."""
        context = prompt.context
        answered = yield from _answering(model, [*context, *prompt.question])
        keys, values = (
            pool.flatten(1, 2)[:, : len(context)].clone() for pool in (answered.kv.keys, answered.kv.values)
        )
        whole = stitch([Passage(context, keys, values, 0)], model.rope)
        cached = {place: _PASSAGES[place](model, prompt) for place in _PASSAGES if place in places}
        forced = torch.tensor([*prompt.question, *answered.token_ids[:-1]], device=model.device)
        question = torch.tensor(prompt.question, device=model.device)
        return cls(model, question, forced, answered.logits, whole, cached)

    def compare(self, case: Case) -> tuple[float, float]:
        """KL from full prefill, and the share of tokens whose likeliest one is the same."""
        logits = extend(self.model, self._context(case), self.forced, len(self.full_logits))
        wanted, got = self.full_logits.log_softmax(-1), logits.log_softmax(-1)
        kl = (wanted.exp() * (wanted - got)).sum(-1).mean()
        return float(kl), float((wanted.argmax(-1) == got.argmax(-1)).float().mean())

    def _context(self, case: Case) -> Context:
        if case.cached == "in_place":
            keys, values = _coded(self.model, case.codec, self.whole.keys, self.whole.values, 0)
            return replace(self.whole, keys=keys, values=values)
        passages = list(self.cached[case.cached])
        if case.codec != "raw":
            coded = [_coded(self.model, case.codec, one.keys, one.values, one.position) for one in passages]
            passages = [one._replace(keys=kv.keys, values=kv.values) for one, kv in zip(passages, coded, strict=True)]
        if case.method == "none":
            passages = _where_they_stand(passages)
        context = stitch(passages, self.model.rope)
        if case.method in METHODS:
            return fuse(self.model, context, self.question, METHODS[case.method], case.recompute_fraction)
        return context


class _Answered(NamedTuple):
    """What full prefill said, by the engine's own forward pass."""

    logits: Tensor
    """[answer tokens, vocabulary]: what chose each token."""
    token_ids: list[int]
    kv: KvTensors
    """Of prompt and answer, in blocks 0, 1, ..."""


def _answering(model: LlamaModel, prompt: Sequence[int]) -> Generator[None, None, _Answered]:
    """The greedy answer of full prefill."""
    blocks = list(range(-(-(len(prompt) + ANSWER_TOKENS_MAX) // _BLOCK_SIZE)))
    kv = KvTensors(model.config, len(blocks), _BLOCK_SIZE, model.dtype, model.device)
    rows = []
    for start in range(0, len(prompt), _STEP_TOKENS):
        rows = [model.forward([Segment(prompt[start : start + _STEP_TOKENS], start, blocks)], kv)]
        yield
    answer = [int(rows[-1].argmax())]
    while len(answer) < ANSWER_TOKENS_MAX and answer[-1] not in model.config.eos_token_ids:
        rows.append(model.forward([Segment(answer[-1:], len(prompt) + len(answer) - 1, blocks)], kv))
        answer.append(int(rows[-1].argmax()))
        yield
    return _Answered(torch.cat(rows), answer, kv)


def computed(model: LlamaModel, before: Sequence[Passage], token_ids: Sequence[int]) -> Passage:
    """The KV of `token_ids` behind others, as it would have been cached."""
    config, position = model.config, sum(len(one.token_ids) for one in before)
    shape = (config.layers, len(token_ids), config.kv_heads, config.head_dim)
    empty = torch.zeros(shape, dtype=model.dtype, device=model.device)
    context = stitch([*before, Passage(token_ids, empty, empty, position)], model.rope)
    recompute(model, context, torch.arange(position, len(context), device=model.device))
    return Passage(token_ids, context.keys[:, position:], context.values[:, position:], position)


def _behind_the_system_prompt(model: LlamaModel, prompt: Prompt) -> list[Passage]:
    system = computed(model, [], prompt.system)._replace(exact=True)
    passages = [computed(model, [system], token_ids) for token_ids in prompt.passages]
    return [system, passages[0]._replace(exact=True), *passages[1:]]


def _alone(model: LlamaModel, prompt: Prompt) -> list[Passage]:
    passages = [computed(model, [], token_ids)._replace(alone=True) for token_ids in prompt.passages]
    return [computed(model, [], prompt.system)._replace(exact=True), *passages]


def _in_context(model: LlamaModel, prompt: Prompt) -> list[Passage]:
    return _behind_others(model, prompt, 1)


def _of_means(model: LlamaModel, prompt: Prompt) -> list[Passage]:
    return _behind_others(model, prompt, CONTEXTS)


def _behind_others(model: LlamaModel, prompt: Prompt, contexts: int) -> list[Passage]:
    system = computed(model, [], prompt.system)._replace(exact=True)
    first = computed(model, [system], prompt.passages[0])._replace(exact=True)
    befores = [[system, computed(model, [system], other)] for other in prompt.others[:contexts]] or [[system]]
    passages = []
    for token_ids in prompt.passages[1:]:
        copies = [computed(model, before, token_ids) for before in befores]
        passages.append(_averaged(model, copies))
    return [system, first, *passages]


def _averaged(model: LlamaModel, copies: Sequence[Passage]) -> Passage:
    """As a worker has it that finds the mean in a pool."""
    own, mean = copies[0], MeanKv.of(copies[0].keys, copies[0].values, copies[0].position, model.rope)
    for copy in copies[1:]:
        mean = mean.joined(MeanKv.of(copy.keys, copy.values, copy.position, model.rope))
    if mean.contexts == 1:
        return own
    dtype = own.keys.dtype
    return own._replace(keys=mean.keys_at(own.position, model.rope).to(dtype), values=mean.values.to(dtype))


_PASSAGES: Mapping[str, Callable[[LlamaModel, Prompt], list[Passage]]] = {
    "after_system": _behind_the_system_prompt,
    "alone": _alone,
    "in_context": _in_context,
    "mean": _of_means,
}


def _coded(model: LlamaModel, codec: str, keys: Tensor, values: Tensor, position: int) -> LayerKv:
    """Keys and values [L, n, K, D] as a codec brings them back, to where they were."""
    decoded = []
    for layer in range(model.layers):
        origin = Origin(layer, position)
        payload, facts = CODECS[codec].encode(LayerKv(keys[layer], values[layer]), origin, model.rope)
        decoded.append(CODECS[codec].decode(payload, facts, position, model.rope))
    return LayerKv(*(torch.stack(part).to(model.device) for part in zip(*decoded, strict=True)))


def _where_they_stand(passages: Sequence[Passage]) -> list[Passage]:
    """Passages that claim to have been computed where they are used: their keys stay as they are."""
    placed, start = [], 0
    for passage in passages:
        placed.append(passage._replace(position=start))
        start += len(passage.token_ids)
    return placed


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

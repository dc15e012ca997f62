"""Checking reused KV in production: some answers that started from quantized, rotated or fused KV are computed again
from exact KV while the engine is idle, and the logits that chose their first tokens are compared.

The engine's thread calls everything here. While an answer is drawn for the check, its logits are kept (`observe`); when
it has ended it waits until the engine has nothing else to do, and is then computed in pieces of a step's length
(`step`), into memory of its own: the cache neither helps nor notices.
"""

import logging
import random
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workers.kv_quality import Approximation, QualityJournal, QualitySample
from workers.reference.model import KvTensors, LlamaModel, Segment

logger = logging.getLogger(__name__)

_BLOCK_SIZE = 16
_KL_MAX = 100.0


@dataclass(frozen=True, slots=True)
class GuardOptions:
    share: float = 0.005
    """Of the answers that started from KV that is not exact."""
    answer_tokens_max: int = 24
    prompt_tokens_max: int = 8192
    """Longer prompts are not checked: their KV is computed in memory beside the cache."""
    answers_max: int = 4
    """Being drawn or waiting; each keeps its logits."""
    step_tokens: int = 512
    """How long an arriving request waits at worst: as for a step of the engine."""


@dataclass(slots=True, eq=False)
class _Answer:
    prompt: Sequence[int]
    used: Approximation
    token_ids: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    """[vocabulary] fp32 each, in host memory: what chose each token."""


class Guard:
    """See the module's opening. `draw` gives numbers from 0 to 1."""

    def __init__(
        self,
        model: LlamaModel,
        journal: QualityJournal,
        options: GuardOptions | None = None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._model = model
        self._journal = journal
        self._options = options or GuardOptions()
        self._draw = draw
        self._watched: dict[str, _Answer] = {}
        self._waiting: deque[_Answer] = deque()
        self._checking: tuple[_Answer, Generator[None, None, Tensor]] | None = None

    @property
    def has_work(self) -> bool:
        """Whether an idle engine has something to compute."""
        return bool(self._waiting) or self._checking is not None

    def consider(self, request_id: str, prompt: Sequence[int], used: Approximation) -> None:
        """An answer is about to begin, from KV that is not exact: draw whether it will be checked."""
        if self._draw() >= self._options.share:
            return
        held = len(self._watched) + len(self._waiting) + (self._checking is not None)
        if held >= self._options.answers_max or len(prompt) > self._options.prompt_tokens_max:
            self._journal.skip()
            return
        self._watched[request_id] = _Answer(tuple(prompt), used)

    def observe(self, request_id: str, token_id: int, logits: Tensor) -> None:
        """An answer's next token, and the logits [vocabulary] that chose it. Others than drawn ones are ignored."""
        answer = self._watched.get(request_id)
        if answer is not None and len(answer.token_ids) < self._options.answer_tokens_max:
            answer.token_ids.append(token_id)
            answer.logits.append(logits.detach().to("cpu", torch.float32, copy=True))

    def close(self, request_id: str) -> None:
        """An answer has ended, whoever ended it."""
        answer = self._watched.pop(request_id, None)
        if answer is not None and answer.token_ids:
            self._waiting.append(answer)

    def step(self) -> None:
        """One piece of the work that waits."""
        if self._checking is None:
            answer = self._waiting.popleft()
            exact = exact_logits(self._model, answer.prompt, answer.token_ids, self._options.step_tokens)
            self._checking = answer, exact
        answer, exact = self._checking
        try:
            next(exact)
        except StopIteration as ended:
            self._checking = None
            kl, top1 = divergence(ended.value.cpu(), torch.stack(answer.logits))
            self._journal.record(QualitySample(answer.used, kl, top1))
        except Exception:
            # Memory, most likely. The engine must not stop, and forget all it holds, for a check.
            self._checking = None
            self._journal.skip()
            logger.exception("an answer could not be checked")


def exact_logits(
    model: LlamaModel, prompt: Sequence[int], answer: Sequence[int], step_tokens: int
) -> Generator[None, None, Tensor]:
    """Logits [len(answer), vocabulary] of full prefill, the answer forced upon it. Gives way after each step."""
    before, last = prompt[:-1], [prompt[-1], *answer[:-1]]
    blocks = range(-(-(len(prompt) + len(answer)) // _BLOCK_SIZE))
    kv = KvTensors(model.config, len(blocks), _BLOCK_SIZE, model.dtype, model.device)
    for start in range(0, len(before), step_tokens):
        model.forward([Segment(before[start : start + step_tokens], start, blocks)], kv)
        yield
    return model.forward([Segment(last, len(before), blocks, all_logits=True)], kv)


def divergence(exact: Tensor, got: Tensor) -> tuple[float, float]:
    """Mean KL(exact || got) over rows of logits, and the share of rows whose largest logit is the same.

    Logits that are no numbers are as far off as can be.
    """
    wanted, found = exact.float().log_softmax(-1), got.float().log_softmax(-1)
    kl = (wanted.exp() * (wanted - found)).sum(-1).nan_to_num(_KL_MAX, _KL_MAX, _KL_MAX).clamp_max(_KL_MAX)
    return float(kl.mean()), float((wanted.argmax(-1) == found.argmax(-1)).float().mean())

"""Do we name the prompts the worker computes?

Asked in three ways, since each is blind to something:

* probe prompts, when a life begins: token for token, by the worker's own rendering (`prove`);
* the `usage.prompt_tokens` of every answer: it finds what is truncated or rendered otherwise, for nothing (`observe`);
* now and then a real prompt, token for token (`Scrutiny`): it finds what is as long and not the
  same, and workers whose answers count nothing.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cachecore.prompts.contract import PromptError, Renderer
from gateway.fleet.engines.contract import EngineAdapter
from gateway.fleet.engines.questions import Questions
from gateway.fleet.worker import ModelPool, Parity, WorkerRecord

logger = logging.getLogger("ropeway.parity")

ANSWERS_REMEMBERED = 64
MISMATCHES_MAX = 3
"""Of the answers remembered, those whose prompt was longer or shorter than we said, before a worker loses its affinity.
Not in a row: an engine may render tools alone otherwise, or truncate long prompts alone."""
SAMPLED_EVERY = 16
"""Answers between two prompts that are compared token for token."""
_ANSWERS_MASK = (1 << ANSWERS_REMEMBERED) - 1

# What templates and tokenizers get wrong first: a system prompt to merge, turns, white space, letters beyond ASCII,
# tools and calls of them. The last shows what surrounds a prompt that is no chat.
PROBES: Sequence[Mapping[str, Any]] = (
    {"messages": [{"role": "user", "content": "Hello, who are you?"}]},
    {
        "messages": [
            {"role": "system", "content": "Answer briefly.\n"},
            {"role": "user", "content": "  Größe = 12,50 € \t 数 🙂  "},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "def f(x):\n    return x ** 2\n"},
        ]
    },
    {
        "messages": [{"role": "user", "content": "What is the weather in Zürich?"}],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "weather",
                    "description": "Of a place, now",
                    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
                },
            }
        ],
    },
    {"prompt": "Once upon a time, 1234 years ago:\n\n  Größe 数 🙂"},
)


class Verdict(NamedTuple):
    parity: Parity
    reason: str = ""
    tokenizes: bool = False
    """Whether the worker tells token ids of chats."""


async def prove(adapter: EngineAdapter, ask: Questions, pool: ModelPool) -> Verdict:
    """Compare our token ids of the probe prompts with a worker's. Raises ProbeError."""
    compared_chats = compared = 0
    for position, probe in enumerate(PROBES):
        theirs = await adapter.tokenize(ask, {"model": pool.model, **probe})
        if theirs is None:
            # Its template may refuse what this one says, as templates do; or it cannot tell.
            continue
        found = _compare_probe(pool, position, theirs)
        if found:
            return Verdict(Parity.FAILED, found, True)
        compared += 1
        compared_chats += "messages" in probe
    if compared_chats:
        return Verdict(Parity.PROVEN, "", True)
    return Verdict(Parity.UNVERIFIED, "it does not render chats for us" if compared else "no /tokenize")


def _compare_probe(pool: ModelPool, position: int, theirs: Sequence[int]) -> str:
    """Where prompts are named by whichever worker is asked, all must say the same as the first."""
    if pool.renderer is not None:
        return compare(pool.renderer, PROBES[position], theirs)
    return difference(pool.probe_tokens.setdefault(position, list(theirs)), theirs, "at the first worker")


def rendered_tokens(renderer: Renderer, request: Mapping[str, Any]) -> list[int]:
    """Our token ids of a chat, or of a plain prompt. Raises PromptError."""
    rendered = renderer.chat(request) if "messages" in request else renderer.text(str(request.get("prompt")))
    return [token for segment in rendered.segments for token in renderer.encode(segment)]


def compare(renderer: Renderer, request: Mapping[str, Any], theirs: Sequence[int], what: str = "a probe prompt") -> str:
    """What differs between our token ids and the worker's; empty when nothing does."""
    try:
        ours = rendered_tokens(renderer, request)
    except PromptError as error:
        return f"our template refuses {what}: {error}"
    return difference(ours, theirs, "here", what)


def difference(ours: Sequence[int], theirs: Sequence[int], where: str, what: str = "a probe prompt") -> str:
    """In words; empty where there is none. `where`: who says `ours`."""
    for position, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            return f"token {position} of {what} is {mine} {where} and {other} at the worker"
    if len(ours) != len(theirs):
        return f"{what} has {len(ours)} tokens {where} and {len(theirs)} at the worker"
    return ""


def settle(record: WorkerRecord, parity: Parity, reason: str = "") -> None:
    """Note the outcome, aloud where it costs the worker its affinity, or gives it back."""
    if parity is Parity.FAILED and record.parity is not Parity.FAILED:
        logger.warning("worker %s gets no affinity: %s", record.name, reason)
    elif record.parity is Parity.FAILED and parity is not Parity.FAILED:
        logger.info("worker %s tokenizes as we do again", record.name)
    record.parity = parity
    record.parity_reason = reason
    record.parity_answers = 0
    record.parity_matches_in_a_row = 0


def observe(record: WorkerRecord, counted_tokens: int, reported_tokens: int) -> None:
    """Compare an answer's `usage.prompt_tokens` with our count."""
    if counted_tokens == reported_tokens:
        record.parity_matches_in_a_row += 1
        record.parity_answers = record.parity_answers << 1 & _ANSWERS_MASK
        return
    record.parity_matches_in_a_row = 0
    answers = record.parity_answers = (record.parity_answers << 1 | 1) & _ANSWERS_MASK
    mismatches = answers.bit_count()
    if mismatches >= MISMATCHES_MAX and record.parity is not Parity.FAILED:
        settle(
            record,
            Parity.FAILED,
            f"{mismatches} of its last {ANSWERS_REMEMBERED} prompts were counted differently, the last "
            f"{counted_tokens} tokens here and {reported_tokens} at the worker",
        )

"""Do we name the prompts the worker computes? Asked once at registration, and of every answer after that."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from cachecore.prompts.contract import PromptError, Renderer
from gateway.fleet.worker import Parity, WorkerRecord

logger = logging.getLogger("ropeway.parity")

MISMATCHES_MAX = 3
"""Answers in a row whose prompt was longer or shorter than we said, before a worker loses its affinity."""

# What templates and tokenizers get wrong first: a system prompt to merge, turns, white space, letters beyond ASCII.
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
)


def rendered_tokens(renderer: Renderer, request: Mapping[str, Any]) -> list[int]:
    """Our token ids of a chat request. Raises PromptError."""
    rendered = renderer.chat(request)
    return [token for segment in rendered.segments for token in renderer.encode(segment)]


def compare(renderer: Renderer, request: Mapping[str, Any], theirs: Sequence[int]) -> str:
    """What differs between our token ids and the worker's; empty when nothing does."""
    try:
        ours = rendered_tokens(renderer, request)
    except PromptError as error:
        return f"our template refuses a probe prompt: {error}"
    for position, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            return f"token {position} of a probe prompt is {mine} here and {other} at the worker"
    if len(ours) != len(theirs):
        return f"a probe prompt has {len(ours)} tokens here and {len(theirs)} at the worker"
    return ""


def settle(record: WorkerRecord, parity: Parity, reason: str = "") -> None:
    """Note the outcome, aloud where it costs the worker its affinity."""
    if parity is Parity.FAILED and record.parity is not Parity.FAILED:
        logger.warning("worker %s gets no affinity: %s", record.name, reason)
    record.parity = parity
    record.parity_reason = reason
    record.parity_mismatches = 0


def observe(record: WorkerRecord, counted_tokens: int, reported_tokens: int) -> None:
    """Compare an answer's `usage.prompt_tokens` with our count."""
    if counted_tokens == reported_tokens:
        record.parity_matches += 1
        record.parity_mismatches = 0
        return
    record.parity_mismatches += 1
    if record.parity_mismatches >= MISMATCHES_MAX and record.parity is not Parity.FAILED:
        settle(
            record,
            Parity.FAILED,
            f"{MISMATCHES_MAX} prompts in a row were counted differently, the last {counted_tokens} tokens here and "
            f"{reported_tokens} at the worker",
        )

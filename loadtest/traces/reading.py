"""Read a trace, whatever wrote it: `read_trace`."""

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cachecore.prompts.contract import Renderer
from loadtest.traces.agents import BFCL, SWE_AGENT, TAU_BENCH
from loadtest.traces.aiperf import AIPERF, AIPERF_EXPORT, AIPERF_INPUTS, AIPERF_TEXTS
from loadtest.traces.bodies import OPENAI_BATCH, REQUEST_LOG
from loadtest.traces.building import ambiguous_names, assembled, chain_names
from loadtest.traces.contract import Trace, TraceError
from loadtest.traces.health import health_notes
from loadtest.traces.lengths import AZURE, BURSTGPT, VIDUR, VIDUR_LENGTHS
from loadtest.traces.llmservingsim import LLMSERVINGSIM
from loadtest.traces.mooncake import MOONCAKE, MOONCAKE_SECONDS
from loadtest.traces.otel import OTEL
from loadtest.traces.parsing import Format, Parsed, ReadOptions, Sample, sample
from loadtest.traces.plaintext import SONNET, TEXT
from loadtest.traces.prompts import AIBRIX, GUIDELLM, LLM_D_SIM, VLLM_CUSTOM
from loadtest.traces.qwen import QWEN_BAILIAN
from loadtest.traces.refusals import REFUSALS
from loadtest.traces.rows import Progress
from loadtest.traces.servegen import SERVEGEN, SERVEGEN_LENGTHS
from loadtest.traces.sharegpt import FASTCHAT_QUESTIONS, SHAREGPT
from loadtest.traces.weka import WEKA

FORMATS: Sequence[Format] = (
    MOONCAKE,
    MOONCAKE_SECONDS,
    QWEN_BAILIAN,
    AIPERF,
    WEKA,
    AZURE,
    BURSTGPT,
    VIDUR,
    VIDUR_LENGTHS,
    SERVEGEN,
    SERVEGEN_LENGTHS,
    LLMSERVINGSIM,
    OPENAI_BATCH,
    SHAREGPT,
    FASTCHAT_QUESTIONS,
    OTEL,
    SWE_AGENT,
    TAU_BENCH,
    BFCL,
    AIBRIX,
    GUIDELLM,
    VLLM_CUSTOM,
    LLM_D_SIM,
    AIPERF_INPUTS,
    AIPERF_EXPORT,
    AIPERF_TEXTS,
    REQUEST_LOG,
    SONNET,
    TEXT,
)
"""In the order in which they are tried; the first that recognises a file reads it."""

BLOCK_SIZE_MAX = 65_536
"""As of names anywhere."""

FORMATS_BY_NAME: Mapping[str, Format] = {one.name: one for one in FORMATS}


def read_trace(
    path: str | Path,
    format: str | None = None,
    block_size_tokens: int | None = None,
    *,
    renderer: Renderer | None = None,
    rate: float = 1.0,
    seed: int = 0,
    output_tokens: int = 128,
    think_seconds: float = 1.0,
    progress: Progress | None = None,
) -> Trace:
    """The trace in a file, its arrival times as they are (`arrivals.dequantised` takes them off a grid).

    `format` is one of FORMATS_BY_NAME; without it the content tells. For the other arguments see `ReadOptions`.
    Raises TraceError, which names the file, the format and, where there is one, the line.
    """
    if not 1 <= (block_size_tokens or 1) <= BLOCK_SIZE_MAX:
        raise TraceError(f"a block has 1 to {BLOCK_SIZE_MAX} tokens, not {block_size_tokens}")
    if not rate > 0.0 or output_tokens < 0 or think_seconds < 0.0:
        raise TraceError("a rate must be above 0, output_tokens and think_seconds not below")
    source = Path(path)
    options = ReadOptions(block_size_tokens, renderer, rate, seed, output_tokens, think_seconds, progress)
    try:
        chosen = _named(format, source) if format is not None else detect(source)
        parsed = chosen.read(source, options)
    except OSError as error:
        raise TraceError(f"{source}: {error.strerror or error}") from error
    except csv.Error as error:
        raise TraceError(f"{source}: no CSV: {error}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{source}: not UTF-8: {error}") from error
    return _finished(source, chosen, parsed)


def detect(path: Path) -> Format:
    """The format of a file by its content. Raises TraceError, OSError."""
    if path.is_dir():
        raise TraceError(f"{path}: a directory; a trace is one file")
    beginning = sample(path)
    for one in FORMATS:
        if _recognised(one.matches, beginning):
            return one
    for refusal in REFUSALS:
        if _recognised(refusal.matches, beginning):
            raise TraceError(f"{path}: {refusal.format}: {refusal.reason}")
    raise TraceError(f"{path}: {_description(beginning)} of no known format; known are {', '.join(FORMATS_BY_NAME)}")


def _recognised(matches: Callable[[Sample], bool], beginning: Sample) -> bool:
    """Where a value is of another kind than a format has there, it is not that format."""
    try:
        return matches(beginning)
    except (TypeError, KeyError, AttributeError, IndexError):
        return False


def _named(name: str, path: Path) -> Format:
    one = FORMATS_BY_NAME.get(name)
    if one is None:
        raise TraceError(f"{path}: no format {name!r}; known are {', '.join(FORMATS_BY_NAME)}")
    return one


def _description(beginning: Sample) -> str:
    if beginning.keys:
        return f"JSON with the keys {', '.join(sorted(map(str, beginning.keys))[:12])}"
    if beginning.row is not None:
        return "JSON"
    if not beginning.text.strip():
        return "an empty file"
    return f"text that begins with {beginning.text[:60]!r}"


def _finished(path: Path, chosen: Format, parsed: Parsed) -> Trace:
    if not parsed.drafts:
        raise TraceError(f"{path}: no requests in it; read as {chosen.name}")
    notes = list(parsed.notes)
    if parsed.names_are_ids and (count := ambiguous_names(parsed.drafts)):
        chain_names(parsed.drafts)
        notes.append(f"{count} ids stand after different ids: they name texts, so names were chained")
    requests = assembled(parsed.drafts)
    notes += health_notes(requests, parsed.block_size_tokens)
    return Trace(path.name, chosen.name, parsed.block_size_tokens, requests, tuple(notes))

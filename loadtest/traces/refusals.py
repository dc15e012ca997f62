"""Files that are known and hold no requests: what they are, and what to do with them."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from loadtest.traces.parsing import Sample


class Refusal(NamedTuple):
    format: str
    matches: Callable[[Sample], bool]
    reason: str


def _has_statistics(sample: Sample) -> bool:
    statistics = sample.keys.get("input_sequence_length")
    return isinstance(statistics, Mapping) and "mean" in statistics and "number_of_turns" in sample.keys


def _configures_tokens(sample: Sample) -> bool:
    keys = sample.keys.keys()
    special = sum(key.endswith("_token") for key in keys)
    return "added_tokens_decoder" in keys or "tokenizer_class" in keys or (special > 0 and special == len(keys))


REFUSALS: Sequence[Refusal] = (
    Refusal(
        "an AIPerf summary (profile_export_aiperf.json)",
        lambda sample: sample.has("request_throughput", "request_latency"),
        "it holds a finished run's figures; profile_export.jsonl beside it holds its requests",
    ),
    Refusal(
        "statistics of an inference-perf workload",
        _has_statistics,
        "they describe requests and hold none; the OpenTelemetry traces they were made from can be read",
    ),
    Refusal(
        "BFCL tool schemas",
        lambda sample: sample.has("name", "description", "parameters") and "id" not in sample.keys,
        "they are read along with BFCL questions that lie beside their folder",
    ),
    Refusal(
        "tau2-bench tasks",
        lambda sample: sample.has("id", "user_scenario"),
        "they say what a user wants and hold no messages; results of a run (tau-bench form) can be read",
    ),
    Refusal(
        "documents (tau2-bench, RAG)",
        lambda sample: sample.has("id", "title", "content"),
        "they are what prompts are made of, not requests; the workload `rag` asks about documents",
    ),
    Refusal(
        "a tokenizer (tokenizer.json)",
        lambda sample: isinstance(sample.keys.get("model"), Mapping) and "added_tokens" in sample.keys,
        "it counts other files' tokens: hand it in as the tokenizer",
    ),
    Refusal(
        "a Hugging Face tokenizer's configuration",
        _configures_tokens,
        "hand its directory in as the tokenizer",
    ),
    Refusal(
        "a Hugging Face model's configuration",
        lambda sample: sample.has("model_type", "architectures"),
        "it holds no requests",
    ),
    Refusal(
        "a Markdown document",
        lambda sample: not sample.keys and (sample.suffix == ".md" or sample.text.startswith("# ")),
        "it holds no requests; with the format `text` it is one prompt",
    ),
)

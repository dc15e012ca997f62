"""What a vLLM configuration says that matters here, and what of it the connector cannot serve.

Nothing of vLLM is imported: its configuration is an object with attributes, and the tests have their own.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachecore.prompts.huggingface import HuggingFaceRenderer
from workers.vllm.classes import Checkpoint
from workers.vllm.settings import Settings, SettingsError, read_settings

_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Facts:
    settings: Settings
    checkpoint: Checkpoint
    tokenizer_fingerprint: str
    """As the gateway has it; empty where it has no tokenizer."""
    model: str
    """As the gateway calls it."""
    block_size_tokens: int
    rank: int
    """Among data parallel ones."""
    kv_events: Mapping[str, Any] | None
    """As `/server_info` shows it."""


Snapshot = Callable[[str, str | None], str]
"""Where on this machine the files of a published model and revision are. Raises whatever it likes."""


def read_facts(config: Any, snapshot: Snapshot) -> Facts:
    """Of a `vllm.config.VllmConfig`. Raises SettingsError for what the connector does not serve."""
    transfer, model, cache = config.kv_transfer_config, config.model_config, config.cache_config
    settings = read_settings(transfer.kv_connector_extra_config, transfer.kv_load_failure_policy)
    _refuse_unsupported(config)
    rank = int(config.parallel_config.data_parallel_index)
    directory = _directory(model.model, model.revision, snapshot)
    checkpoint = Checkpoint(directory, model.hf_config.to_dict(), model.dtype, int(model.max_model_len))
    return Facts(
        settings.of_rank(rank),
        checkpoint,
        _fingerprint(settings.tokenizer, model.tokenizer, directory),
        settings.model or _first(model.served_model_name) or str(model.model),
        int(cache.block_size),
        rank,
        _events(config.kv_events_config, int(cache.block_size), int(config.parallel_config.data_parallel_size)),
    )


def in_layer_order(names: Sequence[str]) -> list[str]:
    """Names of attention layers (`model.layers.3.self_attn.attn`), by the layer's number. Raises SettingsError."""
    numbers = {name: int(found[1]) for name in names if (found := _LAYER.search(name))}
    if sorted(numbers.values()) != list(range(len(names))):
        raise SettingsError(f"KV that is not one tensor for each layer is not supported: {', '.join(names)[:200]}")
    return sorted(names, key=numbers.__getitem__)


def _refuse_unsupported(config: Any) -> None:
    parallel, cache = config.parallel_config, config.cache_config
    for is_so, what in (
        (parallel.tensor_parallel_size > 1, "tensor parallelism"),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism"),
        (config.scheduler_config.async_scheduling, "asynchronous scheduling (start it with --no-async-scheduling)"),
        (cache.cache_dtype not in ("auto", "float32", "bfloat16", "float16"), f"KV dtype {cache.cache_dtype}"),
        (not cache.enable_prefix_caching, "serving without --enable-prefix-caching"),
        (config.speculative_config is not None, "speculative decoding"),
    ):
        if is_so:
            raise SettingsError(f"{what} is not supported by this connector")


def _directory(model: str, revision: str | None, snapshot: Snapshot) -> Path:
    path = Path(model)
    if path.is_dir():
        return path
    try:
        return Path(snapshot(model, revision))
    except Exception as error:
        raise SettingsError(f"the files of {model!r} are not on this machine: {error}") from error


def _fingerprint(wanted: str, engine: str | None, directory: Path) -> str:
    """`wanted` is what is configured, `engine` vLLM's own: a directory, or the name of what `directory` holds."""
    if wanted == "none":
        return ""
    path = Path(wanted or engine or directory)
    try:
        return HuggingFaceRenderer.load(path if wanted or path.is_dir() else directory).fingerprint
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _first(names: str | Sequence[str] | None) -> str:
    return names if isinstance(names, str) else str(names[0]) if names else ""


def _events(events: Any, block_size_tokens: int, ranks: int) -> Mapping[str, Any] | None:
    if events is None or not events.enable_kv_cache_events:
        return None
    said = {name: getattr(events, name) for name in ("publisher", "endpoint", "replay_endpoint", "topic")}
    return {**said, "block_size": block_size_tokens, "dp_size": ranks}

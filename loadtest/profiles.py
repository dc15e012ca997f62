"""From a model, a GPU and a degree of tensor parallelism to a timing profile.

    prefill   constant + tokens * FLOP/token / reach + pairs * FLOP/pair / reach      reach = ranks * peak * share
    decode    weights read / (ranks * bandwidth * .5) + context * KV bytes / (ranks * bandwidth * .7)
    memory    ranks * memory * .9 - weights, divided by KV bytes a token

A roofline with three measured shares. It leaves out what a prefill reads (large chunks compute longer than they read)
and what ranks exchange over NVLink (it is within the share of peak); over PCIe that exchange is added. Weights that a
mixture of experts reads in a decode step depend on the batch; the profile takes `DECODE_BATCH`.
"""

from functools import cache

from loadtest.hardware import Gpu, Hardware, hardware_of
from loadtest.models import Model, model_named
from workers.timing import LLAMA_3_8B, LLAMA_3_70B_TP8, TimingProfile

STEP_SECONDS = 0.004
"""Scheduling and launching one step."""
WEIGHTS_SHARE = 0.5
"""Of memory bandwidth that reading weights reaches in a decode step."""
KV_SHARE = 0.7
"""... and reading KV."""
MEMORY_SHARE = 0.9
"""Of a GPU's memory that engines take by default."""
DECODE_BATCH = 32
KV_MEMORY_SHARE_MIN = 0.05
"""Of the memory taken; a model that leaves less for KV does not fit."""
RANKS_MAX = 8
"""GPUs in one machine, where nothing else is said."""
_REDUCTIONS_PER_LAYER = 2
_ACTIVATION_BYTES = 2

KNOWN = {("llama-3-70b", "h100", 8): LLAMA_3_70B_TP8, ("llama-3-8b", "h100", 1): LLAMA_3_8B}
"""Written by hand before there was a formula. Published tables were made with them, so they stay what their names mean;
the formula comes within 7 % (tests/loadtest/test_profiles.py)."""


@cache
def profile_for(model: str, gpu: str, tensor_parallel: int | None = None) -> TimingProfile:
    """The profile of one engine. `gpu` may be a machine, which then has to hold it.

    Raises ValueError for an unknown name, and where the model does not fit.
    """
    shape, hardware = model_named(model), hardware_of(gpu)
    ranks = tensor_parallel or ranks_for(shape, hardware)
    known = KNOWN.get((shape.name, hardware.gpu.name, ranks))
    return known or derive(shape, hardware.gpu, ranks)


def ranks_for(model: Model, hardware: Hardware) -> int:
    """The model's usual degree, doubled until it fits, as far as a machine has GPUs."""
    most = hardware.gpus or RANKS_MAX
    ranks = min(model.tensor_parallel, most)
    while 2 * ranks <= most and not _fits(model, hardware.gpu, ranks):
        ranks *= 2
    return ranks


def derive(model: Model, gpu: Gpu, ranks: int) -> TimingProfile:
    """See the module's opening. Raises ValueError where the model does not fit."""
    if ranks < 1:
        raise ValueError(f"tensor parallelism is 1 or more, not {ranks}")
    if not _fits(model, gpu, ranks):
        needed = model.weight_bytes / (1 - KV_MEMORY_SHARE_MIN) / MEMORY_SHARE
        raise ValueError(
            f"{model.name} does not fit on {ranks} x {gpu.name}: weights and some KV need "
            f"{needed / 1e9:,.0f} GB, there are {ranks * gpu.memory_bytes / 1e9:,.0f}"
        )
    reach = ranks * gpu.flops(model.precision) * gpu.prefill_share
    bandwidth = ranks * gpu.memory_bytes_per_second
    return TimingProfile(
        name=f"{model.name}-{gpu.name}-tp{ranks}",
        source=f"derived (loadtest/profiles.py). {model.source}. {gpu.source}",
        prefill_constant_seconds=STEP_SECONDS,
        prefill_linear_seconds=model.flops_per_token / reach + _exchange_seconds(model, gpu, ranks),
        prefill_pair_seconds=model.flops_per_pair / reach,
        decode_constant_seconds=model.weight_bytes_read(DECODE_BATCH) / (bandwidth * WEIGHTS_SHARE),
        decode_context_seconds=_kv_bytes_per_rank(model, ranks) / (gpu.memory_bytes_per_second * KV_SHARE),
        kv_tokens=int(_kv_memory_bytes(model, gpu, ranks) / (ranks * _kv_bytes_per_rank(model, ranks))),
        kv_bytes_per_token=model.kv_bytes_per_token,
    )


def _kv_bytes_per_rank(model: Model, ranks: int) -> float:
    return model.kv_bytes_per_token / min(ranks, model.kv_heads)


def _kv_memory_bytes(model: Model, gpu: Gpu, ranks: int) -> float:
    return ranks * gpu.memory_bytes * MEMORY_SHARE - model.weight_bytes


def _fits(model: Model, gpu: Gpu, ranks: int) -> bool:
    return _kv_memory_bytes(model, gpu, ranks) >= KV_MEMORY_SHARE_MIN * ranks * gpu.memory_bytes * MEMORY_SHARE


def _exchange_seconds(model: Model, gpu: Gpu, ranks: int) -> float:
    """Of the two all-reduces a layer, per token: each rank sends and receives 2 (ranks - 1) / ranks of a vector."""
    if gpu.peer_bytes_per_second is None:
        return 0.0
    layers = model.layers + model.layers_windowed
    size = _REDUCTIONS_PER_LAYER * layers * model.hidden * _ACTIVATION_BYTES
    return size * 2 * (ranks - 1) / ranks / gpu.peer_bytes_per_second

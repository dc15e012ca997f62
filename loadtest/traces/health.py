"""What is odd about a trace, so that nobody mistakes it for a finding."""

from collections.abc import Iterator, Sequence

from cachecore.blocks import HASH_BYTES
from loadtest.traces.arrivals import grid_seconds
from loadtest.traces.contract import NO_PREDECESSOR, TraceRequest

SHARED_BEGINNING_SHARE = 0.9
_GRID_NOTE = "replays spread them over it unless told not to"


def health_notes(requests: Sequence[TraceRequest], block_size_tokens: int) -> list[str]:
    """An arrival grid, duplicated stamps, a beginning that all share, lengths that do not fit their blocks."""
    return [
        *_arrivals([request.arrival_seconds for request in requests if request.follows == NO_PREDECESSOR]),
        *_shared_beginning(requests),
        *_lengths(requests, block_size_tokens),
    ]


def longer_than(requests: Sequence[TraceRequest], cache_tokens: int) -> str | None:
    """What to say of prompts (with their answers) that no cache of this size holds; None where all fit."""
    count = sum(request.input_tokens + request.output_tokens > cache_tokens for request in requests)
    if not count:
        return None
    longest = max(request.input_tokens + request.output_tokens for request in requests)
    return f"{count} requests need more than a worker's {cache_tokens} tokens of KV; the longest needs {longest}"


def _arrivals(arrivals: Sequence[float]) -> Iterator[str]:
    stamps = len(set(arrivals))
    if stamps == len(arrivals) or len(arrivals) < 2:
        return
    if stamps == 1:
        yield f"all {len(arrivals)} requests arrive at once"
        return
    grid = grid_seconds(arrivals)
    if grid:
        yield f"arrivals stand on a grid of {grid:g} s ({stamps} stamps for {len(arrivals)} requests): {_GRID_NOTE}"
    else:
        yield f"{len(arrivals) - stamps} of {len(arrivals)} requests share the stamp of another"


def _shared_beginning(requests: Sequence[TraceRequest]) -> Iterator[str]:
    """Where nearly all begin alike, whoever goes by the longest prefix alone sends all to one worker."""
    firsts = [request.chain[:HASH_BYTES] for request in requests if request.chain]
    if len(firsts) < 2:
        return
    most = max(map(firsts.count, set(firsts[:64])))
    if most >= SHARED_BEGINNING_SHARE * len(requests):
        yield f"{most} of {len(requests)} requests begin with one and the same block"


def _lengths(requests: Sequence[TraceRequest], block_size_tokens: int) -> Iterator[str]:
    beyond = sum((request.blocks - 1) * block_size_tokens >= request.input_tokens for request in requests)
    if beyond:
        yield f"{beyond} requests name more blocks than their length fills"
    unnamed = sum(request.blocks < request.input_tokens // block_size_tokens for request in requests)
    if unnamed:
        yield f"{unnamed} requests are longer than the blocks they name; the rest counts as new each time"
    silent = sum(request.output_tokens == 0 for request in requests)
    if silent:
        yield f"{silent} requests have no output tokens"

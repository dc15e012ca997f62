"""Event streams of engines that could not be run here, made by hand from their public sources.

Each is a story of one engine: messages as it would send them, and what a gateway must know after each. Run as a script
it writes the captures that the tests read:

    .venv/bin/python -m tests.cachecore.handmade
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cachecore.captures import CapturedMessage, CaptureHeader, write_capture

DIRECTORY = Path(__file__).parent / "captures"
PAGE = 4

pack = msgspec.msgpack.encode
Known = dict[str, tuple[int, int, int]]
"""By prompt: the pages that can be reached in the device's memory, the host's as well, and all tiers."""


class Said(NamedTuple):
    """One message, and what is known of each prompt after it."""

    events: Sequence[Any]
    known: Known
    rank: int | None = 0


class Story(NamedTuple):
    topic: str
    note: str
    prompts: dict[str, tuple[list[int], str | None]]
    """Tokens and salt of each prompt that is asked about."""
    messages: Sequence[Said]
    first_sequence: int = 0


def page(number: int) -> list[int]:
    return list(range(1000 + number * PAGE, 1000 + (number + 1) * PAGE))


def pages(*numbers: int) -> list[int]:
    return [token for number in numbers for token in page(number)]


def bigrams(*numbers: int) -> list[list[int]]:
    """As SGLang writes tokens under EAGLE: each with the one after it."""
    tokens = pages(*numbers)
    return [[token, following] for token, following in zip(tokens, [*tokens[1:], 7], strict=True)]


def sglang_stored(hashes: list[int], parent: int | None, tokens: list[Any], medium: str = "GPU", **more: Any) -> Any:
    """SGLang 0.5.21: maps, signed hashes, the salt a key of its own."""
    fields = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens}
    return {**fields, "block_size": PAGE, "lora_id": None, "medium": medium, **more}


def sglang_removed(hashes: list[int], medium: str = "GPU") -> Any:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}


CLEARED = {"type": "AllBlocksCleared"}

SGLANG = Story(
    "kv-events",
    "SGLang 0.5.21 with HiCache, EAGLE in the third message: made by hand from disaggregation/kv_events.py",
    {
        "plain": (pages(1, 2, 3), None),
        "salted": (pages(1, 2), "tenant-a"),
        "eagle": (pages(5, 6), None),
    },
    [
        # It says first that it is empty.
        Said([CLEARED], {"plain": (0, 0, 0)}),
        # After the prefill of a prompt; the store of its second node names the first one's last page.
        Said(
            [sglang_stored([-11, 12], None, pages(1, 2)), sglang_stored([-13], 12, page(3))],
            {"plain": (3, 3, 3), "salted": (0, 0, 0)},
        ),
        Said([sglang_stored([51, -52], None, bigrams(5, 6))], {"eagle": (2, 2, 2)}),
        Said(
            [sglang_stored([-91, 92], None, pages(1, 2), cache_salt="tenant-a", session_id="s-1")],
            {"plain": (3, 3, 3), "salted": (2, 2, 2)},
        ),
        # HiCache: written through to the host, evicted from the device, loaded back.
        Said(
            [
                sglang_stored([-11, 12], None, pages(1, 2), "CPU_PINNED"),
                sglang_stored([-13], 12, page(3), "CPU_PINNED"),
            ],
            {"plain": (3, 3, 3)},
        ),
        # One removal lists a whole node.
        Said([sglang_removed([-11, 12]), sglang_removed([-13])], {"plain": (0, 3, 3), "salted": (2, 2, 2)}),
        Said([sglang_stored([-11, 12], None, pages(1, 2))], {"plain": (2, 3, 3)}),
        # Farther still; the host's copy of the last page goes.
        Said(
            [sglang_stored([-13], 12, page(3), "EXTERNAL"), sglang_removed([-13], "CPU_PINNED")], {"plain": (2, 2, 3)}
        ),
        Said([CLEARED], {"plain": (0, 0, 0), "salted": (0, 0, 0), "eagle": (0, 0, 0)}),
    ],
)

SGLANG_ARRAYS = Story(
    "kv-events",
    "SGLang before 0.5.21, rank 1 of 2: arrays, a metadata map behind the slots, older names of HiCache's tiers",
    {"plain": (pages(1, 2), None), "salted": (pages(1, 2), "tenant-a")},
    [
        Said([["AllBlocksCleared"]], {"plain": (0, 0, 0)}, 1),
        Said([["BlockStored", [-1, 2], None, pages(1, 2), PAGE, None, "GPU"]], {"plain": (2, 2, 2)}, 1),
        Said(
            [["BlockStored", [-3, 4], None, pages(1, 2), PAGE, None, "GPU", {"cache_salt": "tenant-a"}]],
            {"plain": (2, 2, 2), "salted": (2, 2, 2)},
            1,
        ),
        Said([["BlockStored", [-1], None, page(1), PAGE, None, "CPU_TIER1"]], {"plain": (2, 2, 2)}, 1),
        Said([["BlockRemoved", [-1, 2], "GPU"]], {"plain": (0, 1, 1), "salted": (2, 2, 2)}, 1),
        # The slots shifted: salt and session where vLLM has adapter and extra keys.
        Said(
            [["BlockStored", [-5], 4, page(9), PAGE, None, "GPU", "tenant-a", "session"]],
            {"salted": (2, 2, 2)},
            1,
        ),
        Said([["BlockRemoved", [-3, 4, -5], "GPU"]], {"plain": (0, 1, 1), "salted": (0, 0, 0)}, 1),
    ],
)


def vllm_stored(hashes: list[Any], parent: Any, tokens: list[int], medium: str, **more: Any) -> Any:
    """vLLM 0.31 and later: maps, defaults left out."""
    fields = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens}
    return {
        **fields,
        "block_size": PAGE,
        "medium": medium,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        **more,
    }


def vllm_removed(hashes: list[Any], medium: str, **more: Any) -> Any:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, "group_idx": 0, **more}


def digest(number: int) -> bytes:
    """As 32 bytes, of which the last 8 are the number."""
    return bytes(24) + number.to_bytes(8, "big")


LMCACHE = Story(
    "kv@10.0.0.7@model",
    "vLLM with LMCache and its own offloading: host, disk and remote tiers, placeholders, an owner of blocks",
    {"plain": (pages(1, 2, 3), None), "salted": (pages(1, 2), "tenant-a")},
    [
        Said(
            [vllm_stored([1, 2, 3], None, pages(1, 2, 3), "GPU", extra_keys=[None, None, None])], {"plain": (3, 3, 3)}
        ),
        # vLLM's offload tells of a block by its hash alone: nothing can be learned from it.
        Said(
            [vllm_stored([2], None, [], "CPU", block_size=0), vllm_stored([1, 2], None, pages(1, 2), "CPU")],
            {"plain": (3, 3, 3)},
        ),
        Said([vllm_removed([3], "GPU"), vllm_removed([2], "GPU")], {"plain": (1, 2, 2)}),
        # LMCache's remote store: on another machine, whatever its medium is there.
        Said([vllm_stored([3], 2, page(3), "CPU", locality="REMOTE", ownership="lmcache")], {"plain": (1, 2, 3)}),
        # The same handle as a digest; a salted prompt, whose child does not say the salt again.
        Said(
            [
                vllm_stored([digest(21)], None, page(1), "GPU", extra_keys=[["tenant-a"]]),
                vllm_stored([digest(22)], digest(21), page(2), "GPU"),
            ],
            {"plain": (1, 2, 3), "salted": (2, 2, 2)},
        ),
        Said(
            [vllm_stored([21, 22], None, pages(1, 2), "STORAGE", extra_keys=[["tenant-a"], None])],
            {"salted": (2, 2, 2)},
        ),
        Said(
            [vllm_removed([21], "GPU"), vllm_removed([digest(22)], "GPU"), vllm_removed([3], "CPU", locality="REMOTE")],
            {"plain": (1, 2, 2), "salted": (0, 0, 2)},
        ),
        # A tier that is not known here, and a window that says nothing of prefixes.
        Said(
            [
                vllm_stored([4], 3, page(4), "MOON"),
                {**vllm_stored([77], None, page(1), "GPU"), "group_idx": 1, "kv_cache_spec_kind": "sliding_window"},
                {**vllm_removed([1], "GPU"), "group_idx": 1},
            ],
            {"plain": (1, 2, 2)},
        ),
    ],
    first_sequence=40,
)

STORIES = {"sglang-0.5.21-hicache": SGLANG, "sglang-arrays": SGLANG_ARRAYS, "lmcache-offload": LMCACHE}


def messages_of(story: Story) -> list[CapturedMessage]:
    return [
        CapturedMessage(
            float(place), story.topic, story.first_sequence + place, pack([1.78e9 + place, said.events, said.rank])
        )
        for place, said in enumerate(story.messages)
    ]


# ---- TensorRT-LLM, whose events are pulled as JSON -------------------------------------------------------------------


def trtllm_tokens(*numbers: int, cut: int | None = None, extra: int = 0) -> list[dict[str, Any]]:
    return [{"type": "unique_token", "token_id": token, "token_extra_id": extra} for token in pages(*numbers)[:cut]]


def trtllm_block(name: int, tokens: list[dict[str, Any]], level: int = 0) -> dict[str, Any]:
    return {"type": "stored_block", "block_hash": name, "tokens": tokens, "cache_level": level, "priority": 35}


def trtllm_stored(parent: int | None, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {"type": "stored", "parent_hash": parent, "blocks": list(blocks)}


def trtllm_updated(name: int, old: int | None, new: int | None) -> dict[str, Any]:
    levels = None if old is None else {"type": "event_diff", "old_value": old, "new_value": new}
    return {"type": "updated", "block_hash": name, "cache_level": levels, "priority": None}


class Answered(NamedTuple):
    """One answer to a pull: its events, and what is known of the prompt after it."""

    events: Sequence[tuple[int, dict[str, Any]]]
    """Each with its attention window."""
    known: tuple[int, int, int]


FULL, WINDOW = 4096, 128
TRTLLM_PROMPT = pages(1, 2, 3)
TRTLLM = [
    Answered(
        [
            (WINDOW, {"type": "created", "num_blocks_per_cache_level": [64, 0]}),
            (FULL, {"type": "created", "num_blocks_per_cache_level": [64, 128]}),
        ],
        (0, 0, 0),
    ),
    # Two full blocks and one that is not; the narrow window's copy says nothing.
    Answered(
        [
            (FULL, trtllm_stored(None, *(trtllm_block(name, trtllm_tokens(name)) for name in (1, 2)))),
            (WINDOW, trtllm_stored(None, trtllm_block(1, trtllm_tokens(1)))),
            (FULL, trtllm_stored(2, trtllm_block(30, trtllm_tokens(3, cut=2)))),
        ],
        (2, 2, 2),
    ),
    # The third fills up under another name, and is published once more as it is.
    Answered(
        [
            (FULL, {"type": "removed", "block_hashes": [30]}),
            (FULL, trtllm_stored(2, trtllm_block(3, trtllm_tokens(3)))),
            (FULL, trtllm_stored(2, trtllm_block(3, trtllm_tokens(3)))),
        ],
        (3, 3, 3),
    ),
    # Offloaded: only the level changes. A change of priority alone says null.
    Answered([(FULL, trtllm_updated(2, 0, 1)), (FULL, trtllm_updated(1, None, None))], (1, 3, 3)),
    Answered([(FULL, trtllm_updated(3, 0, 1)), (FULL, trtllm_updated(99, 0, 1))], (1, 3, 3)),
    Answered([(FULL, trtllm_updated(2, 1, 0)), (FULL, {"type": "removed", "block_hashes": [3]})], (2, 2, 2)),
    Answered([(FULL, {"type": "removed", "block_hashes": [1]})], (0, 0, 0)),
]


def trtllm_answers() -> list[CapturedMessage]:
    """As a capture: each answer a message, numbered by its first event."""
    messages, number = [], 0
    for place, answer in enumerate(TRTLLM):
        events = [
            {"event_id": number + offset, "data": data, "window_size": window}
            for offset, (window, data) in enumerate(answer.events)
        ]
        messages.append(CapturedMessage(float(place), "kv_cache_events", number, msgspec.json.encode(events)))
        number += len(events)
    return messages


TRTLLM_NOTE = "TensorRT-LLM's get_kv_cache_events(), JSON: made by hand from its KVCacheEventSerializer"


def write() -> None:
    for name, story in STORIES.items():
        write_capture(DIRECTORY / f"{name}.jsonl", CaptureHeader.new(1.78e9, note=story.note), messages_of(story))
    write_capture(DIRECTORY / "tensorrt-llm.jsonl", CaptureHeader.new(1.78e9, note=TRTLLM_NOTE), trtllm_answers())


if __name__ == "__main__":
    write()

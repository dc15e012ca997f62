"""Qwen-Bailian's traces: seconds, block ids of 16 tokens that hold for the whole file, turns that name their parent.

    {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521, "output_length": 132,
     "type": "text", "turn": 2, "hash_ids": [1089]}

Each row gives its whole prompt. A turn comes when the file says, but not before its parent has been answered.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadtest.traces.blocksizes import settle_block_size
from loadtest.traces.building import Draft, names_of
from loadtest.traces.parsing import Format, Parsed, ReadOptions
from loadtest.traces.rows import Tally, json_rows, number, numbers, tokens, understood, whole

BLOCK_SIZE_TOKENS = 16


def _read(path: Path, options: ReadOptions) -> Parsed:
    tally, by_chat, lengths = Tally(path, "qwen-bailian"), dict[int, Draft](), list[tuple[int, int]]()
    roots: dict[int, int] = {}

    def add(row: Mapping[str, Any]) -> None:
        chat, parent, ids = whole(row, "chat_id"), whole(row, "parent_chat_id", -1), numbers(row, "hash_ids")
        length = tokens(row, "input_length", 1)
        root = roots[chat] = roots.get(parent, chat)
        by_chat[chat] = Draft(
            number(row, "timestamp"),
            length,
            tokens(row, "output_length"),
            names_of(ids),
            session=f"chat-{root}",
            tenant=str(row.get("type", "")),
            follows=by_chat.get(parent),
        )
        lengths.append((length, len(ids)))

    understood(json_rows(path, options.progress), add, tally)
    block_size, notes = settle_block_size(lengths, BLOCK_SIZE_TOKENS, options.block_size_tokens)
    return Parsed(list(by_chat.values()), block_size, [*notes, *tally.notes()], names_are_ids=True)


QWEN_BAILIAN = Format(
    "qwen-bailian",
    "Qwen-Bailian: chat_id, parent_chat_id, timestamp in s, hash_ids of 16 tokens, global",
    lambda sample: sample.has("chat_id", "parent_chat_id", "hash_ids"),
    _read,
)

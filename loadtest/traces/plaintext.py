"""Plain text: vLLM's sonnets, and a document as one prompt.

vLLM bench makes prompts of a poem: some of its first lines, the same in every prompt, then lines drawn at random, up to
a length in tokens. So does this, with the lengths that are vLLM's defaults.
"""

from pathlib import Path
from random import Random

from loadtest.traces.parsing import Format, Parsed, ReadOptions, Sample
from loadtest.traces.rows import Row, Tally, understood
from loadtest.traces.texts import TextDrafts

PROMPTS = 1_000
INPUT_TOKENS = 550
PREFIX_TOKENS = 200
OUTPUT_TOKENS = 150
_LINE_CHARACTERS_MAX = 200
_LINES_MIN = 8
_OPENING = "Pick as many lines as you can from these poem lines:\n"


def _read_sonnet(path: Path, options: ReadOptions) -> Parsed:
    texts, tally, rng = TextDrafts(options), Tally(path, "sonnet"), Random(options.seed)
    lines = [f"{line}\n" for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    tally.rows = len(lines)
    tally.check()
    mean_tokens = max(sum(map(texts.tokens, lines)) / len(lines), 1.0)
    opening = texts.tokens(_OPENING)
    shared = lines[: round((PREFIX_TOKENS - opening) / mean_tokens)]
    drawn = round((INPUT_TOKENS - opening) / mean_tokens) - len(shared)
    for _ in range(PROMPTS):
        text = _OPENING + "".join(shared + rng.choices(lines, k=max(drawn, 1)))
        texts.add({"messages": [{"role": "user", "content": text}]}, output_tokens=OUTPUT_TOKENS)
    return texts.parsed(tally, [f"{PROMPTS} prompts of about {INPUT_TOKENS} tokens, the first {PREFIX_TOKENS} shared"])


def _read_text(path: Path, options: ReadOptions) -> Parsed:
    texts, tally = TextDrafts(options), Tally(path, "text")

    def read(text: str) -> None:
        texts.add({"prompt": text}, arrival_seconds=0.0)

    understood([Row(1, path.read_text(encoding="utf-8"))], read, tally)
    return texts.parsed(tally, ["the whole file is one prompt"])


def _is_poem(sample: Sample) -> bool:
    lines = sample.text.splitlines()
    return sample.suffix == ".txt" and len(lines) >= _LINES_MIN and max(map(len, lines)) <= _LINE_CHARACTERS_MAX


SONNET = Format("sonnet", "vLLM bench: prompts made of a poem's lines", _is_poem, _read_sonnet)
TEXT = Format(
    "text",
    "a text file as one prompt",
    lambda sample: sample.suffix == ".txt" and bool(sample.text.strip()),
    _read_text,
)

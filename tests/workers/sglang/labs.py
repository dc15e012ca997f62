"""What lies behind a pool, for tests that do something to it behind everyone's back."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tests.cachecore.store.servers import Server


class Lab(Protocol):
    @property
    def where(self) -> str:
        """As `--pool NAME=` has it."""
        ...

    def stored(self) -> int:
        """How many pages."""
        ...

    def damage(self, change: Callable[[bytes], bytes]) -> None:
        """Change what each page is stored as, but for the description at its end."""
        ...

    def take_away(self) -> None: ...

    def bring_back(self) -> None: ...


class DirectoryLab:
    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir()

    @property
    def where(self) -> str:
        return f"dir:{self._root}"

    def files(self) -> list[Path]:
        return list(self._root.glob("*/runs/*/*/*.hckv"))

    def stored(self) -> int:
        return len(self.files())

    def damage(self, change: Callable[[bytes], bytes]) -> None:
        for path in self.files():
            data = path.read_bytes()
            path.write_bytes(change(data[:400]) + data[400:])

    def take_away(self) -> None:
        self._root.rename(self._root.with_name("elsewhere"))

    def bring_back(self) -> None:
        self._root.with_name("elsewhere").rename(self._root)


class RedisLab:
    def __init__(self, server: Server) -> None:
        self._server = server
        server.command("FLUSHALL")

    @property
    def where(self) -> str:
        return self._server.url

    def keys(self) -> list[bytes]:
        values = self._server.command("KEYS", "ropeway:pool:*")
        return [key for key in values if self._server.command("TYPE", key) == b"hash" and self._has_chunks(key)]

    def stored(self) -> int:
        return len(self.keys())

    def damage(self, change: Callable[[bytes], bytes]) -> None:
        for key in self.keys():
            self._server.command("HSET", key, 0, change(self._server.command("HGET", key, 0)))

    def take_away(self) -> None:
        self._server.freeze()

    def bring_back(self) -> None:
        self._server.thaw()

    def _has_chunks(self, key: bytes) -> bool:
        return bool(self._server.command("HEXISTS", key, 0) and self._server.command("HEXISTS", key, "tail"))

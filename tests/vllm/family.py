"""An instance's processes and threads, as the kernel counts them."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_TICKS_PER_SECOND = 100


def family(pid: int) -> list[int]:
    """A process and all that it started."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += family(int(child))
    return found


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def called(pids: Sequence[int], name: str) -> list[int]:
    return [pid for pid in pids if name in Path(f"/proc/{pid}/comm").read_text()]


class Used(NamedTuple):
    """Processor time, in seconds."""

    everybody: float
    engine: float
    """vLLM's scheduler's process. Where it is the worker's as well, what follows is a part of it."""
    worker: float
    """The process that has the model, and in it all that moves KV."""
    beside: float
    """In that, what is not vLLM's own loop: the threads of transfers and of the sidecar, and torch's."""

    @classmethod
    def by(cls, pids: Sequence[int]) -> "Used":
        """So far, by an instance's processes."""
        engines = called(pids, "VLLM::EngineCor")
        workers = called(pids, "VLLM::Worker") or engines
        worker, loops = _seconds(workers), sum(_seconds_in(Path(f"/proc/{pid}/task/{pid}/stat")) for pid in workers)
        return cls(_seconds(pids), _seconds(engines), worker, worker - loops)

    def since(self, earlier: "Used") -> "Used":
        return Used(*(now - then for then, now in zip(earlier, self, strict=True)))


def _seconds(pids: Sequence[int]) -> float:
    return sum(_seconds_in(Path(f"/proc/{pid}/stat")) for pid in pids)


def _seconds_in(stat: Path) -> float:
    """That a process or a thread has used."""
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND

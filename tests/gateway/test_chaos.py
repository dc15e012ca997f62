"""Chaos on purpose: one seed is one history, what is struck is mended, and nothing is left stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachecore.store.embedded import server_pid
from gateway.chaos import (
    DEFAULT_BOUNDS,
    FREEZE,
    KILL,
    Bounds,
    Chaos,
    Fault,
    PartTarget,
    Span,
    ValkeyTarget,
    Victim,
    bounds_of,
    schedule,
)
from gateway.errors import StartupError
from gateway.ports import free_port_range
from gateway.supervisor import Part, Supervisor
from gateway.up import UpOptions, victims, worker_parts
from ropeway import main

REPOSITORY = Path(__file__).parents[2]
BOUNDS = Bounds(Span(1.0, 4.0), Span(0.5, 2.0))
seeds = st.integers(0, 2**63 - 1)


def workers(count: int, recovery_seconds: float = 0.0) -> list[Victim]:
    return [Victim(f"worker-{number}", (KILL, FREEZE), "workers", recovery_seconds) for number in range(count)]


def faults(seed: int, whom: Sequence[Victim], seconds: float = 120.0) -> list[Fault]:
    return list(takewhile(lambda fault: fault.at_seconds < seconds, schedule(seed, whom, BOUNDS)))


@settings(max_examples=30)
@given(seeds)
def test_one_seed_is_one_history(seed: int) -> None:
    assert faults(seed, workers(3), 30.0) == faults(seed, workers(3), 30.0)


def test_a_history_that_is_written_down() -> None:
    """Whoever is told a seed must find the same faults, on whatever machine and Python."""
    first = next(schedule(7, [Victim("worker-1", (KILL, FREEZE))], DEFAULT_BOUNDS))
    assert (first.victim, first.kind) == ("worker-1", FREEZE)
    assert (first.at_seconds, first.seconds) == pytest.approx((13.732175, 2.292755))


@settings(max_examples=30)
@given(seeds, st.integers(1, 5), st.floats(0.0, 5.0))
def test_times_lie_within_their_bounds_and_somebody_is_always_well(seed: int, count: int, recovery: float) -> None:
    whom = [*workers(count, recovery), Victim("valkey", (FREEZE,))]
    well_at = dict.fromkeys((victim.name for victim in whom), 0.0)
    over_at = dict(well_at)
    previous = 0.0
    for fault in faults(seed, whom, 40.0):
        assert fault.at_seconds >= previous
        assert BOUNDS.outage.seconds_min <= fault.seconds <= BOUNDS.outage.seconds_max
        assert fault.at_seconds - over_at[fault.victim] >= BOUNDS.interval.seconds_min
        previous = fault.at_seconds
        over_at[fault.victim] = fault.over_at_seconds
        well_at[fault.victim] = fault.over_at_seconds + (recovery if fault.victim != "valkey" else 0.0)
        ill = [name for name, at in well_at.items() if name != "valkey" and at > fault.at_seconds]
        assert len(ill) < count


def test_every_victim_meets_every_kind() -> None:
    whom = [*workers(4), Victim("valkey", (KILL, FREEZE))]
    met = Counter((fault.victim, fault.kind) for fault in faults(1, whom, 300.0))
    assert set(met) == {(victim.name, kind) for victim in whom for kind in (KILL, FREEZE)}


def test_what_befalls_one_does_not_depend_on_the_others() -> None:
    alone = faults(3, [Victim("valkey", (KILL, FREEZE))])
    among = [fault for fault in faults(3, [*workers(4), Victim("valkey", (KILL, FREEZE))]) if fault.victim == "valkey"]
    assert alone == among != []


def test_the_last_one_of_a_group_is_spared() -> None:
    met = faults(1, [*workers(1), Victim("valkey", (FREEZE,))])
    assert {fault.victim for fault in met} == {"valkey"}


@pytest.mark.parametrize(("text", "span"), [("2-8", (2.0, 8.0)), ("0.5-0.5", (0.5, 0.5)), ("3", (3.0, 3.0))])
def test_spans_are_read(text: str, span: tuple[float, float]) -> None:
    assert Span.parse(text) == span


@pytest.mark.parametrize("text", ["", "-", "a-b", "8-2", "0-3", "-1-3", "1-inf", "nan-nan", "1-4000", "1-2-3"])
def test_spans_that_are_none_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(StartupError, match=r"^--chaos: .*expected") as caught:
        bounds_of(1, text, None)
    assert "\n" not in str(caught.value)


def test_what_a_command_line_leaves_out_is_the_default() -> None:
    assert bounds_of(None, None, None) == DEFAULT_BOUNDS
    assert bounds_of(1, None, "1-2") == Bounds(DEFAULT_BOUNDS.interval, Span(1.0, 2.0))
    with pytest.raises(StartupError, match="are for --chaos SEED"):
        bounds_of(None, "1-2", None)


class Recorder:
    """A target that remembers."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def strike(self, kind: str) -> None:
        self.done.append(f"strike {kind}")

    def mend(self, kind: str) -> None:
        self.done.append(f"mend {kind}")


class Scene:
    def __init__(self, *faults: Fault) -> None:
        self.now = 100.0
        self.one, self.two = Recorder(), Recorder()
        self.said: list[str] = []
        self.chaos = Chaos(7, iter(faults), {"one": self.one, "two": self.two}, self.said.append, lambda: self.now)

    def at(self, seconds: float) -> None:
        self.now = 100.0 + seconds
        self.chaos.tick()


def test_faults_begin_and_end_at_their_times() -> None:
    scene = Scene(Fault(1.0, "one", KILL, 2.0), Fault(1.5, "two", FREEZE, 1.0))
    scene.at(0.9)
    assert scene.one.done == scene.two.done == []
    scene.at(1.0)
    scene.at(1.6)
    assert (scene.one.done, scene.two.done) == (["strike kill"], ["strike freeze"])
    scene.at(2.59)
    assert scene.two.done == ["strike freeze"]
    scene.at(3.0)
    assert (scene.one.done, scene.two.done) == (["strike kill", "mend kill"], ["strike freeze", "mend freeze"])
    assert scene.chaos.count == 2


def test_a_fault_that_comes_late_lasts_as_long() -> None:
    scene = Scene(Fault(1.0, "one", FREEZE, 2.0))
    scene.at(5.0)
    scene.at(6.9)
    assert scene.one.done == ["strike freeze"]
    scene.at(7.0)
    assert scene.one.done == ["strike freeze", "mend freeze"]


def test_each_fault_is_one_line_with_its_time_and_seed() -> None:
    scene = Scene(Fault(1.0, "one", KILL, 2.0))
    scene.at(1.0)
    (line,) = scene.said
    assert line[2] == line[5] == ":"
    assert line[8:] == " chaos, seed 7, +1.0 s: kill one for 2.0 s"


def test_the_end_leaves_nothing_stopped_and_starts_nothing() -> None:
    scene = Scene(Fault(1.0, "one", KILL, 5.0), Fault(1.0, "two", FREEZE, 5.0), Fault(2.0, "one", KILL, 1.0))
    scene.at(1.0)
    scene.chaos.end()
    scene.at(60.0)
    assert scene.one.done == ["strike kill"]
    assert scene.two.done == ["strike freeze", "mend freeze"]
    assert scene.said[-1] == "chaos, seed 7: 2 faults in 1 s"


# With processes


def state_of(pid: int) -> str:
    """As the kernel calls it; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return ""


def eventually(condition: object, seconds_max: float = 5.0) -> bool:
    assert callable(condition)
    limit = time.monotonic() + seconds_max
    while not condition() and time.monotonic() < limit:
        time.sleep(0.02)
    return bool(condition())


def test_a_part_dies_rises_stops_and_goes_on(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, lambda: 0)
    try:
        supervisor.start(
            Part("sleeper", [sys.executable, "-c", "print('here', flush=True); import time; time.sleep(60)"])
        )
        (process,) = supervisor.processes
        target, log = PartTarget(process), tmp_path / "sleeper.log"
        assert eventually(lambda: log.exists() and log.read_text() == "here\n")
        first = process.pid
        target.strike(KILL)
        assert state_of(first) == ""
        process.check()  # nobody misses it
        target.mend(KILL)
        assert eventually(lambda: log.read_text() == "here\nhere\n")
        second = process.pid
        assert second != first
        target.mend(KILL)
        assert process.pid == second
        target.strike(FREEZE)
        assert eventually(lambda: state_of(second) == "T")
        target.mend(FREEZE)
        assert eventually(lambda: state_of(second) == "S")
        os.kill(second, signal.SIGKILL)
        assert eventually(lambda: process.ended)
        with pytest.raises(StartupError, match="was killed by SIGKILL"):
            process.check()
    finally:
        supervisor.stop(seconds_max=0.5)


def test_where_no_valkey_runs_nothing_happens(tmp_path: Path) -> None:
    target = ValkeyTarget(tmp_path)
    for kind in (KILL, FREEZE):
        target.strike(kind)
        target.mend(kind)


def test_whom_faults_befall() -> None:
    assert [victim.name for victim in victims(UpOptions(workers=2))] == ["worker-1", "worker-2", "valkey"]
    assert [victim.name for victim in victims(UpOptions(workers=1))] == ["valkey"]
    assert [victim.name for victim in victims(UpOptions(prefill=1, decode=2, redis="none"))] == ["worker-2", "worker-3"]
    with pytest.raises(StartupError, match="needs two workers of one kind"):
        victims(UpOptions(workers=1, redis="redis://127.0.0.1"))


def test_simulated_workers_that_are_to_fail_are_a_process_each() -> None:
    parts, urls = worker_parts(UpOptions(port=23_000, workers=3, simulated=True, chaos_seed=1), Path("/keyring"), None)
    assert [part.name for part in parts] == ["worker-1", "worker-2", "worker-3"]
    for part, url in zip(parts, urls, strict=True):
        line = " ".join(part.arguments)
        assert f"--port {url.rpartition(':')[2]} --count 1" in line


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--chaos", "x"], "argument --chaos: "),
        (["--chaos", "-1"], "argument --chaos: a seed lies in 0..2**63-1, not -1"),
        (["--chaos", "1", "--chaos-interval", "8-2"], "0 < MIN <= MAX <= 3600 seconds are expected, not '8-2'"),
        (["--chaos-outage", "1-2"], "are for --chaos SEED"),
        (["--chaos", "1", "--workers", "1", "--redis", "none"], "needs two workers of one kind"),
    ],
)
def test_bad_values_are_refused_in_one_line(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        assert main(["up", "--simulated", *flags]) == 1
    told = capsys.readouterr().err
    assert told.startswith("ropeway: error: ")
    assert told.count("\n") == 1
    assert said in told


def test_a_stack_under_chaos_serves_and_ends_with_nothing_left(tmp_path: Path) -> None:
    port = free_port_range("127.0.0.1", 8, 20_000 + os.getpid() % 20_000)[0]
    where = ["--port", str(port), "--state-dir", str(tmp_path), "--json"]
    chaos = ["--chaos", "5", "--chaos-interval", "0.2-0.4", "--chaos-outage", "0.3"]
    stack = subprocess.Popen(
        [sys.executable, "-m", "ropeway", "up", "--simulated", "--workers", "2", *where, *chaos],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert stack.stdout is not None
        assert json.loads(stack.stdout.readline())["workers"]
        time.sleep(2.0)
        assert stack.poll() is None
        pids = [*children_of(stack.pid), server_pid(tmp_path / "valkey") or 0]
        stack.send_signal(signal.SIGINT)
        _, said = stack.communicate(timeout=60)
    finally:
        stack.kill()
    assert stack.returncode == 0, said
    assert "chaos, seed 5, +" in said
    assert "Traceback" not in said
    assert len(pids) >= 3
    assert eventually(lambda: not any(state_of(pid) for pid in pids if pid))
    assert server_pid(tmp_path / "valkey") is None


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

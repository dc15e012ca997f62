"""What a changed configuration means for a gateway that runs."""

import os
from pathlib import Path

import msgspec

from gateway.config import AdmissionConfig, GatewayConfig, LimitsConfig, RateLimitsConfig, RatesConfig, WorkerConfig
from gateway.reload import LIVE, Change, _WatchedFile, differences, worker_changes
from gateway.settings.sources import variables

ONE = WorkerConfig(url="http://127.0.0.1:8001")
TWO = WorkerConfig(url="http://127.0.0.1:8002", name="two")


def change(config: GatewayConfig, **keys: object) -> GatewayConfig:
    return msgspec.structs.replace(config, **keys)


def test_the_same_differs_in_nothing() -> None:
    assert differences(GatewayConfig(workers=(ONE,)), GatewayConfig(workers=(ONE,))) == []


def test_each_key_that_differs_is_named_with_both_values() -> None:
    before = GatewayConfig(workers=(ONE,))
    after = change(
        before,
        policy="session",
        port=9000,
        workers=(ONE, TWO),
        limits=LimitsConfig(body_bytes_max=2048),
        admission=AdmissionConfig(weights={"acme": 2.0}, requests_max=5),
        rate_limits=RateLimitsConfig(tenants={"acme": RatesConfig(requests_per_minute=6)}),
    )
    found = differences(before, after)
    assert {found.key: found.live for found in found} == {
        "port": False,
        "workers": True,
        "policy": True,
        "rate_limits.tenants": True,
        "limits.body_bytes_max": True,
        "admission.requests_max": False,
        "admission.weights": True,
    }
    assert str(found[2]) == "policy: kv-aware -> session"
    assert str(next(c for c in found if c.key == "limits.body_bytes_max")).endswith(": 67108864 -> 2048")


def test_what_is_said_of_a_change_holds_no_password() -> None:
    change = Change("redis", "redis://:hunter2@a:1", "none")
    assert str(change) == "redis: redis://REDACTED@a:1 -> none"


def test_what_is_said_of_workers_is_short() -> None:
    drained = msgspec.structs.replace(TWO, draining=True)
    three = WorkerConfig(url="http://127.0.0.1:8003", sidecar="http://user:secret@127.0.0.1:1")
    change = Change("workers", (ONE, TWO), (drained, three))
    assert str(change) == "workers: registered 127.0.0.1:8003; removed 127.0.0.1:8001; draining two"
    assert str(Change("workers", (ONE, TWO), (TWO, ONE))) == "workers: in another order"


def test_every_live_key_exists() -> None:
    keys = {key for _, key, _ in variables()}
    assert [live for live in LIVE if live not in keys and not any(key.startswith(f"{live}.") for key in keys)] == []


def test_workers_come_go_change_and_drain() -> None:
    draining = msgspec.structs.replace(ONE, draining=True)
    moved = msgspec.structs.replace(TWO, url="http://127.0.0.1:9002")
    assert worker_changes((ONE, TWO), (ONE, TWO)) == ([], [], [])
    assert worker_changes((ONE,), (ONE, TWO)) == ([], [TWO], [])
    assert worker_changes((ONE, TWO), (TWO,)) == (["127.0.0.1:8001"], [], [])
    assert worker_changes((ONE, TWO), (draining, moved)) == ([], [moved], [draining])


def test_a_file_has_changed_once_it_has_settled(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("port: 1")
    file = _WatchedFile(path)
    assert not file.has_changed()
    path.write_text("")
    assert not file.has_changed()
    path.write_text("port: 2")
    assert [file.has_changed() for _ in range(3)] == [False, True, False]
    os.utime(path, ns=(1, 1))
    assert [file.has_changed() for _ in range(3)] == [False, False, False]
    path.write_text("port: 4")
    file.take()
    assert [file.has_changed() for _ in range(3)] == [False, False, False]


def test_a_file_that_is_replaced_or_away_for_a_moment(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("port: 1")
    file = _WatchedFile(path)
    path.unlink()
    assert not file.has_changed()
    (tmp_path / "new.yaml").write_text("port: 3")
    (tmp_path / "new.yaml").rename(path)
    assert [file.has_changed() for _ in range(3)] == [False, True, False]

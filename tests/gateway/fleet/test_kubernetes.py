"""Workers found in Kubernetes, over a real socket: an API server as a script of what it lists and says."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from gateway.config import KubernetesConfig, WorkerConfig
from gateway.errors import ConfigError, NotFound
from gateway.fleet.kubernetes import Found, KubernetesDiscovery, Slices

SLICES = "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices"


def endpoint(address: str, pod: str = "", **conditions: bool) -> dict[str, Any]:
    target = {"targetRef": {"kind": "Pod", "name": pod}} if pod else {}
    return {"addresses": [address], "conditions": conditions, **target}


def slice_of(name: str, *endpoints: dict[str, Any], version: str = "1", **more: Any) -> dict[str, Any]:
    ports = [{"name": "metrics", "port": 9000}, {"name": "http", "port": 8000}]
    metadata = {"name": name, "resourceVersion": version}
    return {"metadata": metadata, "addressType": "IPv4", "ports": ports, "endpoints": list(endpoints), **more}


# ---- what slices make ------------------------------------------------------------------------------------------------


def found(*slices: dict[str, Any], port: str = "http") -> dict[str, Found]:
    made = Slices(port, "http")
    made.replace(slices)
    return made.found()


@pytest.mark.parametrize("port", ["http", "8000"])
def test_pods_are_called_by_their_names(port: str) -> None:
    one = slice_of("a", endpoint("10.0.0.1", "vllm-0", ready=True), endpoint("10.0.0.2", ready=True))
    assert found(one, port=port) == {
        "vllm-0": Found("http://10.0.0.1:8000", False),
        "10.0.0.2:8000": Found("http://10.0.0.2:8000", False),
    }


def test_who_is_not_ready_is_no_worker_and_who_stops_is_drained() -> None:
    one = slice_of(
        "a",
        endpoint("10.0.0.1", "starts", ready=False),
        endpoint("10.0.0.2", "stops", ready=False, serving=True, terminating=True),
        endpoint("10.0.0.3", "unsaid"),
    )
    assert found(one) == {
        "stops": Found("http://10.0.0.2:8000", True),
        "unsaid": Found("http://10.0.0.3:8000", False),
    }


def test_addresses_of_the_sixth_version_stand_in_brackets() -> None:
    assert found(slice_of("a", endpoint("fd00::1", "p"), addressType="IPv6")) == {
        "p": Found("http://[fd00::1]:8000", False)
    }


def test_a_slice_without_the_port_has_no_workers() -> None:
    assert found(slice_of("a", endpoint("10.0.0.1", "p")), port="grpc") == {}
    assert found({"metadata": {"name": "a"}, "addressType": "IPv4", "ports": None, "endpoints": None}) == {}


def test_of_one_in_two_slices_the_serving_one_counts() -> None:
    old, new = slice_of("a", endpoint("10.0.0.1", "p", terminating=True)), slice_of("b", endpoint("10.0.0.9", "p"))
    assert found(old, new) == found(new, old) == {"p": Found("http://10.0.0.9:8000", False)}


# ---- following -------------------------------------------------------------------------------------------------------


class Server:
    """Says what it is told to; keeps what it was asked."""

    def __init__(self) -> None:
        self.pages: list[dict[str, Any]] = []
        self.status = 200
        self.asked: list[tuple[dict[str, str], str]] = []
        self.watches: asyncio.Queue[list[dict[str, Any]] | None] = asyncio.Queue()
        """What each turn of a watch says; None ends it."""
        self.url = ""

    def lists(self, *slices: dict[str, Any], version: str = "10") -> None:
        self.pages = [{"metadata": {"resourceVersion": version}, "items": list(slices)}]

    def says(self, *events: tuple[str, dict[str, Any]]) -> None:
        self.watches.put_nowait([{"type": kind, "object": one} for kind, one in events])

    def ends(self) -> None:
        self.watches.put_nowait(None)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                target = urlsplit(head.split(" ")[1])
                assert target.path == SLICES
                query = {key: values[0] for key, values in parse_qs(target.query).items()}
                token = next(
                    (line[22:] for line in head.split("\r\n") if line.startswith("authorization: Bearer ")), ""
                )
                self.asked.append((query, token))
                if self.status != 200:
                    body = b"{}"
                    writer.write(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n%b" % (self.status, len(body), body))
                elif "watch" in query:
                    await self._watch(writer)
                else:
                    body = json.dumps(self.pages[int(query.get("continue", "0"))]).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _watch(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while (events := await self.watches.get()) is not None:
            data = b"".join(json.dumps(event).encode() + b"\n" for event in events)
            for part in (data[:7], data[7:]):  # lines end where they end
                writer.write(b"%x\r\n%b\r\n" % (len(part), part))
                await writer.drain()
        writer.write(b"0\r\n\r\n")


class Members:
    def __init__(self) -> None:
        self.workers: dict[str, WorkerConfig] = {}
        self.told: list[str] = []

    async def register(self, config: WorkerConfig) -> None:
        self.told.append(f"register {config.name}")
        self.workers[config.name] = config

    async def drain(self, name: str, draining: bool) -> None:
        self.told.append(f"drain {name} {draining}")

    async def remove(self, name: str) -> None:
        self.told.append(f"remove {name}")
        if name not in self.workers:
            raise NotFound(name)
        del self.workers[name]

    async def come_to(self, *told: str) -> None:
        async with asyncio.timeout(10):
            while self.told != list(told):
                await asyncio.sleep(0.005)
        self.told.clear()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    scripted = Server()
    listening = await asyncio.start_server(scripted.serve, "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()[:2]
    scripted.url = f"http://{host}:{port}"
    yield scripted
    listening.close()


@asynccontextmanager
async def following(server: Server, members: Members, **more: Any) -> AsyncIterator[KubernetesDiscovery]:
    config = KubernetesConfig(selector="app=vllm", namespace="models", server=server.url, **more)
    discovery = KubernetesDiscovery(config, members)
    task = asyncio.create_task(discovery.run())
    yield discovery
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_workers_come_drain_and_go_as_the_watch_says(server: Server, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t0k\n")
    server.lists(slice_of("a", endpoint("10.0.0.1", "w0")))
    members = Members()
    async with following(server, members, token_file=tmp_path / "token", engine="vllm") as discovery:
        await members.come_to("register w0")
        assert discovery.synchronized
        assert (members.workers["w0"].url, members.workers["w0"].engine) == ("http://10.0.0.1:8000", "vllm")
        server.says(("MODIFIED", slice_of("a", endpoint("10.0.0.1", "w0"), endpoint("10.0.0.2", "w1"), version="11")))
        await members.come_to("register w1")
        server.says(("BOOKMARK", {"metadata": {"resourceVersion": "12"}}))
        server.says(("ADDED", slice_of("b", endpoint("10.0.0.3", "w2"), version="13")))
        await members.come_to("register w2")
        stopping = endpoint("10.0.0.2", "w1", ready=False, terminating=True)
        server.says(("MODIFIED", slice_of("a", endpoint("10.0.0.1", "w0"), stopping, version="14")))
        await members.come_to("drain w1 True")
        server.says(("MODIFIED", slice_of("a", endpoint("10.0.0.1", "w0"), version="15")))
        await members.come_to("remove w1")
        server.says(("DELETED", slice_of("b", version="16")))
        await members.come_to("remove w2")
        # A pod that is made anew has its name, and another address.
        server.says(("MODIFIED", slice_of("a", endpoint("10.0.0.7", "w0"), version="17")))
        await members.come_to("register w0")
        assert members.workers["w0"].url == "http://10.0.0.7:8000"
        server.ends()
        server.says(("DELETED", slice_of("a", version="18")))
        await members.come_to("remove w0")
    assert {token for _, token in server.asked} == {"t0k"}
    assert {query["labelSelector"] for query, _ in server.asked} == {"app=vllm"}
    assert [query.get("resourceVersion") for query, _ in server.asked] == [None, "10", "17"]


async def test_a_forgotten_version_means_another_list(server: Server) -> None:
    server.lists(slice_of("a", endpoint("10.0.0.1", "w0"), endpoint("10.0.0.2", "w1")))
    members = Members()
    async with following(server, members):
        await members.come_to("register w0", "register w1")
        server.lists(slice_of("a", endpoint("10.0.0.2", "w1")), version="99")
        server.says(("ERROR", {"code": 410, "message": "too old resource version"}))
        server.ends()
        await members.come_to("remove w0")
        server.ends()
        async with asyncio.timeout(10):
            while len(server.asked) < 5:
                await asyncio.sleep(0.005)
    assert [query.get("resourceVersion") for query, _ in server.asked[:5]] == [None, "10", None, "99", "99"]


async def test_long_lists_come_in_pages(server: Server) -> None:
    first = {
        "metadata": {"resourceVersion": "3", "continue": "1"},
        "items": [slice_of("a", endpoint("10.0.0.1", "w0"))],
    }
    second = {"metadata": {"resourceVersion": "3"}, "items": [slice_of("b", endpoint("10.0.0.2", "w1"))]}
    server.pages = [first, second]
    members = Members()
    async with following(server, members):
        await members.come_to("register w0", "register w1")


async def test_while_the_server_is_away_the_last_state_stays(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.fleet.kubernetes._PAUSE_SECONDS_MAX", 0.01)
    server.lists(slice_of("a", endpoint("10.0.0.1", "w0")))
    members = Members()
    async with following(server, members):
        await members.come_to("register w0")
        server.status = 403
        server.ends()
        async with asyncio.timeout(10):
            while "403" not in caplog.text:
                await asyncio.sleep(0.005)
        assert members.told == []
        server.status = 200
        server.lists(slice_of("a", endpoint("10.0.0.2", "w1")))
        await members.come_to("remove w0", "register w1")
    assert "may not list and watch endpointslices" in caplog.text


async def test_who_is_not_taken_is_tried_again_and_who_is_gone_already_is_no_matter(server: Server) -> None:
    server.lists(slice_of("a", endpoint("10.0.0.1", "w0")))
    members = Members()
    async with following(server, members):
        await members.come_to("register w0")
        members.workers.clear()
        server.says(("MODIFIED", slice_of("a", endpoint("nonsense/", "w1"), version="11")))
        await members.come_to("remove w0")
        server.says(("MODIFIED", slice_of("a", endpoint("10.0.0.5", "w1"), version="12")))
        await members.come_to("register w1")


def test_outside_of_a_cluster_the_server_must_be_named() -> None:
    with pytest.raises(ConfigError, match=r"kubernetes\.server says where"):
        KubernetesDiscovery(KubernetesConfig(selector="a=b", namespace="n"), Members(), {})
    with pytest.raises(ConfigError, match=r"kubernetes\.namespace is not set"):
        KubernetesDiscovery(KubernetesConfig(selector="a=b", server="http://h:1"), Members(), {})

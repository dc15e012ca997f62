"""Files and batches, through the `openai` library and a real gateway: run, isolated, cancelled, gone on with."""

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

from tests.clients.talking import MODEL as TALKING
from tests.clients.talking import TalkingWorker
from tests.gateway.end_to_end.processes import MODEL, Fleet, Gateway, eventually, new_keyring
from tests.gateway.end_to_end.test_tenants import new_key

pytestmark = pytest.mark.stacks

CHAT = "/v1/chat/completions"


def line(number: int, url: str = CHAT, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Question {number} of a batch."}]
    whole = {"model": MODEL, "messages": messages, "max_tokens": 3, **body}
    return {"custom_id": f"q{number}", "method": "POST", "url": url, "body": whole}


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(document).encode() + b"\n" for document in lines)


class House(NamedTuple):
    fleet: Fleet
    gateway: Gateway
    keys: dict[str, str]

    def client(self, tenant: str = "acme") -> openai.OpenAI:
        key = self.keys[tenant]
        return openai.OpenAI(base_url=f"{self.gateway.url}/v1", api_key=key, max_retries=0, timeout=30)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    directory = tmp_path_factory.mktemp("batches")
    keys = {tenant: new_key(directory / "keys.jsonl", tenant) for tenant in ("acme", "globex")}
    config = {
        "keyring": str(new_keyring(directory)),
        "tenants": {"api_keys_file": str(directory / "keys.jsonl")},
        "batches": {"directory": str(directory / "kept"), "requests_max": 50, "file_bytes_max": 20_000},
    }
    with (
        Fleet(directory, "--speed", "50", "--keyring", config["keyring"]) as fleet,
        Gateway(directory, fleet.urls, config) as gateway,
    ):
        yield House(fleet, gateway, keys)


@pytest.fixture
def client(house: House) -> Iterator[openai.OpenAI]:
    with house.client() as client:
        yield client


def begun(client: openai.OpenAI, content: bytes, endpoint: Any = CHAT, **fields: Any) -> Any:
    file = client.files.create(file=("asked.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


def ended(client: openai.OpenAI, batch: Any, seconds_max: float = 30.0) -> Any:
    def look() -> Any:
        found = client.batches.retrieve(batch.id)
        return found if found.status in ("completed", "failed", "expired", "cancelled") else None

    return eventually(look, f"{batch.id} ends", seconds_max)


def answers(client: openai.OpenAI, file: str) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in client.files.content(file).text.splitlines()]
    return {document["custom_id"]: document for document in lines}


def test_a_batch_is_answered_line_by_line(client: openai.OpenAI, house: House) -> None:
    wrong = line(4, messages=[])
    batch = begun(client, jsonl(*map(line, range(4)), wrong), metadata={"night": "1"})
    assert (batch.status, batch.metadata) == ("validating", {"night": "1"})
    done = ended(client, batch)
    assert (done.status, done.request_counts.total) == ("completed", 5)
    assert (done.request_counts.completed, done.request_counts.failed) == (4, 1)
    assert done.in_progress_at <= done.completed_at
    found = answers(client, done.output_file_id)
    assert sorted(found) == ["q0", "q1", "q2", "q3"]
    assert all(document["response"]["status_code"] == 200 for document in found.values())
    assert found["q0"]["response"]["body"]["usage"]["completion_tokens"] == 3
    (refused,) = answers(client, done.error_file_id).values()
    assert (refused["custom_id"], refused["response"]["status_code"]) == ("q4", 400)
    assert refused["response"]["body"]["error"]["param"] == "messages"
    house.gateway.wait_idle()


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        ("/v1/completions", {"prompt": "Go on."}, "text_completion"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 3}, "response"),
        ("/v1/messages", {}, None),
    ],
)
def test_other_endpoints(client: openai.OpenAI, endpoint: str, body: dict[str, Any], kind: str | None) -> None:
    done = ended(client, begun(client, jsonl(line(0, endpoint, stream=True, **body)), endpoint))
    (answer,) = answers(client, done.output_file_id).values()
    assert answer["response"]["body"].get("object") == kind
    if kind is None:
        assert answer["response"]["body"]["type"] == "message"


@pytest.mark.parametrize(
    ("content", "code", "number"),
    [
        (jsonl(line(0)) + b"{\n", "invalid_json_line", 2),
        (jsonl(line(0), line(0)), "duplicate_custom_id", 2),
        (jsonl(line(0, "/v1/completions")), "mismatched_endpoint", 1),
        (jsonl({"url": CHAT, "body": {"model": "m"}}), "missing_required_parameter", 1),
        (jsonl({"custom_id": "a", "url": CHAT, "body": {}}), "missing_required_parameter", 1),
        (jsonl([1]), "invalid_json_line", 1),
        (b"\n\n", "empty_file", 0),
        (jsonl(*map(line, range(51))), "too_many_requests", 51),
    ],
)
def test_a_file_that_is_no_batch_fails_with_its_line(
    client: openai.OpenAI, content: bytes, code: str, number: int
) -> None:
    done = ended(client, begun(client, content))
    assert done.status == "failed"
    assert (done.errors.data[0].code, done.errors.data[0].line) == (code, number)
    assert done.output_file_id is None


def test_files_are_kept_listed_and_deleted(client: openai.OpenAI) -> None:
    file = client.files.create(file=("notes.jsonl", b'{"a":1}\r\n--x\n'), purpose="batch")
    assert (file.filename, file.bytes, file.purpose) == ("notes.jsonl", 13, "batch")
    assert client.files.content(file.id).read() == b'{"a":1}\r\n--x\n'
    assert client.files.retrieve(file.id) == file
    assert file.id in [listed.id for listed in client.files.list()]
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_nothing_is_seen_of_another_tenants(client: openai.OpenAI, house: House) -> None:
    batch = begun(client, jsonl(line(0)))
    with house.client("globex") as other:
        assert other.files.list().data == []
        assert other.batches.list().data == []
        for look in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                look(batch.id)
        for read in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError):
                read(batch.input_file_id)
        with pytest.raises(openai.NotFoundError):
            other.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
    assert ended(client, batch).status == "completed"
    assert batch.id in [listed.id for listed in client.batches.list(limit=1)]


@pytest.mark.parametrize("identifier", ["..", "%2e%2e%2flock", "file-" + "0" * 24, "lock", "file-../../lock"])
def test_what_is_no_id_is_not_found(house: House, identifier: str) -> None:
    headers = {"authorization": f"Bearer {house.keys['acme']}"}
    for path in (f"/v1/files/{identifier}", f"/v1/files/{identifier}/content", f"/v1/batches/{identifier}"):
        assert house.gateway.http.get(path, headers=headers).status_code in (404, 405)


def test_refusals(client: openai.OpenAI, house: House) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose is 'batch'"):
        client.files.create(file=("a.jsonl", b"x"), purpose="assistants")
    with pytest.raises(openai.APIStatusError, match="larger than"):
        client.files.create(file=("a.jsonl", b"x" * 20_001), purpose="batch")
    file = client.files.create(file=("a.jsonl", jsonl(line(0))), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="endpoint is one of"):
        client.batches.create(input_file_id=file.id, endpoint="/v1/moderations", completion_window="24h")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{house.gateway.url}/v1", api_key="wrong", max_retries=0).files.list()
    form = house.gateway.http.post(
        "/v1/files", content=b"{}", headers={"authorization": f"Bearer {house.keys['acme']}"}
    )
    assert (form.status_code, form.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_batch_is_cancelled_with_what_it_has(client: openai.OpenAI, house: House) -> None:
    slow = [line(number, max_tokens=40_000, ignore_eos=True) for number in range(3)]
    batch = begun(client, jsonl(line(9), *slow))
    eventually(lambda: client.batches.retrieve(batch.id).request_counts.completed == 1 or None, "one is answered")
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = ended(client, batch)
    assert (done.status, done.request_counts.completed) == ("cancelled", 1)
    assert list(answers(client, done.output_file_id)) == ["q9"]
    house.gateway.wait_idle()
    with pytest.raises(openai.BadRequestError, match="it is cancelled"):
        client.batches.cancel(batch.id)


def test_another_gateway_goes_on_where_one_has_died(tmp_path: Path) -> None:
    config = {"batches": {"directory": str(tmp_path / "kept"), "concurrency": 1}}
    with Fleet(tmp_path, "--speed", "50", count=1) as fleet:
        (worker,) = fleet.names
        with Gateway(tmp_path, fleet.urls, config) as first, client_of(first) as client:
            batch = begun(
                client, jsonl(*map(line, range(3)), *[line(n, max_tokens=40_000, ignore_eos=True) for n in (3, 4)])
            )
            eventually(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 1 or None, "it has begun")
            eventually(lambda: len(fleet.requests(worker)) >= 4 or None, "the fourth is asked")
            first.kill()
        kept = next((tmp_path / "kept").glob("t-*/batches/*.output"))
        kept.write_bytes(kept.read_bytes() + b'{"custom_id": "q3", "half')
        fleet.simulate(worker, {"paths": [CHAT], "status": 200, "body": {"choices": []}})
        with Gateway(tmp_path, fleet.urls, config, name="second") as second, client_of(second) as client:
            done = ended(client, batch)
            found = answers(client, done.output_file_id)
    assert (done.status, sorted(found)) == ("completed", [f"q{number}" for number in range(5)])
    assert [found[f"q{n}"]["response"]["body"].get("choices") == [] for n in range(5)] == [False] * 3 + [True] * 2


def test_a_gateway_that_leaves_begins_no_more_and_another_goes_on(tmp_path: Path) -> None:
    kept = {"batches": {"directory": str(tmp_path / "kept"), "concurrency": 1}}
    leaving = {**kept, "handover": {"announce_seconds": 60.0}}
    with Fleet(tmp_path, "--speed", "50", count=1) as fleet:
        (worker,) = fleet.names
        with (
            Gateway(tmp_path, fleet.urls, leaving) as first,
            Gateway(tmp_path, fleet.urls, kept, name="second") as second,
            client_of(second) as client,
        ):
            batch = begun(client, jsonl(line(0, max_tokens=40_000, ignore_eos=True), *map(line, range(1, 4))))
            eventually(lambda: fleet.requests(worker) or None, "the first is asked")
            fleet.simulate(worker, {"paths": [CHAT], "status": 200, "body": {"choices": []}})
            first.process.send_signal(signal.SIGTERM)
            done = ended(client, batch)
            assert first.process.poll() is None, "it still waits for clients"
            assert (done.status, done.request_counts.completed) == ("completed", 4)
            assert first.http.get("/readyz").status_code == 503
            first.kill()


def client_of(gateway: Gateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=30)


def test_its_requests_come_last_in_one_piece_and_under_the_tenants_salt(tmp_path: Path) -> None:
    key = new_key(tmp_path / "keys.jsonl", "acme")
    config = {
        "tenants": {"api_keys_file": str(tmp_path / "keys.jsonl")},
        "batches": {"directory": str(tmp_path / "kept")},
        "priorities": {"forwarded": True, "highest": 7},
    }
    asked = {"model": TALKING, "messages": [{"role": "user", "content": "hi"}]}
    entry = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {**asked, "stream": True, "priority": 0}}
    with (
        TalkingWorker() as worker,
        Gateway(tmp_path, [worker.url], config) as gateway,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as client,
    ):
        assert ended(client, begun(client, jsonl(entry))).status == "completed"
    ((_, headers, body),) = [posted for posted in worker.asked if posted[0] == CHAT]
    assert body.pop("cache_salt").startswith("rw1.acme.")
    assert body == {**asked, "priority": 7}
    assert "authorization" not in headers


def test_requests_wait_for_workers(tmp_path: Path) -> None:
    """What finds no worker is no answer."""
    config = {"batches": {"directory": str(tmp_path / "kept")}}
    with Fleet(tmp_path, "--speed", "50", count=1) as fleet, Gateway(tmp_path, fleet.urls, config) as gateway:
        (worker,) = fleet.names
        fleet.simulate(worker, {"paths": [CHAT], "status": 503, "requests": 2})
        with client_of(gateway) as client:
            started = time.monotonic()
            done = ended(client, begun(client, jsonl(line(0))))
        assert (done.status, done.request_counts.completed) == ("completed", 1)
        assert time.monotonic() - started >= 1.0


def test_without_a_directory_there_are_none(tmp_path: Path) -> None:
    with Fleet(tmp_path, count=1) as fleet, Gateway(tmp_path, fleet.urls) as gateway:
        assert gateway.http.get("/v1/batches").status_code == 404
        assert not (tmp_path / "kept").exists()

"""Keys, limits and namespaces, as clients meet them."""

import base64
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import ropeway
from gateway.api_keys import add_api_key
from tests.cachecore.store.servers import start_server
from tests.gateway.end_to_end.processes import (
    HOST,
    Fleet,
    Gateway,
    cached_tokens,
    chat,
    eventually,
    full_hit,
    matched_tokens,
    new_keyring,
    token_count,
)
from tests.security.house import House, built

pytestmark = pytest.mark.stacks


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    settings = {
        "acme": {},
        "globex": {},
        "open-a": {"public": True},
        "open-b": {"public": True},
        "narrow": {"requests_per_minute": 3.0},
    }
    with built(tmp_path_factory.mktemp("access"), **settings) as house:
        yield house


def test_a_new_key_is_good_and_a_revoked_one_is_not_on_open_connections_too(house: House) -> None:
    url, file = house.gateway.url, house.keys_file
    key = add_api_key(file, "passing")
    with httpx.Client(base_url=url, trust_env=False, headers={"authorization": f"Bearer {key}"}) as client:

        def status() -> int:
            return client.post("/v1/chat/completions", json=chat("again")).status_code

        eventually(lambda: status() == 200, "the new key is known")
        opened = _connection_of(client)
        assert ropeway.main(["keys", "revoke", "--tenant", "passing", "--file", str(file)]) == 0
        eventually(lambda: status() == 401, "the key is forgotten")
        assert _connection_of(client) is opened
        assert client.get("/v1/models").status_code == 401
    assert house.gateway.post(chat("others go on"), house.headers("acme")).status_code == 200


def _connection_of(client: httpx.Client) -> object:
    (connection,) = client._transport._pool.connections  # type: ignore[attr-defined]
    return connection


def test_a_broken_file_of_keys_locks_nobody_out(house: House) -> None:
    sound = house.keys_file.read_text()
    house.keys_file.write_text(sound + "{\n")
    try:
        eventually(lambda: "the 5 API keys that were read before stay" in house.gateway.said(), "it is noticed")
        assert house.gateway.post(chat("hi"), house.headers("acme")).status_code == 200
    finally:
        house.keys_file.write_text(sound)


def test_a_keys_own_limit(house: House) -> None:
    answers = [house.gateway.post(chat("hi"), house.headers("narrow")) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["2", "1", "0", "0"]
    assert {answer.headers["x-ratelimit-limit-requests"] for answer in answers} == {"3"}
    refused = answers[3]
    assert 1 <= int(refused.headers["retry-after"]) <= 20
    assert refused.headers["x-ratelimit-reset-requests"].endswith("s")
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    unlimited = house.gateway.post(chat("hi"), house.headers("acme"))
    assert unlimited.status_code == 200
    assert not [name for name in unlimited.headers if name.startswith("x-ratelimit")]


def test_public_is_shared_by_those_who_say_so_and_may(house: House) -> None:
    gateway, (worker,) = house.gateway, house.fleet.names
    body = chat("A manual that everybody may know, chosen by name and never by default. " * 3)
    public = {"x-ropeway-namespace": "public"}
    first = house.headers("open-a", **public)
    assert cached_tokens(gateway.post(body, first)) == 0
    gateway.wait_confirmed(body, worker, full_hit(body), first)
    # Another tenant that may, and says so.
    shared = gateway.post(body, house.headers("open-b", **public))
    assert matched_tokens(shared) == cached_tokens(shared) == full_hit(body) > 0
    # The same two without a word: each has its own.
    for tenant in ("open-a", "open-b"):
        answer = gateway.post(body, house.headers(tenant))
        assert (matched_tokens(answer), cached_tokens(answer)) == (0, 0)
    for headers, status, code in (
        (house.headers("acme", **public), 403, "forbidden"),
        (house.headers("open-a", **{"x-ropeway-namespace": "globex"}), 400, None),
    ):
        refused = gateway.post(body, headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
        assert refused.json()["error"]["param"] == "x-ropeway-namespace"
    salted = gateway.post({**body, "cache_salt": "mine"}, first)
    assert (salted.status_code, salted.json()["error"]["param"]) == (400, "cache_salt")


@pytest.mark.parametrize("salt", ["rw1.globex.0.0.-.AAAAAAAAAAAAAAAA", "rw1.public.0.0.-.x", "globex", "-", "\u0000"])
def test_no_salt_leaves_its_tenant(house: House, salt: str) -> None:
    """Whatever a client calls its salt, forged ones of ours among them, it is a division of its own tenant."""
    gateway, (worker,) = house.gateway, house.fleet.names
    body = chat("What globex has cached and acme would like to know about. " * 3)
    theirs = house.headers("globex")
    gateway.post(body, theirs)
    gateway.wait_confirmed(body, worker, full_hit(body), theirs)
    answer = gateway.post({**body, "cache_salt": salt}, house.headers("acme"))
    assert answer.status_code == 200
    assert (matched_tokens(answer), cached_tokens(answer)) == (0, 0)


def test_a_salt_stolen_from_the_wire_opens_nothing(house: House) -> None:
    """The very salt that the gateway sends for a tenant, in another tenant's body."""
    gateway, (worker,) = house.gateway, house.fleet.names
    body = chat("Whose salt was read off the wire between gateway and worker. " * 3)
    theirs = house.headers("globex")
    echoed = gateway.post(body, {**theirs, "x-simulate": '{"echo": true}'}).json()
    salt = json.loads(base64.b64decode(echoed["body_base64"]))["cache_salt"]
    assert salt.startswith("rw1.globex.")
    gateway.post(body, theirs)
    gateway.wait_confirmed(body, worker, full_hit(body), theirs)
    answer = gateway.post({**body, "cache_salt": salt}, house.headers("acme"))
    assert (matched_tokens(answer), cached_tokens(answer)) == (0, 0)


def test_tenants_limits_hold_over_prompts_and_answers(tmp_path: Path) -> None:
    body = chat("Counted as it is let in, and once more when it has been answered. ")
    prompt = token_count(body["messages"])
    slow = {"tokens_per_minute": 0.6 * (prompt + 4), "burst_seconds": 200.0}
    config = {"rate_limits": {"tenants": {"acme": slow}}}
    with built(tmp_path, config) as house:
        first = house.gateway.post(body, house.headers("acme"))
        assert first.headers["x-ratelimit-limit-tokens"] == str(2 * (prompt + 4))
        assert first.headers["x-ratelimit-remaining-tokens"] == str(prompt + 8)
        large = house.gateway.post(chat("x" * 20 * prompt), house.headers("acme"))
        assert (large.status_code, "retry-after" in large.headers) == (429, False)
        assert house.gateway.post(body, house.headers("globex")).status_code == 200
        metrics = house.gateway.operator.get("/metrics").text
        assert 'ropeway_rate_limited_total{resource="tokens",tenant="acme"} 1.0' in metrics


def test_two_gateways_that_share_an_index_count_together(tmp_path: Path) -> None:
    file, keyring = tmp_path / "keys.jsonl", str(new_keyring(tmp_path))
    headers = {"authorization": f"Bearer {add_api_key(file, 'acme')}"}
    with start_server(tmp_path) as server, Fleet(tmp_path, "--speed", "50", "--keyring", keyring, count=1) as fleet:
        config = {
            "keyring": keyring,
            "redis": server.url,
            "tenants": {"api_keys_file": str(file)},
            "rate_limits": {"requests_per_minute": 1.0, "burst_seconds": 6000.0},
        }
        with (
            Gateway(tmp_path, fleet.urls, config, name="one") as one,
            Gateway(tmp_path, fleet.urls, config, name="two") as two,
        ):
            eventually(lambda: two.status()["sharing"]["peers"]["peers"], "the gateways know each other")
            assert one.post(chat("hi"), headers).status_code == 200
            time.sleep(2.5)  # of a first report nobody knows how much is new
            for _ in range(40):
                one.post(chat("hi"), headers)
            left = [_remaining(two, headers)]

            def told() -> bool:
                left.append(_remaining(two, headers))
                # Less than its own requests have taken, but for what has flowed in meanwhile.
                return left[-1] <= 100 - 40 - len(left) + 1

            eventually(told, "what the other has let in is known here")


def _remaining(gateway: Gateway, headers: dict[str, str]) -> int:
    return int(gateway.post(chat("hi"), headers).headers["x-ratelimit-remaining-requests"])


def test_a_port_that_is_open_says_nothing(house: House) -> None:
    """Bytes that are no HTTP, and half a head, get an error or nothing: never another client's."""
    port = int(house.gateway.url.rpartition(":")[2])
    for data in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/1.1\r\n", b"\x00" * 100):
        with socket.create_connection((HOST, port), 5.0) as opened:
            opened.sendall(data)
            opened.shutdown(socket.SHUT_WR)
            said = opened.recv(65536)
            assert said == b"" or said.startswith(b"HTTP/1.1 400 ")

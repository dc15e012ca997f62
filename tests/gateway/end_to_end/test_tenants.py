"""Tenants share workers and never a cached block."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.gateway.end_to_end.processes import (
    MODEL,
    REPOSITORY,
    Fleet,
    Gateway,
    cached_tokens,
    chat,
    full_hit,
    matched_tokens,
    new_keyring,
    worker_of,
)


class House(NamedTuple):
    fleet: Fleet
    gateway: Gateway
    keys: dict[str, str]

    def headers(self, tenant: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[tenant]}"}


def new_key(file: Path, tenant: str) -> str:
    command = [sys.executable, "-m", "ropeway", "keys", "new", "--tenant", tenant, "--file", str(file)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One worker, so that whatever is shared at all would be shared."""
    directory = tmp_path_factory.mktemp("tenants")
    keys = {tenant: new_key(directory / "keys.jsonl", tenant) for tenant in ("acme", "globex")}
    keyring = str(new_keyring(directory))
    config = {"keyring": keyring, "tenants": {"api_keys_file": str(directory / "keys.jsonl")}}
    with (
        Fleet(directory, "--speed", "50", "--keyring", keyring, count=1) as fleet,
        Gateway(directory, fleet.urls, config) as gateway,
    ):
        yield House(fleet, gateway, keys)


def test_a_second_tenant_finds_nothing_of_the_first_ones(house: House) -> None:
    gateway, (worker,) = house.gateway, house.fleet.names
    body = chat("What both tenants ask, word for word, in a prompt of several blocks. " * 3)
    first = gateway.post(body, house.headers("acme"))
    assert (matched_tokens(first), cached_tokens(first)) == (0, 0)
    gateway.wait_confirmed(body, worker, full_hit(body), house.headers("acme"))
    foreign = gateway.explain(body, house.headers("globex"))
    assert (foreign["tenant"], foreign["confirmed_tokens"], foreign["matched_tokens"]) == ("globex", 0, 0)
    other = gateway.post(body, house.headers("globex"))
    assert (matched_tokens(other), cached_tokens(other)) == (0, 0)
    again = gateway.post(body, house.headers("acme"))
    assert matched_tokens(again) == cached_tokens(again) == full_hit(body) > 0
    # From its own request on, the second tenant hits as well, on blocks of its own.
    gateway.wait_confirmed(body, worker, full_hit(body), house.headers("globex"))
    own = gateway.post(body, house.headers("globex"))
    assert matched_tokens(own) == cached_tokens(own) == full_hit(body)


def test_a_clients_own_salt_divides_a_tenant(house: House) -> None:
    gateway, (worker,) = house.gateway, house.fleet.names
    headers = house.headers("acme")
    plain = chat("One tenant, several users, who must not see each other's timing. " * 3)
    salted = {**plain, "cache_salt": "user-1"}
    assert cached_tokens(gateway.post(salted, headers)) == 0
    gateway.wait_confirmed(salted, worker, full_hit(plain), headers)
    for other in (plain, {**plain, "cache_salt": "user-2"}):
        answer = gateway.post(other, headers)
        assert (matched_tokens(answer), cached_tokens(answer)) == (0, 0)
    same = gateway.post(salted, headers)
    assert matched_tokens(same) == cached_tokens(same) == full_hit(plain) > 0


def test_equal_salts_of_two_tenants_are_not_equal(house: House) -> None:
    gateway, (worker,) = house.gateway, house.fleet.names
    body = {**chat("The same salt, chosen by two tenants who do not know each other. " * 3), "cache_salt": "shared"}
    gateway.post(body, house.headers("acme"))
    gateway.wait_confirmed(body, worker, full_hit(body), house.headers("acme"))
    answer = gateway.post(body, house.headers("globex"))
    assert (matched_tokens(answer), cached_tokens(answer)) == (0, 0)


def test_a_tenants_key_does_not_reach_the_worker(house: House) -> None:
    answer = house.gateway.post(chat("hi"), {**house.headers("acme"), "x-simulate": '{"echo": true}'})
    assert worker_of(answer) == house.fleet.names[0]
    fields = {name.lower(): value for name, value in answer.json()["headers"]}
    assert "authorization" not in fields
    assert house.keys["acme"] not in answer.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/route/explain"])
@pytest.mark.parametrize("authorization", [None, "Bearer wrong", "Basic eDp5", "Bearer"])
def test_without_a_known_key_there_is_no_answer(house: House, path: str, authorization: str | None) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    answer = house.gateway.post(chat("hi"), headers, path)
    assert answer.status_code == 401, answer.text
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


def test_models_are_for_tenants_only(house: House) -> None:
    assert house.gateway.http.get("/v1/models").status_code == 401
    models = house.gateway.http.get("/v1/models", headers=house.headers("globex")).json()["data"]
    assert [model["id"] for model in models] == [MODEL]
    assert house.gateway.http.get("/healthz").status_code == 200


def test_a_refused_request_reaches_no_worker(house: House) -> None:
    (worker,) = house.fleet.names
    before = len(house.fleet.requests(worker))
    assert house.gateway.post(chat("hi"), {"authorization": "Bearer wrong"}).status_code == 401
    assert len(house.fleet.requests(worker)) == before

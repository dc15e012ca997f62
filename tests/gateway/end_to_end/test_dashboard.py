"""What the dashboard is served with: its files, their headers, and the feed over a real socket."""

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.views.dashboard.routes import load_assets
from gateway.views.feed import WATCHERS_MAX
from tests.gateway.end_to_end.processes import HOST, REPOSITORY, Gateway, eventually

ADMIN_KEY = "open-sesame-open-sesame"


@pytest.fixture(scope="module")
def gateway(directory: Path) -> Iterator[Gateway]:
    key_file = directory / "dashboard.key"
    key_file.write_text(ADMIN_KEY)
    with Gateway(directory, (), {"admin": {"key_file": str(key_file)}}, "dashboard", ADMIN_KEY) as gateway:
        yield gateway


def first_event(feed: httpx.Response) -> dict[str, object]:
    for line in feed.iter_lines():
        if line.startswith("data: "):
            return json.loads(line.removeprefix("data: "))  # type: ignore[no-any-return]
    raise AssertionError("the feed ended")


@pytest.mark.parametrize("path", ["/", "/dashboard", "/dashboard/"])
def test_the_page_is_there_without_a_key(gateway: Gateway, path: str) -> None:
    answer = gateway.http.get(path, follow_redirects=True)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_nothing_is_inline_and_nothing_is_from_elsewhere() -> None:
    assets = load_assets()
    page = assets["index.html"].content.decode()
    assert re.findall(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=|javascript:", page) == []
    addresses = re.findall(r"(?:src|href)=\"([^\"]*)\"", page)
    assert [address for address in addresses if not address.startswith(("/dashboard/", "#"))] == []
    assert {address.removeprefix("/dashboard/") for address in addresses if not address.startswith("#")} <= set(assets)
    foreign = rb"https?://(?!www\.w3\.org/)|innerHTML|\beval\("
    assert [name for name, asset in assets.items() if re.search(foreign, asset.content)] == []


def test_every_module_is_named_by_the_page() -> None:
    """Those found late, one after the other, would make loading slow."""
    assets = load_assets()
    page = assets["index.html"].content.decode()
    assert [name for name in assets if name.endswith(".js") and f"/dashboard/{name}" not in page] == []


def test_a_file_that_has_not_changed_is_not_sent_again(gateway: Gateway) -> None:
    for name in ("app.js", "style.css", "icon.svg"):
        answer = gateway.http.get(f"/dashboard/{name}")
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.content == load_assets()[name].content
        again = gateway.http.get(f"/dashboard/{name}", headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert gateway.http.head(f"/dashboard/{name}").headers["etag"] == answer.headers["etag"]


@pytest.mark.parametrize("name", ["routes.py", "__init__.py", "..%2fstatus.py", "none.js"])
def test_there_are_no_other_files(gateway: Gateway, name: str) -> None:
    assert gateway.http.get(f"/dashboard/{name}").status_code == 404


@pytest.mark.parametrize("path", ["/status/feed", "/status/receipts/some"])
def test_what_is_told_takes_the_key(gateway: Gateway, path: str) -> None:
    assert gateway.http.get(path).status_code == 401
    assert gateway.http.get(path, params={"key": ADMIN_KEY}).status_code == 401


def test_the_feed_is_the_status(gateway: Gateway) -> None:
    with gateway.operator.stream("GET", "/status/feed") as feed:
        assert feed.headers["content-type"].startswith("text/event-stream")
        assert feed.headers["cache-control"] == "no-store"
        event = first_event(feed)
    assert event["whole"]
    assert event["status"]["policy"] == gateway.status()["policy"]  # type: ignore[index]


def test_an_unknown_receipt_is_not_found(gateway: Gateway) -> None:
    assert gateway.operator.get("/status/receipts/none").status_code == 404


def test_who_leaves_is_watching_no_longer(gateway: Gateway) -> None:
    """That a client is gone shows when it is written to, which is a second later."""

    def watch() -> bool:
        with gateway.operator.stream("GET", "/status/feed") as feed:
            if feed.status_code == 200:
                assert first_event(feed)["whole"]
            return feed.status_code == 200

    for _ in range(WATCHERS_MAX + 8):
        watch()
    eventually(watch, "room for another watcher")


def test_who_does_not_read_keeps_nobody_from_watching(gateway: Gateway) -> None:
    request = f"GET /status/feed HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ADMIN_KEY}\r\n\r\n".encode()
    sleepers = [socket.create_connection((HOST, gateway.http.base_url.port or 0)) for _ in range(8)]
    for sleeper in sleepers:
        sleeper.sendall(request)
    with gateway.operator.stream("GET", "/status/feed") as feed:
        assert first_event(feed)["whole"]
    for sleeper in sleepers:
        sleeper.close()


def test_a_gateway_that_is_watched_stops_at_once(directory: Path) -> None:
    gateway = Gateway(directory, (), {"timeouts": {"shutdown_seconds": 60.0}}, "watched")
    with httpx.stream("GET", f"{gateway.url}/status/feed", trust_env=False, timeout=30) as feed:
        lines = feed.iter_lines()
        eventually(lambda: next(lines).startswith("data: "), "the first event")
        began = time.monotonic()
        gateway.stop()
        assert time.monotonic() - began < gateway.stop_seconds_max
        assert [line for line in lines if line.startswith("error")] == []


def test_top_shows_it_in_a_terminal(gateway: Gateway, directory: Path) -> None:
    key = ["--admin-key-file", str(directory / "dashboard.key")]
    for flags in (["--once"], ["--duration", "0.5"]):
        output = top(gateway.url, *flags, *key)
        assert "no worker takes requests" in output.stdout
        assert "\x1b" not in output.stdout
        assert output.returncode == 0


def test_top_says_what_it_lacks(gateway: Gateway) -> None:
    for url, said in ((gateway.url, "the admin key is needed"), ("http://127.0.0.1:1", "refused")):
        output = top(url, "--once")
        assert output.returncode == 1
        assert said in output.stderr
        assert len(output.stderr.splitlines()) == 1


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ropeway", "top", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)

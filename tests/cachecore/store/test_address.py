import ssl
from pathlib import Path

import pytest

from cachecore.store import RedisStore, parse_address
from cachecore.store.errors import Endpoint


@pytest.mark.parametrize(
    ("url", "kind", "endpoints", "rest"),
    [
        ("redis://localhost", "single", [("localhost", 6379)], (None, None, 0, None, False)),
        ("redis://[::1]:7000/3", "single", [("::1", 7000)], (None, None, 3, None, False)),
        ("rediss://ann:p%40ss%2F@h:1", "single", [("h", 1)], ("ann", "p@ss/", 0, None, True)),
        ("redis://:secret@h", "single", [("h", 6379)], (None, "secret", 0, None, False)),
        ("redis+cluster://a:1,b:2,[::1]:3", "cluster", [("a", 1), ("b", 2), ("::1", 3)], (None, None, 0, None, False)),
        ("rediss+cluster://u:p@a,b", "cluster", [("a", 6379), ("b", 6379)], ("u", "p", 0, None, True)),
        ("redis+sentinel://a,b:2/main", "sentinel", [("a", 26379), ("b", 2)], (None, None, 0, "main", False)),
        ("redis+sentinel://u:p@a/main/2", "sentinel", [("a", 26379)], ("u", "p", 2, "main", False)),
    ],
)
def test_urls(url: str, kind: str, endpoints: list[tuple[str, int]], rest: tuple[object, ...]) -> None:
    address = parse_address(url)
    assert (address.kind, address.path) == (kind, None)
    assert address.endpoints == tuple(Endpoint(host, port) for host, port in endpoints)
    assert (address.username, address.password, address.database, address.service, address.tls) == rest


def test_a_socket_is_named_by_its_path() -> None:
    address = parse_address("unix://ann:pw@/run/my%20redis.sock")
    assert (address.kind, address.endpoints, address.path) == ("single", (), "/run/my redis.sock")
    assert (address.username, address.password) == ("ann", "pw")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://h", "begins with redis://"),
        ("h:6379", "begins with redis://"),
        ("redis+swarm://h", "begins with redis://"),
        ("unix+cluster:///s", "begins with redis://"),
        ("unix://host/path", "absolute path"),
        ("unix:///", "absolute path"),
        ("redis://", "no host and port"),
        ("redis://h:99999", "no host and port"),
        ("redis://a,b", "several hosts"),
        ("redis://h/name", "number of a database"),
        ("redis://h/1/2", "number of a database"),
        ("redis+cluster://h/1", "no databases but 0"),
        ("redis+sentinel://h", "name of the master"),
        ("redis://ann@h", "a user without a password"),
        ("redis://:a#b@h", "%23"),
        ("redis://h?ca=/x", "begin the URL with rediss"),
        ("rediss://h?ca=/no/such/file", "there is no file"),
        (f"rediss://h?cert={__file__}", "both cert and key"),
    ],
)
def test_what_is_no_url_is_refused_with_the_reason(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("+", r"\+")):
        parse_address(url)


@pytest.mark.parametrize("key", ["timeout", "socket_timeout", "socket_connect_timeout", "retry_on_timeout", "db", "x"])
def test_a_url_cannot_undo_the_budgets(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key}.*timeouts and retries are the program's own"):
        parse_address(f"redis://h?{key}=60")


@pytest.mark.parametrize(
    "url",
    [
        "redis://ann:s3cret@h:1/2",
        "unix://:s3cret@/s",
        "rediss+cluster://ann:s3cret@h",
        "redis+sentinel://:s3cret@h/main",
    ],
)
def test_the_password_is_never_shown(url: str) -> None:
    address = parse_address(url)
    assert address.password == "s3cret"
    shown = [str(address), repr(address), repr(RedisStore(address))]
    assert not any("s3cret" in text for text in shown)
    assert str(address) == url.replace("s3cret", "***").replace("h/main", "h:26379/main").replace(
        "***@h", "***@h" if ":1" in url or "main" in url else "***@h:6379"
    )


def test_errors_never_repeat_the_password() -> None:
    for bad in (
        "redis://ann:s3cret@h:x",
        "redis://ann:s3cret@h?timeout=1",
        "redis+sentinel://:s3cret@h",
        "foo://:s3cret@h",
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is looked at below)
            parse_address(bad)
        assert "s3cret" not in str(caught.value)


def test_tls_always_checks_the_server() -> None:
    context = parse_address("rediss://h").tls_context()
    assert context is not None
    assert (context.check_hostname, context.verify_mode) == (True, ssl.CERT_REQUIRED)
    assert parse_address("redis://h").tls_context() is None


def test_a_certificate_that_is_none_is_said_so_at_once(tmp_path: Path) -> None:
    junk = tmp_path / "ca.crt"
    junk.write_text("no certificate")
    with pytest.raises(ValueError, match="its certificates cannot be used"):
        RedisStore(parse_address(f"rediss://h?ca={junk}"))

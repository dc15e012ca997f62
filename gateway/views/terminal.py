"""The `Status` document in a terminal: what `ropeway top` shows."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

RECEIPTS_SHOWN_MAX = 8
TROUBLE_SHOWN_MAX = 4
LINES_AROUND = 12
"""What stands above and below the workers, without the receipts."""


class Condition(NamedTuple):
    """How a worker is. The dashboard's rules are the same (`dashboard/worker.js`)."""

    rank: int
    """Worst first."""
    style: str
    word: str
    text: str


class Picture:
    """What a feed has told so far."""

    def __init__(self) -> None:
        self.status: dict[str, Any] = {}
        self.workers: dict[str, Any] = {}
        self.fields: list[str] = []
        self.sample: Sequence[float | None] = ()

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "Picture":
        """A whole document of `/status`."""
        picture = cls()
        picture.status = dict(document)
        picture.workers = {worker["name"]: worker for worker in document["workers"]}
        picture._take_samples(document["traffic"]["fields"], document["traffic"]["samples"])
        return picture

    def take(self, event: Mapping[str, Any]) -> None:
        """One event of the feed."""
        if event["whole"]:
            self.status, self.workers = {}, {}
        self.status |= event["status"]
        self.workers |= event["workers"]
        names = self.status["worker_names"]
        self.workers = {name: self.workers[name] for name in names if name in self.workers}
        self._take_samples(event.get("sample_fields", self.fields), event["samples"])

    def last(self, field: str) -> float | None:
        """Of the last sample."""
        return self.sample[self.fields.index(field)] if self.sample else None

    def _take_samples(self, fields: list[str], samples: Sequence[Sequence[float | None]]) -> None:
        self.fields = fields
        if samples:
            self.sample = samples[-1]


def render(picture: Picture, height: int | None, now: float) -> RenderableType:
    """`height`: lines there are; None for as many as it takes."""
    receipts = picture.status["receipts"][:RECEIPTS_SHOWN_MAX]
    rows = None if height is None else max(3, height - LINES_AROUND - 2 * len(receipts))
    parts: list[RenderableType] = [_head(picture, now), _numbers(picture), *_trouble(picture), Text()]
    parts.append(_workers(picture, rows))
    if receipts:
        parts += [Text(), Text("Route receipts", style="bold"), *map(_receipt, receipts)]
    return Group(*parts)


def condition(worker: Mapping[str, Any]) -> Condition:
    trust = worker["trust"]
    if not worker["healthy"]:
        return Condition(0, "bold red", "unwell", worker["reason"] or "unhealthy")
    if trust["alarm"]:
        return Condition(0, "bold red", "silent", "answers requests, but nothing comes from its event stream")
    if worker["draining"]:
        return Condition(2, "dim", "draining", f"{worker['inflight']} requests left")
    if worker["parity"] == "failed":
        return Condition(1, "yellow", "parity", worker["parity_reason"] or "tokenizes other than we do")
    if trust["followed"] and trust["level"] != "exact":
        reasons = "; ".join(doubt["reason"] for doubt in trust["doubts"])
        return Condition(1, "yellow", "doubted", reasons or f"its events are believed as {trust['level']} only")
    return Condition(3, "green", "busy" if worker["inflight"] else "well", "takes requests")


def _head(picture: Picture, now: float) -> Text:
    status = picture.status
    well = sum(worker["healthy"] for worker in picture.workers.values())
    state = Text("ready", "green") if status["ready"] else Text("no worker takes requests", "bold red")
    facts = f"  {status['policy']}, up {_duration(now - status['started_at'])}, {status['version']}, "
    return Text.assemble(("Ropeway", "bold"), facts, f"{well} of {len(picture.workers)} workers healthy, ", state)


def _numbers(picture: Picture) -> Text:
    requests, tokens, ttft = (picture.status[name] for name in ("requests", "tokens", "ttft_ms"))
    moved = (picture.status["transfers"] or {}).get("moved") or {}
    found = tokens["matched"] / tokens["prompt"] if tokens["prompt"] else None
    rate = picture.last("requests_per_second")
    said = [
        ("requests/s", "-" if rate is None else f"{rate:.1f}"),
        ("in flight", f"{requests['inflight']:,}"),
        ("failed", f"{requests['errors']:,}"),
        ("refused", f"{requests['refused']:,}"),
        ("found", "-" if found is None else f"{found:.0%}"),
        ("TTFT p50", _milliseconds(ttft["p50"])),
        ("p99", _milliseconds(ttft["p99"])),
    ]
    if moved.get("pulled_bytes"):
        said.append(("KV moved", f"{moved['pulled_bytes'] / 1e6:,.0f} MB"))
    return Text("  ").join(Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in said)


def _trouble(picture: Picture) -> Iterator[Text]:
    sick = sorted((condition(worker), name) for name, worker in picture.workers.items())
    sick = [(found, name) for found, name in sick if found.rank < 2]
    for found, name in sick[:TROUBLE_SHOWN_MAX]:
        yield Text(f"! {name}: {found.text}", found.style, overflow="ellipsis", no_wrap=True)
    if len(sick) > TROUBLE_SHOWN_MAX:
        yield Text(f"! and {len(sick) - TROUBLE_SHOWN_MAX} more", "yellow")


def _workers(picture: Picture, rows: int | None) -> Table:
    """The worst first, then the busiest."""
    table = Table(box=None, pad_edge=False, header_style="dim", show_edge=False)
    table.add_column("worker", no_wrap=True, overflow="ellipsis", min_width=12)
    table.add_column("state", no_wrap=True)
    for name in ("in flight", "wait", "KV", "L0", "L1", "served", "failed"):
        table.add_column(name, justify="right", no_wrap=True)
    ordered = sorted(picture.workers.values(), key=lambda worker: (condition(worker).rank, -worker["inflight"]))
    shown = ordered if rows is None else ordered[:rows]
    for worker in shown:
        table.add_row(*_row(worker))
    if len(shown) < len(ordered):
        table.add_row(f"and {len(ordered) - len(shown)} more", style="dim")
    return table


def _row(worker: Mapping[str, Any]) -> Iterator[str | Text]:
    found, cached, capacity = condition(worker), worker["cached_tokens"], worker["capacity_requests"]
    yield worker["name"]
    yield Text(found.word, found.style)
    yield f"{worker['inflight']}/{capacity}" if capacity else f"{worker['inflight']}"
    yield f"{worker['waiting']}"
    yield _fill(worker)
    yield from (_compact(cached[tier]) if cached else "-" for tier in ("l0", "l1"))
    yield f"{worker['requests']:,}"
    yield f"{worker['failures']:,}"


def _fill(worker: Mapping[str, Any]) -> str:
    if not worker["kv_tokens"]:
        return "-"
    cached = worker["cached_tokens"]
    return f"{min(cached['l0'] / worker['kv_tokens'], 1.0) if cached else worker['kv_fill']:.0%}"


def _receipt(receipt: Mapping[str, Any]) -> Text:
    at = time.strftime("%H:%M:%S", time.localtime(receipt["decided_at"]))
    return Text.assemble((f"{at} ", "dim"), receipt["words"])


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} ms"


def _compact(count: float) -> str:
    for unit in ("", "K", "M"):
        if count < 1000:
            return f"{count:.0f}{unit}" if not unit or count >= 10 else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f}G"


def _duration(seconds: float) -> str:
    for unit, name, limit in ((1, "s", 90), (60, "min", 5400), (3600, "h", 172_800)):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86_400:.0f} days"

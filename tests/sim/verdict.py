"""Whether a history kept the contract: what each client got, held beside what it sent and what the workers said."""

import json

from tests.sim.answers import USAGE, Answer, Fault, Framing
from tests.sim.clients import CLOSING, STATUSES, Asked, Client, Leaving, Sort
from tests.sim.workers import Served
from tests.sim.world import World

ATTEMPTS_MAX = 3
TOLD_SECONDS_MAX = 1.0
"""A worker hears that its client has gone."""
_OWN_KEYS = {"cache_salt", "stream_options", "priority"}
_PASSED_OVER = {429, 503}
"""Statuses of workers' answers that another worker may be asked after."""
_OWN_STATUSES = {429, 502, 503, 504}
"""Of answers that the gateway gives when a sound request could not be served."""


def judge(world: World) -> list[str]:
    """Everything that was not as it must be."""
    found = list(world.watch.violations)
    served: dict[str, list[Served]] = {}
    for worker in world.workers:
        found += worker.complaints
        for one in worker.served:
            served.setdefault(one.marker, []).append(one)
    for client in world.clients:
        found += client.complaints
        for index, asked in enumerate(client.requests):
            attempts = _attempts(asked, served.pop(asked.marker, []))
            found += [f"{asked.marker}: {what}" for what in _judge(world, client, index, attempts)]
    found += [f"served, and never asked: {marker}" for marker in served]
    for journey in world.watch.journeys:
        if len(journey.endings) != 1:
            found.append(f"{journey.marker}: ended {journey.endings}")
    return found


def _attempts(asked: Asked, served: list[Served]) -> list[Served]:
    """In their order, but the one that the answer says it came from last."""
    named = asked.headers.get(b"x-ropeway-worker", b"").decode()
    return sorted(served, key=lambda one: (one.worker == named, one.came_at))


def _judge(world: World, client: Client, index: int, attempts: list[Served]) -> list[str]:
    asked = client.requests[index]
    found = _upstream(world, asked, attempts)
    found += _told(client, asked, attempts)
    if asked.status is None:
        if not _may_be_nothing(world, client, index, attempts):
            found.append("no answer at all")
    elif asked.complete:
        found += _complete(world, client, asked, attempts)
    else:
        found += _incomplete(world, client, index, attempts)
    return found


def _upstream(world: World, asked: Asked, attempts: list[Served]) -> list[str]:
    """What workers were sent, and how often."""
    found = []
    if attempts and asked.sort is not Sort.GOOD:
        found.append(f"a request that is to be refused ({asked.sort}) reached a worker")
    if len(attempts) > ATTEMPTS_MAX * world.watch.legs_max:
        found.append(f"{len(attempts)} attempts")
    for one in attempts:
        if _own(one.document) != _own(asked.document):
            found.append(f"a worker was sent {one.document}, not {asked.document}")
    for one in attempts[:-1] if world.watch.legs_max == 1 else ():
        if one.sent and not (one.lost or one.answer.fault is Fault.RESET or one.answer.status in _PASSED_OVER):
            found.append("tried again after a worker had begun to answer")
    return found


def _own(document: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in document.items() if key not in _OWN_KEYS}


def _told(client: Client, asked: Asked, attempts: list[Served]) -> list[str]:
    """A worker must not go on for a client that has gone, where that could be known."""
    left_at = client.left_at
    if left_at is None or client.habits.leaving is Leaving.HALF:
        return []
    knowable = client.end.resets or (asked.status is None and not client.habits.http10)
    late = [one for one in attempts if one.ended_at is None or one.ended_at > left_at + TOLD_SECONDS_MAX]
    if knowable and late:
        return [f"worker {late[0].worker} was not told that its client left at {left_at:.3f}"]
    return []


def _may_be_nothing(world: World, client: Client, index: int, attempts: list[Served]) -> bool:
    asked = client.requests[index]
    if client.left_at is not None or world.shut_down or not asked.sent:
        return True
    if asked.sent_at is None and client.half_left_at is not None:
        return True
    if any(_closes(client, earlier) for earlier in client.requests[:index]):
        return True
    # A reset may destroy what came before it.
    return _wrote_on(client, index) or (
        client.habits.http10 and client.reset and bool(attempts) and _broken(attempts[-1])
    )


def _wrote_on(client: Client, index: int) -> bool:
    """Whoever writes on behind an answer that closes the connection has it reset by its own bytes."""
    return client.reset and any(later.sent for later in client.requests[index + 1 :])


def _closes(client: Client, asked: Asked) -> bool:
    """Whether nothing can be answered after this one."""
    says_so = asked.headers.get(b"connection", b"").lower() == b"close"
    return not asked.complete or says_so or not client.habits.keep_alive or asked.sort in CLOSING


def _complete(world: World, client: Client, asked: Asked, attempts: list[Served]) -> list[str]:
    if asked.status == 408 and asked.sent_at is None and client.half_left_at is not None:
        return _own_error(asked, {408})
    if asked.sort is Sort.COLD:
        return [] if (asked.status, _cold(asked)) == (200, asked.document) else [f"cold: {asked.status}"]
    if client.habits.http10 and _without_error(asked.content)[1]:
        # It knows no other end than the connection's.
        return _incomplete(world, client, client.requests.index(asked), attempts)
    if asked.sort is not Sort.GOOD:
        right = STATUSES[asked.sort] if asked.sort is not Sort.BAD_CHUNK or not client.habits.http10 else 400
        return _own_error(asked, {right} | ({503} if world.shut_down else set()))
    last = attempts[-1] if attempts else None
    if (
        last is not None
        and asked.status == last.answer.status
        and _plain(client, asked.content) == _expected(client, asked, last)
    ):
        return [] if _really_ended(last) else ["a normal end of an answer that was broken off"]
    return _own_error(asked, _OWN_STATUSES)


def _cold(asked: Asked) -> object:
    try:
        return json.loads(asked.content)
    except ValueError:
        return None


def _own_error(asked: Asked, statuses: set[int]) -> list[str]:
    if asked.status not in statuses:
        return [f"answered {asked.status} {asked.content[:300]!r}, which is neither a worker's nor one of {statuses}"]
    try:
        error = json.loads(asked.content)["error"]
        sound = bool(error["message"]) and {"type", "param", "code"} <= error.keys()
    except (ValueError, KeyError, TypeError):
        sound = False
    if not sound or not asked.headers.get(b"x-request-id"):
        return [f"an error of another form: {asked.content[:300]!r} {asked.headers}"]
    return []


def _really_ended(served: Served) -> bool:
    answer = served.answer
    if answer.framing is not Framing.CLOSE:
        return served.sent >= _content_end(answer)
    if answer.fault is None and served.sent >= len(answer.wire):
        return True
    # Nobody can tell that an answer goes on whose end is the connection's, and that stops where one may.
    sent = answer.wire[answer.head_bytes : served.sent]
    if answer.streams:
        ends = sent.endswith((b"\n\n", b"\r\n\r\n")) or sent.rstrip().endswith(b"[DONE]")
    else:
        ends = sent.rstrip().endswith((b"}", b"]"))
    return answer.fault in (None, Fault.CLOSE) and ends


def _content_end(answer: Answer) -> int:
    """Bytes on the wire by which the body has ended."""
    return len(answer.wire) - (len(b"HTTP/1.1 200 OK\r\n") if answer.surplus else 0)


def _incomplete(world: World, client: Client, index: int, attempts: list[Served]) -> list[str]:
    asked, found = client.requests[index], []
    # Its own time may end within the answer.
    bounded = world.climate.total_seconds is not None
    excused = bounded or client.left_at is not None or world.shut_down or _wrote_on(client, index)
    if not attempts or b"x-ropeway-worker" not in asked.headers:
        if not excused:
            found.append(f"half an answer of the gateway's own: {asked.status} {asked.content[:200]!r}")
        return found
    last = attempts[-1]
    if not excused and not _broken(last):
        found.append(f"cut off, though the worker was not: {last.answer.framing} {last.sent}/{len(last.answer.wire)}")
    got, told = _without_error(asked.content)
    if not _expected(client, asked, last, whole=True).startswith(_plain(client, got)):
        found.append(f"forged: {asked.content!r} is no beginning of {last.answer.content!r}")
    if told and not (asked.streams and last.answer.streams):
        found.append("an error event in what is no event stream")
    return found


def _broken(served: Served) -> bool:
    answer = served.answer
    stalls = answer.fault is Fault.STALL
    return not answer.whole or served.lost or stalls or answer.fault is Fault.RESET


def _without_error(content: bytes) -> tuple[bytes, bool]:
    """What came before the gateway's own error event."""
    start = content.rfind(b'data: {"error":')
    if start < 0 or not content.endswith(b"\n\n"):
        return content, False
    return content[:start], True


def _expected(client: Client, asked: Asked, served: Served, whole: bool = False) -> bytes:
    """What a client should get of an answer; of one that was broken off where nobody can tell: of what came."""
    answer = served.answer
    content = answer.content
    if answer.framing is Framing.CLOSE and not whole:
        content = content[: max(served.sent - answer.head_bytes, 0)]
    options = served.document.get("stream_options")
    asked_for_us = not asked.wants_usage and isinstance(options, dict) and options.get("include_usage")
    if asked_for_us and answer.streams and answer.framing is not Framing.LENGTH:
        usage = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode()
        for end in (b"\r\n\r\n", b"\n\n"):
            content = content.replace(usage + end, b"")
    return content


def _plain(client: Client, content: bytes) -> bytes:
    """Without the comments by which a half-closed client is asked whether it is still there."""
    return content.replace(b":\n\n", b"") if client.half_left_at is not None else content

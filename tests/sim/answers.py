"""What simulated workers answer: every framing, every kind of body, whole or broken at any byte, drawn from a seed."""

import json
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any


class Framing(StrEnum):
    LENGTH = "length"
    CHUNKED = "chunked"
    CLOSE = "close"
    """The end of the connection is the body's."""
    NONE = "none"
    """No HTTP at all, or such as must be refused."""


class Fault(StrEnum):
    """How the worker breaks an answer off."""

    CLOSE = "close"
    RESET = "reset"
    STALL = "stall"


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    framing: Framing
    content: bytes
    """What a client should get of it, byte for byte."""
    wire: bytes
    head_bytes: int
    """Up to the blank line of the final head."""
    streams: bool = False
    fault: Fault | None = None
    stop: int = 0
    """Bytes on the wire before the fault."""
    sound: bool = True
    """It keeps HTTP's framing to its end."""
    keep_alive: bool = True
    surplus: bool = False
    """More comes than the answer has."""

    @property
    def whole(self) -> bool:
        """Whether the last byte of the content comes, in sound framing."""
        return self.sound and (self.fault is None or self.stop >= len(self.wire))

    @property
    def begins(self) -> bool:
        """Whether a whole head comes."""
        return self.framing is not Framing.NONE and (self.fault is None or self.stop >= self.head_bytes)


USAGE = {"prompt_tokens": 40, "completion_tokens": 3, "total_tokens": 43}


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n" % (len(data), extension, data)


def _document(random: Random, marker: str) -> bytes:
    words = f"{marker}:" + "w" * int(random.expovariate(1 / 300))
    message = {"role": "assistant", "content": words}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    return json.dumps({"id": marker, "choices": choices, "usage": USAGE}).encode()


def _event(document: Any, end: bytes) -> bytes:
    return b"data: " + json.dumps(document).encode() + end


def _events(random: Random, marker: str, usage: bool) -> list[bytes]:
    end = b"\r\n\r\n" if random.random() < 0.15 else b"\n\n"
    events = [_event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}, end)]
    for number in range(random.choice((0, 1, 3, 8, 20))):
        text = f"{marker}.{number} " * random.choice((1, 1, 1, 40))
        events.append(_event({"choices": [{"index": 0, "delta": {"content": text}}]}, end))
        if random.random() < 0.1:
            events.append(b": keep-alive" + end)
    events.append(_event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, end))
    if usage:
        events.append(_event({"choices": [], "usage": USAGE}, end))
    events.append(b"data: [DONE]" + end)
    return events


def _head(random: Random, status: int, fields: list[bytes], keep_alive: bool) -> bytes:
    interim = b"HTTP/1.1 102 Processing\r\nx-wait: 1\r\n\r\n" if random.random() < 0.05 else b""
    lines = [b"HTTP/1.1 %d %b" % (status, random.choice((b"OK", b"Whatever", b""))), *fields]
    lines += [b"Server: engine", b"X-Request-Id: other"]
    if not keep_alive:
        lines.append(b"Connection: close")
    return interim + b"\r\n".join(lines) + b"\r\n\r\n"


def _body(random: Random, framing: Framing, pieces: list[bytes]) -> bytes:
    if framing is not Framing.CHUNKED:
        return b"".join(pieces)
    if random.random() < 0.2:
        # Chunks that know nothing of events.
        whole, pieces = b"".join(pieces), []
        while whole:
            size = random.randint(1, 200)
            pieces.append(whole[:size])
            whole = whole[size:]
    extension = b";name=value" if random.random() < 0.05 else b""
    trailer = b"X-Sum: 1\r\n" if random.random() < 0.05 else b""
    return b"".join(chunk(piece, extension) for piece in pieces if piece) + b"0\r\n" + trailer + b"\r\n"


def _good(random: Random, marker: str, streams: bool, usage: bool) -> Answer:
    if random.random() < 0.08:
        return _refusal(random, marker)
    framing = random.choices([Framing.LENGTH, Framing.CHUNKED, Framing.CLOSE], [2, 3, 1])[0]
    if streams:
        framing = random.choices([Framing.CHUNKED, Framing.CLOSE, Framing.LENGTH], [8, 2, 1])[0]
    pieces = _events(random, marker, usage) if streams else [_document(random, marker)]
    keep_alive = framing is not Framing.CLOSE and random.random() < 0.85
    fields = [b"Content-Type: text/event-stream" if streams else b"Content-Type: application/json"]
    content = b"".join(pieces)
    if framing is Framing.LENGTH:
        fields.append(b"Content-Length: %d" % len(content))
    elif framing is Framing.CHUNKED:
        fields.append(b"Transfer-Encoding: chunked")
    head = _head(random, 200, fields, keep_alive)
    body = _body(random, framing, pieces)
    return Answer(200, framing, content, head + body, len(head), streams, keep_alive=keep_alive)


def _refusal(random: Random, marker: str) -> Answer:
    status = random.choice((400, 404, 422, 429, 500, 503))
    content = json.dumps({"error": {"message": f"{marker} refused", "type": "x", "param": None, "code": None}}).encode()
    head = _head(random, status, [b"Content-Type: application/json", b"Content-Length: %d" % len(content)], True)
    return Answer(status, Framing.LENGTH, content, head + content, len(head))


_NO_HTTP = (
    b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    b"HTTP/1.1 2000 OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length : 3\r\n\r\nabc",
    b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nX-A: 1\r\n folded\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nX-Filler: " + b"x" * 70_000,
)


def _malformed(random: Random, good: Answer) -> Answer:
    if random.random() < 0.5 or good.framing is not Framing.CHUNKED:
        wire = random.choice(_NO_HTTP)
        return Answer(200, Framing.NONE, b"", wire, len(wire), good.streams, Fault.STALL, len(wire), sound=False)
    # A chunk header that is none, at a chunk's place.
    body = good.wire[good.head_bytes :]
    ends = [0]
    while ends[-1] < len(body):
        line = body.index(b"\r\n", ends[-1])
        size = int(body[ends[-1] : line].partition(b";")[0], 16)
        if not size:
            break
        ends.append(line + 2 + size + 2)
    at = good.head_bytes + random.choice(ends)
    wire = (
        good.wire[:at] + random.choice((b"zz\r\n", b"-1\r\n", b"\r\n\r\n", b"11111111111111111\r\n")) + good.wire[at:]
    )
    return Answer(200, Framing.CHUNKED, good.content, wire, good.head_bytes, good.streams, sound=False)


def draw(random: Random, marker: str, streams: bool, usage: bool, faults: float, stalls: bool) -> Answer:
    """An answer, broken with a probability of `faults`."""
    answer = _good(random, marker, streams, usage)
    fields = {name: getattr(answer, name) for name in answer.__dataclass_fields__}
    if random.random() < 0.02 and answer.framing is not Framing.CLOSE:
        return Answer(**{**fields, "wire": answer.wire + b"HTTP/1.1 200 OK\r\n", "surplus": True})
    if random.random() >= faults:
        return answer
    if random.random() < 0.2:
        return _malformed(random, answer)
    stop = random.choice((0, 0, random.randrange(answer.head_bytes), random.randrange(len(answer.wire) + 1)))
    fault = random.choice(list(Fault) if stalls else [Fault.CLOSE, Fault.RESET])
    return Answer(**{**fields, "fault": fault, "stop": stop})

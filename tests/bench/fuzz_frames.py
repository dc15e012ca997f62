"""Fuzz everything that parses bytes of others: frames, messages, capabilities, plans.

    PYTHONPATH=. .venv/bin/python tests/bench/fuzz_frames.py [--seconds 600] [--seed N]

What is fed is damaged at random, and also damaged and then authenticated anew, as somebody with the tenant's key could:
so that what lies behind the MAC is reached. Every input must end in a TransferError or in exactly what was sealed. The
process may grow by the limits it has declared and no more. A failure prints the seed that makes it again.
"""

import argparse
import base64
import gc
import itertools
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cachecore.scope import Fidelity
from cachecore.transfer.capability import read_capability
from cachecore.transfer.errors import TransferError
from cachecore.transfer.frames import Frame, FrameLimits, FrameReader, FrameWriter, open_frame
from cachecore.transfer.header import FrameHeader, Span
from cachecore.transfer.mac import NONCE_BYTES, TAG_BYTES, FrameSecrets
from cachecore.transfer.plan import Grant, read_plan, sign
from cachecore.transfer.tcp.messages import MESSAGE_HEAD, Kind, MessageHead, RequestBody
from cachecore.transfer.transport import Wanted
from tests.cachecore.transfer.world import ACME, HEADER, KEYRING, TARGET, make_plan

LIMITS = FrameLimits(payload_bytes_max=8 << 20)
GROWTH_BYTES_MAX = 4 * LIMITS.payload_bytes_max + (16 << 20)
"""A payload being read, the input twice (sealed by this process), the last one handed over, and the allocator's own."""
EXTREMES = (
    b"\x00" * 4,
    b"\xff" * 4,
    b"\x01\x00\x00\x00",
    b"\x00\x00\x00\x80",
    b"\xff\xff\xff\x7f",
    b"\xff\xff\x00\x00",
)
NOW = 1_800_000_000.0
KEY_OF = KEYRING.frame_key
LONG = memoryview(bytes(LIMITS.payload_bytes_max + 2))


def damage(data: bytes, random: Random) -> bytes:
    """A few of: flipped bits, numbers at their ends, pieces cut out, doubled, or of noise, and an early end."""
    changed = bytearray(data)
    for _ in range(random.randrange(1, 5)):
        if not changed:
            break
        at = random.randrange(len(changed))
        match random.randrange(6):
            case 0:
                changed[at] ^= 1 << random.randrange(8)
            case 1:
                changed[at : at + 4] = random.choice(EXTREMES)
            case 2:
                del changed[at : at + random.randrange(1, 40)]
            case 3:
                changed[at:at] = changed[at : at + random.randrange(1, 40)]
            case 4:
                changed[at : at + 8] = random.randbytes(8)
            case 5:
                del changed[at:]
    return bytes(changed)


def some_header(random: Random) -> FrameHeader:
    layers = random.randrange(1, 5)
    return HEADER._replace(
        layers=Span(random.randrange(4), layers, 9),
        layer_bytes=tuple(random.randrange(300) for _ in range(layers)),
        fidelity=random.choice(list(Fidelity)),
        with_tokens=random.random() < 0.3,
    )


def some_frame(random: Random) -> bytes:
    header = some_header(random)
    return b"".join(FrameWriter(KEY_OF).seal(header, [random.randbytes(header.payload_bytes)]))


def authenticate_anew(frame: bytes, header_size: int) -> bytes:
    """The frame with a head tag that matches its damaged header."""
    unsigned = frame[: header_size + NONCE_BYTES]
    tag = FrameSecrets.derive(KEY_OF(ACME), unsigned).head_tag
    return unsigned + tag + frame[len(unsigned) + TAG_BYTES :]


def feed(data: bytes, random: Random) -> list[Frame]:
    reader, found, at = FrameReader(KEY_OF, LIMITS), [], 0
    try:
        while at < len(data):
            step = random.choice((1, 5, 64, 1 << 20)) if len(data) < 1 << 20 else 1 << 20
            found += reader.feed(data[at : at + step])
            at += step
    except TransferError:
        pass
    return found


def fuzz_stream(random: Random) -> None:
    originals = [some_frame(random) for _ in range(random.randrange(1, 4))]
    for frame in feed(damage(b"".join(originals), random), random):
        if b"".join(frame.sealed) not in originals:
            raise AssertionError(f"a frame that was not sealed: {frame.header}")


def fuzz_signed_header(random: Random) -> None:
    """Whoever has the key may write any header; none may make the reader fail otherwise, or allocate too much."""
    frame = some_frame(random)
    size = 7 + int.from_bytes(frame[5:7], "little")
    header = damage(frame[7:size], random)[:0xFFFF]
    size = 7 + len(header)
    frame = authenticate_anew(
        frame[:5] + len(header).to_bytes(2, "little") + header + random.randbytes(NONCE_BYTES + TAG_BYTES + 600), size
    )
    for found in feed(frame, random):
        if found.header.payload_bytes > LIMITS.payload_bytes_max:
            raise AssertionError("a payload beyond the limit")
        raise AssertionError("a payload of noise that authenticates")


def fuzz_limit(random: Random) -> None:
    """Payloads around the limit: what is within it comes out, what is not costs no memory."""
    if random.random() > 0.01:
        return
    size = LIMITS.payload_bytes_max + random.randrange(-2, 3)
    header = HEADER._replace(layer_bytes=(size,))
    frame = b"".join(FrameWriter(KEY_OF).seal(header, [LONG[:size]]))
    found = feed(frame, Random(3))
    if [one.header for one in found] != [header][: size <= LIMITS.payload_bytes_max]:
        raise AssertionError(f"a payload of {size} bytes at a limit of {LIMITS.payload_bytes_max}")


def fuzz_whole(random: Random) -> None:
    original = some_frame(random)
    data = damage(original, random)
    try:
        frame = open_frame(data, KEY_OF, LIMITS)
    except TransferError:
        return
    if b"".join(frame.sealed) != original:
        raise AssertionError("a frame that was not sealed")


def fuzz_header(random: Random) -> None:
    data = damage(some_header(random).encode(), random)
    try:
        header = FrameHeader.decode(data)
    except TransferError:
        return
    if header.encode() != data:
        raise AssertionError("a header that parses two ways")


def fuzz_messages(random: Random) -> None:
    with suppress(TransferError):
        MessageHead.decode(damage(MessageHead(Kind.FRAME, 9).encode() * 2, random)[: MESSAGE_HEAD.size].ljust(8), *Kind)
    wanted = Wanted(b"C" * 16, Span.all(30), 1, Span.all(3), random.random() < 0.5)
    body = RequestBody(wanted, "rwc1." + "A" * random.randrange(200), random.randbytes(32))
    data = damage(body.encode(), random)
    try:
        read_back = RequestBody.decode(data)
    except TransferError:
        return
    if read_back.encode() != data:
        raise AssertionError("a request that parses two ways")


def fuzz_capability(random: Random) -> None:
    token = sign(make_plan(), Grant(ACME, TARGET, Fidelity.EXACT, NOW + 1), KEYRING)["capability"]
    data = damage(base64.urlsafe_b64decode(token[5:] + "=" * (-len(token[5:]) % 4)), random)
    texts = (
        "rwc1." + base64.urlsafe_b64encode(data).rstrip(b"=").decode(),
        damage(token.encode(), random).decode("utf-8", "surrogateescape"),
    )
    for text in texts:
        try:
            read_capability(text, KEYRING, NOW)
        except TransferError:
            continue
        if text != token:
            raise AssertionError(f"a capability that was not minted: {text}")


def fuzz_plan(random: Random) -> None:
    plan = make_plan()
    document = sign(plan, Grant(ACME, TARGET, Fidelity.EXACT, NOW + 1), KEYRING)
    try:
        value = json.loads(damage(json.dumps(document).encode(), random))
    except ValueError:
        return
    try:
        pull = read_plan(value, KEYRING, TARGET, NOW)
    except TransferError:
        return
    if pull.plan != plan:
        raise AssertionError(f"a plan that was not signed: {value}")


TARGETS: tuple[Callable[[Random], None], ...] = (
    fuzz_stream,
    fuzz_signed_header,
    fuzz_limit,
    fuzz_whole,
    fuzz_header,
    fuzz_messages,
    fuzz_capability,
    fuzz_plan,
)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32, help="of the first input")
    arguments = parser.parse_args()
    for target in TARGETS:
        target(Random(0))
    gc.collect()
    before, ends_at = peak_bytes(), time.monotonic() + arguments.seconds
    done: Counter[str] = Counter()
    for seed in itertools.count(arguments.seed):
        if time.monotonic() > ends_at:
            break
        for target in TARGETS:
            try:
                target(Random(seed))
            except Exception:
                print(f"{target.__name__} failed; again with --seed {seed}")
                raise
            done[target.__name__] += 1
    growth = peak_bytes() - before
    print(f"{sum(done.values())} inputs in {arguments.seconds:g} s from seed {arguments.seed}: {dict(done)}")
    print(f"grew by {growth / 1e6:.1f} MB; allowed: {GROWTH_BYTES_MAX / 1e6:.1f} MB")
    if growth > GROWTH_BYTES_MAX:
        sys.exit("more memory than the limits allow")


if __name__ == "__main__":
    main()

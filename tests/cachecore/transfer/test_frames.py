"""Frames: their bytes, an independent GMAC, and that nothing comes out that was not sealed."""

import hashlib
import hmac
import struct
import tracemalloc
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachecore.blocks import PrefixHash
from cachecore.scope import Fidelity, KeyId, TenantId
from cachecore.transfer import frames
from cachecore.transfer.errors import ForgedFrame, FrameError, Reason
from cachecore.transfer.frames import (
    HEAD_BYTES_MAX,
    PIECE_BYTES,
    Frame,
    FrameLimits,
    FrameReader,
    FrameWriter,
    open_frame,
)
from cachecore.transfer.header import LAYERS_MAX, FrameHeader, Span
from tests.cachecore.transfer.world import HEADER, KEYRING, RIVAL, STRANGERS, TOKENS, layer_payload

KEY_OF = KEYRING.frame_key
PAYLOAD = layer_payload(0)


def sealed(header: FrameHeader = HEADER, payload: bytes = PAYLOAD, number: int = 0) -> bytes:
    writer = FrameWriter(KEY_OF, lambda size: bytes([number]) * size)
    return b"".join(writer.seal(header, [payload]))


def sized(size: int, **changes: object) -> FrameHeader:
    return HEADER._replace(layer_bytes=(size,), **changes)  # type: ignore[arg-type]


def read(data: bytes, step: int = 1 << 30, **options: object) -> list[Frame]:
    reader = FrameReader(KEY_OF, **options)  # type: ignore[arg-type]
    found = [frame for start in range(0, len(data), step) for frame in reader.feed(data[start : start + step])]
    assert reader.idle
    return found


# ---- what the bytes are ----------------------------------------------------------------------------------------------


def test_a_header_on_the_wire() -> None:
    fixed = struct.pack(
        "<16s16s16s16s5I8H5B", b"C" * 16, b"S" * 16, b"p" * 16, b"t" * 16,
        0, 2, 3, 4, 8, 0, 1, 6, 0, 2, 2, 8, 8, 0, 0, 4, 8, 3,
    )  # fmt: skip
    body = fixed + b"acme" + b"bfloat16" + b"raw" + struct.pack("<I", 768)
    assert HEADER.encode() == b"RWKF\x01" + struct.pack("<H", len(body)) + body


def test_a_frame_on_the_wire() -> None:
    data = sealed()
    assert len(data) == 131 + 32 + 768 + 16
    assert hashlib.sha256(data).hexdigest() == "8c7504ae536d37972bb5ad073a6ca44fa4f7535270e5d970865d67bfd9062001"


def test_a_frame_by_an_independent_hand() -> None:
    """Poly1305 as RFC 8439 writes it down, in integers."""
    for size in (0, 1, 16, 100, 768):
        payload = PAYLOAD[:size]
        data = sealed(sized(size), payload)
        end = len(data) - size - 16
        unsigned, head_tag = data[: end - 16], data[end - 16 : end]
        frame_key = hmac.new(bytes(range(32)), b"frame\x00\x00\x00\x00acme", hashlib.sha256).digest()
        secret = hashlib.blake2b(unsigned, digest_size=48, key=frame_key, person=b"ropeway.frame.v1").digest()
        assert head_tag == secret[32:]
        assert data[-16:] == poly1305(secret[:32], payload)


def poly1305(key: bytes, data: bytes) -> bytes:
    factor = int.from_bytes(key[:16], "little") & 0x0FFFFFFC0FFFFFFC0FFFFFFC0FFFFFFF
    total = 0
    for start in range(0, len(data), 16):
        total = (total + int.from_bytes(data[start : start + 16] + b"\1", "little")) * factor % (2**130 - 5)
    return ((total + int.from_bytes(key[16:], "little")) % 2**128).to_bytes(16, "little")


def test_poly1305_as_in_its_standard() -> None:
    """RFC 8439, section 2.5.2."""
    key = bytes.fromhex("85d6be7857556d337f4452fe42d506a80103808afb0db2fd4abff6af4149f51b")
    assert poly1305(key, b"Cryptographic Forum Research Group").hex() == "a8061dc1305136c6c22b8baf0c0127a9"


# ---- what comes out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 7, 16, 1 << 20])
def test_frames_come_out_as_they_went_in(step: int) -> None:
    headers = [HEADER, sized(0), sized(5), HEADER._replace(layers=Span(2, 2, 6), layer_bytes=(100, 668))]
    payloads = [PAYLOAD[: header.payload_bytes] for header in headers]
    data = b"".join(map(sealed, headers, payloads, range(4)))
    found = read(data, step)
    assert [frame.header for frame in found] == headers
    assert [bytes(frame.payload) for frame in found] == payloads
    assert b"".join(bytes(part) for frame in found for part in frame.sealed) == data


def test_a_payload_of_many_pieces() -> None:
    size = 2 * PIECE_BYTES + 17
    payload = Random(3).randbytes(size)
    data = b"".join(FrameWriter(KEY_OF).seal(sized(size), [payload[:1000], payload[1000:]]))
    (frame,) = read(data, PIECE_BYTES - 1)
    assert frame.payload == payload == open_frame(data, KEY_OF).payload


def test_layers_and_tokens() -> None:
    header = HEADER._replace(layers=Span(4, 2, 6), layer_bytes=(3, 5), with_tokens=True)
    frame = open_frame(sealed(header, b"aaabbbbb" + TOKENS), KEY_OF)
    assert [(layer, bytes(part)) for layer, part in frame.layer_payloads()] == [(4, b"aaa"), (5, b"bbbbb")]
    assert frame.token_ids == TOKENS
    assert bytes(open_frame(sealed(), KEY_OF).token_ids) == b""


def test_payload_parts_are_not_copied() -> None:
    part = memoryview(bytearray(PAYLOAD))
    _, piece, _ = FrameWriter(KEY_OF).seal(HEADER, [part])
    part[0] ^= 1
    assert piece == part


def test_an_opened_frame_shares_the_memory() -> None:
    data = bytearray(sealed())
    frame = open_frame(data, KEY_OF)
    data[-20] ^= 1
    assert frame.payload[-4] == data[-20]


def test_no_two_frames_share_a_nonce() -> None:
    writer = FrameWriter(KEY_OF)
    heads = {bytes(writer.begin(HEADER).head) for _ in range(100)}
    assert len(heads) == 100


@pytest.mark.parametrize("parts", [[], [PAYLOAD[:-1]], [PAYLOAD, b"x"]])
def test_parts_of_another_length_are_not_sealed(parts: list[bytes]) -> None:
    with pytest.raises(FrameError):
        FrameWriter(KEY_OF).seal(HEADER, parts)


# ---- what does not come out ------------------------------------------------------------------------------------------


def openings(data: bytes) -> list[Callable[[], object]]:
    return [lambda: read(data), lambda: open_frame(data, KEY_OF)]


def test_every_bit_of_head_and_tag_counts() -> None:
    data = sealed(sized(4), b"abcd")
    for position in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            for opening in openings(bytes(flipped)):
                with pytest.raises((FrameError, AssertionError)):  # or the reader waits for more than there is
                    opening()


@given(st.integers(0, 10**9))
@settings(max_examples=200, deadline=None)
def test_every_bit_of_a_payload_counts(where: int) -> None:
    data = bytearray(sealed())
    start = len(data) - 16 - len(PAYLOAD)
    data[start + where % len(PAYLOAD)] ^= 1 << where % 8
    for opening in openings(bytes(data)):
        with pytest.raises(ForgedFrame):
            opening()


def test_a_payload_belongs_to_its_head() -> None:
    one, other = sealed(number=1), sealed(number=2)
    end = len(one) - 16 - len(PAYLOAD)
    with pytest.raises(ForgedFrame, match="payload"):
        open_frame(one[:end] + other[end:], KEY_OF)


def test_a_truncated_frame_does_not_come_out() -> None:
    data = sealed()
    for end in range(len(data)):
        reader = FrameReader(KEY_OF)
        assert reader.feed(data[:end]) == []
        assert reader.idle == (end == 0)
        with pytest.raises(FrameError):
            open_frame(data[:end], KEY_OF)
    with pytest.raises(FrameError):
        open_frame(data + b"x", KEY_OF)


def test_only_the_tenants_key_opens() -> None:
    with pytest.raises(ForgedFrame):
        open_frame(sealed(), STRANGERS.frame_key)
    with pytest.raises(ForgedFrame):
        open_frame(sealed(HEADER._replace(key_id=RIVAL)).replace(b"rival", b"acme2"), KEY_OF)
    with pytest.raises(ForgedFrame, match="no key"):
        open_frame(sealed(HEADER._replace(key_id=KeyId(TenantId("acme"), 1))), STRANGERS.frame_key)


def test_a_reader_that_failed_takes_nothing_more() -> None:
    reader = FrameReader(KEY_OF)
    with pytest.raises(FrameError):
        reader.feed(b"not a frame at all")
    assert not reader.idle
    with pytest.raises(FrameError, match="failed before"):
        reader.feed(sealed())


def test_a_header_is_looked_at_before_memory_is_set_aside() -> None:
    """What is too long, not wanted or not authentic costs nothing but its head."""
    huge = sized(1 << 30)
    head = FrameWriter(KEY_OF).begin(huge).head
    forged = head[:-1] + bytes([head[-1] ^ 1])

    def refuse(header: FrameHeader) -> None:
        raise FrameError("not wanted", Reason.UNEXPECTED)

    tracemalloc.start()
    try:
        for data, limits, check in ((head, 1 << 20, None), (head, 1 << 31, refuse), (forged, 1 << 31, None)):
            with pytest.raises(FrameError):
                FrameReader(KEY_OF, FrameLimits(limits), check).feed(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    with pytest.raises(FrameError, match="limit"):
        open_frame(sealed(), KEY_OF, FrameLimits(767))


# ---- headers ---------------------------------------------------------------------------------------------------------

names = st.binary(min_size=16, max_size=16)
spans = st.tuples(st.integers(0, 500), st.integers(1, 8), st.integers(0, 500)).map(
    lambda parts: Span(parts[0], parts[1], sum(parts))
)
headers = st.builds(
    lambda heads, layers, sizes, **rest: FrameHeader(
        kv_heads=heads, layers=layers, layer_bytes=tuple(sizes[: layers.size]), **rest
    ),
    heads=spans,
    layers=spans,
    sizes=st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=8),
    compatibility=names,
    scope=names,
    key_id=st.builds(
        KeyId, st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True).map(TenantId), st.integers(0, 2**32 - 1)
    ),
    parent=names.map(PrefixHash),
    tail=names.map(PrefixHash),
    first_block=st.integers(0, 2**32 - 1),
    blocks=st.integers(1, 2**32 - 1),
    block_size_tokens=st.integers(1, 65_536),
    position=st.integers(0, 2**32 - 1),
    head_dim=st.integers(1, 65_535),
    value_dim=st.integers(0, 65_535),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    codec=st.sampled_from(["raw", "i8", "a" * 32]),
    fidelity=st.sampled_from(Fidelity),
    with_tokens=st.booleans(),
)


@given(headers)
@settings(max_examples=200, deadline=None)
def test_a_header_reads_back(header: FrameHeader) -> None:
    data = header.encode()
    assert FrameHeader.decode(data) == header
    assert len(data) + 32 <= HEAD_BYTES_MAX


@given(headers, st.integers(0, 2**30), st.integers(1, 255))
@settings(max_examples=500, deadline=None)
def test_a_header_parses_one_way_only(header: FrameHeader, where: int, change: int) -> None:
    data = bytearray(header.encode())
    data[where % len(data)] ^= change
    try:
        read_back = FrameHeader.decode(data)
    except FrameError:
        return
    assert read_back.encode() == data


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_noise_is_no_header(noise: bytes) -> None:
    for data in (noise, b"RWKF\x01" + struct.pack("<H", len(noise)) + noise):
        with pytest.raises(FrameError):
            FrameHeader.decode(data)


@pytest.mark.parametrize(
    "changes",
    [
        {"scope": b"short"},
        {"blocks": 0},
        {"block_size_tokens": 0},
        {"first_block": 2**32},
        {"position": -1},
        {"head_dim": 0},
        {"value_dim": -1},
        {"layers": Span(6, 1, 6)},
        {"layers": Span(0, 0, 6)},
        {"layers": Span(0, 1, LAYERS_MAX + 1)},
        {"kv_heads": Span(1, 2, 2)},
        {"kv_heads": Span(-1, 2, 2)},
        {"dtype": ""},
        {"codec": "Raw"},
        {"codec": "a" * 33},
        {"layer_bytes": (1, 2)},
        {"layer_bytes": (2**32,)},
        {"layer_bytes": (-1,)},
    ],
)
def test_what_makes_no_sense_is_no_header(changes: dict[str, object]) -> None:
    with pytest.raises(FrameError):
        HEADER._replace(**changes).encode()  # type: ignore[arg-type]


# ---- a reader against damage, and the harness against a broken reader ------------------------------------------------


def wrong_frames(rounds: int, seed: int) -> int:
    """Frames that came out of damaged streams without having been sealed."""
    random = Random(seed)
    wrong = 0
    for _ in range(rounds):
        payloads = [random.randbytes(random.randrange(200)) for _ in range(3)]
        originals = [sealed(sized(len(payload)), payload, number) for number, payload in enumerate(payloads)]
        data = bytearray(b"".join(originals))
        for _ in range(random.randrange(1, 4)):
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        if random.random() < 0.3:
            del data[random.randrange(len(data)) :]
        wrong += sum(b"".join(frame.sealed) not in originals for frame in salvage(bytes(data), random))
    return wrong


def salvage(data: bytes, random: Random) -> list[Frame]:
    """What a reader makes of it before it fails."""
    reader, found, at = FrameReader(KEY_OF, FrameLimits(1 << 20)), [], 0
    while at < len(data):
        step = random.randrange(1, 400)
        try:
            found += reader.feed(data[at : at + step])
        except FrameError:
            break
        at += step
    return found


def test_damaged_streams_yield_nothing_wrong() -> None:
    assert wrong_frames(400, seed=1) == 0


def test_the_harness_finds_a_reader_that_does_not_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "equal", lambda one, other: True)
    assert wrong_frames(400, seed=1) > 50

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecore.blocks import PrefixHash
from cachecore.holders import Holder, Pool, Tier
from cachecore.index.contract import Cleared, IndexEvent, Origin, Removed, Stored
from cachecore.index.schema import (
    CHUNK_BLOCKS,
    EVENTS_BYTES_MAX,
    PIECE_HEADER,
    PLACE_CODES,
    SHARDS,
    Entry,
    Kind,
    Record,
    Schema,
    Version,
    decode_events,
    decode_naming,
    decode_pieces,
    decode_snapshot,
    encode_events,
    encode_naming,
    holder_id,
    layer_of,
    parse_holder,
    place_code,
    shard_of,
)
from cachecore.scope import Fidelity
from tests.cachecore.index.histories import ROOT, History, chain_of, cut, worker

TEN = chain_of(*range(10))
ORIGIN = Origin("rw1.salt", None, 2, ROOT)


class TestHolders:
    @pytest.mark.parametrize(
        ("holder", "text"),
        [
            (worker("a", epoch=1700000000, rank=3), b"w/a/1700000000/3"),
            (worker("http://10.0.0.1:8000"), b"w/http%3A%2F%2F10.0.0.1%3A8000/0/0"),
            (worker("{x}/ü"), b"w/%7Bx%7D%2F%C3%BC/0/0"),
            (Pool("disk 1", -2), b"p/disk%201/-2"),
        ],
    )
    def test_ids(self, holder: Holder, text: bytes) -> None:
        assert holder_id(holder) == text
        assert parse_holder(text) == holder

    @given(st.text(min_size=1, max_size=40), st.integers(-(10**15), 10**15), st.integers(0, 10**6))
    def test_any_name(self, name: str, epoch: int, rank: int) -> None:
        holder = worker(name.encode(errors="replace").decode(), epoch, rank)
        assert parse_holder(holder_id(holder)) == holder

    @pytest.mark.parametrize(
        "text",
        [
            *(
                b"",
                b"w/a/0",
                b"w//0/0",
                b"x/a/0/0",
                b"w/a/0/-1",
                b"w/a/00/0",
                b"w/%61/0/0",
                b"w/a%2f/0/0",
                b"w/a/0/0\n",
            ),
            *(b"w/%ff/0/0", b"w/{a}/0/0", b"p/a/1/2", b"w/a/" + b"9" * 30 + b"/0", b"w/" + b"a" * 2000 + b"/0/0"),
        ],
    )
    def test_what_is_no_id(self, text: bytes) -> None:
        with pytest.raises(ValueError, match=r"holder id|can't decode"):
            parse_holder(text)

    def test_lives_and_ranks_of_a_worker_share_a_shard_and_workers_spread(self) -> None:
        assert shard_of(worker("a", 1, 0)) == shard_of(worker("a", 2, 7)) == shard_of(Pool("a", 0))
        assert len({shard_of(worker(f"w{number}")) for number in range(200)}) == SHARDS


class TestKeys:
    def test_every_key_of_a_holder_has_its_shards_hash_tag(self) -> None:
        schema, holder = Schema("p"), worker("w{0}")
        tag = b"p:{%d}:" % shard_of(holder)
        keys = [schema.runs(holder, b"a"), schema.copies(holder, b"b"), schema.namings(holder), schema.lease(holder)]
        assert [key.removeprefix(tag) for key in keys] == [
            *(b"runs:w/w%7B0%7D/0/0:a", b"copies:w/w%7B0%7D/0/0:b"),
            *(b"namings:w/w%7B0%7D/0/0", b"lease:w/w%7B0%7D/0/0"),
        ]
        assert schema.holders(3) == b"p:{3}:holders"
        assert (schema.stream(0), schema.epochs(0)) == (b"p:{0}:stream", b"p:{0}:epochs")
        assert schema.fleet("notes") == b"p:{fleet}:notes"

    @pytest.mark.parametrize("prefix", ["", "a{b}", "a b", "x" * 65, "a\n"])
    def test_prefixes_that_would_move_keys(self, prefix: str) -> None:
        with pytest.raises(ValueError, match="key prefix"):
            Schema(prefix)

    def test_place_codes(self) -> None:
        layers = [(tier, fidelity) for tier in Tier for fidelity in Fidelity]
        assert b"".join(place_code(*layer) for layer in layers) == b"abcdefghijkl" == b"".join(PLACE_CODES)
        assert [layer_of(code) for code in PLACE_CODES] == layers
        for code in (b"", b"m", b"ab", b"A"):
            with pytest.raises(ValueError, match="place code"):
                layer_of(code)


class TestRecords:
    @pytest.mark.parametrize(
        ("record", "text"),
        [
            (Record(Version(17, 4), None, b"", True), b"17 4 -1 - 1 -1 -"),
            (Record(Version(17, -1), 2**63, b"ae", False, 12, b"e"), b"17 -1 9223372036854775808 ae 0 12 e"),
        ],
    )
    def test_text(self, record: Record, text: bytes) -> None:
        assert record.encode() == text
        assert Record.decode(text) == record

    @pytest.mark.parametrize(
        "text",
        [
            b"",
            b"1 2 3 a 1 0",
            b"1 2 3 z 1 0 -",
            b"1 2 3 a 1 0 z",
            b"1 2 3 a 2 0 -",
            b"1 2 3 a 1 0 - ",
            b"x 2 3 a 1 0 -",
            b"-1 2 3 a 1 0 -",
            b"1 2 3 a 1 -2 -",
        ],
    )
    def test_what_is_no_record(self, text: bytes) -> None:
        with pytest.raises(ValueError, match="record"):
            Record.decode(text)

    def test_versions_are_ordered_by_fence_first(self) -> None:
        assert Version(1, 9) < Version(2, 1) < Version(2, 2)


class TestEntries:
    FIELDS = {b"h": b"w/a/0/0", b"f": b"7", b"r": b"3", b"q": b"-1", b"k": b"n", b"e": b"x"}  # noqa: RUF012

    def test_fields(self) -> None:
        assert Entry.decode(self.FIELDS) == Entry(worker("a"), Version(7, 3), None, Kind.NEW, b"x")

    @pytest.mark.parametrize("change", [{b"h": b"?"}, {b"f": b"x"}, {b"k": b"z"}, {b"k": b"\xff"}, {b"q": b""}])
    def test_what_is_no_entry(self, change: dict[bytes, bytes]) -> None:
        with pytest.raises(ValueError, match=r".+"):
            Entry.decode(self.FIELDS | change)

    def test_a_field_that_is_missing(self) -> None:
        with pytest.raises(ValueError, match="without field b'r'"):
            Entry.decode({name: value for name, value in self.FIELDS.items() if name != b"r"})


class TestEvents:
    def test_bytes(self) -> None:
        one = chain_of(1)
        blob = encode_events(
            [Stored(ROOT, one, Tier.L1), Removed(one, fidelity=Fidelity.FUSED), Cleared(), Cleared(Tier.L2)]
        )
        assert blob == (
            b"se\x01\0\0\0" + ROOT + one + b"rd\x01\0\0\0" + one + b"c\xff\0\0\0\0" + b"c\x02\0\0\0\0"
        )  # fmt: skip

    @pytest.mark.parametrize("seed", range(20))
    def test_there_and_back(self, seed: int) -> None:
        history = History(seed)
        events: list[IndexEvent] = [history.event() for _ in range(20)]
        assert decode_events(encode_events(events)) == events

    def test_handles_stay_behind(self) -> None:
        event = Stored(ROOT, cut(TEN, 0, 2), handles=(1, 2), origin=ORIGIN)
        assert decode_events(encode_events([event])) == [Stored(ROOT, cut(TEN, 0, 2))]

    @pytest.mark.parametrize(
        "blob",
        [
            b"s",
            b"sa\x01\0\0\0",
            b"sa\x02\0\0\0" + bytes(32),
            b"sm\0\0\0\0" + bytes(16),
            b"xa\0\0\0\0",
            b"ra\xff\xff\xff\xff",
            b"c\x03\0\0\0\0",
            b"c\0\x01\0\0\0" + bytes(16),
            b"ra\0\0\0\0r",
            b"s\0\0\0\0\0" + bytes(16),
        ],
    )
    def test_hostile_blobs(self, blob: bytes) -> None:
        with pytest.raises(ValueError, match=r".+"):
            decode_events(blob)

    def test_a_blob_that_is_too_long_is_not_looked_at(self) -> None:
        with pytest.raises(ValueError, match="bytes of events"):
            decode_events(bytes(EVENTS_BYTES_MAX + 1))

    @given(st.binary(max_size=200))
    def test_noise_decodes_or_is_a_value_error(self, blob: bytes) -> None:
        try:
            events = decode_events(blob)
        except ValueError:
            return
        assert encode_events(events) == blob

    @given(st.integers(0, 10**6), st.integers(0, 255))
    def test_damage_decodes_or_is_a_value_error(self, position: int, value: int) -> None:
        damaged = bytearray(encode_events([Stored(ROOT, TEN), Removed(TEN), Cleared()]))
        damaged[position % len(damaged)] = value
        try:
            events = decode_events(bytes(damaged))
        except ValueError:
            return
        assert encode_events(events) == damaged


def piece(chain: bytes = TEN, width: int = 8, naming: int = 3) -> dict[bytes, bytes]:
    """The fields of one piece, handles counted from 1."""
    blocks, first = len(chain) // 16, chain[:16]
    fields = {first: struct.pack("<H", blocks) + PIECE_HEADER.pack(ROOT, naming, width)}
    for number, start in enumerate(range(0, blocks, CHUNK_BLOCKS)):
        names = chain[start * 16 : (start + CHUNK_BLOCKS) * 16]
        handles = (handle.to_bytes(width, "little") for handle in range(start + 1, start + len(names) // 16 + 1))
        fields[first] += names[-16:]
        fields[first + bytes([number])] = names + (b"".join(handles) if width else b"")
    return fields


class TestPieces:
    def test_fields(self) -> None:
        (record,) = decode_pieces(b"f", piece(cut(TEN, 0, 2)))
        assert (record.tier, record.fidelity, record.parent, record.naming) == (Tier.L1, Fidelity.QUANTIZED, ROOT, 3)
        assert (record.names, record.handles) == (cut(TEN, 0, 2), (1, 2))
        (bare,) = decode_pieces(b"a", piece(width=0))
        assert (bare.names, bare.handles) == (TEN, ())

    def test_several_of_several_chunks(self) -> None:
        long, short = chain_of(*range(100)), chain_of(7)
        records = decode_pieces(b"a", piece(long) | piece(short))
        assert [record.names for record in records] == [long, short]
        assert records[0].handles == tuple(range(1, 101))

    @pytest.mark.parametrize("blocks", [0, 9, 11, 513, 65535])
    def test_a_length_that_is_not_the_chunks(self, blocks: int) -> None:
        fields = piece()
        fields[TEN[:16]] = struct.pack("<H", blocks) + fields[TEN[:16]][2:]
        with pytest.raises(ValueError, match=r"a piece"):
            decode_pieces(b"a", fields)

    @pytest.mark.parametrize(
        "change",
        [
            *({TEN[:16]: b""}, {TEN[:16]: piece()[TEN[:16]][:20]}, {TEN[:16]: piece(width=9)[TEN[:16]]}),
            *({TEN[:16] + b"\0": b""}, {TEN[:16] + b"\0": bytes(240)}, {TEN[:16] + b"\0": bytes(10**6)}),
        ],
    )
    def test_hostile_fields(self, change: dict[bytes, bytes]) -> None:
        with pytest.raises(ValueError, match=r"a piece"):
            decode_pieces(b"a", piece() | change)

    def test_namings(self) -> None:
        assert decode_naming(encode_naming(ORIGIN)) == ORIGIN
        for value in (b"", b"\xc0", b"\x90", encode_naming(ORIGIN)[:-1], b"\x94\x01\xc0\xc0\xc4\x00"):
            with pytest.raises(ValueError, match="naming"):
                decode_naming(value)


class TestSnapshots:
    RECORD = b"7 3 12 a 1 -1 -"

    def test_parts(self) -> None:
        runs = [part for pair in piece().items() for part in pair]
        snapshot = decode_snapshot(self.RECORD, [(b"a", runs, [TEN[:16], b"2"])], [b"3", encode_naming(ORIGIN)])
        assert snapshot.version == (7, 3)
        assert (snapshot.sequence, snapshot.persistable) == (12, True)
        assert [record.names for record in snapshot.pieces] == [TEN]
        assert snapshot.copies == {b"a": {PrefixHash(TEN[:16]): 2}}
        assert snapshot.namings == {3: ORIGIN}

    def test_what_was_evicted_is_noticed(self) -> None:
        """A server that drops keys by itself leaves the record as it was."""
        runs = [part for pair in piece().items() for part in pair]
        further = [TEN[:16], b"2"]
        record = b"7 3 12 a 1 %d a" % (len(runs) // 2 + 1)
        assert decode_snapshot(record, [(b"a", runs, further)], []).copies
        for places in ([(b"a", [], further)], [(b"a", runs, [])], [(b"a", runs[:2], further)], []):
            with pytest.raises(ValueError, match="the server has lost a part of it"):
                decode_snapshot(record, places, [])

    @pytest.mark.parametrize(
        ("places", "namings"),
        [
            ([(b"z", [], [])], []),
            ([(b"a", [TEN[:16]], [])], []),
            ([(b"a", [TEN[:16], b"?"], [])], []),
            ([(b"a", [], [TEN[:15], b"1"])], []),
            ([(b"a", [], [TEN[:16], b"0"])], []),
            ([(b"a", [], [TEN[:16], b"-1"])], []),
            ([(b"a", [], [TEN[:16], b"9" * 40])], []),
            ([], [b"0", encode_naming(ORIGIN)]),
            ([], [b"65536", encode_naming(ORIGIN)]),
            ([], [b"1", b"?"]),
        ],
    )
    def test_hostile_snapshots(
        self, places: list[tuple[bytes, list[bytes], list[bytes]]], namings: list[bytes]
    ) -> None:
        with pytest.raises(ValueError, match=r".+"):
            decode_snapshot(self.RECORD, places, namings)

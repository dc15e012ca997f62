"""The shadow of one place beside a model of the server that carries out its edits, on random stores and removals."""

import random
import struct
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from cachecore.blocks import Chain, split_chain
from cachecore.index import pieces as module
from cachecore.index.pieces import Label, PieceEdit, Pieces
from cachecore.index.schema import PIECE_HEADER
from tests.cachecore.index.histories import ROOT, History, chain_of, cut, name_at

LABEL = Label(1, 8, ROOT)
BARE = Label(0, 0)


def handle_of(name: bytes) -> bytes:
    return name[:8]


def handles_of(chain: bytes) -> bytes:
    return b"".join(handle_of(name) for name in split_chain(Chain(chain)))


class Body(NamedTuple):
    header: bytes
    names: bytes
    handles: bytes


@dataclass
class ServerModel:
    """What apply.lua does to one place."""

    pieces: dict[bytes, Body] = field(default_factory=dict)
    copies: dict[bytes, int] = field(default_factory=dict)

    def take(self, edits: list[PieceEdit], copies: list[tuple[bytes, int]]) -> None:
        for edit in edits:
            old = self.pieces.pop(edit.first, Body(b"", b"", b""))
            assert len(old.names) // 16 == edit.stored_blocks
            assert edit.kept_blocks <= edit.stored_blocks
            header = edit.header
            if edit.kept_blocks:
                assert not header
                header = old.header
            width = len(old.handles) // max(1, edit.stored_blocks)
            names = old.names[: edit.kept_blocks * 16] + edit.names
            if names:
                self.pieces[edit.first] = Body(header, names, old.handles[: edit.kept_blocks * width] + edit.handles)
        for name, count in copies:
            self.copies[name] = count
            if not count:
                del self.copies[name]

    def names(self) -> list[bytes]:
        return [name for body in self.pieces.values() for name in split_chain(Chain(body.names))]


class Bench:
    """Pieces, the server they describe, and how often each block is held."""

    def __init__(self, label: Label = LABEL) -> None:
        self.pieces = Pieces()
        self.server = ServerModel()
        self.held: Counter[bytes] = Counter()
        self.label = label
        self.now = 0

    def store(self, chain: Chain, start: int = 0, stop: int | None = None, unit: int = 1) -> bool:
        piece = cut(chain, start, stop)
        self.held.update(split_chain(piece))
        self.now += 1
        handles = handles_of(piece) if self.label.handle_bytes else b""
        return self.pieces.store(name_at(chain, start), piece, handles, self.label, unit, self.now)

    def remove(self, names: bytes) -> int:
        unknown = 0
        for name in split_chain(Chain(names)):
            unknown += not self.held[name]
            self.held[name] = max(0, self.held[name] - 1)
        self.held = +self.held
        assert self.pieces.remove(names) == unknown
        return unknown

    def tell(self) -> list[PieceEdit]:
        edits = self.pieces.drain()
        self.server.take(edits, self.pieces.drain_copies())
        return edits

    def check(self) -> None:
        """The server has exactly what is held, and every handle is its block's."""
        self.pieces.check_invariants()
        assert sorted(self.server.names()) == sorted(self.held) == sorted(self.pieces.names())
        assert self.server.copies == {name: count - 1 for name, count in self.held.items() if count > 1}
        for first, body in self.server.pieces.items():
            assert body.names.startswith(first)
            assert body.handles in (b"", handles_of(body.names))


TEN = chain_of(*range(10))


class TestEdits:
    def test_a_chain_that_grows_is_appended_to_one_piece(self) -> None:
        bench = Bench()
        bench.store(TEN, 0, 4)
        (edit,) = bench.tell()
        assert edit == (TEN[:16], 0, 0, PIECE_HEADER.pack(ROOT, 1, 8), cut(TEN, 0, 4), handles_of(cut(TEN, 0, 4)))
        bench.store(TEN, 4, 7)
        bench.store(TEN, 7)
        (edit,) = bench.tell()
        assert edit == (TEN[:16], 4, 4, b"", cut(TEN, 4), handles_of(cut(TEN, 4)))
        bench.check()

    def test_a_hole_makes_two_pieces(self) -> None:
        bench = Bench()
        bench.store(TEN)
        bench.tell()
        bench.remove(cut(TEN, 4, 5))
        assert sorted(edit[1:3] for edit in bench.tell()) == [(0, 0), (10, 4)]
        bench.check()
        assert len(bench.pieces) == 2

    def test_a_hole_that_is_filled_makes_one_again(self) -> None:
        bench = Bench()
        bench.store(TEN)
        bench.remove(cut(TEN, 6, 7))
        bench.store(TEN, 6)
        bench.tell()
        bench.check()
        assert len(bench.pieces) == 1
        assert bench.held[TEN[7 * 16 : 8 * 16]] == 2

    def test_what_comes_and_goes_between_two_steps_is_not_told(self) -> None:
        bench = Bench()
        bench.store(TEN)
        bench.remove(TEN)
        assert bench.tell() == []
        bench.check()

    def test_a_piece_is_cut_and_grown_in_one_edit(self) -> None:
        bench = Bench()
        bench.store(TEN)
        bench.tell()
        bench.remove(cut(TEN, 6))
        other = chain_of(50, 51, parent=name_at(TEN, 6))
        bench.store(Chain(cut(TEN, 0, 6) + other), 6)
        (edit,) = bench.tell()
        assert edit == (TEN[:16], 10, 6, b"", other, handles_of(other))
        bench.check()

    def test_pieces_are_bounded(self) -> None:
        bench = Bench()
        chain = chain_of(*range(1200))
        bench.store(chain)
        bench.tell()
        bench.check()
        assert sorted(len(body.names) // 16 for body in bench.server.pieces.values()) == [176, 512, 512]

    def test_another_naming_is_another_piece(self) -> None:
        bench = Bench()
        bench.store(TEN, 0, 4)
        bench.label = Label(2, 8)
        bench.store(TEN, 4)
        bench.tell()
        bench.check()
        assert len(bench.pieces) == 2

    def test_blocks_of_one_handle_stay_together(self) -> None:
        bench = Bench()
        chain = chain_of(*range(600))
        handles = b"".join(struct.pack("<Q", position // 3) for position in range(600))
        bench.pieces.store(ROOT, chain, handles, LABEL, 3, 1)
        assert [len(edit.names) // 16 for edit in bench.pieces.drain()] == [510, 90]
        assert bench.pieces.drop_oldest(4) == 6
        assert bench.pieces.blocks == 594


class TestOrphans:
    def test_a_place_of_whole_chains_has_none(self) -> None:
        bench = Bench()
        bench.store(chain_of(*range(1200)))
        bench.store(Chain(cut(TEN, 0, 6) + chain_of(50, 51, parent=name_at(TEN, 6))))
        assert (len(bench.pieces), bench.pieces.orphans) == (4, 0)

    def test_blocks_that_come_before_those_they_follow(self) -> None:
        bench = Bench()
        bench.store(TEN, 7)
        bench.store(TEN, 4, 6)
        assert bench.pieces.orphans == 2
        bench.store(TEN, 0, 4)
        assert bench.pieces.orphans == 1
        bench.store(TEN, 6, 7)
        assert bench.pieces.orphans == 0
        bench.tell()
        bench.check()

    def test_blocks_whose_beginning_is_gone(self) -> None:
        bench = Bench()
        branches = [chain_of(number, 51, parent=name_at(TEN, 6)) for number in (50, 60)]
        for branch in branches:
            bench.store(Chain(cut(TEN, 0, 6) + branch))
        bench.remove(cut(TEN, 5, 6))
        assert bench.pieces.orphans == 0
        bench.remove(cut(TEN, 5, 6))
        assert bench.pieces.orphans == 2
        bench.remove(branches[0])
        assert bench.pieces.orphans == 1
        bench.tell()
        bench.check()
        bench.pieces.clear()
        assert bench.pieces.orphans == 0


class TestHandles:
    def test_a_block_under_another_handle_is_reported(self) -> None:
        bench = Bench()
        assert bench.store(TEN)
        assert bench.store(TEN, 3, 8)
        assert not bench.pieces.store(ROOT, TEN, bytes(80), LABEL, 1, 9)
        assert not bench.pieces.store(ROOT, TEN, b"", BARE, 1, 9)

    def test_pieces_without_handles(self) -> None:
        bench = Bench(BARE)
        bench.store(TEN)
        bench.remove(cut(TEN, 3, 4))
        bench.tell()
        bench.check()


class TestBound:
    def test_the_end_of_what_was_stored_to_least_recently_goes_first(self) -> None:
        bench = Bench()
        left, right = chain_of(1, 2, 3, 4), chain_of(5, 6, 7)
        bench.store(left)
        bench.store(right)
        bench.store(left, 3)
        assert bench.pieces.drop_oldest(2) == 2
        assert sorted(bench.pieces.names()) == sorted(split_chain(Chain(left + right[:16])))
        assert bench.pieces.drop_oldest(9) == 1
        assert bench.pieces.drop_oldest(1) == 1
        assert bench.pieces.copies == {}


@pytest.mark.parametrize("blocks_max", [4, 512])
@pytest.mark.parametrize("seed", range(6))
def test_random_histories(seed: int, blocks_max: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of several events, steps that are refused, and steps that may only take away."""
    monkeypatch.setattr(module, "PIECE_BLOCKS", blocks_max)
    bench, history, rng = Bench(), History(seed, layers=False), random.Random(seed)
    for _ in range(150):
        chain, start, stop = history.piece()
        if rng.random() < 0.5:
            bench.store(chain, start, stop)
        else:
            names = list(split_chain(cut(chain, start, stop)))
            rng.choice([lambda names: None, list.reverse, rng.shuffle])(names)
            bench.remove(b"".join(names[: rng.randint(1, len(names))]))
        kind = rng.random()
        if kind < 0.1:
            bench.pieces.drain()
            bench.pieces.drain_copies()
            bench.pieces.undo_drain()
        elif kind < 0.2:
            bench.server.take(bench.pieces.drain_losses(), bench.pieces.drain_copies())
            assert set(bench.server.names()) <= set(bench.held)
        elif kind < 0.25:
            bench.pieces.drain_losses()
            bench.pieces.drain_copies()
            bench.pieces.undo_drain()
        elif kind < 0.5:
            bench.tell()
            bench.check()
        elif kind < 0.53:
            bench.server = ServerModel()
            bench.pieces.restate()
            while bench.pieces.dirty:
                bench.server.take(bench.pieces.drain(20), bench.pieces.drain_copies())
            bench.check()

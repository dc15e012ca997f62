"""The extension in C beside its twins in Python; and the suites of what rests on it, over the twins."""

import hashlib
import os
import random
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachecore.blocks import HASH_BYTES, PythonNamer, pack_tokens
from cachecore.index.chains import Nodes, python_depths, python_stored, python_taken
from cachecore.index.locator import PythonTable
from cachecore.index.runs import PythonSegment, python_unknown, python_well_formed
from cachecore.native import native as loaded

REPOSITORY = Path(__file__).parents[2]

if loaded is None:
    pytest.skip("the extension is not built, or not wanted", allow_module_level=True)

native: Any = loaded
KEY = bytes(range(32))
PERSON = b"ropeway.test.v00"


def names_of(*numbers: int) -> bytes:
    return b"".join(hashlib.blake2b(number.to_bytes(4), digest_size=HASH_BYTES).digest() for number in numbers)


class TestNaming:
    @pytest.mark.parametrize("size", [*range(4), 100, 107, 108, 109, 123, 124, 125, 127, 128, 129, 251, 252, 253, 1000])
    def test_each_length_of_a_message(self, size: int) -> None:
        """Around the ends of BLAKE2b's own blocks of 128 bytes; a byte a token here."""
        text = random.Random(size).randbytes(size + 1)
        namer = native.Namer(KEY, PERSON, b"star", size + 1)
        expected = hashlib.blake2b(b"star" + text, digest_size=HASH_BYTES, key=KEY, person=PERSON).digest()
        assert namer.each(text, None) == expected

    @settings(max_examples=100, deadline=None)
    @given(
        key=st.binary(max_size=64),
        person=st.binary(min_size=16, max_size=16),
        start=st.binary(max_size=140),
        parent=st.binary(max_size=140),
        block_bytes=st.integers(1, 300),
        tokens=st.binary(max_size=1200),
        extra=st.none() | st.binary(max_size=200),
    )
    def test_names_are_those_of_hashlib(
        self,
        key: bytes,
        person: bytes,
        start: bytes,
        parent: bytes,
        block_bytes: int,
        tokens: bytes,
        extra: bytes | None,
    ) -> None:
        extras = None if extra is None else [extra[number % 7 :] for number in range(1200)]
        ours, theirs = (kind(key, person, start, block_bytes) for kind in (native.Namer, PythonNamer))
        assert ours.chain(parent, tokens, extras) == theirs.chain(parent, tokens, extras)
        assert ours.each(tokens, extras) == theirs.each(tokens, extras)

    @pytest.mark.parametrize("kind", [native.Namer, PythonNamer])
    def test_what_is_refused(self, kind: Any) -> None:
        namer = kind(KEY, PERSON, b"", 4)
        with pytest.raises(IndexError):
            namer.chain(b"", bytes(8), [b""])
        with pytest.raises(TypeError):
            namer.chain("text", bytes(8), None)
        with pytest.raises(TypeError):
            namer.chain(b"", bytes(8), ["text", "text"])
        with pytest.raises(TypeError):
            namer.each(bytes(8), 3)
        with pytest.raises(ValueError):  # noqa: PT011
            kind(bytes(65), PERSON, b"", 4)

    @pytest.mark.parametrize("kind", [native.Namer, PythonNamer])
    def test_tokens_that_do_not_lie_in_one_piece(self, kind: Any) -> None:
        namer = kind(KEY, PERSON, b"", 4)
        assert namer.each(memoryview(bytes(range(16)))[::2], None) == namer.each(bytes(range(0, 16, 2)), None)


class TestWellFormed:
    @pytest.mark.parametrize("total", [0, 1, 2, 3, 47, 48, 49, 500, 512, 513, 3000])
    def test_one_name_twice(self, total: int) -> None:
        names = [names_of(number) for number in range(total)]
        rng = random.Random(total)
        assert native.well_formed(b"".join(names)) is python_well_formed(b"".join(names)) is True
        assert native.well_formed(b"".join([*names, b"half"])) is False
        for _ in range(20 if total > 1 else 0):
            twice = list(names)
            one, other = rng.sample(range(total), 2)
            twice[one] = twice[other]
            assert native.well_formed(b"".join(twice)) is python_well_formed(b"".join(twice)) is False

    def test_names_that_agree_in_half_of_themselves(self) -> None:
        halves = [bytes(8) + number.to_bytes(8) for number in range(400)]
        halves += [half[8:] + half[:8] for half in halves[1:]]
        assert native.well_formed(b"".join(halves[:40])) is native.well_formed(b"".join(halves)) is True

    @pytest.mark.parametrize("known", [[], [0], [3, 7], [9]])
    def test_how_many_blocks_come_before_a_known_one(self, known: list[int]) -> None:
        firsts = {names_of(number): None for number in [*known, 77]}
        for kind in (native.unknown, python_unknown):
            assert kind(names_of(*range(9)), firsts) == (known[0] if known else 9)
        with pytest.raises(TypeError):
            native.unknown(names_of(1), [])


class TestChains:
    @pytest.mark.parametrize("seed", range(8))
    def test_beside_their_twins(self, seed: int) -> None:
        """Chains that part anywhere, counted and taken back; also those that were never counted."""
        rng = random.Random(seed)
        keys, texts = (
            [("a", 0), ("a", 1), ("b", 0)],
            [bytes(rng.choices(b"xy", k=rng.randint(0, 12))) for _ in range(20)],
        )
        chains = [PythonNamer(KEY, PERSON, b"", 1).chain(b"", text, None) for text in texts]
        ours: Nodes = {}
        theirs: Nodes = {}
        for _ in range(400):
            key, chain = rng.choice(keys), rng.choice(chains)
            if rng.random() < 0.55:
                assert native.stored(ours, key, chain) == python_stored(theirs, key, chain)
            else:
                assert native.taken(ours, key, chain) is python_taken(theirs, key, chain)
            assert ours == theirs
            asked = rng.choice(chains)
            assert native.depths(ours, asked) == python_depths(theirs, asked)

    def test_nonsense_is_refused(self) -> None:
        key, name = ("a", 0), names_of(1)
        for function in (native.stored, native.taken):
            for arguments in ((), ({}, key), ([], key, name), ({}, key, "text"), ({}, key, name[1:])):
                with pytest.raises(TypeError):
                    function(*arguments)
            for node in (None, (name,), ("text", {}), (b"", {}), (name, [])):
                with pytest.raises(TypeError):
                    function({name: node}, key, name)
        with pytest.raises(TypeError, match="unhashable"):
            native.stored({}, [], name)
        with pytest.raises(TypeError):
            native.depths({}, key, name)


class TestPacking:
    @given(st.lists(st.integers(0, 2**32 - 1)))
    def test_little_endian(self, token_ids: list[int]) -> None:
        expected = b"".join(token.to_bytes(4, "little") for token in token_ids)
        assert native.pack_tokens(token_ids) == native.pack_tokens(tuple(token_ids)) == expected

    def test_what_is_refused(self) -> None:
        for token in (-1, 2**32, 2**64, -(2**64)):
            with pytest.raises(OverflowError):
                native.pack_tokens([1, token])
        for token in ("1", None, 1.0):
            with pytest.raises(TypeError):
                native.pack_tokens([1, token])
        assert native.pack_tokens([True, np.uint32(7)]) == pack_tokens(array("I", [1, 7]))


class TestSegment:
    @settings(max_examples=200, deadline=None)
    @given(
        same=st.integers(0, 20), ours=st.integers(1, 20), theirs=st.integers(1, 20), start=st.integers(0, 5),
        position=st.integers(0, 5),
    )  # fmt: skip
    def test_what_is_shared_with_a_chain(self, same: int, ours: int, theirs: int, start: int, position: int) -> None:
        common = names_of(*range(1 + same))
        here = names_of(*range(900, 900 + start)) + common + names_of(*range(100, 100 + ours))
        there = names_of(*range(800, 800 + position)) + common + names_of(*range(200, 200 + theirs))
        listed = there[position * HASH_BYTES :]
        for kind in (native.Segment, PythonSegment):
            segment = kind(0)
            segment.names += here
            assert segment.shared(there, position, start) == 1 + same
            assert segment.shared(there[: (position + 1) * HASH_BYTES], position, start) == 1
            assert segment.equal(memoryview(listed), start) == segment.equal(listed, start) == 1 + same

    @pytest.mark.parametrize("kind", [native.Segment, PythonSegment])
    def test_its_parts(self, kind: Any) -> None:
        segment = kind(7)
        assert (segment.number, segment.blocks, segment.first) == (7, 0, b"")
        segment.names += names_of(1, 2)
        assert (segment.blocks, segment.first) == (2, names_of(1))
        del segment.names[HASH_BYTES:]
        segment.names = bytearray(names_of(3)) + segment.names
        assert bytes(segment.names) == names_of(3, 1)

    def test_nonsense_is_refused(self) -> None:
        segment = native.Segment(0)
        for wrong in (names_of(1), None):
            with pytest.raises(TypeError):
                segment.names = wrong
        with pytest.raises(TypeError):
            del segment.names
        for arguments in ((), (b"",), (b"", -1), (b"", 0, -1), (b"", "0"), (0, 0)):
            with pytest.raises(TypeError):
                segment.shared(*arguments)
        for arguments in ((b"",), (b"", -1), (0, 0)):
            with pytest.raises(TypeError):
                segment.equal(*arguments)
        assert segment.shared(names_of(1), 9, 9) == segment.equal(names_of(1), 9) == 1


class TestTable:
    @pytest.mark.parametrize("seed", range(6))
    @pytest.mark.parametrize("buckets", [2, 16, 128])
    def test_beside_its_twin(self, seed: int, buckets: int) -> None:
        """Runs grow, are cut and go; small tables overflow. After each change every name is where it should be."""
        rng = random.Random(seed)
        runs: list[Any] = [native.Segment(number) for number in range(8)]
        twins: list[Any] = [PythonSegment(number) for number in range(8)]
        table, twin = native.Table(runs, buckets), PythonTable(twins, buckets)
        given_names = 0
        for _ in range(120):
            number = rng.randrange(8)
            run, other = runs[number], twins[number]
            if rng.random() < 0.6 or not run.blocks:
                count = rng.choice([1, 5, 30, 100])
                names = names_of(*range(given_names, given_names + count))
                given_names += count
                for each, held in ((table, run), (twin, other)):
                    each.put(names, number, held.blocks)
                    held.names += names
            else:
                kept = rng.randrange(run.blocks)
                for each, held in ((table, run), (twin, other)):
                    each.take(bytes(held.names[kept * HASH_BYTES :]), number, kept)
                    del held.names[kept * HASH_BYTES :]
            if rng.random() < 0.1:
                wanted = rng.choice([2, 16, 128, 256])
                table.resize(wanted)
                twin.resize(wanted)
                assert table.buckets == twin.buckets == wanted
            total = sum(run.blocks for run in runs)
            assert table.used() == twin.used() == total
            assert table.overflowing <= total
        for run in runs:
            for position in range(run.blocks):
                assert table.find(bytes(run.names[position * HASH_BYTES : (position + 1) * HASH_BYTES])) == (
                    run,
                    position,
                )
        assert table.find(names_of(given_names)) is None

    def test_a_number_that_was_given_up_is_not_found(self) -> None:
        run = native.Segment(0)
        run.names += names_of(1)
        runs: list[Any] = [run]
        table = native.Table(runs, 2)
        table.put(names_of(1), 0, 0)
        assert table.find(names_of(1)) == (run, 0)
        runs[0] = None
        assert table.find(names_of(1)) is None
        runs.clear()
        assert table.find(names_of(1)) is None

    def test_nonsense_is_refused(self) -> None:
        table = native.Table([], 2)
        for name in (b"", bytes(15), bytes(17), "text", bytearray(16)):
            with pytest.raises(TypeError):
                table.find(name)
        for arguments in ((bytes(16), 1 << 32, 0), (bytes(32), 0, 8191)):
            with pytest.raises(ValueError, match="room"):
                table.put(*arguments)
        with pytest.raises(KeyError):
            table.take(bytes(16), 0, 0)
        for buckets in (0, 3, -2):
            with pytest.raises(ValueError, match="power of two"):
                table.resize(buckets)
        with pytest.raises(TypeError):
            native.Table((), 2)
        with pytest.raises(OverflowError):
            table.put(bytes(16), -1, 0)


def in_a_process_of_its_own(*arguments: str, wish: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ROPEWAY_NATIVE": wish}
    return subprocess.run([sys.executable, *arguments], env=environment, cwd=REPOSITORY, capture_output=True, text=True)


@pytest.mark.parametrize(("wish", "found"), [("0", "False"), ("1", "True"), ("", "True")])
def test_it_can_be_done_without(wish: str, found: str) -> None:
    done = in_a_process_of_its_own("-c", "from cachecore.native import native; print(native is not None)", wish=wish)
    assert done.stdout.strip() == found


def test_the_suites_pass_over_the_twins() -> None:
    suites = ["test_blocks.py", "index/test_memory.py", "index/test_pieces.py"]
    chosen = [
        "-k",
        "not (histories or overflows or one_run_at_a_time or fill_up) or 0",
        *(f"tests/cachecore/{suite}" for suite in suites),
    ]
    done = in_a_process_of_its_own("-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, wish="0")
    assert done.returncode == 0, done.stdout

"""Names of blocks: frozen vectors, an independent reading of the documented messages, and what must never collide."""

import hashlib
import json
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachecore.blocks import (
    EMPTY_CHAIN,
    HASH_BYTES,
    BlockHasher,
    Extra,
    PrefixHash,
    canonical_extras,
    pack_tokens,
    split_chain,
)

KEY = bytes.fromhex("8bd5fd8e8c1b4f7b768c9d80b6b0e2a3d92f36978d0b7aa8940b649904638795")
SCOPE = bytes.fromhex(
    "07000000736d6f6c6c6d32040000006d61696e05000000746f6b2d3104000000706f657401000000370400000061636d65"
    "040000000000000010000000d4776daf2d0fe4105c2755b9bff6759c0400000004000000"
)
TOKENS = pack_tokens(range(12))
EXTRAS = [b"", canonical_extras([Extra(2, b"img-b"), Extra(-1, b"img-a")]), b""]

ROOT_HEX = "1d4bb926891a0d2ac407fed253e4c598"
REROOTED_HEX = "f7af4b7ef5368917efe34b41c2e33169"
CHAIN_HEX = "e18d159e540a9cb567f8627a2009136debde12bd47312f330420125b3da1575bfc24c1c62ca58ccbb6c9e73a9be32d55"
CHAIN_WITH_EXTRAS_HEX = (
    "e18d159e540a9cb567f8627a2009136d8c75a4196d7fd9621ebca27d29828512322b804d133c07cdf90e4ae18710a333"
)
CONTENTS_HEX = [
    "086afe59e5fde319ad5f9b79f3c9ed74",
    "a3e7b761faa4d67142423c9a8ec7f2db",
    "61c64a03e4635089426da644d61356f4",
]
EXTRA_CONTENT_HEX = "70ef6d5c07bf8b1e30798a9ee3e2e061"


@pytest.fixture
def hasher() -> BlockHasher:
    return BlockHasher(KEY, 4)


def blake(person: bytes, message: bytes) -> bytes:
    return hashlib.blake2b(message, digest_size=16, key=KEY, person=person).digest()


def u32(number: int) -> bytes:
    return number.to_bytes(4, "little")


def by_the_book(parent: bytes, token_ids: list[int], extras: list[bytes] | None = None, block: int = 4) -> list[bytes]:
    """Prefix names as the module's opening defines them, without its code."""
    names = []
    for number in range(len(token_ids) // block):
        tokens = b"".join(u32(token) for token in token_ids[number * block : (number + 1) * block])
        parent = blake(b"ropeway.prefx.v1", u32(block) + parent + tokens + (extras[number] if extras else b""))
        names.append(parent)
    return names


class TestVectors:
    """Stores and other processes rely on these: they may never change under this version's `person` strings."""

    def test_root(self, hasher: BlockHasher) -> None:
        assert hasher.root(SCOPE).hex() == ROOT_HEX
        assert hasher.root(SCOPE) == blake(b"ropeway.root.v1", u32(len(SCOPE)) + SCOPE)

    def test_root_after_a_parent(self, hasher: BlockHasher) -> None:
        assert hasher.root(SCOPE, bytes(16)).hex() == REROOTED_HEX
        assert hasher.root(SCOPE, bytes(16)) == blake(b"ropeway.root.v1", u32(len(SCOPE)) + SCOPE + bytes(16))

    def test_chain(self, hasher: BlockHasher) -> None:
        root = hasher.root(SCOPE)
        assert hasher.chain(root, TOKENS).hex() == CHAIN_HEX
        assert list(split_chain(hasher.chain(root, TOKENS))) == by_the_book(root, list(range(12)))

    def test_chain_with_extras(self, hasher: BlockHasher) -> None:
        root = hasher.root(SCOPE)
        assert hasher.chain(root, TOKENS, EXTRAS).hex() == CHAIN_WITH_EXTRAS_HEX
        assert list(split_chain(hasher.chain(root, TOKENS, EXTRAS))) == by_the_book(root, list(range(12)), EXTRAS)

    def test_contents(self, hasher: BlockHasher) -> None:
        assert [name.hex() for name in hasher.contents(TOKENS)] == CONTENTS_HEX
        assert hasher.contents(TOKENS)[0] == blake(b"ropeway.contn.v1", u32(4) + TOKENS[:16])

    def test_contents_with_extras(self, hasher: BlockHasher) -> None:
        names = [name.hex() for name in hasher.contents(TOKENS, EXTRAS)]
        assert names == [CONTENTS_HEX[0], EXTRA_CONTENT_HEX, CONTENTS_HEX[2]]

    def test_extras(self) -> None:
        assert EXTRAS[1].hex() == "ffffffff05000000696d672d610200000005000000696d672d62"
        assert EXTRAS[1] == b"\xff\xff\xff\xff" + u32(5) + b"img-a" + u32(2) + u32(5) + b"img-b"

    @pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
    def test_every_process_gives_the_same_names(self, hash_seed: str) -> None:
        script = (
            "import json, sys; from cachecore.blocks import *; hasher = BlockHasher(bytes.fromhex(sys.argv[1]), 4);"
            "root = hasher.root(bytes.fromhex(sys.argv[2])); print(json.dumps([root.hex(),"
            "hasher.chain(root, pack_tokens(range(12))).hex()]))"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, KEY.hex(), SCOPE.hex()],
            env={"PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            check=True,
        )
        assert json.loads(done.stdout) == [ROOT_HEX, CHAIN_HEX]


class TestChaining:
    @settings(max_examples=60, deadline=None)
    @given(
        token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=60),
        block=st.integers(1, 9),
        at=st.integers(0, 60),
    )
    def test_a_chain_in_pieces_is_the_whole_chain(self, token_ids: list[int], block: int, at: int) -> None:
        hasher = BlockHasher(KEY, block)
        root = hasher.root(SCOPE)
        whole = hasher.chain(root, pack_tokens(token_ids))
        assert list(split_chain(whole)) == by_the_book(root, token_ids, block=block)
        cut = min(at, len(token_ids) // block) * block
        head = hasher.chain(root, pack_tokens(token_ids[:cut]))
        parent = PrefixHash(head[-HASH_BYTES:]) if head else root
        assert head + hasher.chain(parent, pack_tokens(token_ids[cut:])) == whole

    def test_a_partial_block_has_no_name(self, hasher: BlockHasher) -> None:
        root = hasher.root(SCOPE)
        assert hasher.chain(root, pack_tokens([1, 2, 3])) == EMPTY_CHAIN
        assert hasher.contents(pack_tokens([1, 2, 3])) == []
        assert hasher.chain(root, pack_tokens(range(11))) == hasher.chain(root, pack_tokens(range(8)))

    def test_equal_blocks_after_different_prefixes_differ(self, hasher: BlockHasher) -> None:
        root = hasher.root(SCOPE)
        one = list(split_chain(hasher.chain(root, pack_tokens([1, 1, 1, 1, 5, 5, 5, 5]))))
        two = list(split_chain(hasher.chain(root, pack_tokens([2, 2, 2, 2, 5, 5, 5, 5]))))
        assert not set(one) & set(two)
        assert hasher.contents(pack_tokens([1, 1, 1, 1, 5, 5, 5, 5]))[1] == hasher.contents(pack_tokens([5] * 4))[0]

    def test_an_extra_marks_its_block_and_all_after_it(self, hasher: BlockHasher) -> None:
        root = hasher.root(SCOPE)
        plain, image = (
            list(split_chain(hasher.chain(root, TOKENS, [b"", extra, b""])))
            for extra in (b"", canonical_extras([Extra(0, b"cat")]))
        )
        assert [a == b for a, b in zip(plain, image, strict=True)] == [True, False, False]

    def test_kinds_sizes_and_keys_are_apart(self, hasher: BlockHasher) -> None:
        root = hasher.root(SCOPE)
        names = {
            root,
            hasher.root(SCOPE, root),
            hasher.chain(root, TOKENS)[:16],
            hasher.contents(TOKENS)[0],
            BlockHasher(KEY, 2).chain(root, TOKENS)[:16],
            BlockHasher(KEY, 12).chain(root, TOKENS)[:16],
            BlockHasher(bytes(32), 4).chain(root, TOKENS)[:16],
        }
        assert len(names) == 7

    def test_a_private_text_after_a_public_prefix(self) -> None:
        """The root switches at the boundary: public blocks are everyone's, what follows is the tenant's alone."""
        public, ours, theirs = (BlockHasher(bytes([number]) * 32, 4) for number in range(3))
        prefix = public.chain(public.root(b"public scope"), pack_tokens(range(8)))
        boundary = PrefixHash(prefix[-HASH_BYTES:])
        private = pack_tokens(range(8, 16))
        our_text = ours.chain(ours.root(b"our scope", boundary), private)
        assert our_text != theirs.chain(theirs.root(b"their scope", boundary), private)
        assert our_text != ours.chain(ours.root(b"our scope"), private)
        other_boundary = PrefixHash(prefix[:HASH_BYTES])
        assert our_text != ours.chain(ours.root(b"our scope", other_boundary), private)
        assert our_text != public.chain(boundary, private)


class TestInputs:
    def test_tokens_may_be_any_bytes(self, hasher: BlockHasher) -> None:
        root = hasher.root(SCOPE)
        for tokens in (bytearray(TOKENS), memoryview(TOKENS), memoryview(array("I", range(12)))):
            assert hasher.chain(root, tokens).hex() == CHAIN_HEX
            assert [name.hex() for name in hasher.contents(tokens)] == CONTENTS_HEX

    def test_packing(self) -> None:
        assert pack_tokens([1, 2**32 - 1]) == b"\x01\x00\x00\x00\xff\xff\xff\xff"
        assert pack_tokens(array("I", [7])) == b"\x07\x00\x00\x00"
        assert pack_tokens(()) == b""

    @pytest.mark.parametrize("token", [-1, 2**32])
    def test_token_ids_out_of_range(self, token: int) -> None:
        with pytest.raises(OverflowError):
            pack_tokens([token])

    @pytest.mark.parametrize("size", [0, -1, 65_537])
    def test_block_size_out_of_range(self, size: int) -> None:
        with pytest.raises(ValueError, match="block size"):
            BlockHasher(KEY, size)

    def test_short_keys(self) -> None:
        with pytest.raises(ValueError, match="32 bytes"):
            BlockHasher(b"short", 16)

    def test_order_of_extras_is_no_matter(self) -> None:
        a, b = Extra(1, b"x"), Extra(0, b"longer")
        assert canonical_extras([a, b]) == canonical_extras([b, a])

    @pytest.mark.parametrize(
        ("left", "right"),
        [
            ([Extra(0, b"ab")], [Extra(0, b"a"), Extra(0, b"b")]),
            ([Extra(0, b"a")], [Extra(1, b"a")]),
            ([Extra(0, b"a")], [Extra(0, b"a"), Extra(0, b"a")]),
            ([], [Extra(0, b"")]),
        ],
    )
    def test_different_extras_have_different_forms(self, left: list[Extra], right: list[Extra]) -> None:
        assert canonical_extras(left) != canonical_extras(right)

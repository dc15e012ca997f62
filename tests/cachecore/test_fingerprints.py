"""Fingerprints beside the formula, and what tells scopes apart."""

import random

import pytest

from cachecore.blocks import pack_tokens
from cachecore.fingerprints import Fingerprinter
from cachecore.scope import IdentityScope, KeyId, Keyring, Naming, TenantId

RING = Keyring({0: bytes(range(32)), 1: bytes(32)}, 0)
PRIME = 2**61 - 1


def naming(size=16, tenant="acme", model="m", epoch=0):
    return Naming.of(IdentityScope(model, KeyId(TenantId(tenant), epoch), size), RING)


def by_the_formula(subject, tokens):
    """At every offset, with Python's integers."""
    size, base = subject.block_size_tokens, subject._base
    windows = (tokens[start : start + size] for start in range(len(tokens) - size + 1))
    return [
        (pow(base, size) + sum(token * pow(base, size - 1 - at) for at, token in enumerate(window))) % PRIME
        for window in windows
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 16, 24, 100])
def test_every_offset_as_the_formula_says(size):
    subject, draw = Fingerprinter(naming(size)), random.Random(size)
    for count in (0, size - 1, size, size + 1, 5 * size + 3):
        tokens = [draw.choice([0, 1, 2**32 - 1, draw.randrange(50_000)]) for _ in range(count)]
        expected = by_the_formula(subject, tokens)
        assert subject.windows(pack_tokens(tokens)).tolist() == expected
        assert subject.blocks(pack_tokens(tokens)) == expected[::size]


def test_a_passage_has_the_same_fingerprints_wherever_it_stands():
    subject, draw = Fingerprinter(naming()), random.Random(1)
    passage, other = ([draw.randrange(50_000) for _ in range(count)] for count in (64, 37))
    held = subject.blocks(pack_tokens(passage))
    windows = subject.windows(pack_tokens([*other, *passage, *other])).tolist()
    assert [windows.index(fingerprint) for fingerprint in held] == [37, 53, 69, 85]


@pytest.mark.parametrize("tokens", [[0] * 16, [1] * 16, list(range(16))])
def test_scopes_have_nothing_in_common(tokens):
    scopes = [naming(), naming(tenant="b"), naming(model="n"), naming(epoch=1), naming(size=8)]
    fingerprints = {Fingerprinter(scope).blocks(pack_tokens(tokens))[0] for scope in scopes}
    assert len(fingerprints) == len(scopes)
    assert 0 not in fingerprints


def test_no_two_windows_of_a_long_prompt_collide():
    draw = random.Random(2)
    tokens = [draw.randrange(200) for _ in range(60_000)]
    windows = {tuple(tokens[start : start + 16]) for start in range(len(tokens) - 15)}
    fingerprints = Fingerprinter(naming()).windows(pack_tokens(tokens))
    assert len(set(fingerprints.tolist())) == len(windows)

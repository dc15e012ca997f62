"""A seeded event stream, and what an index keeps of it for whoever follows it next, in the plainest way."""

import random
from collections import Counter
from hashlib import blake2b

from cachecore.blocks import HASH_BYTES, Chain, pack_tokens, split_chain
from cachecore.events import AllBlocksCleared, BlockRemoved, BlockStored
from cachecore.holders import Tier
from cachecore.index.contract import Cleared, Stored
from cachecore.ledgers import RestoredRun
from cachecore.scope import DEFAULT_TENANT, Fidelity, IdentityScope, KeyId, Keyring, Naming, Salt, TenantId

OURS = 4
RING = Keyring({0: bytes(range(32))}, 0)
MEDIA = {Tier.L0: "GPU", Tier.L1: "CPU", Tier.L2: "DISK"}


def naming(tenant=DEFAULT_TENANT, adapter="", block_size=OURS, model="m"):
    return Naming.of(IdentityScope(model, KeyId(tenant, 0), block_size, adapter=adapter), RING)


DEFAULT = naming()


def naming_for(salt, adapter):
    if salt is None:
        return naming(adapter=adapter or "")
    read = RING.read_salt(salt)
    return None if read is None else naming(read.key_id.tenant, adapter or "")


def minted(tenant, fidelity=Fidelity.EXACT):
    return RING.mint_salt(Salt(KeyId(TenantId(tenant), 0), fidelity))


def chain_of(numbers, of=DEFAULT, size=OURS):
    return of.hasher.chain(of.root, pack_tokens([token for number in numbers for token in tokens_of(number, size)]))


def tokens_of(number, size=OURS):
    return [number * 100 + place for place in range(size)]


class Engine:
    """A seeded event stream: a forest of prompts in three scopes, copies, three tiers, evictions in any order.

    Now and then a prompt goes on less faithfully than it began: the same blocks may be there at several fidelities.
    """

    def __init__(self, seed, size, orphans):
        self.rng = random.Random(seed)
        self.size = size
        self.orphans = orphans
        self.held = Counter()
        """By (tier, path, fidelity); a path is the number of a scope, then those of blocks."""
        self.scopes = [{}, {"cache_salt": minted("acme")}, {"cache_salt": minted("b"), "lora_name": "ad"}]
        self.scopes.append({"cache_salt": "theirs"})

    def batch(self):
        return [self._event() for _ in range(self.rng.randint(0, 3))]

    def _event(self):
        kind = self.rng.random()
        if kind < 0.005:
            self.held.clear()
            return AllBlocksCleared()
        if kind < 0.4 and +self.held:
            return self._remove()
        return self._store()

    def _store(self):
        tier = self.rng.choice([Tier.L0, Tier.L0, Tier.L1, Tier.L2])
        known = sorted({(path, fidelity) for _, path, fidelity in +self.held})
        base, before = self.rng.choice(known) if known and self.rng.random() < 0.8 else ((), Fidelity.EXACT)
        if not base:
            base = (self.rng.randrange(len(self.scopes)),)
        new = [self.rng.randint(1, 3) for _ in range(self.rng.randint(1, 4))]
        if (base[:-1], before) in known and (len(base) > 8 or self.rng.random() < 0.3):
            base, new = base[:-1], [base[-1]]  # another copy of what is there
        if self.orphans and self.rng.random() < 0.1:
            base = (*base, self.rng.randint(4, 5))  # a block that was not announced, or not yet
        paths = [(*base, *new[: count + 1]) for count in range(len(new))]
        fidelity = max(before, self._stated()) if len(base) > 1 else before
        self.held.update((tier, path, fidelity) for path in paths)
        ids = [token for path in paths for token in tokens_of(path[-1], self.size)]
        parent = handle_of(base, before) if len(base) > 1 else None
        more = self.scopes[base[0]] if parent is None else self._salt(base[0], before, fidelity)
        handles = tuple(handle_of(path, fidelity) for path in paths)
        return BlockStored(handles, parent, ids, self.size, MEDIA[tier], **more)

    def _stated(self):
        return self.rng.choice([Fidelity.EXACT] * 8 + [Fidelity.QUANTIZED, Fidelity.FUSED])

    def _salt(self, scope, before, fidelity):
        """A salt says what has become worse; an engine may as well repeat the old one."""
        if fidelity == before:
            return self.scopes[scope] if self.rng.random() < 0.2 else {}
        return {**self.scopes[scope], "cache_salt": minted("acme", fidelity)}

    def truth(self):
        """Copies of our blocks, by ((tier, fidelity), name)."""
        copies = Counter()
        for (tier, path, fidelity), count in (+self.held).items():
            of = naming_for(self.scopes[path[0]].get("cache_salt"), self.scopes[path[0]].get("lora_name"))
            if of is not None:
                copies[(tier, fidelity), chain_of(path[1:], of)[-HASH_BYTES:]] += count
        return copies

    def _remove(self):
        tier = self.rng.choice(sorted(+self.held))[0]
        there = sorted((path, fidelity) for at, path, fidelity in +self.held if at == tier)
        gone = self.rng.sample(there, min(len(there), self.rng.randint(1, 4)))
        for path, fidelity in gone:
            self.held[tier, path, fidelity] -= 1
        return BlockRemoved(tuple(handle_of(*one) for one in gone), MEDIA[tier])


def handle_of(path, fidelity):
    return int.from_bytes(blake2b(bytes((fidelity, *path)), digest_size=8).digest(), "big")


class Kept:
    """What an index keeps of a holder: of each handle its names, and in which layers they are how often.

    A layer is a tier and a fidelity.

    It knows handles as an index does: by the names that are stored and removed.
    """

    def __init__(self):
        self.copies = Counter()
        """By (layer, name)."""
        self.runs = {}
        """By (layer, handle): names and origin."""
        self.handle_of = {}
        """By (layer, name)."""
        self.persistable = True

    def apply(self, events):
        for event in events:
            if isinstance(event, Cleared):
                self.__init__()
            elif isinstance(event, Stored):
                self._store(event)
            else:
                self._remove(event)

    def _store(self, event):
        names, layer = list(split_chain(event.chain)), (event.tier, event.fidelity)
        self.persistable &= bool(event.handles)
        self.copies.update((layer, name) for name in names)
        each = len(names) // max(1, len(event.handles))
        for at, handle in enumerate(event.handles):
            of_handle = names[at * each : (at + 1) * each]
            self.runs[layer, handle] = (Chain(b"".join(of_handle)), event.origin)
            self.handle_of.update(((layer, name), handle) for name in of_handle)

    def _remove(self, event):
        layer = event.tier, event.fidelity
        for name in split_chain(event.chain):
            self.copies[layer, name] -= 1
            assert self.copies[layer, name] >= 0
            if not self.copies[layer, name]:
                del self.copies[layer, name]
                handle = self.handle_of.pop((layer, name))
                if self.runs.get((layer, handle), (b"",))[0].startswith(name):
                    self.runs.pop((layer, handle))

    def count(self, layer, names):
        return [self.copies[layer, name] for name in split_chain(names)]

    def restored_runs(self, rng=None):
        """One run for each handle, or neighbours of one origin together, in any order."""
        runs = [
            RestoredRun(names, (handle,) * blocks(names), origin, tier, self.count((tier, fidelity), names), fidelity)
            for ((tier, fidelity), handle), (names, origin) in self.runs.items()
        ]
        if rng is not None:
            runs = joined(runs)
            rng.shuffle(runs)
        return runs


def blocks(names):
    return len(names) // HASH_BYTES


def joined(runs):
    """Runs of one layer and origin as one. An index joins neighbours only; to a ledger it is all the same."""
    groups = {}
    for run in runs:
        groups.setdefault((run.tier, run.fidelity, run.origin), []).append(run)
    return [
        RestoredRun(
            Chain(b"".join(run.names for run in group)),
            tuple(handle for run in group for handle in run.handles),
            origin,
            tier,
            tuple(copies for run in group for copies in run.copies),
            fidelity,
        )
        for (tier, fidelity, origin), group in groups.items()
    ]

"""Keeps a content index true about holders, from the same events that a prefix index gets.

A store says its text (`Stored.text`, when the rekeyer was asked for it). Its position is its parent's and one more, or
0 behind a root; where the parent's is not known (its text was given up, it is an image's block, or this process came
later), the blocks are left out, and what follows them as well: that shortens what is found and makes nothing wrong.

Only KV as an engine computed it, or quantized once, is offered: what has been turned or repaired would be so twice.
"""

from collections import OrderedDict
from collections.abc import Iterable

from cachecore.blocks import HASH_BYTES, Chain, PrefixHash, split_chain
from cachecore.fingerprints import Fingerprinter
from cachecore.holders import Holder, Place, Tier
from cachecore.index.content import MemoryContentIndex
from cachecore.index.contract import ContentHolding, IndexEvent, Removed, Stored, Text
from cachecore.scope import Fidelity, Naming

_FINGERPRINTERS_MAX = 1024
_OFFERED = (Fidelity.EXACT, Fidelity.QUANTIZED)


class ContentFeed:
    """Writes one `MemoryContentIndex`, for any number of holders."""

    def __init__(self, index: MemoryContentIndex) -> None:
        self.index = index
        self._further: dict[Holder, dict[tuple[Place, PrefixHash], int]] = {}
        """Copies of held blocks beyond the first."""
        self._fingerprinters: OrderedDict[PrefixHash, Fingerprinter] = OrderedDict()

    def apply(self, holder: Holder, events: Iterable[IndexEvent]) -> None:
        for event in events:
            if isinstance(event, Stored):
                if event.text is not None and event.fidelity in _OFFERED:
                    self._store(Place(holder, event.tier, event.fidelity), event, event.text)
            elif isinstance(event, Removed):
                self._remove(Place(holder, event.tier, event.fidelity), event.chain)
            else:
                self.forget(holder)

    def forget(self, holder: Holder) -> None:
        self._further.pop(holder, None)
        self.index.forget(holder)

    def fingerprinter(self, naming: Naming) -> Fingerprinter:
        known = self._fingerprinters.get(naming.root)
        if known is None:
            known = self._fingerprinters[naming.root] = Fingerprinter(naming)
            if len(self._fingerprinters) > _FINGERPRINTERS_MAX:
                self._fingerprinters.popitem(last=False)
        return known

    def _store(self, place: Place, event: Stored, text: Text) -> None:
        position = 0 if event.parent == text.naming.root else self._position_after(place, event.parent)
        if position is None:
            return
        contents = text.naming.hasher.contents(text.tokens)
        fingerprints = self.fingerprinter(text.naming).blocks(text.tokens)
        parent, index = event.parent, self.index
        for at, source in enumerate(split_chain(event.chain)):
            if (place, source) in index:
                further = self._further.setdefault(place.holder, {})
                further[place, source] = further.get((place, source), 0) + 1
            else:
                index.add(contents[at], ContentHolding(place, source, position + at, parent), fingerprints[at])
            parent = source

    def _position_after(self, place: Place, parent: PrefixHash) -> int | None:
        """A chain may go on in another tier, or less faithfully, than where its beginning lies."""
        position = self.index.position_after(place, parent)
        if position is not None:
            return position
        others = (Place(place.holder, tier, fidelity) for tier in Tier for fidelity in _OFFERED)
        found = (self.index.position_after(other, parent) for other in others)
        return next((position for position in found if position is not None), None)

    def _remove(self, place: Place, chain: Chain) -> None:
        further = self._further.get(place.holder)
        for source in split_chain(chain) if len(chain) % HASH_BYTES == 0 else ():
            copies = further.get((place, source), 0) if further else 0
            if not copies or further is None:
                self.index.remove(place, source)
            elif copies == 1:
                del further[place, source]
            else:
                further[place, source] = copies - 1

"""The content index of one process: where a block's text lies, whatever came before it.

One entry per (place, source), since a PrefixHash names one text. Forgetting a holder strikes its list of entries;
what `find` reads must be on its holder's list, and the struck entries are freed a few at a time by later calls.

A holding costs about 830 bytes, fingerprint included: bound it where fleets are large.
"""

from collections import OrderedDict
from collections.abc import Sequence

from cachecore.blocks import ContentHash, PrefixHash
from cachecore.holders import Holder, Place
from cachecore.index.contract import ContentHolding

_Key = tuple[Place, PrefixHash]

_SWEEP_ENTRIES = 64
"""Struck entries freed per call that writes."""


class _Text:
    """A text that is held somewhere."""

    __slots__ = ("fingerprint", "holdings")

    def __init__(self) -> None:
        self.fingerprint: int | None = None
        self.holdings: dict[_Key, ContentHolding] = {}


class MemoryContentIndex:
    """A `ContentIndex` in memory. `holdings_max` bounds the holdings kept, oldest forgotten first; 0 means no bound."""

    def __init__(self, holdings_max: int = 0) -> None:
        self._holdings_max = holdings_max
        self._contents: OrderedDict[_Key, ContentHash] = OrderedDict()
        self._texts: dict[ContentHash, _Text] = {}
        self._by_fingerprint: dict[int, ContentHash] = {}
        self._listed: dict[Holder, set[_Key]] = {}
        self._struck: list[set[_Key]] = []

    def __len__(self) -> int:
        """Holdings that can be found."""
        return sum(len(keys) for keys in self._listed.values())

    def __contains__(self, key: _Key) -> bool:
        return key in self._listed.get(key[0].holder, ())

    def add(self, content: ContentHash, holding: ContentHolding, fingerprint: int | None = None) -> None:
        key = holding.place, holding.source
        if key in self._contents:
            self._drop(key)
        self._contents[key] = content
        text = self._texts.get(content)
        if text is None:
            text = self._texts[content] = _Text()
        text.holdings[key] = holding
        if fingerprint is not None and text.fingerprint is None:
            text.fingerprint = fingerprint
            self._by_fingerprint[fingerprint] = content
        self._listed.setdefault(holding.place.holder, set()).add(key)
        self._sweep()
        while self._holdings_max and len(self._contents) > self._holdings_max:
            self._drop(next(iter(self._contents)))

    def remove(self, place: Place, source: PrefixHash) -> None:
        if (place, source) in self._contents:
            self._drop((place, source))
        self._sweep()

    def find(self, content: ContentHash, limit: int = 8) -> Sequence[ContentHolding]:
        found: list[ContentHolding] = []
        text = self._texts.get(content)
        for key, holding in reversed(text.holdings.items()) if text else ():
            if len(found) == limit:
                break
            if key in self._listed.get(holding.place.holder, ()):
                found.append(holding)
        return found

    def resolve(self, fingerprint: int) -> ContentHash | None:
        return self._by_fingerprint.get(fingerprint)

    def position_after(self, place: Place, source: PrefixHash) -> int | None:
        """Where the block behind `source` stands; None where that is not known. What is asked for is used: it goes
        last when the index must forget."""
        key = place, source
        if key not in self:
            return None
        self._contents.move_to_end(key)
        return self._texts[self._contents[key]].holdings[key].position_blocks + 1

    def forget(self, holder: Holder) -> None:
        keys = self._listed.pop(holder, None)
        if keys:
            self._struck.append(keys)

    def _drop(self, key: _Key) -> None:
        content, holder = self._contents.pop(key), key[0].holder
        text = self._texts[content]
        del text.holdings[key]
        if not text.holdings:
            del self._texts[content]
            if text.fingerprint is not None and self._by_fingerprint.get(text.fingerprint) == content:
                del self._by_fingerprint[text.fingerprint]
        listed = self._listed.get(holder, set())
        listed.discard(key)
        if not listed:
            self._listed.pop(holder, None)

    def _sweep(self) -> None:
        for _ in range(_SWEEP_ENTRIES):
            if not self._struck:
                return
            key = self._struck[-1].pop()
            if not self._struck[-1]:
                self._struck.pop()
            # The holder may have come back and stored the block anew.
            if key in self._contents and key not in self._listed.get(key[0].holder, ()):
                self._drop(key)

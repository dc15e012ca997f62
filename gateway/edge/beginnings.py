"""Beginnings of chat bodies that have been read before: a shared system prompt, the turns of a conversation so far.

Reading JSON costs 1.5 ns a byte, comparing bytes a twentieth of that. So what a body's first messages said is
remembered by their bytes. A body that begins with them is read with `null` in their place:

    {"model": "m", "messages": [{... known ...}, {"role": "user", ...}], "stream": true}
    {"model": "m", "messages": [null, {"role": "user", ...}], "stream": true}

Both are valid or neither is, and they say the same but for the first messages: what is replaced was found to be whole
elements of the very array. Whatever is checked about the top level is checked on what is left.

Candidates are looked up by where the last few messages begin, which is a guess; a comparison of all bytes decides. They
are kept by tenant: how fast a body is read says nothing of what others have sent.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

import msgspec

BODY_BYTES_MIN = 2048
"""Shorter bodies are read faster than looked up."""
NEW_BYTES_MIN = 1024
NEW_MESSAGES_MIN = 5
"""As much must be new in a body for its beginning to be remembered, or as many messages."""
BEGINNING_BYTES_MAX = 4 * 2**20
BEGINNINGS_BYTES_MAX = 32 * 2**20
_CANDIDATES_MAX = 6
_KEY_BYTES = 32
_SEPARATOR_BYTES_MAX = 16
_SPACE = b" \t\r\n"
_MESSAGE = b'{"role"'

_decode_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode


class Beginning(NamedTuple):
    data: bytes
    """Up to the end of a message."""
    stand_in: bytes
    """The same, with `null` for the messages."""
    messages: list[Any]


class Beginnings:
    """Bounded in bytes; those not met for longest go first."""

    def __init__(self, bytes_max: int = BEGINNINGS_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._known: OrderedDict[tuple[str, int, bytes], Beginning] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def find(self, tenant: str, data: bytes) -> Beginning | None:
        """The longest known beginning of a tenant's body, if it ends not far from the body's end."""
        at = len(data)
        for _ in range(_CANDIDATES_MAX):
            at = data.rfind(_MESSAGE, 0, at)
            if at < 0:
                return None
            end = data.rfind(b"}", max(at - _SEPARATOR_BYTES_MAX, 0), at) + 1
            key = (tenant, end, data[end - _KEY_BYTES : end])
            known = self._known.get(key)
            if known is not None and data.startswith(known.data):
                self._known.move_to_end(key)
                return known
        return None

    def learn(
        self, tenant: str, data: bytes, start: int, raw: bytes, known: Beginning | None, messages: list[Any]
    ) -> None:
        """Remember a body up to its last message.

        `start` is where the array of messages begins; `raw` its text, with a stand-in for what is `known` of it.
        """
        last = bytes(_decode_elements(raw)[-1])
        before = raw[:-1].rstrip(_SPACE).removesuffix(last).rstrip(_SPACE).removesuffix(b",").rstrip(_SPACE)
        end = start + len(before) + (len(known.data) - len(known.stand_in) if known is not None else 0)
        if not NEW_BYTES_MIN <= end <= BEGINNING_BYTES_MAX:
            return
        beginning = Beginning(data[:end], data[: start + 1] + b"null", messages[:-1])
        key = (tenant, end, beginning.data[-_KEY_BYTES:])
        replaced = self._known.pop(key, None)
        self._bytes += end - (len(replaced.data) if replaced is not None else 0)
        self._known[key] = beginning
        while self._bytes > self._bytes_max:
            self._bytes -= len(self._known.popitem(last=False)[1].data)

"""What a frame says of itself: whose KV it carries, of which model, where it stood, and how it is packed.

The binary form, little-endian:

    "RWKF" | version (u8) | header length without this prefix (u16)
    compatibility (16) | scope (16) | parent (16) | tail (16)
    | key epoch, first block, blocks, block size, position (u32)
    | layers: first, size, total | kv heads: first, size, total | head dim, value dim (u16) | fidelity, flags (u8)
    | lengths of tenant, dtype, codec (u8) | tenant | dtype | codec | payload length of each layer (u32)

It parses one way only: what `decode` takes, `encode` gives back byte for byte. Nothing here is authenticated; that is
for `cachecore.transfer.frames`.
"""

import re
import struct
from itertools import accumulate
from typing import NamedTuple

from cachecore.blocks import HASH_BYTES, TOKEN_BYTES, PrefixHash
from cachecore.scope import Fidelity, KeyId, TenantId
from cachecore.transfer.errors import FrameError

MAGIC = b"RWKF"
VERSION = 1
LAYERS_MAX = 1024
PREFIX = struct.Struct("<4sBH")

_FIXED = struct.Struct("<16s16s16s16s5I8H5B")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}")
_TENANT_BYTES_MAX = 64
_NAME_BYTES_MAX = 32
_WITH_TOKENS = 1
_FIDELITIES = tuple(Fidelity)
_U16, _U32 = 0xFFFF, 0xFFFF_FFFF

HEADER_BYTES_MAX = PREFIX.size + _FIXED.size + _TENANT_BYTES_MAX + 2 * _NAME_BYTES_MAX + 4 * LAYERS_MAX


class Span(NamedTuple):
    """`size` of `total` from `first` on: of a model's layers, or of its kv heads (a tensor parallel rank has some)."""

    first: int
    size: int
    total: int

    @property
    def end(self) -> int:
        return self.first + self.size

    @classmethod
    def all(cls, total: int) -> "Span":
        return cls(0, total, total)


# A tuple: a pull makes one for every frame, and a frozen dataclass of this many fields costs ten times as much.
class FrameHeader(NamedTuple):
    """One run of consecutive blocks, one range of layers, one range of kv heads. Checked by `encode` and `decode`."""

    compatibility: bytes
    """16 bytes: digest of weights, RoPE table, and the engine's KV dtype and layout. Equal ones read each other."""
    scope: bytes
    """The root of the run's chain (`Naming.root`): a keyed digest of its `IdentityScope`."""
    key_id: KeyId
    parent: PrefixHash
    """Name of the block before the run; the scope's root where there is none."""
    tail: PrefixHash
    """Name of the run's last block, and so of every token up to there."""
    first_block: int
    """Where the run begins in its chain, in blocks."""
    blocks: int
    block_size_tokens: int
    position: int
    """Of the run's first token when its KV was computed: `first_block * block_size_tokens` unless something before it
    (an image) takes up another number of positions than of tokens."""
    layers: Span
    kv_heads: Span
    head_dim: int
    value_dim: int
    """0 where values are part of the keys (MLA)."""
    dtype: str
    """Of the engine: what decoding results in."""
    codec: str
    fidelity: Fidelity
    """How good the payload is where it stands; to move it to another position is the puller's doing."""
    layer_bytes: tuple[int, ...]
    """Length of each layer's part of the payload."""
    with_tokens: bool = False
    """Whether the run's token ids (u32 LE each) follow the last layer: a puller that knows the run by its content only
    verifies them one by one."""

    def check(self) -> None:
        """Raises FrameError for what makes no sense."""
        if not (
            len(self.compatibility) == len(self.scope) == len(self.parent) == len(self.tail) == HASH_BYTES
            and 0 <= self.first_block <= _U32
            and 1 <= self.blocks <= _U32
            and 1 <= self.block_size_tokens <= 65_536
            and 0 <= self.position <= _U32
            and 1 <= self.head_dim <= _U16
            and 0 <= self.value_dim <= _U16
            and _is_span(self.layers, LAYERS_MAX)
            and _is_span(self.kv_heads, _U16)
            and _NAME.fullmatch(self.dtype)
            and _NAME.fullmatch(self.codec)
            and len(self.layer_bytes) == self.layers.size
            and 0 <= min(self.layer_bytes) <= max(self.layer_bytes) <= _U32
        ):
            raise FrameError(f"a frame's header that makes no sense: {self}")

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_size_tokens

    @property
    def token_bytes(self) -> int:
        """Length of the payload's last part, the token ids."""
        return self.tokens * TOKEN_BYTES if self.with_tokens else 0

    @property
    def payload_bytes(self) -> int:
        return sum(self.layer_bytes) + self.token_bytes

    def encode(self) -> bytes:
        """Raises FrameError."""
        self.check()
        texts = [text.encode() for text in (self.key_id.tenant, self.dtype, self.codec)]
        fixed = _FIXED.pack(
            self.compatibility,
            self.scope,
            self.parent,
            self.tail,
            self.key_id.epoch,
            self.first_block,
            self.blocks,
            self.block_size_tokens,
            self.position,
            *self.layers,
            *self.kv_heads,
            self.head_dim,
            self.value_dim,
            self.fidelity,
            _WITH_TOKENS if self.with_tokens else 0,
            *map(len, texts),
        )
        body = b"".join((fixed, *texts, struct.pack(f"<{len(self.layer_bytes)}I", *self.layer_bytes)))
        return PREFIX.pack(MAGIC, VERSION, len(body)) + body

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> "FrameHeader":
        """From exactly one header. Raises FrameError."""
        view = memoryview(data)
        if len(view) < PREFIX.size or header_bytes(view) != len(view):
            raise FrameError(f"{len(view)} bytes are no frame's header")
        try:
            return cls._decode_body(view[PREFIX.size :])
        except (struct.error, ValueError, IndexError) as error:
            raise FrameError(f"a frame's header does not parse: {error}") from error

    @classmethod
    def _decode_body(cls, body: memoryview) -> "FrameHeader":
        compatibility, scope, parent, tail, *numbers = _FIXED.unpack_from(body)
        epoch, first_block, blocks, block_size, position, *numbers = numbers
        *ranges, head_dim, value_dim, fidelity, flags = numbers[:-3]
        tenant_end, dtype_end, codec_end = tuple(accumulate(numbers[-3:], initial=_FIXED.size))[1:]
        if flags not in (0, _WITH_TOKENS):
            raise FrameError(f"a frame's header has flags {flags}")
        layers = Span(*ranges[:3])
        header = cls(
            compatibility,
            scope,
            KeyId(TenantId(str(body[_FIXED.size : tenant_end], "ascii")), epoch),
            PrefixHash(parent),
            PrefixHash(tail),
            first_block,
            blocks,
            block_size,
            position,
            layers,
            Span(*ranges[3:]),
            head_dim,
            value_dim,
            str(body[tenant_end:dtype_end], "ascii"),
            str(body[dtype_end:codec_end], "ascii"),
            _FIDELITIES[fidelity],
            struct.unpack(f"<{min(layers.size, LAYERS_MAX)}I", body[codec_end:]),
            flags == _WITH_TOKENS,
        )
        header.check()
        return header


def header_bytes(data: bytes | bytearray | memoryview) -> int:
    """Length of the header that begins with `data` (PREFIX.size bytes or more). Raises FrameError if none does."""
    magic, version, length = PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise FrameError(f"a frame does not begin with {bytes(magic)!r}")
    if version != VERSION:
        raise FrameError(f"a frame of version {version}; this is version {VERSION}")
    size = PREFIX.size + int(length)
    if not PREFIX.size + _FIXED.size < size <= HEADER_BYTES_MAX:
        raise FrameError(f"a frame's header of {size} bytes")
    return size


def _is_span(span: Span, most: int) -> bool:
    first, size, total = span
    return first >= 0 and size >= 1 and first + size <= total <= most

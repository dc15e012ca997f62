"""The codecs there are. Sizes are of SmolLM2's KV (head_dim 64) against bf16."""

from collections.abc import Mapping

from cachecore.kv.codecs.contract import Codec, CodecError
from cachecore.kv.codecs.lossy import LossyCodec
from cachecore.kv.codecs.quantizers import Float8, HadamardInt4, HadamardLloydMax3, Int8
from cachecore.kv.codecs.raw import RawCodec

_INT8, _FLOAT8, _INT4 = Int8(), Float8(), HadamardInt4()

CODECS: Mapping[str, Codec] = {
    codec.name: codec
    for codec in (
        RawCodec(),
        # 1.94x: the wire's default where it is within its budget.
        LossyCodec("i8", keys=_INT8, values=_INT8, sinks=_INT8),
        # 1.94x: for engines that attend in E4M3; ten times i8's divergence.
        LossyCodec("fp8", keys=_FLOAT8, values=_FLOAT8, sinks=_FLOAT8),
        # 3.56x
        LossyCodec("i4h", keys=_INT4, values=_INT4, sinks=_INT8),
        # 4.13x, for cold pools. Keys are what is sensitive: at 3 bits they cost ten times what values do.
        LossyCodec("lm3h", keys=_INT4, values=HadamardLloydMax3(), sinks=_INT8),
    )
}


def codec_named(name: str) -> Codec:
    """Raises CodecError for a name that nobody here knows."""
    if name not in CODECS:
        raise CodecError(f"codec {name!r} is not one of {', '.join(CODECS)}")
    return CODECS[name]

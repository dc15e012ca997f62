"""The codecs there are. Sizes are of SmolLM2's KV (head_dim 64) against bf16."""

from collections.abc import Mapping

from cachecore.kv.codecs.contract import Codec, CodecError
from cachecore.kv.codecs.lossy import LossyCodec, Protection
from cachecore.kv.codecs.quantizers import Float8, HadamardInt4, HadamardLloydMax3, Int8
from cachecore.kv.codecs.raw import RawCodec

CODECS: Mapping[str, Codec] = {
    codec.name: codec
    for codec in (
        RawCodec(),
        LossyCodec("i8", Int8()),  # 1.94x: the wire's default where it is within its budget
        LossyCodec("fp8", Float8()),  # 1.94x: for engines that attend in E4M3; ten times i8's error
        LossyCodec("i4h", HadamardInt4()),  # 3.56x
        # 4.08x: for cold pools.
        LossyCodec("lm3h", HadamardLloydMax3(), Protection(Int8(), outer_layers=2, sink_tokens=4)),
    )
}


def codec_named(name: str) -> Codec:
    """Raises CodecError for a name that nobody here knows."""
    if name not in CODECS:
        raise CodecError(f"codec {name!r} is not one of {', '.join(CODECS)}")
    return CODECS[name]

def encode(kind: int, text: str, words: dict[str, bytes], /) -> bytes:
    """Packed token ids of an ASCII text: what `words` has for each of its words, joined.

    `kind` is the place of the words' regular expression in `cachecore.prompts.words.NATIVE_PATTERNS`.
    """

def encode_headed(
    kind: int,
    text: object,
    opening: str,
    closing: str,
    heads: dict[str, bytes],
    words: dict[str, bytes],
    characters_max: int,
    /,
) -> bytes | None:
    """As `encode`, of a text that may begin with added tokens: up to the end of the last one, which begins with
    `opening` and ends with `closing`, it is looked up in `heads`. None for what is no ASCII text, an unknown head, and
    more than `characters_max` behind it."""

def encode(kind: int, text: str, words: dict[str, bytes], /) -> bytes:
    """Packed token ids of an ASCII text: what `words` has for each of its words, joined.

    `kind` is the place of the words' regular expression in `cachecore.prompts.words.NATIVE_PATTERNS`.
    """

"""Small model directories, trained here: one byte-level BPE of each known kind and one in Llama 2's manner."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from cachecore.blocks import BlockHasher
from cachecore.scope import DEFAULT_TENANT, IdentityScope, KeyId, Keyring, Naming

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's what they've been told, isn't it?",
    "What is the capital of France? The capital of France is Paris, 12 345 people say.",
    'def main(argument):\n    return [x for x in range(10)]\n\n\n\tprint("hello")\r\n',
    "Größe, naïve café, 你好 世界, привет мир, 🙂🙃 and e\u0301.",
    "You are a helpful assistant. user system assistant tool",
] * 4
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|tool|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama3": lambda: _split(WORDS + r"\p{N}{1,3}" + REST),
    "qwen2": lambda: _split(WORDS + r"\p{N}" + REST),
    "o200k": lambda: _split(CASED),
}


def byte_level_tokenizer(kind: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[kind]()
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """As Llama 2's: a space is put before the first text, and BOS before a plain prompt."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=specials + [f"<0x{byte:02X}>" for byte in range(256)],
        show_progress=False,
    )
    tokenizer.train_from_iterator([line.replace(" ", "▁") for line in CORPUS], trainer)
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] in specials]
    tokenizer = Tokenizer.from_str(json.dumps(document))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("[INST]", "[/INST]")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B:1", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def write_model(directory: Path, tokenizer: Tokenizer, template: str, **config: object) -> Path:
    tokenizer.save(str(directory / "tokenizer.json"))
    document = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(document))
    return directory


@pytest.fixture(scope="session")
def byte_level_directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        kind: write_model(
            tmp_path_factory.mktemp(kind),
            byte_level_tokenizer(kind),
            CHATML,
            bos_token="<|im_start|>",
            eos_token="<|im_end|>",
        )
        for kind in PRE_TOKENIZERS
    }


@pytest.fixture(scope="session")
def chatml_directory(byte_level_directories: dict[str, Path]) -> Path:
    return byte_level_directories["smollm"]


@pytest.fixture(scope="session")
def metaspace_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = (
        "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}"
        "[INST] {{ message.content }} [/INST]{% else %} {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    directory = tmp_path_factory.mktemp("metaspace")
    return write_model(directory, metaspace_tokenizer(), template, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def naming() -> Naming:
    keyring = Keyring({0: bytes(range(32))}, 0)
    return Naming.of(IdentityScope("model", KeyId(DEFAULT_TENANT, 0), 4), keyring)


@pytest.fixture
def other_naming(naming: Naming) -> Naming:
    scope = IdentityScope("other", naming.scope.key_id, naming.scope.block_size_tokens)
    hasher: BlockHasher = naming.hasher
    return Naming(scope, hasher, hasher.root(scope.canonical()))

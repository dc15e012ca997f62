"""Language models as an engine feels them: what a token costs to compute, and what it leaves in memory."""

from dataclasses import dataclass

from loadtest.hardware import named

_BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Model:
    """Shapes are of the published config.json; parameters multiply a token, so input embeddings do not count."""

    name: str
    parameters_active: float
    """That one token meets."""
    weight_bytes: float
    precision: str
    """In which weights are multiplied: `bf16` or `fp8`."""
    layers: int
    """With attention to everything before."""
    heads: int
    head_dim_key: int
    head_dim_value: int
    hidden: int
    kv_bytes_per_token: int
    """bf16, all ranks together, without what they hold in common; of the layers above alone."""
    kv_heads: int
    """Over how many tensor-parallel ranks a token's KV divides; more ranks than that hold copies."""
    source: str
    tensor_parallel: int = 1
    """With which it is usually served; more where it does not fit."""
    layers_windowed: int = 0
    """With attention to `window` tokens, whose KV does not grow with the prompt."""
    window: int = 0
    experts: int = 1
    experts_active: int = 1
    experts_share: float = 0.0
    """Of the weights, that lies in routed experts."""

    @property
    def flops_per_token(self) -> float:
        """A multiplication and an addition for each parameter, and attention within windows."""
        return 2 * self.parameters_active + self._attention_flops * self.layers_windowed * self.window

    @property
    def flops_per_pair(self) -> float:
        """Of attention from one token to one before it, all layers."""
        return self._attention_flops * self.layers

    @property
    def _attention_flops(self) -> float:
        return 2 * self.heads * (self.head_dim_key + self.head_dim_value)

    def weight_bytes_read(self, batch: int) -> float:
        """By a step that decodes `batch` tokens: of experts, those that any of them is sent to."""
        missed = (1 - self.experts_active / self.experts) ** batch
        return self.weight_bytes * (1 - self.experts_share * missed)


def _grouped(layers: int, kv_heads: int, head_dim: int) -> int:
    """KV bytes a token, keys and values."""
    return layers * 2 * kv_heads * head_dim * _BF16_BYTES


MODELS = {
    model.name: model
    for model in (
        Model(
            "llama-3-8b", 7.5e9, 16.1e9, "bf16", 32, 32, 128, 128, 4096, _grouped(32, 8, 128), 8,
            "meta-llama/Meta-Llama-3-8B: 8.03e9 parameters, 0.53e9 of them input embeddings",
        ),
        Model(
            "llama-3-70b", 69.5e9, 141.1e9, "bf16", 80, 64, 128, 128, 8192, _grouped(80, 8, 128), 8,
            "meta-llama/Meta-Llama-3-70B: 70.6e9 parameters, 1.05e9 of them input embeddings",
            tensor_parallel=8,
        ),
        Model(
            "qwen3-8b", 7.6e9, 16.4e9, "bf16", 36, 32, 128, 128, 4096, _grouped(36, 8, 128), 8,
            "Qwen/Qwen3-8B: 8.2e9 parameters, 0.62e9 of them input embeddings",
        ),
        Model(
            "qwen3-32b", 32.0e9, 65.5e9, "bf16", 64, 64, 128, 128, 5120, _grouped(64, 8, 128), 8,
            "Qwen/Qwen3-32B: 32.8e9 parameters, 0.78e9 of them input embeddings",
            tensor_parallel=2,
        ),
        Model(
            "gpt-oss-120b", 5.1e9, 65.2e9, "bf16", 18, 64, 64, 64, 2880, _grouped(18, 8, 64), 8,
            "openai/gpt-oss-120b: 116.8e9 parameters in MXFP4, 5.1e9 active, multiplied as bf16 where the GPU has no "
            "fp4; 18 of 36 layers see 128 tokens; 4 of 128 experts",
            layers_windowed=18, window=128, experts=128, experts_active=4, experts_share=0.93,
        ),
        Model(
            "deepseek-v3", 37e9, 671e9, "fp8", 61, 128, 192, 128, 7168, 61 * (512 + 64) * _BF16_BYTES, 1,
            "deepseek-ai/DeepSeek-V3 (and R1): 671e9 parameters in fp8, 37e9 active; MLA keeps 576 numbers a layer, "
            "which every rank holds; 8 of 256 experts",
            tensor_parallel=8, experts=256, experts_active=8, experts_share=0.975,
        ),
    )
}  # fmt: skip
DEFAULT_MODEL = "llama-3-70b"
_ALIASES = {"llama-3.1-8b": "llama-3-8b", "llama-3.1-70b": "llama-3-70b", "llama-3.3-70b": "llama-3-70b"} | {
    "deepseek-r1": "deepseek-v3"
}


def model_named(name: str) -> Model:
    """Raises ValueError that lists the models there are."""
    return named("model profile", MODELS, _ALIASES.get(name.lower(), name))

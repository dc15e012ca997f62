import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from workers.reference.config import ModelError, parse_rope
from workers.reference.rope import RopeConfig, attention_factor, inverse_frequencies, rope_table, rotate

HEAD_DIM = 16
DIVISORS = [1.0 + 0.5 * pair for pair in range(HEAD_DIM // 2)]
LONG_DIVISORS = [2.0 + pair for pair in range(HEAD_DIM // 2)]

SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 128,
        "mscale": 0.707,
        "mscale_all_dim": 1.2,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn-attention": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 1.25,
        "truncate": False,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": DIVISORS,
        "long_factor": LONG_DIVISORS,
        "original_max_position_embeddings": 512,
    },
    "longrope-factor": {
        "rope_type": "longrope",
        "factor": 16.0,
        "short_factor": DIVISORS,
        "long_factor": LONG_DIVISORS,
        "original_max_position_embeddings": 512,
    },
}


def config_of(scaling: dict | None, **fields: object) -> dict:
    return {"rope_theta": 50_000.0, "max_position_embeddings": 2048, "rope_scaling": scaling, **fields}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("positions", [400, 2048])
def test_frequencies_and_factor_are_those_of_transformers(name: str, positions: int) -> None:
    scaling = SCALINGS[name]
    theirs = LlamaConfig(
        hidden_size=HEAD_DIM * 2,
        num_attention_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 50_000.0, **scaling},
    )
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, torch.device("cpu"), seq_len=positions)
    ours = parse_rope(config_of(scaling), HEAD_DIM)
    torch.testing.assert_close(inverse_frequencies(ours, positions), expected, rtol=2e-7, atol=0)
    assert attention_factor(ours) == pytest.approx(factor, rel=1e-12)


def test_both_spellings_of_a_configuration_mean_the_same() -> None:
    older = {**SCALINGS["llama3"], "type": "llama3"}
    del older["rope_type"]
    newer = {"max_position_embeddings": 2048, "rope_parameters": {"rope_theta": 50_000.0, **SCALINGS["llama3"]}}
    assert parse_rope(config_of(older), HEAD_DIM) == parse_rope(newer, HEAD_DIM)


def test_rotation_turns_pairs_of_halves_and_leaves_the_rest() -> None:
    rope = RopeConfig(kind="default", theta=100.0, rotary_dim=4)
    table = rope_table(rope, 8)
    heads = torch.arange(1.0, 13.0).view(2, 1, 6)
    rows = torch.tensor([0, 5])
    turned = rotate(heads, table.cos[rows], table.sin[rows])
    assert torch.equal(turned[0], heads[0])
    assert torch.equal(turned[1, 0, 4:], heads[1, 0, 4:])
    for pair, frequency in enumerate((1.0, 0.1)):
        point = torch.complex(heads[1, 0, pair], heads[1, 0, pair + 2])
        expected = point * torch.exp(torch.tensor(5j * frequency))
        assert torch.isclose(torch.complex(turned[1, 0, pair], turned[1, 0, pair + 2]), expected)


def test_scores_depend_on_distance_alone() -> None:
    table = rope_table(parse_rope(config_of(SCALINGS["llama3"]), HEAD_DIM), 1024)
    query, key = torch.randn(2, 1, 1, HEAD_DIM, generator=torch.Generator().manual_seed(1))

    def score(at: int, other: int) -> float:
        turned_query = rotate(query, table.cos[at : at + 1], table.sin[at : at + 1])
        turned_key = rotate(key, table.cos[other : other + 1], table.sin[other : other + 1])
        return float((turned_query * turned_key).sum())

    assert score(30, 10) == pytest.approx(score(920, 900), abs=1e-4)
    assert score(30, 10) != pytest.approx(score(30, 20), abs=1e-2)


def test_attention_factor_scales_the_table() -> None:
    plain = rope_table(RopeConfig(kind="default", theta=100.0, rotary_dim=4), 3)
    scaling = {**SCALINGS["yarn"], "factor": 1.0, "attention_factor": 1.5}
    scaled = rope_table(parse_rope({**config_of(scaling), "rope_theta": 100.0}, 4), 3)
    torch.testing.assert_close(scaled.cos, plain.cos * 1.5)


def test_partial_rotary_takes_a_share_of_the_head() -> None:
    assert parse_rope(config_of(None, partial_rotary_factor=0.5), HEAD_DIM).rotary_dim == 8


def test_fingerprints_tell_tables_apart() -> None:
    tables = [rope_table(parse_rope(config_of(scaling), HEAD_DIM), 64) for scaling in (None, SCALINGS["linear"])]
    assert tables[0].fingerprint() != tables[1].fingerprint()
    assert tables[0].fingerprint() == rope_table(parse_rope(config_of(None), HEAD_DIM), 64).fingerprint()


@pytest.mark.parametrize(
    ("scaling", "reason"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "sequence's length"),
        ({"rope_type": "mrope"}, "not supported"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "needs 8 short"),
        ({"rope_type": "linear", "factor": -1.0}, "positive `factor`"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(scaling: dict, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        parse_rope(config_of(scaling), HEAD_DIM)

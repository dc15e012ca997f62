"""What is configured, and what of it is refused before anything starts."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cachecore.prompts.huggingface import HuggingFaceRenderer
from tests.cachecore.transfer.certificates import Authority
from tests.workers.vllm.checkpoints import save_checkpoint
from tests.workers.vllm.support import KEYRING
from workers.reference.fetch import default_cache_dir, fetch_smollm2
from workers.vllm.facts import in_layer_order, read_facts
from workers.vllm.settings import SettingsError, read_settings


@pytest.fixture
def keyring(tmp_path: Path) -> str:
    KEYRING.save(tmp_path / "keyring.json")
    return str(tmp_path / "keyring.json")


@pytest.fixture
def config(tmp_path: Path, keyring: str) -> SimpleNamespace:
    """As much of a `VllmConfig` as is looked at."""
    document = save_checkpoint(tmp_path)
    model = SimpleNamespace(
        model=str(tmp_path),
        revision=None,
        tokenizer=str(tmp_path),
        served_model_name=["tiny", "other"],
        dtype=torch.float32,
        max_model_len=256,
        hf_config=SimpleNamespace(to_dict=lambda: document),
    )
    events = SimpleNamespace(
        enable_kv_cache_events=True, publisher="zmq", endpoint="tcp://*:5557", replay_endpoint=None, topic="kv"
    )
    return SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(block_size=32, cache_dtype="auto", enable_prefix_caching=True),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_index=0, data_parallel_size=1
        ),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        speculative_config=None,
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"keyring": keyring, "tokenizer": "none"}, kv_load_failure_policy="recompute"
        ),
        kv_events_config=events,
    )


def test_a_keyring_is_enough(keyring: str) -> None:
    settings = read_settings({"keyring": keyring}, "recompute")
    assert (settings.host, settings.port, settings.sidecar_host) == ("127.0.0.1", 7100, "127.0.0.1")
    assert (settings.codecs, settings.stall_seconds) == (("raw",), 0.5)


@pytest.mark.parametrize(
    ("extra", "policy", "reason"),
    [
        ({}, "fail", "kv_load_failure_policy is 'fail'"),
        ({}, "", "kv_load_failure_policy is ''"),
        ({"keyring": "/nowhere/keyring.json"}, "recompute", "there is no keyring '/nowhere/keyring.json'"),
        ({"port": 70_000}, "recompute", "`int` <= 65535"),
        ({"port": "7100"}, "recompute", "got `str`"),
        ({"prot": 7100}, "recompute", "unknown field `prot`"),
        ({"codecs": ["raw", "zip"]}, "recompute", "codec 'zip' is not one of raw, i8"),
        ({"stall_seconds": 0}, "recompute", "> 0"),
    ],
)
def test_what_would_not_work_is_refused(keyring: str, extra: dict[str, Any], policy: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason) as refused:
        read_settings({"keyring": keyring, **extra}, policy)
    assert "\n" not in str(refused.value)


def test_tls_is_opened_at_once(keyring: str, tmp_path: Path) -> None:
    files = Authority.make(tmp_path).certify("a")
    extra = {"keyring": keyring, "tls_cert": str(files.certificate), "tls_key": str(files.key)}
    assert read_settings({"keyring": keyring}, "recompute").open_tls() is None
    assert read_settings({**extra, "tls_ca": str(files.authority)}, "recompute").open_tls() is not None
    for changed, reason in (
        (extra, "TLS for KV: peers would not believe"),
        ({**extra, "tls_key": "/nowhere/a.key"}, "TLS for KV: cannot read /nowhere/a.key"),
        ({"keyring": keyring, "tls_ca": str(files.authority)}, "needs a certificate: set tls_cert"),
    ):
        with pytest.raises(SettingsError, match=reason) as refused:
            read_settings(changed, "recompute")
        assert "\n" not in str(refused.value)


def test_ranks_have_ports_of_their_own(keyring: str) -> None:
    settings = read_settings({"keyring": keyring, "port": 9000, "sidecar_port": 0}, "recompute")
    assert (settings.of_rank(3).port, settings.of_rank(3).sidecar_port) == (9003, 0)


def nowhere(model: str, revision: str | None) -> str:
    raise FileNotFoundError(f"no snapshot of {model}")


def test_facts_of_a_configuration(config: SimpleNamespace, tmp_path: Path) -> None:
    facts = read_facts(config, nowhere)
    assert (facts.model, facts.block_size_tokens, facts.rank, facts.tokenizer_fingerprint) == ("tiny", 32, 0, "")
    assert facts.checkpoint.directory == tmp_path
    assert facts.kv_events == {
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": None,
        "topic": "kv",
        "block_size": 32,
        "dp_size": 1,
    }
    config.kv_events_config = None
    config.model_config.served_model_name = "single"
    facts = read_facts(config, nowhere)
    assert (facts.kv_events, facts.model) == (None, "single")


@pytest.mark.model
def test_the_tokenizer_is_the_gateways(config: SimpleNamespace) -> None:
    smollm2 = fetch_smollm2(default_cache_dir()).directory
    config.kv_transfer_config.kv_connector_extra_config["tokenizer"] = str(smollm2)
    assert read_facts(config, nowhere).tokenizer_fingerprint == HuggingFaceRenderer.load(smollm2).fingerprint


def test_a_tokenizer_that_is_not_there_is_refused(config: SimpleNamespace) -> None:
    del config.kv_transfer_config.kv_connector_extra_config["tokenizer"]
    with pytest.raises(SettingsError, match=r"cannot read tokenizer\.json"):
        read_facts(config, nowhere)


def test_a_published_model_is_looked_for_where_vllm_has_it(config: SimpleNamespace, tmp_path: Path) -> None:
    config.model_config.model, config.model_config.revision = "somebody/tiny", "abc"
    asked = []

    def snapshot(model: str, revision: str | None) -> str:
        asked.append((model, revision))
        return str(tmp_path)

    assert read_facts(config, snapshot).checkpoint.directory == tmp_path
    assert asked == [("somebody/tiny", "abc")]
    with pytest.raises(SettingsError, match="'somebody/tiny' are not on this machine: no snapshot"):
        read_facts(config, nowhere)


Change = Callable[[SimpleNamespace], None]


def changed(section: str, name: str, value: object) -> Change:
    return lambda config: setattr(getattr(config, section), name, value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (changed("parallel_config", "tensor_parallel_size", 2), "tensor parallelism"),
        (changed("parallel_config", "pipeline_parallel_size", 2), "pipeline parallelism"),
        (changed("scheduler_config", "async_scheduling", True), "asynchronous scheduling"),
        (changed("cache_config", "cache_dtype", "fp8"), "KV dtype fp8"),
        (changed("cache_config", "enable_prefix_caching", False), "without --enable-prefix-caching"),
        (lambda config: setattr(config, "speculative_config", object()), "speculative decoding"),
        (changed("kv_transfer_config", "kv_load_failure_policy", "fail"), "would fail the request"),
    ],
)
def test_what_the_connector_does_not_serve_is_refused(config: SimpleNamespace, change: Change, reason: str) -> None:
    change(config)
    with pytest.raises(SettingsError, match=reason):
        read_facts(config, nowhere)


def test_layers_go_by_their_numbers() -> None:
    names = [f"model.layers.{number}.self_attn.attn" for number in (10, 2, 0, 1, *range(3, 10))]
    assert in_layer_order(names) == [f"model.layers.{number}.self_attn.attn" for number in range(11)]
    for wrong in (["model.attn"], ["model.layers.1.attn"], ["a.0.x", "b.0.x"]):
        with pytest.raises(SettingsError, match="not one tensor for each layer"):
            in_layer_order(wrong)

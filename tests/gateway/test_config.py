from pathlib import Path

import pytest

from gateway.config import GatewayConfig
from gateway.errors import ConfigError
from gateway.settings.loading import Request, inspect, load


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "gateway.yaml"
        path.write_text(text)
        return path

    return write


def test_defaults() -> None:
    config = load(None, {})
    assert (config.host, config.port, config.policy, config.redis) == ("127.0.0.1", 8000, "kv-aware", "none")
    assert config.workers == ()
    assert config.tenants.open
    assert not config.policy_header_allowed
    assert not config.forward_kv_transfer_params
    assert config.limits.body_bytes_max == 64 * 1024 * 1024
    assert config.limits.header_bytes_max == 64 * 1024
    assert (config.timeouts.connect_seconds, config.timeouts.first_byte_seconds) == (2.0, None)
    assert (config.probes.interval_seconds, config.probes.unhealthy_after) == (2.0, 2)


def test_an_empty_file_is_the_defaults(write) -> None:
    assert load(write(""), {}) == GatewayConfig()


def test_a_file(write) -> None:
    path = write(
        """
        policy: session
        workers:
          - http://127.0.0.1:8001
          - {url: "http://10.0.0.2:8002/", name: second, model: m, block_size_tokens: 32}
        tokenizers: {m: /models/m}
        tenants: {api_keys_file: keys.jsonl}
        admin: {port: 9000}
        timeouts: {first_byte_seconds: 30}
        """
    )
    config = load(path, {})
    assert config.policy == "session"
    assert [worker.url for worker in config.workers] == ["http://127.0.0.1:8001", "http://10.0.0.2:8002/"]
    assert config.workers[1].block_size_tokens == 32
    assert config.tokenizers == {"m": Path("/models/m")}
    assert config.tenants.api_keys_file == Path("keys.jsonl")
    assert not config.tenants.open
    assert config.admin.port == 9000
    assert config.timeouts.first_byte_seconds == 30.0


def test_variables_win_over_the_file_and_flags_over_both(write) -> None:
    path = write("{port: 1001, policy: session, host: 10.0.0.1}")
    environment = {"ROPEWAY_PORT": "1002", "ROPEWAY_POLICY": "round-robin"}
    config = load(path, environment, {"port": 1003})
    assert (config.host, config.policy, config.port) == ("10.0.0.1", "round-robin", 1003)


def test_variables_of_nested_keys() -> None:
    config = load(
        None,
        {
            "ROPEWAY_LIMITS_BODY_BYTES_MAX": "2048",
            "ROPEWAY_TIMEOUTS_CONNECT_SECONDS": "0.5",
            "ROPEWAY_POLICY_HEADER_ALLOWED": "true",
            "ROPEWAY_ADMIN_KEY_FILE": "/run/key",
            "ROPEWAY_WORKERS": "[http://a:1, {url: 'http://b:2', name: b}]",
            "ROPEWAY_TOKENIZERS": "{m: /models/m}",
        },
    )
    assert config.limits.body_bytes_max == 2048
    assert config.timeouts.connect_seconds == 0.5
    assert config.policy_header_allowed is True
    assert config.admin.key_file == Path("/run/key")
    assert [(worker.url, worker.name) for worker in config.workers] == [("http://a:1", ""), ("http://b:2", "b")]
    assert config.tokenizers == {"m": Path("/models/m")}


def test_lists_are_replaced_and_mappings_merged(write) -> None:
    path = write("{workers: [http://a:1], tokenizers: {m: /file, n: /file}, limits: {connections_max: 7}}")
    overrides = {"workers": ["http://b:2"], "tokenizers": {"m": "/flag"}, "limits.header_bytes_max": 4096}
    config = load(path, {}, overrides)
    assert [worker.url for worker in config.workers] == ["http://b:2"]
    assert config.tokenizers == {"m": Path("/flag"), "n": Path("/file")}
    assert (config.limits.connections_max, config.limits.header_bytes_max) == (7, 4096)


def test_variables_that_are_not_ours_are_left_alone() -> None:
    environment = {
        "ROPEWAY_PORT": "tcp://10.0.0.1:8000",
        "ROPEWAY_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "ROPEWAY_SERVICE_HOST": "10.0.0.1",
        "ROPEWAY_MODEL_CACHE": "/cache",
        "ROPEWAY_HOST": "",
    }
    assert load(None, environment) == GatewayConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", ":1:1: unknown key 'prot'; did you mean 'port'?"),
        (
            "port: 1\nlimits:\n  body_byte_max: 3",
            ":3:3: unknown key 'limits.body_byte_max'; did you mean 'body_bytes_max'?",
        ),
        (
            "probes: {zzz: 3}",
            ":1:10: unknown key 'probes.zzz'; known here: interval_seconds, timeout_seconds, unhealthy_after",
        ),
        (
            "workers: [http://a:1, {url: 'http://b:2', nam: x}]",
            ":1:43: unknown key 'workers[1].nam'; did you mean 'name'?",
        ),
        ("policy: kv_aware", ":1:1: policy: 'kv_aware' is unknown; did you mean 'kv-aware'?"),
        ("limits: {body_bytes_max: 3}", ":1:10: limits.body_bytes_max: Expected `int` >= 1024"),
        ("port: eighty", ":1:1: port: Expected `int`, got `str`"),
        ("port: 70000", ":1:1: port: Expected `int` <= 65535"),
        ("limits: 4", ":1:1: limits: Expected `object`, got `int`"),
        ("timeouts: {idle_seconds: 0}", ":1:12: timeouts.idle_seconds: Expected `float` > 0.0"),
        ("admin: {key_file: 4}", ":1:9: admin.key_file: Expected `path`, got `int`"),
        ("workers: [{name: x}]", ":1:11: workers[0]: Object missing required field `url`"),
        ("workers:\n  - ftp://a:1", ":2:5: workers[0]: 'ftp://a:1' is not a URL of the form http://host:port"),
        ("workers: ['http://a:b']", ":1:11: workers[0]: 'http://a:b' is not a URL of the form http://host:port"),
        ("workers: [http://a:1/v1]", ":1:11: workers[0]: 'http://a:1/v1' must end after its port"),
        ("workers: [http://a:1, http://a:1/]", ":1:1: workers: the url 'http://a:1' is given twice"),
        ("redis: redis://a:1?timeout=9", ":1:1: redis: "),
        ("redis: http://a:1", ":1:1: redis: "),
        ("redis: redis://a:1", ": keyring: gateways that share an index must name blocks alike"),
        ("sharing: {prefix: '{a}'}", ":1:11: sharing.prefix: Expected `str` matching regex"),
        ("sharing: {lease_seconds: 0.1}", ":1:11: sharing.lease_seconds: Expected `float` >= 0.2"),
        ("prompts: {template_defaults: {m: {}}}", ":1:11: prompts.template_defaults: 'm' is not among the tokenizers"),
        ("tokenizers: {m: 3}", ":1:1: tokenizers[...]: Expected `path`, got `int`"),
        ("{port: 1, port: 2}", ":1:11: the key 'port' is given twice"),
        ("host: a\nadmin:\n  [1]: 2", ":3:3: a key must be plain"),
        ("a: &a\n  b: *a", ":1:4: this is nested too deeply"),
        ("[1]", ": a mapping is expected at the top, not list"),
        ("port: [", ":1:8: expected the node content, but found '<stream end>', while parsing a flow node"),
        ("host: '\x07'", ": unacceptable character #x0007"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(write, text: str, message: str) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load(path, {})
    assert str(caught.value).startswith(f"{path}{message}")
    assert "\n" not in str(caught.value)


def test_everything_that_is_wrong_is_said_at_once(write) -> None:
    path = write("prot: 1\npolicy: best\nlimits:\n  body_bytes_max: 3\n  connections_max: many\nprot: 2\n")
    variables = {"ROPEWAY_PROBES_UNHEALTHY_AFTER": "0", "ROPEWAY_WORKERS": "[{url: 'http://a:1', naem: red}]"}
    sources = Request(path, {"port": -1}, {"port": "--port"})
    config, _, problems = inspect(sources, variables)
    assert config is None
    assert [str(problem) for problem in problems] == [
        f"{path}:6:1: the key 'prot' is given twice",
        "ROPEWAY_PROBES_UNHEALTHY_AFTER: probes.unhealthy_after: Expected `int` >= 1",
        f"{path}:6:1: unknown key 'prot'; did you mean 'port'?",
        f"{path}:4:3: limits.body_bytes_max: Expected `int` >= 1024",
        f"{path}:5:3: limits.connections_max: Expected `int`, got `str`",
        "ROPEWAY_WORKERS: unknown key 'workers[0].naem'; did you mean 'name'?",
        "--port: port: Expected `int` >= 0",
    ]
    with pytest.raises(
        ConfigError, match=r"the key 'prot' is given twice \(6 more: 'ropeway config check' lists them\)$"
    ):
        load(path, variables, {"port": -1}, {"port": "--port"})


def test_anchors_and_merges_keep_their_places(write) -> None:
    path = write("base: &base {engine: vllm}\nworkers:\n  - {<<: *base, url: 'http://a:1', engine: sglang}\n")
    _, sources, problems = inspect(Request(path), {})
    (problem,) = problems
    assert str(problem).startswith(f"{path}:1:1: unknown key 'base'; ")
    assert sources.document["workers"] == [{"engine": "sglang", "url": "http://a:1"}]
    assert sources.origin(("workers", 0, "engine")).place == f"{path}:3:36"


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^ROPEWAY_PORT: port: Expected `int`"):
        load(None, {"ROPEWAY_PORT": "eighty"})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: No such file or directory$"):
        load(tmp_path / "absent.yaml", {})


def test_the_tree_is_frozen() -> None:
    with pytest.raises(AttributeError):
        GatewayConfig().port = 1  # type: ignore[misc]


def test_transfer(write) -> None:
    assert load(None, {}).transfer.fidelity == "quantized"
    path = write("transfer: {fidelity: exact, codecs: [raw], deadline_seconds_min: 0.2, deadline_seconds_max: 0.5}")
    config = load(path, {"ROPEWAY_TRANSFER_SHIFTED": "true", "ROPEWAY_TRANSFER_CODECS": "[i8]"}).transfer
    assert (config.enabled, config.fidelity, config.shifted, config.codecs) == (True, "exact", True, ("i8",))
    assert (config.deadline_seconds_min, config.deadline_seconds_max) == (0.2, 0.5)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("transfer: {fidelity: fussed}", "did you mean 'fused'"),
        ("transfer: {codec: raw}", "did you mean 'codecs'"),
        ("transfer: {codecs: []}", "transfer.codecs"),
        ("transfer: {deadline_seconds_min: 2, deadline_seconds_max: 1}", "deadline_seconds_min is larger"),
        ("transfer: {deadline_seconds_max: 700}", "transfer.deadline_seconds_max"),
        ("transfer: {link_gbps: 0}", "transfer.link_gbps"),
    ],
)
def test_a_wrong_transfer_section(write, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(write(text), {})


# Roles


def test_a_worker_has_both_roles_unless_it_is_said(write) -> None:
    config = load(
        write(
            """
            keyring: keys.json
            workers:
              - http://127.0.0.1:8001
              - {url: "http://127.0.0.1:8002", role: prefill}
              - {url: "http://127.0.0.1:8003", role: decode}
            disaggregation: {deadline_seconds_max: 60}
            """
        ),
        {},
    )
    assert [worker.role for worker in config.workers] == ["both", "prefill", "decode"]
    assert (config.disaggregation.deadline_seconds_min, config.disaggregation.deadline_seconds_max) == (5.0, 60.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "workers: [{url: 'http://a:1', role: prefil}]",
            "workers[0].role: 'prefil' is unknown; did you mean 'prefill'?",
        ),
        ("workers: [{url: 'http://a:1', role: prefill}]", "transfer.enabled and the keyring of the workers"),
        (
            "{keyring: k, transfer: {enabled: false}, workers: [{url: 'http://a:1', role: prefill}]}",
            "transfer.enabled and the keyring of the workers",
        ),
        ("disaggregation: {deadline_seconds_min: 200}", "deadline_seconds_min is larger than"),
    ],
)
def test_roles_that_cannot_be(write, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(text), {})
    assert message in str(caught.value)

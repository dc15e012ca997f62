"""The configuration tree of the gateway, checked once when it starts.

A file (`ropeway serve -c gateway.yaml`), environment variables and flags, each over the one before:

    host: 127.0.0.1
    port: 8000
    policy: kv-aware
    workers:
      - http://127.0.0.1:8001
      - {url: "http://127.0.0.1:8002", name: second, model: my-model, block_size_tokens: 16}
      - {url: "http://127.0.0.1:8003", engine: vllm, sidecar: "http://127.0.0.1:7203"}
    tokenizers:
      my-model: /models/my-model
    limits:
      body_bytes_max: 67108864

The variable of a key is its path in capitals behind `ROPEWAY_`: `limits.body_bytes_max` is
`ROPEWAY_LIMITS_BODY_BYTES_MAX`. Scalars are written plainly, lists and mappings as YAML
(`ROPEWAY_WORKERS='[http://127.0.0.1:8001]'`); an empty variable counts as unset. A list replaces the one beneath it;
mappings are merged. Other variables that begin with `ROPEWAY_` are left alone: they belong to other rooms.

A key that does not exist is an error that names its path and the nearest that does, in the file and in overrides
alike. Relative paths are relative to the working directory.
"""

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin
from urllib.parse import urlsplit

import msgspec
import yaml

from cachecore.store.address import parse_address
from cachecore.transfer.plan import DEADLINE_SECONDS_MAX
from gateway.errors import ConfigError
from policies import POLICIES
from policies.peers import PEERS

LogLevel = Literal["debug", "info", "warning", "error"]
FidelityName = Literal["exact", "quantized", "rotated", "fused"]
RoleName = Literal["both", "prefill", "decode"]
EngineName = Literal["", "vllm", "sglang", "trtllm", "llamacpp", "ropeway", "openai"]

Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Bytes = Annotated[int, msgspec.Meta(ge=1024)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]

ENVIRONMENT_PREFIX = "ROPEWAY_"


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the tree."""


class EventsConfig(Section, frozen=True, kw_only=True):
    """Where an engine's KV events are heard, where it does not say so itself or says it wrong."""

    endpoint: str
    """Of its first rank, `tcp://host:port`; further ranks are at the ports after it."""
    replay_endpoint: str = ""
    topic: str = ""
    bind: bool = False
    """For a publisher that connects: the gateway binds the endpoint."""


class WorkerConfig(Section, frozen=True, kw_only=True):
    """A worker known from the start. In a list, a bare URL stands for `{url: ...}`."""

    url: str
    """`http://host:port`, without a path."""
    name: str = ""
    """How decisions and metrics call it; host:port when empty."""
    model: str = ""
    """What it serves; asked of the worker when empty."""
    block_size_tokens: Annotated[int, msgspec.Meta(ge=0, le=65_536)] = 0
    """Its KV block size; asked of the worker, or learned from its events, when 0."""
    role: RoleName = "both"
    """`prefill`: computes prompts for others and is sent no client's request. `decode`: answers, and had best compute
    little. Docs: docs/disaggregation.md."""
    engine: EngineName = ""
    """What it is; found out when empty."""
    sidecar: str = ""
    """URL of what a connector inside the engine says of the KV it moves."""
    events: EventsConfig | None = None

    def __post_init__(self) -> None:
        _check_url(self.url)
        if self.sidecar:
            _check_url(self.sidecar)


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        complete = bool(parts.hostname) and parts.port != 0
    except ValueError:
        complete = False
    if not complete or parts.scheme not in ("http", "https"):
        raise ValueError(f"{url!r} is not a URL of the form http://host:port")
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError(f"{url!r} must end after its port")


class TenantsConfig(Section, frozen=True, kw_only=True):
    api_keys_file: Path | None = None
    """Written by `ropeway keys new`. Null serves everyone as the one tenant `default`."""

    @property
    def open(self) -> bool:
        return self.api_keys_file is None


class ListenerConfig(Section, frozen=True, kw_only=True):
    """Where a surface for operators is served, and what opens it.

    With `port` null it is a part of the gateway's own port; with a port it has a listener of its own.
    """

    key_file: Path | None = None
    """Holds the key that must come as `Authorization: Bearer ...`. Null asks for none."""
    host: str = "127.0.0.1"
    port: Port | None = None


class LimitsConfig(Section, frozen=True, kw_only=True):
    body_bytes_max: Bytes = 64 * 1024 * 1024
    header_bytes_max: Bytes = 64 * 1024
    connections_max: Positive = 8192
    """Open client connections; further ones wait in the listen queue."""
    long_prompt_characters: Positive = 16_384
    """Prompts with more new text than this are tokenized off the event loop, so that their neighbours do not wait."""


class TimeoutsConfig(Section, frozen=True, kw_only=True):
    connect_seconds: Seconds = 2.0
    first_byte_seconds: Seconds | None = None
    """From request sent to answer begun. Null waits for ever: a queued prompt may take minutes to start."""
    idle_seconds: Seconds = 300.0
    """Between two pieces of an answer, and between two requests on one connection."""
    shutdown_seconds: Seconds = 10.0
    """What requests in flight are given to finish once the gateway is told to stop."""


class ProbesConfig(Section, frozen=True, kw_only=True):
    interval_seconds: Seconds = 2.0
    timeout_seconds: Seconds = 2.0
    unhealthy_after: Positive = 2
    """Failed probes in a row."""


class IndexConfig(Section, frozen=True, kw_only=True):
    blocks_max: Positive = 4_000_000
    """Distinct blocks that are remembered."""


class SharingConfig(Section, frozen=True, kw_only=True):
    """How gateways share what they know through Redis or Valkey. Without `redis` nothing of it is used."""

    lookups: Literal["mirror", "redis"] = "mirror"
    """`mirror` answers from a local copy that follows the shared one; `redis` asks the server for every request."""
    prefix: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")] = "ropeway"
    """Every key begins with it. Gateways of one fleet have the same, fleets that share a server different ones."""
    gateway: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.:-]{0,128}$")] = ""
    """This gateway's name among its peers, unlike all others; made up at the start when empty."""
    budget_ms: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 20.0
    """What a request may wait for the server at most, before it is placed without it."""
    lease_seconds: Annotated[float, msgspec.Meta(ge=0.2, le=60)] = 1.2
    """After this long without a word from the gateway that follows a worker's events another one takes over."""
    stream_entries_max: Positive = 16_384
    """Changes kept, for each of 16 shards, for gateways that lag behind; beyond that they read whole snapshots."""
    directory: Path | None = None
    """Where `redis: embedded` keeps its data; null for `~/.local/state/ropeway/valkey`."""


class PromptsConfig(Section, frozen=True, kw_only=True):
    cache_bytes_max: Bytes = 256 * 1024 * 1024
    """Token ids and hash states kept, so that a conversation's next turn pays for its tail only."""
    token_ids_forwarded: bool = False
    """Whether engines that take token ids get ours in place of text, once parity with them is proven."""
    remote_seconds_max: Seconds = 0.1
    """What a prompt that only its engine can tokenize may wait for that, before it is placed by load alone."""
    request_templates_allowed: bool = False
    """Whether a request may bring its own `chat_template`, for engines that allow it too. Rendered in a sandbox."""
    template_defaults: dict[str, dict[str, Any]] = {}
    """Served model to what its chat template is told unless a request's `chat_template_kwargs` say otherwise: as its
    engines were told by `--default-chat-template-kwargs`."""


class PrioritiesConfig(Section, frozen=True, kw_only=True):
    """What engines are told of requests' `priority`, where they order by it: lower is earlier. Not `forwarded`, it is
    taken out: engines refuse it unless they were started for it, and whoever sends it comes before others."""

    forwarded: bool = False
    lowest: int = 0
    """Clients' own are clamped to these."""
    highest: int = 100
    by_work: bool = False
    """Whether engines are told a priority for every request: its arrival and twenty times its predicted prefill, in
    milliseconds since 1970, so that short prefills pass long ones and nobody starves. For fleets whose engines all
    order by priority; a request without one would come first."""
    level_seconds: Seconds = 5.0
    """Then one level of a client's own priority counts as so much of waiting."""

    def __post_init__(self) -> None:
        if self.lowest > self.highest:
            raise ValueError("priorities.lowest is larger than priorities.highest")


class RoutingConfig(Section, frozen=True, kw_only=True):
    """How requests are placed, besides `policy`."""

    shadow: tuple[str, ...] = ()
    """Policies that are asked about every request and not followed, of `policies.POLICIES` and `policies.peers.PEERS`:
    `/status` and `/metrics` say how often they agree and what they would have saved. Each costs its decision time."""

    def __post_init__(self) -> None:
        for name in self.shadow:
            if name not in POLICIES and name not in PEERS:
                raise ValueError(f"routing.shadow: {name!r} is unknown{_nearest(name, [*POLICIES, *PEERS])}")
        if len(set(self.shadow)) < len(self.shadow):
            raise ValueError("routing.shadow: a policy is named twice")


class AdmissionConfig(Section, frozen=True, kw_only=True):
    """Requests that wait at the gateway because no worker could start them soon (docs/admission.md)."""

    enabled: bool = True
    requests_max: Positive = 1024
    """Waiting at once, for each model."""
    bytes_max: Bytes = 256 * 1024 * 1024
    """Of the bodies that wait, for all models together."""
    backlog_ms_max: Annotated[float, msgspec.Meta(gt=0, le=60_000)] = 250.0
    """A worker is sent more for as long as it would be started there within this; then it waits here."""
    wait_seconds_max: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 60.0
    """What a request waits at most, whose time to first token is not bounded."""
    ttft_budget_ms: Annotated[float, msgspec.Meta(gt=0, le=3_600_000)] | None = None
    """For requests whose `x-ropeway-ttft-budget-ms` says nothing. Null does not bound them."""
    ageing_seconds: Seconds = 5.0
    """So long a request is overtaken by later ones of its tenant whose `priority` is one level higher."""
    quantum_tokens: Annotated[float, msgspec.Meta(ge=1)] = 2048.0
    """Tokens that a tenant of weight one may start before it is the next one's turn."""
    weights: dict[str, Annotated[float, msgspec.Meta(ge=0.001, le=1000)]] = {}
    """Tenant to its share, beside 1 for all others."""


class UsageConfig(Section, frozen=True, kw_only=True):
    requested: bool = False
    """Whether streams whose clients did not ask for usage are asked for it all the same (`stream_options`): it tells
    how much of a prompt was cached, by which trust in workers' events is kept. Clients do not see it. Workers that
    count their cache hits in `/metrics` are checked without."""


class TransferConfig(Section, frozen=True, kw_only=True):
    """KV that workers pull from each other or from pools instead of computing it (docs/moving-kv.md).

    It needs workers that say they can, and the keyring that they have: plans are signed.
    """

    enabled: bool = True
    fidelity: FidelityName = "quantized"
    """The worst KV that a request accepts whose `x-ropeway-fidelity` says nothing."""
    shifted: bool = False
    """Whether passages whose KV was computed at another position are looked for, for requests that accept `fused`.
    Every gateway then reads all event streams, and keeps where blocks' texts lie."""
    shifted_blocks_max: Positive = 250_000
    """Of such blocks, each some 830 bytes; the oldest go first."""
    codecs: tuple[str, ...] = ("i8", "raw")
    """Best first: the first that source and target both have, and that the request's fidelity allows. Others are not
    used."""
    deadline_seconds_min: Annotated[float, msgspec.Meta(gt=0, le=DEADLINE_SECONDS_MAX)] = 0.5
    """A pull is given the time in which it could still win, within these bounds. Less than the lower one would stop
    pulls wherever prefill is slower than the gateway knows yet."""
    deadline_seconds_max: Annotated[float, msgspec.Meta(gt=0, le=DEADLINE_SECONDS_MAX)] = 30.0
    link_gbps: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Of the network between workers, as its vendor says it: what a link is taken for until something was moved over
    it. Null takes one for 80 Gb/s, at which a fast model's KV is computed about as soon as it is moved."""
    kl_budgets: dict[str, Annotated[float, msgspec.Meta(gt=0)]] = msgspec.field(
        default_factory=lambda: {"i8": 1e-3, "fp8": 1e-2, "i4h": 3e-2, "lm3h": 1e-1, "fused": 1e-1}
    )
    """Mean KL, in nats a token, beyond which workers' own comparisons with exact KV switch a codec, or `fused`, off for
    a model and tenant. What is not named is never switched off."""

    def __post_init__(self) -> None:
        if self.deadline_seconds_min > self.deadline_seconds_max:
            raise ValueError("transfer.deadline_seconds_min is larger than transfer.deadline_seconds_max")
        if not self.codecs:
            raise ValueError("transfer.codecs: name one at least, or set transfer.enabled to false")


class DisaggregationConfig(Section, frozen=True, kw_only=True):
    """Fleets with workers of role `prefill` (docs/disaggregation.md)."""

    deadline_seconds_min: Seconds = 5.0
    """A prefill worker gets twice what its prompt should take, or as long as computing it elsewhere would cost, within
    these bounds; then the prompt is computed where it is answered."""
    deadline_seconds_max: Seconds = 120.0

    def __post_init__(self) -> None:
        if self.deadline_seconds_min > self.deadline_seconds_max:
            raise ValueError("disaggregation.deadline_seconds_min is larger than disaggregation.deadline_seconds_max")


class GatewayConfig(Section, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: Port = 8000
    workers: tuple[WorkerConfig, ...] = ()
    policy: str = "kv-aware"
    """One of `policies.POLICIES`."""
    policy_header_allowed: bool = False
    """Whether `x-ropeway-policy` may choose another policy for its request."""
    redis: str = "none"
    """Where the shared index lives: `none` (in this process alone), `embedded` (a Valkey of our own), or the URL of a
    server, `redis[s]://`, `redis[s]+sentinel://` or `redis[s]+cluster://`; see docs/decisions/shared-index.md."""
    tokenizers: dict[str, Path] = {}
    """Served model to the directory with its tokenizer and chat template."""
    keyring: Path | None = None
    """Master secrets shared with workers that name blocks themselves. Null makes a new one for this process alone."""
    forward_kv_transfer_params: bool = False
    """Whether `kv_transfer_params` of clients reaches the workers: it can name blocks to pull, so it is stripped."""
    log_level: LogLevel = "info"
    tenants: TenantsConfig = TenantsConfig()
    admin: ListenerConfig = ListenerConfig()
    metrics: ListenerConfig = ListenerConfig()
    limits: LimitsConfig = LimitsConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    probes: ProbesConfig = ProbesConfig()
    index: IndexConfig = IndexConfig()
    sharing: SharingConfig = SharingConfig()
    prompts: PromptsConfig = PromptsConfig()
    priorities: PrioritiesConfig = PrioritiesConfig()
    routing: RoutingConfig = RoutingConfig()
    admission: AdmissionConfig = AdmissionConfig()
    transfer: TransferConfig = TransferConfig()
    usage: UsageConfig = UsageConfig()
    disaggregation: DisaggregationConfig = DisaggregationConfig()

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy: {self.policy!r} is unknown{_nearest(self.policy, POLICIES)}")
        _check_redis(self)
        for model in self.prompts.template_defaults:
            if model not in self.tokenizers:
                raise ValueError(f"prompts.template_defaults: {model!r} is not among the tokenizers")
        if any(worker.role == "prefill" for worker in self.workers) and not (
            self.transfer.enabled and self.keys_are_shared
        ):
            raise ValueError(
                "workers: what a worker of role 'prefill' computes is pulled by others, which takes transfer.enabled "
                "and the keyring of the workers"
            )
        for name in ("url", "name"):
            values = [value for worker in self.workers if (value := getattr(worker, name).rstrip("/"))]
            twice = {value for value in values if values.count(value) > 1}
            if twice:
                raise ValueError(f"workers: the {name} {min(twice)!r} is given twice")

    @property
    def keys_are_shared(self) -> bool:
        """Whether workers can have the gateway's keys; without, none could read a plan."""
        return self.keyring is not None or self.redis == "embedded"


def _check_redis(config: GatewayConfig) -> None:
    if config.redis in ("none", "embedded"):
        return
    try:
        parse_address(config.redis)
    except ValueError as error:
        raise ValueError(f"redis: {error}; 'none' and 'embedded' are known besides URLs") from None
    if config.keyring is None:
        raise ValueError(
            "keyring: gateways that share an index must name blocks alike: give each the same keyring file "
            "(`ropeway keys keyring --file FILE` makes one)"
        )


LOG_LEVELS: tuple[str, ...] = get_args(LogLevel)


def load(
    path: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    overrides: Mapping[str, Any] | None = None,
) -> GatewayConfig:
    """The configuration of a file, its variables in `environment` and `overrides` (by key path), each over the last.

    Raises ConfigError, whose message names the source and the key.
    """
    document: dict[str, Any] = {}
    if path is not None:
        document = _read(path)
        _convert(document, str(path))
    for variable, key, kind in _variables():
        raw = environment.get(variable)
        if raw and not _written_by_kubernetes(variable, raw):
            _put(document, key, _parse(raw, kind, variable))
    for key, value in (overrides or {}).items():
        _put(document, key, value)
    return _convert(document, "configuration")


def _read(path: Path) -> dict[str, Any]:
    try:
        document = yaml.load(path.read_text(), _StrictLoader)  # noqa: S506 (a SafeLoader that is stricter still)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {_one_line(error)}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: a mapping is expected at the top, not {type(document).__name__}")
    return document


class _StrictLoader(yaml.SafeLoader):
    """YAML lets the last of two equal keys win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key!r} is given twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _convert(document: dict[str, Any], source: str) -> GatewayConfig:
    document = {**document, "workers": [_expand(worker) for worker in _as_list(document.get("workers"))]}
    _refuse_unknown(document, GatewayConfig, "", source)
    try:
        return msgspec.convert(document, GatewayConfig, dec_hook=_decode)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{source}: {_readable(error)}") from error


def _as_list(value: Any) -> Any:
    return [] if value is None else value if isinstance(value, list) else [value]


def _expand(worker: Any) -> Any:
    return {"url": worker} if isinstance(worker, str) else worker


def _decode(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str | Path):
        return Path(value).expanduser()
    raise TypeError(f"Expected `{kind.__name__.lower()}`, got `{type(value).__name__}`")


def _refuse_unknown(value: Any, kind: Any, at: str, source: str) -> None:
    """msgspec says that a name is unknown; this says as well which ones are known."""
    if get_origin(kind) is Literal and isinstance(value, str) and value not in get_args(kind):
        raise ConfigError(f"{source}: {at}: {value!r} is unknown{_nearest(value, get_args(kind))}")
    if isinstance(value, list) and get_origin(kind) is tuple:
        for position, item in enumerate(value):
            _refuse_unknown(item, get_args(kind)[0], f"{at}[{position}]", source)
    if not isinstance(value, dict) or not _is_section(kind):
        return
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for name, item in value.items():
        key = f"{at}.{name}" if at else str(name)
        if name not in fields:
            raise ConfigError(f"{source}: unknown key {key!r}{_nearest(str(name), fields)}")
        _refuse_unknown(item, fields[name], key, source)


def _nearest(name: str, names: Iterable[str]) -> str:
    known = list(names)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known here: {', '.join(known)}"


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _readable(error: Exception) -> str:
    """`Expected ... - at `$.limits.body_bytes_max`` becomes `limits.body_bytes_max: Expected ...`."""
    message, _, place = _one_line(error).partition(" - at `$")
    key = place.rstrip("`").lstrip(".")
    return f"{key}: {message}" if key else message


def _one_line(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else " ".join(str(error).split())


def _variables(kind: type[Section] = GatewayConfig, at: str = "") -> Iterator[tuple[str, str, Any]]:
    """(variable, key path, type) of each key that can be set from the environment."""
    for field in msgspec.structs.fields(kind):
        key = at + field.name
        if _is_section(field.type):
            yield from _variables(field.type, f"{key}.")
        else:
            yield ENVIRONMENT_PREFIX + key.replace(".", "_").upper(), key, field.type


def _written_by_kubernetes(variable: str, raw: str) -> bool:
    """A Service called `ropeway` puts ROPEWAY_PORT=tcp://10.0.0.1:8000 into every pod of its namespace."""
    return variable == f"{ENVIRONMENT_PREFIX}PORT" and raw.startswith("tcp://")


def _parse(raw: str, kind: Any, variable: str) -> Any:
    try:
        if get_origin(kind) in (tuple, dict):
            return yaml.load(raw, _StrictLoader)  # noqa: S506 (as above)
        return raw if get_origin(kind) is Literal else msgspec.convert(raw, kind, strict=False, dec_hook=_decode)
    except (msgspec.ValidationError, yaml.YAMLError) as error:
        raise ConfigError(f"{variable}: {_one_line(error)}") from error


def _put(document: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    section = document
    for name in path:
        section = section.setdefault(name, {})
    if isinstance(value, dict) and isinstance(section.get(last), dict):
        value = {**section[last], **value}
    section[last] = value

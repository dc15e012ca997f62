"""The configuration tree of the gateway, checked when it starts and when its file changes (`gateway.settings`).

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
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

import msgspec

from cachecore.store.address import parse_address
from cachecore.transfer.plan import DEADLINE_SECONDS_MAX
from policies import POLICIES
from policies.peers import PEERS

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "logfmt", "json"]
FidelityName = Literal["exact", "quantized", "rotated", "fused"]
RoleName = Literal["both", "prefill", "decode"]
TranslationName = Literal["auto", "always", "never"]
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
    draining: bool = False
    """Whether it is sent no new request. What it is serving goes on."""
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
    """Written by `ropeway keys new`, and read again when it changes. Null, and no `api_keys_redis`, serves everyone as
    the one tenant `default`."""
    api_keys_redis: str = ""
    """URL of a server that has keys (besides those of the file), as `redis` takes them; `ropeway keys new --redis`."""
    public_allowed: bool = False
    """Whether every request may ask, by `x-ropeway-namespace: public`, to share KV with all tenants; else only those of
    keys that may (`ropeway keys new --public`)."""

    def __post_init__(self) -> None:
        if self.api_keys_redis:
            parse_address(self.api_keys_redis)

    @property
    def open(self) -> bool:
        return self.api_keys_file is None and not self.api_keys_redis


class RatesConfig(Section, frozen=True, kw_only=True):
    """Null is no limit."""

    requests_per_minute: Annotated[float, msgspec.Meta(gt=0)] | None = None
    tokens_per_minute: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Of prompts, counted as a request is let in, and of answers, counted once they say how much they were."""
    burst_seconds: Seconds = 60.0
    """So many seconds' worth may be used at once by a tenant that has rested."""


class RateLimitsConfig(RatesConfig, frozen=True, kw_only=True):
    """What each tenant may ask for in a minute (docs/security.md). Gateways that share an index and have `admission`
    enabled count together, but for the last second; others each for itself."""

    tenants: dict[str, RatesConfig] = {}
    """Tenant to its own limits, in place of those for all others."""


class TlsConfig(Section, frozen=True, kw_only=True):
    """TLS (1.2 or later) at the gateway's own port. Files are in PEM, and read again when they change."""

    cert: Path | None = None
    """With the intermediate ones. Null serves plain HTTP."""
    key: Path | None = None
    """By default it is in the certificate's file."""
    ca: Path | None = None
    """Of clients: each must show a certificate from one of these authorities."""

    def __post_init__(self) -> None:
        if self.cert is None and (self.key is not None or self.ca is not None):
            raise ValueError("TLS needs a certificate: set cert")


class UpstreamTlsConfig(Section, frozen=True, kw_only=True):
    """Workers whose URLs begin with https."""

    ca: Path | None = None
    """Who certifies them; null for those that the system trusts."""
    cert: Path | None = None
    """The gateway's own, for workers that ask for one."""
    key: Path | None = None
    verify: bool = True
    """False takes whoever answers for the worker: for tests alone."""

    def __post_init__(self) -> None:
        if self.cert is None and self.key is not None:
            raise ValueError("upstream_tls.key belongs to a certificate: set cert")


class ListenerConfig(Section, frozen=True, kw_only=True):
    """Where a surface for operators is served, and what opens it.

    With `port` null it is a part of the gateway's own port; with a port it has a listener of its own.
    """

    key_file: Path | None = None
    """Holds the key that must come as `Authorization: Bearer ...`. Null asks for none."""
    host: str = "127.0.0.1"
    port: Port | None = None
    tls: TlsConfig = TlsConfig()
    """Of a listener of its own."""

    def __post_init__(self) -> None:
        if self.tls.cert is not None and self.port is None:
            raise ValueError("tls is of a listener of its own: set port")


class LimitsConfig(Section, frozen=True, kw_only=True):
    body_bytes_max: Bytes = 64 * 1024 * 1024
    header_bytes_max: Bytes = 64 * 1024
    requests_bytes_max: Bytes = 1024 * 1024 * 1024
    """Of the bodies of all requests under way, until they are answered; further ones are answered 503."""
    connections_max: Positive = 8192
    """Open client connections; further ones are answered 503 and closed."""
    long_prompt_characters: Positive = 16_384
    """Prompts with more new text than this are tokenized off the event loop, so that their neighbours do not wait."""


class TimeoutsConfig(Section, frozen=True, kw_only=True):
    connect_seconds: Seconds = 2.0
    first_byte_seconds: Seconds | None = None
    """From request sent to answer begun. Null waits for ever: a queued prompt may take minutes to start."""
    idle_seconds: Seconds = 300.0
    """Between two pieces of an answer, and between two requests on one connection."""
    write_seconds: Seconds = 60.0
    """How long a client may take nothing of its answer; then it is reset, and its worker told."""
    shutdown_seconds: Seconds = 10.0
    """What requests in flight are given to finish once the gateway is told to stop."""
    total_seconds: Seconds | None = None
    """From a complete request to a complete answer, and the most that `x-ropeway-timeout-ms` may ask for. Null bounds
    neither: a long answer that keeps coming is no fault."""


class HandoverConfig(Section, frozen=True, kw_only=True):
    """How a gateway makes room for the next one."""

    reuse_port: bool = False
    """Whether a new gateway may listen on the address while an old one, started with this as well, still finishes what
    it has begun. Off, since then a second gateway by mistake is told that the port is in use; on, the two would share
    the clients in silence, and so would any process of the same user."""
    announce_seconds: Annotated[float, msgspec.Meta(ge=0, le=600)] = 0.0
    """After SIGTERM, how long requests are still taken while `/readyz` answers 503: as long as whatever sends them here
    needs to notice. With 0 the gateway stops listening at once."""


class RetriesConfig(Section, frozen=True, kw_only=True):
    """Further attempts at requests of which the client has got nothing (docs/reliability.md)."""

    attempts_max: Annotated[int, msgspec.Meta(ge=1, le=10)] = 3
    """For one request, the first among them."""
    budget_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.2
    """Of the requests of the last ten seconds, so many may be tried elsewhere,"""
    budget_per_second_min: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    """and this many a second besides."""


class BreakersConfig(Section, frozen=True, kw_only=True):
    """When a worker that fails its requests is left alone. What blames the client never counts."""

    enabled: bool = True
    failures_in_a_row: Positive = 5
    failure_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    """Of at least `requests_min` requests within `window_seconds`."""
    requests_min: Positive = 20
    window_seconds: Seconds = 30.0
    open_seconds_min: Seconds = 1.0
    """The first pause; each further one is twice as long, up to `open_seconds_max`. Then one request is the trial."""
    open_seconds_max: Seconds = 60.0

    def __post_init__(self) -> None:
        if self.open_seconds_min > self.open_seconds_max:
            raise ValueError("breakers.open_seconds_min is larger than breakers.open_seconds_max")


class EjectionConfig(Section, frozen=True, kw_only=True):
    """When a worker that does much worse than its neighbours is left out for a while."""

    enabled: bool = True
    share_max: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    """Of a model's workers at most this share is out, rounded down, those with an open circuit among them."""
    failure_margin: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = 0.2
    """A worker whose share of failures is larger than that of the others together by this much is out. Null judges no
    failures."""
    slowness_factor: Annotated[float, msgspec.Meta(gt=1)] | None = None
    """A worker whose prefill is slower than the median of the others' by this factor is out. Null judges no slowness:
    policies that price prefill send slow workers less, which is better than nothing."""
    requests_min: Positive = 20
    """Within `breakers.window_seconds`, of a worker and of the others together, before failures are compared."""
    seconds: Seconds = 30.0
    """The first ejection; each further one is as much longer, up to `seconds_max`."""
    seconds_max: Seconds = 300.0


class HedgingConfig(Section, frozen=True, kw_only=True):
    """Requests that are slow to be answered are put to a second worker; the first to say something is heard, and the
    other one is dropped. For models none of whose workers moves KV or only prefills."""

    enabled: bool = False
    after_ms: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """How long a first byte is waited for; null waits for `quantile` of those seen of late."""
    quantile: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.95
    budget_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.05
    """Of the requests of the last ten seconds, so many may be hedged,"""
    budget_per_second_min: Annotated[float, msgspec.Meta(ge=0)] = 0.1
    """and this many a second besides."""


class LogsConfig(Section, frozen=True, kw_only=True):
    """What is written to stderr."""

    format: LogFormat = "text"
    """Of every line."""
    requests: Literal["none", "errors", "all"] = "none"
    """For which requests there is a line: names, numbers and ids, and nothing of what is asked or answered."""


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
                raise ValueError(f"routing.shadow: {name!r} is unknown{nearest(name, [*POLICIES, *PEERS])}")
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


class SamplesConfig(Section, frozen=True, kw_only=True):
    """What is kept of requests, in memory, for what operators may ask (docs/operating.md): a dry run of another policy,
    the hottest prefixes, and warming a worker with them."""

    decisions_max: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 1000
    """The last ones, which a dry run decides anew. 0 keeps nothing, prompts neither."""
    per_second_max: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 20.0
    """Of more requests an even part is kept."""
    bodies_bytes_max: Annotated[int, msgspec.Meta(ge=0)] = 32 * 1024 * 1024
    """Of prompts, as they came. 0 keeps none: no prefix is known as hot, and no worker can be warmed."""


class KubernetesConfig(Section, frozen=True, kw_only=True):
    """Workers that are found in Kubernetes, beside those of `workers` (docs/deploy.md)."""

    selector: str = ""
    """Labels of the EndpointSlices to follow, as `kubernetes.io/service-name=vllm`. Empty looks for none."""
    namespace: str = ""
    """The gateway's own when empty."""
    port: Annotated[str, msgspec.Meta(min_length=1)] = "http"
    """Name or number of the endpoints' port that requests are sent to."""
    scheme: Literal["http", "https"] = "http"
    engine: EngineName = ""
    """What they all are; found out when empty."""
    role: RoleName = "both"
    server: str = ""
    """URL of the API server; that of the cluster around us when empty."""
    token_file: Path | None = None
    """The service account's when null, and none where `server` is named."""
    ca_file: Path | None = None
    """Likewise."""

    def __post_init__(self) -> None:
        if self.server:
            _check_url(self.server)


class EnvoyConfig(Section, frozen=True, kw_only=True):
    """An endpoint picker for Envoy (docs/envoy.md): decisions without our data path. Takes `pip install
    ropeway[envoy]`."""

    host: str = "127.0.0.1"
    port: Port | None = None
    """Where Envoy asks, by gRPC (ext_proc). Null serves none. Nothing is encrypted or authenticated there: whoever
    reaches it can ask for decisions, and sees salts."""


class TracingConfig(Section, frozen=True, kw_only=True):
    """Spans by OpenTelemetry (docs/tracing.md). Needs `pip install ropeway[otel]`."""

    endpoint: str = ""
    """Where they are sent, by OTLP over HTTP, as `http://127.0.0.1:4318/v1/traces`. Empty makes none."""
    sampled_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    """Of requests whose client has not decided it."""
    service_name: Annotated[str, msgspec.Meta(min_length=1)] = "ropeway"


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


class ApiConfig(Section, frozen=True, kw_only=True):
    """Routes besides OpenAI's chat and text completions (docs/api.md)."""

    translation: TranslationName = "auto"
    """Whether `/v1/messages` and `/v1/responses` are asked of the workers as chat completions: `auto` where a worker of
    the model does not serve the route itself, or takes no salt on it; `never` passes them on whatever comes of it."""


class CorsConfig(Section, frozen=True, kw_only=True):
    """Which web pages may ask the gateway from a browser."""

    origins: tuple[str, ...] = ()
    """As browsers write them, `https://chat.example.com`; `*` for all. Empty is none: no answer says anything of it."""
    preflight_seconds: Annotated[int, msgspec.Meta(ge=0, le=86_400)] = 600
    """How long a browser may remember what it was told."""

    def __post_init__(self) -> None:
        for origin in self.origins:
            if origin != "*" and ("://" not in origin or origin.count("/") != 2):
                raise ValueError(f"cors.origins: {origin!r} is no origin of the form https://host[:port]")


class BatchesConfig(Section, frozen=True, kw_only=True):
    """OpenAI's `/v1/files` and `/v1/batches`, run here at the lowest priority. Off without a directory."""

    directory: Path | None = None
    """Where files and batches are kept, each tenant's apart; of one gateway alone."""
    bytes_max: Bytes = 4 * 1024 * 1024 * 1024
    """Of everything in it. What would make it more is refused."""
    file_bytes_max: Bytes = 64 * 1024 * 1024
    """Of one file; at most `limits.body_bytes_max`."""
    requests_max: Positive = 50_000
    """Of one batch."""
    concurrency: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 8
    """Requests of batches that are under way at once, of all tenants together."""
    keep_seconds: Annotated[float, msgspec.Meta(gt=0)] = 30 * 86_400.0
    """So long after it has ended a batch is forgotten, and a file after it was made."""


class GatewayConfig(Section, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: Port = 8000
    workers: tuple[WorkerConfig, ...] = ()
    processes: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Gateways on this machine that listen on the port together and share an index, in a Valkey of their own where
    `redis` names none (docs/processes.md)."""
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
    x_forwarded: bool = False
    """Whether workers are told who asks: X-Forwarded-For with the client's address last, X-Forwarded-Proto and -Host.
    No engine needs that, and it brings addresses into logs. Left off, what a proxy has set travels as it is."""
    log_level: LogLevel = "info"
    logs: LogsConfig = LogsConfig()
    tenants: TenantsConfig = TenantsConfig()
    rate_limits: RateLimitsConfig = RateLimitsConfig()
    tls: TlsConfig = TlsConfig()
    upstream_tls: UpstreamTlsConfig = UpstreamTlsConfig()
    admin: ListenerConfig = ListenerConfig()
    metrics: ListenerConfig = ListenerConfig()
    limits: LimitsConfig = LimitsConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    handover: HandoverConfig = HandoverConfig()
    retries: RetriesConfig = RetriesConfig()
    breakers: BreakersConfig = BreakersConfig()
    ejection: EjectionConfig = EjectionConfig()
    hedging: HedgingConfig = HedgingConfig()
    probes: ProbesConfig = ProbesConfig()
    index: IndexConfig = IndexConfig()
    sharing: SharingConfig = SharingConfig()
    prompts: PromptsConfig = PromptsConfig()
    priorities: PrioritiesConfig = PrioritiesConfig()
    routing: RoutingConfig = RoutingConfig()
    admission: AdmissionConfig = AdmissionConfig()
    samples: SamplesConfig = SamplesConfig()
    transfer: TransferConfig = TransferConfig()
    usage: UsageConfig = UsageConfig()
    api: ApiConfig = ApiConfig()
    cors: CorsConfig = CorsConfig()
    batches: BatchesConfig = BatchesConfig()
    disaggregation: DisaggregationConfig = DisaggregationConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()
    envoy: EnvoyConfig = EnvoyConfig()
    tracing: TracingConfig = TracingConfig()

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy: {self.policy!r} is unknown{nearest(self.policy, POLICIES)}")
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


def nearest(name: str, names: Iterable[str]) -> str:
    """For a message about a name that is not known: which one may be meant."""
    known = list(names)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known here: {', '.join(known)}"

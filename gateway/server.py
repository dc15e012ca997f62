"""The composition root: everything a gateway is made of, wired here and nowhere else."""

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, cast

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from cachecore.index.chains import ChainMultiset
from cachecore.index.content import MemoryContentIndex
from cachecore.index.content_feed import ContentFeed
from cachecore.index.memory import MemoryIndex
from cachecore.prompts.contract import PromptError, Renderer
from cachecore.prompts.huggingface import HuggingFaceRenderer
from cachecore.prompts.naming import PromptNamer
from cachecore.scope import Fidelity, Keyring
from gateway import logs
from gateway.access import Access
from gateway.administration import Administration
from gateway.admission import Admission
from gateway.api.batches.routes import PATHS as BATCH_PATHS
from gateway.api.batches.routes import add_batch_routes
from gateway.api.batches.runner import BatchRunner
from gateway.api.batches.shelf import Shelf
from gateway.api.cors import Cors, CorsEdge, CorsMiddleware
from gateway.api.routes import key_of
from gateway.api.translator import Translator
from gateway.app import Surfaces, build_app
from gateway.config import GatewayConfig, ListenerConfig, PromptsConfig, TlsConfig
from gateway.disaggregation import Disaggregation
from gateway.edge.contract import Deadlines
from gateway.edge.server import Edge, EdgeLimits
from gateway.errors import ConfigError
from gateway.fleet.knowledge import Knowledge
from gateway.fleet.kubernetes import KubernetesDiscovery
from gateway.fleet.pools import PoolFollower
from gateway.fleet.quality import QualityFollower
from gateway.fleet.registry import Fleet
from gateway.fleet.streams import EventStreams, Intakes, OwnStreams
from gateway.fleet.texts import TextStreams
from gateway.fleet.trust_watch import TrustWatch
from gateway.pipeline import Pipeline, PipelineSettings
from gateway.ports import is_loopback, listeners
from gateway.prompts import Prompts
from gateway.reliability.safeguards import Safeguards
from gateway.reload import Parts, Reloader
from gateway.remote_tokens import RemoteTokens
from gateway.serving import QuietServer, Stop
from gateway.settings.loading import Request
from gateway.sharing import IndexBackend, Sharing, embedded_directory
from gateway.shifted import PassagePlanner
from gateway.standings import SharedStandings
from gateway.steering.samples import Samples
from gateway.tenants import OperatorKey
from gateway.transfers import Transfers, TransferSettings
from gateway.views.access import AccessCollector
from gateway.views.admission import AdmissionCollector
from gateway.views.disaggregation import DisaggregationCollector
from gateway.views.edge import EdgeCollector
from gateway.views.feed import Feed
from gateway.views.flight import FlightCollector
from gateway.views.metrics import GatewayCollector, GatewayMetrics
from gateway.views.passages import PassageCollector
from gateway.views.pools import PoolCollector
from gateway.views.receipts import Receipts
from gateway.views.reliability import ReliabilityCollector
from gateway.views.shadows import ShadowCollector
from gateway.views.sharing import SharingCollector
from gateway.views.sizes import SizeCollector
from gateway.views.status import StatusView
from gateway.views.traffic import Traffic
from gateway.views.transfers import QualityCollector, TransferCollector
from gateway.views.trust import TrustCollector
from policies import POLICIES
from policies import create as create_policy
from policies.estimates import LinkPrior
from policies.peers import create_peer
from policies.shadow import Shadows
from policies.state.guard import GuardSettings, QualityGuard
from policies.transfer import DeadlineBounds

if TYPE_CHECKING:
    from gateway.envoy.server import EndpointPicker
    from gateway.tracing import Tracing

logger = logging.getLogger("ropeway")

# Tokenizing a long prompt holds the interpreter lock in stretches; the default of 5 ms would be added to each of its
# neighbours' requests several times over.
SWITCH_INTERVAL_SECONDS = 0.0005


class Gateway:
    """One gateway: its parts, and the tasks it owns. Several may live in one process."""

    def __init__(self, config: GatewayConfig, request: Request | None = None) -> None:
        """`request`: from where the configuration was read, and is read again."""
        self.config = config
        keyring = _load_keyring(config)
        self.access = Access(config)
        renderers = load_renderers(config.tokenizers, config.prompts)
        backend = IndexBackend(config, keyring) if config.redis != "none" else None
        gbps = config.transfer.link_gbps
        self.knowledge = Knowledge(
            backend.index if backend else MemoryIndex(blocks_max=config.index.blocks_max),
            LinkPrior.of_network(gbps) if gbps is not None else None,
        )
        self.prompts = Prompts(
            keyring, PromptNamer(config.prompts.cache_bytes_max), config.limits.long_prompt_characters
        )
        naming_for = self.prompts.naming_for_events
        self.sharing = Sharing(backend, self.knowledge, naming_for, self.access.upstream_tls) if backend else None
        self.contents = self._contents()
        self.fleet = Fleet(
            config.probes,
            renderers,
            self.knowledge,
            self._streams(),
            backend.epochs if backend else None,
            self.access.upstream_tls,
            Safeguards(config.breakers, config.ejection, config.retries, config.hedging),
        )
        self.fleet.divided = not config.tenants.open
        self.trust = TrustWatch(self.fleet.pools, self.knowledge)
        self.kubernetes = KubernetesDiscovery(config.kubernetes, self.fleet) if config.kubernetes.selector else None
        self._members = self.sharing.join(self.fleet, config) if self.sharing else self.fleet
        self.prompts.remote = RemoteTokens(
            self.fleet.tokenize, config.prompts.remote_seconds_max, config.prompts.cache_bytes_max // 8
        )
        self.metrics = GatewayMetrics()
        self.receipts = Receipts()
        self.pools = PoolFollower(self.fleet, tls=self.access.upstream_tls)
        self.guard = QualityGuard(GuardSettings(config.transfer.kl_budgets))
        self.quality = QualityFollower(self.guard, self.fleet.pools, lambda: self.fleet.http)
        self.transfers = self._transfers(keyring)
        self.passages = (
            PassagePlanner(self.contents, self.transfers, keyring) if self.contents and self.transfers else None
        )
        self.disaggregation = Disaggregation(
            DeadlineBounds(config.disaggregation.deadline_seconds_min, config.disaggregation.deadline_seconds_max),
            config.timeouts.connect_seconds,
            self.fleet,
            self.knowledge,
            self.transfers,
        )
        settings = PipelineSettings(
            config.policy,
            config.policy_header_allowed,
            config.forward_kv_transfer_params,
            config.priorities,
            config.prompts.token_ids_forwarded,
            config.usage.requested,
            (b"https" if config.tls.cert else b"http") if config.x_forwarded else b"",
            config.timeouts.total_seconds,
        )
        self.admission = (
            Admission(config.admission, config.priorities, self.knowledge, self.metrics.refused)
            if config.admission.enabled
            else None
        )
        self.shadows = _shadows(config.routing.shadow)
        self.samples = Samples(config.samples) if config.samples.decisions_max else None
        self.standings = self._standings(backend)
        self.pipeline = Pipeline(
            settings,
            self.fleet,
            self.knowledge,
            self.prompts,
            self.access.tenants,
            self.metrics,
            self.receipts,
            self.transfers,
            self.passages,
            self.disaggregation,
            self.admission,
            self.shadows,
            self.samples,
        )
        self.access.limit(self.pipeline, self.metrics.refused)
        connect_seconds = config.timeouts.connect_seconds
        self.administration = Administration(
            self.pipeline, self._members, self.admission, self.samples, connect_seconds
        )
        transfers = self.transfers.metrics if self.transfers else None
        inflight = self.knowledge.accounting.__len__
        self.traffic = Traffic(self.metrics, self.receipts, inflight, transfers)
        self.pipeline.translator = Translator(config.api.translation)
        self.batches = self._batches()
        self.status = self._status()
        self.feed = Feed(self.status)
        self.cors = Cors(config.cors)
        self.edge = self._edge()
        self.request_log = (
            logs.RequestLog(config.logs.format, config.logs.requests == "errors")
            if config.logs.requests != "none"
            else None
        )
        self.pipeline.request_log = self.request_log
        self.tracing = self._tracing()
        if self.tracing is not None:
            self.pipeline.trace(self.tracing)
        self.edge.on_error = self.request_log.refused if self.request_log is not None else None
        configured = self.sharing.directory.configure if self.sharing and self.sharing.directory else lambda _: None
        parts = Parts(self.fleet, self.pipeline, self.admission, self.edge, self.access, configured)
        self.reloader = Reloader(request or Request(), config, parts)
        self.status.configuration = self.reloader.document
        self.collectors = self._collectors()
        self._admin_key = OperatorKey.load(config.admin.key_file)
        self._metrics_key = OperatorKey.load(config.metrics.key_file)

    def _status(self) -> StatusView:
        return StatusView(
            _version(),
            lambda: self.pipeline.settings.policy,
            self.fleet,
            self.knowledge,
            self.metrics,
            self.receipts,
            self.prompts,
            self.traffic,
            self.sharing.document if self.sharing else None,
            self.transfers.document if self.transfers else None,
            self.disaggregation.document,
            self.admission.document if self.admission else None,
            self.shadows.document if self.shadows else None,
        )

    def _edge(self) -> Edge:
        timeouts, limits = self.config.timeouts, self.config.limits
        deadlines = Deadlines(timeouts.connect_seconds, timeouts.first_byte_seconds, timeouts.idle_seconds)
        edge_limits = EdgeLimits(
            limits.body_bytes_max,
            limits.connections_max,
            timeouts.idle_seconds,
            timeouts.idle_seconds,
            limits.header_bytes_max,
            timeouts.write_seconds,
            limits.requests_bytes_max,
        )
        if self.cors.enabled:
            return CorsEdge(self.pipeline, edge_limits, deadlines, self.cors)
        return Edge(self.pipeline, edge_limits, deadlines)

    def _collectors(self) -> CollectorRegistry:
        """What is asked when somebody scrapes."""
        registry = CollectorRegistry()
        register = registry.register
        register(GatewayCollector(self.metrics, self.fleet, self.knowledge))
        register(TrustCollector(self.trust, self.fleet.workers))
        register(ReliabilityCollector(self.fleet.safeguards, self.fleet.workers))
        if self.sharing is not None:
            register(SharingCollector(self.sharing))
        if self.transfers is not None:
            register(TransferCollector(self.transfers.metrics, self.transfers.accounts.__len__))
            register(PoolCollector(self.pools))
            register(QualityCollector(self.guard))
        register(DisaggregationCollector(self.disaggregation.metrics))
        register(AccessCollector(self.access))
        if self.admission is not None:
            register(AdmissionCollector(self.admission))
        if self.shadows is not None:
            register(ShadowCollector(self.shadows))
        if self.passages is not None:
            register(PassageCollector(self.passages))
        register(FlightCollector(self.knowledge, self.fleet))
        register(EdgeCollector(self.edge))
        register(SizeCollector(self))
        return registry

    def _contents(self) -> ContentFeed | None:
        """Where blocks' texts lie; None where nobody looks them up."""
        config = self.config.transfer
        wanted = config.shifted and self._moves_kv
        return ContentFeed(MemoryContentIndex(config.shifted_blocks_max)) if wanted else None

    def _streams(self) -> EventStreams:
        index, naming_for, contents = self.knowledge.index, self.prompts.naming_for_events, self.contents
        if self.sharing is None:
            return OwnStreams(Intakes(index, naming_for, contents, self.access.upstream_tls))
        streams = self.sharing.streams
        return TextStreams(streams, naming_for, contents) if contents is not None else streams

    @property
    def _moves_kv(self) -> bool:
        return self.config.transfer.enabled and self.config.keys_are_shared

    def _transfers(self, keyring: Keyring) -> Transfers | None:
        """None where nobody is told to pull."""
        config = self.config.transfer
        if not self._moves_kv:
            return None
        bounds = DeadlineBounds(config.deadline_seconds_min, config.deadline_seconds_max)
        settings = TransferSettings(Fidelity[config.fidelity.upper()], config.codecs, bounds)
        estimates = self.knowledge.estimates
        return Transfers(settings, keyring, self.fleet.workers, estimates, self.pools.knowledge, self.guard)

    def _batches(self) -> Shelf | None:
        """None where no files are kept."""
        config = self.config.batches
        if config.directory is None:
            return None
        self.pipeline.kept_paths = BATCH_PATHS
        try:
            return Shelf(config.directory, config)
        except OSError as error:
            raise ConfigError(f"batches.directory: {config.directory}: {error.strerror}") from error

    def _standings(self, backend: IndexBackend | None) -> SharedStandings | None:
        """None where no other gateway asks the same workers."""
        if backend is None or self.sharing is None:
            return None
        prefix, gateway = backend.schema.prefix, backend.gateway
        peers, limits = self.sharing.peers.alive, self.access.limits
        return SharedStandings(backend.store, prefix, gateway, peers, self.admission, limits)

    async def serve(self) -> None:
        """Serve until SIGINT or SIGTERM; another one of them ends what is still being finished."""
        servers = [self._public_server(), *self._operator_servers()]
        if self.sharing is not None:
            await self.sharing.start()
        if self.transfers is not None:
            await self.pools.start()
            await self.quality.start()
        await self.access.start()
        sweep = asyncio.create_task(self.edge.sweep(), name="edge sweep")
        watch = asyncio.create_task(self.trust.run(), name="trust watch")
        samples = asyncio.create_task(self.traffic.run(), name="traffic samples")
        judging = self.fleet.safeguards.run(self.fleet.pools, self.knowledge.estimates)
        owned = [sweep, watch, samples, asyncio.create_task(judging, name="safeguards")]
        if self.standings is not None:
            owned.append(asyncio.create_task(self.standings.run(), name="tenants' shares"))
        for worker in self.config.workers:
            await self.fleet.register(worker)
        picker = self._picker()
        if picker is not None:
            await picker.start()
        if self.kubernetes is not None:
            owned.append(asyncio.create_task(self.kubernetes.run(), name="workers in Kubernetes"))
        stop = Stop(self.config.handover.announce_seconds, self.config.timeouts.shutdown_seconds)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.wanted)
        loop.add_signal_handler(signal.SIGHUP, self.reloader.wanted)
        # Whoever listens before it knows a worker refuses what another gateway would have answered.
        await self.fleet.probed(self.config.probes.timeout_seconds)
        batches: asyncio.Task[None] | None = None
        if self.batches is not None:
            runner = BatchRunner(
                self.batches, self.pipeline.begin_for, self.edge.deadlines, self.config.priorities.highest
            )
            owned.append(batches := asyncio.create_task(runner.run(), name="batches"))
        owned.append(asyncio.create_task(self.reloader.run(), name="configuration"))
        tasks = [asyncio.create_task(server.run_until_left(), name="server") for server in servers]
        stopped = asyncio.create_task(stop.wait(), name="stop signal")
        try:
            await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.status.draining = True
            if batches is not None:
                batches.cancel()  # nobody waits for them: another gateway goes on with them at once
            await self.feed.close()
            await stop.run(servers, tasks, self._break_off)
            if picker is not None:
                await picker.stop(self.config.timeouts.shutdown_seconds)
            await self.quality.stop()
            await self.pools.stop()
            if self.prompts.remote is not None:
                await self.prompts.remote.stop()
            await self.fleet.stop()
            await self.access.stop()
            if self.tracing is not None:
                await asyncio.to_thread(self.tracing.stop)
            if self.request_log is not None:
                self.request_log.flush()
            if self.sharing is not None:
                await self.sharing.stop()
            for task in (*owned, stopped):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        for task in tasks:
            task.result()

    def _tracing(self) -> "Tracing | None":
        """None where spans are sent nowhere. Raises ConfigError."""
        if not self.config.tracing.endpoint:
            return None
        try:
            from gateway.tracing import Tracing
        except ImportError as error:
            raise ConfigError(f"tracing.endpoint: {error.name} is not installed: pip install 'ropeway[otel]'") from None
        return Tracing(self.config.tracing, _version())

    def _picker(self) -> "EndpointPicker | None":
        """None where no Envoy asks. Raises ConfigError."""
        if self.config.envoy.port is None:
            return None
        try:
            from gateway.envoy.server import EndpointPicker
        except ImportError as error:
            raise ConfigError(f"envoy.port: {error.name} is not installed: pip install 'ropeway[envoy]'") from None
        return EndpointPicker(self.config.envoy, self.pipeline, self.config.limits.body_bytes_max)

    def _break_off(self) -> None:
        """End the requests that were not finished in time."""
        if self.admission is not None:
            self.admission.close()
        self.edge.stop()

    def _public_server(self) -> QuietServer:
        config = self.config
        surfaces = Surfaces(
            public=True,
            admin=config.admin.port is None and self._opened(config.admin, self._admin_key, "admin"),
            metrics=config.metrics.port is None and self._opened(config.metrics, self._metrics_key, "metrics"),
        )
        return self._server(surfaces, config.host, config.port, self.edge.protocol, config.tls)

    def _opened(self, listener: ListenerConfig, key: OperatorKey, name: str) -> bool:
        """Operators' routes share a port that others can reach only behind a key."""
        if not key.open or is_loopback(self.config.host):
            return True
        logger.warning("%s routes are off: %s is not loopback and %s.key_file is not set", name, self.config.host, name)
        return False

    def _operator_servers(self) -> list[QuietServer]:
        """Listeners of their own for the admin and metrics routes; one where both name the same address."""
        wanted: dict[tuple[str, int], dict[str, TlsConfig]] = {}
        for name, listener in (("admin", self.config.admin), ("metrics", self.config.metrics)):
            if listener.port is not None:
                wanted.setdefault((listener.host, listener.port), {})[name] = listener.tls
        return [
            self._server(
                Surfaces(public=False, admin="admin" in names, metrics="metrics" in names),
                host,
                port,
                "auto",
                next((tls for tls in names.values() if tls.cert is not None), TlsConfig()),
            )
            for (host, port), names in wanted.items()
        ]

    def app(self, surfaces: Surfaces) -> FastAPI:
        """All routes of these surfaces but those that the edge serves."""
        app = build_app(
            self.pipeline,
            self.status,
            self.collectors,
            surfaces,
            self._admin_key,
            self._metrics_key,
            self._members,
            self.administration,
            self.feed,
            self.request_log,
        )
        if surfaces.public and self.batches is not None:
            add_batch_routes(app, self.batches, lambda request: self.pipeline.tenants.authenticate(key_of(request)).id)
        return app

    def _server(
        self, surfaces: Surfaces, host: str, port: int, http: str | Callable[..., asyncio.Protocol], tls: TlsConfig
    ) -> QuietServer:
        sockets = listeners(host, port, self.config.handover.reuse_port)
        app = self.app(surfaces)
        served = uvicorn.Config(
            CorsMiddleware(app, self.cors) if self.cors.enabled and surfaces.public else app,
            http=http,  # type: ignore[arg-type]  # any callable that makes protocols will do
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            backlog=4096,
        )
        served.load()
        served.ssl = self.access.listener(tls)
        return QuietServer(served, sockets)


def run(config: GatewayConfig, request: Request | None = None) -> int:
    """Run a gateway until it is told to stop. Returns the exit status. Raises StartupError."""
    logs.configure(config)
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    _calm_garbage_collector()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve_config(config, request))
    return 0


def _calm_garbage_collector() -> None:
    """What is alive now stays alive, and requests leave no cycles: look for some less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 5, 100)


async def _serve_config(config: GatewayConfig, request: Request | None) -> None:
    await Gateway(config, request).serve()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    import uvloop

    return cast(Callable[[], asyncio.AbstractEventLoop], uvloop.new_event_loop)


def load_renderers(tokenizers: Mapping[str, Path], prompts: PromptsConfig) -> dict[str, Renderer]:
    """A renderer for each configured model. Raises ConfigError naming what is at fault."""
    renderers: dict[str, Renderer] = {}
    for model, directory in tokenizers.items():
        try:
            renderers[model] = HuggingFaceRenderer.load(
                directory,
                allow_request_templates=prompts.request_templates_allowed,
                template_defaults=prompts.template_defaults.get(model),
            )
        except PromptError as error:
            raise ConfigError(f"prompts.template_defaults.{model}: {error}") from error
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"tokenizers.{model}: {directory}: {error}") from error
    return renderers


def _load_keyring(config: GatewayConfig) -> Keyring:
    path = config.keyring
    if path is None and config.redis == "embedded":
        # Names must outlive the process where the index does.
        path = embedded_directory(config) / "keyring.json"
        if not path.exists():
            Keyring.generate().save(path)
    if path is None:
        return Keyring.generate()
    try:
        return Keyring.load(path)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _shadows(names: Sequence[str]) -> Shadows | None:
    policies = [create_policy(name) if name in POLICIES else create_peer(name, ChainMultiset) for name in names]
    return Shadows(policies, Random()) if policies else None


def _version() -> str:
    try:
        return version("ropeway")
    except PackageNotFoundError:
        return "0+unknown"

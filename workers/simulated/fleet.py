"""Simulated workers made and served: one, or many in one process, each with its own engine, epoch and event ports."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from cachecore.prompts.contract import Renderer
from cachecore.prompts.plain import PlainRenderer
from cachecore.scope import Keyring
from workers.openai.app import build_app
from workers.openai.leaving import NO_PATIENCE, Patience, Presence
from workers.openai.server import WorkerServer
from workers.publisher import PublisherConfig, ReplayFraming
from workers.simulated.access_log import AccessLog
from workers.simulated.engine import SimulatedConfig, SimulatedEngine
from workers.simulated.faulty_publisher import FaultyPublisher
from workers.simulated.misbehaviour import Misbehaviour
from workers.simulated.protocol import ObservedProtocol
from workers.simulated.transfer import Endpoint

OUTPUT_TOKENS_DEFAULT = 16


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Where a simulated worker listens and what it offers beside its engine. Port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = 0
    uds: str | None = None
    events: bool = True
    events_port: int = 0
    replay_port: int = 0
    topic: str = "kv-events"
    kv_port: int = 0
    """Where others pull KV from it, if it has a link."""
    adapters: Sequence[str] = ()
    output_tokens_default: int = OUTPUT_TOKENS_DEFAULT
    patience: Patience = NO_PATIENCE
    """With what it has begun, when it is told to stop."""
    access_log: Path | None = None
    """Where every request is written down."""


class SimulatedWorker:
    """One worker, its sockets bound. Raises CannotListen or zmq.ZMQError when they cannot be."""

    def __init__(
        self,
        config: SimulatedConfig,
        options: WorkerOptions | None = None,
        renderer: Renderer | None = None,
        keyring: Keyring | None = None,
        context: "zmq.Context[Any] | None" = None,
    ) -> None:
        options = options or WorkerOptions()
        self.access_log: AccessLog | None = None
        self.publisher = FaultyPublisher(_publishing(config, options), context) if options.events else None
        try:
            sink = self.publisher.publish if self.publisher is not None else None
            self.engine = SimulatedEngine(config, renderer or PlainRenderer(), sink, keyring)
            presence = Presence()
            app = build_app(
                self.engine,
                kind="ropeway-simulated",
                publisher=self.publisher,
                adapters=options.adapters,
                output_tokens_default=options.output_tokens_default,
                presence=presence,
            )
            transfers = self.engine.transfers
            self.misbehaviour = Misbehaviour(app, self.publisher, transfers.source if transfers else None)
            self.server = WorkerServer(
                self.misbehaviour,
                host=options.host,
                port=options.port,
                uds=options.uds,
                http=ObservedProtocol,
                before_stop=self.engine.stop,
                presence=presence,
                patience=options.patience,
            )
            if options.access_log is not None:
                self.access_log = AccessLog(options.access_log, self.server.url, self.engine.info.epoch)
                self.misbehaviour.access_log = self.access_log
            if transfers is not None:
                instance = self.server.url.partition("://")[2] if options.uds is None else ""
                transfers.endpoint = Endpoint(instance, options.host, options.kv_port)
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return self.server.url

    async def start(self) -> None:
        await self.server.start()

    async def stop(self) -> None:
        await self.server.stop()
        self.close()

    def close(self) -> None:
        """Release the event sockets and the access log."""
        if self.publisher is not None:
            self.publisher.close()
        if self.access_log is not None:
            self.access_log.close()


def load_renderer(tokenizer: Path | None) -> Renderer:
    """The plain renderer, or that of a Hugging Face directory. Raises ValueError."""
    if tokenizer is None:
        return PlainRenderer()
    from cachecore.prompts.huggingface import HuggingFaceRenderer

    return HuggingFaceRenderer.load(tokenizer)


def _publishing(config: SimulatedConfig, options: WorkerOptions) -> PublisherConfig:
    return PublisherConfig(
        endpoint=f"tcp://{options.host}:{options.events_port}",
        replay_endpoint=f"tcp://{options.host}:{options.replay_port}",
        topic=options.topic,
        dialect=config.dialect,
        framing=ReplayFraming.of(config.dialect),
    )

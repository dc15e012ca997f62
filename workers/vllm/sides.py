"""The two halves of the connector, without vLLM: one for its scheduler, one for its worker."""

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from cachecore.holders import Holder, Worker
from cachecore.index.schema import holder_id
from cachecore.kv.calibration import RAW
from cachecore.kv.codecs.contract import DTYPES
from cachecore.kv.layout import TransposedMemory
from cachecore.scope import Keyring
from cachecore.transfer.tcp.client import ClientSettings
from workers.engine import TransferInfo, TransferMetrics
from workers.openai.metrics import TransferCollector
from workers.openai.server import CannotListen
from workers.transfer.loader import Destination
from workers.transfer.plans import PlanReader
from workers.transfer.service import Attachment, TransferOptions, TransferService
from workers.vllm.classes import class_of
from workers.vllm.facts import Facts, in_layer_order
from workers.vllm.fuser import load_fuser
from workers.vllm.index import BlockIndex
from workers.vllm.layout import EnginePages, Store, engine_memory
from workers.vllm.moving import Mover
from workers.vllm.names import Namings
from workers.vllm.plans import PlanDesk
from workers.vllm.reports import Reports
from workers.vllm.requests import Requests
from workers.vllm.settings import SettingsError
from workers.vllm.sidecar import sidecar

logger = logging.getLogger("ropeway.transfer")


def scheduler_side(facts: Facts, keyring: Keyring, holder: Holder) -> Requests:
    """`holder` is as which the worker's side serves and pulls."""
    namings = Namings(keyring, facts.model, facts.tokenizer_fingerprint, facts.block_size_tokens)
    reader = PlanReader(keyring, holder, facts.settings.codecs, TransferMetrics())
    return Requests(namings.of, PlanDesk(reader, facts.settings.fuser), facts.block_size_tokens)


class WorkerSide:
    """Serves from, and loads into, the tensors that vLLM has registered."""

    def __init__(self, facts: Facts, keyring: Keyring) -> None:
        self._facts = facts
        self._keyring = keyring
        self._epoch = time.time_ns()
        self._reports = Reports()
        self.mover: Mover | None = None

    @property
    def holder(self) -> Worker:
        """As which it serves, once it has started."""
        assert self.mover is not None  # noqa: S101
        assert self.mover.service is not None  # noqa: S101
        return self.mover.service.holder

    def start(self, tensors: Mapping[str, Tensor], kernel: str, store: Store) -> Mover:
        """`tensors` by the names of layers; `kernel` and `store` as in `layout`. Raises SettingsError."""
        facts, settings = self._facts, self._facts.settings
        memory = engine_memory([tensors[name] for name in in_layer_order(list(tensors))], kernel, store)
        destination = self._destination(memory)
        lineage_of = Namings(self._keyring, facts.model, facts.tokenizer_fingerprint, facts.block_size_tokens).of
        index = BlockIndex(lineage_of)
        fuser = load_fuser(facts.checkpoint, memory, index) if settings.fuser else None
        mover = Mover(index, lineage_of, self._reports, fuser)
        options = TransferOptions(
            host=settings.host,
            port=settings.port,
            name=settings.name,
            codecs=settings.codecs,
            client=ClientSettings(stall_seconds=settings.stall_seconds, connect_seconds=settings.connect_seconds),
            tls=settings.open_tls(),
            attachments=[self._sidecar()],
        )
        service = TransferService(options, self._keyring, self._epoch, destination, index, mover.wake, facts.rank)
        mover.service, self.mover = service, mover
        try:
            service.start()
        except (OSError, CannotListen) as error:
            raise SettingsError(f"cannot serve KV: {error}") from error
        logger.info("KV is served at %s, as %s", service.address, service.holder)
        return mover

    def _destination(self, memory: TransposedMemory) -> Destination:
        """Raises SettingsError."""
        facts, first = self._facts, memory.tensors[0]
        if first.dtype not in DTYPES.values() or first.shape[2] != facts.block_size_tokens:
            raise SettingsError(f"KV memory of shape {tuple(first.shape)} in {first.dtype} is not supported")
        kv_class = class_of(facts.checkpoint)
        if kv_class.rope is None and facts.settings.codecs != (RAW,):
            raise SettingsError("this model's KV can only travel as raw: how its keys are turned is not known")
        shape = kv_class.shape(memory.layers, first.shape[1], memory.head_dim, facts.block_size_tokens, first.dtype)
        return Destination(shape, EnginePages(memory), kv_class.rope)

    def stop(self) -> None:
        if self.mover is not None:
            self.mover.stop()

    def _sidecar(self) -> Attachment:
        facts, settings = self._facts, self._facts.settings
        metrics = TransferCollector(facts.model, facts.rank, self._metrics)
        host, port = settings.sidecar_host, settings.sidecar_port
        return sidecar(host, port, self._describe, metrics, self._reports, _say_where)

    def _describe(self, service: TransferService) -> Mapping[str, Any]:
        """`/server_info`, as our own workers answer it."""
        facts, shape = self._facts, service.destination.shape
        itemsize = DTYPES[shape.dtype].itemsize
        transfer = TransferInfo(
            holder_id(service.holder).decode(),
            service.addresses,
            shape.compatibility.hex(),
            list(facts.settings.codecs),
            2 * shape.layers * shape.kv_heads * shape.head_dim * itemsize,
            shifted=facts.settings.fuser,
        )
        return {
            "engine": "vllm",
            "model": facts.model,
            "epoch": self._epoch,
            "block_size": facts.block_size_tokens,
            "max_model_len": facts.checkpoint.positions,
            "dtype": shape.dtype,
            "tokenizer_fingerprint": facts.tokenizer_fingerprint,
            "kv_events": facts.kv_events,
            "transfer": transfer.document(),
            "counts": self._counts(),
        }

    def _counts(self) -> Mapping[str, Any]:
        """What has been pulled and served so far."""
        metrics = self._metrics()
        return {
            **{field.name: getattr(metrics, field.name) for field in fields(metrics)},
            "pulls": {":".join(filter(None, key)): count for key, count in metrics.pulls.items()},
            "blocks": 0 if self.mover is None else len(self.mover.index),
        }

    def _metrics(self) -> TransferMetrics:
        mover = self.mover
        if mover is None or mover.service is None:
            return TransferMetrics()
        served = mover.service.counts
        return replace(
            mover.metrics,
            served=served.transfers,
            served_bytes=served.payload_bytes,
            refused=Counter({reason.value: count for reason, count in served.refusals.items()}),
        )


def _say_where(url: str) -> None:
    logger.info("gateways ask at %s/server_info", url)

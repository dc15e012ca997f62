"""A peer without an engine: it pulls, into memory of its own, what instances serve."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from cachecore.kv.codecs.contract import DTYPES
from cachecore.scope import Fidelity, Keyring, Naming
from cachecore.transfer.plan import Grant, Plan, read_plan, sign
from cachecore.transfer.tcp.client import ClientSettings
from cachecore.transfer.transport import Fetched, Outcome
from tests.vllm.movers import TENANT, info
from tests.vllm.servers import BLOCK_TOKENS, VllmServer
from workers.transfer.loader import Destination
from workers.transfer.loads import Load, RunLoad
from workers.transfer.pages import Pages
from workers.transfer.service import TransferOptions, TransferService
from workers.transfer.shape import KvShape
from workers.vllm.index import BlockIndex

LAYERS, KV_HEADS, HEAD_DIM = 30, 3, 64
"""Of SmolLM2-135M."""
_BLOCKS = 64
_PATIENT = ClientSettings(stall_seconds=60.0, connect_seconds=60.0)


class Came(NamedTuple):
    outcome: Outcome
    kv: Tensor
    """[2, layers, tokens, kv_heads, head_dim]; means nothing where it was not fetched."""

    @property
    def fetched(self) -> bool:
        return isinstance(self.outcome, Fetched)


class Peer:
    """Pulls one run at a time."""

    def __init__(self, like: VllmServer, keyring: Keyring) -> None:
        """Of the class of `like`."""
        about = info(like)
        shape = KvShape(
            bytes.fromhex(about["transfer"]["compatibility"]),
            LAYERS,
            KV_HEADS,
            HEAD_DIM,
            BLOCK_TOKENS,
            about["dtype"],
        )
        memory = torch.zeros((2, LAYERS, _BLOCKS, BLOCK_TOKENS, KV_HEADS, HEAD_DIM), dtype=DTYPES[about["dtype"]])
        self._keyring = keyring
        self._memory = memory
        self._settled = threading.Event()
        nothing = BlockIndex(lambda salt: None)
        destination = Destination(shape, Pages(memory[0], memory[1]), None)
        options = TransferOptions(client=_PATIENT)
        self._service = TransferService(options, keyring, time.time_ns(), destination, nothing, self._settled.set)

    @contextmanager
    def running(self) -> "Iterator[Peer]":
        self._service.start()
        try:
            yield self
        finally:
            self._service.stop()

    def pull(self, plan: Plan, naming: Naming, worst: Fidelity = Fidelity.EXACT) -> Came:
        holder = self._service.holder
        grant = Grant(TENANT, holder, worst, time.time() + 600)
        document = sign(plan, grant, self._keyring)
        first, count = plan.run.first_block, plan.run.blocks
        run = RunLoad(read_plan(document, self._keyring, holder, time.time()), first, first + count)
        run.blocks = range(count)
        load = Load([run], naming, worst, time.monotonic())
        self._service.begin(load)
        while not load.settled:
            self._settled.wait(1.0)
            self._settled.clear()
        assert run.outcome is not None
        return Came(run.outcome, self._memory[:, :, :count].flatten(2, 3).clone())

"""vLLM without vLLM: both halves of the connector over memory as vLLM lays it out, and a scheduler's loop by hand."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cachecore.kv.layout import LayerKv, TransposedMemory, slots_of
from cachecore.transfer.plan import Plan
from tests.workers.reference.support import BytesRenderer
from tests.workers.vllm.checkpoints import save_checkpoint
from tests.workers.vllm.support import KEYRING, SALT, SIZE, FakeRequest, params, run_of, signed
from workers.vllm.classes import Checkpoint
from workers.vllm.facts import Facts
from workers.vllm.requests import Requests, Scheduled
from workers.vllm.settings import Settings
from workers.vllm.sides import WorkerSide, scheduler_side

BLOCKS, LAYERS, HEADS, WIDTH = 64, 2, 2, 8


def store(keys: Tensor, values: Tensor, tensor: Tensor, slots: Tensor) -> None:
    """The attention kernel."""
    TransposedMemory([tensor]).write(0, slots, LayerKv(keys, values))


@dataclass
class FakeVllm:
    side: WorkerSide
    requests: Requests
    memory: TransposedMemory
    free: list[int] = field(default_factory=lambda: list(range(BLOCKS)))
    """Given out from the front."""
    _ids: "count[int]" = field(default_factory=count)

    @property
    def mover(self) -> Any:
        return self.side.mover

    @property
    def info(self) -> Any:
        return self.mover.service

    def plan(self, prompt: Sequence[int], first: int = 0, end: int = 0, **changes: Any) -> Plan:
        """To pull from here."""
        run = run_of(first, end or len(prompt) // SIZE, prompt)
        at = first * SIZE
        return Plan(self.info.holder, self.info.addresses, run, at, at, "raw", 20.0)._replace(**changes)

    def step(self, *scheduled: Scheduled, table: Sequence[int] = ()) -> None:
        self.mover.obey(self.requests.step(scheduled, lambda name: table))

    def take(self, blocks: int) -> list[int]:
        taken, self.free = self.free[:blocks], self.free[blocks:]
        return taken

    def compute(self, prompt: Sequence[int], seed: int = 0, salt: str | None = SALT) -> list[int]:
        """As a request that computes all of its prompt and ends; its blocks, still what they were."""
        request = FakeRequest(f"computed-{next(self._ids)}", list(prompt), salt)
        table = self.take(-(-len(prompt) // SIZE))
        self.requests.add(request)
        self.requests.allocated(request.request_id, table, 0)
        self.step(Scheduled(request.request_id, table, True, 0))
        self.fill(table, seed)
        request.num_computed_tokens = len(prompt)
        self.requests.finish(request.request_id, table)
        self.step()
        return table

    def fill(self, blocks: Sequence[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for layer in range(LAYERS):
            kv = (torch.randn(len(blocks) * SIZE, HEADS, WIDTH, generator=generator) for _ in range(2))
            self.memory.write_blocks(layer, torch.tensor(blocks), LayerKv(*(part.to(self.dtype) for part in kv)))

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.tensors[0].dtype

    def begin(
        self,
        prompt: Sequence[int],
        *plans: Plan | dict[str, Any],
        salt: str = SALT,
        computed: int = 0,
        table: Sequence[int] = (),
        more: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[int]]:
        """A request that waits for a load; its id and its blocks. Plans that are not signed are so here; `more` goes
        with them."""
        documents = [plan if isinstance(plan, dict) else signed(plan, target=self.info.holder) for plan in plans]
        request = FakeRequest(f"pulls-{next(self._ids)}", list(prompt), salt, {**params(*documents), **(more or {})})
        self.requests.add(request)
        tokens = self.requests.match(request.request_id, computed)
        assert tokens, "nothing would come"
        table = list(table)[: -(-len(prompt) // SIZE)] or self.take(-(-len(prompt) // SIZE))
        self.requests.allocated(request.request_id, table, tokens)
        request.num_computed_tokens = computed + tokens
        self.step()
        return request.request_id, table

    async def ended(self, request_id: str) -> bool:
        """Wait for a load; whether it went well."""
        while True:
            settled = await asyncio.to_thread(self.mover.settled, 0.02)
            self.requests.received(settled.request_ids, settled.failed_ids)
            if settled.request_ids:
                assert settled.request_ids == {request_id}
                return request_id not in settled.failed_ids
            self.step()

    async def pull(self, prompt: Sequence[int], *plans: Plan, **how: Any) -> tuple[bool, list[int]]:
        """A request that leaves when its load is over; whether that went well, and its blocks."""
        request_id, table = self.begin(prompt, *plans, **how)
        is_good = await self.ended(request_id)
        self.requests.finish(request_id, ())
        return is_good, table

    def read(self, blocks: Sequence[int]) -> list[LayerKv]:
        slots = slots_of(blocks, SIZE, 0, len(blocks) * SIZE)
        return [self.memory.read(layer, slots) for layer in range(LAYERS)]


@contextlib.asynccontextmanager
async def fake_vllm(
    directory: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> AsyncIterator[FakeVllm]:
    """An instance that serves, of a model that is saved in `directory`."""
    checkpoint = Checkpoint(directory, save_checkpoint(directory, seed), dtype, 256)
    configured = Settings(**{"keyring": "", "port": 0, "sidecar_port": 0, "stall_seconds": 10.0, **changes})
    facts = Facts(configured, checkpoint, BytesRenderer.fingerprint, "tiny", SIZE, 0, None)
    side = WorkerSide(facts, KEYRING)
    tensors = [torch.zeros(BLOCKS, HEADS, SIZE, 2 * WIDTH, dtype=dtype) for _ in range(LAYERS)]
    named = {f"model.layers.{number}.self_attn.attn": tensor for number, tensor in enumerate(tensors)}
    await asyncio.to_thread(side.start, named, "vec", store)
    try:
        yield FakeVllm(side, scheduler_side(facts, KEYRING, side.holder), TransposedMemory(tensors))
    finally:
        await asyncio.to_thread(side.stop)

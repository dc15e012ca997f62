"""Passages that were computed at other positions, made KV of a prompt inside vLLM's worker.

vLLM can hold no KV that has yet to be repaired: what a request is promised is its prefix, valid, or nothing. So all up
to the last passage is one load. What came, and what this instance has itself, is turned to where it stands now, and
goes with the gaps between through the model of the reference engine (`workers.reference.fusing`); what comes out is put
into vLLM's blocks. That model has weights of its own: they take their memory a second time.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from cachecore.kv.layout import LayerKv, TransposedMemory
from cachecore.scope import Fidelity, KeyId
from cachecore.transfer.errors import Reason, Unserved
from workers.reference.config import ModelConfig, ModelError
from workers.reference.fusing import Found, Kv, Repair
from workers.reference.model import LlamaModel
from workers.reference.weights import load_weights
from workers.transfer.passages import PassageLoad
from workers.vllm.classes import Checkpoint
from workers.vllm.index import BlockIndex
from workers.vllm.orders import Fusing
from workers.vllm.settings import SettingsError


class Fuser:
    """Reads and writes vLLM's memory. One prompt at a time, on a thread of its own."""

    def __init__(self, model: LlamaModel, memory: TransposedMemory, index: BlockIndex) -> None:
        self._model = model
        self._memory = memory
        self._index = index
        self._repair = Repair(answers=False)

    def fuse(self, fusing: Fusing, passages: Sequence[PassageLoad], key_id: KeyId) -> Kv:
        """KV of the tokens from `fusing.first_block` to the end of its blocks; the blocks before must hold theirs.

        Raises Unserved where a passage of this instance's own is not there any more.
        """
        size, end = self._memory.block_size_tokens, len(fusing.blocks) * self._memory.block_size_tokens
        token_ids = list(memoryview(fusing.token_ids).cast("I"))
        found = [self._found(passage, key_id) for passage in passages]
        prefix = self._read(fusing.blocks[: fusing.first_block])
        repair = self._repair if fusing.fraction is None else replace(self._repair, fraction=fusing.fraction)
        repaired = repair(self._model, token_ids, prefix, found).kv
        count = end - fusing.first_block * size
        return Kv(repaired.keys[:, :count], repaired.values[:, :count])

    def put(self, fusing: Fusing, kv: Kv) -> None:
        """Into the blocks that they are for."""
        blocks = torch.tensor(fusing.blocks[fusing.first_block :])
        for layer in range(self._memory.layers):
            self._memory.write_blocks(layer, blocks, LayerKv(kv.keys[layer], kv.values[layer]))

    def _found(self, passage: PassageLoad, key_id: KeyId) -> Found:
        if passage.keys is None or passage.values is None:
            return Found(passage.start, self._own(passage, key_id), passage.position, passage.is_alone)
        return Found(passage.start, Kv(passage.keys, passage.values), passage.start, passage.is_alone)

    def _own(self, passage: PassageLoad, key_id: KeyId) -> Kv:
        run = passage.pull.plan.run
        with self._index.lend(run.tail, run.blocks, Fidelity.QUANTIZED) as held:
            naming = None if held is None else held.held[0].naming
            if held is None or naming is None or naming.scope.key_id != key_id:
                raise Unserved("a passage of one's own is not held", Reason.STALE)
            if (held.held[0].parent or naming.root, held.held[0].number) != (run.parent, run.first_block):
                raise Unserved("a passage of one's own continues another chain", Reason.STALE)
            kv = self._read(held.blocks)
            self._index.vouch(held)
            return kv

    def _read(self, blocks: Sequence[int]) -> Kv:
        """A copy: [layers, tokens, kv_heads, head_dim] each."""
        numbers = torch.tensor(blocks, dtype=torch.int64)
        layers = [self._memory.read_blocks(layer, numbers) for layer in range(self._memory.layers)]
        return Kv(torch.stack([layer.keys for layer in layers]), torch.stack([layer.values for layer in layers]))


def load_fuser(checkpoint: Checkpoint, memory: TransposedMemory, index: BlockIndex) -> Fuser:
    """Reads all weights. Raises SettingsError for a model that the reference engine does not serve."""
    try:
        config = ModelConfig.parse(checkpoint.document)
        weights = load_weights(checkpoint.directory, config, checkpoint.dtype, torch.device("cpu"))
    except ModelError as error:
        raise SettingsError(f"passages of this model cannot be repaired: {error}") from error
    return Fuser(LlamaModel(config, weights, checkpoint.positions), memory, index)

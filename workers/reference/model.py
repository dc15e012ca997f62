"""The Llama forward pass over a paged KV pool, for a batch of prompt chunks and decode steps at once.

Everything but attention treats the batch as one flat list of tokens. Attention looks at each chunk alone, and at all
sequences that decode one token together, padded to the longest.

Shapes: N tokens of the batch, H hidden, D head_dim, Q query heads, K key-value heads, G = Q / K, T tokens of a context.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cachecore.kv.fuser.context import Projected
from workers.reference.config import ModelConfig
from workers.reference.rope import RopeRows, rope_table
from workers.reference.weights import Weights


class Segment(NamedTuple):
    """Consecutive tokens of one sequence to compute, whose KV before `start` is in `blocks` already."""

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    """Block ids of the whole sequence, room for the new tokens included."""
    all_logits: bool = False
    """Logits of every token rather than of the last alone."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Several tokens of one sequence: rows of the batch, and what they attend to."""

    rows: slice
    blocks: Tensor
    context: int
    mask: Tensor | None
    """[n, T], 0 where a token sees and -inf where not; None when the chunk begins its sequence."""


@dataclass(frozen=True, slots=True)
class _Decodes:
    """One token each of B sequences, padded to the longest."""

    rows: Tensor
    """[B]"""
    blocks: Tensor
    """[B, blocks]"""
    context: int
    mask: Tensor | None
    """[B, 1, 1, T]; None for a single sequence."""


@dataclass(frozen=True, slots=True)
class _Batch:
    token_ids: Tensor
    turns: RopeRows
    slots: Tensor
    """[N]: where in the pool each token's KV goes."""
    chunks: Sequence[_Chunk]
    decodes: _Decodes | None
    logit_rows: Tensor


@dataclass(slots=True, eq=False)
class Forward:
    """A pass through the layers that may be paused between two of them."""

    batch: _Batch
    kv: "KvTensors"
    hidden: Tensor
    """[N, H], what `layer` is to be computed from."""
    layer: int = 0

    @property
    def tokens(self) -> int:
        return len(self.hidden)


class KvTensors:
    """Keys (rotated) and values of every block: `keys[layer]` is [blocks, block_size, K, D]."""

    def __init__(
        self, config: ModelConfig, blocks: int, block_size_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size_tokens = block_size_tokens
        shape = (config.layers, blocks, block_size_tokens, config.kv_heads, config.head_dim)
        # Zeros, not empty: padded reads multiply stale values by a weight of 0, and 0 * NaN is NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put KV of [N, K, D] at token slots [N] (block * block_size + offset)."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, values)

    def read(self, layer: int, blocks: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """KV of the first `context` tokens of block tables [..., blocks]: two of [..., context, K, D]."""
        return self._gather(self.keys[layer], blocks, context), self._gather(self.values[layer], blocks, context)

    def _gather(self, pool: Tensor, blocks: Tensor, context: int) -> Tensor:
        rows = pool.index_select(0, blocks.flatten())
        return rows.view(*blocks.shape[:-1], -1, *pool.shape[-2:])[..., :context, :, :]


class LlamaModel:
    """Weights and table made ready to run."""

    def __init__(self, config: ModelConfig, weights: Weights, positions: int) -> None:
        self.config = config
        self.weights = weights
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self.rope = rope_table(config.rope, positions, self.device)

    def forward(self, segments: Sequence[Segment], kv: KvTensors) -> Tensor:
        """Compute the segments, writing their KV. Logits, fp32 [rows, vocabulary]: one row per segment (its last
        token), or one per token where `all_logits` is set, in order."""
        forward = self.begin(segments, kv)
        self.advance(forward, self.layers)
        return self.finish(forward)

    @torch.inference_mode()
    def begin(self, segments: Sequence[Segment], kv: KvTensors) -> "Forward":
        """A pass through the layers that may pause between any two of them."""
        batch = self._prepare(segments, kv.block_size_tokens)
        return Forward(batch, kv, self.embed(batch.token_ids))

    @torch.inference_mode()
    def advance(self, forward: "Forward", end: int) -> None:
        """Compute the layers before `end` that have not been computed. Layer by layer, what the segments attend to must
        be in place."""
        batch, kv = forward.batch, forward.kv
        for index in range(forward.layer, end):
            queries, keys, values = self.project(index, forward.hidden, batch.turns)
            kv.write(index, batch.slots, keys, values)
            forward.hidden = self.absorb(index, forward.hidden, self._attend(index, queries, batch, kv))
            forward.layer = index + 1

    @torch.inference_mode()
    def finish(self, forward: "Forward") -> Tensor:
        """The logits of a pass that has been through every layer, as `forward` gives them."""
        return self.logits(forward.hidden.index_select(0, forward.batch.logit_rows))

    @property
    def layers(self) -> int:
        return self.config.layers

    def embed(self, token_ids: Tensor) -> Tensor:
        """[N] -> [N, H]."""
        return functional.embedding(token_ids, self.weights.embedding)

    def project(self, index: int, hidden: Tensor, turns: RopeRows) -> Projected:
        """Queries, keys and values of [N, H] at a layer, rotated."""
        config, layer = self.config, self.weights.layers[index]
        normed = self._norm(hidden, layer.attention_norm)
        qkv = normed @ layer.qkv if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, normed, layer.qkv)
        qkv = qkv.view(len(qkv), -1, config.head_dim)
        rotated = turns.turn(qkv[:, : config.heads + config.kv_heads])
        queries, keys = rotated.tensor_split((config.heads,), dim=1)
        return Projected(queries, keys, qkv[:, config.heads + config.kv_heads :])

    def absorb(self, index: int, hidden: Tensor, mixed: Tensor) -> Tensor:
        """What follows attention: [N, H] and [N, Q, D] -> [N, H] of the next layer."""
        layer = self.weights.layers[index]
        output = mixed.flatten(1) @ layer.output
        hidden = hidden + (output if layer.output_bias is None else output + layer.output_bias)
        gate, up = (self._norm(hidden, layer.mlp_norm) @ layer.gate_up).chunk(2, dim=-1)
        return hidden + (functional.silu(gate) * up) @ layer.down

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> fp32 [N, vocabulary]."""
        return functional.linear(self._norm(hidden, self.weights.norm), self.weights.head).float()

    def output_weight(self, index: int) -> Tensor:
        """The output projection of a layer by head: [Q, D, H]."""
        return self.weights.layers[index].output.view(self.config.heads, self.config.head_dim, -1)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(hidden, (self.config.hidden_size,), weight, self.config.norm_epsilon)

    def _attend(self, index: int, queries: Tensor, batch: _Batch, kv: KvTensors) -> Tensor:
        """[N, Q, D] -> [N, Q, D]."""
        mixed = torch.empty_like(queries)
        for chunk in batch.chunks:
            mixed[chunk.rows] = self._attend_chunk(
                queries[chunk.rows], *kv.read(index, chunk.blocks, chunk.context), chunk
            )
        if batch.decodes is not None:
            decodes = batch.decodes
            context = kv.read(index, decodes.blocks, decodes.context)
            mixed[decodes.rows] = self._attend_decodes(queries[decodes.rows], *context, decodes)
        return mixed

    def _attend_chunk(self, queries: Tensor, keys: Tensor, values: Tensor, chunk: _Chunk) -> Tensor:
        """[n, Q, D] over [T, K, D] -> [n, Q, D]. The G queries that share a key see it through a stride of 0."""
        groups = self.config.heads // self.config.kv_heads
        grouped = queries.view(len(queries), -1, groups, self.config.head_dim).permute(1, 2, 0, 3)
        shape = (-1, groups, -1, -1)
        mixed = functional.scaled_dot_product_attention(
            grouped,
            keys.transpose(0, 1).unsqueeze(1).expand(shape),
            values.transpose(0, 1).unsqueeze(1).expand(shape),
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
        )
        return mixed.permute(2, 0, 1, 3).flatten(1, 2)

    def _attend_decodes(self, queries: Tensor, keys: Tensor, values: Tensor, decodes: _Decodes) -> Tensor:
        """[B, Q, D] over [B, T, K, D] -> [B, Q, D]. The G queries of a key-value head stand at one position, so they
        go in as G rows of one head and need no copies of the keys."""
        groups = self.config.heads // self.config.kv_heads
        grouped = queries.view(len(queries), -1, groups, self.config.head_dim)
        mixed = functional.scaled_dot_product_attention(
            grouped, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=decodes.mask
        )
        return mixed.flatten(1, 2)

    def _prepare(self, segments: Sequence[Segment], block_size: int) -> _Batch:
        token_ids: list[int] = []
        positions, slots, chunks, logit_rows = [], [], [], []
        decodes: list[tuple[int, Segment, Tensor]] = []
        for segment in segments:
            row, count = len(token_ids), len(segment.token_ids)
            table, span = torch.tensor(segment.blocks), torch.arange(segment.start, segment.end)
            positions.append(span)
            slots.append(table[span // block_size] * block_size + span % block_size)
            logit_rows.append(torch.arange(row if segment.all_logits else row + count - 1, row + count))
            if count == 1:
                decodes.append((row, segment, table))
            else:
                chunks.append(self._chunk(row, segment, table, block_size))
            token_ids.extend(segment.token_ids)
        return _Batch(
            token_ids=torch.tensor(token_ids, device=self.device),
            turns=self.rope.rows(torch.cat(positions)),
            slots=torch.cat(slots).to(self.device),
            chunks=chunks,
            decodes=self._decodes(decodes, block_size) if decodes else None,
            logit_rows=torch.cat(logit_rows).to(self.device),
        )

    def _chunk(self, row: int, segment: Segment, table: Tensor, block_size: int) -> _Chunk:
        mask = None
        if segment.start:
            columns = torch.arange(segment.end, device=self.device)
            unseen = columns > torch.arange(segment.start, segment.end, device=self.device).unsqueeze(1)
            mask = torch.zeros(unseen.shape, dtype=self.dtype, device=self.device).masked_fill_(unseen, float("-inf"))
        blocks = table[: -(-segment.end // block_size)].to(self.device)
        return _Chunk(slice(row, row + len(segment.token_ids)), blocks, segment.end, mask)

    def _decodes(self, decodes: Sequence[tuple[int, Segment, Tensor]], block_size: int) -> _Decodes:
        contexts = torch.tensor([segment.end for _, segment, _ in decodes])
        longest = int(contexts.max())
        blocks = torch.zeros((len(decodes), -(-longest // block_size)), dtype=torch.int64)
        for index, (_, segment, table) in enumerate(decodes):
            used = -(-segment.end // block_size)
            blocks[index, :used] = table[:used]
        mask = None
        if len(decodes) > 1:
            unseen = torch.arange(longest) >= contexts.unsqueeze(1)
            mask = torch.zeros(unseen.shape, dtype=self.dtype).masked_fill_(unseen, float("-inf"))
            mask = mask[:, None, None].to(self.device)
        rows = torch.tensor([row for row, _, _ in decodes], device=self.device)
        return _Decodes(rows, blocks.to(self.device), longest, mask)

# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""A whole draft as one function of tensors of fixed shapes, so that it can be compiled, or recorded and replayed.

The drafter's cache lies in buffers of `N` columns, a power of two: context rows from the left, a spare column for
padding, and in the last `B` columns the block. Which columns count is computed on the device from two numbers that
come in with the tensors, so nothing changes as the text grows until it needs buffers twice as long.

Shapes: `b` batch, `c` new context rows, at most `B`, the block size; `S` slots, `N` columns of the buffers, `L` tapped
layers, `M` hidden width, `V` vocabulary.
"""

import functools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DFlashCache
from transformers.utils import logging

from .logits_lilicorr import is_watched
from .scoring_lilicorr import Tensors, choose_mode, compiled, record_graph
from .target_lilicorr import TargetTables


if TYPE_CHECKING:
    from .modeling_dflash import DFlashModel

logger = logging.get_logger(__name__)

# Columns of the shortest buffers.
SMALLEST_BUCKET = 256
# Workspaces a model keeps while no call has them; each holds buffers for its longest text.
LARGEST_COLLECTION = 4
# Shapes that one process compiles, of batches, buckets and models.
MOST_SHAPES = 64


class StaticDraftCache:
    """What the drafter's layers see of a cache in buffers: new rows take the given columns, all columns come back.

    Args:
        columns (`torch.LongTensor` of shape `[2 B]`): of the context rows, padded to `B`, and of the block.
        keys, values (tuple of `torch.Tensor` of shape `[b, heads, N, d]`): of each layer.
    """

    def __init__(self, columns: torch.Tensor, keys: Tensors, values: Tensors):
        self.columns, self.keys, self.values = columns, keys, values

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        return keys.index_copy_(2, self.columns, key), values.index_copy_(2, self.columns, value)


def draft_tensors(
    drafter: "DFlashModel",
    tables: TargetTables,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    score: Callable[..., Tensors],
    counts: torch.Tensor,
    anchor_ids: torch.Tensor,
    context_states: torch.Tensor,
    position_ids: torch.Tensor,
    keys: Tensors,
    values: Tensors,
) -> Tensors:
    """The draft itself, from the anchor to the walk.

    Args:
        logits_of (`Callable`): from the drafter's states `[b, B, M]` to logits.
        score (`Callable`): from logits, states of the slots and the context row before the anchor to more tensors.
        counts (`torch.LongTensor` of shape `[2]`): context rows that the buffers hold, and new ones, `c`.
        anchor_ids (`torch.LongTensor` of shape `[b, 1]`).
        context_states (`torch.Tensor` of shape `[b, B, L * M]`): tapped states of the new rows, then anything finite.
        position_ids (`torch.LongTensor` of shape `[b, 2 B]`): of the new rows and the block, then anything.
        keys, values (tuple of `torch.Tensor` of shape `[b, heads, N, d]`): take the new rows.

    Returns:
        logits `[b, S, V]`, the drafter's states `[b, B, M]`, the projected last context row `[b, 1, M]`, and what
        `score` returns.
    """
    block, length = drafter.config.block_size, keys[0].shape[2]
    seen, new = counts.unbind()
    rows = torch.arange(block, device=counts.device)
    columns = torch.cat([torch.where(rows < new, seen + rows, length - block - 1), length - block + rows])
    column = torch.arange(length, device=counts.device)
    mask = (column < seen + new) | (column >= length - block)
    noise_embeds = tables.embed(drafter.block_ids(anchor_ids))
    output = drafter(
        noise_embeds=noise_embeds.to(context_states.dtype),
        context_hidden_states=context_states,
        attention_mask=mask.expand(anchor_ids.shape[0], 1, block, length),
        position_ids=position_ids[:, torch.cat([rows, new + rows])],
        cache=StaticDraftCache(columns, keys, values),
    )
    states = output.last_hidden_state
    logits = logits_of(states)[:, drafter.slot_rows]
    context = output.context_hidden_states.index_select(1, (new - 1).view(1))
    return logits, states, context, *score(logits, states[:, drafter.slot_rows], context[:, -1])


@dataclass
class Bucket:
    """Buffers of one length, and the draft over them."""

    keys: Tensors
    values: Tensors
    run: Callable[[], Tensors] | None = None

    def take(self, cache: DFlashCache) -> None:
        """Brings the cache's columns into the buffers, if they do not lie there yet."""
        seen = cache.get_seq_length()
        layers: list[Any] = cache.layers
        if seen and layers[0].keys.data_ptr() == self.keys[0].data_ptr():
            return
        for layer, *buffers in zip(layers, self.keys, self.values, strict=True):
            for buffer, columns in zip(buffers, (layer.keys, layer.values), strict=True):
                # No number that another text has left behind may be infinite: a mask does not stop those.
                buffer[:, :, seen:].zero_()
                if seen:
                    buffer[:, :, :seen].copy_(columns)

    def show(self, cache: DFlashCache, seen: int) -> None:
        """Makes the cache's columns the first `seen` of the buffers, without a copy."""
        layers: list[Any] = cache.layers
        for layer, keys, values in zip(layers, self.keys, self.values, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys[:, :, :seen], values[:, :, :seen]


class Workspace:
    """Buffers for the drafts of `b` rows, and what was compiled or recorded over them; one call has it at a time.

    Graphs of its buckets share memory, since no two of them ever run at once.
    """

    def __init__(self, key: Any, drafter: "DFlashModel", tables: TargetTables, rows: int, mode: str):
        self.key, self.mode, self.rows = key, mode, rows
        self.config: Any = drafter.config
        logits_of = functools.partial(tables.logits, product=drafter.draft_product.prepared(tables.output_head))
        self.draft = functools.partial(draft_tensors, drafter, tables, logits_of, drafter.prepared_scoring(tables))
        block, width, device = self.config.block_size, drafter.fc.in_features, drafter.device
        self.floats: Any = {"device": device, "dtype": drafter.dtype}
        with torch.inference_mode(False):
            self.counts = torch.zeros(2, dtype=torch.long, device=device)
            self.anchor_ids = torch.zeros(rows, 1, dtype=torch.long, device=device)
            self.context_states = torch.zeros(rows, block, width, **self.floats)
            self.position_ids = torch.zeros(rows, 2 * block, dtype=torch.long, device=device)
        self.buckets: dict[int, Bucket] = {}
        self.pool = torch.cuda.graph_pool_handle() if mode == "cuda_graph" else None

    def __call__(
        self, context_states: torch.Tensor, anchor_ids: torch.Tensor, position_ids: torch.Tensor, cache: DFlashCache
    ) -> Tensors:
        """What [`draft_tensors`] returns, which the next call may overwrite; the cache takes the context rows."""
        seen, new = cache.get_seq_length(), context_states.shape[1]
        bucket = self.bucket(seen)
        bucket.take(cache)
        # From pinned memory, and nobody waits.
        counts = torch.tensor([seen, new], pin_memory=self.counts.is_cuda)
        self.counts.copy_(counts, non_blocking=True)
        self.anchor_ids.copy_(anchor_ids)
        self.context_states[:, :new].copy_(context_states)
        self.context_states[:, new:].zero_()
        self.position_ids[:, : position_ids.shape[1]].copy_(position_ids)
        if bucket.run is None:
            bucket.run = self.prepare(bucket)
        tensors = bucket.run()
        bucket.show(cache, seen + new)
        return tensors

    def bucket(self, seen: int) -> Bucket:
        """The buffers for `seen` columns, a padded round of new ones, the spare one and the block."""
        length = max(SMALLEST_BUCKET, 1 << (seen + 2 * self.config.block_size).bit_length())
        if length not in self.buckets:
            shape = (self.rows, self.config.num_key_value_heads, length, self.config.head_dim)
            with torch.inference_mode(False):
                keys, values = (
                    tuple(torch.zeros(shape, **self.floats) for _ in range(self.config.num_hidden_layers))
                    for _ in range(2)
                )
            self.buckets[length] = Bucket(keys, values)
        return self.buckets[length]

    def prepare(self, bucket: Bucket) -> Callable[[], Tensors]:
        inputs = (self.counts, self.anchor_ids, self.context_states, self.position_ids, bucket.keys, bucket.values)
        draft = functools.partial(self.draft, *inputs)
        if self.mode == "cuda_graph":
            return record_graph(draft, self.counts.device, self.pool)
        draft = functools.partial(compiled(self.draft), *inputs)
        with torch._dynamo.config.patch(recompile_limit=MOST_SHAPES):
            draft()
        return draft


class Workspaces:
    """A model's workspaces that no call has at the moment. A copy of it, or a pickled one, starts anew."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.idle: list[Workspace] = []
        self.unavailable: set[str] = set()

    def __reduce__(self):
        return Workspaces, ()

    def lease(self, drafter: "DFlashModel", tables: TargetTables, rows: int, mode: str) -> Workspace:
        """A workspace for drafts of `rows` rows by these very weights, the caller's until it is given back."""
        lent = (tables.embedding, tables.output_head)
        weights = (p for module in (drafter, *lent) for p in module.parameters())
        state = tuple((p.data_ptr(), p._version) for p in weights)
        key = (mode, rows, lent, drafter.dtype, drafter.config.candidate_topk, state)
        with self.lock:
            for place, workspace in enumerate(self.idle):
                if workspace.key == key:
                    return self.idle.pop(place)
        return Workspace(key, drafter, tables, rows, mode)

    def give_back(self, workspace: Workspace) -> None:
        with self.lock:
            if workspace.mode not in self.unavailable:
                self.idle = [*self.idle, workspace][-LARGEST_COLLECTION:]


class DraftPass:
    """
    The whole drafts of one `generate` call, by a workspace that it leases from the model and gives back when it is
    closed or forgotten.

    Args:
        drafter ([`DFlashModel`]): or a model with a head on top.
        tables ([`TargetTables`]): of the target.
        mode (`str`): instead of what [`choose_mode`] makes of the drafter's config.
    """

    def __init__(self, drafter: "DFlashModel", tables: TargetTables, mode: str | None = None):
        self.drafter, self.tables = drafter, tables
        self.mode = choose_mode(mode or drafter.config.scoring, drafter.device)
        self.possible = self.mode != "eager" and can_be_one_pass(drafter, tables, self.mode)
        self.workspace: Workspace | None = None
        self.lease: weakref.finalize | None = None

    def serves(self, attention_mask: torch.Tensor | None, in_step: bool) -> bool:
        """Whether the next draft can be a whole one; else drafter and scores are computed one after the other.

        Args:
            attention_mask (`torch.Tensor`): of the draft, if any row has padding.
            in_step (`bool`): whether all rows take equally many tokens.
        """
        return (
            self.possible
            and self.mode not in self.drafter.workspaces.unavailable
            and attention_mask is None
            and in_step
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled(self.drafter.device.type)
        )

    def read_ahead(
        self, context_states: torch.Tensor, position_ids: torch.Tensor, cache: DFlashCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Has the cache take context rows until a block of them is left; returns that, and positions from there on."""
        drafter: Any = self.drafter
        extra = max(context_states.shape[1] - drafter.config.block_size, 0)
        if extra:
            context = drafter.hidden_norm(drafter.fc(context_states[:, :extra].to(drafter.device, drafter.dtype)))
            position_embeddings = drafter.rotary_emb(context, position_ids[:, :extra])
            for i, layer in enumerate(drafter.layers):
                cache.update(*layer.self_attn.keys_and_values(context, position_embeddings), i)
        return context_states[:, extra:], position_ids[:, extra:]

    def __call__(self, *inputs: Any) -> Tensors | None:
        """As [`Workspace.__call__`]; `None`, after one warning, where the mode cannot be had."""
        try:
            return self.leased(len(inputs[0]))(*inputs)
        except Exception as error:  # Whatever a compiler or a driver raises, the text must go on.
            logger.warning(f"Whole drafts by {self.mode!r} cannot be had here, so only scores may be: {error!r:.500}")
            self.drafter.workspaces.unavailable.add(self.mode)
            return None

    def leased(self, rows: int) -> Workspace:
        if self.workspace is None or self.workspace.rows != rows:
            self.close()
            workspaces = self.drafter.workspaces
            self.workspace = workspaces.lease(self.drafter, self.tables, rows, self.mode)
            # Transformers' loop tells nobody when it ends.
            self.lease = weakref.finalize(self, workspaces.give_back, self.workspace)
        return self.workspace

    def close(self) -> None:
        """Gives the workspace back."""
        if self.lease is not None:
            self.lease()


def can_be_one_pass(drafter: "DFlashModel", tables: TargetTables, mode: str) -> bool:
    """Whether a call's drafts can be whole ones as far as its models decide it; [`DraftPass.serves`] has the rest."""
    modules = [m for part in (drafter, tables.embedding, tables.output_head) for m in part.modules()]
    rope = (drafter.config.rope_parameters or {}).get("rope_type", "default")
    return (
        (mode != "cuda_graph" or drafter.device.type == "cuda")
        # Columns stay where they are.
        and drafter.config.context_window is None
        # Frequencies that follow the length of the text are asked for on the host.
        and rope not in ("dynamic", "longrope")
        # Nobody watches the modules or moves their weights.
        and not any(is_watched(module) for module in modules)
        and {p.device for module in modules for p in module.parameters(recurse=False)} == {drafter.device}
    )


__all__ = ["DraftPass", "StaticDraftCache", "Workspaces", "draft_tensors"]

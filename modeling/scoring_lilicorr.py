# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""The scoring pass of a draft: from the slots' logits to the walked lattice, in one of three modes.

| mode | what runs |
|---|---|
| `eager` | the reference, op by op |
| `compile` | `torch.compile` as one graph; its shapes do not depend on the length of the text |
| `cuda_graph` | a recorded CUDA graph, replayed with one launch |

All take the same tensors and give the same candidates and paths. Which one runs is the assistant's `config.scoring`,
or else the environment's `LILICORR_SCORING`, or else `cuda_graph` on a GPU and `eager` elsewhere. Where a
[`DraftPass`] serves, the mode computes the drafter and this pass as one.

Shapes: `b` batch, `S` slots, `K` candidates of a slot, `V` vocabulary, `M` hidden width, `H` head width, `E` factor
dimension.
"""

import functools
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.utils import logging

from .lattice_lilicorr import Lattice, candidate_pool, greedy_walk, lattice_scores
from .logits_lilicorr import is_watched


if TYPE_CHECKING:
    from .modeling_lilicorr import LiLiCorrHead
    from .target_lilicorr import TargetTables

logger = logging.get_logger(__name__)

MODES = ("eager", "compile", "cuda_graph")
# Passes a model keeps ready: every batch size and target has its own.
LARGEST_COLLECTION = 16
# The environment's choice of a mode, for assistants whose config leaves it open.
VARIABLE = "LILICORR_SCORING"

RECORDING = threading.Lock()

Embed = Callable[[torch.Tensor], torch.Tensor]
Tensors = tuple[torch.Tensor, ...]


class FoldedHead:
    """
    What inference computes of a [`LiLiCorrHead`]: the same scores from fewer products.

    The out and in heads are one matrix; of the fusion's three parts the anchor's is computed once a block, not once a
    candidate; the attention bias is looked up once. Made from a head's weights as they are.
    """

    def __init__(self, head: "LiLiCorrHead"):
        self.head = head
        width = head.out_head.in_features
        node, anchor, product = head.factor_input_proj.weight.split(width, dim=1)
        self.node_weight, self.anchor_weight = torch.cat([node, product], dim=1), anchor.contiguous()
        self.out_in_weight = torch.cat([head.out_head.weight, head.in_head.weight])
        self.out_in_bias = torch.cat([head.out_head.bias, head.in_head.bias])
        self.bias = head.slot_bias(head.config.num_slots, head.config.candidate_topk).to(node.dtype)

    def __call__(
        self,
        token_embeds: torch.Tensor,
        log_probs: torch.Tensor,
        pass_hidden: torch.Tensor,
        anchor_hidden: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As [`LiLiCorrHead.forward`], for whole blocks: `S` and `K` are the configured ones."""
        head = self.head
        nodes = head.node_inputs(token_embeds, log_probs, pass_hidden)
        shape = nodes.shape
        nodes = nodes.flatten(1, 2)
        for layer in head.layers:
            nodes = layer(nodes, self.bias)
        nodes = head.output_norm(nodes)
        anchor = head.anchor_state(anchor_hidden, None)
        share = F.linear(anchor, self.anchor_weight, head.factor_input_proj.bias).unsqueeze(1)
        pairs = torch.cat([nodes, nodes * anchor.unsqueeze(1)], dim=-1)
        fused = F.silu(F.linear(pairs, self.node_weight) + share)
        out, into = F.linear(fused, self.out_in_weight, self.out_in_bias).unflatten(1, shape[1:3]).chunk(2, dim=-1)
        return lattice_scores(
            head.anchor_out_head(anchor), out, into, scale=head.config.logit_scale, eps=head.config.vector_eps
        )


def can_be_folded(head: "LiLiCorrHead") -> bool:
    """Whether nobody else has a part in the head's products: no gradient, adapter, quantiser or hook."""
    linears = (head.factor_input_proj, head.out_head, head.in_head)
    return (
        not torch.is_grad_enabled()
        and not any(is_watched(module) for module in (head, *linears))
        and all(type(x) is nn.Linear and type(x.weight) is nn.Parameter for x in linears)
    )


def score_blocks(
    head: Callable, k: int, embed: Embed, logits: torch.Tensor, pass_hidden: torch.Tensor, anchor_hidden: torch.Tensor
) -> Tensors:
    """The pass itself: `Lattice`'s tensors, in its order, of slots whose logits are `[b, S, V]`.

    Args:
        head (`Callable`): a [`LiLiCorrHead`] or a [`FoldedHead`].
        k (`int`): candidates a slot.
        embed (`Callable`): the target's embedding.
        pass_hidden (`torch.Tensor` of shape `[b, S, M]`): the drafter's states of the slots.
        anchor_hidden (`torch.Tensor` of shape `[b, M]`): the projected context row before the anchor.
    """
    candidate_ids, log_probs = candidate_pool(logits, k)
    start, pair = head(
        embed(candidate_ids).to(pass_hidden), log_probs.to(pass_hidden.device), pass_hidden, anchor_hidden
    )
    return candidate_ids, log_probs, start, pair, greedy_walk(start, pair)


class ScoringPass:
    """
    [`score_blocks`] in any mode. What it keeps depends on weights and shapes alone, so threads share it; a copy of it,
    or a pickled one, starts anew.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.folded: tuple[Any, FoldedHead] | None = None
        self.passes: dict[Any, Callable[..., Tensors]] = {}
        self.unavailable: set[str] = set()

    def __reduce__(self):
        return ScoringPass, ()

    def __call__(
        self, head: "LiLiCorrHead", tables: "TargetTables", inputs: Tensors, mode: str | None = None
    ) -> Lattice:
        """The lattice of a draft, walked.

        Args:
            head ([`LiLiCorrHead`]): whose scores.
            tables ([`TargetTables`]): whose embedding.
            inputs (tuple of `torch.Tensor`): the last three of [`score_blocks`].
            mode (`str`): as [`choose_mode`] takes it. One that cannot be had here gives way to `eager`, with one
                warning that says why.
        """
        mode = choose_mode(mode, inputs[0].device)
        if mode == "eager" or mode in self.unavailable or torch.is_grad_enabled():
            return Lattice(*self.eager(head, tables)(*inputs))
        # The strides of a slice tell how long the text is, and a pass would be made for each.
        inputs = tuple(x.reshape(-1).view(x.shape) for x in inputs)
        try:
            return Lattice(*self.prepared(head, tables, inputs, mode)(*inputs))
        except Exception as error:  # Whatever a compiler or a driver raises, the text must go on.
            logger.warning(f"Scoring by {mode!r} cannot be had here and goes on by 'eager': {error!r:.500}")
            self.unavailable.add(mode)
            return Lattice(*self.eager(head, tables)(*inputs))

    def eager(self, head: "LiLiCorrHead", tables: "TargetTables") -> functools.partial[Tensors]:
        scores = self.fold(head) if can_be_folded(head) else head
        return functools.partial(score_blocks, scores, head.config.candidate_topk, tables.embed)

    def fold(self, head: "LiLiCorrHead") -> FoldedHead:
        """The [`FoldedHead`] of the head's present weights, made anew when one of them has changed or moved."""
        state = head.config.candidate_topk, *((p.data_ptr(), p._version) for p in head.parameters())
        kept = self.folded
        if kept is None or kept[0] != state:
            kept = self.folded = state, FoldedHead(head)
        return kept[1]

    def prepared(
        self, head: "LiLiCorrHead", tables: "TargetTables", inputs: Tensors, mode: str
    ) -> Callable[..., Tensors]:
        """The pass for these weights, this embedding and these shapes, compiled or recorded where it is new."""
        eager = self.eager(head, tables)
        key = (mode, eager.args[0], tables.embedding, *((x.shape, x.dtype, x.device) for x in inputs))
        with self.lock:
            if key not in self.passes:
                if len(self.passes) == LARGEST_COLLECTION:
                    self.passes.clear()
                self.passes[key] = compiled(eager) if mode == "compile" else RecordedGraph(eager, inputs)
            return self.passes[key]


def compiled(eager: functools.partial[Tensors]) -> Callable[..., Tensors]:
    # A breaking graph or a changing shape is an error rather than a slow surprise. Shapes are counted by function, and
    # all partial ones together would be one.
    return functools.partial(torch.compile(eager.func, fullgraph=True, dynamic=False), *eager.args, **eager.keywords)


class RecordedGraph:
    """A CUDA graph of a function of tensors of fixed shapes. Its results are copies, which later replays leave be."""

    def __init__(self, eager: Callable[..., Tensors], inputs: Tensors):
        self.inputs = tuple(x.clone() for x in inputs)
        self.lock = threading.Lock()
        self.replay = record_graph(functools.partial(eager, *self.inputs), inputs[0].device)

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        with self.lock:
            for buffer, x in zip(self.inputs, inputs, strict=True):
                buffer.copy_(x)
            return tuple(x.clone() for x in self.replay())


def record_graph(run: Callable[[], Tensors], device: torch.device, pool: Any = None) -> Callable[[], Tensors]:
    """Records `run` as a CUDA graph; what it reads and writes has to stay where it is.

    Args:
        pool: memory that it shares with other graphs, of which no two run at once.

    Returns:
        the replay, whose results the next one overwrites.
    """
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    # One at a time; what other threads do on their streams in the meantime is no part of the graph.
    with RECORDING, torch.cuda.device(device):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                expected = run()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            outputs = run()

    def replay() -> Tensors:
        graph.replay()
        return outputs

    for recorded, reference in zip(replay(), expected, strict=True):
        torch.testing.assert_close(recorded, reference, equal_nan=True)
    return replay


def choose_mode(mode: str | None, device: torch.device) -> str:
    """The mode asked for, by the caller or else by the environment; if nobody asks, what `device` is best served by.

    Raises:
        `ValueError`: for a mode that does not exist.
    """
    # On ZeroGPU every call is a process of its own, which would record for itself alone.
    lasts = device.type == "cuda" and not os.environ.get("SPACES_ZERO_GPU")
    mode = mode or os.environ.get(VARIABLE) or ("cuda_graph" if lasts else "eager")
    if mode not in MODES:
        raise ValueError(
            f"There is no scoring mode {mode!r} (config's `scoring` or ${VARIABLE}); take one of {MODES}."
        )
    return mode


__all__ = ["MODES", "FoldedHead", "ScoringPass", "score_blocks"]

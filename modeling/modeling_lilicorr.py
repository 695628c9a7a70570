# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""The LiLiCorr head and the drafter that carries it (LiLiCorr, arXiv 2608.20530).

Shapes: `b` batch, `N` blocks, `B` block size, `S = B - 1` slots, `K` candidates of a slot, `V` vocabulary, `M` hidden
width of drafter and target, `H` head width, `E` factor dimension.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from .configuration_lilicorr import LiLiCorrConfig
from .lattice_lilicorr import Lattice, candidate_features, lattice_scores
from .modeling_dflash import DFlashOutput
from .modeling_lattice import LatticeDraftModel
from .scoring_lilicorr import ScoringPass
from .target_lilicorr import TargetTables


class LatticeAttention(nn.Module):
    """Self-attention over all `S * K` candidates of a block, unmasked, with an additive bias."""

    def __init__(self, config: LiLiCorrConfig):
        super().__init__()
        width = config.head_hidden_size
        self.num_heads = config.head_num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, nodes: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Nodes `[N, S * K, H]` to nodes, given the bias `[heads, S * K, S * K]` of query rows for key columns."""
        n, length, width = nodes.shape
        qkv = F.linear(nodes, self.in_proj_weight, self.in_proj_bias)
        query, key, value = qkv.view(n, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.out_proj(output.transpose(1, 2).reshape(n, length, width))


class LatticeLayer(nn.Module):
    def __init__(self, config: LiLiCorrConfig):
        super().__init__()
        width = config.head_hidden_size
        inner = int(width * config.head_mlp_ratio)
        self.attn_norm = Qwen3RMSNorm(width, eps=config.rms_norm_eps)
        self.attn = LatticeAttention(config)
        self.mlp_norm = Qwen3RMSNorm(width, eps=config.rms_norm_eps)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.SiLU(), nn.Linear(inner, width))

    def forward(self, nodes: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        nodes = nodes + self.attn(self.attn_norm(nodes), bias)
        return nodes + self.mlp(self.mlp_norm(nodes))


class LiLiCorrHead(nn.Module):
    """
    Scores every pair of neighbouring candidates of a block in one pass (LiLiCorr, section 3.2).

    Each candidate becomes a node of the lattice, attends to all others, is fused with the state of the last verified
    token, and leaves as an out and an in vector; a pair's score is their scaled cosine.
    """

    def __init__(self, config: LiLiCorrConfig):
        super().__init__()
        self.config = config
        width, model_width, factor_dim = config.head_hidden_size, config.hidden_size, config.factor_dim
        self.token_proj = nn.Identity() if width == model_width else nn.Linear(model_width, width)
        self.pass_hidden_proj = nn.Linear(model_width, width)
        self.feature_mlp = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, width), nn.SiLU(), nn.Linear(width, width))
        self.slot_embedding = nn.Parameter(torch.empty(1, 1, config.num_slots, 1, width))
        self.rank_embedding = nn.Parameter(torch.empty(1, 1, 1, config.candidate_topk, width))
        self.relative_slot_bias = nn.Parameter(torch.empty(config.head_num_heads, 2 * config.block_size - 1))
        self.same_slot_bias = nn.Parameter(torch.empty(config.head_num_heads))
        self.layers = nn.ModuleList([LatticeLayer(config) for _ in range(config.head_num_layers)])
        self.output_norm = Qwen3RMSNorm(width, eps=config.rms_norm_eps)
        self.context_proj = nn.Linear(model_width, width)
        self.anchor_norm = Qwen3RMSNorm(width, eps=config.rms_norm_eps)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head = nn.Linear(width, factor_dim)
        self.in_head = nn.Linear(width, factor_dim)
        self.anchor_out_head = nn.Linear(width, factor_dim)

    def forward(
        self,
        token_embeds: torch.Tensor,
        log_probs: torch.Tensor,
        pass_hidden: torch.Tensor,
        anchor_hidden: torch.Tensor,
        anchor_valid: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            token_embeds (`torch.Tensor` of shape `[N, S, K, M]`): the target's embeddings of the candidates.
            log_probs (`torch.Tensor` of shape `[N, S, K]`): by descending probability, over the whole vocabulary.
            pass_hidden (`torch.Tensor` of shape `[N, S, M]`): the drafter's post-norm states of the slots.
            anchor_hidden (`torch.Tensor` of shape `[N, M]`): the projected context row before the anchor.
            anchor_valid (`torch.BoolTensor` of shape `[N]`): `False` where there is no such row; `None` for all valid.

        `N` blocks. `S` and `K` may be smaller than the configured ones.

        Returns:
            start scores `[N, K]` and pair scores `[N, S - 1, K, K]` of equation 1, in fp32.
        """
        nodes = self.attended_nodes(token_embeds, log_probs, pass_hidden)
        anchor = self.anchor_state(anchor_hidden, anchor_valid)
        fused = self.fuse(nodes, anchor)
        return lattice_scores(
            self.anchor_out_head(anchor),
            self.out_head(fused),
            self.in_head(fused),
            scale=self.config.logit_scale,
            eps=self.config.vector_eps,
        )

    def node_inputs(self, token_embeds, log_probs, pass_hidden) -> torch.Tensor:
        """The four terms of a node, summed: token, slot state, confidence, position; `[N, S, K, H]`."""
        num_slots, k = log_probs.shape[-2:]
        features = candidate_features(log_probs).to(token_embeds.dtype)
        return (
            self.token_proj(token_embeds)
            + self.pass_hidden_proj(pass_hidden).unsqueeze(-2)
            + self.feature_mlp(features)
            + self.slot_embedding[0, :, :num_slots]
            + self.rank_embedding[0, :, :, :k]
        )

    def attended_nodes(self, token_embeds, log_probs, pass_hidden) -> torch.Tensor:
        """Nodes `[N, S, K, H]` after the lattice attention."""
        nodes = self.node_inputs(token_embeds, log_probs, pass_hidden)
        _, num_slots, k, _ = nodes.shape
        bias = self.slot_bias(num_slots, k).to(nodes.dtype)
        nodes = nodes.flatten(1, 2)
        for layer in self.layers:
            nodes = layer(nodes, bias)
        return self.output_norm(nodes).unflatten(1, (num_slots, k))

    def slot_bias(self, num_slots: int, k: int) -> torch.Tensor:
        """Attention bias `[heads, S * K, S * K]`, shared by the layers, of a query's slot for a key's slot:
        `relative_slot_bias[query - key + B - 1]`, plus `same_slot_bias` within a slot."""
        slots = torch.arange(num_slots, device=self.same_slot_bias.device)
        distance = slots[:, None] - slots[None, :]
        bias = self.relative_slot_bias[:, distance + self.config.block_size - 1]
        bias = bias + self.same_slot_bias[:, None, None] * (distance == 0)
        return bias.repeat_interleave(k, dim=1).repeat_interleave(k, dim=2)

    def anchor_state(self, anchor_hidden: torch.Tensor, anchor_valid: torch.Tensor | None) -> torch.Tensor:
        """The verifier's view of the context, `[N, H]`; zero where the block has no context."""
        anchor = self.context_proj(anchor_hidden)
        if anchor_valid is not None:
            anchor = anchor.masked_fill(~anchor_valid.unsqueeze(-1), 0.0)
        return self.anchor_norm(anchor)

    def fuse(self, nodes: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        """Each node with the anchor state and their product, mapped back to the head's width; `[N, S, K, H]`."""
        anchor = anchor[:, None, None].expand_as(nodes)
        return F.silu(self.factor_input_proj(torch.cat([nodes, anchor, nodes * anchor], dim=-1)))


class LiLiCorrDraftModel(LatticeDraftModel):
    """
    A block drafter whose slots are chosen together: the head scores its candidates, a greedy walk commits them.

    Example:

    ```python
    >>> assistant = LiLiCorrDraftModel.from_pretrained(path)
    >>> target.generate(**inputs, assistant_model=assistant)
    ```
    """

    # Training calls the head on its own, so it has to be one unit of sharding, too.
    _no_split_modules = ["DFlashDecoderLayer", "LiLiCorrHead"]

    def __init__(self, config: LiLiCorrConfig):
        super().__init__(config)
        self.lilicorr = LiLiCorrHead(config)
        self.scoring = ScoringPass()
        self.post_init()

    def train(self, mode: bool = True) -> "LiLiCorrDraftModel":
        # Fused optimizers change weights without a trace, so what was prepared from them is made anew.
        self.scoring = ScoringPass()
        return super().train(mode)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, LatticeAttention):
            init.normal_(module.in_proj_weight, mean=0.0, std=self.config.initializer_range)
            init.zeros_(module.in_proj_bias)
        elif isinstance(module, LiLiCorrHead):
            tables = (module.slot_embedding, module.rank_embedding, module.relative_slot_bias, module.same_slot_bias)
            for table in tables:
                init.zeros_(table)

    def score(
        self, logits: torch.Tensor, output: DFlashOutput, anchor_ids: torch.Tensor, tables: TargetTables
    ) -> Lattice:
        if output.lattice is not None:
            return output.lattice
        inputs = logits, output.last_hidden_state[:, self.slot_rows], output.context_hidden_states[:, -1]
        return self.scoring(self.lilicorr, tables, inputs, self.config.scoring)

    def prepared_scoring(self, tables: TargetTables) -> Callable[..., tuple[torch.Tensor, ...]]:
        return self.scoring.eager(self.lilicorr, tables)


LiLiCorrDraftModel.register_for_auto_class("AutoModel")

__all__ = ["LiLiCorrDraftModel", "LiLiCorrHead"]

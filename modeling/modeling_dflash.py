# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""The DFlash block drafter, alone and as the base of every draft method with a head on top of it.

Shapes: `b` batch, `B` block size, `S = B - 1` slots, `V` vocabulary, `M` hidden width of drafter and target, `L`
tapped target layers, `c` new context rows.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.cache_utils import DFlashCache
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3PreTrainedModel, Qwen3RMSNorm, Qwen3RotaryEmbedding
from transformers.utils import ModelOutput

from .cache_lilicorr import CACHE
from .configuration_lilicorr import LiLiCorrConfig
from .convolution_lilicorr import BlockConvolution
from .decoding_lilicorr import BlockDecoder
from .draft_pass_lilicorr import DraftPass, Workspaces
from .generation_lilicorr import BlockCandidateGenerator
from .hook_lilicorr import install_hook_or_refuse
from .lattice_lilicorr import Lattice, processed_slots
from .layers_lilicorr import DFlashAttention, DFlashDecoderLayer
from .linears_lilicorr import PackedWeights
from .logits_lilicorr import DraftProduct
from .target_lilicorr import TargetTables, check_target, require_mask_token
from .tree_lilicorr import TreeShape, marginal_tree, steered_slots


DRAFTER_PREFIXES = ("fc.", "hidden_norm.", "layers.", "norm.")


@dataclass
class DFlashOutput(BaseModelOutputWithPast):
    """
    Args:
        last_hidden_state (`torch.Tensor` of shape `[b, B, M]`): post-norm; row 0, the anchor's, predicts nothing.
        context_hidden_states (`torch.Tensor` of shape `[b, c, M]`): the new context rows after `fc` and `hidden_norm`.
        lattice ([`Lattice`]): where the pass scored the slots' candidates, too.
    """

    last_hidden_state: torch.Tensor = None  # type: ignore[assignment]
    context_hidden_states: torch.Tensor = None  # type: ignore[assignment]
    lattice: Lattice | None = None


@dataclass
class DraftOutput(ModelOutput):
    """
    What every draft method proposes for one block; all that a decoding loop, a benchmark or a picture needs.

    Args:
        token_ids (`torch.LongTensor` of shape `[b, n]`): drafted tokens, `n` at most `S` but in a tree.
        parents (`torch.LongTensor` of shape `[b, n]`): index of each token's predecessor in a tree, which comes before
            it, and -1 for the anchor; `None` for a chain.
        log_probs (`torch.Tensor` of shape `[b, n]`): of a tree's tokens, see [`BestFirstTree`].
        proposal_logits (`torch.Tensor` of shape `[b, n, V]`): what the tokens were drawn from; `None` when the draft
            is a deterministic function of the prefix, in other words a point mass.
        lattice ([`Lattice`]): the candidates and scores the draft was chosen from, of methods that have them.
        finite (`torch.BoolTensor` of shape `[b]`): whether all scores of a row were finite; else the weights are bad.
    """

    token_ids: torch.Tensor
    parents: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    proposal_logits: torch.Tensor | None = None
    lattice: Lattice | None = None
    finite: torch.Tensor | None = None


class DFlashPreTrainedModel(Qwen3PreTrainedModel):
    config: LiLiCorrConfig
    config_class = LiLiCorrConfig
    main_input_name = "noise_embeds"
    model_tags = ["dflash", "draft-model", "lilicorr", "speculative-decoding"]
    _no_split_modules = ["DFlashDecoderLayer"]
    _can_record_outputs = {"hidden_states": DFlashDecoderLayer, "attentions": DFlashAttention}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, BlockConvolution):
            # At first the row itself passes, unchanged.
            init.zeros_(module.base_kernel)
            init.ones_(module.base_kernel[:, 0])
            init.zeros_(module.kernel_projection.weight)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, init_head: bool = False, **kwargs):
        """As [`PreTrainedModel.from_pretrained`], but a checkpoint that does not hold exactly this model raises.

        Args:
            init_head (`bool`): initialise the tensors of a head that the checkpoint does not have, to train one on a
                plain drafter. Drafter tensors must be there in any case.

        Raises:
            `ValueError`: naming the tensors that are missing, unexpected or of another shape; for damaged files.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        # Shapes that differ are collected here too, so that the error can name them.
        options = kwargs | {"output_loading_info": True, "ignore_mismatched_sizes": True}
        try:
            loaded: Any = super().from_pretrained(pretrained_model_name_or_path, *model_args, **options)
        except SafetensorError as error:
            raise ValueError(
                f"The weights in {str(pretrained_model_name_or_path)!r} are damaged or were only partly downloaded "
                f"({error}). Delete them and download again."
            ) from error
        model, info = loaded
        missing = sorted(key for key in info["missing_keys"] if not init_head or key.startswith(DRAFTER_PREFIXES))
        problems = {"missing": missing, "unexpected": info["unexpected_keys"], "misshapen": info["mismatched_keys"]}
        found = ", ".join(f"{what} tensors {sorted(keys)}" for what, keys in problems.items() if keys)
        if found:
            raise ValueError(
                f"{str(pretrained_model_name_or_path)!r} is not a {cls.__name__} checkpoint: {found}. A plain drafter "
                "loads as `DFlashModel`, or with `init_head=True` to train a head on it, as `lilicorr train "
                "--drafter` does; `lilicorr convert` knows the names that other engines give to tensors."
            )
        return (model, info) if wants_info else model


class DFlashModel(DFlashPreTrainedModel):
    """
    The block drafter: predicts all slots of a block in one pass, each on its own (DFlash, arXiv 2602.06036).

    It owns no embedding and no output head; [`TargetTables`] lends it the target's. It keeps no state of a request, so
    threads may share it.
    """

    has_head = False
    # Whether `choose_tree` is there to be called.
    drafts_trees = True
    # Rows of the block that predict the drafts; the anchor's predicts nothing here.
    slot_rows = slice(1, None)

    @property
    def num_drafted(self) -> int:
        """Most tokens of one draft."""
        return self.config.num_slots

    # The drafter of a checkpoint that also holds a head may be loaded alone.
    _keys_to_ignore_on_load_unexpected = [r"^(model\.)?(lilicorr|candidate_selector)\."]

    def __init__(self, config: LiLiCorrConfig):
        super().__init__(config)
        self.mask_token_id = require_mask_token(config)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.target_layer_ids) * width, width, bias=False)
        self.hidden_norm = Qwen3RMSNorm(width, eps=eps)
        self.layers = nn.ModuleList([DFlashDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(width, eps=eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.draft_product = DraftProduct()
        self.packed_weights = PackedWeights()
        self.workspaces = Workspaces()
        self.post_init()

    def train(self, mode: bool = True):
        # Fused optimizers change weights without a trace, so what was prepared from them is made anew.
        self.workspaces = Workspaces()
        return super().train(mode)

    def get_input_embeddings(self) -> None:  # type: ignore[override]
        """None: the target lends its own. FSDP asks."""

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: DFlashCache | None = None,
        block_size: int | None = None,
        **kwargs,
    ) -> DFlashOutput:
        r"""
        Signature of transformers' own DFlash assistants, so that `speculation_type="dflash"` can run this drafter too.

        Args:
            noise_embeds (`torch.Tensor` of shape `[b, B, M]`): the target's embeddings of the anchor and the masks. In
                training, several packed blocks.
            context_hidden_states (`torch.Tensor` of shape `[b, c, L * M]`):
                the tapped target states of the context rows the cache does not hold yet.
            attention_mask (`torch.Tensor`): 2-D over cache, context rows and block (0 at padding), or 4-D as is.
            position_ids (`torch.LongTensor` of shape `[b, c + B]`): of the context rows and the block.
            cache ([`DFlashCache`]): keys and values of earlier context rows; receives the new rows and the block.
            block_size (`int`): rows of a packed block, if they are not the configured ones.
        """
        cache = kwargs.get(CACHE, cache)
        context = self.hidden_norm(self.fc(context_hidden_states))
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            rows = context.shape[1] + noise_embeds.shape[1]
            position_ids = torch.arange(seen, seen + rows, device=noise_embeds.device).unsqueeze(0)
        attention_mask = create_bidirectional_mask(
            config=self.config, inputs_embeds=noise_embeds, attention_mask=attention_mask, **{CACHE: cache}
        )
        position_embeddings = self.rotary_emb(noise_embeds, position_ids)

        hidden_states = noise_embeds
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                context_hidden_states=context,
                attention_mask=attention_mask,
                position_embeddings=position_embeddings,
                cache=cache,
                block_size=block_size,
            )
        return DFlashOutput(self.norm(hidden_states), context_hidden_states=context, **{CACHE: cache})

    def draft(
        self,
        context_states: torch.Tensor,
        anchor_ids: torch.Tensor,
        position_ids: torch.Tensor,
        cache: DFlashCache,
        tables: TargetTables,
        attention_mask: torch.Tensor | None = None,
        process: Callable[..., torch.Tensor] | None = None,
        temperature: float | None = None,
        tree: TreeShape | None = None,
        draft_pass: DraftPass | None = None,
    ) -> DraftOutput:
        """Proposes one block; the cache takes the context rows and gives up the block's own.

        Args:
            context_states (`torch.Tensor` of shape `[b, c, L * M]`): tapped states of the newly verified positions.
            anchor_ids (`torch.LongTensor` of shape `[b, 1]`): the last token; the target has not read it yet.
            position_ids (`torch.LongTensor` of shape `[b, c + B]`): of the context rows and the block.
            cache ([`DFlashCache`]): this request's.
            tables ([`TargetTables`]): embedding and output head of the target.
            attention_mask (`torch.Tensor` of shape `[b, cached + c + B]`): 0 at padding.
            process (`Callable`): logits processors along the draft, from ids drafted so far `[b, s]` and the logits
                `[b, V]` of slot `s` to processed logits. The draft ends where they leave any row nothing to choose.
            temperature (`float`): draw the draft at this temperature, where the method can; `None` for its best draft.
            tree ([`TreeShape`]): draft a tree of this size instead of a chain.
            draft_pass ([`DraftPass`]): computes it all at once, as far as that can be had; there is no mask then.
        """
        tensors = None
        if draft_pass is not None:
            context_states, position_ids = draft_pass.read_ahead(context_states, position_ids, cache)
            tensors = draft_pass(context_states, anchor_ids, position_ids, cache)
        if tensors is None:
            logits, output = self.predict(context_states, anchor_ids, position_ids, cache, tables, attention_mask)
        else:
            logits, states, context, *scored = tensors
            lattice = Lattice(*(x.clone() for x in scored)) if scored else None
            output = DFlashOutput(states, context_hidden_states=context, lattice=lattice)
        if tree is not None:
            return self.choose_tree(logits, output, anchor_ids, tables, tree, process)
        return self.choose(logits, output, anchor_ids, tables, process, temperature)

    def block_ids(self, anchor_ids: torch.Tensor) -> torch.Tensor:
        """What the drafter reads of a block `[b, B]`: the anchors `[b, 1]`, then masks."""
        return F.pad(anchor_ids, (0, self.config.block_size - 1), value=self.mask_token_id)

    def predict(
        self,
        context_states: torch.Tensor,
        anchor_ids: torch.Tensor,
        position_ids: torch.Tensor,
        cache: DFlashCache,
        tables: TargetTables,
        attention_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, DFlashOutput]:
        """The slots' logits `[b, S, V]` and the drafter's output; arguments as in [`DFlashModel.draft`]."""
        noise_embeds = tables.embed(self.block_ids(anchor_ids))
        cache.set_previous_accepted_tokens(context_states.shape[1])
        output = self(
            noise_embeds=noise_embeds.to(self.device, self.dtype),
            context_hidden_states=context_states.to(self.device, self.dtype),
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
        )
        cache.crop(-self.config.block_size)
        # The anchor's row is dropped only now: a product of B rows is faster than one of B - 1, twice as fast on CPUs.
        return tables.logits(output.last_hidden_state, self.draft_product)[:, self.slot_rows], output

    def prepared_scoring(self, tables: TargetTables) -> Callable[..., tuple[torch.Tensor, ...]]:
        """What a [`DraftPass`] is to compute beyond the slots' logits: the scored and walked `Lattice`, if any.

        From logits `[b, S, V]`, states of the slots `[b, S, M]` and the context row before the anchor `[b, M]`.
        """
        return lambda *inputs: ()

    def choose(
        self,
        logits: torch.Tensor,
        output: DFlashOutput,
        anchor_ids: torch.Tensor,
        tables: TargetTables,
        process: Callable[..., torch.Tensor] | None = None,
        temperature: float | None = None,
    ) -> DraftOutput:
        """Commits a token to each slot given the slots' logits `[b, S, V]`: here its most probable one, always.

        Other arguments as in [`DFlashModel.draft`], which calls it.
        """
        best = logits.max(dim=-1)
        finite = best.values.isfinite().all(dim=-1)
        if process is None:
            return DraftOutput(token_ids=best.indices, finite=finite)
        return DraftOutput(token_ids=processed_slots(logits, process).argmax(dim=-1), finite=finite)

    def choose_tree(
        self,
        logits: torch.Tensor,
        output: DFlashOutput,
        anchor_ids: torch.Tensor,
        tables: TargetTables,
        shape: TreeShape,
        process: Callable[..., torch.Tensor] | None = None,
    ) -> DraftOutput:
        """A tree over the slots' candidates instead of one token each: here DDTree, as slots do not know each other.

        Processors act on a slot as after the most probable tokens of the slots before it, on whichever path.
        """
        finite = logits.amax(dim=-1).isfinite().all(dim=-1)
        tree = marginal_tree(steered_slots(logits, shape, process), shape.nodes)
        return DraftOutput(**tree._asdict(), finite=finite)

    def check_target(self, target: PreTrainedModel) -> None:
        """Raises `ValueError` before any compute if this drafter cannot draft for `target`; see [`check_target`]."""
        check_target(self.config, target)

    def get_candidate_generator(self, target: PreTrainedModel, **kwargs) -> BlockCandidateGenerator:
        """The [`BlockCandidateGenerator`] of one `generate` call in transformers' own loop; the hook asks for it."""
        return BlockCandidateGenerator(self, target, **kwargs)

    def decode_blocks(self, target: PreTrainedModel, input_ids: torch.Tensor, **kwargs):
        """The decoding loop of one `target.generate` call, see [`BlockDecoder`]; the generation hook calls it."""
        decoder = BlockDecoder(self, target, input_ids, **kwargs)
        with closing(decoder.drafting.draft_pass):
            return decoder.decode()


install_hook_or_refuse()
# Checkpoints carry these files, so that they load where the package is not installed.
DFlashModel.register_for_auto_class("AutoModel")

__all__ = ["DFlashModel", "DFlashOutput", "DFlashPreTrainedModel", "DraftOutput"]

"""One checkpoint decoded in other ways than the usual, without retraining.

Shapes: `B` block size, `S = B - 1` slots, `K` candidates.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError

from lilicorr_hf.modeling.configuration_lilicorr import LiLiCorrConfig
from lilicorr_hf.modeling.lattice_lilicorr import viterbi_path
from lilicorr_hf.modeling.modeling_dflash import DFlashModel, DraftOutput
from lilicorr_hf.modeling.modeling_lilicorr import LiLiCorrDraftModel
from lilicorr_hf.pairs import draft_dtype, resolve_assistant


if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ViterbiDraftModel(LiLiCorrDraftModel):
    """Commits the path with the greatest sum of scores instead of the greedy walk (appendix E)."""

    def choose(self, logits, output, anchor_ids, tables, process=None, temperature=None) -> DraftOutput:
        if process is not None or temperature is not None:
            raise ValueError("The exact path is defined without logits processors and without sampled drafts alone.")
        draft = super().choose(logits, output, anchor_ids, tables)
        lattice: Any = draft.lattice
        lattice.walk = viterbi_path(lattice.start_scores, lattice.pair_scores)
        draft.token_ids = lattice.candidate_ids.gather(-1, lattice.walk.unsqueeze(-1)).squeeze(-1)
        return draft


class StockLoopModel(LiLiCorrDraftModel):
    """Decoded by transformers' own assisted loop, as inside [`stock_loop`]."""

    decode_blocks = None  # type: ignore[assignment]


WALKS: dict[str, type[DFlashModel]] = {"greedy": LiLiCorrDraftModel, "viterbi": ViterbiDraftModel}
# Fields of a config that say how the same weights decode.
SERVING_FIELDS = (
    "adaptive_draft",
    "context_window",
    "logit_scale",
    "sampled_walk",
    "scoring",
    "tree_budget",
    "tree_weight",
)


def load_variant(
    assistant: str,
    target: "PreTrainedModel",
    model_class: type[DFlashModel],
    k: int | None = None,
    block: int | None = None,
    yarn: int | None = None,
    longest: int = 0,
    dtype: torch.dtype | None = None,
    **fields: Any,
) -> DFlashModel:
    """A checkpoint as it is, or decoded otherwise.

    Args:
        assistant (`str`): a shipped pair's name, a path or a Hub id.
        target (`PreTrainedModel`): the model it will draft for.
        model_class (`type`): what decodes it.
        k (`int`): candidates per slot, at most those it was trained with.
        block (`int`): block size, at most that it was trained with.
        yarn (`int`): positions it was trained on; beyond them its rotations are stretched to `longest`.
        dtype (`torch.dtype`): by default [`draft_dtype`].
        fields: of its config, among [`SERVING_FIELDS`].

    Raises:
        `ValueError`: for a `k`, `block` or value there is not.
    """
    folder = resolve_assistant(assistant)
    config = LiLiCorrConfig.from_pretrained(folder)
    if yarn is not None:
        fields["rope_parameters"] = yarn_parameters(config, yarn, longest)
    try:
        config = LiLiCorrConfig.from_dict(config.to_dict() | fields)
    except StrictDataclassError as error:
        raise ValueError(f"{fields} does not fit {assistant}: {error}") from error
    model = model_class.from_pretrained(
        folder, config=config, dtype=dtype or draft_dtype(target), device_map=target.device
    )
    model.check_target(target)
    if block is not None:
        model = shorten_block(model, block)
    if k is not None:
        if not 1 <= k <= config.candidate_topk:
            raise ValueError(f"`k` must lie in [1, {config.candidate_topk}], the candidates of {assistant}; got {k}.")
        model.config.candidate_topk = k
    return model


def yarn_parameters(config: LiLiCorrConfig, trained: int, longest: int) -> dict[str, Any]:
    """`rope_parameters` with YaRN (arXiv 2309.00071) for sequences of `longest` positions; as they are if they fit.

    Args:
        config ([`LiLiCorrConfig`]): whose rotary base is kept.
        trained (`int`): positions the drafter was trained on.
        longest (`int`): positions it will see; the factor is the whole number that reaches them.
    """
    rope: dict[str, Any] = dict(config.rope_parameters)  # type: ignore[arg-type]
    factor = math.ceil(longest / trained)
    if factor <= 1:
        return rope
    return {
        "rope_type": "yarn",
        "rope_theta": rope["rope_theta"],
        "factor": float(factor),
        "original_max_position_embeddings": trained,
    }


@torch.no_grad()
def shorten_block(model: DFlashModel, block: int) -> DFlashModel:
    """The same weights drafting blocks of `block` positions; tables of slots and distances keep their nearest entries.

    Raises:
        `ValueError`: for a block shorter than 2 or longer than the trained one.
    """
    trained = model.config.block_size
    if not 2 <= block <= trained:
        raise ValueError(f"`block` must lie in [2, {trained}], the trained block size; got {block}.")
    tensors = model.state_dict()
    for name, value in tensors.items():
        if name.endswith("slot_embedding"):
            tensors[name] = value[:, :, : block - 1]
        elif name.endswith("relative_slot_bias"):
            tensors[name] = value[:, trained - block : trained + block - 1]
    config = LiLiCorrConfig.from_dict(model.config.to_dict() | {"block_size": block})
    config._attn_implementation = model.config._attn_implementation
    short: Any = type(model)(config)
    short.to(model.device, model.dtype).eval()
    short.load_state_dict(tensors)
    return short

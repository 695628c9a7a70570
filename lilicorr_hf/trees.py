"""How much a tree should trust the drafter beside the head: fitted on answers of the target."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch

from .doctor import Answer, block_anchors, draft_at
from .modeling.lattice_lilicorr import Lattice
from .modeling.target_lilicorr import TargetTables
from .modeling.tree_lilicorr import lattice_tree
from .modeling.tree_pass_lilicorr import DraftTree


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .modeling.modeling_lilicorr import LiLiCorrDraftModel

WEIGHTS = tuple(i / 10 for i in range(11))
# Blocks drafted at once.
CHUNK = 32


@torch.no_grad()
def tau_by_weight(
    model: "PreTrainedModel",
    assistant: "LiLiCorrDraftModel",
    answers: Sequence[Answer],
    tree_budget: int,
    weights: Sequence[float] = WEIGHTS,
) -> dict[float, float]:
    """Acceptance length of greedy decoding with trees for each `tree_weight`, from one draft at every token.

    The text does not depend on the draft, so what a weight would accept, and where its next block would begin, can be
    read off the answers; the target does no more work. The last block of an answer, which it cuts, is left out.

    Args:
        model (`PreTrainedModel`): the target.
        assistant ([`LiLiCorrDraftModel`]): drafts.
        answers (sequence of [`Answer`]): of prompts that nothing was trained on; see [`read_answers`].
        tree_budget (`int`): tokens of a tree.
        weights (sequence of `float`): to try; at 1 the head is left out, which is DDTree.

    Raises:
        `ValueError`: if no answer is long enough for a block.
    """
    accepted: dict[float, list[int]] = {weight: [] for weight in weights}
    tables = TargetTables(model)
    for answer in answers:
        anchors = block_anchors(assistant, answer)
        reach: dict[float, list[int]] = {weight: [] for weight in weights}
        for start in range(0, len(anchors), CHUNK):
            blocks = draft_at(assistant, tables, answer, anchors[start : start + CHUNK])
            lattice = cast(Lattice, blocks.draft.lattice)
            for weight in weights:
                tree = lattice_tree(lattice, blocks.logits, tree_budget, weight)
                reach[weight] += DraftTree(tree.token_ids, tree.parents).reach(blocks.truth).tolist()
        for weight in weights:
            accepted[weight] += block_by_block(reach[weight])
    if not any(accepted.values()):
        raise ValueError(f"No answer is as long as a block of {assistant.config.block_size} tokens.")
    return {weight: 1 + sum(counts) / len(counts) for weight, counts in accepted.items()}


def block_by_block(reach: Sequence[int]) -> list[int]:
    """Accepted tokens of the blocks of an answer, given how many would be accepted after each of its tokens."""
    accepted, at = [], 0
    while at < len(reach):
        accepted.append(reach[at])
        at += reach[at] + 1
    return accepted

"""A tiny target and assistant: random weights, seconds of CPU."""

import random

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen3Config,
)

from lilicorr_hf import DFlashModel, DraftOutput, LiLiCorrConfig, LiLiCorrDraftModel
from lilicorr_hf.modeling.tree_lilicorr import TreeShape


CONFIGS = {
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "mixtral": MixtralConfig,
    "qwen3": Qwen3Config,
}
# What a family has besides the fields all share.
FAMILY_FIELDS = {
    "gemma2": {"query_pre_attn_scalar": 8, "sliding_window": 8, "final_logit_softcapping": 3.0},
    "gemma3": {"query_pre_attn_scalar": 8, "sliding_window": 8, "layer_types": None},
    "mistral": {"sliding_window": 8},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
}


def tiny_config(**changes) -> LiLiCorrConfig:
    """A drafter and head of a few thousand parameters, for a target of 4 layers, width 32 and 64 tokens."""
    fields = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "block_size": 5,
        # Chains, unless a test is about trees.
        "tree_budget": 0,
        "mask_token_id": 63,
        "target_layer_ids": [0, 2],
        "num_target_layers": 4,
        "candidate_topk": 3,
        "head_hidden_size": 16,
        "head_num_layers": 2,
        "head_num_heads": 2,
        "factor_dim": 12,
    }
    return LiLiCorrConfig(**(fields | changes))


def tiny_target(family: str, seed: int = 0, **changes) -> PreTrainedModel:
    """A random target in float64, so that one pass over a block and single steps choose the same tokens."""
    fields = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": 0,
        # Wide enough that greedy text does not fall into a loop at once.
        "initializer_range": 0.5,
    }
    fields |= FAMILY_FIELDS.get(family, {})
    torch.manual_seed(seed)
    target = AutoModelForCausalLM.from_config(CONFIGS[family](**(fields | changes))).double().eval()
    if family == "mixtral":
        # Products over groups of experts have no fp64 kernel.
        target.set_experts_implementation("eager")
    return target


def tiny_assistant(seed: int = 0, model_class: type[DFlashModel] = LiLiCorrDraftModel, **changes) -> DFlashModel:
    torch.manual_seed(seed)
    return model_class(tiny_config(**changes)).eval()


def plant(output: DraftOutput, tree: TreeShape | None) -> DraftOutput:
    """Hides the drafted chain in a random tree, if one is asked for, its tokens among those of other paths."""
    if tree is None:
        return output
    rows = [random_tree(chain, tree, random.Random(str(chain))) for chain in output.token_ids.tolist()]
    output.token_ids, output.parents = (torch.tensor(part) for part in zip(*rows, strict=True))
    return output


def random_tree(chain: list[int], tree: TreeShape, rng: random.Random) -> tuple[list[int], list[int]]:
    tokens, parents, depths = [], [], {-1: 0}
    chain, trunk = chain[: min(tree)], -1
    for node in range(tree.nodes):
        if chain and (tree.nodes - node <= len(chain) or rng.random() < 0.5):
            token, parent, trunk = chain.pop(0), trunk, node
        else:
            token, parent = rng.randrange(64), rng.choice([i for i, depth in depths.items() if depth < tree.depth])
        depths[node] = depths[parent] + 1
        tokens.append(token)
        parents.append(parent)
    return tokens, parents


class Oracle(LiLiCorrDraftModel):
    """Runs the real drafter, then proposes tokens computed from the target's own continuation."""

    answer: torch.Tensor
    shift = 0

    def draft(self, context_states, anchor_ids, position_ids, cache, tables, tree=None, **kwargs) -> DraftOutput:
        output = super().draft(context_states, anchor_ids, position_ids, cache, tables, **kwargs)
        first = position_ids[0, -self.config.block_size].item() + 1
        known = self.answer[:, first : first + self.config.num_slots]
        output.token_ids = (known + self.shift).expand(len(anchor_ids), -1) % self.config.vocab_size
        return plant(output, tree)


class FaultyOracle(LiLiCorrDraftModel):
    """Knows the answers of a batch's rows, without padding, and errs at a random slot of most blocks."""

    answers: list[list[int]]

    def draft(self, context_states, anchor_ids, position_ids, cache, tables, tree=None, **kwargs) -> DraftOutput:
        output = super().draft(context_states, anchor_ids, position_ids, cache, tables, **kwargs)
        output.token_ids = output.token_ids.clone()
        for row, anchor in enumerate(anchor_ids[:, 0].tolist()):
            at = int(position_ids[row, -self.config.block_size])
            slot = random.Random(64 * at + anchor).randint(0, self.config.block_size)
            # Which row this is: the answer that has the anchor at its position.
            for answer in self.answers:
                if answer[at : at + 1] == anchor_ids[row].tolist():
                    known = torch.tensor(answer[at + 1 : at + 1 + output.token_ids.shape[1]], dtype=torch.long)
                    output.token_ids[row, : len(known)] = known
            if slot < output.token_ids.shape[1]:
                output.token_ids[row, slot] = (output.token_ids[row, slot] + 1) % self.config.vocab_size
        return plant(output, tree)


class AntiOracle(Oracle):
    """Never right."""

    shift = 1

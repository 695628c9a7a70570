"""A tiny target and assistant: random weights, seconds of CPU."""

from lilicorr_hf import LiLiCorrConfig


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

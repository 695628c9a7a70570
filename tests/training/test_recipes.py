"""The recipes that come with the package, built without weights and without a network."""

import pytest
import torch
import yaml
from transformers import LlamaConfig, Qwen3Config

from lilicorr_hf import LiLiCorrDraftModel
from lilicorr_hf.modeling.modeling_dflash import DRAFTER_PREFIXES
from lilicorr_hf.training import train


SHAPES = {"vocab_size": 151936, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
SHAPES |= {"head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6}
SHAPES |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}
SMOLLM2 = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
SMOLLM2 |= {"num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5}
TARGETS = {
    "qwen3-8b": Qwen3Config(**SHAPES, hidden_size=4096, intermediate_size=12288),
    "qwen3-4b": Qwen3Config(**SHAPES, hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True),
    "smollm2-135m-cpu": LlamaConfig(**SMOLLM2, tie_word_embeddings=True),
    "smollm2-135m-gpu": LlamaConfig(**SMOLLM2, tie_word_embeddings=True),
}


def read(name):
    return train.parse_arguments(["--config", name])


def build(name):
    model_args, _, _ = read(name)
    with torch.device("meta"):
        return LiLiCorrDraftModel(train.new_config(model_args, TARGETS[name]))


def drafter_size(layers, width, inner, heads, kv_heads, head_dim):
    """`fc` of one tap per layer, two norms around the stack, and Qwen3 layers."""
    attention = 2 * width * heads * head_dim + 2 * width * kv_heads * head_dim + 2 * head_dim
    return layers * width * width + 2 * width + layers * (attention + 3 * width * inner + 2 * width)


def test_every_recipe_is_tested():
    assert {path.stem for path in train.CONFIGS.glob("*.yaml")} == set(TARGETS)


@pytest.mark.parametrize(
    "name, head, drafter",
    [
        ("qwen3-8b", 36_758_794, drafter_size(5, 4096, 12288, 32, 8, 128)),
        ("qwen3-4b", 32_040_202, drafter_size(5, 2560, 9728, 32, 8, 128)),
        ("smollm2-135m-cpu", None, drafter_size(3, 576, 1536, 9, 3, 64)),
        ("smollm2-135m-gpu", None, drafter_size(3, 576, 1536, 9, 3, 64)),
    ],
)
def test_parameter_counts(name, head, drafter):
    """The paper's 36.76M and 32.04M of the head, and the drafter's from its geometry."""
    counts = {True: 0, False: 0}
    for parameter_name, parameter in build(name).named_parameters():
        assert parameter.is_meta
        counts[parameter_name.startswith(DRAFTER_PREFIXES)] += parameter.numel()
    assert counts[True] == drafter
    assert head is None or counts[False] == head


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-4b"])
def test_qwen3_recipes_equal_table_4(name):
    model_args, data_args, args = read(name)
    config = train.new_config(model_args, TARGETS[name])
    assert (config.block_size, config.num_slots, config.candidate_topk, config.factor_dim) == (16, 15, 8, 1024)
    assert (config.logit_scale, config.head_num_layers, config.num_hidden_layers) == (8.0, 2, 5)
    assert (config.head_hidden_size, config.head_num_heads, config.head_mlp_ratio) == (1024, 8, 2)
    assert (config.mask_token_id, config.target_layer_ids) == (151669, [1, 9, 17, 25, 33])
    assert config.rope_parameters["rope_theta"] == 1_000_000.0
    objective = args.objective
    assert (objective.slot_weights, objective.beta, objective.hinge) == ("decay", 7, 0)
    assert (objective.cross_entropy, objective.distractor) == (0.25, 0.25 * 1.0)
    assert (args.learning_rate, args.weight_decay) == (6e-4, 0)
    assert (args.head_learning_rate, args.head_weight_decay) == (1.5e-4, 0.01)
    assert (args.lr_scheduler_type, args.warmup_steps, args.max_grad_norm) == ("cosine", 0.04, 1.0)
    assert (args.optim, args.num_train_epochs, args.max_anchors, data_args.max_length) == ("adamw_torch", 6, 512, 3072)
    assert args.bf16 and not model_args.warm_start
    processes = yaml.safe_load((train.CONFIGS / "accelerate" / "ddp.yaml").read_text())["num_processes"]
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps * processes == 64


def test_the_targets_of_the_qwen3_recipes_differ_in_name_alone():
    texts = [(train.CONFIGS / f"qwen3-{size}.yaml").read_text() for size in ("8b", "4b")]
    assert texts[0].replace("8B", "4B").replace("8b", "4b") == texts[1]

"""What a step holds in memory: of the size that large targets train with, counted on tensors without storage, and of
tiny ones, counted on real tensors."""

import pytest
import torch
from memory import LiveBytes
from tiny import tiny_assistant, tiny_target
from torch._subclasses import FakeTensorMode
from transformers import AutoModelForCausalLM, Qwen3Config

from lilicorr_hf import LiLiCorrConfig, LiLiCorrDraftModel
from lilicorr_hf.modeling.target_lilicorr import TargetTables
from lilicorr_hf.training.objective import training_loss
from lilicorr_hf.training.step import Objective, TrainingBatch


def batch_of(tables, length, num_blocks, num_taps, dtype=torch.float32) -> TrainingBatch:
    """One row, supervised everywhere."""
    width = tables.embedding.embedding_dim
    return TrainingBatch(
        input_ids=torch.randint(0, tables.config.vocab_size, (1, length)),
        loss_mask=torch.ones(1, length),
        position_ids=torch.arange(length).unsqueeze(0),
        anchors=torch.randint(0, length, (1, num_blocks)),
        keep=torch.ones(1, num_blocks, dtype=torch.bool),
        target_states=torch.randn(1, length, num_taps * width, dtype=dtype),
        final_states=torch.randn(1, length, width, dtype=dtype),
    )


@pytest.mark.parametrize("chunk_size, fits", [(1024, True), (512 * 15, False)])
def test_step_for_qwen3_8b_fits_into_40_gb(chunk_size, fits):
    """512 blocks of 16 over 3072 tokens, vocabulary of 151,936, five drafter layers, head of 1024, fp32 weights under
    bf16 autocast with gradients and AdamW's state, the target's embedding and output head; without its layers.

    The dense mask makes it an upper bound of what flex attention needs.
    """
    layer = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}
    shapes = layer | {"vocab_size": 151936, "head_dim": 128}
    taps = [1, 9, 17, 25, 33]
    with FakeTensorMode():
        qwen3 = Qwen3Config(**shapes, num_hidden_layers=36, tie_word_embeddings=False)
        # Its layers have no part in this.
        qwen3.num_hidden_layers = 0
        target = AutoModelForCausalLM.from_config(qwen3, dtype=torch.bfloat16).requires_grad_(False)
        config = LiLiCorrConfig(**shapes, mask_token_id=151669, target_layer_ids=taps, num_target_layers=36)
        model = LiLiCorrDraftModel(config).train()
        assert (config.num_hidden_layers, config.block_size, config.head_hidden_size) == (5, 16, 1024)
        tables = TargetTables(target)
        batch = batch_of(tables, 3072, 512, len(taps), torch.bfloat16)
        weights = list(model.parameters())
        moments = [torch.empty_like(p) for p in weights for _ in range(2)]
        with LiveBytes(*weights, *moments, *target.parameters(), batch.target_states) as live:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                step = training_loss(model, tables, batch, Objective.with_margin(), chunk_size)
            step.loss.backward()
    assert (live.peak < 40e9) == fits, f"{live.peak / 1e9:.1f} GB"


def test_memory_of_logits_does_not_grow_with_the_slots():
    """Beyond a chunk; the states of drafter and lattices are smaller than 32 x 16384 logits here."""
    target = tiny_target("llama", vocab_size=16384).float().requires_grad_(False)
    tables, model = TargetTables(target), tiny_assistant(vocab_size=16384).train()
    chunk, largest, peaks = 32 * 16384 * 4, [], []
    for num_blocks in (16, 64):
        torch.manual_seed(0)
        batch = batch_of(tables, 40, num_blocks, 2)
        with LiveBytes() as live:
            training_loss(model, tables, batch, Objective(), chunk_size=32).loss.backward()
        largest.append(live.largest)
        peaks.append(live.peak)
        model.zero_grad()
    assert largest == [chunk, chunk]
    assert peaks[1] - peaks[0] < 2 * chunk, "six chunks more"

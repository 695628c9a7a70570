# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""What a training run is told, beyond what transformers' `TrainingArguments` already says."""

import sys
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import TrainingArguments

from .options import changed, fast_dtype, option
from .step import Objective, SlotWeights


@dataclass
class ModelArguments:
    """The pair: a target and the drafter to train for it. The geometry is that of what is new: both, or the head."""

    target: str = option("smollm2-135m", "A name `lilicorr fetch-target` knows, a path or a Hub id.")
    assistant: str | None = option(None, "Checkpoint to go on from.")
    drafter: str | None = option(None, "Checkpoint whose drafter to go on from, under a new head.")
    method: Literal["lilicorr", "dflash", "domino", "dspark", "dflash2"] = option(
        "lilicorr", "The head on the drafter; dflash for none."
    )
    target_dtype: str = option(fast_dtype(), "Type of the frozen target's weights.")
    block_size: int = option(8, "Positions of a block, anchor included.")
    mask_token_id: int | None = option(None, "An unused token of the target's vocabulary; required for a new drafter.")
    num_layers: int = option(3, "Drafter layers.")
    target_layer_ids: list[int] | None = option(None, "Tapped target layers; by default spread over the target.")
    candidate_topk: int = option(8, "Candidates per slot.")
    head_hidden_size: int = option(256, "Width of the head.")
    head_num_layers: int = option(2, "Layers of the head.")
    head_num_heads: int = option(4, "Attention heads of the head.")
    factor_dim: int = option(256, "Dimension of the in and out vectors.")
    logit_scale: float = option(8.0, "Scale of the vectors' cosines in the scores.")
    vector_eps: float = option(1e-4, "Least norm a vector is divided by; above all norms, scores are plain products.")
    conv_kernel_size: int = option(0, "Taps of the convolutions around the drafter's sublayers; 0 for none.")
    conv_group_size: int = option(0, "Channels that share one of their dynamic kernels.")
    warm_start: bool = option(True, "Start a new drafter from the target's last layers, and a new head balanced.")


@dataclass
class DataArguments:
    """Where the training and evaluation rows come from."""

    train_files: list[str] = field(
        default_factory=list,
        metadata={"help": "JSONL(.gz) files, or folders or names of `datasets` datasets with a split `train`."},
    )
    eval_files: list[str] = field(
        default_factory=list, metadata={"help": "JSONL(.gz) files of prompts for `generate`; never trained on."}
    )
    eval_prompts: int = option(16, "Prompts taken of the evaluation files.")
    eval_max_new_tokens: int = option(64, "Tokens generated for each of them.")
    max_length: int = option(1024, "Tokens kept of a row.")
    held_out: float = option(0.0, "Share of the rows, the same in every run, kept out of training to evaluate on.")
    max_held_out: int = option(64, "Rows of those that are evaluated.")
    packing: bool = option(False, "Fill rows of `max_length` tokens with several examples; none sees another.")


@dataclass
class LiLiCorrTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the objective of the paper and a learning rate of its own for the head.

    Changed defaults: `learning_rate` 6e-4, cosine schedule with 4% warm-up, `max_grad_norm` 1, bf16 compute with fp32
    weights (fp32 on CPUs that are slow in bf16), `weight_decay` 0 for the drafter.
    """

    learning_rate: float = option(6e-4, "Of the drafter.")
    lr_scheduler_type: str = option("cosine", "Schedule of both learning rates.")
    warmup_steps: float = option(0.04, "Warm-up steps, or their share of all steps if below 1.")
    bf16: bool = option(fast_dtype() == "bfloat16", "Compute in bf16 over fp32 weights.")
    ddp_find_unused_parameters: bool | None = option(False, "Every trained parameter has a gradient in every step.")
    remove_unused_columns: bool = option(False, "Every column is used.")
    head_learning_rate: float = option(1.5e-4, "Of the head.")
    head_weight_decay: float = option(0.01, "Of the head; the drafter's is `weight_decay`.")
    train_drafter: bool = option(True, "Train the drafter; off for a head on a frozen drafter.")
    train_head: bool = option(True, "Train the head; off to train the drafter alone under it.")
    max_anchors: int = option(512, "Blocks taken of one row at most, drawn anew each epoch.")
    max_hours: float | None = option(None, "Hours of training, instead of epochs or steps; evaluation not counted.")
    clock: Literal["wall", "processor"] = option(
        "wall", "What max_hours counts; processor time leaves other work out."
    )
    target_cache: str | None = option(None, "Folder that keeps the target's states for later epochs and runs.")
    slot_chunk_size: int = option(1024, "Slots whose logits, and lattices, exist at a time.")
    slot_vocabulary: int = option(0, "Tokens that compete for a slot in a step; 0 for all of them.")
    short_blocks: float = option(0.0, "Share of the run, from its start, on blocks of half the size.")
    cross_entropy: float = option(0.25, "Weight of the head's cross-entropy.")
    distractor: float = option(0.25, "Weight of the target-weighted distractor penalty.")
    hinge: float = option(0.0, "Weight of the margin hinge; the paper gives it and cross_entropy 0.125.")
    margin: float = option(2.0, "Lead that the hinge asks for.")
    slot_weights: SlotWeights = option("decay", "Of the drafter's term.")
    beta: float = option(7.0, "Decay of the slots' weights; 7 for blocks of 16, 4 for blocks of 8.")
    distillation: float = option(0.0, "Share of the drafter's term that follows the target's whole distribution.")
    restore_callback_states_from_checkpoint: bool = option(True, "A resumed run counts its hours on.")

    license: str | None = option(None, "Licence of the weights, for the model card.")
    datasets: list[str] | None = option(None, "Hub ids of the data behind the training files, for the model card.")

    def __post_init__(self) -> None:
        # As given: `TrainingArguments` resolves many fields for this machine.
        self.given = {name: value for name, value in changed(self).items() if name != "hub_token"}
        # Without this, `TrainingArguments` takes bf16 for a wish it cannot grant where there is no accelerator.
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        if self.max_hours is not None:
            self.max_steps = sys.maxsize
            if self.warmup_steps >= 1:
                raise ValueError(
                    f"`warmup_steps` is {self.warmup_steps:g} steps, and nobody knows how many `max_hours` will hold: "
                    "give the share of the run, such as 0.04."
                )
        super().__post_init__()

    def __getstate__(self) -> dict[str, Any]:
        # Pickled beside the weights and pushed with them, where a token has no place.
        return self.__dict__ | {"hub_token": None}

    @property
    def objective(self) -> Objective:
        names = ("cross_entropy", "distractor", "hinge", "margin", "slot_weights", "beta", "distillation")
        return Objective(**{name: getattr(self, name) for name in names})

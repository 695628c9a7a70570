# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""Co-training of drafter and head against a frozen target."""

import time
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, TrainerCallback

from lilicorr_hf.modeling.generation_lilicorr import record
from lilicorr_hf.modeling.modeling_dflash import DRAFTER_PREFIXES, DFlashModel
from lilicorr_hf.modeling.target_lilicorr import TargetTables, tapped_states

from .arguments import LiLiCorrTrainingArguments
from .data import BlockDataset, collate
from .objective import Objective, Share, StepLoss, TrainingBatch, fixed_weights, slot_labels, training_loss
from .publishing import PublishingTrainer


class AnchorEpoch(TrainerCallback):
    """Tells the dataset which epoch its anchors are for, also in the middle of one that a run resumes in."""

    def on_epoch_begin(self, args, state, control, train_dataloader=None, **kwargs):
        train_dataloader.dataset.epoch = int(state.epoch or 0)


class LiLiCorrTrainer(PublishingTrainer):
    """
    `Trainer` for block drafters, with or without a head.

    The target is held beside the model, never inside it: it gets no gradient, no optimizer state and no place in any
    checkpoint. Parts of the loss and what the drafts would be worth are logged with every logging step; evaluation
    runs `generate` on held-out prompts and reports `eval_tau`.

    Args:
        model ([`DFlashModel`]): to train, in fp32.
        target (`PreTrainedModel`): frozen.
        args ([`LiLiCorrTrainingArguments`]).
        train_dataset ([`BlockDataset`]).
        eval_prompts (list of `torch.LongTensor` of shape `[1, n]`): prompts for `generate`.
        eval_max_new_tokens (`int`): tokens generated for each.
        kwargs: for [`PublishingTrainer`] and `Trainer`.
    """

    args: LiLiCorrTrainingArguments

    def __init__(
        self,
        model: DFlashModel,
        target: PreTrainedModel,
        args: LiLiCorrTrainingArguments,
        train_dataset: BlockDataset,
        eval_prompts: list[torch.Tensor] | None = None,
        eval_max_new_tokens: int = 64,
        **kwargs: Any,
    ):
        model.check_target(target)
        freeze(model, args)
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_prompts,
            data_collator=collate,
            **kwargs,
        )
        self.add_callback(AnchorEpoch)
        self.target = target.eval().requires_grad_(False).to(args.device)
        self.tables = TargetTables(target)
        self.objective: Objective = args.objective
        self.eval_max_new_tokens = eval_max_new_tokens
        # Every term is divided by what the whole step supervises, where that can be known; see `Share`.
        self.loss_is_scaled_for_ga = True
        self._sums: dict[str, torch.Tensor] = defaultdict(lambda: torch.zeros((), device=args.device))
        self._steps, self._blocks, self._since = 0, 0, time.perf_counter()

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW (or `args.optim`) over two groups, drafter and head, each with its own rate and decay."""
        if self.optimizer is None:
            trained = self.model if model is None else model
            assert isinstance(trained, nn.Module)
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args)
            groups = parameter_groups(trained, self.args)
            self.optimizer = optimizer_class(groups, **options)
        return self.optimizer

    @torch.no_grad()
    def training_batch(self, inputs: dict[str, torch.Tensor]) -> TrainingBatch:
        """The frozen target's part of a step: its tapped states, and its final states to read logits from."""
        taps = self.accelerator.unwrap_model(self.model).config.target_layer_ids
        output = self.target.base_model(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            output_hidden_states=[i + 1 for i in taps],
            use_cache=False,
        )
        final = output.last_hidden_state
        return TrainingBatch(
            input_ids=inputs["input_ids"],
            loss_mask=inputs["loss_mask"],
            anchors=inputs["anchors"],
            keep=inputs["keep"],
            target_states=tapped_states(output.hidden_states, taps),
            target_logits=lambda rows, positions: self.tables.logits(final[rows, positions]),
        )

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The micro-batches of one optimizer step and the sum of the drafter's weights in all of them."""
        samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not samples or self.objective.slot_weights == "dpace":
            return samples, None
        num_slots = self.accelerator.unwrap_model(self.model).config.num_slots
        names = ("input_ids", "loss_mask", "anchors", "keep")
        labels = [slot_labels(*(sample[name] for name in names), num_slots) for sample in samples]
        total = sum(fixed_weights(self.objective, label.supervised).sum() for label in labels)
        return samples, self.accelerator.reduce(total.to(device), reduction="sum")

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        batch = self.training_batch(inputs)
        share = Share(
            weight_total=num_items_in_batch,
            micro_batches=self.current_gradient_accumulation_steps,
            processes=self.accelerator.num_processes,
            reduce=lambda value: self.accelerator.reduce(value.detach(), reduction="sum"),
        )
        with self.accelerator.autocast():
            step = training_loss(
                self.accelerator.unwrap_model(model),
                self.tables,
                batch,
                self.objective,
                self.args.slot_chunk_size,
                share,
                forward=model,
            )
        self.note(step, batch)
        return (step.loss, step) if return_outputs else step.loss

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        raise_if_not_finite(model, loss, self.state.global_step + 1)
        return loss

    def note(self, step: StepLoss, batch: TrainingBatch) -> None:
        """Adds a micro-batch to what the next log reports, on the device: nothing waits for it."""
        for name, value in step.parts.items():
            self._sums[f"loss_{name}"] += value
        for name, value in step.metrics.items():
            self._sums[name] += value
        self._sums["blocks"] += batch.keep.sum()
        self.progress.blocks_here += batch.keep.sum()
        self._steps += 1

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self._steps and "loss" in logs:
            sums = {name: value.item() for name, value in self._sums.items()}
            seconds = time.perf_counter() - self._since
            logs["blocks_per_second"] = sums.pop("blocks") / seconds
            logs |= {name: value / self._steps for name, value in sums.items()}
            self._sums.clear()
            self._steps, self._since = 0, time.perf_counter()
        super().log(logs, start_time)

    @torch.no_grad()
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """`generate` on every prompt with the model as assistant; acceptance length over all blocks."""
        prompts: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        model = self.accelerator.unwrap_model(self.model)
        model.eval()
        start = time.perf_counter()
        with record() as recording:
            for prompt in prompts:
                self.target.generate(
                    prompt.to(self.args.device),
                    attention_mask=torch.ones_like(prompt),
                    assistant_model=model,
                    max_new_tokens=self.eval_max_new_tokens,
                    do_sample=False,
                )
        metrics = {
            f"{metric_key_prefix}_tau": recording.tau,
            f"{metric_key_prefix}_runtime": time.perf_counter() - start,
        }
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self._since = time.perf_counter()
        return metrics


def raise_if_not_finite(model: nn.Module, loss: torch.Tensor, step: int) -> None:
    """Stops a run before one bad number reaches the weights, where it would spread; waits once for the device.

    Raises:
        `FloatingPointError`: naming the first tensor that is not finite, weights before gradients before the loss.
    """
    weights = {f"weight {name}": p.detach() for name, p in model.named_parameters()}
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    # A bad weight spoils every gradient, so weights come first.
    tensors = [*weights.items(), *gradients.items(), ("loss", loss)]
    norms = torch._foreach_norm([tensor for _, tensor in tensors])
    finite = torch.stack([norm.float() for norm in norms]).isfinite()
    if not finite.all():
        first = tensors[int(finite.logical_not().nonzero()[0])][0]
        raise FloatingPointError(
            f"Step {step}: the {first} is not finite. Resume from the last checkpoint with a lower learning rate, or "
            "look at the rows of this step."
        )


def freeze(model: DFlashModel, args: LiLiCorrTrainingArguments) -> None:
    """Turns gradients off for the half that is not trained.

    Raises:
        `ValueError`: if nothing is left to train.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(args.train_drafter if name.startswith(DRAFTER_PREFIXES) else args.train_head)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("Nothing to train: `train_drafter` and `train_head` leave no parameter of this model.")


def parameter_groups(model: nn.Module, args: LiLiCorrTrainingArguments) -> list[dict[str, Any]]:
    """Drafter and head with their learning rates and weight decays; a group without parameters is left out."""
    named = [(name.removeprefix("module."), p) for name, p in model.named_parameters() if p.requires_grad]
    drafter = [p for name, p in named if name.startswith(DRAFTER_PREFIXES)]
    head = [p for name, p in named if not name.startswith(DRAFTER_PREFIXES)]
    groups = [
        {"params": drafter, "lr": args.learning_rate, "weight_decay": args.weight_decay},
        {"params": head, "lr": args.head_learning_rate, "weight_decay": args.head_weight_decay},
    ]
    return [group for group in groups if group["params"]]

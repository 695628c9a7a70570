# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""Co-training of drafter and head against a frozen target."""

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProgressCallback, TrainerCallback

from lilicorr_hf.doctor import write_probe
from lilicorr_hf.modeling.decoding_lilicorr import block_decoding
from lilicorr_hf.modeling.generation_lilicorr import record
from lilicorr_hf.modeling.modeling_dflash import DRAFTER_PREFIXES, DFlashModel
from lilicorr_hf.modeling.modeling_sequential import SequentialDraftModel
from lilicorr_hf.modeling.target_lilicorr import TargetTables, states_to_return, tapped_states

from .arguments import LiLiCorrTrainingArguments
from .budget import TimeBar, TimeBudget, schedule_over
from .data import BlockDataset, collate
from .objective import training_loss
from .packing import PackedExample, check_packing
from .publishing import PublishingTrainer
from .stages import StageClock
from .state_cache import TargetStateCache
from .step import Objective, Share, StepLoss, TrainingBatch, fixed_weights, slot_labels
from .vocabulary import Vocabulary


class AnchorEpoch(TrainerCallback):
    """Tells the dataset which epoch its anchors are for, also in the middle of one that a run resumes in."""

    def on_epoch_begin(self, args, state, control, train_dataloader=None, **kwargs):
        train_dataloader.dataset.epoch = int(state.epoch or 0)


class OptimizerTime(TrainerCallback):
    """Gives the optimizer's part of a step to the clock of the trainer."""

    def __init__(self, trainer: "LiLiCorrTrainer"):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        if self.trainer.clock is not None:
            self.trainer.clock.mark("optimizer")
            self.trainer.shares = self.trainer.clock.shares()


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
        held_out ([`BlockDataset`]): rows kept out of training, to see what drafts are worth there with the target's
            own tokens as context: `eval_selected_prefix` and the like.
        tokenizer: the target's; with it every checkpoint brings the probe that `lilicorr doctor` compares with.
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
        held_out: BlockDataset | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **kwargs: Any,
    ):
        model.check_target(target)
        check_method(model, args)
        freeze(model, args)
        self.model_class = type(model)
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_prompts,
            data_collator=collate,
            **kwargs,
        )
        self.add_callback(AnchorEpoch)
        if args.max_hours is not None:
            self.add_callback(TimeBudget(args.max_hours))
            if self.pop_callback(ProgressCallback) is not None:
                self.add_callback(TimeBar(lambda: self.elapsed))
        self.target = target.eval().requires_grad_(False).to(args.device)
        if any(isinstance(example, PackedExample) for example in train_dataset.examples):
            check_packing(self.target, args.per_device_train_batch_size)
        self.tables = TargetTables(target)
        self.state_cache = None
        if args.target_cache is not None:
            self.state_cache = TargetStateCache(Path(args.target_cache), target, model.config.target_layer_ids)
        self.vocabulary = None
        if args.slot_vocabulary:
            self.vocabulary = Vocabulary(model.config.vocab_size, args.slot_vocabulary, train_dataset.written_ids())
        self.objective: Objective = args.objective
        self.eval_max_new_tokens, self.held_out, self.target_tokenizer = eval_max_new_tokens, held_out, tokenizer
        # Every term is divided by what the whole step supervises, where that can be known; see `Share`.
        self.loss_is_scaled_for_ga = True
        self._sums: dict[str, torch.Tensor] = defaultdict(lambda: torch.zeros((), device=args.device))
        self._steps, self._since = 0, time.perf_counter()
        self.clock: StageClock | None = None
        self.shares: dict[str, float] = {}
        self.add_callback(OptimizerTime(self))

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.accelerator.is_fsdp2:
            # Autocast alone decides what is computed in bf16. FSDP's policy would round the head's scores, too.
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = None

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW (or `args.optim`) over two groups, drafter and head, each with its own rate and decay."""
        if self.optimizer is None:
            trained = self.accelerator.unwrap_model(self.model if model is None else model, keep_torch_compile=False)
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args)
            groups = parameter_groups(trained, self.args)
            self.optimizer = optimizer_class(groups, **options)
        return self.optimizer

    def create_scheduler(self, num_training_steps, optimizer=None):
        if self.args.max_hours is not None and self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            assert optimizer is not None
            args = self.args
            schedule: Any = args.lr_scheduler_type, optimizer, args.warmup_steps, args.lr_scheduler_kwargs
            self.lr_scheduler = schedule_over(lambda: self.elapsed, *schedule)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    @property
    def elapsed(self) -> float:
        """Share of the run that is over, in steps or in time."""
        budgets = [callback for callback in self.callback_handler.callbacks if isinstance(callback, TimeBudget)]
        # Resuming puts a new budget in the place of the old.
        return budgets[0].progress if budgets else self.state.global_step / self.state.max_steps

    def training_batch(self, inputs: dict[str, torch.Tensor]) -> TrainingBatch:
        """The frozen target's part of a step: its tapped states, and its final states to read logits from."""
        states = self.target_states(inputs["input_ids"], inputs["position_ids"], inputs["lengths"])
        width = self.target.config.get_text_config().hidden_size
        return TrainingBatch(
            input_ids=inputs["input_ids"],
            loss_mask=inputs["loss_mask"],
            position_ids=inputs["position_ids"],
            anchors=inputs["anchors"],
            keep=inputs["keep"],
            target_states=states[..., :-width],
            final_states=states[..., -width:],
        )

    def target_states(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """Tapped and final states `[b, T, (L + 1) * M]`: from the cache where it has a row, which it is given else."""
        if self.state_cache is None:
            return self.ask_target(input_ids, position_ids)
        rows = []
        for row, length in enumerate(lengths.tolist()):
            ids, positions = input_ids[row, :length], position_ids[row, :length]
            states = self.state_cache.get(ids, positions)
            if states is None:
                states = self.ask_target(ids.unsqueeze(0), positions.unsqueeze(0))[0]
                self.state_cache.add(ids, positions, states)
            rows.append(states.to(input_ids.device))
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    @torch.no_grad()
    def ask_target(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        taps = self.bare_model.config.target_layer_ids
        output = self.target.base_model(
            input_ids=input_ids,
            # Without a mask, positions that start anew keep documents apart; padding is behind all that attends.
            position_ids=position_ids,
            output_hidden_states=states_to_return(taps),
            use_cache=False,
        )
        return torch.cat([tapped_states(output.hidden_states, taps), output.last_hidden_state], dim=-1)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The micro-batches of one optimizer step and the sum of the drafter's weights in all of them."""
        samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        # One step of every logging interval is taken apart by the clock.
        self.clock = StageClock(self.args.device) if self._steps == 0 else None
        if not samples or self.objective.slot_weights == "dpace":
            return samples, None
        names = ("input_ids", "loss_mask", "position_ids", "anchors", "keep")
        slots = len(range(self.block_size)[self.bare_model.slot_rows])
        labels = [slot_labels(*(sample[name] for name in names), slots) for sample in samples]
        total = sum(fixed_weights(self.objective, label.supervised).sum() for label in labels)
        return samples, self.accelerator.reduce(total.to(device), reduction="sum")

    @property
    def block_size(self) -> int:
        """Of the blocks that this step trains on."""
        whole = self.bare_model.config.block_size
        return whole // 2 if self.elapsed < self.args.short_blocks else whole

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        batch = self.training_batch(inputs)
        if self.clock is not None:
            self.clock.mark("target")
        share = Share(
            weight_total=num_items_in_batch,
            micro_batches=self.current_gradient_accumulation_steps,
            processes=self.accelerator.num_processes,
            reduce=lambda value: self.accelerator.reduce(value.detach(), reduction="sum"),
        )
        with self.accelerator.autocast():
            step = training_loss(
                self.bare_model,
                self.tables,
                batch,
                self.objective,
                self.args.slot_chunk_size,
                share,
                forward=model,
                vocabulary=self.vocabulary,
                block_size=self.block_size,
                with_head=self.args.train_head,
                progress=self.elapsed,
                clock=self.clock,
            )
        self.note(step, batch)
        return (step.loss, step) if return_outputs else step.loss

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.clock is not None:
            self.clock.mark("drafter")
        raise_if_not_finite(self.bare_model, loss, self.state.global_step + 1, self.accelerator.reduce)
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
            logs |= {f"share_{stage}": share for stage, share in self.shares.items()}
            self._sums.clear()
            self._steps, self._since = 0, time.perf_counter()
        super().log(logs, start_time)

    @torch.no_grad()
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """`generate` on every prompt with the model as assistant; acceptance length over all blocks."""
        prompts: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        model = self.bare_model
        model.eval()
        start = time.perf_counter()
        with record() as recording:
            for prompt in prompts:
                prompt = prompt.to(self.args.device)
                self.target.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    # Chains, which every machine drafts.
                    custom_generate=block_decoding(model, tree_budget=0),
                    max_new_tokens=self.eval_max_new_tokens,
                    do_sample=False,
                )
        metrics = {f"{metric_key_prefix}_tau": recording.tau} if prompts else {}
        if self.held_out is not None:
            found = self.evaluate_blocks(self.held_out)
            metrics |= {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        metrics[f"{metric_key_prefix}_runtime"] = time.perf_counter() - start
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self._since = time.perf_counter()
        return metrics

    @torch.no_grad()
    def evaluate_blocks(self, dataset: BlockDataset) -> dict[str, float]:
        """Accepted slots of the walk, the argmax and the oracle, and the coverage: means over all complete blocks."""
        model = self.bare_model
        sums: dict[str, float] = defaultdict(float)
        blocks = 0
        for index in range(len(dataset)):
            inputs = {name: tensor.to(self.args.device) for name, tensor in collate([dataset[index]]).items()}
            with self.accelerator.autocast():
                batch = self.training_batch(inputs)
                step = training_loss(model, self.tables, batch, self.objective, self.args.slot_chunk_size)
            complete = int(step.metrics["complete_blocks"])
            blocks += complete
            for name, value in step.metrics.items():
                if name.endswith("_prefix") or name in ("coverage", "pair_interaction"):
                    sums[name] += value.item() * complete
        return {name: value / max(blocks, 1) for name, value in sums.items()}

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        # FSDP gives the model a class of its own making; the checkpoint has to name ours, and bring its code.
        model: Any = self.model
        wrapped = type(model)
        model.__class__ = self.model_class
        try:
            super()._save(output_dir, state_dict)
        finally:
            model.__class__ = wrapped
        if self.target_tokenizer is not None and self.args.should_save:
            folder = output_dir or self.folder
            # Read back: under FSDP no process holds the whole model.
            saved = self.model_class.from_pretrained(folder, dtype=torch.float32).to(self.args.device)
            write_probe(self.target, self.target_tokenizer, saved, folder)

    def close(self) -> None:
        """Ends the process group of a distributed run; the trainer cannot train afterwards.

        The wrapped model goes first. Were it the last to hold the group, freeing it would wait, without releasing the
        interpreter, for threads of the group that wait for the interpreter.
        """
        self.model_wrapped = self.model  # type: ignore[assignment]
        self.accelerator.free_memory()
        self.accelerator.end_training()


def raise_if_not_finite(
    model: nn.Module, loss: torch.Tensor, step: int, reduce: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Stops a run before one bad number reaches the weights, where it would spread; waits once for the device.

    All processes stop if one has to: `reduce` sums over them.

    Raises:
        `FloatingPointError`: naming the first tensor that is not finite, weights before gradients before the loss.
    """
    weights = {f"weight {name}": p.detach() for name, p in model.named_parameters()}
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    # A bad weight spoils every gradient, so weights come first.
    tensors = [*weights.items(), *gradients.items(), ("loss", loss)]
    norms = torch._foreach_norm([t.to_local() if isinstance(t, DTensor) else t for _, t in tensors])
    finite = reduce(torch.stack([norm.float() for norm in norms])).isfinite()
    if not finite.all():
        first = tensors[int(finite.logical_not().nonzero()[0])][0]
        raise FloatingPointError(
            f"Step {step}: the {first} is not finite. Resume from the last checkpoint with a lower learning rate, or "
            "look at the rows of this step."
        )


def check_method(model: DFlashModel, args: LiLiCorrTrainingArguments) -> None:
    """Raises `ValueError` for options that the model's draft method would leave unheard."""
    if isinstance(model, SequentialDraftModel):
        ours = ("cross_entropy", "distractor", "hinge", "margin")
        ignored = [name for name in ("slot_vocabulary", "distillation") if getattr(args, name)]
        ignored += [name for name in ours if name in args.given]
        if ignored:
            raise ValueError(
                f"{type(model).__name__} corrects the whole vocabulary and has a loss of its own: {ignored} do not "
                "apply. Leave them out, or set them to 0."
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
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    drafter = [p for name, p in named if name.startswith(DRAFTER_PREFIXES)]
    head = [p for name, p in named if not name.startswith(DRAFTER_PREFIXES)]
    groups = [
        {"params": drafter, "lr": args.learning_rate, "weight_decay": args.weight_decay},
        {"params": head, "lr": args.head_learning_rate, "weight_decay": args.head_weight_decay},
    ]
    return [group for group in groups if group["params"]]

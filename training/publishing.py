# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""A `Trainer` whose every saved folder tells a stranger what it is, how to load it and how to make it again."""

import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, get_token
from huggingface_hub.errors import HTTPError
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging
from transformers.utils.hub import hf_api

from lilicorr_hf.doctor import PROBE
from lilicorr_hf.modeling.modeling_dflash import DRAFTER_PREFIXES, DFlashModel
from lilicorr_hf.modeling.modeling_sequential import SequentialDraftModel
from lilicorr_hf.provenance import commit, hardware, versions, without_folders

from .arguments import LiLiCorrTrainingArguments
from .card import CARD, model_card
from .provenance import RECIPE, RECORD, Provenance, hub_id, read_record, write_record


logger = logging.get_logger(__name__)


class Progress(TrainerCallback):
    """Blocks, seconds and hardware of training, over all resumptions; counts are `None` after one without a record.

    Args:
        device (`torch.device`): that counts the blocks, so that no step waits for the count.
    """

    def __init__(self, device: torch.device):
        self.blocks_here = torch.zeros((), dtype=torch.long, device=device)
        self.blocks: int | None = 0
        self.blocks_before: int | None = 0
        self.seconds: float | None = 0.0
        self.hardware: list[str] = []
        self._since: float | None = None

    def resume(self, checkpoint: Path) -> None:
        """Goes on from what a checkpoint says."""
        known: dict[str, Any] = {"blocks": None, "hours": None}
        if (checkpoint / RECORD).is_file():
            record = read_record(checkpoint)
            known, self.hardware = record["progress"], record["hardware"]
        self.blocks_before = known["blocks"]
        self.seconds = None if known["hours"] is None else known["hours"] * 3600

    def gather(self, accelerator) -> None:
        """Sums the blocks of all processes; every one of them has to call it."""
        here = int(accelerator.reduce(self.blocks_here, reduction="sum"))
        self.blocks = None if self.blocks_before is None else self.blocks_before + here

    @property
    def hours(self) -> float | None:
        if self.seconds is None:
            return None
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return (self.seconds + running) / 3600

    def on_train_begin(self, args, state, control, **kwargs):
        self._since = time.perf_counter()

    def on_train_end(self, args, state, control, **kwargs):
        if self.seconds is not None and self._since is not None:
            self.seconds += time.perf_counter() - self._since
        self._since = None


class PushWholeCheckpoint(TrainerCallback):
    """Adds to a push what `Trainer` leaves in the checkpoint: it takes weights and config, not code and card."""

    def on_push_begin(self, args, state, control, **kwargs):
        checkpoint = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if state.is_world_process_zero and checkpoint.is_dir():
            for pattern in ("*.py", CARD, RECORD, RECIPE, PROBE):
                for path in checkpoint.glob(pattern):
                    shutil.copy(path, args.output_dir)


class PublishingTrainer(Trainer):
    """
    `Trainer` for models that are shared: checkpoints, the final folder and every push hold weights, config, code,
    card, recipe and record.

    Args:
        args ([`LiLiCorrTrainingArguments`]).
        provenance ([`Provenance`]): how the run was started; by default what `args` say.
        kwargs: for `Trainer`.

    Raises:
        `ConnectionError`: with `push_to_hub`, if the repository cannot be written to, before anything is trained.
    """

    args: LiLiCorrTrainingArguments
    # `Trainer` sets it with the repository, on the first process alone.
    push_in_progress: Any = None

    def __init__(self, args: LiLiCorrTrainingArguments, provenance: Provenance | None = None, **kwargs: Any):
        super().__init__(args=args, **kwargs)
        self.provenance = provenance or Provenance(arguments=args.given)
        self.progress = Progress(args.device)
        self.add_callback(self.progress)
        self.add_callback(PushWholeCheckpoint)
        self._commit = commit() if self.is_world_process_zero() else None

    @property
    def folder(self) -> Path:
        return Path(str(self.args.output_dir))

    @property
    def bare_model(self) -> DFlashModel:
        """The model without what several processes or a compiler have wrapped around it."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    @property
    def repository(self) -> str:
        """What the model is called on the Hub, or would be."""
        return self.hub_model_id or self.args.hub_model_id or self.folder.absolute().name

    def record(self) -> dict[str, Any]:
        """Content of `training.json`: where the run came from, what it is, how far it got."""
        data: Any = self.train_dataset
        prompts: Any = self.eval_dataset or ()
        args, model = self.args, self.bare_model
        target, counts, processes = model.config.target_name_or_path, parameter_counts(model), args.world_size
        return {
            "name": self.repository,
            "target": without_folders(target or "its target"),
            "base_model": hub_id(target),
            "license": args.license,
            "datasets": args.datasets or [],
            "command": self.provenance.command,
            "arguments": self.provenance.arguments,
            "data": {"files": self.provenance.files, "examples": len(data)},
            "loss": loss_in_words(model, args, counts),
            "learning_rates": learning_rates(args, counts),
            "blocks_per_step": args.train_batch_size * args.gradient_accumulation_steps * processes * args.max_anchors,
            "parameters": counts,
            "progress": {
                "steps": self.state.global_step,
                "epochs": self.state.epoch,
                "blocks": self.progress.blocks,
                "hours": self.progress.hours,
            },
            "evaluation": evaluations(self.state.log_history, len(prompts)),
            "hardware": list(dict.fromkeys([*self.progress.hardware, hardware(args.device, processes)])),
            "versions": versions(),
            "commit": self._commit,
        }

    def describe(self, folder: Path, **metadata: Any) -> None:
        """Writes record, recipe and card into a folder; `metadata` is for `ModelCardData`."""
        record = self.record()
        write_record(folder, record)
        model_card(self.bare_model.config, record, **metadata).save(folder / CARD)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self.progress.gather(self.accelerator)
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            self.describe(Path(output_dir or self.folder))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.progress.resume(Path(resume_from_checkpoint))

    def create_model_card(
        self,
        language=None,
        license=None,
        tags=None,
        model_name=None,
        finetuned_from=None,
        tasks=None,
        dataset_tags=None,
        dataset=None,
        dataset_args=None,
    ) -> None:
        """Ours instead of `Trainer`'s, in `output_dir`; arguments that are metadata of it go over what `args` say."""
        given = {"language": language, "license": license, "tags": tags}
        given |= {"base_model": finetuned_from, "datasets": dataset}
        if self.is_world_process_zero():
            self.describe(self.folder, **{name: value for name, value in given.items() if value})

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Creates the repository and makes sure that this token may write to it.

        Raises:
            `ConnectionError`: if not, with what the Hub said.
        """
        token = token or self.args.hub_token
        try:
            super().init_hf_repo(token, private)
            if self.is_world_process_zero():
                # Creating a repository that is there succeeds without the right to write to it.
                hf_api().auth_check(self.repository, token=token, write=True)
                hf_api().model_info(self.repository, revision=self.args.hub_revision, token=token)
        except (HTTPError, OSError) as error:
            advice = "Check `hub_model_id`, `hub_revision` and that the token may write there"
            if token is None and get_token() is None:
                advice = "There is no token: run `hf auth login`, or set HF_TOKEN to one with write access"
            raise ConnectionError(
                f"Cannot push to {self.repository} on {constants.ENDPOINT}, so nothing was started. {advice}; or "
                f"leave `push_to_hub` off and upload `output_dir` later. The Hub said: {error}"
            ) from error

    def push_to_hub(self, *args: Any, **kwargs: Any):
        """As `Trainer.push_to_hub`.

        Raises:
            `ConnectionError`: if it fails; the folder is complete on disk by then.
        """
        try:
            return super().push_to_hub(*args, **kwargs)
        except HTTPError as error:
            raise ConnectionError(
                f"The push to {self.repository} failed, nothing is lost: the model is in {self.folder}. "
                f"`hf upload {self.repository} {self.folder}` tries again. The Hub said: {error}"
            ) from error

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self.warn_of_failed_pushes()
        super()._push_from_checkpoint(checkpoint_folder)

    def _finish_current_push(self) -> None:
        super()._finish_current_push()
        self.warn_of_failed_pushes()

    def warn_of_failed_pushes(self) -> None:
        """Pushes run in the background, where `Trainer` never looks at how they ended."""
        jobs = [] if self.push_in_progress is None else self.push_in_progress.jobs
        for job in jobs:
            if job.done() and (error := job.exception()):
                logger.warning(
                    f"A push to {self.repository} failed; training goes on and the next one holds all files. "
                    f"The Hub said: {error}"
                )


# Of methods that have one of their own.
LOSSES = {
    "DominoModel": "cross-entropy of the drafter's logits, then more and more of the corrected ones",
    "DSparkModel": "cross-entropy, distance to the target's distribution, confidence",
}


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """Of the drafter, and of the head if there is one."""
    counts = {"drafter": 0, "head": 0}
    for name, parameter in model.named_parameters():
        counts["drafter" if name.startswith(DRAFTER_PREFIXES) else "head"] += parameter.numel()
    return {part: count for part, count in counts.items() if count}


def learning_rates(args: LiLiCorrTrainingArguments, parts: Iterable[str]) -> dict[str, float]:
    """Of the parts that are trained."""
    rates = {"drafter": args.learning_rate, "head": args.head_learning_rate}
    trained = {"drafter": args.train_drafter, "head": args.train_head}
    return {part: rates[part] for part in parts if trained[part]}


def loss_in_words(model: DFlashModel, args: LiLiCorrTrainingArguments, parts: Iterable[str]) -> str:
    """Mode and weights of the objective, as a reader of the paper would call them."""
    objective = args.objective
    if isinstance(model, SequentialDraftModel):
        return f"{type(model).__name__.removesuffix('Model')}'s own: {LOSSES[type(model).__name__]}"
    slots = f"decay, beta {objective.beta:g}" if objective.slot_weights == "decay" else objective.slot_weights
    drafter = f"slots weighted by {slots}"
    if "head" not in parts:
        return f"drafter alone: {drafter}"
    trained = learning_rates(args, parts)
    mode = f"{next(iter(trained))} only" if len(trained) == 1 else "drafter and head together"
    weights = ", ".join(f"{name} {getattr(objective, name):g}" for name in ("cross_entropy", "distractor", "hinge"))
    return f"{mode}, {'margin' if objective.hinge else 'base'} objective: {drafter}; {weights}"


def evaluations(log_history: list[dict[str, Any]], prompts: int) -> dict[str, Any]:
    taus = [row["eval_tau"] for row in log_history if "eval_tau" in row]
    return {"prompts": prompts, "last": taus[-1] if taus else None, "best": max(taus, default=None)}

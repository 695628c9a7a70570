# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""`python -m lilicorr_hf.training.train --config x.yaml [--option value ...]`: trains a drafter for a target."""

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import HfArgumentParser, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from lilicorr_hf.measure import encode
from lilicorr_hf.modeling.configuration_lilicorr import LiLiCorrConfig
from lilicorr_hf.modeling.modeling_dflash import DFlashModel
from lilicorr_hf.modeling.modeling_dflash2 import DFlash2Model
from lilicorr_hf.modeling.modeling_domino import DominoModel
from lilicorr_hf.modeling.modeling_dspark import DSparkModel
from lilicorr_hf.modeling.modeling_lilicorr import LiLiCorrDraftModel
from lilicorr_hf.pairs import load_target, resolve_assistant

from .arguments import DataArguments, LiLiCorrTrainingArguments, ModelArguments
from .cohorts import end_tokens
from .conversations import read_rows
from .data import BlockDataset, read_examples, split_held_out
from .memory import keep_freed_memory
from .options import changed
from .packing import pack
from .provenance import Provenance, command_line, hub_id
from .trainer import LiLiCorrTrainer
from .warm_start import warm_start


ARGUMENTS = (ModelArguments, DataArguments, LiLiCorrTrainingArguments)
CONFIGS = Path(__file__).parent / "configs"
# Blocks of a held-out row.
HELD_OUT_ANCHORS = 16
HEAD_GEOMETRY = (
    "candidate_topk",
    "head_hidden_size",
    "head_num_layers",
    "head_num_heads",
    "factor_dim",
    "logit_scale",
    "vector_eps",
)
CONVOLUTIONS = ("conv_kernel_size", "conv_group_size")
METHODS: dict[str, type[DFlashModel]] = {
    "lilicorr": LiLiCorrDraftModel,
    "dflash": DFlashModel,
    "domino": DominoModel,
    "dspark": DSparkModel,
    "dflash2": DFlash2Model,
}


def parse_arguments(argv: list[str]) -> tuple[ModelArguments, DataArguments, LiLiCorrTrainingArguments]:
    """Options of a YAML file, each overridden by the same option on the command line.

    Raises:
        `ValueError`: for an option of the file that nothing knows.
    """
    parser = HfArgumentParser(ARGUMENTS, prog="lilicorr train")  # type: ignore[arg-type]
    parser.add_argument("--config", help="YAML file or name of a recipe; the command line wins.")
    first = argparse.ArgumentParser(prog="lilicorr train", add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    found, argv = first.parse_known_args(argv)
    if found.config is not None:
        settings: dict[str, Any] = yaml.safe_load(named_file(found.config).read_text(encoding="utf-8")) or {}
        known = {action.dest for action in parser._actions}
        if unknown := sorted(settings.keys() - known):
            raise ValueError(f"{found.config} sets options that do not exist: {unknown}.")
        argv = to_argv(without_hours(settings, argv)) + argv
    model_args, data_args, args, *_ = parser.parse_args_into_dataclasses(args=argv, look_for_args_file=False)
    return model_args, data_args, args


def without_hours(settings: dict[str, Any], argv: list[str]) -> dict[str, Any]:
    """A file's settings; steps or epochs of the command line win over its hours, which would win over them."""
    counted = {option.split("=")[0] for option in argv} & {"--max_steps", "--num_train_epochs"}
    return {name: value for name, value in settings.items() if not (counted and name == "max_hours")}


def named_file(name: str, folder: Path = CONFIGS) -> Path:
    """A YAML file, or one of those that come with the package in `folder`, by its name.

    Raises:
        `FileNotFoundError`: if it is neither, with the names that there are.
    """
    if Path(name).is_file():
        return Path(name)
    shipped = {path.stem: path for path in folder.glob("*.yaml")}
    if name not in shipped:
        raise FileNotFoundError(f"There is no file {name!r}, nor does one come by that name: {sorted(shipped)}.")
    return shipped[name]


def to_argv(settings: dict[str, Any]) -> list[str]:
    argv = []
    for name, value in settings.items():
        argv.append(f"--{name}")
        argv += [str(item) for item in value] if isinstance(value, list) else [str(value)]
    return argv


def new_config(args: ModelArguments, target: PreTrainedConfig) -> LiLiCorrConfig:
    """Geometry of a new drafter: the target's own where the two have to agree, or start from each other."""
    text = target.get_text_config()
    if args.mask_token_id is None:
        raise ValueError("`mask_token_id` is required for a new drafter: give an unused token of the target.")
    ends = text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id]
    if args.mask_token_id in (*ends, text.pad_token_id):
        raise ValueError(
            f"`mask_token_id` {args.mask_token_id} is the target's end or padding token, which answers hold too: give "
            "an unused one."
        )
    return LiLiCorrConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        rms_norm_eps=text.rms_norm_eps,
        max_position_embeddings=text.max_position_embeddings,
        rope_parameters=dict(text.rope_parameters),
        block_size=args.block_size,
        mask_token_id=args.mask_token_id,
        target_layer_ids=args.target_layer_ids or [],
        num_target_layers=text.num_hidden_layers,
        target_name_or_path=public_name(args.target),
        **{name: getattr(args, name) for name in (*HEAD_GEOMETRY, *CONVOLUTIONS)},
    )


def load_model(args: ModelArguments, target: PreTrainedModel) -> tuple[DFlashModel, set[str]]:
    """The model to train in fp32, and the names of its tensors that no checkpoint brought.

    Raises:
        `ValueError`: for both a checkpoint and one of the drafter alone; as [`DFlashPreTrainedModel.from_pretrained`].
    """
    model_class = METHODS[args.method]
    if args.assistant is not None and args.drafter is not None:
        raise ValueError("Give `assistant`, to go on with a checkpoint, or `drafter`, for a new head on its drafter.")
    if args.assistant is not None:
        return model_class.from_pretrained(resolve_assistant(args.assistant), dtype=torch.float32), set()
    if args.drafter is None:
        model = model_class(new_config(args, target.config))
        return model, set(model.state_dict())
    drafter = DFlashModel.from_pretrained(resolve_assistant(args.drafter), dtype=torch.float32)
    model = model_class(with_new_head(drafter.config, args))
    model.load_state_dict(drafter.state_dict(), strict=False)
    return model, model.state_dict().keys() - drafter.state_dict().keys()


def with_new_head(config: LiLiCorrConfig, args: ModelArguments) -> LiLiCorrConfig:
    """A drafter's configuration, with the head that the arguments describe and convolutions, should it have none."""
    added = HEAD_GEOMETRY if config.conv_kernel_size else (*HEAD_GEOMETRY, *CONVOLUTIONS)
    # The drafter's rows predict their own slots; Domino's head goes on with that.
    changes = {name: getattr(args, name) for name in added} | {"shift_label": False}
    # Drafters published by others do not say.
    changes["target_name_or_path"] = config.target_name_or_path or public_name(args.target)
    return LiLiCorrConfig.from_dict(config.to_dict() | changes)


def public_name(target: str) -> str:
    """What a target is called in a config, which goes to the Hub, where a folder of this machine means nothing."""
    return hub_id(target) or Path(target).name


def read_files(files: list[str]) -> list[dict[str, Any]]:
    return [row for file in files for _, row in read_rows(file)]


def eval_prompts(args: DataArguments, tokenizer: PreTrainedTokenizerBase) -> list[torch.Tensor]:
    rows = read_files(args.eval_files)[: args.eval_prompts]
    chats = [row.get("messages") or row.get("prompt") or row["turns"][0] for row in rows]
    return [encode(tokenizer, chat)["input_ids"] for chat in chats]


def check_evaluation(data: DataArguments, args: LiLiCorrTrainingArguments) -> None:
    """Whether the best checkpoint can be told.

    Raises:
        `ValueError`: if there is nothing to measure `metric_for_best_model` on.
    """
    metric = args.metric_for_best_model
    if metric is None or args.eval_strategy == "no":
        return
    if metric.removeprefix("eval_") == "tau":
        if not (data.eval_files and data.eval_prompts):
            raise ValueError(
                "The best checkpoint is chosen by tau, and there are no prompts to run `generate` on. Give "
                "--eval_files FILE, or --metric_for_best_model selected_prefix, which is of the rows held out."
            )
    elif not data.held_out:
        raise ValueError(f"The best checkpoint is chosen by {metric} on rows held out. Give --held_out, 0.02 say.")


def new_trainer(
    model_args: ModelArguments,
    data_args: DataArguments,
    args: LiLiCorrTrainingArguments,
    command: str | None = None,
) -> LiLiCorrTrainer:
    """The trainer of a run.

    Args:
        model_args ([`ModelArguments`]), data_args ([`DataArguments`]), args ([`LiLiCorrTrainingArguments`]).
        command (`str`): that started it, for its card.
    """
    check_evaluation(data_args, args)
    set_seed(args.seed)
    target, tokenizer = load_target(model_args.target, dtype=model_args.target_dtype)
    model, new = load_model(model_args, target)
    train_rows = {file: read_files([file]) for file in data_args.train_files}
    all_rows = itertools.chain.from_iterable(train_rows.values())
    ends = end_tokens(target.generation_config, tokenizer, model_args.target)
    examples = read_examples(all_rows, tokenizer, data_args.max_length, model.config.block_size, ends)
    examples, held_out = split_held_out(examples, data_args.held_out)
    if model_args.warm_start:
        warm_start(model, new, target, torch.tensor([examples[0].input_ids]))
    rows = pack(examples, data_args.max_length) if data_args.packing else examples
    return LiLiCorrTrainer(
        model=model,
        target=target,
        args=args,
        train_dataset=BlockDataset(rows, args.max_anchors, args.seed),
        eval_prompts=eval_prompts(data_args, tokenizer),
        eval_max_new_tokens=data_args.eval_max_new_tokens,
        tokenizer=tokenizer,
        held_out=BlockDataset(held_out[: data_args.max_held_out], HELD_OUT_ANCHORS, args.seed) if held_out else None,
        provenance=Provenance(
            command=command,
            arguments=changed(model_args) | changed(data_args) | args.given,
            files=[{"file": file, "rows": len(found)} for file, found in train_rows.items()],
        ),
    )


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    model_args, data_args, args = parse_arguments(argv)
    keep_freed_memory()
    trainer = new_trainer(model_args, data_args, args, command_line(argv, args.hub_token, args.world_size))
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.close()


if __name__ == "__main__":
    main()

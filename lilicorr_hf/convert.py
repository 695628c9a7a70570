# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints from one format to another: tensors are renamed and never changed, configs rewritten.

Any format is read, see [`read_checkpoint`]; [`FORMATS`] lists what is written and who loads it.
"""

import functools
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors.torch import load_file
from transformers.dynamic_module_utils import custom_object_save

from .modeling.configuration_lilicorr import (
    DSPARK_ARCHITECTURE,
    SERVED_HEAD_FIELDS,
    LiLiCorrConfig,
    flatten_config,
)
from .modeling.modeling_dflash import DFlashModel
from .modeling.modeling_dspark import PUBLISHED_MODULES, TARGET_MODULES, DSparkModel
from .modeling.modeling_lilicorr import LiLiCorrDraftModel


Tensors = dict[str, torch.Tensor]

HEAD = "lilicorr."
NATIVE_MODULES = {"fc": "encoder.fc", "hidden_norm": "encoder.output_norm_enc"}
# Fields of the drafter's layers, under the name that every format has for them.
LAYER_FIELDS = (
    "attention_bias",
    "attention_dropout",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
)
# They mean nothing to other engines, which leave them alone; with them the way back is complete.
OUR_FIELDS = (
    "adaptive_draft",
    "context_window",
    "sampled_walk",
    "scoring",
    "target_name_or_path",
    "tree_budget",
    "tree_weight",
)


def engine_modules(config: LiLiCorrConfig) -> dict[str, str]:
    """Name in SGLang and vLLM of each module of the head that nvidia-modelopt and we call otherwise."""
    modules = {"feature_mlp.0": "feature_norm", "feature_mlp.1": "feature_mlp.up_proj"}
    modules["feature_mlp.3"] = "feature_mlp.down_proj"
    for i in range(config.head_num_layers):
        modules |= {f"layers.{i}.mlp.0": f"layers.{i}.mlp.up_proj", f"layers.{i}.mlp.2": f"layers.{i}.mlp.down_proj"}
    return {HEAD + ours: HEAD + theirs for ours, theirs in modules.items()}


def rename(tensors: Tensors, modules: Mapping[str, str]) -> Tensors:
    """The same tensors with the modules of their names replaced."""
    split = {name: name.rpartition(".") for name in tensors}
    return {f"{modules.get(module, module)}{dot}{leaf}": tensors[name] for name, (module, dot, leaf) in split.items()}


@dataclass
class Checkpoint:
    """
    Args:
        config ([`LiLiCorrConfig`]).
        tensors (`dict[str, torch.Tensor]`): under our names, in the dtypes they are stored in; complete.
    """

    config: LiLiCorrConfig
    tensors: Tensors

    @property
    def has_head(self) -> bool:
        return any(name.startswith(HEAD) for name in self.tensors)

    @property
    def model_class(self) -> type[DFlashModel]:
        if DSparkModel.__name__ in (self.config.architectures or ()):
            return DSparkModel
        return LiLiCorrDraftModel if self.has_head else DFlashModel

    @property
    def dtype(self) -> torch.dtype:
        """The one that holds all tensors without loss."""
        return functools.reduce(torch.promote_types, (tensor.dtype for tensor in self.tensors.values()))

    def without_head(self) -> "Checkpoint":
        return Checkpoint(self.config, {k: v for k, v in self.tensors.items() if not k.startswith(HEAD)})

    def with_fresh_head(self, seed: int) -> "Checkpoint":
        """A head to be trained, initialised as [`LiLiCorrDraftModel`] does, in the drafter's dtype."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            fresh = LiLiCorrDraftModel(self.config).state_dict()
        head = {k: v.to(self.dtype) for k, v in fresh.items() if k.startswith(HEAD)}
        return Checkpoint(self.config, self.tensors | head)


def read_checkpoint(source: str | os.PathLike, revision: str | None = None, **stated: Any) -> Checkpoint:
    """A checkpoint of any format: ours, served LiLiCorr (nvidia-modelopt's names, or SGLang's and vLLM's), z-lab's
    DFlash, transformers' own DFlash assistants, DSpark as published.

    Args:
        source (`str` or path): folder or Hub id.
        revision (`str`): of the Hub repository.
        stated: config fields, under our names, that its config.json leaves open.

    Raises:
        `ValueError`: naming tensors that are missing, left over or of another shape, config values that are missing
            or stated twice, and variants that compute something else.
        `OSError`: if there is no such checkpoint or it cannot be reached.
    """
    folder = resolve(source, revision)
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = read_config(raw, stated)
    if (folder / "mask_embedding.pt").exists():
        raise ValueError(f"{source} replaces the embedding of its mask token (mask_embedding.pt): not supported.")
    tensors = read_tensors(folder)
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    theirs = {theirs: ours for ours, theirs in (NATIVE_MODULES | engine_modules(config)).items()}
    architectures = raw.get("architectures") or ()
    if DSPARK_ARCHITECTURE in architectures:
        tensors = {name: tensor for name, tensor in tensors.items() if name.split(".")[0] not in TARGET_MODULES}
        theirs |= PUBLISHED_MODULES
    checkpoint = Checkpoint(config, rename(tensors, theirs))
    check_tensors(checkpoint, "LiLiCorrDraftModel" in architectures, str(source))
    return checkpoint


def resolve(source: str | os.PathLike, revision: str | None) -> Path:
    folder = Path(source)
    if not folder.is_dir():
        allowed = ["*.json", "*.safetensors", "mask_embedding.pt"]
        try:
            folder = Path(snapshot_download(str(source), revision=revision, allow_patterns=allowed))
        except HFValidationError as error:
            raise FileNotFoundError(f"There is no folder {source}, and no repository can have that name.") from error
        except LocalEntryNotFoundError as error:
            raise ConnectionError(f"{source} is no folder here, and not in the cache of the Hub. {error}") from error
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{source} holds no config.json, so it is no checkpoint.")
    return folder


def read_config(raw: dict[str, Any], stated: Mapping[str, Any]) -> LiLiCorrConfig:
    known = LiLiCorrConfig().to_dict()
    served = {ours: theirs for theirs, ours in SERVED_HEAD_FIELDS.items()}
    places = (raw, raw.get("dflash_config") or {})
    for name, value in stated.items():
        if name not in known:
            raise ValueError(f"A drafter's config has no field {name!r}.")
        keys = (name, served.get(name, name))
        found = [place[key] for place in places for key in keys if place.get(key) is not None]
        if any(other != value for other in found):
            raise ValueError(f"`{name}` was given as {value!r}, but the checkpoint states {found[0]!r}.")
    return LiLiCorrConfig(**{k: v for k, v in flatten_config(raw | dict(stated)).items() if k != "model_type"})


def read_tensors(folder: Path) -> Tensors:
    """Of all shards, in the order of their names."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    absent = [file for file in files if not (folder / file).is_file()]
    if absent:
        raise FileNotFoundError(f"{folder} lacks {absent}; weights are read from safetensors files alone.")
    return {name: tensor for file in files for name, tensor in load_file(folder / file).items()}


def check_tensors(checkpoint: Checkpoint, declares_head: bool, source: str) -> None:
    """Raises unless the tensors are those of the model that the config describes."""
    model_class = LiLiCorrDraftModel if declares_head else checkpoint.model_class
    with torch.device("meta"):
        wanted = {name: tuple(tensor.shape) for name, tensor in model_class(checkpoint.config).state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in checkpoint.tensors.items()}
    shapes = {k: f"{found[k]} instead of {wanted[k]}" for k in found.keys() & wanted.keys() if found[k] != wanted[k]}
    problems = {"missing": sorted(wanted.keys() - found.keys()), "unexpected": sorted(found.keys() - wanted.keys())}
    problems["misshapen"] = [f"{name}: {shape}" for name, shape in sorted(shapes.items())]
    words = ", ".join(f"{what} tensors {names}" for what, names in problems.items() if names)
    if words:
        raise ValueError(f"{source} is not the {model_class.__name__} that its config describes: {words}.")


def layer_fields(config: LiLiCorrConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in (*LAYER_FIELDS, *OUR_FIELDS)}


def dflash_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """As z-lab publishes drafters. The rotary base stands where both generations of transformers look for it."""
    refuse_convolutions(checkpoint)
    return drafter_config(checkpoint)


def refuse_convolutions(checkpoint: Checkpoint) -> None:
    if checkpoint.config.conv_kernel_size:
        raise ValueError("This format has no place for a drafter with convolutions (`conv_kernel_size`).")


def drafter_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The fields of a drafter in z-lab's layout, on which the served one builds."""
    config = checkpoint.config
    rope: dict[str, Any] = dict(config.rope_parameters or {})
    theta = rope.pop("rope_theta")
    return layer_fields(config) | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": config.target_layer_ids},
        "num_target_layers": config.num_target_layers,
        "rope_theta": theta,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "tie_word_embeddings": False,
        "torch_dtype": str(checkpoint.dtype).removeprefix("torch."),
        "use_sliding_window": False,
    }


def served_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """As nvidia-modelopt exports a drafter with its head."""
    fields = drafter_config(checkpoint)
    head = {theirs: getattr(checkpoint.config, ours) for theirs, ours in SERVED_HEAD_FIELDS.items()}
    if checkpoint.config.conv_kernel_size:
        head |= {name: getattr(checkpoint.config, name) for name in ("conv_kernel_size", "conv_group_size")}
    fields["architectures"] = ["LiLiCorrDraftModel"]
    fields["dflash_config"] |= {"causal": False, "projector_type": "lilicorr", "lilicorr_enabled": True} | head
    return fields


def engine_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """As served, for engines whose kernels take only some widths of the lattice."""
    k = checkpoint.config.candidate_topk
    if k > 16 or k & (k - 1):
        raise ValueError(f"SGLang and vLLM want `candidate_topk` to be a power of two up to 16, this head has {k}.")
    return served_config(checkpoint)


def native_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Of the DFlash assistants that transformers itself runs with `speculation_type="dflash"`."""
    config = checkpoint.config
    refuse_convolutions(checkpoint)
    if config.attention_bias:
        raise ValueError("transformers' own DFlash assistants have no biases in attention, this drafter does.")
    return layer_fields(config) | {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        "block_size": config.block_size,
        "bos_token_id": None,
        "dtype": str(checkpoint.dtype).removeprefix("torch."),
        "eos_token_id": None,
        "mask_token_id": config.mask_token_id,
        "num_target_layers": config.num_target_layers,
        "pad_token_id": None,
        "rope_parameters": config.rope_parameters,
        "target_layer_ids": config.target_layer_ids,
    }


def no_renames(config: LiLiCorrConfig) -> dict[str, str]:
    return {}


@dataclass(frozen=True)
class Format:
    """
    Args:
        loads (`str`): who loads it.
        head (`bool`): whether it holds a head; `None` for with or without.
        config (`Callable`): the content of config.json; `None` for our own, which comes with its code.
        modules (`Callable`): its name of each module that has another name with us.
    """

    loads: str
    head: bool | None
    config: Callable[[Checkpoint], dict[str, Any]] | None
    modules: Callable[[LiLiCorrConfig], dict[str, str]] = no_renames


FORMATS = {
    "lilicorr": Format("lilicorr_hf, and transformers with trust_remote_code", None, None),
    "modelopt": Format("nvidia-modelopt, TensorRT-LLM", True, served_config),
    "sglang": Format("SGLang", True, engine_config, engine_modules),
    "vllm": Format("vLLM", True, engine_config, engine_modules),
    "dflash": Format("z-lab's dflash, and SGLang and vLLM without a head", False, dflash_config),
    "transformers": Format('speculation_type="dflash"', False, native_config, lambda config: NATIVE_MODULES),
}


def write_checkpoint(checkpoint: Checkpoint, folder: str | os.PathLike, to: str, max_shard_size: str = "5GB") -> None:
    """Writes a checkpoint; the folder appears complete or not at all.

    Args:
        checkpoint ([`Checkpoint`]): a head that the format has no place for has to be taken off it before.
        folder (path): new or empty.
        to (`str`): one of [`FORMATS`].
        max_shard_size (`str`): of one file of weights.

    Raises:
        `ValueError`: if the format cannot hold this checkpoint, naming why.
        `FileExistsError`: if there is something in the folder.
    """
    form, folder = find_format(to), Path(folder)
    if checkpoint.model_class is DSparkModel and form.config is not None:
        raise ValueError(f"`{to}` has no place for a DSpark drafter; write `lilicorr`.")
    if form.head is not None and form.head != checkpoint.has_head:
        advice = (
            "train one (`head='init'` starts it), or write `dflash`" if form.head else "leave it out: `head='drop'`"
        )
        raise ValueError(f"`{to}` is a format {'of' if form.head else 'without'} a head: {advice}.")
    if folder.is_dir() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; give a new folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        half_done = Path(scratch) / "checkpoint"
        half_done.mkdir()
        if form.config is None:
            write_own_config(checkpoint, half_done)
        else:
            text = json.dumps(form.config(checkpoint), indent=2, sort_keys=True)
            (half_done / "config.json").write_text(text + "\n", encoding="utf-8")
        tensors = rename(checkpoint.tensors, form.modules(checkpoint.config))
        save_torch_state_dict(tensors, half_done, max_shard_size=max_shard_size, metadata={"format": "pt"})
        half_done.replace(folder)


def write_own_config(checkpoint: Checkpoint, folder: Path) -> None:
    """Our config.json, and the code that loads the folder where the package is not installed."""
    fields = {name: value for name, value in checkpoint.config.to_dict().items() if name != "auto_map"}
    config: Any = LiLiCorrConfig(**fields)
    config.architectures = [checkpoint.model_class.__name__]
    config.dtype = checkpoint.dtype
    with torch.device("meta"):
        custom_object_save(checkpoint.model_class(config), folder, config=config)
    config.save_pretrained(folder)


def find_format(name: str) -> Format:
    if name not in FORMATS:
        raise ValueError(f"Unknown format {name!r}; known are {sorted(FORMATS)}.")
    return FORMATS[name]


def convert(
    source: str | os.PathLike,
    folder: str | os.PathLike,
    to: str = "lilicorr",
    head: str = "keep",
    revision: str | None = None,
    seed: int = 0,
    **stated: Any,
) -> Checkpoint:
    """Writes a checkpoint in another format and returns what was written.

    Args:
        source, revision, stated: see [`read_checkpoint`].
        folder, to: see [`write_checkpoint`].
        head (`str`): `"keep"` what the source has; `"drop"` it; `"init"` a fresh one on a drafter that has none.
        seed (`int`): of a fresh head.

    Raises:
        `ValueError`, `OSError`: as both do, and for a `head` that does not go with the source.
    """
    find_format(to)
    checkpoint = read_checkpoint(source, revision, **stated)
    if head != "keep" and checkpoint.model_class is DSparkModel:
        raise ValueError(f"{source} is a DSpark drafter, trained as one with its head: `head='keep'` it.")
    if head == "init" and checkpoint.has_head:
        raise ValueError(f"{source} has a head, so none is initialised: `head='drop'` first.")
    if head == "init":
        checkpoint = checkpoint.with_fresh_head(seed)
    elif head == "drop":
        checkpoint = checkpoint.without_head()
    elif head != "keep":
        raise ValueError(f"`head` is one of 'keep', 'drop' and 'init', not {head!r}.")
    write_checkpoint(checkpoint, folder, to)
    return checkpoint

"""Loading a target together with its assistant."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .architectures import DRAFTERS, drafter_class
from .modeling.configuration_lilicorr import LiLiCorrConfig
from .modeling.logits_lilicorr import cpu_has_bf16
from .modeling.modeling_dflash import DFlashModel
from .targets import TARGETS, fetch_target


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


CHECKPOINTS = Path(__file__).parent / "checkpoints"
PAIRS = ("smollm2-135m",)


def resolve_target(target: str) -> str:
    """Folder of a target that [`fetch_target`] knows, fetched if need be; a path or Hub id as it is."""
    return str(fetch_target(target)) if target in TARGETS else target


def resolve_assistant(assistant: str) -> str:
    """Folder of a shipped assistant; a path or Hub id as it is."""
    return str(CHECKPOINTS / assistant) if assistant in PAIRS else assistant


def named_device(name: str) -> torch.device:
    """A device by its name; `auto` is an accelerator, if there is one."""
    if name != "auto":
        return torch.device(name)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def load_target(target: str, **kwargs) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """A causal language model and its tokenizer.

    Args:
        target (`str`): a name of [`TARGETS`], a path or a Hub id.
        kwargs: for `AutoModelForCausalLM.from_pretrained`, such as `dtype` or `device_map`.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_target(target)
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs), AutoTokenizer.from_pretrained(folder)


def assistant_class(folder: str) -> type[DFlashModel]:
    """The class that a checkpoint's config names; a plain drafter's where it names none of ours.

    Args:
        folder (`str`): a path or a Hub id.
    """
    names = LiLiCorrConfig.from_pretrained(folder).architectures or ()
    return drafter_class(next((name for name in names if name in DRAFTERS), "DFlashModel"))


def place_of(target: "PreTrainedModel") -> torch.device:
    """Where a target computes: its first device that is one, as weights on disk are on none until they are needed."""
    devices = (parameter.device for parameter in target.parameters() if parameter.device.type != "meta")
    return next(devices, torch.device("cpu"))


def draft_dtype(target: "PreTrainedModel") -> torch.dtype:
    """What a target's assistant computes in: bf16 beside fp32 on CPUs that multiply in it, else the target's dtype.

    Drafts need no more, and what they are verified by stays as it is.
    """
    coarse = target.dtype == torch.float32 and place_of(target).type == "cpu" and cpu_has_bf16()
    return torch.bfloat16 if coarse else target.dtype


def load_assistant(
    assistant: str, target: "PreTrainedModel", model_class: type[DFlashModel] | None = None, **fields: Any
) -> DFlashModel:
    """An assistant of a target, checked against it, on its device and in the dtype of [`draft_dtype`].

    Args:
        assistant (`str`): a shipped pair's name, a path or a Hub id.
        target (`PreTrainedModel`): the model it will draft for.
        model_class (`type`): by default the one that the checkpoint names. [`DFlashModel`] takes the drafter alone out
            of a checkpoint with a head.
        fields: of its config, to decode otherwise than the checkpoint says.
    """
    folder = resolve_assistant(assistant)
    model_class = model_class or assistant_class(folder)
    model = model_class.from_pretrained(folder, dtype=draft_dtype(target), device_map=place_of(target), **fields)
    model.check_target(target)
    return model


def load_pair(name: str, **kwargs) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase, DFlashModel]":
    """A shipped pair, ready for `model.generate(..., assistant_model=assistant)`.

    Args:
        name (`str`): `"smollm2-135m"`. Its target is fetched on first use.
        kwargs: for the target's `from_pretrained`, such as `dtype` or `device_map`; the assistant follows.

    Returns:
        target, tokenizer, assistant.

    Raises:
        `ValueError`: for an unknown name.
        `ConnectionError`: if the target is not there yet and cannot be downloaded.
    """
    if name not in PAIRS:
        raise ValueError(f"Unknown pair {name!r}; shipped are {sorted(PAIRS)}.")
    model, tokenizer = load_target(name, **kwargs)
    return model, tokenizer, load_assistant(name, model)

# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""The one wrap around transformers, by which `generate(assistant_model=...)` finds a block drafter's decoding loop."""

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import transformers
from transformers import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils import logging


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .modeling_dflash import DFlashModel

logger = logging.get_logger(__name__)

# Versions the exactness suite passes on; `make versions` runs it on each.
TESTED_TRANSFORMERS = ("5.20", "5.21", "5.22", "5.23", "5.24")

_stock_loop: ContextVar[bool] = ContextVar("lilicorr_stock_loop", default=False)


@contextmanager
def stock_loop() -> Iterator[None]:
    """Inside it, `generate(assistant_model=...)` of this thread (and task) runs a block drafter in transformers' own
    assisted loop, which takes one sequence, starts from an empty cache, looks at stopping criteria once a block and
    calls processors past the first rejected token. For comparison with [`BlockDecoder`], the loop that runs otherwise.
    """
    token = _stock_loop.set(True)
    try:
        yield
    finally:
        _stock_loop.reset(token)


def hook_decoding(original: Callable) -> Callable:
    """`_assisted_decoding` that hands the call to the assistant's own loop."""

    @functools.wraps(original)
    def _assisted_decoding(self, input_ids, *args, **kwargs):
        assistant = kwargs.get("assistant_model")
        if not runs_own_loop(self, assistant, kwargs["generation_config"]):
            return original(self, input_ids, *args, **kwargs)
        for name in ("assistant_model", "assistant_tokenizer", "inputs_tensor", "tokenizer"):
            kwargs.pop(name, None)
        return assistant.decode_blocks(self, input_ids, *args, **kwargs)

    return _assisted_decoding


def runs_own_loop(target: Any, assistant: Any, generation_config: Any) -> bool:
    """Whether a call is decoded by the assistant's own loop; by method, not by class, for the Hub's copies of it."""
    able = (
        callable(getattr(assistant, "decode_blocks", None)) and hooked(type(target), "_assisted_decoding") is not None
    )
    return able and generation_config.speculation_type is None and not _stock_loop.get()


def hook_candidate_generator(original: Callable) -> Callable:
    """`_get_candidate_generator` that first asks the assistant for its own generator."""

    @functools.wraps(original)
    def _get_candidate_generator(self, generation_config, *args, **kwargs):
        assistant = kwargs.get("assistant_model")
        if not drafts_blocks(assistant):
            return original(self, generation_config, *args, **kwargs)
        if generation_config.speculation_type is not None:
            if assistant.has_head:
                logger.warning_once(
                    f"`speculation_type={generation_config.speculation_type!r}` hands {type(assistant).__name__} to "
                    "transformers' own code, which runs its drafter alone and never asks its head."
                )
            return original(self, generation_config, *args, **kwargs)
        return assistant.get_candidate_generator(self, generation_config=generation_config, **kwargs)

    return _get_candidate_generator


def hook_validation(original: Callable) -> Callable:
    """`_validate_generation_mode` that first lets the assistant name a mismatch, before tokenizers are blamed."""

    @functools.wraps(original)
    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        assistant = generation_mode_kwargs.get("assistant_model")
        if drafts_blocks(assistant):
            assistant.check_target(self)
            if runs_own_loop(self, assistant, generation_config) and not self._is_stateful:
                # Our loop decodes like plain generation, so nothing else is refused than there.
                generation_mode = (
                    GenerationMode.SAMPLE if generation_config.do_sample else GenerationMode.GREEDY_SEARCH
                )
                generation_mode_kwargs = generation_mode_kwargs | {"assistant_model": None}
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    return _validate_generation_mode


def drafts_blocks(assistant: Any) -> bool:
    """Whether an assistant brings its own candidate generator; by method, not by class, for the Hub's copies of it."""
    return callable(getattr(assistant, "get_candidate_generator", None))


INSTANCE_WRAPPERS = {
    "_get_candidate_generator": hook_candidate_generator,
    "_validate_generation_mode": hook_validation,
}
# `generate` looks the loop up on the class.
WRAPPERS = {"_assisted_decoding": hook_decoding} | INSTANCE_WRAPPERS
EXPECTED_PARAMETERS = {
    "_assisted_decoding": {
        "input_ids",
        "logits_processor",
        "stopping_criteria",
        "generation_config",
        "synced_gpus",
        "streamer",
        "assistant_model",
    },
    "_get_candidate_generator": {
        "generation_config",
        "input_ids",
        "logits_processor",
        "model_kwargs",
        "assistant_model",
    },
    "_validate_generation_mode": {"generation_mode", "generation_config", "generation_mode_kwargs"},
}


def check_hook_points(owner: Any) -> None:
    """Raises if this transformers does not have the private methods the hook wraps."""
    for name, expected in EXPECTED_PARAMETERS.items():
        method = getattr(owner, name, None)
        if method is None or not expected <= set(inspect.signature(method).parameters):
            raise RuntimeError(
                f"transformers {transformers.__version__} has no `GenerationMixin.{name}` that this version of "
                f"lilicorr_hf knows, so `assistant_model=` cannot find a block drafter; tested with transformers are "
                f"{', '.join(TESTED_TRANSFORMERS)}. `generate(..., custom_generate=block_decoding(assistant))` needs "
                "no such method."
            )


def check_version(version: str) -> None:
    """Raises `ImportError` for a transformers that is too old, and warns once of one that nobody tested."""
    tested = ", ".join(TESTED_TRANSFORMERS)
    numbers = tuple(int(part) for part in version.split(".")[:2])
    known = [tuple(int(part) for part in name.split(".")) for name in TESTED_TRANSFORMERS]
    if numbers < min(known):
        raise ImportError(
            f"transformers {version} is too old for lilicorr_hf, which is tested with {tested}: "
            f"`pip install 'transformers>={TESTED_TRANSFORMERS[0]}'`."
        )
    if numbers not in known:
        logger.warning_once(
            f"lilicorr_hf is tested with transformers {tested}, not with {version}. Should text differ from plain "
            "decoding, that is the first thing to change."
        )


def hooked(owner: Any, name: str) -> Any:
    """Our wrapper around the method `name` of a class or instance, ours or another copy's, if there is one."""
    return getattr(getattr(owner, name, None), "_lilicorr_hook", None)


def wrap(owner: Any, name: str) -> Callable:
    return mark(WRAPPERS[name](getattr(owner, name)))


def mark(method: Any) -> Callable:
    # It points to itself: whoever wraps it with `functools.wraps` copies the mark, but is not what it points to.
    method._lilicorr_hook = method
    return method


def install_hook() -> None:
    """Makes `generate(assistant_model=...)` of every model use a block drafter's own decoding loop.

    Importing the package does it. It wraps three private methods of `GenerationMixin`, once however often and from
    however many copies of this file it is called; every other assistant goes the way it always went.

    Raises:
        `RuntimeError`: if this transformers has no such methods, naming the tested versions.
        `ImportError`: if it is older than those.
    """
    check_version(transformers.__version__)
    check_hook_points(GenerationMixin)
    for name in WRAPPERS:
        if hooked(GenerationMixin, name) is None:
            setattr(GenerationMixin, name, wrap(GenerationMixin, name))


def install_hook_or_refuse() -> None:
    """What importing does: where [`install_hook`] raises, `generate(assistant_model=...)` will, for block drafters.

    The import itself succeeds then, as `custom_generate` needs no hook; a transformers that is too old ends it.
    """
    try:
        install_hook()
    except RuntimeError as error:
        if hooked(GenerationMixin, "generate") is None:
            GenerationMixin.generate = mark(refuse_drafters(GenerationMixin.generate, str(error)))  # type: ignore[method-assign]


def refuse_drafters(original: Callable, reason: str) -> Callable:
    """`generate` that takes every assistant but a block drafter, unless for transformers' own DFlash loop."""

    @functools.wraps(original)
    def generate(self, *args, **kwargs):
        if drafts_blocks(kwargs.get("assistant_model")) and kwargs.get("speculation_type") is None:
            raise RuntimeError(reason)
        return original(self, *args, **kwargs)

    return generate


def uninstall_hook() -> None:
    """Takes [`install_hook`] back.

    Raises:
        `RuntimeError`: if something else wrapped the same methods since; taking ours out would take that out too.
    """
    names = (*WRAPPERS, "generate")
    ours = {name: hook for name in names if (hook := hooked(GenerationMixin, name)) is not None}
    for name, hook in ours.items():
        if getattr(GenerationMixin, name) is not hook:
            raise RuntimeError(f"`GenerationMixin.{name}` was wrapped again after lilicorr_hf; undo that first.")
    for name, hook in ours.items():
        setattr(GenerationMixin, name, hook.__wrapped__)


class Attachment:
    """What [`attach`] returns: ends with `detach()` or at the end of a `with` block."""

    def __init__(self, target: "PreTrainedModel"):
        self.target = target

    def detach(self) -> None:
        for name in INSTANCE_WRAPPERS:
            self.target.__dict__.pop(name, None)

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *exception) -> None:
        self.detach()


def attach(target: "PreTrainedModel", assistant: "DFlashModel") -> Attachment:
    """Makes `generate(assistant_model=...)` of this one target use block drafters, without the global hook, in
    transformers' own assisted loop; see [`stock_loop`] for what that cannot do and [`block_decoding`] for what can.

    Args:
        target (`PreTrainedModel`): the instance to wrap.
        assistant ([`DFlashModel`]): checked against the target at once.

    Raises:
        `ValueError`: if the two do not fit; see [`check_target`].
    """
    assistant.check_target(target)
    check_hook_points(type(target))
    for name in INSTANCE_WRAPPERS:
        if hooked(target, name) is None:
            target.__dict__[name] = types.MethodType(wrap(type(target), name), target)
    return Attachment(target)


__all__ = ["Attachment", "attach", "install_hook", "install_hook_or_refuse", "stock_loop", "uninstall_hook"]

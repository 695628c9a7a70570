# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""Fields of argument dataclasses."""

from dataclasses import MISSING, field, fields
from typing import Any

import torch

from lilicorr_hf.modeling.logits_lilicorr import cpu_has_bf16


def option(default: Any, text: str) -> Any:
    """A dataclass field with a default and the help text that the command line shows."""
    return field(default=default, metadata={"help": text})


def changed(arguments: Any) -> dict[str, Any]:
    """Fields of an arguments dataclass that are set to something else than their default."""
    defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(arguments)}
    given = {name: getattr(arguments, name) for name in defaults}
    return {name: value for name, value in given.items() if value is not None and value != defaults[name]}


def fast_dtype() -> str:
    """`"bfloat16"` where this machine multiplies in it; elsewhere it takes many times as long as `"float32"`."""
    return "bfloat16" if torch.accelerator.is_available() or cpu_has_bf16() else "float32"

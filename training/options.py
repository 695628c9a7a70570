# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""Fields of argument dataclasses."""

from dataclasses import field
from typing import Any


def option(default: Any, text: str) -> Any:
    """A dataclass field with a default and the help text that the command line shows."""
    return field(default=default, metadata={"help": text})

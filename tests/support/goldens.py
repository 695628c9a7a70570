"""Numbers that other implementations computed; see tests/golden."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file


GOLDEN = Path(__file__).parent.parent / "golden"


@dataclass
class Golden:
    """A case: its description and its tensors."""

    spec: dict
    tensors: dict[str, torch.Tensor]

    @classmethod
    def load(cls, case: str) -> "Golden":
        return cls(json.loads((GOLDEN / f"{case}.json").read_text()), load_file(GOLDEN / f"{case}.safetensors"))

    def inputs(self, name: str) -> torch.Tensor:
        return self.tensors[f"input.{name}"]

    def expected(self, name: str) -> torch.Tensor:
        return self.tensors[f"expected.{name}"]

    def parameters(self) -> dict[str, torch.Tensor]:
        return {k: v for k, v in self.tensors.items() if not k.startswith(("input.", "expected."))}

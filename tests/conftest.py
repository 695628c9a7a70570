import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import lilicorr_hf


# Tiny models are slower on many threads, far slower where something else keeps the cores busy.
torch.set_num_threads(1)

GOLDEN = Path(__file__).parent / "golden"


@dataclass
class Golden:
    """A case of `tests/golden`: numbers that other implementations computed."""

    spec: dict
    tensors: dict[str, torch.Tensor]

    def inputs(self, name: str) -> torch.Tensor:
        return self.tensors[f"input.{name}"]

    def expected(self, name: str) -> torch.Tensor:
        return self.tensors[f"expected.{name}"]

    def parameters(self) -> dict[str, torch.Tensor]:
        return {k: v for k, v in self.tensors.items() if not k.startswith(("input.", "expected."))}


@pytest.fixture(scope="session")
def golden():
    def load(case: str) -> Golden:
        return Golden(json.loads((GOLDEN / f"{case}.json").read_text()), load_file(GOLDEN / f"{case}.safetensors"))

    return load


@pytest.fixture(scope="session")
def smollm2():
    """The shipped pair on its real target, fetched on first use: model, tokenizer, assistant."""
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield lilicorr_hf.load_pair("smollm2-135m")
    torch.set_num_threads(threads)

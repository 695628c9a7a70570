from pathlib import Path

import pytest
import torch
from regeneration import word_tokenizer, write_rows
from tiny import tiny_target
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lilicorr_hf.training.data import Example, read_examples


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return word_tokenizer()


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    """Its answers neither end nor loop at once."""
    return tiny_target("llama", eos_token_id=2, initializer_range=0.2, num_hidden_layers=2).float()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Thirty ragged single prompts."""
    rows = [
        {
            "id": f"p{i}",
            "category": "chat",
            "source": "test",
            "prompt": " ".join(f"w{(i * k) % 58}" for k in range(1 + i % 9)),
        }
        for i in range(30)
    ]
    return write_rows(tmp_path / "prompts.jsonl", rows)


@pytest.fixture(scope="session")
def target() -> PreTrainedModel:
    return tiny_target("llama").float()


@pytest.fixture(scope="session")
def answered() -> list[torch.Tensor]:
    """Prompts of `examples`."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 63, (1, 4), generator=generator) for _ in range(8)]


@pytest.fixture(scope="session")
def examples(target, answered) -> list[Example]:
    """The target's own greedy answers."""
    answers = [target.generate(prompt, do_sample=False, max_new_tokens=24)[0, 4:].tolist() for prompt in answered]
    rows = [{"prompt_ids": p[0].tolist(), "response_ids": a} for p, a in zip(answered, answers, strict=True)]
    return read_examples(rows, None, 100, 5)

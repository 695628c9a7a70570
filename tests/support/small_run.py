"""A training run of seconds: a target's folder, its answers as token ids, and the YAML file to train on them."""

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from regeneration import write_rows
from transformers import PreTrainedModel, PreTrainedTokenizerBase


ROWS, MAX_ANCHORS = 8, 6


def small_settings(target: Path, **changes: Any) -> dict[str, Any]:
    """Options of a run of seconds on a tiny target: 4 steps, with checkpoints and evaluations at 2 and 4."""
    settings = {
        "target": str(target),
        "target_dtype": "float32",
        "eval_max_new_tokens": 8,
        "mask_token_id": 63,
        "block_size": 5,
        "num_layers": 2,
        "target_layer_ids": [0],
        "candidate_topk": 3,
        "head_hidden_size": 16,
        "head_num_heads": 2,
        "factor_dim": 12,
        "per_device_train_batch_size": 4,
        "max_anchors": MAX_ANCHORS,
        "max_steps": 4,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "bf16": False,
        "disable_tqdm": True,
    }
    return settings | changes


def write_small_run(folder: Path, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **changes: Any) -> Path:
    """The YAML file of a run of 4 steps with checkpoints and evaluations at 2 and 4; `changes` are of its options."""
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    prompts = [[1, 4, 6 + i, 20 + i] for i in range(ROWS)]
    rows = [
        {
            "prompt_ids": prompt,
            "response_ids": target.generate(torch.tensor([prompt]), max_new_tokens=16)[0, 4:].tolist(),
        }
        for prompt in prompts
    ]
    write_rows(folder / "answers.jsonl", rows)
    write_rows(folder / "held_out.jsonl", [{"prompt": f"w{i} w{2 * i}"} for i in range(3)])
    config = folder / "config.yaml"
    files = {"train_files": [str(folder / "answers.jsonl")], "eval_files": [str(folder / "held_out.jsonl")]}
    card = {"license": "apache-2.0", "datasets": ["somebody/prompts"]}
    settings = small_settings(folder / "target", output_dir=str(folder / "run"), **files, **card)
    config.write_text(yaml.safe_dump(settings | changes))
    return config


def supervised_blocks(answers: Path) -> int:
    """Blocks of one epoch over those answers: every answer's anchors but the last token's, at most `MAX_ANCHORS`."""
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    return sum(min(MAX_ANCHORS, len(row["response_ids"]) - 1) for row in rows)

"""A vocabulary of words, a dataset of them, and what regenerating it must give."""

import gzip
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lilicorr_hf.training.cohorts import find_loop
from lilicorr_hf.training.regenerate import RegenerateArguments


WORDS = ["<unk>", "<bos>", "<end>", "<system>", "<user>", "<assistant>", *(f"w{i}" for i in range(58))]
TEMPLATE = (
    "{{ '<bos> ' }}{% for m in messages %}{{ '<' + m.role + '> ' + m.content + ' <end> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def word_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        eos_token="<end>",
        additional_special_tokens=["<bos>", "<system>", "<user>", "<assistant>"],
    )
    made.chat_template = TEMPLATE
    return made


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: str | Path) -> list[dict]:
    with gzip.open(path, "rt") if str(path).endswith(".gz") else open(path) as lines:
        return [json.loads(line) for line in lines]


def arguments(dataset: Path, output: str = "out.jsonl.gz", **changes) -> RegenerateArguments:
    fields = {
        "target": "tiny",
        "dataset": str(dataset),
        "output": str(dataset.parent / output),
        "max_new_tokens": 40,
        "max_prompt_tokens": 100,
        "cohort_size": 8,
        "dtype": "float32",
        "server_backoff": 0.01,
    }
    return RegenerateArguments(**(fields | changes))


def plain_answer(model: PreTrainedModel, prompt_ids: list[int], args: RegenerateArguments) -> tuple[list[int], str]:
    """One row by `generate`, cut by the obvious loop rule."""
    ids = torch.tensor([prompt_ids])
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=args.max_new_tokens, pad_token_id=0
    )[0, len(prompt_ids) :].tolist()
    kept = find_loop(made, args.loop_period, args.loop_tokens)
    if kept is not None:
        return made[:kept], "rep"
    return made, "eos" if made[-1] == 2 else "len"

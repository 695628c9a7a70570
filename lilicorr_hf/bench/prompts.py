"""Prompts to decode: rows of JSONL files, spread over their categories, and lengthened on request."""

import json
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from lilicorr_hf.measure import encode


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Chat = list[dict[str, str]]


@dataclass(frozen=True)
class Prompt:
    """
    One row.

    Args:
        dataset (`str`): stem of its file.
        id (`str`): the row's own, or its line.
        category (`str`): of the row; empty if it has none.
        chat (list of messages): up to the first answer.
        follow_ups (tuple of `str`): what the user says after each answer.
    """

    dataset: str
    id: str
    category: str
    chat: Chat
    follow_ups: tuple[str, ...] = ()

    @property
    def question(self) -> str:
        return self.chat[-1]["content"]


def read_prompts(path: str | Path) -> list[Prompt]:
    """Rows that hold `turns`, `messages` or `prompt`, in turns from every category, so that a few have some of each.

    Raises:
        `ValueError`: naming the line that cannot be read.
    """
    by_category: dict[str, list[Prompt]] = defaultdict(list)
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            prompt = read_row(Path(path), number, line)
            by_category[prompt.category].append(prompt)
    spread = [prompt for prompt in chain(*zip_longest(*by_category.values())) if prompt is not None]
    if not spread:
        raise ValueError(f"{path} holds no prompts.")
    return spread


def read_row(path: Path, number: int, line: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error}).") from error
    if "turns" in row:
        chat, follow_ups = as_chat(row["turns"][0]), tuple(row["turns"][1:])
    elif "messages" in row or "prompt" in row:
        chat, follow_ups = as_chat(row.get("messages") or row["prompt"]), ()
    else:
        raise ValueError(f"{path}, line {number}: expected `messages`, `turns` or `prompt`, got {sorted(row)}.")
    return Prompt(path.stem, str(row.get("id", number)), row.get("category") or "", chat, follow_ups)


def as_chat(prompt: str | Chat) -> Chat:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def lengthen(tokenizer: "PreTrainedTokenizerBase", prompts: list[Prompt], index: int, length: int) -> Prompt:
    """The prompt at `index` behind notes made of the file's other prompts, `length` tokens in all, or a few less.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): renders the chat and counts.
        prompts (list of [`Prompt`]): of one file; those after `index` come first, again and again if need be.
        length (`int`): tokens of the rendered chat.

    Raises:
        `ValueError`: if the prompt is longer than that by itself.
    """
    prompt, others = prompts[index], [*prompts[index + 1 :], *prompts[: index + 1]]
    notes = "\n\n".join(f"Note {n}.\n{other.question}" for n, other in enumerate(others, start=1))
    note_ids = tokenizer(notes, add_special_tokens=False)["input_ids"]
    note_ids = note_ids * (length // len(note_ids) + 1)

    def with_notes(count: int) -> Chat:
        text = f"{tokenizer.decode(note_ids[:count])}\n\n" if count else ""
        return [*prompt.chat[:-1], prompt.chat[-1] | {"content": text + prompt.question}]

    def size(count: int) -> int:
        return encode(tokenizer, with_notes(count))["input_ids"].shape[1]

    count = length - size(0)
    if count < 0:
        raise ValueError(f"{prompt.dataset}, {prompt.id}: the prompt alone has more than {length} tokens.")
    # Where notes meet the question, or the cut falls inside a word, tokens merge or split: once or twice.
    while (excess := size(count) - length) > 0:
        count -= excess
    return Prompt(prompt.dataset, prompt.id, prompt.category, with_notes(count))

# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""Rows of any of the usual formats as token ids with a mask of what the target wrote, and the anchors of each epoch.

Shapes: `b` rows, `T` tokens of the longest row, `N` blocks of the row with most.
"""

import itertools
import random
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from .conversations import render


SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass
class Example:
    """One sequence: token ids, whether the target wrote each of them, and at how many of the last no block starts."""

    input_ids: list[int]
    loss_mask: list[int]
    closed: int = 1

    def truncated(self, max_length: int, block_size: int) -> "Example":
        """The first `max_length` tokens, where every block has the supervised slots that it has in the whole: none
        starts where one of them would be cut off."""
        if len(self.input_ids) <= max_length:
            return self
        cut_off = self.loss_mask[max_length : max_length + block_size - 1]
        closed = block_size - 1 - cut_off.index(1) if 1 in cut_off else 1
        return Example(self.input_ids[:max_length], self.loss_mask[:max_length], closed)

    @property
    def position_ids(self) -> list[int]:
        return list(range(len(self.input_ids)))

    @property
    def anchors(self) -> list[int]:
        """Positions a block may start at: a written token that a written token follows."""
        mask = self.loss_mask
        return [i for i in range(len(mask) - self.closed) if mask[i] and mask[i + 1]]


def read_examples(
    rows: Iterable[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase | None,
    max_length: int,
    block_size: int,
    end_ids: Sequence[int] = (),
) -> list[Example]:
    """Examples of rows with `prompt_ids` and `response_ids`, `messages`, `prompt` and `completion`, or ShareGPT's
    `conversations`; those without room for a single block are left out.

    Args:
        rows (iterable of `dict`): formats may be mixed.
        tokenizer (`PreTrainedTokenizerBase`): of the target; not needed for token ids.
        max_length (`int`): tokens kept of each row, from its start.
        block_size (`int`): of the drafter; no block starts where truncation would cut supervised slots off it.
        end_ids (sequence of `int`): tokens that end an answer of the target, beside the tokenizer's own.

    Raises:
        `ValueError`: for a row of no known format, or if nothing in any row would be trained on.
    """
    examples = [
        example.truncated(max_length, block_size)
        for number, row in enumerate(rows, 1)
        for example in parse(row, tokenizer, number, end_ids)
    ]
    usable = [example for example in examples if example.anchors]
    if not usable:
        raise ValueError(
            f"None of {len(examples)} examples has room for a block in its first {max_length} tokens: nothing would "
            "be trained on. Check the roles of the messages, the chat template and `max_length`."
        )
    return usable


def split_held_out(examples: Iterable[Example], share: float) -> tuple[list[Example], list[Example]]:
    """Examples to train on, and a share of them to keep out; which ones depends on nothing but their tokens, so that
    runs on more data, or resumed ones, keep out the same."""
    kept: list[Example] = []
    held_out: list[Example] = []
    for example in examples:
        place = zlib.crc32(str(example.input_ids).encode()) / 2**32
        (held_out if place < share else kept).append(example)
    return kept, held_out


def parse(
    row: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None, number: int, end_ids: Sequence[int]
) -> list[Example]:
    """The examples of one row; several where the template renders earlier turns differently later on."""
    if "prompt_ids" in row and "response_ids" in row:
        prompt, response = list(row["prompt_ids"]), list(row["response_ids"])
        return [Example(prompt + response, [0] * len(prompt) + [1] * len(response))]
    messages = messages_of(row)
    if messages is None:
        raise ValueError(
            f"Row {number} has none of `messages`, `prompt` and `completion`, `conversations`, or `prompt_ids` and "
            f"`response_ids`; it has {sorted(row)}."
        )
    if tokenizer is None:
        raise ValueError(f"Row {number} is text; give the target's tokenizer to read it.")
    return supervise(messages, tokenizer, {tokenizer.eos_token_id, *end_ids})


def messages_of(row: dict[str, Any]) -> list[dict[str, str]] | None:
    if "messages" in row:
        return row["messages"]
    if "conversations" in row:
        turns = row["conversations"]
        return [{"role": SHAREGPT_ROLES[turn["from"]], "content": turn["value"]} for turn in turns]
    if "prompt" in row and "completion" in row:
        turns = []
        for role, text in (("user", row["prompt"]), ("assistant", row["completion"])):
            turns += [{"role": role, "content": text}] if isinstance(text, str) else text
        return turns
    return None


def supervise(
    messages: Sequence[dict[str, str]], tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int | None]
) -> list[Example]:
    """Token ids of a chat with every assistant turn supervised, from its first token to its end token.

    The mask is derived by rendering: an answer is what the template adds to the prompt that serving would have sent,
    so no `{% generation %}` marks are needed and both see the same ids. One sequence holds all turns as long as the
    template keeps what it rendered before; where it rewrites earlier turns, a new example begins.

    Raises:
        `ValueError`: if the supervised ids do not decode to the answers, so that the template cannot be trained on.
    """
    examples: list[Example] = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(tokenizer, messages[:turn], add_generation_prompt=True)
        whole = render(tokenizer, messages[: turn + 1], add_generation_prompt=False)
        if whole[: len(prompt)] != prompt:
            raise ValueError(
                "The chat template does not render an answer behind its own generation prompt, so what the target "
                f"wrote cannot be told apart. Prompt: {tokenizer.decode(prompt)[-60:]!r}."
            )
        answer = cut_after_end(whole[len(prompt) :], end_ids)
        check_decodes(answer, message["content"], tokenizer)
        previous = examples[-1] if examples else None
        if previous is None or prompt[: len(previous.input_ids)] != previous.input_ids:
            previous = Example([], [])
            examples.append(previous)
        start = len(previous.input_ids)
        previous.loss_mask += [0] * (len(prompt) - start) + [1] * len(answer)
        previous.input_ids += prompt[start:] + answer
    return examples


def cut_after_end(answer: list[int], end_ids: Collection[int | None]) -> list[int]:
    """The answer up to its end token; what a template puts behind that was not written by the target."""
    length = next((place for place, token in enumerate(answer, 1) if token in end_ids), len(answer))
    return answer[:length]


def check_decodes(answer: list[int], content: str, tokenizer: PreTrainedTokenizerBase) -> None:
    text = str(tokenizer.decode(answer, skip_special_tokens=True))
    if text.strip() != content.strip():
        raise ValueError(
            f"The supervised tokens read {text[:80]!r} where the answer is {content[:80]!r}: the chat template "
            "changes answers, and training on it would not match serving."
        )


class BlockDataset(Dataset):
    """Examples with the anchors of the current epoch, drawn anew each epoch and the same in every run.

    Args:
        examples (sequence of [`Example`]).
        max_anchors (`int`): blocks taken of one example at most.
        seed (`int`): an example's anchors depend on it, the epoch and the example's index alone.
    """

    def __init__(self, examples: Sequence[Example], max_anchors: int, seed: int = 0):
        self.examples, self.max_anchors, self.seed = examples, max_anchors, seed
        # Set by the trainer. A `set_epoch` method would also be called by accelerate, with a count that starts anew on
        # resuming.
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.examples)

    def written_ids(self) -> Iterator[list[int]]:
        """The tokens that the target wrote, of each example."""
        for example in self.examples:
            yield list(itertools.compress(example.input_ids, example.loss_mask))

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        example = self.examples[index]
        possible = example.anchors
        rng = random.Random(f"{self.seed} {self.epoch} {index}")
        anchors = sorted(rng.sample(possible, min(self.max_anchors, len(possible))))
        names = ("input_ids", "loss_mask", "position_ids")
        return {name: getattr(example, name) for name in names} | {"anchors": anchors}


def collate(rows: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Rows padded on the right: `input_ids`, `loss_mask`, `position_ids` `[b, T]`; their `lengths` `[b]`; `anchors`,
    `keep` `[b, N]`."""

    def padded(lists: list[list[int]]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in lists], batch_first=True)

    input_ids = padded([row["input_ids"] for row in rows])
    width = input_ids.shape[1]
    positions = [row["position_ids"] for row in rows]
    return {
        "input_ids": input_ids,
        "loss_mask": padded([row["loss_mask"] for row in rows]),
        "lengths": torch.tensor([len(row["input_ids"]) for row in rows]),
        # Padding goes on from the last document, so that rows of one document need no mask at all.
        "position_ids": padded([[*row, *range(row[-1] + 1, row[-1] + 1 + width - len(row))] for row in positions]),
        "anchors": padded([row["anchors"] for row in rows]),
        "keep": padded([[1] * len(row["anchors"]) for row in rows]).bool(),
    }

# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""Conversations: read from a file or dataset, planned into cohorts, and answered again turn by turn by a target.

System and user turns are kept, every assistant turn is replaced in order. A *cohort* is a group of conversations with
prompts of similar length that are answered, and written, together. No tensors here: token ids are lists of `int`.
"""

import gzip
import importlib
import json
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, cast

from transformers import PreTrainedTokenizerBase


WINDOW_COHORTS = 32  # prompts are sorted by length within a window of this many cohorts

Message = dict[str, str]
Row = dict[str, Any]
Progress = Callable[[int, int], None]  # (answers finished, tokens decoded) since the last call


@dataclass(frozen=True)
class Conversation:
    """The fixed part of a conversation: `turns[k]` are the system and user messages just before answer k."""

    id: str
    turns: tuple[tuple[Message, ...], ...]
    labels: dict[str, Any]  # category and source, where the row had them

    @property
    def row_ids(self) -> list[str]:
        """The output id of each answer: the conversation's own, or `id#turn` if it has several."""
        return [self.id] if len(self.turns) == 1 else [f"{self.id}#{turn}" for turn in range(len(self.turns))]


@dataclass(frozen=True)
class Request:
    """One answer to make: the messages so far and the same rendered with the generation prompt."""

    row_id: str
    messages: list[Message]
    prompt_ids: list[int]


@dataclass(frozen=True)
class Answer:
    """Ids of one answer, its end token included if `stop` is "eos"."""

    response_ids: list[int]
    stop: str


class Target(Protocol):
    """Whatever answers: the model in this process, or a server."""

    def answer(self, requests: Sequence[Request], progress: Progress) -> list[Answer]:
        """One answer for each request, in their order."""


def parse_conversation(row: Row, index: int, where: str) -> Conversation:
    """A conversation from a row with `messages`, or `prompt` (text or messages). Consecutive messages that are not the
    assistant's form one turn; a conversation that ends with a user turn gets an answer to that too.

    Raises:
        ValueError: the row has neither field, an unknown role, a message without text, or nothing to answer.
    """
    messages = row.get("messages") or row.get("prompt")
    if messages and isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not messages or not isinstance(messages, list):
        raise ValueError(f"{where}: the row has no `messages` and no `prompt`, only {sorted(row)}")
    turns: list[list[Message]] = [[]]
    for message in messages:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in ("system", "user", "assistant") or not isinstance(content, str):
            raise ValueError(f"{where}: expected text of a system, user or assistant turn, found {message!r:.200}")
        if role != "assistant":
            turns[-1].append({"role": role, "content": content})
        elif turns[-1]:
            turns.append([])
    kept = tuple(tuple(turn) for turn in turns if turn)
    if not kept or any(turn[-1]["role"] != "user" for turn in kept):
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(f"{where}: an assistant turn must follow a user turn, but the roles are {roles}")
    identity = str(index) if row.get("id") is None else str(row["id"])
    return Conversation(identity, kept, {key: row[key] for key in ("category", "source") if key in row})


def read_jsonl(path: Path) -> Iterator[tuple[str, Row]]:
    """`(place, row)` for every line of a JSONL file, gzipped if its name ends in .gz; blank lines are passed over.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not a JSON object, or the file is not readable as text.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        number = 0
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError("the line is not a JSON object")
                    yield f"{path}, line {number}", row
        except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path}, at line {max(number, 1)}: {error}") from error


def read_rows(name: str, config: str | None = None, split: str = "train") -> Iterator[tuple[str, Row]]:
    """`(place, row)` of a JSONL file, or else of a dataset, see `open_dataset`, without the fields a row leaves empty.
    Raises like both.
    """
    path = Path(name)
    if not path.is_dir() and (path.exists() or path.is_absolute() or name.endswith((".jsonl", ".jsonl.gz", ".json"))):
        yield from read_jsonl(path)
        return
    for number, row in enumerate(open_dataset(name, config, split), 1):
        # Arrow gives every row every field that any row has.
        yield f"{name}, row {number}", {key: value for key, value in row.items() if value is not None}


def open_dataset(name: str, config: str | None, split: str) -> Iterable[Row]:
    """Rows of a folder that `save_to_disk` wrote, or of whatever `datasets.load_dataset` finds under a name: a folder
    of JSONL or Parquet files, or a dataset of the Hub.

    Raises:
        ImportError: without `datasets`.
        ValueError, OSError: there is no such dataset, configuration or split.
    """
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ImportError(
            f'{name} is not a file; to read it as a dataset, `pip install "lilicorr_hf[train]"`'
        ) from error
    if not any((Path(name) / mark).is_file() for mark in ("state.json", "dataset_dict.json")):
        return datasets.load_dataset(name, config, split=split)
    saved = datasets.load_from_disk(name)
    if not isinstance(saved, dict):
        return saved
    if split not in saved:
        raise ValueError(f"{name} has no split {split!r}, only {sorted(saved)}")
    return saved[split]


def read_conversations(dataset: str, config: str | None, split: str, limit: int | None) -> list[Conversation]:
    """The conversations of the first `limit` rows. Raises like `read_rows`.

    Raises:
        ValueError: a row is unusable, two rows would get the same output id, or there are no rows.
    """
    places: dict[str, str] = {}
    conversations = []
    for index, (where, row) in enumerate(islice(read_rows(dataset, config, split), limit)):
        conversations.append(parse_conversation(row, index, where))
        for row_id in conversations[-1].row_ids:
            if row_id in places:
                raise ValueError(f"{where}: the id {row_id!r} was used before, at {places[row_id]}")
            places[row_id] = where
    if not conversations:
        raise ValueError(f"{dataset} has no rows")
    return conversations


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], add_generation_prompt: bool = True
) -> list[int]:
    """Ids of the messages in the chat template, ready for an answer or not; reasoning off, where it knows that."""
    ids = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=add_generation_prompt, enable_thinking=False, return_dict=False
    )
    return cast(list[int], ids)


def plan_cohorts(lengths: Mapping[int, int], size: int, tokens: int, seed: int) -> list[list[int]]:
    """Keys of `lengths` in cohorts of similar length, at most `size` rows and `tokens` padded tokens each (a single
    row may be longer). The cohorts come shuffled, so that an unfinished output is no sample of short prompts.
    """
    cohorts: list[list[int]] = []
    for index in sorted(lengths, key=lengths.__getitem__):
        if not cohorts or len(cohorts[-1]) == size or (len(cohorts[-1]) + 1) * lengths[index] > tokens:
            cohorts.append([])
        cohorts[-1].append(index)
    random.Random(seed).shuffle(cohorts)
    return cohorts


def cohorts_of(
    conversations: Sequence[Conversation],
    done: Set[str],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    size: int,
    tokens: int,
    seed: int,
) -> Iterator[list[Conversation]]:
    """Cohorts (see `plan_cohorts`) of the conversations whose first row is not in `done`. They are planned over all
    conversations and thinned out afterwards, so a resumed run meets the same cohorts as an uninterrupted one. Prompts
    too long for a first answer are left out.
    """
    window = WINDOW_COHORTS * size
    for start in range(0, len(conversations), window):
        part = conversations[start : start + window]
        left = [conversation.row_ids[0] not in done for conversation in part]
        if not any(left):
            continue
        lengths = {row: len(render(tokenizer, each.turns[0])) for row, each in enumerate(part)}
        fitting = {row: length for row, length in lengths.items() if length <= max_prompt_tokens}
        for rows in plan_cohorts(fitting, size, tokens, seed):
            if cohort := [part[row] for row in rows if left[row]]:
                yield cohort


def answer_conversations(
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    max_prompt_tokens: int,
    progress: Progress,
) -> list[Row]:
    """Output rows of a cohort, those of one conversation in a row. Turn k of all conversations is decoded together,
    then turn k+1 behind the new answers; a conversation stops where its prompt has become too long.
    """
    messages: list[list[Message]] = [[] for _ in conversations]
    rows: list[list[Row]] = [[] for _ in conversations]
    live = list(range(len(conversations)))
    for turn in range(max(len(conversation.turns) for conversation in conversations)):
        requests = {}
        for index in [index for index in live if turn < len(conversations[index].turns)]:
            messages[index] += conversations[index].turns[turn]
            prompt_ids = render(tokenizer, messages[index])
            if len(prompt_ids) <= max_prompt_tokens:
                requests[index] = Request(conversations[index].row_ids[turn], list(messages[index]), prompt_ids)
        live = list(requests)
        if not live:
            break
        for index, answer in zip(live, target.answer(list(requests.values()), progress), strict=True):
            text = tokenizer.decode(answer.response_ids, skip_special_tokens=True)
            messages[index].append({"role": "assistant", "content": str(text)})
            rows[index].append(
                {"id": requests[index].row_id, **conversations[index].labels, "messages": list(messages[index])}
                | {"prompt_ids": requests[index].prompt_ids, "response_ids": answer.response_ids, "stop": answer.stop}
            )
    return [row for group in rows for row in group]

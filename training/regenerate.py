# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""Training data for a drafter: every assistant turn of a set of conversations, written again by the target model.

A drafter learns to predict the target, so the answers it learns from must be the target's own. Each answer becomes one
JSON line for the trainer. A cohort's lines are appended to the output together, as one complete gzip member (or as
whole lines), so a run may be killed at any moment and started again with the same command.

Where other work keeps some of the cores busy, set `OMP_NUM_THREADS` to the number of free ones: threads wait for the
slowest.
"""

import gzip
import hashlib
import json
import os
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from tqdm.auto import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from lilicorr_hf.pairs import resolve_target

from .cohorts import DecodingArguments, LocalTarget
from .conversations import (
    Conversation,
    Row,
    Target,
    answer_conversations,
    cohorts_of,
    read_conversations,
    read_jsonl,
)
from .memory import keep_freed_memory
from .options import fast_dtype, option
from .server import ServerArguments, ServerTarget


if sys.platform != "win32":
    import fcntl

logger = logging.get_logger(__name__)


@dataclass(kw_only=True)
class RegenerateArguments(ServerArguments):
    """What to regenerate, and how; `server` decides where."""

    dataset: str = field(metadata={"help": "A .jsonl or .jsonl.gz file, or a folder or name of a `datasets` dataset."})
    output: str = field(metadata={"help": "The .jsonl or .jsonl.gz file to write; an existing one is resumed."})
    dataset_config: str | None = option(None, "Configuration of a `datasets` dataset.")
    dataset_split: str = option("train", "Split of a `datasets` dataset.")
    limit: int | None = option(None, "Use only the first rows of the dataset.")
    exclude: list[str] | None = option(None, "JSONL(.gz) files; rows whose `id` occurs in one are left out.")
    cohort_size: int = option(320, "Most conversations decoded, and written, together.")
    cohort_tokens: int = option(65_536, "Most padded prompt tokens of a cohort; bounds the memory of its prefill.")
    dtype: str = option(fast_dtype(), "Type of the weights: bfloat16, float16 or float32.")
    device: str | None = option(None, "Where to run the target; by default a GPU if there is one.")

    def __post_init__(self) -> None:
        """Refuses values that could not work, naming the field."""
        positive = ("max_new_tokens", "max_prompt_tokens", "cohort_size", "cohort_tokens", "server_concurrency")
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("temperature", "top_k", "loop_period", "loop_tokens", "server_retries"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, but is {getattr(self, name)}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"dtype must be bfloat16, float16 or float32, not {self.dtype!r}")
        if not self.output.endswith((".jsonl", ".jsonl.gz")):
            raise ValueError(f"output must end in .jsonl or .jsonl.gz, not {self.output!r}")


@dataclass
class RegenerateReport:
    """What one call did. `tokens` counts the `answers` of this call; skipped turns are counted in answers too."""

    answers: int = 0
    tokens: int = 0
    stops: dict[str, int] = field(default_factory=dict)
    skipped_long: int = 0
    already_done: int = 0
    excluded: int = 0
    seconds: float = 0.0

    def count(self, rows: Sequence[Row]) -> None:
        """Adds the rows of a cohort."""
        self.answers += len(rows)
        self.tokens += sum(len(row["response_ids"]) for row in rows)
        self.stops = dict(Counter(self.stops) + Counter(row["stop"] for row in rows))


def settings_of(args: RegenerateArguments, tokenizer: PreTrainedTokenizerBase, dtype: str) -> dict[str, Any]:
    """Everything that decides an answer; rows made under other settings do not belong in the same file."""
    settings = {each.name: getattr(args, each.name) for each in fields(DecodingArguments)}
    settings["seed"] = args.seed if args.temperature > 0 else None
    template = hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:16]
    return settings | {"chat_template": template, "made_by": "server" if args.server else dtype}


def check_sidecar(output: Path, settings: dict[str, Any]) -> None:
    """Writes `OUTPUT.meta.json` beside an output that is still empty, or compares it.

    Raises:
        ValueError: the output has rows but no sidecar, or they were made with other settings.
    """
    sidecar = output.with_name(output.name + ".meta.json")
    if not output.stat().st_size:
        part = sidecar.with_name(sidecar.name + ".part")
        part.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        os.replace(part, sidecar)  # a kill leaves either no sidecar or a whole one
        return
    if not sidecar.exists():
        raise ValueError(f"{output} exists without {sidecar.name}, so it may hold another target's answers")
    before = json.loads(sidecar.read_text(encoding="utf-8"))
    changed = [key for key in settings if before.get(key) != settings[key]]
    if changed:
        told = "; ".join(f"{key} was {before.get(key)!r}, is now {settings[key]!r}" for key in changed)
        raise ValueError(f"{output} was made with other settings ({told}); choose another output")


def complete_pieces(file: BinaryIO, gzipped: bool) -> Iterator[tuple[int, bytes]]:
    """`(end offset, text)` of every complete gzip member, or complete line, from the start of the file.

    Raises:
        zlib.error: a member is damaged (a member that merely ends early is not).
    """
    if not gzipped:
        end = 0
        for line in file:
            end += len(line)
            if line.endswith(b"\n"):
                yield end, line
        return
    inflate, text, read = zlib.decompressobj(31), bytearray(), 0
    while chunk := file.read(1 << 20):
        read += len(chunk)
        while chunk:
            text += inflate.decompress(chunk)
            chunk = inflate.unused_data  # empty until a member has ended
            if inflate.eof:
                yield read - len(chunk), bytes(text)
                inflate, text = zlib.decompressobj(31), bytearray()


def recover(output: Path, conversations: Iterable[Conversation]) -> set[str]:
    """Ids of the rows in `output`, after cutting off what a kill left at its end: a torn member or line and, in a
    plain file, the rows of a last conversation that lacks some of its turns.

    Raises:
        ValueError: the file is damaged elsewhere than at its end, or the row of one of these conversations answers
            another question.
    """
    asked = {row_id: conversation for conversation in conversations for row_id in conversation.row_ids}
    found: list[tuple[int, list[str]]] = [(0, [])]  # (end offset, ids) of each piece
    foreign = None
    try:
        with output.open("rb") as file:
            for end, text in complete_pieces(file, output.suffix == ".gz"):
                rows = [json.loads(line) for line in text.splitlines()]
                found.append((end, [str(row["id"]) for row in rows]))
                strangers = (row["id"] for row in rows if not answers(row, asked.get(row["id"])))
                foreign = next(strangers, None) if foreign is None else foreign
    except (zlib.error, ValueError, KeyError) as error:
        raise ValueError(f"{output} is damaged after byte {found[-1][0]}: {error}") from error
    if foreign is not None:
        raise ValueError(
            f"{output} has an answer to another question as {foreign!r}: it was made from another dataset; choose "
            "another output, or give rows an `id` of their own"
        )
    if output.suffix != ".gz" and len(found) > 1:
        last = asked[found[-1][1][0]].row_ids if found[-1][1][0] in asked else found[-1][1]
        if found[-1][1][0] != last[-1]:
            while found[-1][1] and found[-1][1][0] in last:
                found.pop()
    if output.stat().st_size > found[-1][0]:
        logger.warning(f"{output}: dropped an unfinished write after byte {found[-1][0]}")
        os.truncate(output, found[-1][0])
    return {row_id for _, ids in found for row_id in ids}


def answers(row: Row, conversation: Conversation | None) -> bool:
    """Whether an output row is of that conversation, as far as one is asked for under its id."""
    if conversation is None:
        return True
    opening = list(conversation.turns[0])
    return row["messages"][: len(opening)] == opening


def append_rows(file: BinaryIO, rows: Sequence[Row], gzipped: bool) -> None:
    """Appends the rows as one gzip member, or as lines, in a single write, and waits until they are on the disk."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    file.write(gzip.compress(text, mtime=0) if gzipped else text)
    file.flush()
    os.fsync(file.fileno())


def lock(file: BinaryIO, output: Path) -> None:
    """Holds the output for this process, where the system can. Raises ValueError if another one is writing it."""
    if sys.platform != "win32":
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another process is writing {output}") from error


def load_target(
    args: RegenerateArguments, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | None
) -> Target:
    """The target that the arguments ask for; loads the weights if they are needed and not given."""
    if args.server:
        return ServerTarget(args.server, tokenizer, args)
    if model is None:
        device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
        loaded: Any = AutoModelForCausalLM.from_pretrained(resolve_target(args.target), dtype=args.dtype)
        model = loaded.to(device)
    return LocalTarget(model, tokenizer, args)


class _Bar:
    """Progress in answers with tokens per second; safe to call from several threads."""

    def __init__(self, total: int) -> None:
        self.bar = tqdm(total=total, unit="answer", smoothing=0, mininterval=1.0, dynamic_ncols=True)
        self.tokens, self.start, self.guard = 0, time.monotonic(), threading.Lock()

    def __call__(self, answers: int, tokens: int) -> None:
        with self.guard:
            self.tokens += tokens
            rate = self.tokens / (time.monotonic() - self.start)
            self.bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
            self.bar.update(answers)


def regenerate(
    args: RegenerateArguments, model: PreTrainedModel | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> RegenerateReport:
    """Regenerates the dataset into `args.output`, resuming it if it exists; every check comes before any decoding.

    Args:
        args: what to do.
        model: the target, if it is loaded already (`dtype` and `device` are then its own).
        tokenizer: its tokenizer, likewise.

    Raises:
        FileNotFoundError, ImportError: the input is not there, or `datasets` is missing to read it.
        ValueError: an unusable row, no chat template, or an output that belongs to other settings.
        ConnectionError: the server does not answer.
    """
    began = time.monotonic()
    conversations = read_conversations(args.dataset, args.dataset_config, args.dataset_split, args.limit)
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(resolve_target(args.target))
    if not tokenizer.chat_template:
        raise ValueError(f"the tokenizer of {args.target} has no chat template to render the turns with")
    left_out = {str(row.get("id")) for name in args.exclude or [] for _, row in read_jsonl(Path(name))}
    wanted = [each for each in conversations if not left_out & {each.id, each.row_ids[0]}]
    output, gzipped = Path(args.output), args.output.endswith(".gz")
    output.parent.mkdir(parents=True, exist_ok=True)
    dtype = args.dtype if model is None else str(model.dtype).removeprefix("torch.")
    report = RegenerateReport(excluded=len(conversations) - len(wanted))
    with output.open("ab") as file:
        lock(file, output)
        check_sidecar(output, settings_of(args, tokenizer, dtype))
        done = recover(output, wanted)
        todo = [each for each in wanted if each.row_ids[0] not in done]
        report.already_done = len(wanted) - len(todo)
        if todo:
            progress = _Bar(sum(len(each.turns) for each in todo))
            target = load_target(args, tokenizer, model)
            cohorts = cohorts_of(
                wanted, done, tokenizer, args.max_prompt_tokens, args.cohort_size, args.cohort_tokens, args.seed
            )
            for cohort in cohorts:
                rows = answer_conversations(target, tokenizer, cohort, args.max_prompt_tokens, progress)
                append_rows(file, rows, gzipped)
                report.count(rows)
            progress.bar.close()
    report.skipped_long = sum(len(each.turns) for each in todo) - report.answers
    report.seconds = time.monotonic() - began
    return report


def main(argv: list[str] | None = None) -> None:
    """`python -m lilicorr_hf.training.regenerate --target T --dataset D --output O`: runs and prints the report."""
    (args,) = HfArgumentParser(cast(Any, RegenerateArguments), prog="lilicorr regenerate").parse_args_into_dataclasses(
        argv
    )
    keep_freed_memory()
    sys.stdout.write(json.dumps(asdict(regenerate(args)), indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Every item decoded by every system in turn, and a file of results that a later run goes on from."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import BatchEncoding

from lilicorr_hf.measure import Run, encode_batch, first_divergence, mean_entropy, run_generate
from lilicorr_hf.modeling.generation_lilicorr import BlockRecord

from .plan import Condition, Item, Options
from .prompts import Chat, lengthen
from .systems import PLAIN, Setting, System


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WARM_UP_TOKENS = 6


class Runner:
    """
    Measures items.

    Args:
        model, tokenizer: the target.
        systems (list of [`System`]): plain decoding first.
        setting ([`Setting`]): they are built for.
        options ([`Options`]): the same for all items.
        watch (`bool`): as for [`run_generate`]; without it there are no acceptance lengths.
        warm_up_tokens (`int`): written by everyone before the first item of each size.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        systems: list[System],
        setting: Setting,
        options: Options,
        watch: bool = True,
        warm_up_tokens: int = WARM_UP_TOKENS,
    ):
        self.watch, self.warm_up_tokens = watch, warm_up_tokens
        self.model: Any = model
        self.tokenizer = tokenizer
        self.arguments = {system.label: system.build(setting) for system in systems}
        self.batching = {system.label for system in systems if system.batches}
        self.options = options
        self.warm: set[tuple[int, int | None]] = set()
        self.turns = 0

    def measure(self, item: Item) -> list[dict[str, Any]]:
        """One row of results for each turn of the conversations."""
        prompts, how = item.chosen, item.condition
        if how.length is not None:
            prompts = [lengthen(self.tokenizer, item.prompts, i, how.length) for i in item.indices]
        chats = [prompt.chat for prompt in prompts]
        # Conversations of a batch would differ in turns; those of lengthened prompts are about their first question.
        follow_ups = prompts[0].follow_ups if how == Condition(how.temperature, how.seed) else ()
        rows = []
        for turn in range(len(follow_ups) + 1):
            row, answers = self.measure_turn(chats, how)
            names = {"item": item.key, "dataset": prompts[0].dataset, "ids": [prompt.id for prompt in prompts]}
            rows.append(names | {"category": prompts[0].category, "turn": turn} | asdict(how) | row)
            if turn < len(follow_ups):
                chats = [go_on(chat, answers[0], follow_ups[turn]) for chat in chats]
        return rows

    def measure_turn(self, chats: list[Chat], how: Condition) -> tuple[dict[str, Any], list[str]]:
        """What every system took for one answer to each chat, and the plain answers."""
        inputs = encode_batch(self.tokenizer, chats).to(self.model.device)
        labels = [label for label in self.arguments if how.batch == 1 or label in self.batching]
        self.warm_up(labels, inputs, how)
        # Whoever comes first finds a cooler machine: they take turns at it.
        first = self.turns % len(labels)
        self.turns += 1
        runs = {label: self.run(label, inputs, how) for label in [*labels[first:], *labels[:first]]}
        plain = runs[PLAIN]
        row: dict[str, Any] = {"input_tokens": inputs["attention_mask"].sum(dim=-1).tolist()}
        if how.length is not None:
            row["entropy"] = sum(mean_entropy(self.model, *pair) for pair in answered(inputs, plain)) / how.batch
        row["systems"] = {label: self.numbers(runs[label], plain, inputs, how) for label in labels}
        return row, self.tokenizer.batch_decode(plain.rows, skip_special_tokens=True)

    def run(self, label: str, inputs: BatchEncoding, how: Condition, max_new_tokens: int | None = None) -> Run:
        """One timed call; the same seed for every system."""
        arguments: dict[str, Any] = {"max_new_tokens": max_new_tokens or self.options.max_new_tokens}
        if how.temperature:
            torch.manual_seed(how.seed or 0)
            arguments |= {"do_sample": True, "temperature": how.temperature, "top_k": 0, "top_p": 1.0}
        else:
            arguments |= {"do_sample": False}
        if self.options.full_length:
            arguments["eos_token_id"] = None
        # Candidates are what coverage is told from; only a single sequence says which of its tokens they stood for.
        lattice = how.batch == 1 and label != PLAIN
        arguments |= self.arguments[label]
        # Whoever listens to a compiled pass has it compiled in pieces.
        watch = self.watch and "cache_implementation" not in arguments
        return run_generate(self.model, inputs, lattice=lattice, watch=watch, **arguments)

    def warm_up(self, labels: list[str], inputs: BatchEncoding, how: Condition) -> None:
        """A few tokens by everyone, before the first item of each size."""
        if (how.batch, how.length) in self.warm:
            return
        for label in labels:
            self.run(label, inputs, how, self.warm_up_tokens)
        self.warm.add((how.batch, how.length))

    def numbers(self, run: Run, plain: Run, inputs: BatchEncoding, how: Condition) -> dict[str, Any]:
        """What is kept of one run."""
        accepted = run.accepted(inputs["input_ids"].shape[1])
        numbers: dict[str, Any] = {
            "seconds": run.seconds,
            "tokens": run.tokens,
            "passes": run.target_passes,
            "blocks": len(accepted),
            "accepted": sum(accepted),
        }
        if run is plain:
            return numbers | {"blocks": run.tokens - len(run.rows), "accepted": 0}
        if how.batch > 1:
            numbers["by_sequence"] = counts_by_sequence(run.recording.blocks, how.batch)
        if run.recording.blocks:
            numbers |= {"draft": run.recording.draft_seconds, "verify": run.recording.verify_seconds}
            numbers |= pool_counts(run.recording.blocks, run.rows[0])
        # Two samples differ by chance, so only greedy text can be compared.
        return numbers if how.temperature else numbers | self.differences(run, plain, inputs)

    def differences(self, run: Run, plain: Run, inputs: BatchEncoding) -> dict[str, Any]:
        """Texts that are the plain one, that part at a tie of the target's two best tokens, and the widest gap."""
        found = [
            first_divergence(self.model, ids, answer, other)
            for (ids, answer), other in zip(answered(inputs, plain), run.rows, strict=True)
        ]
        parted = [divergence for divergence in found if divergence is not None]
        return {
            "identical": len(found) - len(parted),
            "ties": sum(divergence.is_tie for divergence in parted),
            "gap": max((divergence.gap for divergence in parted), default=0.0),
        }


def answered(inputs: BatchEncoding, run: Run) -> list[tuple[torch.Tensor, list[int]]]:
    """Prompts `[1, n]` without padding, and their new tokens."""
    rows = zip(inputs["input_ids"], inputs["attention_mask"], run.rows, strict=True)
    return [(ids[mask.bool()].unsqueeze(0), answer) for ids, mask, answer in rows]


def counts_by_sequence(blocks: list[BlockRecord], batch: int) -> list[tuple[int, int]]:
    """Accepted tokens and blocks of each sequence of a batch: none of one that ended with its first token; nothing
    where no loop told them apart."""
    kept: list[list[int]] = [[] for _ in range(batch)]
    for block in blocks:
        kept[block.sequence].append(block.accepted)
    return [(sum(accepted), len(accepted)) for accepted in kept] if blocks else []


def go_on(chat: Chat, answer: str, question: str) -> Chat:
    return [*chat, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]


def pool_counts(blocks: list[BlockRecord], answer: list[int]) -> dict[str, int]:
    """How many slots the answer tells the truth about, in how many the truth was among the candidates, and in how many
    before the first where it was not; nothing for drafts without candidates.

    Args:
        blocks (list of [`BlockRecord`]): of the one sequence.
        answer (`list[int]`): its new tokens.
    """
    counts = {"slots": 0, "covered": 0, "oracle": 0}
    position = 1
    for block in blocks:
        if block.drafted == 0:
            position += 1
            continue
        if block.lattice is None:
            return {}
        pool, truth = block.lattice.candidate_ids[0].tolist(), answer[position : position + block.drafted]
        hits = [token in candidates for token, candidates in zip(truth, pool, strict=False)]
        counts["slots"] += len(hits)
        counts["covered"] += sum(hits)
        counts["oracle"] += (hits + [False]).index(False)
        position += block.accepted + 1
    return counts


class ResultFile:
    """Rows of results as JSON lines, behind a line for each session that added some.

    Args:
        path (`Path`): made if need be.
        subject (`dict`): what was measured; another in the file is an error.
        session (`dict`): provenance of this session.

    Raises:
        `ValueError`: if the file holds results of something else, naming what differs.
    """

    def __init__(self, path: Path, subject: dict[str, Any], session: dict[str, Any]):
        self.path = path
        self.sessions: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            self.read(subject)
        self.sessions.append(session)
        self.append([{"subject": subject, "session": session}])

    def read(self, subject: dict[str, Any]) -> None:
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # A run was killed while writing it; its item is decoded again.
            if "session" not in row:
                self.rows.append(row)
                continue
            self.sessions.append(row["session"])
            differ = [name for name in subject if row["subject"].get(name) != subject[name]]
            if differ:
                was = ", ".join(f"{name} {row['subject'].get(name)} (now {subject[name]})" for name in differ)
                raise ValueError(f"{self.path} holds results of other settings: {was}. Give another `--output`.")

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Rows in one write, so that a killed run leaves whole items and at most one broken line."""
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        broken = self.path.exists() and not self.path.read_bytes().endswith(b"\n") and self.path.stat().st_size > 0
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * broken + text)

    def add(self, rows: list[dict[str, Any]]) -> None:
        self.append(rows)
        self.rows += rows

    @property
    def done(self) -> set[str]:
        return {row["item"] for row in self.rows}


def run_items(
    items: list[Item],
    measure: Callable[[Item], list[dict[str, Any]]],
    results: ResultFile,
    minutes: float | None = None,
    progress: Callable[[Item], None] = lambda item: None,
) -> bool:
    """Measures what the file does not hold yet.

    Args:
        items (list of [`Item`]): in order.
        measure (`Callable`): see [`Runner.measure`].
        results ([`ResultFile`]): receives each item as soon as it is measured.
        minutes (`float`): no item is begun after so long.
        progress (`Callable`): hears of every item when it is done, or was before.

    Returns:
        whether all are measured.
    """
    end = None if minutes is None else time.monotonic() + 60 * minutes
    done = results.done
    complete = True
    for item in items:
        if item.key not in done:
            if end is not None and time.monotonic() > end:
                complete = False
                continue
            results.add(measure(item))
        progress(item)
    return complete

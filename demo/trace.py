# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""Traces: what one assisted `generate` call drafted, chose and kept, block by block, as JSON in and out.

`S` slots of a block, `K` candidates of a slot; `K` is 1 and there are no scores where a draft method has no lattice.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from transformers.convert_slow_tokenizer import bytes_to_unicode

from lilicorr_hf.modeling.generation_lilicorr import BlockRecord, Recording


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SCHEMA = "lilicorr-trace"
VERSION = 1
# Enough for any bar or label; a block of 16 positions and 8 candidates stays below 10 kB.
DECIMALS = 4
MAX_FILE_BYTES = 20_000_000
BYTE_OF_CHARACTER = {character: byte for byte, character in bytes_to_unicode().items()}


@dataclass
class BlockTrace:
    """One block: its lattice, the path taken through it, and what the target made of it.

    Args:
        anchor (`int`): id of the token the block follows.
        candidates (`list` of shape `[S, K]`): token ids by descending drafter probability.
        log_probs (`list` of shape `[S, K]`): the drafter's, over its whole vocabulary; `None` if not recorded.
        start_scores (`list` of shape `[K]`): from the anchor to the candidates of slot 0; `None` without a head.
        pair_scores (`list` of shape `[S - 1, K, K]`): from candidate `i` of slot `s` to `j` of slot `s + 1`.
        walk (`list[int]`): index of the chosen candidate of each slot, at most `S` of them.
        drafted (`int`): how many of those the target was shown; the length left may be shorter than the block.
        accepted (`int`): how many it kept.
        target (`list[int]`): the text's own tokens from here on, at most `S + 1`: those accepted, the target's next
            (the bonus), then what later blocks added.
        text (`str`): what this block added to the text.
        draft_seconds, verify_seconds (`float`): drafting with scoring, and the target's pass; `None` if not measured.
    """

    anchor: int
    candidates: list[list[int]]
    walk: list[int]
    drafted: int
    accepted: int
    target: list[int]
    text: str = ""
    log_probs: list[list[float]] | None = None
    start_scores: list[float] | None = None
    pair_scores: list[list[list[float]]] | None = None
    draft_seconds: float | None = None
    verify_seconds: float | None = None

    @property
    def argmax_path(self) -> list[int]:
        """Token ids of the slot-wise argmax, which is what the drafter alone would propose."""
        return [slot[0] for slot in self.candidates]

    @property
    def walk_path(self) -> list[int]:
        """Token ids of the walk."""
        return [slot[index] for slot, index in zip(self.candidates, self.walk, strict=False)]

    @property
    def bonus(self) -> int:
        """Id of the token the target added after those it accepted."""
        return self.target[self.accepted]

    @property
    def coverage(self) -> list[int | None]:
        """Rank of the text's token among each slot's candidates, `None` where it is not in the pool."""
        pairs = zip(self.candidates, self.target, strict=False)
        return [slot.index(token) if token in slot else None for slot, token in pairs]

    def token_ids(self) -> set[int]:
        return {self.anchor, *self.target, *(token for slot in self.candidates for token in slot)}

    @classmethod
    def from_record(cls, record: BlockRecord) -> "BlockTrace":
        """Raises `ValueError` for a block recorded without `record(lattice=True)`, and for one drafted as a tree."""
        if record.parents is not None:
            raise ValueError("Traces draw chains, and this block is a tree: record with `tree_budget=0`.")
        if record.anchor_id is None or record.verified_ids is None or record.draft_ids is None:
            raise ValueError("This block has no candidates: record with `lilicorr_hf.record(lattice=True)`.")
        block = cls(
            anchor=record.anchor_id,
            candidates=[[token] for token in record.draft_ids],
            walk=[0] * len(record.draft_ids),
            drafted=record.drafted,
            accepted=record.accepted,
            target=record.verified_ids,
            draft_seconds=rounded(record.draft_seconds, 6),
            verify_seconds=rounded(record.verify_seconds, 6),
        )
        if (lattice := record.lattice) is not None:
            block.candidates = lattice.candidate_ids[0].tolist()
            block.walk = lattice.walk[0].tolist() if lattice.walk is not None else block.walk
            block.log_probs = rounded(lattice.log_probs[0].tolist())
            block.start_scores = rounded(lattice.start_scores[0].tolist())
            block.pair_scores = rounded(lattice.pair_scores[0].tolist())
        return block


@dataclass
class Trace:
    """One assisted `generate` call.

    Args:
        title (`str`): for people.
        prompt (`str`): what was asked.
        opening (`str`): the text before the first block: the one token the target's reading of the prompt gave.
        tokens (`dict[int, str]`): text of every token id that occurs.
        blocks (`list[BlockTrace]`).
        note (`str`): where the numbers come from.
        target, assistant, device (`str`): what ran, and on what; `None` if nothing did.
        temperature (`float`): 0 for greedy.
        logit_scale (`float`): `sigma` of the head: a score divided by it is a cosine.
        seconds (`float`): of the whole call; `None` if not measured.
    """

    title: str
    prompt: str = ""
    opening: str = ""
    tokens: dict[int, str] = field(default_factory=dict)
    blocks: list[BlockTrace] = field(default_factory=list)
    note: str = ""
    target: str | None = None
    assistant: str | None = None
    device: str | None = None
    temperature: float = 0.0
    logit_scale: float = 1.0
    seconds: float | None = None

    @classmethod
    def from_recording(cls, recording: Recording, tokenizer: "PreTrainedTokenizerBase", **about: Any) -> "Trace":
        """
        Args:
            recording ([`Recording`]): of one `generate` call inside `record(lattice=True)`.
            tokenizer: the target's.
            about: other fields of the trace.

        Raises:
            `ValueError`: if several calls were recorded, or a batch, or one without lattices.

        Example:

        ```python
        >>> with lilicorr_hf.record(lattice=True) as r:
        ...     target.generate(**inputs, assistant_model=assistant)
        >>> Trace.from_recording(r, tokenizer, title="Sky").save("sky.json")
        ```
        """
        if recording.calls > 1:
            raise ValueError(f"A trace shows one `generate` call; {recording.calls} were recorded.")
        if any(record.sequence for record in recording.blocks):
            raise ValueError("A trace shows one sequence; a batch was recorded.")
        trace = cls(**about)
        for record in recording.blocks:
            trace.append(BlockTrace.from_record(record), tokenizer)
        return trace

    def append(self, block: BlockTrace, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Adds the next block, and its tokens to the readings of the blocks before it."""
        for earlier in self.blocks:
            earlier.target += block.target[: len(earlier.candidates) + 1 - len(earlier.target)]
        if not self.blocks:
            self.opening = decoded(tokenizer, [block.anchor])
        self.blocks.append(block)
        for token in block.token_ids() - self.tokens.keys():
            self.tokens[token] = token_text(tokenizer, token)
        self.set_texts(tokenizer)

    def set_texts(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Text of each block such that all of them join to the whole: a character belongs to the block ending it."""
        ids, done = [self.blocks[0].anchor], 0
        for block in [None, *self.blocks]:
            ids += block.target[: block.accepted + 1] if block else []
            text = decoded(tokenizer, ids)
            whole = len(text) if block is self.blocks[-1] else len(text.rstrip("\N{REPLACEMENT CHARACTER}"))
            if block is None:
                self.opening = text[:whole]
            else:
                block.text = text[done:whole]
            done = whole

    def without_times(self) -> None:
        """Forgets what was measured."""
        self.seconds = None
        for block in self.blocks:
            block.draft_seconds = block.verify_seconds = None

    @property
    def text(self) -> str:
        return self.opening + "".join(block.text for block in self.blocks)

    @property
    def tau(self) -> float:
        """Tokens gained per verification, bonus included; NaN without a block."""
        return sum(block.accepted + 1 for block in self.blocks) / len(self.blocks) if self.blocks else math.nan

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: the fields, and what follows from them for readers in other languages."""
        derived = ("argmax_path", "bonus", "coverage")
        blocks = [asdict(block) | {name: getattr(block, name) for name in derived} for block in self.blocks]
        tokens = {str(token): text for token, text in self.tokens.items()}
        return {"schema": SCHEMA, "version": VERSION} | vars(self) | {"tokens": tokens, "blocks": blocks}

    @classmethod
    def from_dict(cls, data: Any) -> "Trace":
        """Raises `ValueError` naming what is wrong if `data` is not a trace of this version."""
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise ValueError(f'Not a trace: a trace is a JSON object with "schema": "{SCHEMA}".')
        if data.get("version") != VERSION:
            raise ValueError(f"This is a trace of version {data.get('version')!r}; this program reads {VERSION}.")
        try:
            blocks = [BlockTrace(**known_fields(BlockTrace, block)) for block in data["blocks"]]
            tokens = {int(token): str(text) for token, text in data["tokens"].items()}
            trace = cls(**known_fields(cls, data) | {"blocks": blocks, "tokens": tokens})
            check_blocks(trace)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(f"The trace is incomplete or damaged: {type(error).__name__}: {error}.") from error
        return trace

    def save(self, path: str | Path) -> None:
        Path(path).write_text(
            json.dumps(self.to_dict(), ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8"
        )

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        """Raises `ValueError` for a file that holds no trace, saying why."""
        path = Path(path)
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"{path.name} has {path.stat().st_size:,} bytes, more than any trace needs.")
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path.name} is not a text file.") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{path.name} is not JSON: {error}.") from error
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from error


def known_fields(kind: type, data: dict[str, Any]) -> dict[str, Any]:
    return {f.name: data[f.name] for f in fields(kind) if f.name in data}


def check_blocks(trace: Trace) -> None:
    """Raises `ValueError` naming the first block whose parts do not fit together."""
    for number, block in enumerate(trace.blocks, start=1):
        slots, k = len(block.candidates), len(block.candidates[0]) if block.candidates else 0
        scores = block.start_scores is not None and slots > 0
        problems = {
            "slots differ in their number of candidates": any(len(slot) != k for slot in block.candidates),
            "log_probs are not [S, K]": block.log_probs is not None and shape(block.log_probs) != (slots, k),
            "start_scores are not [K]": scores and shape(block.start_scores) != (k,),
            "pair_scores are not [S - 1, K, K]": scores
            and slots > 1
            and shape(block.pair_scores) != (slots - 1, k, k),
            "the walk leaves the lattice": len(block.walk) > slots or any(not 0 <= i < k for i in block.walk),
            "more tokens accepted than drafted": not 0 <= block.accepted <= block.drafted <= slots,
            "the target's tokens are missing": not block.accepted < len(block.target) <= slots + 1,
            "a token has no text": not block.token_ids() <= trace.tokens.keys(),
        }
        found = [problem for problem, present in problems.items() if present]
        if found:
            raise ValueError(f"Block {number} is damaged: {'; '.join(found)}.")


def shape(nested: Any) -> tuple[int, ...]:
    """Of nested lists of finite numbers; `(-1,)` if they are ragged or hold anything else."""
    if isinstance(nested, (int, float)):
        return () if math.isfinite(nested) else (-1,)
    if not isinstance(nested, list):
        return (-1,)
    inner = {shape(item) for item in nested}
    return (len(nested), *inner.pop()) if len(inner) == 1 else (-1,)


def rounded(numbers: Any, decimals: int = DECIMALS) -> Any:
    if isinstance(numbers, Iterable):
        return [rounded(number, decimals) for number in numbers]
    return round(numbers, decimals)


def decoded(tokenizer: "PreTrainedTokenizerBase", ids: list[int]) -> str:
    # It is a list of texts for a list of lists only.
    return cast(str, tokenizer.decode(ids))


def token_text(tokenizer: "PreTrainedTokenizerBase", token: int) -> str:
    r"""Text of one token with its leading space; `\xe2\x82` for bytes that are no character on their own."""
    text, piece = decoded(tokenizer, [token]), cast(str, tokenizer.convert_ids_to_tokens(token))
    if "\N{REPLACEMENT CHARACTER}" in text:
        if all(character in BYTE_OF_CHARACTER for character in piece):
            return bytes(BYTE_OF_CHARACTER[character] for character in piece).decode(errors="backslashreplace")
        return piece
    # SentencePiece marks the space that decoding one token drops.
    return f" {text}" if piece.startswith("\N{LOWER ONE EIGHTH BLOCK}") and not text.startswith(" ") else text


__all__ = ["SCHEMA", "VERSION", "BlockTrace", "Trace", "token_text"]

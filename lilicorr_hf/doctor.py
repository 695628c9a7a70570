"""Examining a target and an assistant for faults that decode right and only cost speed."""

import copy
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DFlashCache

from .measure import encode, first_divergence
from .modeling.decoding_lilicorr import block_decoding
from .modeling.generation_lilicorr import BlockRecord, record
from .modeling.modeling_dflash import DFlashModel, DraftOutput
from .modeling.target_lilicorr import TargetTables, states_to_return, tapped_states


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROMPTS = (
    "Write a Python function that reverses a string, with one example.",
    "Anna has 12 apples, gives away a third and buys 5 more. How many has she? Think step by step.",
    "Name three reasons why the sky looks blue, as a numbered list.",
)
# Rotary bases in use; a drafter read with another one than it was trained with drafts on, worse.
ROPE_BASES = (1e4, 1e5, 5e5, 1e6)
PROBE = "probe.json"
# Nats by which recomputed log-probabilities may be off on average: half precision, not another layer or rotation.
PROBE_NATS = 0.03
# As chat templates write the day on which they are asked: 26 Jul 2024, 2024-07-26, July 26, 2024.
DATE = re.compile(r"\d{1,2} [A-Z][a-z]+ \d{4}|\d{4}-\d{2}-\d{2}|[A-Z][a-z]+ \d{1,2}, \d{4}")


@dataclass
class Finding:
    """One check: what was looked at, what came out in words, and whether it is a fault."""

    check: str
    words: str
    fault: bool = False


@dataclass
class Answer:
    """A prompt and the target's own greedy answer, with the target's states of it.

    Args:
        ids (`torch.LongTensor` of shape `[1, n]`): both.
        prompt_length (`int`): tokens of the prompt.
        hidden_states (sequence of `torch.Tensor` of shape `[1, n, M]`): of one pass over `ids`, all layers.
    """

    inputs: Any
    ids: torch.Tensor
    prompt_length: int
    hidden_states: Sequence[torch.Tensor]

    @property
    def new_ids(self) -> list[int]:
        return self.ids[0, self.prompt_length :].tolist()


@dataclass
class Blocks:
    """Blocks drafted at many anchors of the answers, beside what the target wrote there.

    Args:
        logits (`torch.Tensor` of shape `[b, S, V]`): the drafter's.
        draft ([`DraftOutput`]): of all blocks.
        truth (`torch.LongTensor` of shape `[b, S]`): the target's tokens.
    """

    logits: torch.Tensor
    draft: DraftOutput
    truth: torch.Tensor

    def log_probs(self) -> torch.Tensor:
        """Log-probabilities `[b, S]` that the drafter's slots give the target's tokens."""
        return self.logits.float().log_softmax(dim=-1).gather(-1, self.truth.unsqueeze(-1)).squeeze(-1)

    def prefix(self, right: torch.Tensor) -> float:
        """Mean length of the leading run of right slots, `right [b, S]`."""
        return right.long().cumprod(dim=-1).sum(dim=-1).double().mean().item()


@torch.no_grad()
def read_answers(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str | list[dict[str, str]]],
    max_new_tokens: int,
) -> list[Answer]:
    """The target's answers without an assistant. They are what the checks compare drafts with."""
    answers = []
    for prompt in prompts:
        inputs = encode(tokenizer, prompt, chat=tokenizer.chat_template is not None).to(model.device)
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)  # type: ignore[operator]
        outputs = model(input_ids=ids, output_hidden_states=True, logits_to_keep=1)
        answers.append(Answer(inputs, ids, inputs["input_ids"].shape[1], outputs.hidden_states))
    return answers


@torch.no_grad()
def draft_at(
    assistant: DFlashModel,
    tables: TargetTables,
    answer: Answer,
    anchors: list[int],
    layer_shift: int = 0,
    lag: int = 0,
) -> Blocks:
    """Blocks from the states of a full pass, without the cache of a decoding loop.

    Args:
        anchors (`list[int]`): positions whose tokens the blocks follow.
        layer_shift (`int`): added to the tapped layers.
        lag (`int`): positions by which the context comes too late.
    """
    config, last = assistant.config, max(anchors)
    rows = torch.tensor(anchors, device=answer.ids.device).unsqueeze(-1)
    # Contexts of different lengths end in the same column.
    columns = torch.arange(last, device=rows.device) - (last - rows)
    states = tapped_states(answer.hidden_states, [i + layer_shift for i in config.target_layer_ids])[0]
    block = torch.arange(config.block_size, device=rows.device)
    anchor_ids, mask = answer.ids[0, rows], (columns >= lag).long()
    cache = DFlashCache(config=config)
    cache.set_previous_accepted_tokens(last)
    output = assistant(
        noise_embeds=tables.embed(assistant.block_ids(anchor_ids)).to(assistant.device, assistant.dtype),
        context_hidden_states=states[(columns - lag).clamp(min=0)].to(assistant.device, assistant.dtype),
        attention_mask=torch.cat([mask, mask.new_ones(len(rows), config.block_size)], dim=-1).to(assistant.device),
        position_ids=torch.cat([columns.clamp(min=0), rows + block], dim=-1).to(assistant.device),
        cache=cache,
    )
    logits = tables.logits(output.last_hidden_state)[:, assistant.slot_rows]
    truth = answer.ids[0, rows + torch.arange(1, assistant.num_drafted + 1, device=rows.device)]
    return Blocks(logits, assistant.choose(logits, output, anchor_ids, tables), truth)


def write_probe(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", assistant: DFlashModel, folder: str | Path
) -> None:
    """Puts beside a checkpoint what its drafter makes of one answer, for [`examine`] to compare with.

    Nothing else tells whether a config states the layers, rotations and chats that the weights were trained with: read
    in a slightly wrong way they only draft slightly worse. So write it where the weights are known to be read right.

    Args:
        model, tokenizer: the target.
        assistant ([`DFlashModel`]): as trained.
        folder (path): of its checkpoint.
    """
    answer = read_answers(model, tokenizer, PROMPTS[:1], max_new_tokens=32)[0]
    blocks = draft_at(assistant, TargetTables(model), answer, block_anchors(assistant, answer))
    probe = {
        "prompt": PROMPTS[0],
        "ids": answer.ids[0].tolist(),
        "prompt_length": answer.prompt_length,
        "log_probs": [[round(x, 4) for x in row] for row in blocks.log_probs().tolist()],
    }
    (Path(folder) / PROBE).write_text(json.dumps(probe) + "\n", encoding="utf-8")


def block_anchors(assistant: DFlashModel, answer: Answer) -> list[int]:
    """Positions in an answer that a whole block follows."""
    return list(range(answer.prompt_length, answer.ids.shape[1] - assistant.num_drafted))


def examine(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    assistant: DFlashModel,
    answers: list[Answer],
    folder: str | Path | None = None,
) -> Iterator[Finding]:
    """All checks, cheapest first; it ends at a fault that the following would only repeat.

    Args:
        model, tokenizer: the target.
        assistant ([`DFlashModel`]): its assistant.
        answers (`list[Answer]`): see [`read_answers`].
        folder (path): where the assistant was loaded from, for the probe beside it; see [`write_probe`].
    """
    try:
        assistant.check_target(model)
    except ValueError as error:
        yield Finding("pairing", str(error), fault=True)
        return
    yield Finding("pairing", "vocabulary, width, layers and mask token fit")
    yield check_mask_token(model, assistant)
    for check in (check_weights(assistant), check_taps(model, assistant, answers[0])):
        yield check
        if check.fault:
            return
    tables, path = TargetTables(model), Path(folder or "") / PROBE
    if folder is not None and path.is_file():
        findings = list(check_probe(model, tokenizer, assistant, json.loads(path.read_text(encoding="utf-8"))))
        yield from findings
        if any(finding.fault for finding in findings):
            return
    else:
        yield Finding("probe", f"no {PROBE} beside the weights: layers, rotations and chats are not checked")
    usable = [answer for answer in answers if block_anchors(assistant, answer)]
    if not usable:
        yield Finding("blocks", "no answer is longer than a block; ask for more tokens", fault=True)
        return
    stated = [draft_at(assistant, tables, answer, block_anchors(assistant, answer)) for answer in usable]
    yield from check_generation(model, assistant, tables, usable, stated)


def check_mask_token(model: "PreTrainedModel", assistant: DFlashModel) -> Finding:
    mask, generation = assistant.mask_token_id, model.generation_config
    eos = generation.eos_token_id  # type: ignore[union-attr]
    if mask in [*(eos if isinstance(eos, list) else [eos]), generation.pad_token_id]:  # type: ignore[union-attr]
        return Finding("mask token", f"mask token {mask} is the target's end or padding token", fault=True)
    return Finding("mask token", f"{mask}, a token of its own")


def check_weights(assistant: DFlashModel) -> Finding:
    """Finds tensors that are not finite, or the same everywhere although they multiply."""
    for name, tensor in assistant.state_dict().items():
        if not tensor.isfinite().all():
            return Finding("weights", f"broken weights: {name} holds values that are not finite", fault=True)
        first = tensor.flatten()[0]
        if tensor.ndim >= 2 and name.endswith("weight") and bool((tensor == first).all()):
            return Finding("weights", f"broken weights: all of {name} is {first.item()}", fault=True)
    return Finding("weights", "all finite, none constant")


@torch.no_grad()
def check_taps(model: "PreTrainedModel", assistant: DFlashModel, answer: Answer) -> Finding:
    """Compares the states a drafter gets with what the tapped decoder layers themselves put out."""
    ids, seen = assistant.config.target_layer_ids, {}
    layers = model.get_decoder().layers

    def keep(i):
        return lambda _, __, output: seen.update({i: output[0] if isinstance(output, tuple) else output})

    handles = [layers[i].register_forward_hook(keep(i)) for i in ids]
    try:
        outputs = model(input_ids=answer.ids, output_hidden_states=states_to_return(ids), logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    states = tapped_states(outputs.hidden_states, ids).chunk(len(ids), dim=-1)
    wrong = [i for i, state in zip(ids, states, strict=True) if not torch.equal(state, seen[i].to(state.device))]
    if wrong:
        words = f"off-by-one layers: the states taken for layers {wrong} are not what these layers put out"
        return Finding("taps", words, fault=True)
    return Finding("taps", f"the states of layers {ids} are what these layers put out")


def check_template(tokenizer: "PreTrainedTokenizerBase", probe: dict[str, Any]) -> Finding:
    """Compares the chat that the drafter was trained on, reasoning off, with what the tokenizer makes of it."""
    chat = tokenizer.chat_template is not None
    off, on = (
        encode(tokenizer, probe["prompt"], chat, thinking)["input_ids"][0].tolist() for thinking in (False, True)
    )
    trained = probe["ids"][: probe["prompt_length"]]
    if chat and "strftime_now" in str(tokenizer.chat_template):
        # The probe is of another day.
        trained, off, on = (DATE.sub("DATE", str(tokenizer.decode(ids))) for ids in (trained, off, on))
    if trained == off:
        words = "writes chats as the drafter was trained on them"
        return Finding("template", words + ", with `enable_thinking=False` only" * (on != off))
    if trained == on:
        words = (
            "reasoning mode: the drafter was trained on chats that this tokenizer writes with `enable_thinking=True`"
        )
    else:
        there, here = (ids if isinstance(ids, str) else tokenizer.decode(ids) for ids in (trained, off))
        words = f"template mismatch: the drafter was trained on chats like {there!r}, this tokenizer writes {here!r}"
    return Finding("template", words, fault=True)


@torch.no_grad()
def check_probe(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", assistant: DFlashModel, probe: dict[str, Any]
) -> Iterator[Finding]:
    """Repeats what the drafter once made of an answer, and where that fails finds the reading that repeats it."""
    yield check_template(tokenizer, probe)
    ids, length = torch.tensor([probe["ids"]], device=model.device), probe["prompt_length"]
    outputs = model(input_ids=ids, output_hidden_states=True, logits_to_keep=1)
    answer = Answer(None, ids, length, outputs.hidden_states)
    expected, tables = torch.tensor(probe["log_probs"], device=model.device), TargetTables(model)

    def error(variant: DFlashModel = assistant, **changes: int) -> float:
        blocks = draft_at(variant, tables, answer, block_anchors(assistant, answer), **changes)
        return (blocks.log_probs() - expected).abs().mean().item()

    stated = error()
    if not math.isfinite(stated):
        yield Finding("probe", "its drafts are not finite, in this dtype at least", fault=True)
        return
    if stated < PROBE_NATS:
        yield Finding("probe", f"layers and rotations repeat it, to {stated:.0e} nats")
        return
    taps, base = assistant.config.target_layer_ids, assistant.config.rope_parameters["rope_theta"]  # type: ignore[index]
    readings = {
        f"off-by-one layers: the weights want target_layer_ids {[i + shift for i in taps]}, not {taps}": error(
            layer_shift=shift
        )
        for shift in (-1, 1)
        if 0 <= min(taps) + shift and max(taps) + shift < assistant.config.num_target_layers - 1
    }
    readings |= {
        f"wrong rope base: the weights want rope_theta {other:g}, not {base:g}": error(with_rope(assistant, other))
        for other in ROPE_BASES
    }
    readings["wrong anchor row: the weights want contexts a position late"] = error(lag=1)
    words, nearest = min(readings.items(), key=lambda item: item[1])
    if nearest >= PROBE_NATS:
        words = "other weights than those it was made with, in the assistant or its target"
    yield Finding("probe", f"{words} (off by {stated:.2f} nats)", fault=True)


def with_rope(assistant: Any, base: float) -> DFlashModel:
    """The same weights under another rotary base; the assistant itself stays as it is."""
    config = copy.deepcopy(assistant.config)
    config.rope_parameters["rope_theta"] = base
    variant = copy.copy(assistant)
    rotary = type(assistant.rotary_emb)(config).to(assistant.device)
    variant._modules = assistant._modules | {"rotary_emb": rotary}
    return variant


def check_generation(model, assistant, tables, answers, stated: list[Blocks]) -> Iterator[Finding]:
    """Decodes with the assistant: same text, drafts as from a full pass, acceptance as teacher forcing promises."""
    records, parted = [], []
    for answer in answers:
        with record(lattice=True) as recording:
            ids = model.generate(
                **answer.inputs,
                custom_generate=block_decoding(assistant, tree_budget=0),
                do_sample=False,
                max_new_tokens=len(answer.new_ids),
            )
        new_ids, equal = ids[0, answer.prompt_length :].tolist(), math.inf
        if divergence := first_divergence(model, answer.inputs["input_ids"], answer.new_ids, new_ids):
            parted.append(divergence)
            equal = answer.prompt_length + divergence.index
        records.append((recording.blocks, equal))
    if parted:
        gap = max(divergence.gap for divergence in parted)
        words = f"{len(parted)} of {len(answers)} answers differ from plain decoding; top-2 gap there {gap:.1e}"
        yield Finding("text", words, fault=not all(divergence.is_tie for divergence in parted))
    else:
        yield Finding("text", "equal to plain decoding")
    yield check_cached_drafts(assistant, tables, answers, records)
    # Those near an answer's end are cut short.
    whole = [block for blocks, _ in records for block in blocks if block.drafted == assistant.num_drafted]
    yield from check_acceptance(whole, stated)


def check_cached_drafts(
    assistant, tables, answers: list[Answer], records: list[tuple[list[BlockRecord], float]]
) -> Finding:
    """Compares the blocks that generation drafted with the same blocks recomputed from a full pass.

    Args:
        records: of each answer the blocks, and up to which token it is the plain one.
    """

    def agreement(lag: int = 0) -> float | None:
        same = []
        for answer, (blocks, equal) in zip(answers, records, strict=True):
            drafted, anchor = {}, answer.prompt_length
            for block in blocks:
                if block.draft_ids and anchor + assistant.num_drafted < min(answer.ids.shape[1], equal):
                    drafted[anchor] = block.draft_ids
                anchor += block.accepted + 1
            if drafted:
                again = draft_at(assistant, tables, answer, list(drafted), lag=lag).draft.token_ids.tolist()
                same += [row[: len(ids)] == ids for row, ids in zip(again, drafted.values(), strict=True)]
        return sum(same) / len(same) if same else None

    recomputed = agreement()
    if recomputed is None:
        return Finding("cached drafts", "no block to compare before texts part; ask for more tokens")
    if recomputed >= 0.9:
        return Finding("cached drafts", f"{recomputed:.0%} of the blocks are as recomputed from a full pass")
    words = f"only {recomputed:.0%} of the blocks are those of a full pass"
    if (late := agreement(lag=1) or 0.0) > recomputed:
        words += f"; wrong anchor row: {late:.0%} are those of contexts a position late"
    return Finding("cached drafts", words, fault=True)


def check_acceptance(whole: list[BlockRecord], stated: list[Blocks]) -> Iterator[Finding]:
    """What is accepted, and where the rest is lost: pool, order of candidates, or walk."""
    argmax = torch.cat([b.logits.argmax(dim=-1) == b.truth for b in stated])
    walk = torch.cat([b.draft.token_ids == b.truth for b in stated])
    forced = 1 + stated[0].prefix(walk)
    numbers = f"walk {forced - 1:.2f}, argmax {stated[0].prefix(argmax):.2f}"
    lattices = [(b.draft.lattice, b.truth) for b in stated if b.draft.lattice is not None]
    if lattices:
        pool = torch.cat([(found.candidate_ids == truth.unsqueeze(-1)).any(dim=-1) for found, truth in lattices])
        numbers += f", oracle {stated[0].prefix(pool):.2f} tokens; coverage {pool.double().mean().item():.0%}"
    yield Finding("slots", f"right from the start of a block: {numbers}")
    # Anchors of generation are where blocks ended, those of teacher forcing all there are.
    if not whole:
        return
    tau = 1 + sum(block.accepted for block in whole) / len(whole)
    spread = walk.long().cumprod(dim=-1).sum(dim=-1).double().std().item() / len(whole) ** 0.5
    words = f"{tau:.2f} tokens a pass in generation, {forced:.2f} by teacher forcing"
    yield Finding("acceptance", words, fault=abs(tau - forced) > max(0.3, 5 * spread))

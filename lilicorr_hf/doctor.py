"""Examining a target and an assistant for faults that decode right and only cost speed."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DFlashCache

from .measure import TIE_GAP, encode, first_divergence
from .modeling.generation_lilicorr import BlockRecord, record
from .modeling.modeling_dflash import DFlashModel, DraftOutput
from .modeling.target_lilicorr import TargetTables, tapped_states


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROMPTS = (
    "Write a Python function that reverses a string, with one example.",
    "Anna has 12 apples, gives away a third and buys 5 more. How many has she? Think step by step.",
    "Name three reasons why the sky looks blue, as a numbered list.",
)
# Rotary bases in use; a drafter read with another one than it was trained with drafts on, worse.
ROPE_BASES = (1e4, 1e5, 5e5, 1e6)
# A reading of the weights other than the stated one is a fault of the config if it explains the target's text better
# by this many nats a token, and by this many standard errors.
BETTER_NATS, BETTER_ERRORS = 0.03, 2.5


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

    def surprise(self) -> torch.Tensor:
        """Nats `[b]` that the drafter's slots give the target's tokens, mean over a block."""
        return -self.logits.float().log_softmax(dim=-1).gather(-1, self.truth.unsqueeze(-1)).squeeze(-1).mean(dim=-1)

    def prefix(self, right: torch.Tensor) -> float:
        """Mean length of the leading run of right slots, `right [b, S]`."""
        return right.long().cumprod(dim=-1).sum(dim=-1).double().mean().item()


@torch.no_grad()
def read_answers(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[str], max_new_tokens: int
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
    noise = torch.cat(
        [anchor_ids, anchor_ids.new_full((len(rows), config.num_slots), assistant.mask_token_id)], dim=-1
    )
    cache = DFlashCache(config=config)
    cache.set_previous_accepted_tokens(last)
    output = assistant(
        noise_embeds=tables.embed(noise).to(assistant.device, assistant.dtype),
        context_hidden_states=states[(columns - lag).clamp(min=0)].to(assistant.device, assistant.dtype),
        attention_mask=torch.cat([mask, mask.new_ones(len(rows), config.block_size)], dim=-1).to(assistant.device),
        position_ids=torch.cat([columns.clamp(min=0), rows + block], dim=-1).to(assistant.device),
        cache=cache,
    )
    logits = tables.logits(output.last_hidden_state)[:, 1:]
    truth = answer.ids[0, rows + block[1:]]
    return Blocks(logits, assistant.choose(logits, output, tables), truth)


def examine(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    assistant: DFlashModel,
    answers: list[Answer],
    assistant_folder: str | Path | None = None,
) -> Iterator[Finding]:
    """All checks, cheapest first; those that would follow from a fault found are left out.

    Args:
        model, tokenizer: the target.
        assistant ([`DFlashModel`]): its assistant.
        answers (`list[Answer]`): see [`read_answers`].
        assistant_folder (path): where it was loaded from, for the chat template beside it.
    """
    try:
        assistant.check_target(model)
    except ValueError as error:
        yield Finding("pairing", str(error), fault=True)
        return
    yield Finding("pairing", "vocabulary, width, layers and mask token fit")
    yield check_mask_token(model, assistant)
    yield check_template(tokenizer, assistant_folder)
    weights = check_weights(assistant)
    yield weights
    if weights.fault:
        return
    tables, size = TargetTables(model), assistant.config.block_size
    usable = [answer for answer in answers if len(answer.new_ids) > size]
    if not usable:
        yield Finding("blocks", f"no answer is longer than a block of {size}; ask for more tokens", fault=True)
        return
    anchors = [list(range(a.prompt_length, a.ids.shape[1] - size + 1)) for a in usable]
    stated = [draft_at(assistant, tables, a, at) for a, at in zip(usable, anchors, strict=True)]
    taps = check_taps(model, assistant, usable[0])
    yield taps
    readings = [] if taps.fault else list(check_config(assistant, tables, usable, anchors, stated))
    yield from readings
    if taps.fault or any(finding.fault for finding in readings):
        return
    yield from check_generation(model, assistant, tables, usable, stated)


def check_mask_token(model: "PreTrainedModel", assistant: DFlashModel) -> Finding:
    mask, generation = assistant.mask_token_id, model.generation_config
    eos = generation.eos_token_id  # type: ignore[union-attr]
    if mask in [*(eos if isinstance(eos, list) else [eos]), generation.pad_token_id]:  # type: ignore[union-attr]
        return Finding("mask token", f"mask token {mask} is the target's end or padding token", fault=True)
    return Finding("mask token", f"{mask}, a token of its own")


def check_template(tokenizer: "PreTrainedTokenizerBase", folder: str | Path | None) -> Finding:
    """Compares the target's chat template with the one the drafter was trained with, if that lies beside it."""
    path = Path(folder or "") / "chat_template.jinja"
    if folder is None or not path.is_file():
        return Finding("template", "the assistant does not say what chat template it was trained with: not checked")
    if tokenizer.chat_template is None:
        words = f"template mismatch: this target's tokenizer has none, the drafter was trained with {path.name}"
        return Finding("template", words, fault=True)
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
    for messages in (chat[:1], chat):
        here, there = (
            # Without reasoning, as drafters are trained.
            tokenizer.apply_chat_template(
                messages,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=len(messages) == 1,
                enable_thinking=False,
            )
            for template in (tokenizer.chat_template, path.read_text())
        )
        if here != there:
            words = (
                f"template mismatch: the drafter was trained on chats like {there!r}, this target's tokenizer writes "
                f"{here!r}; use the template in {path.name}, or an assistant trained with the other"
            )
            return Finding("template", words, fault=True)
    return Finding("template", "writes chats as the drafter was trained on them, without reasoning")


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
        outputs = model(input_ids=answer.ids, output_hidden_states=[i + 1 for i in ids], logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    states = tapped_states(outputs.hidden_states, ids).chunk(len(ids), dim=-1)
    wrong = [i for i, state in zip(ids, states, strict=True) if not torch.equal(state, seen[i].to(state.device))]
    if wrong:
        words = f"off-by-one layers: the states taken for layers {wrong} are not what these layers put out"
        return Finding("taps", words, fault=True)
    return Finding("taps", f"the states of layers {ids} are what these layers put out")


def check_config(assistant, tables, answers, anchors, stated: list[Blocks]) -> Iterator[Finding]:
    """Reads the weights in other ways than the config states: none should explain the target's text better."""
    surprise = torch.cat([blocks.surprise() for blocks in stated])

    def gain(variant: DFlashModel = assistant, **changes) -> float:
        """Nats a token by which a variant explains the text better; 0 where that may be chance."""
        other = torch.cat(
            [draft_at(variant, tables, a, at, **changes).surprise() for a, at in zip(answers, anchors, strict=True)]
        )
        gains = surprise - other
        sure = gains.mean() > max(BETTER_NATS, BETTER_ERRORS * gains.std().item() / len(gains) ** 0.5)
        return gains.mean().item() if sure else 0.0

    ids, last = assistant.config.target_layer_ids, assistant.config.num_target_layers - 1
    shifts = [shift for shift in (-1, 1) if 0 <= min(ids) + shift and max(ids) + shift < last]
    nearer = {shift: nats for shift in shifts if (nats := gain(layer_shift=shift))}
    if nearer:
        moved = [i + max(nearer, key=nearer.__getitem__) for i in ids]
        words = f"off-by-one layers: the weights fit target_layer_ids {moved}, the config states {ids}"
        yield Finding("layers", words, fault=True)
    else:
        yield Finding("layers", f"{ids}: neighbours fit no better")
    base = assistant.config.rope_parameters["rope_theta"]
    better = {other: nats for other in ROPE_BASES if other != base and (nats := gain(with_rope(assistant, other)))}
    if better:
        fitting = max(better, key=better.__getitem__)
        words = f"wrong rope base: the weights fit rope_theta {fitting:g} better than the stated {base:g}"
        yield Finding("rope", words, fault=True)
    else:
        yield Finding("rope", f"base {base:g}: others fit no better")
    if gain(lag=1):
        words = "wrong anchor row: the weights fit contexts that come a position late"
        yield Finding("anchor row", words, fault=True)


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
    records, gaps = [], []
    for answer in answers:
        with record(lattice=True) as recording:
            ids = model.generate(
                **answer.inputs, assistant_model=assistant, do_sample=False, max_new_tokens=len(answer.new_ids)
            )
        records.append(recording.blocks)
        new_ids = ids[0, answer.prompt_length :].tolist()
        if divergence := first_divergence(model, answer.inputs["input_ids"], answer.new_ids, new_ids):
            gaps.append(divergence.gap)
    if gaps:
        words = f"{len(gaps)} of {len(answers)} answers differ from plain decoding; top-2 gap there {max(gaps):.1e}"
        yield Finding("text", words, fault=max(gaps) >= TIE_GAP)
    else:
        yield Finding("text", "equal to plain decoding")
    yield check_cached_drafts(assistant, tables, answers, records)
    # Those near an answer's end are cut short.
    yield from check_acceptance([b for r in records for b in r if b.drafted == assistant.config.num_slots], stated)


def check_cached_drafts(assistant, tables, answers: list[Answer], records: list[list[BlockRecord]]) -> Finding:
    """Compares the blocks that generation drafted with the same blocks recomputed from a full pass."""

    def agreement(lag: int = 0) -> float:
        same = []
        for answer, blocks in zip(answers, records, strict=True):
            drafted, anchor = {}, answer.prompt_length
            for block in blocks:
                if block.draft_ids and anchor + assistant.config.block_size <= answer.ids.shape[1]:
                    drafted[anchor] = block.draft_ids
                anchor += block.accepted + 1
            again = draft_at(assistant, tables, answer, list(drafted), lag=lag).draft.token_ids.tolist()
            same += [row[: len(ids)] == ids for row, ids in zip(again, drafted.values(), strict=True)]
        return sum(same) / len(same)

    recomputed = agreement()
    if recomputed >= 0.9:
        return Finding("cached drafts", f"{recomputed:.0%} of the blocks are as recomputed from a full pass")
    words = f"only {recomputed:.0%} of the blocks are those of a full pass"
    if (late := agreement(lag=1)) > recomputed:
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

# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""Decoding a cohort in this process: its prompts left padded into one batch, which shrinks as rows finish.

Rows that have finished are compacted away from the batch and from the key/value cache.

Shapes: `n` rows at the start of a cohort, `b` rows still in the batch, `T` `max_new_tokens`, `P` `loop_period`, `V`
vocabulary.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from lilicorr_hf.modeling.cache_lilicorr import CACHE

from .conversations import Answer, Progress, Request
from .options import option


CACHE_BLOCK = 256  # positions by which the preallocated cache grows
COMPACT_SHARE = 8  # the batch is compacted once one row in this many has finished
STOPS = ("run", "eos", "len", "rep")  # how an answer ended; "run" never leaves this module
RUN, EOS, LEN, REP = range(4)


@dataclass
class DecodingArguments:
    """Everything that decides an answer, and nothing else. Lengths are in tokens."""

    target: str = field(metadata={"help": "Folder or Hub name of the target; with a server, of its tokenizer."})
    max_new_tokens: int = option(4096, "Most tokens of one answer; a longer one is cut and marked `len`.")
    max_prompt_tokens: int = option(4096, "A turn with a longer rendered prompt is skipped and counted.")
    temperature: float = option(0.0, "0 decodes greedily, above 0 samples.")
    top_p: float = option(1.0, "Sample among the likeliest tokens that hold this probability; faster with top_k.")
    top_k: int = option(0, "Sample among this many likeliest tokens; 0 for all.")
    loop_period: int = option(32, "Longest repeated piece that counts as a loop; 0 switches loop detection off.")
    loop_tokens: int = option(24, "Fewest tokens that a loop covers, see `find_loop`.")
    seed: int = option(0, "Sampling noise depends on this and on the row's id alone.")


def find_loop(ids: Sequence[int], period: int, tokens: int) -> int | None:
    """Length to keep of an answer that runs into a loop, or None.

    The rule: at some position the last three or more repetitions of a piece of p <= `period` ids cover at least
    `tokens` ids. What is kept ends with the first of those repetitions. `Cohort` does the same step by step.
    """
    for end in range(1, len(ids) + 1):
        for p in range(1, period + 1):
            run = 0  # ids in a row, backwards from `end`, that equal the id p places before
            while run + p < end and ids[end - 1 - run] == ids[end - 1 - run - p]:
                run += 1
            if run >= max(2 * p, tokens - p):
                return end - run
    return None


class PreallocatedLayer(DynamicLayer):
    """A cache layer that writes in place and grows in blocks, instead of copying all keys and values at every step.

    Keys and values are views `[b, heads, length, width]` of stores `[b, heads, capacity, width]`.
    """

    is_croppable = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.stores = [key_states[:, :, :0], value_states[:, :, :0]]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends states `[b, heads, new, width]`; returns all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        for slot, states in enumerate((key_states, value_states)):
            if end > self.stores[slot].shape[2]:
                batch, heads, _, width = states.shape
                grown = states.new_empty(batch, heads, end + CACHE_BLOCK, width)
                grown[:, :, :start] = self.stores[slot][:, :, :start]
                self.stores[slot] = grown
            self.stores[slot][:, :, start:end] = states
        return self._views(end)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows `indices` `[b]` of the batch, moved to the front of the same memory."""
        length = self.get_seq_length()
        for slot, store in enumerate(self.stores):
            kept = store[: len(indices)]
            kept[:, :, :length] = store[indices, :, :length]
            self.stores[slot] = kept
        self._views(length)

    def _views(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values = (store[:, :, :length] for store in self.stores)
        return self.keys, self.values


def preallocated_cache(model: PreTrainedModel) -> Cache:
    """The model's usual cache with its full-attention layers preallocated; sliding windows stay as they are."""
    layers = DynamicCache(config=model.config).layers
    return Cache(layers=[PreallocatedLayer() if type(layer) is DynamicLayer else layer for layer in layers])


def row_noise(seed: int, row_id: str, steps: int) -> torch.Tensor:
    """Uniform numbers `[steps]` that depend on the seed and the row alone, not on the batch the row decodes in."""
    digest = hashlib.sha256(f"{seed}:{row_id}".encode()).digest()
    return torch.rand(steps, generator=torch.Generator().manual_seed(int.from_bytes(digest[:7], "big")))


def choose_tokens(logits: torch.Tensor, args: DecodingArguments, noise: torch.Tensor | None) -> torch.Tensor:
    """Next ids `[b]` from logits `[b, V]`: the largest logit, or a sample by inverting the cumulative distribution at
    `noise` `[b]`. top_k comes before top_p, as in transformers.
    """
    if noise is None:
        return logits.max(-1).indices  # the same as argmax, and four times faster for bfloat16 on a CPU
    scaled = logits.float() / args.temperature
    order = None
    if args.top_k or args.top_p < 1:
        scaled, order = scaled.topk(min(args.top_k or scaled.shape[-1], scaled.shape[-1]))
    mass = scaled.softmax(-1).cumsum(-1)
    # The set of top_p ends with the first token that reaches it; the last column stands for all of them.
    last = (mass < args.top_p).sum(-1, keepdim=True).clamp(max=mass.shape[-1] - 1)
    goal = noise[:, None] * mass.gather(-1, last)
    pick = torch.searchsorted(mass, goal, right=True).minimum(last)
    return (pick if order is None else order.gather(-1, pick))[:, 0]


class Cohort:
    """The rows of one cohort while they decode. The batch is a subset `alive` `[b]` of the n rows it began with."""

    def __init__(
        self, requests: Sequence[Request], args: DecodingArguments, eos_ids: Sequence[int], device: torch.device
    ) -> None:
        prompts = [request.prompt_ids for request in requests]
        rows, width, steps = len(prompts), max(map(len, prompts)), args.max_new_tokens
        padded = [[eos_ids[0]] * (width - len(prompt)) + prompt for prompt in prompts]
        padding = torch.tensor([[width - len(prompt)] for prompt in prompts], device=device)
        self.args, self.steps, self.width = args, steps, width
        self.input_ids = torch.tensor(padded, device=device)  # [b, width], then [b, 1]
        self.mask = torch.arange(width + steps, device=device) >= padding  # [b, width + T]
        self.positions = (torch.arange(width, device=device) - padding).clamp(min=0)  # [b, width], then [b, 1]
        self.alive = torch.arange(rows, device=device)
        self.tokens = torch.zeros(rows, steps, dtype=torch.long, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.stops = torch.full((rows,), RUN, device=device)
        self.running = rows
        self.eos_ids = torch.tensor(eos_ids, device=device)
        periods = torch.arange(1, args.loop_period + 1, device=device)
        self.loop_runs = torch.maximum(2 * periods, args.loop_tokens - periods)  # [P], see find_loop
        self.runs = torch.zeros(rows, args.loop_period, dtype=torch.long, device=device)  # [b, P]
        noise = [row_noise(args.seed, request.row_id, steps) for request in requests] if args.temperature > 0 else []
        self.noise = torch.stack(noise).to(device) if noise else None  # [n, T]

    def noise_at(self, step: int) -> torch.Tensor | None:
        """Uniform numbers `[b]` of this step, None if decoding is greedy."""
        return None if self.noise is None else self.noise[self.alive, step]

    def accept(self, tokens: torch.Tensor, step: int) -> int:
        """Records the tokens `[b]` of a step and which rows end with it; returns how many do."""
        self.tokens[self.alive, step] = tokens
        ended = torch.isin(tokens, self.eos_ids)
        looped, kept = self._loops(tokens, step)
        last = torch.full_like(ended, step + 1 == self.steps)
        new = (self.stops[self.alive] == RUN) & (ended | looped | last)
        rows = self.alive[new]
        self.stops[rows] = torch.where(ended, EOS, torch.where(looped, REP, LEN))[new]
        self.lengths[rows] = torch.where(looped & ~ended, kept, step + 1)[new]
        self.input_ids, self.positions = tokens[:, None], self.positions[:, -1:] + 1
        self.running -= len(rows)
        return len(rows)

    def _loops(self, tokens: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Which rows are in a loop `[b]` and the length to keep of those `[b]`."""
        back = min(step, self.args.loop_period)
        if back == 0:
            return torch.zeros_like(tokens, dtype=torch.bool), tokens
        history = self.tokens[self.alive, step - back : step].flip(1)  # column p-1 holds the id p places before
        self.runs[:, :back] = (self.runs[:, :back] + 1) * (history == tokens[:, None])
        fired = self.runs >= self.loop_runs
        period = fired.int().argmax(1, keepdim=True)
        return fired.any(1), step + 1 - self.runs.gather(1, period)[:, 0]

    def compact(self, cache: Cache) -> None:
        """Takes the finished rows out of the batch and the cache, once they are enough to be worth the copy."""
        if COMPACT_SHARE * (len(self.alive) - self.running) < len(self.alive):
            return
        keep = (self.stops[self.alive] == RUN).nonzero()[:, 0]
        cache.batch_select_indices(keep)
        self.alive, self.mask, self.runs = self.alive[keep], self.mask[keep], self.runs[keep]
        self.input_ids, self.positions = self.input_ids[keep], self.positions[keep]

    def answers(self) -> list[Answer]:
        """All answers, in the order of the requests."""
        lengths, stops = self.lengths.tolist(), self.stops.tolist()
        return [
            Answer(row[:length], STOPS[stop])
            for row, length, stop in zip(self.tokens.tolist(), lengths, stops, strict=True)
        ]


def end_tokens(config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase, target: str) -> list[int]:
    """Tokens that end an answer: by the generation config, else by the tokenizer.

    Raises:
        ValueError: neither names one.
    """
    eos = None if config is None else config.eos_token_id
    eos = tokenizer.eos_token_id if eos is None else eos
    ids = [eos] if isinstance(eos, int) else list(eos or [])
    if not ids:
        raise ValueError(f"neither the generation config nor the tokenizer of {target} names an end token")
    return ids


class LocalTarget:
    """The target in this process. `eos_ids` come from its generation config, else from the tokenizer."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: DecodingArguments) -> None:
        self.eos_ids = end_tokens(model.generation_config, tokenizer, args.target)
        room = model.config.get_text_config().to_dict().get("max_position_embeddings")
        if room is not None and args.max_prompt_tokens + args.max_new_tokens > room:
            raise ValueError(
                f"max_prompt_tokens {args.max_prompt_tokens} + max_new_tokens {args.max_new_tokens} exceed the "
                f"{room} positions of {args.target}"
            )
        self.model, self.args = model.eval(), args

    @torch.inference_mode()
    def answer(self, requests: Sequence[Request], progress: Progress) -> list[Answer]:
        """Decodes the requests as one cohort; `progress` is called at every step."""
        cohort = Cohort(requests, self.args, self.eos_ids, self.model.device)
        cache = preallocated_cache(self.model)
        for step in range(self.args.max_new_tokens):
            logits = self.model(
                input_ids=cohort.input_ids,
                attention_mask=cohort.mask[:, : cohort.width + step],
                position_ids=cohort.positions,
                **{CACHE: cache},
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            decoded = cohort.running
            progress(cohort.accept(choose_tokens(logits, self.args, cohort.noise_at(step)), step), decoded)
            if cohort.running == 0:
                break
            cohort.compact(cache)
        return cohort.answers()

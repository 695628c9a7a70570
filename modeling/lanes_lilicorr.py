# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""Rows that are decoded in step: how each of their tokens is decided, and what `generate` returns besides.

Shapes: `r` rows of a lane, `n` tokens so far, `d` drafted tokens, `V` vocabulary.
"""

import math
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.cache_utils import Cache
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .cache_lilicorr import CACHE
from .generation_lilicorr import PREFIX_PROCESSORS
from .tree_pass_lilicorr import DraftTree


# A draft is steered by processors that asking leaves no trace in; the caller's own function might count its calls.
STEERING_PROCESSORS = {*PREFIX_PROCESSORS} - {logits_process.PrefixConstrainedLogitsProcessor}


class Lane:
    """
    Rows of a batch that advance in step. Processors, criteria and streamer are called once a token with all of them,
    in the order of plain decoding.

    Args:
        ids (`torch.LongTensor` of shape `[r, n]`): their prompts.
        processors (`LogitsProcessorList`), criteria (`StoppingCriteriaList`), config (`GenerationConfig`): the call's.
        streamer (`BaseStreamer`): takes the tokens.
        returned ([`Returned`]): takes scores and logits.
        first (`int`): place of the first row in the batch.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: Any = None,
        returned: "Returned | None" = None,
        first: int = 0,
    ):
        self.ids = ids
        self.first = first
        self.processors = processors
        self.criteria = criteria
        self.do_sample = config.do_sample
        self.streamer = streamer
        self.returned = returned
        self.steering = LogitsProcessorList(p for p in processors if type(p) in STEERING_PROCESSORS)
        self.unfinished = torch.ones(len(ids), dtype=torch.long, device=ids.device)
        # Rows that are finished go on with padding only if a criterion knows an end token, as in plain decoding.
        ends = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        pad_token_id: Any = config._pad_token_tensor
        self.pad_token_id = pad_token_id.to(ids.device) if ends else None
        self.done = False
        self.path: list[torch.Tensor] = []
        # A greedy row of whose tokens nobody hears one by one, and whose end they tell themselves, is taken in leaps.
        kinds = {type(criterion) for criterion in criteria}
        heard = processors or streamer is not None or (returned is not None and returned.wants_steps)
        self.leaps = len(ids) == 1 and not (self.do_sample or heard) and kinds <= {EosTokenCriteria, MaxLengthCriteria}
        self.ends: set[int] = set()
        self.longest = math.inf
        for criterion in criteria if self.leaps else ():
            if isinstance(criterion, MaxLengthCriteria):
                self.longest = min(self.longest, criterion.max_length)
            else:
                self.ends.update(criterion.eos_token_id.flatten().tolist())

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    def verify(
        self,
        logits: torch.Tensor,
        draft_ids: torch.Tensor,
        proposal_logits: torch.Tensor | None = None,
        parents: torch.Tensor | None = None,
    ) -> None:
        """Takes tokens as long as they are drafted ones in all rows, then one more.

        Args:
            logits (`torch.Tensor` of shape `[r, d + 1, V]`): the target's, after the last token and each drafted one.
            draft_ids (`torch.LongTensor` of shape `[r, d]`): the draft.
            proposal_logits (`torch.Tensor` of shape `[r, d, V]`): what it was drawn from, if it was.
            parents (`torch.LongTensor` of shape `[r, d]`): as in [`DraftTree`], if it is a tree.
        """
        if parents is not None:
            return self.walk(logits, DraftTree(draft_ids, parents))
        for i, step in enumerate(logits.unbind(dim=1)):
            drafted = draft_ids[:, i] if i < draft_ids.shape[1] else None
            proposal = None if proposal_logits is None or drafted is None else proposal_logits[:, i]
            tokens = self.take(step, drafted, proposal)
            if self.done or drafted is None or not torch.equal(tokens, drafted):
                break

    def leap(self, tokens: torch.Tensor, told: list[int], drafted: list[int], parents: list[int] | None) -> None:
        """[`verify`] of a row whose host has been told the target's tokens after each place, `[1, d + 1]`, and the
        draft; parents are `None` for a chain."""
        before = range(len(drafted)) if parents is None else [parent + 1 for parent in parents]
        places: dict[tuple[int, int], int] = {}
        for child, edge in enumerate(zip(before, drafted, strict=True), start=1):
            places.setdefault(edge, child)
        path = [0]
        while True:
            edge = path[-1], told[path[-1]]
            ends = edge[1] in self.ends or self.length + len(path) >= self.longest
            if ends or edge not in places:
                break
            path.append(places[edge])
        taken = tokens[:, : len(path)] if parents is None else tokens[:, path]
        if parents is not None:
            self.path = list(torch.tensor(path).split(1))
        self.ids, self.done = torch.cat([self.ids, taken], dim=-1), ends
        # One of them may have to warn of a long text; their answer is known, and not waited for.
        self.criteria(self.ids, None)  # type: ignore[arg-type]

    def walk(self, logits: torch.Tensor, tree: DraftTree) -> None:
        """[`verify`] of a tree: down from the anchor to the children that are the target's own tokens."""
        rows = torch.arange(len(self.ids), device=logits.device)
        place, self.path = torch.zeros_like(rows), []
        while True:
            self.path.append(place.to(self.ids.device))
            tokens = self.take(logits[rows, place])
            place = tree.child(self.path[-1], tokens).to(logits.device)
            if self.done or not place.all():
                break

    def places(self, count: int, length: int) -> torch.Tensor:
        """Where in the tree the `count` tokens of the last walk were decided, `[r, length]`, filled up with 0."""
        places = self.ids.new_zeros(len(self.ids), length)
        for i, place in enumerate(self.path[:count]):
            places[:, i] = place
        return places

    def take(
        self, logits: torch.Tensor, drafted: torch.Tensor | None = None, proposal_logits: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Decides and appends the next token of each row, `[r]`, from the target's logits `[r, V]`."""
        logits = logits.to(copy=True, dtype=torch.float32, device=self.ids.device)
        scores = self.processors(self.ids, logits)  # type: ignore[arg-type]
        if self.returned is not None:
            self.returned.add_step(scores, logits)
        tokens = choose_token(scores, self.do_sample, drafted, proposal_logits)
        if self.pad_token_id is not None:
            tokens = tokens * self.unfinished + self.pad_token_id * (1 - self.unfinished)
        self.ids = torch.cat([self.ids, tokens[:, None]], dim=-1)
        all_scores = None if self.returned is None else self.returned.scores
        self.unfinished = self.unfinished & ~self.criteria(self.ids, all_scores)  # type: ignore[arg-type]
        self.done = bool(self.unfinished.max() == 0)
        if self.streamer is not None:
            self.streamer.put(tokens.cpu())
        return tokens

    def fill(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """The draft `[r, d]`, of padding in rows that will take nothing else."""
        if self.pad_token_id is None or len(self.ids) == 1:
            return draft_ids
        return torch.where(self.unfinished.unsqueeze(-1) == 1, draft_ids, self.pad_token_id)

    def fill_parents(self, parents: torch.Tensor, depth: int) -> torch.Tensor:
        """Parents `[r, n]` of a draft that, in finished rows, is a chain of padding no longer than `depth`."""
        if self.pad_token_id is None or len(self.ids) == 1:
            return parents
        chain = torch.arange(-1, parents.shape[1] - 1, device=parents.device)
        chain = torch.where(chain < depth - 1, chain, -1)
        return torch.where(self.unfinished.unsqueeze(-1) == 1, parents, chain)

    def steer(self, drafted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Processed logits `[r, V]` of the drafter, for the slot after `drafted [r, s]`."""
        prefix = torch.cat([self.ids, self.fill(drafted.to(self.ids.device))], dim=-1)
        return self.steering(prefix, logits)  # type: ignore[arg-type]

    def padded(self, length: int) -> torch.Tensor:
        """Ids `[r, length]`, filled up with padding."""
        if self.length == length:
            return self.ids
        padding = self.pad_token_id.expand(len(self.ids), length - self.length)  # type: ignore[union-attr]
        return torch.cat([self.ids, padding], dim=-1)


def leap(
    lanes: list[Lane],
    logits: torch.Tensor,
    draft_ids: torch.Tensor,
    parents: torch.Tensor | None = None,
    finite: torch.Tensor | None = None,
) -> bool:
    """[`Lane.verify`] of lanes that leap. The host waits for the device once, and is told all it has to know.

    Args:
        lanes (list of [`Lane`]): of a row each.
        logits (`torch.Tensor` of shape `[b, d + 1, V]`), draft_ids (`torch.LongTensor` of shape `[b, d]`): of all.
        parents (`torch.LongTensor` of shape `[b, d]`): of drafts that are trees.
        finite (`torch.BoolTensor` of shape `[b]`): whether the scores of a row's draft were, if it has any.

    Returns:
        whether the scores of all drafts were finite.
    """
    # Plain decoding compares in fp32, which only a wider dtype could tell.
    logits = logits.float() if logits.dtype == torch.float64 else logits
    tokens, drafted = logits.argmax(dim=-1).to(draft_ids.device), draft_ids.shape[1]
    sound = tokens[:, :0] if finite is None else finite.unsqueeze(-1).to(tokens)
    before = tokens[:, :0] if parents is None else parents.to(tokens)
    told = torch.cat([tokens, draft_ids, before, sound], dim=-1).tolist()
    for lane, row, numbers in zip(lanes, tokens.split(1), told, strict=True):
        target, draft, edges = numbers[: drafted + 1], numbers[drafted + 1 :][:drafted], None
        if parents is not None:
            edges = numbers[2 * drafted + 1 :][:drafted]
        lane.leap(row, target, draft, edges)
    return finite is None or all(numbers[-1] for numbers in told)


def choose_token(
    scores: torch.Tensor,
    do_sample: bool,
    drafted: torch.Tensor | None = None,
    proposal_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """The target's token of each row, `[r]`, given its processed scores `[r, V]`.

    Without a proposal that is what plain decoding takes: a draft which is a function of the prefix is kept while it is
    equal. A draft drawn from `proposal_logits [r, V]` is put to the test of [`accept_or_resample`].
    """
    if not do_sample:
        return scores.argmax(dim=-1)
    probs = scores.softmax(dim=-1)
    if drafted is None or proposal_logits is None:
        return torch.multinomial(probs, num_samples=1).squeeze(1)
    return accept_or_resample(probs, proposal_logits.to(probs.dtype).softmax(dim=-1), drafted)


def accept_or_resample(probs: torch.Tensor, proposal: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
    """A token of each row that is distributed as `probs`, and often the drafted one (arXiv 2211.17192, algorithm 1).

    Args:
        probs (`torch.Tensor` of shape `[r, V]`): the target's distribution, `p`.
        proposal (`torch.Tensor` of shape `[r, V]`): the distribution the draft was drawn from, `q`.
        drafted (`torch.LongTensor` of shape `[r]`): the draft, kept with probability `min(1, p / q)`. Otherwise the
            token is drawn from `max(p - q, 0)`, which excludes it.
    """
    p, q = (x.gather(-1, drafted.unsqueeze(-1)).squeeze(-1) for x in (probs, proposal))
    accepted = torch.rand_like(p) * q < p
    rest = (probs - proposal).clamp(min=0)
    # Nothing is left where both are equal: then the draft was accepted.
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, probs)
    return torch.where(accepted, drafted, torch.multinomial(rest, num_samples=1).squeeze(1))


def row_processors(processors: LogitsProcessorList, row: int) -> LogitsProcessorList:
    """Processors for one row of a batch alone: two of them know rows by their number."""

    def for_row(processor):
        if isinstance(processor, logits_process.PrefixConstrainedLogitsProcessor):
            allow = processor._prefix_allowed_tokens_fn
            return logits_process.PrefixConstrainedLogitsProcessor(lambda _, ids: allow(row, ids), num_beams=1)
        if isinstance(processor, logits_process.RepetitionPenaltyLogitsProcessor):
            ignored = processor.prompt_ignore_length
            ignored = ignored[row : row + 1] if isinstance(ignored, torch.Tensor) else ignored
            return logits_process.RepetitionPenaltyLogitsProcessor(processor.penalty, ignored)
        return processor

    return LogitsProcessorList(for_row(processor) for processor in processors)


class Returned:
    """What `return_dict_in_generate` asks for besides the ids: tuples with an entry per token, or `None`."""

    def __init__(self, config: GenerationConfig):
        def wanted(flag) -> tuple | None:
            return () if config.return_dict_in_generate and flag else None

        self.scores = wanted(config.output_scores)
        self.logits = wanted(config.output_logits)
        self.attentions = wanted(config.output_attentions)
        self.hidden_states = wanted(config.output_hidden_states)

    @property
    def wants_steps(self) -> bool:
        """Whether scores or logits are returned."""
        return self.scores is not None or self.logits is not None

    def add_step(self, scores: torch.Tensor, logits: torch.Tensor) -> None:
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)

    def add_prefill(self, outputs: Any) -> None:
        """States of the prompt, which belong to the first token."""
        if self.attentions is not None:
            self.attentions += (outputs.attentions,)
        if self.hidden_states is not None:
            self.hidden_states += (outputs.hidden_states,)

    def add_block(self, outputs: Any, taken: int, cache: Cache) -> None:
        """States of the first `taken` rows of a block, cut as if each had been a step of its own.

        Args:
            cache (`Cache`): already without what was rejected; it tells how far a step would have seen.
        """
        if self.hidden_states is not None:
            self.hidden_states += tuple(
                tuple(layer[:, i : i + 1] for layer in outputs.hidden_states) for i in range(taken)
            )
        if self.attentions is not None:
            self.attentions += tuple(
                tuple(
                    None if weights is None else step_attention(weights, i, taken, cache.layers[k])
                    for k, weights in enumerate(outputs.attentions)
                )
                for i in range(taken)
            )

    def output(self, ids: torch.Tensor, cache: Cache) -> GenerateDecoderOnlyOutput:
        return GenerateDecoderOnlyOutput(
            sequences=ids,  # type: ignore[arg-type]
            scores=self.scores,
            logits=self.logits,
            attentions=self.attentions,
            hidden_states=self.hidden_states,
            **{CACHE: cache},
        )


def step_attention(weights: torch.Tensor, row: int, taken: int, layer: Any) -> torch.Tensor:
    """The attention `[r, heads, 1, keys]` that row `row` of a block, a step of its own, would have had.

    Args:
        weights (`torch.Tensor` of shape `[r, heads, d + 1, keys]`): of the block.
        layer (`CacheLayerMixin`): of the cache, which holds the `taken` first positions of the block.
    """
    weights, block = weights[:, :, row : row + 1], weights.shape[2]
    if layer.is_compileable:
        return weights
    end = weights.shape[-1] - block + row + 1
    seen = layer.get_seq_length() - taken + row
    if layer.is_sliding:
        seen = min(seen, layer.sliding_window - 1)
    return weights[..., end - seen - 1 : end]


__all__ = ["Lane", "Returned", "accept_or_resample", "choose_token", "leap", "row_processors"]

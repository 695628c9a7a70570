"""Sampling keeps the target's distribution, whatever the draft was drawn from; and only if that is stated truly."""

import functools

import pytest
import torch
from tiny import tiny_assistant, tiny_target

from lilicorr_hf import LiLiCorrDraftModel
from lilicorr_hf.modeling.lanes_lilicorr import accept_or_resample, choose_token


def chi_square(observed: torch.Tensor, expected: torch.Tensor, noise: float = 0.0) -> tuple[float, float]:
    """Statistic of counts `[V]` against expected counts `[V]`, and the bound five standard deviations above its mean.

    Args:
        noise (`float`): variance of `expected` over that of `observed`, where `expected` is counted itself.
    """
    often = expected >= 5
    observed = torch.cat([observed[often], observed[~often].sum()[None]])
    expected = torch.cat([expected[often], expected[~often].sum()[None]])
    kept = expected > 0
    assert observed[~kept].sum() == 0
    statistic = ((observed - expected)[kept] ** 2 / expected[kept]).sum().item()
    freedom = int(kept.sum()) - 1
    return statistic, (1 + noise) * (freedom + 5 * (2 * freedom) ** 0.5)


# Distributions over 6 tokens: alike, apart, the draft's wider or narrower, with nothing in common.
P = torch.tensor([0.05, 0.3, 0.0, 0.4, 0.05, 0.2])
PROPOSALS = {
    "equal": P,
    "apart": torch.tensor([0.6, 0.05, 0.1, 0.05, 0.2, 0.0]),
    "wide": torch.full((6,), 1 / 6),
    "narrow": torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0]),
    "disjoint": torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0]),
}


@pytest.mark.parametrize("name", PROPOSALS)
def test_verifier_draws_from_the_target_and_accepts_as_often_as_can_be(name):
    torch.manual_seed(0)
    runs, q = 200_000, PROPOSALS[name]
    drafted = torch.multinomial(q, runs, replacement=True)
    tokens = accept_or_resample(P.expand(runs, -1), q.expand(runs, -1), drafted)
    statistic, bound = chi_square(torch.bincount(tokens, minlength=6).double(), P.double() * runs)
    assert statistic < bound
    overlap = torch.minimum(P, q).sum().item()
    assert abs((tokens == drafted).double().mean().item() - overlap) < 5 * (0.25 / runs) ** 0.5


def test_verifier_with_a_wrong_proposal_is_found_out():
    """Marginals stated for a draft that was the best token: the fault the tests of this file are for."""
    torch.manual_seed(0)
    runs, q = 20_000, PROPOSALS["wide"]
    drafted = torch.full((runs,), 3)
    tokens = accept_or_resample(P.expand(runs, -1), q.expand(runs, -1), drafted)
    statistic, bound = chi_square(torch.bincount(tokens, minlength=6).double(), P.double() * runs)
    assert statistic > 10 * bound


def test_tokens_without_a_proposal_are_those_of_plain_sampling():
    scores = torch.randn(7, 50)
    torch.manual_seed(3)
    plain = torch.multinomial(scores.softmax(dim=-1), num_samples=1).squeeze(1)
    torch.manual_seed(3)
    assert torch.equal(choose_token(scores, True, drafted=plain), plain)
    assert torch.equal(choose_token(scores, False), scores.argmax(dim=-1))


class Marginals(LiLiCorrDraftModel):
    """The published fault: the drafter's distributions of single slots are handed over as what the walk was."""

    def choose(self, logits, *args):
        output = super().choose(logits, *args)
        output.proposal_logits = logits[:, : output.token_ids.shape[1]]
        return output


RUNS = 4000
PROMPT = torch.tensor([[3, 1]])
OPTIONS = {
    "top_k": {"temperature": 1.5, "top_k": 4},
    "top_p": {"temperature": 1.2, "top_p": 0.8, "top_k": 0},
    "repetition_penalty": {"temperature": 0.8, "top_k": 0, "repetition_penalty": 1.6},
}


@functools.cache
def eight_tokens():
    return tiny_target("llama", vocab_size=8, initializer_range=0.3, bos_token_id=0)


def counts(name: str, runs: int, assistant=None) -> torch.Tensor:
    """How often each pair of second and third tokens comes: the two that a draft decides."""
    torch.manual_seed(1)
    output = eight_tokens().generate(
        PROMPT, do_sample=True, num_return_sequences=runs, max_new_tokens=3, assistant_model=assistant, **OPTIONS[name]
    )
    return torch.bincount(output[:, 3] * 8 + output[:, 4], minlength=64).double()


@functools.cache
def expected(name: str) -> torch.Tensor:
    """Counts of plain sampling for `RUNS` runs, from eight times as many."""
    return counts(name, 8 * RUNS) / 8


def drafter(model_class=LiLiCorrDraftModel, **changes):
    return tiny_assistant(0, model_class, vocab_size=8, mask_token_id=7, block_size=3, **changes)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    "changes",
    [{}, {"sampled_walk": True}, {"tree_budget": 7}],
    ids=["greedy walk", "sampled walk", "tree"],
)
def test_generated_tokens_are_distributed_as_plain_ones(name, changes):
    statistic, bound = chi_square(counts(name, RUNS, drafter(**changes)), expected(name), noise=1 / 8)
    assert statistic < bound


@pytest.mark.parametrize("name", OPTIONS)
def test_generated_tokens_of_a_wrong_proposal_are_not(name):
    statistic, bound = chi_square(counts(name, RUNS, drafter(Marginals)), expected(name), noise=1 / 8)
    assert statistic > bound


def test_sampled_walk_at_one_sequence(monkeypatch):
    """Drafts are drawn at the call's temperature, differ from run to run, and greedy calls get none of it."""
    seen = []
    original = LiLiCorrDraftModel.choose

    def spy(self, logits, output, anchor_ids, tables, process=None, temperature=None):
        seen.append((temperature, original(self, logits, output, anchor_ids, tables, process, temperature)))
        return seen[-1][1]

    monkeypatch.setattr(LiLiCorrDraftModel, "choose", spy)
    assistant = drafter(sampled_walk=True)
    for options in ({"do_sample": True, "temperature": 0.5, "suppress_tokens": [2]}, {"do_sample": False}):
        output = eight_tokens().generate(PROMPT, assistant_model=assistant, max_new_tokens=30, **options)
        assert output.shape == (1, 32)
    drawn = [output for temperature, output in seen if temperature is not None]
    assert {temperature for temperature, _ in seen} == {0.5, None} and len(drawn) > 5
    for output in drawn:
        q = output.proposal_logits.softmax(dim=-1)
        assert (q[..., 2] == 0).all() and (q > 0).sum(dim=-1).max() <= 3
        assert (q.gather(-1, output.token_ids.unsqueeze(-1)) > 0).all()
    assert all(output.proposal_logits is None for temperature, output in seen if temperature is None)

"""A sampled vocabulary: labels always compete, and the normaliser is that of all tokens on average."""

import pytest
import torch
from tiny import tiny_target

from lilicorr_hf.modeling.target_lilicorr import TargetTables
from lilicorr_hf.training.objective import predict_slots
from lilicorr_hf.training.vocabulary import Vocabulary, candidate_logits


@pytest.fixture(scope="module")
def tables():
    return TargetTables(tiny_target("llama").float())


def test_all_tokens_need_no_drawing():
    assert Vocabulary(64, 64, [[1, 2]]).draw(torch.tensor([3])) is None
    assert Vocabulary(64, 1000, [[1, 2]]).draw(torch.tensor([3])) is None


def test_a_draw_holds_frequent_tokens_and_labels_once():
    vocabulary = Vocabulary(64, 16, [[5] * 9 + [7] * 5, [7] * 3 + [9] * 2])
    labels = torch.tensor([[7, 60], [61, 60]])
    drawn = vocabulary.draw(labels)
    ids = drawn.token_ids.tolist()
    assert len(set(ids)) == len(ids) == 8 + 2 + 8
    assert {5, 7, 9, 60, 61} <= set(ids)
    assert torch.equal(drawn.index[drawn.token_ids], torch.arange(len(ids)))
    # The others stand for all that are not there.
    assert drawn.log_weights.exp().sum().item() == pytest.approx(64, rel=1e-5)


def test_normaliser_is_right_on_average(tables):
    torch.manual_seed(0)
    vocabulary = Vocabulary(64, 24, [list(range(10))])
    states, labels = 0.3 * torch.randn(6, 32), torch.randint(0, 64, (6,))
    whole = tables.logits(states).exp().sum(dim=-1)
    estimates = [vocabulary.draw(labels).logits(tables, states).exp().sum(dim=-1) for _ in range(3000)]
    torch.testing.assert_close(torch.stack(estimates).mean(dim=0), whole, rtol=0.03, atol=0)


def test_drawing_all_others_is_the_full_softmax(tables):
    """With every token drawn one way or another, each prediction and its gradient equals the full vocabulary's."""
    torch.manual_seed(0)
    states, labels = torch.randn(6, 32), torch.randint(0, 64, (6,))
    target = torch.randn(6, 32)
    drawn = Vocabulary(64, 62, [list(range(10))]).draw(torch.arange(64))
    found = []
    for vocabulary in (None, drawn):
        hidden = states.clone().requires_grad_()
        result = predict_slots(hidden, labels, tables, 4, 100, vocabulary, target)
        (result.cross_entropy.sum() + result.divergence.sum() + result.log_probs.sum()).backward()
        found.append((result.cross_entropy, result.candidate_ids, result.log_probs, result.divergence, hidden.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_divergence_is_zero_from_itself(tables):
    states, labels = torch.randn(6, 32), torch.randint(0, 64, (6,))
    result = predict_slots(states, labels, tables, 4, 100, None, states)
    assert result.divergence.abs().max() < 1e-5
    assert predict_slots(states, labels, tables, 4, 100, None, -states).divergence.min() > 0.1


def test_candidate_logits_are_rows_of_all_logits(tables):
    states, ids = torch.randn(6, 32), torch.randint(0, 64, (6, 4))
    torch.testing.assert_close(candidate_logits(tables, states, ids), tables.logits(states).gather(-1, ids))

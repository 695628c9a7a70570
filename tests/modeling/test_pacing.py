"""How far a call drafts, on clocks of its own."""

import itertools

import pytest
import torch
from tiny import Oracle, tiny_assistant, tiny_target

from lilicorr_hf import record
from lilicorr_hf.modeling import drafting_lilicorr
from lilicorr_hf.modeling.drafting_lilicorr import cut, survival
from lilicorr_hf.modeling.lattice_lilicorr import Lattice
from lilicorr_hf.modeling.modeling_dflash import DraftOutput
from lilicorr_hf.modeling.pacing_lilicorr import TRIAL, Pace
from lilicorr_hf.modeling.tree_lilicorr import best_first_tree, given_anything, marginal_tree


PLAIN, DRAFT, ROW = 1.0, 0.3, 0.05


def simulate(chance: float, passes: int = 400, slots: int = 7) -> tuple[float, float, list[int]]:
    """Tokens, seconds and draft lengths of a call whose every token is accepted with `chance`, deterministically."""
    pace = Pace()
    tokens, seconds, lengths = 0.0, 0.0, []
    for _ in range(passes):
        wanted = pace.wants_draft()
        survival = [chance**s for s in range(1, slots + 1)]
        length = pace.length(survival) if wanted else 0
        gained = 1 + sum(survival[:length])
        draft, verify = (DRAFT if wanted else None), PLAIN + ROW * length
        pace.add(length, gained, draft, verify)
        tokens, seconds = tokens + gained, seconds + (draft or 0) + verify
        lengths.append(length)
    return tokens, seconds, lengths


@pytest.mark.parametrize("chance", [0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 0.95])
def test_a_call_is_hardly_slower_than_plain_decoding_and_faster_where_it_can_be(chance):
    tokens, seconds, _ = simulate(chance)
    full = 1 + sum(chance**s for s in range(1, 8))
    best = max(1 / PLAIN, full / (PLAIN + DRAFT + 7 * ROW))
    assert tokens / seconds > 0.95 * best


def test_drafts_are_cut_where_a_row_costs_more_than_it_earns():
    _, _, lengths = simulate(0.5)
    # 0.5 ** s tokens against 0.05 seconds at a rate of about 1.3 tokens a second: up to the third or fourth.
    assert lengths[0] == 7 and set(lengths[-50:]) <= {3, 4}


def test_hopeless_drafting_rests_longer_and_longer():
    _, _, lengths = simulate(0.0, passes=200)
    drafted = [i for i, length in enumerate(lengths) if length]
    # Trials after 16, 32, 64 and 128 passes.
    assert len(drafted) <= 5 * TRIAL


def test_drafting_comes_back_when_the_text_turns_easy():
    pace = Pace()
    wanted = []
    for i in range(300):
        draft = pace.wants_draft()
        wanted.append(draft)
        accepted = 7 if draft and i > 100 else 0
        pace.add(7 if draft else 0, 1 + accepted, DRAFT if draft else None, PLAIN)
    assert sum(wanted[:100]) < 20
    assert all(wanted[-100:])


def test_a_drafter_that_underestimates_itself_is_corrected():
    pace = Pace()
    lengths = []
    for _ in range(30):
        length = pace.length([0.1**s for s in range(1, 8)]) if pace.wants_draft() else 0
        pace.add(length, 1 + length, DRAFT if length else None, PLAIN + ROW * length)
        lengths.append(length)
    assert lengths[-1] == 7


def test_survival_is_the_drafters_probability_of_the_walk():
    log_probs = torch.tensor([[[0.5, 0.3], [0.9, 0.1], [0.6, 0.2]]]).log()
    lattice = Lattice(candidate_ids=torch.zeros(1, 3, 2), log_probs=log_probs, walk=torch.tensor([[1, 0, 0]]))
    walk = DraftOutput(token_ids=torch.zeros(1, 3), lattice=lattice)
    assert survival(walk, 2) == pytest.approx([0.3, 0.27])
    assert survival(walk, 7) == pytest.approx([0.3, 0.27, 0.162])
    assert survival(walk, 0) == []


def test_survival_of_a_tree_is_that_of_its_paths():
    tree = best_first_tree(
        torch.tensor([[[4, 5], [6, 7]]]), given_anything(torch.tensor([[[0.7, 0.3], [0.9, 0.1]]]).log()), 4
    )
    assert tree.token_ids.tolist() == [[4, 6, 5, 6]] and tree.parents.tolist() == [[-1, 0, -1, 2]]
    assert survival(DraftOutput(**tree._asdict()), 2) == pytest.approx([0.7, 0.63, 0.3, 0.27])


def test_a_cut_tree_is_the_tree_of_that_size():
    torch.manual_seed(0)
    logits = torch.randn(1, 4, 30)
    for length in (9, 5, 1, 0):
        output, smaller = DraftOutput(**marginal_tree(logits, 9)._asdict()), marginal_tree(logits, length)
        cut(output, length)
        assert output.token_ids.tolist() == smaller.token_ids.tolist()
        assert torch.equal(output.parents, smaller.parents)
        assert torch.equal(output.log_probs, smaller.log_probs)


@pytest.mark.parametrize("tree_budget", [0, 6])
@pytest.mark.parametrize("wanted", [[True, False, False], [False, False, True], [True, True, False]])
def test_text_is_the_same_however_a_call_is_paced(monkeypatch, wanted, tree_budget):
    """Pauses leave context rows unread, and the drafter reads them with its next block."""

    class Scripted(Pace):
        def __init__(self):
            super().__init__()
            self.answers = itertools.cycle(wanted)

        def wants_draft(self) -> bool:
            return next(self.answers)

        def length(self, survival):
            return len(survival) - 1

    monkeypatch.setattr(drafting_lilicorr, "Pace", Scripted)
    target, assistant = tiny_target("qwen3"), tiny_assistant(adaptive_draft=True, tree_budget=tree_budget).double()
    inputs = {"input_ids": torch.tensor([[5, 9, 2, 7]])}
    options = {"max_new_tokens": 30, "do_sample": False}
    plain = target.generate(**inputs, **options)
    read = []
    handle = assistant.fc.register_forward_hook(lambda _, args, __: read.append(args[0]))
    with record() as recording:
        assert torch.equal(target.generate(**inputs, **options, assistant_model=assistant), plain)
    handle.remove()
    assert {block.drafted for block in recording.blocks} >= {0, (tree_budget or 4) - 1}
    # Every row before the last draft's anchor was read once, in order.
    rows = torch.cat(read, dim=1)
    states = target(plain, output_hidden_states=True).hidden_states
    expected = torch.cat([states[i + 1] for i in assistant.config.target_layer_ids], dim=-1)
    assert rows.shape[1] > 20
    torch.testing.assert_close(rows, expected[:, : rows.shape[1]])


def test_a_draft_the_target_always_accepts_is_hardly_ever_left_out(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(drafting_lilicorr.time, "perf_counter", lambda: next(clock))
    # The drafter is random, its tokens are not.
    monkeypatch.setattr(drafting_lilicorr, "survival", lambda output, budget: [0.9, 0.8, 0.7, 0.6][:budget])
    target = tiny_target("llama")
    assistant = tiny_assistant(model_class=Oracle, adaptive_draft=True).double()
    ids = torch.tensor([[1, 2, 3]])
    assistant.answer = target.generate(ids, max_new_tokens=60, do_sample=False)
    with record() as recording:
        text = target.generate(ids, max_new_tokens=60, do_sample=False, assistant_model=assistant)
    assert torch.equal(text, assistant.answer)
    # One pass without a draft to compare with, one where nothing is left to draft.
    assert [block.drafted for block in recording.blocks].count(0) <= 2

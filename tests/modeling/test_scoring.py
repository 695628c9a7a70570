"""The scoring pass in its modes: the same lattice, whichever runs."""

import copy
import logging
import pickle

import pytest
import torch
from calls import compiled_graphs
from tiny import tiny_assistant, tiny_target

from lilicorr_hf.modeling import scoring_lilicorr
from lilicorr_hf.modeling.lattice_lilicorr import Lattice, candidate_pool, greedy_walk
from lilicorr_hf.modeling.scoring_lilicorr import VARIABLE, FoldedHead, ScoringPass, choose_mode
from lilicorr_hf.modeling.target_lilicorr import TargetTables


@pytest.fixture
def model():
    model = tiny_assistant()
    torch.manual_seed(4)
    for parameter in model.lilicorr.parameters():
        parameter.data.normal_(std=0.5)
    return model


@pytest.fixture(scope="module")
def tables():
    return TargetTables(tiny_target("llama").float())


def random_inputs(model, rows: int = 1, seed: int = 0) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seed)
    slots, width = model.config.num_slots, model.config.hidden_size
    logits = torch.randn(rows, slots, model.config.vocab_size)
    return logits, torch.randn(rows, slots, width), torch.randn(rows, width)


def slow(model, tables, inputs) -> Lattice:
    """What the modes stand for, by the head as it is trained."""
    logits, hidden, anchor = inputs
    ids, log_probs = candidate_pool(logits, model.config.candidate_topk)
    start, pair = model.lilicorr(tables.embed(ids), log_probs, hidden, anchor)
    return Lattice(ids, log_probs, start, pair, greedy_walk(start, pair))


def assert_same(actual: Lattice, expected: Lattice) -> None:
    for name in ("candidate_ids", "walk"):
        assert torch.equal(actual[name], expected[name])
    for name in ("log_probs", "start_scores", "pair_scores"):
        torch.testing.assert_close(actual[name], expected[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 3])
@torch.no_grad()
def test_the_folded_head_gives_the_trained_heads_scores(model, tables, rows):
    inputs = random_inputs(model, rows)
    lattice = model.scoring(model.lilicorr, tables, inputs)
    assert isinstance(model.scoring.folded[1], FoldedHead)
    assert_same(lattice, slow(model, tables, inputs))


@torch.no_grad()
def test_a_changed_head_is_folded_again(model, tables):
    inputs = random_inputs(model)
    model.scoring(model.lilicorr, tables, inputs)
    kept = model.scoring.folded
    model.scoring(model.lilicorr, tables, inputs)
    assert model.scoring.folded is kept
    model.lilicorr.in_head.weight.neg_()
    model.lilicorr.relative_slot_bias.add_(1)
    assert_same(model.scoring(model.lilicorr, tables, inputs), slow(model, tables, inputs))
    model.config.candidate_topk = 2
    assert_same(model.scoring(model.lilicorr, tables, inputs), slow(model, tables, inputs))


@torch.no_grad()
def test_a_head_that_was_trained_is_folded_again(model, tables):
    """Fused optimizers leave no version behind, as `data` does not."""
    inputs = random_inputs(model)
    model.scoring(model.lilicorr, tables, inputs)
    model.train()
    model.lilicorr.in_head.weight.data.neg_()
    model.eval()
    assert_same(model.scoring(model.lilicorr, tables, inputs), slow(model, tables, inputs))


@torch.no_grad()
def test_a_head_with_hooks_is_called(model, tables):
    """FSDP gathers its shards by a hook, accelerate moves inputs by a `forward` of its own."""
    calls: list[torch.Tensor] = []
    hook = model.lilicorr.register_forward_hook(lambda *args: calls.append(args[-1]))
    model.scoring(model.lilicorr, tables, random_inputs(model))
    assert len(calls) == 1
    hook.remove()
    forward = model.lilicorr.forward
    model.lilicorr.forward = lambda *args: calls.append(args) or forward(*args)
    model.scoring(model.lilicorr, tables, random_inputs(model))
    assert len(calls) == 2


def test_gradients_reach_every_part_of_the_head(model, tables):
    lattice = model.scoring(model.lilicorr, tables, random_inputs(model), "compile")
    (lattice.start_scores.sum() + lattice.pair_scores.square().sum()).backward()
    assert all(parameter.grad is not None for parameter in model.lilicorr.parameters())


def test_a_copy_starts_anew(model, tables):
    with torch.no_grad():
        model.scoring(model.lilicorr, tables, random_inputs(model))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.scoring is not model.scoring and twin.scoring.folded is None


def test_the_mode_is_the_configs_or_the_environments(model, tables, monkeypatch):
    monkeypatch.setenv(VARIABLE, "compile")
    for device in (torch.device("cpu"), torch.device("cuda")):
        assert choose_mode(None, device) == "compile" and choose_mode("eager", device) == "eager"
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(ValueError, match="no scoring mode 'fast'.*eager"):
        model.scoring(model.lilicorr, tables, random_inputs(model))


def test_where_nobody_asks_gpus_replay_graphs(monkeypatch):
    for device, mode in (("cpu", "eager"), ("mps", "eager"), ("cuda", "cuda_graph"), ("cuda:1", "cuda_graph")):
        assert choose_mode(None, torch.device(device)) == mode
    # A process that serves one call.
    monkeypatch.setenv("SPACES_ZERO_GPU", "true")
    assert choose_mode(None, torch.device("cuda")) == "eager"


@torch.no_grad()
@pytest.mark.skipif(torch.cuda.is_available(), reason="there it can be had")
def test_a_mode_that_cannot_be_had_gives_way_with_one_warning(model, tables, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(scoring_lilicorr.logger, "propagate", True)
    inputs = random_inputs(model)
    for _ in range(3):
        assert_same(model.scoring(model.lilicorr, tables, inputs, "cuda_graph"), slow(model, tables, inputs))
    warnings = [record.getMessage() for record in caplog.records if "cuda_graph" in record.getMessage()]
    assert len(warnings) == 1 and "goes on by 'eager'" in warnings[0]


def test_text_drafted_by_compiled_scores_is_the_same_and_compiled_once(monkeypatch):
    """Over fifty rounds of a growing text."""
    graphs = compiled_graphs(monkeypatch)
    target, assistant = tiny_target("llama"), tiny_assistant(scoring="compile").double()
    ids = torch.tensor([[1, 2, 3]])
    plain = target.generate(ids, max_new_tokens=60, do_sample=False)
    rounds = []
    handle = assistant.fc.register_forward_hook(lambda *_: rounds.append(1))
    assert torch.equal(target.generate(ids, max_new_tokens=60, do_sample=False, assistant_model=assistant), plain)
    handle.remove()
    assert not assistant.scoring.unavailable
    assert len(rounds) >= 50 and len(graphs) == 1


@torch.no_grad()
@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["compile", "cuda_graph"])
def test_modes_agree_on_a_gpu(model, tables, mode):
    model = model.cuda()
    gpu_tables = TargetTables(tiny_target("llama").float().cuda())
    for seed in range(3):
        inputs = tuple(x.cuda() for x in random_inputs(model, 2, seed))
        lattice = model.scoring(model.lilicorr, gpu_tables, inputs, mode)
        assert not model.scoring.unavailable
        assert_same(lattice, slow(model, gpu_tables, inputs))


def test_a_pass_is_kept_for_each_shape_and_no_more_than_some(model, tables, monkeypatch):
    monkeypatch.setattr(scoring_lilicorr, "compiled", lambda eager: eager)
    monkeypatch.setattr(scoring_lilicorr, "LARGEST_COLLECTION", 3)
    scoring = ScoringPass()
    with torch.no_grad():
        for rows in (1, 2, 1, 3, 4, 1):
            scoring(model.lilicorr, tables, random_inputs(model, rows), "compile")
            assert len(scoring.passes) <= 3

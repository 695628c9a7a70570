"""Whole drafts over buffers of fixed size: those of the growing cache, whichever mode computes them."""

import functools
import logging

import pytest
import torch
from calls import compiled_graphs
from tiny import FaultyOracle, tiny_assistant, tiny_target
from transformers import StoppingCriteriaList

from lilicorr_hf import (
    DFlash2Model,
    DFlashModel,
    DominoModel,
    DSparkModel,
    LiLiCorrDraftModel,
    Recording,
    record,
    stock_loop,
)
from lilicorr_hf.modeling import draft_pass_lilicorr, logits_lilicorr, scoring_lilicorr


PROMPT = torch.tensor([[1, 5, 9]])
# Longer than a block, so that most of it is read ahead.
LONG = torch.arange(1, 41).unsqueeze(0) % 60
METHODS = {
    "dflash": (DFlashModel, {}),
    "lilicorr": (LiLiCorrDraftModel, {}),
    "lilicorr with convolutions": (LiLiCorrDraftModel, {"conv_kernel_size": 2, "conv_group_size": 8}),
    "dflash2": (DFlash2Model, {"selector_rank": 6}),
    "domino": (DominoModel, {"gru_hidden_dim": 8, "emb_dim": 6}),
    "dspark": (DSparkModel, {"markov_rank": 6}),
}
CALLS = {
    "long prompt": {"inputs": LONG},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "rows in step": {"inputs": PROMPT.repeat(2, 1) + torch.tensor([[0], [1]]), "return_dict_in_generate": True},
    "positions": {"position_ids": torch.tensor([[7, 8, 9]])},
    "sampled": {"do_sample": True},
}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """A text of 60 tokens fills three of them."""
    monkeypatch.setattr(draft_pass_lilicorr, "SMALLEST_BUCKET", 16)


@pytest.fixture
def uncompiled(monkeypatch):
    """The mode `compile` without the compiler: the static pass, op by op."""
    for module in (draft_pass_lilicorr, scoring_lilicorr):
        monkeypatch.setattr(module, "compiled", lambda run: run)


@pytest.fixture
def runs(monkeypatch):
    """The buffers' length at each whole draft."""
    lengths = []
    real = draft_pass_lilicorr.draft_tensors

    def counted(*args):
        lengths.append(args[-1][0].shape[2])
        return real(*args)

    monkeypatch.setattr(draft_pass_lilicorr, "draft_tensors", counted)
    return lengths


@functools.cache
def target():
    return tiny_target("llama")


def answer(ids: torch.Tensor) -> list[list[int]]:
    return target().generate(ids, max_new_tokens=60, do_sample=False).tolist()


def oracle(ids: torch.Tensor = PROMPT, **changes) -> FaultyOracle:
    """Its drafts are accepted in part, so the number of new context rows changes from round to round."""
    assistant = tiny_assistant(0, FaultyOracle, **changes).double()
    assistant.answers = answer(ids)
    return assistant


def decode(assistant, inputs=PROMPT, **options) -> tuple[torch.Tensor, Recording]:
    torch.manual_seed(0)
    options = {"max_new_tokens": 60, "do_sample": False} | options
    with record(lattice=True) as r:
        output = target().generate(inputs, assistant_model=assistant, **options)
    return output["sequences"] if options.get("return_dict_in_generate") else output, r


def assert_same(one: tuple[torch.Tensor, Recording], other: tuple[torch.Tensor, Recording]) -> None:
    """The same text by the same drafts from the same lattices."""
    assert torch.equal(one[0], other[0])
    assert len(one[1].blocks) == len(other[1].blocks) > 10
    for a, b in zip(one[1].blocks, other[1].blocks, strict=True):
        assert (a.draft_ids, a.parents, a.accepted) == (b.draft_ids, b.parents, b.accepted)
        assert (a.lattice is None) == (b.lattice is None)
        for name, tensor in [] if a.lattice is None else a.lattice.items():
            torch.testing.assert_close(tensor, b.lattice[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_drafts_are_those_of_the_growing_cache(uncompiled, runs, method):
    model_class, fields = METHODS[method]
    eager, whole = (tiny_assistant(2, model_class, scoring=mode, **fields).double() for mode in ("eager", "compile"))
    assert_same(decode(whole), decode(eager))
    assert {*runs} == {16, 32, 64, 128} and len(runs) > 50


@pytest.mark.parametrize("loop", ["ours", "stock"])
@pytest.mark.parametrize("call", CALLS)
def test_calls_of_every_kind_get_the_same_drafts(uncompiled, runs, call, loop):
    options = dict(CALLS[call])
    ids = options.get("inputs", PROMPT)
    if loop == "stock":
        if len(ids) > 1:
            pytest.skip("transformers' loop takes one sequence at a time")
        with stock_loop():
            assert_same(decode(oracle(ids, scoring="compile"), **options), decode(oracle(ids), **options))
    else:
        assert_same(decode(oracle(ids, scoring="compile"), **options), decode(oracle(ids), **options))
    assert len(runs) > 10


@pytest.mark.parametrize("changes", [{"tree_budget": 9}, {"sampled_walk": True}], ids=["trees", "drawn walks"])
def test_trees_and_drawn_walks_get_what_they_need(uncompiled, runs, changes):
    options = {"do_sample": "sampled_walk" in changes}
    eager, whole = (tiny_assistant(2, scoring=mode, **changes).double() for mode in ("eager", "compile"))
    assert_same(decode(whole, **options), decode(eager, **options))
    assert len(runs) > 20


def test_logits_of_bf16_are_the_same(uncompiled, runs, monkeypatch):
    """CPUs with bf16 instructions multiply a copy of the output head."""
    monkeypatch.setattr(logits_lilicorr, "cpu_has_bf16", lambda: True)
    monkeypatch.setattr(logits_lilicorr, "SMALLEST_HEAD", 1)
    target = tiny_target("llama").float()
    blocks = []
    for mode in ("eager", "compile"):
        with record(lattice=True) as r:
            assistant = tiny_assistant(scoring=mode)
            target.generate(PROMPT, max_new_tokens=20, do_sample=False, assistant_model=assistant)
        assert len(assistant.draft_product.copies) == 1
        blocks.append([block.draft_ids for block in r.blocks])
    assert blocks[0] == blocks[1] and runs


NOT_SERVED = {
    "padding": ({}, {"inputs": torch.tensor([[0, 0, 5, 9]]), "attention_mask": torch.tensor([[0, 0, 1, 1]])}),
    "rows that part": ({}, {"inputs": PROMPT.repeat(2, 1)}),
    "a window": ({"context_window": 20}, {}),
    "frequencies that follow the length": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
        {},
    ),
    "eager": ({"scoring": "eager"}, {}),
}


@pytest.mark.parametrize("case", NOT_SERVED)
def test_other_calls_keep_to_the_growing_cache(uncompiled, runs, case):
    changes, options = NOT_SERVED[case]
    assistant = oracle(**{"scoring": "compile"} | changes)
    decode(assistant, **options)
    assert not runs and not assistant.workspaces.idle and not assistant.workspaces.unavailable


def test_who_watches_a_module_sees_its_calls(uncompiled, runs):
    assistant, calls = oracle(scoring="compile"), []
    handle = target().lm_head.register_forward_hook(lambda *_: calls.append(1))
    try:
        decode(assistant)
    finally:
        handle.remove()
    assert calls and not runs


def test_nothing_is_compiled_again_inside_a_bucket(monkeypatch):
    """Fifty rounds of a growing text and more, as one graph, and one more for buffers twice as long."""
    graphs = compiled_graphs(monkeypatch)
    monkeypatch.setattr(draft_pass_lilicorr, "SMALLEST_BUCKET", 128)
    assistants = [tiny_assistant(2, scoring=mode).double() for mode in ("compile", "eager")]
    results = [decode(assistant, max_new_tokens=70) for assistant in assistants]
    assert_same(*results)
    assert len(graphs) == 1 and len(results[0][1].blocks) >= 50
    # Another call finds it, too.
    assert torch.equal(decode(assistants[0], max_new_tokens=70)[0], results[0][0])
    assert len(graphs) == 1
    assert_same(decode(assistants[0], LONG, max_new_tokens=120), decode(assistants[1], LONG, max_new_tokens=120))
    assert len(graphs) == 2 and not assistants[0].workspaces.unavailable


@pytest.fixture
def graphs(monkeypatch):
    """Stand-ins for CUDA graphs on a CPU: each replay leaves its results where the first one left them."""
    recorded = []

    def record_graph(run, device, pool):
        outputs = run()

        def replay():
            for kept, new in zip(outputs, run(), strict=True):
                kept.copy_(new)
            return outputs

        recorded.append(pool)
        return replay

    monkeypatch.setattr(draft_pass_lilicorr, "record_graph", record_graph)
    monkeypatch.setattr(draft_pass_lilicorr, "can_be_one_pass", lambda drafter, tables, mode: mode != "eager")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    return recorded


def test_a_replay_leaves_alone_what_was_kept_of_others(graphs, runs):
    lattices = []

    class Keeper(FaultyOracle):
        def draft(self, *args, **kwargs):
            output = super().draft(*args, **kwargs)
            lattices.append((output.lattice, {name: x.clone() for name, x in output.lattice.items()}))
            return output

    whole = tiny_assistant(0, Keeper, scoring="cuda_graph").double()
    whole.answers = answer(PROMPT)
    assert_same(decode(whole), decode(oracle()))
    assert all(torch.equal(lattice[name], x) for lattice, copies in lattices for name, x in copies.items())
    # One for each length, in one pool.
    assert len(graphs) == len({*runs}) == 3 and len({*graphs}) == 1
    decode(whole)
    assert len(graphs) == 3


def test_calls_that_overlap_have_buffers_of_their_own(graphs):
    """One runs inside another's callback, as another thread's could between any two of its rounds."""
    assistant, inner = oracle(scoring="cuda_graph"), []

    def interrupt(ids, scores, **kwargs):
        if ids.shape[1] in (20, 40):
            inner.append(decode(assistant))
        return torch.zeros(len(ids), dtype=torch.bool)

    expected = decode(oracle())
    outer = decode(assistant, stopping_criteria=StoppingCriteriaList([interrupt]))
    for result in (outer, *inner):
        assert torch.equal(result[0], expected[0])
    assert_same(inner[0], expected)
    assert len(inner) == 2 and len(assistant.workspaces.idle) == 2


@pytest.mark.parametrize("loop", ["ours", "stock"])
def test_a_workspace_comes_back_after_an_exception(graphs, loop):
    assistant = oracle(scoring="cuda_graph")

    def interrupt(ids, scores, **kwargs):
        if ids.shape[1] > 20:
            raise InterruptedError
        return torch.zeros(len(ids), dtype=torch.bool)

    def decode_until_interrupted():
        with pytest.raises(InterruptedError):
            decode(assistant, stopping_criteria=StoppingCriteriaList([interrupt]))

    if loop == "stock":
        with stock_loop():
            decode_until_interrupted()
    else:
        decode_until_interrupted()
    (workspace,) = assistant.workspaces.idle
    # What it left behind, however bad, is no part of another text.
    for bucket in workspace.buckets.values():
        for buffer in (*bucket.keys, *bucket.values, workspace.context_states):
            buffer.fill_(torch.nan)
    assert_same(decode(assistant), decode(oracle()))
    assert assistant.workspaces.idle == [workspace]


def test_workspaces_are_those_of_the_weights_and_no_more_than_some(uncompiled, monkeypatch):
    monkeypatch.setattr(draft_pass_lilicorr, "LARGEST_COLLECTION", 2)
    eager, whole = (tiny_assistant(2, scoring=mode).double() for mode in ("eager", "compile"))
    decode(whole)
    for assistant in (eager, whole):
        torch.manual_seed(3)
        with torch.no_grad():
            assistant.lilicorr.in_head.weight.normal_()
            assistant.fc.weight.normal_()
    assert_same(decode(whole), decode(eager))
    assert len(whole.workspaces.idle) == 2
    decode(whole, **CALLS["rows in step"])
    assert [workspace.rows for workspace in whole.workspaces.idle] == [1, 2]
    # As after a step of a fused optimizer, which leaves no version behind.
    whole.train().eval()
    assert not whole.workspaces.idle


def test_buffers_made_in_inference_mode_serve_outside_it(uncompiled):
    assistant, expected = oracle(scoring="compile"), decode(oracle())
    with torch.inference_mode():
        assert_same(decode(assistant), expected)
    assert_same(decode(assistant), expected)
    assert len(assistant.workspaces.idle) == 1 and not assistant.workspaces.unavailable


@pytest.mark.parametrize("rounds", [0, 7])
def test_a_mode_that_fails_gives_way_with_one_warning(monkeypatch, caplog, rounds):
    """Also in the middle of a text: the growing cache goes on from where the buffers end."""
    calls = []

    def compiled(draft):
        def run(*inputs):
            calls.append(1)
            if len(calls) > rounds:
                raise RuntimeError("no compiler")
            return draft(*inputs)

        return run

    monkeypatch.setattr(draft_pass_lilicorr, "compiled", compiled)
    monkeypatch.setattr(draft_pass_lilicorr.logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    assistant = oracle(LONG, scoring="compile")
    # So that no second compiler is asked.
    assistant.scoring.unavailable.add("compile")
    assert_same(decode(assistant, LONG), decode(oracle(LONG), LONG))
    assert len(calls) == rounds + 1 and not assistant.workspaces.idle
    decode(assistant, LONG)
    warnings = [message for message in caplog.messages if "Whole drafts" in message]
    assert len(warnings) == 1 and "'compile'" in warnings[0] and "no compiler" in warnings[0]


def test_a_mode_that_does_not_exist_is_refused_before_the_prompt_is_read():
    with pytest.raises(ValueError, match="no scoring mode 'fast'"):
        decode(tiny_assistant(scoring="fast").double())


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["compile", "cuda_graph"])
@pytest.mark.parametrize("method", ["dflash", "lilicorr", "lilicorr with convolutions"])
def test_modes_draft_alike_on_a_gpu(mode, method, monkeypatch):
    model_class, fields = METHODS[method]
    on_gpu = tiny_target("llama").cuda()
    monkeypatch.setattr(f"{__name__}.target", lambda: on_gpu)
    eager, whole = (tiny_assistant(2, model_class, scoring=m, **fields).double().cuda() for m in ("eager", mode))
    assert_same(decode(whole, LONG.cuda()), decode(eager, LONG.cuda()))
    assert whole.workspaces.idle and not whole.workspaces.unavailable

"""Batched decoding of a tiny random target equals `generate`, and loops and samples follow their obvious rules."""

from pathlib import Path

import pytest
import torch
from regeneration import arguments, plain_answer, read_rows

from lilicorr_hf.training import cohorts
from lilicorr_hf.training.cohorts import Cohort, choose_tokens, find_loop
from lilicorr_hf.training.conversations import Request, render
from lilicorr_hf.training.regenerate import regenerate


@pytest.mark.parametrize("block", [1, 256])
def test_cohorts_equal_plain_generate(model, tokenizer, prompts, monkeypatch, block):
    monkeypatch.setattr(cohorts, "CACHE_BLOCK", block)
    args = arguments(prompts, loop_tokens=12)
    report = regenerate(args, model, tokenizer)
    rows = read_rows(args.output)
    assert sorted(row["id"] for row in rows) == sorted(f"p{i}" for i in range(30))
    for row in rows:
        assert (row["response_ids"], row["stop"]) == plain_answer(model, row["prompt_ids"], args)
        assert row["category"] == "chat" and row["source"] == "test"
        assert row["prompt_ids"] == render(tokenizer, row["messages"][:-1])
        assert row["messages"][-1]["content"] == tokenizer.decode(row["response_ids"], skip_special_tokens=True)
        assert (row["response_ids"][-1] == 2) == (row["stop"] == "eos")
    assert set(report.stops) == {"eos", "len", "rep"}, "the random target must show every way to stop"
    assert report.answers == 30 and report.tokens == sum(len(row["response_ids"]) for row in rows)


def test_finished_rows_leave_the_batch(model, tokenizer, prompts):
    """The forward passes see ever fewer rows, and together little more than the rows that still run."""
    sizes: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    try:
        report = regenerate(arguments(prompts, cohort_size=30, loop_tokens=12), model, tokenizer)
    finally:
        hook.remove()
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 30 and sizes[-1] < 30
    assert report.stops.keys() >= {"eos"}
    assert len(sizes) <= 40


def test_several_end_tokens(model, tokenizer, prompts):
    ends = [2, *range(20, 40)]
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = ends
    try:
        args = arguments(prompts, loop_period=0)
        regenerate(args, model, tokenizer)
    finally:
        model.generation_config.eos_token_id = before
    rows = read_rows(args.output)
    assert len({row["response_ids"][-1] for row in rows if row["stop"] == "eos"} & set(ends)) > 1
    assert not any(token in ends for row in rows for token in row["response_ids"][:-1])


@pytest.mark.parametrize(
    ("ids", "kept"),
    [
        ([5, 6] + [7] * 24, 3),
        ([5, 6] + [7] * 23, None),
        ([5, *[1, 2, 3] * 8, 9], 4),
        ([5, *[1, 2, 3] * 7, 1, 2], None),
        ([*range(10, 42)] * 3, 32),
        ([*range(10, 42)] * 2 + [*range(10, 41)], None),
        ([*range(10, 43)] * 3, None),
        ([], None),
    ],
)
def test_find_loop(ids, kept):
    assert find_loop(ids, period=32, tokens=24) == kept


def test_loops_step_by_step_equal_the_obvious_rule():
    """Random walks over three ids, which are full of near loops."""
    generator = torch.Generator().manual_seed(0)
    args = arguments(Path("none.jsonl"), max_new_tokens=60, loop_period=5, loop_tokens=8)
    tokens = torch.randint(3, 6, (40, 60), generator=generator)
    tokens[20:] = tokens[20:, :3].repeat(1, 20)  # certain loops
    cohort = Cohort([Request("r", [], [1])] * 40, args, [2], torch.device("cpu"))
    for step in range(60):
        cohort.accept(tokens[:, step], step)
    for row, answer in zip(tokens.tolist(), cohort.answers(), strict=True):
        kept = find_loop(row, 5, 8)
        assert (answer.response_ids, answer.stop) == ((row, "len") if kept is None else (row[:kept], "rep"))


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.7}])
def test_sampling_follows_the_distribution(options):
    logits = torch.randn(1, 16, generator=torch.Generator().manual_seed(1)) * 2
    args = arguments(Path("none.jsonl"), temperature=1.5, **options)
    noise = (torch.arange(20_000) + 0.5) / 20_000  # every quantile once
    found = choose_tokens(logits.expand(20_000, -1), args, noise).bincount(minlength=16) / 20_000
    probabilities = (logits[0] / 1.5).softmax(-1)
    if args.top_k:
        probabilities[probabilities.argsort(descending=True)[args.top_k :]] = 0
        probabilities /= probabilities.sum()
    order = probabilities.argsort(descending=True)
    before = probabilities[order].cumsum(0) - probabilities[order]
    probabilities[order[before >= args.top_p]] = 0
    torch.testing.assert_close(found, probabilities / probabilities.sum(), atol=2e-4, rtol=0)


def test_sampling_is_reproducible_by_seed_whatever_the_batch(model, tokenizer, prompts):
    def sampled(output: str, **changes) -> dict[str, list[int]]:
        args = arguments(prompts, output, temperature=1.0, top_p=0.9, loop_period=0, **changes)
        regenerate(args, model, tokenizer)
        return {row["id"]: row["response_ids"] for row in read_rows(args.output)}

    first = sampled("a.jsonl", seed=3)
    assert sampled("b.jsonl", seed=3, cohort_size=3) == first
    assert sampled("c.jsonl", seed=4) != first

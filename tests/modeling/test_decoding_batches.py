"""Our decoding loop on batches: rows advance as far as each one's draft reaches, and come out as plain batches do."""

import functools

import pytest
import torch
from calls import (
    ALL_OUTPUTS,
    GREEDY,
    assert_equal_caches,
    assert_equal_outputs,
    character_tokenizer,
    static_takes_back,
    watchers,
)
from tiny import FaultyOracle, tiny_assistant, tiny_target
from transformers import AutoModelForCausalLM, BloomConfig, DynamicCache

import lilicorr_hf
from lilicorr_hf import LiLiCorrDraftModel
from lilicorr_hf.modeling import decoding_lilicorr
from lilicorr_hf.modeling.cache_lilicorr import CACHE


PADDING = [0, 3, 7, 1, 5]


@functools.cache
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Five left-padded prompts of 9 to 2 tokens, and their mask."""
    ids = torch.randint(1, 64, (len(PADDING), 9), generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(9) >= torch.tensor(PADDING).unsqueeze(-1)).long()
    return ids * mask, mask


class Pair:
    """A target and a drafter that is right about many of its tokens, in each row about others."""

    def __init__(self, family: str, tree_budget: int = 0):
        self.target = tiny_target(family)
        self.assistant = tiny_assistant(0, FaultyOracle, tree_budget=tree_budget)
        ids, mask = batch()
        answers = self.target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=60).tolist()
        self.assistant.answers = [answer[pad:] for answer, pad in zip(answers, PADDING, strict=True)]

    def both(self, make=dict, assistant=None, **kwargs):
        ids, mask = batch()
        outputs = []
        for extra in ({}, {"assistant_model": assistant or self.assistant}):
            torch.manual_seed(0)
            options = GREEDY | {"pad_token_id": 0} | kwargs | make() | extra
            with lilicorr_hf.record() as self.recording:
                outputs.append(self.target.generate(ids, attention_mask=mask, **options))
        return outputs


@pytest.fixture(scope="module", params=[("llama", 0), ("gemma3", 0), ("qwen3", 0), ("llama", 11), ("gemma3", 11)])
def pair(request):
    return Pair(*request.param)


@pytest.fixture(scope="module")
def chains():
    return Pair("llama")


@pytest.fixture(scope="module", params=[0, 11], ids=["chains", "trees"])
def llama(request):
    return Pair("llama", request.param)


@pytest.fixture
def by_row(monkeypatch):
    """The values that decoders of the test found for `by_row`."""
    seen = []
    original = decoding_lilicorr.BlockDecoder.decode
    monkeypatch.setattr(
        decoding_lilicorr.BlockDecoder, "decode", lambda self: seen.append(self.by_row) or original(self)
    )
    return seen


@pytest.mark.parametrize("length", [1, 2, 5, 6, 40])
def test_ragged_rows_equal_plain_decoding(pair, by_row, length):
    plain, assisted = pair.both(max_new_tokens=length)
    assert assisted.tolist() == plain.tolist() and by_row == [True]
    if length == 40:
        accepted = set(pair.recording.accepted)
        assert {0, 1, 2, 3, 4} <= accepted and pair.recording.target_passes < 30


@pytest.mark.parametrize("which", range(5))
def test_rows_end_at_their_own_end_token_and_retire(pair, by_row, which):
    """End tokens from each row's answer in turn; rows that are done take no more of the target's passes."""
    eos = [pair.assistant.answers[which][9 - PADDING[which] + n] for n in (2, 11)]
    rows = []
    handle = pair.target.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    plain, assisted = pair.both(eos_token_id=eos, max_new_tokens=40)
    handle.remove()
    assert assisted.tolist() == plain.tolist() and by_row == [True]
    assert rows[-1] < 5


class Spy(FaultyOracle):
    """Keeps what the drafter itself would have drafted: anchors, their positions and blocks."""

    def draft(self, context_states, anchor_ids, position_ids, cache, tables, **kwargs):
        self.positions = position_ids[:, -self.config.block_size].tolist()
        self.anchors = anchor_ids[:, 0].tolist()
        return super().draft(context_states, anchor_ids, position_ids, cache, tables, **kwargs)

    def choose(self, *args):
        output = super().choose(*args)
        blocks = [tuple(block) for block in output.token_ids.tolist()]
        self.seen |= set(zip(self.anchors, self.positions, blocks, strict=True))
        return output


def test_each_row_is_drafted_for_as_on_its_own(pair, by_row):
    """Context, padding and positions of rows that move against each other: the drafter sees what it sees alone."""
    (ids, mask), spy = batch(), tiny_assistant(0, Spy)
    spy.answers = pair.assistant.answers
    options = {"do_sample": False, "max_new_tokens": 30, "assistant_model": spy}
    spy.seen = set()
    pair.target.generate(ids, attention_mask=mask, **options)
    in_batch, spy.seen = spy.seen, set()
    for i, pad in enumerate(PADDING):
        pair.target.generate(ids[i : i + 1, pad:], **options)
    assert spy.seen <= in_batch and len(spy.seen) > 40 and by_row[0]


def test_each_row_is_written_as_on_its_own(pair):
    (ids, mask), options = batch(), GREEDY | {"assistant_model": pair.assistant}
    rows = pair.target.generate(ids, attention_mask=mask, **options)
    for row, prompt, pad in zip(rows, ids, PADDING, strict=True):
        assert row[pad:].tolist() == pair.target.generate(prompt[None, pad:], **options)[0].tolist()


OPTIONS = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 8, "eos_token_id": [3, 9, 20, 41]},
    "bad_words": {"bad_words_ids": [[i] for i in range(0, 64, 5)]},
    "prefix": {"prefix_allowed_tokens_fn": lambda row, ids: [(ids[-1].item() * 5 + row + i) % 64 for i in range(6)]},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_processors_that_look_at_rows_leave_them_independent(llama, by_row, name):
    plain, assisted = llama.both(**OPTIONS[name])
    assert assisted.tolist() == plain.tolist() and by_row == [True]


def test_what_looks_at_the_whole_batch_sees_it_in_step(llama, by_row):
    """A stateful processor, a criterion and a streamer of the caller's hear what plain decoding tells them."""
    seen = []

    def make():
        arguments, watching = watchers(stop_at=20)
        seen.append(watching)
        return arguments

    plain, assisted = llama.both(make=make, eos_token_id=[7, 11])
    assert assisted.tolist() == plain.tolist() and by_row == [False]
    assert [r.calls for r in seen[1]] == [r.calls for r in seen[0]]


def test_everything_returned_for_a_batch(pair, by_row):
    # Padding and fp64 make eager attention, the only one that returns its weights, yield NaN in plain decoding too.
    plain, assisted = pair.both(eos_token_id=[7, 11], **ALL_OUTPUTS | {"output_attentions": False})
    assert_equal_outputs(assisted, plain)
    assert by_row == [False]


@pytest.mark.parametrize("tree_budget", [0, 11])
def test_attentions_of_a_batch(tree_budget):
    target, (ids, _) = tiny_target("gemma3", attn_implementation="eager"), batch()
    assistant, mask = tiny_assistant(0, FaultyOracle, tree_budget=tree_budget), torch.ones_like(ids)
    assistant.answers = target.generate(ids, attention_mask=mask, **GREEDY | {"max_new_tokens": 60}).tolist()
    with lilicorr_hf.record() as recording:
        outputs = [
            target.generate(ids, attention_mask=mask, **GREEDY | ALL_OUTPUTS | extra)
            for extra in ({}, {"assistant_model": assistant})
        ]
    assert_equal_outputs(outputs[1], outputs[0])
    assert max(recording.accepted) > 0


def test_callers_cache_of_a_batch(llama):
    ids, mask = batch()
    caches = [DynamicCache(config=llama.target.config) for _ in range(2)]
    for cache, extra in zip(caches, ({}, {"assistant_model": llama.assistant}), strict=True):
        llama.target.generate(ids, attention_mask=mask, **{CACHE: cache}, **GREEDY | extra)
    assert_equal_caches(caches[1], caches[0])


def test_stop_strings_of_a_batch(llama, by_row):
    tokenizer = character_tokenizer()
    text = "".join(tokenizer.convert_ids_to_tokens(llama.assistant.answers[1][8:10]))
    for options in ({"eos_token_id": 9}, {}):
        plain, assisted = llama.both(stop_strings=[text], tokenizer=tokenizer, **options)
        assert assisted.tolist() == plain.tolist()
    # Without an end token plain decoding goes on with a row that has found its string.
    assert by_row == [True, False]


@static_takes_back
def test_static_cache_of_a_batch(chains, by_row):
    plain, assisted = chains.both(cache_implementation="static", disable_compile=True)
    assert assisted.tolist() == plain.tolist() and by_row == [False]


def test_explicit_positions_and_shared_ones(llama, by_row):
    ids, mask = batch()
    shifted = (mask.cumsum(dim=-1) - 1).clamp(min=0) + 4
    unpadded = torch.ones_like(mask)
    for given in (
        {"attention_mask": mask, "position_ids": shifted},
        {"attention_mask": unpadded, "position_ids": torch.arange(9).unsqueeze(0)},
    ):
        outputs = [
            llama.target.generate(ids, **GREEDY | given | extra).tolist()
            for extra in ({}, {"assistant_model": llama.assistant})
        ]
        assert outputs[0] == outputs[1]
    assert by_row == [True, True]


def test_seeded_sampling_in_step_and_several_sequences_for_one_prompt(llama, by_row):
    plain, assisted = llama.both(do_sample=True, num_return_sequences=2, return_dict_in_generate=True)
    assert assisted.sequences.tolist() == plain.sequences.tolist() and len(plain.sequences) == 10
    llama.target.generate(
        batch()[0], do_sample=True, num_return_sequences=2, assistant_model=llama.assistant, max_new_tokens=4
    )
    assert by_row == [False, True]


def test_recorded_blocks_are_those_of_the_rows(chains):
    """Each row's blocks, put one after the other, are its new tokens."""
    (ids, mask), answers = batch(), {}
    with lilicorr_hf.record(lattice=True) as recording:
        output = chains.target.generate(ids, attention_mask=mask, assistant_model=chains.assistant, **GREEDY)
    assert recording.passes < len(recording.blocks)
    for block in recording.blocks:
        assert len(block.verified_ids) == block.accepted + 1
        assert block.draft_ids[: block.accepted] == block.verified_ids[: block.accepted]
        assert not block.draft_ids or block.lattice.candidate_ids.shape == (1, 4, 3)
        answer = answers.setdefault(block.sequence, [block.anchor_id])
        assert answer[-1] == block.anchor_id
        answer += block.verified_ids
    assert [answers[row] for row in range(5)] == output[:, 9:].tolist()


def test_a_target_without_positions_among_its_arguments(by_row):
    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=4, n_head=4, initializer_range=0.5, eos_token_id=None)
    torch.manual_seed(0)
    # In fp64 its padding is NaN, and soon all of the row, without an assistant too.
    target, (ids, mask) = AutoModelForCausalLM.from_config(config).float().eval(), batch()
    for rows in (slice(0, 5), slice(2, 3)):
        inputs = {"inputs": ids[rows], "attention_mask": mask[rows], "pad_token_id": 0}
        plain = target.generate(**inputs, **GREEDY)
        with lilicorr_hf.record() as recording:
            assisted = target.generate(**inputs, assistant_model=tiny_assistant(), **GREEDY)
        assert assisted.tolist() == plain.tolist() and recording.blocks[0].drafted == 4
    assert by_row == [True, False]


def test_broken_drafter_serves_a_batch(llama, by_row):
    assistant = tiny_assistant(0, LiLiCorrDraftModel)
    with torch.no_grad():
        assistant.fc.weight.fill_(torch.nan)
    plain, assisted = llama.both(assistant=assistant, eos_token_id=[7, 11, 13])
    assert assisted.tolist() == plain.tolist() and by_row == [True]

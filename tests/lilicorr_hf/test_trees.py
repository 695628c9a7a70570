"""What answers tell of the weight of the drafter is what decoding with it then does."""

import pytest
import torch
from tiny import tiny_assistant, tiny_target

import lilicorr_hf
from lilicorr_hf.doctor import Answer
from lilicorr_hf.trees import block_by_block, tau_by_weight


PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9]])
OPTIONS = {"do_sample": False, "max_new_tokens": 80}


def answer_of(target, length: int) -> Answer:
    ids = target.generate(PROMPT, do_sample=False, max_new_tokens=length)
    with torch.no_grad():
        states = target(ids, output_hidden_states=True).hidden_states
    return Answer({"input_ids": PROMPT}, ids, PROMPT.shape[1], states)


def test_tau_of_each_weight_is_that_of_decoding_with_it():
    target, assistant = tiny_target("llama"), tiny_assistant(0, tree_budget=40)
    answer = answer_of(target, 80)
    weights = (0.0, 0.5, 1.0)
    taus = tau_by_weight(target, assistant, [answer], 40, weights)
    anchors = 80 - assistant.config.num_slots
    for weight in weights:
        assistant.config.tree_weight = weight
        with lilicorr_hf.record() as recording:
            target.generate(PROMPT, assistant_model=assistant, **OPTIONS)
        starts = [sum(n + 1 for n in recording.accepted[:i]) for i in range(len(recording.blocks))]
        counts = [n for n, start in zip(recording.accepted, starts, strict=True) if start < anchors]
        assert taus[weight] == 1 + sum(counts) / len(counts)
    assert len(set(taus.values())) > 1 and min(taus.values()) > 1


def test_blocks_begin_where_the_last_one_ended():
    assert block_by_block([2, 0, 0, 1, 3, 0, 1]) == [2, 1, 0, 1]


def test_answers_shorter_than_a_block_are_refused():
    target = tiny_target("llama")
    with pytest.raises(ValueError, match="block of 5 tokens"):
        tau_by_weight(target, tiny_assistant(), [answer_of(target, 3)], 8)

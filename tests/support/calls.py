"""Listening to `generate` calls and to the compiler, and comparing all that two calls return."""

import functools
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import StaticLayer
from transformers.generation.streamers import BaseStreamer

from lilicorr_hf.modeling.cache_lilicorr import CACHE


# Since transformers 5.24; before, they are refused like any cache that cannot.
static_takes_back = pytest.mark.skipif(not StaticLayer.is_croppable, reason="static caches take nothing back here")
PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9]])
GREEDY = {"do_sample": False, "max_new_tokens": 17}
ALL_OUTPUTS = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_attentions": True,
    "output_hidden_states": True,
}


def both(target, assistant, prompt=PROMPT, make=dict, **kwargs):
    """Plain and assisted output of the same call, with `make()`'s arguments made anew for each."""
    outputs = []
    for extra in ({}, {"assistant_model": assistant}):
        torch.manual_seed(0)
        outputs.append(target.generate(prompt, **GREEDY | kwargs | make() | extra))
    return outputs


class Recorder(LogitsProcessor, StoppingCriteria, BaseStreamer):
    """Keeps everything it is called with, as processor, criterion or streamer."""

    def __init__(self, stop_at: int = 1000):
        self.calls = []
        self.stop_at = stop_at

    def put(self, value):
        self.calls.append((value.shape, value.tolist()))

    def end(self):
        self.calls.append("end")


class RecordingProcessor(Recorder):
    """Changes scores by how often it was called, so that one call too many changes the text."""

    def __call__(self, input_ids, scores):
        self.calls.append(input_ids.tolist())
        return scores.roll(len(self.calls) % 3, dims=-1)


class RecordingCriterion(Recorder):
    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append((input_ids.tolist(), None if scores is None else len(scores)))
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.stop_at)


class Interrupt(StoppingCriteria):
    """As if somebody pressed a key when the text is `at` tokens long."""

    def __init__(self, at: int):
        self.at = at

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] == self.at:
            raise KeyboardInterrupt
        return torch.zeros(len(input_ids), dtype=torch.bool)


class InterruptingProcessor(LogitsProcessor):
    """[`Interrupt`] before the next token is taken."""

    def __init__(self, at: int):
        self.at = at

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] == self.at:
            raise KeyboardInterrupt
        return scores


class InterruptingStreamer(BaseStreamer):
    """[`Interrupt`] when the text's last token is handed out."""

    def __init__(self, at: int):
        self.left = at

    def put(self, value):
        self.left -= value.numel()
        if self.left == 0:
            raise KeyboardInterrupt

    def end(self):
        pass


# Arguments of `generate` that interrupt it when the text is so many tokens long.
INTERRUPTS: dict[str, Any] = {
    "criterion": lambda at: {"stopping_criteria": [Interrupt(at)]},
    "processor": lambda at: {"logits_processor": [InterruptingProcessor(at)]},
    "streamer": lambda at: {"streamer": InterruptingStreamer(at)},
}


def watchers(stop_at: int) -> tuple[dict[str, Any], tuple[Recorder, ...]]:
    """Arguments of `generate` that bring a processor, a criterion and a streamer of the caller's, and those three."""
    processor, criterion, streamer = RecordingProcessor(), RecordingCriterion(stop_at=stop_at), Recorder()
    arguments = {
        "logits_processor": LogitsProcessorList([processor]),
        "stopping_criteria": StoppingCriteriaList([criterion]),
        "streamer": streamer,
    }
    return arguments, (processor, criterion, streamer)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Of 64 characters, which stand for the tokens of a tiny target."""
    characters = {chr(ord("z") - i): i for i in range(64)}
    fast = Tokenizer(models.WordLevel(characters, unk_token="z"))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="z")


# Eager attention is softmaxed in fp32 even in fp64 targets.
assert_close = functools.partial(torch.testing.assert_close, atol=3e-5, rtol=3e-5)


def assert_equal_outputs(assisted, plain):
    assert assisted.keys() == plain.keys()
    assert assisted.sequences.tolist() == plain.sequences.tolist()
    for name in ("scores", "logits"):
        for ours, theirs in zip(assisted.get(name) or (), plain.get(name) or (), strict=True):
            assert_close(ours, theirs)
    for name in ("attentions", "hidden_states"):
        for ours, theirs in zip(assisted.get(name) or (), plain.get(name) or (), strict=True):
            for our_layer, their_layer in zip(ours, theirs, strict=True):
                assert_close(our_layer, their_layer)
    assert_equal_caches(assisted[CACHE], plain[CACHE])


def assert_equal_caches(ours, theirs):
    assert int(ours.get_seq_length()) == int(theirs.get_seq_length())
    for our_layer, their_layer in zip(ours.layers, theirs.layers, strict=True):
        width = min(int(theirs.get_seq_length()), their_layer.keys.shape[2])
        if isinstance(theirs, StaticCache):
            assert_close(our_layer.keys[:, :, :width], their_layer.keys[:, :, :width])
        else:
            assert_close(our_layer.keys, their_layer.keys)
            assert_close(our_layer.values, their_layer.values)


def compiled_graphs(monkeypatch) -> list:
    """Whatever `torch.compile` makes graphs of from here on, which run as they are."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: real(function, **options, backend=backend))
    torch._dynamo.reset()
    return graphs

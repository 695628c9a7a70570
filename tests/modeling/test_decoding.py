"""Our decoding loop at one sequence: whatever plain `generate` calls, returns or leaves behind, it does too."""

import copy
import pickle

import pytest
import torch
from calls import (
    ALL_OUTPUTS,
    GREEDY,
    INTERRUPTS,
    PROMPT,
    Interrupt,
    Recorder,
    RecordingCriterion,
    assert_equal_caches,
    assert_equal_outputs,
    both,
    character_tokenizer,
    static_takes_back,
    watchers,
)
from tiny import AntiOracle, Oracle, tiny_assistant, tiny_target
from transformers import (
    DynamicCache,
    MaxLengthCriteria,
    StaticCache,
    StoppingCriteriaList,
    StopStringCriteria,
    TextStreamer,
)

import lilicorr_hf
from lilicorr_hf import DFlashModel, LiLiCorrDraftModel
from lilicorr_hf.modeling.cache_lilicorr import CACHE


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama", attn_implementation="eager")


@pytest.fixture(scope="module")
def windowed():
    """Windows of 8 positions beside full attention."""
    return tiny_target("gemma3", attn_implementation="eager")


@pytest.fixture(scope="module")
def oracle(target):
    model = tiny_assistant(0, Oracle)
    model.answer = target.generate(PROMPT, do_sample=False, max_new_tokens=60)
    return model


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer()


@pytest.mark.parametrize("drafter", [Oracle, AntiOracle, LiLiCorrDraftModel, DFlashModel])
def test_processors_criteria_and_streamer_are_called_as_in_plain_decoding(target, oracle, drafter):
    assistant = tiny_assistant(0, drafter)
    assistant.answer = oracle.answer
    seen = []

    def make():
        arguments, watching = watchers(stop_at=18)
        seen.append(watching)
        return arguments

    plain, assisted = both(target, assistant, make=make)
    assert assisted.tolist() == plain.tolist() and plain.shape[1] == 18
    assert [r.calls for r in seen[1]] == [r.calls for r in seen[0]]


@pytest.mark.parametrize("stop_at", range(7, 16))
def test_criterion_stops_at_its_token_inside_a_block(target, oracle, stop_at):
    make = lambda: {"stopping_criteria": StoppingCriteriaList([RecordingCriterion(stop_at)])}  # noqa: E731
    plain, assisted = both(target, oracle, make=make)
    assert assisted.tolist() == plain.tolist() and plain.shape[1] == stop_at


@pytest.mark.parametrize("stop_at", [3, 7, 9, 12])
@pytest.mark.parametrize("eos", [None, 8])
def test_a_length_of_the_callers_own(target, oracle, stop_at, eos):
    """Also one that the prompt is past already; lengths and end tokens alone are decided a block at a time."""
    eos = None if eos is None else [63, oracle.answer[0, eos].item()]
    make = lambda: {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(stop_at)])}  # noqa: E731
    plain, assisted = both(target, oracle, make=make, eos_token_id=eos)
    assert assisted.tolist() == plain.tolist() and plain.shape[1] <= max(stop_at, 7)


def test_stop_strings(target, oracle, tokenizer):
    text = "".join(tokenizer.convert_ids_to_tokens(oracle.answer[0, 6:]))
    for start in range(6):
        plain, assisted = both(target, oracle, stop_strings=[text[start : start + 2]], tokenizer=tokenizer)
        assert assisted.tolist() == plain.tolist() and plain.shape[1] <= 6 + start + 2


def test_text_streamer_prints_the_same(target, oracle, tokenizer, capsys):
    printed = []
    for extra in ({}, {"assistant_model": oracle}):
        target.generate(PROMPT, streamer=TextStreamer(tokenizer, skip_prompt=True), **GREEDY | extra)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and len(printed[0]) > 17


@pytest.mark.parametrize("options", [{"temperature": 1.4}, {"top_k": 5}, {"top_p": 0.7, "repetition_penalty": 1.3}])
def test_sampling_with_a_seed_gives_the_tokens_of_plain_sampling(target, oracle, options):
    for seed in range(3):
        outputs = []
        for extra in ({}, {"assistant_model": oracle}):
            torch.manual_seed(seed)
            outputs.append(target.generate(PROMPT, do_sample=True, max_new_tokens=15, **options | extra).tolist())
        assert outputs[0] == outputs[1]


@pytest.mark.parametrize("name", ["target", "windowed"])
@pytest.mark.parametrize("drafter", [Oracle, LiLiCorrDraftModel])
def test_everything_returned_is_what_plain_decoding_returns(request, name, drafter):
    model, assistant = request.getfixturevalue(name), tiny_assistant(0, drafter)
    assistant.answer = model.generate(PROMPT, do_sample=False, max_new_tokens=30)
    plain, assisted = both(model, assistant, **ALL_OUTPUTS, repetition_penalty=1.2)
    assert_equal_outputs(assisted, plain)


def stops(oracle, tokenizer) -> dict:
    """Everything that can cut a block, at its third token."""
    text = "".join(tokenizer.convert_ids_to_tokens(oracle.answer[0, 6:]))
    return {
        "end token": {"eos_token_id": [oracle.answer[0, 8].item(), 63]},
        "stop string": {"stop_strings": [text[1:3]], "tokenizer": tokenizer},
        "criterion": {"stopping_criteria": StoppingCriteriaList([RecordingCriterion(9)])},
        "length": {"max_new_tokens": 3},
    }


@pytest.mark.parametrize("name", ["end token", "stop string", "criterion", "length"])
def test_returned_lengths_where_a_block_is_cut(target, oracle, tokenizer, name):
    plain, assisted = both(target, oracle, **stops(oracle, tokenizer)[name], **ALL_OUTPUTS)
    assert len(plain.scores) == plain.sequences.shape[1] - 6 <= 3
    assert_equal_outputs(assisted, plain)


def test_inputs_embeds_with_and_without_ids(target, oracle):
    embeds = target.get_input_embeddings()(PROMPT)
    for ids in ({}, {"input_ids": PROMPT}):
        plain, assisted = both(target, oracle, prompt=None, inputs_embeds=embeds, **ids)
        assert assisted.tolist() == plain.tolist()


CACHES = {
    "dynamic": ("target", {}),
    "windows": ("windowed", {}),
    "chunks": ("windowed", {"prefill_chunk_size": 4}),
}


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("drafter", [Oracle, LiLiCorrDraftModel])
def test_caches(request, name, drafter):
    fixture, options = CACHES[name]
    model, assistant = request.getfixturevalue(fixture), tiny_assistant(0, drafter)
    assistant.answer = model.generate(PROMPT, do_sample=False, max_new_tokens=30)
    for length in (1, 2, 5, 17):
        plain, assisted = both(model, assistant, **options | {"max_new_tokens": length})
        assert assisted.tolist() == plain.tolist()


@pytest.mark.gpu
def test_offloaded_cache():
    model, assistant = tiny_target("llama").cuda(), tiny_assistant().cuda()
    plain, assisted = both(model, assistant, PROMPT.cuda(), cache_implementation="offloaded")
    assert assisted.tolist() == plain.tolist()


def test_cache_that_cannot_be_cropped_is_refused_before_compute(windowed):
    calls = []
    handle = windowed.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match="StaticSlidingWindowLayer.*dynamic"):
        windowed.generate(PROMPT, cache_implementation="static", assistant_model=tiny_assistant(), **GREEDY)
    handle.remove()
    assert not calls


@pytest.mark.parametrize("name", ["target", "windowed"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_conversation_goes_on_from_the_callers_cache(request, name, whole):
    """Three turns on one cache, given the whole text or only the new part; the cache ends as after plain decoding."""
    model, assistant = request.getfixturevalue(name), tiny_assistant(0, Oracle)
    caches, texts = [DynamicCache(config=model.config) for _ in range(2)], [PROMPT] * 2
    for turn in range(3):
        for i, extra in enumerate(({}, {"assistant_model": assistant})):
            seen = caches[i].get_seq_length()
            given = texts[i] if whole else texts[i][:, seen:]
            mask = torch.ones_like(texts[i])
            output = model.generate(
                given, attention_mask=mask, **{CACHE: caches[i]}, do_sample=False, max_new_tokens=9, **extra
            )
            texts[i] = torch.cat([texts[i][:, :seen], output], dim=-1) if not whole else output
            if not i:
                assistant.answer = texts[0]
        assert texts[0].tolist() == texts[1].tolist()
        assert_equal_caches(caches[1], caches[0])
        texts = [torch.cat([text, torch.tensor([[7, turn, 8]])], dim=-1) for text in texts]


@static_takes_back
@pytest.mark.parametrize("drafter", [Oracle, LiLiCorrDraftModel])
def test_static_cache(target, drafter):
    assistant = tiny_assistant(0, drafter)
    assistant.answer = target.generate(PROMPT, do_sample=False, max_new_tokens=30)
    options = {"cache_implementation": "static", "disable_compile": True}
    for length in (1, 2, 5, 17):
        plain, assisted = both(target, assistant, **options | {"max_new_tokens": length})
        assert assisted.tolist() == plain.tolist()


@static_takes_back
def test_static_cache_of_the_caller(target, oracle):
    caches = [StaticCache(config=target.config, max_cache_len=22) for _ in range(2)]
    outputs = [
        target.generate(PROMPT, **{CACHE: cache}, **GREEDY | {"disable_compile": True} | extra)
        for cache, extra in zip(caches, ({}, {"assistant_model": oracle}), strict=True)
    ]
    assert outputs[0].tolist() == outputs[1].tolist()
    assert_equal_caches(caches[1], caches[0])


@pytest.mark.parametrize("where", INTERRUPTS)
@pytest.mark.parametrize("at", [7, 9, 10, 12])
def test_interrupted_call_leaves_only_verified_tokens_in_the_cache(windowed, at, where):
    assistant = tiny_assistant(0, Oracle)
    assistant.answer = windowed.generate(PROMPT, **GREEDY | {"max_new_tokens": 40})
    cache = DynamicCache(config=windowed.config)
    with pytest.raises(KeyboardInterrupt):
        windowed.generate(PROMPT, **{CACHE: cache}, assistant_model=assistant, **INTERRUPTS[where](at), **GREEDY)
    assert cache.get_seq_length() == at - 1
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
    text = assistant.answer[:, :at]
    output = windowed.generate(text, **{CACHE: cache}, assistant_model=assistant, **GREEDY)
    assert output.tolist() == assistant.answer[:, : at + 17].tolist()


def test_custom_generate_needs_no_hook(target, oracle, tokenizer):
    plain = target.generate(PROMPT, **GREEDY)
    lilicorr_hf.uninstall_hook()
    try:
        streamer = Recorder()
        with lilicorr_hf.record() as recording:
            decode = lilicorr_hf.block_decoding(oracle, streamer)
            output = target.generate(PROMPT, custom_generate=decode, streamer=streamer, **GREEDY)
        text = "".join(tokenizer.convert_ids_to_tokens(oracle.answer[0, 6:]))
        criteria = [StopStringCriteria(tokenizer, [text[3:5]])]
        stopped = target.generate(PROMPT, custom_generate=decode, stopping_criteria=criteria, **GREEDY)
        with pytest.raises(ValueError, match="hidden_size"):
            target.generate(PROMPT, custom_generate=lilicorr_hf.block_decoding(tiny_assistant(hidden_size=40)))
    finally:
        lilicorr_hf.install_hook()
    assert output.tolist() == plain.tolist() and recording.tau >= 4
    assert [ids for _, ids in streamer.calls[:1]] == [PROMPT.tolist()] and len(streamer.calls) > 18
    assert stopped.tolist() == plain[:, :11].tolist()


def broken(kind: str) -> DFlashModel:
    model = tiny_assistant(0, DFlashModel if kind == "drafter" else LiLiCorrDraftModel)
    tensor = {"head": lambda: model.lilicorr.in_head.weight, "drafter": lambda: model.fc.weight}.get(kind)
    with torch.no_grad():
        if tensor is not None:
            tensor().fill_(torch.nan)
        else:
            for parameter in model.parameters():
                parameter.fill_({"zero": 0.0, "constant": 1.0, "infinite": torch.inf}[kind])
    return model


@pytest.mark.parametrize("kind", ["head", "drafter", "zero", "constant", "infinite"])
@pytest.mark.parametrize("stock", [False, True])
def test_broken_weights_change_no_text(target, kind, stock, monkeypatch):
    warnings = []
    monkeypatch.setattr(lilicorr_hf.modeling.generation_lilicorr.logger, "warning_once", warnings.append)
    assistant = broken(kind)
    with lilicorr_hf.record() as recording:
        if stock:
            with lilicorr_hf.stock_loop():
                plain, assisted = both(target, assistant)
        else:
            plain, assisted = both(target, assistant)
    assert assisted.tolist() == plain.tolist()
    if kind in ("head", "drafter", "infinite"):
        assert len(warnings) == 1 and "not finite" in warnings[0]
        # Our loop learns of it with the tokens of the pass that verifies the first such draft.
        assert all(block.drafted == 0 for block in recording.blocks[not stock :])


@pytest.mark.parametrize("changes", [{"target_layer_ids": [1, 2]}, {"rope_parameters": {"rope_theta": 3.0}}])
def test_a_drafter_for_other_layers_or_rotations_changes_no_text(target, changes):
    plain, assisted = both(target, tiny_assistant(0, **{"rope_parameters": {"rope_type": "default"}} | changes))
    assert assisted.tolist() == plain.tolist()


def test_copies_and_pickles_of_an_assistant_serve(target, oracle):
    plain = target.generate(PROMPT, **GREEDY)
    for other in (copy.deepcopy(oracle), pickle.loads(pickle.dumps(oracle)), oracle.to("cpu").float()):
        assert target.generate(PROMPT, assistant_model=other, **GREEDY).tolist() == plain.tolist()


def test_one_assistant_for_two_targets_and_after_an_exception(target):
    """Long, short, long prompts on two targets in turn, every third call broken off."""
    assistant, other = tiny_assistant(), tiny_target("llama", seed=5)
    for i, length in enumerate((40, 2, 30, 1, 50)):
        prompt = torch.randint(1, 64, (1, length), generator=torch.Generator().manual_seed(i))
        for model in (target, other):
            if i % 3 == 1:
                with pytest.raises(KeyboardInterrupt):
                    model.generate(
                        prompt, assistant_model=assistant, stopping_criteria=[Interrupt(length + 3)], **GREEDY
                    )
            plain, assisted = both(model, assistant, prompt)
            assert assisted.tolist() == plain.tolist()

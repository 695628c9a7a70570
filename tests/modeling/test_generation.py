"""Assisted `generate` equals plain `generate`, whatever the draft is worth, and says clearly what it cannot do."""

import contextlib
import random
import threading

import pytest
import torch
from calls import Interrupt
from tiny import AntiOracle, Oracle, tiny_assistant, tiny_target
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    SynthIDTextWatermarkingConfig,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import DFlashCache

import lilicorr_hf
from lilicorr_hf import DFlashModel, LiLiCorrDraftModel
from lilicorr_hf.modeling.cache_lilicorr import CACHE
from lilicorr_hf.modeling.target_lilicorr import TargetTables, states_to_return, tapped_states


FAMILIES = ["llama", "qwen3", "gemma3"]
DRAFTERS = {"oracle": Oracle, "anti-oracle": AntiOracle, "random": LiLiCorrDraftModel, "argmax": DFlashModel}
BLOCK = 5


@pytest.fixture(scope="module", params=FAMILIES)
def target(request):
    return tiny_target(request.param)


@pytest.fixture(scope="module")
def llama():
    return tiny_target("llama")


@pytest.fixture(scope="module")
def assistant():
    return tiny_assistant()


def prompt_of(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 64, (1, length), generator=torch.Generator().manual_seed(seed))


def greedy(model, prompt, **kwargs):
    return model.generate(prompt, do_sample=False, **kwargs)


LOOPS = {"own": contextlib.nullcontext, "stock": lilicorr_hf.stock_loop}


@pytest.fixture(params=LOOPS)
def loop(request):
    """Runs a test in our loop and in transformers'."""
    with LOOPS[request.param]():
        yield request.param


def assert_same(model, draft_model, prompt, **kwargs):
    """Greedy ids with the assistant equal those without; returns the recording."""
    plain = greedy(model, prompt, **kwargs)
    if isinstance(draft_model, Oracle):
        draft_model.answer = plain
    with lilicorr_hf.record() as recording:
        assisted = greedy(model, prompt, assistant_model=draft_model, **kwargs)
    assert assisted.tolist() == plain.tolist(), f"{kwargs} from a prompt of {prompt.shape[1]}"
    return recording


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_random_prompts_lengths_and_ends(loop, target, drafter):
    """8 random cases for each of two loops, three targets and four drafters."""
    rng = random.Random(f"{loop} {target.config.model_type} {drafter}")
    draft_model = tiny_assistant(1, DRAFTERS[drafter])
    for case in range(8):
        prompt = prompt_of(rng.choice([1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 40]), seed=case)
        length = rng.choice([1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 30])
        answer = greedy(target, prompt, max_new_tokens=length)[0, prompt.shape[1] :].tolist()
        # An end token the answer contains, one it may not, several, or none.
        eos = rng.choice([None, rng.choice(answer), [rng.choice(answer), rng.randrange(64)], rng.randrange(64)])
        assert_same(target, draft_model, prompt, max_new_tokens=length, eos_token_id=eos)


def test_oracle_is_accepted_whole_and_anti_oracle_never(loop, target):
    prompt = prompt_of(7)
    recording = assert_same(target, tiny_assistant(0, Oracle), prompt, max_new_tokens=1 + 4 * BLOCK)
    assert recording.accepted == [BLOCK - 1] * 4 and recording.tau == BLOCK
    recording = assert_same(target, tiny_assistant(0, AntiOracle), prompt, max_new_tokens=12)
    assert recording.accepted == [0] * 11 and recording.tau == 1.0
    assert recording.target_passes == 12


def test_draft_never_exceeds_the_length_budget(llama):
    for length in range(1, 2 * BLOCK + 2):
        recording = assert_same(llama, tiny_assistant(0, Oracle), prompt_of(3), max_new_tokens=length)
        left = length - 1
        for block in recording.blocks:
            assert block.drafted <= max(left - 1, 0)
            left -= block.accepted + 1
        assert left == 0


@pytest.mark.parametrize("given, drafted", [(None, BLOCK - 1), (20, BLOCK - 1), (2, 2), (50, BLOCK - 1)])
def test_num_assistant_tokens_shortens_the_draft(loop, llama, given, drafted):
    kwargs = {} if given is None else {"num_assistant_tokens": given}
    recording = assert_same(llama, tiny_assistant(0, Oracle), prompt_of(3), max_new_tokens=12, **kwargs)
    assert recording.blocks[0].drafted == drafted


PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[i] for i in range(0, 64, 3)]},
    "sequence_bias": {"sequence_bias": {(5,): 3.0, (7, 9): -4.0}},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": list(range(0, 64, 4))},
    "suppress_tokens": {"suppress_tokens": list(range(1, 64, 2))},
    "forced_eos": {"forced_eos_token_id": 3},
    "exponential_decay": {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 11},
    "prefix_allowed": {"prefix_allowed_tokens_fn": lambda _, ids: [(ids[-1].item() * 7 + i) % 64 for i in range(4)]},
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("drafter", ["random", "argmax"])
def test_processors(llama, name, drafter):
    assert_same(llama, tiny_assistant(0, DRAFTERS[drafter]), prompt_of(6), max_new_tokens=20, **PROCESSORS[name])


class LegalPrefixOnly:
    """A grammar: only even tokens may follow; asked about anything else it raises, as parsers do."""

    def __init__(self, prompt_length):
        self.prompt_length = prompt_length

    def allow(self, _, ids):
        if any(i % 2 for i in ids[self.prompt_length :].tolist()):
            raise AssertionError("asked about an illegal prefix")
        return list(range(0, 64, 2))


@pytest.mark.parametrize("drafter", ["random", "argmax"])
def test_constraint_never_sees_an_illegal_prefix(loop, llama, drafter):
    allow = LegalPrefixOnly(4).allow
    assert_same(
        llama, tiny_assistant(0, DRAFTERS[drafter]), prompt_of(4), max_new_tokens=20, prefix_allowed_tokens_fn=allow
    )


def test_stock_loop_never_asks_a_stateful_processor_about_drafts_before_the_target_read_them(llama, assistant):
    class Counting(LogitsProcessor):
        prefixes: list = []

        def __call__(self, input_ids, scores):
            self.prefixes.append(input_ids.shape[1])
            return scores

    processor = Counting()
    with lilicorr_hf.record() as recording, lilicorr_hf.stock_loop():
        greedy(
            llama,
            prompt_of(4),
            max_new_tokens=10,
            logits_processor=LogitsProcessorList([processor]),
            assistant_model=assistant,
        )
    assert len(processor.prefixes) == 1 + sum(block.drafted + 1 for block in recording.blocks)


def test_sampling_returns_no_logits_so_the_target_decides(llama, assistant):
    """Any logits of the drafter would make the loop accept by them, though the draft was not drawn from them."""
    prompt = prompt_of(5)
    seen = []
    original = lilicorr_hf.modeling.generation_lilicorr.BlockCandidateGenerator.get_candidates

    def spy(self, *args, **kwargs):
        ids, logits = original(self, *args, **kwargs)
        seen.append(logits)
        return ids, logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lilicorr_hf.modeling.generation_lilicorr.BlockCandidateGenerator, "get_candidates", spy)
        with lilicorr_hf.stock_loop():
            llama.generate(prompt, do_sample=True, max_new_tokens=20, assistant_model=assistant)
    assert seen and all(logits is None for logits in seen)


def test_left_padding_changes_nothing(loop, llama, assistant):
    prompt = prompt_of(6)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), prompt], dim=1)
    mask = (torch.arange(10) >= 4).long().unsqueeze(0)
    with lilicorr_hf.record() as plain:
        expected = greedy(llama, prompt, max_new_tokens=20, assistant_model=assistant)
    with lilicorr_hf.record() as recording:
        output = greedy(llama, padded, attention_mask=mask, max_new_tokens=20, assistant_model=assistant)
    assert output[0, 4:].tolist() == expected[0].tolist()
    assert recording.accepted == plain.accepted


def test_inputs_embeds(loop, llama, assistant):
    embeds = llama.get_input_embeddings()(prompt_of(6))
    plain = llama.generate(inputs_embeds=embeds, do_sample=False, max_new_tokens=20)
    assisted = llama.generate(inputs_embeds=embeds, do_sample=False, max_new_tokens=20, assistant_model=assistant)
    assert assisted.tolist() == plain.tolist()


def test_returned_dict_has_one_entry_per_token(llama, assistant):
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "max_new_tokens": 12}
    output = greedy(llama, prompt_of(5), assistant_model=assistant, output_hidden_states=True, **options)
    assert len(output.scores) == len(output.logits) == len(output.hidden_states) == 12
    plain = greedy(llama, prompt_of(5), output_hidden_states=True, **options)
    for ours, theirs in zip(output.logits, plain.logits, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert all(len(step) == len(plain.hidden_states[0]) for step in output.hidden_states)


@pytest.mark.parametrize("prompt_length", [1, 2, 50])
def test_context_rows_are_those_of_a_full_forward(llama, prompt_length):
    """Every round hands the drafter exactly the states of positions before the anchor, whatever was accepted."""
    rows = []

    class Spy(Oracle):
        def draft(self, context_states, anchor_ids, position_ids, cache, tables, **kwargs):
            rows.append((context_states, position_ids[0, : context_states.shape[1]]))
            self.shift = len(rows) % 2
            return super().draft(context_states, anchor_ids, position_ids, cache, tables, **kwargs)

    draft_model = tiny_assistant(0, Spy)
    prompt = prompt_of(prompt_length)
    draft_model.answer = greedy(llama, prompt, max_new_tokens=30)
    output = greedy(llama, prompt, max_new_tokens=30, assistant_model=draft_model)
    full = llama(output, output_hidden_states=True).hidden_states
    expected = tapped_states(full, draft_model.config.target_layer_ids)[0]
    states = torch.cat([states[0] for states, _ in rows])
    positions = torch.cat([positions for _, positions in rows])
    assert positions.tolist() == list(range(len(states)))
    torch.testing.assert_close(states, expected[: len(states)])


def test_taps_read_the_output_of_the_named_layer():
    """Layers that put out their own number show which of them a tap reads."""
    model, ids = tiny_target("llama"), [0, 2]
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda _, __, out, i=i: torch.full_like(out, float(i + 10)))
    outputs = model(prompt_of(4), output_hidden_states=states_to_return(ids))
    tapped = tapped_states(outputs.hidden_states, ids)
    assert tapped[..., :32].unique().tolist() == [10.0] and tapped[..., 32:].unique().tolist() == [12.0]


@torch.no_grad()
def test_cached_draft_equals_draft_from_scratch(llama, assistant):
    tables = TargetTables(llama)
    sequence = prompt_of(20)
    states = tapped_states(llama(sequence, output_hidden_states=True).hidden_states, [0, 2])
    cache, seen, block = DFlashCache(config=assistant.config), 0, assistant.config.block_size
    for anchor in (7, 9, 14, 15):
        positions = torch.arange(seen, anchor + block).unsqueeze(0)
        anchor_id = sequence[:, anchor : anchor + 1]
        cached = assistant.draft(states[:, seen:anchor], anchor_id, positions, cache, tables)
        fresh_cache = DFlashCache(config=assistant.config)
        positions = torch.arange(anchor + block).unsqueeze(0)
        fresh = assistant.draft(states[:, :anchor], anchor_id, positions, fresh_cache, tables)
        assert cached.token_ids.tolist() == fresh.token_ids.tolist()
        torch.testing.assert_close(cached.lattice.pair_scores, fresh.lattice.pair_scores, atol=1e-5, rtol=1e-5)
        assert cache.get_seq_length() == anchor
        seen = anchor


def test_native_dflash_path_runs_our_drafter(llama):
    """transformers' own DFlash generator drafts with the same drafter: its blocks are our argmax blocks."""
    drafter = tiny_assistant(0, DFlashModel).double()
    prompt = prompt_of(6)
    blocks = {"ours": [], "native": []}
    for name, options in (("ours", {}), ("native", {"speculation_type": "dflash"})):
        hidden = drafter.register_forward_hook(
            lambda _, __, output, name=name: blocks[name].append(output.last_hidden_state)
        )
        output = greedy(llama, prompt, max_new_tokens=15, assistant_model=drafter, **options)
        hidden.remove()
        assert output.tolist() == greedy(llama, prompt, max_new_tokens=15).tolist()
    # Ours stops drafting one round earlier, where the length leaves room for nothing but the bonus token.
    assert len(blocks["ours"]) >= 5
    for ours, native in zip(blocks["ours"], blocks["native"], strict=False):
        torch.testing.assert_close(ours, native)


def test_mixed_dtypes(assistant):
    for target_dtype, draft_dtype in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
    ):
        model = tiny_target("llama").to(target_dtype)
        draft_model = tiny_assistant().to(draft_dtype)
        output = greedy(model, prompt_of(5), max_new_tokens=8, assistant_model=draft_model)
        assert output.shape == (1, 13)


def test_threads_share_one_assistant(llama, assistant):
    prompts = [prompt_of(length, seed=length) for length in (3, 9, 17, 30)]
    alone = [greedy(llama, prompt, max_new_tokens=25) for prompt in prompts]
    start, results = threading.Barrier(4), {}

    def work(i):
        start.wait()
        results[i] = greedy(llama, prompts[i], max_new_tokens=25, assistant_model=assistant)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(results[i].tolist() == alone[i].tolist() for i in range(4))


def test_assistant_and_configs_keep_no_trace_of_a_call(llama, assistant):
    before = (dict(assistant.__dict__), assistant.config.to_dict(), llama.generation_config.to_dict())
    for length in (40, 2, 30):
        assert_same(llama, assistant, prompt_of(length), max_new_tokens=9)
    assert (dict(assistant.__dict__), assistant.config.to_dict(), llama.generation_config.to_dict()) == before


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"vocab_size": 65}, ["vocab_size", "65", "64"]),
        ({"hidden_size": 40}, ["hidden_size", "40", "32"]),
        ({"num_target_layers": 5}, ["num_target_layers", "5", "4"]),
    ],
)
def test_wrong_pairing_names_both_sides_before_compute(llama, changes, words):
    calls = []
    handle = llama.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError) as error:
        greedy(llama, prompt_of(3), max_new_tokens=4, assistant_model=tiny_assistant(**changes))
    handle.remove()
    assert all(word in str(error.value) for word in words) and not calls


@pytest.mark.parametrize(
    "changes, warned",
    [
        ({}, 1),
        ({"context_window": 8}, 0),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, 0),
        ({"max_position_embeddings": 64}, 0),
    ],
)
def test_texts_longer_than_the_drafter_was_made_for(loop, llama, monkeypatch, changes, warned):
    """Twice as long: the text is right and somebody says why few drafts are."""
    warnings = []
    monkeypatch.setattr(lilicorr_hf.modeling.target_lilicorr.logger, "warning_once", warnings.append)
    assert_same(llama, tiny_assistant(**{"max_position_embeddings": 24} | changes), prompt_of(40), max_new_tokens=9)
    assert bool(warnings) == warned and all("24 positions" in text for text in warnings)


def test_a_call_leaves_no_hooks(llama, assistant):
    """transformers puts its own on a target that is asked for states, once."""

    def hooks():
        modules = [*llama.modules(), *assistant.modules()]
        return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules)

    llama(prompt_of(4), output_hidden_states=[1])
    before = hooks()
    for prompt in (prompt_of(4), prompt_of(9)):
        greedy(llama, prompt, max_new_tokens=9, assistant_model=assistant)
        with pytest.raises(KeyboardInterrupt):
            greedy(llama, prompt, max_new_tokens=9, assistant_model=assistant, stopping_criteria=[Interrupt(12)])
    assert hooks() == before


def test_encoder_decoder_and_headless_targets_are_refused(llama, assistant):
    with pytest.raises(ValueError, match="output head"):
        assistant.check_target(llama.model)
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=32, d_ff=48, num_layers=1, num_heads=4))
    with pytest.raises(ValueError, match="encoder-decoder"):
        assistant.check_target(t5)


def test_mask_token_beyond_the_embedding_table_is_refused(assistant):
    model = tiny_target("llama")
    model.resize_token_embeddings(60)
    model.config.vocab_size = 64
    with pytest.raises(ValueError, match="mask token 63.*60 rows"):
        greedy(model, prompt_of(3), max_new_tokens=4, assistant_model=assistant)


def test_stock_loop_refuses_a_batch_before_compute(llama, assistant):
    calls = []
    handle = llama.register_forward_pre_hook(lambda *_: calls.append(1))
    with lilicorr_hf.stock_loop(), pytest.raises(ValueError, match="batch of 2"):
        greedy(llama, prompt_of(3).repeat(2, 1), max_new_tokens=4, assistant_model=assistant)
    handle.remove()
    assert not calls


def test_stock_loop_refuses_a_prefilled_cache(llama, assistant):
    cache = DynamicCache(config=llama.config)
    llama(prompt_of(4), **{CACHE: cache})
    with lilicorr_hf.stock_loop(), pytest.raises(ValueError, match="already holds 4 positions"):
        greedy(llama, prompt_of(6), max_new_tokens=4, assistant_model=assistant, **{CACHE: cache})


@pytest.mark.parametrize(
    "kwargs",
    [
        {"guidance_scale": 1.5},
        {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=2, keys=[1, 2])},
    ],
)
def test_processors_no_assistant_can_serve_are_refused_by_name(llama, assistant, kwargs):
    with pytest.raises(ValueError, match="LogitsProcessor keeps state"):
        llama.generate(prompt_of(4), max_new_tokens=4, assistant_model=assistant, **kwargs)


def test_recording_nests_and_ends(llama, assistant):
    with lilicorr_hf.record() as outer:
        greedy(llama, prompt_of(4), max_new_tokens=6, assistant_model=assistant)
        with lilicorr_hf.record() as inner:
            greedy(llama, prompt_of(4), max_new_tokens=6, assistant_model=assistant)
    greedy(llama, prompt_of(4), max_new_tokens=6, assistant_model=assistant)
    assert outer.calls == inner.calls == 1
    assert outer.draft_seconds > 0 and outer.verify_seconds > 0
    assert 1 + sum(n + 1 for n in outer.accepted) == 6

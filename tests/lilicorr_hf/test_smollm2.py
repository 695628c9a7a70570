"""The shipped pair on its real target."""

import contextlib

import pytest
import torch
from goldens import GOLDEN
from safetensors.torch import load_file
from tiny import tiny_target
from transformers.cache_utils import DFlashCache

import lilicorr_hf
from lilicorr_hf import LiLiCorrDraftModel, pairs
from lilicorr_hf.measure import encode, first_divergence, run_generate
from lilicorr_hf.modeling import logits_lilicorr
from lilicorr_hf.modeling.target_lilicorr import TargetTables, tapped_states


PROMPTS = [
    "Write a Python function that reverses a string, with one example.",
    "Anna has 12 apples, gives away a third and buys 5 more. How many has she? Think step by step.",
    "Name three reasons why the sky looks blue, as a numbered list.",
    "Translate 'Good morning, how are you?' into French and Spanish.",
]


@pytest.fixture(scope="module")
def blocks():
    """Per recorded anchor: the sequence up to it, its position, and what nvidia-modelopt drafted there."""
    tensors = load_file(GOLDEN / "smollm2_shipped.safetensors")
    cases = {}
    for key, value in tensors.items():
        if ".anchor" in key:
            prompt, anchor, name = key.split(".")
            cases.setdefault((prompt, int(anchor.removeprefix("anchor"))), {})[name] = value
    return {(tensors[f"{prompt}.sequence_ids"], anchor): fields for (prompt, anchor), fields in cases.items()}


@torch.no_grad()
@pytest.mark.parametrize(("bf16", "tolerance"), [(False, 2e-4), (True, 5e-2)])
def test_recorded_blocks_of_the_shipped_weights(smollm2, blocks, monkeypatch, bf16, tolerance):
    """Drafter, pool, scores and walk on real prompts; states of positions before the anchor are the context."""
    monkeypatch.setattr(logits_lilicorr, "cpu_has_bf16", lambda: bf16)
    model, _, pair_assistant = smollm2
    assistant = LiLiCorrDraftModel.from_pretrained(pair_assistant.name_or_path, dtype=torch.float32)
    tables, block_size = TargetTables(model), assistant.config.block_size
    assert len(blocks) >= 9
    for (sequence, anchor), expected in blocks.items():
        sequence = sequence.reshape(1, -1)
        hidden = model(sequence[:, :anchor], output_hidden_states=True).hidden_states
        states = tapped_states(hidden, assistant.config.target_layer_ids)
        positions = torch.arange(anchor + block_size).unsqueeze(0)
        seen = []
        handle = assistant.norm.register_forward_hook(lambda _, __, output, seen=seen: seen.append(output))
        cache = DFlashCache(config=assistant.config)
        output = assistant.draft(states, sequence[:, anchor : anchor + 1], positions, cache, tables)
        handle.remove()
        lattice = output.lattice
        assert lattice.candidate_ids[0].tolist() == expected["candidate_ids"].tolist()
        assert lattice.walk[0].tolist() == expected["walk_indices"].tolist()
        assert output.token_ids[0].tolist() == expected["walk_token_ids"].tolist()
        for actual, name in (
            (seen[0][0, 1:], "drafter_hidden"),
            (lattice.log_probs[0], "candidate_log_probs"),
            (lattice.start_scores[0], "start_scores_times_sigma"),
            (lattice.pair_scores[0], "pair_scores_times_sigma"),
        ):
            torch.testing.assert_close(actual, expected[name], atol=tolerance, rtol=tolerance)


def assert_parts_at_ties_alone(model, inputs, plain, assisted):
    """Of token ids, those of `assisted` are those of `plain`, but for what follows a tie."""
    divergence = first_divergence(model, inputs["input_ids"], plain, assisted)
    assert divergence is None or divergence.is_tie, divergence


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_equals_plain_generate(smollm2, prompt):
    model, tokenizer, assistant = smollm2
    inputs = encode(tokenizer, prompt)
    options = {"max_new_tokens": 48, "do_sample": False}
    plain = run_generate(model, inputs, **options)
    assisted = run_generate(model, inputs, assistant_model=assistant, **options)
    assert_parts_at_ties_alone(model, inputs, plain.token_ids, assisted.token_ids)
    assert assisted.recording.tau > 1.0 and assisted.target_passes < plain.target_passes


@pytest.mark.parametrize("prompt", PROMPTS[:2])
def test_greedy_text_with_trees_equals_plain_generate(smollm2, prompt):
    model, tokenizer, assistant = smollm2
    inputs = encode(tokenizer, prompt)
    options = {"max_new_tokens": 24, "do_sample": False}
    plain = run_generate(model, inputs, **options)
    chains, trees = (
        run_generate(model, inputs, custom_generate=lilicorr_hf.block_decoding(assistant, tree_budget=n), **options)
        for n in (0, 32)
    )
    assert_parts_at_ties_alone(model, inputs, plain.token_ids, trees.token_ids)
    assert trees.recording.tau > chains.recording.tau


def test_bf16_text_parts_at_ties_alone():
    model, tokenizer, assistant = lilicorr_hf.load_pair("smollm2-135m", dtype=torch.bfloat16)
    assert assistant.dtype == torch.bfloat16
    for prompt in PROMPTS[:2]:
        inputs = encode(tokenizer, prompt)
        options = {"max_new_tokens": 24, "do_sample": False}
        plain = run_generate(model, inputs, **options)
        assisted = run_generate(model, inputs, assistant_model=assistant, **options)
        assert_parts_at_ties_alone(model, inputs, plain.token_ids, assisted.token_ids)
        assert assisted.target_passes < plain.target_passes


def test_an_adapter_on_the_real_target(smollm2):
    """The text is the adapted target's, and the target's own while the adapter is off."""
    peft = pytest.importorskip("peft")
    model, tokenizer, assistant = smollm2
    inputs, options = encode(tokenizer, PROMPTS[0]), {"max_new_tokens": 16, "do_sample": False}
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], lora_alpha=64, init_lora_weights=False)
    adapted, texts = peft.get_peft_model(model, config).eval(), []
    try:
        for mode in (contextlib.nullcontext, adapted.disable_adapter):
            with mode():
                plain = run_generate(adapted, inputs, **options).token_ids
                assisted = run_generate(adapted, inputs, assistant_model=assistant, **options).token_ids
                assert_parts_at_ties_alone(adapted, inputs, plain, assisted)
            texts.append(plain)
    finally:
        adapted.unload()
    assert texts[0] != texts[1]


def test_assistants_draft_in_what_a_cpu_multiplies_fast(monkeypatch):
    for dtype, bf16, expected in (
        (torch.float32, True, torch.bfloat16),
        (torch.float32, False, torch.float32),
        (torch.bfloat16, False, torch.bfloat16),
        (torch.float64, True, torch.float64),
    ):
        monkeypatch.setattr(pairs, "cpu_has_bf16", lambda bf16=bf16: bf16)
        assert pairs.draft_dtype(tiny_target("llama").to(dtype)) == expected


def test_answers_end(smollm2):
    """The converted target knows its end token; without it generation would run on to the length limit."""
    model, tokenizer, assistant = smollm2
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    inputs = encode(tokenizer, "What is the capital of France? Answer in one short sentence.")
    output = model.generate(**inputs, assistant_model=assistant, max_new_tokens=60, do_sample=False)
    assert output[0, -1] == model.generation_config.eos_token_id


def test_a_real_divergence_is_measured(smollm2):
    model, tokenizer, _ = smollm2
    inputs = encode(tokenizer, "Say hello.")
    plain = run_generate(model, inputs, max_new_tokens=8, do_sample=False).token_ids
    changed = [*plain[:3], (plain[3] + 1) % 49152, *plain[4:]]
    divergence = first_divergence(model, inputs["input_ids"], plain, changed)
    assert divergence.index == 3 and divergence.plain == plain[3] and not divergence.is_tie
    assert first_divergence(model, inputs["input_ids"], plain, plain[:5]).index == 5


def test_unknown_pair_names_those_that_are_shipped():
    with pytest.raises(ValueError, match="smollm2-135m"):
        lilicorr_hf.load_pair("smollm3")

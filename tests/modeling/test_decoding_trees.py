"""Decoding with trees: whatever plain `generate` decides, calls, returns or leaves behind, and what is refused."""

import functools

import pytest
import torch
from calls import (
    ALL_OUTPUTS,
    GREEDY,
    INTERRUPTS,
    PROMPT,
    assert_equal_caches,
    assert_equal_outputs,
    both,
    character_tokenizer,
    watchers,
)
from tiny import FaultyOracle, tiny_assistant, tiny_target
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DynamicCache,
    GPT2Config,
    GPTNeoConfig,
    Llama4TextConfig,
    LlamaForCausalLM,
)
from transformers.cache_utils import StaticLayer

import lilicorr_hf
from lilicorr_hf import DFlashModel, DominoModel, LiLiCorrConfig, LiLiCorrDraftModel
from lilicorr_hf.modeling.cache_lilicorr import CACHE


FAMILIES = ("llama", "qwen3", "gemma3", "gemma2", "mistral", "mixtral")
CASES = [(family, attention) for family in FAMILIES for attention in ("sdpa", "eager")]
CASES.remove(("gemma2", "sdpa"))


@functools.cache
def target_of(family: str, attention: str | None = None):
    return tiny_target(family, attn_implementation=attention)


@functools.cache
def answer_of(family: str) -> torch.Tensor:
    return target_of(family).generate(PROMPT, do_sample=False, max_new_tokens=60)


def faulty(family: str, nodes: int, length: int = 60) -> FaultyOracle:
    """Hides the answer, with an error in most blocks, in trees of `nodes` tokens."""
    assistant = tiny_assistant(0, FaultyOracle, tree_budget=nodes)
    assistant.answers = [answer_of(family)[0, : 6 + length].tolist()]
    return assistant


@pytest.mark.parametrize(("family", "attention"), CASES)
@pytest.mark.parametrize("nodes", [5, 16])
def test_greedy_text_is_the_plain_one(family, attention, nodes):
    """Grouped heads, windows shorter than the text, soft caps, scaled embeddings, experts."""
    with lilicorr_hf.record() as recording:
        plain, assisted = both(target_of(family, attention), faulty(family, nodes), max_new_tokens=50)
    assert assisted.tolist() == plain.tolist()
    assert {0, 1, 2, 3, 4} <= set(recording.accepted) and {block.drafted for block in recording.blocks[:-1]} == {nodes}


@pytest.mark.parametrize("drafter", [LiLiCorrDraftModel, DFlashModel])
@pytest.mark.parametrize("nodes", [1, 16, 64, 200])
def test_trees_of_real_drafters(drafter, nodes):
    """They reach deeper than chains of the same drafter."""
    recordings = []
    for budget in (0, nodes):
        with lilicorr_hf.record() as recording:
            plain, assisted = both(
                target_of("llama"), tiny_assistant(0, drafter, tree_budget=budget), max_new_tokens=40
            )
        assert assisted.tolist() == plain.tolist()
        recordings.append(recording)
    if nodes >= 16:
        assert recordings[1].tau > recordings[0].tau


@pytest.mark.parametrize("drafter", [FaultyOracle, LiLiCorrDraftModel])
def test_processors_criteria_and_streamer_hear_of_the_taken_path_only(drafter):
    assistant = tiny_assistant(0, drafter, tree_budget=9)
    assistant.answers = [answer_of("llama")[0].tolist()]
    seen = []

    def make():
        arguments, watching = watchers(stop_at=18)
        seen.append(watching)
        return arguments

    plain, assisted = both(target_of("llama"), assistant, make=make)
    assert assisted.tolist() == plain.tolist() and plain.shape[1] == 18
    assert [r.calls for r in seen[1]] == [r.calls for r in seen[0]]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_everything_returned_is_what_plain_decoding_returns(family):
    plain, assisted = both(target_of(family, "eager"), faulty(family, 9), **ALL_OUTPUTS, repetition_penalty=1.05)
    assert_equal_outputs(assisted, plain)


@pytest.mark.parametrize("at", range(1, 8))
def test_end_tokens_stop_strings_and_lengths(at):
    target, assistant, answer = target_of("llama"), faulty("llama", 12), answer_of("llama")
    tokenizer = character_tokenizer()
    text = "".join(tokenizer.convert_ids_to_tokens(answer[0, 6:]))
    for options in (
        {"eos_token_id": [answer[0, 6 + at].item(), 63]},
        {"stop_strings": [text[at : at + 2]], "tokenizer": tokenizer},
        {"max_new_tokens": at},
        {"num_assistant_tokens": at},
    ):
        with lilicorr_hf.record() as recording:
            plain, assisted = both(target, assistant, **options)
        assert assisted.tolist() == plain.tolist()
        assert max(recording.accepted, default=0) <= min(at, 4) or "max_new_tokens" not in options


def test_num_assistant_tokens_is_the_depth_of_a_tree():
    with lilicorr_hf.record() as recording:
        both(target_of("llama"), faulty("llama", 12), num_assistant_tokens=2, max_new_tokens=40)
    assert max(recording.accepted) == 2 and {block.drafted for block in recording.blocks[:-1]} == {12}


@pytest.mark.parametrize("options", [{"temperature": 1.4}, {"top_k": 5}, {"top_p": 0.7, "repetition_penalty": 1.3}])
def test_sampling_with_a_seed_gives_the_tokens_of_plain_sampling(options):
    plain, assisted = both(target_of("llama"), faulty("llama", 12), do_sample=True, **options)
    assert assisted.tolist() == plain.tolist()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_conversation_goes_on_from_the_callers_cache(family):
    target, assistant = target_of(family), faulty(family, 12)
    caches, texts = [DynamicCache(config=target.config) for _ in range(2)], [PROMPT] * 2
    for _ in range(3):
        for i, extra in enumerate(({}, {"assistant_model": assistant})):
            texts[i] = target.generate(texts[i], **{CACHE: caches[i]}, do_sample=False, max_new_tokens=9, **extra)
        assert texts[0].tolist() == texts[1].tolist()
        assert_equal_caches(caches[1], caches[0])
        texts = [torch.cat([text, torch.tensor([[7, 8]])], dim=-1) for text in texts]


@pytest.mark.parametrize("where", INTERRUPTS)
@pytest.mark.parametrize("at", [7, 9, 10, 12])
def test_interrupted_call_leaves_only_verified_tokens_in_the_cache(at, where):
    target, assistant, cache = (
        target_of("gemma3"),
        faulty("gemma3", 12),
        DynamicCache(config=target_of("gemma3").config),
    )
    with pytest.raises(KeyboardInterrupt):
        target.generate(PROMPT, **{CACHE: cache}, assistant_model=assistant, **INTERRUPTS[where](at), **GREEDY)
    assert cache.get_seq_length() == at - 1
    text = answer_of("gemma3")[:, :at]
    output = target.generate(text, **{CACHE: cache}, assistant_model=assistant, **GREEDY)
    assert output.tolist() == answer_of("gemma3")[:, : at + 17].tolist()


class Spy(FaultyOracle):
    """Keeps what the drafter itself would have drafted after each position."""

    def draft(self, context_states, anchor_ids, position_ids, *args, **kwargs):
        self.positions = position_ids[:, -self.config.block_size].tolist()
        return super().draft(context_states, anchor_ids, position_ids, *args, **kwargs)

    def choose(self, *args):
        output = super().choose(*args)
        self.seen |= dict(zip(self.positions, output.token_ids.tolist(), strict=True))
        return output


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_drafter_reads_the_states_of_the_accepted_path(family):
    """Whatever else was in the tree, it drafts as after one token at a time."""
    seen = []
    for nodes, answers in ((0, []), (16, faulty(family, 0).answers)):
        spy = tiny_assistant(0, Spy, tree_budget=nodes)
        spy.answers, spy.seen = answers, {}
        target_of(family).generate(PROMPT, assistant_model=spy, do_sample=False, max_new_tokens=50)
        seen.append(spy.seen)
    singly, by_trees = seen
    assert by_trees.items() <= singly.items() and 10 < len(by_trees) < len(singly) / 2


PADDING = [0, 3, 7, 1, 5]


@functools.cache
def batch(family: str):
    """Five left-padded prompts, their mask, and a drafter that knows the answers."""
    ids = torch.randint(1, 64, (len(PADDING), 9), generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(9) >= torch.tensor(PADDING).unsqueeze(-1)).long()
    inputs = {"inputs": ids * mask, "attention_mask": mask, "pad_token_id": 0}
    answers = target_of(family).generate(**inputs, do_sample=False, max_new_tokens=60).tolist()
    assistant = tiny_assistant(0, FaultyOracle, tree_budget=11)
    assistant.answers = [answer[pad:] for answer, pad in zip(answers, PADDING, strict=True)]
    return inputs, assistant


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 40},
        {"max_new_tokens": 30, "eos_token_id": [7, 11, 30]},
        {"max_new_tokens": 30, "eos_token_id": [7, 11, 30], "return_dict_in_generate": True},
        {"no_repeat_ngram_size": 2, "repetition_penalty": 1.2},
        {"do_sample": True, "return_dict_in_generate": True, "eos_token_id": [7, 11]},
    ],
    ids=str,
)
def test_batches(family, options):
    """Rows on their own and in step, of which some are finished before others."""
    inputs, assistant = batch(family)
    outputs = []
    for extra in ({}, {"assistant_model": assistant}):
        torch.manual_seed(0)
        with lilicorr_hf.record() as recording:
            output = target_of(family).generate(**inputs, **GREEDY | options | extra)
        outputs.append(output if isinstance(output, torch.Tensor) else output.sequences)
    assert outputs[0].tolist() == outputs[1].tolist()
    # Samples and processed text are not what the drafter knows.
    assert max(recording.accepted) > 1 or options.keys() & {"do_sample", "repetition_penalty"}


@pytest.mark.parametrize("drafter", [LiLiCorrDraftModel, DFlashModel])
@pytest.mark.parametrize("nodes", [3, 9])
def test_what_processors_forbid_comes_last_in_a_tree(drafter, nodes):
    """Also where the lattice's own candidates would be enough for it."""
    odd = list(range(1, 64, 2))
    with lilicorr_hf.record(lattice=True) as recording:
        plain, assisted = both(target_of("llama"), tiny_assistant(0, drafter, tree_budget=nodes), suppress_tokens=odd)
    assert assisted.tolist() == plain.tolist()
    forbidden = [[token in odd for token in block.draft_ids] for block in recording.blocks]
    assert all(row == sorted(row) for row in forbidden) and sum(not row[0] for row in forbidden if row) > 5


@pytest.mark.parametrize("nodes", [None, 9])
def test_where_processors_leave_nothing_a_tree_has_no_node(nodes):
    """Plain decoding takes the first token of the vocabulary then, and goes on."""
    options = {"no_repeat_ngram_size": 1, "max_new_tokens": 64}
    plain, assisted = both(target_of("llama"), tiny_assistant(0, tree_budget=nodes), **options)
    assert assisted.tolist() == plain.tolist()


@pytest.mark.parametrize("nodes", [0, 30])
@pytest.mark.parametrize("in_step", [False, True])
def test_a_table_of_positions_may_end_with_the_text(nodes, in_step):
    """Learned positions, the last of which belongs to the last token: no drafted token may lie beyond it, neither in a
    row that is ahead of others nor in one that has ended."""
    config = GPT2Config(
        vocab_size=64, n_positions=24, n_embd=32, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=None
    )
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config).double().eval()
    prompts = torch.cat([PROMPT, PROMPT.flip(-1)])
    options = {"attention_mask": torch.ones_like(prompts), "do_sample": False, "max_new_tokens": 18, "pad_token_id": 0}
    assistant = tiny_assistant(0, FaultyOracle, tree_budget=nodes)
    assistant.answers = target.generate(prompts, **options).tolist()
    if in_step:
        first = assistant.answers[0][PROMPT.shape[1] + 4]
        options |= {"return_dict_in_generate": True, "eos_token_id": first}
    plain = target.generate(prompts, **options)
    with lilicorr_hf.record() as recording:
        assisted = target.generate(prompts, assistant_model=assistant, **options)
    assert str(assisted) == str(plain) and max(recording.accepted) > 1
    blocks = [[block.accepted for block in recording.blocks if block.sequence == row] for row in (0, 1)]
    assert in_step or blocks[0] != blocks[1]


def test_the_budget_of_a_call_stands_above_that_of_the_config():
    assistant = faulty("llama", 12)
    for budget, drafted in ((None, 12), (5, 5), (0, 4)):
        with lilicorr_hf.record(lattice=True) as recording:
            decode = lilicorr_hf.block_decoding(assistant, tree_budget=budget)
            output = target_of("llama").generate(PROMPT, custom_generate=decode, **GREEDY)
        assert output.tolist() == answer_of("llama")[:, :23].tolist()
        block = recording.blocks[0]
        assert block.drafted == drafted == len(block.draft_ids) and (block.parents is None) == (budget == 0)
    assert assistant.config.tree_budget == 12


def test_where_nobody_asks_a_cpu_verifies_trees_as_large_as_chains():
    """And chains where no tree can be had, or is wanted."""
    llama = target_of("llama")
    cases = [({}, {}, True), ({"sampled_walk": True}, {}, False)]
    if StaticLayer.is_croppable:
        cases.append(({}, {"cache_implementation": "static", "disable_compile": True}, False))
    for fields, options, trees in cases:
        assistant = tiny_assistant(0, tree_budget=None, **fields)
        with lilicorr_hf.record(lattice=True) as recording:
            plain, assisted = both(llama, assistant, **options)
        assert assisted.tolist() == plain.tolist()
        block = recording.blocks[0]
        assert (block.parents is not None) == trees and (trees is False or block.drafted == 4)
    with lilicorr_hf.stock_loop():
        assert both(llama, tiny_assistant(0, tree_budget=None))[1].tolist() == plain.tolist()
    assert tiny_assistant(0, DominoModel, tree_budget=None).drafts_trees is False
    plain, assisted = both(llama, tiny_assistant(0, DominoModel, tree_budget=None, gru_hidden_dim=8, emb_dim=8))
    assert assisted.tolist() == plain.tolist()


class PrefixTuned(LlamaForCausalLM):
    """Puts tokens of its own before a prompt, which only its cache knows of."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, **kwargs):
        cache = kwargs[CACHE]
        if cache.get_seq_length() == 0:
            super().forward(torch.tensor([[7, 8]]), **kwargs)
        mask = torch.cat([attention_mask.new_ones(1, 2), attention_mask], dim=-1)
        return super().forward(input_ids, attention_mask=mask, **kwargs)


def test_a_window_that_counts_columns_of_the_cache_gets_chains():
    """GPT-Neo's: siblings of a tree would see less of the text the later they lie."""
    types = [[["global", "local"], 2]]
    fields = {"num_layers": 4, "num_heads": 4, "attention_types": types, "window_size": 8, "eos_token_id": None}
    config = GPTNeoConfig(vocab_size=64, hidden_size=32, initializer_range=0.5, **fields)
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config).double().eval()
    with lilicorr_hf.record(lattice=True) as recording:
        plain, assisted = both(target, tiny_assistant(0, tree_budget=None), max_new_tokens=40)
    assert assisted.tolist() == plain.tolist() and all(block.parents is None for block in recording.blocks)


def test_tokens_that_only_the_target_knows_of_are_in_no_tree():
    target = PrefixTuned(target_of("llama").config).double().eval()
    target.load_state_dict(target_of("llama").state_dict())
    mask = torch.ones_like(PROMPT).index_fill(1, torch.tensor([0]), 0)
    with lilicorr_hf.record(lattice=True) as recording:
        plain, assisted = both(target, tiny_assistant(0, tree_budget=None), attention_mask=mask)
    assert assisted.tolist() == plain.tolist() and all(block.parents is None for block in recording.blocks)
    with pytest.raises(ValueError, match="holds 8 positions and the text has 6.*tree_budget=0"):
        both(target, tiny_assistant(0, tree_budget=4), attention_mask=mask)


def test_a_head_without_weight_is_not_asked(monkeypatch):
    assistant = tiny_assistant(0, tree_budget=9, tree_weight=1)
    monkeypatch.setattr(LiLiCorrDraftModel, "score", None)
    with lilicorr_hf.record() as recording:
        plain, assisted = both(target_of("llama"), assistant)
    assert assisted.tolist() == plain.tolist() and recording.blocks[0].drafted == 9


def test_broken_weights_change_no_text():
    for model_class in (LiLiCorrDraftModel, DFlashModel):
        assistant = tiny_assistant(0, model_class, tree_budget=9)
        with torch.no_grad():
            assistant.fc.weight.fill_(torch.nan)
        plain, assisted = both(target_of("llama"), assistant)
        assert assisted.tolist() == plain.tolist()


def refusal(target, **kwargs) -> str:
    """The words with which a call is refused, before the target computes anything."""
    calls = []
    handle = target.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        with pytest.raises(ValueError) as error:
            assistant = kwargs.pop("assistant", None) or tiny_assistant(tree_budget=8)
            target.generate(PROMPT, assistant_model=assistant, **GREEDY | kwargs)
    finally:
        handle.remove()
    assert not calls
    return str(error.value)


def test_targets_and_caches_that_cannot_verify_a_tree_are_refused(monkeypatch):
    static = refusal(target_of("llama"), cache_implementation="static", disable_compile=True)
    assert "StaticLayer" in static and "dynamic" in static
    assert "tree_budget=0" in static or not StaticLayer.is_croppable
    with monkeypatch.context() as patch:
        patch.setattr(target_of("llama").config, "_attn_implementation_internal", "flash_attention_2")
        assert "'flash_attention_2'" in refusal(target_of("llama")) and "sdpa" in refusal(target_of("llama"))
    neo = GPTNeoConfig(
        vocab_size=64,
        hidden_size=32,
        num_layers=4,
        num_heads=4,
        attention_types=[[["global", "local"], 2]],
        window_size=8,
    )
    assert "local attention" in refusal(AutoModelForCausalLM.from_config(neo))
    domino = tiny_assistant(0, DominoModel, tree_budget=8, gru_hidden_dim=8, emb_dim=8)
    assert "Set `tree_budget` to 0" in refusal(target_of("llama"), assistant=domino)
    bloom = BloomConfig(vocab_size=64, hidden_size=32, n_layer=4, n_head=4)
    assert "position" in refusal(AutoModelForCausalLM.from_config(bloom))
    chunked = Llama4TextConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, intermediate_size_mlp=48, num_local_experts=2, attention_chunk_size=8,
    )  # fmt: skip
    assert "chunked_attention" in refusal(AutoModelForCausalLM.from_config(chunked))


def test_loops_and_settings_that_exclude_trees_say_so():
    with lilicorr_hf.stock_loop():
        assert "verifies chains only" in refusal(target_of("llama"))
    for fields in ({"tree_budget": -1}, {"tree_weight": 1.5}, {"tree_budget": 4, "sampled_walk": True}):
        with pytest.raises(Exception, match="`tree_"):
            LiLiCorrConfig(mask_token_id=1, **fields)
    sampled = tiny_assistant(sampled_walk=True)
    with pytest.raises(ValueError, match="sampled_walk"):
        target_of("llama").generate(PROMPT, custom_generate=lilicorr_hf.block_decoding(sampled, tree_budget=4))

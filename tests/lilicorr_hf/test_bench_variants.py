"""One checkpoint decoded in other ways."""

import pytest
import torch
from tiny import tiny_assistant, tiny_target
from transformers import LlamaConfig, LlamaForCausalLM

from lilicorr_hf import LiLiCorrDraftModel, greedy_walk, record, viterbi_path
from lilicorr_hf.bench.systems import Setting, parse_system, parse_systems
from lilicorr_hf.bench.variants import WALKS, load_variant, shorten_block, yarn_parameters


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama").float()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An assistant whose tables of slots and distances are no longer zero."""
    folder = tmp_path_factory.mktemp("assistant")
    assistant = tiny_assistant()
    torch.manual_seed(1)
    for parameter in assistant.lilicorr.parameters():
        if parameter.eq(0).all():
            torch.nn.init.normal_(parameter, std=0.3)
    assistant.save_pretrained(folder)
    return folder


def decode(target, **arguments):
    """Text and recording of one call."""
    ids = torch.tensor([[1, 5, 9]])
    with record(lattice=True) as r:
        output = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, **arguments)
    return output, r


@pytest.mark.parametrize(
    "spec",
    [
        "lilicorr",
        "lilicorr:walk=viterbi",
        "lilicorr:sampled_walk=true",
        "lilicorr:k=2",
        "lilicorr:block=3",
        "lilicorr:yarn=8",
        "lilicorr:context_window=3",
        "lilicorr:adaptive_draft=true",
        "lilicorr:scoring=eager,cache=static",
        "plain:cache=static",
        "stock-loop",
        "lilicorr-tree:nodes=6,tree_weight=1",
        "ddtree",
        "lilicorr:k=2,block=4,walk=viterbi",
        "argmax",
        "argmax:block=3",
        "transformers-dflash",
        "prompt-lookup:tokens=4",
    ],
)
def test_every_system_decodes_exactly(target, folder, spec):
    arguments = parse_system(spec).build(Setting(target, str(folder), longest=27))
    assert decode(target, do_sample=False, **arguments)[0].equal(decode(target, do_sample=False)[0])


def test_checkpoint_and_small_assistant_by_path(target, folder, tmp_path):
    config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2, eos_token_id=None, pad_token_id=0)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "small")
    setting = Setting(target, "no such assistant")
    for spec in (
        *(f"{name}:path={folder}" for name in ("dflash", "lilicorr", "checkpoint")),
        f"assistant:path={tmp_path / 'small'}",
    ):
        arguments = parse_system(spec).build(setting)
        assert decode(target, do_sample=False, **arguments)[0].equal(decode(target, do_sample=False)[0])
    assert parse_system(f"dflash:path={folder}").label == f"dflash:path={folder.name}"
    assert parse_system(f"dflash:path={folder}").weights() == [folder / "model.safetensors"]
    assert parse_system("lilicorr:k=4").weights() == parse_system("assistant:path=some/model").weights() == []
    assert parse_system(f"checkpoint:path={folder},tree_budget=9").label == f"checkpoint:{folder.name},tree_budget=9"
    with pytest.raises(ValueError, match="both be called"):
        parse_systems([f"dflash:path={folder}", f"dflash:path=elsewhere/{folder.name}"])


def test_viterbi_commits_the_best_path(target, folder):
    _, r = decode(target, do_sample=False, assistant_model=load_variant(str(folder), target, WALKS["viterbi"]))
    lattices = [(block.draft_ids, block.lattice) for block in r.blocks if block.lattice is not None]
    assert lattices
    for draft_ids, lattice in lattices:
        path = viterbi_path(lattice.start_scores, lattice.pair_scores)
        tokens = lattice.candidate_ids.gather(-1, path.unsqueeze(-1)).flatten().tolist()
        assert draft_ids == tokens[: len(draft_ids)] and lattice.walk.equal(path)
    assert any(not greedy_walk(x.start_scores, x.pair_scores).equal(x.walk) for _, x in lattices)


def test_fewer_candidates(target, folder):
    _, r = decode(target, do_sample=False, assistant_model=load_variant(str(folder), target, LiLiCorrDraftModel, k=2))
    lattices = [block.lattice for block in r.blocks if block.lattice is not None]
    assert lattices and all(lattice.candidate_ids.shape[-1] == 2 for lattice in lattices)


def test_fields_of_the_config(target, folder):
    """Those that say how the same weights decode, checked as a config checks them."""
    system = parse_system("lilicorr:sampled_walk=true,logit_scale=4,k=2")
    assert system.label == "lilicorr:sampled_walk=True,logit_scale=4,k=2"
    config = system.build(Setting(target, str(folder)))["assistant_model"].config
    assert (config.sampled_walk, config.logit_scale, config.candidate_topk) == (True, 4, 2)
    assert not load_variant(str(folder), target, LiLiCorrDraftModel).config.sampled_walk
    for field in ("block_size", "vector_eps", "hidden_size"):
        with pytest.raises(ValueError, match=f"'{field}=3' is not an option"):
            parse_system(f"lilicorr:{field}=3")
    with pytest.raises(ValueError, match="sampled_walk"):
        parse_system("lilicorr:sampled_walk=maybe").build(Setting(target, str(folder)))


@pytest.mark.parametrize("block", [2, 3, 5])
def test_shorter_block_keeps_the_scores_of_its_slots(target, folder, block):
    """The head may be asked about fewer slots than it was trained on; a shortened one says the same of them."""
    whole = load_variant(str(folder), target, LiLiCorrDraftModel, dtype=torch.float32)
    short = shorten_block(whole, block)
    slots, k, width = block - 1, whole.config.candidate_topk, whole.config.hidden_size
    torch.manual_seed(0)
    inputs = (
        torch.randn(2, slots, k, width),
        torch.randn(2, slots, k).sort(descending=True).values,
        torch.randn(2, slots, width),
        torch.randn(2, width),
    )
    for expected, actual in zip(whole.lilicorr(*inputs), short.lilicorr(*inputs), strict=True):
        torch.testing.assert_close(actual, expected)
    _, r = decode(target, do_sample=False, assistant_model=short)
    assert max(len(block_.draft_ids) for block_ in r.blocks) == slots


def test_yarn_reaches_the_longest_sequence(target, folder):
    config = tiny_assistant().config
    assert yarn_parameters(config, trained=100, longest=100) == config.rope_parameters
    expected = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 3.0, "original_max_position_embeddings": 100}
    assert yarn_parameters(config, trained=100, longest=201) == expected
    usual, stretched = (
        load_variant(str(folder), target, LiLiCorrDraftModel, **how) for how in ({}, {"yarn": 8, "longest": 64})
    )
    # The slowest rotation is stretched by the whole factor, the fastest not at all.
    ratio = usual.rotary_emb.inv_freq / stretched.rotary_emb.inv_freq
    assert ratio[-1] == pytest.approx(8) and ratio[0] == pytest.approx(1)
    rope = yarn_parameters(config, trained=8, longest=64)
    by_hand = LiLiCorrDraftModel.from_pretrained(folder, rope_parameters=rope, context_window=5)
    assert by_hand.rotary_emb.inv_freq.equal(stretched.rotary_emb.inv_freq) and by_hand.config.context_window == 5

"""The models against numbers computed by nvidia-modelopt, SGLang and z-lab's dflash (see tests/golden)."""

import pytest
import torch
from tiny import tiny_config
from transformers.cache_utils import DFlashCache

from lilicorr_hf import DFlashModel, LiLiCorrConfig, LiLiCorrHead, greedy_walk, sampled_walk, viterbi_path
from lilicorr_hf.modeling.configuration_lilicorr import capture_layer_ids
from lilicorr_hf.modeling.lattice_lilicorr import lattice_scores, path_score
from lilicorr_hf.training.blocks import pack_blocks


HEAD_CASES = ["lilicorr_head_small", "lilicorr_head_identity"]


class HeadCase:
    """A golden head with its inputs flattened to `[N, ...]` blocks."""

    def __init__(self, case):
        spec = case.spec["config"]
        self.case, self.scale, self.tolerance = case, spec["logit_scale"], case.spec["tolerances"]["scores_abs"]
        self.config = tiny_config(
            hidden_size=spec["model_hidden_size"],
            block_size=spec["block_size"],
            candidate_topk=spec["candidate_topk"],
            head_hidden_size=spec["hidden_size"],
            head_num_layers=spec["num_layers"],
            head_num_heads=spec["num_heads"],
            head_mlp_ratio=spec["mlp_ratio"],
            factor_dim=spec["factor_dim"],
            rms_norm_eps=spec["rms_norm_eps"],
            vector_eps=spec["vector_eps"],
            logit_scale=spec["logit_scale"],
        )
        self.head = LiLiCorrHead(self.config)
        prefix = "lilicorr."
        self.head.load_state_dict({k.removeprefix(prefix): v for k, v in case.parameters().items()})
        self.ids = case.inputs("candidate_token_ids").flatten(0, 1)
        self.embeds = case.inputs("embed_tokens.weight")[self.ids]
        self.log_probs = case.inputs("candidate_log_probs").flatten(0, 1)
        self.pass_hidden = case.inputs("pass_hidden").flatten(0, 1)
        self.anchor_hidden = case.inputs("anchor_hidden").flatten(0, 2)
        self.anchor_valid = case.inputs("anchor_valid").flatten()

    @torch.no_grad()
    def scores(self, slots=None, k=None, valid=True):
        start, pair = self.head(
            self.embeds[:, :slots, :k],
            self.log_probs[:, :slots, :k],
            self.pass_hidden[:, :slots],
            self.anchor_hidden,
            self.anchor_valid if valid else None,
        )
        return start, pair

    def assert_scores(self, start, pair, name=""):
        for actual, what in ((start, "start_scores"), (pair, "pair_scores")):
            expected = self.case.expected(f"{name}{what}").flatten(0, 1)
            torch.testing.assert_close(actual / self.scale, expected, atol=self.tolerance, rtol=0)


@pytest.fixture(params=HEAD_CASES)
def head_case(request, golden):
    return HeadCase(golden(request.param))


@pytest.fixture
def small_case(golden):
    return HeadCase(golden("lilicorr_head_small"))


def test_scores_and_log_factors(head_case):
    start, pair = head_case.scores()
    head_case.assert_scores(start, pair)
    for actual, name in ((start, "log_start"), (pair, "log_pair")):
        torch.testing.assert_close(actual, head_case.case.expected(name).flatten(0, 1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("walk, name", [(greedy_walk, "greedy"), (viterbi_path, "viterbi")])
def test_paths_are_exact(head_case, walk, name):
    path = walk(*head_case.scores())
    assert torch.equal(path, head_case.case.expected(f"{name}_indices").flatten(0, 1))
    token_ids = head_case.ids.gather(-1, path.unsqueeze(-1)).squeeze(-1)
    assert torch.equal(token_ids, head_case.case.expected(f"{name}_token_ids").flatten(0, 1))


def test_scores_stay_in_fp32_under_autocast():
    torch.manual_seed(0)
    vectors = (torch.randn(2, 8), torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 8))
    expected = lattice_scores(*vectors, scale=8.0, eps=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = lattice_scores(*vectors, scale=8.0, eps=1e-4)
    assert all(
        ours.dtype == torch.float32 and ours.equal(theirs) for ours, theirs in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("name", ["greedy", "viterbi"])
def test_path_scores(small_case, name):
    start, pair = small_case.scores()
    path = small_case.case.expected(f"{name}_indices").flatten(0, 1)
    expected = small_case.case.expected(f"{name}_score").flatten()
    torch.testing.assert_close(path_score(start, pair, path), expected, atol=5e-4, rtol=0)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_fewer_candidates_than_trained_with(small_case, k):
    small_case.assert_scores(*small_case.scores(k=k), name=f"k{k}.")


def test_one_candidate_of_the_identity_head(golden):
    case = HeadCase(golden("lilicorr_head_identity"))
    assert not any(name.startswith("token_proj") for name in case.head.state_dict())
    case.assert_scores(*case.scores(k=1), name="k1.")


def test_shorter_block_than_trained_with(small_case):
    small_case.assert_scores(*small_case.scores(slots=3), name="active4.")


def test_every_anchor_valid_when_nothing_is_said(small_case):
    small_case.assert_scores(*small_case.scores(valid=False), name="all_valid.")


def test_short_vectors_are_divided_by_eps(small_case):
    with torch.no_grad():
        small_case.head.in_head.weight.mul_(2.0**-15)
        small_case.head.in_head.bias.mul_(2.0**-15)
    small_case.assert_scores(*small_case.scores(), name="tinynorm.")


def test_intermediates(small_case):
    c = small_case
    with torch.no_grad():
        nodes = c.head.node_inputs(c.embeds, c.log_probs, c.pass_hidden)
        attended = c.head.attended_nodes(c.embeds, c.log_probs, c.pass_hidden)
        anchor = c.head.anchor_state(c.anchor_hidden, c.anchor_valid)
        fused = c.head.fuse(attended, anchor)
        actual = {
            "node_input": nodes.flatten(1, 2),
            "lattice_normed": attended.flatten(1, 2),
            "anchor_normed": anchor,
            "anchor_out_raw": c.head.anchor_out_head(anchor),
            "out_raw": c.head.out_head(fused),
            "in_raw": c.head.in_head(fused),
        }
    for name, value in actual.items():
        expected = c.case.expected(f"intermediate.{name}").reshape(value.shape)
        torch.testing.assert_close(value, expected, atol=1e-4, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def test_sampled_walk_from_given_uniforms(small_case):
    start, pair = small_case.scores()
    inputs = small_case.case.inputs
    greedy = inputs("sampling.greedy_mask").flatten()
    temperature = inputs("sampling.temperatures").flatten()[~greedy]
    uniforms = inputs("sampling.uniforms").flatten(0, 1)[~greedy]
    path, q = sampled_walk(start[~greedy], pair[~greedy], uniforms, temperature)
    token_ids = small_case.ids[~greedy].gather(-1, path.unsqueeze(-1)).squeeze(-1)
    assert torch.equal(token_ids, small_case.case.expected("sampled.token_ids").flatten(0, 1)[~greedy])
    torch.testing.assert_close(q, small_case.case.expected("sampled.q").flatten(0, 1)[~greedy], atol=2e-4, rtol=0)
    walked = greedy_walk(start[greedy], pair[greedy])
    token_ids = small_case.ids[greedy].gather(-1, walked.unsqueeze(-1)).squeeze(-1)
    assert torch.equal(token_ids, small_case.case.expected("sampled.token_ids").flatten(0, 1)[greedy])


def drafter_from(case, **changes) -> DFlashModel:
    spec = case.spec["config"]
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = LiLiCorrConfig(
        **{name: spec[name] for name in (*names, "head_dim", "rms_norm_eps", "block_size", "target_layer_ids")},
        vocab_size=97,
        mask_token_id=96,
        num_target_layers=8,
        head_num_heads=1,
        **changes,
    )
    model = DFlashModel(config).eval()
    model.load_state_dict(case.parameters())
    return model


@pytest.mark.parametrize("theta", [1e4, 1e6])
@torch.no_grad()
def test_drafter_step_then_cached_step(golden, theta):
    case = golden("dflash_drafter_small")
    model = drafter_from(case, rope_parameters={"rope_type": "default", "rope_theta": theta})
    prefix, tolerance = f"theta1e{len(str(int(theta))) - 1}", {"atol": 2e-5, "rtol": 2e-5}
    first, second = case.inputs("target_hidden_step1"), case.inputs("target_hidden_step2")

    cache = DFlashCache(config=model.config)
    cache.set_previous_accepted_tokens(first.shape[1])
    output = model(case.inputs("block_embeds_step1"), first, cache=cache)
    torch.testing.assert_close(output.last_hidden_state, case.expected(f"{prefix}.step1_hidden"), **tolerance)

    cache.crop(-model.config.block_size)
    cache.set_previous_accepted_tokens(second.shape[1])
    output = model(case.inputs("block_embeds_step2"), second, cache=cache)
    torch.testing.assert_close(output.last_hidden_state, case.expected(f"{prefix}.step2_hidden_cached"), **tolerance)

    output = model(case.inputs("block_embeds_step2"), torch.cat([first, second], dim=1))
    expected = case.expected(f"{prefix}.step2_hidden_recompute")
    torch.testing.assert_close(output.last_hidden_state, expected, **tolerance)


def test_captured_layers(golden):
    table = golden("dflash_drafter_small").spec["target_layer_ids_table"]["rows"]
    for num_target_layers, num_taps, ids in table:
        assert capture_layer_ids(num_target_layers, num_taps) == ids


@torch.no_grad()
def test_packed_blocks_equal_single_blocks(golden):
    case = golden("dflash_training_mask")
    theta = case.spec["config"]["rope_theta"]
    model = drafter_from(case, rope_parameters={"rope_type": "default", "rope_theta": theta})
    block_size, keep = model.config.block_size, case.inputs("block_keep_mask")
    input_ids = case.inputs("input_ids")
    positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)
    anchors = case.inputs("anchor_positions")
    blocks = pack_blocks(input_ids, positions, anchors, keep, block_size, model.config.mask_token_id)
    embeds = case.inputs("embed_tokens.weight")[blocks.input_ids]
    assert torch.equal(embeds, case.expected("block_embeds"))
    assert torch.equal(blocks.position_ids, case.expected("position_ids"))
    assert torch.equal(blocks.attention_mask.squeeze(1), case.expected("attention_allowed"))

    output = model(
        embeds,
        case.inputs("target_hidden"),
        attention_mask=blocks.attention_mask,
        position_ids=blocks.position_ids,
    )
    hidden = output.last_hidden_state.unflatten(1, (-1, block_size))
    torch.testing.assert_close(hidden[keep], case.expected("hidden")[keep], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("width, expected", [(4096, 36_758_794), (2560, 32_040_202)])
def test_parameter_counts_of_the_paper(width, expected):
    config = LiLiCorrConfig(mask_token_id=151669, hidden_size=width)
    with torch.device("meta"):
        head = LiLiCorrHead(config)
    assert sum(p.numel() for p in head.parameters()) == expected

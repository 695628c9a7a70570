"""Other heads on the same drafter against numbers computed by their authors' code, and inside `generate`."""

import pytest
import torch
from goldens import Golden
from huggingface_hub.errors import StrictDataclassClassValidationError
from tiny import tiny_config, tiny_target
from torch import nn
from transformers import AutoModel, LlamaConfig
from transformers.cache_utils import DFlashCache

from lilicorr_hf import DFlash2Model, DominoModel, DSparkModel, LiLiCorrDraftModel
from lilicorr_hf.modeling.modeling_dflash import DFlashOutput
from lilicorr_hf.modeling.modeling_dspark import confident_prefix
from lilicorr_hf.modeling.target_lilicorr import TargetTables


def tables_of(embeddings: torch.Tensor, head: torch.Tensor | None = None) -> TargetTables:
    """Tables of a target that is nothing but them."""
    tables = TargetTables.__new__(TargetTables)
    tables.embedding = nn.Embedding.from_pretrained(embeddings)
    tables.output_head = nn.Linear(*reversed(embeddings.shape), bias=False)
    if head is not None:
        tables.output_head.weight.data.copy_(head)
    tables.config, tables.dtype = LlamaConfig(), embeddings.dtype
    return tables


def head_of(model_class, spec, weights, **fields):
    """A model whose head has these weights; its drafter is not looked at."""
    config = tiny_config(
        hidden_size=spec["hidden_size"], vocab_size=spec["vocab_size"], block_size=spec["block_size"],
        num_attention_heads=2, num_key_value_heads=2, mask_token_id=0, **fields,
    )  # fmt: skip
    model = model_class(config).eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and all(name.startswith(("fc", "hidden_norm", "layers", "norm")) for name in missing)
    return model


@pytest.mark.parametrize("shift, prefix", [(True, 0), (True, 1), (True, 2), (False, 0), (False, 1)])
@torch.no_grad()
def test_domino(shift, prefix):
    case = Golden.load("domino_head_small")
    spec, name = case.spec["config"], f"{'shift' if shift else 'noshift'}_prefix{prefix}"
    fields = {key: spec[key] for key in ("gru_hidden_dim", "emb_dim")}
    fields |= {"shift_label": shift, "pure_draft_prefix_len": prefix}
    model = head_of(DominoModel, spec, case.parameters(), **fields)
    hidden, base = case.inputs("hidden").flatten(0, 1), case.inputs("base_logits").flatten(0, 1)
    tables, anchors = tables_of(case.inputs("embed_tokens.weight")), case.inputs("anchor_token_ids").view(-1, 1)

    positions = case.inputs("anchor_positions").unsqueeze(-1) + torch.arange(spec["block_size"])
    ids = case.inputs("input_ids").gather(1, positions.flatten(1)).view_as(positions).flatten(0, 1)
    expected = case.expected(f"{name}.logits").flatten(0, 1)
    embeds = tables.embed(ids)
    rows = slice(None) if shift else slice(1, None)
    logits = model.corrected_logits(base[:, rows], hidden[:, rows], embeds if shift else embeds[:, :-1])
    tolerance = case.spec["tolerances"]["logits_abs"]
    torch.testing.assert_close(logits, expected[:, rows], atol=tolerance, rtol=0)

    if f"expected.{name}.rollout_token_ids" in case.tensors:
        output = DFlashOutput(last_hidden_state=hidden)
        draft = model.choose(base[:, model.slot_rows], output, anchors, tables)
        assert torch.equal(draft.token_ids, case.expected(f"{name}.rollout_token_ids").flatten(0, 1))


@pytest.mark.parametrize("variant", ["vanilla", "gated", "rnn"])
@torch.no_grad()
def test_dspark(variant):
    case = Golden.load("dspark_head_small")
    spec, prefix = case.spec["config"], f"{variant}."
    weights = {k.removeprefix(prefix): v for k, v in case.parameters().items() if k.startswith(prefix)}
    model = head_of(DSparkModel, spec, weights, markov_rank=spec["markov_rank"], markov_head_type=variant)
    hidden, base = case.inputs("hidden").flatten(0, 1), case.inputs("base_logits").flatten(0, 1)

    def expected(name):
        return case.expected(f"{variant}.{name}").flatten(0, 1)

    tolerance = case.spec["tolerances"]["logits_abs"]
    previous = case.inputs("prev_token_ids").flatten(0, 1)
    logits, confidence = model.corrected_logits(base, hidden, previous)
    torch.testing.assert_close(logits, expected("logits"), atol=tolerance, rtol=0)
    torch.testing.assert_close(confidence, expected("confidence_logits"), atol=tolerance, rtol=0)

    anchors = previous[:, :1]
    output = DFlashOutput(last_hidden_state=hidden)
    draft = model.choose(base, output, anchors, None)
    assert torch.equal(draft.token_ids, expected("rollout_token_ids"))
    # What a draft is drawn from, along a path of the reference.
    path = torch.cat([anchors, expected("sampled_path_token_ids")[:, :-1]], dim=-1)
    probs = (model.corrected_logits(base, hidden, path)[0] / 0.8).softmax(dim=-1)
    torch.testing.assert_close(probs, expected("sampled_path_q"), atol=case.spec["tolerances"]["q_abs"], rtol=0)
    for threshold, lengths in case.spec["per_variant"][variant]["confident_prefix_length"].items():
        assert confident_prefix(expected("rollout_confidence_logits"), float(threshold)).tolist() == lengths


@torch.no_grad()
def test_dflash2_and_its_convolutions():
    case = Golden.load("dflash2_selector_small")
    spec, tolerances = case.spec["config"], case.spec["tolerances"]
    names = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "rms_norm_eps block_size target_layer_ids vocab_size mask_token_id conv_kernel_size conv_group_size "
        "selector_rank"
    ).split()
    rope = {"rope_type": "default", "rope_theta": spec["rope_theta"]}
    config = tiny_config(
        **{name: spec[name] for name in names},
        candidate_topk=spec["selector_top_k"], num_target_layers=8, rope_parameters=rope,
    )  # fmt: skip
    model = DFlash2Model(config).eval()
    model.load_state_dict(case.parameters())

    before, after = model.layers[0].attention_conv(case.inputs("conv.x"))
    for found, name in (
        (before(case.inputs("conv.x")), "prepared"),
        (after(case.inputs("conv.sublayer_output")), "finished"),
    ):
        torch.testing.assert_close(found, case.expected(f"conv.{name}"), atol=tolerances["conv_abs"], rtol=0)

    output = model(case.inputs("block_embeds"), case.inputs("target_hidden"))
    torch.testing.assert_close(
        output.last_hidden_state, case.expected("hidden"), atol=tolerances["hidden_abs"], rtol=0
    )
    tables = tables_of(torch.zeros(97, 48), case.inputs("lm_head.weight"))
    logits = tables.logits(output.last_hidden_state)[:, 1:]
    draft = model.choose(logits, output, case.inputs("anchor_token_ids").unsqueeze(-1), tables)
    lattice = draft.lattice
    assert torch.equal(lattice.candidate_ids, case.expected("candidate_token_ids"))
    assert torch.equal(draft.token_ids, case.expected("selected_token_ids"))
    rows = [lattice.start_scores]
    for s in range(1, 5):
        rows.append(lattice.pair_scores[torch.arange(2), s - 1, lattice.walk[:, s - 1]])
    torch.testing.assert_close(
        torch.stack(rows, dim=1), case.expected("selector_scores"), atol=tolerances["scores_abs"], rtol=0
    )


@torch.no_grad()
def test_packed_blocks_are_convolved_apart():
    """Several blocks in one pass, of half the size too, give what each gives alone."""
    model = LiLiCorrDraftModel(tiny_config(block_size=4, conv_kernel_size=2, conv_group_size=8)).eval()
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.3)
    convolution = model.layers[0].mlp_conv
    for size in (4, 2):
        rows = torch.randn(1, 3 * size, 32)
        packed = [side(rows) for side in convolution(rows, size)]
        alone = [[side(block) for side in convolution(block, size)] for block in rows.split(size, dim=1)]
        for found, expected in zip(packed, zip(*alone, strict=True), strict=True):
            torch.testing.assert_close(found, torch.cat(expected, dim=1))


RIVALS = {
    "domino": (DominoModel, {"gru_hidden_dim": 8, "emb_dim": 6}),
    "domino, own rows": (DominoModel, {"gru_hidden_dim": 8, "emb_dim": 6, "shift_label": False}),
    "dspark": (DSparkModel, {"markov_rank": 6}),
    "dspark, rnn": (DSparkModel, {"markov_rank": 6, "markov_head_type": "rnn"}),
    "dflash2": (DFlash2Model, {"selector_rank": 6, "conv_kernel_size": 2, "conv_group_size": 8}),
    "lilicorr with convolutions": (LiLiCorrDraftModel, {"conv_kernel_size": 2, "conv_group_size": 8}),
}


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3")


@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_text_is_the_targets(target, name, rows):
    model_class, fields = RIVALS[name]
    assistant = model_class(tiny_config(**fields)).eval().to(target.dtype)
    prompt = torch.randint(1, 60, (rows, 9))
    arguments = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 30, "do_sample": False}
    expected = target.generate(prompt, **arguments)
    assert torch.equal(target.generate(prompt, assistant_model=assistant, **arguments), expected)
    processed = arguments | {"repetition_penalty": 1.5, "bad_words_ids": [[7]]}
    expected = target.generate(prompt, **processed)
    assert torch.equal(target.generate(prompt, assistant_model=assistant, **processed), expected)


@pytest.mark.parametrize("name", RIVALS)
def test_drawn_drafts_state_what_they_were_drawn_from(target, name):
    model_class, fields = RIVALS[name]
    assistant = model_class(tiny_config(**fields)).eval().to(target.dtype)
    tables = TargetTables(target)
    states = torch.randn(1, 5, 64, dtype=target.dtype)
    rows = 5 + assistant.config.block_size
    draft = assistant.draft(
        states, torch.tensor([[3]]), torch.arange(rows)[None], DFlashCache(config=assistant.config), tables,
        temperature=0.7,
    )  # fmt: skip
    assert draft.token_ids.shape[1] == assistant.num_drafted
    probs = draft.proposal_logits.softmax(dim=-1)
    assert (probs.gather(-1, draft.token_ids.unsqueeze(-1)) > 0).all()


@pytest.mark.parametrize("name", RIVALS)
def test_checkpoints_come_back_as_what_they_were(name, tmp_path):
    model_class, fields = RIVALS[name]
    model = model_class(tiny_config(**fields))
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert type(loaded) is model_class
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_half_a_convolution_is_refused():
    with pytest.raises(StrictDataclassClassValidationError, match="conv_kernel_size.*go together"):
        tiny_config(conv_kernel_size=3)

"""Saving and loading: bit for bit, everything or an error that names what is wrong."""

import json
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_assistant, tiny_config, tiny_target
from transformers import AutoConfig, AutoModel

from lilicorr_hf import DFlashModel, LiLiCorrConfig, LiLiCorrDraftModel


def perturb(model):
    """No parameter at 0 or 1, so that one which is not loaded shows."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


@pytest.fixture
def model():
    return perturb(tiny_assistant())


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path / "ours")
    return tmp_path / "ours"


def everything(model):
    return dict(model.named_parameters()) | dict(model.named_buffers())


def assert_equal(loaded, model, dtype=torch.float32):
    ours, theirs = everything(loaded), everything(model)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        # Rotary frequencies stay fp32 whatever the weights are.
        wanted = value if name.startswith("rotary") else value.to(dtype)
        assert torch.equal(ours[name], wanted), name


def served_config(config: LiLiCorrConfig) -> dict:
    """The same checkpoint as serving engines write it."""
    fields = config.to_dict()
    qwen = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    qwen += ("head_dim", "rms_norm_eps", "vocab_size", "max_position_embeddings", "hidden_act", "layer_types")
    return {name: fields[name] for name in qwen} | {
        "architectures": ["LiLiCorrDraftModel"],
        "model_type": "qwen3",
        "rope_theta": config.rope_parameters["rope_theta"],
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": config.target_layer_ids,
            "causal": False,
            "projector_type": "lilicorr",
            "lilicorr_enabled": True,
            "lilicorr_candidate_topk": config.candidate_topk,
            "lilicorr_hidden_size": config.head_hidden_size,
            "lilicorr_num_layers": config.head_num_layers,
            "lilicorr_num_heads": config.head_num_heads,
            "lilicorr_mlp_ratio": config.head_mlp_ratio,
            "lilicorr_factor_dim": config.factor_dim,
            "lilicorr_vector_eps": config.vector_eps,
            "lilicorr_logit_scale": config.logit_scale,
        },
    }


@pytest.fixture
def served(model, folder, tmp_path):
    other = tmp_path / "served"
    other.mkdir()
    save_file(load_file(folder / "model.safetensors"), other / "model.safetensors", metadata={"format": "pt"})
    (other / "config.json").write_text(json.dumps(served_config(model.config)))
    return other


def edit_config(folder, edit):
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    edit(fields)
    path.write_text(json.dumps(fields))


@pytest.mark.parametrize("options", [{}, {"device_map": "cpu"}, {"dtype": torch.bfloat16}, {"dtype": torch.float64}])
def test_round_trip_is_bit_for_bit(model, folder, options):
    loaded = LiLiCorrDraftModel.from_pretrained(folder, **options)
    assert_equal(loaded, model, options.get("dtype", torch.float32))
    assert not any(p.is_meta for p in everything(loaded).values())


def test_bf16_checkpoint_round_trip(model, tmp_path):
    model = model.to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    # `to` rounds rotary frequencies as well; loading computes them afresh.
    model.rotary_emb = tiny_assistant().rotary_emb
    assert_equal(LiLiCorrDraftModel.from_pretrained(tmp_path), model, torch.bfloat16)


def test_sharded_round_trip(model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_equal(LiLiCorrDraftModel.from_pretrained(tmp_path), model)


def test_loaded_model_scores_the_same_lattice(model, folder):
    loaded = LiLiCorrDraftModel.from_pretrained(folder)
    inputs = torch.randn(2, 4, 3, 32), torch.randn(2, 4, 3), torch.randn(2, 4, 32), torch.randn(2, 32)
    with torch.no_grad():
        for ours, theirs in zip(loaded.lilicorr(*inputs), model.lilicorr(*inputs), strict=True):
            assert torch.equal(ours, theirs)


def test_config_states_everything_that_changes_scores(folder):
    fields = json.loads((folder / "config.json").read_text())
    wanted = {"vocab_size", "hidden_size", "num_target_layers", "mask_token_id", "vector_eps", "logit_scale"}
    assert wanted <= fields.keys() and fields["model_type"] == "lilicorr"


@pytest.mark.parametrize("name", ["vector_eps", "logit_scale"])
def test_scores_are_never_left_to_a_default(folder, name):
    edit_config(folder, lambda fields: fields.pop(name))
    for load in (LiLiCorrDraftModel.from_pretrained, AutoConfig.from_pretrained, AutoModel.from_pretrained):
        with pytest.raises(ValueError, match=name):
            load(folder)


def test_served_format_loads(model, served):
    loaded = LiLiCorrDraftModel.from_pretrained(served)
    assert_equal(loaded, model)
    ours, theirs = loaded.config.to_dict(), model.config.to_dict()
    # How to decode is nothing that servers are told.
    ignored = ("architectures", "auto_map", "transformers_version", "dtype", "_name_or_path", "tree_budget")
    assert {k: ours[k] for k in theirs if k not in ignored} == {k: theirs[k] for k in theirs if k not in ignored}


def test_model_prefix_is_tolerated(model, served):
    tensors = {f"model.{k}": v for k, v in load_file(served / "model.safetensors").items()}
    save_file(tensors, served / "model.safetensors", metadata={"format": "pt"})
    assert_equal(LiLiCorrDraftModel.from_pretrained(served), model)


def test_published_drafter_variants_load(served):
    """z-lab's files: block fields nested or not, rotary base in either place, what is off spelled out, no head."""

    def zlab(fields):
        fields["architectures"] = ["DFlashDraftModel"]
        nested = fields["dflash_config"]
        fields["dflash_config"] = {k: nested[k] for k in ("mask_token_id", "target_layer_ids")}
        fields["dflash_config"]["block_size"] = fields.pop("block_size")
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}

    tensors = {k: v for k, v in load_file(served / "model.safetensors").items() if not k.startswith("lilicorr.")}
    save_file(tensors, served / "model.safetensors", metadata={"format": "pt"})
    edit_config(served, zlab)
    drafter = DFlashModel.from_pretrained(served)
    assert drafter.config.block_size == 5 and drafter.config.rope_parameters["rope_theta"] == 10000.0

    neutral = {"is_causal": False, "layer_types": ["full_attention"] * 2, "sliding_window": None}
    edit_config(served, lambda fields: fields.update(fields.pop("dflash_config") | neutral))
    assert DFlashModel.from_pretrained(served).config.target_layer_ids == [0, 2]


@pytest.mark.parametrize(
    "edit, words",
    [
        (lambda f: f["dflash_config"].update(projector_type="domino"), "domino"),
        (lambda f: f["dflash_config"].update(causal=True), "Causal"),
        (lambda f: f["dflash_config"].update(conv_kernel_size=4), "conv_kernel_size"),
        (lambda f: f.pop("rope_theta"), "rope_theta"),
        (lambda f: f.update(rope_parameters={"rope_type": "default", "rope_theta": 5.0}), "two rotary bases"),
        (lambda f: f.update(layer_types=["sliding_attention"] * 2), "sliding_attention"),
        (lambda f: f["dflash_config"].update(mask_token_id=64), "outside"),
        (lambda f: f["dflash_config"].pop("mask_token_id"), "mask_token_id"),
        (lambda f: f["dflash_config"].update(target_layer_ids=[1, 1]), "repeat"),
        (lambda f: f["dflash_config"].update(target_layer_ids=[1, 3]), "last layer"),
        (lambda f: f["dflash_config"].pop("lilicorr_logit_scale"), "logit_scale"),
    ],
)
def test_configs_that_would_decode_wrongly_are_refused(served, edit, words):
    edit_config(served, edit)
    with pytest.raises(Exception, match=words):
        LiLiCorrDraftModel.from_pretrained(served)


def test_too_few_target_layers_for_the_taps():
    with pytest.raises(Exception, match="4 layers.*5 taps"):
        tiny_config(num_hidden_layers=5, target_layer_ids=[], layer_types=None)


def test_deleted_and_renamed_head_tensors_are_named(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["lilicorr.inn_head.weight"] = tensors.pop("lilicorr.in_head.weight")
    del tensors["lilicorr.slot_embedding"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError) as error:
        LiLiCorrDraftModel.from_pretrained(folder)
    for name in ("lilicorr.in_head.weight", "lilicorr.slot_embedding", "lilicorr.inn_head.weight"):
        assert name in str(error.value)


def test_wrong_shapes_are_an_error(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["lilicorr.in_head.weight"] = torch.zeros(3, 3)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="misshapen.*lilicorr.in_head.weight.*3, 3.*12, 16"):
        LiLiCorrDraftModel.from_pretrained(folder)


def test_a_head_is_initialised_only_when_asked_for(tmp_path):
    perturb(tiny_assistant(0, DFlashModel)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="lilicorr.anchor_norm.weight.*init_head=True"):
        LiLiCorrDraftModel.from_pretrained(tmp_path)

    def fresh(seed):
        torch.manual_seed(seed)
        return everything(LiLiCorrDraftModel.from_pretrained(tmp_path, init_head=True))

    first, again = fresh(0), fresh(0)
    assert all(torch.equal(first[k], again[k]) and first[k].isfinite().all() for k in first)
    assert first["lilicorr.out_head.weight"].std() > 0 and first["lilicorr.slot_embedding"].abs().max() == 0
    assert first["lilicorr.layers.0.attn.in_proj_weight"].std() > 0

    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="fc.weight"):
        LiLiCorrDraftModel.from_pretrained(tmp_path, init_head=True)


def test_drafter_alone_comes_out_of_a_full_checkpoint(model, folder):
    drafter = DFlashModel.from_pretrained(folder)
    for name, value in everything(drafter).items():
        assert torch.equal(value, everything(model)[name])


def test_truncated_download_is_named(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="partly downloaded"):
        LiLiCorrDraftModel.from_pretrained(folder)


def test_auto_classes(model, folder, tmp_path):
    assert type(AutoConfig.from_pretrained(folder)) is LiLiCorrConfig
    assert_equal(AutoModel.from_pretrained(folder), model)
    drafter = tiny_assistant(0, DFlashModel)
    drafter.save_pretrained(tmp_path / "drafter")
    assert type(AutoModel.from_pretrained(tmp_path / "drafter")) is DFlashModel


def test_auto_model_works_after_the_bare_import(folder):
    """The classes are only imported when asked for, by name or by `AutoModel`."""
    code = (
        "import sys, lilicorr_hf; from transformers import AutoModel as A; print(type(A.from_pretrained(sys.argv[1])))"
    )
    output = subprocess.check_output([sys.executable, "-c", code, str(folder)], text=True)
    assert output.strip() == "<class 'lilicorr_hf.modeling.modeling_lilicorr.LiLiCorrDraftModel'>"
    with pytest.raises(ImportError, match="NoSuchModel"):
        from lilicorr_hf import NoSuchModel  # noqa: F401


def test_target_stays_out_of_the_assistant(model, folder):
    target = tiny_target("llama", tie_word_embeddings=True)
    names = set(model.state_dict())
    count = sum(p.numel() for p in model.parameters())
    target.generate(torch.tensor([[1, 2]]), max_new_tokens=4, assistant_model=model)
    assert set(model.state_dict()) == names == set(load_file(folder / "model.safetensors"))
    assert sum(p.numel() for p in model.parameters()) == count
    assert not any("embed_tokens" in name or "lm_head" in name for name in names)


def test_saved_folder_carries_its_code(folder):
    """The model's file, and whatever any of the files imports."""
    files = {path.stem: path.read_text() for path in folder.glob("*.py")}
    imported = {name for text in files.values() for name in re.findall(r"^from \.(\w+) import", text, re.MULTILINE)}
    assert files.keys() == imported | {"modeling_lilicorr"}

"""DSpark checkpoints as their authors publish them: read under our names, bit for bit, or refused by name."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_config, tiny_target
from transformers import AutoModel
from typer.testing import CliRunner

from lilicorr_hf import DFlashModel, DSparkModel, LiLiCorrDraftModel
from lilicorr_hf.cli import app
from lilicorr_hf.convert import convert, read_checkpoint
from lilicorr_hf.pairs import assistant_class


def published_name(name):
    if name.startswith(("markov_", "gate_proj", "joint_proj")):
        return f"markov_head.{name}"
    return name.replace("confidence_proj", "confidence_head.proj")


def publish(model, folder):
    """As DeepSpec writes it: the target's config and tables copied, the drafter's fields at the top level."""
    config, folder = model.config, folder / "published"
    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    names += "vocab_size max_position_embeddings layer_types rms_norm_eps hidden_act attention_bias attention_dropout "
    names += "block_size mask_token_id target_layer_ids num_target_layers markov_rank markov_head_type"
    fields = {name: getattr(config, name) for name in names.split()} | {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "confidence_head_with_markov": True,
        "enable_confidence_head": True,
        "num_anchors": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "max_window_layers": 2,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
    }
    tensors = {published_name(name): tensor for name, tensor in model.state_dict().items()}
    for table in ("embed_tokens.weight", "lm_head.weight"):
        tensors[table] = torch.randn(config.vocab_size, config.hidden_size, dtype=torch.bfloat16)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tiny_dspark(kind):
    """In bf16, without a 0 in it."""
    model = DSparkModel(tiny_config(markov_rank=6, markov_head_type=kind)).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


@pytest.fixture
def published(tmp_path):
    return publish(tiny_dspark("vanilla"), tmp_path)


def assert_same_bits(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_it_is_our_model_bit_for_bit(tmp_path, kind):
    model = tiny_dspark(kind)
    published = publish(model, tmp_path)
    assert assistant_class(str(published)) is DSparkModel
    loaded = DSparkModel.from_pretrained(published)
    assert_same_bits(loaded.state_dict(), model.state_dict())
    loaded.save_pretrained(tmp_path / "saved")
    convert(published, tmp_path / "converted")
    for folder in (tmp_path / "saved", tmp_path / "converted"):
        assert_same_bits(load_file(folder / "model.safetensors"), model.state_dict())
        again = AutoModel.from_pretrained(folder)
        assert type(again) is DSparkModel and again.config.auto_map["AutoModel"] == "modeling_dspark.DSparkModel"
        fields = json.loads((folder / "config.json").read_text())
        assert fields["architectures"] == ["DSparkModel"] and fields["markov_head_type"] == kind
        assert not {"num_anchors", "enable_confidence_head", "confidence_head_with_markov"} & fields.keys()
        for name in ("block_size", "target_layer_ids", "mask_token_id", "rope_parameters", "markov_rank"):
            assert getattr(again.config, name) == getattr(model.config, name), name


def test_it_drafts_for_its_target(published):
    target, prompt = tiny_target("qwen3"), torch.randint(1, 60, (1, 9))
    drafter = DSparkModel.from_pretrained(published, dtype=target.dtype)
    options = {"max_new_tokens": 24, "do_sample": False}
    assert torch.equal(target.generate(prompt, assistant_model=drafter, **options), target.generate(prompt, **options))


def edit_config(folder, edit):
    fields = json.loads((folder / "config.json").read_text())
    edit(fields)
    (folder / "config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize(
    "edit, words",
    [
        (lambda f: [f.update(markov_rank=0), f.pop("markov_head_type")], "'markov_rank': 0"),
        (lambda f: f.update(enable_confidence_head=False), "enable_confidence_head"),
        (lambda f: f.update(confidence_head_with_markov=False), "confidence_head_with_markov"),
        (lambda f: f.update(sample_from_anchor=False), "sample_from_anchor"),
        (lambda f: f.update(markov_head_type="cubic"), "markov_head_type.*vanilla.*cubic"),
        (lambda f: f.pop("markov_head_type"), "does not state.*markov_head_type"),
        (lambda f: f.pop("target_layer_ids"), "does not state.*target_layer_ids"),
        (lambda f: f.update(target_layer_ids=[]), "does not state.*target_layer_ids"),
        (lambda f: f.update(target_layer_ids=[-1, 2]), "must lie in"),
        (lambda f: f.update(target_layer_ids=[0, 3]), "last layer"),
        (lambda f: f.pop("block_size"), "block_size"),
        (lambda f: f.pop("mask_token_id"), "mask_token_id"),
        (lambda f: f.pop("rope_theta"), "rope_theta"),
        (lambda f: f.update(layer_types=["sliding_attention", "full_attention"]), "sliding_attention"),
        (lambda f: f.update(is_causal=True), "Causal"),
        (lambda f: f.update(draft_vocab_size=8), "draft_vocab_size"),
    ],
)
def test_what_would_draft_otherwise_is_refused(published, tmp_path, edit, words):
    edit_config(published, edit)
    for read in (DSparkModel.from_pretrained, lambda folder: convert(folder, tmp_path / "out")):
        with pytest.raises(Exception, match=words):
            read(published)
    assert not (tmp_path / "out").exists()


def test_open_values_can_be_stated(published):
    model = DSparkModel.from_pretrained(published)
    edit_config(published, lambda f: [f.pop("markov_head_type"), f.pop("target_layer_ids"), f.pop("markov_rank")])
    stated = {"markov_head_type": "vanilla", "target_layer_ids": [0, 2], "markov_rank": 6}
    assert_same_bits(read_checkpoint(published, **stated).tensors, dict(model.state_dict()))


@pytest.mark.parametrize(
    "edit, words",
    [
        (lambda t: t.pop("markov_head.markov_w2.weight"), "missing tensors.*markov_w2.weight"),
        (lambda t: t.pop("confidence_head.proj.bias"), "missing tensors.*confidence_proj.bias"),
        (lambda t: t.update({"markov_head.gate_proj.bias": torch.zeros(6)}), "unexpected tensors.*gate_proj.bias"),
        (lambda t: t.update({"markov_head.extra": torch.zeros(1)}), "unexpected tensors.*markov_head.extra"),
        (lambda t: t.update({"markov_head.markov_w1.weight": torch.zeros(64, 5)}), "misshapen.*markov_w1.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_named(published, tmp_path, edit, words):
    tensors = load_file(published / "model.safetensors")
    edit(tensors)
    save_file(tensors, published / "model.safetensors", metadata={"format": "pt"})
    for read in (DSparkModel.from_pretrained, lambda folder: convert(folder, tmp_path / "out")):
        with pytest.raises(ValueError, match=words):
            read(published)


def test_it_is_no_other_method(published, tmp_path):
    for model_class in (DFlashModel, LiLiCorrDraftModel):
        with pytest.raises(ValueError, match="unexpected tensors.*markov_head"):
            model_class.from_pretrained(published)
    for to in ("dflash", "vllm", "transformers"):
        with pytest.raises(ValueError, match="no place for a DSpark drafter"):
            convert(published, tmp_path / "out", to=to)
    for head in ("drop", "init"):
        with pytest.raises(ValueError, match="keep"):
            convert(published, tmp_path / "out", head=head)
    assert not (tmp_path / "out").exists()


def test_model_prefix_is_tolerated(published, tmp_path):
    loaded = DSparkModel.from_pretrained(published)
    tensors = {f"model.{name}": tensor for name, tensor in load_file(published / "model.safetensors").items()}
    save_file(tensors, published / "model.safetensors", metadata={"format": "pt"})
    for found in (DSparkModel.from_pretrained(published).state_dict(), read_checkpoint(published).tensors):
        assert_same_bits(found, dict(loaded.state_dict()))


def test_command(published, tmp_path):
    done = CliRunner().invoke(app, ["convert", str(published), str(tmp_path / "ours")])
    assert done.exit_code == 0 and "drafter and head" in done.stderr, done.output

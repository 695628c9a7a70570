"""Formats of other engines: read completely, written bit for bit, and whatever would score otherwise is refused."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import tiny_assistant, tiny_config, tiny_target
from transformers import AutoConfig, AutoModel, Qwen3Config
from typer.testing import CliRunner

import lilicorr_hf
from lilicorr_hf import DFlashModel, LiLiCorrConfig, LiLiCorrDraftModel
from lilicorr_hf.cli import app
from lilicorr_hf.convert import FORMATS, convert, read_checkpoint, write_checkpoint


WITH_HEAD = [name for name, form in FORMATS.items() if form.head is not False]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.fixture
def ours(tmp_path):
    """A checkpoint in bf16 without a 0 or 1 in it, K = 4 as engines want it."""
    fields = {"candidate_topk": 4, "target_name_or_path": "org/target", "tree_budget": None, "tree_weight": 0.6}
    fields |= {"context_window": 64, "adaptive_draft": True, "scoring": "eager"}
    model = tiny_assistant(**fields).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path / "ours")
    return tmp_path / "ours"


def tensors_of(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_bits(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def edit_config(folder, edit):
    fields = json.loads((folder / "config.json").read_text())
    edit(fields)
    (folder / "config.json").write_text(json.dumps(fields))


def edit_tensors(folder, edit):
    tensors = tensors_of(folder)
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("shards", ["5GB", "20KB"])
def test_there_and_back_is_bit_for_bit(ours, tmp_path, to, shards, monkeypatch):
    form = FORMATS[to]
    monkeypatch.setattr(write_checkpoint, "__defaults__", (shards,))
    convert(ours, tmp_path / to, to=to, head="keep" if to in WITH_HEAD else "drop")
    convert(tmp_path / to, tmp_path / "back")
    wanted = {k: v for k, v in tensors_of(ours).items() if to in WITH_HEAD or not k.startswith("lilicorr.")}
    assert len(list((tmp_path / to).glob("*.safetensors"))) == 1 or shards == "20KB"
    assert_same_bits(tensors_of(tmp_path / "back"), wanted)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (ours, tmp_path / "back"))
    if form.head is False:
        # What only a head has is not to be found in a format without one.
        defaults = LiLiCorrConfig().to_dict()
        lost = ("candidate_topk", "factor_dim", "head_hidden_size", "head_num_layers", "head_num_heads")
        before |= {name: defaults[name] for name in lost}
        before |= {"architectures": ["DFlashModel"]}
        before["auto_map"]["AutoModel"] = "modeling_dflash.DFlashModel"
    assert after == before


def test_ours_is_what_save_pretrained_writes(ours, tmp_path):
    convert(ours, tmp_path / "copy")
    assert {path.name for path in ours.iterdir()} == {path.name for path in (tmp_path / "copy").iterdir()}
    for path in ours.iterdir():
        if path.suffix != ".safetensors":
            assert path.read_bytes() == (tmp_path / "copy" / path.name).read_bytes(), path.name
    with safe_open(tmp_path / "copy" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_names_of_engines(ours, tmp_path):
    """SGLang and vLLM name the head's MLPs otherwise than nvidia-modelopt."""
    moved = {"lilicorr.feature_norm", "lilicorr.feature_mlp.up_proj", "lilicorr.feature_mlp.down_proj"}
    moved |= {f"lilicorr.layers.{i}.mlp.{part}_proj" for i in range(2) for part in ("up", "down")}
    mine = tensors_of(ours).keys()
    for to in ("sglang", "vllm"):
        convert(ours, tmp_path / to, to=to)
        assert {name.rpartition(".")[0] for name in tensors_of(tmp_path / to).keys() - mine} == moved
    convert(ours, tmp_path / "modelopt", to="modelopt")
    assert tensors_of(tmp_path / "modelopt").keys() == mine


@pytest.mark.parametrize("to", ["modelopt", "sglang"])
def test_a_head_as_wide_as_its_drafter(tmp_path, to):
    """It projects no token, and other projects write its width as 0."""
    tiny_assistant(candidate_topk=4, head_hidden_size=32).save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "served", to=to)
    assert not any("token_proj" in name for name in tensors_of(tmp_path / "served"))
    edit_config(tmp_path / "served", lambda fields: fields["dflash_config"].update(lilicorr_hidden_size=0))
    convert(tmp_path / "served", tmp_path / "back")
    assert_same_bits(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "ours"))


def test_files_as_z_lab_publishes_them(ours, tmp_path):
    """What a published config.json holds besides is no obstacle, and none of it stays."""
    convert(ours, tmp_path / "zlab", to="dflash", head="drop")

    def publish(fields):
        fields |= {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "tie_word_embeddings": True}
        fields |= {"bos_token_id": 1, "eos_token_id": 2, "max_window_layers": 2, "sliding_window": None}
        fields["dtype"] = fields.pop("torch_dtype")
        del fields["sampled_walk"], fields["target_name_or_path"]

    edit_config(tmp_path / "zlab", publish)
    convert(tmp_path / "zlab", tmp_path / "plain")
    model = AutoModel.from_pretrained(tmp_path / "plain", trust_remote_code=True)
    assert type(model) is DFlashModel and model.dtype == torch.bfloat16
    assert model.config.auto_map["AutoModel"] == "modeling_dflash.DFlashModel"


def test_served_config_says_all_that_engines_ask_for(ours, tmp_path):
    convert(ours, tmp_path / "served", to="vllm")
    fields = json.loads((tmp_path / "served" / "config.json").read_text())
    assert fields["architectures"] == ["LiLiCorrDraftModel"] and fields["model_type"] == "qwen3"
    assert fields["torch_dtype"] == "bfloat16" and "auto_map" not in fields
    assert fields["dflash_config"] == {
        "mask_token_id": 63,
        "target_layer_ids": [0, 2],
        "causal": False,
        "projector_type": "lilicorr",
        "lilicorr_enabled": True,
        "lilicorr_candidate_topk": 4,
        "lilicorr_hidden_size": 16,
        "lilicorr_num_layers": 2,
        "lilicorr_num_heads": 2,
        "lilicorr_mlp_ratio": 2.0,
        "lilicorr_factor_dim": 12,
        "lilicorr_vector_eps": 1e-4,
        "lilicorr_logit_scale": 8.0,
    }


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 123456.0}, YARN])
@pytest.mark.parametrize("to", ["dflash", "vllm", "transformers"])
def test_rotary_parameters_arrive(tmp_path, rope, to):
    tiny_assistant(candidate_topk=4, rope_parameters=dict(rope)).save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / to, to=to, head="keep" if to == "vllm" else "drop")
    config = AutoConfig.from_pretrained(tmp_path / to)
    assert type(config) is Qwen3Config or to == "transformers"
    assert {name: config.rope_parameters[name] for name in rope} == rope
    assert (
        read_checkpoint(tmp_path / to).config.rope_parameters == LiLiCorrConfig(rope_parameters=rope).rope_parameters
    )


def test_transformers_own_class_drafts_the_same_block(ours, tmp_path):
    """The drafter's argmax at each step of a generation, ours against `speculation_type="dflash"`."""
    drafter = DFlashModel.from_pretrained(ours, tree_budget=0, adaptive_draft=False).double()
    convert(ours, tmp_path / "native", to="transformers", head="drop")
    native = AutoModel.from_pretrained(tmp_path / "native").double()
    assert type(native).__module__.startswith("transformers.models.muse_glimmer_assistant")
    target, inputs = tiny_target("qwen3"), torch.tensor([[5, 9, 2, 33, 7, 1]])
    blocks = {}
    for name, assistant, options in (("ours", drafter, {}), ("native", native, {"speculation_type": "dflash"})):
        blocks[name] = []

        def spy(module, args, kwargs, output, seen=blocks[name]):
            seen.append(target.lm_head(output.last_hidden_state)[:, 1:].argmax(-1).tolist())

        handle = assistant.register_forward_hook(spy, with_kwargs=True)
        text = target.generate(inputs, assistant_model=assistant, max_new_tokens=24, do_sample=False, **options)
        handle.remove()
        assert text.tolist() == target.generate(inputs, max_new_tokens=24, do_sample=False).tolist()
    assert len(blocks["ours"]) > 5 and blocks["ours"] == blocks["native"]


def test_published_drafter_becomes_ours(ours, tmp_path):
    convert(ours, tmp_path / "zlab", to="dflash", head="drop")
    convert(tmp_path / "zlab", tmp_path / "plain")
    assert type(AutoModel.from_pretrained(tmp_path / "plain")) is DFlashModel
    for folder in ("one", "two"):
        convert(
            tmp_path / "zlab", tmp_path / folder, head="init", candidate_topk=4, head_hidden_size=16, factor_dim=12
        )
    model = LiLiCorrDraftModel.from_pretrained(tmp_path / "one")
    assert model.config.head_hidden_size == 16 and model.dtype == torch.bfloat16
    one, two, drafter = (tensors_of(tmp_path / name) for name in ("one", "two", "zlab"))
    assert_same_bits(one, two)
    assert_same_bits({k: v for k, v in one.items() if k in drafter}, drafter)
    with pytest.raises(ValueError, match="has a head"):
        convert(tmp_path / "one", tmp_path / "three", head="init")


def test_layer_ids_counted_with_the_embeddings(ours, tmp_path):
    convert(ours, tmp_path / "zlab", to="dflash", head="drop")

    def shift(fields):
        fields["eagle_aux_hidden_state_layer_ids"] = [i + 1 for i in fields["dflash_config"].pop("target_layer_ids")]

    edit_config(tmp_path / "zlab", shift)
    assert read_checkpoint(tmp_path / "zlab").config.target_layer_ids == [0, 2]
    edit_config(tmp_path / "zlab", lambda fields: fields["dflash_config"].update(target_layer_ids=[1, 2]))
    with pytest.raises(ValueError, match=r"two sets of layers.*\[0, 2\]"):
        read_checkpoint(tmp_path / "zlab")


def test_convolutions_go_where_they_are_known(tmp_path):
    model = LiLiCorrDraftModel(tiny_config(conv_kernel_size=2, conv_group_size=8))
    model.save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "served", to="modelopt")
    convert(tmp_path / "served", tmp_path / "back")
    assert_same_bits(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "ours"))
    for to in ("dflash", "transformers"):
        with pytest.raises(ValueError, match="conv_kernel_size"):
            convert(tmp_path / "ours", tmp_path / to, to=to, head="drop")


@pytest.mark.parametrize(
    "edit, words",
    [
        (lambda f: f.pop("block_size"), "block_size"),
        (lambda f: f.pop("rms_norm_eps"), "rms_norm_eps"),
        (lambda f: f.pop("num_target_layers"), "num_target_layers"),
        (lambda f: f.pop("vocab_size"), "vocab_size"),
        (lambda f: f.pop("rope_theta"), "rope_theta"),
        (lambda f: f["dflash_config"].pop("lilicorr_logit_scale"), "logit_scale"),
        (lambda f: f["dflash_config"].pop("lilicorr_vector_eps"), "vector_eps"),
        (lambda f: f["dflash_config"].update(conv_kernel_size=4, conv_group_size=16), "base_kernel"),
        (lambda f: f.update(is_causal=True), "Causal"),
        (lambda f: f["dflash_config"].update(use_swa=True), "use_swa"),
        (lambda f: f["dflash_config"].update(output_multiplier=0.5), "output_multiplier"),
        (lambda f: f.update(draft_vocab_size=8), "draft_vocab_size"),
        (lambda f: f.update(quantization_config={"quant_algo": "FP8"}), "quantization_config"),
        (lambda f: f.update(architectures=["Qwen3OmniDSparkModel"]), "Qwen3OmniDSparkModel"),
    ],
)
def test_what_would_draft_otherwise_is_refused(ours, tmp_path, edit, words):
    convert(ours, tmp_path / "served", to="modelopt")
    edit_config(tmp_path / "served", edit)
    with pytest.raises(ValueError, match=words):
        convert(tmp_path / "served", tmp_path / "out")
    with pytest.raises(ValueError, match=words):
        LiLiCorrDraftModel.from_pretrained(tmp_path / "served")
    assert not (tmp_path / "out").exists()


def test_open_values_can_be_stated_but_not_contradicted(ours, tmp_path):
    convert(ours, tmp_path / "served", to="modelopt")
    with pytest.raises(ValueError, match="logit_scale.*16.*8.0"):
        convert(tmp_path / "served", tmp_path / "out", logit_scale=16.0)
    edit_config(tmp_path / "served", lambda fields: fields["dflash_config"].pop("lilicorr_logit_scale"))
    convert(tmp_path / "served", tmp_path / "out", logit_scale=16.0)
    assert LiLiCorrDraftModel.from_pretrained(tmp_path / "out").config.logit_scale == 16.0
    with pytest.raises(ValueError, match="logit_scala"):
        convert(tmp_path / "served", tmp_path / "other", logit_scala=16.0)


@pytest.mark.parametrize(
    "edit, words",
    [
        (lambda t: t.pop("lilicorr.in_head.weight"), "missing tensors.*lilicorr.in_head.weight"),
        (lambda t: t.pop("layers.1.mlp.up_proj.weight"), "missing tensors.*layers.1.mlp.up_proj.weight"),
        (lambda t: t.update({"lilicorr.extra": torch.zeros(1)}), "unexpected tensors.*lilicorr.extra"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(1)}), "unexpected tensors.*lm_head.weight"),
        (
            lambda t: t.update({"fc.weight": torch.zeros(2, 3)}),
            r"misshapen.*fc.weight: \(2, 3\) instead of \(32, 64\)",
        ),
        (lambda t: [t.pop(name) for name in list(t) if "lilicorr" in name], "missing.*lilicorr.anchor_norm.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_named(ours, tmp_path, edit, words):
    edit_tensors(ours, edit)
    with pytest.raises(ValueError, match=words):
        convert(ours, tmp_path / "out", to="modelopt")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_a_head_is_never_lost_or_invented_silently(ours, tmp_path):
    with pytest.raises(ValueError, match="without a head.*drop"):
        convert(ours, tmp_path / "out", to="dflash")
    convert(ours, tmp_path / "drafter", head="drop")
    with pytest.raises(ValueError, match="of a head.*init"):
        convert(tmp_path / "drafter", tmp_path / "out", to="sglang")
    assert not (tmp_path / "out").exists()


def test_widths_that_kernels_cannot_take(tmp_path):
    tiny_assistant(candidate_topk=3).save_pretrained(tmp_path / "ours")
    for to in ("sglang", "vllm"):
        with pytest.raises(ValueError, match="power of two.*3"):
            convert(tmp_path / "ours", tmp_path / "out", to=to)
    convert(tmp_path / "ours", tmp_path / "out", to="modelopt")


def test_mask_embeddings_of_their_own_are_refused(ours, tmp_path):
    (ours / "mask_embedding.pt").touch()
    with pytest.raises(ValueError, match="mask_embedding.pt"):
        convert(ours, tmp_path / "out")


def lilicorr(*args):
    return CliRunner().invoke(app, ["convert", *map(str, args)])


def test_command(ours, tmp_path):
    done = lilicorr("smollm2-135m", tmp_path / "served", "--to", "sglang")
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == str(tmp_path / "served") and "drafter and head" in done.stderr
    shipped = LiLiCorrDraftModel.from_pretrained("lilicorr_hf/checkpoints/smollm2-135m").state_dict()
    assert_same_bits(read_checkpoint(tmp_path / "served").tensors, dict(shipped))

    edit_config(tmp_path / "served", lambda fields: fields["dflash_config"].pop("lilicorr_vector_eps"))
    again = lilicorr(tmp_path / "served", tmp_path / "back")
    assert again.exit_code == 2 and "vector_eps" in again.output and "Traceback" not in again.output
    assert lilicorr(tmp_path / "served", tmp_path / "back", "--set", "vector_eps=1e-4").exit_code == 0
    for arguments, words in (
        ((ours, tmp_path / "back"), "not empty"),
        ((ours, tmp_path / "new", "--to", "gguf"), "modelopt"),
        ((ours, tmp_path / "new", "--head", "two"), "keep"),
        ((ours, tmp_path / "new", "--set", "x"), "NAME=VALUE"),
        ((tmp_path, tmp_path / "new"), "config.json"),
    ):
        refused = lilicorr(*arguments)
        assert refused.exit_code == 2 and words in refused.output, refused.output
    assert lilicorr_hf.LiLiCorrConfig.from_pretrained(tmp_path / "back").vector_eps == 1e-4

"""A saved folder on a machine without the package: the files beside the weights are all it takes."""

import ast
import json
import sys
from pathlib import Path

import pytest
from bare import bare_python, run_bare
from tiny import tiny_assistant, tiny_target
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, pipeline
from transformers.dynamic_module_utils import get_imports, get_relative_imports

import lilicorr_hf
from lilicorr_hf import DFlashModel, LiLiCorrConfig, LiLiCorrDraftModel


MODELING = Path(__file__).parents[2] / "modeling"
SCRIPT = """
import json, sys, torch
from transformers import AutoModel, AutoModelForCausalLM

target_folder, *folders = sys.argv[1:]
target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float64)
prompt = torch.tensor([[3, 1, 4, 1, 5], [0, 0, 9, 2, 6]])
padding = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
calls = {
    "greedy": {"inputs": prompt[:1]},
    "sampled": {"inputs": prompt[:1], "do_sample": True},
    "batch": {"inputs": prompt, "attention_mask": padding},
}
report = {}
for folder in folders:
    assistant = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=torch.float64)
    drafts = []
    assistant.register_forward_hook(lambda *_: drafts.append(0))
    same = {}
    for name, call in calls.items():
        options = {"max_new_tokens": 12, "do_sample": False} | call
        texts = []
        for helper in (None, assistant):
            torch.manual_seed(0)
            texts.append(target.generate(**options, assistant_model=helper).tolist())
        same[name] = texts[0] == texts[1]
    report[type(assistant).__name__] = {"same": same, "drafts": len(drafts), "module": type(assistant).__module__}
try:
    AutoModelForCausalLM.from_pretrained(folders[0], trust_remote_code=True)
except ValueError as error:
    report["causal"] = str(error)[:200]
report["package"] = "lilicorr_hf" in sys.modules
try:
    import lilicorr_hf
    report["package"] = lilicorr_hf.__file__
except ModuleNotFoundError:
    pass
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("saved")
    tiny_target("llama").save_pretrained(base / "target")
    tiny_assistant().save_pretrained(base / "with_head")
    tiny_assistant(0, DFlashModel).save_pretrained(base / "drafter")
    return base


def test_a_fresh_environment_without_the_package_decodes_with_it(folders, tmp_path):
    python = bare_python(tmp_path / "venv")
    names = (folders / name for name in ("target", "with_head", "drafter"))
    report = json.loads(run_bare(python, SCRIPT, *names, home=tmp_path))
    assert report["package"] is False
    assert "Unrecognized configuration class" in report["causal"]
    for name in ("LiLiCorrDraftModel", "DFlashModel"):
        assert report[name]["module"].startswith("transformers_modules.")
        # Batches and seeds come out right in our own loop alone, so the hook was installed by the copied files.
        assert report[name]["same"] == {"greedy": True, "sampled": True, "batch": True}
        assert report[name]["drafts"] > 12


def test_where_the_package_is_installed_its_classes_win(folders):
    for name, wanted in (("with_head", LiLiCorrDraftModel), ("drafter", DFlashModel)):
        assert type(AutoModel.from_pretrained(folders / name, trust_remote_code=True)) is wanted
    assert type(AutoConfig.from_pretrained(folders / "drafter", trust_remote_code=True)) is LiLiCorrConfig
    assert not any(name.startswith("transformers_modules") for name in sys.modules)


def test_a_drafter_is_no_language_model_and_says_what_it_is(folders):
    for load in (
        lambda: AutoModelForCausalLM.from_pretrained(folders / "with_head"),
        lambda: AutoModelForCausalLM.from_config(tiny_assistant().config),
        lambda: pipeline("text-generation", model=str(folders / "with_head")),
    ):
        with pytest.raises(ValueError, match="assistant_model=") as error:
            load()
        assert "AutoModel.from_pretrained" in str(error.value)


@pytest.mark.parametrize("path", sorted(MODELING.glob("*_*.py")), ids=lambda path: path.stem)
def test_transformers_scanner_sees_what_python_does(path):
    """It searches the text, docstrings included, and ships and requires what it finds there."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, (ast.Import, ast.ImportFrom))]
    siblings = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level}
    assert siblings == set(get_relative_imports(path))
    assert all((MODELING / f"{name}.py").is_file() for name in siblings)
    required = set(get_imports(path)) - set(sys.stdlib_module_names)
    assert required <= {"huggingface_hub", "safetensors", "torch", "transformers"}


def test_auto_map_names_flat_files(folders):
    for name, class_name in (
        ("with_head", "modeling_lilicorr.LiLiCorrDraftModel"),
        ("drafter", "modeling_dflash.DFlashModel"),
    ):
        fields = json.loads((folders / name / "config.json").read_text())
        assert fields["auto_map"] == {"AutoConfig": "configuration_lilicorr.LiLiCorrConfig", "AutoModel": class_name}
        assert fields["model_type"] == lilicorr_hf.LiLiCorrConfig.model_type

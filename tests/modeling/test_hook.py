"""The hook: once, guarded, reversible, and invisible to every other assistant."""

import functools
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from tiny import tiny_assistant, tiny_target
from transformers import GenerationMixin

import lilicorr_hf
from lilicorr_hf.modeling import hook_lilicorr


PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.fixture
def unhooked():
    lilicorr_hf.uninstall_hook()
    yield
    lilicorr_hf.install_hook()


@pytest.fixture(scope="module")
def pair():
    return tiny_target("llama"), tiny_assistant()


def generate(model, assistant, **kwargs):
    with lilicorr_hf.record() as recording:
        output = model.generate(PROMPT, max_new_tokens=8, do_sample=False, assistant_model=assistant, **kwargs)
    return output, recording


def test_import_installs_it_and_a_second_time_changes_nothing(pair):
    before = GenerationMixin._get_candidate_generator
    lilicorr_hf.install_hook()
    assert GenerationMixin._get_candidate_generator is before
    assert generate(*pair)[1].blocks


def test_uninstall_restores_the_original(unhooked, pair):
    assert GenerationMixin._get_candidate_generator.__module__.startswith("transformers")
    assert GenerationMixin._validate_generation_mode.__module__.startswith("transformers")
    lilicorr_hf.uninstall_hook()
    with pytest.raises(Exception, match="."):
        generate(*pair)


def test_uninstall_does_not_throw_away_another_wrapper(monkeypatch):
    ours = GenerationMixin._get_candidate_generator

    @functools.wraps(ours)
    def theirs(self, *args, **kwargs):
        return ours(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "_get_candidate_generator", theirs)
    lilicorr_hf.install_hook()
    assert GenerationMixin._get_candidate_generator is theirs
    with pytest.raises(RuntimeError, match="wrapped again"):
        lilicorr_hf.uninstall_hook()
    assert GenerationMixin._get_candidate_generator is theirs


def test_wrapped_methods_keep_their_signature():
    for name in hook_lilicorr.WRAPPERS:
        method = getattr(GenerationMixin, name)
        assert inspect.signature(method) == inspect.signature(method.__wrapped__)


def change(monkeypatch, name, missing):
    """As if another transformers had lost a method, or changed what it takes."""
    if missing:
        monkeypatch.delattr(GenerationMixin, name)
    else:
        monkeypatch.setattr(GenerationMixin, name, lambda self, something_else: None)


@pytest.mark.parametrize("missing", [True, False])
@pytest.mark.parametrize("name", hook_lilicorr.WRAPPERS)
def test_unknown_transformers_is_an_error_that_names_the_tested_versions(unhooked, monkeypatch, pair, name, missing):
    change(monkeypatch, name, missing)
    for hook in (lilicorr_hf.install_hook, lambda: lilicorr_hf.attach(*pair)):
        with pytest.raises(RuntimeError, match=f"(?s){name}.*5.24.*custom_generate"):
            hook()


@pytest.mark.parametrize("missing", [True, False])
@pytest.mark.parametrize("name", hook_lilicorr.WRAPPERS)
def test_without_a_place_for_the_hook_generate_points_to_custom_generate(unhooked, monkeypatch, pair, name, missing):
    """What importing does there: no block drafter as an assistant, all else as ever, and the other door open."""
    (target, assistant), options = pair, {"max_new_tokens": 8, "do_sample": False}
    plain = target.generate(PROMPT, **options)
    before = GenerationMixin.generate
    change(monkeypatch, name, missing)
    for _ in range(2):
        hook_lilicorr.install_hook_or_refuse()
    with pytest.raises(RuntimeError, match=f"(?s){name}.*5.24.*custom_generate=block_decoding"):
        target.generate(PROMPT, assistant_model=assistant, **options)
    monkeypatch.undo()
    output = target.generate(PROMPT, custom_generate=lilicorr_hf.block_decoding(assistant), **options)
    assert output.tolist() == plain.tolist() == target.generate(PROMPT, **options).tolist()
    other = target.generate(PROMPT, assistant_model=tiny_target("llama", seed=1), **options)
    assert other.tolist() == plain.tolist()
    lilicorr_hf.uninstall_hook()
    assert GenerationMixin.generate is before


@pytest.mark.parametrize("version, warned", [("5.20.2", 0), ("5.24.7", 0), ("5.25.0.dev0", 1), ("6.0.0", 1)])
def test_versions_that_nobody_tested_are_told_of(monkeypatch, version, warned):
    warnings = []
    monkeypatch.setattr(hook_lilicorr.logger, "warning_once", warnings.append)
    hook_lilicorr.check_version(version)
    tested = ", ".join(hook_lilicorr.TESTED_TRANSFORMERS)
    assert len(warnings) == warned and all(tested in text and version in text for text in warnings)


def test_an_untested_version_is_told_of_once():
    fake = "import transformers; transformers.__version__ = '5.99.0'"
    code = f"{fake}; from lilicorr_hf import DFlashModel, install_hook; install_hook()"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    assert said.count("not with 5.99.0") == 1


def test_versions_that_are_too_old_are_refused():
    for version in ("4.57.6", "5.19.0"):
        with pytest.raises(ImportError, match=rf"(?s){version}.*transformers>=5\.20"):
            hook_lilicorr.check_version(version)


def test_the_range_that_installs_is_the_one_that_was_tested():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (needed,) = (text for text in project["dependencies"] if text.startswith("transformers"))
    first, last = hook_lilicorr.TESTED_TRANSFORMERS[0], hook_lilicorr.TESTED_TRANSFORMERS[-1]
    after = ".".join([last.split(".")[0], str(int(last.split(".")[1]) + 1)])
    assert Requirement(needed).specifier == SpecifierSet(f">={first},<{after}")


def test_attach_serves_one_instance_only(unhooked, pair):
    target, assistant = pair
    other = tiny_target("llama")
    with lilicorr_hf.attach(target, assistant):
        assert generate(target, assistant)[1].blocks
        with pytest.raises(Exception, match="."):
            generate(other, assistant)
    with pytest.raises(Exception, match="."):
        generate(target, assistant)
    assert "_get_candidate_generator" not in target.__dict__


def test_attach_checks_the_pair(pair):
    with pytest.raises(ValueError, match="hidden_size"):
        lilicorr_hf.attach(pair[0], tiny_assistant(hidden_size=40))


def test_other_assistants_are_left_alone(pair):
    target, _ = pair
    plain = target.generate(PROMPT, max_new_tokens=8, do_sample=False)
    for kwargs in ({"assistant_model": tiny_target("llama", seed=1)}, {"prompt_lookup_num_tokens": 3}):
        with lilicorr_hf.record() as recording:
            output = target.generate(PROMPT, max_new_tokens=8, do_sample=False, **kwargs)
        assert output.tolist() == plain.tolist() and recording.calls == 0


def test_native_path_is_only_taken_when_asked_for_and_says_so(pair, monkeypatch):
    target, warnings = pair[0], []
    monkeypatch.setattr(hook_lilicorr.logger, "warning_once", warnings.append)
    assistant = tiny_assistant().double()
    output, recording = generate(target, assistant, speculation_type="dflash")
    assert recording.calls == 0 and "never asks its head" in warnings[0]
    assert output.tolist() == target.generate(PROMPT, max_new_tokens=8, do_sample=False).tolist()


def test_importing_costs_little_more_than_transformers_generation():
    """No models, no trainer, no gradio come along; the time itself is measured by `make import-time`."""
    heavy = "('datasets', 'gradio', 'matplotlib', 'transformers.modeling_utils', 'transformers.trainer')"
    code = f"import sys, lilicorr_hf; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"

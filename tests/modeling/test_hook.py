"""The hook: once, guarded, reversible, and invisible to every other assistant."""

import functools
import inspect
import subprocess
import sys

import pytest
import torch
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


@pytest.mark.parametrize("name", ["_get_candidate_generator", "_validate_generation_mode"])
def test_unknown_transformers_is_an_error_that_names_the_tested_versions(unhooked, monkeypatch, name):
    monkeypatch.setattr(GenerationMixin, name, lambda self, something_else: None)
    with pytest.raises(RuntimeError, match=f"(?s){name}.*5.24.*custom_generate"):
        lilicorr_hf.install_hook()


def test_without_the_hook_custom_generate_still_decodes(unhooked, monkeypatch, pair):
    target, assistant = pair
    warnings = []
    monkeypatch.setattr(hook_lilicorr.logger, "warning_once", warnings.append)
    monkeypatch.setattr(GenerationMixin, "_get_candidate_generator", lambda self, something_else: None)
    hook_lilicorr.install_hook_or_warn()
    assert len(warnings) == 1 and "custom_generate=block_decoding" in warnings[0]
    options = {"max_new_tokens": 8, "do_sample": False}
    output = target.generate(PROMPT, custom_generate=lilicorr_hf.block_decoding(assistant), **options)
    assert output.tolist() == target.generate(PROMPT, **options).tolist()


@pytest.mark.parametrize("version, warned", [("5.24.0", 0), ("5.24.7", 0), ("5.25.0.dev0", 1), ("6.0.0", 1)])
def test_versions_that_nobody_tested_are_told_of(monkeypatch, version, warned):
    warnings = []
    monkeypatch.setattr(hook_lilicorr.logger, "warning_once", warnings.append)
    hook_lilicorr.check_version(version)
    assert len(warnings) == warned and all("5.24" in text and version in text for text in warnings)


def test_versions_that_are_too_old_are_refused():
    for version in ("4.57.6", "5.23.0"):
        with pytest.raises(ImportError, match=rf"(?s){version}.*transformers>=5\.24"):
            hook_lilicorr.check_version(version)


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

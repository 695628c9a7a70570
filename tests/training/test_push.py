"""Pushing to a Hub over real HTTP: the `lilicorr train` command in a process of its own against a fake endpoint."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_hub import TOKEN, Repository, environment, serving
from safetensors.torch import load, load_file
from small_run import write_small_run


NEEDED = {"README.md", "config.json", "model.safetensors", "modeling_lilicorr.py", "recipe.yaml", "training.json"}


@pytest.fixture
def hub():
    with serving() as made:
        yield made


@pytest.fixture
def config(model, tokenizer, tmp_path) -> Path:
    return write_small_run(
        tmp_path, model, tokenizer, push_to_hub=True, hub_strategy="every_save", hub_model_id="nobody/drafter"
    )


def train(config: Path, endpoint: str, *options: str, token: str | None = TOKEN) -> subprocess.CompletedProcess:
    command = [str(Path(sys.executable).with_name("lilicorr")), "train", "--config", str(config), *options]
    settings = environment(config.parent, endpoint, token)
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=300)


def test_every_save_pushes_a_whole_checkpoint(hub, config, tmp_path):
    done = train(config, hub.url, "--hub_token", TOKEN, token=None)
    assert done.returncode == 0, done.stderr
    commits = hub.repositories["nobody/drafter"].commits
    assert commits[0].message == "Training in progress, step 2" and commits[-1].message == "Model save"

    first, last = commits[0].files, commits[-1].files
    for files, folder in ((first, "run/checkpoint-2"), (last, "run")):
        assert files.keys() >= NEEDED
        assert {name for name in files if name.endswith(".py")} == {p.name for p in (tmp_path / folder).glob("*.py")}
        for name in NEEDED:
            assert files[name] == (tmp_path / folder / name).read_bytes(), name
    assert [json.loads(files["training.json"])["progress"]["steps"] for files in (first, last)] == [2, 4]
    assert 'from_pretrained("nobody/drafter"' in last["README.md"].decode()
    for commit in commits:
        for name, content in commit.files.items():
            assert TOKEN.encode() not in content, name
        for name in ("README.md", "config.json", "recipe.yaml", "training.json"):
            assert str(tmp_path).encode() not in commit.files[name], name

    fetched = tmp_path / "fetched"
    fetched.mkdir()
    for name, content in first.items():
        (fetched / name).write_bytes(content)
    assert_loads_from_its_own_code(fetched, environment(tmp_path, hub.url))


def assert_loads_from_its_own_code(folder: Path, settings: dict[str, str]) -> None:
    code = (
        "import sys, torch; from transformers import AutoModel;"
        "model = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True);"
        "assert 'lilicorr_hf' not in sys.modules and type(model).__module__.startswith('transformers_modules');"
        "torch.save(model.state_dict(), sys.argv[2])"
    )
    loaded = folder / "loaded.pt"
    command = [sys.executable, "-c", code, str(folder), str(loaded)]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    weights, stored = torch.load(loaded), load((folder / "model.safetensors").read_bytes())
    assert weights.keys() == stored.keys() and all(torch.equal(weights[name], stored[name]) for name in stored)


def no_token(hub):
    return None


def may_only_read(hub):
    hub.repositories["nobody/drafter"] = Repository()
    hub.readable.add("nobody/drafter")
    return TOKEN


def unknown_place(hub):
    hub.failures["/api/repos/create"] = (404, 9)
    return TOKEN


@pytest.mark.parametrize(
    "situation, options, words",
    [
        (no_token, (), ("hf auth login", "401")),
        (may_only_read, (), ("token may write", "403")),
        (unknown_place, (), ("hub_model_id", "404")),
        (lambda hub: TOKEN, ("--hub_revision", "dev"), ("hub_revision", "404")),
    ],
)
def test_refusals_come_before_training_and_touch_nothing(hub, config, tmp_path, situation, options, words):
    earlier = tmp_path / "run" / "model.safetensors"
    earlier.parent.mkdir()
    earlier.write_bytes(b"of an earlier run")
    done = train(config, hub.url, *options, token=situation(hub))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    for word in ("nobody/drafter", hub.url, "nothing was started", *words):
        assert word in done.stderr
    assert {path.name for path in earlier.parent.iterdir()} == {earlier.name}
    assert earlier.read_bytes() == b"of an earlier run"
    assert not any(repository.commits for repository in hub.repositories.values())


def test_no_hub_at_all(config, tmp_path):
    done = train(config, "http://127.0.0.1:9")
    assert done.returncode == 2 and "http://127.0.0.1:9" in done.stderr and "nothing was started" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_failed_push_in_between_is_told_and_made_good(hub, config):
    hub.failures["/commit/"] = (403, 1)
    done = train(config, hub.url)
    assert done.returncode == 0, done.stderr
    assert "A push to nobody/drafter failed" in done.stderr and "403" in done.stderr
    assert hub.repositories["nobody/drafter"].files.keys() >= NEEDED


def test_a_failed_last_push_loses_nothing(hub, config, tmp_path):
    hub.failures["/commit/"] = (403, 99)
    done = train(config, hub.url)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "nothing is lost" in done.stderr and f"hf upload nobody/drafter {tmp_path / 'run'}" in done.stderr
    assert {path.name for path in (tmp_path / "run").iterdir()} >= NEEDED | {"checkpoint-4"}
    final, newest = (load_file(tmp_path / "run" / name / "model.safetensors") for name in (".", "checkpoint-4"))
    assert all(torch.equal(final[name], newest[name]) for name in final)

"""From and to a Hub by name, over real HTTP: processes of their own against a fake endpoint."""

import json
import subprocess
import sys

import pytest
from bare import bare_python
from fake_hub import Commit, Repository, environment, serving, sha
from safetensors.torch import load
from tiny import tiny_assistant, tiny_target


NAME = "nobody/drafter"
PUSH = """
import sys, torch, lilicorr_hf
model = lilicorr_hf.LiLiCorrDraftModel.from_pretrained(sys.argv[1])
model.push_to_hub(sys.argv[2], max_shard_size="20KB")
with torch.no_grad():
    model.norm.weight += 1
model.push_to_hub(sys.argv[2], max_shard_size="20KB")
"""
# Twice: what was loaded once needs no Hub the second time.
LOAD = """
import json, sys
from transformers import AutoModel
revisions = {}
for revision in sys.argv[2:]:
    for local in (False, True):
        options = {"revision": revision, "trust_remote_code": True, "local_files_only": local}
        model = AutoModel.from_pretrained(sys.argv[1], **options)
        revisions.setdefault(revision, []).append([model.norm.weight.tolist(), type(model).__module__])
print(json.dumps(revisions))
"""
# Each way to a repository and what it says; one process, because importing takes longer than all of them.
REFUSALS = """
import json, sys
from lilicorr_hf import LiLiCorrDraftModel
from lilicorr_hf.convert import convert
from transformers import AutoModel
ways = {
    "class": LiLiCorrDraftModel.from_pretrained,
    "auto": AutoModel.from_pretrained,
    "convert": lambda name, **options: convert(name, sys.argv[1], **options),
}
said = []
for name, options in json.loads(sys.argv[2]):
    for way, load in ways.items():
        try:
            load(name, **options)
        except (OSError, ValueError) as error:
            said.append([name, way, str(error)])
print(json.dumps(said))
"""


@pytest.fixture
def hub():
    with serving() as made:
        yield made


def run(script, *arguments, folder, endpoint, python=sys.executable):
    command = [python, "-c", script, *map(str, arguments)]
    own = environment(folder, endpoint)
    done = subprocess.run(command, env=own, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def publish(hub, folder, name=NAME):
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.repositories[name] = Repository([Commit("first", files)])


def test_pushed_in_shards_and_loaded_by_name_and_revision(hub, tmp_path):
    """Pushed where the package is installed, loaded where it is not."""
    model = tiny_assistant()
    model.save_pretrained(tmp_path / "model")
    run(PUSH, tmp_path / "model", NAME, folder=tmp_path, endpoint=hub.url)
    commits = hub.repositories[NAME].commits
    files = commits[0].files
    assert len(commits) == 2 and sum(name.endswith(".safetensors") for name in files) > 1
    assert {path.name for path in (tmp_path / "model").glob("*.py")} <= files.keys()
    tensors = [load(content) for name, content in files.items() if name.endswith(".safetensors")]
    assert {name for shard in tensors for name in shard} == model.state_dict().keys()

    python = bare_python(tmp_path / "venv")
    loaded = json.loads(run(LOAD, NAME, sha(1), "main", folder=tmp_path, endpoint=hub.url, python=python))
    for revision, weight in ((sha(1), model.norm.weight), ("main", model.norm.weight + 1)):
        assert [found for found, _ in loaded[revision]] == [weight.tolist()] * 2
        assert all(module.startswith("transformers_modules.") for _, module in loaded[revision])


def test_what_cannot_be_reached_says_why(hub, tmp_path):
    tiny_assistant().save_pretrained(tmp_path / "model")
    for name in ("nobody/drafter", "nobody/gated"):
        publish(hub, tmp_path / "model", name)
    hub.gated.add("nobody/gated")
    tiny_target("llama").save_pretrained(tmp_path / "target")
    publish(hub, tmp_path / "target", "nobody/target")
    wanted = [
        ("nobody/missing", {}, "nobody/missing"),
        ("nobody/gated", {}, "gated repo"),
        ("nobody/drafter", {"revision": "v9"}, "v9"),
        ("nobody/target", {}, "LlamaForCausalLM"),
        ("no/such/folder", {}, "no/such/folder"),
    ]
    cases = json.dumps([case[:2] for case in wanted])
    said = json.loads(run(REFUSALS, tmp_path / "out", cases, folder=tmp_path, endpoint=hub.url))
    words = {name: text for name, _, text in wanted}
    ways = [(name, way) for name in words for way in ("class", "auto", "convert")]
    # A target is a model to `AutoModel`, and a right one.
    ways.remove(("nobody/target", "auto"))
    assert [(name, way) for name, way, _ in said] == ways
    for name, _, message in said:
        assert words[name] in message, message
    assert not (tmp_path / "out").exists()


def test_the_command_tells_that_it_is_offline(hub, tmp_path):
    script = "from lilicorr_hf.cli import app; app()"
    command = [sys.executable, "-c", script, "convert", NAME, str(tmp_path / "out")]
    own = environment(tmp_path, hub.url) | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and NAME in done.stderr and "HF_HUB_OFFLINE" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()

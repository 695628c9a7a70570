"""Systems trained in turns under equal conditions, and measured: the command a user runs."""

import contextlib
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
import yaml
from small_run import small_settings
from tiny import tiny_target

from lilicorr_hf import DFlashModel, LiLiCorrDraftModel
from lilicorr_hf.training import study, train


@pytest.fixture
def study_file(tokenizer, tmp_path, monkeypatch):
    """Two systems on eight rows, four steps each."""
    monkeypatch.chdir(tmp_path)
    target = tiny_target("llama", eos_token_id=2).float()
    target.save_pretrained("target")
    tokenizer.save_pretrained("target")
    ids = torch.randint(6, 63, (8, 30), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [{"prompt_ids": row[:4], "response_ids": row[4:]} for row in ids]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "asked.jsonl").write_text('{"prompt": "w1 w2 w3"}\n{"prompt": "w5 w9"}\n')
    settings = small_settings(
        "target",
        train_files=["rows.jsonl"],
        target_layer_ids=[0, 2],
        max_anchors=4,
        held_out=0.3,
        max_hours=8.0,
        use_cpu=True,
        report_to="none",
    )
    settings.pop("max_steps", None)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    shared = {"config": "recipe.yaml", "max_hours": None, "max_steps": 4}
    path = tmp_path / "two.yaml"
    path.write_text(yaml.safe_dump({"shared": shared, "systems": {"bare": {"method": "dflash"}, "whole": None}}))
    return path


def steps(folder):
    return max(int(path.name[11:]) for path in folder.glob("checkpoint-*"))


def test_study_trains_in_turns_goes_on_and_measures(study_file, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- bench training -->\n<!-- end -->\n\n<!-- bench taus -->\n<!-- end -->\n")
    bench = "asked.jsonl --target target --assistant runs/two/whole --max-new-tokens 8 --output taus.json"
    # One round of parts, then out of time: nothing is measured before all are trained.
    study.main([str(study_file), "--parts", "2", "--jobs", "2", "--minutes", "1e-9", "--bench", bench])
    assert [steps(tmp_path / "runs" / "two" / name) for name in ("bare", "whole")] == [2, 2]
    assert not (tmp_path / "taus.json").exists()

    study.main([str(study_file), "--parts", "2", "--bench", bench, "--page", str(page)])
    runs = tmp_path / "runs" / "two"
    assert [steps(runs / name) for name in ("bare", "whole")] == [4, 4]
    assert type(DFlashModel.from_pretrained(runs / "bare")) is DFlashModel
    assert "| plain | checkpoint:bare | checkpoint:whole |" in page.read_text() and "| bare | 4 |" in page.read_text()

    train.main(whole_run(tmp_path))
    ours, straight = (LiLiCorrDraftModel.from_pretrained(folder) for folder in (runs / "whole", tmp_path / "straight"))
    for (name, one), other in zip(ours.named_parameters(), straight.parameters(), strict=True):
        assert one.equal(other), name

    study.main([str(study_file), "--parts", "2", "--max_steps", "6", "--page", str(page)])
    assert [steps(runs / name) for name in ("bare", "whole")] == [6, 6] and "| bare | 6 |" in page.read_text()


def test_systems_of_a_killed_study_train_no_further(study_file, tmp_path):
    """Killed where it cannot tell its processes: the same command may go on at once."""
    main = "import sys; from lilicorr_hf.training import study; study.main(sys.argv[1:])"
    options = ["--max_steps", "100000", "--save_strategy", "steps", "--save_steps", "20"]
    with subprocess.Popen([sys.executable, "-c", main, str(study_file), *options]) as running:
        try:
            wait_for(lambda: list(tmp_path.rglob("checkpoint-*")))
            training = psutil.Process(running.pid).children(recursive=True)
        finally:
            running.kill()
    wait_for(lambda: not any(is_alive(process) for process in training))


def is_alive(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def wait_for(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def whole_run(tmp_path):
    """Options of the system's run without parts."""
    settings = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    del settings["max_hours"]
    return train.to_argv(settings | {"max_steps": 4, "output_dir": str(tmp_path / "straight")})


def test_systems_with_unequal_budgets_are_refused(study_file):
    settings = yaml.safe_load(study_file.read_text())
    settings["systems"]["whole"] = {"max_steps": 6}
    study_file.write_text(yaml.safe_dump(settings))
    with pytest.raises(ValueError, match="max_steps.*'bare': .4, None.*'whole': .6, None"):
        study.main([str(study_file)])


def test_steps_of_the_command_line_win_over_hours_of_the_study(study_file, tmp_path):
    settings = yaml.safe_load(study_file.read_text())
    settings["shared"] = {"config": "recipe.yaml", "max_hours": 0.5}
    study_file.write_text(yaml.safe_dump(settings))
    two = study.read_study(str(study_file), tmp_path)
    for more, hours in (([], True), (["--max_steps", "3"], False), (["--num_train_epochs=1"], False)):
        assert ("--max_hours" in two.argv("whole", more)) == hours


def test_a_folder_trained_with_other_options_is_refused(study_file, tmp_path):
    two = study.read_study(str(study_file), tmp_path)
    two.folder("bare").mkdir()
    budget, options = study.split_budget(two.argv("bare", ["--seed", "1"]))
    record = {"share": 0.5, "budget": budget, "options": study.digest(options)}
    (two.folder("bare") / study.SHARE).write_text(json.dumps(record))
    assert two.share_done("bare", ["--seed", "1"]) == 0.5 and two.share_done("whole", []) == 0
    assert two.share_done("bare", ["--seed", "1", "--max_steps", "5"]) == 0.4
    with pytest.raises(ValueError, match=r"bare is a run of 4 steps or hours, more than 3"):
        two.share_done("bare", ["--seed", "1", "--max_steps", "3"])
    with pytest.raises(ValueError, match=r"bare was trained with other options"):
        two.share_done("bare", ["--seed", "1", "--max_hours", "5"])
    with pytest.raises(ValueError, match=r"bare was trained with other options.*--output_dir"):
        two.share_done("bare", ["--seed", "2"])


def test_nothing_is_begun_after_a_failure(capsys):
    begun = []

    def call(name, fails):
        begun.append(name)
        if fails:
            raise FloatingPointError("not finite")

    calls = {name: (call, name, name == "b") for name in "abcd"}
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="'b' .* cannot be trained: not finite"):
        list(study.run_each(pool, 1, calls))
    assert begun == ["a", "b"]


def test_a_checkpoint_that_was_cut_short_is_not_gone_on_from(tmp_path):
    assert study.last_checkpoint(tmp_path) is None
    for step in (9, 10, 11):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / ("trainer_state.json" if step < 11 else "model.safetensors")).touch()
    assert study.last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


def test_what_cannot_be_measured_or_compared_is_said_before_anything_is_trained(study_file, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- bench training -->\n<!-- end -->\n")
    bench = "asked.jsonl --target target --output taus.json"
    for options, words in (
        (["--bench", "nothing.jsonl"], "There is no nothing.jsonl"),
        (["--bench", f"{bench} --system magic"], "Unknown system 'magic'"),
        (["--bench", bench, "--page", str(page)], "no lines '<!-- bench taus -->'"),
        (["--held_out", "0"], "No rows are held out"),
    ):
        with pytest.raises(ValueError, match=words):
            study.main([str(study_file), *options])
    assert not list(tmp_path.rglob("checkpoint-*"))


def test_file_that_is_no_study_is_refused(tmp_path):
    (tmp_path / "x.yaml").write_text("target: smollm2-135m\n")
    with pytest.raises(ValueError, match="shared.*systems"):
        study.read_study(str(tmp_path / "x.yaml"), tmp_path)
    with pytest.raises(FileNotFoundError, match="methods"):
        study.read_study("nothing", tmp_path)


@pytest.mark.parametrize("path", sorted(study.STUDIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_studies_are_sound(path, tmp_path):
    shipped = study.read_study(path.stem, tmp_path)
    study.check_equal_budgets(shipped, [])
    assert len(shipped.systems) > 1


def test_a_system_that_cannot_be_trained_stops_the_study_before_any_trains(study_file, tmp_path):
    settings = yaml.safe_load(study_file.read_text())
    settings["shared"]["target_cache"] = "states"
    settings["systems"]["tapped"] = {"target_layer_ids": [1, 2]}
    study_file.write_text(yaml.safe_dump(settings))
    with pytest.raises(ValueError, match=r"'tapped' .* target_layer_ids is \[0, 2\] there and \[1, 2\] here"):
        study.main([str(study_file)])
    assert not list(tmp_path.rglob("checkpoint-*"))

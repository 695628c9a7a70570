"""What `report_to` carries away: every number of a step, into files of real trackers."""

import json
import os
import sqlite3
import subprocess
import sys

import pytest
from small_run import write_small_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


PARTS = {"loss_dflash", "loss_cross_entropy", "loss_distractor", "loss_hinge"}
WATCHED = {"coverage", "selected_prefix", "top1_prefix", "oracle_prefix", "factor_spread", "blocks_per_second"}
NAMES = {f"train/{name}" for name in PARTS | WATCHED | {"loss", "learning_rate", "grad_norm"}} | {"eval/tau"}


@pytest.fixture(scope="module")
def run(model, tokenizer, tmp_path_factory):
    """From a tracker's name to the folder it wrote to, and what the run logged by its own account."""

    def made(tracker):
        folder = tmp_path_factory.mktemp(tracker)
        config = write_small_run(folder, model, tokenizer, report_to=tracker, run_name="short", hinge=0.125)
        places = {"TRACKIO_DIR": str(folder / "logs"), "TENSORBOARD_LOGGING_DIR": str(folder / "logs")}
        command = [sys.executable, "-m", "lilicorr_hf.training.train", "--config", str(config)]
        environment = os.environ | places | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        state = json.loads((folder / "run" / "checkpoint-4" / "trainer_state.json").read_text())
        return folder / "logs", state["log_history"]

    return made


def logged(history, name):
    side, _, key = name.partition("/")
    key = f"eval_{key}" if side == "eval" else key
    return {row["step"]: row[key] for row in history if key in row}


def test_tensorboard(run):
    logs, history = run("tensorboard")
    [events] = logs.rglob("events.out.tfevents.*")
    accumulator = EventAccumulator(str(events))
    accumulator.Reload()
    assert set(accumulator.Tags()["scalars"]) >= NAMES
    for name in NAMES:
        written = {event.step: event.value for event in accumulator.Scalars(name)}
        assert written.keys() == ({2, 4} if name == "eval/tau" else {1, 2, 3, 4}), name
        assert written == pytest.approx(logged(history, name), rel=1e-6), name


def test_trackio(run):
    """Into its database on disk; nothing leaves the machine."""
    logs, history = run("trackio")
    [database] = logs.glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT metrics FROM metrics WHERE run_name = 'short'").fetchall()
    # Its own steps count calls; ours are beside the numbers.
    written = [json.loads(metrics) for (metrics,) in rows]
    for name in NAMES:
        found = {row["train/global_step"]: row[name] for row in written if name in row}
        assert found.keys() == ({2, 4} if name == "eval/tau" else {1, 2, 3, 4}), name
        assert found == pytest.approx(logged(history, name)), name

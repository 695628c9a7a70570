"""Rows of `datasets` datasets, as `regenerate` and `train` take them: real ones, from the disk."""

import json
import sys

import datasets
import pytest
from huggingface_hub import constants
from regeneration import arguments, write_rows
from regeneration import read_rows as read_output
from typer.testing import CliRunner

from lilicorr_hf import LiLiCorrDraftModel
from lilicorr_hf.cli import app
from lilicorr_hf.training import train
from lilicorr_hf.training.conversations import read_rows
from lilicorr_hf.training.regenerate import regenerate


ROWS = [
    {"id": "a", "prompt": "w1 w2 w3"},
    {"id": "b", "messages": [{"role": "system", "content": "w9"}, {"role": "user", "content": "w4 w5"}]},
    {"id": "c", "prompt": "w6"},
]
# `from_list` takes the fields of the first row.
FILLED = [{"id": None, "prompt": None, "messages": None} | row for row in ROWS]


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def jsonl_folder(folder):
    folder.mkdir()
    write_rows(folder / "train.jsonl", ROWS)


def parquet_folder(folder):
    datasets.Dataset.from_list(FILLED).to_parquet(folder / "train.parquet")


def saved(folder):
    datasets.Dataset.from_list(FILLED).save_to_disk(folder)


def saved_splits(folder):
    splits = {"train": datasets.Dataset.from_list(FILLED), "test": datasets.Dataset.from_list(FILLED[:1])}
    datasets.DatasetDict(splits).save_to_disk(folder)


@pytest.mark.parametrize("write", [jsonl_folder, parquet_folder, saved, saved_splits])
def test_rows_are_those_that_were_written(write, tmp_path):
    """Also where they differ in their fields, which Arrow fills up."""
    write(tmp_path / "rows")
    assert [row for _, row in read_rows(str(tmp_path / "rows"))] == ROWS


def test_a_relative_folder_is_found_and_places_are_named(tmp_path, monkeypatch):
    parquet_folder(tmp_path / "rows")
    monkeypatch.chdir(tmp_path)
    assert [place for place, _ in read_rows("rows")] == ["rows, row 1", "rows, row 2", "rows, row 3"]


def test_another_split(tmp_path):
    saved_splits(tmp_path / "rows")
    assert [row for _, row in read_rows(str(tmp_path / "rows"), split="test")] == ROWS[:1]


@pytest.mark.parametrize("write", [parquet_folder, saved_splits])
def test_unknown_split_is_named(write, tmp_path):
    write(tmp_path / "rows")
    with pytest.raises(ValueError, match="validation.*train"):
        list(read_rows(str(tmp_path / "rows"), split="validation"))


def test_regenerate_and_train(model, tokenizer, tmp_path):
    """A dataset of prompts becomes answers; these, as a dataset, become a drafter."""
    parquet_folder(tmp_path / "prompts")
    args = arguments(tmp_path / "in.jsonl", limit=2)
    args.dataset = str(tmp_path / "prompts")
    assert regenerate(args, model, tokenizer).answers == 2
    answers = read_output(args.output)
    assert {row["id"] for row in answers} == {"a", "b"}

    datasets.Dataset.from_list(answers).save_to_disk(tmp_path / "answers")
    read = train.read_files([str(tmp_path / "answers")])
    assert read == answers
    model.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    options = {"target": tmp_path / "target", "train_files": tmp_path / "answers", "output_dir": tmp_path / "run"}
    options |= {
        "num_layers": 1,
        "target_layer_ids": 0,
        "block_size": 4,
        "head_hidden_size": 16,
        "factor_dim": 8,
        "mask_token_id": 63,
    }
    options |= {"max_steps": 1, "use_cpu": True, "report_to": "none", "save_strategy": "no"}
    train.main([part for name, value in options.items() for part in (f"--{name}", str(value))])
    assert LiLiCorrDraftModel.from_pretrained(tmp_path / "run").config.block_size == 4


def test_an_unknown_name_is_an_error(tmp_path):
    result = regenerate_command("some/data", tmp_path)
    assert result.exit_code == 2 and "some/data" in result.output


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    result = regenerate_command("some/data", tmp_path)
    assert result.exit_code == 2 and 'pip install "lilicorr_hf[train]"' in result.output


def regenerate_command(dataset, folder):
    options = ["--target", "x", "--dataset", dataset, "--output", str(folder / "out.jsonl")]
    return CliRunner().invoke(app, ["regenerate", *options])


def test_a_file_that_is_not_there_is_no_dataset(tmp_path):
    for name in ("rows.jsonl", str(tmp_path / "rows")):
        with pytest.raises(FileNotFoundError, match="there is no file"):
            list(read_rows(name))


def test_jsonl_needs_no_datasets(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    assert [json.dumps(row) for _, row in read_rows(str(path))] == [json.dumps(row) for row in ROWS]

"""The target's states on disk: the same as asked for, of the right target only, and whole after a kill."""

import json

import pytest
import torch
from runs import trainer_for
from tiny import tiny_assistant, tiny_target

from lilicorr_hf.training.data import collate
from lilicorr_hf.training.state_cache import TargetStateCache


def cached_trainer(target, examples, folder, **changes):
    return trainer_for(target, examples, folder / "run", target_cache=str(folder / "cache"), **changes)


def test_states_are_those_of_the_padded_batch(target, examples, tmp_path):
    trainer = cached_trainer(target, examples, tmp_path)
    inputs = collate([trainer.train_dataset[i] for i in range(4)])
    rows = (inputs["input_ids"], inputs["position_ids"])
    asked = trainer.ask_target(*rows)
    first = trainer.target_states(*rows, inputs["lengths"])
    again = trainer.target_states(*rows, inputs["lengths"])
    written = torch.arange(rows[0].shape[1]) < inputs["lengths"].unsqueeze(-1)
    assert torch.equal(first, again) and len(trainer.state_cache) == 4
    torch.testing.assert_close(first[written], asked[written], atol=1e-5, rtol=1e-5)


def test_training_from_the_cache_asks_the_target_once(target, examples, tmp_path, monkeypatch):
    calls = []
    forward = target.base_model.forward
    monkeypatch.setattr(target.base_model, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    losses = []
    for name in ("first", "second"):
        trainer = cached_trainer(target, examples, tmp_path, max_steps=4)
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
        assert len(calls) == len(examples), name
    plain = trainer_for(target, examples, tmp_path / "plain", max_steps=4)
    plain.train()
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx([row["loss"] for row in plain.state.log_history if "loss" in row], rel=1e-4)


def test_two_processes_share_a_folder(target, tmp_path):
    taps = tiny_assistant().config.target_layer_ids
    rows = [torch.arange(n) for n in (3, 5, 7)]
    states = [torch.randn(len(row), 96) for row in rows]
    caches = [TargetStateCache(tmp_path, target, taps) for _ in range(2)]
    caches[0].add(rows[0], rows[0], states[0])
    caches[1].add(rows[1], rows[1], states[1])
    caches[0].add(rows[2], rows[2], states[2])
    assert caches[0].get(rows[1], rows[1]) is None
    later = TargetStateCache(tmp_path, target, taps)
    assert all(torch.equal(later.get(row, row), expected) for row, expected in zip(rows, states, strict=True))
    assert later.get(torch.arange(4), torch.arange(4)) is None
    # The same tokens as two documents are another row.
    assert later.get(rows[1], torch.tensor([0, 1, 2, 0, 1])) is None


def test_what_a_killed_process_left_is_skipped(target, tmp_path):
    taps = tiny_assistant().config.target_layer_ids
    cache = TargetStateCache(tmp_path, target, taps)
    rows = [torch.arange(n) for n in (3, 5)]
    for row in rows:
        cache.add(row, row, torch.randn(len(row), 96))
    (states,), (index,) = tmp_path.glob("*.bin"), tmp_path.glob("*.jsonl")
    states.write_bytes(states.read_bytes()[:-10])
    index.write_text(index.read_text() + '{"row": "ab')
    later = TargetStateCache(tmp_path, target, taps)
    assert len(later) == 1 and later.get(rows[0], rows[0]) is not None and later.get(rows[1], rows[1]) is None


def test_states_of_another_target_are_refused(target, tmp_path):
    TargetStateCache(tmp_path, target, [0, 2])
    with pytest.raises(ValueError, match="target_layer_ids is .0, 2. there and .1, 2. here"):
        TargetStateCache(tmp_path, target, [1, 2])
    with pytest.raises(ValueError, match="weights"):
        TargetStateCache(tmp_path, tiny_target("llama", seed=1).float(), [0, 2])


def test_a_full_disk_stops_the_cache_not_the_run(target, tmp_path, monkeypatch, caplog):
    cache = TargetStateCache(tmp_path, target, [0, 2])
    monkeypatch.setattr("lilicorr_hf.training.state_cache.RESERVE", 10**18)
    cache.add(torch.arange(3), torch.arange(3), torch.randn(3, 96))
    assert cache.get(torch.arange(3), torch.arange(3)) is None and "nearly full" in caplog.text
    assert json.loads((tmp_path / "meta.json").read_text())["target_layer_ids"] == [0, 2]

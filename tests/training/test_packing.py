"""Documents that share a row are trained on as if each had its own: in the target, in the drafter and in the head."""

import random

import pytest
import torch
from tiny import tiny_assistant, tiny_target
from transformers import Lfm2Config, Lfm2ForCausalLM

from lilicorr_hf.training.arguments import LiLiCorrTrainingArguments
from lilicorr_hf.training.data import BlockDataset, Example, collate
from lilicorr_hf.training.objective import training_loss
from lilicorr_hf.training.packing import PackedExample, check_packing, pack
from lilicorr_hf.training.step import Objective
from lilicorr_hf.training.trainer import LiLiCorrTrainer


def documents() -> list[Example]:
    """Prompts shorter than a block, one of them empty: slots that crossed an end would meet supervised tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = [(2, 9), (0, 12), (1, 3), (3, 14)]
    ids = [torch.randint(1, 63, (prompt + answer,), generator=generator).tolist() for prompt, answer in lengths]
    masks = [[0] * prompt + [1] * answer for prompt, answer in lengths]
    return [Example(*row) for row in zip(ids, masks, strict=True)]


def trainer_for(target, examples, folder):
    """Every possible block of every example, and candidates enough for the truth to be among them."""
    args = LiLiCorrTrainingArguments(output_dir=str(folder), max_anchors=100, bf16=False, report_to="none")
    return LiLiCorrTrainer(tiny_assistant(candidate_topk=60), target, args, BlockDataset(examples, args.max_anchors))


def batch_of(trainer):
    return trainer.training_batch(collate(list(trainer.train_dataset)))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_target_states_of_packed_documents_are_those_of_the_documents_alone(family, tmp_path):
    target, rows = tiny_target(family), documents()
    batches = [batch_of(trainer_for(target, e, tmp_path)) for e in (rows, [PackedExample(rows)])]
    for name in ("target_states", "final_states"):
        alone, packed = (getattr(batch, name) for batch in batches)
        end = 0
        for row, document in enumerate(rows):
            start, end = end, end + len(document.input_ids)
            torch.testing.assert_close(packed[0, start:end], alone[row, : end - start], atol=1e-9, rtol=1e-9)


def test_loss_and_every_gradient_of_packed_documents_are_those_of_the_documents_alone(tmp_path):
    target, rows = tiny_target("llama").float(), documents()
    steps, trainers = [], []
    for examples in (rows, [PackedExample(rows[:3]), PackedExample(rows[3:])], [PackedExample(rows)]):
        trainers.append(trainer_for(target, examples, tmp_path))
        model, tables = trainers[-1].model, trainers[-1].tables
        steps.append(training_loss(model, tables, batch_of(trainers[-1]), Objective.with_margin()))
        steps[-1].loss.backward()
    # Blocks that are cut by their document's end, and complete ones with and without context.
    assert 0 < steps[0].metrics["complete_blocks"] < sum(len(document.anchors) for document in rows)
    assert steps[0].metrics["supervised_slots"] > 0 and rows[1].anchors[0] == 0
    for step, trainer in zip(steps[1:], trainers[1:], strict=True):
        torch.testing.assert_close(step.loss, steps[0].loss, atol=1e-6, rtol=1e-5)
        for name in ("complete_blocks", "supervised_slots", "coverage", "selected_prefix"):
            torch.testing.assert_close(step.metrics[name], steps[0].metrics[name], atol=1e-6, rtol=1e-5)
        expected = dict(trainers[0].model.named_parameters())
        for name, parameter in trainer.model.named_parameters():
            torch.testing.assert_close(
                parameter.grad, expected[name].grad, atol=2e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("seed", range(5))
def test_every_example_is_packed_once_and_whole(seed):
    rng = random.Random(seed)
    examples = [Example([i] * rng.randint(2, 100), [1]) for i in range(200)]
    rows = pack(examples, 100)
    packed = [document for row in rows for document in row.documents]
    assert sorted(map(id, packed)) == sorted(map(id, examples))
    lengths = sorted(len(row.input_ids) for row in rows)
    # No row is too long, and no two would fit into one.
    assert lengths[-1] <= 100 < lengths[0] + lengths[1]


def test_anchors_of_a_packed_row_are_those_of_its_documents():
    rows = documents()
    packed = PackedExample(rows)
    assert packed.position_ids == [*range(11), *range(12), *range(4), *range(17)]
    chosen = [packed.input_ids[anchor] for anchor in packed.anchors]
    assert chosen == [row.input_ids[anchor] for row in rows for anchor in row.anchors]


def test_target_that_mixes_documents_is_refused():
    """Convolutions over time do not read positions."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    torch.manual_seed(0)
    mixing = Lfm2ForCausalLM(
        Lfm2Config(vocab_size=64, pad_token_id=0, initializer_range=0.5, **sizes, **layers)
    ).eval()
    with pytest.raises(ValueError, match="Lfm2ForCausalLM.*see each other"):
        check_packing(mixing, 1)
    check_packing(tiny_target("llama"), 2)


def test_trainer_checks_its_target_only_for_packed_rows(tmp_path):
    target = tiny_target("llama").float()
    # A backend that transformers hands no mask to, as some flash kernels with several rows.
    target.base_model.forward = lambda input_ids, forward=target.base_model.forward, **kwargs: forward(input_ids)
    trainer_for(target, documents(), tmp_path)
    with pytest.raises(ValueError, match="turn `packing` off"):
        trainer_for(target, [PackedExample(documents())], tmp_path)

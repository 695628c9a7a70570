"""nvidia-modelopt's LiLiCorr training, a step at a time, on rows whose anchors are given.

Put together as its own training example does: target in bf16, drafter converted beside it in the same type,
`transformers.Trainer`, and AdamW that keeps fp32 copies of the weights. Its random anchors are replaced by those of
the rows, and rows are padded to a multiple of the block size only, which it requires, where its own collators pad each
to the longest length trained on. Offline, as it calls it, the target's states are read from files made beforehand.
"""

import json
from pathlib import Path
from typing import Any

import modelopt.torch.speculative as mtsp
import torch
from modelopt.torch.speculative.eagle.utils import OfflineSupervisedDataset
from modelopt.torch.speculative.plugins.master_weight_adamw import MasterWeightAdamW
from torch.nn.functional import pad
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from worker import Parent, Turns, mark, output_head_stage, read_settings


TERMS = {"dflash": "origin_loss", "cross_entropy": "lilicorr_ce", "distractor": "lilicorr_penalty"}


class Worker(Trainer):
    """`Trainer` whose steps are the parent's turns."""

    def __init__(self, parent: Parent, model, **kwargs):
        super().__init__(model=model, **kwargs)
        self.turns = Turns(parent)
        self.add_callback(self.turns)
        mark(self, "compute_loss", "lm_head and loss")
        mark(model.model, "forward", "target")
        mark(model.lm_head, "forward", output_head_stage)
        mark(model.dflash_module, "forward", "drafter")
        mark(model.dflash_module.lilicorr, "forward", "head")

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            _, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            # It refuses the fused implementation, which is the default.
            options.pop("fused", None)
            trained = [p for p in self.model.parameters() if p.requires_grad]
            self.optimizer = MasterWeightAdamW(trained, weight_decay=self.args.weight_decay, **options)
            mark(self.optimizer, "step", "optimizer")
        return self.optimizer

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        anchors = inputs.pop("anchors")
        keep = torch.ones_like(anchors, dtype=torch.bool)
        model._sample_anchor_positions = lambda seq_len, loss_mask, device: (anchors, keep)
        outputs = model(**inputs)
        metrics = outputs.lilicorr_metrics
        self.turns.report = {
            "tokens": int(inputs["attention_mask"].sum()),
            "blocks": anchors.numel(),
            "loss": outputs.loss.item(),
            "terms": {name: metrics[theirs] for name, theirs in TERMS.items()},
        }
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def collate(rows: list[dict[str, Any]], multiple: int) -> dict[str, Any]:
    """One row, padded on the right."""
    (row,) = rows
    length = len(row["input_ids"])
    padding = -length % multiple

    def padded(values: torch.Tensor) -> torch.Tensor:
        return pad(values, (0, 0) * (values.ndim - 1) + (0, padding)).unsqueeze(0)

    names = ("input_ids", "attention_mask", "loss_mask")
    batch = {name: padded(row[name]) for name in names} | {"anchors": row["anchors"].unsqueeze(0)}
    outputs = {name: padded(row[name]) for name in ("base_model_hidden_states", "aux_hidden_states") if name in row}
    return batch | ({"base_model_outputs": outputs} if outputs else {})


class Rows(Dataset):
    """Rows with their anchors; with the target's states from files, through its own dataset, where there are any."""

    def __init__(self, rows: list[dict[str, list[int]]], dumps: list[str] | None = None):
        self.rows = rows
        self.dumps = OfflineSupervisedDataset(dumps, answer_only_loss=True) if dumps else None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = {name: torch.tensor(values) for name, values in self.rows[index].items()}
        row["attention_mask"] = torch.ones_like(row["input_ids"])
        return row if self.dumps is None else self.dumps[index] | {"anchors": row["anchors"]}


@torch.no_grad()
def dump_states(model, rows: list[dict[str, list[int]]], layer_ids: list[int], folder: Path) -> list[str]:
    """Writes what its offline training reads of the target, a file for each row."""
    folder.mkdir()
    files = [str(folder / f"{index}.pt") for index in range(len(rows))]
    for file, row in zip(files, rows, strict=True):
        ids, mask = torch.tensor(row["input_ids"]), torch.tensor(row["loss_mask"])
        output = model.model(input_ids=ids.unsqueeze(0), output_hidden_states=True, use_cache=False)
        tapped = torch.cat([output.hidden_states[layer + 1][0] for layer in layer_ids], dim=-1)
        states = {"hidden_states": output.last_hidden_state[0], "aux_hidden_states": tapped}
        torch.save({"input_ids": ids, "loss_mask": mask} | states, file)
    return files


def main() -> None:
    parent, settings = Parent(), read_settings()
    rows = [json.loads(line) for line in Path(settings["rows"]).read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(settings["target"], dtype=settings["dtype"])
    dflash, dumps = settings["dflash"], None
    if settings["offline"]:
        layer_ids = dflash["dflash_architecture_config"]["target_layer_ids"]
        dumps = dump_states(model, rows, layer_ids, Path(settings["rows"]).with_suffix(""))
        model.config.num_orig_hidden_layers = model.config.num_hidden_layers
    mtsp.convert(model, [("dflash", dflash | {"dflash_offline": settings["offline"]})])
    trainer = Worker(
        parent,
        model,
        args=TrainingArguments(**settings["training"]),
        train_dataset=Rows(rows, dumps),
        data_collator=lambda batch: collate(batch, settings["pad_to_multiple_of"]),
    )
    trainer.train()


if __name__ == "__main__":
    main()

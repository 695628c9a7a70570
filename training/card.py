# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""`lilicorr card FOLDER`: the model card of a trained drafter, from what its training run recorded."""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from lilicorr_hf.modeling.configuration_lilicorr import LiLiCorrConfig
from lilicorr_hf.modeling.modeling_dflash import DFlashModel

from .provenance import RECIPE, RECORD, read_record


CARD = "README.md"
NOT_MEASURED = "not measured"
TEMPLATE = """\
---
{{ card_data }}
---

# {{ name }}

A {{ kind }} that drafts for {{ target }} in `generate`. The target verifies every block, so greedy output is its own
up to ties in its arithmetic, and sampling keeps its distribution.

```python
import lilicorr_hf

assistant = lilicorr_hf.{{ model_class }}.from_pretrained("{{ name }}", dtype=model.dtype)
output = model.generate(**inputs, assistant_model=assistant, max_new_tokens=128)
```

`model` is the target, loaded as always. Where the package is not installed, the code in this repository does the same:
`transformers.AutoModel.from_pretrained("{{ name }}", trust_remote_code=True)`, at a `revision` of your choice.

## Acceptance length

Tokens gained per pass of the target (tau), the bonus token included, the prefill not counted.

| prompts | system | tau | speed-up | same text |
|---|---|---|---|---|
{% for row in acceptance -%}
| {{ row | join(" | ") }} |
{% endfor %}
{{ bench }}

## Training

| | |
|---|---|
{% for name, value in training.items() -%}
| {{ name }} | {{ value }} |
{% endfor %}
`{{ recipe }}` beside this card holds every option that is not a default, `{{ record }}` all that is stated here.
{% if command %}
```console
$ {{ command }}
```
{% else %}
The trainer was built in Python: there is no command.
{% endif %}
{{ versions }}

DFlash: [arXiv 2602.06036](https://arxiv.org/abs/2602.06036). LiLiCorr:
[arXiv 2608.20530](https://arxiv.org/abs/2608.20530).
"""


KINDS = {
    "LiLiCorrDraftModel": "DFlash block drafter with a LiLiCorr head",
    "DFlashModel": "DFlash block drafter",
    "DominoModel": "DFlash block drafter with Domino's head",
    "DSparkModel": "DFlash block drafter with DSpark's head",
    "DFlash2Model": "DFlash2 block drafter",
}


def model_card(
    config: LiLiCorrConfig, record: dict[str, Any], bench: dict[str, Any] | None = None, **metadata: Any
) -> ModelCard:
    """The card of one checkpoint; what nobody measured says so.

    Args:
        config ([`LiLiCorrConfig`]): of the checkpoint.
        record (`dict`): its `training.json`.
        bench (`dict`): what `lilicorr bench --output` wrote about it.
        metadata: for `ModelCardData`, over what the record says.
    """
    assert config.architectures, "a saved config names its model class"
    model_class = config.architectures[0]
    target = record["base_model"]
    return ModelCard.from_template(
        card_data(record, metadata),
        template_str=TEMPLATE,
        name=record["name"],
        kind=KINDS[model_class],
        model_class=model_class,
        target=f"[{target}](https://huggingface.co/{target})" if target else record["target"],
        acceptance=acceptance_rows(record["evaluation"], bench),
        bench=bench_note(bench),
        training=training_table(config, record),
        command=record["command"],
        versions=versions_note(record),
        recipe=RECIPE,
        record=RECORD,
    )


def card_data(record: dict[str, Any], metadata: dict[str, Any]) -> ModelCardData:
    """Metadata by which the Hub finds a drafter below its target."""
    hub_data = [entry["file"] for entry in record["data"]["files"] if "/" in entry["file"]]
    known = {
        "base_model": record["base_model"],
        "datasets": [*record["datasets"], *hub_data] or None,
        "license": record["license"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": list(DFlashModel.model_tags),
    }
    return ModelCardData(**(known | metadata))


def training_table(config: LiLiCorrConfig, record: dict[str, Any]) -> dict[str, str]:
    progress, rates, parameters = record["progress"], record["learning_rates"], record["parameters"]
    rows = {
        "blocks seen": number(progress["blocks"]),
        "steps": f"{number(progress['steps'])} of {number(record['blocks_per_step'])} blocks at most",
        "hours, evaluation included": number(progress["hours"], ".2f"),
        "hardware": ", then ".join(record["hardware"]),
        "data": "; ".join(data_lines(record["data"])),
        "block size (B)": str(config.block_size),
        "drafter": f"{config.num_hidden_layers} layers, width {config.hidden_size}, {number(parameters['drafter'])} "
        "parameters",
        "tapped target layers": ", ".join(map(str, config.target_layer_ids)),
        "mask token": str(config.mask_token_id),
        "loss": record["loss"],
        "learning rate, drafter": f"{rates['drafter']:g}" if "drafter" in rates else "frozen",
    }
    if "head" in parameters:
        rows |= head_rows(config)
        rows["head"] += f", {number(parameters['head'])} parameters"
        rows["learning rate, head"] = f"{rates['head']:g}" if "head" in rates else "frozen"
    return rows


def head_rows(config: LiLiCorrConfig) -> dict[str, str]:
    """Geometry of the head, by its method."""
    match (config.architectures or [""])[0]:
        case "DominoModel":
            return {"head": f"recurrent, state {config.gru_hidden_dim}, correction of rank {config.emb_dim}"}
        case "DSparkModel":
            return {"head": f"{config.markov_head_type} Markov, rank {config.markov_rank}"}
        case "DFlash2Model":
            head = f"selector of rank {config.selector_rank}"
        case _:
            size = f"{config.head_num_layers} layers, width {config.head_hidden_size}"
            head = f"{size}, factors of {config.factor_dim}"
    return {"candidates per slot (K)": str(config.candidate_topk), "head": head}


def data_lines(data: dict[str, Any]) -> list[str]:
    files = [f"{entry['file']} ({number(entry['rows'])} rows)" for entry in data["files"]]
    return [*files, f"examples trained on: {number(data['examples'])}"]


def acceptance_rows(evaluation: dict[str, Any], bench: dict[str, Any] | None) -> list[list[str]]:
    """Rows of the table: every file of prompts under every system, then what the run itself evaluated."""
    rows = bench_rows(bench) if bench else [["by domain", *[NOT_MEASURED] * 4]]
    prompts = f"evaluation of the run ({evaluation['prompts']} prompts)"
    for which in ("last", "best"):
        rows.append([prompts, which, number(evaluation[which], ".3f"), NOT_MEASURED, NOT_MEASURED])
    return rows


def bench_rows(bench: dict[str, Any]) -> list[list[str]]:
    """Greedy decoding of one sequence at a time, prompts as they are, by dataset."""
    ask = {"temperature": 0, "batch": 1, "length": None, "category": None}
    return [
        bench_row(summary)
        for summary in bench["summary"]
        if summary["system"] != "plain" and all(summary[name] == value for name, value in ask.items())
    ]


def bench_row(summary: dict[str, Any]) -> list[str]:
    median, low, high = (summary[name] for name in ("speedup", "speedup_low", "speedup_high"))
    speedup = f"{median:.2f}x ({low:.2f} to {high:.2f})"
    same = f"{summary['identical']}/{summary['count']}"
    return [summary["dataset"], summary["system"], number(summary["tau"], ".3f"), speedup, same]


def bench_note(bench: dict[str, Any] | None) -> str:
    if bench is None:
        return "By domain: `lilicorr bench PROMPTS.jsonl --output numbers.json`, then `lilicorr card --bench`."
    made = bench["provenance"]["sessions"][-1]
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    return (
        f"By domain: `lilicorr bench`, greedy, one sequence at a time, on {made['hardware']}, {versions}; median "
        "speed-up over plain decoding (its 95% confidence interval)."
    )


def versions_note(record: dict[str, Any]) -> str:
    made = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return f"Made with {made}" + (f", commit `{record['commit']}`." if record["commit"] else ".")


def number(value: float | None, form: str = ",") -> str:
    return NOT_MEASURED if value is None or math.isnan(value) else format(value, form)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="lilicorr card", description=__doc__)
    parser.add_argument("folder", type=Path, help="Checkpoint, or output folder of a training run.")
    parser.add_argument("--bench", type=Path, help="Results that `lilicorr bench --output` wrote about it.")
    parser.add_argument("--license", help="Licence of the weights, if the run was not told.")
    args = parser.parse_args(argv)
    record = read_record(args.folder)
    bench = json.loads(args.bench.read_text(encoding="utf-8")) if args.bench else None
    metadata = {"license": args.license} if args.license else {}
    card = model_card(LiLiCorrConfig.from_pretrained(args.folder), record, bench, **metadata)
    card.save(args.folder / CARD)
    sys.stdout.write(f"{args.folder / CARD}\n")


if __name__ == "__main__":
    main()

# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""`lilicorr plot RUN`: the curves of a training run as one picture."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any


# Panels in reading order: title, the logged names drawn together, and what the curves mean.
PANELS: list[tuple[str, dict[str, str]]] = [
    (
        "loss",
        {"loss": "total", "loss_dflash": "drafter", "loss_cross_entropy": "head", "loss_distractor": "distractor"},
    ),
    (
        "accepted slots, teacher-forced",
        {"selected_prefix": "walk", "top1_prefix": "argmax", "oracle_prefix": "oracle"},
    ),
    ("acceptance length (tau) in generate", {"eval_tau": "held-out prompts"}),
    ("share of slots", {"coverage": "truth among candidates", "slot_accuracy": "head right where it can be"}),
    ("blocks per second", {"blocks_per_second": "trained"}),
    ("spread of scores (0: collapsed)", {"factor_spread": "all of it", "pair_interaction": "of the pair alone"}),
]


def read_history(run: Path) -> list[dict[str, Any]]:
    """Logged rows of a run: of its own state, or else of its newest checkpoint.

    Raises:
        `FileNotFoundError`: if the folder holds no training state.
    """
    states = [run / "trainer_state.json", *run.glob("checkpoint-*/trainer_state.json")]
    found = [json.loads(path.read_text(encoding="utf-8")) for path in states if path.is_file()]
    if not found:
        raise FileNotFoundError(f"{run} holds no trainer_state.json; give the `output_dir` of a training run.")
    return max(found, key=lambda state: state["global_step"])["log_history"]


def draw(history: list[dict[str, Any]], output: Path) -> None:
    """Writes the picture; panels whose names were never logged are left out.

    Args:
        history (list of `dict`): rows with `step` and what was logged there.
        output (`Path`): ends in .png, .svg or .pdf.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    logged = {name for row in history for name in row}
    panels = [(title, names) for title, names in PANELS if logged & names.keys()]
    rows = (len(panels) + 1) // 2
    figure, axes = plt.subplots(rows, 2, figsize=(11, 3.2 * rows), squeeze=False, layout="constrained")
    for axis, (title, names) in zip(axes.flat, panels, strict=False):
        for name, label in names.items():
            points = [(row["step"], row[name]) for row in history if name in row]
            if points:
                axis.plot(*zip(*points, strict=True), label=label, marker="." if len(points) < 30 else None)
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    for axis in list(axes.flat)[len(panels) :]:
        axis.remove()
    figure.savefig(output, dpi=130)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="lilicorr plot", description=__doc__)
    parser.add_argument("run", type=Path, help="Output folder of a training run.")
    parser.add_argument("--output", type=Path, help="Picture to write; by default curves.png in that folder.")
    args = parser.parse_args(argv)
    output = args.output or args.run / "curves.png"
    draw(read_history(args.run), output)
    sys.stdout.write(f"{output}\n")


if __name__ == "__main__":
    main()

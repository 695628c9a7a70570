"""Training steps of this package against nvidia-modelopt's LiLiCorr trainer, alternating in one run.

    python tests/peers/training_speed.py --rows ROWS [--ours "--option value ..."] [--json FILE]

Both trainers start from the shipped SmolLM2 checkpoint and take the same rows with the same anchors, each in a process
and an environment of its own, one step at a time in turns, so that only one computes and both meet the same machine.
Prints a table; the JSON holds every step. On a busy machine the CPU times are the ones to read.
"""

import argparse
import json
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from lilicorr_hf import LiLiCorrConfig
from lilicorr_hf.pairs import resolve_assistant, resolve_target
from lilicorr_hf.training.data import BlockDataset, read_examples
from lilicorr_hf.training.train import parse_arguments, read_files


HERE = Path(__file__).parent
MODELOPT = "nvidia-modelopt==0.48.0rc1"
# It declares this range of transformers for its Hugging Face plug-ins, and imports requests without declaring it.
REQUIREMENTS = (
    MODELOPT,
    "transformers>=5.5,<5.19",
    "accelerate",
    "requests",
    f"torch=={torch.__version__.split('+')[0]}",
)
STAGES = ("target", "drafter", "lm_head and loss", "head", "optimizer", "other")


def modelopt_python(folder: Path) -> Path:
    """Interpreter of an environment with nvidia-modelopt and this environment's torch, made on first use."""
    python, complete = folder / "bin" / "python", folder / ".complete"
    if not complete.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True)
        complete.touch()
    return python


@dataclass
class Comparison:
    """What both trainers do.

    Args:
        rows (`str`): file of training rows, in any format that `lilicorr train` reads.
        steps (`int`): rows taken, again from the start where there are fewer.
        target, assistant (`str`): as for `lilicorr train`; the assistant is where both start.
        dtype (`str`): of the target; `bfloat16` with autocast as in both recipes, or `float32` without.
        learning_rate (`float`): of everything, or `None` for the recipe's; 0 keeps the weights.
        max_anchors, max_length, threads (`int`).
        pad_to (`int`): length that modelopt's rows are padded to, as its own collator does; nothing for the least that
            it accepts.
        offline (`bool`): modelopt reads the target's states from files, made before the first step.
        ours (list of `str`): more options for `lilicorr train`; they win.
    """

    rows: str
    steps: int
    target: str = "smollm2-135m"
    assistant: str = "smollm2-135m"
    dtype: str = "bfloat16"
    learning_rate: float | None = None
    max_anchors: int = 32
    max_length: int = 768
    threads: int = 1
    pad_to: int | None = None
    offline: bool = False
    ours: list[str] = field(default_factory=list)

    def argv(self, folder: Path) -> list[str]:
        """Command line of `lilicorr train`."""
        options: dict[str, Any] = {
            "config": "smollm2-135m-cpu",
            "target": resolve_target(self.target),
            "target_dtype": self.dtype,
            "bf16": self.dtype == "bfloat16",
            "assistant": self.assistant,
            "train_files": folder / "rows.jsonl",
            "max_anchors": self.max_anchors,
            "max_length": self.max_length,
            "max_steps": self.steps,
            "train_sampling_strategy": "sequential",
            "output_dir": folder / "ours",
            # What modelopt knows: whole blocks of all rows, the whole vocabulary, weights that decay over the slots.
            "short_blocks": 0,
            "slot_vocabulary": 0,
            "held_out": 0,
            "slot_weights": "decay",
            # Empty, so that the target is asked in every step; `ours` may name a full one.
            "target_cache": folder / "states",
            "eval_strategy": "no",
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        if self.learning_rate is not None:
            options |= {"learning_rate": self.learning_rate, "head_learning_rate": self.learning_rate}
        if self.learning_rate == 0:
            # Gradients are compared as they are.
            options["max_grad_norm"] = 0
        pairs = [(f"--{name}", str(value)) for name, value in options.items()]
        return [text for pair in pairs for text in pair] + self.ours

    def write_rows(self, folder: Path) -> None:
        """The rows for both: as they came for ours, which draws their anchors; with those anchors for modelopt."""
        _, _, args = parse_arguments(self.argv(folder))
        tokenizer = AutoTokenizer.from_pretrained(resolve_target(self.target))
        given = read_files([self.rows])
        rows = [given[i % len(given)] for i in range(self.steps)]
        block_size = LiLiCorrConfig.from_pretrained(resolve_assistant(self.assistant)).block_size
        examples = read_examples(rows, tokenizer, self.max_length, block_size)[: self.steps]
        if len(examples) < self.steps:
            raise ValueError(f"Only {len(examples)} of {self.steps} rows of {self.rows} can be trained on.")
        dataset = BlockDataset(examples, self.max_anchors, args.seed)
        write_lines(folder / "rows.jsonl", rows)
        write_lines(folder / "modelopt_rows.jsonl", [dataset[i] for i in range(self.steps)])

    def modelopt_settings(self, folder: Path) -> dict[str, Any]:
        """Its recipe `lilicorr.yaml` with this geometry, and with our recipe's schedule."""
        _, _, args = parse_arguments(self.argv(folder))
        start = Path(resolve_assistant(self.assistant))
        config = LiLiCorrConfig.from_pretrained(start)
        objective = args.objective
        architecture = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
        architecture += ("intermediate_size", "rms_norm_eps", "target_layer_ids")
        head = ("candidate_topk", "factor_dim", "vector_eps", "logit_scale")
        schedule = ("learning_rate", "weight_decay", "warmup_steps", "max_grad_norm", "max_steps", "bf16", "seed")
        return {
            "rows": str(folder / "modelopt_rows.jsonl"),
            "threads": self.threads,
            "target": resolve_target(self.target),
            "dtype": self.dtype,
            "offline": self.offline,
            "pad_to_multiple_of": self.pad_to or config.block_size,
            "dflash": {
                "dflash_block_size": config.block_size,
                "dflash_num_anchors": self.max_anchors,
                "dflash_self_logit_distillation": False,
                "dflash_loss_objective": "decay",
                "dflash_loss_decay_factor": objective.beta,
                "dflash_mask_token_id": config.mask_token_id,
                "dflash_fp32_master_weights": True,
                "dflash_init_checkpoint": str(start),
                "dflash_lilicorr_w_ce": objective.cross_entropy,
                "dflash_lilicorr_w_margin": objective.hinge,
                "dflash_lilicorr_w_pen": objective.distractor,
                "dflash_lilicorr_margin": objective.margin,
                "dflash_architecture_config": {name: getattr(config, name) for name in architecture}
                | {f"lilicorr_{name}": getattr(config, name) for name in head}
                | {f"lilicorr_{name}": getattr(config, f"head_{name}") for name in ("hidden_size", "num_layers")}
                | {f"lilicorr_{name}": getattr(config, f"head_{name}") for name in ("num_heads", "mlp_ratio")}
                | {"projector_type": "lilicorr"},
            },
            "training": {name: getattr(args, name) for name in schedule}
            | {
                "output_dir": str(folder / "modelopt"),
                "per_device_train_batch_size": 1,
                "train_sampling_strategy": "sequential",
                "lr_scheduler_type": "cosine",
                "logging_steps": args.logging_steps,
                "save_strategy": "no",
                "remove_unused_columns": False,
                "report_to": "none",
                "disable_tqdm": True,
                "use_cpu": args.use_cpu,
            },
        }


def write_lines(path: Path, rows: Sequence[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Worker:
    """A training run in a process of its own that takes a step when told to."""

    def __init__(self, python: Path, script: str, settings: dict[str, Any], folder: Path):
        self.name = Path(script).stem.removeprefix("worker_")
        file, self.log = folder / f"{self.name}.json", folder / f"{self.name}.log"
        file.write_text(json.dumps(settings))
        self.process = subprocess.Popen(
            [python, HERE / script, file],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            env=os.environ | {"OMP_NUM_THREADS": str(settings["threads"])},
            text=True,
        )
        self.receive()

    def receive(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"The {self.name} worker ended:\n{self.log.read_text()[-4000:]}")
        return json.loads(line)

    def step(self, profile: bool = False, gradients: Path | None = None) -> dict[str, Any]:
        """Takes the next step; a profiled one takes longer. Gradients go to a safetensors file."""
        request = {"profile": profile, "gradients": str(gradients) if gradients else None}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.receive()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Workers:
    """Both workers of a comparison; leaving the context ends them."""

    def __init__(self, comparison: Comparison, python: Path, folder: Path):
        comparison.write_rows(folder)
        ours = {"argv": comparison.argv(folder), "threads": comparison.threads}
        self.both: list[Worker] = []
        for interpreter, script, settings in (
            (Path(sys.executable), "worker_ours.py", ours),
            (python, "worker_modelopt.py", comparison.modelopt_settings(folder)),
        ):
            self.both.append(Worker(interpreter, script, settings, folder))

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *exception) -> None:
        for worker in self.both:
            worker.close()

    def step(self, index: int, **options) -> dict[str, dict[str, Any]]:
        """One step of each on the same row; which goes first alternates."""
        order = self.both if index % 2 == 0 else self.both[::-1]
        results = {worker.name: worker.step(**options) for worker in order}
        work = {name: (result["tokens"], result["blocks"]) for name, result in results.items()}
        if len(set(work.values())) > 1:
            raise RuntimeError(f"Step {index}: the workers did not take the same row: {work}.")
        return results


def measure(comparison: Comparison, python: Path, profiled: int) -> list[dict[str, Any]]:
    """Every step of both, the profiled ones last."""
    first_profiled = comparison.steps - profiled
    with tempfile.TemporaryDirectory() as name, Workers(comparison, python, Path(name)) as workers:
        return [workers.step(index, profile=index >= first_profiled) for index in range(comparison.steps)]


def interval(values: Sequence[float], statistic: Callable[[Sequence[float]], float], draws: int = 2000) -> list[float]:
    """95% percentile bootstrap interval of a statistic of paired values."""
    rng = random.Random(0)
    samples = sorted(statistic(rng.choices(values, k=len(values))) for _ in range(draws))
    return [samples[int(0.025 * draws)], samples[int(0.975 * draws)]]


def summarise(steps: list[dict[str, Any]], warmup: int) -> dict[str, Any]:
    """Medians of both, the median over rows of modelopt's seconds over ours, and the shares of the stages."""
    timed = [step for step in steps[warmup:] if "stages" not in step["ours"]]
    profiled = [step for step in steps if "stages" in step["ours"]]
    # Only before the first update do both have the same weights.
    terms = {name: {"loss": result["loss"]} | result["terms"] for name, result in steps[0].items()}
    apart = {term: abs(value / terms["modelopt"][term] - 1) for term, value in terms["ours"].items()}
    summary: dict[str, Any] = {
        "steps": len(timed),
        "tokens_per_step": mean(step["ours"]["tokens"] for step in timed),
        "blocks_per_step": mean(step["ours"]["blocks"] for step in timed),
        "first_step_relative_difference": apart,
    }
    for clock in ("wall", "cpu"):
        ratios = [step["modelopt"][clock] / step["ours"][clock] for step in timed]
        summary[f"{clock}_ratio"] = statistics.median(ratios)
        summary[f"{clock}_ratio_interval"] = interval(ratios, statistics.median)
    for name in ("ours", "modelopt"):
        seconds = {clock: statistics.median(step[name][clock] for step in timed) for clock in ("wall", "cpu")}
        blocks = sum(step[name]["blocks"] for step in timed) / sum(step[name]["wall"] for step in timed)
        stages = {stage: mean(step[name]["stages"].get(stage, 0.0) for step in profiled) for stage in STAGES}
        total = sum(stages.values())
        shares = {stage: value / total for stage, value in stages.items()}
        summary[name] = {"seconds": seconds, "blocks_per_second": blocks, "shares": shares}
    return summary


def mean(values) -> float:
    return statistics.fmean(values)


def table(summary: dict[str, Any]) -> str:
    """Markdown."""
    low, high = summary["wall_ratio_interval"]
    cpu_low, cpu_high = summary["cpu_ratio_interval"]
    lines = [
        "| | lilicorr_hf | nvidia-modelopt | ratio |",
        "| --- | ---: | ---: | ---: |",
    ]
    ours, theirs = summary["ours"], summary["modelopt"]
    for label, clock, text in (
        ("step, median ms", "wall", f"{summary['wall_ratio']:.2f} ({low:.2f} to {high:.2f})"),
        ("step, median CPU ms", "cpu", f"{summary['cpu_ratio']:.2f} ({cpu_low:.2f} to {cpu_high:.2f})"),
    ):
        lines.append(
            f"| {label} | {1e3 * ours['seconds'][clock]:.0f} | {1e3 * theirs['seconds'][clock]:.0f} | {text} |"
        )
    lines.append(f"| blocks/s | {ours['blocks_per_second']:.1f} | {theirs['blocks_per_second']:.1f} | |")
    for stage in STAGES:
        # Shares of a profiled step, as milliseconds of the median step.
        cells = [1e3 * side["shares"][stage] * side["seconds"]["cpu"] for side in (ours, theirs)]
        percent = [100 * side["shares"][stage] for side in (ours, theirs)]
        ratio = f"{cells[1] / cells[0]:.2f}" if cells[0] >= 1 else ""
        lines.append(
            f"| {stage} | {cells[0]:.0f} ({percent[0]:.0f}%) | {cells[1]:.0f} ({percent[1]:.0f}%) | {ratio} |"
        )
    size = f"{summary['blocks_per_step']:.0f} blocks in {summary['tokens_per_step']:.0f} tokens"
    apart = max(summary["first_step_relative_difference"].values())
    lines += [
        "",
        f"{summary['steps']} steps of {size}; 95% bootstrap intervals of the median of the rows' ratios; the first "
        f"step's losses differ by {apart:.2%}.",
    ]
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    cpus = sorted(os.sched_getaffinity(0))
    return {"processor": platform.machine(), "cpus": cpus, "torch": torch.__version__, "modelopt": MODELOPT}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", required=True, help="training rows of any format `lilicorr train` reads")
    parser.add_argument("--steps", type=int, default=60, help="timed steps of each")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them")
    parser.add_argument("--profiled", type=int, default=8, help="steps after them that give the shares")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--pad_to", type=int, help="length modelopt's rows are padded to; by default the least")
    parser.add_argument("--offline", action="store_true", help="modelopt reads the target's states from files")
    parser.add_argument("--threads", type=int, default=1, help="of each worker; pin the cores from outside")
    parser.add_argument("--ours", default="", help="more options for `lilicorr train`, in one string")
    parser.add_argument("--environment", type=Path, default=Path(".venv-modelopt"), help="made on first use")
    parser.add_argument("--json", type=Path, help="where to write every step and the summary")
    args = parser.parse_args()
    comparison = Comparison(
        rows=args.rows,
        steps=args.warmup + args.steps + args.profiled,
        target=args.target,
        threads=args.threads,
        pad_to=args.pad_to,
        offline=args.offline,
        ours=shlex.split(args.ours),
    )
    steps = measure(comparison, modelopt_python(args.environment), args.profiled)
    summary = summarise(steps, args.warmup)
    if args.json:
        report = {"command": shlex.join(sys.argv), "machine": machine(), "summary": summary, "steps": steps}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1))
    sys.stdout.write(table(summary) + "\n")


if __name__ == "__main__":
    main()

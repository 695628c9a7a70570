"""From prompts to a drafter for SmolLM2 within minutes on one GPU, without a network; the measurement is a JSON file.

    python tests/gpu/train_smollm2.py --target smollm2-135m --prompts prompts.jsonl.gz --held_out held_out.jsonl \
        --output out

The target answers as many prompts as its share of the time allows, the recipe `smollm2-135m-gpu` trains for as many
steps as are left, and held-out prompts are decoded plainly, with the walk and with the drafter's argmax. `out` gets
`answers.jsonl.gz`, the checkpoint `drafter` in shards of at most 15 MB, and `report.json`. `--smoke` is the same on a
CPU, small.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from lilicorr_hf.bench.plan import Options, plan
from lilicorr_hf.bench.runner import Runner
from lilicorr_hf.bench.statistics import summarise
from lilicorr_hf.bench.systems import Setting, parse_systems
from lilicorr_hf.pairs import load_target
from lilicorr_hf.provenance import commit, versions
from lilicorr_hf.training import train
from lilicorr_hf.training.conversations import read_rows
from lilicorr_hf.training.regenerate import RegenerateArguments, regenerate
from lilicorr_hf.training.trainer import LiLiCorrTrainer


ANSWERS_SHARE, BENCH_SHARE = 0.25, 0.2
SAFETY = 0.95  # of the steps that should fit, the schedule has this share; a step is not always equally long


@dataclass
class Sizes:
    """What `--smoke` makes small; the rest is the recipe's."""

    cohort: int = 1024
    answer_tokens: int = 256
    probe_steps: int = 40
    bench_prompts: int = 16
    bench_tokens: int = 128
    train_options: tuple[str, ...] = ()


SMOKE = Sizes(
    cohort=8,
    answer_tokens=24,
    probe_steps=3,
    bench_prompts=2,
    bench_tokens=16,
    train_options=("--use_cpu", "true", "--per_device_train_batch_size", "2", "--max_anchors", "4"),
)


class Clock(TrainerCallback):
    """Times every step, and stops a run at its deadline."""

    def __init__(self, deadline: float):
        self.deadline, self.times = deadline, [time.monotonic()]

    def on_step_end(self, args, state, control, **kwargs):
        self.times.append(time.monotonic())
        control.should_training_stop |= self.times[-1] > self.deadline

    @property
    def seconds_per_step(self) -> float:
        """Over the second half of the steps; the first ones warm up."""
        later = self.times[len(self.times) // 2 :]
        return (later[-1] - later[0]) / (len(later) - 1)


def answer(args: argparse.Namespace, sizes: Sizes, deadline: float) -> dict[str, Any]:
    """Regenerates one cohort, then as many prompts as should fit before the deadline at that rate."""
    model, tokenizer = load_target(args.target, dtype="bfloat16")
    model.to("cpu" if args.smoke else "cuda")
    options = RegenerateArguments(
        target=args.target,
        dataset=args.prompts,
        output=str(Path(args.output) / "answers.jsonl.gz"),
        max_new_tokens=sizes.answer_tokens,
        max_prompt_tokens=512,
        cohort_size=sizes.cohort,
        cohort_tokens=512 * sizes.cohort,
        limit=sizes.cohort,
    )
    reports = [regenerate(options, model, tokenizer)]
    cohorts = (deadline - time.monotonic()) / reports[0].seconds
    if cohorts > 1:
        options.limit = int((1 + cohorts) * sizes.cohort)
        reports.append(regenerate(options, model, tokenizer))
    seconds, tokens = (sum(getattr(report, name) for report in reports) for name in ("seconds", "tokens"))
    answers = sum(report.answers for report in reports)
    return {"answers": answers, "tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}


def train_for(args: argparse.Namespace, sizes: Sizes, steps: int, deadline: float) -> tuple[LiLiCorrTrainer, Clock]:
    """The recipe for a number of steps, or until the deadline."""
    answers = str(Path(args.output) / "answers.jsonl.gz")
    options = ["--config", "smollm2-135m-gpu", "--target", args.target, "--train_files", answers]
    options += ["--output_dir", str(Path(args.output) / "run"), "--max_steps", str(steps)]
    options += ["--eval_strategy", "no", "--save_strategy", "no", "--logging_steps", "0.05", "--disable_tqdm", "true"]
    options += sizes.train_options
    trainer = train.new_trainer(*train.parse_arguments(options))
    clock = Clock(deadline)
    trainer.add_callback(clock)
    trainer.train()
    return trainer, clock


def co_train(args: argparse.Namespace, sizes: Sizes, deadline: float) -> dict[str, Any]:
    """Measures the length of a step, trains on a schedule that ends at the deadline, and saves the drafter."""
    _, probe = train_for(args, sizes, sizes.probe_steps, deadline)
    left = (deadline - time.monotonic()) / probe.seconds_per_step
    trainer, clock = train_for(args, sizes, max(sizes.probe_steps, int(SAFETY * left)), deadline)
    trainer.model.save_pretrained(Path(args.output) / "drafter", max_shard_size="15MB")
    logged = [row for row in trainer.state.log_history if "loss" in row]
    return {
        "steps": trainer.state.global_step,
        "planned_steps": trainer.state.max_steps,
        "seconds": clock.times[-1] - clock.times[0],
        "seconds_per_step": clock.seconds_per_step,
        "blocks_per_second": statistics.median(row["blocks_per_second"] for row in logged),
        "parameters": trainer.model.num_parameters(),
        "log": logged,
    }


def measure(args: argparse.Namespace, sizes: Sizes) -> list[dict[str, Any]]:
    """Real `generate` on held-out prompts with the drafter as it was saved."""
    model, tokenizer = load_target(args.target, dtype="bfloat16")
    model.to("cpu" if args.smoke else "cuda")
    folder = str(Path(args.output) / "drafter")
    options = Options(systems=("lilicorr", "argmax"), max_new_tokens=sizes.bench_tokens)
    runner = Runner(model, tokenizer, parse_systems(list(options.systems)), Setting(model, folder), options)
    items = plan([Path(args.held_out)], options, sizes.bench_prompts)
    return summarise([row for item in items for row in runner.measure(item)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m", help="A name `lilicorr fetch-target` knows, or a folder.")
    parser.add_argument("--prompts", required=True, help="JSONL(.gz) of `prompt` or `messages` to train on.")
    parser.add_argument("--held_out", required=True, help="JSONL of prompts to measure on.")
    parser.add_argument("--output", required=True, help="An empty folder.")
    parser.add_argument("--minutes", type=float, default=7.5, help="For everything together, imports left out.")
    parser.add_argument("--smoke", action="store_true", help="Small, on a CPU.")
    args = parser.parse_args()
    start = time.monotonic()
    sizes, seconds = SMOKE if args.smoke else Sizes(), 60 * args.minutes
    if not args.smoke and not torch.cuda.is_available():
        parser.error("there is no GPU; `--smoke` runs on a CPU")
    Path(args.output).mkdir(parents=True, exist_ok=True)

    report: dict[str, Any] = {
        "hardware": platform.machine() if args.smoke else torch.cuda.get_device_name(),
        "provenance": versions() | {"target": Path(args.target).name, "commit": commit()},
        "sizes": asdict(sizes),
        "prompts": sum(1 for _ in read_rows(args.prompts)),
    }
    for name, step in (
        ("regenerate", lambda: answer(args, sizes, start + ANSWERS_SHARE * seconds)),
        ("train", lambda: co_train(args, sizes, start + (1 - BENCH_SHARE) * seconds)),
        ("bench", lambda: measure(args, sizes)),
    ):
        report[name] = step()
        report["seconds"] = time.monotonic() - start
        # A run that is cut off leaves what it has measured.
        (Path(args.output) / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        sys.stderr.write(f"{name} done after {report['seconds']:.0f} s\n")


if __name__ == "__main__":
    main()

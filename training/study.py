# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""`lilicorr study`: trains several systems under equal conditions, in turns, and measures them.

Each system is a run of `lilicorr train` in a folder of its own, on the same rows in the same order. All advance by
parts of the run, so that at any time they have seen equally much, to within one part.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from lilicorr_hf.bench.cli import check as check_bench
from lilicorr_hf.bench.cli import main as bench
from lilicorr_hf.bench.cli import put_into, split_at_marks
from lilicorr_hf.bench.tables import Table

from .memory import keep_freed_memory
from .plot import read_history
from .provenance import command_line, read_record
from .train import named_file, new_trainer, parse_arguments, to_argv, without_hours
from .trainer import LiLiCorrTrainer


STUDIES = Path(__file__).parent / "configs" / "studies"
# In a system's folder: which share of its run is over, of how many steps or hours, and a digest of its other options.
SHARE = "share.json"
# Runs are evaluated, on held-out rows, and saved where their parts end.
OPTIONS = {
    "eval_strategy": "no",
    "eval_prompts": 0,
    "save_strategy": "no",
    "save_total_limit": 1,
    "metric_for_best_model": "top1_prefix",
}
# What evaluation calls the slots accepted by each way to draft, and the table's heads for them.
PREFIXES = {"eval_top1_prefix": "argmax", "eval_selected_prefix": "head", "eval_oracle_prefix": "oracle"}
console, errors = Console(), Console(stderr=True)


@dataclass(frozen=True)
class Study:
    """What is compared.

    Args:
        name (`str`): of the file it was read from.
        shared (`dict`): options of `lilicorr train` that all systems have.
        systems (`dict`): by name, the options that only it has.
        output_dir (`Path`): where each system has its folder.
    """

    name: str
    shared: dict[str, Any]
    systems: dict[str, dict[str, Any]]
    output_dir: Path

    def folder(self, system: str) -> Path:
        return self.output_dir / system

    def argv(self, system: str, more: list[str]) -> list[str]:
        """Options of a system's run; `more` wins over the study's own."""
        options = without_hours(self.shared | self.systems[system], more)
        given = {name: value for name, value in options.items() if value is not None}
        return [*to_argv(given), *more, "--output_dir", str(self.folder(system))]

    def share_done(self, system: str, more: list[str]) -> float:
        """Of a system's run, which may have been a shorter one before.

        Raises:
            `ValueError`: if what lies in its folder was trained with other options, or for longer.
        """
        record = self.folder(system) / SHARE
        if not record.is_file():
            return 0.0
        done = json.loads(record.read_text(encoding="utf-8"))
        budget, options = split_budget(self.argv(system, more))
        if done["options"] != digest(options):
            raise ValueError(
                f"{self.folder(system)} was trained with other options, see `recipe.yaml` there. Give the same again, "
                "or another `--output_dir`."
            )
        if done["budget"] > budget:
            raise ValueError(
                f"{self.folder(system)} is a run of {done['budget']} steps or hours, more than {budget}. Give as many "
                "or more, or another `--output_dir`."
            )
        return done["share"] * done["budget"] / budget


def read_study(name: str, output_dir: Path) -> Study:
    """A YAML file with `shared` and `systems`, or one that comes with the package by its name.

    Raises:
        `ValueError`: if it does not hold just these two.
    """
    path = named_file(name, STUDIES)
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(settings, dict) or settings.keys() != {"shared", "systems"} or not settings["systems"]:
        raise ValueError(f"{path} has to hold `shared`, options of all runs, and `systems`, options of each by name.")
    shared = dict(settings["shared"])
    # Read here, so that a study can take an option out of a recipe: null stands for none.
    recipe = yaml.safe_load(named_file(shared.pop("config")).read_text(encoding="utf-8")) if "config" in shared else {}
    systems = {system: options or {} for system, options in settings["systems"].items()}
    return Study(path.stem, recipe | OPTIONS | shared, systems, output_dir)


class StopAt(TrainerCallback):
    """Evaluates, saves and stops once a share of the trainer's run is over; gives up where the study was killed."""

    def __init__(self, trainer: LiLiCorrTrainer, share: float, study: int):
        self.trainer, self.share, self.study = trainer, share, study

    def on_step_end(self, args, state, control, **kwargs):
        leave_if_killed(self.study)
        if self.trainer.elapsed >= self.share:
            control.should_training_stop = control.should_save = control.should_evaluate = True


def split_budget(argv: list[str]) -> tuple[float, list[str]]:
    """The hours or steps of a run, and its other options, with the name of the one that is given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--max_hours", type=float)
    parser.add_argument("--max_steps", type=int)
    given, others = parser.parse_known_args(argv)
    name, budget = ("max_steps", given.max_steps) if given.max_hours is None else ("max_hours", given.max_hours)
    return budget, [*others, name]


def digest(options: list[str]) -> str:
    # A token may be among them.
    return hashlib.sha256("\0".join(options).encode()).hexdigest()


def leave_if_killed(study: int) -> None:
    """Ends this process where the study with that process id is gone: the command that goes on must find nobody else
    at work in its folders."""
    if os.getppid() != study:
        sys.exit("The study that this run belongs to is gone.")


def last_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that was written to its end."""
    states = folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{TRAINER_STATE_NAME}")
    newest = max(states, key=lambda path: int(path.parent.name.rpartition("-")[2]), default=None)
    return None if newest is None else str(newest.parent)


@contextmanager
def run_of(argv: list[str]) -> Iterator[LiLiCorrTrainer]:
    """The trainer of a system's run; what it prints goes to `log.txt`."""
    arguments = parse_arguments(argv)
    folder = Path(str(arguments[2].output_dir))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("a") as log, redirect_stdout(log), redirect_stderr(log):
        trainer = new_trainer(*arguments, command=command_line(argv, arguments[2].hub_token))
        yield trainer
        trainer.close()


def set_up(argv: list[str]) -> None:
    """Loads what a system's run needs, so that what would stop it is said before any system trains.

    Raises:
        `ValueError`: if no rows are held out, by which systems are compared.
    """
    with run_of(argv) as trainer:
        if trainer.held_out is None:
            raise ValueError("No rows are held out, by which systems are compared: give `held_out`, such as 0.02.")


def train_part(argv: list[str], share: float, threads: int, study: int) -> None:
    """Goes on with a system's run until that share of it is over, or the study with that process id is gone."""
    leave_if_killed(study)
    torch.set_num_threads(threads)
    keep_freed_memory()
    with run_of(argv) as trainer:
        folder = Path(str(trainer.args.output_dir))
        trainer.add_callback(StopAt(trainer, share, study))
        trainer.train(resume_from_checkpoint=last_checkpoint(folder))
        trainer.save_model()
    budget, options = split_budget(argv)
    record = {"share": share, "budget": budget, "options": digest(options)}
    (folder / SHARE).write_text(json.dumps(record), encoding="utf-8")


def check_equal_budgets(study: Study, more: list[str]) -> None:
    """
    Raises:
        `ValueError`: unless all systems train for equally many steps, or for equally many hours.
    """
    runs = {system: parse_arguments(study.argv(system, more))[2] for system in study.systems}
    budgets = {system: (args.max_steps, args.max_hours) for system, args in runs.items()}
    if len(set(budgets.values())) > 1 or max(args.max_steps for args in runs.values()) < 1:
        raise ValueError(f"A study needs one `max_steps`, or one `max_hours`, for all its systems; got {budgets}.")


def train_in_turns(study: Study, more: list[str], parts: int, jobs: int, minutes: float | None) -> bool:
    """Trains the first part of every system, then the second, and so on.

    Args:
        more (list of `str`): options of `lilicorr train`, for all systems.
        parts (`int`): of a run.
        jobs (`int`): systems that train at a time, each in a process of its own with its share of the cores.
        minutes (`float`): begin no further round of parts after so long.

    Returns:
        `bool`: whether all systems reached their last step.

    Raises:
        `ValueError`: naming the first system that cannot be trained as it is given, before any is.
    """
    start, here = time.monotonic(), os.getpid()
    threads = max(torch.get_num_threads() // jobs, 1)
    done = {system: study.share_done(system, more) for system in study.systems}
    # A part ends with its process, so that none inherits memory or threads of another.
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=1)
    clocks = (TimeElapsedColumn(), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *clocks)
    with pool, Progress(*columns, console=errors) as bar:
        new = [system for system in study.systems if not done[system]]
        task = bar.add_task("systems set up", total=len(new))
        for _ in run_each(pool, jobs, {system: (set_up, study.argv(system, more)) for system in new}):
            bar.advance(task)
        task = bar.add_task("parts", total=parts * len(study.systems))
        for part in range(1, parts + 1):
            share = part / parts
            due = [system for system in study.systems if done[system] < share]
            bar.advance(task, len(study.systems) - len(due))
            calls = {system: (train_part, study.argv(system, more), share, threads, here) for system in due}
            for _ in run_each(pool, jobs, calls):
                bar.advance(task)
            if due and part < parts and minutes is not None and time.monotonic() - start > 60 * minutes:
                return False
    return True


def run_each(pool: Executor, jobs: int, calls: dict[str, tuple]) -> Iterator[str]:
    """Runs the calls of the systems, `jobs` at a time, and names each system when its call has returned.

    No further call is begun after one has failed; those under way end first.

    Raises:
        `ValueError`: naming the system whose call failed.
    """
    waiting: dict[Future, str] = {}
    queue = list(calls.items())
    while queue or waiting:
        while queue and len(waiting) < jobs:
            system, call = queue.pop(0)
            waiting[pool.submit(*call)] = system
        for future in wait(waiting, return_when=FIRST_COMPLETED).done:
            system = waiting.pop(future)
            try:
                future.result()
            except (ArithmeticError, OSError, RuntimeError, ValueError) as error:
                if waiting:
                    errors.print(f"System {system!r} failed; others finish their part: {list(waiting.values())}.")
                raise ValueError(f"System {system!r} of the study cannot be trained: {error}") from error
            yield system


def training_table(study: Study) -> Table:
    """What each system has seen, and what its drafts are worth on the rows that were held out."""
    rows = []
    for system in study.systems:
        history = read_history(study.folder(system))
        seen = read_record(study.folder(system))["progress"]
        last = {name: value for row in history for name, value in row.items()}
        lengths = [f"{1 + last[name]:.3f}" if name in last else "–" for name in PREFIXES]
        coverage = f"{last['eval_coverage']:.1%}" if "eval_coverage" in last else "–"
        rows.append([system, str(seen["steps"]), f"{seen['blocks']:,}", f"{seen['hours']:.2f}", *lengths, coverage])
    header = ["system", "steps", "blocks", "hours", *PREFIXES.values(), "coverage@K"]
    note = "Acceptance length on the rows held out, where every block stands behind the target's own tokens."
    return Table("Training", header, rows, note)


def study_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lilicorr study",
        description="Trains several systems under equal conditions, in turns, then measures them. Options of "
        "`lilicorr train` apply to all of them. Stopped, the same command goes on; with more `--max_steps` or "
        "`--max_hours`, it trains them on.",
    )
    add = parser.add_argument
    add("study", help=f"YAML file, or one of {', '.join(sorted(path.stem for path in STUDIES.glob('*.yaml')))}.")
    add("--output_dir", type=Path, help="By default runs/ and the study's name.")
    add("--parts", type=int, default=6, help="Parts of a run; after each, it is the next system's turn.")
    add("--jobs", type=int, default=1, help="Systems to train at a time.")
    add("--minutes", type=float, help="Begin no further round of parts after so long; --bench waits for the last.")
    add("--bench", help="Files and options of `lilicorr bench`, in one string, to measure the systems with.")
    add("--page", type=Path, metavar="PAGE.md", help="Put the tables between its lines `<!-- bench NAME -->` and "
        "`<!-- end -->`: `training` and the output that --bench names.")  # fmt: skip
    return parser


def main(argv: list[str] | None = None) -> None:
    args, more = study_parser().parse_known_args(argv)
    study = read_study(args.study, args.output_dir or Path("runs") / Path(args.study).stem)
    check_equal_budgets(study, more)
    if args.page is not None:
        split_at_marks(args.page, "training")
    checkpoints = [f"--system=checkpoint:path={study.folder(system)}" for system in study.systems]
    page = [] if args.page is None else ["--page", str(args.page)]
    benching = None if args.bench is None else [*shlex.split(args.bench), *checkpoints, *page]
    if benching is not None:
        check_bench(benching)
    complete = train_in_turns(study, more, args.parts, args.jobs, args.minutes)
    if all(study.share_done(system, more) for system in study.systems):
        table = training_table(study)
        console.print(table.rich())
        if args.page is not None:
            put_into(args.page, "training", table.markdown())
    if not complete:
        errors.print("Out of time: the same command goes on with the parts that are left.")
    elif benching is not None:
        bench(benching)

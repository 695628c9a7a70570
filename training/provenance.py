# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""What a training run was made of: `training.json` and `recipe.yaml`, written beside everything a run saves."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from lilicorr_hf.provenance import without_folders
from lilicorr_hf.targets import TARGETS


RECORD, RECIPE = "training.json", "recipe.yaml"
# Options that say where a run's output goes, or where it came in; a recipe is for others to follow.
PERSONAL = ("hub_", "push_to_hub", "resume_from_checkpoint")


@dataclass
class Provenance:
    """
    How a run was started.

    Args:
        command (`str`): that starts it again; `None` if the trainer was built in Python.
        arguments (`dict`): every option that is not at its default.
        files (list of `dict`): `file` and `rows` of each training file.
    """

    command: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    files: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arguments = {k: plain(v) for k, v in self.arguments.items()}
        self.files = [entry | {"file": without_folders(entry["file"])} for entry in self.files]


def plain(value: Any) -> Any:
    """What JSON and YAML write as it is; paths of this machine become names."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return value if isinstance(value, bool | int | float | None) else without_folders(str(value))


def command_line(argv: Sequence[str], secret: str | None = None, processes: int = 1) -> str:
    """The shell line that starts a run with these options, without a token and without folders of this machine."""
    launcher = ["lilicorr", "train"]
    if processes > 1:
        launcher = ["accelerate", "launch", "--num_processes", str(processes), "-m", "lilicorr_hf.training.train"]
    shown = [argument.replace(secret, "HUB_TOKEN") if secret else argument for argument in argv]
    return shlex.join([*launcher, *map(without_folders, shown)])


def hub_id(target: str | None) -> str | None:
    """The Hub id behind a target's name; `None` for a folder, which no card can link to."""
    if target in TARGETS:
        return TARGETS[target].base_model
    return target if target and "/" in target and not Path(target).exists() else None


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """`training.json`, and as `recipe.yaml` what of it makes the run again."""
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    recipe = {name: value for name, value in record["arguments"].items() if not name.startswith(PERSONAL)}
    head = f"# lilicorr train --config {RECIPE}, in a folder that holds the data files.\n"
    (folder / RECIPE).write_text(head + yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True), encoding="utf-8")


def read_record(folder: Path) -> dict[str, Any]:
    """
    Raises:
        `FileNotFoundError`: if no run saved that folder.
    """
    if not (folder / RECORD).is_file():
        raise FileNotFoundError(
            f"{folder} holds no {RECORD}; give a checkpoint or the `output_dir` of a run of `lilicorr train`."
        )
    return json.loads((folder / RECORD).read_text(encoding="utf-8"))

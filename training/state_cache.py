# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""What a frozen target says about each training row, kept on disk so that later epochs need not ask again.

Shapes: `n` tokens of a row, `L` tapped layers, `M` hidden width of the target.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import torch
from transformers import PreTrainedModel
from transformers.utils import logging


logger = logging.get_logger(__name__)

# Bytes of the disk that are left alone.
RESERVE = 2 * 1024**3


class TargetStateCache:
    """
    Tapped and final states of whole rows, looked up by their token ids.

    A folder holds `meta.json`, which target they are of, and pairs of files: `*.bin` with the states of row after row,
    `*.jsonl` with where each row lies. A process appends to a pair of its own, so that many may fill one folder, and
    what a killed one left behind stays usable.

    Args:
        folder (`Path`): made if it does not exist.
        target (`PreTrainedModel`): whose states they are.
        target_layer_ids (sequence of `int`): tapped layers, from 0.

    Raises:
        `ValueError`: if the folder holds states of another target, of other layers or of another type.
    """

    def __init__(self, folder: Path, target: PreTrainedModel, target_layer_ids: Sequence[int]):
        self.folder = Path(folder)
        self.dtype = target.dtype
        self.width = (len(target_layer_ids) + 1) * target.config.get_text_config().hidden_size
        self._places: dict[str, tuple[Path, int, int]] = {}
        self._files: dict[Path, torch.Tensor] = {}
        self._own: tuple[IO[bytes], IO[str]] | None = None
        self.folder.mkdir(parents=True, exist_ok=True)
        self._check(describe(target, target_layer_ids))
        for index in sorted(self.folder.glob("*.jsonl")):
            self._read(index)

    def __len__(self) -> int:
        return len(self._places)

    def get(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor | None:
        """States `[n, (L + 1) * M]` of a row of ids and positions `[n]`, or `None` where it was never added."""
        place = self._places.get(key_of(input_ids, position_ids))
        if place is None:
            return None
        path, start, rows = place
        if path not in self._files or len(self._files[path]) < start + rows:
            values = path.stat().st_size // self.dtype.itemsize
            states = torch.from_file(str(path), shared=False, size=values, dtype=self.dtype)
            self._files[path] = states[: values // self.width * self.width].view(-1, self.width)
        return self._files[path][start : start + rows]

    def add(self, input_ids: torch.Tensor, position_ids: torch.Tensor, states: torch.Tensor) -> None:
        """Keeps the states `[n, (L + 1) * M]` of such a row; not any more once the disk is nearly full."""
        if shutil.disk_usage(self.folder).free < RESERVE:
            logger.warning_once(f"{self.folder} is nearly full: the states of further rows are not kept.")
            return
        if self._own is None:
            self._own = self._open()
        file, index = self._own
        data = states.detach().to("cpu", self.dtype).contiguous()
        start = file.tell() // (self.width * self.dtype.itemsize)
        file.write(data.view(torch.uint8).numpy().tobytes())
        file.flush()
        key = key_of(input_ids, position_ids)
        index.write(json.dumps({"row": key, "start": start, "rows": len(data)}) + "\n")
        index.flush()
        self._places[key] = (Path(file.name), start, len(data))

    def _check(self, ours: dict) -> None:
        path = self.folder / "meta.json"
        if not path.exists():
            # Processes that start together all write the same, and none reads half of it.
            with tempfile.NamedTemporaryFile("w", dir=self.folder, delete=False) as file:
                json.dump(ours, file)
            os.replace(file.name, path)
        theirs = json.loads(path.read_text(encoding="utf-8"))
        if different := [name for name in ours if ours[name] != theirs.get(name)]:
            found = ", ".join(f"{name} is {theirs.get(name)} there and {ours[name]} here" for name in different)
            raise ValueError(f"{self.folder} holds the states of another run: {found}. Give another folder.")

    def _read(self, index: Path) -> None:
        """Rows of an index whose states were written to the end."""
        path = index.with_suffix(".bin")
        whole = path.stat().st_size // (self.width * self.dtype.itemsize)
        for line in index.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # the last line of a process that was killed
            if row["start"] + row["rows"] <= whole:
                self._places[row["row"]] = (path, row["start"], row["rows"])

    def _open(self) -> tuple[IO[bytes], IO[str]]:
        """A pair of files that no other process writes to."""
        file = tempfile.NamedTemporaryFile(dir=self.folder, prefix="states-", suffix=".bin", delete=False)
        return file, Path(file.name).with_suffix(".jsonl").open("w")


def key_of(input_ids: torch.Tensor, position_ids: torch.Tensor) -> str:
    """Of a row by its tokens, and by where further documents begin in it."""
    further = (position_ids == 0).nonzero().flatten()[1:]
    key = hashlib.blake2b(digest_size=16)
    for tensor in (input_ids, further):
        key.update(tensor.to("cpu", torch.int64).numpy().tobytes())
    return key.hexdigest()


def describe(target: PreTrainedModel, target_layer_ids: Sequence[int]) -> dict:
    """What the states depend on; the weights by a sample of each of them."""
    sample = hashlib.blake2b(digest_size=8)
    for name, parameter in target.named_parameters():
        values = parameter.detach().flatten()
        chosen = values[:: max(1, len(values) // 64)].to("cpu", torch.float32)
        sample.update(name.encode() + chosen.numpy().tobytes())
    return {
        "target_layer_ids": list(target_layer_ids),
        "dtype": str(target.dtype),
        "weights": sample.hexdigest(),
    }

# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""Rows filled with several documents, each computed as if it were alone."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import chain

import torch
from transformers import PreTrainedModel

from .data import Example


class PackedExample(Example):
    """Several documents in one row. Positions start anew with each, which is what keeps them apart in the target's
    attention, in the context of blocks and in the labels of slots.

    Args:
        documents (sequence of [`Example`]).
    """

    def __init__(self, documents: Sequence[Example]):
        self.documents = documents
        super().__init__(
            input_ids=list(chain.from_iterable(document.input_ids for document in documents)),
            loss_mask=list(chain.from_iterable(document.loss_mask for document in documents)),
        )

    @property
    def position_ids(self) -> list[int]:
        return list(chain.from_iterable(document.position_ids for document in self.documents))

    @property
    def anchors(self) -> list[int]:
        starts = [index for index, position in enumerate(self.position_ids) if position == 0]
        return [
            start + anchor
            for start, document in zip(starts, self.documents, strict=True)
            for anchor in document.anchors
        ]


def pack(examples: Sequence[Example], max_length: int) -> list[PackedExample]:
    """Rows of at most `max_length` tokens that hold every example once and whole: the longest first, each into the
    row with the least room that takes it.

    Args:
        examples (sequence of [`Example`]): none longer than `max_length`.
        max_length (`int`): tokens of a row.
    """
    rows: list[list[Example]] = []
    rooms: list[tuple[int, int]] = []  # room left and index of the row, by room
    for example in sorted(examples, key=lambda example: len(example.input_ids), reverse=True):
        length = len(example.input_ids)
        fit = bisect_left(rooms, (length, 0))
        if fit == len(rooms):
            rooms.append((max_length, len(rows)))
            rows.append([])
        room, row = rooms.pop(fit)
        rows[row].append(example)
        insort(rooms, (room - length, row))
    return [PackedExample(row) for row in rows]


@torch.no_grad()
def check_packing(target: PreTrainedModel, batch_size: int) -> None:
    """Shows the target rows that differ in their first document only, and compares what it makes of the second.

    Args:
        target (`PreTrainedModel`): frozen.
        batch_size (`int`): rows of a training batch; some attention kernels tell documents apart only in a single row.

    Raises:
        `ValueError`: if documents see each other.
    """
    length, vocab_size = 16, target.config.get_text_config().vocab_size
    position_ids = torch.arange(length, device=target.device).repeat(batch_size, 2)
    *firsts, second = torch.linspace(1, vocab_size - 1, 3 * length, device=target.device).long().split(length)
    seconds = []
    for first in firsts:
        input_ids = torch.cat([first, second]).expand(batch_size, -1)
        output = target.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        seconds.append(output.last_hidden_state[:, length:].float())
    # Rounding may differ where the kernels see other values beside these.
    if (seconds[0] - seconds[1]).norm() > 0.01 * seconds[0].norm():
        raise ValueError(
            f"{type(target).__name__} {target.name_or_path!r} lets packed documents see each other with "
            f"`{target.config._attn_implementation}` and {batch_size} rows a batch. Load it with "
            '`attn_implementation="sdpa"`, or turn `packing` off.'
        )

"""What it takes to choose a block's tokens once the slots' logits are known, by method and scoring mode, and what a
whole draft takes by mode; in turns.

Shapes: `b` batch, `B` block size, `V` vocabulary, `M` hidden width.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.cache_utils import DFlashCache

from .architectures import DRAFTERS, drafter_class
from .modeling.draft_pass_lilicorr import DraftPass
from .modeling.modeling_dflash import DFlashModel, DFlashOutput
from .modeling.modeling_lilicorr import LiLiCorrDraftModel
from .modeling.scoring_lilicorr import MODES
from .modeling.target_lilicorr import TargetTables
from .stopwatch import Part, Stopwatch, size


# What is not a head, and what of a head is looked up.
BODY = ("fc.", "hidden_norm.", "layers.", "norm.")
TABLES = ("markov_w1", "predecessor_codebook", "successor_codebook")


def drafters_beside(assistant: DFlashModel) -> dict[str, DFlashModel]:
    """By the name of its method, a drafter of each: `assistant`, and others of random weights and its sizes.

    Those have one layer: what counts is the head.
    """
    config = copy.deepcopy(assistant.config)
    config.update({"num_hidden_layers": 1, "layer_types": ["full_attention"], "target_layer_ids": [0]})
    drafters = {}
    for name in DRAFTERS:
        drafter = assistant
        if name != type(assistant).__name__:
            with torch.device(assistant.device):
                drafter = drafter_class(name)(copy.deepcopy(config)).to(assistant.dtype).eval()
        drafters[name.removesuffix("DraftModel").removesuffix("Model")] = drafter
    return drafters


@torch.no_grad()
def time_choices(
    drafters: dict[str, DFlashModel],
    tables: TargetTables,
    rounds: int,
    bandwidth: float,
    batch_size: int = 1,
    modes: Sequence[str] = MODES,
) -> list[Part]:
    """Times every method on the same random logits; LiLiCorr in each mode that runs here.

    Args:
        drafters (`dict`): as [`drafters_beside`] makes them.
        tables ([`TargetTables`]): of the target.
        rounds (`int`): of all in turns, after two that are not timed.
        bandwidth (`float`): bytes a second at which weights can be read.
    """
    choices: dict[str, Callable[[], Any]] = {}
    for name, drafter in drafters.items():
        inputs = random_inputs(drafter, batch_size)
        if isinstance(drafter, LiLiCorrDraftModel):
            choices |= {f"{name}, {mode}": run for mode, run in scoring_runs(drafter, tables, inputs, modes).items()}
        else:
            choices[name] = functools.partial(drafter.choose, *inputs, tables=tables)
    watch = Stopwatch(next(iter(drafters.values())).device)
    for _ in range(rounds + 2):
        for name, run in choices.items():
            watch.restart()
            run()
            watch.stamp(name)
    sizes = {name: head_size(drafters[name.split(",")[0]]) for name in choices}
    return [Part(name, watch.milliseconds(name), sizes[name] / 1e6, 1e3 * sizes[name] / bandwidth) for name in choices]


@torch.no_grad()
def time_drafts(
    drafter: DFlashModel,
    tables: TargetTables,
    context: int,
    rounds: int,
    bandwidth: float,
    modes: Sequence[str] = MODES,
) -> list[Part]:
    """Times whole drafts, from the anchor to the tokens, in each mode that can be had here.

    Args:
        context (`int`): tokens before the first; each further draft reads as many new ones as half a block.
        rounds, bandwidth, modes: as in [`time_choices`].
    """
    config, device = drafter.config, drafter.device
    passes = {mode: (DraftPass(drafter, tables, mode), DFlashCache(config=config)) for mode in modes}
    passes = {mode: kept for mode, kept in passes.items() if mode == "eager" or kept[0].possible}
    watch = Stopwatch(device)
    for count in [context, *(rounds + 2) * [1 + config.block_size // 2]]:
        states = torch.randn(1, count, drafter.fc.in_features, device=device, dtype=drafter.dtype)
        anchor = torch.randint(config.vocab_size, (1, 1), device=device)
        for mode, (draft_pass, cache) in passes.items():
            seen = cache.get_seq_length()
            positions = torch.arange(seen, seen + count + config.block_size, device=device).unsqueeze(0)
            watch.restart()
            whole = draft_pass if draft_pass.serves(None, in_step=True) else None
            drafter.draft(states, anchor, positions, cache, tables, draft_pass=whole)
            watch.stamp(mode)
    for draft_pass, _ in passes.values():
        draft_pass.close()
    read = size(drafter) + size(tables.output_head)
    return [
        Part(f"whole draft, {mode}", watch.milliseconds(mode), read / 1e6, 1e3 * read / bandwidth)
        for mode in passes
        if mode not in drafter.workspaces.unavailable
    ]


def random_inputs(drafter: DFlashModel, batch_size: int) -> tuple[torch.Tensor, DFlashOutput, torch.Tensor]:
    """Logits of the slots `[b, ..., V]`, the drafter's output and the anchors `[b, 1]`, the same for every method."""
    config = drafter.config
    generator = torch.Generator(drafter.device).manual_seed(0)
    like: Any = {"device": drafter.device, "dtype": drafter.dtype, "generator": generator}
    logits = 4 * torch.randn(batch_size, config.block_size, config.vocab_size, **like)
    states = torch.randn(batch_size, config.block_size, config.hidden_size, **like)
    output = DFlashOutput(last_hidden_state=states, context_hidden_states=states[:, :1])
    anchors = torch.zeros(batch_size, 1, dtype=torch.long, device=drafter.device)
    return logits[:, drafter.slot_rows], output, anchors


def scoring_runs(
    drafter: LiLiCorrDraftModel,
    tables: TargetTables,
    inputs: tuple[torch.Tensor, DFlashOutput, torch.Tensor],
    modes: Sequence[str],
) -> dict[str, Callable[[], Any]]:
    """The scoring pass in each mode that can be had here."""
    logits, output, _ = inputs
    tensors = logits, output.last_hidden_state[:, drafter.slot_rows], output.context_hidden_states[:, -1]
    if drafter.device.type != "cuda":
        modes = [mode for mode in modes if mode != "cuda_graph"]
    runs = {mode: functools.partial(drafter.scoring, drafter.lilicorr, tables, tensors, mode) for mode in modes}
    for run in runs.values():
        run()
    return {mode: run for mode, run in runs.items() if mode not in drafter.scoring.unavailable}


def head_size(drafter: DFlashModel) -> int:
    """Bytes of the weights that a draft reads beside the block drafter's own; of tables it reads a few rows."""
    return sum(
        p.numel() * p.element_size()
        for name, p in drafter.named_parameters()
        if not name.startswith(BODY) and not name.removesuffix(".weight").endswith(TABLES)
    )


__all__ = ["drafters_beside", "head_size", "time_choices", "time_drafts"]

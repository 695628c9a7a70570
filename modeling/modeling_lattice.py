# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""What draft methods share that score a lattice of candidates and commit a block by a walk through it.

Shapes: `b` batch, `B` block size, `S = B - 1` slots, `K` candidates of a slot, `V` vocabulary, `M` hidden width.
"""

import torch

from .lattice_lilicorr import Lattice, greedy_walk, processed_walk, sampled_walk
from .modeling_dflash import DFlashModel, DFlashOutput, DraftOutput
from .target_lilicorr import TargetTables
from .tree_lilicorr import lattice_tree, steered_slots


class LatticeDraftModel(DFlashModel):
    """A drafter with a head that scores every pair of neighbouring candidates; a method says how in `score`."""

    has_head = True
    _keys_to_ignore_on_load_unexpected = []

    def score(
        self, logits: torch.Tensor, output: DFlashOutput, anchor_ids: torch.Tensor, tables: TargetTables
    ) -> Lattice:
        """The scored lattice, maybe with its greedy walk, of blocks whose slot logits are `[b, S, V]`."""
        raise NotImplementedError

    def choose(self, logits, output, anchor_ids, tables, process=None, temperature=None) -> DraftOutput:
        """Commits the greedy walk through the lattice of the slots' best candidates (section 3.5 of the paper).

        At a temperature it draws the walk instead, and states what it was drawn from.
        """
        lattice = self.score(logits, output, anchor_ids, tables)
        start, pair = lattice.start_scores, lattice.pair_scores
        uniforms = None if temperature is None else torch.rand(lattice.candidate_ids.shape[:-1], device=start.device)
        probs = None
        if process is not None:
            walk, probs = processed_walk(lattice, logits, process, uniforms, temperature)
        elif uniforms is not None and temperature is not None:
            walk, probs = sampled_walk(start, pair, uniforms, temperature)
        else:
            walk = greedy_walk(start, pair) if lattice.walk is None else lattice.walk
        lattice.walk = walk
        candidates = lattice.candidate_ids[:, : walk.shape[-1]]
        token_ids = candidates.gather(-1, walk.unsqueeze(-1)).squeeze(-1)
        proposal = None
        if probs is not None:
            nothing = probs.new_full((*token_ids.shape, logits.shape[-1]), -torch.inf)
            proposal = nothing.scatter(-1, candidates, probs.log())
        return DraftOutput(
            token_ids=token_ids, proposal_logits=proposal, lattice=lattice, finite=finite_scores(lattice)
        )

    def choose_tree(self, logits, output, anchor_ids, tables, shape, process=None) -> DraftOutput:
        """A tree grown by the head's scores, LiLiCorr-Tree for its head; see [`lattice_tree`].

        Where they weigh nothing they are not computed: then it is the drafter's, DDTree.
        """
        if self.config.tree_weight == 1:
            return super().choose_tree(logits, output, anchor_ids, tables, shape, process)
        lattice = self.score(logits, output, anchor_ids, tables)
        _, slots, k = lattice.candidate_ids.shape
        scored = process is None and shape.nodes <= k and shape.depth >= slots
        steered = None if scored else steered_slots(logits, shape, process)
        tree = lattice_tree(lattice, steered, shape.nodes, self.config.tree_weight)
        return DraftOutput(**tree._asdict(), lattice=lattice, finite=finite_scores(lattice))


def finite_scores(lattice: Lattice) -> torch.Tensor:
    """Whether all scores of each block are finite, `[b]`."""
    return lattice.start_scores.isfinite().all(dim=-1) & lattice.pair_scores.isfinite().flatten(1).all(dim=-1)


__all__ = ["LatticeDraftModel"]

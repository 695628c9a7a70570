"""What nvidia-modelopt's own training forward drafts at given anchors; started by `record_blocks.py`.

Drafter, mask, candidates and scores are all its own, read off the one call of the head; only the walk is done here,
because it keeps its own to itself. A block attends to target states of positions before its anchor, as in decoding.
"""

import modelopt.torch.speculative as mtsp
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from worker import read_settings
from worker_modelopt import collate


def walk(start_scores: torch.Tensor, pair_scores: torch.Tensor) -> torch.Tensor:
    """Rank `[..., slots]` of each slot's best candidate after the one taken before it.

    Args:
        start_scores: `[..., K]`.
        pair_scores: `[..., slots - 1, K, K]`; the last two are a candidate and one of the next slot.
    """
    taken = [start_scores.argmax(-1)]
    for scores in pair_scores.unbind(-3):
        after_taken = scores.take_along_dim(taken[-1][..., None, None], -2).squeeze(-2)
        taken.append(after_taken.argmax(-1))
    return torch.stack(taken, -1)


@torch.no_grad()
def score(model, sequence: torch.Tensor, anchors: list[int], multiple: int) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """What its head is called with, and the scores it gives, times sigma: `[anchors, ...]` each."""
    row = {"input_ids": sequence, "anchors": torch.tensor(anchors)}
    inputs = collate([row | {name: torch.ones_like(sequence) for name in ("attention_mask", "loss_mask")}], multiple)
    positions = inputs.pop("anchors")
    keep = torch.ones_like(positions, dtype=torch.bool)
    model._sample_anchor_positions = lambda seq_len, loss_mask, device: (positions, keep)
    head, calls = model.dflash_module.lilicorr, []
    hook = head.register_forward_hook(lambda _, __, lattice, scores: calls.append((lattice, scores)), with_kwargs=True)
    model(**inputs)
    hook.remove()
    ((lattice, (start, pair)),) = calls
    start, pair = head.compose_log_factors(start_scores=start, pair_scores=pair)
    lattice = {name: value[0] for name, value in lattice.items() if isinstance(value, torch.Tensor)}
    return lattice, start[0], pair[0]


def draft(model, sequence: torch.Tensor, anchors: list[int], multiple: int) -> dict[str, torch.Tensor]:
    """The recorded fields, `[anchors, ...]` each."""
    lattice, start, pair = score(model, sequence, anchors, multiple)
    candidate_ids, indices = lattice["candidate_token_ids"], walk(start, pair)
    return {
        "drafter_hidden": lattice["pass_hidden"],
        "candidate_ids": candidate_ids,
        "candidate_log_probs": lattice["candidate_log_probs"],
        "start_scores_times_sigma": start,
        "pair_scores_times_sigma": pair,
        "walk_indices": indices,
        "walk_token_ids": candidate_ids.take_along_dim(indices.unsqueeze(-1), -1).squeeze(-1),
    }


def load_drafting(settings: dict):
    """The target with its drafter converted beside it, ready to draft."""
    model = AutoModelForCausalLM.from_pretrained(settings["target"], dtype=settings["dtype"])
    mtsp.convert(model, [("dflash", settings["dflash"])])
    # Its forward drafts in training mode only; there is no dropout.
    return model.train()


def main() -> None:
    settings = read_settings()
    recording = load_file(settings["recording"])
    model = load_drafting(settings)
    tensors = {}
    for prompt, anchors in settings["anchors"].items():
        # Copies: the file that these are views of may be the one to write.
        sequence, length = (recording[f"{prompt}.{name}"].clone() for name in ("sequence_ids", "prompt_length"))
        tensors |= {f"{prompt}.sequence_ids": sequence, f"{prompt}.prompt_length": length}
        fields = draft(model, sequence, anchors, settings["pad_to_multiple_of"])
        for i, anchor in enumerate(anchors):
            tensors |= {f"{prompt}.anchor{anchor}.{name}": value[i].clone() for name, value in fields.items()}
    save_file(tensors, settings["output"])


if __name__ == "__main__":
    main()

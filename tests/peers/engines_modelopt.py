"""nvidia-modelopt on a checkpoint that we exported, then on weights of its own that it exports; by `engines.py`.

Drafts at the anchors of a recording with both and writes what its head was called with and the scores it gave.
"""

from pathlib import Path

import torch
from modelopt.torch.export import export_speculative_decoding
from record_blocks_modelopt import load_drafting, score, walk
from safetensors.torch import load_file, save_file
from worker import read_settings


def draft_all(model, settings, recording) -> dict[str, torch.Tensor]:
    """Head inputs, scores and walks at all anchors of all prompts, one after the other."""
    found = []
    for prompt, anchors in settings["anchors"].items():
        sequence = recording[f"{prompt}.sequence_ids"]
        lattice, start, pair = score(model, sequence, anchors, settings["pad_to_multiple_of"])
        lattice["anchor_hidden"] = lattice["anchor_hidden"].squeeze(1)
        found.append({**lattice, "start_scores": start, "pair_scores": pair, "walk": walk(start, pair)})
    names = ("candidate_token_ids", "candidate_log_probs", "pass_hidden", "anchor_hidden")
    return {name: torch.cat([f[name] for f in found]) for name in (*names, "start_scores", "pair_scores", "walk")}


def main() -> None:
    settings = read_settings()
    recording = load_file(settings["recording"])
    model = load_drafting(settings)
    folder = Path(settings["folder"])
    save_file(draft_all(model, settings, recording), folder / "ours_there.safetensors")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.dflash_module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    save_file(draft_all(model, settings, recording), folder / "theirs_there.safetensors")
    export_speculative_decoding(model, dtype=torch.float32, export_dir=folder / "theirs")


if __name__ == "__main__":
    main()

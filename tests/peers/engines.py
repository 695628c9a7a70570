"""One table: do other engines compute on our exports what we compute, and we on theirs?

    python tests/peers/engines.py

Takes the shipped SmolLM2 pair and the anchors of a recording. nvidia-modelopt runs whole, in an environment of its own
made on first use; of SGLang and vLLM the head and what reads config.json, see `engines_served.py`; transformers' own
DFlash class runs in its own loop. All in fp32 on a CPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from record_blocks import read_anchors
from safetensors.torch import load_file, save_file
from training_speed import HERE, Comparison, modelopt_python
from transformers import AutoModel

from lilicorr_hf import DFlashModel, LiLiCorrDraftModel, greedy_walk, load_pair
from lilicorr_hf.convert import convert
from lilicorr_hf.measure import encode
from lilicorr_hf.pairs import resolve_assistant


SGLANG, VLLM = "sglang==0.5.23", "vllm==0.33.0"
RECORDING = HERE.parent / "golden" / "smollm2_shipped.safetensors"
PROMPTS = ("Why is the sky blue?", "Write a Python function that reverses a string.", "Count from one to ten.")
Tensors = dict[str, torch.Tensor]


@dataclass
class Row:
    """
    Args:
        engine, what (`str`).
        blocks (`int`): compared.
        same (`int`): blocks for which the engine took the same candidates, or the same token at every slot.
        difference (`float`): largest of two cosines, which lie in [-1, 1]; `None` where there are no scores.
        config (`str`): what the engine's reading of config.json was compared with.
    """

    engine: str
    what: str
    blocks: int
    same: int
    difference: float | None
    config: str

    def cells(self) -> list[str]:
        difference = "" if self.difference is None else f"{self.difference:.1e}"
        return [self.engine, self.what, f"{self.same}/{self.blocks}", difference, self.config]


def engine_path(requirement: str, folder: Path) -> Path:
    """A folder that holds an engine without anything it depends on, made on first use."""
    path = folder / requirement
    if not (path / ".complete").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", path]
        subprocess.run([*command, requirement, "msgspec"], check=True)
        (path / ".complete").touch()
    return path


@torch.no_grad()
def our_scores(model: LiLiCorrDraftModel, inputs: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    return model.lilicorr(
        token_embeds=inputs["token_embeds"],
        log_probs=inputs["candidate_log_probs"],
        pass_hidden=inputs["pass_hidden"],
        anchor_hidden=inputs["anchor_hidden"],
    )


def compare(engine: str, what: str, model: LiLiCorrDraftModel, inputs: Tensors, theirs: Tensors, config: str) -> Row:
    """Our scores and walk on the inputs of a head against an engine's."""
    start, pair = our_scores(model, inputs)
    walk = greedy_walk(start, pair)
    if "token_ids" in theirs:
        theirs_walk = theirs["token_ids"]
        walk = inputs["candidate_token_ids"].gather(-1, walk.unsqueeze(-1)).squeeze(-1)
    else:
        theirs_walk = theirs.get("walk", greedy_walk(theirs["start_scores"], theirs["pair_scores"]))
    scores = ((start, theirs["start_scores"]), (pair, theirs["pair_scores"]))
    apart = max((ours - other).abs().max().item() for ours, other in scores) / model.config.logit_scale
    same = (walk == theirs_walk).all(dim=-1)
    return Row(engine, what, len(same), int(same.sum()), apart, config)


def modelopt_rows(folder: Path, environment: Path, target) -> Iterator[Row]:
    """What modelopt computes on our export, and we on the one it makes of changed weights."""
    exported = folder / "exported"
    shipped = convert(resolve_assistant("smollm2-135m"), exported, to="modelopt")
    pair = Comparison(rows="", steps=0, assistant=str(exported), dtype="float32")
    files = {"recording": str(RECORDING), "anchors": read_anchors(RECORDING), "folder": str(folder)}
    settings = folder / "settings.json"
    settings.write_text(json.dumps(pair.modelopt_settings(folder) | files))
    subprocess.run([modelopt_python(environment), HERE / "engines_modelopt.py", settings], check=True)
    theirs = convert(folder / "theirs", folder / "theirs_ours")
    ours, other = (json.loads((path / "config.json").read_text()) for path in (exported, folder / "theirs"))
    told = {"architectures", "block_size", "dflash_config", "num_target_layers", "rope_theta", "vocab_size"}
    told |= {"head_dim", "hidden_size", "intermediate_size", "rms_norm_eps", "layer_types", "model_type"}
    unlike = [name for name in told if ours.get(name) != other.get(name)]
    config = f"{len(told)} keys as it writes them" if not unlike else f"unlike: {unlike}"
    assert theirs.tensors.keys() == shipped.tensors.keys()
    cases = (
        ("our export, there", exported, "ours_there"),
        ("its export, here", folder / "theirs_ours", "theirs_there"),
    )
    for what, path, file in cases:
        found = load_file(folder / f"{file}.safetensors")
        found["token_embeds"] = target.get_input_embeddings()(found["candidate_token_ids"]).detach()
        save_file(found, folder / f"{file}.safetensors")
        model = LiLiCorrDraftModel.from_pretrained(path, dtype=torch.float32)
        yield compare("nvidia-modelopt 0.48.0rc1", what, model, found, found, config)


def served_row(engine: str, requirement: str, folder: Path, environment: Path) -> Row:
    """The head of a serving engine on what we convert for it, on the inputs that modelopt's head had."""
    exported, inputs, output = folder / engine, folder / "ours_there.safetensors", folder / f"{engine}.safetensors"
    convert(resolve_assistant("smollm2-135m"), exported, to=engine)
    command = [sys.executable, HERE / "engines_served.py", engine, exported, inputs, output]
    path = os.pathsep.join(map(str, (engine_path(requirement, environment), HERE)))
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": path})
    model = LiLiCorrDraftModel.from_pretrained(resolve_assistant("smollm2-135m"), dtype=torch.float32)
    found = load_file(output)
    right = found["target_layer_ids"].tolist() == model.config.target_layer_ids
    right = right and found["mask_token_id"] == model.config.mask_token_id
    config = "parsed by its own" if right else "misread"
    return compare(requirement.replace("==", " "), "our export, there", model, load_file(inputs), found, config)


def native_row(folder: Path, target, tokenizer) -> Row:
    """transformers' own DFlash loop with our drafter exported to it: its argmax blocks against ours."""
    convert(resolve_assistant("smollm2-135m"), folder / "native", to="transformers", head="drop")
    native = AutoModel.from_pretrained(folder / "native", dtype=torch.float32)
    drafter = DFlashModel.from_pretrained(resolve_assistant("smollm2-135m"), dtype=torch.float32)
    same = total = 0
    for prompt in PROMPTS:
        inputs = encode(tokenizer, prompt)
        blocks: dict[str, list[list[int]]] = {"ours": [], "native": []}
        for name, assistant, options in (
            ("ours", drafter, {}),
            ("native", native, {"speculation_type": "dflash"}),
        ):

            def see(module, args, output, seen=blocks[name]):
                seen.append(target.lm_head(output.last_hidden_state[0, 1:]).argmax(-1).tolist())

            hook = assistant.register_forward_hook(see)
            target.generate(**inputs, assistant_model=assistant, max_new_tokens=32, do_sample=False, **options)
            hook.remove()
        pairs = list(zip(blocks["ours"], blocks["native"], strict=False))
        same, total = same + sum(ours == theirs for ours, theirs in pairs), total + len(pairs)
    kind = type(native).__name__
    return Row("transformers", f"our drafter as its {kind}", total, same, None, "its own config class")


def rows(environments: Path) -> Iterator[Row]:
    target, tokenizer, _ = load_pair("smollm2-135m")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        yield from modelopt_rows(folder, environments / ".venv-modelopt", target)
        yield served_row("sglang", SGLANG, folder, environments / ".venv-engines")
        yield served_row("vllm", VLLM, folder, environments / ".venv-engines")
        yield native_row(folder, target, tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--environments", type=Path, default=Path("."), help="where .venv-* are made on first use")
    args = parser.parse_args()
    lines = [["engine", "what", "same blocks", "largest difference of cosines", "config.json"], ["---"] * 5]
    for line in (*lines, *(row.cells() for row in rows(args.environments))):
        sys.stdout.write("| " + " | ".join(line) + " |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

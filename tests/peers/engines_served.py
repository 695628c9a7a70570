"""The LiLiCorr heads of SGLang and vLLM on a checkpoint converted for them; started by `engines.py`.

Run are the engine's own files: the head, the walk as it is on a CPU, what parses config.json, and what compares the
names of tensors. Its linear layers and norms, which come with GPU kernels, are torch's.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from standins import Finder
from torch import nn
from transformers import Qwen3Config
from transformers.activations import ACT2FN


class ReplicatedLinear(nn.Linear):
    """Signature of both engines' layer of that name."""

    def __init__(self, input_size, output_size, bias=True, return_bias=True, **unquantized):
        super().__init__(input_size, output_size, bias=bias)
        self.input_size, self.output_size, self.return_bias = input_size, output_size, return_bias

    def forward(self, x):
        output = super().forward(x)
        return (output, None) if self.return_bias else output


class LinearBase(nn.Module):
    """No layer here is one."""


class MLP(nn.Module):
    """vLLM's module of that use, without its parallel layers."""

    def __init__(self, hidden_size, intermediate_size, hidden_act, output_size=None, **unquantized):
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, intermediate_size)
        self.act_fn = ACT2FN[hidden_act]
        self.down_proj = nn.Linear(intermediate_size, output_size or hidden_size)

    def forward(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)))


LAYERS = {"ReplicatedLinear": ReplicatedLinear, "LinearBase": LinearBase}


def join(name: str, prefix: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def run_sglang(fields, tensors, inputs):
    own = {"srt.models.lilicorr", "kernels.ops.speculative.lilicorr", "kernels.ops.speculative.dflash"}
    own |= {"srt.speculative.lilicorr_utils", "srt.speculative.dflash_utils"}
    provided = {
        "sglang.srt.layers.linear": LAYERS,
        "sglang.srt.layers.layernorm": {"RMSNorm": nn.RMSNorm},
        "sglang.srt.models.dflash": {"DFlashDraftModel": nn.Module},
        "sglang.srt.utils": {"add_prefix": join, "is_npu": lambda: False},
    }
    Finder("sglang", {f"sglang.{name}" for name in own}, ("triton",), provided).install()
    from sglang.srt.models.lilicorr import LiLiCorrHead, check_head_weight_coverage
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
    from sglang.srt.speculative.lilicorr_utils import parse_lilicorr_draft_config

    parsed = parse_dflash_draft_config(draft_hf_config=fields)
    settings = {"block_size": parsed.resolve_block_size(), "rms_norm_eps": fields["rms_norm_eps"]}
    config = parse_lilicorr_draft_config(draft_hf_config=fields)
    head = LiLiCorrHead(model_hidden_size=fields["hidden_size"], config=config, **settings)
    check_head_weight_coverage(head, {name for name in tensors if name.startswith("lilicorr.")})
    head.load_state_dict(of_head(tensors))
    head.materialize_inference_buffers(torch.device("cpu"), torch.float32)
    rows = len(inputs["anchor_hidden"])
    common = {
        "token_embeddings": inputs["token_embeds"],
        "candidate_log_probs": inputs["candidate_log_probs"],
        "pass_hidden": inputs["pass_hidden"],
        "anchor_hidden": inputs["anchor_hidden"],
        "anchor_valid": torch.ones(rows, dtype=torch.bool),
    }
    start, pair = head.log_factors(*head.score(**{name: value.unsqueeze(1) for name, value in common.items()}))
    tokens, _ = head.select_with_proposal(
        candidate_tokens=inputs["candidate_token_ids"],
        uniforms=torch.zeros(rows, parsed.block_size - 1),
        temperatures=torch.ones(rows),
        greedy_mask=torch.ones(rows, dtype=torch.bool),
        **common,
    )
    return {
        "start_scores": start[:, 0],
        "pair_scores": pair[:, 0],
        "token_ids": tokens,
        "target_layer_ids": torch.tensor(parsed.target_layer_ids),
        "mask_token_id": torch.tensor(parsed.mask_token_id),
    }


def run_vllm(fields, tensors, inputs):
    drafters = ("DFlashQwen3ForCausalLM", "DFlashQwen3Model")
    provided = {
        "vllm.model_executor.layers.linear": LAYERS,
        "vllm.model_executor.models.nemotron_h": {"NemotronHMLP": MLP},
        "vllm.model_executor.models.utils": {"maybe_prefix": lambda prefix, name: join(name, prefix)},
        "vllm.model_executor.models.qwen3_dflash": dict.fromkeys(drafters, nn.Module),
    }
    own = {"model_executor.models.lilicorr", "transformers_utils.configs.eagle"}
    own.add("v1.worker.gpu.spec_decode.eagle.eagle3_utils")
    Finder("vllm", {f"vllm.{name}" for name in own}, (), provided).install()
    from vllm.model_executor.models.lilicorr import LiLiCorrHead
    from vllm.transformers_utils.configs.eagle import EAGLEConfig
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

    read = EAGLEConfig(Qwen3Config.from_dict(fields), method="dflash")
    if read.architectures != ["LiLiCorrDraftModel"] or read.rope_parameters["rope_theta"] != fields["rope_theta"]:
        raise ValueError(f"vLLM would serve {read.architectures} with {read.rope_parameters}.")
    tapped = get_eagle3_aux_layers_from_config(SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=read)))

    head = LiLiCorrHead(
        model_hidden_size=fields["hidden_size"],
        block_size=fields["block_size"],
        rms_norm_eps=fields["rms_norm_eps"],
        config=fields["dflash_config"],
    )
    head.load_state_dict(of_head(tensors))
    head.materialize_inference_buffers(torch.device("cpu"), torch.float32)
    start, pair = head.score(
        token_embeddings=inputs["token_embeds"],
        candidate_log_probs=inputs["candidate_log_probs"],
        pass_hidden=inputs["pass_hidden"],
        anchor_hidden=inputs["anchor_hidden"],
        anchor_valid=torch.ones(len(inputs["anchor_hidden"]), dtype=torch.bool),
    )
    scale = fields["dflash_config"]["lilicorr_logit_scale"]
    return {
        "start_scores": scale * start,
        "pair_scores": scale * pair,
        # It counts the embeddings as a layer.
        "target_layer_ids": torch.tensor(tapped) - 1,
        "mask_token_id": torch.tensor(read.dflash_config["mask_token_id"]),
    }


def of_head(tensors):
    return {name.removeprefix("lilicorr."): t.float() for name, t in tensors.items() if name.startswith("lilicorr.")}


@torch.no_grad()
def main() -> None:
    engine, folder, inputs, output = sys.argv[1:]
    fields = json.loads((Path(folder) / "config.json").read_text())
    tensors = load_file(Path(folder) / "model.safetensors")
    run = {"sglang": run_sglang, "vllm": run_vllm}[engine]
    found = run(fields, tensors, load_file(inputs))
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, output)


if __name__ == "__main__":
    main()

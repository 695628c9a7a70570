"""Where the time of a block goes: the parts of draft and verification, as in table 3 of the LiLiCorr paper.

Shapes: `B` block size, `S = B - 1` slots, `L` tapped layers, `M` hidden width.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
from transformers.cache_utils import DFlashCache, DynamicCache

from .choices import drafters_beside, head_size, time_choices, time_drafts
from .modeling.cache_lilicorr import CACHE
from .modeling.configuration_lilicorr import LiLiCorrConfig, capture_layer_ids
from .modeling.decoding_lilicorr import block_decoding
from .modeling.generation_lilicorr import record
from .modeling.lattice_lilicorr import candidate_pool, greedy_walk
from .modeling.linears_lilicorr import packed_draft, packed_linears
from .modeling.logits_lilicorr import multiplies_in_bf16
from .modeling.modeling_dflash import DFlashModel
from .modeling.modeling_lilicorr import LiLiCorrDraftModel
from .modeling.scoring_lilicorr import MODES
from .modeling.target_lilicorr import TargetTables, states_to_return, tapped_states
from .stopwatch import Part, Stopwatch, read_bandwidth, size


if TYPE_CHECKING:
    from transformers import PreTrainedModel

PARTS = ("embed", "context", "drafter", "lm_head", "top-K", "head", "walk", "verify", "host")


@dataclass
class Shape:
    """Sizes of a target and of its assistant, for random weights."""

    target: Any
    fields: dict[str, Any]
    drafter_layers: int
    assistant: dict[str, Any]


def qwen3(hidden_size: int, intermediate_size: int) -> Shape:
    """A Qwen3 of 36 layers and the paper's assistant for it."""
    fields = {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    }
    return Shape(Qwen3Config, fields, 5, {"block_size": 16})


SMALL_HEAD = {"block_size": 8, "head_hidden_size": 256, "head_num_heads": 4, "factor_dim": 256}
SHAPES = {
    "tiny": Shape(
        LlamaConfig,
        {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": 4096,
        },
        2,
        SMALL_HEAD | {"head_hidden_size": 64, "factor_dim": 64},
    ),
    "smollm2-135m": Shape(
        LlamaConfig,
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "vocab_size": 49152,
        },
        3,
        SMALL_HEAD,
    ),
    "qwen3-4b": qwen3(2560, 9728),
    "qwen3-8b": qwen3(4096, 12288),
}


def random_pair(name: str, device: str, dtype: torch.dtype) -> "tuple[PreTrainedModel, LiLiCorrDraftModel]":
    """Target and assistant of a named shape, with random weights.

    Raises:
        `ValueError`: for a shape that has no name here.
    """
    if name not in SHAPES:
        raise ValueError(f"There is no shape {name!r}; there are {sorted(SHAPES)}.")
    shape = SHAPES[name]
    layers = shape.fields["num_hidden_layers"]
    config = LiLiCorrConfig(
        **shape.fields | {"num_hidden_layers": shape.drafter_layers},
        **shape.assistant,
        num_target_layers=layers,
        target_layer_ids=capture_layer_ids(layers, shape.drafter_layers),
        mask_token_id=shape.fields["vocab_size"] - 1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    with torch.device(device):
        target = AutoModelForCausalLM.from_config(shape.target(**shape.fields, eos_token_id=None), dtype=dtype)
        assistant: Any = LiLiCorrDraftModel(config)
    return target.eval(), assistant.to(dtype).eval()


@dataclass
class Profile:
    """A profile of blocks after `context` tokens.

    Args:
        gigabytes_per_second (`float`): what one large tensor was read at.
        parts (`list[Part]`): of a block.
        choices (`list[Part]`): other ways from the logits to the draft, and LiLiCorr's modes; see [`time_choices`].
        drafts (`list[Part]`): whole drafts by mode; see [`time_drafts`].
    """

    context: int
    rounds: int
    gigabytes_per_second: float
    parts: list[Part]
    choices: list[Part]
    drafts: list[Part]
    provenance: dict[str, Any]

    @property
    def total(self) -> float:
        return sum(part.milliseconds for part in self.parts)

    def percent(self, part: Part) -> float:
        return 100 * part.milliseconds / self.total

    def to_json(self) -> str:
        rows = [asdict(part) | {"percent": self.percent(part)} for part in self.parts]
        return json.dumps(asdict(self) | {"parts": rows, "total_milliseconds": self.total}, indent=2)


@torch.no_grad()
def profile(
    target: "PreTrainedModel",
    assistant: DFlashModel,
    context: int = 256,
    rounds: int = 20,
    provenance: dict[str, Any] | None = None,
    modes: Sequence[str] = MODES,
) -> Profile:
    """Times the parts of a block one after the other on random tokens, and the rest of a real `generate` call.

    Args:
        target (`PreTrainedModel`), assistant ([`DFlashModel`]): on one device. Only LiLiCorr's choice has parts; of
            other methods it is the "head".
        context (`int`): tokens before the first block.
        rounds (`int`): blocks to time, after two that are not.
        provenance (`dict`): what the profile is to be filed under.
        modes (sequence of `str`): scoring modes to compare, of those that can be had here. `compile` takes a while.
    """
    watch = Stopwatch(target.device)
    blocks = Blocks(target, assistant, context, watch)
    for _ in range(rounds + 2):
        blocks.run()
    bandwidth = read_bandwidth(target.device)
    sizes = weights(target, assistant)
    milliseconds = {name: watch.milliseconds(name) for name in PARTS if name in watch.seconds}
    milliseconds["host"] = host_milliseconds(target, assistant, context, rounds)
    parts = [
        Part(name, time, sizes.get(name, 0) / 1e6, 1e3 * sizes.get(name, 0) / bandwidth)
        for name, time in milliseconds.items()
    ]
    choices = time_choices(drafters_beside(assistant), blocks.tables, rounds, bandwidth, modes=modes)
    drafts = time_drafts(assistant, blocks.tables, context, rounds, bandwidth, modes)
    return Profile(context, rounds, bandwidth / 1e9, parts, choices, drafts, provenance or {})


class Blocks:
    """Blocks of a growing text, each drafted and verified part by part, as the decoding loop does it at once."""

    def __init__(self, target: "PreTrainedModel", assistant: DFlashModel, context: int, watch: Stopwatch):
        self.target: Any = target
        self.assistant: Any = assistant
        self.watch = watch
        self.tables = TargetTables(target)
        self.packed = packed_linears(target, assistant.packed_weights)
        self.packed_draft = packed_draft(assistant)
        self.config = assistant.config
        self.cache, self.draft_cache = DynamicCache(config=target.config), DFlashCache(config=self.config)
        ids = torch.randint(self.config.vocab_size, (1, context), device=target.device)
        self.states = self.read(ids)
        self.seen = 0

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """The target's pass over `ids [1, n]`: its tapped states `[1, n, L * M]`."""
        output = self.target(
            input_ids=ids,
            **{CACHE: self.cache},
            use_cache=True,
            output_hidden_states=states_to_return(self.config.target_layer_ids),
            logits_to_keep=ids.shape[1],
        )
        return tapped_states(output.hidden_states, self.config.target_layer_ids)

    def run(self) -> None:
        """One block, of which the anchor and half the draft count as accepted."""
        assistant, watch, block = self.assistant, self.watch, self.config.block_size
        rows = self.states.shape[1]
        watch.restart()
        anchor = torch.randint(self.config.vocab_size, (1, 1), device=self.target.device)
        noise = self.tables.embed(assistant.block_ids(anchor)).to(assistant.dtype)
        self.draft_cache.set_previous_accepted_tokens(rows)
        positions = torch.arange(self.seen, self.seen + rows + block, device=anchor.device).unsqueeze(0)
        watch.stamp("embed")
        handle = assistant.hidden_norm.register_forward_hook(lambda *_: watch.stamp("context"))
        with self.packed_draft:
            output = assistant(
                noise_embeds=noise,
                context_hidden_states=self.states.to(assistant.dtype),
                position_ids=positions,
                cache=self.draft_cache,
            )
            self.draft_cache.crop(-block)
            watch.stamp("drafter")
            logits = self.tables.logits(output.last_hidden_state, assistant.draft_product)[:, assistant.slot_rows]
            watch.stamp("lm_head")
            draft = self.choose(logits, output, anchor)
        handle.remove()
        with self.packed:
            states = self.read(torch.cat([anchor, draft], dim=-1))
        watch.stamp("verify")
        self.seen += rows
        drafted = draft.shape[1]
        kept = 1 + drafted // 2
        self.cache.crop(kept - 1 - drafted)
        self.states = states[:, :kept]

    def choose(self, logits: torch.Tensor, output: Any, anchor: torch.Tensor) -> torch.Tensor:
        """The draft, given the slots' logits; LiLiCorr's op by op."""
        assistant, watch = self.assistant, self.watch
        if not isinstance(assistant, LiLiCorrDraftModel):
            draft = assistant.choose(logits, output, anchor, self.tables).token_ids
            watch.stamp("head")
            return draft
        ids, log_probs = candidate_pool(logits, self.config.candidate_topk)
        watch.stamp("top-K")
        embeds = self.tables.embed(ids).to(assistant.dtype)
        start, pair = assistant.scoring.fold(assistant.lilicorr)(
            embeds, log_probs, output.last_hidden_state[:, assistant.slot_rows], output.context_hidden_states[:, -1]
        )
        watch.stamp("head")
        draft = ids.gather(-1, greedy_walk(start, pair).unsqueeze(-1)).squeeze(-1)
        watch.stamp("walk")
        return draft


def host_milliseconds(target: Any, assistant: DFlashModel, context: int, rounds: int) -> float:
    """What a block of `generate` takes outside the draft and the target's pass, the median of a call."""
    ids = torch.randint(assistant.config.vocab_size, (1, context), device=target.device)
    watch, ends = Stopwatch(target.device), [0.0]
    handles = [
        target.register_forward_pre_hook(lambda *_: watch.restart()),
        target.register_forward_hook(lambda *_: watch.stamp("pass")),
    ]
    with record(on_block=lambda _: ends.append(watch.now())) as recording:
        target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            custom_generate=block_decoding(assistant, tree_budget=0),
            do_sample=False,
            min_new_tokens=rounds + 4,
            max_new_tokens=rounds + 4,
        )
    for handle in handles:
        handle.remove()
    passes = watch.seconds["pass"][1:]
    blocks = zip(ends[1:], ends[2:], recording.blocks[1:], passes[1:], strict=False)
    return 1e3 * statistics.median(after - before - block.draft_seconds - run for before, after, block, run in blocks)


def weights(target: "PreTrainedModel", assistant: DFlashModel) -> dict[str, int]:
    """Bytes of weights that each part reads once a block."""
    model: Any = assistant
    output_head: Any = target.get_output_embeddings()
    embedding: Any = target.get_input_embeddings()
    # In a draft a CPU may read a copy in bf16.
    head = 2 * output_head.weight.numel() if multiplies_in_bf16(output_head) else size(output_head)
    body = size(target) - (0 if embedding.weight is output_head.weight else size(embedding))
    return {
        "context": size(model.fc) + size(model.hidden_norm),
        "drafter": size(model.layers) + size(model.norm),
        "lm_head": head,
        "head": head_size(assistant),
        "verify": body,
    }


def draw(result: Profile, path: Path) -> None:
    """Bars of the parts, with what reading their weights alone would take.

    Raises:
        `ImportError`: without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("A picture needs matplotlib: `pip install matplotlib`.") from error
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    axes = figure.subplots()
    names = [part.name for part in result.parts]
    axes.barh(names, [part.milliseconds for part in result.parts], color="#4477aa", label="measured")
    floors = [part.floor_milliseconds for part in result.parts]
    axes.barh(names, floors, height=0.35, color="#ee6677", label="reading the weights once")
    for part in result.parts:
        axes.annotate(
            f" {part.milliseconds:.2f} ms, {result.percent(part):.1f}%", (part.milliseconds, part.name), va="center"
        )
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlabel(f"ms a block, {result.context} tokens of context; {result.total:.1f} ms in all")
    axes.legend(loc="lower right")
    figure.savefig(path)


__all__ = ["SHAPES", "Part", "Profile", "draw", "profile", "random_pair"]

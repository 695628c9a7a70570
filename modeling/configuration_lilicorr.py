# Copyright 2026 The lilicorr_hf authors. Licensed under the Apache License, Version 2.0.
"""Configuration of a block drafter and its LiLiCorr head, and the reading of other projects' config files."""

from dataclasses import field
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config


# Our flat field for each key that serving engines nest under `dflash_config`.
SERVED_HEAD_FIELDS = {
    "lilicorr_candidate_topk": "candidate_topk",
    "lilicorr_hidden_size": "head_hidden_size",
    "lilicorr_num_layers": "head_num_layers",
    "lilicorr_num_heads": "head_num_heads",
    "lilicorr_mlp_ratio": "head_mlp_ratio",
    "lilicorr_factor_dim": "factor_dim",
    "lilicorr_vector_eps": "vector_eps",
    "lilicorr_logit_scale": "logit_scale",
}
SERVED_DRAFTER_FIELDS = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "conv_kernel_size",
    "conv_group_size",
)
# They change the scores but not a single tensor shape, so a wrong default would never be noticed.
SCORE_FIELDS = ("vector_eps", "logit_scale")
# The same of the drafter's in the files of others; ours state everything.
FOREIGN_FIELDS = ("block_size", "num_target_layers", "rms_norm_eps", "vocab_size")
# Published DSpark drafters: what they must state besides, what must be true if stated, what only training uses.
DSPARK_ARCHITECTURE = "Qwen3DSparkModel"
DSPARK_FIELDS = ("markov_head_type", "target_layer_ids")
DSPARK_CONDITIONS = ("confidence_head_with_markov", "enable_confidence_head", "sample_from_anchor")
DSPARK_TRAINING_FIELDS = ("num_anchors",)
MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
# Other names of the tapped layers, counted with the embeddings as number 0.
SHIFTED_LAYER_FIELDS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
# What other methods and variants state; with any of these set, the drafter computes something else than ours.
UNSUPPORTED_FIELDS = (
    "attention_sink_bias",
    "attention_value_scale",
    "quantization_config",
    "sample_from_anchor",
    "selector_rank",
    "selector_top_k",
    "speculators_model_type",
    "use_gemma_norm",
    "use_swa",
)
KNOWN_ARCHITECTURES = (
    "DFlashDraftModel",
    "DFlashModel",
    "LiLiCorrDraftModel",
    "MuseGlimmerAssistantModel",
    DSPARK_ARCHITECTURE,
)


def capture_layer_ids(num_target_layers: int, num_taps: int) -> list[int]:
    """Decoder layers of the target whose outputs feed the drafter, counted from 0 (DFlash, section 3).

    Args:
        num_target_layers (`int`): decoder layers of the target, `n`.
        num_taps (`int`): layers to capture, `L`; `id_i = round(1 + i (n - 4) / (L - 1))`, half to even.
    """
    if num_taps == 1:
        return [num_target_layers // 2]
    first, last = min(1, num_target_layers - 1), max(1, num_target_layers - 3)
    return [round(first + i * (last - first) / (num_taps - 1)) for i in range(num_taps)]


def check_tree_budget(tree_budget: int | None, sampled_walk: bool) -> None:
    """Raises `ValueError` for a tree that cannot be drafted."""
    if tree_budget is not None and tree_budget < 0:
        raise ValueError(f"`tree_budget` must be 0, for chains, or a number of tokens, got {tree_budget}.")
    if tree_budget and sampled_walk:
        raise ValueError("A tree is not drawn at random: give either `tree_budget` or `sampled_walk`, not both.")


@strict
class LiLiCorrConfig(Qwen3Config):
    r"""
    Configuration of a [`DFlashModel`] drafter and, for a [`LiLiCorrDraftModel`], of its head. The defaults are the
    paper's drafter for Qwen3-8B, except `mask_token_id`, which every checkpoint has to choose. Fields not listed are
    those of [`Qwen3Config`] and describe the drafter's own layers; `vocab_size` and `hidden_size` equal the target's.

    Args:
        block_size (`int`): positions of a block, `B`: the anchor and `B - 1` slots.
        mask_token_id (`int`): token that stands for a slot still to be drafted; a row of the target's embedding.
        target_layer_ids (`list[int]`): tapped decoder layers of the target, from 0; the state is the layer's output.
            Empty: spread over the target by [`capture_layer_ids`], one for each drafter layer.
        num_target_layers (`int`): decoder layers of the target.
        target_name_or_path (`str`): the target the drafter was trained for.
        candidate_topk (`int`): candidates kept per slot, `K`.
        head_hidden_size (`int`): width of the head, `H`; 0 stands for `hidden_size`.
        head_num_layers (`int`): lattice attention layers.
        head_num_heads (`int`): their attention heads.
        head_mlp_ratio (`float`): width of their MLP over `H`.
        factor_dim (`int`): dimension of the in and out vectors, `E`.
        vector_eps (`float`): smallest norm the in and out vectors are divided by.
        logit_scale (`float`): scale of a cosine in the scores, `sigma` in equation 1 of the paper.
        sampled_walk (`bool`): whether sampling targets get drafts drawn at their temperature, verified against what
            they were drawn from, instead of the greedy walk. Either way is exact.
        adaptive_draft (`bool`): whether a call of one sequence cuts drafts, and pauses drafting, where its own times
            say that plain decoding is faster. The text is the same; how it falls into blocks depends on the clock.
        scoring (`str`): how a draft is computed, or its scores where no more can be: `"eager"`, `"compile"` or
            `"cuda_graph"`; unset, the environment's `LILICORR_SCORING`, or else the last on a GPU and the first
            elsewhere.
        tree_budget (`int`): tokens drafted as a tree of the most probable continuations, which the target verifies in
            one pass; 0 drafts one chain. Unset, a tree of as many tokens as a chain has, where a CPU verifies it.
        tree_weight (`float`): weight in [0, 1] of the drafter beside the head in how probable a continuation is; see
            [`conditional_log_probs`]. 1 leaves the head out. `lilicorr fit-tree` measures which is best.
        conv_kernel_size (`int`): taps of the convolutions around the drafter's sublayers; 0 for none.
        conv_group_size (`int`): channels that share one of their dynamic kernels; 0 for none.
        gru_hidden_dim (`int`): state of a [`DominoModel`]'s recurrent cell.
        emb_dim (`int`): rank of its correction.
        pure_draft_prefix_len (`int`): first drafts that it leaves to the drafter.
        shift_label (`bool`): whether row `i` of its block predicts the token after it, the anchor's row the first one.
        markov_rank (`int`): rank of a [`DSparkModel`]'s head.
        markov_head_type (`str`): its variant: vanilla, gated or rnn.
        selector_rank (`int`): rank of a [`DFlash2Model`]'s candidate selector.
        context_window (`int`): context rows the drafter sees and keeps, the last ones; `None` for all of them.

    Raises:
        `ValueError`: for geometry that no drafter can have; each message names the field and what it must be.
    """

    model_type = "lilicorr"
    default_theta = 1_000_000.0

    intermediate_size: int = 12288
    num_hidden_layers: int = 5
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 40960

    block_size: int = 16
    mask_token_id: int | None = None
    target_layer_ids: list[int] = field(default_factory=list)
    num_target_layers: int = 36
    target_name_or_path: str | None = None

    candidate_topk: int = 8
    head_hidden_size: int = 1024
    head_num_layers: int = 2
    head_num_heads: int = 8
    head_mlp_ratio: float | int = 2.0
    factor_dim: int = 1024
    vector_eps: float = 1e-4
    logit_scale: float | int = 8.0
    sampled_walk: bool = False
    adaptive_draft: bool = False
    scoring: str | None = None
    tree_budget: int | None = None
    tree_weight: float | int = 0.7

    conv_kernel_size: int = 0
    conv_group_size: int = 0
    gru_hidden_dim: int = 1024
    emb_dim: int = 256
    pure_draft_prefix_len: int = 1
    shift_label: bool = True
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    selector_rank: int = 256
    context_window: int | None = None

    def __post_init__(self, **kwargs):
        if not self.target_layer_ids:
            self.target_layer_ids = capture_layer_ids(self.num_target_layers, self.num_hidden_layers)
        if self.head_hidden_size == 0:
            self.head_hidden_size = self.hidden_size
        super().__post_init__(**kwargs)

    @property
    def num_slots(self) -> int:
        """Slots of a block, `S = B - 1`; the anchor is not one."""
        return self.block_size - 1

    def validate_block(self):
        if self.block_size < 2:
            raise ValueError(f"`block_size` counts the anchor and must be at least 2, got {self.block_size}.")
        if not 1 <= self.candidate_topk <= self.vocab_size:
            raise ValueError(f"`candidate_topk` must lie in [1, {self.vocab_size}], got {self.candidate_topk}.")
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` {self.mask_token_id} is outside the target's embedding table of {self.vocab_size} "
                "rows. Choose an unused token of the target's vocabulary."
            )

    def validate_tree(self):
        check_tree_budget(self.tree_budget, self.sampled_walk)
        if not 0 <= self.tree_weight <= 1:
            raise ValueError(f"`tree_weight` must lie in [0, 1], got {self.tree_weight}.")

    def validate_convolution(self):
        taps, group = self.conv_kernel_size, self.conv_group_size
        if (taps == 0) != (group == 0):
            raise ValueError(
                f"`conv_kernel_size` {taps} and `conv_group_size` {group} go together; give both or none."
            )
        if group and self.hidden_size % group:
            raise ValueError(f"`hidden_size` {self.hidden_size} is not a multiple of `conv_group_size` {group}.")

    def validate_window(self):
        if self.context_window is not None and self.context_window < 1:
            raise ValueError(f"`context_window` must be at least 1 row, or `None` for all, got {self.context_window}.")

    def validate_markov(self):
        if self.markov_rank < 1:
            raise ValueError(f"`markov_rank` must be at least 1, got {self.markov_rank}.")
        if self.markov_head_type not in MARKOV_HEAD_TYPES:
            raise ValueError(f"`markov_head_type` is one of {MARKOV_HEAD_TYPES}, not {self.markov_head_type!r}.")

    def validate_taps(self):
        ids, n = self.target_layer_ids, self.num_target_layers
        if len(set(ids)) != len(ids):
            raise ValueError(
                f"`target_layer_ids` {ids} repeat a layer: a target of {n} layers is too shallow for {len(ids)} taps. "
                "Use fewer drafter layers or give distinct ids."
            )
        if min(ids) < 0 or max(ids) > n - 2:
            raise ValueError(
                f"`target_layer_ids` {ids} must lie in [0, {n - 2}] for a target of {n} layers; the output of its "
                f"last layer, {n - 1}, is only available after the final norm."
            )

    def validate_layers(self):
        if self.head_hidden_size % self.head_num_heads:
            raise ValueError(
                f"`head_hidden_size` {self.head_hidden_size} is not a multiple of `head_num_heads` "
                f"{self.head_num_heads}."
            )
        if set(self.layer_types) != {"full_attention"}:
            raise ValueError(
                f"Only `full_attention` drafter layers are supported, got `layer_types` {self.layer_types}."
            )

    @classmethod
    def get_config_dict(cls, *args, **kwargs) -> tuple[dict[str, Any], dict[str, Any]]:
        config_dict, kwargs = super().get_config_dict(*args, **kwargs)
        return flatten_config(config_dict), kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        return super().from_dict(flatten_config(config_dict), **kwargs)


def flatten_config(config_dict: dict[str, Any]) -> dict[str, Any]:
    """Any known `config.json` of a drafter as the keyword arguments of [`LiLiCorrConfig`]; ours come back unchanged.

    Served checkpoints say `model_type: qwen3` and nest the block fields under `dflash_config`; older ones put them at
    the top level, and write `rope_theta` or `rope_parameters`.

    Raises:
        `ValueError`: for variants that would decode wrongly without an error, and for scores left to a default.
    """
    flat = dict(config_dict)
    nested = flat.pop("dflash_config", None) or {}
    if nested or flat.get("model_type") != LiLiCorrConfig.model_type:
        refuse_unsupported(flat | nested)
        read_foreign(flat, nested)
    flat["model_type"] = LiLiCorrConfig.model_type

    has_head = (
        "LiLiCorrDraftModel" in (flat.get("architectures") or ())
        or nested.get("lilicorr_enabled")
        or "lilicorr" in (nested.get("projector_type"), flat.get("projector_type"))
    )
    unset = [name for name in SCORE_FIELDS if flat.get(name) is None]
    if has_head and unset:
        raise ValueError(
            f"config.json of a LiLiCorr checkpoint does not state {unset}. They change scores but no tensor shape, so "
            "they are never guessed: add what the head was trained with, or let `lilicorr convert --set NAME=VALUE` "
            "do so."
        )
    return flat


def read_foreign(flat: dict[str, Any], nested: dict[str, Any]) -> None:
    """Gives the fields of another project's config our names and places."""
    for name in SERVED_DRAFTER_FIELDS:
        if name in nested:
            flat[name] = nested[name]
    for served_name, name in SERVED_HEAD_FIELDS.items():
        if served_name in nested:
            flat[name] = nested[served_name]
    flat["rope_parameters"] = read_rope(flat)
    for name in SHIFTED_LAYER_FIELDS:
        if (shifted := flat.pop(name, None)) is not None:
            ids = [number - 1 for number in shifted]
            if flat.setdefault("target_layer_ids", ids) != ids:
                raise ValueError(
                    f"config.json taps two sets of layers: `target_layer_ids` {flat['target_layer_ids']}, `{name}` "
                    f"{shifted}, which counts the embeddings and so means {ids}."
                )
    names = [*FOREIGN_FIELDS]
    if DSPARK_ARCHITECTURE in (flat.get("architectures") or ()):
        read_dspark(flat)
        names += DSPARK_FIELDS
    unset = [name for name in names if flat.get(name) in (None, [])]
    if unset:
        raise ValueError(
            f"config.json does not state {unset}. They change drafts but no tensor shape, so they are never guessed: "
            "add what the drafter was trained with, or let `lilicorr convert --set NAME=VALUE` do so."
        )


def read_dspark(flat: dict[str, Any]) -> None:
    """Gives a published DSpark drafter the name of our class; raises for variants that the class cannot hold."""
    others = {name: flat[name] for name in ("markov_rank", *DSPARK_CONDITIONS) if not flat.get(name, True)}
    if others:
        raise ValueError(
            f"The checkpoint is of a DSpark variant that is not supported: it sets {others}. Take one trained to "
            "predict from the anchor, with a Markov head and a confidence head that reads its embeddings."
        )
    for name in (*DSPARK_CONDITIONS, *DSPARK_TRAINING_FIELDS):
        flat.pop(name, None)
    flat["architectures"] = ["DSparkModel"]


def refuse_unsupported(fields: dict[str, Any]) -> None:
    """Raises for a drafter of another project whose computation differs from [`DFlashModel`]'s."""
    unknown = [name for name in fields.get("architectures") or () if name not in KNOWN_ARCHITECTURES]
    projector = fields.get("projector_type")
    if projector not in (None, "dflash", "lilicorr"):
        raise ValueError(f"`projector_type` {projector!r} is not supported; supported are 'dflash' and 'lilicorr'.")
    if unknown:
        raise ValueError(f"Architecture {unknown[0]!r} is another method; supported are {[*KNOWN_ARCHITECTURES]}.")
    if fields.get("causal") or fields.get("is_causal"):
        raise ValueError("Causal draft attention (`causal: true`) is not supported; blocks are bidirectional.")
    dspark = DSPARK_CONDITIONS if DSPARK_ARCHITECTURE in (fields.get("architectures") or ()) else ()
    others = {name: fields[name] for name in UNSUPPORTED_FIELDS if fields.get(name) and name not in dspark}
    for name, neutral in (("draft_vocab_size", fields.get("vocab_size")), ("output_multiplier", 1.0)):
        if fields.get(name, neutral) not in (None, neutral):
            others[name] = fields[name]
    if others:
        raise ValueError(f"The checkpoint is of a variant that is not supported: it sets {others}.")


def read_rope(config_dict: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters of a foreign config, popped from where it keeps them; a wrong base would pass unnoticed."""
    legacy, theta = config_dict.pop("rope_scaling", None), config_dict.pop("rope_theta", None)
    rope = dict(config_dict.get("rope_parameters") or legacy or {"rope_type": "default"})
    stated = rope.setdefault("rope_theta", theta)
    if stated is None:
        raise ValueError(
            "config.json states neither `rope_theta` nor `rope_parameters.rope_theta`; add the drafter's."
        )
    if theta is not None and theta != stated:
        raise ValueError(f"config.json states two rotary bases: rope_theta {theta}, rope_parameters {stated}.")
    return rope


__all__ = ["LiLiCorrConfig", "capture_layer_ids", "check_tree_budget"]

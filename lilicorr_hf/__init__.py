"""Exact speculative decoding for transformers: a block drafter and the LiLiCorr head as one assistant model.

    assistant = LiLiCorrDraftModel.from_pretrained(...)
    target.generate(**inputs, assistant_model=assistant)

Importing the package is enough for `generate` to know such assistants; see [`install_hook`].
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .architectures import DRAFTERS, Architectures, NoLanguageModel
from .modeling.configuration_lilicorr import LiLiCorrConfig
from .modeling.generation_lilicorr import Recording, record
from .modeling.hook_lilicorr import attach, install_hook, install_hook_or_refuse, stock_loop, uninstall_hook
from .modeling.lattice_lilicorr import Lattice, greedy_walk, sampled_walk, viterbi_path
from .targets import fetch_target


if TYPE_CHECKING:
    from .modeling.decoding_lilicorr import block_decoding
    from .modeling.modeling_dflash import DFlashModel, DraftOutput
    from .modeling.modeling_dflash2 import DFlash2Model
    from .modeling.modeling_domino import DominoModel
    from .modeling.modeling_dspark import DSparkModel
    from .modeling.modeling_lilicorr import LiLiCorrDraftModel, LiLiCorrHead
    from .pairs import load_pair

__version__ = version("lilicorr_hf")

# Imported when first asked for: they bring along what transformers itself only loads with its first model.
LAZY = DRAFTERS | {
    "DraftOutput": "modeling.modeling_dflash",
    "LiLiCorrHead": "modeling.modeling_lilicorr",
    "block_decoding": "modeling.decoding_lilicorr",
    "load_pair": "pairs",
}


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(import_module(f".{LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


install_hook_or_refuse()
AutoConfig.register(LiLiCorrConfig.model_type, LiLiCorrConfig)
AutoModel.register(LiLiCorrConfig, Architectures())
AutoModelForCausalLM.register(LiLiCorrConfig, NoLanguageModel)
LiLiCorrConfig.register_for_auto_class()

__all__ = [
    "DFlash2Model",
    "DFlashModel",
    "DSparkModel",
    "DominoModel",
    "DraftOutput",
    "Lattice",
    "LiLiCorrConfig",
    "LiLiCorrDraftModel",
    "LiLiCorrHead",
    "Recording",
    "attach",
    "block_decoding",
    "fetch_target",
    "greedy_walk",
    "install_hook",
    "load_pair",
    "record",
    "sampled_walk",
    "stock_loop",
    "uninstall_hook",
    "viterbi_path",
]

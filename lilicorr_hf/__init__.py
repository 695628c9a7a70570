"""Exact speculative decoding for transformers: a block drafter and the LiLiCorr head as one assistant model.

    assistant = LiLiCorrDraftModel.from_pretrained(...)
    target.generate(**inputs, assistant_model=assistant)

Importing the package is enough for `generate` to know such assistants; see [`install_hook`].
"""

from importlib.metadata import version

from transformers import AutoConfig, AutoModel

from .modeling.configuration_lilicorr import LiLiCorrConfig
from .modeling.generation_lilicorr import Recording, record
from .modeling.hook_lilicorr import attach, install_hook, uninstall_hook
from .modeling.lattice_lilicorr import Lattice, greedy_walk, sampled_walk, viterbi_path
from .modeling.modeling_dflash import DFlashModel, DraftOutput
from .modeling.modeling_lilicorr import LiLiCorrDraftModel, LiLiCorrHead
from .pairs import load_pair
from .targets import fetch_target


__version__ = version("lilicorr_hf")

AutoConfig.register(LiLiCorrConfig.model_type, LiLiCorrConfig)
# One model type, two architectures: the config's `architectures` says whether a checkpoint carries a head.
AutoModel.register(LiLiCorrConfig, (LiLiCorrDraftModel, DFlashModel))
LiLiCorrConfig.register_for_auto_class()
LiLiCorrDraftModel.register_for_auto_class("AutoModel")
DFlashModel.register_for_auto_class("AutoModel")

__all__ = [
    "DFlashModel",
    "DraftOutput",
    "Lattice",
    "LiLiCorrConfig",
    "LiLiCorrDraftModel",
    "LiLiCorrHead",
    "Recording",
    "attach",
    "fetch_target",
    "greedy_walk",
    "install_hook",
    "load_pair",
    "record",
    "sampled_walk",
    "uninstall_hook",
    "viterbi_path",
]

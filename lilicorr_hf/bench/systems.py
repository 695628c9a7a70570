"""What can be measured, by name; another draft method takes one function here.

A system is written `name`, or `name:option=value,option=value`: `lilicorr:k=4`, `dflash:path=runs/dflash`.
"""

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import CompileConfig

from lilicorr_hf.modeling.configuration_lilicorr import LiLiCorrConfig
from lilicorr_hf.modeling.modeling_dflash import DFlashModel
from lilicorr_hf.modeling.modeling_lilicorr import LiLiCorrDraftModel
from lilicorr_hf.pairs import assistant_class, resolve_assistant

from .variants import SERVING_FIELDS, WALKS, StockLoopModel, load_variant


if TYPE_CHECKING:
    from transformers import PreTrainedModel

PLAIN, CHECKPOINT = "plain", "checkpoint"


@dataclass(frozen=True)
class Setting:
    """What systems are built for.

    Args:
        target (`PreTrainedModel`): whose text it is.
        assistant (`str`): the checkpoint under test: a shipped pair's name, a path or a Hub id.
        longest (`int`): positions of the longest sequence there will be.
    """

    target: "PreTrainedModel"
    assistant: str
    longest: int = 0


@dataclass(frozen=True)
class Method:
    """A way to decode.

    Args:
        words (`str`): what it is, in a line.
        build (`Callable`): from a [`Setting`] and the options of the spec to keyword arguments for `generate`.
        batches (`bool`): whether it takes more than one sequence at a time.
    """

    words: str
    build: Callable[..., dict[str, Any]]
    batches: bool = True


METHODS: dict[str, Method] = {}


def method(name: str, batches: bool = True) -> Callable:
    """Registers the function that builds a method; its keyword arguments are the options a spec can set."""

    def register(build: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        METHODS[name] = Method(" ".join((build.__doc__ or "").split()), build, batches)
        return build

    return register


@dataclass(frozen=True)
class System:
    """One column of the tables.

    Args:
        spec (`str`): as the user wrote it.
        name (`str`): of its method.
        options (`dict`): for [`Method.build`].
    """

    spec: str
    name: str
    options: dict[str, Any]

    @property
    def label(self) -> str:
        """The spec without folders of this machine; another checkpoint by its name alone, `checkpoint:NAME`."""
        options = [f"{k}={Path(v).name if k == 'path' else v}" for k, v in self.options.items()]
        if self.name == CHECKPOINT:
            options = [option.removeprefix("path=") for option in options]
        return ":".join([self.name, *([",".join(options)] if options else [])])

    def weights(self) -> list[Path]:
        """Files of the checkpoint in a folder that it names, if it names one."""
        return sorted(Path(self.options["path"]).glob("*.safetensors")) if "path" in self.options else []

    @property
    def batches(self) -> bool:
        return METHODS[self.name].batches

    def build(self, setting: Setting) -> dict[str, Any]:
        """Keyword arguments for `generate`, models loaded."""
        return METHODS[self.name].build(setting, **self.options)


def parse_system(spec: str) -> System:
    """
    Raises:
        `ValueError`: for a name nobody registered, and for options its method does not have.
    """
    name, _, rest = spec.partition(":")
    if name not in METHODS:
        raise ValueError(f"Unknown system {name!r}; known are {', '.join(METHODS)}.")
    parameters = dict(list(inspect.signature(METHODS[name].build).parameters.items())[1:])
    takes_fields = parameters.pop("fields", None) is not None
    known = [*parameters, *(SERVING_FIELDS if takes_fields else ())]
    options: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        key, equals, value = pair.partition("=")
        if key not in known or not equals:
            wanted = ", ".join(f"{option}=..." for option in known) or "none"
            raise ValueError(f"System {spec!r}: {pair!r} is not an option of {name!r}; it has {wanted}.")
        options[key] = value
        if key not in parameters:
            options[key] = field_value(value)
        elif parameters[key].annotation in (int, int | None):
            if not value.isdecimal():
                raise ValueError(f"System {spec!r}: {key!r} takes a whole number, got {value!r}.")
            options[key] = int(value)
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in options:
            raise ValueError(f"System {spec!r} needs an option: {name}:{key}=...")
    return System(spec, name, options)


def field_value(text: str) -> Any:
    """A number or truth value as JSON writes it; any other text as it is."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def parse_systems(specs: list[str]) -> list[System]:
    """Plain decoding first, which everything is compared with, then each system once."""
    systems = [parse_system(spec) for spec in dict.fromkeys([PLAIN, *specs])]
    labels = [system.label for system in systems]
    if len(set(labels)) < len(labels):
        raise ValueError(f"Two systems would both be called {next(x for x in labels if labels.count(x) > 1)!r}.")
    return systems


def assisted(setting: Setting, path: str | None, model_class: type[DFlashModel], **how: Any) -> dict[str, Any]:
    """A checkpoint of ours, by default that under test, drafting chains; `how` is for [`load_variant`]."""
    folder, how = path or setting.assistant, {"tree_budget": 0} | how
    return {"assistant_model": load_variant(folder, setting.target, model_class, longest=setting.longest, **how)}


def tree_of(setting: Setting, path: str | None, nodes: int | None) -> int:
    """`nodes`, or else as many tokens as a chain of the checkpoint has."""
    if nodes is not None:
        return nodes
    return LiLiCorrConfig.from_pretrained(resolve_assistant(path or setting.assistant)).num_slots


def in_cache(setting: Setting, cache: str | None) -> dict[str, Any]:
    """The target's cache: one that grows, or one of fixed size, whose passes transformers compiles on a GPU."""
    if cache is None:
        return {}
    # A pass of another width, or another batch, is compiled for itself, as if there were no other.
    config = CompileConfig(dynamic=False)
    return {"cache_implementation": cache, "max_cache_len": setting.longest, "compile_config": config}


@method(PLAIN)
def plain(setting: Setting, cache: str | None = None) -> dict[str, Any]:
    """the target alone: `generate` without an assistant; `cache` static for a fixed one, compiled on GPUs"""
    return in_cache(setting, cache)


@method("lilicorr")
def lilicorr(
    setting: Setting,
    path: str | None = None,
    walk: str = "greedy",
    k: int | None = None,
    block: int | None = None,
    yarn: int | None = None,
    cache: str | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """the drafter with its head; `walk` greedy or viterbi, fewer candidates `k`, a shorter `block`, `yarn` beyond so
    many positions, `cache` as in plain, and fields of the config such as `sampled_walk`"""
    if walk not in WALKS:
        raise ValueError(f"Unknown walk {walk!r}; known are {', '.join(WALKS)}.")
    drafting = assisted(setting, path, WALKS[walk], k=k, block=block, yarn=yarn, **fields)
    return drafting | in_cache(setting, cache)


@method("argmax")
def argmax(
    setting: Setting, path: str | None = None, block: int | None = None, yarn: int | None = None, **fields: Any
) -> dict[str, Any]:
    """the same drafter without its head: each slot's most probable token"""
    return assisted(setting, path, DFlashModel, block=block, yarn=yarn, **fields)


@method("lilicorr-tree")
def lilicorr_tree(
    setting: Setting, nodes: int | None = None, path: str | None = None, **fields: Any
) -> dict[str, Any]:
    """a tree of `nodes` tokens, by default as many as a chain has, grown by the head's scores"""
    return assisted(setting, path, LiLiCorrDraftModel, tree_budget=tree_of(setting, path, nodes), **fields)


@method("ddtree")
def ddtree(setting: Setting, nodes: int | None = None, path: str | None = None) -> dict[str, Any]:
    """a tree of `nodes` tokens, by default as many as a chain has, grown by the drafter's own probabilities"""
    return assisted(setting, path, DFlashModel, tree_budget=tree_of(setting, path, nodes))


@method("dflash")
def dflash(setting: Setting, path: str) -> dict[str, Any]:
    """a drafter trained alone, from its own checkpoint"""
    return assisted(setting, path, DFlashModel)


@method(CHECKPOINT)
def checkpoint(setting: Setting, path: str, **fields: Any) -> dict[str, Any]:
    """any other checkpoint (Domino, DSpark, DFlash2, ...) as the class its config names"""
    return assisted(setting, path, assistant_class(resolve_assistant(path)), **fields)


@method("stock-loop", batches=False)
def stock_loop(setting: Setting, path: str | None = None) -> dict[str, Any]:
    """the drafter with its head in transformers' own assisted loop"""
    return assisted(setting, path, StockLoopModel)


@method("transformers-dflash", batches=False)
def transformers_dflash(setting: Setting, path: str | None = None) -> dict[str, Any]:
    """the same drafter in transformers' own DFlash decoding, `speculation_type="dflash"`"""
    # That loop knows but one dtype.
    drafting = assisted(setting, path, DFlashModel, dtype=setting.target.dtype)
    return drafting | {"speculation_type": "dflash"}


@method("prompt-lookup", batches=False)
def prompt_lookup(setting: Setting, tokens: int = 10) -> dict[str, Any]:
    """transformers' prompt lookup: `tokens` copied from where the last words stood before"""
    return {"prompt_lookup_num_tokens": tokens}


@method("assistant", batches=False)
def small_assistant(setting: Setting, path: str) -> dict[str, Any]:
    """transformers' assisted decoding with a small autoregressive model of the same vocabulary"""
    from transformers import AutoModelForCausalLM

    dtype, device = setting.target.dtype, setting.target.device
    return {"assistant_model": AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map=device)}

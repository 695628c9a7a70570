"""What the `Auto*` classes find under the model type `lilicorr`."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any, NoReturn


# Model class -> its module: drafters with and without a head, the default first.
DRAFTERS = {
    "LiLiCorrDraftModel": "modeling.modeling_lilicorr",
    "DFlashModel": "modeling.modeling_dflash",
    "DominoModel": "modeling.modeling_domino",
    "DSparkModel": "modeling.modeling_dspark",
    "DFlash2Model": "modeling.modeling_dflash2",
}


def drafter_class(name: str) -> Any:
    """The model class of that name, imported when first asked for."""
    return getattr(import_module(f".{DRAFTERS[name]}", __package__), name)


class Architectures(tuple):
    """The classes that a config's `architectures` may name, the first by default; imported when first looked at.

    `AutoModel` takes a tuple where one model type has several architectures.
    """

    def __iter__(self) -> Iterator[type]:
        return map(drafter_class, DRAFTERS)

    def __getitem__(self, index: Any) -> Any:
        return tuple(iter(self))[index]

    def __len__(self) -> int:
        return len(DRAFTERS)


class NoLanguageModel:
    """What `AutoModelForCausalLM` finds, and so pipelines: a drafter has no vocabulary of its own to speak with."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(
            f"{str(pretrained_model_name_or_path)!r} is a drafter, not a language model. Load the model it drafts "
            "for, and this with `AutoModel.from_pretrained`, for `model.generate(..., assistant_model=drafter)`."
        )

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> NoReturn:
        cls.from_pretrained(config.name_or_path or config.model_type)

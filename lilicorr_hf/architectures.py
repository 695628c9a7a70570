"""What the `Auto*` classes find under the model type `lilicorr`."""

from collections.abc import Iterator
from typing import Any, NoReturn


class Architectures(tuple):
    """The classes that a config's `architectures` may name, the first by default; imported when first looked at.

    `AutoModel` takes a tuple where one model type has several architectures: with a head and without.
    """

    def __iter__(self) -> Iterator[type]:
        from .modeling.modeling_dflash import DFlashModel
        from .modeling.modeling_lilicorr import LiLiCorrDraftModel

        return iter((LiLiCorrDraftModel, DFlashModel))

    def __getitem__(self, index: Any) -> Any:
        return tuple(iter(self))[index]

    def __len__(self) -> int:
        return 2


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

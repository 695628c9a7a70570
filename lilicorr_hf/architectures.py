"""What `AutoModel` finds under the model type `lilicorr`."""

from collections.abc import Iterator
from typing import Any


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

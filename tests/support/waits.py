"""Where the host would wait for a GPU, told on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


# `bool`, `int` and `item` end in the first.
READS = {"_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "unique_dim", "_unique2"}
COPIES = {"cpu", "numpy", "tolist"}
# Made on the host unless they are told where, and copied to the device sooner or later; the others in any case.
FACTORIES, LISTS = {"arange", "empty", "full", "ones", "rand", "zeros"}, {"as_tensor", "tensor"}


@contextmanager
def waits() -> Iterator[list[str]]:
    """The names of all calls inside the block that wait for a device."""
    found: list[str] = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__
            by_mask = name in ("index", "index_put", "index_put_") and any(
                x is not None and x.dtype == torch.bool for x in args[1]
            )
            if name in READS or by_mask:
                found.append(name)
            return func(*args, **kwargs or {})

    class Calls(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            name, kwargs = func.__name__, kwargs or {}
            if name in COPIES | LISTS or (name in FACTORIES and kwargs.get("device") is None):
                found.append(name)
            return func(*args, **kwargs)

    with Operations(), Calls():
        yield found

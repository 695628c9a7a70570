"""Bytes of tensors that are alive at once, counted rather than measured: of real ones, or of fake ones of any size."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations within it return, until they are freed.

    Scratch memory within a kernel is not seen. Sizes that depend on data, of which fake tensors have none, are the
    largest possible.
    """

    def __init__(self, *alive: torch.Tensor):
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._seen: set[int] = set()
        for tensor in alive:
            self._count(tensor)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.nonzero.default and isinstance(args[0], torch._subclasses.FakeTensor):
            outputs = args[0].new_empty((args[0].numel(), args[0].ndim), dtype=torch.long)
        else:
            outputs = function(*args, **(kwargs or {}))
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor):
                self._count(output)
        return outputs

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size

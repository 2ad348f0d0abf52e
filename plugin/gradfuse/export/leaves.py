"""Which tensors a loss depends on, and what a graph can hold of them. This module imports torch."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradfuse import _torch_private as private
from gradfuse.export.reporting import refusal
from gradfuse.models.arrays import to_numpy


def holds_numbers(tensor: Tensor) -> bool:
    """Whether a graph can hold a tensor of a module: it is dense, and of a type that numpy has, or bfloat16."""
    dense = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized and not tensor.is_meta
    if private.is_lazy(tensor):
        # What is to be done about it is said elsewhere.
        return True
    try:
        return dense and not private.is_made_of_others(tensor) and to_numpy(tensor.flatten()[:0]).size == 0
    except (TypeError, RuntimeError):
        return False


def is_sparse_matrix(tensor: Any) -> bool:
    """Whether a tensor is a sparse matrix of numbers, of a layout that has one value for each element."""
    if not isinstance(tensor, Tensor) or tensor.layout not in _SPARSE:
        return False
    with private.untraced():
        return tensor.dim() == 2 and tensor.dense_dim() == 0


_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)


def form(tensor: Tensor) -> str:
    """Return what a graph cannot hold about a tensor."""
    if tensor.is_meta:
        return "on the device meta, without values"
    if tensor.layout != torch.strided:
        return str(tensor.layout)
    return "nested" if tensor.is_nested else f"{type(tensor).__name__} of {tensor.dtype}"


class Reads(TorchFunctionMode):
    """Refuses a step that reads one of some tensors: more than what they are made like.

    It may read a sparse matrix, but not write into it.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {id(tensor): name for name, tensor in tensors.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._names and getattr(func, "__name__", "") not in ABOUT:
            for one in private.tensors_in((args, kwargs)):
                name = self._names.get(id(one))
                if name is None or (func.__name__ == "__get__" and not isinstance(result, Tensor)):
                    continue
                if not is_sparse_matrix(one):
                    raise refusal(f"the step reads {name!r}, which is {form(one)}; expected a dense tensor")
                if func.__name__.endswith("_") and not func.__name__.startswith("__"):
                    raise refusal(
                        f"the step changes {name!r}, which is {form(one)}; expected a constant, or a dense tensor"
                    )
        return result


ABOUT = frozenset("size dim numel nelement stride element_size is_floating_point is_complex sparse_dim".split())
"""What tells nothing of the numbers in a tensor."""


class MadeTensors(TorchFunctionMode):
    """Notes the tensors that functions return, but for views of others that were there before."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, weakref.ref[Tensor]] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        made = self._made.get(id(tensor))
        return made is not None and made() is tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [one for one in private.tensors_in((args, kwargs)) if isinstance(one, Tensor)]
        # What has a history was computed by the step, as was what it is detached from.
        given = [one for one in tensors if one.is_leaf and one not in self]
        outside = {_address(one) for one in given}
        for one in private.tensors_in(result):
            if isinstance(one, Tensor) and one.is_leaf and _address(one) not in outside:
                self._made[id(one)] = weakref.ref(one)
        return result


class WrittenData(TorchFunctionMode):
    """Notes which tensors are written into where PyTorch's own counters of versions do not tell.

    That is by `.data`, as running statistics and by operators on several tensors. These may leave what is there as it
    is, and write something else the next time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._set: list[Tensor] = []
        self._read: list[tuple[Tensor, Tensor]] = []

    def __contains__(self, tensor: Tensor) -> bool:
        return self.writes_into(tensor) > 0

    def writes_into(self, tensor: Tensor) -> int:
        """Return a number that grows with each of these writes into a tensor, or into a view of it."""
        times = [(one, 1) for one in self._set] + [(owner, private.version(data)) for owner, data in self._read]
        return sum(count for one, count in times if one is tensor or one._base is tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A module that is converted to the type that it has sets what is there.
        if func == Tensor.data.__set__ and _view(args[0]) != _view(args[1]):  # type: ignore[attr-defined]
            self._set.append(args[0])
        self._set += _written(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            self._read.append((args[0], result))
        return result


_STATISTICS = {
    **dict.fromkeys((F.batch_norm, F.instance_norm), 1),
    **dict.fromkeys((torch.batch_norm, torch.instance_norm, torch.native_batch_norm), 3),
}
"""Functions with running statistics -> which of their arguments are the first of these."""
_FROM_BATCH = 5
"""Which argument says whether statistics are the batch's."""


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return what a function writes into without a version that says so."""
    name = getattr(func, "__name__", "")
    if name.startswith("_foreach_") and name.endswith("_"):
        return [one for held in args[:1] for one in held]
    if func not in _STATISTICS:
        return []
    flags = kwargs.get("training"), kwargs.get("use_input_stats"), *args[_FROM_BATCH : _FROM_BATCH + 1]
    given = (*args[_STATISTICS[func] :][:2], kwargs.get("running_mean"), kwargs.get("running_var"))
    return [one for one in given if isinstance(one, Tensor)] if any(flag is True for flag in flags) else []


def _address(tensor: Tensor) -> int:
    """Return where the memory of a tensor is; one that has none of its own, as within `vmap`, is an address itself."""
    has_memory = tensor.layout == torch.strided and not private.is_wrapped(tensor)
    return tensor.untyped_storage().data_ptr() if has_memory else id(tensor)


def _view(tensor: Tensor) -> tuple[Any, ...]:
    return _address(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def refuse_foreign_leaves(
    value: Tensor, leaves: Mapping[str, Tensor], batch: Sequence[Tensor], made: MadeTensors
) -> None:
    """Refuse a loss that depends on trainable tensors registered nowhere: their gradients would be missing.

    A module may make what it gets require gradients, as is done for checkpointing, or what it makes itself. Nobody
    reads those.
    """
    known = {id(leaf) for leaf in leaves.values()}
    given = {_address(tensor) for tensor in batch}
    for leaf in private.graph_leaves(value):
        if id(leaf) not in known and leaf not in made and _address(leaf) not in given:
            raise refusal(
                f"loss depends on a trainable tensor of shape {tuple(leaf.shape)} that is no parameter of the module "
                "or the loss; expected a loss that is a module with this parameter"
            )

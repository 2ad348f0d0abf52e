"""numpy arrays by name, and what becomes one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

Arrays = dict[str, npt.NDArray[Any]]
"""Name -> array."""


def to_numpy(tensor: Tensor, *, copy: bool = True) -> npt.NDArray[Any]:
    """Return a tensor's values as an array, which may be the tensor's own memory if `copy` is False.

    bfloat16 becomes `ml_dtypes.bfloat16`.
    """
    import torch

    values = tensor.detach().cpu()
    values = (values.clone() if copy else values).contiguous()
    if values.dtype == torch.bfloat16:
        import ml_dtypes

        return values.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    # The gradient of what has none may be a tensor of zeros without memory.
    return np.asarray(values.numpy(force=True))


def to_tensor(array: npt.NDArray[Any]) -> Tensor:
    """Return an array as a tensor of the same memory; the reverse of `to_numpy`."""
    import torch

    if array.dtype.kind == "V" or array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)

"""numpy arrays by name, and what becomes one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

Arrays = dict[str, npt.NDArray[Any]]
"""Name -> array."""


def to_numpy(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a copy of a tensor's values as an array; bfloat16 becomes `ml_dtypes.bfloat16`."""
    import torch

    values = tensor.detach().cpu().clone().contiguous()
    if values.dtype == torch.bfloat16:
        import ml_dtypes

        return values.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return np.asarray(values.numpy())

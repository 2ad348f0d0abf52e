"""Checks of what users pass to a training session: arrays, paths and execution providers."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gradfuse.errors import ArgumentError, one_line
from gradfuse.models.arrays import Arrays, to_numpy
from gradfuse.models.ort_values import is_bfloat16
from gradfuse.models.plain_reading import PlainType, dtype_of
from gradfuse.training.step import IndexRange

if TYPE_CHECKING:
    import onnx


@dataclasses.dataclass(frozen=True)
class TensorType:
    """Type and shape of an input or output; dimensions that vary are names or None."""

    dtype: np.dtype[Any]
    shape: tuple[int | str | None, ...]

    @classmethod
    def of(cls, value: onnx.ValueInfoProto) -> TensorType:
        import onnx

        tensor = value.type.tensor_type
        shape = (dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in tensor.shape.dim)
        return cls(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)), tuple(shape))

    @classmethod
    def of_plain(cls, name: str, value: PlainType, who: str) -> TensorType:
        """Return that of an input or output as a device reads it."""
        return cls(dtype_of(value.number, f"{who}: {name!r}"), value.shape)

    def __str__(self) -> str:
        sizes = ", ".join("?" if size is None else str(size) for size in self.shape)
        return f"{self.dtype} of shape ({sizes}{',' if len(self.shape) == 1 else ''})"


def require_shapes(where: str, feeds: Arrays, known: Mapping[str, TensorType]) -> None:
    """Refuse an array of another type or shape; dimensions of one name have one size."""
    sizes: dict[str, int] = {}
    for name, array in feeds.items():
        wanted = known[name]
        fits = array.dtype == wanted.dtype and len(array.shape) == len(wanted.shape)
        for size, dim in zip(array.shape, wanted.shape, strict=False):
            fits = fits and (dim is None or size == (sizes.setdefault(dim, size) if isinstance(dim, str) else dim))
        if not fits:
            named = (dim for dim in dict.fromkeys(wanted.shape) if isinstance(dim, str) and dim in sizes)
            bound = "".join(f", {dim} = {sizes[dim]}" for dim in named)
            raise ArgumentError(
                f"{where}: {name!r} is {TensorType(array.dtype, array.shape)}; expected {wanted}{bound}"
            )


def require_in_range(where: str, feeds: Arrays, ranges: Mapping[str, Sequence[IndexRange]]) -> None:
    """Refuse an array with an element out of range."""
    for name, known in ranges.items():
        array = feeds.get(name)
        for one in known if array is not None and array.size else ():
            assert array is not None
            if array.min() < 0 or array.max() >= one.size:
                _refuse(where, name, array, one)


def _refuse(where: str, name: str, array: npt.NDArray[np.integer], one: IndexRange) -> None:
    wrong = (array < 0) | (array >= one.size)
    ignored = ""
    if one.ignored is not None:
        wrong &= array != one.ignored
        ignored = "" if 0 <= one.ignored < one.size else f", or {one.ignored}, which is ignored"
    if not wrong.any():
        return
    place = tuple(np.argwhere(wrong)[0])
    shown = f"[{', '.join(map(str, place))}]" if place else ""
    raise ArgumentError(f"{where}: {name!r}{shown} is {array[place]}; expected 0 to {one.size - 1}{ignored}")


def require_path(path: Any, where: str) -> None:
    """Refuse anything but a path."""
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(f"{where}: path is {in_short(path)}; expected a path")


def checked_providers(providers: Any, where: str) -> list[Any]:
    """Return execution providers, after checking their form: onnxruntime only warns of others, and ignores them."""
    if providers is None:
        return ["CPUExecutionProvider"]

    def is_one(provider: Any) -> bool:
        match provider:
            case str() | (str(), Mapping()):
                return True
        return False

    if isinstance(providers, str) or not isinstance(providers, Sequence) or not all(map(is_one, providers)):
        wanted = "a list of names, or of pairs of a name and its options"
        raise ArgumentError(f"{where}: providers is {in_short(providers)}; expected {wanted}")
    return list(providers) or ["CPUExecutionProvider"]


def as_array(value: Any, what: str, wanted: object) -> npt.NDArray[Any]:
    """Return a numpy array of what may be a torch tensor, without importing torch.

    Args:
        value: what was given.
        what: what to call it in messages.
        wanted: what is expected, as messages show it.

    Raises:
        ArgumentError: it cannot be one, such as a tensor of a type that numpy does not have, or has a mask.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise ArgumentError(f"{what} is a masked array; expected {wanted}")
    if value is None:
        raise ArgumentError(f"{what} is None; expected {wanted}")
    if isinstance(value, np.ndarray):
        return np.asarray(value)
    try:
        return np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        # torch raises a different one of these for each kind of tensor that numpy lacks.
        raise ArgumentError(f"{what} cannot be an array: {one_line(error)}; expected {wanted}") from error


def array_like(known: TensorType, value: Any, what: str) -> npt.NDArray[Any]:
    """Return `as_array` of what should be of a type: where that is bfloat16, of a torch tensor of it as well."""
    if is_bfloat16(known.dtype) and str(getattr(value, "dtype", None)) == "torch.bfloat16":
        return to_numpy(value, copy=False)
    return as_array(value, what, known)


def contiguous(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a contiguous and aligned array, as onnxruntime requires."""
    flags = array.flags
    return array if flags.c_contiguous and flags.aligned else np.require(array, requirements=("C", "A"))


def in_short(value: Any) -> str:
    """Describe a value in one short line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:100]}..."

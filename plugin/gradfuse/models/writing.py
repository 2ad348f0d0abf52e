"""Writes models and other files atomically: a file is written whole or not at all.

A model that does not fit into one protobuf message (2 GB) is written with its tensors in a file beside it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import onnx
import onnx_ir as ir

from gradfuse.errors import ModelError, one_line
from gradfuse.models import files, streaming, validation, zeros
from gradfuse.models.reading import is_binary, parse
from gradfuse.models.tensors import (
    copy_model,
    data_files,
    fits_one_message_without_files,
    has_external_data,
    read_attribute_tensors,
    without_zeros,
)

_OUTPUT = "the model"


def save(
    model: ir.Model,
    path: str | os.PathLike[str],
    *,
    keep_references: bool = False,
    inputs: Iterable[str] = (),
    force: bool = False,
    external: bool = False,
    beside: Mapping[str, Callable[[str], None]] = MappingProxyType({}),
) -> None:
    """Write a model and its external data, whole or not at all.

    The tensors of a model that has external tensors, or is too large for one protobuf message, go to `<path>.data`,
    unless the model keeps referring to the files that have them. Everything is written to a temporary folder beside
    `path` and then renamed: if anything fails, what was at `path` before is still there.

    Args:
        model: the model; it is not changed. Of default values that are `Zeros`, a binary file has only the shape.
        path: the file to write; its ending chooses the format, as for `onnx.save`.
        keep_references: external tensors keep referring to their files, which must be beside `path`.
        inputs: files that the model was made from, which must stay as they are.
        force: replace a `<path>.data` that does not belong to a model at `path`.
        external: tensors go to `<path>.data` in any case.
        beside: name -> what writes a file of that name, which belongs to the model and replaces what is there.

    Raises:
        ModelError: the model cannot be written, or would replace something else: a folder, a pipe, a device, one of the
            inputs, a file with external tensors of the model, or a `<path>.data` of something else.
    """
    path = os.fspath(path)
    # Of a link, the target is replaced.
    folder, name = os.path.split(os.path.realpath(path))
    references_hold = keep_references and folder == os.path.dirname(os.path.abspath(path))
    inputs = list(inputs)
    files.require_regular(path, _OUTPUT)
    files.require_other(path, [*inputs, *data_files(model)], _OUTPUT)
    external = external or (not references_hold and has_external_data(model))
    external = external or not fits_one_message_without_files(model)
    if external:
        _require_free_data(path, files.data_path(path), inputs, force)

    def make(written: str) -> None:
        for other, write in beside.items():
            write(os.path.join(os.path.dirname(written), other))
        if not external:
            (streaming.save if is_binary(path) else ir.save)(model, written)
            return
        copy, empty = without_zeros(model)
        copy = copy_model(model) if copy is model else copy
        read_attribute_tensors(copy)
        ir.save(copy, written, external_data=f"{name}{files.DATA}")
        if empty:
            # Without the tensors, which are in the data file, it is small.
            proto = onnx.load(written, load_external_data=False)
            zeros.put(proto.graph, empty)
            onnx.save(proto, written)
        # The data file is empty if all tensors are small, as small ones stay in the model.
        data = written + files.DATA
        if not os.path.getsize(data):
            os.remove(data)

    try:
        files.write(path, make, beside=[f"{name}{files.DATA}", *beside])
    except ModelError:
        raise
    except Exception as error:
        # Errors of the disk, protobuf and numpy have no common base. All mean that nothing was written.
        raise ModelError(f"{path}: cannot write the model: {one_line(error)}") from error


def _require_free_data(path: str, data: str, inputs: Iterable[str], force: bool) -> None:
    """Refuse to replace a data file that does not belong to the model that is at `path` now."""
    wanted = "the external data of the model"
    if os.path.islink(data):
        raise ModelError(f"{data}: is a symbolic link; expected a path for {wanted}")
    files.require_regular(data, wanted)
    files.require_other(data, inputs, wanted)
    is_free = force or not os.path.exists(data) or not os.path.getsize(data)
    if not is_free and not _refers_to(path, os.path.basename(data)):
        raise ModelError(
            f"{data}: exists and does not belong to a model at {path}; expected a path for {wanted}, or force"
        )


def _refers_to(path: str, location: str) -> bool:
    """Tell whether there is a model at `path` with external data in the file `location` beside it."""
    try:
        proto = parse(path)
    except ModelError:
        return False
    return location in validation.external_locations(proto)

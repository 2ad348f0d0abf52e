"""What onnxruntime makes of a model: the order in which it runs the nodes, and the bits of what it computes."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from gradfuse import library
from gradfuse.checking.execution import inference_session, run_in_place
from gradfuse.errors import ModelError
from gradfuse.models import files, scatters
from gradfuse.models.tensors import copy_model
from gradfuse.runtime import reason, session_options

_EXTERNAL = "session.optimized_model_external_initializers_file_name"


@dataclasses.dataclass(frozen=True)
class Observed:
    """What onnxruntime made of a model.

    Attributes:
        model: the model after all optimizations, with nodes in the order in which they run. It has no large tensors.
        digests: output -> the digest of its bits.
    """

    model: ir.Model
    digests: dict[str, bytes]


def observed(model: ir.Model, feeds: Mapping[str, Any], who: str) -> Observed:
    """Run a model once in onnxruntime with all its optimizations, and return what it made of it.

    Args:
        model: the model; it is not changed.
        feeds: input -> its array; what is missing has the array of the initializer of its name.
        who: what a message names first.

    Raises:
        GradfuseError: onnxruntime is not installed.
        ModelError: it cannot load the model, or run it on these arrays.
    """
    options = session_options()
    if scatters.reduces_by_scatter_nd(model):
        options.intra_op_num_threads = 1
    if library.find_library() is not None:
        library.register(options)
    asked = copy_model(model)
    for value in asked.graph.inputs:
        if value.name in feeds:
            asked.graph.initializers.pop(str(value.name), None)
    with files.temporary_folder(tempfile.gettempdir(), "order") as folder:
        path = os.path.join(folder, "optimized.onnx")
        options.optimized_model_filepath = path
        options.add_session_config_entry(_EXTERNAL, "optimized.data")
        session = inference_session(asked, who, options, ["CPUExecutionProvider"])
        optimized = onnx.load(path, load_external_data=False)
    names = [value.name for value in session.get_outputs()]
    wanted = {value.name for value in session.get_inputs()}
    try:
        results = run_in_place(session, names, {name: np.asarray(a) for name, a in feeds.items() if name in wanted})
    except MemoryError:
        raise
    except Exception as error:
        raise ModelError(f"{who}: onnxruntime cannot run the step: {reason(error)}") from error
    digests = {
        name: hashlib.sha256(np.ascontiguousarray(result).view(np.uint8).data if result.size else b"").digest()
        for name, result in zip(names, results, strict=True)
    }
    return Observed(ir.from_proto(optimized), digests)

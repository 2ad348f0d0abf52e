"""The process in which onnx infers shapes for :mod:`gradfuse.models.inference`.

It is run as a script, with the search path of its parent as arguments. It answers requests from its standard input
until that ends, as it does when the parent is gone. To start quickly it imports the standard library and onnx's own
library, and nothing else of onnx or gradfuse before a model needs it.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.machinery
import importlib.util
import os
import signal
import struct
import sys
from collections.abc import Sequence
from types import ModuleType

READY = b"gradfuse.models.inference_worker: ready\n"
REQUEST = struct.Struct("<??Q")
"""Whether the model needs the schemas of gradfuse's operators, whether onnx follows the values of sizes, and the size
of the model that follows."""
ANSWER = struct.Struct("<6s?Q")
"""`MAGIC`, whether onnx could infer anything, and the size of the model that follows."""
MAGIC = b"shapes"
_MOST_SECONDS = 600
"""The parent ends an inference long before that. This is for a parent that is gone itself."""
_LIBRARY = "onnx.onnx_cpp2py_export"


def infer(model: bytes, with_schemas: bool, data_prop: bool) -> bytes | None:
    """Return the model with the types and shapes that onnx infers; None where onnx raises an error.

    onnx may also end the process, or never return.
    """
    if with_schemas:
        importlib.import_module("gradfuse.custom_ops")
    check_type = strict_mode = False
    try:
        library = _library()
        if library is None:
            import onnx.shape_inference

            inferred = onnx.shape_inference.infer_shapes(model, check_type, strict_mode, data_prop)
            return bytes(inferred.SerializeToString())
        return bytes(library.shape_inference.infer_shapes(model, check_type, strict_mode, data_prop))
    except Exception:  # As the schemas' own functions do, it raises what it likes.
        return None


def _library() -> ModuleType | None:
    """onnx's library alone, as numpy and the rest of onnx take half a second to import; None where it is elsewhere."""
    if _LIBRARY not in sys.modules:
        onnx = importlib.util.find_spec("onnx")
        folders = None if onnx is None else onnx.submodule_search_locations
        spec = None if folders is None else importlib.machinery.PathFinder.find_spec(_LIBRARY, folders)
        if spec is None or spec.loader is None:
            return None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[_LIBRARY] = module
    found = sys.modules[_LIBRARY]
    return found if hasattr(getattr(found, "shape_inference", None), "infer_shapes") else None


def main(path: Sequence[str]) -> None:
    """Answer requests until the standard input ends."""
    sys.path[:] = path
    # An interrupt at the keyboard is for the parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    if _library() is None:
        importlib.import_module("onnx.shape_inference")
    answers.write(READY)
    answers.flush()
    # What onnx says while it fails is of no use to anyone, and nothing else may come between the answers.
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    while len(head := requests.read(REQUEST.size)) == REQUEST.size:
        with_schemas, data_prop, size = REQUEST.unpack(head)
        model = requests.read(size)
        if len(model) < size:
            break
        faulthandler.dump_traceback_later(_MOST_SECONDS, exit=True, file=nothing)
        inferred = infer(model, with_schemas, data_prop)
        faulthandler.cancel_dump_traceback_later()
        answers.write(ANSWER.pack(MAGIC, inferred is not None, len(inferred or b"")))
        answers.write(inferred or b"")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1:])

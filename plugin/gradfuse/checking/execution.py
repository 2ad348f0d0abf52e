"""Runs models in stock onnxruntime, in their own types or in wider ones."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnx.inliner
import onnx_ir as ir

from gradfuse import custom_ops, library
from gradfuse.errors import ModelError
from gradfuse.models import files, ort_values, scatters, validation, writing
from gradfuse.models.arrays import Arrays
from gradfuse.models.tensors import (
    copy_model,
    data_files,
    every_tensor,
    moved,
    read_attribute_tensors,
    serialized,
    tensor_bytes,
    to_proto,
)
from gradfuse.runtime import find_files_in, import_onnxruntime, reason, session_of, session_options

FLOATS = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE)
"""The floating point types that a model may compute in, from narrow to wide."""

_MOST_INLINED = 2000
_LONG = 2**20
"""From this many bytes of inputs on, a run may take so long that a user interrupts it."""
_PATIENCE = 0.5
"""How many seconds a run has to end after an interrupt."""
_LARGE = 2**25
"""From this many bytes of tensors on, onnxruntime gets a model in files."""
_MOST_EMBEDDED = 2**28
"""Bytes of tensors that a message to onnxruntime may hold beside references to files."""


class Session:
    """An onnxruntime CPU session that takes and gives numpy arrays, bfloat16 included.

    It has one thread if several might compute a ScatterND wrongly (gradfuse.models.scatters).

    Args:
        model: the model; it is not changed.
        source: what to call it in messages.
        kernels: register gradfuse's own kernels, if there is a compiled library; otherwise function bodies run.

    Raises:
        ModelError: onnxruntime cannot load the model.
        GradfuseError: onnxruntime is not installed.
    """

    def __init__(self, model: ir.Model, source: str, *, kernels: bool = True) -> None:
        self._source = source
        self._dtypes = {str(value.name): _numpy_dtype(value) for value in (*model.graph.inputs, *model.graph.outputs)}
        # A model is run once or twice: an arena would keep the memory of its largest results.
        options = session_options(arena=False)
        if tensor_bytes(model) >= _LARGE:
            # Prepacking would copy the weights, while those in files take no memory.
            options.add_session_config_entry("session.disable_prepacking", "1")
        if scatters.reduces_by_scatter_nd(model):
            options.intra_op_num_threads = 1
        if kernels and library.find_library() is not None:
            library.register(options)
        self._session = inference_session(_with_float32_borders(model), source, options, ["CPUExecutionProvider"])

    def run(self, feeds: Mapping[str, npt.NDArray[Any]], outputs: Sequence[str] | None = None) -> Arrays:
        """Return every output, or those of some names, for the given inputs, by name and in order.

        Raises:
            ModelError: onnxruntime cannot run the model on them.
        """
        names = [output.name for output in self._session.get_outputs()] if outputs is None else list(outputs)
        wide = {
            name: np.asarray(array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array)
            for name, array in feeds.items()
        }
        try:
            results = run_in_place(self._session, names, wide)
        except MemoryError:
            raise
        except Exception as error:
            raise ModelError(f"{self._source}: onnxruntime cannot run the model: {reason(error)}") from error
        return {
            name: np.asarray(result).astype(self._dtypes[name] or np.asarray(result).dtype, copy=False)
            for name, result in zip(names, results, strict=True)
        }


def run_in_place(
    session: Any, outputs: Sequence[str] | None, feeds: Mapping[str, npt.NDArray[Any]]
) -> list[npt.NDArray[Any]]:
    """Run an onnxruntime session, and return its outputs without copies.

    `InferenceSession.run` returns copies, and makes all of them before it frees any of the originals.

    Args:
        session: a session on the CPU.
        outputs: the names of the outputs; None: all.
        feeds: the inputs, by name.
    """
    made = {value.name: value.type for value in session.get_outputs()}
    names = list(made) if outputs is None else list(outputs)
    numbers = all(isinstance(one, np.ndarray) and one.dtype in _NUMBERS.values() for one in feeds.values())
    if not numbers or not all(made[name] in _NUMBERS for name in names):
        results: list[npt.NDArray[Any]] = session.run(names, feeds)
        return results
    given = {name: ort_values.of_array(np.asarray(array, order="C"), name) for name, array in feeds.items()}
    if (
        sum(array.nbytes for array in feeds.values()) < _LONG
        or threading.current_thread() is not threading.main_thread()
    ):
        values = session.run_with_ort_values(names, given)
    else:
        values = _run_interruptibly(session, names, given)
    values = [_alone(value) for value in values]
    arrays = [_Memory(value, _NUMBERS[made[name]]).array() for name, value in zip(names, values, strict=True)]
    # An input that is an output keeps the caller's memory.
    addresses = {value.data_ptr() for value in given.values()}
    return [array.copy() if array.ctypes.data in addresses else array for array in arrays]


def _alone(value: Any) -> Any:
    """Return the same tensor, if possible without a reference to the other outputs of its run.

    onnxruntime returns outputs as elements of one vector, each of which keeps the whole vector alive.
    """
    if not hasattr(value, "__dlpack__") or not math.prod(value.shape()):
        return value
    return type(value).from_dlpack(value)


def _run_interruptibly(session: Any, names: list[str], given: Mapping[str, Any]) -> Any:
    """Run a session so that Ctrl-C ends it: Python handles signals only between two of its own instructions."""
    options = import_onnxruntime().RunOptions()
    found: list[Any] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            found.append(session.run_with_ort_values(names, given, options))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:
        # It checks before each node; a single node may take too long to wait for.
        options.terminate = True
        thread.join(_PATIENCE)
        raise
    if errors:
        raise errors[0]
    return found[0]


class _Memory:
    """The memory of an `onnxruntime.OrtValue`, through numpy's array interface."""

    def __init__(self, value: Any, dtype: np.dtype[Any]) -> None:
        self._value, self._dtype = value, dtype
        shape = tuple(value.shape())
        address = value.data_ptr()
        # A tensor without elements may have no address.
        self.__array_interface__ = {
            "shape": shape,
            # numpy's interface does not know bfloat16 by name.
            "typestr": f"<u{dtype.itemsize}" if ort_values.is_bfloat16(dtype) else dtype.str,
            "data": (address, False) if address else bytearray(dtype.itemsize),
            "version": 3,
        }

    def array(self) -> npt.NDArray[Any]:
        return np.asarray(self).view(self._dtype)


_NUMBERS = {
    f"tensor({name})": np.dtype(of)
    for name, of in {
        "bool": np.bool_,
        "bfloat16": ml_dtypes.bfloat16,
        "float16": np.float16,
        "float": np.float32,
        "double": np.float64,
        **{name: name for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")},
    }.items()
}
"""Types of tensors that numpy has, by onnxruntime's names."""


def inference_session(model: ir.Model, source: str, options: Any, providers: Sequence[Any]) -> Any:
    """Return an onnxruntime session of a model of any size.

    Args:
        model: the model; it is not changed.
        source: what to call it in messages.
        options: the `onnxruntime.SessionOptions`.
        providers: execution providers, as for `onnxruntime.InferenceSession`.

    Raises:
        ModelError: onnxruntime cannot load the model.
    """
    with contextlib.ExitStack() as stack:
        if tensor_bytes(model) < _LARGE:
            content: bytes | str = _called_out(to_proto(model), model, source).SerializeToString()
        else:
            mapped = _mapped_session(model, source, options, providers)
            if mapped is not None:
                return mapped
            # onnxruntime maps tensors in files; in a message they would be in memory several times.
            folder = stack.enter_context(files.temporary_folder(tempfile.gettempdir(), "session"))
            content = os.path.join(folder, "model.onnx")
            writing.save(model, content, external=True)
        return session_of(content, source, options, providers)


def _mapped_session(model: ir.Model, source: str, options: Any, providers: Sequence[Any]) -> Any:
    """Return a session of a model that maps the files of its tensors; None if onnxruntime cannot do that.

    The files are in one folder, and the rest fits into a message.
    """
    folders = {os.path.dirname(os.path.abspath(path)) for path in data_files(model)}
    embedded = sum(one.nbytes for one in every_tensor(model) if not isinstance(one, ir.ExternalTensor))
    if len(folders) != 1 or embedded >= _MOST_EMBEDDED:
        return None
    (folder,) = folders
    copy = copy_model(model)
    read_attribute_tensors(copy)
    for graph in copy.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = moved(value.const_value, os.path.basename(value.const_value.path))
    content = _called_out(serialized(copy), copy, source).SerializeToString()
    find_files_in(folder, options)
    try:
        return session_of(content, source, options, providers)
    except ModelError:
        # Older versions do not know the entry. Any other error occurs again, and is reported.
        return None


def _called_out(proto: onnx.ModelProto, model: ir.Model, source: str) -> onnx.ModelProto:
    """Return the message of a model with its functions (but ours) inlined if they have many calls.

    onnxruntime inlines them itself, in time quadratic in the number of calls.
    """
    if not proto.functions or validation.inlined_nodes(model, source)[0] <= _MOST_INLINED:
        return proto
    ours = [(f.domain, f.name) for f in proto.functions if f.domain == custom_ops.DOMAIN]
    try:
        return onnx.inliner.inline_selected_functions(proto, ours, exclude=True)
    except Exception:
        # onnx documents no exceptions; onnxruntime reports better what is wrong with a model.
        return proto


def float_types(model: ir.Model) -> set[ir.DataType]:
    """Return the floating point types that occur in a model."""
    found = {tensor.dtype for tensor in every_tensor(model)}
    for graph in model.graphs():
        found |= {value.dtype for value in (*graph.inputs, *graph.outputs) if value.dtype is not None}
        found |= {value.dtype for node in graph for value in node.outputs if value.dtype is not None}
    return found & set(FLOATS)


def widened(model: ir.Model, dtype: ir.DataType) -> ir.Model:
    """Return a copy in which every floating point type that is narrower than `dtype` is `dtype`."""
    narrow = set(FLOATS[: FLOATS.index(dtype)])
    copy = copy_model(model)
    inner = (graph for function in copy.functions.values() for graph in function.subgraphs())
    for graph in (*copy.graphs(), *inner):
        for value in (*graph.inputs, *graph.outputs, *graph.initializers.values(), *_results(graph)):
            if value.dtype in narrow:
                value.dtype = dtype
        for value in graph.initializers.values():
            if value.const_value is not None and value.const_value.dtype in narrow:
                value.const_value = _cast(value.const_value, dtype)
    for group in (copy.graph.all_nodes(), *(function.all_nodes() for function in copy.functions.values())):
        for node in group:
            for attribute in list(node.attributes.values()):
                if not attribute.is_ref():
                    _widen_attribute(node, attribute, dtype, narrow)
                elif node.op_type == "Constant" and ir.DataType.FLOAT in narrow:
                    _widen_constant(node, attribute, dtype)
    for graph in copy.graphs():
        for node in list(graph):
            _remove_cast_to_itself(graph, node)
    return copy


def _remove_cast_to_itself(graph: ir.Graph | ir.Function, node: ir.Node) -> None:
    """Remove a cast to the type that its input has: onnxruntime 1.31 loses the edges of two of them in a row."""
    value = node.inputs[0] if node.op_type == "Cast" and not node.domain else None
    result = node.outputs[0]
    if value is None or value.dtype is None or value.dtype != result.dtype or result.is_graph_output():
        return
    ir.convenience.replace_all_uses_with(result, value)
    graph.remove(node, safe=True)


def _widen_constant(node: ir.Node, attribute: ir.Attr, dtype: ir.DataType) -> None:
    """Cast a constant whose value is a float attribute of the function around it."""
    if attribute.name not in ("value_float", "value_floats"):
        return
    value = node.outputs[0]
    cast = ir.node("Cast", [value], attributes={"to": dtype})
    ir.convenience.replace_all_uses_with(value, cast.outputs[0], replace_graph_outputs=True)
    cast.replace_input_with(0, value)
    assert node.graph is not None
    node.graph.insert_after(node, cast)


def _widen_attribute(node: ir.Node, attribute: ir.Attr, dtype: ir.DataType, narrow: set[ir.DataType]) -> None:
    name = attribute.name
    if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in narrow:
        node.attributes[name] = ir.AttrTensor(name, _cast(attribute.as_tensor(), dtype))
    elif name in ("to", "dtype") and attribute.type == ir.AttributeType.INT and attribute.as_int() in narrow:
        node.attributes[name] = ir.AttrInt64(name, int(dtype))
    elif node.op_type == "Constant" and name in ("value_float", "value_floats") and ir.DataType.FLOAT in narrow:
        del node.attributes[name]
        values = np.asarray(attribute.value, dtype=dtype.numpy())
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(values, dtype=dtype))


def _results(graph: ir.Graph) -> Iterator[ir.Value]:
    for node in graph:
        yield from node.outputs


def _cast(tensor: ir.TensorProtocol, dtype: ir.DataType) -> ir.TensorProtocol:
    def cast() -> ir.TensorProtocol:
        return ir.tensor(tensor.numpy().astype(dtype.numpy()), dtype=dtype, name=tensor.name)

    if tensor.nbytes < _LARGE:
        return cast()
    # When it is read, and not kept.
    return ir.LazyTensor(cast, dtype=dtype, shape=ir.Shape(tensor.shape.numpy()), name=tensor.name)


def _with_float32_borders(model: ir.Model) -> ir.Model:
    """Return a model whose bfloat16 inputs and outputs are float32: onnxruntime's Python API has no bfloat16 arrays."""
    if all(value.dtype != ir.DataType.BFLOAT16 for value in (*model.graph.inputs, *model.graph.outputs)):
        return model
    copy = copy_model(model)
    graph = copy.graph
    for value in list(graph.inputs):
        if value.dtype == ir.DataType.BFLOAT16 and value.name not in graph.initializers:
            cast = ir.node("Cast", [value], attributes={"to": ir.DataType.BFLOAT16})
            inner = cast.outputs[0]
            inner.name, inner.dtype, inner.shape = f"{value.name}/bfloat16", ir.DataType.BFLOAT16, value.shape
            ir.convenience.replace_all_uses_with(value, inner, replace_graph_outputs=True)
            cast.replace_input_with(0, value)
            value.dtype = ir.DataType.FLOAT
            if len(graph):
                graph.insert_before(graph[0], cast)
            else:
                graph.append(cast)
    for index, value in enumerate(graph.outputs):
        if value.dtype == ir.DataType.BFLOAT16:
            cast = ir.node("Cast", [value], attributes={"to": ir.DataType.FLOAT})
            outer = cast.outputs[0]
            outer.name, outer.dtype, outer.shape = value.name, ir.DataType.FLOAT, value.shape
            value.name = f"{value.name}/bfloat16"
            graph.append(cast)
            graph.outputs[index] = outer
    return copy


def _numpy_dtype(value: ir.Value) -> np.dtype[Any] | None:
    if value.dtype in (None, ir.DataType.STRING, ir.DataType.UNDEFINED):
        return None
    assert value.dtype is not None
    return value.dtype.numpy()

"""Reads and validates models of every kind that gradfuse takes: files, protos, onnx_ir and torch.onnx programs."""

from __future__ import annotations

import dataclasses
import enum
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import onnx
import onnx_ir as ir

from gradfuse.custom_ops.operator import OLDEST_OPSET
from gradfuse.errors import ArgumentError, ModelError, cut, listed, one_line
from gradfuse.models import default_values, validation, zeros
from gradfuse.models.arrays import Arrays
from gradfuse.models.conversion import raise_opset
from gradfuse.models.leniency import as_checked, refuse_maps, without_maps
from gradfuse.models.ordering import in_order
from gradfuse.models.tensors import (
    PROTOBUF_LIMIT,
    copy_model,
    every_tensor,
    has_external_data,
    serialized,
    to_proto,
)

if TYPE_CHECKING:
    import torch

    ModelLike: TypeAlias = "str | os.PathLike[str] | onnx.ModelProto | ir.Model | torch.onnx.ONNXProgram | LoadedModel"

_IrModel = ir.Model

NEWEST_OPSET = onnx.defs.onnx_opset_version()
_CONVERTIBLE_OPSET = 7  # older versions still broadcast by attributes
_NUMBERED = re.compile(r"unk__\d+")
_NO_NAMES = frozenset({"?", "None", "-1"})
"""What converters call every dimension whose size varies."""
_OPSETS = f"{OLDEST_OPSET} to {NEWEST_OPSET}"


class _Kind(enum.Enum):
    PATH = "path"
    PROTO = "onnx.ModelProto"
    IR = "onnx_ir.Model"
    PROGRAM = "torch.onnx.ONNXProgram"


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model as gradfuse works on it.

    Attributes:
        ir: a private copy; tensors are shared with the argument of `load`, and they are immutable.
        source: what to call the model in messages: the path, or the model's kind.
        older: the model before its default opset was raised, None where it was not.
    """

    ir: _IrModel
    source: str
    _kind: _Kind
    _argument: Any
    older: _IrModel | None = None

    def restore(self, model: _IrModel) -> Any:
        """Return `model` as the kind of model that was loaded.

        A path gives an `onnx.ModelProto` with its tensors in it, so that it can be saved anywhere; only one that would
        exceed a protobuf message (2 GB) keeps referring to the data files beside the path.
        """
        if self._kind is _Kind.IR:
            return model
        if self._kind is _Kind.PROGRAM:
            return type(self._argument)(model, self._argument.exported_program)
        if self._kind is _Kind.PATH:
            return to_proto(model)
        return serialized(model)


def load(model: ModelLike, *, tensors_only: bool = False) -> LoadedModel:
    """Read and validate a model; the argument is never changed.

    Args:
        model: a path, an `onnx.ModelProto`, an `onnx_ir.Model`, a `torch.onnx.ONNXProgram`, or what was loaded before.
        tensors_only: whether outputs that a ZipMap makes maps become the tensors that it takes; otherwise maps are
            refused.

    Raises:
        ModelError: not an ONNX model, truncated, invalid, external data missing or too short, or an unknown or too old
            opset or IR version.
        ArgumentError: `model` is something else.
    """
    if isinstance(model, LoadedModel):
        return dataclasses.replace(model, ir=copy_model(model.ir))
    if isinstance(model, (str, os.PathLike)):
        path = os.fspath(model)
        return _raised(LoadedModel(_load_path(path, None, tensors_only), path, _Kind.PATH, None))
    if isinstance(model, onnx.ModelProto):
        model = without_maps(model) if tensors_only else model
        _check_versions(model, "ModelProto")
        # A proto does not tell which folder its data files are in.
        validation.check_tensors(model, "ModelProto", None)
        # The checker refuses larger messages.
        if model.ByteSize() <= PROTOBUF_LIMIT:
            model = as_checked(in_order(model), "ModelProto")
            _check(model, None, "ModelProto")
        return _raised(LoadedModel(_from_proto(model, "ModelProto"), "ModelProto", _Kind.PROTO, None))
    kind, inner = (_Kind.IR, model) if isinstance(model, ir.Model) else (_Kind.PROGRAM, getattr(model, "model", None))
    if not isinstance(inner, ir.Model) or (kind is _Kind.PROGRAM and not hasattr(model, "exported_program")):
        raise ArgumentError(
            f"model is {type(model).__name__}; "
            "expected a path, onnx.ModelProto, onnx_ir.Model or torch.onnx.ONNXProgram"
        )
    _check_opset(inner.opset_imports, kind.value)
    try:
        copy = copy_model(inner)
    except RuntimeError as error:
        proto = None if has_external_data(inner) else serialized(inner)
        ordered = None if proto is None else in_order(proto)
        if ordered is None or ordered is proto:
            raise ModelError(
                f"{kind.value}: is not a valid ONNX model: a node reads a value that no node ahead of it gives"
            ) from error
        copy = _from_proto(ordered, kind.value)
    _free_unknown_sizes(copy)
    return _raised(LoadedModel(_with_one_default_domain(copy), kind.value, kind, model))


def owned(model: ir.Model) -> LoadedModel:
    """Return a model as `load` does, but itself: it may be changed.

    Raises:
        ModelError: as `load`.
    """
    _check_opset(model.opset_imports, _Kind.IR.value)
    return _raised(LoadedModel(_with_one_default_domain(model), _Kind.IR.value, _Kind.IR, model))


def load_with_defaults(path: str | os.PathLike[str]) -> tuple[LoadedModel, Arrays]:
    """Read and validate the model at `path`, whose inputs have default values.

    Returns:
        The model, without the larger default values; and those. No value is in memory twice on the way.

    Raises:
        ModelError: as `load`.
    """
    path, defaults = os.fspath(path), Arrays()
    return _raised(LoadedModel(_load_path(path, defaults), path, _Kind.PATH, None)), defaults


def _raised(loaded: LoadedModel) -> LoadedModel:
    """Return the model with a default opset that is at least `OLDEST_OPSET`."""
    validation.check_calls(loaded.ir, loaded.source)
    opset = loaded.ir.opset_imports[""]
    if opset >= OLDEST_OPSET:
        return loaded
    newer = copy_model(loaded.ir)
    try:
        raise_opset(newer, OLDEST_OPSET)
    except ModelError as error:
        raise ModelError(f"{loaded.source}: the default opset is {opset}; expected {_OPSETS}: {error}") from None
    return dataclasses.replace(loaded, ir=newer, older=loaded.ir)


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the metadata of the model at `path`, whether the model is valid or not.

    Raises:
        ModelError: there is no ONNX model.
    """
    try:
        return {entry.key: entry.value for entry in parse(os.fspath(path), {}).metadata_props}
    except OSError as error:
        raise ModelError(f"{os.fspath(path)}: cannot read the file: {one_line(error)}") from error


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _load_path(path: str, defaults: Arrays | None, tensors_only: bool = False) -> ir.Model:
    if not os.path.isfile(path):
        what = "is a folder" if os.path.isdir(path) else "is no file" if os.path.exists(path) else "does not exist"
        raise ModelError(f"{path}: {what}; expected an ONNX file")
    proto = parse(path, defaults)
    if defaults is not None:
        _move_zeros(proto.graph, defaults, path)
    as_it_is = proto
    proto = in_order(without_maps(proto) if tensors_only else proto)
    _check_versions(proto, path)
    folder = os.path.dirname(path) or os.curdir
    # Before anything else, so that nothing reads a file outside the model's folder.
    validation.check_tensors(proto, path, folder)
    proto = as_checked(proto, path)
    _check(proto, path if is_binary(path) and defaults is None and proto is as_it_is else None, path)
    model = _from_proto(proto, path)
    for tensor in every_tensor(model):
        if isinstance(tensor, ir.ExternalTensor):
            tensor.base_dir = folder
    return model


def _move_zeros(graph: onnx.GraphProto, defaults: Arrays, path: str) -> None:
    """Put the default values that the file does not store among the others."""
    found = {str(tensor.name): tensor for tensor in zeros.of(graph)}
    if not found:
        return
    try:
        defaults.update({name: tensor.numpy() for name, tensor in found.items()})
    except (MemoryError, ValueError) as error:
        raise ModelError(f"{path}: cannot read the file: {one_line(error)}") from error
    others = [sparse for sparse in graph.sparse_initializer if sparse.values.name not in found]
    del graph.sparse_initializer[:]
    graph.sparse_initializer.extend(others)


def is_binary(path: str) -> bool:
    """Tell whether a file is a binary protobuf message, by its ending."""
    text_format = onnx.serialization.registry.get_format_from_file_extension(os.path.splitext(path)[1])
    return text_format in (None, "protobuf")


def parse(path: str, defaults: Arrays | None = None) -> onnx.ModelProto:
    """Return the message of the model at `path`; external data is not read.

    Args:
        path: the file.
        defaults: where the larger default values of inputs are put, which the message is without then; None: it has
            everything.

    Raises:
        ModelError: there is no ONNX model, or it is damaged.
    """
    try:
        size = os.path.getsize(path)
        if size > PROTOBUF_LIMIT:
            raise ModelError(
                f"{path}: is one file of {size} bytes; expected at most {PROTOBUF_LIMIT}, with external data for more"
            )
        if defaults is not None and is_binary(path):
            message, values = default_values.read(path)
            defaults.update(values)
            proto = onnx.load_model_from_string(message)
        else:
            proto = onnx.load(path, load_external_data=False)
    except (OSError, MemoryError) as error:
        raise ModelError(f"{path}: cannot read the file: {one_line(error)}") from error
    except ModelError:
        raise
    except Exception as error:
        # protobuf's decoders for the binary and the text formats have different exceptions.
        with open(path, "rb") as file:
            begins_like_onnx = file.read(1) == b"\x08"
        what = "is truncated or damaged" if begins_like_onnx else "is not an ONNX model"
        raise ModelError(f"{path}: {what}: {one_line(error)}") from error
    if not proto.ir_version or not proto.HasField("graph"):
        raise ModelError(f"{path}: is not an ONNX model: it has no IR version or no graph")
    return proto


def _from_proto(proto: onnx.ModelProto, source: str) -> ir.Model:
    refuse_maps(proto, source)
    # onnx_ir silently drops these.
    if proto.training_info:
        raise ModelError(f"{source}: has training_info; expected a model without, as gradfuse could not keep it")
    empty = zeros.of(proto.graph)
    validation.refuse_sparse(proto, source, {str(tensor.name) for tensor in empty})
    try:
        model = ir.from_proto(proto)
        zeros.register(model.graph, empty)
        _redeclare_inputs(model.graph, proto.graph)
    except Exception as error:
        # The deserializer documents no exceptions; whatever it raises, the model is malformed.
        raise ModelError(f"{source}: is not a valid ONNX model: {one_line(_first_cause(error))}") from error
    _free_unknown_sizes(model)
    return _with_one_default_domain(model)


def _redeclare_inputs(graph: ir.Graph, proto: onnx.GraphProto) -> None:
    """Let an input that is an output too be what it is declared as an input: onnx_ir takes the output's, without a
    shape where it has none.
    """
    outputs = set(graph.outputs)
    for value, info in zip(graph.inputs, proto.input, strict=True):
        if value in outputs:
            ir.serde.deserialize_value_info_proto(info, value)


def _free_unknown_sizes(model: ir.Model) -> None:
    """Make dimensions that carry no information anonymous.

    PaddlePaddle writes -1 for those that vary, and other converters "None" or "?", which onnxruntime takes. onnx's
    inference numbers the sizes of results that it does not know from 0 on in each model: where two have been merged,
    one name stands for two sizes.
    """
    inputs = set(model.graph.inputs)
    for graph in model.graphs():
        for value in (*graph.inputs, *(output for node in graph for output in node.outputs)):
            if value.shape is None:
                continue
            dims = [None if _says_nothing(dim, is_input=value in inputs) else dim for dim in value.shape]
            if dims != list(value.shape):
                value.shape = ir.Shape(dims)


def _says_nothing(dim: int | ir.SymbolicDim, *, is_input: bool) -> bool:
    if isinstance(dim, int):
        return dim < 0
    if dim.value is None:
        return False
    return dim.value in _NO_NAMES or (not is_input and bool(_NUMBERED.fullmatch(dim.value)))


def _with_one_default_domain(model: ir.Model) -> ir.Model:
    """Make "" the only name of the default domain in opset imports, as onnx_ir does for nodes."""
    holders: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for holder in holders:
        version = holder.opset_imports.pop("ai.onnx", None)
        if version is not None:
            holder.opset_imports.setdefault("", version)
    return model


def _check_versions(proto: onnx.ModelProto, source: str) -> None:
    if proto.ir_version > onnx.IR_VERSION:
        raise ModelError(f"{source}: the IR version is {proto.ir_version}; expected at most {onnx.IR_VERSION}")
    _check_opset({opset.domain: opset.version for opset in proto.opset_import}, source)


def _check_opset(imports: Mapping[str, int], source: str) -> None:
    version = imports.get("", imports.get("ai.onnx"))
    if version is None:
        raise ModelError(f"{source}: the default opset is not imported; expected {_OPSETS}")
    if not _CONVERTIBLE_OPSET <= version <= NEWEST_OPSET:
        hint = f", or {_CONVERTIBLE_OPSET} and up to be converted" if version < OLDEST_OPSET else ""
        raise ModelError(f"{source}: the default opset is {version}; expected {_OPSETS}{hint}")


def _check(model: onnx.ModelProto, path: str | None, source: str) -> None:
    try:
        validation.check_structure(model, path)
    except Exception as error:
        # ValidationError, and for some malformed models ValueError or RuntimeError.
        for value in model.graph.input if "Field 'shape'" in str(error) else ():
            if not value.type.tensor_type.HasField("shape"):
                wanted = "expected one, with names for sizes that vary"
                raise ModelError(f"{source}: input {value.name!r} has no shape; {wanted}") from error
        others = listed(validation.further_faults(model, str(error)), quoted=False, most=3)
        more = cut(f". Nor are valid: {others}") if others else ""
        first = one_line(error).rstrip(".")
        raise ModelError(f"{source}: is not a valid ONNX model: {first}{more}") from error

"""Models into and out of gradfuse: read, validated, and written whole or not at all.

External data is never read before it is needed: tensors that live in files stay memory maps, and a model that does not
fit into one protobuf message is written with its tensors in a file beside it.
"""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import onnx
import onnx.version_converter
import onnx_ir as ir

from gradfuse.errors import ArgumentError, ModelError
from gradfuse.models import files, validation

if TYPE_CHECKING:
    import torch

    ModelLike: TypeAlias = "str | os.PathLike[str] | onnx.ModelProto | ir.Model | torch.onnx.ONNXProgram | LoadedModel"

_IrModel = ir.Model

OLDEST_OPSET = 15
NEWEST_OPSET = onnx.defs.onnx_opset_version()
_CONVERTIBLE_OPSET = 7  # older versions still broadcast by attributes
_OPSETS = f"{OLDEST_OPSET} to {NEWEST_OPSET}"

PROTOBUF_LIMIT = 2**31 - 1
# Room for everything of a message that is not tensor data.
_MESSAGE_ROOM = 2**27
# What the names of files with external data end in.
_DATA = ".data"
_OUTPUT = "the model"


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
        older: the model before onnx.version_converter raised its default opset, None where it did not.
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
        return _serialized(model)


def load(model: ModelLike) -> LoadedModel:
    """Read and validate a model; the argument is never changed.

    Args:
        model: a path, an `onnx.ModelProto`, an `onnx_ir.Model`, a `torch.onnx.ONNXProgram`, or what was loaded before.

    Raises:
        ModelError: not an ONNX model, truncated, invalid, external data missing or too short, or an unknown or too old
            opset or IR version.
        ArgumentError: `model` is something else.
    """
    if isinstance(model, LoadedModel):
        return dataclasses.replace(model, ir=copy_model(model.ir))
    if isinstance(model, (str, os.PathLike)):
        path = os.fspath(model)
        return _raised(LoadedModel(_load_path(path), path, _Kind.PATH, None))
    if isinstance(model, onnx.ModelProto):
        _check_versions(model, "ModelProto")
        # Nothing says which folder the data files are in.
        validation.check_tensors(model, "ModelProto", None)
        # The checker takes one message within the limit.
        if model.ByteSize() <= PROTOBUF_LIMIT:
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
        raise ModelError(
            f"{kind.value}: is not a valid ONNX model: a node reads a value that no node ahead of it gives"
        ) from error
    return _raised(LoadedModel(_with_one_default_domain(copy), kind.value, kind, model))


def _raised(loaded: LoadedModel) -> LoadedModel:
    """The model with a default opset that function bodies can be written in."""
    validation.check_calls(loaded.ir, loaded.source)
    opset = loaded.ir.opset_imports[""]
    if opset >= OLDEST_OPSET:
        return loaded
    reason = "onnx.version_converter does not keep functions"
    if not loaded.ir.functions:
        try:
            proto = onnx.version_converter.convert_version(to_proto(loaded.ir), OLDEST_OPSET)
            return dataclasses.replace(loaded, ir=_from_proto(proto, loaded.source), older=loaded.ir)
        except Exception as error:
            # What the converter's adapters raise has no common base.
            reason = f"onnx.version_converter cannot raise it: {one_line(error)}"
    raise ModelError(f"{loaded.source}: the default opset is {opset}; expected {_OPSETS}; {reason}")


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """Return an `onnx.ModelProto` that holds its tensors; beyond a message's limit external ones stay external."""
    return _serialized(with_tensors_in_memory(model) if fits_one_message(model) else model)


def _serialized(model: ir.Model) -> onnx.ModelProto:
    try:
        return ir.to_proto(model)
    except Exception as error:
        # The serialiser states no exception classes; whatever it raises, the model is malformed.
        raise ModelError(f"onnx_ir.Model: is not a valid ONNX model: {one_line(error)}") from error


def copy_model(model: ir.Model) -> ir.Model:
    """Return a copy that can be changed in every way without a trace in `model`; tensors, being immutable, are shared.

    onnx_ir's own clone shares the types of values, and setting `Value.dtype` changes the type in place.
    """
    copy = model.clone()
    for graph in copy.graphs():
        for value in (*graph.inputs, *graph.initializers.values(), *(out for node in graph for out in node.outputs)):
            if isinstance(value.type, ir.TensorType):
                value.type = ir.TensorType(value.type.dtype, denotation=value.type.denotation)
    return copy


def with_tensors_in_memory(model: ir.Model) -> ir.Model:
    """Return the model, or a copy with every external tensor read into memory where it has any.

    Raises:
        ModelError: external data cannot be read.
    """
    if not has_external_data(model):
        return model
    copy = copy_model(model)
    _read_attribute_tensors(copy)
    for graph in copy.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = _read_tensor(value.const_value)
    return copy


def tensors(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    """Yield every tensor of a model: initializers and attributes, of subgraphs and functions too."""
    graphs = [model.graph, *(function.graph for function in model.functions.values())]
    for graph in graphs:  # and the graphs within, which join the list as they are found
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value.const_value
        for node in graph:
            for attribute in node.attributes.values():
                if attribute.is_ref():
                    continue
                match attribute.type:
                    case ir.AttributeType.TENSOR:
                        yield attribute.as_tensor()
                    case ir.AttributeType.TENSORS:
                        yield from attribute.as_tensors()
                    case ir.AttributeType.GRAPH:
                        graphs.append(attribute.as_graph())
                    case ir.AttributeType.GRAPHS:
                        graphs += attribute.as_graphs()


def fits_one_message(model: ir.Model) -> bool:
    """Tell whether a model with all its tensors fits into one protobuf message."""
    return tensor_bytes(model) + _MESSAGE_ROOM <= PROTOBUF_LIMIT


def tensor_bytes(model: ir.Model) -> int:
    """Return how many bytes the tensors of a model take, in files or in memory."""
    return sum(tensor.nbytes for tensor in tensors(model))


def embedded_bytes(model: ir.Model) -> int:
    """Return how many bytes the tensors of a model take that are not in files beside it."""
    return sum(tensor.nbytes for tensor in tensors(model) if not isinstance(tensor, ir.ExternalTensor))


def save(
    model: ir.Model,
    path: str | os.PathLike[str],
    *,
    keep_references: bool = False,
    inputs: Iterable[str] = (),
    force: bool = False,
) -> None:
    """Write a model, with its external data, whole or not at all.

    A model that has external tensors, or is too large for one protobuf message, gets its tensors into `<path>.data`,
    unless it goes on referring to the files that have them.
    Everything is written to a temporary folder beside `path` and then renamed, so that at any failure what was at
    `path` before is still there.

    Args:
        model: the model; it is not changed.
        path: the file to write; its ending chooses the format, as for `onnx.save`.
        keep_references: external tensors go on referring to the files they are in, which must be beside `path`.
        inputs: files that must stay as they are, as the model was made from them.
        force: replace a `<path>.data` that does not belong to a model at `path`.

    Raises:
        ModelError: the model cannot be written, or would take the place of something else: a folder, a pipe, a device,
            one of the inputs, a file that the model's external tensors are in, or a `<path>.data` of something else.
    """
    path = os.fspath(path)
    # A link's target is what gets replaced, not the link.
    folder, name = os.path.split(os.path.realpath(path))
    references_hold = keep_references and folder == os.path.dirname(os.path.abspath(path))
    inputs = list(inputs)
    files.require_regular(path, _OUTPUT)
    files.require_other(path, [*inputs, *data_files(model)], _OUTPUT)
    external = not references_hold and has_external_data(model)
    external = external or embedded_bytes(model) + _MESSAGE_ROOM > PROTOBUF_LIMIT
    if external:
        _require_free_data(path, data_path(path), inputs, force)

    def make(written: str) -> None:
        if not external:
            ir.save(model, written)
            return
        copy = copy_model(model)
        _read_attribute_tensors(copy)
        ir.save(copy, written, external_data=f"{name}{_DATA}")
        # Small tensors are in the model all the same.
        data = written + _DATA
        if not os.path.getsize(data):
            os.remove(data)

    try:
        files.write(path, make, data=f"{name}{_DATA}")
    except ModelError:
        raise
    except Exception as error:
        # Disk, protobuf and numpy errors have no common base, and all mean that nothing was written.
        raise ModelError(f"{path}: cannot write the model: {one_line(error)}") from error


def write_file(path: str | os.PathLike[str], content: bytes, inputs: Iterable[str] = ()) -> None:
    """Write a file whole or not at all.

    Args:
        path: the file to write; where it is a link, its target.
        content: what is in it.
        inputs: files that must stay as they are.

    Raises:
        ModelError: the file cannot be written, or would take the place of a folder, a pipe, a device or an input.
    """
    path = os.fspath(path)
    files.require_regular(path, "a file")
    files.require_other(path, inputs, "a file")

    def make(written: str) -> None:
        with open(written, "wb") as file:
            file.write(content)

    try:
        files.write(path, make)
    except OSError as error:
        raise ModelError(f"{path}: cannot write the file: {one_line(error)}") from error


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the metadata of the model at `path`, whether the model is valid or not.

    Raises:
        ModelError: there is no ONNX model.
    """
    try:
        return {entry.key: entry.value for entry in _parse(os.fspath(path)).metadata_props}
    except OSError as error:
        raise ModelError(f"{os.fspath(path)}: cannot read the file: {one_line(error)}") from error


def data_path(path: str | os.PathLike[str]) -> str:
    """Return the file that the tensors of a model at `path` are written to where they are not in the model."""
    return os.path.realpath(path) + _DATA


def data_files(model: ir.Model) -> list[str]:
    """Return the files that the external tensors of a model are in."""
    return list(dict.fromkeys(tensor.path for tensor in tensors(model) if isinstance(tensor, ir.ExternalTensor)))


def _require_free_data(path: str, data: str, inputs: Iterable[str], force: bool) -> None:
    """Refuse to write external data in the place of what does not belong to the model that is at `path` now."""
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
        proto = _parse(path)
    except ModelError:
        return False
    return location in validation.external_locations(proto)


def has_external_data(model: ir.Model) -> bool:
    """Tell whether any tensor of a model lives in a file beside it."""
    return any(isinstance(tensor, ir.ExternalTensor) for tensor in tensors(model))


def one_line(error: BaseException) -> str:
    """Return the text of another library's exception in one line, cut to what a terminal can show."""
    reason = getattr(error, "strerror", None) or str(error)
    text = " ".join(reason.split()) or type(error).__name__
    return text if len(text) <= 400 else f"{text[:400]}..."


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _load_path(path: str) -> ir.Model:
    if not os.path.isfile(path):
        what = "is a folder" if os.path.isdir(path) else "is no file" if os.path.exists(path) else "does not exist"
        raise ModelError(f"{path}: {what}; expected an ONNX file")
    proto = _parse(path)
    _check_versions(proto, path)
    folder = os.path.dirname(path) or os.curdir
    # First of all, so that nothing looks at a file outside the model's folder.
    validation.check_tensors(proto, path, folder)
    text_format = onnx.serialization.registry.get_format_from_file_extension(os.path.splitext(path)[1])
    _check(proto, path if text_format in (None, "protobuf") else None, path)
    model = _from_proto(proto, path)
    for tensor in tensors(model):
        if isinstance(tensor, ir.ExternalTensor):
            tensor.base_dir = folder
    return model


def _parse(path: str) -> onnx.ModelProto:
    try:
        size = os.path.getsize(path)
        if size > PROTOBUF_LIMIT:
            raise ModelError(
                f"{path}: is one file of {size} bytes; expected at most {PROTOBUF_LIMIT}, with external data for more"
            )
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
    # onnx_ir drops these without a word.
    if proto.training_info:
        raise ModelError(f"{source}: has training_info; expected a model without, as gradfuse could not keep it")
    validation.refuse_sparse(proto, source)
    try:
        model = ir.from_proto(proto)
    except Exception as error:
        # The deserialiser states no exception classes; whatever it raises, the model is malformed.
        raise ModelError(f"{source}: is not a valid ONNX model: {one_line(_first_cause(error))}") from error
    return _with_one_default_domain(model)


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
        raise ModelError(f"{source}: is not a valid ONNX model: {one_line(error)}") from error


def _read_attribute_tensors(model: ir.Model) -> None:
    """Replace external tensors in attributes, which no ONNX writer moves along, by tensors in memory."""
    nodes = [model.graph.all_nodes(), *(function.all_nodes() for function in model.functions.values())]
    for group in nodes:
        for node in group:
            for attribute in list(node.attributes.values()):
                if (
                    not attribute.is_ref()
                    and attribute.type == ir.AttributeType.TENSOR
                    and isinstance(attribute.value, ir.ExternalTensor)
                ):
                    node.attributes[attribute.name] = ir.AttrTensor(attribute.name, _read_tensor(attribute.value))


def _read_tensor(tensor: ir.ExternalTensor) -> ir.TensorProtocol:
    try:
        values = tensor.numpy().copy()
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the external data of {tensor.name!r}: {one_line(error)}") from error
    return ir.Tensor(values, dtype=tensor.dtype, shape=tensor.shape, name=tensor.name, doc_string=tensor.doc_string)

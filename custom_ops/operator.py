"""What an aclnn operator is: its ONNX schema, its type and shape inference and its body in standard operators."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from string import Template
from typing import TYPE_CHECKING, Any, TypeAlias

import onnx
from onnx import TensorProto, TypeProto
from onnx.defs import OpSchema

from gradfuse.errors import ArgumentError

if TYPE_CHECKING:
    import torch

DOMAIN = "aclnn"
VERSION = 1
OLDEST_OPSET = 15
"""The oldest version of the default domain that function bodies are written in, and so that models may have."""
REFUSED = ("gradfuse", "FunctionOverloadsNeedOnnxruntime127OrGradfusesLibrary")
"""An operator that does not exist, by domain and name; the name is what runtimes print that look for it."""
NOTHING_IGNORED = -(1 << 63)
"""The value of an attribute such as ``ignore_index`` where no row is ignored: no class has this number."""

Value: TypeAlias = int | float | str | tuple[int, ...]
"""The value of an attribute."""
Dim: TypeAlias = int | str | None
"""A dimension: its size, its name, or None where nothing is known."""
Shape: TypeAlias = tuple[Dim, ...] | None
"""The dimensions of a tensor, or None where its rank is not known."""

FLOAT_TYPES = ("tensor(float)", "tensor(float16)", "tensor(bfloat16)")
ALL_FLOAT_TYPES = ("tensor(float)", "tensor(double)", "tensor(float16)", "tensor(bfloat16)")
ACTIVATIONS = "the type of activations, which is T, or bfloat16 beside a T that is not float64"
"""What the type variable A stands for. Where no input is of type T, that is A."""
OTHER = "bfloat16 if T is float, and float if T is bfloat16"
"""What the type variable U stands for."""
DESCRIBED = {"A": ACTIVATIONS, "U": OTHER}
"""The type variables that follow from T, or are not free beside it."""
PAIRS = (
    "Where both factors are bfloat16, or are rounded to it, kernels multiply by the processor's instruction for pairs "
    "of such numbers, if it has it (AVX512-BF16); that takes subnormal numbers for 0."
)


@dataclass(frozen=True)
class Tensor:
    """What is known of a tensor before a run; ``dtype`` is a ``TensorProto.DataType``, 0 where it is not known."""

    dtype: int = TensorProto.UNDEFINED
    shape: Shape = None


@dataclass(frozen=True)
class Call:
    """One use of an operator: its present inputs by name, and all its attributes, defaults included."""

    op: str
    node: str
    inputs: Mapping[str, Tensor]
    attributes: Mapping[str, Value]

    def error(self, argument: str, got: object, wanted: str) -> ArgumentError:
        """The error for an argument that is not accepted, to be raised by the caller."""
        where = f"{self.op} (node '{self.node}')" if self.node else self.op
        return ArgumentError(f"{where}: {argument} is {got}; expected {wanted}")

    def shape(self, name: str, *dims: str) -> tuple[Dim, ...]:
        """The shape of an input whose rank must be that of ``dims`` (names for the message); unknown where absent."""
        shape = self.inputs[name].shape if name in self.inputs else None
        if shape is None:
            return (None,) * len(dims)
        if len(shape) != len(dims):
            raise self.error(name, f"of shape {show(shape)}", f"shape {show(dims)}")
        return shape

    def same(self, name: str, dim: str, *found: Dim) -> Dim:
        """The one dimension that all of ``found`` are; ``name`` and ``dim`` say whose it is, the last found."""
        sizes = [size for size in found if isinstance(size, int)]
        for size in sizes[1:]:
            if size != sizes[0]:
                raise self.error(name, f"of {dim} {size}", f"{dim} {sizes[0]}")
        names = [label for label in found if isinstance(label, str)]
        return sizes[0] if sizes else names[0] if names else None

    def output_mask(self, operator: Operator) -> tuple[int, ...]:
        """Whether each output is wanted, 0 or 1: the attribute ``output_mask``."""
        mask, count = self.attributes["output_mask"], len(operator.outputs)
        assert isinstance(mask, tuple)
        if len(mask) != count or not all(one in (0, 1) for one in mask):
            raise self.error("output_mask", list(mask), f"{count} numbers, 0 or 1")
        return mask

    def wanted_outputs(self, operator: Operator) -> list[str]:
        """The names of the outputs that ``output_mask`` wants."""
        pairs = zip(operator.outputs, self.output_mask(operator), strict=True)
        return [output.name for output, wanted in pairs if wanted]

    def masked(self, operator: Operator, shapes: Sequence[Shape]) -> list[Tensor]:
        """The outputs, of these shapes where ``output_mask`` wants them, and without elements elsewhere."""
        each = zip(operator.types_of_outputs(self), shapes, self.output_mask(operator), strict=True)
        return [Tensor(dtype, shape if wanted else (0,)) for dtype, shape, wanted in each]

    def merged(self, shapes: Mapping[str, Shape], why: str = "") -> Shape:
        """The one shape of some arguments, as far as it is known; ``why`` is in messages, or the first of them."""
        known = {name: shape for name, shape in shapes.items() if shape is not None}
        if not known:
            return None
        first, found = next(iter(known.items()))
        for name, shape in known.items():
            if len(shape) != len(found):
                raise self.error(name, f"of shape {show(shape)}", f"shape {show(found)}, {why or f'as {first}'}")
            pairs = enumerate(zip(found, shape, strict=True))
            found = tuple(self.same(name, f"dimension {axis}", *pair) for axis, pair in pairs)
        return found

    def one_element(self, *names: str) -> None:
        """Refuse inputs that are there but are not one element, of rank 0 or 1."""
        for name in names:
            shape = self.inputs[name].shape if name in self.inputs else None
            if shape and (len(shape) > 1 or (isinstance(shape[0], int) and shape[0] != 1)):
                raise self.error(name, f"of shape {show(shape)}", "shape () or (1)")

    def flag(self, name: str) -> None:
        """Refuse an integer attribute that is neither 0 nor 1."""
        if self.attributes[name] not in (0, 1):
            raise self.error(name, self.attributes[name], "0 or 1")


@dataclass(frozen=True)
class Variant:
    """What the text of a function body depends on.

    Attributes:
        opset: the version of the default domain which the body is to use.
        inputs: the names of the inputs that the node has, in order.
        choices: what the operator reads from attributes and types: words ("mean", "double", ...), or a text.
    """

    opset: int
    inputs: tuple[str, ...]
    choices: frozenset[str] = field(default_factory=frozenset)

    @property
    def wide(self) -> bool:
        """Whether the body computes in float64."""
        return "double" in self.choices


@dataclass(frozen=True)
class Classes:
    """The integers of an input are classes: each is at least 0 and below their number, or is refused.

    Attributes:
        tensor, axis: the input and its dimension with an element for each class.
        number: the attribute with the number of classes, where no input has an element for each.
        ignored: the attribute with a number that may stand in the place of a class: there the row does not count.
        never: the attribute with a class that the integers are not.
    """

    tensor: str = ""
    axis: int = 0
    number: str = ""
    ignored: str = ""
    never: str = ""


@dataclass(frozen=True)
class Ends:
    """The integers of an input are the ends of groups: they do not decrease, and the last is the size of a dimension.

    Attributes:
        tensor, axis: the input and its dimension that is divided into groups.
    """

    tensor: str
    axis: int


@dataclass(frozen=True)
class Alignment:
    """The inputs of an operator that aligns labels with steps: an item with more labels than fit has no alignment.

    Attributes:
        scores: (steps, items, classes).
        labels: (items, longest), or those of all items joined.
        steps, lengths: how many steps and how many labels each item has.
    """

    scores: str
    labels: str
    steps: str
    lengths: str


@dataclass(frozen=True)
class Input:
    """An input: its name, its type variable, its documentation, and what its integers are where not any will do."""

    name: str
    type: str
    doc: str
    optional: bool = False
    holds: Classes | Ends | None = None


@dataclass(frozen=True)
class Output:
    """An output, of type T unless it says otherwise.

    Attributes:
        in_place: the input that the kernels may write it over, of the same shape: "" where there is none.
        type: its type variable: T, A, U, one of a single type, or one for the type that values of T are computed in,
            float or double.
    """

    name: str
    doc: str
    in_place: str = ""
    type: str = "T"


@dataclass(frozen=True)
class Attribute:
    """An attribute: its type is that of its default.

    Attributes:
        flag: whether it is 0 or 1, a bool in PyTorch.
    """

    name: str
    default: Value
    doc: str
    flag: bool = False


@dataclass(frozen=True)
class TorchOp:
    """An operator as ``torch.ops.aclnn.<stem>``, which :mod:`gradfuse.torch` registers.

    The functions get all arguments of the schema in order, as torch tensors, numbers and strings.

    Attributes:
        outputs: gives new tensors for the kernel to write. For arguments that the operator does not take they may have
            any shape, as the kernel refuses before it looks at them.
        fake: gives the results for fake tensors, whose sizes may be symbols; None: ``outputs`` can.
        setup_context, backward: the derivative, as ``torch.library.register_autograd`` takes it; None: there is none.
    """

    outputs: Callable[..., tuple[torch.Tensor, ...]]
    fake: Callable[..., tuple[torch.Tensor, ...]] | None = None
    setup_context: Callable[..., None] | None = None
    backward: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Operator:
    """One operator of the domain ``aclnn``.

    Attributes:
        name: the ONNX operator type.
        stem: the name that its files carry all over the project.
        doc: what it computes.
        summary: what it computes the gradient of, for tables of operators.
        counterpart: what computes the same in PyTorch, for tables of operators.
        inputs, outputs, attributes: in the order of the schema.
        constraints: type variable -> ONNX type strings it may stand for; ``T`` is the type of the outputs.
        infer: gives the outputs' types and shapes, raises :class:`gradfuse.ArgumentError` for what contradicts.
        choices: the words or texts which decide the text of the body, besides the inputs that are there.
        body: gives the body as ONNX text; ``$real`` is the number and ``$real_type`` the name of the type that it
            computes in.
        torch_op: the operator in PyTorch.
        oldest_opset: the oldest version of the default domain that has what the body needs.
        samples: attributes of nodes that between them have every text of the body.
        aten: PyTorch's operators that take these inputs and attributes, in this order, and give these outputs.
        spreads_nan: whether a result depends on a whole row, so that one NaN may make all results of the row NaN.
        alignment: the inputs that are aligned with each other; None where there are none.
    """

    name: str
    stem: str
    doc: str
    summary: str
    counterpart: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    attributes: tuple[Attribute, ...]
    constraints: Mapping[str, tuple[str, ...]]
    infer: Callable[[Call], Sequence[Tensor]]
    choices: Callable[[Call], Iterable[str]]
    body: Callable[[Variant], str]
    torch_op: TorchOp
    oldest_opset: int = OLDEST_OPSET
    samples: Sequence[Mapping[str, Value]] = ({},)
    aten: tuple[str, ...] = ()
    spreads_nan: bool = False
    alignment: Alignment | None = None

    @property
    def updates(self) -> bool:
        """Whether results may be written over inputs that they are new values of, as by optimizers."""
        return any(output.in_place for output in self.outputs)

    @property
    def types(self) -> tuple[str, ...]:
        """The ONNX type strings that T may stand for."""
        return self.constraints["T"]

    @cached_property
    def schema(self) -> OpSchema:
        """The ONNX schema, with type and shape inference."""
        option = OpSchema.FormalParameterOption
        schema = OpSchema(
            self.name,
            DOMAIN,
            VERSION,
            self.doc,
            inputs=[
                OpSchema.FormalParameter(
                    i.name, i.type, i.doc, param_option=option.Optional if i.optional else option.Single
                )
                for i in self.inputs
            ],
            outputs=[OpSchema.FormalParameter(o.name, o.type, o.doc) for o in self.outputs],
            type_constraints=[(name, types, DESCRIBED.get(name, "")) for name, types in self.constraints.items()],
            attributes=[
                OpSchema.Attribute(a.name, onnx.helper.make_attribute(a.name, a.default), a.doc)
                for a in self.attributes
            ],
        )
        schema.set_type_and_shape_inference_function(self._infer_in_onnx)
        return schema

    @cached_property
    def torch_schema(self) -> str:
        """Arguments and results as torch writes them: inputs, then attributes, in the order of the ONNX operator."""
        required = [k for k, i in enumerate(self.inputs) if not i.optional]
        arguments = [
            f"Tensor {i.name}" if not i.optional else f"Tensor? {i.name}{'=None' if k > required[-1] else ''}"
            for k, i in enumerate(self.inputs)
        ]
        results = [f"Tensor {output.name}" for output in self.outputs]
        returned = f"({', '.join(results)})" if len(results) > 1 else "Tensor"
        return f"({', '.join([*arguments, *map(_torch_argument, self.attributes)])}) -> {returned}"

    def call(self, node: str, inputs: Sequence[Tensor | None], attributes: Mapping[str, Value]) -> Call:
        """Describe a use of the operator by its inputs in order (None: absent) and the attributes that are given.

        Raises:
            ArgumentError: an input or attribute too many, too few, or of a wrong type.
        """
        given = {i.name: tensor for i, tensor in zip(self.inputs, inputs, strict=False) if tensor is not None}
        defaults: dict[str, Value] = {a.name: a.default for a in self.attributes}
        call = Call(self.name, node, given, {**defaults, **attributes})
        if len(inputs) > len(self.inputs):
            raise call.error("number of inputs", len(inputs), f"at most {len(self.inputs)}")
        for name in attributes:
            if name not in defaults:
                raise call.error(name, "an unknown attribute", f"one of {', '.join(defaults)}")
            if type(attributes[name]) is not type(defaults[name]):
                found = type(attributes[name]).__name__
                raise call.error(name, f"of type {found}", f"type {type(defaults[name]).__name__}")
        bound: dict[str, Input] = {}
        for i in self.inputs:
            if i.name not in given:
                if not i.optional:
                    raise call.error(i.name, "absent", "a tensor")
                continue
            dtype = given[i.name].dtype
            if dtype == TensorProto.UNDEFINED:
                continue
            if type_string(dtype) not in self.constraints[i.type]:
                raise call.error(i.name, type_string(dtype), f"one of {', '.join(self.constraints[i.type])}")
            first = bound.setdefault(i.type, i)
            if dtype != given[first.name].dtype:
                wanted = f"{type_string(given[first.name].dtype)}, as {first.name}"
                raise call.error(i.name, type_string(dtype), wanted)
        if "A" in bound and "T" in bound:
            t, a = (given[bound[name].name].dtype for name in "TA")
            allowed = {t} if t == TensorProto.DOUBLE else {t, TensorProto.BFLOAT16}
            if a not in allowed:
                wanted = " or ".join(map(type_string, sorted(allowed)))
                raise call.error(bound["A"].name, type_string(a), f"{wanted}, as {bound['T'].name} is {type_string(t)}")
        return call

    def dtype(self, call: Call, variable: str = "T") -> int:
        """The element type that T or A stands for; 0 where it is not known."""
        for name in (variable, "A"):
            found = (call.inputs[i.name].dtype for i in self.inputs if i.type == name and i.name in call.inputs)
            for dtype in found:
                if dtype != TensorProto.UNDEFINED:
                    return dtype
        return TensorProto.UNDEFINED

    def types_of_outputs(self, call: Call) -> list[int]:
        """The element type of each output of a call; 0 where that is not known."""
        return self.output_types(self.dtype(call), self.dtype(call, "A"))

    def output_types(self, t: int, a: int | None = None) -> list[int]:
        """The element type of each output where T and A are these; A is T if not told. 0 where it is not known."""
        return [self._type_of(output.type, t, t if a is None else a) for output in self.outputs]

    def _type_of(self, variable: str, t: int, a: int) -> int:
        if variable in ("T", "A"):
            return t if variable == "T" else a
        if variable == "U":
            return _OTHER.get(t, TensorProto.UNDEFINED)
        if len(self.constraints[variable]) == 1:
            return _TYPES[self.constraints[variable][0]]
        return computed_type(t)

    def variant(self, call: Call, opset: int) -> Variant:
        """The variant of the body which serves a call; refuses calls that the operator does not accept.

        Raises:
            ArgumentError: the call contradicts the operator's contract.
        """
        self.infer(call)
        present = tuple(i.name for i in self.inputs if i.name in call.inputs)
        return Variant(opset, present, frozenset(self.choices(call)))

    def function(self, variant: Variant) -> onnx.FunctionProto:
        """The body of a variant, in standard operators only.

        It has the inputs up to the last that the variant has, and every attribute with its default; attributes which
        decide the text (see :class:`Variant`) are listed but not read.
        """
        names = [i.name for i in self.inputs]
        inputs = names[: 1 + max(names.index(name) for name in variant.inputs)]
        real, real_type = (TensorProto.DOUBLE, "double") if variant.wide else (TensorProto.FLOAT, "float")
        body = Template(self.body(variant)).substitute(real=int(real), real_type=real_type)
        function = self._parsed(inputs, {"": variant.opset}, body)
        function.doc_string = self.doc
        return function

    def refusal(self, opset: int) -> onnx.FunctionProto:
        """A body that no runtime can run, for those that would give it to nodes which name another by its overload.

        They refuse a model with it by the name of the operator that is missing.
        """
        like = next(i.name for i in self.inputs if i.type in ("T", "A") and not i.optional)
        lines = [f"refused = {REFUSED[0]}.{REFUSED[1]} ({like})"]
        lines += [f"{o.name} = CastLike (refused, {like})" for o in self.outputs]
        function = self._parsed([i.name for i in self.inputs], {"": opset, REFUSED[0]: 1}, "\n".join(lines))
        function.overload = "none"
        return function

    def _parsed(self, inputs: Sequence[str], opsets: Mapping[str, int], body: str) -> onnx.FunctionProto:
        attributes = ", ".join(map(_signature, self.attributes))
        imports = ", ".join(f'"{domain}": {version}' for domain, version in opsets.items())
        head = f'<domain: "{DOMAIN}", opset_import: [{imports}]>'
        outputs = ", ".join(o.name for o in self.outputs)
        signature = f"{self.name} {f'<{attributes}>' if attributes else ''} ({', '.join(inputs)}) => ({outputs})"
        return onnx.parser.parse_function(f"{head}\n{signature} {{\n{body}\n}}")

    def _infer_in_onnx(self, context: onnx.shape_inference.InferenceContext) -> None:
        tensors = [
            _read_type(context.get_input_type(i)) if context.has_input(i) else None
            for i in range(context.get_num_inputs())
        ]
        found = {a.name: context.get_attribute(a.name) for a in self.attributes}
        attributes = {
            name: attribute_value(attribute)
            for name, attribute in found.items()
            if attribute is not None and not attribute.ref_attr_name
        }
        call = self.call(_node_name(context.get_display_name()), tensors, attributes)
        for i, tensor in enumerate(self.infer(call)):
            if context.has_output(i):
                shape = None if tensor.shape is None else list(tensor.shape)
                context.set_output_type(i, onnx.helper.make_tensor_type_proto(tensor.dtype, shape))


_OTHER: Mapping[int, int] = {TensorProto.FLOAT: TensorProto.BFLOAT16, TensorProto.BFLOAT16: TensorProto.FLOAT}


def computed_type(dtype: int) -> int:
    """The type that values of a type are computed in: float for 16 bits; 0 where it is not known."""
    return TensorProto.FLOAT if dtype in (TensorProto.FLOAT16, TensorProto.BFLOAT16) else dtype


def attribute_value(attribute: onnx.AttributeProto) -> Value:
    """The value of an attribute of one of the types that the operators use."""
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, list):
        return tuple(value)
    return value.decode() if isinstance(value, bytes) else value


def _signature(attribute: Attribute) -> str:
    """An attribute of a function as ONNX writes it in text, with its default."""
    default = attribute.default
    if isinstance(default, tuple):
        return f"{attribute.name}: ints = [{', '.join(map(str, default))}]"
    if isinstance(default, str):
        return f'{attribute.name}: string = "{default}"'
    return f"{attribute.name}: {'int' if isinstance(default, int) else 'float'} = {default}"


def _torch_argument(attribute: Attribute) -> str:
    """An attribute as a schema of torch has it, with its default."""
    default = attribute.default
    if attribute.name == "output_mask":
        assert isinstance(default, tuple)
        return f"bool[{len(default)}] output_mask={[bool(one) for one in default]}"
    if isinstance(default, tuple):
        return f"int[] {attribute.name}={list(default)}"
    if isinstance(default, str):
        return f'str {attribute.name}="{default}"'
    if attribute.flag:
        return f"bool {attribute.name}={bool(default)}"
    return f"{'int' if isinstance(default, int) else 'float'} {attribute.name}={default}"


def type_string(dtype: int) -> str:
    """The ONNX name of a tensor type, such as ``tensor(float16)``."""
    return f"tensor({TensorProto.DataType.Name(dtype).lower()})"


_TYPES: dict[str, int] = {type_string(dtype): dtype for dtype in TensorProto.DataType.values()}
"""The element type that an ONNX name of a tensor type stands for."""


def show(shape: Iterable[Dim]) -> str:
    """A shape as messages write it: ``(N, 3, ?)``."""
    return f"({', '.join('?' if dim is None else str(dim) for dim in shape)})"


def _read_type(proto: TypeProto | None) -> Tensor:
    if proto is None or not proto.HasField("tensor_type"):
        return Tensor()
    tensor = proto.tensor_type
    if not tensor.HasField("shape"):
        return Tensor(tensor.elem_type)
    return Tensor(
        tensor.elem_type,
        tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in tensor.shape.dim),
    )


def _node_name(display_name: str) -> str:
    """The name in what onnx calls a node for display: ``node Op[domain] (name)``."""
    found = re.search(r"\] \((.*)\)$", display_name)
    return found.group(1) if found else ""

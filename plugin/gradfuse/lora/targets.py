"""The products with weights of a model, and which of them patterns choose."""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir

from gradfuse.differentiation.rules import FLOATS
from gradfuse.errors import ArgumentError, few
from gradfuse.models.scopes import module_of

_OPERATORS = "MatMul, Gemm or MatMulNBits"
_MICROSOFT = "com.microsoft"
_QUANTISED = re.compile(r"(_DQ)?_Q[248]$")
"""What onnxruntime's quantiser appends to the name of a weight."""
_CALL = re.compile(r"_\d+$")
_WEIGHT = re.compile(r"(\.MatMul)?\.(weight|qweight|kernel)$")


@dataclasses.dataclass(frozen=True)
class Use:
    """A node that multiplies with a weight.

    Attributes:
        node: the node.
        weight: the initializer, or the output of a Constant, that the weight is stored in.
        in_features, out_features: the sizes of the weight.
        dtype: the element type of the product.
        module: the name of the module that the weight belongs to, as far as the file tells.
    """

    node: ir.Node
    weight: ir.Value
    in_features: int
    out_features: int
    dtype: ir.DataType
    module: str


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A node that multiplies with a weight in a way that takes no adapter, and why."""

    node: ir.Node
    weight: ir.Value
    why: str


@dataclasses.dataclass(frozen=True)
class Target:
    """A weight that gets an adapter, with the nodes beside which it is put."""

    module: str
    uses: tuple[Use, ...]

    @property
    def in_features(self) -> int:
        return self.uses[0].in_features

    @property
    def out_features(self) -> int:
        return self.uses[0].out_features

    @property
    def dtype(self) -> ir.DataType:
        return self.uses[0].dtype


def chosen(
    who: str, graph: ir.Graph, patterns: str | Iterable[str], modules: Mapping[str, str], adapters: Collection[str]
) -> list[Target]:
    """Return the weights that patterns choose, in the order of the graph.

    Args:
        who: what messages name first.
        graph: the graph, without calls of functions.
        patterns: names, or patterns as of `fnmatch`, of initializers, nodes or modules; of these also their ends.
        modules: name of a weight -> its module, where the file does not tell.
        adapters: initializers that are adapters themselves.

    Raises:
        ArgumentError: a pattern matches no weight, or a weight is read in ways that one adapter does not fit.
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise ArgumentError(f"{who}: targets is {patterns!r}; expected names or patterns of weights")
    found = [one for one in _products(graph) if one.weight.name not in adapters]
    uses = _with_own_modules([one for one in found if isinstance(one, Use)], modules, who)
    refusals = [one for one in found if isinstance(one, Refusal)]
    picked: set[ir.Node] = set()
    for pattern in patterns:
        matched = [use for use in uses if _matches(pattern, use)]
        if not matched:
            raise ArgumentError(f"{who}: targets has {pattern!r}, which {_unmatched(pattern, graph, refusals)}")
        # The name of a node chooses that node alone, and others all that read the weight: a module may be called often.
        weights = {use.weight for use in matched if not _named([pattern], use.node.name)}
        picked |= {use.node for use in matched} | {use.node for use in uses if use.weight in weights}
    grouped: dict[ir.Value, list[Use]] = collections.defaultdict(list)
    for use in uses:
        if use.node in picked:
            grouped[use.weight].append(use)
    targets = [Target(group[0].module, tuple(group)) for group in grouped.values()]
    for target in targets:
        _require_one_way(who, target, patterns, refusals)
        # torch's older exporter numbers the calls of a module.
        readers = dict.fromkeys(_CALL.sub("", module_of(use.node)) for use in target.uses)
        if len(readers) > 1 and "" not in readers:
            warnings.warn(
                f"{who}: {few(readers)} read one weight, {target.uses[0].weight.name!r}, and get one adapter, "
                f"{target.module!r}; if the exporter has merged them, as equal weights, export with optimize=False",
                stacklevel=3,
            )
    return targets


def _products(graph: ir.Graph) -> Iterator[Use | Refusal]:
    """Yield the nodes of a graph, and of those within it, that multiply with a weight."""
    for node in graph.all_nodes():
        if node.domain == _MICROSOFT and node.op_type == "MatMulNBits":
            yield from _quantised(node)
        elif not node.domain and node.op_type in ("MatMul", "Gemm"):
            yield from _plain(node)


def _quantised(node: ir.Node) -> Iterator[Use]:
    if len(node.inputs) < 3:
        return  # onnx's checker does not know the operator.
    weight, scales = node.inputs[1:3]
    columns, rows = (node.attributes.get(name) for name in ("K", "N"))
    dtype = None if scales is None else _dtype(scales)
    if weight is not None and _tensor(weight) is not None and columns and rows and dtype in FLOATS:
        assert dtype is not None
        yield Use(node, weight, columns.as_int(), rows.as_int(), dtype, _module(node, weight))


def _plain(node: ir.Node) -> Iterator[Use | Refusal]:
    left, right = (None if value is None else _traced(value) for value in node.inputs[:2])
    if right is None:
        if left is not None:
            yield Refusal(node, left[0], f"is the left operand of {_shown(node)}; expected the right one")
        return
    weight, flipped, dtype = right
    if left is not None or dtype not in FLOATS:
        return  # A constant, or integers.
    tensor = _tensor(weight)
    assert tensor is not None and dtype is not None
    shape = tensor.shape.numpy()
    if len(shape) != 2:
        yield Refusal(node, weight, f"has shape {shape}; expected a matrix")
        return
    trans_b = node.attributes.get("transB") if node.op_type == "Gemm" else None
    turned = flipped != (trans_b is not None and bool(trans_b.as_int()))
    rows, columns = reversed(shape) if turned else shape
    yield Use(node, weight, int(rows), int(columns), dtype, _module(node, weight))


def _traced(value: ir.Value) -> tuple[ir.Value, bool, ir.DataType | None] | None:
    """Return what a value is stored in, whether it is transposed since, and its type; None where it is computed."""
    flipped, dtype = False, None
    while (node := value.producer()) is not None and node.op_type != "Constant":
        if node.domain or node.op_type not in ("Identity", "Cast", "Transpose", "DequantizeLinear"):
            return None
        if node.op_type == "Transpose":
            perm = node.attributes.get("perm")
            if perm is not None and list(perm.as_ints()) != [1, 0]:
                return None
            flipped = not flipped
        elif node.op_type == "Cast" and dtype is None:
            dtype = ir.DataType(node.attributes["to"].as_int())
        elif node.op_type == "DequantizeLinear" and dtype is None and node.inputs[1] is not None:
            dtype = _dtype(node.inputs[1])
        source = node.inputs[0]
        if source is None:
            return None
        value = source
    tensor = _tensor(value)
    return None if tensor is None else (value, flipped, dtype or tensor.dtype)


def _tensor(value: ir.Value) -> ir.TensorProtocol | None:
    node = value.producer()
    if node is None:
        return value.const_value
    attribute = node.attributes.get("value") if node.op_type == "Constant" else None
    return None if attribute is None else attribute.as_tensor()


def _dtype(value: ir.Value) -> ir.DataType | None:
    traced = _traced(value)
    return value.dtype if traced is None else traced[2]


def _module(node: ir.Node, weight: ir.Value) -> str:
    """Return the name of the module of a weight: from its name, else from what the exporter noted of the node."""
    name = _QUANTISED.sub("", str(weight.name))
    noted = module_of(node)
    # A weight that is tied to an embedding may have its name.
    if _WEIGHT.search(name) and not (noted and any(use.node.op_type == "Gather" for use in weight.uses())):
        return _WEIGHT.sub("", name)
    return noted or name


def _with_own_modules(uses: Sequence[Use], modules: Mapping[str, str], who: str) -> list[Use]:
    """Return the uses with the names that are given, and with those of weights where two have one name."""
    names = {str(use.weight.name) for use in uses}
    for name in modules:
        if name not in names:
            raise ArgumentError(f"{who}: modules has {name!r}; expected names of weights of {_OPERATORS}")
    named = [dataclasses.replace(use, module=modules.get(str(use.weight.name), use.module)) for use in uses]
    weights = collections.defaultdict(set)
    for use in named:
        weights[use.module].add(use.weight)
    clashing = {module for module, sharing in weights.items() if len(sharing) > 1}
    for module in clashing & set(modules.values()):
        raise ArgumentError(f"{who}: modules has {module!r} for several weights; expected one weight a module")
    return [dataclasses.replace(u, module=str(u.weight.name)) if u.module in clashing else u for u in named]


def _matches(pattern: str, use: Use) -> bool:
    # As in PEFT, the end of a module's name will do.
    ends = use.module.endswith(f".{pattern}") or fnmatch.fnmatchcase(use.module, f"*.{pattern}")
    return ends or _named([pattern], use.weight.name, use.node.name, use.module)


def _unmatched(pattern: str, graph: ir.Graph, refusals: Iterable[Refusal]) -> str:
    """Say what a pattern matches that is no weight."""
    for refusal in refusals:
        if _named([pattern], refusal.weight.name, refusal.node.name):
            return refusal.why
    expected = f"expected weights of {_OPERATORS}"
    for node in graph.all_nodes():
        if _named([pattern], node.name):
            return f"is a node {node.op_type} without such a weight; {expected}"
    if _named([pattern], *graph.initializers):
        return f"is no weight of {_OPERATORS}; expected one"
    return f"matches nothing; {expected}"


def _require_one_way(who: str, target: Target, patterns: Iterable[str], refusals: Iterable[Refusal]) -> None:
    """Refuse a weight that is read in several ways: one adapter would not do the same to all of them."""
    first = target.uses[0]
    for use in target.uses[1:]:
        sizes, others = ((one.in_features, one.out_features, one.dtype) for one in (first, use))
        if sizes != others or _flipped(first) != _flipped(use):
            raise ArgumentError(
                f"{who}: {first.weight.name!r} is read by {_shown(first.node)} and, in another way, by "
                f"{_shown(use.node)}; expected one way, or the name of a node"
            )
    if all(_named(patterns, use.node.name) for use in target.uses):
        return
    for refusal in refusals:
        if refusal.weight is first.weight:
            raise ArgumentError(f"{who}: {first.weight.name!r} {refusal.why}, or the name of a node")


def _named(patterns: Iterable[str], *names: str | None) -> bool:
    # Names may have brackets, which patterns take for choices.
    return any(name == one or fnmatch.fnmatchcase(name, one) for one in patterns for name in names if name)


def _flipped(use: Use) -> bool:
    """Whether the product is with the transpose of what is stored."""
    if use.node.op_type == "MatMulNBits":
        return False
    traced = None if use.node.inputs[1] is None else _traced(use.node.inputs[1])
    trans_b = use.node.attributes.get("transB")
    return traced is not None and traced[1] != (trans_b is not None and bool(trans_b.as_int()))


def _shown(node: ir.Node) -> str:
    return f"{node.op_type} (node {node.name!r})"

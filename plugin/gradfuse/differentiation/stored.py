"""Tensors that a forward model stores, in initializers and Constant nodes at any depth, and what reads them."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from gradfuse.differentiation.dependence import is_branches
from gradfuse.differentiation.rules import FLOATS
from gradfuse.models import tensors
from gradfuse.models.inlining import graphs_of
from gradfuse.models.scopes import module_of, noted_parameters, noted_scopes, placeholder_of

Reader = tuple[ir.Node, int]
"""A node, and the index of its input that reads a tensor."""

_MICROSOFT = "com.microsoft"
_CUTS = frozenset({"Slice", "Split", "Gather"})
"""Operators that read a part of a tensor, and others of them the rest."""
_VIEWS = frozenset(
    {"Cast", "CastLike", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"} | _CUTS
)
"""Operators whose first input is what the nodes behind them read."""
_KEEPS_ORDER = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
_PRODUCTS = {
    ("", "Conv"): {1, 2},
    ("", "ConvTranspose"): {1, 2},
    ("", "DeformConv"): {1, 3},
    ("", "Gemm"): {0, 1, 2},
    ("", "MatMul"): {0, 1},
    (_MICROSOFT, "FusedConv"): {1, 2},
    (_MICROSOFT, "FusedGemm"): {0, 1, 2},
    (_MICROSOFT, "FusedMatMul"): {0, 1},
    (_MICROSOFT, "MatMulNBits"): {5},
}
_NORMS = {
    ("", "BatchNormalization"): {1, 2},
    ("", "GroupNormalization"): {1, 2},
    ("", "InstanceNormalization"): {1, 2},
    ("", "LayerNormalization"): {1, 2},
    ("", "RMSNormalization"): {1},
    ("", "SimplifiedLayerNormalization"): {1},
    (_MICROSOFT, "EmbedLayerNormalization"): {5, 6},
    (_MICROSOFT, "GroupNorm"): {1, 2},
    (_MICROSOFT, "SkipGroupNorm"): {1, 2},
    (_MICROSOFT, "SkipLayerNormalization"): {2, 3, 4},
    (_MICROSOFT, "SkipSimplifiedLayerNormalization"): {2, 3},
}
_OTHERS = {
    ("", "Einsum"): set(range(16)),
    ("", "GRU"): {1, 2, 3},
    ("", "LSTM"): {1, 2, 3, 7},
    ("", "PRelu"): {1},
    ("", "RNN"): {1, 2, 3},
    (_MICROSOFT, "Attention"): {1, 2},
    (_MICROSOFT, "BiasGelu"): {1},
    (_MICROSOFT, "EmbedLayerNormalization"): {2, 3, 4},
    (_MICROSOFT, "FastGelu"): {1},
    (_MICROSOFT, "MultiHeadAttention"): {3},
}
_REPEATED = re.compile(r"(.+)_\d+")
"""A module that torch's older exporter meets again."""
_FARTHEST = 8
"""How many nodes ahead of another one its layer's weight is looked for."""


class Store:
    """The stored tensors of a model without functions.

    Attributes:
        graph: the model's graph.
        producer: the name of what wrote the model.
        divided: a tensor -> those that other layers got in its place.
    """

    def __init__(self, model: ir.Model) -> None:
        self.graph = model.graph
        self.producer = model.producer_name or ""
        self.divided: dict[str, list[str]] = collections.defaultdict(list)
        self._holders = {
            branch: node for node in model.graph.all_nodes() if is_branches(node) for branch in graphs_of(node)
        }
        self._named = collections.Counter(str(value.name) for value in self._values())
        self._modules = {module_of(node) for node in model.graph.all_nodes()}
        self.has_scopes = any(noted_scopes(node) for node in model.graph.all_nodes())
        """Whether torch's newer exporter has noted the modules of nodes."""
        self._filled: dict[ir.Value, bool] = {}
        met: set[str] = set()
        for value in self.floats():
            # Branches may use one name each.
            if value.name in met:
                value.name = self.taken_from(value)
            met.add(str(value.name))

    def _values(self) -> Iterator[ir.Value]:
        for graph in (self.graph, *self.graph.subgraphs()):
            yield from {*graph.inputs, *graph.initializers.values()}
            for node in graph:
                yield from node.outputs

    def floats(self) -> list[ir.Value]:
        """Return the stored tensors of floats: initializers, then outputs of Constant nodes, in the order of graphs."""
        graphs = (self.graph, *self.graph.subgraphs())
        found = [value for graph in graphs for value in graph.initializers.values() if value.const_value is not None]
        for graph in graphs:
            found += [
                node.outputs[0]
                for node in graph
                if tensor_of(node.outputs[0] if node.outputs else None) is not None
                and not (graph is self.graph and node.outputs[0].is_graph_output())
            ]
        return [value for value in found if _dtype(value) in FLOATS]

    def readers(self, value: ir.Value) -> list[Reader]:
        """Return what reads a tensor, through views and as what a branch gives."""
        found: list[Reader] = []
        rest = [value]
        seen: set[ir.Value] = set()
        while rest:
            one = rest.pop()
            if one in seen:
                continue
            seen.add(one)
            for reader in one.uses():
                passed = self._passed(*reader)
                rest += passed
                found += [] if passed else [reader]
            rest += self._given_by_branch(one)
        return found

    def behind(self, node: ir.Node, index: int) -> list[Reader]:
        """Return the reader, or what reads through it if it is a view."""
        passed = self._passed(node, index)
        return [reader for value in passed for reader in self.readers(value)] if passed else [(node, index)]

    def _passed(self, node: ir.Node, index: int) -> list[ir.Value]:
        if (
            node.op_type == "Concat"
            and not node.domain
            and all(stored_behind(value) is not None for value in node.inputs)
        ):
            # As the parts of a recurrent layer's weights.
            return list(node.outputs)
        if node.domain or node.op_type not in _VIEWS or index != 0:
            return []
        if node.op_type == "Gather" and tensor_of(node.inputs[1]) is None:
            return []
        return list(node.outputs)

    def _given_by_branch(self, value: ir.Value) -> list[ir.Value]:
        if not value.is_graph_output() or value.graph is None or value.graph not in self._holders:
            return []
        holder = self._holders[value.graph]
        return [given for given, out in zip(holder.outputs, value.graph.outputs, strict=False) if out is value]

    def module(self, node: ir.Node) -> str:
        """Return the module of a node, which may be called several times; empty where the file does not tell."""
        module = module_of(node)
        again = _REPEATED.fullmatch(module)
        if self.has_scopes or again is None or again[1] not in self._modules:
            return module
        return module if any(name.startswith(f"{module}.") for name in self._named) else again[1]

    def layers(self, value: ir.Value, readers: Iterable[Reader]) -> list[list[Reader]]:
        """Return the readers of a tensor by the layers that they belong to, each of which may be called several times.

        A layer is known by the parameter that the file notes; else by its module, where the file names it and either
        the operator has a place for the tensor or the tensor is the module's, which each of its calls reads once; else
        by the weights that are nearest ahead, which its calls read in nodes of their own.
        """
        own = placeholder_of(str(value.name)).lower()
        found: dict[Any, list[Reader]] = {}
        met: collections.Counter[Any] = collections.Counter()
        for node, index in readers:
            cut = is_cut(node, index)
            behind, place = next(iter(self.behind(node, index)), (node, index))
            module, role = self.module(behind), "cut" if cut else (behind.op_type, place)
            noted = noted_parameters(node)
            call = module_of(behind), role
            met[call] += 1
            is_own = str(value.name).rpartition(".")[0] == module and met[call] == 1
            key: Any = module, role
            if noted:
                # Of several operands, the place tells which one it is.
                is_noted = own in {name.lower() for name in noted}
                key = own if is_noted else noted, None if is_noted and len(noted) == 1 else role
            elif not module or not (is_place(behind, place) or is_statistic(behind, place) or is_own):
                near = self._nearest(behind, value)
                weights = frozenset(stored for _, stored in near)
                met[role, near] += 1
                key = (module, role, weights, 0 if cut else met[role, near]) if near or cut else behind
            found.setdefault(key, []).append((node, index))
        return list(found.values())

    def _nearest(self, node: ir.Node, value: ir.Value) -> frozenset[tuple[ir.Node, ir.Value]]:
        """Return the weights that are nearest ahead of a node, and what reads them.

        A tensor itself and what is filled with one number are left out.
        """
        level, seen = [node], {node}
        for _ in range(_FARTHEST):
            reads = [(one, k, source) for one in level for k, source in enumerate(one.inputs) if source is not None]
            found = {
                (one, stored)
                for one, k, source in reads
                if is_place(one, k) and not _is_multiplied(one, k)
                if (stored := stored_behind(source)) is not None and stored is not value
                if not self._is_filled(stored)
            }
            if found:
                return frozenset(found)
            ahead = [source.producer() for _, _, source in reads]
            level = [one for one in dict.fromkeys(ahead) if one is not None and one not in seen]
            seen.update(level)
        return frozenset()

    def _is_filled(self, value: ir.Value) -> bool:
        if value not in self._filled:
            self._filled[value] = is_filled(array_of(value))
        return self._filled[value]

    def fresh(self, name: str) -> str:
        """Return a name that no value has: this one, or with a number behind it; it is taken then."""
        candidate, number = name, 1
        while self._named[candidate]:
            number += 1
            candidate = f"{name}_{number}"
        self._named[candidate] += 1
        return candidate

    def taken_from(self, value: ir.Value) -> str:
        """Return the name of a value, for another one; the value gets a name like it."""
        name = str(value.name)
        tensors.rename(value, self.fresh(f"{name}/read"))
        self._named[name] -= 1
        return self.fresh(name)

    def put(self, array: npt.NDArray[Any], name: str) -> ir.Value:
        """Add an initializer to the graph, of a name that is free."""
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), const_value=tensor)
        value.shape = ir.Shape(array.shape)
        self.graph.register_initializer(value)
        return value

    def lift(self, value: ir.Value) -> ir.Value:
        """Make a stored tensor an initializer of the graph, under its name or one like it."""
        name = str(value.name)
        if self.graph.initializers.get(name) is value:
            return value
        array, holder, node = array_of(value), value.graph, value.producer()
        assert holder is not None
        lifted = self.put(array, self.taken_from(value))
        if value.is_graph_output():
            # What a branch gives is computed in it.
            copy = ir.node("Identity", [lifted], name=self.fresh(f"{name}/read"))
            copy.outputs[0].name, copy.outputs[0].type = copy.name, value.type
            holder.append(copy)
            for index, output in enumerate(holder.outputs):
                if output is value:
                    holder.outputs[index] = copy.outputs[0]
        for user, index in list(value.uses()):
            user.replace_input_with(index, lifted)
        if node is None:
            del holder.initializers[str(value.name)]
        else:
            holder.remove(node)
        return lifted

    def drop(self, node: ir.Node) -> None:
        """Remove a node that nothing reads; the names of its outputs are free then."""
        for value in node.outputs:
            self._named[str(value.name)] -= 1
        assert node.graph is not None
        node.graph.remove(node, safe=True)


def tensor_of(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return the tensor that an initializer or a Constant node gives; None of anything else."""
    node = None if value is None else value.producer()
    if value is None or node is None:
        return None if value is None else value.const_value
    if node.op_type != "Constant" or node.domain:
        return None
    for name, attribute in node.attributes.items():
        if name == "value":
            return attribute.as_tensor()
        if name in ("value_float", "value_floats"):
            return ir.tensor(np.asarray(attribute.value, np.float32))
        if name in ("value_int", "value_ints"):
            return ir.tensor(np.asarray(attribute.value, np.int64))
    return None


def array_of(value: ir.Value) -> npt.NDArray[Any]:
    """Return the elements of a stored tensor."""
    tensor = tensor_of(value)
    assert tensor is not None
    return tensors.array_of(tensor)


def _dtype(value: ir.Value) -> ir.DataType | None:
    tensor = tensor_of(value)
    return None if tensor is None else tensor.dtype


def stored_behind(value: ir.Value | None, views: Iterable[str] = _VIEWS) -> ir.Value | None:
    """Return the stored tensor that a value is a view of; None where it is computed."""
    while value is not None and tensor_of(value) is None:
        node = value.producer()
        if node is None or node.domain or node.op_type not in views:
            return None
        value = node.inputs[0]
    return value


def _is_multiplied(node: ir.Node, index: int) -> bool:
    """Tell whether an input of a product is what a stored weight is multiplied with, such as rows of an embedding."""
    places = _PRODUCTS.get((node.domain, node.op_type), ())
    return index == 0 and 0 in places and stored_behind(node.inputs[1]) is not None


def is_cut(node: ir.Node, index: int) -> bool:
    """Tell whether a node reads a part of what an input gives, as other nodes may read the rest."""
    return not node.domain and node.op_type in _CUTS and index == 0


def is_filled(array: npt.NDArray[Any]) -> bool:
    """Tell whether all elements are one number, which is how equal tensors of different layers come about."""
    return bool(array.size and array.flat[0] == array.flat[-1] and (array == array.flat[0]).all())


def is_product(node: ir.Node) -> bool:
    """Tell whether a node multiplies matrices or images with a weight."""
    return (node.domain, node.op_type) in _PRODUCTS


def is_norm(node: ir.Node) -> bool:
    """Tell whether a node normalises."""
    return (node.domain, node.op_type) in _NORMS


def is_norm_place(node: ir.Node, index: int) -> bool:
    """Tell whether an input of a node is the scale or bias of a normalisation."""
    return index in _NORMS.get((node.domain, node.op_type), ())


def is_place(node: ir.Node, index: int) -> bool:
    """Tell whether an operator keeps an input for a weight, a bias or a scale."""
    key = node.domain, node.op_type
    return any(index in places.get(key, ()) for places in (_PRODUCTS, _NORMS, _OTHERS))


def is_statistic(node: ir.Node, index: int) -> bool:
    """Tell whether an input of a node is a running mean or variance."""
    return node.op_type == "BatchNormalization" and not node.domain and index in (3, 4)


def statistic_array(value: ir.Value) -> tuple[ir.Value, npt.NDArray[Any]] | None:
    """Return what a running statistic is stored in, and its elements; None where it is computed."""
    stored = stored_behind(value, _KEEPS_ORDER)
    if stored is None:
        return None
    dtypes = []
    while value is not stored:
        node = value.producer()
        assert node is not None and node.inputs[0] is not None
        if node.op_type == "Cast":
            dtypes.append(ir.DataType(node.attributes["to"].as_int()).numpy())
        value = node.inputs[0]
    array = array_of(stored).reshape(-1)
    for dtype in reversed(dtypes):
        array = array.astype(dtype)
    return stored, array

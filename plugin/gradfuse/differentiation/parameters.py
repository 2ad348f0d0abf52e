"""Which tensors of a forward model are its parameters, and under which names: one for each layer that has one."""

from __future__ import annotations

import collections
import dataclasses
import enum
import fnmatch
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from gradfuse.differentiation.rules import FLOATS
from gradfuse.differentiation.stored import (
    Reader,
    Store,
    array_of,
    is_cut,
    is_filled,
    is_norm,
    is_norm_place,
    is_place,
    is_product,
    is_statistic,
    statistic_array,
    stored_behind,
)
from gradfuse.errors import ArgumentError, listed

_WHO = "build_training_step"
_MICROSOFT = "com.microsoft"
_FIXED: Mapping[tuple[str, str], Collection[int]] = {
    ("", "Clip"): {1, 2},
    ("", "Dropout"): {1},
    ("", "NegativeLogLikelihoodLoss"): {2},
    ("", "OneHot"): {2},
    ("", "Pad"): {2},
    ("", "Range"): {0, 1, 2},
    ("", "Resize"): {1, 2},
    ("", "RoiAlign"): {1},
    ("", "RotaryEmbedding"): {1, 2},
    ("", "STFT"): {2},
    ("", "SoftmaxCrossEntropyLoss"): {2},
    ("", "Upsample"): {1},
    (_MICROSOFT, "DequantizeLinear"): {1},
    (_MICROSOFT, "DynamicQuantizeMatMul"): {2},
    (_MICROSOFT, "GatherBlockQuantized"): {2},
    (_MICROSOFT, "GroupQueryAttention"): {3, 4, 7, 8},
    (_MICROSOFT, "MatMulIntegerToFloat"): {2, 3},
    (_MICROSOFT, "RotaryEmbedding"): {2, 3},
}
"""Inputs for settings and tables: tensors stored for them are not parameters."""
_STATES: Mapping[str, Collection[int]] = {"GRU": {5}, "LSTM": {5, 6}, "RNN": {5}}
_JOINING = {"Add", "Concat", "Sum", "Mean", "Max", "Min"}
_MADE = re.compile(r"onnx::|/|val_\d|(scalar|lifted|_)_?tensor|ortshared_|(full|ones|zeros)\b")
"""How names begin that exporters and optimizers make up."""
_MADE_AT_END = re.compile(r"_output_\d+$|const_fold_opt|(_default|Constant)(_\d+)?$")
_FEW = 8
"""From this many elements on, numbers do not follow a formula by accident."""
_LOOKED_AT = 256
"""In how many rows and columns a formula is looked for."""
_REPEATED = 4
"""A tensor is a table if it has each of its numbers so many times."""
_NEAR = 1e-4
"""How far numbers may be from a formula, of their size."""
_MASKING = 1e4
"""Attention masks hold numbers at least this large, and weights do not."""
_MERGED_AT_MOST = 1024
"""How many elements a tensor has at most that torch's newer exporter merges with an equal one."""
_LEAVES: Mapping[tuple[str, int], str] = {
    **{(op, 0): "weight" for op in ("Gather", "MatMul", "Mul")},
    **{(op, 1): "weight" for op in ("BatchNormalization", "Conv", "ConvTranspose", "Gemm", "GroupNormalization")},
    **{(op, 1): "weight" for op in ("InstanceNormalization", "LayerNormalization", "MatMul", "Mul", "PRelu")},
    **{(op, 2): "bias" for op in ("BatchNormalization", "Conv", "ConvTranspose", "Gemm", "GroupNormalization")},
    **{(op, 2): "bias" for op in ("InstanceNormalization", "LayerNormalization")},
    **{("Add", index): "bias" for index in (0, 1)},
    ("BatchNormalization", 3): "running_mean",
    ("BatchNormalization", 4): "running_var",
}
"""What torch calls the parameters that operators read."""


class Verdict(enum.Enum):
    """The role of a stored tensor."""

    PARAMETER = "parameter"
    NUMBER = "number"
    DOUBTFUL = "doubtful"
    """A number by its looks; the caller is warned."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The parameters that are asked for.

    Attributes:
        names: those of their initializers.
        left_out: tensors that are treated as numbers though they may be meant to train.
        shared: parameters that several layers read.
        copies: parameter -> another one of its values, or of those transposed.
        parts: a parameter that the caller has named -> tensors that other layers read in its place, which stay.
        doubled: nodes that add or join two values, which are one that is trained.
        named: name or pattern that the caller has given -> the parameters that it selects; None where all are to train.
        weights: the model's other weights, and running statistics, which stay as they are.
    """

    names: list[str]
    left_out: list[str]
    shared: list[str]
    copies: dict[str, str]
    parts: dict[str, list[str]]
    doubled: list[ir.Node]
    named: Mapping[str, list[str]] | None
    weights: list[str]


def verdict(store: Store, value: ir.Value, readers: Iterable[Reader]) -> Verdict:
    """Return what a stored tensor is to some of its readers.

    Args:
        store: the tensors of the model.
        value: the tensor.
        readers: what reads it, but for views.
    """
    readers = [reader for reader in readers if not is_fixed(*reader)]
    array = array_of(value)
    if not readers or not array.size:
        return Verdict.NUMBER
    largest = max(-float(array.min()), float(array.max()))
    if not np.isfinite(largest) or not np.isfinite(float(array.min())):
        return Verdict.NUMBER
    made = is_made_up(value)
    if array.ndim or any(node.op_type == "PRelu" for node, _ in readers):
        if any(_is_weight(array, *reader) for reader in readers):
            return Verdict.PARAMETER
        # Layers without a scale of their own have one of ones in the file.
        is_dummy = made and store.producer == "pytorch" and is_filled(array)
        if not is_dummy and any(is_norm_place(*reader) for reader in readers):
            return Verdict.PARAMETER
        # What has rows is no bias if it follows a formula, but a table of positions that were added to a product.
        is_table = array.squeeze().ndim > 1 and _follows_a_formula(array, readers)
        if not is_table and any(_is_bias(array.size, *reader) or _is_affine(array.size, *reader) for reader in readers):
            return Verdict.PARAMETER
    if array.size == 1:
        is_named = store.producer == "pytorch" and not made
        return Verdict.DOUBTFUL if is_named else Verdict.NUMBER
    is_state = all(_is_state(*reader) for reader in readers)
    if is_filled(array) and (made or (is_state and not array.flat[0])):
        # A table of zeros may have been folded from one that trains.
        return Verdict.DOUBTFUL if value.producer() is None and not is_state else Verdict.NUMBER
    if largest >= _MASKING and not any(node.op_type == "Gather" for node, _ in readers):
        return Verdict.NUMBER
    if _follows_a_formula(array, readers) or any(_standardises(*reader) for reader in readers):
        return Verdict.NUMBER if made else Verdict.DOUBTFUL
    return Verdict.PARAMETER


def is_fixed(node: ir.Node, index: int) -> bool:
    """Tell whether what is stored for an input of a node is never a parameter."""
    return is_statistic(node, index) or index in _FIXED.get((node.domain, node.op_type), ())


def is_made_up(value: ir.Value) -> bool:
    """Tell whether a tensor is in a Constant node, or has a name that no layer gives to a parameter."""
    name = str(value.name)
    return value.producer() is not None or bool(_MADE.match(name) or _MADE_AT_END.search(name))


def _is_weight(array: npt.NDArray[Any], node: ir.Node, index: int) -> bool:
    if node.op_type == "MatMul" and array.ndim > 2 and max(array.shape) == array.size:
        return False  # Outer products are of positions and frequencies.
    return is_place(node, index) and not is_norm_place(node, index)


def _is_state(node: ir.Node, index: int) -> bool:
    return not node.domain and index in _STATES.get(node.op_type, ())


def _ahead(value: ir.Value | None) -> ir.Node | None:
    """Return the node that computes what a value is a view of."""
    node = None if value is None else value.producer()
    while node is not None and not node.domain and node.op_type in ("Cast", "Identity", "Reshape", "Transpose"):
        source = node.inputs[0]
        node = None if source is None else source.producer()
    return node


def _is_bias(size: int, node: ir.Node, index: int) -> bool:
    """Tell whether a node adds a tensor to a product with a weight, or to what a scale of normalised values gives."""
    if node.op_type != "Add" or node.domain:
        return False
    product = _ahead(node.inputs[1 - index])
    if product is None:
        return False
    if product.op_type == "Mul" and not product.domain:
        stored = [k for k, value in enumerate(product.inputs) if stored_behind(value) is not None]
        return len(stored) == 1 and _is_affine(size, product, stored[0])
    if not is_product(product):
        return False
    sizes = [_out_features(product, k) for k in (0, 1) if k < len(product.inputs)]
    found = [one for one in sizes if one is not None]
    return bool(found) and (size > 1 or 1 in found)


def _out_features(product: ir.Node, index: int) -> int | None:
    """Return how many features a product has if an input is its weight; None if it is none, or they are not known."""
    value = product.inputs[index]
    stored = stored_behind(value)
    if stored is None or value is None:
        return None
    shape = array_of(stored).shape
    if product.op_type in ("Conv", "FusedConv"):
        return int(shape[0]) if index == 1 else None
    if product.op_type == "ConvTranspose":
        group = product.attributes.get("group")
        return int(shape[1]) * (1 if group is None else int(group.as_int())) if index == 1 else None
    if len(shape) < 2:
        return 1
    transposed = product.attributes.get("transB" if index else "transA")
    is_turned = transposed is not None and bool(transposed.as_int())
    while value is not stored:
        node = value.producer()
        assert node is not None and node.inputs[0] is not None
        is_turned ^= node.op_type == "Transpose"
        value = node.inputs[0]
    return int(shape[-2 if is_turned == bool(index) else -1])


def _is_affine(size: int, node: ir.Node, index: int) -> bool:
    """Tell whether a node multiplies normalised values by a tensor, as where a group normalisation is written out."""
    if node.op_type != "Mul" or node.domain:
        return False
    ahead = _ahead(node.inputs[1 - index])
    if ahead is None:
        return False
    if is_norm(ahead):
        scale = stored_behind(ahead.inputs[1]) if len(ahead.inputs) > 1 else None
        return size > 1 or (scale is not None and array_of(scale).size == 1)
    if size == 1 or ahead.domain or ahead.op_type not in ("Div", "Mul"):
        return False
    factors = [_ahead(value) for value in ahead.inputs]
    if ahead.op_type == "Div":
        return factors[1] is not None and factors[1].op_type == "Sqrt"
    return any(one is not None and one.op_type == "Reciprocal" for one in factors)


def _standardises(node: ir.Node, index: int) -> bool:
    """Tell whether a node subtracts a stored mean or divides by a stored deviation, one after the other."""
    if node.domain or index != 1 or node.op_type not in ("Div", "Sub"):
        return False
    if node.op_type == "Div":
        ahead = _ahead(node.inputs[0])
        return (
            ahead is not None
            and ahead.op_type == "Sub"
            and not ahead.domain
            and stored_behind(ahead.inputs[1]) is not None
        )
    readers = node.outputs[0].uses()
    return any(
        user.op_type == "Div" and not user.domain and k == 0 and stored_behind(user.inputs[1]) is not None
        for user, k in readers
    )


def _follows_a_formula(array: npt.NDArray[Any], readers: Sequence[Reader]) -> bool:
    """Tell whether numbers are positions, frequencies, waves of positions, or a few only, as of a mask or a grid."""
    array = array.squeeze()
    if array.size < _FEW:
        return False
    if all(node.op_type == "Gather" for node, _ in readers):
        # Rows that are looked up are weights, whatever they begin as, but for waves.
        return array.ndim > 1 and bool(-1 <= array.min() and array.max() <= 1) and _recurs(array)
    if array.min() < array.max():
        # A few are enough to tell of most tensors, which may be large.
        parts = (array.flat[:_LOOKED_AT], array.flat[:: -(-array.size // _LOOKED_AT)])
        if all(len(np.unique(part)) <= max(2, len(part) // _REPEATED) for part in parts):
            return True
    return any(_recurs(np.moveaxis(array, axis, 0)) for axis in range(array.ndim))


def _recurs(array: npt.NDArray[Any]) -> bool:
    """Tell whether all columns are arithmetic or geometric sequences, or waves: x[n+1] + x[n-1] = c x[n]."""
    rows = array[:_LOOKED_AT]
    columns = rows.reshape(len(rows), -1)[:, :_LOOKED_AT].astype(np.float64)
    if len(columns) < _FEW or bool((columns == columns[0]).all()):
        return False
    before, middle, after = columns[:-2], columns[1:-1], columns[2:]
    scale = np.abs(columns).max(0)
    squares = (middle * middle).sum(0)
    factor = (middle * (before + after)).sum(0) / np.where(squares == 0, 1.0, squares)
    if bool((np.abs(before + after - factor * middle) <= _NEAR * scale).all()) and bool((factor <= 2 + _NEAR).all()):
        return True
    apart = np.abs(middle * middle - before * after)
    return bool((columns != 0).all()) and bool((apart <= _NEAR * middle * middle).all())


def separate(store: Store) -> None:
    """Give each layer tensors of its own if a file has one for several, because exporters merge equal ones.

    Running statistics get initializers of their own. Other tensors do where they are filled with one number, as those
    of layers are that were not trained yet; what one layer reads several times stays one.
    """
    _own_statistics(store)
    for node in list(store.graph.all_nodes()):
        _put_identity_in(store, node)
    for value in store.floats():
        if is_filled(array_of(value)) and len(list(value.uses())) > 1:
            _divide(store, value)


def _own_statistics(store: Store) -> None:
    sources = {
        value: None
        for node in store.graph.all_nodes()
        for index, value in enumerate(node.inputs)
        if value is not None and is_statistic(node, index)
    }
    for value in sources:
        found = statistic_array(value)
        uses = list(value.uses())
        if found is None:
            continue
        stored, array = found
        is_own = all(is_statistic(*use) for use in uses)
        if is_own and value is stored and value.name in store.graph.initializers:
            continue
        # A view that nothing else is taken of is what the model calls its source.
        source = stored if len(list(stored.uses())) == 1 else value
        name = store.taken_from(source) if is_own else None
        for readers in store.layers(value, [use for use in uses if is_statistic(*use)]):
            copy = store.put(array, store.fresh(statistic_name(store, *readers[0])) if name is None else name)
            name = None
            for node, index in readers:
                node.replace_input_with(index, copy)
        _drop_unread(store, value)


def statistic_name(store: Store, node: ir.Node, index: int) -> str:
    """Return what to call a running statistic of a node: after its module, or else its output."""
    scale = node.inputs[1]
    module = store.module(node) or ("" if scale is None else str(scale.name).rpartition(".")[0])
    return f"{module or node.outputs[0].name}.{_LEAVES[node.op_type, index]}"


def _drop_unread(store: Store, value: ir.Value | None) -> None:
    """Remove the nodes that give a value which nothing reads any more."""
    while value is not None and not value.uses() and not value.is_graph_output():
        node = value.producer()
        if node is None or len(node.outputs) != 1:
            return
        value = node.inputs[0] if node.inputs else None
        store.drop(node)


def _put_identity_in(store: Store, node: ir.Node) -> None:
    """Put a tensor of its own in the place of a copy, by which torch's older exporter merges those that are equal."""
    if node.op_type != "Identity" or node.domain or node.inputs[0] is None:
        return
    value, copy = node.inputs[0], node.outputs[0]
    if stored_behind(value, ()) is None or copy.is_graph_output():
        return
    array = array_of(value)
    is_float = ir.DataType.from_numpy(array.dtype) in FLOATS
    if len(list(value.uses())) < 2 or array.size < 2 or not is_float or not is_filled(array):
        return
    copy.replace_all_uses_with(store.put(array, store.taken_from(copy)))
    store.drop(node)


def _divide(store: Store, value: ir.Value) -> None:
    """Give all layers but one that read a tensor one of their own."""
    meant = [use for use in value.uses() if verdict(store, value, store.behind(*use)) is Verdict.PARAMETER]
    layers = store.layers(value, meant)
    is_kept = len(meant) < len(list(value.uses()))
    if len(layers) + is_kept < 2 or not layers:
        return
    name, modules = str(value.name), [_module_of(store, *readers[0]) for readers in layers]
    own = [k for k, module in enumerate(modules) if module and name.startswith(f"{module}.")]
    keeper = own[0] if own else None if is_kept else 0
    value = store.lift(value)
    leaves: dict[Any, str] = dict(_LEAVES)
    if own:
        # What the tensor is called in its own layer, it is called in others.
        leaves[_role(store, *layers[own[0]][0])] = name[len(modules[own[0]]) + 1 :]
    for k, (module, readers) in enumerate(zip(modules, layers, strict=True)):
        if k == keeper:
            continue
        leaf = leaves.get(_role(store, *readers[0]))
        copy = store.put(array_of(value), store.fresh(f"{module}.{leaf}" if module and leaf else name))
        store.divided[name].append(str(copy.name))
        for user, place in readers:
            user.replace_input_with(place, copy)


def _role(store: Store, node: ir.Node, index: int) -> tuple[str, int]:
    behind, place = next(iter(store.behind(node, index)), (node, index))
    return behind.op_type, place


def tie(store: Store, pairs: Mapping[str, str]) -> None:
    """Let the readers of some tensors read others of the same values, or of those transposed.

    Raises:
        ArgumentError: a name is unknown, stands for itself, or the values differ.
    """
    by_name = {str(value.name): value for value in store.floats()}
    problems = [
        f"{name!r}, which is no stored tensor of floats"
        for pair in pairs.items()
        for name in pair
        if name not in by_name
    ]
    if problems:
        raise ArgumentError(f"{_WHO}: tie has {listed(problems, quoted=False)}; expected names of equal tensors")
    for name in pairs:
        other = name
        for _ in pairs:
            other = pairs.get(other, other)
        if other in pairs:
            raise ArgumentError(f"{_WHO}: tie has {name!r}, which is tied to itself; expected another name")
        one, root = store.lift(by_name[name]), store.lift(by_name[other])
        by_name |= {name: one, other: root}
        _tie(store, one, root)


def _tie(store: Store, one: ir.Value, root: ir.Value) -> None:
    a, b = array_of(one), array_of(root)
    if a.shape == b.shape and bool((a == b).all()):
        source = root
    elif a.ndim == 2 and a.T.shape == b.shape and bool((a.T == b).all()):
        name = store.fresh(f"{one.name}/tied")
        node = ir.node("Transpose", [root], {"perm": [1, 0]}, name=name)
        source = node.outputs[0]
        source.name, source.type, source.shape = name, one.type, ir.Shape(a.shape)
        store.graph.insert_before(store.graph[0], node)
    else:
        shapes = "of one shape, but not equal" if a.shape == b.shape else f"{list(a.shape)} and {list(b.shape)}"
        raise ArgumentError(
            f"{_WHO}: tie has {one.name!r} and {root.name!r}, which are {shapes}; expected equal tensors, or a matrix "
            "and its transpose"
        )
    one.replace_all_uses_with(source)
    del store.graph.initializers[str(one.name)]


class _Verdicts(Mapping[str, Verdict]):
    """What stored tensors are to all of their readers: those that nobody asks for are not read, as they may be large.

    Args:
        store: the tensors of the model.
        values: the tensors, by name.
    """

    def __init__(self, store: Store, values: Mapping[str, ir.Value]) -> None:
        self._store = store
        self._values = values
        self._known: dict[str, Verdict] = {}

    def __getitem__(self, name: str) -> Verdict:
        if name not in self._known:
            value = self._values[name]
            self._known[name] = verdict(self._store, value, self._store.readers(value))
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def choose(
    store: Store, trainable: Iterable[str] | None, frozen: Iterable[str] | None, *, weights: bool = False
) -> Choice:
    """Return the parameters that are to be trained, each an initializer of the graph.

    Args:
        store: the tensors of the model.
        trainable, frozen: as for `build_training_step`.
        weights: whether weights that are not trained are initializers of the graph, too, and are named.

    Raises:
        ArgumentError: nothing is left, or a pattern matches nothing, statistics or integers.
    """
    values = {str(value.name): value for value in store.floats()}
    statistics = {
        name for name, value in values.items() if value.uses() and all(is_statistic(*u) for u in value.uses())
    }
    found = _Verdicts(store, {name: value for name, value in values.items() if name not in statistics})
    names: list[str] = []
    left_out: list[str] = []
    if trainable is None:
        names = [name for name, one in found.items() if one is Verdict.PARAMETER]
        names = names or _numbers(store, values, found)
        left_out = [name for name, one in found.items() if one is Verdict.DOUBTFUL and name not in names]
    problems: list[str] = []
    named = None if trainable is None else _matching(store, "trainable", trainable, values, found, problems)
    if named is not None:
        names = _joined(named)
    kept = set() if frozen is None else set(_joined(_matching(store, "frozen", frozen, values, found, problems)))
    if problems:
        raise ArgumentError(f"{_WHO}: {listed(problems, quoted=False)}; expected float initializers")
    names = [name for name in names if name not in kept]
    if not names:
        raise ArgumentError(f"{_WHO}: no float initializer is left to train; expected at least one")
    shared = [name for name in names if _is_shared(store, values[name])]
    copies = _copies(store.producer, {name: values[name] for name in names})
    divided = {} if trainable is None else {name: store.divided[name] for name in names if name in store.divided}
    parts = {name: [one for one in ones if one not in names and one not in kept] for name, ones in divided.items()}
    others = [name for name, one in found.items() if one is Verdict.PARAMETER and name not in names] if weights else []
    others += [name for name in values if name in statistics] if weights else []
    for name in (*names, *others):
        store.lift(values[name])
    left_out = [name for name in left_out if name not in kept]
    doubled = _doubled(store, {values[name] for name in names}) if store.has_scopes else []
    parts = {name: ones for name, ones in parts.items() if ones}
    if named is not None:
        named = {pattern: [name for name in matched if name not in kept] for pattern, matched in named.items()}
    return Choice(names, left_out, shared, copies, parts, doubled, named, weights=others)


def _numbers(store: Store, values: Mapping[str, ir.Value], found: Mapping[str, Verdict]) -> list[str]:
    """Return the initializers of one element that have a shape: what a model trains that has nothing else."""
    arrays = {name: array_of(values[name]) for name in found if name in store.graph.initializers}
    return [name for name, array in arrays.items() if array.size == 1 and array.ndim]


def _matching(
    store: Store,
    argument: str,
    patterns: Iterable[str],
    values: Mapping[str, ir.Value],
    found: Mapping[str, Verdict],
    problems: list[str],
) -> dict[str, list[str]]:
    """Return what each pattern matches: parameters, and where it matches none of these, what else it matches.

    What is wrong with patterns is added to `problems`.
    """
    if not isinstance(patterns, Iterable):
        raise ArgumentError(f"{_WHO}: {argument} is {patterns!r}; expected names or patterns")
    matched: dict[str, list[str]] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if not isinstance(pattern, str):
            raise ArgumentError(f"{_WHO}: {argument} has {pattern!r}; expected names or patterns")
        every = [name for name in found if name == pattern or fnmatch.fnmatchcase(name, pattern)]
        weights = [name for name in every if found[name] is Verdict.PARAMETER or name == pattern]
        if not every:
            problems.append(f"{argument} has {pattern!r}, which {_unmatched(store, pattern, values)}")
        matched[pattern] = weights or every
    return matched


def _joined(matched: Mapping[str, Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for names in matched.values() for name in names))


def _unmatched(store: Store, pattern: str, values: Mapping[str, ir.Value]) -> str:
    if any(name == pattern or fnmatch.fnmatchcase(name, pattern) for name in values):
        return "is a running statistic of BatchNormalization"
    for name, value in store.graph.initializers.items():
        if fnmatch.fnmatchcase(name, pattern) and value.const_value is not None:
            return f"is {value.const_value.dtype}"
    return "matches nothing"


def _doubled(store: Store, parameters: Collection[ir.Value]) -> list[ir.Node]:
    """Return nodes that read one trained value in two places, as is left of layers that an exporter made one."""
    trained, found = set(parameters), []
    for node in store.graph:
        read = [value for value in node.inputs if value in trained]
        if read:
            trained.update(node.outputs)
        if node.op_type in _JOINING and len(set(read)) < len(read):
            found.append(node)
    return found


def _is_shared(store: Store, value: ir.Value) -> bool:
    """Tell whether layers read a tensor that look like different ones: biases are seldom shared, weights often."""
    uses = list(value.uses())
    array = array_of(value)
    if len(uses) < 2 or array.size < 2:
        return False
    if array.ndim == 1:
        if len(store.layers(value, uses)) > 1:
            return True
        # They seem to read one weight; but merged tensors may come from layers that share only a weight.
        return is_filled(array) and any(not is_cut(*reader) and not _module_of(store, *reader) for reader in uses)
    if store.producer != "pytorch":
        return False
    if not store.has_scopes:
        copies = [node for node, _ in uses if node.op_type == "Identity" and not is_made_up(node.outputs[0])]
        kinds = [(behind[0].op_type, behind[1]) for node in copies for behind in store.behind(node, 0)[:1]]
        own = [(node.op_type, index) for node, index in uses if node not in copies]
        return any(count > 1 for count in collections.Counter([*kinds, *dict.fromkeys(own)]).values())
    behind = [store.behind(*reader)[0] for reader in uses if store.behind(*reader)]
    modules = collections.defaultdict(set)
    for node, index in behind:
        modules[node.op_type, index].add(store.module(node))
    return array.size <= _MERGED_AT_MOST and any(len(found - {""}) > 1 for found in modules.values())


def _module_of(store: Store, node: ir.Node, index: int) -> str:
    return next((store.module(reader[0]) for reader in store.behind(node, index)), "")


def _copies(producer: str, values: Mapping[str, ir.Value]) -> dict[str, str]:
    """Return which matrices have the values of an earlier one, or those transposed.

    Layers that begin equal have the names of their modules; a copy that an exporter has folded has none.
    """
    found: dict[str, str] = {}
    groups: dict[Any, list[str]] = {}
    for name, value in values.items():
        array = array_of(value)
        if array.ndim > 1 and not is_filled(array):
            bits = np.ascontiguousarray(array).view(np.uint8).reshape(array.size, -1)
            # Sums of integers are the same in any order.
            key = array.dtype, tuple(sorted(array.shape)), tuple(bits.sum(0, dtype=np.uint64).tolist())
            groups.setdefault(key, []).append(name)
    for names in groups.values():
        for position, name in enumerate(names):
            for other in names[:position]:
                by_module = producer == "pytorch" and not (is_made_up(values[name]) or is_made_up(values[other]))
                if other in found or by_module:
                    continue
                a, b = array_of(values[name]), array_of(values[other])
                if (a.shape == b.shape and bool((a == b).all())) or (
                    a.ndim == 2 and a.T.shape == b.shape and bool((a.T == b).all())
                ):
                    found[name] = other
                    break
    return found


def warn(store: Store, choice: Choice, parameters: Collection[str]) -> None:
    """Tell the caller of `build_training_step` of parameters that may be meant otherwise."""
    messages = []
    shared = [name for name in choice.shared if name in parameters]
    if shared:
        messages.append(
            f"several nodes read {listed(shared)}; each trains as one tensor. Exporters merge initializers of equal "
            f"value: {_advice(store)}"
        )
    copies = {name: other for name, other in choice.copies.items() if name in parameters and other in parameters}
    if copies:
        shown = listed([f"{name!r} has the values of {other!r}" for name, other in copies.items()], quoted=False)
        name, other = next(iter(copies.items()))
        messages.append(f"{shown}; each trains by itself. If they are one weight: tie={{{name!r}: {other!r}}}")
    for name, parts in choice.parts.items():
        messages.append(
            f"trainable has {name!r}, whose values other layers have too; {listed(parts)} stay as they are, and "
            f"trainable takes their names. If they are one parameter: tie={{{parts[0]!r}: {name!r}}}"
        )
    if choice.doubled:
        shown = listed([f"{one.op_type} (node {one.name!r})" for one in choice.doubled], quoted=False)
        messages.append(
            f"{shown} reads one value twice. Exporters make one of layers of equal weights, and the weights of the "
            f"others are lost: {_advice(store)}"
        )
    if choice.left_out:
        messages.append(
            f"{listed(choice.left_out)} stay as they are, as single numbers and what looks like a table, a mask or "
            "statistics do; trainable takes their names where they are to train"
        )
    for message in messages:
        warnings.warn(f"{_WHO}: {message}", stacklevel=4)


def _advice(store: Store) -> str:
    if store.producer != "pytorch":
        return "give each layer an initializer of its own if they are different parameters"
    if store.has_scopes:
        return "torch.onnx.export does not with optimize=False"
    return "torch.onnx.export(dynamo=False) does not with keep_initializers_as_inputs=True"

"""`gradfuse.add_lora` and `gradfuse.add_lora_inputs`: a model with low-rank adapters beside its weights."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from gradfuse.errors import ArgumentError, ModelError
from gradfuse.lora.targets import Target, Use, chosen
from gradfuse.models import reading
from gradfuse.models.conversion import inline_functions
from gradfuse.models.inlining import values_of
from gradfuse.models.memory import collection_paused
from gradfuse.models.scalars import real, whole

if TYPE_CHECKING:
    from gradfuse.models.reading import ModelLike

METADATA_KEY = "gradfuse.lora"
"""The model's metadata with module -> rank and alpha, as JSON; both are null where adapters are inputs."""


def add_lora(
    model: ModelLike,
    targets: str | Iterable[str],
    rank: int = 8,
    alpha: float = 8,
    *,
    seed: int = 0,
    modules: Mapping[str, str] | None = None,
) -> Any:
    """Add low-rank adapters beside weights of a model, to be trained.

    A product `x W` becomes `x W + alpha / rank * x A^T B^T`, for the weights of MatMul, Gemm (with its factor alpha
    before the sum) and onnxruntime's MatMulNBits. A weight may be stored transposed, in another type, or as integers
    behind DequantizeLinear. A weight that several nodes read has one adapter, beside each of them.

    A is an initializer `<module>.lora_A.weight` of shape (rank, in), and B is `<module>.lora_B.weight` of shape
    (out, rank), as in PEFT. A is uniform within 1 / sqrt(in), B is 0, so that the model's outputs do not change. They
    are float64 beside weights in float64, and float32 otherwise. Functions of the model are inlined. A training step
    that trains adapters alone is `build_training_step(model, loss, trainable=["*.lora_*"])`.

    Args:
        model: a path, an `onnx.ModelProto`, an `onnx_ir.Model` or a `torch.onnx.ONNXProgram`.
        targets: names of initializers, nodes or modules, or patterns as of `fnmatch`; as in PEFT, the last parts of a
            module's name suffice: "q_proj". A pattern selects the weights among what it matches: "*" selects all.
        rank: the rank of the adapters, PEFT's `r`.
        alpha: PEFT's `lora_alpha`.
        seed: the seed of A.
        modules: name of a weight -> name of its module, for files that have lost it. It is otherwise taken from the
            weight's name (`<module>.weight`), from torch.onnx's metadata of a node, or from the node's name; if none of
            these has it, it is the weight's name.

    Returns:
        The model, of the same kind.

    Raises:
        ArgumentError: a pattern matches no weight, a weight is not a matrix or is read in several ways, a module has an
            adapter already, or a number is out of range.
        ModelError: the model cannot be read.
    """
    with collection_paused():
        return _changed(model, lambda loaded: with_adapters(loaded, targets, rank, alpha, seed=seed, modules=modules))


def add_lora_inputs(model: ModelLike, targets: str | Iterable[str], *, modules: Mapping[str, str] | None = None) -> Any:
    """Add optional inputs for low-rank adapters beside weights of a model, to be served by stock onnxruntime.

    The adapters of `add_lora` are inputs here, of any rank, whose default values have rank 0: without an adapter the
    model's outputs do not change. `onnxruntime.RunOptions.add_active_adapter` sets them, from a file that
    `save_adapter` wrote, for one run. The file's B includes the scale alpha / rank, so that adapters of any rank and
    alpha fit one model.

    Args:
        model: as for `add_lora`.
        targets: as for `add_lora`.
        modules: as for `add_lora`.

    Returns:
        The model, of the same kind.

    Raises:
        ArgumentError: as for `add_lora`.
        ModelError: the model cannot be read.
    """
    with collection_paused():
        return _changed(model, lambda loaded: with_adapter_inputs(loaded, targets, modules=modules))


def _changed(model: ModelLike, change: Callable[[ir.Model], Any]) -> Any:
    """Return a model, of the same kind, after a function has changed it."""
    loaded = reading.load(model)
    change(loaded.ir)
    return loaded.restore(loaded.ir)


def with_adapters(
    model: ir.Model,
    targets: str | Iterable[str],
    rank: int,
    alpha: float,
    *,
    seed: int = 0,
    modules: Mapping[str, str] | None = None,
) -> list[str]:
    """Do the work of `add_lora` on a model itself, and return the names of the adapters' initializers."""
    who = "add_lora"
    known_rank, known_alpha = whole(rank), real(alpha)
    if known_rank is None or known_rank < 1:
        raise ArgumentError(f"{who}: rank is {rank!r}; expected a positive integer")
    if known_alpha is None or not (math.isfinite(known_alpha) and known_alpha > 0):
        raise ArgumentError(f"{who}: alpha is {alpha!r}; expected a positive number")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ArgumentError(f"{who}: seed is {seed!r}; expected an integer from 0 on")
    return _added(who, model, targets, modules, known_rank, known_alpha, np.random.default_rng(seed))


def with_adapter_inputs(
    model: ir.Model, targets: str | Iterable[str], *, modules: Mapping[str, str] | None = None
) -> list[str]:
    """Do the work of `add_lora_inputs` on a model itself, and return the names of the inputs."""
    return _added("add_lora_inputs", model, targets, modules, None, None, None)


def adapter_names(module: str) -> tuple[str, str]:
    """Return the names of A and B of a module."""
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def known_modules(who: str, metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return what the metadata of a model says about the adapters of each module.

    Raises:
        ModelError: it is not what `add_lora` writes.
    """
    text = metadata.get(METADATA_KEY, "{}")
    try:
        known = json.loads(text)
        complete = isinstance(known, dict) and all({"rank", "alpha"} <= found.keys() for found in known.values())
    except (ValueError, AttributeError, RecursionError):
        complete = False
    if not complete:
        raise ModelError(f"{who}: the metadata {METADATA_KEY!r} is {text[:100]!r}; expected what add_lora writes")
    return dict(known)


def _added(
    who: str,
    model: ir.Model,
    targets: str | Iterable[str],
    modules: Mapping[str, str] | None,
    rank: int | None,
    alpha: float | None,
    rng: np.random.Generator | None,
) -> list[str]:
    if model.functions:
        inline_functions(model)
    known = known_modules(who, model.metadata_props)
    adapters = {name for module in known for name in adapter_names(module)}
    names = {str(value.name) for value in values_of(model.graph)}
    found: list[str] = []
    for target in chosen(who, model.graph, targets, modules or {}, adapters):
        taken = [name for name in adapter_names(target.module) if name in names]
        if taken:
            raise ArgumentError(f"{who}: the model has {taken[0]!r} already; expected a module without adapters")
        known[target.module] = {"rank": rank, "alpha": alpha}
        a, b = _adapter(model.graph, target, rank, rng)
        scale = 1.0 if rank is None or alpha is None else alpha / rank
        for use in target.uses:
            _put_beside(use, a, b, scale, names)
        found += adapter_names(target.module)
        names.update(adapter_names(target.module))
    # Before, all initializers are inputs.
    model.ir_version = max(model.ir_version, 4)
    model.metadata_props[METADATA_KEY] = json.dumps(known)
    return found


def _adapter(
    graph: ir.Graph, target: Target, rank: int | None, rng: np.random.Generator | None
) -> tuple[ir.Value, ir.Value]:
    """Put A and B of a target among the initializers, and where they have no rank yet also among the inputs."""
    dtype = np.float64 if target.dtype == ir.DataType.DOUBLE else np.float32
    shapes = (rank or 0, target.in_features), (target.out_features, rank or 0)
    a, b = (np.zeros(shape, dtype) for shape in shapes)
    if rng is not None:
        # kaiming_uniform_ with a = sqrt(5), as in PEFT and torch.nn.Linear
        bound = 1 / math.sqrt(max(target.in_features, 1))
        a = rng.uniform(-bound, bound, shapes[0]).astype(dtype)
    found = []
    for name, array, axis in zip(adapter_names(target.module), (a, b), (0, 1), strict=True):
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), const_value=tensor)
        sizes: list[int | str] = list(array.shape)
        if rank is None:
            sizes[axis] = f"{target.module}.rank"
            graph.inputs.append(value)
        value.shape = ir.Shape(sizes)
        graph.register_initializer(value)
        found.append(value)
    return found[0], found[1]


def _put_beside(use: Use, a: ir.Value, b: ir.Value, scale: float, names: set[str]) -> None:
    """Add an adapter's product to what a node gives; the sum has the name of what it gave."""
    node, graph = use.node, use.node.graph
    assert graph is not None and a.dtype is not None
    nodes: list[ir.Node] = []

    def op(op_type: str, *inputs: ir.Value, dtype: ir.DataType, **attributes: Any) -> ir.Value:
        name = _free(f"{use.module}.lora/{op_type}", names)
        output = ir.Value(name=name, type=ir.TensorType(dtype))
        nodes.append(ir.node(op_type, list(inputs), attributes, name=name, outputs=[output]))
        return output

    x = node.inputs[0]
    assert x is not None
    if node.op_type == "Gemm":
        scale *= node.attributes["alpha"].as_float() if "alpha" in node.attributes else 1.0
        if "transA" in node.attributes and node.attributes["transA"].as_int():
            x = op("Transpose", x, dtype=use.dtype, perm=[1, 0])
    if use.dtype != a.dtype:
        x = op("Cast", x, dtype=a.dtype, to=a.dtype)
    inner = op("MatMul", x, op("Transpose", a, dtype=a.dtype, perm=[1, 0]), dtype=a.dtype)
    if scale != 1:
        factor = ir.tensor(np.array(scale, a.dtype.numpy()))
        inner = op("Mul", inner, op("Constant", dtype=a.dtype, value=factor), dtype=a.dtype)
    product = op("MatMul", inner, op("Transpose", b, dtype=b.dtype or a.dtype, perm=[1, 0]), dtype=a.dtype)
    if use.dtype != a.dtype:
        product = op("Cast", product, dtype=use.dtype, to=use.dtype)
    base = node.outputs[0]
    total = ir.Value(name=base.name, type=base.type or ir.TensorType(use.dtype), shape=base.shape)
    base.name = _free(f"{base.name}.base", names)
    base.replace_all_uses_with(total, replace_graph_outputs=True)
    nodes.append(ir.node("Add", [base, product], name=f"{product.name}/Add", outputs=[total]))
    graph.insert_after(node, nodes)


def _free(name: str, names: set[str]) -> str:
    """Return the name, or one like it that no value has, and note it."""
    found = next(
        one for one in itertools.chain([name], (f"{name}_{k}" for k in itertools.count(1))) if one not in names
    )
    names.add(found)
    return found

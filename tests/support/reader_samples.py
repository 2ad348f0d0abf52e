"""Nodes that test the readers of operators one at a time: the form of an output is worth what the node computes.

A :class:`Sample` is one node. :func:`compare` evaluates the form of its outputs at every index, for several sizes of
the symbolic dimensions, and compares it with what onnxruntime computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from evaluation import Array, Evaluation, constants, squeezed
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes.common import ShapeInferencePass

from gradfuse.passes.reading import Forms, ort_training

Dim = int | str
SIZES = ({"N": 3, "M": 4, "K": 2}, {"N": 2, "M": 5, "K": 3}, {"N": 4, "M": 4, "K": 4})
DOUBLE, FLOAT, HALF, INT64, INT32, BOOL = (
    getattr(TensorProto, name) for name in ("DOUBLE", "FLOAT", "FLOAT16", "INT64", "INT32", "BOOL")
)


@dataclass(frozen=True)
class Given:
    """An input: its element type, its shape, and how numbers become its elements."""

    dtype: int
    shape: tuple[Dim, ...]
    fill: Callable[[np.random.Generator, tuple[int, ...]], Array]


def x(*shape: Dim) -> Given:
    return Given(DOUBLE, shape, lambda rng, s: rng.standard_normal(s))


def positive(*shape: Dim) -> Given:
    return Given(DOUBLE, shape, lambda rng, s: rng.uniform(0.5, 2.0, s))


def eighths(*shape: Dim) -> Given:
    """Numbers that all float types have."""
    return Given(DOUBLE, shape, lambda rng, s: rng.integers(-20, 20, s) / 8)


def below(limit: int, *shape: Dim, dtype: int = INT64, least: int = 0) -> Given:
    """Integers from the least up to a limit."""
    kind = np.int32 if dtype == INT32 else np.int64
    return Given(dtype, shape, lambda rng, s: rng.integers(least, limit, s).astype(kind))


def distinct(limit: int, *shape: Dim) -> Given:
    """Integers below a limit, none of them twice along the last axis."""

    def fill(rng: np.random.Generator, s: tuple[int, ...]) -> Array:
        return rng.permuted(np.broadcast_to(np.arange(limit), (*s[:-1], limit)), axis=-1)[..., : s[-1]].copy()

    return Given(INT64, shape, fill)


def condition(*shape: Dim) -> Given:
    return Given(BOOL, shape, lambda rng, s: rng.random(s) < 0.5)


def with_gaps(*shape: Dim) -> Given:
    """Numbers, some of them NaN."""
    return Given(DOUBLE, shape, lambda rng, s: np.where(rng.random(s) < 0.5, np.nan, rng.standard_normal(s)))


def floats(*numbers: Any) -> Array:
    return np.asarray(numbers, np.float64)


def singles(*numbers: Any) -> Array:
    return np.asarray(numbers, np.float32)


def ints(*numbers: Any) -> Array:
    return np.asarray(numbers, np.int64)


def scalar(number: int | float) -> Array:
    return np.asarray(number, np.int64 if isinstance(number, int) else np.float64)


def shape(*sizes: int) -> Given:
    """A shape that nothing is known of before the model runs."""
    return Given(INT64, (len(sizes),), lambda rng, s: np.asarray(sizes))


Operand = Given | Array | None

AHEAD: dict[str, tuple[Any, ...]] = {
    "SixTimes": (below(5, "N", 3), ("Mul", ints(6))),
    "Powers": (x("N", 3), ("Exp",)),
    "Shape": (x("N", 3), ("Shape",)),
    "Size": (x("N", 3), ("Size",)),
    "Flat": (x("N", 3), ("Reshape", ints(-1))),
    "FlatRows": (x("N", 3, 2), ("Reshape", ints(-1, 2))),
    "Rows": (x(4, 3), ("Reshape", ints(-1))),
    "ByRow": (below(3, 4), ("Add", ints(0, 3, 6, 9))),
    "ByRowOfOne": (below(3, 4, 1), ("Add", ints([0], [3], [6], [9]))),
    "Distance": (below(4, "N", 3, least=-3), ("Abs",)),
    "Nearness": (below(4, "N", 3, least=-3), ("Abs",), ("Neg",), ("Add", ints(1))),
    "Signs": (below(4, "N", 3, least=-3), ("Sign",)),
    "RealDistance": (eighths("N", 3), ("Abs",)),
    "RealNearness": (eighths("N", 3), ("Abs",), ("Neg",), ("Add", floats(1.0))),
    "AxesOfSizeOne": (x(1, 3), ("Shape",), ("Equal", ints(1)), ("NonZero",), ("Reshape", ints(-1))),
}
"""An input, and the nodes between it and the node that is read, with their constants."""


@dataclass(frozen=True)
class Sample:
    """One node. A text as an operand is a key of AHEAD."""

    op: str
    operands: tuple[Operand | str, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[bool, ...] = (True,)
    """Which outputs are read."""
    opset: int = 20
    domain: str = ""
    shapes: Sequence[Sequence[Dim]] | None = None
    """What the model states for the outputs, where onnx infers nothing; their type is DOUBLE then."""
    definition: Callable[..., Any] | None = None
    """What the operator computes, where stock onnxruntime does not have it; a list for several outputs."""

    def __str__(self) -> str:
        shapes = [
            "-"
            if o is None
            else o
            if isinstance(o, str)
            else f"{o.dtype}{list(o.shape)}"
            if isinstance(o, Given)
            else str(o.tolist()).replace(" ", "")
            for o in self.operands
        ]
        attributes = [f"{k}={v}" for k, v in self.attributes.items() if not isinstance(v, onnx.TensorProto)]
        return f"{self.op}({', '.join([*shapes, *attributes])}) opset {self.opset}"


def s(
    op: str,
    *operands: Operand | str,
    opset: int = 20,
    outputs: tuple[bool, ...] = (True,),
    shapes: Sequence[Sequence[Dim]] | None = None,
    **attributes: Any,
) -> Sample:
    """A node of a standard operator."""
    return Sample(op, operands, attributes, outputs, opset, "", shapes)


def tensor(array: Array) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(array))


def model_of(sample: Sample) -> tuple[onnx.ModelProto, dict[str, Given]]:
    """A model of the node and what goes ahead of it, and the model's inputs."""
    inputs: dict[str, Given] = {}
    initializers, names, nodes = [], [], []
    for position, operand in enumerate(sample.operands):
        if operand is None:
            names.append("")
        elif isinstance(operand, str):
            own, *steps = AHEAD[operand]
            inputs[f"first{position}"] = own
            names.append(f"first{position}")
            for op, *constants_ in steps:
                read = [names.pop(), *(f"{operand}_{op}_{position}_{k}" for k in range(len(constants_)))]
                initializers += [numpy_helper.from_array(a, n) for a, n in zip(constants_, read[1:], strict=True)]
                names.append(f"{operand}_{op}_{position}")
                nodes.append(helper.make_node(op, read, names[-1:]))
        elif isinstance(operand, Given):
            inputs[f"x{position}"] = operand
            names.append(f"x{position}")
        else:
            initializers.append(numpy_helper.from_array(np.asarray(operand), f"x{position}"))
            names.append(f"x{position}")
    shapes = sample.shapes
    outputs = [f"y{k}" for k in range(len(sample.outputs))]
    nodes.append(helper.make_node(sample.op, names, outputs, domain=sample.domain, **sample.attributes))
    infos = [helper.make_tensor_value_info(name, g.dtype, g.shape) for name, g in inputs.items()]
    results = [
        helper.make_tensor_value_info(name, DOUBLE if shapes else TensorProto.UNDEFINED, shapes[k] if shapes else None)
        for k, name in enumerate(outputs)
        if sample.outputs[k]
    ]
    graph = helper.make_graph(nodes, "sample", infos, results, initializers)
    imports = [helper.make_opsetid("", sample.opset), helper.make_opsetid(ort_training.DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    if shapes:
        return model, inputs
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    del model.graph.output[:]
    model.graph.output.extend(inferred.graph.output)
    onnx.checker.check_model(model, full_check=True)
    return model, inputs


def _computed(sample: Sample, model: onnx.ModelProto, feeds: dict[str, Array]) -> list[Array]:
    """What the operation computes, by onnxruntime; by onnx's evaluator for types that it has no kernel for."""
    if sample.definition is not None:
        given = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer} | feeds
        operands = [None if o is None else given[f"x{k}"] for k, o in enumerate(sample.operands)]
        result = sample.definition(*operands, **sample.attributes)
        results = result if isinstance(result, list) else [result]
        return [np.asarray(a) for a, read in zip(results, sample.outputs, strict=True) if read]
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:
        return list(ReferenceEvaluator(model).run(None, feeds))
    return list(session.run(None, feeds))


def _named(read: Forms, graph: ir.Graph) -> dict[object, Array]:
    """Zeros for what has the name of an output: of which nothing is known where an index is out of range."""
    names = {output.name for output in graph.outputs}
    atoms = [atom for atom in read.algebra.atoms if atom.kind == "tensor" and atom.args[0] in names]
    return {atom.args[0]: np.zeros([1] * (len(atom.args) - 1)) for atom in atoms}


def compare(sample: Sample, may_be_opaque: bool = False) -> None:
    """Compare the outputs' forms with what the node computes; none may be opaque unless the sample's may."""
    proto, inputs = model_of(sample)
    model = ShapeInferencePass(strict_mode=False)(ir.from_proto(proto)).model
    read = Forms(model.graph)
    expressed = [o for o in model.graph.outputs if read.get(o) is not None and o not in read.opaque]
    if not may_be_opaque:
        assert expressed == [*model.graph.outputs], "an output is opaque"
    rng = np.random.default_rng(0)
    for sizes in SIZES if any(isinstance(d, str) for g in inputs.values() for d in g.shape) else SIZES[:1]:
        shapes = {n: tuple(d if isinstance(d, int) else sizes[d] for d in g.shape) for n, g in inputs.items()}
        feeds = {n: np.asarray(g.fill(rng, shapes[n])) for n, g in inputs.items()}
        values = {v.name: squeezed(feeds[str(v.name)], v) for v in model.graph.inputs} | constants(read, model.graph)
        evaluation = Evaluation(read.algebra, values | _named(read, model.graph), {**sizes})
        for output, wanted in zip(model.graph.outputs, _computed(sample, proto, feeds), strict=True):
            form = read.get(output)
            if output not in expressed or form is None:
                continue
            if sample.op == "NonZero":
                evaluation.dims = {**evaluation.dims} | {
                    str(d): int(n) for d, n in zip(output.shape or (), wanted.shape, strict=True)
                }
            with np.errstate(invalid="ignore"):
                worth = evaluation.form(form)
            assert worth.shape == wanted.shape
            np.testing.assert_allclose(worth, wanted.astype(np.float64), rtol=1e-12, atol=1e-12)

"""No wrong rewrite: real training graphs with one thing changed compute the same after `fuse` as before.

A mutant may be fused or not; what counts is that its outputs stay what they are. Where the mutant itself gives NaN or
an infinity nothing is compared: there the fused operators may give their zeros (an ignored row, a masked element).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping

import gradient_graphs
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
from producers import COMMITTED, Case, cases, run, with_seeds
from variants import FEEDS, GRAPHS, Array, built

from gradfuse import fuse

MUTANTS = 1_000
SLOW_MUTANTS = 50_000
VARIANT_SHARE = 5
"""For this many mutants of training graphs there is one of a small graph of tests/support/variants.py."""

_SWAPPABLE = {"Sub", "Div", "Pow", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "MatMul"}
_OTHER_OP = {
    "Add": "Sub",
    "Sub": "Add",
    "Mul": "Div",
    "Div": "Mul",
    "ReduceSum": "ReduceMean",
    "Exp": "Tanh",
    "Not": "Identity",
    "Log": "Exp",
    "Less": "LessOrEqual",
    "GreaterOrEqual": "Greater",
    "And": "Or",
    "LogSoftmax": "Softmax",
    "Neg": "Abs",
}


def _cases() -> list[Case]:
    names = {f"{p.parent.name}/{p.stem}" for p in COMMITTED.glob("*/*.onnx")}
    return [c for c in cases() if str(c) in names and c.runs]


def _changed_constant(model: ir.Model, rng: random.Random) -> bool:
    values = [
        v for v in model.graph.initializers.values() if v.const_value is not None and 0 < v.const_value.size <= 64
    ]
    if not values:
        return False
    value = rng.choice(values)
    assert value.const_value is not None
    array = np.array(value.const_value.numpy())
    at = rng.randrange(array.size)
    if array.dtype == np.bool_:
        array.flat[at] ^= True
    elif array.dtype.kind in "iu":
        array.flat[at] ^= 1
    else:
        array.flat[at] = array.flat[at] * rng.choice([-1.0, 0.5, 1.37]) + rng.choice([0.0, 0.25])
    value.const_value = ir.tensor(array, dtype=value.dtype, name=value.name)
    return True


def _changed_attribute(model: ir.Model, rng: random.Random) -> bool:
    found = [
        (n, a)
        for n in model.graph
        for a in n.attributes.values()
        if a.name in ("axis", "perm", "alpha", "ignore_index")
    ]
    if not found:
        return False
    node, attr = rng.choice(found)
    if attr.name == "perm":
        perm = list(attr.as_ints())
        rng.shuffle(perm)
        node.attributes["perm"] = ir.AttrInt64s("perm", perm)
    elif attr.name == "alpha":
        node.attributes["alpha"] = ir.AttrFloat32("alpha", attr.as_float() * 1.5)
    else:
        node.attributes[attr.name] = ir.AttrInt64(attr.name, attr.as_int() + rng.choice([-1, 1]))
    return True


def _swapped_operands(model: ir.Model, rng: random.Random) -> bool:
    nodes = [n for n in model.graph if n.op_type in _SWAPPABLE or n.op_type == "Where"]
    if not nodes:
        return False
    node = rng.choice(nodes)
    a, b = (1, 2) if node.op_type == "Where" else (0, 1)
    first, second = node.inputs[a], node.inputs[b]
    node.replace_input_with(a, second)
    node.replace_input_with(b, first)
    return True


def _rewired_edge(model: ir.Model, rng: random.Random) -> bool:
    nodes = list(model.graph)
    for _ in range(20):
        k = rng.randrange(len(nodes))
        position = rng.randrange(max(len(nodes[k].inputs), 1))
        old = nodes[k].inputs[position] if nodes[k].inputs else None
        if old is None or old.shape is None:
            continue
        values = [*model.graph.inputs, *model.graph.initializers.values(), *(v for n in nodes[:k] for v in n.outputs)]
        same = [v for v in values if v is not old and v.dtype == old.dtype and v.shape == old.shape]
        if same:
            nodes[k].replace_input_with(position, rng.choice(same))
            return True
    return False


def _other_operation(model: ir.Model, rng: random.Random) -> bool:
    nodes = [n for n in model.graph if n.op_type in _OTHER_OP]
    if not nodes:
        return False
    node = rng.choice(nodes)
    node.op_type = _OTHER_OP[node.op_type]
    if node.op_type == "ReduceMean" and model.opset_imports[""] < 18:
        return False
    return True


_REFUSALS = ("target_out_of_range", "index_out_of_range", "group_ends_decrease")

MUTATIONS: list[Callable[[ir.Model, random.Random], bool]] = [
    *(_changed_constant, _changed_attribute, _swapped_operands, _rewired_edge, _other_operation)
]


# The checker has inferred the shapes of each mutant in this process before.
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("inference_in_process")]

Subject = tuple[ir.Model, Mapping[str, Array], str]


def _training_graphs(part: int = 0, parts: int = 1) -> Callable[[random.Random], Subject | None]:
    """Draws a training graph; None where that belongs to another part."""
    corpus = _cases()

    def draw(rng: random.Random) -> Subject | None:
        index = rng.randrange(len(corpus))
        case = corpus[index]
        return (with_seeds(ir.load(case.path)), case.arrays("in"), str(case)) if index % parts == part else None

    return draw


def _small_graphs(rng: random.Random) -> Subject:
    operator, name, build = rng.choice(GRAPHS)
    return ir.from_proto(built(build)), FEEDS, f"{operator}: {name}"


def _gradient_graphs(rng: random.Random) -> Subject:
    """Graphs of onnxruntime-training; none with the one operator that nothing else takes the place of."""
    name = rng.choice([name for name in gradient_graphs.NAMES if "internal" not in name])
    return gradient_graphs.load(name), gradient_graphs.arrays(name, "in"), name


def _layer_graphs(rng: random.Random) -> Subject:
    """Graphs of layers and losses by JAX, PyTorch and TensorFlow; none of optimizers.

    Where the gradient of an update is its own weight decay, the proof draws the two apart, and refuses what is right.
    """
    paths = [
        path for folder in ("jax_layers", "tf2onnx", "torch_layers") for path in (COMMITTED / folder).glob("*.onnx")
    ]
    path = rng.choice(sorted(path for path in paths if not path.stem.startswith(("adam", "sgd", "momentum"))))
    with np.load(path.with_suffix(".npz")) as file:
        feeds = {key.removeprefix("in."): file[key] for key in file.files if key.startswith("in.")}
    return ir.load(path), feeds, path.stem


def _as_it_is(model: ir.Model) -> onnx.ModelProto:
    mutant = ir.to_proto(model)
    onnx.checker.check_model(mutant, full_check=True)
    return mutant


def _check_many(
    seeds: Iterable[int],
    draw: Callable[[random.Random], Subject | None],
    runnable: Callable[[ir.Model], onnx.ModelProto] = _as_it_is,
) -> None:
    outcomes = []
    checked = set()
    for seed in seeds:
        rng = random.Random(seed)
        subject = draw(rng)
        if subject is None:
            continue
        model, feeds, name = subject
        if not rng.choice(MUTATIONS)(model, rng):
            continue
        mutant = ir.to_proto(model).SerializeToString()
        # A small graph has few mutants, and a third of all are drawn again.
        if mutant not in checked:
            checked.add(mutant)
            outcomes.append(_check(model, feeds, f"mutant {seed} of {name}", runnable))
    valid = [o for o in outcomes if o is not None]
    assert len(valid) > len(outcomes) / 4
    assert sum(valid) > len(valid) / 4


def _check(
    model: ir.Model, feeds: Mapping[str, Array], name: str, runnable: Callable[[ir.Model], onnx.ModelProto]
) -> bool | None:
    """Whether a mutant was fused; None where it is no valid model."""
    # What was known of types and shapes may be no longer true.
    for node in model.graph:
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = None
    try:
        wanted = run(runnable(model.clone()), feeds)
    except Exception:
        return None
    result = fuse(model, policy="all")
    bugs = [m for m in result.report.near_misses if m.bug]
    assert not bugs, f"{name}: {bugs}"
    if not result.report.fusions:
        return False
    try:
        got = run(runnable(result.model), feeds)
    except InvalidArgument as refusal:
        # What the operators refuse, and an error is no wrong number: a negative class index, which wraps in ONNX, and
        # ends of groups that decrease.
        assert any(text in str(refusal) for text in _REFUSALS), f"{name}: {refusal}"
        return True
    half = any(v.dtype == ir.DataType.FLOAT16 for n in model.graph for v in n.outputs)
    finite = [a[np.isfinite(a)].astype(np.float64) for a in wanted.values()]
    bound = (2e-2 if half else 2e-5) * max((float(np.abs(a).max(initial=0)) for a in finite), default=0.0)
    for output, before in wanted.items():
        where = np.isfinite(before)
        difference = np.abs(got[output][where].astype(np.float64) - before[where].astype(np.float64))
        assert np.all(difference <= bound), f"{name}: {output} differs by {difference.max()}\n{result.report}"
    return True


@pytest.mark.parametrize("part", range(8))
def test_mutants_stay_right(part: int) -> None:
    _check_many(range(MUTANTS), _training_graphs(part, 8))


@pytest.mark.parametrize("part", range(2))
def test_mutants_of_variants_stay_right(part: int) -> None:
    _check_many(range(part, MUTANTS // VARIANT_SHARE, 2), _small_graphs)


@pytest.mark.parametrize("part", range(2))
def test_mutants_of_gradient_graphs_stay_right(part: int) -> None:
    count = MUTANTS // (2 * VARIANT_SHARE)
    _check_many(range(part, count, 2), _gradient_graphs, gradient_graphs.in_standard_operators)


@pytest.mark.parametrize("part", range(2))
def test_mutants_of_graphs_of_layers_stay_right(part: int) -> None:
    _check_many(range(part, MUTANTS // VARIANT_SHARE, 2), _layer_graphs)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(50))
def test_many_mutants_stay_right(part: int) -> None:
    size = SLOW_MUTANTS // 50
    seeds = range(1_000_000 + part * size, 1_000_000 + (part + 1) * size)
    _check_many(seeds, _training_graphs())
    _check_many(seeds[::VARIANT_SHARE], _small_graphs)
    _check_many(seeds[::VARIANT_SHARE], _layer_graphs)
    _check_many(seeds[::VARIANT_SHARE], _gradient_graphs, gradient_graphs.in_standard_operators)

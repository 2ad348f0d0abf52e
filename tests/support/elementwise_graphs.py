"""Random graphs of elementwise nodes, with others in between, for the pass that fuses chains."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

_UNARY = ("Neg", "Abs", "Sqrt", "Relu", "Reciprocal")
_APPROXIMATE = ("Exp", "Sigmoid", "Tanh")
_COMPARISONS = ("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal")
_KINDS = (
    *("Binary", "Binary", "Binary", "Unary", "Unary", "List", "Compare", "Logic", "Where", "Cast", "Square"),
    *("Threshold", "ReduceSum", "Softmax", "MatMul", "Identity"),
)


def drawn(seed: int, *, approximate: bool = True) -> onnx.ModelProto:
    """Write a model of up to 40 nodes, whose outputs are some of their results; odd seeds have a dynamic dimension.

    Args:
        seed: decides everything.
        approximate: whether there are functions that runtimes compute differently.
    """
    rng = random.Random(seed)
    sizes: list[int | str] = [3, 4] if rng.random() < 0.7 else [2, 3, 4]
    if seed % 2:
        sizes[0] = "N"
    shapes = {"full": sizes, "row": sizes[-1:], "column": [*sizes[:-1], 1], "scalar": [], "one": [1] * len(sizes)}
    values = {"x0": "full", **{f"x{k}": rng.choice(list(shapes)) for k in range(1, rng.randint(1, 4))}}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shapes[kind]) for name, kind in values.items()]
    numbers = {"half": 0.5, "zero": 0.0, "third": 1 / 3}
    constants = [helper.make_tensor(name, TensorProto.FLOAT, [], [number]) for name, number in numbers.items()]
    constants.append(helper.make_tensor("weights", TensorProto.FLOAT, [4], [0.0, 1.0, 2.0, 3.0]))
    constants.append(helper.make_tensor("two", TensorProto.FLOAT, [], [2.0]))
    constants.append(helper.make_tensor("axis", TensorProto.INT64, [1], [len(sizes) - 1]))
    values |= dict.fromkeys(numbers, "scalar") | {"weights": "row"}
    conditions: list[str] = []
    nodes: list[onnx.NodeProto] = []

    def add(op_type: str, operands: list[str], name: str, **attributes: int | list[int]) -> None:
        nodes.append(helper.make_node(op_type, operands, [name], **attributes))

    for k in range(rng.randint(3, 40)):
        name, kind = f"v{k}", rng.choice(_KINDS)
        full = [value for value, shape in values.items() if shape == "full"]
        one = rng.choice(full)
        pair = [rng.choice(full), rng.choice(list(values))]
        rng.shuffle(pair)
        shape = "full"
        if kind in ("Compare", "Logic"):
            if kind == "Compare":
                add(rng.choice(_COMPARISONS), pair, name)
            elif not conditions:
                continue
            elif rng.random() < 0.4:
                add("Not", [rng.choice(conditions)], name)
            else:
                add(rng.choice(("And", "Or")), rng.choices(conditions, k=2), name)
            conditions.append(name)
            continue
        match kind:
            case "Binary":
                add(rng.choice(("Add", "Sub", "Mul", "Div")), pair, name)
            case "Unary":
                add(rng.choice((*_UNARY, *_APPROXIMATE) if approximate else _UNARY), [one], name)
            case "List":
                add(rng.choice(("Sum", "Max", "Min")), [*pair, *rng.choices(list(values), k=rng.randint(0, 2))], name)
            case "Where" | "Cast" if not conditions:
                continue
            case "Where":
                add("Where", [rng.choice(conditions), *pair], name)
            case "Cast":
                add("Cast", [rng.choice(conditions)], name, to=TensorProto.FLOAT)
            case "Square":
                add("Pow", [one, "two"], name)
            case "Threshold":
                add("Relu", [one], f"{name}_relu")
                add("LessOrEqual", [f"{name}_relu", "zero"], f"{name}_cut")
                add("Where", [f"{name}_cut", "zero", rng.choice(full)], name)
                values[f"{name}_relu"] = "full"
            case "ReduceSum":
                add("ReduceSum", [one, "axis"], name, keepdims=1)
                shape = "column"
            case "Softmax":
                add("Softmax", [one], name, axis=-1)
            case "MatMul":
                last = len(sizes) - 1
                add("Transpose", [one], f"{name}_turned", perm=[*range(last - 1), last, last - 1])
                add("MatMul", [f"{name}_turned", rng.choice(full)], f"{name}_inner")
                add("MatMul", [rng.choice(full), f"{name}_inner"], name)
            case _:
                add("Identity", [one], name)
        values[name] = shape
    results = [value for value in values if value.startswith("v")] or [rng.choice(["x0"])]
    chosen = rng.sample(results, min(len(results), rng.randint(1, 3)))
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shapes[values[name]]) for name in chosen]
    graph = helper.make_graph(nodes, "elementwise", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def feeds(model: onnx.ModelProto, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """Draw arrays for the inputs of such a model, some with NaN and infinities."""
    rng = np.random.default_rng(seed)
    found = {}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        array = rng.standard_normal([5 if dim.dim_param else dim.dim_value for dim in dims]).astype(np.float32)
        if array.size > 2 and rng.random() < 0.3:
            array.flat[:3] = np.nan, np.inf, 0.0
        found[value.name] = array
    return found

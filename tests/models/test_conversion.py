"""Models of older opsets: what they compute in onnxruntime stays the same when they are raised."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest

from gradfuse.custom_ops.operator import OLDEST_OPSET
from gradfuse.errors import ModelError
from gradfuse.models import reading
from gradfuse.models.conversion import raise_opset
from gradfuse.testing import assert_gradients_close

NEWEST = 21
"""The newest opset that the tests raise models to: onnxruntime has kernels of all operators for it."""

OTHER_KERNELS = ("AveragePool", "BatchNormalization")
"""Operators of which onnxruntime has kernels that round differently from one opset to the next."""

IMAGE = "float[2,3,4,5] x"
SAMPLES: dict[str, list[tuple[str, str, str]]] = {
    "ArgMax": [("7-", IMAGE, "y = ArgMax <axis = 1> (x)")],
    "ArgMin": [("7-", IMAGE, "y = ArgMin <axis = 3, keepdims = 0> (x)")],
    "AveragePool": [
        ("7-", IMAGE, "y = AveragePool <kernel_shape = [2,3], pads = [1,1,1,1], count_include_pad = 1> (x)"),
        ("7-", IMAGE, 'y = AveragePool <kernel_shape = [3,3], strides = [2,2], auto_pad = "SAME_UPPER"> (x)'),
        ("10-", IMAGE, "y = AveragePool <kernel_shape = [2,2], strides = [2,2], ceil_mode = 1> (x)"),
    ],
    "BatchNormalization": [
        (
            "7-",
            f"{IMAGE}, float[3] s, float[3] b, float[3] m, float[3] r",
            "v = Exp (r) y = BatchNormalization <epsilon = 0.01> (x, s, b, m, v)",
        ),
        (
            "7-8",
            f"{IMAGE}, float[3,4,5] s, float[3,4,5] b, float[3,4,5] m, float[3,4,5] r",
            "v = Exp (r) y = BatchNormalization <spatial = 0> (x, s, b, m, v)",
        ),
    ],
    "Cast": [("7-", IMAGE, "y = Cast <to = 6> (x)")],
    "CastLike": [("15-", f"{IMAGE}, int32[1] k", "y = CastLike (x, k)")],
    "Clip": [
        ("7-10", IMAGE, "y = Clip <min = -0.5, max = 0.5> (x)"),
        ("7-10", IMAGE, "y = Clip <max = 0.25> (x)"),
        ("7-10", IMAGE, "y = Clip (x)"),
        ("7-10", IMAGE, "z = Neg (x) y = Clip <min = 0.0> (z)"),
        ("11-", IMAGE, "b = Constant <value = float {0.5}> () y = Clip (x, , b)"),
    ],
    "Constant": [("7-", IMAGE, "c = Constant <value = float[1] {2}> () y = Mul (x, c)")],
    "DFT": [
        ("17-19", "float[2,3,4,1] x", "y = DFT <axis = 2> (x)"),
        ("17-19", "float[2,3,4,1] x", "y = DFT (x)"),
        ("17-19", "float[2,3,4,1] x", "n = Constant <value = int64 {2}> () y = DFT <axis = 1> (x, n)"),
    ],
    "DepthToSpace": [("7-", "float[1,8,2,3] x", "y = DepthToSpace <blocksize = 2> (x)")],
    "DequantizeLinear": [
        ("10-", IMAGE, "s = Constant <value = float {0.5}> () q = QuantizeLinear (x, s) y = DequantizeLinear (q, s)")
    ],
    "Dropout": [
        ("7-11", IMAGE, "y = Dropout <ratio = 0.75> (x)"),
        ("12-", IMAGE, "y = Dropout (x)"),
        ("10-11", IMAGE, "d, mask = Dropout (x) y = Cast <to = 1> (mask)"),
    ],
    "GRU": [
        ("7-", "float[4,2,3] x, float[1,12,3] w, float[1,12,4] r", "y, h = GRU <hidden_size = 4> (x, w, r)"),
    ],
    "GatherND": [("11-", IMAGE, "k = Constant <value = int64[2,2] {0, 1, 1, 2}> () y = GatherND (x, k)")],
    "Gemm": [("7-", "float[2,3] x, float[4,3] b, float[4] c", "y = Gemm <transB = 1, alpha = 0.5> (x, b, c)")],
    "GridSample": [
        (f"16-{last}", f"{IMAGE}, float[2,2,3,2] g", f"y = GridSample{mode} (x, g)")
        for last, mode in ((19, ""), (19, '<mode = "bicubic">'), (19, '<mode = "nearest">'))
    ],
    "GroupNormalization": [
        ("18-20", "float[2,6,5] x, float[3] s, float[3] b", "y = GroupNormalization <num_groups = 3> (x, s, b)")
    ],
    "LSTM": [("7-", "float[4,2,3] x, float[1,16,3] w, float[1,16,4] r", "y = LSTM <hidden_size = 4> (x, w, r)")],
    "LpPool": [("7-", IMAGE, "y = LpPool <kernel_shape = [2,2], p = 1> (x)")],
    "MaxPool": [
        ("7-", IMAGE, "y = MaxPool <kernel_shape = [3,3], strides = [2,2], pads = [1,1,1,1]> (x)"),
        ("8-", IMAGE, "z, y = MaxPool <kernel_shape = [2,2], storage_order = 1> (x)"),
        ("10-", IMAGE, "y = MaxPool <kernel_shape = [2,2], dilations = [2,2], ceil_mode = 1> (x)"),
    ],
    "Pad": [
        ("7-10", IMAGE, "y = Pad <pads = [0,0,1,2,0,0,2,1]> (x)"),
        ("7-10", IMAGE, "y = Pad <pads = [0,0,1,2,0,0,-1,-1], value = 2.5> (x)"),
        ("7-10", IMAGE, "z = Neg (x) y = Pad <pads = [0,0,1,0,0,0,0,1], value = -1.0> (z)"),
        ("7-10", IMAGE, 'y = Pad <pads = [0,0,1,2,0,0,2,1], mode = "reflect"> (x)'),
        ("11-", IMAGE, "p = Constant <value = int64[8] {0,0,1,0,0,0,0,2}> () y = Pad (x, p)"),
    ],
    "QuantizeLinear": [("10-", IMAGE, "s = Constant <value = float {0.25}> () y = QuantizeLinear (x, s)")],
    "RNN": [("7-", "float[4,2,3] x, float[1,4,3] w, float[1,4,4] r", "y = RNN <hidden_size = 4> (x, w, r)")],
    **{
        f"Reduce{name}": [
            ("7-17", IMAGE, f"z = Exp (x) y = Reduce{name} <axes = [1, 3], keepdims = 0> (z)"),
            ("11-17", IMAGE, f"z = Exp (x) y = Reduce{name} <axes = [-1]> (z)"),
            ("7-", IMAGE, f"z = Exp (x) y = Reduce{name} (z)"),
        ]
        for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
    },
    "ReduceSum": [
        ("7-12", IMAGE, "y = ReduceSum <axes = [1, 3], keepdims = 0> (x)"),
        ("11-12", IMAGE, "y = ReduceSum <axes = [-1]> (x)"),
        ("7-", IMAGE, "y = ReduceSum (x)"),
    ],
    "Reshape": [("7-", IMAGE, "s = Constant <value = int64[2] {0, -1}> () y = Reshape (x, s)")],
    "Resize": [
        ("10", IMAGE, f"s = Constant <value = float[4] {{{scales}}}> () y = Resize {mode} (x, s)")
        for scales in ("1,1,2,2", "1,1,3,1.5", "1,1,0.6,0.5", "1,1,2.6,0.4", "2,1,1,0.3")
        for mode in ("", '<mode = "linear">')
        if not (mode and scales.startswith("2"))
    ]
    + [
        ("10", f"{IMAGE}, float[4] scales", "y = Resize (x, scales)"),
        ("11-12", IMAGE, 's = Constant <value = float[4] {1,1,2,2}> () y = Resize <mode = "cubic"> (x, s, s)'),
        ("13-", IMAGE, "s = Constant <value = float[4] {1,1,2,0.5}> () y = Resize (x, , s)"),
    ],
    "RoiAlign": [
        (
            "10-",
            f"{IMAGE}, float[2,4] r",
            "k = Constant <value = int64[2] {0, 1}> () y = RoiAlign <output_height = 2, output_width = 2> (x, r, k)",
        )
    ],
    "Scan": [
        (
            "9-",
            "float[3] x, float[4,3] z",
            "y, w = Scan <num_scan_inputs = 1, body = g (float[3] a, float[3] b) => (float[3] c, float[3] d) "
            "{ e = Add (a, b) c = Neg (e) d = Identity (c) }> (x, z)",
        )
    ],
    "Scatter": [
        ("9-10", f"{IMAGE}, float[1,1,2,1] u", "k = Constant <value = int64[1,1,2,1] {1, 0}> () y = Scatter (x, k, u)")
    ],
    "ScatterElements": [
        (
            "11-",
            f"{IMAGE}, float[1,1,2,1] u",
            "k = Constant <value = int64[1,1,2,1] {1,0}> () y = ScatterElements (x, k, u)",
        )
    ],
    "ScatterND": [
        ("11-", f"{IMAGE}, float[1,4,5] u", "k = Constant <value = int64[1,2] {1, 2}> () y = ScatterND (x, k, u)")
    ],
    "Shape": [("7-", IMAGE, "y = Shape (x)")],
    "Slice": [
        ("7-9", IMAGE, "y = Slice <starts = [0, 1], ends = [9, -1]> (x)"),
        ("7-9", IMAGE, "y = Slice <axes = [3, 2], starts = [-3, 0], ends = [9223372036854775807, 2]> (x)"),
        (
            "10-",
            IMAGE,
            "s = Constant <value = int64[1] {4}> () e = Constant <value = int64[1] {0}> () "
            "a = Constant <value = int64[1] {3}> () t = Constant <value = int64[1] {-2}> () y = Slice (x, s, e, a, t)",
        ),
    ],
    **{
        name: [
            ("7-", IMAGE, f"y = {name} (x)"),
            ("7-", IMAGE, f"y = {name} <axis = 2> (x)"),
            ("7-", IMAGE, f"y = {name} <axis = 3> (x)"),
            ("7-", IMAGE, f"y = {name} <axis = 0> (x)"),
            ("11-", IMAGE, f"y = {name} <axis = -2> (x)"),
            ("11-", IMAGE, f"z = Neg (x) y = {name} <axis = -1> (z)"),
        ]
        for name in ("Softmax", "LogSoftmax", "Hardmax")
    },
    "Split": [
        ("7-12", IMAGE, "y, z = Split <axis = 2> (x)"),
        ("7-12", IMAGE, "y, z = Split <axis = 3, split = [1, 4]> (x)"),
        ("13-17", IMAGE, "y, z = Split <axis = 2> (x)"),
    ],
    "Squeeze": [
        ("7-12", "float[1,3,1] x", "y = Squeeze <axes = [2]> (x)"),
        ("7-12", "float[1,3,1] x", "y = Squeeze (x)"),
    ],
    "TopK": [
        ("7-9", IMAGE, "y, k = TopK <k = 2> (x)"),
        ("10-", IMAGE, "n = Constant <value = int64[1] {2}> () y, k = TopK <axis = 2> (x, n)"),
        ("11-", IMAGE, "n = Constant <value = int64[1] {2}> () y, k = TopK <largest = 0> (x, n)"),
    ],
    "Unsqueeze": [("7-12", IMAGE, "y = Unsqueeze <axes = [0, 3]> (x)")],
    "Upsample": [
        ("7-8", IMAGE, f"y = Upsample <scales = [1.0, 1.0, {scales}]{mode}> (x)")
        for scales in ("2.0, 2.0", "3.0, 1.0", "1.5, 2.4")
        for mode in ("", ', mode = "linear"')
    ]
    + [
        ("9", IMAGE, f"s = Constant <value = float[4] {{{scales}}}> () y = Upsample {mode} (x, s)")
        for scales in ("1,1,2,2", "1,1,3,1.5")
        for mode in ("", '<mode = "linear">')
    ]
    + [("9", f"{IMAGE}, float[4] scales", 'y = Upsample <mode = "linear"> (x, scales)')],
}


def _versions(name: str) -> list[int]:
    return [s.since_version for s in onnx.defs.get_all_schemas_with_history() if s.name == name and not s.domain]


def _pairs(name: str, opsets: str) -> Iterator[tuple[int, int]]:
    """Yield opsets in which a sample may be, the last ones ahead of changes, and those to raise them to."""
    first, _, last = opsets.partition("-")
    ahead = {version - 1 for version in _versions(name)}
    for opset in range(int(first), int(last or (NEWEST if "-" in opsets else first)) + 1):
        for target in (OLDEST_OPSET, NEWEST):
            if opset in ahead and opset < target:
                yield opset, target


def _parsed(opset: int, inputs: str, nodes: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        f'<ir_version: 7, opset_import: ["": {opset}]> g ({inputs}) => (float y) {{ {nodes} }}'
    )
    # The type and the shape of the output follow.
    del model.graph.output[:]
    model.graph.output.add(name="y")
    inferred = onnx.shape_inference.infer_shapes(model)
    dtype = inferred.graph.output[0].type.tensor_type.elem_type or onnx.TensorProto.FLOAT
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("y", dtype, None))
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("y", dtype, _run(model).shape))
    return model


def _run(model: onnx.ModelProto) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    feeds = {}
    for value in session.get_inputs():
        array = rng.standard_normal(value.shape)
        if value.name == "scales":
            array = np.array([1, 1, 1.75, 2.5 if "linear" in str(model) else 0.6])
        feeds[value.name] = array.astype(np.int32 if "int32" in value.type else np.float32)
    (result,) = session.run(None, feeds)
    return np.asarray(result)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_raised_model_computes_what_the_older_one_does(name: str) -> None:
    tried = 0
    for opsets, inputs, nodes in SAMPLES[name]:
        for opset, target in _pairs(name, opsets):
            older = _parsed(opset, inputs, nodes)
            newer = ir.from_proto(older)
            raise_opset(newer, target)
            proto = ir.to_proto(newer)
            onnx.checker.check_model(proto, full_check=True)
            assert proto.opset_import[0].version == target
            got, wanted = _run(proto), _run(older)
            if name in OTHER_KERNELS:
                assert_gradients_close(got, wanted, wanted.astype(np.float64), np.float32)
            else:
                assert got.dtype == wanted.dtype
                np.testing.assert_array_equal(got, wanted, err_msg=f"{nodes} of opset {opset}, raised to {target}")
            tried += 1
    assert tried


def test_every_operator_whose_signature_changes_has_a_sample() -> None:
    changed = set()
    schemas: dict[str, dict[int, onnx.defs.OpSchema]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if not schema.domain:
            schemas.setdefault(schema.name, {})[schema.since_version] = schema
    for name, versions in schemas.items():
        for before, after in itertools.pairwise(sorted(versions)):
            older, newer = versions[before], versions[after]
            if 7 < after <= NEWEST and (newer.deprecated or _signature(older) != _signature(newer)):
                changed.add(name)
    assert changed - {"OptionalHasElement"} == set(SAMPLES)


def _signature(schema: onnx.defs.OpSchema) -> tuple[object, ...]:
    attributes = {name: a.default_value.SerializeToString() for name, a in schema.attributes.items()}
    return attributes, [(i.name.lower(), i.option) for i in schema.inputs], [o.option for o in schema.outputs]


@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("wrong", ["float[5, 4]", "float[5, 2, 3, 4]"])
def test_a_rank_that_is_declared_wrong_does_not_count(name: str, wrong: str) -> None:
    """onnxruntime ignores it, with a warning."""
    axis = wrong.count(",")
    older = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 11]> g (float[5, 2, 4] x) => (float[5, 2, 4] y) <{wrong} h> '
        f"{{ h = Neg (x) y = {name} <axis = {min(axis, 2)}> (h) }}"
    )
    newer = ir.from_proto(older)
    raise_opset(newer, OLDEST_OPSET)
    feeds = {"x": np.random.default_rng(0).standard_normal((5, 2, 4)).astype(np.float32)}
    protos = (ir.to_proto(newer), older)
    got, wanted = (onnxruntime.InferenceSession(m.SerializeToString()).run(None, feeds)[0] for m in protos)
    np.testing.assert_array_equal(got, wanted)


FUNCTION_AND_BRANCHES = """<ir_version: 8, opset_import: ["": 11, "f": 1]>
g (float[2, 3, 4] x, bool flag) => (float[2, 3, 4] y)
{
    s = f.rows (x)
    y = If (flag) <
        then_branch = yes () => (float[2, 3, 4] p) { p = Softmax (s) },
        else_branch = no () => (float[2, 3, 4] q) { q = LogSoftmax <axis = 1> (s) }
    >
}
<domain: "f", opset_import: ["": 11]>
rows (v) => (w) { u = Unsqueeze <axes = [0]> (v) t = Squeeze <axes = [0]> (u) w = Softmax <axis = 1> (t) }
"""


@pytest.mark.parametrize("flag", [False, True])
def test_functions_and_branches_are_raised_too(flag: bool) -> None:
    older = onnx.parser.parse_model(FUNCTION_AND_BRANCHES)
    newer = ir.from_proto(older)
    raise_opset(newer, OLDEST_OPSET)
    proto = ir.to_proto(newer)
    onnx.checker.check_model(proto, full_check=True)
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32), "flag": np.array(flag)}
    got, wanted = (onnxruntime.InferenceSession(m.SerializeToString()).run(None, feeds)[0] for m in (proto, older))
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (
            '["": 8]> g (float[2,4,3] x, float[2,3] a) => (float[2,3] y) { y, z = Scan <num_scan_inputs = 1, '
            "body = b (float[3] p, float[3] q) => (float[3] r, float[3] s) { r = Add (p, q) s = Neg (r) }> (, a, x) }",
            r"the default opset is 8; expected 15 to \d+: Scan \(node ''\): it is of opset 8, with a batch axis",
        ),
        (
            '["": 9]> g (float[2,3] x, float[3] s) => (float[2,3] y, float[3] v) '
            "{ y, m, r, v, w = BatchNormalization (x, s, s, s, s) }",
            r"expected 15 to \d+: BatchNormalization \(node ''\): its saved statistics are read; opset 14 has no equi",
        ),
    ],
)
def test_what_has_no_equivalent_is_named(text: str, what: str) -> None:
    with pytest.raises(ModelError, match=what):
        reading.load(onnx.parser.parse_model(f"<ir_version: 8, opset_import: {text}"))


def test_the_older_model_stays_as_it_was() -> None:
    older = onnx.parser.parse_model(FUNCTION_AND_BRANCHES)
    before = older.SerializeToString()
    loaded = reading.load(older)
    assert older.SerializeToString() == before
    assert loaded.older is not None and loaded.older.opset_imports[""] == 11
    assert [node.op_type for node in loaded.older.graph] == [node.op_type for node in older.graph.node]

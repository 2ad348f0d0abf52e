"""A batch of no items: fused steps give what they give without fusing, with the library and on function bodies."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper
import onnx.parser
import onnxruntime
import pytest

import gradfuse

pytestmark = pytest.mark.usefixtures("inference_in_process")

Array = npt.NDArray[Any]
FORWARDS = {
    "LayerNormBackward": """(float[N,5] x) => (float[N,4] y) {
        h = MatMul(x, in)  square = Mul(h, h)  last = Constant<value_ints = [-1]>()
        mean = ReduceMean<keepdims = 1>(square, last)  eps = Constant<value_float = 0.00001>()
        more = Add(mean, eps)  deviation = Sqrt(more)  rstd = Reciprocal(deviation)
        normal = Mul(h, rstd)  scaled = Mul(normal, scale)  y = MatMul(scaled, out)
    }""",
    "ScaledMaskedSoftmaxBackward": """(float[N,3,5] x) => (float[N,3,4] y) {
        q = MatMul(x, in)  k = Transpose<perm = [0, 2, 1]>(q)  scores = MatMul(q, k)
        p = Softmax<axis = -1>(scores)  mixed = MatMul(p, q)  y = MatMul(mixed, out)
    }""",
    "GeluBackward": """(float[N,5] x) => (float[N,4] y) {
        h = MatMul(x, in)  shifted = Add(h, scale)  active = Gelu(shifted)  y = MatMul(active, out)
    }""",
    "ThresholdBackward": """(float[N,5] x) => (float[N,4] y) {
        h = MatMul(x, in)  shifted = Add(h, scale)  active = Relu(shifted)  y = MatMul(active, out)
    }""",
    "MaxPoolBackward": """(float[N,1,8,5] x) => (float[N,1,4,4] y) {
        h = MatMul(x, in)  shifted = Add(h, scale)  pooled = MaxPool<kernel_shape = [2, 1], strides = [2, 1]>(shifted)
        y = MatMul(pooled, out)
    }""",
    "EmbeddingDenseBackward": """(int64[N,3] x) => (float[N,3,4] y) { row = Gather(in, x)  y = MatMul(row, out) }""",
}


def _steps(forward: str) -> tuple[gradfuse.TrainingStep, gradfuse.TrainingStep]:
    numbers = np.random.default_rng(0)
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 20]> forward {forward}')
    for name, shape in (("in", (5, 6)), ("scale", (6,)), ("out", (6, 4))):
        array = numbers.uniform(0.2, 0.5, shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    sgd = gradfuse.optimizers.SGD(lr=0.1, momentum=0.9)
    loss = gradfuse.losses.MSELoss(reduction="sum")
    unfused, fused = (gradfuse.build_training_step(model, loss, optimizer=sgd, fuse=fuse) for fuse in (False, True))
    return unfused, fused


def _results(step: gradfuse.TrainingStep, library: bool) -> dict[str, Array]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if library:
        gradfuse.register(options)
    feeds = {**step.parameters, **step.optimizer_state, **step.hyperparameters}
    for value in step.model.graph.input:
        if value.name in (*step.input_names, *step.target_names):
            tensor = value.type.tensor_type
            shape = [0, *(dim.dim_value for dim in tensor.shape.dim[1:])]
            feeds[value.name] = np.ones(shape, onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    session = onnxruntime.InferenceSession(step.model.SerializeToString(), options)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


@pytest.mark.parametrize("operator", FORWARDS)
def test_an_empty_batch_gives_what_it_gives_without_fusing(operator: str) -> None:
    unfused, fused = _steps(FORWARDS[operator])
    assert operator in {node.op_type for node in fused.model.graph.node}
    wanted = _results(unfused, library=False)
    for library in (True, False):
        got = _results(fused, library)
        for name, value in wanted.items():
            assert got[name].shape == value.shape
            np.testing.assert_array_equal(got[name], value, err_msg=name)

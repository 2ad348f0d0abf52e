"""bfloat16 within a step of float32: stock onnxruntime runs it on a CPU, with PyTorch's roundings."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from mutated_steps import mutants, refusal, truth_of
from torch import Tensor, nn
from training_models import autograd, run

from gradfuse import TrainingSession, export_training_step
from gradfuse.testing import assert_gradients_close
from gradfuse.training.narrow_types import widen_bfloat16

DYNAMIC = ({0: "batch"},), ({0: "batch"},)


class Between(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))  # type: ignore[no-any-return]


def biased(h: Tensor) -> Tensor:
    """As positions are, in ALiBi."""
    slopes = torch.linspace(0.01, 0.3, 8).bfloat16()
    return h + (slopes * torch.arange(h.shape[0]).unsqueeze(1)).to(h.dtype)


def multiplied(h: Tensor) -> Tensor:
    weight = torch.linspace(-1.0, 1.0, 64).view(8, 8).bfloat16()
    return (h.bfloat16() @ weight).relu().to(h.dtype) + h


@pytest.mark.parametrize("function", [biased, multiplied])
def test_bfloat16_within_a_step_of_float32(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    module = Between(function)
    batches = [((torch.randn(items, 6),), (torch.arange(items) % 5,)) for items in (3, 7)]
    step = export_training_step(module, F.cross_entropy, batches[0], dynamic_shapes=DYNAMIC)
    results = run(step, batches[1], kernels=False)
    # With products in bfloat16, the order of sums decides how they are rounded.
    rounding = 2.0**-8 if function is multiplied else 0.0
    native = autograd(module, F.cross_entropy, batches[1], torch.float32, step)
    for name, result in results.items():
        terms = 8 * max(np.abs(array).max() for array in native.values()) * (1 + rounding / np.finfo(np.float32).eps)
        assert_gradients_close(result, native[name], native[name].astype(np.float64), np.float32, terms=terms)


HALVES: list[Callable[[Tensor], Tensor]] = [
    lambda h: (h.half() * 0.1 + 2.0).to(h.dtype),
    lambda h: (1.0 - h.half() * math.pi).to(h.dtype),
    lambda h: (h.half() ** 2 * 8**-0.5).to(h.dtype),
    lambda h: ((h.half().abs() + 1.0) ** 1.5).to(h.dtype),
]


@pytest.mark.parametrize("function", HALVES)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.sampled(every=4)
def test_halves_times_numbers_within_a_step_of_float32(function: Callable[[Tensor], Tensor], seed: int) -> None:
    torch.manual_seed(seed)
    batch = (torch.randn(4, 6),), (torch.arange(4) % 5,)
    export_training_step(Between(function), F.cross_entropy, batch, dynamic_shapes=DYNAMIC)


@pytest.mark.parametrize("fuse", [True, False])
def test_layer_normalisation_of_halves_by_weights_of_float32(fuse: bool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5))
    (x,), (y,) = batch = (torch.randn(4, 6),), (torch.arange(4) % 5,)
    step = export_training_step(module, F.cross_entropy, batch, autocast=torch.float16, fuse=fuse)
    # What a session runs is the step in its own types.
    session = TrainingSession(step)
    session.step(x.numpy(), y.numpy())

    def gradients(dtype: torch.dtype) -> dict[str, Any]:
        copy = deepcopy(module).to(dtype)
        with torch.autocast("cpu", torch.float16, enabled=dtype == torch.float32):
            loss = F.cross_entropy(copy(x.to(dtype)), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return {name: one.grad.numpy() for name, one in copy.named_parameters() if one.grad is not None}

    native, exact = gradients(torch.float32), gradients(torch.float64)
    for name, gradient in session.gradients.items():
        terms = float(np.abs(exact[name]).max()) * np.finfo(np.float16).eps / np.finfo(np.float32).eps
        assert_gradients_close(gradient, native[name], exact[name], np.float32, terms=terms)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.sampled(every=3)
def test_a_gradient_within_halves_that_is_wrong_by_one_percent_is_refused(seed: int) -> None:
    torch.manual_seed(seed)
    module, batch = Between(HALVES[0]), ((torch.randn(4, 6),), (torch.arange(4) % 5,))
    model = export_training_step(module, F.cross_entropy, batch, fuse=False).model
    truth = truth_of(module, F.cross_entropy, batch)
    assert refusal(truth, model) is None
    wrong = [mutant for mutant in mutants(model) if mutant.kind == "one percent"]
    assert len(wrong) == 4
    for mutant in wrong:
        text = refusal(truth, mutant.model)
        assert text is not None and "differs from PyTorch" in text, mutant.place


class Mixed(nn.Module):
    """An embedding, layer norm, attention and a convolution: what models under autocast are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.heads = nn.Embedding(11, 16), nn.LayerNorm(16), nn.Linear(16, 48)
        self.convolution, self.head = nn.Conv1d(16, 16, 3, padding=1), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.embedding(x)
        query, key, value = self.heads(self.norm(h)).chunk(3, -1)
        h = h + torch.softmax(query @ key.transpose(1, 2) / 4, -1) @ value
        h = h + F.gelu(self.convolution(h.transpose(1, 2)).transpose(1, 2))
        return self.head(h).mean(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.sampled(every=2)
def test_autocast_to_bfloat16_trains_in_stock_onnxruntime(fuse: bool) -> None:
    torch.manual_seed(0)
    module = Mixed()
    batches = [((torch.randint(0, 11, (items, 6)),), (torch.arange(items) % 5,)) for items in (3, 7)]
    options = {"dynamic_shapes": DYNAMIC, "autocast": torch.bfloat16, "fuse": fuse, "evaluation": True}
    step = export_training_step(module, F.cross_entropy, batches[0], **options)  # type: ignore[arg-type]
    assert step.evaluation_model is not None
    onnxruntime.InferenceSession(step.evaluation_model.SerializeToString())
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16):
            native = autograd(module, F.cross_entropy, batch, torch.float32, step)
        exact = autograd(module, F.cross_entropy, batch, torch.float64, step)
        for kernels in (True, False) if fuse else (False,):
            for name, result in run(step, batch, kernels=kernels).items():
                # As many roundings to bfloat16 as there are layers, of the largest number.
                size = float(np.abs(exact[name]).max()) * 2.0**-8 / np.finfo(np.float32).eps
                assert_gradients_close(result, native[name], exact[name], np.float32, terms=size)


class Pictures(nn.Module):
    """Convolutions of all kinds between batch norms, one with weights that are used twice and one in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.twice, self.plain_norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, affine=False)
        self.by_channel = nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8)
        self.point, self.last_norm = nn.Conv2d(8, 5, 1, stride=2), nn.BatchNorm2d(5, track_running_stats=False)
        self.up, self.exact = nn.ConvTranspose2d(5, 4, 2, stride=2), nn.Conv2d(4, 4, 2)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.first(x)))
        h = F.relu(h + self.twice(F.max_pool2d(self.twice(h), 3, 1, 1)))
        h = self.plain_norm(self.by_channel(h))
        h = torch.sigmoid(self.up(F.relu(self.last_norm(self.point(h)))))
        with torch.autocast("cpu", enabled=False):
            h = self.exact(h.to(self.exact.weight.dtype))
        return self.head(h.mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("fuse", [True, False])
def test_convolutions_under_autocast_to_bfloat16_keep_activations_in_it(fuse: bool) -> None:
    torch.manual_seed(0)
    module = Pictures()
    batches = [((torch.randn(items, 3, 12, 12),), (torch.arange(items) % 5,)) for items in (3, 4, 6, 7, 8, 9)]
    step = export_training_step(
        module, F.cross_entropy, batches[0], dynamic_shapes=DYNAMIC, autocast=torch.bfloat16, fuse=fuse
    )
    errors: dict[tuple[str, str], float] = {}
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16):
            found = {"native": autograd(module, F.cross_entropy, batch, torch.float32, step)}
        exact = autograd(module, F.cross_entropy, batch, torch.float64, step)
        for kernels in (True, False) if fuse else (False,):
            found[f"kernels={kernels}"] = run(step, batch, kernels=kernels)
        for way, results in found.items():
            for name, result in results.items():
                squares = float(np.square(result - exact[name]).sum())
                errors[way, name] = errors.get((way, name), 0.0) + squares
    for (way, name), error in errors.items():
        # Each element is the sum of many roundings to bfloat16: together they are as large as PyTorch's.
        assert math.sqrt(error) <= 2 * math.sqrt(errors["native", name]) + 1e-6, (way, name)
    if not fuse:
        return
    graph = onnx.shape_inference.infer_shapes(step.model).graph
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.output)}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    types |= {value.name: value.type.tensor_type.elem_type for value in graph.input}
    counts = {"Convolution": 0, "ConvolutionBackward": 0, "BatchNorm": 0, "BatchNormBackward": 0}
    narrow, wide = onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT
    for node in graph.node:
        if node.op_type not in counts or "exact" in " ".join(node.input):
            continue
        counts[node.op_type] += 1
        first = 1 + node.op_type.endswith("Backward")
        assert {types[name] for name in (*node.input[:first], node.output[0])} == {narrow}, node
        assert {types[name] for name in (node.input[first], *node.output[1:]) if name in types} <= {wide}, node
    assert counts == {"Convolution": 6, "ConvolutionBackward": 6, "BatchNorm": 3, "BatchNormBackward": 3}, counts


def shape_of(model: onnx.ModelProto, name: str) -> list[int | str]:
    values = *model.graph.input, *model.graph.value_info
    (value,) = [value for value in values if value.name == name]
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


class Language(nn.Module):
    """A language model's parts with narrow products: linear layers in a row, attention, and a head of many words."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 16), nn.LayerNorm(16)
        self.up, self.down, self.head = nn.Linear(16, 20), nn.Linear(20, 16), nn.Linear(16, 50, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.embedding(x))
        h = h + self.down(F.relu(self.up(h)))
        h = h + torch.softmax(h @ h.mT, -1) @ h
        return self.head(self.norm(h)).flatten(0, 1)  # type: ignore[no-any-return]


def clamped(h: Tensor) -> Tensor:
    return torch.clamp(h, -0.3, 0.7)


OF_SIXTEEN_BITS: list[Callable[[Tensor], Tensor]] = [
    clamped,
    F.selu,
    lambda h: h.mean() * torch.ones_like(h),
    lambda h: h.abs().add(1.0) ** 1.7,
    lambda h: h * h.norm(3, 1, keepdim=True),
    lambda h: torch.log2(h.abs() + 1.25) / 3.0,
    lambda h: h - h.logsumexp(1, keepdim=True),
    lambda h: torch.logit(torch.sigmoid(h) * 0.875 + 0.0625),
    lambda h: h * (h == h.amax(1, keepdim=True)),
]


@pytest.mark.parametrize(
    ("function", "dtype"),
    [*((one, torch.bfloat16) for one in OF_SIXTEEN_BITS), (clamped, torch.float16), (F.normalize, torch.float16)],
)
def test_operators_under_autocast_round_once_and_their_numbers_not_at_all(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 21)

        def forward(self, x: Tensor) -> Tensor:
            return function(self.first(x)).float()

    torch.manual_seed(0)
    module, batch = Module(), ((torch.randn(21, 6),), (torch.randn(21, 21),))

    def loss(y: Tensor, factors: Tensor) -> Tensor:
        return (y * factors).square().sum()

    step = export_training_step(module, loss, batch, autocast=dtype)
    exact = autograd(module, loss, batch, torch.float64, step)
    with torch.autocast("cpu", dtype):
        native = autograd(module, loss, batch, torch.float32, step)
    for kernels in (True, False):
        for name, result in run(step, batch, kernels=kernels).items():
            size = float(np.abs(exact[name]).max()) * torch.finfo(dtype).eps / 2 / np.finfo(np.float32).eps
            assert_gradients_close(result, native[name], exact[name], np.float32, terms=size)
            if name.endswith(".grad"):
                # A number that is rounded makes a whole tensor too large, which roundings of its elements do not.
                too_large, of_native = (
                    abs(float((one * exact[name]).sum() / np.square(exact[name]).sum()) - 1)
                    for one in (result.astype(np.float64), native[name])
                )
                assert too_large <= of_native + torch.finfo(dtype).eps / 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_gradient_of_a_mean_of_16_bits_is_divided_in_float32(dtype: torch.dtype) -> None:
    """1 / 49 in bfloat16 is 0.1 % off, and so would be all gradients before a pooling."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.numbers = nn.Parameter(torch.randn(200, 49))

        def forward(self, x: Tensor) -> Tensor:
            return self.numbers.to(dtype).mean(1).float() * x

    torch.manual_seed(0)
    x = torch.rand(200) + 0.5
    step = export_training_step(Mean(), lambda y, _: y.sum(), ((x,), (torch.zeros(1),)))
    gradient = run(step, ((x,), (torch.zeros(1),)), kernels=False)["numbers.grad"]
    exact = (x.to(dtype).double() / 49)[:, None].expand(200, 49).numpy()
    half = torch.finfo(dtype).eps / 2
    assert (np.abs(gradient - exact) <= 1.001 * half * exact).all()


@pytest.mark.parametrize("bias", [False, True])
def test_products_under_autocast_to_bfloat16_are_an_operator_that_rounds_as_pytorch_does(bias: bool) -> None:
    torch.manual_seed(0)
    module = Language(bias)
    batches = [((torch.randint(0, 11, (items, 6)),), (torch.arange(items * 6) % 50,)) for items in (3, 7)]
    shapes = [({0: "items"},), ({0: "labels"},)]
    step = export_training_step(module, F.cross_entropy, batches[0], dynamic_shapes=shapes, autocast=torch.bfloat16)
    nodes = [node for node in step.model.graph.node if node.op_type in ("FusedMatmul", "Gemm", "MatMul")]
    # Three of each layer, and six of attention.
    assert [node.op_type for node in nodes] == 15 * ["FusedMatmul"]
    types = {value.name: value.type.tensor_type.elem_type for value in step.model.graph.value_info}
    wide = [node for node in nodes if types.get(node.output[0]) == onnx.TensorProto.FLOAT]
    weights = [shape_of(step.model, node.input[1]) for node in wide]
    assert [50, 16] in weights
    # Weights are read as they are, and rounded by each product: no copy of them lives until the backward pass.
    assert {node.input[1] for node in nodes} >= {"up.weight", "down.weight", "head.weight"}
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16):
            native = autograd(module, F.cross_entropy, batch, torch.float32, step)
        exact = autograd(module, F.cross_entropy, batch, torch.float64, step)
        for kernels in (True, False):
            for name, result in run(step, batch, kernels=kernels).items():
                size = float(np.abs(exact[name]).max()) * 2.0**-8 / np.finfo(np.float32).eps
                assert_gradients_close(result, native[name], exact[name], np.float32, terms=size)


def test_large_casts_under_autocast_are_by_vectors_and_gradients_of_weights_are_not_turned() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 5))
    batch = (torch.randn(128, 64),), (torch.arange(128) % 5,)
    step = export_training_step(module, F.cross_entropy, batch, autocast=torch.bfloat16)
    model = ir.from_proto(step.model)
    types = {ir.DataType.FLOAT, ir.DataType.BFLOAT16}
    casts = [node for node in model.graph if node.outputs[0].dtype in types and "Cast" in node.op_type]
    large = [node for node in casts if math.prod(node.outputs[0].shape) >= 4096]  # type: ignore[arg-type]
    assert {node.op_type for node in large} == {"CastBfloat16"} and "Cast" in {node.op_type for node in casts}
    # The input, the weight of 6,144 numbers and its gradient, and what GELU takes and gives.
    assert {ir.DataType.FLOAT, ir.DataType.BFLOAT16} == {node.outputs[0].dtype for node in large}
    assert not any(node.op_type == "Transpose" for node in model.graph)
    exact = autograd(module, F.cross_entropy, batch, torch.float64, step)
    with torch.autocast("cpu", torch.bfloat16):
        native = autograd(module, F.cross_entropy, batch, torch.float32, step)
    for kernels in (True, False):
        for name, result in run(step, batch, kernels=kernels).items():
            size = float(np.abs(exact[name]).max()) * 2.0**-8 / np.finfo(np.float32).eps
            assert_gradients_close(result, native[name], exact[name], np.float32, terms=size)


@pytest.mark.parametrize("reading", ["", "Transpose<perm = [1, 0]>(product)", "Relu(product)"])
def test_a_turned_product_is_one_of_swapped_factors_unless_something_else_reads_it(reading: str) -> None:
    text = f"""
        <ir_version: 10, opset_import: ["": 18]>
        step (float[6, 4] x, float[6, 16] w) => (float[16, 4] turned{", other" if reading else ""}) {{
            narrow_x = Cast<to = 16>(x)
            narrow_w = Cast<to = 16>(w)
            product = Gemm<transA = 1>(narrow_x, narrow_w)
            narrow_turned = Transpose<perm = [1, 0]>(product)
            turned = Cast<to = 1>(narrow_turned)
            {f"narrow_other = {reading}" if reading else ""}
            {"other = Cast<to = 1>(narrow_other)" if reading else ""}
        }}
    """
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
    widen_bfloat16(model, fuse=True)
    assert ("Transpose" in {node.op_type for node in model.graph}) == bool(reading)
    rng = np.random.default_rng(0)
    x, w = (torch.from_numpy(rng.standard_normal((6, size)).astype(np.float32)) for size in (4, 16))
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    turned = session.run(["turned"], {"x": x.numpy(), "w": w.numpy()})[0]
    exact = (w.bfloat16().double().T @ x.bfloat16().double()).numpy()
    native = (w.bfloat16().T @ x.bfloat16()).float().numpy()
    assert_gradients_close(turned, native, exact, np.float32, terms=2.0**-8 / np.finfo(np.float32).eps)


def test_views_of_a_wide_product_of_which_the_shape_alone_is_read_are_wide_too() -> None:
    text = """
        <ir_version: 10, opset_import: ["": 18]>
        step (float[2, 4] x, float[4, 16] w) => (float loss, int64[1] sizes) {
            narrow_x = Cast<to = 16>(x)
            narrow_w = Cast<to = 16>(w)
            product = MatMul(narrow_x, narrow_w)
            flat = Constant<value_ints = [32]>()
            view = Reshape(product, flat)
            sizes = Shape(view)
            wide = Cast<to = 1>(product)
            loss = ReduceSum<keepdims = 0>(wide)
        }
    """
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
    widen_bfloat16(model, fuse=True)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    x, w = np.full((2, 4), 1 + 2.0**-10, np.float32), np.ones((4, 16), np.float32)
    loss, sizes = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": x, "w": w})
    assert loss == 128 and list(sizes) == [32]
    assert "FusedMatmul" in {node.op_type for node in model.graph}


def test_dropout_in_bfloat16_counts_its_draws_at_any_size() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.3), nn.Linear(40, 5))
    shapes = [({0: "items"},), ({0: "items"},)]
    batch = (torch.randn(4, 6),), (torch.arange(4),)
    step = export_training_step(module, F.cross_entropy, batch, dynamic_shapes=shapes, autocast=torch.bfloat16)
    for options in (None, onnxruntime.SessionOptions()):
        session = TrainingSession(step, session_options=options)
        for items in (3, 7):
            loss = session.step(torch.randn(items, 6).numpy(), (torch.arange(items) % 5).numpy())
            assert np.isfinite(loss)


def test_steps_in_bfloat16_by_a_session_follow_those_of_autocast() -> None:
    torch.manual_seed(0)
    module = Mixed()
    (x,), (y,) = batch = (torch.randint(0, 11, (4, 6)),), (torch.arange(4) % 5,)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    session = TrainingSession(
        export_training_step(module, F.cross_entropy, batch, autocast=torch.bfloat16, optimizer=optimizer)
    )
    losses = [float(session.step(x.numpy(), y.numpy())) for _ in range(6)]

    def trained(dtype: torch.dtype) -> list[float]:
        copy, found = deepcopy(module).to(dtype), []
        stepping = torch.optim.SGD(copy.parameters(), lr=0.1)
        for _ in range(6):
            stepping.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
                loss = F.cross_entropy(copy(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            stepping.step()
            found.append(loss.item())
        return found

    native, exact = np.array(trained(torch.float32)), np.array(trained(torch.float64))
    terms = exact.max() * 2.0**-8 / np.finfo(np.float32).eps
    assert_gradients_close(np.array(losses, np.float32), native.astype(np.float32), exact, np.float32, terms=terms)
    assert losses[-1] < losses[0] - 0.1


def likelihood(output: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(output.log_softmax(-1), target)


def gathered(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    scores = output.log_softmax(-1)
    return -scores.gather(1, target.unsqueeze(1)).mean(), {"scores": scores}


@pytest.mark.parametrize("loss", [likelihood, gathered])
@pytest.mark.parametrize("fuse", [True, False])
def test_losses_and_outputs_in_bfloat16_come_in_float32(loss: Callable[..., Any], fuse: bool) -> None:
    torch.manual_seed(0)
    module = nn.Linear(6, 5)
    x, y = torch.randn(4, 6), torch.arange(4)
    session = TrainingSession(export_training_step(module, loss, (x, y), autocast=torch.bfloat16, fuse=fuse))
    wanted = []
    for dtype in (torch.float32, torch.float64):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            value = loss(deepcopy(module).to(dtype)(x.to(dtype)), y)
        value, outputs = value if isinstance(value, tuple) else (value, {})
        wanted.append([one.detach().to(dtype).numpy() for one in (value, *outputs.values())])
    got: list[Any] = [np.float32(session.step(x.numpy(), y.numpy()))]
    if loss is gathered:
        got += session.outputs.values()
    for own, native, exact in zip(got, *wanted, strict=True):
        terms = 2.0**-8 / np.finfo(np.float32).eps * np.abs(exact).max()
        assert_gradients_close(np.asarray(own), native, exact, np.float32, terms=terms)


def test_gradients_of_convolutions_in_bfloat16_are_accumulated_and_clipped() -> None:
    torch.manual_seed(0)
    module = Pictures()
    batches = [(torch.randn(4, 3, 12, 12), torch.arange(4) % 5) for _ in range(3)]
    (x, y), calls = batches[0], 6
    step = export_training_step(
        module,
        F.cross_entropy,
        ((x,), (y,)),
        autocast=torch.bfloat16,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.2),
        accumulate=2,
        max_grad_norm=0.5,
    )
    session = TrainingSession(step)
    losses = [float(session.step(*(one.numpy() for one in batches[call % 3]))) for call in range(calls)]

    def trained(dtype: torch.dtype) -> list[float]:
        copy, found = deepcopy(module).to(dtype), []
        stepping = torch.optim.SGD(copy.parameters(), lr=0.2)
        for call in range(calls):
            x, y = batches[call % 3]
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
                loss = F.cross_entropy(copy(x.to(dtype)), y)
            (loss / 2).backward()  # type: ignore[no-untyped-call]
            found.append(loss.item())
            if call % 2:
                nn.utils.clip_grad_norm_(copy.parameters(), 0.5)
                stepping.step()
                stepping.zero_grad()
        return found

    native, exact = np.array(trained(torch.float32)), np.array(trained(torch.float64))
    terms = exact.max() * 2.0**-8 / np.finfo(np.float32).eps
    assert_gradients_close(np.array(losses, np.float32), native.astype(np.float32), exact, np.float32, terms=terms)
    assert losses[-1] < losses[2]

"""Which tensors of a forward model are its parameters: what exporters merge, fold and write as constants."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradfuse import ArgumentError, ModelError, TrainingSession, TrainingStep, build_training_step, losses, optimizers
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("inference_in_process")

HEAD = '<ir_version: 9, opset_import: ["": 18]> '
X = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))


def by_dynamo(module: nn.Module, x: Tensor) -> onnx.ModelProto:
    """The module by torch's exporter with its defaults, which merges equal initializers."""
    program = torch.onnx.export(module.eval(), (x,), dynamo=True, dynamic_shapes=({0: "batch"},), verbose=False)
    assert program is not None
    return program.model_proto


def by_torchscript(module: nn.Module, x: Tensor, path: Path, **options: Any) -> onnx.ModelProto:
    """The module by torch's older exporter, which merges equal initializers by Identity nodes."""
    axes = {"x": {0: "batch"}, "y": {0: "batch"}}
    options |= {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": axes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module.eval(), (x,), str(path), dynamo=False, **options)
    return onnx.load(path)


def quietly(model: Any, loss: Any = "mse", **options: Any) -> TrainingStep:
    """The step; it is an error if anything is warned of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return build_training_step(model, loss, **options)


def require_torchs(
    step: TrainingStep, make: Callable[[], nn.Module], x: Tensor, names: Mapping[str, str], only: Sequence[str] = ()
) -> None:
    """Compare all gradients of a step with torch's.

    Args:
        step: the step, with a loss of squares.
        make: returns the module.
        x: the batch.
        names: parameter of the module -> parameter of the step, where these differ.
        only: the parameters that the step trains; empty: all.
    """
    target = torch.randn(make().eval()(x).shape, generator=torch.Generator().manual_seed(2))
    session = TrainingSession(step)
    session.step(x.numpy(), target.numpy())

    def gradients(dtype: torch.dtype) -> dict[str, Any]:
        module = make().eval().to(dtype)
        F.mse_loss(module(x.to(dtype)), target.to(dtype)).backward()  # type: ignore[no-untyped-call]
        return {
            name: p.grad.numpy()
            for name, p in module.named_parameters()
            if p.grad is not None and (name in only or not only)
        }

    native, exact, found = gradients(torch.float32), gradients(torch.float64), session.gradients
    assert {names.get(name, name) for name in exact} == found.keys()
    for name, gradient in exact.items():
        actual = found[names.get(name, name)]
        if actual.shape != gradient.shape:
            actual = actual.reshape(gradient.shape) if 1 in actual.shape else actual.T
        terms = 16 * np.abs(gradient).max() + 1e-3
        assert_gradients_close(actual, native[name], gradient, np.float32, terms=terms)


class Normalised(nn.Module):
    """Fresh normalisations of one size: their scales are ones and their biases zeros, as are the statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.batch = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 6)
        self.layer = nn.LayerNorm(6)
        self.other = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.batch(torch.sigmoid(self.first(x)))
        return self.other(torch.sigmoid(self.layer(self.second(x))))  # type: ignore[no-any-return]


class Adapted(nn.Module):
    """Matrices of zeros, as of low-rank adapters, and a layer's scale that begins small."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.a = nn.ParameterList(nn.Parameter(torch.randn(6, 2)) for _ in range(2))
        self.b = nn.ParameterList(nn.Parameter(torch.zeros(2, 6)) for _ in range(2))
        self.scale = nn.ParameterList(nn.Parameter(torch.full((6,), 1e-2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer, a, b in zip(self.layers, self.a, self.b, strict=True):
            x = torch.tanh(layer(x) + x @ a @ b)
        return x + self.scale[0] * torch.sin(x) + self.scale[1] * torch.cos(x)  # type: ignore[no-any-return]


class Attending(nn.Module):
    """Two layers of attention, whose biases are zeros and are cut into three each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.MultiheadAttention(6, 2, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None].expand(-1, 3, -1)
        for one in (self.a, self.b):
            x = x + one(x, x, x, need_weights=False)[0]
        return x


class Twice(nn.Module):
    """Layers that are called twice: their parameters are equal to others of the kind, and are one each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm, self.last = nn.Linear(3, 5), nn.LayerNorm(5), nn.LayerNorm(5)
        # The exporter takes a bias of 0 away.
        nn.init.constant_(self.linear.bias, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.linear(x[:, :3]), self.linear(x[:, 3:]).sin()
        return self.last(self.norm(one)) - self.last(self.norm(other))  # type: ignore[no-any-return]


class Root(nn.Module):
    """Normalisation by the root mean square, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3) * self.weight


class CalledAgain(nn.Module):
    """A scale that its layer reads at each of three calls, as in T5's attention, and one of another layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.last = Root(), Root()
        self.linears = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(self.norm(torch.sin((n + 1) * x))) for n, linear in enumerate(self.linears))
        return self.last(x + q * k * v)  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [Normalised, Adapted, Twice, CalledAgain])
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.sampled(every=3)
def test_merged_parameters_train_apart(make: Callable[[], nn.Module], exporter: str, tmp_path: Path) -> None:
    if exporter == "torchscript":
        require_torchs(quietly(by_torchscript(make(), X, tmp_path / "model.onnx")), make, X, {})
        return
    # What no module reads by itself is numbered.
    names = {"b.1": "b.0_2", "scale.1": "scale.0_2"} if make is Adapted else {}
    require_torchs(quietly(by_dynamo(make(), X)), make, X, names)


@pytest.mark.parametrize("read", (lambda model: model, ir.from_proto), ids=("proto", "ir"))
def test_the_model_that_is_given_keeps_the_names_of_its_tensors(read: Callable[[onnx.ModelProto], Any]) -> None:
    """Those that a step needs for its own inputs and outputs, and one that several layers share."""
    given = read(
        onnx.parser.parse_model(
            """<ir_version: 10, opset_import: ["": 18]> g (float[3, 4] x) => (float[3, 4] y)
            <float[4] merged = {1, 2, 3, 4}, float[4] learning_rate = {1, 1, 1, 1}, float[4] loss = {1, 1, 1, 1}> {
                scale = Identity(merged)  a = Mul(x, learning_rate)  s = Add(a, loss)
                m = BatchNormalization(s, scale, merged, merged, merged)  y = Add(m, merged)
            }"""
        )
    )

    def names() -> list[str]:
        if isinstance(given, onnx.ModelProto):
            return [tensor.name for tensor in given.graph.initializer]
        return [name for value in given.graph.initializers.values() for name in (value.name, value.const_value.name)]

    before = names()
    build_training_step(given, losses.MSELoss(), optimizer=optimizers.SGD(lr=0.1))
    assert names() == before


def test_what_a_named_tensor_was_merged_with_is_told_of() -> None:
    model = by_dynamo(Normalised(), X)
    with pytest.warns(UserWarning, match=r"trainable has 'batch.weight', .* 'layer.weight', 'other.weight' stay"):
        build_training_step(model, "mse", trainable=["batch.weight"])
    names = ["batch.weight", "layer.weight", "other.weight"]
    require_torchs(quietly(model, trainable=names), Normalised, X, {}, only=names)


@pytest.mark.parametrize("operator", ["Gemm", "Add"])
def test_a_layer_behind_several_embeddings_has_one_bias(operator: str) -> None:
    """The tables that rows come from do not tell layers apart."""
    product = {
        "Gemm": "{0}p = Gemm({0}e, w, b)",
        "Add": "{0}m = MatMul({0}e, w) {0}p = Add({0}m, b)",
    }[operator]
    text = (
        HEAD
        + "g (int64[n] i, int64[n] j) => (float[n,3] y) <float[9,4] first, float[9,4] second, float[4,3] w, float[3] b>"
        "{ ie = Gather(first, i) je = Gather(second, j) "
        + product.format("i")
        + " "
        + product.format("j")
        + " t = Tanh(jp) y = Mul(ip, t) }"
    )
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    shapes = {"first": (9, 4), "second": (9, 4), "w": (4, 3)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["b"] = np.zeros(3, np.float32)
    del model.graph.initializer[:]
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    with pytest.warns(UserWarning, match="several nodes read 'b'"):
        step = build_training_step(model, "mse", optimizer=optimizers.SGD(lr=0.3))
    assert set(step.parameters) == set(arrays)
    session = TrainingSession(step)
    exact = {name: torch.tensor(array).double().requires_grad_() for name, array in arrays.items()}
    optimizer = torch.optim.SGD(exact.values(), lr=0.3)
    for size in (5, 3, 8):
        i, j = rng.integers(0, 9, (2, size))
        target = rng.standard_normal((size, 3)).astype(np.float32)
        a, c = (exact[name][index] @ exact["w"] + exact["b"] for name, index in (("first", i), ("second", j)))
        loss = F.mse_loss(a * torch.tanh(c), torch.tensor(target).double())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found = float(session.step({"i": i, "j": j}, target))
        assert abs(found - loss.item()) <= 64 * np.finfo(np.float32).eps * loss.item()


def test_a_bias_that_is_cut_and_was_merged_is_one_for_each_layer() -> None:
    biases = ("a.in_proj_bias", "b.in_proj_bias")
    step = quietly(by_dynamo(Attending(), X), trainable=biases)
    require_torchs(step, Attending, X, {}, only=biases)


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_statistics_that_were_merged_with_parameters_are_updated(exporter: str, tmp_path: Path) -> None:
    model = by_dynamo(Normalised(), X) if exporter == "dynamo" else by_torchscript(Normalised(), X, tmp_path / "m.onnx")
    step = quietly(model, train_batch_norm=True, optimizer=optimizers.SGD(lr=0.1))
    statistics = {f"{one}.running_{kind}" for one in ("batch", "other") for kind in ("mean", "var")}
    assert step.buffers.keys() == statistics
    assert step.parameters.keys() == {name for name, _ in Normalised().named_parameters()}
    session, module = TrainingSession(step), Normalised().train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        loss = F.mse_loss(module(X), torch.zeros(5, 6))
        assert abs(session.step(X.numpy(), np.zeros((5, 6), np.float32)) - loss.item()) <= 1e-5
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    state = session.state_dict()
    for name, tensor in module.state_dict().items():
        if name in state:
            assert np.abs(state[name] - tensor.numpy()).max() <= 1e-5, name


def test_a_batch_norm_that_is_called_twice_has_one_pair_of_statistics(tmp_path: Path) -> None:
    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(x[:, :3])) * self.norm(self.linear(x[:, 3:]))  # type: ignore[no-any-return]

    step = quietly(by_torchscript(Siamese(), X, tmp_path / "m.onnx"), train_batch_norm=True)
    assert step.buffers.keys() == {"norm.running_mean", "norm.running_var"}
    session, module = TrainingSession(step), Siamese().train()
    module(X)
    model = step.model
    run = onnxruntime.InferenceSession(_without_ours(step), providers=["CPUExecutionProvider"])
    feeds = {**step.parameters, **step.buffers, "x": X.numpy(), "target": np.zeros((5, 4), np.float32)}
    found = dict(zip([o.name for o in model.graph.output], run.run(None, feeds), strict=True))
    for name in step.buffers:
        assert np.abs(found[f"{name}.updated"] - module.state_dict()[name].numpy()).max() <= 1e-6
    assert session.step_count == 0


def _without_ours(step: TrainingStep) -> bytes:
    """The model, which onnxruntime runs on function bodies."""
    return bytes(step.model.SerializeToString())


@pytest.mark.parametrize("where", ["cast", "identity", "branch"])
def test_statistics_are_found_behind_views_and_in_branches(where: str) -> None:
    """One initializer is the bias of a layer as well."""
    norm = "y = BatchNormalization(a, one, two, %s, one)"
    body = {
        "cast": "m = Cast<to=1>(h) " + norm % "m",
        "identity": "i = Identity(two) m = Identity(i) " + norm % "m",
        "branch": "y = If(c)<then_branch = t () => (float[N, 2] z) {" + (norm % "two").replace("y", "z") + "}, "
        "else_branch = e () => (float[N, 2] o) { o = Identity(a) }>",
    }[where]
    model = onnx.parser.parse_model(
        HEAD
        + f"g (float[N, 2] x{', bool c' * (where == 'branch')}) => (float[N, 2] y) <float[2, 2] w = {{1, 2, 3, 4}}, "
        f"float[2] one = {{1, 1}}, float[2] two = {{0.5, 2}}> "
        f"{{ p = MatMul(x, w) a = Add(p, two) {body} }}"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0.5, 2], np.float16), "h"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = build_training_step(model, "mse")
    assert step.parameters.keys() == {"w", "one", "two"}
    x, target = np.array([[1, 2], [0.5, -1]], np.float32), np.zeros((2, 2), np.float32)
    session = TrainingSession(step)
    session.step({"x": x, **({"c": np.array(True)} if where == "branch" else {})}, target)
    w = torch.tensor([[1.0, 2], [3, 4]], dtype=torch.float64)
    one, two = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in ([1.0, 1.0], [0.5, 2.0]))
    mean, variance = two.detach(), one.detach()
    a = torch.tensor(x, dtype=torch.float64) @ w + two
    y = (a - mean) / (variance + 1e-5).sqrt() * one + two
    y.square().mean().backward()  # type: ignore[no-untyped-call]
    for name, leaf in (("one", one), ("two", two)):
        assert leaf.grad is not None
        wanted = leaf.grad.numpy()
        assert_gradients_close(session.gradients[name], wanted.astype(np.float32), wanted, np.float32, terms=100)


def test_what_exporters_say_of_merged_parameters_helps(tmp_path: Path) -> None:
    """Equal vectors that are not filled with one number cannot be told from shared ones: the advice is followed."""

    class Equal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            self.b.bias.data.copy_(self.a.bias.data)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)))  # type: ignore[no-any-return]

    with pytest.warns(UserWarning, match=r"several nodes read '.\.bias'.* with optimize=False"):
        build_training_step(by_dynamo(Equal(), X), "mse")
    program = torch.onnx.export(Equal(), (X,), dynamo=True, optimize=False, verbose=False)
    assert program is not None
    require_torchs(quietly(program.model_proto), Equal, X, {})
    with pytest.warns(UserWarning, match=r"several nodes read '.\.bias'.* with keep_initializers_as_inputs=True"):
        build_training_step(by_torchscript(Equal(), X, tmp_path / "m.onnx"), "mse")
    kept = by_torchscript(Equal(), X, tmp_path / "k.onnx", keep_initializers_as_inputs=True)
    require_torchs(quietly(kept), Equal, X, {})


def test_layers_that_an_exporter_made_one_are_warned_of() -> None:
    """Of two layers of equal weights on one input, which fresh experts may be, the file has one."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            self.b.load_state_dict(self.a.state_dict())

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.a(x)) + torch.tanh(self.b(x))

    with pytest.warns(UserWarning, match=r"Add \(node '.*'\) reads one value twice.* with optimize=False"):
        build_training_step(by_dynamo(Twice(), X), "mse")
    program = torch.onnx.export(Twice(), (X,), dynamo=True, optimize=False, verbose=False)
    assert program is not None
    require_torchs(quietly(program.model_proto), Twice, X, {})


NUMBERS = """g (float[N, 4] x) => (float[N, 3] y)
<float[4, 3] w = {1,0,0, 0,1,0, 0,0,1, 0,0,0}, float[1] half = {0.5}, float[1, 1] r = {1.41421356}, float one = {1}> {
    h = MatMul(x, w) a = Div(h, r) e = Erf(a) b = Add(e, one) c = Mul(h, b) y = Mul(c, half)
}"""


def test_single_numbers_of_any_rank_train_only_where_they_are_named() -> None:
    model = onnx.parser.parse_model(HEAD + NUMBERS)
    assert quietly(model).parameters.keys() == {"w"}
    assert quietly(model, trainable=["*"]).parameters.keys() == {"w"}
    assert quietly(model, trainable=["w", "half"]).parameters.keys() == {"w", "half"}
    assert quietly(model, trainable=["ha*"]).parameters.keys() == {"half"}


ONE_ELEMENT = {
    "bias of a product": ("float[N, 2] x", "w[2, 1] p[1]", "a = MatMul(x, w) y = Add(a, p)"),
    "bias of a transposed weight": (
        "float[N, 2] x",
        "w[1, 2] p[1]",
        "v = Transpose<perm = [1, 0]>(w) a = MatMul(x, v) y = Add(p, a)",
    ),
    "bias of Gemm": ("float[N, 2] x", "w[1, 2] p[1]", "y = Gemm<transB = 1>(x, w, p)"),
    "bias of Conv": ("float[N, 2, 3, 3] x", "w[1, 2, 1, 1] p[1]", "y = Conv(x, w, p)"),
    "bias behind Conv": ("float[N, 2, 3, 3] x", "w[1, 2, 1, 1] p[1, 1, 1, 1]", "a = Conv(x, w) y = Add(a, p)"),
    "slope": ("float[N, 2] x", "w[2, 2] p[1]", "a = MatMul(x, w) y = PRelu(a, p)"),
    "scale of a normalisation": (
        "float[N, 1, 3] x",
        "w[1, 1, 1] p[1] b[1]",
        "a = Conv(x, w) y = InstanceNormalization(a, p, b)",
    ),
    "scale of a group": (
        "float[N, 1, 3] x",
        "s[1] b[1] p[1, 1]",
        "a = InstanceNormalization(x, s, b) m = Mul(a, p) y = Add(m, p)",
    ),
}


@pytest.mark.parametrize("name", ONE_ELEMENT)
def test_parameters_of_one_element_train_where_an_operator_has_a_place_for_them(name: str) -> None:
    inputs, stored, body = ONE_ELEMENT[name]
    model = onnx.parser.parse_model(f"{HEAD} g ({inputs}) => (float[] y) {{ {body} }}")
    rng = np.random.default_rng(0)
    for one, sizes in re.findall(r"(\w+)\[([\d, ]+)\]", stored):
        array = rng.standard_normal([int(size) for size in sizes.split(",")]).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, one))
    model = onnx.shape_inference.infer_shapes(model)
    assert "p" in quietly(model).parameters


def test_what_constant_folding_has_left_does_not_train(tmp_path: Path) -> None:
    """onnxruntime folds the scale and the mask of attention into initializers."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.q, self.k = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(self.q(x), self.k(x), x, is_causal=True)

    x = torch.randn(2, 5, 6)
    by_torchscript(Masked(), x, tmp_path / "plain.onnx", opset_version=17)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(tmp_path / "folded.onnx")
    onnxruntime.InferenceSession(str(tmp_path / "plain.onnx"), options, providers=["CPUExecutionProvider"])
    step = quietly(tmp_path / "folded.onnx")
    assert sorted(array.shape for array in step.parameters.values()) == [(6,), (6,), (6, 6), (6, 6)]


XS, YS = np.meshgrid(np.arange(8.0) + 0.5, np.arange(8.0) + 0.5)
TABLES = {
    "a grid": np.stack([XS.ravel(), YS.ravel()], 1)[:32].reshape(8, 8),
    "strides": np.repeat([8.0, 16.0, 32.0, 64.0], 16).reshape(8, 8),
    "a mask of the least number": np.where(np.tri(8), 0, np.finfo(np.float32).min),
    "a mask of infinities": np.where(np.tri(8), 0, -np.inf),
    "a mask of windows": np.where(np.tri(8), 0, -100),
    "positions": np.tile(np.arange(8.0), (8, 1)),
    "frequencies": np.tile(10000 ** (-np.arange(8) / 8), (8, 1)),
    "waves": np.sin(np.arange(8)[:, None] * 10000 ** (-np.arange(8) / 8)),
}


@pytest.mark.parametrize("function", ["Sigmoid", "Identity"])
@pytest.mark.parametrize("name", TABLES)
def test_tables_and_masks_do_not_train(name: str, function: str) -> None:
    """Not even where they are added to a product, as biases are."""
    model = onnx.parser.parse_model(
        HEAD
        + "g (float[8, 8] x) => (float[8, 8] y) <float[8, 8] w> "
        + f"{{ a = MatMul(x, w) s = {function}(a) y = Add(s, t) }}"
    )
    weight = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    model.graph.initializer.extend(
        [onnx.numpy_helper.from_array(weight, "w"), onnx.numpy_helper.from_array(TABLES[name].astype(np.float32), "t")]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert build_training_step(model, "mse").parameters.keys() == {"w"}
    # Learned positions are no formula.
    model.graph.initializer[1].CopyFrom(onnx.numpy_helper.from_array(weight, "t"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert build_training_step(model, "mse").parameters.keys() == {"w", "t"}


def test_a_mean_and_a_deviation_of_the_data_stay_and_are_told_of() -> None:
    model = onnx.parser.parse_model(
        HEAD + "g (float[N, 2] x) => (float[N, 2] y) <float[2] mean = {1, 3}, float[2] std = {2, 5}, "
        "float[2, 2] w = {1, 2, 3, 4}> { c = Sub(x, mean) d = Div(c, std) y = MatMul(d, w) }"
    )
    with pytest.warns(UserWarning, match="'mean', 'std' stay as they are"):
        assert build_training_step(model, "mse").parameters.keys() == {"w"}
    assert "mean" in quietly(model, trainable=["w", "mean"]).parameters


IN_CONSTANTS = {
    "plain": "w = Constant<value: tensor = float[2, 2] {1, 2, 3, 4}>() y = MatMul(x, w)",
    "identity": "w = Constant<value: tensor = float[2, 2] {1, 2, 3, 4}>() v = Identity(w) y = MatMul(x, v)",
    # Numbers of 16 bits are written as integers: 1, 2, 3 and 4.
    "cast": "w = Constant<value: tensor = float16[2, 2] {15360, 16384, 16896, 17408}>() "
    "v = Cast<to = 1>(w) y = MatMul(x, v)",
    "numbers": "v = Constant<value_floats = [1.0, 2.0, 3.0, 4.0]>() s = Constant<value_ints = [2, 2]>() "
    "w = Reshape(v, s) y = MatMul(x, w)",
}


@pytest.mark.parametrize("where", IN_CONSTANTS)
def test_weights_in_constant_nodes_train_under_the_names_of_their_outputs(where: str) -> None:
    model = onnx.parser.parse_model(HEAD + f"g (float[N, 2] x) => (float[N, 2] y) {{ {IN_CONSTANTS[where]} }}")
    name = "v" if where == "numbers" else "w"
    assert quietly(model, trainable=[name]).parameters.keys() == {name}
    step = quietly(model)
    assert step.parameters.keys() == {name}
    session = TrainingSession(step)
    x = np.array([[1, 2], [0.5, -1], [3, 0]], np.float32)
    session.step(x, np.zeros((3, 2), np.float32))
    weight = torch.tensor([[1.0, 2], [3, 4]], dtype=torch.float64, requires_grad=True)
    (torch.tensor(x, dtype=torch.float64) @ weight).square().mean().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    exact = weight.grad.numpy().reshape(step.parameters[name].shape)
    dtype = step.parameters[name].dtype
    assert_gradients_close(session.gradients[name], exact.astype(dtype), exact, dtype, terms=20)
    assert np.array_equal(session.evaluate(x), x @ np.array([[1, 2], [3, 4]], np.float32))


def test_weights_of_branches_train_where_their_branch_is_taken() -> None:
    """Two branches use one name, and one gives a weight to what is behind."""
    model = onnx.parser.parse_model(
        HEAD + "g (float[N, 2] x, bool c) => (float[N, 2] y) { v = If(c)<"
        "then_branch = t () => (float[N, 2] a) { w = Constant<value: tensor = float[2, 2] {1, 2, 3, 4}>() "
        "e = Constant<value: tensor = float {0.00001}>() b = MatMul(x, w) a = Add(b, e) }, "
        "else_branch = o () => (float[N, 2] d) { w = Constant<value: tensor = float[2, 2] {1, 2, 3, 5}>() "
        "d = MatMul(x, w) }> "
        "k = If(c)<"
        "then_branch = s () => (float[2, 2] k1) { k1 = Constant<value: tensor = float[2, 2] {1, 0, 0, 1}>() }, "
        "else_branch = r () => (float[2, 2] k2) { k2 = Constant<value: tensor = float[2, 2] {2, 0, 0, 2}>() }> "
        "y = MatMul(v, k) }"
    )
    step = quietly(model, optimizer=optimizers.SGD(lr=0.01))
    onnx.checker.check_model(step.model)
    assert step.evaluation_model is not None
    onnx.checker.check_model(step.evaluation_model)
    assert step.parameters.keys() == {"w", "w_2", "k1", "k2"}
    session = TrainingSession(step)
    for taken, moved in ((True, {"w", "k1"}), (False, {"w_2", "k2"})):
        before = session.state_dict()
        session.step({"x": np.ones((2, 2), np.float32), "c": np.array(taken)}, np.zeros((2, 2), np.float32))
        after = session.state_dict()
        assert {name for name in before if (before[name] != after[name]).any()} == moved


COPIED = (
    HEAD
    + "g (float[N, 3] x) => (float[N, 3] y) <float[3, 2] w = {1, 2, 3, 4, 5, 7}, float[2, 3] v = {1, 3, 5, 2, 4, 7}> "
    "{ a = MatMul(x, w) b = Tanh(a) y = MatMul(b, v) }"
)


def test_copies_of_a_weight_are_warned_of_and_tied() -> None:
    model = onnx.parser.parse_model(COPIED)
    with pytest.warns(UserWarning, match=r"'v' has the values of 'w'.*tie=\{'v': 'w'\}"):
        assert build_training_step(model, "mse").parameters.keys() == {"w", "v"}
    step = quietly(model, tie={"v": "w"})
    assert step.parameters.keys() == {"w"}
    session = TrainingSession(step)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(3))
    session.step(x.numpy(), np.zeros((4, 3), np.float32))

    def by_torch(dtype: torch.dtype) -> Any:
        w = torch.tensor([[1.0, 2], [3, 4], [5, 7]], dtype=dtype, requires_grad=True)
        ((x.to(dtype) @ w).tanh() @ w.T).square().mean().backward()  # type: ignore[no-untyped-call]
        assert w.grad is not None
        return w.grad.numpy()

    native, exact = by_torch(torch.float32), by_torch(torch.float64)
    assert_gradients_close(session.gradients["w"], native, exact, np.float32, terms=16 * np.abs(exact).max())


@pytest.mark.parametrize(
    "pairs, message",
    [
        ({"v": "q"}, "tie has 'q', which is no stored tensor of floats"),
        ({"v": "v"}, "tie has 'v', which is tied to itself"),
        ({"v": "w", "w": "v"}, "tie has 'v', which is tied to itself"),
        ({"u": "w"}, r"tie has 'u' and 'w', which are \[2\] and \[3, 2\]; expected equal tensors"),
    ],
)
def test_what_cannot_be_tied_is_refused(pairs: dict[str, str], message: str) -> None:
    model = onnx.parser.parse_model(COPIED)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(2, np.float32), "u"))
    with pytest.raises(ArgumentError, match=message):
        build_training_step(model, "mse", tie=pairs)


def test_one_bias_that_is_cut_is_no_alarm() -> None:
    model = onnx.parser.parse_model(
        HEAD + "g (float[N, 2] x) => (float[N, 2] y) <float[2, 4] w = {1, 2, 3, 4, 5, 7, 8, 9}, "
        "float[4] b = {0, 0, 0, 0}, float[4] c = {1, 2, 3, 5}, "
        "int64[1] i0 = {0}, int64[1] i2 = {2}, int64[1] i4 = {4}> "
        "{ h = MatMul(x, w) p, q = Split<num_outputs = 2, axis = 1>(h) b1 = Slice(b, i0, i2) b2 = Slice(b, i2, i4) "
        "c1, c2 = Split<num_outputs = 2>(c) a = Add(p, b1) d = Add(q, b2) e = Mul(a, c1) f = Mul(d, c2) y = Add(e, f) }"
    )
    assert quietly(model).parameters.keys() == {"w", "b", "c"}


def test_numbers_that_a_module_may_train_are_told_of() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear, self.gate = nn.Linear(6, 6), nn.Parameter(torch.full((1,), 0.5))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.gate * F.gelu(self.linear(x), approximate="tanh")

    program = torch.onnx.export(Gated().eval(), (X,), dynamo=True, optimize=False, verbose=False)
    assert program is not None
    with pytest.warns(UserWarning, match="'gate' stay as they are") as caught:
        step = build_training_step(program.model_proto, "mse")
    assert step.parameters.keys() == {"linear.weight", "linear.bias"} and len(caught) == 1
    names = ["linear.*", "gate"]
    require_torchs(quietly(program.model_proto, trainable=names), Gated, X, {})


def test_a_parameter_behind_the_weights_of_classes_trains() -> None:
    model = onnx.parser.parse_model(
        HEAD + "g (float[N, 3] x, int64[N] t) => (float y) <float[3, 3] m = {1, 0, 0, 0, 1, 0, 0, 0, 1}, "
        "float[3] lw = {0.1, 0.2, 0.3}, float[3] fixed = {1, 2, 3}> "
        "{ h = MatMul(x, m) w = Exp(lw) a = SoftmaxCrossEntropyLoss(h, t, w) b = SoftmaxCrossEntropyLoss(h, t, fixed) "
        "y = Add(a, b) }"
    )
    step = quietly(model, None)
    assert step.parameters.keys() == {"m", "lw"}
    session = TrainingSession(step)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(5))
    labels = torch.tensor([0, 1, 2, 1])
    session.step({"x": x.numpy(), "t": labels.numpy()}, ())

    def gradient(dtype: torch.dtype) -> Any:
        lw = torch.tensor([0.1, 0.2, 0.3], dtype=dtype, requires_grad=True)
        rows = F.cross_entropy(x.to(dtype), labels, reduction="none")
        weights = lw.exp()[labels]
        ((rows * weights).sum() / weights.sum()).backward()  # type: ignore[no-untyped-call]
        assert lw.grad is not None
        return lw.grad.numpy()

    native, exact = gradient(torch.float32), gradient(torch.float64)
    assert_gradients_close(session.gradients["lw"], native, exact, np.float32, terms=16)


def test_all_problems_of_a_model_are_in_one_message() -> None:
    head = HEAD.replace("18]", '18, "own": 1]')
    model = onnx.parser.parse_model(
        head + "g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}, float[2, 2] v = {1, 2, 3, 5}> "
        "{ a = MatMul(x, w) b = own.Foo(a) c = MatMul(b, v) d = Unique(c) e = own.Bar(d) y = Identity(e) }"
    )
    with pytest.raises(ModelError, match=r"own::Bar .*no gradient rule.* Without a gradient too: Unique .*own::Foo"):
        build_training_step(model, "mse")
    with pytest.raises(ArgumentError, match=r"trainable has 'p', .*trainable has 'q', .*frozen has 'r', which matches"):
        build_training_step(model, "mse", trainable=["p", "q"], frozen=["r"])
    many = [f"p{k}" for k in range(200)]
    with pytest.raises(ArgumentError, match="'p4', which matches nothing and 195 more; expected float initializers"):
        build_training_step(model, "mse", trainable=many)


@pytest.mark.parametrize("op", ["Add", "Mul"])
def test_one_tensor_of_many_layers_is_divided_in_linear_time(op: str) -> None:
    layers = 150
    nodes, initializers, h = [], [], "x"
    rng = np.random.default_rng(0)
    for k in range(layers):
        weight = rng.standard_normal((2, 2)).astype(np.float32)
        initializers.append(onnx.numpy_helper.from_array(weight, f"w{k}"))
        nodes.append(onnx.helper.make_node("MatMul", [h, f"w{k}"], [f"m{k}"]))
        nodes.append(onnx.helper.make_node(op, [f"m{k}", "b"], [f"a{k}"]))
        nodes.append(onnx.helper.make_node("Tanh", [f"a{k}"], [f"h{k}"]))
        h = f"h{k}"
    initializers.append(onnx.numpy_helper.from_array(np.ones(2, np.float32), "b"))
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", 2]) for name in ("x", h)]
    graph = onnx.helper.make_graph(nodes, "g", values[:1], values[1:], initializers)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    step = quietly(model, fuse=False)
    assert {"b", *(f"b_{k}" for k in range(2, layers + 1))} <= step.parameters.keys()


def test_scales_of_blocks_that_would_train_are_named() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[n, 4] x) => (float[n, 3] y)'
        "<int8[4, 3] q = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, float[2, 3] s = {0.5, 0.3, 0.7, 0.2, 0.9, 0.4},"
        " float[2, 3] r = {0.1, 0.8, 0.6, 0.35, 0.15, 0.45}, float[3] b = {0.1, 0.2, 0.4}>"
        "{ v = DequantizeLinear<axis = 0, block_size = 2>(q, s) w = DequantizeLinear<axis = 0, block_size = 2>(q, r)"
        " h = MatMul(x, v) k = MatMul(x, w) z = Sub(h, k) y = Add(z, b) }"
    )
    with pytest.raises(ModelError, match=re.escape("scales are parameters; expected frozen=['s', 'r']")) as error:
        build_training_step(model, "mse", trainable=["*"])
    assert "\n" not in str(error.value)
    step = build_training_step(model, "mse", frozen=["s", "r"])
    x = np.ones((2, 4), np.float32)
    (y,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    assert list(step.parameters) == ["b"] and TrainingSession(step).step(x, y) < 1e-10


def test_a_pattern_selects_what_the_loss_depends_on() -> None:
    """Models of several outputs have weights that one loss does not depend on; what a name stands for, it must."""
    model = onnx.parser.parse_model(
        HEAD + "g (float[N, 2] x) => (float[N, 2] y, float[N, 2] z) <float[2, 2] head_y = {1, 2, 3, 4}, "
        "float[2, 2] head_z = {1, 2, 3, 5}> { y = MatMul(x, head_y) z = MatMul(x, head_z) }"
    )
    assert list(quietly(model, trainable="head_*").parameters) == ["head_y"]
    assert list(quietly(model, trainable=["head_?", "head_y"]).parameters) == ["head_y"]
    for names in (["head_z", "head_y"], ["*_z", "*_y"]):
        with pytest.raises(ArgumentError, match="the loss does not depend on 'head_z'; expected what it depends on"):
            build_training_step(model, "mse", trainable=names)
    for argument in ("trainable", "frozen"):
        with pytest.raises(ArgumentError, match=f"{argument} is 3; expected names or patterns"):
            build_training_step(model, "mse", **{argument: 3})  # type: ignore[arg-type]


BYTES = "int8[4, 3] q = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, float[3] s = {0.5, 0.3, 0.7}, int8[3] z = {0, 0, 0}"


@pytest.mark.parametrize(
    "body",
    [
        "b = com.microsoft.DequantizeLinear <axis = 1> (q, s, z) h = MatMul(x, b)",
        "h = com.microsoft.DynamicQuantizeMatMul(x, q, s)",
        "c, t, n = DynamicQuantizeLinear(x) h = com.microsoft.MatMulIntegerToFloat(c, q, t, s, n)",
        "c = com.microsoft.QuantizeLinear(x, p, o) b = com.microsoft.DequantizeLinear(c, p, o) h = MatMul(b, v)",
    ],
)
def test_heads_train_behind_layers_that_onnxruntime_has_quantised(body: str) -> None:
    """ONNX infers no shapes of its operators, and their scales have no gradient."""
    declared = f"{BYTES}, float p = {{0.05}}, uint8 o = {{100}}, float[4, 3] v = {{{', '.join('123456789123')}}}"
    text = f"""<ir_version: 9, opset_import: ["": 18, "com.microsoft": 1]> g (float[N, 4] x) => (float[N, 2] y, h)
        <{declared}, float[3, 2] w = {{1, 2, 3, 4, 5, 7}}> {{ {body} y = MatMul(h, w) }}"""
    model = onnx.parser.parse_model(text)
    model.graph.output[1].CopyFrom(onnx.helper.make_tensor_value_info("h", onnx.TensorProto.FLOAT, None))
    frozen = ["v"] if "v)" in body else None
    x = X[:, :4].numpy()
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    y, h = onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})
    step = quietly(model, frozen=frozen)
    session = TrainingSession(step)
    assert list(step.parameters) == ["w"]
    np.testing.assert_allclose(session.step(x, np.zeros_like(y)), np.square(y, dtype=np.float64).mean(), rtol=1e-5)
    np.testing.assert_allclose(session.gradients["w"], h.T.astype(np.float64) @ y * 2 / y.size, rtol=1e-5)


def test_scales_of_a_quantised_embedding_stay() -> None:
    """As models of int4 begin that onnxruntime-genai writes."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
        g (int64[N] ids) => (float[N, 2] y, float[N, 16] h) <float[3, 1] s = {0.5, 0.25, 0.75}> {
            h = com.microsoft.GatherBlockQuantized <block_size = 16, quantize_axis = 1, gather_axis = 0> (q, ids, s)
            y = MatMul(h, w)
        }"""
    )
    model.graph.initializer.append(onnx.helper.make_tensor("q", onnx.TensorProto.UINT4, [3, 16], [*range(16)] * 3))
    weight = np.arange(32, dtype=np.float32).reshape(16, 2) / 32
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    ids = np.array([2, 0, 2])
    y, h = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"ids": ids})
    session = TrainingSession(quietly(model))
    session.step(ids, np.zeros_like(y))
    assert session.gradients.keys() == {"w"}
    np.testing.assert_allclose(session.gradients["w"], h.T.astype(np.float64) @ y * 2 / y.size, rtol=1e-5)

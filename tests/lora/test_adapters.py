"""Low-rank adapters: gradients against torch, serving by onnxruntime's LoraAdapter, files for PEFT, and bad input."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import safetensors.numpy
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from quantised import Array, Infos, model_of, quantised

import gradfuse
from gradfuse import ArgumentError, GradfuseError, TrainingSession, add_lora, add_lora_inputs, build_training_step
from gradfuse.optimizers import SGD, AdamW
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("inference_in_process")

IN, OUT, RANK, ALPHA = 20, 6, 3, 12
ADAPTERS = ["*.lora_*"]


@dataclasses.dataclass(frozen=True)
class Base:
    """A model with one product with a weight.

    Attributes:
        model: x (N, IN), or (IN, N), to y (N, OUT).
        weight: the value (OUT, IN) of its weight in float64.
        factor: what the product is multiplied by.
        transposed: whether x is (IN, N).
    """

    model: onnx.ModelProto
    weight: Array
    factor: float = 1.0
    transposed: bool = False

    def rows(self, x: Array) -> Array:
        return x.T if self.transposed else x


def _weight(dtype: Any = np.float32) -> Array:
    return np.random.default_rng(5).standard_normal((OUT, IN)).astype(dtype)


def _base(nodes: list[onnx.NodeProto], tensors: dict[str, Array], dtype: Any = np.float32) -> onnx.ModelProto:
    x: Infos = {"x": (dtype, ["N", IN])}
    y: Infos = {"y": (dtype, ["N", OUT])}
    return model_of(nodes, x, y, [numpy_helper.from_array(array, name) for name, array in tensors.items()])


def _matmul(dtype: Any = np.float32) -> Base:
    node = helper.make_node("MatMul", ["x", "fc.weight"], ["y"], name="product")
    return Base(_base([node], {"fc.weight": _weight(dtype).T}, dtype), _weight(dtype).astype(float))


def _behind_transpose() -> Base:
    nodes = [
        helper.make_node("Transpose", ["fc.weight"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "t"], ["y"], name="product"),
    ]
    return Base(_base(nodes, {"fc.weight": _weight()}), _weight().astype(float))


def _gemm() -> Base:
    node = helper.make_node("Gemm", ["x", "fc.weight", "b"], ["y"], name="product", transB=1)
    return Base(_base([node], {"fc.weight": _weight(), "b": np.zeros(OUT, np.float32)}), _weight().astype(float))


def _gemm_with_all() -> Base:
    node = helper.make_node("Gemm", ["x", "fc.weight", "b"], ["y"], name="product", transA=1, alpha=0.5, beta=2.0)
    model = _base([node], {"fc.weight": _weight().T, "b": np.zeros(OUT, np.float32)})
    dims = model.graph.input[0].type.tensor_type.shape.dim
    dims[0].dim_value, dims[1].dim_param = IN, "N"
    return Base(model, _weight().astype(float), 0.5, True)


def _int8(dtype: Any = np.float32) -> Base:
    stored = np.random.default_rng(5).integers(-128, 128, (OUT, IN)).astype(np.int8)
    scales = np.random.default_rng(6).uniform(0.001, 0.01, OUT).astype(dtype)
    cast = [] if dtype == np.float32 else [helper.make_node("Cast", ["scales"], ["wide"], to=TensorProto.FLOAT)]
    nodes = [
        *cast,
        helper.make_node("DequantizeLinear", ["fc.weight", "wide" if cast else "scales"], ["w"], axis=0),
        helper.make_node("Transpose", ["w"], ["t"]),
        helper.make_node("MatMul", ["x", "t"], ["y"], name="product"),
    ]
    model = _base(nodes, {"fc.weight": stored, "scales": scales})
    return Base(model, stored * scales.astype(float)[:, None])


def _int4(bits: int = 4) -> Base:
    weight = quantised(OUT, IN, bits, zero_points="packed", name="fc.weight")
    return Base(_base([weight.node("x", "y")], weight.inputs), weight.weight)


BASES: dict[str, Callable[[], Base]] = {
    "MatMul": _matmul,
    "MatMul in float64": lambda: _matmul(np.float64),
    "MatMul in float16": lambda: _matmul(np.float16),
    "behind Transpose": _behind_transpose,
    "Gemm": _gemm,
    "Gemm with all": _gemm_with_all,
    "behind DequantizeLinear": _int8,
    "behind DequantizeLinear by float16": lambda: _int8(np.float16),
    "MatMulNBits": _int4,
    "MatMulNBits of 8 bits": lambda: _int4(8),
}


def session_of(model: onnx.ModelProto) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def batch(base: Base, rows: int = 7) -> tuple[Array, Array]:
    """Inputs and targets in the model's type."""
    rng = np.random.default_rng(3)
    dtype = helper.tensor_dtype_to_np_dtype(base.model.graph.input[0].type.tensor_type.elem_type)
    x, target = rng.standard_normal((rows, IN)).astype(dtype), rng.standard_normal((rows, OUT)).astype(dtype)
    return np.ascontiguousarray(base.rows(x)), target


def with_b(session: TrainingSession) -> dict[str, Array]:
    """Set B to numbers, as its 0 leaves A without a gradient; return A and B."""
    state = session.state_dict()
    b = np.random.default_rng(4).standard_normal((OUT, RANK)).astype(state["fc.lora_B.weight"].dtype)
    session.load_state_dict({"fc.lora_B.weight": b}, strict=False)
    return {"A": state["fc.lora_A.weight"], "B": b}


@pytest.mark.parametrize("name", BASES)
def test_gradients_are_those_of_torch_and_the_base_stays_frozen(name: str) -> None:
    base = BASES[name]()
    model = add_lora(base.model, "fc", RANK, ALPHA)
    onnx.checker.check_model(model)
    x, target = batch(base)
    assert np.array_equal(session_of(model).run(None, {"x": x})[0], session_of(base.model).run(None, {"x": x})[0])
    step = build_training_step(model, "mse", trainable=ADAPTERS)
    assert {name: array.shape for name, array in step.parameters.items()} == {
        "fc.lora_A.weight": (RANK, IN),
        "fc.lora_B.weight": (OUT, RANK),
    }
    session = TrainingSession(step)
    given = with_b(session)
    loss = session.step(x, target)

    def by_torch(dtype: torch.dtype) -> tuple[float, dict[str, Array]]:
        wide = torch.promote_types(dtype, torch.float32)
        a, b = (torch.tensor(given[key]).to(wide).requires_grad_() for key in "AB")
        rows, weight = torch.tensor(base.rows(x)).to(dtype), torch.tensor(base.weight).to(dtype)
        # As in PEFT, adapters of a base in float16 compute in float32.
        added = ALPHA / RANK * F.linear(F.linear(rows.to(a.dtype), a), b)
        y = base.factor * (F.linear(rows, weight) + added.to(rows.dtype))
        result = F.mse_loss(y, torch.tensor(target).to(dtype))
        result.backward()  # type: ignore[no-untyped-call]
        assert a.grad is not None and b.grad is not None
        return result.item(), {"A": a.grad.numpy(), "B": b.grad.numpy()}

    arithmetic = torch.float16 if x.dtype == np.float16 else torch.float32
    (native_loss, native), (exact_loss, exact) = by_torch(arithmetic), by_torch(torch.float64)
    eps = float(np.finfo(x.dtype).eps)
    assert abs(loss - exact_loss) <= 2 * abs(native_loss - exact_loss) + 8 * eps * abs(exact_loss)
    for key, gradient in session.gradients.items():
        letter = key[len("fc.lora_")]
        largest = float(np.abs(exact[letter]).max())
        # What passes through float16 is rounded to it.
        terms = 32 * largest * max(1.0, eps / float(np.finfo(gradient.dtype).eps))
        of_ours = native[letter].astype(gradient.dtype)
        assert_gradients_close(gradient, of_ours, exact[letter], gradient.dtype, terms=terms)


@pytest.mark.parametrize("name", BASES)
def test_stock_onnxruntime_serves_what_was_trained(name: str, tmp_path: Path) -> None:
    base = BASES[name]()
    session = TrainingSession(
        build_training_step(add_lora(base.model, "fc", RANK, ALPHA), "mse", trainable=ADAPTERS, optimizer=AdamW(lr=0.1))
    )
    x, target = batch(base)
    losses = [session.step(x, target) for _ in range(3)]
    assert losses[2] < losses[0]
    gradfuse.save_adapter(session, tmp_path / "trained.onnx_adapter")

    served = session_of(add_lora_inputs(base.model, "fc"))
    adapter, options = onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
    adapter.Load(str(tmp_path / "trained.onnx_adapter"))
    options.add_active_adapter(adapter)
    trained = session.evaluate(x)
    before = session_of(base.model).run(None, {"x": x})[0]
    for rows in (x, x[:, :1] if base.transposed else x[:1]):
        (active,) = served.run(None, {"x": rows}, options)
        count = rows.shape[1 if base.transposed else 0]
        exact = trained[:count].astype(float)
        # What is compared has the roundings of two products of IN terms.
        assert_gradients_close(active, trained[:count], exact, x.dtype, terms=IN * np.abs(exact).max())
        assert np.array_equal(served.run(None, {"x": x})[0], before)
    assert np.abs(trained - before).max() > 0.01


def test_adapters_of_other_ranks_serve_one_model(tmp_path: Path) -> None:
    base = _int4()
    served, (x, target) = session_of(add_lora_inputs(base.model, "fc")), batch(base)
    for rank in (1, 9, 64):
        model = add_lora(base.model, ["fc.weight_Q4"], rank, 1, seed=rank)
        session = TrainingSession(build_training_step(model, "mse", trainable=ADAPTERS, optimizer=SGD(lr=1.0)))
        session.step(x, target)
        gradfuse.save_adapter(session, tmp_path / "adapter.onnx_adapter")
        adapter, options = onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
        adapter.Load(str(tmp_path / "adapter.onnx_adapter"))
        options.add_active_adapter(adapter)
        (active,), trained = served.run(None, {"x": x}, options), session.evaluate(x)
        exact = trained.astype(float)
        assert_gradients_close(active, trained, exact, np.float32, terms=IN * np.abs(exact).max())


def test_files_of_peft_hold_names_shapes_and_settings(tmp_path: Path) -> None:
    """Two layers whose ranks differ; the first one's name ends like the second one's."""
    weights = {f"{name}.weight": _weight() for name in ("block.fc", "fc")}
    nodes = [
        helper.make_node("Gemm", ["x", "block.fc.weight"], ["h"], transB=1),
        helper.make_node("Gemm", ["h", "fc.weight"], ["y"]),
    ]
    model = _base(nodes, weights)
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = IN
    model = add_lora(add_lora(model, "block.fc", 2, 5), "fc.weight", 4, 6.5, seed=1)
    step = build_training_step(model, "mse", trainable=ADAPTERS, optimizer=SGD(lr=0.1))
    step.save(tmp_path / "step.onnx")
    session = TrainingSession(tmp_path / "step.onnx")
    session.step(np.ones((3, IN), np.float32), np.zeros((3, IN), np.float32))
    gradfuse.save_adapter(session, tmp_path / "peft")
    tensors = safetensors.numpy.load_file(tmp_path / "peft" / "adapter_model.safetensors")
    state = session.state_dict()
    assert {name: array.shape for name, array in tensors.items()} == {
        "base_model.model.block.fc.lora_A.weight": (2, IN),
        "base_model.model.block.fc.lora_B.weight": (OUT, 2),
        "base_model.model.fc.lora_A.weight": (4, OUT),
        "base_model.model.fc.lora_B.weight": (IN, 4),
    }
    for name, array in tensors.items():
        assert np.array_equal(array, state[name.removeprefix("base_model.model.")])
        assert array.any()
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["target_modules"] == ["block.fc", "fc"]

    def setting(default: str, pattern: str, module: str) -> float:
        # As peft.utils.other.get_pattern_key
        found = [value for key, value in config[pattern].items() if re.match(rf"(.*\.)?({key})$", module)]
        return float(found[0] if found else config[default])

    assert [setting("r", "rank_pattern", module) for module in ("block.fc", "fc")] == [2, 4]
    assert [setting("lora_alpha", "alpha_pattern", module) for module in ("block.fc", "fc")] == [5, 6.5]


def test_names_for_peft_begin_at_the_module_that_a_wrapper_has(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Gemm", ["x", "net.fc.weight"], ["h"], transB=1),
        helper.make_node("Gemm", ["h", "net.out.weight"], ["y"]),
    ]
    model = _base(nodes, {"net.fc.weight": _weight(), "net.out.weight": _weight()[:, :OUT]})
    step = build_training_step(add_lora(model, "*", 2, 4), "mse", trainable=ADAPTERS)
    gradfuse.save_adapter(step, tmp_path, within="net")
    tensors = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    assert "base_model.model.fc.lora_A.weight" in tensors and "base_model.model.out.lora_B.weight" in tensors
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == ["fc", "out"]
    with pytest.raises(ArgumentError, match=r"within is 'net.fc', and 'net.fc' is not; expected a module with all"):
        gradfuse.save_adapter(step, tmp_path, within="net.fc")
    with pytest.raises(ArgumentError, match=r"within is 'net'; expected None"):
        gradfuse.save_adapter(step, tmp_path / "a.onnx_adapter", within="net")


def test_initial_values_are_those_of_peft() -> None:
    """A is within the bound of kaiming_uniform_ with a = sqrt(5), follows its seed, and fills the range."""
    model = _base([helper.make_node("MatMul", ["x", "fc.weight"], ["y"])], {"fc.weight": _weight().T})

    def of(seed: int) -> Array:
        tensors = {tensor.name: tensor for tensor in add_lora(model, "fc", 200, seed=seed).graph.initializer}
        assert not numpy_helper.to_array(tensors["fc.lora_B.weight"]).any()
        return numpy_helper.to_array(tensors["fc.lora_A.weight"])

    first, bound = of(0), 1 / np.sqrt(IN)
    by_torch = torch.empty(200, IN)
    torch.nn.init.kaiming_uniform_(by_torch, a=5**0.5)
    assert float(by_torch.abs().max()) <= bound and 0.99 * bound < np.abs(first).max() <= bound
    assert np.array_equal(first, of(0)) and not np.array_equal(first, of(1))


def test_the_example_of_the_page_serves_what_it_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "lora.md").read_text(encoding="utf-8")
    example, continued, _ = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(example, names)
    trained = names["session"].evaluate(names["x"])
    assert_gradients_close(names["with_adapter"], trained, trained.astype(float), np.float32, terms=8)
    assert np.array_equal(names["without"], names["x"][:, :3])
    assert (tmp_path / "peft_adapter" / "adapter_config.json").is_file()
    state = names["session"].state_dict()
    exec(continued, names)
    loaded = names["session"].state_dict()
    assert any("lora" in name for name in loaded)
    assert all(np.array_equal(array, loaded[name]) for name, array in state.items() if "lora" in name)


SHARED = """<ir_version: 10, opset_import: ["": 18]>
net (float[N, 4] x) => (float[N, 4] y) <float[4, 4] "tied.weight", float[4, 4] "other.weight"> {
    [first] a = MatMul(x, "tied.weight")
    b = Tanh(a)
    [second] c = %s
    d = MatMul(c, "other.weight")
    y = Identity(d)
}"""


def shared(second: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(SHARED % second)
    rng = np.random.default_rng(0)
    del model.graph.initializer[:]
    for name in ("tied.weight", "other.weight"):
        array = rng.standard_normal((4, 4)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def test_a_weight_that_two_nodes_read_has_one_adapter() -> None:
    model = shared('MatMul(b, "tied.weight")')
    step = build_training_step(add_lora(model, "tied", 2, 2), "mse", trainable=ADAPTERS)
    assert list(step.parameters) == ["tied.lora_A.weight", "tied.lora_B.weight"]
    session, rng = TrainingSession(step), np.random.default_rng(1)
    b = rng.standard_normal((4, 2)).astype(np.float32)
    session.load_state_dict({"tied.lora_B.weight": b}, strict=False)
    x, target = (rng.standard_normal((5, 4)).astype(np.float32) for _ in range(2))
    session.step(x, target)
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}

    def by_torch(dtype: torch.dtype) -> Array:
        a = torch.tensor(step.parameters["tied.lora_A.weight"]).to(dtype).requires_grad_()
        tied, other = (torch.tensor(weights[name]).to(dtype) for name in ("tied.weight", "other.weight"))
        merged = tied + (torch.tensor(b).to(dtype) @ a).T
        result = F.mse_loss(
            (torch.tensor(x).to(dtype) @ merged).tanh() @ merged @ other, torch.tensor(target).to(dtype)
        )
        result.backward()  # type: ignore[no-untyped-call]
        assert a.grad is not None
        return a.grad.numpy()

    native, exact = by_torch(torch.float32), by_torch(torch.float64)
    found = session.gradients["tied.lora_A.weight"]
    assert_gradients_close(found, native, exact, np.float32, terms=32 * np.abs(exact).max())


def test_one_of_two_nodes_is_chosen_by_its_name() -> None:
    model = add_lora(shared('MatMul(b, "tied.weight")'), "second", 2)
    sums = [node.input[0] for node in model.graph.node if node.op_type == "Add"]
    assert sums == ["c.base"]


class Rows(torch.nn.Module):
    """Calls one layer for each row of an embedding, one after the other, and a head that may be the embedding's."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.cell = torch.nn.Embedding(9, IN), torch.nn.Linear(IN, IN)
        self.head = torch.nn.Linear(IN, 9)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids[:, 0])
        for index in range(3):
            h = torch.tanh(self.cell(h) + self.embed(ids[:, index]))
        return self.head(h)  # type: ignore[no-any-return]


def exported(module: torch.nn.Module, path: Path, *, dynamo: bool, **options: Any) -> onnx.ModelProto:
    ids = torch.arange(12).reshape(4, 3) % 9
    torch.onnx.export(module.eval(), (ids,), str(path), dynamo=dynamo, input_names=["ids"], **options)
    return onnx.load(path)


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_module_that_is_called_often_has_one_adapter_beside_each_call(dynamo: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Rows()
    model = add_lora(exported(module, tmp_path / "m.onnx", dynamo=dynamo), "cell", RANK, ALPHA)
    step = build_training_step(model, "mse", trainable=ADAPTERS, optimizer=SGD(lr=0.5))
    a, b = "cell.lora_A.weight", "cell.lora_B.weight"
    assert list(step.parameters) == [a, b]
    session = TrainingSession(step)
    left = torch.tensor(step.parameters[a]).double().requires_grad_()
    right = torch.zeros(IN, RANK, dtype=torch.double, requires_grad=True)
    optimizer = torch.optim.SGD([left, right], lr=0.5)
    module.double().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        ids = torch.randint(0, 9, (4, 3), generator=generator)
        targets = torch.randn(4, 9, generator=generator)
        delta = ALPHA / RANK * right @ left
        merged = {"cell.weight": module.cell.weight + delta}
        loss = F.mse_loss(torch.func.functional_call(module, merged, (ids,)), targets.double())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found = float(session.step(ids.numpy(), targets.numpy()))
        assert abs(found - loss.item()) <= 64 * np.finfo(np.float32).eps * loss.item()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_adapter_of_a_head_that_is_tied_to_an_embedding_is_the_head_s(tmp_path: Path) -> None:
    options = {"dynamo": False, "do_constant_folding": False}
    model = add_lora(exported(Rows(tied=True), tmp_path / "m.onnx", **options), "head", RANK)
    names = [tensor.name for tensor in model.graph.initializer if "lora" in tensor.name]
    assert names == ["head.lora_A.weight", "head.lora_B.weight"]


def test_modules_that_an_exporter_has_given_one_weight_are_told() -> None:
    first, second = (helper.make_node("MatMul", [value, "val_3"], [value + "y"]) for value in ("x", "z"))
    for node, layer in ((first, "layers.0"), (second, "layers.1")):
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=f"['', '{layer}', 'linear']")
    between = helper.make_node("MatMul", ["xy", "other"], ["z"])
    last = helper.make_node("Identity", ["zy"], ["y"])
    tensors = {"val_3": _weight().T, "other": np.ones((OUT, IN), np.float32)}
    model = _base([first, between, second, last], tensors)
    with pytest.warns(
        UserWarning, match=r"layers\.0, layers\.1 read one weight, 'val_3', and get one adapter, 'layers\.0'"
    ):
        add_lora(model, "layers.*", RANK)


@pytest.mark.parametrize(
    "scopes, node, weight, module",
    [
        ("", "", "layers.0.q_proj.weight", "layers.0.q_proj"),
        ("", "", "layers.0.q_proj.MatMul.weight_Q4", "layers.0.q_proj"),
        ("['', 'layers.0', 'layers.0.q', 'linear']", "node_linear", "val_3", "layers.0.q"),
        ("not a list", "/layers.0/q/MatMul", "onnx::MatMul_7", "layers.0.q"),
        ("", "/2/2.0/2.0.1/MatMul", "onnx::MatMul_7", "2.0.1"),
        ("", "/blocks/blocks.3/mlp/mlp.0/MatMul", "onnx::MatMul_7", "blocks.3.mlp.0"),
        ("", "MatMul_7", "val_3", "val_3"),
        ("", "", "layers[0].q[1].weight", "layers[0].q[1]"),
    ],
)
def test_modules_are_named_as_the_exporter_notes_them(scopes: str, node: str, weight: str, module: str) -> None:
    product = helper.make_node("MatMul", ["x", weight], ["y"], name=node)
    if scopes:
        product.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
    model = _base([product], {weight: _weight().T})
    initializers = [tensor.name for tensor in add_lora(model, module.rpartition(".")[2]).graph.initializer]
    assert initializers[1:] == [f"{module}.lora_A.weight", f"{module}.lora_B.weight"]
    renamed = add_lora(model, "*", modules={weight: "mine"}).graph.initializer[1].name
    assert renamed == "mine.lora_A.weight"


class Layers(torch.nn.Module):
    """Lists that are called, and lists of other modules with one name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(IN, IN, bias=False), torch.nn.Sequential(torch.nn.Linear(IN, IN))
        )
        self.blocks = torch.nn.Module()
        self.blocks.blocks = torch.nn.ModuleList([torch.nn.Linear(IN, IN)])
        self.blocks.forward = self.of_blocks

    def of_blocks(self, x: torch.Tensor) -> torch.Tensor:
        blocks: Any = self.blocks.blocks
        return blocks[0](x)  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.layers(self.layers(x)))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_of_lists_have_their_names_in_files_of_the_older_exporter(tmp_path: Path) -> None:
    module = Layers()
    # Products of three axes, and those without a bias, leave weights without names.
    torch.onnx.export(module.eval(), (torch.randn(2, 3, IN),), str(tmp_path / "m.onnx"), dynamo=False)
    names = [tensor.name for tensor in add_lora(tmp_path / "m.onnx", "*").graph.initializer]
    found = {name.removesuffix(".lora_A.weight") for name in names if name.endswith(".lora_A.weight")}
    assert found == {name for name, one in module.named_modules() if isinstance(one, torch.nn.Linear)}


def test_the_projection_behind_attention_is_refused_for_peft_alone(tmp_path: Path) -> None:
    """PEFT's layer of it adds the adapter to the weight twice, in training and after."""
    nodes = [
        helper.make_node("MatMul", ["x", "att.out_proj.weight"], ["h"]),
        helper.make_node("Add", ["h", "att.in_proj_bias"], ["y"]),
    ]
    base = _base(nodes, {"att.out_proj.weight": _weight().T, "att.in_proj_bias": np.ones(OUT, np.float32)})
    step = build_training_step(add_lora(base, "*", RANK), "mse", trainable=ADAPTERS)
    with pytest.raises(ArgumentError, match=r"save_adapter: 'att\.out_proj' is of MultiheadAttention, to whose weight"):
        gradfuse.save_adapter(step, tmp_path / "peft")
    gradfuse.save_adapter(step, tmp_path / "a.onnx_adapter")
    names = ["self_attn.out_proj.weight"]
    step = build_training_step(
        add_lora(_base([helper.make_node("MatMul", ["x", *names], ["y"])], {names[0]: _weight().T}), "*", RANK),
        "mse",
        trainable=ADAPTERS,
    )
    gradfuse.save_adapter(step, tmp_path / "peft")


def test_two_weights_of_one_node_path_are_told_apart() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"], name="/attention/MatMul"),
        helper.make_node("MatMul", ["x", "w2"], ["b"], name="/attention/MatMul_1"),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    model = add_lora(_base(nodes, {"w1": _weight().T, "w2": _weight().T}), "*")
    assert [tensor.name for tensor in model.graph.initializer][2::2] == ["w1.lora_A.weight", "w2.lora_A.weight"]


def test_weights_in_branches_and_functions_get_adapters() -> None:
    text = """<ir_version: 10, opset_import: ["": 18, "local": 1]>
    net (float[N, 4] x, bool c) => (float[N, 4] y) <float[4, 4] "w.weight", float[4, 4] "v.weight"> {
        h = local.product(x, "w.weight")
        y = If (c) <
            then_branch = then () => (float[N, 4] t) { t = MatMul(h, "v.weight") },
            else_branch = otherwise () => (float[N, 4] o) { o = Identity(h) }
        >
    }
    <domain: "local", opset_import: ["": 18]> product (a, b) => (c) { c = MatMul(a, b) }"""
    model = onnx.parser.parse_model(text)
    del model.graph.initializer[:]
    for name in ("w.weight", "v.weight"):
        model.graph.initializer.append(numpy_helper.from_array(np.eye(4, dtype=np.float32), name))
    step = build_training_step(add_lora(model, "*", 2), "mse", trainable=ADAPTERS, optimizer=SGD(lr=0.1))
    session, x = TrainingSession(step), np.ones((2, 4), np.float32)
    for taken in (False, True):
        before = session.state_dict()
        session.step({"x": x, "c": np.array(taken)}, np.zeros_like(x))
        after = session.state_dict()
        assert (after["w.lora_B.weight"] != before["w.lora_B.weight"]).any()
        assert (after["v.lora_B.weight"] != before["v.lora_B.weight"]).any() == taken


def test_kinds_of_models_are_kept_and_the_argument_is_not_changed(tmp_path: Path) -> None:
    base = _int4()
    before = base.model.SerializeToString()
    onnx.save(base.model, tmp_path / "base.onnx")
    by_path = add_lora(str(tmp_path / "base.onnx"), "*")
    by_ir = add_lora(ir.from_proto(base.model), "*")
    assert isinstance(by_path, onnx.ModelProto) and isinstance(by_ir, ir.Model)
    assert by_path.graph == ir.to_proto(by_ir).graph == add_lora(base.model, "*").graph
    assert base.model.SerializeToString() == before


def test_files_from_when_initializers_were_inputs_are_taken() -> None:
    model = _gemm().model
    model.ir_version, model.opset_import[0].version = 3, 8
    for tensor in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    x = np.ones((2, IN), np.float32)
    for added in (add_lora(model, "fc"), add_lora_inputs(model, "fc")):
        onnx.checker.check_model(added)
        assert np.array_equal(session_of(added).run(None, {"x": x})[0], session_of(model).run(None, {"x": x})[0])
    step = build_training_step(add_lora(model, "fc"), "mse", trainable=ADAPTERS)
    assert step.input_names == ("x",)


def test_external_data_is_not_read(tmp_path: Path) -> None:
    base = _matmul()
    onnx.save(base.model, tmp_path / "base.onnx", save_as_external_data=True, size_threshold=0, location="data")
    loaded = ir.load(tmp_path / "base.onnx")
    (tmp_path / "data").unlink()
    added = add_lora(loaded, "fc")
    assert isinstance(added.graph.initializers["fc.weight"].const_value, ir.ExternalTensor)


def _three_dimensional() -> onnx.ModelProto:
    model = _base([helper.make_node("MatMul", ["x", "fc.weight"], ["y"])], {"fc.weight": _weight().T[None]})
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    return model


def _on_the_left() -> onnx.ModelProto:
    model = _base([helper.make_node("MatMul", ["fc.weight", "x"], ["y"], name="here")], {"fc.weight": _weight()})
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = IN
    return model


BAD: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "nothing matches": (lambda: _matmul().model, {"targets": "q_proj"}, "'q_proj', which matches nothing; expected"),
    "no targets": (lambda: _matmul().model, {"targets": []}, r"targets is \[\]; expected names or patterns"),
    "no weight": (lambda: _gemm().model, {"targets": ["fc", "b"]}, "'b', which is no weight of MatMul, Gemm or"),
    "a node": (lambda: shared("Tanh(b)"), {"targets": "second"}, "which is a node Tanh without such a weight"),
    "three dimensions": (_three_dimensional, {}, r"'fc\*', which has shape \(1, 20, 6\); expected a matrix"),
    "on the left": (_on_the_left, {}, r"which is the left operand of MatMul \(node 'here'\); expected the right"),
    "two ways": (
        lambda: shared('Gemm<transB = 1>(b, "tied.weight")'),
        {"targets": "tied.*"},
        r"'tied.weight' is read by MatMul \(node 'first'\) and, in another way, by Gemm \(node 'second'\)",
    ),
    "also on the left": (
        lambda: shared('MatMul("tied.weight", b)'),
        {"targets": "tied.*"},
        r"'tied.weight' is the left operand of MatMul \(node 'second'\); expected the right one, or the name of a node",
    ),
    "rank 0": (lambda: _matmul().model, {"rank": 0}, "rank is 0; expected a positive integer"),
    "half a rank": (lambda: _matmul().model, {"rank": 1.5}, "rank is 1.5; expected a positive integer"),
    "alpha": (lambda: _matmul().model, {"alpha": float("nan")}, "alpha is nan; expected a positive number"),
    "seed": (lambda: _matmul().model, {"seed": -1}, "seed is -1; expected an integer from 0 on"),
    "twice": (lambda: add_lora(_matmul().model, "*"), {}, "has 'fc.lora_A.weight' already; expected a module without"),
    "modules": (lambda: _matmul().model, {"modules": {"w": "fc"}}, "modules has 'w'; expected names of weights"),
    "one module twice": (
        lambda: shared("Tanh(b)"),
        {"targets": "*", "modules": {"tied.weight": "m", "other.weight": "m"}},
        "modules has 'm' for several weights; expected one weight a module",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name: str) -> None:
    model, options, message = BAD[name]
    with pytest.raises(ArgumentError, match=message) as error:
        add_lora(model(), **{"targets": "fc*", **options})
    assert "\n" not in str(error.value) and str(error.value).startswith("add_lora: ")


@pytest.mark.parametrize("text", ["no json", "[]", '{"fc": 8}', '{"fc": {"rank": 8}}'])
def test_metadata_that_is_not_ours_is_refused(text: str) -> None:
    model = _matmul().model
    model.metadata_props.add(key="gradfuse.lora", value=text)
    with pytest.raises(gradfuse.ModelError, match=r"the metadata 'gradfuse.lora' is .*; expected what add_lora writes"):
        add_lora(model, "fc")


def test_what_cannot_be_saved_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = build_training_step(_matmul().model, "mse")
    with pytest.raises(ArgumentError, match="the step has no adapters; expected one of a model of add_lora"):
        gradfuse.save_adapter(plain, tmp_path / "adapter")
    served = build_training_step(add_lora_inputs(_matmul().model, "fc"), "mse")
    with pytest.raises(ArgumentError, match="the step has no adapters"):
        gradfuse.save_adapter(served, tmp_path / "adapter")
    with pytest.raises(ArgumentError, match="trained is ModelProto; expected a TrainingSession or TrainingStep"):
        gradfuse.save_adapter(_matmul().model, tmp_path / "adapter")
    step = build_training_step(add_lora(_gemm().model, "fc"), "mse", trainable=ADAPTERS)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(gradfuse.ModelError, match=r"file: cannot make the folder: File exists"):
        gradfuse.save_adapter(step, tmp_path / "file")
    with pytest.raises(gradfuse.ModelError, match="cannot write the file"):
        gradfuse.save_adapter(step, tmp_path / "none" / "a.onnx_adapter")
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.warns(UserWarning, match="'b' trains and is no adapter; it is not written"):
        wider = build_training_step(add_lora(_gemm().model, "fc"), "mse", trainable=[*ADAPTERS, "b"])
        gradfuse.save_adapter(wider, tmp_path / "adapter")
    monkeypatch.delattr(onnxruntime, "AdapterFormat")
    with pytest.raises(GradfuseError, match=r"onnxruntime is .*; expected 1.20 or newer"):
        gradfuse.save_adapter(step, tmp_path / "a.onnx_adapter")


def test_an_adapter_of_which_only_b_trains_is_saved_whole(tmp_path: Path) -> None:
    step = build_training_step(add_lora(_matmul().model, "fc", 2), "mse", trainable=["*.lora_B.*"])
    gradfuse.save_adapter(step, tmp_path)
    tensors = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    assert tensors["base_model.model.fc.lora_A.weight"].any()
    assert TensorProto.FLOAT == step.model.graph.input[0].type.tensor_type.elem_type

"""Check what docs/comparison.md says about other tools, by running them.

`make compare-tools` creates an environment with the versions that the page names, and runs this. It prints one line per
fact, and fails if one is not as the page says.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import torch
from onnx import numpy_helper
from torch import nn

import gradfuse

CLASSIFIER = """
    <ir_version: 10, opset_import: ["": 18]>
    classifier (float[{batch}, 4] x, float[{batch}, 3] y) => (float loss)
        <float[4, 3] weight = {{1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0}}>
    {{
        logits = MatMul(x, weight)
        difference = Sub(logits, y)
        squares = Mul(difference, difference)
        loss = ReduceMean<keepdims = 0>(squares)
    }}
"""
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((8, 4)).astype(np.float32), RNG.standard_normal((8, 3)).astype(np.float32)
WEIGHT = np.eye(4, 3, dtype=np.float32)
GRADIENT = 2 / Y.size * X.T @ (X @ WEIGHT - Y)


def version(package: str) -> str:
    return f"{package} {importlib.metadata.version(package)}"


def readme_step() -> onnx.ModelProto:
    """The step of README.md, as exported."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    batch = torch.randn(32, 20), torch.randint(0, 5, (32,))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    shapes = ({0: "batch"}, {0: "batch"})
    step = gradfuse.export_training_step(
        module, nn.CrossEntropyLoss(), batch, optimizer, dynamic_shapes=shapes, fuse=False
    )
    return step.model


def backward_passes() -> str:
    """How many nodes each tool leaves of the step in the README."""
    import onnxscript.rewriter
    import onnxsim

    model = readme_step()
    simplified, _ = onnxsim.simplify(model, initializers_as_constants=False)
    counts = {
        "as exported": len(model.graph.node),
        "gradfuse": len(gradfuse.fuse(model).model.graph.node),
        version("onnxsim"): len(simplified.graph.node),
        version("onnxscript"): len(onnxscript.rewriter.rewrite(model).graph.node),
    }
    assert list(counts.values()) == [74, 42, 66, 74], counts
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def onnx_ad() -> Iterator[str]:
    import onnx_ad

    name = version("onnx-ad")
    model = onnx.parser.parse_model(CLASSIFIER.format(batch="N"))
    # It differentiates w.r.t. inputs.
    weight = model.graph.initializer.pop()
    model.graph.input.append(onnx.helper.make_tensor_value_info("weight", onnx.TensorProto.FLOAT, [4, 3]))
    adjoint = onnx_ad.reverse(model, layout="onnx")
    session = onnxruntime.InferenceSession(adjoint.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"x": X, "y": Y, "weight": numpy_helper.to_array(weight)}
    for value in session.get_inputs():
        if value.name not in feeds:
            feeds[value.name] = np.ones([size if isinstance(size, int) else 1 for size in value.shape], np.float32)
    results = dict(zip([value.name for value in session.get_outputs()], session.run(None, feeds), strict=True))
    np.testing.assert_allclose(results["adj_weight"].reshape(4, 3), GRADIENT, rtol=1e-5, atol=1e-6)
    yield f"{name}: reverse mode of a model with a symbolic batch gives the right gradient in stock onnxruntime"
    assert hasattr(onnx_ad, "forward") and not any("optim" in part for part in dir(onnx_ad))
    yield f"{name}: has forward mode as well, and no optimizer"


def onnxsim_training() -> Iterator[str]:
    import onnxsim

    name = version("onnxsim")
    model = onnx.parser.parse_model(CLASSIFIER.format(batch=8))
    for optimizer in ("adam", "sgd_momentum"):
        loop = onnxsim.compile_training_loop(model, "loss", ["weight"], optimizer=optimizer)
        losses = [loop({"x": X, "y": Y}, 0.05) for _ in range(50)]
        assert losses[-1] < losses[0] / 2, losses
        onnx.checker.check_model(loop.step_graph.model)
    yield f"{name}: compile_training_loop trains an ONNX model with adam and sgd_momentum, by one ONNX graph"
    refused(lambda: onnxsim.compile_training_loop(model, "loss", ["weight"], optimizer="adamw"), "unknown optimizer")
    yield f"{name}: other optimizers have to be traced from torch; 'adamw' is refused"
    dynamic = onnx.parser.parse_model(CLASSIFIER.format(batch="N"))
    refused(
        lambda: onnxsim.compile_training_loop(dynamic, "loss", ["weight"])({"x": X, "y": Y}, 0.05), "non-static shape"
    )
    yield f"{name}: a symbolic batch is refused"

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.from_numpy(WEIGHT.copy()))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            difference = x @ self.weight - y
            return (difference * difference).mean()

    torch_loop = onnxsim.compile_torch_training_loop(Net(), (torch.from_numpy(X), torch.from_numpy(Y)))
    losses = [torch_loop({"x": X, "y": Y}, 0.05) for _ in range(50)]
    assert losses[-1] < losses[0] / 2
    yield f"{name}: compile_torch_training_loop trains a PyTorch module"

    def sgd(parameter: torch.Tensor, gradient: torch.Tensor, lr: torch.Tensor) -> tuple[torch.Tensor]:
        return (parameter - lr * gradient,)

    traced = onnxsim.torch_training.trace_torch_optimizer(sgd, num_state=0)
    loop = onnxsim.compile_training_loop(model, "loss", ["weight"], optimizer=traced)
    loop({"x": X, "y": Y}, 0.05)
    (after,) = loop.parameters().values()
    np.testing.assert_allclose(after, WEIGHT - 0.05 * GRADIENT, rtol=1e-5, atol=1e-6)
    yield f"{name}: an optimizer that is traced from torch makes the right update"
    operators = onnxsim.graph_grad.supported_ops()
    assert len(operators) == 46, len(operators)
    assert "Pow" not in operators
    assert callable(onnxsim.graph_grad.register_gradient)
    yield f"{name}: {len(operators)} operators have a gradient, Pow has none; register_gradient takes others"


def onnxsim_adapters() -> Iterator[str]:
    from onnxsim import distributed, federated, lora

    name = version("onnxsim")
    base = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> net (float[N, 64] x) => (float[N, 32] y) {y = MatMul(x, weight)}'
    )
    weight = RNG.standard_normal((64, 32)).astype(np.float32) / 8
    base.graph.initializer.append(numpy_helper.from_array(weight, "weight"))
    x = RNG.standard_normal((16, 64)).astype(np.float32)
    shift = np.outer(np.ones(64), np.linspace(0, 0.3, 32)).astype(np.float32)
    y = x @ (weight + shift)

    def train(model: onnx.ModelProto, adapter: Any) -> None:
        losses: list[float] = []
        lora.train_lora(
            model,
            adapter,
            "x",
            "y",
            target_data=[y],
            calibration_data=[{"x": x}],
            num_iterations=100,
            learning_rate=1e-2,
            losses=losses,
        )
        assert losses[-1] < losses[0] / 10, losses

    train(*lora.inject_lora(base, rank=4))
    yield f"{name}: train_lora trains an adapter"

    quantized, adapter = lora.apply_qlora(base, rank=4)
    codes = next(tensor for tensor in quantized.graph.initializer if tensor.name == "weight_nf4_q")
    assert (codes.data_type, list(codes.dims)) == (onnx.TensorProto.UINT8, [64, 32])
    build, steps = lora._build_lora_step_graph, []

    def recorded(*args: Any, **options: Any) -> Any:
        steps.append(build(*args, **options))
        return steps[-1]

    with mock.patch.object(lora, "_build_lora_step_graph", recorded):
        train(quantized, adapter)
    (inputs,) = ({value.name: value.type.tensor_type for value in step.model.graph.input} for step in steps)
    frozen = inputs["weight_nf4_dq"]
    assert frozen.elem_type == onnx.TensorProto.FLOAT
    assert [dimension.dim_value for dimension in frozen.shape.dim] == [64, 32]
    yield f"{name}: apply_qlora stores a weight of 4 bits in a byte, and its step takes that weight in float32"

    clients = [federated.FederatedClient([{"x": x[part]}], [y[part]]) for part in (slice(0, 8), slice(8, 16))]
    rounds: list[list[float]] = []
    model, adapter = lora.inject_lora(base, rank=4)
    federated.run_federated_training(
        model, adapter, clients, "x", "y", num_rounds=5, local_iterations=20, learning_rate=1e-2, round_losses=rounds
    )
    assert sum(rounds[-1]) < sum(rounds[0]) / 2, rounds
    yield f"{name}: FedAvg of the adapters of two clients, one after the other in one process"

    shapes = {"x": [8, 64], "y": [8, 32], "target": [8, 32], "weight": [64, 32]}
    gradients, names, loss = distributed.build_gradient_step_graph(
        base.graph.node, shapes, base.graph.initializer, "x", [8, 64], "target", [8, 32], "y", ["weight"]
    )
    shards = [distributed.WorkerShard(x[part], y[part]) for part in (slice(0, 8), slice(8, 16))]
    _, losses = distributed.train_data_parallel(
        gradients, names, loss, "x", "target", ["weight"], shapes, {"weight": weight}, shards, 100, 8, 1e-2
    )
    assert losses[-1] < losses[0] / 2, losses
    yield f"{name}: data-parallel training in two processes of one machine"


def onnxsim_proofs() -> Iterator[str]:
    """What `onnxsim.simplify` proves of its own result, with z3-solver."""
    import onnxsim

    name = f"{version('onnxsim')} with {version('z3-solver')}"

    def verdict(hidden: int, classes: int) -> tuple[str, str]:
        model = onnx.parser.parse_model(f"""
            <ir_version: 10, opset_import: ["": 18]>
            net (float[8, 8] x) => (float[8, {classes}] y)
            {{
                product = MatMul(x, first)
                hidden = Add(product, bias)
                y = MatMul(hidden, second)
            }}
        """)
        for tensor, shape in {"first": (8, hidden), "bias": (hidden,), "second": (hidden, classes)}.items():
            values = RNG.standard_normal(shape).astype(np.float32)
            model.graph.initializer.append(numpy_helper.from_array(values, tensor))
        simplified, _ = onnxsim.simplify(model)
        assert [node.op_type for node in simplified.graph.node] == ["Gemm", "MatMul"]
        return judged(simplified)

    def judged(model: onnx.ModelProto) -> tuple[str, str]:
        properties = {entry.key: entry.value for entry in model.metadata_props}
        return properties["onnxsim.certify"], properties["onnxsim.certify.detail"]

    assert verdict(hidden=64, classes=100_000)[0] == "proved"
    yield f"{name}: proves a rewritten window of 4,096 multiply-adds in a model of 51 million"
    status, reason = verdict(hidden=4096, classes=4)
    assert status == "skipped" and "> 100000 multiply-adds" in reason, (status, reason)
    yield f"{name}: skips a window of more than 100,000 multiply-adds"
    simplified, _ = onnxsim.simplify(readme_step(), initializers_as_constants=False)
    status, reason = judged(simplified)
    assert status == "skipped" and "symbolic shape" in reason, (status, reason)
    yield f"{name}: skips the step in the README for its symbolic batch"


def spingalett_training() -> Iterator[str]:
    import spingalett

    name = version("spingalett")
    spingalett.set_log_level(spingalett.LogLevel.ERROR)
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> net (float[N, 4] x) => (float[N, 3] y)'
        "{product = MatMul(x, weight) shifted = Add(product, bias) y = Tanh(shifted)}"
    )
    model.graph.initializer.extend(
        [numpy_helper.from_array(WEIGHT, "weight"), numpy_helper.from_array(np.zeros(3, np.float32), "bias")]
    )
    names = [optimizer.name for optimizer in spingalett.Optimizer]
    assert names == ["SGD", "MOMENTUM", "RMSPROP", "ADAM", "ADAMW"], names
    for optimizer in spingalett.Optimizer:
        with spingalett.Network.from_onnx(model.SerializeToString()) as network:
            np.testing.assert_allclose(network.forward(X), np.tanh(X @ WEIGHT), rtol=1e-5, atol=1e-6)
            before = network.evaluate(X, np.tanh(Y)).loss
            network.train(X, np.tanh(Y), epochs=300, optimizer=optimizer, learning_rate=1e-2)
            assert network.evaluate(X, np.tanh(Y)).loss < before / 2, optimizer
    yield f"{name}: Network.from_onnx reads an ONNX model, and {', '.join(names)} train it in its own library"
    assert not any("to_onnx" in part or "export_onnx" in part for part in dir(spingalett.Network))
    yield f"{name}: writes no ONNX"
    assert [loss.name for loss in spingalett.Loss] == ["MSE", "CROSS_ENTROPY", "SPARSE_CROSS_ENTROPY"]
    yield f"{name}: has three losses; a Trainer takes gradients of the outputs for others"


def executorch_training() -> Iterator[str]:
    from executorch.exir import to_edge
    from executorch.extension import training
    from torch.export.experimental import _export_forward_backward

    name = version("executorch")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.loss = nn.Linear(4, 3), nn.CrossEntropyLoss()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.loss(self.layer(x), y)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    module, x, y = Net(), torch.from_numpy(X), torch.arange(8) % 3
    exported = _export_forward_backward(torch.export.export(module, (x, y), strict=True))
    # Kept, as the trainer reads from it.
    buffer = to_edge(exported).to_executorch().buffer
    trainer = training._load_for_executorch_for_training_from_buffer(buffer)
    reference = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    optimizer = None
    for _ in range(10):
        loss = trainer.forward_backward("forward", (x, y))[0].item()
        optimizer = optimizer or training.get_sgd_optimizer(trainer.named_parameters(), 0.1, 0.9)
        optimizer.step(trainer.named_gradients())
        wanted = module(x, y)
        reference.zero_grad()
        wanted.backward()
        reference.step()
        assert abs(loss - wanted.item()) < 1e-5
    yield f"{name}: a module and its gradients, from torch.export, train as PyTorch does, in ExecuTorch's own runtime"
    assert [part for part in training.__all__ if "optimizer" in part] == ["get_sgd_optimizer"]
    yield f"{name}: its Python package has SGD; the step is outside the exported program"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training.TrainingModule(None)
    assert any("experimental" in str(warning.message) for warning in caught)
    yield f"{name}: it says that the API is experimental"


def refused(call: Callable[[], Any], reason: str) -> None:
    try:
        call()
    except ValueError as error:
        assert reason in str(error), error
    else:
        raise AssertionError(f"expected a ValueError: {reason}")


def main() -> None:
    print(f"nodes of the step in the README: {backward_passes()}")
    for facts in (
        onnx_ad,
        onnxsim_training,
        onnxsim_adapters,
        onnxsim_proofs,
        executorch_training,
        spingalett_training,
    ):
        noise = io.StringIO()
        with contextlib.redirect_stderr(noise), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = list(facts())
        print("\n".join(found))


if __name__ == "__main__":
    main()

"""Find out what docs/comparison.md says of other tools, by running them.

`make compare-tools` creates an environment with the versions that the page names, and runs this. It prints a line a
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
    yield f"{name}: compile_training_loop trains an ONNX model with adam and sgd_momentum"
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
    for facts in (onnx_ad, onnxsim_training, executorch_training):
        noise = io.StringIO()
        with contextlib.redirect_stderr(noise), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = list(facts())
        print("\n".join(found))


if __name__ == "__main__":
    main()

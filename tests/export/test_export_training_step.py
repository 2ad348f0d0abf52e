"""`export_training_step`: loss, gradients and buffers are PyTorch's own, and misuse is refused clearly."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import pty
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from like_torch import assert_like_torch
from torch import Tensor, nn

from gradfuse import ExportError, ModelError, TrainingStep, export_training_step, fuse, library, terminal
from gradfuse.differentiation import rules
from gradfuse.models.arrays import to_numpy
from gradfuse.testing import assert_gradients_close

Tensors = tuple[Tensor, ...]


class Mlp(nn.Module):
    def __init__(self, inputs: int = 6, classes: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, 8)
        self.last = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.silu(self.first(x)))  # type: ignore[no-any-return]


class Cnn(nn.Module):
    """Strides that leave a rest, padding, dilation, groups, and all three kinds of pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2, bias=False),
            nn.Tanh(),
            nn.AvgPool2d(2, padding=1),
            nn.AdaptiveAvgPool2d((2, 3)),
        )
        self.head = nn.Linear(36, 5)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.body(image).flatten(1))  # type: ignore[no-any-return]


class Upsampler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1)
        self.line = nn.Conv1d(3, 4, 3)

    def forward(self, image: Tensor) -> Tensor:
        return self.line(self.up(image).flatten(2)).mean(2)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """A pre-norm block with explicit, masked softmax attention; `scaled_dot_product_attention` on request."""

    def __init__(self, kernel: bool) -> None:
        super().__init__()
        self.kernel = kernel
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 5)
        self.register_buffer("future", torch.ones(4, 4).triu(1).bool())

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(tokens)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        if self.kernel:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-1, -2)) * 0.5
            mixed = scores.masked_fill(self.get_buffer("future"), float("-inf")).softmax(-1) @ v
        return self.head(mixed.transpose(1, 2).flatten(2).mean(1))  # type: ignore[no-any-return]


class Language(nn.Module):
    """Embedding and output projection share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(F.gelu(self.mix(self.embed(ids))))  # type: ignore[no-any-return]


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 5)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(image))).mean((2, 3)))  # type: ignore[no-any-return]


class Counting(nn.Module):
    """Assigns to one buffer, writes into another, and has one that no step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 5)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((6,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.get_buffer("mean") + 0.1 * x.detach().mean(0)
        self.get_buffer("steps").add_(1)
        return self.last((x - self.get_buffer("mean")) * self.get_buffer("scale"))  # type: ignore[no-any-return]


class Weighted(nn.Module):
    """A loss module with a trainable temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, output: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        return (weight * F.cross_entropy(output / self.temperature, target, reduction="none")).mean()


def tokens_loss(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=0)


def classes(count: int) -> Tensor:
    return torch.randint(0, 5, (count,))


def images(count: int) -> Tensor:
    return torch.randn(count, 1, 9, 8)


@dataclasses.dataclass(frozen=True)
class Case:
    module: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    batch: Callable[[int], tuple[Tensor | Tensors, Tensor | Tensors]]
    fused: tuple[str, ...] = ()


CROSS_ENTROPY, SOFTMAX = "CrossEntropyLossGrad", "ScaledMaskedSoftmaxBackward"
CASES = {
    "mlp": Case(Mlp, F.cross_entropy, lambda n: (torch.randn(n, 6), classes(n)), (CROSS_ENTROPY,)),
    "mlp_sum": Case(
        Mlp, nn.CrossEntropyLoss(reduction="sum"), lambda n: (torch.randn(n, 6), classes(n)), (CROSS_ENTROPY,)
    ),
    "mlp_weight_smoothing": Case(
        Mlp,
        nn.CrossEntropyLoss(weight=torch.rand(5) + 0.1, label_smoothing=0.1),
        lambda n: (torch.randn(n, 6), classes(n)),
        (CROSS_ENTROPY,),
    ),
    "mlp_mse": Case(Mlp, nn.MSELoss(), lambda n: (torch.randn(n, 6), torch.randn(n, 5))),
    "loss_module": Case(Mlp, Weighted(), lambda n: (torch.randn(n, 6), (classes(n), torch.rand(n)))),
    "cnn": Case(Cnn, F.cross_entropy, lambda n: (images(n), classes(n)), (CROSS_ENTROPY,)),
    "transposed_cnn": Case(Upsampler, F.mse_loss, lambda n: (torch.randn(n, 2, 5, 4), torch.randn(n, 4))),
    "attention": Case(
        lambda: Attention(False),
        F.cross_entropy,
        lambda n: (torch.randn(n, 4, 8), classes(n)),
        (CROSS_ENTROPY, SOFTMAX),
    ),
    "attention_kernel": Case(
        lambda: Attention(True), F.cross_entropy, lambda n: (torch.randn(n, 4, 8), classes(n)), (CROSS_ENTROPY,)
    ),
    "language": Case(
        Language,
        tokens_loss,
        lambda n: (torch.randint(0, 11, (n, 6)), torch.randint(0, 11, (n, 6))),
        (CROSS_ENTROPY,),
    ),
    "batch_norm": Case(Normalized, F.cross_entropy, lambda n: (images(n), classes(n)), (CROSS_ENTROPY,)),
    "buffers": Case(Counting, F.cross_entropy, lambda n: (torch.randn(n, 6), classes(n)), (CROSS_ENTROPY,)),
}


def run(step: TrainingStep, batch: tuple[Tensor | Tensors, Tensor | Tensors]) -> dict[str, np.ndarray[Any, Any]]:
    """Run a step in onnxruntime at its own parameters."""
    options = onnxruntime.SessionOptions()
    if library.find_library() is not None:
        library.register(options)
    session = onnxruntime.InferenceSession(step.model.SerializeToString(), options)
    parts = [part if isinstance(part, tuple) else (part,) for part in batch]
    tensors = dict(zip(step.input_names + step.target_names, parts[0] + parts[1], strict=True))
    feeds = step.parameters | step.buffers | {name: tensor.numpy() for name, tensor in tensors.items()}
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def oracle(
    module: nn.Module, loss: Callable[..., Tensor], batch: tuple[Tensor | Tensors, Tensor | Tensors], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Loss, gradients and buffers of PyTorch's autograd in a type, by the names of a step's outputs."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    module = copy.deepcopy(module).to(dtype)
    parts = [tuple(map(cast, part)) if isinstance(part, tuple) else (cast(part),) for part in batch]
    owners = [("", module)]
    if isinstance(loss, nn.Module):
        loss = copy.deepcopy(loss).to(dtype)
        owners.append(("loss.", loss))
    value = loss(module(*parts[0]), *parts[1])
    value.backward()
    results = {"loss": value.detach()}
    for prefix, owner in owners:
        for name, parameter in owner.named_parameters():
            if parameter.requires_grad:
                gradient = parameter.grad
                results[f"{prefix}{name}.grad"] = torch.zeros_like(parameter) if gradient is None else gradient
        results |= {f"{prefix}{name}.updated": buffer for name, buffer in owner.named_buffers()}
    return results


def assert_step(
    step: TrainingStep,
    module: nn.Module,
    loss: Callable[..., Tensor],
    batch: tuple[Tensor | Tensors, Tensor | Tensors],
) -> None:
    results = run(step, batch)
    native = oracle(module, loss, batch, torch.float32)
    exact = oracle(module, loss, batch, torch.float64)
    # Roundings of one layer pass through the next ones, so that the largest gradient of the step measures them all.
    terms = 4 * max(float(tensor.abs().max()) for name, tensor in exact.items() if name.endswith(".grad"))
    for name, result in results.items():
        if exact[name].is_floating_point():
            assert_gradients_close(result, native[name], exact[name], np.float32, terms=terms)
        else:
            np.testing.assert_array_equal(result, exact[name].numpy())


def missing(step: TrainingStep, module: nn.Module) -> set[str]:
    """The names of trainable parameters that have no gradient among the outputs."""
    outputs = {output.name for output in step.model.graph.output}
    return {name for name, p in module.named_parameters() if p.requires_grad and f"{name}.grad" not in outputs}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_torch(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    module, batch = case.module(), case.batch(6)
    step = export_training_step(module, case.loss, batch)
    onnx.checker.check_model(step.model, full_check=True)
    assert not missing(step, module)
    assert_step(step, module, case.loss, batch)
    assert step.report is not None
    assert {fusion.op for fusion in step.report.fusions} >= set(case.fused)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["mlp_weight_smoothing", "loss_module", "cnn", "attention", "attention_kernel", "language", "batch_norm"]
)
def test_a_dynamic_batch_runs_at_other_sizes(name: str) -> None:
    torch.manual_seed(1)
    case = CASES[name]
    module, batch = case.module(), case.batch(6)
    step = export_training_step(
        module,
        case.loss,
        batch,
        dynamic_shapes=tuple(
            tuple({0: "rows"} for _ in part) if isinstance(part, tuple) else {0: "rows"} for part in batch
        ),
    )
    for size in (6, 3, 11):
        assert_step(step, module, case.loss, case.batch(size))
    shapes = {value.name: value.type.tensor_type.shape.dim for value in step.model.graph.input}
    assert [shapes[name][0].dim_param for name in step.input_names] == ["rows"] * len(step.input_names)
    assert step.report is not None
    assert {fusion.op for fusion in step.report.fusions} >= set(case.fused)


@pytest.mark.long
def test_pictures_of_other_sizes() -> None:
    """Strides that leave different rests, where the transposed convolution cannot know its size beforehand."""
    torch.manual_seed(2)
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.AdaptiveMaxPool2d((3, 2)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 5),
    )
    shapes = ({2: "height"}, None)
    batch = torch.randn(3, 1, 17, 19), classes(3)
    step = export_training_step(module, F.cross_entropy, batch, dynamic_shapes=shapes, fuse=False)
    for height in (17, 18, 21):
        other = torch.randn(3, 1, height, 19), classes(3)
        assert_step(step, module, F.cross_entropy, other)


def test_the_interface_of_a_step() -> None:
    module = Normalized()
    step = export_training_step(module, nn.CrossEntropyLoss(), (images(4), classes(4)), fuse=False)
    parameters = ["conv.weight", "conv.bias", "norm.weight", "norm.bias", "head.weight", "head.bias"]
    buffers = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert [value.name for value in step.model.graph.input] == [*parameters, *buffers, "image", "target"]
    assert [value.name for value in step.model.graph.output] == [
        "loss",
        *(f"{name}.grad" for name in parameters),
        *(f"{name}.updated" for name in buffers),
    ]
    assert list(step.parameters) == parameters
    assert list(step.buffers) == buffers
    assert (step.input_names, step.target_names) == (("image",), ("target",))
    assert step.report is None
    assert not any(node.metadata_props or node.doc_string for node in step.model.graph.node)


def test_a_tied_parameter_is_one_input_with_the_summed_gradient() -> None:
    step = export_training_step(Language(), tokens_loss, CASES["language"].batch(3), fuse=False)
    assert [name for name in step.parameters if name.endswith("weight")] == ["embed.weight", "mix.weight"]


def test_frozen_parameters_and_unchanged_buffers_are_constants() -> None:
    module = Mlp()
    module.first.requires_grad_(False)
    batch = torch.randn(4, 6), classes(4)
    step = export_training_step(module, nn.CrossEntropyLoss(weight=torch.rand(5)), batch, fuse=False)
    assert list(step.parameters) == ["last.weight", "last.bias"]
    assert not step.buffers
    assert [value.name for value in step.model.graph.input] == ["last.weight", "last.bias", "x", "target"]


def test_a_parameter_without_influence_has_a_gradient_of_zeros(capfd: pytest.CaptureFixture[str]) -> None:
    module = Mlp()
    module.spare, module.scale = nn.Linear(2, 3), nn.Parameter(torch.ones(()))
    batch = torch.randn(4, 6), classes(4)
    step = export_training_step(module, F.cross_entropy, batch)
    assert_step(step, module, F.cross_entropy, batch)
    gradients = run(step, batch)
    np.testing.assert_array_equal(gradients["spare.weight.grad"], np.zeros((3, 2), dtype=np.float32))
    np.testing.assert_array_equal(gradients["scale.grad"], np.zeros((), dtype=np.float32))
    # onnx_ir warns of attributes whose type it has to guess.
    assert capfd.readouterr().err == ""


def test_equal_gradients_and_gradients_that_are_inputs_keep_their_names() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

        def forward(self, mul: Tensor) -> Tensor:
            return (self.a + self.b) * mul

    batch = torch.randn(3), torch.tensor(1.0)

    def loss(output: Tensor, factor: Tensor) -> Tensor:
        return output.sum() * factor

    module = Sum()
    step = export_training_step(module, loss, batch)
    assert_step(step, module, loss, batch)


@pytest.mark.parametrize("training", [True, False])
def test_the_module_is_left_as_it_was(training: bool) -> None:
    module = Normalized().train(training)
    module.head.weight.grad = torch.ones_like(module.head.weight)
    before = {name: (id(tensor), tensor.detach().clone()) for name, tensor in module.state_dict(keep_vars=True).items()}
    attributes = {name: dict(vars(submodule)) for name, submodule in module.named_modules()}
    batch = images(4).requires_grad_(), classes(4)
    random = torch.get_rng_state()
    with torch.no_grad():
        export_training_step(module, F.cross_entropy, batch, fuse=False)
    assert torch.equal(torch.get_rng_state(), random)
    assert module.training is training
    assert batch[0].grad is None
    after = module.state_dict(keep_vars=True)
    assert list(after) == list(before)
    for name, tensor in after.items():
        assert id(tensor) == before[name][0]
        assert torch.equal(tensor, before[name][1])
    assert torch.equal(module.head.weight.grad, torch.ones_like(module.head.weight))
    assert module.conv.weight.grad is None
    assert {name: dict(vars(submodule)) for name, submodule in module.named_modules()} == attributes


@pytest.mark.parametrize("fuse", [True, False])
def test_progress_grows_to_the_end(fuse: bool) -> None:
    told: list[tuple[str, int, int]] = []
    optimizer = torch.optim.SGD((module := Mlp()).parameters())
    export_training_step(
        module,
        F.cross_entropy,
        (torch.randn(4, 6), classes(4)),
        optimizer,
        fuse=fuse,
        progress=lambda *now: told.append(now),
    )
    done = [one for _, one, _ in told]
    assert done == sorted(set(done)) and done[0] == 0
    assert {total for _, _, total in told} == {done[-1]}
    assert ("fusing" in [part for part, _, _ in told]) is fuse


def test_a_bar_is_shown_on_a_terminal_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_SHOW_PROGRESS_AFTER_SECONDS", 0.0)

    def export(stderr: TextIO) -> None:
        with stderr, monkeypatch.context() as patched:
            patched.setattr(sys, "stderr", stderr)
            export_training_step(Mlp(), F.cross_entropy, (torch.randn(4, 6), classes(4)), progress=True)
            print("that is all", file=stderr)

    ours, theirs = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        # A terminal that nobody writes to any more raises an error.
        with contextlib.suppress(OSError):
            while part := os.read(ours, 4096):
                shown.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    export(os.fdopen(theirs, "w"))
    reader.join()
    os.close(ours)
    assert b"exporting: " in b"".join(shown)
    assert b"that is all" in b"".join(shown)

    export((tmp_path / "stderr").open("w"))
    assert (tmp_path / "stderr").read_text() == "that is all\n"


class Caring(Mlp):
    """Takes care of a layer's type in each call, and subtracts whole numbers from a number, as transformers does."""

    def forward(self, x: Tensor) -> Tensor:
        self.first = self.first.to(x.dtype)
        kept = 1.0 - (x > 0).long().sum(1, keepdim=True)
        return super().forward(x) * kept


def test_layers_that_change_no_type_and_whole_numbers_that_are_subtracted_from_a_number() -> None:
    torch.manual_seed(0)
    module, batch, other = Caring(), (torch.randn(4, 6), classes(4)), (torch.randn(7, 6), classes(7))
    step = export_training_step(module, F.cross_entropy, batch, dynamic_shapes=({0: "n"}, {0: "n"}))
    assert_step(step, module, F.cross_entropy, other)


class Watched(Mlp):
    """Registers a hook of its own when it is first run, as transformers does, and notes what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.first.register_forward_hook(lambda *arguments: self.seen.append(arguments[2]))
            self.hooked = True
        return super().forward(x)


def test_hooks_and_notes_of_a_module_are_left_as_they_were() -> None:
    module = Watched()
    export_training_step(module, F.cross_entropy, (torch.randn(4, 6), classes(4)))
    assert module.seen == []
    module(torch.randn(4, 6))
    # Once: a hook that an export leaves behind would run besides the one that this call registers.
    assert [one.shape for one in module.seen] == [(4, 8)]


def test_a_failed_export_leaves_the_module_as_it_was() -> None:
    class Failing(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("first line\nsecond line")

    module = Failing()
    parameters = list(module.parameters())
    with pytest.raises(ExportError, match="fails on the batch: first line second line"):
        export_training_step(module, F.cross_entropy, (torch.randn(4, 6), classes(4)))
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floating_types(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = Mlp().to(dtype)
    step = export_training_step(module, F.cross_entropy, (torch.randn(8, 6, dtype=dtype), classes(8)), fuse=False)
    types = {
        value.name: value.type.tensor_type.elem_type for value in (*step.model.graph.input, *step.model.graph.output)
    }
    wanted = {torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16", torch.float64: "DOUBLE"}[dtype]
    for name in step.parameters:
        assert onnx.TensorProto.DataType.Name(types[name]) == wanted
        assert onnx.TensorProto.DataType.Name(types[f"{name}.grad"]) == wanted
        assert str(step.parameters[name].dtype) == str(dtype).removeprefix("torch.")


def test_save_and_load(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, batch = Normalized(), (images(4), classes(4))
    step = export_training_step(module, F.cross_entropy, batch)
    path = tmp_path / "step.onnx"
    step.save(path)
    loaded = TrainingStep.load(path)
    assert [file.name for file in tmp_path.iterdir()] == ["step.onnx"]
    assert (loaded.input_names, loaded.target_names) == (step.input_names, step.target_names)
    for mine, other in ((loaded.parameters, step.parameters), (loaded.buffers, step.buffers)):
        assert list(mine) == list(other)
        for name, array in mine.items():
            np.testing.assert_array_equal(array, other[name], strict=True)
    assert_step(loaded, module, F.cross_entropy, batch)


def test_a_saved_step_runs_at_the_saved_parameters_and_at_any_others(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, batch = Mlp(), (torch.randn(4, 6), classes(4))
    step = export_training_step(module, F.cross_entropy, batch)
    step.save(tmp_path / "step.onnx")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if library.find_library() is not None:
        library.register(options)
    session = onnxruntime.InferenceSession(str(tmp_path / "step.onnx"), options)
    feeds = {"x": batch[0].numpy(), "target": batch[1].numpy()}
    expected = run(step, batch)
    for name, array in zip(expected, session.run(list(expected), feeds), strict=True):
        np.testing.assert_array_equal(array, expected[name])
    zeros = {name: np.zeros_like(array) for name, array in step.parameters.items()}
    (loss,) = session.run(["loss"], feeds | zeros)
    assert loss == pytest.approx(np.log(5), abs=1e-6)


def test_fusing_a_saved_step_keeps_its_parameters_free(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, batch = Mlp(), (torch.randn(4, 6), classes(4))
    export_training_step(module, F.cross_entropy, batch, fuse=False).save(tmp_path / "step.onnx")
    result = fuse(str(tmp_path / "step.onnx"))
    assert {fusion.op for fusion in result.report.fusions} == {CROSS_ENTROPY}
    onnx.save(result.model, tmp_path / "fused.onnx")
    loaded = TrainingStep.load(tmp_path / "fused.onnx")
    assert_step(loaded, module, F.cross_entropy, batch)
    other = Mlp()
    parameters = {name: to_numpy(parameter) for name, parameter in other.named_parameters()}
    assert_step(dataclasses.replace(loaded, parameters=parameters), other, F.cross_entropy, batch)


def test_loading_what_is_no_saved_step(tmp_path: Path) -> None:
    step = export_training_step(Mlp(), F.cross_entropy, (torch.randn(4, 6), classes(4)), fuse=False)
    onnx.save(step.model, tmp_path / "bare.onnx")
    with pytest.raises(ModelError, match="not a training step saved by gradfuse"):
        TrainingStep.load(tmp_path / "bare.onnx")
    with pytest.raises(ModelError, match="does not exist"):
        TrainingStep.load(tmp_path / "none.onnx")


@pytest.mark.parametrize(
    "given, message",
    [
        (({0: "n"},), "expected \\(inputs, targets\\)"),
        (({0: "n"}, ({0: "n"}, None)), "for 1 inputs and 2 targets"),
        ({"images": {0: "n"}}, "names 'images'; expected names among \\['target', 'x'\\]"),
        (({2: "n"}, None), "of 'x' has axis 2; expected 0 to 1"),
        (7, "dynamic_shapes is int"),
    ],
)
def test_dynamic_shapes_of_a_wrong_form(given: Any, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        export_training_step(Mlp(), F.cross_entropy, (torch.randn(4, 6), classes(4)), dynamic_shapes=given)


ITEMS, DYNAMIC = torch.export.Dim("items", min=2, max=64), torch.export.Dim.DYNAMIC


@pytest.mark.parametrize(
    "given, label",
    [
        (({0: ITEMS}, {0: ITEMS}), "items"),
        ({"x": {0: DYNAMIC}, "target": {0: DYNAMIC}}, "batch"),
        ((("items", None), (("items",),)), "items"),
    ],
)
def test_the_forms_of_dynamic_shapes(given: Any, label: str) -> None:
    batch = torch.randn(4, 6), classes(4)
    step = export_training_step(Mlp(), F.cross_entropy, batch, dynamic_shapes=given, fuse=False)
    assert step.model.graph.input[-1].type.tensor_type.shape.dim[0].dim_param == label


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_loss_of_one_element(shape: tuple[int, ...]) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        total = output.new_zeros(shape)
        total += (output - target).square().mean()
        return total

    torch.manual_seed(0)
    module, batch = nn.Linear(4, 3), (torch.randn(2, 4), torch.randn(2, 3))
    assert_like_torch(export_training_step(module, loss, batch), module, loss, batch)


class Causal(nn.Module):
    """Asks PyTorch for a mask where there is more than one token, as Whisper does."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q = self.project(x)[:, None]
        return F.scaled_dot_product_attention(q, q, q, is_causal=x.shape[1] > 1)[:, 0]


def test_a_condition_on_a_size_is_an_argument() -> None:
    torch.manual_seed(0)
    module, shapes = Causal(), {0: "items", 1: "tokens"}
    batch = torch.randn(2, 5, 4), torch.randn(2, 5, 4)
    step = export_training_step(module, nn.MSELoss(), batch, dynamic_shapes=(shapes, shapes))
    assert_like_torch(step, module, nn.MSELoss(), batch)
    assert_like_torch(step, module, nn.MSELoss(), (torch.randn(3, 7, 4), torch.randn(3, 7, 4)))


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
def test_modules_that_stand_for_others_are_unwrapped(wrap: Callable[[nn.Module], nn.Module]) -> None:
    step = export_training_step(wrap(Mlp()), nn.CrossEntropyLoss(), (torch.randn(4, 6), classes(4)), fuse=False)
    assert list(step.parameters) == [name for name, _ in Mlp().named_parameters()]


def test_all_operators_without_a_translation_are_named() -> None:
    class Special(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + torch.special.airy_ai(x) + torch.special.bessel_y0(x.abs())  # type: ignore[no-any-return]

    with pytest.raises(ExportError) as error:
        export_training_step(Special(), F.mse_loss, (torch.randn(3, 3), torch.randn(3, 3)))
    assert "special_airy_ai" in one_line(error) and "bessel_y0" in one_line(error)


def one_line(error: pytest.ExceptionInfo[ExportError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    "module, loss, batch, message",
    [
        (F.relu, F.mse_loss, (torch.ones(1), torch.ones(1)), "module is function; expected torch.nn.Module"),
        (nn.Linear(1, 1), 3, (torch.ones(1), torch.ones(1)), "loss is int; expected a module or function"),
        (nn.Linear(1, 1), F.mse_loss, torch.ones(1, 1), "batch is Tensor of shape (1, 1); expected (inputs, targets)"),
        (
            nn.Linear(1, 1),
            F.mse_loss,
            (torch.ones(1), torch.ones(1), torch.ones(1)),
            "batch is a tuple of 3; expected (inputs, targets); several targets are a tuple, as in (x, (y, weights))",
        ),
        (nn.Linear(1, 1), F.mse_loss, (torch.ones(1), 2.0), "targets of the batch hold float; expected tensors"),
        (nn.ReLU(), F.mse_loss, (torch.ones(1), torch.ones(1)), "no parameter that requires a gradient"),
        (
            nn.Linear(1, 1),
            torch.sub,
            (torch.ones(2, 1), torch.ones(2, 1)),
            "loss returns Tensor of shape (2, 1); expected a tensor of one element",
        ),
        (
            torch.jit.script(nn.Linear(1, 1)),
            F.mse_loss,
            (torch.ones(1), torch.ones(1)),
            "module is a RecursiveScriptModule, which torch.export cannot trace; expected the module or function that",
        ),
        (
            nn.Linear(1, 1),
            lambda o: o.sum(),
            (torch.ones(1), torch.ones(1)),
            "loss does not take the targets of the batch, target: too many positional arguments; expected none",
        ),
        (nn.Linear(1, 1, device="meta"), F.mse_loss, (torch.ones(1), torch.ones(1)), "is on the device meta, without"),
        (nn.Linear(1, 1), lambda o, t: t.sum(), (torch.ones(1), torch.ones(1)), "depends on no trainable parameter"),
        (nn.Linear(2, 1), F.mse_loss, (torch.ones(1), torch.ones(1)), "fails on the batch"),
    ],
)
def test_arguments_of_a_wrong_kind(module: Any, loss: Any, batch: Any, message: str) -> None:
    with pytest.raises(ExportError) as error:
        export_training_step(module, loss, batch)
    assert message in one_line(error)


@pytest.mark.parametrize(
    "noise, name",
    [(lambda x: torch.binomial(torch.ones_like(x), x.clamp(max=1.0)), "binomial"), (torch.poisson, "poisson")],
)
def test_random_numbers_that_no_seed_determines_are_refused(noise: Callable[..., Tensor], name: str) -> None:
    class Noisy(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + noise(x.exp()))

    with pytest.raises(ExportError, match=f"draws random numbers by aten.{name}.*; expected dropout, torch.rand"):
        export_training_step(Noisy(), F.cross_entropy, (torch.randn(4, 6), classes(4)))


def test_an_operator_without_a_translation_is_named() -> None:
    with pytest.raises(ExportError) as error:
        export_training_step(
            nn.Linear(3, 4),
            lambda output, t: torch.linalg.eigvals(output[:, :4]).real.sum() + t.sum(),
            (torch.randn(4, 3), torch.randn(4)),
        )
    assert "aten.linalg_eig" in one_line(error) and "has no ONNX translation" in one_line(error)


def test_a_backward_pass_that_fails_in_torch_is_refused() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        grown = output.exp()
        value = (grown * target).sum()
        grown.add_(1)
        return value

    with pytest.raises(ExportError, match="own backward pass fails: one of the variables needed"):
        export_training_step(nn.Linear(3, 3), loss, (torch.randn(3, 3), torch.ones(())))


def test_loops_that_depend_on_values_are_refused() -> None:
    class Doubling(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            while bool(x.sum() < 100):
                x = x * 2
            return super().forward(x)

    with pytest.raises(ExportError) as error:
        export_training_step(Doubling(), F.cross_entropy, (torch.ones(4, 6), classes(4)))
    assert "torch.export cannot trace the step: the module decides by the value of a tensor" in one_line(error)


@pytest.mark.parametrize("read", [lambda outside: outside, lambda outside: outside[:], lambda outside: outside.add_(0)])
def test_a_trainable_tensor_outside_the_module_is_refused(read: Callable[[Tensor], Tensor]) -> None:
    outside = torch.ones(5)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output * read(outside).requires_grad_(), target)

    with pytest.raises(ExportError, match=r"trainable tensor of shape \(5,\) that is no parameter"):
        export_training_step(Mlp(), loss, (torch.randn(4, 6), classes(4)))


def test_views_of_one_tensor_are_a_batch() -> None:
    torch.manual_seed(0)
    module = Language()
    tokens = torch.randint(0, 5, (3, 8))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    shapes = {0: "batch", 1: "length"}, {0: "batch", 1: "length"}
    step = export_training_step(module, tokens_loss, (tokens[:, :-1], tokens[:, 1:]), optimizer, dynamic_shapes=shapes)
    assert step.evaluation_model is not None


def test_a_step_that_changes_a_parameter_is_refused() -> None:
    class Clamping(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.first.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    with pytest.raises(ExportError) as error:
        export_training_step(Clamping(), F.cross_entropy, (torch.ones(4, 6), classes(4)))
    text = one_line(error)
    assert "changes parameter 'first.weight' in place, in " in text
    assert "Clamping.forward (test_export_training_step.py:" in text and "change it between steps" in text


def test_a_step_may_change_its_inputs() -> None:
    class Scaling(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(0.5))

    batch = torch.ones(4, 6), classes(4)
    step = export_training_step(Scaling(), F.cross_entropy, batch, fuse=False)
    assert [value.name for value in step.model.graph.output][1:] == [f"{name}.grad" for name in step.parameters]
    assert torch.equal(batch[0], torch.ones(4, 6))


def test_a_dimension_that_the_step_fixes_is_refused() -> None:
    batch = torch.ones(4, 6), classes(4)
    with pytest.raises(ExportError) as error:
        export_training_step(
            Mlp(), lambda o, t: F.cross_entropy(o.view(4, 5), t), batch, dynamic_shapes=({0: "n"}, {0: "n"})
        )
    assert "axis 0 of 'x' has size 4" in one_line(error)


@pytest.mark.parametrize("fuse", (True, False))
def test_gradients_of_weights_of_convolutions_are_an_operator(fuse: bool) -> None:
    step = export_training_step(Cnn(), F.cross_entropy, (images(4), classes(4)), fuse=fuse)
    found = [node.op_type for node in step.model.graph.node if node.domain == "aclnn"]
    assert found.count("ConvolutionBackward") == (2 if fuse else 0)
    assert fuse or not found
    # They are in the report, whoever put them in.
    assert not fuse or "2 ConvolutionBackward" in str(step.report)


@pytest.mark.parametrize("fuse", (True, False))
def test_gradients_of_embeddings_are_an_operator(fuse: bool) -> None:
    module = nn.Sequential(nn.Embedding(50, 6, padding_idx=3, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(24, 5))
    tokens = torch.tensor([[1, 3, 3, 49], [1, 1, 7, 0], [3, 2, 1, 0]])
    step = export_training_step(module, F.cross_entropy, (tokens, classes(3)), fuse=fuse)
    found = [node for node in step.model.graph.node if node.op_type == "EmbeddingDenseBackward"]
    assert len(found) == fuse
    values = {attribute.name: attribute.i for node in found for attribute in node.attribute}
    assert not found or values == {"num_weights": 50, "padding_idx": 3, "scale_grad_by_freq": 1}


class Pooled(nn.Module):
    """Poolings of one to three dimensions, and one whose indices are read."""

    def __init__(self, indices: bool = False) -> None:
        super().__init__()
        self.indices = indices
        self.body = nn.Conv2d(2, 3, 3, padding=1)
        self.head = nn.Linear(17, 5)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.body(x)
        pooled, indices = F.max_pool2d(maps, 3, 2, 1, return_indices=True)
        if self.indices:
            read: Tensor = self.head((pooled + 0.01 * indices).flatten(1)[:, :17])
            return read
        planes = F.max_pool1d(maps.flatten(2), 3, ceil_mode=True)
        volume = F.max_pool3d(pooled.unsqueeze(1), (2, 1, 2))
        whole: Tensor = self.head(torch.cat([volume.flatten(1), planes[:, :, :3].flatten(1)], 1))
        return whole


@pytest.mark.parametrize("fuse", (True, False))
def test_gradients_of_maximum_pooling_are_an_operator_without_indices(fuse: bool) -> None:
    torch.manual_seed(0)
    step = export_training_step(Pooled(), F.cross_entropy, (torch.randn(4, 2, 8, 8), classes(4)), fuse=fuse)
    nodes = [node for node in step.model.graph.node if node.op_type in ("MaxPool", "MaxPoolBackward")]
    found = [node for node in nodes if node.op_type == "MaxPoolBackward"]
    assert len(found) == (3 if fuse else 0)
    poolings = [node for node in nodes if node.op_type == "MaxPool"]
    assert not fuse or [len(node.output) for node in poolings] == [1, 1, 1]


def test_indices_that_the_module_reads_serve_the_gradient_too() -> None:
    torch.manual_seed(0)
    step = export_training_step(Pooled(indices=True), F.cross_entropy, (torch.randn(4, 2, 8, 8), classes(4)))
    counts = Counter(node.op_type for node in step.model.graph.node)
    assert not counts["MaxPoolBackward"]
    assert any(len(node.output) == 2 for node in step.model.graph.node if node.op_type == "MaxPool")


def test_a_wrong_export_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a translation were wrong: the gradient of every convolution's weight comes out doubled."""
    right = rules.table()["", "Conv"]
    assert right.rule is not None

    def wrong(call: rules.Call) -> Iterator[rules.Gradient]:
        assert right.rule is not None
        for index, gradient in enumerate(right.rule(call)):
            written = gradient() if callable(gradient) else gradient
            yield written * 2.0 if index == 1 and written is not None else written

    monkeypatch.setitem(vars(rules)["_TABLE"], ("", "Conv"), dataclasses.replace(right, rule=wrong))
    with pytest.raises(
        ExportError, match=r"output 'body\.3\.weight\.grad' of the exported model differs .* by \d"
    ) as error:
        module = Cnn()
        module.body[0].requires_grad_(False)
        export_training_step(module, F.cross_entropy, (images(4), classes(4)))
    one_line(error)


@pytest.mark.parametrize("package", ["torch", "onnxscript"])
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ExportError, match=f"{package} is not installed; expected what gradfuse.torch. installs"):
        export_training_step(Mlp(), F.cross_entropy, (torch.randn(4, 6), classes(4)))


def test_without_onnxruntime_the_user_is_told_that_nothing_was_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.warns(UserWarning, match="onnxruntime is not installed, so the model was not compared"):
        export_training_step(Mlp(), F.cross_entropy, (torch.randn(4, 6), classes(4)), fuse=False)


@pytest.mark.parametrize(
    "mode, padding",
    [
        ("bilinear", "zeros"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("bilinear", "border"), ("bilinear", "reflection"), ("nearest", "zeros"))
        ),
    ],
)
def test_grids_of_samples(mode: str, padding: str) -> None:
    class Warped(nn.Module):
        """Samples an image at points that it learns, some of which lie outside."""

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(2, 3, 1)
            self.shift = nn.Parameter(torch.tensor([0.37, -0.81]))

        def forward(self, image: Tensor) -> Tensor:
            points = image.flatten(2)[:, :, :6].transpose(1, 2).reshape(-1, 2, 3, 2) + self.shift
            sampled = F.grid_sample(self.first(image), points, mode=mode, padding_mode=padding, align_corners=False)
            return sampled.flatten(1)[:, :5]

    torch.manual_seed(0)
    module, batch, other = Warped(), (torch.randn(2, 2, 5, 4), classes(2)), (torch.randn(3, 2, 5, 4), classes(3))
    step = export_training_step(module, F.cross_entropy, batch, dynamic_shapes=({0: "n"}, {0: "n"}))
    assert_step(step, module, F.cross_entropy, other)

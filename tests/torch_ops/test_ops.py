"""torch.ops.aclnn: the operators in PyTorch, against PyTorch's own in float64."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from backends import ONNX_TYPES
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import SAMPLES, as_tuple, attention
from operators.cross_entropy_loss_grad import cross_entropy_loss_grad
from operators.mse_loss_backward import mse_loss_backward
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

import gradfuse.torch
from gradfuse.custom_ops import OPS, Operator
from gradfuse.custom_ops.operator import type_string
from gradfuse.testing import assert_gradients_close

aclnn = torch.ops.aclnn
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = [
    (name, dtype) for name, op in OPS.items() for dtype in ONNX_TYPES if type_string(ONNX_TYPES[dtype]) in op.types
]
each_operator = pytest.mark.parametrize("operator", OPS.values(), ids=lambda operator: operator.stem)


def op_of(name: str) -> Any:
    return getattr(aclnn, OPS[name].stem)


@each_operator
def test_the_schema_is_that_of_the_table(operator: Operator) -> None:
    schema = op_of(operator.name).default._schema
    found = [(a.name, str(a.type), a.default_value if a.has_default_value() else "required") for a in schema.arguments]
    # Only what no required one follows can be left out.
    last = max(index for index, input in enumerate(operator.inputs) if not input.optional)
    inputs = [
        (input.name, "Optional[Tensor]" if input.optional else "Tensor", None if index > last else "required")
        for index, input in enumerate(operator.inputs)
    ]
    assert found[: len(inputs)] == inputs
    for attribute, (name, kind, default) in zip(operator.attributes, found[len(inputs) :], strict=True):
        kinds = {int: ("int", "bool"), float: ("float",), str: ("str",), tuple: ("List[int]", "List[bool]")}
        kinds_of_default = kinds[type(attribute.default)]
        assert (name, tuple(default) if isinstance(default, list) else default) == (attribute.name, attribute.default)
        assert kind in kinds_of_default
    assert [str(result.type) for result in schema.returns] == ["Tensor"] * len(operator.outputs)


@pytest.mark.parametrize("name, dtype", DTYPES, ids=str)
@pytest.mark.sampled(every=2)
def test_opcheck(name: str, dtype: torch.dtype) -> None:
    """Schema, fake kernel and autograd registration, and the same from AOTAutograd with dynamic shapes."""
    torch.manual_seed(0)
    sample = SAMPLES[name].strided(random.Random(0), dtype)
    inputs = list(sample.inputs)
    if OPS[name].torch_op.backward is not None:
        inputs[0] = inputs[0].requires_grad_() if inputs[0] is not None else None
    torch.library.opcheck(op_of(name).default, tuple(inputs), dict(sample.attributes))


@pytest.mark.parametrize("name", OPS)
@given(seed=st.integers(0, 2**31), data=st.data())
@settings(max_examples=20)
def test_values_for_any_strides(name: str, seed: int, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(SAMPLES[name].dtypes))
    torch.manual_seed(seed)
    sample = SAMPLES[name].strided(random.Random(seed), dtype)
    outputs = as_tuple(op_of(name)(*sample.inputs, **sample.attributes))
    assert all(output.is_contiguous() for output in outputs)
    SAMPLES[name].assert_close(outputs, sample, dtype)


@pytest.mark.parametrize("name", OPS)
def test_empty_tensors(name: str) -> None:
    for sample, shapes in SAMPLES[name].empty:
        outputs = as_tuple(op_of(name)(*sample.inputs, **sample.attributes))
        assert [tuple(output.shape) for output in outputs] == list(shapes)
        assert all(not output.any() for output in outputs)


@pytest.mark.parametrize("name", OPS)
def test_typical_attributes_reach_the_kernel(name: str) -> None:
    for dtype in SAMPLES[name].dtypes:
        for sample in SAMPLES[name].all_typical(dtype):
            SAMPLES[name].assert_close(as_tuple(op_of(name)(*sample.inputs, **sample.attributes)), sample, dtype)


def test_attributes_reach_the_kernel() -> None:
    """Each attribute that is accepted with more than one value, against PyTorch."""
    torch.manual_seed(0)
    one, x, y = torch.ones(()), torch.randn(5), torch.randn(5)
    for reduction in range(3):
        native, exact = (
            mse_loss_backward(one, x, y, reduction=reduction, dtype=dtype) for dtype in (x.dtype, torch.float64)
        )
        assert_gradients_close(aclnn.mse_loss_backward(one, x, y, reduction), native, exact, x.dtype)
    log_prob, target = torch.randn(5, 4).log_softmax(1), torch.tensor([0, 1, 2, 3, 2])
    options: dict[str, Any] = {"reduction": "sum", "ignore_index": 2, "label_smoothing": 0.25}
    native, exact = (
        cross_entropy_loss_grad(one, log_prob, target, **options, dtype=dtype) for dtype in (x.dtype, torch.float64)
    )
    assert_gradients_close(aclnn.cross_entropy_loss_grad(one, log_prob, target, **options), native, exact, x.dtype)
    log_probs, labels = torch.randn(2, 1, 4).log_softmax(2), torch.tensor([[1, 0, 2]])
    lengths = (torch.tensor([2]), torch.tensor([3]))  # more labels than steps: no alignment
    for zero_infinity in (False, True):
        loss, alpha = aclnn.ctc_loss(log_probs, labels, *lengths, blank=3, zero_infinity=zero_infinity)
        assert loss.item() == torch.inf
        grad = aclnn.ctc_loss_backward(torch.ones(1), log_probs, labels, *lengths, loss, alpha, 3, zero_infinity)
        assert bool((grad == 0).all() if zero_infinity else grad.isnan().all())


PROBS, ROWS = torch.zeros(4, 2, 3), torch.zeros(4, 2)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: aclnn.mse_loss_backward(ROWS, ROWS.half(), ROWS),
            "mse_loss_backward: self is float16; expected float32",
        ),
        (lambda: aclnn.mse_loss_backward(ROWS, ROWS, torch.zeros(3)), "mse_loss_backward: grad_output is float32(4,2)"),
        (lambda: aclnn.mse_loss_backward(ROWS, ROWS, ROWS, 3), "mse_loss_backward: reduction is 3; expected "),
        (
            lambda: aclnn.mse_loss_backward(ROWS, ROWS.to(torch.complex64), ROWS),
            "mse_loss_backward: self is complex64(4,2); expected one of float32, ",
        ),
        (
            lambda: aclnn.cross_entropy_loss_grad(torch.ones(()), ROWS, torch.tensor([0, 1, 2, 0])),
            "cross_entropy_loss_grad: target[2] is 2; expected ",
        ),
        (
            lambda: aclnn.cross_entropy_loss_grad(torch.ones(()), ROWS, torch.zeros(4).long(), reduction="median"),
            "cross_entropy_loss_grad: reduction is 'median'; expected ",
        ),
        (lambda: aclnn.scaled_masked_softmax_backward(ROWS, ROWS), "scaled_masked_softmax_backward: grad_output is "),
        (lambda: aclnn.grouped_bias_add_grad(ROWS[0]), "grouped_bias_add_grad: grad_y is float32(2); expected "),
        (
            lambda: aclnn.grouped_bias_add_grad(ROWS, torch.tensor([3, 2, 4])),
            "grouped_bias_add_grad: group_idx[1] is 2",
        ),
        (
            lambda: aclnn.ctc_loss(PROBS, torch.ones(2, 1).long(), torch.tensor([4, 4]), torch.tensor([1, 2**60])),
            f"ctc_loss: target_lengths[1] is {2**60}; expected a length in [0, 1]",
        ),
        (
            lambda: aclnn.ctc_loss(PROBS, torch.ones(2, 1).long(), torch.tensor([4.0, 4.0]), torch.tensor([1, 1])),
            "ctc_loss: input_lengths is float32(2); expected int64 of shape (N)",
        ),
        (
            lambda: aclnn.ctc_loss(ROWS, torch.ones(2, 1).long(), torch.tensor([4, 4]), torch.tensor([1, 1])),
            "ctc_loss: log_probs is float32(4,2); expected 3 dimensions",
        ),
    ],
)
def test_wrong_arguments_are_refused_by_the_library(call: Any, message: str) -> None:
    with pytest.raises(gradfuse.ArgumentError) as caught:
        call()
    assert str(caught.value).startswith(f"aclnn::{message}")
    assert "\n" not in str(caught.value)


@each_operator
def test_tensors_that_are_missing_or_on_other_devices_are_refused(operator: Operator) -> None:
    """Meta tensors among real ones too, for which the dispatcher takes the shapes that the operator gives."""
    sample = SAMPLES[operator.name].strided(random.Random(0), torch.float32)
    inputs, attributes = list(sample.inputs), sample.attributes
    op, first = op_of(operator.name), operator.inputs[0].name
    for index, (described, value) in enumerate(zip(operator.inputs, inputs, strict=False)):
        if value is None:
            continue
        if not described.optional:
            # Without any tensor PyTorch's dispatcher looks for no kernel.
            error: type[Exception] = gradfuse.ArgumentError if len(inputs) > 1 else NotImplementedError
            message = rf": {described.name} is None; expected a tensor$|no tensor arguments"
            with pytest.raises(error, match=message):
                op(*inputs[:index], None, *inputs[index + 1 :], **attributes)
        if index > 0 and described.type != "L":
            with pytest.raises(
                gradfuse.ArgumentError, match=rf": {described.name} is on meta; expected cpu, as {first}$"
            ):
                op(*inputs[:index], value.to("meta"), *inputs[index + 1 :], **attributes)


def test_text_ends_at_no_null_character() -> None:
    inputs = SAMPLES["CrossEntropyLossGrad"].strided(random.Random(0), torch.float32).inputs
    with pytest.raises(gradfuse.ArgumentError, match=r"reduction is .*; expected text without null characters"):
        aclnn.cross_entropy_loss_grad(*inputs, reduction="mean\0")


def test_threads_have_their_own_results_and_errors() -> None:
    def work(seed: int) -> bool:
        generator = torch.Generator().manual_seed(seed)
        x, y = torch.randn(2, 50, generator=generator)
        expected = aclnn.mse_loss_backward(torch.ones(()), x.double().float(), y)
        for _ in range(40):
            assert torch.equal(aclnn.mse_loss_backward(torch.ones(()), x, y), expected)
            with pytest.raises(gradfuse.ArgumentError, match=rf"self float32\({seed + 51}\)"):
                aclnn.mse_loss_backward(x, torch.zeros(seed + 51), y)
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(16)))


@each_operator
def test_a_missing_derivative_is_an_error(operator: Operator) -> None:
    torch.manual_seed(0)
    sample = SAMPLES[operator.name].strided(random.Random(0), torch.float32)
    inputs, attributes = list(sample.inputs), sample.attributes
    assert inputs[0] is not None
    leaf = inputs[0].clone().requires_grad_()
    (out, *_) = as_tuple(op_of(operator.name)(leaf, *inputs[1:], **attributes))
    if operator.torch_op.backward is not None:
        (out,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^derivative for aclnn::\w+ is not implemented$"):
        torch.autograd.grad(out.sum(), leaf)


def test_attention_has_the_derivative_of_pytorchs() -> None:
    torch.manual_seed(0)
    sample = attention.arguments((2, 4, 2, 9, 12, 8, 8), torch.float32, mask="shown", mask_shape=(9, 12), causal=2)
    query, key, value = (one.clone().requires_grad_() for one in sample.inputs[:3] if one is not None)
    output, logsumexp = aclnn.scaled_dot_product_attention(query, key, value, sample.inputs[3], causal=2)
    assert not logsumexp.requires_grad
    grad = torch.randn(output.shape)
    found = torch.autograd.grad(output, (query, key, value), grad)
    given = [grad, *sample.inputs[:3], output.detach(), logsumexp, sample.inputs[3]]
    terms = attention.terms(given, sample.attributes, grads=True)
    native, exact = (attention.by_autograd(sample, grad, dtype) for dtype in (torch.float32, torch.float64))
    for triple in zip([output, *found], native, exact, strict=True):
        assert_gradients_close(*triple, torch.float32, terms=terms)


def test_what_torch_library_has_no_derivatives_for_is_an_error() -> None:
    def gradient(x: Tensor) -> Tensor:
        result: Tensor = aclnn.mse_loss_backward(torch.ones(()), x, torch.zeros(3))
        return result

    with pytest.raises(NotImplementedError, match=r"^forward-mode derivative for aclnn::mse_loss_backward is not"):
        torch.func.jvp(gradient, (torch.ones(3),), (torch.ones(3),))
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: gradient(x).sum())(torch.ones(3))


@pytest.mark.parametrize("name", OPS)
def test_vmap_calls_once_for_each_element(name: str) -> None:
    torch.manual_seed(0)
    sample = SAMPLES[name].strided(random.Random(0), torch.float32)
    inputs, attributes = list(sample.inputs), sample.attributes
    # The first two inputs of float type vary, in their last dimension; the others are the same for all.
    varied = [i for i, value in enumerate(inputs) if value is not None and value.is_floating_point()][:2]
    elements = [[v * (k + 1) if v is not None and i in varied else v for i, v in enumerate(inputs)] for k in range(3)]
    batched: Any = [torch.stack(v, -1) if i in varied else v[0] for i, v in enumerate(zip(*elements, strict=True))]
    dims = tuple(-1 if i in varied else None for i in range(len(inputs)))

    def call(*args: Tensor | None) -> tuple[Tensor, ...]:
        return as_tuple(op_of(name)(*args, **attributes))

    outputs = torch.vmap(call, dims)(*batched)
    for output, *expected in zip(outputs, *(call(*element) for element in elements), strict=True):
        assert torch.equal(output, torch.stack(expected))


def test_vmap_over_items_of_different_lengths() -> None:
    torch.manual_seed(0)
    log_probs, targets = torch.randn(6, 3, 4).log_softmax(2), torch.randint(1, 4, (3, 2))
    input_lengths, target_lengths = torch.tensor([6, 5, 4]), torch.tensor([1, 2, 0])
    loss, alpha = aclnn.ctc_loss(log_probs, targets, input_lengths, target_lengths)
    each = torch.vmap(
        lambda lp, *rest: aclnn.ctc_loss(lp.unsqueeze(1), *(value.unsqueeze(0) for value in rest)), (1, 0, 0, 0)
    )
    losses, alphas = each(log_probs, targets, input_lengths, target_lengths)
    assert torch.equal(losses[:, 0], loss)
    assert torch.equal(alphas[:, 0], alpha)


def test_vmap_over_nothing_is_refused() -> None:
    with pytest.raises(gradfuse.ArgumentError, match="of size 0; expected 1 or more"):
        torch.vmap(aclnn.mse_loss_backward)(*[torch.zeros(0, 2)] * 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_computes_the_loss_in_float32_as_pytorch_does(dtype: torch.dtype) -> None:
    log_probs = torch.randn(6, 2, 4).log_softmax(2).to(dtype)
    rest = (torch.randint(1, 4, (2, 2)), torch.tensor([6, 6]), torch.tensor([2, 2]))
    assert aclnn.ctc_loss(log_probs, *rest)[0].dtype == dtype
    with torch.autocast("cpu", dtype):
        assert aclnn.ctc_loss(log_probs, *rest)[0].dtype == torch.float32
        assert aclnn.mse_loss_backward(*[log_probs] * 3).dtype == dtype


def operators_together(scores: Tensor, labels: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
    """Operators among others, and on each other's results: scores (T, N, C), labels (N, S) and their lengths (N)."""
    steps, items, classes = scores.shape
    one = scores.new_ones(())
    log_probs = scores.log_softmax(2)
    input_lengths = lengths.new_full((items,), steps)
    loss, alpha = aclnn.ctc_loss(log_probs, labels, input_lengths, lengths)
    ends = torch.arange(1, items + 1) * steps
    return (
        loss,
        alpha,
        aclnn.ctc_loss_backward(one.expand(items), log_probs, labels, input_lengths, lengths, loss, alpha),
        aclnn.mse_loss_backward(one, scores, scores[:1]),
        aclnn.cross_entropy_loss_grad(one, log_probs[0], labels[:, 0]),
        aclnn.scaled_masked_softmax_backward(scores[None], scores.softmax(2)[None], scale=0.5),
        aclnn.grouped_bias_add_grad(scores.transpose(0, 1)),
        aclnn.grouped_bias_add_grad(scores.transpose(0, 1).reshape(-1, classes), ends),
    )


def batch(steps: int, items: int, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(steps)
    labels = torch.randint(1, classes, (items, 2), generator=generator)
    return torch.randn(steps, items, classes, generator=generator), labels, torch.arange(items) % 2 + 1


SIZES = [(5, 3, 4), (7, 6, 9), (9, 4, 5)]


def test_compiled_once_for_all_sizes() -> None:
    """One graph, without a break, and not compiled again for other sizes or lengths."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    compiled = torch.compile(operators_together, fullgraph=True, dynamic=True, backend=backend)
    for size in SIZES:
        for output, expected in zip(compiled(*batch(*size)), operators_together(*batch(*size)), strict=True):
            assert torch.equal(output, expected)
    assert len(graphs) == 1


def test_compiled_with_graph_breaks() -> None:
    """Without fullgraph, torch.compile leaves ctc_loss to Python; it must not trace into our calls of C."""
    torch._dynamo.reset()
    compiled = torch.compile(operators_together, backend="eager")
    for output, expected in zip(compiled(*batch(5, 3, 4)), operators_together(*batch(5, 3, 4)), strict=True):
        assert torch.equal(output, expected)


def test_exported() -> None:
    class Module(torch.nn.Module):
        forward = staticmethod(operators_together)

    steps, items, classes = torch.export.Dim("T"), torch.export.Dim("N"), torch.export.Dim("C")
    shapes = ({0: steps, 1: items, 2: classes}, {0: items}, {0: items})
    program = torch.export.export(Module(), batch(5, 3, 4), dynamic_shapes=shapes)
    for size in SIZES:
        for output, expected in zip(program.module()(*batch(*size)), operators_together(*batch(*size)), strict=True):
            assert torch.equal(output, expected)


@each_operator
def test_each_is_compiled_for_all_sizes(operator: Operator) -> None:
    """Without a graph break, and not again for every size."""
    samples = [SAMPLES[operator.name].sized(size, torch.float32) for size in (6, 8, 11)]
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    def call(*inputs: Tensor | None) -> tuple[Tensor, ...]:
        return as_tuple(op_of(operator.name)(*inputs, **samples[0].attributes))

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=backend)
    for sample in samples:
        for output, expected in zip(compiled(*sample.inputs), call(*sample.inputs), strict=True):
            assert torch.equal(output, expected)
    assert len(graphs) < len(samples)


@each_operator
def test_each_is_exported_for_all_sizes(operator: Operator) -> None:
    samples = [SAMPLES[operator.name].sized(size, torch.float32) for size in (6, 8, 11)]

    class Module(torch.nn.Module):
        def forward(self, *inputs: Tensor | None) -> tuple[Tensor, ...]:
            return as_tuple(op_of(operator.name)(*inputs, **samples[0].attributes))

    def dims_of(value: Tensor | None) -> Any:
        return None if value is None else dict.fromkeys(range(value.dim()), torch.export.Dim.AUTO)

    arguments = tuple(samples[0].inputs)
    program = torch.export.export(Module(), arguments, dynamic_shapes=(tuple(map(dims_of, arguments)),))
    assert f"aclnn.{operator.stem}.default" in {str(node.target) for node in program.graph.nodes}
    for sample in samples:
        for output, expected in zip(program.module()(*sample.inputs), Module()(*sample.inputs), strict=True):
            assert torch.equal(output, expected)

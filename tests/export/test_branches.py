"""What Python code asks of tensors: checks do not stop an export, what chooses between computations is refused."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training_models import autograd, run

from gradfuse import ExportError, export_training_step
from gradfuse.export import onnx_model
from gradfuse.testing import assert_gradients_close

DYNAMIC = ({0: "batch"},), ({0: "batch"},)


class Settings:
    def __init__(self) -> None:
        self.encoder_layerdrop = 0.1
        self.apply_spec_augment = True
        self.hidden_size = 6


class Asking(nn.Module):
    """A linear layer ahead of which code asks something of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.config = Settings()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.asked(x))  # type: ignore[no-any-return]

    def asked(self, x: Tensor) -> Tensor:
        return x


class Checking(Asking):
    """Checks of the values, one of a distribution's arguments, one for infinities, and a length from `len`."""

    def asked(self, x: Tensor) -> Tensor:
        assert torch.all(x < 1000.0).item(), "too large"
        torch._check_tensor_all_with(ValueError, x > -1000.0, lambda: "too small")  # type: ignore[no-untyped-call]
        if x.abs().max() > 1000.0:
            raise ValueError(f"too large: {x}")
        hidden = torch.distributions.Normal(x, x.exp()).mean
        if not torch.isfinite(hidden).all():
            hidden = hidden.clamp(-1.0, 1.0)
        return hidden + torch.arange(len(hidden)).unsqueeze(1)


class CheckingLater(Asking):
    """A check that raises after it has computed something else, and when it is called a second time alone."""

    def asked(self, x: Tensor) -> Tensor:
        return self.checked(self.checked(x, 0), 1)

    def checked(self, x: Tensor, strict: int) -> Tensor:
        is_large = bool(x.abs().max() > 1000.0)
        doubled = x * 2.0
        if is_large and strict:
            raise ValueError("too large")
        return doubled


class CheckingCovariances(Asking):
    """torch's own check that a covariance is symmetric and positive, as of Gaussian processes."""

    def asked(self, x: Tensor) -> Tensor:
        covariance = torch.eye(2) * (x[:, :1, None].square() + 1.0)
        of_pairs = torch.distributions.MultivariateNormal(x[:, :2], covariance)
        likely: Tensor = of_pairs.log_prob(x[:, 2:4])  # type: ignore[no-untyped-call]
        return x + likely.unsqueeze(1)


def _batch(items: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    return (torch.randn(items, 6),), (torch.arange(items) % 5,)


def _compared(module: nn.Module, batch: Any, dynamic_shapes: Any = DYNAMIC, other: Any = None) -> Any:
    """Export a step with one batch, and compare it with PyTorch on another."""
    step = export_training_step(module, F.cross_entropy, batch, dynamic_shapes=dynamic_shapes)
    batch = other or _batch(7)
    results = run(step, batch, kernels=False)
    native, exact = (autograd(module, F.cross_entropy, batch, dtype, step) for dtype in (torch.float32, torch.float64))
    for name, result in results.items():
        terms = 8 * max(np.abs(array).max() for array in exact.values())
        assert_gradients_close(result, native[name], exact[name], result.dtype, terms=terms)
    return step


@pytest.mark.parametrize("module", [Checking, CheckingLater, CheckingCovariances])
def test_checks_and_lengths_do_not_stop_an_export(module: type[nn.Module]) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _compared(module(), _batch(4))
    told = [one for one in caught if "whether numbers are finite in Checking.asked" in str(one.message)]
    assert len(told) == (module is Checking)


class Choosing(Asking):
    def asked(self, x: Tensor) -> Tensor:
        return x.relu() if x.sum() > 0 else x.sigmoid()


class Recovering(Asking):
    """A raise that is caught chooses between computations."""

    def asked(self, x: Tensor) -> Tensor:
        try:
            if x.sum() > 0:
                raise ValueError
        except ValueError:
            return x.relu()
        return x.sigmoid()


class Failing(Asking):
    """The other way fails as well, but not by a check."""

    def asked(self, x: Tensor) -> Tensor:
        if x.isnan().sum() == 0:
            return x.relu()
        return x @ x.new_ones(5, 5)


@pytest.mark.parametrize("module", [Recovering(), Failing()])
def test_choices_by_value_are_refused_with_their_place(module: nn.Module) -> None:
    torch.manual_seed(0)
    with pytest.raises(ExportError, match=r"value of a tensor.*asked \(test_branches.py:\d+\)"):
        export_training_step(module, F.cross_entropy, _batch(4))


def test_both_sides_of_a_condition_export() -> None:
    torch.manual_seed(0)
    (x,), y = _batch(4)
    for side in (x.abs(), -x.abs()):
        _compared(Choosing(), ((side,), y), other=((-side,), y))


class Skipping(Asking):
    def asked(self, x: Tensor) -> Tensor:
        states = [x]
        if torch.rand([]) < 0.5:
            states.insert(0, x.relu())
        return torch.stack(states).sum(0)


class Masking(Asking):
    def asked(self, x: Tensor) -> Tensor:
        return x * torch.from_numpy(np.random.rand(6) < 0.5)


@pytest.mark.parametrize("module, text", [(Skipping(), "by a random number"), (Masking(), "by numpy")])
def test_what_chance_decides_is_refused_with_the_settings_that_turn_it_off(module: nn.Module, text: str) -> None:
    settings = r"\(make the model with encoder_layerdrop=0.0, apply_spec_augment=False\)$"
    with pytest.raises(ExportError, match=f"{text}.*{settings}"):
        export_training_step(module, F.cross_entropy, _batch(4))


class Selecting(nn.Module):
    """Cross entropy of the items that have a label."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        rows = (labels >= 0).nonzero()
        if rows.size(0) > 0:
            return F.cross_entropy(logits.gather(0, rows.expand(-1, logits.size(1))), labels.masked_select(labels >= 0))
        return logits.sum() * 0.0


class Masked(nn.Module):
    """A loss of what a mask selects, from several tensors."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        mask = (labels >= 0).unsqueeze(1).expand_as(logits)
        wanted = labels.unsqueeze(1).expand_as(logits).to(logits.dtype)
        absolute = F.l1_loss(logits.masked_select(mask), wanted.masked_select(mask))
        return absolute + F.mse_loss(logits[mask], wanted[mask])


def test_what_one_mask_selects_has_one_size() -> None:
    torch.manual_seed(0)
    module, loss = Asking(), Masked()
    batch = (torch.randn(4, 6),), (torch.tensor([1, -1, 3, -1]),)
    step = export_training_step(module, loss, batch, dynamic_shapes=DYNAMIC)
    other = (torch.randn(7, 6),), (torch.tensor([1, -1, 3, -1, 0, 2, 2]),)
    results = run(step, other, kernels=False)
    native, exact = (autograd(module, loss, other, dtype, step) for dtype in (torch.float32, torch.float64))
    for name, result in results.items():
        assert_gradients_close(result, native[name], exact[name], np.float32, terms=8.0)


class Heads(Asking):
    """Views of what attention gives, which lies in another order than the traced tensor did."""

    def asked(self, x: Tensor) -> Tensor:
        heads = x.view(-1, 1, 3, 2).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads)
        return mixed.transpose(1, 2).view(-1, 1, 1, 6).view(-1, 6)


class Splitting(Asking):
    """Parts whose sizes are those of the batch."""

    def asked(self, x: Tensor) -> Tensor:
        first, second = torch.split(torch.cat([x, x * x]), [x.shape[0], x.shape[0]])
        return first * second.cos()


class Halving(Asking):
    """Sizes that are computed by tensors, in several ways."""

    def asked(self, x: Tensor) -> Tensor:
        half: Any = torch.div(x.shape[1], 2, rounding_mode="trunc")
        shape: Any = torch.as_tensor(x.shape)
        rows, columns = (shape // torch.tensor([1, 2])).tolist()
        first, _ = shape
        doubled = x.view(rows, half, 2) * torch.arange(1.0, half + 1).view(-1, 1)
        moved: Tensor = doubled.view(first, -1) + torch.ones(columns).sum() * shape.prod()
        return moved


class Contrasting(Asking):
    """Similarities of pairs chosen by masks of constants, as in contrastive learning: by comparison, changed in place,
    and like another tensor."""

    def asked(self, x: Tensor) -> Tensor:
        images = torch.cat([torch.arange(2), torch.arange(2)])
        same = (images[:, None] == images[None]).float()
        itself = torch.eye(4, dtype=torch.bool)
        similar = x @ x.T
        same, others = same[~itself].view(4, -1), similar[~itself].view(4, -1)
        positive, negative = others[same.bool()].view(4, -1), others[~same.bool()].view(4, -1)
        apart = torch.ones(4, 4, dtype=torch.bool).fill_diagonal_(0)
        apart[0, 1] = False
        apart[1, 0] = False
        chosen = similar.masked_select((torch.ones_like(similar) - torch.eye(4)).bool()).view(4, -1)
        rest = similar[apart].sum() + similar[1:3, apart[0]].view(2, -1).mean()
        return torch.cat([positive, negative, chosen[:, :2], (positive * rest)], 1)


def test_masks_of_constants_choose_a_known_number() -> None:
    torch.manual_seed(0)
    _compared(Contrasting(), _batch(4), None, _batch(4))


class Writing(Asking):
    """Writes into views of tensors of constants, and into masks that another tensor has the shape of."""

    def asked(self, x: Tensor) -> Tensor:
        kept = torch.zeros(4, 6)
        for row in range(4):
            kept[row].add_(x[row].tanh())
        kept[1:3] *= x[:2]
        mask = torch.ones_like(x, dtype=torch.bool)
        mask[:, 0] = False
        view = kept[3]
        view[mask[3]] = 2.0
        return kept + torch.where(mask, x, 0.0)


def test_views_of_constants_are_written_into() -> None:
    torch.manual_seed(0)
    _compared(Writing(), _batch(4), None, _batch(4))


def test_a_mask_of_another_shape_is_refused() -> None:
    class Wrong(Asking):
        def asked(self, x: Tensor) -> Tensor:
            return x + x[torch.ones(6, 4, dtype=torch.bool)].sum()

    with pytest.raises(ExportError, match="The shape of the mask"):
        export_training_step(Wrong(), F.cross_entropy, _batch(4))


def test_sizes_may_be_computed_by_tensors() -> None:
    torch.manual_seed(0)
    _compared(Halving(), _batch(4))


def test_parts_of_any_size_export() -> None:
    torch.manual_seed(0)
    _compared(Splitting(), _batch(4))


def test_views_of_attention_export() -> None:
    torch.manual_seed(0)
    _compared(Heads(), _batch(4))


def test_nonzero_is_taken_to_find_something_with_a_warning() -> None:
    torch.manual_seed(0)
    module, loss = Asking(), Selecting()
    batch = (torch.randn(4, 6),), (torch.tensor([1, -1, 3, -1]),)
    with pytest.warns(UserWarning, match=r"nonzero in Selecting.forward \(test_branches.py:\d+\) is taken to find"):
        step = export_training_step(module, loss, batch, dynamic_shapes=DYNAMIC)
    other = (torch.randn(7, 6),), (torch.tensor([1, -1, 3, -1, 0, 2, 2]),)
    results = run(step, other, kernels=False)
    native, exact = (autograd(module, loss, other, dtype, step) for dtype in (torch.float32, torch.float64))
    for name, result in results.items():
        assert_gradients_close(result, native[name], exact[name], np.float32, terms=8.0)


class Requiring(Asking):
    """Inputs that are made to require gradients, as for checkpointing, and a constant that is made so."""

    def asked(self, x: Tensor) -> Tensor:
        seen = x[:, None]
        seen.requires_grad = True
        queries = torch.zeros_like(x, requires_grad=self.training)
        return seen.squeeze(1).tanh() + queries.exp() * x


class Shifting(nn.Module):
    """Tokens moved by one, with a number in the first place; borders of dynamic sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.layer = nn.Linear(6, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        shifted = tokens.new_zeros(tokens.shape)
        shifted[:, 1:] = tokens[:, :-1].clone()
        shifted[:, 0] = 2
        hidden = self.embed(shifted)
        hidden = F.pad(hidden[:, 1:], [0, 0, 1, 0]) + F.pad(hidden, [0, 0, 1, -1], value=0.5)
        return self.layer(hidden).mean(1)  # type: ignore[no-any-return]


class Pooling(nn.Module):
    """Global pooling of a tensor whose channels are last in memory, and views of what a convolution's gradient is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 6, 3)
        self.norm = nn.LayerNorm(6)
        self.last = nn.Linear(6, 5)

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.layer(image)
        hidden = self.norm(hidden.flatten(2).transpose(1, 2)).transpose(1, 2).view(hidden.shape)
        hidden = self.norm(hidden.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.last(F.adaptive_avg_pool2d(hidden, 1).flatten(1))  # type: ignore[no-any-return]


class RequiringHidden(Asking):
    """What a frozen layer gives is made to require gradients, as peft and transformers do for checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def asked(self, x: Tensor) -> Tensor:
        return self.frozen(x).requires_grad_().tanh()  # type: ignore[no-any-return]


@pytest.mark.parametrize("module", [Requiring, RequiringHidden])
def test_inputs_and_hidden_values_may_be_made_to_require_gradients(module: type[nn.Module]) -> None:
    torch.manual_seed(0)
    _compared(module(), _batch(4))


class MakingParameter(Asking):
    """A parameter that the first call makes."""

    made: nn.Parameter | None

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("made", None)

    def asked(self, x: Tensor) -> Tensor:
        if self.made is None:
            self.made = nn.Parameter(torch.ones(6))
        return x * self.made


def test_a_parameter_that_the_first_call_makes_is_refused() -> None:
    with pytest.raises(ExportError, match=r"trainable tensor of shape \(6,\) that is no parameter"):
        export_training_step(MakingParameter(), F.cross_entropy, _batch(4))


@pytest.mark.long
def test_padding_and_shifting_keep_dynamic_sizes() -> None:
    torch.manual_seed(0)
    batch, other = (((torch.randint(0, 5, (n, k)),), (torch.arange(n) % 5,)) for n, k in ((4, 6), (7, 9)))
    step = _compared(Shifting(), batch, (({0: "batch", 1: "length"},), ({0: "batch"},)), other)
    dims = {one.name: [dim.dim_param for dim in one.type.tensor_type.shape.dim] for one in step.model.graph.input}
    assert dims["tokens"] == ["batch", "length"]


class Bordered(Shifting):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(F.pad(self.embed(tokens), [0, 0, 0, 1])).mean(1)  # type: ignore[no-any-return]


@pytest.mark.long
def test_padded_axes_vary() -> None:
    torch.manual_seed(0)
    batch, other = (((torch.randint(0, 5, (n, k)),), (torch.arange(n) % 5,)) for n, k in ((4, 6), (7, 9)))
    _compared(Bordered(), batch, (({0: "batch", 1: "length"},), ({0: "batch"},)), other)


def test_an_axis_that_cannot_vary_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    translate = onnx_model.translate

    def with_a_fixed_batch(*arguments: Any, **options: Any) -> ir.Model:
        model = translate(*arguments, **options)
        tokens = next(value for value in model.graph.inputs if value.dtype == ir.DataType.INT64)
        assert tokens.shape is not None
        tokens.shape = ir.Shape([4, *tokens.shape.dims[1:]])
        return model

    monkeypatch.setattr(onnx_model, "translate", with_a_fixed_batch)
    batch = (torch.randint(0, 5, (4, 6)),), (torch.arange(4),)
    dynamic = ({0: "batch", 1: "length"},), ({0: "batch"},)
    with pytest.raises(ExportError, match="axis 0 of 'tokens' has size 4 in all of the traced step"):
        export_training_step(Bordered(), F.cross_entropy, batch, dynamic_shapes=dynamic)


@pytest.mark.long
def test_layouts_in_memory_do_not_matter() -> None:
    torch.manual_seed(0)
    batch, other = (((torch.randn(n, 2, 5, 5),), (torch.arange(n) % 5,)) for n in (4, 7))
    _compared(Pooling(), batch, DYNAMIC, other)


@pytest.mark.parametrize("ends", [[2, 2, 5, 9], [0, 4, 4, 7], [9, 9, 9, 9]])
def test_products_of_groups_are_numpys(ends: list[int]) -> None:
    import onnxruntime

    from gradfuse.export import grouped_products

    text = f"""
    <ir_version: 10, opset_import: ["": 20, "local": 1]>
    products (float[S, 3] x, float[4, 3, 2] w, float[S, 2] y, int32[4] ends)
        => (float[S, 2] rows, float[4, 3, 2] inner) {{
        rows = local.GroupedRows(x, w, ends)
        turned = Transpose<perm=[1, 0]>(x)
        inner = local.GroupedInner(turned, y, ends)
    }}
    <domain: "local", opset_import: ["": 20]>
    {grouped_products.ROWS}
    <domain: "local", opset_import: ["": 20]>
    {grouped_products.INNER}
    """
    session = onnxruntime.InferenceSession(onnx.parser.parse_model(text).SerializeToString())
    rng = np.random.default_rng(0)
    # Whole numbers: products are exact.
    x, w, y = (rng.integers(-8, 8, shape).astype(np.float32) for shape in ((9, 3), (4, 3, 2), (9, 2)))
    rows, inner = session.run(None, {"x": x, "w": w, "y": y, "ends": np.array(ends, dtype=np.int32)})
    expected_rows, expected_inner = np.zeros((9, 2)), np.zeros((4, 3, 2))
    for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        expected_rows[start:end] = x[start:end] @ w[group]
        expected_inner[group] = x[start:end].T @ y[start:end]
    np.testing.assert_array_equal(rows, expected_rows)
    np.testing.assert_array_equal(inner, expected_inner)


class Translating(nn.Module):
    """A transformer of both kinds of layers, as PyTorch's tutorials call it, with a mask that is causal but for one."""

    def __init__(self, hole: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.model = nn.Transformer(8, 2, 1, 1, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 5)
        self.hole = hole

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        if self.hole:
            mask[0, 1] = 0.0
        padding = source == 0
        hidden = self.model(
            self.embedding(source),
            self.embedding(target),
            tgt_mask=mask,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return self.head(hidden)[:, 0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("hole", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.long
def test_masks_of_transformers_choose_no_computation(hole: bool) -> None:
    torch.manual_seed(0)
    module = Translating(hole)

    def batch(items: int, length: int) -> Any:
        source = torch.randint(1, 9, (items, length))
        source[0, -2:] = 0
        return (source, torch.randint(1, 9, (items, length + 1))), (torch.arange(items) % 5,)

    shapes = ({0: "batch", 1: "length"}, {0: "batch", 1: "other"}), ({0: "batch"},)
    step = export_training_step(module, F.cross_entropy, batch(3, 5), dynamic_shapes=shapes)
    other = batch(4, 7)
    results = run(step, other, kernels=False)
    native, exact = (autograd(module, F.cross_entropy, other, dtype, step) for dtype in (torch.float32, torch.float64))
    for name, result in results.items():
        terms = 8 * max(np.abs(array).max() for array in exact.values())
        assert_gradients_close(result, native[name], exact[name], result.dtype, terms=terms)


class CheckingOften(Asking):
    """A check by `bool`, which Python has run often enough to do it in another instruction."""

    def asked(self, x: Tensor) -> Tensor:
        for _ in range(20):
            if bool((x > 1000.0).any()):
                raise ValueError("too large")
        return x


def test_checks_that_ran_often_do_not_stop_an_export() -> None:
    torch.manual_seed(0)
    module = CheckingOften()
    module(torch.randn(3, 6))
    export_training_step(module, F.cross_entropy, _batch(3), dynamic_shapes=DYNAMIC)


class WritingData(nn.Module):
    """Writes into its weight by `.data`, or only reads it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight
        if self.how == "sets":
            weight.data = weight.data.clamp(-9.0, 9.0)
        elif self.how == "writes":
            weight.data.clamp_(-9.0, 9.0)
        return self.layer(x) / weight.data.norm() + x.data.mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["sets", "writes"])
def test_parameters_that_are_written_by_data_are_refused(how: str) -> None:
    # The numbers stay as they are in this batch.
    with pytest.raises(ExportError, match=r"the step changes parameter 'layer\.weight' in place"):
        export_training_step(WritingData(how), F.cross_entropy, _batch(3), dynamic_shapes=DYNAMIC)


def test_what_is_read_by_data_has_no_gradient() -> None:
    torch.manual_seed(0)
    module = WritingData("reads")
    step = export_training_step(module, F.cross_entropy, _batch(3), dynamic_shapes=DYNAMIC)
    results = run(step, _batch(4), kernels=False)
    assert set(results) == {"loss", "layer.weight.grad", "layer.bias.grad"}

"""Scatters that reduce, Fourier transforms, determinants, diagonals and samples, against torch.autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from autograd import model_of, numbers, require_torchs
from node_tests import run
from torch import Tensor

from gradfuse import differentiate
from gradfuse.testing import assert_gradients_close

pytestmark = pytest.mark.usefixtures("inference_in_process")

REDUCTIONS = {"mul": "prod", "max": "amax", "min": "amin"}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", ["plain", "zeros", "ties"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_scattered_elements(reduction: str, kind: str, axis: int) -> None:
    x, u = numbers(4, 3), numbers(5, 3, seed=1)
    indices = np.array([[0, 1, 2], [0, 1, 0], [0, 0, 2], [2, 1, 1], [1, 1, 2]])
    if kind == "zeros":
        x[0], x[1, 1], u[1], u[3, 2] = 0, 0, 0, 0
    if kind == "ties":
        x, u = np.round(x), np.round(u)
    if axis:
        x, u, indices = x.T.copy(), u.T.copy(), indices.T.copy()
    model = model_of(
        "float[A, B] x, float[C, D] u, int64[C, D] i",
        f'y = ScatterElements <axis = {axis}, reduction = "{reduction}"> (x, i, u)',
    )

    def by_torch(x: Tensor, u: Tensor, i: Tensor) -> Tensor:
        return x.scatter_reduce(axis, i, u, REDUCTIONS[reduction])

    require_torchs(model, {"x": x, "u": u, "i": indices}, by_torch, ["x", "u"])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", ["plain", "zeros", "ties"])
def test_scattered_rows_and_elements(reduction: str, kind: str) -> None:
    """ScatterND: whole rows, some of which meet at one place."""
    x, u = numbers(4, 3), numbers(5, 3, seed=1)
    if kind == "zeros":
        x[0], u[1], u[3, 2] = 0, 0, 0
    if kind == "ties":
        x, u = np.round(x), np.round(u)
    rows = np.array([[0], [2], [0], [1], [-2]])
    model = model_of(
        "float[A, B] x, float[C, B] u, int64[C, 1] i", f'y = ScatterND <reduction = "{reduction}"> (x, i, u)'
    )

    def by_torch(x: Tensor, u: Tensor, i: Tensor) -> Tensor:
        places = (i % 4).expand(5, 3)
        return x.scatter_reduce(0, places, u, REDUCTIONS[reduction])

    require_torchs(model, {"x": x, "u": u, "i": rows}, by_torch, ["x", "u"], has_kernel=False)


@pytest.mark.parametrize("opset", [18, 20])
@pytest.mark.parametrize("size, length", [(8, None), (7, None), (8, 5), (5, 8), (6, 9), (1, 4)])
@pytest.mark.parametrize("kind", ["complex", "real", "half", "inverse"])
def test_transforms_of_other_lengths(opset: int, size: int, length: int | None, kind: str) -> None:
    x = numbers(2, size, 3, 1 if kind in ("real", "half") else 2)
    options = {"inverse": int(kind == "inverse"), "onesided": int(kind == "half")}
    attributes = ", ".join(f"{name} = {value}" for name, value in options.items())
    constants = "" if length is None else f"int64 n = {{{length}}}"
    given = "" if length is None else "n"
    if opset == 18:
        body = f"y = DFT <axis = -3, {attributes}> (x{', n' if given else ''})"
    else:
        body = f"y = DFT <{attributes}> (x, {given}, a)"
        constants = ", ".join(one for one in (constants, "int64 a = {-3}") if one)
    model = model_of(f"float[N, S, M, {x.shape[-1]}] x", body, opset, constants=constants)

    def by_torch(x: Tensor) -> Tensor:
        values = torch.view_as_complex(x.contiguous()) if x.shape[-1] == 2 else x[..., 0]
        how = {"complex": torch.fft.fft, "real": torch.fft.fft, "half": torch.fft.rfft, "inverse": torch.fft.ifft}[kind]
        return torch.view_as_real(how(values, n=length, dim=1))

    require_torchs(model, {"x": x}, by_torch, ["x"])


@pytest.mark.parametrize("opset", [18, 20])
@pytest.mark.parametrize("length", [None, 8, 9, 6, 7, 10, 12, 4, 2, 1])
def test_signals_of_half_a_spectrum(opset: int, length: int | None) -> None:
    """Some lengths take fewer of the five numbers than there are, or zeros behind them.

    The gradient is that of torch and of ONNX's reference; onnxruntime's forward kernel computes other signals there.
    """
    x = numbers(2, 5, 3, 2)
    constants = [] if length is None else [f"int64 n = {{{length}}}"]
    given = "" if length is None else "n"
    if opset == 18:
        body = f"y = DFT <axis = 1, inverse = 1, onesided = 1> (x{', n' if given else ''})"
    else:
        body = f"y = DFT <inverse = 1, onesided = 1> (x, {given}, a)"
        constants.append("int64 a = {1}")
    model = model_of("float[N, S, M, 2] x", body, opset, constants=", ".join(constants))

    def gradient(dtype: torch.dtype) -> np.ndarray[Any, Any]:
        leaf = torch.tensor(x, dtype=dtype).requires_grad_()
        signal = torch.fft.irfft(torch.view_as_complex(leaf), n=length, dim=1).unsqueeze(-1)
        signal.backward(torch.tensor(numbers(*signal.shape, seed=9), dtype=dtype))
        assert leaf.grad is not None
        return leaf.grad.numpy()

    exact = gradient(torch.float64)
    seed = numbers(2, length or 8, 3, 1, seed=9)
    found = run(differentiate(model, ["x"], seeds={"y": "seed"}), {"x": x, "seed": seed}, by_onnx=False)
    terms = 16 * float(np.abs(exact).max())
    assert_gradients_close(found["x.grad"], gradient(torch.float32), exact, np.float32, terms=terms)


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("window", [True, False])
@pytest.mark.parametrize("step", [3, 4, 8])
def test_windows_of_a_signal(half: bool, window: bool, step: int) -> None:
    signal = numbers(2, 21, 1)
    feeds = {"x": signal, **({"w": numbers(8, seed=1)} if window else {})}
    inputs = "float[N, T, 1] x" + (", float[8] w" if window else "")
    given = "w" if window else ", n"
    model = model_of(
        inputs,
        f"y = STFT <onesided = {int(half)}> (x, s, {given})",
        constants=f"int64 s = {{{step}}}, int64 n = {{8}}",
        output="float[A, B, C, D] y",
    )

    def by_torch(x: Tensor, w: Tensor | None = None) -> Tensor:
        parts = torch.stft(x[..., 0], 8, step, 8, w, False, onesided=half, return_complex=True)
        return torch.view_as_real(parts.transpose(1, 2).contiguous())

    if not window:
        feeds["x"] = signal
        require_torchs(model, feeds, lambda x: by_torch(x, torch.ones(8, dtype=x.dtype)), ["x"])
    else:
        require_torchs(model, feeds, by_torch, ["x", "w"])


@pytest.mark.parametrize("shape", [(3, 3), (1, 1), (4, 2, 2), (2, 2, 5, 5)])
def test_determinants(shape: tuple[int, ...]) -> None:
    named = ", ".join(f"D{k}" for k in range(len(shape)))
    model = model_of(f"float[{named}] x", "d = Det(x) y = Mul(d, d)")
    require_torchs(model, {"x": numbers(*shape)}, lambda x: torch.linalg.det(x) ** 2, ["x"])


def test_the_determinant_of_a_singular_matrix_has_a_gradient() -> None:
    """The cofactors, of which some are not 0 where the rank is one less than full."""
    x = np.array([[1, 2, 3], [2, 4, 6], [1, 0, 1]], np.float32)
    model = model_of("float[3, 3] x", "y = Det(x)", output="float y")
    found = run(differentiate(model, ["x"]), {"x": x}, by_onnx=False)["x.grad"]
    minors = np.array([[np.linalg.det(np.delete(np.delete(x, i, 0), j, 1)) for j in range(3)] for i in range(3)])
    signs = (-1.0) ** np.add.outer(np.arange(3), np.arange(3))
    assert np.abs(found - minors * signs).max() <= 1e-5 and np.abs(found).max() > 1


@pytest.mark.parametrize(
    "equation, a, b",
    [
        ("ii->i", (4, 4), None),
        ("ii->", (4, 4), None),
        ("iij->j", (3, 3, 5), None),
        ("iji,jk->ik", (3, 4, 3), (4, 2)),
        ("ii,jj->ij", (3, 3), (4, 4)),
        ("iii->i", (3, 3, 3), None),
        ("...ii->...i", (2, 5, 3, 3), None),
        ("...ij,...jk->...ik", (2, 4, 3), (2, 3, 5)),
        ("...ij,...jk->...ik", (1, 4, 3), (2, 3, 5)),
        ("...ij,jk->...ik", (2, 4, 3), (3, 5)),
        ("ij,...jk->...ik", (4, 3), (2, 6, 3, 5)),
        ("...i,...i->...", (2, 4, 3), (1, 4, 3)),
        ("...ij->...i", (1, 4, 3), None),
        ("...ii,jk->...j", (2, 4, 4), (3, 2)),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_einsum_with_diagonals_and_batches(equation: str, a: Any, b: Any, named: bool) -> None:
    shapes = {name: shape for name, shape in (("a", a), ("b", b)) if shape is not None}
    declared = [
        f"float[{', '.join(f'{n}{k}' if named else str(size) for k, size in enumerate(shape))}] {n}"
        for n, shape in shapes.items()
    ]
    rank = len(torch.einsum(equation, *(torch.zeros(s) for s in shapes.values())).shape)
    output = f"float[{', '.join(f'Y{k}' for k in range(rank))}] y" if rank else "float y"
    model = model_of(", ".join(declared), f'y = Einsum <equation = "{equation}"> ({", ".join(shapes)})', output=output)
    feeds = {name: numbers(*shape, seed=k) for k, (name, shape) in enumerate(shapes.items())}
    require_torchs(model, feeds, lambda **x: torch.einsum(equation, *x.values()), list(shapes))


@pytest.mark.parametrize("used", [True, False])
def test_maxima_whose_indices_count_columns_first(used: bool) -> None:
    outputs = "y, i" if used else "y"
    declared = "float[N, 2, 3, 3] y, int64[N, 2, 3, 3] i" if used else "float[N, 2, 3, 3] y"
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> g (float[N, 2, 6, 7] x) => ({declared}) {{'
        f"  {outputs} = MaxPool <kernel_shape = [2, 3], strides = [2, 2], storage_order = 1> (x) }}"
    )
    x, seed = np.round(numbers(3, 2, 6, 7)), numbers(3, 2, 3, 3, seed=1)
    found = run(differentiate(model, ["x"], seeds={"y": "v"}), {"x": x, "v": seed}, by_onnx=False)
    leaf = torch.tensor(x, requires_grad=True)
    y = torch.nn.functional.max_pool2d(leaf, (2, 3), 2)
    y.backward(torch.tensor(seed))  # type: ignore[no-untyped-call]
    assert leaf.grad is not None and (found["x.grad"] == leaf.grad.numpy()).all()
    if used:
        before = run(model, {"x": x}, by_onnx=False)
        assert (found["i"] == before["i"]).all()


@pytest.mark.parametrize("mode", ["linear", "circular"])
@pytest.mark.parametrize("axis", [-2, 1])
def test_what_is_written_into_a_cache(mode: str, axis: int) -> None:
    """onnxruntime has no kernel for it: the gradients are of what onnx's evaluator computes, and are linear."""
    past, update = numbers(2, 5, 5, 3), numbers(2, 5, 2, 3, seed=1)
    if axis == 1:
        past, update = numbers(2, 5, 3), numbers(2, 2, 3, seed=1)
    begins = np.array([1, 4 if mode == "circular" else 3])
    dims = ["A, B, C, D", "A, B, E, D"] if axis == -2 else ["A, C, D", "A, E, D"]
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 24]> g (float[{dims[0]}] p, float[{dims[1]}] u, int64[A] i) => '
        f'(float[{dims[0]}] y) {{ y = TensorScatter <axis = {axis}, mode = "{mode}"> (p, u, i) }}'
    )
    seed = numbers(*past.shape, seed=2)
    gradients = differentiate(model, ["p", "u"], seeds={"y": "v"})
    found = run(gradients, {"p": past, "u": update, "i": begins, "v": seed}, by_onnx=True)
    wanted = {"p": seed.copy(), "u": np.zeros_like(update)}
    at = axis % past.ndim
    for item in range(2):
        for k in range(2):
            place = (begins[item] + k) % 5
            index: tuple[Any, ...] = (item, *[slice(None)] * (at - 1))
            wanted["u"][(*index, k)] = seed[(*index, place)]
            wanted["p"][(*index, place)] = 0
    assert (found["p.grad"] == wanted["p"]).all() and (found["u.grad"] == wanted["u"]).all()


@pytest.mark.parametrize("groups, offsets", [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("options", ["", "pads = [1, 0, 2, 1], strides = [2, 1], dilations = [1, 2], "])
def test_deformed_convolutions(groups: int, offsets: int, options: str) -> None:
    """Against grid_sample and a convolution of every group by itself, in torch."""
    x, w = numbers(2, 4, 6, 7), numbers(6, 4 // groups, 2, 3, seed=1)
    pads, strides, dilations = ([1, 0, 2, 1], [2, 1], [1, 2]) if options else ([0] * 4, [1, 1], [1, 1])
    oh = (6 + pads[0] + pads[2] - dilations[0] - 1) // strides[0] + 1
    ow = (7 + pads[1] + pads[3] - 2 * dilations[1] - 1) // strides[1] + 1
    feeds = {
        "x": x,
        "w": w,
        "o": numbers(2, offsets * 12, oh, ow, seed=2),
        "b": numbers(6, seed=3),
        "m": numbers(2, offsets * 6, oh, ow, seed=4),
    }
    model = model_of(
        f"float[N, 4, H, W] x, float[6, {4 // groups}, 2, 3] w, float[N, {offsets * 12}, I, J] o, float[6] b, "
        f"float[N, {offsets * 6}, I, J] m",
        f"y = DeformConv <{options} group = {groups}, offset_group = {offsets}> (x, w, o, b, m)",
        opset=22,
        output="float[N, 6, I, J] y",
    )

    def by_torch(x: Tensor, w: Tensor, o: Tensor, b: Tensor, m: Tensor) -> Tensor:
        offset, mask = o.reshape(2, offsets, 6, 2, oh, ow), m.reshape(2, offsets, 6, oh, ow)
        columns = []
        for k in range(6):
            parts = []
            for g in range(offsets):
                rows = torch.arange(oh)[:, None] * strides[0] - pads[0] + k // 3 * dilations[0] + offset[:, g, k, 0]
                places = torch.arange(ow) * strides[1] - pads[1] + k % 3 * dilations[1] + offset[:, g, k, 1]
                grid = torch.stack([(2 * places + 1) / 7 - 1, (2 * rows + 1) / 6 - 1], -1)
                part = x[:, g * (4 // offsets) : (g + 1) * (4 // offsets)]
                sampled = torch.nn.functional.grid_sample(part, grid, align_corners=False)
                parts.append(sampled * mask[:, g, k, None])
            columns.append(torch.cat(parts, 1))
        found = torch.stack(columns, 2)
        each = 4 // groups
        outputs = [
            torch.einsum(
                "nckij,ock->noij",
                found[:, g * each : (g + 1) * each],
                w[g * (6 // groups) : (g + 1) * (6 // groups)].reshape(6 // groups, each, 6),
            )
            for g in range(groups)
        ]
        return torch.cat(outputs, 1) + b[:, None, None]

    require_torchs(model, feeds, by_torch, list(feeds))


@pytest.mark.parametrize("ratio", [0, 1, 3])
@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.sampled(every=3)
def test_regions_of_images(ratio: int, half: bool, mode: str) -> None:
    """Regions of several sizes, beyond the image too, against a loop over samples in torch."""
    x = numbers(2, 3, 9, 8)
    regions = np.array([[0.3, 1.2, 5.1, 7.3], [2.2, 2.6, 3.3, 3.1], [-3.4, 4.3, 9.7, 12.6]], np.float32)
    items = np.array([1, 0, 1])
    words = f'mode = "{mode}", coordinate_transformation_mode = "{"" if half else "output_"}half_pixel"'
    model = model_of(
        "float[N, C, H, W] x, float[R, 4] r, int64[R] i",
        f"y = RoiAlign <{words}, output_height = 2, output_width = 3, sampling_ratio = {ratio}, spatial_scale = 0.8> "
        "(x, r, i)",
    )

    def taps(at: Tensor, size: int) -> list[tuple[int, Any]]:
        if at < -1 or at > size:
            return [(0, 0.0), (0, 0.0)]
        at = at.clamp(0, size - 1)
        low = int(at)
        return [(low, 1 - (at - low)), (min(low + 1, size - 1), at - low)]

    def by_torch(x: Tensor, r: Tensor, i: Tensor) -> Tensor:
        r = r * 0.8 - (0.5 if half else 0.0)
        found = []
        for region, item in zip(r, i, strict=True):
            extent = region[2:] - region[:2]
            extent = extent if half else extent.clamp(min=1.0)
            grid = [ratio or int(np.ceil(float(extent[k]) / n)) for k, n in ((1, 2), (0, 3))]
            for row in range(2):
                for column in range(3):
                    samples = []
                    for a in range(grid[0]):
                        for b in range(grid[1]):
                            ys = taps(region[1] + (row + (a + 0.5) / grid[0]) * extent[1] / 2, 9)
                            xs = taps(region[0] + (column + (b + 0.5) / grid[1]) * extent[0] / 3, 8)
                            weighted = torch.stack([x[item, :, p, q] * v * w for p, v in ys for q, w in xs])
                            samples.append(weighted.sum(0) if mode == "avg" else weighted.amax(0))
                    together = torch.stack(samples)
                    found.append(together.mean(0) if mode == "avg" else together.amax(0))
        return torch.stack(found).reshape(3, 2, 3, 3).permute(0, 3, 1, 2)

    require_torchs(model, {"x": x, "r": regions, "i": items}, by_torch, ["x", "r"])

"""Gradients of GridSample and CumProd against torch.autograd, and of RoiAlign against differences, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from autograd import model_of, numbers, require_torchs
from node_tests import run

from gradfuse import differentiate

pytestmark = pytest.mark.usefixtures("inference_in_process")


@pytest.mark.parametrize("mode, by_torch", [("linear", "bilinear"), ("nearest", "nearest"), ("cubic", "bicubic")])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("aligned", [0, 1])
@pytest.mark.sampled(every=3)
def test_samples_within_and_beyond_the_ends(mode: str, by_torch: str, padding: str, aligned: int) -> None:
    """The grid reaches from -2 to 2, and the image from -1 to 1."""
    model = model_of(
        "float[N, 2, H, W] x, float[N, P, Q, 2] grid",
        f'y = GridSample <mode = "{mode}", padding_mode = "{padding}", align_corners = {aligned}> (x, grid)',
        opset=20,
        output="float[N, 2, P, Q] y",
    )
    wrt = ["x"] if mode == "nearest" else ["x", "grid"]
    require_torchs(
        model,
        {"x": numbers(2, 2, 4, 3), "grid": numbers(2, 5, 3, 2, seed=1)},
        lambda x, grid: F.grid_sample(x, grid, by_torch, padding, bool(aligned)),
        wrt,
    )


@pytest.mark.parametrize("padding", ["zeros", "reflection"])
def test_samples_of_volumes(padding: str) -> None:
    model = model_of(
        "float[1, 2, 3, 4, 2] x, float[1, P, 1, 2, 3] grid",
        f'y = GridSample <padding_mode = "{padding}"> (x, grid)',
        opset=20,
        output="float[1, 2, P, 1, 2] y",
    )
    feeds = {"x": numbers(1, 2, 3, 4, 2), "grid": numbers(1, 3, 1, 2, 3, seed=1)}
    require_torchs(model, feeds, lambda x, grid: F.grid_sample(x, grid, "bilinear", padding, False), ["x", "grid"])


@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("exclusive", [0, 1])
def test_cumulative_products_with_zeros(reverse: int, exclusive: int) -> None:
    model = model_of(
        "float[2, N] x",
        f"axis = Constant <value_int = -1> () y = CumProd <reverse = {reverse}, exclusive = {exclusive}> (x, axis)",
        opset=26,
        output="float[2, N] y",
    )
    x = numbers(2, 4)
    x[0, 1] = x[1, 3] = 0

    def by_torch(x: torch.Tensor) -> torch.Tensor:
        x = x.flip(1) if reverse else x
        if exclusive:
            x = torch.cat([torch.ones_like(x[:, :1]), x[:, :-1]], 1)
        y = x.cumprod(1)
        return y.flip(1) if reverse else y

    require_torchs(model, {"x": x}, by_torch, ["x"], has_kernel=False)


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("opset", [16, 17, 20])
@pytest.mark.parametrize("regions", [0, 1, 3])
@pytest.mark.sampled(every=3)
def test_regions_of_all_opsets(mode: str, opset: int, regions: int) -> None:
    model = model_of(
        "double[2, 2, 6, 5] x, double[K, 4] regions, int64[K] items",
        f"""y = RoiAlign <mode = "{mode}", output_height = 2, output_width = 3,
            coordinate_transformation_mode = "half_pixel"> (x, regions, items)""",
        opset=opset,
        output="double[K, 2, 2, 3] y",
    )
    draws = np.random.default_rng(0)
    corners = draws.uniform(0.5, 2, (regions, 2))
    feeds = {
        "x": draws.standard_normal((2, 2, 6, 5)),
        "regions": np.concatenate([corners, corners + draws.uniform(1, 2.5, (regions, 2))], 1),
        "items": draws.integers(0, 2, regions),
    }
    seed = draws.standard_normal((regions, 2, 2, 3))
    found = run(differentiate(model, ["x", "regions"], seeds={"y": "seed"}), {**feeds, "seed": seed}, by_onnx=False)
    np.testing.assert_allclose(found["y"], run(model, feeds, by_onnx=False)["y"], rtol=1e-12, atol=1e-12)
    for name in ("x", "regions"):
        moved = draws.standard_normal(feeds[name].shape)
        ends = [run(model, {**feeds, name: feeds[name] + h * moved}, by_onnx=False)["y"] for h in (1e-6, -1e-6)]
        difference = ((ends[0] - ends[1]) * seed).sum() / 2e-6
        assert abs((found[f"{name}.grad"] * moved).sum() - difference) <= 1e-7 * max(1, abs(difference))

"""The logarithm of the gamma function and its derivative, which ONNX has no operators for.

Distributions have them: Student's t, negative binomial, beta, gamma and Poisson. This module imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten, prims = torch.ops.aten, torch.ops.prims

_FAR = 10
"""From here on, the asymptotic series give all digits of float64."""

# B_2k / (2k (2k - 1)) and B_2k / 2k for k = 1, 2, ...: the coefficients of 1 / x^(2k - 1) and 1 / x^2k.
_LGAMMA = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156, -3617 / 122400)
_DIGAMMA = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12, -3617 / 8160)


def table() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions by overload, as `run_decompositions` takes them."""
    return {
        aten.lgamma.default: lgamma,
        prims.lgamma.default: lgamma,
        aten.digamma.default: digamma,
        prims.digamma.default: digamma,
    }


def lgamma(self: Tensor) -> Tensor:
    """aten::lgamma: log |gamma(x)|, computed in float64.

    By Stirling's series where x >= 10; by gamma(x + 10) = gamma(x) x (x + 1) ... (x + 9) below, and below 1/2 by
    gamma(x) gamma(1 - x) = pi / sin(pi x).
    """
    x = self.double()
    below = x < 0.5
    y = torch.where(below, 1.0 - x, x)
    near = y < _FAR
    z = torch.where(near, y + _FAR, y)
    product = y
    for k in range(1, _FAR):
        product = product * (y + k)
    positive = (z - 0.5) * (z.log() - 1.0) - 0.5 + 0.5 * math.log(2 * math.pi) + _series(_LGAMMA, z) * z
    positive = positive - torch.where(near, product, 1.0).log()
    # Where it is not taken, its derivative must be finite too.
    sine = _sin_pi(torch.where(below, x, 0.25))
    reflected = math.log(math.pi) - sine.abs().log() - positive
    return torch.where(x.isinf(), torch.inf, torch.where(below, reflected, positive)).to(_result_type(self))


def digamma(self: Tensor) -> Tensor:
    """aten::digamma: the derivative of `lgamma`, by the same steps. At 0 it is -inf, at negative integers NaN."""
    x = self.double()
    below = x < 0.5
    y = torch.where(below, 1.0 - x, x)
    near = y < _FAR
    z = torch.where(near, y + _FAR, y)
    terms = 1.0 / y
    for k in range(1, _FAR):
        terms = terms + 1.0 / (y + k)
    positive = z.log() - 0.5 / z - _series(_DIGAMMA, z) - torch.where(near, terms, 0.0)
    reflected = positive - math.pi * _sin_pi(x + 0.5) / _sin_pi(x)
    result = torch.where(below, reflected, positive)
    result = torch.where(x == 0.0, -torch.inf, torch.where((x < 0.0) & (x == x.round()), torch.nan, result))
    return result.to(_result_type(self))


def _series(coefficients: tuple[float, ...], z: Tensor) -> Tensor:
    """Return the sum of coefficients[k - 1] / z^2k."""
    inverse = 1.0 / (z * z)
    total = inverse * coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        total = (total + coefficient) * inverse
    return total


def _sin_pi(x: Tensor) -> Tensor:
    """Return sin(pi x), exactly 0 at integers."""
    nearest = x.round()
    sine = ((x - nearest) * math.pi).sin()
    return torch.where(nearest == 2.0 * (0.5 * nearest).floor(), sine, -sine)


def _result_type(self: Tensor) -> torch.dtype:
    return self.dtype if self.is_floating_point() else torch.get_default_dtype()

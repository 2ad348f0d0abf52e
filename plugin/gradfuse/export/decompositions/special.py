"""Special functions that ONNX has no operators for, computed in float64.

Distributions have the logarithm of the gamma function and its derivatives: Student's t, negative binomial, beta, gamma
and Poisson; von Mises has Bessel functions; quantiles of the normal one have the inverse of the error function. This
module imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradfuse.export import standins

aten, prims = torch.ops.aten, torch.ops.prims

_FAR = 10
"""From here on, the asymptotic series give all digits of float64."""

# B_2k / (2k (2k - 1)) and B_2k / 2k for k = 1, 2, ...: the coefficients of 1 / x^(2k - 1) and 1 / x^2k.
_LGAMMA = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156, -3617 / 122400)
_DIGAMMA = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12, -3617 / 8160)


# B_2k / (2k)!, of Euler and Maclaurin's sum.
_EULER = (
    1 / 12, -1 / 720, 1 / 30240, -1 / 1209600, 1 / 47900160, -691 / 1307674368000, 1 / 74724249600,
    -3617 / 10670622842880000,
)  # fmt: skip
_SUMMED = 24
"""How many terms of a sum are added up ahead of that."""

_BESSEL_FAR, _BESSEL_TERMS, _BESSEL_FAR_TERMS = 20.0, 38, 22

_TAIL, _ERF_TERMS, _FRACTIONS = 2.0, 40, 60

_WICHURA = (
    (
        (3.3871328727963666080, 133.14166789178437745, 1971.5909503065514427, 13731.693765509461125,
         45921.953931549871457, 67265.770927008700853, 33430.575583588128105, 2509.0809287301226727),
        (42.313330701600911252, 687.18700749205790830, 5394.1960214247511077, 21213.794301586595867,
         39307.895800092710610, 28729.085735721942674, 5226.4952788528545610),
    ),
    (
        (1.42343711074968357734, 4.63033784615654529590, 5.76949722146069140550, 3.64784832476320460504,
         1.27045825245236838258, 0.241780725177450611770, 0.0227238449892691845833, 0.000774545014278341407640),
        (2.05319162663775882187, 1.67638483018380384940, 0.689767334985100004550, 0.148103976427480074590,
         0.0151986665636164571966, 0.000547593808499534494600, 1.05075007164441684324e-9),
    ),
    (
        (6.65790464350110377720, 5.46378491116411436990, 1.78482653991729133580, 0.296560571828504891230,
         0.0265321895265761230930, 0.00124266094738807843860, 2.71155556874348757815e-5, 2.01033439929228813265e-7),
        (0.599832206555887937690, 0.136929880922735805310, 0.0148753612908506148525, 0.000786869131145613259100,
         1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15),
    ),
)  # fmt: skip
"""For the middle, the tails, and the far tails."""


def table() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions by overload, as `run_decompositions` takes them."""
    return {
        aten.lgamma.default: lgamma,
        prims.lgamma.default: lgamma,
        aten.digamma.default: digamma,
        prims.digamma.default: digamma,
        aten.polygamma.default: polygamma,
        prims.bessel_i0.default: lambda self: bessel(self, 0, scaled=False),
        prims.bessel_i0e.default: lambda self: bessel(self, 0, scaled=True),
        prims.bessel_i1.default: lambda self: bessel(self, 1, scaled=False),
        prims.bessel_i1e.default: lambda self: bessel(self, 1, scaled=True),
        aten.i0.default: lambda self: bessel(self, 0, scaled=False),
        aten.special_i0e.default: lambda self: bessel(self, 0, scaled=True),
        aten.special_i1.default: lambda self: bessel(self, 1, scaled=False),
        aten.special_i1e.default: lambda self: bessel(self, 1, scaled=True),
        prims.erf_inv.default: erfinv,
        aten.erfinv.default: erfinv,
        aten.erfc.default: erfc,
        aten.special_erfcx.default: erfcx,
        aten.special_log_ndtr.default: log_ndtr,
        prims.ndtri.default: ndtri,
        aten.special_ndtri.default: ndtri,
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


def polygamma(n: int, self: Tensor) -> Tensor:
    """aten::polygamma: derivative n of `digamma`, as (-1)^(n + 1) n! times the sum of 1 / (x + k)^(n + 1).

    All but the first terms of the sum are those of Euler and Maclaurin, which hold for x > -14: what is below is NaN.
    """
    if n == 0:
        return digamma(self)
    x, power = self.double(), n + 1
    total = torch.zeros_like(x)
    for k in range(_SUMMED):
        total = total + (x + k) ** -power
    z = torch.where(x > -_SUMMED + _FAR, x + _SUMMED, 1.0)
    inverse = 1.0 / (z * z)
    rest = 1.0 / (power - 1) + 0.5 / z
    term = power * inverse
    for k, coefficient in enumerate(_EULER, 1):
        rest = rest + coefficient * term
        term = term * inverse * ((power + 2 * k - 1) * (power + 2 * k))
    total = total + rest * z ** (1 - power)
    total = torch.where(x == x.round(), torch.where(x > 0, total, torch.inf), total)
    sign = -1.0 if n % 2 == 0 else 1.0
    result = torch.where(x > -_SUMMED + _FAR, total, torch.nan) * (sign * math.factorial(n))
    return result.to(_result_type(self))


def bessel(self: Tensor, order: int, *, scaled: bool) -> Tensor:
    """aten::i0, aten::special_i1 or those times exp(-|x|): modified Bessel functions of the first kind.

    By their series up to 20, whose terms are all positive, and by the asymptotic one from there on.
    """
    x = self.double()
    size = x.abs()
    near = size <= _BESSEL_FAR
    quarter = torch.where(near, x, 0.0).square() / 4.0
    series = torch.ones_like(quarter)
    for k in range(_BESSEL_TERMS, 0, -1):
        series = 1.0 + series * quarter / (k * (k + order))
    inverse = 1.0 / torch.where(near, _BESSEL_FAR, size)
    asymptotic = torch.ones_like(inverse)
    for k in range(_BESSEL_FAR_TERMS, 0, -1):
        asymptotic = 1.0 - asymptotic * inverse * ((4 * order**2 - (2 * k - 1) ** 2) / (8 * k))
    asymptotic = asymptotic * (inverse / (2.0 * math.pi)).sqrt()
    if order:
        series, asymptotic = series * x / 2.0, asymptotic * x.sign()
    if scaled:
        result = torch.where(near, series * (-size).exp(), asymptotic)
    else:
        result = torch.where(near, series, asymptotic * torch.where(near, 0.0, size).exp())
    return result.to(_result_type(self))


def erfc(self: Tensor) -> Tensor:
    """aten::erfc, with the digits of what is nearly 0."""
    x = self.double()
    scaled = _scaled_tail(x.abs()) * (-x.square()).exp()
    value = standins.STOP_GRADIENT(torch.where(x < 0.0, 2.0 - scaled, scaled))
    slope = standins.STOP_GRADIENT((-x.square()).exp() * (-2.0 / math.sqrt(math.pi)))
    return _with_slope(x, value, slope).to(_result_type(self))


def erfcx(self: Tensor) -> Tensor:
    """aten::special_erfcx: `erfc` times exp(x^2)."""
    x = self.double()
    tail = _scaled_tail(x.abs())
    value = standins.STOP_GRADIENT(torch.where(x < 0.0, 2.0 * x.square().exp() - tail, tail))
    slope = standins.STOP_GRADIENT(2.0 * x * value - 2.0 / math.sqrt(math.pi))
    return _with_slope(x, value, slope).to(_result_type(self))


def log_ndtr(self: Tensor) -> Tensor:
    """aten::special_log_ndtr: the logarithm of the normal distribution's function, on both sides of 0."""
    x = self.double()
    square = x.square() / 2.0
    half = _scaled_tail(x.abs() / math.sqrt(2.0)) / 2.0
    above = half * (-square).exp()
    value = standins.STOP_GRADIENT(torch.where(x < 0.0, half.log() - square, (-above).log1p()))
    density = 1.0 / math.sqrt(2.0 * math.pi)
    slope = standins.STOP_GRADIENT(torch.where(x < 0.0, density / half, density * (-square).exp() / (1.0 - above)))
    return _with_slope(x, value, slope).to(_result_type(self))


def _scaled_tail(x: Tensor) -> Tensor:
    """Return erfc(x) exp(x^2) for x >= 0: by the series of erf up to 2, by a continued fraction from there on."""
    near = x <= _TAIL
    small = torch.where(near, x, 0.0)
    double_square = 2.0 * small.square()
    series = torch.ones_like(x)
    for k in range(_ERF_TERMS, 0, -1):
        series = 1.0 + series * double_square / (2 * k + 1)
    inside = small.square().exp() - series * small * (2.0 / math.sqrt(math.pi))
    large = torch.where(near, _TAIL, x)
    fraction = large
    for k in range(_FRACTIONS, 0, -1):
        fraction = large + (0.5 * k) / fraction
    return torch.where(near, inside, 1.0 / (fraction * math.sqrt(math.pi)))


def erfinv(self: Tensor) -> Tensor:
    """aten::erfinv: the inverse of the error function; its slope is exp(y^2) sqrt(pi) / 2."""
    x = self.double()
    # erf(y) is 2 Phi(sqrt(2) y) - 1, and 1 - |x| has no rounding.
    y = _quantile(x / 2.0, (1.0 - x.abs()) / 2.0) / math.sqrt(2.0)
    fixed = standins.STOP_GRADIENT(y)
    slope = standins.STOP_GRADIENT((fixed.square()).exp() * (math.sqrt(math.pi) / 2.0))
    return _with_slope(x, fixed, slope).to(_result_type(self))


def ndtri(self: Tensor) -> Tensor:
    """aten::special_ndtri: quantiles of the normal distribution; their slope is exp(y^2 / 2) sqrt(2 pi)."""
    x = self.double()
    fixed = standins.STOP_GRADIENT(_quantile(x - 0.5, torch.minimum(x, 1.0 - x)))
    slope = standins.STOP_GRADIENT((fixed.square() / 2.0).exp() * math.sqrt(2.0 * math.pi))
    return _with_slope(x, fixed, slope).to(_result_type(self))


def _with_slope(x: Tensor, value: Tensor, slope: Tensor) -> Tensor:
    """Return a function's value with a gradient by its slope, neither of which has one of its own."""
    change = x - standins.STOP_GRADIENT(x)
    # Neither an infinite slope nor an infinite x makes a NaN of the value.
    return value + torch.where(slope.isfinite() & x.isfinite(), change * slope, 0.0)


def _quantile(center: Tensor, tail: Tensor) -> Tensor:
    """Return the quantile of the normal distribution for p - 1/2 and min(p, 1 - p).

    Wichura's rational approximations (AS 241, 1988), of 16 digits. At p = 0 and 1 it is infinite, beyond NaN.
    """
    squared = 0.180625 - torch.where(center.abs() <= 0.425, center, 0.0).square()
    middle = center * _rational(_WICHURA[0], squared)
    inside = torch.where((tail > 0.0) & (tail < 1.0), tail, 0.5)
    root = (-inside.log()).sqrt()
    outer = _rational(_WICHURA[1], root - 1.6)
    far = _rational(_WICHURA[2], root - 5.0)
    beyond = center.sign() * torch.where(root <= 5.0, outer, far)
    beyond = torch.where(tail == 0.0, center.sign() * torch.inf, torch.where(tail < 0.0, torch.nan, beyond))
    return torch.where(center.abs() <= 0.425, middle, torch.where(center.isnan(), center, beyond))


def _rational(coefficients: tuple[tuple[float, ...], tuple[float, ...]], x: Tensor) -> Tensor:
    """Return a quotient of polynomials, of which the second begins with 1."""
    above, below = coefficients
    numerator, denominator = torch.full_like(x, above[-1]), torch.full_like(x, below[-1])
    for a in reversed(above[:-1]):
        numerator = numerator * x + a
    for b in reversed((1.0, *below[:-1])):
        denominator = denominator * x + b
    return numerator / denominator


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

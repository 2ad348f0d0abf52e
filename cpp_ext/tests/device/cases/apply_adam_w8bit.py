"""Calls of ApplyAdamW8bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from case import SHORT, Case, Float64s, arithmetic, int64s
from device import Values

from cases.apply_adam_w import OPTIONS

OP = "ApplyAdamW8bit"
DTYPES = SHORT

_BLOCK = 256


def cases(random: np.random.Generator, dtype: str, large: bool) -> Iterator[Case]:
    """Tensors of some sizes, whose blocks are whole and not, and one with what is not finite."""
    shapes: list[tuple[int, ...]] = [(), (0, 3), (7,), (256,), (5, 333), (300, 200)]
    for shape in [*shapes, *([(4099, 4097)] if large else [])]:
        for step, scale, attributes in OPTIONS:
            blocks = -(-int(np.prod(shape)) // _BLOCK)
            parameter, gradient = (np.asarray(random.standard_normal(shape)) for _ in range(2))
            largest = np.max(np.abs(gradient), initial=1)
            if shape == (5, 333) and scale is None:
                gradient[1, 40], gradient[4, 100] = np.nan, np.inf
            tensors = [Values.of(values, dtype) for values in (parameter, gradient)]
            tensors += [Values("uint8", np.asarray(random.integers(0, 256, shape, np.uint8))) for _ in range(2)]
            tensors += [Values("float32", (random.random(blocks) + 0.5).astype(np.float32)) for _ in range(2)]
            rate = Values.of(np.asarray(0.01), "float32")
            inputs: list[Values | None] = [*tensors, rate, int64s(step)]
            inputs.append(None if scale is None else Values.of(np.asarray(scale), "float32"))
            exact = _updated(
                [values.wide() for values in tensors], float(rate.wide()), step, scale or 1.0, **attributes
            )
            real = arithmetic(dtype) * (np.nanmax(np.abs(exact[0]), initial=0.0) + 4 * largest)
            # Another code may be the nearest after a rounding.
            terms = [real, 1 / 8, 1 / 8, real, real]
            dtypes = [dtype, "uint8", "uint8", "float32", "float32"]
            yield Case(f"{shape} step {step}", OP, dtype, inputs, exact, terms, attributes, output_dtypes=dtypes)


def _updated(
    tensors: Sequence[Float64s],
    rate: float,
    step: int,
    scale: float,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.01,
    decoupled_weight_decay: int = 1,
) -> list[Float64s]:
    parameter, gradient, mean_codes, root_codes, mean_scale, root_scale = tensors

    def per_element(scales: Float64s) -> Float64s:
        return np.asarray(np.repeat(scales, _BLOCK)[: parameter.size].reshape(parameter.shape))

    signed = mean_codes - 128
    mean = signed * np.abs(signed) / 127**2 * per_element(mean_scale)
    root = (root_codes + 1) ** 2 / 256**2 * per_element(root_scale)
    with np.errstate(all="ignore"):
        gradient = gradient * scale
        if decoupled_weight_decay:
            parameter = parameter * (1 - rate * weight_decay)
        else:
            gradient = gradient + weight_decay * parameter
        mean = beta1 * mean + (1 - beta1) * gradient
        root = np.sqrt(beta2 * root**2 + (1 - beta2) * gradient**2)
        step_size = rate / (1 - beta1 ** (step + 1))
        parameter = parameter - step_size * mean / (root / np.sqrt(1 - beta2 ** (step + 1)) + epsilon)
        blocks = [_blocks(np.abs(values)) for values in (mean, root)]
        unknown = ~np.isfinite(blocks[0] + blocks[1]).all(1)
        scales = [np.where(unknown, np.nan, one.max(1, initial=0.0)) for one in blocks]
        shares = [np.sqrt(np.abs(one) / per_element(most)) for one, most in zip((mean, root), scales, strict=True)]
        hidden = np.isnan(per_element(scales[0]))
        new_mean = np.where(hidden, 128, 128 + np.sign(mean) * np.rint(127 * shares[0]))
        new_root = np.where(hidden, 0, np.maximum(np.rint(256 * shares[1]), 1) - 1)
    return [np.asarray(out) for out in (parameter, new_mean, new_root, *scales)]


def _blocks(values: Float64s) -> npt.NDArray[np.float64]:
    flat = values.reshape(-1)
    return np.concatenate([flat, np.zeros(-flat.size % _BLOCK)]).reshape(-1, _BLOCK)

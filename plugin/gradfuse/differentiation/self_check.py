"""Compares the gradients of a step with finite differences of its loss along random directions."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from gradfuse.checking.execution import Session
from gradfuse.checking.inputs import random_inputs
from gradfuse.checking.random_outputs import random_outputs
from gradfuse.checking.reference import ReferenceSession
from gradfuse.differentiation.rules import FLOATS
from gradfuse.errors import ArgumentError, CheckError, ModelError
from gradfuse.models.arrays import Arrays
from gradfuse.models.tensors import copy_model
from gradfuse.training.step import GRADIENT_SUFFIX, LOSS

_WHO = "build_training_step: check"
_ATTEMPTS = 6
"""How many batches are drawn, of growing sizes, until the model runs on one."""
_DIRECTIONS = 3
_MOVED = 1e-2
"""Parameters are moved by this fraction of themselves: those of a fresh model lie at kinks."""
_LEAST_SHARE = 1e-4
"""A direction weighs parameters so that none changes the loss by more than this share of the largest change."""
_NUDGES = 2
"""How many roundings a parameter is moved by, to see how the loss rounds."""
_ROUNDINGS = 64
"""How many roundings of itself a loss is exact to."""
_TRUSTED = 1e-7
"""To what share of all changes of the loss gradients in float64 are exact."""

_SAME, _SAME_NARROW = 2.0**-10, 2.0**-4
"""By what share of the largest element outputs of the same model may differ, in 32 and in 16 bits."""

_HUGE, _MASK = 1e8, 1e4
"""Constants beyond the first become the second: the exponential of its negative is 0 as well."""


class _Runs(Protocol):
    def run(self, feeds: Mapping[str, npt.NDArray[Any]]) -> Arrays: ...


@dataclasses.dataclass(frozen=True)
class _Precision:
    """A type that losses are computed in, and how far parameters are moved for differences."""

    eps: float
    steps: tuple[float, ...]
    trusted: float


_FLOAT64 = _Precision(float(np.finfo(np.float64).eps), (2.0**-8, 2.0**-11, 2.0**-14, 2.0**-17), _TRUSTED)
_FLOAT32 = _Precision(float(np.finfo(np.float32).eps), (2.0**-3, 2.0**-5, 2.0**-7), 1e-3)


def check_gradients(
    model: ir.Model, forward: ir.Model, parameters: Arrays, others: Arrays, batch: Mapping[str, Any] | None
) -> None:
    """Compare the gradients of a step with central differences of its loss.

    All parameters are moved together along random directions, in which each has its part. Where that shows an error,
    each parameter is moved by itself, to name it. What onnxruntime and numpy cannot compute in float64 is computed in
    float32, each parameter by itself.

    Args:
        model: a step without an optimizer.
        forward: the model whose outputs the loss is taken of.
        parameters: the parameters that gradients are given of.
        others: further inputs that are no part of the batch.
        batch: input -> array, where the check is made; None: at random inputs.

    Raises:
        ArgumentError: the loss depends on random numbers, or the batch is not what the step takes.
        ModelError: the step does not run, or the loss is not finite.
        CheckError: a gradient does not agree with the differences.
    """
    if LOSS in random_outputs(model):
        raise ArgumentError(f"{_WHO}: the loss depends on random numbers; expected none")
    model = _with_smaller_masks(model)
    loss_alone = _loss_of(model)
    rng = np.random.default_rng(0)
    moved = {name: _moved(array, rng) for name, array in parameters.items()}
    fixed = {**others, **moved}
    if batch is not None:
        batch = _given(model, batch, fixed)
    try:
        batches = _random_batches(model, forward) if batch is None else iter((batch,))
        feeds, gradients = _first_run(ReferenceSession(model, _WHO), fixed, batches)
        losses: _Runs = ReferenceSession(loss_alone, _WHO)
        precision, groups = _FLOAT64, [list(parameters)] * _DIRECTIONS
    except ModelError:
        batches = _random_batches(model, forward) if batch is None else iter((batch,))
        feeds, gradients = _first_run(Session(model, _WHO), fixed, batches)
        losses = Session(loss_alone, _WHO)
        precision, groups = _FLOAT32, [[name] for name in parameters]
    point = _Point(losses, feeds, gradients, {name: np.asarray(moved[name], np.float64) for name in moved}, precision)
    for names in groups:
        problem = point.difference(names, rng)
        if problem is None:
            continue
        which = "the gradient of all parameters is"
        for name in names:
            alone = point.difference([name], rng)
            if alone is not None:
                which, problem = f"the gradient of {name!r} is", alone
                break
        wanted, got = problem
        raise CheckError(
            f"{_WHO}: {which} not that of the loss: along a random direction it gives {got:.6g}; "
            f"differences give {wanted:.6g}"
        )


def check_forward(given: ir.Model, model: ir.Model, batch: Mapping[str, Any] | None) -> None:
    """Compare what is differentiated with the model as it was given, in onnxruntime, where that runs it.

    Args:
        given: the model before its opset was raised and its functions were put in the place of their calls.
        model: what has come of it.
        batch: input -> array, also of targets; None: random inputs.

    Raises:
        CheckError: an output differs by more than rounding explains.
    """
    batch_norms = (node for node in given.graph.all_nodes() if node.op_type == "BatchNormalization")
    if any(len(node.outputs) > 1 for node in batch_norms):
        return  # It is differentiated with other statistics.
    skipped = random_outputs(given)
    with contextlib.suppress(ModelError):
        first, second = (Session(one, _WHO, kernels=False) for one in (given, model))
        names = {
            str(value.name): value.dtype for value in model.graph.inputs if value.name not in given.graph.initializers
        }
        if batch is not None and not names.keys() <= batch.keys():
            return  # The check of the gradients says so.
        own = (
            {}
            if batch is None
            else {name: np.asarray(batch[name], t.numpy() if t else None) for name, t in names.items()}
        )
        for feeds in _random_batches(model) if batch is None else (own,):
            with contextlib.suppress(ModelError):
                wanted, got = first.run(feeds), second.run(feeds)
                break
        else:
            return
        for name in wanted.keys() - skipped:
            if not _is_same(got[name], wanted[name]):
                raise CheckError(f"{_WHO}: the output {name!r} of what is differentiated is not that of the model")


def _is_same(got: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> bool:
    """Return whether outputs of one model agree, except for decisions within rounding."""
    if not _is_float(wanted):
        return True
    share = _SAME if wanted.dtype.itemsize > 2 else _SAME_NARROW
    exact, other = _float64(wanted), _float64(got)
    size = np.abs(exact[np.isfinite(exact)]).max(initial=0.0)
    return exact.shape == other.shape and np.allclose(other, exact, rtol=share, atol=share * size, equal_nan=True)


@dataclasses.dataclass(frozen=True)
class _Point:
    """A place at which gradients are compared.

    Attributes:
        losses: computes the loss.
        feeds: the inputs.
        gradients: parameter -> its gradient, in float64.
        parameters: the parameters, in float64.
        precision: what differences are taken with.
    """

    losses: _Runs
    feeds: Arrays
    gradients: Arrays
    parameters: Arrays
    precision: _Precision

    def difference(self, names: Collection[str], rng: np.random.Generator) -> tuple[float, float] | None:
        """Return the derivative along a random direction by differences and by the gradients; None where they agree."""
        direction = self._direction(names, rng)
        parts = [float((self.gradients[name] * change).sum()) for name, change in direction.items()]
        by_gradients = sum(parts)
        by_differences, uncertain = self._by_differences(direction)
        allowed = 4 * uncertain + self.precision.trusted * (sum(map(abs, parts)) + abs(by_differences))
        # A difference that is NaN is an error too.
        return None if abs(by_gradients - by_differences) <= allowed else (by_differences, by_gradients)

    def _direction(self, names: Iterable[str], rng: np.random.Generator) -> Arrays:
        """Return a direction in which every parameter has a part, random and along its gradient."""
        directions = {}
        for name in names:
            gradient, size = self.gradients[name], float(np.linalg.norm(self.parameters[name]))
            drawn = rng.standard_normal(gradient.shape)
            unit = drawn / max(float(np.linalg.norm(drawn)), 1e-300)
            length = float(np.linalg.norm(gradient))
            if length > 0:
                unit = unit + rng.choice([-1.0, 1.0]) * gradient / length
            directions[name] = unit * (size or 1.0)
        changes = {
            name: float(np.linalg.norm(self.gradients[name]) * np.linalg.norm(d)) for name, d in directions.items()
        }
        most = _LEAST_SHARE * max(changes.values())
        return {name: d * min(1.0, most / changes[name]) if changes[name] else d for name, d in directions.items()}

    def _by_differences(self, direction: Arrays) -> tuple[float, float]:
        """Return the derivative along a direction, and how uncertain it is: of all steps, by the one that is least."""
        loss = self._loss(direction, 0.0)
        # The longest change of a parameter is its own length.
        lengths = (np.linalg.norm(d) / (np.linalg.norm(self.parameters[name]) or 1.0) for name, d in direction.items())
        scale = 1 / max(float(max(lengths)), 1e-300)
        # What changes by next to nothing changes the loss by what its terms round.
        nudges = (scale * self.precision.eps * k for k in range(-_NUDGES, _NUDGES + 1))
        noise = max(abs(self._loss(direction, nudge) - loss) for nudge in nudges)
        noise += _ROUNDINGS * self.precision.eps * abs(loss)
        steps = [scale * step for step in self.precision.steps]
        slopes = [(self._loss(direction, h) - self._loss(direction, -h)) / (2 * h) for h in steps]
        found = []
        for (_, coarse), (h, fine) in itertools.pairwise(zip(steps, slopes, strict=True)):
            found.append((abs(coarse - fine) + noise / h, fine))
        uncertain, slope = min(found)
        return slope, uncertain

    def _loss(self, direction: Arrays, step: float) -> float:
        moved = {
            # A sum of single numbers is no array.
            name: np.asarray(self.parameters[name] + step * change, self.feeds[name].dtype)
            for name, change in direction.items()
        }
        return float(self.losses.run({**self.feeds, **moved})[LOSS])


def _loss_of(model: ir.Model) -> ir.Model:
    """Return a copy of a step that computes the loss alone."""
    copy = copy_model(model)
    copy.graph.outputs[:] = [value for value in copy.graph.outputs if value.name == LOSS]
    RemoveUnusedNodesPass()(copy)
    return copy


def _with_smaller_masks(model: ir.Model) -> ir.Model:
    """Return a copy of a step in which constants are not so large that numbers beside them are lost.

    A row of attention that is masked throughout by the least number has equal probabilities: gradients go through the
    sums of scores and mask, as in torch, and differences see none of it.
    """
    copy = copy_model(model)
    for graph in copy.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None and value.dtype in FLOATS:
                value.const_value = _smaller(value.const_value)
        for node in graph:
            tensor = node.attributes.get("value") if node.op_type == "Constant" else None
            if tensor is not None and tensor.as_tensor().dtype in FLOATS:
                node.attributes["value"] = ir.AttrTensor("value", _smaller(tensor.as_tensor()))
    return copy


def _smaller(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    array = tensor.numpy()
    huge = np.isfinite(array) & (np.abs(array.astype(np.float64)) > _HUGE)
    if not huge.any():
        return tensor
    return ir.tensor(np.where(huge, np.sign(array) * _MASK, array).astype(array.dtype), dtype=tensor.dtype)


def _moved(array: npt.NDArray[Any], rng: np.random.Generator) -> npt.NDArray[Any]:
    size = float(np.sqrt(np.mean(np.square(array, dtype=np.float64)))) if array.size else 0.0
    moved = array.astype(np.float64) + _MOVED * (size or 1.0) * rng.standard_normal(array.shape)
    return np.asarray(moved, array.dtype)


def _first_run(session: _Runs, fixed: Arrays, batches: Iterator[Mapping[str, Any]]) -> tuple[Arrays, Arrays]:
    """Return inputs that a step runs on, in the types that differences are taken in, and its gradients."""
    error: ModelError | None = None
    for given in batches:
        feeds = {**given, **fixed}
        try:
            results = session.run(feeds)
        except ModelError as caught:
            error = error or caught
            continue
        if not all(np.isfinite(array).all() for array in map(_float64, results.values())):
            error = error or ModelError(
                f"{_WHO}: the loss or a gradient is not finite; expected a batch with finite ones"
            )
            continue
        wide = isinstance(session, ReferenceSession)
        found = {name: _float64(results[name + GRADIENT_SUFFIX]) for name in fixed if name + GRADIENT_SUFFIX in results}
        return {name: _float64(array) if wide and _is_float(array) else array for name, array in feeds.items()}, found
    assert error is not None
    raise error


def _random_batches(model: ir.Model, forward: ir.Model | None = None) -> Iterator[Arrays]:
    """Yield random inputs, to be tried one after another; targets have the sizes that a forward model gives outputs."""
    session = None
    with contextlib.suppress(ModelError):  # As where onnxruntime has no kernels of bfloat16.
        session = None if forward is None else Session(forward, _WHO)
    for attempt in range(_ATTEMPTS):
        batch = random_inputs(model, np.random.default_rng(attempt), attempt=attempt)
        if forward is not None and session is not None:
            with contextlib.suppress(ModelError):
                own = {str(value.name) for value in forward.graph.inputs}
                outputs = session.run({name: array for name, array in batch.items() if name in own})
                sizes = dict(_sizes(forward.graph.outputs, outputs)) | dict(_sizes(forward.graph.inputs, batch))
                batch = random_inputs(model, np.random.default_rng(attempt), attempt=attempt, sizes=sizes)
        yield batch


def _sizes(values: Iterable[ir.Value], arrays: Mapping[str, npt.NDArray[Any]]) -> Iterator[tuple[str, int]]:
    """Yield the names of dimensions with the sizes that they have in arrays."""
    for value in values:
        array = arrays.get(str(value.name))
        if value.shape is not None and array is not None and len(value.shape) == array.ndim:
            for dim, size in zip(value.shape, array.shape, strict=True):
                if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                    yield dim.value, size


def _given(model: ir.Model, batch: Mapping[str, Any], fixed: Collection[str]) -> Mapping[str, Any]:
    """Return the arrays of a batch in the types of the inputs."""
    wanted = {str(value.name): value for value in model.graph.inputs if value.name not in fixed}
    if set(batch) != set(wanted):
        listed = ", ".join(map(repr, wanted))
        raise ArgumentError(f"{_WHO} has {', '.join(map(repr, batch)) or 'nothing'}; expected arrays of {listed}")
    return {
        name: np.asarray(batch[name], value.dtype.numpy() if value.dtype else None) for name, value in wanted.items()
    }


def _is_float(array: npt.NDArray[Any]) -> bool:
    return array.dtype.kind in "fV" or array.dtype.name == "bfloat16"


def _float64(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.asarray(array).astype(np.float64)

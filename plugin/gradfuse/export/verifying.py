"""The judge of exported models: compares every output with PyTorch's, within what rounding does to the step.

This module imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch
from torch import Tensor

from gradfuse import _torch_private as private
from gradfuse.checking import bounds
from gradfuse.checking.condensing import condensed
from gradfuse.checking.execution import Session, float_types, widened
from gradfuse.checking.reference import ReferenceSession, with_own_decisions
from gradfuse.errors import ExportError, GradfuseError, ModelError
from gradfuse.export import gradient_hooks, onnx_model, steadiness, traced_optimizer
from gradfuse.export.dynamic_shapes import DynamicShapes
from gradfuse.export.large_losses import LargeLosses
from gradfuse.export.reporting import WHO, refusal, tell_share, without_warnings
from gradfuse.export.rounding import NARROW, Rounding, WideConversions, WideSparse
from gradfuse.export.torch_step import TRIED_SEED, Outcome, TorchStep, undisturbed
from gradfuse.models import memory
from gradfuse.models.arrays import Arrays, to_numpy, to_tensor
from gradfuse.models.memory import give_back
from gradfuse.models.spilling import Shelf
from gradfuse.training import optimizers
from gradfuse.training.hyperparameters import LEARNING_RATE
from gradfuse.training.step import GRADIENT_SUFFIX, LOSS, MICRO_STEP, STEP, UPDATED_SUFFIX

_NARROW = frozenset((ir.DataType.FLOAT16, ir.DataType.BFLOAT16))

_SUFFIXES = (GRADIENT_SUFFIX, UPDATED_SUFFIX)

_PART = 2**17
"""How many elements of a parameter PyTorch updates at once: what is made of them stays in the cache."""
_IN_ONE_PASS = (torch.optim.Adam, torch.optim.AdamW)
"""Whose update PyTorch has as one kernel as well, which takes a quarter of the time."""
_UPDATED = 2**24
"""How many elements of all parameters the model updates at once."""

Run = Callable[[TorchStep, Callable[[Tensor], Tensor]], Arrays]
"""Returns the outputs of a step after a function is applied to its tensors."""


def has_onnxruntime() -> bool:
    """Tell whether onnxruntime is installed: without it nothing is compared."""
    try:
        import onnxruntime  # noqa: F401
    except ImportError:
        return False
    return True


def own_outputs(native: Outcome) -> Arrays:
    """Return the results of a run of a step, by the names of a model's outputs."""
    return _named(native, native.changed)


def truth_of(
    step: TorchStep, native: Outcome, seed: int = TRIED_SEED, own: Arrays | None = None, *, in_float64: bool = True
) -> Truth:
    """Return what PyTorch computes for a step, with a seed and counters other than 0 if the step runs on them.

    Args:
        step: the step.
        native: what a run of it gave.
        seed: the seed.
        own: the outputs of a run with this seed, if there was one.
        in_float64: whether it also runs in float64.
    """

    def run(step: TorchStep, cast: Callable[[Tensor], Tensor]) -> Arrays:
        with undisturbed(step), WideSparse(), LargeLosses(), without_warnings():
            outputs = _named(step.run(cast, _condensed), native.changed)
        give_back()
        return outputs

    seeded = step.with_seed(seed)
    distinct = seeded.with_distinct_counters(native)
    is_counted = any(distinct.state[name] is not tensor for name, tensor in seeded.state.items())
    if own is None or is_counted or own.keys() != _names(native):
        try:
            own = run(distinct, lambda tensor: tensor)
        except ExportError:
            # A counter may be the index of something.
            distinct, own = seeded, run(seeded, lambda tensor: tensor)
    free = (*step.trainable, *native.changed, *step.frozen_inputs)
    return Truth.of(distinct, own, run, free, in_float64=in_float64)


@contextlib.contextmanager
def memory_watched(step: TorchStep, shelf: Shelf, save_memory: Callable[[], None]) -> Iterator[None]:
    """Limit what float64 runs keep in memory by what the first runs of a step took, and warn if there is less.

    If these took much, calls `save_memory`, which makes the rest of the export save memory.
    """
    before, earlier = memory.resident(), memory.most_resident()
    yield
    most, free = memory.most_resident(), memory.available()
    if before is None or most is None or free is None:
        return
    # The gradients of the first run were kept while the second one was made.
    kept = sum(step.state[name].nbytes for name in step.trainable)
    grown = max(0, most - before - kept)
    # Besides, a run holds the state in float64, and the scratch memory of its largest operators.
    shelf.limit(min(2 * grown // 3, free // 2))
    if grown > memory.SMALL:
        save_memory()
    # What the process took earlier, as for another export, was more where it did not grow.
    if 2 * grown > free and most != earlier:
        needed, there, less = (f"{size / 2**30:.1f} GiB" for size in (2 * grown, free, grown + kept))
        warnings.warn(
            f"{WHO}: a run in float64 takes about {needed} of memory, of which {there} are free; expected as much, a "
            f"smaller batch, or verify='quick', which compares without float64 and takes about {less}",
            stacklevel=5,
        )


@contextlib.contextmanager
def traced_as_run(step: TorchStep) -> Iterator[None]:
    """Add to a refusal if the module itself computes something else, or fails, when it is traced.

    Raises:
        ExportError: the step is refused.
    """
    try:
        yield
    except ExportError as error:
        wanted = "expected the same, as where masks and positions are arguments"
        asks = "the module asks torch.compiler.is_exporting() or the like, and"
        try:
            with undisturbed(step), private.as_if_exported():
                traced = float(step.run().loss)
        except ExportError as failure:
            text = str(failure).removeprefix(f"{WHO}: ")
            raise refusal(f"{asks} fails when that is true: {text}; {wanted}") from error
        with undisturbed(step):  # with the same random numbers
            native = step.run()
        loss = float(native.loss)
        if abs(traced - loss) > bounds.ROUNDINGS_OF_KERNELS * step.eps_of_activations * abs(loss):
            raise refusal(f"{asks} its loss is {traced:.6g} when that is true, {loss:.6g} else; {wanted}") from error
        # Derivatives that the step takes itself are in all its outputs.
        if native.functions and (native.differentiates or GRADIENT_SUFFIX in str(error)):
            raise refusal(
                f"{str(error).removeprefix(f'{WHO}: ')}; {native.functions[0]} has a backward pass of its own, of "
                "which not all is exported: expected PyTorch's operators instead, with detach() as in "
                "x + (f(x) - x).detach()"
            ) from error
        with undisturbed(step):
            tied = steadiness.tied(step) if "differs from PyTorch" in str(error) else None
        if tied is not None:
            raise refusal(f"{str(error).removeprefix(f'{WHO}: ')}; {tied}") from error
        raise


@dataclasses.dataclass(frozen=True)
class Truth:
    """What PyTorch computes for a step, and what rounding does to it: the measure of a model's outputs.

    Attributes:
        step: the step.
        own: the outputs in the step's own types.
        exact: the outputs in float64; None if the module insists on another type, or gives no finite numbers in it, or
            if they are not asked for.
        kernels: the effect of rounding in another runtime's kernels.
        narrow: what it may do besides where a step of float32 rounds to 16 bits.
        constants: what the rounding of a model's constants may do.
        run: runs the step.
        free: the names of the step's tensors that are inputs of the model.
    """

    step: TorchStep
    own: Arrays
    exact: Arrays | None
    kernels: _Spread
    narrow: _Spread
    constants: _Spread
    run: Run
    free: tuple[str, ...]

    @classmethod
    def of(cls, step: TorchStep, own: Arrays, run: Run, free: tuple[str, ...], *, in_float64: bool = True) -> Truth:
        """Return the truth for the outputs `own`, in the step's own types; `in_float64`: and for those in float64."""
        exact: Arrays | None
        try:
            exact = run(step, _widen) if in_float64 else None
        except Exception:
            # A user's module may raise anything.
            exact = None
        if exact is not None and any((np.isfinite(own[key]) & ~np.isfinite(one)).any() for key, one in exact.items()):
            # The least float64, where a mask has the least of the module's type twice, gives no numbers.
            exact = None
        reference = own if exact is None else exact

        def moved(roundings: float, seed: int, of_narrow: float = 0.0) -> Arrays:
            with Rounding(roundings * step.eps_of_activations, seed, of_narrow) as rounding:
                return run(step, lambda tensor: rounding.moved(tensor if exact is None else _widen(tensor)))

        narrow = step.eps_of_activations > np.finfo(np.float32).eps
        return cls(
            step=step,
            own=own,
            exact=exact,
            kernels=_Spread(
                moved, bounds.ROUNDINGS_OF_NARROW_KERNELS if narrow else bounds.ROUNDINGS_OF_KERNELS, reference
            ),
            narrow=_Spread(
                functools.partial(moved, of_narrow=bounds.ROUNDINGS_OF_NARROW_KERNELS),
                bounds.ROUNDINGS_OF_KERNELS,
                reference,
            ),
            constants=_Spread(moved, bounds.SMALL_ROUNDING, reference),
            run=run,
            free=free,
        )

    def elsewhere(self, seed: int) -> Truth:
        """Return the same for parameters, buffers and a batch that are a thousandth larger or smaller.

        Odd seeds also move integral parameters, such as those that begin as an identity.
        """
        rounding = Rounding(bounds.OTHER_SIZE, seed)
        state = {
            name: rounding.moved(self.step.state[name].detach(), whole=seed % 2 == 1 and name in self.step.trainable)
            for name in self.free
        }
        inputs, targets = (
            tuple(rounding.moved(tensor.detach()) for tensor in part) for part in (self.step.inputs, self.step.targets)
        )
        step = dataclasses.replace(self.step, state=self.step.state | state, inputs=inputs, targets=targets)
        return Truth.of(step, self.run(step, lambda tensor: tensor), self.run, self.free)

    def without_roundings(self, step: TorchStep, own: Arrays) -> Truth:
        """Return the truth of a step of another size by its own outputs alone, which nothing may differ from widely."""
        none = _Spread(lambda *_: own, 0.0, own)
        return dataclasses.replace(self, step=step, own=own, exact=None, kernels=none, narrow=none, constants=none)

    def _of_wide_conversions(self, types: Collection[torch.dtype] = ()) -> Truth:
        """Return the same with float64 for what the module converts to float32, or to one of these types."""

        def run(step: TorchStep, change: Callable[[Tensor], Tensor]) -> Arrays:
            with WideConversions(types):
                return self.run(step, change)

        return Truth.of(self.step, self.own, run, self.free)

    def verify(self, model: ir.Model, which: str) -> None:
        """Compare a model with PyTorch in its own types and in float64.

        Args:
            model: a model whose outputs have names of PyTorch's.
            which: what to call it in messages.

        Raises:
            ExportError: an output differs, or onnxruntime cannot run the model.
        """
        self.compare(model, which)
        self.compare_in_float64(model, which)

    def compare(
        self, model: ir.Model, which: str, opened: Opened | None = None, gradients: Arrays | None = None
    ) -> None:
        """Run a model in stock onnxruntime and compare every output, by its name, with PyTorch.

        An output passes if max|actual - exact| <= 16 max|native - exact| + 64 eps max|exact| + 8 eps G, with eps the
        machine epsilon of the parameters' type and G the largest non-integer output of the step: a result that should
        be 0 can be no more exact than the terms that cancel in it. If not, max|actual - exact| may be larger by 4
        max|moved - exact|, with the largest of up to 16 runs in which every result of arithmetic is moved by up to 64
        roundings: an activation that rounding may put on the other side of a kink lies there in half of them. Integers
        must be equal.

        Args:
            model: the model.
            which: what to call it in messages.
            opened: the model in onnxruntime, where it has been opened.
            gradients: gets the model's gradients, by the names of the parameters.

        Raises:
            ExportError: an output differs, or onnxruntime cannot run the model.
        """
        results = (opened or Opened(model, which)).run(self.feeds(model))
        if results is None:
            return
        if gradients is not None:
            gradients |= _gradients(results)
        take = self._taking(which)
        for name in list(results):
            results[name] = take(name, results[name])
        give_back()
        reference = self.own if self.exact is None else self.exact
        eps = self.step.eps
        # Counters and the seed of dropout do not measure rounding.
        rounded = {name for name, array in results.items() if array.dtype.kind not in "biu"}
        # Nor is what the loss gives beside its value.
        own = [name for name in rounded if name == LOSS or name.endswith((GRADIENT_SUFFIX, UPDATED_SUFFIX))]
        scale = max((bounds.magnitude(array) for name, array in reference.items() if name in own), default=0.0)
        for name, array in results.items():
            wanted = self._wanted(reference, name, array, which)
            bound = 16 * difference(self.own.get(name, wanted), wanted) + 64 * eps * bounds.magnitude(wanted)
            bound = bound + 8 * eps * scale if array.dtype.kind not in "biu" else 0.0
            error = difference(array.astype(np.float64), wanted)
            if error > bound:
                bound += bounds.MOVED_SHARE * self.kernels.largest(name, (error - bound) / bounds.MOVED_SHARE)
            if error > bound and self._rounds_to_narrow(model, which):
                bound += bounds.MOVED_SHARE * self.narrow.largest(name, (error - bound) / bounds.MOVED_SHARE)
            _require(error <= bound, name, which, error, bound)

    def compare_in_float64(self, model: ir.Model, which: str, source: ir.Model | None = None) -> None:
        """Run a model in float64 and compare every output with PyTorch's float64: no rounding hides an error.

        An output passes if max|actual - exact| <= 64 eps max|exact| + 64 max|moved - exact|, where results are moved
        by up to one rounding to the step's own types, in which the model's constants are. (They are moved by 2^-10 of
        that, which decides nothing near a kink, and the change is taken 2^10 times; it is the median of three runs.)
        Gradients may differ by 8 roundings to float64 of the largest of them besides.
        What does not pass must pass with the decisions of whole numbers, such as the bucket of a distance, that the
        model makes in its own types; or if the module's own conversions to float32 give float64, as those of float32
        round nothing; or at parameters and a batch that are a thousandth larger or smaller: a constant whose rounding
        moves an activation over a kink will not do so there. Without float64 kernels for the model, or a float64 run of
        the module, nothing is compared; nor where the module itself rounds to a narrow type.

        Args:
            model: the model.
            which: what to call it in messages.
            source: what it was made from: an error that this has too is said to be its.

        Raises:
            ExportError: an output differs.
        """
        if self.exact is None or self.step.eps <= np.finfo(np.float64).eps:
            return
        if not self.step.is_narrow and float_types(model) & _NARROW:
            return
        try:
            session = ReferenceSession(model, f"{WHO}: the {which} model")
            results = session.run(self.feeds(model), self._taking(which), tell_share)
        except ExportError:
            raise
        except GradfuseError:
            return
        try:
            self._judge_in_float64(results, which)
        except ExportError as error:
            with contextlib.suppress(GradfuseError):
                self._judge_in_float64(self._with_own_decisions(model, which), which)
                return
            with contextlib.suppress(Exception):
                # A user's module may raise anything.
                self._of_wide_conversions()._judge_in_float64(results, which)
                return
            for seed in range(bounds.OTHER_NUMBERS):
                try:
                    other = self.elsewhere(seed)
                    other._judge_in_float64(session.run(other.feeds(model), other._taking(which), tell_share), which)
                    return
                except Exception:
                    # Refused again, or numbers that the module does not take.
                    continue
            if source is not None:
                self.compare_in_float64(source, "exported")
            raise error

    def _rounds_to_narrow(self, model: ir.Model, which: str) -> bool:
        """Whether a step of float32 rounds to 16 bits, and its model is right where neither does.

        What rounding to 16 bits does may hide an error of a few percent.
        """
        if self.step.is_narrow or not float_types(model) & _NARROW:
            return False
        try:
            wide = self._of_wide_conversions(NARROW)
            if wide.exact is None:
                return False
            session = ReferenceSession(model, f"{WHO}: the {which} model")
            wide._judge_in_float64(session.run(self.feeds(model), self._taking(which), tell_share), which)
        except Exception:
            # A user's module may raise anything.
            return False
        return True

    def _with_own_decisions(self, model: ir.Model, which: str) -> Arrays:
        """Return what the model gives in float64, with decisions of whole numbers made in its own types.

        Raises:
            GradfuseError: there are none, or there is no kernel for a node.
        """
        feeds, source = self.feeds(model), f"{WHO}: the {which} model"
        wide = {name for name, tensor in (self.step.state | self.step.batch).items() if tensor.is_floating_point()}
        decided = with_own_decisions(model, feeds, {*wide, optimizers.LOSS_SCALE}, source)
        if decided is None:
            raise refusal(f"the {which} model decides nothing by whole numbers; expected something")
        return ReferenceSession(decided, source).run(feeds, self._taking(which), tell_share)

    def feeds(self, model: ir.Model) -> Arrays:
        """Return the inputs of a model at the values of the step."""
        values = self.values()
        return {str(value.name): values[str(value.name)] for value in model.graph.inputs}

    def values(self) -> Arrays:
        """Return the tensors of the step, in their own memory."""
        values = {name: to_numpy(tensor, copy=False) for name, tensor in (self.step.state | self.step.batch).items()}
        if self.step.optimizer is not None:
            # At this scale the gradients are those of the loss itself.
            values[optimizers.LOSS_SCALE] = np.array(self.step.optimizer.accumulate, dtype=np.float32)
        return values

    def _judge_in_float64(self, results: Arrays, which: str) -> None:
        assert self.exact is not None
        eps = self.step.eps
        # What is 0 except for rounding, such as the gradient of a softmax over one element, is not 0 in float64 either.
        gradients = [array for name, array in self.exact.items() if name.endswith(GRADIENT_SUFFIX)]
        noise = 8 * np.finfo(np.float64).eps * max(map(bounds.magnitude, gradients), default=0.0)
        for name, array in results.items():
            wanted = self._wanted(self.exact, name, array, which)
            error = difference(array.astype(np.float64), wanted)
            bound = 64 * eps * bounds.magnitude(wanted) if array.dtype.kind == "f" else 0.0
            bound += noise if name.endswith(GRADIENT_SUFFIX) else 0.0
            if error > bound:
                bound += bounds.ROUNDINGS_OF_CONSTANTS / bounds.SMALL_ROUNDING * self.constants.usual(name)
            _require(error <= bound, name, f"{which} (float64)", error, bound)

    def _taking(self, which: str) -> Callable[[str, npt.NDArray[Any]], npt.NDArray[Any]]:
        """Return what condenses an output of a model: those of a tensor of the step must have its shape."""

        def take(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
            of = next((name.removesuffix(one) for one in _SUFFIXES if name.endswith(one)), "")
            like = self.step.state.get(of)
            if like is not None and array.shape != like.shape:
                raise _another_shape(name, which, array.shape, tuple(like.shape))
            return condensed(array)

        return take

    def _wanted(self, reference: Arrays, name: str, array: npt.NDArray[Any], which: str) -> npt.NDArray[Any]:
        wanted = reference.get(name, np.zeros(array.shape))
        if array.shape != wanted.shape:
            raise _another_shape(name, which, array.shape, wanted.shape)
        return wanted


def _another_shape(name: str, which: str, got: tuple[int, ...], wanted: tuple[int, ...]) -> ExportError:
    return refusal(f"output {name!r} of the {which} model has shape {got}; expected {wanted}")


def compare_hooks(
    model: ir.Model,
    step: TorchStep,
    native: Outcome,
    order: Sequence[str],
    free: Collection[str],
    shapes: DynamicShapes,
) -> None:
    """Compare a step whose code registers hooks with what it computes, with other hooks in their places.

    Those themselves may change nothing on the batch, as where they clip; and several tensors of PyTorch may have become
    one in the model.

    Args:
        model: as translated, before gradients are written; it is changed.
        step, native, order, free, shapes: as `onnx_model.completed` and `arrange_step` take them.

    Raises:
        ExportError: an output differs, or onnxruntime cannot run the model.
    """
    trained = len(native.gradients)
    first = trained + len(step.differentiated)
    probe = functools.partial(_probe_from, first)
    model = onnx_model.completed(model, step, order, free, trained, probe=probe)
    onnx_model.arrange_step(model, step, native, shapes)
    probed = dataclasses.replace(step, probed=frozenset(native.hooks))
    truth = truth_of(probed, native, in_float64=False)
    try:
        truth.compare(onnx_model.plain(ir.to_proto(model)), "probed")
    except ExportError as error:
        raise refusal(
            f"{native.hooks[0]} changes other gradients in the exported step than in PyTorch; expected a tensor that "
            "the step computes by arithmetic, as x * 1.0, and what is computed of it: register the hook with that"
        ) from error


def _probe_from(first: int, number: int) -> float:
    return gradient_hooks.probe(number - first)


class _Spread:
    """How far each output moves from the exact one when results are moved by a number of roundings.

    Args:
        moved: (roundings, seed) -> the outputs of a run that is moved by that number of roundings.
        roundings: by how many.
        reference: the exact outputs.
    """

    def __init__(self, moved: Callable[[float, int], Arrays], roundings: float, reference: Arrays) -> None:
        self._moved = moved
        self._roundings = roundings
        self._reference = reference
        self._changes: list[dict[str, float]] = []

    def largest(self, name: str, enough: float) -> float:
        """Return the largest change of an output; no run is made after one whose change is `enough`."""
        largest = 0.0
        for run in range(bounds.MOVED_RUNS):
            largest = max(largest, self._change(run, name))
            if largest >= enough:
                break
        return largest

    def usual(self, name: str) -> float:
        """Return the median change of an output."""
        return sorted(self._change(run, name) for run in range(bounds.SMALL_RUNS))[bounds.SMALL_RUNS // 2]

    def _change(self, run: int, name: str) -> float:
        while run >= len(self._changes):
            try:
                outputs = self._moved(self._roundings, len(self._changes))
            except Exception:
                # Values that a user's module refuses.
                outputs = self._reference
            with np.errstate(invalid="ignore"):
                changes = {key: bounds.magnitude(outputs[key] - wanted) for key, wanted in self._reference.items()}
            self._changes.append(changes)
        return self._changes[run].get(name, 0.0)


def compare_update(
    update: ir.Model,
    gradients: Arrays,
    opened: Opened,
    truth: Truth,
    described: optimizers.Optimizer,
    updating: Sequence[torch.optim.Optimizer],
    state: Arrays,
) -> None:
    """Compare the update that a model makes from its gradients with the one that the optimizer itself makes from them.

    A parameter passes if max|actual - exact| <= 16 max|native - exact| + 16 eps (max|exact| + max|change|), where the
    exact one is a float64 run of the optimizer. Both start from the model's own gradients: Adam makes a change of full
    size even from a gradient that is nothing but rounding. Where the update itself rounds to 16 bits, it may differ by
    4 max|moved - exact| besides, where each gradient is moved by up to one such rounding.

    A step that was traced is compared in more updates, as `_compare_later_updates` says.

    Args:
        update: the model's update alone, of its gradients.
        gradients: what the model gives, by the names of the parameters; they are taken out.
        opened: the model with these gradients as outputs.
        truth: has the step that they are of, without the optimizer.
        described: the optimizer that is in the model.
        updating: PyTorch's, one or several of parts; they are not changed.
        state: the optimizer's state and hyperparameters by the names of the model's inputs.

    Raises:
        ExportError: a parameter differs, or onnxruntime cannot run the model.
    """
    step = truth.step
    _compare_later_updates(step, described, updating)
    if optimizers.LOSS_SCALE in state:
        # Where those of the loss are finite, its multiples need not be.
        gradients = _gradients(opened.run(truth.values() | state))
    if not gradients:
        return
    # A model that has run in float32 gives what an update in 16 bits does not take.
    types = {str(value.name): value.dtype.numpy() for value in update.graph.inputs if value.dtype is not None}
    given = {
        name: gradients[name].astype(types.get(name + GRADIENT_SUFFIX, gradients[name].dtype), copy=False)
        for name in described.parameters
    }
    gradients.clear()
    feeds = truth.values() | state | {name + GRADIENT_SUFFIX: array for name, array in given.items()}
    if MICRO_STEP in feeds:
        # The call that makes the update.
        feeds[MICRO_STEP] = np.array(described.accumulate - 1, dtype=np.int64)
    # The factor by which the model's gradients exceed those that the optimizer gets in PyTorch.
    scale = float(state.get(optimizers.LOSS_SCALE, described.accumulate))
    tensors = {name: to_tensor(array) for name, array in given.items()}
    exact = _Updates(step, described, updating, tensors, scale, torch.float64)
    sizes = {name: step.state[name].numel() for name in described.parameters}
    done, whole = 0, max(1, sum(sizes.values()))
    for names in _groups(sizes):
        part = onnx_model.restricted(update, [name + UPDATED_SUFFIX for name in names])
        results = Opened(part, "updating").run(feeds)
        if results is None:
            return
        for name in names:
            tell_share(done / whole)
            done += step.state[name].numel()
            output, parameter = name + UPDATED_SUFFIX, step.state[name]
            got, before = results.pop(output).reshape(-1), to_numpy(parameter, copy=False).reshape(-1)
            error, largest, change = 0.0, 0.0, 0.0
            for part_of, updated in exact.of(name):
                error = max(error, difference(got[part_of].astype(np.float64), updated))
                largest = max(largest, bounds.magnitude(updated))
                change = max(change, bounds.magnitude(updated - before[part_of].astype(np.float64)))
            bound = 16 * torch.finfo(parameter.dtype).eps * (largest + change)
            if error > bound:
                # Only where it is needed: it takes as long as the reference.
                own = _Updates(step, described, updating, tensors, scale, None)
                bound += 16 * _farthest(own, exact, name)
            if error > bound and _narrow_eps(part, parameter):
                moved = Rounding(_narrow_eps(part, parameter), 0)
                near = {name: moved.moved(tensors[name])}
                bound += 4 * _farthest(
                    _Updates(step, described, updating, tensors | near, scale, torch.float64), exact, name
                )
            _require(error <= bound, output, "updating", error, bound)
        give_back()


def _farthest(updates: _Updates, others: _Updates, name: str) -> float:
    """Return how far two updates of a parameter are from each other."""
    both = zip(updates.of(name), others.of(name), strict=True)
    return max(difference(one, other) for (_, one), (_, other) in both)


def _narrow_eps(update: ir.Model, parameter: Tensor) -> float:
    """Return the machine epsilon of the 16-bit type that the update of a wider parameter rounds to; 0.0 for none."""
    if torch.finfo(parameter.dtype).bits <= 16:
        return 0.0
    found = [
        torch.bfloat16 if dtype == ir.DataType.BFLOAT16 else torch.float16 for dtype in float_types(update) & _NARROW
    ]
    return max((torch.finfo(dtype).eps for dtype in found), default=0.0)


_UPDATES = 8
"""How many updates in a row are compared; half as many are at a later time."""
_LATER = 10_000
"""How many updates later that is."""
_RATE = 0.01
"""The learning rate where it is 0, as before a warmup."""


def _compare_later_updates(
    step: TorchStep, described: optimizers.Optimizer, updating: Sequence[torch.optim.Optimizer]
) -> None:
    """Compare updates that were traced with those of the optimizer: parameter and state, in the first ones and later.

    One parameter of each kind is updated with random gradients, some of which are zeros, by the model and by the
    optimizer in float64. What differs by max|actual - exact| passes if that is no more than in `compare_update`, times
    the number of updates, with the largest values so far.

    Raises:
        ExportError: a parameter or a state differs, or onnxruntime cannot run the update.
    """
    examples = {described.traced[name]: name for name in described.parameters if name in described.traced}
    for rule, name in examples.items():
        assert isinstance(rule, traced_optimizer.TracedRule)
        part = described.alone(name)
        model = _update_alone(part, step.state[name], name)
        optimizer, index, parameter = next(one for one in _updated(updating) if one[2] is step.state[name])
        feeds = {name: to_numpy(parameter)}
        feeds |= part.initial_state(feeds) | part.hyperparameters()
        rate = feeds[LEARNING_RATE] = np.array(feeds[LEARNING_RATE] or _RATE, dtype=np.float32)
        eps = torch.finfo(parameter.dtype).eps
        begin = functools.partial(_LaterUpdates, optimizer, index, parameter, float(rate))
        exact, own, narrow = begin(torch.float64), begin(parameter.dtype), _narrow_eps(model, parameter)
        moved = begin(torch.float64, narrow) if narrow else None
        runs = [one for one in (exact, own, moved) if one is not None]
        opened, generator = Opened(model, "updating"), torch.Generator().manual_seed(0)
        sizes: dict[str, float] = {}
        counts = bool(part.counting)
        for number in range(_UPDATES + _UPDATES // 2 * counts):
            if number == _UPDATES:
                feeds[STEP] = feeds[STEP] + _LATER
                for run in runs:
                    run.skip(rule.counters, _LATER)
            gradient = torch.randn(parameter.shape, generator=generator)
            gradient = (gradient * (number % 4 != 3)).to(parameter.dtype)
            results = opened.run(feeds | {name + GRADIENT_SUFFIX + _GIVEN: to_numpy(gradient)})
            if results is None:
                return
            for run in runs:
                run.take_step(gradient)
            feeds |= {key.removesuffix(UPDATED_SUFFIX): array for key, array in results.items()}
            wanted, natives = exact.values(name), own.values(name)
            nearby = wanted if moved is None else moved.values(name)
            for key, one in wanted.items():
                if key not in feeds:
                    continue
                sizes[key] = max(sizes.get(key, 0.0), bounds.magnitude(one))
                largest = sizes[key] + (sizes[name] if key == name else 0.0)
                bound = 16 * (number + 1) * eps * largest + 16 * difference(natives[key], one)
                bound += 4 * difference(nearby[key], one)
                error = difference(feeds[key].astype(np.float64), one)
                if error > bound and rule.finds_vectors:
                    raise refusal(
                        f"optimizer is {type(optimizer).__name__}: {key!r} depends on which singular vectors or "
                        "eigenvectors its step finds, and others are as right; expected a step that does not, such as "
                        "one of an optimizer that has taken its first steps"
                    )
                _require(error <= bound, key, f"updating (update {number + 1} of random gradients)", error, bound)


_GIVEN = ".given"


def _update_alone(part: optimizers.Optimizer, parameter: Tensor, name: str) -> ir.Model:
    """Return a model of the update of one parameter, with its gradient as an input."""
    dtype = ir.DataType.from_numpy(to_numpy(parameter[:0] if parameter.dim() else parameter).dtype)
    given, gradient, value = (
        ir.Value(name=one, type=ir.TensorType(dtype), shape=ir.Shape(parameter.shape))
        for one in (name + GRADIENT_SUFFIX + _GIVEN, name + GRADIENT_SUFFIX, name)
    )
    node = ir.Node("", "Identity", [given], outputs=[gradient])
    graph = ir.Graph([value, given], [gradient], nodes=[node], opset_imports={"": onnx_model.OPSET}, name="update")
    model = ir.Model(graph, ir_version=10)
    optimizers.append(model, part, [str(given.name)], fuse=False)
    return model


class _LaterUpdates:
    """A parameter that an optimizer updates in a type, with gradients that are moved by some roundings."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        index: int,
        parameter: Tensor,
        rate: float,
        dtype: torch.dtype,
        moved: float = 0.0,
    ) -> None:
        def taken(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return deepcopy(value)
            return value.detach().to(dtype if value.dtype == parameter.dtype else value.dtype, copy=True).cpu()

        self._parameter = taken(parameter)
        state = traced_optimizer.mapped(optimizer.state.get(parameter, {}), taken)
        self._twin = traced_optimizer.twin(
            optimizer, {index: [self._parameter]}, {self._parameter: state}, {index: rate}
        )
        self._optimizer, self._index = optimizer, index
        self._rounding = Rounding(moved, 0) if moved else None

    def skip(self, counters: Collection[str], updates: int) -> None:
        """Raise the optimizer's count of updates."""
        state = traced_optimizer.state_of(self._twin, self._index, self._parameter)
        later = {key: state[key] + updates for key in counters}
        traced_optimizer.set_state(self._twin, self._index, self._parameter, later)

    def take_step(self, gradient: Tensor) -> None:
        wide = gradient.to(self._parameter.dtype)
        self._parameter.grad = wide if self._rounding is None else self._rounding.moved(wide)
        traced_optimizer.take_step(self._optimizer, self._twin)

    def values(self, name: str) -> Arrays:
        """Return the parameter and its state by the names of the model's inputs, in float64."""
        state = traced_optimizer.state_of(self._twin, self._index, self._parameter)
        tensors = {f"{name}.{key}": torch.as_tensor(one) for key, one in state.items() if _is_numeric(one)}
        return {key: to_numpy(one.double()) for key, one in ({name: self._parameter} | tensors).items()}


def _is_numeric(value: Any) -> bool:
    return isinstance(value, (Tensor, int, float))


def _gradients(results: Arrays | None) -> Arrays:
    """Return those of the parameters among what a model gives, by their names."""
    suffix = GRADIENT_SUFFIX
    return {name.removesuffix(suffix): one for name, one in (results or {}).items() if name.endswith(suffix)}


def _groups(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield the names of parameters in groups of at most `_UPDATED` elements, or of one parameter."""
    group: list[str] = []
    for name, size in sizes.items():
        if group and sum(sizes[one] for one in group) + size > _UPDATED:
            yield group
            group = []
        group.append(name)
    if group:
        yield group


def _updated(updating: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[torch.optim.Optimizer, int, Tensor]]:
    """Yield each parameter of some optimizers, with its optimizer and the group that it has there."""
    for optimizer in updating:
        for index, group in enumerate(optimizer.param_groups):
            yield from ((optimizer, index, parameter) for parameter in group["params"])


class _Updates:
    """What optimizers make of copies of the parameters, computed in a type; None: in their own.

    SGD and Adam are elementwise, except for clipping all gradients by their norm: so they take parts of parameters, one
    after another. Others, and those with state in 8 bits, take whole parameters.
    """

    def __init__(
        self,
        step: TorchStep,
        described: optimizers.Optimizer,
        updating: Sequence[torch.optim.Optimizer],
        gradients: Mapping[str, Tensor],
        scale: float,
        dtype: torch.dtype | None,
    ) -> None:
        self._gradients, self._scale, self._dtype = gradients, scale, dtype
        names = {id(tensor): name for name, tensor in step.state.items()}
        # A frozen one may belong to no optimizer.
        self._groups = {
            names[id(parameter)]: (optimizer, index, parameter)
            for optimizer, index, parameter in _updated(updating)
            if names.get(id(parameter)) in gradients
        }
        self._whole = {*described.traced, *described.eight_bit}
        self._max_norm = described.max_grad_norm
        norms = [self._gradient(name, slice(None)).norm() for name in self._groups if self._max_norm is not None]
        self._norm = torch.stack([norm.double() for norm in norms]).norm() if norms else torch.zeros(())
        self._skipped = described.loss_scaling is not None and not all(
            bool(gradient.isfinite().all()) for gradient in gradients.values()
        )

    def of(self, name: str) -> Iterator[tuple[slice, npt.NDArray[np.float64]]]:
        """Yield the parts of a parameter, which is flat, as float64."""
        optimizer, index, parameter = self._groups[name]
        flat = parameter.detach().reshape(-1)
        # As the model has it.
        rate = float(np.float32(optimizer.param_groups[index]["lr"]))
        held = optimizer.state.get(parameter, {})
        dtype = self._dtype or flat.dtype
        is_whole = name in self._whole
        size = max(flat.numel(), 1) if is_whole else _PART
        for begin in range(0, max(flat.numel(), 1), size):
            part = slice(begin, begin + size)

            def taken(value: Any, part: slice = part) -> Any:
                """Return a part's slice of a tensor, in the type of the computation."""
                if not isinstance(value, Tensor):
                    return deepcopy(value)
                if value.shape == parameter.shape and not is_whole:
                    value = value.reshape(-1)[part]
                return value.detach().to(dtype if value.dtype == parameter.dtype else value.dtype, copy=True).cpu()

            copy, state = taken(parameter), traced_optimizer.mapped(held, taken)
            copy.grad = self._gradient(name, part).reshape(copy.shape)
            twin = traced_optimizer.twin(optimizer, {index: [copy]}, {copy: state}, {index: rate})
            if dtype == torch.float64 and type(optimizer) in _IN_ONE_PASS:
                twin.param_groups[index]["fused"] = True
            if self._max_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(copy, self._max_norm, self._norm.to(copy.dtype))
            if not self._skipped:
                traced_optimizer.take_step(optimizer, twin)
            yield part, copy.double().reshape(-1).numpy()

    def _gradient(self, name: str, part: slice) -> Tensor:
        exact = self._gradients[name].reshape(-1)[part].double()
        exact = exact if self._scale == 1.0 else exact / self._scale
        return exact.to(self._dtype or self._groups[name][2].dtype)


def difference(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    """Return the largest absolute difference; NaN does not differ from NaN, nor an infinity from itself."""
    if a.size == 0:
        return 0.0
    with np.errstate(invalid="ignore"):
        apart = a - b
        largest = float(max(apart.max(), -apart.min())) if apart.dtype.kind == "f" else float(np.abs(apart).max())
        if math.isfinite(largest):
            return largest
        differences = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    return float(np.where(np.isnan(differences), np.inf, differences).max())


def _widen(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _condensed(tensor: Tensor) -> Tensor:
    return to_tensor(condensed(to_numpy(tensor, copy=False)))


def _names(outcome: Outcome) -> set[str]:
    gradients = {name + GRADIENT_SUFFIX for name in (*outcome.gradients, *outcome.input_gradients)}
    return {LOSS, *gradients, *(name + UPDATED_SUFFIX for name in outcome.changed), *outcome.outputs}


def _named(outcome: Outcome, changed: Sequence[str]) -> Arrays:
    """Return the outputs of a step by their names in the model, as float64 and condensed."""
    tensors = {LOSS: outcome.loss, **outcome.outputs}
    gradients = outcome.gradients | outcome.input_gradients
    tensors |= {name + GRADIENT_SUFFIX: tensor for name, tensor in gradients.items()}
    tensors |= {name + UPDATED_SUFFIX: outcome.buffers[name] for name in changed}
    return {
        name: condensed(to_numpy(tensor, copy=False)).astype(np.float64, copy=False) for name, tensor in tensors.items()
    }


def _require(within: bool, name: str, which: str, error: float, bound: float) -> None:
    if not within:
        raise refusal(
            f"output {name!r} of the {which} model differs from PyTorch by {error:.3g}; expected at most {bound:.3g}"
        )


class Opened:
    """A model in onnxruntime, in float32 where that lacks its 16-bit kernels; it is opened when it first runs.

    Args:
        model: the model; it is not changed.
        which: what to call it in messages.
        as_it_is: whether to refuse the model if onnxruntime lacks a 16-bit kernel.
    """

    def __init__(self, model: ir.Model, which: str, *, as_it_is: bool = False) -> None:
        self._model = model
        self._as_it_is = as_it_is
        self._source = f"{WHO}: the {which} model"
        self._session: Session | None = None
        self._wide = False

    def run(self, feeds: Mapping[str, npt.NDArray[Any]], outputs: Sequence[str] | None = None) -> Arrays | None:
        """Return the outputs, or those of some names, for the inputs among some arrays; None without onnxruntime.

        Raises:
            ExportError: onnxruntime cannot run the model.
        """
        if not has_onnxruntime():
            return None
        needed = {str(value.name): feeds[str(value.name)] for value in self._model.graph.inputs}
        if not self._wide:
            try:
                return self._run(self._model, needed, outputs)
            except ModelError as error:
                if self._as_it_is or not float_types(self._model) & _NARROW:
                    raise ExportError(str(error)) from error
            self._session, self._wide = None, True
        wide = {
            name: array.astype(np.float32) if ir.DataType.from_numpy(array.dtype) in _NARROW else array
            for name, array in needed.items()
        }
        try:
            return self._run(widened(self._model, ir.DataType.FLOAT), wide, outputs)
        except ModelError as error:
            raise ExportError(str(error)) from error

    def _run(self, model: ir.Model, feeds: Arrays, outputs: Sequence[str] | None) -> Arrays:
        self._session = self._session or Session(model, self._source)
        return self._session.run(feeds, outputs)

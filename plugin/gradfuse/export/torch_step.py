"""A training step as PyTorch runs it: module and loss as one function of all their tensors and a batch.

This module imports torch.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from gradfuse import _torch_private as private
from gradfuse.errors import ExportError, few
from gradfuse.export import checkpoints, explaining, gradient_hooks, host_draws, saved_tensors
from gradfuse.export.arguments import Arguments
from gradfuse.export.dropout import SeededDropout
from gradfuse.export.gradient_hooks import Hook
from gradfuse.export.leaves import (
    MadeTensors,
    Reads,
    WrittenData,
    form,
    holds_numbers,
    is_sparse_matrix,
    refuse_foreign_leaves,
)
from gradfuse.export.quantisation import refuse_observers, without_observers
from gradfuse.export.recurrences import left_unflattened
from gradfuse.export.reporting import WHO, kind, refusal, tell_share
from gradfuse.export.translation import lengths_as_tensors, traceable_ctc
from gradfuse.export.watching import Watch
from gradfuse.models import spilling
from gradfuse.training.names import set_aside
from gradfuse.training.optimizers import Optimizer
from gradfuse.training.step import DROPOUT_SEED, GRADIENT_SUFFIX, LOSS, UPDATED_SUFFIX

TRIED_SEED = 1_234_567_891
"""The seed that models are compared at; not that of a fresh step, which is 0."""

_SMALLER = 0.75
"""By what `with_others` multiplies numbers."""

_WRITES_OF_UPDATE = 3
"""How often an update in place counts as a write."""


def _too_deep() -> ExportError:
    return refusal(
        "the step takes three derivatives in one another within vmap, one of them in forward mode, which crashes "
        "PyTorch's backward pass; expected jacrev in the place of jacfwd and hessian"
    )


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a module keeps a parameter or buffer: an entry of one of its dictionaries."""

    entries: dict[str, Tensor | None]
    key: str

    def tensor(self) -> Tensor:
        tensor = self.entries[self.key]
        assert tensor is not None
        return tensor


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one run of a step gives.

    Attributes:
        loss: a scalar.
        gradients: those of the trainable parameters that the loss depends on.
        buffers: all buffers, as the run left them.
        changed: the names of the buffers that the run changed.
        dropouts: the number of dropouts.
        functions: the names of the `torch.autograd.Function`s with gradients of their own.
        outputs: what the loss returns beside its value, by name.
        input_gradients: the gradients of the tensors of the batch that the step is asked for.
        differentiates: whether module or loss take derivatives themselves.
        hooks: those that the code has registered with what it computes and that change gradients, in order.
        writing_hooks: the hooks that have written into the gradient that they were given, as texts.
        read_by_hooks: what hooks read that may have the memory of the step's own tensors, in whose places copies are.
    """

    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    changed: tuple[str, ...]
    dropouts: int
    functions: tuple[str, ...]
    outputs: dict[str, Tensor]
    input_gradients: dict[str, Tensor]
    differentiates: bool = False
    hooks: tuple[gradient_hooks.Kind, ...] = ()
    writing_hooks: tuple[str, ...] = ()
    read_by_hooks: tuple[tuple[Tensor, Hook], ...] = ()

    def without_values(self) -> Outcome:
        """Return the outcome with gradients that have a shape and a type only: they take as much as the parameters."""
        gradients = {name: one.to("meta") for name, one in self.gradients.items()}
        return dataclasses.replace(self, gradients=gradients, read_by_hooks=())

    def with_dropout_seed(self) -> Outcome:
        """Return the outcome of the same run of a step that has the seed of its dropouts as a buffer: TRIED_SEED."""
        after = torch.tensor(TRIED_SEED + 1, dtype=torch.int64)
        return dataclasses.replace(
            self, buffers=self.buffers | {DROPOUT_SEED: after}, changed=(*self.changed, DROPOUT_SEED)
        )


class FrozenChangedError(Exception):
    """A step changes frozen parameters, as those of a teacher that follows a student.

    Attributes:
        names: their names.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(f"the step writes into frozen parameters: {', '.join(map(repr, names))}")
        self.names = tuple(names)


@dataclasses.dataclass(frozen=True)
class TorchStep:
    """A module and a loss as a function of all their tensors and a batch.

    Attributes:
        module: the module.
        loss: a module or function.
        given_inputs: the batch's inputs, as the arguments of the module.
        given_targets: the batch's targets, as those of the loss after its first.
        inputs: the tensors of the inputs.
        targets: the tensors of the targets.
        state: parameters, then buffers, each once, by the first of its names.
        places: where each of them is kept; tied ones in several places.
        left_out: buffers and frozen parameters that no graph can hold, by name; the step does not read them.
        trainable: the names of the parameters that require gradients.
        buffers: the names of the buffers, and of frozen parameters that the step changes.
        state_dict_names: each name of the `state_dict()` of module and loss -> the name in `state`.
        optimizer: the optimizer; None without one.
        autocast: the type that module and loss run in under `torch.autocast`; None: in their own types.
        aside: the names of tensors that the step may need itself -> what they are called meanwhile.
        originals: the tensors of module and loss as they are, by name.
        taken: the names that no output of the step's own may have.
        differentiated: the names of the tensors of the batch whose gradients are outputs.
        frozen_inputs: the names of the frozen weights that are inputs of the model.
        hooks: trainable parameter -> the hooks on its gradient.
        probed: the hooks that the code registers and that runs replace by others, which `gradient_hooks.probe` defines.
        within: gives what module and loss run within, unless they are traced; None: nothing.
    """

    module: nn.Module
    loss: Callable[..., Tensor]
    given_inputs: Arguments
    given_targets: Arguments
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    state: dict[str, Tensor]
    places: dict[str, list[Place]]
    left_out: dict[str, Tensor]
    trainable: tuple[str, ...]
    buffers: tuple[str, ...]
    state_dict_names: dict[str, str]
    optimizer: Optimizer | None
    autocast: torch.dtype | None
    aside: Mapping[str, str] = dataclasses.field(default_factory=dict)
    originals: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    taken: Collection[str] = ()
    differentiated: tuple[str, ...] = ()
    frozen_inputs: tuple[str, ...] = ()
    hooks: Mapping[str, Sequence[Hook]] = dataclasses.field(default_factory=dict)
    probed: Collection[gradient_hooks.Kind] = ()
    within: Callable[[], contextlib.AbstractContextManager[object]] | None = None

    @classmethod
    def of(
        cls,
        module: Any,
        loss: Any,
        batch: Any,
        describe_optimizer: Callable[[Mapping[int, str]], Optimizer | None],
        autocast: torch.dtype | None,
        input_gradients: Sequence[str] = (),
        run_time: Collection[str] = (),
    ) -> TorchStep:
        """Check the arguments of `export_training_step` and collect what the step consists of.

        Args:
            module, loss, batch, autocast, input_gradients: as for `export_training_step`.
            describe_optimizer: returns the optimizer, given `id` -> name of the trainable parameters.
            run_time: the names of hyperparameters that are inputs beside the learning rate.

        Raises:
            ExportError: an argument is not as described there.
        """
        module, loss = private.unwrapped(module), own_loss if loss is None else private.unwrapped(loss)
        if not isinstance(module, nn.Module):
            raise refusal(f"module is {type(module).__name__}; expected torch.nn.Module")
        if not callable(loss):
            raise refusal(f"loss is {type(loss).__name__}; expected a module or function")
        for what, owner in (("module", module), ("loss", loss)):
            _refuse_scripts(what, owner)
        if loss is own_loss and isinstance(batch, Mapping):
            batch = batch, None
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            several = isinstance(batch, (tuple, list))
            given = f"a {kind(batch)} of {len(batch)}" if several else kind(batch)
            advice = "; several targets are a tuple, as in (x, (y, weights))" if several else ""
            raise refusal(f"batch is {given}; expected (inputs, targets){advice}")

        for owner in (module, loss):
            _refuse_lazy(owner)
            _refuse_backward_hooks(owner)
            refuse_observers(owner)
        owners = _Owners.of(module, loss)
        aside = set_aside(owners.state, run_time)
        owners = owners.renamed(aside)
        state, buffers = owners.state, owners.buffers
        for name, tensor in owners.left_out.items():
            if any(name.removeprefix(prefix) in owner.state_dict() for prefix, owner in owners.owners):
                what = (
                    "a constant of the step, left out of"
                    if is_sparse_matrix(tensor)
                    else "left out of the step, and of"
                )
                text = f"{name!r} is {form(tensor)}: it is {what} the state_dict() of sessions"
                warnings.warn(f"{WHO}: {text}", stacklevel=3)
        trainable = tuple(name for name, tensor in state.items() if tensor.requires_grad and name not in buffers)
        if not trainable:
            raise refusal("module has no parameter that requires a gradient; expected at least one")
        for name in trainable:
            if state[name].is_complex():
                raise refusal(
                    f"parameter {name!r} is {state[name].dtype}; expected real numbers: keep two parameters and "
                    "join them by torch.complex in forward"
                )
        hooks = {name: gradient_hooks.of_parameter(name, state[name]) for name in trainable}
        optimizer = describe_optimizer({key: name for key, name in owners.names.items() if name in trainable})
        reserved = _reserved_names(trainable, buffers, optimizer)
        taken = {*state, *reserved}
        loss_function = loss.forward if isinstance(loss, nn.Module) else loss
        inputs = Arguments.of(batch[0], "inputs", module.forward, 0, "input", taken)
        targets = Arguments.of(batch[1], "targets", loss_function, 1, "target", taken)
        inputs.require_taken(module.forward, 0, "module", "inputs")
        if loss is own_loss and targets.names:
            raise refusal(f"loss is None, and the batch has targets, {few(targets.names)}; expected them in its inputs")
        targets.require_taken(loss_function, 1, "loss", "targets")
        differentiated = _differentiated(input_gradients, inputs, targets)
        for tensor in private.tensors_in(batch) if differentiated else ():
            for hook in private.gradient_hooks(tensor) if isinstance(tensor, Tensor) else ():
                raise refusal(
                    f"a tensor of the batch has the hook {explaining.of_callable(hook)} on its gradient, and "
                    "input_gradients are given; expected none: change what the step gives"
                )
        if differentiated and optimizer is not None and optimizer.loss_scaling is not None:
            raise refusal("input_gradients are given with grad_scaler, which scales them; expected one of the two")
        return cls(
            module=module,
            loss=loss,
            given_inputs=inputs,
            given_targets=targets,
            inputs=inputs.tensors,
            targets=targets.tensors,
            state=state,
            places=owners.places,
            left_out=owners.left_out,
            trainable=trainable,
            buffers=buffers,
            state_dict_names=owners.state_dict_names(),
            optimizer=optimizer,
            autocast=autocast,
            aside=aside,
            originals=dict(state),
            taken=frozenset(taken),
            differentiated=differentiated,
            hooks={name: found for name, found in hooks.items() if found},
        )

    def with_dropout_seed(self) -> TorchStep:
        """Return the step with the seed of its dropouts as one more buffer."""
        seed = torch.zeros((), dtype=torch.int64)
        return dataclasses.replace(
            self,
            state=self.state | {DROPOUT_SEED: seed},
            places=self.places | {DROPOUT_SEED: [Place({DROPOUT_SEED: seed}, DROPOUT_SEED)]},
            buffers=(*self.buffers, DROPOUT_SEED),
        )

    def with_changing(self, names: Sequence[str]) -> TorchStep:
        """Return the step with frozen parameters among its buffers."""
        return dataclasses.replace(self, buffers=(*self.buffers, *names))

    def with_frozen_inputs(self, changed: Collection[str]) -> TorchStep:
        """Return the step whose frozen weights are inputs: what its `state_dict()` has, but for settings.

        Those are frozen parameters, floating buffers, and counters of batch normalisation, if no step changes them.
        """
        known = {*self.state_dict_names.values()} - {*self.trainable, *changed}

        def is_weight(name: str) -> bool:
            counts = name.rpartition(".")[2] == "num_batches_tracked"
            return name not in self.buffers or counts or self.state[name].is_floating_point()

        weights = tuple(name for name in self.state if name in known and is_weight(name))
        return dataclasses.replace(self, frozen_inputs=weights)

    def with_seed(self, seed: int) -> TorchStep:
        """Return the step with another seed of its dropouts, if it has any."""
        if DROPOUT_SEED not in self.state:
            return self
        number = torch.tensor(seed, dtype=torch.int64)
        return dataclasses.replace(self, state=self.state | {DROPOUT_SEED: number})

    def with_others(self) -> TorchStep:
        """Return the step with other parameters, and with a batch in another order and of smaller numbers."""
        state = {name: (self.state[name].detach() * _SMALLER).requires_grad_() for name in self.trainable}

        def turned(tensor: Tensor) -> Tensor:
            return tensor.detach().flip(0) if tensor.dim() else tensor.detach()

        return dataclasses.replace(
            self,
            state=self.state | state,
            inputs=tuple(turned(one) * _SMALLER if one.is_floating_point() else turned(one) for one in self.inputs),
            targets=tuple(map(turned, self.targets)),
        )

    def with_distinct_counters(self, native: Outcome) -> TorchStep:
        """Return the step with counters that differ from each other and from its seed: in a fresh module all are 0."""
        counters = [
            name
            for name in native.changed
            if name != DROPOUT_SEED
            and not native.buffers[name].is_floating_point()
            and native.buffers[name].dim() == 0
            and bool(native.buffers[name] == self.state[name] + 1)
        ]
        state = {name: self.state[name] + number for number, name in enumerate(counters, 2)}
        return dataclasses.replace(self, state=self.state | state)

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the inputs."""
        return self.given_inputs.names

    @property
    def target_names(self) -> tuple[str, ...]:
        """The names of the targets."""
        return self.given_targets.names

    def call_module(self, inputs: Sequence[Tensor]) -> Any:
        """Call the module with tensors in the place of the inputs."""
        return self.given_inputs.call(self.module, (), inputs)

    @property
    def batch(self) -> dict[str, Tensor]:
        """The tensors of the batch by their names."""
        return dict(zip(self.input_names + self.target_names, self.inputs + self.targets, strict=True))

    @property
    def eps(self) -> float:
        """The largest spacing at 1 of the trainable parameters' types."""
        return max(torch.finfo(self.state[name].dtype).eps for name in self.trainable)

    @property
    def eps_of_activations(self) -> float:
        """The same, or the spacing of the type of autocast if that is larger."""
        return max(self.eps, 0.0 if self.autocast is None else torch.finfo(self.autocast).eps)

    @property
    def is_narrow(self) -> bool:
        """Whether tensors of the step, or what autocast makes of them, are of a type narrower than float32."""
        types = {self.autocast, *(tensor.dtype for tensor in (*self.state.values(), *self.batch.values()))}
        return bool(types & {torch.float16, torch.bfloat16})

    @property
    def is_bfloat16_on_cpu(self) -> bool:
        """Whether it is of bfloat16, or under autocast to it, on a CPU: onnxruntime has hardly any kernels for that."""
        tensors = [*self.state.values(), *self.batch.values()]
        return torch.bfloat16 in {self.autocast, *(one.dtype for one in tensors)} and tensors[0].device.type == "cpu"

    @property
    def is_for_narrow_device(self) -> bool:
        """Whether it is of 16 bits, and left so for a device that computes with them."""
        return self.eps_of_activations > torch.finfo(torch.float32).eps and not self.is_bfloat16_on_cpu

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is multiplied by a scale before its gradients are taken."""
        return self.optimizer is not None and self.optimizer.loss_scaling is not None

    @property
    def calls(self) -> gradient_hooks.Calls:
        """What calls the hooks, with the tensors that are in the module now."""
        return gradient_hooks.Calls(self.originals, lambda name: self.places[name][0].tensor())

    @property
    def share_of_hooks(self) -> int:
        """By how much PyTorch divides the gradients of the loss that hooks get, if the loss is not scaled."""
        return 1 if self.optimizer is None or self.scales_loss else self.optimizer.accumulate

    def place(self, state: Mapping[str, Tensor]) -> None:
        """Put `state` in the place of the tensors of module and loss."""
        for name, tensor in state.items():
            if name in self.originals and tensor is not self.originals[name]:
                private.like_in_python(tensor, self.originals[name])
            for place in self.places[name]:
                place.entries[place.key] = tensor

    def apply(
        self,
        state: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        watch: Watch | None = None,
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Return the loss with `state` in place of the module's tensors, the buffers as the run left them, and outputs.

        `watch` watches the module while it runs.
        """
        self.place(state)
        device = next(iter(state.values())).device.type
        within = contextlib.nullcontext if self.within is None or torch.compiler.is_exporting() else self.within
        with within(), torch.autocast(device, self.autocast) if self.autocast else contextlib.nullcontext():
            with watch.watching() if watch is not None else contextlib.nullcontext():
                output = self.call_module(inputs)
            if watch is not None:
                watch.returned(output)
            value = self.given_targets.call(self.loss, (output,), targets)
        outputs: dict[str, Tensor] = {}
        if isinstance(value, (tuple, list)) and len(value) == 2 and isinstance(value[1], Mapping):
            value, outputs = value[0], dict(value[1])
        if isinstance(value, torch.Tensor) and value.dim() and value.numel() == 1:
            # PyTorch takes gradients of it as of a scalar.
            value = value.reshape(())
        if self.is_bfloat16_on_cpu:
            value, outputs = _widened(value), {name: _widened(one) for name, one in outputs.items()}
        after = {name: self.places[name][0].tensor() for name in self.buffers}
        if DROPOUT_SEED in after:
            after[DROPOUT_SEED] = after[DROPOUT_SEED] + 1
        return value, after, outputs

    def run(
        self,
        cast: Callable[[Tensor], Tensor] | None = None,
        take: Callable[[Tensor], Tensor] | None = None,
        updated: Mapping[str, Tensor | None] = MappingProxyType({}),
        held: list[Tensor] | None = None,
        *,
        spoils: bool = False,
    ) -> Outcome:
        """Run forward and backward eagerly on copies of all tensors.

        Args:
            cast: is applied to the copies first.
            take: what to keep of a gradient: it is asked as soon as that is there, so that no two large ones are in
                memory at once. It must be linear.
            updated: the names of tensors that have been updated in place before -> the gradients that they have.
            held: gets the copies of the batch, which else are gone with the run.
            spoils: whether what hooks write into is NaN from then on, but for what they give themselves.

        Raises:
            ExportError: the module, the loss or the backward pass fails, or the step is one that cannot be exported.
        """
        try:
            try:
                return self._run(cast, take, updated, held, spoils)
            except ExportError:
                if take is None or spilling.current() is None:
                    raise
            # Transforms of torch.func refuse to run where tensors that autograd saves go elsewhere.
            with spilling.everything_in_memory():
                return self._run(cast, take, updated, held, spoils)
        finally:
            # Else the module would hold the copies until its next run. A backward pass may call it once more.
            self.place(self.state)

    def _run(
        self,
        cast: Callable[[Tensor], Tensor] | None,
        take: Callable[[Tensor], Tensor] | None,
        updated: Mapping[str, Tensor | None],
        held: list[Tensor] | None,
        spoils: bool,
    ) -> Outcome:
        def fresh(tensor: Tensor) -> Tensor:
            copied = tensor.detach().clone()
            return cast(copied) if cast is not None else copied

        state = {name: fresh(tensor) for name, tensor in self.state.items()}
        leaves = {name: state[name].requires_grad_() for name in self.trainable}
        inputs, targets = tuple(map(fresh, self.inputs)), tuple(map(fresh, self.targets))
        of_batch = dict(zip(self.batch, (*inputs, *targets), strict=True))
        wanted = {name: of_batch[name].requires_grad_() for name in self.differentiated}
        share, calls = 1 if spoils else self.share_of_hooks, self.calls
        running = gradient_hooks.Running(calls, share, spoils)
        running.register(self.hooks, leaves)
        if held is not None:
            held.extend((*inputs, *targets))
        for name, gradient in updated.items():
            for _ in range(_WRITES_OF_UPDATE):
                torch.autograd.graph.increment_version(state[name])
            state[name].grad = gradient
        versions = {name: private.version(tensor) for name, tensor in state.items()}
        before = {name: state[name].clone() for name in self.buffers}
        made, written, read = MadeTensors(), WrittenData(), Reads(self.left_out)
        hooks = gradient_hooks.InForward(running, self.probed)
        kept = saved_tensors.limited(state.values()) if take is not None else contextlib.nullcontext()
        # A step without a seed is run to find whether it needs one.
        drawing = SeededDropout(state.get(DROPOUT_SEED, torch.tensor(TRIED_SEED)))
        try:
            derivatives = private.derivatives_noted()
            limited = private.derivatives_limited(_too_deep)
            with lengths_as_tensors(), drawing as drawn, made, written, read, hooks, kept, limited:
                with derivatives as taken_inside:
                    value, after, outputs = self.apply(state, inputs, targets)
        except ExportError:
            raise
        except Exception as error:
            # A user's module may raise anything.
            raise refusal(f"the module or the loss fails on the batch: {explaining.reason(error)}") from error
        if not isinstance(value, torch.Tensor) or value.dim() != 0:
            wanted_of = "a tensor of one element, or (such a tensor, a dictionary of others by name)"
            raise refusal(f"loss returns {kind(value)}; expected {wanted_of}")
        _require_outputs(outputs, self.taken)
        if not value.requires_grad:
            raise refusal("loss depends on no trainable parameter; expected a differentiable loss")
        functions = tuple(private.own_functions(value))
        collected = [name for name, leaf in leaves.items() if leaf.grad is not updated.get(name)]
        if collected:
            raise refusal(
                f"the step calls backward(), which adds to .grad of {collected[0]!r}, where the gradient of the loss "
                "comes too; expected torch.autograd.grad, or backward(inputs=[...]) without parameters"
            )
        refuse_foreign_leaves(value, leaves | wanted, (*inputs, *targets), made)
        written_into = [
            name
            for name, tensor in state.items()
            if name not in self.buffers
            and (
                private.version(tensor) != versions[name]
                or tensor in written
                or self.places[name][0].tensor() is not tensor
                # Operators on several tensors do not count versions.
                or (cast is None and not _is_same(tensor, self.state[name]))
            )
        ]
        for name in written_into:
            if name in self.trainable:
                raise refusal(
                    f"the step changes parameter {name!r} in place{self._where_changed(name)}; expected changes of "
                    "buffers and frozen parameters only: compute with a changed copy, or change it between steps; "
                    "freeze it by requires_grad_(False) if it is not trained, or run the module once before if its "
                    "first batch sets it"
                )
        if written_into:
            raise FrozenChangedError(written_into)
        memory = {private.storage(leaf): name for name, leaf in leaves.items()}
        for name, tensor in after.items():
            trained = memory.get(private.storage(tensor))
            if trained is not None and name not in leaves:
                raise refusal(
                    f"the step gives {name!r} the memory of {trained!r}, which is trained; expected a copy, as by "
                    "clone()"
                )
        # Kernels that write running statistics do not count versions.
        changed = (
            name
            for name, tensor in after.items()
            if tensor is not state[name]
            or private.version(tensor) != versions[name]
            or not torch.equal(tensor, before[name])
            or tensor in written
        )
        every = leaves | wanted
        running.in_backward = True
        gradients = _gradients(value, every) if take is None else _gradients_taken(value, every, take)
        for name in wanted:
            if name not in gradients:
                raise refusal(
                    f"the loss does not depend on {name!r}, whose gradient is asked for; expected that it does"
                )
        return Outcome(
            loss=value.detach(),
            gradients={name: one for name, one in gradients.items() if name not in wanted},
            buffers={name: tensor.detach() for name, tensor in after.items()},
            changed=tuple(changed),
            dropouts=drawn.count,
            functions=functions,
            outputs={name: tensor.detach() for name, tensor in outputs.items()},
            input_gradients={name: gradients[name] for name in wanted},
            differentiates=bool(taken_inside),
            writing_hooks=tuple(map(str, running.writing)),
            hooks=hooks.registered,
            read_by_hooks=tuple(calls.aliases),
        )

    def _where_changed(self, name: str) -> str:
        """Return where code changes a parameter, for messages."""
        state = {key: tensor.detach().clone() for key, tensor in self.state.items()}
        for key in self.trainable:
            state[key].requires_grad_()
        tensor, version = state[name], private.version(state[name])
        with WrittenData() as written:
            with explaining.Since(lambda: private.version(tensor) != version or tensor in written) as since:
                self.apply(state, self.inputs, self.targets)
        place: str = since.place
        return place


def _widened(given: Any) -> Any:
    """Return a tensor in bfloat16, which numpy does not have, in float32, and anything else as it is."""
    return given.float() if isinstance(given, torch.Tensor) and given.dtype == torch.bfloat16 else given


def own_loss(output: Any) -> Any:
    """Return the loss that a module computes itself.

    That is a tensor, or (a tensor, a dictionary of outputs); else the entry or attribute `loss` of what the module
    returns, as of the outputs of transformers, or the first element of a tuple.
    """
    if isinstance(output, (tuple, list)) and len(output) == 2 and isinstance(output[1], Mapping):
        return output
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping) or hasattr(output, "loss"):
        found = output.get("loss") if isinstance(output, Mapping) else output.loss
        if found is None:
            raise refusal(
                "loss is None, and the module's output has no loss; expected one, as with labels= in the batch"
            )
        return found
    return output[0] if isinstance(output, (tuple, list)) and output else output


def _differentiated(given: Any, inputs: Arguments, targets: Arguments) -> tuple[str, ...]:
    """Return the names of the tensors of the batch whose gradients are asked for."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise refusal(f"input_gradients is {given!r}; expected a list of names of inputs")
    tensors = dict(zip((*inputs.names, *targets.names), (*inputs.tensors, *targets.tensors), strict=True))
    for name in given:
        if name not in tensors:
            raise refusal(f"input_gradients has {name!r}; expected names among {few(map(repr, tensors))}")
        if not tensors[name].is_floating_point():
            raise refusal(f"input_gradients has {name!r}, which is {tensors[name].dtype}; expected a floating type")
    return tuple(dict.fromkeys(given))


def _require_outputs(outputs: Mapping[Any, Any], taken: Collection[str]) -> None:
    for name, tensor in outputs.items():
        if not isinstance(name, str) or not name:
            raise refusal(f"loss returns an output with the name {name!r}; expected text")
        if name in taken or name.endswith((GRADIENT_SUFFIX, UPDATED_SUFFIX)):
            raise refusal(f"loss returns an output {name!r}, a name that the step has already; expected another one")
        if not isinstance(tensor, torch.Tensor):
            advice = f"; give it as torch.tensor({tensor!r})" if isinstance(tensor, (int, float)) else ""
            raise refusal(f"loss returns {kind(tensor)} as the output {name!r}; expected a tensor{advice}")


@contextlib.contextmanager
def undisturbed(step: TorchStep) -> Iterator[None]:
    """Let a step be run and traced, and leave module, loss and the states of random numbers as they were."""
    owners = _restored(step.module), _restored(step.loss)
    with (
        torch.random.fork_rng(),
        host_draws.kept(),
        owners[0],
        owners[1],
        torch.enable_grad(),
        traceable_ctc(),
        left_unflattened(),
        checkpoints.marked(),
        without_observers(),
    ):
        yield


@contextlib.contextmanager
def _restored(owner: object) -> Iterator[None]:
    """At the end, restore every attribute of a module and its submodules, and what is in those that hold others.

    Parameters, buffers, submodules and hooks are in dictionaries, and modules keep notes in lists and sets.
    """
    modules = list(owner.modules()) if isinstance(owner, nn.Module) else []
    holders: list[Any] = [vars(module) for module in modules]
    holders += [value for held in list(holders) for value in held.values() if isinstance(value, (dict, list, set))]
    kept = [(holder, copy.copy(holder)) for holder in holders]
    try:
        yield
    finally:
        for holder, before in kept:
            holder.clear()
            if isinstance(holder, list):
                holder.extend(before)
            else:
                holder.update(before)


def _refuse_scripts(what: str, owner: Any) -> None:
    """Refuse what TorchScript has compiled: its code is no longer Python's, which could be traced."""
    parts = owner.named_modules() if isinstance(owner, nn.Module) else [("", owner)]
    for name, part in parts:
        if isinstance(part, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
            where = f"the part {name!r} of {what}" if name else what
            raise refusal(
                f"{where} is a {type(part).__name__}, which torch.export cannot trace; expected the module or function "
                "that torch.jit.script or torch.jit.trace was given"
            )


def _refuse_lazy(owner: Any) -> None:
    """Refuse modules whose parameters get their shapes from the first batch that they see."""
    if not isinstance(owner, nn.Module):
        return
    for name, tensor in (*owner.named_parameters(), *owner.named_buffers()):
        if private.is_lazy(tensor):
            part = owner.get_submodule(name.rpartition(".")[0])
            raise refusal(
                f"{name!r} of {type(part).__name__} has no shape yet; expected a module that has run on a batch, which "
                "decides it: call the module once before the export"
            )


def _refuse_backward_hooks(owner: Any) -> None:
    """Refuse modules with hooks on their gradients, which cannot be traced."""
    parts = owner.named_modules() if isinstance(owner, nn.Module) else ()
    found = [
        (f"{f'the part {name!r}' if name else 'the module'} ({type(part).__name__})", hook)
        for name, part in parts
        for hook in private.backward_hooks(part)
    ]
    found += [("every module", hook) for hook in private.backward_hooks_of_all()]
    for where, hook in found:
        raise refusal(
            f"{where} has the hook {explaining.of_callable(hook)} on its backward pass; expected none: take it away by "
            "remove() of its handle. To change the gradient of what it computes, call register_hook of its output, in "
            "forward or in a hook by register_forward_hook"
        )


@dataclasses.dataclass(frozen=True)
class _Owners:
    """A module and a loss, and their tensors.

    Attributes:
        owners: (prefix of names, module); the loss is left out if it is a function.
        state, places, left_out, buffers: as in `TorchStep`.
        names: `id` of a tensor -> its name.
    """

    owners: list[tuple[str, nn.Module]]
    state: dict[str, Tensor]
    places: dict[str, list[Place]]
    left_out: dict[str, Tensor]
    buffers: tuple[str, ...]
    names: dict[int, str]

    @classmethod
    def of(cls, module: nn.Module, loss: Callable[..., Tensor]) -> _Owners:
        # The loss's tensors come under a prefix; those that it shares with the module keep the module's names.
        owners = [("", module), *([("loss.", loss)] if isinstance(loss, nn.Module) else [])]
        state: dict[str, Tensor] = {}
        places: dict[str, list[Place]] = {}
        left_out: dict[str, Tensor] = {}
        names: dict[int, str] = {}
        parameters = 0
        for entries_of in (private.parameter_entries, private.buffer_entries):
            parameters = len(state)
            for prefix, owner in owners:
                for path, submodule in owner.named_modules():
                    entries = entries_of(submodule)
                    for key, tensor in entries.items():
                        if tensor is None:
                            continue
                        name = prefix + (f"{path}.{key}" if path else key)
                        if not holds_numbers(tensor):
                            if tensor.requires_grad:
                                raise refusal(f"parameter {name!r} is {form(tensor)}; expected numbers in memory")
                            left_out[name] = tensor
                            continue
                        if id(tensor) not in names:
                            if name in state:
                                raise refusal(f"module and loss both have a tensor {name!r}; rename one")
                            names[id(tensor)] = name
                            state[name] = tensor
                        places.setdefault(names[id(tensor)], []).append(Place(entries, key))
        return cls(owners, state, places, left_out, tuple(state)[parameters:], names)

    def renamed(self, names: Mapping[str, str]) -> _Owners:
        """Return the same with other names for some tensors."""
        return dataclasses.replace(
            self,
            state={names.get(name, name): tensor for name, tensor in self.state.items()},
            places={names.get(name, name): places for name, places in self.places.items()},
            buffers=tuple(names.get(name, name) for name in self.buffers),
            names={key: names.get(name, name) for key, name in self.names.items()},
        )

    def state_dict_names(self) -> dict[str, str]:
        return {
            prefix + name: self.names[id(tensor)]
            for prefix, owner in self.owners
            for name, tensor in owner.state_dict(keep_vars=True).items()
            if id(tensor) in self.names
        }


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether tensors have the same numbers; NaN is NaN."""
    return torch.equal(one, other) or torch.equal(one.nan_to_num(), other.nan_to_num())


def _reserved_names(trainable: Sequence[str], buffers: Sequence[str], optimizer: Optimizer | None) -> list[str]:
    """Return the names of the outputs, and of the inputs that the optimizer adds."""
    added = [] if optimizer is None else optimizer.input_names()
    reserved = [LOSS, DROPOUT_SEED, *(name + GRADIENT_SUFFIX for name in trainable)]
    reserved += [name + UPDATED_SUFFIX for name in (*(trainable if optimizer else ()), *buffers)]
    return [*reserved, *added, *(name + UPDATED_SUFFIX for name in added)]


def _gradients(value: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of the leaves that a value depends on."""
    # A module may freeze some of them.
    leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    for leaf in leaves.values():
        # Python sees a Ctrl-C when it runs something.
        leaf.register_hook(lambda gradient: None)  # type: ignore[no-untyped-call]
    with _own_backward_named():
        gradients = torch.autograd.grad(value, tuple(leaves.values()), allow_unused=True)
    found = zip(leaves, gradients, strict=True)
    return {name: _dense(name, gradient) for name, gradient in found if gradient is not None}


def _gradients_taken(
    value: Tensor, leaves: Mapping[str, Tensor], take: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Return what is kept of each of them; `value` is one that nothing else is computed of."""
    found: dict[str, Tensor] = {}

    def keep(name: str, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        taken = take(_dense(name, gradient))
        found[name] = found[name] + taken if name in found else taken
        tell_share(len(found) / len(leaves))

    leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    with contextlib.ExitStack() as hooks, _own_backward_named():
        for name, leaf in leaves.items():
            hook = leaf.register_post_accumulate_grad_hook(functools.partial(keep, name))  # type: ignore[no-untyped-call]
            # A leaf and its hook refer to one another, and no collection sees it.
            hooks.callback(hook.remove)
        torch.autograd.backward(value)
    return {name: found[name] for name in leaves if name in found}


@contextlib.contextmanager
def _own_backward_named() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise refusal(f"PyTorch's own backward pass fails: {explaining.reason(error)}") from error


def _dense(name: str, gradient: Tensor) -> Tensor:
    """Return a gradient with all its zeros, which an embedding leaves out by `sparse=True`."""
    if gradient.layout == torch.sparse_coo:
        return gradient.to_dense()
    if gradient.layout != torch.strided:
        raise refusal(f"the gradient of {name!r} is {gradient.layout}; expected torch.strided")
    return gradient

"""Conflicts between the names of a step's own inputs and outputs and those of the user's tensors.

While a step is built, conflicting tensors of the user have temporary names. In the finished step they have their own,
and the step's inputs and outputs have others.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping

import onnx
import onnx_ir as ir

from gradfuse.models.arrays import Arrays
from gradfuse.models.inlining import values_of
from gradfuse.training.hyperparameters import LEARNING_RATE
from gradfuse.training.step import DROPOUT_SEED, LOSS, STEP, UPDATED_SUFFIX, TrainingStep

_ASIDE = "/own"
_OURS = rf"(scaled_)?{LOSS}|{STEP}|micro_step|n_averaged|loss_scale|growth_tracker|{DROPOUT_SEED}"


def aside(name: str) -> str:
    """Return the temporary name of a tensor of the user."""
    return name + _ASIDE


def set_aside(names: Collection[str], hyperparameters: Iterable[str] = ()) -> dict[str, str]:
    """Return the user's names that a step may need, and their tensors' temporary names until it is finished.

    Args:
        names: the names.
        hyperparameters: those that are inputs beside the learning rate.
    """
    inputs = "|".join(map(re.escape, (LEARNING_RATE, *hyperparameters)))
    ours = re.compile(rf"({_OURS}|({inputs})(\.\d+)?)({re.escape(UPDATED_SUFFIX)})?")
    known = set(names)
    taken = [name for name in names if ours.fullmatch(name) or name.rpartition(".")[0] in known]
    return {name: free(aside(name), known) for name in taken}


def free(name: str, taken: Collection[str]) -> str:
    """Return a free name: this one, or with underscores appended."""
    while name in taken:
        name += "_"
    return name


def finished(step: TrainingStep, aside: Mapping[str, str]) -> TrainingStep:
    """Give the user's tensors their names again; what is the step's own and has one of them gets another.

    Args:
        step: a step.
        aside: what `set_aside` gave.
    """
    if not aside:
        return step
    back = {other: name for name, other in aside.items()}
    users = [*step.parameters, *(name for name in step.buffers if name != DROPOUT_SEED), *step.frozen, *step.constants]
    users += [*step.input_names, *step.target_names]
    names = {name: back.get(name, name) for name in users}
    in_state_dict = {name: back.get(name, name) for name, source in step.state_dict_names.items() if source in names}
    taken = {*names.values(), *in_state_dict.values()}
    moved: dict[str, str] = {}

    def give(name: str, wanted: str) -> None:
        names[name] = free(wanted, taken)
        taken.add(names[name])
        if names[name] != wanted:
            moved[wanted] = names[name]

    inputs = [value.name for value in step.model.graph.input]
    outputs = [value.name for value in step.model.graph.output]
    for name in (*inputs, *outputs):
        if name not in names:
            # What belongs to a tensor is named after it, but hyperparameters of other groups after none.
            of, dot, what = name.rpartition(".")
            give(name, f"{names[of]}{dot}{what}" if of in names and of not in step.hyperparameters else name)
    evaluation = step.evaluation_model
    return dataclasses.replace(
        step,
        model=_renamed(step.model, names),
        parameters=_keys(step.parameters, names),
        buffers=_keys(step.buffers, names),
        input_names=tuple(names[name] for name in step.input_names),
        target_names=tuple(names[name] for name in step.target_names),
        optimizer_state=_keys(step.optimizer_state, names),
        hyperparameters=_keys(step.hyperparameters, names),
        constants=_keys(step.constants, names),
        frozen=_keys(step.frozen, names),
        state_dict_names={
            in_state_dict.get(name, names[source]): names[source] for name, source in step.state_dict_names.items()
        },
        evaluation_model=None if evaluation is None else _renamed(evaluation, names),
        index_ranges={names[name]: ranges for name, ranges in step.index_ranges.items()},
        own_names=moved,
        output_names=tuple(names.get(name, name) for name in step.output_names),
    )


def _keys(values: Arrays, names: Mapping[str, str]) -> Arrays:
    return {names[name]: value for name, value in values.items()}


def _renamed(proto: onnx.ModelProto, names: Mapping[str, str]) -> onnx.ModelProto:
    model = ir.from_proto(proto)
    interface = [*model.graph.inputs, *model.graph.outputs]
    final = {names.get(str(value.name), str(value.name)) for value in interface}
    known = {str(value.name) for value in values_of(model.graph)} | final
    for value in values_of(model.graph):
        if value.name in final and value not in interface:
            value.name = free(f"{value.name}_inner", known)
            known.add(value.name)
    for value in interface:
        value.name = names.get(str(value.name), value.name)
    renamed: onnx.ModelProto = ir.to_proto(model)
    return renamed

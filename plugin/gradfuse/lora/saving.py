"""`gradfuse.save_adapter`: trained adapters as files of PEFT or of onnxruntime."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import onnx

from gradfuse.errors import ArgumentError, GradfuseError, ModelError, one_line
from gradfuse.lora.adding import adapter_names, known_modules
from gradfuse.models import files, tensor_files
from gradfuse.models.arrays import Arrays
from gradfuse.runtime import import_onnxruntime
from gradfuse.training.arguments import require_path
from gradfuse.training.session import TrainingSession
from gradfuse.training.step import TrainingStep

_T = TypeVar("_T")

_WHO = "save_adapter"
ORT_SUFFIX = ".onnx_adapter"
PEFT_PREFIX = "base_model.model."
TWICE = "to whose weight PEFT adds the adapter twice"
"""What PEFT does with `out_proj` of `MultiheadAttention`; it was seen in 0.21."""
PEFT_TENSORS, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"


def save_adapter(
    trained: TrainingSession | TrainingStep, path: str | os.PathLike[str], *, within: str | None = None
) -> None:
    """Write the current values of the adapters that `add_lora` added.

    Args:
        trained: a session of a training step; or a step, for the values that training starts from.
        path: a file `*.onnx_adapter` for `onnxruntime.LoraAdapter` and the model of `add_lora_inputs`, where B is
            multiplied by alpha / rank; or else a folder for `peft.PeftModel.from_pretrained`, with
            `adapter_model.safetensors` and `adapter_config.json`.
        within: for a folder, the name of PEFT's module in the exported one, such as "model" if an exported wrapper has
            it as `self.model`; None: it is the exported one.

    Raises:
        ArgumentError: the step has no adapters of `add_lora`, one is not within that module, or an argument has the
            wrong type.
        ModelError: a file cannot be written.
        GradfuseError: safetensors is not installed, or onnxruntime is older than 1.20.

    Warns:
        UserWarning: the step trains parameters that are not adapters; they are not written.
    """
    require_path(path, _WHO)
    if isinstance(trained, TrainingSession):
        step, values = trained.training_step, trained.state_dict()
    elif isinstance(trained, TrainingStep):
        step, values = trained, dict(trained.parameters)
    else:
        raise ArgumentError(f"{_WHO}: trained is {type(trained).__name__}; expected a TrainingSession or TrainingStep")
    modules = modules_of(step.model, _WHO)
    adapters = _adapters(step, modules, values)
    others = [name for name in step.parameters if name not in adapters]
    if others:
        warnings.warn(
            f"{_WHO}: {others[0]!r} trains and is no adapter; it is not written. TrainingSession.save writes it",
            stacklevel=2,
        )
    path = os.fspath(path)
    if path.endswith(ORT_SUFFIX):
        if within is not None:
            raise ArgumentError(f"{_WHO}: within is {within!r}; expected None, as a file has the names of the model")
        write_ort(path, modules, adapters, _WHO)
    else:
        prefix = "" if within is None else f"{within}."
        outside = [module for module in modules if not module.startswith(prefix)]
        if outside:
            raise ArgumentError(f"{_WHO}: within is {within!r}, and {outside[0]!r} is not; expected a module with all")
        graph = step.model.graph
        names = [one.name for one in (*graph.initializer, *graph.input)]
        own = [name.removeprefix(prefix) for name in (*names, *step.parameters, *step.frozen)]
        write_peft(path, _named_from(prefix, modules), _named_from(prefix, adapters), own, _WHO)


def _named_from(prefix: str, found: Mapping[str, _T]) -> dict[str, _T]:
    return {name.removeprefix(prefix): value for name, value in found.items()}


def modules_of(model: onnx.ModelProto, who: str) -> dict[str, tuple[int, float]]:
    """Return the rank and alpha of each module whose adapters are not inputs."""
    stored = known_modules(who, {entry.key: entry.value for entry in model.metadata_props})
    modules = {module: (int(found["rank"]), float(found["alpha"])) for module, found in stored.items() if found["rank"]}
    if not modules:
        raise ArgumentError(f"{who}: the step has no adapters; expected one of a model of add_lora")
    return modules


def _adapters(step: TrainingStep, modules: Mapping[str, Any], values: Arrays) -> Arrays:
    """Return A and B of all modules; those that do not train are constants of the step, or inputs."""
    constants = {tensor.name: tensor for tensor in step.model.graph.initializer}
    found = {}
    for name in (name for module in modules for name in adapter_names(module)):
        if name in values or name in step.frozen:
            found[name] = values[name] if name in values else step.frozen[name]
        elif name in constants:
            found[name] = onnx.numpy_helper.to_array(constants[name])
        else:
            raise ArgumentError(f"{_WHO}: the step has no {name!r}; expected a loss that depends on all adapters")
    return found


def write_ort(path: str, modules: Mapping[str, tuple[int, float]], adapters: Arrays, who: str) -> None:
    """Write adapters as a file of onnxruntime, whose B is multiplied by alpha / rank."""
    onnxruntime = import_onnxruntime()
    if not hasattr(onnxruntime, "AdapterFormat"):
        raise GradfuseError(f"{who}: onnxruntime is {onnxruntime.__version__}; expected 1.20 or newer for adapters")
    scaled = dict(adapters)
    for module, (rank, alpha) in modules.items():
        _, b = adapter_names(module)
        scaled[b] = (adapters[b] * (alpha / rank)).astype(adapters[b].dtype)
    content = onnxruntime.AdapterFormat()
    content.set_adapter_version(1)
    content.set_model_version(1)
    value = onnxruntime.OrtValue.ortvalue_from_numpy
    content.set_parameters({name: value(np.ascontiguousarray(array)) for name, array in scaled.items()})
    files.require_regular(path, "the adapter")

    def make(written: str) -> None:
        content.export_adapter(os.path.abspath(written))

    try:
        files.write(path, make)
    except Exception as error:
        # onnxruntime's exception classes share no public base.
        raise ModelError(f"{path}: cannot write the file: {one_line(error)}") from error


def write_peft(
    path: str, modules: Mapping[str, tuple[int, float]], adapters: Arrays, names: Iterable[str], who: str
) -> None:
    """Write adapters as a folder of PEFT.

    Args:
        path: the folder.
        modules: module -> rank and alpha.
        adapters: A and B of each.
        names: tensors of the model, as far as they are known: those of `MultiheadAttention` tell it from other modules.
        who: what messages name first.

    Raises:
        ArgumentError: a module is the `out_proj` of one.
        ModelError: the folder cannot be written.
    """
    read = {name.rpartition(".in_proj_")[0] for name in names} | set(modules)
    for module in modules:
        attention, _, last = module.rpartition(".")
        if last == "out_proj" and attention in read - {""}:
            raise ArgumentError(
                f"{who}: {module!r} is of MultiheadAttention, {TWICE}; expected other modules, or a file *{ORT_SUFFIX}"
            )
    content = tensor_files.content({PEFT_PREFIX + name: array for name, array in adapters.items()}, who)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ModelError(f"{path}: cannot make the folder: {one_line(error)}") from error
    config = json.dumps(_peft_config(modules), indent=2) + "\n"
    files.write_file(os.path.join(path, PEFT_TENSORS), content)
    files.write_file(os.path.join(path, PEFT_CONFIG), config.encode())


def _peft_config(modules: Mapping[str, tuple[int, float]]) -> dict[str, Any]:
    ranks = {module: rank for module, (rank, _) in modules.items()}
    alphas = {module: int(alpha) if alpha.is_integer() else alpha for module, (_, alpha) in modules.items()}
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "target_modules": list(modules),
        "r": next(iter(ranks.values())),
        "lora_alpha": next(iter(alphas.values())),
        "rank_pattern": _pattern(ranks),
        "alpha_pattern": _pattern(alphas),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _pattern(settings: Mapping[str, float]) -> dict[str, float]:
    """Return what PEFT needs to know of modules whose settings differ.

    Its keys are regular expressions, of which the first is taken that matches the end of a module's name.
    """
    if len(set(settings.values())) == 1:
        return {}
    return {re.escape(module): settings[module] for module in sorted(settings, key=len, reverse=True)}

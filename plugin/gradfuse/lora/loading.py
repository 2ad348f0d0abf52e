"""`gradfuse.load_adapter` and `gradfuse.convert_adapter`: adapters stored by PEFT or for onnxruntime."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from gradfuse.errors import ArgumentError, GradfuseError, ModelError, few, one_line
from gradfuse.lora.adding import adapter_names, known_modules
from gradfuse.lora.saving import (
    ORT_SUFFIX,
    PEFT_CONFIG,
    PEFT_PREFIX,
    PEFT_TENSORS,
    TWICE,
    modules_of,
    write_ort,
    write_peft,
)
from gradfuse.lora.targets import chosen
from gradfuse.models import reading, tensor_files
from gradfuse.models.arrays import Arrays
from gradfuse.models.conversion import inline_functions
from gradfuse.runtime import import_onnxruntime, reason
from gradfuse.training.arguments import require_path
from gradfuse.training.session import TrainingSession

if TYPE_CHECKING:
    from gradfuse.models.reading import ModelLike

_LOAD, _CONVERT = "load_adapter", "convert_adapter"
_PICKLED = "adapter_model.bin"
_INITIAL = (True, False, "gaussian", "orthogonal", "eva")
"""PEFT's `init_lora_weights` that leave the weights beside the adapters as they are."""
_OFF = {
    "use_dora": "which scales the weight itself",
    "use_qalora": "which pools the input",
    "layer_replication": "which repeats layers",
    "target_parameters": "which are no modules",
    "alora_invocation_tokens": "which switches adapters by tokens",
    "use_bdlora": "which has blocks",
    "arrow_config": "which routes between adapters",
    "velora_config": "which has another way back",
    "monteclora_config": "which samples",
}
"""Settings of PEFT with which a module computes something else than W x + scale * B A x."""


@dataclasses.dataclass(frozen=True)
class _Adapter:
    """The adapter of a module: A of shape (rank, in), B of shape (out, rank), and what B A is multiplied by."""

    a: npt.NDArray[Any]
    b: npt.NDArray[Any]
    scale: float

    @property
    def rank(self) -> int:
        return int(self.a.shape[0])


def load_adapter(session: TrainingSession, path: str | os.PathLike[str], *, within: str | None = None) -> None:
    """Set the adapters of a session to those of a file, to train them further; the optimizer's state stays as it is.

    Args:
        session: a session of a step whose model `add_lora` returned.
        path: a folder of PEFT, or a file `*.onnx_adapter`.
        within: for a folder, the name in the model of the module that was given to PEFT, such as "model"; None: it is
            the model itself.

    Raises:
        ArgumentError: the session has no adapters, or other modules, ranks and scales than the file. Then nothing
            changes.
        ModelError: the files cannot be read, or hold adapters that compute something else, such as DoRA's.
        GradfuseError: safetensors is not installed, or onnxruntime is older than 1.20.

    Warns:
        UserWarning: PEFT trained with dropout; the step has none.
    """
    if not isinstance(session, TrainingSession):
        raise ArgumentError(f"{_LOAD}: session is {type(session).__name__}; expected a TrainingSession")
    require_path(path, _LOAD)
    path = os.fspath(path)
    stored = _read(path, within, _LOAD)
    known = modules_of(session.training_step.model, _LOAD)
    for module in [*stored, *known]:
        if module not in stored or module not in known:
            where, other = ("step", path) if module not in known else (path, "step")
            raise ArgumentError(f"{_LOAD}: {module!r} of the {other} is not in the {where}; expected the same modules")
    state = session.state_dict()
    arrays = {}
    for module, adapter in stored.items():
        rank, alpha = known[module]
        if adapter.rank != rank:
            raise ArgumentError(f"{_LOAD}: {module!r} has rank {adapter.rank} in {path}; expected {rank}, the step's")
        b = adapter.b
        if path.endswith(ORT_SUFFIX):
            # Its B has the scale in it.
            b = b / (alpha / rank)
        elif not math.isclose(adapter.scale, alpha / rank, rel_tol=1e-6):
            wanted = f"a step of add_lora(..., alpha={adapter.scale * rank:.9g})"
            raise ArgumentError(f"{_LOAD}: {module!r} is scaled by {adapter.scale:.6g} in {path}; expected {wanted}")
        for name, array in zip(adapter_names(module), (adapter.a, b), strict=True):
            if name in state:
                arrays[name] = array.astype(state[name].dtype)
            else:
                raise ArgumentError(f"{_LOAD}: {name!r} does not train in the step; expected all adapters to")
    session.load_state_dict(arrays, strict=False)


def convert_adapter(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    base: ModelLike | None = None,
    within: str | None = None,
) -> None:
    """Write adapters of PEFT as a file of onnxruntime, or the reverse.

    Args:
        source: a folder of PEFT, or a file `*.onnx_adapter`.
        target: a file `*.onnx_adapter`, or a folder.
        base: the model that the adapters are for, with or without the inputs of `add_lora_inputs`. The file gets its
            names of modules, also if PEFT's are only their last parts, and its types, and each adapter is checked
            against the sizes of its weight; None: names and types are PEFT's.
        within: the name of PEFT's module in the model, such as "model"; None: it is the model itself.

    A folder made from a file has alpha = rank, because the file's B includes the scale.

    Raises:
        ArgumentError: both are folders or both files; or the base has no such module, or one of other sizes.
        ModelError: a file cannot be read or written, or holds adapters that compute something else, such as DoRA's.
        GradfuseError: safetensors is not installed, or onnxruntime is older than 1.20.
    """
    require_path(source, _CONVERT)
    require_path(target, _CONVERT)
    source, target = os.fspath(source), os.fspath(target)
    to_file = target.endswith(ORT_SUFFIX)
    if source.endswith(ORT_SUFFIX) == to_file:
        raise ArgumentError(f"{_CONVERT}: both are {'files' if to_file else 'folders'}; expected one *{ORT_SUFFIX}")
    stored = _read(source, within if to_file else None, _CONVERT)
    names: list[str] = []
    if base is not None:
        model = reading.load(base).ir
        if model.functions:
            inline_functions(model)
        stored = _named_as(model, stored)
        names = [str(value.name) for value in (*model.graph.initializers.values(), *model.graph.inputs)]
    if not to_file:
        prefix = "" if within is None else f"{within}."
        outside = [module for module in stored if not module.startswith(prefix)]
        if outside:
            raise ArgumentError(f"{_CONVERT}: within is {within!r}, and {outside[0]!r} is not; expected one with all")
        stored = {module.removeprefix(prefix): adapter for module, adapter in stored.items()}
        names = [name.removeprefix(prefix) for name in names]
    modules = {module: (adapter.rank, adapter.scale * adapter.rank) for module, adapter in stored.items()}
    arrays: Arrays = {}
    for module, adapter in stored.items():
        arrays |= dict(zip(adapter_names(module), (adapter.a, adapter.b), strict=True))
    if to_file:
        write_ort(target, modules, arrays, _CONVERT)
    else:
        write_peft(target, modules, arrays, names, _CONVERT)


def _read(path: str, within: str | None, who: str) -> dict[str, _Adapter]:
    """Return the adapters of a file or folder, by module."""
    if path.endswith(ORT_SUFFIX):
        if within is not None:
            raise ArgumentError(f"{who}: within is {within!r}; expected None, as a file has the names of the model")
        return _paired(path, _ort_tensors(path), lambda module, rank: 1.0)
    config = _config(path)
    if os.path.exists(os.path.join(path, _PICKLED)) and not os.path.exists(os.path.join(path, PEFT_TENSORS)):
        raise ModelError(
            f"{who}: {path} has its adapters in {_PICKLED}, which may run code; expected {PEFT_TENSORS}, as "
            "PeftModel.save_pretrained(path) writes it"
        )
    tensors, _ = tensor_files.read(os.path.join(path, PEFT_TENSORS), who, "the adapters of PEFT")
    prefix = "" if within is None else f"{within}."
    if config.get("lora_dropout") and who == _LOAD:
        warnings.warn(f"{who}: {path} has lora_dropout {config['lora_dropout']}; adapters here have none", stacklevel=3)
    if any(not name.startswith(PEFT_PREFIX) for name in tensors):
        name = next(name for name in tensors if not name.startswith(PEFT_PREFIX))
        raise ModelError(f"{path}: has {name!r}; expected names that begin with {PEFT_PREFIX!r}")

    def scale(module: str, rank: int) -> float:
        alpha = _setting(config, "alpha_pattern", "lora_alpha", module)
        return float(alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)

    found = _paired(path, {name.removeprefix(PEFT_PREFIX): array for name, array in tensors.items()}, scale)
    return {prefix + module: adapter for module, adapter in found.items()}


def _paired(path: str, tensors: Mapping[str, npt.NDArray[Any]], scale: Any) -> dict[str, _Adapter]:
    """Return adapters whose A and B are both there, with matching ranks.

    Raises:
        ModelError: something else is there.
    """
    found = {}
    for name, array in tensors.items():
        module, _, kind = name.rpartition(".lora_")
        if module.endswith(".base_layer.out_proj"):
            raise ModelError(f"{path}: has {name!r} of MultiheadAttention, {TWICE}; expected other modules")
        if kind not in ("A.weight", "B.weight"):
            raise ModelError(f"{path}: has {name!r}; expected A and B of linear layers alone")
        names = adapter_names(module)
        if any(one not in tensors for one in names):
            missing = next(one for one in names if one not in tensors)
            raise ModelError(f"{path}: {missing!r} is missing; expected A and B of each module")
        a, b = (tensors[one] for one in names)
        if array.ndim != 2 or (array.dtype.kind != "f" and array.dtype.name != "bfloat16"):
            raise ModelError(f"{path}: {name!r} is {array.dtype} of shape {array.shape}; expected a matrix of floats")
        if kind == "A.weight":
            if b.ndim != 2 or b.shape[1] != len(a) or not len(a):
                raise ModelError(f"{path}: {module!r} has A {a.shape} and B {b.shape}; expected one rank, from 1 on")
            if a.dtype.name == "bfloat16":
                a, b = a.astype(np.float32), b.astype(np.float32)
            found[module] = _Adapter(a, b, scale(module, len(a)))
    if not found:
        raise ModelError(f"{path}: has no adapters; expected some")
    return found


def _ort_tensors(path: str) -> dict[str, npt.NDArray[Any]]:
    onnxruntime = import_onnxruntime()
    if not hasattr(onnxruntime, "AdapterFormat"):
        raise GradfuseError(f"onnxruntime is {onnxruntime.__version__}; expected 1.20 or newer for adapters")
    if not os.path.isfile(path):
        raise ModelError(f"{path}: is no file; expected an adapter of onnxruntime")
    try:
        content = onnxruntime.AdapterFormat.read_adapter(path)
        return {name: np.array(value.numpy()) for name, value in content.get_parameters().items()}
    except Exception as error:
        # onnxruntime's exception classes share no public base.
        raise ModelError(f"{path}: cannot read the file: {reason(error)}") from error


def _config(path: str) -> dict[str, Any]:
    """Return PEFT's settings.

    Raises:
        ModelError: they cannot be read, or say that the adapters compute something else than the weights and a product.
    """
    file = os.path.join(path, PEFT_CONFIG)
    try:
        with open(file, encoding="utf-8") as opened:
            config = json.load(opened)
        if not isinstance(config, dict):
            raise ValueError("it is no dictionary")
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file}: cannot read the file: {one_line(error)}; expected a folder of PEFT") from error
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{file}: peft_type is {config.get('peft_type')!r}; expected 'LORA'")
    for name, why in _OFF.items():
        if config.get(name):
            raise ModelError(f"{file}: {name} is {config[name]!r}, {why}; expected LoRA without")
    initial = config.get("init_lora_weights", True)
    if initial not in _INITIAL:
        what = "which changes the weights beside the adapters"
        raise ModelError(f"{file}: init_lora_weights is {initial!r}, {what}; expected one of {few(map(str, _INITIAL))}")
    for key in ("alpha_pattern", "lora_alpha"):
        values: Any = config.get(key, {} if key == "alpha_pattern" else None)
        numbers = values.values() if isinstance(values, dict) else [values]
        if not all(type(one) in (int, float) and math.isfinite(one) for one in numbers):
            raise ModelError(f"{file}: {key} is {values!r}; expected numbers")
    return config


def _setting(config: Mapping[str, Any], pattern: str, key: str, module: str) -> float:
    """Return a setting of a module: PEFT's first pattern that matches the end of its name decides."""
    for one, value in (config.get(pattern) or {}).items():
        if re.match(rf"(.*\.)?({one})$", module):
            return float(value)
    return float(config[key])


def _named_as(model: ir.Model, stored: Mapping[str, _Adapter]) -> dict[str, _Adapter]:
    """Return the adapters by a model's names of their modules and in its types, after a check of their sizes."""
    served = known_modules(_CONVERT, model.metadata_props)
    inputs = {str(value.name): value for value in model.graph.inputs}
    found = {}
    for module, adapter in stored.items():
        matching = [one for one in served if one == module] or [one for one in served if one.endswith(f".{module}")]
        if matching:
            if len(matching) > 1:
                raise ArgumentError(f"{_CONVERT}: {module!r} is {few(matching)} of the base; expected one, or within")
            (name,) = matching
            a, b = (inputs.get(one) for one in adapter_names(name))
            if a is None or b is None or a.shape is None or b.shape is None:
                wanted = "those of add_lora_inputs"
                raise ArgumentError(f"{_CONVERT}: the base has no inputs for {name!r}; expected {wanted}")
            sizes, dtype = (a.shape[1], b.shape[0]), a.dtype
        else:
            targets = chosen(_CONVERT, model.graph, [module], {}, set())
            targets = [one for one in targets if one.module == module] or targets
            if len(targets) > 1:
                named = few(one.module for one in targets)
                raise ArgumentError(f"{_CONVERT}: {module!r} is {named} of the base; expected one, or within")
            name, sizes = targets[0].module, (targets[0].in_features, targets[0].out_features)
            dtype = targets[0].dtype
        if (adapter.a.shape[1], adapter.b.shape[0]) != sizes:
            got = f"{adapter.a.shape[1]} to {adapter.b.shape[0]}"
            raise ArgumentError(f"{_CONVERT}: {module!r} is from {got}; expected {sizes[0]} to {sizes[1]}, the base's")
        if name in found:
            raise ArgumentError(f"{_CONVERT}: {name!r} of the base has two adapters; expected one")
        if dtype is not None and dtype != ir.DataType.BFLOAT16:
            one, other = (array.astype(dtype.numpy(), copy=False) for array in (adapter.a, adapter.b))
            adapter = dataclasses.replace(adapter, a=one, b=other)
        found[name] = adapter
    return found

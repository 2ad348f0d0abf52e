"""Fuse decomposed training backward subgraphs in ONNX models into single operators.

Importing this package is cheap: names are looked up in their modules on first use (PEP 562), so that neither numpy,
onnx, onnxruntime nor torch is imported before it is needed. If torch is imported already, its operators are registered.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradfuse import custom_ops, losses, optimizers, passes, testing
    from gradfuse.checking.check import check
    from gradfuse.checking.report import CheckReport
    from gradfuse.differentiation.differentiate import differentiate
    from gradfuse.differentiation.training import build_training_step
    from gradfuse.dynamic_batch.freeing import make_batch_dynamic
    from gradfuse.environment import info
    from gradfuse.errors import ArgumentError, CheckError, ExportError, GradfuseError, ModelError
    from gradfuse.explaining import Explanation, explain
    from gradfuse.export import export_training_step
    from gradfuse.export.translation import onnx_translation_table
    from gradfuse.fusion import FuseResult, expand, fuse
    from gradfuse.library import (
        get_aclnn_library_path,
        get_ep_name,
        get_ep_names,
        get_include,
        get_library_path,
        register,
    )
    from gradfuse.lora.adding import add_lora, add_lora_inputs
    from gradfuse.lora.loading import convert_adapter, load_adapter
    from gradfuse.lora.saving import save_adapter
    from gradfuse.ort_training.to_stock import to_stock
    from gradfuse.training.session import TrainingSession
    from gradfuse.training.step import TrainingStep

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "CheckError",
    "CheckReport",
    "Explanation",
    "ExportError",
    "FuseResult",
    "GradfuseError",
    "ModelError",
    "TrainingSession",
    "TrainingStep",
    "__version__",
    "add_lora",
    "add_lora_inputs",
    "build_training_step",
    "check",
    "convert_adapter",
    "custom_ops",
    "differentiate",
    "expand",
    "explain",
    "export_training_step",
    "fuse",
    "get_aclnn_library_path",
    "get_ep_name",
    "get_ep_names",
    "get_include",
    "get_library_path",
    "info",
    "load_adapter",
    "losses",
    "make_batch_dynamic",
    "onnx_translation_table",
    "optimizers",
    "passes",
    "register",
    "save_adapter",
    "testing",
    "to_stock",
]

_SUBMODULES = {
    "custom_ops": "gradfuse.custom_ops",
    "distributed": "gradfuse.distributed",
    "losses": "gradfuse.losses",
    "optimizers": "gradfuse.optimizers",
    "passes": "gradfuse.passes",
    "testing": "gradfuse.testing",
    "torch": "gradfuse.torch",
}
_MODULE_OF = {
    "ArgumentError": "gradfuse.errors",
    "CheckError": "gradfuse.errors",
    "CheckReport": "gradfuse.checking.report",
    "Explanation": "gradfuse.explaining",
    "ExportError": "gradfuse.errors",
    "FuseResult": "gradfuse.fusion",
    "GradfuseError": "gradfuse.errors",
    "ModelError": "gradfuse.errors",
    "TrainingSession": "gradfuse.training.session",
    "TrainingStep": "gradfuse.training.step",
    "add_lora": "gradfuse.lora.adding",
    "add_lora_inputs": "gradfuse.lora.adding",
    "build_training_step": "gradfuse.differentiation.training",
    "check": "gradfuse.checking.check",
    "convert_adapter": "gradfuse.lora.loading",
    "differentiate": "gradfuse.differentiation.differentiate",
    "expand": "gradfuse.fusion",
    "explain": "gradfuse.explaining",
    "export_training_step": "gradfuse.export",
    "fuse": "gradfuse.fusion",
    "get_aclnn_library_path": "gradfuse.library",
    "get_ep_name": "gradfuse.library",
    "get_ep_names": "gradfuse.library",
    "get_include": "gradfuse.library",
    "get_library_path": "gradfuse.library",
    "info": "gradfuse.environment",
    "load_adapter": "gradfuse.lora.loading",
    "make_batch_dynamic": "gradfuse.dynamic_batch.freeing",
    "onnx_translation_table": "gradfuse.export.translation",
    "register": "gradfuse.library",
    "save_adapter": "gradfuse.lora.saving",
    "to_stock": "gradfuse.ort_training.to_stock",
}


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return importlib.import_module(_SUBMODULES[name])
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'gradfuse' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))


# register_autocast is the newest of the functions that the registration needs: older versions of torch stay without.
if hasattr(getattr(sys.modules.get("torch"), "library", None), "register_autocast"):
    importlib.import_module("gradfuse.torch")

"""Export models, make artifacts of them and train: what users of onnxruntime-training 1.19.2 did.

Usage: .venv-ort-training/bin/python tests/ort_training/produce.py FOLDER [CASE ...]

Writes, for each case of cases.py, the artifacts into FOLDER/CASE, and beside them `forward.onnx`, the model that they
are made of; `trained`, the checkpoint after half of the steps; and `run.npz`: the batches; the losses and the
parameters after all steps that onnxruntime-training had, with the training model and with what gradfuse.fuse makes of
it, and that PyTorch has in float64; the parameters that the training model ends at when those that it starts from are
moved by one rounding; and the output of PyTorch's module in eval mode for the first batch. A case that draws random
numbers has the artifacts and the forward model only.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import numpy as np
import onnx
import onnxruntime
import torch
from onnxruntime.training import api, artifacts, onnxblock
from ort_training.cases import CASES, LEARNING_RATE, NUDGES, STEPS, Case, nudged, train_in_torch

import gradfuse


def export(case: Case) -> onnx.ModelProto:
    """The forward pass as the exporter of that time wrote it."""
    module = case.make().train()
    inputs, outputs = {"input": {0: "batch"}}, {"output": {0: case.rows}}
    buffer: Any = io.BytesIO()
    torch.onnx.export(
        module,
        (case.batches()[0][0],),
        buffer,
        dynamo=False,
        opset_version=case.opset,
        training=torch.onnx.TrainingMode.TRAINING,
        do_constant_folding=False,
        input_names=list(inputs),
        output_names=list(outputs),
        dynamic_axes=inputs | outputs,
    )
    model = onnx.load_from_string(buffer.getvalue())
    # The running statistics have moved with the exporter's own run.
    state = case.make().state_dict()
    for initializer in model.graph.initializer:
        if initializer.name in state:
            initializer.CopyFrom(onnx.numpy_helper.from_array(state[initializer.name].numpy(), initializer.name))
    return model


def make_artifacts(case: Case, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model = export(case)
    onnx.save(model, folder / "forward.onnx")
    trainable = [name for name, _ in case.make().named_parameters() if name not in case.frozen]
    clip = None if case.max_norm is None else onnxblock.optim.ClipGradNorm(case.max_norm)
    artifacts.generate_artifacts(
        model,
        requires_grad=trainable,
        frozen_params=[tensor.name for tensor in model.graph.initializer if tensor.name not in trainable],
        loss=artifacts.LossType[case.loss],
        optimizer=getattr(onnxblock.optim, case.optimizer)(**case.options, clip_grad=clip),
        artifact_directory=folder,
        additional_output_names=["output"] if case.additional_outputs else None,
        nominal_checkpoint=case.additional_outputs,
    )
    path = folder / "optimizer_model.onnx"
    optimizer = onnx.load(path)
    # Newer versions of the package onnx write files that onnxruntime 1.19 refuses.
    optimizer.ir_version = 8
    for attribute in optimizer.graph.node[-1].attribute:
        if attribute.name == "adam_mode":
            attribute.i = case.adam_mode
    onnx.save(optimizer, path)


def train(
    case: Case, folder: Path, model: Path, registered: bool = False, nudge: np.random.Generator | None = None
) -> dict[str, Any]:
    """Train with a training model; return the losses and the parameters.

    With `nudge`, each trainable parameter starts one rounding higher or lower.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    if registered:
        gradfuse.register(options)
    state = api.CheckpointState.load_checkpoint(folder / "checkpoint")
    module = api.Module(model, state, session_options=options)
    if nudge is not None:
        for _, parameter in state.parameters:
            if parameter.requires_grad:
                parameter.data = nudged(np.array(parameter.data), nudge)
    optimizer = api.Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(LEARNING_RATE)
    losses = []
    for count, batch in enumerate(case.batches()):
        if count == STEPS and not registered and nudge is None:
            api.CheckpointState.save_checkpoint(state, folder / "trained", include_optimizer_state=True)
        result = module(*(tensor.numpy() for tensor in batch))
        losses.append(result[0] if isinstance(result, tuple) else result)
        optimizer.step()
        module.lazy_reset_grad()
    parameters = {f"parameter.{name}": np.array(parameter.data) for name, parameter in state.parameters}
    return {"losses": np.array(losses), **parameters}


def produce(case: Case, folder: Path) -> None:
    make_artifacts(case, folder)
    if case.random:
        return
    result = gradfuse.fuse(folder / "training_model.onnx", policy="all")
    losses, parameters = train_in_torch(case, torch.float64)
    exact = {"losses": np.array(losses), **{f"parameter.{name}": value.numpy() for name, value in parameters.items()}}
    with tempfile.TemporaryDirectory() as temporary:
        fused = Path(temporary, "fused.onnx")
        onnx.save(result.model, fused)
        runs = {
            "native": train(case, folder, folder / "training_model.onnx"),
            "fused": train(case, folder, fused, registered=True),
            "exact": exact,
        }
        for count in range(NUDGES):
            nudge = np.random.default_rng(count)
            runs[f"nudged{count}"] = train(case, folder, folder / "training_model.onnx", nudge=nudge)
    runs["fused"]["operators"] = np.array([fusion.op for fusion in result.report.fusions], dtype=str)
    arrays = {f"{run}.{name}": array for run, values in runs.items() for name, array in values.items()}
    for count, (x, target) in enumerate(case.batches()):
        arrays |= {f"input.{count}": x.numpy(), f"target.{count}": target.numpy()}
    module = case.make().eval()
    with torch.no_grad():
        x = case.batches()[0][0]
        arrays["output"] = module(x).numpy()
        arrays["output.exact"] = module.double()(x.double() if x.is_floating_point() else x).numpy()
    np.savez_compressed(folder / "run.npz", allow_pickle=False, **arrays)


def main(folder: str, *names: str) -> None:
    warnings.simplefilter("ignore")
    # The gradient builder logs every pass over the graph.
    onnxruntime.set_default_logger_severity(3)
    for name in names or CASES:
        produce(CASES[name], Path(folder, name))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(*sys.argv[1:])

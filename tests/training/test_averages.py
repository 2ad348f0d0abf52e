"""Averages of weights are those of torch.optim.swa_utils, and sessions evaluate and save by them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_swa_avg_fn
from training.models import Mlp, Whole, batches

import gradfuse
from gradfuse import GradfuseError, TrainingSession, export_training_step, optimizers
from gradfuse.testing import assert_gradients_close


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.02)


@pytest.mark.parametrize(
    "average, function, accumulate",
    [
        (optimizers.EMA(decay=0.8), get_ema_avg_fn(0.8), 1),  # type: ignore[no-untyped-call]
        pytest.param(optimizers.EMA(decay=0.3, start=2), get_ema_avg_fn(0.3), 2, marks=pytest.mark.long),  # type: ignore[no-untyped-call]
        (optimizers.SWA(start=3, every=2), get_swa_avg_fn(), 1),  # type: ignore[no-untyped-call]
        pytest.param(optimizers.SWA(), get_swa_avg_fn(), 3, marks=pytest.mark.long),  # type: ignore[no-untyped-call]
    ],
)
def test_averages_are_those_of_torch(average: Any, function: Any, accumulate: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, data = Whole(), batches(12, 4)
    step = export_training_step(
        module, F.cross_entropy, data[0], adamw(module), average=average, accumulate=accumulate, evaluation=True
    )
    step.save(tmp_path / "step.onnx")
    session = TrainingSession(tmp_path / "step.onnx")
    x = data[0][0]
    np.testing.assert_array_equal(session.evaluate(x, averaged=True), session.evaluate(x))
    for index, batch in enumerate(data):
        if index == 7:
            session.save(tmp_path / "state.safetensors")
            session = TrainingSession(tmp_path / "step.onnx")
            session.load(tmp_path / "state.safetensors")
        session.step(*batch)
    twins = {}
    for dtype in (torch.float32, torch.float64):
        twin = copy.deepcopy(module).to(dtype).train()
        optimizer, averaged, done = adamw(twin), AveragedModel(twin, avg_fn=function), 0
        for index, (x, y) in enumerate(data, 1):
            (F.cross_entropy(twin(x.to(dtype)), y) / accumulate).backward()  # type: ignore[no-untyped-call]
            if index % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                if done > average.start and (done - average.start) % average.every == 0:
                    averaged.update_parameters(twin)
        twins[dtype] = averaged.module
    native, exact = (twins[dtype].state_dict() for dtype in (torch.float32, torch.float64))
    found, current = session.state_dict(averaged=True), session.state_dict()
    for name, _ in twins[torch.float64].named_parameters():
        terms = 12 / 8 * float(exact[name].abs().max())
        assert_gradients_close(found[name], native[name], exact[name], np.float32, terms=terms)
    assert abs(found["embed.weight"] - current["embed.weight"]).max() > 1e-3
    np.testing.assert_array_equal(found["frozen.weight"], current["frozen.weight"])
    np.testing.assert_array_equal(found["again.weight"], found["embed.weight"])
    session.save_evaluation_model(tmp_path / "averaged.onnx", averaged=True)
    stock = onnxruntime.InferenceSession(tmp_path / "averaged.onnx", providers=["CPUExecutionProvider"])
    (served,) = stock.run(None, {stock.get_inputs()[0].name: data[0][0].numpy()})
    np.testing.assert_allclose(served, session.evaluate(data[0][0], averaged=True), rtol=1e-5, atol=1e-6)


def test_updates_that_are_skipped_are_not_averaged() -> None:
    torch.manual_seed(0)
    module, data = Mlp(), batches(4, 3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    session = TrainingSession(
        export_training_step(
            module,
            lambda *a: 16 * F.cross_entropy(*a),
            data[0],
            adamw(module),
            average=optimizers.SWA(),
            grad_scaler=scaler,
        )
    )
    for batch in data:
        session.step(*batch)
    count = session.ort_values["n_averaged"].numpy()
    assert count == session.ort_values["step"].numpy() < len(data)


@pytest.mark.parametrize(
    "kind, options",
    [(torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}), (torch.optim.NAdam, {})],
)
def test_averages_begin_after_updates_of_the_step(kind: Any, options: dict[str, Any]) -> None:
    """Those that the optimizer did before do not count: not every optimizer knows them."""
    torch.manual_seed(0)
    module, (first, *data) = Mlp(), batches(6, 3)
    optimizer = kind(module.parameters(), lr=0.05, **options)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(module(first[0]), first[1]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    average = optimizers.SWA(start=1, every=2)
    session = TrainingSession(export_training_step(module, F.cross_entropy, first, optimizer, average=average))
    counts = []
    for batch in data:
        session.step(*batch)
        counts.append(int(session.ort_values["n_averaged"].numpy()))
    assert counts == [0, 0, 1, 1, 2]


def test_steps_from_onnx_average_as_well(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, data = Mlp(), batches(6, 3)
    torch.onnx.export(module, (data[0][0],), tmp_path / "model.onnx", dynamo=True, verbose=False)
    step = gradfuse.build_training_step(
        tmp_path / "model.onnx",
        "cross_entropy",
        optimizer=optimizers.SGD(lr=0.1),
        average=optimizers.EMA(decay=0.5),
        float64=False,
        fuse=False,
    )
    session, wanted = TrainingSession(step), None
    for x, y in data:
        session.step(x, y)
        now = session.state_dict()["first.weight"].astype(np.float64)
        wanted = now if wanted is None else wanted * 0.5 + now * 0.5
    assert wanted is not None
    np.testing.assert_allclose(session.state_dict(averaged=True)["first.weight"], wanted, atol=8 * 2.0**-24)


def test_what_does_not_fit_is_refused() -> None:
    module, (batch,) = Mlp(), batches(1, 3)
    session = TrainingSession(export_training_step(module, F.cross_entropy, batch, adamw(module)))
    for call in (session.state_dict, lambda averaged: session.evaluate(batch[0], averaged=averaged)):
        with pytest.raises(GradfuseError, match="the step has no averages; expected one exported with `average`"):
            call(averaged=True)
    with pytest.raises(GradfuseError, match=r"average is float; expected gradfuse\.optimizers\.EMA or SWA"):
        export_training_step(module, F.cross_entropy, batch, adamw(module), average=0.9)  # type: ignore[arg-type]
    with pytest.raises(GradfuseError, match="optimizer is None; expected one with max_grad_norm"):
        export_training_step(module, F.cross_entropy, batch, average=optimizers.EMA())
    with pytest.raises(GradfuseError, match=r"EMA: decay is 1.5; expected a number from 0 to below 1"):
        optimizers.EMA(decay=1.5)
    with pytest.raises(GradfuseError, match="SWA: every is 0; expected a whole number from 1 on"):
        optimizers.SWA(every=0)

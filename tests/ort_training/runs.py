"""What produce.py wrote about one case, and how stock onnxruntime compares with it."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch
from ort_training.cases import CASES, LEARNING_RATE, NUDGES, STEPS, train_in_torch

import gradfuse
from gradfuse.testing import assert_gradients_close

Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Run:
    """A folder of artifacts, and the arrays in its run.npz."""

    folder: Path
    arrays: dict[str, Array]

    @classmethod
    def load(cls, folder: Path) -> Run:
        with np.load(folder / "run.npz") as file:
            return cls(folder, dict(file))

    def losses(self, which: str) -> Array:
        return self.arrays[f"{which}.losses"]

    def parameter(self, which: str, name: str) -> Array:
        return self.arrays[f"{which}.parameter.{name}"]

    def parameters(self) -> list[str]:
        """The names of the parameters that were trained."""
        return [key.removeprefix("exact.parameter.") for key in self.arrays if key.startswith("exact.parameter.")]

    def worst_native(self, name: str) -> Array:
        """A parameter as the original model leaves it, each element from the run that is farthest from float64.

        Produced artifacts have several runs, whose first parameters are nudged. Committed ones have one, and PyTorch
        runs the others, on this processor. Adam divides a gradient by its own size: where its sum cancels, one rounding
        of a parameter at the start moves the parameter at the end by several.
        """
        keys = [f"nudged{count}.parameter.{name}" for count in range(NUDGES)]
        found = [self.arrays[key] for key in keys if key in self.arrays] or [run[name] for run in self._nudged]
        runs = np.stack([self.parameter("native", name), *found])
        worst = np.abs(runs - self.parameter("exact", name)).argmax(0)
        return np.asarray(np.take_along_axis(runs, worst[None], 0)[0])

    @cached_property
    def _nudged(self) -> list[dict[str, Array]]:
        """The parameters that PyTorch trains in float32 from nudged ones."""
        runs = (
            train_in_torch(CASES[self.folder.name], torch.float32, np.random.default_rng(count))[1]
            for count in range(NUDGES)
        )
        return [{name: value.numpy() for name, value in run.items()} for run in runs]

    def train(self, step: gradfuse.TrainingStep, first: int = 0) -> tuple[gradfuse.TrainingSession, Array]:
        """Train in stock onnxruntime from a step on; return the session and the losses."""
        onnx.checker.check_model(step.model, full_check=True)
        assert not {node.domain for node in step.model.graph.node} - {"", gradfuse.custom_ops.DOMAIN}
        session = gradfuse.TrainingSession(step)
        session.learning_rate = LEARNING_RATE
        losses = [
            session.step(self.arrays[f"input.{count}"], self.arrays[f"target.{count}"])
            for count in range(first, 2 * STEPS)
        ]
        return session, np.array(losses, dtype=np.float32)

    def require_equal_training(self) -> None:
        session, losses = self.train(gradfuse.to_stock(self.folder))
        assert_gradients_close(losses, self.losses("native"), self.losses("exact"), np.float32)
        state = session.state_dict()
        assert {f"native.parameter.{name}" for name in state} == {k for k in self.arrays if k.startswith("native.p")}
        for name, actual in state.items():
            if name in self.parameters():
                assert_gradients_close(actual, self.worst_native(name), self.parameter("exact", name), np.float32)
            else:
                # Running statistics are no variance of torch's kind, and what is frozen has no gradient in float64.
                native = self.parameter("native", name)
                assert_gradients_close(actual, native, native.astype(np.float64), np.float32)

    def require_equal_continuation(self) -> None:
        _, losses = self.train(gradfuse.to_stock(self.folder, self.folder / "trained", fuse=False), STEPS)
        assert_gradients_close(losses, self.losses("native")[STEPS:], self.losses("exact")[STEPS:], np.float32)

    def require_equal_evaluation(self) -> None:
        step = gradfuse.to_stock(self.folder, fuse=False)
        assert step.evaluation_model is not None
        onnx.checker.check_model(step.evaluation_model, full_check=True)
        output = gradfuse.TrainingSession(step).evaluate(self.arrays["input.0"])
        assert_gradients_close(output, self.arrays["output"], self.arrays["output.exact"], np.float32)

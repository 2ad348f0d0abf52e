"""Whether `export_training_step` preserves the results of modules that people could have written (random_modules.py).

:func:`judged` exports a module and trains the step beside PyTorch for a few batches, of other sizes too where axes are
dynamic. :func:`smallest` reduces a failing module.

    python tests/support/fuzzing_modules.py SEED            the verdict on a module; --small makes it small first

sweeping.py runs many.
"""

from __future__ import annotations

import argparse
import bisect
import copy
import dataclasses
import random
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from random_modules import Drawn, batches, drawn, filled, side_by_side
from sweeping import Outcome
from torch import Tensor, nn

import gradfuse
from gradfuse import _torch_private as private
from gradfuse.errors import GradfuseError
from gradfuse.testing import assert_gradients_close

Array = npt.NDArray[Any]
Results = dict[str, Array]

RUNS_MOVED, MANY_RUNS_MOVED = 2, 24
"""How many runs show the effect of rounding, and how many more if these put a result out of bounds."""
MOVES = 4.0
"""By how many roundings runs are moved to show the effect of rounding."""


class Invalid(Exception):
    """PyTorch itself does not train the module, or gives no numbers."""


@dataclass
class Verdict:
    """The verdict on a module.

    Attributes:
        failures: lines that begin with the kind: wrong, unable, traceback, mistake, changed.
        refusal: the text of the export's refusal.
        warned: warnings of the export.
        steps: how many steps were compared.
        other_sizes: how many of them had other sizes than those of the export.
        limited: how many batches are beyond what a warning said.
    """

    seed: int
    failures: list[str] = field(default_factory=list)
    refusal: str = ""
    warned: list[str] = field(default_factory=list)
    steps: int = 0
    other_sizes: int = 0
    limited: int = 0

    @property
    def kinds(self) -> set[str]:
        return {line.split(":")[0] for line in self.failures}


class _Peer:
    """The module in PyTorch, trained in one type."""

    def __init__(self, drawn: Drawn, like: _Peer | None = None) -> None:
        self.dtype = torch.float32 if like is None else torch.float64
        with self._types():
            space = drawn.namespace()
            torch.manual_seed(drawn.seed)
            self.module: nn.Module = space["Model"]()
            if like is None:
                filled(self.module, drawn.seed)
            else:
                _copied(like.module, self.module)
            self.loss = space["loss"]
            self.parameters = [p for p in self.module.parameters() if p.requires_grad]
            self.optimizer = space["optimizer"](self.parameters)
        options = dict(drawn.options)
        self._norm, self._autocast = options.get("max_grad_norm"), options.get("autocast")

    @contextmanager
    def _types(self) -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def moved(self, eps: float, seed: int) -> None:
        """Change all float tensors by a random rounding."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in {id(t): t for t in self.module.parameters()}.values():
                tensor.mul_(1 + eps * (2 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64) - 1))

    def step(self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Results:
        """Train a batch; return the loss, gradients if there is no optimizer, and all parameters and buffers."""
        with self._types(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for parameter in self.parameters:
                parameter.grad = None
            cast = tuple(self._cast(tensor.clone()) for tensor in inputs)
            with torch.autocast("cpu", self._autocast, enabled=self._autocast is not None):
                loss = self.loss(self.module(*cast), *map(self._cast, targets))
            loss.backward()
            found = {"loss": loss.detach().numpy().copy()}
            if self.optimizer is None:
                for name, parameter in self.module.named_parameters():
                    if parameter.grad is not None:
                        found[f"{name}.grad"] = parameter.grad.numpy().copy()
            else:
                if self._norm is not None:
                    torch.nn.utils.clip_grad_norm_(self.parameters, self._norm)
                self.optimizer.step()
        found |= {name: tensor.numpy().copy() for name, tensor in self.module.state_dict().items()}
        return found

    def evaluate(self, inputs: tuple[Tensor, ...]) -> Results:
        """Return the outputs in eval mode; buffers stay what they are, as in a session."""
        kept = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        self.module.eval()
        try:
            with self._types(), torch.no_grad():
                outputs = self.module(*(self._cast(t.clone()) for t in inputs))
                return {f"evaluation {k}": tensor.numpy().copy() for k, tensor in enumerate(_several(outputs))}
        finally:
            self.module.train()
            with torch.no_grad():
                for name, buffer in self.module.named_buffers():
                    buffer.copy_(kept[name])


def _several(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _copied(source: nn.Module, target: nn.Module) -> None:
    theirs = {**dict(source.named_parameters()), **dict(source.named_buffers())}
    with torch.no_grad():
        for name, tensor in (*target.named_parameters(), *target.named_buffers()):
            tensor.copy_(theirs[name])
    for name, module in source.named_modules():
        if not module.training:
            target.get_submodule(name).eval()


def judged(drawn: Drawn) -> Verdict:
    """Export a module and train it beside PyTorch.

    Raises:
        Invalid: PyTorch does not train it.
    """
    verdict = _judged(drawn, RUNS_MOVED)
    return _judged(drawn, MANY_RUNS_MOVED) if "wrong" in verdict.kinds else verdict


def _judged(drawn: Drawn, runs: int) -> Verdict:
    verdict = Verdict(drawn.seed)
    every = list(batches(drawn))
    native = _Peer(drawn)
    exact = _Peer(drawn, native)
    moved = [_Peer(drawn, native) for _ in range(runs)]
    for number, peer in enumerate(moved):
        peer.moved(MOVES * drawn.rounds_to, number)
    # A number that rounds to 0 in one run of PyTorch may not in another.
    twins = [_Peer(drawn) for _ in moved]
    for twin, peer in zip(twins, moved, strict=True):
        _copied(peer.module, twin.module)
    peers = (native, exact, *twins, *moved)
    replays = "drawn" in drawn.source
    trial = _Peer(drawn)
    try:
        for _ in range(2):
            if not all(np.isfinite(a).all() for a in trial.step(*every[0]).values()):
                raise Invalid("not finite")
        if not replays:
            copy.deepcopy(exact).step(*every[0])
    except Invalid:
        raise
    except Exception as error:
        raise Invalid(f"{type(error).__name__}: {error}") from error
    step = _exported(drawn, native, every[0], verdict)
    if step is None:
        return verdict
    try:
        session = gradfuse.TrainingSession(step)
    except Exception as error:
        verdict.failures.append(f"unable: no session: {type(error).__name__}: {_line(error)}")
        return verdict
    for number, (inputs, targets) in enumerate(every):
        shape = tuple(inputs[0].shape[:2])
        place = f"step {number}, batch {shape[0]}, length {shape[1]}"
        is_other = shape != tuple(every[0][0][0].shape[:2])
        probe = _probed(drawn, native, inputs, targets)
        got: Results = {}
        failure = ""
        try:
            arrays, labels = (tuple(tensor.numpy() for tensor in given) for given in (inputs, targets))
            got["loss"] = np.asarray(session.step(arrays, labels), np.float32)
        except GradfuseError as error:
            failure = f"refused in a step: {_line(error)}"
        except Exception as error:
            verdict.failures.append(f"traceback: {place}: {type(error).__name__}: {_line(error)}")
            return verdict
        if probe:
            # PyTorch does not accept these sizes, so the result does not matter.
            return verdict
        if failure:
            if is_other and verdict.warned:
                verdict.limited += 1
                continue
            verdict.failures.append(f"unable: {place}: {failure}")
            return verdict
        if not drawn.has_optimizer:
            got |= {f"{name}.grad": array for name, array in session.gradients.items()}
        got |= session.state_dict()
        if replays:
            for peer in peers:
                _take_draws(peer.module, got)
        results = [peer.step(inputs, targets) for peer in peers]
        # There is no warning about draws in an evaluation.
        if dict(drawn.options)["evaluation"] and not replays:
            evaluated = session.evaluate(arrays)
            got |= {f"evaluation {k}": np.asarray(array) for k, array in enumerate(_several(evaluated))}
            for peer, result in zip(peers, results, strict=True):
                result |= peer.evaluate(inputs)
        if not all(np.isfinite(a).all() for result in results[:2] for a in result.values()):
            return verdict
        wrong = _difference(got, results[0], results[1], results[2 : 2 + runs], results[2 + runs :])
        verdict.steps += 1
        verdict.other_sizes += is_other
        if wrong:
            if is_other and verdict.warned:
                verdict.limited += 1
                return verdict
            verdict.failures.append(f"wrong: {place}: {wrong}")
            return verdict
    return verdict


def _take_draws(module: nn.Module, got: Mapping[str, Array]) -> None:
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name.rpartition(".")[2].startswith("drawn"):
                buffer.copy_(torch.from_numpy(np.array(got[name])))
    for one in module.modules():
        if hasattr(one, "replays"):
            one.replays = True  # type: ignore[assignment]


def _probed(drawn: Drawn, native: _Peer, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> bool:
    """Whether PyTorch refuses a batch, or gives no numbers for it."""
    try:
        with torch.no_grad():
            module = _Peer(drawn)
            _copied(native.module, module.module)
            loss = module.loss(module.module(*(t.clone() for t in inputs)), *targets)
            return not bool(torch.isfinite(loss))
    except Exception:
        return True


def _exported(drawn: Drawn, peer: _Peer, batch: Any, verdict: Verdict) -> Any:
    axes = {axis: name for axis, name in ((0, "batch"), (1, "length")) if name in drawn.dynamic}
    inputs, targets = batch
    shapes = None
    if axes:
        of_targets = (axes if one.ndim > 1 else {k: v for k, v in axes.items() if k == 0} for one in targets)
        shapes = (tuple(axes for _ in inputs), tuple(one or None for one in of_targets))
    module = _Peer(drawn)
    before = _state(module)
    with warnings.catch_warnings(record=True) as caught, private.translations_read_once():
        warnings.simplefilter("always")
        try:
            step = gradfuse.export_training_step(
                module.module,
                module.loss,
                (tuple(t.clone() for t in inputs), targets),
                module.optimizer,
                dynamic_shapes=shapes,
                **dict(drawn.options),
            )
        except GradfuseError as error:
            verdict.refusal = str(error)
            if "mistake in gradfuse" in verdict.refusal:
                verdict.failures.append(f"mistake: {verdict.refusal}")
            return None
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{where.filename.rsplit('/', 1)[-1]}:{where.lineno}"
            verdict.failures.append(f"traceback: {type(error).__name__} in {place}: {_line(error)}")
            return None
    if (after := _state(module)) != before:
        changed = [name for name in before if after.get(name) != before[name]]
        verdict.failures.append(f"changed: {', '.join(changed) or 'what the module has'}")
    verdict.warned = [str(w.message) for w in caught if "export_training_step" in str(w.message)]
    return step


def _state(peer: _Peer) -> dict[str, object]:
    """State that an export must not change."""
    tensors = {**dict(peer.module.named_parameters()), **dict(peer.module.named_buffers())}
    found: dict[str, object] = {name: tensor.detach().numpy().tobytes() for name, tensor in tensors.items()}
    found |= {f"{name}.grad": p.grad is None for name, p in peer.module.named_parameters()}
    found |= {f"mode of {name}": module.training for name, module in peer.module.named_modules()}
    found["random state"] = torch.get_rng_state().numpy().tobytes()
    for name, module in peer.module.named_modules():
        own = {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float, str))}
        found[f"attributes of {name}"] = tuple(own.items())
    return found


def _difference(got: Results, native: Results, exact: Results, twins: list[Results], moved: list[Results]) -> str:
    """The first result that is not PyTorch's; empty if all are.

    Args:
        got: the results of the session.
        native, exact: those of PyTorch in float32 and in float64.
        twins, moved: the same of runs from parameters that are a few roundings elsewhere.
    """
    largest: dict[str, float] = {}
    for name, array in exact.items():
        if name.endswith(".grad") or name == "loss":
            largest[_part(name)] = max(largest.get(_part(name), 0.0), float(np.abs(array).max(initial=0)))
    for name, wanted in exact.items():
        if name.endswith(".grad"):
            found = got.get(name)
            if found is None:
                if np.abs(wanted).max(initial=0) > 0:
                    return f"{name} is missing"
                continue
        elif name not in got:
            return f"{name} is missing"
        else:
            found = got[name]
        if wanted.dtype.kind != "f" or native[name].dtype.kind != "f":
            if not np.array_equal(found, native[name]):
                return f"{name} is {_shown(found)}; expected {_shown(native[name])}"
            continue
        dtype = native[name].dtype
        noise = max((float(np.abs(m[name] - wanted).max(initial=0)) for m in moved), default=0.0)
        terms = 16 * noise / 2.0**-23 + max(largest.get(_part(name), 0.0), largest[""])
        try:
            assert_gradients_close(found, _least_exact(name, native, exact, twins, moved), wanted, dtype, terms=terms)
        except AssertionError as error:
            return f"{name}: {error}"
    return ""


def _least_exact(name: str, native: Results, exact: Results, twins: list[Results], moved: list[Results]) -> Array:
    """What PyTorch gives, with the largest error that it has at each element in any of its runs."""
    errors = [native[name] - exact[name], *(a[name] - b[name] for a, b in zip(twins, moved, strict=True))]
    finite = [np.where(np.isfinite(one), one, 0.0) for one in errors[1:]]
    largest = errors[0]
    for one in finite:
        largest = np.where(np.abs(one) > np.abs(largest), one, largest)
    return np.asarray(exact[name] + largest, native[name].dtype)


def _part(name: str) -> str:
    """The part of a module of several that a result is of."""
    return name.split(".")[1] if name.startswith("parts.") else ""


def _shown(array: Array) -> str:
    return f"{array.dtype} {np.array2string(array.ravel()[:6], separator=', ')}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


# Small ones


def smallest(seed: int, kind: str) -> Drawn:
    """Return a module that fails in a way, or is refused with the kind of reason, without all that is not needed."""
    without: set[int] = set()
    plain: set[str] = set()

    def still(without: set[int], plain: set[str]) -> bool:
        try:
            verdict = judged(drawn(seed, without, plain))
        except Invalid:
            return False
        return kind in verdict.kinds or (bool(verdict.refusal) and kind == reason(verdict.refusal))

    for part in ("options", "optimizer", "length", "batch"):
        if still(without, plain | {part}):
            plain.add(part)
    for k in range(drawn(seed).drawn_pieces):
        if still(without | {k}, plain):
            without.add(k)
    return drawn(seed, without, plain)


def reason(text: str) -> str:
    """The reason of a refusal without names and numbers."""
    text = text.removeprefix("export_training_step: ")
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "'...'", text)
    text = re.sub(r"/modules/module_\d+\.py:\d+|module_\d+\.py:\d+", "FILE", text)
    text = re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "0", text)
    return text[:160]


# Many


def outcome(seed: int) -> Outcome:
    """The verdict on the module of a seed."""
    return _outcome(drawn(seed))


def _outcome(case: Drawn) -> Outcome:
    seed = case.seed
    random.seed(seed)
    try:
        verdict = judged(case)
    except Invalid:
        return Outcome(seed, {"invalid": 1})
    counts = {
        "modules": 1,
        "refused": int(bool(verdict.refusal)),
        "steps": verdict.steps,
        "steps of other sizes": verdict.other_sizes,
        "limited by a warning": int(bool(verdict.limited)),
        **dict.fromkeys(verdict.kinds, 1),
    }
    failures = [f"{seed}: {', '.join(case.pieces)}: {line}" for line in verdict.failures]
    return Outcome(seed, counts, [reason(verdict.refusal)] if verdict.refusal else [], failures)


def outcomes(seeds: Sequence[int], pieces: int, *, static: bool) -> list[Outcome]:
    """What came of the modules of some seeds, of some pieces at most, which are exported as one while they can be.

    Each has its own parameters and loss, so that its gradients are its own. What is refused, fails or has a warning is
    judged again by itself.
    """
    parts = [drawn(seed, without=range(pieces, _MANY), plain=("batch", "length") if static else ()) for seed in seeds]
    like = parts[0]
    own = {id(part): Outcome(part.seed, {"invalid": 1}) for part in parts}
    valid = []
    for part in parts:
        match _taken_by_pytorch(dataclasses.replace(part, dynamic=like.dynamic, options=like.options)):
            case "always":
                valid.append(part)
            case "as exported":
                own[id(part)] = _outcome(part)
    waiting = [valid] if valid else []
    while waiting:
        group = waiting.pop()
        if len(group) == 1:
            own[id(group[0])] = _outcome(group[0])
            continue
        case = side_by_side(group, like)
        verdict = judged(case)
        if not verdict.refusal and not verdict.failures and not verdict.limited:
            for part in group:
                counts = {"modules": 1, "steps": verdict.steps, "steps of other sizes": verdict.other_sizes}
                own[id(part)] = Outcome(part.seed, counts)
            continue
        told = verdict.refusal or " ".join(verdict.warned)
        named = {int(number) for number in re.findall(r"\bparts\.(\d+)", told)}
        named |= {bisect.bisect_left(case.ends, int(line)) for line in re.findall(r"module_\d+\.py:(\d+)", told)}
        named &= set(range(len(group)))
        if not named or len(named) == len(group):
            waiting += [group[: len(group) // 2], group[len(group) // 2 :]]
            continue
        waiting += [[group[k]] for k in named]
        waiting.append([part for k, part in enumerate(group) if k not in named])
    return list(own.values())


_MANY = 99


def _taken_by_pytorch(drawn: Drawn) -> str:
    """Whether PyTorch trains a module on all batches ("always"), on those like that of the export, or never ("")."""
    found = "always"
    for number, (inputs, targets) in enumerate(batches(drawn)):
        try:
            good = all(np.isfinite(a).all() for a in _Peer(drawn).step(inputs, targets).values())
        except Exception:
            good = False
        if not good and number < 2:
            return ""
        if not good:
            found = "as exported"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("seed", type=int)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    case = drawn(args.seed)
    verdict = judged(case)
    if args.small and (verdict.failures or verdict.refusal):
        kind = sorted(verdict.kinds)[0] if verdict.failures else reason(verdict.refusal)
        case = smallest(args.seed, kind)
        verdict = judged(case)
    print(case.source)
    print(case.dynamic, case.options)
    print(verdict)


if __name__ == "__main__":
    main()

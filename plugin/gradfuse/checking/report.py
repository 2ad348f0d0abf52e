"""What a comparison of two models found, as data and as text."""

from __future__ import annotations

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True)
class OutputReport:
    """One output of two models, at the element and in the run whose error was largest in units of its bound.

    Attributes:
        name: the output.
        dtype: its element type.
        error: |second - reference|; infinite if only one of the two is NaN or infinite, or if shapes differ.
        bound: what the error may be there.
        ok: no element was out of bounds; also True if `comparable` is False.
        comparable: False for an output that depends on an operator that draws random numbers.
    """

    name: str
    dtype: str
    error: float
    bound: float
    ok: bool
    comparable: bool = True


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """What `check` found.

    Attributes:
        ok: every comparable output agrees in every run.
        runs: how many runs with random inputs were made.
        outputs: one entry per output, in the model's order.
        notes: what limits the check: outputs that are random, types that were replaced, models run in one thread.
    """

    ok: bool
    runs: int
    outputs: tuple[OutputReport, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as data for JSON; an error or bound that is not finite is None."""
        result = dataclasses.asdict(self)
        for output in result["outputs"]:
            for key in ("error", "bound"):
                output[key] = output[key] if math.isfinite(output[key]) else None
        return result

    def __str__(self) -> str:
        runs = f"{self.runs} random run{'s' if self.runs != 1 else ''}"
        lines = [f"same outputs in {runs}" if self.ok else f"outputs differ in {runs}"]
        width = max([len(output.name) for output in self.outputs] or [0])
        for output in self.outputs:
            if not output.comparable:
                lines.append(f"  {output.name:{width}}  {output.dtype:8}  random, not compared")
                continue
            figures = f"error {output.error:8.2e}  bound {output.bound:8.2e}{'' if output.ok else '  WRONG'}"
            lines.append(f"  {output.name:{width}}  {output.dtype:8}  {figures}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def summary(self) -> str:
        """Return one line: the verdict, and the worst output if one is out of bounds."""
        wrong = [output for output in self.outputs if not output.ok]
        if not wrong:
            return str(self).split("\n", 1)[0]
        worst = max(wrong, key=lambda output: output.error / output.bound if output.bound else math.inf)
        return (
            f"{len(wrong)} of {len(self.outputs)} outputs differ in {self.runs} random runs: {worst.name!r} by "
            f"{worst.error:.3g}; expected at most {worst.bound:.3g}"
        )

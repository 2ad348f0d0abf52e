"""Runs many random modules or models: their counts go to a log, from which a stopped sweep continues.

    python tests/support/sweeping.py modules FIRST LAST     the modules of fuzzing_modules.py, in build/modules.log
    python tests/support/sweeping.py models FIRST LAST      the models of fuzzing_graphs.py, in build/models.log

Seeds that are in the log already are not run again. Stop it when you like; the same command continues. At the end it
prints the results of all seeds in the log, as `--totals` does at any time.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass
class Outcome:
    """The result of the case of a seed.

    Attributes:
        counts: what to add up.
        refusals: the reasons of refusals.
        failures: lines that start with the seed and say what is wrong.
    """

    seed: int
    counts: dict[str, int] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass
class Sweep:
    """What came of many cases."""

    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    examples: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> Sweep:
        sweep = cls()
        for outcome in outcomes:
            sweep.add(outcome)
        return sweep

    def add(self, outcome: Outcome) -> None:
        self.counts.update({name: count for name, count in outcome.counts.items() if count})
        for text in outcome.refusals:
            self.refusals[text] += 1
            self.examples.setdefault(text, outcome.seed)
        self.failures += outcome.failures

    def __str__(self) -> str:
        refused = [f"refused {n}, such as {self.examples[text]}: {text}" for text, n in self.refusals.most_common()]
        counts = ", ".join(f"{name} {count}" for name, count in self.counts.items())
        return "\n".join([*self.failures, *refused, counts])


class Log:
    """A file with an outcome a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.outcomes: dict[int, Outcome] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                # A stopped sweep may leave half a line.
                if line.endswith("}"):
                    outcome = Outcome(**json.loads(line))
                    self.outcomes[outcome.seed] = outcome

    def add(self, outcome: Outcome) -> None:
        self.outcomes[outcome.seed] = outcome
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(f"\n{json.dumps(asdict(outcome))}")


def _prepared(kind: str) -> Callable[[int], Outcome]:
    if kind == "models":
        import fuzzing_graphs

        from gradfuse.models import inference, inference_worker

        # Models that the checker does not survive are none of these.
        inference.ask = inference_worker.infer
        return fuzzing_graphs.outcome
    import fuzzing_modules
    import torch

    from gradfuse import _torch_private as private

    torch.set_num_threads(1)
    private.translations_read_once().__enter__()
    return fuzzing_modules.outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("kind", choices=["modules", "models"])
    parser.add_argument("seeds", type=int, nargs="*", metavar="FIRST LAST")
    parser.add_argument("--log", type=Path, help="the file of the outcomes; build/KIND.log if it is not given")
    parser.add_argument("--totals", action="store_true", help="run nothing")
    args = parser.parse_args()
    log = Log(args.log or Path("build") / f"{args.kind}.log")
    if not args.totals:
        first, last = args.seeds
        outcome_of = _prepared(args.kind)
        try:
            for seed in range(first, last):
                if seed not in log.outcomes:
                    outcome = outcome_of(seed)
                    log.add(outcome)
                    print(*outcome.failures, sep="\n", end="\n" if outcome.failures else "", flush=True)
        except KeyboardInterrupt:
            pass
    print(Sweep.of(log.outcomes.values()))


if __name__ == "__main__":
    main()

"""Does a fusion pay? The predicted and the measured time in onnxruntime, for every corpus family.

A family is an operator in the graphs of one producer. Of each family, a static, a dynamic and a float16 graph is taken
where there are such; the subgraph that the fusion replaces is cut out and enlarged (`regions.py`), fused with policy
"all", and both sides are compared with each other and timed in stock onnxruntime, in turns.

Operators of whole training steps are measured in steps of one layer (`layers.py`), in several sizes.

    python benchmarks/payoff.py [--quick] [--only PATTERN] [--out FOLDER] [--page docs/cost-model.md]

Writes payoff.json, payoff.md with all rows and payoff.svg to FOLDER, which is build/benchmarks if not given, and the
medians of each operator to the page, between its marks.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

import gradfuse
from gradfuse.passes.matching import Policy, cost
from gradfuse.passes.report import Fusion, Report
from gradfuse.testing import assert_gradients_close

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from layers import LayerStep, layer_steps, values
from producers import Case, cases
from regions import Array, NotCovered, Region, between, enlarge, extract, in_float64, run, session

ROOT = Path(__file__).resolve().parents[1]
OPERATORS = ("CrossEntropyLossGrad", "GroupedBiasAddGrad", "MseLossBackward", "ScaledMaskedSoftmaxBackward")
PRODUCERS = ("torch_makefx", "torch_export_fb", "torch_aot", "torch_ops", "jax2onnx_gemmfix", "onnx_ad")
SIZES = {"S": 2**14, "M": 2**21, "L": 2**24}  # elements of the largest tensor: 64 KiB, 8 MiB, 64 MiB in float32
REPEATS = {"S": 300, "M": 15, "L": 5}
NOISE = 0.05
"""Differences in time below this are noise."""
START, END = "<!-- payoff -->", "<!-- end of payoff -->"


@dataclass
class Row:
    """One case at one size. Times are medians in milliseconds by the number of threads."""

    operator: str
    producer: str
    case: str
    size: str
    elements: int
    nodes: tuple[int, int]
    bytes_before: int
    bytes_after: int
    predicted: float
    """Times as fast."""
    taken: bool
    assumed: tuple[int, int] | None
    """The prediction while the graph has symbolic dimensions; `bytes_*` are those for the dimensions of this run."""
    taken_assumed: bool | None = None
    plain_ms: dict[str, float] = field(default_factory=dict)
    fused_ms: dict[str, float] = field(default_factory=dict)
    speedup: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """The quartiles over the runs of time plain / time fused, each pair run back to back."""

    @property
    def ratio(self) -> float:
        """Bytes before over bytes after."""
        return self.bytes_before / max(self.bytes_after, 1)

    @property
    def measured(self) -> float:
        """The geometric mean over the numbers of threads of the medians."""
        return math.prod(median for _, median, _ in self.speedup.values()) ** (1 / len(self.speedup))

    @property
    def right(self) -> bool:
        """Whether the policy decided right: what it took is not slower, what it refused is not faster.

        Beyond noise, that is: by more than NOISE in three quarters of the runs, for each number of threads.
        """
        quartiles = self.speedup.values()
        if self.taken:
            return any(high > 1 - NOISE for _, _, high in quartiles)
        return any(low < 1 + NOISE for low, _, _ in quartiles)


def named(path: Path) -> onnx.ModelProto:
    """A model whose nodes all have names, each its own."""
    model = onnx.load(path)
    seen: set[str] = set()
    for k, node in enumerate(model.graph.node):
        if not node.name or node.name in seen:
            node.name = f"{node.name or node.op_type}__{k}"
        seen.add(node.name)
    return model


def fused(model: onnx.ModelProto, operator: str, policy: Policy = "all") -> tuple[onnx.ModelProto, Report]:
    result = gradfuse.fuse(model, only=[operator], policy=policy)
    return result.model, result.report


@dataclass
class Sides:
    """A match as two models, and what they read and compute."""

    plain: onnx.ModelProto
    fused: onnx.ModelProto
    fusion: Fusion
    root: str
    plain_nodes: list[str]
    fused_nodes: list[str]


def sides(model: onnx.ModelProto, operator: str) -> Sides:
    """The largest match of an operator in a model."""
    result, report = fused(model, operator)
    fusions = report.fusions
    if not fusions:
        reasons = {m.reason for m in report.near_misses}
        raise NotCovered(f"no match in the enlarged subgraph{': ' if reasons else ''}{'; '.join(sorted(reasons))}")
    fusion = max(fusions, key=lambda f: f.bytes_before)
    old = {n.name: n for n in model.graph.node}
    new = {n.name: n for n in result.graph.node if n.name not in old}
    maker = {out: n for n in result.graph.node for out in n.output}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in result.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    # The nodes that the rewrite put in: those new ones that hang together with the fused one.
    part, todo = {fusion.node}, [new[fusion.node]]
    while todo:
        node = todo.pop()
        near = [maker[name] for name in node.input if name in maker]
        near += [r for out in node.output for r in readers.get(out, ())]
        for other in near:
            if other.name in new and other.name not in part:
                part.add(other.name)
                todo.append(other)
    replaced = list(fusion.replaced)
    roots = [out for name in replaced for out in old[name].output if out and out in maker and maker[out].name in part]
    if len(roots) != 1:
        raise NotCovered(f"the subgraph has {len(roots)} results")
    return Sides(model, result, fusion, roots[0], replaced, sorted(part))


def region_of(case: Case, operator: str) -> tuple[Region, Sides]:
    """The subgraph of a case with the forward pass's part ahead of it, in the dimensions that it has."""
    model = named(case.path)
    whole = sides(model, operator)
    added = [n for n in whole.fused.graph.node if n.name in whole.fused_nodes]
    region = extract(model, case.arrays("in"), whole.plain_nodes, [name for n in added for name in n.input])
    return region, sides(region.model, operator)


def sized(region: Region, match: Sides, operator: str, elements: int) -> tuple[Region, Sides]:
    nodes = [n for n in region.model.graph.node if n.name in match.plain_nodes and n.op_type not in ("Shape", "Size")]
    nodes += [n for n in match.fused.graph.node if n.name in match.fused_nodes and n.op_type not in ("Shape", "Size")]
    touched = [v for n in nodes for v in (*n.input, *n.output) if region.shapes.get(v)]
    largest = max(touched, key=lambda v: math.prod(region.shapes[v]))
    grouped = operator == "GroupedBiasAddGrad" and len(region.shapes[largest]) == 2
    keep = region.shapes[match.root][:1] if grouped else ()
    big, _ = enlarge(region, largest, elements, keep)
    return big, sides(big.model, operator)


def static(region: Region) -> onnx.ModelProto:
    """The region's model with the dimensions of its samples in the place of symbols."""
    model = onnx.ModelProto()
    model.CopyFrom(region.model)
    del model.graph.value_info[:]
    for value in model.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, region.samples[value.name].shape, strict=True):
            dim.dim_value = size
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    for out in onnx.shape_inference.infer_shapes(model).graph.output:
        next(o for o in model.graph.output if o.name == out.name).CopyFrom(out)
    # What inference does not know, a run tells.
    unknown = [out for out in model.graph.output if not out.type.tensor_type.HasField("shape")]
    for out, array in zip(unknown, run(model, region.samples, [out.name for out in unknown]).values(), strict=True):
        out.CopyFrom(onnx.helper.make_tensor_value_info(out.name, out.type.tensor_type.elem_type, array.shape))
    return model


class Timed:
    """A session with its inputs and outputs bound, so that a call times the kernels and not the copies."""

    def __init__(self, model: onnx.ModelProto, values: Mapping[str, Array], threads: int) -> None:
        self.session = session(model, threads, library=True)
        self.binding = self.session.io_binding()
        for value in self.session.get_inputs():
            self.binding.bind_ortvalue_input(value.name, ort.OrtValue.ortvalue_from_numpy(values[value.name]))
        for value in self.session.get_outputs():
            self.binding.bind_ortvalue_output(value.name, ort.OrtValue.ortvalue_from_numpy(values[value.name].copy()))

    def __call__(self) -> float:
        start = time.perf_counter()
        self.session.run_with_iobinding(self.binding)
        return (time.perf_counter() - start) * 1e3

    def outputs(self) -> dict[str, Array]:
        names = (value.name for value in self.session.get_outputs())
        return dict(zip(names, map(np.asarray, self.binding.copy_outputs_to_cpu()), strict=True))


def measure(region: Region, match: Sides, row: Row) -> None:
    """Fill in the times of a row, after comparing what both sides compute."""
    plain_nodes, fused_nodes = (
        with_constants(m, n) for m, n in ((match.plain, match.plain_nodes), (match.fused, match.fused_nodes))
    )
    empty: dict[str, Array] = {}
    reads = {
        name
        for m, chosen in ((match.plain, plain_nodes), (match.fused, fused_nodes))
        for n in m.graph.node
        if n.name in chosen
        for name in n.input
    }
    available = {o for n in match.plain.graph.node for o in n.output} | region.samples.keys()
    wanted = [name for name in (*sorted(reads), match.root) if name in available]
    values = run(match.plain, region.samples, wanted)
    models = [
        between(match.plain, plain_nodes, [match.root], values),
        between(match.fused, fused_nodes, [match.root], values),
    ]
    values = {name: np.array(v, order="C") for name, v in (empty | values).items()}
    expected = values[match.root]

    def check(got: Mapping[str, Array]) -> None:
        if row.size != "L":
            compare(got[match.root], expected, models[0], values, match.root)

    time_both(row, models, values, check)


def time_both(
    row: Row, models: list[onnx.ModelProto], values: Mapping[str, Array], check: Callable[[Mapping[str, Array]], None]
) -> None:
    """Fill in the times of a row by running the plain and the fused model in turns, after a check of the second."""
    for threads in (1, 2):
        both = [Timed(m, values, threads) for m in models]
        for timed in both:
            timed()
        if threads == 1:
            check(both[1].outputs())
        pairs = [tuple(timed() for timed in both) for _ in range(REPEATS[row.size])]
        key = str(threads)
        row.plain_ms[key], row.fused_ms[key] = (statistics.median(p[k] for p in pairs) for k in (0, 1))
        low, median, high = statistics.quantiles((p / f for p, f in pairs), n=4)
        row.speedup[key] = (low, median, high)


def compare(got: Array, plain: Array, model: onnx.ModelProto, values: Mapping[str, Array], root: str) -> None:
    """Raise AssertionError if the fused result is further from the subgraph in float64 than the plain one."""
    wide = {name: v.astype(np.float64) if v.dtype.kind == "f" else v for name, v in values.items()}
    exact = run(in_float64(model), wide, [root])[root]
    finite = np.isfinite(exact) & np.isfinite(plain)
    exact, native, got = (np.where(finite, v, v.dtype.type(0)) for v in (exact, plain, got))
    # What cancels: the terms of the sum that a smaller result is, the roundings of float16 on the way.
    most = max((v for v in values.values() if v.dtype.kind == "f"), key=np.size)
    steps = 4 if plain.dtype == np.float32 else 8 * float(np.finfo(np.float16).eps / np.finfo(np.float32).eps)
    terms = steps * float(np.abs(exact).max(initial=0))
    if most.size > plain.size:
        terms += float(np.abs(most).mean(dtype=np.float64)) * most.size / plain.size
    assert_gradients_close(got, native, exact, plain.dtype, terms=terms)


def with_constants(model: onnx.ModelProto, names: list[str]) -> set[str]:
    """The names, and those of the Constant nodes that they read."""
    maker = {out: n for n in model.graph.node for out in n.output}
    read = {name for n in model.graph.node if n.name in set(names) for name in n.input}
    return {*names, *(maker[r].name for r in read if r in maker and maker[r].op_type == "Constant")}


def candidates(operator: str, producer: str) -> dict[str, list[Case]]:
    """The cases of a family by kind, the plainest first."""
    plain = ("ce_mean", "ce_onehot", "attn_maskedfill_f32", "attn_where", "mse_mean", "mse_", "gba_2d_ends", "gba_3d")
    found: dict[str, list[Case]] = {"static": [], "dynamic": [], "float16": []}
    for case in cases():
        if case.producer != producer or operator not in case.expect or not case.runs or "bf16" in case.name:
            continue
        kind = "float16" if "f16" in case.name else "dynamic" if "_dyn" in case.name else "static"
        found[kind].append(case)
    for chosen in found.values():
        chosen.sort(key=lambda c: next((k for k, p in enumerate(plain) if c.name.startswith(p)), len(plain)))
    if operator == "GroupedBiasAddGrad":
        # Two subgraphs that have nothing in common: rows with and without an index.
        found["three-dimensional"] = [c for c in found["static"] if c.name.startswith("gba_3d")]
        found["static"] = [c for c in found["static"] if not c.name.startswith("gba_3d")]
    return found


def rows(arguments: argparse.Namespace) -> Iterator[Row | dict[str, str]]:
    """Each row, or why there is none."""
    sizes = ["S", "M"] if arguments.quick else list(SIZES)
    for operator in OPERATORS:
        for producer in PRODUCERS:
            for kind, chosen in candidates(operator, producer).items():
                refused: dict[str, str] = {}
                for case in chosen[:6]:
                    if not fnmatch.fnmatch(str(case), arguments.only):
                        continue
                    some = False
                    try:
                        for row in of_case(case, operator, sizes):
                            some = True
                            yield row
                    except NotCovered as error:
                        refused[str(case)] = str(error)
                    if some:
                        refused = {name: reason for name, reason in refused.items() if name == str(case)}
                        break
                for name, reason in refused.items():
                    yield {"operator": operator, "case": name, "kind": kind, "reason": reason}
    for step in layer_steps():
        if fnmatch.fnmatch(f"step/{step.name}", arguments.only):
            yield of_step(step)


def of_step(step: LayerStep) -> Row:
    """The whole step with and without its fusion. Both compute the rest alike, so that gains are a little too small."""
    model = step.model()
    result, report = fused(model, step.operator)
    (fusion,) = report.fusions
    before = {node.name for node in model.graph.node}
    given = values(model)
    elements = max(array.size for array in given.values())
    row = Row(
        step.operator,
        "step",
        step.name,
        next((size for size in SIZES if elements <= SIZES[size]), "L"),
        elements,
        (len(fusion.replaced), sum(node.name not in before for node in result.graph.node)),
        fusion.bytes_before,
        fusion.bytes_after,
        fusion.speedup,
        bool(fused(model, step.operator, "profitable")[1].fusions),
        None,
    )
    plain = run(model, given, [output.name for output in model.graph.output])

    def check(got: Mapping[str, Array]) -> None:
        # onnxruntime has no convolutions in float64 to compare with: rounding alone may differ. What goes through a
        # batch norm sums up to 0.
        most = max(float(np.abs(array).max(initial=0)) for array in plain.values())
        for name, value in got.items():
            far = float(np.abs(value.astype(np.float64) - plain[name]).max(initial=0))
            assert far <= 64 * np.finfo(np.float32).eps * most, f"{name} is {far:g} off"

    time_both(row, [model, result], given | plain, check)
    return row


def of_case(case: Case, operator: str, sizes: list[str]) -> Iterator[Row]:
    region, match = region_of(case, operator)
    for size in sizes:
        try:
            big, large = sized(region, match, operator, SIZES[size])
            fixed = static(big)
            known = sides(fixed, operator)
        except NotCovered as error:
            raise NotCovered(f"size {size}: {error}") from error
        except (onnx.shape_inference.InferenceError, ValueError) as error:
            raise NotCovered(f"enlarged, it is invalid: {str(error)[:200]}") from error
        symbolic = any(d.dim_param for v in big.model.graph.input for d in v.type.tensor_type.shape.dim)
        row = Row(
            operator,
            case.producer,
            case.name,
            size,
            max(math.prod(s) for s in big.shapes.values()),
            (len(known.plain_nodes), len(known.fused_nodes)),
            known.fusion.bytes_before,
            known.fusion.bytes_after,
            known.fusion.speedup,
            bool(fused(fixed, operator, "profitable")[1].fusions),
            (large.fusion.bytes_before, large.fusion.bytes_after) if symbolic else None,
            bool(fused(big.model, operator, "profitable")[1].fusions) if symbolic else None,
        )
        try:
            measure(Region(fixed, big.samples, big.shapes), known, row)
        except (
            ort.capi.onnxruntime_pybind11_state.Fail,
            ort.capi.onnxruntime_pybind11_state.InvalidArgument,
            ort.capi.onnxruntime_pybind11_state.RuntimeException,
        ) as error:
            raise NotCovered(f"enlarged, onnxruntime refuses it: {str(error)[:200]}") from error
        yield row


def assumptions() -> list[dict[str, int]]:
    """For several assumed sizes of symbolic dimensions: how many matches of the dynamic graphs the policy takes."""
    chosen = {str(c): c for op in OPERATORS for p in PRODUCERS for c in candidates(op, p)["dynamic"]}
    standard, found = cost.ASSUMED_DIM, []
    try:
        for assumed in (8, standard, 512, 4096):
            cost.ASSUMED_DIM = assumed
            reports = {name: gradfuse.fuse(ir.load(c.path), bodies=False).report for name, c in chosen.items()}
            taken = {(name, f.op, f.replaced) for name, report in reports.items() for f in report.fusions}
            refused = sum(m.reason.startswith("not profitable") for r in reports.values() for m in r.near_misses)
            found.append({"assumed": assumed, "graphs": len(chosen), "taken": len(taken), "refused": refused})
    finally:
        cost.ASSUMED_DIM = standard
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="sizes S and M only")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases, as in torch_aot/ce_*")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "benchmarks", metavar="FOLDER")
    parser.add_argument("--page", type=Path, help="the page to write the medians to")
    arguments = parser.parse_args()
    found: list[Row] = []
    missing: list[dict[str, str]] = []
    for row in rows(arguments):
        if isinstance(row, dict):
            missing.append(row)
            print(f"{row['case']:52} not covered: {row['reason'][:150]}", flush=True)
        else:
            found.append(row)
            print(line(row), flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    document = {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "onnxruntime": ort.__version__,
        "rows": [asdict(r) | {"measured": r.measured, "right": r.right} for r in found],
        "not_covered": missing,
        "assumed_dimensions": assumptions(),
    }
    (arguments.out / "payoff.json").write_text(json.dumps(document, indent=1) + "\n")
    (arguments.out / "payoff.md").write_text(table(found, missing, document["assumed_dimensions"]))
    plot(found, arguments.out / "payoff.svg")
    if arguments.page is not None:
        before, _, rest = arguments.page.read_text(encoding="utf-8").partition(START)
        after = rest.partition(END)[2]
        text = medians(found) + "\n" + of_assumptions(document["assumed_dimensions"])
        arguments.page.write_text(f"{before}{START}\n{text}\n{END}{after}", encoding="utf-8")
    wrong = [r for r in found if not r.right]
    print(f"{len(found)} rows; the policy decided right in {len(found) - len(wrong)}")


def table(found: list[Row], missing: list[dict[str, str]], assumed: Any) -> str:
    """The results as Markdown."""
    text = [
        "| graph | size | nodes | traffic | predicted | 1 thread: plain, fused, ratio | 2 threads | policy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        traffic = f"{row.bytes_before / 2**20:.3g} to {row.bytes_after / 2**20:.3g} MiB"
        cells = [f"{row.plain_ms[t]:.3g}, {row.fused_ms[t]:.3g} ms, **{row.speedup[t][1]:.2f}**" for t in row.speedup]
        decision = ("taken" if row.taken else "left") + ("" if row.right else ", **wrong**")
        name = f"{row.producer}/{row.case}"
        nodes = f"{row.nodes[0]} to {row.nodes[1]}"
        text.append(f"| {' | '.join([name, row.size, nodes, traffic, f'{row.predicted:.2f}', *cells, decision])} |")
    text += ["", *of_assumptions(assumed).splitlines()]
    if missing:
        text += ["", "Not covered:", ""] + [f"- {m['case']} ({m['operator']}): {m['reason']}" for m in missing]
    return "\n".join(text) + "\n"


def of_assumptions(assumed: list[dict[str, int]]) -> str:
    """Table of what is taken for several assumed sizes of symbolic dimensions."""
    text = ["| symbolic dimension taken as | dynamic graphs | matches taken | left |", "|---|---|---|---|"]
    text += [f"| {a['assumed']} | {a['graphs']} | {a['taken']} | {a['refused']} |" for a in assumed]
    return "\n".join(text) + "\n"


def medians(found: list[Row]) -> str:
    """Table of what each operator gains where it is taken, and the share of that in what was predicted."""
    sizes = ", ".join(SIZES)
    text = [
        f"| operator | rows | decided right | taken | times as fast: {sizes} | measured over predicted: {sizes} |",
        "|---|---:|---:|---:|---|---|",
    ]
    for operator in dict.fromkeys(row.operator for row in found):
        own = [row for row in found if row.operator == operator]
        taken = [row for row in own if row.taken]
        by_size = [[row for row in taken if row.size == size] for size in SIZES]
        cells = [
            *map(str, (len(own), sum(row.right for row in own), len(taken))),
            ", ".join(_median(row.measured for row in chosen) for chosen in by_size),
            ", ".join(_median(row.measured / row.predicted for row in chosen) for chosen in by_size),
        ]
        text.append(f"| `{operator}` | {' | '.join(cells)} |")
    return "\n".join(text) + "\n"


def _median(values: Iterator[float]) -> str:
    known = list(values)
    return f"{statistics.median(known):.2f}" if known else "-"


def plot(found: list[Row], path: Path) -> None:
    """Predicted against measured, one point a row."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "gradfuse"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 5.5), layout="constrained")
    for operator, colour in zip(
        sorted({row.operator for row in found}), matplotlib.color_sequences["tab20"], strict=False
    ):
        for size, marker in zip(SIZES, ("o", "s", "^"), strict=True):
            chosen = [r for r in found if (r.operator, r.size) == (operator, size)]
            label = f"{operator}, {size}"
            axes.scatter(
                [r.predicted for r in chosen],
                [r.measured for r in chosen],
                color=colour,
                marker=marker,
                s=24,
                label=label,
            )
    ends = [0.25, 32.0]
    axes.plot(ends, ends, color="grey", linewidth=0.8)
    axes.axhline(1.0, color="grey", linestyle=":", linewidth=0.8)
    axes.axvline(1.0, color="grey", linestyle=":", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="predicted speed-up", ylabel="measured speed-up")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(matplotlib.ticker.FixedLocator([0.25, 0.5, 1, 2, 4, 8, 16, 32]))
        axis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        axis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None})


def line(row: Row) -> str:
    times = "  ".join(f"{row.plain_ms[t]:9.3f} {row.fused_ms[t]:9.3f} x{row.speedup[t][1]:5.2f}" for t in row.speedup)
    verdict = ("taken" if row.taken else "left") + ("" if row.right else " WRONG")
    return (
        f"{row.producer + '/' + row.case:52} {row.size} {row.nodes[0]:3}->{row.nodes[1]:2} "
        f"x{row.predicted:5.2f}  {times}  {verdict}"
    )


if __name__ == "__main__":
    main()

"""What fuse matches in each graph of tests/corpus and tests/findings, as `matched.json` beside the graphs keeps it.

`make matched` prints the table and, for each operator, in how many of its graphs it is matched. It also updates the
file.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path

from gradfuse import GradfuseError, fuse
from gradfuse.passes.matching import Policy

TESTS = Path(__file__).parents[1]
LIST = TESTS / "corpus" / "matched.json"
POLICIES: tuple[Policy, ...] = ("all", "profitable")

Matched = dict[str, dict[str, int]]
"""For each policy how often each operator was fused, and by which rule."""


def graphs() -> dict[str, Path]:
    """The files by their names in the list."""
    found = [path for folder in ("corpus", "findings") for path in (TESTS / folder).rglob("*.onnx")]
    return {str(path.relative_to(TESTS).with_suffix("")): path for path in sorted(found)}


def matched(path: Path) -> Matched:
    """What fuse matches in a file; nothing in one that it refuses."""
    result: Matched = {}
    for policy in POLICIES:
        try:
            fusions = fuse(path, policy=policy, bodies=False).report.fusions
        except GradfuseError:
            fusions = []
        counts = Counter(f"{fusion.op} ({fusion.rule})" for fusion in fusions)
        result[policy] = dict(sorted(counts.items()))
    return result


def known() -> dict[str, Matched]:
    content: dict[str, Matched] = json.loads(LIST.read_text())
    return content


HOLDS = {
    **dict.fromkeys(("embedding", "embedding_take", "embedding_one_hot"), "EmbeddingDenseBackward"),
    **dict.fromkeys(("layer_norm", "layer_norm_plain", "layer_norm_variance", "rms_norm"), "LayerNormBackward"),
    **dict.fromkeys(("layer_norm_squares", "group_norm"), "LayerNormBackward"),
    "batch_norm_rows": "BatchNormBackward",
    **{
        f"batch_norm{images}{end}": "BatchNormBackward"
        for images in ("", "_images")
        for end in ("", "_variance", "_squares")
    },
    **dict.fromkeys(("convolution", "convolution_depthwise"), "ConvolutionBackward"),
    **dict.fromkeys(("gelu", "gelu_tanh"), "GeluBackward"),
    **dict.fromkeys(("max_pool", "max_pool_overlapping"), "MaxPoolBackward"),
    **dict.fromkeys(("relu", "maximum"), "ThresholdBackward"),
    **dict.fromkeys(("squared_error", "squared_error_weighted"), "MseLossBackward"),
    **dict.fromkeys(("adam", "adamw", "adam_foreach", "adamw_foreach"), "ApplyAdamW"),
    **dict.fromkeys(("momentum", "sgd", "sgd_foreach", "sgd_nesterov"), "ApplySgd"),
    **dict.fromkeys(("attention", "softmax_columns"), "ScaledMaskedSoftmaxBackward"),
}
"""The operator whose gradient, or update, a graph is about, by the name of its file; else a loss of classes."""


def shares(found: dict[str, Matched]) -> dict[str, tuple[int, int]]:
    """Of how many graphs of a producer's folder that are about an operator it is matched in how many, under "all"."""
    result: dict[str, tuple[int, int]] = {}
    for name, policies in found.items():
        *_, folder, case = name.split("/")
        if folder not in ("jax_layers", "ort_module", "tf2onnx", "torch_layers"):
            continue
        case = case.split(".")[0]
        operator = HOLDS.get(case, "CrossEntropyLossGrad")
        matched_there = any(what.startswith(f"{operator} ") for what in policies["all"])
        hits, count = result.get(operator, (0, 0))
        result[operator] = hits + matched_there, count + 1
    return dict(sorted(result.items()))


def main() -> None:
    logging.disable()
    found = {name: matched(path) for name, path in graphs().items()}
    width = max(map(len, found))
    for name, policies in found.items():
        everything, profitable = (policies[policy] for policy in POLICIES)
        entries = [
            f"{count} {what}" + ("" if profitable.get(what) == count else f", {profitable.get(what, 0)} by default")
            for what, count in everything.items()
        ]
        print(name.ljust(width), "; ".join(entries) or "-")
    print()
    for operator, (hits, count) in shares(found).items():
        print(f"{operator}: matched in {hits} of {count} graphs that are about it")
    LIST.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

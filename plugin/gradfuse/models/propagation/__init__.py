"""Types, sizes and small values that follow from a graph: shape inference that folds constants as it goes.

onnx's own inference does not evaluate what exporters compute of sizes, such as remainders and comparisons, and takes
the first of two symbols that are broadcast. This one follows sizes through such arithmetic, whole or in part: a vector
may be (2, T, unknown). What it has no rule for stays unknown, and is asked of onnx (shapes.py).

`sizes` and `elements` are what rules compute with, `facts` keeps what is known and applies the rules, which are in
`operators`, `windows`, `onnxruntime` and `aclnn`.
"""

from gradfuse.models.propagation import aclnn, onnxruntime, operators, windows
from gradfuse.models.propagation.facts import RULES, Facts
from gradfuse.models.propagation.sizes import Size, Sizes, Unknown, broadcast, letter_sizes, size_of

__all__ = [
    "RULES",
    "Facts",
    "Size",
    "Sizes",
    "Unknown",
    "aclnn",
    "broadcast",
    "letter_sizes",
    "onnxruntime",
    "operators",
    "size_of",
    "windows",
]

"""From canonical forms to fused nodes.

A :class:`Context` has a :class:`Site` for each graph, which finds values by what they compute. The rules of an operator
are a :class:`FusePass`: they propose a :class:`Rewrite` of a value, whose nodes a :class:`Builder` makes. The pass
compares costs, has the rewrite tested by numbers, and puts it in.
"""

from gradfuse.passes.matching.builder import Builder
from gradfuse.passes.matching.context import Context, ContextPass
from gradfuse.passes.matching.fuse_pass import FusePass, Policy
from gradfuse.passes.matching.graphs import TOLERANCE, VIEWS, is_node_of_training, names_of, wanted_outputs
from gradfuse.passes.matching.materialise import find_mask, materialise
from gradfuse.passes.matching.rewrite import OTHERWISE, Mismatch, Rewrite, bypassed, require_same
from gradfuse.passes.matching.site import Site
from gradfuse.passes.matching.softmax import divides, flattened_softmaxes, softmaxes

__all__ = [
    "OTHERWISE",
    "TOLERANCE",
    "VIEWS",
    "Builder",
    "Context",
    "ContextPass",
    "FusePass",
    "Mismatch",
    "Policy",
    "Rewrite",
    "Site",
    "bypassed",
    "divides",
    "find_mask",
    "flattened_softmaxes",
    "is_node_of_training",
    "materialise",
    "names_of",
    "require_same",
    "softmaxes",
    "wanted_outputs",
]

"""From canonical forms to fused nodes: the search, the builder and the passes."""

from gradfuse.passes.matching.site import (
    TOLERANCE,
    VIEWS,
    Builder,
    ForgetPass,
    FusePass,
    Mismatch,
    Policy,
    Rewrite,
    Site,
    Sites,
    names_of,
    require_same,
)

__all__ = [
    "TOLERANCE",
    "VIEWS",
    "Builder",
    "ForgetPass",
    "FusePass",
    "Mismatch",
    "Policy",
    "Rewrite",
    "Site",
    "Sites",
    "names_of",
    "require_same",
]

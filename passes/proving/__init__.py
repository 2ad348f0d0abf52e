"""The test by numbers that each rewrite must pass."""

from gradfuse.passes.proving.proof import prove
from gradfuse.passes.proving.verdicts import Refuted, Unproved

__all__ = [
    "Refuted",
    "Unproved",
    "prove",
]

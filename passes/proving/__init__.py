"""The numerical proof that each rewrite must pass."""

from gradfuse.passes.proving.proof import Refuted, Unproved, prove

__all__ = [
    "Refuted",
    "Unproved",
    "prove",
]

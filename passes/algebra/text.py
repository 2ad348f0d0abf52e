"""Polynomials as text, for messages and for names. Nothing reads it back."""

from __future__ import annotations

from gradfuse.passes.algebra.atoms import Atoms
from gradfuse.passes.algebra.polynomials import ONE, Exponent, Poly, digits


def text(atoms: Atoms, poly: Poly) -> str:
    """The polynomial as text, such as ``2 x[v0] + -1 exp(z[v0, v1])``."""
    if not poly:
        return "0"
    return " + ".join(
        (f"{digits(c)} " if c != 1.0 or m == ONE else "") + " ".join(_factor(atoms, a, e) for a, e in m)
        for m, c in sorted(poly.terms.items())
    )


def _factor(atoms: Atoms, a: int, e: Exponent) -> str:
    atom = atoms.atoms[a]
    match atom.kind:
        case "var":
            base = f"v{atom.args[0]}"
        case "dim":
            base = str(atom.args[0])
        case "tensor":
            base = f"{atom.args[0]}[{', '.join(text(atoms, p) for p in atom.args[1:])}]"
        case "sum":
            names = ",".join(f"v{v}" for v in atoms.bound_of(atom))
            base = f"sum_{names}({text(atoms, Poly({atom.args[1]: 1.0}))})"
        case "exp":
            base = f"exp({text(atoms, Poly({atom.args[0]: 1.0}))})"
        case "eq":
            base = f"[{text(atoms, atom.args[0])} = 0]"
        case "lt":
            base = f"[{text(atoms, atom.args[0])} < 0]"
        case "inside":
            base = f"[0 <= {text(atoms, atom.args[0])} < {text(atoms, atom.args[1])}]"
        case "wide":
            base = f"[{text(atoms, atom.args[0])} != 1]"
        case kind:
            base = f"{kind}({text(atoms, atom.args[0])})"
    return base if e == 1 else f"{base}^{e}"

"""Evaluates canonical forms with numbers, to compare them with what onnxruntime computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from gradfuse.passes.algebra import Algebra, Monomial, Poly, Positions
from gradfuse.passes.reading import Form, Forms

Array = np.ndarray[Any, Any]


def squeezed(array: Array, value: ir.Value) -> Array:
    """The array without the dimensions that are known to have size 1."""
    shape = np.shape(array) if value.shape is None else value.shape
    return np.asarray(array).reshape([n for n, d in zip(np.shape(array), shape, strict=True) if d != 1])


def constants(forms: Forms, graph: ir.Graph) -> dict[object, Array]:
    """The content of opaque constants, by the names that forms give them."""
    found: dict[object, Array] = {}
    values = [*graph.initializers.values(), *(v for n in graph if n.op_type == "Constant" for v in n.outputs)]
    for value in values:
        array, form = forms.constant(value), forms.get(value)
        if array is None or array.size == 0 or form is None or len(form.poly) != 1:
            continue
        ((monomial, factor),) = form.poly.terms.items()
        for a, _ in monomial:
            atom = forms.algebra.atoms[a]
            if atom.kind == "tensor":
                data = squeezed(array, value) / factor if factor != 1 else squeezed(array, value)
                used = {forms.algebra.atoms[b].args[0] for p in atom.args[1:] for m in p.terms for b, _ in m}
                found[atom.args[0]] = data[tuple(slice(None) if v in used else 0 for v in range(data.ndim))]
    return found


class Evaluation:
    """Numbers for the atoms of an algebra: tensors by name (without their dimensions of size 1) and dimensions."""

    def __init__(self, algebra: Algebra, tensors: Mapping[object, Array], dims: Mapping[str, int]) -> None:
        self.algebra = algebra
        self.tensors = tensors
        self.dims = dims

    def with_tensor(self, name: object, tensor: Array) -> Evaluation:
        return Evaluation(self.algebra, {**self.tensors, name: tensor}, self.dims)

    def form(self, form: Form) -> Array:
        """The tensor that a form stands for."""
        sizes = [int(self.poly(s, {}).item()) for s in form.sizes]
        grid = np.meshgrid(*(np.arange(n) for n in sizes), indexing="ij", sparse=True)
        flat = np.broadcast_to(self.poly(form.poly, dict(enumerate(grid))), sizes)
        return flat.reshape([int(np.prod([int(self.poly(s, {}).item()) for s in g])) for g in form.groups])

    def tensor(self, name: object) -> Array:
        if not isinstance(name, Positions):
            return self.tensors[name]
        size = np.arange(int(self.poly(name.size, {}).item()))
        return np.flatnonzero(np.broadcast_to(self.poly(name.condition, {0: size}), size.shape))

    def poly(self, poly: Poly, env: Mapping[int, Array]) -> Array:
        total: Array = np.zeros((), np.float64)
        for m, c in poly.terms.items():
            total = total + c * self.monomial(m, env)
        return total

    def monomial(self, monomial: Monomial, env: Mapping[int, Array]) -> Array:
        result: Array = np.ones((), np.float64)
        for a, e in monomial:
            result = result * self.atom(a, env) ** float(e)
        return result

    def atom(self, a: int, env: Mapping[int, Array]) -> Array:
        atom = self.algebra.atoms[a]
        match atom.kind:
            case "var":
                return env[atom.args[0]].astype(np.float64)
            case "dim":
                derived = self.algebra.derived.get(atom.args[0])
                sizes = [] if derived is None else [int(self.poly(s, {}).item()) for s in derived.sizes]
                return np.asarray(self.dims[atom.args[0]] if derived is None else derived.of(sizes), np.float64)
            case "wide":
                return np.asarray(self.poly(atom.args[0], {}) != 1, np.float64)
            case "tensor":
                data = self.tensor(atom.args[0])
                indices = [np.rint(self.poly(p, env)).astype(np.int64) for p in atom.args[1:]]
                # An index may be out of range where an indicator makes the term zero.
                clipped = tuple(np.clip(i, 0, n - 1) for i, n in zip(indices, data.shape, strict=True))
                return np.asarray(data[clipped], np.float64)
            case "exp":
                return np.exp(self.monomial(atom.args[0], env))
            case "log":
                return np.log(self.poly(atom.args[0], env))
            case "pow":
                return self.poly(atom.args[0], env)
            case "eq":
                return np.asarray(self.poly(atom.args[0], env) == 0, np.float64)
            case "lt":
                return np.asarray(self.poly(atom.args[0], env) < 0, np.float64)
            case "inside":
                index = self.poly(atom.args[0], env)
                return np.asarray((index >= 0) & (index < self.poly(atom.args[1], {})), np.float64)
            case "sum":
                sizes = [int(self.poly(s, {}).item()) for s in atom.args[0]]
                count = len(sizes)
                inner = {v: i[(..., *(None,) * count)] for v, i in env.items()}
                for k, (v, n) in enumerate(zip(self.algebra.bound_of(atom), sizes, strict=True)):
                    inner[v] = np.arange(n).reshape([n if k == axis else 1 for axis in range(count)])
                summand = np.asarray(self.monomial(atom.args[1], inner))
                lead = summand.shape[: max(summand.ndim - count, 0)]
                return np.asarray(np.broadcast_to(summand, (*lead, *sizes)).sum(axis=tuple(range(-count, 0))))
            case kind:
                raise AssertionError(kind)

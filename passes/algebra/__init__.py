"""The algebra that canonical forms are written in.

An element of a tensor is a *polynomial* in its index variables v0, v1, ...: a sum of terms, each a number times powers
of *atoms*. These are all kinds of atoms:

========  ===================  =====================================================================
kind      arguments            stands for
========  ===================  =====================================================================
var       variable             an index variable, as a number
dim       name                 a symbolic dimension
tensor    tensor, indices      an element of a tensor; each index is a polynomial
exp       monomial             e to the monomial
log       polynomial           the natural logarithm
pow       polynomial           the polynomial, where it has several terms and gets an exponent
sum       sizes, monomial      the sum of the monomial over bound variables v-1, v-2, ... of these sizes
eq, lt    polynomial           1 where the polynomial is zero (negative), else 0
inside    index, size          1 where 0 <= index < size, else 0; both are polynomials
wide      size                 0 where the size, a polynomial, is 1, else 1
========  ===================  =====================================================================

Every operation of :class:`Algebra` takes polynomials in *normal form* and returns one, so that equal values come out as
equal polynomials, however a graph computes them. The rules of the normal form:

1. Products distribute over sums, and equal terms are added up.
2. ``exp`` of a sum is a product, ``log`` of a product of positive factors is a sum.
3. A condition (eq, lt, inside) is its own square. ``[v = x] f(v)`` is ``[v = x] f(x)``.
4. A condition within an index or within another condition becomes a choice between two terms.
5. A factor that does not depend on a bound variable leaves its sum. Independent factors are sums of their own.
6. The sum of ``[j = x] f(j)`` over j < n is ``f(x)`` if x is proven to be in range, else ``inside(x, n) f(x)``.
7. A sum names its bound variables by its height, so equal sums are equal atoms.

For example, the rows of a softmax add up to 1, and subtracting a maximum first changes nothing:

>>> algebra = Algebra()
>>> row, column, classes = algebra.var(0), algebra.var(1), algebra.dim("C")
>>> z = algebra.tensor("z", [row, column])
>>> total = algebra.sum(algebra.exp(z), {1: classes})  # rule 7: the variable that v1 becomes is v-1
>>> softmax = algebra.mul(algebra.exp(z), algebra.power(total, -1))
>>> algebra.text(softmax)
'exp(z[v0, v1]) sum_v-1(exp(z[v0, v-1]))^-1'
>>> algebra.sum(softmax, {1: classes}) == UNIT  # rule 5: the inverse leaves the sum, and cancels what is left
True
>>> shifted = z - algebra.tensor("max", [row])
>>> total = algebra.sum(algebra.exp(shifted), {1: classes})  # rules 2 and 5
>>> algebra.text(total)
'sum_v-1(exp(z[v0, v-1])) exp(max[v0])^-1'
>>> algebra.mul(algebra.exp(shifted), algebra.power(total, -1)) == softmax  # rule 1
True

And a one-hot row picks an element, where its index is in range:

>>> hit = algebra.equal_zero(column - algebra.tensor("t", [row]))
>>> algebra.text(algebra.sum(algebra.mul(hit, z), {1: classes}))  # rules 3 and 6
'z[v0, t[v0]] [0 <= t[v0] < C]'

Two polynomials are equal if their coefficients agree to six digits. Integers, and what stands in an index or in a
condition, must agree exactly. What has no normal form within the limits raises :class:`TooComplex`, and is then an
opaque tensor.

The modules, each of which imports only those above it:

- polynomials: :class:`Poly`, coefficients and exponents. definitions: names that say what they stand for.
- atoms: the table of atoms, and index variables. patterns: polynomials without the names of tensors.
- text: for messages. sizes: dimensions. monomials: products and division.
- operations: the operations that need each other, by which the next modules call each other.
- facts: what is certain of a value. conditions: eq, lt and inside. arithmetic: products, powers, exp and log.
- substitution: for variables and atoms. elements: of tensors. sums: over index variables.
- algebra: class Algebra. renaming: polynomials with other tensors.
"""

from gradfuse.passes.algebra.algebra import Algebra
from gradfuse.passes.algebra.atoms import Atom
from gradfuse.passes.algebra.definitions import Positions
from gradfuse.passes.algebra.polynomials import ONE, UNIT, ZERO, Monomial, Poly, TooComplex, number
from gradfuse.passes.algebra.renaming import Renaming, Reordered
from gradfuse.passes.algebra.sums import MOST_SUMMED

__all__ = [
    "MOST_SUMMED",
    "ONE",
    "UNIT",
    "ZERO",
    "Algebra",
    "Atom",
    "Monomial",
    "Poly",
    "Positions",
    "Renaming",
    "Reordered",
    "TooComplex",
    "number",
]

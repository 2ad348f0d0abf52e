"""Rewrites statements that decide between computations, so that both sides of a decision can be computed.

`if chance: x = f(x)` becomes

    _decision = gradfuse_decisions.begin(chance, ("x",), locals())
    for _side in _decision:
        if _side:
            x = f(x)
        if _decision.leave(locals()):
            x = _decision["x"]

`not`, `and`, `or` and conditional expressions of such statements become calls. If a side ends its loop iteration, or
the function, the following statements become part of the other side. `for index in found: ...` becomes

    for _chosen, _candidate in gradfuse_decisions.candidates(found):
        if _chosen:
            index = _candidate
            ...

with such an `if`, which may fail for what is never found. All else of a function stays, and so do its lines.
"""

from __future__ import annotations

import ast
import copy
import functools
import linecache
from collections.abc import Callable, Collection, Iterator, Mapping
from types import CodeType

HELPER = "gradfuse_decisions"
"""The global variable that rewritten functions use."""

NUMBERS = "gradfuse_numbers"
"""The global variable that functions use whose calls take sizes."""

GUARDS = "gradfuse_guards"
"""The global variable that functions use whose conditions are on numbers."""

_MOST_NODES = 20_000
"""Statements after a decision that ends an iteration may become part of at most this many sides."""


_Ended = Callable[[ast.stmt], list[ast.stmt]]


class CannotRewriteError(Exception):
    """Code has no source, or a statement that cannot be rewritten."""


class CannotSelectError(BaseException):
    """The sides of a decision give values that cannot be selected from. Modules do not catch it, unlike exceptions."""


class MoreToRewriteError(CannotSelectError):
    """A function must be rewritten, too, as it takes what depends on decisions.

    Attributes:
        place: the code of the function, which may be a rewritten one, and a line in which it must decide, if any.
    """

    def __init__(self, name: str, place: tuple[CodeType, int | None]) -> None:
        super().__init__(name)
        self.place = place


def rewritten(
    code: CodeType,
    asked: frozenset[int],
    numbers: frozenset[tuple[int, int]] = frozenset(),
    names: Collection[str] = (),
) -> CodeType:
    """Return the code of a function in which the statements that decide in the given lines compute both sides.

    Args:
        code: the code of the function.
        asked: the lines.
        numbers: line and column of conditions on numbers in them, which become tensors.
        names: the last names of the functions whose calls take sizes and numbers in tensors.

    Raises:
        CannotRewriteError: that is not possible.
    """

    def rewrite(tree: ast.Module) -> None:
        function = _function(tree, code)
        of_numbers = _Guards(HELPER, numbers)
        function.body = [of_numbers.visit(statement) for statement in function.body]
        for one in (_Elements(asked, _growing(function.body)), _Nones(_asked_or_set_none(function.body))):
            function.body = [one.visit(statement) for statement in function.body]
        function.body = [_Truths().visit(one) for one in _Rewriter(asked).of_function(function.body)]
        calls = _Numbers(None, names)
        function.body = [calls.visit(statement) for statement in function.body]

    return _compiled_anew(code, rewrite)


def with_numbers(code: CodeType, asked: frozenset[int], names: Collection[str]) -> CodeType:
    """Return the code of a function that calls what takes sizes in the given lines.

    Args:
        code: the code of the function.
        asked: the lines.
        names: the last names of the functions whose calls change.

    Raises:
        CannotRewriteError: that is not possible, or there is no such call.
    """

    def rewrite(tree: ast.Module) -> None:
        calls = _Numbers(asked, names)
        calls.visit(tree)
        if not calls.changed:
            raise CannotRewriteError

    return _compiled_anew(code, rewrite)


def with_guards(code: CodeType, names: Collection[str]) -> CodeType:
    """Return the code of a function that asks `GUARDS` how numbers compare, wherever an `if` may ask that.

    `if x.numel() == 0:` becomes `if gradfuse_guards.asks(x.numel(), 0, line, column, "eq"):`, and `if len(x):` asks
    "truth". Calls of functions with these last names take sizes and numbers in tensors.

    Raises:
        CannotRewriteError: that is not possible, or there is no such `if`.
    """

    def rewrite(tree: ast.Module) -> None:
        guards, calls = _Guards(GUARDS), _Numbers(None, names)
        function = _function(tree, code)
        function.body = [guards.visit(statement) for statement in function.body]
        if not guards.changed:
            raise CannotRewriteError
        function.body = [calls.visit(statement) for statement in function.body]

    return _compiled_anew(code, rewrite)


def _compiled_anew(code: CodeType, rewrite: Callable[[ast.Module], None]) -> CodeType:
    """Return the code of a function after its file was changed by `rewrite`."""
    lines = "".join(linecache.getlines(code.co_filename))
    try:
        tree = ast.parse(lines, code.co_filename)
        if _found(compile(tree, code.co_filename, "exec", dont_inherit=True), code).co_code != code.co_code:
            raise CannotRewriteError
        rewrite(tree)
        ast.fix_missing_locations(tree)
        new = _found(compile(tree, code.co_filename, "exec", dont_inherit=True), code)
    except (SyntaxError, RecursionError) as error:
        raise CannotRewriteError from error
    if new.co_freevars != code.co_freevars:
        raise CannotRewriteError
    return new


def _found(module: CodeType, code: CodeType) -> CodeType:
    """Return the code of the same function within that of its module."""
    pending = [module]
    while pending:
        one = pending.pop()
        if (one.co_name, one.co_firstlineno) == (code.co_name, code.co_firstlineno):
            return one
        pending += [constant for constant in one.co_consts if isinstance(constant, CodeType)]
    raise CannotRewriteError


def _function(tree: ast.Module, code: CodeType) -> ast.FunctionDef:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    raise CannotRewriteError


class _Rewriter:
    """Rewrites the statements of a function that decide in some lines."""

    def __init__(self, asked: frozenset[int]) -> None:
        self._asked = asked
        self._made = 0
        self._nodes = 0
        self._left = set(asked)
        self._together: dict[str, set[str]] = {}

    def of_function(self, body: list[ast.stmt]) -> list[ast.stmt]:
        for node in _own_nodes(body):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
                names = set(_stored([node]))
                self._together |= dict.fromkeys(names, names)
        body = self._of_body(body)
        if self._left:
            raise CannotRewriteError
        return body

    def _of_body(self, body: list[ast.stmt]) -> list[ast.stmt]:
        if any(isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await, ast.Match)) for node in _own_nodes(body)):
            raise CannotRewriteError
        if self._ends(body, ast.Return):
            name = "returned_by_gradfuse"
            returned = _call_of(HELPER, "returned", _name(name))
            body = [*self._without_returns(body, name), ast.Return(returned)]
        return self._block(body)

    def _is_asked(self, statement: ast.stmt) -> bool:
        """Whether one of the lines is one of a statement's own, not of those that it holds."""
        lines = {line for part in _expressions(statement) if hasattr(part, "lineno") for line in _lines(part)}
        self._left -= lines
        return bool(lines & self._asked)

    def _ends(self, body: list[ast.stmt], kind: type[ast.stmt]) -> bool:
        """Whether an asked `if` holds a `return`, or a `continue` of the loop that the body is of."""
        nodes = _own_nodes(body) if kind is ast.Return else _of_loop(body)
        asked = [node for node in nodes if isinstance(node, ast.If) and self._is_asked(node)]
        return any(_holds(node, kind) for node in asked)

    def _block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        return [new for statement in body for new in self._statement(statement)]

    def _statement(self, statement: ast.stmt) -> list[ast.stmt]:
        if isinstance(statement, ast.FunctionDef) and not self._asked.isdisjoint(_lines(statement)):
            statement.body = self._of_body(statement.body)
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return [statement]
        asked = self._is_asked(statement)
        if isinstance(statement, (ast.For, ast.While)) and self._ends(statement.body, ast.Continue):
            statement.body = self._without_continues(statement.body)
        for field in ("body", "orelse", "finalbody"):
            if isinstance(getattr(statement, field, None), list):
                setattr(statement, field, self._block(getattr(statement, field)))
        for handler in getattr(statement, "handlers", []):
            handler.body = self._block(handler.body)
        if not asked:
            if isinstance(statement, ast.If):
                statement.test = _Truths().of(statement.test)
            return [statement]
        if isinstance(statement, ast.For):
            return [self._over_candidates(statement)]
        if isinstance(statement, ast.If):
            statement.test = _Expressions().condition(statement.test)
            return self._both_sides(statement)
        if not isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr)):
            raise CannotRewriteError
        if statement.value is not None:
            statement.value = _Expressions().visit(statement.value)
        return [statement]

    def _over_candidates(self, statement: ast.For) -> ast.For:
        self._made += 1
        chosen, candidate = f"_gradfuse_chosen_{self._made}", f"_gradfuse_candidate_{self._made}"
        test = _located(_name(chosen), statement.target)
        # Within the side: after the loop, it is the last one that was found.
        bound = ast.Assign([statement.target], _located(_name(candidate), statement.target))
        inside = [ast.copy_location(bound, statement.target), *statement.body]
        body: list[ast.stmt] = [ast.copy_location(ast.If(test, inside, []), statement)]
        if _holds(body[0], ast.Continue):
            body = self._without_continues(body)
        statement.body = [
            new for one in body for new in (self._both_sides(one, may_fail=True) if isinstance(one, ast.If) else [one])
        ]
        target = ast.Tuple([_name(chosen, ast.Store()), _name(candidate, ast.Store())], ast.Store())
        statement.target = _located(target, statement.target)
        statement.iter = _located(_call_of(HELPER, "candidates", statement.iter), statement.iter)
        return statement

    def _both_sides(self, statement: ast.If, *, may_fail: bool = False) -> list[ast.stmt]:
        inside = [*statement.body, *statement.orelse]
        if any(_holds(node, ast.Return) for node in inside) or any(
            isinstance(node, (ast.Break, ast.Continue)) for node in _of_loop(inside)
        ):
            raise CannotRewriteError
        if any(isinstance(node, (ast.Global, ast.Nonlocal, ast.Delete)) for node in _own_nodes(inside)):
            raise CannotRewriteError
        statement = _InPlace().visit(statement)
        asked = sorted({other for one in _asked_for_none(statement.test) for other in self._together.get(one, {one})})
        narrowed: list[ast.stmt] = [
            ast.Assign([_name(one, ast.Store())], _narrowed(one, statement.test)) for one in asked
        ]
        for new in narrowed:
            _locate(new, statement.test)
        statement.body[:0], statement.orelse[:0] = narrowed, copy.deepcopy(narrowed)
        inside = [*statement.body, *statement.orelse]
        names = sorted(set(_stored(inside)))
        self._made += 1
        decision, side = f"_gradfuse_decision_{self._made}", f"_gradfuse_side_{self._made}"
        scope = _call("locals")
        begin = _call_of(
            HELPER, "begin", statement.test, ast.Tuple([ast.Constant(one) for one in names], ast.Load()), scope
        )
        restored: list[ast.stmt] = [
            ast.Assign([_name(one, ast.Store())], ast.Subscript(_name(decision), ast.Constant(one), ast.Load()))
            for one in names
        ]
        left = ast.If(_call_of(decision, "leave", scope), restored or [ast.Pass()], [])
        first = statement.body or [ast.Pass()]
        if may_fail:
            errors = ast.Tuple([_name("IndexError"), _name("KeyError")], ast.Load())
            failed = ast.ExceptHandler(errors, None, [ast.Expr(_call_of(decision, "failed"))])
            first = [ast.Try(first, [failed], [], [])]
        sides = ast.If(_name(side), first, statement.orelse)
        loop = ast.For(_name(side, ast.Store()), _name(decision), [sides, left], [])
        both: list[ast.stmt] = [ast.Assign([_name(decision, ast.Store())], begin), loop]
        for new in (both[0], loop, sides, left, *restored):
            _locate(new, statement.test)
        return both

    def _without_continues(self, body: list[ast.stmt]) -> list[ast.stmt]:
        return self._pushed(body, ast.Continue, lambda end: [])

    def _without_returns(self, body: list[ast.stmt], name: str) -> list[ast.stmt]:
        def assigned(end: ast.stmt) -> list[ast.stmt]:
            value = end.value if isinstance(end, ast.Return) else None
            return [ast.copy_location(ast.Assign([_name(name, ast.Store())], value or ast.Constant(None)), end)]

        return self._pushed([*body, ast.copy_location(ast.Return(None), body[-1])], ast.Return, assigned)

    def _pushed(self, body: list[ast.stmt], kind: type[ast.stmt], ended: _Ended) -> list[ast.stmt]:
        """Return a body with what follows an `if` that may end it within the sides of that `if`."""
        new: list[ast.stmt] = []
        for index, statement in enumerate(body):
            self._nodes += 1
            if self._nodes > _MOST_NODES:
                raise CannotRewriteError
            if isinstance(statement, kind):
                return [*new, *ended(statement)]
            if not _holds_end(statement, kind):
                new.append(statement)
                continue
            if not isinstance(statement, ast.If):
                raise CannotRewriteError
            rest = body[index + 1 :]
            sides = [
                self._pushed(copy.deepcopy([*side, *rest]), kind, ended) for side in (statement.body, statement.orelse)
            ]
            changed = ast.If(statement.test, sides[0] or [ast.Pass()], sides[1])
            return [*new, ast.copy_location(changed, statement)]
        return new


_OPERATORS: Mapping[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.MatMult: "matmul",
    ast.Div: "truediv",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.Pow: "pow",
    ast.LShift: "lshift",
    ast.RShift: "rshift",
    ast.BitAnd: "and",
    ast.BitOr: "or",
    ast.BitXor: "xor",
}
"""By the names of their methods, without `__i` and `__`."""


class _InPlace(ast.NodeTransformer):
    """Turns `x += y` into calls: in-place changes of anything but tensors cannot be undone for the other side."""

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if not isinstance(node.target, ast.Name):
            return node
        operator = ast.Constant(_OPERATORS[type(node.op)])
        value = _located(_call_of(HELPER, "augmented", operator, _name(node.target.id), node.value), node)
        return ast.copy_location(ast.Assign([node.target], value), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node


class _Truths(ast.NodeTransformer):
    """Lets code ask for the truth value of a variable by a call: a list may have elements under conditions."""

    def of(self, test: ast.expr) -> ast.expr:
        if isinstance(test, ast.BoolOp):
            test.values = [self.of(value) for value in test.values]
        elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test.operand = self.of(test.operand)
        elif isinstance(test, ast.Name):
            return _located(_call_of(HELPER, "condition", test), test)
        return test

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        node.test = self.of(node.test)
        return node


class _Elements(ast.NodeTransformer):
    """Lets code go through lists, and take elements out of them, by calls: they may be there under conditions.

    Args:
        asked: the lines that decide, where loops and lists are rewritten otherwise.
        lists: the names of variables that hold lists which grow.
    """

    def __init__(self, asked: frozenset[int], lists: Collection[str]) -> None:
        self._asked, self._lists = asked, lists

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        node.iter = self._over(node.iter)
        return node

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        return self._listed(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.AST:
        return self._listed(node)

    def _listed(self, node: ast.ListComp | ast.GeneratorExp) -> ast.AST:
        self.generic_visit(node)
        node.generators[0].iter = self._over(node.generators[0].iter)
        return node

    def _over(self, iterable: ast.expr) -> ast.expr:
        if not self._asked.isdisjoint(_lines(iterable)):
            return iterable
        if isinstance(iterable, ast.Call) and getattr(iterable.func, "id", None) in ("enumerate", "zip", "reversed"):
            iterable.args = [one if isinstance(one, ast.Starred) else self._over(one) for one in iterable.args]
            return iterable
        return _located(_call_of(HELPER, "over", iterable, ast.Constant(iterable.lineno)), iterable)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load) or getattr(node.value, "id", None) not in self._lists:
            return node
        return _located(_call_of(HELPER, "element", node.value, node.slice), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        default = node.args[1:]
        if getattr(node.func, "attr", None) != "get" or len(node.args) not in (1, 2) or node.keywords:
            return node
        if default and not isinstance(default[0], (ast.Constant, ast.Name)):
            return node
        return _located(_call_of(HELPER, "got", node, *copy.deepcopy(default or [ast.Constant(None)])), node)


def _growing(body: list[ast.stmt]) -> set[str]:
    """Return the names of variables that hold lists which a function appends to, or makes of others."""
    nodes = [node for statement in body for node in ast.walk(statement)]
    grown = [node.value for node in nodes if isinstance(node, ast.Attribute) and node.attr in ("append", "extend")]
    made = [node.targets[0] for node in nodes if isinstance(node, ast.Assign) and isinstance(node.value, ast.ListComp)]
    return {one.id for one in (*grown, *made) if isinstance(one, ast.Name)}


class _Nones(ast.NodeTransformer):
    """Lets code ask by a call whether something is None, and return it by one: it may be so under a condition.

    Args:
        names: variables that may be None; operators take what they are otherwise, as Python has none of None.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def _operand(self, node: ast.expr) -> ast.expr:
        if not isinstance(node, ast.Name) or node.id not in self._names:
            return node
        return _located(_call_of(HELPER, "operand", node), node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        node.left, node.right = self._operand(node.left), self._operand(node.right)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) > 1 or not _is_none(node.comparators[0]) or not isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            return node
        asked = _located(_call_of(HELPER, "is_none", node.left), node)
        return _located(ast.UnaryOp(ast.Not(), asked), node) if isinstance(node.ops[0], ast.IsNot) else asked

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        self.generic_visit(node)
        if node.value is not None:
            node.value = _located(_call_of(HELPER, "returned", node.value), node.value)
        return node


def _asked_or_set_none(body: list[ast.stmt]) -> set[str]:
    """Return the names of variables that a function sets to None, or compares with it."""
    nodes = [node for statement in body for node in ast.walk(statement)]
    set_to = [node.targets[0] for node in nodes if isinstance(node, ast.Assign) and _is_none(node.value)]
    asked = [node.left for node in nodes if isinstance(node, ast.Compare) and _is_none(node.comparators[0])]
    return {one.id for one in (*set_to, *asked) if isinstance(one, ast.Name)}


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _asked_for_none(*tests: ast.expr) -> set[str]:
    """Return the names of the variables that conditions ask for None."""
    calls = [node for test in tests for node in ast.walk(test) if isinstance(node, ast.Call)]
    asked = [one.args[0] for one in calls if getattr(one.func, "attr", None) == "is_none"]
    return {one.id for one in asked if isinstance(one, ast.Name)}


class _Narrowed(ast.NodeTransformer):
    """Lets an expression take variables as what they are in a side: None, or not."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in self._names or not isinstance(node.ctx, ast.Load):
            return node
        return _narrowed(node.id, node)


def _narrowed(name: str, place: ast.AST) -> ast.expr:
    return _located(_call_of(HELPER, "narrowed", _name(name)), place)


class _Expressions(ast.NodeTransformer):
    """Turns tests of truth values within an expression into calls."""

    def condition(self, node: ast.expr) -> ast.expr:
        """Return what is tested: each condition of which it consists is asked by a call."""
        if isinstance(node, ast.BoolOp):
            return self._joined(node, self.condition)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return _located(_call_of(HELPER, "negated", self.condition(node.operand)), node)
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "bool" and len(node.args) == 1:
            return self.condition(node.args[0])
        changed: ast.expr = self.visit(node)
        if isinstance(node, ast.Call) and getattr(getattr(node.func, "value", None), "id", None) == HELPER:
            # A condition on a number, which asks by itself.
            return changed
        return _located(_call_of(HELPER, "condition", changed), node)

    def _joined(self, node: ast.BoolOp, of_last: Callable[[ast.expr], ast.expr]) -> ast.expr:
        *before, last = node.values
        result = of_last(last)
        name = "both" if isinstance(node.op, ast.And) else "any"
        for value in reversed(before):
            names = _asked_for_none(value)
            result = _located(_call_of(HELPER, name, self.condition(value), _later(result, names)), node)
        return result

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        return self.condition(node) if isinstance(node.op, ast.Not) else self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        return self._joined(node, self.visit)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if getattr(node.func, "id", None) == "bool" and len(node.args) == 1:
            return self.condition(node)
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        names = _asked_for_none(node.test)
        sides = [_later(self.visit(side), names) for side in (node.body, node.orelse)]
        return _located(_call_of(HELPER, "either", self.condition(node.test), *sides), node)

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        return self._listed(node, node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.AST:
        return self._listed(node, ast.ListComp(node.elt, node.generators))

    def _listed(self, node: ast.ListComp | ast.GeneratorExp, listed: ast.ListComp) -> ast.AST:
        """Return a list whose elements are there under conditions: one for each, or those of what it is made of."""
        *outer, last = node.generators
        if any(one.ifs for one in outer) or not (last.ifs or not outer):
            return self.generic_visit(node)
        names: set[str] = set()
        if last.ifs:
            test = last.ifs[0] if len(last.ifs) == 1 else _located(ast.BoolOp(ast.And(), last.ifs), node)
            names = _asked_for_none(test)
            last.ifs, chosen = [], self.condition(test)
        else:
            name = "_gradfuse_chosen"
            last.target = _located(ast.Tuple([_name(name, ast.Store()), last.target], ast.Store()), node)
            last.iter = _located(_call_of(HELPER, "candidates", last.iter), node)
            chosen = _located(_name(name), node)
        listed.elt = _located(_call_of(HELPER, "kept", chosen, _later(self.visit(node.elt), names)), node)
        for one in node.generators:
            one.iter = self.visit(one.iter)
        return _located(_call_of(HELPER, "listed", _located(listed, node)), node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.AST:
        raise CannotRewriteError


class _Numbers(ast.NodeTransformer):
    """Turns calls of functions of numbers, and products with lists that they take, into calls that take sizes.

    Attributes:
        changed: whether there were any in the given lines; None: in any.
    """

    def __init__(self, asked: frozenset[int] | None, names: Collection[str]) -> None:
        self.changed = False
        self._asked, self._names = asked, names

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
        if name not in self._names or not self._is_asked(node):
            return node
        call = _call_of(NUMBERS, "call", node.func, *map(_product, node.args))
        call.keywords = node.keywords
        return _located(call, node)

    def _is_asked(self, node: ast.expr) -> bool:
        found = self._asked is None or not self._asked.isdisjoint(_lines(node))
        self.changed |= found
        return found


class _Guards(ast.NodeTransformer):
    """Turns conditions on numbers into calls.

    Attributes:
        changed: whether there were any.

    Args:
        owner: the global variable that is called.
        places: their lines and columns; None: everywhere.
    """

    def __init__(self, owner: str, places: Collection[tuple[int, int]] | None = None) -> None:
        self.changed = False
        self._owner, self._places = owner, places

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        node.test = self._of(node.test)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        node.test = self._of(node.test)
        return node

    def _of(self, test: ast.expr) -> ast.expr:
        test = _of_pairs(test)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test.operand = self._of(test.operand)
            return test
        if isinstance(test, ast.BoolOp):
            test.values = [self._of(value) for value in test.values]
            return test
        if self._places is not None and (test.lineno, test.col_offset) not in self._places:
            return test
        value, name, number = test, "truth", _located(ast.Constant(0), test)
        if isinstance(test, ast.Compare):
            name = _COMPARISONS.get(type(test.ops[0]), "")
            if len(test.comparators) > 1 or not name:
                return test
            value, number = test.left, test.comparators[0]
        elif not isinstance(test, (ast.Call, ast.Subscript, ast.Name)):
            return test
        self.changed = True
        constants = [ast.Constant(one) for one in (test.lineno, test.col_offset, name)]
        return _located(_call_of(self._owner, "asks", value, number, *constants), test)

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        self.generic_visit(node)
        node.ifs = [self._of(test) for test in node.ifs]
        return node


_COMPARISONS: Mapping[type[ast.cmpop], str] = {
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.Lt: "lt",
    ast.LtE: "le",
}
"""By the names of the functions of `operator`."""


def _of_pairs(test: ast.expr) -> ast.expr:
    """Return `1 <= n < 3` and `n in (1, 2)` as comparisons of two numbers each, joined by `and` and `or`."""
    if not isinstance(test, ast.Compare):
        return test
    last = test.comparators[-1]
    joined: ast.boolop
    pairs: list[tuple[ast.expr, ast.cmpop, ast.expr, ast.expr]]
    if isinstance(test.ops[0], ast.In) and isinstance(test.left, ast.Name) and isinstance(last, (ast.Tuple, ast.List)):
        joined, pairs = ast.Or(), [(test.left, ast.Eq(), one, one) for one in last.elts]
    elif all(isinstance(one, ast.Name) for one in test.comparators[:-1]):
        lefts = [test.left, *test.comparators[:-1]]
        joined, pairs = ast.And(), list(zip(lefts, test.ops, test.comparators, lefts, strict=True))
    else:
        return test
    if len(pairs) < 2:
        return test
    compared: list[ast.expr] = [
        ast.copy_location(ast.Compare(left, [op], [right]), place) for left, op, right, place in pairs
    ]
    return _located(ast.BoolOp(joined, compared), test)


def _lines(node: ast.expr | ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _product(node: ast.expr) -> ast.expr:
    """Return a product with a list as a call."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return node
    if not isinstance(node.left, ast.List) and not isinstance(node.right, ast.List):
        return node
    return _located(_call_of(NUMBERS, "times", node.left, node.right), node)


def _later(value: ast.expr, narrowed: Collection[str] = ()) -> ast.Lambda:
    if any(isinstance(node, ast.NamedExpr) for node in ast.walk(value)):
        raise CannotRewriteError
    nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.Lambda(nothing, _Narrowed(narrowed).visit(value))


def _name(name: str, context: ast.expr_context | None = None) -> ast.Name:
    return ast.Name(name, context or ast.Load())


def _call(name: str) -> ast.Call:
    return ast.Call(_name(name), [], [])


def _call_of(owner: str, method: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(_name(owner), method, ast.Load()), list(arguments), [])


def _locate(new: ast.AST, old: ast.AST) -> None:
    """Put a node, and what it holds that has no place of its own, where another one is."""
    for node in ast.walk(new):
        if isinstance(node, (ast.expr, ast.stmt, ast.ExceptHandler)) and not hasattr(node, "lineno"):
            ast.copy_location(node, old)


def _located(new: ast.expr, old: ast.AST) -> ast.expr:
    _locate(new, old)
    return new


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def _own_nodes(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the nodes of statements, without those within functions and classes that they define."""
    pending: list[ast.AST] = list(body)
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, _SCOPES):
            pending += ast.iter_child_nodes(node)


def _of_loop(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the nodes of statements, without those within loops and functions of their own."""
    pending: list[ast.AST] = list(body)
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, (*_SCOPES, ast.For, ast.While, ast.AsyncFor)):
            pending += ast.iter_child_nodes(node)


def _holds(node: ast.AST, kind: type[ast.AST]) -> bool:
    inside = _own_nodes if kind is ast.Return else _of_loop
    return any(isinstance(one, kind) for one in inside(list(ast.iter_child_nodes(node))))  # type: ignore[arg-type]


def _holds_end(statement: ast.stmt, kind: type[ast.stmt]) -> bool:
    if kind is ast.Continue and isinstance(statement, (ast.For, ast.While, ast.AsyncFor)):
        return False
    return not isinstance(statement, _SCOPES) and _holds(statement, kind)


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield the expressions of a statement, without those of the statements that it holds."""
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr):
            yield child
        elif isinstance(child, ast.withitem):
            yield child.context_expr


@functools.singledispatch
def _stored_by(node: ast.AST) -> list[str]:
    return []


@_stored_by.register
def _(node: ast.Name) -> list[str]:
    return [node.id] if isinstance(node.ctx, ast.Store) else []


@_stored_by.register(ast.FunctionDef)
@_stored_by.register(ast.AsyncFunctionDef)
@_stored_by.register(ast.ClassDef)
def _(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> list[str]:
    return [node.name]


@_stored_by.register(ast.Import)
@_stored_by.register(ast.ImportFrom)
def _(node: ast.Import | ast.ImportFrom) -> list[str]:
    return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]


@_stored_by.register
def _(node: ast.ExceptHandler) -> list[str]:
    return [node.name] if node.name else []


def _stored(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the names that statements bind, but for those of the loops that this module makes."""
    comprehensions = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    pending: list[ast.AST] = list(body)
    while pending:
        node = pending.pop()
        yield from (name for name in _stored_by(node) if not name.startswith("_gradfuse_"))
        if not isinstance(node, (*_SCOPES, *comprehensions)):
            pending += ast.iter_child_nodes(node)

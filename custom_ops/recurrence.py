"""What the operators of recurrent layers share: their shapes, and the text of a loop over the steps of a sequence."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gradfuse.custom_ops.operator import FLOAT_TYPES, Attribute, Call, Dim, Operator, Variant

if TYPE_CHECKING:
    import torch

REVERSE = Attribute("reverse", 0, "1: steps go from the last to the first.", flag=True)
_SPLIT_WITH_COUNT = 18
"""The opset from which on Split must be told the number of its outputs."""


def choices(call: Call) -> Iterable[str]:
    """The words that decide the text of every body."""
    if call.attributes["reverse"]:
        yield "reverse"


def divided(call: Call, name: str, dim: Dim, gates: int) -> Dim:
    """The number of units, where a dimension has them for each of `gates` gates."""
    if not isinstance(dim, int):
        return None
    if dim % gates:
        raise call.error(name, f"of {gates} H {dim}", f"a multiple of {gates}")
    return dim // gates


def sizes(call: Call, **inputs: Sequence[str]) -> dict[str, Dim]:
    """The sizes T, N and H, as far as they are known, of inputs with dimensions such as ("T", "N", "4 H")."""
    found: dict[str, Dim] = {}
    for name, dims in inputs.items():
        for label, dim in zip(dims, call.shape(name, *dims), strict=True):
            gates, _, letter = label.rpartition(" ")
            units = divided(call, name, dim, int(gates)) if gates else dim
            found[letter] = call.same(name, letter, found.get(letter), units)
    return found


def times(gates: int, units: Dim) -> Dim:
    """The dimension of `units` for each of `gates` gates."""
    return gates * units if isinstance(units, int) else None


def split(variant: Variant, count: int) -> str:
    """An ONNX Split along the columns."""
    return f"Split<axis=1, num_outputs={count}>" if variant.opset >= _SPLIT_WITH_COUNT else "Split<axis=1>"


def widened(*names: str) -> str:
    """Text: each input as <name>_real."""
    return "\n".join(f"{name}_real = Cast<to=$real>({name})" for name in names)


_BACKWARDS = """
    last_place = Constant<value_ints=[-1]>()
    before_all = Constant<value_ints=[-9223372036854775807]>()
    step_axis = Constant<value_ints=[0]>()
"""


def in_turn(variant: Variant, *names: str, backward: bool) -> str:
    """Text: each sequence in the order in which a loop takes its steps, with a step of zeros, as <name>_steps.

    So no loop is empty. The step is the last one of the forward pass, where nothing reads what it gives, and the first
    one of the backward pass, where zeros give zeros.
    """
    flips = ("reverse" in variant.choices) != backward
    text = f"""
        {_BACKWARDS if flips else ""}
        one_step = Constant<value_ints=[1]>()
        no_step = Constant<value_float=0.0>()
        no_step_real = Cast<to=$real>(no_step)
    """
    for name in names:
        turned = f"Slice({name}_real, last_place, before_all, step_axis, last_place)"
        ordered = [f"{name}_turned", f"{name}_zeros"][:: -1 if backward else 1]
        text += f"""
            {name}_row = Shape<start=1>({name})
            {name}_row_shape = Concat<axis=0>(one_step, {name}_row)
            {name}_zeros = Expand(no_step_real, {name}_row_shape)
            {name}_turned = {turned if flips else f"Identity({name}_real)"}
            {name}_steps = Concat<axis=0>({", ".join(ordered)})
        """
    return text


def in_place(variant: Variant, *names: str, like: str, backward: bool) -> str:
    """Text: each result <name>_steps of such a loop, in the order of the sequence and in the type of an input."""
    flips = ("reverse" in variant.choices) != backward
    begin, end = ("1", "9223372036854775807") if backward else ("0", "-1")
    text = f"""
        kept_begin = Constant<value_ints=[{begin}]>()
        kept_end = Constant<value_ints=[{end}]>()
        kept_axis = Constant<value_ints=[0]>()
    """
    for name in names:
        turned = f"Slice({name}_kept, last_place, before_all, step_axis, last_place)"
        text += f"""
            {name}_kept = Slice({name}_steps, kept_begin, kept_end, kept_axis)
            {name}_in_order = {turned if flips else f"Identity({name}_kept)"}
            {name} = CastLike({name}_in_order, {like})
        """
    return text


def states_before(states: str, initial: str) -> str:
    """Text: the state before each step of a backward pass as before_steps, and zeros to begin with as none."""
    return f"""
        row_axis = Constant<value_ints=[0]>()
        {initial}_row = Unsqueeze({initial}_real, row_axis)
        before_steps = Concat<axis=0>({states}_turned, {initial}_row)
        state_shape = Shape({initial})
        none = Expand(no_step_real, state_shape)
    """


def before(states: torch.Tensor, initial: torch.Tensor, reverse: bool) -> torch.Tensor:
    """The state before each step, of the states behind each (T, N, H) and the first one (N, H)."""
    import torch

    first = initial.unsqueeze(0)
    return torch.cat([states[1:], first] if reverse else [first, states[:-1]])


def setup_context(ctx: Any, inputs: Sequence[Any], output: Sequence[torch.Tensor]) -> None:
    """Save first states, weight and results for `backward`, of inputs that end with bias and reverse."""
    _, *first, weight, bias, ctx.reverse = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(*first, weight, *output)
    ctx.mark_non_differentiable(output[-1])
    ctx.set_materialize_grads(False)


def weight_gradients(
    ctx: Any, grad_gates: torch.Tensor, hidden: torch.Tensor, initial_h: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of weight and bias, of that of the gates (T, N, gates H)."""
    rows = grad_gates.flatten(0, 1)
    states = before(hidden, initial_h, ctx.reverse).flatten(0, 1)
    return rows.T @ states, rows.sum(0) if ctx.has_bias else None


operator = functools.partial(
    Operator,
    attributes=(REVERSE,),
    constraints={"T": FLOAT_TYPES},
    choices=choices,
    samples=({}, {"reverse": 1}),
    spreads_nan=True,
)
"""An operator of a recurrent layer, of the rest of its arguments."""

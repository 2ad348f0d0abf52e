"""Dropout and random numbers that are the same in an exported step and in PyTorch: a seed determines them.

Element i of the n-th draw of a step is a hash of (seed, n, i): a dropout keeps it if it is at least p of its range, and
other distributions are functions of it. The seed is a buffer of the step, and each step adds 1 to it. ONNX's random
operators would give other numbers in every runtime, and training could not be resumed. This module imports torch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradfuse import _torch_private as private
from gradfuse.custom_ops import draws
from gradfuse.export import host_draws, standins
from gradfuse.export.translation import function_caller

aten = torch.ops.aten

_library: Any = torch.library.Library("gradfuse", "FRAGMENT")  # type: ignore[no-untyped-call]
# Decompositions are made without a seed, which they cannot know; `connect` adds it.
_library.define("dropout_mask(Tensor input, float p, Tensor? seed=None, int layer=0, Tensor? before=None) -> Tensor")
torch.library.register_fake(
    "gradfuse::dropout_mask", lambda input, *_: torch.empty_like(input, dtype=torch.bool), lib=_library
)
_library.define("uniform(Tensor input, Tensor? seed=None, int layer=0, Tensor? before=None) -> Tensor")
torch.library.register_fake(
    "gradfuse::uniform", lambda input, *_: torch.empty_like(input, dtype=torch.float32), lib=_library
)

# Around each side of a decision by a random number. The second returns how many draws there were until then.
_library.define("side_begins(Tensor condition) -> Tensor")
_library.define(
    "side_ends(Tensor condition, Tensor? inside=None, int drawn=0, Tensor? ahead=None, int drawn_ahead=0) -> Tensor"
)
for _name in ("side_begins", "side_ends"):
    torch.library.register_fake(
        f"gradfuse::{_name}", lambda condition, *_: torch.empty_like(condition, dtype=torch.int64), lib=_library
    )
    _library.impl(_name, lambda condition, *_: condition.to(torch.int64), "CompositeExplicitAutograd")
_SIDE_BEGINS, _SIDE_ENDS = torch.ops.gradfuse.side_begins.default, torch.ops.gradfuse.side_ends.default

# A draw has its number even if nothing reads it, as PyTorch makes it as well.
for _overload in (
    torch.ops.gradfuse.dropout_mask.default,
    torch.ops.gradfuse.uniform.default,
    _SIDE_BEGINS,
    _SIDE_ENDS,
):
    torch.fx.node.has_side_effect(_overload)

_Draw = Callable[[Tensor], Tensor]
"""Returns numbers of [0, 1), float32, in the shape of a tensor."""


_BLOCK = 2**13
"""How many words are hashed at once."""


class SeededDropout(private.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draw the numbers of every dropout and every other draw that runs under it on the CPU as an exported step does.

    Args:
        seed: int64, a scalar; None is 0.

    Attributes:
        count: how many draws there were.
        single: which of them were of one number.
    """

    def __init__(self, seed: Tensor | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed = 0 if seed is None else int(seed)
        self.count = 0
        self.single: list[int] = []
        self._host = contextlib.ExitStack()

    def __enter__(self) -> SeededDropout:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._host.enter_context(host_draws.as_numbers())
        return self

    def __exit__(self, *error: Any) -> None:
        self._host.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if own_generator(args, kwargs) is not None:
            # What it draws follows from its own state, which may be the same in each step.
            return func(*args, **kwargs)
        # All of PyTorch's dropouts draw their noise by this operator when they are not traced.
        if func is aten.bernoulli_.float:
            # PyTorch omits an argument that is the default.
            noise, share = args if len(args) > 1 else (*args, 0.5)
            noise.copy_(mask(self.seed, self.count, noise, 1 - share))
            self.count += 1
            return noise
        if func is aten.bernoulli.p:
            drawn = mask(self.seed, self.count, args[0], 1 - args[1]).to(args[0].dtype)
            self.count += 1
            return drawn
        if func in _LEAKY:
            result, slopes = _rrelu(self._draw, *args, **kwargs)
            args[1].copy_(slopes)
            return args[0].copy_(result) if func is aten.rrelu_with_noise_.default else result
        if func in _IN_PLACE:
            result = _DISTRIBUTIONS[_IN_PLACE[func]](self._draw, *args, **kwargs)
            return args[0].copy_(result)
        if func in _DISTRIBUTIONS:
            return _DISTRIBUTIONS[func](self._draw, *args, **kwargs)
        return func(*args, **kwargs)

    def _draw(self, like: Tensor) -> Tensor:
        self.single += [self.count] * (like.numel() == 1)
        self.count += 1
        return uniform(self.seed, self.count - 1, like)


class EqualDropout(SeededDropout):  # type: ignore[no-untyped-call]
    """Draw the same numbers for all draws of one shape."""

    count = property(lambda self: 0, lambda self, value: None)


def mask(seed: int, layer: int, input: Tensor, p: float) -> Tensor:
    """Return which elements of `input` the `layer`-th draw of a step keeps: booleans in its shape."""
    limit = 2 * draws.threshold(p)
    kept = np.zeros(input.numel(), np.bool_)
    if limit < draws.WORD:
        for place, words in _words(seed, layer, input.numel()):
            np.greater_equal(words, np.uint32(limit), out=kept[place])
    return torch.from_numpy(kept).view(input.shape)


def uniform(seed: int, layer: int, input: Tensor) -> Tensor:
    """Return the numbers of [0, 1) that the `layer`-th draw of a step gives, float32 in the shape of `input`."""
    numbers = np.empty(input.numel(), np.float32)
    for place, words in _words(seed, layer, input.numel()):
        words >>= np.uint32(32 - draws.UNIFORM_BITS)
        np.multiply(words, np.float32(2.0**-draws.UNIFORM_BITS), out=numbers[place], casting="same_kind")
    return torch.from_numpy(numbers).view(input.shape)


def own_generator(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Generator | None:
    """Return the generator that an operator is called with, if it is not PyTorch's own."""
    given = [one for one in private.tensors_in((args, dict(kwargs))) if isinstance(one, torch.Generator)]
    return next((one for one in given if one is not torch.default_generator), None)


def extreme_seeds(first: int, count: int, layer: int) -> tuple[int, int]:
    """Return with which of `count` seeds from `first` on the `layer`-th draw gives the least and the largest number."""
    words = _hashed(_key(np.arange(first, first + count), layer).astype(np.uint32))
    return first + int(words.argmin()), first + int(words.argmax())


def _words(seed: int, layer: int, count: int) -> Iterator[tuple[slice, npt.NDArray[np.uint32]]]:
    """Yield hashes of 32 bits, one an element, in blocks that the first-level cache holds."""
    key = np.uint32(_key(seed, layer))
    for begin in range(0, count, _BLOCK):
        place = slice(begin, min(begin + _BLOCK, count))
        word = np.arange(place.start, place.stop).astype(np.uint32)
        word *= np.uint32(draws.FACTORS[0])
        word ^= word >> np.uint32(draws.SHIFTS[0])
        word += key
        yield place, _hashed(word)


def _key(seed: Any, layer: int) -> Any:
    """Return what the hashes of a draw begin with; seeds may be in an array."""
    return ((seed % 2**31) * draws.SEED_FACTOR + layer * draws.LAYER_FACTOR) % draws.WORD


def _hashed(word: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Mix the bits of words, in place: products wrap around."""
    word *= np.uint32(draws.FACTORS[1])
    word ^= word >> np.uint32(draws.SHIFTS[1])
    word *= np.uint32(draws.FACTORS[2])
    return word


def begin_side(taken: Tensor) -> None:
    """Say that what follows is done only where a condition holds, a boolean of shape ()."""
    torch.ops.gradfuse.side_begins(taken)


def end_side(taken: Tensor) -> None:
    """Say that it ends: what was drawn within has no number where the condition does not hold."""
    torch.ops.gradfuse.side_ends(taken)


def table() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions by overload, as `run_decompositions` takes them."""

    def decomposition(distribution: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: distribution(torch.ops.gradfuse.uniform, *args, **kwargs)

    return {
        aten.native_dropout.default: native_dropout,
        aten.bernoulli.p: bernoulli,
        **{overload: decomposition(distribution) for overload, distribution in _DISTRIBUTIONS.items()},
    }


def native_dropout(input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """aten::native_dropout with the mask of `gradfuse::dropout_mask`, for `run_decompositions`."""
    if not train:
        return input, torch.ones_like(input, dtype=torch.bool)
    if p == 1:
        # Nothing is kept, and PyTorch draws no number either.
        return input * 0.0, torch.zeros_like(input, dtype=torch.bool)
    kept: Tensor = torch.ops.gradfuse.dropout_mask(input, p)
    return kept * input * (1.0 / (1.0 - p)), kept


def bernoulli(self: Tensor, p: float, *, generator: Any = None) -> Tensor:
    """aten::bernoulli.p, with which PyTorch drops in place and by channels: 1 where a mask of 1 - p keeps."""
    kept: Tensor = torch.ops.gradfuse.dropout_mask(self, 1 - p)
    return kept.to(self.dtype)


def _empty(size: Sequence[Any], dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> tuple[Tensor, Any]:
    """Return a tensor of this shape, whose values do not matter, and the type of the numbers to be drawn."""
    return torch.zeros(size, dtype=torch.bool, device=device), dtype or torch.get_default_dtype()


def _narrowed(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers of [0, 1) in a type; 16 bits have fewer digits, and must not round up to 1."""
    if dtype in (torch.float16, torch.bfloat16):
        steps = 1.0 / torch.finfo(dtype).eps
        numbers = (numbers * steps).floor() / steps
    return numbers.to(dtype)


def _rand(draw: _Draw, size: Sequence[Any], *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    like, dtype = _empty(size, dtype, device)
    return _narrowed(draw(like), dtype)


def _rand_like(draw: _Draw, self: Tensor, *, dtype: Any = None, **_: Any) -> Tensor:
    return _narrowed(draw(self), dtype or self.dtype)


def _uniform(draw: _Draw, self: Tensor, low: float = 0.0, high: float = 1.0, **_: Any) -> Tensor:
    return _narrowed(draw(self), self.dtype) * (high - low) + low


def _randn(draw: _Draw, size: Sequence[Any], *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    like, dtype = _empty(size, dtype, device)
    return _gaussian(draw, like, dtype)


def _randn_like(draw: _Draw, self: Tensor, *, dtype: Any = None, **_: Any) -> Tensor:
    return _gaussian(draw, self, dtype or self.dtype)


def _normal(draw: _Draw, self: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
    return _gaussian(draw, self, self.dtype) * std + mean


def _normal_of(draw: _Draw, mean: Tensor | float, std: Tensor | float = 1.0, **_: Any) -> Tensor:
    """Return normal numbers of any means and deviations, which have no gradient as in PyTorch."""
    given = [one for one in (mean, std) if isinstance(one, Tensor)]
    like = torch.broadcast_tensors(*given)[0]  # type: ignore[no-untyped-call]
    drawn: Tensor = standins.STOP_GRADIENT(_gaussian(draw, like.contiguous(), given[0].dtype) * std + mean)
    return drawn


def _gaussian(draw: _Draw, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return standard normal numbers, by Box and Muller's transform of two uniform ones."""
    radius, angle = draw(torch.stack([like, like])).to(torch.promote_types(dtype, torch.float32)).unbind()
    return ((-2.0 * (1.0 - radius).log()).sqrt() * (2.0 * math.pi * angle).cos()).to(dtype)


def _exponential(draw: _Draw, self: Tensor, lambd: float = 1.0, **_: Any) -> Tensor:
    numbers = draw(self).to(torch.promote_types(self.dtype, torch.float32))
    # From the middle of each interval, as 0 would be an infinite logarithm for who takes one.
    return (-(numbers + 0.5 * 2.0**-draws.UNIFORM_BITS).log() / lambd).to(self.dtype)


def _bernoulli_of(draw: _Draw, self: Tensor, p: Tensor | None = None, **_: Any) -> Tensor:
    shares = self if p is None else p
    return (draw(self) < shares).to(self.dtype)


def _randint(draw: _Draw, *bounds_and_size: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    *bounds, size = bounds_and_size
    low, high = bounds if len(bounds) == 2 else (0, *bounds)
    like, _unused = _empty(size, None, device)
    numbers: Tensor = (draw(like).double() * (high - low)).floor() + low
    return numbers.to(dtype or torch.int64)


def _randperm(draw: _Draw, n: int, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    like, _unused = _empty([n], None, device)
    return torch.sort(draw(like))[1].to(dtype or torch.int64)


def _rrelu(
    draw: _Draw,
    self: Tensor,
    noise: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Return what a leaky rectifier gives, and its slopes: drawn ones, or in evaluation mode `noise` as it was."""
    if not training:
        return torch.nn.functional.leaky_relu(self, (lower + upper) / 2), noise
    slopes = torch.where(self <= 0.0, _uniform(draw, self, lower, upper), 1.0)
    return self * slopes, slopes


_LEAKY = (aten.rrelu_with_noise.default, aten.rrelu_with_noise_.default)
_DISTRIBUTIONS: dict[Any, Callable[..., Any]] = {
    aten.rand.default: _rand,
    aten.rand_like.default: _rand_like,
    aten.uniform.default: _uniform,
    aten.randn.default: _randn,
    aten.randn_like.default: _randn_like,
    aten.normal_functional.default: _normal,
    aten.normal.Tensor_Tensor: _normal_of,
    aten.normal.Tensor_float: _normal_of,
    aten.normal.float_Tensor: _normal_of,
    aten.exponential.default: _exponential,
    aten.bernoulli.default: _bernoulli_of,
    aten.bernoulli.Tensor: _bernoulli_of,
    aten.randint.default: _randint,
    aten.randint.low: _randint,
    aten.randperm.default: _randperm,
    aten.rrelu_with_noise_functional.default: _rrelu,
}
"""Operators of traced programs that draw numbers -> the same, given a function that draws uniform ones."""

UNIFORM = frozenset(set(_DISTRIBUTIONS) - {aten.rrelu_with_noise_functional.default})
"""Those of them that draw in evaluation mode too: all that they need are uniform numbers."""

_IN_PLACE: dict[Any, Any] = {
    aten.uniform_.default: aten.uniform.default,
    aten.normal_.default: aten.normal_functional.default,
    aten.exponential_.default: aten.exponential.default,
    aten.bernoulli_.Tensor: aten.bernoulli.Tensor,
}
"""Operators that write into their first argument -> what they are in traced programs."""


def translations() -> dict[Any, Callable[..., Any]]:
    """Return the functions that emit the nodes of the draws, for `custom_translation_table`."""
    from onnxscript import opset18

    op: Any = opset18
    call_mask, call_mask_after = function_caller(draws.MASK), function_caller(draws.MASK_AFTER)
    call_uniform, call_uniform_after = function_caller(draws.UNIFORM), function_caller(draws.UNIFORM_AFTER)

    def dropout_mask(input: Any, p: float, seed: Any, layer: int = 0, before: Any = None) -> Any:
        if before is None:
            return call_mask(seed, input, layer=layer, threshold=draws.threshold(p))
        return call_mask_after(seed, before, input, layer=layer, threshold=draws.threshold(p))

    def uniform_numbers(input: Any, seed: Any, layer: int = 0, before: Any = None) -> Any:
        if before is None:
            return call_uniform(seed, input, layer=layer)
        return call_uniform_after(seed, before, input, layer=layer)

    def side_ends(condition: Any, inside: Any, drawn: int, ahead: Any, drawn_ahead: int) -> Any:
        def number(tensor: Any, count: int) -> Any:
            constant = op.Constant(value_int=count)
            return constant if tensor is None else op.Add(tensor, constant)

        return op.Where(condition, number(inside, drawn), number(ahead, drawn_ahead))

    return {
        torch.ops.gradfuse.dropout_mask.default: dropout_mask,
        torch.ops.gradfuse.uniform.default: uniform_numbers,
        _SIDE_ENDS: side_ends,
    }


def masks(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """Return the masks and other draws of a program, in the order of the forward pass."""
    return [node for node in graph.nodes if node.target in _ARGUMENTS]


_ARGUMENTS: dict[Any, int] = {torch.ops.gradfuse.dropout_mask.default: 2, torch.ops.gradfuse.uniform.default: 1}
"""Operators that draw -> the number of their arguments ahead of the seed."""


def connect(program: torch.export.ExportedProgram, seed: int) -> None:
    """Give every draw of a program its number, and the seed: the `seed`-th tensor that the program is called with.

    Constants of the traced code are placeholders as well, ahead of those.
    """
    graph = program.graph
    name = program.graph_signature.user_inputs[seed]
    placeholder = next(node for node in graph.nodes if node.op == "placeholder" and node.name == name)
    # How many draws there were: as many as a node says, and some more.
    before: torch.fx.Node | None = None
    layer = 0
    sides: list[tuple[torch.fx.Node, torch.fx.Node | None, int]] = []
    for node in list(graph.nodes):
        if node.target in _ARGUMENTS:
            node.args = (*node.args[: _ARGUMENTS[node.target]], placeholder, layer, before)
            layer += 1
        elif node.target is _SIDE_BEGINS:
            sides.append((node, before, layer))
        elif node.target is _SIDE_ENDS:
            begin, ahead, drawn_ahead = sides.pop()
            graph.erase_node(begin)
            if (ahead, drawn_ahead) == (before, layer):
                graph.erase_node(node)
            else:
                node.args = (node.args[0], before, layer, ahead, drawn_ahead)
                before, layer = node, 0

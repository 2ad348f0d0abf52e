"""Models with something wrong in them: valid ones, changed at a field of their message or at a byte."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import onnx
import onnx.parser
import small_models
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from gradfuse import fuse

_CONTROL = """
<ir_version: 10, opset_import: ["" : 20, "local" : 1]>
control (float[n, 4] x, bool flag, int64 trips) => (float[n, 4] y, float[n, 4] z)
<float[4] w = {1.0, 2.0, 3.0, 4.0}, int64[2] shape = {0, -1}>
{
    scaled = local.scale <factor = 2.0> (x, w)
    y = If (flag) <
        then_branch = yes () => (float[n, 4] a) { a = Relu (scaled) },
        else_branch = no () => (float[n, 4] b) { b = local.scale <factor = 0.5> (scaled, w) }
    >
    kept = Reshape (y, shape)
    z = Loop (trips, flag, kept) <
        body = turn (int64 i, bool go, float[n, 4] s) => (bool again, float[n, 4] t) {
            again = Identity (go)
            t = local.twice (s)
        }
    >
}
<domain: "local", opset_import: ["" : 20]>
scale <factor> (u, v) => (r)
{
    c = Constant <value_float: float = @factor> ()
    p = Mul (u, v)
    r = Mul (p, c)
}
<domain: "local", opset_import: ["" : 20, "local" : 1]>
twice (u) => (r)
{
    one = Constant <value = float[1] {1.0}> ()
    p = local.scale <factor = 2.0> (u, one)
    r = Add (p, u)
}
"""
"""Functions that call each other, branches, a loop, and constants of several kinds."""

_GATHERED = """
<ir_version: 9, opset_import: ["" : 18]>
gathered (float[4, 5] x, int64[3, 1] i, int64[n] t) => (float[3, 5] y, float[n, 5] h, float16[5] s)
{
    y = GatherND <batch_dims = 0> (x, i)
    depth = Constant <value_int = 5> ()
    values = Constant <value_floats = [0.0, 1.0]> ()
    h = OneHot <axis = -1> (t, depth, values)
    low = Constant <value_ints = [0]> ()
    depths = Unsqueeze (depth, low)
    first = Slice (x, low, depths, low)
    half = Cast <to = 10> (first)
    s = ReduceMax <keepdims = 0> (half, low)
}
"""


def models() -> list[onnx.ModelProto]:
    """Return the valid models that mutants are made of."""
    steps = [small_models.cross_entropy(), small_models.attention()]
    return [
        *steps,
        *(fuse(step, policy="all").model for step in steps),
        small_models.forward(),
        onnx.parser.parse_model(_CONTROL),
        onnx.parser.parse_model(_GATHERED),
    ]


_NUMBERS = (0, 1, -1, 2, 3, 7, 8, 10, 16, 17, 100, -5, 2**31 - 1, -(2**31), 2**31, 2**40, 2**63 - 1, -(2**63))
_TEXTS = ("", "a\nb", "\x1b[31m", "a b", "é\u2028", "x" * 5000, "N+", "9**9**9", "(", "../x", "Loop", "Identity", "\0")


def mutant(base: onnx.ModelProto, rng: random.Random) -> bytes:
    """Return a model with one to three things changed, serialized; it may still be valid, or no message at all."""
    model = onnx.ModelProto()
    model.CopyFrom(base)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        fields = list(_fields(model))
        if fields:
            rng.choice(_CHANGES)(rng, fields)
    content = model.SerializeToString()
    return _damaged(content, rng) if rng.random() < 0.15 else content


_Field = tuple[Message, FieldDescriptor]


def _fields(message: Message) -> Iterator[_Field]:
    """Yield every field that is set, at any depth."""
    for field, value in message.ListFields():
        yield message, field
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in value if field.is_repeated else (value,):
                yield from _fields(inner)


def _other_value(rng: random.Random, field: FieldDescriptor, old: Any, fields: list[_Field]) -> Any:
    match field.type:
        case FieldDescriptor.TYPE_STRING:
            if rng.random() < 0.6:
                return _text(rng, fields)
            return rng.choice(_TEXTS)
        case FieldDescriptor.TYPE_BYTES:
            return rng.choice(
                (b"", old[:-1], old + b"\0", b"\xff" * len(old), rng.choice(_TEXTS).encode(), b"\xff\xfe")
            )
        case FieldDescriptor.TYPE_FLOAT | FieldDescriptor.TYPE_DOUBLE:
            return rng.choice((0.0, -1.0, 1e38, float("inf"), float("nan")))
        case FieldDescriptor.TYPE_ENUM:
            return rng.choice([value.number for value in field.enum_type.values])
        case FieldDescriptor.TYPE_INT32:
            return rng.choice([n for n in _NUMBERS if -(2**31) <= n < 2**31])
        case FieldDescriptor.TYPE_UINT64:
            return rng.choice([n for n in _NUMBERS if n >= 0])
        case _:
            return rng.choice(_NUMBERS)


def _text(rng: random.Random, fields: list[_Field]) -> str:
    """Another name of the model."""
    found = [(m, f) for m, f in fields if f.type == FieldDescriptor.TYPE_STRING]
    message, field = rng.choice(found)
    value = getattr(message, field.name)
    return str(rng.choice(value) if field.is_repeated else value)


def _set(rng: random.Random, fields: list[_Field]) -> None:
    message, field = rng.choice([f for f in fields if f[1].type != FieldDescriptor.TYPE_MESSAGE])
    old = getattr(message, field.name)
    if not field.is_repeated:
        setattr(message, field.name, _other_value(rng, field, old, fields))
    elif old:
        at = rng.randrange(len(old))
        old[at] = _other_value(rng, field, old[at], fields)


def _clear(rng: random.Random, fields: list[_Field]) -> None:
    message, field = rng.choice(fields)
    values = getattr(message, field.name)
    if field.is_repeated and values and rng.random() < 0.8:
        del values[rng.randrange(len(values))]
    else:
        message.ClearField(field.name)


def _repeat(rng: random.Random, fields: list[_Field]) -> None:
    message, field = rng.choice([f for f in fields if f[1].is_repeated])
    values = getattr(message, field.name)
    count = rng.choice((1, 1, 1, 40))
    for _ in range(count):
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            values.add().CopyFrom(values[rng.randrange(len(values) - 1 or 1)])
        else:
            values.append(rng.choice(values))


def _swap(rng: random.Random, fields: list[_Field]) -> None:
    message, field = rng.choice([f for f in fields if f[1].is_repeated])
    values = list(getattr(message, field.name))
    rng.shuffle(values)
    message.ClearField(field.name)
    getattr(message, field.name).extend(values)


def _graft(rng: random.Random, fields: list[_Field]) -> None:
    """Put one part of the model in the place of another of its kind: attributes, types, nodes, graphs within nodes."""
    messages = [
        inner
        for message, field in fields
        if field.type == FieldDescriptor.TYPE_MESSAGE
        for inner in (getattr(message, field.name) if field.is_repeated else (getattr(message, field.name),))
    ]
    target = rng.choice(messages)
    source = type(target)()
    source.CopyFrom(rng.choice([m for m in messages if type(m) is type(target)]))
    target.CopyFrom(source)


def _another_field(rng: random.Random, fields: list[_Field]) -> None:
    """Set a field that is not set."""
    message, _ = rng.choice(fields)
    unset = [f for f in message.DESCRIPTOR.fields if f not in [g for g, _ in message.ListFields()]]
    if not unset:
        return
    field = rng.choice(unset)
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        same = [
            (m, f) for m, f in fields if f.type == FieldDescriptor.TYPE_MESSAGE and f.message_type is field.message_type
        ]
        inner = getattr(message, field.name).add() if field.is_repeated else getattr(message, field.name)
        if same:
            other, other_field = rng.choice(same)
            value = getattr(other, other_field.name)
            copy = type(inner)()
            copy.CopyFrom(rng.choice(value) if other_field.is_repeated else value)
            inner.CopyFrom(copy)
        else:
            inner.SetInParent()
    else:
        value = _other_value(rng, field, b"" if field.type == FieldDescriptor.TYPE_BYTES else 0, fields)
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)


_CHANGES: tuple[Callable[[random.Random, list[_Field]], None], ...] = (
    *(_set, _set, _set, _clear, _clear, _repeat, _swap, _graft, _graft, _another_field),
)


def _damaged(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(data)) if data else 0
        match rng.randrange(4):
            case 0 if data:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at:at] = bytes([rng.randrange(256)])
            case 2:
                del data[at : at + rng.randrange(1, 5)]
            case _:
                del data[at + rng.randrange(1, 200) :]
    return bytes(data)


def is_valid(content: bytes) -> bool:
    """Tell whether onnx's checker accepts a model."""
    try:
        onnx.checker.check_model(onnx.load_from_string(content))
    except (DecodeError, onnx.checker.ValidationError, ValueError, RuntimeError):
        return False
    return True

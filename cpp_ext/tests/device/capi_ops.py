"""Writes the calls of all ops in C that tests/capi_check.cc makes: `capi_ops.inc`, and their values beside it.

The arguments are those of the prototypes in the headers of the C API, the values those of a case of the op.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from case import Case
from cases import cases

HEADERS = Path(__file__).resolve().parents[2] / "capi" / "include" / "aclnnop"
TYPES = {
    "float32": "ACL_FLOAT",
    "bfloat16": "ACL_BF16",
    "int32": "ACL_INT32",
    "int64": "ACL_INT64",
    "bool": "ACL_BOOL",
    "uint8": "ACL_UINT8",
}
MOST_ELEMENTS = 200_000


def write(folder: Path, signatures: Mapping[str, Mapping[str, Any]]) -> None:
    """Write both files.

    Args:
        folder: where to; programs are compiled with `-I` of it.
        signatures: the ops of the library, as `gradfuse_describe_ops` gives them, by their names.

    Raises:
        ValueError: an op has no header, no case or arguments that do not fit its prototype.
    """
    chosen = largest_cases()
    includes, ops = [], []
    values: list[np.ndarray[Any, np.dtype[np.float64]]] = []
    for name, signature in signatures.items():
        header = next((path for path in HEADERS.glob("*.h") if f" aclnn{name}(" in path.read_text("utf-8")), None)
        if header is None or name not in chosen:
            raise ValueError(f"{name} is without {'a header in C' if header is None else 'a case'}")
        prototype = re.search(rf"aclnn{name}GetWorkspaceSize\(([^)]*)\)", header.read_text("utf-8"))
        if prototype is None:
            raise ValueError(f"{header} is without aclnn{name}GetWorkspaceSize")
        includes.append(f'#include "aclnnop/{header.name}"')
        ops.append(_op(signature, [argument.strip() for argument in prototype[1].split(",")], chosen[name], values))
    data = folder / "capi_ops.bin"
    data.write_bytes(b"".join(array.tobytes() for array in values))
    text = "\n".join([*includes, "", f'#define CAPI_OPS_VALUES "{data}"', "#define CAPI_OPS \\"])
    (folder / "capi_ops.inc").write_text(text + "\n" + ", \\\n".join(ops) + "\n", encoding="utf-8")


@cache
def largest_cases() -> dict[str, Case]:
    """Of each op the case in float32 with the most inputs, and of those the largest that is not too large."""

    def rank(case: Case) -> tuple[int, int]:
        return sum(values is not None for values in case.inputs), _size(case)

    found: dict[str, Case] = {}
    for case in cases(large=False):
        if case.dtype == "float32" and case.fault == 0 and 0 < _size(case) < MOST_ELEMENTS:
            if case.op not in found or rank(found[case.op]) < rank(case):
                found[case.op] = case
    return found


def _size(case: Case) -> int:
    sizes = [values.bits.size for values in case.inputs if values is not None]
    return 0 if 0 in sizes else sum(sizes) + sum(exact.size for exact in case.expected)


def _op(
    signature: Mapping[str, Any],
    arguments: Sequence[str],
    case: Case,
    stored: list[np.ndarray[Any, np.dtype[np.float64]]],
) -> str:
    """The initializer of an Op of capi_check.cc; the values of its inputs are appended to `stored`."""
    name, inputs = signature["name"], len(signature["inputs"])
    tensors: list[str] = []
    call: list[str] = []
    arrays: list[str] = []
    given = [*case.inputs, *[None] * (inputs - len(case.inputs))]
    for argument, values in zip(arguments[:inputs], given, strict=True):
        if values is None:
            call.append("nullptr")
        elif "aclIntArray" in argument:
            arrays.append(f"const IntArray array{len(arrays)}({_braced(values.bits.tolist())});")
            call.append(f"array{len(arrays) - 1}.array()")
        else:
            call.append(f"t[{len(tensors)}]->tensor()")
            tensors.append(_tensor(values.dtype, values.bits.shape, sum(map(len, stored))))
            stored.append(np.asarray(values.wide()).ravel())
    for argument, (attribute, default) in zip(
        arguments[inputs : len(arguments) - 2 - len(case.expected)], signature["attributes"].items(), strict=True
    ):
        value = case.attributes.get(attribute, default)
        if "aclIntArray" in argument:
            arrays.append(f"const IntArray array{len(arrays)}({_braced(value)});")
            call.append(f"array{len(arrays) - 1}.array()")
        else:
            call.append(_number(argument, value))
    for exact, dtype in zip(case.expected, case.dtypes(), strict=True):
        call.append(f"t[{len(tensors)}]->tensor()")
        tensors.append(_tensor(dtype, exact.shape, -1))
    first_phase = f"aclnn{name}GetWorkspaceSize({', '.join(call)}, &p.workspace_size, &p.executor)"
    body = f"[](const auto& t, Planned& p) {{ {' '.join(arrays)} return {first_phase}; }}"
    return f'    Op{{"{name}", {_braced(tensors)}, {body}, aclnn{name}}}'


def _tensor(dtype: str, shape: Iterable[int], first_value: int) -> str:
    return f"{{{TYPES[dtype]}, Dims{_braced(shape)}, {first_value}}}"


def _number(argument: str, value: Any) -> str:
    """A value in C for an argument of a prototype."""
    if isinstance(value, str):
        return f'const_cast<char*>("{value}")'
    return f"{argument.rsplit(' ', 1)[0]}({value})"


def _braced(items: Iterable[Any]) -> str:
    return f"{{{', '.join(map(str, items))}}}"

"""Metadata of torch's exporters about the modules that a node comes from."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

import onnx_ir as ir

_SCOPES = "pkg.torch.onnx.name_scopes"
"""The metadata of a node with the names of the modules around it, and its own last."""
_CALLED = "pkg.torch.onnx.fx_node"
"""The metadata of a node with the call that it comes from."""
_PARAMETER = re.compile(r"%(p_\w+)")
_AGAIN = re.compile(r"_\d+$")
"""What torch's older exporter appends in further calls."""
_CALL = re.compile(r"@\d+")
"""What torch.export appends to the name of a module that is called again."""


def noted_scopes(node: ir.Node) -> Sequence[str]:
    """Return the names of the modules around a node, the outermost first, and its own; none without metadata."""
    try:
        scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
    except (ValueError, SyntaxError):
        return ()
    return scopes if isinstance(scopes, list) and all(isinstance(scope, str) for scope in scopes) else ()


def module_of(node: ir.Node) -> str:
    """Return the name of the module that a node comes from; empty where the file does not tell, or it is the outermost.

    torch's older exporter names nodes after the modules around them: /layers.0/attention/query/MatMul. It names a
    module of a list after the list: /mlp/mlp.0/MatMul is of `mlp.0` where the list is called, as `Sequential` is, and
    of `mlp.mlp.0` where another module has the list. What tensors are called tells.
    """
    scopes = noted_scopes(node)
    if len(scopes) > 1:
        return _CALL.sub("", scopes[-2])
    path = (node.name or "").split("/")
    if len(path) < 3 or path[0]:
        return ""
    parts: list[str] = []
    for part in path[1:-1]:
        if parts and part.startswith((f"{parts[-1]}.", f"{_AGAIN.sub('', parts[-1])}.")):
            called, owned = ".".join([*parts[:-1], part]), ".".join([*parts, part])
            if _has_tensors(node.graph, called) or not _has_tensors(node.graph, owned):
                parts.pop()
        parts.append(part)
    return ".".join(parts)


def _has_tensors(graph: ir.Graph | ir.Function | None, module: str) -> bool:
    return isinstance(graph, ir.Graph) and any(name.startswith(f"{module}.") for name in graph.initializers)


def noted_parameters(node: ir.Node) -> frozenset[str]:
    """Return the parameters among the operands of a node's call, by the metadata of torch's newer exporter.

    Each has the name of its placeholder in the program, whatever tensors the file has been given for it since.
    """
    return frozenset(_PARAMETER.findall(node.metadata_props.get(_CALLED, "")))


def placeholder_of(name: str) -> str:
    """Return the name of the placeholder of a parameter."""
    return "p_" + re.sub(r"[^a-zA-Z0-9]", "_", name)

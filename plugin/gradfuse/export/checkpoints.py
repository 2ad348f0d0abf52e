"""What `torch.utils.checkpoint` wraps: from calls while a step is traced to names of values that it computes again.

This module imports torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from gradfuse import _torch_private as private

_library: Any = torch.library.Library("gradfuse", "FRAGMENT")  # type: ignore[no-untyped-call]
# Stands where the call of a function begins and ends, and computes nothing.
_library.define("checkpoint_border(Tensor argument, int call, bool ends) -> Tensor")
torch.library.register_fake(
    "gradfuse::checkpoint_border", lambda argument, call, ends: argument.new_empty(()), lib=_library
)
_library.impl("checkpoint_border", lambda argument, call, ends: argument.new_empty(()), "CompositeExplicitAutograd")
_BORDER = torch.ops.gradfuse.checkpoint_border.default
torch.fx.node.has_side_effect(_BORDER)


@contextlib.contextmanager
def marked() -> Iterator[None]:
    """Let `torch.utils.checkpoint` call functions as they are, between borders where a program is traced."""
    calls = 0

    @contextlib.contextmanager
    def around(arguments: Any) -> Iterator[None]:
        nonlocal calls
        tensor = next((one for one in pytree.tree_leaves(arguments) if isinstance(one, Tensor)), None)
        if tensor is None or not torch.compiler.is_exporting():
            yield
            return
        calls += 1
        call = calls
        _BORDER(tensor.detach(), call, False)
        yield
        _BORDER(tensor.detach(), call, True)

    with private.checkpoints_replaced(around):
        yield


def taken_out(program: ExportedProgram) -> Mapping[str, int]:
    """Remove the borders from a program, and return between which each of its nodes stands.

    That is the number of a call by the name of a node, of the outermost if one is within another, and 0 where there is
    none. Nothing is returned where there are no borders.
    """
    found: dict[str, int] = {}
    inside: set[int] = set()
    is_any = False
    for module in program.graph_module.modules():
        # Parts under autocast or `no_grad` are modules of their own.
        for node in list(module.graph.nodes) if isinstance(module, torch.fx.GraphModule) else ():
            if node.target is _BORDER:
                is_any = True
                _, call, ends = node.args
                (inside.discard if ends else inside.add)(call)
                module.graph.erase_node(node)
            elif node.op != "output":
                found[node.name] = min(inside, default=0)
    return found if is_any else {}

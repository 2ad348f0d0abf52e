"""The evaluation model of a module, taken from its training step.

Tracing, decomposing and translating a module once more takes seconds. In most modules only dropouts depend on the mode:
then the training trace is also that of evaluation mode, except for the dropouts. This module imports torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes import common as passes
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node

from gradfuse import _torch_private as private
from gradfuse.export.decomposing import STATISTICS, written
from gradfuse.export.dropout import UNIFORM
from gradfuse.export.translation import LOCAL_DOMAIN

aten = torch.ops.aten

_library: Any = torch.library.Library("gradfuse", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("dropped(Tensor input, Tensor result) -> Tensor")
torch.library.register_fake("gradfuse::dropped", lambda input, result: torch.empty_like(result), lib=_library)
# Decompositions compute what depends on constants of the module alone.
_library.impl("dropped", lambda input, result: result.clone(), "CompositeExplicitAutograd")

_DROPPED, _OP_TYPE = torch.ops.gradfuse.dropped.default, "Dropped"
"""What a step computes, beside what evaluation mode has in its place, such as the input of a dropout.

It stands in a program from its trace until it is translated."""


@dataclasses.dataclass
class Watch:
    """Watches a module while it is traced in a training step.

    Attributes:
        module: the module.
        outputs: the tensors that it returns.
        dropouts: how often a dropout asks whether it is in training mode.
        asked: whether anything else asks for that, or for the mode of autograd.
        conditions: how many conditions on sizes there are when it returns.
    """

    module: nn.Module
    outputs: tuple[Tensor, ...] = ()
    dropouts: int = 0
    asked: bool = False
    conditions: int = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch for code that reads a mode."""
        # Those that are in evaluation mode already stay so.
        training = {id(module) for module in self.module.modules() if module.training}
        self.dropouts, self.asked = 0, False

        def ask(module: nn.Module | None) -> None:
            if module is None:
                self.asked = True
            elif id(module) in training:
                self.dropouts += type(module) is nn.Dropout
                self.asked |= type(module) is not nn.Dropout

        with private.modes_asked_for(ask):
            yield

    def returned(self, output: Any) -> None:
        """Note what the module returns."""
        self.outputs = tuple(one for one in private.tensors_in(output) if isinstance(one, Tensor))
        self.conditions = len(private.conditions(self.outputs))

    def mark_dropouts(self, program: ExportedProgram, state: Collection[str], names: Sequence[str]) -> bool:
        """Mark the dropouts of a traced step, if that holds what the module computes in evaluation mode.

        It might not where the module asks for a mode outside of dropouts, where the step drops in other ways or writes
        into tensors, and where the loss knows something of the sizes of inputs that the module does not.

        Args:
            program: the traced step, whose last outputs are those of the module.
            state: the names of the step's parameters and buffers.
            names: the names of the module's inputs. Those of the program are the state, these, and others.
        """
        if self.asked or not self.outputs or not self._is_pure(program):
            return False
        places = [node for node in program.graph.nodes if node.op == "placeholder"]
        known = places[: len(state) + len(names)]
        (results,) = program.graph.output_node().args
        needed = _needed(results[len(results) - len(self.outputs) :])
        if any(node.op == "placeholder" and node not in known for node in needed):
            return False
        if not self._is_of_any_size(known[len(state) :]):
            return False
        for node in list(program.graph.nodes):
            if _is_dropout(node):
                _mark(node, node.args[0])
        return True

    def _is_pure(self, program: ExportedProgram) -> bool:
        """Whether a program is made of operators that write nothing, and drop nothing but in this many dropouts."""
        if any(spec.kind.name != "USER_INPUT" for spec in program.graph_signature.input_specs):
            return False
        nodes = list(program.graph.nodes)
        if any(node.op not in ("placeholder", "call_function", "output") for node in nodes):
            return False
        calls = [node for node in nodes if private.is_operator(node.target)]
        if any(written(node) or "unbacked_bindings" in node.meta for node in calls):
            return False
        if any(node.target in STATISTICS and node.args[5] for node in calls):
            # Of the batch, by an operator that stands in a step alone.
            return False
        drawing = {node.target for node in calls if torch.Tag.nondeterministic_seeded in node.target.tags}
        dropouts = [node for node in nodes if _is_dropout(node)]
        return self.dropouts == len(dropouts) and drawing <= {aten.dropout.default, *UNIFORM}

    def _is_of_any_size(self, inputs: Sequence[Node]) -> bool:
        """Whether sizes of inputs that may vary do so for themselves, and the loss asks for nothing about them."""
        sizes = [size for node in inputs for size in node.meta["val"].shape if isinstance(size, torch.SymInt)]
        symbols = [private.expression(size) for size in sizes]
        if not all(one.is_Symbol for one in symbols) or len(set(symbols)) < len(symbols):
            return False
        later = private.conditions(self.outputs)[self.conditions :]
        return not any(one.free_symbols and one.free_symbols <= set(symbols) for one in later)


def translations() -> dict[Any, Callable[..., Any]]:
    """Return the function that emits a mark, for `custom_translation_table`."""

    def dropped(input: Any, result: Any) -> Any:
        results = private.results_of_translation(1)
        node = ir.node(_OP_TYPE, [input, result], domain=LOCAL_DOMAIN, outputs=results)
        private.record_node(node)
        return node.outputs[0]

    return {_DROPPED: dropped}


def divided(model: ir.Model, count: int) -> tuple[ir.Model, ir.Model]:
    """Return the models of a step and of its module in evaluation mode, with the inputs of both.

    Args:
        model: the translation of a step whose dropouts are marked. Its last outputs are those of the module.
        count: how many these are.
    """
    step, evaluating = model, model.clone()
    del step.graph.outputs[len(step.graph.outputs) - count :]
    del evaluating.graph.outputs[: len(evaluating.graph.outputs) - count]
    for one, taken in ((step, 1), (evaluating, 0)):
        for node in list(one.graph):
            if (node.domain, node.op_type) == (LOCAL_DOMAIN, _OP_TYPE):
                value = node.inputs[taken]
                assert value is not None
                ir.convenience.replace_all_uses_with(node.outputs[0], value, replace_graph_outputs=True)
                one.graph.remove(node, safe=True)
        passes.RemoveUnusedNodesPass()(one)
    return step, evaluating


def count_without_dropouts(program: ExportedProgram) -> None:
    """Let the draws of a program whose dropouts are marked have the numbers that they have without them as well.

    The dropouts have their numbers and the seed already.
    """
    drawing = [node for node in program.graph.nodes if node.target is torch.ops.gradfuse.uniform.default]
    for number, node in enumerate(drawing):
        like, seed, *_ = node.args
        with program.graph.inserting_before(node):
            other = program.graph.call_function(node.target, (like, seed, number))
        other.meta = dict(node.meta)
        _mark(node, other)


def _mark(node: Node, instead: Node) -> None:
    """Mark a result of a step, and what takes its place in evaluation mode."""
    with node.graph.inserting_after(node):
        mark = node.graph.call_function(_DROPPED, (instead, node))
    mark.meta = dict(node.meta)
    node.replace_all_uses_with(mark, delete_user_cb=lambda user: user is not mark)


def _is_dropout(node: Node) -> bool:
    return node.target is aten.dropout.default and bool(node.args[2])


def _needed(nodes: Sequence[Node]) -> set[Node]:
    """Return nodes and all that they are computed from."""
    needed: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending.extend(node.all_input_nodes)
    return needed

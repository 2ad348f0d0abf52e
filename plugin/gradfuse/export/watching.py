"""The program of a module in evaluation mode, out of its traced training step.

To trace a module once more takes seconds. Most modules ask for their mode in dropouts alone: what is traced for
training is then what evaluation mode gives, but for the dropouts. This module imports torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from gradfuse.export import _torch_private as private
from gradfuse.export.decomposing import written

aten = torch.ops.aten


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
        """Watch who asks for a mode."""
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

    def evaluating(self, program: ExportedProgram, order: Sequence[int], inputs: int) -> ExportedProgram | None:
        """Return the program of the module in evaluation mode; None where tracing might give another one.

        It might where the module asks for a mode outside of dropouts, where the step draws other random numbers or
        writes into tensors, and where the loss knows something of the sizes of inputs that the module does not.

        Args:
            program: the traced step, whose last outputs are those of the module.
            order: the inputs of the result among those of the program.
            inputs: how many of them, the last ones, are the module's.
        """
        places = [node for node in program.graph.nodes if node.op == "placeholder"]
        chosen = [places[index] for index in order]
        if self.asked or not self._is_pure(program) or not self._is_of_any_size(chosen[len(chosen) - inputs :]):
            return None
        graph = Graph()
        new = {place: graph.node_copy(place) for place in chosen}
        (results,) = program.graph.output_node().args
        outputs = results[len(results) - len(self.outputs) :] if self.outputs else ()
        needed = _needed(outputs)
        if any(node.op == "placeholder" and node not in new for node in needed):
            return None
        for node in program.graph.nodes:
            if _is_dropout(node) and node in needed:
                new[node] = new[node.args[0]]
            elif node in needed and node not in new:
                new[node] = graph.node_copy(node, new.__getitem__)
        graph.output(tuple(new[node] for node in outputs))
        return private.program_of(graph, program) if outputs else None

    def _is_pure(self, program: ExportedProgram) -> bool:
        """Whether a program is made of operators that write nothing, and draw nothing but in this many dropouts."""
        if any(spec.kind.name != "USER_INPUT" for spec in program.graph_signature.input_specs):
            return False
        nodes = list(program.graph.nodes)
        if any(node.op not in ("placeholder", "call_function", "output") for node in nodes):
            return False
        calls = [node for node in nodes if private.is_operator(node.target)]
        if any(written(node) or "unbacked_bindings" in node.meta for node in calls):
            return False
        drawing = [node for node in calls if torch.Tag.nondeterministic_seeded in node.target.tags]
        dropouts = [node for node in nodes if _is_dropout(node)]
        return self.dropouts == len(dropouts) and all(node.target is aten.dropout.default for node in drawing)

    def _is_of_any_size(self, inputs: Sequence[Node]) -> bool:
        """Whether sizes of inputs that may vary do so for themselves, and the loss asks for nothing about them."""
        sizes = [size for node in inputs for size in node.meta["val"].shape if isinstance(size, torch.SymInt)]
        symbols = [private.expression(size) for size in sizes]
        if not all(one.is_Symbol for one in symbols) or len(set(symbols)) < len(symbols):
            return False
        later = private.conditions(self.outputs)[self.conditions :]
        return not any(one.free_symbols and one.free_symbols <= set(symbols) for one in later)


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

"""Each private API of PyTorch that gradfuse relies on is there, and behaves as relied upon.

When a new version of PyTorch fails here, `_torch_private.py` is the one file to change.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxscript
import pytest
import torch
import torch.nn.functional as F
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.torch_version import TorchVersion

import gradfuse
from gradfuse import _torch_private as private
from gradfuse.export import translation

PACKAGE = Path(gradfuse.__file__).parent
ONES = np.ones((2, 3), np.float32)


@contextlib.contextmanager
def needed(name: str, purpose: str) -> Iterator[None]:
    """Say of a failure which API is concerned, and what it is for."""
    try:
        yield
    except Exception as error:
        pytest.fail(
            f"PyTorch {torch.__version__} lacks {name}, or it behaves differently ({type(error).__name__}: {error}). "
            f"gradfuse needs it to {purpose}."
        )


@pytest.fixture
def library() -> Iterator[Any]:
    """A library of operators that are gone after the test."""
    with torch.library._scoped_library("gradfuse_test", "FRAGMENT") as made:
        yield made


class Loss(nn.Module):
    """A linear layer's output as the loss of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum()  # type: ignore[no-any-return]


class Rectified(Loss):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def to_onnx(module: nn.Module, table: dict[Any, Any] | None = None) -> ir.Model:
    program = torch.export.export(module, (torch.ones(2, 3),))
    exported = torch.onnx.export(
        program,
        (),
        dynamo=True,
        verbose=False,
        optimize=False,
        custom_translation_table=translation.always_chosen(table or {}),
    )
    assert exported is not None
    return exported.model


def test_like_in_python() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.note = "kept"  # type: ignore[attr-defined]
    copied = parameter.detach().clone()
    private.like_in_python(copied, parameter)
    copied.more = 1  # type: ignore[attr-defined]
    assert isinstance(copied, nn.Parameter) and parameter.more == 1  # type: ignore[attr-defined]

    class Traced(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            private.like_in_python(x, parameter)
            assert isinstance(x, nn.Parameter) and x.note == "kept"  # type: ignore[attr-defined]
            return x * 2

    torch.export.export(Traced(), (torch.ones(2),))


def test_parameter_entries() -> None:
    with needed("nn.Module._parameters", "run a module on other tensors than its parameters"):
        layer, other = nn.Linear(2, 3), torch.ones(3, 2)
        assert set(private.parameter_entries(layer)) == {"weight", "bias"}
        private.parameter_entries(layer)["weight"] = other
        assert layer.weight is other


def test_buffer_entries() -> None:
    with needed("nn.Module._buffers", "run a module on other tensors than its buffers"):
        layer, other = nn.BatchNorm1d(2), torch.ones(2)
        assert "running_mean" in private.buffer_entries(layer)
        private.buffer_entries(layer)["running_mean"] = other
        assert layer.running_mean is other


def test_batch_norm_class() -> None:
    with needed("nn.modules.batchnorm._BatchNorm", "trace batch normalisation with momentum=None"):
        assert isinstance(nn.BatchNorm2d(3), private.batch_norm_class())
        assert "forward" in vars(private.batch_norm_class())


def test_adaptive_softmax_output() -> None:
    with needed("nn.modules.adaptive._ASMoutput", "trace nn.AdaptiveLogSoftmaxWithLoss"):
        layer = nn.AdaptiveLogSoftmaxWithLoss(4, 6, [2])
        wanted = layer(torch.ones(3, 4), torch.tensor([0, 1, 5]))
        assert type(private.adaptive_softmax_output(*wanted)) is type(wanted)
        assert wanted._fields == ("output", "loss")


def test_unwrapped() -> None:
    with needed("OptimizedModule._orig_mod and _torchdynamo_orig_callable", "export modules that are compiled"):
        module = Loss()
        assert private.unwrapped(torch.compile(module)) is module
        assert private.unwrapped(nn.DataParallel(module)) is module
        assert private.unwrapped(torch.compile(to_onnx)) is to_onnx
        assert private.unwrapped(module) is module


def test_is_made_of_others() -> None:
    with needed("is_traceable_wrapper_subclass", "leave out tensors that hold no numbers themselves"):
        jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        assert private.is_made_of_others(jagged)
        assert not private.is_made_of_others(torch.ones(2))


def test_flattened_with_keys() -> None:
    with needed("torch.utils._pytree.tree_flatten_with_path", "read batches that are nested"):
        tree = ((1, {"a": [2, None], 0: 3}), {"b": 4})
        places, unflatten = private.flattened_with_keys(tree)
        assert [keys for keys, _ in places] == [(0, 0), (0, 1, "a", 0), (0, 1, "a", 1), (0, 1, 0), (1, "b")]
        assert isinstance(places[0][0][1], private.Index) and not isinstance(places[3][0][2], private.Index)
        assert unflatten([leaf for _, leaf in places]) == tree


class Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


class Prepared(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vjp(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


Called: Any = Counted
Untouched: Any = Prepared
HELD: Any = Counted.apply


def test_functions_applied_by() -> None:
    with needed("the code of torch.autograd.Function.apply", "trace functions with a backward pass of their own"):
        x = torch.ones(2, requires_grad=True)
        with private.functions_applied_by(lambda function, args, kwargs: (function, args, kwargs), [Prepared]):
            assert HELD(x) == Called.apply(x) == (Counted, (x,), {})
            y = Untouched.apply(x)
        assert (torch.autograd.grad(y.sum(), x)[0] == 3).all()
        for apply in (HELD, Called.apply):
            assert (torch.autograd.grad(apply(x).sum(), x)[0] == 3).all()


def test_has_setup_context() -> None:
    with needed("_SingleLevelFunction.setup_context", "call the forward pass of functions while they are traced"):
        assert [private.has_setup_context(one) for one in (Counted, Prepared)] == [False, True]


def test_has_backward() -> None:
    with needed("_SingleLevelFunction.backward", "call the backward pass of functions while they are traced"):
        assert [private.has_backward(one) for one in (Counted, Prepared)] == [True, False]


def test_set_grad_enabled_unseen() -> None:
    with needed("torch._C._set_grad_enabled and DisableTorchFunction", "keep no_grad within functions out of traces"):
        seen = []

        class Mode(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.append(func)
                return func(*args, **(kwargs or {}))

        with Mode():
            private.set_grad_enabled_unseen(False)
            assert not torch.is_grad_enabled() and not seen
            torch._C._set_grad_enabled(True)
        assert seen == [private.SET_GRAD_ENABLED]


def test_is_traced() -> None:
    with needed("torch._is_functional_tensor", "leave numbers that are known out of a trace"):
        assert not private.is_traced(2.0)
        assert not private.is_traced(torch.ones(2)) and not private.is_traced(nn.Parameter(torch.ones(2)))
        seen: list[bool] = []

        def function(x: Tensor) -> Tensor:
            seen.append(private.is_traced(x))
            return x + 1

        torch.func.vmap(function)(torch.ones(2, 3))
        torch.func.functionalize(function)(torch.ones(2))
        assert seen == [True, True]


def test_checkpoints_replaced() -> None:
    with needed("the parts of torch.utils.checkpoint", "run and trace what checkpoints would compute again"):
        calls: list[str] = []

        def function(x: Tensor) -> Tensor:
            calls.append("called")
            return x * 2

        @contextlib.contextmanager
        def around(arguments: Any) -> Iterator[None]:
            assert any(one is x for one in torch.utils._pytree.tree_leaves(arguments))
            calls.append("begins")
            yield
            calls.append("ends")

        for reentrant in (True, False):
            x = torch.ones(2, requires_grad=True)
            with private.checkpoints_replaced(around):
                y = torch.utils.checkpoint.checkpoint(function, x, use_reentrant=reentrant)
            torch.autograd.grad(y.sum(), x)
        assert calls == ["begins", "called", "ends"] * 2


def test_without_autocast() -> None:
    with needed("torch.set_autocast_enabled", "trace backward passes as they run"):
        with torch.autocast("cpu", torch.bfloat16), private.without_autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_exported() -> None:
    with needed("torch.SymInt's comparisons", "trace is_causal=n > 1"):

        class Causal(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return F.scaled_dot_product_attention(x, x, x, is_causal=x.shape[1] > 1)

        dims = ({1: torch.export.Dim.DYNAMIC},)
        program = private.exported(Causal(), (torch.ones(1, 3, 4),), dims)
        assert program.module()(torch.ones(1, 5, 4)).shape == (1, 5, 4)


def test_decided_comparisons() -> None:
    with needed("torch.SymInt's comparisons", "trace is_causal=n > 1"):
        found = []

        class Comparing(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                found.append(x.shape[0] > 1)
                return x

        with private.decided_comparisons():
            torch.export.export(Comparing(), (torch.ones(3),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        assert found == [True] and isinstance(found[0], bool)


def test_idle_conversions() -> None:
    with needed("nn.Module._apply", "trace modules that take care of a layer's type"):
        layer = nn.Linear(2, 2)
        with private.idle_conversions():
            layer._parameters["weight"] = weight = layer.weight.detach() * 1.0  # type: ignore[assignment]
            assert layer.to(torch.float32).weight is weight
            assert nn.Linear(2, 2).to(torch.float64).weight.dtype == torch.float64
        assert nn.Linear(2, 2).half().weight.dtype == torch.float16


def _traced(function: Callable[[Tensor], Any]) -> torch.export.ExportedProgram:
    class Module(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return function(x)

    return torch.export.export(Module(), (torch.zeros(4, 3),), dynamic_shapes=({0: torch.export.Dim.AUTO},))


def test_when_a_size_becomes_constant() -> None:
    with needed("ShapeEnv._set_replacement", "name the code that fixes a dynamic size"):
        noted: list[bool] = []
        with private.when_a_size_becomes_constant(lambda: noted.append(True)):
            _traced(lambda x: x + 1)
            assert not noted
            _traced(lambda x: x.view(4, 3) + 1)
        assert noted == [True]


def test_shape_environment() -> None:
    with needed("FakeTensorMode.shape_env", "tell which sizes a step can have"):
        environment = private.shape_environment(_traced(lambda x: x + 1))
        assert environment.var_to_sources


def _symbol(program: torch.export.ExportedProgram) -> Any:
    """What stands for the size of the first tensor of a traced program that may vary."""
    return private.expression(next(size for size in _sizes(program) if private.is_symbolic(size)))


def test_sources_of() -> None:
    with needed("ShapeEnv.var_to_sources", "name the axis whose size code asks for"):
        program = _traced(lambda x: x + 1)
        environment = private.shape_environment(program)
        assert private.sources_of(environment, _symbol(program)) == ["L['x'].size()[0]"]
        assert private.sources_of(environment, None) == []


def test_example_size() -> None:
    with needed("ShapeEnv.backed_var_to_val or var_to_val", "refuse loops over blocks of a dynamic size"):
        program = _traced(lambda x: x + 1)
        environment = private.shape_environment(program)
        assert private.example_size(environment, _symbol(program)) == 4
        assert private.example_size(environment, None) is None


def test_sizes_that_stay() -> None:
    with needed("ShapeEnv.guards", "refuse loops over blocks of a dynamic size"):
        looped = _traced(lambda x: x + sum(range((x.shape[0] + 1) // 2)))
        ((source, _, filename, _, _),) = private.sizes_that_stay(looped)
        assert (source, filename) == ("L['x'].size()[0]", __file__)
        assert private.sizes_that_stay(_traced(lambda x: x + (1 if x.shape[0] % 2 == 0 else 2))) == []


def test_as_if_exported() -> None:
    with needed("torch.compiler's flags", "name modules that compute something else when they are traced"):
        with private.as_if_exported():
            assert torch.compiler.is_exporting() and torch.compiler.is_compiling()
        assert not torch.compiler.is_exporting() and not torch.compiler.is_compiling()


def test_is_about_data() -> None:
    with needed("GuardOnDataDependentSymNode", "tell a size that depends on values from other failures"):
        with pytest.raises(Exception) as caught:
            _traced(lambda x: x if x.sum().item() > 0 else x + 1)
        assert private.is_about_data(caught.value)
        assert not private.is_about_data(ValueError())


def test_assumed_multiples() -> None:
    with needed("ShapeEnv.guards", "tell which sizes a step can have"):
        (found,) = private.assumed_multiples(_traced(lambda x: x + (1 if x.shape[0] % 2 == 0 else 2)))
        source, number, filename, _, _ = found
        assert (source, number, filename) == ("L['x'].size()[0]", 2, __file__)
        assert private.assumed_multiples(_traced(lambda x: x + (1 if x.shape[0] % 3 == 0 else 2))) == []


def test_conditions() -> None:
    with needed("ShapeEnv.guards", "tell whether a loss asks for sizes of what the module gets"):
        noted: list[Any] = []

        def branching(x: Tensor) -> Tensor:
            before = len(private.conditions([x]))
            y = x + (1 if x.shape[0] > 3 else 2)
            noted.extend(private.conditions([x])[before:])
            return y

        _traced(branching)
        assert [len(one.free_symbols) for one in noted] == [1]
        assert private.conditions([]) == private.conditions([torch.ones(1)]) == []


def test_modes_asked_for() -> None:
    with needed("nn.Module.training and torch.is_grad_enabled", "trace a module once for training and evaluation"):
        asked: list[nn.Module | None] = []
        layer, x = nn.Dropout(), torch.ones(2)
        with private.modes_asked_for(asked.append):
            x.relu().sum()
            assert asked == []
            layer(x)
            assert asked == [layer]
            assert torch.is_grad_enabled() and not x.requires_grad and x.is_leaf and x.grad_fn is None
            assert asked == [layer, None, None, None, None]
            layer.eval()
            assert torch.equal(layer(x), x)
        del asked[:]
        assert not layer.training and not x.requires_grad and torch.is_grad_enabled()
        layer.train()
        assert layer.training and asked == [] and "training" not in vars(nn.Module)


def test_is_operator() -> None:
    with needed("torch._ops.OpOverload", "take a traced program to pieces"):
        targets = [node.target for node in _traced(lambda x: x + 1).graph.nodes if node.op == "call_function"]
        assert targets and all(map(private.is_operator, targets))
        assert not private.is_operator(torch.relu)


def _sizes(program: torch.export.ExportedProgram) -> list[Any]:
    return [node.meta["val"].shape[0] for node in program.graph.nodes if "val" in node.meta]


def test_expression() -> None:
    with needed("SymInt.node.expr", "tell equal sizes"):
        size, same, double = _sizes(_traced(lambda x: torch.cat([x + 1] * 2)))
        found = private.expression(size), private.expression(same), private.expression(double)
        assert found[0] == found[1] != found[2] and found[0].is_Symbol and found[2].free_symbols == {found[0]}
        assert private.expression(3) == 3


def test_storage() -> None:
    with needed("UntypedStorage._cdata", "see what is written into the memory of another tensor"):
        program = _traced(lambda x: (x + 1).t().relu())
        x, made, view, other = (private.storage(n.meta["val"]) for n in program.graph.nodes if "val" in n.meta)
        assert made == view and len({x, made, other}) == 3


def test_autograd_nodes() -> None:
    x = torch.ones(2, requires_grad=True)
    names = [type(node).__name__ for node in private.autograd_nodes((x.exp() * x).sum())]
    assert sorted(names) == ["AccumulateGrad", "ExpBackward0", "MulBackward0", "SumBackward0"]


def test_own_functions() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return 2 * gradients[0]

    with needed("BackwardCFunction._forward_cls", "name a backward pass that is not exported"):
        x = torch.ones(2, requires_grad=True)
        doubled: Tensor = Doubled.apply(x.exp())  # type: ignore[no-untyped-call]
        assert [name.rpartition(".")[2] for name in private.own_functions(doubled.sum())] == ["Doubled"]
        assert private.own_functions(x.exp().sum()) == []


def test_is_symbolic() -> None:
    sizes: list[Any] = []

    class Noting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            sizes.extend(x.shape)
            return x + 1

    torch.export.export(Noting(), (torch.ones(3, 2),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    assert [private.is_symbolic(size) for size in sizes[:2]] == [True, False]
    assert private.is_symbolic(slice(None, sizes[0])) and not private.is_symbolic(slice(1, 2))


def test_untraced() -> None:
    with needed("_disable_current_modes, DisableTorchFunction", "compute with constants while a step is traced"):
        numbers, found = torch.tensor([1, 2]), []

        class Summing(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                with private.untraced():
                    found.append(numbers.sum().item())
                return x + 1

        program = torch.export.export(Summing(), (torch.ones(3),))
        assert found[0] == 3 and "sum" not in str(program.graph)


def test_is_lazy() -> None:
    layer = nn.LazyLinear(2)
    assert private.is_lazy(layer.weight)
    layer(torch.ones(1, 3))
    assert not private.is_lazy(layer.weight)


def test_is_wrapped() -> None:
    with needed("_functorch.is_functorch_wrapped_tensor", "export masks that are mapped by vmap"):
        found = []

        def noted(x: Tensor) -> Tensor:
            found.append(private.is_wrapped(x))
            return x + 1

        torch.vmap(noted)(torch.ones(2, 3))
        assert found == [True] and not private.is_wrapped(torch.ones(2))


def test_written_arguments() -> None:
    with needed("OpOverload._schema", "see what a traced program writes into"):
        aten, x, y = torch.ops.aten, torch.ones(1), torch.zeros(1)
        assert private.written_arguments(aten.add.Tensor, (x, y), {}) == []
        assert [id(one) for one in private.written_arguments(aten.add_.Tensor, (x, y), {})] == [id(x)]
        assert [id(one) for one in private.written_arguments(aten.add.out, (x, x), {"out": y})] == [id(y)]


def test_program_of() -> None:
    with needed("the constructor of ExportedProgram", "decompose each kind of call once"):
        like = _traced(lambda x: x + 1)
        graph, values = torch.fx.Graph(), [node.meta["val"] for node in like.graph.nodes if "val" in node.meta]
        x, y = (graph.placeholder(name) for name in "ab")
        product = graph.call_function(torch.ops.aten.hardswish.default, (x,))
        x.meta["val"], y.meta["val"], product.meta["val"] = values[0], values[0].shape[0], values[1]
        graph.output((product,))
        program = private.program_of(graph, like).run_decompositions()
        targets = [node.target for node in program.graph.nodes]
        assert targets.count("a") == targets.count("b") == 1 and torch.ops.aten.hardswish.default not in targets
        given = torch.randn(3, 3)
        torch.testing.assert_close(program.module()(given, 3), (F.hardswish(given),))


def test_with_graph() -> None:
    with needed("ExportGraphSignature.output_specs", "put the pieces of a decomposed program together"):
        program = _traced(lambda x: x + 1)
        graph = torch.fx.Graph()
        nodes = {node: graph.node_copy(node) for node in program.graph.nodes if node.op == "placeholder"}
        (x,) = nodes.values()
        doubled = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
        doubled.meta["val"] = x.meta["val"]
        graph.output((doubled,))
        changed, given = private.with_graph(program, graph), torch.randn(2, 3)
        assert torch.equal(changed.module()(given), given * 2) and torch.equal(program.module()(given), given + 1)
        assert [spec.arg.name for spec in changed.graph_signature.output_specs] == [doubled.name]


def test_with_fewer_outputs() -> None:
    with needed("ModuleCallEntry.signature", "trace a module's outputs with the training step"):
        program = _traced(lambda x: (x + 1, x * 2, x * 3))
        fewer, given = private.with_fewer_outputs(program, 2), torch.randn(2, 3)
        for one in (fewer, fewer.run_decompositions()):
            (result,) = one.module()(given)
            assert torch.equal(result, given + 1)
        assert len(program.module()(given)) == 3


def test_promoted_by_known_types() -> None:
    with needed("_TypePromotionInterpreter", "export without tracing a program once more"):

        class Mixed(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return (x > 0) * 2.5 + torch.add(x.long(), x) + torch.where(x > 0, x.half(), 1).exp()

        plain = to_onnx(Mixed())
        with private.promoted_by_known_types():
            promoted = to_onnx(Mixed())
        assert [node.op_type for node in promoted.graph] == [node.op_type for node in plain.graph]
        types = [[value.dtype for node in one.graph for value in node.outputs] for one in (plain, promoted)]
        assert types[0] == types[1] and "Cast" in [node.op_type for node in plain.graph]


def test_numbers_remembered() -> None:
    with needed("_get_or_create_constant", "keep numbers of Python in float64"):

        class Scaled(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x * 0.1

        with private.numbers_remembered():
            translated = to_onnx(Scaled())
        values = [value for node in translated.graph for value in node.outputs]
        assert [value.meta[private.NUMBER] for value in values if private.NUMBER in value.meta] == [0.1]


def test_conditions_on_sizes() -> None:
    with needed("ShapeEnv.guards", "tell which sizes a step can have"):
        (found,) = private.conditions_on_sizes(_traced(lambda x: x + (1 if x.shape[0] > 70 else 2)))
        (symbol,) = found.sources
        assert (found.sources[symbol], found.filename) == ("L['x'].size()[0]", __file__)
        assert [found.holds({symbol: size}) for size in (70, 71)] == [True, False]
        assert found.text({symbol: "size"}) == "size <= 70"


def test_when_sizes_are_asked_for() -> None:
    with needed("SLoc", "name the code that asks for a size"):
        noted: list[Any] = []
        with private.when_sizes_are_asked_for(noted.append):
            program = _traced(lambda x: x + (1 if x.shape[0] > 70 else 2))
        (found,) = private.conditions_on_sizes(program)
        assert any(one is found.location for one in noted)


def test_set_place() -> None:
    with needed("SLoc.framework_loc", "name the code that calls a helper which asks for a size"):
        frame = inspect.currentframe()
        assert frame is not None
        with private.when_sizes_are_asked_for(lambda location: private.set_place(location, frame)):
            program = _traced(lambda x: x + min(1.0, x.shape[0] / 70))
        (found,) = private.conditions_on_sizes(program)
        assert (found.filename, found.function) == (__file__, "test_set_place")


def test_when_a_condition_is_decided() -> None:
    with needed("ShapeEnv.evaluate_expr", "see that code treats a size of 1 specially"):
        noted: list[Any] = []
        with private.when_a_condition_is_decided(lambda condition, _: noted.append(str(condition))):
            _traced(lambda x: x + (1 if x.shape[0] == 1 else 2))
        assert any(re.fullmatch(r"Eq\(s\d+, 1\)", one) for one in noted)


def test_version() -> None:
    with needed("Tensor._version", "see that a step changes a parameter in place"):
        tensor = torch.zeros(2)
        before = private.version(tensor)
        assert private.version(tensor) == before
        tensor.add_(1)
        assert private.version(tensor) > before


def test_gradient_hooks() -> None:
    with needed("Tensor._backward_hooks", "export hooks that it would ignore"):
        parameter: Any = nn.Parameter(torch.zeros(2))
        assert private.gradient_hooks(parameter) == []
        handle = parameter.register_hook(torch.neg)
        parameter.register_hook(torch.abs)
        parameter.register_hook(torch.exp)
        handle.remove()
        assert private.gradient_hooks(parameter) == [torch.abs, torch.exp]


def test_post_accumulate_hooks() -> None:
    with needed("Tensor._post_accumulate_grad_hooks", "refuse hooks that it would ignore"):
        parameter: Any = nn.Parameter(torch.zeros(2))
        assert private.post_accumulate_hooks(parameter) == []
        parameter.register_post_accumulate_grad_hook(torch.sin)
        assert private.post_accumulate_hooks(parameter) == [torch.sin]


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks(register: str) -> None:
    with needed("Module._backward_hooks or _backward_pre_hooks", "refuse hooks that it would ignore"):
        module = nn.Linear(2, 2)
        assert private.backward_hooks(module) == []
        getattr(module, register)(max)
        assert private.backward_hooks(module) == [max]


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_of_all(register: str) -> None:
    with needed("the global hooks of modules", "refuse hooks that it would ignore"):
        assert private.backward_hooks_of_all() == []
        handle = getattr(nn.modules.module, register.replace("register_", "register_module_"))(min)
        assert private.backward_hooks_of_all() == [min]
        handle.remove()


def test_has_step_of_its_own() -> None:
    with needed("the wrapper of step, _wrapped_by_lr_sched", "tell a scheduler from a step of the user's"):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))])
        assert not private.has_step_of_its_own(optimizer)
        torch.optim.lr_scheduler.ConstantLR(optimizer)
        assert not private.has_step_of_its_own(optimizer)
        vars(optimizer)["step"] = lambda: None
        assert private.has_step_of_its_own(optimizer)


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_step_hooks(register: str) -> None:
    with needed("Optimizer._optimizer_step_pre_hooks or _post_hooks", "refuse hooks that it would ignore"):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))])
        assert private.step_hooks(optimizer) == []
        getattr(optimizer, register)(max)
        of_all = importlib.import_module("torch.optim.optimizer")
        handle = getattr(of_all, register.replace("register_", "register_optimizer_"))(min)
        assert {*private.step_hooks(optimizer)} == {max, min}
        handle.remove()


def test_graph_leaves() -> None:
    with needed("AccumulateGrad.variable", "refuse a loss with trainable tensors that no module has"):
        a, b, frozen = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True), torch.ones(2)
        leaves = list(private.graph_leaves(((a * b).exp() * frozen + a).sum()))
        assert {id(leaf) for leaf in leaves} == {id(a), id(b)}


def test_forward_mode_is_on() -> None:
    with needed("forward_ad._current_level", "refuse forward-mode derivatives, which its operators lack"):
        assert not private.forward_mode_is_on()
        with torch.autograd.forward_ad.dual_level():
            assert private.forward_mode_is_on()


def test_operator_name() -> None:
    with needed("OpOverload._schema.name", "know which operators round"):
        assert private.operator_name(torch.ops.aten.add.Tensor) == "aten::add"


def test_is_mutable() -> None:
    with needed("OpOverload._schema.is_mutable", "leave results alone that are written into arguments"):
        assert private.is_mutable(torch.ops.aten.add_.Tensor)
        assert not private.is_mutable(torch.ops.aten.add.Tensor)


def test_schema_arguments() -> None:
    with needed("torch._C.parse_schema", "read the arguments of its operators for PyTorch"):
        x, scale = private.schema_arguments("aclnn::f(Tensor x, float scale=0.5) -> Tensor")
        assert (x.name, str(x.type)) == ("x", "Tensor")
        assert (scale.name, str(scale.type), scale.default_value) == ("scale", "float", 0.5)


def test_tensors_in() -> None:
    with needed("torch.utils._pytree.tree_leaves", "find the outputs of a module in eval mode"):
        a, b, c = torch.zeros(1), torch.ones(1), torch.ones(2)
        found = private.tensors_in((a, [b], {"last": c}))
        assert [id(one) for one in found] == [id(a), id(b), id(c)]


def test_map_tensors() -> None:
    with needed("torch.utils._pytree.tree_map_only", "move the results of operators by their rounding"):
        tensor, (number, listed) = private.map_tensors(lambda one: one + 1, (torch.zeros(1), (3, [torch.ones(1)])))
        assert (float(tensor), number, float(listed[0])) == (1.0, 3, 2.0)


def test_torch_dispatch_mode() -> None:
    with needed("torch.utils._python_dispatch.TorchDispatchMode", "draw the masks of dropout, and see operators run"):
        seen = []

        class Recording(private.TorchDispatchMode):  # type: ignore[no-untyped-call]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.append(private.operator_name(func))
                return func(*args, **(kwargs or {}))

        ones = torch.ones(2)
        with Recording():  # type: ignore[no-untyped-call]
            F.softplus(ones)
        assert seen == ["aten::softplus"]


def test_translations_read_once() -> None:
    with needed("ONNXRegistry.from_torchlib", "export several models without reading all translations again"):
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        method = vars(ONNXRegistry)["from_torchlib"]
        own = {torch.ops.aten.relu.default: lambda x: onnxscript.opset18.Neg(x)}
        with private.translations_read_once():
            changed, plain = (to_onnx(nn.ReLU(), table) for table in (own, None))
            assert ONNXRegistry.from_torchlib().functions.keys() == ONNXRegistry.from_torchlib().functions.keys()
        assert vars(ONNXRegistry)["from_torchlib"] is method
        assert [node.op_type for node in changed.graph] == ["Neg"]
        assert [node.op_type for node in plain.graph] == ["Relu"]


def test_sources_unread() -> None:
    with needed("TracedOnnxFunction.function_ir", "export without parsing the sources of all translations"):
        from onnxscript._framework_apis import torch_2_5

        whole = torch_2_5.get_torchlib_ops()
        traced: Any = whole[0].function
        with private.sources_unread():
            assert whole == torch_2_5.get_torchlib_ops()
            assert vars(traced.function_ir).keys() == {"domain"}
        assert traced.function_ir.domain == whole[0].domain
        assert traced.function_ir.name == whole[0].name


def test_decompositions_of_export() -> None:
    with needed("create_onnx_friendly_decomposition_table", "decompose a program only once"):
        hardshrink, relu = torch.ops.aten.hardshrink.default, torch.ops.aten.relu.default
        found = private.decompositions_of_export(20, [])
        assert hardshrink in found and relu not in found
        assert hardshrink not in private.decompositions_of_export(20, [hardshrink])


def test_decomposed_once() -> None:
    with needed("_fx_passes.decompose_with_registry", "export without decomposing a decomposed program again"):
        from torch.onnx._internal.exporter import _fx_passes

        original, calls = _fx_passes.decompose_with_registry, []

        def counted(program: Any, registry: Any) -> Any:
            calls.append(program)
            return original(program, registry)

        _fx_passes.decompose_with_registry = counted  # type: ignore[assignment]
        try:
            with private.decomposed_once():
                plain, composed = to_onnx(nn.ReLU()), to_onnx(Composed())
            assert len(calls) == 1 and _fx_passes.decompose_with_registry is counted
        finally:
            _fx_passes.decompose_with_registry = original
        assert [node.op_type for node in plain.graph] == ["Relu"]
        assert all(not node.domain for node in composed.graph)


class Composed(nn.Module):
    """Has an operator that torch.onnx decomposes, as it has no translation."""

    def forward(self, x: Tensor) -> Tensor:
        return F.hardshrink(x)


def test_results_of_translation() -> None:
    with needed("torch.onnx's SymbolicTensor", "let its translations compute with results of ours"):

        def halved(x: Any) -> Any:
            node = ir.node("Identity", [x], outputs=private.results_of_translation(1))
            private.record_node(node)
            return node.outputs[0] * 0.5

        model = to_onnx(nn.ReLU(), {torch.ops.aten.relu.default: halved})
        (result,) = ReferenceEvaluator(ir.to_proto(model)).run(None, {str(model.graph.inputs[0].name): ONES})
        np.testing.assert_array_equal(result, ONES / 2)


def test_operators_without_translation() -> None:
    with needed("torch.onnx's registry and decompositions", "name all operators without a translation"):

        class Special(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return torch.special.airy_ai(x).relu()  # type: ignore[no-any-return]

        program = torch.export.export(Special(), (torch.ones(2),))
        assert private.operators_without_translation(program, 20, ()) == ["aten.special_airy_ai.default"]
        assert private.operators_without_translation(program, 20, (torch.ops.aten.special_airy_ai.default,)) == []


def test_record_node() -> None:
    with needed("onnxscript.evaluator.default and its nodes", "write nodes of its own while torch.onnx translates"):

        def translated(x: Any) -> Any:
            node = ir.node("Own", [x], domain="gradfuse.test")
            private.record_node(node)
            return node.outputs[0]

        model = to_onnx(nn.ReLU(), {torch.ops.aten.relu.default: translated})
        assert [(node.domain, node.op_type) for node in model.graph] == [("gradfuse.test", "Own")]


def test_known_decompositions() -> None:
    with needed("torch._decomp.get_decompositions", "translate batch normalization in training mode"):
        overload = torch.ops.aten._native_batch_norm_legit_functional.default
        function = private.known_decompositions([overload])[overload]
        x = torch.arange(6.0).view(3, 2)
        zeros, ones = torch.zeros(2), torch.ones(2)
        arguments = (x, ones, zeros, zeros, ones, True, 0.1, 1e-5)
        for got, wanted in zip(function(*arguments), overload(*arguments), strict=True):
            torch.testing.assert_close(got, wanted)


def test_unchecked_size(library: Any) -> None:
    with needed("ShapeEnv.ignore_fresh_unbacked_symbols", "trace CTC losses with lengths in tensors"):
        library.define("f(Tensor x) -> Tensor")

        def fake(x: Tensor) -> Tensor:
            assert not isinstance(private.unchecked_size(x), int)
            return x.new_empty(x.shape)

        torch.library.register_fake("gradfuse_test::f", fake, lib=library)

        class Calling(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return torch.ops.gradfuse_test.f(x)  # type: ignore[no-any-return]

        program = torch.export.export(Calling(), (torch.ones(2, 3),))
        assert any(node.target is torch.ops.gradfuse_test.f.default for node in program.graph.nodes)


def test_known_true() -> None:
    found: list[bool] = []

    class Sums(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            rows = x.shape[0]
            found.extend(private.known_true(a == b) for a, b in ((rows, rows), (rows, 4), (3, 3), (rows, y.shape[0])))
            return x.sum() + y.sum()

    dims = {0: torch.export.Dim.DYNAMIC}
    program = torch.export.export(
        Sums(), (torch.ones(4, 3), torch.ones(4, 3)), dynamic_shapes=(dims, dims), strict=False
    )
    assert found == [True, False, True, False]
    # Nothing was restricted by asking.
    program.module()(torch.ones(5, 3), torch.ones(6, 3))


def test_has_result() -> None:
    class Checked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.ops.aten._assert_async.msg(x.sum() > 0, "positive")
            return x + 1.0

    with needed("OpOverload._schema.returns", "leave out operators that raised an error"):
        program = torch.export.export(Checked(), (torch.ones(2),))
        found = {str(node.target): private.has_result(node) for node in program.graph.nodes}
        assert found["aten.add.Tensor"] and not found["aten._assert_async.msg"]
        assert not found["output"]


def test_may_be_zero() -> None:
    found: dict[str, bool] = {}

    class Chosen(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            rows = [torch.where(x > index)[0] for index in range(4)]
            x = x[rows[0]].sum() + x[rows[1]][0] + x[rows[2]].sum()
            torch._check(rows[3].shape[0] == rows[2].shape[0])  # type: ignore[no-untyped-call]
            found.update(zip("abcd", (private.may_be_zero(one.shape[0]) for one in rows), strict=True))
            found["number"] = private.may_be_zero(3)
            return x

    with needed(
        "ShapeEnv.var_to_range, deferred_runtime_asserts", "leave out rounds of loops in which nothing is found"
    ):
        torch.export.export(Chosen(), (torch.arange(6.0),), strict=False)
        assert found == {"a": True, "b": False, "c": True, "d": True, "number": True}


def test_follows_from_values() -> None:
    found: list[bool] = []

    class Chosen(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            rows = torch.where(x > 2)[0]
            found[:] = map(private.follows_from_values, (rows.shape[0], 2 * rows.shape[0] + 1, x.shape[0], 3))
            return x[rows]

    with needed("ShapeEnv.is_unbacked_symint", "tell the mean of what a mask selects, which may be nothing"):
        dims = {0: torch.export.Dim.DYNAMIC}
        torch.export.export(Chosen(), (torch.arange(6.0),), dynamic_shapes=(dims,), strict=False)
        assert found == [True, True, False, False]


def test_remember_item() -> None:
    with needed("FakeTensor.item_memo", "follow sizes that are computed by tensors"):

        class Halves(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                half = torch.div(x.shape[0], 2, rounding_mode="floor")
                private.remember_item(half, x.shape[0] // 2)
                return x[: half.item()]

        dims = {0: torch.export.Dim.DYNAMIC}
        program = torch.export.export(Halves(), (torch.ones(6),), dynamic_shapes=(dims,))
        assert program.module()(torch.ones(9)).shape == (4,)


def test_assume() -> None:
    with needed("torch._check", "trace what depends on how much nonzero finds"):

        class Finding(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                found = x.nonzero()
                private.assume(found.shape[0] > 0)
                return found.sum() if found.shape[0] > 0 else x.sum()

        program = torch.export.export(Finding(), (torch.ones(3),))
        assert program.module()(torch.ones(3)) == 3


def test_record_call() -> None:
    with needed("the evaluator of torch.onnx with its nodes and functions", "translate operators as ONNX functions"):
        double = translation.function_caller("Double (x) => (y) { y = Add(x, x) }")
        model = to_onnx(nn.ReLU(), {torch.ops.aten.relu.default: double})
        (result,) = ReferenceEvaluator(ir.to_proto(model)).run(None, {str(model.graph.inputs[0].name): ONES})
        np.testing.assert_array_equal(result, 2 * ONES)


def test_untranslated_operator(library: Any) -> None:
    with needed("the text of torch.onnx's error for an unknown operator", "name the operator that has no translation"):
        library.define("g(Tensor x) -> Tensor")
        torch.library.register_fake("gradfuse_test::g", torch.empty_like, lib=library)

        class Calling(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return torch.ops.gradfuse_test.g(x)  # type: ignore[no-any-return]

        with pytest.raises(torch.onnx.OnnxExporterError) as caught:
            to_onnx(Calling())
        names = [private.untranslated_operator(error) for error in causes(caught.value)]
        assert "gradfuse_test.g.default" in names
        assert private.untranslated_operator(ValueError("another")) is None


def test_untranslated_node(library: Any) -> None:
    with needed("the text of torch.onnx's error for a node that it fails at", "name what cannot be translated"):
        library.define("h(Tensor x) -> Tensor")
        torch.library.register_fake("gradfuse_test::h", torch.empty_like, lib=library)

        class Calling(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return torch.ops.gradfuse_test.h(x)  # type: ignore[no-any-return]

        with pytest.raises(torch.onnx.OnnxExporterError) as caught:
            to_onnx(Calling())
        assert "h" in [private.untranslated_node(error) for error in causes(caught.value)]
        assert private.untranslated_node(ValueError("another")) is None


def test_checks_of_distributions() -> None:
    with needed("torch's checks of arguments of distributions", "trace MultivariateNormal"):
        found = private.checks_of_distributions()
        assert type(torch.distributions.constraints.positive_definite).check.__code__ in found


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.10", reason="PyTorch 2.9 refuses int(size / 2)")
def test_whole_part() -> None:
    with needed("the expressions of sizes that torch.export makes", "take int(size / 2) as a size"):

        class Dividing(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                half: Any = x.shape[0] / 2
                (size,) = private.expression(half).free_symbols
                return x.new_ones(private.whole_part(half, size, 2))

        size = torch.export.Dim("size", min=4)
        program = torch.export.export(Dividing(), (torch.ones(5),), dynamic_shapes=({0: size},))
        assert program.module()(torch.ones(9)).shape == (4,)


def test_decisions_of_kernels() -> None:
    with needed("the function by which nn.Transformer sees a causal mask", "trace nn.Transformer with masks"):
        (code,) = private.decisions_of_kernels()
        asked = []

        class Asked(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                frame = inspect.currentframe()
                if func is Tensor.__bool__ and frame is not None and frame.f_back is not None:
                    asked.append(frame.f_back.f_code)
                return func(*args, **(kwargs or {}))

        layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1, 4), 1, enable_nested_tensor=False)
        with Asked():
            layers(torch.ones(3, 1, 4), mask=nn.Transformer.generate_square_subsequent_mask(3))
        assert code in asked


def test_every_name_has_a_test() -> None:
    functions = [value for value in vars(private).values() if inspect.isfunction(value)]
    own = [function.__name__ for function in functions if function.__module__ == private.__name__]
    assert [name for name in own if f"test_{name}" not in globals()] == []


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _own_names(trees: dict[Path, ast.Module]) -> set[str]:
    """Every name that the package's own code gives to something."""
    names: set[str] = set()
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def test_no_other_module_uses_a_private_api_of_torch() -> None:
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py") if path.name != "_torch_private.py"}
    own = _own_names(trees)
    found = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            names: list[str] = []
            match node:
                case ast.Import():
                    names = [alias.name for alias in node.names]
                case ast.ImportFrom(module=str(module)):
                    names = [f"{module}.{alias.name}" for alias in node.names]
                case ast.Attribute(attr=attr) if attr not in own:
                    # Operators of ATen are named as they are.
                    text = ast.unparse(node)
                    names = [] if text.startswith(("aten.", "torch.ops.aten.")) else [f"torch.{attr}"]
            if any(name.startswith("torch.") and any(map(_is_private, name.split("."))) for name in names):
                found.append(f"{path}: {ast.unparse(node)}")
    assert found == []


def test_operators_collected_once() -> None:
    from torch._export import utils

    with private.operators_collected_once():
        once = utils._collect_all_valid_cia_ops()
        with private.operators_collected_once():
            assert utils._collect_all_valid_cia_ops() == once
    assert utils._collect_all_valid_cia_ops() == once
    assert torch.ops.aten.softplus.default not in once
    assert torch.ops.aten.conv2d.default in once


def test_what_vmap_maps_over_has_its_memory() -> None:
    x, found = torch.randn(3, 4), []

    def note(row: torch.Tensor) -> torch.Tensor:
        found.append(private.storage(row))
        return row * 2

    torch.vmap(note)(x)
    assert found == [private.storage(x)]


def test_derivatives_limited() -> None:
    with needed("_grad_increment_nesting, _jvp_increment_nesting and get_interpreter_stack", "refuse what crashes"):
        x = torch.ones(2, 3)
        with private.derivatives_limited(lambda: ValueError("deep")):
            torch.func.vmap(torch.func.hessian(torch.sum))(x)
            torch.func.jacrev(torch.func.hessian(torch.sum))(x)
            with pytest.raises(ValueError, match="deep"):
                torch.func.vmap(torch.func.jacrev(torch.func.hessian(torch.sum)))(x)


def test_derivatives_noted() -> None:
    with needed("torch.autograd._engine_run_backward and _jvp_with_argnums", "find derivatives within a step"):
        x = torch.ones(2, requires_grad=True)
        for take in (
            lambda: torch.autograd.grad(x.square().sum(), x),
            lambda: torch.func.grad(torch.sum)(x),
            lambda: torch.func.jvp(torch.sin, (x,), (x,)),
        ):
            with private.derivatives_noted() as noted:
                take()
            assert noted
        with private.derivatives_noted() as noted:
            x.sin()
        assert not noted


def test_forward_mode_by_reverse() -> None:
    with needed("eager_transforms._jvp_with_argnums", "trace torch.func.jvp for sizes that vary"):
        x, v = torch.rand(2, 3, dtype=torch.float64)
        expected = torch.func.jvp(torch.sin, (x,), (v,)), torch.func.hessian(lambda z: z.pow(3).sum())(x)
        with private.forward_mode_by_reverse():
            found = torch.func.jvp(torch.sin, (x,), (v,)), torch.func.hessian(lambda z: z.pow(3).sum())(x)
        torch.testing.assert_close(found, expected)


def test_gradients_batched_by_vmap() -> None:
    with needed("torch._vmap_internals._vmap", "trace torch.autograd.grad with is_grads_batched"):
        x, other = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
        with private.gradients_batched_by_vmap():
            by_x, by_other = torch.autograd.grad(
                x.square(), (x, other), torch.eye(3), is_grads_batched=True, allow_unused=True
            )
        torch.testing.assert_close(by_x, torch.diag(2 * x.detach()))
        assert by_other is None


def test_batched_by() -> None:
    with needed("torch.library.Library._destroy", "batch operators by rules of one's own"):
        with private.batched_by({torch.ops.aten.cat: lambda info, in_dims, tensors, dim=0: (tensors[0] * 0, 0)}):
            assert not torch.func.vmap(lambda x: torch.cat([x, x]))(torch.ones(2, 3)).any()
        assert torch.func.vmap(lambda x: torch.cat([x, x]))(torch.ones(2, 3)).shape == (2, 6)
        index = torch.tensor([0])
        with private.batched_by({torch.ops.aten.scatter.value: lambda info, in_dims, x, *_: (x * 0, 0)}):
            assert not torch.func.vmap(lambda x: x.scatter(0, index, 1.0))(torch.ones(2, 3)).any()


def test_innermost() -> None:
    with needed("torch._C._functorch.get_unwrapped", "know what has a gradient within torch.func"):
        x, seen = torch.ones(2, requires_grad=True), list[Tensor]()

        def total(z: Tensor) -> Tensor:
            seen.append(private.innermost(z))
            return z.sum()

        torch.func.grad(total)(x)
        assert seen[0].requires_grad and not private.is_wrapped(seen[0])


def test_below_autograd() -> None:
    with needed("make_fx, _disable_current_modes and the stack of modes", "trace derivatives within a step"):

        class Derived(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                module = private.below_autograd(
                    lambda z: torch.autograd.grad(z.sin().sum(), z, create_graph=True), [x], [True]
                )
                with private.gradients_off_unseen():
                    return module(x)[0]  # type: ignore[no-any-return]

        x = torch.rand(3)
        program = torch.export.export(Derived(), (x,), dynamic_shapes=({0: torch.export.Dim("n")},))
        assert torch.ops.aten.cos.default in {node.target for node in program.graph.nodes}
        torch.testing.assert_close(program.module()(torch.ones(5)), torch.ones(5).cos())


def test_flattened() -> None:
    leaves, back = private.flattened(({"a": 1}, [2, 3]))
    assert leaves == [1, 2, 3]
    assert back([4, 5, 6]) == ({"a": 4}, [5, 6])


def test_gradients_off_unseen() -> None:
    with needed("torch._C._set_grad_enabled", "replay a trace without gradients"):
        with private.gradients_off_unseen():
            assert not torch.is_grad_enabled()
        assert torch.is_grad_enabled()


def test_rules_are_reached_below_vmap_of_gradients() -> None:
    seen = []

    def rule(info: Any, in_dims: Any, grad: Tensor, sizes: Any, *rest: Any) -> tuple[Tensor, int]:
        seen.append(sizes)
        return torch.ones(len(grad), *sizes), 0

    with private.batched_by({torch.ops.aten.slice_backward: rule}):
        torch.func.vmap(torch.func.grad(lambda x: x[1:].sum()))(torch.ones(2, 3))
    assert seen


def test_is_about_varying_sizes() -> None:
    with needed("the text 'Constraints violated'", "say that an axis became a constant"):

        class Fixed(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x + torch.ones(3)

        with pytest.raises(Exception) as caught:
            torch.export.export(Fixed(), (torch.ones(3),), dynamic_shapes=({0: torch.export.Dim("n")},))
        assert private.is_about_varying_sizes(caught.value)


def test_pre_dispatch_hidden() -> None:
    with needed("_get_current_function_mode_stack, _pop_mode and _push_mode", "trace within a trace"):
        seen = []

        class Hidden(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                with private.pre_dispatch_hidden(), torch.no_grad():
                    seen.append(torch.is_grad_enabled())
                return x + 1

        program = torch.export.export(Hidden(), (torch.ones(3),))
        assert seen and not any(seen)
        assert [node.target for node in program.graph.nodes if node.op == "call_function"] == [
            torch.ops.aten.add.Tensor
        ]


def test_nothing_compiled() -> None:
    with needed("torch._dynamo.config.error_on_nested_fx_trace", "trace functions of torch.compile"):
        compiled = torch.compile(lambda x: x + 1, backend=lambda *_: pytest.fail("compiled"))

        class Calls(nn.Module):
            def forward(self, x: Tensor) -> Any:
                return compiled(x)

        with private.nothing_compiled():
            assert Calls()(torch.ones(3)).tolist() == [2.0] * 3
            program = torch.export.export(Calls(), (torch.ones(3),), strict=False)
        assert torch.ops.aten.add.Tensor in [node.target for node in program.graph.nodes]

"""Products with sparse matrices, as graph convolutions have them: constant ones, and those that the step makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from like_torch import trains_like_torch
from torch import Tensor, nn

from gradfuse import ExportError, ModelError, export_training_step

NODES = 6
EDGES = torch.tensor([[0, 1, 1, 2, 3, 4, 4, 0, 1], [1, 0, 2, 1, 4, 3, 4, 0, 0]])
WEIGHTS = torch.arange(9) / 8 + 0.25


def adjacency(layout: str = "coo") -> Tensor:
    """A matrix in which (1, 0) stands twice, and node 5 has no edges."""
    matrix = torch.sparse_coo_tensor(EDGES, WEIGHTS, (NODES, NODES))
    compressed = {"csr": Tensor.to_sparse_csr, "csc": Tensor.to_sparse_csc}
    return matrix if layout == "coo" else compressed[layout](matrix.coalesce())


Product = Callable[[Tensor, Tensor], Tensor]


class Convolutions(nn.Module):
    """Two graph convolutions; the matrix is a buffer, or an attribute."""

    def __init__(self, product: Product, matrix: Tensor, *, registered: bool = True) -> None:
        super().__init__()
        self.product = product
        if registered:
            self.register_buffer("adjacency", matrix)
        else:
            self.adjacency = matrix
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        adjacency = self.adjacency.to(x.dtype)
        hidden = torch.relu(self.product(adjacency, self.first(x)))
        return self.product(adjacency, self.second(hidden))


def batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(NODES, 4), torch.randn(NODES, 3)) for _ in range(count)]


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return make()

    return made


PRODUCTS: dict[str, Product] = {
    "torch.sparse.mm": lambda a, x: torch.sparse.mm(a, x),
    "@": lambda a, x: a @ x,
    "torch.spmm": lambda a, x: torch.spmm(a, x),
    "transposed": lambda a, x: torch.mm(a.t(), x),
    "from the right": lambda a, x: (x.t() @ a).t(),
    "of a vector": lambda a, x: x * (a @ x[:, 0]).unsqueeze(1),
    "addmm": lambda a, x: torch.sparse.addmm(x, a, x, beta=0.5, alpha=2.0),
    "twice": lambda a, x: torch.sparse.mm(torch.sparse.mm(a, a), x),
    "scaled": lambda a, x: (a * 0.5) @ x * a.coalesce().values().sum(),
    "without a gradient": lambda a, x: x * torch.sparse.mm(a, x.detach()),
    "dense": lambda a, x: a.to_dense() @ x,
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.sampled(every=3)
def test_a_constant_matrix(name: str) -> None:
    trains_like_torch(seeded(lambda: Convolutions(PRODUCTS[name], adjacency())), F.mse_loss, batches())


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support")
@pytest.mark.parametrize("layout", ["csr", "csc"])
def test_a_compressed_matrix(layout: str) -> None:
    make = seeded(lambda: Convolutions(torch.matmul, adjacency(layout), registered=layout == "csr"))
    trains_like_torch(make, F.mse_loss, batches(2), fuse=False)


def test_a_matrix_without_elements() -> None:
    nothing = torch.sparse_coo_tensor(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(0), (NODES, NODES))
    trains_like_torch(seeded(lambda: Convolutions(torch.sparse.mm, nothing)), F.mse_loss, batches(2), fuse=False)


def test_an_attribute_is_a_constant_as_a_buffer_is() -> None:
    make = seeded(lambda: Convolutions(torch.sparse.mm, adjacency(), registered=False))
    trains_like_torch(make, F.mse_loss, batches(2), fuse=False)


class WithWeights(nn.Module):
    """A convolution whose edges have trainable weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.weights = nn.Parameter(WEIGHTS.clone())
        self.edges: Tensor
        self.register_buffer("edges", EDGES)

    def forward(self, x: Tensor) -> Tensor:
        matrix = torch.sparse_coo_tensor(self.edges, self.weights.exp(), (NODES, NODES))
        return torch.sparse.mm(matrix, self.first(x))  # type: ignore[no-any-return]


def test_the_gradient_of_the_elements() -> None:
    trains_like_torch(seeded(WithWeights), F.mse_loss, batches())


class OfGraphs(nn.Module):
    """A convolution over the graph of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)

    def forward(self, x: Tensor, edges: Tensor, weights: Tensor) -> Tensor:
        matrix = torch.sparse_coo_tensor(edges, weights, (x.shape[0], x.shape[0]))
        return torch.sparse.mm(matrix, self.first(x))  # type: ignore[no-any-return]


def test_graphs_of_any_size() -> None:
    torch.manual_seed(0)
    graphs = [
        ((torch.randn(nodes, 4), torch.randint(0, nodes, (2, edges)), torch.rand(edges)), (torch.randn(nodes, 3),))
        for nodes, edges in ((6, 9), (4, 12), (9, 0))
    ]
    shapes = (({0: "nodes"}, {1: "edges"}, {0: "edges"}), ({0: "nodes"},))
    session = trains_like_torch(seeded(OfGraphs), F.mse_loss, graphs, dynamic_shapes=shapes)
    (x, edges, weights), targets = graphs[0]
    for axis, place in ((0, -1), (1, -1), (0, NODES), (1, NODES)):
        moved = edges.clone()
        moved[axis, 0] = place
        with pytest.raises(ModelError, match=r"out of|index"):
            session.step((x.numpy(), moved.numpy(), weights.numpy()), targets[0].numpy())


def of_elements(a: Tensor, x: Tensor) -> Tensor:
    product: Tensor = (a * x[0, 0]) @ x
    return product


def without_a_size(a: Tensor, x: Tensor) -> Tensor:
    product: Tensor = torch.sparse.mm(torch.sparse_coo_tensor(torch.arange(NODES).expand(2, -1), x[:, 0]), x)
    return product


def in_place(a: Tensor, x: Tensor) -> Tensor:
    return a.mul_(0.5) @ x


@pytest.mark.parametrize(
    "product, message",
    [
        (of_elements, r"uses mul of a sparse matrix, in of_elements \(.*; expected products of a sparse and a dense"),
        (
            without_a_size,
            r"sparse tensor by torch.sparse_coo_tensor, in .*; expected a matrix of numbers, with its size",
        ),
        (in_place, "changes 'adjacency', which is torch.sparse_coo; expected a constant, or a dense tensor"),
    ],
)
def test_what_is_refused(product: Product, message: str) -> None:
    class Once(Convolutions):
        def forward(self, x: Tensor) -> Tensor:
            return self.product(self.adjacency, self.second(self.first(x)))

    with pytest.raises(ExportError, match=message):
        export_training_step(Once(product, adjacency()), F.mse_loss, batches()[0])


def test_a_dynamic_number_of_nodes_is_refused() -> None:
    shapes: Any = (({0: "nodes"},), ({0: "nodes"},))
    with pytest.raises(ExportError, match="axis 0 of 'x' has size 6 in all of the traced step"):
        export_training_step(
            Convolutions(torch.sparse.mm, adjacency()), F.mse_loss, batches()[0], dynamic_shapes=shapes
        )


def test_a_sparse_matrix_in_the_batch_is_refused() -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 3)

        def forward(self, x: Tensor, matrix: Tensor) -> Tensor:
            return torch.spmm(matrix, self.first(x))

    x, y = batches()[0]
    with pytest.raises(ExportError, match=r"hold 'matrix', which is torch.sparse_coo; expected a dense tensor: keep a"):
        export_training_step(Given(), F.mse_loss, ((x, adjacency()), y))

"""A force field: a network of the distances between atoms learns energies and forces of a Lennard-Jones cluster.

The forces are derivatives of the energy with respect to the positions, which the module takes itself. So the loss needs
second derivatives, and the exported step holds all of them. Its evaluation model gives energies and forces in stock
onnxruntime. At the end these move the atoms.

The exit status is 1 if the forces are further from the true ones than wanted.
"""

from __future__ import annotations

import sys

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfuse

ATOMS = 4


class ForceField(nn.Module):
    """Energies (N) and forces (N, atoms, 3) of positions (N, atoms, 3): a sum over pairs of atoms."""

    centres: Tensor
    pairs: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pair = nn.Sequential(
            nn.Linear(16, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
        )
        self.register_buffer("centres", torch.linspace(0.8, 2.4, 16))
        self.register_buffer("pairs", torch.triu_indices(ATOMS, ATOMS, 1))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        positions = positions.requires_grad_()
        distances = (positions[:, self.pairs[0]] - positions[:, self.pairs[1]]).norm(dim=-1)
        waves = torch.exp(-30.0 * (distances.unsqueeze(-1) - self.centres).square())
        energies = self.pair(waves).sum((1, 2))
        (gradient,) = torch.autograd.grad(energies.sum(), positions, create_graph=True)
        return energies, -gradient


def loss(output: tuple[Tensor, Tensor], energies: Tensor, forces: Tensor) -> Tensor:
    return 0.1 * F.mse_loss(output[0], energies) + F.mse_loss(output[1], forces)


def lennard_jones(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the energies and forces to learn, in units of the potential."""
    positions = positions.clone().requires_grad_()
    first, second = torch.triu_indices(ATOMS, ATOMS, 1)
    sixth = (positions[:, first] - positions[:, second]).square().sum(-1) ** -3
    energies = (4.0 * (sixth * sixth - sixth)).sum(1)
    (gradient,) = torch.autograd.grad(energies.sum(), positions)
    return energies.detach(), -gradient


def clusters(count: int) -> Tensor:
    """Return tetrahedra at the equilibrium distance, with their atoms moved at random."""
    corners = torch.tensor([[1.0, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]])
    best: float = 2 ** (1 / 6)
    corners = corners * (best / (corners[0] - corners[1]).norm())
    moved: Tensor = corners + 0.05 * torch.randn(count, ATOMS, 3)
    return moved


def moved(session: gradfuse.TrainingSession, steps: int, time: float = 0.005) -> tuple[float, float]:
    """Let a cluster move by the learnt forces; return the range of its total energy, and of the potential energy."""
    positions, velocities = clusters(1), torch.zeros(1, ATOMS, 3)
    energy, force = (torch.from_numpy(one) for one in session.evaluate(positions.numpy()))
    whole, potential = [], []
    for _ in range(steps):
        velocities = velocities + 0.5 * time * force
        positions = positions + time * velocities
        energy, force = (torch.from_numpy(one) for one in session.evaluate(positions.numpy()))
        velocities = velocities + 0.5 * time * force
        potential.append(float(energy))
        whole.append(potential[-1] + 0.5 * float(velocities.square().sum()))
    return max(whole) - min(whole), max(potential) - min(potential)


@click.command(help=(__doc__ or "").split("\n\n")[0])
@click.option("--steps", default=2000, show_default=True, help="Steps of training.")
@click.option("--width", default=64, show_default=True, help="Width of the network.")
@click.option("--batch-size", default=64, show_default=True)
@click.option("--error", default=0.1, show_default=True, help="Error of the forces, as a share of them, to reach.")
def main(steps: int, width: int, batch_size: int, error: float) -> None:
    torch.manual_seed(0)
    module = ForceField(width)
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    positions = clusters(batch_size)
    batch = (positions, lennard_jones(positions))
    shapes = ({0: "batch"}, ({0: "batch"}, {0: "batch"}))
    step = gradfuse.export_training_step(module, loss, batch, optimizer, dynamic_shapes=shapes)
    session = gradfuse.TrainingSession(step)
    others = clusters(256)
    truth = lennard_jones(others)[1]

    def left() -> float:
        forces = torch.from_numpy(session.evaluate(others.numpy())[1])
        return float((forces - truth).norm() / truth.norm())

    before = left()
    for index in range(steps):
        session.learning_rate = 3e-3 * (1.0 - index / steps)
        positions = clusters(batch_size)
        energies, forces = lennard_jones(positions)
        session.step(positions.numpy(), (energies.numpy(), forces.numpy()))
    share = left()
    print(f"error of the forces: {before:.3f} before training, {share:.3f} after")
    whole, potential = moved(session, 200)
    print(
        f"atoms moved by them: the whole energy stays within {whole:.4f}, the potential energy within {potential:.4f}"
    )
    sys.exit(share > error)


if __name__ == "__main__":
    main()

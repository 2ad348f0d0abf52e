"""The heat equation by collocation: a network becomes its solution, from the equation and the values at the start.

u(x, t) of a rod whose ends are kept cold obeys u_t = k u_xx and begins as sin(pi x). The module takes the derivatives
of its network with torch.func at random points; the loss is the residual of the equation there. The exported step
differentiates it with respect to the parameters.

The exit status is 1 if the solution is further from the true one, exp(-k pi^2 t) sin(pi x), than wanted.
"""

from __future__ import annotations

import math
import sys

import click
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

import gradfuse

CONDUCTIVITY = 0.1


class Rod(nn.Module):
    """Temperatures (N) at points (N, 2) of place and time, and the residual of the heat equation there."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def temperature(self, x: Tensor, t: Tensor) -> Tensor:
        # Cold at both ends, and right at the start.
        inside: Tensor = x * (1.0 - x) * t * self.network(torch.stack([x, t])).squeeze()
        return torch.sin(torch.pi * x) + inside

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        x, t = points[:, 0], points[:, 1]
        by_time = vmap(grad(self.temperature, 1))(x, t)
        by_place_twice = vmap(grad(grad(self.temperature)))(x, t)
        return vmap(self.temperature)(x, t), by_time - CONDUCTIVITY * by_place_twice


def loss(output: tuple[Tensor, Tensor]) -> Tensor:
    return output[1].square().mean()


@click.command(help=(__doc__ or "").split("\n\n")[0])
@click.option("--steps", default=1500, show_default=True, help="Steps of training.")
@click.option("--width", default=32, show_default=True, help="Width of the network.")
@click.option("--batch-size", default=256, show_default=True, help="Points of a step.")
@click.option(
    "--error", default=0.01, show_default=True, help="Largest error of the temperature to reach; it begins at 1."
)
def main(steps: int, width: int, batch_size: int, error: float) -> None:
    torch.manual_seed(0)
    module = Rod(width)
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    batch = torch.rand(batch_size, 2), ()
    step = gradfuse.export_training_step(module, loss, batch, optimizer, dynamic_shapes=({0: "points"}, ()))
    session = gradfuse.TrainingSession(step)
    places = torch.cartesian_prod(torch.linspace(0, 1, 41), torch.linspace(0, 1, 21))
    truth = torch.exp(-CONDUCTIVITY * math.pi**2 * places[:, 1]) * torch.sin(torch.pi * places[:, 0])

    def largest() -> float:
        temperatures, _ = session.evaluate(places.numpy())
        return float((torch.from_numpy(temperatures) - truth).abs().max())

    before = largest()
    for index in range(steps):
        session.learning_rate = 3e-3 * (1.0 - index / steps)
        session.step(torch.rand(batch_size, 2).numpy(), ())
    after = largest()
    print(f"largest error of the temperature: {before:.4f} before training, {after:.4f} after")
    sys.exit(after > error)


if __name__ == "__main__":
    main()

"""WGAN-GP: a generator learns a ring of points from a critic whose gradients are kept near length 1.

The penalty is on the critic's gradients between real and generated points, which the module takes itself. Each of the
two networks has a step of its own; the generator's holds the critic as constants that its session replaces.

The exit status is 1 if fewer generated points than wanted are near the ring.
"""

from __future__ import annotations

import sys

import click
import torch
from torch import Tensor, nn

import gradfuse


def network(inputs: int, outputs: int, width: int) -> nn.Sequential:
    layers = nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2)
    return nn.Sequential(*layers, nn.Linear(width, outputs))


class Critic(nn.Module):
    """Scores of real points (N, 2) and generated ones (N, 2), and the penalty of the gradients between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.score = network(2, 1, width)

    def forward(self, real: Tensor, generated: Tensor, shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        between = (shares * real + (1.0 - shares) * generated).requires_grad_()
        (gradient,) = torch.autograd.grad(self.score(between).sum(), between, create_graph=True)
        penalty = (gradient.norm(dim=1) - 1.0).square().mean()
        return self.score(real), self.score(generated), penalty


def critic_loss(output: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    real, generated, penalty = output
    return generated.mean() - real.mean() + penalty


class Game(nn.Module):
    """A generator, and the scores that a critic, not trained here, gives to its points from noise (N, 2)."""

    def __init__(self, critic: Critic, width: int) -> None:
        super().__init__()
        self.generator = network(2, 2, width)
        self.score = critic.score

    def forward(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        points = self.generator(noise)
        return self.score(points), points


def ring(count: int) -> Tensor:
    angles = 2.0 * torch.pi * torch.rand(count)
    return torch.stack([angles.cos(), angles.sin()], 1)


@click.command(help=(__doc__ or "").split("\n\n")[0])
@click.option(
    "--steps", default=800, show_default=True, help="Updates of the generator, with three of the critic each."
)
@click.option("--width", default=64, show_default=True, help="Width of the networks.")
@click.option("--batch-size", default=128, show_default=True)
@click.option("--share", default=0.7, show_default=True, help="Share of the points to be within 0.2 of the ring.")
def main(steps: int, width: int, batch_size: int, share: float) -> None:
    torch.manual_seed(0)
    critic = Critic(width)
    game = Game(critic, width)
    batch = (ring(batch_size), torch.randn(batch_size, 2), torch.rand(batch_size, 1)), ()
    optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.0, 0.9))
    shapes = tuple({0: "batch"} for _ in batch[0]), ()
    of_critic = gradfuse.export_training_step(critic, critic_loss, batch, optimizer, dynamic_shapes=shapes)
    optimizer = torch.optim.Adam(game.generator.parameters(), lr=2e-3, betas=(0.0, 0.9))
    # The critic's parameters are inputs of this step, and stay as they are: they are not the optimizer's.
    of_game = gradfuse.export_training_step(
        game,
        lambda output: -output[0].mean(),
        (torch.randn(batch_size, 2), ()),
        optimizer,
        dynamic_shapes=({0: "batch"}, ()),
    )
    critics, generators = gradfuse.TrainingSession(of_critic), gradfuse.TrainingSession(of_game)

    def near() -> float:
        points = torch.from_numpy(generators.evaluate(torch.randn(2000, 2).numpy())[1])
        return float(((points.norm(dim=1) - 1.0).abs() < 0.2).float().mean())

    before = near()
    for _ in range(steps):
        for _ in range(3):
            _, generated = generators.evaluate(torch.randn(batch_size, 2).numpy())
            inputs = ring(batch_size).numpy(), generated, torch.rand(batch_size, 1).numpy()
            critics.step(inputs, ())
        generators.load_state_dict({**generators.state_dict(), **critics.state_dict()})
        generators.step(torch.randn(batch_size, 2).numpy(), ())
    after = near()
    print(f"near the ring: {before:.0%} of the points before training, {after:.0%} after")
    sys.exit(after < share)


if __name__ == "__main__":
    main()

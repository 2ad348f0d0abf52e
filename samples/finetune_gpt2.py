"""Train GPT-2, 124 million parameters, on real text in stock onnxruntime.

The text is the reference of the Python language that the standard library ships. Nothing is downloaded: the model has
random weights, and its tokens are learned from the text. With `--model FOLDER`, or a name that transformers knows, a
pretrained causal language model goes on from its own weights and tokens instead.

There are parameter groups, dropout, clipping and a schedule, the loss on held-out text before and after, a progress
bar, and a checkpoint on Ctrl-C from which the same command goes on. At the end the weights are in a folder for
`from_pretrained`. It takes 5.6 GiB of memory and about five minutes on two cores. In its 80 steps the loss on the text
left out falls from 11.0 to 7.2; a uniform guess among all tokens has 8.3. The exit status is 1 if it is above the
wanted one.
"""

from __future__ import annotations

import pathlib
import pydoc_data.topics
import resource
import sys
import time

import click
import numpy as np
import numpy.typing as npt
import running
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from rich.console import Console
from torch import Tensor, nn

import gradfuse

Ints = npt.NDArray[np.int64]


def fresh(text: str) -> tuple[transformers.PreTrainedModel, Ints]:
    """GPT-2 with random weights, and the tokens of a text by byte pairs that are frequent in it."""
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], vocab_size=4096, show_progress=False)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    return model, np.array(tokenizer.encode(text).ids)


def pretrained(name: str, text: str) -> tuple[transformers.PreTrainedModel, Ints]:
    """A model of `from_pretrained`, and the tokens of a text by its tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    return model, np.array(tokenizer(text)["input_ids"])


def next_token_loss(output: transformers.utils.ModelOutput, following: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), following.flatten())


def parameter_groups(module: nn.Module) -> list[dict[str, object]]:
    """Weight decay for matrices only, as is usual for GPTs."""
    parameters = list(module.parameters())
    return [
        {"params": [parameter for parameter in parameters if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in parameters if parameter.dim() <= 1], "weight_decay": 0.0},
    ]


@click.command(context_settings={"show_default": True})
@click.option("--model", "name", help="A pretrained model of transformers: a folder or a name; none: GPT-2, random.")
@click.option("--steps", default=80, type=click.IntRange(1), help="Steps of training.")
@click.option("--context", default=256, type=click.IntRange(2), help="Tokens of the piece of text in a step.")
@click.option("--rate", default=6e-4, help="The largest learning rate of AdamW.")
@click.option("--seed", default=0, help="Seed of everything that is drawn.")
@click.option("--loss", "wanted", default=7.5, type=click.FloatRange(0), help="Wanted loss on the text left out.")
@click.option("--folder", default="build/samples/gpt2", type=click.Path(file_okay=False, path_type=pathlib.Path))
def main(
    name: str | None, steps: int, context: int, rate: float, seed: int, wanted: float, folder: pathlib.Path
) -> None:
    """Train GPT-2 on Python's own documentation; exit 1 above the wanted loss."""
    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False, markup=False)
    torch.manual_seed(seed)
    text = "\n\n".join(pydoc_data.topics.topics.values())
    model, tokens = pretrained(name, text) if name else fresh(text)
    model.config.use_cache = False
    training, left_out = np.split(tokens, [len(tokens) * 9 // 10])
    size = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"{size / 1e6:.1f} million parameters; {len(training)} tokens to train on, {len(left_out)} left out")

    def piece(of: Ints, start: int) -> tuple[Ints, Ints]:
        return of[None, start : start + context], of[None, start + 1 : start + context + 1]

    def batch(index: int) -> tuple[Ints, Ints]:
        return piece(training, int(np.random.default_rng((seed, index)).integers(0, len(training) - context)))

    optimizer = torch.optim.AdamW(parameter_groups(model), lr=rate, betas=(0.9, 0.95))
    first, second = map(torch.from_numpy, batch(0))
    start = time.perf_counter()
    with console.status("exporting"):
        step = gradfuse.export_training_step(
            model.train(), next_token_loss, (first, second), optimizer, max_grad_norm=1.0
        )
    console.print(f"exported in {time.perf_counter() - start:.0f} s")
    session = gradfuse.TrainingSession(step)
    del step

    def left_out_loss() -> float:
        losses = []
        for begin in np.linspace(0, len(left_out) - context - 1, 8, dtype=np.int64):
            ids, following = piece(left_out, begin)
            (logits,) = torch.from_numpy(session.evaluate(ids))
            losses.append(F.cross_entropy(logits, torch.from_numpy(following[0])).item())
        return float(np.mean(losses))

    before = left_out_loss()
    console.print(f"loss on the text left out before training: {before:.3f}")
    (share,) = transformers.get_scheduler("cosine", optimizer, steps // 10, steps).lr_lambdas[:1]
    options = {"model": name, "steps": steps, "context": context, "rate": rate, "seed": seed}
    run = running.Training(session, steps, console, folder / "checkpoint.safetensors", options)
    start = time.perf_counter()
    for index in run:
        session.learning_rate = rate * share(index)
        run.losses.append(session.step(*batch(index)))
    console.print(f"trained {steps} steps in {time.perf_counter() - start:.0f} s, loss {run.losses[-1]:.3f}")
    console.print(running.plot(run.losses))
    run.forget()

    model.load_state_dict({key: torch.from_numpy(array) for key, array in session.state_dict().items()})
    model.save_pretrained(folder)
    after = left_out_loss()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    console.print(f"{folder} is written; loss on the text left out: {after:.3f}; memory at most {peak:.1f} GiB")
    if after > wanted:
        console.print(f"loss is {after:.3f}; expected at most {wanted:.3f}")
        sys.exit(1)


if __name__ == "__main__":
    main()

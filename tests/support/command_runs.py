"""Runs the command line in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gradfuse import cli

Run = Callable[..., tuple[int, str, str]]
"""Arguments -> exit code, standard output, standard error."""


def runner(capfd: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the command with some arguments."""

    def command(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = cli.run([str(argument) for argument in arguments])
        output, errors = capfd.readouterr()
        return code, output, errors

    return command

"""What the pages of docs/ show works, and their tables are complete."""

from __future__ import annotations

import re
from pathlib import Path

import click
import draw_fusion
import onnx
import operator_tables
import pytest

import gradfuse
from gradfuse import cli, custom_ops

ROOT = Path(__file__).parents[1]
USER_PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
COLUMN = 80
"""Characters that the site shows of a line of code without a scroll bar."""
OUTPUT = {("fusing.md", "text"), ("torch.md", "text")}
"""Blocks that may be wider: what `explain` prints, and schemas as torch parses them, each in one line."""


def text(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def headings(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    found = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target, anchor in set(re.findall(r"\]\(([^)\s#:]*)(?:#([^)\s]+))?\)", prose)):
        other = page if not target else (page.parent / target).resolve()
        assert other.exists(), target
        if anchor and page.name != "api.md" and other.name != "api.md":
            assert anchor in headings(other), f"{target}#{anchor}"


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: page.name)
def test_code_fits_the_column_of_the_site(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^\n((?:    \S.*\n)(?:    .*\n)*)", text, re.MULTILINE)
    blocks = [code for language, code in fences if (page.name, language) not in OUTPUT] + indented
    assert [line for block in blocks for line in block.splitlines() if len(line) > COLUMN] == []


def test_the_commands_run_and_the_picture_is_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = text("fusing.md")
    commands = re.findall(r"^    gradfuse (.+)$", page, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["explain", "fuse", "check", "expand", "ops", "info"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    exporting = example[: example.index("session =")].replace(
        "dynamic_shapes=shapes", "dynamic_shapes=shapes, fuse=False"
    )
    exec(exporting + 'step.save("step.onnx")', {})
    capsys.readouterr()
    output = {}
    for command in commands:
        assert cli.run(command.split()) == 0
        output[command] = capsys.readouterr().out
    (shown,) = re.findall(r"^```text\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert output["explain step.onnx"] == shown
    assert (tmp_path / "fused.onnx").is_file()
    for code in re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        exec(code, {})
    nodes = [len(onnx.load(name).graph.node) for name in ("step.onnx", "fused.onnx")]
    assert re.search(rf"^\| nodes of the step above, {nodes[0]} as exported\[\^1\] \| {nodes[1]} \|", readme, re.M)
    picture = draw_fusion.draw(onnx.load("step.onnx"))
    assert picture.count('class="node"') == 14
    assert re.findall(r"<text[^>]*>([^<]+)</text>", picture) == re.findall(
        r"<text[^>]*>([^<]+)</text>", text("fusion.svg")
    )


def test_the_table_of_warnings_is_complete() -> None:
    from gradfuse.passes.diagnosis.exporter_bugs import DETECTORS

    assert set(re.findall(r"^\| `([a-z]+-[a-z-]+)` \|", text("report.md"), re.MULTILINE)) == set(DETECTORS)


def test_the_pages_of_operators_are_complete() -> None:
    page = text("operators.md")
    assert set(re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \|$", page, re.MULTILINE)) == set(custom_ops.OPS)
    assert operator_tables.updated(page) == page, "run python tools/operator_tables.py"


def test_every_command_and_option_is_listed() -> None:
    page = text("cli.md")
    listed = set(re.findall(r"^\| `([a-z][a-z-]*)(?: [^`]+)?` \|", page, re.MULTILINE))
    commands = cli.commands.commands
    assert listed == set(commands)
    rows = {
        option: of
        for options, of in re.findall(r"^\| (`-[^|]+) \| ([^|]+) \|", page, re.MULTILINE)
        for option in re.findall(r"--[a-z0-9-]+", options)
    }
    for name, command in commands.items():
        for parameter in command.params:
            if isinstance(parameter, click.Option) and "--help" not in parameter.opts:
                (option,) = (opt for opt in parameter.opts if opt.startswith("--"))
                assert f"`{name}`" in rows[option] or "all but" in rows[option], (name, option)


def test_the_reference_has_every_public_name() -> None:
    page = text("api.md")
    described = set(re.findall(r"^::: gradfuse\.(\w+)", page, re.MULTILINE))
    assert set(gradfuse.__all__) - {"__version__"} <= described
    assert {name for name in gradfuse.passes.__all__ if f"gradfuse.passes.{name}" in page} >= {"Report", "FusePass"}

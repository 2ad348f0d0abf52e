"""What an operator is made of: its own files, its lines in the two tables, and its lines in generated tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

FILES = {
    "custom_ops/{stem}.py": "its ONNX schema, function body and PyTorch operator",
    "cpp_ext/include/gradfuse/ops/{stem}.h": "its arguments in C++",
    "cpp_ext/kernels/{stem}.cc": "the checks of its arguments",
    "cpp_ext/kernels/cpu/{stem}.cc": "its kernel for the CPU",
    "cpp_ext/kernels/cuda/{stem}.cu": "its kernel for CUDA",
    "cpp_ext/capi/{stem}.cc": "its functions in C",
    "cpp_ext/capi/include/aclnnop/aclnn_{stem}.h": "its header in C",
    "cpp_ext/tests/device/cases/{stem}.py": "its calls with results by numpy",
    "tests/support/operators/{stem}.py": "PyTorch's answer and its samples",
    "tests/custom_ops/test_{stem}.py": "tests of what its schema and body have of their own",
    "tests/cpp_ext/test_{stem}.py": "tests of what its kernels have of their own",
}
"""The files of every operator, by their paths, with what they are for."""

TABLES = {
    "custom_ops/__init__.py": r"\b{stem}\b",
    "cpp_ext/include/gradfuse/op_table.h": r"\b{name}Args\b",
}
"""Where an operator is added by hand: what must be found there."""


def missing_parts(root: Path, name: str, stem: str) -> Iterator[str]:
    """What an operator lacks in a copy of the project: a line for each part, with its path and what it is."""
    for path, content in FILES.items():
        if not (root / path.format(stem=stem)).is_file():
            yield f"{path.format(stem=stem)}: {content}"
    for path, pattern in TABLES.items():
        text = (root / path).read_text(encoding="utf-8") if (root / path).is_file() else ""
        if not re.search(pattern.format(stem=stem, name=name), text):
            yield f"{path}: its line in the table"
    pages = [root / "README.md", *(root / "docs").glob("*.md")]
    listed = "\n".join(path.read_text(encoding="utf-8") for path in pages if path.is_file())
    if not re.search(rf"^\| `{name}` \|", listed, re.MULTILINE):
        yield "README.md or docs/: its row in the table of operators, which tools/operator_tables.py writes"


def stray_files(root: Path, stems: set[str]) -> list[str]:
    """Files in folders of operators alone that belong to none."""
    folders = (
        "cpp_ext/include/gradfuse/ops/*.h",
        "cpp_ext/capi/include/aclnnop/*.h",
        "cpp_ext/tests/device/cases/*.py",
    )
    paths = [path for pattern in folders for path in root.glob(pattern) if path.stem != "__init__"]
    return sorted(str(path.relative_to(root)) for path in paths if path.stem.removeprefix("aclnn_") not in stems)

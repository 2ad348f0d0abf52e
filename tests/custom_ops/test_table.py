"""The table of operators is complete: every file that an operator needs is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from completeness import FILES, TABLES, missing_parts, stray_files

import gradfuse.custom_ops
from gradfuse.custom_ops import DOMAIN, OPS, VERSION, Operator
from gradfuse.custom_ops.operator import attribute_value

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import operator_tables

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("operator", OPS.values(), ids=lambda operator: operator.stem)
def test_every_operator_is_complete(operator: Operator) -> None:
    assert list(missing_parts(ROOT, operator.name, operator.stem)) == []


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    missing = list(missing_parts(tmp_path, "SquareGrad", "square_grad"))
    assert len(missing) == len(FILES) + len(TABLES) + 1
    for path in FILES:
        (tmp_path / path.format(stem="square_grad")).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path.format(stem="square_grad")).touch()
    (tmp_path / "custom_ops/__init__.py").write_text("from gradfuse.custom_ops import square_grad\n")
    (tmp_path / "README.md").write_text("| `SquareGrad` | the square | |\n")
    expected = ["cpp_ext/include/gradfuse/op_table.h: its line in the table"]
    assert list(missing_parts(tmp_path, "SquareGrad", "square_grad")) == expected


def test_no_file_is_left_of_an_operator_that_is_gone() -> None:
    assert stray_files(ROOT, {operator.stem for operator in OPS.values()}) == []


def test_the_tables_of_operators_in_the_pages_are_up_to_date() -> None:
    pages = [path.read_text(encoding="utf-8") for path in operator_tables.pages()]
    assert set().union(*map(operator_tables.tables_in, pages)) == set(operator_tables.TABLES)
    command = [sys.executable, operator_tables.__file__, "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("operator", OPS.values(), ids=lambda operator: operator.stem)
def test_the_stem_is_the_name_in_snake_case(operator: Operator) -> None:
    assert re.sub(r"(?<!^)(?=[A-Z])", "_", operator.name).lower() == operator.stem


@pytest.mark.parametrize("operator", OPS.values(), ids=lambda operator: operator.stem)
def test_the_schema_is_registered_and_documented(operator: Operator) -> None:
    schema = onnx.defs.get_schema(operator.name, VERSION, DOMAIN)
    assert schema.has_type_and_shape_inference_function
    assert schema.doc == operator.doc
    assert [(i.name, i.type_str) for i in schema.inputs] == [(i.name, i.type) for i in operator.inputs]
    assert [o.name for o in schema.outputs] == [o.name for o in operator.outputs]
    for attribute in operator.attributes:
        default = attribute_value(schema.attributes[attribute.name].default_value)
        assert default == (np.float32(attribute.default) if isinstance(attribute.default, float) else attribute.default)
    assert all(i.doc for i in operator.inputs) and all(o.doc for o in operator.outputs)
    assert all(a.doc for a in operator.attributes)


def test_the_table_is_keyed_by_name_and_cannot_be_changed() -> None:
    assert all(operator.name == name for name, operator in OPS.items())
    with pytest.raises(TypeError):
        OPS["Other"] = OPS["CtcLoss"]  # type: ignore[index]


def test_importing_twice_is_harmless_and_does_not_import_onnxscript() -> None:
    program = (
        "import sys, importlib, gradfuse.custom_ops as ops; importlib.reload(ops); "
        "sys.exit('onnxscript' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_onnxscript_functions_may_use_the_opset() -> None:
    opset = gradfuse.custom_ops.opset
    assert (opset.domain, opset.version) == (DOMAIN, VERSION)
    assert opset is gradfuse.custom_ops.opset
    assert "MseLossBackward" in opset


def test_the_schemas_are_gone_before_python_is() -> None:
    """Their functions are Python's: onnx 1.19 hangs or crashes when it frees them after the interpreter."""
    code = f"""
import atexit
import onnx
atexit.register(lambda: print(onnx.defs.has("MseLossBackward", {VERSION}, "{DOMAIN}")))
import gradfuse.custom_ops
print(onnx.defs.has("MseLossBackward", {VERSION}, "{DOMAIN}"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]

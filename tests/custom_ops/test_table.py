from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

import gradfuse.custom_ops
from gradfuse.custom_ops import DOMAIN, OPS, VERSION, Operator

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_A_RULE = {"ctc_loss", "ctc_loss_backward"}


@pytest.mark.parametrize("operator", OPS.values(), ids=lambda operator: operator.stem)
def test_every_operator_has_its_files(operator: Operator) -> None:
    stem = operator.stem
    wanted = [
        f"custom_ops/{stem}.py",
        f"cpp_ext/kernels/cpu/{stem}.cc",
        f"tests/custom_ops/test_{stem}.py",
        f"tests/cpp_ext/test_{stem}.py",
    ]
    if stem not in WITHOUT_A_RULE:
        wanted.append(f"passes/{stem}.py")
    assert [path for path in wanted if not (ROOT / path).is_file()] == []


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
        default = onnx.helper.get_attribute_value(schema.attributes[attribute.name].default_value)
        assert default == (attribute.default.encode() if isinstance(attribute.default, str) else attribute.default)
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

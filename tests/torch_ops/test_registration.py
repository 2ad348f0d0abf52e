"""When torch.ops.aclnn is there, and that registering it can be repeated. In processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

REGISTERED = "all(hasattr(torch.ops.aclnn, operator.stem) for operator in OPS.values())"


def run(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_gradfuse_registers_where_torch_is_there_already_and_may_be_repeated() -> None:
    run(f"""
import gc, importlib, sys
import torch
import gradfuse
from gradfuse.custom_ops import OPS
assert {REGISTERED}
for module in (gradfuse, gradfuse.torch, gradfuse.torch.ops):
    importlib.reload(module)
for name in [name for name in sys.modules if name.startswith("gradfuse")]:
    del sys.modules[name]
del gradfuse, module, OPS
gc.collect()
import gradfuse
from gradfuse.custom_ops import OPS
assert {REGISTERED}
x = torch.ones(2)
assert torch.equal(torch.ops.aclnn.mse_loss_backward(x, x, 0 * x), x)
""")


def test_importing_gradfuse_torch_registers_for_the_one_device_of_the_program() -> None:
    output = run(
        f"""
import gradfuse
import torch
assert not hasattr(torch.ops.aclnn, "ctc_loss")
import gradfuse.torch
from gradfuse.custom_ops import OPS
assert {REGISTERED}
x = torch.ones(2)
try:
    torch.ops.aclnn.mse_loss_backward(x, x, x)
except gradfuse.ArgumentError as error:
    print(error)
""",
        GRADFUSE_DEVICE="cuda",
    )
    assert output == "aclnn::mse_loss_backward: grad_output is on cpu; expected cuda, the device of GRADFUSE_DEVICE\n"

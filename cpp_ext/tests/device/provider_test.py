"""Runs every op by the execution provider in onnxruntime, against numpy in float64: a part of `make gpu-test`.

    provider_test.py [--simt] [--only OP]

On every GPU that the provider offers, each case in a session of its own, twice (the bits must be the same). Needs
numpy, nvcc, the headers of onnxruntime, and onnx and onnxruntime 1.24 or newer in this Python; where one of them is
missing it says so, and nothing has failed. With --simt it needs no GPU.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import device_library
from case import Case
from cases import cases

NAME = "GradfuseCudaExecutionProvider"
ONNX_TYPES = {"float32": 1, "float16": 10, "bfloat16": 16, "float64": 11, "int32": 6, "int64": 7, "bool": 9}


def model_of(case: Case) -> bytes:
    """A model of one node, whose outputs are widened where numpy lacks their type."""
    from onnx import helper

    names = ["" if values is None else f"in{index}" for index, values in enumerate(case.inputs)]
    inputs = [
        helper.make_tensor_value_info(name, ONNX_TYPES[values.dtype], list(values.bits.shape))
        for name, values in zip(names, case.inputs, strict=True)
        if values is not None
    ]
    outputs = [f"out{index}" for index in range(len(case.expected))]
    nodes = [helper.make_node(case.op, names, outputs, "node", domain="aclnn", **case.attributes)]
    infos = []
    for name, dtype in zip(outputs, case.dtypes(), strict=True):
        if dtype == "bfloat16":
            nodes.append(helper.make_node("Cast", [name], [f"wide_{name}"], to=ONNX_TYPES["float32"]))
            name, dtype = f"wide_{name}", "float32"
        infos.append(helper.make_tensor_value_info(name, ONNX_TYPES[dtype], None))
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("aclnn", 1)]
    graph = helper.make_graph(nodes, "case", inputs, infos)
    content: bytes = helper.make_model(graph, opset_imports=imports, ir_version=9).SerializeToString()
    return content


def check(case: Case, gpu: Any) -> str:
    """Run a case and compare: "" where all is well, else what is wrong."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what fails is told here
    options.add_provider_for_devices([gpu], {})
    session = onnxruntime.InferenceSession(model_of(case), options, enable_fallback=0)
    make = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type
    feeds = {
        f"in{index}": make(values.bits, ONNX_TYPES[values.dtype])
        for index, values in enumerate(case.inputs)
        if values is not None
    }
    first = session.run(None, feeds)
    try:
        second = session.run(None, feeds)
    except Exception as error:
        if case.fault == 0 or "out of range in an earlier run" not in str(error):
            return " ".join(str(error).split())
    else:
        if case.fault != 0:
            return f"does not report input {case.fault} as out of range"
        if any(one.tobytes() != two.tobytes() for one, two in zip(first, second, strict=True)):
            return "gives other bits the second time"
    return case.problem([out.astype("float64") for out in first])


def run(variant: str, only: str | None) -> int:
    """Check all small cases with a variant of the library; gives the number that failed."""
    try:
        importlib.import_module("onnx")  # model_of needs it
        import onnxruntime

        register = onnxruntime.register_execution_provider_library
    except (ImportError, AttributeError) as error:
        print(f"the execution provider was not run: {error}")
        return 0
    try:
        library = device_library.build(variant)
    except device_library.BuildError as error:
        print(f"the execution provider was not run: {error}")
        return 0
    register(NAME, str(library))
    gpus = [device for device in onnxruntime.get_ep_devices() if device.ep_name == NAME]
    if not gpus:
        print("the execution provider offers no device: see the warning of onnxruntime")
        return 1
    total = 0
    for gpu in gpus:
        counts = [0, 0]
        for case in cases(large=False, only=only):
            try:
                problem = check(case, gpu)
            except Exception as error:
                problem = " ".join(str(error).split())
            counts[bool(problem)] += 1
            if problem:
                print(f"FAILED {case.op} {case.dtype} {case.name} in onnxruntime: {problem}", flush=True)
        where = f"{gpu.ep_metadata['device_name']} {gpu.ep_metadata['cuda_device']}"
        print(f"onnxruntime {onnxruntime.__version__} on {where}: {counts[0]} passed {counts[1]} failed", flush=True)
        total += counts[1]
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simt", action="store_true", help="on the virtual GPUs of the tests")
    parser.add_argument("--only", metavar="OP", help="one op only")
    options = parser.parse_args()
    return 1 if run("simt-ort" if options.simt else "cuda-ort", options.only) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Tests the CUDA kernels on a device against numpy in float64: `make gpu-test`.

    gpu_test.py [--simt | --simt-sanitized] [--small] [--only OP] [--no-tools]

Every op in every type, twice (the bits must be the same), from aligned and from odd addresses, with memory poisoned
that an op must write. The check of the C API. Then compute-sanitizer's memcheck and racecheck over the small sizes,
where it is there, and the same sizes by the execution provider in onnxruntime, where that is there (provider_test.py).
Needs numpy and nvcc; with --simt or --simt-sanitized a C++ compiler, and no GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import capi_ops
import device_library
import provider_test
from case import Case
from cases import cases
from device import Device, DeviceError, Operand


def check(device: Device, case: Case, shift: int) -> str:
    """Run a case and compare: "" where all is well, else what is wrong."""
    inputs: list[Operand | None] = []
    for described, values in zip_longest(device.signatures[case.op]["inputs"], case.inputs):
        if values is None:
            inputs.append(None)
        elif described["read_by_host"]:
            inputs.append(Operand(values.bits, values.dtype, values.bits.shape))
        else:
            inputs.append(device.upload(values, shift=shift))
    results = []
    for _ in range(2):
        outputs = [
            device.empty(exact.shape, dtype, shift=shift)
            for exact, dtype in zip(case.expected, case.dtypes(), strict=True)
        ]
        call = device.prepare(case.op, [*inputs, *outputs], **case.attributes)
        call.workspace.fill(0xFF)
        call.run()
        results.append([device.download(output) for output in outputs])
        if (fault := device.fault_of(call)) != case.fault:
            return f"reports input {fault} as out of range; expected {case.fault}"
    for first, second in zip(*results, strict=True):
        if first.bits.tobytes() != second.bits.tobytes():
            return "gives other bits the second time"
    return case.problem([result.wide() for result in results[0]])


def run(device: Device, *, large: bool, only: str | None) -> int:
    """Check all cases; gives the number that failed."""
    counts: dict[tuple[str, str], list[int]] = {}
    for case in cases(large=large, only=only):
        for shift in (0, 1):
            if shift and large and sum(v.bits.size for v in case.inputs if v is not None) > 10**7:
                continue
            try:
                problem = check(device, case, shift)
            except DeviceError as error:
                problem = str(error)
            count = counts.setdefault((case.op, case.dtype), [0, 0])
            count[bool(problem)] += 1
            if problem:
                print(f"FAILED {case.op} {case.dtype} {case.name}{', odd addresses' * shift}: {problem}", flush=True)
    for (op, dtype), (passed, failed) in counts.items():
        print(f"{op:28} {dtype:9} {passed:4} passed {failed:4} failed")
    return sum(failed for _, failed in counts.values())


def check_c_api(library: Path, signatures: Mapping[str, Any]) -> int:
    """Build and run the program that makes mistakes with the C API; gives 1 where not all are found."""
    root = Path(__file__).resolve().parents[2]
    capi_ops.write(library.parent, signatures)
    program = library.parent / "capi_check"
    command = [os.environ.get("CXX", "c++"), "-std=c++17", str(root / "tests" / "capi_check.cc")]
    command += [f"-I{root / 'capi' / 'include'}", f"-I{library.parent}", str(library)]
    command += [f"-Wl,-rpath,{library.parent}", "-o", str(program)]
    subprocess.run(command, check=True)
    code = subprocess.run([program], env={**os.environ, "GRADFUSE_DEVICE": "cuda"}, check=False).returncode
    print(f"C API: {'passed' if code == 0 else f'failed with {code}'}")
    return int(code != 0)


def sanitize(only: str | None) -> int:
    """Run the small cases under compute-sanitizer; gives the number of tools that found something."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        print("compute-sanitizer is not on the PATH: memcheck and racecheck were not run")
        return 0
    failed = 0
    for name in ("memcheck", "racecheck"):
        command = [tool, "--tool", name, "--error-exitcode", "9", sys.executable, __file__, "--small", "--no-tools"]
        code = subprocess.run([*command, *(["--only", only] if only else [])], check=False).returncode
        print(f"compute-sanitizer {name}: {'clean' if code == 0 else f'failed with {code}'}")
        failed += code != 0
    return failed


def run_again_with_sanitizers() -> int:
    """Run this program in a process that has the sanitizers' libraries from the start, as they must be."""
    compiler = os.environ.get("CXX", "c++")
    libraries = []
    for name in ("libasan.so", "libubsan.so"):
        found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        libraries.append(found.stdout.strip())
    options = "detect_leaks=0:detect_stack_use_after_return=0"  # Python's own leaks are of no interest
    environment = {**os.environ, "LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": options}
    return subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simt", action="store_true", help="on the SIMT machine of the tests")
    parser.add_argument("--simt-sanitized", action="store_true", help="the same, compiled with sanitizers")
    parser.add_argument("--small", action="store_true", help="small sizes only")
    parser.add_argument("--only", metavar="OP", help="one op only")
    parser.add_argument("--no-tools", action="store_true", help="without compute-sanitizer")
    options = parser.parse_args()
    if options.simt_sanitized and "libasan" not in os.environ.get("LD_PRELOAD", ""):
        return run_again_with_sanitizers()
    variant = "simt-sanitized" if options.simt_sanitized else "simt" if options.simt else "cuda"
    try:
        library = device_library.build(variant)
        device = Device(library)
    except (device_library.BuildError, DeviceError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(device.name, flush=True)
    on_gpu = variant == "cuda"
    failed = run(device, large=on_gpu and not options.small, only=options.only)
    if on_gpu and options.only is None:
        failed += check_c_api(library, device.signatures)
    if on_gpu and not options.no_tools:
        failed += sanitize(options.only)
        failed += provider_test.run("cuda-ort", options.only)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

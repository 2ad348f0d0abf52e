"""Programs that use the C API: the sample of the original, our own, and those that look for mistakes in it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from cpp_ext.single_node import described

import gradfuse
from gradfuse.custom_ops import OPS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cpp_ext" / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cpp_ext" / "tests" / "device"))
import capi_ops
import device_library

ROOT = Path(__file__).resolve().parents[2]
CPP_EXT = ROOT / "cpp_ext"
DESCRIPTIONS = ROOT.parent / "shared" / "spec" / "ops-source"

STRICT = ["-pedantic", "-Wall", "-Wextra", "-Werror"]
SAMPLES = {
    "cross_entropy_loss_grad": "-0.250000 0.125000 0.125000\n0.000000 0.000000 0.000000\n0.125000 0.250000 -0.375000\n",
    "scaled_masked_softmax_backward": "-0.187500 0.031250 0.156250\n-0.125000 0.125000 0.000000\n",
    "grouped_bias_add_grad": "3.000000 30.000000\n0.000000 0.000000\n12.000000 120.000000\n3.000000 30.000000\n"
    "7.000000 70.000000\n",
    "ctc_loss_backward": "0.287682\n0.166667 -0.166667\n0.166667 -0.166667\n",
}
"""What the samples print; their comments tell where the numbers come from."""


def include() -> Path:
    return Path(gradfuse.get_include())


@cache
def compiler(language: str) -> str:
    name, variable = ("cc", "CC") if language == "c" else ("c++", "CXX")
    path = shutil.which(os.environ.get(variable, name))
    if path is None:
        pytest.skip(f"no compiler of {language}")
    return path


def compile_program(
    source: Path, folder: Path, *options: str, library: Path | None = None, headers: bool = True
) -> Path:
    """Compile and link a program against the installed library, or another one."""
    library = library or Path(gradfuse.get_aclnn_library_path())
    program = folder / source.stem
    command = [compiler("c" if source.suffix == ".c" else "c++"), *options, str(source), "-o", str(program)]
    if source.name == "capi_check.cc":
        capi_ops.write(folder, described())
    if headers:
        command += [f"-I{include()}", f"-I{folder}", str(library), f"-Wl,-rpath,{library.parent}", "-pthread"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return program


def output_of(program: Path, *arguments: str, device: str = "cpu", wrapper: tuple[str, ...] = (), **env: str) -> str:
    """What a program prints that succeeds."""
    environment = {**os.environ, "GRADFUSE_DEVICE": device, **env}
    command = [*wrapper, str(program), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_sample_of_the_original_compiles_unchanged_and_prints_its_result(tmp_path: Path) -> None:
    description = DESCRIPTIONS / "aclnnMseLossBackward.txt"
    if not description.is_file():
        pytest.skip("the descriptions of the original are not here")
    text = description.read_text(encoding="utf-8")
    source = tmp_path / "sample.cpp"
    source.write_text(text[text.index("#include <iostream>") :], encoding="utf-8")
    printed = output_of(compile_program(source, tmp_path, "-std=c++11"))
    values = re.findall(r"^result\[\d\] is: (\S+)$", printed, re.MULTILINE)
    assert [float(value) for value in values] == [0, 0, 1, 3]


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_c_and_print_what_is_known(name: str, tmp_path: Path) -> None:
    source = ROOT / "samples" / "aclnn" / f"{name}.c"
    assert output_of(compile_program(source, tmp_path, "-std=c11", *STRICT)) == SAMPLES[name]


@pytest.mark.parametrize("standard", ("c11", "c++11"))
def test_every_header_stands_alone(standard: str, tmp_path: Path) -> None:
    headers = sorted(include().rglob("*.h"))
    assert len(headers) == 1 + len(OPS)
    source = tmp_path / ("source.c" if standard == "c11" else "source.cc")
    for header in headers:
        source.write_text(f'#include "{header.relative_to(include())}"\n', encoding="utf-8")
        language = "c" if standard == "c11" else "c++"
        command = [compiler(language), f"-std={standard}", *STRICT, "-fsyntax-only", f"-I{include()}", str(source)]
        subprocess.run(command, check=True)


def functions_in(text: str) -> dict[str, str]:
    """Declared functions, by name, each in one line without spaces that do not matter."""
    found = re.findall(r"^\w[\w *]*?\b(acl\w+)\(([^)]*)\);?$", text.replace(",\n", ","), re.MULTILINE)
    return {name: re.sub(r"\s*([*,])\s*", r"\1", re.sub(r"\s+", " ", arguments.strip())) for name, arguments in found}


def declared() -> dict[str, str]:
    return {k: v for path in include().rglob("*.h") for k, v in functions_in(path.read_text(encoding="utf-8")).items()}


def test_functions_are_those_of_the_descriptions_argument_for_argument() -> None:
    if not DESCRIPTIONS.is_dir():
        pytest.skip("the descriptions of the original are not here")
    originals: dict[str, str] = {}
    for path in DESCRIPTIONS.glob("*.txt"):
        prototypes = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("aclnnStatus ")]
        originals.update(functions_in("\n".join(prototypes)))
    assert len(originals) == 10
    ours = declared()
    assert {name: ours[name] for name in originals} == originals


def test_every_operator_is_there() -> None:
    named = {name.removeprefix("aclnn") for name in declared() if name.startswith("aclnn")}
    assert named == {f"{op}{phase}" for op in OPS for phase in ("GetWorkspaceSize", "")}


def test_the_library_exports_what_the_headers_declare() -> None:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("no nm")
    command = [nm, "-D", "--defined-only", gradfuse.get_aclnn_library_path()]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {line.split()[-1] for line in lines} == set(declared())


PROJECT = """
cmake_minimum_required(VERSION 3.18)
project(client LANGUAGES C)
find_package(gradfuse_aclnn REQUIRED)
add_executable(client {source})
target_link_libraries(client PRIVATE gradfuse::aclnn)
"""


def test_cmake_finds_the_package(tmp_path: Path) -> None:
    cmake = shutil.which("cmake", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if cmake is None:
        pytest.skip("no cmake")
    compiler("c")
    source = ROOT / "samples" / "aclnn" / "grouped_bias_add_grad.c"
    (tmp_path / "CMakeLists.txt").write_text(PROJECT.format(source=source), encoding="utf-8")
    prefix = Path(gradfuse.get_aclnn_library_path()).parents[1]
    build = tmp_path / "build"
    configure = [cmake, "-S", str(tmp_path), "-B", str(build), f"-DCMAKE_PREFIX_PATH={prefix}"]
    for command in (configure, [cmake, "--build", str(build)]):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
    assert output_of(build / "client") == SAMPLES["grouped_bias_add_grad"]


def test_pkg_config_finds_the_package(tmp_path: Path) -> None:
    tool = shutil.which("pkg-config")
    if tool is None:
        pytest.skip("no pkg-config")
    library = Path(gradfuse.get_aclnn_library_path())
    command = [tool, "--cflags", "--libs", "gradfuse_aclnn"]
    environment = {**os.environ, "PKG_CONFIG_PATH": str(library.parent / "pkgconfig")}
    flags = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.split()
    version = subprocess.run([*command[:1], "--modversion", command[-1]], capture_output=True, text=True,
                             check=True, env=environment).stdout.strip()  # fmt: skip
    assert version == gradfuse.__version__
    source = ROOT / "samples" / "aclnn" / "grouped_bias_add_grad.c"
    program = tmp_path / "client"
    subprocess.run([compiler("c"), str(source), "-o", str(program), *flags], check=True)
    assert output_of(program, LD_LIBRARY_PATH=str(library.parent)) == SAMPLES["grouped_bias_add_grad"]


@pytest.fixture(scope="module")
def check_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_program(CPP_EXT / "tests" / "capi_check.cc", tmp_path_factory.mktemp("check"), "-std=c++17", "-g1")


def test_mistakes_views_and_order_with_any_number_of_threads(check_program: Path) -> None:
    outputs = {output_of(check_program, GRADFUSE_NUM_THREADS=threads) for threads in ("1", "2", "7", "0", "many")}
    (output,) = outputs  # the same bits
    assert output.endswith("\n0 failures\n")


@pytest.mark.long
def test_valgrind_finds_nothing(check_program: Path) -> None:
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        pytest.skip("no valgrind")
    leaks = ("--leak-check=full", "--show-leak-kinds=definite", "--errors-for-leak-kinds=definite")
    output = output_of(check_program, wrapper=(valgrind, "-q", "--error-exitcode=9", *leaks), GRADFUSE_NUM_THREADS="2")
    assert output.endswith("\n0 failures\n")


@pytest.mark.parametrize("argument", ("", "fork"))
def test_many_threads_and_forks(argument: str, tmp_path: Path) -> None:
    program = compile_program(CPP_EXT / "tests" / "capi_threads.cc", tmp_path, "-std=c++17", "-g1")
    assert output_of(program, argument, GRADFUSE_NUM_THREADS="3") == "0 failures\n"


def sanitized(variant: str, source: str, folder: Path) -> Path:
    compiler("c++")
    library = device_library.build(variant)
    options = ["-std=c++17", "-g1", *device_library.SANITIZERS[variant]]
    return compile_program(CPP_EXT / "tests" / source, folder, *options, library=library)


@pytest.mark.slow
def test_the_address_and_undefined_behaviour_sanitizers_find_nothing(tmp_path: Path) -> None:
    """On the CPU, and with the CUDA kernels on the host. In the suite valgrind runs those of the CPU."""
    program = sanitized("simt-sanitized", "capi_check.cc", tmp_path)
    for device in ("cpu", "cuda"):
        assert output_of(program, device=device, GRADFUSE_NUM_THREADS="3").endswith("\n0 failures\n")


@pytest.mark.long
@pytest.mark.parametrize("source", ("capi_threads.cc", "capi_check.cc"))
def test_the_thread_sanitizer_finds_nothing(source: str, tmp_path: Path) -> None:
    program = sanitized("thread-sanitized", source, tmp_path)
    assert output_of(program, GRADFUSE_NUM_THREADS="3").endswith("0 failures\n")


def test_what_a_call_costs_can_be_measured(tmp_path: Path) -> None:
    program = compile_program(ROOT / "benchmarks" / "aclnn_overhead.c", tmp_path, "-std=gnu11", "-O2", *STRICT)
    assert output_of(program).startswith("both phases on one element: ")


@pytest.mark.parametrize(
    "device, reason",
    [
        ("gpu", "GRADFUSE_DEVICE is 'gpu'; expected 'cpu' or 'cuda'"),
        ("cuda", "GRADFUSE_DEVICE is 'cuda', but "),
    ],
)
def test_a_device_that_is_not_there_is_an_error(device: str, reason: str, check_program: Path) -> None:
    result = subprocess.run(
        [check_program], capture_output=True, text=True, check=False, env={**os.environ, "GRADFUSE_DEVICE": device}
    )
    if device == "cuda" and result.returncode == 0:
        pytest.skip("there is a GPU")
    assert f"the last error is: aclInit: {reason}" in result.stdout

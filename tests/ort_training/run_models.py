"""Run models in onnxruntime-training 1.19.2.

Usage: .venv-ort-training/bin/python tests/ort_training/run_models.py FOLDER

Runs each FOLDER/NAME.onnx on the inputs in FOLDER/NAME.npz, and writes its outputs to FOLDER/NAME.outputs.npz.
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime

options = onnxruntime.SessionOptions()
options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
for path in Path(sys.argv[1]).glob("*.onnx"):
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    feeds = dict(np.load(path.with_suffix(".npz")))
    np.savez(path.with_suffix(".outputs.npz"), **dict(zip(names, session.run(names, feeds), strict=True)))

"""Settings of every test run."""

from __future__ import annotations

import os

import hypothesis

# Tests run in as many processes as there are cores already; onnxruntime's threads are set where they are tested.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Under continuous integration the same examples run every time; elsewhere new ones are found. No test is timed.
hypothesis.settings.register_profile(
    "gradfuse", deadline=None, derandomize=os.environ.get("CI") == "true", print_blob=True
)
hypothesis.settings.load_profile("gradfuse")

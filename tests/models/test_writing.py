"""`writing`: external data goes along, and what fails leaves everything as it was."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import small_models

from gradfuse import ModelError
from gradfuse.models import reading, tensors, writing


def test_external_data_stays_external_and_whole_when_saved_elsewhere(tmp_path: Path) -> None:
    source = small_models.save_with_external_data(small_models.forward(500), tmp_path / "model.onnx")
    target = tmp_path / "out" / "copy.onnx"
    target.parent.mkdir()
    writing.save(reading.load(source).ir, target)
    assert sorted(os.listdir(target.parent)) == ["copy.onnx", "copy.onnx.data"]
    source.unlink()
    (tmp_path / "weights.bin").unlink()
    assert small_models.same_graph(onnx.load(target), small_models.forward(500))


def test_saving_in_place_keeps_the_data_files(tmp_path: Path) -> None:
    path = small_models.save_with_external_data(small_models.forward(), tmp_path / "model.onnx")
    before = os.stat(tmp_path / "weights.bin")
    writing.save(reading.load(path).ir, path, keep_references=True)
    assert os.stat(tmp_path / "weights.bin").st_mtime_ns == before.st_mtime_ns
    assert sorted(os.listdir(tmp_path)) == ["model.onnx", "weights.bin"]
    assert small_models.same_graph(onnx.load(path), small_models.forward())


def test_external_tensors_of_attributes_move_along(tmp_path: Path) -> None:
    model = small_models.forward()
    weights = model.graph.initializer.pop(1)
    assert weights.name == "w"
    model.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["w"], value=weights))
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="c.bin", convert_attribute=True)
    loaded = reading.load(tmp_path / "model.onnx")
    (tmp_path / "out").mkdir()
    writing.save(loaded.ir, tmp_path / "out" / "copy.onnx")
    onnx.checker.check_model(tmp_path / "out" / "copy.onnx")
    assert np.array_equal(
        onnx.numpy_helper.to_array(onnx.load(tmp_path / "out" / "copy.onnx").graph.node[0].attribute[0].t),
        onnx.numpy_helper.to_array(weights),
    )


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("fails", ["os.replace", "onnx_ir.save"])
def test_failed_write_leaves_what_was_there(
    external: bool, fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source.onnx"
    if external:
        small_models.save_with_external_data(small_models.forward(500), source)
    else:
        onnx.save(small_models.forward(), source)
    target = tmp_path / "out" / "model.onnx"
    target.parent.mkdir()
    small_models.save_with_external_data(small_models.forward(7), target, "model.onnx.data")
    before = {name: (target.parent / name).read_bytes() for name in os.listdir(target.parent)}
    loaded = reading.load(source).ir

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    real_replace = os.replace
    if fails == "os.replace":
        # The model is renamed last; renames that undo must still work.
        monkeypatch.setattr(os, "replace", lambda a, b: fail() if str(b).endswith("model.onnx") else real_replace(a, b))
    else:
        monkeypatch.setattr(ir, "save", fail)
    with pytest.raises(ModelError, match=r"model\.onnx: cannot write the model: No space left on device"):
        writing.save(loaded, target)
    monkeypatch.undo()
    assert {name: (target.parent / name).read_bytes() for name in os.listdir(target.parent)} == before
    assert sorted(before) == ["model.onnx", "model.onnx.data"]


def test_a_folder_that_does_not_exist_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot write the model: No such file or directory$"):
        writing.save(reading.load(small_models.forward()).ir, tmp_path / "nowhere" / "model.onnx")


def test_saving_follows_links_and_keeps_the_mode(tmp_path: Path) -> None:
    real, link = tmp_path / "real.onnx", tmp_path / "link.onnx"
    onnx.save(small_models.cross_entropy(), real)
    real.chmod(0o640)
    link.symlink_to(real)
    writing.save(reading.load(small_models.forward()).ir, link)
    assert link.is_symlink() and small_models.same_graph(onnx.load(real), small_models.forward())
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


def test_a_model_beyond_one_message_is_saved_beside_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "PROTOBUF_LIMIT", 2**27 + 4000)
    model = reading.load(small_models.forward(500)).ir
    assert not tensors.fits_one_message(model)
    writing.save(model, tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx.data").stat().st_size == 4 * 500 * 4
    assert small_models.same_graph(onnx.load(tmp_path / "model.onnx"), small_models.forward(500))
    loaded = reading.load(tmp_path / "model.onnx")
    restored = loaded.restore(loaded.ir)
    assert any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in restored.graph.initializer)

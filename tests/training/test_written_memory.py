"""What writing takes of memory: nothing beyond the training. Each test measures a process."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxfit import OutOfMemoryError, Trainer
from onnxfit import trainer as trainer_module
from onnxfit.callbacks import BackupAndRestore, Callback, ModelCheckpoint, TensorBoard
from onnxfit.errors import SettingError, out_of_memory_errors
from onnxfit.graph import tensors
from tests import models

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="/proc tells what a process has"
)

LAYERS, WIDTH = 16, 1024
MEGABYTES = 4 * LAYERS * WIDTH * WIDTH / 2**20
# A model of 64 MB counts as one above 512 MB, whose returned model has no copy of the weights.
PROGRAM = """
import resource, sys
from pathlib import Path
import numpy as np, onnxfit
from onnxfit.callbacks import *
from onnxfit.graph import tensors

def memory(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024

path, folder = sys.argv[1], Path(sys.argv[2])
x = np.ones((1, 1024), sys.argv[3])

def trained(large=True, **settings):
    if large:
        tensors.MAX_COPIED_BYTES = 2**20
    trainer = onnxfit.Trainer(path, loss="mse", backend="in_place", threads=1, **settings)
    trainer.fit(np.repeat(x, 2, 0), np.ones((2, 1024), np.float32), batch_size=1, verbose=0)
    return trainer

def fit(*callbacks):
    trainer.fit(x, np.ones((1, 1024), np.float32), verbose=0, callbacks=callbacks)

def grown(name, write):
    before = memory("VmHWM")
    write()
    print(name, memory("VmHWM") - before, flush=True)
"""


def run(code: str, model: Path, folder: Path, dtype: str = "float32") -> dict[str, float]:
    """Return what a program prints: name -> MB by which its peak has grown."""
    command = [sys.executable, "-c", PROGRAM + code, str(model), str(folder), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name: float(size) for name, size in map(str.split, done.stdout.splitlines())}


def write_deep(path: Path, dtype: str) -> Path:
    element = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = [
        onnx.helper.make_node("MatMul", [f"h{i}", f"w{i}"], [f"h{i + 1}"]) for i in range(LAYERS)
    ]
    nodes.append(onnx.helper.make_node("Cast", [f"h{LAYERS}"], ["y"], to=onnx.TensorProto.FLOAT))
    x, y = (
        onnx.helper.make_tensor_value_info(name, kind, ["N", WIDTH])
        for name, kind in (("h0", element), ("y", onnx.TensorProto.FLOAT))
    )
    weight = np.full((WIDTH, WIDTH), 0.001, dtype)
    initializers = [onnx.numpy_helper.from_array(weight, f"w{i}") for i in range(LAYERS)]
    graph = onnx.helper.make_graph(nodes, "deep", [x], [y], initializers)
    opsets = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 MB of weights, in 16 layers."""
    return write_deep(tmp_path_factory.mktemp("deep") / "deep.onnx", "float32")


WRITERS = """
grown("export", lambda: trainer.export(folder / "m.onnx"))
grown("snapshot", lambda: trainer.model_snapshot(copy=False).write(folder / "m2.onnx"))
grown("save", lambda: trainer.save(folder / "c.ckpt"))
grown("graphs", lambda: trainer.save_onnx_graph(folder / "graphs"))
grown("training", lambda: trainer.export_training(folder / "training", include=["predict"]))
grown("structure", lambda: trainer.structure)
grown("checkpoint", lambda: fit(ModelCheckpoint(folder / "d.ckpt")))
for name in ("e.onnx", "e.safetensors"):
    grown(name, lambda: fit(ModelCheckpoint(folder / name, save_weights_only=True)))
grown("backup", lambda: fit(BackupAndRestore(folder / "backup")))
grown("board", lambda: fit(TensorBoard(folder / "board", histogram_freq=1)))
"""


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_files_are_written_from_the_memory_of_the_training(
    optimizer: str, deep: Path, tmp_path: Path
) -> None:
    """A copy of the weights would be 64 MB. TensorBoard converts one weight of 4 MB to doubles."""
    found = run(f"trainer = trained(optimizer={optimizer!r})" + WRITERS, deep, tmp_path)
    assert len(found) == 11
    for name, size in found.items():
        assert size < (40 if name == "board" else 8), found
    weights = Trainer(tmp_path / "m.onnx").get_weights()
    assert (tmp_path / "m.onnx").read_bytes() == (tmp_path / "m2.onnx").read_bytes()
    for name, array in Trainer.load(tmp_path / "c.ckpt").get_weights().items():
        np.testing.assert_array_equal(array, weights[name])


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_weights_of_other_types_are_not_copied(dtype: str, tmp_path: Path) -> None:
    model = write_deep(tmp_path / "model.onnx", dtype)
    code = """trainer = trained(optimizer="sgd")
grown("export", lambda: trainer.export(folder / "m.onnx"))
grown("save", lambda: trainer.save(folder / "c.ckpt"))
"""
    assert all(size < 8 for size in run(code, model, tmp_path, dtype).values())
    assert onnx.load(tmp_path / "m.onnx").graph.initializer[0].data_type == (
        onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    )


def test_adapters_are_merged_one_weight_at_a_time(deep: Path, tmp_path: Path) -> None:
    """A layer has 4 MB, and merging needs a few copies of it."""
    code = """trainer = trained(adapters=onnxfit.LoRA(rank=2))
grown("merged", lambda: trainer.export(folder / "m.onnx"))
grown("inputs", lambda: trainer.export(folder / "i.onnx", adapters="inputs"))
grown("adapter", lambda: trainer.export_adapter(folder / "adapter"))
grown("graphs", lambda: trainer.save_onnx_graph(folder / "graphs"))
grown("save", lambda: trainer.save(folder / "c.ckpt"))
"""
    found = run(code, deep, tmp_path)
    assert all(size < 20 for size in found.values()), found


def test_a_returned_model_is_one_copy(deep: Path, tmp_path: Path) -> None:
    """Of a model below 512 MB, whose file and returned model have all numbers."""
    code = """trainer = trained(large=False)
grown("export", lambda: trainer.export(folder / "m.onnx"))
grown("again", lambda: trainer.export())
grown("model", lambda: trainer.model)
"""
    found = run(code, deep, tmp_path)
    assert all(size < 1.1 * MEGABYTES for size in found.values()), found


def test_a_model_that_training_had_room_for_is_written(deep: Path, tmp_path: Path) -> None:
    """With 32 MB to spare; a copy raises an error that says what to do, and changes nothing."""
    code = """trainer = trained(optimizer="adam")
before = trainer.get_state()["weights"]["w0"].sum()
resource.setrlimit(resource.RLIMIT_AS, (int((memory("VmSize") + 32) * 2**20), -1))
for call in (trainer.export, trainer.snapshot, lambda: trainer.model, trainer.get_weights):
    try:
        call()
    except onnxfit.OutOfMemoryError as error:
        assert isinstance(error, MemoryError)
        assert "The trainer is unchanged." in str(error)
        assert "export(path)" in str(error) or "copy=False" in str(error)
    else:
        raise AssertionError("there was enough memory")
grown("export", lambda: trainer.export(folder / "m.onnx"))
grown("save", lambda: trainer.save(folder / "c.ckpt"))
grown("fit", lambda: fit(ModelCheckpoint(folder / "d.ckpt")))
assert trainer.global_step == 3
"""
    run(code, deep, tmp_path)
    Trainer.load(tmp_path / "d.ckpt")


class Saves(Callback):
    """Writes a snapshot without a copy in the hook, and one after the next step."""

    def on_train_batch_end(self, batch: int, logs: object) -> None:
        self.views = self.trainer.get_weights(copy=False)
        self.copies = self.trainer.get_weights()


def test_views_of_weights_are_read_only_and_equal_copies() -> None:
    trainer = Trainer(models.mlp((4, 8, 3)), loss="mse")
    saves = Saves()
    x, y = np.ones((4, 4), np.float32), np.ones((4, 3), np.float32)
    trainer.fit(x, y, verbose=0, callbacks=saves)
    for name, view in saves.views.items():
        np.testing.assert_array_equal(view, saves.copies[name])
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 0
    state, copied = trainer.get_state(copy=False), trainer.get_state()
    np.testing.assert_equal(state, copied)


@pytest.mark.parametrize("backend", ["full", "forward_backward", "in_place"])
def test_a_snapshot_without_a_copy_is_not_written_after_a_step(
    backend: str, tmp_path: Path
) -> None:
    trainer = Trainer(models.mlp((4, 8, 3)), loss="mse", backend=backend)
    x, y = np.ones((4, 4), np.float32), np.ones((4, 3), np.float32)
    for change in (
        lambda: trainer.train_on_batch(x, y),
        lambda: trainer.set_weights(trainer.get_weights()),
    ):
        weights = trainer.get_weights()
        kinds = ("c.ckpt", trainer.snapshot), ("m.onnx", trainer.model_snapshot)
        views = [(tmp_path / name, take(copy=False)) for name, take in kinds]
        copies = [(tmp_path / f"copy-{name}", take()) for name, take in kinds]
        trainer.evaluate(x, y, verbose=0)
        for path, snapshot in views:
            snapshot.write(path)
        change()
        for path, snapshot in views:
            before = path.read_bytes()
            with pytest.raises(SettingError, match="before the next step, or take it with copy"):
                snapshot.write(path)
            assert path.read_bytes() == before
        for (path, snapshot), (other, _) in zip(copies, views):
            assert snapshot.write(path).read_bytes() == other.read_bytes()
        np.testing.assert_equal(Trainer.load(tmp_path / "c.ckpt").get_weights(), weights)


@pytest.mark.parametrize("limit", [100, 2**29])
@pytest.mark.parametrize("background", [None, True, False])
def test_a_large_state_is_written_before_training_goes_on(
    limit: int, background: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "MAX_COPIED_BYTES", limit)
    trainer = Trainer(models.mlp((4, 8, 3)), loss="mse")
    saves = [
        ModelCheckpoint(tmp_path / "c.ckpt", background=background),
        ModelCheckpoint(tmp_path / "w.onnx", save_weights_only=True, background=background),
        BackupAndRestore(tmp_path / "b", background=background, delete_checkpoint=False),
    ]
    x, y = np.ones((4, 4), np.float32), np.ones((4, 3), np.float32)
    trainer.fit(x, y, epochs=3, verbose=0, callbacks=[*saves, TensorBoard(tmp_path / "t")])
    expected = limit > 100 if background is None else background
    assert [save.copies_state for save in saves] == [expected] * 3
    np.testing.assert_equal(
        Trainer.load(tmp_path / "c.ckpt").get_state()["weights"], trainer.get_weights()
    )
    np.testing.assert_equal(Trainer(tmp_path / "w.onnx").get_weights(), trainer.get_weights())


def test_the_structure_has_no_larger_numbers() -> None:
    trainer = Trainer(models.mlp((4, 500, 3)), loss="mse")
    structure, model = trainer.structure, trainer.model
    assert structure.ByteSize() < 2500
    assert structure.graph.node == model.graph.node
    for ours, theirs in zip(structure.graph.initializer, model.graph.initializer, strict=True):
        assert (ours.name, ours.dims, ours.data_type) == (
            theirs.name,
            theirs.dims,
            theirs.data_type,
        )


def test_an_error_says_what_needs_memory_and_what_to_do() -> None:
    with pytest.raises(OutOfMemoryError) as raised, out_of_memory_errors("f()", "Call g()."):
        raise MemoryError("Unable to allocate 3 GiB")
    expected = "There is not enough memory for f(): Unable to allocate 3 GiB. The trainer is"
    assert str(raised.value) == f"{expected} unchanged. Call g()."


def test_each_method_names_itself_when_memory_runs_out() -> None:
    """A method that is added between a decorator and its method would take the decorator."""
    (trainer,) = (
        node
        for node in ast.parse(inspect.getsource(trainer_module)).body
        if isinstance(node, ast.ClassDef) and node.name == "Trainer"
    )
    named = {}
    for method in trainer.body:
        for decorator in getattr(method, "decorator_list", []):
            if "out_of_memory_errors" in ast.unparse(decorator):
                named[method.name] = decorator.args[0].value  # type: ignore[attr-defined]
    assert "export_adapter" in named
    for method, call in named.items():
        assert call in (f"{method}()", f"Trainer.{method}"), method

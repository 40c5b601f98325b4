"""The package finds the public classes of its modules, and what is generated of them is current."""

import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import onnxfit
from onnxfit import callbacks as package
from onnxfit.callbacks import Callback
from onnxfit.errors import SettingError
from onnxfit.registry import registry

ROOT = Path(__file__).parents[2]
NEW_CALLBACK = '''"""A callback in a file of its own."""

from onnxfit.callbacks.stateful_callback import StatefulCallback

__all__ = ["CountBatches"]


class CountBatches(StatefulCallback):
    """Count the batches of training."""

    state_attributes = ("batches",)

    def __init__(self):
        self.reset()

    def reset(self):
        self.batches = 0

    def on_train_batch_end(self, batch, logs):
        self.batches += 1
'''
# The signatures of keras.callbacks, from https://keras.io/api/callbacks of Keras 3.
KERAS = {
    "BackupAndRestore": "backup_dir save_freq double_checkpoint delete_checkpoint",
    "CSVLogger": "filename separator append",
    "EarlyStopping": "monitor min_delta patience verbose mode baseline restore_best_weights"
    " start_from_epoch",
    "LearningRateScheduler": "schedule verbose",
    "ModelCheckpoint": "filepath monitor verbose save_best_only save_weights_only mode save_freq"
    " initial_value_threshold",
    "ReduceLROnPlateau": "monitor factor patience verbose mode min_delta cooldown min_lr",
    "SwapEMAWeights": "swap_on_epoch",
    "TensorBoard": "log_dir histogram_freq write_graph update_freq",
    "TerminateOnNaN": "raise_error",
}


def test_the_registry_is_what_the_package_exports():
    assert package.__all__ == sorted(package.__all__)
    assert all(
        issubclass(kind, Callback) and kind.__doc__
        for kind in registry("onnxfit.callbacks", Callback).values()
    )


def test_every_module_says_what_is_public():
    for path in Path(package.__file__).parent.rglob("*.py"):
        assert "__all__" in path.read_text(encoding="utf-8"), path
    assert {"Callback", "CallbackList", "Logs", "StatefulCallback"} <= set(package.__all__)


@pytest.mark.parametrize("name", KERAS)
def test_arguments_have_the_names_that_keras_gives_them(name):
    parameters = list(inspect.signature(getattr(package, name)).parameters)
    expected = KERAS[name].split()
    assert parameters[0] == expected[0]
    assert set(expected) <= set(parameters)


def test_arguments_of_keras_that_are_not_implemented_are_refused():
    for name, value in {"write_images": True, "profile_batch": 2}.items():
        with pytest.raises(SettingError, match=f"needs {name} to be off.*, got {value}. Use "):
            package.TensorBoard(**{name: value})
    for make in (
        lambda: package.ModelCheckpoint(path="a"),
        lambda: package.BackupAndRestore(folder="a"),
    ):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            make()


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """Return a folder with a copy of onnxfit that has one more file in callbacks."""
    folder = tmp_path_factory.mktemp("extended")
    source = Path(onnxfit.__file__).parent
    shutil.copytree(source, folder / "onnxfit", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "onnxfit" / "callbacks" / "count_batches.py"
    path.write_text(NEW_CALLBACK, encoding="utf-8")
    return folder


def python(folder, *arguments):
    """Run Python with the onnxfit of a folder; return what it printed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    result = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_a_new_file_is_a_new_callback_that_keeps_the_laws(extended):
    code = "import onnxfit; print(onnxfit.callbacks.__all__, onnxfit.callbacks.CountBatches())"
    assert "'CountBatches'" in python(extended, "-c", code)
    laws = str(Path(__file__).with_name("test_laws.py"))
    printed = python(
        extended, "-m", "pytest", "-p", "no:cacheprovider", "-n0", laws, "-k", "CountBatches"
    )
    assert "skipped" not in printed
    assert printed.count(".") > 30

"""onnxfit.imports: libraries that another library imports without need."""

import importlib
import importlib.util
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from onnxfit.imports import uninstalled, without


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module that can be imported."""
    name = "a_module_that_nobody_needs"
    (tmp_path / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_a_module_is_hidden_and_can_be_imported_afterwards(module: str) -> None:
    with without(module), pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(module)
    assert caught.value.name == module
    importlib.import_module(module)
    with without(module):  # it stays imported
        assert importlib.import_module(module) is sys.modules[module]


def test_a_module_is_hidden_from_the_thread_that_asked(module: str) -> None:
    with without(module):
        other = threading.Thread(target=importlib.import_module, args=(module,))
        other.start()
        other.join()
        assert module in sys.modules
    assert not any("Missing" in type(finder).__name__ for finder in sys.meta_path)


def test_a_module_is_as_if_it_were_not_installed_and_can_be_imported_afterwards(
    module: str,
) -> None:
    with uninstalled(module):
        assert importlib.util.find_spec(module) is None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(module)
    imported = importlib.import_module(module)
    with uninstalled(module):  # it stays imported
        assert importlib.import_module(module) is imported
    assert sys.modules[module] is imported


def test_the_versions_are_found_without_another_program() -> None:
    code = """if True:
        import sys
        import onnxfit.imports
        started = []
        sys.addaudithook(lambda event, _: started.append(event))
        assert onnxfit.imports.versions()["platform"].count("-") >= 2
        assert not {"subprocess.Popen", "os.posix_spawn", "os.system"}.intersection(started)"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_import_onnxfit_leaves_out_what_many_programs_never_use() -> None:
    # Of these, onnx.reference reads the schemas of all operators as soon as it is imported.
    code = (
        "import sys, onnxfit, gc; assert gc.isenabled();"
        "heavy = {'onnx.reference', 'numpy.random', 'torch', 'sklearn', 'tensorboardX', 'pandas'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"

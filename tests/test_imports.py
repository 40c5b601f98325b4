"""Imports of onnxfit, and of its libraries."""

import ast
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import onnxfit
from onnxfit.environment import uninstalled


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module that can be imported."""
    name = "a_module_that_nobody_needs"
    (tmp_path / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


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


@pytest.mark.skipif(np.__version__ < "2", reason="NumPy 1 imports all of its modules")
def test_import_onnxfit_leaves_out_what_many_programs_never_use() -> None:
    # Of these, onnx.reference reads the schemas of all operators as soon as it is imported.
    code = (
        "import sys, gc; from onnxfit import *; assert gc.isenabled();"
        "heavy = {'onnx.reference', 'numpy.random', 'torch', 'sklearn', 'tensorboardX', 'pandas'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_import_onnxfit_imports_only_numpy_and_changes_no_import_of_others() -> None:
    code = """if True:
        import sys
        finders = list(sys.meta_path), list(sys.path_hooks)
        import onnxfit
        libraries = {"numpy", "onnx", "onnx_ir", "onnxruntime", "sympy", "torch"}
        print(*sorted(libraries & set(sys.modules)))
        import onnxfit.trainer
        print(finders == (sys.meta_path, sys.path_hooks), "torch" in sys.modules)"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["numpy", "True", "False"]


def test_threads_may_ask_for_the_first_names_at_once() -> None:
    code = """if True:
        import random, sys, threading, time
        import onnxfit
        errors, start = [], threading.Barrier(4)
        def ask(name, delay):
            start.wait()
            time.sleep(delay)
            try:
                getattr(onnxfit, name)
            except BaseException as error:
                errors.append(f"{name}: {error!r}")
        draw = random.Random(int(sys.argv[1]))
        names = ("distributed", "losses", "Trainer", "DataLoader")
        threads = [threading.Thread(target=ask, args=(n, draw.uniform(0, 0.1))) for n in names]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(errors)"""
    for seed in range(3):
        result = subprocess.run(
            [sys.executable, "-c", code, str(seed)], capture_output=True, text=True, check=True
        )
        assert result.stdout.strip() == "[]"


def test_a_package_and_a_module_of_it_may_be_imported_by_two_threads() -> None:
    code = """if True:
        import sys, threading, time
        from importlib._bootstrap import _module_locks
        import onnxfit
        from importlib.machinery import PathFinder
        class Finder:  # the package waits until the other thread wants to import a module of it
            def find_spec(self, name, path=None, target=None):
                if name == "onnxfit.distributed":
                    spec = PathFinder.find_spec(name, path, target)
                    spec.loader.create_module = wait
                    return spec
        def wait(spec):
            inside.set()
            end = time.monotonic() + 2
            while time.monotonic() < end and "onnxfit.distributed.world" not in _module_locks:
                time.sleep(0.01)
            time.sleep(0.1)
        errors, inside = [], threading.Event()
        def ask(name):
            try:
                getattr(onnxfit, name)
            except BaseException as error:
                errors.append(f"{name}: {error!r}")
        sys.meta_path.insert(0, Finder())
        threads = [threading.Thread(target=ask, args=(n,)) for n in ("distributed", "Trainer")]
        threads[0].start()
        inside.wait()
        threads[1].start()
        for thread in threads: thread.join()
        print(errors)"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_a_public_name_imports_its_module_when_it_is_asked_for() -> None:
    code = """if True:
        import sys
        import onnxfit
        assert "onnxfit.trainer" not in sys.modules
        assert not hasattr(onnxfit, "trane")
        assert not hasattr(onnxfit, "_trainer")
        assert onnxfit.gradients.table is sys.modules["onnxfit.gradients.table"]
        assert onnxfit.Trainer is sys.modules["onnxfit.trainer"].Trainer
        assert "Trainer" in vars(onnxfit)  # the next look-up finds it at once"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_type_checkers_and_programs_find_the_same_names() -> None:
    tree = ast.parse(Path(onnxfit.__file__).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    imported = {}
    for node in blocks[0].body:
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            names = [alias.asname for alias in node.names]  # without one, it is not exported
            for name in module.__all__ if node.names[0].name == "*" else names:
                imported[name] = getattr(module, str(name))
    assert {*imported, "versions"} == set(onnxfit.__all__)
    for name, member in imported.items():
        assert getattr(onnxfit, name) is member
    assert set(onnxfit.__all__) <= set(dir(onnxfit))

"""The distributions of onnxruntime that are installed: several, none, or a broken one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import pytest

import onnxfit
from onnxfit import environment
from onnxfit.environment import installed_distributions, is_switched_off, mixed_distributions
from tests.installations import (
    REAL,
    ROOT,
    VERSION,
    add_distribution,
    link_other_packages,
    run_python,
)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for distributions, from which onnxruntime seems to be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(onnxruntime, "__file__", str(tmp_path / "onnxruntime" / "__init__.py"))
    return tmp_path


def names_in(site: Path) -> set[str]:
    return {
        distribution.name
        for distribution in installed_distributions()
        if distribution.folder == site.resolve()
    }


# Several distributions
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (["onnxruntime", "onnxruntime-gpu"], "onnxruntime-gpu"),
        (["onnxruntime", "onnxruntime-training"], "onnxruntime-training"),
        (["onnxruntime-training-cpu", "onnxruntime", "onnxruntime-gpu"], "onnxruntime-gpu"),
        (["onnxruntime", "onnxruntime-openvino"], "onnxruntime-openvino"),
        (["onnxruntime-webgpu", "onnxruntime-directml"], "onnxruntime-directml"),
        (["onnxruntime", "onnxruntime-qnn"], "onnxruntime-qnn"),
        (["onnxruntime-rocm", "onnxruntime"], "onnxruntime-rocm"),
        (["onnxruntime-migraphx", "onnxruntime"], "onnxruntime-migraphx"),
        (["onnxruntime", "ort-nightly"], "ort-nightly"),
        (["onnxruntime", "ort-nightly-gpu"], "ort-nightly-gpu"),
        (["onnxruntime", "onnxruntime-of-a-company"], "onnxruntime-of-a-company"),
        (["onnxruntime", "Other_Name"], "other-name"),
    ],
)
def test_several_distributions_are_named_with_the_commands_that_leave_one(
    site: Path, names: list[str], kept: str
) -> None:
    for name in names:
        add_distribution(site, name)
    message = mixed_distributions()
    assert message is not None
    text, uninstall, install = message.splitlines()
    for name in names:
        name = name.lower().replace("_", "-")
        assert f"{name} {VERSION}" in text
        assert f" {name}" in uninstall
    assert f"for example {kept}." in text
    assert uninstall.startswith("  pip uninstall -y ")
    assert len(uninstall.split()) == 3 + len(names)
    assert install == f"  pip install {kept}"


def test_one_distribution_is_no_problem(site: Path) -> None:
    assert mixed_distributions() is None  # one from sources, which pip does not know
    add_distribution(site, "onnxruntime-gpu")
    assert mixed_distributions() is None


@pytest.mark.parametrize("suffix", [".dev20250901001", "+cu118", ".post1", "rc1"])
def test_marks_of_a_version_do_not_matter(site: Path, suffix: str) -> None:
    add_distribution(site, "onnxruntime-gpu", VERSION + suffix)
    assert mixed_distributions() is None


def test_files_of_another_version_are_a_problem(site: Path) -> None:
    add_distribution(site, "onnxruntime-gpu", "1.2.3")
    message = mixed_distributions()
    assert message is not None
    text, *commands = message.splitlines()
    assert "onnxruntime-gpu 1.2.3" in text
    assert f"onnxruntime {VERSION}" in text
    assert commands == ["  pip uninstall -y onnxruntime-gpu", "  pip install onnxruntime-gpu"]


def test_distributions_in_other_folders_do_not_matter(
    site: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path_factory.mktemp("other")
    monkeypatch.syspath_prepend(other)
    add_distribution(site, "onnxruntime")
    add_distribution(other, "onnxruntime-gpu")
    assert names_in(other) == {"onnxruntime-gpu"}
    assert mixed_distributions() is None


def test_distributions_are_known_by_name_or_by_their_module(site: Path) -> None:
    add_distribution(site, "onnxruntime-gpu", modules=None, files=None)
    add_distribution(site, "onnxruntime-webgpu", modules=None)
    add_distribution(site, "a-name", modules="onnxruntime", files=None)
    # these have other modules, or the module's name for another one
    add_distribution(
        site, "onnxruntime-genai", modules="onnxruntime_genai", files="onnxruntime_genai/a,,"
    )
    add_distribution(site, "plugin", modules="onnxruntime", files="onnxruntime/plugin.py,,\n")
    assert names_in(site) == {"onnxruntime-gpu", "onnxruntime-webgpu", "a-name"}


def test_what_a_failed_uninstallation_left_is_no_distribution(site: Path) -> None:
    for name in ("onnxruntime", "onnxruntime-openvino", "onnxruntime-gpu"):
        add_distribution(site, name)
    (site / f"onnxruntime-{VERSION}.dist-info").rename(site / f"~nnxruntime-{VERSION}.dist-info")
    (site / f"onnxruntime_openvino-{VERSION}.dist-info" / "METADATA").unlink()
    assert names_in(site) == {"onnxruntime-gpu"}
    assert mixed_distributions() is None


def test_the_listed_packages_are_those_that_onnxfit_requires() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    required = text.split("\ndependencies = [")[1].split("\n]")[0]
    names = re.findall(r'^ *"([\w-]+)', required, re.MULTILINE)
    assert {name for name in names if not name.startswith("onnxruntime")} == {*environment.PACKAGES}


def test_versions_lists_every_distribution(site: Path) -> None:
    for number, name in enumerate(environment.DISTRIBUTIONS):
        add_distribution(site, name, f"1.{number}")
    found = onnxfit.versions()
    assert [found[name] for name in environment.DISTRIBUTIONS] == [
        f"1.{number}" for number in range(len(environment.DISTRIBUTIONS))
    ]


def test_the_versions_are_found_without_another_program() -> None:
    code = """if True:
        import sys
        import onnxfit
        started = []
        sys.addaudithook(lambda event, _: started.append(event))
        assert onnxfit.versions()["platform"].count("-") >= 2
        assert not {"subprocess.Popen", "os.posix_spawn", "os.system"}.intersection(started)"""
    subprocess.run([sys.executable, "-c", code], check=True)


USES = {
    "a trainer": "onnxfit.Trainer(MODEL, loss='mse')",
    "a trainer without a loss": "onnxfit.Trainer(MODEL)",
    "a device that is missing": "with suppress(onnxfit.InstallationError): Trainer(MODEL, device='rocm')",
    "quantize": "onnxfit.quantize(MODEL, X)",
    "a session": "onnxfit.dynamic_batch(MODEL)",
}
PREPARE = """if True:
    import warnings
    warnings.simplefilter("always")
    with warnings.catch_warnings(record=True) as caught:
        from contextlib import suppress
        import json, numpy as np, onnx.parser, onnxfit
        from onnxfit import Trainer, quantize, dynamic_batch, inspect
        MODEL = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
            g (float[4, 2] x) => (float[4, 2] y) <float[2, 2] w = {1, 2, 3, 4}>
            { y = MatMul(x, w) }''')
        X = np.ones((4, 2), np.float32)
        def count():
            return sum("pip uninstall" in str(each.message) for each in caught)
        counts = [count()]
"""


@pytest.mark.parametrize("use", USES)
def test_the_first_use_warns_once(tmp_path: Path, use: str) -> None:
    link_other_packages(tmp_path)
    (tmp_path / "onnxruntime").symlink_to(REAL)
    add_distribution(tmp_path, "onnxruntime")
    add_distribution(tmp_path, "onnxruntime-gpu", "1.2.3")
    code = f"""{PREPARE}
        {USES[use]}
        counts.append(count())
        onnxfit.Trainer(MODEL, loss='mse')
        counts.append(count())
    found = [each for each in caught if "pip uninstall" in str(each.message)]
    print(json.dumps([counts, str(found[0].message), found[0].filename]))"""
    result = run_python(tmp_path, "-c", code)
    assert result.returncode == 0, result.stderr
    counts, message, file = json.loads(result.stdout)
    assert counts == [0, 1, 1]
    assert file == "<string>"  # the line of the user
    assert message.splitlines() == [
        f"onnxruntime-gpu 1.2.3 and onnxruntime {VERSION} have overwritten each other's files. Keep"
        " one of them, for example onnxruntime-gpu. Run",
        "  pip uninstall -y onnxruntime-gpu onnxruntime",
        "  pip install onnxruntime-gpu",
    ]


# No onnxruntime, or a broken one
# ---------------------------------------------------------------------------------------------


def nothing(site: Path) -> None:
    """No onnxruntime."""


def left_folders(site: Path) -> None:
    """As after pip uninstalled both of two distributions: folders with files that programs made."""
    (site / "onnxruntime" / "capi" / "__pycache__").mkdir(parents=True)


def one_of_two(site: Path) -> None:
    """As after pip uninstalled one of two distributions: the folders, and the metadata of the other."""
    (site / "onnxruntime" / "capi").mkdir(parents=True)
    add_distribution(site, "onnxruntime-gpu")


def empty_module(site: Path) -> None:
    """All files exist, and have no contents."""
    capi = site / "onnxruntime" / "capi"
    capi.mkdir(parents=True)
    for path in (capi.parent / "__init__.py", capi / "__init__.py", capi / "_pybind_state.py"):
        path.touch()
    add_distribution(site, "onnxruntime-gpu")


def broken_library(site: Path) -> None:
    """The C library cannot be loaded."""
    (site / "onnxruntime").mkdir()
    text = "raise ImportError('libcudart.so.11.0: cannot open shared object file')"
    (site / "onnxruntime" / "__init__.py").write_text(text)
    add_distribution(site, "onnxruntime-gpu")


def other_error(site: Path) -> None:
    """A build for GPUs does not find its libraries."""
    (site / "onnxruntime").mkdir()
    (site / "onnxruntime" / "__init__.py").write_text("raise RuntimeError('no CUDA')")
    add_distribution(site, "onnxruntime-gpu")


def hidden(site: Path) -> None:
    """A file of the user has the name of the module."""
    (site / "onnxruntime.py").write_text("session = None")
    other = site / "other"
    other.mkdir()
    add_distribution(other, "onnxruntime-gpu")


REPAIR = r"Run\n  pip uninstall -y onnxruntime-gpu\n  pip install onnxruntime-gpu$"
MISSING = (
    r"^onnxruntime is not installed\. For the CPU, run\n  pip install onnxruntime\n"
    r'.*pip install "onnxfit\[gpu\]":\ngpu \(NVIDIA\), directml .*, openvino .* or webgpu\.$'
)
STATES: list[tuple[Callable[[Path], None], str]] = [
    (nothing, MISSING),
    (left_folders, MISSING),
    (one_of_two, rf"^onnxruntime-gpu {VERSION} cannot be imported: .*_pybind_state.*{REPAIR}"),
    (empty_module, rf"no attribute '__version__'.*{REPAIR}"),
    (broken_library, rf"libcudart\.so\.11\.0: cannot open.*{REPAIR}"),
    (other_error, rf"no CUDA\..*{REPAIR}"),
    (hidden, r"onnxruntime\.py hides the installed onnxruntime-gpu .*Rename that file"),
]
TRY = """if True:
    import sys
    sys.path.append(sys.argv[1])
    import onnxfit
    onnxfit.versions(), onnxfit.losses.Huber(), onnxfit.draw, onnxfit.merge  # need no onnxruntime
    for name in ("Trainer", "inspect", "quantize", "dynamic_batch", "callbacks", "Trainer"):
        try:
            getattr(onnxfit, name)
        except onnxfit.InstallationError as error:
            message = str(error)
        else:
            raise AssertionError(name)
    try:
        from onnxfit import Trainer
    except ImportError as error:
        assert str(error) == message
    try:
        import onnxfit.runtime.session
    except onnxfit.InstallationError as error:
        assert str(error) == message
    try:
        onnxfit.gradients.gradient_source("onnxruntime")
    except onnxfit.InstallationError as error:
        assert str(error) == message
    print(message, end="")
"""


@pytest.mark.parametrize(
    ("state", "expected"), STATES, ids=lambda each: getattr(each, "__name__", "")
)
def test_without_a_working_onnxruntime_every_use_says_how_to_get_one(
    tmp_path: Path, state: Callable[[Path], None], expected: str
) -> None:
    link_other_packages(tmp_path)
    state(tmp_path)
    result = run_python(tmp_path, "-c", TRY, str(tmp_path / "other"))
    assert result.returncode == 0, result.stderr
    assert re.search(expected, result.stdout, re.DOTALL), result.stdout
    assert len(result.stdout.splitlines()) <= 4


@pytest.mark.parametrize("state", [nothing, one_of_two])
def test_the_command_line_without_onnxruntime(
    tmp_path: Path, state: Callable[[Path], None]
) -> None:
    link_other_packages(tmp_path)
    state(tmp_path)
    helped = run_python(tmp_path, "-m", "onnxfit", "--help")
    assert helped.returncode == 0
    listed = helped.stdout.split("Commands:")[1]
    assert "  fit  " in listed
    assert "  doctor  " in listed
    assert "  job  " not in listed  # a module that is no command
    for arguments in (["fit", "m.onnx", "--epochs", "3"], ["quantize", "--help"]):
        result = run_python(tmp_path, "-m", "onnxfit", *arguments)
        assert result.returncode == 1
        assert result.stdout == ""
        assert result.stderr.startswith("Error: onnxruntime")
        assert "  pip install onnxruntime" in result.stderr
    assert run_python(tmp_path, "-m", "onnxfit", "ops", "Relu").returncode == 0


# Switches
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [("off", True), ("OFF", True), ("Off", True), (" off ", True), ("", False), ("on", False)],
)
def test_a_switch_is_off_in_any_case_of_letters(
    monkeypatch: pytest.MonkeyPatch, value: str, expected: bool
) -> None:
    monkeypatch.setenv("ONNXFIT_KERNELS", value)
    assert is_switched_off("ONNXFIT_KERNELS") is expected


def test_a_switch_that_is_not_set_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONNXFIT_KERNELS", raising=False)
    assert not is_switched_off("ONNXFIT_KERNELS")

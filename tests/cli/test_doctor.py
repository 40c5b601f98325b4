"""`onnxfit doctor`: what it lists, the problems that it finds, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import onnxruntime
import pytest

import onnxfit
from onnxfit import environment
from onnxfit.cli import doctor
from onnxfit.environment import installed_distributions
from onnxfit.kernels import library
from tests.builds import HAS_BUILDER
from tests.cli.helpers import call
from tests.installations import REAL, VERSION, add_distribution, link_other_packages, run_python


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "LIBRARY", Path("operators.so"))
    monkeypatch.delenv("ONNXFIT_KERNELS", raising=False)
    monkeypatch.delenv("ONNXFIT_CUDA_GRAPHS", raising=False)


def test_a_good_installation_has_no_problems() -> None:
    result = call("doctor")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert result.stdout.endswith("\n\nNo problems.\n")
    assert max(map(len, result.stdout.splitlines())) <= 80
    for text in ("python", "onnxfit", "onnx-ir", "CPUExecutionProvider", "instruction sets"):
        assert text in result.stdout


def test_json_has_everything() -> None:
    found = json.loads(call("doctor", "--json").stdout)
    distributions = installed_distributions()
    assert found["versions"]["onnxfit"] == onnxfit.__version__
    assert found["versions"]["numpy"] == onnxfit.versions()["numpy"]
    assert [(one["name"], one["version"]) for one in found["distributions"]] == [
        (distribution.name, distribution.version) for distribution in distributions
    ]
    assert [one["verdict"] for one in found["distributions"]] == ["in use"]
    assert found["onnxruntime"]["version"] == VERSION
    assert found["onnxruntime"]["providers"] == ", ".join(onnxruntime.get_available_providers())
    assert (found["onnxruntime"]["gradient_builder"] == "yes") == HAS_BUILDER
    assert found["processor"]["operators"].startswith("missing")
    assert found["switches"] == {"ONNXFIT_KERNELS": "on", "ONNXFIT_CUDA_GRAPHS": "on"}
    assert found["problems"] == []


def test_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXFIT_KERNELS", "Off")
    monkeypatch.setenv("ONNXFIT_CUDA_GRAPHS", "0")
    result = call("doctor", "--json")
    found = json.loads(result.stdout)
    assert found["switches"]["ONNXFIT_KERNELS"] == "off"
    assert "'0' is ignored" in found["switches"]["ONNXFIT_CUDA_GRAPHS"]
    assert found["processor"]["operators"].startswith("switched off")
    assert result.exit_code == 0


def test_operators_that_do_not_work_are_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "operators.so"
    broken.write_text("text")
    monkeypatch.setattr(library, "LIBRARY", broken)
    result = call("doctor")
    assert result.exit_code == 1
    assert "The C++ operators cannot be loaded: " in result.stdout
    assert "\n  pip install --force-reinstall --no-deps onnxfit\n" in result.stdout
    assert "unusable" in result.stdout


def test_two_distributions(tmp_path: Path) -> None:
    link_other_packages(tmp_path)
    (tmp_path / "onnxruntime").symlink_to(REAL)
    add_distribution(tmp_path, "onnxruntime")
    add_distribution(tmp_path, "onnxruntime-gpu", "1.2.3")
    other = tmp_path / "other"
    other.mkdir()
    add_distribution(other, "onnxruntime-openvino")
    code = "import sys; sys.path.append(sys.argv.pop(1)); from onnxfit.cli import main; main()"
    result = run_python(tmp_path, "-c", code, str(other), "doctor")
    assert result.returncode == 1, result.stderr
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "onnxruntime-gpu 1.2.3, has files of another distribution" in lines
    assert f"onnxruntime {VERSION}, has files of another distribution" in lines
    assert f"onnxruntime-openvino {VERSION}, hidden by another folder" in lines
    assert "\n  pip uninstall -y onnxruntime-gpu onnxruntime\n  pip install" in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= 80


def test_without_onnxruntime(tmp_path: Path) -> None:
    link_other_packages(tmp_path)
    result = run_python(tmp_path, "-m", "onnxfit", "doctor")
    assert result.returncode == 1, result.stderr
    assert result.stderr == ""
    assert "onnxruntime is not installed. For the CPU, run\n  pip install onnxruntime\n" in (
        result.stdout
    )
    (tmp_path / "onnxruntime").mkdir()
    add_distribution(tmp_path, "onnxruntime")
    result = run_python(tmp_path, "-m", "onnxfit", "doctor", "--json")
    assert result.returncode == 1, result.stderr
    found = json.loads(result.stdout)
    assert [one["verdict"] for one in found["distributions"]] == ["cannot be imported"]
    assert found["problems"][0].endswith("pip uninstall -y onnxruntime\n  pip install onnxruntime")


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    present = onnxfit.versions()
    del present["onnx-ir"]
    monkeypatch.setattr(doctor, "versions", lambda: present)
    result = call("doctor")
    assert result.exit_code == 1
    assert "Packages are missing. Run\n  pip install onnx-ir\n" in result.stdout


# Processors
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16 amx_tile amx_bf16", "AVX2, AVX-512, AVX512-BF16, AMX"),
        ("FPU SSE AVX1.0\nRDWRFSGS AVX2 AVX512F", "AVX2, AVX-512"),
        ("Features\t: fp asimd evtstrm", "NEON"),
        ("flags\t\t: fpu sse2 avx", "none of AVX2, AVX-512, AVX512-BF16, AMX, NEON"),
    ],
)  # fmt: skip
def test_instruction_sets_are_read_from_flags(flags: str, expected: str) -> None:
    assert environment.known_instruction_sets(flags) == expected


@pytest.mark.parametrize(
    ("system", "machine", "expected"),
    [("Darwin", "arm64", "NEON"), ("Windows", "ARM64", "NEON"), ("Windows", "AMD64", "unknown"),
     ("Darwin", "x86_64", "unknown")],
)  # fmt: skip
def test_instruction_sets_of_other_systems(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, expected: str
) -> None:
    monkeypatch.setattr(environment.platform, "system", lambda: system)
    monkeypatch.setattr(environment.platform, "machine", lambda: machine)
    monkeypatch.setattr(environment, "SYSCTL", "/no/such/program")
    assert environment.instruction_sets() == expected


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="another system than Linux")
def test_instruction_sets_of_this_processor() -> None:
    assert ("AVX2" in environment.instruction_sets()) == (
        " avx2 " in Path("/proc/cpuinfo").read_text()
    )

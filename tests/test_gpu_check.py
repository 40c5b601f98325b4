"""`scripts/gpu_check.py` without a GPU: its checks run on the CPU, and it says that CUDA is missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts import gpu_check
from scripts.gpu_check import Machine, Network, Report

pytestmark = pytest.mark.skipif(not gpu_check.why_no_device("cuda"), reason="there is CUDA")


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Note the device and the networks instead of checking them."""
    noted: list[tuple[str, list[str]]] = []

    def run_checks(report: Report, machine: Machine, networks: Sequence[Network]) -> None:
        noted.append((machine.device, [network.name for network in networks]))
        report.check("tried", lambda: ["- done"])

    monkeypatch.setattr(gpu_check, "run_checks", run_checks)
    return noted


@pytest.mark.parametrize(("device", "status"), [("cuda", 2), ("cuda:1", 2), ("cpu", 0)])
def test_the_status_says_whether_there_is_cuda(
    device: str, status: int, checked: list[tuple[str, list[str]]], tmp_path: Path
) -> None:
    out = tmp_path / "report.md"
    arguments = ["--device", device, "--networks", "small mlp", "--out", str(out)]
    assert gpu_check.main(arguments) == status
    assert checked == [("cpu", ["small mlp"])]
    assert ("No CUDA here" in out.read_text()) == (status == 2)
    assert "## tried\n\n- done" in out.read_text()


def test_a_failed_check_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Sequence[str]:
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(gpu_check, "run_checks", lambda report, *_: report.check("tried", fail))
    out = tmp_path / "report.md"
    assert gpu_check.main(["--device", "cpu", "--networks", "small mlp", "--out", str(out)]) == 1
    assert "**failed**: RuntimeError: no such kernel\n" in out.read_text()
    assert "failed: tried" in out.read_text()


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        (gpu_check.placement, "'CPUExecutionProvider': "),
        (gpu_check.losses, "default, 3 losses: 0.0e+00"),
        (gpu_check.resume, "equal to the last bit"),
        (gpu_check.memory, "- weights: 0.4 MiB"),
        (gpu_check.half, "\n| fp16 | "),
    ],
)
def test_each_check_runs_on_the_cpu(
    check: Callable[[Machine, Network], Sequence[str]], expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(gpu_check, "COMPARED_STEPS", 3)
    assert expected in "\n".join(check(Machine("cpu", 1), gpu_check.built_in("small mlp")))


def test_the_graphs_are_compared_with_the_lists() -> None:
    lines = gpu_check.listed(gpu_check.built_in("small cnn"))
    assert {line.split(",")[0] for line in lines} == {"- float32", "- bf16", "- fp16"}
    assert all(line.endswith("without a CUDA kernel: none") for line in lines)


def test_losses_in_half_precision_must_follow_those_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_check, "COMPARED_STEPS", 3)
    monkeypatch.setattr(gpu_check, "HALF_TOLERANCE", 1e-9)  # which no rounding meets
    with pytest.raises(AssertionError, match=r"^bf16: .* > 1e-09; "):
        gpu_check.half(Machine("cpu", 1), gpu_check.built_in("small mlp"))


def test_a_loss_that_is_no_number_is_different() -> None:
    assert np.isnan(gpu_check.largest_difference([1.0, np.nan], [1.0, 1.0]))
    assert gpu_check.largest_difference([1.0, 1.5], [1.0, 2.0]) == 0.25


def test_a_step_is_timed_in_every_variant_of_the_cpu() -> None:
    rows = gpu_check.times(Machine("cpu", 1), gpu_check.built_in("small mlp"))
    assert [row.split("|")[1].strip() for row in rows[2:]] == [
        "default",
        "weights not fused",
    ]
    assert all(float(row.split("|")[2]) > 0 for row in rows[2:])


def test_options_of_the_provider_are_put_back() -> None:
    from onnxfit.runtime.device import CPU, Device

    cuda = Device("cuda", 1)
    before = {"device_id": "1", "use_tf32": "0"}
    with gpu_check.provider_options({"prefer_nhwc": "1"}):
        assert cuda.options == before | {"prefer_nhwc": "1"}
    assert cuda.options == before
    assert CPU.options == {}


def test_wheels_make_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        calls.append(command)
        return type("Done", (), {"returncode": 2})

    monkeypatch.setattr(gpu_check.venv, "create", lambda *_, **__: None)
    monkeypatch.setattr(gpu_check.subprocess, "run", run)
    assert gpu_check.main(["--steps", "3", "--wheels", str(tmp_path), "--device", "cpu"]) == 2
    install, start = calls
    assert {"--no-index", "--find-links", str(tmp_path)} <= set(install)
    assert start[2:] == ["--steps", "3", "--device", "cpu"]

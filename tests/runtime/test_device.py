"""Devices by name: the error for each that is not there, and steps whose inputs are copied."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from onnxfit import Trainer
from onnxfit.errors import GradientError, InstallationError, SettingError, StepError
from onnxfit.runtime import device as devices
from onnxfit.runtime.device import Device
from onnxfit.runtime.plugins import plugin_of
from onnxfit.step import providers
from onnxfit.step.providers import PROVIDERS, Provider
from tests.models import convolutional, mlp

OFFERED = onnxruntime.get_available_providers()
MISSING = [
    kind
    for kind, provider in PROVIDERS.items()
    if provider.name not in OFFERED and plugin_of(kind) is None
]
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(20, 4)).astype(np.float32), RNG.integers(0, 3, 20)


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> str:
    """A device that binds tensors as providers with a memory of their own do, on the CPU."""
    monkeypatch.setitem(PROVIDERS, "coreml", Provider("CPUExecutionProvider", "onnxruntime"))
    return "coreml"


@pytest.mark.parametrize("kind", MISSING)
def test_a_provider_that_is_not_there_is_named_with_its_package(kind: str) -> None:
    with pytest.raises(InstallationError) as caught:
        Trainer(mlp(), loss="cross_entropy", device=kind)
    assert PROVIDERS[kind].name in str(caught.value)
    for package in (PROVIDERS[kind].package, PROVIDERS[kind].plugin):
        assert package in str(caught.value)
    assert "Install " in str(caught.value)


@pytest.mark.parametrize("name", ["tpu", "", "cuda:", "cuda:x", "cpu:1", "webgpu:0", 3, None])
def test_other_names_are_refused_with_those_that_are_known(name: object) -> None:
    with pytest.raises(SettingError, match="device must be one of 'cpu', 'cuda', 'webgpu'"):
        Device.parse(name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "meant"), [("gpu", "cuda"), ("CPU", "cpu"), ("dml", "directml"), ("mps", "coreml")]
)
def test_a_name_that_is_nearly_right_is_answered(name: str, meant: str) -> None:
    with pytest.raises(SettingError, match=f"Did you mean '{meant}'"):
        Device.parse(name)


def test_a_provider_that_cannot_start_is_no_fallback_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch, copying: str
) -> None:
    class Broken(onnxruntime.InferenceSession):
        def __init__(self, *args: object, enable_fallback: bool, **named: object) -> None:
            assert not enable_fallback
            raise RuntimeError("/sources/webgpu_context.cc:65 Initialize() no adapter")

    monkeypatch.setattr(devices.onnxruntime, "InferenceSession", Broken)
    with pytest.raises(InstallationError, match="no adapter"):
        Device.parse(copying)


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"backend": "forward_backward"}])
def test_a_device_that_copies_inputs_trains_as_the_cpu(copying: str, settings: dict) -> None:
    losses = []
    for device in ("cpu", copying):
        trainer = Trainer(
            mlp(), loss="cross_entropy", optimizer="adam", device=device, seed=3, **settings
        )
        history = trainer.fit(
            X, Y, epochs=3, batch_size=8, validation_data=(X, Y), verbose=0
        ).history
        losses.append([*history["loss"], *history["val_loss"], *trainer.predict(X).ravel()])
    np.testing.assert_allclose(*losses, rtol=1e-5, atol=1e-6)
    assert len(set(losses[0][:6])) == 6  # it trained


@pytest.mark.parametrize("settings", [{}, {"backend": "forward_backward"}])
def test_every_run_binds_its_inputs_anew(
    copying: str, settings: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnxfit.runtime.session import BoundSession

    bound = []
    bind = BoundSession._bind
    monkeypatch.setattr(BoundSession, "_bind", lambda self: bound.append(self) or bind(self))
    counts = {}
    for device in ("cpu", copying):
        trainer = Trainer(mlp(), loss="cross_entropy", device=device, **settings)
        bound.clear()
        for _ in range(6):
            trainer.train_on_batch(X, Y)
        counts[device] = len(bound)
    assert counts[copying] >= 6 > counts["cpu"] / len(set(bound))


def test_random_numbers_are_refused_where_they_would_repeat(
    copying: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = Provider("CPUExecutionProvider", "onnxruntime", wide_integers=False)
    monkeypatch.setitem(PROVIDERS, copying, narrow)
    images = RNG.normal(size=(8, 1, 8, 8)).astype(np.float32)
    trainer = Trainer(convolutional(dropout=0.3), loss="cross_entropy", device=copying)
    with pytest.raises(StepError, match="the same random numbers in every step"):
        trainer.train_on_batch(images, Y[:8])
    trainer = Trainer(convolutional(), loss="cross_entropy", device=copying)
    trainer.train_on_batch(images, Y[:8])


def test_forms_of_unknown_devices_are_those_of_the_cpu() -> None:
    assert providers.forms_of_device(None) == providers.forms_of_device("tpu") == "cpu"
    assert {provider.forms for provider in PROVIDERS.values()} >= {"cpu", "cuda", "webgpu"}


def test_the_page_about_devices_has_every_provider() -> None:
    page = (Path(__file__).parents[2] / "docs" / "devices.md").read_text(encoding="utf-8")
    for kind, provider in PROVIDERS.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f'| `"{kind}"`')]
        assert all(
            text in row
            for text in (provider.name, provider.package, provider.plugin, provider.tested)
        )


# ------------------------------------------------------------------ the nodes left to the CPU


needs_placement = pytest.mark.skipif(
    not hasattr(onnxruntime.InferenceSession, "get_provider_graph_assignment_info"),
    reason="this onnxruntime does not say where nodes run",
)


@needs_placement
def test_inspect_says_which_operators_run_on_the_cpu() -> None:
    trainer = Trainer(mlp(), loss="cross_entropy")
    report = trainer.inspect("cpu")
    assert report.device == "cpu"
    assert {"Tanh", "Gemm"} <= dict(report.on_cpu).keys()
    assert "With device='cpu', the CPU computes" in str(report)
    assert "the CPU computes" in report._repr_html_()
    assert trainer.inspect().on_cpu == ()
    assert "On '" not in str(trainer.inspect())


@pytest.mark.skipif(
    hasattr(onnxruntime.InferenceSession, "get_provider_graph_assignment_info"),
    reason="this onnxruntime says where nodes run",
)
def test_an_older_onnxruntime_does_not_say_where_nodes_run() -> None:
    with pytest.raises(InstallationError, match=r"1\.24 or newer"):
        Trainer(mlp(), loss="cross_entropy").inspect("cpu")


def test_inspect_refuses_devices_without_a_step() -> None:
    with pytest.raises(SettingError, match="this trainer has no loss"):
        Trainer(mlp()).inspect("cpu")
    with pytest.raises(SettingError, match="device must be one of"):
        Trainer(mlp(), loss="cross_entropy").inspect("tpu")


def test_inspect_asks_for_the_rows_that_a_gradient_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxfit.runtime import placement

    def fails(*_: object) -> None:
        raise GradientError("sizes are missing")

    monkeypatch.setattr(placement, "train_graph", fails)
    with pytest.raises(GradientError, match="batch_size=32"):
        Trainer(mlp(), loss="cross_entropy").inspect("cpu")


# ------------------------------------------------------------------ the real providers


@pytest.mark.parametrize("kind", [kind for kind in PROVIDERS if kind not in ("cpu", "cuda")])
@pytest.mark.parametrize("network", ["mlp", "convolutional", "normalized"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_a_provider_trains_as_the_cpu_does(
    kind: str, network: str, optimizer: str, backend: str
) -> None:
    try:
        Device.parse(kind)
    except InstallationError as error:
        pytest.skip(str(error))
    if network == "mlp":
        model, shape = mlp((64, 16, 3), "Relu"), (32, 64)
    else:
        model, shape = convolutional(batch_norm=network == "normalized"), (32, 1, 8, 8)
    x = RNG.normal(size=shape).astype(np.float32)
    losses = []
    for device in ("cpu", kind):
        trainer = Trainer(
            model, loss="cross_entropy", optimizer=optimizer, device=device, backend=backend
        )
        losses.append([trainer.train_on_batch(x, Y.repeat(2)[:32])["loss"] for _ in range(6)])
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert len(set(losses[0])) == 6

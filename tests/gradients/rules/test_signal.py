"""What the cases cannot ask of STFT: onnxruntime's own is wrong for complex signals."""

from __future__ import annotations

import numpy as np

from tests.gradients.rules.cases import Case, built, meets_differences, same


def test_stft_of_a_complex_signal() -> None:
    case = Case(
        "STFT complex",
        "float[2,7,2] x, float[4] w",
        "y = STFT<onesided=0>(x, step, w)",
        "int64 step = {3}",
    )
    rng = np.random.default_rng(0)
    feeds = {"x": rng.normal(size=(2, 7, 2)), "w": rng.normal(size=4)}
    arriving = {"y_grad": rng.normal(size=(2, 2, 4, 2))}
    graph = built(case.model(double=True), case.outputs, case.wrt, arriving)
    found = graph.run({**feeds, **arriving})
    signal = feeds["x"][..., 0] + 1j * feeds["x"][..., 1]
    spectrum = np.fft.fft(np.stack([signal[:, i : i + 4] * feeds["w"] for i in (0, 3)], axis=1))
    same(
        found, {"y": np.stack([spectrum.real, spectrum.imag], axis=-1)}, ["y"], 1e-9, "the forward"
    )
    meets_differences(
        graph.run,
        case.outputs,
        case.wrt,
        feeds,
        arriving,
        {n: found[f"{n}_grad"] for n in case.wrt},
    )

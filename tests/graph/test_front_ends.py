"""Filter banks at the input of a network: fixed ones are found, learned ones are left.

The banks are written in NumPy from their definitions, as scipy, librosa and nnAudio compute them.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxfit
from onnxfit import ModelError, Trainer
from onnxfit.graph import front_ends
from onnxfit.graph.weights import weight_reasons
from onnxfit.load.normalize import normalize

N_FFT, HOP = 64, 16
BINS = N_FFT // 2 + 1
WINDOWS = {
    "hann": lambda n: 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(n) / n),
    "symmetric hann": np.hanning,
    "hamming": np.hamming,
    "blackman": np.blackman,
    "kaiser": lambda n: np.kaiser(n, 8.0),
    "rectangular": np.ones,
    "short": lambda n: np.pad(np.hanning(n - 24), 12),
}


def fourier(window=WINDOWS["hann"], scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Return the cosines and the sines of an STFT, [frequencies, times]."""
    angles = 2 * np.pi * np.outer(np.arange(BINS), np.arange(N_FFT)) / N_FFT
    factor = scale * window(N_FFT)
    return (np.cos(angles) * factor).astype(np.float32), (-np.sin(angles) * factor).astype("f4")


def mel(bands: int = 12, bins: int = BINS, kind: str = "htk") -> np.ndarray:
    """Return triangles on a mel scale, or on a linear one, [bands, bins]."""
    top = 8000.0
    frequencies = np.linspace(0, top, bins)
    if kind == "linear":
        points = np.linspace(0, top, bands + 2)
    else:
        points = 700 * (
            10 ** (np.linspace(0, 2595 * np.log10(1 + top / 700), bands + 2) / 2595) - 1
        )
    slopes = points[:, None] - frequencies
    widths = np.diff(points)
    rising, falling = -slopes[:-2] / widths[:-1, None], slopes[2:] / widths[1:, None]
    bank = np.maximum(0, np.minimum(rising, falling))
    if kind == "slaney":
        bank *= (2 / (points[2:] - points[:-2]))[:, None]
    return bank.astype(np.float32)


def constant_q(bands: int = 24, length: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines and sines with a window of their own each, as librosa and nnAudio do."""
    real, imaginary = np.zeros((2, bands, length), np.float32)
    for k in range(bands):
        frequency = 0.04 * 2 ** (k / 12)
        n = int(np.ceil(8 / frequency))
        start = int(np.ceil(length / 2 - n / 2))
        wave = np.exp(2j * np.pi * frequency * (np.arange(n) - n // 2)) * WINDOWS["hann"](n) / n
        real[k, start : start + n], imaginary[k, start : start + n] = wave.real, wave.imag
    return real, imaginary


class Net:
    """A model in the making: the nodes of one output after the other."""

    def __init__(self) -> None:
        self.nodes: list[str] = []
        self.tensors: dict[str, np.ndarray] = {}

    def __call__(self, node: str, **tensors: np.ndarray) -> Net:
        self.nodes.append(node)
        self.tensors.update(tensors)
        return self

    def model(self, shape: str = "N, 1, 640", output: str = "y") -> onnx.ModelProto:
        model = onnx.parser.parse_model(
            f"""<ir_version: 8, opset_import: ["": 17]> g (float[{shape}] x) => (float[N, ?, ?] {output})
            {{ {" ".join(self.nodes)} }}"""
        )
        for name, array in self.tensors.items():
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))
        del model.graph.output[0].type.tensor_type.shape.dim[:]
        model.graph.output[0].type.tensor_type.ClearField("shape")
        return model


def roles(model: onnx.ModelProto) -> dict[str, str]:
    reasons = weight_reasons(normalize(model))
    return {name: reason.text for name, reason in reasons.items() if reason.is_formula}


def weight(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.2, shape).astype(np.float32)


POWER = "rr = Mul(r, r) ii = Mul(i, i) p = Add(rr, ii)"
LEARNED = "m = Conv(l, w) y = Relu(m)"


def spectrogram(real: np.ndarray, imaginary: np.ndarray) -> Net:
    """Return frames, Conv1d with both banks, power, logarithm and a learned convolution."""
    net = Net()(f"r = Conv<strides=[{HOP}]>(x, real)", real=real[:, None])
    net(f"i = Conv<strides=[{HOP}]>(x, imaginary)", imaginary=imaginary[:, None])
    net(POWER)("e = Clip(p, least) l = Log(e)", least=np.float32(1e-9))
    return net(LEARNED, w=weight(4, len(real), 3))


class TestFourierBanks:
    @pytest.mark.parametrize("window", WINDOWS)
    @pytest.mark.parametrize("scale", [1.0, 0.013])
    def test_of_any_window_are_found_in_convolutions(self, window: str, scale: float) -> None:
        found = roles(spectrogram(*fourier(WINDOWS[window], scale)).model())
        assert found == dict.fromkeys(["real", "imaginary"], "STFT filter bank at 'x'")

    def test_are_found_in_one_tensor(self) -> None:
        halves = np.concatenate(fourier())
        alternating = np.stack(fourier(), 1).reshape(2 * BINS, -1)
        for basis in (halves, alternating):
            net = Net()("c = Conv<strides=[16]>(x, basis)", basis=basis[:, None])
            net("p = Pow(c, two) l = ReduceSum(p, axis)", two=np.float32(2), axis=np.array([1]))
            assert roles(net("s = Sqrt(l) y = Conv(s, w)", w=weight(4, 1, 3)).model()) == {
                "basis": "STFT filter bank at 'x'"
            }

    @pytest.mark.parametrize("form", ["MatMul", "left MatMul", "Gemm", "transposed Gemm"])
    def test_are_found_in_matrices(self, form: str) -> None:
        real, _ = fourier()
        layer = {
            "MatMul": ("r = MatMul(x, real)", real.T, "N, 64"),
            "left MatMul": ("r = MatMul(real, x)", real, "N, 64, 10"),
            "Gemm": ("r = Gemm(x, real)", real.T, "N, 64"),
            "transposed Gemm": ("r = Gemm<transB=1>(x, real)", real, "N, 64"),
        }
        node, matrix, shape = layer[form]
        net = Net()(node, real=np.ascontiguousarray(matrix))(
            "a = Abs(r) y = Mul(a, w)", w=weight(1, 1, 2)
        )
        assert roles(net.model(shape)) == {"real": "STFT filter bank at 'x'"}

    def test_are_found_with_their_windows_biases_and_bands(self) -> None:
        """The whole front end of a network, with the shapes of torchlibrosa in float16."""
        real, imaginary = (bank.astype(np.float16) for bank in fourier(np.ones))
        net = Net()("f = Mul(x, window)", window=np.hanning(N_FFT).astype(np.float16))
        net("r = Gemm(f, real, none) i = MatMul(f, imaginary)", none=np.zeros(BINS, np.float16))
        net(POWER + " b = MatMul(p, bands) l = Log(b)", bands=mel().T.astype(np.float16))
        net("d = MatMul(l, dct) y = MatMul(d, w)", w=weight(8, 4).astype(np.float16))
        k, t = np.arange(8)[:, None], np.arange(32)
        net.tensors |= {"real": real.T, "imaginary": imaginary.T}
        cosines = np.cos(np.pi * k * (2 * t + 1) / 64) * np.where(k == 0, 0.5**0.5, 1)
        net.tensors |= {"bands": mel(32, kind="linear").T.astype(np.float16)}
        net.tensors |= {"dct": cosines.T.astype(np.float16)}
        model = net.model("N, 64")
        model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
        model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
        stft = dict.fromkeys(["real", "imaginary", "none"], "STFT filter bank at 'x'")
        others = {"window": "window", "bands": "mel filter bank", "dct": "cosine transform"}
        assert roles(model) == stft | {n: f"{role} at 'x'" for n, role in others.items()}

    def test_are_found_in_bodies(self) -> None:
        text = """<ir_version: 8, opset_import: ["": 17]>
            g (float[N, 1, 640] x, bool fast) => (float[N, 33, 37] y) {
            y = If(fast) <
              then_branch = a () => (float[N, 33, 37] u) { r = Conv<strides=[16]>(x, real) u = Abs(r) },
              else_branch = b () => (float[N, 33, 37] v) { s = Conv<strides=[16]>(x, w) v = Abs(s) }> }"""
        model = onnx.parser.parse_model(text)
        tensors = {"real": fourier()[0][:, None], "w": weight(BINS, 1, N_FFT)}
        for name, array in tensors.items():
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        assert roles(model) == {"real": "STFT filter bank at 'x'"}


class TestOtherBanks:
    def test_constant_q_with_decimation_and_scale(self) -> None:
        real, imaginary = constant_q()
        t = np.arange(32) - 15.5
        low_pass = (np.sinc(t / 2) / 2 * np.hamming(32)).astype(np.float32)[None, None]
        net = Net()("d = Conv<strides=[2]>(x, low)", low=low_pass)
        net("r = Conv<strides=[8]>(d, real) i = Conv<strides=[8]>(d, imaginary)")
        net(
            "s = Mul(r, scale) t = Mul(i, scale)",
            scale=np.geomspace(9, 2, 24).astype("f4")[:, None],
        )
        net("rr = Mul(s, s) ii = Mul(t, t) p = Add(rr, ii) l = Sqrt(p)")(
            LEARNED, w=weight(4, 24, 3)
        )
        net.tensors |= {"real": real[:, None], "imaginary": imaginary[:, None]}
        assert roles(net.model("N, 1, 1600")) == {
            "low": "low-pass filter at 'x'",
            "real": "CQT filter bank at 'x'",
            "imaginary": "CQT filter bank at 'x'",
            "scale": "filter bank's scale at 'x'",
        }

    @pytest.mark.parametrize("kind", ["htk", "slaney", "linear"])
    def test_bands_of_a_spectrogram(self, kind: str) -> None:
        bands = mel(20, 129, kind)
        for node, form in (
            ("b = MatMul(x, bands)", bands.T),
            ("b = Gemm<transB=1>(x, bands)", bands),
            ("u = Unsqueeze(x, two) b = Conv(u, bands)", bands[..., None]),
        ):
            net = Net()(node, bands=np.ascontiguousarray(form), two=np.array([2]))
            net("e = Max(b, least) y = Log(e)", least=np.float32(1e-6))
            assert roles(net.model("N, 129")) == {"bands": "mel filter bank at 'x'"}

    def test_bands_that_nodes_compute_from_initializers(self) -> None:
        """swift-f0 scatters the numbers of its sparse bank into zeros."""
        bank = mel().T
        places = np.flatnonzero(bank)
        net = Net()("z = Expand(zero, size) f = ScatterElements<axis=0>(z, places, numbers)")
        net("bands = Reshape(f, shape) a = Abs(x) b = MatMul(a, bands) y = Log(b)")
        net.tensors |= {"zero": np.zeros(1, np.float32), "size": np.array([bank.size])}
        net.tensors |= {"places": places, "numbers": bank.reshape(-1)[places]}
        net.tensors |= {"shape": np.array(bank.shape)}
        assert roles(net.model(f"N, {BINS}")) == {"numbers": "mel filter bank at 'x'"}


def test_huge_tensors_that_nodes_compute_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_ends, "evaluate", lambda *_: pytest.fail("computed"))
    net = Net()("bands = Expand(zero, size) a = Abs(x) b = MatMul(a, bands) y = Log(b)")
    net.tensors |= {"zero": np.zeros((BINS, 1), np.float32), "size": np.array([BINS, 2**40])}
    assert not roles(net.model(f"N, {BINS}"))


def perturbed(bank: np.ndarray) -> np.ndarray:
    """Return a bank after a little training."""
    noise = np.random.default_rng(0).normal(0, 0.01, bank.shape)
    return (bank + noise * np.abs(bank).max()).astype(np.float32)


class TestLearnedFilters:
    """Nothing of these is found: training a wrong tensor less is worse than missing a bank."""

    @pytest.mark.parametrize(
        "bank",
        [
            weight(BINS, N_FFT),
            weight(BINS, N_FFT) * np.hanning(N_FFT).astype("f4"),
            perturbed(fourier()[0]),
            perturbed(constant_q(24, 256)[0]),
            np.zeros((BINS, N_FFT), np.float32),
            np.ones((BINS, N_FFT), np.float32),
            np.eye(BINS, N_FFT, dtype=np.float32),
            np.abs(weight(BINS, N_FFT)),
            np.arange(BINS * N_FFT, dtype=np.float32).reshape(BINS, -1) / 1000,
            np.sin(np.arange(BINS * N_FFT, dtype=np.float32)).reshape(BINS, -1),
            np.linspace(-1, 1, BINS * N_FFT, dtype=np.float32).reshape(BINS, -1),
            np.random.default_rng(1).permutation(fourier()[0]),
            np.linalg.qr(np.random.default_rng(0).normal(size=(N_FFT, N_FFT)))[0][:BINS].astype(
                "f4"
            ),
        ],
        ids=[
            "random",
            "windowed",
            "trained STFT",
            "trained CQT",
            "zeros",
            "ones",
            "identity",
            "positive",
            "numbers",
            "sine of a count",
            "line",
            "shuffled",
            "orthogonal",
        ],
    )
    def test_at_the_place_of_a_bank(self, bank: np.ndarray) -> None:
        assert not roles(spectrogram(bank, bank).model())
        for node, form in (("r = MatMul(x, real)", bank.T), ("r = Gemm<transB=1>(x, real)", bank)):
            net = Net()(node, real=np.ascontiguousarray(form))("a = Abs(r) y = Log(a)")
            assert not roles(net.model(f"N, {bank.shape[1]}"))

    def test_sinc_filters(self) -> None:
        """SincNet learns the edges of band-passes, which begin on a mel scale."""
        t = np.arange(129) - 64
        edges = np.geomspace(0.01, 0.45, 17)[:, None]
        low, high = 2 * edges[:-1], 2 * edges[1:]
        bands = high * np.sinc(high * t) - low * np.sinc(low * t)
        bank = (bands * np.hamming(129)).astype(np.float32)
        assert not roles(spectrogram(bank, bank).model())

    def test_gabor_filters(self) -> None:
        """LEAF learns the frequencies and the widths of Gabor filters."""
        t = np.arange(129) - 64
        centers, widths = np.geomspace(0.1, 2, 16)[:, None], np.geomspace(40, 8, 16)[:, None]
        bank = (np.exp(-((t / widths) ** 2) / 2) * np.cos(centers * t)).astype(np.float32)
        assert not roles(spectrogram(bank, bank).model())

    @pytest.mark.parametrize(
        "nodes",
        [
            "a = Relu(r) y = MatMul(a, w)",
            "n = MatMul(r, w) y = Abs(n)",
            "a = Concat<axis=1>(r, r) y = Relu(a)",
        ],
    )
    def test_a_basis_without_a_magnitude(self, nodes: str) -> None:
        net = Net()("r = MatMul(x, real)", real=fourier()[0].T)(nodes, w=weight(BINS, BINS))
        assert not roles(net.model("N, 64"))

    def test_a_basis_after_a_learned_layer(self) -> None:
        net = Net()("h = MatMul(x, w) r = MatMul(h, real) y = Abs(r)", w=weight(5, N_FFT))
        net.tensors["real"] = fourier()[0].T
        assert not roles(net.model("N, 5"))

    def test_a_basis_after_an_activation(self) -> None:
        net = Net()("h = Relu(x) r = MatMul(h, real) y = Abs(r)", real=fourier()[0].T)
        assert not roles(net.model("N, 64"))

    def test_a_basis_with_a_learned_bias(self) -> None:
        net = Net()("r = Gemm(x, real, b) y = Abs(r)", real=fourier()[0].T, b=weight(BINS))
        assert not roles(net.model("N, 64"))

    def test_a_basis_that_another_layer_reads(self) -> None:
        net = Net()(
            "r = MatMul(x, real) y = Abs(r) h = Relu(x) z = MatMul(h, real)", real=fourier()[0].T
        )
        model = net.model("N, 64")
        model.graph.output.append(onnx.helper.make_tensor_value_info("z", 1, ["N", BINS]))
        assert not roles(model)

    def test_scales_of_a_normalization(self) -> None:
        """A learned gain of a spectrum, and a learned scale after its logarithm."""
        real, _ = fourier()
        net = Net()("r = MatMul(x, real) g = Mul(r, gain) a = Abs(g) l = Log(a) y = Mul(l, scale)")
        net.tensors |= {
            "real": real.T,
            "gain": weight(BINS),
            "scale": np.hanning(BINS).astype("f4"),
        }
        assert list(roles(net.model("N, 64"))) == ["real"]

    def test_images(self) -> None:
        net = Net()("r = Conv(x, w) y = Abs(r)", w=np.ones((16, 1, 4, 16), np.float32))
        assert not roles(net.model("N, 1, 32, 32"))


class TestTrainingWithAFrontEnd:
    def model(self) -> onnx.ModelProto:
        return spectrogram(*fourier()).model()

    def test_a_warning_names_the_tensors_and_the_setting(self) -> None:
        with pytest.warns(UserWarning, match="By their numbers") as caught:
            trainer = Trainer(self.model(), loss="mse")
        assert str(caught[0].message) == (
            "By their numbers, 'real', 'imaginary' are the STFT filter bank at 'x'. These tensors"
            " are not trained. To train them, pass weights=[*onnxfit.inspect(model).weights,"
            " 'real', 'imaginary']."
        )
        assert list(trainer.get_weights()) == ["w"]
        assert len(caught) == 1

    def test_names_and_patterns_train_them_without_a_warning(self) -> None:
        model = self.model()
        weights = [*onnxfit.inspect(model).weights, "real", "imaginary"]
        for chosen in (weights, ["*"], ["w", "re*", "imag*"]):
            assert set(Trainer(model, chosen, loss="mse").get_weights()) >= {
                "w",
                "real",
                "imaginary",
            }
        trainer = Trainer(model, "real", loss="mse", optimizer=1e-4)
        x = np.random.default_rng(0).normal(size=(2, 1, 640)).astype(np.float32)
        trainer.train_on_batch(x, np.zeros_like(trainer.predict(x)))
        assert np.abs(trainer.get_weights()["real"] - fourier()[0][:, None]).max() > 0

    def test_exports_keep_them(self) -> None:
        with pytest.warns(UserWarning, match="By their numbers"):
            trainer = Trainer(self.model(), loss="mse", optimizer=0.01)
        x = np.random.default_rng(0).normal(size=(2, 1, 640)).astype(np.float32)
        trainer.train_on_batch(x, np.ones_like(trainer.predict(x)))
        tensors = {
            t.name: onnx.numpy_helper.to_array(t) for t in trainer.export().graph.initializer
        }
        np.testing.assert_array_equal(tensors["real"], fourier()[0][:, None])
        assert np.abs(tensors["w"] - weight(4, BINS, 3)).max() > 0

    def test_inspect_and_summary_show_the_role(self) -> None:
        report = onnxfit.inspect(self.model())
        shown = {use.name: (use.trains, use.parameter) for use in report.initializers}
        assert report.weights == ("w",)
        assert shown["real"] == (False, "STFT filter bank at 'x'")
        with pytest.warns(UserWarning, match="By their numbers"):
            text = str(Trainer(self.model(), loss="mse").summary())
        line = next(line for line in text.splitlines() if line.startswith("imag"))
        assert "frozen" in line
        assert "STFT filter bank at 'x'" in line

    def test_a_model_of_filters_only_is_an_error(self) -> None:
        net = Net()("r = MatMul(x, real) a = Abs(r) b = MatMul(a, bands) y = Log(b)")
        net.tensors |= {"real": fourier()[0].T, "bands": mel().T}
        model = net.model("N, 64")
        expected = (
            "The model has no weights to train: by their numbers, 'real' is the STFT filter bank at"
            " 'x'; 'bands' is the mel filter bank at 'x'. These tensors are fixed by default. To"
            " train them, pass weights=['real', 'bands']."
        )
        with pytest.raises(ModelError) as error:
            Trainer(model, loss="mse")
        assert str(error.value) == expected
        assert expected in str(onnxfit.inspect(model))
        assert list(Trainer(model, "bands", loss="mse").get_weights()) == ["bands"]

    def test_a_checkpoint_that_trains_them_resumes(self, tmp_path) -> None:
        """Earlier versions trained all tensors by default. Checkpoints list the trained weights."""
        x = np.random.default_rng(0).normal(size=(2, 1, 640)).astype(np.float32)
        trainer = Trainer(self.model(), ["*"], loss="mse", optimizer="adam")
        y = np.zeros_like(trainer.predict(x))
        trainer.train_on_batch(x, y)
        trainer.save(tmp_path / "checkpoint")
        resumed = Trainer.load(tmp_path / "checkpoint")
        assert resumed.train_on_batch(x, y) == trainer.train_on_batch(x, y)
        for name, array in trainer.get_weights().items():
            np.testing.assert_array_equal(resumed.get_weights()[name], array)

"""Losses over several outputs, inputs and values of a model, compared with PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

import onnxfit
from onnxfit.errors import DataError, SettingError, UnknownNameError, UnsupportedError
from onnxfit.losses import (
    DPO,
    ORPO,
    Circle,
    Contrastive,
    CosineEmbedding,
    InfoNCE,
    Joint,
    MarginRanking,
    NTXent,
    SigLIP,
    SupCon,
    TripletMargin,
    TripletSemiHard,
)
from tests.distributed.threads import on_ranks
from tests.trainable.quantized.packed_files import packed_file, real_numbers

RNG = np.random.default_rng(0)
BACKENDS = ("full", "forward_backward", "in_place")
RATE = 0.1


def drawn(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape)


def with_weights(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    """The model of a text, with initializers in double precision."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]>\n{text}')
    model.graph.initializer.extend(onnx.numpy_helper.from_array(w, n) for n, w in weights.items())
    return model


def two_towers() -> onnx.ModelProto:
    """Embeddings of images and texts, and a scale of logits that no node reads."""
    return with_weights(
        """towers (double[N, 6] pixels, double[N, 5] words)
             => (double[N, 4] image, double[N, 4] text)
           { image = MatMul(pixels, wi)  hidden = Tanh(words)  text = MatMul(hidden, wt) }""",
        wi=drawn(6, 4),
        wt=drawn(5, 4),
        scale=np.array(0.7),
    )


PIXELS, WORDS = drawn(12, 6), drawn(12, 5)
X = {"pixels": PIXELS, "words": WORDS}
TOWERS = two_towers()


def unit(op, a):
    return a / op.Sqrt(op.ReduceSum(a * a, [1], keepdims=1))


def matched(op, logits):
    """The cross entropy of each row, whose class is on the diagonal."""
    return -op.ReduceSum(op.LogSoftmax(logits, axis=1) * op.EyeLike(logits), [1], keepdims=0)


def clip_loss(op, image, text, scale):
    logits = op.MatMul(unit(op, image), op.Transpose(unit(op, text), perm=[1, 0])) * op.Exp(scale)
    return (matched(op, logits) + matched(op, op.Transpose(logits, perm=[1, 0]))) / 2


CLIP = Joint(clip_loss, outputs=["image", "text"], values="scale")


def trained(model: onnx.ModelProto, loss: Any, x: Any, y: Any = None, **settings: Any):
    """The losses of four steps on all rows, and the weights after them."""
    steps = settings.pop("steps", 4)
    weight = settings.pop("sample_weight", None)
    trainer = onnxfit.Trainer(model, loss=loss, optimizer=RATE, **settings)
    losses = [trainer.train_on_batch(x, y, weight)["loss"] for _ in range(steps)]
    return losses, trainer.get_weights()


def by_torch(model: onnx.ModelProto, compute: Callable[[dict[str, Any]], Any], steps: int = 4):
    """The same by PyTorch: `compute` returns the loss from the weights by name."""
    torch = pytest.importorskip("torch")
    weights = {
        w.name: torch.tensor(onnx.numpy_helper.to_array(w), requires_grad=True)
        for w in model.graph.initializer
    }
    optimizer = torch.optim.SGD(weights.values(), lr=RATE)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = compute(weights)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: weight.detach().numpy() for name, weight in weights.items()}


def assert_same(got: Any, expected: Any, rtol: float = 1e-9) -> None:
    np.testing.assert_allclose(got[0], expected[0], rtol=rtol)
    assert got[0][-1] < got[0][0]
    for name, weight in got[1].items():
        np.testing.assert_allclose(weight, expected[1][name], rtol=rtol, atol=rtol, err_msg=name)


def torch_clip(weights: dict[str, Any]) -> Any:
    import torch
    from torch.nn import functional

    image = functional.normalize(torch.tensor(PIXELS) @ weights["wi"])
    text = functional.normalize(torch.tensor(WORDS).tanh() @ weights["wt"])
    logits = weights["scale"].exp() * image @ text.T
    rows = torch.arange(len(logits))
    return (functional.cross_entropy(logits, rows) + functional.cross_entropy(logits.T, rows)) / 2


@pytest.mark.torch
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_loss_of_clip_trains_as_in_torch(backend: str) -> None:
    """Also its scale, an initializer that no node of the file reads."""
    weights = ["wi", "wt", "scale"]
    got = trained(TOWERS, CLIP, X, weights=weights, backend=backend)
    assert got[1]["scale"] != 0.7
    assert_same(got, by_torch(TOWERS, torch_clip))


VAE = with_weights(
    """vae (double[N, 5] x, double[N, 2] noise) => (double[N, 5] y, double[N, 2] log_variance)
       { hidden = MatMul(x, w)  active = Tanh(hidden)
         mean = MatMul(active, wm)
         log_variance = MatMul(active, wv)
         half = Mul(log_variance, point5)  deviation = Exp(half)
         scaled = Mul(deviation, noise)  code = Add(mean, scaled)
         y = MatMul(code, wd) }""",
    w=drawn(5, 3),
    wm=drawn(3, 2),
    wv=drawn(3, 2),
    wd=drawn(2, 5),
    point5=np.array(0.5),
)
ROWS, NOISE = drawn(8, 5), drawn(8, 2)


def vae_loss(op, y, log_variance, x, mean):
    reconstruction = op.ReduceSum((y - x) ** 2, [1], keepdims=0)
    divergence = 1 + log_variance - mean**2 - op.Exp(log_variance)
    return reconstruction - op.ReduceSum(divergence, [1], keepdims=0) / 2


ELBO = Joint(vae_loss, outputs=["y", "log_variance"], inputs=["x"], values=["mean"])


def torch_vae(weights: dict[str, Any], counts: Any = 1.0) -> Any:
    import torch

    x = torch.tensor(ROWS)
    active = (x @ weights["w"]).tanh()
    mean, log_variance = active @ weights["wm"], active @ weights["wv"]
    y = (mean + (0.5 * log_variance).exp() * torch.tensor(NOISE)) @ weights["wd"]
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1)
    return ((((y - x) ** 2).sum(1) + divergence) * counts).mean()


@pytest.mark.torch
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_variational_autoencoder_trains_as_in_torch(backend: str) -> None:
    """The loss reads outputs, an input, and the mean, which is no output of the file."""
    x, weights = {"x": ROWS, "noise": NOISE}, ["w*"]
    got = trained(VAE, ELBO, x, backend=backend, weights=weights)
    assert_same(got, by_torch(VAE, torch_vae))


@pytest.mark.torch
@pytest.mark.parametrize("backend", BACKENDS)
def test_sample_weights_scale_the_rows_of_a_joint_loss(backend: str) -> None:
    import torch

    counts = np.array([1, 2, 0, 0.5, 1, 1, 3, 0])
    x, weights = {"x": ROWS, "noise": NOISE}, ["w*"]
    got = trained(VAE, ELBO, x, backend=backend, weights=weights, sample_weight=counts)
    expected = by_torch(VAE, lambda w: torch_vae(w, torch.tensor(counts)))
    assert_same(got, expected, 1e-7)  # weights are float32


@pytest.mark.torch
def test_noise_of_the_file_is_drawn_anew_in_each_step() -> None:
    model = with_weights(
        """vae (float[N, 2] x) => (float[N, 2] y, float[N, 2] mean)
           { mean = MatMul(x, w)  noise = RandomNormalLike(mean)  y = Add(mean, noise) }""",
        w=drawn(2, 2).astype(np.float32),
    )
    trainer = onnxfit.Trainer(
        model, loss=Joint(lambda op, y, mean: (y - mean) ** 2, outputs=["y", "mean"]), optimizer=1.0
    )
    x = np.ones((1000, 2), np.float32)
    before = trainer.get_weights()["w"]
    losses = [trainer.train_on_batch(x)["loss"] for _ in range(3)]
    assert len(set(losses)) == 3
    np.testing.assert_allclose(losses, 1, atol=0.1)  # the variance of the noise
    np.testing.assert_allclose(trainer.get_weights()["w"], before, atol=1e-5)


THREE = with_weights(
    """three (double[N, 4] a, double[N, 4] p, double[N, 4] n)
         => (double[N, 3] anchor, double[N, 3] positive, double[N, 3] negative)
       { anchor = MatMul(a, w)  positive = MatMul(p, w)  negative = MatMul(n, w) }""",
    w=drawn(4, 3),
)
TRIPLES = {"a": drawn(10, 4), "p": drawn(10, 4), "n": drawn(10, 4)}


@pytest.mark.torch
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_triplet_margin_trains_as_in_torch(backend: str) -> None:
    import torch

    def triplet(op, anchor, positive, negative):
        def distance(a, b):  # with the eps of PyTorch's pairwise_distance
            return op.Sqrt(op.ReduceSum((a - b + 1e-6) ** 2, [1], keepdims=0))

        return op.Relu(distance(anchor, positive) - distance(anchor, negative) + 1.0)

    def compute(weights: dict[str, Any]) -> Any:
        outputs = [torch.tensor(TRIPLES[name]) @ weights["w"] for name in "apn"]
        return torch.nn.functional.triplet_margin_loss(*outputs)

    loss = Joint(triplet, ["anchor", "positive", "negative"])
    assert_same(trained(THREE, loss, TRIPLES, backend=backend), by_torch(THREE, compute))


@pytest.mark.torch
@pytest.mark.parametrize("backend", BACKENDS)
def test_barlow_twins_train_as_in_torch(backend: str) -> None:
    """A scalar of the whole batch."""
    import torch

    def twins(op, first, second):
        def standard(a):
            centered = a - op.ReduceMean(a, [0], keepdims=1)
            return centered / op.Sqrt(op.ReduceMean(centered**2, [0], keepdims=1))

        rows = op.cast(op.Shape(first, start=0, end=1), first.dtype)
        correlation = op.MatMul(op.Transpose(standard(first), perm=[1, 0]), standard(second)) / rows
        eye = op.EyeLike(correlation)
        factors = eye + 0.05 * (1 - eye)
        return op.ReduceSum(factors * (correlation - eye) ** 2, keepdims=0)

    def compute(weights: dict[str, Any]) -> Any:
        first, second = (torch.tensor(TRIPLES[name]) @ weights["w"] for name in "ap")
        a, b = ((one - one.mean(0)) / one.std(0, unbiased=False) for one in (first, second))
        c = a.T @ b / len(a)
        diagonal = torch.diagonal(c)
        others = (c**2).sum() - (diagonal**2).sum()
        return ((diagonal - 1) ** 2).sum() + 0.05 * others

    loss = Joint(twins, ["anchor", "positive"])
    assert_same(trained(THREE, loss, TRIPLES, backend=backend), by_torch(THREE, compute))


# ---------------------------------------------------------------------- ready-made losses


@pytest.mark.torch
@pytest.mark.parametrize("margin", [0.5, 3.0])
def test_triplet_margin_is_that_of_torch(margin: float) -> None:
    import torch

    def compute(weights: dict[str, Any]) -> Any:
        outputs = [torch.tensor(TRIPLES[name]) @ weights["w"] for name in "apn"]
        return torch.nn.functional.triplet_margin_loss(*outputs, margin=margin)

    loss = TripletMargin(["anchor", "positive", "negative"], margin=margin)
    assert_same(trained(THREE, loss, TRIPLES), by_torch(THREE, compute))


@pytest.mark.torch
@pytest.mark.parametrize("symmetric", [True, False])
def test_info_nce_is_that_of_torch(symmetric: bool) -> None:
    import torch
    from torch.nn import functional

    def compute(weights: dict[str, Any]) -> Any:
        image = functional.normalize(torch.tensor(PIXELS) @ weights["wi"])
        text = functional.normalize(torch.tensor(WORDS).tanh() @ weights["wt"])
        logits, rows = image @ text.T / 0.2, torch.arange(len(PIXELS))
        both_ways = [logits, logits.T] if symmetric else [logits]
        return sum(functional.cross_entropy(one, rows) for one in both_ways) / len(both_ways)

    loss = InfoNCE(["image", "text"], temperature=0.2, symmetric=symmetric)
    assert_same(trained(TOWERS, loss, X), by_torch(TOWERS, compute))


@pytest.mark.torch
def test_info_nce_trains_the_scale_of_the_file() -> None:
    loss = InfoNCE(["image", "text"], values="scale")
    got = trained(TOWERS, loss, X, weights=["wi", "wt", "scale"])
    assert_same(got, by_torch(TOWERS, torch_clip))


def torch_vectors(weights: dict[str, Any], names: str = "apn") -> list[Any]:
    import torch

    return [torch.tensor(TRIPLES[name]) @ weights["w"] for name in names]


TOGETHER = np.array([1, -1, 1, 1, -1, -1, 1, -1, -1, 1])
CLASS_OF_ROW = np.array([0, 1, 0, 2, 1, 0, 2, 1, 0, 7])


@pytest.mark.torch
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("margin", [0.5, 3.0])
def test_losses_of_pairs_are_those_of_torch(margin: float, backend: str) -> None:
    import torch
    from torch.nn import functional

    y = torch.tensor(TOGETHER)

    def contrastive(weights: dict[str, Any]) -> Any:
        distance = functional.pairwise_distance(*torch_vectors(weights, "ap"), eps=0)
        short = (margin - distance).clamp(min=0)
        return torch.where(y == 1, distance**2, short**2).mean()

    def cosine(weights: dict[str, Any]) -> Any:
        return functional.cosine_embedding_loss(*torch_vectors(weights, "ap"), y, margin / 10)

    def ranking(weights: dict[str, Any]) -> Any:
        a, b = torch_vectors(weights, "ap")
        return functional.margin_ranking_loss(a, b, y[:, None], margin)

    names = ["anchor", "positive"]
    for loss, compute in (
        (Contrastive(names, margin=margin), contrastive),
        (CosineEmbedding(names, margin=margin / 10), cosine),
        (MarginRanking(names, margin=margin), ranking),
    ):
        expected = by_torch(THREE, compute)
        assert_same(trained(THREE, loss, TRIPLES, TOGETHER, backend=backend), expected)
        labels = np.maximum(TOGETHER, 0).astype(np.float32)  # 0 for -1
        assert_same(trained(THREE, loss, TRIPLES, labels, backend=backend), expected)


def test_labels_of_pairs_are_checked() -> None:
    trainer = onnxfit.Trainer(THREE, loss=Contrastive(["anchor", "positive"]))
    with pytest.raises(DataError, match=r"expects one of the labels -1, 0, 1 .* got 2 at row 3"):
        trainer.train_on_batch(TRIPLES, np.where(np.arange(10) == 3, 2, 1))


@pytest.mark.torch
@pytest.mark.parametrize("backend", BACKENDS)
def test_nt_xent_is_simclr_in_torch(backend: str) -> None:
    import torch
    from torch.nn import functional

    def compute(weights: dict[str, Any]) -> Any:
        z = functional.normalize(torch.cat(torch_vectors(weights, "ap")))
        logits = (z @ z.T / 0.3).fill_diagonal_(-torch.inf)
        n = len(z) // 2
        partners = torch.arange(2 * n).roll(n)
        return functional.cross_entropy(logits, partners)

    loss = NTXent(["anchor", "positive"], temperature=0.3)
    assert_same(trained(THREE, loss, TRIPLES, backend=backend), by_torch(THREE, compute))


@pytest.mark.torch
@pytest.mark.parametrize("views", ["a", "apn"])
def test_sup_con_is_its_formula_in_torch(views: str) -> None:
    import torch
    from torch.nn import functional

    classes = torch.tensor(CLASS_OF_ROW).repeat(len(views))

    def compute(weights: dict[str, Any]) -> Any:
        z = functional.normalize(torch.cat(torch_vectors(weights, views)))
        costs = []
        for i in range(len(z)):
            others = [j for j in range(len(z)) if j != i]
            positives = [j for j in others if classes[j] == classes[i]]
            below = torch.logsumexp(z[others] @ z[i] / 0.2, 0)
            terms = [z[p] @ z[i] / 0.2 - below for p in positives]
            costs.append(-sum(terms) / len(positives) if positives else torch.zeros(()))
        return torch.stack(costs).mean()

    names = {"a": "anchor", "p": "positive", "n": "negative"}
    loss = SupCon([names[view] for view in views], temperature=0.2)
    got = trained(THREE, loss, TRIPLES, CLASS_OF_ROW)
    assert_same(got, by_torch(THREE, compute))
    weighted = trained(THREE, loss, TRIPLES, CLASS_OF_ROW, sample_weight=np.full(10, 2.0))
    assert weighted[0][0] == pytest.approx(2 * got[0][0])


@pytest.mark.torch
def test_circle_is_its_formula_in_torch() -> None:
    import torch
    from torch.nn import functional

    def compute(weights: dict[str, Any]) -> Any:
        z = functional.normalize(torch_vectors(weights, "a")[0])
        costs = []
        for i in range(len(z)):
            of_pairs: dict[bool, list[Any]] = {True: [], False: []}
            for j in range(len(z)):
                s, same = z[i] @ z[j], bool(CLASS_OF_ROW[i] == CLASS_OF_ROW[j])
                if same and i != j:
                    of_pairs[True].append(-(1.25 - s).clamp(min=0).detach() * (s - 0.75))
                elif not same:
                    of_pairs[False].append((s + 0.25).clamp(min=0).detach() * (s - 0.25))
            totals = [sum((8 * x).exp() for x in terms) for terms in of_pairs.values()]
            costs.append(torch.log(1 + totals[0] * totals[1]) + torch.zeros(()))
        return torch.stack(costs).mean()

    loss = Circle("anchor", scale=8.0)
    assert_same(trained(THREE, loss, TRIPLES, CLASS_OF_ROW), by_torch(THREE, compute))


@pytest.mark.torch
@pytest.mark.parametrize("margin", [0.3, 2.0])
def test_semi_hard_triplets_are_those_of_the_paper(margin: float) -> None:
    import torch

    def compute(weights: dict[str, Any]) -> Any:
        z = torch_vectors(weights, "a")[0]
        costs = []
        for i in range(len(z)):
            distances = [(z[i] - z[j]).norm() for j in range(len(z)) if j != i]
            distances.insert(i, torch.zeros(()))
            negatives = [d for d, c in zip(distances, CLASS_OF_ROW) if c != CLASS_OF_ROW[i]]
            for j in range(len(z)):
                if j != i and CLASS_OF_ROW[j] == CLASS_OF_ROW[i]:
                    farther = [d for d in negatives if d > distances[j]]
                    chosen = min(farther) if farther else max(negatives)
                    costs.append((distances[j] - chosen + margin).clamp(min=0))
        return torch.stack(costs).mean()

    loss = TripletSemiHard("anchor", margin=margin)
    assert_same(trained(THREE, loss, TRIPLES, CLASS_OF_ROW), by_torch(THREE, compute))


@pytest.mark.torch
def test_sig_lip_is_that_of_the_paper_and_trains_the_values_of_the_file() -> None:
    import torch
    from torch.nn import functional

    model = onnx.ModelProto.FromString(TOWERS.SerializeToString())
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(-2.0), "bias"))

    def compute(weights: dict[str, Any]) -> Any:
        image = functional.normalize(torch.tensor(PIXELS) @ weights["wi"])
        text = functional.normalize(torch.tensor(WORDS).tanh() @ weights["wt"])
        logits = image @ text.T * weights["scale"].exp() + weights["bias"]
        signs = 2 * torch.eye(len(logits)) - 1
        return -functional.logsigmoid(signs * logits).sum() / len(logits)

    loss = SigLIP(["image", "text"], values=["scale", "bias"])
    got = trained(model, loss, X, weights=["wi", "wt", "scale", "bias"])
    assert_same(got, by_torch(model, compute))
    fixed = SigLIP(["image", "text"], temperature=float(np.exp(-0.7)), bias=-2.0)
    assert trained(TOWERS, fixed, X)[0][0] == pytest.approx(got[0][0])


ANSWERS = with_weights(
    """answers (double[N, 4] a, double[N, 4] p) => (double[N] chosen, double[N] rejected)
       { first = MatMul(a, w)  f = Exp(first)  g = Add(one, f)  h = Log(g)  chosen = Neg(h)
         second = MatMul(p, w)  k = Exp(second)  l = Add(one, k)  m = Log(l)  rejected = Neg(m) }""",
    w=drawn(4),
    one=np.array(1.0),
)
REFERENCE = -np.abs(drawn(10, 2))


def answers_in_torch(weights: dict[str, Any]) -> list[Any]:
    import torch
    from torch.nn import functional

    return [functional.logsigmoid(-(torch.tensor(TRIPLES[n]) @ weights["w"])) for n in "ap"]


@pytest.mark.torch
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_is_its_formula_in_torch(smoothing: float, backend: str) -> None:
    import torch
    from torch.nn import functional

    def compute(weights: dict[str, Any]) -> Any:
        chosen, rejected = answers_in_torch(weights)
        reference = torch.tensor(REFERENCE)
        gap = 0.5 * ((chosen - reference[:, 0]) - (rejected - reference[:, 1]))
        of_right, of_wrong = functional.logsigmoid(gap), functional.logsigmoid(-gap)
        return -((1 - smoothing) * of_right + smoothing * of_wrong).mean()

    x = {name: TRIPLES[name] for name in "ap"}
    loss = DPO(["chosen", "rejected"], beta=0.5, label_smoothing=smoothing)
    got = trained(ANSWERS, loss, x, REFERENCE, weights=["w"], backend=backend)
    assert_same(got, by_torch(ANSWERS, lambda w: compute(w) + 0 * w["one"]))


@pytest.mark.torch
def test_orpo_is_its_formula_in_torch() -> None:
    import torch
    from torch.nn import functional

    def compute(weights: dict[str, Any]) -> Any:
        chosen, rejected = answers_in_torch(weights)
        odds = [x - torch.log1p(-x.exp()) for x in (chosen, rejected)]
        ratio = functional.logsigmoid(odds[0] - odds[1])
        return (-chosen - 0.3 * ratio).mean() + 0 * weights["one"]

    x = {name: TRIPLES[name] for name in "ap"}
    loss = ORPO(["chosen", "rejected"], weight=0.3)
    assert_same(trained(ANSWERS, loss, x, weights=["w"]), by_torch(ANSWERS, compute))


def test_single_precision_and_the_gradients_of_equal_vectors() -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        pair (float[N, 4] a, float[N, 4] b) => (float[N, 4] c, float[N, 4] d)
        <float[1] w = {1.5}, float[1] v = {0.5}> { c = Mul(a, w)  d = Mul(b, v) }""")
    rng = np.random.default_rng(3)
    for scale in (0.0, 1.0, 1e3):
        x = {name: (scale * rng.normal(size=(6, 4))).astype(np.float32) for name in "ab"}
        for loss, y in (
            (Contrastive(["c", "d"]), TOGETHER[:6]),
            (CosineEmbedding(["c", "d"]), TOGETHER[:6]),
            (NTXent(["c", "d"]), None),
            (SigLIP(["c", "d"]), None),
            (SupCon("c"), CLASS_OF_ROW[:6]),
            (Circle("c"), CLASS_OF_ROW[:6]),
            (TripletSemiHard("c"), CLASS_OF_ROW[:6]),
            (TripletSemiHard("c"), np.zeros(6, int)),  # without negatives
            (Circle("c"), np.arange(6)),  # without positives
        ):
            trainer = onnxfit.Trainer(model, loss=loss, optimizer=0.1, weights=["w"])
            assert np.isfinite(trainer.train_on_batch(x, y)["loss"]), (loss, scale)
            assert np.isfinite(trainer.get_weights()["w"]).all(), (loss, scale)
            assert np.isfinite(trainer.evaluate(x, y, batch_size=4)["loss"])


def test_equal_and_zero_vectors_have_finite_gradients() -> None:
    zeros = {"a": np.zeros((4, 4)), "p": np.zeros((4, 4)), "n": np.zeros((4, 4))}
    losses = (
        TripletMargin(["anchor", "positive", "negative"]),
        InfoNCE(["anchor", "positive"], temperature=0.01),
    )
    for loss in losses:
        costs, weights = trained(THREE, loss, zeros)
        assert np.isfinite(costs).all()
        assert np.isfinite(weights["w"]).all()


def test_a_checkpoint_has_ready_made_losses(tmp_path) -> None:
    loss = {"match": InfoNCE(["image", "text"], temperature=0.2), "text": "mse"}
    trainer = onnxfit.Trainer(TOWERS, loss=loss)
    trainer.fit(X, TARGETS, verbose=0)
    loaded = onnxfit.Trainer.load(trainer.save(tmp_path / "c"))
    assert loaded.loss == loss
    assert loaded.evaluate(X, TARGETS) == trainer.evaluate(X, TARGETS)
    for one, labels in ((SupCon("image"), np.arange(12) % 3), (NTXent(["image", "text"]), None)):
        trainer = onnxfit.Trainer(TOWERS, loss=one)
        trainer.fit(X, labels, batch_size=6, verbose=0)
        loaded = onnxfit.Trainer.load(trainer.save(tmp_path / type(one).__name__))
        assert loaded.loss == one
        assert loaded.evaluate(X, labels) == trainer.evaluate(X, labels)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TripletMargin(["a", "p"]), "an anchor, a positive and a negative, got a, p"),
        (lambda: TripletMargin(["a", "p", "n"], margin=0), "margin > 0"),
        (lambda: InfoNCE(["a", "b", "c"]), "two outputs of vectors"),
        (lambda: InfoNCE("a", values="s"), "two outputs of vectors"),
        (lambda: InfoNCE(["a", "b"], temperature=0), "temperature > 0"),
        (lambda: Contrastive("a"), "Contrastive needs the names of two outputs, got a"),
        (lambda: CosineEmbedding(["a", "b"], margin=2), "margin >= -1 and <= 1"),
        (lambda: SigLIP(["a", "b"], values="s"), "none or both of scale and bias"),
        (lambda: Circle(["a", "b"]), "one output of vectors, got a, b"),
        (lambda: TripletSemiHard("a", margin=0), "margin > 0"),
        (lambda: DPO(["a", "b"], label_smoothing=0.5), "label_smoothing >= 0 and < 0.5"),
        (lambda: ORPO("a"), "a chosen and a rejected answer, got a"),
    ],
)
def test_ready_made_losses_check_their_settings(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make()


# ---------------------------------------------------------------------- beside other losses


def both(**joint: Any) -> dict[str, Any]:
    return {"match": Joint(clip_loss, ["image", "text"], values="scale", **joint), "text": "mse"}


TARGETS = drawn(12, 4)


@pytest.mark.torch
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_joint_loss_beside_the_loss_of_an_output(backend: str) -> None:
    import torch

    def compute(weights: dict[str, Any]) -> Any:
        text = torch.tensor(WORDS).tanh() @ weights["wt"]
        return 0.5 * torch_clip(weights) + 2 * ((text - torch.tensor(TARGETS)) ** 2).mean()

    weights = {"loss_weights": {"match": 0.5, "text": 2.0}, "weights": ["wi", "wt", "scale"]}
    got = trained(TOWERS, both(), X, TARGETS, backend=backend, **weights)
    assert_same(got, by_torch(TOWERS, compute))


@pytest.mark.parametrize("backend", BACKENDS)
def test_logs_have_the_name_of_a_joint_loss(backend: str) -> None:
    trainer = onnxfit.Trainer(TOWERS, loss=both(), metrics=["mae"], backend=backend)
    history = trainer.fit(X, {"text": TARGETS}, validation_split=0.25, verbose=0).history
    assert {"match_loss", "text_loss", "text_mae", "val_match_loss", "loss"} <= set(history)
    figures = trainer.evaluate(X, TARGETS, batch_size=12)
    assert figures["loss"] == pytest.approx(figures["match_loss"] + figures["text_loss"])
    assert set(trainer.predict(X)) == {"image", "text"}
    summary = str(trainer.summary())
    assert "match: clip_loss of outputs image, text, values scale" in summary
    assert "train/" not in summary


def test_a_joint_loss_may_have_labels_and_weights_of_its_own() -> None:
    def pull(op, y_true, image, text):
        distance = op.ReduceSum((image - text) ** 2, [1], keepdims=0)
        return op.Where(y_true["same"], distance, y_true["margin"] - distance)

    labels = {"same": "bool[b]", "margin": "double[b]"}
    loss = {"pull": Joint(pull, ["image", "text"], labels=labels), "text": "mse"}
    same, margin = RNG.random(12) < 0.5, RNG.random(12)
    y = {"pull": {"same": same, "margin": margin}, "text": TARGETS}
    trainer = onnxfit.Trainer(TOWERS, loss=loss, optimizer=0.0)
    outputs = trainer.predict(X)
    distance = ((outputs["image"] - outputs["text"]) ** 2).sum(1)
    costs = np.where(same, distance, margin - distance)
    got = trainer.evaluate(X, y, {"pull": np.arange(12.0)}, batch_size=5)
    assert got["pull_loss"] == pytest.approx((costs * np.arange(12)).mean())
    assert got["text_loss"] == pytest.approx(((outputs["text"] - TARGETS) ** 2).mean())
    flat = {"pull/same": same, "pull/margin": margin, "text": TARGETS}
    assert trainer.evaluate(X, flat) == trainer.evaluate(X, y)
    loader = onnxfit.DataLoader(X, y, batch_size=5)
    assert trainer.evaluate(loader) == trainer.evaluate(X, y, batch_size=5)
    trainer.fit(X, y, validation_split=0.25, verbose=0)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_ranks_share_the_rows_of_a_joint_loss(backend: str, accumulate: int) -> None:
    """A loss by row has the gradient of the whole batch on any number of ranks."""
    x = {"x": ROWS, "noise": NOISE}

    def weights(communicator: Any) -> Any:
        trainer = onnxfit.Trainer(
            VAE, loss=ELBO, weights=["w*"], optimizer=RATE, backend=backend,
            distribute=communicator, accumulate=accumulate,
        )  # fmt: skip
        trainer.fit(x, epochs=2, batch_size=4, verbose=0, shuffle=False)
        return trainer.get_weights(), trainer.evaluate(x, batch_size=4)["loss"]

    expected = weights(None)
    for got in on_ranks(2, weights):
        assert got[1] == pytest.approx(expected[1], rel=1e-12)
        for name, weight in got[0].items():
            np.testing.assert_allclose(weight, expected[0][name], rtol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_needs_the_function_again(backend: str, tmp_path) -> None:
    def new() -> onnxfit.Trainer:
        return onnxfit.Trainer(TOWERS, loss=both(), optimizer="adam", backend=backend)

    whole = new()
    whole.fit(X, TARGETS, epochs=4, verbose=0)
    half = new()
    half.fit(X, TARGETS, epochs=2, verbose=0)
    path = half.save(tmp_path / "half")
    with pytest.raises(onnxfit.errors.CheckpointError, match="custom loss 'Joint'"):
        onnxfit.Trainer.load(path)
    loaded = onnxfit.Trainer.load(path, loss=both())
    loaded.fit(X, TARGETS, epochs=4, initial_epoch=2, verbose=0)
    np.testing.assert_equal(loaded.get_weights(), whole.get_weights())


def test_the_exported_file_has_no_value_of_the_loss(tmp_path) -> None:
    trainer = onnxfit.Trainer(VAE, loss=ELBO, weights=["w*"])
    trainer.fit({"x": ROWS, "noise": NOISE}, verbose=0)
    path = tmp_path / "trained.onnx"
    trainer.export(path)
    session = onnxruntime.InferenceSession(path)
    assert [one.name for one in session.get_outputs()] == ["y", "log_variance"]
    predicted = trainer.predict({"x": ROWS, "noise": NOISE})
    assert set(predicted) == {"y", "log_variance"}
    for name, value in zip(("y", "log_variance"), session.run(None, {"x": ROWS, "noise": NOISE})):
        np.testing.assert_allclose(predicted[name], value, rtol=1e-12)


def test_add_loss_adds_a_joint_loss() -> None:
    graph = onnxfit.add_loss(VAE, ELBO)
    assert [one.name for one in graph.graph.output] == ["y", "log_variance", "train/loss"]
    assert [one.name for one in graph.graph.input] == ["x", "noise"]
    session = onnxruntime.InferenceSession(graph.SerializeToString())
    (loss,) = session.run(["train/loss"], {"x": ROWS, "noise": NOISE})
    trainer = onnxfit.Trainer(VAE, loss=ELBO, weights=["w*"])
    expected = trainer.evaluate({"x": ROWS, "noise": NOISE})["loss"]
    assert float(loss) == pytest.approx(expected)


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Joint(clip_loss, ["image"]), SettingError, r"must accept \(op, image\)"),
        (lambda: Joint(clip_loss), SettingError, "name of an output"),
        (lambda: Joint(clip_loss, ["image", "text"], values=3), SettingError, "values must be"),
        (
            lambda: onnxfit.Trainer(TOWERS, loss=Joint(lambda op, a: a, ["imag"])),
            UnknownNameError,
            "Did you mean 'image'",
        ),
        (
            lambda: onnxfit.Trainer(TOWERS, loss=Joint(lambda op, a: a, values=["hiden"])),
            UnknownNameError,
            "Did you mean 'hidden'",
        ),
        (
            lambda: onnxfit.Trainer(TOWERS, loss={"a/b": CLIP}),
            SettingError,
            "no '/'",
        ),
        (
            lambda: onnxfit.Trainer(TOWERS, loss=CLIP, metrics=["mae"]),
            SettingError,
            "one output with one array of labels",
        ),
        (
            lambda: onnxfit.Trainer(TOWERS, loss=CLIP).fit(X, TARGETS),
            DataError,
            "takes no labels",
        ),
        (
            lambda: onnxfit.Trainer(TOWERS, loss=Joint(lambda op, a: 1.0, ["image"])),
            SettingError,
            "must return a Value of floats",
        ),
        (CLIP.build_onnx_function, UnsupportedError, "add_loss"),
        (
            lambda: onnxfit.Trainer(TOWERS, loss=both()).fit(
                X, TARGETS, class_weight={0: 1.0}, verbose=0
            ),
            DataError,
            "integer classes",
        ),
    ],
)  # fmt: skip
def test_errors_say_what_to_do(make: Callable[[], Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_scalar_cannot_have_weights_of_rows() -> None:
    loss = Joint(lambda op, image, text: op.ReduceMean((image - text) ** 2, keepdims=0),
                 ["image", "text"])  # fmt: skip
    trainer = onnxfit.Trainer(TOWERS, loss=loss)
    trainer.fit(X, verbose=0)
    with pytest.raises(SettingError, match="one number per batch"):
        trainer.fit(X, sample_weight=np.ones(12), verbose=0)


# ---------------------------------------------------------------------- quantized files


def autoencoder() -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
           ae (float[N, 8] x) => (float[N, 8] y) { code = MatMul(x, w)  y = MatMul(code, v) }"""
    )
    for name, shape in {"w": (8, 4), "v": (4, 8)}.items():
        weight = RNG.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    return model


def reconstruction(op, y, x):
    return op.ReduceSum((y - x) ** 2, [1], keepdims=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_joint_loss_of_a_quantized_file_reads_inputs(backend: str) -> None:
    x = RNG.normal(size=(64, 8)).astype(np.float32)
    integers = onnxfit.quantize(autoencoder(), x)
    loss = Joint(reconstruction, "y", inputs="x")
    trainer = onnxfit.Trainer(integers, loss=loss, optimizer=0.001, backend=backend)
    before = trainer.evaluate(x)["loss"]
    expected = ((trainer.predict(x) - x) ** 2).sum(1).mean()
    assert before == pytest.approx(expected, rel=1e-5)
    trainer.fit(x, epochs=3, verbose=0)
    assert trainer.evaluate(x)["loss"] < before


def test_a_quantized_file_has_no_inner_values_to_read() -> None:
    x = RNG.normal(size=(64, 8)).astype(np.float32)
    integers = onnxfit.quantize(autoencoder(), x)
    inner = integers.graph.node[2].output[0]
    loss = Joint(lambda op, y, a: op.ReduceMean(y * y, [1], keepdims=0), "y", values=inner)
    with pytest.raises((SettingError, UnknownNameError)):
        onnxfit.Trainer(integers, loss=loss)


def test_the_report_of_a_quantized_file_reads_outputs_alone() -> None:
    x = RNG.normal(size=(64, 8)).astype(np.float32)
    model = autoencoder()
    integers = onnxfit.quantize(model, x)
    square = Joint(lambda op, y: op.ReduceSum(y * y, [1], keepdims=0), "y")
    report = onnxfit.quantization_report(model, integers, x, loss=square)
    session = onnxruntime.InferenceSession(integers.SerializeToString())
    expected = (session.run(None, {"x": x})[0] ** 2).sum(1).mean()
    assert report.int_loss == pytest.approx(float(expected), rel=1e-4)
    with pytest.raises(SettingError, match="outputs of the model only"):
        onnxfit.quantization_report(model, integers, x, loss=Joint(reconstruction, "y", inputs="x"))


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_packed_weights_are_evaluated_with_inner_values(backend: str) -> None:
    model = packed_file()
    (size,) = (d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim[-1:])
    x = RNG.normal(size=(6, size)).astype(np.float32)
    model.graph.node.append(onnx.helper.make_node("Tanh", ["y"], ["bounded"]))
    model.graph.output[0].name = "bounded"

    def distance(op, bounded, y):
        return op.ReduceMean((bounded - 2 * y) ** 2, [1], keepdims=0)

    loss = Joint(distance, "bounded", values="y")
    trainer = onnxfit.Trainer(model, loss=loss, weights=["b"], backend=backend)
    exact = x @ real_numbers(model, 4) + trainer.get_weights()["b"]
    np.testing.assert_allclose(trainer.predict(x), np.tanh(exact), atol=1e-5)
    expected = ((np.tanh(exact) - 2 * exact) ** 2).mean()
    assert trainer.evaluate(x)["loss"] == pytest.approx(expected, rel=1e-4)
    before = trainer.evaluate(x)["loss"]
    trainer.fit(x, epochs=5, verbose=0)
    assert trainer.evaluate(x)["loss"] < before

"""Mixup, CutMix, masked tokens, and rows that are drawn: pure functions of seed, epoch and batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest

import onnxfit
from onnxfit.callbacks import BackupAndRestore, LambdaCallback
from onnxfit.data import Loader
from onnxfit.errors import DataError, SettingError
from tests.data.kinds import make, spec, whole

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(40, 3, 8, 6)).astype(np.float32)
CLASSES = RNG.integers(0, 4, 40)
INPUTS = [spec("x", "N", 3, 8, 6)]
IDS = RNG.integers(5, 100, (64, 200))


def loader(x: Any = IMAGES, y: Any = CLASSES, **settings: Any) -> onnxfit.DataLoader:
    return onnxfit.DataLoader(x, y, **{"batch_size": 8, "shuffle": False, "seed": 3, **settings})


def batches(data: Loader, epoch: int = 0, skip: int = 0) -> list[tuple[Any, ...]]:
    return list(data.batches(epoch, skip, None))


def shares(mixed: list[tuple[Any, ...]]) -> list[float]:
    """The lambda of each batch, from labels of which row i is i."""
    return [float(y[0, 0]) for _, y in mixed]


def numbered(rows: int) -> tuple[np.ndarray, np.ndarray]:
    return np.eye(rows, dtype=np.float32), np.arange(rows)


# ---------------------------------------------------------------------- Mixup and CutMix


def test_mixup_is_that_of_timm() -> None:
    """Its formula: x * lam + x.flip(0) * (1 - lam), and the same for smoothed one-hot labels."""
    data = onnxfit.Mixup(loader(), mixup_alpha=0.4, num_classes=4, label_smoothing=0.1)
    for (x, y), (plain, classes) in zip(batches(data), batches(loader())):
        smooth = np.eye(4)[classes] * 0.9 + 0.1 / 4
        differences = (plain - plain[::-1])[:4]
        lam = float(((x - plain[::-1])[:4] * differences).sum() / (differences**2).sum())
        assert 0 <= lam <= 1
        np.testing.assert_allclose(x, plain * lam + plain[::-1] * (1 - lam), atol=1e-5)
        np.testing.assert_allclose(y, smooth * lam + smooth[::-1] * (1 - lam), atol=1e-5)
        assert (x.dtype, y.dtype) == (np.float32, np.float32)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_lambda_has_a_beta_distribution(alpha: float) -> None:
    x, y = numbered(2000)
    data = onnxfit.Mixup(loader(x[:, :1], y % 2, batch_size=2), mixup_alpha=alpha, num_classes=2)
    drawn = np.array(shares(batches(data)))
    assert len(drawn) == 1000
    assert drawn.mean() == pytest.approx(0.5, abs=0.05)
    assert drawn.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.15)


@pytest.mark.parametrize("channels_last", [False, True])
def test_cutmix_replaces_a_rectangle_and_counts_its_pixels(channels_last: bool) -> None:
    x = np.moveaxis(IMAGES, 1, -1) if channels_last else IMAGES
    data = onnxfit.Mixup(
        loader(x), mixup_alpha=0, cutmix_alpha=1.0, num_classes=4, channels_last=channels_last
    )
    seen = set()
    for epoch in range(5):
        for (mixed, y), (plain, classes) in zip(batches(data, epoch), batches(loader(x))):
            channel = -1 if channels_last else 1
            is_other = (mixed == plain[::-1]).all(channel) & (mixed != plain).any(channel)
            assert ((mixed == plain).all(channel) | is_other).all()
            np.testing.assert_array_equal(is_other, is_other[:1].repeat(8, 0))
            rows, columns = np.flatnonzero(is_other[0].any(1)), np.flatnonzero(is_other[0].any(0))
            assert is_other[0].sum() == len(rows) * len(columns)  # a rectangle
            lam = 1 - is_other[0].mean()
            hot = np.eye(4)[classes]
            np.testing.assert_allclose(y, lam * hot + (1 - lam) * hot[::-1], atol=1e-6)
            seen.add(round(lam, 6))
    assert len(seen) > 5


def test_both_are_drawn_with_their_probabilities() -> None:
    data = onnxfit.Mixup(loader(batch_size=2), cutmix_alpha=1.0, num_classes=4, prob=0.5)
    kinds = {"plain": 0, "cut": 0, "mixed": 0}
    for epoch in range(30):
        for (x, _), (plain, _) in zip(batches(data, epoch), batches(loader(batch_size=2))):
            of_one = (x == plain) | (x == plain[::-1])
            kind = "plain" if (x == plain).all() else "cut" if of_one.all() else "mixed"
            kinds[kind] += 1
    total = sum(kinds.values())
    # some CutMix batches have an empty rectangle
    assert kinds["mixed"] / total == pytest.approx(0.25, abs=0.06)
    assert kinds["cut"] / total == pytest.approx(0.25, abs=0.08)


def changed() -> list[Loader]:
    ids = onnxfit.DataLoader(IDS, batch_size=8, shuffle=False, seed=3)
    return [
        onnxfit.Mixup(loader(), cutmix_alpha=1.0, num_classes=4),
        onnxfit.MaskedTokens(ids, 1, 100),
    ]


@pytest.mark.parametrize("number", [0, 1])
def test_batches_depend_on_seed_epoch_and_number_alone(number: int) -> None:
    data = changed()[number]
    first = batches(data)
    np.testing.assert_equal(batches(changed()[number]), first)
    np.testing.assert_equal(batches(data, skip=2), first[2:])
    assert any((a[0] != b[0]).any() for a, b in zip(batches(data, 1), first))
    data.seed = 4
    assert any((a[0] != b[0]).any() for a, b in zip(batches(data), first))
    data.seed = 3
    iterated = [*zip(range(2), data)]
    np.testing.assert_equal([batch for _, batch in iterated], first[:2])


def test_the_order_of_rows_is_that_of_the_loader() -> None:
    own = loader(shuffle=True)
    data = onnxfit.Mixup(loader(shuffle=True), num_classes=4, prob=0.0)
    for epoch in (0, 1):
        plain = [x for x, _ in own.batches(epoch, 0, 3)]
        np.testing.assert_array_equal([x for x, _ in data.batches(epoch, 0, 3)], plain)


def test_predictions_see_the_rows_themselves() -> None:
    with make(
        onnxfit.Mixup(loader(), num_classes=4), inputs=INPUTS, purpose="prediction"
    ) as source:
        np.testing.assert_array_equal(whole(source)["x"], IMAGES)


def classifier() -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        dense (float[N, 3, 8, 6] x) => (float[N, 4] y)
        <float[144, 4] w = {{{", ".join(["0"] * 576)}}}> {{ f = Flatten(x)  y = MatMul(f, w) }}"""
    )


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_a_fit_resumes_exactly_in_mid_epoch(backend: str, tmp_path: Path) -> None:
    def trainer() -> onnxfit.Trainer:
        return onnxfit.Trainer(
            classifier(), loss="cross_entropy", metrics=["accuracy"], backend=backend
        )

    def mixed() -> Loader:
        drawn = loader(shuffle=True, seed=None, prefetch=1, sampling="balanced")
        return onnxfit.Mixup(drawn, cutmix_alpha=1.0, num_classes=4)

    def stop(batch: int, logs: object) -> None:
        if killed.global_batch == 7:
            raise KeyboardInterrupt

    whole_run, killed, resumed = trainer(), trainer(), trainer()
    history = whole_run.fit(mixed(), epochs=2, validation_data=mixed(), verbose=0).history
    assert history["val_loss"][-1] == pytest.approx(whole_run.evaluate(IMAGES, CLASSES)["loss"])
    assert whole_run.evaluate(mixed())["loss"] == pytest.approx(
        whole_run.evaluate(IMAGES, CLASSES)["loss"]
    )
    backup = BackupAndRestore(str(tmp_path / "backup"), every_n_steps=1)
    with pytest.raises(KeyboardInterrupt):
        killed.fit(
            mixed(),
            epochs=2,
            callbacks=[backup, LambdaCallback(on_train_batch_end=stop)],
            verbose=0,
        )
    again = BackupAndRestore(str(tmp_path / "backup"), every_n_steps=1)
    resumed.fit(mixed(), epochs=2, callbacks=[again], verbose=0)
    np.testing.assert_equal(resumed.get_weights(), whole_run.get_weights())


@pytest.mark.parametrize(
    ("make_loader", "message"),
    [
        (lambda: onnxfit.Mixup([1]), "Mixup needs a loader, such as"),
        (lambda: onnxfit.Mixup(loader(), mixup_alpha=0), "one of them above 0, got 0 and 0.0"),
        (lambda: onnxfit.Mixup(loader(), prob=2), "prob from 0 to 1, got 2"),
        (lambda: onnxfit.Mixup(loader(), label_smoothing=1), "0 <= label_smoothing < 1, got 1"),
        (lambda: onnxfit.Mixup(loader(), num_classes=1), "num_classes from 2 to 1000000, got 1"),
        (lambda: batches(onnxfit.Mixup(loader())), "Mixup needs num_classes to make prob"),
        (lambda: onnxfit.MaskedTokens(loader(), 100, 100), "mask_token_id from 0 to 99"),
        (lambda: onnxfit.MaskedTokens(loader(), 1, 100, probability=0), "0 < probability <= 1"),
        (lambda: onnxfit.MaskedTokens(loader(), 1, 9, mask_share=0.95), "a sum of at most 1"),
        (lambda: loader(sampling="balanced"), "pass shuffle=True"),
        (lambda: loader(shuffle=True, sampling="even"), "one number for each row, or 'balanced'"),
        (lambda: loader(y=None, shuffle=True, sampling="balanced"), "one class index for each row"),
        (lambda: loader(shuffle=True, sampling=[1, 2]), "a number >= 0 for each of its 40 rows"),
        (lambda: loader(shuffle=True, sampling=np.zeros(40)), "not all of them 0"),
        (lambda: loader(shuffle=True, sampling=-np.ones(40)), "a number >= 0 for each"),
    ],
)
def test_impossible_settings(make_loader: Any, message: str) -> None:
    with pytest.raises(SettingError) as raised:
        make_loader()
    assert message in str(raised.value)


def test_batches_that_cannot_be_changed() -> None:
    for data, message in (
        (onnxfit.Mixup(loader(), num_classes=3), "class indices from 0 to 2 of shape"),
        (
            onnxfit.Mixup(loader(IMAGES[:, 0, 0]), mixup_alpha=0, cutmix_alpha=1, num_classes=4),
            "4 axes",
        ),
        (
            onnxfit.MaskedTokens(loader(IMAGES), 1, 100),
            "integers of shape (batch, tokens), got float32",
        ),
        (onnxfit.MaskedTokens(loader({"ids": IDS[:40]}), 1, 100), "Pass MaskedTokens(column=...)"),
    ):
        with pytest.raises(DataError) as raised:
            batches(data)
        assert message in str(raised.value)


# ---------------------------------------------------------------------- masked tokens


def test_tokens_are_masked_as_by_transformers() -> None:
    """15 % are chosen; 80 % of them are masked, 10 % are random, 10 % stay."""
    ids = IDS.copy()
    ids[:, 0], ids[:, -20:] = 2, 0  # [CLS] and padding
    data = onnxfit.MaskedTokens(
        loader({"input_ids": ids, "attention_mask": ids * 0 + 1}, None, batch_size=64),
        1,
        100,
        special_token_ids=(0, 2),
    )
    ((x, labels),) = batches(data)
    changed_ids, chosen = x["input_ids"], labels != -100
    assert set(x) == {"input_ids", "attention_mask"}
    assert not chosen[:, 0].any()
    assert not chosen[:, -20:].any()
    np.testing.assert_array_equal(labels[chosen], ids[chosen])
    np.testing.assert_array_equal(changed_ids[~chosen], ids[~chosen])
    ordinary = chosen[:, 1:-20]
    assert ordinary.mean() == pytest.approx(0.15, abs=0.01)
    of_chosen = changed_ids[chosen]
    assert (of_chosen == 1).mean() == pytest.approx(0.8, abs=0.03)
    # one of 100 random tokens is the same one
    assert (of_chosen == ids[chosen]).mean() == pytest.approx(0.101, abs=0.02)
    others = of_chosen[(of_chosen != 1) & (of_chosen != ids[chosen])]
    assert others.min() >= 0
    assert others.max() < 100
    assert len(set(others.tolist())) > 50


def test_padding_of_a_text_loader_is_not_masked_and_predict_sees_the_text() -> None:
    documents = [RNG.integers(5, 30, n) for n in (4, 9, 3, 7, 6, 8)]
    texts = onnxfit.TextLoader(
        documents, batch_size=3, shuffle=False, seed=1, pad_to_multiple_of=16
    )
    data = onnxfit.MaskedTokens(texts, 3, 30, probability=0.5)
    for (x, labels), (plain, _) in zip(batches(data), batches(texts)):
        assert (labels[plain["attention_mask"] == 0] == -100).all()
        assert (x["input_ids"] != plain["input_ids"]).any()
        np.testing.assert_array_equal(x["attention_mask"], plain["attention_mask"])
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        bert (int64[N, T] input_ids) => (float[N, T, 30] y)
        <float[30, 30] w = {{{", ".join(["0"] * 900)}}}> {{ y = Gather(w, input_ids) }}"""
    )
    trainer = onnxfit.Trainer(
        model, loss=onnxfit.losses.CrossEntropy(ignore_index=-100), optimizer=1.0
    )
    first = trainer.evaluate(data)["loss"]
    assert first == pytest.approx(np.log(30))
    assert trainer.evaluate(data) == trainer.evaluate(data)
    trainer.fit(data, epochs=3, verbose=0)
    assert trainer.evaluate(data)["loss"] < first
    np.testing.assert_array_equal(trainer.predict(data), trainer.predict(texts))


# ---------------------------------------------------------------------- rows that are drawn


def drawn(data: Loader, epoch: int = 0, skip: int = 0) -> np.ndarray:
    return np.concatenate([*data.batch_rows(epoch, skip, 3)])


def test_rows_are_drawn_by_their_chances() -> None:
    """As by torch's WeightedRandomSampler(weights, n): with replacement, n rows an epoch."""
    chances = np.array([0, 1, 2, 5] * 10)
    data = loader(shuffle=True, sampling=chances)
    counts = np.zeros(40)
    for epoch in range(400):
        rows = drawn(data, epoch)
        assert len(rows) == 40
        counts += np.bincount(rows, minlength=40)
    assert not counts[chances == 0].any()
    np.testing.assert_allclose(counts / counts.sum(), chances / chances.sum(), atol=0.006)
    np.testing.assert_array_equal(drawn(data, 5), drawn(loader(shuffle=True, sampling=chances), 5))
    np.testing.assert_array_equal(drawn(data, 5, skip=2), drawn(data, 5)[16:])
    assert (drawn(data, 5) != drawn(data, 6)).any()
    np.testing.assert_array_equal(
        np.concatenate([y for _, y in data.batches(5, 0, 3)]), CLASSES[drawn(data, 5)]
    )


@pytest.mark.parametrize("chance", [1e308, 5e-324])
def test_only_the_proportions_of_chances_matter(chance: float) -> None:
    extreme = loader(shuffle=True, sampling=np.full(40, chance))
    np.testing.assert_array_equal(drawn(extreme), drawn(loader(shuffle=True, sampling=np.ones(40))))


def test_balanced_classes_come_equally_often() -> None:
    y = np.where(np.arange(40) < 36, 0, np.arange(40) % 3)
    data = loader(y=y, shuffle=True, sampling="balanced")
    counts = sum(np.bincount(y[drawn(data, epoch)], minlength=3) for epoch in range(200))
    np.testing.assert_allclose(counts / counts.sum(), [1 / 3] * 3, atol=0.02)


def test_only_training_draws_rows() -> None:
    data = loader(shuffle=True, sampling="balanced", seed=None)
    trainer = onnxfit.Trainer(classifier(), loss="cross_entropy", optimizer=0.1, seed=5)
    trainer.fit(data, epochs=2, verbose=0)
    assert trainer.samples_seen == 80
    expected = trainer.evaluate(IMAGES, CLASSES)["loss"]
    assert trainer.evaluate(data)["loss"] == pytest.approx(expected)
    np.testing.assert_allclose(trainer.predict(data), trainer.predict(IMAGES), rtol=1e-6)
    by_hand = onnxfit.Trainer(classifier(), loss="cross_entropy", optimizer=0.1)
    for epoch in range(2):
        for rows in data.batch_rows(epoch, 0, 5):
            by_hand.train_on_batch(IMAGES[rows], CLASSES[rows])
    for name, w in by_hand.get_weights().items():
        np.testing.assert_allclose(trainer.get_weights()[name], w, atol=1e-6)


def test_a_folder_of_images_is_balanced(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name, count in (("cat", 9), ("dog", 1)):
        (tmp_path / name).mkdir()
        for i in range(count):
            image.fromarray(np.full((4, 4, 3), i, np.uint8)).save(tmp_path / name / f"{i}.png")
    data = onnxfit.ImageFolder(tmp_path, (4, 4), sampling="balanced", batch_size=5, prefetch=0)
    labels = np.concatenate([y for epoch in range(50) for _, y in data.batches(epoch, 0, 3)])
    assert labels.mean() == pytest.approx(0.5, abs=0.06)
    mixed = onnxfit.Mixup(data)
    assert (mixed.num_classes, mixed.channels_last) == (2, False)
    x, y = next(iter(mixed))
    assert (x.shape, y.shape) == ((5, 3, 4, 4), (5, 2))

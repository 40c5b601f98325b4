"""Freeze, Unfreeze and `trainer.frozen`."""

import warnings

import numpy as np
import pytest

import onnxfit
from onnxfit.callbacks import Freeze, LambdaCallback, Unfreeze
from onnxfit.errors import SettingError, UnknownNameError
from onnxfit.optimizers import SGD, Adam, Adamax, AdamW, Lion, NAdam, RAdam, RMSprop
from tests.callbacks.helpers import X, both_backends, fit, line, network, same, ten_rows
from tests.models import convolutional, mlp

ADAM = Adam(0.1, weight_decay=0.1, ema_momentum=0.9)


@both_backends
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("optimizer", [ADAM, SGD(0.1, momentum=0.9)])
def test_frozen_weights_and_slots_are_byte_identical_until_their_epoch(
    backend, accumulate, optimizer
):
    x, y = ten_rows()
    on = onnxfit.Trainer(
        mlp(),
        loss="cross_entropy",
        optimizer=optimizer,
        penalty=0.1,
        backend=backend,
        gradient="onnx",
        accumulate=accumulate,
    )
    states = [on.get_state()]
    look = LambdaCallback(
        on_train_batch_end=lambda batch, logs: states.append(on.get_state()),
        on_test_begin=lambda logs: states.append(on.get_state()),
        on_epoch_end=lambda epoch, logs: states.append(on.get_state()),
    )
    on.fit(
        x,
        y,
        epochs=2,
        batch_size=4,
        verbose=0,
        validation_data=(x, y),
        callbacks=[look, Freeze("fc0.*", until_epoch=1)],
    )  # after `look`, for the order must not matter
    fc0 = [
        name
        for part in ("weights", "slots")
        for name in states[0][part]
        if "fc0" in name and "sum" not in name
    ]
    assert len(fc0) >= 4
    for state in states[1:6]:
        for name in fc0:
            part = "weights" if name in state["weights"] else "slots"
            assert state[part][name].tobytes() == states[0][part][name].tobytes(), name
    assert not np.array_equal(
        states[5]["weights"]["fc1.weight"], states[0]["weights"]["fc1.weight"]
    )
    assert not np.array_equal(
        states[-1]["weights"]["fc0.weight"], states[0]["weights"]["fc0.weight"]
    )
    assert on.frozen == ()


@both_backends
@pytest.mark.parametrize("optimizer", [ADAM, SGD(0.1, momentum=0.9)])
def test_the_flush_of_a_short_window_moves_no_frozen_weight_and_no_slot_of_one(backend, optimizer):
    x, y = ten_rows()
    on = onnxfit.Trainer(
        mlp(),
        loss="cross_entropy",
        optimizer=optimizer,
        backend=backend,
        gradient="onnx",
        accumulate=4,
    )
    on.frozen = "fc0.*"
    before = on.get_state()
    # three batches are no window: the flush at the end of the epoch is the one update
    on.fit(x, y, batch_size=4, verbose=0)
    after = on.get_state()
    assert on.global_step == 1
    for part in ("weights", "slots"):
        for name, value in before[part].items():
            if "sum" not in name:
                is_same = value.tobytes() == after[part][name].tobytes()
                assert is_same == ("fc0" in name), name


@both_backends
def test_a_weight_that_is_frozen_after_an_update_keeps_it_in_batches_without_one(backend):
    on = line(accumulate=2, backend=backend)
    for _ in range(2):
        on.train_on_batch(X, 0 * X)
    updated = on.get_weights()["w"].item()
    assert updated != 1
    on.frozen = "w"
    for _ in range(3):
        on.train_on_batch(X, 0 * X)
        assert on.get_weights()["w"].item() == updated


@both_backends
def test_what_is_not_frozen_trains_as_if_the_rest_were_no_weights(backend):
    x, y = ten_rows()

    def train(callbacks, **settings):
        on = onnxfit.Trainer(
            mlp(),
            loss="cross_entropy",
            optimizer=ADAM,
            backend=backend,
            gradient="onnx",
            **settings,
        )
        on.fit(x, y, epochs=3, batch_size=4, verbose=0, callbacks=callbacks)
        return on.get_weights()

    frozen, left_out = train([Freeze("fc0.*")]), train([], weights="fc1.*")
    for name, weight in left_out.items():
        assert frozen[name] == pytest.approx(weight, rel=1e-5, abs=1e-6)


def test_freezing_by_hand_by_several_and_layer_after_layer():
    x, y = ten_rows()
    on = network()
    frozen = []
    look = LambdaCallback(on_epoch_begin=lambda epoch, logs: frozen.append(on.frozen))
    settings = {"epochs": 4, "batch_size": 4, "verbose": 0}
    on.fit(
        x,
        y,
        callbacks=[
            Freeze("fc0.bias", until_epoch=3),
            Freeze("fc0.*", until_epoch=2, from_epoch=1),
            look,
        ],
        **settings,
    )
    assert frozen == [("fc0.bias",), ("fc0.weight", "fc0.bias"), ("fc0.bias",), ()]
    frozen.clear()
    on.frozen = "fc1.bias"
    on.fit(
        x, y, callbacks=[Unfreeze({3: "fc0.*", 1: ["fc1.weight", "fc0.bias"]}), look], **settings
    )
    whole, one = ("fc0.weight", "fc0.bias", "fc1.weight", "fc1.bias"), ("fc0.weight", "fc1.bias")
    assert frozen == [whole, one, one, ("fc1.bias",)]
    assert on.frozen == ("fc1.bias",)
    before = on.get_weights()
    on.train_on_batch(x, y)
    after = on.get_weights()
    assert [name for name in before if np.array_equal(before[name], after[name])] == ["fc1.bias"]
    with pytest.raises(UnknownNameError, match=r"No trained weight is called 'fc9.\*'"):
        on.fit(x, y, callbacks=[Freeze("fc9.*")], **settings)
    assert on.frozen == ("fc1.bias",)


@pytest.mark.parametrize("backend", ["full", "forward_backward"])
def test_a_step_that_is_taken_back_leaves_frozen_weights_too(backend):
    on = network(backend)
    on.frozen = ["fc0.*"]
    before = on.get_weights()
    on.train_on_batch(*ten_rows())
    on.revert_step()
    assert same(on.get_weights(), before)
    on.set_weights({"fc0.bias": np.ones(8, np.float32)})
    on.train_on_batch(*ten_rows())
    assert np.array_equal(on.get_weights()["fc0.bias"], np.ones(8))


def test_frozen_statistics_stay_and_gradients_by_hand_pass_over_frozen_weights():
    x, y = np.random.default_rng(0).normal(size=(8, 1, 8, 8)).astype(np.float32), np.arange(8) % 3
    on = onnxfit.Trainer(convolutional(), loss="cross_entropy", optimizer=0.05, gradient="onnx")
    before = on.get_weights()
    fit(Freeze("bn.*"), on=on, x=x, y=y)
    after = on.get_weights()
    assert [name for name in before if np.array_equal(before[name], after[name])] == [
        n for n in before if n.startswith("bn.")
    ]
    on = line(backend="forward_backward")
    on.frozen = "w"
    on.apply_gradients(on.backward(np.ones_like(on.forward(X)))["weights"])
    assert on.get_weights()["w"] == 1


def test_freeze_and_unfreeze_refuse_epochs_that_make_no_sense():
    for make in (
        lambda: Freeze("w", until_epoch=1, from_epoch=2),
        lambda: Freeze("w", from_epoch=-1),
        lambda: Unfreeze({-1: "w"}),
    ):
        with pytest.raises(SettingError, match="got"):
            make()


def test_weights_can_be_frozen_within_a_step():
    def freeze(gradients):
        on.frozen = "fc0.*"

    on = onnxfit.Trainer(mlp(), loss="cross_entropy", optimizer=0.1, backend="forward_backward")
    before = on.get_weights()
    x, y = np.ones((6, 4), np.float32), np.arange(6) % 3
    on.fit(x, y, batch_size=6, verbose=0, callbacks=[LambdaCallback(on_gradients=freeze)])
    after = on.get_weights()
    np.testing.assert_array_equal(after["fc0.weight"], before["fc0.weight"])
    assert not np.array_equal(after["fc1.weight"], before["fc1.weight"])


@pytest.mark.parametrize(
    ("optimizer", "sizes"),
    [
        (Adam(0.001), {16: 0.5, 100: 1.0, 1000: 2.5, 5000: 3.2}),
        (AdamW(0.001), {16: 0.5, 100: 1.0, 1000: 2.5, 5000: 3.1}),
        (Adam(0.001, amsgrad=True), {16: 0.5, 100: 1.0, 1000: 2.5, 5000: 3.2}),
        (NAdam(0.001), {16: 4.1, 100: 9.8, 1000: 25, 5000: 34, 50000: 44}),
        (Adamax(0.001), {16: 0.12, 5000: 0.1}),
        (Lion(0.001), {16: 1, 5000: 1}),
        (RMSprop(0.001), {16: 1, 5000: 1}),
        (SGD(0.001, momentum=0.9), {16: 1, 5000: 1}),
    ],
)
def test_the_first_step_after_a_freeze_has_the_size_that_the_docs_say(optimizer, sizes):
    def first_step(updates):
        on = line(optimizer)
        state = on.get_state()
        on.set_state({**state, "counters": {**state["counters"], "global_step": updates}})
        before = on.get_weights()["w"]
        on.train_on_batch(X, np.zeros((4, 1), np.float32))
        return float(np.abs(on.get_weights()["w"] - before).item())

    unit = first_step(0)
    for updates, expected in sizes.items():
        assert first_step(updates) / unit == pytest.approx(expected, rel=0.12)


def test_a_first_step_of_radam_after_a_freeze_is_up_to_three_learning_rates():
    on = line(RAdam(0.001))
    state = on.get_state()
    on.set_state({**state, "counters": {**state["counters"], "global_step": 50_000}})
    before = on.get_weights()["w"]
    on.train_on_batch(X, np.zeros((4, 1), np.float32))
    assert np.abs(on.get_weights()["w"] - before).item() == pytest.approx(0.0032, rel=0.03)


@pytest.mark.parametrize(("optimizer", "warned"), [(NAdam(0.001), True), (Adam(0.001), False)])
def test_steps_that_begin_many_times_too_large_are_reported_once(optimizer, warned):
    x, y = ten_rows()
    on = onnxfit.Trainer(mlp(), loss="cross_entropy", optimizer=optimizer)
    freezing = [Freeze("fc0.weight", until_epoch=8), Freeze("fc0.bias", until_epoch=8)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on.fit(x, y, batch_size=2, epochs=10, verbose=0, callbacks=freezing)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == warned
    assert all(f"{type(optimizer).__name__} counts all updates" in text for text in messages)
    assert all("fc0.weight" in text and "fc0.bias" in text for text in messages)

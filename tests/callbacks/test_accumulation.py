"""GradientAccumulationScheduler, by the weights after every batch."""

import pytest

import onnxfit
from onnxfit.callbacks import GradientAccumulationScheduler, LambdaCallback
from onnxfit.errors import SettingError
from tests.callbacks.helpers import Killed, X, Y, both_backends, fit, line, same


@both_backends
def test_gradients_are_accumulated_over_as_many_batches_as_the_epoch_says(backend):
    seen = []
    look = LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(look.trainer.get_weights()["w"].item())
    )
    on = line(accumulate=3, backend=backend)
    # the order in which the entries are written does not count
    fit(GradientAccumulationScheduler({2: 2, 1: 1}), look, on=on, epochs=3, batch_size=1)
    step = 0.8
    first = [1, 1, step, step]  # of 3, and a window of 1 is flushed at the epoch's end
    second = [step**3, step**4, step**5, step**6]
    third = [step**6, step**7, step**7, step**8]
    assert seen == pytest.approx(first + second + third)
    assert on.global_step == 2 + 4 + 2
    assert on.accumulate == 3


def test_accumulating_more_needs_a_trainer_that_accumulates():
    on = line()
    with pytest.raises(SettingError, match=r"accumulate=2\) or more"):
        fit(GradientAccumulationScheduler({3: 2}), on=on)
    assert on.global_step == 0
    fit(GradientAccumulationScheduler({0: 1}), on=on)
    with pytest.raises(SettingError, match="whole numbers >= 0, got -1"):
        GradientAccumulationScheduler({-1: 2})
    for value in (0, 1.5):
        with pytest.raises(SettingError, match="whole number"):
            on.accumulate = value
    with pytest.raises(SettingError, match="needs a Trainer that was created with accumulate=2"):
        on.accumulate = 2


@both_backends
@pytest.mark.parametrize("fewer", [1, 2])
def test_a_window_that_is_already_full_when_it_shrinks_ends_with_the_next_batch(backend, fewer):
    on = line(accumulate=4, backend=backend)
    for _ in range(2):
        on.train_on_batch(X, Y)
    on.accumulate = fewer
    on.train_on_batch(X, Y)
    assert (on.global_step, on.get_weights()["w"].item()) == (1, pytest.approx(0.8))
    on.train_on_batch(X, Y)
    assert on.global_step == (2 if fewer == 1 else 1)


def test_accumulation_resumes_within_a_window(tmp_path):
    def run(*callbacks, on=None):
        on = on or line(accumulate=2)
        return fit(GradientAccumulationScheduler({1: 4}), *callbacks, on=on, epochs=3, batch_size=1)

    path = tmp_path / "a"

    def kill(batch, logs):
        if on.global_batch == 6:  # two of the window of four
            on.save(path)
            raise Killed

    on = line(accumulate=2)
    with pytest.raises(Killed):
        run(LambdaCallback(on_train_batch_end=kill), on=on)
    assert same(run(on=onnxfit.Trainer.load(path)).get_weights(), run().get_weights())

"""ModelCheckpoint on scripted values of the monitored metric."""

import json
import math

import numpy as np
import onnx
import pytest
import safetensors.numpy

import onnxfit
from onnxfit.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from onnxfit.errors import SettingError, UnknownNameError
from tests.callbacks.helpers import X2, Y2, Script, files, line, run, same

NAN = math.nan
INF = math.inf


def test_the_template_is_filled_with_the_epoch_from_1_and_the_values_of_logs(tmp_path):
    checkpoint = ModelCheckpoint(
        tmp_path / "new" / "folder" / "{epoch:03d}-{step}-{val_loss:.3f}.ckpt"
    )
    run([3, 1, 2], checkpoint)
    assert files(tmp_path / "new" / "folder") == [
        "001-1-3.000.ckpt",
        "002-2-1.000.ckpt",
        "003-3-2.000.ckpt",
    ]
    assert checkpoint.best_model_path == str(tmp_path / "new" / "folder" / "002-2-1.000.ckpt")
    assert checkpoint.best_model_score == 1
    assert checkpoint.last_model_path == str(tmp_path / "new" / "folder" / "003-3-2.000.ckpt")


def test_a_field_that_the_logs_lack_is_a_key_error_that_names_those_there_are(tmp_path):
    with pytest.raises(
        KeyError,
        match=(
            r"'val_los'.*Did you mean 'val_loss'\? Known: epoch, learning_rate, loss, step,"
            r" val_loss"
        ),
    ):
        run([1], ModelCheckpoint(tmp_path / "{val_los}.ckpt"))
    assert issubclass(UnknownNameError, KeyError)
    assert files(tmp_path) == []


NAMES = [
    ("StatefulPartitionedCall:0", "StatefulPartitionedCall:1"),
    ("/head/Gemm_output_0", "/aux/Gemm_output_0"),
    ("model.head", "model.aux"),
    ("a[0]", "a[1]"),
    ("x!r", "x!s"),
    ("a:.3f", "a"),  # the second output and a format have the name of the first
]


def two_outputs(*names):
    """Return a trainer of y = w x and y = v x whose outputs have these names."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> two (float[N, 1] x) => (float[N, 1] A,
        float[N, 1] B) <float[1, 1] w = {1}, float[1, 1] v = {2}> { A = MatMul(x, w)
        B = MatMul(x, v) }"""
    )
    for node, output, name in zip(model.graph.node, model.graph.output, names):
        node.output[0] = output.name = name
    return onnxfit.Trainer(model, loss=dict.fromkeys(names, "mse"), optimizer=0.01)


@pytest.mark.parametrize("names", NAMES)
def test_the_template_takes_every_name_that_an_output_has(tmp_path, names):
    on = two_outputs(*names)
    labels = dict.fromkeys(names, Y2)
    template = "-".join(f"{{{name}_loss:.3f}}" for name in names)
    checkpoint = ModelCheckpoint(f"{tmp_path}/a/{template}.ckpt", save_last=True)
    history = on.fit(X2, labels, epochs=1, verbose=0, callbacks=checkpoint).history
    own = "-".join(f"{history[f'{name}_loss'][0]:.3f}" for name in names)
    assert files(tmp_path / "a") == [f"{own}.ckpt", "last.ckpt"]
    onnxfit.Trainer.load(tmp_path / "a" / f"{own}.ckpt").fit(
        X2, labels, epochs=2, verbose=0, callbacks=checkpoint
    )
    assert checkpoint.best_model_path != str(tmp_path / "a" / f"{own}.ckpt")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("{val_loss:.3f}", r"called 'val_loss'.*Known: A:0_loss, A:1_loss,"),
        ("{A:0_los:.3f}", r"called 'A:0_los'. Did you mean 'A:0_loss'"),
        ("{loss:d}", r"in its field \{loss:d\}, Unknown format code 'd'"),
        ("{epoch:.3s}", r"in its field \{epoch:.3s\}"),
    ],
)
@pytest.mark.parametrize("save_freq", ["epoch", 1])
def test_a_template_that_cannot_be_filled_is_refused_before_the_first_step(
    tmp_path, field, message, save_freq
):
    on = two_outputs("A:0", "A:1")
    checkpoint = ModelCheckpoint(tmp_path / f"{{epoch}}-{field}", save_freq=save_freq)
    with pytest.raises(SettingError, match=message):
        on.fit(X2, {"A:0": Y2, "A:1": Y2}, epochs=1, verbose=0, callbacks=checkpoint)
    assert on.global_step == 0


@pytest.mark.parametrize(("n", "epochs"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4]), (3, [3]), (6, [])])
def test_every_n_epochs(tmp_path, n, epochs):
    run([1] * 5, ModelCheckpoint(tmp_path / "{epoch}", every_n_epochs=n))
    assert files(tmp_path) == [str(epoch) for epoch in epochs]


def test_every_n_steps(tmp_path):
    x, y = np.ones((64, 1), np.float32), np.zeros((64, 1), np.float32)
    on = line()
    on.fit(
        x,
        y,
        batch_size=1,
        epochs=2,
        verbose=0,
        callbacks=[ModelCheckpoint(tmp_path / "{epoch}-{step:03d}", every_n_steps=16)],
    )
    assert files(tmp_path) == [
        "1-016",
        "1-032",
        "1-048",
        "1-064",
        "2-080",
        "2-096",
        "2-112",
        "2-128",
    ]
    # counted by the trainer, so that another fit goes on
    on.fit(
        x,
        y,
        batch_size=16,
        epochs=4,
        verbose=0,
        callbacks=[ModelCheckpoint(tmp_path / "{epoch}-{step:03d}", every_n_steps=9)],
    )
    assert files(tmp_path)[8:] == ["2-135", "4-144"]


def test_every_n_steps_counts_updates_with_accumulated_gradients(tmp_path):
    x, y = np.ones((3, 1), np.float32), np.zeros((3, 1), np.float32)
    # an epoch of three batches is two updates, the second one at its end
    on = line(accumulate=2)
    on.fit(
        x,
        y,
        batch_size=1,
        epochs=3,
        verbose=0,
        callbacks=[ModelCheckpoint(tmp_path / "{epoch}-{step}", every_n_steps=1)],
    )
    assert files(tmp_path) == ["1-1", "1-2", "2-3", "2-4", "3-5", "3-6"]


def test_every_step_the_best_only(tmp_path):
    x = np.array([[2], [3], [0], [0]], np.float32)  # the running loss is 4, 6.5, 4.33, 3.25
    checkpoint = ModelCheckpoint(
        tmp_path / "{step}", monitor="loss", save_best_only=True, every_n_steps=1
    )
    line(0.0).fit(x, 0 * x, batch_size=1, shuffle=False, verbose=0, callbacks=[checkpoint])
    assert files(tmp_path) == ["1", "4"]
    assert checkpoint.best_model_score == pytest.approx(3.25)


def test_the_best_only_without_the_figure_saves_nothing_and_warns_once(tmp_path):
    with pytest.warns(UserWarning, match="ModelCheckpoint monitors 'foo'") as warned:
        run([1, 1, 1], ModelCheckpoint(tmp_path / "{epoch}", monitor="foo", save_best_only=True))
    assert len(warned) == 1
    assert files(tmp_path) == []


def test_all_are_saved_without_the_figure(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "{epoch}", monitor="foo")
    run([1, 1, 1], checkpoint)
    assert files(tmp_path) == ["1", "2", "3"]
    assert checkpoint.best_model_path is None


def test_the_best_only(tmp_path):
    run([3, 4, NAN, 2, 2, 1], ModelCheckpoint(tmp_path / "{epoch}", save_best_only=True))
    assert files(tmp_path) == ["1", "4", "6"]


def test_a_new_fit_forgets_the_best_and_a_resumed_one_keeps_it(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "{val_loss}", save_best_only=True)
    run([1], checkpoint)
    run([3], checkpoint)
    assert files(tmp_path) == ["1.0", "3.0"]
    resumed = ModelCheckpoint(tmp_path / "{val_loss}", save_best_only=True)
    resumed.load_state_dict(json.loads(json.dumps(checkpoint.state_dict())))
    run([4, 2], resumed)
    assert files(tmp_path) == ["1.0", "2.0", "3.0"]


@pytest.mark.parametrize(
    ("values", "top_k", "kept", "best"),
    [
        ([3, 1, 2, 0.5], 2, ["2", "4"], "4"),
        ([NAN, 2, 1], 1, ["3"], "3"),
        ([2, NAN, 3], 2, ["1", "3"], "1"),
        ([2, NAN], 2, ["1", "2"], "1"),
        ([1, 1, 1], 1, ["1"], "1"),
        ([3, 2, 1], None, ["1", "2", "3"], "3"),
    ],
)
def test_top_k(tmp_path, values, top_k, kept, best):
    checkpoint = ModelCheckpoint(tmp_path / "{epoch}", top_k=top_k)
    run(values, checkpoint)
    assert files(tmp_path) == kept
    assert checkpoint.best_model_path == str(tmp_path / best)
    json.dumps(checkpoint.state_dict(), allow_nan=False)


def test_save_last(tmp_path):
    checkpoint = ModelCheckpoint(
        tmp_path / "{epoch}" / "{val_loss:.2f}.ckpt", top_k=0, save_last=True
    )
    script = run([3, 1, 2], checkpoint)
    assert files(tmp_path) == ["last.ckpt"]
    assert checkpoint.last_model_path == str(tmp_path / "last.ckpt")
    assert same(onnxfit.Trainer.load(tmp_path / "last.ckpt").get_weights(), script.weights[2])


def test_the_file_from_which_training_resumed_is_never_deleted(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "{epoch}", top_k=1)
    run([3], checkpoint)
    on = onnxfit.Trainer.load(tmp_path / "1")
    on.fit(
        X2,
        Y2,
        initial_epoch=1,
        epochs=4,
        verbose=0,
        callbacks=[Script([3, 2, 1, 4]), ModelCheckpoint(tmp_path / "{epoch}", top_k=1)],
    )
    assert files(tmp_path) == ["1", "3"]


@pytest.mark.parametrize(
    ("mode", "threshold", "saved"),
    [("max", -0.01, ["1"]), ("min", 0, []), ("min", 10, ["1"]), ("max", 10, [])],
)
@pytest.mark.parametrize("save_best_only", [True, False])
def test_initial_value_threshold(tmp_path, mode, threshold, saved, save_best_only):
    checkpoint = ModelCheckpoint(
        tmp_path / "{epoch}",
        monitor="loss",
        mode=mode,
        save_best_only=save_best_only,
        initial_value_threshold=threshold,
    )
    run([1], checkpoint)
    assert files(tmp_path) == saved


def test_weights_only_as_safetensors_and_as_onnx(tmp_path):
    script = run(
        [1, 2],
        ModelCheckpoint(tmp_path / "{epoch}.safetensors", save_weights_only=True),
        ModelCheckpoint(tmp_path / "best.onnx", save_weights_only=True, save_best_only=True),
    )
    assert files(tmp_path) == ["1.safetensors", "2.safetensors", "best.onnx"]
    for epoch in range(2):
        assert same(
            safetensors.numpy.load_file(tmp_path / f"{epoch + 1}.safetensors"),
            script.weights[epoch],
        )
    (initializer,) = onnx.load(tmp_path / "best.onnx").graph.initializer
    assert np.array_equal(onnx.numpy_helper.to_array(initializer), script.weights[0]["w"])


def test_a_checkpoint_has_the_states_of_all_callbacks_and_the_figures_as_they_are_after_its_epoch(
    tmp_path,
):
    def callbacks():
        return (
            ModelCheckpoint(tmp_path / "a{epoch}"),
            ModelCheckpoint(tmp_path / "b{epoch}", save_best_only=True),
            EarlyStopping(patience=9),
        )

    def states(watched):
        return {callback.state_key: callback.state_dict() for callback in watched}

    values, after = [3, 1, 2], []
    watched = callbacks()
    record = LambdaCallback(on_epoch_end=lambda epoch, logs: after.append(states(watched)))
    record.phase = "logger"
    run(values, record, *watched)
    for epoch in range(3):
        for path in (tmp_path / f"a{epoch + 1}", tmp_path / f"b{epoch + 1}"):
            if not path.exists():
                continue
            unique_name, seen = callbacks(), []
            look = LambdaCallback(
                on_train_begin=lambda logs, unique_name=unique_name, seen=seen: seen.append(
                    states(unique_name)
                )
            )
            loaded = onnxfit.Trainer.load(path)
            loaded.fit(
                X2,
                Y2,
                initial_epoch=epoch + 1,
                epochs=epoch + 1,
                verbose=0,
                callbacks=[look, *unique_name],
            )
            assert seen == [after[epoch]]
            assert loaded.history.history["val_loss"] == values[: epoch + 1]
    assert files(tmp_path) == ["a1", "a2", "a3", "b1", "b2"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModelCheckpoint("a", every_n_epochs=0), "every_n_epochs >= 1, got 0"),
        (lambda: ModelCheckpoint("a", every_n_steps=0), "every_n_steps >= 1, got 0"),
        (lambda: ModelCheckpoint("a", top_k=-1), "top_k >= 0, got -1"),
        (lambda: ModelCheckpoint("a", top_k=0), "would never save a checkpoint"),
        (lambda: ModelCheckpoint("a", top_k=2), "needs a filepath with a field, such as"),
        (lambda: ModelCheckpoint("{}"), "needs a name in every field"),
        (lambda: ModelCheckpoint("{epoch"), "path template .* is not valid"),
    ],
)
def test_settings_out_of_range_are_refused(make, message):
    with pytest.raises(SettingError, match=message):
        make()


def test_every_checkpoint_is_printed_with_epochs_from_1(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    run([3, 4, 1], ModelCheckpoint("{epoch}", save_best_only=True, verbose=1))
    output, errors = capfd.readouterr()
    assert output == ""
    assert errors.splitlines() == [
        "Epoch 1: ModelCheckpoint saves 1, val_loss is 3.",
        "Epoch 3: ModelCheckpoint saves 3, val_loss is 1 (best so far 3).",
    ]
    run([3, 4, 1], ModelCheckpoint("{epoch}"))
    assert capfd.readouterr() == ("", "")


def test_save_freq_counts_batches_and_not_updates(tmp_path):
    x, y = np.ones((5, 1), np.float32), np.zeros((5, 1), np.float32)
    checkpoint = ModelCheckpoint(tmp_path / "{epoch}-{step}", save_freq=3)
    line(accumulate=2).fit(x, y, batch_size=1, epochs=2, verbose=0, callbacks=[checkpoint])
    # batches 3, 6 and 9; an epoch of five batches makes three updates
    assert files(tmp_path) == ["1-1", "2-3", "2-5"]
    for save_freq in (0, True, "batch", 1.5):
        with pytest.raises(SettingError, match="ModelCheckpoint needs save_freq"):
            ModelCheckpoint("a", save_freq=save_freq)
    with pytest.raises(SettingError, match=r"both save_freq \(batches\) and every_n_steps"):
        ModelCheckpoint("a", save_freq=2, every_n_steps=2)


def test_the_state_that_earlier_versions_saved_is_found_and_loaded():
    checkpoint = ModelCheckpoint("best.ckpt")
    assert checkpoint.state_key == "ModelCheckpoint(best.ckpt)"
    state = {
        "best_model_path": "best.ckpt",
        "best_model_score": 0.5,
        "kept": [],
        "last_model_path": "best.ckpt",
        "step": 3,
        "written": ["best.ckpt"],
    }
    checkpoint.load_state_dict(state)
    assert checkpoint.state_dict() == state

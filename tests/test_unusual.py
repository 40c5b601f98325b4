"""Models, names and calls out of the ordinary: trained right, or refused with the reason, and
nothing lost.
"""

from __future__ import annotations

import json
import zipfile

import numpy as np
import onnx
import onnx.parser
import onnx.reference
import onnxruntime
import pytest

from onnxfit import Trainer
from onnxfit.callbacks import Callback, EarlyStopping, LambdaCallback
from onnxfit.errors import (
    CheckpointError,
    DataError,
    ModelError,
    OnnxfitError,
    SettingError,
    UnknownNameError,
)
from onnxfit.metrics import AUC, Accuracy
from onnxfit.optimizers import Adam
from tests.models import convolutional, linear, mlp, two_outputs

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 2)).astype(np.float32)
Y = X.sum(1, keepdims=True)
LINE = "<float[2, 1] w = {0.5, -0.5}, float[1] b = {0.1}> { h = MatMul(x, w)  y = Add(h, b) }"


def model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> g ' + text
    )


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, {"x": x})[0]


class TestFormulas:
    def test_equality_is_an_operator(self) -> None:
        trainer = Trainer(
            linear(2),
            loss=lambda op, y, p: (
                op.Where(y == 1, 10 * (y - p) ** 2, (y - p) ** 2) + op.Cast(y != 1, to=1)
            ),
        )
        labels = np.array([0, 1, 1], np.float32)[:, None]
        # the output is 0 everywhere
        assert trainer.evaluate(X[:3], labels)["loss"] == pytest.approx((1 + 10 + 10) / 3)

    @pytest.mark.parametrize(
        "loss",
        [
            lambda op, y, p: p if y > 0 else y,
            lambda op, y, p: max(0, 1 - y * p),
            lambda op, y, p: (y > 0) and p,
        ],
        ids=["if", "max", "and"],
    )
    def test_a_value_has_no_truth(self, loss) -> None:
        with pytest.raises(TypeError, match=r"has no truth value.*op.Where"):
            Trainer(linear(2), loss=loss)

    def test_an_operator_that_does_not_exist(self) -> None:
        with pytest.raises(
            UnknownNameError,
            match=r"No operator of ONNX is called 'ReduceMeen'. Did you mean 'ReduceMean'",
        ):
            Trainer(linear(2), loss=lambda op, y, p: op.ReduceMeen(y - p))

    def test_a_loss_with_another_signature(self) -> None:
        with pytest.raises(SettingError, match=r"must accept \(op, y_true, y_pred\)"):
            Trainer(linear(2), loss=lambda y_true, y_pred: y_true - y_pred)


class TestModels:
    @pytest.mark.parametrize("direct", [False, True], ids=["behind Identity", "directly"])
    def test_parameters_that_an_exporter_merged_are_parted(self, direct: bool) -> None:
        """Scale and variance begin as equal ones, bias and mean as equal zeros, and are one tensor
        each in the file.
        """
        copies = "" if direct else "v = Identity(s)  m = Identity(o)  "
        names = "s, o, o, s" if direct else "s, o, m, v"
        merged = model(f"(float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {{1, -1}}, float[2] s = {{1, 1}}, float[2] o = {{0, 0}}> "
                       f"{{ {copies}n = BatchNormalization(x, {names})  y = MatMul(n, w) }}")  # fmt: skip
        parted = model(
            """(float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {1, -1}, float[2] s = {1, 1}, float[2] o = {0, 0},
            float[2] m = {0, 0}, float[2] v = {1, 1}> { n = BatchNormalization(x, s, o, m, v)  y = MatMul(n, w) }"""
        )
        trainers = [Trainer(m, loss="mse", optimizer=0.05) for m in (merged, parted)]
        for trainer in trainers:
            trainer.fit(5 + 3 * X, Y, epochs=10, batch_size=8, verbose=0)
        first, second = (list(t.get_weights().values()) for t in trainers)
        for a, b in zip(first, second):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(
            run(trainers[0].export(), 5 + 3 * X), trainers[1].predict(5 + 3 * X)
        )

    def test_statistics_that_two_nodes_share_follow_both(self) -> None:
        shared = model(
            """(float[N, 2] x) => (float[N, 2] y) <float[2] s = {1, 2}, float[2] o = {0, 0}, float[2] m = {0, 0}, float[2] v = {1, 1},
            float[2] five = {5, 5}> { d = BatchNormalization(x, s, o, m, v)  e = Add(d, five)  y = BatchNormalization(e, s, o, m, v) }"""
        )
        trainer = Trainer(shared, ["s", "o"], loss="mse", optimizer=0.0)
        trainer.train_on_batch(X + 100, X)
        expected = 0.9 * (0.1 * (X + 100).mean(0)) + 0.1 * 5
        np.testing.assert_allclose(trainer.get_weights()["m"], expected, rtol=1e-4)

    def test_a_file_in_training_mode_is_exported_for_inference(self) -> None:
        proto = convolutional(dropout=0.5)
        for node in proto.graph.node:
            if node.op_type == "BatchNormalization":
                node.attribute.append(onnx.helper.make_attribute("training_mode", 1))
                node.output.extend(["mean_out", "var_out"])
            if node.op_type == "Dropout":
                node.input.append("yes")
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "yes"))
        trainer = Trainer(proto, loss="cross_entropy", optimizer="adam")
        x = RNG.normal(size=(6, 1, 8, 8)).astype(np.float32)
        trainer.fit(x, np.arange(6) % 3, verbose=0)
        exported = trainer.export()
        onnx.checker.check_model(exported)
        np.testing.assert_allclose(run(exported, x), trainer.predict(x), atol=1e-6)
        np.testing.assert_array_equal(run(exported, x), run(exported, x))

    def test_dropouts_draw_alike_however_much_was_folded(self) -> None:
        """The graph for known sizes has fewer nodes before the Dropout than the graph for any size."""
        text = """(float[N, L, 2] x) => (float[N, 1] y) <float[2, 1] w = {1, -1}, int64[1] two = {2}, int64[1] zero = {0}, int64[1] minus = {-1}>
            { s = Shape(x)  k = Slice(s, zero, two)  t = Concat<axis = 0>(k, minus)  r = Reshape(x, t)  d = Dropout(r)  m = MatMul(d, w)
              y = ReduceMean<axes = [1], keepdims = 0>(m) }"""
        batches = [
            (
                RNG.normal(size=(4, n, 2)).astype(np.float32),
                RNG.normal(size=(4, 1)).astype(np.float32),
            )
            for n in range(1, 9)
        ]
        many, unique_name = (
            Trainer(model(text), loss="mse", optimizer=0.0),
            Trainer(model(text), loss="mse", optimizer=0.0),
        )
        losses = [many.train_on_batch(*batch)["loss"] for batch in batches]
        state = many.get_state()
        state["counters"]["global_step"] -= 1
        unique_name.set_state(state)
        assert unique_name.train_on_batch(*batches[-1])["loss"] == pytest.approx(
            losses[-1], rel=1e-6
        )

    def test_a_dropout_of_everything_gives_zeros(self) -> None:
        trainer = Trainer(
            model(
                "(float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {1, 1}, float r = {1}> { d ="
                " Dropout(x, r)  y = MatMul(d, w) }"
            ),
            loss="mse",
        )
        assert trainer.train_on_batch(X, Y)["loss"] == pytest.approx(float((Y**2).mean()), rel=1e-5)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("(float[N, 2] x) => (float[N, 1] y, bool[N, 2] k) <float[2, 1] w = {1, 1}> { d, k = Dropout(x)  y = MatMul(d, w) }", r"output 'k'"),
            ('(float[N, 2] x) => (float[N, 1] y, float[2, 1] "w/next") <float[2, 1] w = {1, 1}> { y = MatMul(x, w)  "w/next" = Neg(w) }', r"w/next"),
            ("(float[N, 2] x, float[N, 1] sample_weight) => (float[N, 1] y) <float[2, 1] w = {1, 1}> { h = MatMul(x, w)  y = Mul(h, sample_weight) }", r"sample_weight"),
            ('(float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {1, 1}> { "train/loss" = Neg(x)  y = MatMul("train/loss", w) }', r"train/loss"),
            ('(float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {1, 1}, float[1] "w/exp_avg" = {1}> { h = MatMul(x, w)  y = Add(h, "w/exp_avg") }', r"w/"),
        ],
        ids=["mask", "next", "sample_weight", "train", "slot"],
    )  # fmt: skip
    def test_what_a_step_would_confuse_is_refused_by_name(self, text: str, message: str) -> None:
        slots = list(Adam().slots(np.zeros(1, np.float32)))
        proto = model(text.replace("exp_avg", slots[0]))
        with pytest.raises(ModelError, match=message):
            Trainer(proto, loss={"y": "mse"}, optimizer="adam").train_on_batch(X, Y)

    def test_an_input_may_be_an_output_and_an_output_may_come_twice(self) -> None:
        trainer = Trainer(
            model(f"(float[N, 2] x) => (float[N, 1] y, float[N, 2] x) {LINE}"),
            loss={"y": "mse"},
            optimizer=0.1,
        )
        trainer.fit(X, Y, epochs=50, verbose=0)
        assert trainer.evaluate(X, Y)["loss"] < 0.01
        np.testing.assert_array_equal(trainer.predict(X)["x"], X)

    def test_an_operator_that_onnx_does_not_know_is_no_crash(self) -> None:
        proto = model(
            "(float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {1, 1}> { h ="
            " com.example.Frobnicate(x)  y = MatMul(h, w) }"
        )
        with pytest.raises(OnnxfitError):
            Trainer(proto, loss="mse").fit(X, Y, verbose=0)

    def test_an_output_that_is_no_tensor_stays_out_of_training_and_in_the_file(self) -> None:
        proto = model(
            f"(float[N, 2] x) => (float[N, 1] y, seq(float[N, 1]) s) {LINE[:-1]} s ="
            " SequenceConstruct(y, h) }"
        )
        trainer = Trainer(proto, loss="mse", optimizer=0.1)
        trainer.fit(X, Y, epochs=50, verbose=0)
        assert trainer.evaluate(X, Y)["loss"] < 0.01
        session = onnxruntime.InferenceSession(
            trainer.export().SerializeToString(), providers=["CPUExecutionProvider"]
        )
        np.testing.assert_allclose(
            session.run(["s"], {"x": X})[0][0], trainer.predict(X), rtol=1e-5
        )
        alone = model(
            f"(float[N, 2] x) => (seq(float[N, 1]) s) {LINE[:-1]} s = SequenceConstruct(y, h) }}"
        )
        with pytest.raises(ModelError, match="The model has no tensor output; its outputs are s"):
            Trainer(alone, loss="mse")

    def test_a_gradient_of_another_type_than_its_weight_is_a_contradiction(self) -> None:
        contradicting = model(
            """(float[N, 2] x) => (float[N, 2] y) <float[2] b = {1, 2}, float[2] start = {0, 0}> {
            h = Mul(x, b)
            last, steps = Scan(start, h) <num_scan_inputs = 1, body = step(double[2] carry,
            float[2] row) => (float[2] next, float[2] kept) { next = Add(carry, row)
            kept = Identity(next) }>
            y = Add(h, steps) }"""
        )
        with pytest.raises(OnnxfitError):
            Trainer(contradicting, loss="mse").train_on_batch(X, X)

    def test_an_output_keeps_its_declared_shape_where_none_can_be_inferred(self) -> None:
        text = """<ir_version: 10, opset_import: ["": 23]>
            g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}, float[2] s = {1, 1}>
            { h = MatMul(x, w) y = RMSNormalization(h, s) }"""
        trainer = Trainer(onnx.parser.parse_model(text), loss="mse", optimizer=0.1)
        losses = [trainer.train_on_batch(X, X)["loss"] for _ in range(5)]
        assert losses[-1] < losses[0]

    @pytest.mark.parametrize("opset", [22, 23, 24, 25])
    def test_a_file_of_a_later_opset_trains(self, opset: int) -> None:
        normed = "n = LayerNormalization(x, s)" if opset < 23 else "n = RMSNormalization(x, s)"
        if opset > onnx.defs.onnx_opset_version():
            pytest.skip(f"onnx {onnx.__version__} does not read opset {opset}")
        body = (
            "(float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {0.5, -0.5}, float[2] s = {1,"
            f" 1}}> {{ {normed} y = MatMul(n, w) }}"
        )
        trainer = Trainer(
            onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> g {body}'),
            loss="mse",
            optimizer="adam",
        )
        trainer.fit(X, Y, epochs=3, verbose=0)
        expected = onnx.reference.ReferenceEvaluator(trainer.export()).run(None, {"x": X})[0]
        np.testing.assert_allclose(trainer.predict(X), expected, rtol=1e-5, atol=1e-6)

    def test_no_weights_is_not_all_weights(self) -> None:
        with pytest.raises(SettingError, match=r"weights=\[\] selects no weight"):
            Trainer(mlp(), [], loss="mse")


class TestFigures:
    def test_a_metric_by_name_knows_the_losss_logits(self) -> None:
        labels = (Y[:, 0] > 0).astype(int)
        by_name = Trainer(mlp((2, 8, 2)), loss="cross_entropy", metrics=["auc"]).evaluate(
            X, labels
        )["auc"]
        by_class = Trainer(
            mlp((2, 8, 2)), loss="cross_entropy", metrics=[AUC(from_logits=True)]
        ).evaluate(X, labels)["auc"]
        assert by_name == by_class

    @pytest.mark.parametrize("name", ["loss", "batch_loss", "val_accuracy", "learning_rate"])
    def test_a_metric_cannot_take_anothers_name(self, name: str) -> None:
        with pytest.raises(SettingError, match=r"cannot be called"):
            Trainer(mlp(), loss="cross_entropy", metrics=[Accuracy(name=name)])

    def test_a_metric_that_refuses_the_labels_changes_nothing(self) -> None:
        trainer = Trainer(mlp(), loss="cross_entropy", optimizer="adam", metrics=["mse"])
        before, x = trainer.get_state(), RNG.normal(size=(8, 4)).astype(np.float32)
        with pytest.raises(DataError, match=r"MeanSquaredError"):
            trainer.fit(x, np.zeros(8, int), verbose=0)
        np.testing.assert_equal(trainer.get_state(), before)

    def test_a_part_that_counts_nothing_leaves_the_sum_alone(self) -> None:
        from onnxfit.losses import CrossEntropy

        proto = model(
            """(float[N, 2] x) => (float[N, 2] a, float[N, 1] b) <float[2, 2] u = {1, 0, 0, 1}, float[2, 1] v = {1, 1}>
            { a = MatMul(x, u)  b = MatMul(x, v) }"""
        )
        trainer = Trainer(proto, loss={"a": CrossEntropy(ignore_index=-1), "b": "mse"})
        found = trainer.evaluate(X, {"a": np.full(24, -1), "b": Y + 1})
        assert found["loss"] == pytest.approx(1)
        assert np.isnan(found["a_loss"])


class TestCalls:
    def test_fit_inside_fit_is_refused(self) -> None:
        trainer = Trainer(linear(2), loss="mse")
        nested = LambdaCallback(on_epoch_end=lambda epoch, logs: trainer.fit(X, Y, verbose=0))
        with pytest.raises(SettingError, match=r"fit is already running"):
            trainer.fit(X, Y, callbacks=[nested], verbose=0)
        # and one callback needs no list
        trainer.fit(X, Y, callbacks=EarlyStopping("loss"), verbose=0)

    def test_gradients_of_an_interrupted_fit_do_not_leak(self) -> None:
        def stop(batch: int, logs: object) -> None:
            if batch == 1:
                raise KeyboardInterrupt

        trainer = Trainer(linear(2), loss="mse", optimizer=0.1, accumulate=4)
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(
                100 * X,
                Y,
                batch_size=2,
                callbacks=[LambdaCallback(on_train_batch_end=stop)],
                verbose=0,
            )
        trainer.fit(X, Y, batch_size=2, epochs=1, shuffle=False, verbose=0)
        clean = Trainer(linear(2), loss="mse", optimizer=0.1, accumulate=4)
        clean.fit(X, Y, batch_size=2, epochs=1, shuffle=False, verbose=0)
        np.testing.assert_array_equal(trainer.get_weights()["w"], clean.get_weights()["w"])

    def test_saved_after_an_interruption_the_history_goes_on(self, tmp_path) -> None:
        def stop(epoch: int, logs: object) -> None:
            if epoch == 2:
                raise KeyboardInterrupt

        trainer = Trainer(linear(2), loss="mse", optimizer=0.1)
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(X, Y, epochs=5, callbacks=[LambdaCallback(on_epoch_begin=stop)], verbose=0)
        loaded = Trainer.load(trainer.save(tmp_path / "c"))
        assert loaded.fit(X, Y, epochs=5, verbose=0).epoch == [0, 1, 2, 3, 4]

    def test_a_misspelt_hook_is_pointed_out(self) -> None:
        class Mine(Callback):
            def on_epoch_ends(self, epoch, logs): ...

        with pytest.raises(SettingError, match=r"Mine.on_epoch_ends is not a hook.*on_epoch_end\?"):
            Trainer(linear(2), loss="mse").fit(X, Y, callbacks=[Mine()], verbose=0)

    def test_another_trainers_state_is_refused_whole(self) -> None:
        trainer = Trainer(linear(2), loss="mse", optimizer="adam")
        before = trainer.get_state()
        for part in ("weights", "slots", "counters"):
            with pytest.raises(SettingError, match=rf"its {part} are"):
                trainer.set_state(
                    {**Trainer(linear(2, w=3), loss="mse", optimizer="adam").get_state(), part: {}}
                )
        np.testing.assert_equal(trainer.get_state(), before)

    def test_only_the_last_step_is_undone_and_only_once(self) -> None:
        trainer = Trainer(linear(2), loss="mse", optimizer="adam")
        start = trainer.get_state()
        trainer.revert_step()  # there was none
        np.testing.assert_equal(trainer.get_state()["slots"], start["slots"])
        states = []
        for _ in range(2):
            trainer.train_on_batch(X, Y)
            states.append(trainer.get_state())
        for _ in range(2):
            trainer.revert_step()
            np.testing.assert_equal(trainer.get_state()["weights"], states[0]["weights"])
            np.testing.assert_equal(trainer.get_state()["slots"], states[0]["slots"])
        trainer.set_weights(start["weights"])
        trainer.revert_step()
        np.testing.assert_equal(trainer.get_weights(), start["weights"])

    def test_names_of_optimizers_in_any_case(self) -> None:
        assert (
            Trainer(linear(2), loss="mse", optimizer="AdamW").optimizer
            == Trainer(linear(2), loss="MSE", optimizer="adamw").optimizer
        )

    def test_validation_data_as_a_list(self) -> None:
        assert (
            "val_loss"
            in Trainer(linear(2), loss="mse").fit(X, Y, validation_data=[X, Y], verbose=0).history
        )


class TestFiles:
    def test_a_folder_cannot_be_overwritten(self, tmp_path) -> None:
        trainer = Trainer(linear(2), loss="mse")
        for write in (trainer.export, trainer.save):
            with pytest.raises(CheckpointError, match=r"cannot be written: it is a folder"):
                write(tmp_path)

    def test_a_link_stays_a_link(self, tmp_path) -> None:
        (tmp_path / "link").symlink_to(tmp_path / "file")
        Trainer(linear(2), loss="mse").export(tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "file").exists()

    def test_outputs_of_any_name_come_back(self, tmp_path) -> None:
        proto = two_outputs()
        for node in proto.graph.node:
            node.output[0] = {"a": "name", "b": "custom"}.get(node.output[0], node.output[0])
        proto.graph.output[0].name, proto.graph.output[1].name = "name", "custom"
        for loss in ({"name": "mse"}, {"custom": "mae"}):
            assert Trainer.load(Trainer(proto, loss=loss).save(tmp_path / "c")).loss == loss

    @pytest.mark.parametrize(
        "change",
        [{"settings": []}, {"settings": {"wat": 1}}, {"resume": ["a", "b"]}, {"counters": None}, {"slots": []}, {"train_losses": None}, {"history": [1]}],
        ids=lambda c: next(iter(c)),
    )  # fmt: skip
    def test_a_checkpoint_that_was_tampered_with(self, tmp_path, change: dict) -> None:
        path = Trainer(linear(2), loss="mse").save(tmp_path / "c")
        with zipfile.ZipFile(path) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        entries["onnxfit.json"] = json.dumps(
            {**json.loads(entries["onnxfit.json"]), **change}
        ).encode()
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in entries.items():
                archive.writestr(name, data)
        with pytest.raises(CheckpointError):
            Trainer.load(path)

    def test_a_compressed_checkpoint_is_not_unpacked(self, tmp_path) -> None:
        """A small file may unpack to gigabytes; onnxfit compresses nothing."""
        path = Trainer(linear(2), loss="mse").save(tmp_path / "c")
        with zipfile.ZipFile(path) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in entries.items():
                archive.writestr(name, data)
        with pytest.raises(CheckpointError, match=r"compressed or encrypted"):
            Trainer.load(path)

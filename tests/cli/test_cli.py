"""The command line trains as Python does, stops and goes on without a trace, and says in one
message what is wrong.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner, Result

from onnxfit import Trainer, losses, metrics, optimizers, penalties, schedules
from onnxfit.cli import arrays, job, main, settings
from onnxfit.errors import DataError
from tests.models import convolutional, mlp, two_inputs, two_outputs

ROOT = Path(__file__).resolve().parents[2]
ROWS = 70  # not a multiple of the batch size
COMMANDS = sorted(main.list_commands(click.Context(main)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a model, and the same data in every format."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    X = rng.standard_normal((ROWS, 4)).astype(np.float32).round(3)
    y = (X @ rng.standard_normal((4, 3))).argmax(axis=1)
    onnx.save(mlp(), "m.onnx")
    np.savez("d.npz", X=X, y=y)
    np.save("X.npy", X)
    np.save("labels.npy", y)
    write_csv("d.csv", "a,b,c,d,kind", np.column_stack([X, y]))
    return tmp_path


def write_csv(path: str, header: str, table: Any) -> None:
    np.savetxt(path, table, delimiter=",", header=header, comments="", fmt="%.9g")


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def done(*arguments: object) -> str:
    """The standard output of a command that succeeds."""
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: object, code: int = 1) -> str:
    """The one message of a command that fails: a line (of any length), and nothing else."""
    result = call(*arguments)
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    if code == 1:
        assert re.fullmatch(r"Error: [^\n]+\n", result.stderr)
    return result.stderr


FIT = ("fit", "m.onnx", "-d", "d.npz", "--loss", "cross_entropy", "-q")
ADAM = (*FIT, "--optimizer", "adam", "--lr", "0.01")


class TestFit:
    def test_trains_as_python_does(self, folder: Path) -> None:
        out = done(
            *ADAM,
            "-e",
            3,
            "-m",
            "accuracy",
            "-b",
            16,
            "--validation-split",
            "0.2",
            "-o",
            "t.onnx",
            "--json",
        )
        with np.load("d.npz") as file:
            X, y = file["X"], file["y"]
        trainer = Trainer(
            "m.onnx", loss="cross_entropy", optimizer=optimizers.Adam(0.01), metrics=["accuracy"]
        )
        history = trainer.fit(X, y, epochs=3, batch_size=16, validation_split=0.2, verbose=0)
        report = json.loads(out)
        assert report["history"] == history.history
        assert report["figures"] == {name: values[-1] for name, values in history.history.items()}
        assert report["epochs"] == 3
        assert Path(report["output"]).read_bytes() == trainer.export(None).SerializeToString()

    @pytest.mark.parametrize("data", ["-d X.npy -d labels.npy", "-d d.csv --label kind"])
    def test_every_format_trains_the_same(self, folder: Path, data: str) -> None:
        done(*ADAM, "-o", "npz.onnx")
        done("fit", "m.onnx", *data.split(), *ADAM[4:], "-o", "other.onnx")
        assert Path("npz.onnx").read_bytes() == Path("other.onnx").read_bytes()

    def test_every_option_arrives(self, folder: Path) -> None:
        text = """--weights fc1* --weights !fc1.bias --loss focal:gamma=1.5 --penalty 0.5 --penalty fc1.weight=l1:0.25 --optimizer
            sgd:momentum=0.9,nesterov=true --learning-rate cosine:learning_rate=0.1,decay_steps=9 --metrics accuracy --metrics
            top_k_accuracy:k=2 --backend forward_backward --gradient onnx --device cpu --seed 7 --batch-norm frozen --clip-norm 2
            --clip-value 3 --accumulate 2"""
        done("fit", "m.onnx", "-d", "d.npz", "-q", *text.split(), "--checkpoint", "c/")
        found = Trainer.load("c/last.onnxfit").settings
        assert found["weights"] == ["fc1.weight"]
        assert found["loss"] == losses.Focal(gamma=1.5)
        assert found["penalty"] == {
            "fc1.weight": penalties.ElasticNet(0.25, 0),
            "*": penalties.ElasticNet(0, 0.5),
        }
        assert found["optimizer"] == optimizers.SGD(
            schedules.Cosine(0.1, 9), momentum=0.9, nesterov=True
        )
        assert found["metrics"] == ["accuracy", metrics.TopKAccuracy(k=2)]
        rest = {
            "backend": "forward_backward",
            "gradient": "onnx",
            "device": "cpu",
            "seed": 7,
            "batch_norm": "frozen",
        }
        rest |= {"clip_norm": 2, "clip_value": 3, "accumulate": 2}
        assert {name: found[name] for name in rest} == rest

    def test_its_files(self, folder: Path) -> None:
        done(
            *ADAM,
            "-e",
            2,
            "--csv",
            "a/f.csv",
            "--tensorboard",
            "runs/a",
            "--checkpoint",
            "c/{epoch}-{loss:.2f}.ckpt",
        )
        assert Path("a/f.csv").read_text().startswith("epoch,loss")
        assert list(Path("runs/a").rglob("events.out.tfevents.*"))
        assert sorted(p.name[:2] for p in Path("c").glob("*.ckpt")) == ["0-", "1-"]

    def test_early_stopping_keeps_the_best_epoch(self, folder: Path) -> None:
        hot = (
            *FIT,
            "--lr",
            "9",
            "--validation-split",
            "0.3",
            "--early-stopping",
            2,
            "-e",
            50,
            "-o",
            "t.onnx",
            "-m",
            "accuracy",
        )
        report = json.loads(done(*hot, "--json"))
        losses_seen = report["history"]["val_loss"]
        assert report["epochs"] == losses_seen.index(min(losses_seen)) + 3 < 50
        assert report["figures"]["val_loss"] == min(losses_seen)
        assert "EarlyStopping" in report["stopped"]
        with np.load("d.npz") as file:
            rows = int(ROWS * 0.7)
            np.savez("v.npz", X=file["X"][rows:], y=file["y"][rows:])
        found = json.loads(
            done("evaluate", "t.onnx", "-d", "v.npz", "-l", "cross_entropy", "--json")
        )
        assert found["loss"] == pytest.approx(min(losses_seen), rel=1e-6)

    def test_several_outputs(self, folder: Path) -> None:
        onnx.save(two_outputs(), "two.onnx")
        x = np.linspace(-1, 1, 20, dtype=np.float32)[:, None]
        np.savez("two.npz", x=x, a=2 * x, b=3 * x, sample_weight=np.ones(20, np.float32))
        text = "-l a=mse -l b=huber:delta=2 -m b=mae --lr 0.5 -e 30 -o t.onnx --json -q"
        report = json.loads(done("fit", "two.onnx", "-d", "two.npz", *text.split()))
        assert {"a_loss", "b_loss", "b_mae"} <= report["figures"].keys()
        weights = {
            t.name: onnx.numpy_helper.to_array(t).item()
            for t in onnx.load("t.onnx").graph.initializer
        }
        assert weights == pytest.approx({"u": 2, "v": 3, "t": 3}, abs=0.1)
        assert "arrays that nothing reads (b)" in refused(
            "fit", "two.onnx", "-d", "two.npz", "-l", "a=mse", "-o", "t.onnx"
        )

    def test_something_must_be_left_of_it(self, folder: Path) -> None:
        assert "Nothing would be left" in refused(*FIT, code=2)

    def test_text_is_a_line_for_each_figure(self, folder: Path) -> None:
        lines = done(*FIT, "-m", "accuracy", "-o", "t.onnx").splitlines()
        assert [line.split()[0] for line in lines] == [
            "epochs",
            "loss",
            "accuracy",
            "learning_rate",
        ]


class TestSettings:
    def test_metrics_take_logits_where_the_loss_does(self) -> None:
        loss = settings.parse_loss(["binary_cross_entropy:from_logits=true"])
        assert settings.parse_metrics(['binary_accuracy:name="b"'], loss)[0].from_logits
        assert not settings.parse_metrics(["binary_accuracy:from_logits=false"], loss)[
            0
        ].from_logits

    @pytest.mark.parametrize(
        ("option", "value", "message"),
        [
            ("--loss", "cross_entrpy", "Did you mean 'cross_entropy'?"),
            (
                "--loss",
                "huber:dleta=1",
                "No setting of huber is called 'dleta'. Did you mean 'delta'?",
            ),
            ("--loss", "huber:delta", "huber:delta=VALUE"),
            ("--loss", "huber:delta=-1", "delta > 0, got -1"),
            ("--loss", "nowhere=mse", "No output is called 'nowhere'"),
            ("--optimizer", "adamm", "Did you mean 'adam'?"),
            ("--optimizer", "sgd:momentum=much", "momentum"),
            ("--learning-rate", "fast", "No schedule, and no number, is called 'fast'"),
            ("--learning-rate", "cosine:learning_rate=1", "decay_steps"),
            ("--learning-rate", "-1", "-1"),
            ("--metrics", "acuracy", "Did you mean 'accuracy'?"),
            ("--penalty", "much", "[PATTERN=]NUMBER"),
            ("--penalty", "fc9*=1", "fc9*"),
            ("--weights", "fc9*", "fc9*"),
            ("--device", "abacus", "abacus"),
        ],
    )
    def test_what_does_not_exist_is_one_message(
        self, folder: Path, option: str, value: str, message: str
    ) -> None:
        rest = FIT if option != "--loss" else (*FIT[:4], "-q")
        assert message in refused(*rest, option, value, "-o", "t.onnx")
        assert not Path("t.onnx").exists()

    @pytest.mark.parametrize(
        "option",
        [
            "--epochs=0",
            "--batch-size=0",
            "--clip-norm=0",
            "--validation-split=1",
            "--backend=fast",
            "--seed=x",
            "--no-such=1",
        ],
    )
    def test_values_out_of_range(self, folder: Path, option: str) -> None:
        assert option.split("=")[0] in refused(*FIT, option, "-o", "t.onnx", code=2)

    def test_the_penalty_of_every_weight_comes_last(self) -> None:
        assert list(settings.parse_penalty(["0.5", "fc*=1", "fc1*=l1:2"])) == ["fc*", "fc1*", "*"]

    def test_given_twice(self, folder: Path) -> None:
        assert "twice" in refused(*FIT, "--loss", "mse", "-o", "t.onnx")
        assert "twice" in refused(*FIT, "--penalty", "1", "--penalty", "2", "-o", "t.onnx")


class TestConfig:
    OPTIONS = {
        "data": "d.npz",
        "loss": "cross_entropy",
        "optimizer": "adam",
        "learning-rate": 0.01,
        "batch_size": 16,
        "epochs": 2,
    }

    def test_a_file_holds_the_same_options(self, folder: Path) -> None:
        rest = {
            "metrics": ["accuracy"],
            "penalty": {"fc0*": 0.01},
            "quiet": True,
            "output": "file.onnx",
            "clip_norm": None,
            "model": "m.onnx",
        }
        Path("o.json").write_text(json.dumps({**self.OPTIONS, **rest}))
        report = done("fit", "--config", "o.json")
        typed = (*ADAM, "-b", 16, "-m", "accuracy", "--penalty", "fc0*=0.01")
        assert report == done(*typed, "-e", 2, "-o", "typed.onnx")
        assert Path("file.onnx").read_bytes() == Path("typed.onnx").read_bytes()
        # the command line wins
        assert done("fit", "--config", "o.json", "-e", 1) == done(
            *typed, "-e", 1, "-o", "typed.onnx"
        )

    def test_yaml(self, folder: Path) -> None:
        pytest.importorskip("yaml")
        Path("o.json").write_text(json.dumps({**self.OPTIONS, "output": "t.onnx"}))
        lines = "\n".join(f"{name}: {value}" for name, value in self.OPTIONS.items())
        Path("o.yaml").write_text(
            f"{lines}\noutput: t.onnx\npenalty: 0\nclip-norm: 1e9  # text to YAML 1.1\n"
        )
        assert done("fit", "m.onnx", "--config", "o.yaml", "-q") == done(
            "fit", "m.onnx", "--config", "o.json", "-q"
        )
        Path("o.yaml").write_text("loss: !!python/object/apply:os.mkdir [stolen]")
        assert "cannot be read" in refused("fit", "m.onnx", "--config", "o.yaml")
        assert not Path("stolen").exists()

    def test_yaml_without_its_reader(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "yaml", None)
        Path("o.yaml").write_text("epochs: 1")
        assert 'pip install "onnxfit[yaml]"' in refused("fit", "m.onnx", "--config", "o.yaml")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ('{"epoch": 3}', "is called 'epoch'. Did you mean 'epochs'?"),
            ('{"config": "o.json"}', "is called 'config'"),
            ('{"batch-size": 1, "batch_size": 2}', "gives batch-size twice"),
            ('{"epochs": [1]}', "expected one value"),
            ('{"epochs": true}', "expected a value"),
            ('{"quiet": 1}', "expected true or false"),
            ("[1]", "holds a list"),
            ("{", "cannot be read"),
        ],
    )
    def test_what_it_cannot_hold(self, folder: Path, text: str, message: str) -> None:
        Path("o.json").write_text(text)
        assert message in refused(*FIT, "--config", "o.json", "-o", "t.onnx")

    def test_values_are_checked_as_if_typed(self, folder: Path) -> None:
        Path("o.json").write_text('{"epochs": "many"}')
        assert "--epochs" in refused(*FIT, "--config", "o.json", "-o", "t.onnx", code=2)


class TestData:
    def wanted(self, model: onnx.ModelProto, *outputs: str, **rest: Any) -> arrays.DataRequest:
        return arrays.DataRequest(arrays.inputs_of(model), outputs, **rest)

    def test_npy_is_mapped_and_not_read(self, folder: Path) -> None:
        x, y, _ = arrays.read(["X.npy", "labels.npy"], self.wanted(mlp(), "y"))
        assert all(isinstance(array, np.memmap) for array in (x["x"], y["y"]))  # type: ignore[index]
        np.save("weights.npy", np.ones(ROWS))
        assert (
            arrays.read(["X.npy", "labels.npy", "weights.npy"], self.wanted(mlp(), "y"))[2]
            is not None
        )

    def test_csv_columns_by_name(self, folder: Path) -> None:
        write_csv("two.csv", "right,left,sample_weight,y", [[1, 2, 3, 0.5], [4, 5, 6, 7]])
        x, y, weights = arrays.read(["two.csv"], self.wanted(two_inputs(), "y"))
        assert {name: (a.dtype, a.tolist()) for name, a in x.items()} == {
            "left": ("f4", [2, 5]),
            "right": ("f4", [1, 4]),
        }
        assert y is not None and y["y"].tolist() == [0.5, 7]  # noqa: PT018
        assert weights is not None and weights.tolist() == [3, 6]  # noqa: PT018

    def test_csv_rows_may_be_images(self, folder: Path) -> None:
        write_csv(
            "i.csv",
            ",".join(f"p{i}" for i in range(64)) + ",label",
            np.arange(2 * 65).reshape(2, 65),
        )
        x, y, _ = arrays.read(["i.csv"], self.wanted(convolutional(), "logits"))
        assert x["x"].shape == (2, 1, 8, 8)
        assert x["x"][0, 0, 1, 0] == 8
        assert y is not None and y["logits"].dtype == np.int64  # noqa: PT018

    def test_a_prediction_passes_over_labels(self, folder: Path) -> None:
        write_csv("p.csv", "a,b,y,c,d", np.zeros((2, 5)))
        assert arrays.read(["p.csv"], self.wanted(mlp(), "y", predicting=True))[0]["x"].shape == (
            2,
            4,
        )
        assert done("predict", "m.onnx", "-d", "d.npz") == done("predict", "m.onnx", "-d", "X.npy")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("a,b\n1,x\n", "could not convert string 'x'"),
            ("a,b\n1\n", "columns"),
            ("a,a\n1,2\n", "a name of its own"),
            ("a,b\n", "no rows"),
            ("", "a name of its own"),
            ("a,b,c,d\n1,2,3,4\n", "no column with the labels of y"),
            ("y\n1\n", "no column for the input x: float32[N, 4]"),
            ("a,b,c,y\n1,2,3,0\n", "shape (1, 3)"),
            ("a,b,c,d,y\n1,2,3,nan,0\n", "NaN in row 0"),
        ],
    )
    def test_csv_that_will_not_do(self, folder: Path, content: str, message: str) -> None:
        Path("bad.csv").write_text(content)
        assert message in refused(
            "fit", "m.onnx", "-d", "bad.csv", "-l", "cross_entropy", "-o", "t.onnx", "-q"
        )

    def test_files_that_will_not_do(self, folder: Path) -> None:
        rest = ("-l", "cross_entropy", "-o", "t.onnx", "-q")
        whole = Path("d.npz").read_bytes()
        Path("cut.npz").write_bytes(whole[:-100])
        Path("flipped.npz").write_bytes(whole[:400] + bytes([whole[400] ^ 255]) + whole[401:])
        Path("text.npz").write_text("text")
        Path("cut.npy").write_bytes(Path("X.npy").read_bytes()[:-100])
        Path("text.npy").write_text("text")
        for name in ("cut.npz", "flipped.npz", "text.npz", "cut.npy", "text.npy"):
            labels = ("-d", "labels.npy") if name.endswith("npy") else ()
            assert f"{name}'" in refused("fit", "m.onnx", "-d", name, *labels, *rest)
        np.savez("names.npz", features=np.zeros(3), y=np.zeros(3))
        assert "no array for the input x" in refused("fit", "m.onnx", "-d", "names.npz", *rest)
        assert "1 of 2 arrays" in refused("fit", "m.onnx", "-d", "X.npy", *rest)
        assert "Data is one .npz" in refused("fit", "m.onnx", "-d", "d.npz", "-d", "d.csv", *rest)
        assert "--label" in refused("fit", "m.onnx", "-d", "d.npz", "--label", "kind", *rest)
        assert "no column 'knid'" in refused(
            "fit", "m.onnx", "-d", "d.csv", "--label", "knid", *rest
        )
        assert "does not exist" in refused("fit", "m.onnx", "-d", "none.npz", *rest, code=2)
        Path("m2.onnx").write_text("text")
        assert "m2.onnx" in refused("fit", "m2.onnx", "-d", "d.npz", *rest)

    def test_no_file_runs_code(self, folder: Path) -> None:
        class Thief:
            def __reduce__(self) -> Any:
                return os.mkdir, ("stolen",)

        np.save("X.npy", np.array([Thief()]), allow_pickle=True)
        np.savez("d.npz", X=np.array([Thief()]), y=np.zeros(1))
        assert "Python objects" in refused("predict", "m.onnx", "-d", "X.npy")
        assert "Python objects" in refused("predict", "m.onnx", "-d", "d.npz")
        assert not Path("stolen").exists()

    def test_predictions_that_a_file_cannot_hold(self) -> None:
        with pytest.raises(DataError, match=r"write a \.npz"):
            arrays.as_csv({"y": np.zeros((2, 3, 4))})


class TestAfterwards:
    def test_evaluate(self, folder: Path) -> None:
        done(*ADAM, "-m", "accuracy", "-o", "t.onnx", "--checkpoint", "c/")
        with np.load("d.npz") as file:
            expected = Trainer.load("c/last.onnxfit").evaluate(file["X"], file["y"])
        from_checkpoint = done("evaluate", "c/last.onnxfit", "-d", "d.npz", "--json")
        assert json.loads(from_checkpoint) == expected
        assert from_checkpoint == done(
            "evaluate", "t.onnx", "-d", "d.npz", "-l", "cross_entropy", "-m", "accuracy", "--json"
        )
        figures = json.loads(
            done("evaluate", "c/last.onnxfit", "-d", "d.npz", "-m", "confusion_matrix", "--json")
        )
        assert figures["loss"] == expected["loss"]
        other = json.loads(
            done(
                "evaluate",
                "c/last.onnxfit",
                "-d",
                "d.npz",
                "-l",
                "cross_entropy:label_smoothing=0.5",
                "--json",
            )
        )
        assert other["loss"] != expected["loss"]
        assert np.sum(figures["confusion_matrix"]) == ROWS
        assert "Name a loss" in refused("evaluate", "t.onnx", "-d", "d.npz")

    @pytest.mark.parametrize("kind", ["npy", "npz", "csv"])
    def test_predict(self, folder: Path, kind: str) -> None:
        session = onnxruntime.InferenceSession("m.onnx", providers=["CPUExecutionProvider"])
        (expected,) = session.run(None, {"x": np.load("X.npy")})
        assert f"float32[{ROWS}, 3] -> p.{kind}" in done(
            "predict", "m.onnx", "-d", "X.npy", "-b", ROWS, "-o", f"p.{kind}"
        )
        if kind == "csv":
            assert Path("p.csv").read_text().splitlines()[0] == "y_0,y_1,y_2"
            assert done("predict", "m.onnx", "-d", "X.npy", "-b", ROWS) == Path("p.csv").read_text()
            found = np.loadtxt("p.csv", delimiter=",", skiprows=1, dtype=np.float32)
        else:
            found = np.load(f"p.{kind}")["y"] if kind == "npz" else np.load("p.npy")
        assert np.array_equal(found, expected)

    def test_predict_takes_any_model(self, folder: Path) -> None:
        """Nothing of this one trains: no weight, an operator without a derivative, integers, two
        outputs.
        """
        text = (
            "g (int64[N,2] x) => (int64[N,1] best, int64[N,2] twice) { f = Cast<to = 1>(x) best ="
            " ArgMax<axis = 1>(f) twice = Add(x, x) }"
        )
        onnx.save(
            onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}'),
            "plain.onnx",
        )
        np.save("i.npy", [[1, 2], [4, 3]])
        assert (
            done("predict", "plain.onnx", "-d", "i.npy") == "best,twice_0,twice_1\n1,2,4\n0,8,6\n"
        )
        assert json.loads(done("predict", "plain.onnx", "-d", "i.npy", "--json"))["twice"] == [
            [2, 4],
            [8, 6],
        ]
        assert "A .npy holds one array" in refused(
            "predict", "plain.onnx", "-d", "i.npy", "-o", "p.npy"
        )
        assert ".npy, .npz or .csv" in refused(
            "predict", "plain.onnx", "-d", "i.npy", "-o", "p.txt"
        )

    def test_export(self, folder: Path) -> None:
        done(*FIT, "--optimizer", "adam:ema_momentum=0.9", "-o", "t.onnx", "--checkpoint", "c/")
        done("export", "c/last.onnxfit", "-o", "e.onnx")
        assert Path("e.onnx").read_bytes() == Path("t.onnx").read_bytes()
        done("export", "c/last.onnxfit", "-o", "a.onnx", "--averaged")
        assert (
            Path("a.onnx").read_bytes()
            == Trainer.load("c/last.onnxfit").export(None, averaged=True).SerializeToString()
        )
        assert "m.onnx" in refused("export", "m.onnx", "-o", "e.onnx")
        assert done("predict", "c/last.onnxfit", "-d", "d.npz") == done(
            "predict", "t.onnx", "-d", "d.npz"
        )

    def test_a_loss_of_ones_own_is_no_obstacle(self, folder: Path) -> None:
        trainer = Trainer("m.onnx", loss=lambda op, y_true, y_pred: op.Abs(y_true - y_pred))
        trainer.save("own.ckpt")
        done("export", "own.ckpt", "-o", "e.onnx")
        assert Path("e.onnx").read_bytes() == trainer.export(None).SerializeToString()
        assert done("predict", "own.ckpt", "-d", "d.npz") == done(
            "predict", "m.onnx", "-d", "d.npz"
        )
        assert "your own loss" in refused("evaluate", "own.ckpt", "-d", "d.npz")


LONG = (*ADAM, "-e", 6, "-b", 16, "-m", "accuracy", "--validation-split", "0.2", "--accumulate", 2)


class TestStopAndGoOn:
    def uninterrupted(self) -> tuple[bytes, str]:
        done(*LONG, "-o", "whole.onnx", "--csv", "whole.csv")
        return Path("whole.onnx").read_bytes(), Path("whole.csv").read_text()

    def stop_at(
        self,
        monkeypatch: pytest.MonkeyPatch,
        hook: str,
        epoch: int,
        batch: int,
        number: int = signal.SIGINT,
    ) -> None:
        """A signal right before the hook is called there."""
        original = getattr(job.Interruption, hook)
        seen = []

        def with_signal(self: job.Interruption, index: int, logs: Any) -> None:
            seen.append(index)
            at_epoch = index if hook == "on_epoch_end" else seen.count(0) - 1
            if at_epoch == epoch and (hook == "on_epoch_end" or index == batch):
                signal.raise_signal(number)
            original(self, index, logs)

        monkeypatch.setattr(job.Interruption, hook, with_signal)

    @pytest.mark.parametrize(
        ("hook", "epoch", "batch"),
        [
            ("on_train_batch_end", 0, 0),
            ("on_train_batch_end", 2, 1),
            ("on_train_batch_end", 2, 3),  # the last of the epoch
            ("on_epoch_end", 1, 0),
        ],
    )
    def test_the_result_is_as_if_nothing_had_happened(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, hook: str, epoch: int, batch: int
    ) -> None:
        whole, figures = self.uninterrupted()
        with monkeypatch.context() as patch:
            self.stop_at(patch, hook, epoch, batch)
            result = call(*LONG, "-o", "t.onnx", "--csv", "t.csv", "--checkpoint", "c/")
        assert result.exit_code == 130
        assert result.stdout == ""
        assert not Path("t.onnx").exists()
        command = re.search(r"onnxfit (resume .*)", result.stderr)
        assert command
        done(*shlex.split(command[1]), "-q")
        assert Path("t.onnx").read_bytes() == whole
        assert Path("t.csv").read_text() == figures

    def test_at_the_end_a_signal_changes_nothing(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.stop_at(monkeypatch, "on_epoch_end", 5, 0)
        done(*LONG, "-o", "t.onnx")

    def test_a_request_to_terminate(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stop_at(monkeypatch, "on_train_batch_end", 1, 0, signal.SIGTERM)
        before = signal.getsignal(signal.SIGTERM)
        result = call(*LONG, "--checkpoint", "c/{epoch}.ckpt")
        assert result.exit_code == 143
        assert signal.getsignal(signal.SIGTERM) == before
        assert sorted(path.name for path in Path("c").iterdir()) == [
            "0.ckpt",
            "epoch.ckpt.json",
            "interrupted-epoch.ckpt",
        ]

    def test_a_second_signal_stops_at_once(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            job.Interruption,
            "_raise_signal",
            lambda self: [signal.raise_signal(signal.SIGINT) for _ in range(2)],
        )
        result = call(*LONG, "--checkpoint", "c/")
        assert result.exit_code == 130
        assert result.stderr == "Interrupted.\n"
        assert [path.name for path in Path("c").iterdir()] == ["last.onnxfit.json"]

    def test_without_a_checkpoint_it_says_so(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.stop_at(monkeypatch, "on_train_batch_end", 1, 0)
        result = call(*LONG, "-o", "t.onnx")
        assert result.exit_code == 130
        assert "nothing is saved" in result.stderr

    def test_the_newest_whole_checkpoint_of_a_folder(self, folder: Path) -> None:
        whole, _ = self.uninterrupted()
        done(*LONG, "-e", 3, "-o", "t.onnx", "--checkpoint", "c/{epoch}.ckpt")
        Path("c/7.ckpt").write_bytes(Path("c/2.ckpt").read_bytes()[:-50])  # a disk that was full
        result = call("resume", "c", "-e", 6)
        assert result.exit_code == 0
        assert "7.ckpt" in result.stderr
        assert "From " in result.stderr and "2.ckpt" in result.stderr  # noqa: PT018
        assert Path("t.onnx").read_bytes() == whole
        done("resume", "c/1.ckpt", "-e", 7)  # a checkpoint by its name
        assert (
            "damaged" in (text := refused("resume", "c/7.ckpt", "-e", 9, "-q"))
            or "not a whole" in text
        )

    def test_a_folder_that_was_moved_and_another_working_folder(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole, _ = self.uninterrupted()
        done(*LONG, "-e", 3, "-o", "t.onnx", "--checkpoint", "c/")
        Path("c").rename("elsewhere")
        monkeypatch.chdir("elsewhere")
        done("resume", ".", "-e", 6)
        assert (folder / "t.onnx").read_bytes() == whole
        assert not (folder / "c").exists()
        assert sorted(path.name for path in Path().iterdir()) == [
            "last.onnxfit",
            "last.onnxfit.json",
        ]

    def test_killed_before_the_first_checkpoint(self, folder: Path) -> None:
        whole, _ = self.uninterrupted()
        done(*LONG, "-o", "t.onnx", "--checkpoint", "c/")
        Path("c/last.onnxfit").unlink()
        note = json.loads(Path("c/last.onnxfit.json").read_text())
        Path("c/last.onnxfit.json").write_text(json.dumps({**note, "finished": False}))
        assert "from the beginning" in call("resume", "c").stderr
        assert Path("t.onnx").read_bytes() == whole

    def test_what_is_finished_is_finished(self, folder: Path) -> None:
        done(*LONG, "--checkpoint", "c/")
        assert "--epochs N above 6" in refused("resume", "c")
        assert "has none" in refused("resume", ".")

    def test_an_earlier_training_is_not_overwritten_unasked(self, folder: Path) -> None:
        done(*FIT, "--checkpoint", "c/a.ckpt")
        before = Path("c/a.ckpt").read_bytes()
        assert "--overwrite" in refused(*ADAM, "--checkpoint", "c/a.ckpt")
        assert Path("c/a.ckpt").read_bytes() == before
        done(*ADAM, "--checkpoint", "c/a.ckpt", "--overwrite")
        assert Path("c/a.ckpt").read_bytes() != before
        done(*FIT, "--checkpoint", "c/b.ckpt")  # another one beside it
        assert "name a checkpoint" in refused("resume", "c", "-e", 3)
        done("resume", "c/b.ckpt", "-e", 3)

    def test_only_checkpoints_are_overwritten(self, folder: Path) -> None:
        done(*FIT, "-e", 2, "--checkpoint", "c/{epoch}")
        others = {"c/notes": b"mine", "c/7": b"mine, too"}
        for name, content in others.items():
            Path(name).write_bytes(content)
        done(*FIT, "--checkpoint", "c/{epoch}", "--overwrite")
        assert {path.name for path in Path("c").iterdir()} == {"0", "7", "notes", "epoch.json"}
        assert {name: Path(name).read_bytes() for name in others} == others

    def test_options_of_another_version(self, folder: Path) -> None:
        done(*FIT, "--checkpoint", "c/")
        note = json.loads(Path("c/last.onnxfit.json").read_text())
        del note["options"]["seed"]
        Path("c/last.onnxfit.json").write_text(json.dumps(note))
        assert "they lack seed" in refused("resume", "c", "-e", 2)

    @pytest.mark.parametrize(
        ("path", "message"),
        [("c/t.onnx", "--output"), ("{epoch}/c.ckpt", "folder"), ("c/{.ckpt", "template")],
    )
    def test_places_that_will_not_do(self, folder: Path, path: str, message: str) -> None:
        assert message in refused(*FIT, "--checkpoint", path)


@pytest.mark.skipif(sys.platform == "win32", reason="no signals to send")
class TestProcesses:
    def start(self, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "error", "-m", "onnxfit", *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
    def test_stopped_from_outside(self, folder: Path, number: int) -> None:
        text = f"fit m.onnx -d d.npz -l cross_entropy --optimizer adam -e {EPOCHS} -b 8 -o t.onnx"
        process = self.start(*text.split(), "--checkpoint", "c/")
        assert process.stderr
        assert process.stdout
        with process:
            while "epoch 3/" not in process.stderr.readline():
                assert process.poll() is None
            process.send_signal(number)
            out, err = process.stdout.read(), process.stderr.read()
        assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
        assert out == ""
        assert "Traceback" not in err
        assert ("onnxfit resume" in err) == (number == signal.SIGINT)
        assert not Path("t.onnx").exists()
        assert len(done("resume", "c", "-q").splitlines()) == 3
        resumed = Path("t.onnx").read_bytes()
        done(*text.split(), "-q")
        assert Path("t.onnx").read_bytes() == resumed

    def test_streams_and_codes(self, folder: Path) -> None:
        out, err = (
            process := self.start(*[a for a in FIT if a != "-q"], "-o", "t.onnx", "--json")
        ).communicate()
        assert process.returncode == 0
        assert json.loads(out)["epochs"] == 1
        assert err.startswith("epoch 1/1")


EPOCHS = 150


def command(name: str) -> click.Command:
    found = main.get_command(click.Context(main), name)
    assert found is not None
    return found


class TestHelp:
    @pytest.mark.parametrize("name", COMMANDS)
    def test_every_command_teaches(self, name: str) -> None:
        """Each has an example, and each option says what it does and what happens without it."""
        text = done(name, "--help")
        assert (
            re.search(rf"^ +onnxfit {name} ", text, re.MULTILINE) or f"  onnxfit {name}\n" in text
        )
        for parameter in command(name).params:
            if isinstance(parameter, click.Option):
                assert parameter.help, parameter.name
                assert parameter.help.endswith("."), parameter.name

    def test_examples_use_options_that_exist(self) -> None:
        for name in COMMANDS:
            text = done(name, "--help").replace("\\\n", " ")
            known = {option for parameter in command(name).params for option in parameter.opts}
            for line in re.findall(rf"^ +onnxfit {name}\b(.*)$", text, re.MULTILINE):
                assert {word for word in shlex.split(line) if re.match(r"--?[a-z]", word)} <= known

    def test_no_command_is_the_help(self) -> None:
        assert "Commands:" in call().output


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/cli.md, command after command, in a folder of its own; every command is on it."""
    pytest.importorskip("yaml")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    seen = set()
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        if language == "python":
            exec(compile(block, "docs/cli.md", "exec"), {})
        elif language == "yaml":
            Path("options.yaml").write_text(block)
        else:
            for line in block.replace("\\\n", " ").splitlines():
                program, name, *rest = shlex.split(line)
                assert program == "onnxfit"
                seen.add(name)
                done(name, *rest)
    assert seen == set(COMMANDS)

"""`onnxfit fit` trains as Python does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxfit import LoRA, Trainer, losses, metrics, optimizers, penalties, schedules
from tests.cli.helpers import ADAM, FIT, ROWS, done, refused
from tests.models import two_outputs


def test_trains_as_python_does(folder: Path) -> None:
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
def test_every_format_trains_the_same(folder: Path, data: str) -> None:
    done(*ADAM, "-o", "npz.onnx")
    done("fit", "m.onnx", *data.split(), *ADAM[4:], "-o", "other.onnx")
    assert Path("npz.onnx").read_bytes() == Path("other.onnx").read_bytes()


def test_every_option_arrives(folder: Path) -> None:
    text = """--weights fc1* --weights !fc1.bias --loss focal:gamma=1.5 --penalty 0.5 --penalty fc1.weight=l1:0.25 --optimizer
        sgd:momentum=0.9,nesterov=true --learning-rate cosine:learning_rate=0.1,decay_steps=9 --metrics accuracy --metrics
        top_k_accuracy:k=2 --backend forward_backward --gradient onnx --device cpu --seed 7 --batch-norm frozen --clip-norm 2
        --clip-value 3 --accumulate 2 --stop-gradient ?0 --stop-gradient !a0
        --freeze-rows fc1.w*=0,-1 --freeze-rows fc1.weight=2"""
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
    rest |= {"clip_norm": 2, "clip_value": 3, "accumulate": 2, "stop_gradients": ["?0", "!a0"]}
    rest |= {"freeze_rows": {"fc1.w*": [0, -1], "fc1.weight": [2]}}
    assert {name: found[name] for name in rest} == rest


def test_rows_are_frozen_by_a_configuration_file(folder: Path) -> None:
    options = {"freeze-rows": {"fc1.weight": [0, 2]}, "loss": "cross_entropy", "data": "d.npz"}
    Path("c.json").write_text(json.dumps({**options, "checkpoint": "c/"}))
    done("fit", "m.onnx", "-q", "--config", "c.json")
    assert Trainer.load("c/last.onnxfit").settings["freeze_rows"] == {"fc1.weight": [0, 2]}


@pytest.mark.parametrize("text", ["fc1.weight", "fc1.weight=", "fc1.weight=1.5", "=1", "w=1,,2"])
def test_rows_that_are_no_numbers_are_refused(folder: Path, text: str) -> None:
    assert f"must be WEIGHT=ROW,ROW, such as emb.weight=0,1, got '{text}'" in refused(
        *FIT, "-o", "t.onnx", "--freeze-rows", text
    )


LORA = ("--lora", "rank=2,alpha=4,target=fc0*,dora=true", "--lora", "rank=1,target=fc1*,init=pissa")


def test_adapters_train_as_in_python(folder: Path) -> None:
    done(*ADAM, "-e", 2, *LORA[:2], "-o", "t.onnx", "--adapter-output", "peft/")
    trainer = Trainer(
        "m.onnx",
        loss="cross_entropy",
        optimizer=optimizers.Adam(0.01),
        adapters=LoRA(rank=2, alpha=4, target="fc0*", dora=True),
    )
    with np.load("d.npz") as file:
        trainer.fit(file["X"], file["y"], epochs=2, verbose=0)
    assert Path("t.onnx").read_bytes() == trainer.export(None).SerializeToString()
    (loaded,) = LoRA.load("peft")
    assert (loaded.rank, loaded.dora, loaded.target) == (2, True, ("fc0",))


def test_adapters_of_a_configuration_file(folder: Path) -> None:
    options = {"lora": [LORA[1], LORA[3]], "loss": "cross_entropy", "data": "d.npz"}
    Path("c.json").write_text(json.dumps({**options, "checkpoint": "c/"}))
    done("fit", "m.onnx", "-q", "--config", "c.json")
    assert Trainer.load("c/last.onnxfit").settings["adapters"] == [
        LoRA(rank=2, alpha=4, target="fc0*", dora=True),
        LoRA(rank=1, target="fc1*", init="pissa"),
    ]


def test_adapters_are_written_where_some_train(folder: Path) -> None:
    text = refused(*FIT, "--adapter-output", "peft/", code=2)
    assert "--adapter-output writes the adapters of --lora, but --lora is missing" in text


def test_its_files(folder: Path) -> None:
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
    assert sorted(p.name[:2] for p in Path("c").glob("*.ckpt")) == ["1-", "2-"]


def test_early_stopping_keeps_the_best_epoch(folder: Path) -> None:
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
    found = json.loads(done("evaluate", "t.onnx", "-d", "v.npz", "-l", "cross_entropy", "--json"))
    assert found["loss"] == pytest.approx(min(losses_seen), rel=1e-6)


def test_several_outputs(folder: Path) -> None:
    onnx.save(two_outputs(), "two.onnx")
    x = np.linspace(-1, 1, 20, dtype=np.float32)[:, None]
    np.savez("two.npz", x=x, a=2 * x, b=3 * x, sample_weight=np.ones(20, np.float32))
    text = "-l a=mse -l b=huber:delta=2 -m b=mae --lr 0.5 -e 30 -o t.onnx --json -q"
    report = json.loads(done("fit", "two.onnx", "-d", "two.npz", *text.split()))
    assert {"a_loss", "b_loss", "b_mae"} <= report["figures"].keys()
    weights = {
        t.name: onnx.numpy_helper.to_array(t).item() for t in onnx.load("t.onnx").graph.initializer
    }
    assert weights == pytest.approx({"u": 2, "v": 3, "t": 3}, abs=0.1)
    assert "arrays that the model does not use (b)" in refused(
        "fit", "two.onnx", "-d", "two.npz", "-l", "a=mse", "-o", "t.onnx"
    )


def test_something_must_be_left_of_it(folder: Path) -> None:
    assert "The trained model would not be saved" in refused(*FIT, code=2)


def test_text_is_a_line_for_each_figure(folder: Path) -> None:
    lines = done(*FIT, "-m", "accuracy", "-o", "t.onnx").splitlines()
    assert [line.split()[0] for line in lines] == [
        "epochs",
        "loss",
        "accuracy",
        "learning_rate",
    ]

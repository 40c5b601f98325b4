"""What a running TensorBoard serves of the callback's files, read through the interface its pages
use.
"""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxfit
from onnxfit.callbacks import Callback, TensorBoard
from onnxfit.callbacks.tensorboard import in_section

pytest.importorskip("tensorboard")

rng = np.random.default_rng(0)
X, Y = (
    rng.standard_normal((20, 3)).astype(np.float32),
    rng.standard_normal((20, 2)).astype(np.float32),
)
EPOCHS, STEPS = 3, 4  # 16 samples to train, by 4
MODEL = """<ir_version: 8, opset_import: ["": 17]> server (float[N, 3] x) => (float[N, 2] y)
{
  ["/fc1/MatMul"] "/fc1/product" = MatMul (x, "fc1.weight")
  ["/fc1/Add"] "/fc1/sum" = Add ("/fc1/product", "fc1.bias")
  ["/act/Relu"] "/act/out" = Relu ("/fc1/sum")
  ["/fc2/MatMul"] y = MatMul ("/act/out", "fc2.weight")
}
"""
WEIGHTS = {"fc1.weight": (3, 8), "fc1.bias": (8,), "fc2.weight": (8, 2)}


def model() -> onnx.ModelProto:
    found, draws = onnx.parser.parse_model(MODEL), np.random.default_rng(1)
    for name, shape in WEIGHTS.items():
        found.graph.initializer.append(
            onnx.numpy_helper.from_array(draws.standard_normal(shape).astype(np.float32), name)
        )
    return found


class Record(Callback):
    """What the batches and epochs of a run were, as the hooks tell."""

    def __init__(self):
        self.losses, self.weights = {}, []

    def on_train_batch_end(self, batch, logs):
        self.losses[self.trainer.global_step] = logs["batch_loss"]

    def on_epoch_end(self, epoch, logs):
        self.weights.append(self.trainer.get_weights())


class SaveThenFail(Callback):
    """Saves in the middle of an epoch, and falls some steps later."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, batch, logs):
        if self.trainer.global_step == STEPS + 2:
            self.trainer.save(self.path)
        if self.trainer.global_step == 2 * STEPS + 1:
            raise KeyboardInterrupt


def fit(trainer, *callbacks):
    settings = {"epochs": EPOCHS, "batch_size": 4, "validation_split": 0.2, "verbose": 0}
    return trainer.fit(X, Y, callbacks=list(callbacks), **settings)


def trainer():
    return onnxfit.Trainer(
        model(),
        loss="mse",
        optimizer=onnxfit.optimizers.Adam(0.01),
        metrics=["mean_absolute_error"],
    )


class Server:
    """The runs that were trained, and TensorBoard's answers about them."""

    def __init__(self, folder: Path, address: str):
        self.folder, self.address = folder, address

    def get(self, path: str, **query: str) -> bytes:
        url = f"{self.address}/data/{path}" + ("?" + urllib.parse.urlencode(query) if query else "")
        return self._open(url)

    def json(self, path: str, **query: str):
        return json.loads(self.get(path, **query))

    def post(self, path: str, **content):
        kind = {"Content-Type": "application/json"}  # else the body is taken for a form
        return json.loads(
            self._open(
                urllib.request.Request(
                    f"{self.address}/data/{path}", json.dumps(content).encode(), kind
                )
            )
        )

    def curve(self, run: str, tag: str) -> dict[int, float]:
        points = self.json("plugin/scalars/scalars", run=run, tag=tag)
        assert len({step for _, step, _ in points}) == len(points)
        return {step: value for _, step, value in points}

    @staticmethod
    def _open(request) -> bytes:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=10) as answer:
            return answer.read()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two runs: one from beginning to end, one that fell and was resumed; with what they were."""
    folder = tmp_path_factory.mktemp("runs")
    whole, record = trainer(), Record()
    settings = {"histogram_freq": 1, "update_freq": "batch"}
    # TensorBoard takes the columns of the page from one of the runs, so both name the same
    fit(
        whole,
        TensorBoard(
            folder / "whole", hparams={"width": 8, "note": "first", "fast": True}, **settings
        ),
        record,
    )
    checkpoint = tmp_path_factory.mktemp("checkpoint") / "middle.ckpt"
    resumed = [
        TensorBoard(
            folder / "resumed", hparams={"width": 9, "note": "second", "fast": False}, **settings
        )
        for _ in range(2)
    ]
    with pytest.raises(KeyboardInterrupt):
        fit(trainer(), resumed[0], SaveThenFail(checkpoint))
    fit(onnxfit.Trainer.load(checkpoint), resumed[1])
    return folder, whole, record


@pytest.fixture(scope="module")
def server(trained, tmp_path_factory):
    folder, _, _ = trained
    output = tmp_path_factory.mktemp("server") / "output.txt"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(folder),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    # every point, not a sample of them
    command += ["--load_fast", "false", "--samples_per_plugin", "scalars=10000,histograms=1000"]
    with (
        output.open("wb") as file,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file) as process,
    ):
        try:
            served = Server(folder, f"http://127.0.0.1:{port}")
            wait(served, process, output)
            yield served
        finally:
            process.kill()


def wait(served: Server, process: subprocess.Popen, output: Path) -> None:
    """Until all runs are read to their ends, which for each is its last event."""
    expected = {
        f"{name}{run}" for name in ("whole", "resumed") for run in ("", "/train", "/validation")
    }
    for _ in range(300):
        assert process.poll() is None, output.read_text()[-3000:]
        try:
            if set(served.json("runs")) == expected and ended(served) == 2:
                return
        except OSError:
            pass  # not listening yet
        time.sleep(0.1)
    raise AssertionError(f"TensorBoard did not read the runs: {output.read_text()[-3000:]}")


def ended(served: Server) -> int:
    try:
        groups = session_groups(served)
        last = [served.curve(f"{name}/train", "loss/batch_loss") for name in ("whole", "resumed")]
    except urllib.error.HTTPError as error:  # not read yet
        error.close()
        return 0
    complete = [
        group["sessions"][0].get("status") == "STATUS_SUCCESS"
        and len(group.get("metricValues", [])) == 4
        for group in groups
    ]
    return sum(complete) if all(EPOCHS * STEPS in curve for curve in last) else 0


def session_groups(served: Server) -> list:
    columns = [
        {"metric": {"group": group, "tag": in_section(name, f"epoch_{name}")}}
        for group in ("train", "validation")
        for name in ("loss", "mean_absolute_error")
    ]
    statuses = ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"]
    request = {"startIndex": 0, "sliceSize": 100, "allowedStatuses": statuses, "colParams": columns}
    return served.post("plugin/hparams/session_groups", experimentName="", **request).get(
        "sessionGroups", []
    )


# ---------------------------------------------------------------- curves


def test_the_tags_of_each_run(server):
    metrics = {"loss", "mean_absolute_error"}
    both = {in_section(metric, f"epoch_{metric}") for metric in metrics}
    train = both | {"loss/batch_loss", "metrics/batch_mean_absolute_error"}
    train |= {
        "optimizer/epoch_learning_rate",
        "speed/epoch_steps_per_second",
        "optimizer/batch_learning_rate",
    }
    expected = {
        "train": train,
        "validation": both
        | {in_section(metric, f"evaluation_{metric}_vs_iterations") for metric in metrics},
    }
    tags = {run: set(tags) for run, tags in server.json("plugin/scalars/tags").items() if tags}
    assert tags == {
        f"{name}/{run}": expected[run] for name in ("whole", "resumed") for run in expected
    }


def test_every_value_is_that_of_the_history_and_the_logs(server, trained):
    _, whole, record = trained
    history = whole.history.history
    for metric in ("loss", "mean_absolute_error"):
        for run, prefix in (("train", ""), ("validation", "val_")):
            expected = dict(enumerate(history[prefix + metric], 1))
            assert server.curve(
                f"whole/{run}", in_section(metric, f"epoch_{metric}")
            ) == pytest.approx(expected, rel=1e-6)
        evaluated = {
            (epoch + 1) * STEPS: value for epoch, value in enumerate(history[f"val_{metric}"])
        }
        assert server.curve(
            "whole/validation", in_section(metric, f"evaluation_{metric}_vs_iterations")
        ) == pytest.approx(evaluated, rel=1e-6)
    assert list(record.losses) == list(range(1, EPOCHS * STEPS + 1))
    assert server.curve("whole/train", "loss/batch_loss") == pytest.approx(record.losses, rel=1e-6)
    rate = pytest.approx(0.01)
    assert server.curve("whole/train", "optimizer/batch_learning_rate") == dict.fromkeys(
        range(1, EPOCHS * STEPS + 1), rate
    )
    assert server.curve("whole/train", "optimizer/epoch_learning_rate") == dict.fromkeys(
        range(1, EPOCHS + 1), rate
    )


def test_a_resumed_run_is_served_without_a_gap_or_a_double_point(server):
    served = 0
    for run in ("train", "validation"):
        for tag in server.json("plugin/scalars/tags")[f"whole/{run}"]:
            whole, resumed = server.curve(f"whole/{run}", tag), server.curve(f"resumed/{run}", tag)
            assert list(resumed) == list(whole)
            if tag != "speed/epoch_steps_per_second":
                assert resumed == pytest.approx(whole, rel=1e-6)
            served += len(resumed)
    assert served == 2 * EPOCHS * 4 + 2 * EPOCHS + 3 * EPOCHS * STEPS - 2 * EPOCHS
    for tag in server.json("plugin/histograms/tags")["whole/train"]:
        read = [
            server.json("plugin/histograms/histograms", run=f"{name}/train", tag=tag)
            for name in ("whole", "resumed")
        ]
        assert [point[1:] for point in read[0]] == [point[1:] for point in read[1]]


# ---------------------------------------------------------------- histograms


def test_histograms_count_every_weight_of_every_epoch(server, trained):
    _, whole, record = trained
    names = set(whole.get_weights())
    assert set(server.json("plugin/histograms/tags")["whole/train"]) == {
        f"weights/{name}" for name in names
    }
    for name in names:
        points = server.json(
            "plugin/histograms/histograms", run="whole/train", tag=f"weights/{name}"
        )
        assert [step for _, step, _ in points] == list(range(1, EPOCHS + 1))
        for weights, (_, _, buckets) in zip(record.weights, points):
            array = weights[name].astype(np.float64)
            assert sum(count for _, _, count in buckets) == pytest.approx(array.size)
            filled = [bucket for bucket in buckets if bucket[2]]
            assert filled[0][0] <= array.min() + 1e-6
            assert filled[-1][1] >= array.max() - 1e-6


# ---------------------------------------------------------------- graph


def test_the_graph_has_every_node_and_its_inputs(server, trained):
    from google.protobuf import text_format
    from tensorboard.compat.proto.graph_pb2 import GraphDef

    graph = text_format.Parse(
        server.get("plugin/graphs/graph", run="whole/train").decode(), GraphDef()
    )
    nodes = {node.name: (node.op, list(node.input)) for node in graph.node}
    assert nodes == {
        "x": ("Placeholder", []),
        "fc1/weight": ("Const", []),
        "fc1/bias": ("Const", []),
        "fc2/weight": ("Const", []),
        "fc1/MatMul": ("MatMul", ["x", "fc1/weight"]),
        "fc1/Add": ("Add", ["fc1/MatMul", "fc1/bias"]),
        "act/Relu": ("Relu", ["fc1/Add"]),
        "fc2/MatMul": ("MatMul", ["act/Relu", "fc2/weight"]),
        "y": ("Output", ["fc2/MatMul"]),
    }
    shapes = {
        node.name: [dim.size for dim in node.attr["_output_shapes"].list.shape[0].dim]
        for node in graph.node
    }
    assert (shapes["x"], shapes["fc1/weight"], shapes["act/Relu"]) == ([-1, 3], [3, 8], [-1, 8])
    _, whole, _ = trained
    operators = sorted(node.op_type for node in whole.model.graph.node)
    assert (
        sorted(op for op, _ in nodes.values() if op not in ("Placeholder", "Const", "Output"))
        == operators
    )


# ---------------------------------------------------------------- hyperparameters


def test_the_columns_of_the_hparams_page(server):
    experiment = server.post("plugin/hparams/experiment", experimentName="")
    kinds = {info["name"]: info["type"] for info in experiment["hparamInfos"]}
    number, text = "DATA_TYPE_FLOAT64", "DATA_TYPE_STRING"
    own = {"width": number, "note": text, "fast": "DATA_TYPE_BOOL"}
    assert (
        kinds
        == {
            "optimizer": text,
            "learning_rate": number,
            "loss_function": text,
            "batch_size": number,
        }
        | own
    )
    titles = {
        (info["name"]["group"], info["name"]["tag"]): info["displayName"]
        for info in experiment["metricInfos"]
    }
    assert list(titles.items()) == [
        (("validation", "loss/epoch_loss"), "val_loss"),
        (("validation", "metrics/epoch_mean_absolute_error"), "val_mean_absolute_error"),
        (("train", "loss/epoch_loss"), "loss"),
        (("train", "metrics/epoch_mean_absolute_error"), "mean_absolute_error"),
    ]


def test_the_rows_of_the_hparams_page(server, trained):
    rows = {group["sessions"][0]["name"]: group for group in session_groups(server)}
    assert set(rows) == {"whole", "resumed"}
    settings = {"optimizer": "Adam", "learning_rate": 0.01, "loss_function": "mse", "batch_size": 4}
    assert rows["whole"]["hparams"] == settings | {"width": 8, "note": "first", "fast": True}
    assert rows["resumed"]["hparams"] == settings | {"width": 9, "note": "second", "fast": False}
    history = trained[1].history.history
    for row in rows.values():
        final = {
            (value["name"]["group"], value["name"]["tag"]): value["value"]
            for value in row["metricValues"]
        }
        assert final == {
            (group, in_section(metric, f"epoch_{metric}")): pytest.approx(
                history[prefix + metric][-1], rel=1e-6
            )
            for group, prefix in (("train", ""), ("validation", "val_"))
            for metric in ("loss", "mean_absolute_error")
        }
        assert all(value["trainingStep"] == EPOCHS for value in row["metricValues"])

"""What the TensorBoard callback writes, read back from the event files record by record, and once
by TensorBoard itself.
"""

import itertools
import os
import signal
import struct
import subprocess
import sys
import textwrap
import types

import numpy as np
import onnx
import pytest

import onnxfit
from onnxfit.callbacks import Callback, LambdaCallback, TensorBoard
from onnxfit.callbacks.tensorboard import in_section
from onnxfit.errors import SettingError

pytest.importorskip("tensorboardX")

X, Y = np.ones((4, 1), np.float32), np.zeros((4, 1), np.float32)
LINE = (
    '<ir_version: 8, opset_import: ["": 17]> line (float[N, 1] x) => (float[N, 1] y) <float[1, 1] w'
    " = {1}> { y = MatMul(x, w) }"
)


def trainer(model=LINE, **settings):
    return onnxfit.Trainer(onnx.parser.parse_model(model), loss="mse", optimizer=0.1, **settings)


def fit(*callbacks, on=None, **settings):
    on = on or trainer()
    on.fit(X, Y, **{"batch_size": 2, "verbose": 0, "callbacks": list(callbacks)} | settings)
    return on


def events(folder):
    """Every event of a run, its checksums verified; fails on a record that is not whole."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            assert struct.unpack("<I", data[8:12])[0] == masked_crc32c(data[:8])
            assert struct.unpack("<I", data[12 + length : 16 + length])[0] == masked_crc32c(
                data[12 : 12 + length]
            )
            found.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return found


def scalars(folder):
    """tag -> {step: value}"""
    found = {}
    for event in events(folder):
        for value in event.summary.value:
            if value.HasField("simple_value"):
                assert event.step not in found.setdefault(value.tag, {})
                found[value.tag][event.step] = value.simple_value
    return found


def steps(folder):
    return {tag: list(values) for tag, values in scalars(folder).items()}


# ---------------------------------------------------------------- curves


def test_tags_and_steps(tmp_path):
    board = TensorBoard(tmp_path, update_freq="batch")
    on = fit(board, epochs=2, validation_data=(X, Y))
    train = {
        "loss/epoch_loss": [1, 2],
        "optimizer/epoch_learning_rate": [1, 2],
        "speed/epoch_steps_per_second": [1, 2],
    }
    batches = {"loss/batch_loss": [1, 2, 3, 4], "optimizer/batch_learning_rate": [1, 2, 3, 4]}
    assert steps(tmp_path / "train") == train | batches
    assert steps(tmp_path / "validation") == {
        "loss/epoch_loss": [1, 2],
        "loss/evaluation_loss_vs_iterations": [2, 4],
    }
    fit(board, on=on, initial_epoch=2, epochs=3, validation_data=(X, Y))
    assert steps(tmp_path / "train")["loss/batch_loss"] == [1, 2, 3, 4, 5, 6]
    assert steps(tmp_path / "train")["loss/epoch_loss"] == [1, 2, 3]
    assert steps(tmp_path / "validation")["loss/evaluation_loss_vs_iterations"] == [2, 4, 6]


def test_values_are_those_of_the_logs(tmp_path):
    losses = []
    record = LambdaCallback(
        on_train_batch_end=lambda batch, logs: losses.append(logs["batch_loss"])
    )
    on = fit(
        record,
        TensorBoard(tmp_path, update_freq="batch"),
        on=trainer(metrics=["mean_absolute_error"]),
        epochs=2,
        validation_data=(X, Y),
    )
    history = on.history.history
    train, validation = scalars(tmp_path / "train"), scalars(tmp_path / "validation")
    for metric in ("loss", "mean_absolute_error"):
        assert list(train[in_section(metric, f"epoch_{metric}")].values()) == pytest.approx(
            history[metric]
        )
        assert list(validation[in_section(metric, f"epoch_{metric}")].values()) == pytest.approx(
            history[f"val_{metric}"]
        )
        assert list(
            validation[in_section(metric, f"evaluation_{metric}_vs_iterations")].values()
        ) == pytest.approx(history[f"val_{metric}"])
    assert list(train["loss/batch_loss"].values()) == pytest.approx(losses)
    assert list(train["metrics/batch_mean_absolute_error"]) == [1, 2, 3, 4]
    assert train["speed/epoch_steps_per_second"][1] > 0


def test_what_an_epoch_does_not_have_is_not_written_and_what_is_logged_is(tmp_path):
    class Own(Callback):
        def on_epoch_end(self, epoch, logs):
            self.trainer.log("own", epoch * 2.0)

    fit(Own(), TensorBoard(tmp_path), epochs=4, validation_data=(X, Y), validation_freq=2)
    assert scalars(tmp_path / "train")["metrics/epoch_own"] == {1: 0, 2: 2, 3: 4, 4: 6}
    assert steps(tmp_path / "validation") == {
        "loss/epoch_loss": [2, 4],
        "loss/evaluation_loss_vs_iterations": [4, 8],
    }


def test_a_run_folder_may_be_below_more_folders_than_python_recurses_into(tmp_path):
    folder = tmp_path.joinpath(*["d"] * 1200)
    fit(TensorBoard(folder))
    events = [*folder.glob("events*"), *folder.glob("train/events*")]
    assert len(events) == 2
    # pytest could not remove the folders
    for path in events:
        path.unlink()
    (tmp_path / "kept").touch()
    os.removedirs(folder / "train")
    assert not (tmp_path / "d").exists()


def test_a_run_folder_is_made_at_its_first_write(tmp_path):
    fit(TensorBoard(tmp_path / "new" / "logs"))
    assert (tmp_path / "new" / "logs" / "train").is_dir()
    assert not (tmp_path / "new" / "logs" / "validation").exists()


@pytest.mark.parametrize(
    ("freq", "expected"),
    [("epoch", None), ("batch", [1, 2, 3, 4]), (1, [1, 2, 3, 4]), (2, [2, 4]), (3, [3])],
)
def test_update_freq(tmp_path, freq, expected):
    fit(TensorBoard(tmp_path, update_freq=freq), epochs=2)
    assert steps(tmp_path / "train").get("loss/batch_loss") == expected


def test_steps_per_second_leave_validation_out(tmp_path, monkeypatch):
    # a second passes between two looks at the clock: epoch begins, test begins, test ends, epoch
    # ends
    ticks = itertools.count()
    clock = types.SimpleNamespace(perf_counter=lambda: float(next(ticks)), time=lambda: 0.0)
    monkeypatch.setattr("onnxfit.callbacks.tensorboard.time", clock)
    fit(TensorBoard(tmp_path), validation_data=(X, Y), batch_size=1)
    assert scalars(tmp_path / "train")["speed/epoch_steps_per_second"] == {1: 4 / 2}


def test_steps_per_second_are_those_of_each_epoch(tmp_path, monkeypatch):
    """The clock stands still but for 2 s before each step, and 5 s before each batch of a test."""
    now = [0.0]
    clock = types.SimpleNamespace(perf_counter=lambda: now[0], time=lambda: 0.0)
    monkeypatch.setattr("onnxfit.callbacks.tensorboard.time", clock)

    def passes(seconds):
        return lambda batch, logs: now.__setitem__(0, now[0] + seconds)

    tick = LambdaCallback(on_train_batch_begin=passes(2), on_test_batch_begin=passes(5))
    board = TensorBoard(tmp_path)
    # every second epoch has no validation whose seconds could be left out
    fit(
        board, tick, epochs=3, batch_size=1, validation_data=(X, Y), validation_freq=2,
        on=trainer(accumulate=2),
    )  # fmt: skip
    # four batches of 2 s, two updates
    assert scalars(tmp_path / "train")["speed/epoch_steps_per_second"] == {
        1: 0.25,
        2: 0.25,
        3: 0.25,
    }


def test_with_accumulated_gradients_a_step_is_written_once(tmp_path):
    fit(
        TensorBoard(tmp_path, update_freq="batch"), on=trainer(accumulate=2), batch_size=1, epochs=2
    )
    assert steps(tmp_path / "train")["loss/batch_loss"] == [1, 2, 3, 4]


def test_the_rate_of_a_batch_is_the_one_it_was_trained_with(tmp_path):
    rates = {1: 0.1, 2: 0.05, 3: 0.025, 4: 0.0125}
    model = onnx.parser.parse_model(LINE)
    on = onnxfit.Trainer(
        model, loss="mse", optimizer=onnxfit.optimizers.SGD(lambda step: 0.1 / 2**step)
    )
    fit(TensorBoard(tmp_path, update_freq="batch"), on=on, epochs=2)
    assert scalars(tmp_path / "train")["optimizer/batch_learning_rate"] == pytest.approx(rates)


def test_settings_out_of_range_are_refused():
    with pytest.raises(SettingError, match="histogram_freq >= 0, got -1"):
        TensorBoard(histogram_freq=-1)
    for freq in (0, -1, "steps", 0.5):
        with pytest.raises(SettingError, match="TensorBoard needs update_freq to be"):
            TensorBoard(update_freq=freq)


# ---------------------------------------------------------------- histograms, hyperparameters, the
# caller's own


class Spoil(Callback):
    """Answers for the trainer with weights that no histogram can show whole."""

    def on_train_begin(self, logs):
        weights = {
            "empty": np.zeros((0, 3), np.float32),
            "odd": np.array([np.nan, np.inf, 1, 2], np.float16),
            "nan": np.full(3, np.nan),
        }
        get_weights = self.trainer.get_weights
        self.trainer.get_weights = lambda copy=True: {**get_weights(), **weights}


def histograms(folder):
    return {
        (v.tag, e.step): v.histo
        for e in events(folder)
        for v in e.summary.value
        if v.HasField("histo")
    }


def test_histograms_of_every_weight_in_the_train_run(tmp_path):
    on = fit(TensorBoard(tmp_path, histogram_freq=1), epochs=2, validation_data=(X, Y))
    found = histograms(tmp_path / "train")
    assert set(found) == {("weights/w", 1), ("weights/w", 2)}
    assert found["weights/w", 2].num == 1
    assert found["weights/w", 2].sum == pytest.approx(on.get_weights()["w"].item())
    assert histograms(tmp_path / "validation") == {}


def test_histograms_leave_out_what_is_empty_or_not_finite(tmp_path):
    fit(Spoil(), TensorBoard(tmp_path, histogram_freq=2), epochs=4)
    found = histograms(tmp_path / "train")
    assert set(found) == {
        ("weights/w", 2),
        ("weights/w", 4),
        ("weights/odd", 2),
        ("weights/odd", 4),
    }
    assert (found["weights/odd", 2].num, found["weights/odd", 2].sum) == (2, 3)


def plugin_data(folder):
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

    values = [value for event in events(folder) for value in event.summary.value]
    return {
        value.tag: HParamsPluginData.FromString(value.metadata.plugin_data.content)
        for value in values
    }


def test_hparams_list_the_settings_and_point_to_the_metrics(tmp_path):
    fit(
        TensorBoard(tmp_path, hparams={"depth": 3, "name": "small", "fast": True}),
        epochs=2,
        validation_data=(X, Y),
    )
    data = plugin_data(tmp_path)
    hparams = data["_hparams_/session_start_info"].session_start_info.hparams
    assert {name: getattr(value, value.WhichOneof("kind")) for name, value in hparams.items()} == {
        "optimizer": "SGD",
        "learning_rate": pytest.approx(0.1),
        "loss_function": hparams["loss_function"].string_value,
        "batch_size": 2,
        "depth": 3,
        "name": "small",
        "fast": True,
    }
    assert hparams["loss_function"].string_value in ("mse", "MeanSquaredError")
    named = [
        (info.display_name, info.name.group, info.name.tag)
        for info in data["_hparams_/experiment"].experiment.metric_infos
    ]
    assert named == [
        ("val_loss", "validation", "loss/epoch_loss"),
        ("loss", "train", "loss/epoch_loss"),
    ]
    assert all(tag in scalars(tmp_path / group) for _, group, tag in named)
    assert data["_hparams_/session_end_info"].session_end_info.status == 1  # success


def test_hparams_of_a_run_that_failed(tmp_path):
    def fail(epoch, logs):
        if epoch == 1:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        fit(LambdaCallback(on_epoch_end=fail), TensorBoard(tmp_path), epochs=3)
    # failure
    assert plugin_data(tmp_path)["_hparams_/session_end_info"].session_end_info.status == 2
    assert steps(tmp_path / "train")["loss/epoch_loss"] == [1]


def test_the_writer_is_handed_out(tmp_path):
    board = TensorBoard(tmp_path)

    def write(epoch, logs):
        writer = board.writer("train")
        writer.add_image("image", np.zeros((3, 4, 4), np.uint8), epoch)
        writer.add_text("text", "hello", epoch)
        writer.add_pr_curve("curve", np.array([0, 1]), np.array([0.1, 0.9]), epoch)
        board.writer("mine").add_scalar("mine", 1.0, epoch)

    fit(LambdaCallback(on_epoch_end=write), board)
    tags = {value.tag for event in events(tmp_path / "train") for value in event.summary.value}
    assert {"image", "text/text_summary", "curve"} <= tags
    assert scalars(tmp_path / "mine") == {"mine": {0: 1.0}}


# ---------------------------------------------------------------- graph

DEEP = """<ir_version: 8, opset_import: ["": 17, "own": 1]>
deep (float[N, 2] "x:0", bool flag) => (float[N, 2] y, int64[N, 1] where)
<float[2, 2] "/a/w" = {1, 0, 0, 1}, float16[1] half = {0}>
{
  ["/a/MatMul"] h = MatMul ("x:0", "/a/w")
  one = Constant <value = int64[1] {1}> ()
  "/a/top", where = TopK <axis = 1> (h, one)
  twice = own.Double (h)
  [choose] y = If (flag) <
    then_branch = t () => (float[N, 2] a) { a = Relu (twice) },
    else_branch = e () => (float[N, 2] b) { b = Neg (h) }
  >
}
<domain: "own", opset_import: ["": 17]> Double (a) => (b) { [add] b = Add (a, a) }
"""


def drawn(model):
    from onnxfit.callbacks.tensorboard.graph import graph_def

    return {node.name: node for node in graph_def(onnx.parser.parse_model(model)).node}


def test_the_graph_has_every_node_with_all_its_inputs_and_outputs():
    nodes = drawn(DEEP)
    ops = {name: node.op for name, node in nodes.items()}
    assert ops["x_0"] == ops["flag"] == "Placeholder"
    assert ops["a/w"] == ops["half"] == "Const"
    assert ops["y"] == ops["where"] == "Output"
    assert sorted(op for op in ops.values() if op not in ("Placeholder", "Const", "Output")) == [
        "Add", "If", "MatMul", "Neg", "Relu", "TopK",
    ]  # fmt: skip
    # a Constant
    (one,) = (
        node for node in nodes.values() if node.op == "Const" and b"one" in node.attr["outputs"].s
    )
    assert one.attr["value"].s == b"int64[1] [1]"
    assert list(nodes["a/MatMul"].input) == ["x_0", "a/w"]
    (topk,) = (node for node in nodes.values() if node.op == "TopK")
    assert topk.name == "a/TopK"
    assert topk.attr["outputs"].s == b"/a/top, where"
    assert list(nodes["where"].input) == ["a/TopK:1"]
    assert list(nodes["y"].input) == ["choose"]
    relu, neg = (next(node for node in nodes.values() if node.op == op) for op in ("Relu", "Neg"))
    assert relu.name.startswith("choose/then_branch/")
    assert list(nodes["choose"].input) == ["flag", relu.name, neg.name]
    for node in nodes.values():
        assert all(source.split(":")[0] in nodes for source in node.input)


def test_the_graph_s_element_types_and_shapes():
    nodes = drawn(DEEP)
    assert nodes["x_0"].attr["dtype"].type == 1  # float
    assert nodes["flag"].attr["dtype"].type == 10  # bool
    assert nodes["half"].attr["dtype"].type == 19  # half
    assert list(nodes["a/TopK"].attr["output_types"].list.type) == [1, 9]  # float, int64
    assert [
        [d.size for d in shape.dim] for shape in nodes["a/TopK"].attr["_output_shapes"].list.shape
    ] == [[-1, 1], [-1, 1]]
    assert [d.size for d in nodes["a/w"].attr["_output_shapes"].list.shape[0].dim] == [2, 2]


def flat(*modules):
    """A chain without scopes in its names: per module a MatMul with its weight and a Relu."""
    lines, here = [], "x"
    for i, module in enumerate(modules):
        lines += [
            f'["node_linear_{i}"] h{i} = MatMul ({here}, "{module}.weight")',
            f'["node_relu_{i}"] r{i} = Relu (h{i})',
        ]
        here = f"r{i}"
    declared = ", ".join(f'float[1, 1] "{module}.weight" = {{1}}' for module in modules)
    body = " ".join(lines)
    return (
        f'<ir_version: 8, opset_import: ["": 17]> m (float[N, 1] x) => (float[N, 1] {here})'
        f" <{declared}> {{ {body} }}"
    )


def inputs_of(model):
    return {
        name: list(node.input)
        for name, node in drawn(model).items()
        if node.op not in ("Const", "Placeholder", "Output")
    }


def test_scopes_from_the_names_of_weights_with_what_stands_between_in_the_scope_they_share():
    assert inputs_of(
        flat("layer1.0.fc1", "layer1.0.fc2", "layer2.0.fc1", "layer2.0.fc2", "head")
    ) == {
        "layer1/0/linear_0": ["x", "layer1/0/fc1.weight"],
        "layer1/0/relu_0": ["layer1/0/linear_0"],
        "layer1/0/linear_1": ["layer1/0/relu_0", "layer1/0/fc2.weight"],
        "relu_1": ["layer1/0/linear_1"],
        "layer2/0/linear_2": ["relu_1", "layer2/0/fc1.weight"],
        "layer2/0/relu_2": ["layer2/0/linear_2"],
        "layer2/0/linear_3": ["layer2/0/relu_2", "layer2/0/fc2.weight"],
        "relu_3": ["layer2/0/linear_3"],
        "linear_4": ["relu_3", "head.weight"],
        "relu_4": ["linear_4"],
    }
    assert drawn(flat("head"))["linear_0"].attr["name"].s == b"node_linear_0"


def test_a_scope_around_everything_and_one_of_a_single_operator_are_left_out():
    names = set(inputs_of(flat("model.a.fc1", "model.a.fc2", "model.b.fc")))
    assert names == {"a/linear_0", "a/relu_0", "a/linear_1", "relu_1", "linear_2", "relu_2"}


def test_scopes_that_torch_noted_come_before_the_names_of_weights():
    from onnxfit.callbacks.tensorboard.graph import graph_def

    model = onnx.parser.parse_model(flat("p1", "p2", "p3"))
    for node, module in zip(model.graph.node, ["up", "up", "down.0", "down.0", "down.1", "down.1"]):
        scopes = ["", *([module.split(".")[0]] if "." in module else []), module, "call"]
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=str(scopes))
    nodes = [node.name for node in graph_def(model).node if node.op in ("MatMul", "Relu")]
    assert nodes == [
        "up/linear_0",
        "up/relu_0",
        "down/0/linear_1",
        "down/0/relu_1",
        "down/1/linear_2",
        "down/1/relu_2",
    ]


def test_weights_are_drawn_beside_the_nodes_whose_names_have_scopes():
    model = """<ir_version: 8, opset_import: ["": 17]> m (float[N, 1] x) => (float[N, 1] y)
    <float[1, 1] "layer1.0.conv1.weight" = {1}, float[1, 1] "onnx::MatMul_7" = {1}, float[1, 1] shared = {1}> {
        ["/layer1/layer1.0/conv1/MatMul"] a = MatMul (x, "layer1.0.conv1.weight")
        ["/layer1/layer1.0/Add"] b = Add (a, shared)
        ["/head/MatMul"] c = MatMul (b, "onnx::MatMul_7")
        ["/head/Add"] y = Add (c, shared)
    }"""
    assert inputs_of(model) == {
        "layer1/layer1.0/conv1/MatMul": ["x", "layer1/layer1.0/conv1/weight"],
        "layer1/layer1.0/Add": ["layer1/layer1.0/conv1/MatMul", "shared"],
        "head/MatMul": ["layer1/layer1.0/Add", "head/onnx__MatMul_7"],
        "head/Add": ["head/MatMul", "shared"],
    }


def test_a_cast_to_the_same_type_is_not_drawn():
    nodes = drawn("""<ir_version: 8, opset_import: ["": 17]> keras (float[N, 4] x) => (float[N, 4] y)
        <float[4, 4] w, float[4] b> {
        c = Cast<to = 1>(x) d = Cast<to = 1>(c) h = MatMul(d, w) e = Cast<to = 1>(h)
        k = Add(e, b) half = Cast<to = 10>(k) float = Cast<to = 1>(half) y = Cast<to = 1>(float) }""")
    assert [name for name, node in nodes.items() if node.op == "Cast"] == ["Cast", "Cast_1"]
    assert list(nodes["MatMul"].input) == ["x", "w"]
    assert list(nodes["Add"].input) == ["MatMul", "b"]
    assert list(nodes["Cast"].input) == ["Add"]
    assert list(nodes["y"].input) == ["Cast_1"]


@pytest.mark.parametrize(
    ("figure", "section"),
    [
        ("loss", "loss"),
        ("head_loss", "loss"),
        ("batch_loss", "loss"),
        ("accuracy", "metrics"),
        ("learning_rate", "optimizer"),
        ("lr", "optimizer"),
    ],
)
def test_losses_come_first(figure, section):
    assert in_section(figure, "tag") == f"{section}/tag"
    sections = ["loss", "metrics", "optimizer", "speed", "weights"]
    assert sections == sorted(sections)


def test_the_graph_is_in_the_train_run_once(tmp_path):
    from tensorboardX.proto.graph_pb2 import GraphDef

    board = TensorBoard(tmp_path)
    on = fit(board)
    fit(board, on=on)
    (graph,) = [
        GraphDef.FromString(event.graph_def)
        for event in events(tmp_path / "train")
        if event.graph_def
    ]
    assert {node.op for node in graph.node} == {"Placeholder", "Const", "MatMul", "Output"}
    fit(TensorBoard(tmp_path / "without", write_graph=False))
    assert not any(event.graph_def for event in events(tmp_path / "without" / "train"))


# ---------------------------------------------------------------- files


def test_after_every_epoch_all_of_it_is_in_the_files_even_when_killed(tmp_path):
    program = f"""
    import os, signal, sys
    sys.path.insert(0, {os.path.dirname(os.path.dirname(onnxfit.__file__))!r})
    import numpy as np, onnx.parser, onnxfit
    from onnxfit.callbacks import LambdaCallback, TensorBoard
    X, Y = np.ones((4, 1), np.float32), np.zeros((4, 1), np.float32)
    trainer = onnxfit.Trainer(onnx.parser.parse_model({LINE!r}), loss="mse", optimizer=0.1)
    kill = LambdaCallback(on_epoch_begin=lambda epoch, logs: os.kill(os.getpid(), signal.SIGKILL) if epoch == 2 else None)
    board = TensorBoard({str(tmp_path)!r}, update_freq="batch", histogram_freq=1)
    trainer.fit(X, Y, epochs=9, batch_size=2, verbose=0, validation_data=(X, Y), callbacks=[board, kill])
    """
    killed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert steps(tmp_path / "train")["loss/epoch_loss"] == [1, 2]
    assert steps(tmp_path / "train")["loss/batch_loss"] == [1, 2, 3, 4]
    assert steps(tmp_path / "validation")["loss/epoch_loss"] == [1, 2]
    assert ("weights/w", 1) in histograms(tmp_path / "train")


def test_event_files_are_cut_back_to_the_checkpoint_from_which_training_resumes(tmp_path):
    class Killed(BaseException):
        pass

    def kill(epoch, logs):
        if epoch == 2:
            raise Killed

    def save(epoch, logs):
        if epoch == 1:
            on.save(tmp_path / "c")

    board = TensorBoard(tmp_path / "logs", update_freq="batch")
    on = trainer()
    late = LambdaCallback(on_epoch_end=kill)
    late.phase = "logger"
    with pytest.raises(Killed):
        fit(LambdaCallback(on_epoch_begin=save), board, late, on=on, epochs=4)
    assert steps(tmp_path / "logs" / "train")["loss/batch_loss"] == [1, 2, 3, 4, 5, 6]
    resumed = TensorBoard(tmp_path / "logs", update_freq="batch")
    loaded = onnxfit.Trainer.load(tmp_path / "c")
    assert loaded.global_step == 2
    killed = {path.name for path in (tmp_path / "logs" / "train").iterdir()}
    # of a run that another file was begun for, after the checkpoint
    late_file = next(iter(killed)).rpartition(".")[0] + ".00000000"
    (tmp_path / "logs" / "train" / late_file).write_bytes(b"begun after the checkpoint")
    fit(resumed, on=loaded, epochs=4)
    written = scalars(tmp_path / "logs" / "train")  # which fails if a step is there twice
    assert list(written["loss/batch_loss"]) == list(range(1, 9))
    assert list(written["loss/epoch_loss"]) == [1, 2, 3, 4]
    assert not (tmp_path / "logs" / "train" / late_file).exists()


def test_two_trainers_on_one_folder_in_one_second_lose_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "onnxfit.callbacks.tensorboard.writer.time.time_ns", lambda: 1_700_000_000 * 10**9
    )
    boards = [TensorBoard(tmp_path, write_graph=False) for _ in range(2)]
    inner = trainer()
    fit(
        LambdaCallback(
            on_epoch_end=lambda epoch, logs: fit(
                boards[1], on=inner, initial_epoch=epoch + 10, epochs=epoch + 11
            )
        ),
        boards[0],
        epochs=3,
    )
    assert sorted(steps(tmp_path / "train")["loss/epoch_loss"]) == [1, 2, 3, 11, 12, 13]
    # one file of the outer fit, one of each inner
    assert len(list((tmp_path / "train").iterdir())) == 4


def test_a_fit_does_not_import_torch(tmp_path):
    """Not even where tensorboardX finds it; the user can import it afterwards."""
    (tmp_path / "torch.py").touch()
    code = """
    import sys
    import numpy as np
    import onnxfit
    from tests.models import linear

    board = onnxfit.callbacks.TensorBoard(sys.argv[1], histogram_freq=1)
    x = np.ones((4, 1), np.float32)
    onnxfit.Trainer(linear(), loss="mse").fit(x, x, verbose=0, callbacks=board)
    print("torch" in sys.modules)
    import torch
    print(torch.__file__)
    """
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "logs")],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["False", str(tmp_path / "torch.py")], done.stderr
    assert events(tmp_path / "logs" / "train")


@pytest.mark.torch
def test_the_writer_takes_tensors_of_torch(tmp_path):
    torch = pytest.importorskip("torch")
    writer = TensorBoard(tmp_path).writer("train")
    writer.add_scalar("number", torch.tensor(2.5), 1)
    writer.add_histogram("numbers", torch.arange(9.0), 1)
    writer.add_images("images", [torch.zeros(3, 2, 2), torch.ones(3, 2, 2)], 1, dataformats="CHW")
    writer.close()
    tags = [value.tag for event in events(tmp_path / "train") for value in event.summary.value]
    assert tags == ["number", "numbers", "images"]


def test_tensorboard_itself_reads_it(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    fit(
        TensorBoard(tmp_path, update_freq="batch", histogram_freq=1),
        epochs=2,
        validation_data=(X, Y),
    )
    run = accumulator.EventAccumulator(str(tmp_path / "train"))
    run.Reload()
    tags = run.Tags()
    assert set(tags["scalars"]) == {
        "loss/epoch_loss",
        "optimizer/epoch_learning_rate",
        "speed/epoch_steps_per_second",
        "loss/batch_loss",
        "optimizer/batch_learning_rate",
    }
    assert tags["histograms"] == ["weights/w"]
    assert tags["graph"]
    assert [event.step for event in run.Scalars("loss/batch_loss")] == [1, 2, 3, 4]

"""Files from strangers: damaged and hostile models and checkpoints are refused with a reason, and
none of them runs code.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import json
import os
import pickle
import random
import socket
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx
import onnx.helper as oh
import onnx.parser
import onnx_ir as ir
import pytest
from onnx.numpy_helper import from_array

import onnxfit
from onnxfit import Trainer
from onnxfit.errors import CheckpointError, ModelError, OnnxfitError, SettingError
from onnxfit.graph.model import infer_shapes
from scripts import soak
from scripts.fuzz.attempt import Attempt, Stage
from scripts.fuzz.batch import random_batch
from scripts.fuzz.case import Case
from scripts.fuzz.kinds import KINDS
from scripts.fuzz.model_mutations import deep
from scripts.fuzz.models import MODELS, model_bytes, trees
from scripts.fuzz.originals import originals as undamaged_files
from scripts.fuzz.sandbox import Escape, sandbox
from tests.models import linear, mlp

SOURCES = sorted(Path(onnxfit.__file__).parent.rglob("*.py"))
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(12, 4)).astype(np.float32), np.arange(12) % 3


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return undamaged_files(tmp_path_factory.mktemp("seeds"))


def model(text: str, opset: int = 17) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}, "local": 1]> g {text}'
    )


class TestSeeds:
    @pytest.mark.parametrize("seed", MODELS)
    def test_what_is_mutated_trains_and_both_backends_agree(self, seed: str) -> None:
        losses = []
        for backend in ("full", "forward_backward"):
            trainer = Trainer(
                model_bytes(seed),
                loss=MODELS[seed][1],
                optimizer=0.01,
                backend=backend,
                threads=1,
            )
            losses.append(
                [
                    trainer.train_on_batch(*random_batch(trainer, random.Random(0)))["loss"]
                    for _ in range(2)
                ]
            )
        np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)

    @pytest.mark.filterwarnings("ignore")  # a hostile file is allowed to warn
    @pytest.mark.parametrize("kind", KINDS)
    def test_damaged_files_work_or_are_refused(
        self, originals: dict[str, bytes], tmp_path: Path, kind: str
    ) -> None:
        """A few cases of `scripts/fuzz`, in this process: none that crashes onnxruntime is among
        them.
        """
        for number in range(25):
            Case(number, originals, kind).run(tmp_path, lambda stage: None)

    def test_a_case_is_made_of_its_number(self, originals: dict[str, bytes]) -> None:
        for kind in KINDS:
            one, again, *others = (Case(n, originals, kind).data for n in (3, 3, 4, 5, 6))
            assert one == again
            assert {one} != {*others}


class TestTheSandbox:
    """The fuzzer sees what it is there to see."""

    def run(self, tmp_path: Path, act: Callable[[], object]) -> None:
        class Acting(Attempt):
            own = ("mine/*",)
            decoys: ClassVar[dict[str, bytes]] = {"mine/decoy": b""}

            def make(self, rng: random.Random, originals: Mapping[str, bytes]) -> None:
                self.files = {"mine/file": b""}

            def run(self, rng: random.Random, stage: Stage) -> str:
                with contextlib.suppress(OSError):  # as a careless library might
                    act()
                return ""

        attempt = Acting(random.Random(0), {})
        with sandbox(tmp_path, attempt):
            attempt.run(random.Random(0), lambda stage: None)

    def test_the_files_that_a_user_named_may_change(self, tmp_path: Path) -> None:
        def act() -> None:
            Path("mine/file").write_bytes(b"new")
            Path("mine/more").mkdir()
            assert Path("precious.txt").read_bytes() == b"precious"

        self.run(tmp_path, act)

    def test_a_module_may_be_imported_late(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package = tmp_path / "imported"
        package.mkdir()
        (package / "a_late_module.py").write_text("")
        monkeypatch.syspath_prepend(str(package))
        monkeypatch.setattr(sys, "dont_write_bytecode", False)
        self.run(tmp_path, lambda: importlib.import_module("a_late_module"))
        assert not sys.dont_write_bytecode
        del sys.modules["a_late_module"]

    @pytest.mark.parametrize(
        "act",
        [
            lambda: Path("precious.txt").unlink(),
            lambda: Path("new.txt").write_bytes(b""),
            lambda: Path("mine/decoy").write_bytes(b"new"),
            lambda: Path("linked/precious.txt").write_bytes(b""),
            lambda: Path("../outside/other/precious.csv").unlink(),
            lambda: Path("/tmp/onnxfit-fuzz.txt").write_bytes(b""),
            lambda: Path("mine/file").rename("../outside/file"),
            lambda: os.truncate("../outside/precious.txt", 0),
            lambda: subprocess.run(["true"]),
            lambda: pickle.loads(pickle.dumps(Bomb(Path("mine/folder")))),
            lambda: socket.create_connection(("127.0.0.1", 9)),
        ],
    )
    def test_nothing_else_may(self, tmp_path: Path, act: Callable[[], object]) -> None:
        with pytest.raises(Escape):
            self.run(tmp_path, act)
        assert (tmp_path / "outside" / "precious.txt").read_bytes() == b"precious"
        assert not Path("/tmp/onnxfit-fuzz.txt").exists()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("name", "count"), {"fits": 3, "refits": 2, "shapes": 3, "prefetch": 2, "threads": 1}.items()
)
def test_the_soak_in_short(
    name: str, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that a long run does; what a few fits weigh says nothing about leaks, but files and
    threads do.
    """
    found = soak.SOAKS[name](count, tmp_path)
    assert not [line for line in found if "memory" not in line]


class TestModels:
    """One of each kind that the fuzzer found, small enough to read."""

    def broken(self, change) -> bytes:
        proto = mlp()
        change(proto)
        return proto.SerializeToString()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda m: setattr(m.graph.initializer[0], "raw_data", b"\0" * 8), r"'fc0.weight' of FLOAT\[4, 8\] needs 128 bytes, got 8"),
            (lambda m: m.graph.initializer[0].dims.__setitem__(0, 1 << 40), r"needs \d+ bytes, got 128"),
            (lambda m: m.graph.initializer[0].dims.__setitem__(0, -4), r"must not be negative"),
            (lambda m: setattr(m.graph.initializer[0], "data_type", 99), r"element type 99, which ONNX does not define"),
            (lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 99), r"'x' with element type 99"),
            (lambda m: setattr(m.graph.input[0].type.tensor_type.shape.dim[0], "dim_value", 1 << 62), r"more than any memory can hold"),
            (lambda m: m.graph.initializer[0].segment.SetInParent(), r"in segments"),
            (lambda m: m.graph.initializer[0].float_data.append(1), r"its elements twice, in float_data and in raw_data"),
            (lambda m: m.graph.node[1].input.__setitem__(0, "y"), r"not a valid ONNX model"),
            (lambda m: m.graph.node[1].input.__setitem__(0, "nobody"), r"not a valid ONNX model"),
            (lambda m: setattr(m.opset_import[0], "version", 99), r"not a valid ONNX model|reads opsets up to"),
        ],
        ids=["data", "huge", "negative", "type", "input type", "room", "segment", "twice", "cycle", "nobody", "opset"],
    )  # fmt: skip
    def test_what_contradicts_itself_is_named(self, change, message: str) -> None:
        with pytest.raises(ModelError, match=message):
            Trainer(self.broken(change), loss="mse")

    @pytest.mark.parametrize("name", [b"fc0.weight", b"Gemm", b"h0"])
    def test_a_name_that_is_no_text(self, name: bytes) -> None:
        data = mlp().SerializeToString().replace(name, b"\xff" + name[1:])
        with pytest.raises(ModelError, match=r"is not valid UTF-8"):
            Trainer(data, loss="mse")

    @pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
    def test_sequences_without_steps(self, kind: str) -> None:
        gates = {"GRU": 3, "LSTM": 4, "RNN": 1}[kind]
        proto = onnx.parser.parse_model(
            f"""<ir_version: 8, opset_import: ["": 17]>
            g (float[N, T, 2] x) => (float[N, 1] y) <int64[1] zero = {{0}}>
            {{ t = Transpose<perm = [1, 0, 2]>(x) h, last = {kind}<hidden_size = 1>(t, w, r) y = Squeeze(last, zero) }}"""
        )
        weights = {"w": (1, gates, 2), "r": (1, gates, 1)}
        for name, shape in weights.items():
            proto.graph.initializer.append(
                onnx.numpy_helper.from_array(np.ones(shape, np.float32), name)
            )
        with pytest.raises(ModelError, match="of length 0"):
            Trainer(proto, loss="mse").train_on_batch(
                np.zeros((3, 0, 2), np.float32), np.zeros((3, 1), np.float32)
            )

    def test_a_node_that_has_the_name_of_the_loss(self) -> None:
        with pytest.raises(ModelError, match="tensors or nodes called train/loss"):
            Trainer(
                self.broken(lambda m: setattr(m.graph.node[0], "name", "train/loss")), loss="mse"
            )

    def test_functions_that_call_themselves_beside_classical_operators(self) -> None:
        proto = onnx.parser.parse_model(
            """<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 3, "own": 1]>
            g (float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {1, 1}> { s = ai.onnx.ml.Scaler<offset = [0.0], scale = [1.0]>(x) t = own.round(s) y = MatMul(t, w) }
            <opset_import: ["": 17, "own": 1], domain: "own"> round (a) => (b) { b = own.round(a) }"""
        )
        proto.ir_version = 7  # before functions came, so that ONNX's checker does not look at them
        with pytest.raises(ModelError, match=r"in a cycle: own::round -> own::round"):
            Trainer(proto, loss="mse")

    def test_a_negative_size_is_an_open_one(self) -> None:
        proto = linear(2)
        proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
        trainer = Trainer(proto, loss="mse")
        trainer.fit(X[:, :2], X[:, :1], epochs=1, batch_size=5, verbose=0)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("y = Loop (n, c, h) <body = b (int64 i) => (float[N, 1] k) { k = Identity(h) }>", r"body 'b' of Loop .* has 1 inputs and 1 outputs\. Expected 3 inputs and 2"),
            ("y = If (c) <then_branch = t () => (float[N, 1] a, float[N, 1] b) { a = Tanh(h)  b = Neg(h) }, else_branch = e () => (float[N, 1] d) { d = Neg(h) }>", r"body 't' of If .* 2 outputs"),
            ("y = Scan<num_scan_inputs = 7, body = s (float[1] r) => (float[1] q) { q = Neg(r) }>(h)", r"must be from 1 to 1, its number of inputs, got 7"),
            ('last, y = Scan<num_scan_inputs = 1, body = s (float[N,1] o, float[1] r) => (float[N,1] m, float[1] q) { m = Add(o, r) q = Neg(r) }>(h, "")', "lacks an input"),
            ("y = Scan<num_scan_inputs = 1, scan_input_axes = [7], body = s (float[1] r) => (float[1] q) { q = Neg(r) }>(h)", r"axis"),
            ("y = Scan<num_scan_inputs = 1, scan_input_axes = [0, 0], body = s (float[1] r) => (float[1] q) { q = Neg(r) }>(h)", r"2 scan_input_axes, expected 1"),
        ],
    )  # fmt: skip
    def test_bodies_that_do_not_fit_their_node(self, text: str, message: str) -> None:
        hostile = model(
            "(float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {1, 1}, int64 n = {2}, bool c"
            f" = {{1}}> {{ h = MatMul(x, w) {text} }}"
        )
        with pytest.raises(ModelError, match=message):
            Trainer(hostile, loss="mse")

    def test_functions_that_call_themselves(self) -> None:
        hostile = onnx.parser.parse_model(
            """<ir_version: 8, opset_import: ["": 17, "local": 1]>
            g (float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {1, 1}> { h = MatMul(x, w)  y = local.f(h) }
            <domain: "local", opset_import: ["": 17, "local": 1]> f (a) => (b) { b = local.f(a) }"""
        )
        with pytest.raises(ModelError, match=r"in a cycle: local::f -> local::f"):
            Trainer(hostile, loss="mse")

    def test_a_chain_of_doublings_is_looked_at_once(self) -> None:
        proto = mlp((2, 3))
        proto.graph.node[-1].output[0] = "d0"
        for i in range(28):  # 3 * 2^28 columns: more would not fit into 32 bits
            proto.graph.node.append(
                oh.make_node("Concat", [f"d{i}"] * 2, ["y" if i == 27 else f"d{i + 1}"], axis=1)
            )
        proto.graph.output[0].type.tensor_type.shape.dim[1].Clear()
        Trainer(proto, loss="mse", metrics=["auc"])

    def test_a_tree_without_leaves(self) -> None:
        proto = trees()
        tree = next(n for n in proto.graph.node if n.op_type == "TreeEnsembleRegressor")
        tree.attribute.remove(next(a for a in tree.attribute if a.name == "target_weights"))
        with pytest.raises(ModelError, match=r"has no target_weights"):
            Trainer(proto, loss="mse")

    def test_sizes_beyond_all_numbers(self) -> None:
        """As four gates of a hidden size of -2^63 make them."""
        work = ir.from_proto(mlp())
        value = work.graph.node(0).outputs[0]
        value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([-(2**65)])
        with pytest.raises(
            ModelError, match=r"sizes that ONNX cannot represent: .*-36893488147419103232"
        ):
            infer_shapes(work)

    def test_an_axis_beyond_all_tensors(self) -> None:
        far = model(
            "(float[N, 2] x) => (float[N, 2] y) <float[2] s = {1, 1}> { y = LayerNormalization<axis"
            " = 9223372036854775807>(x, s) }"
        )
        with pytest.raises(
            ModelError, match="has axis 9223372036854775807, but tensors have fewer"
        ):
            Trainer(far, loss="mse")

    def test_a_kernel_with_too_few_parameters(self) -> None:
        machine = oh.make_node(
            "SVMRegressor",
            ["x"],
            ["y"],
            domain="ai.onnx.ml",
            kernel_params=[1.0, 0.0],
            coefficients=[1.0],
            rho=[0.0],
        )
        graph = oh.make_graph(
            [machine],
            "g",
            [oh.make_tensor_value_info("x", 1, ["N", 2])],
            [oh.make_tensor_value_info("y", 1, ["N", 1])],
        )
        opsets = [oh.make_opsetid("", 17), oh.make_opsetid("ai.onnx.ml", 3)]
        with pytest.raises(ModelError, match="2 kernel_params, expected 3"):
            Trainer(oh.make_model(graph, opset_imports=opsets, ir_version=8), loss="mse")

    def test_bodies_deeper_than_protobuf_goes(self) -> None:
        with pytest.raises(ModelError, match=r"is not an ONNX model"):
            Trainer(deep(mlp(), random.Random(0)), loss="mse")

    @pytest.mark.parametrize("location", ["../secret.bin", "/etc/hostname", "..\\secret.bin"])
    def test_data_outside_the_models_folder_is_not_read(
        self, tmp_path: Path, location: str
    ) -> None:
        (tmp_path / "secret.bin").write_bytes(b"\0" * 4096)
        folder = tmp_path / "model"
        folder.mkdir()
        proto = mlp()
        tensor = proto.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=location)
        (folder / "model.onnx").write_bytes(proto.SerializeToString())
        with pytest.raises(ModelError):
            Trainer(folder / "model.onnx", loss="mse")
        with pytest.raises(ModelError, match=r"stores weights in other files"):
            Trainer(proto, loss="mse")

    def test_a_link_out_of_the_models_folder_is_not_read(self, tmp_path: Path) -> None:
        (tmp_path / "secret.bin").write_bytes(b"\0" * 128)
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "w.bin").symlink_to(tmp_path / "secret.bin")
        proto = mlp()
        tensor = proto.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="w.bin")
        (folder / "model.onnx").write_bytes(proto.SerializeToString())
        with pytest.raises(ModelError):
            Trainer(folder / "model.onnx", loss="mse")

    def test_custom_operators_are_not_fetched(self, tmp_path: Path) -> None:
        """Nothing in a file names a library: an operator of an unknown domain, with one in its
        metadata, is an error, not an import.
        """
        proto = model(
            "(float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {1, 1}> { h = local.Evil(x)  y ="
            " MatMul(h, w) }"
        )
        oh.set_model_props(proto, {"custom_ops_library": str(tmp_path / "evil.so")})
        with pytest.raises(OnnxfitError):
            Trainer(proto, loss="mse").train_on_batch(X[:, :2], X[:, :1])


def rewritten(data: bytes, change=lambda entries: None, packing: int = zipfile.ZIP_STORED) -> bytes:
    """A checkpoint with other entries."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    change(entries)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", packing) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return packed.getvalue()


def with_setting(**settings: object):
    def change(entries: dict[str, bytes]) -> None:
        info = json.loads(entries["onnxfit.json"])
        info["settings"].update(settings)
        entries["onnxfit.json"] = json.dumps(info).encode()

    return change


class Bomb:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class TestCheckpoints:
    def load(self, tmp_path: Path, data: bytes) -> Trainer:
        (tmp_path / "c").write_bytes(data)
        return Trainer.load(tmp_path / "c")

    def test_a_pickle_in_the_archive_is_not_loaded(
        self, originals: dict[str, bytes], tmp_path: Path
    ) -> None:
        bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
        more = rewritten(
            originals["adam"],
            lambda entries: entries.update({"data.pkl": bomb, "archive/data.pkl": bomb}),
        )
        self.load(tmp_path, more)
        for name in ("state.safetensors", "onnxfit.json", "model.onnx"):
            with pytest.raises(OnnxfitError):
                self.load(
                    tmp_path,
                    rewritten(
                        originals["adam"], lambda entries, name=name: entries.update({name: bomb})
                    ),
                )
        assert not (tmp_path / "exploded").exists()
        pickle.loads(bomb)
        assert (tmp_path / "exploded").exists()  # the bomb was a bomb

    def test_paths_in_the_archive_lead_nowhere(
        self, originals: dict[str, bytes], tmp_path: Path
    ) -> None:
        inside = tmp_path / "inside"
        inside.mkdir()
        self.load(
            inside,
            rewritten(
                originals["adam"],
                lambda entries: entries.update({"../escaped": b"x", "/tmp/escaped": b"x"}),
            ),
        )
        assert sorted(p.name for p in tmp_path.rglob("*")) == ["c", "inside"]
        assert not Path("/tmp/escaped").exists()

    @pytest.mark.parametrize("packing", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    def test_compressed_entries_are_refused(
        self, originals: dict[str, bytes], tmp_path: Path, packing: int
    ) -> None:
        """So that a small file cannot unpack to a large one."""
        bomb = rewritten(
            originals["adam"],
            lambda entries: entries.update({"state.safetensors": bytes(50_000_000)}),
            packing,
        )
        assert len(bomb) < 1_000_000
        with pytest.raises(CheckpointError, match=r"compressed"):
            self.load(tmp_path, bomb)

    @pytest.mark.parametrize(
        "name", ["os.system", "Popen", "get_optimizer", "Trainer", "onnxfit.optimizers.Adam", "np"]
    )
    def test_only_classes_of_the_registries_are_made(
        self, originals: dict[str, bytes], tmp_path: Path, name: str
    ) -> None:
        hostile = with_setting(optimizer={"onnxfit:class": {"name": name, "settings": {}}})
        with pytest.raises(CheckpointError, match=r"does not know"):
            self.load(tmp_path, rewritten(originals["adam"], hostile))

    @pytest.mark.parametrize("kind", ["Quantization", "Distillation", "path"])
    def test_a_file_to_read_is_not_named(
        self, originals: dict[str, bytes], tmp_path: Path, kind: str
    ) -> None:
        onnx.save(mlp(), tmp_path / "secret.onnx")
        secret = str(tmp_path / "secret.onnx")
        name = {"Quantization": "float_model", "Distillation": "teacher"}.get(kind)
        value: str | dict[str, object] = secret
        if name is not None:
            value = {"onnxfit:class": {"name": kind, "settings": {name: secret}}}
        setting = "quantization" if kind == "Quantization" else "teacher"
        hostile = with_setting(**{setting: value})
        with pytest.raises(CheckpointError, match=r"name a file to read"):
            self.load(tmp_path, rewritten(originals["adam"], hostile))

    @pytest.mark.parametrize(
        "settings",
        [{"threads": 1 << 24}, {"threads": "2"}, {"seed": None}, {"accumulate": 0}, {"weights": "no"}, {"unheard_of": 1}, {"clip_norm": "x"},
         {"adapters": 3}, {"adapters": {"rank": 2}}, {"adapters": [{"onnxfit:class": {"name": "LoRA", "settings": {"rank": -1}}}]},
         {"adapters": {"onnxfit:class": {"name": "LoRA", "settings": {"matrices": {"w": [1, 2]}}}}}],
        ids=str,
    )  # fmt: skip
    def test_settings_that_no_trainer_takes(
        self, originals: dict[str, bytes], tmp_path: Path, settings: dict[str, object]
    ) -> None:
        with pytest.raises(OnnxfitError):
            self.load(tmp_path, rewritten(originals["adam"], with_setting(**settings)))

    @pytest.mark.parametrize("value", [float("nan"), -1, 1 << 63, "1", None, [1]], ids=str)
    def test_counters_that_count_nothing(
        self, originals: dict[str, bytes], tmp_path: Path, value: object
    ) -> None:
        def change(entries: dict[str, bytes]) -> None:
            info = json.loads(entries["onnxfit.json"])
            info["counters"]["global_step"] = value
            entries["onnxfit.json"] = json.dumps(info).encode()

        with pytest.raises((SettingError, CheckpointError)):
            self.load(tmp_path, rewritten(originals["adam"], change))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_nothing_here_unpickles_or_evaluates(path: Path) -> None:
    """No pickle, marshal, eval or yaml.load; arrays are read with allow_pickle=False, which is
    numpy's default.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {
        a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names
    }
    imported |= {
        (n.module or "").split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)
    }
    assert not imported & {
        "pickle",
        "cPickle",
        "cloudpickle",
        "dill",
        "marshal",
        "shelve",
        "joblib",
    }
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    assert not {n.func.id for n in calls if isinstance(n.func, ast.Name)} & {
        "eval",
        "exec",
        "__import__",
    }
    attributes = [n.func for n in calls if isinstance(n.func, ast.Attribute)]
    of_yaml = {f.attr for f in attributes if isinstance(f.value, ast.Name) and f.value.id == "yaml"}
    assert of_yaml <= {"parse", "safe_load", "safe_dump"}  # parse makes no objects
    if path.parent.name != "kernels":  # whose library lies beside it
        assert "register_custom_ops_library" not in {f.attr for f in attributes}
    for call in calls:
        assert not [
            k
            for k in call.keywords
            if k.arg == "allow_pickle"
            and not (isinstance(k.value, ast.Constant) and k.value.value is False)
        ]


def test_a_tensor_of_nothing_has_sizes_too() -> None:
    proto = model(
        "(float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {1, 1}> { y = MatMul(x, w) }"
    )
    proto.graph.initializer.append(from_array(np.zeros(0, np.float32), "nothing"))
    proto.graph.initializer[-1].dims[:] = [0, 1 << 62]
    with pytest.raises(ModelError, match=r"more than any memory can hold"):
        Trainer(proto, loss="mse")

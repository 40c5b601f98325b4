"""Files for onnxruntime: adapters that are set for single runs of one model, and files refused."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxfit import CheckpointError, LoRA, SettingError, Trainer
from onnxfit.optimizers import SGD, Adam
from onnxfit.runtime.version import onnxruntime_version
from onnxfit.trainable.adapters import onnx_adapter
from onnxfit.trainable.adapters.onnx_adapter import read_onnx_adapter, write_onnx_adapter
from tests import models
from tests.load.test_caches import GROUPS, SIZE, Decoder, counting
from tests.trainable.adapters.files import KINDS, file_of, initializers, packed_file, rows_of, run
from tests.trainable.adapters.test_adapted import X, fitted, mlp_trainer, trainer_of

HAS_ADAPTERS = hasattr(onnxruntime, "LoraAdapter")  # onnxruntime 1.20 and later
needs_adapters = pytest.mark.skipif(not HAS_ADAPTERS, reason="onnxruntime before 1.20")
PACKED = "packed"
ALL_KINDS = pytest.mark.parametrize("kind", [*KINDS, PACKED])
Arrays = dict[str, np.ndarray[Any, Any]]


def kind_of(kind: str) -> tuple[onnx.ModelProto, np.ndarray]:
    if kind == PACKED:
        return packed_file(), np.random.default_rng(8).normal(size=(12, 32)).astype(np.float32)
    return file_of(kind), rows_of(kind)


def trained_on(kind: str, **settings: Any) -> Trainer:
    file, x = kind_of(kind)
    target = None if kind == PACKED else "*"
    epochs = settings.pop("epochs", 3)
    return fitted(trainer_of(file, LoRA(**{"rank": 2, "target": target} | settings)), x, epochs)


class Served:
    """A file in one session of bare onnxruntime, with or without an adapter."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(), providers=["CPUExecutionProvider"]
        )

    def __call__(self, feeds: Any, adapter: Path | None = None) -> np.ndarray:
        feeds = feeds if isinstance(feeds, dict) else {"x": feeds}
        if adapter is None:
            return self.session.run(None, feeds)[0]
        if not HAS_ADAPTERS:  # the same matrices, as arrays
            return self.session.run(None, feeds | tensors_of(adapter))[0]
        loaded, options = onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
        loaded.Load(str(adapter))
        options.add_active_adapter(loaded)
        return self.session.run(None, feeds, options)[0]


def tensors_of(path: Path) -> Arrays:
    return dict(onnx_adapter._read_parameters(path.read_bytes()))


# ---------------------------------------------------------------------- served files


def test_every_onnxruntime_from_1_20_on_applies_the_files_itself() -> None:
    """The tests below then load them with onnxruntime.LoraAdapter, and none is skipped."""
    assert (onnxruntime_version() >= (1, 20)) == HAS_ADAPTERS


@ALL_KINDS
def test_an_adapter_makes_of_the_base_what_was_trained(kind: str, tmp_path: Path) -> None:
    """Two trainings with different ranks, scales and lengths, in turn in one session."""
    file, x = kind_of(kind)
    first = trained_on(kind)
    second = trained_on(kind, rank=1, alpha=5, scaling="alpha/sqrt(r)", dropout=0.2, epochs=6)
    served = Served(first.export(adapters="inputs"))
    base = run(file)(x)
    assert np.array_equal(served(x), base)
    paths = [
        one.export_adapter(tmp_path / f"{i}.onnx_adapter") for i, one in enumerate((first, second))
    ]
    results = []
    for trainer, path in zip((first, second, first), (*paths, paths[0])):
        merged = run(trainer.export())(x)
        results.append(served(x, path))
        np.testing.assert_allclose(results[-1], merged, atol=2e-6 * np.abs(merged).max())
    assert np.array_equal(results[0], results[2])
    assert np.abs(results[0] - results[1]).max() > 0.05
    assert np.abs(results[0] - base).max() > 0.05
    assert np.array_equal(served(x), base)


@pytest.mark.parametrize("packed", [False, True], ids=["float", "4 bits"])
def test_a_file_with_caches_is_served(packed: bool, tmp_path: Path) -> None:
    file = Decoder(packed).model
    trainer = Trainer(
        file, adapters=LoRA(rank=2, target="*"), loss="causal_lm", optimizer=Adam(0.01), threads=1
    )
    feeds, _ = counting()
    trainer.fit(feeds, feeds["input_ids"], epochs=2, batch_size=4, verbose=0)
    served = Served(trainer.export(tmp_path / "served.onnx", adapters="inputs"))
    assert not any("lora" in value.name for value in served.session.get_inputs())
    caches = {v.name: v for v in file.graph.input if v.name.startswith("past")}
    feeds |= {name: np.zeros((8, GROUPS, 0, SIZE), np.float32) for name in caches}
    base = Served(file)(feeds)
    assert np.array_equal(served(feeds), base)
    adapted = served(feeds, trainer.export_adapter(tmp_path / "a.onnx_adapter"))
    merged = Served(trainer.export())(feeds)
    np.testing.assert_allclose(adapted, merged, atol=2e-6 * np.abs(merged).max())
    assert np.abs(adapted - base).max() > 0.05


def test_the_served_file_has_the_weights_of_the_base(tmp_path: Path) -> None:
    trainer = trained_on("gemm")
    path = tmp_path / "served.onnx"
    written = trainer.export(path, adapters="inputs")
    assert onnx.load(path) == written
    onnx.checker.check_model(written, full_check=True)
    tensors = initializers(written)
    base = initializers(file_of("gemm"))
    assert {name: tensors[name] for name in base} == base
    added = [t for t in written.graph.initializer if t.name not in base]
    assert not any(onnx.numpy_helper.to_array(tensor).any() for tensor in added)
    names = {value.name for value in written.graph.input}
    assert names == {"x", *(tensor.name for tensor in added)} == {"x", *trainer.get_weights()}


def test_weights_that_train_besides_are_in_the_served_file(tmp_path: Path) -> None:
    trainer = mlp_trainer(weights="fc2.*", optimizer=SGD(0.5, ema_momentum=0.9))
    trainer.fit(X, np.arange(len(X)) % 3, epochs=3, verbose=0)
    with pytest.warns(
        UserWarning, match=r"a\.onnx_adapter' does not contain fc2\.weight, fc2\.bias"
    ):
        path = trainer.export_adapter(tmp_path / "a.onnx_adapter")
    served = trainer.export(adapters="inputs")
    np.testing.assert_allclose(Served(served)(X, path), run(trainer.export())(X), atol=2e-6)
    averaged = trainer.export(adapters="inputs", averaged=True)
    tensors = initializers(trainer.export(averaged=True))
    assert initializers(averaged)["fc2.weight"] == tensors["fc2.weight"]
    assert initializers(served)["fc2.weight"] != tensors["fc2.weight"]


def test_a_trainer_without_adapters_makes_no_inputs_of_them(tmp_path: Path) -> None:
    plain = Trainer(models.mlp())
    with pytest.raises(
        SettingError, match="needs a trainer with adapters, but this trainer has none"
    ):
        plain.export(tmp_path / "a.onnx", adapters="inputs")
    with pytest.raises(SettingError, match="'merged', 'requantized' or 'inputs', got 'nodes'"):
        plain.export(tmp_path / "a.onnx", adapters="nodes")
    with pytest.raises(SettingError, match="export_adapter needs a trainer with adapters"):
        plain.export_adapter(tmp_path / "a.onnx_adapter")
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------- files of adapters


@ALL_KINDS
def test_training_goes_on_from_a_file(kind: str, tmp_path: Path) -> None:
    file, x = kind_of(kind)
    trainer = trained_on(kind, dropout=0.1, alpha=3)
    path = trainer.export_adapter(tmp_path / "a.onnx_adapter")
    (loaded,) = LoRA.load(path)
    assert (loaded.rank, loaded.scale, loaded.dropout) == (2, 1.0, 0.0)
    again = trainer_of(file, loaded)
    expected = trainer.predict(x)
    np.testing.assert_allclose(again.predict(x), expected, atol=2e-6 * np.abs(expected).max())
    fitted(again, x)
    assert np.abs(again.predict(x) - expected).max() > 1e-3
    once_more = again.export_adapter(tmp_path / "b.onnx_adapter")
    assert np.array_equal(trainer_of(file, LoRA.load(once_more)).predict(x), again.predict(x))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_onnxruntime_reads_the_tensors_that_were_written(tmp_path: Path, dtype: type) -> None:
    rng = np.random.default_rng(0)
    shapes = {"w.lora_A": (3, 2), "w.lora_B": (2, 5), "é.lora_A": (2, 3, 1, 1), "o.lora_A": (1, 1)}
    tensors = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    tensors["o.lora_A"] = tensors["w.lora_A"][:, ::2]  # not contiguous
    path = write_onnx_adapter(tmp_path / "new" / "a.onnx_adapter", tensors)
    again = tensors_of(path)
    assert again.keys() == tensors.keys()
    assert all(np.array_equal(again[name], array) for name, array in tensors.items())
    assert {array.dtype for array in again.values()} == {np.dtype(dtype)}
    if HAS_ADAPTERS:
        # older versions of onnxruntime free the parameters with the adapter
        adapter = onnxruntime.AdapterFormat.read_adapter(str(path))
        read = adapter.get_parameters()
        assert read.keys() == tensors.keys()
        assert all(np.array_equal(read[name].numpy(), array) for name, array in tensors.items())


@needs_adapters
def test_a_file_of_onnxruntime_is_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((4, 2), (2, 8)))
    form = onnxruntime.AdapterFormat()
    form.set_adapter_version(3)
    form.set_model_version(4)
    values = {"fc0.weight.lora_A": a, "fc0.weight.lora_B": b}
    form.set_parameters(
        {name: onnxruntime.OrtValue.ortvalue_from_numpy(v) for name, v in values.items()}
    )
    form.export_adapter(str(tmp_path / "a.onnx_adapter"))
    file = models.mlp((4, 8, 3))
    trainer = Trainer(file, adapters=LoRA.load(tmp_path / "a.onnx_adapter"))
    assert all(np.array_equal(trainer.get_weights()[name], v) for name, v in values.items())


def test_several_ranks_come_back(tmp_path: Path) -> None:
    loras = [LoRA(rank=3, target="fc0*"), LoRA(rank=2, target=["fc1*", "fc2*"])]
    trainer = fitted(trainer_of(models.mlp((4, 8, 8, 3)), loras), X)
    loaded = LoRA.load(trainer.export_adapter(tmp_path / "a.onnx_adapter"))
    assert {one.target: one.rank for one in loaded} == {
        ("fc0.weight",): 3,
        ("fc1.weight", "fc2.weight"): 2,
    }


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    trainer = fitted(trainer_of(models.mlp((4, 8, 8, 3))), X)
    path = trainer.export_adapter(tmp_path / "a.onnx_adapter")
    with pytest.raises(SettingError, match="'fc0' has matrices of"):
        Trainer(models.mlp((4, 9, 8, 3)), adapters=LoRA.load(path))


# ---------------------------------------------------------------------- files of strangers


@pytest.fixture
def good(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    shapes = {"w.lora_A": (3, 2), "w.lora_B": (2, 5), "v.lora_A": (3, 1), "v.lora_B": (1, 5)}
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return write_onnx_adapter(tmp_path / "a.onnx_adapter", tensors)


def test_damaged_bytes_are_refused_or_harmless(good: Path, tmp_path: Path) -> None:
    """Random bytes, numbers at the ends of their range, and cuts at every place."""
    data = good.read_bytes()
    rng = np.random.default_rng(0)
    damaged = [data[:length] for length in range(0, len(data), 7)]
    for _ in range(300):
        changed = bytearray(data)
        for place in rng.integers(0, len(data) // 4, rng.integers(1, 4)) * 4:
            number = rng.choice([0, 1, -1, 2**31 - 1, -(2**31), rng.integers(-99, 99)])
            changed[place : place + 4] = struct.pack("<i", number)
        damaged.append(bytes(changed))
    messages = []
    path = tmp_path / "b.onnx_adapter"
    for changed in damaged:
        path.write_bytes(changed)
        try:
            read = read_onnx_adapter(path)
        except CheckpointError as error:
            messages.append(str(error))
        else:
            assert sum(one.a.nbytes + one.b.nbytes for one in read.values()) < len(changed)
    assert len(damaged) / 2 < len(messages) < len(damaged)
    assert max(map(len, messages)) < 600


def written(tensors: dict[str, tuple[int, ...]], path: Path) -> None:
    arrays = {name: np.zeros(shape, np.float32) for name, shape in tensors.items()}
    write_onnx_adapter(path, arrays)


REFUSED: dict[str, tuple[dict[str, tuple[int, ...]], str]] = {
    "empty": ({}, "contains no tensors"),
    "other name": ({"w": (2, 2)}, "'w', which is not a matrix of an adapter"),
    "one matrix": ({"w.lora_A": (4, 2)}, "matrices for 'w' that do not fit"),
    "two ranks": ({"w.lora_A": (4, 2), "w.lora_B": (3, 4)}, "'B': \\(4, 3\\)"),
    "no rank": ({"w.lora_A": (4, 0), "w.lora_B": (0, 4)}, "do not fit each other"),
    "vector": ({"w.lora_A": (4,), "w.lora_B": (4,)}, "do not fit each other"),
    "scalar": ({"w.lora_A": (), "w.lora_B": ()}, "do not fit each other"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tensors_that_are_no_adapter_are_refused(case: str, tmp_path: Path) -> None:
    tensors, message = REFUSED[case]
    path = tmp_path / "a.onnx_adapter"
    written(tensors, path)
    with pytest.raises(CheckpointError, match=message):
        LoRA.load(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"TORT", b"ONNX", "are b'ONNX', expected b'TORT'"),
        (b"v.lora_A", b"w.lora_A", "two tensors called 'w.lora_A'"),
        (b"v.lora_A", b"\xff.lora_A", "codec can't decode"),
        (
            struct.pack("<qq", 3, 2),
            struct.pack("<qq", -3, -2),
            r"do not fit float32 of shape \[-3, -2\]",
        ),
        (struct.pack("<qq", 3, 2), struct.pack("<qq", 2**62, 2), "24 bytes, which do not fit"),
    ],
)
def test_a_changed_file_is_refused(good: Path, old: bytes, new: bytes, message: str) -> None:
    data = good.read_bytes()
    assert data.count(old) == 1
    good.write_bytes(data.replace(old, new))
    with pytest.raises(CheckpointError, match=message):
        LoRA.load(good)


def test_few_bytes_cannot_claim_much_memory(good: Path) -> None:
    """Half a million entries, each of which is the same tensor under the same place."""
    data = bytearray(good.read_bytes())
    root = int.from_bytes(data[:4], "little")
    table = onnx_adapter.Table(data, root)
    start = table.Vector(table.Offset(10))
    count = 500_000
    parameter = start + int.from_bytes(data[start : start + 4], "little")
    vector = len(data)
    data += struct.pack("<I", count)
    for i in range(count):
        data += struct.pack("<I", (parameter - (vector + 4 + 4 * i)) % 2**32)
    field = root + table.Offset(10)
    data[field : field + 4] = struct.pack("<I", vector - field)
    good.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged"):
        LoRA.load(good)


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        LoRA.load(tmp_path / "a.onnx_adapter")
    (tmp_path / "b.onnx_adapter").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        LoRA.load(tmp_path / "b.onnx_adapter")
    with pytest.raises(CheckpointError, match="cannot be written: it is a folder"):
        mlp_trainer().export_adapter(tmp_path / "b.onnx_adapter")


def test_a_failed_export_leaves_the_old_file(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = good.read_bytes()
    monkeypatch.setattr(onnx_adapter, "MAX_BYTES", 100)
    with pytest.raises(
        CheckpointError, match=r"0\.0 GiB, but a \.onnx_adapter file must be smaller"
    ):
        mlp_trainer().export_adapter(good)
    assert good.read_bytes() == before
    assert [path.name for path in good.parent.iterdir()] == [good.name]


def test_pissa_is_served_beside_the_weights_of_the_file(tmp_path: Path) -> None:
    """As matrices of twice the rank, like those in a folder for PEFT."""
    file, x = file_of("matmul"), rows_of("matmul")
    trainer = fitted(trainer_of(file, LoRA(rank=2, target="*", init="pissa")), x)
    path = trainer.export_adapter(tmp_path / "a.onnx_adapter")
    loaded = LoRA.load(path)
    assert [one.rank for one in loaded] == [4]
    expected = trainer.predict(x)
    np.testing.assert_allclose(Trainer(file, adapters=loaded).predict(x), expected, atol=1e-5)
    assert np.array_equal(run(trainer.export(adapters="inputs"))(x), run(file)(x))


def test_magnitudes_are_not_served(tmp_path: Path) -> None:
    trainer = trainer_of(file_of("matmul"), LoRA(rank=2, target="*", dora=True))
    with pytest.raises(
        SettingError, match="of w have dora=True, but a file with adapters as inputs"
    ):
        trainer.export(adapters="inputs")
    with pytest.raises(SettingError, match="of w have dora=True"):
        trainer.export_adapter(tmp_path / "a.onnx_adapter")

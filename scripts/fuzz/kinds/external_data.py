"""Models with their tensors in another file, of which the model says something hostile."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import ClassVar

import onnx

from onnxfit import Trainer
from scripts.fuzz.attempt import Attempt, Stage
from scripts.fuzz.batch import train_one_batch
from scripts.fuzz.byte_mutations import INTEGERS, mutated_bytes
from scripts.fuzz.sandbox import FIFO, PATHS, Escape
from tests.models import mlp

SECRET = b"secret!!"  # in files outside of the model's folder
LOCATIONS = (*PATHS, "weights.bin", "link.bin", "loop.bin", "pipe.bin", "model.onnx", "../other/weights.bin", "../linked/other/weights.bin")  # fmt: skip
NO_NUMBERS = ("", "abc", "1e3", " 8", "0x10", "٣", "1_0", "-0", "+8", "8.0", "nan", "9" * 400)


class ExternalData(Attempt):
    share: ClassVar[int] = 6

    def make(self, rng: random.Random, originals: Mapping[str, bytes]) -> None:
        model, data = _with_external_data(mlp())
        for _ in range(rng.choice((1, 1, 2))):
            _damage(rng.choice(model.graph.initializer), len(data), rng)
        if rng.random() < 0.3:
            data = rng.choice((b"", data[:50], mutated_bytes(data, rng)))
        self.original = "mlp"
        self.main = "model/model.onnx"
        self.files = {self.main: model.SerializeToString(), "model/weights.bin": data}
        self.links = {
            "model/link.bin": "../../outside/other/weights.bin",
            "model/loop.bin": "loop.bin",
            "model/pipe.bin": FIFO,
        }
        if rng.random() < 0.1:  # the file itself leads elsewhere
            del self.files["model/weights.bin"]
            self.links["model/weights.bin"] = rng.choice(
                ("../../outside/other/weights.bin", "../other/weights.bin", FIFO, "/dev/zero")
            )

    def run(self, rng: random.Random, stage: Stage) -> str:
        stage("make")
        trainer = Trainer(self.main, loss="mse", threads=1)
        if any(SECRET in weight.tobytes() for weight in trainer.get_weights().values()):
            raise Escape("a file outside of the model's folder was read")
        return train_one_batch(trainer, rng, stage)


def _with_external_data(model: onnx.ModelProto) -> tuple[onnx.ModelProto, bytes]:
    """Return the model without the bytes of its tensors, and these bytes."""
    data = b""
    for tensor in model.graph.initializer:
        raw = tensor.raw_data or onnx.numpy_helper.to_array(tensor).tobytes()
        for field in ("raw_data", "float_data", "int64_data"):
            tensor.ClearField(field)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        entries = {"location": "weights.bin", "offset": len(data), "length": len(raw)}
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=str(value))
        data += raw
    return model, data


def _damage(tensor: onnx.TensorProto, size: int, rng: random.Random) -> None:
    """Change what a tensor says of its data, in place."""
    entries = {entry.key: entry for entry in tensor.external_data}
    sizes = [str(n) for n in (*INTEGERS, size, size - 1, size + 1)]
    kind = rng.randrange(8)
    if kind <= 2 and "location" in entries:
        entries["location"].value = rng.choice(LOCATIONS)
    elif kind <= 4:
        key = rng.choice(("offset", "length"))
        if key in entries:
            entries[key].value = rng.choice((*sizes, *sizes, *NO_NUMBERS))
    elif kind == 5 and len(tensor.external_data):
        del tensor.external_data[rng.randrange(len(tensor.external_data))]
    elif kind == 6:
        key = rng.choice(("location", "offset", "length", "checksum", "basepath", "", "x"))
        tensor.external_data.add(key=key, value=rng.choice((*LOCATIONS, *sizes)))
    else:
        tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(INTEGERS)

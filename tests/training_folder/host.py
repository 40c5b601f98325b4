"""A host of a training folder: onnxruntime, NumPy, safetensors and the folder, without onnxfit."""

import json
from pathlib import Path

import numpy as np
import onnxruntime
from safetensors.numpy import load_file, save_file


class Host:
    """Trains, evaluates and predicts as the manifest of a folder says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = json.loads((folder / "manifest.json").read_text())
        self.graphs = self.manifest["graphs"]
        self.state = load_file(folder / "state.safetensors")
        self.sessions = {name: self._session(graph["file"]) for name, graph in self.graphs.items()}
        entries = [entry for entry in self.manifest["state"] if entry["kind"] == "counter"]
        self.counters = {entry["name"].rpartition("/")[2]: entry["name"] for entry in entries}

    def _session(self, file: str) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        return onnxruntime.InferenceSession(self.folder / file, options)

    def run(self, name: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs of a graph; `arrays` are inputs, labels under the names of their outputs."""
        rate, step = self.counters["learning_rate"], self.counters["global_step"]
        numbers = {"learning_rate": self.state[rate], "step": self.state[step]}
        numbers["seed"] = self.manifest["random"]["seed"]
        feeds = {}
        for tensor in self.graphs[name]["inputs"]:
            if tensor["role"] == "state":
                value = self.state[tensor["name"]]
            elif tensor["role"] in numbers:
                value = numbers[tensor["role"]]
            elif tensor["role"] == "schedule":
                value = scheduled(tensor["schedule"], int(self.state[step]))
            elif tensor["role"] == "y":
                value = arrays["y:" + tensor["of"]]
            else:
                value = arrays[tensor["name"]]
            feeds[tensor["name"]] = np.asarray(value, tensor["type"])
        outputs = [tensor["name"] for tensor in self.graphs[name]["outputs"]]
        return dict(zip(outputs, self.sessions[name].run(outputs, feeds)))

    def train(self, arrays: dict[str, np.ndarray]) -> float:
        """One step on a batch; its loss."""
        return self.mean_loss([self.step(arrays)], [rows_of(arrays)])

    def fit(self, arrays: dict[str, np.ndarray], epochs: int, size: int) -> list[float]:
        """The loss of each epoch, in the order of rows that the manifest asks for."""
        assert self.manifest["order"]["function"] == "lowbias32"
        losses = []
        for _ in range(epochs):
            epoch = int(self.state[self.counters["epoch"]])
            order = permutation(self.manifest["order"]["seed"], epoch, rows_of(arrays))
            batches = [order[i : i + size] for i in range(0, len(order), size)]
            results = [self.step({n: a[rows] for n, a in arrays.items()}) for rows in batches]
            losses.append(self.mean_loss(results, list(map(len, batches))))
            self.count(epoch=1)
        return losses

    def step(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """One step on a batch; the outputs of the graph."""
        scalars = self.run("scalars", {}) if "scalars" in self.graphs else {}
        result = self.run("train", arrays | scalars)
        for entry in self.manifest["state"]:
            if entry["output"]:
                self.state[entry["name"]] = result[entry["output"]]
        self.count(global_step=1, global_batch=1, samples_seen=rows_of(arrays))
        return result

    def mean_loss(self, results: list[dict[str, np.ndarray]], rows: list[int]) -> float:
        """The loss over batches of so many rows."""
        total, losses, penalty = 0.0, self.manifest["losses"], self.manifest["penalty"]
        penalties = [float(r[penalty]) if penalty else 0.0 for r in results]
        for loss in losses:
            subtracted = penalties if len(losses) == 1 else [0.0] * len(results)
            values = [float(r[loss["value"]]) - p for r, p in zip(results, subtracted)]
            counts = [
                float(r[loss["count"]]) if loss["count"] else n for r, n in zip(results, rows)
            ]
            if loss["reduction"] == "sum":
                total += loss["weight"] * sum(v for v, n in zip(values, counts) if n)
            else:
                total += loss["weight"] * (np.dot(values, counts) / sum(counts))
        return float(total + np.dot(penalties, rows) / sum(rows))

    def count(self, **counts: int) -> None:
        """Count up some of the counters."""
        for name, number in counts.items():
            self.state[self.counters[name]] = np.array(self.state[self.counters[name]] + number)

    def save(self, path: Path) -> Path:
        """Write the state."""
        save_file({name: array.copy() for name, array in self.state.items()}, path)
        return path

    def deploy(self) -> bytes:
        """The model with the trained weights, which are put at their places in the file."""
        model = bytearray((self.folder / self.manifest["model"]["file"]).read_bytes())
        computed = self.run("export", {}) if "export" in self.graphs else {}
        for tensor in self.manifest["model"]["tensors"]:
            merged = tensor["state"] is None
            array = computed[tensor["output"]] if merged else self.state[tensor["state"]]
            data = array.tobytes()
            assert len(data) == tensor["bytes"]
            model[tensor["offset"] : tensor["offset"] + tensor["bytes"]] = data
        return bytes(model)


def rows_of(arrays: dict[str, np.ndarray]) -> int:
    return len(next(iter(arrays.values())))


def permutation(seed: int, epoch: int, rows: int) -> list[int]:
    """The order "lowbias32", in whole numbers of Python."""
    words = [part for n in (seed, epoch, 0) for part in (n % 2**32, n % 2**64 >> 32)]
    first, second = 0, 1
    for word in words:
        first, second = (mix((key + word + 0x9E3779B9) % 2**32) for key in (first, second))
    return sorted(range(rows), key=lambda row: mix((mix((row + first) % 2**32) + second) % 2**32))


def mix(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def scheduled(schedule: dict[str, object], step: int) -> float:
    """The value of onnxfit.schedules.Step."""
    assert schedule["name"] == "Step"
    settings = schedule["settings"]
    return settings["learning_rate"] * settings["gamma"] ** (step // settings["step_size"])

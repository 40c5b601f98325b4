"""A trainer in a folder that needs no Python: `export_training` and `import_state`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from onnxfit.data.order import checked_batch_size
from onnxfit.environment import versions
from onnxfit.errors import SettingError, UnknownNameError, UnsupportedError, listed_names
from onnxfit.files import require_path
from onnxfit.folders import write_folder
from onnxfit.graph import names
from onnxfit.graph.constant_nodes import lower_constants, spread_names
from onnxfit.graph.training_form import to_inference_form
from onnxfit.registry import check_arguments
from onnxfit.training.position import PendingFit
from onnxfit.training.saved import SavedTrainer
from onnxfit.training.setting_values import encode_setting
from onnxfit.training_folder import description
from onnxfit.training_folder.json_numbers import with_finite_floats
from onnxfit.training_folder.manifest import (
    EVALUATE,
    EXPORT,
    FORMAT,
    GRAPHS,
    MANIFEST,
    MODEL,
    SCALARS,
    STATE,
    TRAIN,
    VERSION,
    earlier_graphs,
    graph_file,
)
from onnxfit.training_folder.message import bytes_to_run, refer_to_constants
from onnxfit.training_folder.step_graphs import TARGETS, step_graphs
from onnxfit.training_folder.tensors import (
    StateEntry,
    read_state,
    serialized,
    state_arrays,
    state_entries,
)


class FolderTrainer(SavedTrainer):
    """Trainer that exports its training for hosts without Python, and imports their state."""

    @check_arguments
    def export_training(
        self,
        folder: str | os.PathLike[str],
        *,
        batch_size: int | None = None,
        target: str = "onnxruntime",
        include: Sequence[str] = GRAPHS,
        sample_weight: bool = False,
    ) -> Path:
        """Write a folder with which any program that runs ONNX can train; return the folder.

        The folder has train.onnx, evaluate.onnx and predict.onnx, the deployable model.onnx,
        state.safetensors and manifest.json: the page "The training folder" in docs describes them.
        `Trainer.load(folder)` and `import_state` read the training back. Other files in the folder
        are not changed; after an error, the files of an earlier export are not changed either. If
        the process is killed, the next call that reads or writes the folder finishes the change.

        - `folder`: the folder to write; it is created if it is missing.
        - `batch_size`: rows of each batch of the training step, which is then faster. None allows
          any number of rows.
        - `target`: "onnxruntime" for the same step as in this trainer, bit for bit; "web" and
          "webgpu" for a step without float64, for which the host computes a few scalars with
          scalars.onnx. A step for "webgpu" has only operators with kernels in that provider.
        - `include`: the graphs to write, of "train", "evaluate" and "predict".
        - `sample_weight`: whether the losses have an input with a weight for each row.

        SettingError: the trainer has no loss, `accumulate` above 1, weights in `frozen`, integer
        weights, DoRA or PiSSA, half precision, or tensors above 2 GB. GradientError: the gradient
        needs a `batch_size`. CheckpointError: the folder cannot be written. With several processes,
        only rank 0 writes.

        >>> import json, onnx.parser, tempfile
        >>> from onnxfit import Trainer
        >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
        ...     line (float[N, 1] x) => (float[N, 1] y) <float[1, 1] slope = {2}>
        ...     { y = MatMul(x, slope) }''')
        >>> trainer = Trainer(model, loss="mean_squared_error", optimizer="adam")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = trainer.export_training(folder)
        ...     manifest = json.loads((path / "manifest.json").read_text())
        >>> [tensor["name"] for tensor in manifest["state"] if tensor["kind"] != "counter"]
        ['slope', 'slope/m', 'slope/v']
        """
        require_path(folder)
        graphs_to_write = _checked_graphs(include)
        if target not in TARGETS:
            raise UnknownNameError("target", target, TARGETS)
        rows = None if batch_size is None else checked_batch_size(batch_size)
        self._require_exportable()
        if self._first_step:
            raise UnsupportedError(
                f"export_training cannot tell a host that the optimizer's slots began after update"
                f" {self._first_step}, when another optimizer was loaded. Export the model, and"
                " create a new Trainer from it."
            )
        self._require_equal_ranks("export_training")
        with self._backend.lock:
            state = self.get_state()
        if not self.is_main:
            return Path(folder)
        fused = self._backend.fused
        graphs = step_graphs(self._recipe, target, graphs_to_write, rows, sample_weight, fused)
        entries = state_entries(self._recipe, state)
        model = self._trainable.for_host(state["weights"])
        to_inference_form(model, self._recipe.batch_norm)
        initializers = {tensor.name for tensor in model.graph.initializer}
        own = initializers.intersection(self._recipe.state)
        trained = {entry.name: entry for entry in entries if entry.name in own}
        source = description.source_hash(model, list(trained))
        # A host overwrites the bytes of one tensor for each weight.
        lower_constants(model, own.intersection(spread_names(model)))
        files = {MODEL: model.SerializeToString(deterministic=True)}
        for name, graph in graphs.items():
            refer_to_constants(graph, MODEL, files[MODEL], self._recipe.state)
            files[graph_file(name)] = bytes_to_run(graph)
        files[STATE] = serialized(state_arrays(entries, state))
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "producer": f"onnxfit {versions().get('onnxfit', '')}".rstrip(),
            "target": target,
            "files": {
                name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
                for name, data in files.items()
            },
            "source": {"sha256": source},
            **self._description(graphs, entries),
            "model": description.described_model(MODEL, files[MODEL], trained, graphs.get(EXPORT)),
            "batch": {"rows": rows, "sample_weight": sample_weight},
        }
        files[MANIFEST] = json.dumps(manifest, indent=1, allow_nan=False).encode()
        return write_folder(folder, files, stale=earlier_graphs(folder))

    @check_arguments
    def import_state(self, path: str | os.PathLike[str]) -> None:
        """Load the state that another program wrote after `export_training`.

        The file replaces the weights, the optimizer's slots, the running statistics, the counters
        and the learning rate; settings and history do not change. The next `fit` begins a new
        epoch.

        - `path`: the safetensors file.

        CheckpointError, before anything changes: the state belongs to another training.
        SettingError: `fit` is running. With several processes, each process reads the file.

        >>> import onnx.parser, tempfile
        >>> from onnxfit import Trainer
        >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
        ...     line (float[N, 1] x) => (float[N, 1] y) <float[1, 1] slope = {2}>
        ...     { y = MatMul(x, slope) }''')
        >>> trainer = Trainer(model, loss="mean_squared_error", optimizer="adam")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = trainer.export_training(folder)
        ...     trainer.set_weights({"slope": [[3]]})
        ...     trainer.import_state(path / "state.safetensors")
        >>> trainer.get_weights()["slope"].item()
        2.0
        """
        if self._is_fitting:
            raise SettingError("import_state cannot be called during fit. Call it before or after.")
        state = read_state(path, state_entries(self._recipe, self.get_state()))
        self.set_state(state)
        self._fit_state = None
        self._pending_fit = PendingFit()

    def _description(
        self, graphs: Mapping[str, onnx.ModelProto], entries: Sequence[StateEntry]
    ) -> dict[str, Any]:
        """Return the parts of the manifest that describe the training."""
        recipe = self._recipe
        step = [graphs[name] for name in (TRAIN, SCALARS, EVALUATE) if name in graphs]
        outputs = {value.name for graph in step for value in graph.graph.output}
        inputs = {value.name for graph in step for value in graph.graph.input}
        schedule = None
        if self._learning_rate is None:
            schedule = description.described_object(recipe.optimizer.learning_rate)
        settings = {name: encode_setting(value) for name, value in self.settings.items()}
        return {
            "graphs": {
                name: description.described_graph(recipe, name, graph_file(name), graph)
                for name, graph in graphs.items()
            },
            "state": description.described_state(entries, outputs),
            "losses": description.described_losses(recipe, outputs),
            "penalty": names.PENALTY if names.PENALTY in outputs else None,
            "metrics": description.described_metrics(recipe),
            "optimizer": description.described_object(recipe.optimizer),
            "learning_rate": {
                "value": self.learning_rate,
                "schedule": schedule,
                "max": recipe.max_learning_rate,
            },
            "random": {"seed": self._random_seed, "draws": names.SEED in inputs},
            "order": {"function": "lowbias32", "seed": self.seed},
            "settings": with_finite_floats(settings),
        }

    def _require_exportable(self) -> None:
        """Raise SettingError for a training that the graphs of a folder cannot compute."""
        problem = None
        without = [spec.name for spec in self.inputs if spec.shape and not spec.has_rows]
        if not self._recipe.loss_outputs:
            problem = "has no loss. Pass a loss: Trainer(..., loss='mean_squared_error')"
        elif self._backend.can_accumulate:
            problem = (
                "accumulates gradients. Create the trainer with accumulate=1, and use larger"
                " batches"
            )
        elif self.frozen:
            problem = (
                f"has frozen tensors ({listed_names(self.frozen)}). Leave them out of weights="
            )
        elif self._trainable.no_host is not None:
            problem = f"{self._trainable.no_host}. Train plain adapters or float weights"
        elif self._recipe.precision.half is not None:
            problem = (
                f"has precision={self._recipe.precision.name!r}, for which other programs have no"
                " kernels. Train with precision='float32'"
            )
        elif self._recipe.state_outputs:
            problem = "carries states between batches, which hosts do not. Remove state_outputs="
        elif without:
            problem = (
                f"has inputs without a batch axis ({listed_names(without)}), which hosts would"
                " divide into rows. Give them a value with fixed_inputs="
            )
        elif self._recipe.large:
            problem = "has more than 2 GB of tensors, the limit of one ONNX file"
        if problem is not None:
            raise SettingError(f"export_training cannot export this trainer: it {problem}.")


def _checked_graphs(include: Sequence[str]) -> tuple[str, ...]:
    """Return the names of graphs, in their order. Raises UnknownNameError or SettingError."""
    wanted = [include] if isinstance(include, str) else list(include)
    for name in wanted:
        if name not in GRAPHS:
            raise UnknownNameError("graph", name, GRAPHS)
    if not wanted:
        raise SettingError(
            f"include must name at least one of {', '.join(GRAPHS)}, got an empty list."
        )
    return tuple(name for name in GRAPHS if name in wanted)

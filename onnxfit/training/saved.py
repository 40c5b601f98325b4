"""Files of a trainer: checkpoints, the trained model, graphs of a step; and text summaries."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from onnxfit.adapters.adapted import AdaptedModel
from onnxfit.adapters.onnx_adapter import is_onnx_adapter, write_onnx_adapter
from onnxfit.adapters.peft import write_adapters
from onnxfit.callbacks.checks import require_adapters
from onnxfit.callbacks.history import History
from onnxfit.data.order import checked_batch_size
from onnxfit.errors import (
    SettingError,
    UnsupportedError,
    listed_names,
    warn_user,
)
from onnxfit.files import refusing_misfits, require_checkpoint_name, require_path
from onnxfit.gradients.inspection import Inspection, inspect_working
from onnxfit.graph import names
from onnxfit.graph.constant_nodes import lower_constants, with_constant_nodes
from onnxfit.graph.model_file import ModelSnapshot, write_model
from onnxfit.graph.shared_tensors import Contents as TensorContents
from onnxfit.graph.shared_tensors import whole_model
from onnxfit.graph.training_form import to_inference_form
from onnxfit.registry import check_arguments, shortened
from onnxfit.runtime.placement import operators_on_cpu
from onnxfit.training import checkpoint
from onnxfit.training.carried import CARRIED
from onnxfit.training.contents import Contents
from onnxfit.training.generation import GeneratingTrainer
from onnxfit.training.passed_settings import with_passed_settings
from onnxfit.training.position import PendingFit, Position
from onnxfit.training.state import TrainerState, require_same_form
from onnxfit.training.summary import summary, trainer_html

if TYPE_CHECKING:
    from onnxfit.training.loop import FitState


class SavedTrainer(GeneratingTrainer):
    """Trainer that writes and reads its training state, and writes the model and its graphs."""

    def __getstate__(self) -> dict[str, Any]:
        """Raise UnsupportedError: the compiled sessions cannot be pickled or copied."""
        raise UnsupportedError(
            f"A {type(self).__name__} cannot be pickled or copied, because it holds compiled"
            f" graphs. Use save(path) and {type(self).__name__}.load(path) instead."
        )

    @property
    def model(self) -> onnx.ModelProto:
        """A copy of the given model. Its own tensors that are trained have their current numbers.

        A quantized model, and one with adapters, has all numbers that it was given with.
        """
        model, contents = self._given_model()
        model = whole_model(model)
        del contents  # alive until here
        return model

    def _given_model(self) -> tuple[onnx.ModelProto, list[TensorContents]]:
        """Return `model` with references to the arrays of a large one, and these arrays."""
        form = self._trainable
        if not form.is_file:
            return with_constant_nodes(form.file), []
        state = self._backend.state
        with self._backend.lock:
            model, contents = form.shared_export({n: state.get(n) for n in self._recipe.state})
        return lower_constants(model), contents

    @check_arguments
    def save(self, path: str | os.PathLike[str], *, adapters_only: bool = False) -> Path:
        """Write the whole training state to the file `path`, atomically.

        The file contains the model, weights, slots, counters, settings, history and the callbacks'
        states. `adapters_only=True` leaves out the model, whose weights are frozen if adapters are
        trained. `Trainer.load(path, model_onnx=...)` then needs the same model. With several
        processes, only rank 0 writes, and the others do not wait. SettingError: the name has the
        suffix of another format, such as `.onnx`, `.keras`, `.h5`, `.pt` or `.safetensors`; `.ckpt`
        and `.onnxfit` are common suffixes.
        """
        require_path(path)
        require_checkpoint_name(path)
        if not self.is_main:
            self._require_savable("save")
            return Path(path)
        return self._snapshot("save", adapters_only).write(path)

    @check_arguments
    def snapshot(self, *, adapters_only: bool = False) -> checkpoint.Snapshot:
        """Return a copy of the training state in memory; `adapters_only` is as for `save`.

        Its `write(path)` may run later, or in another thread, while training continues. With
        several processes, only rank 0 writes.
        """
        return self._snapshot("snapshot", adapters_only)

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Load the state that `save` wrote to `path`, of this trainer or of an equal one.

        The settings of this trainer do not change. With several processes, all must call it; rank 0
        reads the file and sends its contents to the others. CheckpointError: as for `load`.
        SettingError or DataError, before anything changes: the state belongs to another model or
        optimizer.
        """
        if self._is_fitting:
            raise SettingError(
                "restore sets the position where fit begins and cannot be called during a fit. Call"
                " it before fit, or in the method `prepare` of a callback."
            )
        contents = checkpoint.load(path, self.settings, self._world)
        if not self._trainable.is_file:  # else it has no adapters, and theirs do not fit
            contents.require_base(path, self._trainable.fingerprint if contents.base else "")
        with self._training, matching_this_version(path):
            self._restore(contents)

    @check_arguments
    def export(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        averaged: bool = False,
        adapters: str = "merged",
    ) -> onnx.ModelProto:
        """Return the original model with the trained weights, for inference; write it to `path`.

        `averaged=True` uses the averages that `optimizer=Adam(..., ema_momentum=...)` keeps. If the
        model is larger than 2 GB, its tensors are in a file `<path>.data` next to it. If an older
        model uses that file, the tensors are in `<path>.onnxfit-1.data`, and the older file is
        deleted at the end, so that the model at `path` can be read at any time. With several
        processes, only rank 0 writes. CheckpointError: the file cannot be written.

        With more than 512 MB of tensors and a `path`, the tensors go from memory to the file one by
        one. The returned model then has no copy of the larger ones: they are external data in the
        file, which `onnx.load_external_data_for_model(model, folder)` reads.

        `adapters="merged"` writes W + s A B in place of W. Adapters of packed integers
        (MatMulNBits) are not merged and stay separate nodes. `adapters="requantized"` merges these
        as well: it rounds W + s A B to integers of the same bits, block size and kind of zero
        points, as onnxruntime's quantizer does. The outputs then change by this rounding.
        SettingError: integers that are read otherwise. `adapters="inputs"` keeps W and writes
        all adapters as nodes. Their matrices are inputs whose defaults are zeros, so that by
        default the file computes the same as the base model. Other values come from an
        `.onnx_adapter` file of `export_adapter`, of any rank, or from arrays. The file has the
        trained values of weights that were trained in addition to the adapters.
        """
        snapshot = self._exported(averaged=averaged, adapters=adapters)
        return snapshot.whole() if path is None else snapshot.written(path)

    def model_snapshot(self) -> ModelSnapshot:
        """Return the trained model as it is now, as `export` writes it.

        Its `write(path)` may run later, or in another thread, while training continues. It writes
        tensor by tensor: memory holds the frozen weights of a model above 512 MB only once. With
        several processes, only rank 0 writes.
        """
        return self._exported()

    def export_adapter(self, path: str | os.PathLike[str]) -> Path:
        """Write only the adapters, and return the path.

        `path` is a folder for PEFT, or a file `*.onnx_adapter` for onnxruntime, which applies the
        adapters to single runs of the model of `export(adapters="inputs")`.
        `onnxfit.LoRA.load(path)` reads both. `PeftModel.from_pretrained` reads the folder for the
        torch model from which the ONNX model was exported. The folder has the files
        adapter_model.safetensors and adapter_config.json. A file for onnxruntime (1.20 or newer)
        and onnxruntime-genai has A, and s B in place of B. With several processes, only rank 0
        writes.

        SettingError: the trainer has no adapters. CheckpointError: the files cannot be written. A
        UserWarning names weights that are trained in addition, which only `export` writes; and an
        embedding table that is also the weight of a linear layer, whose adapter PEFT cannot read.
        """
        require_path(path)
        form = self._require_adapters("export_adapter")
        self._require_equal_ranks("export_adapter")
        arrays = self.get_weights()
        own = {name for one in form.adapters for name in one.names}
        others = [name for name in arrays if name not in own]
        if others:
            warn_user(
                f"{os.fspath(path)!r} does not contain {listed_names(others)}, which are trained in"
                " addition to the adapters. export(path) writes the whole model, and export(path,"
                " adapters='inputs') writes the base model with these weights."
            )
        if is_onnx_adapter(path):
            tensors = form.parameters(arrays)
            return write_onnx_adapter(path, tensors) if self.is_main else Path(path)
        tied = [one.weight.module for one in form.adapters if one.weight.is_tied]
        if tied:
            warn_user(
                f"PEFT cannot read the adapter of {listed_names(tied)}, an embedding table that is"
                " also the weight of a linear layer. Only onnxfit.LoRA.load can read it."
            )
        return write_adapters(path, form.saved(arrays)) if self.is_main else Path(path)

    def save_onnx_graph(self, folder: Any, prefix: str = "", suffix: str = "") -> dict[str, Any]:
        """Write every graph of this trainer, and a checkpoint, to `folder`.

        The graphs are `model`, `trained`, and the graphs of a step in the order they run: `train`,
        `evaluate`, `predict`; or `forward`, `loss`, `backward`, `penalty`, `update`, `evaluate`,
        `predict` with `backend="forward_backward"`; with `accumulate`, `accumulate` and `update` as
        well. Return a dict graph name -> file name. The file name is the graph's name between
        `prefix` and `suffix`, followed by `.onnx`; tensors above 2 GB are in `<file name>.data`. If
        `folder` is the type `bytes`, nothing is written: return a dict graph name -> serialized
        graph. With several processes, only rank 0 writes.
        """
        if folder is not bytes:
            require_path(folder)
        trained = self._exported()
        given, contents = self._given_model()
        graphs = {"model": given, "trained": trained.model}
        graphs |= self._backend.graphs(self._recipe.declared_batch)
        if folder is bytes:
            whole = {name: whole_model(graph) for name, graph in graphs.items()}
            return {k: g.SerializeToString(deterministic=True) for k, g in whole.items()}
        files = {}
        for name, graph in graphs.items():
            files[name] = f"{prefix}{name}{suffix}.onnx"
            if self.is_main:
                write_model(Path(folder) / files[name], graph, self._recipe.state)
        del contents  # alive until here
        self.save(Path(folder) / f"{prefix}trainer{suffix}{checkpoint.SUFFIX}")
        return files

    def summary(self, *, depth: int | str | None = "auto") -> str:
        """Return the losses and settings, and a table of the weights by module.

        - `depth`: each module at this level, a number from 1, gets one row; None lists every
          tensor. "auto" folds modules, and the middle of a long list, if the table has more than 40
          rows.

        A module consists of the tensors whose names have a common beginning, up to a "." or "/".
        The summary shows settings that differ from their defaults, and always the learning rate. A
        notebook shows a table. SettingError: the depth is impossible.
        """
        return summary(self._recipe, self.settings, depth)

    def _repr_html_(self) -> str:
        """Return the summary for a notebook."""
        return trainer_html(self)

    @check_arguments
    def inspect(self, device: str | None = None, *, batch_size: int | None = None) -> Inspection:
        """Return how each operator from the loss to the weights is differentiated, as a table.

        - `device`: the name of a device, such as "webgpu", or None. With a device, the Inspection
          also lists the operators of a training step that run on the CPU, because the device has no
          kernels for them. The step is compiled for it, by onnxruntime 1.24 or newer, and not run.
        - `batch_size`: rows of a batch of that step; None for any number.

        SettingError or InstallationError for a device that is not available, SettingError for a
        trainer without a loss. GradientError if the gradient needs a `batch_size`.
        """
        recipe = self._recipe
        outputs = recipe.loss_outputs or recipe.float_outputs
        report = inspect_working(recipe.model, recipe.weights, outputs, recipe.gradient.name)
        report = replace(report, batch_axes=tuple(recipe.layout.lines()))
        if device is None:
            return report
        if not recipe.loss_outputs:
            raise SettingError(
                "inspect(device=...) needs a training step, but this trainer has no loss. Create"
                " it with Trainer(..., loss='mean_squared_error')."
            )
        rows = None if batch_size is None else checked_batch_size(batch_size)
        on_cpu = operators_on_cpu(recipe, device, rows)
        return replace(report, device=device, on_cpu=on_cpu)

    def _exported(self, *, averaged: bool = False, adapters: str = "merged") -> ModelSnapshot:
        """Return the model that `export` returns, with references to the arrays of a large one."""
        if averaged and self.optimizer.ema_momentum is None:
            raise SettingError(
                "averaged=True needs an optimizer that averages the weights, such as"
                " optimizer=onnxfit.optimizers.Adam(ema_momentum=0.99)."
            )
        if adapters not in ("merged", "requantized", "inputs"):
            raise SettingError(
                "export needs adapters to be 'merged', 'requantized' or 'inputs', got"
                f" {shortened(adapters)}."
            )
        exported = self._trainable.shared_export
        if adapters != "merged":
            form = self._require_adapters(f"export(adapters={adapters!r})")
            exported = form.served if adapters == "inputs" else form.requantized
        self._require_equal_ranks("export")
        with self._backend.lock:
            arrays = self.get_weights()
            if averaged:
                for name in self._recipe.weights:
                    arrays[name] = self._backend.state.get(names.slot(name, names.EMA))
        model, contents = exported(arrays)
        to_inference_form(model, self._recipe.batch_norm)
        lower_constants(model)
        return ModelSnapshot(model, contents, self._recipe.state, writes=self.is_main)

    def _require_adapters(self, what: str) -> AdaptedModel:
        """Return the form with adapters. SettingError: the trainer has no adapters."""
        if not isinstance(self._trainable, AdaptedModel):
            raise SettingError(
                f"{what} needs a trainer with adapters, but this trainer has none. Create it with"
                " Trainer(..., adapters=onnxfit.LoRA(rank=8))."
            )
        return self._trainable

    def _require_savable(self, what: str) -> None:
        """Raise SettingError if rank 0 does not have the state of all ranks."""
        self._require_equal_ranks(what)
        self._require_whole_window(what)

    def _snapshot(self, what: str, adapters_only: bool) -> checkpoint.Snapshot:
        self._require_savable(what)
        if adapters_only:
            require_adapters(self.settings)
        with self._training.advancing.lock:  # between two steps
            if self._training.in_metrics:
                raise SettingError(
                    f"{what} cannot be called inside a metric, because the batch is not counted"
                    " yet. Call it in a hook, such as on_train_batch_end."
                )
            contents = self._contents(adapters_only)
        return checkpoint.Snapshot(contents, writes=self.is_main)

    def _contents(self, adapters_only: bool) -> Contents:
        """Return the contents of a checkpoint written now; its arrays are copies."""
        pending = self._pending_now()
        return Contents(
            model=None if adapters_only else self._trainable.file,
            base=self._trainable.fingerprint if adapters_only else None,
            settings=self.settings,
            state=self.get_state(),
            history=self.history.state_dict(),
            train_losses=[*self.train_losses_],
            resume=astuple(pending.position),
            tracker=deepcopy(pending.tracker),
            undelivered=pending.undelivered,
            callbacks=pending.callbacks,
            constants=self._trainable.constants,
        )

    def _pending_now(self) -> PendingFit:
        """Return the state of the running fit, or of an interrupted or loaded fit."""
        fit = self._fit_state
        if fit is None or not self._pending_fit.position.nothing_to_resume:
            return self._pending_fit
        undelivered = dict(fit.pending.undelivered)
        if fit.current_event is not None:
            hook, index, logs = fit.current_event
            undelivered = {"hook": hook, "index": index, "logs": dict(logs)}
            undelivered |= {"stop": self.stop_training, "reason": self.stop_reason}
            undelivered |= fit.callbacks.told_by_key(hook)
        sums = fit.pending.tracker
        if fit.position.batch and not sums:
            sums = self._sums_of_epoch(fit)
        callbacks = fit.callbacks.state_dict() if fit.running else fit.callback_states
        position = fit.resume_position(self.stop_training, self.stop_reason)
        return PendingFit(position, sums, undelivered, callbacks)

    def _sums_of_epoch(self, fit: FitState) -> Mapping[str, Any]:
        """Return the sums of the running epoch; {}, with a warning, if ranks did not share them."""
        if self.world_size == 1:
            sums = self._tracker.state_dict()
            if self._recipe.state_outputs:
                sums[CARRIED] = self._carried.state_dict()
            return sums
        if fit.sums_batch == fit.position.batch:
            return fit.sums
        warn_user(
            "The checkpoint lacks the loss and metrics of the epoch so far, because the ranks did"
            f" not exchange them after batch {fit.position.batch}. After resuming, the loss and"
            " metrics of this epoch will cover only the later batches. Save in on_train_batch_end"
            " or on_epoch_end instead."
        )
        return {}

    def _restore(self, contents: Contents, passed: Collection[str] = ()) -> None:
        """Restore the state of a checkpoint, in which settings that were `passed` win."""
        history = History()
        history.load_state_dict(contents.history)
        position = Position.restored(contents.resume)
        # there is nothing to resume after a fit that has ended
        callbacks = {} if position.nothing_to_resume else dict(contents.callbacks)
        tracker, undelivered = dict(contents.tracker), dict(contents.undelivered)
        losses = [float(loss) for loss in contents.train_losses]
        pending = PendingFit(position, tracker, undelivered, callbacks)
        with self._training, self._training.advancing, self._backend.lock:
            own = self.get_state()
            state: TrainerState = contents.state
            if passed:
                has_numbers = self._trainable.is_file
                state = with_passed_settings(contents, own, passed, has_numbers=has_numbers)
            require_same_form(state, own)
            self._trainable.require_constants(contents.constants)
            self._set_state(state)
            self._backend.keep_window_on_main()
            self._averaged_step = self.global_step
            self.history = history
            self.train_losses_ = losses
            self._fit_state = None
            self._pending_fit = pending


def matching_this_version(path: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Raise CheckpointError for errors caused by unusable contents of a checkpoint."""
    problem = f"{os.fspath(path)!r} does not fit this version of onnxfit, or is damaged"
    return refusing_misfits(problem)

"""A trainer in files: checkpoints, the trained model, the graphs of a step, and tables in text."""

from __future__ import annotations

import os
from collections.abc import Mapping
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
from onnxfit.files import refusing_misfits, require_path
from onnxfit.gradients.inspection import Inspection, inspect_working
from onnxfit.graph import names
from onnxfit.graph.tensors import write_model
from onnxfit.graph.training_form import to_inference_form
from onnxfit.registry import check_arguments, shortened
from onnxfit.runtime.placement import operators_on_cpu
from onnxfit.training import checkpoint
from onnxfit.training.contents import Contents
from onnxfit.training.generation import GeneratingTrainer
from onnxfit.training.position import PendingFit, Position
from onnxfit.training.state import require_same_form
from onnxfit.training.summary import summary, trainer_html

if TYPE_CHECKING:
    from onnxfit.training.loop import FitState


class SavedTrainer(GeneratingTrainer):
    """Writes and reads the training state, and writes the model and its graphs."""

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be pickled or copied: the compiled sessions belong to this process."""
        raise UnsupportedError(
            f"A {type(self).__name__} cannot be pickled or copied, since it holds compiled graphs:"
            f" write it with save(path), and read it with {type(self).__name__}.load(path)."
        )

    @check_arguments
    def save(self, path: str | os.PathLike[str], *, adapters_only: bool = False) -> Path:
        """Write the whole training state into the file `path`, atomically.

        It holds model, weights, slots, counters, settings, history and callbacks' states.
        `adapters_only=True` leaves the model out, whose weights are frozen beside adapters. Then
        `Trainer.load(path, model_onnx=...)` needs it, and refuses another. A
        checkpoint is no ONNX file: SettingError for a name that ends in `.onnx`, which is for
        `export`. Of several processes, only rank 0 writes, and the others do not wait for it.
        """
        require_path(path)
        if os.fspath(path).endswith(".onnx"):
            raise SettingError(
                f"save writes a checkpoint, which is no ONNX model, got {os.fspath(path)!r}. Write"
                f" the model with export({os.fspath(path)!r}), or name the checkpoint *.ckpt."
            )
        if not self.is_main:
            self._require_savable("save")
            return Path(path)
        return self._snapshot("save", adapters_only).write(path)

    @check_arguments
    def snapshot(self, *, adapters_only: bool = False) -> checkpoint.Snapshot:
        """Return a copy in memory of what `save` writes; `adapters_only` is as there.

        Its `write(path)` may run later, or in another thread, while training goes on. Of several
        processes, only rank 0 writes.
        """
        return self._snapshot("snapshot", adapters_only)

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Load into this trainer what `save` wrote to `path` from it, or from one built alike.

        The settings remain this trainer's. All of several processes call it; rank 0 reads the file,
        and the others get its contents. CheckpointError as for `load`; SettingError or DataError,
        before anything changes, for the state of another model or optimizer.
        """
        if self._is_fitting:
            raise SettingError(
                "restore decides where a fit begins: call it before fit, or in a callback's"
                " `prepare`."
            )
        contents = checkpoint.load(path, self.settings, self._world)
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

        `averaged=True` takes the averages that `optimizer=Adam(..., ema_momentum=...)` keeps. Above
        2 GB the tensors are in a file `<path>.data` beside it. Of several processes, only rank 0
        writes. CheckpointError if it cannot be written.

        `adapters="merged"` writes W + s A B in the place of W. Adapters of packed integers
        (MatMulNBits) stay beside them, as nodes. `adapters="inputs"` leaves W as it is and writes
        all adapters as nodes. Their matrices are inputs whose defaults are zeros, so that the file
        computes what the base does until it gets others: those of an `.onnx_adapter` file of
        `export_adapter`, of any rank, or arrays. Weights that train besides are in the file.
        """
        if averaged and self.optimizer.ema_momentum is None:
            raise SettingError(
                "averaged=True needs an optimizer that averages, such as"
                " optimizer=onnxfit.optimizers.Adam(ema_momentum=0.99)."
            )
        if adapters not in ("merged", "inputs"):
            raise SettingError(
                f"adapters of export is 'merged' or 'inputs', got {shortened(adapters)}."
            )
        exported = self._trainable.exported
        if adapters == "inputs":
            exported = self._require_adapters("adapters='inputs' makes inputs of adapters").served
        self._require_equal_ranks("export")
        with self._backend.lock:
            arrays = self.get_weights()
            if averaged:
                for name in self._recipe.weights:
                    arrays[name] = self._backend.state.get(names.slot(name, names.EMA))
        model = exported(arrays)
        to_inference_form(model)
        if path is not None and self.is_main:
            write_model(path, model, self._recipe.state)
        return model

    def export_adapter(self, path: str | os.PathLike[str]) -> Path:
        """Write the adapters alone, and return the path.

        `path` is a folder for PEFT; or a file `*.onnx_adapter` for onnxruntime, which sets it for
        single runs of the file of `export(adapters="inputs")`. `onnxfit.LoRA.load(path)` reads
        both. `PeftModel.from_pretrained` reads the folder for the torch model that the file was
        exported from: its files are adapter_model.safetensors and adapter_config.json. A file for
        onnxruntime (from 1.20 on) and onnxruntime-genai has A, and s B in the place of B. Of
        several processes, only rank 0 writes. SettingError for a trainer without adapters,
        CheckpointError if they cannot be written. A UserWarning names weights that are trained
        besides, which are in `export` alone, and a table that is also the weight of a linear layer,
        whose adapter PEFT cannot read.
        """
        require_path(path)
        form = self._require_adapters("export_adapter writes adapters")
        self._require_equal_ranks("export_adapter")
        arrays = self.get_weights()
        own = {name for one in form.adapters for name in one.names}
        others = [name for name in arrays if name not in own]
        if others:
            warn_user(
                f"{os.fspath(path)!r} does not hold {listed_names(others)}, which train besides the"
                " adapters: export(path) writes the whole model, and export(path,"
                " adapters='inputs') the base with them."
            )
        if is_onnx_adapter(path):
            tensors = form.parameters(arrays)
            return write_onnx_adapter(path, tensors) if self.is_main else Path(path)
        tied = [one.weight.module for one in form.adapters if one.weight.is_tied]
        if tied:
            warn_user(
                f"PEFT cannot read the adapter of {listed_names(tied)}, a table that is also the"
                " weight of a linear layer: onnxfit.LoRA.load alone does."
            )
        return write_adapters(path, form.saved(arrays)) if self.is_main else Path(path)

    def save_onnx_graph(self, folder: Any, prefix: str = "", suffix: str = "") -> dict[str, Any]:
        """Write every graph of this trainer, and a checkpoint, to `folder`.

        The graphs are `model`, `trained`, and those of a step in the order they run: `train`,
        `evaluate`, `predict`; or `forward`, `loss`, `backward`, `penalty`, `update`, `evaluate`,
        `predict` with `backend="forward_backward"`; with `accumulate`, `accumulate` and `update` as
        well. Return graph name -> file name, which is the graph's name between `prefix` and
        `suffix`, and `.onnx`; tensors above 2 GB are in `<file name>.data`. With the type `bytes`
        as `folder`, nothing is written: return graph name -> serialized graph. Of several
        processes, only rank 0 writes.
        """
        if folder is not bytes:
            require_path(folder)
        graphs = {"model": self.model, "trained": self.export(None)}
        batch = self._recipe.declared_batch
        graphs |= self._backend.graphs(batch)
        if folder is bytes:
            return {k: g.SerializeToString(deterministic=True) for k, g in graphs.items()}
        files = {}
        for name, graph in graphs.items():
            files[name] = f"{prefix}{name}{suffix}.onnx"
            if self.is_main:
                write_model(Path(folder) / files[name], graph, self._recipe.state)
        self.save(Path(folder) / f"{prefix}trainer{suffix}{checkpoint.SUFFIX}")
        return files

    def summary(self, *, depth: int | str | None = "auto") -> str:
        """Return the losses and settings, and a table of the weights by module.

        - `depth`: the modules at this level, a number from 1, have a row each; None lists every
          tensor. "auto" folds modules, and the middle of a long list, if the table has more than 40
          rows.

        A module is what the names of its tensors begin with, up to a "." or "/". Settings are shown
        where they differ from their defaults, and the learning rate. A notebook shows a table.
        SettingError: an impossible depth.
        """
        return summary(self._recipe, self.settings, depth)

    def _repr_html_(self) -> str:
        """Return the summary for a notebook."""
        return trainer_html(self)

    @check_arguments
    def inspect(self, device: str | None = None, *, batch_size: int | None = None) -> Inspection:
        """Return how each operator from the loss to the weights is differentiated, as a table.

        - `device`: with the name of a device, such as "webgpu", the Inspection says besides which
          operators of a training step run on the CPU, because the device has no kernels for them.
          The step is compiled for it, by onnxruntime 1.24 or newer, and not run.
        - `batch_size`: rows of a batch of that step; None for any number.

        SettingError or InstallationError for a device that is not there, SettingError for a trainer
        without a loss. GradientError if the gradient needs a `batch_size`.
        """
        recipe = self._recipe
        outputs = recipe.loss_outputs or recipe.float_outputs
        report = inspect_working(recipe.model, recipe.weights, outputs, recipe.gradient.name)
        if device is None:
            return report
        if not recipe.loss_outputs:
            raise SettingError("inspect(device=...) needs a training step, and there is no loss.")
        rows = None if batch_size is None else checked_batch_size(batch_size)
        on_cpu = operators_on_cpu(recipe, device, rows)
        return replace(report, device=device, on_cpu=on_cpu)

    def _require_adapters(self, what: str) -> AdaptedModel:
        """Return the form with adapters; SettingError for a trainer that has none."""
        if not isinstance(self._trainable, AdaptedModel):
            raise SettingError(
                f"{what}, and this trainer has none: Trainer(..., adapters=onnxfit.LoRA(rank=8))"
                " trains them."
            )
        return self._trainable

    def _require_savable(self, what: str) -> None:
        """Raise SettingError where rank 0 does not have the state of all ranks."""
        self._require_equal_ranks(what)
        self._require_whole_window(what)

    def _snapshot(self, what: str, adapters_only: bool) -> checkpoint.Snapshot:
        self._require_savable(what)
        if adapters_only:
            require_adapters(self.settings)
        return checkpoint.Snapshot(self._contents(adapters_only), writes=self.is_main)

    def _contents(self, adapters_only: bool) -> Contents:
        """Return what a checkpoint written now holds; its arrays are copies."""
        pending = self._pending_now()
        return Contents(
            model=None if adapters_only else self._trainable.file,
            base=self._trainable.fingerprint if adapters_only else None,
            settings=self.settings,
            state=self.get_state(),
            history=self.history.state_dict(),
            train_losses=self.train_losses_,
            resume=astuple(pending.position),
            tracker=deepcopy(pending.tracker),
            undelivered=pending.undelivered,
            callbacks=pending.callbacks,
            constants=self._trainable.constants,
        )

    def _pending_now(self) -> PendingFit:
        """Return the state of the running fit, or of one that was interrupted or loaded."""
        fit = self._fit_state
        if fit is None or not self._pending_fit.position.nothing_to_resume:
            return self._pending_fit
        undelivered = dict(fit.pending.undelivered)
        if fit.current_event is not None:
            hook, index, logs = fit.current_event
            undelivered = {"hook": hook, "index": index, "logs": dict(logs)}
            undelivered |= {"stop": self.stop_training, "reason": self.stop_reason}
        sums = fit.pending.tracker
        if fit.position.batch and not sums:
            sums = self._sums_of_epoch(fit)
        callbacks = fit.callbacks.state_dict() if fit.running else fit.callback_states
        return PendingFit(fit.resume_position(), sums, undelivered, callbacks)

    def _sums_of_epoch(self, fit: FitState) -> Mapping[str, Any]:
        """Return the sums of the running epoch; {}, with a warning, where other ranks have more."""
        if self.world_size == 1:
            return self._tracker.state_dict()
        if fit.sums_batch == fit.position.batch:
            return fit.sums
        warn_user(
            "The checkpoint has no loss and metrics of the batches before it, since the ranks did"
            f" not exchange them after batch {fit.position.batch}: those of the resumed epoch will"
            " be of its other batches. Save in on_train_batch_end or on_epoch_end instead."
        )
        return {}

    def _restore(self, contents: Contents) -> None:
        """Go to the state that a checkpoint holds."""
        history = History()
        history.load_state_dict(contents.history)
        position = Position.restored(contents.resume)
        # a fit that has ended leaves nothing to resume
        callbacks = {} if position.nothing_to_resume else dict(contents.callbacks)
        tracker, undelivered = dict(contents.tracker), dict(contents.undelivered)
        with self._training, self._backend.lock:
            require_same_form(contents.state, self.get_state())
            self._trainable.require_constants(contents.constants)
            self._set_state(contents.state)
            self._backend.keep_window_on_main()
        self._averaged_step = self.global_step
        self.history = history
        self.train_losses_ = [float(loss) for loss in contents.train_losses]
        self._fit_state = None
        self._pending_fit = PendingFit(position, tracker, undelivered, callbacks)


def matching_this_version(path: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Raise CheckpointError if a checkpoint that was read holds something that cannot be used."""
    return refusing_misfits(f"{os.fspath(path)!r} does not fit this onnxfit, or is damaged")

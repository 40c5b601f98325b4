"""Trainer: a model, a loss, an optimizer, and the loop that brings them together."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

from onnxfit.adapters.lora import LoRA
from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.callback_list import CallbackList, as_list
from onnxfit.callbacks.history import History
from onnxfit.callbacks.progress import ProgressBar
from onnxfit.data import validation_split as split_rows
from onnxfit.data.structure import split_validation_data
from onnxfit.data.weights import balanced_class_weight
from onnxfit.distributed.find import world_of
from onnxfit.editing.dynamic_batch import dynamic_batch as any_batch
from onnxfit.errors import CheckpointError, SettingError
from onnxfit.graph.garbage import paused_collection
from onnxfit.graph.quantized import warn_of_quantized
from onnxfit.graph.reading import ModelSource, read_shared
from onnxfit.graph.sharing import warn_of_merged_weights, warn_of_untied_tables
from onnxfit.graph.tensors import initializer_arrays
from onnxfit.optimizers import OptimizerLike
from onnxfit.penalties import PenaltyLike
from onnxfit.quantization.settings import Quantization
from onnxfit.registry import check_arguments, checks_names, shortened
from onnxfit.runtime.backends import get_backend
from onnxfit.runtime.backends.manual import ManualTraining
from onnxfit.runtime.device import Device
from onnxfit.step.objectives import Losses, Metrics
from onnxfit.step.recipe import Recipe
from onnxfit.step.settings import TrainerSettings
from onnxfit.training import checkpoint
from onnxfit.training.epoch_iterator import EpochIterator
from onnxfit.training.forms import stored_settings, trainable_form
from onnxfit.training.inference import check_steps, refuse_number
from onnxfit.training.loop import FitLoop, Validation, validation_due
from onnxfit.training.ranks import (
    merged_over_ranks,
    refuse_two_scales,
    refuse_two_waits,
    require_same_fits,
    require_same_trainers,
)
from onnxfit.training.saved import matching_this_version
from onnxfit.training_folder.folder_trainer import FolderTrainer
from onnxfit.training_folder.manifest import is_training_folder
from onnxfit.training_folder.reading import read_training_folder

__all__ = ["Trainer"]

SETTINGS = tuple(field.name for field in fields(TrainerSettings))


class Trainer(FolderTrainer):
    """Train an ONNX model.

    - `model_onnx`: a path, bytes or an `onnx.ModelProto`, which is not changed.
    - `weights`: names and fnmatch patterns in any order, where `"!pattern"` excludes; None for
      every float initializer that is a weight, and every integer initializer behind a
      DequantizeLinear, which is trained as floats. Other weights stay byte-identical.
    - `loss`: a name, a Loss, a callable `(op, y_true, y_pred) -> Value`, or a dict output name ->
      loss; None if the model has a scalar output `loss` of its own, or only predicts.
    - `penalty`: None, a Penalty, a number (L2), or a dict pattern -> Penalty, number or
      `{"l1": a, "l2": b}`.
    - `optimizer`: a name, an Optimizer, or a number: SGD with that learning rate.
    - `metrics`: names, Metrics or callables `(y_true, y_pred) -> value per row`; with several
      outputs a dict output name -> metrics.
    - `loss_weights`: output name -> factor of its loss in the sum, a finite number, 1 by default.
    - `backend`: "full", one graph per step, the fastest; or "forward_backward", separate graphs,
      with gradients that callbacks and `apply_gradients` can change.
    - `gradient`: "onnx", rules in plain ONNX operators, for any onnxruntime; "onnxruntime", the
      builder of its training build; "auto", the rules, and the builder if they lack an operator.
    - `device`: "cpu", "cuda", "cuda:1", "webgpu", "openvino", "directml", "coreml" or "rocm",
      whatever the installed onnxruntime offers; the page "Devices" in docs compares them.
    - `seed`: a whole number that decides the order of rows, and dropout. The same seed gives the
      same weights, bit for bit, on one machine.
    - `batch_norm`: "train" normalizes by the batch and updates the running statistics; "frozen"
      uses them as they are.
    - `precision`: "float32"; "bf16" or "fp16" let the products of a training step compute in half
      precision, with weights, losses and the update in float32. Keras's names are known, too.
    - `clip_norm`, `clip_value`: bounds > 0 for the L2 norm of all gradients together, and for each
      of their elements; None and infinity clip nothing.
    - `accumulate`: number of batches, at least 1, whose gradients are averaged for one update.
    - `threads`: threads that onnxruntime uses for an operator, up to 1024; None leaves it to
      onnxruntime.
    - `dynamic_batch`: let batches have any size if the file fixes the batch; see the function
      `onnxfit.dynamic_batch`.
    - `distribute`: the processes that train together, each on its share of every batch: "auto",
      those that mpiexec started with this one; "mpi", "torch", or a communicator such as
      `onnxfit.distributed.MPI()`; None, this process alone.
    - `quantization`: for a file of integers, those that are trained and how; see
      `onnxfit.Quantization`. None trains the integers of every form that can train.
    - `adapters`: adapters of low rank, which train in the place of the weights they stand beside;
      see `onnxfit.LoRA`. Then `weights` names those that train besides, and None adds none.

    Threads: only one thread at a time may train, by `fit`, `train_on_batch`, `apply_gradients`,
    `set_state`, `restore` or `revert_step`; a second thread gets a SettingError. Other threads may
    predict, evaluate, export, and read or set weights meanwhile. They see the weights between two
    steps. `predict` uses the weights of its start for all rows; `evaluate` uses the current weights
    for each batch. Call `forward` and `backward` from one thread only.

    The constructor raises ModelError, GradientError, SettingError, UnknownNameError or
    InstallationError if training cannot work. A SettingError also reports a number of an optimizer,
    loss or penalty that would be infinite or 0 in the model's element type, such as 1e39 or an
    `eps` of 1e-50 in float32. A UserWarning names biases and scales that several layers share, as
    exporters write those of a fresh network: `onnxfit.untie` gives each layer its own.

    >>> import numpy as np, onnx.parser
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     line (float[N, 1] x) => (float[N, 1] y) <float[1, 1] slope = {0}, float[1] bias = {0}>
    ...     { scaled = MatMul(x, slope)  y = Add(scaled, bias) }''')
    >>> x = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
    >>> trainer = Trainer(model, loss="mean_squared_error", optimizer=0.5)
    >>> history = trainer.fit(x, 3 * x + 1, epochs=20, verbose=0)
    >>> {name: round(w.item(), 3) for name, w in trainer.get_weights().items()}
    {'slope': 3.0, 'bias': 1.0}
    """

    @checks_names
    @paused_collection()
    def __init__(
        self,
        model_onnx: ModelSource,
        weights: Sequence[str] | str | None = None,
        loss: Losses = None,
        penalty: PenaltyLike = None,
        optimizer: OptimizerLike = "sgd",
        *,
        metrics: Metrics = (),
        loss_weights: Mapping[str, float] | None = None,
        backend: str = "full",
        gradient: str = "auto",
        device: str = "cpu",
        seed: int = 0,
        batch_norm: str = "train",
        precision: str = "float32",
        clip_norm: float | None = None,
        clip_value: float | None = None,
        accumulate: int = 1,
        threads: int | None = None,
        dynamic_batch: bool = False,
        distribute: Any = "auto",
        quantization: Quantization | None = None,
        adapters: LoRA | Sequence[LoRA] | None = None,
    ) -> None:
        arguments = locals()
        settings = {name: arguments[name] for name in SETTINGS}
        backend_class = get_backend(backend)
        checked = TrainerSettings(**settings)
        model, tensors = read_shared(any_batch(model_onnx) if dynamic_batch else model_onnx)
        trainable = trainable_form(model, settings)
        distillation = None if quantization is None else quantization.distillation()
        recipe = Recipe.build(
            trainable,
            checked,
            needs_loss=backend_class.needs_loss,
            distillation=distillation,
        )
        # who chooses weights knows which ones train
        if weights is None and quantization is None and adapters is None:
            warn_of_quantized(recipe.model)
        arrays = initializer_arrays(trainable.model, recipe.state)
        settings = stored_settings(settings)
        world = world_of(distribute)
        teacher = None if distillation is None else distillation.teacher
        require_same_trainers(world, model, arrays, settings, teacher)
        refuse_two_waits(world, accumulate)
        refuse_two_scales(world, recipe.precision)
        runtime = backend_class(
            recipe,
            arrays,
            device=Device.parse(device),
            threads=world.threads(threads),
            accumulate=accumulate,
            world=world,
        )
        warn_of_merged_weights(model, recipe.weights)
        warn_of_untied_tables(model, {name: arrays[name] for name in recipe.weights})
        super().__init__(trainable, {**settings, "weights": list(recipe.weights)}, recipe, runtime)
        self._tensors = tensors  # the protos refer to them
        self._manual = ManualTraining(runtime) if runtime.steps_by_hand else None

    @check_arguments
    def fit(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        epochs: int = 1,
        batch_size: int = 32,
        validation_data: Any = None,
        validation_split: float = 0.0,
        validation_freq: int | Sequence[int] = 1,
        callbacks: Callback | Iterable[Callback] | None = (),
        class_weight: Mapping[int, float] | str | None = None,
        shuffle: bool = True,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        verbose: int | str = "auto",
    ) -> History:
        """Train, and return the History; every argument means what it means in Keras.

        - `x`: an array, a dict or list of arrays, or a loader: anything re-iterable that gives
          batches (`onnxfit.DataLoader`, a torch DataLoader, a function that returns an iterator).
        - `y`, `sample_weight`: labels, and a factor of the loss for each row, shape `(n,)`, or each
          label, `(n, tokens)`; in `x` if that is a loader. A factor may be negative. A row or label
          of weight 0 has no influence on loss, gradient and weighted metrics: if it holds NaN or
          infinity, another stands in for it. It still counts in the divisor of means, in
          BatchNormalization and in metrics without weights.
        - `epochs`: the number of the last epoch, counted from 1. `fit` runs `epochs` minus
          `initial_epoch` epochs.
        - `batch_size`: rows of a batch, if `x` is arrays.
        - `validation_data`: `(x, y)`, `(x, y, sample_weight)` or a loader, evaluated after epochs.
        - `validation_split`: fraction of the rows to validate on instead: the last ones.
        - `validation_freq`: n for every n-th epoch, or a list of epochs counted from 1.
        - `callbacks`: Callbacks, called in the order of their phases.
        - `class_weight`: label -> factor of the loss for its rows; or "balanced", rows / (classes *
          rows of the label), if `y` is an array.
        - `shuffle`: whether each epoch has a new order of rows.
        - `initial_epoch`: the number of epochs that count as done.
        - `steps_per_epoch`, `validation_steps`: number of batches, if not all of the data.
        - `validation_batch_size`: rows of a batch of the validation data, if not `batch_size`.
        - `verbose`: 0 silent, 1 a progress bar, 2 a line per epoch; "auto" 1 in a terminal or
          notebook, else 2.

        A DataError or SettingError is raised before the first step; weights, optimizer and history
        are then as before.
        """
        check_steps("validation_steps", validation_steps)
        refuse_number(sample_weight, "fit")
        if epochs < 0:
            raise SettingError(f"epochs is at least 0, got {shortened(epochs)}.")
        if validation_split:
            if validation_data is not None:
                raise SettingError("Give validation_data or validation_split, not both.")
            (x, y, sample_weight), validation_data = split_rows(
                x, y, sample_weight, validation_split
            )
        is_due = validation_due(validation_freq)
        if isinstance(class_weight, str):
            class_weight = balanced_class_weight(class_weight, y)
        with self._training.fitting(), self._world.turn("fit"), ExitStack() as stack:
            training = stack.enter_context(
                self._source(x, y, sample_weight, batch_size, "training", shuffle, class_weight)
            )
            validation, data = None, None
            if validation_data is not None:
                arrays = split_validation_data(validation_data)
                size = batch_size if validation_batch_size is None else validation_batch_size
                data = stack.enter_context(self._source(*arrays, size, "validation"))
                validation = Validation(data, is_due, validation_steps)
            callbacks = as_list(callbacks)
            for callback in callbacks:
                if isinstance(callback, Callback):  # CallbackList refuses everything else
                    callback.prepare(self)
            pending = self._pending_fit.from_epoch(initial_epoch)
            first = pending.position.epoch
            if epochs - first > 1 and steps_per_epoch is None:
                training.require_re_iterable(epochs - first)
            if validation is not None:
                validation.data.require_re_iterable(sum(map(is_due, range(first, epochs))))
            batches = EpochIterator(training, steps_per_epoch, self.epoch, pending.position)
            stack.callback(batches.close)
            history = History()
            has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
            bars = [ProgressBar(verbose)] if verbose and not has_bar else []
            params = {"epochs": epochs, "steps": batches.steps, "verbose": verbose}
            arguments = {"epochs": epochs, "initial_epoch": first}
            require_same_fits(self, arguments, training, data, callbacks)
            called = CallbackList(
                self, [*callbacks, history, *bars], params, pending.callbacks, self._world
            )
            return FitLoop(self, batches, validation, called, pending).run(epochs, history)

    def train_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None) -> dict[str, Any]:
        """Take one step on the rows of `x`, `y`, `sample_weight`.

        Return the loss and metrics of this batch alone, as they were before the update.
        """
        tracker = self._batch_tracker
        with (
            self._training,
            self._world.turn("train_on_batch"),
            self._single_batches.source("training", x, y, sample_weight) as data,
        ):
            self._world.meet("train_on_batch")
            for batch in data.batches(0):
                tracker.reset()
                self._step(batch, self.learning_rate, tracker)
            return merged_over_ranks(self._world, "train_on_batch", tracker)[0].results()

    # ------------------------------------------------------------------ training by hand

    def forward(self, inputs: Any, training: bool = True) -> Any:
        """Return the outputs for some rows, so that `backward` can follow.

        It needs `backend="forward_backward"`. `inputs` are an array, or a dict or list of arrays;
        or OrtValues, and then OrtValues come back. One output is returned as it is, several as a
        dict. Nothing is copied on the CPU: leave the arrays as they are until the backward pass;
        the outputs are read-only views. With `training=True` Dropout drops, running statistics
        follow the batch, and what the backward pass needs is kept, for any number of forward
        passes. With `training=False` it is inference.
        """
        manual = self._require_manual()
        arrays = manual.match_ort_values(inputs)
        if arrays is None:
            arrays = next(self._single_batches.whole("prediction", inputs).batches(0)).arrays()
        with self._backend.lock:
            return manual.forward(arrays, training, self.global_step, self.seed)

    def backward(self, output_gradients: Any, *, of: Any = None) -> dict[str, dict[str, Any]]:
        """Return `{"inputs": {name: gradient}, "weights": {name: gradient}}`.

        They are a vector-Jacobian product: `output_gradients` is an array like the output, or a
        dict output -> array (None for zeros). It belongs to the newest forward pass that waits, or
        to the one that returned the object `of`; each is good for one backward pass. Penalties are
        added by `apply_gradients`. DataError for a gradient that is missing or does not fit,
        SettingError if no forward pass waits or the weights have changed since.
        """
        manual = self._require_manual()
        with self._backend.lock:
            return manual.backward(output_gradients, of)

    def apply_gradients(self, gradients: Mapping[str, Any]) -> None:
        """Update by `gradients`, weight -> array, as `backward` returns under "weights".

        The penalties' gradients are added, `clip_norm` and `clip_value` applied. Forward passes
        that still wait are forgotten. Where several processes train together, each passes its own
        gradients, and their mean updates the weights of all.
        """
        manual = self._require_manual()
        with self._training, self._world.turn("apply_gradients"), self._backend.lock:
            self._world.meet("apply_gradients")
            changes = self._changes_of_frozen()
            manual.apply(gradients, self.learning_rate, self.global_step)
            self._restore_frozen(changes)
            self.global_step += 1

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        model_onnx: ModelSource | None = None,
        **settings: Any,
    ) -> Trainer:
        """Return the trainer that `save` wrote to `path`; its next `fit` resumes there.

        `path` may be a folder of `save_onnx_graph` or of `export_training`. `model_onnx` is the
        model of a checkpoint that was saved with `adapters_only=True`; SettingError for another
        one. `settings` replace the constructor's arguments of the same name; a loss, penalty,
        optimizer or metric of your own class must be given again, since a checkpoint holds no code,
        and so must `quantization` with a teacher. Of several processes, all call it; rank 0 reads
        the file, and the others get its contents, but each reads a folder of `export_training`.
        CheckpointError for a file that is no checkpoint, is damaged, or is from a newer onnxfit.
        """
        if is_training_folder(path):
            contents = read_training_folder(path, settings)
        else:
            world = world_of(settings.get("distribute", "auto"))
            contents = checkpoint.load(path, settings, world)
        contents.require_teacher(path)
        model = contents.with_base(path, model_onnx)
        with matching_this_version(path):
            try:
                trainer = cls(model, **contents.settings)
            except SettingError as error:
                if settings:  # the wrong one may be the caller's
                    raise
                raise CheckpointError(
                    f"{os.fspath(path)!r} has settings that no trainer takes: {error}"
                ) from error
            trainer._restore(contents)
        return trainer

    # ------------------------------------------------------------------ inside

    def _require_manual(self) -> ManualTraining:
        if self._manual is None:
            raise SettingError(
                "forward, backward and apply_gradients need separate graphs: Trainer(...,"
                " backend='forward_backward'), got 'full'."
            )
        return self._manual

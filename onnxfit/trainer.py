"""Trainer: a model, a loss, an optimizer, and the training loop."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from typing import Any

from onnxfit.adapters.lora import LoRA
from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.callback_list import CallbackList, as_list
from onnxfit.callbacks.history import History
from onnxfit.callbacks.progress import ProgressBar
from onnxfit.data.memory import split_rows
from onnxfit.data.structure import split_validation_data
from onnxfit.data.weights import balanced_class_weight
from onnxfit.distributed.find import world_of
from onnxfit.editing.dynamic_batch import dynamic_batch as any_batch
from onnxfit.errors import CheckpointError, SettingError
from onnxfit.graph.doubtful_weights import warn_of_weights
from onnxfit.graph.garbage import paused_collection
from onnxfit.graph.reading import ModelSource, read_shared
from onnxfit.graph.shared_tensors import shared_arrays
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
from onnxfit.training.carried import require_order
from onnxfit.training.epoch_iterator import EpochIterator
from onnxfit.training.forms import stored_settings, trainable_form, without_trained_numbers
from onnxfit.training.inference import check_steps, refuse_number
from onnxfit.training.loop import FitLoop, Validation, validation_due
from onnxfit.training.ranks import (
    merged_over_ranks,
    refuse_two_scales,
    refuse_two_waits,
    require_rows_to_share,
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
    - `weights`: names and fnmatch patterns in any order, where `"!pattern"` excludes; None for each
      float initializer or Constant node that is a weight, and each tensor of integers that a
      DequantizeLinear reads, which is trained as floats. Other weights stay byte-identical.
    - `loss`: a name, a Loss, a callable `(op, y_true, y_pred) -> Value`, or a dict output name ->
      loss; None if the model has its own scalar output `loss`, or is used for prediction only.
    - `penalty`: None, a Penalty, a number (L2), or a dict pattern -> Penalty, number or
      `{"l1": a, "l2": b}`.
    - `optimizer`: a name, an Optimizer, or a number: SGD with that learning rate.
    - `metrics`: names, Metrics, objects of Keras or torchmetrics, or functions `(y_true, y_pred) ->
      value per row`; with several outputs a dict output name -> metrics.
    - `loss_weights`: output name -> factor of its loss in the sum, a finite number, 1 by default.
    - `backend`: "full", one graph per step, the fastest; "forward_backward", separate graphs, with
      gradients that callbacks and `apply_gradients` can change; or "in_place", which saves memory.
      It has one set of weights and slots, and cannot undo an update. A step whose loss or gradient
      is not finite is skipped. It needs one process on the CPU.
    - `gradient`: "auto" or "onnx", rules in ONNX's operators, for any onnxruntime; "onnxruntime",
      the builder of its training build, which `pip install "onnxfit[ort-training]"` brings.
    - `device`: "cpu", "cuda", "cuda:1", "webgpu", "openvino", "directml", "coreml" or "rocm", if
      the installed onnxruntime supports it; the page "Devices" in docs compares them.
    - `seed`: a whole number, the random seed of the order of rows and of dropout. The same seed
      gives the same weights, bit for bit, on one machine.
    - `batch_norm`: "train" normalizes by the batch and updates the running statistics; "frozen"
      normalizes by the running statistics, without updates; "batch" always by the batch, also in
      predictions and exports, where the file does (`training_mode=1`).
    - `precision`: "float32"; or "bf16" or "fp16" to compute the products of a training step in half
      precision, with weights, losses and the update in float32; or, on CUDA alone, "tf32" to round
      the factors of products to 10 bits after the point. Keras's names work too.
    - `clip_norm`, `clip_value`: bounds > 0 for the global L2 norm of the gradients, and for each
      element of a gradient; None and infinity clip nothing.
    - `accumulate`: number of batches, at least 1, whose gradients are averaged for one update.
    - `threads`: threads that onnxruntime uses for an operator, up to 1024; None lets it choose.
    - `dynamic_batch`: allow any batch size if the file fixes the batch size; see the function
      `onnxfit.dynamic_batch`.
    - `stop_gradients`: names and patterns, as for `weights`, of values that all nodes read without
      a gradient, as after PyTorch's `detach`. An output keeps the gradient of its own loss.
    - `freeze_rows`: weight or pattern -> rows that keep their values, such as an embedding's row 0
      for padding: `{"emb.weight": [0]}`.
    - `fixed_inputs`: input -> its value in all batches, an array, or a number that fills its shape:
      `{"sr": 16000, "state": 0}`. The input is then no part of the data; an export still has it.
    - `state_outputs`: output -> the input that gets it in the next batch, `{"hn": "h0"}`, without a
      gradient through it. A sequence goes on in the same row of the next batch, and begins with
      zeros, or the input's value in `fixed_inputs`; see `reset_states`.
    - `distribute`: the processes that train together, each on its share of every batch: "auto" for
      the processes that mpiexec started together; "mpi", "torch", or a communicator such as
      `onnxfit.distributed.MPI()`; None for this process alone.
    - `quantization`: which integers of a quantized file are trained, and how; see
      `onnxfit.Quantization`. None trains the integers in every trainable form.
    - `adapters`: low-rank adapters, which are trained instead of the weights of their layers; see
      `onnxfit.LoRA`. Then `weights` names weights to train in addition; None adds no weights.

    Threads: only one thread at a time may train, by `fit`, `train_on_batch`, `apply_gradients`,
    `set_state`, `restore` or `revert_step`; a second thread gets a SettingError. During training,
    other threads may predict, evaluate, export, save, and read or set weights. They see the state
    between two steps. `save` waits for the metrics of a batch. `predict` uses the weights at its
    start for all rows; `evaluate` uses the current weights for each batch. Call `forward` and
    `backward` from one thread only. Ctrl-C and other signals whose handlers are written in Python
    take effect between two steps; the second Ctrl-C in a step ends it, and the step is undone.

    ModelError, GradientError, SettingError, UnknownNameError or InstallationError: training cannot
    work. A SettingError also reports a number of an optimizer, loss or penalty that would be
    infinite or 0 in the model's element type, such as 1e39 or an `eps` of 1e-50 in float32. A
    UserWarning names biases and scales that several layers share, because exporters merge equal
    tensors of an untrained network: `onnxfit.untie` gives each layer its own.

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
        stop_gradients: Sequence[str] | str | None = None,
        freeze_rows: Mapping[str, Sequence[int]] | None = None,
        fixed_inputs: Mapping[str, Any] | None = None,
        state_outputs: Mapping[str, str] | None = None,
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
            trainable, checked, needs_loss=backend_class.needs_loss, distillation=distillation
        )
        arrays = initializer_arrays(trainable.model, recipe.state)
        settings = stored_settings(settings)
        world = world_of(distribute)
        teacher = None if distillation is None else distillation.teacher
        require_same_trainers(world, model, arrays, settings, teacher)
        require_rows_to_share(world, recipe)
        refuse_two_waits(world, accumulate)
        refuse_two_scales(world, recipe.precision)
        warn_of_weights(model, recipe.model, {n: arrays[n] for n in recipe.weights}, settings)
        trainable = without_trained_numbers(trainable, recipe)
        model, tensors = trainable.file, shared_arrays(trainable.file)
        runtime = backend_class(
            recipe,
            arrays,
            device=replace(Device.parse(device), tf32=recipe.precision.tf32),
            threads=world.threads(threads),
            accumulate=accumulate,
            world=world,
        )
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
        """Train, and return the History. All arguments have the same meaning as in Keras.

        - `x`: an array, a dict or list of arrays, or a loader: anything re-iterable that gives
          batches (`onnxfit.DataLoader`, a torch DataLoader, a function that returns an iterator).
        - `y`, `sample_weight`: labels, and a factor of the loss for each row, shape `(n,)`, or each
          label, `(n, tokens)`, or a dict output -> factors; a loader `x` contains them instead. A
          factor may be negative. A row or label of weight 0 has no influence on loss, gradient and
          weighted metrics, even if it is NaN or infinite. It still counts in the divisor of means,
          in BatchNormalization and in metrics without weights.
        - `epochs`: the number of the last epoch, counted from 1. `fit` runs `epochs` minus
          `initial_epoch` epochs.
        - `batch_size`: rows of a batch, if `x` consists of arrays.
        - `validation_data`: `(x, y)`, `(x, y, sample_weight)` or a loader, evaluated after epochs.
        - `validation_split`: instead, the fraction of the rows, taken from the end, to validate on.
        - `validation_freq`: n for every n-th epoch, or a list of epochs counted from 1.
        - `callbacks`: Callbacks, called in the order of their phases.
        - `class_weight`: label -> factor of the loss for the rows with this label; or "balanced",
          rows / (classes * rows of the label), if `y` is an array.
        - `shuffle`: whether each epoch has a new order of rows.
        - `initial_epoch`: the number of epochs that count as finished.
        - `steps_per_epoch`, `validation_steps`: number of batches; None uses all data.
        - `validation_batch_size`: rows of a validation batch; None uses `batch_size`.
        - `verbose`: 0 silent, 1 a progress bar, 2 a line per epoch; "auto" 1 in a terminal or
          notebook, else 2.

        A DataError or SettingError is raised before the first step; weights, optimizer and history
        are then unchanged.
        """
        check_steps("validation_steps", validation_steps)
        refuse_number(sample_weight, "fit")
        if epochs < 0:
            raise SettingError(f"epochs must be >= 0, got {shortened(epochs)}.")
        if validation_split:
            if validation_data is not None:
                raise SettingError("Pass validation_data or validation_split, not both.")
            inputs = {spec.name: spec for spec in self.inputs}
            (x, y, sample_weight), validation_data = split_rows(
                x, y, sample_weight, validation_split, inputs
            )
        is_due = validation_due(validation_freq)
        require_order(self._recipe, x, shuffle)
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
                if isinstance(callback, Callback):  # CallbackList raises an error for other objects
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

        Return the loss and metrics of this batch alone, computed before the update.
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
                with self._training.advancing:
                    self._step(batch, self.learning_rate, tracker)
            return merged_over_ranks(self._world, "train_on_batch", tracker)[0].results()

    # ------------------------------------------------------------------ training by hand

    def forward(self, inputs: Any, training: bool = True) -> Any:
        """Return the outputs for some rows, so that `backward` can follow.

        It needs `backend="forward_backward"`. `inputs` are an array, or a dict or list of arrays;
        or OrtValues, which give OrtValues as outputs. A single output is returned alone, several as
        a dict. Nothing is copied on the CPU: do not modify the arrays before the backward pass; the
        outputs are read-only views. With `training=True`, Dropout is active, running statistics are
        updated, and the values for the backward pass are kept, for any number of forward passes.
        `training=False` is inference.
        """
        manual = self._require_manual()
        if self._recipe.state_outputs:
            raise SettingError("forward takes states as inputs. Create it without state_outputs=.")
        arrays = manual.match_ort_values(inputs)
        if arrays is None:
            arrays = next(self._single_batches.whole("prediction", inputs).batches(0)).arrays()
        with self._backend.lock:
            return manual.forward(arrays, training, self.global_step, self.seed)

    def backward(self, output_gradients: Any, *, of: Any = None) -> dict[str, dict[str, Any]]:
        """Return `{"inputs": {name: gradient}, "weights": {name: gradient}}`.

        The gradients are a vector-Jacobian product: `output_gradients` is an array of the output's
        shape, or a dict output -> array (None for zeros). It belongs to the newest pending forward
        pass, or to the forward pass that returned the object `of`. Each forward pass allows one
        backward pass. `apply_gradients` adds penalties. DataError: a gradient is missing or does
        not fit. SettingError: no forward pass is pending, or the weights have changed since.
        """
        manual = self._require_manual()
        with self._backend.lock:
            return manual.backward(output_gradients, of)

    def apply_gradients(self, gradients: Mapping[str, Any]) -> None:
        """Update the weights with `gradients`, weight -> array, as `backward` returns them.

        The penalties' gradients are added, and `clip_norm` and `clip_value` are applied. Pending
        forward passes are discarded. If several processes train together, each passes its own
        gradients, and their mean updates the weights of all.
        """
        manual = self._require_manual()
        with self._training, self._world.turn("apply_gradients"), self._training.advancing:
            self._world.meet("apply_gradients")
            done = self.global_step - self._first_step
            with self._backend.lock, self._frozen_tensors.kept():
                manual.apply(gradients, self.learning_rate, done)
            self.global_step += 1

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        model_onnx: ModelSource | None = None,
        **settings: Any,
    ) -> Trainer:
        """Return the trainer that `save` wrote to `path`; its next `fit` resumes the training.

        `path` may be a folder of `save_onnx_graph` or of `export_training`. `model_onnx` is the
        model of a checkpoint that was saved with `adapters_only=True`; SettingError: it is another
        model. `settings` replace the constructor's arguments, and the state for them: an optimizer
        sets the learning rate, and slots that the checkpoint lacks begin anew. Of other `weights`,
        those in both keep their slots. Pass a custom loss, penalty, optimizer or metric again, as a
        checkpoint contains no code; also `quantization` with a teacher. With several processes, all
        must call it; rank 0 reads the file, but every rank reads a training folder.
        CheckpointError: the file is not a checkpoint, is damaged, or is from a newer onnxfit.
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
                if settings:  # the wrong setting may be an argument of this call
                    raise
                raise CheckpointError(
                    f"{os.fspath(path)!r} has settings that are not valid for a Trainer: {error}"
                ) from error
            trainer._restore(contents, settings)
        return trainer

    # ------------------------------------------------------------------ inside

    def _require_manual(self) -> ManualTraining:
        if self._manual is None:
            raise SettingError(
                "forward, backward and apply_gradients need Trainer(...,"
                " backend='forward_backward'), got backend='full'."
            )
        return self._manual

"""Trainer: a model, a loss, an optimizer, and the training loop."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnx

from onnxfit.callbacks.callback import Callback
from onnxfit.callbacks.callback_list import CallbackList, as_list
from onnxfit.callbacks.history import History
from onnxfit.callbacks.progress import ProgressBar
from onnxfit.checks import check_arguments, checks_names, shortened
from onnxfit.data.memory import split_rows
from onnxfit.data.sampling import Sampling
from onnxfit.data.structure import split_validation_data
from onnxfit.data.weights import balanced_class_weight
from onnxfit.distributed.find import world_of
from onnxfit.errors import (
    CheckpointError,
    SettingError,
    UnsupportedError,
    out_of_memory_errors,
)
from onnxfit.files import require_checkpoint_name, require_path
from onnxfit.gradients.inspection import Inspection
from onnxfit.graph.doubtful_weights import warn_of_weights
from onnxfit.graph.garbage import gc_disabled
from onnxfit.graph.spec import TensorSpec
from onnxfit.load.model_file import ModelSnapshot
from onnxfit.load.reading import ModelSource, read_model
from onnxfit.metrics.functions import mode_by_name
from onnxfit.optimizers.lookup import OptimizerLike
from onnxfit.penalties import PenaltyLike
from onnxfit.runtime.backends import get_backend
from onnxfit.runtime.backends.manual import ManualTraining
from onnxfit.runtime.device import Device
from onnxfit.step.distillation import Distillation
from onnxfit.step.objectives import Losses, LossWeights, Metrics, OutputMetric
from onnxfit.step.recipe_builder import build_recipe
from onnxfit.step.reuse import RECIPES
from onnxfit.step.settings import TrainerSettings
from onnxfit.trainable.adapters.lora import LoRA
from onnxfit.trainable.quantized.settings import Quantization
from onnxfit.training import checkpoint, export, forms, generation, saving
from onnxfit.training.card import card
from onnxfit.training.carried import require_order
from onnxfit.training.epoch_iterator import EpochIterator
from onnxfit.training.evaluation import Evaluator, as_keras, check_steps, refuse_number
from onnxfit.training.hints import CheckedAttributes, Delegate
from onnxfit.training.lineage import lineage_of
from onnxfit.training.loop import (
    TOO_LATE_FOR_BATCH_SIZE,
    FitLoop,
    RanksFitLoop,
    Validation,
    validation_due,
)
from onnxfit.training.optimizer_view import OptimizerView
from onnxfit.training.ranks import (
    check_accumulate_with_averaging,
    check_loss_scaling_with_averaging,
    merged_over_ranks,
    require_rows_to_share,
    require_same_fits,
    verify_identical_trainers,
)
from onnxfit.training.summary import summary, training_html
from onnxfit.training.training import Training
from onnxfit.training.trial import trial_steps
from onnxfit.training_folder.export import export_training, import_state
from onnxfit.training_folder.manifest import GRAPHS, is_training_folder
from onnxfit.training_folder.reading import read_training_folder

__all__ = ["Trainer"]

Array = npt.NDArray[Any]
SETTINGS = tuple(field.name for field in fields(TrainerSettings))

# What an error says when memory runs out.
FREE_MEMORY = "Free memory, for instance that of training data, and call it again."
NO_COPY = "Pass copy=False for views of the weights without a copy."
EXPORT_TO_PATH = (
    "export(path) writes the model from the memory of the training, and returns a model above 512"
    " MB without a copy of its weights."
)
BY_CALLBACKS = (
    "Pass copy=False, or background=False to a callback, to write from the memory of the training."
)


class Trainer(CheckedAttributes):
    """Train an ONNX model.

    - `model_onnx`: a path, bytes or an `onnx.ModelProto`, which is not changed.
    - `weights`: names and fnmatch patterns in any order, where `"!pattern"` excludes; None for each
      float initializer or Constant node that is a weight, and each tensor of integers that a
      DequantizeLinear reads, which is trained as floats. Other weights stay byte-identical.
    - `loss`: a name, a Loss, a callable `(op, y_true, y_pred) -> Value`, or a dict output name ->
      loss; None if the model has its own scalar output `loss`, or is used for prediction only. A
      `losses.Function` declares labels of any shape; a `losses.Joint` reads several outputs, and
      has a name of its own in a dict.
    - `penalty`: None, a Penalty, a number (L2), or a dict pattern -> Penalty, number or
      `{"l1": a, "l2": b}`.
    - `optimizer`: a name, an Optimizer, or a number: SGD with that learning rate.
    - `metrics`: names, Metrics, objects of Keras or torchmetrics, or functions `(y_true, y_pred) ->
      value per row`; with several outputs a dict output name -> metrics.
    - `loss_weights`: output name -> factor of its loss in the sum, a finite number, 1 by default;
      or `losses.UncertaintyWeights()`, which learns the factors.
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
      the factors of products to 10 bits after the point; or, on the CPU alone, "bf16x3" to compute
      each matrix product as three products of bfloat16. Keras's names work too.
    - `clip_norm`, `clip_value`: bounds > 0 for the global L2 norm of the gradients, and for each
      element of a gradient; None and infinity clip nothing.
    - `clip_adaptive`: a bound > 0, such as 0.01, for the L2 norm of a unit's gradient relative to
      the norm of the unit's weights, which counts as at least 0.001 (Brock et al. 2021, arXiv:
      2102.06171; timm's `adaptive_clip_grad`). A unit is a column of a matrix (inputs, outputs), a
      row of a transposed one, a filter, or a row of an embedding table; a bias or the scale of a
      norm is one unit. It comes before the other two; None and infinity clip nothing.
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
    - `batch_axes`: input or output -> the axis of its batch, or None for a value without one, where
      the file does not name the batch axis, or names a wrong one: `{"y": 1, "table": None}`.
      `summary` says which axes were found. An output without a batch needs batches of one row for
      its loss.
    - `distribute`: the processes that train together, each on its share of every batch: "auto" for
      the processes that mpiexec started together; "mpi", "torch", or a communicator such as
      `onnxfit.distributed.MPI()`; None for this process alone.
    - `teacher`: a larger or more exact model, whose outputs are learned beside the labels: a path,
      bytes or an `onnx.ModelProto`; see `onnxfit.Distillation` for its settings.
    - `quantization`: which integers of a quantized file are trained, and how; see
      `onnxfit.Quantization`. None trains the integers in every trainable form.
    - `adapters`: low-rank adapters, which are trained instead of the weights of their layers; see
      `onnxfit.LoRA`. Then `weights` names weights to train in addition; None adds no weights.

    Attributes, which callbacks read:

    - `settings`: the arguments of the constructor, `weights` as a list of names.
    - `epoch`, `global_step`, `global_batch`, `samples_seen`: epochs, updates, batches and rows
      trained so far, over all fits.
    - `optimizer`: the settings of the optimizer. Its `learning_rate` is the one in force, and can
      be set, also by `assign`, as in callbacks for Keras.
    - `history`: the History of the running fit, or of the last one.
    - `train_losses_`: the mean loss of every epoch so far.
    - `last_losses`: the losses of the last five batches.
    - `stop_training`, `stop_reason`: set them in a hook to end the running fit, and to say why.
      With several processes, rank 0 decides: values set on other ranks are replaced after the hook.

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

    seed = Delegate[int]("seed")
    epoch = Delegate[int]("state", "epoch")
    global_step = Delegate[int]("state", "global_step")
    global_batch = Delegate[int]("state", "global_batch")
    samples_seen = Delegate[int]("state", "samples_seen")
    history = Delegate[History]("history")
    train_losses_ = Delegate[list[float]]("train_losses")
    last_losses = Delegate[deque[float]]("last_losses")
    stop_training = Delegate[bool]("stop_training")
    stop_reason = Delegate[str | None]("stop_reason")

    @checks_names
    @gc_disabled()
    def __init__(
        self,
        model_onnx: ModelSource,
        weights: Sequence[str] | str | None = None,
        loss: Losses = None,
        penalty: PenaltyLike = None,
        optimizer: OptimizerLike = "sgd",
        *,
        metrics: Metrics = (),
        loss_weights: LossWeights = None,
        backend: str = "full",
        gradient: str = "auto",
        device: str = "cpu",
        seed: int = 0,
        batch_norm: str = "train",
        precision: str = "float32",
        clip_norm: float | None = None,
        clip_value: float | None = None,
        clip_adaptive: float | None = None,
        accumulate: int = 1,
        threads: int | None = None,
        dynamic_batch: bool = False,
        stop_gradients: Sequence[str] | str | None = None,
        freeze_rows: Mapping[str, Sequence[int]] | None = None,
        fixed_inputs: Mapping[str, Any] | None = None,
        state_outputs: Mapping[str, str] | None = None,
        batch_axes: Mapping[str, int | None] | None = None,
        distribute: Any = "auto",
        teacher: Distillation | ModelSource | None = None,
        quantization: Quantization | None = None,
        adapters: LoRA | Sequence[LoRA] | None = None,
    ) -> None:
        arguments = locals()
        settings = {name: arguments[name] for name in SETTINGS}
        backend_class = get_backend(backend)
        checked = TrainerSettings(**settings)
        trainable = forms.trainable_form(
            read_model(forms.source_of(model_onnx, settings)), settings
        )
        distillation = Distillation.of(teacher)
        if distillation is not None:
            distillation = distillation.with_teacher_read()
        recipe = RECIPES.recipe(
            trainable,
            checked,
            # no variable of this function, which would keep the file's numbers in memory
            partial(
                build_recipe,
                trainable,
                checked,
                needs_loss=backend_class.needs_loss,
                distillation=distillation,
            ),
        )
        arrays = recipe.initial_arrays(trainable.model)
        given, settings = settings, forms.stored_settings(settings)
        world = world_of(distribute)
        verify_identical_trainers(world, trainable.file.proto, arrays, settings, distillation)
        require_rows_to_share(world, recipe)
        check_accumulate_with_averaging(world, accumulate)
        check_loss_scaling_with_averaging(world, recipe.precision)
        trained = {name: arrays[name] for name in recipe.weights}
        warn_of_weights(trainable.file.proto, recipe.model, trained, settings)
        trainable = forms.without_trained_numbers(trainable, recipe)
        runtime = backend_class(
            recipe,
            arrays,
            device=replace(Device.parse(device), tf32=recipe.precision.tf32),
            threads=world.threads(threads),
            accumulate=accumulate,
            world=world,
        )
        excluded = [f"!{name}" for name in recipe.loss_weights if name not in recipe.state]
        settings = {**settings, "weights": [*recipe.weights, *excluded]}
        self._training = Training(trainable, settings, recipe, runtime)
        self._training.lineage = lineage_of(given, settings, distillation)
        self._manual = ManualTraining(runtime) if runtime.steps_by_hand else None
        self.settings = settings
        self.loss = loss
        self.backend = backend
        self.optimizer = OptimizerView(recipe.optimizer, self._training.state)
        self.objectives = recipe.objectives
        self._is_complete = True

    @check_arguments
    def fit(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        epochs: int = 1,
        batch_size: int | None = 32,
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
        - `batch_size`: rows of a batch, if `x` consists of arrays; None means 32.
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
        require_order(self._training.recipe, x, shuffle)
        if isinstance(class_weight, str):
            class_weight = balanced_class_weight(class_weight, y)
        training, evaluator = self._training, self._evaluator
        with training.guard.fitting(), training.world.collective("fit"), ExitStack() as stack:
            given = x, y, sample_weight, batch_size, "training", shuffle, class_weight
            source = stack.enter_context(training.source(*given))
            validation, validation_source = None, None
            if validation_data is not None:
                arrays = split_validation_data(validation_data)
                size = batch_size if validation_batch_size is None else validation_batch_size
                validation_source = stack.enter_context(
                    training.source(*arrays, size, "validation")
                )
                validation = Validation(validation_source, is_due, validation_steps)
            callbacks = as_list(callbacks)
            for callback in callbacks:
                if isinstance(callback, Callback):  # CallbackList raises an error for other objects
                    callback.prepare(self)
            # After `prepare`, in which BackupAndRestore may restore a checkpoint.
            pending = training.pending_fit.from_epoch(initial_epoch)
            first = pending.position.epoch
            if epochs - first > 1 and steps_per_epoch is None:
                source.require_re_iterable(epochs - first)
            if validation is not None:
                validation.data.require_re_iterable(sum(map(is_due, range(first, epochs))))
            batches = EpochIterator(source, steps_per_epoch, self.epoch, pending.position)
            stack.callback(batches.close)
            history = next((one for one in callbacks if isinstance(one, History)), None)
            if history is None:
                history = History()
                callbacks = [*callbacks, history]
            has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
            bars = [ProgressBar(verbose)] if verbose and not has_bar else []
            params = {"epochs": epochs, "steps": batches.steps, "verbose": verbose}
            arguments = {"epochs": epochs, "initial_epoch": first}
            require_same_fits(training, arguments, source, validation_source, callbacks)
            called = CallbackList(
                self, [*callbacks, *bars], params, pending.callbacks, training.world
            )
            kind = FitLoop if training.world.size == 1 else RanksFitLoop
            loop = kind(training, evaluator, batches, validation, called, pending)
            recorded = {
                "initial_epoch": initial_epoch,
                "steps_per_epoch": steps_per_epoch,
                "validation_split": validation_split,
                "class_weight": class_weight,
            }
            return loop.run(epochs, history, recorded)

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | str | None = None,
        *,
        return_dict: bool = True,
    ) -> Any:
        """Take one step on the rows of `x`, `y`, `sample_weight`.

        Return the loss and metrics of this batch alone, computed before the update, as a dict from
        name to value.

        - `class_weight`: as in `fit`; "balanced" counts the classes of this batch.
        - `return_dict`: False returns Keras's list of values, as in `evaluate`.
        """
        if isinstance(class_weight, str):
            class_weight = balanced_class_weight(class_weight, y)
        training = self._training
        tracker = training.batch_tracker
        training.lineage.mark(training, "train_on_batch")
        with (
            training.guard,
            training.world.collective("train_on_batch"),
            training.single_batches.source("training", x, y, sample_weight, class_weight) as data,
        ):
            training.world.barrier("train_on_batch")
            for batch in data.batches(0):
                tracker.reset()
                with training.guard.advancing:
                    training.step(batch, training.state.learning_rate, tracker)
            merged, _ = merged_over_ranks(training.world, "train_on_batch", tracker)
            return as_keras(merged.results(), return_dict)

    # ------------------------------------------------------------------ evaluation

    @check_arguments
    def evaluate(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: int | None = 32,
        steps: int | None = None,
        callbacks: Callback | Iterable[Callback] | None = (),
        verbose: int | str = 0,
        return_dict: bool = True,
    ) -> Any:
        """Return loss and metrics over a data set. The result is exact for any batch size.

        A loss of `reduction="sum"` is the sum over all rows. Penalties are added once.

        - `x`, `y`, `sample_weight`, `batch_size`, `callbacks`: as in `fit`.
        - `steps`: the number of batches; None evaluates all data.
        - `verbose`: 0 silent, 1 a progress bar, 2 a line at the end, "auto" 1 in a terminal, else
          0.
        - `return_dict`: True for a dict from name to value. False for Keras's list of values, or
          for the loss alone if there are no metrics.

        The values are floats; a confusion matrix is an array.
        """
        check_steps("steps", steps)
        refuse_number(sample_weight, "evaluate")
        evaluator = self._evaluator
        with (
            self._training.source(x, y, sample_weight, batch_size, "evaluation") as data,
            evaluator.calling(callbacks, "evaluate") as called,
        ):
            results = evaluator.evaluate(data, called, steps, verbose)
        return as_keras(results, return_dict)

    @check_arguments
    def predict(
        self,
        x: Any,
        *,
        batch_size: int | None = 32,
        steps: int | None = None,
        callbacks: Callback | Iterable[Callback] | None = (),
        verbose: int | str = 0,
    ) -> Any:
        """Return the model's outputs for every row, in the order of the rows.

        - `x`, `batch_size`, `callbacks`: as in `fit`.
        - `steps`, `verbose`: as in `evaluate`.

        A single output is an array, several outputs are a dict. An output has the layout of the
        file, such as [time, batch, classes]. If its sizes, apart from the rows, differ between
        batches, as with sequences of several lengths, or if it has no rows, the output is a list of
        arrays, one per batch. A trainer without a loss can predict, too.

        The trained model is compiled first, so that predictions equal the predictions of the
        exported file bit for bit; `predict_on_batch` does not compile. With more than 512 MB of
        frozen weights, which all graphs share, nothing is compiled, and predictions equal those of
        the exported file within rounding.
        """
        check_steps("steps", steps)
        evaluator, backend = self._evaluator, self._training.backend
        with (
            self._training.source(x, None, None, batch_size, "prediction") as data,
            evaluator.calling(callbacks, "predict") as called,
        ):
            return evaluator.predict(data, called, backend.deployed, steps, verbose)

    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, *, return_dict: bool = True
    ) -> Any:
        """Return the loss and metrics of the rows of `x`, `y`, `sample_weight`.

        - `return_dict`: as in `evaluate`.
        """
        training, evaluator = self._training, self._evaluator
        with (
            training.single_batches.source("evaluation", x, y, sample_weight) as data,
            evaluator.calling((), "test_on_batch") as called,
        ):
            carried = training.carried_in["evaluation"]
            return as_keras(evaluator.evaluate(data, called, carried=carried), return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """Return the model's outputs for the rows of `x`, in one run; fast between two steps.

        A quantized model is compiled again after a step, as for `predict`.
        """
        training, evaluator = self._training, self._evaluator
        with (
            training.single_batches.source("prediction", x) as data,
            evaluator.calling((), "predict_on_batch") as called,
        ):
            carried = training.carried_in["prediction"]
            run = training.backend
            return evaluator.predict(data, called, lambda: run.predict, carried=carried)

    @check_arguments
    def generate(
        self,
        prompts: Any,
        *,
        max_new_tokens: int = 32,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | None = None,
        seed: int = 0,
        output: str | None = None,
        input_names: Mapping[str, str] | None = None,
    ) -> list[list[int]]:
        """Return prompts with the tokens that a language model adds.

        A model with key-value caches processes each prompt once, and then one token at a time. Any
        other model processes the whole text for each token, in batches of one shape. The first call
        compiles a graph, which serves all later calls and weights; a quantized model is compiled
        again after a step. A model with more than 64 MB of packed 4-bit weights is compiled again
        after an evaluation or a prediction.

        - `prompts`: lists of token ids.
        - `max_new_tokens` >= 1: tokens to add to a prompt.
        - `temperature` >= 0: 0 takes the likeliest token; otherwise a token is drawn from
          softmax(logits / temperature).
        - `top_k` >= 1: draw from the likeliest k tokens only; None draws from all.
        - `top_p` in (0, 1]: draw from the smallest set of likeliest tokens whose probabilities add
          up to `top_p` (Holtzman et al. 2019, arXiv:1904.09751); None draws from all.
        - `eos_token_id`: the id that ends a text; None ends it after `max_new_tokens`.
        - `seed`: the seed of the random draws, together with the index of the prompt.
        - `output`: the output with the logits, shape `(batch, tokens, vocabulary)`. None takes the
          output that has a loss.
        - `input_names`: names of the model's inputs, as for `TextLoader`, which makes the inputs.

        If the model has a fixed number of tokens, only the last tokens of a longer text are used.
        Returns a list of ids for each prompt. SettingError: a setting is impossible, there is no
        prompt, or the output has another shape.
        """
        sampling = Sampling(temperature, top_k, top_p)
        return generation.Generator(self._training, self._evaluator).generate(
            prompts, sampling, max_new_tokens, eos_token_id, seed, output, input_names
        )

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
        own, manual = self._training, self._require_manual()
        if own.recipe.state_outputs:
            raise SettingError("forward takes states as inputs. Create it without state_outputs=.")
        arrays = manual.match_ort_values(inputs)
        if arrays is None:
            arrays = next(own.single_batches.whole("prediction", inputs).batches(0)).arrays()
        with own.backend.lock:
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
        with self._training.backend.lock:
            return manual.backward(output_gradients, of)

    def apply_gradients(self, gradients: Mapping[str, Any]) -> None:
        """Update the weights with `gradients`, weight -> array, as `backward` returns them.

        The penalties' gradients are added, and the gradients are clipped. Pending
        forward passes are discarded. If several processes train together, each passes its own
        gradients, and their mean updates the weights of all.
        """
        training, manual = self._training, self._require_manual()
        state = training.state
        training.lineage.mark(training, "apply_gradients")
        with training.guard, training.world.collective("apply_gradients"), training.guard.advancing:
            training.world.barrier("apply_gradients")
            with training.backend.lock, state.frozen.kept():
                manual.apply(gradients, state.learning_rate, state.updates)
            state.global_step += 1

    # ------------------------------------------------------------------ settings that may change

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update, a finite number >= 0.

        A value set here applies until another value is set. UnsupportedError (a TypeError): the
        optimizer follows a schedule.
        """
        return self._training.state.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._training.state.learning_rate = value

    @property
    def accumulate(self) -> int:
        """Number of batches whose gradients are averaged for one update.

        It can be set at any time if the Trainer was created with 2 or more.
        """
        return self._training.accumulate

    @accumulate.setter
    def accumulate(self, value: int) -> None:
        self._training.accumulate = value

    @property
    def frozen(self) -> tuple[str, ...]:
        """Weights and running statistics that no step changes; their slots do not change either.

        Set it to names or fnmatch patterns (UnknownNameError: a pattern matches nothing), or to
        `()`. The gradients are still computed, and `clip_norm` counts them; after a step the old
        values are copied back. A checkpoint does not contain the names: set them again after
        `Trainer.load`. To freeze weights permanently, leave them out of `weights=`.
        """
        return self._training.state.frozen.weights

    @frozen.setter
    def frozen(self, patterns: Sequence[str] | str) -> None:
        self._training.state.freeze(patterns)

    @property
    def batch_size(self) -> int | None:
        """Rows of a batch in the running fit, or in the last fit; None if the data determines it.

        A callback can set it in `on_train_begin`. SettingError: the data comes in batches.
        DataError: the model's batch size is fixed.
        """
        fit = self._training.fit_state
        return None if fit is None else fit.batches.data.batch_size

    @batch_size.setter
    def batch_size(self, value: int) -> None:
        fit = self._training.fit_state
        if fit is None:
            raise SettingError(TOO_LATE_FOR_BATCH_SIZE)
        fit.set_batch_size(value, self._training.world)

    @property
    def metrics(self) -> list[OutputMetric]:
        """Metrics of training: each with its name in logs, its output, and its `mode`."""
        return list(self._training.recipe.metrics)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Name, type and shape of each input of the model, and the axis of the batch."""
        return self._training.recipe.data_inputs

    # ------------------------------------------------------------------ for callbacks

    @check_arguments
    def monitor_mode(self, monitor: str) -> str:
        """Return "min" if smaller values of the figure `monitor` are better, otherwise "max".

        The mode of the metric of that name is used. For other figures, the name determines it.
        """
        name = monitor.removeprefix("val_")
        for metric in self._training.recipe.metrics:
            if name == metric.name or name in metric.figures:
                return metric.mode
        return mode_by_name(name)

    def log(self, name: str, value: float) -> None:
        """Add the figure `value` as `name` to the logs of the current hook, for later callbacks.

        SettingError: no hook is running.
        """
        callbacks = self._training.thread.callbacks
        if callbacks is None:
            raise SettingError(
                f"trainer.log({name!r}, ...) adds to the logs of the running hook, and no hook is"
                " running. Call it inside a hook of a callback."
            )
        callbacks.log(name, value)

    @property
    def predicted(self) -> dict[str, Array]:
        """Output -> array of the batch that was just predicted, in `on_predict_batch_end`."""
        return self._training.thread.current_outputs

    def reset_states(self, rows: Sequence[int] | None = None) -> None:
        """Begin new sequences: return the states of `state_outputs` to their first values.

        States begin anew in each epoch, evaluation and prediction. Call this method in a hook, such
        as `on_train_batch_end`, where sequences begin in between, and before a single batch of
        another sequence. In a hook of an evaluation or prediction, it resets the states of that
        one, and otherwise those of training and of all methods for single batches.

        - `rows`: the rows of the next batch in which a sequence begins, as numbers or as a mask;
          None for all rows.

        SettingError: the trainer has no states, or there are no such rows.
        """
        training = self._training
        if not training.recipe.state_outputs:
            raise SettingError(
                "reset_states needs a trainer with states: Trainer(..., state_outputs={'output':"
                " 'input'})."
            )
        running = training.thread.carried
        own = [*training.carried_in.values(), training.state.carried]
        for states in own if running is None else [running]:
            states.reset(rows)

    @check_arguments
    def trial_steps(
        self, rates: Iterable[float], epochs: int | None = 1, batch_size: int | None = None
    ) -> Generator[float, None, None]:
        """Take one step at each learning rate of `rates`, and undo all steps at the end.

        Use it in `on_train_begin` and `on_train_end` of a callback. No hook is called. It yields
        the loss of each step. The data is iterated at most `epochs` times (None: as often as
        needed). With a `batch_size`, only full batches of that many rows are used; data with fewer
        rows gives no step. SettingError: it is called at another time. DataError: the data cannot
        be iterated again.
        """
        return trial_steps(self._training, rates, epochs, batch_size)

    def report_gradient_norms(self, *, per_weight: bool = False) -> None:
        """Make the updates of this fit report norms in `gradient_norms`; call in `on_train_begin`.

        `gradient_norm` is the global L2 norm of all gradients, before clipping. With
        `per_weight=True`, `gradient_norm/<weight>` is the norm of one weight's gradient. A batch
        without an update has no norms.
        """
        training = self._training
        with training.guard, training.backend.lock:
            training.backend.report_norms("per_weight" if per_weight else "global")
            training.tracker.gradient_norms = {}

    @property
    def gradient_norms(self) -> dict[str, float]:
        """Name -> norm of the gradients of the last update of `fit`, if norms are reported."""
        return self._training.tracker.gradient_norms

    # ------------------------------------------------------------------ ranks

    @property
    def rank(self) -> int:
        """Number of this process, from 0, among the processes that train together."""
        return self._training.world.rank

    @property
    def world_size(self) -> int:
        """Number of processes that train together."""
        return self._training.world.size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files; True if one process trains alone."""
        return self._training.world.is_main

    def broadcast(self, name: str, value: Any) -> Any:
        """Return the `value` of rank 0 on every rank, for decisions that depend on a clock or file.

        All ranks must call it at the same point with the same `name`; otherwise SettingError is
        raised on all ranks. The value is a number, a string, None, an array, or lists and dicts of
        these. A single process gets its own value back.
        """
        return self._training.world.broadcast(name, value)

    # ------------------------------------------------------------------ state

    @out_of_memory_errors("get_weights()", NO_COPY)
    @check_arguments
    def get_weights(self, *, copy: bool = True) -> dict[str, Array]:
        """Return copies of the trained weights and of the running statistics, by name.

        - `copy`: False returns read-only views of the memory that is trained, without copies. Use
          them before the next step, which may overwrite them. Tensors of another device than the
          CPU are copied in any case.
        """
        weights = self._training.state.get_weights(copy=copy)
        if copy and self._training.thread.callbacks is not None:
            self._training.lineage.take(self._training, weights)
        return weights

    @check_arguments
    def set_weights(self, weights: Mapping[str, Any]) -> None:
        """Replace some of the weights; `weights` maps names to arrays.

        All arrays are checked before any weight changes. UnknownNameError: a weight does not exist.
        DataError: a shape or type is wrong, or a number is outside the range of the weight's type.
        NaN and infinities in the arrays are accepted.
        """
        training = self._training
        training.lineage.begin(training)
        training.state.set_weights(weights)
        training.lineage.set(training)

    @out_of_memory_errors("get_state()", NO_COPY)
    @check_arguments
    def get_state(self, *, copy: bool = True) -> dict[str, dict[str, Any]]:
        """Return copies of weights, slots and counters: the whole state of the training.

        - `copy`: as for `get_weights`.
        """
        return self._training.state.get(copy=copy)

    @check_arguments
    def set_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore `state`, which `get_state` returned.

        DataError or SettingError, before anything changes: the state belongs to another trainer.
        """
        self._training.set_state(state)

    def revert_step(self) -> None:
        """Undo the last update of weights, slots and statistics. Only one update can be undone.

        SettingError: the trainer has `backend="in_place"`, which cannot undo an update.
        """
        self._training.revert_step()

    @out_of_memory_errors("save()", FREE_MEMORY)
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
            saving.require_savable(self._training, "save")
            return Path(path)
        return saving.save(self._training, path, adapters_only)

    @out_of_memory_errors("snapshot()", BY_CALLBACKS)
    @check_arguments
    def snapshot(self, *, adapters_only: bool = False, copy: bool = True) -> checkpoint.Snapshot:
        """Return a copy of the training state in memory; `adapters_only` is as for `save`.

        Its `write(path)` may run later, or in another thread, while training continues. With
        `copy=False` nothing is copied, and `write` must be called before the next step; later it
        raises SettingError. With several processes, only rank 0 writes.
        """
        return saving.snapshot(self._training, "snapshot", adapters_only, copy=copy)

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Load the state that `save` wrote to `path`, of this trainer or of an equal one.

        The settings of this trainer do not change. With several processes, all must call it; rank 0
        reads the file and sends its contents to the others. CheckpointError: as for `load`.
        SettingError or DataError, before anything changes: the state belongs to another model or
        optimizer.
        """
        training = self._training
        if training.is_fitting:
            raise SettingError(
                "restore sets the position where fit begins and cannot be called during a fit. Call"
                " it before fit, or in the method `prepare` of a callback."
            )
        contents = checkpoint.load(path, self.settings, training.world)
        form = training.trainable
        if not form.is_file:  # else it has no adapters, and theirs do not fit
            contents.require_base(path, form.fingerprint if contents.base else "")
        with training.guard, saving.checkpoint_errors(path):
            saving.restore(training, contents)

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
        checkpoint contains no code; and the `teacher`, whose settings stay. With several processes,
        all must call it; rank 0 reads the file, but every rank reads a training folder.
        CheckpointError: the file is not a checkpoint, is damaged, or is from a newer onnxfit.
        """
        if is_training_folder(path):
            contents = read_training_folder(path, settings)
        else:
            world = world_of(settings.get("distribute", "auto"))
            contents = checkpoint.load(path, settings, world)
        contents.with_teacher(path)
        if not {"loss", "loss_weights"}.isdisjoint(settings):
            contents.without_loss_weights(settings)
        model = contents.with_base(path, model_onnx)
        with saving.checkpoint_errors(path):
            try:
                trainer = cls(model.proto, **contents.settings)
            except SettingError as error:
                if settings:  # the wrong setting may be an argument of this call
                    raise
                raise CheckpointError(
                    f"{os.fspath(path)!r} has settings that are not valid for a Trainer: {error}"
                ) from error
            saving.restore(trainer._training, contents, settings)
        return trainer

    def __getstate__(self) -> dict[str, Any]:
        """Raise UnsupportedError: the compiled sessions cannot be pickled or copied."""
        raise UnsupportedError(
            f"A {type(self).__name__} cannot be pickled or copied, because it holds compiled"
            f" graphs. Use save(path) and {type(self).__name__}.load(path) instead."
        )

    # ------------------------------------------------------------------ files

    @property
    @out_of_memory_errors("Trainer.model", EXPORT_TO_PATH)
    def model(self) -> onnx.ModelProto:
        """A copy of the given model. Its own tensors that are trained have their current numbers.

        A quantized model, and one with adapters, has all numbers that it was given with.
        """
        with self._training.backend.lock:
            return export.given_model(self._training).whole()

    @property
    def structure(self) -> onnx.ModelProto:
        """The given model without the numbers of tensors above 1 KB, which keep type and shape.

        Tools that show or search the graph need no copy of the weights.
        """
        return export.structure(self._training)

    @out_of_memory_errors("export()", EXPORT_TO_PATH)
    @check_arguments
    def export(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        averaged: bool = False,
        adapters: str = "merged",
        lineage: bool = True,
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

        With `lineage`, the metadata of a trained model says what made the weights: the hashes of
        the given model, the data and the result, the settings, and each fit. `onnxfit.verify`
        trains again and compares; the page "Verifying" in docs describes it. False leaves it out.
        """
        return export.export(
            self._training, path, averaged=averaged, adapters=adapters, lineage=lineage
        )

    @out_of_memory_errors("model_snapshot()", BY_CALLBACKS)
    @check_arguments
    def model_snapshot(self, *, copy: bool = True) -> ModelSnapshot:
        """Return the trained model as it is now, as `export` writes it.

        Its `write(path)` may run later, or in another thread, while training continues. Memory
        holds a copy of the trained weights, and none of the frozen weights of a model above 512 MB.
        With `copy=False` nothing is copied, and `write` must be called before the next step; later
        it raises SettingError. With several processes, only rank 0 writes.
        """
        return export.exported(self._training, copy=copy)

    @out_of_memory_errors("loss_tensors()", FREE_MEMORY)
    @check_arguments
    def loss_tensors(self, path: str | os.PathLike[str] | None = None) -> dict[str, Array]:
        """Return the tensors that the losses train, by name, and write them to `path` if given.

        They are the tensors of `Loss.initial_weights` and `UncertaintyWeights`, such as the centers
        of `ArcFace`. `get_weights` has them, too, and `set_weights` sets them; `export` writes a
        model without them. The file has the format safetensors. With several processes, only rank 0
        writes. CheckpointError: the file cannot be written.
        """
        return export.loss_tensors(self._training, path)

    @out_of_memory_errors("export_adapter()", FREE_MEMORY)
    @check_arguments
    def export_adapter(
        self,
        path: str | os.PathLike[str],
        *,
        task_type: str | None = None,
        base_model: str | None = None,
    ) -> Path:
        """Write only the adapters, and return the path.

        `path` is a folder for PEFT, or a file `*.onnx_adapter` for onnxruntime, which applies the
        adapters to single runs of the model of `export(adapters="inputs")`.
        `onnxfit.LoRA.load(path)` reads both. `PeftModel.from_pretrained` reads the folder for the
        torch model from which the ONNX model was exported. The folder has the files
        adapter_model.safetensors and adapter_config.json. A file for onnxruntime (1.20 or newer)
        and onnxruntime-genai has A, and s B in place of B. With several processes, only rank 0
        writes.

        - `task_type`: the task in adapter_config.json, such as "CAUSAL_LM" or "SEQ_CLS". With it,
          `PeftModel.from_pretrained` returns a model for this task, such as PeftModelForCausalLM.
        - `base_model`: the name or the folder of the torch model in adapter_config.json, from which
          `AutoPeftModelForCausalLM.from_pretrained` loads the base.

        SettingError: the trainer has no adapters, PEFT knows no such `task_type`, or `path` is a
        file for onnxruntime, which stores neither argument. CheckpointError: the files cannot be
        written. A UserWarning names weights that are trained in addition, which only `export`
        writes; layers that PEFT cannot find, because the file has only numbers for them; and an
        embedding table that is also the weight of a linear layer, whose adapter PEFT cannot read.
        """
        return export.export_adapter(self._training, path, task_type, base_model)

    @out_of_memory_errors("save_onnx_graph()", FREE_MEMORY)
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
        if folder is bytes:
            return export.write_graphs(self._training, bytes, prefix, suffix)
        require_path(folder)
        files = export.write_graphs(self._training, folder, prefix, suffix)
        self.save(Path(folder) / f"{prefix}trainer{suffix}{checkpoint.SUFFIX}")
        return files

    @out_of_memory_errors("export_training()", FREE_MEMORY)
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
          scalars.onnx. A step for "webgpu" has only operators with kernels in that provider. Graphs
          for "npu" have only operators of inference and fixed sizes, for compilers that know no
          more; the host draws the masks of Dropout. The number of rows is `batch_size`, or the one
          that the model declares.
        - `include`: the graphs to write, of "train", "evaluate" and "predict".
        - `sample_weight`: whether the losses have an input with a weight for each row.

        SettingError: the trainer has no loss, `accumulate` above 1, weights in `frozen`, integers
        of 4 bits, with scales that change or for "webgpu", DoRA or PiSSA, half precision, or more
        than 2 GB; or "npu" needs a `batch_size`.
        UnsupportedError: "npu" cannot express a part of the model, which the message names.
        GradientError: the gradient needs a `batch_size`. CheckpointError: the folder cannot be
        written. With several processes, only rank 0 writes.

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
        return export_training(
            self._training,
            folder,
            batch_size=batch_size,
            target=target,
            include=include,
            sample_weight=sample_weight,
        )

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
        import_state(self._training, path)

    # ------------------------------------------------------------------ reports

    def summary(self, *, depth: int | str | None = "auto") -> str:
        """Return the losses and settings, and a table of the weights by module.

        - `depth`: each module at this level, a number from 1, gets one row; None lists every
          tensor. "auto" folds modules, and the middle of a long list, if the table has more than 40
          rows.

        A module consists of the tensors whose names have a common beginning, up to a "." or "/".
        The summary shows settings that differ from their defaults, and always the learning rate. A
        notebook shows a table. SettingError: the depth is impossible.
        """
        return summary(self._training, depth)

    def card(self, path: str | os.PathLike[str] | None = None, **fields: Any) -> str:
        """Return a model card in Markdown, as Hugging Face's Hub shows it; write it to `path`.

        The card has the summary, the metrics of the last epochs, the arrays of the training data,
        the calls of `fit`, and what `onnxfit verify` needs. The card begins with fields in YAML.
        The license is the `model_license` or `license` in the metadata of the model. With a path, a
        picture of the metrics is written beside it, `<name>_figures.png`, if matplotlib is
        installed.

        - `path`: the .md file, such as "README.md".
        - `fields`: further fields, such as `license="mit"`, `base_model="name/model"` and
          `model_name="Digits"`. With `pipeline_tag="image-classification"` and `datasets=["mnist"]`
          the validation metrics become results, a `model-index`.

        SettingError: the suffix of the path is that of another format, or a field is not JSON.

        >>> import onnx.parser
        >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
        ...     line (float[N, 1] x) => (float[N, 1] y) <float[1, 1] slope = {0}>
        ...     { y = MatMul(x, slope) }''')
        >>> print(*Trainer(model, loss="mse").card(license="mit").splitlines()[:5], sep="\\n")
        ---
        library_name: "onnxfit"
        tags: ["onnx"]
        license: "mit"
        ---
        """
        return card(self._training, path, fields)

    def _repr_html_(self) -> str:
        """Return the summary for a notebook."""
        return training_html(self._training)

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
        return export.inspection(self._training, device, batch_size=batch_size)

    # ------------------------------------------------------------------ inside

    @property
    def _evaluator(self) -> Evaluator:
        return Evaluator(self._training, self)

    def _require_manual(self) -> ManualTraining:
        if self._manual is None:
            raise SettingError(
                "forward, backward and apply_gradients need Trainer(...,"
                " backend='forward_backward'), got backend='full'."
            )
        return self._manual

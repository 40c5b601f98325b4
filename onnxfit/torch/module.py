"""An ONNX model as a PyTorch module."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch

from onnxfit.errors import (
    DataError,
    InstallationError,
    ModelError,
    SettingError,
    StepError,
)
from onnxfit.files import write_atomically
from onnxfit.graph import names
from onnxfit.graph.doubtful_weights import warn_of_weights
from onnxfit.graph.model import with_initializers
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.tensors import initializer_arrays
from onnxfit.load.constant_nodes import lower_constants
from onnxfit.load.reading import ModelSource, read_model
from onnxfit.load.training_form import to_inference_form
from onnxfit.runtime.device import Device
from onnxfit.runtime.functional import FunctionalModel, FunctionalPasses
from onnxfit.runtime.values import HAS_DLPACK, numpy_dtype
from onnxfit.runtime.version import onnxruntime_version
from onnxfit.step.settings import check_batch_norm
from onnxfit.tools.editing.fixed_inputs import with_fixed_inputs
from onnxfit.torch.autograd import OnnxFunction, refuse_tangents, refuse_transforms, run

__all__ = ["OnnxModule"]

Array = npt.NDArray[Any]


class OnnxModule(torch.nn.Module):
    """An ONNX model as a layer or network of PyTorch: its weights are Parameters, and autograd
    differentiates it.

    - `model_onnx`: a path, bytes or an `onnx.ModelProto`, which is not changed.
    - `weights`: None for every float initializer that is a weight, or names and fnmatch patterns in
      any order; `"!pattern"` excludes. Other initializers stay constants of the graph; with `[]`,
      all of them do. `requires_grad_(False)` freezes a Parameter.
    - `gradient`: the source of gradients, "auto", "onnx" or "onnxruntime", as for
      `onnxfit.Trainer`.
    - `batch_norm`: "train" normalises by the batch in training; "frozen" uses the running
      statistics and does not update them; "batch" does in both modes what the file says.
    - `device`: the initial device of the Parameters: "cpu", "cuda", "cuda:1". `to` moves them to
      another device that onnxruntime supports.
    - `seed`: seed of Dropout and other random numbers. Each forward pass draws new random numbers,
      as a function of `seed` and the buffer `draws`, which counts the passes.
    - `threads`: threads that onnxruntime uses for an operator; None leaves the number to
      onnxruntime.
    - `fixed_inputs`: input -> its value in all calls, as for `onnxfit.Trainer`. The module is
      called without this input; an export still has it.

    Call the module with the model's inputs in their order, or by their names. It returns the
    output, or the tuple of outputs. Tensors are passed through DLPack: contiguous tensors are not
    copied. In training mode, Dropout is active, and BatchNormalization uses the batch and updates
    its running statistics, which are buffers; `eval()` turns both off. An output does not require a
    gradient if it has integers, or does not depend on anything that requires a gradient.

    `create_graph=True` and `torch.autograd.functional` compute second and higher derivatives. A
    graph for them is built when one is first asked for. GradientError: an operator of the gradient
    has no gradient itself, as with `gradient="onnxruntime"`. UnsupportedError: a transform of
    `torch.func`, batches of gradients, or forward-mode differentiation.

    The weight `fc.weight` is the Parameter `module.fc.weight`. `state_dict` therefore has the names
    of the ONNX file, and a model that torch exported can load the state of its network. If a module
    cannot have a name (an empty name, the name of a method, or a name that is both a weight and a
    prefix of others), underscores are appended: `type.weight` is `module.type_.weight`.
    `named_weights` has the ONNX names.

    ModelError, SettingError or InstallationError: the module cannot be created. When the module is
    called, DataError: a tensor does not fit; GradientError: operators have no gradient, and the
    message lists all of them; StepError: onnxruntime fails. After an error the module is unchanged.

    >>> import onnx.parser, torch
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     line (float[N, 1] x) => (float[N, 1] y) <float[1, 1] slope = {0}, float[1] bias = {0}>
    ...     { scaled = MatMul(x, slope)  y = Add(scaled, bias) }''')
    >>> line = OnnxModule(model)
    >>> optimizer = torch.optim.SGD(line.parameters(), lr=0.5)
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> for _ in range(60):
    ...     optimizer.zero_grad()
    ...     torch.nn.functional.mse_loss(line(x), 3 * x + 1).backward()
    ...     optimizer.step()
    >>> {name: round(weight.item(), 3) for name, weight in line.named_weights()}
    {'slope': 3.0, 'bias': 1.0}
    """

    draws: torch.Tensor

    def __init__(
        self,
        model_onnx: ModelSource,
        weights: Sequence[str] | str | None = None,
        *,
        gradient: str = "auto",
        batch_norm: str = "train",
        device: str = "cpu",
        seed: int = 0,
        threads: int | None = None,
        fixed_inputs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        check_batch_norm(batch_norm)
        if not isinstance(seed, int):
            raise SettingError(f"seed must be a whole number, got {seed!r}.")
        if not HAS_DLPACK:
            raise InstallationError(
                "OnnxModule needs an onnxruntime that exchanges tensors through DLPack, got"
                f" version {'.'.join(map(str, onnxruntime_version()))}. Install onnxruntime 1.21 or"
                " newer, or onnxruntime-training."
            )
        Device.parse(device)
        self._file = read_model(model_onnx)
        self._model = with_fixed_inputs(self._file.proto, fixed_inputs)
        self._settings = weights, gradient, batch_norm
        self._seed = seed
        self._threads = threads
        self._prepare()
        self._warn_of_weights(weights)
        if self._functional.is_random:
            self.register_buffer("draws", torch.zeros((), dtype=torch.int64, device=device))
        recipe = self._functional.recipe
        self._paths = _parameter_paths(self, recipe.state)
        for name, array in initializer_arrays(self._model, recipe.state).items():
            *modules, leaf = self._paths[name].split(".")
            owner: torch.nn.Module = self
            for module in modules:
                if module not in owner._modules:
                    owner.add_module(module, torch.nn.Module())
                owner = owner.get_submodule(module)
            tensor = _torch_tensor(array).to(device)
            if name in recipe.weights:
                owner.register_parameter(leaf, torch.nn.Parameter(tensor))
            else:
                owner.register_buffer(leaf, tensor)

    def _warn_of_weights(self, chosen: Sequence[str] | str | None) -> None:
        """Warn of the weights of which Trainer warns."""
        recipe = self._functional.recipe
        arrays = initializer_arrays(self._model, recipe.weights)
        settings = {"weights": chosen, "quantization": None, "adapters": None}
        warn_of_weights(self._model, recipe.model, arrays, settings)

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        """Return the output, or the tuple of outputs.

        - `inputs`: the model's inputs in their order.
        - `named`: inputs by their names.
        """
        if torch.compiler.is_dynamo_compiling():
            return self._call_outside_of_dynamo(*inputs, **named)
        return self._call(*inputs, **named)

    def _call(self, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        refuse_transforms()
        recipe = self._functional.recipe
        values = self._match_inputs(inputs, named)
        shapes = tuple(tuple(value.shape) for value in values.values())
        values |= {name: self._state_tensor(name) for name in recipe.state}
        refuse_tangents(values.values())
        device = _common_device(values)
        wrt: tuple[str, ...] = ()
        if torch.is_grad_enabled():
            wrt = tuple(name for name, value in values.items() if value.requires_grad)
        passes = self._functional.passes(self.training, wrt, str(device), shapes)
        # Within a backward pass, torch.utils.checkpoint is running forward again.
        recomputed = torch._C._current_graph_task_id() != -1
        random_inputs = self._random_inputs(passes, recomputed)
        if passes.gradient is None:
            results = run(passes.forward, {**values, **random_inputs})
        else:
            # Autograd saves these tensors. A copy made later would not be part of its graph.
            contiguous = [value.contiguous() for value in values.values()]
            tensors = OnnxFunction.apply(passes, tuple(values), random_inputs, *contiguous)  # type: ignore[no-untyped-call]  # torch's apply has no annotations
            results = dict(zip(passes.results, tensors))
        if random_inputs:
            self.draws += 1
        if not recomputed:
            with torch.no_grad():
                for name in passes.statistics:
                    self._state_tensor(name).copy_(results[names.updated(name)])
        outputs = tuple(results[name] for name in self._functional.outputs)
        return outputs if len(outputs) > 1 else outputs[0]

    # torch.compile cannot trace onnxruntime. torch.compiler.disable would import its compiler here.
    _call_outside_of_dynamo = torch._disable_dynamo(_call)  # type: ignore[attr-defined]

    @property
    def input_names(self) -> tuple[str, ...]:
        """Specs of the model's inputs, in their order."""
        return tuple(spec.name for spec in self._functional.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        """The model's outputs, in the order in which `forward` returns them."""
        return self._functional.outputs

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over ONNX name and Parameter of each weight; running statistics are buffers."""
        for name in self._functional.recipe.weights:
            yield name, self._state_tensor(name)

    def export(self, path: str | os.PathLike[str] | None = None) -> onnx.ModelProto:
        """Return the model for inference: the original model with the trained weights.

        - `path`: a file to which the model is written as well, atomically; None writes no file.
        """
        arrays = {name: _array(self._state_tensor(name)) for name in self._functional.recipe.state}
        model = with_initializers(self._file.proto, arrays)
        to_inference_form(model, self._settings[2])
        lower_constants(model)
        if path is not None:
            write_atomically(path, lambda file: file.write(model.SerializeToString()))
        return model

    def extra_repr(self) -> str:
        """Return the specs of inputs and the names of outputs, which `repr(module)` shows."""
        inputs = ", ".join(map(str, self._functional.inputs))
        return f"{inputs} -> {', '.join(self._functional.outputs)}"

    # ------------------------------------------------------------------ copies

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or a pickle: all attributes except compiled graphs."""
        return {name: value for name, value in self.__dict__.items() if name not in _DERIVED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's has no annotations
        self._prepare()

    def _prepare(self) -> None:
        """Set the attributes that follow from the model and the settings."""
        patterns, gradient, batch_norm = self._settings
        self._functional = FunctionalModel(
            self._model, patterns, gradient=gradient, batch_norm=batch_norm, threads=self._threads
        )
        specs = [*self._functional.inputs, *self._functional.state.values()]
        self._dtypes = {spec.name: _torch_dtype(spec) for spec in specs}

    # ------------------------------------------------------------------ tensors

    def _match_inputs(
        self, inputs: tuple[Any, ...], named: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return the inputs by name, in the model's order. DataError: an input does not fit."""
        specs = self._functional.inputs
        order = self.input_names
        values = {**dict(zip(order, inputs)), **named}
        if len(inputs) + len(named) != len(order) or set(values) != set(order):
            received = [f"{len(inputs)} by position"] * bool(inputs)
            received += [f"{name!r} by name" for name in named]
            raise DataError(
                f"The model takes {len(order)} input{'s' * (len(order) != 1)}"
                f" ({', '.join(map(str, specs))}), got {' and '.join(received) or 'none'}."
            )
        return {spec.name: self._check_input(values[spec.name], spec) for spec in specs}

    def _check_input(self, value: object, spec: TensorSpec) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise DataError(f"{spec} must be a dense torch tensor, got {type(value).__name__}.")
        if value.layout is not torch.strided:
            raise DataError(f"{spec} must be a dense torch tensor, got a {value.layout} tensor.")
        expected = self._dtypes[spec.name]
        if (
            value.dtype != expected
            and value.is_floating_point()
            and torch.is_autocast_enabled(value.device.type)
        ):
            value = value.to(expected)  # as torch does for operators without low precision
        if value.dtype != expected:
            raise DataError(
                f"{spec} must be a tensor of {expected}, got {value.dtype}. Pass"
                f" {spec.name}.to({expected})."
            )
        if not spec.accepts(tuple(value.shape)):
            raise DataError(f"{spec} got a tensor of shape {tuple(value.shape)}.")
        return value

    def _state_tensor(self, name: str) -> torch.Tensor:
        """Return the Parameter or buffer of a weight or running statistic."""
        path = self._paths[name]
        shape = self._functional.state[name].shape
        try:
            value: object = attrgetter(path)(self)
        except AttributeError:
            value = None
        if not isinstance(value, torch.Tensor):
            is_weight = name in self._functional.recipe.weights
            kind = "nn.Parameter(tensor)" if is_weight else "tensor"
            raise SettingError(
                f"The module's {path!r} is missing. Set module.{path} = {kind}, of shape {shape}."
            )
        if value.dtype != self._dtypes[name] or tuple(value.shape) != shape:
            raise SettingError(
                f"The module's {path!r} must be {self._dtypes[name]} of shape {shape}, but is now"
                f" {value.dtype} of shape {tuple(value.shape)}. Undo a change of type with"
                f" module.to({self._dtypes[name]})."
            )
        return value

    def _random_inputs(self, passes: FunctionalPasses, recomputed: bool) -> dict[str, torch.Tensor]:
        """Return the inputs that random numbers depend on; empty for a pass that draws none."""
        needed = {names.SEED, names.STEP}.intersection(passes.forward.inputs)
        if not needed:
            return {}
        if recomputed:
            raise StepError(
                "A forward pass with random numbers (Dropout) was repeated during a backward pass,"
                " where it would draw other random numbers. Do not use torch.utils.checkpoint for"
                " this module, or call module.eval() first."
            )
        numbers = {names.SEED: self._seed % 2**31, names.STEP: int(self.draws) % 2**31}
        return {name: torch.tensor(numbers[name]) for name in needed}


# Attributes that `_prepare` sets. They hold sessions, so copies and pickles leave them out.
_DERIVED = {"_functional", "_dtypes"}


def _common_device(values: Mapping[str, torch.Tensor]) -> torch.device:
    """Return the device of all tensors. DataError: they are on several devices."""
    names_by_device: dict[torch.device, str] = {}
    for name, value in values.items():
        names_by_device.setdefault(value.device, name)
    if len(names_by_device) > 1:
        devices = " and ".join(f"{name!r} is on {d}" for d, name in names_by_device.items())
        raise DataError(
            f"The inputs and weights must be on one device, but {devices}. Move the weights with"
            " module.to(device)."
        )
    device = next(iter(names_by_device), torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        raise DataError(
            f"The tensors are on {str(device)!r}, which onnxruntime does not support here. Move"
            " them to 'cpu' or 'cuda'."
        )
    return device


def _parameter_paths(module: torch.nn.Module, onnx_names: Iterable[str]) -> dict[str, str]:
    """Return ONNX name -> path of its Parameter in the module, as OnnxModule describes."""
    # The start of an ONNX name, and whether it is a module -> its path.
    path_of: dict[tuple[str, bool], str] = {}
    paths = {}
    for name in onnx_names:
        prefix = ""
        levels = name.split(".")
        for i, level in enumerate(levels):
            key = ".".join(levels[: i + 1]), i < len(levels) - 1
            if key not in path_of:
                attribute = level or "_"
                while hasattr(module, attribute) or prefix + attribute in path_of.values():
                    attribute += "_"
                path_of[key] = prefix + attribute
            prefix = f"{path_of[key]}."
        paths[name] = prefix[:-1]
    return paths


def _torch_dtype(spec: TensorSpec) -> torch.dtype:
    try:
        return _torch_tensor(np.zeros(0, spec.dtype)).dtype
    except TypeError:
        raise ModelError(f"{spec} has an element type that torch does not support.") from None


def _torch_tensor(array: Array) -> torch.Tensor:
    if array.dtype.name == "bfloat16":  # a type that torch does not read from NumPy
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _array(tensor: torch.Tensor) -> Array:
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        bfloat16 = numpy_dtype(onnx.TensorProto.BFLOAT16)
        array: Array = tensor.contiguous().view(torch.int16).numpy().view(bfloat16)
        return array
    array = tensor.numpy()
    return array

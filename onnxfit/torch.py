"""An ONNX model as a PyTorch module: torch holds the weights and the optimizer, onnxruntime runs
the forward and the backward pass.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import TopologicalSortPass

from onnxfit.errors import DataError, InstallationError, ModelError, SettingError, StepError
from onnxfit.files import write_atomically
from onnxfit.gradients import gradient_source
from onnxfit.gradients.paths import reachable_values
from onnxfit.graph import names
from onnxfit.graph.model import (
    ModelSource,
    normalize,
    read_model,
    spec_of,
    tensor_outputs,
    with_initializers,
)
from onnxfit.graph.spec import TensorSpec
from onnxfit.graph.tensors import initializer_arrays
from onnxfit.graph.training_form import RANDOM, to_evaluation_form, to_inference_form
from onnxfit.graph.values import GraphBuilder
from onnxfit.graph.weights import all_weights, select_weights
from onnxfit.optimizers import SGD
from onnxfit.runtime.device import Device
from onnxfit.runtime.session import StatelessSession
from onnxfit.runtime.values import from_dlpack
from onnxfit.step import split
from onnxfit.step.recipe import Recipe

try:
    import torch
    from torch.autograd.function import once_differentiable
    from torch.utils import dlpack
except ImportError as error:
    raise InstallationError(
        f'onnxfit.torch needs PyTorch 2.4 or newer ({error}): pip install "onnxfit[torch]"'
    ) from error

__all__ = ["OnnxModule"]

Array = npt.NDArray[Any]
Shapes = tuple[tuple[int, ...], ...]
# graphs compiled for fixed shapes, per kind of pass; a fifth shape gets the graph for any shape
FIXED = 4


class OnnxModule(torch.nn.Module):
    """An ONNX model as a layer, or a network, of PyTorch: its weights are Parameters, and autograd
    goes through it.

    - `model_onnx`: a path, bytes or an `onnx.ModelProto`, which is not changed.
    - `weights`: None for every float initializer that is a weight, or names and fnmatch patterns in
      any order; `"!pattern"` excludes. Weights outside stay constants of the graph, as all do with
      `[]`. `requires_grad_(False)` freezes a Parameter.
    - `gradient`: "auto", "onnx" or "onnxruntime", where gradients come from, as for
      `onnxfit.Trainer`.
    - `batch_norm`: "train" normalises by the batch in training; "frozen" uses the running
      statistics as they are.
    - `device`: where the Parameters are at first: "cpu", "cuda", "cuda:1"; `to` moves them, if
      onnxruntime can follow.
    - `seed`: of Dropout and random numbers, which are drawn anew in each forward pass, as a
      function of `seed` and the buffer `draws`.
    - `threads`: how many onnxruntime uses for an operator; None leaves it to onnxruntime.

    Call it with the model's inputs in their order, or by their names; it gives the output, or the
    tuple of outputs. Tensors go in and out through DLPack: what is contiguous is not copied. In
    training mode Dropout drops and BatchNormalization uses the batch and updates its running
    statistics, which are buffers; `eval()` ends both. Integer outputs, and those that depend on
    nothing that requires a gradient, require none. Gradients of gradients are refused by torch.

    A weight called `fc.weight` is the Parameter `module.fc.weight`, so that `state_dict` has the
    names of the ONNX file, and a model that torch exported loads what its network saved. A part of
    a name that a module cannot have (an empty one, one that is a method of modules, or both a
    weight and a prefix of others) gets underscores: `type.weight` is `module.type_.weight`.
    `named_weights` has the ONNX names.

    Errors: ModelError, SettingError, InstallationError here; DataError for tensors that do not fit,
    GradientError (with every operator that has no gradient) and StepError where it is called. After
    an error the module is as it was.

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
    ) -> None:
        super().__init__()
        if batch_norm not in ("train", "frozen"):
            raise SettingError(f"batch_norm is 'train' or 'frozen', got {batch_norm!r}.")
        if not isinstance(seed, int):
            raise SettingError(f"seed is a whole number, got {seed!r}.")
        Device.parse(device)
        self._model = read_model(model_onnx)
        self._settings = weights, gradient, batch_norm
        self._seed = seed
        self._threads = threads
        self._prepare()
        if _draws(self._training.model):
            self.register_buffer("draws", torch.zeros((), dtype=torch.int64, device=device))
        state = self._training.state
        self._paths = _paths(self, state)
        for name, array in initializer_arrays(self._model, state).items():
            *modules, leaf = self._paths[name].split(".")
            owner: torch.nn.Module = self
            for module in modules:
                if module not in owner._modules:
                    owner.add_module(module, torch.nn.Module())
                owner = owner.get_submodule(module)
            tensor = _tensor(array).to(device)
            if name in self._training.weights:
                owner.register_parameter(leaf, torch.nn.Parameter(tensor))
            else:
                owner.register_buffer(leaf, tensor)

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        """The output, or the tuple of outputs, for the model's inputs in their order or by their
        names.
        """
        values = self._given(inputs, named)
        shapes = tuple(tuple(value.shape) for value in values.values())
        values |= {name: self._state(name) for name in self._training.state}
        home = self._home(values)
        wrt = (
            tuple(name for name, value in values.items() if value.requires_grad)
            if torch.is_grad_enabled()
            else ()
        )
        pair = self._pair((self.training, wrt, str(home)), shapes)
        # in a backward pass it is torch.utils.checkpoint that runs forward again
        recomputed = torch._C._current_graph_task_id() != -1
        numbers = self._numbers(pair, recomputed)
        if pair.backward is None:
            found = pair.run_forward({**values, **numbers})
        else:
            tensors = _Passes.apply(pair, tuple(values), numbers, *values.values())  # type: ignore[no-untyped-call]
            found = dict(zip(pair.handed, tensors))
        if numbers:
            self.draws += 1
        if not recomputed:
            with torch.no_grad():
                for name in pair.statistics:
                    self._state(name).copy_(found[names.updated(name)])
        outputs = tuple(found[name] for name in self._outputs)
        return outputs if len(outputs) > 1 else outputs[0]

    @property
    def input_names(self) -> tuple[str, ...]:
        """The model's inputs, in their order."""
        return tuple(spec.name for spec in self._inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        """The model's outputs, in the order in which `forward` gives them."""
        return self._outputs

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights by their ONNX names; running statistics are buffers, and not among them."""
        for name in self._training.weights:
            yield name, self._state(name)

    def export(self, path: str | os.PathLike[str] | None = None) -> onnx.ModelProto:
        """The model for inference: the original with the trained weights in place, written to
        `path` unless that is None.
        """
        arrays = {name: _array(self._state(name)) for name in self._training.state}
        model = with_initializers(self._model, arrays)
        to_inference_form(model)
        if path is not None:
            write_atomically(path, lambda file: file.write(model.SerializeToString()))
        return model

    def extra_repr(self) -> str:
        return f"{', '.join(map(str, self._inputs))} -> {', '.join(self._outputs)}"

    # ------------------------------------------------------------------ copies

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a file keeps: all but what is made of it."""
        return {name: value for name, value in self.__dict__.items() if name not in _MADE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._prepare()

    def _prepare(self) -> None:
        """Make what the graphs are built of, from the model and the settings."""
        patterns, gradient, batch_norm = self._settings
        work = normalize(self._model)
        outputs = tensor_outputs(work)
        work.graph.outputs[:] = [v for v in work.graph.outputs if v.name in outputs]
        if patterns is None:
            chosen = all_weights(work)  # none at all are fine: a layer need not learn
        else:
            chosen = select_weights(work, patterns) if len(patterns) else []
        self._inputs = [spec_of(v) for v in work.graph.inputs]
        self._outputs = tuple(v.name or "" for v in work.graph.outputs)
        self._training = Recipe(
            model=work,
            weights=tuple(chosen),
            objectives={},
            penalties={},
            optimizer=SGD(),  # torch's is the one that updates
            gradient=gradient_source(gradient),
            slots={},
            batch_norm=batch_norm,
        )
        # In evaluation the running statistics are given like weights; frozen, they are what
        # BatchNormalization uses.
        evaluation = ir.from_proto(ir.to_proto(work))
        to_evaluation_form(GraphBuilder(evaluation.graph))
        TopologicalSortPass()(evaluation)
        self._evaluation = replace(
            self._training, model=evaluation, weights=self._training.state, batch_norm="frozen"
        )
        specs = [
            *self._inputs,
            *(spec_of(work.graph.initializers[name]) for name in self._training.state),
        ]
        self._types = {spec.name: _torch_type(spec) for spec in specs}
        self._shapes = {spec.name: spec.shape for spec in specs[len(self._inputs) :]}
        self._compiled: dict[Kind, _Compiled] = {}

    # ------------------------------------------------------------------ what goes in

    def _given(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The inputs by name, in the model's order. DataError for what does not fit."""
        order = self.input_names
        given = {**dict(zip(order, inputs)), **named}
        if len(inputs) + len(named) != len(order) or set(given) != set(order):
            got = [f"{len(inputs)} by position"] * bool(inputs) + [
                f"{name!r} by name" for name in named
            ]
            raise DataError(
                f"The model takes {len(order)} input{'s' * (len(order) != 1)}"
                f" ({', '.join(map(str, self._inputs))}), got {' and '.join(got) or 'none'}."
            )
        return {spec.name: self._fitting(given[spec.name], spec) for spec in self._inputs}

    def _fitting(self, value: object, spec: TensorSpec) -> torch.Tensor:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            what = (
                f"a {value.layout} tensor"
                if isinstance(value, torch.Tensor)
                else type(value).__name__
            )
            raise DataError(f"{spec} takes a dense torch tensor, got {what}.")
        wanted = self._types[spec.name]
        if (
            value.dtype != wanted
            and value.is_floating_point()
            and torch.is_autocast_enabled(value.device.type)
        ):
            value = value.to(wanted)  # what torch does for operators that have no low precision
        if value.dtype != wanted:
            raise DataError(
                f"{spec} got a tensor of {value.dtype}: pass {spec.name}.to({wanted}), the model"
                " computes in no other type."
            )
        if not spec.accepts(tuple(value.shape)):
            raise DataError(f"{spec} got a tensor of shape {tuple(value.shape)}.")
        return value

    def _state(self, name: str) -> torch.Tensor:
        """The tensor that is this weight or running statistic now."""
        path, shape = self._paths[name], self._shapes[name]
        try:
            value: object = attrgetter(path)(self)
        except AttributeError:
            value = None
        if not isinstance(value, torch.Tensor):
            kind = "nn.Parameter(tensor)" if name in self._training.weights else "tensor"
            raise SettingError(
                f"The module's {path!r} was taken away: set module.{path} = {kind}, of shape"
                f" {shape}, and it works again."
            )
        if value.dtype != self._types[name] or tuple(value.shape) != shape:
            raise SettingError(
                f"The module's {path!r} became {value.dtype} of shape {tuple(value.shape)}, and the"
                f" ONNX model computes with {self._types[name]} of shape {shape} alone;"
                f" module.to({self._types[name]}) undoes a change of type."
            )
        return value

    def _home(self, values: Mapping[str, torch.Tensor]) -> torch.device:
        """The one device that all tensors are on."""
        devices: dict[torch.device, str] = {}
        for name, value in values.items():
            devices.setdefault(value.device, name)
        if len(devices) > 1:
            places = " and ".join(f"{name!r} is on {device}" for device, name in devices.items())
            raise DataError(
                f"All tensors must be on one device: {places}. module.to(device) moves the weights."
            )
        home = next(iter(devices), torch.device("cpu"))
        if home.type not in ("cpu", "cuda"):
            raise DataError(
                f"The tensors are on {str(home)!r}, where onnxruntime does not compute: move them"
                " to 'cpu' or 'cuda'."
            )
        return home

    def _numbers(self, pair: _Pair, recomputed: bool) -> dict[str, torch.Tensor]:
        """Where a forward pass draws its random numbers from; empty for one that draws none."""
        asked = {names.SEED, names.STEP}.intersection(pair.forward.inputs)
        if not asked:
            return {}
        if recomputed:
            raise StepError(
                "A forward pass that draws random numbers (Dropout) is computed again during a"
                " backward pass, and would draw others: leave this module out of"
                " torch.utils.checkpoint, or call eval()."
            )
        numbers = {names.SEED: self._seed % 2**31, names.STEP: int(self.draws) % 2**31}
        return {name: torch.tensor(numbers[name]) for name in asked}

    # ------------------------------------------------------------------ graphs

    def _pair(self, kind: Kind, shapes: Shapes) -> _Pair:
        """Both passes for a batch, compiled for exactly its shapes, or for any once there are many."""
        compiled = self._compiled.get(kind)
        if compiled is None:
            compiled = self._compiled[kind] = _Compiled()
        found = compiled.fixed.get(shapes, compiled.open)
        if found is not None:
            return found
        _, wrt, _ = kind
        # only a gradient gains much from known sizes
        many = len(compiled.fixed) >= FIXED or not wrt
        if many and not compiled.tried:
            compiled.tried = True
            try:
                compiled.open = self._made(kind, self._inputs)
                return compiled.open
            except ModelError:
                pass  # some operators can only be differentiated with known sizes
        pair = self._made(
            kind, [replace(spec, shape=shape) for spec, shape in zip(self._inputs, shapes)]
        )
        compiled.fixed[shapes] = pair
        if len(compiled.fixed) > 4 * FIXED:
            compiled.fixed.popitem(last=False)
        return pair

    def _made(self, kind: Kind, specs: Iterable[TensorSpec]) -> _Pair:
        training, wrt, home = kind
        recipe = self._training if training else self._evaluation
        leaves = reachable_values(recipe.model, self._outputs, wrt)
        if not leaves:
            # which differentiates nothing, where nothing is asked
            recipe = replace(recipe, gradient=gradient_source("onnx"))
        graphs = split.passes(
            recipe, {spec.name: spec for spec in specs}, tuple(dict.fromkeys(self._outputs)), leaves
        )
        device = Device.parse(home)
        return _Pair(
            graphs,
            StatelessSession(graphs.forward, device, self._threads, "forward"),
            (
                StatelessSession(graphs.backward, device, self._threads, "backward")
                if leaves
                else None
            ),
            recipe.statistics,
        )


Kind = tuple[bool, tuple[str, ...], str]  # training; what requires a gradient; the device
_MADE = {"_training", "_evaluation", "_inputs", "_outputs", "_types", "_shapes", "_compiled"}


@dataclass(frozen=True, eq=False)
class _Pair:
    """A forward pass, and the backward pass where something requires a gradient; from tensors to
    tensors.
    """

    graphs: split.Passes
    forward: StatelessSession
    backward: StatelessSession | None
    statistics: tuple[str, ...]  # what the forward pass updates

    @property
    def handed(self) -> tuple[str, ...]:
        """What is handed to the caller of the forward pass."""
        return (*self.graphs.outputs, *map(names.updated, self.statistics))

    def run_forward(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return _run(self.forward, values)

    def run_backward(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Weight or input -> its gradient."""
        assert self.backward is not None
        found = _run(self.backward, values)
        return {name: found[output] for name, output in self.graphs.leaving.items()}


@dataclass(eq=False)
class _Compiled:
    """The pairs of a kind: for the shapes met first, and for any shape."""

    fixed: OrderedDict[Shapes, _Pair] = field(default_factory=OrderedDict)
    open: _Pair | None = None
    tried: bool = False  # to make the open one


class _Passes(torch.autograd.Function):
    """A pair as a node of autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any,
        pair: _Pair,
        order: tuple[str, ...],
        numbers: Mapping[str, torch.Tensor],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        values = {**numbers, **{name: tensor.contiguous() for name, tensor in zip(order, tensors)}}
        found = pair.run_forward(values)
        handed = tuple(found[name] for name in pair.handed)
        ctx.mark_non_differentiable(
            *(found[name] for name in pair.handed if name not in pair.graphs.arriving)
        )
        # Saved, all of it: so torch sees what is changed in place, frees it after the backward
        # pass, and can keep it elsewhere.
        ctx.save_for_backward(*({**values, **found}[name] for name in pair.graphs.kept))
        ctx.set_materialize_grads(False)
        ctx.pair, ctx.order = pair, order
        ctx.blanks = {
            name: found[name].new_zeros(()).expand(found[name].shape)
            for name in pair.graphs.arriving
        }
        return handed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        pair: _Pair = ctx.pair
        values = dict(zip(pair.graphs.kept, ctx.saved_tensors))
        given = dict(zip(pair.handed, gradients))
        for output, name in pair.graphs.arriving.items():
            dy = given[output]
            values[name] = ctx.blanks[output] if dy is None else dy
        found = pair.run_backward(values)
        return (None, None, None, *(found.get(name) for name in ctx.order))


def _run(call: StatelessSession, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run on the tensors' own memory, and give tensors of onnxruntime's memory."""
    needed = {name: values[name].detach().contiguous() for name in call.inputs}
    for value in needed.values():
        if value.is_cuda:
            # onnxruntime has a stream of its own
            torch.cuda.current_stream(value.device).synchronize()
            break
    found = {
        name: _from_onnxruntime(value)
        for name, value in call({n: _to_onnxruntime(v) for n, v in needed.items()}).items()
    }
    for name in needed.keys() & found.keys():
        # an input that is an output as it is comes back in the caller's memory
        found[name] = found[name].clone()
    return found


def _to_onnxruntime(tensor: torch.Tensor) -> Any:
    boolean = tensor.dtype == torch.bool
    if not tensor.numel():
        tensor = torch.empty(
            tensor.shape, dtype=tensor.dtype, device=tensor.device
        )  # to torch any strides are contiguous where nothing is
    return from_dlpack(torch.to_dlpack(tensor.view(torch.uint8) if boolean else tensor), boolean)  # type: ignore[attr-defined]


def _from_onnxruntime(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = dlpack.from_dlpack(value.to_dlpack())
    return tensor.view(torch.bool) if value.data_type() == "tensor(bool)" else tensor


def _paths(module: torch.nn.Module, onnx_names: Iterable[str]) -> dict[str, str]:
    """ONNX name -> path from the module; see OnnxModule."""
    chosen: dict[tuple[str, bool], str] = {}  # start of an ONNX name, whether a module -> path
    found = {}
    for name in onnx_names:
        above, pieces = "", name.split(".")
        for i, piece in enumerate(pieces):
            key = ".".join(pieces[: i + 1]), i < len(pieces) - 1
            if key not in chosen:
                piece = piece or "_"
                while hasattr(module, piece) or above + piece in chosen.values():
                    piece += "_"
                chosen[key] = above + piece
            above = f"{chosen[key]}."
        found[name] = above[:-1]
    return found


def _draws(model: ir.Model) -> bool:
    nodes = ir.traversal.RecursiveGraphIterator(model.graph)
    return any(
        node.domain == "" and (node.op_type == "Dropout" or node.op_type in RANDOM)
        for node in nodes
    )


def _torch_type(spec: TensorSpec) -> torch.dtype:
    try:
        return _tensor(np.zeros(0, spec.dtype)).dtype
    except TypeError:
        raise ModelError(f"{spec} has an element type that torch has not.") from None


def _tensor(array: Array) -> torch.Tensor:
    if array.dtype.name == "bfloat16":  # which numpy does not know of itself
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _array(tensor: torch.Tensor) -> Array:
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        bfloat16 = onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16)
        array: Array = tensor.contiguous().view(torch.int16).numpy().view(bfloat16)
        return array
    array = tensor.numpy()
    return array

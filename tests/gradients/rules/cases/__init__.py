"""Cases for the table of gradients, and what is asked of every one;

`tests/gradients/rules/test_rules.py` asks it.

Every file beside this one has a list `CASES`; a case is a few nodes in ONNX's text format:

    Case("Gemm row bias", "float[2,3] a, float[3,4] b, float[4] c", "y = Gemm(a, b, c)")

`inputs` are drawn uniformly from [low, high] (keep clear of kinks and poles) and differentiated
unless they stand in `frozen`; the body computes `y`, and `z` where a second output is to be
differentiated; whatever is not a float is among the `constants`.

Judges: the gradient graph, built in float64, is run by onnxruntime's double kernels, or by
`onnx.reference` where one is missing; it must meet central differences of its own forward outputs,
which in turn must be what onnxruntime computes from the untouched model in float32.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, NoReturn

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnxruntime.capi import onnxruntime_pybind11_state as C
from packaging.version import Version

from onnxfit.errors import GradientError
from onnxfit.gradients.backward import gradients
from onnxfit.gradients.blocker import refuse
from onnxfit.graph.values import GraphBuilder
from onnxfit.load.normalize import normalize

# Their onnxruntime has no Conv in float64, and their reference evaluator errs in some operators.
OLDER = Version(onnx.__version__) < Version("1.20")
Arrays = dict[str, np.ndarray[Any, Any]]
Run = Callable[[Mapping[str, np.ndarray[Any, Any]]], Arrays]


@dataclass(frozen=True)
class Case:
    """See the module.

    `single=True`: no judge in float64 exists (say why beside the case); float32 differences, 0.5 %
    tolerance.

    `twice=False`: the second derivative is not asked for (say why). `shapes`: the kinds of input
    sizes it is asked for.
    """

    name: str
    inputs: str
    body: str
    constants: str = ""
    low: float = -2.0
    high: float = 2.0
    frozen: tuple[str, ...] = ()
    opset: int = 21
    domains: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ("static", "batch", "any")
    single: bool = False
    twice: bool = True

    @property
    def outputs(self) -> list[str]:
        return [
            name for name in ("y", "z") if re.search(rf"(^|[\s,(]){name}\s*(,[^=()]*)?=", self.body)
        ]

    @property
    def wrt(self) -> list[str]:
        return [
            name
            for kind, name in re.findall(r"(\w+)\s*(?:\[[^\]]*\])?\s+(\w+)", self.inputs)
            if kind == "float" and name not in self.frozen
        ]

    def model(self, shapes: str = "static", *, double: bool = False) -> onnx.ModelProto:
        """The case as a model; sizes known, the first input's first size unknown, or none known; in
        float32 or float64.
        """
        inputs, constants, body = _with_sizes(self.inputs, shapes), self.constants, self.body
        if double:
            inputs, constants = (
                re.sub(r"\bfloat(?=[\[\s])", "double", text) for text in (inputs, constants)
            )
            body = re.sub(r"\bfloat(?=[\[\s])", "double", re.sub(r"\bto\s*=\s*1\b", "to=11", body))
        imports = ", ".join([f'"": {self.opset}', *(f'"{d}": 1' for d in self.domains)])
        text = (
            f"<ir_version: 8, opset_import: [{imports}]> g ({inputs}) =>"
            f" ({', '.join(self.outputs)}) <{constants}> {{ {body} }}"
        )
        return onnx.parser.parse_model(text)

    def feeds(self) -> Arrays:
        """Float32 numbers, so that single and double precision see the same."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        found = {}
        for value in self.model().graph.input:
            shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
            found[value.name] = rng.uniform(self.low, self.high, shape).astype(np.float32)
        return found


def families() -> dict[str, list[Case]]:
    """All cases, by family."""
    return {m.name: import_module(f"{__name__}.{m.name}").CASES for m in iter_modules(__path__)}


def _with_sizes(inputs: str, shapes: str) -> str:
    if shapes == "static":
        return inputs
    count = 0

    def name(match: re.Match[str]) -> str:
        nonlocal count
        count += 1
        return f"{match[1]}S{count}" if shapes == "any" or count == 1 else match[0]

    return re.sub(r"([\[,]\s*)\d+(?=\s*[\],])(?![^\[]*\()", name, inputs)


# Building and running
# ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    """A model with gradients: inputs `<output>_grad` and outputs `<input>_grad` were added."""

    model: onnx.ModelProto
    outputs: tuple[str, ...]
    wrt: tuple[str, ...]
    run: Run


def built(
    model: onnx.ModelProto, outputs: Sequence[str], wrt: Sequence[str], arriving: Mapping[str, np.ndarray[Any, Any]], *, runs: str = "onnxruntime"
) -> Built:  # fmt: skip
    """The model with its gradients, by the rules.

    Of `arriving` only the ranks are looked at, where inference does not tell them.
    """
    work = normalize(model)
    op = GraphBuilder(work.graph)
    by_name = {v.name: v for v in (*work.graph.inputs, *work.graph.outputs)}
    given = {}
    for i, value in enumerate(list(work.graph.outputs)):
        if value.name in outputs:
            known = op.wrap(value).shape
            array = arriving[f"{value.name}_grad"]
            dtype = (
                np.float64
                if any(v.dtype == ir.DataType.DOUBLE for v in work.graph.inputs)
                else array.dtype
            )
            given[i] = op.input(
                f"{value.name}_grad", dtype, [None] * array.ndim if known is None else known
            )
    found, blocking = gradients(op, given, [by_name[name] for name in wrt])
    refuse(blocking)
    for name in wrt:
        op.output(f"{name}_grad", found[by_name[name]])
    proto = ir.to_proto(work)
    return Built(proto, tuple(outputs), tuple(wrt), runner(proto, runs) if runs else _not_run)


class Pad(OpRun):
    """The reference's, which cannot cut: a negative width removes elements."""

    op_domain = ""

    def _run(self, data, pads, constant_value=None, axes=None, mode=None):  # type: ignore[no-untyped-def]
        axes = range(data.ndim) if axes is None else [int(a) % data.ndim for a in axes]
        widths = {
            axis: (int(before), int(after))
            for axis, before, after in zip(axes, pads[: len(axes)], pads[len(axes) :])
        }
        cut, grown = [], []
        for axis in range(data.ndim):
            before, after = widths.get(axis, (0, 0))
            cut.append(slice(max(-before, 0), data.shape[axis] - max(-after, 0)))
            grown.append((max(before, 0), max(after, 0)))
        if mode in (None, "constant"):
            value = (
                data.dtype.type(0)
                if constant_value is None
                else np.asarray(constant_value).reshape(()).astype(data.dtype)
            )
            return (np.pad(data[tuple(cut)], grown, constant_values=value),)
        return (np.pad(data[tuple(cut)], grown, mode=mode),)


def _not_run(feeds: Mapping[str, np.ndarray[Any, Any]]) -> Arrays:
    raise AssertionError("built with runs=''")


def runner(model: onnx.ModelProto, runs: str) -> Run:
    names = [o.name for o in model.graph.output]
    if runs == "onnxruntime":
        session = _session(model)
        return lambda feeds: dict(zip(names, session.run(None, dict(feeds))))
    reference = ReferenceEvaluator(model, new_ops=[Pad])
    return lambda feeds: {n: np.asarray(a) for n, a in zip(names, reference.run(None, dict(feeds)))}


def _session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    # As in onnxfit's sessions of training: version 1.32 moves such nodes, and loses their zero points.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def in_double(arrays: Arrays) -> Arrays:
    return {n: a.astype(np.float64) if a.dtype == np.float32 else a for n, a in arrays.items()}


def seeds(case: Case, forward: Mapping[str, np.ndarray[Any, Any]]) -> Arrays:
    """Random gradients arriving at the outputs."""
    rng = np.random.default_rng(1)
    return {
        f"{name}_grad": rng.uniform(0.5, 1.5, forward[name].shape).astype(np.float32)
        for name in case.outputs
    }


@lru_cache(maxsize=1)
def _forward(case: Case) -> tuple[Arrays, Arrays, Arrays]:
    """Inputs, outputs of the untouched model, and gradients that arrive at them."""
    feeds = case.feeds()
    try:
        run = runner(case.model(), "onnxruntime")
    except C.NotImplemented:  # no kernel in the opset of the file
        run = runner(case.model(), "reference")
    forward = run(feeds)
    return feeds, forward, seeds(case, forward)


@cache
def judged(case: Case) -> tuple[Arrays, Arrays, Arrays]:
    """Inputs, arriving gradients, and the float64 gradient of a case after it has met its
    differences.
    """
    feeds, forward, arriving = _forward(case)
    if case.single:
        graph = built(case.model(), case.outputs, case.wrt, arriving)
        found = graph.run({**feeds, **arriving})
        meets_differences(
            graph.run,
            case.outputs,
            case.wrt,
            feeds,
            arriving,
            _of(found, case.wrt),
            step=1e-2,
            tolerance=5e-3,
        )
    else:
        graph, found = _in_float64(case, feeds, arriving, forward)
        meets_differences(
            graph.run,
            case.outputs,
            case.wrt,
            in_double(feeds),
            in_double(arriving),
            _of(found, case.wrt),
        )
    same(found, forward, case.outputs, 1e-4, "the rewritten forward")
    return feeds, arriving, {f"{n}_grad": found[f"{n}_grad"] for n in case.wrt}


def _of(found: Arrays, wrt: Sequence[str]) -> Arrays:
    return {name: found[f"{name}_grad"] for name in wrt}


def _in_float64(
    case: Case, feeds: Arrays, arriving: Arrays, forward: Arrays
) -> tuple[Built, Arrays]:
    """The gradient graph with the first judge that can run it and agrees with onnxruntime about the
    forward.
    """
    try:
        proto = built_in_double(case)
    except GradientError:
        raise
    except Exception as error:  # the operator is for float32 only
        no_judge(str(error))
    causes = []
    for runs in ("onnxruntime", "reference"):
        try:
            graph = Built(proto, tuple(case.outputs), tuple(case.wrt), runner(proto, runs))
            found = graph.run({**in_double(feeds), **in_double(arriving)})
            same(found, forward, case.outputs, 1e-3, f"the forward of {runs} in float64")
            return graph, found
        except Exception as error:  # no kernel for float64
            causes.append(f"{runs}: {error}")
    no_judge("; ".join(causes))


def no_judge(causes: str) -> NoReturn:
    """Fail, as nothing computes a case in float64; skip where only older packages do not."""
    if OLDER:
        pytest.skip(f"onnxruntime {onnxruntime.__version__}, onnx {onnx.__version__}: {causes}")
    raise AssertionError(f"no judge: {causes}")


@lru_cache(maxsize=1)
def built_in_double(case: Case) -> onnx.ModelProto:
    """The model of a case with its gradients, in float64. The tests of a case follow each other,
    and share it.
    """
    _, _, arriving = _forward(case)
    return built(case.model(double=True), case.outputs, case.wrt, arriving, runs="").model


def meets_differences(
    run: Run, outputs: Sequence[str], wrt: Sequence[str], feeds: Arrays, arriving: Arrays, found: Arrays,
    *, step: float = 1e-5, tolerance: float = 1e-6, directions: int = 2,
) -> None:  # fmt: skip
    """The gradient along random directions is the central difference of sum(output * arriving)."""

    def value(at: Arrays) -> float:
        results = run({**at, **arriving})
        return float(
            sum(np.sum(results[o].astype(np.float64) * arriving[f"{o}_grad"]) for o in outputs)
        )

    rng = np.random.default_rng(2)
    size = 1e-3 * abs(value(feeds))
    for name in wrt:
        for _ in range(directions):
            way = rng.uniform(0.5, 1.5, feeds[name].shape) * rng.choice([-1, 1], feeds[name].shape)
            up, down = (
                {**feeds, name: np.asarray(feeds[name] + sign * step * way, feeds[name].dtype)}
                for sign in (1, -1)
            )
            slope = (value(up) - value(down)) / (2 * step)
            product = found[name].astype(np.float64) * way
            assert found[name].shape == feeds[name].shape, (
                f"the gradient of {name} has shape {found[name].shape}"
            )
            scale = np.abs(product).sum() + size
            assert abs(slope - product.sum()) <= tolerance * scale + 1e-9, (
                f"gradient of {name}: {product.sum()} along a direction, central difference {slope}"
            )


def same(
    found: Arrays, expected: Arrays, names: Sequence[str], tolerance: float, what: str
) -> None:
    for name in names:
        scale = np.abs(expected[name]).max(initial=0) if expected[name].size else 1
        np.testing.assert_allclose(
            found[name],
            expected[name],
            rtol=tolerance,
            atol=tolerance * scale + 1e-7,
            err_msg=f"{what}: {name}",
        )

"""`onnxfit.quantize`, beside onnxruntime's own functions and by the laws of its result."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnxruntime
import pytest

import onnxfit
from onnxfit import DataError, ModelError, SettingError, UnknownNameError, UnsupportedError
from onnxfit.load.runtime_support import newest_opset
from onnxfit.tools.quantization import preparation
from tests.models import linear
from tests.trainable.quantized.graphs import (
    MODELS,
    OPTIONS,
    WEIGHTS_ONLY,
    attention,
    branch,
    network,
    outputs_of,
    parsed,
    relative_error,
    rows,
    tensors_of,
    two_inputs,
)
from tests.trainable.quantized.integer_files import without_overflow

# The largest error of an output, in units of its largest number: generous for few weights
BOUNDS = {8: 0.04, 4: 0.35}
CUTTING_BOUND = 0.35  # entropy cuts off the largest numbers


def quantized(model: onnx.ModelProto, inputs: dict[str, np.ndarray], **options: Any) -> Any:
    data = None if options.get("activations", "int8") is None else inputs
    return onnxfit.quantize(model, data, **options)


def kinds_of_weights(model: onnx.ModelProto) -> set[str]:
    """The types of the integers that layers read."""
    tensors = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    integers = {
        node.output[0]: tensors[node.input[0]]
        for node in model.graph.node
        if node.op_type == "DequantizeLinear" and node.input[0] in tensors
    }
    return {
        onnx.TensorProto.DataType.Name(integers[name]).lower()
        for node in model.graph.node
        if node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul")
        for name in node.input[:2]
        if name in integers
    }


@without_overflow
@pytest.mark.parametrize("options", OPTIONS | WEIGHTS_ONLY)
@pytest.mark.parametrize("name", MODELS)
def test_the_result_computes_nearly_the_same_with_the_same_inputs_and_outputs(
    name: str, options: str
) -> None:
    model, inputs = MODELS[name]()
    before = model.SerializeToString()
    settings = (OPTIONS | WEIGHTS_ONLY)[options]
    result = quantized(model, inputs, **settings)
    assert model.SerializeToString() == before
    onnx.checker.check_model(result, full_check=True)
    bits = int(settings.get("weights", "int8")[-1])
    bound = CUTTING_BOUND if options == "entropy" else BOUNDS[bits]
    assert relative_error(outputs_of(result, inputs), outputs_of(model, inputs)) < bound
    initializers = {tensor.name for tensor in model.graph.initializer}
    assert [*result.graph.input] == [v for v in model.graph.input if v.name not in initializers]
    assert [*result.graph.output] == [*model.graph.output]
    assert result.ir_version <= 10
    assert {entry.domain for entry in result.opset_import} == {""}
    assert result.opset_import[0].version <= 21
    assert kinds_of_weights(result) == {settings.get("weights", "int8")}
    again = quantized(model, inputs, **settings)
    assert again.SerializeToString(deterministic=True) == result.SerializeToString(
        deterministic=True
    )


class Batches:
    """A reader of calibration data, as onnxruntime's documentation writes one."""

    def __init__(self, inputs: dict[str, np.ndarray], size: int) -> None:
        count = len(next(iter(inputs.values())))
        self.batches = [
            {name: array[i : i + size] for name, array in inputs.items()}
            for i in range(0, count, size)
        ]
        self.left = iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def set_range(self, start_index: int, end_index: int) -> None:
        self.left = iter(self.batches[start_index:end_index])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.left, None)


def by_onnxruntime(
    model: onnx.ModelProto, inputs: dict[str, np.ndarray], folder: Path, size: int, **options: Any
) -> onnx.ModelProto:
    """The model as onnxruntime's own functions quantize it."""
    from onnxruntime.quantization import CalibrationMethod, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    path = str(folder / "model.onnx")
    onnx.save(model, path)
    quant_pre_process(path, path, skip_symbolic_shape=True)
    types = {"int8": QuantType.QInt8, "uint8": QuantType.QUInt8}
    methods = {
        "minmax": CalibrationMethod.MinMax,
        "entropy": CalibrationMethod.Entropy,
        "percentile": CalibrationMethod.Percentile,
    }
    quantize_static(
        path,
        path,
        Batches(inputs, size),
        weight_type=types[options.get("weights", "int8")],
        activation_type=types[options.get("activations", "int8")],
        per_channel=options.get("per_channel", True),
        calibrate_method=methods[options.get("method", "minmax")],
        extra_options={"QDQKeepRemovableActivations": True, "CalibStridedMinMax": 1},
    )
    return onnx.load(path)


@pytest.mark.parametrize("size", [8, 100])
# version 1.19 of onnxruntime gives other weights than asked for in the other cases
@pytest.mark.parametrize("options", ["int8", "entropy", "percentile", "one scale"])
@pytest.mark.parametrize("name", ["network", "old file"])
def test_integers_and_scales_are_those_of_onnxruntimes_own_functions(
    name: str, options: str, size: int, tmp_path: Path
) -> None:
    model, inputs = MODELS[name]()
    if name == "old file":  # quantize raises the opset, which onnxruntime's functions do not
        model = onnx.version_converter.convert_version(model, 17)
        model.ir_version = 8
    ours = quantized(model, inputs, batch_size=size, **OPTIONS[options])
    theirs = by_onnxruntime(model, inputs, tmp_path, size, **OPTIONS[options])
    expected = tensors_of(theirs)
    for tensor, array in tensors_of(ours).items():
        assert array.dtype == expected[tensor].dtype
        np.testing.assert_array_equal(array, expected.pop(tensor))
    assert expected == {}
    assert Counter(n.op_type for n in ours.graph.node) == Counter(
        n.op_type for n in theirs.graph.node
    )
    assert outputs_of(ours, inputs)[0].tobytes() == outputs_of(theirs, inputs)[0].tobytes()


@pytest.mark.parametrize("options", WEIGHTS_ONLY)
def test_weights_are_rounded_to_the_nearest_integer_of_their_scale(options: str) -> None:
    settings = WEIGHTS_ONLY[options]
    model = parsed("g (float[N, 6] x) => (float[N, 4] y) { y = MatMul(x, w) }", w=(6, 4))
    model.graph.initializer[0].CopyFrom(
        onnx.numpy_helper.from_array(rows(6, 4) * np.float32([0.01, 1, 10, 0.1]), "w")
    )
    (weight,) = tensors_of(model).values()
    made = tensors_of(onnxfit.quantize(model, **settings))
    assert sorted(made) == ["w_quantized", "w_scale", "w_zero_point"]
    integers = made["w_quantized"].astype(np.float32)
    steps = integers - made["w_zero_point"].astype(np.float32)
    scale = made["w_scale"]
    assert scale.shape == ((4,) if settings["per_channel"] else ())
    # half a step, and at the end of the range another half: 4 bits have -8, and not 8
    assert (np.abs(steps * scale - weight) <= 1.001 * scale).all()
    assert np.median(np.abs(steps * scale - weight) / scale) < 0.5
    bits = int(settings["weights"][-1])
    least = 0 if settings["weights"].startswith("u") else -(2 ** (bits - 1))
    assert integers.min() >= least
    assert integers.max() <= least + 2**bits - 1
    span = integers.max() - integers.min()
    assert span > 0.5 * 2**bits  # the scale uses the range


def test_a_scale_for_each_channel_is_more_accurate() -> None:
    model, inputs = network()
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    wide = onnx.numpy_helper.to_array(tensors["dense"]) * np.float32([0.01, 1, 20])
    tensors["dense"].CopyFrom(onnx.numpy_helper.from_array(wide, "dense"))
    expected = outputs_of(model, inputs)[0][:, 0]
    errors = [
        np.abs(outputs_of(quantized(model, inputs, activations=None, per_channel=p), inputs, exact=True)[0][:, 0] - expected).max()
        for p in (True, False)
    ]  # fmt: skip
    assert errors[0] < 0.1 * errors[1]


def test_biases_are_int32_with_the_scale_of_the_product() -> None:
    result = quantized(*network())
    made = tensors_of(result)
    makers = {name: node for node in result.graph.node for name in node.output}
    (gemm,) = (node for node in result.graph.node if node.op_type == "Gemm")
    scales = [made[makers[name].input[1]] for name in gemm.input]
    np.testing.assert_allclose(scales[2], scales[0] * scales[1], rtol=1e-6)
    assert made["bias_quantized"].dtype == np.int32
    bias = tensors_of(network()[0])["bias"]
    np.testing.assert_allclose(made["bias_quantized"] * scales[2], bias, atol=scales[2].max())


def test_batch_normalization_becomes_part_of_the_convolution() -> None:
    result = quantized(*network())
    kinds = [node.op_type for node in result.graph.node if "Linear" not in node.op_type]
    assert kinds == ["Conv", "Relu", "MaxPool", "Flatten", "Gemm"]


def loader(inputs: dict[str, np.ndarray]) -> onnxfit.DataLoader:
    return onnxfit.DataLoader(inputs["x"], np.zeros(40, np.int64), batch_size=16)


def batches_with_labels(inputs: dict[str, np.ndarray]) -> list[Any]:
    return [(inputs["x"][i : i + 16], np.zeros(16)) for i in (0, 16)] + [(inputs["x"][32:],)]


def function_of_batches(inputs: dict[str, np.ndarray]) -> Any:
    def batches() -> Iterator[Any]:
        yield from (inputs["x"][i : i + 16] for i in (0, 16, 32))

    return batches


DATA = {
    "array": lambda inputs: inputs["x"],
    "dict": lambda inputs: inputs,
    "list": lambda inputs: [inputs["x"]],
    "loader": loader,
    "batches": batches_with_labels,
    "function": function_of_batches,
    "float64": lambda inputs: inputs["x"].astype(np.float64),
    "dict with labels": lambda inputs: {**inputs, "label": np.zeros(40)},
}


@pytest.mark.parametrize("method", ["minmax", "entropy"])
@pytest.mark.parametrize("kind", DATA)
@pytest.mark.filterwarnings("ignore:'x' was converted from float64")
def test_calibration_takes_what_predict_takes(kind: str, method: str) -> None:
    model, inputs = network()
    expected = onnxfit.quantize(model, inputs, batch_size=16, method=method)
    result = onnxfit.quantize(model, DATA[kind](inputs), batch_size=16, method=method)
    assert result == expected


@pytest.mark.parametrize("kind", ["path", "bytes"])
def test_a_model_may_be_a_file_or_its_bytes(kind: str, tmp_path: Path) -> None:
    model, inputs = two_inputs()
    source: Any = model.SerializeToString()
    if kind == "path":
        source = tmp_path / "m.onnx"
        onnx.save(two_inputs()[0], source, save_as_external_data=True, size_threshold=0)
    assert onnxfit.quantize(source, inputs) == onnxfit.quantize(model, inputs)


def test_notes_of_the_model_are_kept() -> None:
    model, inputs = network()
    model.doc_string, model.producer_name, model.graph.doc_string = "one", "two", "three"
    model.metadata_props.add(key="a", value="b")
    result = quantized(model, inputs)
    assert (result.doc_string, result.producer_name, result.graph.doc_string) == (
        "one",
        "two",
        "three",
    )
    assert [(p.key, p.value) for p in result.metadata_props] == [("a", "b")]


# ---------------------------------------------------------------------- exclude


@pytest.mark.parametrize("options", [{}, {"activations": None}, {"weights": "int4"}])
@pytest.mark.parametrize(
    ("exclude", "floats"),
    [
        ("kernel", {"kernel"}),  # a weight that becomes another one
        ("conv_c", {"kernel"}),  # a node that the BatchNormalization is merged with
        ("batchnormalization_n", {"kernel"}),
        (["dense"], {"dense"}),
        ("gemm*", {"dense"}),
        (("d*", "relu_r"), {"dense"}),
    ],
)
def test_excluded_layers_stay_in_float(
    exclude: Any, floats: set[str], options: dict[str, Any]
) -> None:
    result = quantized(*network(), **options, exclude=exclude)
    small = [name for name, array in tensors_of(result).items() if array.ndim > 1 and array.dtype.kind != "f"]  # fmt: skip
    left = {"kernel", "dense"} - floats
    assert len(small) == len(left)
    assert all(any(word in name for word in left) for name in small)


def test_an_excluded_node_inside_a_chain_that_is_computed_once() -> None:
    model, inputs = MODELS["constant weight"]()
    model.graph.node[0].name = "table"
    with pytest.raises(ModelError, match="nothing to quantize: exclude= leaves no node"):
        quantized(model, inputs, exclude="table")


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(
        UnknownNameError, match=r"No node or weight is called 'densse'\. Did you mean 'dense'"
    ):
        quantized(*network(), exclude=["kernel", "densse"])


# ---------------------------------------------------------------------- what goes wrong elsewhere


@without_overflow
def test_an_output_before_a_relu_is_not_cut_off() -> None:
    model, inputs = two_inputs()
    before, after = (outputs_of(m, inputs)[1] for m in (model, quantized(model, inputs)))
    assert before.min() < -0.5
    assert np.abs(before - after).max() < 0.02 * np.abs(before).max()


def test_relus_stay_in_the_file_and_cost_nothing_in_the_runtime(tmp_path: Path) -> None:
    model, inputs = network()
    result = quantized(model, inputs)
    assert "Relu" in [node.op_type for node in result.graph.node]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(tmp_path / "compiled.onnx")
    onnxruntime.InferenceSession(
        result.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    compiled = {node.op_type for node in onnx.load(tmp_path / "compiled.onnx").graph.node}
    assert "Relu" not in compiled
    assert compiled & {"QLinearConv", "QGemm"} == {"QLinearConv", "QGemm"}


def test_a_matmul_of_integers_has_an_opset_that_each_onnxruntime_has_kernels_for() -> None:
    assert quantized(*attention()).opset_import[0].version == 20
    assert quantized(*attention(), weights="int4").opset_import[0].version == 21


def test_products_of_activations_stay_in_float_beside_four_bits() -> None:
    result = quantized(*attention(), weights="int4")
    makers = {name: node for node in result.graph.node for name in node.output}
    readers = {name: [makers[i].op_type for i in makers[name].input] for name in ("a", "o") if name in makers}  # fmt: skip
    assert readers
    assert all("DequantizeLinear" not in kinds for kinds in readers.values())


def test_a_weight_that_a_body_reads_stays_for_it() -> None:
    model, inputs = branch()
    result = quantized(model, inputs, activations=None)
    inputs["c"] = np.array(False)
    assert relative_error(outputs_of(result, inputs), outputs_of(model, inputs)) < 0.02


# ---------------------------------------------------------------------- side effects


def test_nothing_is_printed_logged_or_left_behind(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    before = [*root.handlers], [*root.filters]
    for options in (*OPTIONS.values(), {"activations": None}):
        quantized(*network(), **options)
    with contextlib.suppress(DataError):
        onnxfit.quantize(network()[0], np.full((4, 2, 6, 6), np.nan))
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []
    assert ([*root.handlers], [*root.filters]) == before
    assert list(tmp_path.iterdir()) == []


def test_progress_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    model, inputs = network()
    onnxfit.quantize(model, inputs, verbose=1, batch_size=8)
    assert "calibrate: 100%" in (shown := capfd.readouterr().err)
    assert "5/5" in shown
    onnxfit.quantize(model, inputs, verbose=2, batch_size=8)
    assert "5 batches" in capfd.readouterr().err


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int7"}, "No type of weights is called 'int7'. Did you mean 'int8'"),
        ({"activations": "int4"}, "No type of activations is called 'int4'. Did you mean"),
        ({"method": "minimax"}, "No calibration method is called 'minimax'. Did you mean 'minmax'"),
    ],
)
def test_unknown_names_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        onnxfit.quantize(linear(), np.ones((2, 1), np.float32), **options)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "activations needs calibration data"),
        (np.ones((4, 3), np.float32), r"x: float32\[N, 2, 6, 6\]"),
        ({"z": rows(4, 2, 6, 6)}, "calibration data does not match the model's inputs"),
        (rows(0, 2, 6, 6), "is empty: it has 0 rows"),
        ([], "is empty: it has 0 rows"),
        (lambda: iter([]), "has no rows|gave no batches"),
        (np.full((4, 2, 6, 6), np.nan, np.float32), "has NaN in row 0"),
        (np.stack([rows(2, 6, 6), np.full((2, 6, 6), np.inf)]), "has an infinite number in row 1"),
        (
            [(rows(4, 2, 6, 6),), (np.full((2, 2, 6, 6), -np.inf),)],
            "has an infinite number in row 0",
        ),
    ],
)
def test_data_that_does_not_fit_is_refused(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        onnxfit.quantize(network()[0], data)


def test_settings_that_exclude_each_other_are_refused() -> None:
    model, inputs = network()
    with pytest.raises(SettingError, match="needs no calibration data"):
        onnxfit.quantize(model, inputs, activations=None)
    with pytest.raises(SettingError, match="no kernels for int8 activations with uint8 weights"):
        onnxfit.quantize(model, inputs, weights="uint8")


@pytest.mark.parametrize("options", [{}, {"activations": None}])
def test_a_quantized_model_is_refused(options: dict[str, Any]) -> None:
    model, inputs = network()
    with pytest.raises(ModelError, match=r"already quantized: it contains .*QuantizeLinear '"):
        quantized(quantized(model, inputs), inputs, **options)


def test_a_model_without_layers_is_refused() -> None:
    model = parsed("g (float[N, 2] x) => (float[N, 2] y) { y = Exp(x) }")
    with pytest.raises(ModelError, match="nothing to quantize: it computes Exp"):
        onnxfit.quantize(model, rows(4, 2))
    products = parsed("g (float[N, 2] a, float[2, N] b) => (float[N, N] y) { y = MatMul(a, b) }")
    with pytest.raises(ModelError, match="nothing to quantize: no Conv, Gemm or MatMul"):
        onnxfit.quantize(products, activations=None)


@pytest.mark.parametrize("kind", ["float16", "double"])
def test_weights_that_onnxruntime_does_not_quantize_are_refused(kind: str) -> None:
    model = parsed(f"g ({kind}[N, 2] x) => ({kind}[N, 2] y) {{ y = MatMul(x, w) }}")
    array = np.ones((2, 2), {"float16": np.float16, "double": np.float64}[kind])
    model.graph.initializer.append(onnx.numpy_helper.from_array(array, "w"))
    with pytest.raises(UnsupportedError, match=f"weight 'w' is {kind}"):
        onnxfit.quantize(model, array)


@pytest.mark.parametrize("options", [{}, {"activations": None}])
def test_a_weight_without_a_scale_is_refused_unless_excluded(options: dict[str, Any]) -> None:
    model = parsed(
        "g (float[N, 2] x) => (float[N, 2] y) { h = MatMul(x, u)  y = MatMul(h, w) }",
        u=(2, 2),
        w=[[1, np.nan], [0, np.inf]],
    )
    with pytest.raises(ModelError, match="The weight 'w' contains infinity or NaN"):
        quantized(model, {"x": rows(4, 2)}, **options)
    onnxfit.quantize(model, activations=None, exclude="w")


def test_a_model_above_two_gigabytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "is_large", lambda model: True)
    with pytest.raises(UnsupportedError, match="larger than 2 GB"):
        quantized(*network())


@pytest.mark.parametrize("method", ["minmax", "entropy", "percentile"])
def test_infinite_values_inside_are_refused_unless_excluded(method: str) -> None:
    model = parsed(
        """g (float[N, 4] x) => (float[N, 3] y) <float minus = {-1}, float zero = {0}>
        { h = MatMul(x, w)  big = Div(minus, zero)  m = Min(h, big)  y = Softmax(m) }""",
        w=(4, 3),
    )
    model.graph.node[3].name = "probabilities"
    with pytest.raises(DataError, match=r"makes '[my]' infinite or NaN.*exclude the nodes"):
        onnxfit.quantize(model, rows(4, 4), method=method)
    onnxfit.quantize(model, rows(4, 4), method=method, exclude="probabilities")


@pytest.mark.skipif(newest_opset() < 23, reason="onnx or onnxruntime has no RMSNormalization")
@pytest.mark.parametrize("opset", [23, newest_opset()])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_newer_operator_keeps_the_opset_that_it_needs(weights: str, opset: int) -> None:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(32, 32)).astype(np.float32)
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("MatMul", ["x", "w"], ["h"]),
            onnx.helper.make_node("RMSNormalization", ["h", "one"], ["s"]),
            onnx.helper.make_node("MatMul", ["s", "w"], ["y"]),
        ],
        "normalized",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 32])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["N", 32])],
        [
            onnx.numpy_helper.from_array(w, "w"),
            onnx.numpy_helper.from_array(np.ones(32, np.float32), "one"),
        ],
    )
    imports = [onnx.helper.make_opsetid("", opset)]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)
    inputs = {"x": rng.normal(size=(64, 32)).astype(np.float32)}
    result = quantized(model, inputs, weights=weights)
    assert "RMSNormalization" in [node.op_type for node in result.graph.node]
    assert result.opset_import[0].version == 23
    expected = onnx.reference.ReferenceEvaluator(model).run(None, inputs)
    assert relative_error(outputs_of(result, inputs), expected) < BOUNDS[int(weights[-1])]

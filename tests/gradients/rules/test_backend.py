"""The rules on the models that ONNX itself tests its operators with, at those models' own inputs."""

from __future__ import annotations

import warnings
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.loader import load_model_tests

from onnxfit.errors import ModelError
from onnxfit.gradients.paths import reachable_values
from onnxfit.load import newer_operators
from onnxfit.load.newer_operators import PREVIEW
from onnxfit.load.normalize import normalize
from onnxfit.load.opset import OPSET
from onnxfit.load.reading import read_model
from tests.doubles import FLOAT, SETTINGS, in_double
from tests.gradients.rules.cases import Arrays, judged
from tests.samples import in_sample_of_table

ROUNDED = ("test_erf", "test_gelu", "test_shrink")  # the judges compute these in float32
NO_DERIVATIVE = "no float32 input that a derivative leads to"
LEFT_OUT = {
    **dict.fromkeys(("test_lstm", "test_gru", "test_rnn", "test_simple_rnn"), "recurrent: no kernel for float64, tests of its own"),
    **dict.fromkeys(("test_dequantizelinear", "test_dynamicquantizelinear"), "quantized: tests of its own"),
    **dict.fromkeys(("test_basic_deform_conv", "test_deform_conv"), "no kernel in 1.19.2: tests of its own"),
    **dict.fromkeys(("test_averagepool_3d_default", "test_lppool_3d_default", "test_maxpool_3d_default"), "large"),
    **dict.fromkeys(
        ("test_gridsample_nearest", "test_gridsample_volumetric_nearest", "test_dropout_default_", "test_training_dropout", "test_range_float"),
        "an input without derivative has no judge in float64",
    ),
    **dict.fromkeys(
        (
            "test_pow_types_float32_uint", "test_reduce_max_empty_set", "test_acosh_example", "test_maxunpool_export_with_output_shape",
            "test_reversesequence_batch",
            "test_averagepool_3d_dilations_large_count_include_pad_is_1_ceil_mode_is_True", "test_scan_sum",
            "test_resize_downsample_scales_linear_align_corners", "test_resize_downsample_scales_cubic_align_corners",
        ),
        "no kernel, or one that differs between the judges",
    ),
    **dict.fromkeys(
        (
            "test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask_causal",
            "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal",
            "test_attention_causal_boolmask_nan_robustness", "test_attention_23_boolmask_fullymasked_row_nan_robustness",
            "test_attention_4d_causal_nonpad_negative_offset_structural_empty", "test_attention_23_fullymasked_qk_matmul_output_mode3_zero",
            "test_attention_24_fullymasked_qk_matmul_output_mode3_zero", "test_attention_local_window_gqa_rank4_mask",
        ),
        "infinite scores: NaN in rows that see nothing, or among the outputs",
    ),
    **dict.fromkeys(("test_reduce_log_sum_empty_set", "test_reduce_log_sum_exp_empty_set", "test_reduce_min_empty_set", "test_mod_float_edge_cases"), "infinite"),
    "test_l2normalization_axis_0": "so steep that differences are too coarse",
    "test_roialign": "the regions, which are inputs, are refused",
    "test_dft": "an axis that only the input tells",
    "test_resize_tf_crop_and_resize": "float64 regions have no kernel",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class BackendCase:
    """One of ONNX's node models; what `tests.gradients.rules.cases.judged` wants of a case."""

    name: str
    proto: onnx.ModelProto
    given: Sequence[np.ndarray]
    outputs: tuple[str, ...]
    wrt: tuple[str, ...]
    single: bool = False

    def model(self, *, double: bool = False) -> onnx.ModelProto:
        return in_double(self.proto) if double else self.proto

    def feeds(self) -> Arrays:
        """The test's own inputs, the floats a little moved, so that none sits on a kink or a tie."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        found = {v.name: np.asarray(a) for v, a in zip(self.proto.graph.input, self.given)}
        for name in self.wrt:
            found[name] = np.asarray(
                found[name] + rng.uniform(-0.01, 0.01, found[name].shape), np.float32
            )
        return found


def case_or_reason(test: TestCase) -> BackendCase | str:
    """The case, or why the model is left out."""
    model = test.model
    if test.name.endswith("_expanded") or "_expanded_" in test.name:
        return "the definition of another model"
    if any(o.domain not in ("", "ai.onnx", PREVIEW) for o in model.opset_import):
        return "another domain"
    for ends in (model.graph.input, model.graph.output):
        if FLOAT not in [v.type.tensor_type.elem_type for v in ends]:
            return NO_DERIVATIVE  # said without reading the model, which takes longest
    left_out = next(
        (reason for name, reason in LEFT_OUT.items() if test.name.startswith(name)), None
    )
    if left_out is not None:
        return left_out
    try:
        with pytest.MonkeyPatch.context() as patch:
            # Definitions in older operators can be computed in float64.
            patch.setattr(newer_operators, "newest_opset", lambda: OPSET)
            work = normalize(read_model(model))
    except ModelError:  # without a definition
        work = normalize(read_model(model))
    ends = [*work.graph.inputs, *work.graph.outputs]
    if any(not isinstance(v.type, ir.TensorType) for v in ends):
        return "a sequence or optional"
    inputs = [v.name or "" for v in work.graph.inputs if v.dtype == ir.DataType.FLOAT]
    outputs = [v.name or "" for v in work.graph.outputs if v.dtype == ir.DataType.FLOAT]
    wrt = [name for name in reachable_values(work, outputs, inputs) if name not in SETTINGS]
    if not wrt:
        return NO_DERIVATIVE
    outputs = [o for o in outputs if reachable_values(work, [o], wrt)]
    single = test.name.startswith(ROUNDED)
    return BackendCase(
        test.name, ir.to_proto(work), test.data_sets[0][0], tuple(outputs), tuple(wrt), single
    )


def test_the_rules_on_the_models_of_onnx_itself(request: pytest.FixtureRequest) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ONNX's own, while it makes its models
        tests = [t for t in load_model_tests(kind="node") if t.model is not None]
    found = {test.name: case_or_reason(test) for test in tests}
    cases = [case for case in found.values() if isinstance(case, BackendCase)]
    failed = []
    sampled = request.config.getoption("--sample")
    for case in cases:
        if sampled and not in_sample_of_table(case.name):
            continue
        try:
            judged(case)
        except Exception as error:
            failed.append(f"{case.name}: {str(error).strip().splitlines()[0]}")
    assert not failed, "\n".join(failed)
    # what is left out is left out for a reason that applies
    used = {name for name in LEFT_OUT for test in found if test.startswith(name)}
    assert used == set(LEFT_OUT)
    assert len(cases) > 500, Counter(reason for reason in found.values() if isinstance(reason, str))

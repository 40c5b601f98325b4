"""Choosing weights."""

from __future__ import annotations

import onnx
import pytest

from onnxfit.errors import ModelError, SettingError, UnknownNameError
from onnxfit.graph.records import FOLDED_FROM, signature_kinds
from onnxfit.graph.weights import all_weights, select_weights
from onnxfit.load.normalize import normalize
from onnxfit.load.opset import OPSET
from onnxfit.load.reading import read_model
from tests.graph.graphs import LINEAR, parse

MIXED = """<ir_version: 10, opset_import: ["": 21]> g (float[N, 2, 4, 4] x) => (float[N, 2, 4, 4] y)
  <float[2] scale = {1, 1}, float[2] bias = {0, 0}, float[2] mean = {0, 0}, float[2] var = {1, 1}, float low = {0}, float half = {0.5},
   float[2, 1, 1] gain = {1, 2}, float[1] mask = {-inf}, int64[1] axes = {1}>
  { n = BatchNormalization(x, scale, bias, mean, var)  c = Clip(n, low)  h = Mul(c, half)  g = Mul(h, gain)  m = Max(g, mask)
    u = Unsqueeze(m, axes)  y = Squeeze(u, axes) }"""


class TestChoosingWeights:
    def test_constants_settings_statistics_and_masks_are_no_weights(self) -> None:
        assert all_weights(normalize(parse(MIXED))) == ["scale", "bias", "gain"]

    def test_tables_of_positions_are_no_weights_but_can_be_named(self) -> None:
        model = normalize(
            parse(
                """<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
                g (float[N,T,2] x, int64[N,T] p, int32[N] l, int32 n) => (float[N,T,2] y)
                <float[2] w = {1,2}, float[2,1] c = {1,2}, float[2,1] s = {3,4}>
                { q = Mul(x, w)  r = com.microsoft.RotaryEmbedding(q, p, c, s)
                  y, a, b = com.microsoft.GroupQueryAttention<num_heads=1, kv_num_heads=1,
                    do_rotary=1>(q, r, q, , , l, n, c, s) }"""
            )
        )
        assert all_weights(model) == ["w"]
        assert select_weights(model, ["c"]) == ["c"]

    @pytest.mark.parametrize(
        ("note", "chosen"),
        [
            (None, ["table"]),
            (("kind", "PARAMETER"), ["table", "temperature"]),
            (("kind", "BUFFER"), []),
            (("kind", "CONSTANT_TENSOR"), []),
            (("folded", "['layer.weight', 'val_3']"), ["table", "temperature"]),
            (("folded", "['model.embed_tokens.embed_scale']"), []),
            (("folded", "['class_token', 'val_3']"), ["table"]),
            (("folded", "['zeros', 'val_3', 'slice_12', 'value_0_2', 'clone']"), []),
            (
                (
                    "folded",
                    "['attn.lifted_tensor_7', 'fill', '_to_copy_1', 'scalar_tensor_default']",
                ),
                [],
            ),
            (("folded", "['model.rotary_emb.inv_freq', 'cos_1', 'cat']"), []),
            (("folded", "garbage("), ["table"]),
        ],
    )
    @pytest.mark.parametrize("opset", [20, OPSET])
    def test_what_torchs_exporter_notes_is_believed(self, note, chosen, opset) -> None:
        model = parse(
            f"""<ir_version: 10, opset_import: ["": {opset}]> g (float[N, 2] x) => (float[N, 2] y)
            <float[2, 2] table = {{0, 1, 2, 3}}, float temperature = {{2}}, float[2] other = {{1, 2}}>
            {{ a = MatMul(x, table)  b = Mul(a, temperature)  y = Add(b, other) }}"""
        )
        keys = {
            "kind": "pkg.torch.export.graph_signature.InputSpec.kind",
            "folded": "pkg.onnxscript.optimizer.folded_from",
        }
        for name, shape in (("table", [2, 2]), ("temperature", [])) if note else ():
            model.graph.value_info.append(
                onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
            )
            model.graph.value_info[-1].metadata_props.add(key=keys[note[0]], value=note[1])
        assert all_weights(normalize(read_model(model))) == [*chosen, "other"]

    @pytest.mark.parametrize(
        ("origins", "chosen"),
        [
            ("['x', 'ones_like', 'cumsum']", False),
            ("['grid', 'val_1']", False),
            ("['block.table']", False),
            ("['lifted']", False),
            ("['convert_element_type_default', 'conv1d_1']", False),
            ("['token', 'expand']", True),
            ("['x', 'token']", True),
        ],
    )
    @pytest.mark.parametrize("opset", [20, OPSET])
    def test_the_signature_of_the_program_decides(self, origins, chosen, opset) -> None:
        model = parse(
            f"""<ir_version: 10, opset_import: ["": {opset}]> g (float[N, 2] x) => (float[N, 2] y)
            <float[2] made = {{1, 2}}, float[2] grid = {{1, 2}}> {{ a = Add(x, made)  y = Mul(a, grid) }}"""
        )
        model.graph.metadata_props.add(
            key="pkg.torch.export.ExportedProgram.graph_signature",
            value="# inputs\np_token: PARAMETER target='token'\nb_grid: BUFFER target='grid' persistent=True\n"
            "b_block_table: BUFFER target='block.table' persistent=False\n"
            "c_lifted: CONSTANT_TENSOR target='lifted'\nx: USER_INPUT\n\n# outputs\ny: USER_OUTPUT\n",
        )
        info = onnx.helper.make_tensor_value_info("made", onnx.TensorProto.FLOAT, [2])
        info.metadata_props.add(key=FOLDED_FROM, value=origins)
        model.graph.value_info.append(info)
        assert all_weights(normalize(read_model(model))) == ["made"] * chosen

    def test_the_signature_of_older_versions_of_torch_is_read(self) -> None:
        signature = (
            "ExportGraphSignature(input_specs=[InputSpec(kind=<InputKind.PARAMETER: 2>,"
            " arg=TensorArgument(name='p_weight'), target='weight', persistent=None),"
            " InputSpec(kind=<InputKind.USER_INPUT: 1>, arg=TensorArgument(name='input'),"
            " target=None, persistent=None)], output_specs=[OutputSpec(kind="
            "<OutputKind.USER_OUTPUT: 1>, arg=TensorArgument(name='linear'), target=None)])"
        )
        assert signature_kinds(signature) == {"weight": "PARAMETER", "input": "USER_INPUT"}

    @pytest.mark.parametrize(
        ("numbers", "is_mask"),
        [
            ("0, -1e9, -1e9, 0", True),
            ("0, -10000, 0, 0", True),
            ("1, -65504, 0.5, 0", True),
            ("1, -3.4028235e38, 0.5, 0", True),
            ("0, -inf, 0.5, 0", True),
            ("-1e9, -1e9, -1e9, -1e9", True),
            ("0, -9999, 0, 0", False),
            ("0, -20000, -30000, 0", False),
        ],
    )
    def test_masks_are_no_weights(self, numbers, is_mask) -> None:
        model = parse(
            f"""<ir_version: 10, opset_import: ["": 21]> g (float[N, 2, 2] x) => (float[N, 2, 2] y)
            <float[2, 2] w = {{1, 2, 3, 4}}, float[2, 2] mask = {{{numbers}}}>
            {{ q = MatMul(x, w)  s = MatMul(q, x)  y = Add(s, mask) }}"""
        )
        assert all_weights(normalize(model)) == (["w"] if is_mask else ["w", "mask"])
        assert select_weights(normalize(model), ["mask"]) == ["mask"]

    def test_large_negative_biases_and_matrices_are_weights(self) -> None:
        model = parse(
            """<ir_version: 10, opset_import: ["": 21]> g (float[N, 2] x) => (float[N, 2] y)
            <float[2, 2] w = {-20000, 1, 1, 1}, float[2] b = {-15000, 3}, float[2] c = {-15000, 3}>
            { a = MatMul(x, w)  h = Add(a, b)  y = Gemm(h, w, c) }"""
        )
        assert all_weights(normalize(model)) == ["w", "b", "c"]

    @pytest.mark.parametrize(
        ("patterns", "chosen"),
        [
            (None, ["scale", "bias", "gain"]),
            (["gain", "bias"], ["bias", "gain"]),
            ("*a*", ["scale", "bias", "half", "gain", "mask"]),
            (["!bias"], ["scale", "gain"]),
            (["!bias", "b*", "gain"], ["gain"]),
            (["half"], ["half"]),
        ],
    )
    def test_names_patterns_exclusions_in_any_order(self, patterns, chosen) -> None:
        assert select_weights(normalize(parse(MIXED)), patterns) == chosen

    def test_a_name_with_brackets_is_a_name(self) -> None:
        model = parse(LINEAR + " { s = MatMul(x, w)  y = Add(s, b) }")
        model.graph.initializer[0].name = model.graph.node[0].input[1] = "w[0]"
        assert select_weights(normalize(model), "w[0]") == ["w[0]"]

    def test_a_pattern_that_matches_nothing_suggests(self) -> None:
        with pytest.raises(
            UnknownNameError,
            match=r"No weight is called 'baias'. Did you mean 'bias'\? Known: bias, gain, scale",
        ):
            select_weights(normalize(parse(MIXED)), ["baias"])

    def test_statistics_cannot_be_trained(self) -> None:
        with pytest.raises(SettingError, match=r"'mean' is a running statistic"):
            select_weights(normalize(parse(MIXED)), ["mean"])

    def test_nothing_left(self) -> None:
        with pytest.raises(SettingError, match=r"selects no weight"):
            select_weights(normalize(parse(MIXED)), ["bias", "!b*"])

    def test_a_model_without_float_weights(self) -> None:
        model = parse(
            '<ir_version: 10, opset_import: ["": 21, "my": 1]> g (float[N, 2] x) => (float[N, 2] y)'
            ' { y = my.Layer(x) } <domain: "my", opset_import: ["": 21]> Layer (x) => (y) {'
            " w = Constant<value = float[2, 2] {1, 2, 3, 4}>()  y = MatMul(x, w) }"
        )
        with pytest.raises(
            ModelError, match=r"no float weights.*1 float tensors in Constant nodes inside its func"
        ):
            select_weights(normalize(model), None)

    def test_weights_inside_a_body_are_pointed_at(self) -> None:
        model = parse(
            """<ir_version: 10, opset_import: ["": 21]> g (float[2] x, bool c) => (float[2] y) { y = If (c)
            <then_branch = t () => (float[2] a) <float[2] w = {1, 2}> { a = Mul(x, w) }, else_branch = e () => (float[2] b) { b = Neg(x) }> }"""
        )
        with pytest.raises(
            ModelError,
            match=(
                r"no float weights.*The 1 initializers inside the bodies .* move them to the main graph"
            ),
        ):
            select_weights(normalize(model), None)

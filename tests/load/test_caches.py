"""The training view of a model that decodes, and what was trained back in the file with caches.

The models have the nodes that onnxruntime-genai's builder writes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import helper
from onnx.numpy_helper import from_array

from onnxfit import LoRA, Trainer, inspect
from onnxfit.graph.model import with_initializers
from onnxfit.load.caches import without_caches
from onnxfit.losses import CrossEntropy
from onnxfit.optimizers import Adam
from tests.gradients.rules.cases.packed_weights import IS_LATER

LAYERS, HEADS, GROUPS, SIZE, VOCABULARY, LENGTH = 2, 4, 2, 16, 12, 6
HIDDEN = HEADS * SIZE
Arrays = dict[str, np.ndarray[Any, Any]]


class Decoder:
    """A small decoder of rotary attention and RMS normalization, built node by node."""

    def __init__(self, packed: bool, **attention: Any) -> None:
        self.rng = np.random.default_rng(0)
        self.packed = packed
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []
        self.attention = attention
        self.model = self.build()

    def build(self) -> onnx.ModelProto:
        self.add_mask()
        self.weight("embed", (VOCABULARY, HIDDEN))
        self.node("Gather", ["embed", "input_ids"], ["embedded"])
        self.weight("norm", (HIDDEN,))
        self.node("SimplifiedLayerNormalization", ["embedded", "norm"], ["x"], axis=-1)
        skip, x = "embedded", "x"
        for i in range(LAYERS):
            width = (HEADS + 2 * GROUPS) * SIZE
            self.product(x, f"qkv.{i}", HIDDEN, width)
            self.attend(f"qkv.{i}/y", i)
            self.product(f"attention.{i}", f"out.{i}", HIDDEN, HIDDEN)
            self.weight(f"norm.{i}", (HIDDEN,))
            names = [f"normal.{i}", "", "", f"skip.{i}"]
            inputs = [skip, f"out.{i}/y", f"norm.{i}"]
            self.node("SkipSimplifiedLayerNormalization", inputs, names, "com.microsoft")
            x, skip = names[0], names[-1]
        self.product(x, "head", HIDDEN, VOCABULARY)
        self.node("Identity", ["head/y"], ["logits"])
        inputs = [
            helper.make_tensor_value_info("input_ids", 7, ["batch", "sequence_length"]),
            helper.make_tensor_value_info("attention_mask", 7, ["batch", "total_length"]),
            *(self.cache(f"past.{i}.{kind}", "past_length") for i, kind in self.kinds()),
        ]
        outputs = [
            helper.make_tensor_value_info("logits", 1, ["batch", "sequence_length", VOCABULARY]),
            *(self.cache(f"present.{i}.{kind}", "total_length") for i, kind in self.kinds()),
        ]
        graph = helper.make_graph(self.nodes, "decoder", inputs, outputs, self.tensors)
        imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=imports, ir_version=10)

    def kinds(self) -> list[tuple[int, str]]:
        return [(i, kind) for i in range(LAYERS) for kind in ("key", "value")]

    def cache(self, name: str, length: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, 1, ["batch", GROUPS, length, SIZE])

    def node(
        self, kind: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: Any
    ) -> None:
        self.nodes.append(helper.make_node(kind, inputs, outputs, domain=domain, **attributes))

    def weight(self, name: str, shape: tuple[int, ...]) -> None:
        array = self.rng.normal(size=shape) / np.sqrt(shape[0]) + (len(shape) == 1)
        self.tensors.append(from_array(array.astype(np.float32), name))

    def product(self, x: str, name: str, rows: int, columns: int) -> None:
        """A product, of float or of packed weights with an adapter beside them."""
        if not self.packed:
            self.weight(name, (rows, columns))
            self.node("MatMul", [x, name], [f"{name}/y"])
            return
        bytes_ = self.rng.integers(0, 256, (columns, rows // 16, 8)).astype(np.uint8)
        scales = self.rng.uniform(0.01, 0.03, (columns, rows // 16)).astype(np.float32)
        self.tensors += [from_array(bytes_, f"{name}_Q4"), from_array(scales, f"{name}_scales")]
        self.node(
            "MatMulNBits", [x, f"{name}_Q4", f"{name}_scales"], [f"{name}/base"], "com.microsoft",
            K=rows, N=columns, bits=4, block_size=16,
        )  # fmt: skip
        self.weight(f"{name}.A", (rows, 2))
        self.tensors.append(from_array(np.zeros((2, columns), np.float32), f"{name}.B"))
        self.node("MatMul", [x, f"{name}.A"], [f"{name}/xA"])
        self.node("MatMul", [f"{name}/xA", f"{name}.B"], [f"{name}/xAB"])
        self.node("Add", [f"{name}/base", f"{name}/xAB"], [f"{name}/y"])

    def add_mask(self) -> None:
        """The last position of each row, and the number of past and new tokens."""
        for name, value in (("one", np.array([1])), ("at", np.array(1))):
            self.tensors.append(from_array(value, name))
        self.node("ReduceSum", ["attention_mask", "one"], ["lengths"], keepdims=0)
        self.node("Sub", ["lengths", "one"], ["last"])
        self.node("Cast", ["last"], ["last32"], to=6)
        self.node("Shape", ["attention_mask"], ["sizes"])
        self.node("Gather", ["sizes", "at"], ["total"])
        self.node("Cast", ["total"], ["total32"], to=6)
        angles = np.arange(2 * LENGTH)[:, None] / 10.0 ** np.arange(SIZE // 2)
        for name, f in (("cos", np.cos), ("sin", np.sin)):
            self.tensors.append(from_array(f(angles).astype(np.float32), name))

    def attend(self, qkv: str, i: int) -> None:
        past = [f"past.{i}.key", f"past.{i}.value"]
        self.node(
            "GroupQueryAttention", [qkv, "", "", *past, "last32", "total32", "cos", "sin"],
            [f"attention.{i}", f"present.{i}.key", f"present.{i}.value"], "com.microsoft",
            num_heads=HEADS, kv_num_heads=GROUPS, do_rotary=1, **self.attention,
        )  # fmt: skip


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )


def decode(model: onnx.ModelProto, ids: np.ndarray[Any, Any], steps: list[int]) -> Any:
    """Logits of all tokens, which the model gets in pieces of these lengths, with its caches."""
    run = session(model)
    caches: Arrays = {
        v.name: np.zeros((len(ids), GROUPS, 0, SIZE), np.float32)
        for v in run.get_inputs()
        if v.name.startswith("past")
    }
    logits, done = [], 0
    for count in steps:
        feeds = {
            "input_ids": ids[:, done : done + count],
            "attention_mask": np.ones((len(ids), done + count), np.int64),
            **caches,
        }
        results = dict(zip([o.name for o in run.get_outputs()], run.run(None, feeds)))
        logits.append(results["logits"])
        caches = {name: results[name.replace("past", "present")] for name in caches}
        done += count
    return np.concatenate(logits, axis=1)


def counting() -> tuple[Arrays, np.ndarray[Any, Any]]:
    """Rows that count up, and the next token of each."""
    ids = (np.random.default_rng(1).integers(0, VOCABULARY, (8, 1)) + np.arange(LENGTH)) % 12
    feeds = {"input_ids": ids.astype(np.int64), "attention_mask": np.ones_like(ids)}
    return feeds, (ids + 1) % VOCABULARY


def sizes(values: Any) -> dict[str, list[int | str]]:
    return {
        v.name: [d.dim_value or d.dim_param for d in v.type.tensor_type.shape.dim] for v in values
    }


@pytest.mark.filterwarnings("ignore:.*quantized")
@pytest.mark.parametrize("packed", [False, True], ids=["float", "4 bits"])
def test_what_is_trained_on_the_view_runs_in_the_file_with_caches(packed: bool) -> None:
    """All at once, and token by token."""
    file = Decoder(packed).model
    weights = ["*.A", "*.B"] if packed else None
    trainer = Trainer(
        without_caches(file), weights, loss={"logits": CrossEntropy()}, optimizer="adam", threads=1
    )
    assert not {"cos", "sin", "head_scales"} & set(trainer.get_weights())
    feeds, labels = counting()
    losses = trainer.fit(feeds, labels, epochs=4, batch_size=4, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    filled = with_initializers(file, trainer.get_weights())
    assert [n.SerializeToString() for n in filled.graph.node] == [
        n.SerializeToString() for n in file.graph.node
    ]
    expected = trainer.predict(feeds)
    for steps in ([LENGTH], [LENGTH - 2, 1, 1]):
        found = decode(filled, feeds["input_ids"], steps)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    before = decode(file, feeds["input_ids"], [LENGTH])
    assert np.abs(before - expected).max() > 1e-3


@pytest.mark.filterwarnings("ignore:.*quantized")
@pytest.mark.parametrize("packed", [False, True], ids=["float", "4 bits"])
def test_a_trainer_takes_a_file_with_caches_and_exports_it_with_them(
    packed: bool, tmp_path: Any
) -> None:
    file = Decoder(packed).model
    before = file.SerializeToString()
    weights = ["*.A", "*.B"] if packed else None
    trainer = Trainer(file, weights, loss="causal_lm", metrics="perplexity", threads=1)
    feeds, _ = counting()
    history = trainer.fit(feeds, feeds["input_ids"], epochs=3, batch_size=4, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    np.testing.assert_allclose(history["perplexity"], np.exp(history["loss"]), rtol=1e-5)
    assert trainer.model.SerializeToString() == before == file.SerializeToString()
    exported = trainer.export()
    assert sizes(exported.graph.input) == sizes(file.graph.input)
    assert sizes(exported.graph.output) == sizes(file.graph.output)
    expected = trainer.predict(feeds)
    for steps in ([LENGTH], [LENGTH - 2, 1, 1]):
        found = decode(exported, feeds["input_ids"], steps)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    loaded = Trainer.load(trainer.save(tmp_path / "t.onnxfit"))
    np.testing.assert_array_equal(loaded.predict(feeds), expected)
    assert loaded.export().SerializeToString(deterministic=True) == exported.SerializeToString(
        deterministic=True
    )
    assert inspect(file, weights).trains


@pytest.mark.parametrize("packed", [False, True], ids=["float", "4 bits"])
def test_adapters_train_on_the_view_and_come_into_the_file_with_caches(
    packed: bool, tmp_path: Any
) -> None:
    file = Decoder(packed).model
    lora = LoRA(rank=2, target="*", dropout=0.1)
    trainer = Trainer(file, adapters=lora, loss="causal_lm", optimizer=Adam(0.01), threads=1)
    feeds, _ = counting()
    losses = trainer.fit(feeds, feeds["input_ids"], epochs=4, batch_size=4, verbose=0).history
    assert losses["loss"][-1] < losses["loss"][0]
    exported, expected = trainer.export(), trainer.predict(feeds)
    assert sizes(exported.graph.input) == sizes(file.graph.input)
    for steps in ([LENGTH], [LENGTH - 2, 1, 1]):
        found = decode(exported, feeds["input_ids"], steps)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(decode(file, feeds["input_ids"], [LENGTH]) - expected).max() > 1e-3
    loaded = Trainer.load(trainer.save(tmp_path / "t.onnxfit"))
    np.testing.assert_array_equal(loaded.predict(feeds), expected)


def test_integers_in_a_file_with_caches_are_trained() -> None:
    """Both forms at once: the view without caches, and floats in the place of integers."""
    file = onnx.parser.parse_model(INTEGERS)
    trainer = Trainer(file, loss="mse", optimizer=Adam(0.1))
    x = np.random.default_rng(0).normal(size=(4, 5, 8)).astype(np.float32)
    losses = trainer.fit(x, x, epochs=5, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    exported = trainer.export()
    assert sizes(exported.graph.input) == sizes(file.graph.input)
    (w,) = [t for t in exported.graph.initializer if t.name == "w"]
    assert w.data_type == onnx.TensorProto.INT8
    empty = np.zeros((4, 2, 0, 4), np.float32)
    (y,) = session(exported).run(["y"], {"x": x, "k": empty, "v": empty})
    np.testing.assert_allclose(y, trainer.predict(x), rtol=1e-5, atol=1e-5)


def test_inputs_and_outputs_of_caches_go_and_lengths_become_one() -> None:
    file = Decoder(False, softcap=0.0, sliding_window_cache=1).model
    before = file.SerializeToString()
    view = without_caches(file)
    assert file.SerializeToString() == before
    tokens: list[int | str] = ["batch", "sequence_length"]
    assert sizes(view.graph.input) == {"input_ids": tokens, "attention_mask": tokens}
    assert sizes(view.graph.output) == {"logits": [*tokens, VOCABULARY]}
    for node in view.graph.node:
        if node.op_type == "GroupQueryAttention":
            assert list(node.input[3:5]) == ["", ""]
            names = {a.name for a in node.attribute}
            assert names == {"num_heads", "kv_num_heads", "do_rotary"}
    assert without_caches(view) is view


def test_a_softcap_that_caps_stays() -> None:
    view = without_caches(Decoder(False, softcap=30.0).model)
    nodes = [node for node in view.graph.node if node.op_type == "GroupQueryAttention"]
    assert [a.f for node in nodes for a in node.attribute if a.name == "softcap"] == [30.0] * LAYERS


MODELS = {
    "MultiHeadAttention": """g (float[N,T,8] q, float[N,2,P,4] k, float[N,2,P,4] v)
        => (float[N,T,8] y, float[N,2,S,4] nk, float[N,2,S,4] nv)
        { y, nk, nv = com.microsoft.MultiHeadAttention<num_heads=2, unidirectional=1>
            (q, q, q, , , , k, v) }""",
    "Attention": """g (float[N,T,8] q, float[2,N,2,P,4] k) => (float[N,T,8] y, float[2,N,2,S,4] nk)
        <float[8,24] w, float[24] b>
        { y, nk = com.microsoft.Attention<num_heads=2, unidirectional=1>(q, w, b, , k) }""",
}
ONNX = """<ir_version: 10, opset_import: ["": 23]> g
    (float[N,T,8] x, float[N,2,P,4] k, float[N,2,P,4] v)
    => (float[N,T,8] y, float[N,2,S,4] nk, float[N,2,S,4] nv)
    <float[8] w = {1, 2, -1, 1, 0.5, 2, 1, 3}>
    { q = Mul(x, w)
      y, nk, nv = Attention<q_num_heads=2, kv_num_heads=2, is_causal=1>(q, x, x, , k, v) }"""
INTEGERS = """<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> g
    (float[N,T,8] x, float[N,2,P,4] k, float[N,2,P,4] v)
    => (float[N,T,8] y, float[N,2,S,4] nk, float[N,2,S,4] nv)
    <int8[8] w = {1, 20, -90, 100, 50, 25, 10, 30}, float scale = {0.02}, int8 zero = {0}>
    { floats = DequantizeLinear(w, scale, zero) q = Mul(x, floats)
      y, nk, nv = com.microsoft.MultiHeadAttention<num_heads=2, unidirectional=1>
          (q, x, x, , , , k, v) }"""
OTHERS = {
    "no cache": "g (float[N,T,8] q) => (float[N,T,8] y) { y = Relu(q) }",
    "a cache that something else reads": """g (float[N,T,8] q, float[N,2,P,4] k, float[N,2,P,4] v)
        => (float[N,T,8] y, int64[4] s)
        { y = com.microsoft.MultiHeadAttention<num_heads=2>(q, q, q, , , , k, v) s = Shape(v) }""",
    "a cache that a body reads": """g (float[N,T,8] q, float[N,2,P,4] k, bool c)
        => (float[N,T,8] y, float[N,2,P,4] z)
        { y = com.microsoft.MultiHeadAttention<num_heads=2>(q, q, q, , , , k, k)
          z = If (c) <then_branch = t () => (float[N,2,P,4] a) { a = Relu(k) },
                      else_branch = e () => (float[N,2,P,4] b) { b = Neg(k) }> }""",
    "a cache that is computed": """g (float[N,T,8] q, float[N,2,P,4] k) => (float[N,T,8] y)
        { v = Relu(k) y = com.microsoft.MultiHeadAttention<num_heads=2>(q, q, q, , , , v, v) }""",
    "a cache beside one that is computed": """g (float[N,T,8] q, float[N,2,P,4] k, float[N,2,P,4] u)
        => (float[N,T,8] y, float[N,T,8] z)
        { v = Relu(q) z = com.microsoft.MultiHeadAttention<num_heads=2>(q, q, q, , , , k, u)
          y = com.microsoft.MultiHeadAttention<num_heads=2>(q, q, q, , , , v, k) }""",
}


def parse(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> {text}'
    )


@pytest.mark.parametrize("operator", MODELS)
def test_other_attentions_lose_their_caches(operator: str) -> None:
    view = without_caches(parse(MODELS[operator]))
    assert sizes(view.graph.input) == {"q": ["N", "T", 8]}
    assert sizes(view.graph.output) == {"y": ["N", "T", 8]}


def test_the_attention_of_onnx_trains_without_its_caches() -> None:
    """A step in an older opset, and so on an onnxruntime that does not know the operator."""
    file = onnx.parser.parse_model(ONNX)
    trainer = Trainer(without_caches(file), loss="mse", optimizer="adam")
    x = np.random.default_rng(0).normal(size=(4, 5, 8)).astype(np.float32)
    losses = trainer.fit(x, x, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    if not IS_LATER:
        return
    empty = np.zeros((4, 2, 0, 4), np.float32)
    run = session(with_initializers(file, trainer.get_weights()))
    (y,) = run.run(["y"], {"x": x, "k": empty, "v": empty})
    np.testing.assert_allclose(y, trainer.predict(x), rtol=1e-5, atol=1e-5)


def test_an_attention_of_caches_alone_is_emptied() -> None:
    model = parse(
        "g (float[N,2,P,4] k) => (float[N,T,8] y)"
        " { y = com.microsoft.MultiHeadAttention<num_heads=2>(, , , , , , k, k) }"
    )
    assert not without_caches(model).graph.node[0].input


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_plainly_a_cache_stays(name: str) -> None:
    model = parse(OTHERS[name])
    assert without_caches(model) is model


def test_lengths_keep_their_names_where_the_number_of_tokens_has_several() -> None:
    model = parse(MODELS["MultiHeadAttention"])
    for name in ("S", "U"):
        model.graph.input.append(helper.make_tensor_value_info(f"mask_{name}", 7, ["N", name]))
    assert sizes(without_caches(model).graph.input)["mask_S"] == ["N", "S"]
    del model.graph.input[-1]
    assert sizes(without_caches(model).graph.input)["mask_S"] == ["N", "T"]

"""Weights in Constant nodes: they train like initializers, and export writes them back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnxruntime import InferenceSession

import onnxfit
from onnxfit.graph import names
from onnxfit.graph.subgraphs import nodes_of
from onnxfit.load.constant_nodes import lift_constants, lower_constants, place_of
from onnxfit.load.reading import load_model, read_model
from tests import models
from tests.constants import batch_for, constants_of, structure, trained, with_constants

NETWORKS: dict[str, Callable[[], onnx.ModelProto]] = {
    "linear": lambda: models.linear(3, 2, 0.5, 0.25),
    "mlp": models.mlp,
    "wide mlp": lambda: models.mlp((4, 40, 40, 3), "Relu"),
    "two outputs": models.two_outputs,
    "two inputs": models.two_inputs,
    "convolutional": models.convolutional,
    "dropout": lambda: models.convolutional(dropout=0.5),
}


def parse(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')


MIXED = """g (float[N, 2] x) => (float[N, 2] y)
    <float[2, 2] t = {1, 2, 3, 4}, float[2] d = {1, 2}, float[2, 2] u = {1, 2, 3, 4}> {
    v = Constant<value = float[2, 2] {5, 6, 7, 8}>()  b = Constant<value_floats = [0.5, 0.25]>()
    s = Constant<value = float[2] {2, 3}>()  half = Constant<value_float = 0.5>()
    k = MatMul(x, t)  l = Add(k, d)  h = MatMul(l, u)  r = Tanh(h)  c = Mul(r, s)  a = Mul(c, half)  p = MatMul(a, v)  y = Add(p, b) }"""


class TestLaw:
    """A network with Constant nodes is the same network as one with initializers."""

    @pytest.mark.parametrize("backend", ["full", "in_place", "forward_backward"])
    @pytest.mark.parametrize("network", NETWORKS)
    def test_training_has_the_same_bits(self, network: str, backend: str) -> None:
        plain = NETWORKS[network]()
        constant = with_constants(plain)
        one, other = (trained(model, backend=backend) for model in (plain, constant))
        assert list(other.get_weights()) == list(one.get_weights())
        for name, array in one.get_weights().items():
            np.testing.assert_array_equal(other.get_weights()[name], array, err_msg=name)

    @pytest.mark.parametrize("network", NETWORKS)
    def test_export_changes_only_numbers(self, network: str) -> None:
        constant = with_constants(NETWORKS[network]())
        trainer = trained(constant)
        exported = trainer.export()
        assert structure(exported) == structure(constant)
        found = constants_of(exported)
        for name, array in trainer.get_weights().items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)

    @pytest.mark.parametrize("network", NETWORKS)
    def test_half_of_the_tensors(self, network: str) -> None:
        plain = NETWORKS[network]()
        half = [t.name for t in plain.graph.initializer][::2]
        constant = with_constants(plain, half)
        trainer = trained(constant)
        exported = trainer.export()
        assert structure(exported) == structure(constant)
        x, _ = batch_for(constant)
        session = InferenceSession(exported.SerializeToString())
        predicted = trainer.predict(x)
        expected = predicted.values() if isinstance(predicted, dict) else [predicted]
        for found, array in zip(session.run(None, x), expected):
            np.testing.assert_array_equal(found, array)


class TestInverse:
    @pytest.mark.parametrize("network", NETWORKS)
    def test_lowering_restores_every_byte(self, network: str) -> None:
        given = load_model(with_constants(NETWORKS[network]()))
        before = given.SerializeToString(deterministic=True)
        lift_constants(given)
        assert {t.name for t in given.graph.initializer} == {
            t.name for t in NETWORKS[network]().graph.initializer
        }
        onnx.checker.check_model(given, full_check=True)
        lift_constants(given)  # changes nothing
        assert lower_constants(given).SerializeToString(deterministic=True) == before

    def test_every_kind_of_attribute(self) -> None:
        given = load_model(parse(MIXED))
        given.graph.node[0].doc_string = "kept"
        given.graph.node[0].attribute[0].t.name = "own name"
        before = given.SerializeToString(deterministic=True)
        lift_constants(given)
        assert {t.name for t in given.graph.initializer} == {"t", "d", "u", "v", "b", "s", "half"}
        assert lower_constants(given).SerializeToString(deterministic=True) == before

    def test_constants_of_the_graph_stay_where_they_are(self) -> None:
        given = load_model(
            parse(
                """g (float[2, 3] x) => (float[N, 2] y, float[2] z) {
                axes = Constant<value_ints = [1, 0]>()  z = Constant<value = float[2] {1, 2}>()
                unread = Constant<value = float[2] {1, 2}>()  t = Transpose<perm = [1, 0]>(x)
                none = Constant<value = float[0] {}>()  shape = Constant<value = int64[2] {-1, 2}>()
                r = Reshape(t, shape)  s = Add(r, z)  y = Concat<axis = 0>(s, r) }"""
            )
        )
        before = given.SerializeToString(deterministic=True)
        lift_constants(given)
        assert given.SerializeToString(deterministic=True) == before

    def test_a_node_without_its_tensor_is_removed(self) -> None:
        given = load_model(parse(MIXED))
        lift_constants(given)
        given.graph.initializer.remove(next(t for t in given.graph.initializer if t.name == "v"))
        lower_constants(given, kept={"b"})
        assert set(constants_of(given)) == {"s"}
        assert [t.name for t in given.graph.initializer] == ["t", "d", "u", "b"]
        assert not any(place_of(node) for node in given.graph.node)

    @pytest.mark.parametrize("array", [np.zeros(3), np.zeros((2, 1), np.float32), np.ones(2)])
    def test_numbers_that_a_list_of_floats_cannot_have(self, array: np.ndarray) -> None:
        given = load_model(parse(MIXED))
        lift_constants(given)
        tensor = next(t for t in given.graph.initializer if t.name == "b")
        tensor.CopyFrom(numpy_helper.from_array(array, "b"))
        lower_constants(given)
        (node,) = (node for node in given.graph.node if node.output[0] == "b")
        assert node.attribute[0].name == "value"
        np.testing.assert_array_equal(numpy_helper.to_array(node.attribute[0].t), array)

    def test_reserved_names(self) -> None:
        model = with_constants(models.linear())
        model.graph.node[0].output[0] = model.graph.node[1].input[1] = f"{names.PLACE}w"
        with pytest.raises(onnxfit.ModelError, match=r"called onnxfit\.constant_node/w\."):
            read_model(model)

    def test_old_files_need_no_inputs(self) -> None:
        model = with_constants(models.linear(2, 1, 1.5, 0.5))
        model.ir_version = 3
        trainer = trained(model)
        assert structure(trainer.export()) == structure(model)


class TestRoles:
    """Which Constant nodes hold weights by default."""

    def test_a_layer_makes_the_tensor_a_weight(self) -> None:
        trainer = onnxfit.Trainer(parse(MIXED), loss="mse")
        assert set(trainer.get_weights()) == {"t", "d", "u", "v", "b"}
        assert "Constant node" in trainer.summary()
        reasons = {use.name: use.parameter for use in onnxfit.inspect(parse(MIXED)).initializers}
        assert reasons["s"] == "Constant node"
        assert "half" not in reasons

    @pytest.mark.parametrize("name", ["s", "half"])
    def test_others_can_be_selected_by_name(self, name: str) -> None:
        trainer = trained(parse(MIXED), weights=["u", name])
        before = onnxfit.Trainer(parse(MIXED), weights=["u", name]).get_weights()[name]
        after = trainer.get_weights()[name]
        assert (before != after).any()
        others = onnxfit.Trainer(parse(MIXED), weights="!v", loss="mse").get_weights()
        assert others.keys() == {"t", "d", "u", "b"}
        exported = trainer.export()
        assert len(exported.graph.node) == len(parse(MIXED).graph.node)
        lift_constants(exported)
        tensor = next(t for t in exported.graph.initializer if t.name == name)
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), after)

    def test_patterns_match_only_weights(self) -> None:
        trainer = onnxfit.Trainer(parse(MIXED), loss="mse", weights="*")
        assert set(trainer.get_weights()) == {"t", "d", "u", "v", "b"}

    def test_rules_of_initializers_hold_if_all_weights_are_constants(self) -> None:
        model = parse(MIXED)
        names = ["t", "d", "u", "v", "b", "s", "half"]
        lifted = read_model(model).whole()
        lower_constants(lifted, kept=names)
        assert {t.name for t in lifted.graph.initializer} == set(names)
        expected = set(onnxfit.Trainer(lifted, loss="mse").get_weights())
        found = set(onnxfit.Trainer(with_constants(model), loss="mse").get_weights())
        assert found == expected == {"t", "d", "u", "v", "b", "s"}

    def test_a_new_head_changes_no_role(self) -> None:
        model = parse(
            """g (float[N, 2] x) => (float[N, 2] y) {
            u = Constant<value = float[2, 2] {1, 2, 3, 4}>()  s = Constant<value = float[2] {5, 6}>()
            w = Constant<value = float[2, 2] {1, 2, 3, 5}>()  v = Constant<value = float[2, 2] {2, 3, 4, 5}>()
            h = MatMul(x, u)  r = Tanh(h)  k = MatMul(r, w)  c = Mul(k, s)  y = MatMul(c, v) }"""
        )
        assert set(onnxfit.Trainer(with_initializer(model, "v"), loss="mse").get_weights()) == {
            *("u", "s", "w", "v")
        }

    @pytest.mark.parametrize("number", [0, 1])
    def test_zeros_and_ones_stand_for_missing_parameters(self, number: int) -> None:
        text = MIXED.replace(
            "float[2, 2] {5, 6, 7, 8}", "float[2, 2] {" + f"{number}, " * 3 + f"{number}}}"
        )
        assert "v" not in onnxfit.Trainer(parse(text), loss="mse").get_weights()

    def test_numbers_around_the_layers_are_constants(self) -> None:
        model = parse(
            """g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] u = {1, 2, 3, 4}> {
            mean = Constant<value = float[2] {5, 6}>()  scale = Constant<value = float[2] {7, 8}>()
            c = Sub(x, mean)  n = Div(c, scale)  h = MatMul(n, u)  m = Mul(h, scale)  y = Add(m, mean) }"""
        )
        assert set(onnxfit.Trainer(model, loss="mse").get_weights()) == {"u"}

    def test_statistics_and_settings(self) -> None:
        trainer = onnxfit.Trainer(with_constants(models.convolutional(dropout=0.5)), loss="mse")
        assert "ratio" not in trainer.get_weights()
        assert trainer._training.recipe.statistics == ("bn.mean", "bn.var")

    def test_a_file_of_torch_is_doubted(self) -> None:
        """torch's older exporter writes parameters as initializers with the names of modules."""
        model = with_module_names(parse(MIXED), "t", "d", "u")
        with pytest.warns(UserWarning, match=r"whether 'v', 'b' are parameters or buffers"):
            onnxfit.Trainer(model, loss="mse")

    @pytest.mark.parametrize("by_torch", [True, False])
    def test_a_table(self, by_torch: bool) -> None:
        model = parse(
            """g (int64[N] i) => (float[N, 2] y)
            <float[2, 2] u = {1, 2, 3, 4}, float[2, 2] v = {5, 6, 7, 8}> {
            t = Constant<value = float[2, 2] {5, 6, 7, 8}>()  h = Gather(t, i)  k = MatMul(h, u)  y = MatMul(k, v) }"""
        )
        if by_torch:
            model = with_module_names(model, "u", "v")
        weights = onnxfit.Trainer(model, loss="mse").get_weights()
        assert ("t" in weights) is not by_torch

    def test_weights_in_functions_are_reported(self) -> None:
        model = onnx.parser.parse_model(
            """<ir_version: 8, opset_import: ["": 17, "my": 1]>
            g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] u = {1, 2, 3, 4}> {
            h = MatMul(x, u)  y = my.Layer(h) }
            <domain: "my", opset_import: ["": 17]> Layer (x) => (y) {
            w = Constant<value = float[2, 2] {1, 2, 3, 4}>()  y = MatMul(x, w) }"""
        )
        with pytest.warns(UserWarning, match=r"not trained: Constant nodes inside functions"):
            onnxfit.Trainer(model, loss="mse")
        inlined = onnxfit.Trainer(onnx.inliner.inline_local_functions(model), loss="mse")
        assert len(inlined.get_weights()) == 2

    def test_a_file_with_all_weights_in_functions(self) -> None:
        model = onnx.parser.parse_model(
            """<ir_version: 8, opset_import: ["": 17, "my": 1]>
            g (float[N, 2] x) => (float[N, 2] y) { y = my.Layer(x) }
            <domain: "my", opset_import: ["": 17]> Layer (x) => (y) {
            w = Constant<value = float[2, 2] {1, 2, 3, 4}>()  y = MatMul(x, w) }"""
        )
        with pytest.raises(onnxfit.ModelError, match=r"1 float tensors in Constant nodes inside"):
            onnxfit.Trainer(model, loss="mse")
        assert "inline the functions first" in str(onnxfit.inspect(model))


def with_module_names(model: onnx.ModelProto, *names: str) -> onnx.ModelProto:
    """The model with names of modules for some initializers."""
    new = {name: f"{name}.weight" for name in names}
    for tensor in model.graph.initializer:
        tensor.name = new.get(tensor.name, tensor.name)
    for node in model.graph.node:
        node.input[:] = [new.get(name, name) for name in node.input]
    return model


def with_initializer(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    lifted = load_model(model)
    lift_constants(lifted)
    return lower_constants(lifted, kept={name})


class TestGraphs:
    """Forms of graphs around a Constant node."""

    @pytest.mark.parametrize(
        "view",
        [
            "r = Identity(w)",
            "r = Transpose<perm = [1, 0]>(w)",
            "d = Cast<to = 11>(w)  r = Cast<to = 1>(d)",
            "i = Identity(w)  t = Transpose<perm = [1, 0]>(i)  r = Identity(t)",
        ],
    )
    def test_nodes_between_constant_and_layer(self, view: str) -> None:
        text = "g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] u = {1, 2, 3, 4}> { %s %s h = MatMul(x, u)  y = MatMul(h, r) }"
        constant = parse(text % ("w = Constant<value = float[2, 2] {5, 6, 7, 8}>()", view))
        plain = with_initializer(constant, "w")
        one, other = trained(plain), trained(constant)
        assert other.get_weights().keys() == one.get_weights().keys() == {"u", "w"}
        np.testing.assert_array_equal(other.get_weights()["w"], one.get_weights()["w"])
        assert structure(other.export()) == structure(constant)

    def test_one_node_with_two_readers_is_one_weight(self) -> None:
        model = parse(
            """g (float[N, 2] x) => (float[N, 2] y) { w = Constant<value = float[2, 2] {5, 6, 7, 8}>()
            h = MatMul(x, w)  y = MatMul(h, w) }"""
        )
        trainer = trained(model)
        assert list(trainer.get_weights()) == ["w"]
        assert structure(trainer.export()) == structure(model)

    def test_two_nodes_with_equal_tensors_are_two_weights(self) -> None:
        model = parse(
            """g (float[N, 2] x) => (float[N, 2] y) { w = Constant<value = float[2, 2] {5, 6, 7, 8}>()
            v = Constant<value = float[2, 2] {5, 6, 7, 8}>()  h = MatMul(x, w)  y = MatMul(h, v) }"""
        )
        weights = trained(model).get_weights()
        assert (weights["w"] != weights["v"]).any()

    def test_sparse_tensors_become_dense(self) -> None:
        sparse = helper.make_sparse_tensor(
            helper.make_tensor("values", 1, [2], [1.5, 2.5]),
            helper.make_tensor("indices", 7, [2], [0, 3]),
            [2, 2],
        )
        model = models.linear(2, 2, 1.0)
        del model.graph.initializer[:]
        model.graph.node.insert(0, helper.make_node("Constant", [], ["w"], sparse_value=sparse))
        exported = trained(model).export()
        assert [node.op_type for node in exported.graph.node] == ["Constant", "MatMul"]
        assert constants_of(exported)["w"].shape == (2, 2)

    def test_branches_with_equal_names(self) -> None:
        model = parse(
            """g (float[N, 2] x, bool[1] c) => (float[N, 2] y) { k = If (c) <
            then_branch = t () => (float[N, 2] a) { w = Constant<value = float[2, 2] {1, 2, 3, 4}>()
                n = Neg(x)  a = MatMul(n, w) },
            else_branch = e () => (float[N, 2] b) { w = Constant<value = float[2, 2] {5, 6, 7, 8}>()
                one = Constant<value_float = 1.0>()  s = Add(x, one)  b = MatMul(s, w) }>
            y = Identity(k) }"""
        )
        onnx.checker.check_model(model)
        assert [t.name for t in read_model(model).graph.initializer] == ["w_2", "w_3"]
        trainer = onnxfit.Trainer(model, loss="mse", optimizer="sgd")
        assert list(trainer.get_weights()) == ["w_2", "w_3"]
        assert all(name in trainer.summary() for name in ("w_2", "w_3"))
        x = np.ones((1, 2), np.float32)
        for condition, changed, kept in ((True, "w_2", "w_3"), (False, "w_3", "w_2")):
            before = trainer.get_weights()
            trainer.train_on_batch({"x": x, "c": np.array([condition])}, x)
            after = trainer.get_weights()
            assert (before[changed] != after[changed]).all()
            np.testing.assert_array_equal(before[kept], after[kept])
        exported = trainer.export()
        onnx.checker.check_model(exported)
        assert structure(exported) == structure(model)
        arrays = [n.attribute[0].t for n in nodes_of(exported.graph) if list(n.output) == ["w"]]
        for tensor, name in zip(arrays, ("w_2", "w_3")):
            np.testing.assert_array_equal(
                numpy_helper.to_array(tensor), trainer.get_weights()[name]
            )

    def test_a_tensor_that_the_main_graph_reads_stays_there(self) -> None:
        model = parse(
            """g (float[2] x, bool c) => (float[2] y) { y = If (c) <
            then_branch = t () => (float[2] a) { w = Constant<value = float[2] {1, 2}>()  a = Add(x, w) },
            else_branch = e () => (float[2] b) { b = Neg(x) }> }"""
        )
        lifted = read_model(model).whole()
        lifted.graph.node[0].output[0] = "k"
        lifted.graph.node.append(helper.make_node("Add", ["k", "w"], ["y"]))
        lower_constants(lifted)
        onnx.checker.check_model(lifted)
        assert [node.op_type for node in nodes_of(lifted.graph)] == ["If", "Add", "Neg", "Add"]
        assert [tensor.name for tensor in lifted.graph.initializer] == ["w"]

    def test_the_body_of_a_scan(self) -> None:
        model = parse(
            """g (float[3, 2] x, float[2] h0) => (float[2] h, float[3, 2] hs) {
            h, hs = Scan<num_scan_inputs = 1, body = b (float[2] p, float[2] q) => (float[2] r, float[2] o) {
                w = Constant<value = float[2, 2] {0.1, 0.2, 0.3, 0.4}>()
                m = MatMul(p, w)  s = Add(m, q)  r = Tanh(s)  o = Identity(r) }>(h0, x) }"""
        )
        lifted = read_model(model).whole()
        plain = lower_constants(lifted, kept={"w"})
        assert [t.name for t in plain.graph.initializer] == ["w"]
        arrays = {"x": np.ones((3, 2), np.float32), "h0": np.ones(2, np.float32)}
        names = [value.name for value in onnxfit.gradient_model(model, "w").graph.output]
        results = []
        for one in (model, plain):
            graph = onnxfit.gradient_model(one, "w")
            feeds = {**arrays, "h_grad": arrays["h0"], "hs_grad": arrays["x"]}
            results.append(InferenceSession(graph.SerializeToString()).run(["w_grad"], feeds)[0])
        assert "w_grad" in names
        np.testing.assert_array_equal(results[0], results[1])

    def test_external_data(self, tmp_path: Path) -> None:
        model = with_constants(models.mlp())
        onnx.save(
            with_constants(models.mlp()),
            tmp_path / "model.onnx",
            save_as_external_data=True,
            size_threshold=0,
            convert_attribute=True,
            location="model.data",
        )
        assert (tmp_path / "model.data").stat().st_size > 0
        from_file, from_memory = trained(tmp_path / "model.onnx"), trained(model)
        for name, array in from_memory.get_weights().items():
            np.testing.assert_array_equal(from_file.get_weights()[name], array)
        assert structure(from_file.export()) == structure(model)

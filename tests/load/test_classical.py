"""Classical models in ONNX's own operators: the same numbers as onnxruntime's, and coefficients
that train.
"""

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.helper as make
import onnxruntime
import pytest
from onnx import TensorProto
from packaging.version import Version

import onnxfit
from onnxfit.graph.probabilities import probability_operator
from onnxfit.graph.weights import all_weights
from onnxfit.load.normalize import normalize
from onnxfit.load.reading import read_model
from onnxfit.losses import BinaryCrossEntropy, CrossEntropy

Array = npt.NDArray[Any]
ML = "ai.onnx.ml"
TRANSFORMS = ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO", "PROBIT")
ATOL = dict.fromkeys(TRANSFORMS, 2e-6) | {"PROBIT": 2e-4}  # 1 - x² loses digits at the median
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(40, 4)).astype(np.float32)


def run(model: onnx.ModelProto, x: Array) -> list[Any]:
    """The outputs in a bare session; maps from class to number as arrays."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    found = session.run(None, {model.graph.input[0].name: x})
    return [
        np.array([list(m.values()) for m in o], np.float32) if isinstance(o, list) else o
        for o in found
    ]


def one_node(
    op_type: str, x: Array, outputs: list[tuple[str, int]], opset: int = 17, **attributes: Any
) -> onnx.ModelProto:
    node = make.make_node(
        op_type, ["X"], [name for name, _ in outputs], name="it", domain=ML, **attributes
    )
    inputs = [
        make.make_tensor_value_info(
            "X", make.np_dtype_to_tensor_dtype(x.dtype), ["N", *x.shape[1:]]
        )
    ]
    values = [
        make.make_tensor_value_info(name, kind, [None] if name == "label" else [None, None])
        for name, kind in outputs
    ]
    graph = make.make_graph([node], "g", inputs, values)
    return make.make_model(
        graph, opset_imports=[make.make_opsetid("", opset), make.make_opsetid(ML, 1)], ir_version=8
    )


def check_same(model: onnx.ModelProto, x: Array, atol: float = 2e-6) -> onnx.ModelProto:
    """The model written out, once it has been checked to be the same to onnxruntime."""
    written = read_model(model).whole()
    onnx.checker.check_model(written, full_check=True)
    assert [v.SerializeToString() for v in written.graph.output] == [
        v.SerializeToString() for v in model.graph.output
    ]
    for expected, found in zip(run(model, x), run(written, x), strict=True):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        if expected.dtype.kind == "f":
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=atol)
        else:
            assert found.tolist() == expected.tolist()
    return written


def classifier(
    coefficients: Array, intercepts: Array, labels: list[Any], **attributes: Any
) -> onnx.ModelProto:
    strings = isinstance(labels[0], str)
    attributes |= {"coefficients": coefficients.ravel().tolist(), "intercepts": intercepts.tolist()}
    attributes["classlabels_strings" if strings else "classlabels_ints"] = labels
    outputs = [
        ("label", TensorProto.STRING if strings else TensorProto.INT64),
        ("scores", TensorProto.FLOAT),
    ]
    return one_node("LinearClassifier", X, outputs, **attributes)


ROWS = {
    "independent": RANDOM.normal(size=(3, 4)),
    "two": RANDOM.normal(size=(2, 4)),
    "opposite": np.array([[-1.0, 0.5, -2.0, 0.1], [1.0, -0.5, 2.0, -0.1]]),
    "one": RANDOM.normal(size=(1, 4)),
}
# onnxruntime leaves memory unwritten for the first, and no opposite scores are both probabilities
NOT_RUN = {("one", "PROBIT"), ("opposite", "PROBIT")}
# older versions forget the transform; what is written out is what later ones compute
if Version(onnxruntime.__version__) < Version("1.27"):
    NOT_RUN.add(("one", "LOGISTIC"))


@pytest.mark.parametrize("strings", [False, True])
@pytest.mark.parametrize(
    ("rows", "transform"), [c for c in itertools.product(ROWS, TRANSFORMS) if c not in NOT_RUN]
)
def test_linear_classifiers_are_the_same_written_out(
    rows: str, transform: str, strings: bool
) -> None:
    coefficients = ROWS[rows]
    labels: list[Any] = (
        list("pqr")[: max(2, len(coefficients))]
        if strings
        else [7, -2, 5][: max(2, len(coefficients))]
    )
    intercepts = (
        np.array([-0.25, 0.25])
        if rows == "opposite"
        else np.random.default_rng(1).normal(size=len(coefficients))
    )
    if transform == "PROBIT":  # which takes probabilities
        coefficients, intercepts = coefficients * 0.05, np.full(len(coefficients), 0.5)
    written = check_same(
        classifier(coefficients, intercepts, labels, post_transform=transform), X, ATOL[transform]
    )
    assert not any(node.domain for node in written.graph.node)
    sizes = {t.name: tuple(t.dims) for t in written.graph.initializer}
    kept = 1 if rows in ("opposite", "one") else len(coefficients)
    assert sizes == {"it/coefficients": (kept, 4), "it/intercepts": (kept,)}
    assert all_weights(normalize(written)) == ["it/coefficients", "it/intercepts"]


def test_a_tie_goes_to_the_same_class() -> None:
    for rows in ("opposite", "one", "two"):
        coefficients = ROWS[rows]
        model = classifier(coefficients, np.zeros(len(coefficients)), [3, 4])
        assert (
            run(read_model(model).whole(), np.zeros((1, 4), np.float32))[0]
            == run(model, np.zeros((1, 4), np.float32))[0]
            == 3
        )


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("targets", [1, 2])
@pytest.mark.parametrize("intercepts", [True, False])
def test_linear_regressors_are_the_same_written_out(
    targets: int, transform: str, intercepts: bool
) -> None:
    scale = 0.05 if transform == "PROBIT" else 1.0
    attributes: dict[str, Any] = {
        "coefficients": (scale * np.random.default_rng(2).normal(size=targets * 4)).tolist(),
        "targets": targets,
    }
    x = X
    if intercepts:
        attributes["intercepts"] = [0.4, 0.6][:targets]
    elif transform == "PROBIT":
        x = 0.1 + np.abs(X)
        attributes["coefficients"] = np.abs(attributes["coefficients"]).tolist()
    model = one_node(
        "LinearRegressor", X, [("y", TensorProto.FLOAT)], post_transform=transform, **attributes
    )
    written = check_same(model, x, ATOL[transform])
    assert [t.name for t in written.graph.initializer] == ["it/coefficients", "it/intercepts"][
        : 1 + intercepts
    ]


TABLE = np.array(
    [[-2, 0.5, 1, 0], [0, 0, 0, 0], [-1, -4, -2, -3], [3, -9, 1, 1], [0, -3, -1, 0]], np.float32
)


@pytest.mark.parametrize("opset", [9, 11, 13, 17, 18, 21])
@pytest.mark.parametrize(
    ("op_type", "attributes"),
    [
        ("Scaler", {"offset": [0.5], "scale": [2.0]}),
        ("Scaler", {"offset": [0.5, 1, 2, 3], "scale": [2.0, 1, 0.5, 3]}),
        ("Normalizer", {"norm": "MAX"}),
        ("Normalizer", {"norm": "L1"}),
        ("Normalizer", {"norm": "L2"}),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_scalers_are_the_same_written_out_and_have_no_weights(
    op_type: str, attributes: dict[str, Any], opset: int, dtype: type
) -> None:
    x = TABLE.astype(dtype)
    written = check_same(one_node(op_type, x, [("y", TensorProto.FLOAT)], opset, **attributes), x)
    assert not written.graph.initializer
    assert not any(node.domain for node in written.graph.node)


def test_columns_are_gathered() -> None:
    nodes = [
        make.make_node("Scaler", ["X"], ["scaled"], domain=ML, offset=[1.0], scale=[2.0]),
        make.make_node("ArrayFeatureExtractor", ["scaled", "columns"], ["y"], domain=ML),
    ]
    graph = make.make_graph(
        nodes, "g", [make.make_tensor_value_info("X", 1, ["N", 4])], [make.make_tensor_value_info("y", 1, ["N", 2])],
        [make.make_tensor("columns", 7, [1, 2], [2, 0])],
    )  # fmt: skip
    model = make.make_model(
        graph, opset_imports=[make.make_opsetid("", 15), make.make_opsetid(ML, 1)], ir_version=8
    )
    assert not any(node.domain for node in check_same(model, X).graph.node)


def test_what_onnxruntime_would_do_otherwise_stays() -> None:
    x = np.zeros((2, 3, 4), np.float32)
    no_table = one_node("Scaler", x, [("y", TensorProto.FLOAT)], offset=[1.0], scale=[2.0])
    one_label = classifier(ROWS["one"], np.zeros(1), [1])
    for model in (no_table, one_label):
        assert read_model(model).graph == model.graph


def test_a_model_without_operators_of_onnx_gets_their_version() -> None:
    model = one_node(
        "LinearRegressor",
        X,
        [("y", TensorProto.FLOAT)],
        coefficients=[1.0, 2, 3, 4],
        intercepts=[1.0],
    )
    del model.opset_import[0]
    written = read_model(model).whole()
    onnx.checker.check_model(written, full_check=True)
    np.testing.assert_allclose(
        run(written, X)[0][:, 0], X @ np.array([1, 2, 3, 4], np.float32) + 1, rtol=1e-5
    )


# ---------------------------------------------------------------------- training


def with_zip_map(model: onnx.ModelProto, labels: list[int]) -> onnx.ModelProto:
    graph = model.graph
    graph.node.append(
        make.make_node(
            "ZipMap", ["scores"], ["probabilities"], domain=ML, classlabels_int64s=labels
        )
    )
    kind = make.make_sequence_type_proto(
        make.make_map_type_proto(
            TensorProto.INT64, make.make_tensor_type_proto(TensorProto.FLOAT, None)
        )
    )
    graph.output[1].CopyFrom(make.make_value_info("probabilities", kind))
    return model


@pytest.mark.parametrize("opset", [9, 17])
def test_probabilities_behind_a_zip_map_have_a_loss_and_the_file_keeps_its_maps(opset: int) -> None:
    model = with_zip_map(
        classifier(np.zeros((2, 4)), np.zeros(2), [0, 1], opset=opset, post_transform="LOGISTIC"),
        [0, 1],
    )
    labels = (X[:, 0] + 0.5 * X[:, 1] > 0).astype(np.int64)
    trainer = onnxfit.Trainer(
        model,
        loss=CrossEntropy(from_logits=False),
        optimizer=onnxfit.optimizers.Adam(0.1),
        metrics=["accuracy"],
    )
    losses = trainer.fit(X, labels, epochs=40, batch_size=40, verbose=0).history["loss"]
    assert losses[0] == pytest.approx(np.log(2), rel=1e-3)
    assert losses[-1] < 0.3
    exported = trainer.export()
    assert exported.graph.node[-1].op_type == "ZipMap"
    assert exported.graph.output == model.graph.output
    predicted = trainer.predict(X)
    assert list(predicted) == ["label", "probabilities"]
    for expected, found in zip(run(exported, X), predicted.values(), strict=True):
        np.testing.assert_array_equal(found, expected)
    # the columns stay complements
    np.testing.assert_allclose(predicted["probabilities"].sum(axis=1), 1, rtol=1e-6)
    assert (predicted["label"] == labels).mean() > 0.9


def test_a_loss_by_name_goes_to_the_only_output_of_floats() -> None:
    model = classifier(ROWS["independent"], np.zeros(3), ["a", "b", "c"])
    trainer = onnxfit.Trainer(model, loss="cross_entropy")
    assert list(trainer.objectives) == ["scores"]
    trainer.train_on_batch(X, np.zeros(len(X), np.int64))


def test_logits_are_warned_of_where_a_converter_hides_the_softmax() -> None:
    """skl2onnx normalises what a softmax made, and writes the first of two classes as 1 - p."""
    model = classifier(ROWS["independent"], np.zeros(3), [0, 1, 2], post_transform="SOFTMAX")
    model.graph.node.append(
        make.make_node("Normalizer", ["scores"], ["normed"], domain=ML, norm="L1")
    )
    model.graph.output[1].name = "normed"
    labels = np.zeros(len(X), np.int64)
    with pytest.warns(UserWarning, match=r"comes from a Softmax\. Set from_logits=False"):
        onnxfit.Trainer(model, loss=CrossEntropy(from_logits=True)).test_on_batch(X, labels)
    by_name = onnxfit.Trainer(model, loss="cross_entropy")  # sees the Softmax itself
    assert "taken as probabilities: Softmax node" in by_name.summary()
    by_name.test_on_batch(X, labels)
    assert probability_operator(normalize(read_model(model)).graph.outputs[1]) == "Softmax"


def test_binary_cross_entropy_of_one_column_behind_a_classifier() -> None:
    """The positive column alone, as skl2onnx gives the scores of a LinearSVC."""
    model = classifier(ROWS["opposite"], np.array([-0.1, 0.1]), [0, 1])
    model.graph.node.append(
        make.make_node("ArrayFeatureExtractor", ["scores", "second"], ["score"], domain=ML)
    )
    model.graph.initializer.append(make.make_tensor("second", 7, [], [1]))
    model.graph.output[1].CopyFrom(make.make_tensor_value_info("score", 1, ["N", 1]))
    trainer = onnxfit.Trainer(
        check_same(model, X), loss=BinaryCrossEntropy(from_logits=True), optimizer=0.1
    )
    labels = (X[:, 2] > 0).astype(np.float32)
    before = trainer.test_on_batch(X, labels)["loss"]
    trainer.fit(X, labels, epochs=5, verbose=0)
    assert trainer.test_on_batch(X, labels)["loss"] < before


# ---------------------------------------------------------------------- what skl2onnx writes


def converted(estimator: Any, x: Array = X, **options: Any) -> onnx.ModelProto:
    skl2onnx = pytest.importorskip("skl2onnx")
    model: onnx.ModelProto = skl2onnx.to_onnx(
        estimator, x[:1], target_opset=21, options=options or None
    )
    return model


def binary() -> Array:
    return (X[:, 0] + X[:, 1] > 0).astype(int)


def three() -> Array:
    return np.array(["low", "middle", "top"])[np.digitize(X[:, 0], [-0.5, 0.5])]


def estimators() -> dict[str, Any]:
    """Estimators with their labels; the imports are those of a library that a user may lack."""
    pytest.importorskip("sklearn")
    from sklearn.compose import ColumnTransformer
    from sklearn.ensemble import RandomForestRegressor, StackingRegressor
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import (
        LinearRegression,
        LogisticRegression,
        Perceptron,
        Ridge,
        RidgeClassifier,
        SGDClassifier,
    )
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import (
        MaxAbsScaler,
        MinMaxScaler,
        Normalizer,
        PolynomialFeatures,
        RobustScaler,
        StandardScaler,
    )
    from sklearn.svm import LinearSVC

    numbers = X @ np.array([1.0, -2, 0.5, 0]) + 0.3
    several = X @ np.random.default_rng(3).normal(size=(4, 2))
    small: dict[str, Any] = {"hidden_layer_sizes": (5,), "max_iter": 5, "random_state": 0}
    columns = ColumnTransformer([("a", StandardScaler(), [0, 2]), ("b", MinMaxScaler(), [3, 1])])
    trees = RandomForestRegressor(3, max_depth=3, random_state=0)
    return {
        "LinearRegression": (LinearRegression(), numbers),
        "two targets": (LinearRegression(), several),
        "LogisticRegression, 2 classes": (LogisticRegression(), binary()),
        "LogisticRegression, 3 classes": (LogisticRegression(), three()),
        "one against the rest": (OneVsRestClassifier(LogisticRegression()), three()),
        "SGDClassifier, 2 classes": (SGDClassifier(loss="log_loss", random_state=0), binary()),
        "SGDClassifier, 3 classes": (SGDClassifier(loss="log_loss", random_state=0), three()),
        "LinearSVC, 2 classes": (LinearSVC(), binary()),
        "LinearSVC, 3 classes": (LinearSVC(), three()),
        "RidgeClassifier": (RidgeClassifier(), three()),
        "Perceptron": (Perceptron(), binary()),
        "MLPRegressor": (MLPRegressor(**small), numbers),
        "MLPClassifier, 2 classes": (MLPClassifier(**small), binary()),
        "MLPClassifier, 3 classes": (MLPClassifier(**small), three()),
        "scaled, normed": (make_pipeline(StandardScaler(), Normalizer(), LogisticRegression()), binary()),
        "scaled twice": (make_pipeline(MinMaxScaler(), RobustScaler(), Ridge()), numbers),
        "polynomial": (make_pipeline(PolynomialFeatures(2), Ridge()), numbers),
        "by column": (make_pipeline(columns, LogisticRegression()), three()),
        "imputed": (make_pipeline(SimpleImputer(), MaxAbsScaler(), MLPClassifier(**small)), three()),
        "behind trees": (StackingRegressor([("trees", trees)], MLPRegressor(**small), cv=2), numbers),
    }  # fmt: skip


NAMES = (
    "LinearRegression", "two targets", "LogisticRegression, 2 classes", "LogisticRegression, 3 classes", "one against the rest",
    "SGDClassifier, 2 classes", "SGDClassifier, 3 classes", "LinearSVC, 2 classes", "LinearSVC, 3 classes", "RidgeClassifier", "Perceptron",
    "MLPRegressor", "MLPClassifier, 2 classes", "MLPClassifier, 3 classes", "scaled, normed", "scaled twice", "polynomial", "by column",
    "imputed", "behind trees",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # scikit-learn's, of so few iterations
@pytest.mark.parametrize("name", NAMES)
def test_what_skl2onnx_writes_trains_and_exports_what_was_predicted(name: str) -> None:
    estimator, y = estimators()[name]
    estimator.fit(X, y)
    model = converted(estimator)
    written = check_same(model, X)
    work = normalize(written)
    output = next(v for v in work.graph.outputs if v.dtype.name == "FLOAT")
    probabilities = probability_operator(output) is not None
    assert probabilities == hasattr(estimator, "predict_proba")
    labels: Array
    if not hasattr(estimator, "classes_"):
        loss, labels = onnxfit.losses.get_loss("mean_squared_error"), y.astype(np.float32)
    else:
        labels = np.unique(y, return_inverse=True)[1]
        loss = CrossEntropy(from_logits=not probabilities)
        if output.shape is not None and output.shape[-1] == 1:
            loss = BinaryCrossEntropy(from_logits=True)
    trainer = onnxfit.Trainer(model, loss=loss, optimizer=onnxfit.optimizers.Adam(0.003))
    # those of linear layers, and none of scalers
    assert len(trainer.get_weights()) == (
        4 if "MLP" in repr(estimator) else 6 if name == "one against the rest" else 2
    )
    before = trainer.evaluate(X, labels)["loss"]
    trainer.fit(X, labels, epochs=20, verbose=0)
    assert np.isfinite(trainer.train_losses_).all()
    assert trainer.evaluate(X, labels)["loss"] <= max(before, 1e-4)
    exported = trainer.export()
    onnx.checker.check_model(exported, full_check=True)
    predicted = trainer.predict(X)
    found = list(predicted.values()) if isinstance(predicted, dict) else [predicted]
    for expected, array in zip(run(exported, X), found, strict=True):
        assert array.tolist() == expected.tolist()

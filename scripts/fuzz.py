"""Give mutated models to `Trainer`, and mutated checkpoints to `Trainer.load`: each must work or
raise an onnxfit error.

    python scripts/fuzz.py [--cases 10000] [--first 0]
    python scripts/fuzz.py --case 1234 [--out case.onnx]

A case is made of its number alone, so that it can be run again. Cases run in a child process with
bounded memory; where the child dies or hangs, the case is counted and another child goes on with
the next. Exit code 1 for any other exception, for a hang, and for a crash outside of onnxruntime
and onnx, which this repository cannot repair: those are counted apart.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import functools
import io
import json
import os
import random
import re
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper as oh
import onnx.parser
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from onnx.numpy_helper import from_array

from onnxfit import Trainer
from onnxfit.callbacks import CSVLogger, EarlyStopping, LambdaCallback, ReduceLROnPlateau
from onnxfit.errors import OnnxfitError
from onnxfit.losses import CrossEntropy
from onnxfit.optimizers import SGD, Adam
from onnxfit.schedules import Cosine
from tests.models import convolutional, mlp, two_outputs

SECONDS = 20  # in which a case must end
MEMORY = 4 << 30  # bytes that a child may address
CHECKPOINTS = 0.2  # of the cases
SMALL = 1 << 20  # elements of a batch that is made up

Outcome = dict[str, Any]


# ----------------------------------------------------------------------------------------------------------------
# seeds


def _parsed(text: str, opset: int = 17, also: str = "") -> onnx.ModelProto:
    head = (
        f'<ir_version: 8, opset_import: ["": {opset}, "ai.onnx.ml": 3, "com.microsoft": 1,'
        ' "local": 1]>'
    )
    return onnx.parser.parse_model(f"{head} seed {text}{also}")


def _random_weights(model: onnx.ModelProto, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    model.graph.initializer.extend(
        from_array(rng.normal(size=shape).astype(np.float32) / 4, name)
        for name, shape in shapes.items()
    )
    return model


def lstm() -> onnx.ModelProto:
    text = """(float[2, 3, 3] x) => (float[2, 2] y)
        { t = Transpose<perm = [1, 0, 2]>(x)
          s = LSTM<hidden_size = 4>(t, w, r, b)  e = ReduceMean<axes = [0, 1], keepdims = 0>(s)  f = Flatten(e)  y = MatMul(f, v) }"""
    return _random_weights(_parsed(text), w=(1, 16, 3), r=(1, 16, 4), b=(1, 32), v=(4, 2))


def attention() -> onnx.ModelProto:
    text = """(float[N, 4, 6] x) => (float[N, 4, 6] y) <float scale = {0.4}, int64[4] heads = {0, 0, 2, 3}, int64[3] joined = {0, 0, 6}>
        { q = MatMul(x, wq)  k = MatMul(x, wk)  v = MatMul(x, wv)  q4 = Reshape(q, heads)  k4 = Reshape(k, heads)  v4 = Reshape(v, heads)
          qt = Transpose<perm = [0, 2, 1, 3]>(q4)  kt = Transpose<perm = [0, 2, 3, 1]>(k4)  vt = Transpose<perm = [0, 2, 1, 3]>(v4)
          s = MatMul(qt, kt)  t = Mul(s, scale)  p = Softmax<axis = -1>(t)  o = MatMul(p, vt)  ot = Transpose<perm = [0, 2, 1, 3]>(o)
          j = Reshape(ot, joined)  r = Add(j, x)  n = LayerNormalization<axis = -1>(r, g, h)  y = Gelu(n) }"""
    return _random_weights(_parsed(text, opset=20), wq=(6, 6), wk=(6, 6), wv=(6, 6), g=(6,), h=(6,))


def control_flow() -> onnx.ModelProto:
    text = """(float[N, 2] x) => (float[N, 2] y) <int64 three = {3}, bool yes = {1}, float[2] start = {0, 0}, float zero = {0}>
        { m = MatMul(x, w)  total = ReduceSum<keepdims = 0>(m)  positive = Greater(total, zero)
          c = If (positive) <then_branch = t () => (float[N, 2] a) { a = Tanh(m) }, else_branch = e () => (float[N, 2] n) { n = Mul(m, b) }>
          l, seen = Loop (three, yes, c) <body = pass (int64 i, bool go, float[N, 2] h) => (bool on, float[N, 2] k, float[N, 2] z)
            { on = Identity(go)  k = Mul(h, b)  z = Identity(k) }>
          last, steps = Scan<num_scan_inputs = 1, body = step (float[2] carry, float[2] row) => (float[2] next, float[2] kept)
            { next = Add(carry, row)  kept = Identity(next) }>(start, l)
          y = Add(l, steps) }"""
    return _random_weights(_parsed(text), w=(2, 2), b=(2,))


def functions() -> onnx.ModelProto:
    also = """
        <domain: "local", opset_import: ["": 17, "local": 1]> dense <slope: float = 0.1> (u, v, w) => (o)
        { m = MatMul(u, v)  s = Add(m, w)  o = local.leaky<slope: float = @slope>(s) }
        <domain: "local", opset_import: ["": 17]> leaky <slope: float = 0.1> (u) => (o) { o = LeakyRelu<alpha: float = @slope>(u) }"""
    text = (
        "(float[N, 3] x) => (float[N, 2] y) { h = local.dense<slope = 0.2>(x, w, b)  y ="
        " local.dense(h, v, c) }"
    )
    return _random_weights(_parsed(text, also=also), w=(3, 4), b=(4,), v=(4, 2), c=(2,))


def classical() -> onnx.ModelProto:
    rows = [oh.make_tensor_value_info("X", onnx.TensorProto.FLOAT, ["N", 3])]
    outputs = [oh.make_tensor_value_info("label", onnx.TensorProto.INT64, ["N"])]
    outputs.append(oh.make_tensor_value_info("probabilities", onnx.TensorProto.FLOAT, ["N", 3]))
    ml = {"domain": "ai.onnx.ml"}
    nodes = [
        oh.make_node("Scaler", ["X"], ["scaled"], offset=[0.1, 0.2, 0.3], scale=[1.0, 2.0, 3.0], **ml),
        oh.make_node(
            "LinearClassifier", ["scaled"], ["label", "scores"], coefficients=[0.1 * i for i in range(9)], intercepts=[0.0, 0.1, 0.2],
            classlabels_ints=[0, 1, 2], multi_class=1, post_transform="SOFTMAX", **ml,
        ),
        oh.make_node("Normalizer", ["scores"], ["probabilities"], norm="L1", **ml),
    ]  # fmt: skip
    graph = oh.make_graph(nodes, "g", rows, outputs)
    return oh.make_model(
        graph,
        opset_imports=[oh.make_opsetid("", 17), oh.make_opsetid("ai.onnx.ml", 1)],
        ir_version=8,
    )


def trees() -> onnx.ModelProto:
    """A linear regression, with a tree and a SVM on the side."""
    ml = {"domain": "ai.onnx.ml"}
    nodes = [
        oh.make_node("MatMul", ["X", "w"], ["h"]),
        oh.make_node(
            "TreeEnsembleRegressor", ["X"], ["t"], n_targets=1, nodes_treeids=[0, 0, 0], nodes_nodeids=[0, 1, 2], nodes_featureids=[0, 0, 0],
            nodes_values=[0.5, 0.0, 0.0], nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"], nodes_truenodeids=[1, 0, 0], nodes_falsenodeids=[2, 0, 0],
            target_treeids=[0, 0], target_nodeids=[1, 2], target_ids=[0, 0], target_weights=[1.0, -1.0], **ml,
        ),
        oh.make_node(
            "SVMRegressor", ["X"], ["s"], kernel_type="RBF", kernel_params=[0.5, 0.0, 3.0], n_supports=2, coefficients=[1.0, -1.0],
            support_vectors=[0.0, 1.0, 1.0, 0.0, 0.5, 2.0], rho=[0.1], **ml,
        ),
        oh.make_node("LinearRegressor", ["h"], ["l"], coefficients=[1.0, 2.0], intercepts=[0.5], **ml),
        oh.make_node("Sum", ["t", "s", "l"], ["y"]),
    ]  # fmt: skip
    values = [
        oh.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["N", k])
        for n, k in (("X", 3), ("y", 1))
    ]
    graph = oh.make_graph(
        nodes, "g", values[:1], values[1:], [from_array(np.eye(3, 2, dtype=np.float32), "w")]
    )
    return oh.make_model(
        graph,
        opset_imports=[oh.make_opsetid("", 17), oh.make_opsetid("ai.onnx.ml", 3)],
        ir_version=8,
    )


def sequences() -> onnx.ModelProto:
    text = """(float[N, 4] x) => (float[N, 2] y, string[2] same, seq(float[N, 2]) both)
        <int64[2] sizes = {2, 2}, int64 one = {1}>
        { h = MatMul(x, w)  parts = SplitToSequence<axis = 1>(h, sizes)  part = SequenceAt(parts, one)  same = Identity(word)
          y = MatMul(part, v)  both = SequenceConstruct(y, part) }"""
    model = _random_weights(_parsed(text), w=(4, 4), v=(2, 2))
    model.graph.initializer.append(
        oh.make_tensor("word", onnx.TensorProto.STRING, [2], [b"one", b"two"])
    )
    return model


def shaped() -> onnx.ModelProto:
    """Sizes computed inside, an embedding, half precision, a convolution that is transposed,
    resizing.
    """
    text = """(int64[N, 4] ids, float[N, 1, 4, 4] image) => (float[N, 3] y)
        <int64 zero = {0}, int64[1] minus = {-1}, int64[1] first = {0}, float[4] scales = {1, 1, 2, 2}>
        { e = Gather(table, ids)  sizes = Shape(e)  n = Gather(sizes, zero)  n1 = Unsqueeze(n, first)  to = Concat<axis = 0>(n1, minus)
          flat = Reshape(e, to)  half = Cast<to = 10>(flat)  full = Cast<to = 1>(half)  a = MatMul(full, w)
          c = ConvTranspose<strides = [2, 2]>(image, kernel)  u = Resize<mode = "linear">(c, , scales)  p = GlobalAveragePool(u)
          f = Flatten(p)  i = InstanceNormalization(u, s, s)  top, where = TopK<axis = -1>(i, one)  m = ReduceMean(top, axes)
          g = Add(a, f)  k = Einsum<equation = "ij,ij->ij">(g, g)  y = Add(k, m) }"""
    model = _random_weights(
        _parsed(text, opset=18), table=(5, 2), w=(8, 3), kernel=(1, 3, 2, 2), s=(3,)
    )
    model.graph.initializer.append(from_array(np.array([1], np.int64), "one"))
    model.graph.initializer.append(from_array(np.array([2, 3], np.int64), "axes"))
    for node in model.graph.node:
        if node.op_type == "ReduceMean":
            node.attribute.append(oh.make_attribute("keepdims", 0))
    return model


def quantized() -> onnx.ModelProto:
    text = """(float[N, 3] x) => (float[N, 2] y) <float scale = {0.05}, uint8 zero = {128}>
        { q = QuantizeLinear(x, scale, zero)  d = DequantizeLinear(q, scale, zero)  h = MatMul(d, w)  r = Relu(h)
          q2, s2, z2 = DynamicQuantizeLinear(r)  d2 = DequantizeLinear(q2, s2, z2)  y = Add(d2, r) }"""
    return _random_weights(_parsed(text, opset=19), w=(3, 2))


def newer() -> onnx.ModelProto:
    text = (
        "(float[N, 4] x) => (float[N, 2] y) { n = RMSNormalization<axis = -1>(x, s)  h = MatMul(n,"
        " w)  z = Swish(h)  y = Identity(z) }"
    )
    return _random_weights(_parsed(text, opset=24), s=(4,), w=(4, 2))


def older() -> onnx.ModelProto:
    """Opset 7, when sizes were attributes, and a Dropout, a GRU and an Upsample as they were."""
    text = """(float[2, 5, 3] x) => (float[2, 4] y)
        { t = Transpose<perm = [1, 0, 2]>(x)  h, last = GRU<hidden_size = 4>(t, w, r, b)  d = Dropout<ratio = 0.3>(last)
        c = Clip<min = -1.0, max = 1.0>(d)  s = Slice<axes = [2], starts = [0], ends = [4]>(c)
          q = Squeeze<axes = [0]>(s)  y = Softmax<axis = 1>(q) }"""
    return _random_weights(_parsed(text, opset=7), w=(1, 12, 3), r=(1, 12, 4), b=(1, 24))


MODELS: dict[str, tuple[Callable[[], onnx.ModelProto], Any]] = {
    "mlp": (mlp, "cross_entropy"),
    "convolutional": (lambda: convolutional(dropout=0.25), "cross_entropy"),
    "two_outputs": (two_outputs, {"a": "mse", "b": "mae"}),
    "lstm": (lstm, "mse"),
    "attention": (attention, "huber"),
    "control_flow": (control_flow, "mse"),
    "functions": (functions, "mse"),
    "classical": (classical, {"probabilities": CrossEntropy(from_logits=False)}),
    "trees": (trees, "mse"),
    "sequences": (sequences, {"y": "mse"}),
    "shaped": (shaped, "mse"),
    "quantized": (quantized, "mse"),
    "newer": (newer, "mse"),
    "older": (older, "mse"),
}


@functools.cache
def seed_model(name: str) -> bytes:
    return MODELS[name][0]().SerializeToString()


def _interrupted(trainer: Trainer, rows: int, path: Path, **x: Any) -> bytes:
    """A checkpoint in the middle of the second epoch, with the states of callbacks."""

    def save(batch: int, logs: object) -> None:
        if trainer.epoch == 1 and batch == 1:
            trainer.save(path)

    callbacks = [
        EarlyStopping("loss"),
        ReduceLROnPlateau("loss"),
        LambdaCallback(on_train_batch_end=save),
        CSVLogger(path.with_suffix(".csv")),
    ]
    trainer.fit(**x, epochs=2, batch_size=rows // 3, callbacks=callbacks, verbose=0)
    return path.read_bytes()


def _checkpoints(folder: Path) -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 4)).astype(np.float32), np.arange(12) % 3
    images = rng.normal(size=(12, 1, 8, 8)).astype(np.float32)
    adam = Trainer(
        mlp(),
        loss="cross_entropy",
        optimizer=Adam(ema_momentum=0.9),
        metrics=["accuracy"],
        penalty={"fc*": {"l1": 0.1}},
    )
    network = Trainer(
        convolutional(),
        loss="cross_entropy",
        optimizer=SGD(momentum=0.9),
        backend="forward_backward",
        accumulate=2,
        clip_norm=1.0,
    )
    scheduled = Trainer(mlp(), loss="cross_entropy", optimizer=Adam(learning_rate=Cosine(0.1, 10)))
    return {
        "adam": _interrupted(adam, 12, folder / "adam", x=x, y=y),
        "network": _interrupted(network, 12, folder / "network", x=images, y=y),
        "scheduled": scheduled.save(folder / "scheduled").read_bytes(),
    }


# ------------------------------------------------------------------------------------------------------------
# mutations

INTEGERS = (
    -1,
    0,
    1,
    2,
    3,
    7,
    -2,
    13,
    64,
    255,
    1 << 16,
    1 << 24,
    (1 << 31) - 1,
    1 << 31,
    -(1 << 31),
    1 << 40,
    (1 << 63) - 1,
    -(1 << 63),
)
NUMBERS = (0.0, -1.0, 0.5, 1.0, 1e-45, 1e38, -1e38, float("inf"), float("-inf"), float("nan"))
WORDS = (
    "",
    "x",
    "y",
    "train/loss",
    "sample_weight",
    "../../etc/passwd",
    "ä\u202e\0",
    "a" * 3000,
    "ai.onnx",
    "com.microsoft",
    "%n%s",
    "loss",
)
ONE_TYPE = {
    FieldDescriptor.CPPTYPE_FLOAT: float,
    FieldDescriptor.CPPTYPE_DOUBLE: float,
    FieldDescriptor.CPPTYPE_BOOL: bool,
}


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """Flips, changes, cuts, splices."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        place = rng.randrange(len(found)) if found else 0
        kind = rng.randrange(7)
        if not found:
            return bytes(rng.randbytes(rng.randrange(50)))
        if kind == 0:
            found[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            found[place] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 2:
            del found[place : place + rng.choice((1, 2, 8, 100))]
        elif kind == 3 and rng.random() < 0.3:
            del found[place:]
        elif kind == 4:
            other = rng.randrange(len(found))
            found[place:place] = found[other : other + rng.choice((1, 4, 30, 300))]
        elif kind == 5:
            found[place : place + 4] = rng.choice(
                (b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80", b"\xff\xff\xff\xff", b"\xfe\xdc\x00\xff")
            )
        else:
            found[place:place] = rng.randbytes(rng.choice((1, 3, 9)))
    return bytes(found)


def _messages(message: Message) -> Iterator[Message]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry is False:
            for inner in [value] if isinstance(value, Message) else value:
                yield from _messages(inner)


def _other(value: Any, kind: int, strings: list[str], rng: random.Random) -> Any:
    """Another value of a field of this kind."""
    if kind in ONE_TYPE:
        return rng.choice(NUMBERS) if ONE_TYPE[kind] is float else not value
    if isinstance(value, str):
        return rng.choice(strings) if rng.random() < 0.8 else rng.choice(WORDS)
    if isinstance(value, bytes):
        return rng.choice(
            (
                b"",
                value[:-1],
                value + b"\0",
                value * 2,
                b"\xff\xfe",
                mutated_bytes(value[:5000], rng),
            )
        )
    return rng.choice((value + 1, value - 1, -value, rng.choice(INTEGERS), rng.choice(INTEGERS)))


def mutate_fields(model: Message, rng: random.Random) -> None:
    """Change, drop, double or move anything that a message holds, in place."""
    everything = list(_messages(model))
    strings = sorted(
        {v for m in everything for _, value in m.ListFields() for v in _strings(value)} or {"x"}
    )
    of_graph = [
        m
        for m in everything
        if type(m).__name__
        in ("NodeProto", "AttributeProto", "GraphProto", "TensorProto", "FunctionProto")
    ]
    message = rng.choice(of_graph if of_graph and rng.random() < 0.75 else everything)
    fields = (
        [f for f, _ in message.ListFields()]
        if rng.random() < 0.85
        else list(message.DESCRIPTOR.fields)
    )
    if not fields:
        return
    field = rng.choice(fields)
    value = getattr(message, field.name)
    twins = [m for m in everything if type(m) is type(message) and m is not message]
    kind = rng.randrange(10)
    try:
        if kind == 0:
            message.ClearField(field.name)
        elif kind == 1 and twins:  # the whole message becomes another
            copy = type(message)()
            copy.CopyFrom(rng.choice(twins))
            message.CopyFrom(copy)
        elif not hasattr(value, "append") and not hasattr(value, "add"):
            if isinstance(value, Message):
                candidates = [m for m in everything if type(m) is type(value)]
                if candidates:
                    copy = type(value)()
                    copy.CopyFrom(rng.choice(candidates))
                    value.CopyFrom(copy)
                else:
                    value.SetInParent()
            else:
                setattr(message, field.name, _other(value, field.cpp_type, strings, rng))
        elif not len(value):
            if field.message_type is not None:
                candidates = [m for m in everything if type(m).DESCRIPTOR is field.message_type]
                new = value.add()
                if candidates:
                    copy = type(new)()
                    copy.CopyFrom(rng.choice(candidates))
                    new.CopyFrom(copy)
            else:
                start: Any = {9: "", 12: b""}.get(field.type, 0)
                value.append(_other(start, field.cpp_type, strings, rng))
        else:
            place = rng.randrange(len(value))
            if kind < 4:
                del value[place]
            elif kind < 6:
                again = value[place]
                if isinstance(again, Message):
                    value.add().CopyFrom(again)
                else:
                    value.extend([again] * rng.choice((1, 1, 2, 40)))
            elif kind == 6 and len(value) > 1:  # order
                copies = (
                    [type(v)() for v in value] if field.message_type is not None else list(value)
                )
                if field.message_type is not None:
                    for copy, v in zip(copies, value):
                        copy.CopyFrom(v)
                rng.shuffle(copies)
                del value[:]
                value.extend(copies)
            elif field.message_type is None:
                value[place] = _other(value[place], field.cpp_type, strings, rng)
            else:
                candidates = [m for m in everything if type(m) is type(value[place])]
                copy = type(value[place])()
                copy.CopyFrom(rng.choice(candidates))
                value[place].CopyFrom(copy)
    except (ValueError, TypeError):  # a number beyond the field's type
        return


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return (
        [v for v in value if isinstance(v, str)]
        if not isinstance(value, (int, float, bytes, Message))
        else []
    )


def _tensors(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    return [m for m in _messages(model) if isinstance(m, onnx.TensorProto)]


def huge_dims(model: onnx.ModelProto, rng: random.Random) -> None:
    tensors = _tensors(model)
    infos = [m for m in _messages(model) if isinstance(m, onnx.TensorShapeProto.Dimension)]
    if infos and (rng.random() < 0.5 or not tensors):
        rng.choice(infos).dim_value = rng.choice((0, -1, -5, 1 << 20, 1 << 31, 1 << 40, 1 << 62))
    elif tensors:
        tensor = rng.choice(tensors)
        dims = rng.choice(
            (
                [1 << 40],
                [1 << 20, 1 << 20],
                [1 << 32, 1 << 32],
                [-1, -4],
                [0, 1 << 62],
                [1 << 62, 4],
                [1 << 17] * 2,
            )
        )
        tensor.dims[:] = dims


def external_data(model: onnx.ModelProto, rng: random.Random) -> None:
    tensors = _tensors(model)
    if tensors:
        tensor = rng.choice(tensors)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        if rng.random() < 0.7:
            tensor.ClearField("raw_data")
        for key, values in (("location", ("/etc/passwd", "../../x", "", "w.bin", "\0", ".")), ("offset", ("0", "-1", "x", "9" * 30)),
                            ("length", ("4", "-4", "9" * 25, ""))):  # fmt: skip
            if rng.random() < 0.7:
                tensor.external_data.add(key=key, value=rng.choice(values))


def opsets(model: onnx.ModelProto, rng: random.Random) -> None:
    kind = rng.randrange(4)
    if kind == 0 and model.opset_import:
        rng.choice(model.opset_import).version = rng.choice((*range(1, 28), 0, -1, 100, 1 << 40))
    elif kind == 1:
        model.ir_version = rng.choice((0, 1, 3, 7, 11, 12, 99, -1, 1 << 40))
    elif kind == 2:
        model.opset_import.add(
            domain=rng.choice(("", "ai.onnx", "ai.onnx.ml", "x", "com.microsoft")),
            version=rng.choice((1, 9, 17, 21, 22)),
        )
    else:
        for function in model.functions:
            for entry in function.opset_import:
                entry.version = rng.choice((1, 7, 13, 18, 22, 99))
        if not model.functions and model.opset_import:
            del model.opset_import[0]


def rewired(model: onnx.ModelProto, rng: random.Random) -> None:
    """An input of a node becomes any tensor: earlier, later, its own output, or nothing."""
    nodes = [m for m in _messages(model) if isinstance(m, onnx.NodeProto)]
    known = (
        [name for node in nodes for name in node.output]
        + [t.name for t in model.graph.initializer]
        + ["", "nobody"]
    )
    for _ in range(rng.choice((1, 1, 3))):
        node = rng.choice(nodes) if nodes else None
        if node is not None:
            places = node.input if rng.random() < 0.7 or not node.output else node.output
            if places:
                places[rng.randrange(len(places))] = rng.choice(known)


def recursive(model: onnx.ModelProto, rng: random.Random) -> None:
    """Functions that call themselves or each other, or take the name of an operator."""
    nodes = [m for m in _messages(model) if isinstance(m, onnx.NodeProto)]
    if not nodes:
        return
    node = rng.choice(nodes)
    function = model.functions.add(
        name=rng.choice(("f", node.op_type)), domain=rng.choice(("local", node.domain))
    )
    function.input.extend(node.input)
    function.output.extend(node.output)
    for entry in model.opset_import:
        function.opset_import.add().CopyFrom(entry)
    inner = function.node.add()
    inner.CopyFrom(node)
    inner.op_type, inner.domain = function.name, function.domain
    if all(entry.domain != "local" for entry in model.opset_import):
        model.opset_import.add(domain="local", version=1)
    node.op_type, node.domain = function.name, function.domain


def nested(model: onnx.ModelProto, rng: random.Random) -> None:
    """Branches in branches."""
    nodes = list(model.graph.node)
    if not nodes:
        return
    node = rng.choice(nodes)
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    for depth in range(rng.choice((1, 3, 8, 20, 28))):
        bodies = [
            oh.make_graph(
                [inner], f"b{depth}", [], [onnx.ValueInfoProto(name=n) for n in inner.output]
            )
            for _ in range(1)
        ]
        last = oh.make_node("If", ["condition"], [f"{n}_{depth}" if n else "" for n in node.output])
        last.attribute.append(oh.make_attribute("then_branch", bodies[0]))
        last.attribute.append(oh.make_attribute("else_branch", bodies[0] if rng.random() < 0.02 else oh.make_graph(
            [], f"e{depth}", [], [onnx.ValueInfoProto(name=n) for n in inner.output])))  # fmt: skip
        inner = last
    names = list(node.output)
    node.CopyFrom(inner)
    node.output[:] = names
    model.graph.initializer.append(from_array(np.array(True), "condition"))


def settings(model: onnx.ModelProto, rng: random.Random) -> None:
    """Other numbers in attributes and in small whole-numbered tensors, attributes dropped: files
    that pass most checks.
    """
    attributes = [
        (node, a)
        for node in _messages(model)
        if isinstance(node, onnx.NodeProto)
        for a in node.attribute
    ]
    whole = [t for t in _tensors(model) if t.data_type in (6, 7) and t.raw_data]
    if whole and rng.random() < 0.4:
        tensor = rng.choice(whole)
        numbers = list(
            np.frombuffer(tensor.raw_data, np.int32 if tensor.data_type == 6 else np.int64)
        )
        if numbers:
            place = rng.randrange(len(numbers))
            numbers[place] = rng.choice(
                (-2, -1, 0, 1, 2, 3, 5, 100, 1 << 20, (1 << 31) - 1, -(1 << 31))
            )
            tensor.raw_data = np.array(
                numbers, np.int32 if tensor.data_type == 6 else np.int64
            ).tobytes()
    elif attributes:
        node, attribute = rng.choice(attributes)
        kind = rng.randrange(8)
        if kind == 0:
            node.attribute.remove(attribute)
        elif attribute.type == onnx.AttributeProto.INT:
            attribute.i = rng.choice((attribute.i + 1, attribute.i - 1, *INTEGERS))
        elif attribute.type == onnx.AttributeProto.FLOAT:
            attribute.f = rng.choice(NUMBERS)
        elif attribute.type == onnx.AttributeProto.STRING:
            attribute.s = rng.choice(
                (
                    b"",
                    b"\xff",
                    b"NOTSET",
                    b"SAME_UPPER",
                    b"VALID",
                    b"linear",
                    b"ij,jk->ik",
                    b"...i,i...->",
                    b"mean",
                )
            )
        elif attribute.type == onnx.AttributeProto.INTS and attribute.ints:
            attribute.ints[rng.randrange(len(attribute.ints))] = rng.choice(INTEGERS)
            if rng.random() < 0.3:
                attribute.ints.append(rng.choice((0, 1, -1)))
        elif attribute.type == onnx.AttributeProto.FLOATS and attribute.floats:
            attribute.floats[rng.randrange(len(attribute.floats))] = rng.choice(NUMBERS)


def other_operator(model: onnx.ModelProto, rng: random.Random) -> None:
    """A node becomes any operator of ONNX with as many inputs."""
    nodes = [m for m in _messages(model) if isinstance(m, onnx.NodeProto)]
    if nodes:
        node = rng.choice(nodes)
        fitting = [n for n, (least, most) in OPERATORS.items() if least <= len(node.input) <= most]
        node.op_type, node.domain = rng.choice(fitting or ["Identity"]), ""
        if rng.random() < 0.7:
            del node.attribute[:]


OPERATORS = {
    s.name: (s.min_input, s.max_input) for s in onnx.defs.get_all_schemas() if s.domain == ""
}


def wide(model: onnx.ModelProto, rng: random.Random) -> None:
    """Long chains and doublings: x + x, thirty times over."""
    if not model.graph.output or not model.graph.node:
        return
    name = model.graph.output[0].name
    kind, length = (
        rng.choice(("Add", "Concat", "Tile", "Identity", "Pad", "Expand")),
        rng.choice((3, 12, 40, 400)),
    )
    for node in model.graph.node:
        node.output[:] = [f"{name}_0" if n == name else n for n in node.output]
    for i in range(length):
        inputs = [f"{name}_{i}"] * (2 if kind in ("Add", "Concat") else 1)
        last = oh.make_node(kind, inputs, [name if i == length - 1 else f"{name}_{i + 1}"])
        if kind == "Concat":
            last.attribute.append(oh.make_attribute("axis", 0))
        if kind in ("Tile", "Expand", "Pad"):
            last.input.append(f"sizes_{i}")
            sizes = np.array(
                rng.choice(
                    ([1, 1], [100, 100], [1 << 20, 1], [1 << 40, 1], [-1, 2], [0, 0, 0, 1 << 33])
                ),
                np.int64,
            )
            model.graph.initializer.append(from_array(sizes, f"sizes_{i}"))
        model.graph.node.append(last)


def other_types(model: onnx.ModelProto, rng: random.Random) -> None:
    infos = [m for m in _messages(model) if isinstance(m, onnx.TypeProto)]
    tensors = _tensors(model)
    for _ in range(rng.choice((1, 2))):
        if infos and rng.random() < 0.6:
            one = rng.choice(infos)
            kind = rng.randrange(5)
            if kind < 3:
                one.tensor_type.elem_type = rng.choice((*range(24), 99, -1))
            elif kind == 3:
                one.sequence_type.elem_type.tensor_type.elem_type = rng.randrange(18)
            else:
                one.ClearField("value")
        elif tensors:
            rng.choice(tensors).data_type = rng.choice((*range(24), 99, -1))


def bad_names(model: onnx.ModelProto, rng: random.Random) -> bytes:
    """Names that are no UTF-8, at the same length, so that the message stays whole."""
    data = model.SerializeToString()
    names = [
        s for m in _messages(model) for _, v in m.ListFields() for s in _strings(v) if len(s) > 0
    ]
    if not names:
        return data
    name = rng.choice(names).encode()
    framed = bytes([len(name)]) + name if len(name) < 128 else name
    return data.replace(
        framed, framed[: -len(name)] + bytes([rng.choice((0xFF, 0xC0, 0x00, 0xED))]) + name[1:]
    )


def deep(model: onnx.ModelProto, rng: random.Random) -> bytes:
    """Bodies in bodies, deeper than protobuf writes them."""
    graph = b""
    for _ in range(rng.choice((34, 60, 3000))):
        # AttributeProto.g, NodeProto.attribute, GraphProto.node
        for key in (b"\x32", b"\x2a", b"\x0a"):
            graph = key + _varint(len(graph)) + graph
    return model.SerializeToString() + b"\x3a" + _varint(len(graph)) + graph


def _varint(number: int) -> bytes:
    found = b""
    while number > 127:
        found, number = found + bytes([number & 127 | 128]), number >> 7
    return found + bytes([number])


IN_PLACE = (
    *(mutate_fields, settings) * 3, other_operator, rewired, other_types, huge_dims, opsets, external_data, recursive, nested, wide
)  # fmt: skip


def mutated_model(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.12:
        return mutated_bytes(data, rng)
    model = onnx.ModelProto.FromString(data)
    if rng.random() < 0.01:
        return deep(model, rng)
    try:
        for _ in range(rng.choice((1, 1, 1, 1, 2, 3, 6))):
            rng.choice(IN_PLACE)(model, rng)
        return bad_names(model, rng) if rng.random() < 0.04 else model.SerializeToString()
    except (DecodeError, ValueError):  # deeper than protobuf goes
        return deep(model, rng)


def mutated_json(value: Any, rng: random.Random) -> Any:
    """Change one thing somewhere inside."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.9:
        if isinstance(value, list):
            place = rng.randrange(len(value))
            kind = rng.randrange(8)
            if kind == 0:
                return value[:place] + value[place + 1 :]
            if kind == 1:
                return [*value, value[place]]
            return [*value[:place], mutated_json(value[place], rng), *value[place + 1 :]]
        key = rng.choice(list(value))
        kind = rng.randrange(10)
        if kind == 0:
            return {k: v for k, v in value.items() if k != key}
        if kind == 1:
            return {(rng.choice((*value, *WORDS)) if k == key else k): v for k, v in value.items()}
        if kind == 2:
            return {**value, key: value[rng.choice(list(value))]}
        return {**value, key: mutated_json(value[key], rng)}
    deep: Any = 1
    for _ in range(rng.choice((3, 2000))):
        deep = [deep]
    choices: list[Any] = [
        None,
        True,
        {},
        [],
        "",
        "1",
        [1],
        {"a": 1},
        *INTEGERS,
        *NUMBERS,
        *WORDS,
        deep,
        10**400,
    ]
    choices += [{"onnxfit:class": {"class": c}} for c in ("os.system", "Adam", "Callable", 3)] + [
        {"onnxfit:array": k} for k in ("0", 7)
    ]
    return rng.choice(choices)


def _mutated_safetensors(data: bytes, rng: random.Random) -> bytes:
    """Another header before the same data."""
    size = int.from_bytes(data[:8], "little")
    try:
        header = mutated_json(json.loads(data[8 : 8 + size] or "{}"), rng)
        text = json.dumps(header).encode()
    except (ValueError, RecursionError):
        return data[:100]
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def mutated_checkpoint(data: bytes, rng: random.Random) -> bytes:
    """Of the archive as a file, or of what its entries hold."""
    if rng.random() < 0.2:
        return mutated_bytes(data, rng)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = [(name, archive.read(name)) for name in archive.namelist()]
    place = rng.randrange(len(entries))
    if rng.random() < 0.6:
        place = next(i for i, (name, _) in enumerate(entries) if name.endswith(".json"))
    name, content = entries[place]
    packing = zipfile.ZIP_STORED
    if rng.random() < 0.15:
        kind = rng.randrange(5)
        if kind == 0:
            del entries[place]
        elif kind == 1:
            entries.append(entries[place])
        elif kind == 2:
            entries[place] = (rng.choice(("../../x", "/etc/passwd", "", *WORDS)), content)
        elif kind == 3:
            packing = rng.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
        else:
            entries[place] = (name, entries[rng.randrange(len(entries))][1])
    elif name.endswith(".json"):
        found = json.loads(content)
        for _ in range(rng.choice((1, 1, 2, 4))):
            found = mutated_json(found, rng)
        try:
            entries[place] = (name, json.dumps(found).encode())
        except RecursionError:
            entries[place] = (name, b"[" * 100_000)
    elif name.endswith(".onnx"):
        entries[place] = (name, mutated_model(content, rng))
    elif name.endswith(".safetensors") and rng.random() < 0.6:
        entries[place] = (name, _mutated_safetensors(content, rng))
    else:
        entries[place] = (name, mutated_bytes(content, rng))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", packing) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of entries that come twice
        for name, content in entries:
            archive.writestr(zipfile.ZipInfo(name or "e"), content, packing)
    return packed.getvalue()


# ----------------------------------------------------------------------------------------------------------------
# cases


class Case:
    """One mutated file, made of its number."""

    def __init__(self, number: int, checkpoints: dict[str, bytes]) -> None:
        rng = random.Random(number)
        self.number = number
        self.said = ""  # by the error
        self.is_checkpoint = rng.random() < CHECKPOINTS
        self.backend = rng.choice(("full", "full", "forward_backward"))
        self.seed = rng.choice(list(checkpoints if self.is_checkpoint else MODELS))
        self.data = (
            mutated_checkpoint(checkpoints[self.seed], rng)
            if self.is_checkpoint
            else mutated_model(seed_model(self.seed), rng)
        )

    def __str__(self) -> str:
        return (
            f"case {self.number} ({'checkpoint' if self.is_checkpoint else 'model'} {self.seed},"
            f" {self.backend})"
        )

    def run(self, folder: Path, stage: Callable[[str], None]) -> str:
        """What came of it: "trained", "read", "SettingError", … ; other exceptions are let through."""
        made = "none"
        try:
            stage("make")
            if self.is_checkpoint:
                path = folder / "mutated"
                path.write_bytes(self.data)
                trainer = Trainer.load(path)
            else:
                loss = MODELS[self.seed][1]
                trainer = Trainer(
                    self.data, loss=loss, optimizer=0.01, backend=self.backend, threads=1
                )
            made = "made"
            stage("batch")
            x, y = made_up(trainer, random.Random(self.number))
            stage("train")
            trainer.train_on_batch(x, y)
            return "trained"
        except _Beyond:
            return "made, too large to train"
        except OnnxfitError as error:
            self.said = str(error)
            return type(error).__name__ + (" in training" if made == "made" else "")


class _Beyond(Exception):
    """No batch of such a shape is made up."""


def made_up(trainer: Trainer, rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """A batch of the shapes that the model declares."""
    sizes: dict[str, int] = {}
    random_numbers = np.random.default_rng(0)

    def array(spec: Any, most: int = 2) -> Any:
        shape = [
            d if isinstance(d, int) else sizes.setdefault(str(d), rng.choice((2, 2, 2, 3)))
            for d in spec.shape or (2,)
        ]
        if any(d < 0 for d in shape) or np.prod(np.array(shape, dtype=object)) > SMALL:
            raise _Beyond
        if spec.dtype.kind == "O" or spec.dtype.kind in "US":
            return np.full(shape, "word", dtype=object)
        if spec.dtype.kind == "f":
            return random_numbers.random(shape).astype(spec.dtype)
        return random_numbers.integers(0, most, shape).astype(spec.dtype)

    x = {spec.name: array(spec) for spec in trainer._recipe.inputs}
    y = {
        output: array(target.loss.target(target.output))
        for output, target in trainer._recipe.targets.items()
    }
    return x, y


# ------------------------------------------------------------------------------------------------------------
# processes


def child(numbers: Iterator[int], checkpoints: dict[str, bytes], folder: Path, tell: int) -> None:
    """Run cases one after another; a line to the parent before each stage and after each case."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    log = (folder / "stderr").open("w+b")
    os.dup2(log.fileno(), 2)
    os.chdir(folder)
    faulthandler.enable(log)

    def line(**what: Any) -> None:
        os.write(tell, json.dumps(what).encode() + b"\n")

    for number in numbers:
        log.seek(0)
        log.truncate()
        faulthandler.dump_traceback_later(SECONDS - 2, file=log)
        line(begin=number)
        try:
            case = Case(number, checkpoints)
            outcome, detail = case.run(folder, lambda stage: line(stage=stage)), ""
            said = case.said
        except BaseException as error:
            outcome, detail, said = f"FORBIDDEN {type(error).__name__}", _where(error), ""
        faulthandler.cancel_dump_traceback_later()
        line(end=number, outcome=outcome, detail=detail, said=said[:400])
    os._exit(0)


def _where(error: BaseException) -> str:
    """The last line of ours and the last line of all that an exception went through, and what it
    says.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "fuzz.py" not in f.filename]
    ours = [f for f in frames if "onnxfit" in f.filename]
    shown = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in (*ours[-1:], *frames[-1:])]
    return " > ".join(dict.fromkeys(shown)) + f" | {str(error)[:150]!r}"


def run_all(
    numbers: list[int],
    checkpoints: dict[str, bytes],
    folder: Path,
    tell: Callable[[int, str, str, str], None],
) -> None:
    """Every case, in children one after another."""
    waiting = list(reversed(numbers))
    while waiting:
        batch = waiting[-200:][::-1]
        reading, writing = os.pipe()
        process = os.fork()
        if not process:
            os.close(reading)
            try:
                child(iter(batch), checkpoints, folder, writing)
            finally:
                os._exit(70)
        os.close(writing)
        current, stage, reported = batch[0], "start", set[int]()
        rest, hung = b"", False
        began = time.monotonic()
        while True:
            ready, _, _ = select.select(
                [reading], [], [], max(0.1, began + SECONDS - time.monotonic())
            )
            if not ready:
                hung = True
                os.kill(process, signal.SIGKILL)
                break
            got = os.read(reading, 1 << 16)
            if not got:
                break
            *lines, rest = (rest + got).split(b"\n")
            for line in map(json.loads, lines):
                if "begin" in line:
                    current, stage, began = line["begin"], "mutate", time.monotonic()
                elif "stage" in line:
                    stage = line["stage"]
                else:
                    reported.add(line["end"])
                    tell(line["end"], line["outcome"], line["detail"], line["said"])
        os.close(reading)
        _, status = os.waitpid(process, 0)
        if len(reported) < len(batch):
            said = (folder / "stderr").read_text(errors="replace")
            name = f"HANG in {stage}" if hung else f"{_death(status)} in {stage}"
            tell(current, _judged(name, said), _stack(said), "")
            reported.add(current)
        del waiting[-len(batch) :]
        waiting += [n for n in reversed(batch) if n not in reported]


def _death(status: int) -> str:
    return (
        signal.Signals(os.WTERMSIG(status)).name
        if os.WIFSIGNALED(status)
        else f"EXIT {os.WEXITSTATUS(status)}"
    )


def _judged(name: str, said: str) -> str:
    """A death or a hang inside of onnxruntime or onnx is theirs."""
    first = re.search(r'File "([^"]*)"', said)
    inside = first[1] if first else ""
    theirs = next(
        (
            library
            for library in ("onnxruntime", "onnx_ir", "onnx", "numpy")
            if f"/site-packages/{library}/" in inside
        ),
        "",
    )
    return f"{name} of {theirs}" if theirs else f"FORBIDDEN {name}"


def _stack(said: str) -> str:
    frames = re.findall(r'File "([^"]*)", line (\d+) in (\S+)', said)
    head = [
        line for line in said.splitlines() if line and "File" not in line and "Thread" not in line
    ][:3]
    ours = [f for f in frames if "/onnxfit/" in f[0]][:2]
    return (
        " < ".join(f"{Path(f).name}:{n} {what}" for f, n, what in (*frames[:1], *ours))
        + " | "
        + " ".join(head)[:200]
    )


def seeds(folder: Path) -> dict[str, bytes]:
    """The checkpoints to mutate, made in a child: the parent has no sessions, whose threads a fork
    would lose.
    """
    if not (process := os.fork()):
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            warnings.simplefilter("ignore")
            for name, data in _checkpoints(folder).items():
                (folder / f"{name}.seed").write_bytes(data)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if os.waitpid(process, 0)[1]:
        raise SystemExit("The checkpoints to begin with could not be made.")
    return {path.stem: path.read_bytes() for path in sorted(folder.glob("*.seed"))}


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--cases", type=int, default=10_000)
    arguments.add_argument("--first", type=int, default=0)
    arguments.add_argument("--case", type=int, help="run this one here, and show its traceback")
    arguments.add_argument(
        "--isolated", action="store_true", help="with --case: in a child, as among all"
    )
    arguments.add_argument(
        "--out", type=Path, help="with --case: write the file here and do nothing else"
    )
    arguments.add_argument(
        "--log",
        type=Path,
        help="append a line for each case: its number, what came of it, what was said",
    )
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoints = seeds(folder)
        if given.case is not None and not given.isolated:
            case = Case(given.case, checkpoints)
            print(case)
            if given.out:
                given.out.write_bytes(case.data)
                return 0
            faulthandler.enable()
            print(case.run(folder, lambda stage: print(" ", stage, flush=True)))
            return 0
        counts: collections.Counter[str] = collections.Counter()
        details: dict[str, list[tuple[int, str]]] = {}

        def tell(number: int, outcome: str, detail: str, said: str) -> None:
            counts[outcome] += 1
            if detail:
                details.setdefault(outcome, []).append((number, detail))
                print(f"case {number}: {outcome}: {detail}", flush=True)
            if given.log:
                with given.log.open("a") as file:
                    file.write(f"{number}\t{outcome}\t{detail or said.replace(chr(10), ' ')}\n")

        began = time.monotonic()
        numbers = (
            [given.case]
            if given.case is not None
            else list(range(given.first, given.first + given.cases))
        )
        run_all(numbers, checkpoints, folder, tell)
        print(f"\n{len(numbers)} cases in {time.monotonic() - began:.0f} s")
        for outcome, count in counts.most_common():
            print(f"  {count:6d}  {outcome}")
        return int(any(outcome.startswith(("FORBIDDEN", "HANG")) for outcome in counts))


if __name__ == "__main__":
    sys.exit(main())

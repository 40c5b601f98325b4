"""TextLoader: laws over every kind of text, in rows of one length and in padded rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest

from onnxfit import TextLoader, Trainer
from onnxfit.data import DataAdapter
from onnxfit.data.mapped import is_mapped
from onnxfit.errors import DataError, SettingError
from onnxfit.graph.spec import TensorSpec

END = 9
RNG = np.random.default_rng(0)
DOCUMENTS = [
    [*RNG.integers(1, 9, length).tolist(), END] for length in (1, 7, 3, 12, 2, 5, 5, 1, 30, 4)
]
FLAT = np.concatenate(DOCUMENTS)
KINDS = ["flat", "list of ids", "npy", "memmap", "lists", "arrays", "iterator", "dicts", "parquet"]
ROWS = {"packed": {"length": 8, "pack": True}, "padded": {"pack": False}, "cut": {"length": 6}}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_rows = pytest.mark.parametrize("rows", ROWS)
packing_is_known = pytest.mark.filterwarnings("ignore:The model has no attention mask of 3 or 4")


def text(kind: str, folder: Path) -> Any:
    """The same documents as another kind of data."""
    if kind == "npy":
        np.save(folder / "text.npy", FLAT.astype(np.uint16))
        return folder / "text.npy"
    if kind == "memmap":
        FLAT.astype(np.uint32).tofile(folder / "text.bin")
        return np.memmap(folder / "text.bin", np.uint32, "r")
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        column = pyarrow.array(DOCUMENTS, pyarrow.list_(pyarrow.int32()))
        parquet.write_table(
            pyarrow.table({"input_ids": column}), folder / "text.parquet", row_group_size=3
        )
        return str(folder / "text.parquet")
    kinds = {
        "flat": FLAT,
        "list of ids": FLAT.tolist(),
        "lists": DOCUMENTS,
        "arrays": [np.array(ids, np.int16) for ids in DOCUMENTS],
        "iterator": iter(DOCUMENTS),
        "dicts": [{"input_ids": ids, "id": 3} for ids in DOCUMENTS],
    }
    return kinds[kind]


def made(kind: str, rows: str, folder: Path, **settings: Any) -> TextLoader:
    settings = {"eos_token_id": END, "batch_size": 3, **ROWS[rows], **settings}
    return TextLoader(text(kind, folder), **settings)


def tokens_of(batches: Iterator[Any]) -> list[list[int]]:
    """The tokens of each row, without padding."""
    return [
        ids[mask == 1].tolist()
        for x, _ in batches
        for ids, mask in zip(x["input_ids"], x["attention_mask"])
    ]


@every_rows
@every_kind
def test_every_token_comes_once_an_epoch(kind: str, rows: str, tmp_path: Path) -> None:
    loader = made(kind, rows, tmp_path, shuffle=False)
    in_order = tokens_of(iter(loader))
    assert list(itertools.chain(*in_order)) == FLAT.tolist()
    assert len(in_order) == loader.rows
    shuffled = made(kind, rows, tmp_path, seed=1)
    epochs = [tokens_of(iter(shuffled)) for _ in range(2)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(in_order)
    assert epochs[0] != epochs[1] != in_order
    if kind in ("npy", "memmap"):
        assert is_mapped(loader._corpus.tokens)


@every_rows
@every_kind
def test_labels_and_positions_of_every_token(kind: str, rows: str, tmp_path: Path) -> None:
    """Counted token by token, from the documents as they were written.

    Without a mask of pairs, a token sees the documents before its own in the row.
    """
    begins = {sum(map(len, DOCUMENTS[:i])) for i in range(len(DOCUMENTS))}
    place = 0
    for x, labels in made(kind, rows, tmp_path, shuffle=False):
        for row in range(len(labels)):
            position = 0
            for i, (token, label) in enumerate(zip(x["input_ids"][row], labels[row])):
                if not x["attention_mask"][row, i]:
                    assert (token, label, x["position_ids"][row, i]) == (0, -100, 0)
                    continue
                position = 0 if i == 0 else position + 1
                assert x["position_ids"][row, i] == position
                assert token == FLAT[place]
                assert label == (-100 if place in begins else token)
                place += 1
    assert place == len(FLAT)


@every_rows
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_loader_goes_on_from_its_state(rows: str, shuffle: bool, tmp_path: Path) -> None:
    whole = made("npy", rows, tmp_path, shuffle=shuffle, seed=4)
    other = made("npy", rows, tmp_path, shuffle=shuffle)
    next(iter(whole))
    whole.set_epoch(2)
    expected = [batch for _ in range(2) for batch in whole]
    whole.set_epoch(2)
    batches = iter(whole)
    next(batches)
    next(batches)
    other.load_state_dict(whole.state_dict())
    rest = [batch for _ in range(2) for batch in other]
    assert len(rest) == len(expected) - 2
    for (x, y), (x2, y2) in zip(rest, expected[2:]):
        np.testing.assert_array_equal(y, y2)
        for name, array in x.items():
            np.testing.assert_array_equal(array, x2[name])


class Ids:
    """Stands for an output and its loss: token ids as labels."""

    input = "y_true/logits"

    def prepare(self, y: np.ndarray) -> np.ndarray:
        return y


def source(loader: TextLoader, *inputs: TensorSpec, purpose: str = "training", **target: Any):
    targets: Any = target.get("targets", {"logits": Ids()})
    return DataAdapter(inputs, targets, purpose=purpose).source(loader, batch_size=1)


def spec(name: str, *shape: int | str, dtype: str = "int64") -> TensorSpec:
    return TensorSpec(name, np.dtype(dtype), shape)


@every_rows
@packing_is_known
@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_share_out_the_rows_of_every_batch(rows: str, size: int, tmp_path: Path) -> None:
    ids = spec("input_ids", "N", "T")
    whole = list(source(made("npy", rows, tmp_path), ids).batches(1))
    shares = [
        list(source(made("npy", rows, tmp_path), ids).shard(rank, size).batches(1))
        for rank in range(size)
    ]
    for number, batch in enumerate(whole):
        for name, array in batch.arrays().items():
            parts = [share[number].arrays()[name] for share in shares]
            np.testing.assert_array_equal(np.concatenate(parts), array)
        assert {share[number].whole_rows for share in shares} == {batch.rows}


def test_padded_rows_are_with_rows_of_their_length(tmp_path: Path) -> None:
    documents = [[1] * length for length in (2, 9) * 12]
    loader = TextLoader(documents, pack=False, batch_size=4, pad_to_multiple_of=5)
    widths = [x["input_ids"].shape[1] for x, _ in loader]
    assert sorted(widths) == [5, 5, 5, 10, 10, 10]


def test_a_model_gets_the_inputs_that_it_has() -> None:
    loader = TextLoader(DOCUMENTS, 8, batch_size=3, shuffle=False)
    (first, *_) = source(loader, spec("tokens", "N", "T", dtype="int32")).batches(0)
    assert {n: a.dtype for n, a in first.arrays().items()} == {
        "tokens": np.int32, "y_true/logits": np.int64,
    }  # fmt: skip
    inputs = [spec(name, "N", "T") for name in ("input_ids", "position_ids", "attention_mask")]
    (first, *_) = source(loader, *inputs, purpose="prediction").batches(0)
    assert sorted(first.arrays()) == ["attention_mask", "input_ids", "position_ids"]
    inputs = [spec(name, "N", "T") for name in ("ids", "places")]
    names = {"input_ids": "ids", "position_ids": "places"}
    named = TextLoader(DOCUMENTS, 8, input_names=names)
    (first, *_) = source(named, *inputs).batches(0)
    assert sorted(first.arrays()) == ["ids", "places", "y_true/logits"]
    inputs = [spec(name, "N", "T") for name in ("input_ids", "labels")]
    (first, *_) = source(loader, *inputs, targets={}).batches(0)
    assert sorted(first.arrays()) == ["input_ids", "labels"]


@pytest.mark.parametrize(
    ("axes", "dtype"), [(3, "bool"), (4, "bool"), (4, "int64"), (4, "float32")]
)
def test_a_mask_of_pairs_shows_a_token_its_own_document_up_to_itself(axes: int, dtype: str) -> None:
    loader = TextLoader([[1, 2, 3], [4, 5]], 6, pack=True, shuffle=False)
    shape = ("N", "T", "S") if axes == 3 else ("N", 1, "T", "S")
    inputs = (spec("input_ids", "N", "T"), spec("attention_mask", *shape, dtype=dtype))
    (batch,) = source(loader, *inputs, spec("position_ids", "N", "T")).batches(0)
    assert batch.arrays()["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0]]
    mask = batch.arrays()["attention_mask"]
    assert mask.dtype == dtype
    assert mask.ndim == axes
    sees = mask.reshape(6, 6) == (0 if dtype == "float32" else 1)
    expected = np.zeros((6, 6), bool)
    expected[:3, :3] = np.tril(np.ones((3, 3)))
    expected[3:5, 3:5] = np.tril(np.ones((2, 2)))
    expected[5, 5] = True  # padding
    np.testing.assert_array_equal(sees, expected)
    assert np.isfinite(mask).all()


MODEL = """<ir_version: 8, opset_import: ["": 17]>
    g (int64[N, T] input_ids) => (float[N, T, 10] logits)
    { logits = Gather(table, input_ids) }"""


def bigrams() -> onnx.ModelProto:
    """A model of the next token after each."""
    model = onnx.parser.parse_model(MODEL)
    table = np.random.default_rng(1).normal(size=(10, 10)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    return model


@every_rows
@packing_is_known
def test_the_loss_of_an_epoch_is_that_of_every_pair_inside_a_row(rows: str, tmp_path: Path) -> None:
    trainer = Trainer(bigrams(), loss="causal_lm", metrics="perplexity")
    figures = trainer.evaluate(made("npy", rows, tmp_path, shuffle=False))
    table = trainer.get_weights()["table"].astype(float)
    log_p = table - np.log(np.exp(table).sum(axis=1, keepdims=True))
    pieces = []
    if rows == "packed":
        place = 0
        for ids in DOCUMENTS:
            cuts = [-(place + i) % 8 == 0 for i in range(len(ids))]
            pieces += np.split(ids, np.flatnonzero(cuts))
            place += len(ids)
    else:
        size = 6 if rows == "cut" else 100
        pieces = [ids[i : i + size] for ids in DOCUMENTS for i in range(0, len(ids), size)]
    pairs = [pair for ids in pieces for pair in itertools.pairwise(ids)]
    expected = -np.mean([log_p[pair] for pair in pairs])
    assert figures["loss"] == pytest.approx(expected, rel=1e-5)
    assert figures["perplexity"] == pytest.approx(np.exp(expected), rel=1e-5)


# How a decoder reads its attention mask: the input's type and shape, and the nodes of the scores.
MASKS = {
    0: ("", "masked = Identity(scores)"),
    2: (", int64[N, T] attention_mask", """rows = Unsqueeze(attention_mask, axis)
        shown = Cast<to = 1>(rows)  hidden = Sub(one, shown)  penalty = Mul(hidden, far)
        masked = Add(scores, penalty)"""),
    4: (", float[N, 1, T, S] attention_mask", """penalty = Squeeze(attention_mask, axis)
        masked = Add(scores, penalty)"""),
}  # fmt: skip


def decoder(axes: int) -> onnx.ModelProto:
    """A causal decoder of one layer with learned positions, and a mask with so many axes."""
    given, nodes = MASKS[axes]
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
        g (int64[N, T] input_ids, int64[N, T] position_ids{given}) => (float[N, T, 10] logits)
        <float one = {{1}}, float far = {{-10000}}, int64[1] axis = {{1}}, int64 start = {{0}},
         int64[1] first = {{0}}, int64 step = {{1}}>
        {{ e = Gather(tokens, input_ids)  p = Gather(places, position_ids)  x = Add(e, p)
           q = MatMul(x, query)  keys = Transpose<perm = [0, 2, 1]>(x)  products = MatMul(q, keys)
           shape = Shape(input_ids)  count = Gather(shape, step)  t = Range(start, count, step)
           row = Unsqueeze(t, first)  column = Unsqueeze(t, axis)  later = Greater(row, column)
           scores = Where(later, far, products)  {nodes}  a = Softmax<axis = -1>(masked)
           v = MatMul(a, x)  h = Add(x, v)  logits = MatMul(h, head) }}""")
    rng = np.random.default_rng(2)
    shapes = {"tokens": (10, 6), "places": (40, 6), "query": (6, 6), "head": (6, 10)}
    for name, shape in shapes.items():
        array = rng.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def loss_of_documents(documents: list[list[int]], labels: list[list[int]]) -> float:
    """The loss of a decoder that sees one document at a time, weighted by counted labels."""
    trainer = Trainer(decoder(0), loss="causal_lm")
    losses, counts = [], []
    for ids, targets in zip(documents, labels):
        counts.append(sum(label != -100 for label in targets[1:]))
        if counts[-1]:
            x = {"input_ids": np.array([ids]), "position_ids": np.arange(len(ids))[None]}
            losses.append(counts[-1] * trainer.evaluate(x, np.array([targets]))["loss"])
    return float(sum(losses) / sum(counts))


PROMPTS = [[-100] * (len(ids) // 2) + ids[len(ids) // 2 :] for ids in DOCUMENTS]


@pytest.mark.parametrize("labels", [DOCUMENTS, PROMPTS], ids=["ids", "answers"])
@pytest.mark.parametrize(
    ("axes", "settings"),
    [
        (0, {}),
        (2, {}),
        (2, {"length": 40}),
        (4, {}),
        (4, {"length": sum(map(len, DOCUMENTS)), "pack": True}),
    ],
)
@pytest.mark.filterwarnings("error")
def test_the_loss_is_that_of_each_document_alone(
    axes: int, settings: Any, labels: list[list[int]]
) -> None:
    rows = [{"input_ids": ids, "labels": label} for ids, label in zip(DOCUMENTS, labels)]
    loader = TextLoader(rows, batch_size=3, shuffle=False, **settings)
    loss = Trainer(decoder(axes), loss="causal_lm").evaluate(loader)["loss"]
    assert loss == pytest.approx(loss_of_documents(DOCUMENTS, labels), rel=1e-5)


@pytest.mark.parametrize("axes", [0, 2])
def test_packing_warns_if_the_model_cannot_keep_documents_apart(axes: int) -> None:
    """The rows are then those of one long text, with positions that run on."""
    trainer = Trainer(decoder(axes), loss="causal_lm")
    packed = TextLoader(DOCUMENTS, 8, pack=True, shuffle=False, batch_size=3)
    with pytest.warns(UserWarning, match="no attention mask of 3 or 4 axes, which keeps") as caught:
        loss = trainer.evaluate(packed)["loss"]
    assert len(caught) == 1
    text = [FLAT[i : i + 8].tolist() for i in range(0, len(FLAT), 8)]
    begins = set(np.cumsum([0, *map(len, DOCUMENTS)]).tolist())
    labels = [
        [-100 if 8 * row + i in begins else token for i, token in enumerate(ids)]
        for row, ids in enumerate(text)
    ]
    assert loss == pytest.approx(loss_of_documents(text, labels), rel=1e-5)


@pytest.mark.filterwarnings("error")
def test_packing_a_single_document_warns_of_nothing() -> None:
    loader = TextLoader(FLAT, 8, pack=True, shuffle=False)
    Trainer(decoder(2), loss="causal_lm").evaluate(loader)


def with_labels(kind: str, folder: Path) -> Any:
    """The documents with `PROMPTS` as labels, as another kind of data."""
    labels = np.concatenate(PROMPTS)
    if kind in ("flat", "npy", "memmap"):
        ids = text(kind, folder)
        if kind == "npy":
            np.save(folder / "labels.npy", labels.astype(np.int16))
            return {"input_ids": ids, "labels": folder / "labels.npy"}
        return {"input_ids": ids, "labels": labels}
    if kind == "columns":
        return {"input_ids": DOCUMENTS, "labels": PROMPTS}
    rows = [{"input_ids": ids, "labels": label} for ids, label in zip(DOCUMENTS, PROMPTS)]
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(
            pyarrow.Table.from_pylist(rows), folder / "labels.parquet", row_group_size=3
        )
        return folder / "labels.parquet"
    return iter(rows) if kind == "iterator" else rows


@every_rows
@pytest.mark.parametrize(
    "kind", ["flat", "npy", "memmap", "columns", "dicts", "iterator", "parquet"]
)
def test_labels_of_the_data_are_used(kind: str, rows: str, tmp_path: Path) -> None:
    settings = {"eos_token_id": END, "batch_size": 3, "shuffle": False, **ROWS[rows]}
    loader = TextLoader(with_labels(kind, tmp_path), **settings)
    begins = set(np.cumsum([0, *map(len, DOCUMENTS)]).tolist())
    expected = np.concatenate(PROMPTS)
    expected[sorted(begins - {len(FLAT)})] = -100
    got = np.concatenate([labels[x["attention_mask"] == 1] for x, labels in loader])
    np.testing.assert_array_equal(got, expected)
    ignoring = TextLoader(with_labels(kind, tmp_path), label_column=None, **settings)
    got = np.concatenate([labels[x["attention_mask"] == 1] for x, labels in ignoring])
    expected = np.where(np.isin(np.arange(len(FLAT)), sorted(begins)), -100, FLAT)
    np.testing.assert_array_equal(got, expected)


def test_an_appended_end_is_trained_where_the_last_token_is() -> None:
    data = [{"input_ids": [1, 2], "labels": [-100, 2]}, {"input_ids": [3, 4], "labels": [3, -100]}]
    _, labels = next(iter(TextLoader(data, eos_token_id=END, shuffle=False)))
    assert labels.tolist() == [[-100, 2, END], [-100, -100, -100]]


def test_tokens_that_a_mask_of_the_data_marks_are_padding() -> None:
    data = {
        "input_ids": [[0, 0, 1, 2], [3, 4, 5, 0]],
        "attention_mask": [[0, 0, 1, 1], [1, 1, 1, 0]],
        "labels": [[-100, -100, 1, 2], [3, 4, 5, -100]],
    }
    x, labels = next(iter(TextLoader(data, shuffle=False)))
    assert x["input_ids"].tolist() == [[1, 2, 0], [3, 4, 5]]
    assert x["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert labels.tolist() == [[-100, 2, -100], [-100, 4, 5]]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([{"input_ids": [1, 2], "labels": [1]}], "Document 0 has 2 token ids, but 1 values in 'la"),
        ([{"input_ids": [1], "labels": 1}], r"has shape \(\)\. Expected a single axis of labels"),
        (
            [{"input_ids": [1], "labels": [0.5]}],
            "Labels must be integers, but the column of labels",
        ),
        ([{"input_ids": [1], "labels": [-1]}], "or -100 for no loss, got -1 in document 0"),
        (
            [{"input_ids": [1], "labels": [1]}, {"input_ids": [1]}],
            "Document 1 has no labels, but document 0 has labels",
        ),
        (
            [{"input_ids": [1]}, {"input_ids": [1], "labels": [1]}],
            "Document 1 has labels, but document 0 has no labels",
        ),
        (
            {"input_ids": [1, 2], "labels": [1]},
            "There are 2 token ids in one array, but 'labels' h",
        ),
        ({"input_ids": [1, 2], "labels": [1, -7]}, "got -7 at position 1"),
        ({"input_ids": [[1], [2]], "labels": [[1]]}, "must have the same number of rows"),
        ({"input_ids": [1, 2], "attention_mask": [1, 1]}, "one array without padding"),
    ],
)
def test_labels_that_do_not_fit_are_refused(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(TextLoader(data, 4))


def test_a_fit_is_resumed_to_the_last_bit(tmp_path: Path) -> None:
    def trainer() -> Trainer:
        return Trainer(bigrams(), loss="causal_lm", optimizer="adam", seed=3)

    def loader() -> TextLoader:
        return made("npy", "padded", tmp_path)

    whole, cut = trainer(), trainer()
    whole.fit(loader(), epochs=3, verbose=0)
    cut.fit(loader(), epochs=1, verbose=0)
    loaded = Trainer.load(cut.save(tmp_path / "c.onnxfit"))
    loaded.fit(loader(), epochs=3, initial_epoch=1, verbose=0)
    np.testing.assert_array_equal(loaded.get_weights()["table"], whole.get_weights()["table"])


@every_rows
def test_the_last_rows_validate(rows: str, tmp_path: Path) -> None:
    loader = made("npy", rows, tmp_path, shuffle=False)
    expected = tokens_of(iter(loader))
    training, validation = loader.split(0.3)
    assert tokens_of(iter(training)) + tokens_of(iter(validation)) == expected
    assert validation.rows == math.ceil(0.3 * loader.rows)
    validation_of_itself, _ = validation.split(0.5)
    assert (
        tokens_of(iter(validation_of_itself))
        == expected[training.rows :][: validation_of_itself.rows]
    )


def test_documents_get_the_end_that_they_lack() -> None:
    loader = TextLoader([[1, 2], [3, END]], pack=False, eos_token_id=END, shuffle=False)
    assert tokens_of(iter(loader)) == [[1, 2, END], [3, END]]


@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        ([[1], []], {}, r"Document 1 has no tokens\. Remove it"),
        ([[1], [2.5]], {}, r"Token ids must be integers, but document 1 has type float64\."),
        ([[1], [[2]]], {}, r"Document 1 has shape \(1, 1\)\. Expected a single axis"),
        ([[1], [[2], [3, 4]]], {}, "Document 1 is not a sequence of token ids"),
        ([[1], [2**31]], {}, "from 0 to 2147483647, got 2147483648 in document 1"),
        ([[1], [-1]], {}, "got -1 in document 1"),
        (np.array([1, 2, -3]), {}, r"got -3 at position 2\."),
        (np.array([1, 2**40], np.uint64), {}, r"got 1099511627776 at position 1\."),
        (np.zeros(0, np.int64), {}, r"no tokens: the array is empty\."),
        (np.zeros(4), {}, r"Token ids must be integers, but the array has type float64\."),
        ([], {}, r"no documents\."),
        ("some text", {}, r"'some text' is unknown\. Expected one of \.parquet"),
        (["some text"], {}, r"Document 0 is text, 'some text', but expected token ids\."),
        (5, {}, r"TextLoader needs token ids:.* got 5. Apply your tokenizer"),
        ([{"ids": [1]}], {}, "Document 0 has no column 'input_ids'. Its columns are 'ids'"),
    ],
)
def test_ids_that_are_none_are_refused(data: Any, settings: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(TextLoader(data, 4, **settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pack": True}, r", such as TextLoader\(data, 1024, pack=True\)"),
        ({"length": 1}, r"needs length from 2 to 16777216, got 1\."),
        ({"length": 4, "eos_token_id": -1}, r"eos_token_id must be from 0 to 2147483647, got -1\."),
        ({"length": 4, "pool": 0}, "needs pool >= 1, got 0"),
        ({"length": 4, "pad_to_multiple_of": 0}, "from 1 to 65536, got 0"),
        ({"length": 4, "input_names": {"ids": "x"}}, r"input_names must map 'input_ids',.* got"),
    ],
)
def test_impossible_settings_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        TextLoader(DOCUMENTS, **settings)


def test_a_column_that_has_no_lists_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for number, (values, message) in enumerate(
        [([1, 2], r"has type int64\. Expected a list in each row\."), ([[1], None], "has nulls")]
    ):
        path = tmp_path / f"{number}.parquet"
        parquet.write_table(pyarrow.table({"input_ids": values}), path)
        with pytest.raises(DataError, match=message):
            TextLoader(path, 4)

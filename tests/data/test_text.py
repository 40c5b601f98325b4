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
ROWS = {"packed": {"length": 8}, "padded": {"pack": False}, "cut": {"pack": False, "length": 6}}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_rows = pytest.mark.parametrize("rows", ROWS)


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
def test_labels_positions_and_masks_keep_documents_apart(
    kind: str, rows: str, tmp_path: Path
) -> None:
    """Counted token by token, from the documents as they were written."""
    begins = {sum(map(len, DOCUMENTS[:i])) for i in range(len(DOCUMENTS))}
    place = 0
    for x, labels in made(kind, rows, tmp_path, shuffle=False):
        for row in range(len(labels)):
            position = 0
            for i, (token, label) in enumerate(zip(x["input_ids"][row], labels[row])):
                if not x["attention_mask"][row, i]:
                    assert (token, label, x["position_ids"][row, i]) == (0, -100, 0)
                    continue
                position = 0 if place in begins or i == 0 else position + 1
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
    named = TextLoader(DOCUMENTS, 8, input_names={"input_ids": "ids", "position_ids": "places"})
    (first, *_) = source(named, *inputs).batches(0)
    assert sorted(first.arrays()) == ["ids", "places", "y_true/logits"]
    inputs = [spec(name, "N", "T") for name in ("input_ids", "labels")]
    (first, *_) = source(loader, *inputs, targets={}).batches(0)
    assert sorted(first.arrays()) == ["input_ids", "labels"]


@pytest.mark.parametrize(
    ("axes", "dtype"), [(3, "bool"), (4, "bool"), (4, "int64"), (4, "float32")]
)
def test_a_mask_of_pairs_shows_a_token_its_own_document_up_to_itself(axes: int, dtype: str) -> None:
    loader = TextLoader([[1, 2, 3], [4, 5]], 6, shuffle=False)
    shape = ("N", "T", "S") if axes == 3 else ("N", 1, "T", "S")
    inputs = (spec("input_ids", "N", "T"), spec("attention_mask", *shape, dtype=dtype))
    (batch,) = source(loader, *inputs).batches(0)
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
        ({}, ", such as TextLoader"),
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

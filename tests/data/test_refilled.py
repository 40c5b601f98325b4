"""Loaders that refill one buffer: every batch is used before the next one is asked for, or copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from onnxfit import Trainer
from onnxfit.data import Loader, Prefetch
from onnxfit.data.prefetch import PrefetchedSource
from onnxfit.runtime.backends import BACKENDS
from tests.data.kinds import SIZE, W, X, Y, make, spec, three_batches
from tests.models import linear


class Refilled:
    """Batches by iteration, all in the same arrays."""

    def __init__(self) -> None:
        self.arrays = [np.zeros_like(array[:SIZE]) for array in (X, Y, W)]

    def fill(self, number: int) -> tuple[np.ndarray, ...]:
        batch = three_batches()[number]
        for buffer, array in zip(self.arrays, batch):
            buffer[: len(array)] = array
        return tuple(buffer[: len(batch[0])] for buffer in self.arrays)

    def __iter__(self) -> Iterator[Any]:
        return map(self.fill, range(3))


class RefilledByNumber(Refilled):
    """The same by number."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> Any:
        return self.fill(number)


class RefilledDicts(Refilled):
    """The same as dicts of several inputs and outputs."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(3):
            x, y, w = self.fill(number)
            yield {"x": x}, {"y": y}, w


class RefilledLoader(Loader):
    """A loader of a user's own."""

    def __init__(self, prefetch: int = 0) -> None:
        super().__init__(len(X), SIZE, False, None, False, prefetch)
        self._refilled = Refilled()

    def batches(self, epoch: int, skip: int, seed: int | None) -> Iterator[tuple[Any, ...]]:
        return map(self._refilled.fill, range(skip, 3))


DATA: dict[str, Callable[[], Any]] = {
    "iterable": Refilled,
    "numbered": RefilledByNumber,
    "dicts": RefilledDicts,
    "function": lambda: lambda: iter(Refilled()),
    "loader": RefilledLoader,
}
PREFETCHED: dict[str, Callable[[], Any]] = {
    **{f"prefetched {name}": lambda make=make: Prefetch(make()) for name, make in DATA.items()},
    "prefetching loader": lambda: RefilledLoader(prefetch=2),
}


@pytest.mark.parametrize("data", [*DATA, *PREFETCHED])
@pytest.mark.parametrize("backend", BACKENDS)
def test_training_on_a_refilled_buffer_is_training_on_its_batches(data: str, backend: str) -> None:
    expected, trained = (
        Trainer(linear(2), loss="mse", metrics=["mae"], backend=backend) for _ in range(2)
    )
    settings: dict[str, Any] = {"epochs": 3, "shuffle": False, "verbose": 0}
    history = expected.fit(three_batches(), **settings).history
    refilled = (DATA | PREFETCHED)[data]
    assert trained.fit(refilled(), **settings).history == history
    np.testing.assert_equal(trained.get_weights(), expected.get_weights())
    assert trained.evaluate(refilled()) == expected.evaluate(three_batches())
    np.testing.assert_array_equal(
        trained.predict(refilled()), expected.predict([(x,) for x, _, _ in three_batches()])
    )


@pytest.mark.parametrize("data", PREFETCHED)
def test_prefetched_items_stay_as_they_are(data: str) -> None:
    def arrays(item: Any) -> list[np.ndarray]:
        elements = [list(e.values()) if isinstance(e, dict) else [e] for e in item]
        return [array for element in elements for array in element]

    items = [arrays(item) for item in PREFETCHED[data]()]
    np.testing.assert_equal(items, [list(batch) for batch in three_batches()])


def test_prefetched_tensors_stay_as_they_are() -> None:
    torch = pytest.importorskip("torch")
    buffer = torch.zeros(2)

    def batches() -> Iterator[Any]:
        for number in range(3):
            buffer.fill_(number)
            yield {"x": [buffer]}, number

    found = [(batch["x"][0].tolist(), number) for batch, number in Prefetch(batches)]
    assert found == [([n, n], n) for n in range(3)]


def test_prefetched_inputs_without_rows_are_copied_too() -> None:
    scale = np.zeros((), np.float32)

    def batches() -> Iterator[Any]:
        for number, (x, _, _) in enumerate(three_batches()):
            scale[...] = number
            yield {"x": x, "scale": scale}

    data = make(Prefetch(batches), inputs=[spec("x", "N", 2), spec("scale")], targets={})
    with data:
        assert [batch.arrays()["scale"] for batch in data.batches(0)] == [0, 1, 2]


def test_rows_selected_by_their_numbers_are_not_copied_again() -> None:
    class Counting(np.ndarray):
        copies = 0

        def copy(self, *arguments: Any, **keywords: Any) -> Any:
            Counting.copies += 1
            return super().copy(*arguments, **keywords)

    for shuffle, copies in ((True, 0), (False, 3)):
        source = make(X, targets={}, shuffle=shuffle)
        source._data = replace(source._data, columns=(("x", X.view(Counting)),))  # type: ignore[attr-defined]
        Counting.copies = 0
        assert len(list(PrefetchedSource(source, 2).batches(0))) == 3
        assert Counting.copies == copies

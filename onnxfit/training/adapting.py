"""The data adapters of a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxfit.data import DataAdapter, Source
from onnxfit.data.known import ALL_ROWS, BatchPlanCache
from onnxfit.errors import SettingError
from onnxfit.step.objectives import label_names
from onnxfit.step.recipe import Recipe


def adapter_for(
    recipe: Recipe,
    purpose: str,
    seed: int,
    class_weight: Mapping[int, float] | None = None,
    ranks: int = 1,
) -> DataAdapter:
    """Return the adapter of data to a recipe. SettingError: the purpose needs a loss.

    - `ranks`: the number of ranks that share each batch.
    """
    if not recipe.loss_outputs and purpose != "prediction":
        raise SettingError(
            f"This trainer has no loss, but {purpose} needs one. Pass Trainer(...,"
            " loss='mean_squared_error'), or give the model a scalar output 'loss'. Without a"
            " loss it can predict and export; with backend='forward_backward' it can also train"
            " with forward, backward and apply_gradients."
        )
    return DataAdapter(
        recipe.data_inputs,
        recipe.targets,
        purpose=purpose,
        seed=seed,
        class_weight=class_weight,
        ranks=ranks,
        losses=label_names(recipe.objectives),
    )


class SingleBatches:
    """Sources of one batch, for `train_on_batch`; each purpose has its own BatchPlanCache.

    With several ranks, each rank passes the whole batch, and gets its own share.
    """

    def __init__(self, recipe: Recipe, seed: int, rank: int, size: int) -> None:
        self._recipe = recipe
        self._seed = seed
        self._rank = rank
        self._size = size
        self._known: dict[tuple[str, int], BatchPlanCache] = {}

    def source(
        self,
        purpose: str,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
    ) -> Source:
        """Return the source of all rows in one batch, with the errors of a DataAdapter.

        With several ranks, the batch has this rank's share of the rows.
        """
        if class_weight is None:
            source = self._batches(purpose, self._size).source(x, y, sample_weight)
        else:  # the weights of the rows depend on their labels, so no plan can be kept
            adapter = adapter_for(self._recipe, purpose, self._seed, class_weight, self._size)
            source = adapter.source(x, y, sample_weight, batch_size=ALL_ROWS)
        return source if self._size == 1 else source.shard(self._rank, self._size)

    def whole(self, purpose: str, x: Any, y: Any = None, sample_weight: Any = None) -> Source:
        """Return the source of all rows in one batch, also on several ranks."""
        return self._batches(purpose, 1).source(x, y, sample_weight)

    def _batches(self, purpose: str, ranks: int) -> BatchPlanCache:
        known = self._known.get((purpose, ranks))
        if known is None:
            known = BatchPlanCache(adapter_for(self._recipe, purpose, self._seed, ranks=ranks))
            self._known[purpose, ranks] = known
        return known

"""Positions from which a fit resumes."""

from __future__ import annotations

import warnings
from dataclasses import astuple

import pytest

from onnxfit.errors import SettingError
from onnxfit.training.position import POSITION_TYPES, PendingFit, Position

BEFORE_ORDER = list(POSITION_TYPES).index("order")


def test_other_batches_are_refused_within_a_data_epoch_alone() -> None:
    inside = Position(epoch=2, batch=3, data_batch=3, batch_size=4)
    inside.require_batch_size(4)
    with pytest.raises(
        SettingError,
        match=r"after 3 batches of 4 rows, but this fit has batch_size=8.*initial_epoch=3",
    ):
        inside.require_batch_size(8)
    Position(epoch=2, batch_size=4).require_batch_size(8)


def test_data_that_does_not_tell_its_batch_size_is_not_refused() -> None:
    Position(data_batch=3, batch_size=4).require_batch_size(None)
    Position(data_batch=3, batch_size=None).require_batch_size(4)


def test_a_fit_that_begins_further_on_keeps_the_states_of_callbacks_alone() -> None:
    position = Position(epoch=2, batch=3, data_batch=3)
    pending = PendingFit(position, {"rows": 3}, {"hook": "on_epoch_end"}, {"Timer": {}})
    for epoch in (0, 1, 2):
        assert pending.from_epoch(epoch) is pending
    assert pending.from_epoch(3) == PendingFit(Position(3), callbacks={"Timer": {}})
    assert PendingFit().position.nothing_to_resume
    assert not pending.position.nothing_to_resume


def test_the_order_of_rows_has_a_version() -> None:
    now = Position(epoch=2, batch=3, data_batch=3)
    assert Position.restored(astuple(now)) == now
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Position.restored(astuple(now)).warn_of_other_order()
        Position.restored(astuple(now)[: BEFORE_ORDER + 1]).warn_of_other_order()
        Position.restored(astuple(Position(epoch=2))[:BEFORE_ORDER]).warn_of_other_order()
    with pytest.warns(
        UserWarning, match="after 3 batches.*start the next epoch with initial_epoch=3"
    ):
        Position.restored(astuple(now)[:BEFORE_ORDER]).warn_of_other_order()

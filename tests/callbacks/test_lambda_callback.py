"""LambdaCallback."""

import pytest

from onnxfit.callbacks import LambdaCallback
from onnxfit.errors import UnknownNameError
from tests.callbacks.helpers import fit


def test_lambda_callback_takes_hooks_only():
    with pytest.raises(
        UnknownNameError, match=r"No hook is called 'on_epoch_ends'. Did you mean 'on_epoch_end'\?"
    ):
        LambdaCallback(on_epoch_ends=print)
    calls = []
    fit(
        LambdaCallback(on_train_end=lambda logs: calls.append(1), on_epoch_end=None),
        LambdaCallback(on_train_end=lambda logs: calls.append(2)),
    )
    assert calls == [1, 2]

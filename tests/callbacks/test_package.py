"""The package exports the public classes of its modules."""

from onnxfit import callbacks as package
from onnxfit.callbacks import (
    Callback,
)
from onnxfit.registry import registry


def test_the_registry_is_what_the_package_exports():
    assert package.__all__ == sorted(package.__all__)
    assert all(
        issubclass(kind, Callback) and kind.__doc__
        for kind in registry("onnxfit.callbacks", Callback).values()
    )

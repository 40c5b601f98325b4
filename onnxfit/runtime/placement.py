"""The nodes of a training step that a device leaves to the CPU."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

from onnxfit.errors import GradientError, InstallationError
from onnxfit.runtime.compilation import compile_model
from onnxfit.runtime.device import Device
from onnxfit.step.batch_specs import batch_specs
from onnxfit.step.graphs import train_graph
from onnxfit.step.providers import PROVIDERS
from onnxfit.step.recipe import Recipe

RECORDING = "session.record_ep_graph_assignment_info"


def operators_on_cpu(recipe: Recipe, device: str, rows: int | None) -> tuple[tuple[str, int], ...]:
    """Return the operators of a training step that run on the CPU, and the number of their nodes.

    - `device`: the name of the device.
    - `rows`: the rows of a batch; None for any number.

    The step is compiled, and nothing is run. SettingError or InstallationError: the device is not
    available. GradientError: the gradient needs the number of rows.
    """
    target = Device.parse(device)
    try:
        step = train_graph(recipe.for_device(target.forms), batch_specs(recipe, rows, False))
    except GradientError as error:
        if rows is not None:
            raise
        raise GradientError(
            f"{error}\nPass the number of rows in a batch, such as batch_size=32."
        ) from None
    session = compile_model(step, target, None, "training", entries={RECORDING: "1"})
    with suppress(AttributeError):
        parts = session.get_provider_graph_assignment_info()
        cpu = PROVIDERS["cpu"].name
        nodes = [node for part in parts if part.ep_name == cpu for node in part.get_nodes()]
        return tuple(sorted(Counter(node.op_type for node in nodes).items()))
    raise InstallationError(
        "inspect(device=...) needs onnxruntime 1.24 or newer: pip install --upgrade onnxruntime."
    )

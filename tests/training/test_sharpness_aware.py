"""SAM by the passes by hand, as docs/customize.md has it, against the same in PyTorch."""

import re
from pathlib import Path

import numpy as np
import pytest

from onnxfit import Trainer
from onnxfit.optimizers import SGD
from tests.models import mlp

PAGE = Path(__file__).parents[2] / "docs" / "customize.md"


def documented():
    """The functions of the section, without the loop that trains by them."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = (block for block in blocks if "def sam_step" in block)
    names = {"np": np}
    exec(block.partition("\nflat = ")[0], names)
    return names["sam_step"]


@pytest.mark.torch
@pytest.mark.parametrize("rho", [0.05, 0.5])
def test_ten_steps_are_those_of_torch(rho):
    torch = pytest.importorskip("torch")
    draw = np.random.default_rng(0)
    x, y = (draw.normal(size=(32, n)).astype(np.float32) for n in (4, 2))
    network = Trainer(mlp((4, 8, 2)), optimizer=SGD(0.1, momentum=0.9), backend="forward_backward")
    w = {n: torch.tensor(a, requires_grad=True) for n, a in network.get_weights().items()}
    optimizer = torch.optim.SGD(w.values(), lr=0.1, momentum=0.9)

    def differentiate():
        optimizer.zero_grad()
        hidden = torch.tanh(torch.tensor(x) @ w["fc0.weight"] + w["fc0.bias"])
        output = hidden @ w["fc1.weight"] + w["fc1.bias"]
        torch.nn.functional.mse_loss(output, torch.tensor(y)).backward()

    step, plain = documented(), network.get_weights()
    for _ in range(10):
        step(network, x, y, rho)
        differentiate()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in w.values()]).norm()
            moves = {n: rho * p.grad / norm for n, p in w.items()}
            for name, p in w.items():
                p += moves[name]
        differentiate()
        with torch.no_grad():
            for name, p in w.items():
                p -= moves[name]
        optimizer.step()
    for name, p in w.items():
        np.testing.assert_allclose(network.get_weights()[name], p.detach().numpy(), atol=3e-6)
    assert network.global_step == 10
    assert any((network.get_weights()[name] != a).any() for name, a in plain.items())

"""Adapters train beside an exported file as PEFT trains them beside the network: `make exports`.

Twenty steps of SGD and of AdamW from the same weights, adapters and data. The losses agree within
1e-4, as do the adapters, and the exported file gives the logits of PEFT's merged network.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import nn

from onnxfit import LoRA, Trainer
from onnxfit.optimizers import SGD, AdamW

WIDTH, TOKENS, VOCABULARY, CLASSES, ROWS, STEPS = 16, 6, 30, 5, 8, 20
TARGETS = ["wide", "narrow", "inputs"]
pytestmark = pytest.mark.filterwarnings("default")  # torch and peft warn of themselves


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inputs = nn.Linear(WIDTH, 3 * WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inputs(self.norm1(x)).chunk(3, -1)
        x = x + (q @ k.mT / WIDTH**0.5).softmax(-1) @ v
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm2(x))))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(Layer(), Layer())
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(x)).mean(1))


def matrices(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    state = peft.get_peft_model_state_dict(model)
    return {name: tensor.detach().numpy() for name, tensor in state.items()}


@pytest.mark.parametrize("rslora", [False, True], ids=["alpha/r", "alpha/sqrt(r)"])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_adapters_train_as_those_of_peft(kind: str, rslora: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    module = Network()
    file = tmp_path / "model.onnx"
    x = torch.randint(0, VOCABULARY, (ROWS, TOKENS))
    labels = torch.randint(0, CLASSES, (ROWS,))
    sizes = ({0: torch.export.Dim("batch", min=1)},)
    torch.onnx.export(
        module.eval(), (x,), file, dynamo=True, dynamic_shapes=sizes, external_data=False
    )

    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, use_rslora=rslora)
    model = peft.get_peft_model(module, config)
    model.save_pretrained(str(tmp_path / "first"))
    rate = 0.1 if kind == "sgd" else 3e-3
    make = torch.optim.SGD if kind == "sgd" else torch.optim.AdamW
    optimizer = make([p for p in model.parameters() if p.requires_grad], rate, weight_decay=0)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    trainer = Trainer(
        file,
        loss="cross_entropy",
        optimizer=SGD(rate) if kind == "sgd" else AdamW(rate, weight_decay=0),
        adapters=LoRA.load(tmp_path / "first"),
    )
    history = trainer.fit(x.numpy(), labels.numpy(), epochs=STEPS, verbose=0).history
    np.testing.assert_allclose(history["loss"], losses, atol=1e-4, rtol=0)
    assert losses[-1] < 0.9 * losses[0]

    trainer.export_adapter(tmp_path / "last")
    other = peft.PeftModel.from_pretrained(fresh(), str(tmp_path / "last"))
    expected, found = matrices(model), matrices(other)
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=1e-4, rtol=0, err_msg=name)

    predicted = trainer.predict_on_batch(x.numpy())
    merged = Trainer(trainer.export()).predict(x.numpy())
    np.testing.assert_allclose(merged, predicted, atol=2e-6, rtol=0)
    with torch.no_grad():
        expected_logits = model.merge_and_unload()(x).numpy()
    np.testing.assert_allclose(predicted, expected_logits, atol=1e-3, rtol=0)
    print(
        f"{kind}, {config.use_rslora=}: losses {np.abs(np.subtract(history['loss'], losses)).max():.1e},"
        f" adapters {max(np.abs(found[n] - a).max() for n, a in expected.items()):.1e},"
        f" merged file {np.abs(merged - predicted).max():.1e}"
    )


def fresh() -> nn.Module:
    torch.manual_seed(0)
    return Network()

"""Two small transformers that torch exported: one classifies texts, one continues them.

    python examples/transformers_from_torch.py

The networks have not been trained, so that torch's exporter writes equal weights once, leaves out
biases of zeros, and writes the table that the language model uses twice as two weights. `untie`,
`add_biases` and `tie` give the files the weights of the networks. Texts have different lengths:
Bucket and Pad pad them, and -100 marks the labels of the padding. The example writes
classifier.onnx and language_model.onnx.
"""

from __future__ import annotations

import sys
import warnings

import numpy as np
import onnx
import torch
from torch import nn

import onnxfit

WORDS = 20  # of which 0 is for padding
WIDTH = 16
FIRST, NUMBERS = 3, 17  # the words 3 to 19 are numbers on a circle


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    classified = classify(np.random.default_rng(0))
    continued, with_first = continue_texts(np.random.default_rng(0))
    print(f"texts classified    {classified:.1%}")
    print(f"words continued     {continued:.1%} ({with_first:.1%} with the ones of weight 0)")
    if not (classified > 0.95 and continued > 0.95):
        sys.exit("transformers_from_torch: training fell short")


def classify(rng: np.random.Generator) -> float:
    """Train a network like BERT to tell which half of the words a text begins with."""
    network = Transformer(outputs=2)
    export(network, "classifier.onnx", masked=True)
    model = onnxfit.add_biases(onnxfit.untie("classifier.onnx"))
    check_weights(model, network)

    texts = [rng.integers(1, WORDS, length).tolist() for length in rng.integers(2, 20, 300)]
    labels = np.array([text[0] > WORDS / 2 for text in texts], np.int64)
    trainer = onnxfit.Trainer(
        model,
        loss="cross_entropy",
        optimizer=onnxfit.optimizers.AdamW(0.005),
        metrics=["accuracy"],
    )
    # the model has an input attention_mask, for which Bucket makes the mask
    data = onnxfit.Bucket(texts[:240], labels[:240], batch_size=16, pad_to_multiple_of=8)
    validation = onnxfit.Pad(texts[240:], labels[240:])
    history = trainer.fit(data, validation_data=validation, epochs=6, verbose=0)
    return history.history["val_accuracy"][-1]


def continue_texts(rng: np.random.Generator) -> tuple[float, float]:
    """Train a network like GPT-2 to count in steps of 1 to 3, and return accuracies.

    The second word of a text tells the step. The first cannot tell it: its label has the weight 0.
    """
    network = Transformer(outputs=WORDS, causal=True)
    export(network, "language_model.onnx", masked=False)
    model = onnxfit.add_biases(onnxfit.untie("language_model.onnx"))
    model = onnxfit.tie(model, transposed_copies(model))
    check_weights(model, network)

    starts, steps = rng.integers(0, NUMBERS, 300), rng.integers(1, 4, 300)
    texts = [
        [FIRST + (start + step * i) % NUMBERS for i in range(length)]
        for start, step, length in zip(starts.tolist(), steps.tolist(), rng.integers(4, 20, 300))
    ]
    labels = [[*text[1:], -100] for text in texts]  # the next word; nothing follows the last one
    weights = [[0.0] + [1.0] * (len(text) - 1) for text in texts]
    trainer = onnxfit.Trainer(
        model,
        loss=onnxfit.losses.CrossEntropy(ignore_index=-100),
        optimizer=onnxfit.optimizers.AdamW(0.02),
        metrics=["accuracy", onnxfit.metrics.Accuracy(weighted=True, name="weighted_accuracy")],
    )
    data = onnxfit.Bucket(
        texts[:240], labels[:240], weights[:240], batch_size=16, pad_to_multiple_of=8
    )
    validation = onnxfit.Pad(texts[240:], labels[240:], weights[240:])
    history = trainer.fit(data, validation_data=validation, epochs=20, verbose=0)
    figures = history.history
    return figures["val_weighted_accuracy"][-1], figures["val_accuracy"][-1]


class Layer(nn.Module):
    """Attention and two linear layers, each behind a normalization, as in GPT-2."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        for linear in (self.qkv, self.out, self.up, self.down):
            nn.init.zeros_(linear.bias)  # as in BERT and GPT-2

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        split = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        q, k, v = (s.view(rows, length, self.heads, -1).transpose(1, 2) for s in split)
        read = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(read.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Transformer(nn.Module):
    """Scores of each next word if `causal`, otherwise of the whole text."""

    def __init__(self, outputs: int, *, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, outputs, bias=not causal)
        if causal:
            self.head.weight = self.words.weight

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        length = input_ids.shape[1]
        x = self.words(input_ids) + self.positions(torch.arange(length))
        if self.causal:
            mask = torch.ones(length, length, dtype=torch.bool).tril()
        else:
            mask = attention_mask[:, None, None, :].bool()
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x if self.causal else x[:, 0]))


def export(network: nn.Module, path: str, *, masked: bool) -> None:
    """Export with torch's default settings, for batches and texts of any length."""
    words = torch.randint(1, WORDS, (2, 9))
    inputs = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    if not masked:
        del inputs["attention_mask"]
    axes = {name: {0: "batch", 1: "length"} for name in inputs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's exporter warns of its own code
        torch.onnx.export(
            network.eval(), (), path, kwargs=inputs, dynamic_shapes=axes, verbose=False
        )


def transposed_copies(model: onnx.ModelProto) -> dict[str, str]:
    """Return the pairs for `tie`: a matrix, and the embedding's table that it is a copy of."""
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    tables = {name: array for name, array in arrays.items() if array.shape == (WORDS, WIDTH)}
    return {
        name: table
        for name, array in arrays.items()
        for table in tables
        if np.array_equal(array.T, arrays[table])
    }


def check_weights(model: onnx.ModelProto, network: nn.Module) -> None:
    trained = len(onnxfit.Trainer(model, loss="cross_entropy").get_weights())
    parameters = len(list(network.parameters()))
    if trained != parameters:
        sys.exit(f"transformers_from_torch: {trained} weights, {parameters} parameters in torch")


if __name__ == "__main__":
    main()

"""Decoders of transformers with caches, exported by torch and by optimum, train as in torch:

`make exports`.

Twenty steps of AdamW from the file: the losses agree, and the exported file gives torch's logits
for a whole sequence and token by token. Files by optimum need an environment of their own, with the
older transformers that optimum asks for.
"""

from __future__ import annotations

import importlib.util
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers as hf

from onnxfit import Trainer, tie
from onnxfit.optimizers import AdamW
from tests.load.test_concatenated_caches import decode

LAYERS, HEADS, SIZE, VOCABULARY, LENGTH = 2, 4, 8, 40, 7
STEPS = 20
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HEADS * SIZE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "pad_token_id": None,  # torch gives the row of such a token no gradient
    "attn_implementation": "eager",
}
GROUPED = SMALL | {"num_key_value_heads": 2, "intermediate_size": 64}
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(**SMALL, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0)
    ),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=HEADS * SIZE, dropout=0)
    ),
}
# "older" is torch's `dynamo=False`. In torch 2.13, it fails with the transformers that optimum asks
# for: "unordered_map::at".
EXPORTERS = ["dynamo", "optimum" if importlib.util.find_spec("optimum") else "older"]
pytestmark = pytest.mark.filterwarnings("default")  # torch and transformers warn of themselves


class Cached(torch.nn.Module):
    """A decoder that takes and returns the tensors of its cache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any, attention_mask: Any, *pasts: Any) -> Any:
        cache = hf.DynamicCache()
        for i in range(LAYERS):
            cache.update(pasts[2 * i], pasts[2 * i + 1], i)
        answer = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=cache,
            use_cache=True,
        )
        layers = answer.past_key_values.layers
        return answer.logits, *(one for layer in layers for one in (layer.keys, layer.values))


def export(model: Any, folder: Path, exporter: str) -> Path:
    path = folder / "model.onnx"
    if exporter == "optimum":
        from optimum.exporters.onnx import onnx_export_from_model

        onnx_export_from_model(model, folder, task="text-generation-with-past", do_validation=False)
        return path
    pasts = [f"past_key_values.{i}.{kind}" for i in range(LAYERS) for kind in ("key", "value")]
    groups = getattr(model.config, "num_key_value_heads", None) or HEADS
    example = (
        torch.zeros(2, 5, dtype=torch.int64),
        torch.ones(2, 8, dtype=torch.int64),
        *(torch.randn(2, groups, 3, SIZE) for _ in pasts),
    )
    presents = [name.replace("past_key_values", "present") for name in pasts]
    names: dict[str, Any] = {
        "input_names": ["input_ids", "attention_mask", *pasts],
        "output_names": ["logits", *presents],
    }
    if exporter == "dynamo":
        dim = torch.export.Dim.DYNAMIC
        sizes = ({0: dim, 1: dim}, {0: dim, 1: dim}, tuple({0: dim, 2: dim} for _ in pasts))
        names |= {"dynamo": True, "dynamic_shapes": sizes, "external_data": False}
    else:
        axes = {name: {0: "batch", 2: "past"} for name in pasts}
        axes |= {name: {0: "batch", 2: "total"} for name in presents}
        axes |= {"input_ids": {0: "batch", 1: "tokens"}, "logits": {0: "batch", 1: "tokens"}}
        names |= {
            "dynamo": False,
            "dynamic_axes": axes | {"attention_mask": {0: "batch", 1: "all"}},
        }
    torch.onnx.export(Cached(model), example, path, **names)
    return path


def tied(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with one table for the embedding and the head, as a warning proposes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(model, loss="causal_lm")
    for warning in caught:
        pair = re.search(r"tie\(model, \{'(.*?)': '(.*?)'\}\)", str(warning.message))
        if pair:
            return tie(model, dict([pair.groups()]))
    return model


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", MODELS)
def test_a_decoder_with_caches_trains_as_in_torch(name: str, exporter: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()  # type: ignore[no-untyped-call]
    with torch.no_grad():  # the exporters remove biases of zeros, and merge equal weights
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    file = onnx.load(export(model, tmp_path, exporter))
    if model.config.tie_word_embeddings:
        file = tied(file)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (3, LENGTH))
    places = np.tile(np.arange(LENGTH), (3, 1))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": places}

    trainer = Trainer(file, loss="causal_lm", optimizer=AdamW(1e-3, weight_decay=0.01))
    feeds = {spec.name: feeds[spec.name] for spec in trainer.inputs}
    history = trainer.fit(feeds, ids, epochs=STEPS, batch_size=3, verbose=0).history

    losses = []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.tensor(ids), labels=torch.tensor(ids)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    np.testing.assert_allclose(history["loss"], losses, atol=1e-5)
    with torch.no_grad():
        expected = model(torch.tensor(ids)).logits.numpy()
    for steps in ([LENGTH], [LENGTH - 2, 1, 1]):
        found = decode(trainer.export(), feeds, steps)
        np.testing.assert_allclose(found, expected, atol=1e-4)

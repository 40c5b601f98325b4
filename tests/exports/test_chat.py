"""The recipe of docs/chat.md exports a decoder that packs and has caches: `make exports`."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf

from onnxfit import TextLoader, Trainer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "chat.md"
pytestmark = pytest.mark.filterwarnings("default")  # torch and transformers warn of themselves


def test_the_recipe_keeps_packed_conversations_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    hf.LlamaForCausalLM(config).save_pretrained("model")
    blocks = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    (recipe,) = [block for block in blocks if "torch.onnx.export" in block]
    namespace: dict[str, object] = {"NAME": "model"}
    exec("import onnxfit\n" + recipe, namespace)
    net, trainer = namespace["net"], namespace["trainer"]
    assert isinstance(trainer, Trainer)
    rng = np.random.default_rng(0)
    texts = [rng.integers(1, 64, size) for size in (5, 6)]
    apart = np.tri(11, dtype=bool)
    apart[5:, :5] = False
    feed = {
        "input_ids": np.concatenate(texts)[None],
        "attention_mask": np.where(apart, 0, np.finfo("f4").min).astype("f4")[None, None],
        "position_ids": np.array([[*range(5), *range(6)]]),
    }
    with torch.no_grad():
        alone = [net(input_ids=torch.tensor(text[None])).logits[0].numpy() for text in texts]
    np.testing.assert_allclose(trainer.predict_on_batch(feed)[0], np.concatenate(alone), atol=1e-6)
    packed = TextLoader([list(rng.integers(1, 64, 7)) for _ in range(60)], 16, pack=True)
    losses = trainer.fit(packed, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    trainer.export("trained.onnx")
    (text,) = Trainer("trained.onnx", loss="causal_lm").generate([[5, 6]], max_new_tokens=3)
    assert len(text) == 5

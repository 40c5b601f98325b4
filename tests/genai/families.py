"""Small language models of transformers, as onnxruntime-genai's builder makes files of them."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from onnxruntime_genai.models import builder
from tokenizers import Tokenizer, models

PRECISIONS = ("fp32", "int4")
VOCABULARY, POSITIONS = 12, 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 10,
    "eos_token_id": 11,
    "pad_token_id": 11,
}
HEADS = {"head_dim": 16}
# Left out are families that the builder 0.18 cannot make of transformers 5, such as Gemma 3.
FAMILIES: dict[str, tuple[type[hf.PretrainedConfig], dict[str, Any]]] = {
    "gemma": (hf.GemmaConfig, HEADS),
    "gemma2": (hf.Gemma2Config, {**HEADS, "query_pre_attn_scalar": 16, "sliding_window": 8}),
    "llama": (hf.LlamaConfig, {}),
    "mistral": (hf.MistralConfig, {**HEADS, "sliding_window": None}),
    "phi": (hf.PhiConfig, {"num_attention_heads": 2, "partial_rotary_factor": 0.5}),
    "phi3": (hf.Phi3Config, {"original_max_position_embeddings": POSITIONS}),
    "qwen2": (hf.Qwen2Config, {}),
    "qwen3": (hf.Qwen3Config, HEADS),
}


def network_of(family: str) -> hf.PreTrainedModel:
    """The network with random weights."""
    kind, settings = FAMILIES[family]
    torch.manual_seed(0)
    config = kind(**{**copy.deepcopy(SIZES), **settings})
    return hf.AutoModelForCausalLM.from_config(config)


def teach_copying(network: hf.PreTrainedModel, steps: int = 300) -> None:
    """Train the network in torch to copy four words behind the word 10."""
    optimizer = torch.optim.Adam(network.parameters(), 0.003)
    for _ in range(steps):
        letters = torch.randint(0, 10, (64, 4))
        ids = torch.cat([letters, torch.full((64, 1), 10), letters], dim=1)
        labels = torch.where(torch.arange(9) > 4, ids, -100)
        optimizer.zero_grad()
        network(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()


def save(network: hf.PreTrainedModel, folder: Path) -> Path:
    """Write the network and a tokenizer, which the builder asks for."""
    network.save_pretrained(folder)
    words = {str(i): i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    special = {"bos_token": "10", "eos_token": "11", "unk_token": "0"}
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def build(network: Path, folder: Path, precision: str) -> Path:
    """Write the folder that onnxruntime-genai runs, from the folder of a network."""
    packing = ["block_size=32", "accuracy_level=0"] if precision == "int4" else []
    where = ("", str(network), str(folder), precision, "cpu", str(folder.with_name("cache")))
    options = builder.parse_extra_options(*where, ["hf_token=false", *packing])
    builder.create_model(*where, **options)
    return folder


@functools.cache
def folder_of(family: str, precision: str, parent: Path) -> Path:
    """A folder for onnxruntime-genai of random weights; made once in `parent`."""
    network = parent / family
    if not network.exists():
        save(network_of(family), network)
    return build(network, parent / f"{family}-{precision}", precision)

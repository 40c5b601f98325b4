"""Caches that a Concat makes longer: files as PyTorch and optimum export them.

The judges are bare onnxruntime on the file itself, and PyTorch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import numpy_helper

from onnxfit import LoRA, Trainer
from onnxfit.load.caches import Cache, caches_of, without_caches
from onnxfit.optimizers import SGD, Adam, AdamW

VOCABULARY, HIDDEN, HEADS, LENGTH = 12, 8, 2, 6
SIZE = HIDDEN // HEADS
Arrays = dict[str, np.ndarray[Any, Any]]

# A layer of attention whose positions and causal mask count the tokens of the cache.
DECODER = """<ir_version: 10, opset_import: ["": 18]> g
    (int64[N, T] input_ids, float[N, 2, P, 4] past_k, float[N, 2, P, 4] past_v)
    => (float[N, T, 12] logits, float[N, 2, S, 4] present_k, float[N, 2, S, 4] present_v)
    <int64 one = {1}, int64 two = {2}, int64[1] axis = {0}, int64[1] last = {1}, int64 zero = {0},
     int64[4] split = {0, 0, 2, 4}, int64[3] joined = {0, 0, 8}, float low = {-1e9},
     float none = {0}>
    {
      shape = Shape(past_k)
      past = Gather(shape, two)
      tokens = Shape<start = 1, end = 2>(input_ids)
      new = Squeeze(tokens, axis)
      total = Add(past, new)
      places = Range(past, total, one)
      e = Gather(table, input_ids)
      p = Gather(positions, places)
      x = Add(e, p)
      qw = MatMul(x, wq) kw = MatMul(x, wk) vw = MatMul(x, wv)
      q4 = Reshape(qw, split) k4 = Reshape(kw, split) v4 = Reshape(vw, split)
      q = Transpose<perm = [0, 2, 1, 3]>(q4)
      k = Transpose<perm = [0, 2, 1, 3]>(k4)
      v = Transpose<perm = [0, 2, 1, 3]>(v4)
      present_k = Concat<axis = -2>(past_k, k)
      same_v = Identity(past_v)
      longer_v = Concat<axis = 2>(same_v, v)
      present_v = Identity(longer_v)
      kt = Transpose<perm = [0, 1, 3, 2]>(present_k)
      scores = MatMul(q, kt)
      row = Unsqueeze(places, last)
      all = Range(zero, total, one)
      is_later = Greater(all, row)
      mask = Where(is_later, low, none)
      masked = Add(scores, mask)
      odds = Softmax<axis = -1>(masked)
      heads = MatMul(odds, longer_v)
      rows = Transpose<perm = [0, 2, 1, 3]>(heads)
      a = Reshape(rows, joined)
      y = Add(x, a)
      logits = MatMul(y, head)
    }"""


def decoder() -> onnx.ModelProto:
    model = onnx.parser.parse_model(DECODER)
    rng = np.random.default_rng(0)
    shapes = {"table": (VOCABULARY, HIDDEN), "positions": (16, HIDDEN), "head": (HIDDEN, 12)}
    shapes |= dict.fromkeys(("wq", "wk", "wv"), (HIDDEN, HIDDEN))
    for name, shape in shapes.items():
        array = rng.normal(size=shape).astype(np.float32) / 2
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def tokens() -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).integers(0, VOCABULARY, (3, LENGTH))


def decode(model: onnx.ModelProto, feeds: Arrays, steps: list[int]) -> np.ndarray[Any, Any]:
    """Logits of all tokens, which bare onnxruntime gets in pieces of these lengths."""
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    ids = feeds["input_ids"]
    pasts = {
        v.name: np.zeros((len(ids), *(d if isinstance(d, int) else 0 for d in v.shape[1:])))
        for v in session.get_inputs()
        if v.name.startswith("past")
    }
    pasts = {name: array.astype(np.float32) for name, array in pasts.items()}
    logits, done = [], 0
    for count in steps:
        fed = {
            name: array[:, 0 if "mask" in name else done : done + count]
            for name, array in feeds.items()
        }
        outputs = [o.name for o in session.get_outputs()]
        results = dict(zip(outputs, session.run(None, fed | pasts)))
        logits.append(results["logits"])
        presents = [n.replace("past_key_values", "past").replace("past", "present") for n in pasts]
        pasts = {name: results[present] for name, present in zip(pasts, presents)}
        done += count
    return np.concatenate(logits, axis=1)


def test_the_view_computes_what_the_file_does_with_empty_caches() -> None:
    file = decoder()
    before = file.SerializeToString()
    assert caches_of(file) == [Cache("past_k", "present_k", 2), Cache("past_v", "present_v", 2)]
    view = without_caches(file)
    assert file.SerializeToString() == before
    assert [v.name for v in view.graph.input] == ["input_ids"]
    assert [v.name for v in view.graph.output] == ["logits"]
    assert list(view.graph.initializer) == list(file.graph.initializer)
    assert without_caches(view) is view
    onnx.checker.check_model(view, full_check=True)
    feeds = {"input_ids": tokens()}
    np.testing.assert_array_equal(decode(view, feeds, [LENGTH]), decode(file, feeds, [LENGTH]))


@pytest.mark.parametrize("adapters", [None, LoRA(rank=2, target="w*")], ids=["all", "adapters"])
def test_what_was_trained_comes_into_the_file_with_caches(
    adapters: LoRA | None, tmp_path: Path
) -> None:
    file = decoder()
    trainer = Trainer(
        file, loss="causal_lm", optimizer=Adam(0.02), adapters=adapters, metrics="perplexity"
    )
    ids = tokens()
    history = trainer.fit(ids, ids, epochs=5, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    np.testing.assert_allclose(history["perplexity"], np.exp(history["loss"]), rtol=1e-5)
    exported, expected = trainer.export(), trainer.predict(ids)
    assert list(exported.graph.node) == list(file.graph.node)
    assert list(exported.graph.input) == list(file.graph.input)
    assert list(exported.graph.output) == list(file.graph.output)
    for steps in ([LENGTH], [LENGTH - 3, 1, 2]):
        found = decode(exported, {"input_ids": ids}, steps)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(decode(file, {"input_ids": ids}, [LENGTH]) - expected).max() > 1e-3
    loaded = Trainer.load(trainer.save(tmp_path / "t.onnxfit"))
    np.testing.assert_array_equal(loaded.predict(ids), expected)


CACHE = "float[N, 2, P, 4] past"
OTHERS = {
    "a cache that is computed with": f"""g ({CACHE}, float[N, 2, T, 4] x)
        => (float[N, 2, S, 4] present, float[N, 2, S, 4] y, float[N, 2, P, 4] z)
        {{ present = Concat<axis = 2>(past, x) y = Relu(present) z = Relu(past) }}""",
    "a next cache that is no output": f"""g ({CACHE}, float[N, 2, T, 4] x)
        => (float[N, 2, S, 4] y)
        {{ present = Concat<axis = 2>(past, x) y = Relu(present) }}""",
    "an output that nothing reads": f"""g ({CACHE}, float[N, 2, T, 4] x)
        => (float[N, 2, S, 4] present, float[N, 2, T, 4] y)
        {{ present = Concat<axis = 2>(past, x) y = Relu(x) }}""",
    "an input that is an output": f"""g ({CACHE}, float[N, 2, T, 4] x)
        => (float[N, 2, S, 4] present, float[N, 2, S, 4] y, float[N, 2, P, 4] past)
        {{ present = Concat<axis = 2>(past, x) y = Relu(present) }}""",
    "a fixed length": """g (float[N, 2, 3, 4] past, float[N, 2, T, 4] x)
        => (float[N, 2, S, 4] present, float[N, 2, S, 4] y)
        { present = Concat<axis = 2>(past, x) y = Relu(present) }""",
    "a matrix": """g (float[P, 4] past, float[T, 4] x) => (float[S, 4] present, float[S, 4] y)
        { present = Concat<axis = 0>(past, x) y = Relu(present) }""",
    "two axes": f"""g ({CACHE}, float[N, 2, T, 4] x, float[N, U, P, 4] u)
        => (float[N, 2, S, 4] present, float[N, 2, S, 4] y, float[N, V, P, 4] wide)
        {{ present = Concat<axis = 2>(past, x) y = Relu(present)
           wide = Concat<axis = 1>(past, u) }}""",
    "a size that no other input has": """g (float[B, 2, P, 4] past, float[N, 2, T, 4] x)
        => (float[B, 2, S, 4] present, float[N, 2, S, 4] y, int64[4] shape)
        { present = Concat<axis = 2>(past, x) y = Relu(present) shape = Shape(past) }""",
    "a body that reads it": f"""g ({CACHE}, float[N, 2, T, 4] x, bool c)
        => (float[N, 2, S, 4] present, float[N, 2, S, 4] y, float[N, 2, P, 4] z)
        {{ present = Concat<axis = 2>(past, x) y = Relu(present)
           z = If (c) <then_branch = t () => (float[N, 2, P, 4] a) {{ a = Relu(past) }},
                       else_branch = e () => (float[N, 2, P, 4] b) {{ b = Neg(past) }}> }}""",
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_plainly_a_cache_stays(name: str) -> None:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> {OTHERS[name]}')
    assert not caches_of(model)
    assert without_caches(model) is model


def test_all_sizes_of_an_empty_cache_are_known() -> None:
    """Those that other inputs have, too, are read there; a part of them may be none at all."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 18]> g
        (float[N, H, P, 4] past, float[N, H, T, 4] x, float[N, H, U, 4] u)
        => (float[N, H, S, 4] present, float[N, H, S, 4] y, int64[4] all, int64[0] few)
        { present = Concat<axis = 2>(past, x, u) y = Relu(present) all = Shape(past)
          few = Shape<start = 4>(past) }""")
    view = without_caches(model)
    x, u = np.ones((3, 5, 2, 4), np.float32), np.zeros((3, 5, 1, 4), np.float32)
    session = onnxruntime.InferenceSession(
        view.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    y, sizes, few = session.run(["y", "all", "few"], {"x": x, "u": u})
    np.testing.assert_array_equal(y, np.concatenate([x, u], axis=2))
    assert sizes.tolist() == [3, 5, 0, 4]
    assert few.shape == (0,)


def torch_decoder() -> Any:
    torch = pytest.importorskip("torch")

    class Decoder(torch.nn.Module):  # type: ignore[misc, name-defined]
        """A decoder of two layers, whose mask has a row for past and new tokens."""

        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(VOCABULARY, HIDDEN)
            self.positions = torch.nn.Embedding(16, HIDDEN)
            linear = torch.nn.Linear
            self.qkv = torch.nn.ModuleList(linear(HIDDEN, 3 * HIDDEN) for _ in range(2))
            self.out = torch.nn.ModuleList(linear(HIDDEN, HIDDEN) for _ in range(2))
            self.head = linear(HIDDEN, VOCABULARY)

        def forward(self, ids: Any, attention_mask: Any, *pasts: Any) -> Any:
            past, new = pasts[0].shape[2], ids.shape[1]
            places = torch.arange(past, past + new)
            x = self.table(ids) + self.positions(places)
            is_seen = torch.arange(past + new)[None] <= places[:, None]
            is_seen = is_seen[None, None] & attention_mask[:, None, None].bool()
            presents = []
            for i in range(2):
                parts = self.qkv[i](x).view(ids.shape[0], new, 3, HEADS, SIZE)
                q, k, v = parts.permute(2, 0, 3, 1, 4)
                k = torch.cat([pasts[2 * i], k], dim=-2)
                v = torch.cat([pasts[2 * i + 1], v], dim=-2)
                scores = q @ k.transpose(-1, -2) / SIZE**0.5
                odds = scores.masked_fill(~is_seen, -1e9).softmax(-1)
                heads = (odds @ v).transpose(1, 2).reshape(ids.shape[0], new, HIDDEN)
                x = x + self.out[i](torch.relu(heads))
                presents += [k, v]
            return self.head(x), *presents

    torch.manual_seed(0)
    return Decoder()


def export(decoder: Any, path: Path) -> None:
    torch = pytest.importorskip("torch")
    past = tuple(torch.randn(2, HEADS, 3, SIZE) for _ in range(4))
    ids = torch.zeros(2, 4, dtype=torch.int64)
    mask = torch.ones(2, 7, dtype=torch.int64)
    pasts = [f"past.{i}.{kind}" for i in range(2) for kind in ("key", "value")]
    presents = [name.replace("past", "present") for name in pasts]
    axes = {name: {0: "batch", 2: "past"} for name in pasts}
    axes |= {name: {0: "batch", 2: "total"} for name in presents}
    axes |= {"input_ids": {0: "batch", 1: "tokens"}, "logits": {0: "batch", 1: "tokens"}}
    torch.onnx.export(
        decoder,
        (ids, mask, *past),
        path,
        dynamo=False,
        input_names=["input_ids", "attention_mask", *pasts],
        output_names=["logits", *presents],
        dynamic_axes=axes | {"attention_mask": {0: "batch", 1: "total"}},
    )


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
def test_a_file_of_torch_trains_as_in_torch(tmp_path: Path) -> None:
    """20 steps of SGD and of AdamW; the files give torch's logits, also token by token."""
    torch = pytest.importorskip("torch")
    path = tmp_path / "model.onnx"
    export(torch_decoder(), path)
    ids = tokens()
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    labels = torch.tensor(ids[:, 1:])
    empty = [torch.zeros(3, HEADS, 0, SIZE) for _ in range(4)]
    for optimizer in (SGD(0.1), AdamW(0.01, weight_decay=0.1)):
        module = torch_decoder()
        if isinstance(optimizer, SGD):
            other = torch.optim.SGD(module.parameters(), 0.1)
        else:
            other = torch.optim.AdamW(module.parameters(), 0.01, weight_decay=0.1)
        losses = []
        for _ in range(20):
            other.zero_grad()
            logits = module(torch.tensor(ids), torch.ones(3, LENGTH), *empty)[0]
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].mT, labels)
            loss.backward()
            other.step()
            losses.append(loss.item())
        trainer = Trainer(path, loss="causal_lm", optimizer=optimizer)
        history = trainer.fit(feeds, ids, epochs=20, batch_size=3, verbose=0).history
        np.testing.assert_allclose(history["loss"], losses, rtol=1e-5)
        with torch.no_grad():
            expected = module(torch.tensor(ids), torch.ones(3, LENGTH), *empty)[0].numpy()
        for steps in ([LENGTH], [LENGTH - 2, 1, 1]):
            found = decode(trainer.export(), feeds, steps)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)

"""Files of options for `onnxfit fit --config`. The command line names the paths to write."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any, ClassVar

from scripts.fuzz.attempt import Attempt, Stage
from scripts.fuzz.byte_mutations import mutated_bytes
from scripts.fuzz.checkpoint_mutations import mutated_json
from scripts.fuzz.commands import call, model_and_data

OPTIONS: dict[str, Any] = {
    "loss": "cross_entropy",
    "optimizer": "adam:eps=1e-6",
    "learning-rate": "cosine:learning_rate=0.1,decay_steps=10",
    "batch_size": 5,
    "metrics": ["accuracy", "auc"],
    "penalty": {"fc*": 0.1},
    "weights": ["*"],
    "validation-split": 0.25,
    "seed": 3,
    "accumulate": 2,
    "clip-norm": 1.5,
    "backend": "full",
    "early-stopping": 3,
    "overwrite": True,
}
_LEVELS = range(1, 40)
TEXTS = (
    # lists of lists, and keys merged from keys, which double with every line
    "metrics:\n- &a0 [x, x]\n" + "".join(f"- &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in _LEVELS),
    "metrics:\n- &a0 {a: 1}\n" + "".join(f"- &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in _LEVELS),
    "metrics: &a [*a, accuracy]", "penalty: &a {x: *a}", "loss: &l cross_entropy\nmetrics: [*l]", "loss: *nothing",
    "loss: !!python/object/apply:os.mkdir [exploded]", "!!python/object/new:os.mkdir [exploded]", "loss: !!python/name:os.system",
    "!!python/module:os", "loss: !!binary aGk=", "metrics: !!set {accuracy}", "metrics: !!omap [a: b]", "!own {loss: mse}",
    "%YAML 9.9\n---\nloss: mse", "%TAG ! tag:yaml.org,2002:python/\n---\nloss: !object/apply:os.mkdir [exploded]", "--- {}\n--- {}",
    "batch_size: 0x" + "f" * 20_000, "batch_size: 0b" + "1" * 20_000, "batch_size: " + "9" * 5000, "batch_size: 9:" + "59:" * 3000 + "9",
    "seed: 1e400", "seed: .nan", "seed: -.inf", "batch_size: 2001-99-99", "seed: 2001-01-01", "{[a]: b}", "? [a]\n: b", "? {a: b}\n: c",
    "{null: 1}", "{1: 2}", "loss: mse\nloss: huber", "batch_size: 5\nbatch-size: 6", "[" * 5000, "{a: " * 5000, "- " * 5000, "\t", "\0",
    "loss: \ud800", "loss: |\n  mse\n\n\n", "loss: >\n", "config: x.yaml", "help: true", "model: other.onnx", "data: 3", "'", "a: b: c",
    "weights: ['" + "*a" * 60 + "']", "weights: ['[']", "penalty: {'" + "a*" * 60 + "b': 0.1}", "metrics: {accuracy: [accuracy, [1]]}",
)  # fmt: skip


class Configs(Attempt):
    share: ClassVar[int] = 6
    own: ClassVar[tuple[str, ...]] = ("own", "own/*")

    def make(self, rng: random.Random, originals: Mapping[str, bytes]) -> None:
        self.original = rng.choice(("yaml", "yaml", "json"))
        self.main = f"damaged.{self.original}"
        self.files = {**model_and_data(), self.main: _damaged_options(rng)}

    def run(self, rng: random.Random, stage: Stage) -> str:
        stage("fit")
        paths = ("-o", "own/out.onnx", "--csv", "own/log.csv", "--tensorboard", "own/board")
        checkpoint = ("--checkpoint", "own/c.onnxfit")
        options = ("--epochs", "1", "--config", self.main, "-q")
        return call("fit", "m.onnx", "-d", "d.npz", *paths, *checkpoint, *options)


def _damaged_options(rng: random.Random) -> bytes:
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice(TEXTS).encode(errors="surrogatepass")
    options: Any = OPTIONS
    if kind == 1:
        return mutated_bytes(json.dumps(options, indent=1).encode(), rng)
    for _ in range(rng.choice((1, 1, 2, 4))):
        options = mutated_json(options, rng)
    try:
        return json.dumps(options).encode()
    except RecursionError:
        return b"[" * 100_000

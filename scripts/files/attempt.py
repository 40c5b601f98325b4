"""Train one file, and print as JSON what happened: `python -m scripts.files.attempt ROW MODEL GB`."""

from __future__ import annotations

import json
import math
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import onnxfit
from onnxfit import OnnxfitError, Quantization, Trainer
from onnxfit.load.batch_axis import layout_of
from onnxfit.optimizers import Adam
from scripts.files import laws
from scripts.files.catalogue import PublicFile
from scripts.files.data import Arrays, inputs_of, labels_of, loss_of, scores_of

TRAINS, FIXED, REFUSED, WRONG, STOPPED = "trains", "trains after the fix", "refused", "WRONG", "stopped"  # fmt: skip
STEPS, FALL = 100, 10.0  # of Adam at most, until the loss is a tenth
TRAINING_SECONDS = 40.0  # for these steps
RATES = (1e-3, 1e-4, 1e-5)  # the next one is tried where the loss does not fall
BETA = 0.9  # Adam's first, so that its slot m is 0.1 of the first gradient
Result = dict[str, Any]


def attempt(row: PublicFile, model: onnx.ModelProto) -> Result:
    """Return the outcome and the figures of a file."""
    try:
        laws.run(model, inputs_of(model, row))
    except Exception as error:
        return {"outcome": STOPPED, "message": f"onnxruntime does not run the file: {error}"}
    try:
        return trained(row, model, {}, TRAINS)
    except OnnxfitError as error:
        message = str(error)
    missing = [name for name in row.fix if name not in message]
    if not row.fix or missing:
        return {"outcome": REFUSED, "message": message}
    try:
        return {**trained(row, model, row.fix, FIXED), "message": message}
    except OnnxfitError as error:
        return {"outcome": REFUSED, "message": f"{message} With this fix: {error}"}


def trained(
    row: PublicFile, model: onnx.ModelProto, fix: Mapping[str, Any], outcome: str
) -> Result:
    """Train with the arguments `fix`, and return the figures; the outcome is WRONG for broken laws."""
    attempted = Attempt(row, model, fix)
    figures = {**attempted.judge(), **attempted.train()}
    broken = attempted.broken
    return {"outcome": WRONG if broken else outcome, "fix": dict(fix), "broken": broken, **figures}


@dataclass
class Attempt:
    """A file with data, its trainers, and the laws that it broke: law -> sentences."""

    row: PublicFile
    model: onnx.ModelProto
    fix: Mapping[str, Any]
    broken: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.x = inputs_of(self.model, self.row)
        outputs = laws.run(self.model, self.x)
        ranks = {name: y.ndim for name, y in outputs.items()}
        self.scores = scores_of(self.model, self.row, ranks)
        self.outputs = laws.run(self.with_scores(self.model), self.x)
        self.labels = labels_of(self.outputs, self.row)
        layouts = layout_of(self.model, self.fix.get("batch_axes")).outputs
        # A Trainer takes labels with the rows first, also where an output has them elsewhere.
        self.fed_labels = {name: layouts[name].in_view(y) for name, y in self.labels.items()}
        fixed = self.fix.get("fixed_inputs", {})
        self.fed_inputs = {name: array for name, array in self.x.items() if name not in fixed}

    def with_scores(self, model: onnx.ModelProto) -> onnx.ModelProto:
        return laws.with_outputs(model, self.scores.values())

    def require(self, law: str, lines: list[str]) -> None:
        if lines:
            self.broken.setdefault(law, []).extend(lines[:3])

    def trainer(self, learning_rate: float = RATES[0], **settings: Any) -> Trainer:
        fix = dict(self.fix)
        if "quantization" in fix:
            fix["quantization"] = Quantization(**fix["quantization"])
        return Trainer(
            self.model,
            loss=self.row.losses,
            optimizer=Adam(learning_rate, betas=(BETA, 0.999)),
            threads=1,
            **{**settings, **fix},
        )

    def loss(self, outputs: Arrays) -> float:
        return loss_of(outputs, self.labels, self.row, self.scores)

    def judge(self) -> Result:
        """Compare predictions, loss and gradients before training, and what `inspect` promised."""
        trainer = self.trainer(batch_norm="frozen")
        given = trainer.export()
        deployed = laws.run(self.model, self.x, optimized=True)
        self.require("predict", laws.differing_outputs(self.predicted(trainer), deployed))
        runtime = laws.differing_outputs(deployed, self.outputs)  # no fault of onnxfit
        first = float(trainer.train_on_batch(self.fed_inputs, self.fed_labels)["loss"])
        wanted = self.loss(self.outputs)
        if not math.isclose(first, wanted, rel_tol=1e-3, abs_tol=1e-6):
            self.require("loss", [f"{first:.6g} in onnxfit, {wanted:.6g} in NumPy"])
        slots = trainer.get_state()["slots"]
        gradients = {name: slots[f"{name}/m"] / (1 - BETA) for name in trainer.get_weights() if f"{name}/m" in slots}  # fmt: skip
        if not self.fix and not onnxfit.inspect(self.model).trains:
            self.require("inspect", ["inspect says that the file does not train"])
        if laws.ROUNDING & laws.operators_of(self.model):
            return {"weights": len(gradients), "gradient": "not compared", "runtime": runtime}
        found = laws.compare_gradients(self.with_scores(given), self.x, gradients, self.loss)
        for name, (ours, theirs) in found.wrong.items():
            self.require("gradient", [f"{name}: {ours:.4g}, central difference {theirs:.4g}"])
        text = f"{found.right} of {found.right + len(found.wrong)} in {found.precision}"
        rest = {"too small": found.small, "no tensor of the file": found.hidden}
        text += "".join(f", {count} {what}" for what, count in rest.items() if count)
        return {"weights": len(gradients), "gradient": text, "runtime": runtime}

    def predicted(self, trainer: Trainer) -> Arrays:
        found = trainer.predict_on_batch(self.fed_inputs)
        return found if isinstance(found, Mapping) else {self.model.graph.output[0].name: found}

    def train(self) -> Result:
        """Fit one batch until the loss is a tenth, and compare the export with the file."""
        for rate in RATES:
            trainer = self.trainer(rate)
            losses = self.losses(trainer)
            if min(losses) < losses[0]:
                break
        if not all(map(math.isfinite, losses)):
            self.require("learning", ["the loss is not finite"])
        elif min(losses) >= losses[0]:
            self.require("learning", [f"the loss never falls below {losses[0]:.4g}"])
        path = Path("trained.onnx")
        trainer.export(path)
        exported = onnx.load(path)
        wanted = laws.run(exported, self.x, optimized=True)
        self.require("export", laws.differing_outputs(self.predicted(trainer), wanted))
        self.require("nodes", laws.differing_nodes(exported, self.model))
        changed = laws.differing_constants(exported, self.model, list(trainer.get_weights()))
        self.require("constants", [f"{name} changed" for name in changed])
        figures = {"steps": len(losses), "rate": rate}
        return {**figures, "loss": losses[0], "lowest": float(np.nanmin(losses))}

    def losses(self, trainer: Trainer) -> list[float]:
        """Return the losses of training steps on the batch."""
        losses: list[float] = []
        end = time.monotonic() + TRAINING_SECONDS
        while len(losses) < STEPS and (len(losses) < 2 or time.monotonic() < end):
            losses.append(float(trainer.train_on_batch(self.fed_inputs, self.fed_labels)["loss"]))
            if losses[-1] <= losses[0] / FALL:
                break
        return losses


def quietly(action: Callable[[], Result]) -> Result:
    """Return the result of `action`; an error that is not onnxfit's breaks a law, too."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = action()
        except MemoryError:
            result = {"outcome": STOPPED, "message": "out of memory"}
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            line = f"{type(error).__name__} at {where}: {str(error)[:300]}"
            result = {"outcome": WRONG, "broken": {"errors": [line]}}
            traceback.print_exc()
    texts = dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, UserWarning))
    return {**result, "warnings": list(texts)}


def main(arguments: list[str]) -> None:
    job, path, gigabytes = arguments
    import resource  # Windows has none

    size = int(float(gigabytes) * (1 << 30))
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    row = PublicFile.from_json(Path(job).read_text(encoding="utf-8"))
    model = onnx.load(path)
    print(json.dumps(quietly(lambda: attempt(row, model))))


if __name__ == "__main__":
    main(sys.argv[1:])

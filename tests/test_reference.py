"""docs/reference.md has every class of the registries, with its names, settings and formula."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from onnxfit import (
    Bucket,
    DataLoader,
    Distillation,
    ImageFolder,
    LoRA,
    MaskedTokens,
    Mixup,
    Pad,
    ParquetLoader,
    Prefetch,
    Quantization,
    TextLoader,
    Trainer,
    callbacks,
    dequantize,
    losses,
    metrics,
    optimizers,
    penalties,
    quantization_report,
    quantize,
    schedules,
)
from onnxfit.registry import registry

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference.md"
REGISTRIES = {
    losses: losses.Loss,
    metrics: metrics.Metric,
    optimizers: optimizers.Optimizer,
    penalties: penalties.Penalty,
    schedules: schedules.Schedule,
    callbacks: callbacks.Callback,
}
ENTRIES = {
    f"{module.__name__.removeprefix('onnxfit.')}.{kind.__name__}": kind
    for module, base in REGISTRIES.items()
    for kind in registry(module.__name__, base).values()
    if kind is not base
}
REGISTERED = frozenset(ENTRIES)
LOADERS = (
    Bucket,
    DataLoader,
    ImageFolder,
    MaskedTokens,
    Mixup,
    Pad,
    ParquetLoader,
    Prefetch,
    TextLoader,
)
ENTRIES |= {kind.__name__: kind for kind in LOADERS}
SETTINGS_AND_FUNCTIONS = (
    Distillation,
    Quantization,
    LoRA,
    quantize,
    dequantize,
    quantization_report,
)
ENTRIES |= {member.__name__: member for member in SETTINGS_AND_FUNCTIONS}


@pytest.fixture(scope="module")
def entries() -> dict[str, str]:
    _, *found = re.split(r"^### (.*)\n", PAGE.read_text(encoding="utf-8"), flags=re.M)
    return dict(zip(found[::2], (text.partition("\n## ")[0] for text in found[1::2])))


def test_what_is_generated_from_the_registries_is_current() -> None:
    script = str(ROOT / "scripts" / "document_registries.py")
    result = subprocess.run(
        [sys.executable, script, "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_the_page_has_every_class(entries: dict[str, str]) -> None:
    bases = {name for name in entries if name not in ENTRIES}
    assert set(ENTRIES) <= set(entries)
    assert bases <= {f"{m.__name__[8:]}.{b.__name__}" for m, b in REGISTRIES.items()} | {
        "losses.ArcFace",
        "losses.ClassLoss",
        "losses.CosFace",
        "losses.Function",
        "losses.Circle",
        "losses.Contrastive",
        "losses.CosineEmbedding",
        "losses.DPO",
        "losses.InfoNCE",
        "losses.MarginRanking",
        "losses.NTXent",
        "losses.ORPO",
        "losses.SigLIP",
        "losses.SupCon",
        "losses.TripletSemiHard",
        "losses.Joint",
        "losses.MixtureNLL",
        "losses.SignLoss",
        "losses.TripletMargin",
        "metrics.DecisionMetric",
        "metrics.EpochMetric",
        "metrics.ExternalMetric",
        "metrics.WordErrorRate",
        "optimizers.Constraint",
        *(f"optimizers.{name}" for name in ("MaxNorm", "MinMaxNorm", "NonNeg", "UnitNorm")),
        "optimizers.Groups",
        "optimizers.Lookahead",
    }


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_an_entry_names_every_setting(name: str, entries: dict[str, str]) -> None:
    for setting in inspect.signature(ENTRIES[name]).parameters:
        assert re.search(rf"[`(, *]{setting}[`=,)]", entries[name]), setting


@pytest.mark.parametrize("name", sorted(REGISTERED))
def test_an_entry_has_a_formula(name: str, entries: dict[str, str]) -> None:
    assert name.startswith("callbacks.") or re.search(r"\$`.+?`\$|```math", entries[name])


def test_typed_names_stand_for_the_classes_beside_them() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r'^\| \[`(\w+)`\]\(#(\w+)\) \| (`"[^|]*) \|$', text, re.M)
    get = {
        "losses": losses.get_loss,
        "metrics": metrics.get_metric,
        "optimizers": optimizers.get_optimizer,
        "penalties": penalties.get_penalty,
    }
    assert len(rows) > 40
    for kind, anchor, names in rows:
        module = anchor.removesuffix(kind.lower())
        for name in re.findall(r'"(\w+)"', names):
            is_constraint = issubclass(getattr(optimizers, kind, object), optimizers.Constraint)
            found = optimizers.get_constraint(name) if is_constraint else get[module](name)
            assert type(found).__name__ == kind


@pytest.mark.parametrize(
    ("name", "run_together"),
    [
        ("gaussian_nll", "gaussiannll"),
        ("kl_divergence", "kldivergence"),
        ("top_k_accuracy", "topkaccuracy"),
    ],
)
def test_a_name_separates_its_words(name: str, run_together: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert f'| `"{name}"`' in text
    assert f'"{run_together}"' not in text


def test_the_page_describes_the_arguments_of_the_trainer_and_of_fit() -> None:
    text = PAGE.read_text(encoding="utf-8")
    section = text.partition("\n## Trainer\n")[2].partition("\n## ")[0]
    head, fit = section.split("\n#### ")[:2]
    for member, described in ((Trainer, head), (Trainer.fit, fit)):
        for setting in set(inspect.signature(member).parameters) - {"self"}:
            assert re.search(rf"^- .*`{setting}`.*: ", described, re.M), setting


def test_a_new_loss_needs_no_other_file(monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts import document_registries

    @dataclass(frozen=True)
    class Wing(losses.Loss):
        r"""Loss $w \log(1 + |d|/e)$.

        - `width` $w > 0$.

        >>> Wing(width=2.0)
        """

        width: float = 5.0

        def __call__(self, op: Any, y_true: Any, y_pred: Any) -> Any:
            return y_pred

    monkeypatch.setattr(losses, "Wing", Wing, raising=False)
    monkeypatch.setattr(losses, "__all__", [*losses.__all__, "Wing"])
    page = document_registries.page()
    assert '| [`Wing`](#losseswing) | `"wing"` |' in page
    assert (
        "`Wing(width=5.0, …)`\n\nLoss $`w \\log(1 + |d|/e)`$.\n\n- `width` $`w > 0`$.\n\n##" in page
    )

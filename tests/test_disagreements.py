"""onnxruntime with and without its graph optimizations, and the page on where the two disagree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

from scripts.disagreements import networks
from scripts.disagreements.known import KNOWN, LEVELS, RIGHT, Known, differs, outcome
from scripts.disagreements.networks import (
    all_cases,
    disagreements_of_case,
    disagreements_of_network,
    far,
    optimizations,
    small_networks,
)
from tests.samples import checksum

PAGE = Path(__file__).resolve().parents[1] / "docs" / "onnxruntime-disagreements.md"
NETWORKS = dict(small_networks())
CASES = dict(all_cases())
SAMPLE = [name for name in CASES if not checksum(name) % 40]
every_known = pytest.mark.parametrize("known", [pytest.param(k, id=k.name) for k in KNOWN])


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_trains_alike_without_optimizations(name: str) -> None:
    assert disagreements_of_network(NETWORKS[name]) == []


@pytest.mark.parametrize("name", SAMPLE)
def test_a_rule_computes_alike_without_optimizations(name: str) -> None:
    assert disagreements_of_case(CASES[name]) == []


def test_every_session_has_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[Any] = []
    session = onnxruntime.InferenceSession

    def watched(model: bytes, options: Any, **settings: Any) -> Any:
        levels.append(options.graph_optimization_level)
        return session(model, options, **settings)

    monkeypatch.setattr(onnxruntime, "InferenceSession", watched)
    for level in LEVELS:
        levels.clear()
        with optimizations(level):
            networks.trained(NETWORKS["linear"])
        assert len(levels) >= 2
        assert set(levels) == {getattr(onnxruntime.GraphOptimizationLevel, level)}


def test_arrays_that_differ_by_more_than_rounding_are_named() -> None:
    right = {"a": np.array([1.0, 1000.0], np.float32), "b": np.array([np.nan, 1.0], np.float32)}
    assert far(right, right, 1e-5) == []
    assert far({**right, "a": right["a"] + np.float32(0.005)}, right, 1e-5) == []
    assert far({**right, "a": right["a"] + np.float32(0.05)}, right, 1e-5) == ["a"]
    assert far({"a": right["a"]}, right, 1e-5) == ["b"]
    assert far({**right, "b": right["a"]}, right, 1e-5) == ["b"]


@every_known
def test_the_right_answer_is_that_of_the_reference(known: Known) -> None:
    """As far as onnx can run the model: its ConvTranspose knows images only."""
    onnx.checker.check_model(known.model, full_check=True)
    try:
        (found,) = ReferenceEvaluator(known.model).run(None, dict(known.inputs))
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"onnx.reference: {error}")
    assert not differs(found, known.answer)


@every_known
def test_the_page_says_what_this_onnxruntime_answers(known: Known) -> None:
    """Otherwise run `make disagreements`."""
    text = PAGE.read_text(encoding="utf-8")
    assert f"\n## {known.name}\n" in text
    assert known.text in text
    versions = re.findall(r"\| ([\d.]+), with optimizations", text)
    if onnxruntime.__version__ not in versions:
        pytest.skip("the page does not have this version of onnxruntime")
    row = text.partition(f"\n| {known.name} | ")[2].partition(" |\n")[0].split(" | ")
    start = 2 * versions.index(onnxruntime.__version__)
    assert row[start : start + 2] == [outcome(known, level)[0] for level in LEVELS]


@every_known
def test_a_known_model_disagrees_in_some_version(known: Known) -> None:
    text = PAGE.read_text(encoding="utf-8")
    row = text.partition(f"\n| {known.name} | ")[2].partition(" |\n")[0].split(" | ")
    assert set(row) > {RIGHT}

"""The sentences of a report: what the figures say in short."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from contenders import DEFAULT, ENTRIES, HALF
from workloads import WORKLOADS

KINDS = {"step": "step", "fit": "fit per batch"}
DEPTHWISE = ("mobilenet", "separable")
Record = Mapping[str, Any]


def network_of(item: Record) -> str:
    return WORKLOADS[item["workload"]].network


def overall(headline: Sequence[Record]) -> str:
    """The worst ratio and the mean, which stand before everything else. Figures may be text."""
    if not headline:
        return ""
    worst = max(headline, key=lambda item: float(item["ratio"]))
    networks: dict[str, list[float]] = {}
    for item in headline:
        networks.setdefault(network_of(item), []).append(math.log(float(item["ratio"])))
    # a network with more batch sizes counts for no more than another one
    mean = math.exp(fmean(fmean(logs) for logs in networks.values()))
    place = f"{worst['workload']}, {worst['optimizer']}: {KINDS[worst['kind']]}"
    over = f"{len(networks)} network{'s' * (len(networks) > 1)}"
    return (
        f"the worst ratio of onnxfit's time to that of the fastest PyTorch is"
        f" {float(worst['ratio']):.2f} ({place}), the geometric mean over {over} is {mean:.2f};"
        " everything is computed in float32"
    )


def half_sentence(headline: Sequence[Record], absent: Mapping[str, str]) -> str:
    """What PyTorch gains where it may multiply in bfloat16; why there is nothing, where not."""
    title = ENTRIES[HALF].title
    ratios = [
        float(item["onnxfit_us"]) / float(item["bf16_us"])
        for item in headline
        if not math.isnan(item["bf16_us"])
    ]
    if ratios:
        mean = math.exp(fmean(map(math.log, ratios)))
        return (
            f"Beside it, {title}: onnxfit's time in float32 is {span(ratios)} of it,"
            f" {mean:.2f} in the geometric mean. That column counts for no ratio."
        )
    return f"{title} is not measured: {absent.get(HALF, 'it was not asked for')}."


def summary(headline: Sequence[Record], once: Sequence[Record]) -> str:
    """The sentence that the README has. Figures may be text, as in the CSV files."""
    groups: dict[str, list[float]] = {}
    for item in headline:
        group = "depthwise" if network_of(item) in DEPTHWISE else "larger"
        if WORKLOADS[item["workload"]].small:
            group = "small"
        groups.setdefault(group, []).append(float(item["ratio"]))
    peaks = {(item["workload"], item["contender"]): float(item["peak_memory"]) for item in once}
    groups["memory"] = [
        peaks[work, DEFAULT] / peaks[work, "torch"]
        for work in WORKLOADS
        if (work, DEFAULT) in peaks and (work, "torch") in peaks
    ]
    places = {
        "small": "on small networks",
        "larger": "on larger ones",
        "depthwise": "on depthwise convolutions",
    }
    times = [f"{span(groups[key])} {place}" for key, place in places.items() if key in groups]
    fastest_torch = "that of the fastest PyTorch (eager or compiled, one thread or all)"
    parts = (
        [f"the time of training, divided by {fastest_torch}, is " + ", ".join(times)]
        if times
        else []
    )
    if groups["memory"]:
        parts.append(f"peak memory is {span(groups['memory'])} of eager PyTorch's")
    return "; ".join(parts)


def span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"

"""The sentences of a report: what the figures say in short."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from contenders import DEFAULT, ENTRIES, HALF, IN_PLACE
from workloads import WORKLOADS

KINDS = {"step": "step", "fit": "fit per batch"}
DEPTHWISE = ("mobilenet", "separable")
PLACES = {
    "small": "on small networks",
    "larger": "on larger ones",
    "depthwise": "on depthwise convolutions",
}
Record = Mapping[str, Any]


def network_of(item: Record) -> str:
    return WORKLOADS[item["workload"]].network


def overall(headline: Sequence[Record]) -> str:
    """The worst ratio and the mean, which stand before everything else. Figures may be text."""
    if not headline:
        return ""
    worst, mean = _worst_and_mean(headline, "ratio")
    networks = len({network_of(item) for item in headline})
    over = f"{networks} network{'s' * (networks > 1)}"
    text = (
        f"the worst ratio of onnxfit's time to that of the fastest PyTorch is {worst},"
        f" the geometric mean over {over} is {mean:.2f}"
    )
    plain = without_operators(headline)
    if plain:
        worst, mean = _worst_and_mean(plain, "plain_ratio")
        text += f"; without the C++ operators, the worst is {worst}, the mean is {mean:.2f}"
    return f"{text}; everything is computed in float32"


def _worst_and_mean(headline: Sequence[Record], key: str) -> tuple[str, float]:
    worst = max(headline, key=lambda item: float(item[key]))
    networks: dict[str, list[float]] = {}
    for item in headline:
        networks.setdefault(network_of(item), []).append(math.log(float(item[key])))
    # a network with more batch sizes counts for no more than another one
    mean = math.exp(fmean(fmean(logs) for logs in networks.values()))
    place = f"{worst['workload']}, {worst['optimizer']}: {KINDS[worst['kind']]}"
    return f"{float(worst[key]):.2f} ({place})", mean


def without_operators(headline: Sequence[Record]) -> list[Record]:
    """Those that were measured without the C++ operators, too."""
    return [item for item in headline if not math.isnan(float(item.get("plain_ratio", math.nan)))]


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
            f"{title}, counts for no ratio: onnxfit's time in float32 is {span(ratios)} of it,"
            f" {mean:.2f} in the geometric mean."
        )
    return f"{title} is not measured: {absent.get(HALF, 'it was not asked for')}."


def short(headline: Sequence[Record]) -> str:
    """The sentence that the README has. Figures may be text, as in the CSV files."""
    if not headline:
        return "training was not measured"
    _, mean = _worst_and_mean(headline, "ratio")
    networks = len({network_of(item) for item in headline})
    return (
        f"on average over {networks} network{'s' * (networks > 1)}, training takes {mean:.2f} of the"
        " time of the fastest PyTorch (eager or compiled)"
    )


def summary(headline: Sequence[Record], once: Sequence[Record]) -> str:
    """The sentence above the tables. Figures may be text, as in the CSV files."""
    parts = []
    times = _ranges(headline, "ratio")
    plain = _ranges(without_operators(headline), "plain_ratio")
    if times:
        parts.append(
            "the time of training, divided by that of the fastest PyTorch (eager or compiled, one"
            f" thread or all), is {times}"
        )
    if plain:
        parts.append(f"without its C++ operators, it is {plain}")
    peaks = {(item["workload"], item["contender"]): float(item["peak_memory"]) for item in once}

    def memory(contender: str) -> list[float]:
        both = [w for w in WORKLOADS if (w, contender) in peaks and (w, "torch") in peaks]
        return [peaks[work, contender] / peaks[work, "torch"] for work in both]

    if memory(DEFAULT):
        parts.append(f"peak memory is {span(memory(DEFAULT))} of eager PyTorch's")
        if memory(IN_PLACE):
            parts.append(f'with `backend="in_place"`, it is {span(memory(IN_PLACE))}')
    return "; ".join(parts)


def _ranges(headline: Sequence[Record], key: str) -> str:
    """The range of a ratio on each kind of network."""
    ratios: dict[str, list[float]] = {place: [] for place in PLACES.values()}
    for item in headline:
        kind = "depthwise" if network_of(item) in DEPTHWISE else "larger"
        if WORKLOADS[item["workload"]].small:
            kind = "small"
        ratios[PLACES[kind]].append(float(item[key]))
    return ", ".join(f"{span(found)} {place}" for place, found in ratios.items() if found)


def span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"

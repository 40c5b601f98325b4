/** Metrics that a host computes from labels and predictions; the formulas are onnxfit.metrics'. */

import type { MetricEntry } from "./manifest.js";
import { sizeOf, type TypedTensor } from "./tensors.js";

/** Value of each counted element: the metric is their mean. */
type Values = (labels: TypedTensor, outputs: TypedTensor, settings: Settings) => Iterable<number>;
type Settings = Record<string, any>;

interface Formula {
  values: Values;
  mode: "min" | "max";
  finish?: (mean: number) => number;
}

const difference = (combine: (d: number) => number): Values =>
  function* ({ data: labels }, { data: outputs }) {
    for (let i = 0; i < outputs.length; i += 1) {
      yield combine(Number(labels[i]) - Number(outputs[i]));
    }
  };

const squared = difference((d) => d * d);

const FORMULAS: Record<string, Formula> = {
  Accuracy: {
    mode: "max",
    values: (labels, outputs, settings) =>
      isBinary(labels, outputs) ? sides(labels, outputs, settings) : classes(labels, outputs),
  },
  BinaryAccuracy: { mode: "max", values: sides },
  CategoricalAccuracy: { mode: "max", values: classes },
  SparseCategoricalAccuracy: { mode: "max", values: classes },
  MeanSquaredError: { mode: "min", values: squared },
  RootMeanSquaredError: { mode: "min", values: squared, finish: Math.sqrt },
  MeanAbsoluteError: { mode: "min", values: difference(Math.abs) },
};

/** Names of the metrics' classes that are computed. */
export const METRICS = Object.keys(FORMULAS);

export class Metric {
  readonly mode: "min" | "max";
  private readonly formula: Formula;
  private total = 0;
  private count = 0;

  constructor(readonly entry: MetricEntry) {
    this.formula = FORMULAS[entry.metric]!;
    this.mode = this.formula.mode;
  }

  /** Whether this version computes the metric. Sample weights play no role in those it computes. */
  static isKnown(entry: MetricEntry): boolean {
    return Object.hasOwn(FORMULAS, entry.metric) && !entry.settings?.["weighted"];
  }

  reset(): void {
    this.total = this.count = 0;
  }

  update(labels: TypedTensor, outputs: TypedTensor): void {
    for (const value of this.formula.values(labels, outputs, this.entry.settings ?? {})) {
      this.total += value;
      this.count += 1;
    }
  }

  /** The metric over all batches since `reset`; NaN without any. */
  get result(): number {
    const mean = this.count > 0 ? this.total / this.count : NaN;
    return this.formula.finish?.(mean) ?? mean;
  }
}

/** Return "max" if more of a figure is better, as far as its name tells. */
export function modeByName(name: string): "min" | "max" {
  const words = /acc|auc|f1|precision|recall|r2|score|similarity/;
  return words.test(name) ? "max" : "min";
}

/** Whether there is one output per row. */
function isBinary(labels: TypedTensor, outputs: TypedTensor): boolean {
  const rows = outputs.dims[0]!;
  return outputs.data.length === rows && labels.data.length === rows;
}

function* sides(labels: TypedTensor, outputs: TypedTensor, settings: Settings): Iterable<number> {
  const { threshold = 0.5, from_logits: fromLogits = false } = settings;
  const cut = fromLogits ? Math.log(threshold / (1 - threshold)) : threshold;
  for (let i = 0; i < outputs.data.length; i += 1) {
    yield Number(Number(outputs.data[i]) > cut === Number(labels.data[i]) > 0.5);
  }
}

/** 1 where the class of the highest output is that of the label; the first of equal ones counts. */
function* classes(labels: TypedTensor, outputs: TypedTensor): Iterable<number> {
  const isOneHot = labels.data.length === outputs.data.length;
  const axis = classAxis(labels, outputs, isOneHot);
  const count = outputs.dims[axis]!;
  const inner = sizeOf(outputs.dims.slice(axis + 1));
  const highest = (data: TypedTensor["data"], start: number) => {
    let best = 0;
    for (let c = 0; c < count; c += 1) {
      const value = Number(data[start + c * inner]);
      if (Number.isNaN(value)) return -1;
      if (value > Number(data[start + best * inner])) best = c;
    }
    return best;
  };
  for (let i = 0; i < outputs.data.length / count; i += 1) {
    const start = Math.floor(i / inner) * count * inner + (i % inner);
    const label = isOneHot ? highest(labels.data, start) : Number(labels.data[i]);
    if (label >= 0 && label < count) yield Number(highest(outputs.data, start) === label);
  }
}

/** The axis of classes is the one that labels lack; where both fit, 1 from rank 4, else last. */
function classAxis(labels: TypedTensor, outputs: TypedTensor, isOneHot: boolean): number {
  const last = outputs.dims.length - 1;
  const preferred = last >= 3 ? 1 : last;
  const fits = (axis: number) =>
    isOneHot ||
    outputs.dims.filter((_, i) => i !== axis).every((size, i) => size === labels.dims[i]);
  return [preferred, 1, last].find(fits) ?? preferred;
}

/** Running figures of losses and metrics over batches, in float64, as the manifest defines them. */

import { type Feeds } from "./data.js";
import type { GraphTensor, LossEntry, Manifest } from "./manifest.js";
import { Metric } from "./metrics.js";

/** The loss, and the other figures by their names in logs. */
export type Figures = { loss: number } & Record<string, number>;

class Mean {
  private total = 0;
  private weight = 0;

  constructor(private readonly isSum = false) {}

  add(value: number, weight: number): void {
    if (weight === 0) return; // the loss of no rows may be NaN
    this.total += this.isSum ? value : value * weight;
    this.weight += weight;
  }

  get hasCounted(): boolean {
    return this.weight !== 0;
  }

  get value(): number {
    if (this.weight === 0) return NaN;
    return this.isSum ? this.total : this.total / this.weight;
  }
}

export class Tracker {
  readonly metrics: Metric[];
  /** Outputs of a step or an evaluation that the figures are made of. */
  readonly outputs: readonly string[];
  private readonly losses: readonly LossEntry[];
  private readonly penalty: string | null;
  private readonly labels: Map<string | null, string>;
  private means: Mean[] = [];
  private penalties = new Mean();

  constructor(
    manifest: Manifest,
    inputs: readonly GraphTensor[],
    private readonly total: string,
  ) {
    this.losses = manifest.losses;
    this.penalty = manifest.penalty;
    this.metrics = manifest.metrics.filter(Metric.isKnown).map((entry) => new Metric(entry));
    const labels = inputs.filter((input) => input.role === "y");
    this.labels = new Map(labels.map((input) => [input.of ?? null, input.name]));
    const names = this.losses.flatMap(({ value, count }) =>
      count === null ? [value] : [value, count],
    );
    if (this.penalty !== null) names.push(this.penalty);
    this.outputs = [
      ...new Set([total, ...names, ...this.metrics.map((metric) => metric.entry.output)]),
    ];
    this.reset();
  }

  reset(): void {
    this.means = this.losses.map((loss) => new Mean(loss.reduction === "sum"));
    this.penalties = new Mean();
    for (const metric of this.metrics) metric.reset();
  }

  /** Add the results of a batch, and return its loss. */
  update(results: Feeds, feeds: Feeds, rows: number): number {
    const scalar = (name: string) => Number(results[name]!.data[0]);
    const penalty = this.penalty === null ? 0 : scalar(this.penalty);
    if (this.penalty !== null) this.penalties.add(penalty, rows);
    this.losses.forEach(({ value, count }, i) => {
      const own = this.losses.length === 1 ? scalar(value) - penalty : scalar(value);
      this.means[i]!.add(own, count === null ? rows : scalar(count));
    });
    for (const metric of this.metrics) {
      const { output } = metric.entry;
      metric.update(feeds[this.labels.get(output)!]!, results[output]!);
    }
    return scalar(this.total);
  }

  /** The figures so far, by their names in logs. */
  figures(): Figures {
    const several = this.losses.length > 1;
    const counted = this.losses.map((_, i) => i).filter((i) => this.means[i]!.hasCounted);
    let loss = counted.length > 0 ? 0 : NaN;
    for (const i of counted) {
      loss += this.means[i]!.value * (several ? this.losses[i]!.weight : 1);
    }
    if (this.penalty !== null) loss += this.penalties.value;
    const figures: Figures = { loss };
    if (several) {
      this.losses.forEach(({ output }, i) => {
        figures[`${output}_loss`] = this.means[i]!.value;
      });
    }
    for (const metric of this.metrics) figures[metric.entry.name] = metric.result;
    return figures;
  }
}

import { Callback, type Logs } from "./callbacks.js";
import { DivergenceError, requireKnown, requireWhole, SettingError, shown } from "./errors.js";
import type { TypedTensor } from "./tensors.js";

export interface EarlyStoppingOptions {
  /** Only a change by more than this is an improvement; >= 0. */
  minDelta?: number;
  /** Epochs without improvement after which training stops; 0 behaves like 1. */
  patience?: number;
  /** "min", "max", or "auto": the metric's own mode, "min" for a loss. */
  mode?: "auto" | "min" | "max";
  /** Until a value better than this has been seen, every epoch counts against `patience`. */
  baseline?: number;
  /** At the end of training, restore the weights of the best epoch. */
  restoreBestWeights?: boolean;
  /** Epochs before this one, counted from 0, are ignored. */
  startFromEpoch?: number;
}

const OPTIONS = [
  "minDelta",
  "patience",
  "mode",
  "baseline",
  "restoreBestWeights",
  "startFromEpoch",
];

/**
 * Stop training when a monitored metric has not improved for `patience` epochs.
 *
 * Afterwards `stoppedEpoch` is the epoch that stopped training (0 if none did), and `best` and
 * `bestEpoch` are the best value and its epoch. NaN is never best. Epoch 0 never stops training.
 */
export class EarlyStopping extends Callback {
  best: number | null = null;
  bestEpoch: number | null = null;
  stoppedEpoch = 0;
  private wait = 0;
  private mode: "min" | "max" = "min";
  private bestWeights: Map<string, TypedTensor> | null = null;
  private warned = false;

  constructor(
    readonly monitor: string = "val_loss",
    private readonly options: EarlyStoppingOptions = {},
  ) {
    super();
    if (typeof monitor !== "string") {
      throw new SettingError(`EarlyStopping needs the name of a metric, got ${shown(monitor)}.`);
    }
    requireKnown("EarlyStopping", options, OPTIONS);
    requireWhole("EarlyStopping's patience", options.patience ?? 0, 0);
    requireWhole("EarlyStopping's startFromEpoch", options.startFromEpoch ?? 0, 0);
    if (!((options.minDelta ?? 0) >= 0)) {
      throw new SettingError(`EarlyStopping needs minDelta >= 0, got ${shown(options.minDelta)}.`);
    }
    if (!["auto", "min", "max"].includes(options.mode ?? "auto")) {
      throw new SettingError(
        `EarlyStopping needs mode "auto", "min" or "max", got ${shown(options.mode)}.`,
      );
    }
  }

  override onTrainBegin(): void {
    this.best = this.bestEpoch = this.bestWeights = null;
    this.stoppedEpoch = this.wait = 0;
    this.warned = false;
    const { mode = "auto" } = this.options;
    this.mode = mode === "auto" ? this.trainer.monitorMode(this.monitor) : mode;
  }

  override async onEpochEnd(epoch: number, logs: Logs): Promise<void> {
    if (epoch < (this.options.startFromEpoch ?? 0)) return;
    const value = logs[this.monitor];
    if (value === undefined) {
      this.warnOfMissing(logs);
      return;
    }
    const { baseline } = this.options;
    this.wait += 1;
    if (this.isBetter(value, this.best)) {
      this.best = value;
      this.bestEpoch = epoch;
      if (this.options.restoreBestWeights) this.bestWeights = await this.trainer.getWeights();
      if (baseline === undefined || this.isBetter(value, baseline)) this.wait = 0;
    }
    if (this.wait < Math.max(this.options.patience ?? 0, 1) || epoch === 0) return;
    this.stoppedEpoch = epoch;
    this.trainer.stopTraining = true;
    const best =
      this.best === null
        ? "no epoch had a number"
        : `the best was ${this.best} at epoch ${this.bestEpoch! + 1}`;
    this.trainer.stopReason =
      `EarlyStopping: ${this.monitor} is ${value} at epoch ${epoch + 1}; ${this.wait} epochs ` +
      `have not improved it, ${best}.`;
  }

  override async onTrainEnd(): Promise<void> {
    if (this.bestWeights !== null) await this.trainer.setWeights(this.bestWeights);
  }

  private isBetter(value: number, reference: number | null): boolean {
    if (reference === null || Number.isNaN(reference)) return !Number.isNaN(value);
    const delta = this.options.minDelta ?? 0;
    return this.mode === "min" ? value < reference - delta : value > reference + delta;
  }

  private warnOfMissing(logs: Logs): void {
    if (this.warned) return;
    this.warned = true;
    console.warn(
      `EarlyStopping monitors "${this.monitor}", which was not computed here; available: ` +
        `${Object.keys(logs).join(", ")}.`,
    );
  }
}

/** Stop with a DivergenceError as soon as the loss of a batch is NaN or infinite. */
export class TerminateOnNaN extends Callback {
  override onTrainBatchEnd(batch: number, logs: Logs): void {
    const loss = logs["batch_loss"]!;
    if (Number.isFinite(loss)) return;
    throw new DivergenceError(
      `The loss is ${loss} at batch ${batch}, learning rate ${this.trainer.learningRate}. ` +
        "Lower the learning rate, or clip gradients: Trainer(..., clip_norm=1) in Python.",
    );
  }
}

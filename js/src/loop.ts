/** The loop of `fit`, and the loop of an evaluation. */

import { CallbackList, type CallbackLike, type Logs } from "./callbacks.js";
import { type Rows } from "./data.js";
import { permutation } from "./order.js";
import type { Runner } from "./runner.js";
import type { Figures } from "./tracker.js";
import type { Trainer } from "./trainer.js";

/** The figures of every epoch: `history.loss[i]` is the loss of the epoch number `epoch[i]`. */
export interface History {
  epoch: number[];
  history: Record<string, number[]>;
}

export interface FitSettings {
  epochs: number;
  batchSize: number;
  dropLast: boolean;
  shuffle: boolean;
  seed: number;
  validation: { rows: Rows; batchSize: number } | null;
  callbacks: readonly CallbackLike[];
  signal: AbortSignal | undefined;
}

const MAX_BUSY_MS = 30;

export class FitLoop {
  private readonly callbacks: CallbackList;
  private readonly steps: number;
  private readonly history: History = { epoch: [], history: {} };
  private rested = performance.now();

  constructor(
    private readonly trainer: Trainer,
    private readonly runner: Runner,
    private readonly rows: Rows,
    private readonly settings: FitSettings,
  ) {
    const { epochs, batchSize, dropLast, callbacks } = settings;
    const batches = rows.count / batchSize;
    this.steps = dropLast ? Math.floor(batches) : Math.ceil(batches);
    this.callbacks = new CallbackList(callbacks, trainer, { epochs, steps: this.steps });
  }

  async run(): Promise<History> {
    const { callbacks, trainer } = this;
    let logs: Logs = {};
    try {
      await callbacks.tell("onTrainBegin", {});
      for (let epoch = 0; epoch < this.settings.epochs && !trainer.stopTraining; epoch += 1) {
        logs = await this.epoch(epoch);
      }
      await callbacks.tell("onTrainEnd", logs);
    } catch (error) {
      await callbacks.tellAll("onException", error);
      throw error;
    } finally {
      await callbacks.tellAll("onClose");
    }
    return this.history;
  }

  private async epoch(epoch: number): Promise<Logs> {
    const { callbacks, runner, trainer } = this;
    const { validation } = this.settings;
    await callbacks.tell("onEpochBegin", epoch, {});
    const logs = await this.train();
    if (validation !== null) {
      const { rows, batchSize } = validation;
      const figures = await evaluate(runner, rows, batchSize, callbacks, () => this.rest());
      for (const [name, value] of Object.entries(figures)) logs[`val_${name}`] = value;
    }
    const { learning_rate, ...figures } = logs;
    const all: Record<string, number> = { ...figures, learning_rate: learning_rate! };
    runner.counters.epoch += 1;
    await trainer.withLogs(all, () => callbacks.tell("onEpochEnd", epoch, all));
    this.history.epoch.push(epoch);
    for (const [name, value] of Object.entries(all))
      (this.history.history[name] ??= []).push(value);
    return all;
  }

  /** Take the steps of an epoch; return its figures, and the learning rate of the last step. */
  private async train(): Promise<Record<string, number>> {
    const { callbacks, runner, rows, settings, trainer } = this;
    const { batchSize, shuffle, seed } = settings;
    const { counters } = runner;
    const order = shuffle ? permutation(seed, counters.epoch, rows.count) : undefined;
    const tracker = runner.tracker("train");
    let rate = counters.learning_rate;
    for (let batch = 0; batch < this.steps && !trainer.stopTraining; batch += 1) {
      await callbacks.tell("onTrainBatchBegin", batch, {});
      settings.signal?.throwIfAborted();
      const begin = batch * batchSize;
      const end = Math.min(begin + batchSize, rows.count);
      rate = counters.learning_rate;
      const loss = await runner.train(rows.batch(begin, end, order), end - begin, tracker);
      if (callbacks.hears("onTrainBatchEnd")) {
        const logs = { ...tracker.figures(), batch_loss: loss };
        await trainer.withLogs(logs, () => callbacks.tell("onTrainBatchEnd", batch, logs));
      }
      await this.rest();
    }
    return { ...tracker.figures(), learning_rate: rate };
  }

  /** Let the page draw and answer from time to time: WebAssembly keeps its thread busy. */
  private async rest(): Promise<void> {
    if (performance.now() - this.rested > MAX_BUSY_MS) {
      await nextTask();
      this.rested = performance.now();
    }
    this.settings.signal?.throwIfAborted();
  }
}

/** Return the figures of an evaluation. */
export async function evaluate(
  runner: Runner,
  rows: Rows,
  batchSize: number,
  callbacks: CallbackList,
  rest: () => Promise<void> = async () => undefined,
): Promise<Figures> {
  const tracker = runner.tracker("evaluate");
  await callbacks.tell("onTestBegin", {});
  for (let begin = 0, batch = 0; begin < rows.count; begin += batchSize, batch += 1) {
    await callbacks.tell("onTestBatchBegin", batch, {});
    const end = Math.min(begin + batchSize, rows.count);
    await runner.evaluate(rows.batch(begin, end), end - begin, tracker);
    if (callbacks.hears("onTestBatchEnd")) {
      await callbacks.tell("onTestBatchEnd", batch, tracker.figures());
    }
    await rest();
  }
  const figures = tracker.figures();
  await callbacks.tell("onTestEnd", figures);
  return figures;
}

/** Wait for the next task of the event loop; unlike a timer, it is not delayed in hidden tabs. */
function nextTask(): Promise<void> {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
}

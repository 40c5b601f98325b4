/**
 * Callbacks with the hooks of Python's onnxfit, in camelCase. The loop calls them in this order:
 *
 *     onTrainBegin
 *     for every epoch:
 *         onEpochBegin
 *         for every batch: onTrainBatchBegin, the step, onTrainBatchEnd
 *         with validation data: onTestBegin, onTestBatchBegin, onTestBatchEnd, ..., onTestEnd
 *         onEpochEnd
 *     onTrainEnd
 *     onException      after an error or an abort only
 *     onClose
 */

import { SettingError, shown } from "./errors.js";
import type { Trainer } from "./trainer.js";

/** The figures of an event, read-only. `trainer.log(name, value)` adds one. */
export type Logs = Readonly<Record<string, number>>;

/** The `params` of a callback; `steps` is the number of batches in an epoch. */
export interface FitParams {
  epochs: number;
  steps: number;
}

type Answer = void | Promise<void>;

/**
 * Base class of callbacks. Override the hooks you need; the loop waits for the promise that a hook
 * returns. `epoch` and `batch` count from 0.
 */
export class Callback {
  trainer!: Trainer;
  params!: FitParams;

  /** Called once before the first epoch; `logs` is empty. */
  onTrainBegin(logs: Logs): Answer {}

  /** Called once after the last epoch; `logs` are those of the last `onEpochEnd`. */
  onTrainEnd(logs: Logs): Answer {}

  /** Called before every epoch; `logs` is empty. */
  onEpochBegin(epoch: number, logs: Logs): Answer {}

  /**
   * Called after every epoch and its validation. `logs` has the loss, the metrics, `val_` metrics,
   * and `learning_rate`, the rate of the epoch's last step.
   */
  onEpochEnd(epoch: number, logs: Logs): Answer {}

  /** Called before every training batch; `logs` is empty. */
  onTrainBatchBegin(batch: number, logs: Logs): Answer {}

  /** Called after every training batch, with the means since the epoch began, and `batch_loss`. */
  onTrainBatchEnd(batch: number, logs: Logs): Answer {}

  /** Called before every evaluation or validation; `logs` is empty. */
  onTestBegin(logs: Logs): Answer {}

  /** Called after every evaluation or validation; `logs` has no prefix `val_`. */
  onTestEnd(logs: Logs): Answer {}

  /** Called before every batch of an evaluation; `logs` is empty. */
  onTestBatchBegin(batch: number, logs: Logs): Answer {}

  /** Called after every batch of an evaluation, with the means so far. */
  onTestBatchEnd(batch: number, logs: Logs): Answer {}

  /** Called before `predict`; `logs` is empty. */
  onPredictBegin(logs: Logs): Answer {}

  /** Called after `predict`; `logs` is empty. */
  onPredictEnd(logs: Logs): Answer {}

  /** Called before every batch of a prediction; `logs` is empty. */
  onPredictBatchBegin(batch: number, logs: Logs): Answer {}

  /** Called after every batch of a prediction; `logs` is empty. */
  onPredictBatchEnd(batch: number, logs: Logs): Answer {}

  /** Called when training fails or is aborted; the error is thrown again afterwards. */
  onException(error: unknown): Answer {}

  /** Called last, whether training ended normally or not. */
  onClose(): Answer {}
}

type Hook = Exclude<keyof Callback, "trainer" | "params">;

export const HOOKS = Object.getOwnPropertyNames(Callback.prototype).filter((name) =>
  name.startsWith("on"),
) as Hook[];

/** A Callback, or an object with some of its hooks. */
export type CallbackLike = Callback | Partial<Pick<Callback, Hook>>;

/** The callbacks of one call, each with `trainer` and `params` set. */
export class CallbackList {
  private readonly callbacks: Callback[];

  constructor(given: readonly CallbackLike[], trainer: Trainer, params: FitParams) {
    this.callbacks = given.map((callback) => {
      requireHooks(callback);
      const own = callback instanceof Callback ? callback : Object.assign(new Callback(), callback);
      own.trainer = trainer;
      own.params = params;
      return own;
    });
  }

  /** Whether a callback overrides the hook: no logs are prepared for a hook without a listener. */
  hears(hook: Hook): boolean {
    return this.callbacks.some((callback) => callback[hook] !== Callback.prototype[hook]);
  }

  /** Call the hook of every callback, one after the other. */
  async tell<H extends Hook>(hook: H, ...values: Parameters<Callback[H]>): Promise<void> {
    for (const callback of this.callbacks) {
      await (callback[hook] as (...values: unknown[]) => Answer)(...values);
    }
  }

  /** Call the hook of every callback, also where one of them throws; throw the first error. */
  async tellAll<H extends Hook>(hook: H, ...values: Parameters<Callback[H]>): Promise<void> {
    const errors: unknown[] = [];
    for (const callback of this.callbacks) {
      try {
        await (callback[hook] as (...values: unknown[]) => Answer)(...values);
      } catch (error) {
        errors.push(error);
      }
    }
    if (errors.length > 0) throw errors[0];
  }
}

/** Throw SettingError for what is no callback, and for a hook that the loop never calls. */
function requireHooks(callback: unknown): void {
  if (typeof callback !== "object" || callback === null) {
    throw new SettingError(
      "A callback is a Callback, or an object with hooks such as {onEpochEnd(epoch, logs) " +
        `{}}, got ${shown(callback)}.`,
    );
  }
  const names = new Set(Object.getOwnPropertyNames(callback));
  let prototype: object | null = Object.getPrototypeOf(callback);
  while (prototype !== null && prototype !== Object.prototype) {
    for (const name of Object.getOwnPropertyNames(prototype)) names.add(name);
    prototype = Object.getPrototypeOf(prototype);
  }
  for (const name of names) {
    if (/^on[A-Z_]/.test(name) && !(HOOKS as string[]).includes(name)) {
      throw new SettingError(
        `A callback has the hook ${shown(name)}, which is never called. The hooks are: ` +
          `${HOOKS.join(", ")}.`,
      );
    }
  }
}

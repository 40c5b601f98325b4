import { CallbackList, type CallbackLike } from "./callbacks.js";
import {
  type ArrayWithDims,
  type Data,
  type Feeds,
  type Given,
  type Rows,
  rowsOf,
} from "./data.js";
import { type Engine, LocalEngine } from "./engine.js";
import {
  DataError,
  InstallationError,
  listed,
  requireKnown,
  requireWhole,
  SettingError,
  shown,
} from "./errors.js";
import { type FolderSource, TrainingFolder } from "./folder.js";
import { evaluate, FitLoop, type History } from "./loop.js";
import type { Graph } from "./manifest.js";
import { METRICS, Metric, modeByName } from "./metrics.js";
import { remoteEngine, type WorkerLike } from "./remote.js";
import { Runner } from "./runner.js";
import { deviceOf, type RuntimeOptions } from "./runtime.js";
import type { Figures } from "./tracker.js";
import { type NumberArray, sizeOf, type TypedTensor, zeros } from "./tensors.js";

export interface LoadOptions extends RuntimeOptions {
  /**
   * Run the graphs in a Web Worker, so that the page stays responsive. True starts the script of
   * this package; a Worker is one of your own, whose script imports "onnxfit/worker".
   */
  worker?: boolean | WorkerLike;
}

export interface EvaluateOptions {
  /** Rows of a batch. Default: 32, or the number that the graph has. */
  batchSize?: number;
  /** A factor of the loss of each row. */
  sampleWeight?: Data;
  callbacks?: readonly CallbackLike[];
}

export interface FitOptions extends EvaluateOptions {
  /** Times to go through the data. Default: 1. */
  epochs?: number;
  /** Labelled rows that are evaluated after each epoch. */
  validationData?: readonly [x: Data, y: Data | null, sampleWeight?: Data];
  /** Aborts training after the running step: `fit` then throws the reason of the signal. */
  signal?: AbortSignal;
  /** Whether each epoch has a new order of rows. Default: true. */
  shuffle?: boolean;
  /** Seed of the order. Default: that of the training folder. */
  seed?: number;
}

export type PredictOptions = Pick<EvaluateOptions, "batchSize" | "callbacks">;

const LOAD = ["device", "ort", "wasmPaths", "threads", "worker"];
const EVALUATE = ["batchSize", "sampleWeight", "callbacks"];
const FIT = [...EVALUATE, "epochs", "validationData", "signal", "shuffle", "seed"];

/** A result of `predict`. */
export type Prediction = ArrayWithDims & { data: NumberArray };

/**
 * Trains the model of a training folder, which `trainer.export_training(folder)` writes in Python.
 *
 *     const trainer = await Trainer.load("training/", { device: "wasm" });
 *     const { history } = await trainer.fit(x, y, { epochs: 5 });
 *     const bytes = await trainer.exportModel();
 */
export class Trainer {
  /** Set it in a callback: training ends after the running batch. */
  stopTraining = false;
  /** The reason for which a callback stopped training. */
  stopReason: string | null = null;
  private logs: Record<string, number> | null = null;
  private busyWith: string | null = null;

  private constructor(private readonly runner: Runner) {}

  /**
   * Load a training folder: compile its step, and read its state.
   *
   * @param source URL of the folder, its path (in Node), or a function that returns a file's bytes.
   * @throws ModelError for a folder that cannot be read, InstallationError without onnxruntime or
   *   its device, StepError if onnxruntime cannot compile the step.
   */
  static async load(source: FolderSource, options: LoadOptions = {}): Promise<Trainer> {
    requireKnown("Trainer.load", options, LOAD);
    if (options.threads !== undefined) requireWhole("threads", options.threads, 1);
    deviceOf(options);
    const [folder, engine] = await bothOrClosed(TrainingFolder.open(source), startEngine(options));
    try {
      const trainer = new Trainer(await Runner.create(folder, engine));
      const unknown = folder.manifest.metrics.filter((entry) => !Metric.isKnown(entry));
      if (unknown.length > 0) {
        console.warn(
          `onnxfit leaves out the metrics ${listed(unknown.map((entry) => entry.name))}. It ` +
            `computes ${METRICS.join(", ")}.`,
        );
      }
      return trainer;
    } catch (error) {
      await engine.close();
      throw error;
    }
  }

  /** Number of epochs that have ended, over all fits. */
  get epoch(): number {
    return this.runner.counters.epoch;
  }

  /** Number of updates, over all fits. */
  get globalStep(): number {
    return this.runner.counters.global_step;
  }

  /** The learning rate of the next step. */
  get learningRate(): number {
    return this.runner.counters.learning_rate;
  }

  set learningRate(rate: number) {
    this.runner.counters.learning_rate = rate;
  }

  /**
   * Train for some epochs, and return their figures.
   *
   * Arguments are checked before the first step. After an error or an abort, the state is that of
   * the last whole step.
   *
   * @param x The input: `{data, dims}`, nested lists, or an object of them by the inputs' names.
   * @param y The labels, alike, by the names of the outputs; null for a model with its own loss.
   */
  async fit(x: Data, y: Data | null, options: FitOptions = {}): Promise<History> {
    requireKnown("fit", options, FIT);
    const { epochs = 1, callbacks = [], signal, shuffle = true, validationData } = options;
    const { manifest } = this.runner;
    const seed = options.seed ?? manifest.order.seed;
    requireWhole("epochs", epochs, 0);
    requireWhole("seed", seed, -Number.MAX_SAFE_INTEGER);
    const rows = this.rows("train", { x, y, sample_weight: options.sampleWeight ?? null });
    const batchSize = this.trainingBatchSize(options.batchSize, rows.count);
    let validation = null;
    if (validationData !== undefined) {
      const [valX, valY, weight = null] = validationData;
      const valRows = this.rows("evaluate", { x: valX, y: valY, sample_weight: weight });
      validation = {
        rows: valRows,
        batchSize: this.batchSize("evaluate", options.batchSize, valRows.count),
      };
    }
    return this.exclusively("fit", async () => {
      signal?.throwIfAborted();
      this.stopTraining = false;
      this.stopReason = null;
      const settings = {
        epochs,
        batchSize,
        shuffle,
        seed,
        validation,
        callbacks,
        signal,
        dropLast: manifest.batch.rows !== null,
      };
      return new FitLoop(this, this.runner, rows, settings).run();
    });
  }

  /** Train on one batch, and return its loss and metrics, as they were before the update. */
  async trainOnBatch(
    x: Data,
    y: Data | null,
    options: Pick<EvaluateOptions, "sampleWeight"> = {},
  ): Promise<Figures> {
    requireKnown("trainOnBatch", options, ["sampleWeight"]);
    const rows = this.rows("train", { x, y, sample_weight: options.sampleWeight ?? null });
    const { count } = rows;
    const fixed = this.runner.manifest.batch.rows;
    if (fixed !== null && count !== fixed) {
      throw new DataError(
        `A batch of this training folder has ${fixed} rows, got ${count}. ` +
          "export_training(folder) without batch_size takes any number.",
      );
    }
    return this.exclusively("trainOnBatch", async () => {
      const tracker = this.runner.tracker("train");
      await this.runner.train(rows.batch(0, count), count, tracker);
      return tracker.figures();
    });
  }

  /** Return the loss and the metrics of labelled rows. It may be called while `fit` runs. */
  async evaluate(x: Data, y: Data | null, options: EvaluateOptions = {}): Promise<Figures> {
    requireKnown("evaluate", options, EVALUATE);
    const rows = this.rows("evaluate", { x, y, sample_weight: options.sampleWeight ?? null });
    const batchSize = this.batchSize("evaluate", options.batchSize, rows.count);
    const steps = Math.ceil(rows.count / batchSize);
    const callbacks = new CallbackList(options.callbacks ?? [], this, { epochs: 1, steps });
    return evaluate(this.runner, rows, batchSize, callbacks);
  }

  /**
   * Return the model's outputs: one array, or an object of them if the model has several. It may be
   * called while `fit` runs.
   *
   * TypeScript cannot know the outputs of the file. For a model with several, name them:
   *
   *     const { boxes, scores } = await trainer.predict<"boxes" | "scores">(x);
   */
  async predict(x: Data, options?: PredictOptions): Promise<Prediction>;
  async predict<Output extends string>(
    x: Data,
    options?: PredictOptions,
  ): Promise<Record<Output, Prediction>>;
  async predict(
    x: Data,
    options: PredictOptions = {},
  ): Promise<Prediction | Record<string, Prediction>> {
    requireKnown("predict", options, ["batchSize", "callbacks"]);
    const rows = this.rows("predict", { x });
    const fixed = fixedRows(this.runner.graph("predict"));
    const batchSize = fixed ?? this.batchSize("predict", options.batchSize, rows.count);
    const steps = Math.ceil(rows.count / batchSize);
    const callbacks = new CallbackList(options.callbacks ?? [], this, { epochs: 1, steps });
    await callbacks.tell("onPredictBegin", {});
    const parts: Feeds[] = [];
    for (let batch = 0; batch < steps; batch += 1) {
      await callbacks.tell("onPredictBatchBegin", batch, {});
      const begin = batch * batchSize;
      const end = Math.min(begin + batchSize, rows.count);
      parts.push(await this.predictBatch(rows, begin, end, fixed));
      await callbacks.tell("onPredictBatchEnd", batch, {});
    }
    await callbacks.tell("onPredictEnd", {});
    const names = Object.keys(parts[0]!);
    const joined = names.map(
      (name) => [name, joinedRows(parts.map((part) => part[name]!))] as const,
    );
    return joined.length === 1 ? joined[0]![1] : Object.fromEntries(joined);
  }

  /** Return the state as the bytes of a state.safetensors; Python reads it with `import_state`. */
  save(): Promise<Uint8Array<ArrayBuffer>> {
    return this.runner.save();
  }

  /**
   * Load a state that `save` returned, or Python wrote.
   *
   * @throws CheckpointError for other bytes; nothing has changed then.
   */
  async loadState(bytes: Uint8Array | ArrayBuffer): Promise<void> {
    const given = bytes instanceof ArrayBuffer ? new Uint8Array(bytes) : bytes;
    if (!(given instanceof Uint8Array)) {
      throw new SettingError(
        `loadState needs a Uint8Array or an ArrayBuffer, got ${shown(bytes)}.`,
      );
    }
    return this.exclusively("loadState", () => this.runner.load(given));
  }

  /** Return the trained model as the bytes of a .onnx file. */
  exportModel(): Promise<Uint8Array<ArrayBuffer>> {
    return this.runner.exportModel();
  }

  /** Return copies of the weights and the running statistics. */
  getWeights(): Promise<Map<string, TypedTensor>> {
    return this.runner.getState("weight", "statistic");
  }

  /** Set weights that `getWeights` returned. DataError for another name, type or shape. */
  async setWeights(weights: ReadonlyMap<string, TypedTensor>): Promise<void> {
    const { state } = this.runner.manifest;
    for (const [name, { type, dims }] of weights) {
      const own = state.find(
        (tensor) => tensor.name === name && /weight|statistic/.test(tensor.kind),
      );
      if (own === undefined || own.type !== type || shown(own.shape) !== shown(dims)) {
        const expected =
          own === undefined ? "no weight of that name" : `${own.type} ${shown(own.shape)}`;
        throw new DataError(
          `setWeights got ${shown(name)} as ${type} ${shown(dims)}, expected ${expected}.`,
        );
      }
    }
    await this.runner.setState(weights);
  }

  /** Free the sessions, the state, and the worker. The trainer cannot be used afterwards. */
  dispose(): Promise<void> {
    return this.runner.close();
  }

  /** Add a figure to the logs of the running hook, for the callbacks that come later. */
  log(name: string, value: number): void {
    if (this.logs === null) {
      throw new SettingError(
        `trainer.log(${shown(name)}, ...) adds to the logs of a hook: call it in ` +
          "onTrainBatchEnd or onEpochEnd.",
      );
    }
    if (typeof name !== "string" || typeof value !== "number") {
      throw new SettingError(
        `trainer.log needs a name and a number, got ${shown(name)} and ${shown(value)}.`,
      );
    }
    this.logs[name] = value;
  }

  /** Return "max" if more of a figure is better, else "min". */
  monitorMode(monitor: string): "min" | "max" {
    const name = monitor.replace(/^val_/, "");
    const metric = this.runner.tracker("train").metrics.find(({ entry }) => entry.name === name);
    return metric?.mode ?? modeByName(name);
  }

  /** @internal Let `log` add to these logs while a hook runs. */
  async withLogs(logs: Record<string, number>, hook: () => Promise<void>): Promise<void> {
    this.logs = logs;
    try {
      await hook();
    } finally {
      this.logs = null;
    }
  }

  private async exclusively<T>(name: string, task: () => Promise<T>): Promise<T> {
    if (this.busyWith !== null) {
      throw new SettingError(
        `${name} cannot begin while ${this.busyWith} runs: wait for its promise, or abort it ` +
          "with a signal.",
      );
    }
    this.busyWith = name;
    try {
      return await task();
    } finally {
      this.busyWith = null;
    }
  }

  private rows(graph: "train" | "evaluate" | "predict", given: Given): Rows {
    const { inputs } = this.runner.graph(graph);
    const takesWeights = inputs.some((input) => input.role === "sample_weight");
    if (!takesWeights && given.sample_weight) {
      throw new DataError(
        "This training folder takes no sample weights. Write it with " +
          "export_training(folder, sample_weight=True).",
      );
    }
    if (graph === "predict") return rowsOf(inputs, given);
    const { losses } = this.runner.manifest;
    const names = new Map(losses.map(({ output, name }) => [output ?? "", name ?? "The loss"]));
    if (!takesWeights || given.sample_weight) return rowsOf(inputs, given).check(inputs, names);
    const { count } = rowsOf(
      inputs.filter((input) => input.role !== "sample_weight"),
      { ...given, sample_weight: null },
    );
    const ones = new Float32Array(count).fill(1);
    return rowsOf(inputs, { ...given, sample_weight: ones }).check(inputs, names);
  }

  private trainingBatchSize(given: number | undefined, count: number): number {
    const { rows } = this.runner.manifest.batch;
    if (given !== undefined) requireWhole("batchSize", given, 1);
    if (rows === null) return Math.min(given ?? 32, count);
    if (given !== undefined && given !== rows) {
      throw new SettingError(
        `Batches of this training folder have ${rows} rows, got batchSize ${given}. ` +
          "export_training(folder) without batch_size takes any number.",
      );
    }
    if (count < rows) {
      throw new DataError(
        `Batches of this training folder have ${rows} rows, and the data only ${count}.`,
      );
    }
    return rows;
  }

  private batchSize(
    graph: "evaluate" | "predict",
    given: number | undefined,
    count: number,
  ): number {
    if (given !== undefined) requireWhole("batchSize", given, 1);
    const fixed = fixedRows(this.runner.graph(graph));
    if (fixed === undefined) return given ?? 32;
    if (count % fixed !== 0) {
      throw new DataError(
        `The model has a fixed batch of ${fixed} rows, and ${count} rows are no multiple. ` +
          `Leave out ${count % fixed} rows.`,
      );
    }
    return fixed;
  }

  /** Predict some rows; a batch too short for a model with fixed rows is filled up. */
  private async predictBatch(
    rows: Rows,
    begin: number,
    end: number,
    fixed?: number,
  ): Promise<Feeds> {
    if (fixed === undefined) return this.runner.predict(rows.batch(begin, end));
    const order = new Uint32Array(fixed).map((_, i) => (begin + i < end ? begin + i : begin));
    const outputs = await this.runner.predict(rows.batch(0, fixed, order));
    for (const [name, { type, dims, data }] of Object.entries(outputs)) {
      const width = sizeOf(dims.slice(1));
      const kept = data.slice(0, (end - begin) * width);
      outputs[name] = { type, dims: [end - begin, ...dims.slice(1)], data: kept };
    }
    return outputs;
  }
}

function fixedRows(graph: Graph): number | undefined {
  const rows = graph.inputs.find((input) => input.role === "x")?.shape?.[0];
  return typeof rows === "number" ? rows : undefined;
}

function joinedRows(parts: readonly TypedTensor[]): Prediction {
  const [{ type, dims }] = parts as [TypedTensor];
  const data = zeros(
    type,
    parts.reduce((total, part) => total + part.data.length, 0),
  );
  let offset = 0;
  for (const part of parts) {
    data.set(part.data as never, offset);
    offset += part.data.length;
  }
  const rows = parts.reduce((total, part) => total + (part.dims[0] ?? 1), 0);
  return { data, dims: [rows, ...dims.slice(1)] };
}

async function startEngine({ worker, ...options }: LoadOptions): Promise<Engine> {
  if (worker === undefined || worker === false) return LocalEngine.create(options);
  if (typeof options.ort === "object") {
    throw new SettingError(
      "A worker cannot be given the module `ort`: give its URL, or leave it out.",
    );
  }
  if (worker !== true) return remoteEngine(worker, options);
  if (typeof Worker === "undefined") {
    throw new InstallationError("There are no Web Workers here: leave out `worker`.");
  }
  const own = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
  return remoteEngine(own as WorkerLike, options);
}

/** Wait for a folder and an engine; if there is no folder, close the engine. */
async function bothOrClosed(
  folder: Promise<TrainingFolder>,
  engine: Promise<Engine>,
): Promise<[TrainingFolder, Engine]> {
  try {
    return await Promise.all([folder, engine]);
  } catch (error) {
    engine.then((started) => started.close()).catch(() => undefined);
    throw error;
  }
}

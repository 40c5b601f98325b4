/** Steps, evaluations and predictions of a training folder, one batch at a time. */

import type { Feeds } from "./data.js";
import type { Engine, ExternalData } from "./engine.js";
import { ModelError, shown } from "./errors.js";
import type { TrainingFolder } from "./folder.js";
import type { Graph, GraphName, Manifest } from "./manifest.js";
import { computeScalars } from "./scalars.js";
import { scheduleOf } from "./schedules.js";
import { Counters, parseState, stateBytes } from "./state.js";
import { BYTES, sizeOf, type TypedTensor, zeros } from "./tensors.js";
import { Tracker } from "./tracker.js";

const STATE = "state.safetensors";

export class Runner {
  readonly manifest: Manifest;
  readonly counters: Counters;
  private readonly opened = new Map<GraphName, Promise<void>>();
  private readonly shared = new Map<string, Promise<Uint8Array>>();

  private constructor(
    private readonly folder: TrainingFolder,
    private readonly engine: Engine,
  ) {
    this.manifest = folder.manifest;
    this.counters = new Counters(folder.manifest);
  }

  /** Compile the training step, and load the state of the folder. */
  static async create(folder: TrainingFolder, engine: Engine): Promise<Runner> {
    const runner = new Runner(folder, engine);
    const [bytes] = await Promise.all([folder.read(STATE), runner.open("train")]);
    await runner.load(bytes);
    return runner;
  }

  graph(name: GraphName): Graph {
    const graph = this.manifest.graphs[name];
    if (graph === undefined) {
      throw new ModelError(`The training folder has no graph ${shown(name)}.`);
    }
    return graph;
  }

  /** Return a tracker of the figures that a graph gives. */
  tracker(name: GraphName): Tracker {
    const { inputs, outputs } = this.graph(name);
    const loss = outputs.find((output) => output.role === "loss");
    if (loss === undefined) throw new ModelError(`The graph ${shown(name)} has no loss.`);
    return new Tracker(this.manifest, inputs, loss.name);
  }

  /** Take one step on a batch, add its figures to the tracker, and return its loss. */
  async train(batch: Feeds, rows: number, tracker: Tracker): Promise<number> {
    const { counters } = this;
    const { scalars } = this.manifest.graphs;
    const computed = scalars && computeScalars(scalars, this.scalars("scalars"));
    const feeds = { ...batch, ...this.scalars("train"), ...computed };
    const results = await this.engine.run("train", feeds, tracker.outputs);
    counters.advance(rows);
    return tracker.update(results, batch, rows);
  }

  /** Evaluate a batch, and add its figures to the tracker. */
  async evaluate(batch: Feeds, rows: number, tracker: Tracker): Promise<void> {
    await this.open("evaluate");
    const feeds = { ...batch, ...this.scalars("evaluate") };
    tracker.update(await this.engine.run("evaluate", feeds, tracker.outputs), batch, rows);
  }

  /** Return the model's outputs for a batch. */
  async predict(batch: Feeds): Promise<Feeds> {
    await this.open("predict");
    const outputs = this.graph("predict").outputs.map((output) => output.name);
    return this.engine.run("predict", { ...batch, ...this.scalars("predict") }, outputs);
  }

  /** Return the tensors of the state of these kinds. */
  getState(...kinds: string[]): Promise<Map<string, TypedTensor>> {
    const wanted = this.manifest.state.filter((tensor) => kinds.includes(tensor.kind));
    return this.engine.getState(wanted.map((tensor) => tensor.name));
  }

  setState(tensors: ReadonlyMap<string, TypedTensor>): Promise<void> {
    return this.engine.setState(tensors);
  }

  async save(): Promise<Uint8Array<ArrayBuffer>> {
    const tensors = await this.getState("weight", "slot", "statistic");
    return stateBytes(this.manifest, new Map([...tensors, ...this.counters.tensors()]));
  }

  /** Load a state; one that does not fit changes nothing. */
  async load(bytes: Uint8Array): Promise<void> {
    const tensors = parseState(this.manifest, bytes);
    const own = this.manifest.state.filter((tensor) => tensor.kind !== "counter");
    await this.engine.setState(new Map(own.map(({ name }) => [name, tensors.get(name)!])));
    this.counters.load(tensors);
  }

  /** Return the bytes of the model to deploy, with the trained weights in their places. */
  async exportModel(): Promise<Uint8Array<ArrayBuffer>> {
    const { file, tensors } = this.manifest.model;
    const [original, state, merged] = await Promise.all([
      this.folder.read(file),
      this.getState("weight", "statistic"),
      this.merged(),
    ]);
    const bytes = original.slice();
    for (const { name, state: key, output, offset, bytes: size, transposed } of tensors) {
      const data = (key === null ? merged[output ?? ""] : state.get(key))?.data;
      if (data?.byteLength !== size || offset + size > bytes.length || transposed) {
        throw new ModelError(
          `manifest.json has an impossible place in ${file} for ${shown(name)}. Write the ` +
            "folder anew.",
        );
      }
      bytes.set(new Uint8Array(data.buffer, data.byteOffset, size), offset);
    }
    return bytes;
  }

  /** Return the weights with their adapters, which the graph "export" computes from the state. */
  private async merged(): Promise<Feeds> {
    const outputs = this.manifest.graphs.export?.outputs.map((output) => output.name);
    if (outputs === undefined) return {};
    await this.open("export");
    return this.engine.run("export", {}, outputs);
  }

  close(): Promise<void> {
    return this.engine.close();
  }

  /** Compile a graph once; after an error the next call tries again. */
  private open(name: GraphName): Promise<void> {
    let opening = this.opened.get(name);
    if (opening === undefined) {
      const graph = this.graph(name);
      opening = this.compile(name, graph);
      opening.catch(() => this.opened.delete(name));
      this.opened.set(name, opening);
    }
    return opening;
  }

  private async compile(name: GraphName, graph: Graph): Promise<void> {
    const external: ExternalData = {};
    for (const file of graph.external ?? []) external[file] = await this.readOnce(file);
    await this.engine.open(name, graph, await this.folder.read(graph.file), external);
  }

  /** Read a file that several graphs share, such as the weights of a frozen backbone. */
  private readOnce(file: string): Promise<Uint8Array> {
    let bytes = this.shared.get(file);
    if (bytes === undefined) {
      bytes = this.folder.read(file);
      bytes.catch(() => this.shared.delete(file));
      this.shared.set(file, bytes);
    }
    return bytes;
  }

  /** The numbers of a step that a graph reads: learning rate, step, and seed. */
  private scalars(name: GraphName): Feeds {
    const values: Record<string, number> = {
      learning_rate: this.counters.learning_rate,
      step: this.counters.global_step,
      seed: this.manifest.random.seed,
    };
    const feeds: Feeds = {};
    for (const input of this.manifest.graphs[name]?.inputs ?? []) {
      const { schedule } = input;
      const value = schedule ? scheduleOf(schedule)(this.counters.global_step) : values[input.role];
      if (value === undefined) continue;
      const data = zeros(input.type, 1);
      const isBig = BYTES[input.type] === 8 && input.type !== "float64";
      (data as unknown as (number | bigint)[])[0] = isBig ? BigInt(value) : value;
      feeds[input.name] = { type: input.type, dims: fixedDims(input.shape), data };
    }
    return feeds;
  }
}

/** The sizes of a scalar input: [] or [1]. */
function fixedDims(shape: readonly unknown[] | null): number[] {
  const dims = (shape ?? []).map(() => 1);
  return sizeOf(dims) === 1 ? dims : [];
}

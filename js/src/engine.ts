/** Runs the graphs of a training folder, and holds the state, in memory or in the GPU's buffers. */

import type * as ort from "onnxruntime-common";

import type { Feeds } from "./data.js";
import { StepError, reasonOf } from "./errors.js";
import type { Graph, GraphName } from "./manifest.js";
import {
  type Device,
  deviceOf,
  loadRuntime,
  type Runtime,
  type RuntimeOptions,
} from "./runtime.js";
import type { NumberArray, TensorType, TypedTensor } from "./tensors.js";

/** The same on this thread and in a worker. Calls wait for one another. */
export interface Engine {
  /** Compile a graph. */
  open(name: GraphName, graph: Graph, bytes: Uint8Array, external?: ExternalData): Promise<void>;
  /** Run a graph and return some of its outputs. "train" replaces the state by its next values. */
  run(name: GraphName, feeds: Feeds, outputs: readonly string[]): Promise<Feeds>;
  getState(names: readonly string[]): Promise<Map<string, TypedTensor>>;
  setState(tensors: ReadonlyMap<string, TypedTensor>): Promise<void>;
  /** Free the sessions and the state. */
  close(): Promise<void>;
}

/** File -> its bytes, from which a graph reads constants. */
export type ExternalData = Record<string, Uint8Array>;

interface Compiled {
  session: ort.InferenceSession;
  graph: Graph;
}

export class LocalEngine implements Engine {
  private readonly graphs = new Map<GraphName, Compiled>();
  private readonly state = new Map<string, ort.Tensor>();
  private last: Promise<unknown> = Promise.resolve();

  private constructor(
    private readonly runtime: Runtime,
    private readonly options: RuntimeOptions,
    private readonly device: Device,
  ) {}

  static async create(options: RuntimeOptions): Promise<LocalEngine> {
    return new LocalEngine(await loadRuntime(options), options, deviceOf(options));
  }

  open(
    name: GraphName,
    graph: Graph,
    bytes: Uint8Array,
    external: ExternalData = {},
  ): Promise<void> {
    return this.inTurn(async () => {
      if (this.graphs.has(name)) return;
      const options = this.sessionOptions(graph);
      const files = Object.entries(external);
      if (files.length > 0) options.externalData = files.map(([path, data]) => ({ path, data }));
      const session = await described(`compile ${graph.file}`, () =>
        this.runtime.InferenceSession.create(bytes, options),
      );
      this.graphs.set(name, { session, graph });
    });
  }

  run(name: GraphName, feeds: Feeds, outputs: readonly string[]): Promise<Feeds> {
    return this.inTurn(() => this.runGraph(this.graphs.get(name)!, feeds, outputs));
  }

  getState(names: readonly string[]): Promise<Map<string, TypedTensor>> {
    return this.inTurn(async () => {
      const copies = new Map<string, TypedTensor>();
      for (const name of names) {
        const { type, dims, data } = await toHost(this.state.get(name)!);
        copies.set(name, { type, dims: [...dims], data: data.slice() });
      }
      return copies;
    });
  }

  setState(tensors: ReadonlyMap<string, TypedTensor>): Promise<void> {
    return this.inTurn(async () => {
      for (const [name, { type, dims, data }] of tensors) {
        this.replace(name, tensorOf(this.runtime, { type, dims, data: data.slice() }));
      }
    });
  }

  close(): Promise<void> {
    return this.inTurn(async () => {
      for (const tensor of this.state.values()) tensor.dispose();
      this.state.clear();
      for (const { session } of this.graphs.values()) await session.release();
      this.graphs.clear();
    });
  }

  /** Run a task after all that were asked for before, since a session runs one batch at a time. */
  private inTurn<T>(task: () => Promise<T>): Promise<T> {
    const result = this.last.then(task);
    this.last = result.catch(() => undefined);
    return result;
  }

  private sessionOptions(graph: Graph): ort.InferenceSession.SessionOptions {
    const { threads } = this.options;
    const provider = this.device;
    const options: ort.InferenceSession.SessionOptions = {
      executionProviders: [provider],
      graphOptimizationLevel: "all",
      logSeverityLevel: 3,
      // Otherwise onnxruntime moves the rounding of integer weights, and refuses some of its own nodes.
      extra: { session: { disable_quant_qdq: "1" } },
    };
    if (provider === "cpu" && threads !== undefined) options.intraOpNumThreads = threads;
    if (provider === "webgpu") {
      const state = graph.outputs.filter((output) => output.role === "state");
      options.preferredOutputLocation = Object.fromEntries(
        state.map(({ name }) => [name, "gpu-buffer" as const]),
      );
    }
    return options;
  }

  private async runGraph(
    { session, graph }: Compiled,
    feeds: Feeds,
    outputs: readonly string[],
  ): Promise<Feeds> {
    const inputs: Record<string, ort.Tensor> = {};
    for (const { name, role } of graph.inputs) {
      inputs[name] =
        role === "state" ? this.state.get(name)! : tensorOf(this.runtime, feeds[name]!);
    }
    const next = graph.outputs.filter((output) => output.role === "state");
    const fetches = [...new Set([...outputs, ...next.map((output) => output.name)])];
    const results = await described(`run ${graph.file}`, () => session.run(inputs, fetches));
    for (const { name, of } of next) this.replace(of!, results[name]!);
    const wanted: Feeds = {};
    for (const name of outputs) wanted[name] = await toHost(results[name]!);
    return wanted;
  }

  private replace(name: string, tensor: ort.Tensor): void {
    this.state.get(name)?.dispose();
    this.state.set(name, tensor);
  }
}

function tensorOf({ Tensor }: Runtime, { type, data, dims }: TypedTensor): ort.Tensor {
  return new Tensor(type as "float32", data as Float32Array, dims);
}

async function toHost(tensor: ort.Tensor): Promise<TypedTensor> {
  let data = (await tensor.getData()) as NumberArray;
  if (tensor.type === "float16") {
    data = new Uint16Array(data.buffer, data.byteOffset, data.length);
  }
  return { type: tensor.type as TensorType, dims: tensor.dims, data };
}

async function described<T>(action: string, task: () => Promise<T>): Promise<T> {
  try {
    return await task();
  } catch (error) {
    throw new StepError(`onnxruntime could not ${action}: ${reasonOf(error)}`, { cause: error });
  }
}

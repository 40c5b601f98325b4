/** The manifest of a training folder: docs/training-folder.md says what each key means. */

import { ModelError, shown } from "./errors.js";
import type { Program } from "./scalars.js";
import type { ScheduleDescription } from "./schedules.js";
import { BYTES, type TensorType } from "./tensors.js";

const FORMAT = "onnxfit-training-folder";
const VERSION = 1;
// Roles of the inputs that are fed in addition to the state.
const FED = ["x", "y", "sample_weight", "learning_rate", "step", "seed", "scalar", "schedule"];

/** A tensor of a graph or of the state. An entry of `shape` is null or a text where it is open. */
export interface TensorSpec {
  name: string;
  type: TensorType;
  shape: (number | string | null)[] | null;
}

export interface GraphTensor extends TensorSpec {
  role: string;
  of?: string | null;
  /** Only of the role "schedule": the schedule whose value is the input. */
  schedule?: ScheduleDescription;
  /** Only of labels, and absent in folders of older versions. */
  labels?: AllowedLabels;
}

/** The labels that a loss can read; null for a bound that is infinite. */
export interface AllowedLabels {
  least: number | null;
  greatest: number | null;
  /** The only possible labels, or null. */
  values: number[] | null;
  /** A label that does not count, also outside of the bounds; or null. */
  ignored: number | null;
}

export interface Graph {
  file: string;
  /** Other files of the folder from which the graph reads constants. */
  external?: string[];
  inputs: GraphTensor[];
  outputs: GraphTensor[];
  /** Only of "scalars": the graph in JSON. */
  program?: Program;
}

export type GraphName = "train" | "evaluate" | "predict" | "scalars" | "export";

export interface StateTensor extends TensorSpec {
  shape: number[];
  kind: "weight" | "slot" | "statistic" | "counter";
  of: string | null;
  output: string | null;
}

export interface LossEntry {
  output: string | null;
  name: string | null;
  value: string;
  weight: number;
  count: string | null;
  reduction: string;
}

export interface MetricEntry {
  name: string;
  output: string;
  metric: string;
  settings: Record<string, unknown> | null;
}

export interface Manifest {
  format: string;
  version: number;
  files: Record<string, { sha256: string; bytes: number }>;
  source: { sha256: string };
  graphs: Partial<Record<GraphName, Graph>>;
  state: StateTensor[];
  batch: { rows: number | null; sample_weight: boolean };
  losses: LossEntry[];
  penalty: string | null;
  metrics: MetricEntry[];
  learning_rate: { value: number; schedule: ScheduleDescription | null; max?: number };
  random: { seed: number; draws: boolean };
  order: { function: string; seed: number };
  model: { file: string; tensors: ModelTensor[] };
}

export interface ModelTensor {
  name: string;
  /** The weight or statistic whose bytes go there; null for an output of the graph "export". */
  state: string | null;
  output?: string;
  offset: number;
  bytes: number;
  transposed: boolean;
}

type Check = (value: any) => boolean;

const text: Check = (value) => typeof value === "string";
const number: Check = (value) => Number.isFinite(value);
const count: Check = (value) => Number.isSafeInteger(value) && value >= 0;
const record: Check = (value) =>
  typeof value === "object" && value !== null && !Array.isArray(value);
const orNull =
  (check: Check): Check =>
  (value) =>
    value === null || check(value);
const listOf =
  (check: Check): Check =>
  (value) =>
    Array.isArray(value) && value.every(check);
const mapOf =
  (check: Check): Check =>
  (value) =>
    record(value) && Object.values(value).every(check);
const fields =
  (checks: Record<string, Check>): Check =>
  (value) =>
    record(value) && Object.entries(checks).every(([name, check]) => check(value[name]));

const plainName: Check = (value) => text(value) && !/[/\\]|^\.{0,2}$/.test(value);
const named = fields({ name: text, type: text });
const sizes = listOf((size) => size === null || text(size) || count(size));
const tensor: Check = (value) => named(value) && orNull(sizes)(value.shape);
const allowedLabels = fields({
  least: orNull(number),
  greatest: orNull(number),
  values: orNull(listOf(number)),
  ignored: orNull(number),
});
const schedule = fields({ name: text, settings: record });
const graphTensor: Check = (value) =>
  tensor(value) &&
  text(value.role) &&
  (value.labels === undefined || allowedLabels(value.labels)) &&
  (value.role !== "schedule" || schedule(value.schedule));
const stateTensor: Check = (value) =>
  named(value) && fields({ shape: listOf(count), kind: text, output: orNull(text) })(value);
const program = fields({
  version: count,
  constants: listOf(fields({ name: text, type: text, data: listOf(() => true) })),
  nodes: listOf(fields({ op: text, inputs: listOf(text), output: text, type: text })),
});
const graph = fields({
  file: plainName,
  external: (files) => files === undefined || listOf(plainName)(files),
  inputs: listOf(graphTensor),
  outputs: listOf(graphTensor),
});
const loss = fields({
  output: orNull(text),
  value: text,
  weight: number,
  count: orNull(text),
  reduction: text,
});
const patched: Check = (value) =>
  fields({ name: text, state: orNull(text), offset: count, bytes: count })(value) &&
  (value.state !== null || text(value.output));

const MANIFEST: Record<string, Check> = {
  files: (value) =>
    mapOf(fields({ sha256: text, bytes: count }))(value) && Object.keys(value).every(plainName),
  graphs: (value) =>
    mapOf(graph)(value) &&
    graph(value.train) &&
    (value.scalars === undefined || program(value.scalars.program)),
  state: listOf(stateTensor),
  batch: fields({ rows: orNull((rows) => count(rows) && rows > 0) }),
  losses: listOf(loss),
  penalty: orNull(text),
  metrics: listOf(fields({ name: text, output: text, metric: text })),
  learning_rate: fields({
    value: number,
    schedule: orNull(schedule),
  }),
  random: fields({ seed: (seed) => Number.isSafeInteger(seed) }),
  order: fields({ function: text, seed: (seed) => Number.isSafeInteger(seed) }),
  model: fields({ file: plainName, tensors: listOf(patched) }),
};

/**
 * Return the manifest in the text of a manifest.json.
 *
 * @throws ModelError for another format or version, and for a value of another kind.
 */
export function parseManifest(json: string): Manifest {
  let value: any;
  try {
    value = JSON.parse(json);
  } catch {
    throw new ModelError(
      `manifest.json is no JSON; it begins with ${shown(json.slice(0, 40))}. Load a folder ` +
        "that trainer.export_training(folder) has written.",
    );
  }
  if (!record(value) || value.format !== FORMAT) {
    throw new ModelError(
      `manifest.json describes no training folder: its format is ${shown(value?.format)}, ` +
        `expected "${FORMAT}".`,
    );
  }
  if (value.version !== VERSION) {
    throw new ModelError(
      `The training folder has version ${shown(value.version)}, and this package reads ` +
        `version ${VERSION}. Update the npm package onnxfit, or write the folder anew.`,
    );
  }
  for (const [name, check] of Object.entries(MANIFEST)) {
    if (!check(value[name])) {
      throw new ModelError(
        `manifest.json has an unexpected value of ${shown(name)}: ${shown(value[name])}. ` +
          "Write the folder anew with trainer.export_training(folder).",
      );
    }
  }
  requireKnownTensors(value);
  return value;
}

/** Throw ModelError where graphs and state do not fit together, or have types unknown here. */
function requireKnownTensors(manifest: Manifest): void {
  const graphs = Object.values(manifest.graphs);
  for (const { name, type } of [
    ...manifest.state,
    ...graphs.flatMap(({ inputs, outputs }) => [...inputs, ...outputs]),
  ]) {
    if (!Object.hasOwn(BYTES, type)) {
      throw new ModelError(
        `The tensor ${shown(name)} has the type ${shown(type)}, which onnxruntime lacks in ` +
          "JavaScript. Train in float32.",
      );
    }
  }
  const state = new Set(manifest.state.map((tensor) => tensor.name));
  for (const { file, inputs, outputs } of graphs) {
    const unknown = [
      ...inputs.filter(({ role, name }) =>
        role === "state" ? !state.has(name) : !FED.includes(role),
      ),
      ...outputs.filter(({ role, of }) => role === "state" && !state.has(of ?? "")),
    ];
    if (unknown.length > 0) {
      const [{ name, role }] = unknown as [GraphTensor];
      throw new ModelError(
        `${file} has the tensor ${shown(name)} of the role ${shown(role)}, which this ` +
          "version cannot feed. Update the npm package onnxfit, or write the folder anew.",
      );
    }
  }
  const { outputs } = manifest.graphs.train!;
  const produced = new Set(outputs.map((output) => output.name));
  const read = manifest.losses.flatMap(({ value, count }) => [value, count ?? value]);
  if (!outputs.some(({ role }) => role === "loss") || !read.every((name) => produced.has(name))) {
    throw new ModelError(
      `${manifest.graphs.train!.file} lacks a loss that manifest.json names. Write the ` +
        "folder anew.",
    );
  }
}

/** The counters of a training, and the checks and bytes of its state. */

import { CheckpointError, SettingError, shown } from "./errors.js";
import type { Manifest, StateTensor } from "./manifest.js";
import { readSafetensors, writeSafetensors } from "./safetensors.js";
import { scheduleOf, type Schedule } from "./schedules.js";
import { type TypedTensor, zeros } from "./tensors.js";

const COUNTERS = ["epoch", "global_step", "global_batch", "samples_seen", "learning_rate"] as const;
type Counter = (typeof COUNTERS)[number];

/** Counters of epochs, steps and rows, and the learning rate. */
export class Counters {
  epoch = 0;
  global_step = 0;
  global_batch = 0;
  samples_seen = 0;
  private rate: number;
  private schedule: Schedule | null;

  constructor(private readonly manifest: Manifest) {
    const { value, schedule } = manifest.learning_rate;
    this.rate = value;
    this.schedule = schedule === null ? null : scheduleOf(schedule);
  }

  /** The learning rate of the next step. */
  get learning_rate(): number {
    return this.schedule?.(this.global_step) ?? this.rate;
  }

  set learning_rate(rate: number) {
    const max = this.manifest.learning_rate.max ?? Infinity;
    if (typeof rate !== "number" || !(rate >= 0 && rate <= max)) {
      throw new SettingError(`learningRate needs a number from 0 to ${max}, got ${shown(rate)}.`);
    }
    if (this.schedule !== null) {
      throw new SettingError(
        "The learning rate follows the schedule " +
          `${this.manifest.learning_rate.schedule!.name}, so it cannot be set. Export a ` +
          "Trainer whose learning rate is a number.",
      );
    }
    this.rate = rate;
  }

  /** Count a step on a batch of so many rows. */
  advance(rows: number): void {
    this.global_step += 1;
    this.global_batch += 1;
    this.samples_seen += rows;
  }

  /** Return the counters as tensors, in the types of the manifest. */
  tensors(): Map<string, TypedTensor> {
    const tensors = new Map<string, TypedTensor>();
    for (const { name, type } of countersOf(this.manifest)) {
      const value = this[counterOf(name)];
      const data = zeros(type, 1);
      (data as unknown as (number | bigint)[])[0] = type === "int64" ? BigInt(value) : value;
      tensors.set(name, { type, dims: [], data });
    }
    return tensors;
  }

  /** Set the counters to those of a checked state. */
  load(tensors: ReadonlyMap<string, TypedTensor>): void {
    for (const { name } of countersOf(this.manifest)) {
      const counter = counterOf(name);
      const value = Number(tensors.get(name)!.data[0]);
      if (counter === "learning_rate") this.rate = value;
      else this[counter] = value;
    }
  }
}

function countersOf(manifest: Manifest): StateTensor[] {
  return manifest.state.filter((tensor) => tensor.kind === "counter");
}

function counterOf(name: string): Counter {
  const counter = name.slice(name.lastIndexOf("/") + 1) as Counter;
  if (COUNTERS.includes(counter)) return counter;
  throw new CheckpointError(
    `The state has the counter ${shown(name)}, which this version does not know. Update the ` +
      "npm package onnxfit.",
  );
}

/**
 * Return the tensors in the bytes of a state, in which each tensor of the manifest has its type and
 * shape, and no other tensor is.
 *
 * @throws CheckpointError for any other bytes.
 */
export function parseState(manifest: Manifest, bytes: Uint8Array): Map<string, TypedTensor> {
  const { tensors } = readSafetensors(bytes);
  const known = new Set(manifest.state.map((tensor) => tensor.name));
  const unknown = [...tensors.keys()].find((name) => !known.has(name));
  if (unknown !== undefined) {
    throw new CheckpointError(
      `The state has the tensor ${shown(unknown)}, which this model lacks. Load a state of ` +
        "the same training folder.",
    );
  }
  for (const expected of manifest.state) {
    const tensor = tensors.get(expected.name);
    const found = tensor === undefined ? "no such tensor" : `${tensor.type} ${shown(tensor.dims)}`;
    if (found !== `${expected.type} ${shown(expected.shape)}`) {
      throw new CheckpointError(
        `The state needs ${shown(expected.name)} as ${expected.type} ` +
          `${shown(expected.shape)}, and has ${found}. Load a state of the same training ` +
          "folder.",
      );
    }
    if (expected.kind === "counter") requireCount(expected.name, tensor!);
  }
  return tensors;
}

function requireCount(name: string, { data }: TypedTensor): void {
  const value = Number(data[0]);
  const isRate = counterOf(name) === "learning_rate";
  if (isRate ? value >= 0 && value < Infinity : Number.isSafeInteger(value) && value >= 0) return;
  throw new CheckpointError(`The state has ${shown(name)} = ${value}, expected a number >= 0.`);
}

/** Return the bytes of a state, its tensors in the order of the manifest. */
export function stateBytes(
  manifest: Manifest,
  tensors: ReadonlyMap<string, TypedTensor>,
): Uint8Array<ArrayBuffer> {
  return writeSafetensors(new Map(manifest.state.map(({ name }) => [name, tensors.get(name)!])));
}

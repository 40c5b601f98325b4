/** The data of a call: arrays of any kind become tensors of a graph's inputs, cut into batches. */

import { checkNumbers } from "./checks.js";
import { DataError, listed, shown } from "./errors.js";
import type { GraphTensor } from "./manifest.js";
import { BYTES, type NumberArray, sizeOf, type TypedTensor, zeros } from "./tensors.js";

/** Numbers with their sizes; a Tensor of onnxruntime is one. */
export interface ArrayWithDims {
  data: ArrayLike<number> | ArrayLike<bigint> | ArrayLike<boolean>;
  dims: readonly number[];
}

export type NestedArray = readonly (number | bigint | boolean | NestedArray)[];
type Plain = ArrayLike<number> | ArrayLike<bigint>;

/** An array: with its sizes, or nested lists of numbers, or a typed array of one number per row. */
export type ArrayData = ArrayWithDims | NestedArray | Plain;

/** The array of the only input or label, or an object of arrays by their names. */
export type Data = ArrayData | Readonly<Record<string, ArrayData>>;

/** The feeds of all rows, by the names of the graph's inputs. */
export class Rows {
  constructor(
    private readonly tensors: ReadonlyMap<string, TypedTensor>,
    readonly count: number,
  ) {}

  /** Throw DataError for the first number that a training step or an evaluation cannot use. */
  check(inputs: readonly GraphTensor[], losses: ReadonlyMap<string, string>): this {
    checkNumbers(inputs, this.tensors, losses);
    return this;
  }

  /** Return the rows of a batch: from `begin` to `end` of `order`, or of all rows as they are. */
  batch(begin: number, end: number, order?: Uint32Array): Feeds {
    const feeds: Feeds = {};
    for (const [name, { type, dims, data }] of this.tensors) {
      const width = sizeOf(dims.slice(1));
      const cut = zeros(type, (end - begin) * width);
      for (let i = begin; i < end; i += 1) {
        const row = order === undefined ? i : order[i]!;
        cut.set(data.subarray(row * width, (row + 1) * width) as never, (i - begin) * width);
      }
      feeds[name] = { type, dims: [end - begin, ...dims.slice(1)], data: cut };
    }
    return feeds;
  }
}

/** Tensors by the names of a graph's inputs. */
export type Feeds = Record<string, TypedTensor>;

/** Arguments of a call, which become feeds: role of an input -> the data of that role. */
export type Given = Readonly<Partial<Record<"x" | "y" | "sample_weight", Data | null>>>;

/**
 * Return the feeds for the inputs of a graph.
 *
 * @throws DataError if an array is missing, of another shape, or has other rows than the rest.
 */
export function rowsOf(inputs: readonly GraphTensor[], given: Given): Rows {
  const tensors = new Map<string, TypedTensor>();
  let count: number | undefined;
  let first = "";
  for (const [role, data] of Object.entries(given)) {
    const wanted = inputs.filter((input) => input.role === role);
    for (const [input, array] of matched(role, wanted, data)) {
      const tensor = toTensor(input, array);
      const rows = tensor.dims[0] ?? 0;
      if (count === undefined) [count, first] = [rows, nameOf(input)];
      if (rows !== count) {
        throw new DataError(
          `${describe(input)} has ${rows} rows, and ${JSON.stringify(first)} has ${count}. ` +
            "All arrays need the same number of rows.",
        );
      }
      tensors.set(input.name, tensor);
    }
  }
  if (!count) throw new DataError("There are no rows to work on: the arrays are empty.");
  return new Rows(tensors, count);
}

/** The name by which the user knows an input: that of the output, for its labels. */
function nameOf(input: GraphTensor): string {
  return input.role === "y" ? (input.of ?? input.name) : input.name;
}

function describe(input: GraphTensor): string {
  const kinds: Record<string, string> = { x: "The input", y: "The label of", sample_weight: "The" };
  return `${kinds[input.role] ?? ""} ${JSON.stringify(nameOf(input))}`;
}

function matched(
  role: string,
  wanted: readonly GraphTensor[],
  data: Data | null | undefined,
): [GraphTensor, ArrayData][] {
  const names = wanted.map(nameOf);
  if (data === undefined || data === null) {
    if (wanted.length === 0) return [];
    throw new DataError(`${role} is missing: it needs ${listed(names)}.`);
  }
  if (isArrayData(data)) {
    if (wanted.length === 1) return [[wanted[0]!, data]];
    throw new DataError(
      `${role} is one array, and the model has ${wanted.length} (${listed(names)}). Give an ` +
        "object of arrays by these names.",
    );
  }
  if (typeof data !== "object") {
    throw new DataError(`${role} needs arrays, got ${shown(data)}. Give {data, dims}.`);
  }
  const unknown = Object.keys(data).filter((name) => !names.includes(name));
  const missing = names.filter((name) => !Object.hasOwn(data, name));
  if (unknown.length > 0 || missing.length > 0) {
    throw new DataError(
      `${role} has the names ${listed(Object.keys(data))}, and the model needs ` +
        `${listed(names)}. An array is {data, dims} or nested lists.`,
    );
  }
  return wanted.map((input) => [input, data[nameOf(input)]!]);
}

function isArrayData(data: Data): data is ArrayData {
  return Array.isArray(data) || ArrayBuffer.isView(data) || isArrayWithDims(data);
}

function isArrayWithDims(data: unknown): data is ArrayWithDims {
  return typeof data === "object" && data !== null && "data" in data && "dims" in data;
}

/** Return the array in the type of an input, in the shape of an input; it may share its memory. */
function toTensor(input: GraphTensor, given: ArrayData): TypedTensor {
  const { data, dims } = isArrayWithDims(given)
    ? given
    : Array.isArray(given)
      ? flattened(input, given as NestedArray)
      : { data: given as Plain, dims: [(given as Plain).length] };
  if (!Array.isArray(dims) || !dims.every((size) => Number.isSafeInteger(size) && size >= 0)) {
    throw new DataError(
      `${describe(input)} has the sizes ${shown(dims)}. Give a list of whole numbers.`,
    );
  }
  if (sizeOf(dims) !== data.length) {
    throw new DataError(
      `${describe(input)} has ${data.length} numbers, which do not fill the sizes ${shown(dims)}.`,
    );
  }
  return { type: input.type, dims: fittedDims(input, dims), data: converted(input, data) };
}

function flattened(input: GraphTensor, given: NestedArray): ArrayWithDims {
  const dims: number[] = [];
  for (let level: unknown = given; Array.isArray(level); level = level[0]) dims.push(level.length);
  const data = (given as readonly any[]).flat(dims.length - 1) as number[];
  if (data.some(Array.isArray)) {
    throw new DataError(`${describe(input)} has nested lists of different lengths.`);
  }
  return { data, dims };
}

/** Return the sizes; labels may have an axis of size 1 at the end too many or too few. */
function fittedDims(input: GraphTensor, dims: readonly number[]): readonly number[] {
  const { shape } = input;
  const fits = (sizes: readonly number[]) =>
    shape === null ||
    (sizes.length === shape.length &&
      sizes.every(
        (size, axis) => axis === 0 || typeof shape[axis] !== "number" || shape[axis] === size,
      ));
  const others = [[...dims, 1], ...(dims.at(-1) === 1 ? [dims.slice(0, -1)] : [])];
  const found = [dims, ...(input.role === "x" ? [] : others)].find(fits);
  if (found !== undefined) return found;
  const wanted = shape!.map((size) => (typeof size === "number" ? size : "any"));
  throw new DataError(
    `${describe(input)} has the sizes [${dims.join(", ")}], expected ` +
      `[${["rows", ...wanted.slice(1)].join(", ")}].`,
  );
}

function converted(input: GraphTensor, data: ArrayWithDims["data"]): NumberArray {
  const { type } = input;
  const array = zeros(type, 0);
  if (data.constructor === array.constructor) return data as NumberArray;
  if (type === "float16") {
    throw new DataError(
      `${describe(input)} is float16: give the bits of its numbers as Uint16Array.`,
    );
  }
  const result = zeros(type, data.length);
  const isBig = type === "int64" || type === "uint64";
  const isFloat = type === "float32" || type === "float64";
  for (let i = 0; i < data.length; i += 1) {
    const value = data[i];
    const number = Number(value);
    if (
      !(isFloat ? typeof value !== "object" && typeof value !== "string" : Number.isInteger(number))
    ) {
      throw new DataError(
        `${describe(input)} needs ${isFloat ? "numbers" : "whole numbers"} (${type}), got ` +
          `${shown(value)} at position ${i}.`,
      );
    }
    (result as unknown as (number | bigint)[])[i] = isBig ? BigInt(value as bigint) : number;
  }
  if (!isFloat && !isBig && BYTES[type] < 8) {
    const at = Array.prototype.findIndex.call(result, (number, i) => number !== Number(data[i]));
    if (at >= 0) {
      throw new DataError(`${describe(input)} has ${shown(data[at])}, which ${type} cannot hold.`);
    }
  }
  return result;
}

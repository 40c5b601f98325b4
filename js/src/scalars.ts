/** The few numbers of a step that need 64 bits, computed here from the program of a manifest. */

import type { Feeds } from "./data.js";
import { ModelError, reasonOf, shown } from "./errors.js";
import type { Graph } from "./manifest.js";
import { type TensorType, zeros } from "./tensors.js";

/** The nodes of scalars.onnx in JSON; docs/training-folder.md defines the operators. */
export interface Program {
  version: number;
  constants: { name: string; type: TensorType; data: unknown[] }[];
  nodes: { op: string; inputs: string[]; output: string; type: TensorType }[];
}

const VERSION = 1;

// Whole numbers are BigInts, floats are numbers, truth values are booleans.
type Operator = (...operands: any[]) => any;
const choose =
  (better: (a: any, b: any) => boolean): Operator =>
  (...all) =>
    all.reduce((a, b) => (better(a, b) || a !== a ? a : b));
const OPERATORS: Record<string, Operator> = {
  Abs: (a) => (a < 0 ? -a : a),
  Add: (a, b) => a + b,
  And: (a, b) => a && b,
  Cast: (a) => a,
  Ceil: Math.ceil,
  Div: (a, b) => a / b,
  Equal: (a, b) => a === b,
  Exp: Math.exp,
  Floor: Math.floor,
  Greater: (a, b) => a > b,
  GreaterOrEqual: (a, b) => a >= b,
  Identity: (a) => a,
  Less: (a, b) => a < b,
  LessOrEqual: (a, b) => a <= b,
  Log: Math.log,
  Max: choose((a, b) => a > b),
  Min: choose((a, b) => a < b),
  Mul: (a, b) => a * b,
  Neg: (a) => -a,
  Not: (a) => !a,
  Or: (a, b) => a || b,
  Pow: (a, b) => Number(a) ** Number(b),
  Sqrt: Math.sqrt,
  Sub: (a, b) => a - b,
  Where: (a, b, c) => (a ? b : c),
};

const CONVERSIONS: Partial<Record<TensorType, Operator>> = {
  bool: (value) => value != 0,
  float32: (value) => Math.fround(Number(value)),
  float64: Number,
  int32: (value) => BigInt.asIntN(32, whole(value)),
  int64: (value) => BigInt.asIntN(64, whole(value)),
};

function whole(value: unknown): bigint {
  return BigInt(typeof value === "number" ? Math.trunc(value) : (value as string));
}

/** Return the outputs of the program of a graph, for these values of its inputs. */
export function computeScalars({ file, outputs, program }: Graph, feeds: Feeds): Feeds {
  if (program?.version !== VERSION) {
    throw new ModelError(
      `${file} has a program of version ${shown(program?.version)}, and this package computes ` +
        `version ${VERSION}. Update the npm package onnxfit, or write the folder anew.`,
    );
  }
  try {
    const values = new Map<string, any[]>();
    for (const [name, { data }] of Object.entries(feeds)) values.set(name, [...data]);
    for (const { name, type, data } of program.constants) {
      values.set(name, data.map(numberOf).map(known(CONVERSIONS, type)));
    }
    for (const { op, inputs, output, type } of program.nodes) {
      const operands = inputs.map((name) => values.get(name)!);
      const operator = known(OPERATORS, op);
      const convert = known(CONVERSIONS, type);
      const { length } = operands.reduce((a, b) => (b.length > a.length ? b : a));
      const element = (i: number) => operands.map((all) => all[all.length === 1 ? 0 : i]);
      const results = Array.from({ length }, (_, i) => convert(operator(...element(i))));
      values.set(output, results);
    }
    return Object.fromEntries(outputs.map((output) => [output.name, tensorOf(output, values)]));
  } catch (error) {
    throw new ModelError(
      `The program of ${file} cannot be computed: ${reasonOf(error)}. Write the folder anew.`,
      { cause: error },
    );
  }
}

function tensorOf({ name, type, shape }: Graph["outputs"][number], values: Map<string, any[]>) {
  const dims = (shape ?? []).map(Number);
  const results = values.get(name)!;
  const data = zeros(type, results.length);
  const isBig = data instanceof BigInt64Array;
  for (const [i, value] of results.entries()) data[i] = isBig ? value : Number(value);
  return { type, dims, data };
}

function known<T>(table: Partial<Record<string, T>>, name: string): T {
  if (!Object.hasOwn(table, name)) throw new Error(`${shown(name)} is unknown`);
  return table[name]!;
}

/** JSON lacks infinities and NaN; the manifest has objects in their places. */
function numberOf(value: unknown): unknown {
  return typeof value === "object" && value !== null
    ? Number((value as Record<string, unknown>)["onnxfit:float"])
    : value;
}

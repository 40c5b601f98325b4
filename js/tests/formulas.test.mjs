/** Schedules, metrics and orders give what Python gives. */

import assert from "node:assert/strict";
import test from "node:test";

import { ModelError } from "../dist/index.js";
import { Metric } from "../dist/metrics.js";
import { permutation } from "../dist/order.js";
import { computeScalars } from "../dist/scalars.js";
import { scheduleOf } from "../dist/schedules.js";
import { apart, json } from "./helpers.mjs";

for (const { description, rates } of json("schedules.json")) {
  test(`schedule ${JSON.stringify(description)}`, () => {
    const schedule = scheduleOf(description);
    const own = rates.map((/** @type {number} */ _, /** @type {number} */ step) => schedule(step));
    assert.ok(apart(own, rates) < 1e-15);
  });
}

/** @param {any} graph @param {Record<string, string[]>} given @param {"inputs" | "outputs"} side */
function tensors(graph, given, side) {
  const one = (/** @type {any} */ { name, type, shape }) => {
    const texts = given[name] ?? [];
    const data =
      type === "int64"
        ? BigInt64Array.from(texts, BigInt)
        : type === "int32"
          ? Int32Array.from(texts, Number)
          : Float32Array.from(texts, Number);
    return [name, { type, dims: shape, data }];
  };
  return Object.fromEntries(graph[side].map(one));
}

test("programs of scalars give what scalars.onnx gives", () => {
  const cases = json("scalars.json");
  assert.ok(cases.length > 50);
  let most = 0;
  for (const { settings, graph, feeds, expected } of cases) {
    const own = computeScalars(graph, tensors(graph, feeds, "inputs"));
    for (const [name, tensor] of Object.entries(tensors(graph, expected, "outputs"))) {
      const { type, dims, data } = /** @type {any} */ (own[name]);
      assert.deepEqual([type, dims], [tensor.type, tensor.dims], `${settings} ${name}`);
      if (type !== "float32") assert.deepEqual(data, tensor.data, `${settings} ${name}`);
      else {
        const error = Math.abs(data[0] - tensor.data[0]) / (Math.abs(tensor.data[0]) || 1);
        most = Math.max(most, error);
        assert.ok(error <= 2 ** -23, `${settings} ${name}: ${data[0]} ${tensor.data[0]}`);
      }
    }
  }
  console.log(`# largest relative difference of a scalar: ${most}`);
});

/**
 * Compute one node of constants.
 *
 * @param {string} op
 * @param {string} type
 * @param {...any[]} operands
 */
function computed(op, type, ...operands) {
  const constants = operands.map((data, i) => ({
    name: `x${i}`,
    type: typeof data[0] === "string" ? "int64" : "float64",
    data,
  }));
  const inputs = constants.map(({ name }) => name);
  const nodes = [{ op, inputs, output: "y", type }];
  const outputs = [{ name: "y", type, shape: [operands[0]?.length], role: "scalar" }];
  const program = { version: 1, constants, nodes };
  const graph = /** @type {any} */ ({ file: "scalars.onnx", inputs: [], outputs, program });
  return [...(computeScalars(graph, {})["y"]?.data ?? [])].map(String);
}

test("operators of programs are exact", () => {
  const big = "9007199254740993"; // not a float64
  assert.deepEqual(computed("Add", "int64", [big, "9223372036854775807"], ["1"]), [
    "9007199254740994",
    "-9223372036854775808",
  ]);
  assert.deepEqual(computed("Mul", "int64", [big], [big]), [
    String(BigInt.asIntN(64, BigInt(big) ** 2n)),
  ]);
  assert.deepEqual(computed("Div", "int64", ["-7", "7"], ["2"]), ["-3", "3"]);
  assert.deepEqual(computed("Cast", "int32", ["4294967295"]), ["-1"]);
  assert.deepEqual(computed("Cast", "int64", [-2.9]), ["-2"]);
  assert.deepEqual(computed("Cast", "float32", [0.1]), [String(Math.fround(0.1))]);
  assert.deepEqual(computed("Max", "float64", [1, NaN], [2]), ["2", "NaN"]);
  assert.deepEqual(computed("Min", "float64", [{ "onnxfit:float": "-Infinity" }], [2]), [
    "-Infinity",
  ]);
  assert.deepEqual(computed("Abs", "int64", ["-3"]), ["3"]);
  assert.deepEqual(computed("Equal", "bool", ["3", "4"], ["3"]), ["1", "0"]);
  assert.deepEqual(computed("Where", "float64", [1, 0], [5, 6], [7, 8]), ["5", "8"]);
});

test("programs that cannot be computed are refused", () => {
  const refused = (/** @type {() => unknown} */ call) => assert.throws(call, ModelError);
  refused(() => computed("constructor", "float64", [1]));
  refused(() => computed("Exit", "float64", [1]));
  refused(() => computed("Add", "text", [1], [2]));
  refused(() => computed("Div", "int64", ["1"], ["0"]));
  refused(() => computed("Cast", "int64", [NaN]));
  const graph = /** @type {any} */ ({ file: "scalars.onnx", outputs: [], program: { version: 2 } });
  refused(() => computeScalars(graph, {}));
});

test("an unknown schedule is refused, names of the prototype too", () => {
  for (const name of ["Sawtooth", "constructor"]) {
    assert.throws(() => scheduleOf({ name, settings: {} }), ModelError);
  }
});

/** @param {any} array @param {number} begin @param {number} end @returns {any} */
function part({ dims, data }, begin, end) {
  const width = data.length / dims[0];
  const cut = data.slice(begin * width, end * width).map((/** @type {any} */ v) => v ?? NaN);
  return { type: "float64", dims: [end - begin, ...dims.slice(1)], data: Float64Array.from(cut) };
}

for (const { metric: name, settings, labels, outputs, result, mode } of json("metrics.json")) {
  test(`metric ${name} ${JSON.stringify(settings)} of ${labels.dims} and ${outputs.dims}`, () => {
    const metric = new Metric({ name, output: "y", metric: name, settings });
    metric.update(part(labels, 0, 3), part(outputs, 0, 3));
    metric.reset();
    assert.ok(Number.isNaN(metric.result));
    for (const [begin, end] of /** @type {const} */ ([
      [0, 5],
      [5, 12],
    ])) {
      metric.update(part(labels, begin, end), part(outputs, begin, end));
    }
    assert.ok(Math.abs(metric.result - result) < 1e-12, `${metric.result} ${result}`);
    assert.equal(metric.mode, mode);
  });
}

test("orders are those of Python", () => {
  assert.deepEqual([...permutation(0, 0, 8)], [5, 2, 4, 6, 1, 7, 0, 3]);
  assert.deepEqual([...permutation(2 ** 40 + 3, 7, 10)], [4, 1, 2, 6, 0, 7, 9, 3, 5, 8]);
  assert.deepEqual([...permutation(-1, 5, 9)], [7, 6, 8, 1, 5, 2, 4, 0, 3]);
  const order = permutation(12, 3, 100_000);
  const sum = order.reduce((total, row, i) => total + ((row * i) % 1000003), 0);
  assert.equal(sum, 50_000_712_066);
});

test("an order has each row once, and depends on seed and epoch", () => {
  const first = permutation(3, 0, 1000);
  assert.deepEqual(
    [...first].sort((a, b) => a - b),
    [...Array(1000).keys()],
  );
  assert.notDeepEqual(permutation(3, 1, 1000), first);
  assert.notDeepEqual(permutation(4, 0, 1000), first);
});

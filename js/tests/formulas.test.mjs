/** Schedules, metrics and orders give what Python gives. */

import assert from "node:assert/strict";
import test from "node:test";

import { ModelError } from "../dist/index.js";
import { Metric } from "../dist/metrics.js";
import { permutation } from "../dist/order.js";
import { scheduleOf } from "../dist/schedules.js";
import { apart, json } from "./helpers.mjs";

for (const { description, rates } of json("schedules.json")) {
  test(`schedule ${JSON.stringify(description)}`, () => {
    const schedule = scheduleOf(description);
    const own = rates.map((/** @type {number} */ _, /** @type {number} */ step) => schedule(step));
    assert.ok(apart(own, rates) < 1e-15);
  });
}

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

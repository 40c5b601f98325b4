/** Schedules, metrics and orders give what Python gives. */

import assert from "node:assert/strict";
import test from "node:test";

import { ModelError } from "../dist/index.js";
import { Metric } from "../dist/metrics.js";
import { orderOf } from "../dist/order.js";
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

test("an order has each row once, and depends on seed and epoch", () => {
  const order = orderOf("unknown");
  const first = order(3, 0, 1000);
  assert.deepEqual(
    [...first].sort((a, b) => a - b),
    [...Array(1000).keys()],
  );
  assert.deepEqual(order(3, 0, 1000), first);
  assert.notDeepEqual(order(3, 1, 1000), first);
  assert.notDeepEqual(order(4, 0, 1000), first);
});

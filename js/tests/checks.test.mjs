/** The numbers that a step refuses, and its messages. */

import assert from "node:assert/strict";
import test from "node:test";

import { checkNumbers } from "../dist/checks.js";
import { DataError } from "../dist/index.js";

const LABELS = { least: null, greatest: null, values: null, ignored: null };
const CLASSES = { ...LABELS, least: 0, greatest: 9 };

/**
 * Check tensors of two numbers for each row, and return the message of the error, or null.
 *
 * @param {Record<string, any[]>} tensors role -> type, and numbers
 * @param {any} [labels]
 */
function messageOf(tensors, labels) {
  const inputs = Object.entries(tensors).map(([role, [type]]) => {
    return { name: role, role, type, shape: null, of: "scores", labels };
  });
  const given = Object.entries(tensors).map(([role, [type, data]]) => {
    const dims = role === "sample_weight" ? [data.length] : [data.length / 2, 2];
    return /** @type {[string, any]} */ ([role, { type, data, dims }]);
  });
  try {
    checkNumbers(inputs, new Map(given), new Map([["scores", "Hinge"]]));
    return null;
  } catch (error) {
    assert.ok(error instanceof DataError, String(error));
    return error.message;
  }
}

/** @type {[string, any, any[], RegExp | null][]} */
const CASES = [
  ["classes", CLASSES, ["int64", [0n, 9n]], null],
  ["a negative class", CLASSES, ["int64", [3n, 3n, 3n, -1n]], /indices from 0 to 9 .* -1 at row 1/],
  ["a hint", CLASSES, ["int64", [-1n, 0n]], /set ignore_index=-1/],
  [
    "a class too many",
    CLASSES,
    ["int64", [10n, 0n]],
    /expects class indices .* got 10 at row 0\.$/,
  ],
  ["an ignored label", { ...CLASSES, ignored: -100 }, ["int64", [-100n, 0n]], null],
  ["no number of classes", { ...CLASSES, greatest: null }, ["int32", [-1, 0]], /indices >= 0/],
  [
    "probabilities",
    { ...CLASSES, greatest: 1 },
    ["float32", [0, 1.5]],
    /numbers from 0 to 1 .*1.5/,
  ],
  ["signs", { ...LABELS, values: [-1, 1] }, ["float32", [1, 0]], /labels -1 and 1 .* got 0/],
  ["any number", LABELS, ["float32", [1e30, -3]], null],
  ["an infinite label", LABELS, ["float64", [1, -Infinity]], /finite numbers .* got -Infinity/],
  ["an older folder", undefined, ["float32", [NaN, 0]], /finite numbers .* got NaN at row 0/],
  ["a half of NaN", LABELS, ["float16", [0x3c00, 0x7e00]], /got NaN/],
  ["halves", { ...CLASSES, greatest: 1 }, ["float16", [0x3c00, 0x0001]], null],
  ["a half above the range", { ...CLASSES, greatest: 1 }, ["float16", [0, 0x3c01]], /got 1.0009/],
];
for (const [name, labels, given, message] of CASES) {
  test(`labels: ${name}`, () => {
    const got = messageOf({ y: given }, labels);
    if (message === null) assert.equal(got, null);
    else assert.match(got ?? "", message);
  });
}

test("labels that are not finite may stand in rows of weight 0", () => {
  const y = ["float32", [NaN, 0, 1, 1]];
  assert.equal(messageOf({ y, sample_weight: ["float32", [0, 1]] }, LABELS), null);
  assert.match(messageOf({ y, sample_weight: ["float32", [1, 0]] }, LABELS) ?? "", /row 0/);
});

test("inputs may be infinite, but not NaN; weights are finite", () => {
  assert.equal(messageOf({ x: ["float32", [Infinity, 0]] }), null);
  assert.match(messageOf({ x: ["float32", [1, 2, 3, NaN]] }) ?? "", /"x" has NaN in row 1/);
  assert.match(
    messageOf({ sample_weight: ["float32", [1, Infinity]] }) ?? "",
    /sample_weight is Infinity in row 1/,
  );
});

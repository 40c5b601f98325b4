import assert from "node:assert/strict";
import test from "node:test";

import { CheckpointError, readSafetensors, writeSafetensors } from "../dist/index.js";
import { bytes } from "./helpers.mjs";

/** @param {unknown} header @param {number} length */
function file(header, length = 8) {
  const text = new TextEncoder().encode(
    typeof header === "string" ? header : JSON.stringify(header),
  );
  const all = new Uint8Array(8 + text.length + length);
  new DataView(all.buffer).setBigUint64(0, BigInt(text.length), true);
  all.set(text, 8);
  return all;
}

/** @param {number} begin @param {number} end */
const entry = (begin, end, shape = [2], dtype = "F32") => ({
  dtype,
  shape,
  data_offsets: [begin, end],
});

test("a file that Python wrote is read, and written with the same tensors", () => {
  const read = readSafetensors(bytes("cnn/state.safetensors"));
  assert.ok(read.tensors.size > 10);
  const again = readSafetensors(writeSafetensors(read.tensors, { format: "pt" }));
  assert.deepEqual(again.metadata, { format: "pt" });
  assert.deepEqual([...again.tensors].sort(), [...read.tensors].sort());
});

test("the bytes of all types come back, at any place in a buffer", () => {
  /** @type {Map<string, any>} */
  const tensors = new Map([
    ["a", { type: "bool", dims: [3], data: Uint8Array.of(1, 0, 1) }],
    ["b", { type: "int64", dims: [], data: BigInt64Array.of(-5n) }],
    ["__proto__", { type: "float64", dims: [1, 2], data: Float64Array.of(0.1, NaN) }],
    ["c", { type: "float16", dims: [0, 4], data: new Uint16Array(0) }],
  ]);
  const written = writeSafetensors(tensors);
  const shifted = new Uint8Array(written.length + 3);
  shifted.set(written, 3);
  const read = readSafetensors(shifted.subarray(3)).tensors;
  assert.deepEqual([...read.keys()].sort(), [...tensors.keys()].sort());
  for (const [name, tensor] of tensors) assert.deepEqual(read.get(name), tensor);
});

const HOSTILE = {
  "no bytes": new Uint8Array(0),
  "a header longer than the file": (() => {
    const all = file({});
    new DataView(all.buffer).setBigUint64(0, 2n ** 63n, true);
    return all;
  })(),
  "no JSON": file("{", 0),
  "no UTF-8": file("{}", 0).map((byte, i) => (i === 8 ? 0xff : byte)),
  "a list": file([], 0),
  null: file("null", 0),
  "an entry that is no object": file({ a: 1 }, 0),
  "an unknown type": file({ a: entry(0, 8, [2], "F31") }),
  "a type of the prototype": file({ a: entry(0, 8, [2], "constructor") }),
  "a negative size": file({ a: entry(0, 8, [-2]) }),
  "a size that is no whole number": file({ a: entry(0, 8, [1.5]) }),
  "sizes whose product overflows": file({ a: entry(0, 8, [2 ** 52, 2 ** 52, 2 ** 52]) }),
  "sizes that do not fill the bytes": file({ a: entry(0, 8, [3]) }),
  "an end before the beginning": file({ a: entry(8, 0) }),
  "an end beyond the file": file({ a: entry(8, 16) }),
  "offsets that overlap": file({ a: entry(0, 8), b: entry(0, 8) }),
  "a hole": file({ a: entry(4, 8, [1]) }),
  "bytes at the end": file({ a: entry(0, 8) }, 9),
  "one offset": file({ a: { dtype: "F32", shape: [2], data_offsets: [0] } }),
  "metadata that are no texts": file({ __metadata__: { a: {} } }, 0),
};

for (const [name, data] of Object.entries(HOSTILE)) {
  test(`a file with ${name} is refused`, () => {
    assert.throws(() => readSafetensors(data), CheckpointError);
  });
}

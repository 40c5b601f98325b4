/**
 * Read and write safetensors: eight bytes with the length of a JSON header, the header, and the
 * bytes of the tensors. The reader trusts nothing in the header: each tensor must lie inside the
 * file, have the size that its shape says, and begin where the one before it ends.
 */

import { CheckpointError, reasonOf, shown } from "./errors.js";
import {
  arrayFrom,
  BYTES,
  SAFETENSORS_NAMES,
  type TensorType,
  type TypedTensor,
} from "./tensors.js";

const MAX_HEADER_BYTES = 100_000_000; // the format's own limit

export interface SafetensorsFile {
  tensors: Map<string, TypedTensor>;
  metadata: Record<string, string>;
}

const TYPES = new Map<string, TensorType>(
  Object.entries(SAFETENSORS_NAMES).map(([type, name]) => [name, type as TensorType]),
);

/**
 * Return the tensors and the metadata in the bytes of a safetensors file.
 *
 * @throws CheckpointError if the bytes are anything but a whole file.
 */
export function readSafetensors(bytes: Uint8Array): SafetensorsFile {
  const { header, body } = readHeader(bytes);
  const tensors = new Map<string, TypedTensor>();
  const spans: [begin: number, end: number][] = [];
  let metadata: Record<string, string> = {};
  for (const [name, entry] of Object.entries(header)) {
    if (name === "__metadata__") {
      metadata = checkedMetadata(entry);
      continue;
    }
    const { type, dims, begin, end } = checkedEntry(name, entry, body.length);
    spans.push([begin, end]);
    tensors.set(name, { type, dims, data: arrayFrom(type, body.subarray(begin, end)) });
  }
  requireContiguous(spans, body.length);
  return { tensors, metadata };
}

/** Return the bytes of a safetensors file. Wide numbers come first, so all are aligned. */
export function writeSafetensors(
  tensors: ReadonlyMap<string, TypedTensor>,
  metadata: Record<string, string> = {},
): Uint8Array<ArrayBuffer> {
  const ordered = [...tensors].sort(
    ([a, x], [b, y]) => BYTES[y.type] - BYTES[x.type] || (a < b ? -1 : 1),
  );
  const entries: [string, unknown][] = [];
  if (Object.keys(metadata).length > 0) entries.push(["__metadata__", metadata]);
  let length = 0;
  for (const [name, { type, dims, data }] of ordered) {
    const end = length + data.byteLength;
    entries.push([
      name,
      { dtype: SAFETENSORS_NAMES[type], shape: dims, data_offsets: [length, end] },
    ]);
    length = end;
  }
  let header = JSON.stringify(Object.fromEntries(entries));
  let encoded = new TextEncoder().encode(header);
  header += " ".repeat((8 - (encoded.length % 8)) % 8);
  encoded = new TextEncoder().encode(header);
  const bytes = new Uint8Array(8 + encoded.length + length);
  new DataView(bytes.buffer).setBigUint64(0, BigInt(encoded.length), true);
  bytes.set(encoded, 8);
  let offset = 8 + encoded.length;
  for (const [, { data }] of ordered) {
    bytes.set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), offset);
    offset += data.byteLength;
  }
  return bytes;
}

function damaged(problem: string): CheckpointError {
  return new CheckpointError(
    `The bytes are no whole safetensors file: ${problem}. Give the bytes that save() ` +
      "returned, or a" +
      " state.safetensors of export_training.",
  );
}

function readHeader(bytes: Uint8Array): { header: object; body: Uint8Array } {
  if (bytes.length < 8) throw damaged(`there are ${bytes.length} bytes`);
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const size = Number(view.getBigUint64(0, true));
  if (size > Math.min(MAX_HEADER_BYTES, bytes.length - 8)) {
    throw damaged(`the header claims ${size} bytes of ${bytes.length}`);
  }
  let header: unknown;
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes.subarray(8, 8 + size));
    header = JSON.parse(text);
  } catch (error) {
    throw damaged(`the header is no JSON (${reasonOf(error)})`);
  }
  if (!isRecord(header)) throw damaged("the header is no JSON object");
  return { header, body: bytes.subarray(8 + size) };
}

function checkedMetadata(entry: unknown): Record<string, string> {
  if (!isRecord(entry) || Object.values(entry).some((value) => typeof value !== "string")) {
    throw damaged("its metadata are no texts");
  }
  return entry as Record<string, string>;
}

function checkedEntry(name: string, entry: unknown, length: number) {
  const where = `tensor ${shown(name)}`;
  if (!isRecord(entry)) throw damaged(`${where} has no description`);
  const { dtype, shape, data_offsets: offsets } = entry;
  const type = typeof dtype === "string" ? TYPES.get(dtype) : undefined;
  if (type === undefined) throw damaged(`${where} has the type ${shown(dtype)}`);
  if (!isCounts(shape)) throw damaged(`${where} has the shape ${shown(shape)}`);
  if (!isCounts(offsets) || offsets.length !== 2) {
    throw damaged(`${where} has the offsets ${shown(offsets)}`);
  }
  const [begin, end] = offsets as [number, number];
  const expected = shape.reduce((product, size) => product * size, BYTES[type]);
  if (begin > end || end > length || end - begin !== expected) {
    throw damaged(`${where} of ${expected} bytes lies at ${shown(offsets)} of ${length}`);
  }
  return { type, dims: shape, begin, end };
}

function requireContiguous(spans: [number, number][], length: number): void {
  spans.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  let last = 0;
  for (const [begin, end] of spans) {
    if (begin !== last)
      throw damaged(`a tensor begins at ${begin}, the one before ends at ${last}`);
    last = end;
  }
  if (last !== length) throw damaged(`${length - last} bytes at the end belong to no tensor`);
}

function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function isCounts(value: unknown): value is number[] {
  return Array.isArray(value) && value.every((size) => Number.isSafeInteger(size) && size >= 0);
}

/** Folders that make_folders.py has written, and their data. */

import fs from "node:fs";
import path from "node:path";

import { readSafetensors } from "../dist/index.js";

export const FOLDERS = process.env["ONNXFIT_FOLDERS"] ?? "tests/folders";
export const ROWS = 32;

/** @param {string} file */
export function json(file) {
  return JSON.parse(fs.readFileSync(path.join(FOLDERS, file), "utf-8"));
}

/** @param {string} file */
export function bytes(file) {
  return new Uint8Array(fs.readFileSync(path.join(FOLDERS, file)));
}

/**
 * The data of a network, what Python made of it, and a function that cuts rows.
 *
 * @param {string} name
 */
export function network(name) {
  const { tensors } = readSafetensors(bytes(`${name}/data.safetensors`));
  const [x, y, predicted] = ["x", "y", "predicted"].map((key) => tensors.get(key));
  if (!x || !y || !predicted) throw new Error(`${name} has no data`);
  const width = x.data.length / (x.dims[0] ?? 1);
  /** @type {(begin: number, end: number) => [x: any, y: any]} */
  const rows = (begin, end) => [
    { data: x.data.subarray(begin * width, end * width), dims: [end - begin, ...x.dims.slice(1)] },
    { data: y.data.subarray(begin, end), dims: [end - begin] },
  ];
  return {
    folder: path.join(FOLDERS, name),
    rows,
    predicted,
    expected: json(`${name}/expected.json`),
  };
}

/**
 * The largest difference between two arrays.
 *
 * @param {ArrayLike<number | bigint>} a
 * @param {ArrayLike<number | bigint>} b
 */
export function apart(a, b) {
  if (a.length !== b.length) return Infinity;
  let most = 0;
  for (let i = 0; i < a.length; i += 1) {
    const difference = Math.abs(Number(a[i]) - Number(b[i]));
    if (!(difference <= most)) most = difference;
  }
  return most;
}

/**
 * A reader of a folder in which some files are replaced.
 *
 * @param {string} name
 * @param {Record<string, Uint8Array | ((manifest: any) => void)>} changes
 */
export function changed(name, changes) {
  return async (/** @type {string} */ file) => {
    const change = changes[file];
    if (change === undefined) return bytes(`${name}/${file}`);
    if (typeof change !== "function") return change;
    const manifest = json(`${name}/${file}`);
    change(manifest);
    return new TextEncoder().encode(JSON.stringify(manifest));
  };
}

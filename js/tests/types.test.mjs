/** The code of docs/browser.md is strict TypeScript, and so are the results of a trainer. */

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import fs from "node:fs";
import path from "node:path";
import test from "node:test";

import { FOLDERS } from "./helpers.mjs";
import { snippets } from "./snippets.mjs";

const FOLDER = path.resolve(FOLDERS, "types");
const OPTIONS = {
  target: "ES2022",
  module: "ESNext",
  moduleResolution: "bundler",
  lib: ["ES2022", "DOM"],
  types: [],
  strict: true,
  noEmit: true,
  skipLibCheck: true,
};

const RESULTS = `
import { Trainer } from "onnxfit";
declare const trainer: Trainer;
declare const pixels: Float32Array;
const x = { data: pixels, dims: [1, 64] };
export const width: number | undefined = (await trainer.predict(x)).dims[1];
const { boxes, scores } = await trainer.predict<"boxes" | "scores">(x, { batchSize: 8 });
export const sizes: number[] = [boxes.data.length, scores.data.length];
export const blobs = [new Blob([await trainer.save()]), new Blob([await trainer.exportModel()])];
`;

/** @param {string} source @returns {string} what the compiler prints */
function compiled(source) {
  fs.mkdirSync(path.join(FOLDER, "node_modules"), { recursive: true });
  const own = path.join(FOLDER, "node_modules/onnxfit");
  if (!fs.existsSync(own)) fs.symlinkSync(path.resolve("."), own);
  fs.writeFileSync(path.join(FOLDER, "main.ts"), source);
  const config = { compilerOptions: OPTIONS, files: ["main.ts"] };
  fs.writeFileSync(path.join(FOLDER, "tsconfig.json"), JSON.stringify(config));
  try {
    return execFileSync("npx", ["tsc", "-p", FOLDER], { encoding: "utf-8" });
  } catch (error) {
    return /** @type {{ stdout: string }} */ (error).stdout;
  }
}

test("the code of docs/browser.md compiles in strict mode", () => {
  assert.equal(compiled(snippets("../docs/browser.md", "js")[0] ?? ""), "");
});

test("results have the types that their users need", () => {
  assert.equal(compiled(RESULTS), "");
  assert.match(compiled(RESULTS.replace("batchSize", "batchsize")), /batchsize/);
});

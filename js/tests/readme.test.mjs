/** The JavaScript of the README runs, block after block, as a reader would type it. */

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import fs from "node:fs";
import path from "node:path";
import test from "node:test";

import { build } from "esbuild";

import { FOLDERS } from "./helpers.mjs";
import { snippets } from "./snippets.mjs";

const BLOCKS = snippets("README.md", "js");
const isForWorkers = (/** @type {string} */ block) => /onnxfit\/worker|new Worker/.test(block);

// The data that the README takes for granted.
const GIVEN = `
const count = 320;
const { tensors } = readSafetensors(fs.readFileSync("training/data.safetensors"));
const pixels = tensors.get("x").data.slice(0, count * 64);
const labels = tensors.get("y").data.slice(0, count);
const valX = { data: pixels.slice(0, 640), dims: [10, 1, 8, 8] };
const valY = labels.slice(0, 10);
const chart = { points: [], add(point) { this.points.push(point); } };
`;

test("the blocks of the README run", () => {
  const folder = path.join(FOLDERS, "readme");
  for (const copy of ["training", "public/training"]) {
    fs.cpSync(path.join(FOLDERS, "cnn"), path.join(folder, copy), { recursive: true });
  }
  const [first, ...rest] = BLOCKS.filter((block) => !isForWorkers(block));
  assert.ok(first !== undefined && rest.length >= 3);
  const imports = first.match(/^import .*$/gm)?.join("\n");
  // in Node, the same calls run on onnxruntime-node
  const body = first.replace(/^import .*$/gm, "").replace('device: "wasm"', 'device: "cpu"');
  const script = [
    'import fs from "node:fs"; import { readSafetensors } from "onnxfit";',
    `${imports}${GIVEN}${body}`,
    ...rest.map((block) => `{\n${block}}`),
    "console.log(JSON.stringify({ model: model.length, history, points: chart.points.length }));",
    "process.exit();",
  ].join("\n");
  fs.writeFileSync(path.join(folder, "readme.mjs"), script);
  const printed = execFileSync("node", ["readme.mjs"], { cwd: folder, encoding: "utf-8" });
  const { model, history, points } = JSON.parse(printed.trim().split("\n").at(-1) ?? "");
  assert.equal(model, fs.statSync(path.join(FOLDERS, "cnn/model.onnx")).size);
  assert.ok(history.val_accuracy.at(-1) > 0.8, JSON.stringify(history));
  assert.equal(points, 5 * 10);
});

test("the blocks for workers can be bundled", async () => {
  const blocks = BLOCKS.filter(isForWorkers);
  assert.equal(blocks.length, 2);
  for (const contents of blocks) {
    const { outputFiles } = await build({
      stdin: { contents: `import { Trainer } from "onnxfit";\n${contents}`, resolveDir: "." },
      alias: { onnxfit: "./dist/index.js", "onnxfit/worker": "./dist/worker.js" },
      external: ["onnxruntime-web/*"],
      bundle: true,
      write: false,
      format: "esm",
    });
    assert.match(outputFiles[0]?.text ?? "", /postMessage/);
  }
});

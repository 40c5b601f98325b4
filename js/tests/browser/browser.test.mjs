/** Training in Chromium against what Python computed from the same folder. */

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import fs from "node:fs";
import path from "node:path";
import test, { after, before } from "node:test";

import { apart, FOLDERS, json } from "../helpers.mjs";
import { launch } from "./chromium.mjs";
import { serve } from "../../scripts/serve.mjs";

/** @type {import("playwright-core").Browser} */
let browser;
/** @type {Awaited<ReturnType<typeof serve>>} */
let server;

before(async () => {
  server = await serve({
    "": "tests/browser",
    dist: "dist",
    ort: "node_modules/onnxruntime-web/dist",
    folders: FOLDERS,
  });
  browser = await launch();
});

after(async () => {
  await browser?.close();
  server?.close();
});

/**
 * Take steps in a new page.
 *
 * @param {string} name
 * @param {any} options
 * @param {{ first?: number, count?: number }} [steps]
 * @returns {Promise<{ losses: number[], evaluated: any, state: number[], bytes: number, gpu: any }>}
 */
async function steps(name, options, { first = 0, count = 20 } = {}) {
  const page = await browser.newPage();
  try {
    await page.goto(`${server.url}page.html`);
    await page.waitForFunction("window.ready");
    return await page.evaluate(
      (/** @type {any} */ request) => /** @type {any} */ (window).steps(request),
      { name, options, first, count },
    );
  } finally {
    await page.close();
  }
}

/** @param {number[]} losses @param {number[]} expected */
function worst(losses, expected) {
  const ratios = losses.map((loss, i) => loss / (expected[i] ?? NaN));
  return apart(
    ratios,
    ratios.map(() => 1),
  );
}

const WORKER = { worker: true, ort: "/ort/ort.wasm.bundle.min.mjs" };
const RUNS = /** @type {[string, any, number][]} */ ([
  ["cnn", { device: "wasm" }, 1e-6],
  ["cnn", { device: "wasm", ...WORKER }, 1e-6],
  ["cnn-fixed", { device: "wasm", threads: 2 }, 1e-6],
  ["frozen", { device: "wasm" }, 1e-6],
  ["integers", { device: "wasm" }, 1e-6],
  ["lstm", { device: "wasm" }, 1e-6],
  ["transformer", { device: "wasm" }, 1e-6],
  ["mlp-webgpu", { device: "webgpu" }, 1e-6],
]);

for (const [name, options, tolerance] of RUNS) {
  test(`${name} with ${JSON.stringify(options)}`, async () => {
    const { losses, evaluated, bytes, gpu } = await steps(name, options);
    const { losses: expected, after_steps: after } = json(`${name}/expected.json`);
    assert.ok(apart(Object.values(evaluated), Object.values(after)) < 1e-5);
    const difference = worst(losses, expected);
    console.log(`# ${name} ${JSON.stringify(options)}: ${difference.toExponential(1)}`);
    assert.ok(difference < tolerance, `${difference}`);
    if (options.device === "webgpu") {
      // the state stays on the GPU, and buffers that were replaced are freed
      assert.ok(gpu.created > 0 && gpu.created < gpu.state / 2, JSON.stringify(gpu));
      assert.equal(gpu.kept, 0);
    }
    assert.equal(bytes, fs.statSync(path.join(FOLDERS, name, "model.onnx")).size);
  });
}

test("steps in Python, in Chromium and in Python again are those of Python alone", async () => {
  const python = process.env["PYTHON"] ?? "python3";
  const folder = path.join(FOLDERS, "resume");
  execFileSync(python, ["tests/browser/resume.py", "begin", folder]);
  const { state } = await steps("resume", { device: "wasm" }, { first: 50, count: 50 });
  fs.writeFileSync(path.join(folder, "returned.safetensors"), Uint8Array.from(state));
  const result = execFileSync(python, ["tests/browser/resume.py", "finish", folder]);
  const difference = Number(result.toString());
  console.log(`# largest difference of a weight after 150 steps: ${difference.toExponential(1)}`);
  assert.ok(difference < 1e-5, `${difference}`);
});

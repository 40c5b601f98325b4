/**
 * Run models in Chromium for `make steps`: each line of standard input is a request, each line of
 * standard output its answer, both in JSON.
 *
 *     node scripts/run_steps.mjs webgpu|wasm
 *
 * Request: `{ model, inputs: [{ name, type, dims, data }] }`; answer: `{ outputs: [...] }` in the order
 * of the graph, or `{ error }`. Bytes are in base64.
 */

import readline from "node:readline";

import { launch } from "../tests/browser/chromium.mjs";
import { serve } from "./serve.mjs";

const provider = process.argv[2] ?? "wasm";
const server = await serve({ "": "tests/browser", ort: "node_modules/onnxruntime-web/dist" });
const browser = await launch();
const page = await browser.newPage();
await page.goto(`${server.url}steps.html?provider=${provider}`);
await page.waitForFunction("window.ready");

for await (const line of readline.createInterface({ input: process.stdin })) {
  const answer = await page
    .evaluate(
      (/** @type {any} */ request) => /** @type {any} */ (window).run(request),
      JSON.parse(line),
    )
    .catch((/** @type {Error} */ error) => ({ error: error.message }));
  console.log(JSON.stringify(answer));
}
await browser.close();
server.close();

/**
 * Bundle the page of examples/web into a folder that any static server can serve.
 *
 *     node scripts/build_web.mjs OUT
 */

import fs from "node:fs";
import path from "node:path";

import { build } from "esbuild";

const [, , out = "../build/web"] = process.argv;
const page = "../examples/web";
const runtime = "node_modules/onnxruntime-web/dist";

await build({
  entryPoints: [`${page}/src/main.ts`, `${page}/src/worker.ts`],
  outdir: out,
  alias: { onnxfit: "./dist/index.js", "onnxfit/worker": "./dist/worker.js" },
  bundle: true,
  splitting: true,
  format: "esm",
  target: "es2022",
  minify: true,
  sourcemap: true,
  // the WebGPU build of onnxruntime-web is only imported for device: "webgpu"
  external: ["onnxruntime-web/webgpu"],
});
for (const file of ["index.html", "style.css", "icon.svg"]) {
  fs.copyFileSync(path.join(page, file), path.join(out, file));
}
const wasm = "ort-wasm-simd-threaded.wasm";
fs.copyFileSync(path.join(runtime, wasm), path.join(out, wasm));

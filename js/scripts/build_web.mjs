/**
 * Bundle the pages of examples/web into a folder that any static server can serve.
 *
 *     node scripts/build_web.mjs OUT
 */

import fs from "node:fs";
import path from "node:path";

import { build } from "esbuild";

const [, , out = "../build/web"] = process.argv;
const page = "../examples/web";
const runtime = "node_modules/onnxruntime-web/dist";

/**
 * Bundle scripts into a folder, beside onnxruntime-web's .wasm file.
 *
 * @param {string} folder
 * @param {string[]} entryPoints
 * @param {string[]} files
 */
async function bundle(folder, entryPoints, files) {
  await build({
    entryPoints,
    outdir: folder,
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
  const wasm = path.join(runtime, "ort-wasm-simd-threaded.wasm");
  for (const file of [...files, wasm])
    fs.copyFileSync(file, path.join(folder, path.basename(file)));
}

await bundle(
  out,
  [`${page}/src/main.ts`, `${page}/src/worker.ts`],
  ["index.html", "style.css", "icon.svg"].map((file) => path.join(page, file)),
);
await bundle(
  path.join(out, "federated"),
  [`${page}/federated/page.ts`],
  [`${page}/federated/index.html`],
);

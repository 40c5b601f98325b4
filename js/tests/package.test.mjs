/** The package is small, and brings nothing of its own to install. */

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import fs from "node:fs";
import test from "node:test";
import zlib from "node:zlib";

import { build } from "esbuild";

const read = (/** @type {string} */ file) => JSON.parse(fs.readFileSync(file, "utf-8"));

test("the package is 17 kB, compressed", async () => {
  const { outputFiles } = await build({
    entryPoints: ["dist/index.js"],
    bundle: true,
    minify: true,
    write: false,
    format: "esm",
    external: ["onnxruntime-web/*"],
  });
  const size = zlib.gzipSync(outputFiles[0]?.contents ?? "").length;
  console.log(`# ${size} bytes`);
  assert.ok(size > 1000 && size < 17_500, `${size} bytes`);
});

test("onnxruntime is the only dependency, and a peer", () => {
  const { dependencies, peerDependencies } = read("package.json");
  assert.equal(dependencies, undefined);
  assert.deepEqual(Object.keys(peerDependencies).sort(), ["onnxruntime-node", "onnxruntime-web"]);
});

test("a package has the code, its source and the README", () => {
  const packed = execFileSync("npm", ["pack", "--dry-run", "--json", "--ignore-scripts"]);
  const files = JSON.parse(packed.toString())[0].files.map((/** @type {any} */ f) => f.path);
  const sources = fs.readdirSync("src").map((file) => file.replace(/\.ts$/, ""));
  const expected = sources.flatMap((name) => [
    `src/${name}.ts`,
    `dist/${name}.js`,
    `dist/${name}.d.ts`,
  ]);
  assert.equal(fs.readFileSync("LICENSE", "utf-8"), fs.readFileSync("../LICENSE", "utf-8"));
  assert.deepEqual(files.sort(), ["LICENSE", "README.md", "package.json", ...expected].sort());
});

test("the lock file names no registry, and has a hash of each package", () => {
  for (const [name, entry] of Object.entries(read("package-lock.json").packages)) {
    assert.equal(entry.resolved, undefined, name);
    assert.ok(name === "" || entry.integrity?.startsWith("sha512-"), name);
  }
});

test("the version is that of the Python package", () => {
  const source = fs.readFileSync("../onnxfit/__init__.py", "utf-8");
  assert.equal(read("package.json").version, /__version__ = "(.*)"/.exec(source)?.[1]);
});

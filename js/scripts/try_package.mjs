/**
 * Install the packed package into an empty folder, and run the README's JavaScript there.
 *
 *     node scripts/try_package.mjs ../dist/onnxfit-0.1.0.tgz
 *
 * tests/readme.test.mjs wrote that script, with the training folder that it reads, into
 * tests/folders/readme; a second argument names another place.
 */

import { execFileSync } from "node:child_process";
import fs from "node:fs";
import os from "node:os";
import path from "node:path";

const [, , tarball = "", readme = "tests/folders/readme"] = process.argv;
const folder = fs.mkdtempSync(path.join(os.tmpdir(), "onnxfit-"));
try {
  fs.cpSync(readme, folder, { recursive: true });
  fs.writeFileSync(path.join(folder, "package.json"), "{}");
  // The install script of onnxruntime-node downloads CUDA.
  const quietly = ["--ignore-scripts", "--no-audit", "--no-fund"];
  const packages = [path.resolve(tarball), "onnxruntime-node"];
  const options = /** @type {const} */ ({ cwd: folder, stdio: "inherit" });
  const npm = process.platform === "win32" ? "npm.cmd" : "npm";
  execFileSync(npm, ["install", ...quietly, ...packages], options);
  execFileSync(process.execPath, ["readme.mjs"], options);
} finally {
  fs.rmSync(folder, { recursive: true });
}

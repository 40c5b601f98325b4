/** The page docs/browser.md leads from Python to a page that trains, and back to Python. */

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import fs from "node:fs";
import path from "node:path";
import test from "node:test";

import { serve } from "../../scripts/serve.mjs";
import { FOLDERS } from "../helpers.mjs";
import { snippets } from "../snippets.mjs";
import { launch } from "./chromium.mjs";

const PYTHON = process.env["PYTHON"] ?? "python3";
const PAGE = "../docs/browser.md";

/**
 * Make a folder with the page of docs/browser.md and what Python writes for it.
 *
 * @param {string} name
 * @param {string} python
 */
function written(name, python) {
  const folder = path.resolve(FOLDERS, name);
  fs.rmSync(folder, { recursive: true, force: true });
  fs.mkdirSync(path.join(folder, "node_modules"), { recursive: true });
  fs.symlinkSync(path.resolve("."), path.join(folder, "node_modules/onnxfit"));
  const runtime = path.resolve("node_modules/onnxruntime-web");
  fs.symlinkSync(runtime, path.join(folder, "node_modules/onnxruntime-web"));
  execFileSync(PYTHON, ["-c", python], { cwd: folder });
  fs.writeFileSync(path.join(folder, "index.html"), snippets(PAGE, "html")[0] ?? "");
  fs.writeFileSync(path.join(folder, "main.js"), snippets(PAGE, "js")[0] ?? "");
  return folder;
}

test("a reader of docs/browser.md trains in a page and goes on in Python", async () => {
  const python = snippets(PAGE, "python");
  const folder = written("docs", python.slice(0, -1).join("\n"));
  const server = await serve({ "": folder });
  const browser = await launch();
  try {
    const page = await browser.newPage();
    await page.goto(server.url);
    await page.waitForSelector("#save:enabled");
    assert.match((await page.textContent("output")) ?? "", /^Epoch 5: accuracy 0\.[89]/);
    const download = page.waitForEvent("download");
    await page.click("#save");
    fs.copyFileSync(await (await download).path(), `${folder}/state.safetensors`);
    for (const file of [
      "digits.safetensors",
      "training/manifest.json",
      "main.js",
      "node_modules",
    ]) {
      fs.renameSync(`${folder}/${file}`, `${folder}/moved`);
      await page.goto(server.url);
      await page.waitForFunction(
        () => !/Loading/.test(document.querySelector("output")?.textContent ?? "Loading"),
      );
      assert.match((await page.textContent("output")) ?? "", /^Error: .*(digits|manifest|main)/);
      fs.renameSync(`${folder}/moved`, `${folder}/${file}`);
    }
  } finally {
    await browser.close();
    server.close();
  }
  // A new session of Python has the data, and no trainer yet.
  const data = (python[0] ?? "").replace(/^trainer.*$|^assert.*$/gm, "");
  const printed = execFileSync(PYTHON, ["-c", `${data}\n${python.at(-1)}`], {
    cwd: folder,
    encoding: "utf-8",
  });
  assert.equal(printed.trim(), "7 True");
});

test("the page trains the integers of docs/browser-from-nothing.md", async () => {
  const python = snippets("../docs/browser-from-nothing.md", "python").join("\n");
  const server = await serve({ "": written("integers-docs", python) });
  const browser = await launch();
  try {
    const page = await browser.newPage();
    await page.goto(server.url);
    await page.waitForSelector("#save:enabled");
    assert.match((await page.textContent("output")) ?? "", /^Epoch 5: accuracy 0\.[89]/);
  } finally {
    await browser.close();
    server.close();
  }
});

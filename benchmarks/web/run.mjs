/**
 * Time a training step in Python, in Node and in Chromium, beside TensorFlow.js.
 *
 *     PYTHON=python3 node run.mjs [OUT] [ROUNDS] [CONTENDERS]
 *
 * The contenders take turns. The figure of each is its least time of a step over all turns, since
 * other work on a machine can only add to a time. CONTENDERS is a regular expression. OUT gets web.md.
 */

import { execFileSync, spawn } from "node:child_process";
import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import readline from "node:readline";

import { serve } from "../../js/scripts/serve.mjs";
import * as onnxfit from "../../js/dist/index.js";
import { launch } from "../../js/tests/browser/chromium.mjs";
import { onnxfitStep, timed } from "./onnxfit.mjs";

const [, , out = "../../build/bench-web", rounds = "8", only = ""] = process.argv;
const PYTHON = process.env["PYTHON"] ?? "python3";
const STEPS = 20;
const NETWORKS = { cnn: "CNN of examples/web, 27,834 weights", mlp: "MLP 784-256-128-10" };
const WEBGL = ["--enable-unsafe-swiftshader", "--use-gl=angle", "--use-angle=swiftshader"];

function pythonContender(threads) {
  return async (network) => {
    const child = spawn(PYTHON, ["native.py", "serve", String(threads)], {
      stdio: ["pipe", "pipe", "inherit"],
    });
    const answers = readline.createInterface({ input: child.stdout })[Symbol.asyncIterator]();
    return {
      async steps(count) {
        child.stdin.write(`${network} ${count}\n`);
        return JSON.parse((await answers.next()).value);
      },
      close: () => child.stdin.end(),
    };
  };
}

function nodeContender(threads) {
  return async (network) => {
    const began = performance.now();
    const data = fs.readFileSync(path.join(out, network, "data.safetensors"));
    const module = (await import("../../js/node_modules/onnxruntime-node/dist/index.js")).default;
    const options = { ort: module, threads };
    const step = await onnxfitStep(onnxfit, path.join(out, network), data, options);
    const losses = [await step()];
    const first = performance.now() - began;
    return {
      async steps(count) {
        const result = await timed(step, count);
        return { ...result, first, losses: [...losses, ...result.losses] };
      },
      close() {},
    };
  };
}

function pageContender(options) {
  return async (network) => {
    const server = await serve({
      "": ".",
      dist: "../../js/dist",
      ort: "../../js/node_modules/onnxruntime-web/dist",
      folders: out,
      tf: "node_modules/@tensorflow/tfjs/dist",
      tfwasm: "node_modules/@tensorflow/tfjs-backend-wasm/dist",
    });
    const browser = await launch(options.backend === "webgl" ? WEBGL : []);
    const close = async () => {
      await browser.close();
      server.close();
    };
    try {
      const page = await browser.newPage();
      await page.goto(`${server.url}page.html`);
      await page.waitForFunction("window.ready");
      const start = await page.evaluate((o) => window.start(o), { network, ...options });
      const own = /page\.html|data\.safetensors|\/$/;
      const files = [...server.sent].filter(([name]) => !own.test(name));
      const kilobytes = files.reduce((sum, [, size]) => sum + size, 0) / 1000;
      return {
        async steps(count) {
          const result = await page.evaluate((n) => window.timed(window.step, n), count);
          return { ...result, first: start.first, losses: [...start.losses, ...result.losses] };
        },
        kilobytes,
        close,
      };
    } catch (error) {
      await close();
      throw error;
    }
  };
}

const CONTENDERS = {
  "Python, 1 thread": pythonContender(1),
  "Python, 2 threads": pythonContender(2),
  "Node, 1 thread": nodeContender(1),
  "Node, 2 threads": nodeContender(2),
  "Chromium, wasm, 1 thread": pageContender({ library: "onnxfit", threads: 1 }),
  "Chromium, wasm, 2 threads": pageContender({ library: "onnxfit", threads: 2 }),
  "TensorFlow.js, wasm, 1 thread": pageContender({ library: "tf", backend: "wasm", threads: 1 }),
  "TensorFlow.js, wasm, 2 threads": pageContender({ library: "tf", backend: "wasm", threads: 2 }),
  "TensorFlow.js, cpu": pageContender({ library: "tf", backend: "cpu" }),
  "TensorFlow.js, webgl in software": pageContender({ library: "tf", backend: "webgl" }),
};

/** Start all contenders, let them take turns, and return a row for each. */
async function measure(network) {
  const rows = [];
  for (const [name, start] of Object.entries(CONTENDERS)) {
    if (!new RegExp(only).test(name)) continue;
    try {
      rows.push({ network, name, times: [], contender: await start(network) });
    } catch (error) {
      rows.push({ network, name, times: [], error: String(error.message).split("\n")[0] });
    }
  }
  for (let round = 0; round < Number(rounds); round += 1) {
    for (const row of rows.filter(({ contender }) => contender !== undefined)) {
      const { losses, times, first } = await row.contender.steps(STEPS);
      row.losses ??= losses;
      row.first ??= first;
      row.kilobytes ??= row.contender.kilobytes;
      row.times.push(...times.slice(times.length > 1 ? 1 : 0));
    }
  }
  for (const { contender } of rows) await contender?.close();
  return rows;
}

const digits = (value, unit = "") =>
  value === undefined ? "–" : `${Number(value.toPrecision(2)).toLocaleString("en")}${unit}`;

function table(rows) {
  const lines = [
    "| | a step | of Python's | until the first step | download |",
    "|---|---:|---:|---:|---:|",
  ];
  const least = Math.min(...rows.filter(({ name }) => /^Python/.test(name)).map((r) => r.least));
  for (const { name, least: own, first, kilobytes, error } of rows) {
    lines.push(
      error === undefined
        ? `| ${name} | ${digits(own, " ms")} | ${digits(own / least)} | ${digits(first / 1000, " s")} | ` +
            `${digits(kilobytes && kilobytes / 1000, " MB")} |`
        : `| ${name} | ✘ ${error.replace(/^.*?Error: /, "")} | | | |`,
    );
  }
  return lines.join("\n");
}

const before = os.loadavg()[0];
execFileSync(PYTHON, ["native.py", "write", out]);
const all = [];
const pages = [];
for (const [network, title] of Object.entries(NETWORKS)) {
  const rows = await measure(network);
  for (const row of rows) row.least = row.error === undefined ? Math.min(...row.times) : undefined;
  all.push(...rows);
  pages.push(`**${title}, batch 32, Adam**`, table(rows));
  console.log(rows.map((row) => `${row.name}: ${row.error ?? row.losses.slice(0, 4)}`).join("\n"));
}
const load = [before, os.loadavg()[0]].map((value) => value.toFixed(1)).join(" and ");
const machine = `${os.cpus().length} × ${os.cpus()[0].model}; load before and after: ${load}`;
const text = `${pages.join("\n\n")}\n\nMachine: ${machine}.\n`;
console.log(text);
fs.writeFileSync(path.join(out, "web.md"), text);

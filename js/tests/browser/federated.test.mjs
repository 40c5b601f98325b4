/** The pages of examples/web/federated: three train one network, and show no digit to each other. */

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import test from "node:test";

import { launch } from "./chromium.mjs";

const PYTHON = process.env["PYTHON"] ?? "python3";
const FOLDER = `${process.env["ONNXFIT_PAGE"] ?? "../build/web"}/federated`;
const PAGES = [0, 1, 2];

/** @returns {Promise<{ url: string, stop: () => void }>} */
function startServer() {
  const server = spawn(PYTHON, ["../examples/web/federated/server.py", FOLDER, "0"], {
    stdio: ["ignore", "pipe", "ignore"],
  });
  return new Promise((resolve, reject) => {
    server.on("exit", (code) => reject(new Error(`the server ended with ${code}`)));
    server.stdout.on("data", (text) => {
      const url = /http:\/\/127\.0\.0\.1:\d+\//.exec(String(text))?.[0];
      if (url) resolve({ url, stop: () => server.kill() });
    });
  });
}

/** @param {import("playwright-core").Browser} browser @param {string} address */
async function accuracyOf(browser, address) {
  const page = await browser.newPage();
  await page.goto(address);
  await page.waitForFunction(() => {
    const status = document.querySelector("#status")?.textContent ?? "";
    return /^Done|error/.test(status);
  });
  assert.equal(await page.locator("#status").textContent(), "Done");
  const last = await page.locator("#rounds tr").last().locator("td").last().textContent();
  await page.close();
  return Number.parseFloat(last ?? "");
}

test("three pages together know more digits than each alone", async () => {
  const server = await startServer();
  const browser = await launch();
  try {
    const alone = await Promise.all(
      PAGES.map((page) => accuracyOf(browser, `${server.url}?page=${page}&alone`)),
    );
    const together = await Promise.all(
      PAGES.map((page) => accuracyOf(browser, `${server.url}?page=${page}`)),
    );
    console.log(`# accuracy of all digits: alone ${alone} %, together ${together} %`);
    assert.ok(Math.max(...alone) < 60, `${alone}`);
    assert.ok(Math.min(...together) > 85, `${together}`);
    assert.equal(new Set(together).size, 1);
  } finally {
    await browser.close();
    server.stop();
  }
});

/** The page of examples/web: draw, train, and see the drawn digits recognised. */

import assert from "node:assert/strict";
import fs from "node:fs";
import test from "node:test";

import { serve } from "../../scripts/serve.mjs";
import { launch } from "./chromium.mjs";
import { draw, randomNumbers } from "./pen.mjs";

const PAGE = process.env["ONNXFIT_PAGE"] ?? "../build/web";
const SHOTS = process.env["ONNXFIT_SHOTS"];
const SIZES = { desktop: { width: 1100, height: 900 }, phone: { width: 390, height: 844 } };

for (const [name, viewport] of Object.entries(SIZES)) {
  test(`a network adapts to a mirrored handwriting (${name})`, async () => {
    const server = await serve({ "": PAGE });
    const browser = await launch();
    try {
      const page = await browser.newPage({ viewport });
      /** @type {string[]} */
      const errors = [];
      page.on("pageerror", (error) => errors.push(error.message));
      page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
      /** @param {string} moment */
      const shoot = async (moment) => {
        if (SHOTS === undefined) return;
        await page.screenshot({ path: `${SHOTS}/${name}-${moment}.png`, fullPage: true });
      };
      const random = randomNumbers(7);
      await page.goto(server.url);
      await page.waitForFunction(
        () => document.querySelector("#train")?.textContent !== "Loading …",
      );
      await shoot("start");
      const before = await teach(page, random);
      await shoot("drawn");
      await page.click("#train");
      await page.waitForFunction(() => document.querySelector("#train")?.textContent === "Stop");
      await page.waitForFunction(() => document.querySelector("#train")?.textContent !== "Stop");
      const trained = await page.locator("#right").textContent();
      await shoot("trained");
      const after = await teach(page, random, () => shoot("guess"));
      console.log(
        `# ${name}: new drawings right ${before} of 10, then ${after}; trained ${trained}`,
      );
      assert.equal(trained, "10/10");
      assert.ok(after >= 9, `${after}`);
      assert.ok(before <= 7, "the handwriting is too easy to show anything");
      const download = page.waitForEvent("download");
      await page.click("#model");
      const file = await (await download).path();
      assert.equal(fs.statSync(file).size, fs.statSync(`${PAGE}/training/model.onnx`).size);
      assert.notDeepEqual(fs.readFileSync(file), fs.readFileSync(`${PAGE}/training/model.onnx`));
      await page.click("#reset");
      await page.waitForFunction(() => document.querySelector("#right")?.textContent === "–");
      const width = await page.evaluate(() => document.documentElement.scrollWidth);
      assert.ok(width <= viewport.width, `the page is ${width} pixels wide`);
      assert.deepEqual(errors, []);
      const sum = [...server.sent.values()].reduce((a, b) => a + b, 0);
      console.log(`# ${name}: ${Math.round(sum / 1000)} kB sent`, Object.fromEntries(server.sent));
    } finally {
      await browser.close();
      server.close();
    }
  });
}

/**
 * Draw each digit and tell the page what it is; return how many it guessed.
 *
 * @param {import("playwright-core").Page} page
 * @param {() => number} random
 * @param {() => Promise<void>} [seen]
 */
async function teach(page, random, seen) {
  let right = 0;
  for (let digit = 0; digit < 10; digit += 1) {
    await draw(page, digit, random);
    await page.waitForTimeout(250); // the last guess
    const guess = await page.locator("#digits .best").textContent();
    if (guess === String(digit)) right += 1;
    if (digit === 3) await seen?.();
    const count = await page.locator("#examples li").count();
    await page.locator("#digits button").nth(digit).click();
    await page.waitForFunction((n) => document.querySelectorAll("#examples li").length > n, count);
  }
  return right;
}

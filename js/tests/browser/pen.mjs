/** A hand that draws digits with the mouse: strokes of a handwriting, a little different each time. */

/** Digit -> strokes; each point is [x, y], from the left and the top. */
const WRITING = /** @type {Record<string, [number, number][][]>} */ ({
  0: [
    [
      [50, 12],
      [28, 22],
      [20, 50],
      [28, 78],
      [50, 88],
      [72, 78],
      [80, 50],
      [72, 22],
      [50, 12],
    ],
    [
      [72, 20],
      [28, 80],
    ],
  ],
  1: [
    [
      [22, 40],
      [52, 12],
      [52, 88],
    ],
    [
      [28, 88],
      [76, 88],
    ],
  ],
  2: [
    [
      [22, 26],
      [40, 12],
      [66, 14],
      [74, 32],
      [60, 54],
      [30, 78],
      [24, 88],
      [36, 80],
      [52, 88],
      [80, 82],
    ],
  ],
  3: [
    [
      [24, 14],
      [76, 14],
      [46, 42],
      [70, 54],
      [74, 74],
      [52, 88],
      [24, 80],
    ],
  ],
  4: [
    [
      [60, 12],
      [22, 62],
      [80, 62],
    ],
    [
      [62, 40],
      [58, 90],
    ],
  ],
  5: [
    [
      [76, 12],
      [32, 12],
      [28, 46],
      [56, 42],
      [74, 58],
      [70, 80],
      [46, 90],
      [22, 80],
    ],
  ],
  6: [
    [
      [66, 10],
      [38, 36],
      [26, 66],
      [42, 88],
      [66, 82],
      [70, 62],
      [50, 54],
      [30, 66],
    ],
  ],
  7: [
    [
      [20, 14],
      [78, 14],
      [44, 88],
    ],
    [
      [32, 50],
      [70, 50],
    ],
  ],
  8: [
    [
      [70, 20],
      [44, 10],
      [28, 26],
      [52, 48],
      [74, 70],
      [52, 90],
      [26, 74],
      [50, 48],
      [70, 20],
    ],
  ],
  9: [
    [
      [70, 34],
      [50, 46],
      [30, 34],
      [40, 12],
      [66, 14],
      [70, 34],
      [66, 66],
      [44, 90],
    ],
  ],
});

/** @param {number} seed */
export function randomNumbers(seed) {
  let state = seed >>> 0;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

/**
 * Draw a digit on the page's pad, mirrored, as no digit of the data set is.
 *
 * @param {import("playwright-core").Page} page
 * @param {number} digit
 * @param {() => number} random
 */
export async function draw(page, digit, random) {
  await page.locator("#pad").scrollIntoViewIfNeeded();
  const box = await page.locator("#pad").boundingBox();
  if (box === null) throw new Error("there is no pad");
  const wobble = () => 5 * (random() - 0.5);
  const lean = 0.3 * (random() - 0.5);
  for (const stroke of WRITING[digit] ?? []) {
    const points = stroke.map(([x, y]) => {
      const [across, down] = [100 - x + wobble() + lean * (50 - y), y + wobble()];
      return [box.x + (across / 100) * box.width, box.y + (down / 100) * box.height];
    });
    const [first, ...rest] = /** @type {[number, number][]} */ (points);
    if (first === undefined) continue;
    await page.mouse.move(...first);
    await page.mouse.down();
    for (const point of rest) await page.mouse.move(...point, { steps: 3 });
    await page.mouse.up();
  }
}

/** The code of a page of documentation. */

import fs from "node:fs";

/**
 * Return the blocks of a language, in their order.
 *
 * @param {string} page
 * @param {string} language
 * @returns {string[]}
 */
export function snippets(page, language) {
  const text = fs.readFileSync(page, "utf-8");
  const fence = new RegExp(`^\`\`\`${language}\\n(.*?)^\`\`\``, "gms");
  return [...text.matchAll(fence)].map((match) => match[1] ?? "");
}

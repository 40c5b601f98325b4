/**
 * A static server on loopback, isolated across origins so that WebAssembly may have threads.
 *
 *     node scripts/serve.mjs FOLDER [PORT]
 */

import fs from "node:fs";
import http from "node:http";
import path from "node:path";
import { fileURLToPath } from "node:url";
import zlib from "node:zlib";

const TYPES = /** @type {Record<string, string>} */ ({
  ".css": "text/css",
  ".html": "text/html; charset=utf-8",
  ".js": "text/javascript",
  ".json": "application/json",
  ".mjs": "text/javascript",
  ".svg": "image/svg+xml",
  ".wasm": "application/wasm",
});

/**
 * Serve folders by the first part of the path; "" is the folder of all others.
 *
 * @param {Record<string, string>} folders
 * @param {number} [port]
 * @returns {Promise<{ url: string, sent: Map<string, number>, close: () => void }>}
 */
export async function serve(folders, port = 0) {
  /** @type {Map<string, number>} */
  const sent = new Map();
  const server = http.createServer((request, response) => {
    const { pathname } = new URL(request.url ?? "/", "http://localhost");
    const [first = "", ...rest] = decodeURIComponent(pathname).slice(1).split("/");
    const [root, parts] = Object.hasOwn(folders, first)
      ? [folders[first], rest]
      : [folders[""], [first, ...rest]];
    let file = path.resolve(root ?? ".", ...parts);
    if (root !== undefined && fs.statSync(file, { throwIfNoEntry: false })?.isDirectory()) {
      file = path.join(file, "index.html");
    }
    const isInside = root !== undefined && file.startsWith(path.resolve(root) + path.sep);
    if (!isInside || !fs.statSync(file, { throwIfNoEntry: false })?.isFile()) {
      response.writeHead(404).end();
      return;
    }
    const body = fs.readFileSync(file);
    const zipped = /\bgzip\b/.test(String(request.headers["accept-encoding"]));
    const content = zipped ? zlib.gzipSync(body) : body;
    sent.set(pathname, content.length);
    response.writeHead(200, {
      "content-type": TYPES[path.extname(file)] ?? "application/octet-stream",
      ...(zipped ? { "content-encoding": "gzip" } : {}),
      "cache-control": "no-store",
      "cross-origin-opener-policy": "same-origin",
      "cross-origin-embedder-policy": "require-corp",
    });
    response.end(content);
  });
  await new Promise((resolve) => server.listen(port, "127.0.0.1", () => resolve(undefined)));
  const address = /** @type {import("node:net").AddressInfo} */ (server.address());
  return { url: `http://127.0.0.1:${address.port}/`, sent, close: () => server.close() };
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const [, , folder = ".", port = "8000"] = process.argv;
  const { url } = await serve({ "": folder }, Number(port));
  console.log(`Serving ${folder} at ${url} (Ctrl-C stops)`);
}

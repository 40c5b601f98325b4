/**
 * The script of the worker. Import it in a worker of your own, as `import "onnxfit/worker"`, where
 * a bundler does not follow `new Worker(new URL("./worker.js", import.meta.url))`.
 */

import { LocalEngine } from "./engine.js";
import type { Answer, Request } from "./remote.js";
import type { RuntimeOptions } from "./runtime.js";

let engine: LocalEngine | undefined;

globalThis.onmessage = async ({ data: { id, method, values } }: MessageEvent<Request>) => {
  let answer: Answer;
  try {
    if (method === "create") {
      engine = await LocalEngine.create(values[0] as RuntimeOptions);
      answer = { id };
    } else {
      const task = engine![method] as (...values: unknown[]) => Promise<unknown>;
      answer = { id, value: await task.apply(engine, values) };
    }
  } catch (error) {
    const { name, message } = error as Error;
    answer = { id, error: { name, message } };
  }
  globalThis.postMessage(answer);
};

/** The engine in a Web Worker: messages there and back. */

import * as errors from "./errors.js";
import type { Engine } from "./engine.js";
import type { RuntimeOptions } from "./runtime.js";

/** A call of a method of the engine; "create" makes it. */
export interface Request {
  id: number;
  method: "create" | keyof Engine;
  values: unknown[];
}

export interface Answer {
  id: number;
  value?: unknown;
  error?: { name: string; message: string };
}

/** What the worker mode needs of a Worker. */
export interface WorkerLike {
  postMessage(message: unknown): void;
  terminate(): void;
  onmessage: ((event: MessageEvent) => void) | null;
  onerror: ((event: ErrorEvent) => void) | null;
}

type Waiting = { resolve: (value: any) => void; reject: (error: unknown) => void };

/** Start the engine in the worker. */
export async function remoteEngine(worker: WorkerLike, options: RuntimeOptions): Promise<Engine> {
  const waiting = new Map<number, Waiting>();
  let count = 0;
  worker.onmessage = ({ data }: MessageEvent<Answer>) => {
    const call = waiting.get(data.id);
    waiting.delete(data.id);
    if (data.error === undefined) call?.resolve(data.value);
    else call?.reject(errorOf(data.error));
  };
  worker.onerror = (event) => {
    const error = new errors.InstallationError(
      `The worker cannot run: ${event.message || "its script cannot be loaded"}. Give ` +
        'Trainer.load(..., {worker}) a Worker whose script imports "onnxfit/worker".',
    );
    for (const { reject } of waiting.values()) reject(error);
    waiting.clear();
  };
  const call = (method: Request["method"], ...values: unknown[]) =>
    new Promise<any>((resolve, reject) => {
      count += 1;
      waiting.set(count, { resolve, reject });
      worker.postMessage({ id: count, method, values } satisfies Request);
    });
  await call("create", options);
  return {
    open: (...values) => call("open", ...values),
    run: (...values) => call("run", ...values),
    getState: (...values) => call("getState", ...values),
    setState: (...values) => call("setState", ...values),
    close: async () => {
      await call("close");
      worker.terminate();
    },
  };
}

/** Return an error of the class that was thrown in the worker. */
function errorOf({ name, message }: { name: string; message: string }): Error {
  const known = (errors as Record<string, unknown>)[name];
  if (typeof known !== "function") return new errors.StepError(`${name}: ${message}`);
  return new (known as new (message: string) => Error)(message);
}

/** Find onnxruntime for a device. */

import type * as ort from "onnxruntime-common";

import { InstallationError, reasonOf, SettingError, shown } from "./errors.js";

export type Runtime = typeof ort;

/** "cpu" is onnxruntime-node; "wasm" and "webgpu" are onnxruntime-web. */
export type Device = "wasm" | "webgpu" | "cpu";

export interface RuntimeOptions {
  /** Where the graphs run. Default: "cpu" in Node, else "wasm". */
  device?: Device;
  /** The module of onnxruntime, or its URL, where it is not to be imported by its name. */
  ort?: Runtime | string;
  /** Folder or URL of onnxruntime-web's .wasm files, if they do not lie beside its script. */
  wasmPaths?: string;
  /** Threads of a graph; several need a page that is cross-origin isolated. */
  threads?: number;
}

const DEVICES = ["wasm", "webgpu", "cpu"];

export const inNode = typeof process !== "undefined" && Boolean(process.versions?.node);

export function deviceOf(options: RuntimeOptions): Device {
  const device = options.device ?? (inNode ? "cpu" : "wasm");
  if (!DEVICES.includes(device)) {
    throw new SettingError(`device is one of ${DEVICES.join(", ")}, got ${shown(device)}.`);
  }
  if (device === "cpu" && !inNode) {
    throw new SettingError(
      'device "cpu" is onnxruntime-node, which browsers lack: use "wasm" or "webgpu".',
    );
  }
  return device;
}

/** Import onnxruntime for the device, and set its options. */
export async function loadRuntime(options: RuntimeOptions): Promise<Runtime> {
  const device = deviceOf(options);
  if (device === "webgpu") await requireAdapter();
  const runtime = await imported(device, options.ort);
  if (device !== "cpu") {
    const { wasm } = runtime.env;
    if (options.wasmPaths !== undefined) wasm.wasmPaths = options.wasmPaths;
    if (options.threads !== undefined) wasm.numThreads = options.threads;
  }
  return runtime;
}

async function imported(device: Device, given: Runtime | string | undefined): Promise<Runtime> {
  if (typeof given === "object") return withoutDefault(given);
  const name = device === "cpu" ? "onnxruntime-node" : "onnxruntime-web";
  try {
    if (given !== undefined) return withoutDefault(await import(/* @vite-ignore */ given));
    // a name in a variable keeps bundlers for browsers from looking for onnxruntime-node
    if (device === "cpu") return withoutDefault(await import(/* @vite-ignore */ name));
    if (device === "webgpu") return (await import("onnxruntime-web/webgpu")) as unknown as Runtime;
    return (await import("onnxruntime-web/wasm")) as unknown as Runtime;
  } catch (error) {
    throw new InstallationError(
      `Cannot import ${given ?? name} for the device "${device}": ${reasonOf(error)}. ` +
        `Install it (npm install ${name}), or give Trainer.load(..., {ort}).`,
      { cause: error },
    );
  }
}

/** CommonJS packages have everything in their default export. */
function withoutDefault(module: Runtime & { default?: Runtime }): Runtime {
  return "InferenceSession" in module ? module : (module as { default: Runtime }).default;
}

async function requireAdapter(): Promise<void> {
  const { gpu } = globalThis.navigator as { gpu?: { requestAdapter(): Promise<unknown> } };
  if (gpu !== undefined && (await gpu.requestAdapter()) !== null) return;
  throw new InstallationError(
    `${gpu === undefined ? "This browser has no WebGPU" : "WebGPU found no adapter"}: use ` +
      'device "wasm", or a browser and a graphics driver with WebGPU. Pages need https or ' +
      "localhost for it.",
  );
}

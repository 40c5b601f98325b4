/** Read the files of a training folder, and check each against the manifest. */

import { ModelError, reasonOf, SettingError, shown } from "./errors.js";
import { type Manifest, parseManifest } from "./manifest.js";

/** A function that returns the bytes of a file of the folder, by its name. */
export type FileReader = (file: string) => Promise<Uint8Array | ArrayBuffer>;

/** A folder: a URL, a path (in Node), or a function that reads a file. */
export type FolderSource = string | URL | FileReader;

export class TrainingFolder {
  private constructor(
    private readonly source: FileReader,
    readonly manifest: Manifest,
  ) {}

  /** Read the manifest. */
  static async open(source: FolderSource): Promise<TrainingFolder> {
    const reader = readerOf(source);
    const bytes = await readFile(reader, "manifest.json");
    return new TrainingFolder(reader, parseManifest(new TextDecoder().decode(bytes)));
  }

  /** Return the bytes of a file, whose size and SHA-256 are those of the manifest. */
  async read(file: string): Promise<Uint8Array> {
    const { files } = this.manifest;
    if (!Object.hasOwn(files, file)) {
      throw new ModelError(`The manifest names the file ${shown(file)}, and lists no hash of it.`);
    }
    const expected = files[file]!;
    const bytes = await readFile(this.source, file);
    if (bytes.length !== expected.bytes) {
      throw new ModelError(
        `${file} has ${bytes.length} bytes, and the manifest expects ${expected.bytes}. Copy ` +
          "the whole folder again.",
      );
    }
    // browsers offer hashes on https and on localhost only
    if (globalThis.crypto?.subtle !== undefined) {
      const digest = await crypto.subtle.digest("SHA-256", bytes as Uint8Array<ArrayBuffer>);
      if (hex(digest) !== expected.sha256) {
        throw new ModelError(
          `${file} is not the file that the manifest describes: its SHA-256 differs. Copy ` +
            "the whole folder again.",
        );
      }
    }
    return bytes;
  }
}

function hex(digest: ArrayBuffer): string {
  return [...new Uint8Array(digest)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function readFile(reader: FileReader, file: string): Promise<Uint8Array> {
  try {
    const bytes = await reader(file);
    return ArrayBuffer.isView(bytes)
      ? new Uint8Array(bytes.buffer, bytes.byteOffset, bytes.byteLength)
      : new Uint8Array(bytes);
  } catch (error) {
    throw new ModelError(`Cannot read ${file} of the training folder: ${reasonOf(error)}.`, {
      cause: error,
    });
  }
}

function readerOf(source: FolderSource): FileReader {
  if (typeof source === "function") return source;
  if (!(typeof source === "string" || source instanceof URL) || String(source) === "") {
    throw new SettingError(
      "Trainer.load needs the URL or the path of a training folder, or a function that reads " +
        `its files; got ${shown(source)}.`,
    );
  }
  const isWeb = /^(https?|blob|data):/.test(String(source));
  if (!isWeb && typeof process !== "undefined" && process.versions?.node) return diskReader(source);
  const page = typeof location === "undefined" ? undefined : location.href;
  const base = new URL(source, page);
  if (!base.pathname.endsWith("/")) base.pathname += "/";
  return async (file) => {
    const url = new URL(encodeURIComponent(file), base);
    const response = await fetch(url);
    if (!response.ok) throw new Error(`${url} answered ${response.status} ${response.statusText}`);
    return response.arrayBuffer();
  };
}

function diskReader(source: string | URL): FileReader {
  return async (file) => {
    // the names stand in variables, so that bundlers for browsers do not look for them
    const [fsName, urlName, pathName] = ["node:fs/promises", "node:url", "node:path"];
    const fs: typeof import("node:fs/promises") = await import(fsName);
    const { fileURLToPath }: typeof import("node:url") = await import(urlName);
    const { join }: typeof import("node:path") = await import(pathName);
    const isUrl = source instanceof URL || source.startsWith("file:");
    return fs.readFile(join(isUrl ? fileURLToPath(source) : source, file));
  };
}

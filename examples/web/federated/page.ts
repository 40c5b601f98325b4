/** A page that trains on its own digits, and shares weights with two others by a server. */

import { readSafetensors, Trainer, writeSafetensors } from "onnxfit";

const ROUNDS = 20;
const PAUSE = 50; // milliseconds between questions for the next mean

const query = new URLSearchParams(location.search);
const page = Number(query.get("page") ?? 0);
const isAlone = query.has("alone"); // without a server, for comparison

async function file(name: string): Promise<Uint8Array> {
  const response = await fetch(name);
  if (!response.ok) throw new Error(`${name} answered ${response.status}`);
  return new Uint8Array(await response.arrayBuffer());
}

/** Wait for the mean of a version, and put it in the place of the trainer's weights. */
async function takeMean(trainer: Trainer, version: number): Promise<void> {
  for (;;) {
    const response = await fetch("weights");
    if (Number(response.headers.get("version")) >= version) {
      const bytes = new Uint8Array(await response.arrayBuffer());
      return trainer.setWeights(readSafetensors(bytes).tensors);
    }
    await response.body?.cancel();
    await new Promise((resolve) => setTimeout(resolve, PAUSE));
  }
}

async function sendWeights(trainer: Trainer, version: number, rows: number): Promise<void> {
  const body = writeSafetensors(await trainer.getWeights()) as Uint8Array<ArrayBuffer>;
  const address = `weights?version=${version}&page=${page}&rows=${rows}`;
  const response = await fetch(address, { method: "POST", body });
  if (!response.ok) throw new Error(await response.text());
}

function show(...cells: string[]): void {
  const row = document.createElement("tr");
  for (const text of cells) row.appendChild(document.createElement("td")).textContent = text;
  document.querySelector("#rounds")!.append(row);
}

function tell(text: string): void {
  document.querySelector("#status")!.textContent = text;
}

async function main(): Promise<void> {
  const [trainer, own, all] = await Promise.all([
    Trainer.load("training/", { device: "wasm", threads: 1 }),
    file(`page-${page}.safetensors`),
    file("test.safetensors"),
  ]);
  const [mine, test] = [own, all].map((bytes) => readSafetensors(bytes).tensors);
  const [x, y] = [mine!.get("x")!, mine!.get("y")!];
  const rows = y.data.length;
  tell(`Training on ${rows} digits …`);
  for (let round = 0; round < ROUNDS; round += 1) {
    if (!isAlone) await takeMean(trainer, round);
    const { history } = await trainer.fit(x, y, { batchSize: 16 });
    if (!isAlone) {
      await sendWeights(trainer, round, rows);
      await takeMean(trainer, round + 1);
    }
    const { accuracy } = await trainer.evaluate(test!.get("x")!, test!.get("y")!);
    show(`${round + 1}`, history["loss"]![0]!.toFixed(3), `${(100 * accuracy!).toFixed(1)} %`);
  }
  tell("Done");
}

main().catch((error: unknown) => tell(`It ended with an error: ${error}`));

/** The network of the page: it guesses digits, and learns from drawings. */

import { readSafetensors, Trainer } from "onnxfit";

import { randomChange, SIDE, type Stroke, toImage } from "./drawing.js";

export interface Example {
  strokes: Stroke[];
  image: Float32Array;
  label: number;
}

export interface Progress {
  onStep(loss: number): void;
  onEpoch(accuracy: number): void;
}

const PIXELS = SIDE * SIDE;
const EPOCHS = 8;
const LEARNING_RATE = 0.002;
const VARIATIONS = 240; // of all drawings together

export class Learner {
  private constructor(
    private readonly trainer: Trainer,
    private readonly untrained: Uint8Array,
    private readonly known: readonly Omit<Example, "strokes">[],
  ) {}

  /** Load the network into a worker, and the digits that it already knows. */
  static async load(): Promise<Learner> {
    const worker = new Worker(new URL("worker.js", import.meta.url), {
      type: "module",
    });
    const [trainer, digits] = await Promise.all([
      Trainer.load("training/", { worker, threads: 1 }),
      fetch("digits.safetensors").then((response) => response.arrayBuffer()),
    ]);
    trainer.learningRate = LEARNING_RATE;
    const { tensors } = readSafetensors(new Uint8Array(digits));
    const [images, labels] = ["images", "labels"].map(
      (name) => tensors.get(name)!.data as Uint8Array,
    );
    const known = Array.from(labels!, (label, i) => ({
      image: Float32Array.from(
        images!.subarray(i * PIXELS, (i + 1) * PIXELS),
        (value) => value / 16,
      ),
      label,
    }));
    return new Learner(trainer, await trainer.save(), known);
  }

  /** Return ten probabilities for each image. */
  async guess(images: readonly Float32Array[]): Promise<Float32Array[]> {
    const { data } = await this.trainer.predict(stacked(images));
    const logits = data as Float32Array;
    return images.map((_, i) => softmax(logits.subarray(10 * i, 10 * (i + 1))));
  }

  /** Train on variations of the drawings, and on digits that are known already. */
  async learn(
    drawings: readonly Example[],
    progress: Progress,
    signal: AbortSignal,
  ): Promise<void> {
    const each = Math.max(8, Math.ceil(VARIATIONS / drawings.length));
    const varied = drawings.flatMap(({ strokes, label }) =>
      Array.from({ length: each }, () => ({
        image: toImage(strokes, randomChange()),
        label,
      })),
    );
    const rows = [...varied, ...this.known];
    const { trainer } = this;
    await trainer.fit(
      stacked(rows.map((row) => row.image)),
      rows.map((row) => row.label),
      {
        epochs: EPOCHS,
        validationData: [
          stacked(drawings.map((one) => one.image)),
          drawings.map((one) => one.label),
        ],
        callbacks: [
          {
            onTrainBatchEnd: (_, logs) => progress.onStep(logs["batch_loss"]!),
            onEpochEnd: (_, logs) => progress.onEpoch(logs["val_accuracy"]!),
          },
        ],
        signal,
      },
    );
  }

  /** Forget everything that was learned on this page. */
  async reset(): Promise<void> {
    await this.trainer.loadState(this.untrained);
    this.trainer.learningRate = LEARNING_RATE;
  }

  model(): Promise<Uint8Array> {
    return this.trainer.exportModel();
  }

  state(): Promise<Uint8Array> {
    return this.trainer.save();
  }
}

function stacked(images: readonly Float32Array[]) {
  const data = new Float32Array(images.length * PIXELS);
  images.forEach((image, i) => data.set(image, i * PIXELS));
  return { data, dims: [images.length, 1, SIDE, SIDE] };
}

function softmax(logits: Float32Array): Float32Array {
  const most = Math.max(...logits);
  const powers = logits.map((logit) => Math.exp(logit - most));
  const sum = powers.reduce((a, b) => a + b);
  return powers.map((power) => power / sum);
}

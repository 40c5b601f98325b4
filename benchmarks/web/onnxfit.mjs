/** Steps of onnxfit, in a page or in Node. */

/**
 * @param {any} onnxfit the module
 * @param {string} folder
 * @param {Uint8Array} bytes the batch, as a safetensors file
 * @param {object} options of Trainer.load
 */
export async function onnxfitStep(onnxfit, folder, bytes, options) {
  const { tensors } = onnxfit.readSafetensors(bytes);
  const [x, y] = [tensors.get("x"), tensors.get("y")];
  const trainer = await onnxfit.Trainer.load(folder, options);
  return async () => (await trainer.trainOnBatch(x, y)).loss;
}

const LONGEST = 1500; // milliseconds that a turn may take

/** Take steps, and return their losses and milliseconds. */
export async function timed(step, count) {
  const [losses, times] = [[], []];
  const began = performance.now();
  for (let i = 0; i < count && performance.now() - began < LONGEST; i += 1) {
    const start = performance.now();
    losses.push(await step());
    times.push(performance.now() - start);
  }
  return { losses, times };
}

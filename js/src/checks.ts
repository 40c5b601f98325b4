/** Check the numbers of a call as Python does, before a step changes anything. */

import { DataError } from "./errors.js";
import type { AllowedLabels, GraphTensor } from "./manifest.js";
import type { TypedTensor } from "./tensors.js";

/**
 * Check the inputs, labels and sample weights of a training step or an evaluation.
 *
 * Inputs may be infinite, but not NaN. A label that is not finite may stand in a row of weight 0,
 * where it does not count.
 *
 * @param inputs the inputs of the graph
 * @param tensors their values, by name
 * @param losses output -> the name of its loss, for messages
 * @throws DataError for the first number that the step cannot use
 */
export function checkNumbers(
  inputs: readonly GraphTensor[],
  tensors: ReadonlyMap<string, TypedTensor>,
  losses: ReadonlyMap<string, string>,
): void {
  const weighted = inputs.find(({ role }) => role === "sample_weight");
  const weights = weighted && tensors.get(weighted.name);
  const weightOf = weights === undefined ? () => 1 : numbersOf(weights);
  for (const { name, role, of, labels } of inputs) {
    const tensor = tensors.get(name);
    if (tensor === undefined) continue;
    const number = numbersOf(tensor);
    const width = tensor.data.length / (tensor.dims[0] ?? 1);
    for (let i = 0; i < tensor.data.length; i += 1) {
      const value = number(i);
      const row = Math.floor(i / width);
      if (role === "y") {
        if (isAllowed(value, labels)) continue;
        if (!Number.isFinite(value) && weightOf(row) === 0) continue;
        const expected = described(tensor.type, labels);
        const hint =
          isInteger(tensor.type) && value < 0
            ? ` To ignore these labels, set ignore_index=${value} in Python.`
            : "";
        throw new DataError(
          `${losses.get(of ?? "") ?? "The loss"} expects ${expected} for output ` +
            `${JSON.stringify(of)}, got ${value} at row ${row}.${hint}`,
        );
      }
      if (role === "sample_weight" && !Number.isFinite(value)) {
        throw new DataError(
          `sample_weight is ${value} in row ${row}. Expected a finite number for each row.`,
        );
      }
      if (role === "x" && Number.isNaN(value)) {
        throw new DataError(
          `The input ${JSON.stringify(name)} has NaN in row ${row}. Expected numbers.`,
        );
      }
    }
  }
}

/** Whether a loss can read a label. A folder of an older version does not describe its labels. */
function isAllowed(label: number, allowed: AllowedLabels | undefined): boolean {
  if (!Number.isFinite(label)) return false;
  if (allowed === undefined || label === allowed.ignored) return true;
  if (allowed.values !== null) return allowed.values.includes(label);
  return label >= (allowed.least ?? -Infinity) && label <= (allowed.greatest ?? Infinity);
}

/** Return the labels that a loss can read, as a message names them. */
function described(type: string, allowed: AllowedLabels | undefined): string {
  const { least = null, greatest = null, values = null } = allowed ?? {};
  if (values !== null) return `labels ${values.join(" and ")}`;
  const kind = isInteger(type) ? "class indices" : "numbers";
  if (least !== null && greatest !== null) return `${kind} from ${least} to ${greatest}`;
  return least === null ? `finite ${kind}` : `finite ${kind} >= ${least}`;
}

function isInteger(type: string): boolean {
  return type.startsWith("int") || type.startsWith("uint");
}

/** Return a function from a position in a tensor to its number. */
function numbersOf({ type, data }: TypedTensor): (position: number) => number {
  return type === "float16" ? (i) => halfFloat(Number(data[i])) : (i) => Number(data[i]);
}

/** Return the number that the bits of a float16 stand for. */
function halfFloat(bits: number): number {
  const sign = bits >> 15 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = (bits & 1023) / 1024;
  if (exponent === 31) return fraction === 0 ? sign * Infinity : NaN;
  return sign * (exponent === 0 ? 2 ** -14 * fraction : 2 ** (exponent - 15) * (1 + fraction));
}

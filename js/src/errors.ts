/**
 * The errors of onnxfit. Each message says what happened, what was given, what was expected, and
 * how to fix it.
 */

/** The base of every error below. */
export class OnnxfitError extends Error {
  constructor(message: string, options?: ErrorOptions) {
    super(message, options);
    this.name = new.target.name;
  }
}

/** The training folder cannot be read, or it is of a kind that this package cannot train. */
export class ModelError extends OnnxfitError {}

/** An option sets something impossible. */
export class SettingError extends OnnxfitError {}

/** A batch, a label or a shape does not fit the model. */
export class DataError extends OnnxfitError {}

/** The bytes of a state cannot be read, or belong to another model. */
export class CheckpointError extends OnnxfitError {}

/** onnxruntime is not installed, or the device is not there. */
export class InstallationError extends OnnxfitError {}

/** onnxruntime failed while it compiled or ran a step. */
export class StepError extends OnnxfitError {}

/** The loss became NaN or infinite. */
export class DivergenceError extends OnnxfitError {}

/** Return the message of anything that was thrown. */
export function reasonOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

/** Return a value as a message shows it: on one line, cut after 80 characters. */
export function shown(value: unknown): string {
  let text: string | undefined;
  if (typeof value === "function") text = `function ${value.name}`;
  else if (typeof value === "bigint") text = `${value}n`;
  else if (typeof value === "number" || value === undefined) text = String(value);
  else {
    try {
      text = JSON.stringify(value);
    } catch {
      text = String(value);
    }
  }
  text ??= typeof value;
  return text.length > 80 ? `${text.slice(0, 77)}...` : text;
}

/** Return names as a message lists them: five at most, then how many more there are. */
export function listed(names: Iterable<string>): string {
  const all = [...names].map((name) => JSON.stringify(name));
  if (all.length === 0) return "none";
  const rest = all.length > 5 ? ` and ${all.length - 5} more` : "";
  return all.slice(0, 5).join(", ") + rest;
}

/** Throw SettingError unless `value` is a whole number of at least `least`. */
export function requireWhole(name: string, value: unknown, least: number): void {
  if (typeof value !== "number" || !Number.isSafeInteger(value) || value < least) {
    throw new SettingError(`${name} needs a whole number >= ${least}, got ${shown(value)}.`);
  }
}

/** Throw SettingError for a name that is not among the known options. */
export function requireKnown(owner: string, given: object, known: readonly string[]): void {
  for (const name of Object.keys(given)) {
    if (!known.includes(name)) {
      throw new SettingError(
        `${owner} has no option ${JSON.stringify(name)}. Its options are: ${known.join(", ")}.`,
      );
    }
  }
}

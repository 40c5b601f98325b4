/** Learning-rate schedules: the learning rate as a function of the number of updates done. */

import { ModelError, shown } from "./errors.js";

export type Schedule = (step: number) => number;

/** The description of a schedule in a manifest: its class, and its settings by their names. */
export interface ScheduleDescription {
  name: string;
  settings: Record<string, unknown>;
}

const half = (done: number) => (1 + Math.cos(Math.PI * done)) / 2;
const between = (low: number, high: number, share: number) =>
  share === 1 ? high : low + (high - low) * share;
const elapsed = (s: any, step: number) =>
  s.staircase ? Math.floor(step / s.decay_steps) : step / s.decay_steps;

// Formulas and defaults are those of onnxfit.schedules; the settings have the same names as there.
const FORMULAS: Record<string, [defaults: object, formula: (s: any) => Schedule]> = {
  Constant: [{}, (s) => () => s.learning_rate],
  Exponential: [
    { staircase: false },
    (s) => (t) => s.learning_rate * s.decay_rate ** elapsed(s, t),
  ],
  InverseTime: [
    { staircase: false },
    (s) => (t) => s.learning_rate / (1 + s.decay_rate * elapsed(s, t)),
  ],
  Step: [{ gamma: 0.1 }, (s) => (t) => s.learning_rate * s.gamma ** Math.floor(t / s.step_size)],
  Piecewise: [{}, (s) => (t) => s.values[s.boundaries.filter((at: number) => at <= t).length]],
  Polynomial: [
    { end_learning_rate: 0, power: 1, cycle: false },
    (s) => (t) => {
      const cycles = s.cycle ? Math.max(1, Math.ceil(t / s.decay_steps)) : 1;
      const left = Math.max(0, 1 - t / (s.decay_steps * cycles));
      return between(s.end_learning_rate, s.learning_rate, left ** s.power);
    },
  ],
  Cosine: [
    { end_learning_rate: 0, restarts: false, t_mul: 1, m_mul: 1 },
    (s) => (t) => {
      const { height, done } = cosinePeriod(s, t);
      return s.end_learning_rate + (s.learning_rate - s.end_learning_rate) * height * half(done);
    },
  ],
  OneCycle: [
    {
      pct_start: 0.3,
      div_factor: 25,
      final_div_factor: 1e4,
      anneal_strategy: "cos",
      three_phase: false,
    },
    (s) => (t) => oneCycle(s, t),
  ],
  Warmup: [
    { start: 0 },
    (s) => {
      const after = typeof s.schedule === "number" ? () => s.schedule : scheduleOf(s.schedule);
      return (t) => {
        const rate = after(Math.max(0, t - s.steps));
        return t >= s.steps ? rate : between(s.start, rate, t / s.steps);
      };
    },
  ],
  MultiStep: [
    { gamma: 0.1 },
    (s) => (t) => s.learning_rate * s.gamma ** s.milestones.filter((at: number) => at <= t).length,
  ],
  Cyclic: [
    { step_size_up: 2000, step_size_down: null, mode: "triangular", gamma: 1 },
    (s) => (t) => cyclic(s, t),
  ],
  Sequential: [
    {},
    (s) => {
      const all = s.schedules.map((one: any) =>
        typeof one === "number" ? () => one : scheduleOf({ settings: {}, ...one }),
      );
      return (t) => {
        const i = s.milestones.filter((at: number) => at <= t).length;
        return all[i](t - (i > 0 ? s.milestones[i - 1] : 0));
      };
    },
  ],
  WarmupStableDecay: [
    { end_learning_rate: 0, start: 0, decay: "linear" },
    (s) => (t) => {
      if (t < s.warmup_steps) return between(s.start, s.learning_rate, t / s.warmup_steps);
      const done = Math.min(Math.max((t - s.warmup_steps - s.stable_steps) / s.decay_steps, 0), 1);
      const kinds: Record<string, number> = {
        linear: 1 - done,
        cos: half(done),
        sqrt: 1 - Math.sqrt(done),
      };
      return between(s.end_learning_rate, s.learning_rate, kinds[s.decay]!);
    },
  ],
  InverseSquareRoot: [
    { warmup_steps: 0, timescale: null },
    (s) => (t) => {
      if (t < s.warmup_steps) return (s.learning_rate * t) / s.warmup_steps;
      const scale = s.timescale || s.warmup_steps || 10_000;
      return s.learning_rate * Math.sqrt(scale / (t - s.warmup_steps + scale));
    },
  ],
  InverseScaling: [
    { learning_rate: 0.01, power: 0.25 },
    (s) => (t) => s.learning_rate * (t + 1) ** -s.power,
  ],
  Optimal: [
    { learning_rate: 0.01, alpha: 1e-4 },
    (s) => {
      const typical = Math.sqrt(1 / Math.sqrt(s.alpha));
      const first = 1 / ((typical / Math.max(1, 2 * (1 + typical))) * s.alpha);
      return (t) => (s.learning_rate * first) / (first + t);
    },
  ],
};

/**
 * Return the schedule that a manifest describes.
 *
 * @throws ModelError for a schedule that this version does not know.
 */
export function scheduleOf(description: ScheduleDescription): Schedule {
  const { name, settings } = description;
  const known = Object.hasOwn(FORMULAS, name) ? FORMULAS[name] : undefined;
  if (known === undefined) {
    throw new ModelError(
      `The folder has the learning-rate schedule ${shown(name)}; this version knows ` +
        `${Object.keys(FORMULAS).join(", ")}. Give the Trainer one of them in Python, or a ` +
        "number.",
    );
  }
  const [defaults, formula] = known;
  return formula({ ...defaults, ...settings });
}

function cosinePeriod(s: any, step: number): { height: number; done: number } {
  let into = step;
  let length = s.decay_steps;
  let height = 1;
  if (!s.restarts) into = Math.min(into, length);
  else if (s.t_mul === 1) {
    height = s.m_mul ** Math.floor(into / length);
    into %= length;
  } else {
    while (into >= length) {
      into -= length;
      length *= s.t_mul;
      height *= s.m_mul;
    }
  }
  return { height, done: into / length };
}

function cyclic(s: any, step: number): number {
  const up = s.step_size_up;
  const down = s.step_size_down ?? up;
  const into = step % (up + down);
  const share = into <= up ? into / up : (up + down - into) / down;
  const heights: Record<string, number> = {
    triangular: 1,
    triangular2: 0.5 ** Math.floor(step / (up + down)),
    exp_range: s.gamma ** step,
  };
  return between(s.base_learning_rate, s.max_learning_rate, share * heights[s.mode]!);
}

function oneCycle(s: any, step: number): number {
  const high = s.max_learning_rate;
  const start = high / s.div_factor;
  const up = s.pct_start * s.total_steps - 1;
  const phases: [end: number, before: number, after: number][] = [[up, start, high]];
  if (s.three_phase) phases.push([2 * up, high, start]);
  phases.push([s.total_steps - 1, phases.at(-1)![2], start / s.final_div_factor]);
  let begin = 0;
  for (const [end, before, after] of phases) {
    if (step <= end && end > begin) {
      const done = (step - begin) / (end - begin);
      return between(after, before, s.anneal_strategy === "cos" ? half(done) : 1 - done);
    }
    begin = end;
  }
  return phases.at(-1)![2];
}

import assert from "node:assert/strict";
import test from "node:test";

import {
  Callback,
  DivergenceError,
  EarlyStopping,
  TerminateOnNaN,
  SettingError,
  Trainer,
} from "../dist/index.js";
import { network } from "./helpers.mjs";

const { folder, rows } = network("mlp-sgd");
const load = () => Trainer.load(folder, { device: "cpu", threads: 1 });

test("hooks are called in the order of Python's, with its logs", async () => {
  const trainer = await load();
  /** @type {string[]} */
  const told = [];
  const hooks = Object.getOwnPropertyNames(Callback.prototype).filter((name) =>
    name.startsWith("on"),
  );
  const record = Object.fromEntries(
    hooks.map((hook) => [
      hook,
      (/** @type {any[]} */ ...values) => {
        const logs = values.pop();
        told.push([hook, ...values, Object.keys(logs ?? {}).join(" ")].join(" ").trim());
      },
    ]),
  );
  await trainer.fit(...rows(0, 64), { callbacks: [record], validationData: rows(64, 80) });
  assert.deepEqual(told, [
    "onTrainBegin",
    "onEpochBegin 0",
    "onTrainBatchBegin 0",
    "onTrainBatchEnd 0 loss accuracy batch_loss",
    "onTrainBatchBegin 1",
    "onTrainBatchEnd 1 loss accuracy batch_loss",
    "onTestBegin",
    "onTestBatchBegin 0",
    "onTestBatchEnd 0 loss accuracy",
    "onTestEnd loss accuracy",
    "onEpochEnd 0 loss accuracy val_loss val_accuracy learning_rate",
    "onTrainEnd loss accuracy val_loss val_accuracy learning_rate",
    "onClose",
  ]);
});

test("a hook is waited for, may log a figure, and may stop training", async () => {
  const trainer = await load();
  class Slow extends Callback {
    /** @override @param {number} epoch */
    async onEpochEnd(epoch) {
      await new Promise((resolve) => setTimeout(resolve, 5));
      this.trainer.log("epoch_squared", epoch ** 2);
      if (epoch === 1) this.trainer.stopTraining = true;
    }
  }
  const { history } = await trainer.fit(...rows(0, 64), { epochs: 9, callbacks: [new Slow()] });
  assert.deepEqual(history["epoch_squared"], [0, 1]);
  assert.throws(() => trainer.log("a", 1), SettingError);
});

test("an error in a hook ends training, and all callbacks close", async () => {
  const trainer = await load();
  const closed = [0, 0];
  const callbacks = [
    {
      onTrainBatchEnd: () => {
        throw new RangeError("mine");
      },
      onClose: () => void (closed[0] = 1),
    },
    { onClose: () => void (closed[1] = 1) },
  ];
  await assert.rejects(trainer.fit(...rows(0, 64), { callbacks }), { message: "mine" });
  assert.deepEqual(closed, [1, 1]);
  await trainer.fit(...rows(0, 64));
});

/** Replay values of a monitored metric. @param {number[]} values @param {any} options */
async function stopped(values, options, monitor = "metric") {
  const trainer = await load();
  const stopping = new EarlyStopping(monitor, options);
  const replay = {
    onEpochEnd(/** @type {number} */ epoch) {
      trainer.log(monitor, values[epoch] ?? NaN);
    },
  };
  const callbacks = [replay, stopping];
  const { epoch } = await trainer.fit(...rows(0, 32), { epochs: values.length, callbacks });
  return { epochs: epoch.length, stopping, trainer };
}

// values of the metric, options, the epoch that stops training (0 if none does), the best value
const CASES = /** @type {[number[], any, number, number | null, string?][]} */ ([
  [[3, 2, 1], {}, 0, 1],
  [[1, 2, 3, 4], { patience: 2 }, 2, 1],
  [[1, 2, 3, 4], { patience: 0 }, 1, 1],
  [[1, 2, 0.5, 3, 4, 5], { patience: 2 }, 4, 0.5],
  [[1, 0.9, 0.8, 0.7], { minDelta: 0.15, patience: 1 }, 1, 1],
  [[1, 2, 3], { mode: "max" }, 0, 3],
  [[1, 2, 1, 1], {}, 2, 2, "my_accuracy"],
  [[NaN, NaN, 1, 2], { patience: 3 }, 0, 1],
  [[9, 8, 7, 6], { baseline: 5, patience: 2 }, 1, 8],
  [[1, 2, 3, 4, 5], { startFromEpoch: 2 }, 3, 3],
]);

for (const [values, options, stop, best, monitor] of CASES) {
  test(`EarlyStopping ${JSON.stringify(options)} on ${values}`, async () => {
    const { epochs, stopping, trainer } = await stopped(values, options, monitor);
    assert.equal(epochs, stop === 0 ? values.length : stop + 1);
    assert.equal(stopping.best, best);
    assert.equal(stopping.stoppedEpoch, stop);
    assert.equal(trainer.stopReason === null, stop === 0);
  });
}

test("EarlyStopping restores the best weights", async () => {
  const trainer = await load();
  /** @type {any[]} */
  const weights = [];
  const callbacks = [
    {
      async onEpochEnd(/** @type {number} */ epoch) {
        weights.push(await trainer.getWeights());
        trainer.log("metric", [3, 1, 2, 2][epoch] ?? 2);
      },
    },
    new EarlyStopping("metric", { patience: 2, restoreBestWeights: true }),
  ];
  await trainer.fit(...rows(0, 64), { epochs: 9, callbacks });
  assert.equal(weights.length, 4);
  assert.match(trainer.stopReason ?? "", /the best was 1 at epoch 2/);
  assert.deepEqual(await trainer.getWeights(), weights[1]);
});

test("settings of EarlyStopping are checked", () => {
  for (const options of [
    { patience: -1 },
    { patience: 0.5 },
    { minDelta: NaN },
    { mode: "up" },
    { paitence: 1 },
  ]) {
    assert.throws(() => new EarlyStopping("val_loss", /** @type {any} */ (options)), SettingError);
  }
  assert.throws(() => new EarlyStopping(/** @type {any} */ ({ patience: 1 })), SettingError);
});

test("TerminateOnNaN stops at a loss that is no number", async () => {
  const trainer = await load();
  const [x, y] = rows(0, 64);
  const spoiled = { data: x.data.slice().fill(Infinity, 0, 1), dims: x.dims };
  const fit = trainer.fit(spoiled, y, { callbacks: [new TerminateOnNaN()], shuffle: false });
  await assert.rejects(fit, DivergenceError);
});

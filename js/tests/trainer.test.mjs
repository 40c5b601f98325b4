/** Training in Node against what Python computed from the same folder. */

import assert from "node:assert/strict";
import test from "node:test";

import * as onnxfit from "../dist/index.js";
import { apart, bytes, changed, network, ROWS } from "./helpers.mjs";

const { Trainer } = onnxfit;

/** @param {string} name @param {any} [source] */
async function loaded(name, source) {
  const data = network(name);
  const trainer = await Trainer.load(source ?? data.folder, { device: "cpu", threads: 1 });
  return { trainer, ...data };
}

/** @param {Promise<unknown>} promise @param {any} kind @param {RegExp} [message] */
async function refused(promise, kind, message = /./) {
  await assert.rejects(promise, (error) => {
    assert.ok(error instanceof kind, String(error));
    assert.ok(error instanceof onnxfit.OnnxfitError);
    assert.match(error.message, message);
    assert.ok(error.message.split("\n").length <= 4);
    return true;
  });
}

// Python evaluates an integer file with integer kernels. The graphs of a folder compute the same with
// floats, and a number between two integers may be rounded to the other one.
const STEP = 0.01; // more than the scale of the outputs

for (const name of [
  "cnn",
  "cnn-fixed",
  "mlp-sgd",
  "mlp-adam",
  "mlp-webgpu",
  "frozen",
  "adapters",
  "integers",
  "schedule",
  "groups",
  "lstm",
  "transformer",
]) {
  test(`${name} trains as in Python`, async () => {
    const { trainer, rows, predicted, expected } = await loaded(name);
    const rounding = name === "integers" ? STEP : 0;
    const losses = [];
    for (let i = 0; i < expected.losses.length; i += 1) {
      const { loss } = await trainer.trainOnBatch(...rows(i * ROWS, (i + 1) * ROWS));
      losses.push(loss / expected.losses[i]);
    }
    assert.ok(
      apart(
        losses,
        losses.map(() => 1),
      ) < 1e-6,
    );
    assert.equal(trainer.globalStep, losses.length);

    const { history } = await trainer.fit(...rows(0, expected.rows), {
      epochs: 2,
      validationData: rows(200, 264),
    });
    assert.deepEqual(Object.keys(history), Object.keys(expected.history));
    for (const [key, values] of Object.entries(expected.history)) {
      assert.ok(apart(history[key] ?? [], values) < 2e-6 + rounding, key);
    }
    const figures = await trainer.evaluate(...rows(0, 64));
    assert.deepEqual(Object.keys(figures), Object.keys(expected.evaluated));
    assert.ok(apart(Object.values(figures), Object.values(expected.evaluated)) < 2e-6 + rounding);

    const own = /** @type {any} */ (await trainer.predict(rows(0, 40)[0], { batchSize: 7 }));
    assert.deepEqual(own.dims, predicted.dims);
    assert.ok(apart(own.data, predicted.data) < 5e-6 + rounding);

    const saved = onnxfit.readSafetensors(await trainer.save()).tensors;
    const state = onnxfit.readSafetensors(bytes(`${name}/expected.safetensors`)).tensors;
    assert.deepEqual([...saved.keys()].sort(), [...state.keys()].sort());
    for (const [key, tensor] of state) {
      assert.deepEqual(saved.get(key)?.dims, tensor.dims);
      assert.ok(apart(saved.get(key)?.data ?? [], tensor.data) < 1e-5, key);
    }
    await trainer.dispose();
  });
}

for (const name of ["cnn", "adapters", "integers"]) {
  test(`the exported model of ${name} predicts as the trainer`, async () => {
    const { trainer, rows } = await loaded(name);
    await trainer.fit(...rows(0, 64));
    const ort = (await import("onnxruntime-node")).default;
    const session = await ort.InferenceSession.create(await trainer.exportModel());
    const [x] = rows(0, 10);
    const input = { [session.inputNames[0] ?? ""]: new ort.Tensor("float32", x.data, x.dims) };
    const logits = (await session.run(input))[session.outputNames[0] ?? ""];
    const own = /** @type {any} */ (await trainer.predict(x));
    assert.ok(
      apart(/** @type {any} */ (logits?.data), own.data) < 2e-6 + (name === "integers" ? STEP : 0),
    );
  });
}

test("a saved state goes on as if training had not stopped", async () => {
  const { trainer, rows } = await loaded("cnn");
  await trainer.fit(...rows(0, 100), { epochs: 1 });
  const state = await trainer.save();
  const whole = await trainer.fit(...rows(0, 100), { epochs: 1 });
  const { trainer: other } = await loaded("cnn");
  await other.loadState(state);
  assert.equal(other.epoch, 1);
  assert.deepEqual(await other.fit(...rows(0, 100), { epochs: 1 }), whole);
  assert.deepEqual(await other.save(), await trainer.save());
});

test("the order of rows changes with the epoch and the seed", async () => {
  /** @param {any} options */
  const losses = async (options) => {
    const { trainer, rows } = await loaded("mlp-sgd");
    return (await trainer.fit(...rows(0, 100), { epochs: 2, ...options })).history["loss"];
  };
  assert.deepEqual(await losses({}), await losses({ seed: 3 }));
  assert.notDeepEqual(await losses({}), await losses({ seed: 4 }));
});

test("the learning rate can be set, and is checked", async () => {
  const { trainer, rows } = await loaded("mlp-adam");
  const before = await trainer.getWeights();
  trainer.learningRate = 0;
  await trainer.fit(...rows(0, 32));
  assert.deepEqual(await trainer.getWeights(), before);
  for (const rate of [-1, NaN, 1e39, "0.1"]) {
    assert.throws(() => {
      trainer.learningRate = /** @type {any} */ (rate);
    }, onnxfit.SettingError);
  }
  const { trainer: scheduled } = await loaded("schedule");
  assert.throws(() => {
    scheduled.learningRate = 0.1;
  }, /schedule Warmup/);
});

test("an abort stops after a whole step, and training can go on", async () => {
  const { trainer, rows } = await loaded("mlp-sgd");
  const abort = new AbortController();
  /** @type {string[]} */
  const told = [];
  const stop = {
    onTrainBatchEnd: (/** @type {number} */ batch) => {
      if (batch === 4) abort.abort();
    },
    onException: () => void told.push("exception"),
    onClose: () => void told.push("close"),
    onTrainEnd: () => void told.push("end"),
  };
  await assert.rejects(
    trainer.fit(...rows(0, 320), { epochs: 9, callbacks: [stop], signal: abort.signal }),
    { name: "AbortError" },
  );
  assert.deepEqual(told, ["exception", "close"]);
  assert.equal(trainer.globalStep, 5);
  assert.equal(trainer.epoch, 0);
  await trainer.fit(...rows(0, 32));
  assert.equal(trainer.epoch, 1);
});

test("predict and evaluate may run during fit, a second fit may not", async () => {
  const { trainer, rows } = await loaded("mlp-sgd");
  const running = trainer.fit(...rows(0, 320), { epochs: 2 });
  await refused(trainer.fit(...rows(0, 32)), onnxfit.SettingError, /while fit runs/);
  await refused(trainer.loadState(await trainer.save()), onnxfit.SettingError);
  const [a, b] = await Promise.all([
    trainer.predict(rows(0, 4)[0]),
    trainer.evaluate(...rows(0, 9)),
  ]);
  assert.ok(a && b);
  assert.equal((await running).history["loss"]?.length, 2);
});

test("a state that does not fit changes nothing", async () => {
  const { trainer } = await loaded("cnn");
  const before = await trainer.save();
  const { tensors } = onnxfit.readSafetensors(before);
  const other = new Map(tensors);
  other.delete("conv1");
  await refused(
    trainer.loadState(onnxfit.writeSafetensors(other)),
    onnxfit.CheckpointError,
    /conv1/,
  );
  const transposed = new Map(tensors).set("head", {
    .../** @type {any} */ (tensors.get("head")),
    dims: [10, 256],
  });
  await refused(
    trainer.loadState(onnxfit.writeSafetensors(transposed)),
    onnxfit.CheckpointError,
    /head/,
  );
  const count = { type: /** @type {const} */ ("int64"), dims: [], data: BigInt64Array.of(-1n) };
  const negative = new Map(tensors).set("counter/epoch", count);
  await refused(
    trainer.loadState(onnxfit.writeSafetensors(negative)),
    onnxfit.CheckpointError,
    /epoch/,
  );
  const more = new Map(tensors).set("more", count);
  await refused(trainer.loadState(onnxfit.writeSafetensors(more)), onnxfit.CheckpointError, /more/);
  await refused(trainer.loadState(/** @type {any} */ ("state")), onnxfit.SettingError);
  assert.deepEqual(await trainer.save(), before);
});

test("weights can be set, and are checked", async () => {
  const { trainer } = await loaded("cnn");
  const weights = await trainer.getWeights();
  assert.ok(weights.has("conv1") && weights.has("mean"));
  const conv1 = /** @type {any} */ (weights.get("conv1"));
  conv1.data.fill(0.5);
  await trainer.setWeights(new Map([["conv1", conv1]]));
  conv1.data.fill(7); // the trainer has a copy
  const now = (await trainer.getWeights()).get("conv1");
  assert.ok(/** @type {any} */ (now).data.every((/** @type {number} */ v) => v === 0.5));
  const bad = new Map([["conv1", { ...conv1, dims: [conv1.data.length] }]]);
  await refused(trainer.setWeights(bad), onnxfit.DataError, /conv1/);
  await refused(trainer.setWeights(new Map([["other", conv1]])), onnxfit.DataError, /other/);
});

const BAD_CALLS =
  /** @type {Record<string, [(t: onnxfit.Trainer) => Promise<unknown>, any, RegExp]>} */ ({
    "an unknown option": [
      (t) => t.fit([], [], /** @type {any} */ ({ batch_size: 3 })),
      onnxfit.SettingError,
      /batchSize/,
    ],
    "no rows": [(t) => t.fit([], []), onnxfit.DataError, /sizes/],
    "empty arrays": [(t) => t.fit(zeros(0, 64), zeros(0)), onnxfit.DataError, /no rows/],
    "other rows of labels": [(t) => t.fit(zeros(3, 64), zeros(2)), onnxfit.DataError, /3/],
    "another width": [(t) => t.predict(zeros(3, 63)), onnxfit.DataError, /expected \[rows, 64\]/],
    "sizes that do not fit": [
      (t) => t.predict({ data: new Float32Array(5), dims: [1, 64] }),
      onnxfit.DataError,
      /5 numbers/,
    ],
    "missing labels": [(t) => t.fit(zeros(3, 64), null), onnxfit.DataError, /y is missing/],
    "a wrong name": [(t) => t.predict({ image: zeros(3, 64) }), onnxfit.DataError, /"x"/],
    "a label that is no class": [
      (t) => t.fit(zeros(3, 64), [0, 1, 0.5]),
      onnxfit.DataError,
      /position 2/,
    ],
    "a negative class": [
      (t) => t.fit(zeros(3, 64), [0, 1, -1]),
      onnxfit.DataError,
      /CrossEntropy expects class indices from 0 to 9 for output "y", got -1 at row 2/,
    ],
    "a class too many": [
      (t) => t.trainOnBatch(zeros(3, 64), [0, 10, 1]),
      onnxfit.DataError,
      /from 0 to 9 .* got 10 at row 1/,
    ],
    "a label of another folder in validation": [
      (t) => t.fit(zeros(3, 64), zeros(3), { validationData: [zeros(1, 64), [11]] }),
      onnxfit.DataError,
      /got 11 at row 0/,
    ],
    "a label in an evaluation": [
      (t) => t.evaluate(zeros(1, 64), [-3]),
      onnxfit.DataError,
      /got -3 at row 0/,
    ],
    "NaN in an input": [
      (t) => t.fit(nan(3, 64), zeros(3)),
      onnxfit.DataError,
      /The input "x" has NaN in row 2/,
    ],
    texts: [(t) => t.predict(/** @type {any} */ ([["a"]])), onnxfit.DataError, /expected|numbers/],
    "ragged lists": [(t) => t.predict([[1, 2], [1]]), onnxfit.DataError, /./],
    "sample weights": [
      (t) => t.fit(zeros(3, 64), zeros(3), { sampleWeight: [1, 1, 1] }),
      onnxfit.DataError,
      /sample_weight=True/,
    ],
    epochs: [(t) => t.fit(zeros(3, 64), zeros(3), { epochs: 1.5 }), onnxfit.SettingError, /epochs/],
    "a batch size": [
      (t) => t.fit(zeros(3, 64), zeros(3), { batchSize: 0 }),
      onnxfit.SettingError,
      /batchSize/,
    ],
    "a misspelled hook": [
      (t) =>
        t.fit(zeros(3, 64), zeros(3), { callbacks: [/** @type {any} */ ({ onEpochEnds() {} })] }),
      onnxfit.SettingError,
      /onEpochEnds/,
    ],
    "no callback": [
      (t) => t.fit(zeros(3, 64), zeros(3), { callbacks: [/** @type {any} */ (3)] }),
      onnxfit.SettingError,
      /callback/,
    ],
  });

/** @param {...number} dims */
function zeros(...dims) {
  return { data: new Float32Array(dims.reduce((a, b) => a * b)), dims };
}

/** @param {...number} dims */
function nan(...dims) {
  const array = zeros(...dims);
  array.data[array.data.length - 1] = NaN;
  return array;
}

for (const [name, [call, kind, message]] of Object.entries(BAD_CALLS)) {
  test(`${name} is refused, and nothing changes`, async () => {
    const { trainer } = await loaded("mlp-sgd");
    const before = await trainer.save();
    await refused(call(trainer), kind, message);
    assert.deepEqual(await trainer.save(), before);
  });
}

test("arrays of other kinds become the types of the inputs", async () => {
  const { trainer, rows } = await loaded("mlp-sgd");
  const [x, y] = rows(0, 8);
  const nested = Array.from({ length: 8 }, (_, i) => [...x.data.subarray(i * 64, (i + 1) * 64)]);
  const expected = await trainer.evaluate(x, y);
  for (const [a, b] of /** @type {any[]} */ ([
    [nested, [...y.data].map(Number)],
    [
      { x: { data: Float64Array.from(x.data), dims: x.dims } },
      { y: Int32Array.from(y.data, Number) },
    ],
    [
      { data: [...x.data], dims: x.dims },
      { data: Uint8Array.from(y.data, Number), dims: [8, 1] },
    ],
  ])) {
    assert.deepEqual(await trainer.evaluate(a, b), expected);
  }
});

test("a folder with a fixed batch leaves out the last rows, and refuses other batches", async () => {
  const { trainer, rows } = await loaded("cnn-fixed");
  await trainer.fit(...rows(0, 100));
  assert.equal(trainer.globalStep, 3);
  await refused(trainer.trainOnBatch(...rows(0, 31)), onnxfit.DataError, /32 rows, got 31/);
  await refused(trainer.fit(...rows(0, 31)), onnxfit.DataError, /only 31/);
  await refused(trainer.fit(...rows(0, 64), { batchSize: 16 }), onnxfit.SettingError, /32 rows/);
});

const BAD_FOLDERS = /** @type {Record<string, [Record<string, any>, any, RegExp]>} */ ({
  "no manifest": [{ "manifest.json": new Uint8Array(3) }, onnxfit.ModelError, /no JSON/],
  "another format": [
    { "manifest.json": (/** @type {any} */ m) => (m.format = "x") },
    onnxfit.ModelError,
    /format/,
  ],
  "a newer version": [
    { "manifest.json": (/** @type {any} */ m) => (m.version = 2) },
    onnxfit.ModelError,
    /version 2/,
  ],
  "a path outside": [
    { "manifest.json": (/** @type {any} */ m) => (m.graphs.train.file = "../x") },
    onnxfit.ModelError,
    /graphs/,
  ],
  "no train graph": [
    { "manifest.json": (/** @type {any} */ m) => delete m.graphs.train },
    onnxfit.ModelError,
    /graphs/,
  ],
  "an unknown file": [
    { "manifest.json": (/** @type {any} */ m) => (m.graphs.train.file = "x") },
    onnxfit.ModelError,
    /hash/,
  ],
  "a type without arrays": [
    { "manifest.json": (/** @type {any} */ m) => (m.state[0].type = "bfloat16") },
    onnxfit.ModelError,
    /bfloat16/,
  ],
  "an unknown role": [
    { "manifest.json": (/** @type {any} */ m) => (m.graphs.train.inputs[0].role = "z") },
    onnxfit.ModelError,
    /role/,
  ],
  "a loss that is not computed": [
    { "manifest.json": (/** @type {any} */ m) => (m.losses[0].value = "z") },
    onnxfit.ModelError,
    /loss/,
  ],
  "a graph cut off": [{ "train.onnx": new Uint8Array(9) }, onnxfit.ModelError, /9 bytes/],
  "a changed graph": [
    { "train.onnx": bytes("mlp-sgd/train.onnx").map((b, i) => (i === 99 ? b + 1 : b)) },
    onnxfit.ModelError,
    /SHA-256/,
  ],
});

for (const [name, [changes, kind, message]] of Object.entries(BAD_FOLDERS)) {
  test(`a folder with ${name} is refused`, async () => {
    await refused(loaded("mlp-sgd", changed("mlp-sgd", changes)), kind, message);
  });
}

test("a folder that is not there, and options that cannot be, are refused", async () => {
  await refused(Trainer.load("/nowhere"), onnxfit.ModelError, /manifest.json/);
  await refused(Trainer.load(/** @type {any} */ (3)), onnxfit.SettingError);
  const { folder } = network("mlp-sgd");
  await refused(
    Trainer.load(folder, /** @type {any} */ ({ gpu: 1 })),
    onnxfit.SettingError,
    /device/,
  );
  await refused(
    Trainer.load(folder, { device: /** @type {any} */ ("cuda") }),
    onnxfit.SettingError,
    /cuda/,
  );
  await refused(Trainer.load(folder, { ort: "nowhere" }), onnxfit.InstallationError, /nowhere/);
  await refused(Trainer.load(folder, { worker: true }), onnxfit.InstallationError, /Workers/);
});

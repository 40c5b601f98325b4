/** The same networks in TensorFlow.js, from the same weights. */

/** Network -> its layers. */
const NETWORKS = {
  mlp(tf) {
    const { dense } = tf.layers;
    return [
      dense({ inputShape: [784], units: 256, activation: "relu" }),
      dense({ units: 128, activation: "relu" }),
      dense({ units: 10 }),
    ];
  },
  cnn(tf) {
    const { batchNormalization, conv2d, dense, dropout, flatten, maxPooling2d, reLU } = tf.layers;
    const conv = { kernelSize: 3, padding: "same" };
    return [
      conv2d({ ...conv, inputShape: [8, 8, 1], filters: 16, useBias: false }),
      batchNormalization({ momentum: 0.9, epsilon: 1e-5 }),
      reLU(),
      conv2d({ ...conv, filters: 24, activation: "relu" }),
      maxPooling2d({ poolSize: 2 }),
      conv2d({ ...conv, filters: 24, activation: "relu" }),
      flatten(),
      dropout({ rate: 0.2 }),
      dense({ units: 48, activation: "relu" }),
      dense({ units: 10 }),
    ];
  },
};

// The weights of a model's layers, in the order of TensorFlow.js, by their names in the folder.
const NAMES = {
  mlp: ["w0", "b0", "w1", "b1", "w2", "b2"],
  cnn: [
    ...["conv1_weight", "norm_scale", "norm_bias", "conv2_weight", "conv2_bias"],
    ...["conv3_weight", "conv3_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"],
  ],
};

/** Images have their channels last in TensorFlow.js, and so have the rows behind Flatten. */
function converted(tf, name, { data, dims }) {
  const tensor = tf.tensor(data, dims);
  if (dims.length === 4) return tensor.transpose([2, 3, 1, 0]);
  if (name === "fc1_weight") {
    return tensor.reshape([24, 4, 4, 48]).transpose([1, 2, 0, 3]).reshape([384, 48]);
  }
  return tensor;
}

/** Return a step of a network on a batch; `read` is the reader of safetensors files. */
export async function tensorflowStep(tf, network, read, bytes, state) {
  const [x, y] = ["x", "y"].map((name) => read(bytes).tensors.get(name));
  const weights = read(state).tensors;
  const model = tf.sequential({ layers: NETWORKS[network](tf) });
  const trained = model.trainableWeights;
  NAMES[network].forEach((name, i) => {
    trained[i].write(converted(tf, name, weights.get(name)));
  });
  const labels = new Float32Array(10 * y.data.length);
  y.data.forEach((label, row) => (labels[10 * row + Number(label)] = 1));
  const loss = (expected, logits) => tf.losses.softmaxCrossEntropy(expected, logits);
  model.compile({ optimizer: tf.train.adam(0.001, 0.9, 0.999, 1e-8), loss });
  const dims = network === "cnn" ? [x.dims[0], 8, 8, 1] : x.dims;
  return async () => {
    const inputs = [tf.tensor(x.data, dims), tf.tensor(labels, [y.data.length, 10])];
    const result = await model.trainOnBatch(...inputs);
    tf.dispose(inputs);
    return Array.isArray(result) ? result[0] : result;
  };
}

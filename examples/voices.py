"""Helpers for the examples about speech: voices of espeak-ng, noises, and mixtures of both."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

RATE = 16000  # samples a second
HEADER = 44  # bytes before the samples of a WAV file
ESPEAK_RATE = 22050
AUDIBLE = 0.01  # of full scale
ACCENTS = ("en-us", "en-gb", "en-gb-scotland", "en-029", "en-gb-x-rp", "en-gb-x-gbclan")


@dataclass(frozen=True)
class Voice:
    """A voice of espeak-ng: an accent and a speaker ("en-gb+f2"), pitch (0 to 99), words a minute."""

    name: str
    pitch: int
    speed: int


def voices(speakers: Sequence[str], count: int, rng: np.random.Generator) -> list[Voice]:
    """Return different pairs of an accent and one of the speakers, with pitch and speed by chance."""
    names = [f"{accent}+{speaker}" for accent in ACCENTS for speaker in speakers]
    return [
        Voice(names[i], int(rng.integers(25, 75)), int(rng.integers(140, 195)))
        for i in rng.permutation(len(names))[:count]
    ]


def say(text: str, voice: Voice) -> np.ndarray:
    """Return the spoken text as float32 in -1..1, without the silence around it."""
    command = ["espeak-ng", "--stdout", "-v", voice.name, "-p", str(voice.pitch)]
    try:
        done = subprocess.run(
            [*command, "-s", str(voice.speed), text], capture_output=True, check=True
        )
    except FileNotFoundError:
        sys.exit(
            "This example needs espeak-ng, which makes its voices. Install it:\n"
            "    apt install espeak-ng    (Debian, Ubuntu)\n"
            "    brew install espeak-ng   (macOS)\n"
            "    winget install eSpeak-NG.eSpeak-NG   (Windows)"
        )
    wav = done.stdout[HEADER : len(done.stdout) - len(done.stdout) % 2]
    return trimmed(resampled(np.frombuffer(wav, "<i2") / 32768, ESPEAK_RATE))


def say_all(pairs: Iterable[tuple[str, Voice]]) -> list[np.ndarray]:
    """Return the audio of each pair of a text and a voice; two processes at a time speak."""
    with ThreadPoolExecutor(2) as executor:
        return list(executor.map(lambda pair: say(*pair), pairs))


def resampled(audio: np.ndarray, rate: int) -> np.ndarray:
    """Return audio of `rate` samples a second, at least 16,000, with 16,000 of them."""
    samples = len(audio) * RATE // rate
    spectrum = np.fft.rfft(audio)[: samples // 2 + 1]
    return (np.fft.irfft(spectrum, samples) * samples / len(audio)).astype(np.float32)


def trimmed(audio: np.ndarray) -> np.ndarray:
    """Return the audio from its first to its last audible sample."""
    audible = np.flatnonzero(np.abs(audio) > AUDIBLE)
    return audio[audible[0] : audible[-1] + 1]


def shaped_noise(samples: int, slope: float, rng: np.random.Generator) -> np.ndarray:
    """Return noise whose amplitude falls as 1 / frequency^slope: 0 is white; its power is 1."""
    spectrum = np.fft.rfft(rng.standard_normal(samples))
    noise = np.fft.irfft(spectrum / np.arange(1, len(spectrum) + 1) ** slope, samples)
    return noise / np.sqrt(np.mean(noise**2))


def at_snr(speech: np.ndarray, noise: np.ndarray, decibels: float) -> np.ndarray:
    """Return speech with noise; the power of audible speech is so many decibels above the noise's."""
    power = np.mean(np.square(speech[np.abs(speech) > AUDIBLE]))
    gain = np.sqrt(power / np.mean(np.square(noise)) / 10 ** (decibels / 10))
    return (speech + gain * noise).astype(np.float32)

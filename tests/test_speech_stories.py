"""examples/voices.py, wake_word.py and voice_detector.py: mixtures, labels and counts, without voices."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import onnx.parser
import onnxruntime
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("PIL")
pytest.importorskip("sklearn")
pytest.importorskip("yaml")

from examples import voices
from examples.stories import voice_detector, wake_word


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def decibels(signal: np.ndarray, noise: np.ndarray) -> float:
    return float(10 * np.log10(np.mean(signal**2) / np.mean(noise**2)))


@pytest.mark.parametrize("wanted", [-5, 0, 20])
def test_the_ratio_of_speech_and_noise_leaves_out_silence(wanted, rng) -> None:
    speech = np.where(np.arange(8000) < 1000, 0.5, 0)  # most of it is silent
    noisy = voices.at_snr(speech, rng.standard_normal(8000), wanted)
    assert noisy.dtype == np.float32
    assert decibels(speech[:1000], noisy - speech) == pytest.approx(wanted, abs=0.01)


def test_a_tone_keeps_its_pitch_and_loudness_at_another_rate() -> None:
    tone = np.sin(2 * np.pi * 440 * np.arange(22050) / 22050)
    found = voices.resampled(tone, 22050)
    np.testing.assert_allclose(found, np.sin(2 * np.pi * 440 * np.arange(16000) / 16000), atol=1e-3)


def test_the_slope_of_a_noise_is_that_of_its_spectrum(rng) -> None:
    power = np.abs(np.fft.rfft(voices.shaped_noise(2**16, 0.5, rng))) ** 2
    low, high = np.mean(power[500:600]), np.mean(power[5000:6000])
    assert low / high == pytest.approx(10, rel=0.3)


def test_voices_are_different_pairs(rng) -> None:
    cast = voices.voices(["f1", "m1"], 12, rng)
    assert len({voice.name for voice in cast}) == 12
    assert all(voice.name.split("+")[0] in voices.ACCENTS for voice in cast)


def test_speech_is_made_of_the_samples_behind_the_header(monkeypatch) -> None:
    samples = np.r_[np.zeros(500), np.full(2205, 10000), np.zeros(700)].astype("<i2")
    done = SimpleNamespace(stdout=bytes(44) + samples.tobytes())
    monkeypatch.setattr(voices.subprocess, "run", lambda *_, **__: done)
    found = voices.say("text", voices.Voice("en-us+f1", 50, 150))
    assert len(found) == pytest.approx(1600, abs=60)
    assert np.median(found) == pytest.approx(10000 / 32768, abs=0.01)


def test_a_missing_espeak_says_how_to_install_it(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="apt install espeak-ng"):
        voices.say("text", voices.Voice("en-us+f1", 50, 150))


@pytest.mark.parametrize("story", [wake_word, voice_detector])
def test_groups_share_no_voice(story) -> None:
    speakers = [speaker for group in story.SPEAKERS.values() for speaker in group]
    assert len(speakers) == len(set(speakers))


def test_groups_share_no_sentence() -> None:
    training, test = (text.replace("\n", "/") for text in voice_detector.SENTENCES.values())
    assert not set(training.split("/")) & set(test.split("/"))


def test_short_pauses_are_speech_and_long_ones_are_not() -> None:
    loud = np.repeat([0, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0], 512)
    found = voice_detector.speech_frames(loud * voice_detector.LOUDNESS)
    assert found.tolist() == [0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0]


def test_a_frame_begins_with_the_end_of_the_frame_before_it() -> None:
    audio = np.arange(1, 1500, dtype=np.float32)
    frames = voice_detector.split(audio)
    assert frames.shape == (2, 576)
    assert frames[0].tolist() == [0] * 64 + list(range(1, 513))
    assert frames[1].tolist() == list(range(449, 1025))


def test_batches_are_all_five_seconds_of_each_recording(rng) -> None:
    size = voice_detector.SECONDS * voices.RATE
    spoken = [0.1 * voices.shaped_noise(9000, 0, rng) for _ in range(4)]
    near = [voice_detector.record(spoken, rng) for _ in range(2)]
    found = list(voice_detector.batches(near, near * 3, rng))
    assert {(x.shape, y.shape) for x, y in found} == {((156, 576), (156,))}
    assert len(found) == 8
    expected = sum(voice_detector.speech_frames(a)[: 4 * 156].sum() for a in near)
    assert sum(y.sum() for _, y in found) == expected
    assert np.std(voice_detector.fan(size, rng)) > 0


@pytest.mark.parametrize("after", [0, 1000, -1000])
def test_a_clip_has_the_recording_at_its_end(after, rng, monkeypatch) -> None:
    monkeypatch.setattr(wake_word, "at_snr", lambda speech, *_: speech)
    clip = wake_word.place(np.linspace(0.5, 1, 5000, dtype=np.float32), after, rng)
    heard = np.flatnonzero(clip)
    assert clip.shape == (wake_word.SAMPLES,)
    assert heard[0] == wake_word.SAMPLES - after - 5000
    assert heard[-1] == min(wake_word.SAMPLES - after, wake_word.SAMPLES) - 1


def test_a_long_recording_loses_its_beginning(rng, monkeypatch) -> None:
    monkeypatch.setattr(wake_word, "at_snr", lambda speech, *_: speech)
    audio = np.arange(1, 20001, dtype=np.float32)
    clip = wake_word.place(audio, 0, rng)
    np.testing.assert_allclose(clip / clip[-1], audio[-wake_word.SAMPLES :] / 20000, rtol=1e-5)


def test_words_found_and_false_alarms_are_counted() -> None:
    seconds = wake_word.times(100)
    fires = (abs(seconds - 2.1) < 0.1) | (abs(seconds - 5) < 0.3) | (seconds == seconds[-1])
    assert wake_word.count(fires, [(1.4, 2.0), (3.0, 3.6)]) == (1, 2)


def test_the_joined_model_takes_audio(rng) -> None:
    """A spectrogram of means, and a network that sums: the probability follows from the audio."""
    samples, frames, bands = wake_word.SAMPLES, wake_word.FRAMES, wake_word.BANDS
    mel = onnx.parser.parse_model(f"""<ir_version: 7, opset_import: ["": 13]>
        mel (float[rows, samples] input) => (float[time, 1, n, {bands}] output)
        <int64[4] shape = {{1, 1, {frames}, {bands}}}, int64[1] first = {{0}},
         int64[1] last = {{{frames * bands}}}, int64[1] axis = {{1}}>
        {{ part = Slice(input, first, last, axis) output = Reshape(part, shape) }}""")
    network = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 13]>
        net (float[rows, {frames}, {bands}, 1] x) => (float[rows, 1, 1, 1] y)
        {{ y = ReduceMean <axes = [1, 2, 3]> (x) }}""")
    model = wake_word.joined(mel.SerializeToString(), network)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    audio = rng.standard_normal((1, samples)).astype(np.float32)
    (found,) = session.run(None, {"audio": audio})
    score = np.mean(audio[0, : frames * bands]) / 10 + 2
    np.testing.assert_allclose(found, [1 / (1 + np.exp(-score))], rtol=1e-5)

"""A language model that one base and two adapters serve, as onnxruntime-genai does.

    python examples/language_model.py [MODEL_FOLDER] [--out docs/gallery]

A small decoder with caches learns to copy four letters: "dbac>" goes on with "dbac". It stays as
it is, and two adapters of low rank learn to reverse and to sort the letters. All of them are tried
with letters that no training has seen. The example writes the folder `served` with model.onnx,
whose adapters are inputs, and reversed.onnx_adapter and sorted.onnx_adapter; one session of
onnxruntime switches between them.

MODEL_FOLDER is a folder by onnxruntime-genai's model builder, in float or in 4 bits, of a model
with a vocabulary of 11 words or more. It takes the place of the decoder, and onnxruntime-genai
serves it if it is installed.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from figures import BLUE, GREY, ORANGE, arguments, label, panels, save, write_csv
from models import decoder

import onnxfit
from onnxfit.callbacks import LambdaCallback

try:
    import onnxruntime_genai as genai
except ImportError:
    genai = None

LETTERS, LENGTH = "abcdefghij", 4
WORDS = [*LETTERS, ">"]  # of the vocabulary
ARROW = WORDS.index(">")
EPOCHS, ROWS, BATCH = 8, 4000, 64
TASKS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "reversed": lambda letters: letters[:, ::-1],
    "sorted": lambda letters: np.sort(letters, axis=1),
}
COLORS = {"copied": GREY, "reversed": BLUE, "sorted": ORANGE}
SERVED = Path("served")


def main() -> None:
    options = arguments(__doc__, model="a folder by onnxruntime-genai's model builder")
    random = np.random.default_rng(0).permutation(10**LENGTH)
    # every word of four letters, once
    letters = random[:, None] // 10 ** np.arange(LENGTH) % 10
    unseen = letters[-320:]
    curves: dict[str, list[float]] = {}

    if options.model is None:
        trainer = onnxfit.Trainer(
            decoder(len(WORDS)), loss="causal_lm", optimizer=optimizer(), threads=1
        )
        curves["copied"] = learn(trainer, letters[:ROWS], unseen, lambda copied: copied)
        base = trainer.export("base.onnx")
        SERVED.mkdir(exist_ok=True)
    else:
        base = onnx.load(options.model / "model.onnx")
        shutil.copytree(options.model, SERVED, dirs_exist_ok=True)
        (SERVED / "model.onnx.data").unlink(missing_ok=True)

    merged = {}
    for task, solve in TASKS.items():
        trainer = onnxfit.Trainer(
            base,
            adapters=onnxfit.LoRA(rank=8, target="*"),
            loss="causal_lm",
            optimizer=optimizer(),
            threads=1,
        )
        curves[task] = learn(trainer, letters[:ROWS], unseen, solve)
        trainer.export_adapter(SERVED / f"{task}.onnx_adapter")
        trainer.export(SERVED / "model.onnx", adapters="inputs")  # the same for all of them
        merged[task] = trainer.export(None)

    with_genai = genai is not None and (SERVED / "genai_config.json").exists()
    if with_genai:
        serve, serve_base = served_by_genai(SERVED, TASKS), served_by_genai(options.model)
    else:
        serve = served_by_onnxruntime(SERVED / "model.onnx", merged)
        serve_base = served_by_onnxruntime(base.SerializeToString())
    prompts = np.c_[unseen, np.full(len(unseen), ARROW)]
    print(f"served by {'onnxruntime-genai' if with_genai else 'onnxruntime'}")
    print(f"{'adapter':10} {'copied':>9} {'reversed':>9} {'sorted':>9}   {text_of(prompts[0])} ...")
    shares = []
    for adapter in (None, *TASKS):
        answers = serve(prompts, adapter)
        solved = {"copied": unseen} | {task: solve(unseen) for task, solve in TASKS.items()}
        found = {task: share(answers, right) for task, right in solved.items()}
        shares.append(found[adapter or "copied"])
        columns = " ".join(f"{found[task]:8.1f}%" for task in found)
        print(f"{adapter or 'none':10} {columns}   {text_of(answers[0])}")
    print(f"least      {min(shares[1:]):8.1f}%")
    if not np.array_equal(serve(prompts, None), serve_base(prompts, None)):
        sys.exit("language_model: without an adapter, the served file is not the base")
    if options.model is None:
        draw(options.out, curves)


def optimizer() -> onnxfit.optimizers.Adam:
    # Twice the rate is unstable: on one network, the order of the rows then decided between 59 and
    # 90 % of the words reversed, after 8 epochs of 2000.
    return onnxfit.optimizers.Adam(
        onnxfit.schedules.Cosine(0.005, decay_steps=EPOCHS * ROWS // BATCH)
    )


def learn(
    trainer: onnxfit.Trainer,
    letters: np.ndarray,
    unseen: np.ndarray,
    solve: Callable[[np.ndarray], np.ndarray],
) -> list[float]:
    """Train, and return the share of unseen words that are solved before and after each epoch."""
    tried, _ = rows_of(unseen, solve(unseen))
    curve: list[float] = []

    def try_unseen(*_: object) -> None:
        answers = trainer.predict(tried)[:, LENGTH:-1].argmax(axis=-1)
        curve.append(share(answers, solve(unseen)))

    try_unseen()
    trainer.fit(
        *rows_of(letters, solve(letters)),
        epochs=EPOCHS,
        batch_size=BATCH,
        callbacks=LambdaCallback(on_epoch_end=try_unseen),
        verbose=0,
    )
    return curve


def rows_of(letters: np.ndarray, answers: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return token ids and labels; those of the letters are -100, so that they have no loss."""
    ids = np.c_[letters, np.full(len(letters), ARROW), answers]
    labels = ids.copy()
    labels[:, : LENGTH + 1] = -100
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}, labels


def served_by_onnxruntime(
    model: Path | bytes, merged: Mapping[str, onnx.ModelProto] = {}
) -> Callable[[np.ndarray, str | None], np.ndarray]:
    """Return a function that continues prompts token by token, with caches.

    Releases of onnxruntime before 1.20 have no adapters: there each adapter is a merged file.
    """
    session = session_of(model)

    def serve(prompts: np.ndarray, adapter: str | None) -> np.ndarray:
        run, options = session, onnxruntime.RunOptions()
        if adapter is not None and hasattr(onnxruntime, "LoraAdapter"):
            active = onnxruntime.LoraAdapter()
            active.Load(str(SERVED / f"{adapter}.onnx_adapter"))
            options.add_active_adapter(active)
        elif adapter is not None:
            run = session_of(merged[adapter].SerializeToString())
        shapes = {v.name: v.shape for v in run.get_inputs() if v.name.startswith("past")}
        caches = {
            name: np.zeros((len(prompts), heads, 0, size), np.float32)
            for name, (_, heads, _, size) in shapes.items()
        }
        names = [value.name for value in run.get_outputs()]
        new, answers = prompts, []
        for _ in range(LENGTH):
            mask = np.ones((len(prompts), prompts.shape[1] + len(answers)), np.int64)
            feeds = {"input_ids": new, "attention_mask": mask, **caches}
            results = dict(zip(names, run.run(names, feeds, options)))
            caches = {k: results[k.replace("past_key_values", "present")] for k in caches}
            new = results["logits"][:, -1:].argmax(axis=-1)
            answers.append(new[:, 0])
        return np.stack(answers, axis=1)

    return serve


def session_of(model: Path | bytes) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])


def served_by_genai(
    folder: Path, tasks: Iterable[str] = ()
) -> Callable[[np.ndarray, str | None], np.ndarray]:
    """Return a function that continues prompts by onnxruntime-genai."""
    model = genai.Model(str(folder))
    adapters = genai.Adapters(model)
    for task in tasks:
        adapters.load(str(folder / f"{task}.onnx_adapter"), task)

    def serve(prompts: np.ndarray, adapter: str | None) -> np.ndarray:
        answers = []
        for batch in np.split(prompts, len(prompts) // 32):
            params = genai.GeneratorParams(model)
            length = prompts.shape[1] + LENGTH
            params.set_search_options(
                max_length=length, min_length=length, batch_size=len(batch), do_sample=False
            )
            generator = genai.Generator(model, params)
            if adapter is not None:
                generator.set_active_adapter(adapters, adapter)
            generator.append_tokens(batch.astype(np.int32))
            while not generator.is_done():
                generator.generate_next_token()
            answers += [generator.get_sequence(i)[-LENGTH:] for i in range(len(batch))]
        return np.array(answers)

    return serve


def share(answers: np.ndarray, right: np.ndarray) -> float:
    return float(100 * (answers == right).all(axis=1).mean())


def text_of(ids: np.ndarray) -> str:
    return "".join(WORDS[i] for i in ids)


def draw(out: Path, curves: dict[str, list[float]]) -> None:
    write_csv(out / "language_model.csv", {"epoch": range(EPOCHS + 1), **curves})
    figure, (panel,) = panels(
        "Two adapters teach a frozen language model what it could not do", columns=1, height=3.6
    )
    for task, curve in curves.items():
        name = f"{task} by {'an adapter' if task in TASKS else 'the base'}"
        panel.plot(curve, color=COLORS[task], marker="o", markersize=4, label=name)
    label(panel, "Unseen words that are answered without a mistake", "epochs of training", "%")
    save(figure, out / "language_model.png")


if __name__ == "__main__":
    main()

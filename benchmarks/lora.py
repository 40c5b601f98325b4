"""A step of adapters beside a step of full fine-tuning, in onnxfit and in PyTorch with peft:

    python benchmarks/lora.py [--network transformer] [--repeats 15] [--threads 1]

The network of the benchmark suite has adapters of rank 8 beside the same linear layers in both, and
SGD trains all on the same random batch. The contenders take turns, and the least CPU time of each
counts, so that other programs on the machine change little. Peak memory is that of a process of its
own for each contender, above that of the process before the contender was made. Needs PyTorch, and
peft for its contenders; `make bench` installs both into .venv-bench.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime

import onnxfit

sys.path += [str(Path(__file__).resolve().parent / "suite")]
from workloads import WORKLOADS

RANK, RATE, STEPS = 8, 0.01, 10
TARGETS = ("inputs", "output", "wide", "narrow")  # of each layer
DROPOUTS = {"": 0.0, " with dropout": 0.05}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", choices=("transformer", "decoder"), default="transformer")
    parser.add_argument("--repeats", type=int, default=15, help="turns of each contender")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", choices=contenders(), help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)  # of the network
    options = parser.parse_args()
    if options.memory:
        print(peak_bytes(options.memory, options.network, options.file, options.threads))
        return
    with tempfile.TemporaryDirectory() as folder:
        report(options.network, Path(folder), options.repeats, options.threads)


def report(network: str, folder: Path, repeats: int, threads: int) -> None:
    """Print the time and the memory of each contender."""
    import networks  # PyTorch, which every contender's network comes from

    networks.export(network, folder)
    file = folder / f"{network}.onnx"
    times = least_times(network, file, repeats, threads)
    print(f"{network}, onnxruntime {onnxruntime.__version__}, {threads} threads")
    for name, seconds in times.items():
        full = times["torch: all" if name.startswith("torch") else "onnxfit: all"]
        command = [sys.executable, __file__, f"--memory={name}", f"--file={file}"]
        command += [f"--network={network}", f"--threads={threads}"]
        memory = int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        print(
            f"  {name:32} {1e3 * seconds:8.2f} ms  {seconds / full:5.2f} of all weights"
            f"  {seconds / times['torch: all']:5.2f} of torch's  {memory / 2**20:6.0f} MiB",
            flush=True,
        )


def contenders() -> list[str]:
    names = ["onnxfit: all", *(f"onnxfit: adapters{dropout}" for dropout in DROPOUTS)]
    names.append("torch: all")
    if importlib.util.find_spec("peft"):
        names += [f"torch: adapters{dropout}" for dropout in DROPOUTS]
    return names


def least_times(network: str, file: Path, repeats: int, threads: int) -> dict[str, float]:
    """Return the least seconds of CPU time of a step of each contender."""
    steps = {name: make_step(name, network, file, threads) for name in contenders()}
    for step in steps.values():  # the first steps compile the graphs
        for _ in range(3):
            step()
    times = dict.fromkeys(steps, float("inf"))
    for _ in range(repeats):
        for name, step in steps.items():
            began = time.process_time()
            for _ in range(STEPS):
                step()
            times[name] = min(times[name], (time.process_time() - began) / STEPS)
    return times


def peak_bytes(name: str, network: str, file: Path, threads: int) -> int:
    """Return the bytes that a contender and its steps take at their peak, imports apart."""
    if name.startswith("torch"):
        import networks  # noqa: F401
        import torch

        torch.zeros(1, requires_grad=True).sum().backward()
    if name.startswith("torch: adapters"):
        import peft  # noqa: F401
    _ = onnxfit.Trainer, onnxfit.LoRA  # which import their modules
    before = most_bytes_so_far()
    step = make_step(name, network, file, threads)
    for _ in range(STEPS):
        step()
    return most_bytes_so_far() - before


def most_bytes_so_far() -> int:
    """Return the peak of this process. That of `resource` begins with its parent's."""
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line
    )
    return 1024 * int(line.split()[1])


def make_step(name: str, network: str, file: Path, threads: int) -> Callable[[], object]:
    """Return a function that trains a contender for a step."""
    library, trained = name.split(": ")
    workload = WORKLOADS[network]
    x, y = (array[: workload.batch_size] for array in workload.data())
    dropout = DROPOUTS.get(trained.removeprefix("adapters"), 0.0)
    if library == "torch":
        return torch_step(network, x, y, trained != "all", dropout, threads)
    adapters = onnxfit.LoRA(RANK, target=[f"*.{t}" for t in TARGETS], dropout=dropout)
    trainer = onnxfit.Trainer(
        file,
        loss=workload.loss,
        optimizer=onnxfit.optimizers.SGD(RATE),
        adapters=adapters if trained != "all" else None,
        threads=threads,
    )
    return lambda: trainer.train_on_batch(x, y)


def torch_step(
    network: str, x: np.ndarray, y: np.ndarray, adapts: bool, dropout: float, threads: int
) -> Callable[[], object]:
    import networks
    import torch

    torch.set_num_threads(threads)
    module = networks.network(network).train()
    if adapts:
        import peft

        module = peft.get_peft_model(
            module, peft.LoraConfig(r=RANK, target_modules=list(TARGETS), lora_dropout=dropout)
        )
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], RATE)
    inputs, labels = torch.from_numpy(x), torch.from_numpy(y).long()

    def step() -> None:
        optimizer.zero_grad()
        scores = module(inputs)
        scores = scores.flatten(0, -2)
        torch.nn.functional.cross_entropy(scores, labels.flatten()).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    main()

"""Try a training on CUDA, and write a report with figures beside PyTorch on the same GPU.

    python scripts/gpu_check.py [--out gpu.md] [--networks mlp cnn] [--wheels FOLDER]
    python scripts/gpu_check.py --device cpu

With `--wheels` the packages come from a folder: the script makes an environment of its own and
starts itself there, without a network. Exit status: 0, or 1 if a check failed, or 2 without CUDA.
Then the kernel lists are compared, and the other checks run on the CPU, as `--device cpu` lets them.

Without PyTorch, two small networks stand for those of benchmarks/suite.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks" / "suite")]

PACKAGES = ("onnxruntime-gpu", "torch", "onnxscript", "onnx", "onnx-ir", "numpy")
SUITE = ("mlp", "cnn", "resnet", "mobilenet", "transformer", "lstm")
BUILT_IN = ("small mlp", "small cnn")
COMPARED_STEPS = 20
RESUMED_STEPS = 10
TOLERANCE = 1e-3  # of losses on two devices, relative to the largest
HALF_TOLERANCE = 5e-2  # of losses in half precision, relative to the largest in float32
# Variants of the CUDA provider's options that are timed.
VARIANTS = {
    "default": {},
    "NHWC": {"prefer_nhwc": "1"},
    "heuristic convolutions": {"cudnn_conv_algo_search": "HEURISTIC"},
}


@dataclass(frozen=True)
class Network:
    """A model with batches of data; `name` is that of a benchmark, if it is one."""

    name: str
    model: Any
    batches: Sequence[tuple[Any, Any]]
    loss: str = "cross_entropy"
    pace: float = 1.0  # of the learning rate


@dataclass
class Report:
    """The lines of the report, and the checks that failed."""

    lines: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def write(self, *lines: str) -> None:
        print("\n".join(lines), flush=True)
        self.lines += lines

    def check(self, title: str, function: Callable[[], Sequence[str]]) -> None:
        """Write what a check returns, or the error that it raises."""
        self.write("", f"## {title}", "")
        try:
            self.write(*function())
        except Exception as error:  # whatever a driver or a library raises belongs in the report
            self.failed.append(title)
            self.write(f"**failed**: {type(error).__name__}: {str(error).splitlines()[0][:300]}")


@dataclass(frozen=True)
class Machine:
    """The device of the checks, and where the exported networks lie."""

    device: str
    steps: int

    def trainer(self, network: Network, device: str = "", **settings: Any) -> Any:
        from onnxfit import Trainer
        from onnxfit.optimizers import Adam

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Trainer(
                network.model, loss=network.loss, optimizer=Adam(0.001 * network.pace), gradient="onnx",
                device=device or self.device, distribute=None, **settings,
            )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; return the status for the shell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_check.md"))
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--networks", nargs="+", metavar="NAME")
    parser.add_argument("--steps", type=int, default=50, help="timed steps of each variant")
    parser.add_argument("--wheels", type=Path, help="a folder with all packages")
    options = parser.parse_args(arguments)
    if options.wheels:
        return start_with_wheels(options.wheels, sys.argv[1:] if arguments is None else arguments)
    report = Report()
    device = options.device
    missing = "" if device == "cpu" else why_no_device(device)
    report.write(f"# onnxfit on {device}", "", *versions())
    if missing:
        report.write("", f"No CUDA here: {missing}", "What can be checked on the CPU follows.")
        device = "cpu"
    machine = Machine(device, options.steps)
    with tempfile.TemporaryDirectory() as folder:
        networks = networks_of(options.networks, Path(folder))
        run_checks(report, machine, networks)
    report.write("", f"failed: {', '.join(report.failed) or 'none'}")
    options.out.write_text("\n".join([*report.lines, ""]), encoding="utf-8")
    if missing:
        return 2
    return 1 if report.failed else 0


def run_checks(report: Report, machine: Machine, networks: Sequence[Network]) -> None:
    for network in networks:
        name = network.name
        report.check(f"{name}: kernels in onnxruntime's lists", lambda n=network: listed(n))
        report.check(f"{name}: (a) where nodes run", lambda n=network: placement(machine, n))
        report.check(f"{name}: (b) time of a step", lambda n=network: times(machine, n))
        report.check(
            f"{name}: (c) losses beside those of the CPU", lambda n=network: losses(machine, n)
        )
        report.check(f"{name}: (d) resume", lambda n=network: resume(machine, n))
        report.check(f"{name}: (e) half precision", lambda n=network: half(machine, n))
        report.check(f"{name}: (f) memory", lambda n=network: memory(machine, n))
    report.check("(g) two devices", lambda: two_ranks(machine))


# The machine
# ------------------------------------------------------------------------------------------------


def start_with_wheels(wheels: Path, arguments: Sequence[str]) -> int:
    """Install the packages of a folder into a new environment, and start this script there."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        install = [python, "-m", "pip", "install", "--no-index", "--find-links", str(wheels)]
        subprocess.run([*install, *PACKAGES], check=True)
        rest = list(arguments)
        position = next(i for i, a in enumerate(rest) if a.startswith("--wheels"))
        del rest[position : position + (1 if "=" in rest[position] else 2)]
        return subprocess.run([python, __file__, *rest], check=False).returncode


def why_no_device(device: str) -> str:
    """Return why a device cannot be used; nothing if it can."""
    import onnxruntime

    from onnxfit.errors import OnnxfitError
    from onnxfit.runtime.device import Device

    if hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()  # the libraries of NVIDIA's wheels
    try:
        Device.parse(device)
    except OnnxfitError as error:
        return str(error).splitlines()[0]
    return ""


def versions() -> list[str]:
    import onnx
    import onnxruntime

    found = [f"onnxruntime {onnxruntime.__version__}, onnx {onnx.__version__}"]
    found.append(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores")
    if has_torch():
        found.append(f"torch {importlib.metadata.version('torch')}")
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        found += answer.strip().splitlines()
    return [f"- {line}" for line in found]


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def networks_of(names: Sequence[str] | None, folder: Path) -> list[Network]:
    """Export the networks of the benchmarks, or build small ones where PyTorch is missing."""
    wanted = names or (SUITE if has_torch() else BUILT_IN)
    return [built_in(name) if name in BUILT_IN else exported(name, folder) for name in wanted]


def exported(name: str, folder: Path) -> Network:
    from networks import export
    from workloads import WORKLOADS

    export(name, folder)
    workload = WORKLOADS[name]
    model = str(folder / f"{name}.onnx")
    return Network(name, model, workload.split(), workload.loss, workload.pace)


def built_in(name: str) -> Network:
    """Return a small network with every kind of node that once had no CUDA kernel."""
    import numpy as np
    import onnx.parser
    from onnx.numpy_helper import from_array

    rng = np.random.default_rng(0)
    images = name == "small cnn"
    head = '<ir_version: 8, opset_import: ["": 17]> g '
    if images:
        text = """(float[N,1,28,28] x) => (float[N,10] y) {
            a = Conv<pads=[1,1,1,1]>(x, k)  b = Relu(a)  p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(b)
            d = Dropout(p)  f = Flatten(d)  y = MatMul(f, w) }"""
        shapes = {"k": (8, 1, 3, 3), "w": (8 * 14 * 14, 10)}
    else:
        text = "(float[N,784] x) => (float[N,10] y) { a = MatMul(x, k)  b = Relu(a)  y = MatMul(b, w) }"
        shapes = {"k": (784, 128), "w": (128, 10)}
    model = onnx.parser.parse_model(head + text)
    for weight, shape in shapes.items():
        array = (rng.normal(size=shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)
        model.graph.initializer.append(from_array(array, weight))
    x = rng.normal(size=(4 * 64, *((1, 28, 28) if images else (784,)))).astype(np.float32)
    y = rng.integers(0, 10, len(x))
    return Network(name, model, [(x[i : i + 64], y[i : i + 64]) for i in range(0, len(x), 64)])


# Checks
# ------------------------------------------------------------------------------------------------


def listed(network: Network) -> list[str]:
    """Compare the graphs for CUDA with onnxruntime's lists of kernels; needs no GPU."""
    return [
        line for precision in ("float32", "bf16", "fp16") for line in listed_in(network, precision)
    ]


def listed_in(network: Network, precision: str) -> list[str]:
    """Compare the graph of one precision."""
    from onnxfit.graph.spec import TensorSpec
    from onnxfit.load.reading import read_model
    from onnxfit.load.trainable import TrainableModel
    from onnxfit.runtime.kernel_opset import kernel_opset
    from onnxfit.step.graphs import train_graph
    from onnxfit.step.recipe_builder import build_recipe
    from onnxfit.step.settings import TrainerSettings
    from scripts.cuda_kernels import missing, tables

    settings = TrainerSettings(
        loss=network.loss, optimizer="adam", gradient="onnx", device="cuda", precision=precision
    )
    recipe = build_recipe(TrainableModel.of(read_model(network.model)), settings)
    x, y = network.batches[0]
    shapes = {}
    for array, name in ((x, recipe.inputs[0].name), (y, next(iter(recipe.targets.values())).input)):
        shapes[name] = TensorSpec(name, array.dtype, array.shape)
    graph = train_graph(recipe, shapes)
    lines = []
    with kernel_opset(graph):
        opset = next(o.version for o in graph.opset_import if not o.domain)
        for version, kernels in tables().items():
            nodes = Counter(node.operator for node in missing(graph, kernels))
            lines.append(
                f"- {precision}, onnxruntime {version}: {len(graph.graph.node)} nodes in opset"
                f" {opset}, without a CUDA kernel: {dict(nodes) or 'none'}"
            )
    return lines


def placement(machine: Machine, network: Network) -> list[str]:
    """Return the operators that ran on the CPU, and the copies, of one step."""
    from scripts.profile_step import profiled_sessions

    with tempfile.TemporaryDirectory() as folder:
        with profiled_sessions(Path(folder)):
            trainer = machine.trainer(network)
            trainer.train_on_batch(*network.batches[0])
            del trainer  # a session writes its profile when it ends
            gc.collect()
        events = [e for f in Path(folder).glob("*.json") for e in json.loads(f.read_text())]
    kernels = [e for e in events if e.get("cat") == "Node" and "_kernel_time" in e["name"]]
    by_provider = Counter(e["args"].get("provider", "?") for e in kernels)
    lines = [f"- nodes: {dict(by_provider)}"]
    if machine.device != "cpu":
        names = [
            e["args"]["op_name"]
            for e in kernels
            if e["args"].get("provider") == "CPUExecutionProvider"
        ]
        copies = Counter(n for e in kernels if (n := e["args"]["op_name"]).startswith("Memcpy"))
        lines += [f"- on the CPU: {dict(Counter(names))}", f"- copies: {dict(copies)}"]
    return lines


def times(machine: Machine, network: Network) -> list[str]:
    """Return the median time of a step for each variant, and for PyTorch."""
    rows = ["| variant | ms a step |", "|---|---:|"]
    for name, options in VARIANTS.items():
        if machine.device == "cpu" and options:
            continue
        with provider_options(options):
            rows.append(f"| {name} | {milliseconds(machine, network)} |")
    for name, changed in forms(machine).items():
        with changed:
            rows.append(f"| {name} | {milliseconds(machine, network)} |")
    if machine.device != "cpu":
        rows.append(f"| TF32 | {milliseconds(machine, network, precision='tf32')} |")
    if has_torch() and network.name not in BUILT_IN:
        on_gpu = machine.device != "cpu"
        rows.append(f"| PyTorch, eager | {torch_milliseconds(machine, network, False)} |")
        if on_gpu:
            theirs = torch_milliseconds(machine, network, True)
            rows.append(f"| PyTorch, eager, TF32 | {theirs} |")
            for tf32 in (False, True):
                theirs = or_error(
                    lambda t=tf32: torch_milliseconds(machine, network, t, compiled=True)
                )
                label = "PyTorch, compiled, CUDA graphs" + (", TF32" if tf32 else "")
                rows.append(f"| {label} | {theirs} |")
    return rows


def forms(machine: Machine) -> dict[str, contextlib.AbstractContextManager[Any]]:
    """Return other forms of the step by name, as contexts in which a trainer has them."""
    from onnxfit.runtime import session
    from onnxfit.step.update import FUSING

    unfused = {kind: replace(limits, weight=0) for kind, limits in FUSING.items()}
    found: dict[str, contextlib.AbstractContextManager[Any]] = {
        "weights not fused": mock.patch.dict(FUSING, unfused)
    }
    if machine.device != "cpu":
        found["no CUDA graph"] = mock.patch.object(session, "is_capturable", return_value=False)
        found["deterministic"] = deterministic()
    return found


def deterministic() -> contextlib.AbstractContextManager[Any]:
    """Let sessions use onnxruntime's deterministic kernels."""
    import onnxruntime

    original = onnxruntime.SessionOptions

    def options() -> Any:
        changed = original()
        changed.use_deterministic_compute = True
        return changed

    return mock.patch.object(onnxruntime, "SessionOptions", options)


def milliseconds(machine: Machine, network: Network, **settings: Any) -> str:
    """Return the median of the steps, or the error: a variant may be impossible."""

    def measured() -> str:
        step = machine.trainer(network, **settings).train_on_batch
        return f"{median_of(lambda x, y: step(x, y), network, machine.steps):.3f}"

    return or_error(measured)


def or_error(measure: Callable[[], str]) -> str:
    try:
        return measure()
    except Exception as error:
        return f"failed: {str(error).splitlines()[0][:150]}"


def median_of(step: Callable[[Any, Any], object], network: Network, steps: int) -> float:
    measured = []
    for i in range(steps + 5):
        x, y = network.batches[i % len(network.batches)]
        begun = time.perf_counter()
        step(x, y)
        measured.append(1000 * (time.perf_counter() - begun))
    measured = sorted(measured[5:])
    return measured[len(measured) // 2]


def provider_options(more: dict[str, str]) -> contextlib.AbstractContextManager[Any]:
    """Compile sessions inside the block with further options of the provider."""
    from onnxfit.runtime.device import Device

    original: Any = Device.options
    changed = property(lambda self: {**original.fget(self), **more})
    return mock.patch.object(Device, "options", changed)


def torch_milliseconds(
    machine: Machine,
    network: Network,
    tf32: bool,
    precision: str = "float32",
    *,
    compiled: bool = False,
) -> str:
    """Return the median of the steps in PyTorch; autocast computes in half precision."""
    import torch
    from networks import network as module_of

    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    device = torch.device(machine.device)
    module = module_of(network.name).to(device)
    if compiled:
        module = torch.compile(module, mode="reduce-overhead")
    optimizer = torch.optim.Adam(module.parameters(), 0.001, fused=True)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    function = torch.nn.functional.cross_entropy
    if network.loss == "mse":
        function = torch.nn.functional.mse_loss

    def step(x: Any, y: Any) -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            output = module(torch.from_numpy(x).to(device))
            labels = torch.from_numpy(y).to(device)
            if output.ndim > 2:
                output = output.movedim(-1, 1)
            loss = function(output, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return f"{median_of(step, network, machine.steps):.3f}"


def losses(machine: Machine, network: Network) -> list[str]:
    """Compare the losses of some steps with those of the CPU."""
    batches = [network.batches[i % len(network.batches)] for i in range(COMPARED_STEPS)]

    def trained(device: str) -> list[float]:
        trainer = machine.trainer(network, device)
        return [trainer.train_on_batch(x, y)["loss"] for x, y in batches]

    cpu = trained("cpu")
    lines = []
    for name, changed in {"default": contextlib.nullcontext(), **forms(machine)}.items():
        with changed:
            here = trained(machine.device)
        worst = largest_difference(here, cpu)
        lines.append(f"- {name}, {len(batches)} losses: {worst:.1e} of the largest loss apart")
        # A Dropout draws other numbers on CUDA.
        has_dropout = network.name == "small cnn" and machine.device != "cpu"
        if not has_dropout and not worst < TOLERANCE:
            raise AssertionError(f"{name}: {worst:.1e} > {TOLERANCE}; {here} against {cpu}")
    return lines


def largest_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return it relative to the largest expected number; NaN if there is one, unlike max()."""
    import numpy as np

    apart = [abs(a - b) for a, b in zip(found, expected)]
    return float(np.max(apart) / np.max(np.abs(expected)))


def half(machine: Machine, network: Network) -> list[str]:
    """Compare half precision with PyTorch's autocast in time, and with float32 in losses."""
    batch = network.batches[0]  # always the same: a skipped step only delays the losses

    def trained(precision: str) -> tuple[list[float], int]:
        trainer = machine.trainer(network, precision=precision)
        found = [trainer.train_on_batch(*batch)["loss"] for _ in range(COMPARED_STEPS)]
        return found, int(trainer.get_state()["slots"].get("train/skipped_steps", 0))

    full, _ = trained("float32")
    rows = [
        "| precision | ms a step | PyTorch, autocast | losses apart | skipped steps |",
        "|---|---:|---:|---:|---:|",
    ]
    for precision in ("bf16", "fp16"):
        theirs = "not tried"
        if has_torch() and network.name not in BUILT_IN:
            tf32 = machine.device != "cpu"
            theirs = or_error(
                lambda p=precision, t=tf32: torch_milliseconds(machine, network, t, p)
            )
        ours = milliseconds(machine, network, precision=precision)
        found, skipped = trained(precision)
        if skipped >= COMPARED_STEPS:
            raise AssertionError(f"{precision}: all {skipped} steps were skipped")
        worst = largest_difference(found[skipped:], full)
        rows.append(f"| {precision} | {ours} | {theirs} | {worst:.1e} | {skipped} |")
        has_dropout = network.name == "small cnn" and machine.device != "cpu"
        if not has_dropout and not worst < HALF_TOLERANCE:
            raise AssertionError(f"{precision}: {worst:.1e} > {HALF_TOLERANCE}; {found}, {full}")
    return rows


def resume(machine: Machine, network: Network) -> list[str]:
    """Compare a training that was interrupted with two that were not, bit for bit.

    Some kernels of CUDA add numbers in any order. Then the two differ as well.
    """
    whole, again = (trained_to_the_end(machine, network) for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        resumed = trained_to_the_end(machine, network, Path(folder) / "half.onnxfit")
    by_chance = weights_apart(whole, again)
    found = weights_apart(whole, resumed)
    if found and not by_chance:
        raise AssertionError(f"{len(found)} of {len(whole)} weights differ: {found}")
    if by_chance:
        return [
            f"- {len(by_chance)} of {len(whole)} weights differ between two equal trainings, by up"
            f" to {max(by_chance.values()):.1e}; {len(found)} after a resumed one, by up to"
            f" {max(found.values(), default=0.0):.1e}"
        ]
    return [f"- {len(whole)} weights are equal to the last bit"]


def trained_to_the_end(
    machine: Machine, network: Network, interrupted: Path | None = None
) -> dict[str, Any]:
    """Return the weights after some steps; `interrupted` is a file to go on from half way."""
    from onnxfit import Trainer

    batches = [network.batches[i % len(network.batches)] for i in range(RESUMED_STEPS)]
    trainer = machine.trainer(network)
    for i, (x, y) in enumerate(batches):
        if interrupted is not None and i == RESUMED_STEPS // 2:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                path = trainer.save(interrupted)
                trainer = Trainer.load(path, device=machine.device, distribute=None)
        trainer.train_on_batch(x, y)
    return dict(trainer.get_weights())


def weights_apart(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Return the largest differences of the weights that differ."""
    import numpy as np

    return {
        name: float(np.abs(array - other[name]).max())
        for name, array in one.items()
        if not np.array_equal(array, other[name])
    }


def memory(machine: Machine, network: Network) -> list[str]:
    """Return the memory of the process on the device after some steps."""
    trainer = machine.trainer(network)
    for x, y in network.batches[:3]:
        trainer.train_on_batch(x, y)
    weights = sum(array.nbytes for array in trainer.get_weights().values())
    lines = [f"- weights: {weights / 2**20:.1f} MiB"]
    if machine.device == "cpu":
        import resource  # only Unix has it

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        return [*lines, f"- most memory of the process so far: {peak:.0f} MiB"]
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    table = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    used = [row.split(",")[1] for row in table.splitlines() if row.startswith(f"{os.getpid()},")]
    return [*lines, f"- the process on the GPU: {', '.join(used) or 'not listed'} MiB"]


WORKER = """
import sys, os
import numpy as np
sys.path.insert(0, {root!r})
from scripts.gpu_check import built_in
from onnxfit import Trainer
from onnxfit.distributed import Torch
device = {device!r}
if device != "cpu":
    device = "cuda:" + os.environ["LOCAL_RANK"]
network = built_in("small mlp")
trainer = Trainer(network.model, loss=network.loss, gradient="onnx", device=device, threads=1,
                  distribute=Torch({backend!r}))
x, y = (np.concatenate(arrays) for arrays in zip(*network.batches))
history = trainer.fit(x, y, epochs=2, batch_size=64, verbose=0)
if trainer.is_main:
    print("LOSSES", *history.history["loss"])
"""


def two_ranks(machine: Machine) -> list[str]:
    """Train on two devices by torch.distributed, and compare with one."""
    import numpy as np

    if not has_torch():
        return ["- PyTorch is missing: not tried"]
    import torch

    devices = torch.cuda.device_count()
    if machine.device != "cpu" and devices < 2:
        return [f"- {devices} GPU here: not tried"]
    backend = "gloo" if machine.device == "cpu" else "nccl"
    network = built_in("small mlp")
    x, y = (np.concatenate(arrays) for arrays in zip(*network.batches))
    from onnxfit import Trainer

    alone = Trainer(
        network.model, loss=network.loss, gradient="onnx", device=machine.device, distribute=None
    )
    expected = alone.fit(x, y, epochs=2, batch_size=64, verbose=0).history["loss"]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "worker.py"
        script.write_text(WORKER.format(root=str(ROOT), device=machine.device, backend=backend))
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        ran = subprocess.run(
            [*launch, "2", str(script)], capture_output=True, text=True, timeout=300, check=False
        )
    printed = [line for line in ran.stdout.splitlines() if line.startswith("LOSSES")]
    if not printed:
        raise RuntimeError(f"no losses: {ran.stderr.strip().splitlines()[-1:]}")
    found = [float(number) for number in printed[0].split()[1:]]
    worst = max(abs(a - b) for a, b in zip(expected, found))
    return [f"- 2 ranks by {backend}: largest difference of the losses {worst:.1e}"]


if __name__ == "__main__":
    sys.exit(main())

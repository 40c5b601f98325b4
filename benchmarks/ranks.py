"""The time of a step on many ranks: measured on two and four ranks, computed for up to 1,024.

    python benchmarks/ranks.py [--rates 1 2 4 8] [--seconds 6] [--write-docs]

Needs Linux, root, `ip` and `tc`: network namespaces are connected by a bridge, a token bucket limits
the rate of each, and each has one rank of Open MPI, so that the ranks cannot share memory. For each
rate, two ranks take turns at sums of three sizes, from which latency and bandwidth are fitted, and
at steps alone, with the sum after the backward pass, and with the sum during it. So do four ranks
with few rows, for which the figures of two ranks predict the steps. All ranks begin a step
together; its time is that of the slowest rank. The figures are medians. The ranks run ahead of all
other programs, each on one processor, because the times are of no use if ranks wait for
processors. `--write-docs` writes the tables of docs/scale.md, docs/benchmarks/ranks.csv
and docs/benchmarks/ranks.png from build/benchmarks/ranks.json; without `--rates`, from the last run.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from distributed import network, timed

import onnxfit
from onnxfit.distributed import MPI
from onnxfit.distributed.find import world_of
from onnxfit.distributed.sums import RankSum, rank_sum
from onnxfit.runtime.reduction import MIN_BYTES_OF_BUCKET

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build/benchmarks/ranks.json"
PAGE, PICTURE, FIGURES = (
    ROOT / "docs" / name for name in ("scale.md", "benchmarks/ranks.png", "benchmarks/ranks.csv")
)
SIZES = (1024, 1024, 1024, 1024, 1024, 10)  # of the layers: 4.2 million weights
ROWS = {2: 256, 4: 16}  # number of ranks -> rows of each
SUMS = (2**20, 2**22, 2**24)  # bytes
REPEATS = 10
MESSAGES = 1000
RANKS = (2, 8, 64, 256, 1024)
SPEEDS = (1, 10, 100)  # Gb/s of the computed links
RANKS_OF_MACHINE = 8  # of the computed hierarchical sums


@dataclass(frozen=True)
class Link:
    """A network between ranks: LogGP's L + 2 o and 1 / G."""

    latency: float  # seconds of a message
    bandwidth: float  # bytes per second
    overhead: float = 0.0  # seconds of the processor, to send and receive a message
    processor: float = 0.0  # seconds of the processor for a byte of a sum

    def sum(self, ranks: int, size: float) -> float:
        """Return the seconds of a sum of `size` bytes: twice, a rank sends a part to each other."""
        others = ranks - 1
        return 2 * (
            self.latency * (others > 0) + others * (self.overhead + size / ranks / self.bandwidth)
        )

    def tree(self, machines: int, size: float) -> float:
        """Return the seconds of Open MPI's sum up a tree of machines, and down again."""
        return 2 * math.ceil(math.log2(machines)) * (self.latency + size / self.bandwidth)

    def hierarchical(self, machines: int, size: float, memory: float) -> float:
        """Return the seconds of a sum inside each machine and then between machines.

        - `memory`: bytes per second of the sum inside a machine.
        """
        return size / memory + self.sum(machines, size)


def plain_step(compute: float, total: float, link: Link, ranks: int) -> float:
    """Return the seconds of a step whose sum of `total` bytes follows the backward pass."""
    return compute + link.sum(ranks, total)


def overlapped_step(compute: float, sizes: list[float], link: Link, ranks: int) -> float:
    """Return the seconds of a step that sums buckets during the backward pass.

    The backward pass takes 2/3 of the time, and completes gradients evenly. A sum takes the
    processor from the computation of later buckets. `sizes` are the bytes of the buckets; the last
    bucket is summed after the pass.
    """
    end, done = 0.0, 0.0
    for size in sizes:
        delay = link.processor * done
        done += size
        complete = compute * (1 + 2 * done / sum(sizes)) / 3 + delay
        end = max(end, complete) + link.sum(ranks, size)
    return end


def buckets(total: float, largest: float, ranks: int) -> list[float]:
    """Return the bytes of equal buckets: of the size that onnxfit chooses, or of a whole layer."""
    size = max(MIN_BYTES_OF_BUCKET * ranks, largest)
    count = max(1, math.floor(total / size))
    return [total / count] * count


# ------------------------------------------------------------------ measuring


def take_processor(rank: int) -> None:
    """Let this process run ahead of all others, on one processor. Needs root."""
    os.setpriority(os.PRIO_PROCESS, 0, -15)
    group = Path("/proc/self/autogroup")  # where sessions are groups, the priority of the group
    if group.exists():
        group.write_text("-15")
    os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})


def measure(seconds: float) -> dict[str, float]:
    """Return the seconds of the sums and steps of the slowest rank."""
    world = world_of("mpi")
    assert not world.shares_memory
    take_processor(world.rank)
    rows = ROWS[world.size] * world.size
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, SIZES[0])).astype(np.float32)
    y = rng.integers(0, SIZES[-1], rows)
    own = np.array_split(np.arange(rows), world.size)[world.rank]
    after = MPI()
    after.overlaps = False
    ways = {"alone": (None, own), "after": (after, slice(None)), "during": (MPI(), slice(None))}
    model, _ = network(SIZES)
    steps: dict[str, Any] = {}
    for name, (distribute, own_rows) in ways.items():
        trainer = onnxfit.Trainer(
            model, loss="cross_entropy", optimizer=1e-4, threads=1, distribute=distribute
        )
        data = x[own_rows], y[own_rows]
        source = trainer._training.source(*data, None, len(data[0]), "training")
        batch = next(iter(source.batches(0)))
        steps[name] = lambda trainer=trainer, batch=batch: trainer._training.step(
            batch, 1e-4, trainer._training.tracker
        )
    for size in SUMS:
        flat = rank_sum(world, np.float32, size // 4)
        steps[str(size)] = lambda flat=flat: flat.add_up("the benchmark")
    took = timed(steps, world, seconds)
    found = {name: statistics.median(times) for name, times in took.items()}
    return found | processor_of(flat, after)


def processor_of(flat: RankSum, communicator: MPI) -> dict[str, float]:
    """Return the seconds of the processor for a byte of a sum, and for a message."""
    began = time.process_time()
    for _ in range(REPEATS):
        flat.add_up("the benchmark")
    for_sums = time.process_time() - began
    number = np.zeros(1)
    began = time.perf_counter()
    messages = communicator._communicator
    requests = [messages.Irecv(number, messages.rank) for _ in range(MESSAGES)]
    requests += [messages.Isend(number, messages.rank) for _ in range(MESSAGES)]
    communicator._library.Request.Waitall(requests)
    for_messages = time.perf_counter() - began
    return {
        "processor": for_sums / REPEATS / flat.own.nbytes,
        "overhead": for_messages / MESSAGES,
    }


def measure_memory() -> float:
    """Return the bytes per second of a sum of two ranks inside a machine, before and after the sum
    between machines.
    """
    world = world_of("mpi")
    take_processor(world.rank)
    communicator = MPI()
    communicator._between = None
    buffer = np.ones(SUMS[-1] // 4, np.float32)
    took = timed({"sum": lambda: communicator._add_by_machine(buffer)}, world, 2)
    return SUMS[-1] / statistics.median(took["sum"])


def connect(rate: float | None, machines: int) -> None:
    """Connect namespaces by a bridge, each at `rate` Gb/s; None removes them."""
    commands = ["ip netns del onnxfit-bridge"]
    commands += [f"ip netns del onnxfit{i}" for i in range(machines)]
    if rate is not None:
        commands = ["ip netns add onnxfit-bridge"]
        commands.append("ip -n onnxfit-bridge link add bridge type bridge")
        commands.append("ip -n onnxfit-bridge link set bridge up")
        for i in range(machines):
            bucket = f"tbf rate {rate}gbit burst 256kb latency 20ms"
            commands += [
                f"ip netns add onnxfit{i}",
                f"ip -n onnxfit{i} link set lo up",
                f"ip link add fit{i} netns onnxfit{i} type veth peer name fit{i} netns onnxfit-bridge",
                f"ip -n onnxfit-bridge link set fit{i} master bridge up",
                f"ip -n onnxfit{i} addr add 10.77.7.1{i}/24 dev fit{i}",
                f"ip -n onnxfit{i} link set fit{i} up",
                f"ip netns exec onnxfit{i} tc qdisc add dev fit{i} root {bucket}",
            ]
    for command in commands:
        is_removal = "netns del" in command
        subprocess.run(command.split(), check=not is_removal, capture_output=is_removal)


def on_machines(command: list[str], folder: Path, machines: int, ranks_of_each: int = 1) -> None:
    """Run a command as ranks of Open MPI, in namespaces with host names of their own."""
    agent = folder / "agent.sh"
    agent.write_text(
        "#!/bin/sh\nexport machine=${1#10.77.7.1}\nshift\n"
        "exec ip netns exec onnxfit$machine unshare -u"
        ' sh -c \'hostname fit$machine; exec sh -c "$0"\' "$*"\n'
    )
    agent.chmod(0o755)
    mpiexec = Path(sys.executable).with_name("mpiexec")
    start = 'hostname fit0; exec "$@"'
    hosts = ["fit0", *(f"10.77.7.1{i}" for i in range(1, machines))]
    options = "--allow-run-as-root --bind-to none"
    options += f" --host {','.join(f'{host}:{ranks_of_each}' for host in hosts)}"
    options += f" -n {machines * ranks_of_each}"
    options += f" --prtemca plm_ssh_agent {agent} --mca btl self,sm,tcp --mca pml ob1"
    options += " --mca btl_tcp_if_include 10.77.7.0/24"
    inside = ["ip", "netns", "exec", "onnxfit0", "unshare", "-u", "sh", "-c", start, "-"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*inside, str(mpiexec), *options.split(), *command], check=True, env=environment)


def run(rates: list[float], seconds: float) -> dict[str, Any]:
    """Measure ranks over links of each rate, and two ranks of one machine."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    part = RESULTS.with_suffix(".part")
    command = [sys.executable, str(Path(__file__).resolve()), "--seconds", str(seconds)]
    command += ["--rank-of", str(part)]
    links = []
    for ranks in ROWS:
        for rate in rates:
            connect(rate, ranks)
            try:
                on_machines(command, RESULTS.parent, ranks)
            finally:
                connect(None, ranks)
            links.append({"ranks": ranks, "rate": rate, **json.loads(part.read_text())})
    if onnxfit.distributed.launch([*command, "--memory"], 2):
        raise SystemExit("The ranks in shared memory failed.")
    return {"links": links, "memory": json.loads(part.read_text())}


# ------------------------------------------------------------------ predicting


def link_of(took: dict[str, float]) -> Link:
    """Return the link through the times of the sums on two ranks: two latencies, and the bytes."""
    sizes = np.array(SUMS, float)
    times = np.array([took[str(size)] for size in SUMS])
    # Relative errors count, or the smallest sum would not.
    slope, fixed = np.polyfit(sizes, times, 1, w=1 / times)
    return Link(max(fixed, 0.0) / 2, 1 / slope, took["overhead"], took["processor"])


def links_of(results: dict[str, Any]) -> dict[float, Link]:
    """Return rate -> the link between two ranks."""
    return {took["rate"]: link_of(took) for took in results["links"] if took["ranks"] == 2}


def checked(results: dict[str, Any]) -> list[dict[str, float]]:
    """Return what the ranks took over each link, beside what the model says."""
    layers = [4.0 * (a * b + b) for a, b in pairwise(SIZES)]
    total = sum(layers)
    links = links_of(results)
    rows = []
    for took in results["links"]:
        link, ranks = links[took["rate"]], took["ranks"]
        sizes = buckets(total, max(layers), ranks)
        rows.append(
            {
                "ranks": ranks,
                "rate_gbit": took["rate"],
                "latency_us": link.latency * 1e6,
                "bandwidth_gbit": link.bandwidth * 8e-9,
                "processor_ns": link.processor * 1e9,
                "alone_ms": took["alone"] * 1e3,
                "after_ms": took["after"] * 1e3,
                "after_predicted_ms": plain_step(took["alone"], total, link, ranks) * 1e3,
                "during_ms": took["during"] * 1e3,
                "during_predicted_ms": overlapped_step(took["alone"], sizes, link, ranks) * 1e3,
            }
        )
    return rows


def networks(results: dict[str, Any]) -> dict[str, tuple[float, float, float]]:
    """Return the seconds of a step of one rank, the bytes of the weights, and of the largest one.

    The operations per second are those measured with the dense layers. Sizes and operations are
    those of the papers: He et al. (2016), Radford et al. (2019); a token takes 6 operations a
    weight (Kaplan et al., 2020).
    """
    alone = min(took["alone"] for took in results["links"] if took["ranks"] == 2)
    weights = sum(a * b + b for a, b in pairwise(SIZES))
    speed = 6 * weights * ROWS[2] / alone
    return {
        f"MLP, 4.2 M weights, {ROWS[2]} rows a rank": (alone, 4.0 * weights, 2.0**22),
        "ResNet-50, 25.6 M, 32 images": (3 * 2 * 4.1e9 * 32 / speed, 4 * 25.6e6, 2.0**23),
        "GPT-2, 124 M, 4 x 1,024 tokens": (6 * 124e6 * 4096 / speed, 4 * 124e6, 4.0 * 38.6e6),
    }


def efficiency(network: tuple[float, float, float], link: Link, ranks: int) -> tuple[float, float]:
    """Return the part of a step that computes, with the sum after and during the backward pass."""
    compute, total, largest = network
    sizes = buckets(total, largest, ranks)
    after = compute / plain_step(compute, total, link, ranks)
    return after, compute / overlapped_step(compute, sizes, link, ranks)


# ------------------------------------------------------------------ writing


def table_of_check(results: dict[str, Any]) -> str:
    lines = [
        "| ranks | link | latency, bandwidth of sums | alone | after: measured | predicted | during: measured | predicted |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['ranks']} | {row['rate_gbit']:g} Gb/s | {row['latency_us']:,.0f} µs, {row['bandwidth_gbit']:.2f} Gb/s | {row['alone_ms']:.0f} | {row['after_ms']:.0f} | {row['after_predicted_ms']:.0f} | {row['during_ms']:.0f} | {row['during_predicted_ms']:.0f} |"
        for row in checked(results)
    ]
    return "\n".join(lines)


def computed_link(results: dict[str, Any], speed: float) -> Link:
    """Return a link of `speed` Gb/s: with the median latency, and the median part of the rate that
    sums reached.
    """
    links = links_of(results)
    part = statistics.median(link.bandwidth * 8e-9 / rate for rate, link in links.items())
    latency, overhead, processor = (
        statistics.median(getattr(link, name) for link in links.values())
        for name in ("latency", "overhead", "processor")
    )
    return Link(latency, part * speed * 1e9 / 8, overhead, processor)


def table_of_ranks(results: dict[str, Any]) -> str:
    lines = [
        f"| network | link | {' | '.join(f'{n:,}' for n in RANKS)} |",
        f"|---|---|{'---|' * len(RANKS)}",
    ]
    for name, one in networks(results).items():
        for speed in SPEEDS:
            link = computed_link(results, speed)
            parts = [efficiency(one, link, ranks) for ranks in RANKS]
            cells = [f"{after:.0%}, {during:.0%}" for after, during in parts]
            lines.append(f"| {name} | {speed} Gb/s | {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_machines(results: dict[str, Any]) -> str:
    """Return the seconds of sums of machines with several ranks, as a table in Markdown."""
    many = [ranks // RANKS_OF_MACHINE for ranks in RANKS if ranks > RANKS_OF_MACHINE]
    lines = [
        f"| weights | {' | '.join(f'{n:,} machines' for n in many)} |",
        f"|---|{'---|' * len(many)}",
    ]
    link = computed_link(results, 10)
    for name, (_, total, _) in networks(results).items():
        cells = [
            f"{link.tree(n, total):.2f} s, {link.hierarchical(n, total, results['memory']):.2f} s"
            for n in many
        ]
        lines.append(f"| {name.split(', ')[0]}, {total / 4e6:.1f} M | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(results: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    rows = [row for row in checked(results) if row["ranks"] == 2]
    rates = [row["rate_gbit"] for row in rows]
    left.plot(rates, [row["alone_ms"] for row in rows], color="grey", label="alone, measured")
    for what, color in (("after", "C0"), ("during", "C1")):
        label = f"sum {what} the backward pass"
        left.plot(rates, [row[f"{what}_ms"] for row in rows], "o", color=color, label=label)
        predicted = [row[f"{what}_predicted_ms"] for row in rows]
        left.plot(rates, predicted, "--", color=color, label="predicted")
    left.set_xscale("log", base=2)
    left.set_xticks(rates, [f"{rate:g}" for rate in rates])
    left.set_ylim(bottom=0)
    left.set_xlabel("Gb/s")
    left.set_ylabel("ms a step, two ranks")
    left.set_title("Measured and predicted")
    left.legend(fontsize=8)
    every = [2**i for i in range(1, 11)]
    link = computed_link(results, 10)
    for i, (name, one) in enumerate(networks(results).items()):
        parts = [efficiency(one, link, ranks) for ranks in every]
        right.plot(every, [after for after, _ in parts], ":", color=f"C{i}")
        right.plot(every, [during for _, during in parts], "-", color=f"C{i}", label=name)
    right.set_xscale("log", base=2)
    right.set_xticks(every[::2], [f"{n:,}" for n in every[::2]])
    right.set_ylim(0, 1.02)
    right.set_xlabel("ranks, each with the same number of rows")
    right.set_ylabel("part of a step that computes")
    right.set_title("Computed: 10 Gb/s; dotted: sum after the pass")
    right.legend(fontsize=8)
    figure.savefig(PICTURE, dpi=120)


def write_docs(results: dict[str, Any]) -> None:
    """Write the figures, the tables of the page and the chart."""
    rows = checked(results)
    with FIGURES.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: f"{x:.6g}" for name, x in row.items()} for row in rows)
    text = PAGE.read_text()
    for name, table in (
        ("check", table_of_check(results)),
        ("ranks", table_of_ranks(results)),
        ("machines", table_of_machines(results)),
    ):
        begin = f"<!-- {name}, generated by benchmarks/ranks.py -->"
        head, _, rest = text.partition(begin)
        _, end, tail = rest.partition("<!-- end -->")
        text = f"{head}{begin}\n\n{table}\n\n{end}{tail}"
    PAGE.write_text(text)
    draw(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rates", type=float, nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--write-docs", action="store_true")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        found = measure_memory() if arguments.memory else measure(arguments.seconds)
        if world_of("mpi").is_main:
            arguments.rank_of.write_text(json.dumps(found))
        return
    if arguments.rates:
        RESULTS.write_text(json.dumps(run(arguments.rates, arguments.seconds)))
    results = json.loads(RESULTS.read_text())
    tables = table_of_check, table_of_ranks, table_of_machines
    print(*(table(results) for table in tables), sep="\n\n")
    if arguments.write_docs:
        write_docs(results)


if __name__ == "__main__":
    main()

"""Say which operators of a graph onnxruntime's CUDA provider cannot run.

    python scripts/cuda_kernels.py step.onnx [...]
    python scripts/cuda_kernels.py --update OperatorKernels.md VERSION COMMIT

onnxruntime documents its kernels in docs/OperatorKernels.md: operators, opsets, and element types.
`--update` writes the part about CUDA into scripts/kernels/cuda-VERSION.txt, and a graph is compared
with every file there. A node without a kernel runs on the CPU: onnxruntime copies its inputs there
and its outputs back, in every step, and the graph cannot become a CUDA graph.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx.shape_inference

FOLDER = Path(__file__).resolve().parent / "kernels"
PROVIDER = "CUDAExecutionProvider"
# The domain of a copy of some kernels, which onnxruntime itself puts in the place of others.
INTERNAL_DOMAIN = "com.ms.internal.nhwc"
# Their outputs are in the memory of the CPU.
SIZE_OPERATORS = {"Shape", "Size"}
# Neither the CPU nor CUDA has a kernel of these operators, so that onnxruntime puts their
# definition in their place: operator -> the one that it consists of, which reads the first input.
INLINED = {"CastLike": "Cast"}


@dataclass(frozen=True)
class Kernel:
    """A row of the table.

    - `first`, `last`: the versions of the operator. `last` is None for a kernel that was written
      for the newest version of its time: onnxruntime uses it for `first` alone, since a later
      version may ask for more.
    - `parameters`: the ways to write the operator, each as type variables of inputs and outputs.
    - `types`: type variable -> element types; a variable that is not in it may be anything.
    """

    first: int
    last: int | None
    parameters: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    types: Mapping[str, frozenset[str]]

    def is_for(self, version: int) -> bool:
        """Return whether the kernel runs this version of the operator."""
        return version == self.first or (
            self.last is not None and self.first <= version <= self.last
        )

    def accepts(self, inputs: Sequence[str | None], outputs: Sequence[str | None]) -> bool:
        """Return whether the kernel takes these element types; None stands for an absent value."""
        return any(
            self._matches(names, inputs) and self._matches(results, outputs)
            for names, results in self.parameters
        )

    def _matches(self, variables: Sequence[str], types: Sequence[str | None]) -> bool:
        if types and not variables:
            return False
        # The last parameter of a variadic operator takes all that are left.
        padded = [*variables, *variables[-1:] * (len(types) - len(variables))]
        return all(
            type_ is None or self._takes(variable, type_) for variable, type_ in zip(padded, types)
        )

    def _takes(self, variable: str, type_: str) -> bool:
        if variable.startswith("tensor("):  # no variable, but a type
            return variable == f"tensor({type_})"
        return variable not in self.types or type_ in self.types[variable]


Kernels = Mapping[tuple[str, str], Sequence[Kernel]]


# The table
# ------------------------------------------------------------------------------------------------


def rows_of(document: str) -> Iterator[str]:
    """Return the rows of the compact table, from the text of OperatorKernels.md."""
    section = re.split(r"^## Operators implemented by ", document, flags=re.MULTILINE)
    (rows,) = (part for part in section if part.startswith(PROVIDER))
    domain = operator = parameters = ""
    for row in rows.splitlines():
        cells = row.split("|")
        heading = re.fullmatch(r"\|\*\*Operator Domain:\*\* \*(\S+)\*\|+", row)
        if heading:
            domain = "" if heading[1] == "ai.onnx" else heading[1]
        # A row that leaves operator and parameters out has those of the row before.
        if len(cells) != 6 or "**" not in cells[4] or domain == INTERNAL_DOMAIN:
            continue
        operator = cells[1] or operator
        parameters = _compact_parameters(cells[2]) if cells[2] else parameters
        name = f"{domain}:{operator}" if domain else operator
        yield "\t".join((name, _compact_opsets(cells[3]), parameters, _compact_types(cells[4])))


def _compact_parameters(cell: str) -> str:
    ways = []
    for way in cell.split("<br><br>or<br><br>"):
        sides: dict[str, list[str]] = {"in": [], "out": []}
        for side, variable in re.findall(r"\*(in|out)\* \S+?:\*\*(.+?)\*\*", way):
            sides[side].append(variable)
        ways.append(f"{' '.join(sides['in'])} > {' '.join(sides['out'])}".strip())
    return " or ".join(dict.fromkeys(ways))


def _compact_opsets(cell: str) -> str:
    return "-".join(re.findall(r"\d+", cell)) + ("-" if "+" in cell else "")


def _compact_types(cell: str) -> str:
    cell = re.sub(r"tensor\((\w+)\)", r"\1", cell)
    lists = re.findall(r"\*\*(\S+)\*\* = ([^*]+?)(?:<br/>|$)", cell)
    return "; ".join(f"{name}={' '.join(re.findall(r'[^ ,]+', types))}" for name, types in lists)


def read_table(path: Path) -> Kernels:
    """Return (domain, operator) -> kernels, from a file that `--update` has written."""
    table = defaultdict(list)
    for row in path.read_text(encoding="utf-8").splitlines():
        if row.startswith("#"):
            continue
        name, opsets, parameters, types = row.split("\t")
        domain, _, operator = name.rpartition(":")
        first, _, last = opsets.partition("-")
        ways = [way.partition(">") for way in parameters.split(" or ")]
        lists = (entry.partition("=") for entry in types.split("; "))
        kernel = Kernel(
            int(first),
            int(last) if last else None if "-" in opsets else int(first),
            tuple((tuple(ins.split()), tuple(outs.split())) for ins, _, outs in ways),
            {variable: frozenset(listed.split()) for variable, _, listed in lists},
        )
        table[domain, operator].append(kernel)
    return dict(table)


def tables() -> dict[str, Kernels]:
    """Return version of onnxruntime -> its kernels."""
    return {
        path.stem.removeprefix("cuda-"): read_table(path)
        for path in sorted(FOLDER.glob("cuda-*.txt"))
    }


# Graphs
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Missing:
    """A node that no kernel runs; `types` are those of its inputs and outputs."""

    operator: str
    types: str
    node: str

    def __str__(self) -> str:
        return f"{self.operator}({self.types}) at {self.node!r}"


def missing(model: onnx.ModelProto, kernels: Kernels) -> list[Missing]:
    """Return the nodes of a model, and of its subgraphs, for which there is no kernel.

    A node that computes sizes from sizes alone is at its place on the CPU, and is left out: the
    output of Shape is in the memory of the CPU. So is a node that onnxruntime computes when it
    compiles the graph, because it reads constants alone.
    """
    return list(_missing_in(model.graph, kernels, _opsets(model), {}, set()))


def _opsets(model: onnx.ModelProto) -> dict[str, int]:
    return {o.domain.replace("ai.onnx", ""): o.version for o in model.opset_import}


def _missing_in(
    graph: onnx.GraphProto,
    kernels: Kernels,
    opsets: Mapping[str, int],
    outer: Mapping[str, str],
    on_cpu: set[str],
) -> Iterator[Missing]:
    values = (*graph.input, *graph.value_info, *graph.output)
    types = {**outer, **{v.name: _type_of(v.type) for v in values}}
    types |= {t.name: _element_type(t.data_type) for t in graph.initializer}
    on_cpu = on_cpu | {t.name for t in graph.initializer}
    for node in graph.node:
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                yield from _missing_in(body, kernels, opsets, types, on_cpu)
        inputs = [name for name in node.input if name]
        if node.op_type in SIZE_OPERATORS or on_cpu.issuperset(inputs):
            on_cpu.update(node.output)
            continue
        reading = [_type_named(types, name) for name in node.input]
        writing = [_type_named(types, name) for name in node.output]
        domain = node.domain.replace("ai.onnx", "")
        operator = INLINED.get(node.op_type, node.op_type)
        reading = reading[:1] if operator != node.op_type else reading
        version = _version(domain, operator, opsets.get(domain, 1))
        if not any(
            kernel.is_for(version) and kernel.accepts(reading, writing)
            for kernel in kernels.get((domain, operator), ())
        ):
            shown = (" ".join(t or "-" for t in side) for side in (reading, writing))
            yield Missing(node.op_type, " > ".join(shown), node.name)


def _version(domain: str, operator: str, opset: int) -> int:
    """Return the opset that the operator was last changed in."""
    if domain:  # onnxruntime's own operators, which have one version
        return opset
    if not onnx.defs.has(operator, opset, domain):  # onnxruntime's own in ONNX's domain
        return 1
    return onnx.defs.get_schema(operator, opset, domain).since_version


def _type_named(types: Mapping[str, str], name: str) -> str | None:
    return types.get(name, "unknown") if name else None


def _type_of(type_: onnx.TypeProto) -> str:
    if type_.HasField("tensor_type"):
        return _element_type(type_.tensor_type.elem_type)
    if type_.HasField("sequence_type"):
        return f"seq({_type_of(type_.sequence_type.elem_type)})"
    return "unknown"


def _element_type(number: int) -> str:
    return onnx.TensorProto.DataType.Name(number).lower()


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare graphs, or write a table; return the status for the shell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="*", type=Path)
    parser.add_argument("--update", nargs=3, metavar=("DOCUMENT", "VERSION", "COMMIT"))
    chosen = parser.parse_args(arguments)
    if chosen.update:
        document, version, commit = chosen.update
        write_table(Path(document).read_text(encoding="utf-8"), version, commit)
    found = [
        f"{path}: onnxruntime {version} has no CUDA kernel for {node}"
        for path in chosen.model
        for version, kernels in tables().items()
        for node in missing(_read(path), kernels)
    ]
    print("\n".join(found or ["Every node has a CUDA kernel."] * bool(chosen.model)))
    return bool(found)


def _read(path: Path) -> onnx.ModelProto:
    return onnx.shape_inference.infer_shapes(onnx.load(path, load_external_data=False))


def write_table(document: str, version: str, commit: str) -> None:
    """Write the table of a version; `commit` is that of onnxruntime's sources."""
    head = (
        f"# Kernels of the {PROVIDER} of onnxruntime while {version} was developed,",
        f"# by scripts/cuda_kernels.py from docs/OperatorKernels.md at commit {commit}.",
        "# Columns: operator, opsets, inputs > outputs, element types.",
    )
    path = FOLDER / f"cuda-{version}.txt"
    path.write_text("\n".join((*head, *_unique(rows_of(document)), "")), encoding="utf-8")


def _unique(rows: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(rows))


if __name__ == "__main__":
    sys.exit(main())

"""Say which operators of a graph onnxruntime's WebGPU provider cannot run.

    python scripts/webgpu_kernels.py step.onnx [...]
    python scripts/webgpu_kernels.py --update webgpu-operators.md VERSION

The npm package onnxruntime-web documents the operators of its WebGPU provider, with their opsets,
in docs/webgpu-operators.md. `--update` writes them into scripts/kernels/webgpu-VERSION.txt, together
with the element types that TYPES says, since the document has none: those are read from the
registrations in onnxruntime/core/providers/webgpu of onnxruntime's sources. A node without a kernel
runs on the CPU: its inputs are copied there and its outputs back, in every step.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx
import onnx.shape_inference

from scripts import cuda_kernels
from scripts.cuda_kernels import FOLDER, Kernels, Missing, read_table

INTERNAL_DOMAINS = {"com.ms.internal.nhwc"}
NUMBERS = "float float16 int32 uint32"
WITH_BOOL = f"{NUMBERS} bool"
WITH_INT64 = f"{WITH_BOOL} int64"
ANY = "any"
# Element types by type variable of the operators whose kernels take others than NUMBERS. "*" stands
# for every variable that is not named. Vectors of sizes and axes are in the memory of the CPU.
TYPES: dict[str, dict[str, str]] = {
    "And": {"T": "bool"},
    "ArgMax": {"tensor(int64)": ANY},
    "ArgMin": {"tensor(int64)": ANY},
    "Cast": {"T1": WITH_INT64, "T2": WITH_INT64},
    "Equal": {"T1": "bool"},
    "Expand": {"T": WITH_BOOL},
    "Gather": {"Tind": "int32 int64"},
    "GatherElements": {"Tind": "int32 int64"},
    "GatherND": {"tensor(int64)": ANY},
    "Greater": {"T1": "bool"},
    "GreaterOrEqual": {"T1": "bool"},
    "If": {"*": ANY},
    "Less": {"T1": "bool"},
    "LessOrEqual": {"T1": "bool"},
    "Not": {"T": "bool"},
    "Pad": {"Tind": "int32 int64"},
    "Range": {"T": "float int32"},
    "Reshape": {"*": ANY},
    "ScatterND": {"tensor(int64)": ANY},
    "Slice": {"Tind": "int32 int64"},
    "Squeeze": {"*": ANY},
    "CumSum": {"T2": "int32 int64"},
    "Unsqueeze": {"*": ANY},
    "Flatten": {"*": ANY},
    "Where": {"B": "bool", "T": WITH_BOOL},
}
# Outputs that the kernel of an operator does not have: it raises an error where one is asked for.
OUTPUTS = {"MaxPool": 1}


def rows_of(document: str) -> Iterator[str]:
    """Return the rows of the compact table, from the text of webgpu-operators.md."""
    rows = re.findall(r"^\| (\w+) \| (.*?) \|", document, re.MULTILINE)
    kernels = [
        (operator, domain, opsets)
        for operator, cell in rows
        for domain, opsets in re.findall(r"([\w.]+)\(([\d,+-]+)\)", cell)
    ]
    for operator, domain, opsets in kernels:
        if domain in INTERNAL_DOMAINS or operator.startswith("Memcpy"):
            continue
        name = operator if domain == "ai.onnx" else f"{domain}:{operator}"
        for versions in opsets.split(","):
            first = int(re.match(r"\d+", versions)[0])  # type: ignore[index]
            parameters, types = _signature(operator, "" if domain == "ai.onnx" else domain, first)
            yield "\t".join((name, versions.replace("+", "-"), parameters, types))


def _signature(operator: str, domain: str, version: int) -> tuple[str, str]:
    """Return the type variables of an operator, and the element types of its kernels."""
    if domain or not onnx.defs.has(operator, version, domain):
        return "T > T", "-=-"  # onnxruntime's own operators, which ONNX does not describe
    schema = onnx.defs.get_schema(operator, version, domain)
    outputs = schema.outputs[: OUTPUTS.get(operator)]
    sides = [[p.type_str for p in side] for side in (schema.inputs, outputs)]
    own = TYPES.get(operator, {})
    types = {}
    for variable in dict.fromkeys(variable for side in sides for variable in side):
        listed = own.get(variable, own.get("*", NUMBERS))
        if listed != ANY and not variable.startswith("tensor("):
            types[variable] = listed
    shown = "; ".join(f"{name}={listed}" for name, listed in types.items()) or "-=-"
    return " > ".join(" ".join(side) for side in sides), shown


def tables() -> dict[str, Kernels]:
    """Return version of onnxruntime-web -> its kernels."""
    return {
        path.stem.removeprefix("webgpu-"): read_table(path)
        for path in sorted(FOLDER.glob("webgpu-*.txt"))
    }


def missing(model: onnx.ModelProto, kernels: Kernels) -> list[Missing]:
    """Return the nodes for which there is no kernel, as `cuda_kernels.missing` does."""
    return cuda_kernels.missing(model, kernels)


def write_table(document: str, version: str) -> None:
    """Write the table of a version of onnxruntime-web."""
    head = (
        f"# Kernels of the WebGPU provider of onnxruntime-web {version}, by",
        "# scripts/webgpu_kernels.py from the operators in its docs/webgpu-operators.md.",
        "# Columns: operator, opsets, inputs > outputs, element types.",
    )
    path = FOLDER / f"webgpu-{version}.txt"
    path.write_text("\n".join((*head, *rows_of(document), "")), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare graphs, or write a table; return the status for the shell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="*", type=Path)
    parser.add_argument("--update", nargs=2, metavar=("DOCUMENT", "VERSION"))
    chosen = parser.parse_args(arguments)
    if chosen.update:
        document, version = chosen.update
        write_table(Path(document).read_text(encoding="utf-8"), version)
    found = [
        f"{path}: onnxruntime-web {version} has no WebGPU kernel for {node}"
        for path in chosen.model
        for version, kernels in tables().items()
        for node in missing(_read(path), kernels)
    ]
    print("\n".join(found or ["Every node has a WebGPU kernel."] * bool(chosen.model)))
    return bool(found)


def _read(path: Path) -> onnx.ModelProto:
    return onnx.shape_inference.infer_shapes(onnx.load(path, load_external_data=False))


if __name__ == "__main__":
    sys.exit(main())

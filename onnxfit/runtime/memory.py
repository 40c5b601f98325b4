"""The memory of a session: what onnxruntime plans, shares with other sessions, and gives back.

Normally, each session of onnxruntime has an arena of its own, which keeps the memory of its largest
run. In a shared arena, a session gets memory that other sessions have freed, which saves most if
the sessions run one after another.
"""

from __future__ import annotations

import ctypes
import math
import platform
import sys
from functools import cache
from typing import Any

import onnx
import onnxruntime
from onnxruntime.capi import _pybind_state as C

from onnxfit.graph.subgraphs import nodes_of, subgraph_protos
from onnxfit.runtime.node_order import MAX_BYTES_IN_MEMORY
from onnxfit.runtime.version import onnxruntime_version

FOUR_BITS = frozenset({onnx.TensorProto.INT4, onnx.TensorProto.UINT4})
# A step takes up to a tenth longer without reused memory, so a smaller sum keeps it.
MAX_TERMS = 1000
ARCHITECTURES = ("x86_64", "AMD64")  # on which every version of onnxruntime can share an arena
# Only glibc has it.
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def plan_memory(
    model: onnx.ModelProto, bytes_of_values: float, options: onnxruntime.SessionOptions
) -> None:
    """Turn off the plans of onnxruntime that a graph must not have.

    No value gets the memory of an earlier value:

    - In a graph that makes integers of four bits. onnxruntime gives their memory to tensors of the
      same shape with a byte for each element, and writes beyond its end (onnxruntime/pull/32611).
    - In a graph with large values whose memory is planned. A value would get the memory of an
      earlier value of its size. The plan for all memory then takes the two for one value, which
      nothing else may overlap in the meantime.
    - In a graph with a very large sum, such as the gradient of a weight that is read thousands of
      times. Its terms wait while memory of another size becomes free, and onnxruntime searches all
      of that for each term. This graph has no plan for all memory either: making it is a search for
      each value among all others. With 8,192 terms, the first step takes 4 seconds instead of 19.

    `bytes_of_values` is the result of the function of that name for the graph.
    """
    has_large_sum = any(len(node.input) > MAX_TERMS for node in model.graph.node)
    if has_large_sum or makes_four_bits(model) or _plans(model.graph, bytes_of_values):
        options.enable_mem_reuse = False
    if has_large_sum:
        options.enable_mem_pattern = False


def _plans(graph: onnx.GraphProto, bytes_of_values: float) -> bool:
    """Return whether onnxruntime plans the memory of a graph's values, and they are large in total.

    It plans the memory of values of known size. It does not plan those of a subgraph.
    """
    if not MAX_BYTES_IN_MEMORY < bytes_of_values < math.inf:
        return False
    return not any(subgraph_protos(a) for node in graph.node for a in node.attribute)


def makes_four_bits(model: onnx.ModelProto) -> bool:
    """Return whether a QuantizeLinear of a model may write integers of four bits.

    They have the type of the zero point. If the model does not declare it, integers of four bits
    that the model declares elsewhere count.
    """
    quantizers = [node for node in nodes_of(model.graph) if node.op_type == "QuantizeLinear"]
    if not quantizers:
        return False
    graph = model.graph
    declared = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        declared[value.name] = value.type.tensor_type.elem_type
    four_bits = not FOUR_BITS.isdisjoint(declared.values())
    for node in quantizers:
        if any(a.name == "output_dtype" and a.i in FOUR_BITS for a in node.attribute):
            return True
        zero_point = node.input[2] if len(node.input) > 2 else ""
        if zero_point and (
            declared[zero_point] in FOUR_BITS if zero_point in declared else four_bits
        ):
            return True
    return False


def share_arena(options: Any) -> None:
    """Let the session of these options take the memory of its values from the shared arena.

    All such sessions of the process share it, also in several threads, until the process ends. The
    memory of each value is requested when its node runs: a plan for all values, which onnxruntime
    makes otherwise, would hold the memory of all of them until the end of a run, so outputs that
    the run allocates could not use what is already free. In large graphs, `plan_memory` leaves the
    reuse of memory to the arena, too: with onnxruntime's own, ResNet-18 takes up to 8 % more.

    On processors other than x86, versions of onnxruntime before 1.21 share memory without an arena,
    which is slow, so there each session keeps its own.
    """
    options.enable_mem_pattern = False
    if platform.machine() in ARCHITECTURES or onnxruntime_version() >= (1, 21):
        _create_arena()
        options.add_session_config_entry("session.use_env_allocators", "1")


@cache
def _create_arena() -> None:
    """Create the arena of the process.

    If the program has already created one, onnxruntime 1.19 keeps and shares it, and 1.32 replaces
    it.
    """
    memory = C.OrtMemoryInfo("Cpu", C.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, C.OrtMemType.DEFAULT)
    try:
        C.create_and_register_allocator(memory, C.OrtArenaCfg({}))
    except RuntimeError as error:
        if "already been registered" not in str(error):
            raise


def trim_malloc() -> None:
    """Give the memory that the process has freed back to the system, if the C library can.

    A session makes several copies of its tensors while it is created. The C library keeps their
    memory: three times the size of a 4-bit base after each session.
    """
    if _trim is not None:
        _trim(0)

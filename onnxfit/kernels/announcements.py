"""Announcements of a running graph that some of its outputs are complete.

The operator Announce copies its inputs to its outputs, and then makes announcement `number` on a
board. Another thread waits for the announcement, and may change the outputs while the run goes on:
other nodes read the inputs alone. If onnxruntime writes an output elsewhere than into its buffer,
the operator ends the announcements of the run.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import onnx
from onnx import helper

from onnxfit.graph import names
from onnxfit.graph.index import NodeIndex
from onnxfit.graph.protos import rename_inputs
from onnxfit.kernels.library import DOMAIN, library_path

__all__: list[str] = []

OPERATORS = {onnx.TensorProto.FLOAT: "Announce", onnx.TensorProto.DOUBLE: "Announce64"}


class AnnouncementBoard:
    """The announcements of a graph that `add_announcements` has changed.

    - `library`: the library with the operator.
    - `places`: for each announcement the addresses of the buffers to which its outputs are bound.
    """

    def __init__(self, library: ctypes.CDLL, places: Sequence[Sequence[int]]) -> None:
        self._library = library
        sizes = [len(one) for one in places]
        addresses = [address for one in places for address in one]
        self._key: int = library.open_board(
            len(sizes),
            (ctypes.c_int64 * len(sizes))(*sizes),
            (ctypes.c_void_p * len(addresses))(*addresses),
        )
        weakref.finalize(self, library.close_board, self._key)

    def clear(self) -> None:
        """Take all announcements back, before the next run."""
        self._library.clear_board(self._key)

    def wait(self, number: int) -> bool:
        """Wait for an announcement; return False if the run ends without it, or an output is not in
        its buffer.
        """
        return bool(self._library.wait_for_announcement(self._key, number))

    def end(self) -> None:
        """End all waits: the run has ended, and makes no more announcements."""
        self._library.give_up_board(self._key)

    def add_announcements(self, model: onnx.ModelProto, values: Sequence[Sequence[str]]) -> None:
        """Let a graph announce its outputs, in place.

        onnxruntime first computes the node whose results no other node reads that is listed last.
        So the first announcement is listed last.

        - `values`: the outputs of each announcement, in the order in which they are announced. They
          have one type, float32 or float64, and nodes compute them.
        """
        graph = model.graph
        outputs = {value.name: value for value in graph.output}
        own = {name: names.unannounced(name) for announced in values for name in announced}
        producers = NodeIndex(graph.node).producers
        for name in own:
            computed = producers[name].output
            computed[list(computed).index(name)] = own[name]
            graph.value_info.add().CopyFrom(outputs[name])
            graph.value_info[-1].name = own[name]
        rename_inputs(graph, own)
        for number, announced in reversed(list(enumerate(values))):
            graph.node.append(
                helper.make_node(
                    OPERATORS[outputs[announced[0]].type.tensor_type.elem_type],
                    [own[name] for name in announced],
                    announced,
                    names.announcement(number),
                    domain=DOMAIN,
                    key=self._key,
                    number=number,
                )
            )
        if not any(opset.domain == DOMAIN for opset in model.opset_import):
            model.opset_import.append(helper.make_opsetid(DOMAIN, 1))


def announcement_board(places: Sequence[Sequence[int]]) -> AnnouncementBoard | None:
    """Return a board for announcements of outputs at these addresses; None where the library lacks
    the operator.
    """
    path = library_path()
    library = None if path is None else _library(path)
    return None if library is None else AnnouncementBoard(library, places)


def has_announcements(model: onnx.ModelProto) -> bool:
    """Return whether a graph announces values, so that the order of its nodes matters."""
    operators = OPERATORS.values()
    return any(node.op_type in operators and node.domain == DOMAIN for node in model.graph.node)


@cache
def _library(path: str) -> Any:
    """Return the library with the types of its functions; None if an older one lacks them."""
    library = ctypes.CDLL(path)
    number = ctypes.c_int64
    types: dict[str, tuple[list[Any], Any]] = {
        "open_board": ([number, ctypes.c_void_p, ctypes.c_void_p], number),
        "close_board": ([number], None),
        "clear_board": ([number], None),
        "wait_for_announcement": ([number, number], ctypes.c_int),
        "give_up_board": ([number], None),
    }
    for name, (arguments, result) in types.items():
        if not hasattr(library, name):
            return None
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library

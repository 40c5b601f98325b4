"""Announcements of a running graph that some of its values are complete.

The operator Announce makes announcement `number` on a board when all of its inputs are computed.
Another thread waits for the announcement, and works with these values while the run goes on.
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
from onnxfit.kernels.library import DOMAIN, library_path

__all__: list[str] = []

OPERATOR = "Announce"


class AnnouncementBoard:
    """The announcements 0 to n - 1 of a graph that `add_announcements` has changed.

    - `library`: the library with the operator.
    - `count`: n.
    """

    def __init__(self, library: ctypes.CDLL, count: int) -> None:
        self._library = library
        self._key: int = library.open_announcements(count)
        weakref.finalize(self, library.close_announcements, self._key)

    def clear(self) -> None:
        """Take all announcements back, before the next run."""
        self._library.clear_announcements(self._key)

    def wait(self, number: int) -> bool:
        """Wait for an announcement; return False if the run ends without it."""
        return bool(self._library.wait_for_announcement(self._key, number))

    def end(self) -> None:
        """End all waits: the run has ended, and makes no more announcements."""
        self._library.give_up_announcements(self._key)

    def add_announcements(self, model: onnx.ModelProto, values: Sequence[Sequence[str]]) -> None:
        """Let a graph announce its outputs, in place.

        onnxruntime first computes the node whose results no other node reads that is listed last.
        So the first announcement is listed last, and every gradient belongs to an announcement.

        - `values`: the outputs of each announcement, in the order in which they are announced. They
          have one type.
        """
        for number, announced in reversed(list(enumerate(values))):
            name = names.announcement(number)
            model.graph.node.append(
                helper.make_node(
                    OPERATOR, announced, [name], name, domain=DOMAIN, key=self._key, number=number
                )
            )
            model.graph.output.append(
                helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ())
            )
        if not any(opset.domain == DOMAIN for opset in model.opset_import):
            model.opset_import.append(helper.make_opsetid(DOMAIN, 1))


def announcement_board(count: int) -> AnnouncementBoard | None:
    """Return a board for `count` announcements; None where the library lacks the operator."""
    path = library_path()
    library = None if path is None else _library(path)
    return None if library is None else AnnouncementBoard(library, count)


def has_announcements(model: onnx.ModelProto) -> bool:
    """Return whether a graph announces values, so that the order of its nodes matters."""
    return any(node.op_type == OPERATOR and node.domain == DOMAIN for node in model.graph.node)


@cache
def _library(path: str) -> Any:
    """Return the library with the types of its functions; None if an older one lacks them."""
    library = ctypes.CDLL(path)
    number = ctypes.c_int64
    types: dict[str, tuple[list[Any], Any]] = {
        "open_announcements": ([number], number),
        "close_announcements": ([number], None),
        "clear_announcements": ([number], None),
        "wait_for_announcement": ([number, number], ctypes.c_int),
        "give_up_announcements": ([number], None),
    }
    for name, (arguments, result) in types.items():
        if not hasattr(library, name):
            return None
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library

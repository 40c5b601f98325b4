"""A model, or a training step, as a picture or as text."""

from __future__ import annotations

import os
from pathlib import Path

from onnxfit.drawing.picture import as_png, as_svg
from onnxfit.drawing.scene import scene_of
from onnxfit.drawing.text import as_text
from onnxfit.errors import SettingError, UnknownNameError
from onnxfit.files import write_atomically
from onnxfit.graph.model import ModelSource, load_model

FORMATS = ("png", "svg", "text")
SUFFIXES = {".png": "png", ".svg": "svg", ".txt": "text"}


def draw(
    model_onnx: ModelSource,
    path: str | os.PathLike[str] | None = None,
    *,
    format: str | None = None,  # noqa: A002
    depth: int | None = None,
) -> str | bytes:
    """The graph of a model as a picture ("svg", a str; "png", bytes) or as text ("text", a str),
    also written to `path` if there is one.

    `format` is by default what the suffix of `path` says (.svg, .png, .txt), and "text" without a
    path. Of a training step, as `Trainer.save_onnx_graph` writes it, the parts are told apart:
    model, training form, loss, penalty, gradient, optimizer. Weights, other state, inputs,
    constants and outputs have shapes of their own; small constants stand where they are used. Where
    the file tells, or implies, the type and shape of a tensor, they are shown: at the edges, or in
    the boxes where there are more than 150 of those.

    `depth` makes a large graph small: nodes whose scope has that many steps are drawn as one box
    per scope. The part of the step is the first step of a scope, what the node's name has before
    each "/" are the others: with 1 a training step is half a dozen boxes.

    The picture is laid out by Graphviz, which `pip install "onnxfit[draw]"` brings; text needs
    nothing. The same model gives the same bytes on the same installation.

    Raises SettingError for an impossible format or depth, or a graph too large for a picture;
    InstallationError for a picture without Graphviz; ModelError for a file that is no model;
    CheckpointError where `path` cannot be written.

    >>> import onnx.parser
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     line (float[N, 1] x) => (float[N, 1] y) <float[1, 1] w = {2}, float[1] b = {1}> { y = Gemm <transB = 1> (x, w, b) }''')
    >>> print(draw(model))
    line: 1 node
    <BLANKLINE>
    input
      x: float32[N, 1]
    <BLANKLINE>
    weights
      w: float32[1, 1]
      b: float32[1]
    <BLANKLINE>
    model
      y: float32[N, 1] = Gemm(x, w, b)  transB=1
    <BLANKLINE>
    output
      y: float32[N, 1]
    """
    form = _form(path) if format is None else format
    if form not in FORMATS:
        raise UnknownNameError("format", form, FORMATS)
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 1):
        raise SettingError(
            f"depth is a whole number from 1 on, or None for every node, got {depth!r}."
        )
    scene = scene_of(load_model(model_onnx), depth)
    drawn: str | bytes = (
        as_text(scene) if form == "text" else as_svg(scene) if form == "svg" else as_png(scene)
    )
    if path is not None:
        data = drawn if isinstance(drawn, bytes) else (drawn + "\n").encode()
        write_atomically(path, lambda file: file.write(data))
    return drawn


def _form(path: str | os.PathLike[str] | None) -> str:
    if path is None:
        return "text"
    form = SUFFIXES.get(Path(path).suffix.lower())
    if form is None:
        raise SettingError(
            f"{os.fspath(path)!r} ends in none of {', '.join(SUFFIXES)}: name its format, e.g."
            " format='svg'."
        )
    return form

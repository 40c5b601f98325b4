"""Draw a model, or a training step, as a picture or as text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import onnx

from onnxfit.drawing.notebook import Png, TextWithHtml, image, in_notebook, preformatted
from onnxfit.errors import SettingError, UnknownNameError
from onnxfit.files import require_path, write_atomically
from onnxfit.load.reading import ModelSource, load_shared

if TYPE_CHECKING:
    from onnxfit.drawing.scene import Scene

__all__ = ["FORMATS", "draw"]

FORMATS = ("png", "svg", "text")
SUFFIXES = {".png": "png", ".svg": "svg", ".txt": "text"}


@runtime_checkable
class HasStructure(Protocol):
    """A trainer, whose class is in a module above this one."""

    @property
    def structure(self) -> onnx.ModelProto:
        """The model, which may lack the numbers of its larger tensors."""

    def get_weights(self, *, copy: bool) -> Mapping[str, Any]:
        """Return the tensors that are trained."""


def draw(
    model_onnx: ModelSource | HasStructure,
    path: str | os.PathLike[str] | None = None,
    *,
    format: str | None = None,  # noqa: A002  (Graphviz's and Matplotlib's word)
    depth: int | None = None,
) -> str | bytes:
    """Draw the graph of a model as a picture or as text.

    Pictures are laid out by Graphviz, which `pip install "onnxfit[draw]"` installs; text needs
    nothing. The same model gives the same bytes on the same installation.

    The nodes of a training step, as `Trainer.save_onnx_graph` writes it, are grouped by stage:
    model, loss, penalty, gradient, gradient accumulation, optimizer. Weights, other training state,
    inputs, constants and outputs have boxes of their own shapes; small constants are written in the
    box of the node that uses them. Types and shapes are shown where the file contains or implies
    them: along the edges, or in the boxes of a picture with more than 150 boxes.

    - `model_onnx`: the model: the path of an ONNX file, its bytes, or an `onnx.ModelProto`; or a
      `Trainer`, whose trained tensors are drawn as weights.
    - `path`: a file to write the drawing to as well, or None for none. An existing file is
      replaced.
    - `format`: "svg", "png" or "text". By default the suffix of `path` decides (.svg, .png, .txt);
      without a `path` it is "text", or "svg" in a notebook if Graphviz is installed.
    - `depth`: draw all nodes of a scope as one box if the scope has this many levels, a whole
      number from 1 on; None draws every node. The first level of a scope is the stage of the
      training step, the others are the parts of the node's name before each "/". With `depth=1` a
      training step is half a dozen boxes.

    Returns the drawing: a str for "svg" and "text", bytes for "png". A notebook shows it as a
    picture, or as text.

    SettingError: the format or the depth is impossible, or the graph has too many boxes for a
    picture. InstallationError: a picture needs Graphviz, which is missing. ModelError: the model
    cannot be read. CheckpointError: `path` cannot be written.

    >>> import onnx.parser
    >>> model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 17]>
    ...     line (float[N, 1] x) => (float[N, 1] y)
    ...     <float[1, 1] w = {2}, float[1] b = {1}> { y = Gemm <transB = 1> (x, w, b) }''')
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
    # Imported late, like the formats below: most importers of this package want its tables only.
    from onnxfit.drawing.scene import scene_of, weights_of

    if path is not None:
        require_path(path)
    format_ = _format_of(path) if format is None else format
    if not isinstance(format_, str) or format_ not in FORMATS:
        raise UnknownNameError("format", format_, FORMATS)
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 1):
        raise SettingError(
            f"depth must be a whole number >= 1, or None for every node, got {depth!r}."
        )
    if isinstance(model_onnx, HasStructure):
        scene = scene_of(model_onnx.structure, set(model_onnx.get_weights(copy=False)), depth)
    else:
        model = load_shared(model_onnx)
        scene = scene_of(model.proto, weights_of(model.proto), depth)
    drawing = _render(scene, format_)
    if path is not None:
        data = drawing if isinstance(drawing, bytes) else (drawing + "\n").encode()
        write_atomically(path, lambda file: file.write(data))
    return drawing


def _render(scene: Scene, format_: str) -> str | bytes:
    from onnxfit.drawing.picture import as_png, as_svg
    from onnxfit.drawing.text import as_text

    if format_ == "png":
        return Png(as_png(scene))
    if format_ == "text":
        text = as_text(scene)
        return TextWithHtml(text, preformatted(text))
    svg = as_svg(scene)
    return TextWithHtml(svg, image("svg+xml", svg.encode()))


def _format_of(path: str | os.PathLike[str] | None) -> str:
    """Return the format that the suffix of a path names, or that suits the place of the result."""
    if path is None:
        return "svg" if in_notebook() and find_spec("pygraphviz") else "text"
    format_ = SUFFIXES.get(Path(path).suffix.lower())
    if format_ is None:
        raise SettingError(
            f"The suffix of {os.fspath(path)!r} is not one of {', '.join(SUFFIXES)}. Pass the"
            " format, such as format='svg'."
        )
    return format_

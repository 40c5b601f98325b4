"""The names of the classes of a model's outputs, in the metadata of its file.

The entry `classes` is JSON: a dict from output to the list of names, in the order of the classes,
such as `{"scores": ["cat", "dog"]}`. An entry `classes` in another form belongs to another program,
and stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import onnx

KEY = "classes"

ClassNames = dict[str, list[str]]  # output -> names of its classes


def read_class_names(model: onnx.ModelProto) -> ClassNames:
    """Return the names of the classes by output; {} if the file has none, or in another form."""
    texts = [entry.value for entry in model.metadata_props if entry.key == KEY]
    try:
        by_output = json.loads(texts[0]) if texts else {}
    except (ValueError, RecursionError):
        return {}
    lists = by_output.values() if isinstance(by_output, dict) else [None]
    if not all(isinstance(n, list) and n and all(isinstance(t, str) for t in n) for n in lists):
        return {}
    return dict(by_output)


def write_class_names(model: onnx.ModelProto, classes: Mapping[str, list[str]]) -> bool:
    """Replace the names of all classes, in place.

    Returns False, and changes nothing, if the file has an entry `classes` in another form.

    - `model`: the model. Without names, the entry is removed.
    """
    entries = [entry for entry in model.metadata_props if entry.key == KEY]
    if entries and not read_class_names(model):
        return False
    for entry in entries:
        model.metadata_props.remove(entry)
    if classes:
        text = json.dumps(dict(classes), ensure_ascii=False)
        model.metadata_props.add(key=KEY, value=text)
    return True

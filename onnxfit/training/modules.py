"""The modules of a model, read from the scopes in the names of its tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass
class Module:
    """Tensors whose names have a common beginning, up to a "." or a "/".

    - `name`: the common beginning, without the separator; "" for the whole model.
    - `children`: the modules within this one and tensors by their full names, in order.
    """

    name: str
    children: list[Module | str] = field(default_factory=list)

    def tensors(self) -> Iterator[str]:
        """Yield the names of all tensors in the module."""
        for child in self.children:
            if isinstance(child, str):
                yield child
            else:
                yield from child.tensors()


@dataclass(frozen=True)
class ModuleRow:
    """A line of a list of modules and tensors.

    - `title`: the name, without the name of the enclosing module.
    - `level`: the number of listed modules that enclose it.
    - `tensors`: the tensors that it represents.
    - `is_tensor`: whether it is a tensor, not a module.
    - `is_folded`: whether it is a module whose tensors are not listed.
    """

    title: str
    level: int
    tensors: tuple[str, ...]
    is_tensor: bool
    is_folded: bool = False


def modules_of(names: Sequence[str]) -> Module:
    """Return the whole model as a module.

    - `names`: the model's tensors. A module that contains only one tensor or module is left out.
    """
    model = Module("")
    known = {"": model}
    for name in names:
        around = model
        for separator in re.finditer(r"[./]+", name):
            prefix = name[: separator.start()]
            if not prefix or separator.end() == len(name):
                continue
            if prefix not in known:
                known[prefix] = Module(prefix)
                around.children.append(known[prefix])
            around = known[prefix]
        around.children.append(name)
    model.children = [_without_single_children(child) for child in model.children]
    return model


def _without_single_children(child: Module | str) -> Module | str:
    """Return a module without inner modules that have a single child."""
    if isinstance(child, str):
        return child
    child.children = [_without_single_children(inner) for inner in child.children]
    return child.children[0] if len(child.children) == 1 else child


def entries_of(model: Module, depth: int | None) -> list[ModuleRow]:
    """Return the lines of a list of modules and tensors.

    - `model`: the whole model.
    - `depth`: each module at this level, from 1, is folded into one line; None folds no module.
    """

    def listed(module: Module, level: int) -> Iterator[ModuleRow]:
        for child in module.children:
            name = child if isinstance(child, str) else child.name
            title = name.removeprefix(module.name).lstrip("./") if module.name else name
            if isinstance(child, str):
                yield ModuleRow(title, level, (child,), is_tensor=True)
                continue
            is_folded = depth is not None and level + 1 >= depth
            tensors = tuple(child.tensors())
            yield ModuleRow(title, level, tensors, is_tensor=False, is_folded=is_folded)
            if not is_folded:
                yield from listed(child, level + 1)

    return list(listed(model, 0))


def deepest(is_short: Callable[[list[ModuleRow]], bool], model: Module) -> list[ModuleRow]:
    """Return the longest list that is short enough, or the shortest list.

    - `is_short`: whether a list is short enough.
    - `model`: the whole model.
    """
    everything = entries_of(model, None)
    if is_short(everything):
        return everything
    best = entries_of(model, 1)
    for depth in range(2, 1 + max(entry.level for entry in everything)):
        entries = entries_of(model, depth)
        if not is_short(entries):
            break
        best = entries
    return best

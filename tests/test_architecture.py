"""The structure of the package: layers, sizes and names, read from its syntax trees.

`RULES` lists every check. Each is a function from a `Package` to a list of violations, and each is
tried on a small package that violates it, so that a check which can no longer fail is noticed.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A unit is a folder of onnxfit/, or a module beside it. Imports go from higher layers to lower
# ones, and within a layer, as long as they do not go in a circle.
LAYERS: dict[str, tuple[str, ...]] = {
    "plumbing": ("checks", "errors", "environment", "files", "folders", "registry"),
    "messages between processes": ("distributed",),
    "graph": ("graph",),
    "files of models": ("load",),
    "drawing": ("drawing",),
    "data and formulas": (
        "data",
        "schedules",
        "penalties",
        "losses",
        "metrics",
        "optimizers",
        "ctc",
    ),
    "gradients": ("gradients",),
    "step": ("step",),
    "kernels": ("kernels",),
    "runtime": ("runtime",),
    "trainable": ("trainable",),
    # A fit makes a History, a CallbackList and a ProgressBar itself, and no callback imports the
    # trainer. So the callbacks stand below the loop, not above the trainer.
    "callbacks": ("callbacks",),
    "tools": ("tools",),
    "training": ("training",),
    "training without Python": ("training_folder",),
    "trainer": ("trainer",),
    "entry points": ("cli", "script", "sklearn", "torch", "flower", "verification"),
    "package": ("__init__", "__main__"),
}
# `build_onnx_function` of a loss, a penalty or an optimizer differentiates that formula. Only a
# caller of `build_onnx_function` needs the gradients, so the formulas import this module late.
FORMULAS = ("penalties", "losses", "metrics", "optimizers")
LATE_IMPORT_OF_FORMULAS = "onnxfit.gradients.functions"

ONNXRUNTIME_FOLDERS = (
    "onnxfit/kernels/",
    "onnxfit/runtime/",
    "onnxfit/gradients/onnxruntime/",
    "onnxfit/environment.py",  # finds out whether it is installed
    "onnxfit/load/runtime_support.py",  # asks onnxruntime which operators it can run
)
MAX_ROOT_MODULES = 15
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60  # of code, without docstring, comments and blank lines
# Trainer documents its methods and passes the calls on; these methods put parts together.
MAX_DELEGATION_LINES = 20
BUILDING_METHODS = ("__init__", "fit", "load")
FORMULA_TABLES = ("schedules.py",)  # one class after another: any size
FACADE = "trainer.py"  # docstrings: any size
SHARED_CLASS_NAMES = {"losses", "metrics"}  # the modules between which a name may stand twice

# Identifiers that have been replaced, and the word of the field that replaced each.
RETIRED_WORDS = {
    "Asked": "ResizeSpec",
    "Chain": "StepSessions",
    "Course": "FitState",
    "Entry": "InputGradient",
    "Epochs": "EpochIterator",
    "FLAT": "NOT_DIFFERENTIABLE",
    "Feed": "DataAdapter",
    "Formal": "RuleSignature",
    "Found": "DirectionGradients",
    "LARGE": "a name that says what is bounded, with its unit",
    "MANY": "a name that says what is bounded, with its unit",
    "MOST": "a name that says what is bounded, with its unit",
    "Named": "MatchedData",
    "Op": "GraphBuilder",
    "Partial": "ManualTraining",
    "Passes": "SplitStep or ForwardBackward",
    "Place": "CheckpointLayout",
    "Reduced": "Reduction",
    "Refused": "NoGradientError",
    "Report": "StepResult",
    "Resume": "Position",
    "Runner": "BoundSession",
    "SMALL": "a name that says what is bounded, with its unit",
    "Site": "PathNode",
    "State": "DoubleBufferedState",
    "TOGETHER": "FusingLimits.tensor",
    "Unfinished": "PendingFit",
    "WIDE": "a name that says what is bounded, with its unit",
    "Wanted": "DataRequest",
    "_course": "a FitState",
    "_hands": "ManualTraining",
    "_held": "_frozen_tensors",
    "_take_over": "replace_uses",
    "_unfinished": "a PendingFit",
    "cure": "fix",
    "fitting_itself": "model_errors",
    "flowing": "differentiable_path",
    "following": "updated",
    "fresh": "unique_name",
    "hand_over": "move_uses",
    "judged": "loss_outputs",
    "knows": "has_name",
    "packs": "fused",
    "prepare_named": "match or convert",
    "proportional": "is_plain_sgd",
    "rehearse": "trial_steps",
    "reported": "metric_outputs",
    "reuse": "overwrite_outputs",
    "settle": "commit",
    "specialise": "specialize_shapes",
    "spins": "busy_wait",
    "telling": "current_event",
    "working_form": "normalize",
    "BatchWalk": "BatchAxisPropagation",
    "CompiledStep": "StepSessions",
    "Contents": "CheckpointContents or TensorContents",
    "KnownBatches": "BatchPlanCache",
    "NodeInTheWayError": "BatchAxisError",
    "TrainerByOtherName": "KerasModelAlias",
    "first_applying": "choose_strategy",
    "from_main": "broadcast",
    "keep_window_on_main": "zero_except_on_rank_0",
    "meet_at_end": "final_barrier",
    "reads_batch": "needs_synced_logs",
    "refuse_two_scales": "check_loss_scaling_with_averaging",
    "refuse_two_waits": "check_accumulate_with_averaging",
    "remembered": "state_attributes",
    "require_same_trainers": "verify_identical_trainers",
    "return_freed_memory": "trim_malloc",
    "saves_after": "may_save_mid_window",
    "undelivered": "missed_event",
    "Grid": "Quantizer",
    "SwitchedModel": "ModelWithLayerSwitches",
    "arriving": "output_gradients",
    "began_as": "has_initial_product",
    "beginning_with": "with_initial_factors",
    "begun": "initialized",
    "fed": "inputs_of",
    "is_beside": "matches_base_weight",
    "least": "minimum",
    "leaving": "input_gradients",
    "mended": "edited",
    "most": "maximum",
    "moves_zero_point": "observes_zero_point",
    "served": "input_values",
    "subgraph_gradient": "subgraph_rule",
}


@dataclass(frozen=True)
class Import:
    """One imported module or name. `late`: inside a function."""

    module: str
    name: str | None
    line: int
    late: bool


@dataclass(frozen=True)
class Module:
    path: str  # as "onnxfit/graph/values.py"
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @functools.cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @property
    def name(self) -> str:
        return self.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    @property
    def unit(self) -> str:
        """The folder below onnxfit/, or the module beside the folders."""
        return self.path.split("/")[1].removesuffix(".py")

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @functools.cached_property
    def imports(self) -> list[Import]:
        """Every import, those for annotations only (under `if TYPE_CHECKING:`) excepted."""
        return list(self._imports_below(self.tree, late=False))

    def _imports_below(self, node: ast.AST, *, late: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, None, child.lineno, late)
            elif isinstance(child, ast.ImportFrom):
                for alias in child.names:
                    yield Import(self._absolute(child), alias.name, child.lineno, late)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for statement in child.orelse:
                    yield from self._imports_below(statement, late=late)
            else:
                inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from self._imports_below(child, late=late or inside)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.path.split("/")[: -node.level]
        return ".".join([*package, *([node.module] if node.module else [])])

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in self.nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node


class Package:
    """The modules of onnxfit/ below `root`."""

    def __init__(self, root: Path) -> None:
        self.modules = [
            Module(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
            for path in sorted((root / "onnxfit").rglob("*.py"))
        ]
        self.names = {module.name for module in self.modules}

    def imported_module(self, item: Import) -> str:
        """The name of the module that an import loads: `from package import module` loads both."""
        whole = f"{item.module}.{item.name}"
        return whole if whole in self.names else item.module

    def own_imports(self, module: Module) -> Iterator[tuple[Import, str]]:
        """The imports of onnxfit's own modules, each with the name of the imported module."""
        for item in module.imports:
            if item.module.split(".")[0] == "onnxfit":
                yield item, self.imported_module(item)


def unit_of(module: str) -> str:
    """
    >>> unit_of("onnxfit.graph.values"), unit_of("onnxfit")
    ('graph', '__init__')
    """
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


# ------------------------------------------------------------------------------------------------
# imports


def every_unit_has_a_layer(package: Package) -> list[str]:
    known = {unit for units in LAYERS.values() for unit in units}
    return sorted(
        {f"onnxfit/{m.unit} has no layer in LAYERS" for m in package.modules if m.unit not in known}
    )


def imports_go_down(package: Package) -> list[str]:
    height = {unit: i for i, units in enumerate(LAYERS.values()) for unit in units}
    violations = []
    for module in package.modules:
        for item, imported in package.own_imports(module):
            allowed_late = item.late and module.unit in FORMULAS
            if allowed_late and imported == LATE_IMPORT_OF_FORMULAS:
                continue
            if item.module == "onnxfit" and item.name == "__version__":
                continue  # a string of the distribution, which stands in no layer
            if height.get(unit_of(imported), 0) > height.get(module.unit, 0):
                violations.append(f"{module.path}:{item.line} imports {imported}, a higher layer")
    return violations


def units_form_no_circle(package: Package) -> list[str]:
    edges: dict[str, set[str]] = defaultdict(set)
    for module in package.modules:
        for item, imported in package.own_imports(module):
            late = item.late and imported == LATE_IMPORT_OF_FORMULAS
            if unit_of(imported) != module.unit and not late and item.name != "__version__":
                edges[module.unit].add(unit_of(imported))
    return [f"onnxfit/{unit} imports itself through others" for unit in _in_circles(edges)]


def modules_form_no_circle(package: Package) -> list[str]:
    edges: dict[str, set[str]] = defaultdict(set)
    for module in package.modules:
        for item, imported in package.own_imports(module):
            if not item.late and not module.path.endswith("__init__.py"):
                edges[module.name].add(imported)
    return [f"{name} imports itself through others" for name in _in_circles(edges)]


def _in_circles(edges: dict[str, set[str]]) -> list[str]:
    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = edges.get(waiting.pop(), set()) - seen
            seen |= new
            waiting += new
        return seen

    return sorted(node for node in edges if node in reachable(node))


def onnxruntime_is_imported_in_its_folders(package: Package) -> list[str]:
    return [
        f"{module.path}:{item.line} imports {item.module}"
        for module in package.modules
        for item in module.imports
        if item.module.split(".")[0] == "onnxruntime"
        and not module.path.startswith(ONNXRUNTIME_FOLDERS)
    ]


def private_names_stay_in_their_module(package: Package) -> list[str]:
    violations = []
    for module in package.modules:
        modules = {}  # local name -> module of onnxfit that it stands for
        for item, imported in package.own_imports(module):
            name = item.name or item.module
            if _is_private(name.split(".")[-1]):
                violations.append(f"{module.path}:{item.line} imports {name} of {item.module}")
            if imported in package.names and imported != item.module:
                modules[name] = imported
        for node in module.nodes:
            if isinstance(node, ast.Attribute) and _is_private(node.attr):
                owner = modules.get(ast.unparse(node.value))
                if owner and owner != module.name:
                    violations.append(f"{module.path}:{node.lineno} uses {node.attr} of {owner}")
    return violations


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


# ------------------------------------------------------------------------------------------------
# sizes


def the_root_is_small(package: Package) -> list[str]:
    count = sum(module.path.count("/") == 1 for module in package.modules)
    if count <= MAX_ROOT_MODULES:
        return []
    return [f"onnxfit/ holds {count} modules; put a new one into a folder ({MAX_ROOT_MODULES})"]


def files_are_short(package: Package) -> list[str]:
    violations = []
    for module in package.modules:
        name = module.path.removeprefix("onnxfit/")
        count = len(module.lines)
        if count > MAX_FILE_LINES and name not in (*FORMULA_TABLES, FACADE):
            violations.append(f"{module.path} has {count} lines, more than {MAX_FILE_LINES}")
    return violations


def functions_are_short(package: Package) -> list[str]:
    return [
        f"{module.path}:{function.lineno} {function.name} has {count} lines of code, more than"
        f" {bound}"
        for module in package.modules
        for function in module.functions()
        if (count := code_lines(function, module.lines))
        > (bound := bound_of(module.path, function.name))
    ]


def bound_of(path: str, function: str) -> int:
    delegates = path == f"onnxfit/{FACADE}" and function not in BUILDING_METHODS
    return MAX_DELEGATION_LINES if delegates else MAX_FUNCTION_LINES


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> int:
    body = function.body
    if ast.get_docstring(function) is not None:
        body = body[1:]
    if not body:
        return 0
    code = [line.strip() for line in lines[body[0].lineno - 1 : function.end_lineno]]
    return sum(bool(line) and not line.startswith("#") for line in code)


# ------------------------------------------------------------------------------------------------
# names and words


def class_names_are_unique(package: Package) -> list[str]:
    modules: dict[str, list[str]] = defaultdict(list)
    for module in package.modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                modules[node.name].append(module.name)
    return [
        f"{name} is a class of {' and of '.join(owners)}"
        for name, owners in sorted(modules.items())
        if len(owners) > 1 and {unit_of(owner) for owner in owners} != SHARED_CLASS_NAMES
    ]


def retired_words_stay_retired(package: Package) -> list[str]:
    return [
        f"{module.path}:{line} {name} is called {RETIRED_WORDS[name]} now"
        for module in package.modules
        for name, line in _identifiers(module)
        if name in RETIRED_WORDS
    ]


def _identifiers(module: Module) -> Iterator[tuple[str, int]]:
    """Each name that is defined or assigned, and each name of a parameter or keyword argument."""
    for node in module.nodes:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node.lineno
        elif isinstance(node, (ast.arg, ast.keyword)):
            yield node.arg or "", node.lineno  # no name: `**settings` in a call
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def docstrings_begin_with_a_subject(package: Package) -> list[str]:
    violations = []
    for module in package.modules:
        for node in module.nodes:
            if isinstance(
                node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            ) and re.match(r"(What|Which|Where|Who)\b", ast.get_docstring(node) or ""):
                name = getattr(node, "name", "the module")
                line = getattr(node, "lineno", 1)
                violations.append(f"{module.path}:{line} the docstring of {name}")
    return violations


RULES: tuple[Callable[[Package], list[str]], ...] = (
    every_unit_has_a_layer,
    imports_go_down,
    units_form_no_circle,
    modules_form_no_circle,
    onnxruntime_is_imported_in_its_folders,
    private_names_stay_in_their_module,
    the_root_is_small,
    files_are_short,
    functions_are_short,
    class_names_are_unique,
    retired_words_stay_retired,
    docstrings_begin_with_a_subject,
)


@pytest.fixture(scope="module")
def onnxfit_package() -> Package:
    return Package(ROOT)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_onnxfit_follows(rule: Callable[[Package], list[str]], onnxfit_package: Package) -> None:
    violations = rule(onnxfit_package)
    assert not violations, "\n" + "\n".join(violations)


def test_every_unit_in_layers_exists(onnxfit_package: Package) -> None:
    listed = [unit for units in LAYERS.values() for unit in units]
    assert len(listed) == len(set(listed))
    assert set(listed) == {module.unit for module in onnxfit_package.modules}


# ------------------------------------------------------------------------------------------------
# every rule can fail


def fake_package(root: Path, files: dict[str, str]) -> Package:
    for path, text in files.items():
        file = root / "onnxfit" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return Package(root)


def body(count: int) -> str:
    return "".join(f"    x{i} = {i}\n" for i in range(count))


LAZY = "def f():\n    from onnxfit.gradients.functions import build\n"
# the rule, a package that violates it, and what is reported
VIOLATIONS: list[tuple[Callable[[Package], list[str]], dict[str, str], str]] = [
    (every_unit_has_a_layer, {"plans/a.py": ""}, "onnxfit/plans has no layer"),
    (imports_go_down, {"graph/a.py": "from onnxfit.step.b import f", "step/b.py": ""}, "a.py:1 imports onnxfit.step.b"),
    (imports_go_down, {"graph/a.py": "import onnxfit.step"}, "a.py:1 imports onnxfit.step"),
    (imports_go_down, {"graph/a.py": "from ..step import b", "step/b.py": ""}, "a.py:1 imports onnxfit.step.b"),
    (imports_go_down, {"graph/a.py": "def f():\n    from onnxfit import step", "step/__init__.py": ""}, "a.py:2 imports onnxfit.step"),
    (imports_go_down, {"graph/a.py": "from onnxfit import Trainer"}, "a.py:1 imports onnxfit, a higher layer"),
    (imports_go_down, {"losses.py": LAZY.replace("functions", "table")}, "losses.py:2 imports onnxfit.gradients.table"),
    (imports_go_down, {"losses.py": "from onnxfit.gradients.functions import build"}, "losses.py:1 imports onnxfit.gradients.functions"),
    (imports_go_down, {"data/a.py": LAZY}, "data/a.py:2 imports onnxfit.gradients.functions"),
    (units_form_no_circle, {"files.py": "import onnxfit.errors", "errors.py": "import onnxfit.files"}, "onnxfit/errors imports itself"),
    (modules_form_no_circle, {"graph/a.py": "import onnxfit.graph.b", "graph/b.py": "from onnxfit.graph import a"}, "onnxfit.graph.a imports itself"),
    (onnxruntime_is_imported_in_its_folders, {"step/a.py": "from onnxruntime.capi import C"}, "step/a.py:1 imports onnxruntime.capi"),
    (onnxruntime_is_imported_in_its_folders, {"step/a.py": "def f():\n    import onnxruntime"}, "step/a.py:2 imports onnxruntime"),
    (private_names_stay_in_their_module, {"graph/a.py": "from onnxfit.graph.b import _f"}, "a.py:1 imports _f of onnxfit.graph.b"),
    (private_names_stay_in_their_module, {"graph/a.py": "from onnxfit.graph import b\nb._f()", "graph/b.py": ""}, "a.py:2 uses _f of onnxfit.graph.b"),
    (the_root_is_small, {f"m{i}.py": "" for i in range(16)}, "onnxfit/ holds 16 modules"),
    (files_are_short, {"graph/a.py": "x = 1\n" * 601}, "a.py has 601 lines, more than 600"),
    (functions_are_short, {"trainer.py": "def f():\n" + body(21)}, "trainer.py:1 f has 21 lines of code, more than 20"),
    (files_are_short, {"graph/losses.py": "x = 1\n" * 601}, "graph/losses.py has 601 lines"),
    (functions_are_short, {"graph/a.py": "def f():\n" + body(61)}, "a.py:1 f has 61 lines of code"),
    (class_names_are_unique, {"losses.py": "class A: ...", "penalties.py": "class A: ..."}, "A is a class of onnxfit.losses and of onnxfit.penalties"),
    (class_names_are_unique, {"graph/a.py": "class _A: ...", "graph/b.py": "class _A: ..."}, "_A is a class of onnxfit.graph.a and of"),
    (retired_words_stay_retired, {"graph/a.py": "class Course: ..."}, "Course is called FitState now"),
    (retired_words_stay_retired, {"graph/a.py": "def f(*, spins=1): ..."}, "spins is called busy_wait now"),
    (retired_words_stay_retired, {"graph/a.py": "f(spins=1)"}, "spins is called busy_wait now"),
    (retired_words_stay_retired, {"graph/a.py": "def rehearse(): ..."}, "rehearse is called trial_steps now"),
    (retired_words_stay_retired, {"graph/a.py": "self._held = 1"}, "_held is called _frozen_tensors now"),
    (retired_words_stay_retired, {"graph/a.py": "for packs in []: ..."}, "packs is called fused now"),
    (docstrings_begin_with_a_subject, {"graph/a.py": '"""What is here."""'}, "a.py:1 the docstring of the module"),
    (docstrings_begin_with_a_subject, {"graph/a.py": 'class A:\n    def f(self):\n        """\n        Where it is."""'}, "a.py:2 the docstring of f"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "files", "message"),
    VIOLATIONS,
    ids=[f"{rule.__name__}-{i}" for i, (rule, _, _) in enumerate(VIOLATIONS)],
)
def test_a_violation_is_reported(
    rule: Callable[[Package], list[str]], files: dict[str, str], message: str, tmp_path: Path
) -> None:
    violations = rule(fake_package(tmp_path, files))
    assert [v for v in violations if message in v], violations


def test_every_rule_is_tried_on_a_violation() -> None:
    assert {rule for rule, _, _ in VIOLATIONS} == set(RULES)


TABLE_OF_FORMULAS = "x = 1\n" * 601
ALLOWED: dict[str, dict[str, str]] = {
    "imports for annotations": {
        "graph/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from onnxfit.step import B"
    },
    "late gradients of a formula": {"losses.py": LAZY},
    "the version": {"cli/a.py": "from onnxfit import __version__"},
    "imports within a layer": {"metrics.py": "import onnxfit.losses", "losses.py": ""},
    "tables of formulas": {"schedules.py": TABLE_OF_FORMULAS},
    "long docstrings and comments": {
        "graph/a.py": 'def f():\n    """\n' + "    words\n" * 70 + '    """\n' + "    # why\n\n" * 70 + body(60)
    },
    "a loss and a metric of one name": {"losses.py": "class A: ...", "metrics.py": "class A: ..."},
    "a retired word in a text": {"graph/a.py": '"""Course."""\nx = "spins"\n'},
    "a subject that begins with such letters": {"graph/a.py": '"""Whole files."""'},
    "dunder names": {"graph/a.py": "from onnxfit.graph import b\nb.__name__", "graph/b.py": ""},
    "own private names": {"graph/a.py": "self._x = 1\n_f()"},
    "onnxruntime in its folders": {"runtime/a.py": "import onnxruntime", "gradients/onnxruntime/b.py": "import onnxruntime"},
    "a module of that name": {"step/a.py": "import onnxfit.gradients.onnxruntime"},
}  # fmt: skip


@pytest.mark.parametrize("files", ALLOWED.values(), ids=ALLOWED)
def test_the_exceptions_are_allowed(files: dict[str, str], tmp_path: Path) -> None:
    package = fake_package(tmp_path, files)
    assert [violation for rule in RULES for violation in rule(package)] == []

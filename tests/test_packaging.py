"""What is built is what the checkout has, no installation overwrites an onnxruntime, and the tasks of
the Makefile are those that other files name.
"""

import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import onnxfit
from tests.conftest import COMPARED_WITH

ROOT = Path(__file__).resolve().parent.parent
CHECKOUT = {
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "onnxfit").rglob("*")
    if path.suffix in (".py", ".typed")
}


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of scripts, from which tests import."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


@pytest.fixture
def build_dist(scripts: None) -> ModuleType:
    return importlib.import_module("build_dist")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with sdist and wheel, the wheel built from the unpacked sdist without a compiler."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")

    def build(what: str, source: Path) -> None:
        subprocess.run(
            [
                sys.executable,
                "-c",
                f"from hatchling import build; build.build_{what}({str(folder)!r})",
            ],
            cwd=source,
            env={**os.environ, "CXX": str(folder / "no compiler")},
            check=True,
        )

    build("sdist", ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(
            folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )
    build("wheel", folder / sdist.name.removesuffix(".tar.gz"))
    return folder


def test_without_a_compiler_the_wheel_has_every_module_once_and_nothing_else(built: Path) -> None:
    """`make dist` tries the wheel with the operators in C++."""
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"onnxfit-{onnxfit.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert sorted(name for name in names if ".dist-info/" not in name) == sorted(CHECKOUT)


def test_the_wheel_carries_license_and_readme(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    info = f"onnxfit-{onnxfit.__version__}.dist-info"
    assert archive.read(f"{info}/licenses/LICENSE").decode() == (ROOT / "LICENSE").read_text(
        encoding="utf-8"
    )
    assert (ROOT / "README.md").read_text(encoding="utf-8").strip() in archive.read(
        f"{info}/METADATA"
    ).decode()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="an unpacked sdist has no git")
def test_the_sdist_has_every_file_of_the_repository(built: Path, build_dist: ModuleType) -> None:
    (sdist,) = built.glob("*.tar.gz")
    files = build_dist.released_files()
    assert build_dist.missing_files(sdist, files) == []
    assert build_dist.missing_files(sdist, files | {"docs/no_such.md"}) == ["docs/no_such.md"]


def test_the_sdist_has_nothing_that_is_generated(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    top = sdist.name.removesuffix(".tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.removeprefix(f"{top}/") for name in archive.getnames()}
    assert names >= CHECKOUT
    generated = ("docs/api", "docs/project", "js/dist", "js/node_modules", "callbacks/")
    assert not any(name.startswith(generated) for name in names)


def test_pypi_gets_a_readme_whose_links_lead_somewhere(build_dist: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = build_dist.with_addresses(readme)
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", shown, flags=re.M | re.S))
    assert len(targets) > 20
    assert all(target.startswith("https://") for target in targets)
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", shown)
    assert all("/raw/main/docs/images/" in picture for picture in pictures)


def test_npm_gets_a_readme_whose_links_lead_somewhere(scripts: None) -> None:
    build_npm = importlib.import_module("build_npm")
    targets = re.findall(r"\]\(([^)\s]+)\)", build_npm.readme_with_addresses())
    assert len(targets) > 4
    assert all(target.startswith("https://") for target in targets)
    assert any(target.endswith("/blob/main/docs/browser.md") for target in targets)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="an unpacked sdist has no git")
def test_a_maintainer_puts_addresses_into_one_file(build_dist: ModuleType) -> None:
    repository = importlib.import_module("repository_links").repository().encode()
    files = build_dist.released_files()
    named = {name for name in files if repository in (ROOT / name).read_bytes()}
    assert named == {"pyproject.toml"}


def test_the_citation_names_this_version() -> None:
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == onnxfit.__version__
    assert citation["license"] == "MIT"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="an sdist leaves the link out")
def test_the_callbacks_link_shows_the_real_package() -> None:
    link = ROOT / "callbacks"
    # git on a file system without links leaves a file with the target's name: just as harmless
    assert (
        os.readlink(link) == "onnxfit/callbacks"
        if link.is_symlink()
        else link.read_text().strip() == "onnxfit/callbacks"
    )


@pytest.mark.skipif(find_spec("ruff") is None, reason="ruff is installed where lint runs")
def test_lint_sees_every_module() -> None:
    command = [sys.executable, "-m", "ruff", "check", "--show-files", "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    seen = {Path(line).resolve() for line in done.stdout.splitlines()}
    modules = {
        path.resolve() for part in ("onnxfit", "tests") for path in (ROOT / part).rglob("*.py")
    }
    assert modules <= seen


# (sys_platform, platform_machine, Python) -> the training build that has a wheel there
ENVIRONMENTS = {
    ("linux", "x86_64", "3.10"): "onnxruntime-training",
    ("linux", "x86_64", "3.11"): "onnxruntime-training",
    ("linux", "x86_64", "3.12"): "onnxruntime-training-cpu",
    ("darwin", "arm64", "3.10"): "onnxruntime-training-cpu",
    ("darwin", "arm64", "3.12"): "onnxruntime-training-cpu",
    ("darwin", "x86_64", "3.11"): "onnxruntime-training-cpu",
    ("win32", "AMD64", "3.10"): "onnxruntime-training-cpu",
    ("win32", "AMD64", "3.12"): "onnxruntime-training-cpu",
}
RUNTIMES = ("cpu", "gpu", "directml", "openvino", "webgpu", "ort-training")  # extras


def requirements_of(built: Path) -> list[Any]:
    """The requirements of the wheel, as `packaging.requirements` has them."""
    requirements = pytest.importorskip("packaging.requirements")
    (wheel,) = built.glob("*.whl")
    metadata = (
        zipfile.ZipFile(wheel).read(f"onnxfit-{onnxfit.__version__}.dist-info/METADATA").decode()
    )
    return [
        requirements.Requirement(line)
        for line in re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
    ]


def test_no_requirement_overwrites_the_onnxruntime_of_an_environment(built: Path) -> None:
    """The distributions of onnxruntime have files of the same names. Only an extra names one."""
    environment = {"sys_platform": "linux", "platform_machine": "x86_64", "python_version": "3.11"}

    def chosen(extra: str) -> list[str]:
        return [
            r.name
            for r in requirements_of(built)
            if r.name.startswith("onnxruntime")
            and (r.marker is None or r.marker.evaluate({**environment, "extra": extra}))
        ]

    assert chosen("") == []
    assert [len(chosen(extra)) for extra in RUNTIMES] == [1] * len(RUNTIMES)
    for extra in ("test", "dev", "torch", "demo", "sklearn", "site", "exports"):
        assert chosen(extra) == []


@pytest.mark.parametrize(("platform", "machine", "python"), ENVIRONMENTS)
def test_one_training_build_for_every_platform(
    built: Path, platform: str, machine: str, python: str
) -> None:
    environment = {
        "sys_platform": platform,
        "platform_machine": machine,
        "python_version": python,
        "extra": "ort-training",
    }
    chosen = [
        r.name
        for r in requirements_of(built)
        if r.name.startswith("onnxruntime") and r.marker.evaluate(environment)
    ]
    assert chosen == [ENVIRONMENTS[platform, machine, python]]


@pytest.mark.parametrize("extra", ["dev", "exports", "genai", "recipes"])
def test_an_extra_for_tests_has_all_that_the_tests_compare_with(built: Path, extra: str) -> None:
    """Otherwise `CI=true` refuses its environment, as tests/conftest.py does where one is missing."""
    extras, names = {extra}, set[str]()
    while extras:
        one = extras.pop()
        for requirement in requirements_of(built):
            if requirement.marker and requirement.marker.evaluate({"extra": one}):
                names.add(requirement.name.lower().replace("_", "-"))
                extras |= requirement.extras if requirement.name == "onnxfit" else set()
    distributions = {
        "sklearn": "scikit-learn", "yaml": "pyyaml", "PIL": "pillow"
    }  # fmt: skip
    assert {distributions.get(module, module) for module in COMPARED_WITH} <= names


RULES = {
    name: (ROOT / name).read_text(encoding="utf-8")
    for name in ("Makefile", "slow.mk", "js/rules.mk")
}
TARGETS = set(re.findall(r"^([a-z-]+):", "".join(RULES.values()), re.MULTILINE))

# help lists itself in its first line, test-others has its parts, test-all is a longer test, and the
# screen has no line for the rest
PARTS = {"test-oldest", "test-newest", "test-builder"}
UNLISTED = {
    "disagreements",
    "gallery",
    "help",
    "memory",
    "plugins",
    "ranks",
    "steps",
    "stories",
    "test-all",
    "web",
    "web-test",
    *PARTS,
}


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_list_of_targets_fits_a_screen() -> None:
    command = ["make", "--no-print-directory", "help", f"PYTHON={sys.executable}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = result.stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    listed = {line.split()[0] for line in lines[1:]}
    assert listed == TARGETS - UNLISTED


def test_the_workflow_runs_targets_on_every_python() -> None:
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    cases = workflow["jobs"]["test"]["strategy"]["matrix"]["include"]
    pythons = [case["python"] for case in cases]
    assert pythons == ["3.10", "3.11", "3.12", "3.13", "3.14"]
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert pythons == re.findall(r'"Programming Language :: Python :: (3\.\d+)"', settings)
    assert pythons == workflow["jobs"]["wheel"]["strategy"]["matrix"]["python"]
    for case in cases:
        assert case["targets"].split()[:2] == ["lint", "test"]
        assert ("test-builder" in case["targets"]) == (case["python"] in ("3.10", "3.11", "3.12"))
        assert set(case["targets"].split()) <= TARGETS
    for job in workflow["jobs"].values():
        for script in re.findall(r"scripts/\S+\.py", str(job)):
            assert (ROOT / script).exists()
    torch = re.search(r"^TORCH \?= (\S+)$", (ROOT / "environments.mk").read_text(), re.MULTILINE)
    assert torch
    assert f"{torch[1]} --index-url" in str(workflow)


def workflow(name: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    text = (ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8")
    parsed: dict[str, Any] = yaml.safe_load(text)
    return parsed


def test_a_release_is_tried_on_every_python_before_it_is_published() -> None:
    jobs = workflow("release.yml")["jobs"]
    pythons = workflow("ci.yml")["jobs"]["wheel"]["strategy"]["matrix"]["python"]
    for name in ("try-wheels", "try-wheels-in-container"):
        assert jobs[name]["strategy"]["matrix"]["python"] == pythons
    publishing = [name for name in jobs if name.startswith("publish-")]
    assert publishing == ["publish-wheels", "publish-npm", "publish-site"]
    needed, waiting = set[str](), ["publish-wheels"]
    while waiting:
        needs = jobs[waiting.pop()].get("needs", [])
        found = {needs} if isinstance(needs, str) else set(needs)
        waiting.extend(found - needed)
        needed |= found
    assert needed == jobs.keys() - set(publishing)
    for name, job in jobs.items():
        assert ("id-token" in job["permissions"]) == (name in publishing)
        assert ("refs/tags/v" in job.get("if", "")) == (name in publishing)


@pytest.mark.parametrize("name", ["ci.yml", "release.yml"])
def test_workflows_name_actions_by_commit_and_scripts_that_exist(name: str) -> None:
    jobs = workflow(name)["jobs"].values()
    steps = [step for job in jobs for step in job["steps"]]
    actions = [step["uses"] for step in steps if "uses" in step]
    assert actions
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action) for action in actions)
    scripts = re.findall(r"\S*scripts/\S+\.m?(?:py|js)", str(steps))
    assert scripts
    assert all((ROOT / script.strip("'")).exists() for script in scripts)


def test_a_release_says_what_it_lacks(tmp_path: Path, scripts: None) -> None:
    check_release = importlib.import_module("check_release")
    for name in (*check_release.VERSIONS, "pyproject.toml"):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    version = onnxfit.__version__
    changelog = tmp_path / "CHANGELOG.md"
    text = re.sub(
        r"^## .*$", f"## [{version}] - 2026-01-31", changelog.read_text("utf-8"), flags=re.M
    )
    changelog.write_text(text, "utf-8")
    found = check_release.problems(f"v{version}", tmp_path)
    assert found == ["[project.urls] of pyproject.toml still has https://example.org."]
    settings = tmp_path / "pyproject.toml"
    settings.write_text(settings.read_text("utf-8").replace("example.org", "example.net"), "utf-8")
    assert check_release.problems(f"v{version}", tmp_path) == []
    lacking = check_release.problems("v99.0.0", tmp_path)
    assert len(lacking) == len(check_release.VERSIONS)
    assert lacking[0] == f"onnxfit/__init__.py names the version {version}, but the tag is v99.0.0."


def test_the_hooks_run_what_lint_runs() -> None:
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    entries = [hook["entry"] for repo in config["repos"] for hook in repo["hooks"]]
    tools = {re.sub(r" --(fix|force-exclude)", "", entry.split(" -m ")[1]) for entry in entries}
    recipe = RULES["Makefile"].split("\nlint:")[1].split("\n\n")[0]
    commands = re.findall(r"-m (ruff \w+|mypy .*)", recipe)
    assert set(commands) == tools


def test_importing_onnxfit_imports_no_optional_library() -> None:
    """Not even what onnxruntime's training build imports by itself; which can be imported
    afterwards.
    """
    code = """
import sys
import onnxfit, onnxfit.callbacks
print(*{"torch", "sklearn", "pandas", "mpi4py", "matplotlib", "tensorboard", "tensorflow", "urllib.request"} & set(sys.modules))
import importlib.util
if importlib.util.find_spec("torch") and importlib.util.find_spec("onnxruntime.training"):
    import onnxruntime.training
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []

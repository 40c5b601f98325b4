"""The command line as a whole: help, the page about it, streams and exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

import onnxfit.cli
from onnxfit.cli import main
from tests.cli.helpers import FIT, ROOT, call, done, refused, start_process

COMMANDS_IN_ORDER = main.list_commands(click.Context(main))
COMMANDS = sorted(COMMANDS_IN_ORDER)


def command(name: str) -> click.Command:
    found = main.get_command(click.Context(main), name)
    assert found is not None
    return found


@pytest.mark.skipif(sys.platform == "win32", reason="no signals to send")
def test_streams_and_codes(folder: Path) -> None:
    out, err = (
        process := start_process(*[a for a in FIT if a != "-q"], "-o", "t.onnx", "--json")
    ).communicate()
    assert process.returncode == 0
    assert json.loads(out)["epochs"] == 1
    assert err.startswith("epoch 1/1")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_teaches(name: str) -> None:
    """Each has an example, and each option says what it does and what happens without it."""
    text = done(name, "--help")
    assert re.search(rf"^ +onnxfit {name} ", text, re.MULTILINE) or f"  onnxfit {name}\n" in text
    for parameter in command(name).params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name
            assert parameter.help.endswith("."), parameter.name


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_80_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = done(*name.split(), "--help")
    assert [line for line in text.splitlines() if len(line) > 80] == []


def test_examples_use_options_that_exist() -> None:
    for name in COMMANDS:
        text = done(name, "--help").replace("\\\n", " ")
        known = {
            option
            for parameter in command(name).params
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        for line in re.findall(rf"^ +onnxfit {name}\b(.*)$", text, re.MULTILINE):
            assert {word for word in shlex.split(line) if re.match(r"--?[a-z]", word)} <= known


def test_no_command_is_the_help() -> None:
    assert "Commands:" in call().output


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/cli.md, command after command, in a folder of its own; every command is on it."""
    pytest.importorskip("yaml")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    seen = set()
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        if language == "python":
            exec(compile(block, "docs/cli.md", "exec"), {})
        elif language == "yaml":
            Path("options.yaml").write_text(block)
        else:
            for line in block.replace("\\\n", " ").splitlines():
                program, name, *rest = shlex.split(line)
                assert program == "onnxfit"
                seen.add(name)
                stdin = None
                if "<" in rest:
                    *rest, _, path = rest
                    stdin = Path(path).read_bytes()
                done(name, *rest, stdin=stdin)
    assert seen == set(COMMANDS)


GREET = """
import click

__all__ = ["greet"]


@click.command(short_help="Say hello to a model.")
@click.argument("model")
def greet(model: str) -> None:
    click.echo(f"Hello, {model}")
"""


def test_a_command_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "greet.py").write_text(GREET)
    (tmp_path / "helper.py").write_text("greeting = 'Hello'")
    monkeypatch.setattr(onnxfit.cli, "__path__", [*onnxfit.cli.__path__, str(tmp_path)])
    try:
        assert done("greet", "m.onnx") == "Hello, m.onnx\n"
        listed = main.list_commands(click.Context(main))
        assert listed == [*COMMANDS_IN_ORDER, "greet"], "and nothing that is no command"
        assert re.search(
            r"^  doctor .*\n  greet +Say hello to a model", done("--help"), re.MULTILINE
        )
        assert "No such command" in refused("helper", code=2)
    finally:
        for name in ("greet", "helper"):
            del sys.modules[f"onnxfit.cli.{name}"]
            delattr(onnxfit.cli, name)


def test_a_command_imports_no_other(tmp_path: Path) -> None:
    code = (
        "import sys; from onnxfit.cli import main; main(['ops', 'Relu'], standalone_mode=False);"
        "assert 'onnxfit.cli.ops' in sys.modules; assert 'onnxfit.cli.fit' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True)

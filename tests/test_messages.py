"""Laws for the messages that the package can show, as scripts/list_messages.py lists them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LENGTH = 4 * 80  # four lines of a terminal


@pytest.fixture(scope="module")
def listing() -> ModuleType:
    sys.path.insert(0, str(ROOT / "scripts"))
    return importlib.import_module("list_messages")


def test_messages_fit_into_four_lines(listing: ModuleType) -> None:
    found = list(listing.messages())
    assert len(found) > 500
    long = [f"{m.file}:{m.line}" for m in found if len(m.text) > MAX_LENGTH]
    assert not long


def test_texts_are_listed_with_what_is_filled_in(listing: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "a.py").write_text(
        "raise errors.DataError(f'The file {path!r}'\n    ' is empty.') from None\n"
        "warnings.warn('Use ' + 'y.', stacklevel=2)\n"
        "warn_user('Use z instead.', RuntimeWarning)\n"
        "raise SettingError(known)\n"
        "raise function('no error')\n"
    )
    assert [(m.line, m.kind, m.text) for m in listing.messages(folder)] == [
        (1, "DataError", "The file {path} is empty."),
        (3, "UserWarning", "Use y."),
        (4, "RuntimeWarning", "Use z instead."),
    ]

"""The arena that several sessions share: where there is one."""

from __future__ import annotations

from typing import Any

import onnxruntime
import pytest
from onnxruntime.capi import _pybind_state as C

from onnxfit.runtime import memory

ENTRY = "session.use_env_allocators"


@pytest.mark.parametrize(
    ("machine", "version", "shares"),
    [
        ("x86_64", (1, 19), True),
        ("AMD64", (1, 20), True),
        ("arm64", (1, 21), True),
        ("arm64", (1, 20), False),
    ],
)
def test_sessions_share_an_arena_where_onnxruntime_has_one(
    machine: str, version: tuple[int, ...], shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory.platform, "machine", lambda: machine)
    monkeypatch.setattr(memory, "onnxruntime_version", lambda: version)
    options = onnxruntime.SessionOptions()
    memory.share_arena(options)
    assert not options.enable_mem_pattern
    if shares:
        assert options.get_session_config_entry(ENTRY) == "1"
    else:
        with pytest.raises(RuntimeError, match=ENTRY):
            options.get_session_config_entry(ENTRY)


@pytest.mark.parametrize(
    ("problem", "is_raised"),
    [("An allocator for this device has already been registered", False), ("no memory", True)],
)
def test_an_arena_of_the_program_is_no_error(
    problem: str, is_raised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError(problem)

    monkeypatch.setattr(C, "create_and_register_allocator", fail)
    create = memory._create_arena.__wrapped__
    if is_raised:
        with pytest.raises(RuntimeError, match=problem):
            create()
    else:
        create()

"""What the allocator of a CPU is told to keep."""

import ctypes
from types import SimpleNamespace

import pytest

from lrpe_fairseq.compat import FIXES, freed_memory


@pytest.fixture
def told(monkeypatch):
    """What a recorded ``mallopt`` was called with; it takes sizes up to ``told.most``."""
    for name in freed_memory.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    record = SimpleNamespace(calls=[], most=2**30)

    def mallopt(parameter, value):
        record.calls.append((parameter, value))
        return int(value <= record.most)

    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=mallopt))
    return record


def test_large_tensors_are_kept_and_nothing_is_trimmed(told):
    assert freed_memory.keep_freed_memory in FIXES
    freed_memory.keep_freed_memory()
    assert told.calls == [(-3, 2**30), (-1, -1)]


def test_an_old_version_keeps_up_to_32_mb(told):
    told.most = 2**25
    freed_memory.keep_freed_memory()
    assert told.calls == [(-3, 2**30), (-3, 2**25), (-1, -1)]


def test_an_allocator_that_refuses_both_is_left_as_it_is(told):
    told.most = 0
    freed_memory.keep_freed_memory()
    assert (freed_memory.TRIM_THRESHOLD, freed_memory.NEVER) not in told.calls


@pytest.mark.parametrize("name", freed_memory.VARIABLES)
def test_what_the_user_has_set_is_left_as_it_is(told, monkeypatch, name):
    monkeypatch.setenv(name, "65536")
    freed_memory.keep_freed_memory()
    assert not told.calls


def test_other_allocators_are_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    freed_memory.keep_freed_memory()

"""The library's parts are imported when they are first used, with no look for garbage meanwhile."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

import springtide


@pytest.fixture
def collecting() -> Iterator[None]:
    """Let the collector be as it was, whatever a test leaves."""
    before = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if before else gc.disable)()


@pytest.mark.usefixtures("collecting")
@pytest.mark.parametrize("enabled", [True, False])
def test_collector_rests_while_the_library_is_imported(
    monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    meanwhile: list[bool] = []

    def import_module(name: str) -> SimpleNamespace:
        meanwhile.append(gc.isenabled())
        return SimpleNamespace(name=name)

    monkeypatch.setattr(importlib, "import_module", import_module)
    (gc.enable if enabled else gc.disable)()
    assert springtide.__getattr__("api").name == "springtide.api"
    assert (meanwhile, gc.isenabled()) == ([False], enabled)


@pytest.mark.usefixtures("collecting")
def test_collector_works_again_after_a_failed_import(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> object:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(ImportError, match=r"springtide\.api"):
        springtide.__getattr__("api")
    assert gc.isenabled()

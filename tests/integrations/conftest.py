"""Models of other libraries: the implementation is registered once, and warnings that come once come in every test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from packattn import _library

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def hf(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """packattn.integrations.transformers, registered; what it said once it says again."""
    pytest.importorskip("transformers", minversion="5.20", reason="transformers >= 5.20 is not installed")
    import packattn.integrations.transformers as module

    module.register()
    monkeypatch.setattr(_library, "_warned", {w for w in _library._warned if not w.startswith("transformers")})
    yield module

"""A pytest fixture: ``assert_no_leak(model, documents)``.

pytest_plugins = ["packattn.verify.pytest_plugin"]           # in conftest.py

def test_my_model(assert_no_leak):
    assert_no_leak(model, [torch.tensor([1, 2, 3]), torch.tensor([4, 5])])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from .probe import probe
from .probe_report import ProbeReport

AssertNoLeak = Callable[..., ProbeReport]


@pytest.fixture
def assert_no_leak() -> AssertNoLeak:
    """A function with the arguments of :func:`packattn.verify.probe`: raises LeakError (an AssertionError) with the
    report unless every document has the logits it has alone and no document moves another; returns the report.

    By default the model is called as ``model(input_ids, position_ids=..., packing=...)``, which transformers models with
    ``attn_implementation="packattn"`` understand. Pass ``run(model, input_ids, packing)`` for another way.
    """

    def check(model: Any, documents: Sequence[torch.Tensor], **options: Any) -> ProbeReport:
        __tracebackhide__ = True
        report = probe(model, documents, **options)
        report.raise_if_failed()
        return report

    return check

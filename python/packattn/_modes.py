"""Eval mode for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Every module in eval mode, and as it was afterwards. What is no module (any callable) is left alone."""
    modes = [(module, module.training) for module in model.modules()] if isinstance(model, torch.nn.Module) else []
    try:
        if modes:
            model.eval()
        yield
    finally:
        # Each module's own flag: train(True) on the whole would thaw what the user had put in eval mode.
        for module, training in modes:
            module.training = training

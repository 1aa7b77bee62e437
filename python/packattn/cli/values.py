"""Integers from the command line: written there, or in a file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_FILES = (".npy", ".json", ".txt", ".csv", ".tsv")


def integers(name: str, text: str, dims: tuple[int, ...] = (1, 2)) -> Tensor:
    """int64 [T] or [B, S] from "5,4,3", or from a file: .npy, .json (a list, or lists), or any text with whole numbers in
    it, one row of the batch per line where lines have several.

    name: of the argument, for errors. dims: what is allowed.

    Raises:
        ValueError, OSError: what cannot be read, and what holds other than whole numbers.
    """
    path = Path(text)
    if re.fullmatch(r"\s*-?\d+(?:[\s,]+-?\d+)*[\s,]*", text):
        array = np.array([int(part) for part in re.split(r"[\s,]+", text.strip().strip(","))], dtype=object)
    elif path.suffix.lower() in _FILES or path.is_file():
        if not path.is_file():
            raise ValueError(f"{name}: there is no file {text!r}")
        array = _read(name, path)
    else:
        raise ValueError(f"{name} must be whole numbers (5,4,3) or a file ({', '.join(_FILES)}), got {text!r}")
    if array.ndim not in dims:
        wanted = " or ".join({1: "a list [N]", 2: "a batch [B, S]"}[n] for n in dims)
        raise ValueError(f"{name} must be {wanted}, got {array.ndim} dimensions, {list(array.shape)}")
    flat = array.reshape(-1).tolist()
    for place, value in enumerate(flat):
        if isinstance(value, bool):
            value = flat[place] = int(value)
        if isinstance(value, float) and value.is_integer():
            value = flat[place] = int(value)
        if not isinstance(value, int) or not -(2**63) <= value < 2**63:
            raise ValueError(f"{name} must hold whole numbers, got {value!r} at place {place}")
    return torch.tensor(flat, dtype=torch.int64).reshape(array.shape)


def _read(name: str, path: Path) -> np.ndarray[Any, Any]:
    if path.suffix.lower() == ".npy":
        try:
            return np.asarray(np.load(path, allow_pickle=False))
        except ValueError as error:
            raise ValueError(f"{name}: {path} is no .npy file of numbers: {error}") from error
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: {path} is no text: {error}") from error
    if path.suffix.lower() == ".json":
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{name}: {path} is no JSON: {error}") from error
        if not isinstance(found, list):
            raise ValueError(f"{name}: {path} must hold a list, got {type(found).__name__}")
    else:
        lines = [re.split(r"[\s,;]+", line.strip().strip(",;")) for line in text.splitlines() if line.strip()]
        try:
            found = [[int(part) for part in line] for line in lines]
        except ValueError as error:
            raise ValueError(f"{name}: {path} must hold whole numbers: {error}") from error
        if all(len(line) == 1 for line in found) or len(found) == 1:
            found = [number for line in found for number in line]
    try:
        array = np.array(found, dtype=object)
    except ValueError:
        array = np.array(None)
    if (
        array.dtype != object
        or any(isinstance(x, list) for x in array.reshape(-1).tolist())
        or (found and not array.ndim)
    ):
        raise ValueError(f"{name}: the rows of {path} must be equally long")
    return array

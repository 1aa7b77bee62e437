"""The demo's corpus: the docstrings of the Python standard library, a text that every machine with Python has.

Thousands of short documents with a long tail of lengths, which is what makes packing worth while. The files are parsed
with :mod:`ast`; nothing is imported or run.
"""

from __future__ import annotations

import ast
import random
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

BOS = 256  # first token of every document: it has no text before it, so the first byte is predicted from this alone
EOS = 257
VOCABULARY = 258

_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_MIN_BYTES = 8
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class CorpusError(RuntimeError):
    """The machine has no readable standard library sources."""


@dataclass(frozen=True)
class Corpus:
    """Documents as bytes, in the order of their files, without duplicates."""

    documents: list[bytes]
    root: Path
    files: int
    unreadable: int

    def split(self, held_out: int, seed: int) -> tuple[list[bytes], list[bytes]]:
        """Shuffle by `seed` and set `held_out` documents apart: (training documents, held-out documents)."""
        documents = list(self.documents)
        random.Random(seed).shuffle(documents)
        return documents[held_out:], documents[:held_out]


def load(root: Path | None = None, max_documents: int | None = None) -> Corpus:
    """Read the docstrings of modules, classes and functions under `root` (default: this Python's standard library).

    The order depends on file names and positions only. A file that Python cannot parse is counted and left out. Raises
    :class:`CorpusError` if there are no sources, as in a Python whose standard library is in a zip file.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else Path(root)
    documents: dict[
        bytes, None
    ] = {}  # keeps the first of equal docstrings: copies would put training text in the held-out set
    files = unreadable = 0
    for path in _source_files(root):
        files += 1
        texts = _docstrings(path)
        if texts is None:
            unreadable += 1
            continue
        documents.update((text, None) for text in texts if len(text) >= _MIN_BYTES)
        if max_documents is not None and len(documents) >= max_documents:
            break
    if not documents:
        raise CorpusError(
            f"packattn demo reads the docstrings of the Python standard library, wanted .py files with docstrings under "
            f"{root}, found {files} files and no docstring. This Python may keep its library in a zip file or ship "
            "without sources; run the demo with a Python that has them (python.org, conda, a distribution's package)."
        )
    return Corpus(list(documents)[:max_documents], root, files, unreadable)


def encode(text: bytes, max_tokens: int | None = None) -> torch.Tensor:
    """Bytes to tokens, int64 [len(text) + 2] with BOS and EOS; cut to the first `max_tokens` tokens."""
    return torch.tensor([BOS, *text, EOS][:max_tokens], dtype=torch.int64)


def _source_files(root: Path) -> Iterator[Path]:
    found = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = (path for path in found if _SKIPPED_FOLDERS.isdisjoint(path.parts))
    return (root / path for path in sorted(kept, key=lambda path: path.as_posix()))


def _docstrings(path: Path) -> list[bytes] | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old files have invalid escapes; not the reader's business
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, _DOCUMENTED))
    return [text.encode("utf-8", errors="replace") for text in found if text]

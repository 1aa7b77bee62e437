"""Files that pictures go into: looked at before the work, so that a wrong name does not cost minutes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def output_file(text: str) -> Path:
    """For argparse: a file that could be written."""
    path = Path(text)
    if path.is_dir() or not path.name:
        raise argparse.ArgumentTypeError(f"wanted a file to write, got the folder {text!r}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"wanted a file in a folder that exists, got {text!r}")
    return path


def check(path: Path) -> None:
    """Raises ImportError without matplotlib, ValueError for a suffix that it cannot write."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ImportError(
            'pictures need matplotlib: pip install "packattn[plot]", or pip install matplotlib'
        ) from error
    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lstrip(".").lower() not in known:
        raise ValueError(f"the name of a picture must end with one of .{', .'.join(known)}, got {path.name!r}")


def save(figure: Any, path: Path, quiet: bool = False) -> None:
    """Writes the picture and says so."""
    figure.savefig(path, dpi=150)
    if not quiet:
        print(f"Picture: {path}")

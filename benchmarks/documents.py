"""Puts what a run found into a document, between a pair of comments: `<!-- name -->` and `<!-- /name -->`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def replace_block(text: str, name: str, block: str) -> str:
    opening, closing = f"<!-- {name} -->", f"<!-- /{name} -->"
    if text.count(opening) != 1 or text.count(closing) != 1:
        raise SystemExit(f"the document must hold {opening} and {closing} once each")
    before, rest = text.split(opening)
    return f"{before}{opening}\n{block}\n{closing}{rest.split(closing)[1]}"


def replace_blocks(document: Path, blocks: Mapping[str, str]) -> None:
    """blocks: by the names of their comments."""
    text = document.read_text(encoding="utf-8")
    for name, block in blocks.items():
        text = replace_block(text, name, block)
    document.write_text(text, encoding="utf-8")

"""README's commands are there for .ci/run, and its support table is what the dispatcher does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from packattn import _library
from packattn.cli import info

ROOT = Path(__file__).resolve().parent.parent


def test_readme_has_the_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("demo", "test"):
        assert len(re.findall(rf"<!-- command:{name} -->\n```bash\n[^`]+```\n", text)) == 1, name


@pytest.mark.skipif(not _library.CPU.loaded, reason="the table is about the compiled kernels, and there are none")
def test_readme_support_table_is_what_the_dispatcher_says() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.split("<!-- support-table -->\n")[1].split("<!-- /support-table -->")[0]
    rows = ["| device | dtype | head dims of the compiled kernels | otherwise |", "|---|---|---|---|"]
    for row in info.collect()["support"]:
        rows.append(f"| {row['device']} | {row['dtype']} | {row['compiled_head_dims']} | {row['otherwise']} |")
    assert table.strip() == "\n".join(rows)

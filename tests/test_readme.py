"""The documents keep their word: every Python block runs, prints what stands below it, and the support table is true."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from packattn import _library
from packattn.cli import info

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def python_blocks(text: str) -> Iterator[tuple[int, str, str | None]]:
    """(line, code, expected output or None) of every ```python block; a ```text block right after it is the output."""
    blocks = list(FENCE.finditer(text))
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        if block[1] != "python":
            continue
        follows = after is not None and after[1] == "text" and not text[block.end() : after.start()].strip()
        yield text.count("\n", 0, block.start()) + 2, block[2], after[2] if follows and after else None


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_python_blocks_run_and_print_what_they_say(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    text = path.read_text(encoding="utf-8")
    for needed in re.findall(r"<!-- needs: (\w+) -->", text):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    for line, code, expected in python_blocks(text):
        printed = io.StringIO()
        # Padding moves the block to its own line numbers, so that a traceback points into the document.
        program = compile("\n" * (line - 1) + code, str(path), "exec")
        with contextlib.redirect_stdout(printed):
            exec(program, namespace)  # noqa: S102  (running it is the test)
        if expected is not None:
            assert printed.getvalue().strip() == expected.strip(), f"{path.name}, the block at line {line}"


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


@pytest.mark.parametrize(
    "path", [*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"], ids=lambda p: p.name
)
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (path.parent / target).exists(), f"{path.name} links to {target}, which does not exist"

"""The documents keep their word: every code block of README and docs runs and prints what stands below it, every link
leads somewhere, and every public name is on a page of the API reference.

A fence is one of

    python    runs, in one namespace for each document
    bash      runs in a shell, in the same empty folder as the document's Python
    console   lines after "$ " run in a shell; what stands between them is what they print
    text      right after python or bash: what that prints

Comments right above a fence change this: <!-- not run: REASON --> is listed as skipped with its reason,
<!-- command:NAME --> is run by .ci/run, <!-- numbers vary --> compares the text with all numbers left out, and
<!-- needs: MODULE --> anywhere skips the document where the module is missing. A line "..." stands for any lines.
PACKATTN_ACCEPT=1 copies the pictures that blocks save into docs/images, if the document shows one of that name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo.utils

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"((?:^<!--[^\n]*-->\n)*)^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = ("python", "bash", "console", "text")
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?|-{2,}")


@dataclasses.dataclass(frozen=True)
class Block:
    """One fence. prints: the text block that follows at once, or None; vary: whether its numbers may differ."""

    line: int
    language: str
    code: str
    comments: str
    prints: str | None
    vary: bool

    @property
    def not_run(self) -> str | None:
        """Why it does not run, or None."""
        reason = re.search(r"<!-- not run: (.+?) -->", self.comments)
        command = re.search(r"<!-- command:(\w+) -->", self.comments)
        return reason[1] if reason else f".ci/run runs README's command {command[1]!r}" if command else None


def blocks(path: Path) -> Iterator[Block]:
    text = path.read_text(encoding="utf-8")
    found = [f for f in FENCE.finditer(text) if not f[2].startswith("{")]  # directives of Sphinx are no code
    for fence, after in zip(found, [*found[1:], None][: len(found)], strict=True):
        close = after is not None and after[2] == "text" and not text[fence.end() : after.start()].strip()
        yield Block(
            line=text.count("\n", 0, fence.start(3)) + 1,
            language=fence[2],
            code=fence[3],
            comments=fence[1],
            prints=after[3] if close and after else None,
            vary=close and after is not None and "<!-- numbers vary -->" in after[1],
        )


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


RUN = {path: list(blocks(path)) for path in DOCUMENTS}


def same(printed: str, wanted: str, vary: bool) -> bool:
    """Whether text is what a document says it is."""
    if vary:
        printed, wanted = (re.sub(r"[ \t]+", " ", NUMBER.sub("#", text)) for text in (printed, wanted))
    pattern = ""
    for line in wanted.strip().splitlines():
        dots = line.strip() == "..."
        pattern += r"(?:.*\n)*?" if dots else re.escape(line.rstrip()).replace(r"\.\.\.", ".*") + r"\n"
    found = "".join(f"{line.rstrip()}\n" for line in printed.strip().splitlines())
    return re.fullmatch(pattern, found) is not None


def shell(code: str, folder: Path) -> str:
    if not Path(sys.executable).with_name("packattn").exists():  # the tests run on a source tree that is not installed
        code = f'packattn() {{ "{sys.executable}" -m packattn "$@"; }}\n{code}'
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", code],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}:\n{done.stdout}"
    return done.stdout


def sessions(code: str) -> Iterator[tuple[str, str]]:
    """(command, what it prints) of a console block."""
    for part in re.split(r"^\$ ", code, flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        length = next(i for i, line in enumerate(lines) if not line.endswith("\\")) + 1
        yield "\n".join(lines[:length]), "\n".join(lines[length:])


def check(where: str, printed: str, wanted: str | None, vary: bool) -> None:
    if wanted is not None and not same(printed, wanted, vary):
        pytest.fail(f"{where} says that this is printed:\n{wanted}\nbut it is:\n{printed}")


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_blocks_run_and_print_what_they_say(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # a page counts its own compilations
    for needed in re.findall(r"<!-- needs: (\w+) -->", path.read_text(encoding="utf-8")):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    for block in RUN[path]:
        if block.not_run or block.language == "text":
            continue
        where = f"{name(path)}, the block at line {block.line},"
        if block.language == "python":
            printed = io.StringIO()
            # Padding moves the block to its own line numbers, so that a traceback points into the document.
            program = compile("\n" * (block.line - 1) + block.code, str(path), "exec")
            with contextlib.redirect_stdout(printed):
                exec(program, namespace)  # noqa: S102  (running it is the test)
            check(where, printed.getvalue(), block.prints, block.vary)
        elif block.language == "bash":
            check(where, shell(block.code, tmp_path), block.prints, block.vary)
        else:
            commands = list(sessions(block.code))
            assert commands, f"{where} is a console block without a line that begins with '$ '"
            for command, wanted in commands:
                vary = "<!-- numbers vary -->" in block.comments
                check(where, shell(command, tmp_path), wanted if wanted.strip() else None, vary)
    for picture in tmp_path.glob("*.png"):
        kept = ROOT / "docs" / "images" / picture.name
        if f"images/{picture.name}" in path.read_text(encoding="utf-8"):
            if os.environ.get("PACKATTN_ACCEPT") == "1":
                shutil.copy(picture, kept)
            assert size_of_png(picture) == size_of_png(kept), f"docs/images/{picture.name} is an older drawing"


def size_of_png(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


NOT_RUN = [(path, block) for path in DOCUMENTS for block in RUN[path] if block.not_run]


@pytest.mark.parametrize(("path", "block"), NOT_RUN, ids=[f"{name(p)}:{b.line}" for p, b in NOT_RUN])
def test_blocks_that_do_not_run(path: Path, block: Block) -> None:
    """They are seen in the test's output, each with its reason; those of .ci/run are really there."""
    command = re.search(r"<!-- command:(\w+) -->", block.comments)
    if command:
        ci = ROOT / ".ci" / "run"
        if ci.exists():
            assert f"run_readme_command {command[1]}\n" in ci.read_text(encoding="utf-8") + "\n"
    else:
        pytest.skip(block.not_run or "")


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_every_fence_is_of_a_kind_that_is_looked_at(path: Path) -> None:
    before: Block | None = None
    for block in RUN[path]:
        where = f"{name(path)}, line {block.line}"
        assert block.language in LANGUAGES or block.not_run, (
            f"{where}: {block.language!r} needs <!-- not run: REASON -->"
        )
        if block.language == "text" and not block.not_run:
            follows = before is not None and before.prints == block.code
            assert follows or "<!-- demo-output -->" in block.comments, f"{where}: text that nothing prints"
        before = block


def test_what_counts_as_printed() -> None:
    assert same("a\nb\n", "a\nb", vary=False)
    assert not same("a\nb\n", "a", vary=False)
    assert same("a\nb\nc\nd\n", "a\n...\nd", vary=False)
    assert not same("a\nb\nc\n", "a\n...\nd", vary=False)
    assert same("took 3 s\n", "took ... s", vary=False)
    assert same("leak:   1.5e-07 of 3", "leak: 2 of 4.5", vary=True)
    assert not same("leak: 1.5", "gain: 1.5", vary=True)


@pytest.mark.parametrize(
    "path",
    [*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "benchmarks").rglob("README.md"))],
    ids=name,
)
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
        to = path.parent / target if target else path
        assert to.exists(), f"{name(path)} links to {target}, which does not exist"
        if anchor and to.suffix == ".md":
            heads = re.findall(r"^#+ (.+)$", to.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in slugs, f"{name(path)} links to {target}#{anchor}, which has no such heading"


# ---- the API reference -----------------------------------------------------------------------------------------

PUBLIC = (
    "packattn",
    "packattn.verify",
    "packattn.plotting",
    "packattn.dropins",
    "packattn.verify.pytest_plugin",
    "packattn.integrations.transformers",
    "packattn.integrations.encoders",
    "packattn.integrations.torchtitan",
    "packattn.integrations.olmo",
    "packattn.integrations.megatron",
)


def public_names(module_name: str) -> set[str]:
    module = importlib.import_module(module_name)
    if hasattr(module, "__all__"):
        return {n for n in module.__all__ if not n.startswith("__") and not inspect.ismodule(getattr(module, n))}
    own = {n: v for n, v in vars(module).items() if getattr(v, "__module__", "") == module_name}
    return {n for n, v in own.items() if not n.startswith("_") and callable(v)}


def documented_names() -> set[str]:
    """Full names that the pages of docs/api have, by their autodoc directives."""
    names: set[str] = set()
    for path in sorted((ROOT / "docs" / "api").glob("*.md")):
        current = ""
        for kind, target, options in re.findall(
            r"^\.\. (\w+):: ([\w.]+)\n((?:   :[^\n]*\n)*)", path.read_text(encoding="utf-8"), re.MULTILINE
        ):
            if kind in ("currentmodule", "automodule"):
                current = target
            if kind == "automodule":
                members = re.search(r":members:(.*)", options)
                listed = [n.strip() for n in members[1].split(",") if n.strip()] if members else []
                try:
                    shown = listed or (public_names(target) if members else [])
                except ModuleNotFoundError:  # an integration's own library
                    continue
                names |= {f"{target}.{n}" for n in shown}
            elif kind.startswith("auto"):
                names.add(target if target.startswith("packattn.") else f"{current}.{target}")
    return names


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_in_the_reference(module: str) -> None:
    try:
        wanted = {f"{module}.{n}" for n in public_names(module)}
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed")
    if module == "packattn.dropins":  # the two that packattn has too are shown under that name
        wanted -= {"packattn.dropins.flash_attn_varlen_func", "packattn.dropins.varlen_attn"}
    assert wanted <= documented_names(), wanted - documented_names()

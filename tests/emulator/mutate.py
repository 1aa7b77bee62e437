"""Breaks the kernels on purpose, one break at a time, and tells who notices. A break that nobody notices is a failure.

    python tests/emulator/mutate.py                     # every list in mutations/
    python tests/emulator/mutate.py forward hopper      # these lists
    python tests/emulator/mutate.py --only barrier      # breaks whose name has this word
    python tests/emulator/mutate.py --check             # only whether every break still applies

A list is a Python file in mutations/ with

    PROGRAMS    sources in tests/emulator that are built with the broken tree and run until one of them fails
    ARGUMENTS   of the programs (optional); FLAGS of the compiler (optional), for example to build one instantiation
    POLICIES    schedules to run under, until one fails (optional, default the first alone)
    MUTATIONS   see mutation.py

Exit status 1 if a break survives, is noticed by the wrong party, no longer applies or does not compile, or if the
unbroken tree does not pass. Each break gets a copy of the sources, so that several can be tried at a time.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import emulator_programs as programs
from mutation import NUMBERS, REPORT, SANITIZER, Mutation

REPORT_LINE = re.compile(r"^\s*([a-z-]+) x\d+: (.*)$", re.MULTILINE)
SANITIZER_LINE = re.compile(r"ERROR: AddressSanitizer: [\w-]+|runtime error: .*")
SECONDS = 300  # for one program: a break may make a loop endless


@dataclass
class MutationList:
    name: str
    sources: list[str]
    mutations: list[Mutation]
    arguments: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    policies: list[str] = field(default_factory=lambda: ["0"])


@dataclass
class Outcome:
    caught: set[str] = field(default_factory=set)
    words: str = ""
    error: str = ""


def load(path: Path) -> MutationList:
    spec = importlib.util.spec_from_file_location(f"mutations_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = ModuleType(spec.name)
    spec.loader.exec_module(module)
    return MutationList(
        path.stem,
        list(module.PROGRAMS),
        list(module.MUTATIONS),
        [str(a) for a in getattr(module, "ARGUMENTS", [])],
        list(getattr(module, "FLAGS", [])),
        [str(p) for p in getattr(module, "POLICIES", ["0"])],
    )


def lists(names: list[str]) -> list[MutationList]:
    files = sorted((HERE / "mutations").glob("*.py"))
    unknown = set(names) - {f.stem for f in files}
    if unknown:
        raise SystemExit(f"no list named {', '.join(sorted(unknown))}; there are {', '.join(f.stem for f in files)}")
    return [load(f) for f in files if not names or f.stem in names]


def broken(mutation: Mutation, root: Path) -> str:
    """The text of the file with the break in it. ValueError if the break does not apply."""
    text = (root / mutation.file).read_text(encoding="utf-8")
    found = text.count(mutation.old)
    if found != mutation.count:
        raise ValueError(f"stands {found} times in {mutation.file}, not {mutation.count}: {mutation.old!r}")
    return text.replace(mutation.old, mutation.new)


def judge(output: str, status: int) -> Outcome:
    """Who noticed, from what a program printed and how it ended."""
    outcome = Outcome()
    if report := REPORT_LINE.search(output):
        outcome.caught.add(REPORT)
        outcome.words = f"{report[1]}: {report[2]}"
    if sanitizer := SANITIZER_LINE.search(output):
        outcome.caught.add(SANITIZER)
        outcome.words = outcome.words or sanitizer[0]
    if status and not outcome.caught:
        outcome.caught.add(NUMBERS)
        lines = [line for line in output.splitlines() if line.strip()]
        outcome.words = f"status {status}: {lines[-1] if lines else ''}"
    return outcome


def attempt(which: MutationList, mutation: Mutation | None) -> Outcome:
    """Builds and runs a copy of the sources with the break in it; the copy as it is for None."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for part in programs.FOLDERS:
            shutil.copytree(programs.ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
        arguments = which.arguments
        levels: list[list[str]] = [["-O1", "-g0", "-w"]]
        if mutation is not None:
            try:
                (root / mutation.file).write_text(broken(mutation, root), encoding="utf-8")
            except (OSError, ValueError) as error:
                return Outcome(error=str(error))
            if mutation.arguments is not None:
                arguments = list(mutation.arguments)
            if mutation.caught == SANITIZER:
                levels.append([*programs.SANITIZERS, "-w"])
        for level in levels:
            for source in which.sources:
                program = root / Path(source).stem
                command = programs.command(
                    root / "tests" / "emulator" / source, program, *level, *which.flags, root=root
                )
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    return Outcome(error=f"does not compile: {done.stderr[:500]}")
                for policy in which.policies:
                    try:
                        done = subprocess.run(
                            [str(program), *arguments],
                            env=os.environ | {"PACKATTN_EMULATOR_POLICY": policy},
                            capture_output=True,
                            text=True,
                            errors="replace",
                            timeout=SECONDS,
                            check=False,
                        )
                    except subprocess.TimeoutExpired:
                        return Outcome({NUMBERS}, f"never ends ({SECONDS} s)")
                    outcome = judge(done.stdout + done.stderr, done.returncode)
                    if outcome.caught:
                        return outcome
    return Outcome()


def verdict(mutation: Mutation, outcome: Outcome) -> str:
    """What is wrong with the outcome; "" if the break was noticed by whom it should be."""
    enough = {REPORT: {REPORT}, NUMBERS: {NUMBERS, REPORT}, SANITIZER: {SANITIZER, NUMBERS, REPORT}}[mutation.caught]
    if outcome.error:
        return outcome.error
    if not outcome.caught:
        return "SURVIVED"
    if not outcome.caught & enough:
        return f"noticed by {', '.join(sorted(outcome.caught))}, not by {mutation.caught}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lists", nargs="*", help="names of files in mutations/ (default: all)")
    parser.add_argument("--only", default="", help="breaks whose name has this text")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="breaks tried at a time")
    parser.add_argument("--check", action="store_true", help="only whether every break still applies")
    options = parser.parse_args()
    failures = tried = 0
    for which in lists(options.lists):
        chosen = [m for m in which.mutations if options.only in m.name]
        if options.check:
            for mutation in chosen:
                tried += 1
                try:
                    broken(mutation, programs.ROOT)
                except (OSError, ValueError) as error:
                    failures += 1
                    print(f"{which.name}: {mutation.name}: {error}")
            continue
        with ThreadPoolExecutor(options.jobs) as pool:
            unbroken = pool.submit(attempt, which, None)
            outcomes = pool.map(lambda m, w=which: attempt(w, m), chosen)
            result = unbroken.result()
            if result.caught or result.error:
                failures += 1
                print(f"{which.name}: FAILED without any break: {result.error or result.words}", flush=True)
            for mutation, outcome in zip(chosen, outcomes, strict=True):
                tried += 1
                wrong = verdict(mutation, outcome)
                failures += bool(wrong)
                by = "+".join(sorted(outcome.caught)) or "nobody"
                print(f"{which.name}: {mutation.name}: {wrong or by}", flush=True)
                if outcome.words:
                    print(f"    {outcome.words[:200]}", flush=True)
    print(f"{tried} breaks, {failures} failures")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())

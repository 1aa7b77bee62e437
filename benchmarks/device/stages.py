#!/usr/bin/env python
"""The stages of benchmarks/device/run.sh. Each has its seconds, and its failure takes nothing from the others.

    build          CMake, for this machine's GPU, into a copy of the package (nothing is installed)
    conformance    every function of csrc/cuda/ptx.cuh on the GPU against the emulator's model of it
    tests          the table of tests/devices on device cuda
    sanitizer      compute-sanitizer (memcheck, racecheck) over a few small calls
    attention      forward and backward beside varlen_attn, SDPA and FlexAttention (bench.py)
    metadata       position ids to key ranges, beside the usual code with its waits
    graph          a CUDA graph replayed on documents that it was not recorded with

Writes into $OUT (or --out): log.txt with all output, stages.json, results.json and table.md of the benchmark, metadata.json
and graph.json. Exit status 0 if every stage passed.

--dry-run needs no GPU: it builds the library for one with nvcc, runs the emulator's half of the conformance program, collects
the tests, and runs every benchmark on the CPU at sizes that show only that it works.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WORK = ROOT / "build" / "device"
SECONDS = 525.0  # of all stages together
DRY_ARCH = "9.0a"


@dataclasses.dataclass
class Result:
    name: str
    status: str  # "passed", "failed", "timed out", "not there", "left out"
    seconds: float
    note: str = ""


class Runner:
    """Runs stages one after the other, within one deadline."""

    def __init__(self, out: Path, dry: bool, seconds: float) -> None:
        self.out, self.dry = out, dry
        self.end = time.monotonic() + seconds
        self.results: list[Result] = []
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(WORK / "site"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        out.mkdir(parents=True, exist_ok=True)
        self.log = open(out / "log.txt", "w", encoding="utf-8")  # noqa: SIM115  (open as long as the run)

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def say(self, text: str) -> None:
        print(text, flush=True)
        self.log.write(text + "\n")
        self.log.flush()

    def run(self, command: list[str], seconds: float, **environment: str) -> tuple[str, str]:
        """(status, output). The output goes to the log as it comes; the whole process group ends with the time."""
        self.say("$ " + " ".join(command))
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.set_blocking(process.stdout.fileno(), False)  # type: ignore[union-attr]
        stop, parts = time.monotonic() + seconds, []
        status = ""
        while True:
            chunk = process.stdout.read() or b""  # type: ignore[union-attr]
            if chunk:
                text = chunk.decode(errors="replace")
                parts.append(text)
                sys.stdout.write(text)
                sys.stdout.flush()
                self.log.write(text)
                self.log.flush()
            elif process.poll() is not None:
                break
            elif time.monotonic() > stop:
                status = "timed out"
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            else:
                time.sleep(0.05)
        return status or ("passed" if process.returncode == 0 else "failed"), "".join(parts)

    def stage(self, name: str, seconds: float, reserve: float, commands: list[list[str]], **environment: str) -> bool:
        """Runs the commands of a stage. seconds: what it may take; reserve: what must be left for the stages after it."""
        began = time.monotonic()
        budget = seconds if self.dry else min(seconds, self.left - reserve)
        self.say(f"\n==> {name}  (at most {max(budget, 0):.0f} s, {self.left:.0f} s left)")
        if budget < 5:
            return self.done(Result(name, "left out", 0.0, "no time was left"))
        status, output = "passed", ""
        for command in commands:
            status, output = self.run(command, budget - (time.monotonic() - began), **environment)
            if status != "passed":
                break
        last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")
        return self.done(Result(name, status, time.monotonic() - began, last[:300]))

    def done(self, result: Result) -> bool:
        self.results.append(result)
        self.say(f"==> {result.name}: {result.status} after {result.seconds:.0f} s")
        (self.out / "stages.json").write_text(
            json.dumps([dataclasses.asdict(r) for r in self.results], indent=1) + "\n", encoding="utf-8"
        )
        return result.status == "passed"

    def not_there(self, name: str, why: str) -> None:
        self.say(f"\n==> {name}")
        self.done(Result(name, "not there", 0.0, why))


def find(name: str) -> str | None:
    """A tool: beside the interpreter, on the PATH, or in the CUDA toolkit."""
    beside = Path(sys.executable).with_name(name)
    if beside.exists():
        return str(beside)
    return shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer")


def output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def architecture(dry: bool) -> str | None:
    """Of the first GPU, as TORCH_CUDA_ARCH_LIST has it; Hopper's own instructions need its "a"."""
    found = output_of("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader").splitlines()
    if found and "." in found[0]:
        return found[0].strip() + ("a" if found[0].strip() == "9.0" else "")
    return DRY_ARCH if dry else None


def machine(runner: Runner, arch: str | None) -> None:
    fields = "name,driver_version,memory.total,clocks.max.sm,power.limit"
    runner.say(f"date         {datetime.datetime.now().isoformat(timespec='seconds')}")
    runner.say(f"GPU          {output_of('nvidia-smi', f'--query-gpu={fields}', '--format=csv,noheader') or 'none'}")
    runner.say(f"built for    {arch}")
    nvcc = find("nvcc")
    runner.say(f"nvcc         {(output_of(nvcc, '--version').splitlines() or ['none'])[-1] if nvcc else 'none'}")
    torch = output_of(sys.executable, "-c", "import torch; print(torch.__version__, torch.version.cuda)")
    runner.say(f"torch        {torch}")
    runner.say(f"python       {sys.version.split()[0]}, {os.cpu_count()} cores")


def copy_package() -> None:
    """python/packattn without what was built into it: what the build puts its libraries into, and the stages import."""
    target = WORK / "site" / "packattn"
    ignore = shutil.ignore_patterns("__pycache__", "lib", "*.so", "*.dylib")
    shutil.copytree(ROOT / "python" / "packattn", target, ignore=ignore, dirs_exist_ok=True)


def build_commands(arch: str) -> list[list[str]]:
    cmake, ninja = find("cmake"), find("ninja")
    if cmake is None:
        return []
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "PACKATTN_CUDA": "on",
        "PACKATTN_CUDA_ARCH_LIST": arch,
        "PACKATTN_OUTPUT_DIR": str(WORK / "site" / "packattn"),
        "PACKATTN_BUILD_PYTHON_MODULE": "ON" if importlib.util.find_spec("pybind11") else "OFF",
        "Python_EXECUTABLE": sys.executable,
    }
    configure = [cmake, "-S", str(ROOT), "-B", str(WORK / "cmake"), *(f"-D{k}={v}" for k, v in options.items())]
    if ninja:
        configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
    return [configure, [cmake, "--build", str(WORK / "cmake"), "--parallel", jobs]]


def conformance_commands(arch: str, dry: bool) -> list[list[str]]:
    """The program that runs every instruction, built for the GPU and for the emulator; then both outputs compared."""
    nvcc, compiler = find("nvcc"), find("g++")
    if nvcc is None or compiler is None:
        return []
    emulator, folder = ROOT / "tests" / "emulator", WORK / "conformance"
    folder.mkdir(parents=True, exist_ok=True)
    source, gpu, cpu = str(emulator / "conformance.cu"), folder / "on_gpu", folder / "emulated"
    commands = [
        [nvcc, "-std=c++20", "-O2", f"-arch=sm_{arch.replace('.', '')}", "-o", str(gpu), source],
        [compiler, "-std=c++20", "-O2", "-ffp-contract=off", f"-I{emulator}", "-x", "c++", "-o", str(cpu), source],
        ["bash", "-c", f"'{cpu}' > '{cpu}.txt'"],
    ]
    if not dry:
        commands.append(["bash", "-c", f"'{gpu}' > '{gpu}.txt'"])
    # Without a GPU the emulator's output stands for both: that it is whole, and can be read.
    compare = [sys.executable, str(emulator / "conformance.py"), f"{cpu if dry else gpu}.txt", f"{cpu}.txt"]
    return [*commands, compare]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="all but the work of the GPU")
    parser.add_argument("--out", type=Path, help="where results go (default: $OUT, or benchmarks/results/device-DATE)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all stages (default: {SECONDS:.0f})")
    parser.add_argument("--only", nargs="*", help="these stages alone")
    options = parser.parse_args()
    dry = options.dry_run
    given = options.out or (Path(os.environ["OUT"]) if os.environ.get("OUT") else None)
    out = given or ROOT / "benchmarks" / "results" / f"device-{datetime.date.today().isoformat()}"
    runner = Runner(out.resolve(), dry, options.seconds)
    arch = architecture(dry)
    machine(runner, arch)
    if arch is None:
        runner.say("no GPU was found (nvidia-smi): --dry-run does what needs none")
        return 2
    python = sys.executable
    device = "cpu" if dry else "cuda"

    def wanted(name: str) -> bool:
        return not options.only or name in options.only

    copy_package()
    if wanted("build"):
        if commands := build_commands(arch):
            runner.stage("build", 3600 if dry else 200, 150, commands)
        else:
            runner.not_there("build", "cmake was not found")
    if wanted("conformance"):
        if commands := conformance_commands(arch, dry):
            runner.stage("conformance", 900 if dry else 90, 120, commands)
        else:
            runner.not_there("conformance", "nvcc or g++ was not found")
    if wanted("tests"):
        if importlib.util.find_spec("pytest"):
            command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/devices", "-k", "cuda"]
            command += ["--maxfail=25"] if not dry else ["--collect-only", "-q"]
            command += ["-n", "4"] if not dry and importlib.util.find_spec("xdist") else []
            runner.stage("tests", 600 if dry else 120, 120, [command])
        else:
            runner.not_there("tests", "pytest is not installed")
    if wanted("sanitizer"):
        program = [python, str(HERE / "small.py"), "--device", device]
        sanitizer = find("compute-sanitizer")
        if dry:
            runner.stage("sanitizer", 120, 0, [program])
        elif sanitizer is None:
            runner.not_there("sanitizer", "compute-sanitizer was not found")
        else:
            tools = [
                [sanitizer, "--tool", tool, "--kernel-regex", "kns=packattn", "--error-exitcode", "9", *program]
                for tool in ("memcheck", "racecheck")
            ]
            runner.stage("sanitizer", 60, 110, tools)
    if wanted("attention"):
        reserve = 40
        budget = max(30.0, runner.left - reserve - 10)
        command = [python, str(HERE / "bench.py"), "--out", str(out), "--device", device]
        command += ["--tiny", "--seconds", "300", "--each", "0.002"] if dry else ["--seconds", f"{budget:.0f}"]
        runner.stage("attention", 900 if dry else budget + 10, reserve, [command])
    for name in ("metadata", "graph"):
        if wanted(name):
            command = [python, str(HERE / f"{name}.py"), "--out", str(out), "--device", device]
            runner.stage(name, 120 if dry else 25, 25 if name == "metadata" else 0, [command])

    runner.say("\nstage          status       seconds")
    for result in runner.results:
        runner.say(f"{result.name:<14} {result.status:<12} {result.seconds:7.0f}  {result.note[:100]}")
    runner.say(f"results in {out}")
    return 0 if all(r.status == "passed" for r in runner.results) else 1


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python
"""The stages of benchmarks/device/run.sh. Each has its seconds, and its failure takes nothing from the others.

    build          CMake, for this machine's GPU, into a copy of the package (nothing is installed)
    conformance    every function of csrc/cuda/ptx.cuh on the GPU against the emulator's model of it
    conformance90  on Hopper the same for wgmma, bulk tensor copies and mbarriers (ptx_sm90.cuh)
    calls90        on Hopper a few small calls with the sm_90a kernels
    attention      forward and backward beside the peers (bench.py), with the sm_80 and the sm_90a kernels side by side
    tests          the table of tests/devices on device cuda
    metadata       position ids to key ranges, beside the usual code with its waits
    graph          a CUDA graph replayed on documents that it was not recorded with
    sanitizer      compute-sanitizer (memcheck, racecheck) over the small calls

If conformance90 or calls90 does not pass, or if the benchmark hangs or breaks, it goes on with the sm_80 kernels alone,
and its table says so.

Writes into $OUT (or --out): log.txt with all output, stages.json, results.json and table.md of the benchmark,
metadata.json and graph.json. Exit status 0 if every stage passed.

--dry-run needs no GPU: it builds the library for one with nvcc, runs the emulator's half of the conformance program,
collects the tests, and runs every benchmark on the CPU at sizes that show only that it works.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import json
import os
import shlex
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
HOPPER = "9.0a"
# The most that a stage takes, and what must be left for those after it when it starts; the benchmark takes what is left
# of its own most. A build takes about a minute on 16 cores, the stages up to the benchmark another; the rest is less
# important than its figures.
LIMITS = {
    "build": (200, 240),
    "conformance": (75, 230),
    "conformance90": (25, 225),
    "calls90": (35, 220),
    "attention": (240, 75),
    "attention80": (240, 75),
    "tests": (100, 50),
    "metadata": (25, 40),
    "graph": (25, 20),
    "sanitizer": (75, 0),
}
DRY_LIMITS = {"build": 3600, "conformance": 900, "attention": 900, "tests": 600}  # the others: 120


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

    def budget(self, name: str) -> float:
        """Seconds that a stage of LIMITS may take if it starts now."""
        if self.dry:
            return float(DRY_LIMITS.get(name, 120))
        most, reserve = LIMITS[name]
        return min(most, self.left - reserve)

    def go(self, name: str, commands: list[list[str]], **environment: str) -> bool:
        """A stage of LIMITS."""
        return self.stage(name, self.budget(name), 0, commands, **environment)

    def stage(self, name: str, seconds: float, reserve: float, commands: list[list[str]], **environment: str) -> bool:
        """Runs the commands of a stage. seconds: what it may take; reserve: what must be left after it."""
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
    """The program that runs every instruction, built for the GPU and for the emulator; then both outputs compared, of
    all but Hopper's own."""
    nvcc, compiler = find("nvcc"), find("g++")
    if nvcc is None or compiler is None:
        return []
    emulator, folder = ROOT / "tests" / "emulator", WORK / "conformance"
    folder.mkdir(parents=True, exist_ok=True)
    source = shlex.quote(str(emulator / "conformance.cu"))
    gpu, cpu = (shlex.quote(str(folder / name)) for name in ("on_gpu", "emulated"))
    on_gpu = f"{shlex.quote(nvcc)} -std=c++20 -O2 -arch=sm_{arch.replace('.', '')} -o {gpu} {source}"
    emulated = f"{compiler} -std=c++20 -O2 -ffp-contract=off -I{shlex.quote(str(emulator))} -x c++ -o {cpu} {source}"
    both = f"{on_gpu} & first=$!; {emulated} && wait $first"
    return [["bash", "-c", both], *compare_commands("sm80", dry)]


def compare_commands(part: str, dry: bool) -> list[list[str]]:
    """part: "sm80" or "sm90"."""
    emulator, folder = ROOT / "tests" / "emulator", WORK / "conformance"
    outputs = [folder / f"{name}_{part}.txt" for name in ("on_gpu", "emulated")]
    commands = [
        ["bash", "-c", f"{shlex.quote(str(folder / name))} {part} > {shlex.quote(str(output))}"]
        for name, output in zip(("on_gpu", "emulated"), outputs, strict=True)
    ]
    # Without a GPU the emulator's output stands for both: that it is whole, and can be read.
    first = outputs[1] if dry else outputs[0]
    compare = [sys.executable, str(emulator / "conformance.py"), str(first), str(outputs[1])]
    return [*commands[dry:], compare]


def unfinished(out: Path) -> str:
    """The problem in which the benchmark came to a sudden end; "" if it did not."""
    try:
        return str(json.loads((out / "results.json").read_text(encoding="utf-8")).get("unfinished", ""))
    except (OSError, ValueError):
        return ""


class Stages:
    """What is run, in its order."""

    def __init__(self, runner: Runner, arch: str, only: list[str] | None) -> None:
        self.runner, self.arch, self.dry = runner, arch, runner.dry
        self.only = only
        self.device = "cpu" if self.dry else "cuda"
        self.families = ["sm80", "sm90"] if arch == HOPPER else ["sm80"]
        if float(arch.rstrip("af")) < 8:
            self.families = ["plain"]
        self.note = ""  # why the sm_90a kernels are not used where they could be

    def wanted(self, name: str) -> bool:
        return not self.only or name in self.only

    def leave_out_sm90(self, why: str) -> None:
        if "sm90" in self.families:
            self.families.remove("sm90")
            self.note = f"the sm_90a kernels are left out: {why}"
            self.runner.say(self.note)

    def run(self) -> None:
        runner = self.runner
        if self.wanted("build"):
            if commands := build_commands(self.arch):
                runner.go("build", commands)
            else:
                runner.not_there("build", "cmake was not found")
        if self.wanted("conformance"):
            if commands := conformance_commands(self.arch, self.dry):
                runner.go("conformance", commands)
            else:
                runner.not_there("conformance", "nvcc or g++ was not found")
        if self.arch == HOPPER:
            self.hopper()
        if self.wanted("attention"):
            self.attention()
        if self.wanted("tests"):
            self.tests()
        for name in ("metadata", "graph"):
            if self.wanted(name):
                command = [sys.executable, str(HERE / f"{name}.py"), "--out", str(runner.out), "--device", self.device]
                runner.go(name, [command])
        if self.wanted("sanitizer"):
            self.sanitizer()

    def hopper(self) -> None:
        """Whether the sm_90a kernels can be used: a wrong belief about their instructions can hang or be wrong."""
        runner = self.runner
        if self.wanted("conformance90"):
            if not (WORK / "conformance" / "emulated").exists():
                runner.not_there("conformance90", "the conformance program was not built")
            elif not runner.go("conformance90", compare_commands("sm90", self.dry)):
                self.leave_out_sm90("conformance of wgmma, bulk copies and mbarriers did not pass")
        if "sm90" in self.families and self.wanted("calls90"):
            program = [sys.executable, str(HERE / "small.py"), "--device", self.device, "--family", "sm90"]
            if not runner.go("calls90", [program]):
                self.leave_out_sm90("small calls with them did not pass")

    def attention(self) -> None:
        runner = self.runner
        command = [sys.executable, str(HERE / "bench.py"), "--out", str(runner.out), "--device", self.device]

        def complete(name: str) -> list[str]:
            more = ["--families", *self.families] + (["--note", self.note] if self.note else [])
            if self.dry:
                return [*command, *more, "--tiny", "--seconds", "300", "--each", "0.002"]
            return [*command, *more, "--seconds", f"{max(10.0, runner.budget(name) - 10):.0f}"]

        if runner.go("attention", [complete("attention")]):
            return
        if "sm90" in self.families and (where := unfinished(runner.out)):
            self.leave_out_sm90(f"the benchmark came to a sudden end in {where}")
            runner.go("attention80", [[*complete("attention80"), "--resume"]])

    def tests(self) -> None:
        if not importlib.util.find_spec("pytest"):
            self.runner.not_there("tests", "pytest is not installed")
            return
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/devices"]
        command += ["-k", "cuda" if "sm90" in self.families else "cuda and not hopper"]
        if self.dry:
            command += ["--collect-only", "-q"]
        else:
            command += ["--maxfail=25"] + (["-n", "4"] if importlib.util.find_spec("xdist") else [])
        self.runner.go("tests", [command])

    def sanitizer(self) -> None:
        program = [sys.executable, str(HERE / "small.py"), "--device", self.device]
        if self.dry:
            self.runner.go("sanitizer", [program])
            return
        sanitizer = find("compute-sanitizer")
        if sanitizer is None:
            self.runner.not_there("sanitizer", "compute-sanitizer was not found")
            return
        checks = [(tool, "auto") for tool in ("memcheck", "racecheck")]
        checks += [("memcheck", "sm90")] if "sm90" in self.families else []
        commands = []
        for tool, family in checks:
            options = ["--tool", tool, "--kernel-regex", "kns=packattn", "--error-exitcode", "9"]
            commands.append([sanitizer, *options, *program, "--family", family])
        self.runner.go("sanitizer", commands)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="all but the work of the GPU")
    parser.add_argument("--out", type=Path, help="where results go (default: $OUT, or benchmarks/results/device-DATE)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all stages (default: {SECONDS:.0f})")
    parser.add_argument("--only", nargs="*", help="these stages alone")
    options = parser.parse_args()
    given = options.out or (Path(os.environ["OUT"]) if os.environ.get("OUT") else None)
    out = given or ROOT / "benchmarks" / "results" / f"device-{datetime.date.today().isoformat()}"
    runner = Runner(out.resolve(), options.dry_run, options.seconds)
    arch = architecture(options.dry_run)
    machine(runner, arch)
    if arch is None:
        runner.say("no GPU was found (nvidia-smi): --dry-run does what needs none")
        return 2
    copy_package()
    stages = Stages(runner, arch, options.only)
    stages.run()

    runner.say("\nstage          status       seconds")
    for result in runner.results:
        runner.say(f"{result.name:<14} {result.status:<12} {result.seconds:7.0f}  {result.note[:100]}")
    if stages.note:
        runner.say(stages.note)
    runner.say(f"results in {out}")
    return 0 if all(r.status == "passed" for r in runner.results) else 1


if __name__ == "__main__":
    sys.exit(main())

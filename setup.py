"""Builds packattn: metadata from pyproject.toml, native libraries from CMakeLists.txt, which this file drives.

Environment variables of the build:

PACKATTN_NATIVE       "off" builds no native code: packattn then runs on its plain-PyTorch and Python paths. Default "on".
PACKATTN_CUDA         "auto" (default) builds the CUDA kernels where nvcc is found and torch has CUDA, "on" demands them (an
                      error says what is missing), "off" leaves them out.
TORCH_CUDA_ARCH_LIST  architectures of the CUDA kernels, for example "8.0;9.0+PTX". Default: those of the GPUs here; without
                      one, 8.0, 9.0a, 10.0 and 12.0, with PTX for what comes after.
CUDACXX, CUDA_HOME    the CUDA compiler; the folder that has bin/nvcc. Otherwise PATH, then /usr/local/cuda.
PACKATTN_DEBUG        "1" builds with assertions, debug information and little optimisation.
PACKATTN_SANITIZE     sanitizers for the native code, for example "undefined". "address" needs its library loaded before
                      Python: LD_PRELOAD=$(c++ -print-file-name=libasan.so).
MAX_JOBS              compiler processes at a time. Default: one for each core.
CXX, CXXFLAGS         the C++ compiler and further flags, as CMake reads them.

An editable install puts the libraries into python/packattn. Each configuration has a folder of its own below build/, so
building again compiles only what changed; `cmake --build build/<folder>` does the same without pip.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.errors import ExecError, PlatformError

ROOT = Path(__file__).resolve().parent


def switch(name: str, default: str, allowed: tuple[str, ...]) -> str:
    value = os.environ.get(name, "").strip().lower() or default
    if value not in allowed:
        raise PlatformError(f"{name} must be one of {', '.join(allowed)}; it is {value!r}.")
    return value


def find_tool(name: str) -> str | None:
    """Path of cmake or ninja: the one that pip installed beside this interpreter, else the one on PATH."""
    beside = Path(sysconfig.get_path("scripts"), name)
    return str(beside) if beside.exists() else shutil.which(name)


def torch_version() -> str:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise PlatformError(
            "packattn's native build needs torch >= 2.10 and this interpreter has none. Install torch first, or set "
            "PACKATTN_NATIVE=off to install the plain-PyTorch paths only."
        )
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("__version__"))
    return line.split("=")[1].strip().strip("'\"")


class CleanBuild(build):
    """build that starts from nothing: setuptools would put files that the sources no longer have into the wheel."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class CMakeBuild(build_ext):
    """build_ext that runs CMake once for all libraries, then copies them to where setuptools wants them."""

    def run(self) -> None:
        jobs = os.environ.get("MAX_JOBS", "").strip() or str(os.cpu_count() or 1)
        if not jobs.isdigit() or jobs == "0":
            raise PlatformError(f"MAX_JOBS must be a positive whole number; it is {jobs!r}.")
        in_place = bool(self.inplace or getattr(self, "editable_mode", False))
        build_dir, output = self.configure(in_place)
        self.cmake("--build", str(build_dir), "--parallel", jobs)
        if not in_place:
            self.copy_outputs(output, Path(self.build_lib) / "packattn")

    def configure(self, in_place: bool) -> tuple[Path, Path]:
        """Run CMake's configure step. Returns the build folder and the folder that the libraries land in."""
        compiler = os.environ.get("CXX", "").split(" ")[0]
        if not any(shutil.which(c) for c in ([compiler] if compiler else ["c++", "g++", "clang++"])):
            raise PlatformError(
                f"No C++ compiler found ({compiler or 'c++, g++ or clang++'}). Install one (g++ 11 or clang 14 or later), "
                "or set PACKATTN_NATIVE=off to install the plain-PyTorch paths only."
            )
        debug = switch("PACKATTN_DEBUG", "0", ("0", "1")) == "1"
        sanitize = os.environ.get("PACKATTN_SANITIZE", "").strip()
        ninja = find_tool("ninja")
        options = {
            "CMAKE_BUILD_TYPE": "Debug" if debug else "Release",
            "PACKATTN_CUDA": switch("PACKATTN_CUDA", "auto", ("auto", "on", "off")),
            "PACKATTN_CUDA_ARCH_LIST": os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip(),
            "PACKATTN_SANITIZE": sanitize,
        }
        if ninja:
            options["CMAKE_MAKE_PROGRAM"] = ninja
        release = torch_version().partition("+")[0]
        parts = ["editable" if in_place else "wheel", str(sys.implementation.cache_tag), f"torch{release}"]
        parts += ["debug" if debug else "release", *([sanitize.replace(",", "-")] if sanitize else [])]
        build_dir = ROOT / "build" / "-".join(parts)
        output = ROOT / "python" / "packattn" if in_place else build_dir / "packattn"
        options["PACKATTN_OUTPUT_DIR"] = str(output)

        # An isolated build has its tools and its torch in a folder of the day. CMake cannot move a build folder to other
        # tools, so a folder that was made with others starts anew.
        environment = [os.environ.get(name) for name in ("CXX", "CXXFLAGS", "LDFLAGS", "CUDACXX", "CUDA_HOME")]
        stamp = json.dumps([find_tool("cmake"), sys.prefix, options, environment])
        stamp_file = build_dir / "configured-with.json"
        if build_dir.exists() and (not stamp_file.exists() or stamp_file.read_text(encoding="utf-8") != stamp):
            shutil.rmtree(build_dir)
        arguments = ["-S", str(ROOT), "-B", str(build_dir), *(["-G", "Ninja"] if ninja else [])]
        # Not part of the stamp: python and python3 of one environment are one interpreter.
        options["Python_EXECUTABLE"] = sys.executable
        self.cmake(*arguments, *(f"-D{name}={value}" for name, value in options.items()))
        stamp_file.write_text(stamp, encoding="utf-8")
        return build_dir, output

    def cmake(self, *arguments: str) -> None:
        cmake = find_tool("cmake")
        if cmake is None:
            raise PlatformError(
                "packattn's native build needs CMake 3.20 or later, and none was found: pip install cmake."
            )
        print("running", cmake, *arguments, flush=True)
        try:
            subprocess.run([cmake, *arguments], check=True)
        except subprocess.CalledProcessError as error:
            raise ExecError(
                f"packattn's native build failed: cmake ended with status {error.returncode}; the lines above say why. "
                "PACKATTN_NATIVE=off installs without native code."
            ) from None

    def copy_outputs(self, output: Path, destination: Path) -> None:
        module = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
        libraries = ["lib/packattn_cpu.so"]
        if (output / "lib" / "packattn_cuda.so").exists():
            libraries.append("lib/packattn_cuda.so")
        for name in (module, *libraries):
            target = destination / name
            target.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(output / name), str(target))


native = switch("PACKATTN_NATIVE", "on", ("on", "off")) == "on"
setup(
    # The sources are CMake's business; the entry makes the wheel a platform wheel and names the module.
    ext_modules=[Extension("packattn._C", sources=[])] if native else [],
    cmdclass={"build": CleanBuild, **({"build_ext": CMakeBuild} if native else {})},
)

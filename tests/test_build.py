"""The native build: what its sources may include, what the built files promise, and how it refuses.

The slow tests make packages and environments; they want the tools of `pip install -e ".[dev]"`.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import packattn
from packattn import _library

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("cmake", "ninja", "pybind11", "setuptools")
in_source_tree = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="the source tree is not here")
needs_tools = pytest.mark.skipif(
    any(importlib.util.find_spec(tool) is None for tool in TOOLS),
    reason=f"needs {', '.join(TOOLS)} in this environment",
)
needs_extension = pytest.mark.skipif(_library.extension is None, reason="the native module is not built")


def environment(**variables: str) -> dict[str, str]:
    """This environment without the variables that packattn and its build read, and with these."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PACKATTN_") and k not in ("CXX", "MAX_JOBS")}
    return {**kept, **variables}


def run(*command: str | Path, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env=environment(**variables), capture_output=True, text=True, check=False)


# ---- sources ---------------------------------------------------------------------------------------------------------

# What each folder of csrc may take from outside. Kernels know neither torch nor Python, so that they compile in seconds,
# run under sanitizers, and do not care which torch they meet; the host ops hold to the part of torch that is stable.
FORBIDDEN = {
    "common": r"torch/|ATen/|c10/|caffe2/|pybind11/|Python\.h|cuda",
    "cpu": r"torch/|ATen/|c10/|caffe2/|pybind11/|Python\.h|cuda|ops/|python/",
    "cuda": r"torch/|ATen/|c10/|caffe2/|pybind11/|Python\.h|ops/|python/|cuda_fp16|cuda_bf16|cute/|cutlass/",
    "ops": r"torch/(?!csrc/stable/|headeronly/)|ATen/|c10/|caffe2/|pybind11/|Python\.h|python/",
    "python": r"torch/|ATen/|c10/|caffe2/|ops/",
}


def test_only_the_ptx_files_hold_instructions():
    """Whatever the emulator is to see goes through the functions of ptx*.cuh; a launch, through launch.cuh."""
    if not (ROOT / "csrc" / "cuda").exists():
        pytest.skip("the source tree is not here")
    for file in (ROOT / "csrc" / "cuda").rglob("*.cu*"):
        text = re.sub(r"//.*", "", file.read_text(encoding="utf-8"))
        wrong = re.findall(r"\basm\b|__shared__|__syncthreads|__shfl|<<<|__ballot|__any_sync", text)
        allowed = wrong if file.name.startswith("ptx") else ["<<<"] if file.name == "launch.cuh" else []
        assert [w for w in wrong if w not in allowed] == [], file.name


def includes(file: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', file.read_text(encoding="utf-8"), re.MULTILINE)


@in_source_tree
@pytest.mark.parametrize("folder", FORBIDDEN)
def test_what_sources_include(folder):
    files = [f for f in (ROOT / "csrc" / folder).rglob("*") if f.suffix in (".h", ".cpp", ".in", ".cuh", ".cu")]
    assert files
    found = [
        f"{file.name}: {name}"
        for file in files
        for name in includes(file)
        if re.match(rf"(\.\./)*({FORBIDDEN[folder]})", name)
    ]
    assert found == []


@in_source_tree
def test_every_folder_has_its_contract():
    assert {f.name for f in (ROOT / "csrc").iterdir() if f.is_dir()} == set(FORBIDDEN)


@in_source_tree
def test_no_file_is_too_long_to_read():
    files = [f for d in ("csrc", "python", "tests", "benchmarks") for f in (ROOT / d).rglob("*") if f.is_file()]
    sources = [f for f in files if f.suffix in (".py", ".pyi", ".h", ".cpp", ".cu", ".cuh")]
    assert [f.name for f in sources if len(f.read_text(encoding="utf-8").splitlines()) > 600] == []


@in_source_tree
def test_the_environment_variables_are_those_documented():
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    documented = set(re.findall(r"^([A-Z_]{3,})[ ,]", ast.get_docstring(ast.parse(text)), re.MULTILINE))
    read = set(re.findall(r'(?:environ\.get|switch)\(\s*"([A-Z_]+)"', text))
    assert read <= documented
    assert {"PACKATTN_NATIVE", "PACKATTN_CUDA", "PACKATTN_DEBUG", "PACKATTN_SANITIZE", "MAX_JOBS"} <= read


# ---- built files -----------------------------------------------------------------------------------------------------


@needs_extension
def test_the_stub_has_the_names_of_the_module():
    stub = ast.parse((Path(packattn.__file__).parent / "_C.pyi").read_text(encoding="utf-8"))
    functions = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}
    module = _library.extension
    assert set(functions) == {name for name in vars(module) if not name.startswith("_")}
    for name, node in functions.items():
        given = re.findall(r"(\w+):", getattr(module, name).__doc__.split("->")[0])
        assert [a.arg for a in node.args.args] == given, name
    (info,) = (node for node in stub.body if isinstance(node, ast.ClassDef) and node.name == "BuildInfo")
    assert [field.target.id for field in info.body] == list(module.build_info())


@needs_extension
def test_build_info_says_what_was_built():
    info = _library.extension.build_info()
    assert info["version"] == packattn.__version__
    assert info["torch_target"] == "2.10"
    assert info["cuda"] or "CUDA" in info["cuda_reason"]


@needs_extension
def test_instruction_sets():
    module = _library.extension
    assert module.cpu_isas()[-1] == "portable" and module.cpu_isa() in module.cpu_isas()
    # By its path, as importing packattn imports torch, which takes seconds.
    load = "s = u.spec_from_file_location('_C', sys.argv[1]); m = u.module_from_spec(s); s.loader.exec_module(m)"
    ask = f"import importlib.util as u, sys; {load}; print(m.cpu_isa())"
    for name in module.cpu_isas():
        assert run(sys.executable, "-c", ask, module.__file__, PACKATTN_CPU_ISA=name).stdout.strip() == name
    answer = run(sys.executable, "-c", ask, module.__file__, PACKATTN_CPU_ISA="mmx")
    assert answer.returncode != 0 and "PACKATTN_CPU_ISA" in answer.stderr


@pytest.mark.skipif(not _library.CPU.loaded or shutil.which("readelf") is None, reason="needs the library and readelf")
def test_the_ops_library_depends_on_no_particular_torch():
    dynamic = run("readelf", "-d", _library.CPU.path).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
    system = {"libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libc.so.6", "libpthread.so.0"}
    assert "libtorch_cpu.so" in needed
    assert {name for name in needed - {"libtorch_cpu.so"} - system if not name.startswith("ld-linux")} == set()
    assert "RPATH" not in dynamic and "RUNPATH" not in dynamic
    symbols = run("readelf", "-W", "--dyn-syms", _library.CPU.path).stdout
    # The C functions of the stable ABI, and nothing of torch's C++, whose names change from version to version.
    assert re.findall(r"UND.* (_ZNK?\d*(?:2at|3c10|5torch)\w+)", symbols) == []


# ---- refusals of the build -------------------------------------------------------------------------------------------


@in_source_tree
@pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="needs setuptools")
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PACKATTN_NATIVE": "maybe"}, "PACKATTN_NATIVE must be one of on, off; it is 'maybe'."),
        ({"PACKATTN_CUDA": "12"}, "PACKATTN_CUDA must be one of auto, on, off; it is '12'."),
        ({"PACKATTN_DEBUG": "yes"}, "PACKATTN_DEBUG must be one of 0, 1; it is 'yes'."),
        ({"MAX_JOBS": "all"}, "MAX_JOBS must be a positive whole number; it is 'all'."),
        ({"CXX": "no-such-compiler"}, "No C++ compiler found (no-such-compiler)."),
    ],
)
def test_setup_refuses_with_a_sentence(variables, message):
    answer = run(sys.executable, "setup.py", "build_ext", "--inplace", cwd=ROOT, **variables)
    assert answer.returncode != 0 and message in answer.stderr


@in_source_tree
@needs_tools
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("-DPACKATTN_CUDA=12", 'PACKATTN_CUDA must be auto, on or off; it is "12"'),
        ("-DPython_EXECUTABLE=WITHOUT_TORCH", "needs torch >= 2.10, and .* has no torch"),
    ],
)
def test_cmake_refuses_with_a_sentence(option, message, tmp_path):
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # -S: no site-packages
    (tmp_path / "python").chmod(0o755)
    cmake = shutil.which("cmake", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    options = [f"-DPython_EXECUTABLE={sys.executable}", option.replace("WITHOUT_TORCH", str(tmp_path / "python"))]
    options += [f"-DPACKATTN_OUTPUT_DIR={tmp_path}"]  # a configuration without CUDA removes the library built before
    answer = run(cmake, "-S", ROOT, "-B", tmp_path / "build", "-DPACKATTN_BUILD_PYTHON_MODULE=OFF", *options)
    assert answer.returncode != 0 and re.search(message, " ".join(answer.stderr.split()))


# ---- packages and other torch versions -------------------------------------------------------------------------------


def backend(source: Path, hook: str, output: Path, **variables: str) -> Path:
    """Run one hook of the build backend in the source tree, as pip does. Returns the file that it made."""
    call = f"import sys, setuptools.build_meta as b; print(b.{hook}(sys.argv[1]))"
    output.mkdir(exist_ok=True)
    answer = run(sys.executable, "-c", call, output, cwd=source, **variables)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return output / answer.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """The unpacked sdist of a copy of this source tree."""
    where = tmp_path_factory.mktemp("sdist")
    ignore = shutil.ignore_patterns("build", "dist", ".git", "*.egg-info", "*cache*", "*.so", "venv")
    shutil.copytree(ROOT, where / "copy", ignore=ignore)
    with tarfile.open(backend(where / "copy", "build_sdist", where / "made")) as archive:
        archive.extractall(where / "unpacked", filter="data")
    return where / "unpacked" / f"packattn-{packattn.__version__}"


@pytest.mark.slow
@in_source_tree
@needs_tools
def test_an_sdist_builds_a_wheel(sdist, tmp_path):
    for name in (
        "CMakeLists.txt",
        "csrc/common/params.h",
        "csrc/python/build_config.h.in",
        "tests/cases.py",
        "README.md",
    ):
        assert (sdist / name).exists()
    wheel = backend(sdist, "build_wheel", tmp_path / "made")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "installed")
    assert {"packattn/lib/packattn_cpu.so", "packattn/_C.pyi", "packattn/py.typed"} <= set(names)
    assert [n for n in names if re.fullmatch(r"packattn/_C\..*\.so", n)]
    assert [n for n in names if not n.startswith(("packattn/", f"packattn-{packattn.__version__}.dist-info/"))] == []
    run_ops(sys.executable, tmp_path / "installed")


@pytest.mark.slow
@in_source_tree
@needs_tools
def test_without_native_code(sdist, tmp_path):
    wheel = backend(sdist, "build_wheel", tmp_path / "made", PACKATTN_NATIVE="off")
    assert wheel.name == f"packattn-{packattn.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    run_ops(sys.executable, tmp_path / "installed", compiled=False)


CHECK = """
import sys, warnings, torch
warnings.simplefilter("ignore")
import packattn
from packattn import _library
compiled = sys.argv[1] == "True"
assert _library.CPU.loaded == compiled, _library.CPU
torch.manual_seed(0)
packing = packattn.Packing.from_lengths([5, 1, 70, 0, 33])
q, k, v = (torch.randn(109, heads, 16, requires_grad=True) for heads in (4, 2, 2))
mask = packattn.dense_mask(packing)
expected = torch.nn.functional.scaled_dot_product_attention(
    *(x.transpose(0, 1) for x in (q, k, v)), attn_mask=mask, enable_gqa=True
).transpose(0, 1)
out = packattn.attention(q, k, v, packing)
torch.testing.assert_close(out, expected)
weights = torch.randn_like(out)
got = torch.autograd.grad((out * weights).sum(), (q, k, v))
torch.testing.assert_close(got, torch.autograd.grad((expected * weights).sum(), (q, k, v)))
assert list(packattn.pack([5, 2, 3, 1], 4, "bfd_split")) == [[(0, 0, 4)], [(2, 0, 3), (0, 4, 1)], [(1, 0, 2), (3, 0, 1)]]
print("torch", torch.__version__, "from", packattn.__file__)
"""


def run_ops(python: str | Path, installed: Path, compiled: bool = True) -> str:
    """Attention, its gradients and the packer by this interpreter, from the packattn that lies in `installed`."""
    answer = run(python, "-c", CHECK, str(compiled), PYTHONPATH=str(installed))
    assert answer.returncode == 0, answer.stderr
    assert str(installed) in answer.stdout
    return answer.stdout


@pytest.mark.slow
@pytest.mark.skipif(not _library.CPU.loaded, reason="the compiled CPU library is not there")
@pytest.mark.parametrize("requirement", ["torch==2.13.0", "torch>=2.14"])
def test_the_same_library_runs_under_other_versions_of_torch(requirement, tmp_path):
    """PACKATTN_OTHER_PYTHON: interpreters that have the torch in question, to save making an environment for it."""
    for python in filter(None, os.environ.get("PACKATTN_OTHER_PYTHON", "").split(os.pathsep)):
        version = run(python, "-c", "import torch; print(torch.__version__)")
        release = tuple(int(n) for n in version.stdout.split("+")[0].split(".")[:2])
        if release == (2, 13) if requirement == "torch==2.13.0" else release >= (2, 14):
            break
    else:
        subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
        python = tmp_path / "venv" / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", requirement, "numpy", "tqdm"], check=True)
    # A copy, as torch may lie beside the original.
    installed = tmp_path / "installed"
    shutil.copytree(Path(packattn.__file__).parent, installed / "packattn")
    assert re.match(r"torch 2\.13\." if requirement == "torch==2.13.0" else r"torch 2\.", run_ops(python, installed))

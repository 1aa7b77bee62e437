"""The house: names, docstrings, what stands in the files, and that the compiled parts are there at all."""

from __future__ import annotations

import inspect
import os
import pkgutil
import re
import subprocess
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

import packattn
from packattn import _library, ops, reference

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("python", "csrc", "tests", "benchmarks", "docs", ".ci")
ENDINGS = {".py", ".pyi", ".cpp", ".h", ".cu", ".cuh", ".cmake", ".md", ".toml", ".yaml", ".txt", ".in", ".sh", ""}


def files() -> list[Path]:
    """The project's own text files."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split("\0")
        paths = [ROOT / name for name in listed if name]
    except (OSError, subprocess.CalledProcessError):  # an unpacked sdist
        paths = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*")]
        paths += list(ROOT.glob("*"))
    return sorted(p for p in paths if p.is_file() and p.suffix in ENDINGS and "__pycache__" not in p.parts)


def modules() -> list[ModuleType]:
    names = [m.name for m in pkgutil.walk_packages(packattn.__path__, "packattn.")]
    found = [packattn]
    for name in names:
        if name.endswith(("._C", ".__main__")):
            continue
        try:
            found.append(import_module(name))
        except ModuleNotFoundError as error:  # an integration's own library may be missing
            if not name.startswith("packattn.integrations.") or (error.name or "").startswith("packattn"):
                raise
    return found


MODULES = modules()


def test_compiled_parts_are_in_use() -> None:
    """The suite is not to pass by testing the fallback alone."""
    if os.environ.get("PACKATTN_NATIVE", "").lower() in ("0", "off", "false"):
        pytest.skip("switched off by PACKATTN_NATIVE")
    assert _library.CPU.loaded, _library.CPU.missing
    assert _library.extension is not None, _library.extension_missing


def test_all_is_complete() -> None:
    assert len(packattn.__all__) == len(set(packattn.__all__))
    for name in packattn.__all__:
        assert hasattr(packattn, name), name
    own = {
        name
        for name, value in vars(packattn).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("packattn")
    }
    assert own <= set(packattn.__all__), own - set(packattn.__all__)


def test_decided_names_are_there() -> None:
    names = {
        "Packing", "attention", "dense_mask", "pack", "mask_labels", "verify", "cu_seqlens_from_lengths",
        "cu_seqlens_from_segment_ids", "cu_seqlens_from_position_ids", "position_ids_from_cu_seqlens",
        "segment_ids_from_cu_seqlens", "__version__",
    }  # fmt: skip
    assert names <= set(packattn.__all__)
    assert {"probe", "check_attention", "check_positions"} <= set(dir(packattn.verify))


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_modules_say_what_they_hold(module: ModuleType) -> None:
    assert module.__doc__, f"{module.__name__} has no docstring"


@pytest.mark.parametrize("module", [packattn, packattn.verify], ids=lambda m: m.__name__)
def test_docstrings(module: ModuleType) -> None:
    """Everything that users call says what it does; of the main classes, methods and properties too."""
    missing = []
    for name in module.__all__:
        value = getattr(module, name)
        if not (inspect.isfunction(value) or inspect.isclass(value)):
            continue
        missing += [name] * (not inspect.getdoc(value))
        if inspect.isclass(value) and module is packattn:
            members = {m: v for m, v in vars(value).items() if not m.startswith("_")}
            kinds = (classmethod, staticmethod, property)
            missing += [
                f"{name}.{m}" for m, v in members.items() if (callable(v) or isinstance(v, kinds)) and not v.__doc__
            ]
    assert not missing


def test_documented_arguments_are_the_arguments() -> None:
    """Every argument of attention stands in its docstring, and nothing else does."""
    text = inspect.getdoc(packattn.attention) or ""
    section = text.split("Args:")[1].split("Returns:")[0]
    documented = re.findall(r"^\s{4}(\w[\w, ]*):", section, re.MULTILINE)
    named = {name.strip() for entry in documented for name in entry.split(",")}
    assert named == set(inspect.signature(packattn.attention).parameters)


@pytest.mark.parametrize("name", sorted(ops.SCHEMAS))
def test_every_op_is_specified(name: str) -> None:
    """An op has a function of its name in reference.py, with a docstring and its arguments in order."""
    if name == "attention":  # made of other ops
        return
    function = getattr(reference, name.removesuffix("_reference"))
    schema = getattr(torch.ops.packattn, name).default._schema
    assert inspect.getdoc(function)
    assert list(inspect.signature(function).parameters) == [a.name for a in schema.arguments]


def test_no_paths_of_a_machine() -> None:
    """Nothing in the project knows where it was written."""
    pattern = re.compile(r"(?<![\w.])/(?:home|root|work|Users|tmp/w|opt/conda)/[\w.]")
    found = [
        f"{path.relative_to(ROOT)}:{n}: {line.strip()[:100]}"
        for path in files()
        if path != Path(__file__).resolve()
        for n, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)


def test_files_are_short_enough_to_read() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in files()
        if (count := len(path.read_text(encoding="utf-8", errors="replace").splitlines())) > 600
    }
    assert not long


def test_inline_assembly_stands_in_one_place() -> None:
    """Whatever a kernel does, it does through the functions of csrc/cuda/ptx*.cuh: the emulator sees nothing else."""
    # What nvcc would take and the emulator could not see, or would not compile: assembly, CUDA's own functions, shared
    # variables. threadIdx and its like, __global__ and __launch_bounds__ are emulated.
    forbidden = re.compile(
        r"\basm\b|__shared__|\b__(?:syncthreads|syncwarp|shfl|ballot|any|all|ldg|float_as|uint_as|int_as|half|bfloat)"
        r"|cuda_(?:fp16|bf16)\.h|\batomic(?:Add|Max|Min|CAS|Exch)\b|\b__(?:exp|log|fdividef)"
    )
    found = [
        f"{path.relative_to(ROOT)}:{n}: {line.strip()[:100]}"
        for path in sorted((ROOT / "csrc").rglob("*"))
        if path.suffix in {".cu", ".cuh", ".h"} and not path.name.startswith("ptx") and "cuda" in path.parts
        for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if forbidden.search(line.partition("//")[0])
    ]
    assert not found, "\n".join(found)


def test_test_files_say_what_they_hold() -> None:
    for path in sorted((ROOT / "tests").glob("*.py")):
        assert path.read_text(encoding="utf-8").lstrip().startswith('"""'), path.name


def test_the_fast_path_does_not_wait_for_a_device() -> None:
    """No .item(), .tolist() or nonzero in the code between the public function and the ops."""
    from packattn import functional

    for function in (functional.attention, functional.dense_mask):
        assert not re.search(r"\.(item|tolist|nonzero)\(", inspect.getsource(function))


def test_importing_brings_nothing_heavy() -> None:
    """matplotlib and transformers are for those who plot or use them."""
    import json
    import sys

    code = "import sys, json, packattn; print(json.dumps([m for m in ('matplotlib', 'transformers', 'tqdm') if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "matplotlib" not in json.loads(done.stdout) and "transformers" not in json.loads(done.stdout)

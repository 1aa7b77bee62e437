"""Say what this installation is made of, what is missing and why, and which kernel serves which call.

:func:`collect` returns the same as plain values; the support table of the README is checked against it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
from typing import Any

import torch

from packattn import __version__, _library
from packattn.cli import tables

SUMMARY = "what is installed, and which kernel serves what"

DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float16", "float64")
HEAD_DIMS = (8, 32, 64, 80, 96, 100, 128, 192, 256, 512, 576)
REFERENCE = "plain PyTorch"
_MAX_HEAD_DIM = 1024  # how far the served head dims are looked for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    facts = collect()
    print(json.dumps(facts, indent=2) if args.json else text(facts))
    return 0


def collect() -> dict[str, Any]:
    """Everything `packattn info` says, as strings, numbers, lists and dicts."""
    return {
        "version": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "native": _library.CPU.loaded,
        "libraries": _libraries(),
        "cpu": _cpu(),
        "cuda": _cuda(),
        "build": dict(_library.extension.build_info()) if _library.extension else None,
        "kernels": [
            {"device": device, "dtype": dtype, "head_dim": head_dim, **_served_by(dtype, head_dim, device)}
            for device in DEVICES
            for dtype in DTYPES
            for head_dim in HEAD_DIMS
        ],
        "support": [
            {"device": device, "dtype": dtype, **_support(dtype, device)} for device in DEVICES for dtype in DTYPES
        ]
        + [{"device": "other", "dtype": "any", "compiled_head_dims": "none", "otherwise": REFERENCE, "missing": None}],
    }


def kernel_for(dtype: str, head_dim: int, head_dim_v: int | None = None, device: str = "cpu") -> tuple[str, list[str]]:
    """What serves attention on a device: the name of the kernel, and why it is not a compiled one (empty if it is).

    dtype: torch's name without "torch.". The answer comes from the function with which the host op decides.
    """
    library = _library.CPU if device == "cpu" else _library.CUDA
    if library.missing is not None:
        return REFERENCE, [library.missing]
    return _compiled_for(dtype, head_dim, head_dim if head_dim_v is None else head_dim_v, device)


def _compiled_for(dtype: str, head_dim: int, head_dim_v: int, device: str) -> tuple[str, list[str]]:
    """As kernel_for, where the device's library is there."""
    extension = _library.extension
    if extension is None:
        return "unknown", [f"packattn._C, which knows what the kernels serve, is missing: {_library.extension_missing}"]
    reasons = _library.refusals(device, dtype, head_dim, head_dim_v)
    if reasons:
        return REFERENCE, reasons
    if device == "cpu":
        return f"compiled, {_isa()[0] or 'unknown instruction set'}", []
    try:
        kernel, _ = extension.cuda_kernel(dtype, head_dim, head_dim_v, _capability())
    except ValueError as error:  # PACKATTN_CUDA_KERNEL names one that does not serve this
        return "none", [str(error)]
    build = extension.build_info()
    if kernel.startswith("sm90") and build["cuda"] and "9.0a" not in build["cuda_arch_list"]:
        return "none", [f"PACKATTN_CUDA_KERNEL=sm90, but the library was built for {build['cuda_arch_list']}, not 9.0a"]
    return f"compiled, {kernel}", []


def _capability() -> int:
    """Of the GPU here, 80 for 8.0; the first with tensor-core kernels where there is none."""
    if not torch.cuda.is_available():
        return 80
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def _served_by(dtype: str, head_dim: int, device: str) -> dict[str, Any]:
    kernel, reasons = kernel_for(dtype, head_dim, device=device)
    return {"kernel": kernel, "reasons": reasons}


def _support(dtype: str, device: str) -> dict[str, str | None]:
    """compiled_head_dims: what this packattn's kernels serve; for CUDA, whether or not they are in use here (missing says
    why they are not)."""
    ask = kernel_for if device == "cpu" else _compiled_for
    dims = range(1, _MAX_HEAD_DIM + 1)
    kernels = {d: kernel for d in dims if (kernel := ask(dtype, d, d, device)[0]).startswith("compiled")}
    spelled = _spell(list(kernels))
    tensor_cores = [d for d, kernel in kernels.items() if " sm" in kernel]
    if tensor_cores:
        spelled += f"; tensor cores: {_spell(tensor_cores)}"
    return {
        "compiled_head_dims": spelled,
        "otherwise": "" if len(kernels) == _MAX_HEAD_DIM else REFERENCE,
        "missing": None if device == "cpu" else _library.CUDA.missing,
    }


def _spell(numbers: list[int]) -> str:
    """[8, 16, 24] as "multiples of 8 up to 24" where that is what it is."""
    if not numbers:
        return "none"
    step = math.gcd(*numbers)
    if numbers == list(range(step, numbers[-1] + 1, step)):
        every = "all" if step == 1 else f"multiples of {step}"
        return every if numbers[-1] + step > _MAX_HEAD_DIM else f"{every} up to {numbers[-1]}"
    return ", ".join(map(str, numbers))


def _libraries() -> list[dict[str, Any]]:
    extension = _library.extension
    return [
        *(
            {
                "name": library.name,
                "what": what,
                "path": str(library.path),
                "loaded": library.loaded,
                "missing": library.missing,
            }
            for library, what in ((_library.CPU, "CPU kernels"), (_library.CUDA, "CUDA kernels"))
        ),
        {
            "name": "packattn._C",
            "what": "packer, build facts",
            "path": None if extension is None else extension.__file__,
            "loaded": extension is not None,
            "missing": _library.extension_missing,
        },
    ]


def _isa() -> tuple[str | None, str | None]:
    """(instruction set in use, why there is none)."""
    if _library.extension is None:
        return None, _library.extension_missing
    try:
        return _library.extension.cpu_isa(), None
    except (RuntimeError, ValueError) as error:  # PACKATTN_CPU_ISA names one that this machine lacks
        return None, str(error)


def _cpu() -> dict[str, Any]:
    isa, problem = _isa()
    return {
        "isa": isa,
        "available": list(_library.extension.cpu_isas()) if _library.extension else [],
        "forced": os.environ.get("PACKATTN_CPU_ISA") or None,
        "problem": problem,
    }


def _cuda() -> dict[str, Any]:
    build = _library.extension.build_info() if _library.extension else None
    built = bool(build and build["cuda"])  # the build; whether it is in use is said by the library
    why = build["cuda_reason"] if build else "no compiled part of packattn is in use"
    return {
        "built": built,
        "reason": None if built else why,
        "arch_list": build["cuda_arch_list"].split() if build and built else [],
        "torch_cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "capability": ".".join(map(str, torch.cuda.get_device_capability())) if torch.cuda.is_available() else None,
        "forced": os.environ.get("PACKATTN_CUDA_KERNEL") or None,
    }


def text(facts: dict[str, Any]) -> str:
    """The facts of :func:`collect` for people."""
    blocks = [f"packattn {facts['version']}, torch {facts['torch']}, Python {facts['python']}, {facts['system']}"]
    if not facts["native"]:
        blocks.append(
            "The compiled kernels are NOT in use; plain PyTorch serves every call, with the same results, only slower.\n"
            f"Why: {facts['libraries'][0]['missing']}"
        )
    blocks.append(
        "Libraries\n"
        + tables.pairs(
            [
                (
                    f"{library['name']} ({library['what']})",
                    library["path"] if library["loaded"] else f"missing: {library['missing']}",
                )
                for library in facts["libraries"]
            ]
        )
    )
    cpu, cuda, build = facts["cpu"], facts["cuda"], facts["build"]
    machine = [
        ("threads", facts["threads"]),
        ("CPU instruction set", _isa_text(cpu)),
        ("CUDA part", _cuda_text(cuda)),
        ("CUDA of torch", _torch_cuda_text(cuda)),
    ]
    if build:
        made = f"{build['compiler']}, {build['system']}, {build['build_type']}"
        machine.append(("built with", made + (f", sanitizers {build['sanitize']}" if build["sanitize"] else "")))
        machine.append(
            ("built against", f"torch {build['torch_version']}, runs with torch {build['torch_target']} and later")
        )
    blocks.append("Machine and build\n" + tables.pairs(machine))
    rows = [
        (
            row["device"],
            row["dtype"],
            "none here" if row["missing"] else row["compiled_head_dims"],
            row["otherwise"] or "-",
        )
        for row in facts["support"]
    ]
    blocks.append(
        "Attention: which head dims the compiled kernels serve, and what serves the others\n"
        + tables.render(("device", "dtype", "compiled kernels", "otherwise"), rows)
    )
    return "\n\n".join(blocks)


def _isa_text(cpu: dict[str, Any]) -> str:
    if cpu["isa"] is None:
        return f"none: {cpu['problem']}"
    forced = " (forced by PACKATTN_CPU_ISA)" if cpu["forced"] else ""
    return f"{cpu['isa']}{forced}; this machine has {', '.join(cpu['available'])}"


def _cuda_text(cuda: dict[str, Any]) -> str:
    if not cuda["built"]:
        return f"none: {cuda['reason']}"
    forced = f"; {cuda['forced']} forced by PACKATTN_CUDA_KERNEL" if cuda["forced"] else ""
    return f"built for {', '.join(cuda['arch_list'])}{forced}"


def _torch_cuda_text(cuda: dict[str, Any]) -> str:
    if cuda["torch_cuda"] is None:
        return "none, this torch is built without it"
    device = f"{cuda['device']}, compute capability {cuda['capability']}" if cuda["device"] else "no device found"
    return f"{cuda['torch_cuda']}, {device}"

"""What the native module holds that is no tensor op: the packer, and facts about the build."""

from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

class BuildInfo(TypedDict):
    version: str
    compiler: str
    system: str
    build_type: str
    flags: str
    sanitize: str
    torch_version: str
    torch_target: str
    cuda: bool
    cuda_reason: str
    cuda_arch_list: str

def build_info() -> BuildInfo:
    """How this build was made. cuda_reason says why there are no CUDA kernels; it is empty where there are some."""

def cpu_isa() -> str:
    """The instruction set of the CPU kernels in this process: PACKATTN_CPU_ISA, or the first of cpu_isas()."""

def cpu_isas() -> list[str]:
    """The instruction sets that this build has and this machine can run, best first."""

def cpu_refusals(dtype: str, head_dim: int, head_dim_v: int) -> list[str]:
    """Why the compiled CPU kernels do not serve this call, as sentences; empty where they do. dtype: "bfloat16" ..."""

def cuda_refusals(dtype: str, head_dim: int, head_dim_v: int) -> list[str]:
    """Why no CUDA kernel serves this call, as sentences; empty where one does. Known without a CUDA build too."""

def cuda_kernel(dtype: str, head_dim: int, head_dim_v: int, capability: int) -> tuple[str, list[str]]:
    """The CUDA kernel for a call with a positive scale that cuda_refusals lets pass, "plain" or "sm80 128" with the head dims
    that it was made for; and why it is no tensor-core kernel. capability: 80 for compute capability 8.0.
    ValueError where PACKATTN_CUDA_KERNEL names a kernel that cannot."""

def pack(
    lengths: NDArray[np.int64], capacity: int, algorithm: str, num_bins: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(order [N], offsets [bins + 1]) of lengths [N], each in [0, capacity]; packattn.pack is the public function."""

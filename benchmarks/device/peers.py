"""packattn and what PyTorch offers on a GPU, as calls that can be checked and timed. What is not there says why."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import implementations
from configurations import Configuration
from implementations import Implementation, Inputs

# FlashAttention-3 and 4 in packages of their own: the modules that have flash_attn_varlen_func.
FLASH = {"fa3": "flash_attn_interface", "fa4": "flash_attn.cute"}


class Unavailable(RuntimeError):
    """This torch, this device or these head dims do not have the implementation."""


def prepare_compiler() -> None:
    """For this process: FlexAttention is compiled once for each shape, and its backward is timed over a graph that is kept
    (compiled graphs give their buffers away unless told not to)."""
    import torch._dynamo.config
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False
    torch._dynamo.config.cache_size_limit = 64


def build(name: str, configuration: Configuration, inputs: Inputs) -> Implementation:
    """The named implementation over the inputs. "packattn sm90" is packattn with the kernels of that family.

    Raises:
        Unavailable: it is not there.
    """
    base, _, family = name.partition(" ")
    if base in ("packattn", "flex"):
        found = implementations.build(base, configuration, inputs)
        return Within.of(found, name, functools.partial(kernel_family, family)) if family else found
    if name.startswith("sdpa_"):
        return _sdpa(name, configuration, inputs)
    if name in ("varlen", "varlen_fa3", "varlen_fa4"):
        return _varlen(name, configuration, inputs)
    if name in FLASH:
        return _flash(name, configuration, inputs)
    raise ValueError(f"no implementation is called {name!r}")


@contextlib.contextmanager
def kernel_family(name: str) -> Iterator[None]:
    """packattn takes these CUDA kernels, in every thread of the process: sm80, sm90, plain or auto."""
    before = os.environ.get("PACKATTN_CUDA_KERNEL")
    os.environ["PACKATTN_CUDA_KERNEL"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["PACKATTN_CUDA_KERNEL"]
        else:
            os.environ["PACKATTN_CUDA_KERNEL"] = before


@dataclasses.dataclass
class Within(Implementation):
    """An implementation whose calls, forward and backward, run inside a context."""

    around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext

    @classmethod
    def of(cls, found: Implementation, name: str, around: Callable[[], Any]) -> Within:
        values = {field.name: getattr(found, field.name) for field in dataclasses.fields(Implementation)}
        return cls(**(values | {"name": name}), around=around)

    def forward(self) -> Tensor:
        with self.around():
            return super().forward()

    def forward_backward(self) -> None:
        with self.around():
            super().forward_backward()

    def backward(self) -> Callable[[], object]:
        with self.around():
            call = super().backward()

        def run() -> object:
            with self.around():
                return call()

        return run


def _sdpa(name: str, c: Configuration, inputs: Inputs) -> Implementation:
    """Dense causal attention over the whole row: right only where it is one document, which is where it is asked for."""
    backend = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}[name]
    if c.device == "cpu":
        if name == "sdpa_cudnn":
            raise Unavailable("no cuDNN on the CPU")
        backend = SDPBackend.MATH

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=c.heads_q != c.heads_kv)

    def to_own(x: Tensor) -> Tensor:
        return x.transpose(0, 1)[None].contiguous()

    leaves = tuple(to_own(x).requires_grad_() for x in (inputs.query, inputs.key, inputs.value))
    return Implementation(name, leaves, to_own(inputs.dout), function, lambda x: x[0].transpose(0, 1), to_own)


def _varlen(name: str, c: Configuration, inputs: Inputs) -> Implementation:
    """torch.nn.attention.varlen.varlen_attn: FlashAttention-2, or cuDNN where this torch prefers it; with
    FlashAttention-3 or 4 if that is installed and torch knows it."""
    if c.device == "cpu":
        raise Unavailable("torch's varlen_attn needs a GPU")
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise Unavailable(f"this torch has no varlen_attn: {error}") from None
    flash = name.partition("_")[2].upper()
    if flash:
        _expect_torch_takes(flash)
    lengths = torch.tensor(c.lengths, device=c.device)
    offsets = F.pad(lengths.cumsum(0), (1, 0)).int()
    longest = max(c.lengths)
    parameters = inspect.signature(varlen_attn).parameters
    # torch 2.10 says is_causal, later ones have a window; grouped heads are a switch since there is one.
    causal = {"window_size": (-1, 0)} if "window_size" in parameters else {"is_causal": True}
    grouped = {"enable_gqa": True} if "enable_gqa" in parameters and c.heads_q != c.heads_kv else {}

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = varlen_attn(q, k, v, offsets, offsets, longest, longest, **causal, **grouped)
        return out if isinstance(out, Tensor) else out[0]

    leaves = tuple(x.clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value))
    found = Implementation(name, leaves, inputs.dout.clone(), function, lambda x: x, lambda x: x.clone())
    return Within.of(found, name, functools.partial(_torch_takes, flash)) if flash else found


@contextlib.contextmanager
def _torch_takes(flash: str) -> Iterator[None]:
    """This FlashAttention takes the place of torch's own kernels."""
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    activate_flash_attention_impl(flash)
    try:
        yield
    finally:
        restore_flash_attention_impl(_raise_warn=False)


def _expect_torch_takes(flash: str) -> None:
    try:
        from torch.nn.attention import list_flash_attention_impls
    except ImportError:
        raise Unavailable(f"this torch cannot take {flash}") from None
    if flash not in list_flash_attention_impls():
        raise Unavailable(f"this torch does not know {flash}")
    try:
        with _torch_takes(flash):
            pass
    except Exception as error:  # noqa: BLE001  (whatever keeps it from loading)
        raise Unavailable(f"{flash} does not load: {str(error).strip().splitlines()[-1]}") from None


def _flash(name: str, c: Configuration, inputs: Inputs) -> Implementation:
    """FlashAttention from a package of its own."""
    if c.device == "cpu":
        raise Unavailable("flash-attn needs a GPU")
    try:
        function_of_it = importlib.import_module(FLASH[name]).flash_attn_varlen_func
    except Exception as error:  # noqa: BLE001  (a package that is built for something else fails in its own ways)
        raise Unavailable(f"{FLASH[name]}: {str(error).strip().splitlines()[-1]}") from None
    lengths = torch.tensor(c.lengths, device=c.device)
    offsets = F.pad(lengths.cumsum(0), (1, 0)).int()
    longest = max(c.lengths)
    given = {
        "cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": longest, "max_seqlen_k": longest,
        "causal": True,
    }  # fmt: skip

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function_of_it(q, k, v, **given)
        return out if isinstance(out, Tensor) else out[0]

    leaves = tuple(x.clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value))
    return Implementation(name, leaves, inputs.dout.clone(), function, lambda x: x, lambda x: x.clone())

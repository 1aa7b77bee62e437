"""packattn and what PyTorch offers on a GPU, as calls that can be checked and timed. What is not there says why."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import implementations
from configurations import Configuration
from implementations import Implementation, Inputs


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
    """The named implementation over the inputs.

    Raises:
        Unavailable: it is not there.
    """
    if name in ("packattn", "flex"):
        return implementations.build(name, configuration, inputs)
    if name.startswith("sdpa_"):
        return _sdpa(name, configuration, inputs)
    if name in ("varlen", "varlen_fa3"):
        return _varlen(name, configuration, inputs)
    raise ValueError(f"no implementation is called {name!r}")


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
    FlashAttention-3 if that is installed and torch knows it."""
    if c.device == "cpu":
        raise Unavailable("torch's varlen_attn needs a GPU")
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise Unavailable(f"this torch has no varlen_attn: {error}") from None
    kind = Implementation
    if name == "varlen_fa3":
        _expect_fa3()
        kind = _WithFA3
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
    return kind(name, leaves, inputs.dout.clone(), function, lambda x: x, lambda x: x.clone())


class _WithFA3(Implementation):
    """FlashAttention-3 takes the place of torch's own kernels for as long as a call runs, forward or backward."""

    def forward(self) -> Tensor:
        with _fa3():
            return super().forward()

    def forward_backward(self) -> None:
        with _fa3():
            super().forward_backward()

    def backward(self) -> Callable[[], object]:
        with _fa3():
            call = super().backward()

        def run() -> object:
            with _fa3():
                return call()

        return run


@contextlib.contextmanager
def _fa3() -> Iterator[None]:
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    activate_flash_attention_impl("FA3")
    try:
        yield
    finally:
        restore_flash_attention_impl(_raise_warn=False)


def _expect_fa3() -> None:
    try:
        from torch.nn.attention import list_flash_attention_impls
    except ImportError:
        raise Unavailable("this torch cannot take FlashAttention-3") from None
    if "FA3" not in list_flash_attention_impls():
        raise Unavailable("this torch does not know FlashAttention-3")
    try:
        with _fa3():
            pass
    except Exception as error:  # noqa: BLE001  (whatever keeps it from loading)
        raise Unavailable(f"FlashAttention-3 does not load: {str(error).strip().splitlines()[-1]}") from None

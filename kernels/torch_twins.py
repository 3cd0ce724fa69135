"""The public kernels in plain torch, by the names and signatures that every backend's module of twins has."""

from .torch_attention import paged_attention
from .torch_sample import sample
from .torch_small import rms_norm, rope_and_write, silu_mul

__all__ = ["paged_attention", "rms_norm", "rope_and_write", "sample", "silu_mul"]

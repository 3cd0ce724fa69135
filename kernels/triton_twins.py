"""The public kernels in Triton, by the names and signatures of `torch_twins`. Importing it needs triton."""

from .triton_attention import paged_attention
from .triton_sample import sample
from .triton_small import rms_norm, rope_and_write, silu_mul

__all__ = ["paged_attention", "rms_norm", "rope_and_write", "sample", "silu_mul"]

"""FP4 KV cache for any PyTorch model: NVFP4 ops, Inductor lowerings and caches for `torch.compile`."""

from .ops import append, attention, dequantize, explain, from_packed, quantize, to_packed

__all__ = ["append", "attention", "dequantize", "explain", "from_packed", "quantize", "to_packed"]

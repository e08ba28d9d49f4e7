"""The ops of namespace `fp4kv`, one file each: schema, fake, body, public function."""

from .append import append
from .attention import attention, explain
from .backends import prefer
from .dequantize import dequantize
from .flashinfer.quantize import exact_math
from .format.layout import from_packed, to_packed
from .quantize import quantize

__all__ = [
    "append",
    "attention",
    "dequantize",
    "exact_math",
    "explain",
    "from_packed",
    "prefer",
    "quantize",
    "to_packed",
]

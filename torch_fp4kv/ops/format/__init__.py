"""The NVFP4 KV format, to the bit: `x ≈ e2m1(code) · e4m3(block_scale) · global_scale` (see docs/format.md)."""

"""Numbers that define the format."""

BLOCK = 16
"""Elements that share one block scale: consecutive along the head dimension."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of each 3-bit code; bit 3 of a code is its sign."""

E2M1_MAX = 6.0

E2M1_THRESHOLDS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
"""`(t, inclusive)`: the code is the number of thresholds that `|x| / scale` passes (`>=` where inclusive, else `>`),
which rounds to nearest with ties to the even code."""

E4M3_MAX = 448.0
E4M3_MAX_BITS = 0x7E

SCALE_MAX = {"linear": E4M3_MAX, "4token": 72.0}
"""Largest block scale of K and V by the layout of V's scales. Who reads the 4-token layout turns `code · block_scale`
into e4m3, and 72 is the largest e4m3 number whose product with code 6 is in e4m3's range."""

GLOBAL_SCALE_MIN = 2.0**-100
GLOBAL_SCALE_MAX = 2.0**100
"""Outside these, `1 / (6 · global_scale)` or a block's bound leaves the range of normal float32."""

DEFAULT_GLOBAL_SCALE = 2.0**-8
"""For data that says nothing (all zero): covers magnitudes from about 1e-5 to 10.5 without saturating."""

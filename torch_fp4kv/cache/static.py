"""`cache_implementation="static"` as an `NVFP4Cache`, for code that calls `generate` and takes no cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import MethodType
from typing import Any

from transformers import EncoderDecoderCache

from ..recipe import Recipe
from .hf import NVFP4Cache


@contextlib.contextmanager
def as_static_cache(model: Any, recipe: str | Recipe = "nvfp4", **overrides: Any) -> Iterator[None]:
    """Within, `model.generate(…, cache_implementation="static")` makes an `NVFP4Cache` of the length that it would give
    its static cache. Nothing but this one model is changed, and only until the end of the block.

    Args:
        model: a transformers model that generates.
        recipe, **overrides: as for `NVFP4Cache`.

    Raises:
        TypeError: this version of transformers prepares its caches in another way.
        ValueError: in `generate`, where another static cache is asked for, such as "offloaded_static".
    """
    prepare = getattr(model, "_prepare_static_cache", None)
    if prepare is None:
        raise TypeError(
            "this model, or this version of transformers, has no _prepare_static_cache: pass a cache instead"
        )
    # Of a wrapper, the model that it hands the call to.
    owner = prepare.__self__
    before = vars(owner).get("_prepare_static_cache")

    def prepare_fp4(self: Any, cache_implementation: str, prefill_chunk_size: int | None, **options: Any) -> Any:
        if cache_implementation != "static":
            raise ValueError(f'as_static_cache serves cache_implementation="static", not {cache_implementation!r}')
        theirs = prepare(cache_implementation=cache_implementation, prefill_chunk_size=None, **options)
        if not isinstance(theirs, EncoderDecoderCache):
            return NVFP4Cache(self.config, theirs.get_max_length(), recipe, **overrides)
        parts = (theirs.self_attention_cache, theirs.cross_attention_cache)
        return EncoderDecoderCache(
            *(NVFP4Cache(self.config, part.get_max_length(), recipe, **overrides) for part in parts)
        )

    owner._prepare_static_cache = MethodType(prepare_fp4, owner)
    try:
        yield
    finally:
        del owner._prepare_static_cache
        if before is not None:
            owner._prepare_static_cache = before

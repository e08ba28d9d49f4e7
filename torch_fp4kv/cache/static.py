"""`cache_implementation="static"` as an `NVFP4Cache`, for code that calls `generate` and takes no cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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

    def prepare_fp4(cache_implementation: str, prefill_chunk_size: int | None, **options: Any) -> Any:
        if cache_implementation != "static":
            raise ValueError(f'as_static_cache serves cache_implementation="static", not {cache_implementation!r}')
        theirs = prepare(cache_implementation=cache_implementation, prefill_chunk_size=None, **options)
        if not isinstance(theirs, EncoderDecoderCache):
            return NVFP4Cache(model.config, theirs.get_max_length(), recipe, **overrides)
        parts = (theirs.self_attention_cache, theirs.cross_attention_cache)
        return EncoderDecoderCache(
            *(NVFP4Cache(model.config, part.get_max_length(), recipe, **overrides) for part in parts)
        )

    model._prepare_static_cache = prepare_fp4
    try:
        yield
    finally:
        del model._prepare_static_cache

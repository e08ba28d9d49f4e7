"""Holds a quantised cache to a KL against the model's own cache, on prompts of the user's."""

from __future__ import annotations

from typing import Any

from ..evaluation.as_decoded import exact_tokens, full_precision
from ..evaluation.calibration import Texts, tokenized
from ..evaluation.fidelity import Fidelity, Tally, decoded
from ..recipe import Recipe, get_recipe


def assert_cache_close(
    model: Any,
    prompts: Texts,
    recipe: str | Recipe = "nvfp4",
    *,
    kl: float,
    prompt_tokens: int = 32,
    tokenizer: Any = None,
) -> Fidelity:
    """Asserts that decoding through an `NVFP4Cache` stays within `kl` of the model without a cache.

    Of each prompt the first `prompt_tokens` go through the model in one call and the rest token by token, so that the
    cache is written and read as in `generate`. What is predicted after the decoded tokens is scored, over all prompts.

    Args:
        model: a Hugging Face decoder, in the precision and with the `attn_implementation` that it is used with.
        prompts: strings (`tokenizer` is needed then) or int64 tensors `[N]`.
        recipe: a name or a `Recipe`.
        kl: most KL divergence that is allowed, in nats a token.

    Returns:
        What was measured.

    Raises:
        AssertionError: the KL is larger; says how large, and on which prompt most.
        ValueError: no prompt, or one with fewer than `prompt_tokens + 2` tokens, or with none that the recipe does not
            keep exact: nothing of it would be read from storage, and its KL be about 0 whatever is stored.
    """
    from ..cache.hf import NVFP4Cache

    if prompt_tokens < 1:
        raise ValueError(f"prompt_tokens must be 1 or more, got {prompt_tokens}")
    rows = tokenized(prompts, tokenizer, model.device)
    short = min(row.shape[1] for row in rows)
    if short < prompt_tokens + 2:
        raise ValueError(f"prompts need prompt_tokens + 2 = {prompt_tokens + 2} tokens or more, got one with {short}")
    exact = exact_tokens(model, get_recipe(recipe))
    if short <= exact:
        raise ValueError(
            f"a prompt has {short} tokens, and the recipe keeps {exact} exact: nothing of it would be read from storage"
        )
    total, each = Tally(), []
    for row in rows:
        cache = NVFP4Cache(model.config, row.shape[1], recipe)
        expected, got = full_precision(model, row).cpu(), decoded(model, row, cache, prompt_tokens)
        cache.check()
        alone = Tally()
        for tally in (total, alone):
            tally.add(expected, got, row.cpu(), prompt_tokens)
        each.append(alone.fidelity().kl)
    score = total.fidelity()
    if not score.kl <= kl:
        name = repr(recipe) if isinstance(recipe, str) else "the recipe"
        worst = max(range(len(each)), key=lambda index: each[index])
        raise AssertionError(
            f"{name} has a KL of {score.kl:.3g} nats a token over {score.num_tokens} decoded tokens, at most {kl:.3g} "
            f"is allowed; prompt {worst} has the most, {each[worst]:.3g}. Same top token: {score.top1:.1%}"
        )
    return score

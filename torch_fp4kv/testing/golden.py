"""Golden prompts: greedy text through a quantised cache recorded once, and later code held to it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..evaluation.as_decoded import exact_tokens
from ..evaluation.calibration import Texts, tokenized
from ..evaluation.fidelity import decoded
from ..evaluation.scoring import cache_argument
from ..recipe import Recipe, get_recipe


def record_golden(
    path: str | Path,
    model: Any,
    prompts: Texts,
    recipe: str | Recipe = "nvfp4",
    *,
    num_new: int = 32,
    tokenizer: Any = None,
) -> None:
    """Writes to `path` (JSON) the recipe and, of each prompt, its ids, `num_new` greedy tokens through an `NVFP4Cache`
    and their log-probabilities.

    Args:
        prompts: strings (`tokenizer` is needed then) or int64 tensors `[N]`.

    Raises:
        ValueError: no prompt, one of fewer than 2 tokens, one whose tokens, new ones included, the recipe keeps all
            exact (nothing would be read from storage), or a log-probability that is no finite number.
            Nothing is written.
    """
    from .. import __version__
    from ..cache.hf import NVFP4Cache

    chosen = get_recipe(recipe)
    exact = exact_tokens(model, chosen)
    rows = tokenized(prompts, tokenizer, model.device)
    short = min(row.shape[1] for row in rows)
    # The last new token is not fed again.
    if short + num_new - 1 <= exact:
        raise ValueError(
            f"a prompt has {short} tokens and num_new is {num_new}, and the recipe keeps {exact} exact: nothing of it "
            "would be read from storage"
        )
    records: list[dict[str, Any]] = []
    for row in rows:
        cache = NVFP4Cache(model.config, row.shape[1] + num_new, chosen)
        with torch.inference_mode():
            text = model.generate(
                row,
                attention_mask=torch.ones_like(row),
                do_sample=False,
                max_new_tokens=num_new,
                eos_token_id=None,
                pad_token_id=0,
                **{cache_argument(model.forward): cache},
            )
        scores = _scores(model, text, row.shape[1], chosen)
        if not all(map(math.isfinite, scores)):
            raise ValueError(f"prompt {len(records)} has a log-probability that is no finite number: {scores}")
        records.append(
            {"prompt": row[0].tolist(), "new": text[0, row.shape[1] :].tolist(), "log_probabilities": scores}
        )
    versions = {"torch_fp4kv": __version__, "torch": torch.__version__}
    content = {"versions": versions, "recipe": json.loads(chosen.to_json()), "prompts": records}
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def assert_golden(path: str | Path, model: Any, *, tolerance: float = 0.05) -> None:
    """Asserts that decoding gives each recorded token the log-probability on record, within `tolerance` nats.

    The recorded tokens are fed one by one after their prompt, through a cache with the recorded recipe. So one token
    that comes out otherwise, as where two are about equally likely, does not make all that follow differ.

    Args:
        tolerance: for another machine or another torch; 0.05 suits float32 weights and tokens of BF16 ones may need
            more. On the same machine and versions it can be 1e-4.

    Raises:
        AssertionError: names the prompt, the token and both log-probabilities where they differ most.
        ValueError: the file is no such record.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        recipe, records = Recipe.from_json(json.dumps(content["recipe"])), content["prompts"]
        lengths = [(len(record["new"]), len(record["log_probabilities"])) for record in records]
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no record of golden prompts: {error!r}") from error
    if not lengths or any(new == 0 or new != scores for new, scores in lengths):
        raise ValueError(f"{path} is no record of golden prompts: it has no tokens, or some without log-probability")
    worst = (0.0, "")
    for number, record in enumerate(records):
        text = torch.tensor([record["prompt"] + record["new"]], device=model.device)
        scores = _scores(model, text, len(record["prompt"]), recipe)
        for index, (want, have) in enumerate(zip(record["log_probabilities"], scores, strict=True)):
            difference = abs(want - have)
            # A NaN, now or on record, agrees with nothing.
            difference = difference if difference == difference else float("inf")
            if difference > worst[0]:
                worst = (
                    difference,
                    f"prompt {number}, new token {index} (id {record['new'][index]}): log-probability {have:.5f}, "
                    f"on record {want:.5f}; recorded with {content['versions']}",
                )
    if not worst[0] <= tolerance:
        raise AssertionError(worst[1])


def _scores(model: Any, text: Tensor, prompt_tokens: int, recipe: Recipe) -> list[float]:
    """Log-probability of each token of `text` `[1, N]` after its prompt, decoded token by token."""
    from ..cache.hf import NVFP4Cache

    cache = NVFP4Cache(model.config, text.shape[1], recipe)
    predicted = decoded(model, text, cache, prompt_tokens)[0, prompt_tokens - 1 : -1]
    scores = predicted.gather(1, text[0, prompt_tokens:, None].cpu())[:, 0]
    return [round(score, 6) for score in scores.tolist()]

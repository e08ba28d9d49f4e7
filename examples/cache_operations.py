"""What quantised caches can do, each operation tried on each cache: `python examples/cache_operations.py [row …]`.

Prints one line an operation and cache: "yes", or what went wrong. A small random model, on the CPU, in seconds.
transformers' own caches need `pip install optimum-quanto hqq`.
"""

from __future__ import annotations

import copy
import importlib.metadata
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, QuantizedCache

from torch_fp4kv import NVFP4Cache
from torch_fp4kv.evaluation.peers import PEERS

VOCABULARY, PROMPT = 64, 40
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "initializer_range": 0.15,
}

# How far logits may be from those of a cache that was filled that way: caches that quantise in groups over rows or
# tokens may group otherwise.
TOLERANCE = 0.2

Make = Callable[[Any], Any]


def make_ours(config: Any) -> Any:
    return NVFP4Cache(config)


def make_peer(name: str) -> Make:
    return lambda config: QuantizedCache(config=config, **PEERS[name].arguments)


CACHES: dict[str, Make] = {"NVFP4Cache": make_ours, **{name: make_peer(name) for name in PEERS}}


def llama(**sizes: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes})).eval()


def ids(rows: int, tokens: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def feed(model: Any, cache: Any, tokens: Tensor, step: Any = None) -> Tensor:
    """Logits of `tokens`, given one by one."""
    call = model if step is None else step
    with torch.no_grad():
        return torch.stack([call(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(tokens.shape[1])])


def filled(model: Any, make: Make, rows: Tensor) -> Any:
    cache = make(model.config)
    with torch.no_grad():
        model(rows, past_key_values=cache)
    return cache


def compare(got: Tensor, want: Tensor) -> None:
    error = float((got - want).norm() / want.norm())
    assert error < TOLERANCE, f"decodes something else: logits differ by {error:.0%}"


def moved(operation: Callable[[Any], Any], rows: list[int], dropped: int = 0) -> Callable[[Make], None]:
    """`operation` on a filled cache, then steps: those of a cache filled with the rows that are left."""

    def run(make: Make) -> None:
        model, prompt, more = llama(), ids(2, PROMPT), ids(len(rows), 3, seed=2)
        cache = filled(model, make, prompt)
        operation(cache)
        want = feed(model, filled(model, make, prompt[rows][:, : PROMPT - dropped]), more)
        compare(feed(model, cache, more), want)

    return run


def reset(make: Make) -> None:
    model, more = llama(), ids(2, 3, seed=2)
    cache = filled(model, make, ids(2, PROMPT, seed=7))
    cache.reset()
    with torch.no_grad():
        model(ids(2, PROMPT), past_key_values=cache)
    compare(feed(model, cache, more), feed(model, filled(model, make, ids(2, PROMPT)), more))


def prefix(make: Make) -> None:
    model, more = llama(), ids(2, 3, seed=2)
    cache = filled(model, make, ids(1, PROMPT))
    twin = copy.deepcopy(cache)
    twin.batch_repeat_interleave(2)
    want = torch.cat([feed(model, copy.deepcopy(cache), more[i : i + 1]) for i in range(2)], 1)
    compare(feed(model, twin, more), want)


def save(make: Make) -> None:
    model, more = llama(), ids(2, 3, seed=2)
    cache, other = filled(model, make, ids(2, PROMPT)), make(model.config)
    with tempfile.TemporaryDirectory() as folder:
        cache.save(Path(folder) / "cache")
        other.load(Path(folder) / "cache")
    compare(feed(model, other, more), feed(model, cache, more))


def lookup(make: Make) -> None:
    model, prompt = llama(), ids(1, 8).repeat(1, 6)
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    got = model.generate(prompt, past_key_values=make(model.config), prompt_lookup_num_tokens=3, **options)
    want = model.generate(prompt, past_key_values=make(model.config), **options)
    same = float((got == want[:, : got.shape[1]]).float().mean())
    assert same > 0.8, f"gives other tokens: {same:.0%} are the same"


def sliding(make: Make) -> None:
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16)).eval()
    feed(model, filled(model, make, ids(2, PROMPT)), ids(2, 3, seed=2))


def odd_head(make: Make) -> None:
    model = llama(head_dim=80)
    feed(model, filled(model, make, ids(1, 17)), ids(1, 3, seed=2))


def compiled(make: Make) -> None:
    """Twenty tokens by one graph, or two where the first is special."""
    model, more = llama(), ids(2, 20, seed=2)
    ours = make is make_ours

    def fresh(config: Any) -> Any:
        return NVFP4Cache(config, max_cache_len=64) if ours else make(config)

    graphs = CompileCounter()
    torch._dynamo.reset()
    step = torch.compile(model, fullgraph=True, backend=graphs)
    got = feed(model, filled(model, fresh, ids(2, PROMPT)), more, step)
    assert graphs.frame_count <= 2, f"compiles {graphs.frame_count} graphs for 20 tokens"
    compare(got, feed(model, filled(model, fresh, ids(2, PROMPT)), more))


def louder(make: Make) -> None:
    """Values far above those of the prompt, stored as they are and not clipped."""
    torch.manual_seed(0)
    cache = make(llama().config)
    quiet, loud = 0.01 * torch.randn(1, 2, PROMPT, 64), 0.1 * torch.randn(1, 2, 1, 64)
    cache.update(quiet, quiet.clone(), 0)
    cache.update(loud, loud.clone(), 0)
    # Long enough that no cache keeps the loud token outside its storage.
    handle = cache.update(quiet.repeat(1, 1, 4, 1), quiet.repeat(1, 1, 4, 1), 0)[1]
    handle = cache.update(loud, loud.clone(), 0)[1]
    values = handle if isinstance(handle, Tensor) else handle.materialize()
    error = float((values[:, :, PROMPT] - loud[:, :, 0]).norm() / loud.norm())
    assert error < TOLERANCE, f"a token ten times larger than the prompt's comes back {error:.0%} off"


ROWS: dict[str, Callable[[Make], None]] = {
    "crop": moved(lambda cache: cache.crop(-5), [0, 1], dropped=5),
    "select": moved(lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    "repeat": moved(lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
    "reorder": moved(lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
    "reset": reset,
    "prefix": prefix,
    "save": save,
    "lookup": lookup,
    "sliding": sliding,
    "head-size-80": odd_head,
    "fullgraph": compiled,
    "louder": louder,
}


def tried(row: str, make: Make) -> str:
    """ "yes", or in a few words why not."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ROWS[row](make)
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {text[0][:100]}" if not isinstance(error, AssertionError) else text[0]
    return "yes"


def main() -> None:
    wanted = sys.argv[1:] or list(ROWS)
    unknown = [row for row in wanted if row not in ROWS]
    if unknown:
        sys.exit(f"unknown: {', '.join(unknown)}; rows are: {', '.join(ROWS)}")
    for package in ("torch", "transformers", "optimum-quanto", "hqq"):
        try:
            print(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            print(package, "is not installed")
    for row in wanted:
        print(row)
        for name, make in CACHES.items():
            print(f"    {name:26}{tried(row, make)}")


if __name__ == "__main__":
    main()

"""`torch-fp4kv bench generate`: time to first token, time per token, memory and agreement of caches side by side."""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..console import INTERRUPTED, heading, output_file, progress, table
from ..evaluation.peers import PEERS
from ..evaluation.scoring import model_name
from ..recipe import get_recipe
from .models import SHAPES, Clock, batches_of, check_source, generate_greedily, load_model, prompt_ids
from .results import cell, environment, write_csv

ORDINARY = ("static", "dynamic")
"""Transformers' caches in full precision."""
CHECKED_TOKENS = 4
"""New tokens whose logits are compared before anything is timed."""
LARGEST_ERROR = 0.2
"""A cache of ours whose logits are further from those of its own dequantised tensors is not timed. Random BF16 layers,
32 of them, make 0.05 of the order that sums are taken in, and 0.5 to 0.8 of FP4 itself: too near the 1.4 of other
tokens to compare with full precision."""
CHUNK = 512
"""Tokens of a prompt that are prefilled at once where the largest batch is looked for."""


@dataclass
class Row:
    """One cache on one batch and prompt. Times in milliseconds, sizes in bytes; None or NaN where not known.

    `tokens_per_s` is the batch over the median time of a token, without the prompt. `warm_up_s` is the first
    `generate`, of few tokens: prompt, compiling or loading from Inductor's cache on disk, capturing. `peak_bytes` are
    all of the GPU's, weights included.
    """

    cache: str
    attention: str
    batch: int
    prompt: int
    new_tokens: int
    first_token_ms: float = float("nan")
    token_p50_ms: float = float("nan")
    token_p95_ms: float = float("nan")
    tokens_per_s: float = float("nan")
    warm_up_s: float = float("nan")
    cache_bytes: int | None = None
    peak_bytes: int | None = None
    largest_batch: int | None = None
    logits_error: float = float("nan")
    failed: str = ""


@dataclass
class Checked:
    """The first new tokens `[steps, B]`, and float64 logits `[steps, B, V]` that each was chosen from. Their `argmax`
    is not always the token: a GPU may choose another of equal logits."""

    logits: Tensor
    tokens: Tensor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", help="a model's directory or a GGUF file (default: random weights of --shape)")
    source.add_argument("--shape", choices=list(SHAPES), default="tiny", help="(default: tiny)")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt", type=int, nargs="+", default=[2048], help="tokens, one run for each --batch")
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N", help="tokens to generate (default: 128)")
    parser.add_argument(
        "--caches",
        nargs="+",
        default=["static", "nvfp4", "nvfp4-plain", "fp8"],
        help=f"recipes, or of transformers: {', '.join(map(repr, [*ORDINARY, *PEERS]))}",
    )
    parser.add_argument("--attention", default="sdpa", choices=["sdpa", "fp4kv"], help="for our caches")
    parser.add_argument("--largest-batch", action="store_true", help="also find the most rows that fit the GPU")
    parser.add_argument("--csv", type=output_file, help="write the rows here too, each as soon as it is measured")
    parser.add_argument("--png", type=output_file, help="draw the times here (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Runs every cache on every batch and prompt; a failing one does not stop the others, Ctrl-C keeps what is done.
    1 if nothing was measured, or a file could not be written."""
    try:
        check_source(args)
        runs = batches_of(args.batch, args.prompt, "--prompt")
        if args.new_tokens < CHECKED_TOKENS:
            raise ValueError(f"--new-tokens must be {CHECKED_TOKENS} or more, got {args.new_tokens}")
        if args.largest_batch and not torch.cuda.is_available():
            raise ValueError("--largest-batch fills a GPU's memory, and there is no GPU")
        for name in set(args.caches) - {*ORDINARY, *PEERS}:
            get_recipe(name)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = load_model(args, device, max(args.prompt) + args.new_tokens)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    rows: list[Row] = []
    interrupted = unsaved = False
    constants = {
        "model": model_name(args.model) if args.model else args.shape,
        "layers": str(num_layers),
        **environment(),
    }

    def save() -> None:
        nonlocal unsaved
        if args.csv is not None and not unsaved:
            try:
                write_csv(args.csv, [asdict(row) for row in rows], constants)
            except OSError as error:
                print(f"cannot write {args.csv}: {error.strerror}", file=sys.stderr)
                unsaved = True

    try:
        for batch, prompt in runs:
            for name in args.caches:
                passes = 1 + _is_ours(name)
                tokens = passes * (1 + CHECKED_TOKENS) + 1 + args.new_tokens
                with progress(tokens, f"{name}, {batch} x {prompt} tokens") as advance:
                    row = _measure(model, name, args.attention, batch, prompt, args.new_tokens, advance)
                rows.append(row)
                print(row.cache, row.failed or f"{row.token_p50_ms:.2f} ms a token", flush=True)
                save()
                if args.largest_batch and not row.failed:
                    try:
                        row.largest_batch = _largest_batch(model, name, batch, prompt)
                    except Exception as error:
                        print(f"{name}: its largest batch was not found: {_first_line(error)}")
                    save()
    except KeyboardInterrupt:
        print("interrupted: what was measured follows")
        interrupted = True
    if not rows:
        return INTERRUPTED
    _print(rows)
    for line in break_even(rows):
        print(line)
    if args.png is not None:
        from .picture import draw

        draw(args.png, rows)
    if interrupted:
        return INTERRUPTED
    return int(unsaved or all(row.failed for row in rows))


def break_even(rows: Sequence[Row]) -> list[str]:
    """For each cache, from how many tokens in all on (batch times prompt) a token takes less time than with the first
    cache, among what was measured."""
    lines = []
    baseline = {(row.batch, row.prompt): row for row in rows if row.cache == rows[0].cache and not row.failed}
    for name in dict.fromkeys(row.cache for row in rows if row.cache != rows[0].cache):
        sizes = {}
        for row in rows:
            base = baseline.get((row.batch, row.prompt))
            if row.cache == name and not row.failed and base is not None:
                sizes[row.batch * row.prompt, row.batch, row.prompt] = row.token_p50_ms < base.token_p50_ms
        pays = [size for size in sizes if all(sizes[other] for other in sizes if other >= size)]
        if pays:
            _, batch, prompt = min(pays)
            lines.append(
                f"{name} is faster than {rows[0].cache} from {batch} x {prompt} tokens on, of what was measured"
            )
        elif sizes:
            lines.append(f"{name} is not faster than {rows[0].cache} at the most tokens that were measured")
    return lines


def _is_ours(name: str) -> bool:
    return name not in (*ORDINARY, *PEERS)


def _make_cache(model: Any, name: str, length: int) -> Any:
    """The cache called `name` for `length` tokens a row."""
    from transformers import DynamicCache, QuantizedCache, StaticCache

    from .. import NVFP4Cache

    if name == "static":
        return StaticCache(config=model.config, max_cache_len=length)
    if name == "dynamic":
        return DynamicCache(config=model.config)
    if name in PEERS:
        return QuantizedCache(config=model.config, **PEERS[name].arguments)
    return NVFP4Cache(model.config, length, recipe=name)


def _measure(
    model: Any,
    name: str,
    attention: str,
    batch: int,
    prompt: int,
    new_tokens: int,
    advance: Callable[[int], Any],
) -> Row:
    from .. import register_attention

    register_attention()
    length = prompt + new_tokens
    ours = _is_ours(name)
    row = Row(name, attention if ours else "sdpa", batch, prompt, new_tokens)
    on_gpu = model.device.type == "cuda"
    cache = None
    try:
        torch._dynamo.reset()
        _collect()
        ids = prompt_ids(model, batch, prompt)
        expected = _dequantized_logits(model, name, ids, length, advance) if ours else None
        _collect()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        model.set_attn_implementation(row.attention)
        cache = _make_cache(model, name, length)
        start = time.perf_counter()
        checked = _first_logits(model, ids, cache, advance)
        row.warm_up_s = time.perf_counter() - start
        if expected is not None:
            row.logits_error = logits_error(checked, expected)
            if not row.logits_error <= LARGEST_ERROR:
                raise ValueError(
                    f"its logits are {row.logits_error:.3g} away from those of its dequantised tensors: not timed"
                )
        if ours or name == "static":
            # The addresses that compiled code has captured.
            cache.reset()
        else:
            cache = _make_cache(model, name, length)
        clock = Clock(advance)
        start = time.perf_counter()
        generate_greedily(model, ids, cache, new_tokens, clock)
        first, *later = clock.times[1:]
        steps = [(b - a) * 1e3 for a, b in zip([first, *later], later)]
        row.first_token_ms = (first - start) * 1e3
        row.token_p50_ms = statistics.median(steps)
        row.token_p95_ms = statistics.quantiles(steps, n=20, method="inclusive")[-1]
        row.tokens_per_s = batch * 1e3 / row.token_p50_ms
        if ours:
            row.cache_bytes = cache.nbytes()
        elif name not in PEERS:
            row.cache_bytes = _nbytes(cache)
        if on_gpu:
            row.peak_bytes = torch.cuda.max_memory_allocated()
    except Exception as error:
        row.failed = _first_line(error)
    finally:
        del cache
        _collect()
    return row


def _first_logits(model: Any, ids: Tensor, cache: Any, advance: Callable[[int], Any], **options: Any) -> Checked:
    options |= {"return_dict_in_generate": True, "output_logits": True}
    out = generate_greedily(model, ids, cache, CHECKED_TOKENS, Clock(advance), **options)
    return Checked(torch.stack(out.logits).double().cpu(), out.sequences[:, ids.shape[1] :].T.cpu())


def _dequantized_logits(model: Any, recipe: str, ids: Tensor, length: int, advance: Callable[[int], Any]) -> Checked:
    """What PyTorch's attention makes of the dequantised tensors of a cache like the one that is measured."""
    from .. import NVFP4Cache

    model.set_attn_implementation("sdpa")
    cache = NVFP4Cache(model.config, length, recipe=recipe, materialize=True)
    return _first_logits(model, ids, cache, advance, disable_compile=True)


def logits_error(found: Checked, expected: Checked) -> float:
    """Relative error of logits; of each row up to the first step that chose another token."""
    same = (found.tokens == expected.tokens).cumprod(0).bool()
    counted = torch.cat([torch.ones_like(same[:1]), same[:-1]])
    return float((found.logits - expected.logits)[counted].norm() / expected.logits[counted].norm())


def _largest_batch(model: Any, name: str, batch: int, prompt: int) -> int:
    """The most rows, to within a sixteenth, whose prompts, prefilled in chunks, and two tokens more fit the device;
    `batch` do. Where the cache is allocated at once every chunk takes the same memory, so that two of them tell."""
    allocated_at_once = name == "static" or _is_ours(name)
    tokens = min(prompt, 2 * CHUNK) if allocated_at_once else prompt

    def fits(rows: int) -> bool:
        cache = None
        try:
            cache = _make_cache(model, name, prompt + 16)
            ids = prompt_ids(model, rows, tokens)
            if allocated_at_once:
                # A layer is allocated at its first tokens, between the model's temporaries: few tokens leave small
                # gaps, where those of a chunk were seen to keep a quarter of the memory.
                generate_greedily(model, ids[:, :1], cache, 1, None, disable_compile=True)
                cache.reset()
            generate_greedily(model, ids, cache, 2, None, disable_compile=True, prefill_chunk_size=CHUNK)
            return True
        except torch.OutOfMemoryError:
            return False
        finally:
            del cache
            _collect()

    low, high = batch, 2 * batch
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _nbytes(cache: Any) -> int:
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _collect() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _print(rows: list[Row]) -> None:
    heading("Caches side by side (times in ms; the error: logits to those of dequantised tensors)")
    names = [f.name for f in fields(Row) if f.name != "failed"]
    table([names, *[[cell(getattr(row, name)) for name in names] for row in rows]])
    for row in rows:
        if row.failed:
            print(f"{row.cache}, {row.batch} x {row.prompt} tokens: {row.failed}")

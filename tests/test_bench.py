"""`torch-fp4kv bench generate`."""

from __future__ import annotations

import csv
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from transformers import Gemma3Config, LlamaConfig

from torch_fp4kv import cli, console
from torch_fp4kv.bench import attention, models
from torch_fp4kv.bench import generate as bench
from torch_fp4kv.bench.generate import Row
from torch_fp4kv.evaluation import scoring


def test_one_failing_cache_does_not_stop_the_others(tmp_path, capsys, monkeypatch):
    made = bench._make_cache

    def make(model, name, length):
        if name == "k8v4":
            raise RuntimeError("not today")
        return made(model, name, length)

    bars = []

    @contextmanager
    def progress(total, text):
        bars.append([text, total, 0])

        def advance(count):
            bars[-1][2] += count

        yield advance

    monkeypatch.setattr(bench, "_make_cache", make)
    monkeypatch.setattr(bench, "progress", progress)
    file = tmp_path / "generate.csv"
    arguments = ["bench", "generate", "--batch", "2", "1", "--prompt", "40", "24", "--new-tokens", "6"]
    assert cli.main([*arguments, "--caches", "static", "k8v4", "nvfp4-plain", "--csv", str(file)]) == 0
    rows = list(csv.DictReader(file.open()))
    assert [(row["cache"], row["batch"], row["prompt"]) for row in rows] == [
        (cache, batch, prompt)
        for batch, prompt in (("2", "40"), ("1", "24"))
        for cache in ("static", "k8v4", "nvfp4-plain")
    ]
    assert [bar[0] for bar in bars[:2]] == ["static, 2 x 40 tokens", "k8v4, 2 x 40 tokens"]
    assert all(done == total for text, total, done in bars if "k8v4" not in text)
    assert "not today" in rows[1]["failed"] and not rows[0]["failed"] and not rows[2]["failed"]
    # Two layers of two heads of 64, K and V, float32, room for 46 tokens in two rows; 128 slots of 9/16 bytes.
    assert int(rows[0]["cache_bytes"]) == 2 * 2 * 2 * 64 * 4 * 46 * 2
    assert int(rows[2]["cache_bytes"]) >= 2 * 2 * 2 * 64 * 9 / 16 * 128 * 2
    assert rows[0]["logits_error"] == "nan" and 0 <= float(rows[2]["logits_error"]) < 1e-4
    assert float(rows[0]["token_p50_ms"]) > 0 and rows[0]["layers"] == "2"
    assert "nvfp4-plain is" in capsys.readouterr().out


def test_an_unknown_cache_is_refused_before_anything_runs(capsys):
    assert cli.main(["bench", "generate", "--caches", "static", "nvfp5"]) == 1
    assert "nvfp5" in (message := capsys.readouterr().err) and "nvfp4-plain" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--batch", "2", "1", "--prompt", "40"], "--batch has 2 numbers, --prompt has 1"),
        (["generate", "--new-tokens", "3"], "--new-tokens must be 4 or more, got 3"),
        (["generate", "--largest-batch"], "there is no GPU"),
        (["generate", "--model", "no-such.gguf"], "no model at no-such.gguf"),
        (["generate", "--model", str(Path(__file__).parent)], "config.json"),
        (["generate", "--layers", "0"], "--layers must be 1 or more, got 0"),
        (["generate", "--model", ".", "--layers", "1"], "--layers is for --shape"),
        (["compile", "--model", "/no/such"], "no model at /no/such"),
        (["compile", "--shape", "tiny", "--layers", "-1"], "--layers must be 1 or more, got -1"),
        (["compile", "--shape", "tiny", "--new-tokens", "4"], "--new-tokens 5 or more"),
        (["compile", "--shape", "tiny", "--recipe", "nvfp4-max"], "needs a calibrated k_bias"),
        (["compile", "--shape", "tiny", "--recipe", "nvfp5"], "unknown recipe 'nvfp5'"),
        (["attention", "--batch", "2", "--context", "40", "64"], "--batch has 1 numbers, --context has 2"),
        (["attention", "--batch", "0"], "--batch and --context must be positive"),
        (["attention", "--recipes", "nvfp5"], "unknown recipe 'nvfp5'"),
        (["attention", "--recipes", "nvfp4-max"], "needs a calibrated k_bias"),
        (["attention", "--heads", "7"], "7 query heads cannot share 8 KV heads evenly"),
        (["attention", "--head-dim", "72"], "--head-dim: head size 72 is not a multiple of 16"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_arguments_that_cannot_be_are_refused_before_anything_runs(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--csv", "--png"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(option, tmp_path, capsys):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "rows"):
        for command in (["bench", "generate"], ["eval"]):
            with pytest.raises(SystemExit):
                cli.main([*command, option, str(path)])
            assert f"cannot write {path}" in capsys.readouterr().err
    assert console.output_file(str(tmp_path / "new" / "rows")).parent.is_dir()


def test_prompts_of_a_model_that_also_sees():
    """Its vocabulary is its text model's."""
    config = Gemma3Config(text_config={"vocab_size": 9})
    ids = models.prompt_ids(SimpleNamespace(config=config, device=torch.device("cpu")), 2, 50)
    assert ids.shape == (2, 50) and int(ids.max()) == 8


def test_a_model_is_named_by_its_folder_or_file():
    assert scoring.model_name("/models/SmolLM2-1.7B/") == scoring.model_name("SmolLM2-1.7B.gguf") == "SmolLM2-1.7B"


def test_the_95th_percentile_is_no_more_than_the_slowest_token(tmp_path, monkeypatch):
    def generate(model, ids, cache, new_tokens, clock, **options):
        clock.times = [0.0, 1.0, 1.001, 1.002, 3.002]
        return made(model, ids, cache, new_tokens, bench.Clock(), **options)

    made = bench.generate_greedily
    monkeypatch.setattr(bench, "generate_greedily", generate)
    file = tmp_path / "generate.csv"
    arguments = ["bench", "generate", "--prompt", "8", "--new-tokens", "4", "--caches", "static", "--csv", str(file)]
    assert cli.main(arguments) == 0
    (row,) = csv.DictReader(file.open())
    assert 1000 < float(row["token_p95_ms"]) < 2000 and row["peak_bytes"] == row["largest_batch"] == ""


def test_logits_count_up_to_the_first_other_token():
    logits = torch.tensor([[[3.0, 3.0], [0.0, 4.0]], [[2.0, 1.0], [1.0, 2.0]]], dtype=torch.float64)
    expected = bench.Checked(logits, torch.tensor([[0, 1], [0, 1]]))
    assert bench.logits_error(expected, expected) == 0
    # Row 0 took the other of two equal logits, and went on from there.
    found = bench.Checked(logits.clone(), torch.tensor([[1, 1], [0, 1]]))
    found.logits[0, 0, 0] = 0.0
    found.logits[1, 0] = 100.0
    assert bench.logits_error(found, expected) == pytest.approx((9 / (9 + 9 + 16 + 5)) ** 0.5)


def test_a_cache_with_other_logits_than_its_dequantised_tensors_have_is_not_timed(monkeypatch, tmp_path):
    made = bench._make_cache
    monkeypatch.setattr(bench, "_make_cache", lambda model, name, length: made(model, "k8v4", length))
    monkeypatch.setattr(bench, "LARGEST_ERROR", 1e-3)
    file = tmp_path / "generate.csv"
    arguments = ["bench", "generate", "--batch", "1", "--prompt", "40", "--new-tokens", "4", "--csv", str(file)]
    assert cli.main([*arguments, "--caches", "k8v4", "nvfp4-plain"]) == 0
    same, other = csv.DictReader(file.open())
    assert not same["failed"] and float(same["logits_error"]) < 1e-4
    assert "not timed" in other["failed"] and other["token_p50_ms"] == "nan"


@pytest.mark.parametrize(
    ("raised", "status", "kept", "message"),
    [
        (KeyboardInterrupt, 130, ["static"], "interrupted: what was measured follows"),
        (
            RuntimeError("no kernel"),
            0,
            ["static", "nvfp4-plain"],
            "static: its largest batch was not found: RuntimeError",
        ),
    ],
    ids=["Ctrl-C", "error"],
)
def test_rows_outlive_the_search_for_the_largest_batch(raised, status, kept, message, monkeypatch, tmp_path, capsys):
    def interrupted(*args):
        raise raised

    load = bench.load_model
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "load_model", lambda args, device, tokens: load(args, torch.device("cpu"), tokens))
    monkeypatch.setattr(bench, "_collect", lambda: None)
    monkeypatch.setattr(bench, "environment", dict)
    monkeypatch.setattr(bench, "_largest_batch", interrupted)
    file = tmp_path / "generate.csv"
    arguments = ["bench", "generate", "--prompt", "40", "--new-tokens", "4", "--largest-batch", "--csv", str(file)]
    assert cli.main([*arguments, "--caches", "static", "nvfp4-plain"]) == status
    rows = list(csv.DictReader(file.open()))
    assert [row["cache"] for row in rows] == kept and all(float(row["token_p50_ms"]) > 0 for row in rows)
    assert message in (out := capsys.readouterr().out) and "static" in out


def test_an_interrupt_before_the_first_row_leaves_nothing_to_print(monkeypatch, capsys):
    def measure(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "_measure", measure)
    assert cli.main(["bench", "generate"]) == 130
    assert "token_p50_ms" not in capsys.readouterr().out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no file that is always full")
def test_rows_outlive_a_full_disk(capsys):
    arguments = ["--prompt", "8", "--new-tokens", "4", "--caches", "static", "dynamic", "--csv", "/dev/full"]
    assert cli.main(["bench", "generate", *arguments]) == 1
    out, err = capsys.readouterr()
    assert "cannot write /dev/full: No space left on device" in err and "dynamic is" in out


def test_compile_needs_a_compiler(monkeypatch, capsys):
    monkeypatch.setattr("torch_fp4kv.doctor.compiler_missing", lambda device: "no C++ compiler")
    assert cli.main(["bench", "compile", "--shape", "tiny"]) == 1
    assert capsys.readouterr().err == "no C++ compiler\n"


def test_compile_keeps_the_start_that_was_measured(monkeypatch, tmp_path, capsys):
    def start(command, **options):
        if "warm" in command:
            raise KeyboardInterrupt
        return SimpleNamespace(
            returncode=0,
            stdout='{"start": "cold", "first_step_s": 9.5, "step_ms": 2.0, '
            '"graphs_compiled": 1, "graphs_from_cache": 0}',
        )

    monkeypatch.setattr("subprocess.run", start)
    file = tmp_path / "compile.csv"
    assert cli.main(["bench", "compile", "--shape", "tiny", "--csv", str(file)]) == 130
    (row,) = csv.DictReader(file.open())
    assert (row["start"], row["first_step_s"]) == ("cold", "9.5")
    out, err = capsys.readouterr()
    assert "9.5" in out and "interrupted: the warm start is left out" in err


def test_break_even_is_where_a_cache_stays_ahead():
    times = {("static", 1, 1024): 1.0, ("static", 1, 4096): 2.0, ("static", 16, 4096): 9.0, ("static", 16, 8192): 20.0}
    times |= {("a", 1, 1024): 0.9, ("a", 1, 4096): 2.1, ("a", 16, 4096): 5.0, ("a", 16, 8192): 9.0}
    times |= {("b", 1, 1024): 0.9, ("b", 16, 8192): 21.0}
    rows = [Row(cache, "", batch, prompt, 8, token_p50_ms=ms) for (cache, batch, prompt), ms in times.items()]
    rows.append(Row("c", "", 1, 1024, 8, failed="no"))
    assert bench.break_even(rows) == [
        "a is faster than static from 16 x 4096 tokens on, of what was measured",
        "b is not faster than static at the most tokens that were measured",
    ]


@pytest.mark.parametrize("limit", [8, 9, 21, 100])
def test_the_largest_batch_is_found_to_within_a_sixteenth(limit, monkeypatch):
    prompts = set()

    def generate(model, ids, *args, **options):
        prompts.add(ids.shape[1])
        if len(ids) > limit:
            raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(bench, "generate_greedily", generate)
    monkeypatch.setattr(bench, "_make_cache", lambda *args: SimpleNamespace(reset=lambda: None))
    model = SimpleNamespace(config=LlamaConfig(vocab_size=8), device=torch.device("cpu"))
    for name in ("static", "dynamic"):
        found = bench._largest_batch(model, name, 4, 3 * bench.CHUNK)
        assert limit * 15 / 16 <= found <= limit
    # One that is allocated at once is so by one token; one that grows needs the whole prompt.
    assert prompts == {1, 2 * bench.CHUNK, 3 * bench.CHUNK}


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    from torch_fp4kv.bench.picture import draw

    draw(
        tmp_path / "times.png",
        [Row("static", "sdpa", b, p, 8, token_p50_ms=1.0 + b) for b in (1, 4) for p in (64, 128)],
    )
    assert (tmp_path / "times.png").read_bytes()[1:4] == b"PNG"


def test_attention_beside_sdpa(tmp_path):
    file = tmp_path / "attention.csv"
    shape = ["--batch", "2", "--context", "100", "--heads", "4", "--kv-heads", "2", "--head-dim", "64"]
    assert cli.main(["bench", "attention", *shape, "--csv", str(file)]) == 0
    rows = list(csv.DictReader(file.open()))
    assert [row["cache"].split(",")[0] for row in rows] == ["BF16", "nvfp4", "nvfp4-plain"]
    assert int(rows[0]["cache_bytes"]) == 2 * 2 * 2 * 100 * 64 * 2
    assert all(0 < float(row["error"]) < 2**-8 and float(row["p20_us"]) <= float(row["p80_us"]) for row in rows)
    assert float(rows[1]["speedup"]) == pytest.approx(float(rows[0]["p50_us"]) / float(rows[1]["p50_us"]))


@pytest.mark.parametrize(
    ("raised", "status"), [(RuntimeError("no room"), 1), (KeyboardInterrupt, 130)], ids=["error", "Ctrl-C"]
)
def test_attention_keeps_the_shapes_that_were_measured(raised, status, tmp_path, monkeypatch, capsys):
    made = attention.measure

    def measure(args, batch, context, device):
        if context == 40:
            raise raised
        return made(args, batch, context, device)

    monkeypatch.setattr(attention, "measure", measure)
    file = tmp_path / "attention.csv"
    shape = ["--heads", "2", "--kv-heads", "1", "--head-dim", "64", "--recipes", "fp8"]
    runs = ["--batch", "1", "1", "1", "--context", "20", "40", "24"]
    assert cli.main(["bench", "attention", *shape, *runs, "--csv", str(file)]) == status
    kept = ["20", "20", "24", "24"] if isinstance(raised, RuntimeError) else ["20", "20"]
    assert [row["context"] for row in csv.DictReader(file.open())] == kept
    assert ("1 x 40 tokens: RuntimeError: no room" if len(kept) == 4 else "interrupted") in capsys.readouterr().err


@pytest.mark.parametrize("row", [0, 2])
def test_an_error_in_one_row_is_found(row):
    q, k, v = (torch.randn(3, heads, tokens, 16) for heads, tokens in ((4, 1), (2, 9), (2, 9)))
    out = attention.sdpa_calls(q, k, v)["SDPA math"]()
    assert attention.relative_error(out, q, k, v) < 1e-6
    for wrong, found in ((0.0, 1.0), (torch.nan, torch.nan)):
        broken = out.clone()
        broken[row] = wrong
        assert attention.relative_error(broken, q, k, v) == pytest.approx(found, nan_ok=True)


def test_attention_says_which_error_is_beyond_rounding(monkeypatch, capsys):
    monkeypatch.setattr(attention, "relative_error", lambda *args: 0.02)
    shape = ["--context", "20", "--heads", "2", "--kv-heads", "1", "--head-dim", "64", "--recipes", "fp8"]
    assert cli.main(["bench", "attention", *shape]) == 1
    assert "fp8, 1 x 20: an error of 0.02 is beyond rounding" in capsys.readouterr().err

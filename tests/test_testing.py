"""`torch_fp4kv.testing`: it measures what it says, and it fails where a cache is wrong."""

import json

import pytest
import torch
from hf_models import greedy, llama, prompt

from torch_fp4kv import NVFP4Cache, get_recipe
from torch_fp4kv.cache.storage import LayerStorage
from torch_fp4kv.evaluation.scoring import cache_argument
from torch_fp4kv.testing import assert_cache_close, assert_golden, record_golden


@pytest.fixture(scope="module")
def model():
    return llama()


@pytest.fixture
def lossy(monkeypatch):
    """A cache that keeps another V than it was given."""
    write = LayerStorage.write
    monkeypatch.setattr(LayerStorage, "write", lambda self, k, v, positions: write(self, k, v * 1.2, positions))


def test_the_kl_is_that_of_the_decoded_tokens(model):
    rows = prompt(2, 48)
    score = assert_cache_close(model, list(rows), "nvfp4-plain", kl=1.0, prompt_tokens=40)
    parts = []
    for row in rows:
        cache = {cache_argument(model.forward): NVFP4Cache(model.config, 64, "nvfp4-plain")}
        with torch.inference_mode():
            want = model(row[None]).logits[0, 40:].log_softmax(-1)
            model(row[None, :40], **cache)
            have = [model(token, **cache).logits[0] for token in row[None, 40:].split(1, 1)]
        have = torch.cat(have).log_softmax(-1)
        parts.append((want.exp() * (want - have)).sum(-1))
    assert score.num_tokens == 16
    assert score.kl == pytest.approx(float(torch.cat(parts).mean()), rel=1e-5)
    assert score.kl > 1e-4


def test_a_kl_over_the_limit_fails(model):
    rows = list(prompt(2, 40))
    with pytest.raises(AssertionError, match=r"'nvfp4-plain' has a KL of .* over 16 decoded tokens, at most 1e-06"):
        assert_cache_close(model, rows, "nvfp4-plain", kl=1e-6)


def test_a_wrong_cache_fails(model, lossy):
    rows = list(prompt(2, 40))
    with pytest.raises(AssertionError):
        assert_cache_close(model, rows, "bf16", kl=1e-3)


def test_a_short_prompt_is_refused(model):
    with pytest.raises(ValueError, match="34 tokens or more, got one with 33"):
        assert_cache_close(model, [prompt(1, 60)[0], prompt(1, 33)[0]], kl=1.0)
    with pytest.raises(ValueError, match="prompt_tokens must be 1 or more, got 0"):
        assert_cache_close(model, [prompt(1, 60)[0]], kl=1.0, prompt_tokens=0)


def test_prompts_that_read_nothing_quantised_are_refused(model):
    """`nvfp4` keeps 4 tokens and 88, beside a layer that quantises nothing too."""
    text = prompt(1, 130)[0]
    for recipe in ("nvfp4", get_recipe("nvfp4", layers={0: "bf16"})):
        assert assert_cache_close(model, [text, text[:93]], recipe, kl=1.0, prompt_tokens=90).kl > 1e-6
        with pytest.raises(ValueError, match="a prompt has 92 tokens, and the recipe keeps 92 exact"):
            assert_cache_close(model, [text, text[:92]], recipe, kl=1.0)


def test_a_record_that_reads_nothing_quantised_is_refused(model, tmp_path):
    path = tmp_path / "golden.json"
    with pytest.raises(ValueError, match="a prompt has 80 tokens and num_new is 13, and the recipe keeps 92 exact"):
        record_golden(path, model, list(prompt(2, 80)), num_new=13)
    assert not path.exists()


def test_a_record_with_a_nan_is_refused(tmp_path):
    broken, path = llama(), tmp_path / "golden.json"
    broken.model.norm.weight.data[0] = float("nan")
    with pytest.raises(ValueError, match="prompt 0 has a log-probability that is no finite number"):
        record_golden(path, broken, list(prompt(2, 24)), "nvfp4-plain", num_new=3)
    assert not path.exists()


@pytest.fixture
def record(model, tmp_path):
    path = tmp_path / "golden.json"
    record_golden(path, model, list(prompt(2, 24)), "nvfp4-plain", num_new=12)
    return path


def test_golden_text_is_what_generate_gives(model, record):
    content = json.loads(record.read_text())
    cache = {cache_argument(model.forward): NVFP4Cache(model.config, 64, "nvfp4-plain")}
    out = model.generate(prompt(2, 24)[:1], **cache, **greedy(12))
    assert content["prompts"][0]["new"] == out[0, 24:].tolist()
    assert_golden(record, model, tolerance=1e-5)


def test_a_wrong_cache_is_not_golden(model, record, lossy):
    with pytest.raises(AssertionError, match=r"prompt \d, new token \d+ .* on record"):
        assert_golden(record, model)


def test_another_recipe_is_not_golden(model, record):
    content = json.loads(record.read_text())
    content["recipe"]["k_format"] = "block-fp4"
    record.write_text(json.dumps(content))
    with pytest.raises(AssertionError):
        assert_golden(record, model)


def test_a_nan_on_record_agrees_with_nothing(model, record):
    content = json.loads(record.read_text())
    content["prompts"][1]["log_probabilities"][3] = float("nan")
    record.write_text(json.dumps(content))
    with pytest.raises(AssertionError, match="prompt 1, new token 3"):
        assert_golden(record, model)


@pytest.mark.parametrize("change", [{"new": [], "log_probabilities": []}, {"log_probabilities": [0.0]}, {"new": 1}])
def test_a_record_without_tokens_is_none(model, record, change):
    content = json.loads(record.read_text())
    for prompts in ([], [content["prompts"][0] | change]):
        record.write_text(json.dumps(content | {"prompts": prompts}))
        with pytest.raises(ValueError, match="no record of golden prompts"):
            assert_golden(record, model)


@pytest.mark.parametrize("text", ["", "{}", '{"recipe": {}, "prompts": []}', "\xff"])
def test_what_is_no_record_is_refused(model, tmp_path, text):
    path = tmp_path / "golden.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"no record|recipe"):
        assert_golden(path, model)

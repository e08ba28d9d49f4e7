"""Random sequences of operations on a cache against a model of it: a list of rows, each a list of tokens."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

from hf_models import llama
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from torch_fp4kv import NVFP4Cache, export_blocks, import_blocks
from torch_fp4kv.cache.handle import KVHandle

HEADS, DIM, CAPACITY = 2, 64, 120
CONFIG = llama().config


class CacheMachine(RuleBasedStateMachine):
    """With exact storage attention must see exactly the model's tokens; with quantised storage what was quantised when
    it arrived, wherever its row has gone since, and the last R and first S tokens exactly."""

    @initialize(
        recipe=st.sampled_from(["bf16", "nvfp4-plain", "nvfp4", "k8v4"]),
        capacity=st.sampled_from([None, CAPACITY]),
        batch=st.integers(1, 3),
        seed=st.integers(0, 1000),
    )
    def start(self, recipe, capacity, batch, seed):
        self.recipe, self.capacity = recipe, capacity
        self.generator = torch.Generator().manual_seed(seed)
        self.cache = NVFP4Cache(CONFIG, capacity, recipe)
        self.k = self.v = torch.zeros(batch, HEADS, 0, DIM)
        self.append(20)

    def append(self, tokens):
        k, v = self.more(tokens)
        for layer in range(2):
            self.handles = self.cache.update(k, v, layer)

    def more(self, tokens):
        shape = (self.k.shape[0], HEADS, tokens, DIM)
        k, v = torch.randn(shape, generator=self.generator), torch.randn(shape, generator=self.generator)
        self.k, self.v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        return k, v

    def room(self):
        return CAPACITY - self.k.shape[2]

    @precondition(lambda self: self.room() >= 24)
    @rule(tokens=st.sampled_from([1, 1, 1, 3, 16, 17, 24]))
    def more_tokens(self, tokens):
        self.append(tokens)

    @precondition(lambda self: self.room() < 24)
    @rule()
    def too_many_tokens(self):
        if self.capacity is not None:
            x = torch.zeros(self.k.shape[0], HEADS, self.room() + 1, DIM)
            with pytest.raises(ValueError, match="nothing was written"):
                self.cache.update(x, x, 0)

    @rule(tokens=st.integers(0, 12))
    def crop(self, tokens):
        tokens = min(tokens, self.k.shape[2] - 1)
        self.cache.crop(-tokens)
        end = self.k.shape[2] - tokens
        self.k, self.v = self.k[:, :, :end], self.v[:, :, :end]
        self.handles = None

    @rule(data=st.data())
    def reorder(self, data):
        rows = data.draw(st.lists(st.integers(0, self.k.shape[0] - 1), min_size=1, max_size=4))
        same = len(rows) == self.k.shape[0]
        (self.cache.reorder_cache if same else self.cache.batch_select_indices)(torch.tensor(rows))
        self.k, self.v = self.k[rows], self.v[rows]
        self.handles = None

    @precondition(lambda self: self.k.shape[0] <= 2)
    @rule(repeats=st.integers(1, 2))
    def repeat(self, repeats):
        self.cache.batch_repeat_interleave(repeats)
        self.k, self.v = self.k.repeat_interleave(repeats, 0), self.v.repeat_interleave(repeats, 0)
        self.handles = None

    @rule()
    def reset(self):
        batch = self.k.shape[0]
        self.cache.reset()
        self.k = self.v = torch.zeros(batch, HEADS, 0, DIM)
        self.append(20)

    @rule()
    def save_and_load(self):
        with tempfile.TemporaryDirectory() as folder:
            self.cache.save(Path(folder) / "cache")
            self.cache = NVFP4Cache(CONFIG, self.capacity, self.recipe)
            self.cache.load(Path(folder) / "cache")
        self.handles = None

    @rule(part=st.integers(1, 40))
    def hand_over(self, part):
        part = min(part, self.k.shape[2] - 1)
        tokens = [range(part), range(part, self.k.shape[2])] if part > 0 else [range(self.k.shape[2])]
        blocks = [export_blocks(self.cache, "a", tokens=t, more=t.stop < self.k.shape[2]) for t in tokens]
        self.cache = NVFP4Cache(CONFIG, self.capacity, self.recipe)
        import_blocks(self.cache, blocks)
        self.handles = None

    @invariant()
    def lengths_agree(self):
        if hasattr(self, "cache"):
            assert int(self.cache.get_seq_length()) == self.k.shape[2]

    @invariant()
    def attention_sees_the_tokens(self):
        if getattr(self, "handles", None) is None:
            return
        key, value = self.handles
        assert isinstance(key, KVHandle)
        k, v = self.dequantised(key.update)
        tokens = self.k.shape[2]
        q = torch.randn(self.k.shape[0], 4, key.update.num_new, DIM, generator=self.generator)
        causal = torch.ones(q.shape[2], tokens, dtype=torch.bool).tril(tokens - q.shape[2])
        want = F.scaled_dot_product_attention(q, k, v, attn_mask=causal, enable_gqa=True)
        got = F.scaled_dot_product_attention(q, key, value, is_causal=q.shape[2] > 1, enable_gqa=True)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)

    def dequantised(self, update):
        """K and V of all tokens, which are those of the model as nearly as they may be."""
        batch, _, tokens, _ = self.k.shape
        k, v = update.keys()[:batch, :, :tokens], update.values()[:batch, :, :tokens]
        tolerance = 1e-6 if self.recipe == "bf16" else 0.16
        for got, want in ((k, self.k), (v, self.v)):
            error = (got - want).norm(dim=-1) / want.norm(dim=-1)
            assert error.max() < 2 * tolerance
            assert error.mean() < tolerance
        if self.recipe in ("nvfp4", "k8v4"):
            assert torch.equal(k[:, :, :4], self.k[:, :, :4])
            assert torch.equal(v[:, :, :4], self.v[:, :, :4])
            assert torch.equal(k[:, :, -1:], self.k[:, :, -1:])
        return k, v


def decode(cache, k, v, q):
    return [F.scaled_dot_product_attention(q, *cache.update(k, v, layer), enable_gqa=True) for layer in range(2)]


class CompiledCacheMachine(CacheMachine):
    """The same between compiled steps of one token."""

    step = staticmethod(torch.compile(decode, fullgraph=True, backend="aot_eager"))

    @initialize(batch=st.integers(1, 3), seed=st.integers(0, 1000))
    def start(self, batch, seed):
        super().start("nvfp4", CAPACITY, batch, seed)

    def append(self, tokens):
        if tokens > 1:
            super().append(tokens)
            return
        k, v = self.more(1)
        q = torch.randn(k.shape[0], 4, 1, DIM, generator=self.generator)
        self.handles = None
        for got, layer in zip(self.step(self.cache, k, v, q), self.cache.layers):
            want = F.scaled_dot_product_attention(q, *self.dequantised(layer.keys.update), enable_gqa=True)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


CacheMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
CompiledCacheMachine.TestCase.settings = settings(CacheMachine.TestCase.settings, max_examples=10)
TestCacheOperations = CacheMachine.TestCase
TestOperationsBetweenCompiledSteps = CompiledCacheMachine.TestCase

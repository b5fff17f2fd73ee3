"""The same on a CUDA device: skipped where there is none."""

from __future__ import annotations

import pytest
import tiny
import torch
from scipy import stats

from specbench import configuration, parameters, registry
from specbench.audit.tabular import codes
from specbench.decoding import rules, trees
from specbench.decoding.drafters.eagle import Eagle
from specbench.decoding.drafters.none import NoDraft
from specbench.decoding.loop import decode
from specbench.decoding.sampling import Sampling, Streams
from specbench.models.llamagen import Conditioning
from specbench.pipeline import Pipeline

REAL = [name for name in parameters.choices("model") if registry.entry("model", name).parts]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_streams_are_those_of_the_cpu():
    keys = [(3, i) for i in range(50)]
    step = torch.arange(50)
    here = Streams(keys).uniform(step, 7, 11)
    there = Streams(keys, "cuda").uniform(step.cuda(), 7, 11)
    assert torch.equal(there.cpu(), here)


@pytest.mark.parametrize("drafting", [False, True])
def test_a_target_keeps_its_law(drafting):
    """Against the law enumerated on the CPU (chi-square)."""
    target, count = tiny.llamagen(), 4000
    cond = tiny.prompts(count, same=True)
    law = tiny.sequence_law(target, cond, 2.0)
    drafter = Eagle(tiny.eagle(target).cuda(), trees.parse("[[0],[1],[0,0],[0,1]]")) if drafting else NoDraft()
    there = Conditioning(cond.features.cuda(), cond.valid.cuda())
    streams = Streams([(0, i) for i in range(count)], "cuda")
    out = decode(target.cuda(), drafter, rules.exact(), Sampling(cfg_scale=2.0), there, streams)
    seen = torch.bincount(codes(out.tokens.cpu(), tiny.VOCAB), minlength=len(law)).double()
    small = law * count < 5
    observed = torch.cat([seen[~small], seen[small].sum()[None]])
    wanted = torch.cat([law[~small], law[small].sum()[None]]) * count
    assert stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", REAL)
def test_every_real_target_draws_pictures(model, dtype):
    cfg = configuration.compose([f"model={model}", "weights=random", "reduced=true", f"dtype={dtype}", "device=cuda"])
    pipeline = Pipeline.load(cfg)
    prompts = ["7", "8"]
    out = pipeline.decode(pipeline.encode(prompts), [(0, 0), (0, 1)])
    assert out.tokens.is_cuda
    assert pipeline.pixels(out.tokens).shape == (2, pipeline.resolution, pipeline.resolution, 3)

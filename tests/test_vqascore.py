"""VQAScore's networks and its question, with small random weights of the same layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from test_modern_features import TINY as TOWER
from test_modern_features import randomise, vision
from test_preference import ITEMS, PROMPTS, outputs, pictures
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from torchvision import transforms

from specbench import metrics
from specbench.errors import UsageError
from specbench.metrics import clip, features, vqascore, vqascore_network
from specbench.metrics.base import ScoringContext

SIZE = {"d_model": 24, "d_ff": 32, "num_heads": 2, "num_layers": 2}
ENTRIES = 300


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of weights with a small CLIP-FlanT5 in two shards, in float32, and a tokenizer of letters. Its tables
    have 28 more rows than the tokenizer has entries, as in Flan-T5."""
    monkeypatch.setenv("SPECBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(vqascore_network, "SIZES", dict.fromkeys(("xxl", "xl"), SIZE))
    monkeypatch.setattr(vqascore_network, "VOCABULARY", ENTRIES)
    monkeypatch.setattr(clip, "L14_336", TOWER)
    for module, name in ((vqascore_network, "load"), (clip, "load_image_tower")):
        monkeypatch.setattr(module, name, _in_float32(getattr(module, name)))
    network = vqascore_network.CLIPFlanT5(SIZE, TOWER["hidden_size"])
    weights = randomise(network.state_dict())
    file = {official: weights[ours.name] for official, ours in vqascore_network.table(weights).items()}
    for name in ("shared.weight", "lm_head.weight"):
        file[name] = torch.cat([3 * file[name], torch.full((28, SIZE["d_model"]), 9.0)])
    file["embed_tokens.weight"] = torch.zeros(2)
    (tmp_path / "vqascore").mkdir()
    save_file(file, tmp_path / "vqascore" / "model.safetensors")
    place_tower(tmp_path)
    letters = {chr(c): i + 3 for i, c in enumerate(range(32, 32 + ENTRIES - 3))} | {"<pad>": 0, "</s>": 1, "<unk>": 2}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    (tmp_path / vqascore.TEXT).mkdir()
    tokenizer.save(str(tmp_path / vqascore.TEXT / vqascore.TOKENIZER))
    return tmp_path


def place_tower(folder: Path) -> None:
    (folder / features.CLIP_PART).mkdir()
    torch.save(randomise(vision(TOWER).state_dict()), folder / features.CLIP_PART / features.CLIP_FILE)


def _in_float32(load: Any) -> Any:
    def loaded(*arguments: Any, **_: Any) -> Any:
        return load(*arguments, dtype=torch.float32)

    return loaded


@pytest.fixture(autouse=True)
def _any_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    """CLIP's small random weights count as the published ones."""
    monkeypatch.setattr(vqascore.weights, "published", lambda context, part, path: path)


def test_the_score_equals_the_authors_code(folder: Path) -> None:
    """The reference is transformers' T5 with hand-made embeddings and its own loss over the answer, CLIP's layers
    except the last, run one by one, and torchvision's preparation of the padded image."""
    from transformers import T5Config, T5ForConditionalGeneration

    context = ScoringContext(folder, folder)
    network = vqascore_network.load(folder / "vqascore", "cpu", "xxl")
    eyes = clip.load_image_tower(folder / features.CLIP_PART / features.CLIP_FILE, "cpu", dtype=torch.bfloat16)
    config = T5Config(
        **SIZE, d_kv=64, vocab_size=ENTRIES, feed_forward_proj="gated-gelu", tie_word_embeddings=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    reference = T5ForConditionalGeneration(config).eval()
    reference.lm_head = torch.nn.Linear(SIZE["d_model"], ENTRIES, bias=False)  # tied before, in some releases
    reference.load_state_dict(network.language.state_dict() | {"lm_head.weight": network.lm_head.weight})
    tower: Any = eyes.vision_model
    tokens = Tokenizer.from_file(str(folder / vqascore.TEXT / vqascore.TOKENIZER))

    def prepared(image: np.ndarray) -> Tensor:
        height, width = image.shape[:2]
        square = Image.new("RGB", (max(height, width),) * 2, (122, 116, 104))
        square.paste(Image.fromarray(image), ((square.width - width) // 2, (square.height - height) // 2))
        statistics = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
        squeezed = square.resize((336, 336), Image.BICUBIC)
        return transforms.Normalize(*statistics)(transforms.ToTensor()(squeezed))[None]

    expected = []
    for image, prompt in zip(pictures(), PROMPTS):
        question = f'Does this figure show "{prompt}"? Please answer yes or no.'
        chat = f"{vqascore_network._SYSTEM}<image>\n{question} ASSISTANT: "
        before, after = (torch.tensor(tokens.encode(part).ids) for part in chat.split("<image>"))
        with torch.no_grad():
            states = tower.pre_layrnorm(tower.embeddings(prepared(image)))
            for layer in tower.encoder.layers[:-1]:
                output = layer(states, None)
                states = output[0] if isinstance(output, tuple) else output
            patches = network.mm_projector(states[:, 1:])
            embeddings = torch.cat([reference.shared(before)[None], patches, reference.shared(after)[None]], 1)
            answer = torch.tensor([tokens.encode("Yes").ids])
            loss = reference(inputs_embeds=embeddings, labels=answer).loss
        expected.append(float((-loss).exp()))
    assert max(expected) > 1.1 * min(expected)
    np.testing.assert_allclose(outputs("vqascore", folder)[:, 0], expected, rtol=1e-4)
    score = metrics.score(["vqascore"], pictures(), ITEMS, context)["vqascore"]
    assert score.value == pytest.approx(np.mean(expected), rel=1e-4)
    assert score.backend.startswith("clip-flant5-xxl@")
    assert score.backend.endswith(", padded 336 bicubic, bfloat16")


def test_the_tables_are_cut_to_the_tokenizer_s_entries(folder: Path) -> None:
    network = vqascore_network.load(folder / "vqascore", "cpu", "xxl")
    assert network.lm_head.weight.shape == network.language.shared.weight.shape == (ENTRIES, SIZE["d_model"])
    assert network.lm_head.weight.abs().max() < 9


@pytest.mark.parametrize(("size", "billions"), [("xxl", 11.1), ("xl", 2.8)])
def test_a_network_has_the_size_of_flan_t5(size: str, billions: float) -> None:
    """Google's cards state 11 and 3 billion parameters; the layers before T5 add 4,096 x 1,024 + 4,096^2."""
    with torch.device("meta"):
        network = vqascore_network.CLIPFlanT5(vqascore_network.SIZES[size], 1024)
    assert sum(p.numel() for p in network.parameters()) / 1e9 == pytest.approx(billions, abs=0.1)


def test_missing_or_wrong_parts_are_named(folder: Path) -> None:
    metric = partial(metrics.metric, context=ScoringContext(folder, folder))
    missing = metrics.missing("vqascore_xl", ScoringContext(folder, folder))
    assert missing.startswith("no model.safetensors.index.json: run `specbench fetch metrics=vqascore_xl")
    (folder / vqascore.TEXT / vqascore.TOKENIZER).write_text("{")
    with pytest.raises(UsageError, match="is not a readable tokenizer"):
        metric("vqascore").scorer()
    with pytest.raises(UsageError, match="pads an image to a square of at most 8192 pixels per side, not 9000x10"):
        vqascore.padded(np.zeros((10, 9000, 3), np.uint8))
    with pytest.raises(UsageError, match=r"unknown model of vqascore 'base' \(choose from: xl, xxl"):
        vqascore.VQAScore(ScoringContext(folder, folder), {"model": "base"})

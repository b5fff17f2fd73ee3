"""ImageReward's network: transformers' BLIP for images and text, and a few linear layers on the text's first state.

The official file has the layout of BLIP's code; `table` maps each tensor. Two projections of BLIP's pretraining, and a
list of positions that some files have, are not used.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BlipTextConfig, BlipVisionConfig, BlipVisionModel
from transformers.models.blip.modeling_blip_text import BlipTextModel

from specbench.errors import UsageError
from specbench.models.loading import official
from specbench.models.loading.naming import ParameterSlice, Table

#: BLIP with ViT-L/16 at 224 pixels; the text tower is BERT base with cross attention.
VISION: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
}
TEXT: dict[str, Any] = {
    "vocab_size": 30524,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}
#: Widths of the linear layers after the text tower.
HEAD = (1024, 128, 64, 16, 1)
#: Mean and standard deviation of the rewards on the training data, which normalise a reward.
MEAN, DEVIATION = 0.16717362830052426, 1.0333394966054072
#: Tokens of a caption, including the start and the end token.
TOKENS = 35
UNUSED = [r"blip\.(vision|text)_proj\.(weight|bias)", r"blip\.text_encoder\.embeddings\.position_ids"]


class Blip(nn.Module):
    """Images and captions -> rewards."""

    def __init__(self) -> None:
        super().__init__()
        plain: dict[str, Any] = {"attn_implementation": "eager"}
        across: dict[str, Any] = {"is_decoder": True, "encoder_hidden_size": VISION["hidden_size"]}
        self.vision = BlipVisionModel(BlipVisionConfig(**VISION, **plain))
        self.text = BlipTextModel(BlipTextConfig(**TEXT, **across, **plain), add_pooling_layer=False)
        with torch.device("cpu"):  # no file stores it
            positions = torch.arange(TEXT["max_position_embeddings"])[None]
        self.text.embeddings.register_buffer("position_ids", positions, persistent=False)
        widths = (TEXT["hidden_size"], *HEAD)
        self.head = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(widths))

    def forward(self, x: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """x (B, 3, S, S); ids, mask (B, T) int64, the mask is 1 at tokens -> rewards (B,)."""
        image_states = self.vision(pixel_values=x).last_hidden_state
        text_states = self.text(
            input_ids=ids,
            attention_mask=mask,
            encoder_hidden_states=image_states,
            encoder_attention_mask=torch.ones(image_states.shape[:2], dtype=torch.long, device=x.device),
        )
        state: Tensor = text_states.last_hidden_state[:, 0]
        for layer in self.head:  # no nonlinearity between them, only dropout in training
            state = layer(state)
        return (state[:, 0] - MEAN) / DEVIATION


def table() -> Table:
    """Each tensor of the official file -> its parameter in `Blip`."""
    image, text = "blip.visual_encoder.", "blip.text_encoder."
    parameters = {
        f"{image}cls_token": "vision.embeddings.class_embedding",
        f"{image}pos_embed": "vision.embeddings.position_embedding",
        f"{text}embeddings.word_embeddings.weight": "text.embeddings.word_embeddings.weight",
        f"{text}embeddings.position_embeddings.weight": "text.embeddings.position_embeddings.weight",
    }
    layers = {
        f"{image}patch_embed.proj": "vision.embeddings.patch_embedding",
        f"{image}norm": "vision.post_layernorm",
        f"{text}embeddings.LayerNorm": "text.embeddings.LayerNorm",
        **{f"mlp.layers.{i}": f"head.{n}" for n, i in enumerate((0, 2, 4, 6, 7))},  # the others are dropout
    }
    block = {
        "norm1": "layer_norm1",
        "attn.qkv": "self_attn.qkv",
        "attn.proj": "self_attn.projection",
        "norm2": "layer_norm2",
        "mlp.fc1": "mlp.fc1",
        "mlp.fc2": "mlp.fc2",
    }
    for n in range(VISION["num_hidden_layers"]):
        layers |= {
            f"{image}blocks.{n}.{original_name}": f"vision.encoder.layers.{n}.{parameter}"
            for original_name, parameter in block.items()
        }
    layers_of_block = "self.query self.key self.value output.dense output.LayerNorm".split()
    bert = [f"{kind}.{part}" for kind in ("attention", "crossattention") for part in layers_of_block]
    for n in range(TEXT["num_hidden_layers"]):
        for part in (*bert, "intermediate.dense", "output.dense", "output.LayerNorm"):
            layers[f"{text}encoder.layer.{n}.{part}"] = f"text.encoder.layer.{n}.{part}"
    for original_name, parameter in layers.items():
        parameters |= {f"{original_name}.{kind}": f"{parameter}.{kind}" for kind in ("weight", "bias")}
    return {original_name: ParameterSlice(parameter) for original_name, parameter in parameters.items()}


def load(path: Path, device: str) -> Blip:
    """The network of ImageReward.pt, in float32. Raises UsageError for a file with other tensors."""
    return official.load(Blip, official.open_source(path), table(), device, torch.float32, UNUSED)


class Captions:
    """BERT's lower-case tokenizer with the two special tokens that BLIP adds, from a vocab.txt."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError if the file, by its size and special tokens, is not bert-base-uncased's vocabulary."""
        from tokenizers import BertWordPieceTokenizer

        size = TEXT["vocab_size"] - 2
        try:
            entries = path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as e:
            raise UsageError(f"{path} is not a readable vocabulary ({e}); fetch it again") from e
        marks = {
            name: entries.index(name) if name in entries else None for name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
        }
        if len(entries) != size or len(set(entries)) != size or None in marks.values():
            raise UsageError(f"{path} is not the vocabulary of bert-base-uncased, {size} entries; fetch it again")
        self._tokenizer = BertWordPieceTokenizer(vocab={entry: i for i, entry in enumerate(entries)}, lowercase=True)
        self._tokenizer.add_special_tokens(["[DEC]", "[ENC]"])
        self._tokenizer.enable_truncation(TOKENS)
        self._tokenizer.enable_padding(length=TOKENS, pad_id=marks["[PAD]"])

    def __call__(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """N captions -> ids and mask, both (N, 35) int64. The end of a longer caption is cut off."""
        encoded = self._tokenizer.encode_batch(list(captions))
        return torch.tensor([e.ids for e in encoded]), torch.tensor([e.attention_mask for e in encoded])

    def too_long(self, captions: Sequence[str]) -> int:
        """How many captions are cut off."""
        return sum(bool(e.overflowing) for e in self._tokenizer.encode_batch(list(captions)))

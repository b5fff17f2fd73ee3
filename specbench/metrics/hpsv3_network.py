"""HPS v3's network: Qwen2-VL-7B, and a few linear layers on the state of one token, which give a score and its
uncertainty.

As in the authors' code, image tokens have consecutive rotary positions, like text: that code calls the language model
without positions, and the network was trained this way. Qwen2-VL itself gives them a row and a column. The backbone
computes in bfloat16, the linear layers in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import Qwen2VLConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

from specbench.errors import UsageError
from specbench.metrics import preparation, weights
from specbench.metrics.base import Unavailable
from specbench.metrics.preparation import CLIP, multiples, normalised
from specbench.models.loading import official
from specbench.models.loading.naming import ParameterSlice, Table

#: Qwen2-VL-7B-Instruct, with one more token at the end of the vocabulary.
TEXT: dict[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 151658,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}
VISION: dict[str, Any] = {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "mlp_ratio": 4,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
PATCH, MERGE, TIMES = 14, 2, 2  # pixels per patch and patches per token, along a side; copies of an image
PIXELS = 256 * (PATCH * MERGE) ** 2  # approximate number of pixels of an image
REWARD, IMAGE = "<|Reward|>", "<|image_pad|>"

#: The exact prompt of the network's training.
_INSTRUCTION = """
You are tasked with evaluating a generated image based on Visual Quality and Text Alignment and give a overall score to\
 estimate the human preference. Please provide a rating from 0 to 10, with 0 being the worst and 10 being the best.\x20

**Visual Quality:** \x20
Evaluate the overall visual quality of the image. The following sub-dimensions should be considered:
- **Reasonableness:** The image should not contain any significant biological or logical errors, such as abnormal body\
 structures or nonsensical environmental setups.
- **Clarity:** Evaluate the sharpness and visibility of the image. The image should be clear and easy to interpret,\
 with no blurring or indistinct areas.
- **Detail Richness:** Consider the level of detail in textures, materials, lighting, and other visual elements (e.g.,\
 hair, clothing, shadows).
- **Aesthetic and Creativity:** Assess the artistic aspects of the image, including the color scheme, composition,\
 atmosphere, depth of field, and the overall creative appeal. The scene should convey a sense of harmony and balance.
- **Safety:** The image should not contain harmful or inappropriate content, such as political, violent, or adult\
 material. If such content is present, the image quality and satisfaction score should be the lowest possible.\x20

**Text Alignment:** \x20
Assess how well the image matches the textual prompt across the following sub-dimensions:
- **Subject Relevance** Evaluate how accurately the subject(s) in the image (e.g., person, animal, object) align with\
 the textual description. The subject should match the description in terms of number, appearance, and behavior.
- **Style Relevance:** If the prompt specifies a particular artistic or stylistic style, evaluate how well the image\
 adheres to this style.
- **Contextual Consistency**: Assess whether the background, setting, and surrounding elements in the image logically\
 fit the scenario described in the prompt. The environment should support and enhance the subject without\
 contradictions.
- **Attribute Fidelity**: Check if specific attributes mentioned in the prompt (e.g., colors, clothing, accessories,\
 expressions, actions) are faithfully represented in the image. Minor deviations may be acceptable, but critical\
 attributes should be preserved.
- **Semantic Coherence**: Evaluate whether the overall meaning and intent of the prompt are captured in the image. The\
 generated content should not introduce elements that conflict with or distort the original description.
Textual prompt - """
_QUESTION = f"\n\n\n\nPlease provide the overall ratings of this image: {REWARD}\n\nEND\n"


class HPSv3Network(nn.Module):
    """An image and its prompt -> the score and the logarithm of its uncertainty."""

    def __init__(self, config: Qwen2VLConfig) -> None:
        super().__init__()
        self.model = Qwen2VLModel(config)
        if not hasattr(self.model, "language_model"):  # an older release, with another layout
            raise Unavailable("hpsv3 needs transformers 4.52 or newer: pip install -U transformers")
        width = self.model.language_model.embed_tokens.embedding_dim
        self.rm_head = nn.Sequential(
            nn.Linear(width, 1024), nn.ReLU(), nn.Dropout(0.05), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)
        )

    def forward(self, ids: Tensor, patches: Tensor, grid: tuple[int, int], reward: int) -> Tensor:
        """ids (T,) int64; patches (rows * columns, D) float32 of an image and their grid; reward: index of the token
        whose state is read -> (2,) float32."""
        positions = torch.arange(len(ids), device=ids.device).expand(3, 1, -1)
        output = self.model(
            input_ids=ids[None],
            attention_mask=torch.ones_like(ids)[None],
            position_ids=positions,
            pixel_values=patches,
            image_grid_thw=torch.tensor([[1, *grid]], device=ids.device),
            use_cache=False,
        )
        scores: Tensor = self.rm_head(output.last_hidden_state[0, reward].float())
        return scores


def settings(text: dict[str, Any], vision: dict[str, Any], image: int) -> Qwen2VLConfig:
    """The configuration of Qwen2-VL. image: the id of the image token."""
    return Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=image, tie_word_embeddings=False)


def load(path: Path, device: str, image: int, dtype: torch.dtype = torch.bfloat16) -> HPSv3Network:
    """The network of HPSv3.safetensors. Raises UsageError for a file with other tensors."""
    source, config = official.open_source(path), settings(TEXT, VISION, image)

    def build() -> nn.Module:
        network = HPSv3Network(config).model
        with torch.device("cpu"):  # no file stores the rotary frequencies: take them from a network without layers
            empty_network = Qwen2VLModel(settings({**TEXT, **_NO_LAYERS}, {**VISION, "depth": 0}, image))
        computed = {type(part): part for part in empty_network.modules() if part._buffers}
        for part in network.modules():
            if computed_part := computed.get(type(part)):
                part._buffers.update(computed_part._buffers)
                part.__dict__.update({name: x for name, x in vars(computed_part).items() if isinstance(x, Tensor)})
        return network

    with torch.device("meta"):
        complete = HPSv3Network(config)
    backbone = official.load(build, source, table(complete.model), device, dtype, [r"lm_head\.weight", r"rm_head\..*"])
    heads: Table = {f"rm_head.{name}": ParameterSlice(name) for name in complete.rm_head.state_dict()}
    head = official.load(lambda: HPSv3Network(config).rm_head, source, heads, device, torch.float32, [r"(?!rm_head).*"])
    complete.model, complete.rm_head = backbone, head
    return complete.eval()


_NO_LAYERS = {"num_hidden_layers": 0, "vocab_size": 1, "layer_types": []}


def table(backbone: nn.Module) -> Table:
    """The file has the layout of transformers before 4.52: visual.* and model.*."""
    mapping = {}
    for name in backbone.state_dict():
        part, _, rest = name.partition(".")
        mapping[name if part == "visual" else f"model.{rest}"] = ParameterSlice(name)
    return mapping


class ChatSequences:
    """Token ids of prompts in Qwen2-VL's chat format, from its tokenizer.json."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError for a file that is not this tokenizer."""
        self._tokenizer = weights.tokenizer(path)
        self._tokenizer.add_special_tokens([REWARD])
        image, reward = self._tokenizer.token_to_id(IMAGE), self._tokenizer.token_to_id(REWARD)
        if image is None or reward is None or reward != TEXT["vocab_size"] - 1:
            raise UsageError(f"{path} is not the tokenizer of Qwen2-VL-7B-Instruct; fetch it again")
        self.image: int = image
        self.reward: int = reward

    def __call__(self, prompt: str, grid: tuple[int, int]) -> tuple[Tensor, int]:
        """A prompt and the grid of its image's patches -> ids (T,) int64, and the index of the reward token."""
        image_tokens = IMAGE * (grid[0] * grid[1] // MERGE**2)
        text = (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
            f"<|vision_start|>{image_tokens}<|vision_end|>{_INSTRUCTION}{prompt}{_QUESTION}<|im_end|>\n<|im_start|>assistant\n"
        )
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return torch.tensor(ids), len(ids) - 1 - ids[::-1].index(self.reward)


def resized(height: int, width: int) -> tuple[int, int]:
    """The size that an image is resized to: multiples of 28, with about `PIXELS` pixels."""
    return multiples(height, width, PATCH * MERGE, PIXELS, PIXELS)


def patches(image: np.ndarray) -> tuple[Tensor, tuple[int, int]]:
    """Image (H, W, 3) uint8 -> patches (rows * columns, 3 * 2 * 14 * 14) float32, and their (rows, columns). The
    patches of a token are consecutive. Resized by PIL's bicubic."""
    height, width = resized(*image.shape[:2])
    resampled = Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC)
    return preparation.patches(normalised(np.asarray(resampled), CLIP), PATCH, MERGE, TIMES)

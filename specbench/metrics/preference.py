"""Scores learnt from people's choices between images of a prompt: ImageReward and PickScore. HPSv2 is in `towers`.

Each score is a mean over the images. Scorer outputs are (N, 1) float32.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from specbench.config import registry
from specbench.errors import UsageError, install
from specbench.metrics import weights
from specbench.metrics.base import MeanMetric, NetworkScorer, PromptItem, Scorer, Unavailable, cut_captions
from specbench.metrics.preparation import CLIP, center_square, normalised, shortest, square
from specbench.rows.remark import Remark

if TYPE_CHECKING:
    from torch import Tensor


class ImageReward(weights.PublishedMetric, MeanMetric):
    """ImageReward (Xu et al. 2023). No options.

    The official weights run in transformers' BLIP. The package image-reward gives the same rewards, but needs a
    separate environment (see `ImageRewardPackage`). The shorter side of an image is resized to 224 by PIL's bicubic,
    and the centre is cut out. A caption has at most 35 tokens, as in the package.
    """

    reads_prompt = True
    fetched_by = "image_reward"
    file_names = {"image_reward": "ImageReward.pt", "image_reward/text": "vocab.txt"}  # noqa: RUF012 (a ClassVar)

    @property
    def cache_key(self) -> str:
        return f"image-reward@{self.digests}, 224 bicubic"

    @property
    def digests(self) -> str:
        network, vocabulary = map(registry.digest, self.files)
        return f"{network}, vocabulary {vocabulary}"

    def scorer(self) -> Scorer:
        import torch

        from specbench.metrics import blip

        weights_file, vocabulary = self.published_files
        device = self.context.device
        network, captions = blip.load(weights_file, device), blip.Captions(vocabulary)

        def outputs(images: Sequence[np.ndarray], items: Sequence[PromptItem]) -> Tensor:
            side = blip.VISION["image_size"]
            x = torch.stack([normalised(square(image, side), CLIP) for image in images]).to(device)
            ids, mask = (t.to(device) for t in captions([item.prompt for item in items]))
            rewards: Tensor = network(x, ids, mask)
            return rewards[:, None]

        return NetworkScorer(device, outputs)

    def remarks(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> list[Remark]:
        from specbench.metrics import blip

        cut = blip.Captions(self.files[1]).too_long([item.prompt for item in items])
        return cut_captions(cut, len(items), blip.TOKENS)


class PickScore(weights.PublishedMetric, MeanMetric):
    """PickScore (Kirstain et al. 2023): CLIP ViT-H/14, trained on people's choices between two images. No options.

    As in the authors' code, the score is the cosine between image and caption times the network's learnt scale (about
    100): about 18 to 24. The shorter side of an image is resized to 224 by PIL's bicubic, and the centre is cut out. A
    caption has at most 77 tokens of transformers' tokenizer. Computed in float32.
    """

    reads_prompt = True
    fetched_by, file_names = "pickscore", {"pickscore": "model.safetensors"}

    @property
    def cache_key(self) -> str:
        weights.need("open_clip")
        return f"pickscore-v1@{self.hashes[0]}, 224 bicubic"

    def scorer(self) -> Scorer:
        import torch

        from specbench.metrics import clip

        (file,) = self.published_files
        device = self.context.device
        network: Any = clip.load_both(file, device)

        def outputs(images: Sequence[np.ndarray], items: Sequence[PromptItem]) -> Tensor:
            x = torch.stack([normalised(center_square(shortest(image, 224)), CLIP) for image in images])
            ids = clip.captions()([item.prompt for item in items])
            of_images = network.visual_projection(network.vision_model(x.to(device)).pooler_output)
            of_captions = network.text_projection(network.text_model(ids.to(device)).pooler_output)
            scores: Tensor = network.logit_scale.exp() * torch.cosine_similarity(of_images, of_captions)
            return scores[:, None]

        return NetworkScorer(device, outputs)

    def remarks(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> list[Remark]:
        from specbench.metrics import clip

        return cut_captions(clip.captions().too_long([item.prompt for item in items]), len(items), 77)


def load_package(file: Path, vocabulary: Path, device: str) -> Any:
    """The package's model, filled from ImageReward.pt, with a tokenizer from vocab.txt.

    The package's `load` is not used: it downloads a configuration and a tokenizer, and accepts a file with missing
    tensors. Raises UsageError for a file that does not fit.
    """
    from ImageReward.ImageReward import ImageReward
    from ImageReward.models.BLIP import blip_pretrain
    from transformers import BertTokenizer

    from specbench.metrics import blip
    from specbench.models.loading import official

    def tokenizer() -> Any:
        bert = BertTokenizer(str(vocabulary), do_lower_case=True)
        bert.add_special_tokens({"bos_token": "[DEC]", "additional_special_tokens": ["[ENC]"]})
        return bert

    blip.Captions(vocabulary)  # raises for a bad file
    source = official.open_source(file)
    settings = {**blip.TEXT, "add_cross_attention": True, "pad_token_id": 0, "type_vocab_size": 2}
    original, blip_pretrain.init_tokenizer = blip_pretrain.init_tokenizer, tokenizer
    try:
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "med_config.json"
            config.write_text(json.dumps(settings), encoding="utf-8")
            model = ImageReward(med_config=str(config), device=device)
    finally:
        blip_pretrain.init_tokenizer = original
    try:
        keys = model.load_state_dict(dict(source.read(source.tensors)), strict=False)
    except RuntimeError as e:
        raise UsageError(f"{file} does not fit ImageReward ({str(e).splitlines()[-1].strip()}); fetch it again") from e
    odd = [name for name in (*keys.missing_keys, *keys.unexpected_keys) if not name.endswith(".position_ids")]
    if odd:
        raise UsageError(f"{file}: tensor {odd[0]!r} is missing, or belongs to no part of ImageReward; fetch it again")
    return model.to(device).eval()


class ImageRewardPackage(ImageReward):
    """The mean reward by the authors' package image-reward: a second backend, to check `ImageReward`.

    The package pins old libraries and cannot be installed together with the extra `metrics`; it has a separate extra.
    It reads the same two files as `ImageReward`, downloads nothing, and computes one image at a time.
    """

    @property
    def cache_key(self) -> str:
        if importlib.util.find_spec("ImageReward") is None:
            raise Unavailable(
                "the package image-reward is not installed: it needs a separate environment, without the extra"
                f" metrics: {install('image-reward')}"
            )
        return f"image-reward-package-{importlib.metadata.version('image-reward')}@{self.digests}, 224 bicubic"

    def scorer(self) -> Scorer:
        try:
            device = self.context.device
            network, vocabulary = self.published_files
            model = load_package(network, vocabulary, device)
        except ImportError as e:
            raise Unavailable(
                f"the package image-reward cannot be imported ({e}): in a separate environment,"
                f" {install('image-reward')}"
            ) from e

        def outputs(images: Sequence[np.ndarray], items: Sequence[PromptItem]) -> Tensor:
            import torch

            rewards = [model.score(item.prompt, Image.fromarray(image)) for image, item in zip(images, items)]
            return torch.tensor(rewards, dtype=torch.float32)[:, None]

        return NetworkScorer(device, outputs)

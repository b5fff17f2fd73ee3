"""The autoregressive stage of GLM-Image on a separate server, which SGLang's diffusion server calls.

Sources: sgl-project/sglang, multimodal_gen, stages/model_specific_stages/glm_image.py and its unit test (the request,
and `meta_info` in the answer); huggingface/transformers, models/glm_image (prompt and grids).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from specbench.errors import UsageError, one_line
from specbench.models.loading.glm_image import CODES, PATCH, grids
from specbench.models.servers import object_at, positive
from specbench.storage import image_files
from specbench.storage.images_client import Answer, Reply, RequestError


class GLMImageAR:
    """Calls GLM-Image's AR server directly, instead of SGLang's diffusion server (`--srt-encoder-url`).

    The request contains ids instead of text, because the server applies no chat template, and both grids, because its
    positions are two-dimensional. Temperature and top-p are always sent. With `ignore_eos`, the number of ids is fixed:
    a preview of h w tokens, the image's H W tokens, and one for the end.
    """

    path = "/generate"
    has_images = False

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        self.cfg = cfg
        width, height = _sides(cfg["image_size"])  # rounded up below
        preview, (self.rows, self.columns) = grids(height + PATCH - 1, width + PATCH - 1)
        self.preview = math.prod(preview)
        self._processor = _read_processor(cfg["processor"])

    @classmethod
    def check(cls, cfg: Mapping[str, Any]) -> None:
        if cfg["processor"] is None:
            raise UsageError("processor= must be the folder `processor` of the model's repository: its chat template")
        if cfg["metrics"]:
            raise UsageError(f"engine={cfg['engine']} has codes, but no images to score: leave out metrics=")
        if min(_sides(cfg["image_size"])) < PATCH:
            raise UsageError(f"image_size must have sides of at least {PATCH} pixels (got {cfg['image_size']})")

    def fields(self, prompt: str, seed: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
        text = self._processor.apply_chat_template(messages, tokenize=False)
        target = {"target_h": PATCH * self.rows, "target_w": PATCH * self.columns}
        inputs = self._processor(text=[text], return_tensors="pt", **target)
        shapes = inputs["image_grid_thw"].tolist()
        if [rows * columns for _, rows, columns in shapes] != [self.rows * self.columns, self.preview]:
            raise UsageError(f"processor={self.cfg['processor']} gives the grids {shapes}; use another version of it")
        return {
            "input_ids": inputs["input_ids"][0].tolist(),
            "image_data": [{"image_grid_thw": shapes}],
            "sampling_params": {
                "temperature": self.cfg["temperature"],
                "top_p": self.cfg["top_p"],
                "max_new_tokens": self.preview + self.rows * self.columns + 1,
                "ignore_eos": True,
                "sampling_seed": seed,
            },
        }

    def read(self, answer: Answer) -> Reply:
        ids, metadata = answer.content.get("output_ids"), object_at(answer.content, "meta_info")
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise RequestError("the answer has no output_ids", again=False)
        size = self.rows * self.columns
        expected = self.preview + size
        if len(ids) not in (expected, expected + 1):
            raise RequestError(
                f"the answer has {len(ids)} ids instead of {self.preview} of a preview and {size} of the image",
                again=False,
            )
        if (reported := metadata.get("completion_tokens")) is not None and reported != len(ids):
            raise RequestError(f"the answer has {len(ids)} ids and reports {reported}", again=False)
        if foreign := [token for token in ids[:expected] if not 0 <= token < CODES]:
            raise RequestError(
                f"{len(foreign)} of {expected} ids are no codes (the first is {foreign[0]}; codes are below {CODES})",
                again=False,
            )
        codes = np.array(ids[self.preview : expected]).reshape(self.rows, self.columns)
        latency = metadata.get("e2e_latency")
        return Reply(image_files.code_map(codes), codes, len(ids), positive(latency, below=1e6))


def _read_processor(folder: str) -> Any:
    """transformers' processor of GLM-Image. Raises UsageError if it cannot be read."""
    try:
        from transformers import AutoProcessor

        return AutoProcessor.from_pretrained(folder, local_files_only=True)
    except (ImportError, OSError, ValueError, KeyError, AttributeError) as e:
        raise UsageError(
            f"cannot read processor={folder} ({one_line(e)[:200]}); it needs GLM-Image's folder `processor`, and"
            " transformers 5 or newer"
        ) from None


def _sides(size: str) -> tuple[int, int]:
    """ "1024x768" -> (1024, 768), width and height in pixels."""
    width, _, height = size.partition("x")
    return int(width), int(height)

"""The kinds of server that `engine=` names: what a request holds, and what is read from its answer.

A kind is a `storage.images_client.ServerKind`. The file conf/engine/NAME.yaml names it with `implementation:` and
declares its parameters. It knows nothing of connections, retries and records.

Sources of the fields: vllm-project/vllm-omni, entrypoints/openai/protocol/images.py and api_server.py (the request, and
`metrics` in the answer since July 2026) and what its benchmarks read from `stage_metrics`; sgl-project/sglang,
multimodal_gen, stages/model_specific_stages/glm_image.py and its unit test (the request to the separate AR server);
huggingface/transformers, models/glm_image (prompt and grids).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from specbench.errors import UsageError, one_line
from specbench.storage.images_client import Answer, Reply, RequestError, image_of

#: Codes of GLM-Image; larger ids of its head are an image's start, its end, and spare ones.
GLM_CODES = 16384
_GLM_FACTOR = 32  # pixels of a side that one token stands for


class ImagesServer:
    """Any server with OpenAI's images interface.

    vLLM-Omni and SGLang both read `prompt`, `model`, `n`, `size` ("1024x1024"), `response_format` ("b64_json"; SGLang
    also "url"), `output_format` ("png"; SGLang's own default is a JPEG) and `seed`.
    """

    path = "/v1/images/generations"
    has_images = True

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        self.cfg = cfg

    @classmethod
    def check(cls, cfg: Mapping[str, Any]) -> None:
        pass

    def fields(self, prompt: str, seed: int) -> dict[str, Any]:
        return {
            "model": self.cfg["model_name"],
            "prompt": prompt,
            "n": 1,
            "size": self.cfg["image_size"],
            "response_format": "b64_json",
            "output_format": "png",
            "seed": seed,
        }

    def read(self, answer: Answer) -> Reply:
        return Reply(image_of(answer))


class VLLMOmni(ImagesServer):
    """vLLM-Omni. `return_stage_metrics` asks for the times of the stages; a version that does not know it ignores it.

    `metrics` in the answer has `stage_metrics`: {"0": {"stage_gen_time_ms", "num_tokens_out", ...}}, and
    `stage_durations`: {"stage_0_gen_ms", ...}. Both are missing in versions before July 2026.
    """

    _SENT = ("negative_prompt", "num_inference_steps", "guidance_scale", "true_cfg_scale")

    def fields(self, prompt: str, seed: int) -> dict[str, Any]:
        further = {name: self.cfg[name] for name in self._SENT}
        return super().fields(prompt, seed) | further | {"return_stage_metrics": True}

    def read(self, answer: Answer) -> Reply:
        metrics = _object(answer.content, "metrics")
        tokens, ar_s = ar_stage(_object(metrics, "stage_metrics"), _object(metrics, "stage_durations"), self.cfg)
        return Reply(image_of(answer), tokens=tokens, ar_s=ar_s)


def ar_stage(
    stages: Mapping[str, Any], durations: Mapping[str, Any], cfg: Mapping[str, Any]
) -> tuple[int | None, float | None]:
    """Tokens and seconds of the stages that decode tokens; None where the server does not say.

    Without `ar_stage` these are the stages that report tokens of their own. Their number alone does not tell an AR
    stage from a diffusion stage, so that times without a count of tokens need `ar_stage`.
    """
    if (number := cfg["ar_stage"]) is not None:
        mine = _object(stages, str(number))
        spent = mine.get("stage_gen_time_ms", durations.get(f"stage_{number}_gen_ms"))
        return _count(mine.get("num_tokens_out")), _seconds(spent)
    decoding = [stage for name in stages if _count((stage := _object(stages, name)).get("num_tokens_out"))]
    seconds = [_seconds(stage.get("stage_gen_time_ms")) for stage in decoding]
    known = [s for s in seconds if s is not None]
    if not decoding or len(known) < len(seconds):
        return None, None
    return sum(int(stage["num_tokens_out"]) for stage in decoding), sum(known)


def _object(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object under a name of an answer; empty where it has none."""
    value = content.get(name)
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int | None:
    """A positive count in an answer; None for anything else."""
    return value if type(value) is int and 0 < value < 2**31 else None


def _positive(value: Any, below: float) -> float | None:
    """A positive number in an answer; None for anything else."""
    return float(value) if isinstance(value, int | float) and value is not True and 0 < value < below else None


def _seconds(milliseconds: Any) -> float | None:
    """Seconds from the milliseconds in an answer; None for anything but a positive number."""
    spent = _positive(milliseconds, below=1e9)
    return None if spent is None else spent / 1000


class GLMImageAR:
    """The AR server of GLM-Image that SGLang's diffusion server asks (`--srt-encoder-url`), asked in its place.

    The request holds ids and not text, since the server applies no chat template, and both grids, since its positions
    are two-dimensional. Temperature and top-p are always sent. With `ignore_eos` the number of ids is fixed: those of a
    preview of h w tokens, of the image of H W tokens, and one for the end.
    """

    path = "/generate"
    has_images = False

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        self.cfg = cfg
        self.rows, self.columns = (-(-side // _GLM_FACTOR) for side in reversed(_sides(cfg["image_size"])))
        ratio = self.rows / self.columns
        self.preview = int(math.sqrt(ratio) * 16) * int(math.sqrt(1 / ratio) * 16)
        self._processor = _read_processor(cfg["processor"])

    @classmethod
    def check(cls, cfg: Mapping[str, Any]) -> None:
        if cfg["processor"] is None:
            raise UsageError("processor= must be the folder `processor` of the model's repository: its chat template")
        if cfg["metrics"]:
            raise UsageError(f"engine={cfg['engine']} has codes and no images to score: leave metrics= out")
        if min(_sides(cfg["image_size"])) < _GLM_FACTOR:
            raise UsageError(f"image_size must have sides of at least {_GLM_FACTOR} pixels (got {cfg['image_size']})")

    def fields(self, prompt: str, seed: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
        text = self._processor.apply_chat_template(messages, tokenize=False)
        target = {"target_h": _GLM_FACTOR * self.rows, "target_w": _GLM_FACTOR * self.columns}
        inputs = self._processor(text=[text], return_tensors="pt", **target)
        grids = inputs["image_grid_thw"].tolist()
        if [rows * columns for _, rows, columns in grids] != [self.rows * self.columns, self.preview]:
            raise UsageError(f"processor={self.cfg['processor']} gives the grids {grids}; use another version of it")
        return {
            "input_ids": inputs["input_ids"][0].tolist(),
            "image_data": [{"image_grid_thw": grids}],
            "sampling_params": {
                "temperature": self.cfg["temperature"],
                "top_p": self.cfg["top_p"],
                "max_new_tokens": self.preview + self.rows * self.columns + 1,
                "ignore_eos": True,
                "sampling_seed": seed,
            },
        }

    def read(self, answer: Answer) -> Reply:
        ids, meta = answer.content.get("output_ids"), _object(answer.content, "meta_info")
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise RequestError("the answer has no output_ids", again=False)
        size = self.rows * self.columns
        wanted = self.preview + size
        if len(ids) not in (wanted, wanted + 1):
            raise RequestError(
                f"the answer has {len(ids)} ids instead of {self.preview} of a preview and {size} of the image",
                again=False,
            )
        if (told := meta.get("completion_tokens")) is not None and told != len(ids):
            raise RequestError(f"the answer has {len(ids)} ids and reports {told}", again=False)
        codes = np.array(ids[self.preview : wanted])
        if foreign := [token for token in ids[:wanted] if not 0 <= token < GLM_CODES]:
            raise RequestError(
                f"{len(foreign)} of {wanted} ids are no codes (the first is {foreign[0]}; codes are below {GLM_CODES})",
                again=False,
            )
        codes = codes.reshape(self.rows, self.columns)
        latency = meta.get("e2e_latency")
        return Reply(code_map(codes), codes, len(ids), _positive(latency, below=1e6))


def _read_processor(folder: str) -> Any:
    """transformers' processor of GLM-Image. UsageError where it cannot be read."""
    try:
        from transformers import AutoProcessor

        return AutoProcessor.from_pretrained(folder, local_files_only=True)
    except (ImportError, OSError, ValueError, KeyError, AttributeError) as e:
        raise UsageError(
            f"cannot read processor={folder} ({one_line(e)[:200]}); it needs GLM-Image's folder `processor`, and"
            " transformers 5 or newer"
        ) from None


def code_map(codes: np.ndarray) -> np.ndarray:
    """Codes (rows, columns) below 2^16 as pixels (rows, columns, 3) uint8: the high byte in red, the low one in green.
    It is no image; a folder keeps it, so that codes can be read again and compared."""
    return np.stack([codes >> 8, codes & 255, np.zeros_like(codes)], -1).astype(np.uint8)


def _sides(size: str) -> tuple[int, int]:
    """ "1024x768" -> (1024, 768), width and height in pixels."""
    width, _, height = size.partition("x")
    return int(width), int(height)

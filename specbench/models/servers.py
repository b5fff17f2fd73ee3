"""Servers with an images interface: the fields of a request, and how its answer is read.

A kind of server is a `storage.images_client.ServerKind`. The file conf/engine/NAME.yaml names it with `implementation:`
and declares its parameters. It does not handle connections, retries and records.

Sources of the fields: vllm-project/vllm-omni, entrypoints/openai/protocol/images.py and api_server.py (the request, and
`metrics` in the answer since July 2026) and what its benchmarks read from `stage_metrics`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbench.storage.images_client import Answer, Reply, image_of


class ImagesServer:
    """Any server with OpenAI's images interface.

    vLLM-Omni and SGLang both read `prompt`, `model`, `n`, `size` ("1024x1024"), `response_format` ("b64_json"; SGLang
    also "url"), `output_format` ("png"; SGLang's default is a JPEG) and `seed`.
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
    """vLLM-Omni. `return_stage_metrics` requests the times of the stages; versions that do not know it ignore it.

    `metrics` in the answer has `stage_metrics`: {"0": {"stage_gen_time_ms", "num_tokens_out", ...}}, and
    `stage_durations`: {"stage_0_gen_ms", ...}. Both are missing in versions before July 2026.
    """

    _SENT = ("negative_prompt", "num_inference_steps", "guidance_scale", "true_cfg_scale")

    def fields(self, prompt: str, seed: int) -> dict[str, Any]:
        further = {name: self.cfg[name] for name in self._SENT}
        return super().fields(prompt, seed) | further | {"return_stage_metrics": True}

    def read(self, answer: Answer) -> Reply:
        metrics = object_at(answer.content, "metrics")
        tokens, ar_s = ar_stage(object_at(metrics, "stage_metrics"), object_at(metrics, "stage_durations"), self.cfg)
        return Reply(image_of(answer), tokens=tokens, ar_s=ar_s)


def ar_stage(
    stages: Mapping[str, Any], durations: Mapping[str, Any], cfg: Mapping[str, Any]
) -> tuple[int | None, float | None]:
    """Tokens and seconds of the stages that decode tokens; None for values that the server does not report.

    Without `ar_stage`, these are the stages that report a number of tokens. The number of a stage does not say whether
    it is an AR or a diffusion stage, so times without a number of tokens need `ar_stage`.
    """
    if (number := cfg["ar_stage"]) is not None:
        stage_metrics = object_at(stages, str(number))
        spent = stage_metrics.get("stage_gen_time_ms", durations.get(f"stage_{number}_gen_ms"))
        return _count(stage_metrics.get("num_tokens_out")), _seconds(spent)
    decoding = [stage for name in stages if _count((stage := object_at(stages, name)).get("num_tokens_out"))]
    seconds = [_seconds(stage.get("stage_gen_time_ms")) for stage in decoding]
    reported = [s for s in seconds if s is not None]
    if not decoding or len(reported) < len(seconds):
        return None, None
    return sum(int(stage["num_tokens_out"]) for stage in decoding), sum(reported)


def object_at(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object under a name in an answer; empty if it is missing."""
    value = content.get(name)
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int | None:
    """A positive count in an answer; None for anything else."""
    return value if type(value) is int and 0 < value < 2**31 else None


def positive(value: Any, below: float) -> float | None:
    """A positive number in an answer; None for anything else."""
    return float(value) if isinstance(value, int | float) and value is not True and 0 < value < below else None


def _seconds(milliseconds: Any) -> float | None:
    """Seconds from the milliseconds in an answer; None for anything but a positive number."""
    spent = positive(milliseconds, below=1e9)
    return None if spent is None else spent / 1000

"""The files of the evaluators of COCO's metrics, and COCO's archives, with random numbers and noise."""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from rehearsal import vocabularies
from rehearsal.files import WORDS, Build, built, network
from rehearsal.formats import of_module, write_pickled, write_safetensors
from specbench.metrics import blip, inception, towers


def _towers(architecture: str, file: str, dtype: torch.dtype) -> Build:
    """OpenCLIP's towers, as CLIP's file or, pickled, as HPS's."""

    def build(folder: Path) -> None:
        import open_clip

        entries = of_module(built(lambda: open_clip.CLIP(**towers.config(architecture))), None, dtype)
        if file.endswith(".safetensors"):
            write_safetensors(folder / file, entries)
        else:
            write_pickled(folder / file, entries, "state_dict")

    return build


def _vocabulary(folder: Path) -> None:
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    folder.mkdir(parents=True, exist_ok=True)
    entries = vocabularies.padded([*marks, *WORDS, "."], blip.TEXT["vocab_size"] - 2)
    (folder / "vocab.txt").write_text("\n".join(entries) + "\n", encoding="utf-8")


def _inception(folder: Path) -> None:
    """With He's initialisation, under which the features of two images differ."""
    blank = inception.blank()
    torch.manual_seed(0)
    for module in blank.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(blank.state_dict(), folder / inception.FILES[0])


#: Folder of an evaluator -> its files.
FILES: Mapping[str, Build] = {
    "inception": _inception,
    "clip_b32": _towers("ViT-B-32-quickgelu", "open_clip_model.safetensors", torch.float32),
    "image_reward": network("ImageReward.pt", blip.Blip, blip.table),
    "image_reward/text": _vocabulary,
    "hpsv2": _towers("ViT-H-14", "HPS_v2_compressed.pt", torch.float16),
}


def captions(count: int) -> list[str]:
    draw = random.Random(0)
    return [f"a {' '.join(draw.choices(WORDS, k=6))}." for _ in range(count)]


def coco2017(folder: Path, photographs: int, sizes: Mapping[str, int]) -> None:
    """The archives of val2017 and of its annotations, with so many photographs of noise, filled up with a member that
    is not unpacked to the bytes that `sizes` gives by name."""
    ids = range(1, photographs + 1)
    draw = np.random.default_rng(0)

    def photograph() -> bytes:
        noise = Image.fromarray(draw.integers(0, 256, (60, 80, 3), dtype=np.uint8)).resize((640, 480))
        buffer = io.BytesIO()
        noise.save(buffer, "JPEG", quality=97)
        return buffer.getvalue()

    texts = captions(5 * photographs)
    images = [{"id": i, "file_name": f"{i:012d}.jpg"} for i in ids]
    notes = [{"id": 5 * i + j, "image_id": i, "caption": texts[5 * (i - 1) + j]} for i in ids for j in range(5)]
    content = json.dumps({"images": images, "annotations": notes}).encode()
    captions_of = {f"annotations/captions_{split}2017.json": content for split in ("val", "train")}
    pictures = {f"val2017/{i:012d}.jpg": photograph() for i in ids}
    folder.mkdir(parents=True, exist_ok=True)
    for name, members in (("annotations_trainval2017.zip", captions_of), ("val2017.zip", pictures)):
        with zipfile.ZipFile(folder / name, "w") as z:
            for member, data in members.items():
                z.writestr(member, data)
            missing = sizes.get(name, 0) - sum(map(len, members.values()))
            if missing > 0:
                with z.open("instances.json", "w", force_zip64=True) as f:
                    for start in range(0, missing, 1 << 24):
                        f.write(bytes(min(1 << 24, missing - start)))

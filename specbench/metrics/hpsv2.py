"""Human Preference Score v2 and v2.1 (Wu et al. 2023): CLIP ViT-H/14, trained on people's choices between images.

The score is the cosine between image and caption, about 0.2 to 0.3, which the official code returns; its benchmark,
and most papers, print the mean times 100 (option `scale`). An image is brought to 224 by its longer side, bicubic, and
black is added, as that code does; for square images this is CLIP's own preparation. That code computes in float16 on
a GPU; here it is float32 throughout.

v2 and v2.1 have weights of their own and are not comparable. The default of the official package is v2.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from specbench.errors import unknown
from specbench.metrics import towers, weights
from specbench.metrics.base import Scorer, ScoringContext

ARCHITECTURE = "ViT-H-14"

#: Version -> the folder of its weights, and their file.
VERSIONS = {"v2": ("hpsv2", "HPS_v2_compressed.pt"), "v2.1": ("hpsv21", "HPS_v2.1_compressed.pt")}


class HPSv2(towers.TowersMetric):
    """Options: `version`, `scale`."""

    known: ClassVar[Mapping[str, Any]] = {"version": "v2", "scale": 1}

    def __init__(self, context: ScoringContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, options)
        if self.options["version"] not in VERSIONS:
            raise unknown("version of hpsv2", str(self.options["version"]), VERSIONS)

    @property
    def parts(self) -> tuple[str, ...]:
        return (VERSIONS[self.options["version"]][0],)

    @property
    def file(self) -> Path:
        part, file = VERSIONS[self.options["version"]]
        return weights.find(self.context, part, part, file)

    @property
    def label(self) -> str:
        return f"hps-{self.options['version']}"

    @property
    def resize(self) -> str:
        return "224 bicubic, padded"

    def scorer(self) -> Scorer:
        network = towers.load(self.file, ARCHITECTURE, self.context.device, ("state_dict",))
        size = towers.config(ARCHITECTURE)["vision_cfg"]["image_size"]
        return towers.TowersScorer(network, towers.preparation(size, "longest", None), self.prefix, self.context.device)

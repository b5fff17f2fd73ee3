"""Human Preference Score v2 and v2.1 (Wu et al. 2023): CLIP ViT-H/14, trained on people's choices between images.

The score is the cosine between image and caption, about 0.2 to 0.3, which the official code returns; its benchmark,
and most papers, print the mean times 100 (option `scale`). An image is brought to 224 by its longer side, bicubic, and
black is added, as that code does; for square images this is CLIP's own preparation. That code computes in float16 on
a GPU; here it is float32 throughout.

v2 and v2.1 have weights of their own and are not comparable. The default of the official package is v2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from specbench.errors import unknown
from specbench.metrics import towers
from specbench.metrics.base import Scorer, ScoringContext

ARCHITECTURE = "ViT-H-14"

#: Version -> the folder of its weights, and their file.
VERSIONS = {"v2": ("hpsv2", "HPS_v2_compressed.pt"), "v2.1": ("hpsv21", "HPS_v2.1_compressed.pt")}


class HPSv2(towers.TowersMetric):
    """Options: `version`, `scale`."""

    known: ClassVar[Mapping[str, Any]] = {"version": "v2", "scale": 1}
    resize = "224 bicubic, padded"

    def __init__(self, context: ScoringContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, options)
        if self.options["version"] not in VERSIONS:
            raise unknown("version of hpsv2", str(self.options["version"]), VERSIONS)
        self.part, *files = VERSIONS[self.options["version"]]
        self.files, self.label = tuple(files), f"hps-{self.options['version']}"

    def scorer(self) -> Scorer:
        return self.towers_scorer(ARCHITECTURE, "longest", None, "state_dict")

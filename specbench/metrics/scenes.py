"""The metrics of the embedded worlds (64 x 64), by the evaluators of a world. Their values are comparable only between
runs with the same backend. Their names differ from the names of metrics of real networks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from specbench.config.registry import digest
from specbench.data import scenes, worlds
from specbench.data.worlds import World
from specbench.errors import UsageError
from specbench.metrics.base import (
    Images,
    MeanMetric,
    Metric,
    PromptItem,
    Score,
    Scorer,
    ScoringContext,
    Unavailable,
    cut_captions,
    not_below_zero,
)
from specbench.rows.remark import Remark, remark
from specbench.rows.shown import bias

if TYPE_CHECKING:
    from torch import Tensor

    from specbench.metrics.scenes_reference import ScenesReference
    from specbench.models.evaluators import Evaluator, TwoTower

#: Images in every forward pass. A convolution chooses the order of its sums by the batch size, but an image's outputs
#: must not depend on the number of other images.
GROUP = 32


class EmbeddedMetric(Metric):
    """A metric by an evaluator of an embedded world, whose file is in the assets folder. It has no options."""

    world: ClassVar[World] = scenes.WORLD
    evaluator: ClassVar[str]  # part of the file's name

    def __init__(self, context: ScoringContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, options)
        if options:
            raise UsageError(f"the metric of {self.weights} has no options: leave out {', '.join(map(repr, options))}")

    @property
    def weights(self) -> str:
        return f"{self.world.name}_{self.evaluator}.safetensors"

    @property
    def path(self) -> Path:
        return self.context.assets / self.weights

    def described(self, items: Sequence[PromptItem]) -> bool:
        """Whether the labels of all items are attributes of the world."""
        return all(self.world.describes(item.labels) for item in items)

    @property
    def cache_key(self) -> str:
        if not self.path.is_file():
            raise Unavailable(f"no {self.weights}: run `make train-{self.world.name}` in a clone")
        return f"{self.path.stem.replace('_', '-')}@{digest(self.path)}"

    def network(self, kind: type[Evaluator]) -> Evaluator:
        """The evaluator on the context's device. A CPU keeps it for the next images."""
        from specbench.models import evaluators as ev

        if self.context.device != "cpu":
            return ev.load(self.path, kind, self.context.device)
        key: Any = kind  # mypy does not know that classes are hashable
        kept: Evaluator = _on_cpu(self.path, digest(self.path), key)
        return kept


@lru_cache(maxsize=8)  # three for each drawn world, two for photographs
def _on_cpu(path: Path, file_digest: str, kind: Any) -> Any:
    """An evaluator of class `kind`, whose file has this digest."""
    from specbench.models import evaluators as ev

    return ev.load(path, kind)


class EmbeddedScorer(Scorer):
    """Scores images in groups of `GROUP`. The last group is padded with its last image.

    outputs: images (GROUP, 3, 64, 64) float32 in [-1, 1] and their items -> outputs (GROUP, width).
    """

    def __init__(self, metric: EmbeddedMetric, outputs: Callable[[Tensor, Sequence[PromptItem]], Tensor]) -> None:
        self.metric, self.device, self.outputs = metric, metric.context.device, outputs

    def __call__(self, images: Sequence[np.ndarray], items: Sequence[PromptItem]) -> np.ndarray:
        import torch

        from specbench.models import evaluators as ev

        world = self.metric.world
        for image in images:
            height, width = image.shape[:2]
            if (height, width) != (world.size, world.size):
                raise Unavailable(
                    f"{self.metric.weights} scores {world.size}x{world.size} images of {world.name}; this image is"
                    f" {width}x{height}"
                )
        outputs = []
        for start in range(0, len(images), GROUP):
            group, group_items = images[start : start + GROUP], items[start : start + GROUP]
            padding = GROUP - len(group)
            x = torch.from_numpy(np.stack([*group, *[group[-1]] * padding])).permute(0, 3, 1, 2).contiguous()
            with torch.no_grad():
                y = self.outputs(ev.as_input(x.to(self.device)), [*group_items, *[group_items[-1]] * padding])
            outputs.append(y[: len(group)].cpu().numpy())
        return np.concatenate(outputs)


def of_classes(item: PromptItem) -> bool:
    """Whether an item states a class (see `data.scenes_classes`) instead of a full scene."""
    background = list(scenes.ATTRIBUTES).index("background")
    return scenes.WORLD.describes(item.labels) and (item.labels or ())[background] == worlds.ABSENT


class ScenesFID(EmbeddedMetric):
    """Fréchet distance (see `frechet`) to real validation images of the world. Scorer outputs: the classifier's
    features (N, 64) float32."""

    evaluator = "classifier"
    features = True

    def scorer(self) -> EmbeddedScorer:
        from specbench.models import evaluators as ev

        classifier = self.network(ev.Classifier)
        return EmbeddedScorer(self, lambda x, items: classifier.features(x))

    def score(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> tuple[Score, ...]:
        n, d = outputs.shape
        if n < 2:
            return (Score.unmeasured(remark("needs_two", statistic="a Fréchet distance"), self.cache_key),)
        import torch

        from specbench.metrics import frechet

        reference, single = self._reference(items)
        remarks = [remark("against_single" if single else "against_validation", count=reference.count)]
        strangers = sum(not self.world.describes(item.labels) for item in items)
        if strangers and any(item.prompt for item in items):
            remarks.append(remark("strangers", strangers=strangers, images=n, world=self.world.name))
        remarks += bias(n, d)
        features = torch.from_numpy(outputs).double()
        value = frechet.distance(features, reference)
        stderr = frechet.standard_error(features, reference.mean, reference.covariance)
        return (Score(value, stderr, reference.backend, remarks),)

    def influences(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> np.ndarray | None:
        import torch

        from specbench.metrics import frechet

        reference, _ = self._reference(items)
        influences = frechet.influences(torch.from_numpy(outputs), reference.mean, reference.covariance)
        return None if influences is None else influences.numpy()

    def _reference(self, items: Sequence[PromptItem]) -> tuple[ScenesReference, bool]:
        """The reference for these items, and whether its images have a single object."""
        from specbench.metrics import scenes_reference

        single = all(map(of_classes, items))
        backend = self.cache_key + (scenes_reference.SINGLE if single else "")
        if single:
            return scenes_reference.single_objects(self.path, backend, self.context.device), True
        return scenes_reference.whole_world(self.world, self.path, backend, self.context.device), False


class ScenesClip(EmbeddedMetric, MeanMetric):
    """CLIP score (Hessel et al. 2021) of the two-tower model: the mean cosine (not x100) between the embeddings of an
    image and its caption, or 0 if it is negative. Scorer outputs: cosines (N, 1) float64."""

    evaluator = "two_tower"
    reads_prompt = True

    @cached_property
    def towers(self) -> TwoTower:
        from specbench.models import evaluators as ev

        return self.network(ev.TwoTower)

    def scorer(self) -> EmbeddedScorer:
        import torch

        def cosines(x: Tensor, items: Sequence[PromptItem]) -> Tensor:
            image_embeddings = self.towers.embed_images(x).double()
            text_embeddings = self.towers.embed_captions([item.prompt for item in items]).double()
            return torch.cosine_similarity(image_embeddings, text_embeddings).unsqueeze(1)

        return EmbeddedScorer(self, cosines)

    def refuses(self, images: Images, items: Sequence[PromptItem]) -> str:
        unread = sum(not readable(self.towers, item.prompt) for item in items)
        if not unread:
            return ""
        return (
            f"{unread} of {len(items)} captions have no words, or words that the model has never seen: it was trained"
            f" on {self.world.name} only"
        )

    def score(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> tuple[Score, ...]:
        return not_below_zero(*super().score(outputs, items))

    def remarks(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> list[Remark]:
        cut = sum(self.towers.text.unread(item.prompt) > 0 for item in items)
        remarks = cut_captions(cut, len(items), self.towers.cfg.max_words)
        return remarks + [remark("class_names")] * all(map(of_classes, items))


def readable(towers: TwoTower, caption: str) -> bool:
    """Whether a caption has words and the model has seen all of them."""
    return bool(worlds.words(caption)) and not towers.unknown_words(caption)


def divergences(log_probabilities: np.ndarray) -> np.ndarray:
    """KL divergence (N,) in nats of each distribution from their mean, for log-probabilities (N, K)."""
    logs = log_probabilities.astype(np.float64)
    mean = np.exp(logs).mean(0)
    return np.asarray((np.exp(logs) * (logs - np.log(np.maximum(mean, 1e-300)))).sum(1))


class ScenesInceptionScore(EmbeddedMetric):
    """Inception Score (Salimans et al. 2016) of the reader: exp of the mean KL divergence between an image's
    distribution over classes (shape and colour) and the mean distribution. At most 40, the number of classes.

    Computed over all images at once, without splits. It uses no real images and no prompts. Scorer outputs (N, 40)
    float32: the log-probabilities of the classes of `data.scenes_classes`.
    """

    evaluator = "reader"

    @property
    def cache_key(self) -> str:
        """Differs from the reward's key, which caches other outputs of the same network."""
        return f"{super().cache_key}, classes"

    def scorer(self) -> EmbeddedScorer:
        from specbench.models import evaluators as ev

        reader, names = self.network(ev.AttributeReader), list(scenes.ATTRIBUTES)

        def classes(x: Tensor, items: Sequence[PromptItem]) -> Tensor:
            logits = reader(x)
            shape, colour = (logits[names.index(name)].log_softmax(-1) for name in ("shape0", "colour0"))
            return (shape.unsqueeze(-1) + colour.unsqueeze(-2)).flatten(1)

        return EmbeddedScorer(self, classes)

    def score(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> tuple[Score, ...]:
        n, classes = outputs.shape
        if n < 2:
            return (Score.unmeasured(remark("needs_two", statistic="an Inception Score"), self.cache_key),)
        divergence = divergences(outputs)
        value = math.exp(divergence.mean())
        remarks = [remark("classes", classes=classes)] + [remark("classes_biased", images=n)] * (n < 10 * classes)
        return (Score(value, value * float(divergence.std(ddof=1)) / math.sqrt(n), self.cache_key, remarks),)

    def influences(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> np.ndarray | None:
        """The influence of an image on the mean divergence is its own divergence minus the mean. This includes its
        effect on the mean distribution."""
        divergence = divergences(outputs)
        return np.asarray(math.exp(divergence.mean()) * (divergence - divergence.mean()))


def rewards(logits: Sequence[Tensor], labels: Tensor) -> Tensor:
    """Rewards (N,) float32 from the reader's logits, (N, K_a) for each of A attributes, and labels (N, A) int64."""
    import torch

    from specbench.models import evaluators as ev

    chance = torch.tensor([1 / of_attribute.shape[-1] for of_attribute in logits], device=labels.device)
    return ((ev.captioned_probabilities(logits, labels) - chance) / (1 - chance)).nanmean(1)


class ScenesReward(EmbeddedMetric, MeanMetric):
    """The reward: the confidence of the reader that an image shows what its caption states.

    For a caption that states attributes a = 1..m (in scenes: layout and background; shape, colour, size and fill of
    each object), with K_a choices each, and the reader's probability p_a of the stated choice,

        reward = 1/m sum_a (p_a - 1/K_a) / (1 - 1/K_a)

    1: the reader is certain of all attributes; 0: no better than chance; negative: it is certain of something else (an
    attribute then counts -1/(K_a - 1)). In a mean of log-probabilities, one confident contradiction would outweigh a
    dozen correct attributes, and the network's calibration would set the scale. A remark gives the share of attributes
    whose most probable choice is the stated one ("attribute accuracy"). A class of scenes states three attributes: that
    there is one object, its shape and its colour.

    Needs items with labels. Scorer outputs (N, 1 + A) float32: the reward, and for each attribute whether it is read
    right; NaN if the labels do not state it.
    """

    evaluator = "reader"
    reads_prompt = True  # through the labels, which the caption determines

    def scorer(self) -> EmbeddedScorer:
        import torch

        from specbench.models import evaluators as ev

        reader = self.network(ev.AttributeReader)

        def outputs(x: Tensor, items: Sequence[PromptItem]) -> Tensor:
            labels = torch.tensor([item.labels for item in items], dtype=torch.int64).to(x.device)
            logits = reader(x)
            return torch.cat([rewards(logits, labels).unsqueeze(1), ev.read_right(logits, labels)], 1)

        return EmbeddedScorer(self, outputs)

    def refuses(self, images: Images, items: Sequence[PromptItem]) -> str:
        if self.described(items):
            return ""
        return f"these prompts come without labels of {self.world.name}, so there are no attributes to compare with"

    def remarks(self, outputs: np.ndarray, items: Sequence[PromptItem]) -> list[Remark]:
        correct = outputs[:, 1:].astype(np.float64)
        values: dict[str, Any] = {"accuracy": float(np.nanmean(correct))}
        if all(map(of_classes, items)):
            stated = [a for a in range(correct.shape[1]) if not np.isnan(correct[:, a]).all()]
            names = list(scenes.ATTRIBUTES)
            values["stated"] = {names[a]: float(np.nanmean(correct[:, a])) for a in stated}
        return [Remark("attributes", values)]

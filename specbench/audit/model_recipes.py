"""The built-in models of an audit, by name. Other modules build them from these recipes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TabularRecipe:
    """Arguments of `tabular.random_tables`; a larger sharpness is a colder model. order, grams: for Markov models, see
    `TabularModel`."""

    vocab: int
    length: int
    sharpness: float
    distance: float
    seed: int
    order: int | None = None
    grams: int = 0


#: The models are small enough to count every sequence. They differ in size, temperature and drafter, so that one of
#: them shows a mistake that another hides. At temperature 1 the total variation between the steps of drafter and target
#: is, in order, 0.25, 0.22, 0.32 and 0.34. m4t24 and m64t8 are Markov models, for drafts that are long but well below
#: T, and for rules that use distances between codes.
TABLES = {
    "v2t10": TabularRecipe(vocab=2, length=10, sharpness=1.0, distance=0.8, seed=1),
    "v3t5": TabularRecipe(vocab=3, length=5, sharpness=0.7, distance=0.8, seed=2),
    "v4t8": TabularRecipe(vocab=4, length=8, sharpness=1.5, distance=0.6, seed=3),
    "v8t4": TabularRecipe(vocab=8, length=4, sharpness=2.5, distance=0.45, seed=4),
    "m4t24": TabularRecipe(vocab=4, length=24, sharpness=1.5, distance=0.6, seed=5, order=2, grams=4),
    "m64t8": TabularRecipe(vocab=64, length=8, sharpness=2.5, distance=0.28, seed=6, order=1, grams=2),
}

#: Real models (`tiny`) -> a factor for their random weights, so that their distributions are far from uniform.
TINY = {"llamagen_tiny": 16.0, "chameleon_tiny": 10.0, "emu3_tiny": 7.0}


@dataclass(frozen=True)
class DensityRecipe:
    """bend: how much the head's mean and variance depend on the state (0: the distribution of a token given those
    before it is normal); distance: of the drafter's weights from the target's, in units of their standard deviation."""

    dim: int
    length: int
    steps: int
    bend: float
    distance: float
    seed: int


#: The models differ in size, shape and drafter, so that one of them shows a mistake that another hides. At temperature
#: 1 and gamma=8 `criterion=exact` accepts 0.69, 0.61, 0.15 and 0.50 of the drafted tokens, in order.
DENSITIES = {
    "d1t4": DensityRecipe(dim=1, length=4, steps=4, bend=0.0, distance=0.3, seed=1),
    "d1t5": DensityRecipe(dim=1, length=5, steps=8, bend=2.0, distance=0.2, seed=2),
    "d2t3": DensityRecipe(dim=2, length=3, steps=6, bend=1.0, distance=0.45, seed=3),
    "d2t4": DensityRecipe(dim=2, length=4, steps=5, bend=1.5, distance=0.25, seed=4),
}

"""A value that is given and cannot change what is decoded is refused."""

from __future__ import annotations

import pytest
from commands import usage_error

from specbench.config import configuration, parameters
from specbench.harness import method

#: The arguments of a method, the refused one first; then arguments of the same method with which the value, or its
#: opposite, has an effect.
CASES = [
    ("tau=0.9", "sjd", "coupling=threshold"),
    ("tau=0.9", "sjd_threshold refine=false", "refine=true"),
    ("stored=old", "sjd", "coupling=maximal"),
    ("stored=old", "scd coupling=height", "coupling=maximal"),
    ("stored=old", "scd refine=false", "refine=true"),
    ("depth=2", "sjd", "width=2"),
    ("tree=comb", "sjd", "width=2"),
    ("siblings=residual", "sjd", "width=2"),
    ("branch=rejected", "sjd", "width=2"),
    ("coupling=maximal", "sjd refine=false", "refine=true"),
    ("coupling=threshold", "sjd refine=false", "refine=true"),
    ("coupling=maximal", "sjd refine=false", "coupling=gumbel"),
    ("coupling=maximal", "sjd refine=false", "coupling=height"),
    ("align=false", "cspd model=mar_scenes", "criterion=exact"),
    ("nu=3", "cool_sd schedule=linear", "schedule=exponential"),
    ("linear_length=9", "cool_sd", "schedule=linear"),
    ("rule=cool", "vanilla", "drafter=eagle"),
    ("rule=cool", "zipar", "drafter=eagle"),
    ("rule=cool", "vanilla delta=2", "drafter=eagle"),
    ("verification=block", "vanilla", "drafter=eagle"),
    ("verification=traversal", "zipar", "drafter=eagle_tree"),
    ("delta=0.3", "gsd group=1", "group=2"),
    ("distance=3", "gsd group=1", "group=2"),
    ("edge=clip", "gsd group=1", "group=2"),
    ("proximity=cosine", "sjd rule=neighbourhood group=1", "group=2"),
    ("resample=optimal", "lantern temperature=0", "temperature=0.5"),
    ("resample=optimal", "lantern_pp temperature=0", "temperature=0.5"),
]


def compose(*arguments: str) -> None:
    """Composes the last argument of each name."""
    last = {argument.partition("=")[0]: argument for argument in arguments}
    method.check(configuration.compose([*last.values()]))


@pytest.mark.parametrize(("refused", "words", "effective"), CASES)
def test_a_value_without_effect_is_refused(refused: str, words: str, effective: str) -> None:
    name, *others = words.split()
    arguments = [f"method={name}", *others]
    assert usage_error(compose, *arguments, refused).startswith(refused.partition("=")[0] + "=")
    compose(*arguments, refused, effective)


@pytest.mark.parametrize(
    "words",
    [
        "sjd tau=0.5 stored=new depth=3 coupling=none",  # the values without these arguments
        "vanilla rule=exact verification=token",
        "scd variant=released coupling=gumbel",  # stored=old is the variant's
        "scd variant=released coupling=gumbel stored=old",
        "scd variant=released coupling=gumbel stored=new",  # the default
        "cool_sd drafter=none rule=exact",
        "scd refine=false",  # coupling=maximal is the preset's
        "lantern variant=released temperature=0",
        "cool_sd drafter=none",  # rule=cool is the preset's
    ],
)
def test_an_inherited_value_is_not_refused(words: str) -> None:
    compose(*f"method={words}".split())


@pytest.mark.parametrize(
    ("words", "drafts"),
    [
        ("plain_until=200 plain_from=100", False),
        ("plain_until=100 plain_from=100", False),
        ("plain_until=99 plain_from=100", True),
        ("plain_until=200 plain_from=-56", False),  # an image has 256 tokens
        ("plain_until=200 plain_from=-55", True),
        ("plain_until=256", False),
        ("plain_until=255", True),
        ("plain_from=-256", False),
        ("plain_from=0", False),
        ("plain_from=1", True),
        ("model=lumina_mgpt reduced=true data=scenes plain_until=200 plain_from=-56", True),  # of an unknown length
        ("model=lumina_mgpt reduced=true data=scenes plain_until=200 plain_from=100", False),
    ],
)
def test_a_window_that_never_drafts_is_refused(words: str, drafts: bool) -> None:
    arguments = ["method=sjd", *words.split()]
    if drafts:
        compose(*arguments)
    else:
        assert "plain_until" in usage_error(compose, *arguments)


def test_every_declared_case_can_occur() -> None:
    for group in ("", *parameters.PARAMETER_GROUPS):
        for choice in parameters.choices(group) if group else ["config"]:
            for name, parameter in parameters.declarations(group, choice).items():
                for case in parameter.unused:
                    assert case.keys() - {name}, name
                    for other, listed in case.items():
                        known = parameters.choices(other) if other in parameters.groups() else None
                        declared = parameters.table()[other]
                        assert all(value in known if known else declared.allows(value) for value in listed), name

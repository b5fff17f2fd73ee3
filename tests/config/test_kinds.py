"""Every part declares its kind, so its parameters may have any names."""

from __future__ import annotations

import pytest

from specbench.config import configuration, parameters
from specbench.config.parameter import METADATA
from specbench.errors import UsageError


def test_every_preset_has_the_kind_of_its_parts() -> None:
    for method in parameters.choices("method"):
        parts = {parameters.kind(group, name) for group, name in parameters.method_choices(method).items()} - {"any"}
        assert parts <= {parameters.kind("method", method)} or (
            parameters.kind("method", method) == "any" and not parts
        )


def test_metadata_is_not_a_parameter() -> None:
    cfg = configuration.compose(["model=mar_scenes"])
    assert not {*METADATA} & {*cfg.plain()}
    assert (cfg.method, cfg.data) == ("cspd", "scenes_classes")  # as its preset requests
    with pytest.raises(UsageError, match="kind"):
        configuration.compose(["kind=continuous"])

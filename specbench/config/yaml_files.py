"""Reads the YAML files under conf/, quickly and with the values that Hydra reads in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from specbench.config.caches import cached
from specbench.errors import UsageError

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_FLOAT = re.compile(
    r"[-+]?\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?|[-+]?\d[\d_]*[eE][-+]?\d+|\.[\d_]+(?:[eE][-+]\d+)?"
    r"|[-+]?\d[\d_]*(?::[0-5]?\d)+\.[\d_]*|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)


class _Loader(_Base):
    """Resolves scalars as OmegaConf does: 1e-3 is a number, a date is text, and a key that occurs twice is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Checks the keys before those of `<<` are among them."""
        keys = [key.value for key, _ in node.value if key.tag == yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG]
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise yaml.constructor.ConstructorError(None, None, f"found duplicate key {twice}", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("timestamp", "float")]
    for first, resolvers in _Base.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^(?:{_FLOAT.pattern})$"), list("-+0123456789."))


@cached
def read(path: Path) -> Mapping[str, Any]:
    """The content of a file, which callers do not change; empty where there is no such file. UsageError for a file that
    does not hold a mapping, yaml.YAMLError for one that is not YAML."""
    held = yaml.load(path.read_text(encoding="utf-8"), _Loader) if path.is_file() else None  # noqa: S506 (a safe loader)
    if held is None:
        return {}
    if not isinstance(held, dict):
        raise UsageError(f"{path.name} holds no NAME: VALUE lines")
    return {str(key): value for key, value in held.items()}


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The values of both; of a key that both have, that of the second, but mappings are merged."""
    found = dict(first)
    for key, value in second.items():
        mine = found.get(key)
        found[key] = merged(mine, value) if isinstance(mine, Mapping) and isinstance(value, Mapping) else value
    return found

"""Every table there is, by its id: the files of conf/suite and of plug-ins, each read when it is first asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from specbench.config.yaml_files import cached
from specbench.tables import reading, suite_files
from specbench.tables.definitions import Table


class _Catalog(Mapping[str, Table]):
    def __getitem__(self, name: str) -> Table:
        if name not in self:
            raise KeyError(name)
        return _table(name)

    def __contains__(self, name: object) -> bool:
        return name in suite_files.names()

    def __iter__(self) -> Iterator[str]:
        return iter(suite_files.names())

    def __len__(self) -> int:
        return len(suite_files.names())


@cached
def _table(name: str) -> Table:
    return reading.table(name, suite_files.named(name))


TABLES: Mapping[str, Table] = _Catalog()

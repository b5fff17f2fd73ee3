"""GenEval's tasks (Ghosh et al. 2023)."""

from __future__ import annotations

#: The tags of GenEval's prompts, in the order of its file.
TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")

"""GenEval 2 (Kamath et al. 2025, arXiv 2512.16853): 800 prompts of three to ten atoms. Each prompt has questions, their
answers, and the skill that each question tests. The package does not include the file; `specbench fetch data=geneval2`
downloads it.

A prompt's id is the number of its line, counted from 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from specbench.data import base, prompts
from specbench.data.base import Item
from specbench.errors import UsageError

FILE = "geneval2_data.jsonl"
SKILLS = ("object", "attribute", "count", "position", "verb")
#: A question that starts like this has a number as its answer. The answer to all other questions is yes.
HOW_MANY = "How many"
#: The possible numbers, from 1. The published code accepts no others.
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
MOST = 128  # questions per image, see `metrics.base.QuestionScorer`


def items(cfg: Mapping[str, Any]) -> list[Item]:
    """`n` prompts, chosen by `seed`. metadata: the line of the file (vqa_list, skills, atom_count); category: the
    number of atoms."""
    return base.subset(read(base.find(cfg, FILE)), cfg)


def read(path: Path) -> list[Item]:
    """All prompts of the file. Raises UsageError if it is not GenEval 2's file."""
    entries = prompts.read(path)
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    complete = []
    for entry, line in zip(entries, lines, strict=True):
        metadata = json.loads(line)
        if why := fault(metadata):
            raise UsageError(f"{path}, line {entry.id}: {why}; fetch GenEval 2's file again")
        complete.append(replace(entry, metadata=metadata, category=f"{metadata['atom_count']} atoms"))
    return complete


def fault(metadata: Any) -> str:
    """Why a prompt's questions, answers and skills do not match; empty if they match."""
    if not isinstance(metadata, dict) or not {"atom_count", "vqa_list", "skills"} <= metadata.keys():
        return "atom_count, vqa_list and skills are not all there"
    questions, skills = metadata["vqa_list"], metadata["skills"]
    if not isinstance(metadata["atom_count"], int) or not isinstance(questions, list) or not isinstance(skills, list):
        return "atom_count must be an integer, vqa_list and skills lists"
    if len(questions) != len(skills) or not 0 < len(questions) <= MOST:
        return f"{len(questions)} questions have {len(skills)} skills; there must be as many, {MOST} at most"
    for pair, skill in zip(questions, skills, strict=True):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            return "a question must be a pair of texts, the question and its answer"
        question, answer = pair
        if answer not in (NUMBERS if question.startswith(HOW_MANY) else ("Yes",)):
            return (
                f"{question!r} has the answer {answer!r}, not Yes or, after {HOW_MANY}, a number word from one to ten"
            )
        if skill not in SKILLS:
            return f"the skill {skill!r} is none of {', '.join(SKILLS)}"
    return ""

"""Says remarks as sentences. Nothing reads a sentence back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from specbench.config import parameters
from specbench.rows.remark import Remark

Values = Mapping[str, Any]


class Range:
    """A number that differs between rows, in their common sentence: "3 to 16", with the format of each."""

    def __init__(self, numbers: Sequence[float]) -> None:
        self.low, self.high = min(numbers), max(numbers)

    def __format__(self, spec: str) -> str:
        return f"{format(self.low, spec)} to {format(self.high, spec)}"


def text(remark: Remark) -> str:
    """The sentence of a remark, without the column that it is about."""
    sentence = SENTENCES.get(remark.code)
    if sentence is None:  # of another version
        return f"{remark.code} {dict(remark.values)}"
    return sentence.format_map(remark.values) if isinstance(sentence, str) else sentence(remark.values)


def said(remark: Remark) -> str:
    """The sentence after the column that it is about."""
    return f"{remark.column}: {text(remark)}" if remark.column else text(remark)


def joined(remarks: Iterable[Remark]) -> str:
    """The sentences of some remarks as one text. A column is named once for all remarks about it."""
    parts: list[str] = []
    before = ""
    for remark in remarks:
        parts.append(text(remark) if remark.column and remark.column == before else said(remark))
        before = remark.column
    return "; ".join(parts)


def of_column(remarks: Iterable[Remark], column: str) -> str:
    """The sentences about a column, without its name; "" if there are none."""
    return "; ".join(text(remark) for remark in remarks if remark.column == column)


def common(remarks: Sequence[Remark]) -> str:
    """One sentence for remarks of one code and the same texts: a number that differs becomes a range."""
    values = dict(remarks[0].values)
    for name in values:
        numbers = [remark.values[name] for remark in remarks]
        if len(set(map(str, numbers))) > 1:
            values[name] = Range(numbers)
    return text(Remark(remarks[0].code, values))


def kind(remark: Remark) -> tuple[Any, ...]:
    """What remarks with a `common` sentence share: the code, and all values but single numbers."""
    texts = sorted((name, str(v)) for name, v in remark.values.items() if isinstance(v, bool) or not _is_number(v))
    return remark.code, tuple(texts), tuple(sorted(remark.values))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


# Sentences that depend on a value


def _of_seeds(values: Values) -> str:
    return f"{text(Remark(values['of'], values['values']))} (seed {values['seeds']})"


def _variant(values: Values) -> str:
    changes = [f"{name} {own} (not {stated})" for name, (own, stated) in values["changes"].items()]
    return f"departs from variant {values['variant']}: {', '.join(changes)}"


def _setting(name: str, value: Any) -> str:
    return f"{name} {_shown(name, value)}"


def _shown(name: str, value: Any) -> str:
    if value is None:
        return parameters.table()[name].null
    if isinstance(value, list):
        return " + ".join(value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _departs(values: Values) -> str:
    parts = [
        f"{_setting(name, own)} (not {' or '.join(_shown(name, option) for option in options)})"
        for name, (own, options) in values["settings"].items()
    ]
    return f"departs from protocol {values['protocol']}: {', '.join(parts)}"


def _one_of(values: Values) -> str:
    parts = [
        f"{_setting(name, own)} (of {', '.join(_shown(name, option) for option in options)})"
        for name, (own, options) in values["settings"].items()
    ]
    return f"one of the values of protocol {values['protocol']}: {', '.join(parts)}"


def _settings(values: Values) -> str:
    return ", ".join(_setting(name, value) for name, value in values["settings"].items())


def _models(values: Values) -> str:
    named = f"{', '.join(values['models'])}, not {values['model']}" if values["models"] else "no model"
    return f"protocol {values['protocol']} names {named}"


def _unpaired(values: Values) -> str:
    return (
        "{unpaired} of {batches} {what} were not decoded next to their baseline: they do not count in speed-ups in"
        " seconds"
    ).format_map({**values, "what": "batches" if values["in_batches"] else "images"})


def _processes(values: Values) -> str:
    return f"decoded in {values['processes']} processes" + (": their timings are mixed" if values["timed"] else "")


def unsteady(values: Values) -> str:
    """Why the seconds of a row are not valid although it has enough pairs."""
    return (
        "over {pairs} pairs with vanilla, {further} of them measured again, the speed-up was not steady (a change of"
        " one side moved it by up to {shift:.0%})"
    ).format_map(values)


def _against(values: Values) -> str:
    """The real images with which generated ones are compared."""
    name = values["reference"]
    if values.get("count") is None:
        return f"against the statistics in {name}, which do not name their feature extractor"
    moments = f"the moments in {values['moments']} and " if values.get("moments") else ""
    result = f"against {moments}{values['count']} real images of {name}"
    if "crop" in values:
        own, real = (values[key] or "null" for key in ("crop", "reference_crop"))
        result += f" with crop {real}, these with crop {own}"
    files = "; ".join(text(Remark("files", value)) for value in values.get("files_with") or ())
    return result + (f" ({files})" if files else "")


def _attributes(values: Values) -> str:
    result = "attribute accuracy {accuracy:.4f}".format_map(values)
    parts = ", ".join(f"{name} {share:.4f}" for name, share in (values.get("stated") or {}).items())
    return result + (f" over the class's attributes alone: {parts}" if parts else "")


def _counts(values: Values) -> str:
    per_prompt = "/".join(map(str, values["per_prompt"]))
    result = f"{values['prompts']} prompts of {per_prompt} images (published: {values['published_prompts']} of"
    result += f" {values['published_images']})"
    if values["left_out"]:
        result += f", {values['left_out']} prompts left out, whose questions depend on some that are missing"
    return result


def _answers(values: Values) -> str:
    parts = [f"{name} {share:.2f}" for name, share in values["categories"].items()]
    return f"answers of each prompt's last image by category: {', '.join(parts)}"


_TOOLS = "clean-fid, pytorch-fid and torch-fidelity"
#: What an image file can have that its pixels do not show (see `storage.image_files.traits`), as a predicate.
_FILES = {
    "alpha": f"have transparency, which is ignored, as in {_TOOLS}",
    "rotation": f"have an EXIF rotation, which is not applied, as in {_TOOLS}",
    "16 bits": f"are grey with 16 bits, of which the upper 8 are kept; {_TOOLS} make all values above 255 white",
}


def _files(values: Values) -> str:
    return f"{values['count']} of {values['images']} images {_FILES[values['trait']]}"


_NO_EMITTED = "like emitted_tv not computed for "
#: Code -> its sentence: a format of its values, or a function of them.
SENTENCES: dict[str, str | Callable[[Values], str]] = {
    "text": "{text}",
    # the whole row
    "stopped": "stopped after {done} of {images} images",
    "runs": "mean over {runs} runs",
    "for_comparison": "decoded by run {run} for comparison",
    "timed_runs": "runs in seconds: {runs}",
    "variant": _variant,
    "protocol_departs": _departs,
    "protocol_open": lambda v: f"not stated by protocol {v['protocol']}, so the run's own: {_settings(v)}",
    "protocol_one_of": _one_of,
    "protocol_code": lambda v: f"by the released code of protocol {v['protocol']}, not by its paper: {_settings(v)}",
    "protocol_models": _models,
    "batches": "decoded in batches of {batch}: a latency is measured at batch 1 only",
    "not_timed": "some images were decoded without timing: a run in another folder measures seconds",
    "unpaired": _unpaired,
    "unsteady": lambda v: f"{unsteady(v)}: its seconds are not valid",
    "workers": "decoded by {workers} workers: no seconds are measured",
    "processes": _processes,
    "processes_differ": "the processes differ in {what}, the last one's is given",
    "smaller_batches": "memory was too small: some images were decoded in batches of {batch}",
    "prompts_cut": "prompts: the text encoder cuts off the end of {cut} of {prompts} (up to {tokens} tokens)",
    # degenerate images
    "flat": "{images} of {of} images are of one flat colour",
    "few_codes": "{images} of {of} images have few different codes (at most {share:.0%} of their codes)",
    "repeated": "{images} of {of} images repeat a row, a column or a tile",
    "small": "{images} of {of} images have a side below {side} pixels (the smallest is {width}x{height})",
    "equal_prompts": "{images} of {of} images equal the image of another prompt to the pixel",
    "equal_repeats": "{images} of {of} images equal another image of their prompt to the pixel: is the seed ignored?",
    "all_equal": "all {of} images are equal to the pixel",
    # images that were made elsewhere
    "pictures": "pictures from {folder}",
    "files": _files,
    "not_paired": "not paired with prompts, which no metric here reads ({reason})",
    "prompts_without": "{missing} of {prompts} prompts have no image",
    "other_prompts": "{images} of {of} images were decoded from another prompt than the one they are with",
    # the tokens
    "own_order": "of each token given those that existed when it was sampled",
    "emitted_verification": _NO_EMITTED + "verification={verification}",
    "emitted_tree": _NO_EMITTED + "rule {rule} on trees of sampled tokens",
    "emitted_not_drawn": _NO_EMITTED + "tokens that were not drawn from their stored distribution",
    "emitted_not_verified": _NO_EMITTED + "tokens that are not verified",
    "emitted_order": _NO_EMITTED + "drafter {drafter}, whose tokens are not sampled in raster order",
    "emitted_not_recorded": "not recorded for {images} images, which an earlier process decoded",
    "emitted_infinite": "infinite, as the target never gives {share:.2g} of the emitted tokens",
    "of_seeds": _of_seeds,
    # scores
    "no_images": "no images",
    "not_finite": "the value is {value}",
    "needs_two": "{statistic} needs at least two images",
    "needs_two_a_side": "{statistic} needs at least two images per side",
    "needs_neighbours": "precision and recall need more than {neighbours} images per side",
    "needs_splits": "an Inception Score in {splits} splits needs two images per split, {least} in all",
    "against": _against,
    "against_validation": "against {count} real validation images",
    "against_single": "against {count} real validation images of one object",
    "strangers": "{strangers} of {images} prompts are not of {world}, the real images are",
    "biased": "n < {per_feature} x {features} features: biased upwards at this n, compare only with the same n",
    "biases": "n < {per_feature} x {features} features: both values are biased upwards, by amounts that can differ, so"
    " p does not show which one is lower",
    "subsets": "{subsets} subsets of {size}",
    "sides": "{images} images to {real}",
    "sides_differ": "both shares depend on the two numbers of images, compare only runs with the same",
    "compared": "{images} of them are compared",
    "own_pairs": "n = {images} adds {bias:.4f} by the pairs of an image with itself",
    "splits_biased": "n = {images} in {splits} splits for {classes} classes: biased downwards, compare only runs of the"
    " same n",
    "classes": "of {classes} classes of shape and colour",
    "classes_biased": "n = {images}: biased downwards, compare only runs of the same n",
    "cut_captions": "{cut} of {captions} captions have more than {tokens} tokens and lose their end",
    "class_names": "the prompts are names of classes, the model has seen whole captions: compare only such runs",
    "negative": "the mean cosine is negative, which counts as 0",
    "attributes": _attributes,
    "tasks": lambda v: f"mean of the {len(v['images'])} tasks of {', '.join(map(str, v['images']))} images",
    "tasks_missing": lambda v: f"the mean of all tasks, and no prompt poses {', '.join(v['tasks'])}",
    "not_posed": "no prompt poses it",
    "not_asked": "no prompt asks for it",
    "dpg_counts": _counts,
    "dpg_answers": _answers,
    "dpg_missing": "no prompt has all the questions that its questions depend on",
}

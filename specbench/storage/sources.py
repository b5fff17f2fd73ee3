"""Where the weights and data of others come from: what `specbench fetch` gets, and what an absent file's error names.

A repository is on the Hugging Face hub unless another site is given. It is pinned to a commit where a public page of
that commit lists the files or pins them; else it is `main`, whose commit a fetch records. Each entry says who names the
repository.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

#: A licence -> the restriction that is printed with it; the others are permissive.
CHAMELEON = "Chameleon Research License"
DEEPSEEK = "DeepSeek Model License"
NVIDIA = "NVIDIA Open Model License"
NON_COMMERCIAL = {CHAMELEON: "non-commercial: research use only, also of what is made with the weights"}


@dataclass(frozen=True)
class Part:
    """One folder of a model and the repository that fills it.

    `files` are patterns of file names, each of which must be there ("a|b": a, else b); `also` is taken where it is
    there. All of them lie in `subfolder` of the repository. `md5` and `sha256` hold published checksums. With `sizes`,
    which holds the size of every file, the files are those of a release of a GitHub repository, `revision` its tag;
    with `address`, too, they lie at that address, `revision` is the date of their last change and `repository` a name.
    """

    repository: str
    files: tuple[str, ...]
    licence: str
    revision: str = "main"
    also: tuple[str, ...] = ()
    subfolder: str = ""
    md5: Mapping[str, str] = field(default_factory=dict)
    sha256: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    address: str = ""

    @property
    def pinned(self) -> bool:
        """Whether the files are those of one commit or of a release, today and later; else they are of a branch."""
        return bool(self.sizes) or re.fullmatch(r"[0-9a-f]{40}", self.revision) is not None


@dataclass(frozen=True)
class ModelSource:
    """`parts` is what every run needs, `drafters` what a drafter needs in addition, both by folder; `sizes` holds the
    target of each other size, for which no drafter is published; `instead` holds repositories with another layout of
    the same target."""

    parts: Mapping[str, Part]
    drafters: Mapping[str, Part] = field(default_factory=dict)
    sizes: Mapping[str, Part] = field(default_factory=dict)
    instead: tuple[Part, ...] = ()


def hugging_face(repository: str, licence: str, revision: str = "main", *also: str) -> Part:
    """A model in the layout of transformers: one file of tensors, or shards with their index. Never its code."""
    return Part(
        repository,
        ("config.json", "*.safetensors|*.bin"),
        licence,
        revision,
        ("generation_config.json", "*.index.json", "tokenizer*.json", "special_tokens_map.json", "merges.txt", *also),
    )


# The README of FoundationVision/LlamaGen (commit ce98ec4) links each of these files.

#: Its one commit with files, which a public project pins the tokenizer to.
_T2I = ("peizesun/llamagen_t2i", "276f5c5a3d915b922899a03f1912605531574747")
_C2I = ("FoundationVision/LlamaGen", "dc1fec543f6ac82e0cb9bbed058d5eaa26a30e6e")

_T5 = Part(
    "google/flan-t5-xl",
    ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json", "model-*.safetensors"),
    "Apache 2.0",
    "7d6315df2c2fb742f0f5b556879d730926ca9001",
    ("generation_config.json", "special_tokens_map.json", "spiece.model"),
)


def _t2i(file: str, drafter: str, converted: str) -> ModelSource:
    """The drafter and the converted target are named in the README of jadohu/LANTERN (commit 3a56e45), which
    publishes its work under the licence of Chameleon."""

    def part(name: str) -> Part:
        return Part(_T2I[0], (name,), "MIT", _T2I[1])

    return ModelSource(
        {"target": part(file), "tokenizer": part("vq_ds16_t2i.pt"), "text": _T5},
        {"eagle": hugging_face(drafter, CHAMELEON)},
        instead=(hugging_face(converted, CHAMELEON),),
    )


def _c2i(file: str, draft: str | None = None) -> ModelSource:
    def part(name: str) -> Part:
        return Part(_C2I[0], (name,), "MIT", _C2I[1])

    drafters = {"draft": part(draft)} if draft else {}
    return ModelSource({"target": part(file), "tokenizer": part("vq_ds16_c2i.pt")}, drafters)


# Lumina-mGPT: the README of Alpha-VLLM/Lumina-mGPT (commit 678b55e). Anole: those of GAIR-NLP/anole (commit 16b958a),
# which names GAIR/Anole-7b-v0.1 and Chameleon's licence, and of jadohu/LANTERN, which names leloy/Anole-7b-v0.1-hf.
# LANTERN's author names the drafter of Lumina-mGPT in the repository's first issue, and calls the code for that model
# unfinished; its page has the licence and the commit.

#: Chameleon's own tokenizers, as GAIR publishes them with Anole. The checksums are those of the list (checklist.chk)
#: that comes with them and with other copies of Meta's release.
_CHAMELEON = Part(
    "GAIR/Anole-7b-v0.1",
    ("text_tokenizer.json", "vqgan.ckpt", "vqgan.yaml"),
    CHAMELEON,
    "c5710623b72b402fd9ec0816e8d9b1a5c383f595",
    subfolder="tokenizer",
    md5={
        "text_tokenizer.json": "170a932b687671a4e676f3bf69147295",
        "vqgan.ckpt": "1a559fb5dab4d351d19496ae89da1db1",
        "vqgan.yaml": "25724c8110d6adabc9130a123b4b922e",
    },
)

_LUMINA = hugging_face("Alpha-VLLM/Lumina-mGPT-7B-768", CHAMELEON, "9624463a82ea5ce814af9b561dcd08a31082c3af")
_ANOLE = hugging_face("leloy/Anole-7b-v0.1-hf", CHAMELEON, "4f2c679ff6eb0291e7813502467b30e7835bd199")

# The README of baaivision/Emu3 (commit f6ea9aa); Emu3-Gen-hf is transformers' layout of the same weights.

_EMU3 = hugging_face(
    "BAAI/Emu3-Gen", "Apache 2.0", "705a7b5c0e61d01d38effea6083c7b9b21aa0400", "emu3.tiktoken", "emu3_vision_tokens.txt"
)
_EMU3_VISION = hugging_face("BAAI/Emu3-VisionTokenizer", "Apache 2.0", "c81f916ad371289e205310a7539255e8a9396488")

# The README of deepseek-ai/Janus (commit 1daa72f) names the first two; those of deepseek-community are transformers'
# layout of the same weights, which its documentation of Janus names. The code is under MIT, the weights under
# DeepSeek's model licence.


def _janus(repository: str) -> Part:
    return hugging_face(repository, DEEPSEEK)


_JANUS_1B = _janus("deepseek-ai/Janus-Pro-1B")

# SimpleAR: the README of wdrink/SimpleAR (commit d56b6e5) names the author's checkpoints, of which those after
# reinforcement learning are taken, and NVIDIA's tokenizer.


def _simplear(size: str) -> Part:
    return hugging_face(f"Daniel0724/SimpleAR-{size}-RL", "see its page", "main", "vocab.json", "added_tokens.json")


_COSMOS = Part("nvidia/Cosmos-1.0-Tokenizer-DV8x16x16", ("encoder.jit", "decoder.jit"), NVIDIA)

# The README of LTH14/mar (commit d8f2dcd) names this repository. Its files hold one set of tensors each, of the size of
# one model; that it is the averaged one is not written there. The README also links checkpoint-last.pth on a file
# share, without checksums, and its util/download.py kl16.ckpt: put by hand, these are read, too.


def _mar(file: str, draft: str | None = None) -> ModelSource:
    def part(name: str) -> Part:
        return Part("jadechoghari/mar", (name,), "MIT", "806eb8e7d64d6895774aaf4467c27578acb93b92")

    drafters = {"draft": part(draft)} if draft else {}
    return ModelSource({"target": part(file), "tokenizer": part("kl16.safetensors")}, drafters)


MODELS: dict[str, ModelSource] = {
    "llamagen_xl": _t2i("t2i_XL_stage1_256.pt", "jadohu/llamagen_drafter", "jadohu/LlamaGen-T2I"),
    "llamagen_xl_512": _t2i("t2i_XL_stage2_512.pt", "jadohu/llamagen2_drafter", "jadohu/LlamaGen-T2I-2"),
    "llamagen_l": _c2i("c2i_L_384.pt"),
    "llamagen_xl_c2i": _c2i("c2i_XL_384.pt", "c2i_L_384.pt"),
    "llamagen_3b": _c2i("c2i_3B_384.pt", "c2i_L_384.pt"),
    "lumina_mgpt": ModelSource(
        {"target": _LUMINA, "tokenizer": _CHAMELEON},
        {
            "eagle": hugging_face(
                "sihwanpark/LANTERN-Lumina-mGPT-7B-768", "Apache 2.0", "d7467f035101cdee141c1aebf83b8fa1cfa819af"
            )
        },
        sizes={size: hugging_face(f"Alpha-VLLM/Lumina-mGPT-7B-{size}", CHAMELEON) for size in ("512", "1024")},
    ),
    "lumina_mgpt2": ModelSource(
        {
            "target": hugging_face("Alpha-VLLM/Lumina-mGPT-2.0", "Apache 2.0"),
            "tokenizer": Part("ai-forever/MoVQGAN", ("movqgan_270M.ckpt",), "see its page"),
        }
    ),
    "anole": ModelSource(
        {"target": _ANOLE, "tokenizer": _CHAMELEON}, {"eagle": hugging_face("jadohu/anole_drafter", CHAMELEON)}
    ),
    "emu3": ModelSource(
        {"target": _EMU3, "tokenizer": _EMU3_VISION}, instead=(hugging_face("BAAI/Emu3-Gen-hf", "Apache 2.0"),)
    ),
    "janus_pro_1b": ModelSource({"target": _JANUS_1B}, instead=(_janus("deepseek-community/Janus-Pro-1B"),)),
    "janus_pro_7b": ModelSource(
        {"target": _janus("deepseek-ai/Janus-Pro-7B")},
        {"draft": _JANUS_1B},
        instead=(_janus("deepseek-community/Janus-Pro-7B"),),
    ),
    "simplear_05b": ModelSource({"target": _simplear("0.5B"), "tokenizer": _COSMOS}),
    "simplear_15b": ModelSource({"target": _simplear("1.5B"), "tokenizer": _COSMOS}, {"draft": _simplear("0.5B")}),
    "mar_b": _mar("mar-base.safetensors"),
    "mar_l": _mar("mar-large.safetensors", "mar-base.safetensors"),
    "mar_h": _mar("mar-huge.safetensors", "mar-base.safetensors"),
}


def _evaluator(repository: str, revision: str, file: str, sha256: str, licence: str = "Apache 2.0") -> Part:
    return Part(repository, (file,), licence, revision, sha256={file: sha256})


def _clip(patch: int, revision: str, sha256: str) -> Part:
    """OpenAI's CLIP (released under the MIT licence) in open_clip's layout, which open_clip 3.3 names (pretrained.py).
    Commits and checksums are those that several public projects pin these files to."""
    repository = f"timm/vit_base_patch{patch}_clip_224.openai"
    return _evaluator(repository, revision, "open_clip_model.safetensors", sha256)


#: Folder below the one of metrics -> what fills it. `Metric.parts` says which of them a metric reads.
EVALUATORS: dict[str, Part] = {
    # The weights of the original FID, converted; the README of mseitzer/pytorch-fid and torch-fidelity 0.4 name this
    # file, torch-fidelity by a copy of it. Its name holds the first digits of its checksum.
    "inception": Part(
        "mseitzer/pytorch-fid",
        ("pt_inception-2015-12-05-6726825d.pth",),
        "Apache 2.0",
        "fid_weights",
        sha256={
            "pt_inception-2015-12-05-6726825d.pth": "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
        },
        sizes={"pt_inception-2015-12-05-6726825d.pth": 95628359},
    ),
    "clip_b32": _clip(
        32,
        "a6f597a30f7b82c51704746581f9a4e41421e878",
        "e6d1bd7789aa45192b3bf90570a789b478bae1b74ebcce7eddd908e83a2b7c31",
    ),
    "clip_b16": _clip(
        16,
        "977e3dd0ec55ab8da155f2fbeb6b5f54948b6e3d",
        "4b8699299b1e8997753c64b052ba32031449d5d853f55a039148560ee02b820f",
    ),
    # hubconf.py of facebookresearch/dinov2 takes this file, whose checksum several public projects pin.
    "dinov2": Part(
        "facebookresearch/dinov2",
        ("dinov2_vitl14_pretrain.pth",),
        "Apache 2.0",
        "2023-04-13",
        sha256={"dinov2_vitl14_pretrain.pth": "d5383ea8f4877b2472eb973e0fd72d557c7da5d3611bd527ceeb1d7162cbf428"},
        sizes={"dinov2_vitl14_pretrain.pth": 1217586395},
        address="https://dl.fbaipublicfiles.com/dinov2/dinov2_vitl14",
    ),
    # OpenAI's ViT-L/14 at 336 pixels (released under the MIT licence) in transformers' layout. Commit and checksum are
    # those that several public projects pin.
    "clip_l14_336": _evaluator(
        "openai/clip-vit-large-patch14-336",
        "ce19dc912ca5cd21c8a653c79e251e808ccabcd1",
        "pytorch_model.bin",
        "c6032c2e0caae3dc2d4fba35535fa6307dbb49df59c7e182b1bc4b3329b81801",
        "MIT",
    ),
    # OpenAI's ViT-L/14 (released under the MIT licence) in transformers' layout, which several public projects pin.
    "clip_l14": _evaluator(
        "openai/clip-vit-large-patch14",
        "32bd64288804d66eefd0ccbe215aa642df71cc41",
        "model.safetensors",
        "a2bf730a0c7debf160f7a6b50b3aaf3703e7e88ac73de7a314903141db026dcb",
        "MIT",
    ),
    # The hub's page of this commit lists the file; no public page shows its checksum.
    "mask2former": Part(
        "facebook/mask2former-swin-small-coco-instance",
        ("pytorch_model.bin",),
        "see its page",
        "f77f179fc62b98f6734481ebbef5bceeb1e7f10b",
    ),
    # The package image-reward 1.5 names this repository by its older owner, THUDM.
    "image_reward": _evaluator(
        "zai-org/ImageReward",
        "9fabc279a94f082f9eb130070cac021569dd16dc",
        "ImageReward.pt",
        "d71dc8d4912bc633c06ab8ef1ef6a81e8199d4369f14b47b29baf1d19de561f6",
    ),
    "image_reward/text": _evaluator(
        "google-bert/bert-base-uncased",
        "86b5e0934494bd15c9632b12f734a8a67f723594",
        "vocab.txt",
        "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
    ),
    # The README of yuvalkirstain/PickScore names this repository; several public projects pin the commit, no public
    # page shows the file's checksum. The hub gives it to a fetch, which records it.
    "pickscore": Part(
        "yuvalkirstain/PickScore_v1",
        ("model.safetensors",),
        "see its page",
        "a4e4367c6dfa7288a00c550414478f865b875800",
    ),
    # hpsv2/utils.py of tgxs002/HPSv2 (commit 1d34ebf) names this repository and both files.
    "hpsv2": _evaluator(
        "xswu/HPSv2",
        "697403c78157020a1ae59d23f111aa58ced35b0a",
        "HPS_v2_compressed.pt",
        "07cb0d20626232204ca3a6ec53ff5984e7e53212a8a7b0e0ec2bac1bdaf125a1",
    ),
    "hpsv21": _evaluator(
        "xswu/HPSv2",
        "697403c78157020a1ae59d23f111aa58ced35b0a",
        "HPS_v2.1_compressed.pt",
        "c57a38fb4a2f7e7c15bf00da2ea377cdf165448b4dd1052a484c215a998c9837",
    ),
    # hpsv3/inference.py of MizzenAI/HPSv3 names the file, hpsv3/config/HPSv3_7B.yaml the model whose tokenizer it has.
    # Several public projects pin both commits; no public page shows the checksums.
    "hpsv3": Part("MizzenAI/HPSv3", ("HPSv3.safetensors",), "Apache 2.0", "4f81e3e09edd82fe3c5f636444c721b592a735ca"),
    "hpsv3/text": Part(
        "Qwen/Qwen2-VL-7B-Instruct", ("tokenizer.json",), "Apache 2.0", "eed13092ef92e448dd6875b2a00151bd3f7db0ac"
    ),
    # The README of linzhiqiu/t2v_metrics names these two. No public page pins their commits. Every Flan-T5 has the
    # tokenizer of the one that LlamaGen uses.
    "vqascore": hugging_face("zhiqiulin/clip-flant5-xxl", "Apache 2.0"),
    "vqascore_xl": hugging_face("zhiqiulin/clip-flant5-xl", "Apache 2.0"),
    "vqascore_text": Part(_T5.repository, ("tokenizer.json",), "Apache 2.0", _T5.revision),
}


@dataclass(frozen=True)
class File:
    """A file at a plain address. With `unpack`, it is a zip of which these members are kept, and the rest is not."""

    address: str
    size: int
    sha256: str
    unpack: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.address.rpartition("/")[2]


@dataclass(frozen=True)
class Data:
    files: tuple[File, ...]
    licence: str


def _coco(year: int, images: tuple[int, str], annotations: tuple[int, str]) -> Data:
    root = "http://images.cocodataset.org"
    return Data(
        (
            File(
                f"{root}/annotations/annotations_trainval{year}.zip",
                *annotations,
                (f"annotations/captions_val{year}.json", f"annotations/captions_train{year}.json"),
            ),
            File(f"{root}/zips/val{year}.zip", *images, (f"val{year}/*.jpg",)),
        ),
        "annotations CC BY 4.0; the images under the terms that Flickr shows for each",
    )


#: Sizes and checksums of COCO's archives are those that tensorflow/datasets lists (url_checksums/coco.txt).
DATA: dict[str, Data] = {
    "coco2017": _coco(
        2017,
        (815585330, "4f7e2ccb2866ec5041993c9cf2a952bbed69647b115d0f74da7ce8f4bef82f05"),
        (252907541, "113a836d90195ee1f884e704da6304dfaaecff1f023f49b6ca93c4aaae470268"),
    ),
    "coco2014": _coco(
        2014,
        (6645013297, "fe9be816052049c34717e077d9e34aa60814a55679f804cd043e3cbee3b9fde0"),
        (252872794, "031296bbc80c45a1d1f76bf9a90ead27e94e99ec629208449507a4917a3bf009"),
    ),
    "parti": Data(
        (
            File(
                "https://raw.githubusercontent.com/google-research/parti/"
                "2c99f6652cbc7f0d0441aa91f4c7e7055bcb0071/PartiPrompts.tsv",
                123107,
                "fab29e41bb512a169b56acab4cf2a41dcb675e285df2efcde6640c7dd3c440eb",
            ),
        ),
        "Apache 2.0",
    ),
}


def part_of(entry: ModelSource, name: str) -> Part | None:
    return entry.parts.get(name) or entry.drafters.get(name)


def listing(parts: Mapping[str, Part]) -> str:
    """The folder of each part's files, as text."""
    return ", ".join(f"{names(part)} into {name}/" for name, part in parts.items())


def names(part: Part) -> str:
    """A part's files as text."""
    folder = f"{part.repository}/{part.subfolder}" if part.subfolder else part.repository
    if any(c in name for name in part.files for c in "*|"):
        return f"the files of {folder}"
    return f"{', '.join(part.files)} of {folder}"

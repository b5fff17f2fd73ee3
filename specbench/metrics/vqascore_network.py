"""CLIP-FlanT5 (Lin et al. 2024): Flan-T5 that reads the patches of an image by CLIP ViT-L/14 at 336 pixels.

Patches are the states before CLIP's last layer, without the class token, through two linear layers. They stand between
two texts, as in the authors' code, which ends both with an end mark.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import T5Config, T5Model

from specbench.errors import UsageError
from specbench.metrics import clip, weights
from specbench.models.loading import official
from specbench.models.loading.naming import ParameterSlice, Table

#: Flan-T5's sizes, by the name of the model.
SIZES: dict[str, dict[str, int]] = {
    "xxl": {"d_model": 4096, "d_ff": 10240, "num_heads": 64, "num_layers": 24},
    "xl": {"d_model": 2048, "d_ff": 5120, "num_heads": 32, "num_layers": 24},
}
VOCABULARY = 32100  # entries of the tokenizer, to which the authors' code cuts the network's tables of 32,128
_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, and"
    " polite answers to the user's questions. USER: "
)
_QUESTION = '\nDoes this figure show "{}"? Please answer yes or no. ASSISTANT: '
_ANSWER = "Yes"


class CLIPFlanT5(nn.Module):
    """Flan-T5, and two layers between CLIP's states and its own. The head has weights of its own and reads the
    decoder's states unscaled, which not every release of transformers builds from a configuration."""

    def __init__(self, size: dict[str, int], width: int) -> None:
        super().__init__()
        dim = size["d_model"]
        self.language = T5Model(T5Config(**size, d_kv=64, vocab_size=VOCABULARY, feed_forward_proj="gated-gelu"))
        self.lm_head = nn.Linear(dim, VOCABULARY, bias=False)
        self.mm_projector = nn.Sequential(nn.Linear(width, dim), nn.GELU(), nn.Linear(dim, dim))

    def forward(self, states: Tensor, before: Tensor, behind: Tensor, answer: Tensor) -> Tensor:
        """states (P, width) of an image's patches; ids of the text before and behind it and of the answer, (T,) int64
        each, with their end marks -> (), the geometric mean of the probabilities of the answer's tokens, float32."""
        embed = self.language.get_input_embeddings()
        inputs = torch.cat([embed(before), self.mm_projector(states), embed(behind)])[None]
        mask = torch.ones(inputs.shape[:2], dtype=torch.long, device=inputs.device)
        said = torch.cat([torch.zeros_like(answer[:1]), answer[:-1]])[None]  # begins with the token of the padding, 0
        found = self.language(inputs_embeds=inputs, attention_mask=mask, decoder_input_ids=said, use_cache=False)
        logits = self.lm_head(found.last_hidden_state)[0].float()
        mean: Tensor = logits.log_softmax(-1).gather(1, answer[:, None]).mean()
        return mean.exp()


def load(folder: Path, device: str, size: str, dtype: torch.dtype = torch.bfloat16) -> CLIPFlanT5:
    """The network of a folder with the published files. Raises UsageError for files with other tensors."""
    source = official.open_source(folder)

    def build() -> CLIPFlanT5:
        return CLIPFlanT5(SIZES[size], clip.L14_336["hidden_size"])

    with torch.device("meta"):
        names = build().state_dict()
    return official.load(build, source, table(names), device, dtype, _UNUSED)


#: Other names of the table of embeddings, and CLIP's tower, which the authors' code takes from OpenAI's file.
_UNUSED = [r"((en|de)coder\.)?embed_tokens\.weight", r"vision_tower\..*"]


def table(names: Any) -> Table:
    """The file has T5's names and mm_projector.*; of the tables over the vocabulary the first rows are taken."""
    first = torch.arange(VOCABULARY)
    found: Table = {}
    for name in names:
        theirs = name.removeprefix("language.")
        if not theirs.endswith("embed_tokens.weight"):  # tied to shared.weight
            over_vocabulary = theirs in ("shared.weight", "lm_head.weight")
            found[theirs] = ParameterSlice(name, pick=first if over_vocabulary else None)
    return found


class Questions:
    """Captions as questions, from the tokenizer.json of Flan-T5."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError for a file that is not this tokenizer."""
        self._tokenizer = weights.tokenizer(path)
        if self._tokenizer.get_vocab_size() != VOCABULARY:
            raise UsageError(f"{path} is not the tokenizer of Flan-T5, {VOCABULARY} entries; fetch it again")

    def __call__(self, caption: str) -> tuple[Tensor, Tensor, Tensor]:
        """Ids (T,) int64 of the text before the image, of the question behind it, and of the answer."""
        before, behind, answer = self._tokenizer.encode_batch([_SYSTEM, _QUESTION.format(caption), _ANSWER])
        return torch.tensor(before.ids), torch.tensor(behind.ids), torch.tensor(answer.ids)

"""CLIP-FlanT5 (Lin et al. 2024): Flan-T5 that reads image patches from CLIP ViT-L/14 at 336 pixels.

The patches are the states before CLIP's last layer, without the class token, mapped by two linear layers. As in the
authors' code, they are placed between two texts, which both end with an end token.
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
VOCABULARY = 32100  # entries of the tokenizer; the authors' code cuts the network's tables of 32,128 to this size
_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, and"
    " polite answers to the user's questions. USER: "
)
_QUESTION = '\nDoes this figure show "{}"? Please answer yes or no. ASSISTANT: '
_ANSWER = "Yes"


class CLIPFlanT5(nn.Module):
    """Flan-T5, and two layers from CLIP's states to Flan-T5's. The head has separate weights and reads the decoder's
    states unscaled; not all releases of transformers can build this from a configuration."""

    def __init__(self, size: dict[str, int], width: int) -> None:
        super().__init__()
        dim = size["d_model"]
        self.language = T5Model(T5Config(**size, d_kv=64, vocab_size=VOCABULARY, feed_forward_proj="gated-gelu"))
        self.lm_head = nn.Linear(dim, VOCABULARY, bias=False)
        self.mm_projector = nn.Sequential(nn.Linear(width, dim), nn.GELU(), nn.Linear(dim, dim))

    def forward(self, states: Tensor, before: Tensor, after: Tensor, answer: Tensor) -> Tensor:
        """states (P, width) of an image's patches; ids (T,) int64 of the texts before and after it and of the answer,
        with their end tokens -> () float32, the geometric mean of the probabilities of the answer's tokens."""
        embed = self.language.get_input_embeddings()
        inputs = torch.cat([embed(before), self.mm_projector(states), embed(after)])[None]
        mask = torch.ones(inputs.shape[:2], dtype=torch.long, device=inputs.device)
        decoder_ids = torch.cat([torch.zeros_like(answer[:1]), answer[:-1]])[None]  # begins with the padding token, 0
        output = self.language(
            inputs_embeds=inputs, attention_mask=mask, decoder_input_ids=decoder_ids, use_cache=False
        )
        logits = self.lm_head(output.last_hidden_state)[0].float()
        mean: Tensor = logits.log_softmax(-1).gather(1, answer[:, None]).mean()
        return mean.exp()


def load(folder: Path, device: str, size: str, dtype: torch.dtype = torch.bfloat16) -> CLIPFlanT5:
    """The network of a folder of published files. Raises UsageError for files with other tensors."""
    source = official.open_source(folder)

    def build() -> CLIPFlanT5:
        return CLIPFlanT5(SIZES[size], clip.L14_336["hidden_size"])

    with torch.device("meta"):
        names = build().state_dict()
    return official.load(build, source, table(names), device, dtype, _UNUSED)


#: Duplicates of the embedding table, and CLIP's tower, which the authors' code reads from OpenAI's file.
_UNUSED = [r"((en|de)coder\.)?embed_tokens\.weight", r"vision_tower\..*"]


def table(names: Any) -> Table:
    """The file has T5's names and mm_projector.*. Only the first rows of the tables over the vocabulary are used."""
    rows = torch.arange(VOCABULARY)
    mapping: Table = {}
    for name in names:
        stored_name = name.removeprefix("language.")
        if not stored_name.endswith("embed_tokens.weight"):  # tied to shared.weight
            over_vocabulary = stored_name in ("shared.weight", "lm_head.weight")
            mapping[stored_name] = ParameterSlice(name, pick=rows if over_vocabulary else None)
    return mapping


class Questions:
    """Captions as questions, from the tokenizer.json of Flan-T5."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError for a file that is not this tokenizer."""
        self._tokenizer = weights.tokenizer(path)
        if self._tokenizer.get_vocab_size() != VOCABULARY:
            raise UsageError(f"{path} is not the tokenizer of Flan-T5, {VOCABULARY} entries; fetch it again")

    def __call__(self, caption: str) -> tuple[Tensor, Tensor, Tensor]:
        """Ids (T,) int64 of the text before the image, of the question after it, and of the answer."""
        before, after, answer = self._tokenizer.encode_batch([_SYSTEM, _QUESTION.format(caption), _ANSWER])
        return torch.tensor(before.ids), torch.tensor(after.ids), torch.tensor(answer.ids)

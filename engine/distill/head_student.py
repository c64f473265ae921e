"""An EAGLE-3 head of one layer that learns from the target's hidden states, and from its own as it will have to draft from.

Training-time test (Li et al. 2025, arXiv 2503.01840): the head drafts on along the text. Step 0 reads the target's states; step
k what step k - 1 gave. A draft that begins after token r sees the rows up to r as step 0 made them, and behind these one row
per step: exactly the keys that are there when it is served (`engine.propose.heads.source`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from engine.distill.files import disk_errors
from engine.distill.shards import Text
from engine.distill.states import read_states
from engine.distill.student import Losses, Said, distillation_loss, mixed_precision
from engine.errors import ConfigError, ModelError
from engine.models import LoadedModel
from engine.propose.heads.eagle import EagleHead, head_config
from engine.verify.taps import Taps

NUM_STEPS = 3
"""Tokens that are drafted on from each position in training. Every one costs as much as the first."""
LEAST_TOKENS = 3
"""Of a text: one row reads two and foresees the third."""
STEP_WEIGHT = 0.8
"""Of a step's loss beside the one before, as EAGLE-3's training weighs them: later tokens matter only if the first are kept."""


class HeadStudent:
    """Trains a head. Its embedding and its rows of ``lm_head`` are the target's and stay so, as a `DraftStudent`'s do."""

    def __init__(self, head: EagleHead, dtype: torch.dtype):
        self._head = head
        self._dtype = dtype
        index = torch.full((head.vocab_size,), -1)
        index[head.draft_ids.cpu()] = torch.arange(head.draft_vocab_size)
        self._draft_index = index

    @classmethod
    def build(cls, target: LoadedModel, *, draft_ids: Sequence[int], dtype: torch.dtype, seed: int) -> "HeadStudent":
        """A student of a target loaded in float32, on the target's device; ``dtype`` is what the head is stored in."""
        torch.manual_seed(seed)
        embedding = target.model.get_input_embeddings().weight.detach()
        head = EagleHead.untrained(target.config, embedding.cpu(), draft_ids=draft_ids)
        _inherit(head, target.model)
        return cls(head.to(target.device).train(), dtype)

    @property
    def module(self) -> nn.Module:
        """The head."""
        return self._head

    def loss(self, texts: Sequence[Text]) -> Losses:
        """All steps from every position after which the target wrote something."""
        device = self._head.lm_head.weight.device
        drafts = Drafts.of(texts, device)
        said = self._cut(Said.of(texts)).to(device)
        found = []
        with mixed_precision(device, self._dtype):
            hidden = self._head.fuse(drafts.states.to(self._head.fc.weight.dtype))
            attention = _Attention(drafts)
            hidden = self._head(drafts.next_ids, hidden, drafts.positions, attention.along_texts)[drafts.starts]
            for step in range(NUM_STEPS):
                if step > 0:
                    hidden = self._head(
                        drafts.ids_at(step), hidden, drafts.positions[drafts.starts] + step, attention.along_drafts
                    )
                is_told = drafts.left > step
                rows = drafts.said[is_told] + step
                found.append(distillation_loss(self._head.logits(hidden[is_told]), said.at(rows)))
        return _together(found)

    def save(self, folder: Path) -> None:
        """Configuration and weights, without the target's embedding, in the dtype that the device computes in.

        Raises OSError.
        """
        with disk_errors():
            self._head.save(folder, dtype=self._dtype, with_embedding=False)

    def _cut(self, said: Said) -> Said:
        """In draft ids; what the head cannot say is -1 and does not count."""
        top = self._draft_index[said.top_ids]
        return Said(
            self._draft_index[said.next_ids],
            top.clamp_min(0),
            torch.where(top >= 0, said.top_logprobs, torch.full_like(said.top_logprobs, -torch.inf)),
        )


@dataclass(frozen=True)
class Drafts:
    """The rows of several texts, one behind the other, and where drafts begin in them.

    Row i of a text is (states of token i, token i + 1) -> token i + 2: a text of L tokens has L - 2 rows.
    """

    states: Tensor
    """[T, H * layers]."""
    next_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64: i."""
    text_of: Tensor
    """[T] int64: number of the text."""
    starts: Tensor
    """[N] int64: the rows that drafts begin at, that is where the target wrote what comes out."""
    said: Tensor
    """[N] int64: which of the target's tokens (`Said`) that is."""
    left: Tensor
    """[N] int64: tokens of the target from there to the end of the text, this one included."""

    @classmethod
    def of(cls, texts: Sequence[Text], device: torch.device) -> "Drafts":
        """Pack texts; raises ValueError for one without states."""
        states, next_ids, positions, text_of, starts, said, left = [], [], [], [], [], [], []
        num_rows, num_said = 0, 0
        for number, text in enumerate(texts):
            rows = max(len(text.tokens) - 2, 0)
            states.append(read_states(text)[:rows])
            next_ids.append(torch.from_numpy(text.tokens[1 : rows + 1]).long())
            positions.append(torch.arange(rows))
            text_of.append(torch.full((rows,), number))
            skipped = max(2 - text.prompt_length, 0)  # nothing can be drafted before two tokens are there
            first = text.prompt_length - 2 + skipped
            starts.append(num_rows + torch.arange(first, rows))
            said.append(num_said + torch.arange(skipped, text.num_output))
            left.append(text.num_output - torch.arange(skipped, text.num_output))
            num_rows += rows
            num_said += text.num_output
        parts = (states, next_ids, positions, text_of, starts, said, left)
        return cls(*(torch.cat(part).to(device) for part in parts))

    def ids_at(self, step: int) -> Tensor:
        """[N]: the token that each draft reads at a step: of the text; anything where that has ended."""
        return self.next_ids[(self.starts + step).clamp_max(len(self.next_ids) - 1)]


@dataclass
class _Attention:
    """Keys and values of all steps so far."""

    drafts: Drafts
    keys: list[Tensor] = field(default_factory=list)
    """Of step 0 [B, Hkv, L, D]; of every other step [N, Hkv, D]."""
    values: list[Tensor] = field(default_factory=list)

    def along_texts(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """`Attend` of step 0: within each text, each row over those before it and itself."""
        rows = self.drafts.text_of, self.drafts.positions
        query, keys, values = (_padded(part, *rows) for part in (query.transpose(0, 1), keys, values))
        self.keys, self.values = [keys], [values]
        out = nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)[rows].flatten(1)

    def along_drafts(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """`Attend` of a later step: over the text up to where the draft began, and the draft's own rows."""
        self.keys.append(keys.transpose(0, 1))
        self.values.append(values.transpose(0, 1))
        starts = self.drafts.starts
        text_of, last = self.drafts.text_of[starts], self.drafts.positions[starts]
        column = last - _firsts(last, text_of)[text_of]
        groups = query.shape[1] // keys.shape[0]
        text_keys, text_values = (part.repeat_interleave(groups, dim=1) for part in (self.keys[0], self.values[0]))
        own_keys, own_values = (
            torch.stack(part[1:], dim=2).repeat_interleave(groups, dim=1) for part in (self.keys, self.values)
        )  # [N, Hq, steps, D]
        query = query * query.shape[-1] ** -0.5
        text_query = _padded(query.transpose(0, 1), text_of, column)
        over_text = (text_query @ text_keys.transpose(2, 3)).transpose(1, 2)[text_of, column]  # [N, Hq, L]
        is_ahead = torch.arange(over_text.shape[-1], device=last.device) > last[:, None]
        over_text = over_text.masked_fill(is_ahead[:, None], -torch.inf)
        over_own = (own_keys @ query[..., None])[..., 0]
        weights = torch.cat((over_text, over_own), dim=-1).softmax(dim=-1)
        of_text, of_own = torch.split(weights, [over_text.shape[-1], over_own.shape[-1]], dim=-1)
        mixed: Tensor = (_padded(of_text.transpose(0, 1), text_of, column) @ text_values).transpose(1, 2)[text_of, column]
        return (mixed + (of_own[:, :, None] @ own_values)[:, :, 0]).flatten(1)


def check_fits(config: Any, name: str) -> None:
    """Raises `ConfigError` when a target of this configuration leaves no hidden states, or no head has its widths."""
    try:
        with torch.device("meta"):  # shapes without memory
            EagleHead(head_config(config, num_draft_ids=2))
            Taps(()).hook(AutoModelForCausalLM.from_config(config))
    except (AttributeError, ModelError) as error:
        raise ConfigError(f"--target {name}: no head can be made for this kind of model ({error}): use --kind draft") from None


def most_frequent(texts: Iterable[Text], count: int, vocab_size: int) -> list[int]:
    """The ``count`` ids that the target writes most, by its own probabilities beside what it wrote; then the smallest ids."""
    weight = np.zeros(vocab_size)
    for text in texts:
        np.add.at(weight, text.tokens[text.prompt_length :], 1.0)
        np.add.at(weight, text.top_ids, np.exp(text.top_logprobs))
    return sorted(int(token) for token in np.argsort(-weight, kind="stable")[:count])


def _padded(part: Tensor, text_of: Tensor, column: Tensor) -> Tensor:
    """[heads, T, D] -> [B, heads, longest, D], zero where a text has no row."""
    shape = (int(text_of.max()) + 1, int(column.max()) + 1, part.shape[0], part.shape[2])
    return part.new_zeros(shape).index_put((text_of, column), part.transpose(0, 1)).transpose(1, 2)


def _firsts(values: Tensor, text_of: Tensor) -> Tensor:
    """[B]: the smallest value of each text."""
    most = torch.full((int(text_of.max()) + 1,), torch.iinfo(values.dtype).max, device=values.device)
    return most.scatter_reduce(0, text_of, values, "amin")


def _together(steps: Sequence[Losses]) -> Losses:
    """Weighed sums; agreement and overlap are those of the first step, whose share of acceptance is the largest."""
    weights = [STEP_WEIGHT**step for step in range(len(steps))]
    scale = sum(weights)
    return Losses(
        total=torch.stack([weight * own.total for weight, own in zip(weights, steps, strict=True)]).sum() / scale,
        divergence=sum(weight * own.divergence for weight, own in zip(weights, steps, strict=True)) / scale,
        agreement=steps[0].agreement,
        overlap=steps[0].overlap,
        num_rows=steps[0].num_rows,
        agreement_by_step=tuple((own.agreement, own.num_rows) for own in steps),
    )


@torch.no_grad()
def _inherit(head: EagleHead, target: Any) -> None:
    """What the target reads its tokens off with, and as fused state the late one alone, which that is nearest to."""
    head.lm_head.weight.copy_(target.get_output_embeddings().weight[head.draft_ids].cpu())
    head.lm_head.weight.requires_grad_(False)
    head.fc.weight.zero_()
    head.fc.weight[:, -head.target_hidden_size :].fill_diagonal_(1.0)
    norm = getattr(target.get_decoder(), "norm", None)
    if norm is not None and getattr(norm, "weight", None) is not None and norm.weight.shape == head.norm.weight.shape:
        head.norm.weight.copy_(norm.weight.cpu())

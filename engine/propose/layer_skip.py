"""The target's own weights without some decoder layers, as a draft (Zhang et al. 2023, "Draft & Verify", arXiv 2309.08168).

Which ones is found while it loads, as in SWIFT (Xia et al. 2024, arXiv 2410.06916).
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autoscale.price import expected_tokens
from engine.errors import ConfigError, ModelError
from engine.models import LoadedModel, count_parameters

logger = logging.getLogger(__name__)

TEXTS = (
    "def read_rows(path):\n    rows = []\n    with open(path) as lines:\n        for line in lines:\n"
    "            name, age = line.strip().split(',')\n            rows.append({'name': name, 'age': int(age)})\n"
    "    return rows\n",
    "The lighthouse stood at the end of the pier, where the wind never rested. Every evening the keeper climbed the stairs, "
    "lit the lamp and wrote one line into his book. Nobody had ever asked him what stood in it.\n",
    'Here are the settings as JSON:\n{"host": "localhost", "port": 8080, "paths": ["/health", "/metrics"], "timeout": 30}\n'
    "To change the port, edit the file and start the server again.\n",
    "Water boils at 100 degrees at sea level. At higher altitudes the air pressure is lower, so that water boils at a lower "
    "temperature, and food takes longer to cook.\n",
)
"""What layers are chosen on: code, story, data, explanation; some 250 tokens."""
MOST_SKIPPED = 0.5
"""Share of the layers that may be left out when they are chosen here; half of them is far past what pays."""
LEAST_RANKED, RANKED_SHARE = 4, 1 / 3
"""Layers, and their share, whose absence is tried one by one."""
NUM_TRIED = 8
"""Numbers of layers that are tried."""
MAX_DEPTH = 8
UNSUPPORTED = ("num_kv_shared_layers",)
"""Fields of configurations whose layers use each other's keys and values."""


@dataclass(frozen=True, slots=True)
class Skip:
    """Layers to leave out, and what that is expected to be worth."""

    layers: tuple[int, ...]
    agreement: float
    """Share of the tokens of `TEXTS` after which the likeliest token stays the same."""
    cost: float
    """Of a draft step over a target step, if both only read their weights."""

    @property
    def speedup(self) -> float:
        """Of the best depth for one request: max over K of E(K) / (1 + K c), as `autoscale.price` counts tokens."""
        return max(expected_tokens(self.agreement, depth) / (1 + depth * self.cost) for depth in range(1, MAX_DEPTH + 1))


def leave_out(loaded: LoadedModel, skipped: Collection[int]) -> None:
    """Take decoder layers, by index, out of a loaded model. Raises `ConfigError` and `ModelError`, naming the field."""
    layers = _decoder_layers(loaded)
    outside = sorted(index for index in skipped if not 0 <= index < len(layers))
    if outside:
        raise ConfigError(
            f"draft.skip_layers: {loaded.name} has the layers 0 to {len(layers) - 1}, not {', '.join(map(str, outside))}"
        )
    if len(set(skipped)) == len(layers):
        raise ConfigError(f"draft.skip_layers names all {len(layers)} layers of {loaded.name}: leave at least one")
    kept = [index for index in range(len(layers)) if index not in skipped]
    remaining = [layers[index] for index in kept]
    parent, name = _owner(loaded.model, layers)
    setattr(parent, name, nn.ModuleList(remaining))
    for place, layer in enumerate(remaining):
        for module in layer.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = place  # type: ignore[assignment]
    _shorten(loaded.model.config.get_text_config(), kept, len(layers))


def _shorten(config: Any, kept: Sequence[int], num_layers: int) -> None:
    """Let the configuration describe the layers that are left; some say per layer of which type it is."""
    for key, value in list(vars(config).items()):
        if "layer" in key and isinstance(value, list) and len(value) == num_layers:
            setattr(config, key, [value[index] for index in kept])
    config.num_hidden_layers = len(kept)


def choose_layers(loaded: LoadedModel, ids: Sequence[int] | None = None, weight_cost: float = 1.0) -> Skip:
    """The layers whose absence is expected to pay most, of nested sets in the order of `rank_layers`.

    Computes the order and two forwards for each of up to `NUM_TRIED` sets, over ``ids``, by default `TEXTS`.
    ``weight_cost``: what a parameter of the draft costs against one of the target.
    """
    ids = calibration_ids(loaded) if ids is None else ids
    order = rank_layers(loaded, ids)
    most = max(1, int(len(order) * MOST_SKIPPED))
    numbers = sorted({max(1, round(most * (step + 1) / NUM_TRIED)) for step in range(NUM_TRIED)})
    best = max((measure(loaded, order[:number], ids, weight_cost) for number in numbers), key=lambda skip: skip.speedup)
    logger.info(
        "%s: without the layers %s a draft agrees with %.0f%% of its tokens at %.2f of the cost",
        loaded.name,
        ", ".join(map(str, best.layers)),
        100 * best.agreement,
        best.cost,
    )
    return best


@torch.inference_mode()
def rank_layers(loaded: LoadedModel, ids: Sequence[int]) -> list[int]:
    """Layers by how little they matter, least first; a forward over ``ids`` for all, and one for each of a third of them.

    Those that turn the hidden state least (`_angles`) come first, in the order of the mean KL divergence of the next tokens'
    distributions with and without each.
    """
    layers = list(_decoder_layers(loaded))
    full, angles = _log_probs(loaded, ids), _angles(loaded, layers, ids)
    order = sorted(range(len(layers)), key=angles.__getitem__)
    number = max(LEAST_RANKED, round(len(layers) * RANKED_SHARE))
    changes: dict[int, float] = {}
    for index in order[:number]:
        with _bypassed([layers[index]]):
            changes[index] = float((full.exp() * (full - _log_probs(loaded, ids))).sum(dim=-1).mean())
    return [*sorted(changes, key=changes.__getitem__), *order[number:]]


def _angles(loaded: LoadedModel, layers: Sequence[nn.Module], ids: Sequence[int]) -> list[float]:
    """Mean angle between input and output of each layer: the angular distance of Gromov et al. 2024 (arXiv 2403.17887)."""
    angles: dict[nn.Module, float] = {}

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        out = output[0] if isinstance(output, tuple) else output
        similarity = nn.functional.cosine_similarity(_hidden(args, kwargs).float(), out.float(), dim=-1)
        angles[layer] = float(similarity.clamp(-1, 1).arccos().mean())

    with _hooks(layers, note):
        _log_probs(loaded, ids)
    return [angles[layer] for layer in layers]


@torch.inference_mode()
def measure(loaded: LoadedModel, skipped: Sequence[int], ids: Sequence[int], weight_cost: float = 1.0) -> Skip:
    """Agreement over ``ids``, and cost, of leaving out some layers."""
    layers = _decoder_layers(loaded)
    wanted = _log_probs(loaded, ids).argmax(dim=-1)
    with _bypassed([layers[index] for index in skipped]):
        agreement = float((_log_probs(loaded, ids).argmax(dim=-1) == wanted).float().mean())
    whole = count_parameters(loaded.model)
    left_out = sum(parameter.numel() for index in skipped for parameter in layers[index].parameters())
    return Skip(tuple(sorted(skipped)), agreement, weight_cost * (1 - left_out / whole))


def calibration_ids(loaded: LoadedModel) -> list[int]:
    """`TEXTS` as one text, within the model's context."""
    return list(loaded.tokenizer.encode("".join(TEXTS)))[: loaded.max_context]


def _log_probs(loaded: LoadedModel, ids: Sequence[int]) -> Tensor:
    """float32 [len(ids), V]."""
    inputs = torch.tensor([list(ids)], device=loaded.device)
    logits: Tensor = loaded.model(input_ids=inputs, use_cache=False).logits[0]
    return logits.float().log_softmax(dim=-1)


def _bypassed(layers: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Let layers hand on what they are given."""

    def hand_on(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        given = _hidden(args, kwargs)
        return (given, *output[1:]) if isinstance(output, tuple) else given

    return _hooks(layers, hand_on)


@contextmanager
def _hooks(layers: Iterable[nn.Module], hook: Callable[..., Any]) -> Iterator[None]:
    handles = [layer.register_forward_hook(hook, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What a decoder layer is given, [..., hidden]."""
    given: Tensor = args[0] if args else kwargs["hidden_states"]
    return given


def _decoder_layers(loaded: LoadedModel) -> nn.ModuleList:
    """The model's decoder layers. Raises `ModelError` where leaving some out has no clear meaning."""
    config = loaded.model.config.get_text_config()
    lists = [
        child
        for child in loaded.model.base_model.children()
        if isinstance(child, nn.ModuleList) and len(child) == config.num_hidden_layers
    ]
    shares = next((field for field in UNSUPPORTED if getattr(config, field, 0)), None)
    if len(lists) != 1 or shares is not None:
        why = f"its layers share keys and values ({shares})" if shares else "its decoder layers are not one list"
        raise ModelError(
            f"{loaded.name}: draft.source 'layer-skip' cannot leave layers out: {why}; set draft.source to self-int8"
        )
    return lists[0]


def _owner(model: Any, layers: nn.ModuleList) -> tuple[nn.Module, str]:
    parent: nn.Module = model.base_model
    return parent, next(name for name, child in parent.named_children() if child is layers)

"""From a configuration to models: what the Ray actors, `outrider generate` and the benchmarks all start with.

Importing this module is cheap; torch and transformers are imported by the functions that need them.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from autoscale.lane_policy import LanePolicy
from engine.config import MODEL_SOURCES, SELF_SOURCES, OutriderConfig, use_patient_threads
from engine.drivers import SyncDriver
from engine.errors import ConfigError, ModelError
from engine.propose.base import DraftSource
from engine.propose.beside import TextBeside
from engine.propose.from_text import TextSource
from engine.propose.ngram import NgramSource
from engine.propose.suffix import SuffixSource
from engine.request import check_request, fit_to_cache
from engine.scheduler import DepthPolicy, Scheduler
from engine.testing.paced import PacedDraft, PacedTarget, paced_info
from engine.testing.profiles import Timed, follow_emulation, is_emulated, parse_emulation
from engine.types import Delta, GenerateRequest, ModelInfo

if TYPE_CHECKING:
    from engine.models import LoadedModel, LoadedTokenizer
    from engine.propose.draft_model import DraftModel
    from engine.propose.heads.source import Head
    from engine.verify.target import Target

logger = logging.getLogger(__name__)

DEFAULT_SINKS = 4
"""As StreamingLLM's (Xiao et al. 2023, arXiv 2309.17453)."""


def preflight(config: OutriderConfig) -> "LoadedTokenizer":
    """Check everything that can be checked without weights: a mistake is one line at start then, not an actor that fails.

    Returns the target's tokenizer.
    Raises `ConfigError` or `ModelError`: a model that is not there, vocabularies with too little in common, a draft larger than
    its target, an emulated model beside a real one.
    """
    use_patient_threads()
    _check_emulation(config)
    from engine import models

    target = models.load_tokenizer(config.target.model, "target.model")
    models.choose_device(config.target.device if config.target.num_gpus == 0 else "auto", "target.device")
    if config.draft.source in SELF_SOURCES and config.drafts.num_gpus == 0 and not is_emulated(config.target.model):
        _check_kernels(config)
    if config.target.max_context is not None and config.target.max_context > target.max_context:
        raise ConfigError(
            f"target.max_context is {config.target.max_context}, but {target.name} holds {target.max_context} tokens at most"
        )
    if config.draft.source == "heads":
        _check_head(config, target)
    elif config.draft.model is not None and not is_emulated(config.draft.model):
        draft = models.load_tokenizer(config.draft.model, "draft.model")
        models.shared_vocabulary(target, draft)
        models.check_draft_is_smaller(_num_parameters(target), _num_parameters(draft))
    return target


def build_served_target(config: OutriderConfig) -> "Target | PacedTarget":
    """What a lane's target runs: a model, or an emulation of one."""
    if not is_emulated(config.target.model):
        return build_target(config)
    follow = follow_emulation(config.target.model, "target.model")
    return PacedTarget(follow, _paced_info(config, follow().target, config.target.kv_cache_tokens))


def build_served_draft(config: OutriderConfig) -> "DraftModel | PacedDraft":
    """What a draft replica runs: a model, or an emulation of one."""
    if config.draft.model is None or not is_emulated(config.draft.model):
        return build_draft_model(config)
    follow = follow_emulation(config.draft.model, "draft.model")
    return PacedDraft(follow, _paced_info(config, follow().draft, config.draft.kv_cache_tokens))


def build_target(config: OutriderConfig) -> "Target":
    """Load the target and make it ready to verify, with its prediction heads where drafts come from them.

    Raises `ConfigError` for an emulated one, which has no logits.
    """
    _refuse_emulation(config)
    use_patient_threads()
    from engine.verify.target import Target

    section = config.target
    _use_threads(section.num_threads)
    loaded = _load(section.model, section.dtype, section.device, "target.model")
    head = _load_head(config, loaded)
    target = Target(
        loaded,
        weights="int8" if section.quantization == "int8" else "exact",
        numerics=section.numerics,
        kernels=section.kernels,
        kv_capacity_tokens=section.kv_cache_tokens,
        max_context=section.max_context,
        prefix_cache=section.prefix_cache,
        hidden_layers=() if head is None else head.layers,
    )
    if head is not None:
        from engine.propose.heads.source import HeadSource

        kv_capacity_tokens = config.draft.kv_cache_tokens
        target.listen(HeadSource(head, target.info, top_n=config.draft.top_n, kv_capacity_tokens=kv_capacity_tokens))
    return target


def build_draft_model(config: OutriderConfig) -> "DraftModel":
    """Load the draft that `draft.source` names: a cheaper version of the target, or a model of its own.

    Raises `ConfigError` for an emulated one, which has no logits, and where the device has no kernels for it.
    """
    _refuse_emulation(config)
    use_patient_threads()
    from engine.models import load_tokenizer, shared_vocabulary
    from engine.propose.draft_model import DraftModel
    from engine.propose.self_speculation import COPIES, build_layer_skip, build_self_copy
    from engine.propose.window import ContextWindow

    section = config.draft
    _use_threads(section.num_threads)
    weights: Literal["exact", "int8"] = "int8" if section.dtype == "int8" else "exact"
    dtype = "auto" if section.dtype == "int8" else section.dtype
    window = None
    if section.window_tokens is not None:
        window = ContextWindow(section.window_tokens, DEFAULT_SINKS if section.sink_tokens is None else section.sink_tokens)
    options: dict[str, Any] = {
        "kv_capacity_tokens": section.kv_cache_tokens,
        "top_n": section.top_n,
        "prefix_cache": config.target.prefix_cache,
        "kernels": config.target.kernels,
        "window": window,
    }
    if section.source in SELF_SOURCES:
        options["max_context"] = config.target.max_context
    if section.source in COPIES:
        loaded = _load(config.target.model, config.target.dtype, section.device, "target.model")
        return build_self_copy(loaded, section.source, **options)
    if section.source == "layer-skip":
        loaded = _load(config.target.model, config.target.dtype if dtype == "auto" else dtype, section.device, "target.model")
        return build_layer_skip(loaded, section.skip_layers or "auto", weights=weights, **options)
    if section.model is None:
        raise ConfigError(f"draft.source '{section.source}' needs no draft model")
    loaded = _load(section.model, dtype, section.device, "draft.model")
    vocabulary = shared_vocabulary(load_tokenizer(config.target.model), loaded)
    return DraftModel(loaded, weights=weights, vocabulary=vocabulary, **options)


def draft_is_a_model(config: OutriderConfig) -> bool:
    """Whether drafts come from a model that wants a device of its own."""
    return config.draft.source in MODEL_SOURCES


def build_free_source(config: OutriderConfig) -> DraftSource:
    """A source that needs no model and runs where the requests are."""
    source = _text_source(config.draft.source, config)
    if source is None:
        raise ConfigError(f"draft.source '{config.draft.source}' needs a model")
    return source


def build_text_beside(config: OutriderConfig) -> TextBeside | None:
    """The text source beside a model; None where none is configured or speculation is off."""
    source = _text_source(config.draft.text, config)
    return TextBeside(source, config.speculation.max_depth) if source is not None and config.speculation.max_depth else None


def _text_source(name: str, config: OutriderConfig) -> TextSource | None:
    if name == "ngram":
        return NgramSource(max_ngram=config.speculation.ngram_max)
    if name == "suffix":
        return SuffixSource(shared_tokens=config.draft.suffix_shared_tokens)
    return None


def drafts_beside_target(config: OutriderConfig) -> bool:
    """Whether drafts come from prediction heads that live with the target."""
    return config.draft.source == "heads" and config.speculation.max_depth > 0


def build_source(config: OutriderConfig, target: "Target") -> DraftSource | None:
    """The configured source in this process; None when speculation is off."""
    if config.draft.source == "none" or config.speculation.max_depth == 0:
        return None
    if drafts_beside_target(config):
        return target.heads
    return build_draft_model(config) if draft_is_a_model(config) else build_free_source(config)


# num_gpus has one: places that Ray gives away are what lanes and drafts compete for.
_MEANINGLESS_IN_EMULATION = {
    "target": ("dtype", "quantization", "device", "num_threads", "kernels", "numerics"),
    "draft": ("dtype", "device", "num_threads", "window_tokens"),
}


def _check_kernels(config: OutriderConfig) -> None:
    from engine.models import choose_device
    from engine.propose.self_speculation import check_kernels

    check_kernels(config.draft.source, choose_device(config.draft.device, "draft.device"))


def _check_emulation(config: OutriderConfig) -> None:
    """An emulated draft foresees the script of its emulated target and nothing else; neither has weights or a real device."""
    target, draft = config.target.model, config.draft.model
    if is_emulated(target):
        parse_emulation(target, "target.model")
    if is_emulated(target) and config.draft.source in SELF_SOURCES:
        raise ConfigError(
            f"target.model is emulated, so there is nothing to copy: set draft.source to model and draft.model to '{target}', "
            "or draft.source to ngram, suffix or none"
        )
    if draft is not None and target != draft and (is_emulated(target) or is_emulated(draft)):
        raise ConfigError(
            f"a profile is a pair of emulated models, which foresee no others: target.model is '{target}', so draft.model must "
            f"be the same, got '{draft}'"
        )
    if not is_emulated(target):
        return
    for name, fields in _MEANINGLESS_IN_EMULATION.items():
        section = getattr(config, name)
        for field in fields:
            if getattr(section, field) != type(section).model_fields[field].default:
                raise ConfigError(f"{name}.{field} has no meaning for an emulated device: remove it")


def _refuse_emulation(config: OutriderConfig) -> None:
    if is_emulated(config.target.model):
        raise ConfigError(
            f"target.model '{config.target.model}' is emulated: it has step times but no logits; it works in "
            "`outrider serve` and `outrider bench rounds`"
        )


def _paced_info(config: OutriderConfig, timed: Timed, kv_cache_tokens: int | None) -> ModelInfo:
    from engine.models import load_tokenizer

    tokenizer = load_tokenizer(config.target.model)
    return paced_info(
        config.target.model,
        timed,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        fingerprint=tokenizer.fingerprint,
        max_context=config.target.max_context or tokenizer.max_context,
        kv_capacity_tokens=kv_cache_tokens,
    )


def _check_head(config: OutriderConfig, target: "LoadedTokenizer") -> None:
    from engine.propose.heads.load import check_head

    if is_emulated(config.target.model):
        raise ConfigError("target.model is emulated and has no hidden states: draft.source cannot be heads")
    check_head(config.draft.model, target)


def _load_head(config: OutriderConfig, loaded: "LoadedModel") -> "Head | None":
    if not drafts_beside_target(config):
        return None
    from engine.propose.heads.load import load_head

    return load_head(config.draft.model, loaded)


def _load(name: str, dtype: str, device: str, field: str) -> "LoadedModel":
    from engine.models import load_model

    loaded = load_model(name, dtype=dtype, device=device, field=field)
    logger.info("%s on %s in %s: %s", loaded.name, loaded.device, loaded.dtype, loaded.dtype_reason)
    return loaded


def _use_threads(num_threads: int | None) -> None:
    """Ray sets OMP_NUM_THREADS to 1 in its workers, so the number is always set explicitly."""
    import os

    import torch

    torch.set_num_threads(num_threads or len(os.sched_getaffinity(0)))


def _num_parameters(tokenizer: "LoadedTokenizer") -> int:
    """From the model's configuration alone: modules on the meta device have shapes and no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    from engine.models import count_parameters

    try:
        with torch.device("meta"):
            return count_parameters(AutoModelForCausalLM.from_config(tokenizer.config))
    except Exception as error:
        raise ModelError(f"{tokenizer.name}: this architecture cannot be built: {error}") from None


class LocalEngine:
    """Target, source and scheduler in this process, driven one round at a time."""

    def __init__(self, target: "Target", source: DraftSource | None, tokenizer: "LoadedTokenizer", config: OutriderConfig):
        self.target = target
        self.source = source
        self.loaded = tokenizer
        self.tokenizer = tokenizer.tokenizer
        self.info = target.info
        self._config = config

    @property
    def source_name(self) -> str | None:
        """Name of the draft source."""
        return self.source.name if self.source is not None else None

    def encode(self, text: str, *, chat: bool) -> list[int]:
        """Token ids of a text, or of a chat with one user message."""
        if not chat:
            return list(self.tokenizer.encode(text))
        if self.tokenizer.chat_template is None:
            raise ModelError(f"{self.loaded.name} has no chat template: use --raw")
        messages = [{"role": "user", "content": text}]
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    def driver(self, policy: DepthPolicy | None = None) -> SyncDriver:
        """A driver with an empty request table; the policy follows the load unless ``speculation.depth`` is fixed."""
        scheduler = Scheduler(
            self.info,
            policy or self._policy(),
            max_batch=self._config.lanes.max_batch,
            prefill_tokens=self._config.lanes.prefill_tokens,
            max_waiting=self._config.api.max_waiting,
            text=build_text_beside(self._config),
        )
        return SyncDriver(self.target, self.source, scheduler, self.tokenizer)

    def generate(self, requests: Sequence[GenerateRequest], policy: DepthPolicy | None = None) -> Iterator[Delta]:
        """Check requests, run them together to their ends, and yield what each round commits."""
        for request in requests:
            check_request(request, self.info)
        return self.driver(policy).generate([fit_to_cache(request, self.info) for request in requests])

    def _policy(self) -> DepthPolicy:
        depth = self._config.speculation.depth
        return LanePolicy(
            max_depth=self._config.speculation.max_depth,
            target_step_times=self.info.step_times,
            draft_step_times=getattr(getattr(self.source, "info", None), "step_times", None),
            dwell_s=self._config.controller.dwell_s,
            fixed_depth=None if depth == "auto" else depth,
        )


def build_local_engine(config: OutriderConfig) -> LocalEngine:
    """Everything that the configuration names, in this process."""
    tokenizer = preflight(config)
    target = build_target(config)
    return LocalEngine(target, build_source(config, target), tokenizer, config)

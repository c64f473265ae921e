"""Models and tokenizers from whatever the user named: an alias, a folder, a GGUF file, a Hugging Face id.

All of these become a Hugging Face folder on this machine first, and one code path loads from there, without network. A GGUF
file is converted once: reading it takes tens of seconds, its folder loads in one.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import stat
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import safetensors
import torch
import transformers
from filelock import FileLock
from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # re-exported without saying so
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.config import DEFAULT_MODEL, cache_folder
from engine.errors import ConfigError, ModelError, OutriderError
from engine.fetch import ALIASES, fetch
from engine.propose.vocabulary import SharedVocabulary, Vocabulary, read_vocabulary
from engine.testing.profiles import is_emulated, parse_emulation

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CHAT_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eot|>", "<end_of_turn>", "<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>")
"""Tokens that end a turn and nothing else (gpt-oss ends its reasoning with ``<|end|>``, so that is not among them)."""
CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
DEFAULT_CONTEXT = 4096
"""For models that set no limit, such as recurrent ones."""
MAX_REPORTED_IDS = 3
VOCABULARY_FILES = ["tokenizer.json", "vocab.json", "vocab.txt", "tekken.json", "*.model", "*.tiktoken"]
TEXT_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]


@dataclass(frozen=True)
class ResolvedModel:
    """Where a named model is. ``path`` is None for a Hugging Face id."""

    name: str
    kind: Literal["folder", "gguf", "hub"]
    path: Path | None = None


@dataclass(frozen=True)
class VocabularyIdentity:
    """What each id of a tokenizer means."""

    name: str
    tokens: tuple[str | None, ...]
    """The string of every id that can be sampled; None where the tokenizer leaves a hole."""
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer and what is known of its model without the weights."""

    name: str
    tokenizer: Any
    config: Any
    eos_token_ids: tuple[int, ...]
    """Everything that ends a text: of the generation config, the tokenizer, and the chat template."""
    vocab_size: int
    """Ids from here on are padding of the model's head, which means nothing and may not be sampled."""
    max_context: int
    """Prompt and output together, in tokens."""
    fingerprint: str
    """Short SHA-256 of the mapping from token to id."""

    @property
    def vocabulary(self) -> VocabularyIdentity:
        """Meaning of every id, for `check_same_vocabulary`."""
        tokens: list[str | None] = [None] * self.vocab_size
        for token, token_id in self.tokenizer.get_vocab().items():
            if token_id < self.vocab_size:
                tokens[token_id] = token
        return VocabularyIdentity(self.name, tuple(tokens), self.eos_token_ids)


@dataclass(frozen=True)
class LoadedModel(LoadedTokenizer):
    """A causal language model, ready for inference: in eval mode, without gradients."""

    model: Any
    dtype: torch.dtype
    dtype_reason: str
    device: torch.device


def load_model(name: str, *, dtype: str = "auto", device: str = "auto", field: str = "target.model") -> LoadedModel:
    """Load weights and tokenizer of a causal language model.

    ``field`` is the configuration field that ``name`` comes from: errors begin with it. Raises `ModelError` with one line,
    whatever is wrong with the model, and `ConfigError` for a device or dtype that cannot be had.
    """
    section = field.rpartition(".")[0]
    torch_device = choose_device(device, field=f"{section}.device")
    torch_dtype, reason = choose_dtype(dtype, torch_device, field=f"{section}.dtype")
    logger.info("%s: loading %s on %s in %s: %s", field, name, torch_device, torch_dtype, reason)
    with _one_line_errors(name, field, torch_device):
        resolved = resolve_model(name, field)
        text = _load_text(resolved)
        model = _load_weights(_weights_folder(resolved, torch_dtype), torch_dtype, torch_device)
    return LoadedModel(**vars(text), model=model, dtype=torch_dtype, dtype_reason=reason, device=torch_device)


def load_tokenizer(name: str, field: str = "target.model") -> LoadedTokenizer:
    """Load the tokenizer alone: weights are neither read nor downloaded. Raises `ModelError` with one line.

    Emulated models have the default model's. Raises `ConfigError` for a profile that does not exist.
    """
    if is_emulated(name):
        parse_emulation(name, field)
        return replace(load_tokenizer(DEFAULT_MODEL, field), name=name)
    with _one_line_errors(name, field):
        return _load_text(resolve_model(name, field))


def resolve_model(name: str, field: str = "target.model") -> ResolvedModel:
    """Find out what ``name`` is; an alias is fetched when it is not there yet, a Hugging Face id is not looked up.

    Raises `ModelError` when it can be none of the four.
    """
    if name in ALIASES:
        try:
            return ResolvedModel(name, "gguf", fetch(name))
        except OutriderError as error:
            raise ModelError(f"{field}: {error}") from None
    path = Path(name).expanduser()
    if path.is_dir():
        return ResolvedModel(name, "folder", _check_folder(path, field))
    if path.is_file():
        return ResolvedModel(name, "gguf", _check_gguf(path, field))
    if _looks_like_path(name):
        raise ModelError(f"{field}: no such model: there is no file or folder '{name}'")
    return ResolvedModel(name, "hub")


def model_folder(name: str, field: str) -> Path:
    """The folder of a Hugging Face model, downloaded where it is not there yet, without looking at what it holds.

    Raises `ModelError`, also for a GGUF file.
    """
    with _one_line_errors(name, field):
        resolved = resolve_model(name, field)
        if resolved.kind == "gguf":
            raise ModelError("a GGUF file is not what is needed here: name a folder or a Hugging Face id")
        return resolved.path or _download(name, ["config.json", "*.safetensors"])


def choose_device(name: str, field: str = "target.device") -> torch.device:
    """``auto`` (CUDA when there is any), ``cpu``, ``cuda`` or ``cuda:N``. Raises `ConfigError`."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if name != "cpu" and (kind != "cuda" or (":" in name and not index.isdecimal())):
        raise ConfigError(f"{field}: '{name}' is not a device: use auto, cpu, cuda or cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"{field}: '{name}' asked for, but torch sees no CUDA device here: use cpu or auto")
    if index and int(index) >= torch.cuda.device_count():
        raise ConfigError(
            f"{field}: '{name}' asked for, but there are only {torch.cuda.device_count()} CUDA devices, from cuda:0"
        )
    return torch.device(name)


def choose_dtype(name: str, device: torch.device, field: str = "target.dtype") -> tuple[torch.dtype, str]:
    """The dtype to compute in and the reason for it, one short sentence. Raises `ConfigError` for an unknown name."""
    if name in DTYPES:
        return DTYPES[name], f"{field} asks for it"
    if name != "auto":
        raise ConfigError(f"{field}: '{name}' is not a dtype: use auto, {', '.join(DTYPES)}")
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major >= 8:
            return torch.bfloat16, f"CUDA compute capability {major}.{minor} computes in bfloat16"
        return torch.float16, f"CUDA compute capability {major}.{minor} has no bfloat16 units"
    feature = _cpu_bfloat16_feature()
    if feature is not None:
        return torch.bfloat16, f"this CPU computes in bfloat16 ({feature})"
    return torch.float32, "this CPU has no bfloat16 units"


def count_parameters(model: torch.nn.Module) -> int:
    """Number of parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def check_draft_is_smaller(target_params: int, draft_params: int) -> None:
    """Raise `ModelError` when the draft has more parameters than the target."""
    if draft_params > target_params:
        raise ModelError(
            f"draft.model has {_millions(draft_params)} parameters, target.model only {_millions(target_params)}: "
            "draft and target are swapped?"
        )


def check_same_vocabulary(target: VocabularyIdentity, draft: VocabularyIdentity) -> None:
    """Raise `ModelError` unless every id that both tokenizers know means the same string to both.

    The tokenizers are compared, not the models' heads, which are padded to different sizes within one family. The draft may
    know fewer ids than the target: it cannot read a sequence with an id beyond its table, so such a sequence must not be
    drafted over. EOS ids may differ, since only the target's end a text; a draft that stops elsewhere only guesses worse there.
    """
    pairs = enumerate(zip(target.tokens, draft.tokens, strict=False))
    different = [(i, ours, theirs) for i, (ours, theirs) in pairs if ours != theirs and None not in (ours, theirs)]
    if different:
        examples = ", ".join(f"id {i} is {ours!r} and {theirs!r}" for i, ours, theirs in different[:MAX_REPORTED_IDS])
        raise ModelError(
            f"draft.model: the tokenizers of '{target.name}' (target) and '{draft.name}' (draft) disagree on {len(different)} "
            f"ids: {examples}; choose a draft of the target's family"
        )
    if set(target.eos_token_ids) != set(draft.eos_token_ids):
        logger.warning(
            "target '%s' ends a text with ids %s, draft '%s' with %s; the target's count",
            target.name,
            target.eos_token_ids,
            draft.name,
            draft.eos_token_ids,
        )


def shared_vocabulary(target: LoadedTokenizer, draft: LoadedTokenizer) -> SharedVocabulary | None:
    """What the vocabularies of two models have in common; None where every id means the same to both.

    Raises `ModelError` where that is too little to draft with, or cannot be told.
    """
    try:
        check_same_vocabulary(target.vocabulary, draft.vocabulary)
    except ModelError:
        shared = SharedVocabulary(*(_read_vocabulary(one) for one in (target, draft)))
        shared.check()
        logger.info("%s", shared.describe())
        return shared
    return None


def _read_vocabulary(loaded: LoadedTokenizer) -> Vocabulary:
    found = read_vocabulary(loaded.name, loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids)
    return replace(found, fingerprint=loaded.fingerprint)


def _looks_like_path(name: str) -> bool:
    """Whether this cannot be a Hugging Face id: those are ``name`` or ``owner/name``, and begin with a letter or digit."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return True
    return name.endswith(".gguf")


def _check_folder(folder: Path, field: str) -> Path:
    if (folder / "config.json").is_file():
        return folder
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    hint = f"; to use a GGUF file name it: {folder / ggufs[0]}" if ggufs else ", which a Hugging Face model folder has"
    raise ModelError(f"{field}: the folder '{folder}' has no config.json{hint}")


def _check_gguf(path: Path, field: str) -> Path:
    with path.open("rb") as file:
        if file.read(4) == b"GGUF":
            return path
    raise ModelError(f"{field}: '{path}' is neither a GGUF file nor a folder")


def _text_folder(resolved: ResolvedModel) -> Path:
    """A Hugging Face folder with at least config and tokenizer."""
    if resolved.path is None:
        return _download(resolved.name, TEXT_FILES)
    return _convert_text(resolved.path) if resolved.kind == "gguf" else resolved.path


def _weights_folder(resolved: ResolvedModel, dtype: torch.dtype) -> Path:
    """The same with weights."""
    if resolved.path is None:
        return _download(resolved.name, [*TEXT_FILES, "*.safetensors"])
    return _convert_weights(resolved.path, dtype) if resolved.kind == "gguf" else resolved.path


def _download(name: str, patterns: list[str]) -> Path:
    """Files at the top of a Hugging Face repository; its other folders and ``consolidated*`` hold the same in other formats."""
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*", "consolidated*"]))
    except GatedRepoError:
        raise ModelError("access is restricted: accept its conditions on its page, then set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise ModelError(
            "no such model: neither a file or folder here, nor a public Hugging Face model (a private one needs HF_TOKEN), "
            f"nor an alias ({', '.join(ALIASES)})"
        ) from None
    except LocalEntryNotFoundError as error:
        raise ModelError(
            "not on this machine, and Hugging Face cannot be reached: name a local folder or GGUF file, "
            f"or an alias ({', '.join(ALIASES)}) [{str(error).splitlines()[0]}]"
        ) from None


def _load_text(resolved: ResolvedModel) -> LoadedTokenizer:
    folder = _text_folder(resolved)
    with _quiet_transformers():
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        _check_architecture(config)
        tokenizer = _load_tokenizer_files(folder)
        generation = _generation_config(folder, config)
    ids = tokenizer.get_vocab()
    head_size = config.get_text_config().vocab_size
    return LoadedTokenizer(
        name=resolved.name,
        tokenizer=tokenizer,
        config=config,
        eos_token_ids=_eos_token_ids(generation, tokenizer),
        vocab_size=min(max(ids.values()) + 1, head_size),
        max_context=_max_context(config),
        fingerprint=_fingerprint(ids),
    )


def _check_architecture(config: Any) -> None:
    architectures = config.architectures or [config.model_type]
    if config.is_encoder_decoder:
        raise ModelError(f"{architectures[0]} is an encoder-decoder; only causal language models (decoders) can be served")
    # By name: to import the class takes seconds of each process, and only those with weights need it.
    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if classes is None:
        raise ModelError(
            f"{architectures[0]} is not a causal language model that transformers {transformers.__version__} knows"
        )
    causal = set(_as_tuple(classes))
    if config.architectures and causal.isdisjoint(config.architectures):
        raise ModelError(f"{architectures[0]} does not predict the next token; a model of this family must be {min(causal)}")


def _load_tokenizer_files(folder: Path) -> Any:
    if not any(path for pattern in VOCABULARY_FILES for path in folder.glob(pattern)):  # some families would start empty
        raise ModelError(f"no tokenizer in {folder}: tokenizer.json is missing")
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises nothing more specific
        raise ModelError(f"no usable tokenizer in {folder} ({type(error).__name__}: {_one_line(error)})") from error


def _generation_config(folder: Path, config: Any) -> Any:
    if (folder / "generation_config.json").is_file():
        return transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    return transformers.GenerationConfig.from_model_config(config)


def _eos_token_ids(generation: Any, tokenizer: Any) -> tuple[int, ...]:
    ids = set(_as_tuple(generation.eos_token_id)) | set(_as_tuple(tokenizer.eos_token_id))
    template = str(tokenizer.chat_template or "")
    vocabulary = tokenizer.get_vocab()
    ids |= {vocabulary[token] for token in CHAT_END_TOKENS if token in vocabulary and token in template}
    return tuple(sorted(ids))


def _max_context(config: Any) -> int:
    text_config = config.get_text_config()
    limits = (getattr(text_config, field, None) for field in CONTEXT_FIELDS)
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), DEFAULT_CONTEXT)


def _fingerprint(vocabulary: dict[str, int]) -> str:
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()[:16]


def _load_weights(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    with _quiet_transformers():
        # dtype belongs here: a later model.to(dtype) would also round the float32 frequencies of the rotary embedding.
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            device_map={"": device},
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    if info["missing_keys"]:  # transformers fills them with random numbers
        missing = sorted(info["missing_keys"])
        raise ModelError(f"the weights in {folder} are incomplete: {len(missing)} tensors are missing, such as {missing[0]}")
    return model.eval().requires_grad_(False)


def _convert_text(gguf: Path) -> Path:
    """Config and tokenizer of a GGUF file as a Hugging Face folder, in a third of the time that the weights take."""

    def build(folder: Path) -> None:
        source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name, "local_files_only": True}
        transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
        config = transformers.AutoConfig.from_pretrained(**source)
        config.save_pretrained(folder)
        transformers.GenerationConfig.from_model_config(config).save_pretrained(folder)

    return _convert(gguf, "text", build)


def _convert_weights(gguf: Path, dtype: torch.dtype) -> Path:
    """A GGUF file as a complete Hugging Face folder, dequantised to ``dtype``."""

    def build(folder: Path) -> None:
        text_folder = _convert_text(gguf)
        shutil.copytree(text_folder, folder, dirs_exist_ok=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            config=transformers.AutoConfig.from_pretrained(text_folder, local_files_only=True),
            dtype=dtype,
            quantization_config=transformers.GgufConfig(dequantize=True),
            local_files_only=True,
        )
        model.save_pretrained(folder)

    return _convert(gguf, str(dtype).removeprefix("torch."), build)


def _convert(gguf: Path, content: str, build: Callable[[Path], None]) -> Path:
    def quietly(folder: Path) -> None:
        from transformers import modeling_gguf_pytorch_utils  # half a second, for what is done once

        modeling_gguf_pytorch_utils.tqdm = transformers.utils.logging.tqdm  # it would not obey the switch for bars otherwise
        build(folder)

    try:
        return _build_once(_converted_folder(gguf, content), quietly)
    except (ValueError, LookupError, NotImplementedError, struct.error) as error:
        raise ModelError(
            f"the GGUF file is damaged, or of a kind that transformers cannot read ({_one_line(error)})"
        ) from error


def _converted_folder(gguf: Path, content: str) -> Path:
    """Another file, or another transformers (which does the converting), gets another folder."""
    status = gguf.stat()
    origin = f"{gguf.resolve()} {status.st_size} {int(status.st_mtime)} {transformers.__version__}"
    return cache_folder() / "converted" / f"{gguf.stem}-{content}-{hashlib.sha256(origin.encode()).hexdigest()[:10]}"


def _build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """``folder``, filled by ``build`` when it is not there yet: by one process, the others wait; all of it or nothing."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            logger.info("converting to %s: takes a minute, once", folder)
            partial = folder.with_name(folder.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
            partial.mkdir()
            try:
                with _quiet_transformers():
                    build(partial)
                _let_others_read(partial)
                os.replace(partial, folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder


def _let_others_read(folder: Path) -> None:
    """safetensors writes files that only their owner may read; give them the mode of an ordinary file."""
    mode = stat.S_IMODE((folder / "config.json").stat().st_mode)
    for path in folder.glob("*.safetensors"):
        path.chmod(mode)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars and nothing below an error, for the time of the block."""
    settings = transformers.utils.logging
    verbosity, bars = settings.get_verbosity(), settings.is_progress_bar_enabled()
    settings.set_verbosity_error()
    settings.disable_progress_bar()
    try:
        yield
    finally:
        settings.set_verbosity(verbosity)
        if bars:
            settings.enable_progress_bar()


@contextlib.contextmanager
def _one_line_errors(name: str, field: str, device: torch.device | None = None) -> Iterator[None]:
    """Whatever goes wrong while a model is loaded becomes one line that begins with ``field``."""
    try:
        yield
    except ModelError as error:
        if str(error).startswith(field):
            raise
        raise ModelError(f"{field}: '{name}': {error}") from error
    except Exception as error:
        raise ModelError(f"{field}: cannot load '{name}': {_advice(error, device)}") from error


def _advice(error: Exception, device: torch.device | None) -> str:
    text = _one_line(error)
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in text:
        return f"it does not fit into the memory of {device}: choose a smaller model or dtype, or another device ({text})"
    if isinstance(error, safetensors.SafetensorError):
        return f"its weights are damaged: delete them and get them again ({text})"
    return f"{text} ({type(error).__name__})"


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]}..."


def _cpu_bfloat16_feature() -> str | None:
    """Name of the CPU's instructions for bfloat16 matrix products, or None."""
    checks = {"avx512_bf16": "_is_avx512_bf16_supported", "amx_bf16": "_is_amx_tile_supported"}
    for feature, function in checks.items():
        if hasattr(torch.cpu, function):
            if getattr(torch.cpu, function)():
                return feature
        elif feature in _cpu_flags():
            return feature
    return None


def _cpu_flags() -> set[str]:
    try:
        return set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return set()


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f}M"

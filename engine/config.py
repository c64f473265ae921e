"""The one configuration tree: the same for the command line, `serve run`, a RayService and Python.

The environment is read in one place only (`cache_folder`).
"""

import difflib
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from engine.errors import ConfigError
from engine.types import SamplingRule

DEFAULT_MODEL = "smollm2"
MAX_FAN_OUT = 8
"""Most outcomes prepared per position: rows of the draft grow with it, hits hardly beyond 3."""
MIN_SHARED_TOKENS = 1024
DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
SELF_SOURCES = ("self-int8", "self-int4", "self-fp8", "layer-skip")
"""Values of ``draft.source`` that are cheaper versions of the target."""
DTYPE_SOURCES = ("layer-skip", "model")
"""Values of ``draft.source`` whose weights ``draft.dtype`` chooses."""
MODEL_SOURCES = (*SELF_SOURCES, "model")
"""Values of ``draft.source`` that run a model."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TargetConfig(_Section):
    """The model whose text is served."""

    model: str = Field(DEFAULT_MODEL, description="Hugging Face id, local folder, GGUF file, or an alias of `outrider fetch`")
    name: str | None = Field(None, description="name in the API; default: the last part of `model`")
    dtype: DTypeName = Field("auto", description="auto: bfloat16 where the device computes in it, else float32")
    quantization: Literal["none", "int8"] = Field(
        "none",
        description="int8: weights with one scale per output, activations with one per row. Faster, and another model: the "
        "promise is about that one then",
    )
    device: str = Field("auto", description="auto (CUDA when the actor has a GPU), cpu, cuda, cuda:1")
    num_gpus: float = Field(0, ge=0, description="GPUs that Ray reserves for each target")
    num_cpus: float = Field(
        0.5, ge=0, description="CPUs that Ray reserves for each target (a promise to the scheduler, no limit)"
    )
    num_threads: int | None = Field(None, ge=1, description="CPU threads of torch; default: all cores")
    kernels: Literal["auto", "torch"] = Field(
        "auto",
        description="on CPU, auto: compiled with the system's C compiler when first used, for target and draft; torch: "
        "torch's own operations",
    )
    numerics: Literal["invariant", "fast"] = Field(
        "invariant",
        description="invariant: kernels by which a row's logits never depend on its batch, where the device has them; "
        "fast: the fastest kernels",
    )
    max_context: int | None = Field(
        None, ge=16, description="longest prompt + output in tokens; default: the model's own limit"
    )
    kv_cache_tokens: int | None = Field(None, ge=256, description="KV cache size in tokens; default: from free memory")
    prefix_cache: bool = Field(
        True,
        description="prompts that begin like earlier ones skip what is still in the KV cache of the target and of its draft",
    )


class DraftConfig(_Section):
    """Where draft tokens come from."""

    source: Literal["self-int8", "self-int4", "self-fp8", "layer-skip", "model", "heads", "ngram", "suffix", "none"] = Field(
        "self-int8",
        description="self-int8, self-int4, self-fp8 (GPUs only): the target's own copy with such weights; layer-skip: the "
        "target without some of its layers; model: a named model; heads: a prediction head beside the target that reads its "
        "hidden states; ngram: text itself, what followed the newest words last; suffix: text itself, what followed them most "
        "often; none: no drafts",
    )
    model: str | None = Field(
        None,
        description="the draft model, for `source: model`; for `source: heads` an EAGLE-3 head in the speculators format, or "
        "nothing for the MTP layers in the target's own checkpoint",
    )
    dtype: DTypeName | Literal["int8"] = Field(
        "auto",
        description="of `source: model` and `source: layer-skip`; int8 quantises the linear layers; auto: as target.dtype, "
        "of a named draft as its device computes",
    )
    skip_layers: tuple[int, ...] | Literal["auto"] | None = Field(
        None,
        description="for `source: layer-skip`: indices of the decoder layers to leave out, or auto, the default: chosen while "
        "the draft loads",
    )
    window_tokens: int | None = Field(
        None,
        ge=16,
        description="a draft that is a model attends to the first sink_tokens and to so many last tokens only, both rounded up "
        "to whole blocks of the KV cache (64 tokens on CPU, 256 on GPUs), and keeps no others; for long contexts; default: all",
    )
    sink_tokens: int | None = Field(
        None, ge=0, description="first tokens that stay visible beside window_tokens; default: 4, which is one block"
    )
    text: Literal["none", "ngram", "suffix"] = Field(
        "none",
        description="a second source beside a model: what the text itself offers is drafted where it promises more for what it "
        "costs, request by request and round by round; ngram, suffix: as `source`",
    )
    device: str = Field("auto", description="as target.device")
    num_threads: int | None = Field(None, ge=1, description="CPU threads of torch; default: all cores")
    kv_cache_tokens: int | None = Field(
        None, ge=256, description="KV cache size in tokens; default: from free memory, for heads as many as the target has"
    )
    top_n: int = Field(
        64,
        ge=1,
        description="under the rules rejection and block a draft draws from its top_n likeliest tokens only, and sends them "
        "with their probabilities; exact for any number",
    )
    timeout_s: float = Field(0.5, gt=0, description="a round that waits longer for its drafts goes on without them")
    suffix_shared_tokens: int = Field(
        0,
        ge=0,
        description="for `suffix`, as source or as text beside a model: each lane drafts also from so many tokens of finished "
        "outputs, the newest, whoever asked for them (some 400 bytes each); no text changes, but speed may tell a client what "
        "others were answered. Under rejection and block they are not used. 0: each request is drafted from its own text alone",
    )

    @model_validator(mode="after")
    def _model_matches_source(self) -> "DraftConfig":
        if self.source == "model" and self.model is None:
            raise ValueError("draft.model is missing: `source: model` needs the name of a draft model")
        if self.source not in ("model", "heads") and self.model is not None:
            raise ValueError(f"draft.model is set but draft.source is '{self.source}': set `source: model` or remove the model")
        return self

    @model_validator(mode="after")
    def _dtype_is_of_use(self) -> "DraftConfig":
        if self.dtype != "auto" and self.source not in (*DTYPE_SOURCES, "heads"):
            raise ValueError(
                f"draft.dtype is set but draft.source is '{self.source}', which leaves no choice of it: remove it, or set "
                f"source to one of {', '.join(DTYPE_SOURCES)}"
            )
        return self

    @model_validator(mode="after")
    def _skip_layers_are_of_use(self) -> "DraftConfig":
        if self.skip_layers is not None and self.source != "layer-skip":
            raise ValueError(
                f"draft.skip_layers is set but draft.source is '{self.source}': set `source: layer-skip` or remove it"
            )
        if self.skip_layers is None or self.skip_layers == "auto":
            return self
        if not self.skip_layers or min(self.skip_layers) < 0 or len(set(self.skip_layers)) < len(self.skip_layers):
            raise ValueError(
                f"draft.skip_layers must be auto, or different layers counted from 0, got {list(self.skip_layers)}"
            )
        return self

    @model_validator(mode="after")
    def _window_is_of_use(self) -> "DraftConfig":
        if self.window_tokens is not None and self.source not in MODEL_SOURCES:
            raise ValueError(
                f"draft.window_tokens is set but draft.source '{self.source}' runs no model: remove it, or set source to "
                f"one of {', '.join(MODEL_SOURCES)}"
            )
        if self.sink_tokens is not None and self.window_tokens is None:
            raise ValueError("draft.sink_tokens is set without draft.window_tokens: set both, or remove it")
        return self

    @model_validator(mode="after")
    def _heads_run_with_the_target(self) -> "DraftConfig":
        if self.source != "heads":
            return self
        for name in ("dtype", "device", "num_threads"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"draft.{name} has no meaning for `source: heads`, which run as the target does: remove it")
        return self

    @model_validator(mode="after")
    def _text_is_beside_a_model(self) -> "DraftConfig":
        if self.text != "none" and self.source in ("ngram", "suffix", "none"):
            raise ValueError(
                f"draft.text '{self.text}' stands beside a model, but draft.source is '{self.source}': set "
                f"`source: {self.text}` and remove draft.text, or name a model"
            )
        return self

    @model_validator(mode="after")
    def _shared_tokens_are_of_use(self) -> "DraftConfig":
        if self.suffix_shared_tokens and "suffix" not in (self.source, self.text):
            raise ValueError(
                f"draft.suffix_shared_tokens is set but draft.source is '{self.source}': set `source: suffix`, or `text: "
                "suffix` beside a model, or remove it"
            )
        if 0 < self.suffix_shared_tokens < MIN_SHARED_TOKENS:
            raise ValueError(
                f"draft.suffix_shared_tokens must be 0 or at least {MIN_SHARED_TOKENS}, got {self.suffix_shared_tokens}"
            )
        return self


class LanesConfig(_Section):
    """Routers, each with its own target."""

    min: int = Field(1, ge=1, description="lanes that always run")
    max: int = Field(1, ge=1, description="lanes at high load; above `min` their number follows the load")
    max_batch: int = Field(64, ge=1, description="requests that decode together in one lane")
    prefill_tokens: int = Field(
        512, ge=16, description="tokens of prompts that one round may process beside the decoding requests"
    )
    scale_up_s: float = Field(5.0, ge=0, description="the load must ask for more lanes for so long")
    scale_down_s: float = Field(60.0, ge=0, description="the load must fit in fewer lanes, with a margin, for so long")

    @model_validator(mode="after")
    def _ordered(self) -> "LanesConfig":
        if self.max < self.min:
            raise ValueError(f"lanes.max ({self.max}) is below lanes.min ({self.min})")
        return self


class DraftsConfig(_Section):
    """The pool of draft replicas that all lanes share."""

    min: int = Field(1, ge=0, description="draft replicas that always run; 0 lets the last one go where drafts do not pay")
    max: int = Field(
        1,
        ge=0,
        description="draft replicas when the lanes want most; above `min` their number follows that; 0 serves without a draft "
        "model",
    )
    idle_s: float = Field(300.0, ge=0, description="drafts go when no lane has wanted any for so long")
    num_gpus: float = Field(0, ge=0, description="GPUs that Ray reserves for each draft")
    num_cpus: float = Field(
        0.5, ge=0, description="CPUs that Ray reserves for each draft (a promise to the scheduler, no limit)"
    )

    @model_validator(mode="after")
    def _ordered(self) -> "DraftsConfig":
        if self.max < self.min:
            hint = "; set both to 0 to serve without a draft model" if self.max == 0 else ""
            raise ValueError(f"drafts.max ({self.max}) is below drafts.min ({self.min}){hint}")
        return self


class SpeculationConfig(_Section):
    """How drafts are decided on."""

    rule: SamplingRule = Field("coupled", description="acceptance rule for sampling; temperature 0 is always greedy")
    max_depth: int = Field(8, ge=0, le=64, description="most draft tokens per request and round; 0 switches speculation off")
    depth: int | Literal["auto"] = Field("auto", description="auto: from the load; a number: fixed, for measurements")
    fan_out: int | Literal["auto"] = Field(
        "auto",
        description="outcomes per position that the draft prepares while the target verifies: auto: by the cost model; 0: none "
        "(sequential rounds); a number: as many at every position",
    )
    ngram_max: int = Field(4, ge=1, le=16, description="longest n-gram looked up in prompt and output")

    @model_validator(mode="after")
    def _depth_in_range(self) -> "SpeculationConfig":
        if self.depth != "auto" and not 0 <= self.depth <= self.max_depth:
            raise ValueError(
                f"speculation.depth must lie between 0 and speculation.max_depth ({self.max_depth}), got {self.depth}"
            )
        return self

    @model_validator(mode="after")
    def _fan_out_in_range(self) -> "SpeculationConfig":
        if self.fan_out != "auto" and not 0 <= self.fan_out <= MAX_FAN_OUT:
            raise ValueError(f"speculation.fan_out must be auto or lie between 0 and {MAX_FAN_OUT}, got {self.fan_out}")
        return self


class ControllerConfig(_Section):
    """How the depth follows the load."""

    report_interval_s: float = Field(0.25, gt=0, le=5, description="how often lanes and drafts report to the controller")
    arrival_half_life_s: float = Field(2.0, gt=0, description="half-life of the average that estimates the arrival rate")
    latency_objective_ms: float | None = Field(
        None,
        gt=0,
        description="time per output token that no request should be slower than: one that is drafts deeper, at the cost of "
        "the others; default: all requests count alike",
    )
    dwell_s: float = Field(
        1.0,
        ge=0,
        description="least time between raising the depth from 0 and the change before it, and for which drafts must be wanted "
        "before one more starts",
    )
    num_gpus: float | None = Field(
        None,
        gt=0,
        description="GPUs that lanes and drafts share on a cluster that does not grow: where both do not fit, what makes more "
        "tokens per second gets them; default: no limit but lanes.max and drafts.max, and drafts of idle lanes go",
    )

    @property
    def latency_objective_s(self) -> float | None:
        """`latency_objective_ms` in seconds."""
        return None if self.latency_objective_ms is None else self.latency_objective_ms / 1e3


class StreamsConfig(_Section):
    """The streams between the application's own processes. Certificates are for mutual TLS: all three, or none."""

    secret_file: Path | None = Field(
        None,
        description="file with the secret that every process must show, 16 characters or more; it must exist on every node. "
        "With one, old and new processes understand each other while the application is updated; default: a new secret for "
        "every deployment, so that requests of old API processes cannot go on in new lanes",
    )
    tls_cert: Path | None = Field(
        None,
        description="PEM certificate of every process, for the DNS name `outrider`; the file must exist on every node",
    )
    tls_key: Path | None = Field(None, description="PEM private key of `tls_cert`")
    tls_ca: Path | None = Field(None, description="PEM certificate of the authority that signed `tls_cert`")

    @model_validator(mode="after")
    def _all_or_none(self) -> "StreamsConfig":
        files = {"tls_cert": self.tls_cert, "tls_key": self.tls_key, "tls_ca": self.tls_ca}
        missing = [f"streams.{name}" for name, path in files.items() if path is None]
        if missing and len(missing) < len(files):
            raise ValueError(
                f"{' and '.join(missing)} missing: mutual TLS needs tls_cert, tls_key and tls_ca, no TLS none of them"
            )
        return self


class ApiConfig(_Section):
    """The HTTP endpoint. Host and port are those of `outrider serve`; `serve run` takes its own `http_options`."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=1, le=65535, description="port to listen on")
    replicas: int = Field(1, ge=1, description="API processes")
    keys_file: Path | None = Field(
        None,
        description="file with one API key per line, as `sha256:` and the key's SHA-256 in hex, or in clear; read again when "
        "it changes, and it must exist on every node. Without one no key is asked for",
    )
    request_timeout_s: float | None = Field(
        None, gt=0, description="longest time for a whole answer, and longest silence of a stream; then 408 or an error frame"
    )
    max_waiting: int = Field(256, ge=1, description="requests that may wait for a lane; more are answered 429")
    max_body_bytes: int = Field(4 * 1024 * 1024, ge=1024, description="larger request bodies are answered 413")
    max_stop_strings: int = Field(16, ge=1, le=64, description="stop strings that one request may bring")
    max_choices: int = Field(16, ge=1, description="most choices (n times prompts) of one request")
    default_max_tokens: int | None = Field(
        None, ge=1, description="when a request names none; default: up to the context limit"
    )


class LoggingConfig(_Section):
    """What the application's processes log. Prompts and answers are never in it, whatever the level."""

    format: Literal["text", "json"] = Field(
        "text", description="json: one JSON object per line, with `request_id` and the facts"
    )
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO",
        description="INFO has a line for the start and the end of every request. Where format and level are the defaults, a "
        "`logging_config` of Ray Serve's own applies",
    )


class OutriderConfig(_Section):
    """Everything that can be set."""

    target: TargetConfig = Field(default_factory=lambda: TargetConfig())
    draft: DraftConfig = Field(default_factory=lambda: DraftConfig())
    lanes: LanesConfig = Field(default_factory=lambda: LanesConfig())
    drafts: DraftsConfig = Field(default_factory=lambda: DraftsConfig())
    speculation: SpeculationConfig = Field(default_factory=lambda: SpeculationConfig())
    controller: ControllerConfig = Field(default_factory=lambda: ControllerConfig())
    streams: StreamsConfig = Field(default_factory=lambda: StreamsConfig())
    api: ApiConfig = Field(default_factory=lambda: ApiConfig())
    logging: LoggingConfig = Field(default_factory=lambda: LoggingConfig())

    @model_validator(mode="after")
    def _draft_is_another_model(self) -> "OutriderConfig":
        if self.target.quantization == "int8" and self.draft.source == "self-int8":
            raise ValueError(
                "draft.source 'self-int8' is the target itself where target.quantization is 'int8': "
                "set draft.source to model, ngram, suffix or none"
            )
        return self

    @model_validator(mode="after")
    def _minimum_fits(self) -> "OutriderConfig":
        least = self.lanes.min * self.target.num_gpus + self.drafts.min * self.drafts.num_gpus
        if self.controller.num_gpus is not None and least > self.controller.num_gpus:
            raise ValueError(
                f"controller.num_gpus ({self.controller.num_gpus:g}) is below the {least:g} of lanes.min and drafts.min: "
                "raise it, or lower one of these"
            )
        return self

    @property
    def served_model_name(self) -> str:
        """The name clients send as ``model``."""
        return self.target.name or Path(self.target.model).name.removesuffix(".gguf") or self.target.model


def parse_config(data: Any) -> OutriderConfig:
    """Check a configuration read from anywhere; raises `ConfigError` with one line per mistake."""
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"the configuration must be a mapping of sections such as 'target:', got {type(data).__name__}")
    try:
        return OutriderConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(item) for item in error.errors())) from None


def load_config(path: str | Path | None) -> OutriderConfig:
    """Read a YAML file; None gives the defaults."""
    if path is None:
        return OutriderConfig()
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read the configuration {path}: it is not UTF-8 text") from None
    try:
        data = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    try:
        return parse_config(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def cache_folder() -> Path:
    """Where fetched and converted models are kept: ``OUTRIDER_CACHE``, else ``XDG_CACHE_HOME/outrider``."""
    explicit = os.environ.get("OUTRIDER_CACHE")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"


def use_patient_threads() -> None:
    """Let OpenMP threads that wait for each other spin for some ten microseconds only; call before torch is imported.

    By default they spin for milliseconds. That is harmless on cores of one's own; but a spinning thread keeps the one it waits
    for off its core when there are more busy threads than cores: a step then takes 30 times as long (docs/log.md).
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def checked_number(field: str, text: str, inside: Callable[[float], bool], meaning: str) -> float:
    """The number that ``text`` is. Raises `ConfigError` that names ``field`` and says what it must be."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not inside(value):
        raise ConfigError(f"{field} must be {meaning}, got '{text}'")
    return value


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML keeps the last of two equal keys in silence: half of a section would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        repeated = next((key for index, key in enumerate(keys) if key in keys[:index]), None)
        if repeated is not None:
            raise yaml.YAMLError(f"the key '{repeated}' is given twice (line {node.start_mark.line + 1} and after)")
        return super().construct_mapping(node, deep)


def _explain(item: Any) -> str:
    location = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"unknown option '{location}'{_nearest(item['loc'])}"
    message = str(item["msg"]).removeprefix("Value error, ")
    return message if not location or message.startswith(location) else f"{location}: {message}"


def _nearest(location: tuple[Any, ...]) -> str:
    model: type[BaseModel] = OutriderConfig
    for part in location[:-1]:
        model = model.model_fields[part].annotation  # type: ignore[assignment]
    close = difflib.get_close_matches(str(location[-1]), model.model_fields, n=1, cutoff=0.5)
    if close:
        return f"; did you mean '{'.'.join([*map(str, location[:-1]), close[0]])}'?"
    return f"; known options here: {', '.join(model.model_fields)}"

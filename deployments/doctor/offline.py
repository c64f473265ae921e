"""What can be said of a configuration on this machine, before anything is started."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from deployments.doctor.findings import Finding, ok, problem, warning
from deployments.facts import installed_packages, memory_bytes
from deployments.launch import haproxy_is_available
from engine.build import draft_is_a_model, preflight
from engine.config import OutriderConfig
from engine.errors import OutriderError
from engine.testing.profiles import is_emulated

if TYPE_CHECKING:
    import torch

LITTLE_ROOM = 0.2
"""Of the memory, that should be left for the KV cache and everything else."""
INT8_BYTES = 1


def examine_config(config: OutriderConfig) -> list[Finding]:
    """All checks; the models' weights are not loaded. Where `preflight` fails, nothing that needs the models is looked at."""
    spin_count = os.environ.get("GOMP_SPINCOUNT")  # before preflight, which sets it for this process
    findings = [*_versions(), *_exposure(config), *_ingress()]
    try:
        tokenizer = preflight(config)
    except OutriderError as error:
        return [*findings, problem("configuration", str(error), "mend this first: the application would not start")]
    drafts = f"draft {config.draft.model or config.draft.source}"
    findings.append(ok("configuration", f"{tokenizer.name}, {drafts}: models, vocabularies and sizes fit"))
    if is_emulated(config.target.model):
        return [*findings, ok("devices", "emulated: steps are waited for, nothing is computed")]
    return [*findings, *_machine(config, spin_count)]


def _versions() -> Iterator[Finding]:
    yield ok("versions", ", ".join(f"{name} {version}" for name, version in installed_packages().items()))


def _exposure(config: OutriderConfig) -> Iterator[Finding]:
    if config.api.keys_file is None and config.api.host not in ("127.0.0.1", "localhost", "::1"):
        told = f"api.host is {config.api.host} and no key is asked for"
        yield warning("keys", told, "set api.keys_file, or let something in front of it ask who is calling")


def _ingress() -> Iterator[Finding]:
    if haproxy_is_available():
        yield ok("ingress", "HAProxy is there; with a cluster of your own set RAY_SERVE_ENABLE_HA_PROXY=1 before it starts")
    else:
        yield warning(
            "ingress", "no HAProxy: Ray Serve's Python proxy would be used", "install haproxy, or Ray's own wheel of it"
        )


def _machine(config: OutriderConfig, spin_count: str | None) -> Iterator[Finding]:
    from engine import models

    device = models.choose_device("auto" if config.target.num_gpus else config.target.device)
    dtype, reason = models.choose_dtype(config.target.dtype, device)
    yield ok("devices", f"target on {device} in {str(dtype).removeprefix('torch.')}: {reason}")
    if config.target.num_gpus and device.type == "cpu":
        told = f"target.num_gpus is {config.target.num_gpus:g}, and torch sees no GPU here"
        yield warning("devices", told, "right if the GPUs are on other nodes; else install torch's CUDA build, or set it to 0")
    if device.type == "cpu":
        yield from _cores(config, spin_count)
        yield from _kernels(config)
    yield from _memory(config, device, dtype)


def _cores(config: OutriderConfig, spin_count: str | None) -> Iterator[Finding]:
    num_cores = len(os.sched_getaffinity(0))
    told = f"{num_cores} cores, GOMP_SPINCOUNT {spin_count or 'not set (we set 10000)'}"
    if draft_is_a_model(config) and config.drafts.max and config.speculation.max_depth:
        advice = "right with nodes of their own; on one machine each gets threads with num_threads, and ngram takes none"
        yield warning("threads", f"{told}; the target and the draft {config.draft.source} share them", advice)
    else:
        yield ok("threads", told)


def _kernels(config: OutriderConfig) -> Iterator[Finding]:
    if config.target.kernels == "torch":
        yield warning(
            "kernels", "target.kernels is torch", "auto is about twice as fast where a C compiler and AVX-512 are there"
        )
        return
    from engine.verify.native.build import kernels

    if kernels() is None:
        advice = "a C compiler and AVX-512 double the speed on CPU; the log names what is missing"
        yield warning("kernels", "no compiled kernels here: torch's operations run", advice)
    else:
        yield ok("kernels", "compiled for this processor")


def _memory(config: OutriderConfig, device: "torch.device", dtype: "torch.dtype") -> Iterator[Finding]:
    available = _available_bytes(device)
    needed = weights_bytes(config, dtype.itemsize)
    if available is None:
        return
    told = f"weights take {needed / 1e9:.2f} GB of {available / 1e9:.1f} GB that are free on {device}"
    if needed > available:
        yield problem("memory", told, "a smaller model, target.quantization int8, or more memory")
    elif needed > (1 - LITTLE_ROOM) * available:
        yield warning("memory", told, "little is left for the KV cache: lower lanes.max_batch, or set target.kv_cache_tokens")
    else:
        yield ok("memory", told)


def weights_bytes(config: OutriderConfig, item_size: int) -> int:
    """Weights of a target in a dtype of ``item_size`` bytes and of its draft, as if both were on one device."""
    target = _num_parameters(config.target.model, "target.model")
    size = target * (INT8_BYTES if config.target.quantization == "int8" else item_size)
    if config.draft.source == "self-int8":
        size += target * INT8_BYTES
    elif config.draft.model is not None:
        size += _num_parameters(config.draft.model, "draft.model") * (INT8_BYTES if config.draft.dtype == "int8" else item_size)
    return size


def _num_parameters(name: str, field: str) -> int:
    """Modules on the meta device have shapes and no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    from engine.models import count_parameters, load_tokenizer

    with torch.device("meta"):
        return count_parameters(AutoModelForCausalLM.from_config(load_tokenizer(name, field).config))


def _available_bytes(device: "torch.device") -> int | None:
    import torch

    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return memory_bytes()[1]

"""Loading models: the default one for real, everything else on tiny random ones that the tests write."""

import json
import logging
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import ByteLevel

from engine import models
from engine.config import cache_folder
from engine.errors import ConfigError, ModelError
from engine.models import (
    DEFAULT_CONTEXT,
    LoadedModel,
    VocabularyIdentity,
    check_draft_is_smaller,
    check_same_vocabulary,
    choose_device,
    choose_dtype,
    count_parameters,
    load_model,
    load_tokenizer,
    resolve_model,
)

CPU = torch.device("cpu")
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
WORDS = ["<unk>", "</s>", "<|im_end|>", "<|eot_id|>", "one", "two", "three"]


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load_model("smollm2")


def write_folder(folder: Path, head_size: int = 16, template: str | None = TEMPLATE, **fields: Any) -> Path:
    """A random Llama with a tokenizer of seven words; its head is padded to ``head_size``."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=head_size, max_position_embeddings=128, eos_token_id=1, **sizes, **fields)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "tiny")


@pytest.fixture
def gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random Llama in Q4_1 with tied embeddings, as the default model, and an empty cache."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "tiny.Q4_1.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    write_gguf_header(writer)
    write_gguf_weights(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tokens() -> list[str]:
    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "he", "ll"]


def write_gguf_header(writer: gguf.GGUFWriter) -> None:
    tokens = gguf_tokens()
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)


def write_gguf_weights(writer: gguf.GGUFWriter) -> None:
    random = np.random.default_rng(0)
    layer = {
        "attn_q": (64, 64),
        "attn_k": (32, 64),
        "attn_v": (32, 64),
        "attn_output": (64, 64),
        "ffn_gate": (128, 64),
        "ffn_up": (128, 64),
        "ffn_down": (64, 128),
    }
    shapes = {f"blk.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    for name, shape in {"token_embd": (len(gguf_tokens()), 64), **shapes}.items():
        weight = 0.1 * random.standard_normal(shape, dtype=np.float32)
        kind = gguf.GGMLQuantizationType.Q4_1
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weight, kind), raw_dtype=kind)
    for name in ["output_norm", *(f"blk.{i}.{norm}" for i in range(2) for norm in ("attn_norm", "ffn_norm"))]:
        writer.add_tensor(f"{name}.weight", np.ones(64, np.float32))


@pytest.fixture
def gguf_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Weights read out of GGUF files since the start of the test."""
    reads: list[str] = []
    original = transformers.AutoModelForCausalLM.from_pretrained

    def spy(*args: Any, **kwargs: Any) -> Any:
        if "gguf_file" in kwargs:
            reads.append(kwargs["gguf_file"])
        return original(*args, **kwargs)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", spy)
    return reads


# The default model


@pytest.mark.parametrize(
    "text", ["plain words", "emoji 🙂👩‍👩‍👧 and CJK 漢字かな交じり文", "  spaces\n\n\ttabs 12 345\r\n", "é ñ ß"]
)
def test_default_tokenizer_round_trips(smollm2: LoadedModel, text: str) -> None:
    """Guards: a conversion that loses the byte level, or a decoder that cleans up spaces."""
    assert smollm2.tokenizer.decode(smollm2.tokenizer.encode(text)) == text


def test_default_model_knows_its_limits(smollm2: LoadedModel) -> None:
    """Guards: sizes lost in the conversion, so that texts never end or run out of the context."""
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.tokenizer.convert_ids_to_tokens(2) == "<|im_end|>"
    assert (smollm2.vocab_size, smollm2.max_context) == (49152, 8192)
    assert count_parameters(smollm2.model) == 134_515_008


def test_default_model_answers(smollm2: LoadedModel) -> None:
    """Guards: permuted or untied weights, a lost chat template: all of them make fluent or silent nonsense."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = smollm2.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = smollm2.model.generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = smollm2.tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_tokenizer_alone_is_the_same(smollm2: LoadedModel) -> None:
    """Guards: an Api that tokenises unlike the target it serves."""
    alone = load_tokenizer("smollm2")
    assert alone.fingerprint == smollm2.fingerprint
    assert (alone.eos_token_ids, alone.vocab_size, alone.max_context) == (
        smollm2.eos_token_ids,
        smollm2.vocab_size,
        smollm2.max_context,
    )


# GGUF


def test_gguf_is_converted_once(gguf_file: Path, gguf_reads: list[str]) -> None:
    """Guards: half a minute at each start of each actor."""
    first = load_model(str(gguf_file), dtype="float32")
    second = load_model(str(gguf_file), dtype="float32")
    assert gguf_reads == [gguf_file.name]
    assert first.fingerprint == second.fingerprint
    tokens = torch.arange(20)[None]
    assert torch.equal(first.model(tokens).logits, second.model(tokens).logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_converted_model_is_the_gguf_model(gguf_file: Path, dtype: str) -> None:
    """Guards: a conversion that changes weights, or a rotary embedding rounded to bfloat16."""
    direct = transformers.AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=getattr(torch, dtype)
    )
    converted = load_model(str(gguf_file), dtype=dtype).model
    tokens = torch.arange(200)[None]
    assert torch.equal(converted(tokens).logits, direct(tokens).logits)
    assert {parameter.dtype for parameter in converted.parameters()} == {getattr(torch, dtype)}
    assert {buffer.dtype for buffer in converted.buffers()} == {torch.float32}


def test_gguf_that_changed_is_converted_again(gguf_file: Path, gguf_reads: list[str]) -> None:
    """Guards: yesterday's weights served from the cache after the user replaced the file."""
    load_model(str(gguf_file), dtype="float32")
    size, changed_at = gguf_file.stat().st_size, gguf_file.stat().st_mtime
    gguf_file.write_bytes(gguf_file.read_bytes()[:-4] + bytes(4))
    os.utime(gguf_file, (changed_at, changed_at + 2))
    assert gguf_file.stat().st_size == size
    load_model(str(gguf_file), dtype="float32")
    assert len(gguf_reads) == 2


def test_gguf_tokenizer_needs_no_weights(gguf_file: Path, gguf_reads: list[str]) -> None:
    """Guards: an Api process that converts, and so holds in memory, all weights of the model."""
    loaded = load_tokenizer(str(gguf_file))
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("hello 🙂 漢字")) == "hello 🙂 漢字"
    assert loaded.tokenizer.chat_template == TEMPLATE
    assert (loaded.vocab_size, loaded.eos_token_ids, loaded.max_context) == (len(gguf_tokens()), (2,), 256)
    assert gguf_reads == []


def test_loading_is_quiet_and_leaves_the_settings(gguf_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards: progress bars of a library in the output of a server, or a library muted for the rest of the process."""
    settings = transformers.utils.logging
    before = (settings.get_verbosity(), settings.is_progress_bar_enabled())
    assert before == (logging.WARNING, True)
    load_model(str(gguf_file))
    assert capfd.readouterr() == ("", "")
    assert (settings.get_verbosity(), settings.is_progress_bar_enabled()) == before


def test_actors_that_start_together_convert_once(tmp_path: Path) -> None:
    """Guards: two conversions that write into one folder, or a load from one that is half written."""
    built: list[Path] = []

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "config.json").write_text("{}")

    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: models._build_once(tmp_path / "model", build), range(4)))
    assert folders == [tmp_path / "model"] * 4
    assert built == [tmp_path / "model.partial"]


def test_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    """Guards: a half-written folder taken for a model by the next start, or a full disk kept full."""

    def fail(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        models._build_once(tmp_path / "model", fail)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


# Folders


def test_folder_is_loaded_for_inference(folder: Path) -> None:
    """Guards: dropout at work, gradients kept, a dtype other than the one asked for."""
    loaded = load_model(str(folder), dtype="bfloat16", device="cpu")
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert (loaded.model.dtype, loaded.dtype, loaded.device) == (torch.bfloat16, torch.bfloat16, CPU)
    assert loaded.dtype_reason == "target.dtype asks for it"


def test_padding_of_the_head_is_not_vocabulary(folder: Path) -> None:
    """Guards: sampling an id that the tokenizer cannot decode."""
    loaded = load_model(str(folder))
    assert loaded.model.config.vocab_size == 16
    assert loaded.vocab_size == len(WORDS)
    assert loaded.vocabulary.tokens == tuple(WORDS)


def test_tokenizer_alone_ignores_weights(folder: Path) -> None:
    """Guards: an Api that needs the weights on its own node."""
    (folder / "model.safetensors").unlink()
    assert load_tokenizer(str(folder)).vocab_size == len(WORDS)


@pytest.mark.parametrize(("template", "expected"), [(TEMPLATE, (1, 2)), ("{{ messages }}<|eot_id|>", (1, 3)), (None, (1,))])
def test_chat_end_tokens_end_a_text(tmp_path: Path, template: str | None, expected: tuple[int, ...]) -> None:
    """Guards: a chat that runs on after its turn (base configs name only </s>), or one ended by a token it may use."""
    assert load_tokenizer(str(write_folder(tmp_path / "tiny", template=template))).eos_token_ids == expected


def test_generation_config_adds_its_end_tokens(folder: Path) -> None:
    """Guards: Llama 3 ends with any of three ids, which only generation_config.json lists."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5, 6]}))
    assert load_tokenizer(str(folder)).eos_token_ids == (1, 2, 5, 6)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (transformers.LlamaConfig(max_position_embeddings=99), 99),
        (transformers.GPT2Config(n_positions=77), 77),
        (transformers.MambaConfig(), DEFAULT_CONTEXT),
    ],
    ids=["llama", "gpt2", "mamba"],
)
def test_context_limit_by_any_name(config: Any, expected: int) -> None:
    """Guards: positions beyond the table of an older architecture, or no limit at all for a recurrent one."""
    assert models._max_context(config) == expected


# What cannot be loaded


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def garble_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def remove_tokenizer(folder: Path) -> None:
    """Of a family for which transformers then makes an empty one."""
    write_config(transformers.Qwen2Config())(folder)
    (folder / "tokenizer.json").unlink()


def garble_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut_weights(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-1000])


def forget_a_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


def write_config(config: Any, **fields: Any) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({**config.to_dict(), **fields}))

    return replace


def leave_only_gguf(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "model.Q8_0.gguf").write_bytes(b"GGUF")


BROKEN = {
    "no config": (remove_config, "has no config.json"),
    "a GGUF file inside": (leave_only_gguf, "model.Q8_0.gguf"),
    "garbled config": (garble_config, "not a valid JSON"),
    "no tokenizer": (remove_tokenizer, "tokenizer.json is missing"),
    "garbled tokenizer": (garble_tokenizer, "no usable tokenizer"),
    "no weights": (remove_weights, "model.safetensors"),
    "truncated weights": (cut_weights, "damaged"),
    "missing tensor": (forget_a_tensor, "incomplete: 1 tensors are missing, such as model.norm.weight"),
    "encoder-decoder": (write_config(transformers.T5Config(architectures=["T5Model"])), "T5Model is an encoder-decoder"),
    "no language model": (write_config(transformers.ViTConfig()), "vit is not a causal language model"),
    "masked": (write_config(transformers.BertConfig(architectures=["BertForMaskedLM"])), "does not predict the next token"),
    "reward": (write_config(transformers.LlamaConfig(architectures=["LlamaForSequenceClassification"])), "must be Llama"),
    "unknown": (write_config(transformers.LlamaConfig(), model_type="nonesuch"), "nonesuch"),
}


@pytest.mark.parametrize(("harm", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_folder_is_one_clear_line(folder: Path, harm: Callable[[Path], None], message: str) -> None:
    """Guards: a traceback; and transformers' random numbers in place of a tensor that is not there."""
    harm(folder)
    with pytest.raises(ModelError) as caught:
        load_model(str(folder), field="draft.model", device="cpu")
    assert str(caught.value).startswith("draft.model: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["./nowhere", "/nowhere/model", "../model", "a/b/c", "model.gguf", "owner/model.gguf", "~/nowhere"]
)
def test_missing_path_is_not_a_hub_id(name: str) -> None:
    """Guards: a mistyped path looked for on the network, and reported as "repository not found"."""
    with pytest.raises(ModelError, match=r"target\.model: no such model: there is no file or folder"):
        resolve_model(name)


def test_file_of_another_kind(tmp_path: Path) -> None:
    """Guards: a checkpoint file named instead of its folder, handed to the GGUF reader."""
    (tmp_path / "model.safetensors").write_bytes(bytes(8))
    with pytest.raises(ModelError, match="neither a GGUF file nor a folder"):
        resolve_model(str(tmp_path / "model.safetensors"))


def test_damaged_gguf_is_one_clear_line(gguf_file: Path) -> None:
    """Guards: an exception of the GGUF reader, and a converted folder left behind."""
    gguf_file.write_bytes(gguf_file.read_bytes()[:500])
    with pytest.raises(ModelError, match=r"^target\.model: '.*tiny\.Q4_1\.gguf': the GGUF file is damaged") as caught:
        load_model(str(gguf_file))
    assert "\n" not in str(caught.value)
    assert not [path for path in (cache_folder() / "converted").iterdir() if path.is_dir()]


def test_hub_models_are_resolved_without_network() -> None:
    """Guards: a start that needs the network to find out that a name is a name."""
    assert resolve_model("owner/model").kind == "hub"
    assert resolve_model("gpt2").kind == "hub"


def test_hub_downloads_tokenizer_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: gigabytes downloaded for a tokenizer, or before an architecture is refused."""
    asked: list[list[str]] = []

    def download(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr(models, "snapshot_download", download)
    load_tokenizer("owner/model")
    assert all("*.safetensors" not in patterns for patterns in asked)
    assert load_model("owner/model").name == "owner/model"
    assert "*.safetensors" in asked[-1]


def test_unreachable_hub_names_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a typo in an alias, on a machine without network, answered with a stack of connection errors."""

    def download(name: str, **_: Any) -> str:
        raise LocalEntryNotFoundError("Got: ConnectError\nAn error happened")

    monkeypatch.setattr(models, "snapshot_download", download)
    with pytest.raises(ModelError) as caught:
        load_model("smollm")
    assert str(caught.value).startswith("target.model: 'smollm': not on this machine, and Hugging Face cannot be reached")
    assert "an alias (smollm2)" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_out_of_memory_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a CUDA traceback where the advice is a smaller model."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has ...")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(ModelError, match="does not fit into the memory of cpu: choose a smaller model") as caught:
        load_model(str(folder), device="cpu")
    assert "\n" not in str(caught.value)


# Device and dtype


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:", "cpu:0", "mps", ""])
def test_unknown_device_is_refused(name: str) -> None:
    """Guards: a typo that torch reports without naming the field."""
    with pytest.raises(ConfigError, match=r"draft\.device: '.*' is not a device"):
        choose_device(name, field="draft.device")


def test_absent_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a fall-back to the CPU that nobody asked for, or an assertion inside torch."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == CPU
    with pytest.raises(ConfigError, match=r"target\.device: 'cuda:1' asked for, but torch sees no CUDA device"):
        choose_device("cuda:1")


def test_cuda_devices_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: an index beyond the last device, found out only when the weights arrive."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == torch.device("cuda")
    assert choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ConfigError, match="only 2 CUDA devices"):
        choose_device("cuda:2")


@pytest.mark.parametrize(
    ("capability", "expected"), [((9, 0), torch.bfloat16), ((8, 0), torch.bfloat16), ((7, 5), torch.float16)]
)
def test_dtype_of_cuda(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: torch.dtype) -> None:
    """Guards: bfloat16 emulated on a GPU that does not compute in it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    dtype, reason = choose_dtype("auto", torch.device("cuda"))
    assert dtype == expected
    assert f"{capability[0]}.{capability[1]}" in reason


@pytest.mark.parametrize(("supported", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
@pytest.mark.parametrize("torch_knows", [True, False])
def test_dtype_of_cpu(monkeypatch: pytest.MonkeyPatch, supported: bool, expected: torch.dtype, torch_knows: bool) -> None:
    """Guards: bfloat16 emulated on a CPU that does not compute in it; and the private functions of torch going away."""
    for function in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        if torch_knows:
            monkeypatch.setattr(torch.cpu, function, lambda: supported, raising=False)
        else:
            monkeypatch.delattr(torch.cpu, function, raising=False)
    monkeypatch.setattr(models, "_cpu_flags", lambda: {"avx512f", "amx_bf16"} if supported else {"avx512f"})
    assert choose_dtype("auto", CPU)[0] == expected


def test_unknown_dtype_is_refused() -> None:
    """Guards: a typo answered by an attribute error of torch."""
    with pytest.raises(ConfigError, match=r"target\.dtype: 'fp8' is not a dtype"):
        choose_dtype("fp8", CPU)


# Draft and target


def vocabulary(tokens: list[str | None], name: str = "target", eos: tuple[int, ...] = (1,)) -> VocabularyIdentity:
    return VocabularyIdentity(name, tuple(tokens), eos)


def test_vocabularies_that_differ_are_refused() -> None:
    """Guards: a draft whose every token means another word: lossless still, but never accepted."""
    with pytest.raises(ModelError) as caught:
        check_same_vocabulary(vocabulary(["a", "b", "c", "d"]), vocabulary(["a", "c", "b", "d"], "draft"))
    message = str(caught.value)
    assert "'target' (target) and 'draft' (draft) disagree on 2 ids" in message
    assert "id 1 is 'b' and 'c', id 2 is 'c' and 'b'" in message


@pytest.mark.parametrize("draft", [["a", "b", "c"], ["a", "b"], ["a", "b", "c", "d"], ["a", None, "c"]])
def test_shorter_and_longer_vocabularies_match(draft: list[str | None]) -> None:
    """Guards: pairs of one family refused because one side has a few added tokens more, or leaves a hole."""
    check_same_vocabulary(vocabulary(["a", "b", "c"]), vocabulary(draft))


def test_padded_heads_match(tmp_path: Path) -> None:
    """Guards: Qwen2.5 pairs (heads of 151936 and 152064 rows over one tokenizer) refused by the sizes of their heads."""
    pair = [load_tokenizer(str(write_folder(tmp_path / str(size), head_size=size))) for size in (16, 24)]
    assert pair[0].fingerprint == pair[1].fingerprint
    check_same_vocabulary(pair[0].vocabulary, pair[1].vocabulary)


def test_other_end_tokens_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Guards: base draft and chat target refused, or their difference kept from the user who wonders at the acceptance."""
    check_same_vocabulary(vocabulary(["a", "b", "c"]), vocabulary(["a", "b", "c"], "draft", (1, 2)))
    assert "'target' ends a text with ids (1,), draft 'draft' with (1, 2)" in caplog.text
    caplog.clear()
    check_same_vocabulary(vocabulary(["a", "b", "c"]), vocabulary(["a", "b", "c"]))
    assert caplog.text == ""


def test_swapped_models_are_refused() -> None:
    """Guards: the large model drafting for the small one."""
    check_draft_is_smaller(1000, 1000)
    check_draft_is_smaller(1000, 10)
    with pytest.raises(ModelError, match=r"draft\.model has 2\.0M parameters, target\.model only 1\.0M: .* swapped\?"):
        check_draft_is_smaller(1_000_000, 2_000_000)


def test_tied_parameters_count_once(tmp_path: Path) -> None:
    """Guards: small models, whose embeddings are tied, counted as larger than they are."""
    tied, untied = (load_model(str(write_folder(tmp_path / str(tie), tie_word_embeddings=tie))).model for tie in (True, False))
    assert count_parameters(untied) - count_parameters(tied) == 16 * 32

"""Random models of real architectures, small enough that a forward takes milliseconds, and the path that each runs by."""

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

from engine.models import LoadedModel

VOCAB = 97
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW: dict[str, Any] = {"sliding_window": 8}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: dict[str, Any] = {  # keys and values from one narrow latent; values narrower than keys
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
GPT: dict[str, Any] = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256, "n_ctx": 256}
DELTA: dict[str, Any] = {  # linear attention with the delta rule; wider weights would make it amplify its own rounding
    **EXPERTS,
    "initializer_range": 0.05,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 16,
}
MAMBA: dict[str, Any] = {"state_size": 4, "conv_kernel": 3, "time_step_rank": 4}
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}

DENSE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": WINDOW,
    "qwen2": {},
    "qwen3": {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
}
"""Families of the lean forward, by model type, and what their configuration changes of `SMALL`."""
GENERIC: dict[str, dict[str, Any]] = {
    "ministral": WINDOW,
    "ministral3": {},
    "gemma": {},
    "gemma2": {**WINDOW, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "gemma3_text": {**WINDOW, "query_pre_attn_scalar": 8},  # two rotary tables
    "gemma3n_text": {
        **WINDOW,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,  # layers that use the keys of others
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {**WINDOW, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "global_head_dim": 8},
    "gpt_oss": {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},  # sinks
    "mixtral": {**WINDOW, "num_local_experts": 4},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": EXPERTS,
    "olmoe": EXPERTS,
    "flex_olmo": EXPERTS,
    "granitemoe": {"num_local_experts": 4},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
    "deepseek_v2": {**LATENT, "topk_method": "greedy"},
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT,
    "minicpm3": LATENT,
    "olmo": {},
    "olmo2": {},
    "olmo3": WINDOW,
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": WINDOW,
    "phimoe": {**WINDOW, "num_local_experts": 4},  # a window that only the mask knows
    "llama4_text": {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 48},
    "gpt2": GPT,
    "gptj": {**GPT, "rotary_dim": 4},
    "gpt_neox": {},
    "gpt_bigcode": GPT,
    "codegen": {**GPT, "rotary_dim": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "biogpt": {},
    "cohere": {},
    "cohere2": WINDOW,
    "glm": {},
    "glm4": {},
    "starcoder2": WINDOW,
    "stablelm": {},
    "granite": {},
    "nemotron": {},
    "exaone4": WINDOW,
    "smollm3": {},
    "seed_oss": {},
    "ernie4_5": {},
    "hunyuan_v1_dense": {},
    "helium": {},
    "internlm3": {},
    "arcee": {},
    "apertus": {},
    "persimmon": {},
    "bitnet": {},
    "diffllama": {},  # two attentions per layer
}
"""Families whose own layers run packed."""
CROPPED: dict[str, dict[str, Any]] = {
    "bloom": {"n_head": 4, "n_layer": 2},  # positions from the mask
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "falcon": {"head_dim": None, "multi_query": True},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 8, "num_hidden_layers": 2},
    "xglm": {"d_model": 32, "attention_heads": 4, "ffn_dim": 48, "num_layers": 2},
    "doge": {},  # a mask from the content
    # many index heads, since ties among the tokens to attend to may be broken either way
    "deepseek_v32": {**LATENT, "index_topk": 8, "index_n_heads": 16, "index_head_dim": 8},
}
"""Families that run sequence by sequence and only attend."""
REPLAYED: dict[str, dict[str, Any]] = {
    "mamba2": {"state_size": 8, "conv_kernel": 4, "num_heads": 8, "n_groups": 1, "chunk_size": 8},
    "bamba": {**MAMBA2, "attn_layer_indices": [1]},
    "falcon_h1": MAMBA2,  # attention and state in the same layer
    "granitemoehybrid": {
        **MAMBA2,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 16,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "hybrid_layer_ids": [1],
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "chunk_size": 8,
        "num_mem_blocks": 1,
        "adapter_rank": 4,
        "num_key_value_heads": 4,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "qwen3_next": DELTA,
    "qwen3_5_text": DELTA,
    "olmo_hybrid": DELTA,
    "kimi_linear": {
        **LATENT,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 8,
            "short_conv_kernel_size": 4,
            "kda_layers": [1, 3],
            "full_attn_layers": [2],
        },
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "minimax": {  # a cache class of its own
        "num_local_experts": 2,
        "layer_types": ["full_attention", "linear_attention", "full_attention"],
        "block_size": 8,
    },
    "deepseek_v4": {},  # keys that are merged as they age
}
"""Families that run sequence by sequence and fold the past into states, which only a copy takes back."""
ONE_BY_ONE: dict[str, dict[str, Any]] = {
    "mamba": MAMBA,
    "falcon_mamba": MAMBA,
    "jamba": {
        "initializer_range": 0.1,  # as above
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "num_experts": 2,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    },
}
"""Families whose code for several tokens ignores the state before them."""
NEVER_ALONE = ("zamba2", "nemotron_h")
"""Families whose code for a single token leaves the lower limit of the time step out."""
FAMILIES = {**DENSE, **GENERIC, **CROPPED, **REPLAYED, **ONE_BY_ONE}
PATHS = {
    **dict.fromkeys(DENSE, "dense"),
    **dict.fromkeys(GENERIC, "generic"),
    **dict.fromkeys((*CROPPED, *REPLAYED, *ONE_BY_ONE), "stateful"),
}


def tiny_model(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> LoadedModel:
    """A random model of a family; None in ``changes`` leaves a field to the architecture."""
    torch.manual_seed(5)
    fields = {**SMALL, **FAMILIES.get(family, {}), **changes}
    config = transformers.AutoConfig.for_model(family, **{name: field for name, field in fields.items() if field is not None})
    config.architectures = [family]
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    for parameter in model.parameters():  # some initialise norms and biases to constants, which hides their absence
        parameter.requires_grad_(False).add_(0.1 * torch.randn_like(parameter))
    return LoadedModel(
        name=f"tiny-{family}",
        tokenizer=None,
        config=config,
        eos_token_ids=(2,),
        vocab_size=VOCAB,
        max_context=256,
        fingerprint="tiny",
        model=model,
        dtype=dtype,
        dtype_reason="test",
        device=torch.device("cpu"),
    )


def plain_logits(model: nn.Module, ids: list[int]) -> Tensor:
    """Logits [n, V] without a cache."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].clone()


def random_ids(count: int) -> list[int]:
    """Ids that are neither padding nor the end of a text."""
    return torch.randint(3, VOCAB, (count,)).tolist()


def write_byte_llama(folder: Path, **sizes: int) -> Path:
    """A random Llama whose tokens are bytes, with its tokenizer: two layers of 32 where ``sizes`` say nothing else."""
    torch.manual_seed(3)
    usual = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    config = transformers.LlamaConfig(vocab_size=258, eos_token_id=257, initializer_range=0.2, **{**usual, **sizes})
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate([*alphabet, "<unk>", "</s>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    return folder

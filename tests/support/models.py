"""Tiny models of transformers with random weights, one for each architecture that tests name, and their results with any implementation of
attention. Imports transformers, which takes seconds."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable

import torch
import transformers
from transformers.masking_utils import sdpa_mask

VOCABULARY = 61
_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
_WINDOW = 6
_MIXED = {"sliding_window": _WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_ENCODER = {**_SIZES, "pad_token_id": 0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SEQ2SEQ = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "decoder_start_token_id": 1}
_BART = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))}

# an architecture: the prefix of its config's name, its class, what its config holds
CAUSAL = {
    "llama": ("Llama", "LlamaForCausalLM", _GROUPED),
    "gemma2": ("Gemma2", "Gemma2ForCausalLM", {**_GROUPED, **_MIXED, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}),
    "mistral": ("Mistral", "MistralForCausalLM", {**_GROUPED, "sliding_window": _WINDOW}),
    "qwen3": ("Qwen3", "Qwen3ForCausalLM", _GROUPED),
    "gpt_oss": (
        "GptOss",
        "GptOssForCausalLM",
        {
            **_GROUPED,
            **_MIXED,
            "num_local_experts": 2,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        "DeepseekV3ForCausalLM",
        {
            **{name: value for name, value in _GROUPED.items() if name != "head_dim"},
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "first_k_dense_replace": 2,
        },
    ),
    "gpt2": (
        "GPT2",
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCABULARY,
            **{"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
            **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "scale_attn_by_inverse_layer_idx": True},
        },
    ),
}
ENCODERS = {
    "bert": ("Bert", "BertForMaskedLM", _ENCODER),
    "modernbert": (
        "ModernBert",
        "ModernBertForMaskedLM",
        {**_SIZES, "pad_token_id": 0, "local_attention": _WINDOW, "global_attn_every_n_layers": 2}
        | {f"{name}_token_id": 1 for name in ("bos", "eos", "cls", "sep")},
    ),
    "vit": ("ViT", "ViTForImageClassification", {**_ENCODER, "image_size": 16, "patch_size": 4, "num_labels": 5}),
}
SEQ2SEQ = {
    "t5": (
        "T5",
        "T5ForConditionalGeneration",
        {**_SEQ2SEQ, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0},
    ),
    "bart": ("Bart", "BartForConditionalGeneration", {**_SEQ2SEQ, **_BART, "d_model": 32, "dropout": 0.0, "forced_eos_token_id": None}),
}
ALL = {**CAUSAL, **ENCODERS, **SEQ2SEQ}
_FEW_SIZES = {**_ENCODER, "max_position_embeddings": 64}
_OLD_SIZES = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4}
_DECODER = {**_SEQ2SEQ, **_BART, "d_model": 32, "dropout": 0.0, "max_position_embeddings": 64}
# models whose masks say something else than their modules' is_causal: class, config
OTHERS = {
    "clap": ("ClapTextModel", _FEW_SIZES),
    "splinter": ("SplinterModel", _FEW_SIZES),
    "align": ("AlignTextModel", _FEW_SIZES),
    "nllb_moe": ("NllbMoeDecoder", {**_DECODER, "num_experts": 2, "router_jitter_noise": 0.0}),
    "pegasus_x": ("PegasusXDecoder", _DECODER),
}
# models that take masks for tensors: class, config, and what they do to a mask first
REFUSED = {
    "codegen": ("CodeGenForCausalLM", {**_OLD_SIZES, "n_positions": 64, "rotary_dim": 4}, "add"),
    "bloom": ("BloomForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "add"),
    "mpnet": ("MPNetModel", _FEW_SIZES, "add"),
    "xglm": (
        "XGLMForCausalLM",
        {"vocab_size": VOCABULARY, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
        "mask.size",
    ),
    "mpt": (
        "MptForCausalLM",
        {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
        "mask.to(torch.bool)",
    ),
    "led": ("LEDDecoder", {**_DECODER, "attention_window": 8}, "mask.size"),
    "longformer": ("LongformerModel", {**_FEW_SIZES, "attention_window": 8}, "__getitem__"),
    "canine": ("CanineModel", {**_FEW_SIZES, "num_hash_buckets": 64, "local_transformer_stride": 8}, "mask.to(torch.float32)"),
    "doge": ("DogeForCausalLM", {**_SIZES, "num_key_value_heads": 2}, "mask.dtype"),
}


def model_of(name: str, device: str, **more) -> transformers.PreTrainedModel:
    """The same weights at every call, float32; `more` is for its config."""
    prefix, kind, options = ALL[name]
    options = {key: value for key, value in options.items() if key != "pad_token_id" or name != "vit"}
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, f"{prefix}Config")(**{**options, **more}))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if name != "t5" and (weight.dim() > 1 or "sink" in key):
                weight.mul_(3.0)  # scores have to matter; those of T5 are not scaled
    if name in ("gpt_oss", "deepseek_v3"):
        model.set_experts_implementation("eager")  # others have no float64
    return model.to(device)


def other_model_of(name: str, implementation: str) -> transformers.PreTrainedModel:
    """A model of OTHERS or REFUSED, with the same weights at every call. Some of the classes are in their own modules only."""
    kind, options = {**OTHERS, **REFUSED}[name][:2]
    kind = getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), kind)
    torch.manual_seed(0)
    model = kind._from_config(kind.config_class(**options), attn_implementation=implementation)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(3.0)  # scores have to matter
    return model.eval()


def inputs_of(name: str, device: str, length: int = 20, padded: int = 5) -> dict[str, torch.Tensor]:
    """Arguments of a forward pass, for two sequences. The first has so many tokens of padding: at its left, or if below 0 at its right."""
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator).to(device)}
    ids = torch.randint(2, VOCABULARY, (2, length), generator=generator)
    seen = torch.ones_like(ids)
    seen[0, slice(0, padded) if padded >= 0 else slice(padded, None)] = 0
    given = {"input_ids": ids.to(device), "attention_mask": seen.to(device)}
    if name in SEQ2SEQ:
        given["decoder_input_ids"] = torch.randint(2, VOCABULARY, (2, length - 4), generator=generator).to(device)
    return given


def _dense(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, **terms):
    """Attention by its definition, for float64: eager attention's softmax is float32, and NaN in rows that float64's least number hides."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if terms.get("softcap") is not None:
        scores = terms["softcap"] * (scores / terms["softcap"]).tanh()
    if terms.get("position_bias") is not None:
        scores = scores + terms["position_bias"]
    if attention_mask is None and query.shape[2] > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        attention_mask = torch.ones_like(scores, dtype=torch.bool).tril()
    if attention_mask is not None:
        hidden = torch.full_like(scores, float("-inf"))
        scores = torch.where(attention_mask, scores, hidden) if attention_mask.dtype == torch.bool else scores + attention_mask
    if terms.get("s_aux") is not None:
        scores = torch.cat([scores, terms["s_aux"].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    largest = scores.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
    weights = (scores - largest).exp()
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)
    return (weights[..., : key.shape[2]] @ value).transpose(1, 2).contiguous(), None


transformers.AttentionInterface.register("dense", _dense)
transformers.AttentionMaskInterface.register("dense", sdpa_mask)


def results(
    model: transformers.PreTrainedModel, implementation: str, given: dict, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Logits where tokens are no padding, and the gradients of all weights, of a copy of the model in this dtype."""
    model = copy.deepcopy(model).to(dtype)
    model.set_attn_implementation(implementation)
    given = {key: value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value for key, value in given.items()}
    logits = model(**given).logits
    padding = given.get("attention_mask")
    if "decoder_input_ids" not in given and isinstance(padding, torch.Tensor) and padding.dim() == 2:
        logits = logits[padding.bool()]
    backward(logits)
    return [logits.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)]


def backward(logits: torch.Tensor) -> None:
    """Gradients of the logits in a direction that is always the same."""
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (logits.double() * direction.to(logits.device)).sum().backward()


def results_nearby(model: transformers.PreTrainedModel, given: dict, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Dense attention in float64, of three models whose weights are off by as much as rounding to `dtype` makes of them."""
    found = []
    for seed in range(3):
        generator, near = torch.Generator().manual_seed(seed), copy.deepcopy(model).double()
        with torch.no_grad():
            for weight in near.parameters():
                noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight.device)
                weight.mul_(1 + torch.finfo(dtype).eps / 2 * noise)
        found.append(results(near, "dense", given, torch.float64))
    return found


def assert_as_eager(
    found: list[torch.Tensor],
    eager: list[torch.Tensor],
    exact: list[torch.Tensor],
    floor: float,
    nearby: Callable[[], list[list[torch.Tensor]]] = list,
) -> None:
    """No tensor's error is above twice eager's and `floor`, by norms, as parts of the tensor's own; `exact` is dense attention in float64.
    Gradients that cancel, such as that of a bias of keys, have no size of their own: it is a hundredth of the others' mean.

    nearby   what models that differ from this one by a rounding have, exactly. Eager's error in a gradient of two numbers is one draw,
             and may be small by chance: what a rounding of the weights makes of a tensor is allowed as well
    """
    assert len(found) == len(eager) == len(exact) > 1
    least = torch.stack([t.norm() for t in exact[1:]]).mean() / 100
    others: list[list[torch.Tensor]] | None = None
    for i, (ours, theirs, true) in enumerate(zip(found, eager, exact, strict=True)):
        error, allowed = ((t.double() - true).norm() / torch.maximum(true.norm(), least) for t in (ours, theirs))
        if error > 2 * allowed + floor:
            others = nearby() if others is None else others
            moved = [(other[i] - true).norm() / torch.maximum(true.norm(), least) for other in others]
            allowed = max([allowed, *moved])
        assert error <= 2 * allowed + floor, (error, allowed, true.shape)

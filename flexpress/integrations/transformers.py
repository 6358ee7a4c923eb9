"""Hugging Face transformers: `attn_implementation="flexpress"`.

    import flexpress.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flexpress")

Two functions are registered, with the arguments that transformers 5 gives them. The mask function runs once for each kind of mask in a
forward pass, and the attention function once a layer. docs/transformers.md lists what they take and what they refuse.

No mask of S x S is made. The mask function returns a Mask, with what the mask needs to know:

Mask without a mask_mod     nothing is hidden
Mask without a block mask   a mask that reads no tensors, such as causal or a sliding window. The kernels' block lists of these are kept
Mask with a block mask      one that reads tensors (padding, packed sequences, the length of a static cache): lists made once for all layers

It never returns None. To models that add masks to scores themselves None would be a mask that hides nothing; a Mask raises an error there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention import flex_attention as torchs

from flexpress.attention import flex_attention
from flexpress.masks.block_mask import DEFAULT_BLOCK_SIZE, BlockMask
from flexpress.masks.mask_creation import create_block_mask
from flexpress.masks.mask_mods import without_ones
from flexpress.mods import causal

from ..codegen.mod.captured.levels import is_mapped
from ..codegen.mod.captured.tensors import is_transformed
from ..codegen.mod.tracing.bind import bind
from .transformers_mask import Mask

NAME = "flexpress"
_REFUSED = {  # what else may come to an attention function and changes what it computes
    "cache": "paged cache of generate_batch (generate has none; flexpress.cached_attention is for servers)",
    "indices": "attention to chosen keys",
    "block_indices": "attention to chosen blocks of keys",
    "sinks": "sinks that differ from query to query",
}
OLDEST = 5  # transformers' first version with these interfaces


def register() -> None:
    """Make `attn_implementation="flexpress"` known to transformers. Importing this module has done so.

    Raises ImportError where transformers is missing or older than 5.
    """
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def _interfaces() -> tuple:
    """transformers' two registries, its logging, and its test for tensors without values."""
    remedy = f"flexpress.integrations.transformers needs transformers {OLDEST} or newer; install transformers>={OLDEST}"
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"{remedy} ({error})", name="transformers") from error
    if int(transformers.__version__.split(".")[0]) < OLDEST:
        raise ImportError(f"{remedy}. This is {transformers.__version__}", name="transformers")
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.utils import logging
    from transformers.utils.import_utils import is_tracing

    return AttentionInterface, AttentionMaskInterface, logging.get_logger(__name__), is_tracing


AttentionInterface, AttentionMaskInterface, _logger, _is_tracing = _interfaces()


def mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: torch.Tensor | Mask | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    cache_position: torch.Tensor | None = None,
    config: object = None,
    **_,
) -> Mask:
    """The mask of a forward pass, for the attention function below. transformers calls this.

    q_offset, kv_offset    the positions of the first query and of the first key; q_offset of a static cache is a tensor
    mask_function          mask_function(b, h, q_idx, kv_idx) -> bool on positions; causal by default
    attention_mask         (batch_size, positions so far), bool: False where a key is padding; or a Mask, which is returned
    local_size             the window's size, or the chunk's, if mask_function has one
    cache_position         (q_length,): positions of queries, which the first versions of transformers 5 give instead of q_length, q_offset
                           and device
    allow_is_..._skip      without padding, mask_function is no more than causal, or hides nothing
    config                 the model's

    In eager mode the host reads whether anything is padding, as for other implementations, and waits for that; not while torch
    compiles and not in the capture of a CUDA graph.
    """
    if isinstance(attention_mask, Mask):  # `generate` makes masks before a step, and the model hands them in again
        return attention_mask
    if cache_position is not None:
        q_length, device = cache_position.shape[0], cache_position.device
        q_offset = 0 if q_length == kv_length else cache_position[0]
    if mask_function is None:
        mask_function = causal
    # a length that is compared is a guard where torch compiles: behind a mask without values nobody needs to know
    is_asked = attention_mask is None or not _without_values(attention_mask)
    is_local = is_asked and local_size is not None and kv_length >= local_size
    queries = (q_offset, q_length) if allow_is_causal_skip and not is_local else None
    padding = _padding(attention_mask, kv_length + kv_offset, queries)
    if padding is None and not is_local and not isinstance(q_offset, torch.Tensor):
        starts_at_its_keys = q_length == 1 or q_length == kv_length or q_offset == 0
        if allow_is_bidirectional_skip or (allow_is_causal_skip and starts_at_its_keys):
            all_seen = allow_is_bidirectional_skip or q_length == 1
            return Mask((batch_size, 1, q_length, kv_length), None if all_seen else causal, config=config)
    if isinstance(q_offset, torch.Tensor):
        q_offset = q_offset.clone()  # the cache adds to its own in place, before the kernels read this
    mask_mod = _mask_mod(mask_function, q_offset, kv_offset, None if padding is None else padding.expand(batch_size, -1))
    block_mask = None
    if torch.compiler.is_compiling() or (not is_transformed() and bind(mask_mod, "mask", device)[0].tensors):
        columns = -(-kv_length // DEFAULT_BLOCK_SIZE)  # as many as there are: nobody waits for the densest row
        block_mask = create_block_mask(mask_mod, batch_size, None, q_length, kv_length, device, capacity=columns)
    return Mask((batch_size, 1, q_length, kv_length), mask_mod, block_mask, config)


def _padding(attention_mask: torch.Tensor | None, length: int, queries: tuple[int | torch.Tensor, int] | None) -> torch.Tensor | None:
    """The attention_mask, False after its end; None if no key is padding and what comes after its end is none, or hidden in any case: it
    does not end before queries of which none sees beyond itself. `queries`: the position of the first one, and how many there are."""
    if attention_mask is None:
        return None
    given = attention_mask.shape[-1]
    if not _without_values(attention_mask):
        reaches = given >= length or (queries is not None and bool(queries[0] + queries[1] <= given))
        if reaches and bool(attention_mask.all()):
            return None
    return torch.nn.functional.pad(attention_mask, (0, length - given)) if given < length else attention_mask


def _without_values(tensor: torch.Tensor) -> bool:
    return _is_tracing(tensor) or is_mapped(tensor) or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _mask_mod(mask_function: Callable, q_offset: int | torch.Tensor, kv_offset: int, padding: torch.Tensor | None) -> Callable:
    """The mask_mod on indices of a function of positions."""

    def attended(b, h, q_idx, kv_idx):
        return mask_function(b, h, q_idx + q_offset, kv_idx + kv_offset)

    def attended_and_not_padding(b, h, q_idx, kv_idx):
        return attended(b, h, q_idx, kv_idx) & padding[b, kv_idx + kv_offset]

    if padding is not None:
        return attended_and_not_padding
    return mask_function if isinstance(q_offset, int) and q_offset == kv_offset == 0 else attended


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | Mask | torchs.BlockMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    kernel_options: dict | None = None,
    output_attentions: bool = False,
    **more,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer. transformers calls this.

    query, key, value   (B, Hq, Q_LEN, D), (B, Hkv, KV_LEN, D), (B, Hkv, KV_LEN, Dv)
    attention_mask      what `mask` returned, a BlockMask, or a tensor that broadcasts to (B, Hq, Q_LEN, KV_LEN or more): bool, True where a
                        key is seen, or floating, added to the scores
    is_causal           without a mask: does query i see keys 0 to i? By default the module's is_causal. Masks of `mask` say it themselves
    softcap             scores become softcap * tanh(score / softcap), before anything is added
    dropout             weights are dropped with this probability, in training alone; torch's generator gives the seed
    s_aux               (Hq,): attention sinks, the score of a key without a value
    position_bias       broadcasts to (B, Hq, Q_LEN, KV_LEN or more), added to the scores; may be learned
    kernel_options      as for flex_attention; model(..., kernel_options=...) passes them on

    Returns the output (B, Q_LEN, Hq, Dv), and None for the weights, which are never in memory. Raises ValueError for masks that do not fit
    and where nothing says whether attention is causal, NotImplementedError for what would change the result and is not here (_REFUSED).
    """
    _check(module, output_attentions, more)
    shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    mask_mod, block_mask, score_terms = None, None, []
    if position_bias is not None:
        score_terms.append(_checked("position_bias", position_bias, shape))
    if attention_mask is None:
        mask_mod = causal if shape[2] > 1 and _is_causal(module, is_causal) else None
    elif isinstance(attention_mask, Mask):
        mask_mod, block_mask = _read(attention_mask, module, shape)
    elif not isinstance(attention_mask, torch.Tensor):
        block_mask = attention_mask
    elif _checked("attention_mask", attention_mask, shape).dtype == torch.bool:
        mask_mod = _dense_mask(attention_mask)
    else:
        score_terms.append(attention_mask)
    out = flex_attention(
        query,
        key,
        value,
        _score_mod(softcap, score_terms),
        block_mask,
        scaling,
        enable_gqa=True,
        kernel_options=kernel_options,
        mask_mod=mask_mod,
        sinks=s_aux,
        dropout_p=dropout if module.training else 0.0,
    )
    return out.transpose(1, 2).contiguous(), None


def _check(module: torch.nn.Module, output_attentions: bool, more: dict) -> None:
    for name, what in _REFUSED.items():
        if more.get(name) is not None:
            raise NotImplementedError(f'attn_implementation="flexpress" has no {what}, which {type(module).__name__} asks for ({name})')
    if output_attentions:
        _logger.warning_once('attn_implementation="flexpress" has no attention weights to output; load the model with "eager" to see them')


def _is_causal(module: torch.nn.Module, is_causal: bool | None) -> bool:
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    if is_causal is None:  # eager attention would hide nothing, and sdpa the keys after a query
        raise ValueError(f"{type(module).__name__} gives attention no mask and no is_causal: pass a mask, or is_causal=True or False")
    return is_causal


def _read(mask: Mask, module: torch.nn.Module, shape: tuple[int, int, int, int]) -> tuple[Callable | None, BlockMask | None]:
    """A Mask's mask_mod or block mask. One that hides something has the scores' lengths; more keys than these are no harm."""
    if mask.mask_mod is not None and (mask.shape[2] != shape[2] or mask.shape[3] < shape[3]):
        raise ValueError(
            f"the model's mask is for {mask.shape[2]} queries and {mask.shape[3]} keys, but {type(module).__name__} has {shape[2]} and "
            f"{shape[3]} of them. Load the model with another attn_implementation"
        )
    return (mask.mask_mod, None) if mask.block_mask is None else (None, mask.block_mask)


def _checked(name: str, tensor: torch.Tensor, shape: tuple[int, int, int, int]) -> torch.Tensor:
    """`tensor`, if it broadcasts to scores of `shape`; it may reach further than the keys do, as masks for static caches do."""
    fits = tensor.dim() == 4 and all(have == 1 or have == want for have, want in zip(tensor.shape[:3], shape[:3], strict=True))
    if not fits or (tensor.shape[3] != 1 and tensor.shape[3] < shape[3]):
        raise ValueError(f"{name} of shape {tuple(tensor.shape)} does not broadcast to the scores (B, H, Q_LEN, KV_LEN) = {shape}")
    if not tensor.dtype.is_floating_point and (tensor.dtype != torch.bool or name == "position_bias"):
        raise TypeError(f"{name} has dtype {tensor.dtype}; it must be floating" + " or bool" * (name == "attention_mask"))
    return tensor


def _dense_mask(attention_mask: torch.Tensor) -> Callable:
    attention_mask, at = without_ones(attention_mask)

    def dense_mask(b, h, q_idx, kv_idx):
        return attention_mask[at(b, h, q_idx, kv_idx)]

    return dense_mask


def _score_mod(softcap: float | None, terms: list[torch.Tensor]) -> Callable | None:
    """The score_mod that caps a score and adds terms to it, or None."""
    if softcap is None and not terms:
        return None
    biases = [without_ones(term) for term in terms]

    def score_mod(score, b, h, q_idx, kv_idx):
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        for bias, at in biases:
            score = score + bias[at(b, h, q_idx, kv_idx)]
        return score

    return score_mod


register()

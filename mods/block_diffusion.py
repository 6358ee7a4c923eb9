"""Block diffusion: text generated block by block, autoregressive between blocks, by diffusion inside them.

    block_causal:     query i sees key j  if  block(j) <= block(i)                       block(i) = i // block
    block_diffusion:  of a sequence of noisy tokens and, behind them, the same tokens clean,
                      noisy i sees noisy j  if  block(j) == block(i)      noisy i sees clean j  if  block(j) < block(i)
                      clean i sees clean j  if  block(j) <= block(i)

Arriola et al. 2025 (arXiv 2503.09573): `block_diffusion` trains all blocks in one pass, each given the clean ones before it;
`block_causal` is for sampling, and for the other models that read blocks both ways.
"""

from __future__ import annotations

from torch import Tensor

from ._arguments import MaskMod, whole_number
from ._made import picklable


@picklable
def block_causal(block: int) -> MaskMod:
    """Causal between blocks, both ways inside one.

    Args:
        block: number of positions of a block, at least 1; 1 is `causal`.

    Returns:
        mask_mod: (b, h, q_idx, kv_idx), 0-dim integers -> 0-dim bool.

    Raises:
        TypeError: `block` is not an int.
        ValueError: `block` is below 1.

        create_block_mask(block_causal(32), B=None, H=None, Q_LEN=4096, KV_LEN=4096)
    """
    block = whole_number("block_causal", "block", block, "pass the number of positions of a block", minimum=1)

    def block_causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx // block <= q_idx // block

    return block_causal


@picklable
def block_diffusion(length: int, block: int) -> MaskMod:
    """The training mask: positions 0 .. length - 1 are the noisy tokens, the next `length` the clean ones.

    Args:
        length: number of tokens, at least 1; Q_LEN and KV_LEN are ``2 * length``.
        block: number of tokens of a block, at least 1; the last one may be shorter.

    Returns, Raises: as `block_causal`.

        create_block_mask(block_diffusion(4096, 32), B=None, H=None, Q_LEN=8192, KV_LEN=8192)
    """
    recipe = "block_diffusion"
    length = whole_number(recipe, "length", length, "pass the number of noisy tokens, before the clean ones", minimum=1)
    block = whole_number(recipe, "block", block, "pass the number of tokens of a block", minimum=1)

    def block_diffusion(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        clean_q, clean_k = q_idx >= length, kv_idx >= length
        noisy = (kv_idx // block == q_idx // block) & (q_idx < length) & (kv_idx < length)
        across = ((kv_idx - length) // block < q_idx // block) & (q_idx < length) & clean_k
        clean = ((kv_idx - length) // block <= (q_idx - length) // block) & clean_q & clean_k
        return noisy | across | clean

    return block_diffusion

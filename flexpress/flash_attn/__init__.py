"""flash_attn's functions under flash_attn's names: change `from flash_attn import ...` to `from flexpress.flash_attn import ...`.

Which arguments mean the same, which differ and which are refused is listed in docs/flash_attn.md. The three functions of flash_attn's older
Triton file, with a bias and a causal mask that starts in the top left corner, are in flexpress.flash.
"""

# The files of this folder:
#
#     flash_attn_interface, kvcache, bert_padding    flash_attn's own, by its names
#     meaning, tables                                what its arguments mean to Flexpress; lengths and tables, looked at

from flexpress.flash_attn import bert_padding, flash_attn_interface
from flexpress.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flexpress.flash_attn.kvcache import flash_attn_with_kvcache

__all__ = [
    "bert_padding",
    "flash_attn_func",
    "flash_attn_interface",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

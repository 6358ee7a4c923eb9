"""The operators of torch.library. Importing flexpress registers them.

attention_operators, probability_operators    attention, and what is told of its probabilities
mask_operators, cache_operators               those of masks, and of caches
"""

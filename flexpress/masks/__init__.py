"""Masks, and the lists of blocks that they are made of.

mask_mods, mask_creation       mask_mods, and masks made of them
block_mask, mask_attributes    BlockMask, and what users read of it
mask_lists, given_lists        what it is made of: lists that were made, or are a user's
block_lists, slices            block lists made safe, turned and regridded; parts of a mask
foreign_masks, opened_masks    torch's masks; masks taken apart for torch's compiler
"""

"""The batch of a serving step: what flexpress.sequences and flexpress.serving_ops are made of.

step_view, step_tensors, token_ids    a step's sequences, their tensors, their tokens
attention_info, layer_step            what a layer is told, and what it does
"""

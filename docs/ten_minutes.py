"""The first ten minutes: the blocks of docs/ten_minutes.md, one after another. A test keeps both alike and runs this."""

# 1. Attention

import torch

from flexpress import flex_attention

device = "cuda" if torch.cuda.is_available() else "cpu"
S = 2048 if device == "cuda" else 128
q, k, v = torch.randn(3, 1, 4, S, 64, device=device).unbind()

out = flex_attention(q, k, v)
torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v), atol=1e-2, rtol=1e-2)

# 2. A first mask

window = S // 4


def nearby(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < window)


out = flex_attention(q, k, v, mask_mod=nearby)

slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)


def alibi(score, b, h, q_idx, kv_idx):
    return score + slopes[h] * (kv_idx - q_idx)


out = flex_attention(q, k, v, score_mod=alibi, mask_mod=nearby)

# 3. A picture

from flexpress import create_block_mask, plot_mask

mask = create_block_mask(nearby, None, None, S, S, device=device, BLOCK_SIZE=S // 8)
print(mask)
plot_mask(mask, path="mask.png")
torch.testing.assert_close(flex_attention(q, k, v, alibi, mask), out, atol=1e-3, rtol=1e-3)

# 4. Gradients

slopes.requires_grad_()
flex_attention(q, k, v, score_mod=alibi, mask_mod=nearby).square().sum().backward()
print("gradient of the slopes:", slopes.grad)

# 5. Which kernel, and why

import flexpress

print(flexpress.explain(q, k, v, alibi, mask_mod=nearby))
kernel = next(path for path in flexpress.printed_kernels() if "forward_alibi_nearby" in path.name)
print(kernel, "has the line:", next(line for line in kernel.read_text().splitlines() if "slopes[h]" in line).strip())

try:
    flex_attention(q, k, v, score_mod=lambda score, b, h, q_idx, kv_idx: score + torch.randn(()))
except flexpress.ModError as error:
    print("refused:", error)

# 6. A kernel to take away

import importlib.util

flexpress.export(q, k, v, score_mod=alibi, mask_mod=nearby, backward=False, path="nearby.py", overwrite=True)
spec = importlib.util.spec_from_file_location("nearby", "nearby.py")
exported = importlib.util.module_from_spec(spec)
spec.loader.exec_module(exported)

with torch.no_grad():
    theirs = exported.attention(q, k, v, slopes=slopes, window=window)
torch.testing.assert_close(theirs, out, atol=1e-3, rtol=1e-3)

# 7. In a Hugging Face model

from transformers import LlamaConfig, LlamaForCausalLM

import flexpress.integrations.transformers

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes)).to(device).eval()
prompt = torch.randint(1, 100, (1, 20), device=device)
expected = model(prompt).logits

model.set_attn_implementation("flexpress")
torch.testing.assert_close(model(prompt).logits, expected, atol=1e-2, rtol=1e-2)
print("generated:", model.generate(prompt, max_new_tokens=4, do_sample=False)[0, 20:].tolist())

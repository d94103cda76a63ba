"""A Hugging Face Llama (tiny, random weights) with fkjit's layers: as before, in fewer launches."""

import torch
import transformers

import fkjit.models

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
model = transformers.LlamaForCausalLM(config).to(device, torch.float16).eval()
prompt = torch.tensor([[5, 12, 60, 33]], device=device)
with torch.no_grad():
    before = model(prompt).logits

print(fkjit.models.patch(model))
with torch.no_grad():
    after = model(prompt).logits
    text = model.generate(prompt, max_new_tokens=2, do_sample=False, pad_token_id=0)
torch.testing.assert_close(after, before, atol=2e-2, rtol=0)
print("generated:", text[0, prompt.shape[1] :].tolist())

fkjit.models.unpatch(model)

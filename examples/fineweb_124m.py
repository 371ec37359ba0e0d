# GPT-2 124M on FineWeb-Edu, the setting that many people first try on a 12 GB card.
# A nanoGPT config: oomph reads it, never runs it.

dataset = 'fineweb_edu'
dataset_tokens = 3_680_000_000  # ours: what train.bin holds, for epochs

batch_size = 16                  # sequences to one micro-step
gradient_accumulation_steps = 32
block_size = 1024                # 16 * 32 * 1024 = 524,288 tokens to one optimizer step

n_layer = 12
n_head = 12
n_embd = 768

learning_rate = 3e-4
max_iters = 20000                # 10.5 B tokens
lr_decay_iters = max_iters
warmup_iters = 500
eval_interval = 500

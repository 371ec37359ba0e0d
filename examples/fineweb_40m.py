# A 40M GPT, 12 layers of width 384, on the same data and the same batch: it fits a 12 GB card.

dataset = 'fineweb_edu'
dataset_tokens = 3_680_000_000  # ours: what train.bin holds, for epochs

batch_size = 16                  # sequences to one micro-step
gradient_accumulation_steps = 32
block_size = 1024                # 16 * 32 * 1024 = 524,288 tokens to one optimizer step

n_layer = 12
n_head = 12
n_embd = 384

learning_rate = 1e-3
max_iters = 20000                # 10.5 B tokens
lr_decay_iters = max_iters
warmup_iters = 500
eval_interval = 500

"""Texts in the formats that people have, written for the tests: logs, out-of-memory messages, screens."""

from __future__ import annotations


def lines(template: str, count: int = 6, first: int = 1) -> str:
    """So many lines of a template: {n} is the step, {loss} a loss that falls."""
    return "".join(
        template.format(n=first + index, loss=4.0 - 0.1 * index, ten=10 * (first + index)) + "\n"
        for index in range(count)
    )


# Format: (text, program, steps, the last loss, milliseconds a step or None).
LOGS: dict[str, tuple[str, str | None, int, float, float | None]] = {
    "nanoGPT": (lines("iter {n}: loss {loss:.4f}, time 250.00ms, mfu 12.90%"), "nanogpt", 6, 3.5, 250),
    "nanochat": (
        lines(
            "step {n:05d}/21400 (0.05%) | loss: {loss:.6f} | lrm: 1.00 | dt: 250.00ms | tok/sec: 424,675 | "
            "bf16_mfu: 47.21 | epoch: 1 | total time: 12.34m | eta: 400.1m"
        ),
        "nanochat", 6, 3.5, 250,
    ),
    "build-nanogpt": (
        lines("step {n:5d} | loss: {loss:.6f} | lr 6.0000e-04 | norm: 0.3123 | dt: 250.00ms | tok/sec: 1564480.12"),
        "build-nanogpt", 6, 3.5, 250,
    ),
    "llm.c": (
        lines(
            "step {n:4d}/18865 | loss {loss:.6f} (+nanz)| norm 15.2100 (+nanz)| lr 8.57e-07 | 250.00 ms | "
            "59.3% bf16 MFU | 223,522 tok/s"
        ),
        "llm.c", 6, 3.5, 250,
    ),
    "modded-nanogpt": (
        lines("step:{n}/1530 train_loss:{loss:.4f} train_time:{ten}ms step_avg:250.00ms"),
        "modded-nanogpt", 6, 3.5, 250,
    ),
    "torchtitan": (
        lines(
            "[rank0]:[titan] 2026-06-16 22:30:50,322 - root - INFO - step: {n:2d}  loss: {loss:8.4f}  memory: "
            "49.66GiB(52.28%)  tps: 5,856  tflops: 339.16  mfu: 34.29%"
        ),
        "torchtitan", 6, 3.5, None,
    ),
    "Trainer's dicts": (
        lines("{{'loss': {loss:.4f}, 'grad_norm': 1.2, 'learning_rate': 4.5e-06, 'epoch': 0.{n}6}}"),
        "transformers", 6, 3.5, None,
    ),
    "Trainer's bar and dicts": (
        lines(
            "  1%|▏         | {ten}/900 [00:30<45:00,  4.00it/s]\r"
            "{{'loss': {loss:.4f}, 'learning_rate': 4.5e-06, 'epoch': 0.0{n}}}"
        ),
        "transformers", 6, 3.5, 250,
    ),
    "trainer_state.json": (
        '{\n  "global_step": 60,\n  "log_history": [\n'
        + lines('    {{\n      "epoch": 0.0{n},\n      "loss": {loss:.4f},\n      "step": {ten}\n    }},')
        + '  ],\n  "max_steps": 900\n}\n',
        "transformers", 6, 3.5, None,
    ),
    "trainer_log.jsonl": (
        lines('{{"current_steps": {ten}, "total_steps": 900, "loss": {loss:.4f}, "elapsed_time": "0:00:0{n}"}}'),
        None, 6, 3.5, 100,
    ),
    "axolotl": (
        lines("{{'loss': {loss:.4f}, 'grad_norm': 9.5, 'memory/max_mem_active(gib)': 25.45, 'epoch': {n}.0}}"),
        "transformers", 6, 3.5, None,
    ),
    "litgpt": (
        lines("Epoch 1 | iter {ten} step {n} | loss train: {loss:.3f}, val: n/a | iter time: 250.00 ms (step)"),
        "litgpt", 6, 3.5, 250,
    ),
    "Lightning's bar": (
        lines("Epoch 0:  1%|▏ | {ten}/1000 [00:10<01:30,  4.00it/s, v_num=0, train_loss={loss:.2f}]"),
        None, 6, 3.5, 250,
    ),
    "Lightning's metrics.csv": (
        "epoch,step,train_loss_step,val_loss\n" + lines("0,{ten},{loss:.4f},"), None, 6, 3.5, None,
    ),
    "Megatron-LM": (
        lines(
            " [2026-05-01 10:00:00] iteration {n:8d}/  250000 | consumed samples: 124928 | elapsed time per iteration "
            "(ms): 250.0 | learning rate: 9.150E-06 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 0.231 |"
        ),
        "Megatron-LM", 6, 3.5, 250,
    ),
    "DeepSpeed": (lines("steps: {n} loss: {loss:.4f} iter time (s): 0.250 samples/sec: 25.9"), None, 6, 3.5, 250),
    "llama2.c": (lines("{n} | loss {loss:.4f} | lr 4.9e-05 | 250.00ms | mfu 0.21%"), None, 6, 3.5, 250),
    "W&B export": (
        '"Step","run-7 - train/loss","run-7 - train/loss__MIN"\n' + lines('"{n}","{loss:.4f}","1.0"'),
        None, 6, 3.5, None,
    ),
    "notebook": ("Step\tTraining Loss\n" + lines("{n}\t{loss:.4f}"), None, 6, 3.5, None),
    "Markdown": ("| Step | Training Loss |\n|---|---|\n" + lines("| {n} | {loss:.4f} |"), None, 6, 3.5, None),
    "key=value": (lines("step={n} train_loss={loss:.4f} lr=0.001 step_time=0.25s"), None, 6, 3.5, 250),
    "OLMo": (
        lines(
            "[2026-04-17 09:42:26] INFO     [olmo.train:816, rank=0] [step={n}/739328]\n    train/CrossEntropyLoss="
            "{loss:.4f}\n    train/Perplexity=76,631\n    throughput/device/tokens_per_second=45,538"
        ),
        "OLMo", 6, 3.5, None,
    ),
    "verl": (
        lines(
            "(TaskRunner pid=16292) step:{n} - global_seqlen/min:538646.000 - actor/kl_loss:0.001 - actor/pg_loss:"
            "{loss:.4f} - actor/grad_norm:0.069 - perf/max_memory_allocated_gb:25.921 - timing_s/step:0.250"
        ),
        None, 6, 3.5, 250,
    ),
    "epochs of steps": (
        lines("Epoch 1/2, Step {n}/6, Loss: {loss:.4f}") + lines("Epoch 2/2, Step {n}/6, Loss: 3.5"),
        None, 12, 3.5, None,
    ),
}  # fmt: skip

OOMS = {
    "others": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.64 "
        "GiB of which 10.50 MiB is free. Process 4711 has 20.10 GiB memory in use. Including non-PyTorch memory, this "
        "process has 3.52 GiB memory in use. Of the allocated memory 3.00 GiB is allocated by PyTorch, and 20.00 MiB "
        "is reserved by PyTorch but unallocated."
    ),
    "beside": (
        "RuntimeError: CUDA out of memory. Tried to allocate 1.69 GiB (GPU 0; 14.56 GiB total capacity; 650.00 MiB "
        "already allocated; 1.31 GiB free; 1.01 GiB reserved in total by PyTorch)"
    ),
    "request": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 GiB. GPU 0 has a total capacity of 14.75 "
        "GiB of which 5.48 GiB is free. Process 15 has 9.27 GiB memory in use. Of the allocated memory 8.79 GiB is "
        "allocated by PyTorch, and 351.89 MiB is reserved by PyTorch but unallocated."
    ),
    "fragments": (
        "RuntimeError: CUDA out of memory. Tried to allocate 2.87 GiB (GPU 0; 14.76 GiB total capacity; 8.77 GiB "
        "already allocated; 19.75 MiB free; 13.71 GiB reserved in total by PyTorch)"
    ),
    "refused": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 128.00 MiB (GPU 0; 44.99 GiB total "
        "capacity; 6.15 GiB already allocated; 37.32 GiB free; 6.15 GiB reserved in total by PyTorch)"
    ),
    "spilled": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacty of "
        "8.00 GiB of which 0 bytes is free. Of the allocated memory 22.44 GiB is allocated by PyTorch, and 3.16 MiB is "
        "reserved by PyTorch but unallocated."
    ),
    "limit": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 23.64 "
        "GiB of which 18.00 GiB is free. 5.91 GiB allowed; Including non-PyTorch memory, this process has 5.50 GiB "
        "memory in use. Of the allocated memory 5.00 GiB is allocated by PyTorch, and 20.00 MiB is reserved by PyTorch "
        "but unallocated."
    ),
    "mps": (
        "RuntimeError: MPS backend out of memory (MPS allocated: 9.57 GiB, other allocations: 17.35 GiB, max allowed: "
        "27.20 GiB). Tried to allocate 292.50 MiB on private pool."
    ),
    "machine": "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.",
    "library": "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "activations": (
        "RuntimeError: NPU out of memory. Tried to allocate 386.00 MiB (NPU 2; 60.97 GiB total capacity; 59.57 GiB "
        "already allocated; 59.57 GiB current active; 16.54 MiB free; 60.06 GiB reserved in total by PyTorch)"
    ),
}
KILLED = (
    "Out of memory: Killed process 77 (python) total-vm:87033376kB, anon-rss:60356340kB, file-rss:0kB",
    "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=191.batch cgroup.",
    "srun: error: gpu20: task 0: Out Of Memory",
)
ELSEWHERE = {  # library: message
    "torch": "Tried to allocate 20.00 MiB (GPU 0; 1.96 GiB total capacity; 1.24 GiB already allocated; 2.88 MiB free)",
    "XLA": "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 6291456 bytes.",
    "XLA ": "RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 15.65G. There are 11.08G free.",
    "TensorFlow": "OOM when allocating tensor with shape[16,112,112,147] and type float on GPU:0",
}

SCREENS = {  # tool: (text, used and total MiB of GPU 0, cards)
    "driver 375": (
        "|   0  GeForce GTX 1080    Off  | 0000:01:00.0      On |                  N/A |\n"
        "| 27%   35C    P8    10W / 180W |    364MiB /  8113MiB |      0%      Default |\n",
        (364, 8113), 1,
    ),
    "driver 595, two cards": (
        "|   0  NVIDIA GeForce RTX 3090        On  |   00000000:01:00.0  On |                  N/A |\n"
        "|  0%   38C    P8             23W /  420W |     830MiB /  24576MiB |      9%      Default |\n"
        "|   1  NVIDIA GeForce RTX 3090        On  |   00000000:02:00.0 Off |                  N/A |\n"
        "|  0%   28C    P8             14W /  350W |      37MiB /  24576MiB |      0%      Default |\n",
        (830, 24576), 2,
    ),
    "Windows": (
        "|   0  NVIDIA GeForce RTX 3060      WDDM  |   00000000:01:00.0  On |                  N/A |\n"
        "| N/A   45C    P0             N/A /  N/A  |    5012MiB /  12288MiB |      3%      Default |\n"
        "|    0   N/A  N/A      1234    C+G   ...\\explorer.exe                             N/A      |\n",
        (5012, 12288), 1,
    ),
    "-q": (
        "GPU 00000000:01:00.0\n    Product Name                          : GeForce GTX 780\n    FB Memory Usage\n"
        "        Total                             : 3022 MiB\n        Used                              : 418 MiB\n"
        "    BAR1 Memory Usage\n        Total                             : 128 MiB\n"
        "        Used                              : 3 MiB\n    Temperature\n"
        "        GPU Current Temp                  : 35 C\n",
        (418, 3022), 1,
    ),
    "-q -x": (
        '<nvidia_smi_log>\n<gpu id="00000000:01:00.0">\n\t<product_name>GeForce GTX 780</product_name>\n'
        "\t<fb_memory_usage>\n\t\t<total>3022 MiB</total>\n\t\t<used>418 MiB</used>\n\t</fb_memory_usage>\n"
        "\t<bar1_memory_usage>\n\t\t<total>128 MiB</total>\n\t\t<used>3 MiB</used>\n\t</bar1_memory_usage>\n</gpu>\n",
        (418, 3022), 1,
    ),
    "--query-gpu without an index": (
        "name, memory.total [MiB], memory.used [MiB], utilization.gpu [%]\n"
        "GeForce GTX 1080 Ti, 11175 MiB, 2856 MiB, 36 %\nGeForce GTX 1060 6GB, 6078 MiB, 4 MiB, 0 %\n",
        (2856, 11175), 2,
    ),
    "gpustat": ("[0] NVIDIA TITAN X | 77°C,  96 % | 11848 / 12287 MB | me:python/52046(11821M)\n", (11848, 12287), 1),
    "nvitop": (
        "│   0  GeForce RTX 3090     Off  │ 00000000:01:00.0 Off │                  N/A │\n"
        "│ 30%   45C    P2    100W / 350W │  12.00GiB / 24.00GiB │     98%      Default │\n",
        (12288, 24576), 1,
    ),
    "rocm-smi": (
        "GPU[0]          : VRAM Total Memory (B): 4278190080\n"
        "GPU[0]          : VRAM Total Used Memory (B): 108003328\n",
        (103, 4080), 1,
    ),
}  # fmt: skip

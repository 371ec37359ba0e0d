"""What a log prints once: settings, counts, the number of processes, and the program that writes it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from oomph.config.keys import keys
from oomph.config.programs import GPT2_SHAPES
from oomph.config.reading.expression import parse_text
from oomph.runs.reading.builder import Builder

# --- key = value -------------------------------------------------------------------------------------

_ASSIGNMENT = re.compile(r"^\s*(?:Overriding: )?([a-z][a-z0-9_]{1,40}) ?= ?(\S.{0,400})$")
_ARGUMENT = re.compile(r"--([a-z][a-z0-9_-]{1,40})[= ](\"[^\"]*\"|'[^']*'|[^\s-]\S{0,200})")
_ITEM = re.compile(r"['\"]([a-z][a-z0-9_]{1,40})['\"]: ('[^']{0,200}'|\"[^\"]{0,200}\"|[^,}\s]{1,40})")
_DOTTED = re.compile(
    r"^(?:\[\w+\]:)?\s{1,4}([a-z][a-z0-9_]{1,40}) \.{4,}\s?(\S{1,40}?)(?:\.{2,}(?:updated|default))?\s*$"
)
_TELLING = frozenset(
    (
        *("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "global_batch_size"),
        *("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_iters", "padded_vocab_size"),
        *("model_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "pipe_parallel_size"),
        *("precision", "params_dtype", "optimizer_type"),
    )
)
LEAST_ARGUMENTS = 3  # known keys in a line that does not name the program
_TORCH = re.compile(
    r"(?:\btorch(?: version)?[ =:]{1,3}|PyTorch (?:version:? )?)v?(\d\.\d{1,2}(?:\.\d{1,2})?(?:\+\w{1,8})?)\b"
)


def assignment(builder: Builder, line: str) -> None:
    """`key = value`, as in a config file, for a known config key."""
    match = _ASSIGNMENT.match(line)
    if match is None or match[1] not in keys() or line.startswith("        "):
        return
    key, text = match[1], match[2]
    if line.lstrip().startswith("Overriding: "):  # nanoGPT prints strings without quotes here
        value: object = parse_text(keys()[key], text.strip())
    else:
        value = _value(builder, text)
    if value is None:
        return  # a line of code, not of a config
    if not builder.setting(key, value):
        builder.cannot_read(f"a value of {key}", line)
    elif line.lstrip().startswith("Overriding: "):
        builder.event("config", line)


def _value(builder: Builder, text: str) -> object:
    """The value of an expression that may use earlier settings by name; None if it cannot be evaluated."""
    import ast

    from oomph.config.reading.expression import ExpressionError, UndecidableError, evaluate, parse

    known = {name: setting.value for name, setting in builder.run.settings.items()}
    try:
        body = parse(text).body
        if len(body) == 1 and isinstance(body[0], ast.Expr):
            return evaluate(body[0].value, {**_defaults(), **known})
    except (ExpressionError, UndecidableError):
        pass
    return None


def _defaults() -> dict[str, object]:
    return {name: key.default for name, key in keys().items() if key.default is not None}


_YAML = re.compile(r"^\s{0,4}([a-z][a-z0-9_]{1,40}): (\d[\d.e-]{0,15}|true|false|bfloat16|float16|float32)\s*$")


def yaml(builder: Builder, line: str) -> None:
    """A line of a printed YAML config: "batch_size: 4"."""
    match = _YAML.match(line)
    if match is not None and match[1] in keys():
        text = {"true": "True", "false": "False"}.get(match[2], match[2])
        builder.setting(match[1], parse_text(keys()[match[1]], text))


def printed_dict(builder: Builder, line: str) -> None:
    """A config printed as a Python dict or a JSON object."""
    for name, text in _ITEM.findall(line):
        key = {"sequence_len": "block_size"}.get(name, name)  # nanochat's
        if key in keys() and text not in ("None", "null"):
            text = {"true": "True", "false": "False"}.get(text, text)
            builder.setting(key, parse_text(keys()[key], text))


def command(builder: Builder, line: str) -> None:
    """The command that started the run: `python train.py config/x.py --batch_size=8`, or its arguments alone."""
    found = [(name.replace("-", "_"), text) for name, text in _ARGUMENT.findall(line)]
    ours = "train.py " in line or "base_train " in line
    if not ours and sum(key in keys() for key, _ in found) < LEAST_ARGUMENTS:
        return
    for key, text in found:
        if key in keys() and not builder.setting(key, parse_text(keys()[key], text)):
            builder.cannot_read(f"a value of {key}", line)


def dotted(builder: Builder, line: str) -> None:
    """Megatron's and GPT-NeoX's arguments: "num_layers ........ 44.......updated". Their models are not planned."""
    match = _DOTTED.match(line)
    if match is None:
        return
    if match[1] == "world_size" and match[2].isdecimal():
        builder.setting("world_size", int(match[2]))
    elif match[1] in _TELLING:
        builder.event("argument", f"{match[1]} = {match[2]}")


def torch_version(builder: Builder, line: str) -> None:
    if match := _TORCH.search(line):
        builder.setting("torch_version", match[1])


# --- how many processes ------------------------------------------------------------------------------

_WORKERS = re.compile(r"--(?:nproc[_-]per[_-]node|num_processes|num_gpus)[= ](\d{1,4})\b")
_NODES = re.compile(r"--nnodes[= ](\d{1,4})\b")
_WORLD = re.compile(
    r"(?:world[_ ]size|WORLD_SIZE|num_processes|num processes|Num processes|number of (?:GPUs|processes)|"
    r"Num GPUs(?: used)?|ddp_world_size|n_gpus)\b['\"]?[ )]*[:=|]{0,2} *(\d{1,5})\b"
)
_REPLICAS = re.compile(r"data[ -]parallel[ -]size\b['\"]?[ )]*[:=|]{0,2} *(\d{1,5})\b")
_RANK = re.compile(r"^\W{0,3}(?:rank|default|Rank )(\d{1,4})\W{1,3}")
_CARDS = re.compile(r"\b(\d{1,4}) ?[x×] ?(?:NVIDIA )?(?:[AHBLV]\d{2,3}|RTX|GeForce|MI\d{3}|GH200|GB200)", re.I)


def workers(builder: Builder, line: str) -> None:
    """The number of processes, stated by a launcher, a program or a person."""
    if match := _WORKERS.search(line):
        nodes = _NODES.search(line)
        builder.setting("world_size", int(match[1]) * (int(nodes[1]) if nodes else 1))
    elif match := _WORLD.search(line):
        if 1 < int(match[1]) <= 16384:  # 1 is the default in printed code
            builder.setting("world_size", int(match[1]))
    elif (match := _REPLICAS.search(line) or _CARDS.search(line)) and "world_size" not in builder.run.settings:
        builder.setting("world_size", int(match[1]))


def rank(builder: Builder, line: str) -> None:
    """A launcher's label before a line: "[rank3]: …"."""
    if (match := _RANK.match(line)) and len(builder.run.ranks) < 4096:
        builder.run.ranks.add(int(match[1]))


def ranks(builder: Builder, label: str, text: str) -> None:
    """The ranks on many labelled lines, if they are numbered without a gap."""
    known = builder.run.ranks
    for number in range(4096):
        if number not in known and f"{label}{number}" not in text:
            break
        known.add(number)


# --- lines of programs -------------------------------------------------------------------------------

_WHOLE = r"([\d,]{1,24})"
# A pattern, and the config keys of its groups.
_SETTINGS: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = (
    (re.compile(r"[Vv]ocab size: ([\d,]{1,16})"), ("vocab_size",)),
    (re.compile(r"Tokens / micro-batch / rank: (\d{1,9}) x (\d{1,9}) = "), ("batch_size", "block_size")),
    (re.compile(r"=> (?:calculated )?gradient accumulation steps: (\d{1,9})"), ("gradient_accumulation_steps",)),
    (re.compile(r"Gradient [Aa]ccumulation steps = (\d{1,9})"), ("gradient_accumulation_steps",)),
    (re.compile(r"[Bb]atch size per (?:device =|GPU:) +(\d{1,9})"), ("batch_size",)),
    (re.compile(r"number of iterations[^:]{0,60}(?::param ratio)?: ([\d,]{1,20})"), ("max_iters",)),
    (re.compile(r"\| micro batch size B +\| (\d{1,9}) +\|"), ("batch_size",)),  # llm.c
    (re.compile(r"\| sequence length T +\| (\d{1,9}) +\|"), ("block_size",)),
    (re.compile(r"COMPUTE_DTYPE: torch\.(bfloat16|float16|float32)"), ("dtype",)),
    (re.compile(r"found vocab_size = (\d{1,10})"), ("vocab_size",)),
    (re.compile(r"defaulting to vocab_size of GPT-2 to (\d{1,10})"), ("vocab_size",)),
    (re.compile(r"forcing vocab_size=(\d{1,10}), block_size=\d{1,10}, bias=(True|False)"), ("vocab_size", "bias")),
    (re.compile(r"^num_layers: (\d{1,9})\s*$"), ("n_layer",)),
    (re.compile(r"^model_dim: (\d{1,9})\s*$"), ("n_embd",)),
    (re.compile(r"^num_heads: (\d{1,9})\s*$"), ("n_head",)),
    (re.compile(r'^\s*"sequence_len": (\d{1,10}),?\s*$'), ("block_size",)),
    (re.compile(r'^\s*"vocab_size": (\d{1,10}),?\s*$'), ("vocab_size",)),
    (re.compile(r'^\s*"n_layer": (\d{1,10}),?\s*$'), ("n_layer",)),
    (re.compile(r'^\s*"n_head": (\d{1,10}),?\s*$'), ("n_head",)),
    (re.compile(r'^\s*"n_kv_head": (\d{1,10}),?\s*$'), ("n_kv_head",)),
    (re.compile(r'^\s*"n_embd": (\d{1,10}),?\s*$'), ("n_embd",)),
)
# A pattern, and the printed count of its group.
_COUNTS: tuple[tuple[re.Pattern[str], str, type[int] | type[float]], ...] = (
    (re.compile(r"(?:Total batch size|total desired batch size:) ([\d,]{1,20})(?! *\()"), "tokens_per_step", int),
    (re.compile(r"tokens per iteration(?: will be)?: " + _WHOLE), "tokens_per_step", int),
    (re.compile(r"\| total batch size +\| (\d{1,12}) +\|"), "tokens_per_step", int),  # llm.c
    (re.compile(r"number of iterations[^:]{0,60}(?::param ratio)?: ([\d,]{1,20})"), "steps_planned", int),
    (re.compile(r"Total (?:optimization )?steps = ([\d,]{1,20})"), "steps_planned", int),
    (re.compile(r"Number of trainable parameters = ([\d,]{1,20})"), "params_trained", int),
    (re.compile(r"trainable params: ([\d,]{1,20}) \|\| all params"), "params_trained", int),
    (re.compile(r"Trainable parameters = ([\d,]{1,20}) of "), "params_trained", int),  # Unsloth
    (re.compile(r"Trainable parameters = [\d,]{1,20} of ([\d,]{1,20})"), "params_total", int),
    (re.compile(r"\|\| all params: ([\d,]{1,20})(?![\d.,]| ?[KMB]\b)"), "params_total", int),
    (re.compile(r"Estimated FLOPs per token: ([\d.]{1,20}e\+?\d{1,3})"), "flops_per_token", float),
    (re.compile(r"[Pp]eak memory usage: ([\d.,]{1,16}) ?MiB"), "peak_allocated_mib", float),
    (re.compile(r"peak memory (?:consumption|allocated): ([\d.,]{1,16}) ?MiB"), "peak_allocated_mib", float),
)
_PARAMS = re.compile(r"([nN])umber of parameters: (\d[\d.,]{0,20})( ?[MB]\b)?")
_TENSORS = re.compile(r"num (non-)?decayed parameter tensors: ([\d,]{1,12}), with ([\d,]{1,24}) parameters")
_MICRO_BATCHES = re.compile(r"Tokens / micro-batch(?: / rank: \d+ x \d+ =|:) ([\d,]{1,20})")
_BATCHES = re.compile(r"Total train batch size \(.{0,60}\) = ([\d,]{1,12})")
_FUSED = re.compile(r"using fused AdamW: (True|False)")
_FROM_GPT2 = re.compile(r"Initializing from OpenAI GPT-2 weights: (gpt2(?:-medium|-large|-xl)?)\b")
_CARD = re.compile(
    r"GPU: (.{2,60}?) \| Peak FLOPS|Found GPU \d+ (.{2,60}?) (?:with|which)|\| device +\| (NVIDIA .{2,40}?) +\|"
    r"|^\W{0,3}GPU type: (\S.{2,60}?)\s*$"  # transformers env
    r"|name: (.{2,40}?),?(?: pci bus id: \S+)? (?:compute ?[Cc]apability|major: \d)"  # TensorFlow
)
_UNSLOTH = re.compile(r"\\\\\s+/\|\s+(?:GPU: )?(.{3,40}?)\. Num GPUs = (\d+)\. Max memory: ([\d.]+) GB")


def once(builder: Builder, line: str) -> None:
    """A setting or a count printed at the start or the end."""
    for pattern, names in _SETTINGS:
        if match := pattern.search(line):
            for name, text in zip(names, match.groups(), strict=True):
                bare = text.replace(",", "")
                value = int(bare) if bare.isdecimal() else {"True": True, "False": False}.get(text, text)
                builder.setting(name, value)
    for pattern, count, kind in _COUNTS:
        if match := pattern.search(line):
            try:
                setattr(builder.run.printed, count, kind(match[1].replace(",", "")))
            except ValueError:
                builder.cannot_read("a number", line)
    if match := _MICRO_BATCHES.search(line):
        _nanochats_ranks(builder, int(match[1].replace(",", "") or 0), "/ rank" in line)
    if match := _BATCHES.search(line):
        each, steps = (builder.run.settings.get(key) for key in ("batch_size", "gradient_accumulation_steps"))
        total = int(match[1].replace(",", "") or 0)
        if each is not None and steps is not None and type(each.value) is int and type(steps.value) is int:
            of_one: int = each.value * steps.value
            if of_one and total % of_one == 0 and total > of_one:
                builder.setting("world_size", total // of_one)


_PEAK = re.compile(r"max (?:memory )?(allocated|reserved)(?: \((GB|MB)\))?: ([\d.]{1,12})\b")


def peaks(builder: Builder, line: str) -> None:
    """Megatron's "memory (MB) | … max allocated: 5670.39 | … max reserved: …", verl's "max memory allocated (GB): …".

    Both count by 1024.
    """
    printed = builder.run.printed
    for kind, unit, number in _PEAK.findall(line):
        if not unit and "(MB)" not in line:
            continue
        mib = float(number.rstrip(".")) * (1024 if unit == "GB" else 1)
        if kind == "allocated":
            printed.peak_allocated_mib = max(mib, printed.peak_allocated_mib or 0.0)
        else:
            printed.peak_reserved_mib = max(mib, printed.peak_reserved_mib or 0.0)


def _nanochats_ranks(builder: Builder, tokens: int, of_one: bool) -> None:
    """nanochat prints the tokens of a micro-batch on one rank, and on all."""
    if of_one:
        builder.rank_tokens = tokens
    elif builder.rank_tokens and tokens % builder.rank_tokens == 0:
        builder.setting("world_size", tokens // builder.rank_tokens)


def parameters(builder: Builder, line: str) -> None:
    """ "number of parameters: 29.94M"; others' "Number of parameters: 560,988,160"."""
    match = _PARAMS.search(line)
    try:
        number = float(match[2].replace(",", "").rstrip(".")) if match else math.nan
    except ValueError:
        number = math.nan
    if match is None or math.isnan(number):
        builder.cannot_read("a parameter count", line)
        return
    printed = builder.run.printed
    unit = {"M": 1e6, "B": 1e9}.get((match[3] or "").strip(), 1.0)
    if match[1] == "N":
        printed.params_total = round(number * unit)
    else:
        decimals = len(match[2].partition(".")[2])
        printed.params = round(number * unit)
        printed.params_slack = math.ceil(0.5 * unit * 10**-decimals) if unit > 1 else 0


def tensors(builder: Builder, line: str) -> None:
    """ "num decayed parameter tensors: 26, with 30,130,176 parameters", and the same for "non-decayed"."""
    match = _TENSORS.search(line)
    if match is None:
        builder.cannot_read("a count of decayed tensors", line)
        return
    count, numbers = (int(text.replace(",", "") or 0) for text in (match[2], match[3]))
    printed = builder.run.printed
    if match[1]:
        printed.no_decay_tensors, printed.no_decay_params = count, numbers
    else:
        printed.decay_tensors, printed.decay_params = count, numbers


def fused(builder: Builder, line: str) -> None:
    if match := _FUSED.search(line):
        builder.event("optimizer", match[0])
        builder.setting("optimizer_loop", "fused" if match[1] == "True" else None)


def starting(builder: Builder, line: str) -> None:
    """The source of nanoGPT's initial weights."""
    if match := _FROM_GPT2.search(line):
        builder.setting("init_from", match[1])
        for key, value in GPT2_SHAPES[match[1]].items():
            builder.setting(key, value)
    elif "Initializing a new model from scratch" in line:
        builder.setting("init_from", "scratch")


def resuming(builder: Builder, line: str) -> None:
    builder.setting("init_from", "resume")
    builder.event("resume", line)


def compiling(builder: Builder, line: str) -> None:
    builder.setting("compile", True)
    builder.event("compile", line)


def grad_scaler(builder: Builder, line: str) -> None:
    """torch's deprecation warning for GradScaler. nanoGPT builds one for every dtype, so it does not mean float16."""
    if "is enabled, but CUDA is not available" in line or "GradScaler enabled for fp16" in line:
        builder.setting("dtype", "float16")
    builder.event("grad_scaler", line)


def card(builder: Builder, line: str) -> None:
    """ "GPU: NVIDIA H100 80GB HBM3 | Peak FLOPS (BF16): 9.89e+14", and others' ways to name the card."""
    if match := _UNSLOTH.search(line):
        builder.gpu(0).name = match[1]
        builder.setting("world_size", int(match[2]))
        builder.program("unsloth")
    elif match := _CARD.search(line):
        builder.gpu(0).name = next(group for group in match.groups() if group).strip()


def _event(kind: str) -> Callable[[Builder, str], None]:
    return lambda builder, line: builder.event(kind, line)


def _program(name: str) -> Callable[[Builder, str], None]:
    return lambda builder, _: builder.program(name)


def _config_file(builder: Builder, line: str) -> None:
    builder.program("nanogpt")
    builder.event("config", line)


# A text, and the reader of every line that contains it.
READERS: tuple[tuple[str, Callable[[Builder, str], None]], ...] = (
    ("Overriding config with ", _config_file),
    ("=", assignment),
    (" --", command),
    ("--n_", command),
    ("batch_size: ", yaml),
    ("accumulation_steps: ", yaml),
    ("learning_rate: ", yaml),
    ("compile: ", yaml),
    ("'batch_size':", printed_dict),
    ("'n_layer':", printed_dict),
    (" ....", dotted),
    ('"batch_size":', printed_dict),
    ("orch", torch_version),
    ("nproc", workers),
    ("rank", rank),
    ("default", rank),
    ("Rank ", rank),
    ("num_", workers),
    ("orld", workers),
    ("WORLD_SIZE", workers),
    ("Num GPUs", workers),
    ("rocesses", workers),
    ("arallel", workers),
    ("xH100", workers),
    ("xA100", workers),
    ("x H100", workers),
    ("x A100", workers),
    ("tokens per iteration will be", _program("nanogpt")),
    ("lrm:", _program("nanochat")),
    ("Validation bpb:", _program("nanochat")),
    ("%), ~time left", _program("llm.c")),
    ("bf16 MFU |", _program("llm.c")),
    ("step_avg:", _program("modded-nanogpt")),
    ("[titan]", _program("torchtitan")),
    ("Unsloth: ", _program("unsloth")),
    ("Unsloth - ", _program("unsloth")),
    ("/unsloth/models/", _program("unsloth")),
    ("/peft/tuners/", _event("adapters")),
    ("incompatible with gradient checkpointing", _event("checkpointing")),  # transformers, of use_cache
    ("radient checkpointing enabled", _event("checkpointing")),  # LLaMA-Factory
    ("raining completed", _event("finished")),
    ("raining complete!", _event("finished")),
    ("raining finished", _event("finished")),
    ("sglang", _event("serving")),
    ("vllm", _event("serving")),
    ("text_generation_server", _event("serving")),
    ("lmdeploy", _event("serving")),
    ("ggml_", _event("serving")),
    ("elapsed time per iteration (ms)", _program("Megatron-LM")),
    ("| iter time: ", _program("litgpt")),
    ("log_history", _program("transformers")),
    ("RunningAvgSamplesPerSec", _program("DeepSpeed")),
    ("ms, mfu ", _program("nanogpt")),
    ("| norm: ", _program("build-nanogpt")),
    ("umber of parameters:", parameters),
    ("decayed parameter tensors:", tensors),
    ("using fused AdamW:", fused),
    ("Initializing ", starting),
    ("Resuming training from", resuming),
    ("compiling the model...", compiling),
    ("saving checkpoint to ", _event("checkpoint")),
    ("GradScaler", grad_scaler),
    ("GPU", card),
    ("apability", card),
    (" major: ", card),
    ("atch", once),
    ("sequence length", once),
    ("ocab", once),
    ("ccumulation", once),
    ("terations", once),
    ("COMPUTE_DTYPE: ", once),
    ("FLOPs per token: ", once),
    ("eak memory", once),
    ("max allocated: ", peaks),
    ("max memory allocated (", peaks),
    ("arameters = ", once),
    ("params", once),
    ("tokens per iteration", once),
    ("ptimization steps", once),
    ("num_", once),
    ("model_dim: ", once),
    ('": ', once),
)

"""`oomph train` and `oomph sample`. Everything here needs torch (`pip install 'oomph[train]'`).

    import oomph
    result = oomph.train("config/run.toml", resume=True)

Read it in this order: `model`, `loss`, `optimizer`, `trainer` (one step), `loop` (the steps), `run` (the whole).
`setup` has what is decided for this machine, `lora` adapters, `ranks` what concerns several processes.
What happens on `--resume` is described at the top of `start`.
"""

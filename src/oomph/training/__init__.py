"""`oomph train` and `oomph sample`: a plan carried out. Everything here needs torch (`pip install 'oomph[train]'`).

    import oomph
    result = oomph.train("config/run.toml", resume=True)

Read it in this order: `model`, `loss`, `optimizer`, `trainer` (one step), `loop` (the run around the steps), `run`.
"""

"""Log lines to numbers: `reader` gives each line to the module of its format, which fills a `Builder`.

A new format is a module with its own `READERS`, added to `reader.READERS`.
"""

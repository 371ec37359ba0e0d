"""torch.utils.checkpoint under torch.compile: a mark on every operation that backward recomputes.

Dynamo turns a call of `checkpoint` into an operator that marks what runs inside; inductor's partitioner then
duplicates it in backward. The graphs here are captured without dynamo, so the call itself is patched to mark.
Unpatched, it would recompute while the graph is traced, and the copies would be merged with their originals.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch.fx import traceback as fx_traceback
from torch.utils import checkpoint as torch_checkpoint


def _always(*_: Any, **__: Any) -> Any:
    return torch_checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


@contextlib.contextmanager
def marking_checkpoints() -> Iterator[None]:
    """While active, checkpointed functions are marked as dynamo would mark them, selective ones by their own policy."""
    regions = itertools.count()
    generator: Any = torch_checkpoint._checkpoint_without_reentrant_generator
    every: Any = partial(torch_checkpoint.create_selective_checkpoint_contexts, _always)

    def marked(
        fn: Any, _preserve: bool, contexts: Any, check: str, debug: bool, _stop: bool, *args: Any, **kw: Any
    ) -> Any:
        make: Callable[[], Any] = every if contexts is torch_checkpoint.noop_context_fn else contexts

        def numbered() -> Any:
            forward, again = make()
            forward.ac_graph_id = next(regions)
            return forward, again

        # No random state is kept and nothing stops early: inductor repeats random numbers by itself.
        with fx_traceback.preserve_node_meta():  # it ends the mark at the end of the region
            yield from generator(fn, False, numbered, check, debug, False, *args, **kw)

    def apply(fn: Any, _preserve: bool, *args: Any) -> Any:
        return torch_checkpoint.checkpoint(fn, *args, use_reentrant=False)

    reentrant = SimpleNamespace(apply=apply)
    with (
        mock.patch.object(torch_checkpoint, "_checkpoint_without_reentrant_generator", marked),
        mock.patch.object(torch_checkpoint, "CheckpointFunction", reentrant),
    ):
        yield

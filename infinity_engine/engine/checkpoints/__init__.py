"""An engine's run on its way to checkpoints, back from them, and out as weights."""

__all__: list[str] = []

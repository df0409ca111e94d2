"""The machine's facts, and what they mean for training: measures nothing, never imports torch.

`survey` collects the facts, `diagnose` is pure: from facts to findings. They are imported from
their modules, because `diagnose` must work where the native modules, which `survey` needs, cannot
be loaded.
"""

__all__: list[str] = []

"""What this machine has, as plain facts, and what that means for training: never measures, never
imports torch.

`survey` collects the facts, `diagnose` is pure: from facts to findings. They are imported from
their modules, because `diagnose` must work where the native modules, which `survey` needs, cannot
be loaded.
"""

__all__: list[str] = []
